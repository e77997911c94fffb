"""Writes optim.lua and losses.lua beside this script: what PyTorch's optimizers and losses compute, in float64."""

import itertools
import pathlib

import torch
import torch.nn.functional as F

here = pathlib.Path(__file__).parent
torch.set_default_dtype(torch.float64)


def lua(v):
    if isinstance(v, torch.Tensor):
        v = v.tolist()
    if isinstance(v, (list, tuple)):
        return "{" + ", ".join(map(lua, v)) + "}"
    if isinstance(v, dict):
        return "{" + ", ".join(f"{k} = {lua(x)}" for k, x in v.items()) + "}"
    if isinstance(v, bool):
        return str(v).lower()
    if v is None:
        return "nil"
    if isinstance(v, float) and v != v:
        return "0/0"
    return f'"{v}"' if isinstance(v, str) else repr(v)


def write(name, comment, lines):
    head = f"-- Written by make_training.py: {comment}\n-- luacheck: no max line length\nreturn {{\n"
    (here / name).write_text(head + "".join(f"  {line},\n" for line in lines) + "}\n")


# -- optimizers: 20 steps on a fixed problem; b takes part from step `late` on -------------------------------------------


def train(optimizer, options, late):
    a = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    b = torch.tensor([[0.3, -0.7], [1.1, 0.2]], requires_grad=True)
    o = getattr(torch.optim, optimizer)([a, b], **options)
    after = []
    for step in range(1, 21):
        o.zero_grad()
        loss = (a * a * torch.tensor([1.0, 0.5, 2.0])).sum()
        if step >= late:
            loss = loss + ((b * b - 0.5) ** 2).sum() + 0.1 * a.sum() * b.sum()
        loss.backward()
        o.step()
        if step in (1, 2, 5, 20):
            after.append([step, a.tolist(), b.tolist()])
    return after


optimizers = [
    ("SGD", dict(lr=0.05)),
    ("SGD", dict(lr=0.05, weight_decay=0.1)),
    ("SGD", dict(lr=0.05, momentum=0.9)),
    ("SGD", dict(lr=0.05, momentum=0.9, dampening=0.5)),
    ("SGD", dict(lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.01)),
    ("SGD", dict(lr=0.001, momentum=0.5, maximize=True, weight_decay=0.01)),
    ("Adam", dict(lr=0.05)),
    ("Adam", dict(lr=0.05, betas=(0.8, 0.95), eps=1e-3)),
    ("Adam", dict(lr=0.05, weight_decay=0.1)),
    ("Adam", dict(lr=0.1, amsgrad=True)),
    ("Adam", dict(lr=0.02, maximize=True)),
    ("AdamW", dict(lr=0.05)),
    ("AdamW", dict(lr=0.05, weight_decay=0.3, amsgrad=True)),
    ("AdamW", dict(lr=0.02, weight_decay=0.1, maximize=True)),
]
lines = []
for (name, options), late in itertools.product(optimizers, (1, 4)):
    lines.append(f'{{"{name}", {lua(options)}, late = {late}, after = {lua(train(name, options, late))}}}')
write("optim.lua", "parameters a and b after steps of the problem in optim_spec.lua.", lines)

# -- losses -----------------------------------------------------------------------------------------------------------

torch.manual_seed(0)
logits = torch.randn(6, 5).mul(100).round().div(50)
images = torch.randn(2, 3, 4).mul(100).round().div(50)  # (batch, classes, places)
classes = torch.tensor([0, 4, 2, 2, 1, 3])
image_classes = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
weight5 = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5])
weight3 = torch.tensor([0.5, 2.0, 1.0])
shares = torch.softmax(torch.randn(6, 5), 1).mul(1000).round().div(1000)


def result(fn, x, target, options):
    x = x.clone().requires_grad_()
    y = fn(x, target, **options)
    (y * torch.arange(1, y.numel() + 1, dtype=torch.float64).reshape(y.shape)).sum().backward()
    return y.detach(), x.grad


def case(fn, x, target, options):
    y, dx = result(fn, x, target, options)
    shown = dict(options)
    if "ignore_index" in shown:
        shown["ignore_index"] += 1  # classes count from 1
    to = target + 1 if target.dtype == torch.int64 else target
    kind = "int64" if target.dtype == torch.int64 else "float64"
    lines.append(f'{{"{fn.__name__}", {lua(x)}, {lua(to)}, "{kind}", {lua(shown)}, y = {lua(y)}, dx = {lua(dx)}}}')


lines = []
for reduction in ("mean", "sum", "none"):
    base = dict(reduction=reduction)
    for more in (dict(), dict(weight=weight5), dict(ignore_index=2), dict(weight=weight5, ignore_index=2)):
        case(F.nll_loss, torch.log_softmax(logits, 1), classes, base | more)
        for smooth in (dict(), dict(label_smoothing=0.1)):
            case(F.cross_entropy, logits, classes, base | more | smooth)
    for more in (dict(), dict(weight=weight3), dict(ignore_index=1), dict(weight=weight3, ignore_index=1, label_smoothing=0.2)):
        case(F.cross_entropy, images, image_classes, base | more)
    for more in (dict(), dict(weight=weight5), dict(label_smoothing=0.1), dict(weight=weight5, label_smoothing=0.1)):
        case(F.cross_entropy, logits, shares, base | more)
    case(F.cross_entropy, logits[0], classes[1], base)
    case(F.cross_entropy, logits[:2], torch.tensor([2, 2]), base | dict(ignore_index=2))
    case(F.mse_loss, logits, shares, base)
write("losses.lua", "loss, input, target (classes from 1), options, value y and gradient dx of sum(y * (1, 2, ...)).", lines)
