"""Writes layers.lua beside this script: what PyTorch's layers and losses give, forward and backward, in float64.

A case holds the layer in both languages, inputs, expected outputs and gradients; numbers that Lua cannot spell are
written as 1/0 and 0/0. Positions (targets, ids, dims) count from 1 on the Lua side.
"""

import pathlib

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def spell(v):
    if isinstance(v, torch.Tensor):
        v = v.detach().tolist()
    if isinstance(v, (list, tuple)):
        return "{ " + ", ".join(map(spell, v)) + " }"
    if isinstance(v, dict):
        return "{ " + ", ".join(f"{k} = {spell(x)}" for k, x in v.items()) + " }"
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, str):
        return '"' + v.replace('"', '\\"') + '"'
    if v is None:
        return "nil"
    if v != v:
        return "0/0"
    if v in (float("inf"), float("-inf")):
        return "1/0" if v > 0 else "-1/0"
    return repr(float(v)) if isinstance(v, float) else repr(v)


def seeds(y):
    return torch.linspace(0.5, 1.5, max(y.numel(), 1))[: y.numel()].reshape(y.shape)


inf, nan = float("inf"), float("nan")
plain = torch.tensor([-9.0, -3.5, -3.0, -2.0, -1.0, -0.5, -0.1, -0.0, 0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 3.5, 6.0, 7.0, 20.0, 25.0])
far = torch.tensor([nan, inf, -inf, 1000.0, -1000.0, 1e-30, -1e-30])


