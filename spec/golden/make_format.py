"""Writes format.lua beside this script: how PyTorch prints tensors, in tmod's spelling.

Each case is (Python, Lua, options): two expressions for the same tensor, and settings other than PyTorch's.
The systematic differences are made before PyTorch breaks lines: true for True, dtype=float64 for
dtype=torch.float64, device=meta for device='meta', grad_fn=<mul> for grad_fn=<MulBackward0>.
"""

import pathlib
import re

import torch
from torch import _tensor_str

inf, nan = float("inf"), float("nan")


def spell(suffix):
    suffix = suffix.replace("torch.", "").replace("'", "").replace("True", "true").replace("(,)", "()")
    return re.sub(r"<(\w+)Backward0>", lambda m: "<" + m[1].lower() + ">", suffix)


original = _tensor_str._add_suffixes
_tensor_str._add_suffixes = lambda text, suffixes, *rest, **more: original(text, [spell(s) for s in suffixes], *rest, **more)


def t(values, dtype="float32"):
    """A case from nested lists, the same in both languages."""
    lua = str(values).replace("[", "{").replace("]", "}").replace("inf", "1/0").replace("nan", "0/0")
    lua = lua.replace("True", "true").replace("False", "false")
    return torch.tensor(values, dtype=getattr(torch, dtype)), f'tm.tensor({lua}, {{dtype = "{dtype}"}})'


def arange(n, shape, dtype="float32", scale=1):
    x = (torch.arange(0, n, dtype=torch.float64) * scale).reshape(shape).to(getattr(torch, dtype))
    sizes = ", ".join(map(str, shape))
    return x, f'(tm.arange(0, {n}, 1, {{dtype = "float64"}}) * {scale!r}):reshape({sizes}):to("{dtype}")'


def like(case, python, lua):
    return python(case[0]), lua.replace("$", case[1])


def empty(shape, dtype, device="cpu"):
    sizes = ", ".join(map(str, shape))
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device), f'tm.empty({{{sizes}}}, {{dtype = "{dtype}", device = "{device}"}})'


