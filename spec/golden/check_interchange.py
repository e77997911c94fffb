"""Lets tmod write state dictionaries of the models of interchange.py, loads them into PyTorch and compares outputs.

    python3 check_interchange.py [tmodrun]      default: build/release/bin/tmodrun
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file

from interchange import MODELS

here = pathlib.Path(__file__).parent
tmodrun = sys.argv[1] if len(sys.argv) > 1 else here.parent.parent / "build/release/bin/tmodrun"
with tempfile.TemporaryDirectory() as directory:
    subprocess.run([tmodrun, here / "interchange.lua", directory], check=True)
    io = load_file(pathlib.Path(directory) / "io.safetensors")
    for name, make in MODELS.items():
        model = make()
        model.load_state_dict(load_file(pathlib.Path(directory) / f"{name}.safetensors"))
        model.eval()
        y = model(io[f"{name}.x"])
        torch.testing.assert_close(y, io[f"{name}.y"])
        print(f"{name}: {len(model.state_dict())} entries, outputs differ by at most {(y - io[f'{name}.y']).abs().max():.2g}")