def activation(lua, module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(seeds(y))
    return dict(lua=lua, python=str(module), x=x, y=y, dx=x.grad)


ACTIVATIONS = [
    ("nn.ReLU()", nn.ReLU()), ("nn.ReLU6()", nn.ReLU6()), ("nn.Sigmoid()", nn.Sigmoid()), ("nn.Tanh()", nn.Tanh()),
    ("nn.Threshold(0.3, 20)", nn.Threshold(0.3, 20)), ("nn.Hardtanh()", nn.Hardtanh()), ("nn.Hardtanh(-2, 0.5)", nn.Hardtanh(-2, 0.5)),
    ("nn.Hardsigmoid()", nn.Hardsigmoid()), ("nn.Hardswish()", nn.Hardswish()), ("nn.SiLU()", nn.SiLU()), ("nn.Mish()", nn.Mish()),
    ("nn.ELU()", nn.ELU()), ("nn.ELU(2.5)", nn.ELU(2.5)), ("nn.CELU(0.5)", nn.CELU(0.5)), ("nn.SELU()", nn.SELU()),
    ("nn.GELU()", nn.GELU()), ("nn.GELU('tanh')", nn.GELU("tanh")), ("nn.Hardshrink()", nn.Hardshrink()),
    ("nn.Softshrink()", nn.Softshrink()), ("nn.LeakyReLU()", nn.LeakyReLU()), ("nn.LeakyReLU(0)", nn.LeakyReLU(0.0)),
    ("nn.LogSigmoid()", nn.LogSigmoid()), ("nn.Softplus()", nn.Softplus()), ("nn.Softplus(2, 3)", nn.Softplus(2, 3)),
    ("nn.Softsign()", nn.Softsign()), ("nn.Tanhshrink()", nn.Tanhshrink()), ("nn.RReLU():eval()", nn.RReLU().eval()),
]
activations = [activation(lua, m, x) for lua, m in ACTIVATIONS for x in (plain, far)]
grid = torch.randn(2, 4, 3)
activations += [activation(lua, m, grid) for lua, m in [
    ("nn.Softmax(2)", nn.Softmax(1)), ("nn.LogSoftmax(-2)", nn.LogSoftmax(-2)), ("nn.Softmin(3)", nn.Softmin(2)), ("nn.GLU(2)", nn.GLU(1)),
    ("nn.Softmax2d()", nn.Softmax2d())]]


def layer(lua, module, x, state=(), training=True):
    """Outputs, and gradients of input and parameters; parameters and buffers before and after."""
    for k, v in state:
        module.get_parameter(k).data.copy_(v)
    module.train(training)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    y = module(x)
    y.backward(seeds(y))
    grads = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    return dict(lua=lua, training=training, x=x if x.is_floating_point() else x + 1, y=y, dx=x.grad if x.is_floating_point() else None,
                before=before, after=dict(module.state_dict()), grads=grads)


def warm(module, x):
    """Running statistics that are not those of a fresh module."""
    module.train()(x)
    return module


ids = torch.tensor([[0, 2, 2], [4, 1, 2]])
x3, x2 = torch.randn(3, 4, 5) * 2 + 1, torch.randn(6, 4) - 3
layers = [
    layer("nn.LayerNorm(5)", nn.LayerNorm(5), x3, [("weight", torch.randn(5)), ("bias", torch.randn(5))]),
    layer("nn.LayerNorm({4, 5}, {eps = 0.1})", nn.LayerNorm((4, 5), eps=0.1), x3, [("weight", torch.randn(4, 5)), ("bias", torch.randn(4, 5))]),
    layer("nn.LayerNorm(5, {elementwise_affine = false})", nn.LayerNorm(5, elementwise_affine=False), x3),
    layer("nn.LayerNorm(5, {bias = false})", nn.LayerNorm(5, bias=False), x3, [("weight", torch.randn(5))]),
    layer("nn.LayerNorm(4)", nn.LayerNorm(4), x2.t().contiguous().t()),
    layer("nn.BatchNorm1d(4)", nn.BatchNorm1d(4), x3, [("weight", torch.randn(4)), ("bias", torch.randn(4))]),
    layer("nn.BatchNorm1d(4)", nn.BatchNorm1d(4), x2, [("weight", torch.randn(4)), ("bias", torch.randn(4))]),
    layer("nn.BatchNorm1d(4, {momentum = 0.3, eps = 0.01})", warm(nn.BatchNorm1d(4, momentum=0.3, eps=0.01), x2 + 5), x2),
    layer("nn.BatchNorm1d(4)", warm(nn.BatchNorm1d(4), x3), x3 + 1, [("weight", torch.randn(4)), ("bias", torch.randn(4))], training=False),
    layer("nn.BatchNorm1d(4)", warm(nn.BatchNorm1d(4), x2), x2 + 1, training=False),
    layer("nn.BatchNorm1d(4, {momentum = false})", warm(nn.BatchNorm1d(4, momentum=None), x2 + 5), x2),
    layer("nn.BatchNorm1d(4, {affine = false})", nn.BatchNorm1d(4, affine=False), x2),
    layer("nn.BatchNorm1d(4, {track_running_stats = false})", nn.BatchNorm1d(4, track_running_stats=False), x2, training=False),
    layer("nn.Embedding(5, 3)", nn.Embedding(5, 3), ids),
    layer("nn.Embedding(5, 3, {padding_idx = 3})", nn.Embedding(5, 3, padding_idx=2), ids),
    layer("nn.Embedding(5, 3, {padding_idx = -1})", nn.Embedding(5, 3, padding_idx=-1), ids, [("weight", torch.randn(5, 3))]),
    layer("nn.Embedding(5, 3, {scale_grad_by_freq = true})", nn.Embedding(5, 3, scale_grad_by_freq=True), ids),
    layer("nn.Embedding(5, 3, {scale_grad_by_freq = true, padding_idx = 1})", nn.Embedding(5, 3, scale_grad_by_freq=True, padding_idx=0), ids),
    layer("nn.Embedding(5, 3, {max_norm = 1})", nn.Embedding(5, 3, max_norm=1), ids),
    layer("nn.Embedding(5, 3, {max_norm = 0.7, norm_type = 1})", nn.Embedding(5, 3, max_norm=0.7, norm_type=1), ids[0]),
    layer("nn.Embedding(5, 3, {max_norm = 0.7, norm_type = math.huge})", nn.Embedding(5, 3, max_norm=0.7, norm_type=inf), ids[1]),
    layer("nn.PReLU()", nn.PReLU(), plain),
    layer("nn.PReLU(4, 0.1)", nn.PReLU(4, 0.1), x3 - 1),
    layer("nn.Linear(5, 2)", nn.Linear(5, 2), x3),
    layer("nn.Linear(5, 2, {bias = false})", nn.Linear(5, 2, bias=False), x3),
]


def loss(lua, module, x, target, shift=0, target_grad=False):
    x = x.clone().requires_grad_()
    t = target.clone().requires_grad_(target_grad) if target.is_floating_point() else target
    y = module(x, t)
    y.backward(seeds(y))
    return dict(lua=lua, x=x, target=t + 1 if shift else t, whole=bool(shift), y=y, dx=x.grad, dt=t.grad if target_grad else None)


x, t = torch.randn(4, 3) * 2, torch.randn(4, 3) * 2
p, q = torch.rand(4, 3), torch.rand(4, 3)
edge_x, edge_t = torch.tensor([0.0, 1.0, 2.0, -1.0, inf, nan, 1e200]), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
sure_x, sure_t = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5]), torch.tensor([0.0, 1.0, 1.0, 0.0, 0.3])
logits_x, logits_t = torch.tensor([-1000.0, 1000.0, 0.0, 50.0, -50.0, inf]), torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.0])
classes, many = torch.tensor([0, 2, 1, 2]), torch.tensor([[0, 1, 2], [2, 2, 0]])
ignoring = torch.tensor([0, 2, -101, 2])
w3 = torch.tensor([0.5, 2.0, 1.5])
losses = []
for reduction in ("mean", "sum", "none"):
    r = "reduction = '" + reduction + "'"
    k = dict(reduction=reduction)
    losses += [
        loss("nn.L1Loss{" + r + "}", nn.L1Loss(**k), x, t, target_grad=True),
        loss("nn.MSELoss{" + r + "}", nn.MSELoss(**k), x, t, target_grad=True),
        loss("nn.SmoothL1Loss{" + r + "}", nn.SmoothL1Loss(**k), x, t, target_grad=True),
        loss("nn.SmoothL1Loss{beta = 2, " + r + "}", nn.SmoothL1Loss(beta=2, **k), x, t),
        loss("nn.SmoothL1Loss{beta = 0, " + r + "}", nn.SmoothL1Loss(beta=0, **k), x, t),
        loss("nn.HuberLoss{" + r + "}", nn.HuberLoss(**k), x, t, target_grad=True),
        loss("nn.HuberLoss{delta = 0.5, " + r + "}", nn.HuberLoss(delta=0.5, **k), x, t),
        loss("nn.BCELoss{" + r + "}", nn.BCELoss(**k), p, q, target_grad=True),
        loss("nn.BCELoss{weight = tm.tensor{0.5, 2, 1.5}, " + r + "}", nn.BCELoss(weight=w3, **k), p, q),
        loss("nn.BCEWithLogitsLoss{" + r + "}", nn.BCEWithLogitsLoss(**k), x, q, target_grad=True),
        loss("nn.BCEWithLogitsLoss{weight = tm.tensor{0.5, 2, 1.5}, pos_weight = tm.tensor{0.5, 2, 1.5}, " + r + "}",
             nn.BCEWithLogitsLoss(weight=w3, pos_weight=w3, **k), x, q),
        loss("nn.KLDivLoss{" + r + "}", nn.KLDivLoss(**k), p.log(), q, target_grad=True),
        loss("nn.KLDivLoss{log_target = true, " + r + "}", nn.KLDivLoss(log_target=True, **k), p.log(), q.log(), target_grad=True),
        loss("nn.NLLLoss{" + r + "}", nn.NLLLoss(**k), x.log_softmax(1), classes, 1),
        loss("nn.CrossEntropyLoss{" + r + "}", nn.CrossEntropyLoss(**k), x, classes, 1),
        loss("nn.CrossEntropyLoss{ignore_index = -100, " + r + "}", nn.CrossEntropyLoss(ignore_index=-101, **k), x, ignoring, 1),
        loss("nn.CrossEntropyLoss{weight = tm.tensor{0.5, 2, 1.5}, label_smoothing = 0.1, " + r + "}",
             nn.CrossEntropyLoss(weight=w3, label_smoothing=0.1, **k), x, classes, 1),
        loss("nn.CrossEntropyLoss{weight = tm.tensor{0.5, 2, 1.5}, " + r + "}", nn.CrossEntropyLoss(weight=w3, **k), x, q),
        loss("nn.CrossEntropyLoss{label_smoothing = 0.2, " + r + "}", nn.CrossEntropyLoss(label_smoothing=0.2, **k), x, q, target_grad=True),
        loss("nn.CrossEntropyLoss{ignore_index = 3, label_smoothing = 0.1, " + r + "}",
             nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1, **k), torch.randn(2, 4, 3), many, 1),
    ]
