"""Writes the *.safetensors files beside this script with the Python library (safetensors 0.8, torch 2).

They are what spec/checkpoint_spec.lua reads, and must write byte for byte. At most one metadata key each:
the library writes several in an order of chance.
"""

import pathlib

import torch
from safetensors.torch import save_file

here = pathlib.Path(__file__).parent
inf, nan = float("inf"), float("nan")

dtypes = {
    "w.bool": torch.tensor([True, False, True]),
    "w.uint8": torch.tensor([[0, 1], [254, 255]], dtype=torch.uint8),
    "w.int8": torch.tensor([-128, -1, 127], dtype=torch.int8),
    "w.int16": torch.tensor([-32768, 32767], dtype=torch.int16),
    "w.int32": torch.tensor([[[-2147483648], [2147483647]]], dtype=torch.int32),
    "w.int64": torch.tensor([-(2**53), 2**53]),
    "w.float16": torch.tensor([-1.5, 65504, 2.0**-24, inf], dtype=torch.float16),
    "w.bfloat16": torch.tensor([-1.5, 2.0**120, nan], dtype=torch.bfloat16),
    "w.float32": torch.tensor([[0.5, -inf, nan], [3.0, 2.0**-149, -0.0]]),
    "w.float64": torch.tensor(0.1, dtype=torch.float64),
    "w.empty": torch.zeros(0, 3),
    "a.float32": torch.tensor([1.0]),
}
save_file(dtypes, here / "dtypes.safetensors", {"format": "pt"})

names = ["z", "a", "layer.10.weight", "layer.9.weight", 'quote " back \\ slash /', "tab\tline\nbell\x07del\x7f", "é 漢 😀", " "]
save_file({n: torch.tensor([i]) for i, n in enumerate(names)}, here / "names.safetensors", {'k"é\n': "\x1f\r\b\f"})

save_file({}, here / "nothing.safetensors")