cases = [
    # numbers without a fraction, with one, of all magnitudes
    t([1.0, 2.0, 3.0]), t([[1.0, 2.5], [-3.25, 4.0]]), t(2.0), t(-0.125), t([0.0]), t([-0.0]), t([0.0, -0.0]), t([]),
    t([1.0, 1000.0]), t([1.0, 1001.0]), t([0.5, 500.0]), t([0.5, 501.0]), t([1e8]), t([100000008.0]), t([99999.5]), t([1e-4]),
    t([9.9e-5]), t([1.5e-5, 0.0]), t([123456789.0, 1.0]), t([1e10, -1e10]), t([1e-10]), t([1e-42]), t([3.4e38, 1.0]),
    t([1e300, 1e-300], "float64"), t([1e100], "float64"), t([0.1, 0.2], "float64"), t([123456.789], "float64"),
    t([2.00005, 3.0]), t([0.99999, 1.0]), t([0.00015, 0.1]),
    # not finite
    t([nan]), t([inf, -inf]), t([nan, 1.0]), t([nan, 1.5]), t([[inf, 1.0], [-inf, 2.0]]), t([nan, 1e10]), t([inf, 0.0]), t([nan, inf, 0.5, -7.25]),
    # other dtypes
    t([1, 2, 3], "int64"), t([[1, -20], [300, 4]], "int64"), t(7, "int64"), t([-128, 127], "int8"), t([0, 255], "uint8"),
    t([1, 2], "int32"), t([-30000], "int16"), t([True, False], "bool"), t(True, "bool"), t([[True, True]], "bool"),
    t([9007199254740992, -1], "int64"), t([1.5, 2.0], "float16"), t([65504.0, 0.5], "float16"), t([1.0, 3.0], "bfloat16"), t([0.1], "bfloat16"),
    # more than one line, more axes
    arange(30, (30,)), arange(30, (30,), "int64"), arange(25, (25,), "float64", 0.37), arange(24, (2, 3, 4)), arange(16, (2, 2, 2, 2), "int64"),
    arange(4, (1, 1, 1, 4)), arange(40, (2, 20), "float32", 12.5), arange(8, (1, 1, 1, 1, 1, 2, 2, 2)), arange(12, (12, 1)), arange(11, (11,), "float64", 1000.5),
    # summarised
    arange(1000, (1000,)), arange(1001, (1001,)), arange(1001, (1001,), "int64"), arange(2000, (40, 50)), arange(2000, (2, 1000)), arange(1200, (300, 4)),
    arange(1200, (4, 300)), arange(2400, (20, 10, 12)), arange(1500, (3, 5, 100), "float64", 0.001), arange(1099, (7, 157)),
    arange(1092, (7, 12, 13), "int64", -3), arange(1024, (2, 2, 2, 2, 2, 2, 4, 4)),
    # no elements, no data
    empty((0,), "float32"), empty((0,), "int64"), empty((0, 3), "float32"), empty((2, 0), "bool"), empty((0, 3), "float64"),
    empty((2, 3), "float32", "meta"), empty((2, 3), "int64", "meta"), empty((), "float16", "meta"), empty((4,), "bool", "meta"), empty((0,), "float32", "meta"),
    # strided
    like(arange(12, (3, 4)), lambda x: x.t(), "$:transpose(1, 2)"), like(t([1.0, 2.5]), lambda x: x.expand(3, 2), "$:expand(3, 2)"),
    like(arange(1200, (30, 40)), lambda x: x.t()[:, 3:], "$:transpose(1, 2):narrow(2, 4, 27)"),
    # gradients
    like(t([1.0, 2.0]), lambda x: x.requires_grad_(), "$:requires_grad_()"), like(t([1.0, 2.0]), lambda x: x.requires_grad_() * 2, "$:requires_grad_() * 2"),
    like(t([[1.5, 2.0]], "float64"), lambda x: x.requires_grad_().exp(), "$:requires_grad_():exp()"),
    like(empty((2, 0), "float64"), lambda x: x.requires_grad_(), "$:requires_grad_()"),
    like(arange(14, (14,), "float64", 0.1), lambda x: x.requires_grad_(), "$:requires_grad_()"),
    like(arange(13, (13,), "float16", 0.1), lambda x: x.requires_grad_(), "$:requires_grad_()"),
    like(arange(7, (7,), "float64", 0.1), lambda x: x.requires_grad_() * 2, "$:requires_grad_() * 2"),
]
settings = [
    (t([1 / 3, 2.0], "float64"), dict(precision=8)), (t([1e-5, 2.0], "float64"), dict(precision=2)), (t([0.5, 2.0]), dict(precision=0)),
    (arange(20, (20,)), dict(threshold=10)), (arange(20, (20,)), dict(threshold=10, edgeitems=1)), (arange(36, (6, 6)), dict(threshold=10, edgeitems=2)),
    (arange(64, (4, 4, 4), "int64"), dict(threshold=10, edgeitems=1)), (arange(20, (20,)), dict(linewidth=30)), (arange(40, (20, 2)), dict(linewidth=10)),
    (arange(60, (60,), "int64"), dict(linewidth=200)), (arange(49, (7, 7)), dict(threshold=48)), (arange(49, (7, 7)), dict(threshold=49)),
]
default = dict(precision=4, threshold=1000, edgeitems=3, linewidth=80)

with open(pathlib.Path(__file__).parent / "format.lua", "w") as out:
    out.write("-- Written by make_format.py: a tensor in Lua, settings, and its text by PyTorch in tmod's spelling.\n")
    out.write('-- luacheck: no max line length\nlocal tm = require "tmod"\n\nreturn {\n')
    for (x, lua), options in [(c, {}) for c in cases] + settings:
        with torch._tensor_str.printoptions(**{**default, **options}):
            text = str(x)
        if x.dtype == torch.bool and x.device.type == "cpu":
            text = text.replace("True", "true").replace("False", "false")
        given = ", ".join(f"{k} = {v}" for k, v in options.items())
        out.write(f"{{function() return {lua} end, {{{given}}}, [==[\n{text}]==]}},\n")
    out.write("}\n")