losses += [
    loss("nn.KLDivLoss{reduction = 'batchmean'}", nn.KLDivLoss(reduction="batchmean"), p.log(), q),
    loss("nn.KLDivLoss{reduction = 'none'}", nn.KLDivLoss(reduction="none"), torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.0, 1.0, 0.5])),
    loss("nn.L1Loss{reduction = 'none'}", nn.L1Loss(reduction="none"), edge_x, edge_t),
    loss("nn.SmoothL1Loss{reduction = 'none'}", nn.SmoothL1Loss(reduction="none"), edge_x, edge_t),
    loss("nn.HuberLoss{reduction = 'none'}", nn.HuberLoss(reduction="none"), edge_x, edge_t),
    loss("nn.BCELoss{reduction = 'none'}", nn.BCELoss(reduction="none"), sure_x, sure_t),
    loss("nn.BCEWithLogitsLoss{reduction = 'none'}", nn.BCEWithLogitsLoss(reduction="none"), logits_x, logits_t),
    loss("nn.CrossEntropyLoss()", nn.CrossEntropyLoss(), x[0], torch.tensor(1), 1),
]

lines = ["-- Made by make_layers.py.", "return {"]
for name, cases in (("activations", activations), ("layers", layers), ("losses", losses)):
    lines.append(f"  {name} = {{")
    lines += ["    " + spell(c) + "," for c in cases]
    lines.append("  },")
lines.append("}")
pathlib.Path(__file__).with_name("layers.lua").write_text("\n".join(lines) + "\n")
