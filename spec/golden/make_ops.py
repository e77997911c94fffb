#!/usr/bin/env python3
"""Figures of PyTorch for spec/ops_values_spec.lua: results and gradients of operators, and result dtypes.

    python3 spec/golden/make_ops.py > spec/golden/ops.lua

A case has the operator's name and arguments as Lua passes them (positions from 1), PyTorch's results, and the
gradients of its float arguments when the first float result is weighted by 0.5 ... 1.5.
"""
import itertools
import math

import torch
import torch.nn.functional as F

torch.manual_seed(2024)
f64 = torch.float64
NAN, INF = float("nan"), float("inf")


def num(x):
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, float):
        if math.isnan(x):
            return "0/0"
        if math.isinf(x):
            return "1/0" if x > 0 else "-1/0"
        return repr(int(x)) if x == int(x) and abs(x) < 1e15 else repr(float("%.15g" % x))
    return repr(x)


def lua(x):
    if isinstance(x, torch.Tensor):
        values = ",".join(num(v) for v in x.detach().reshape(-1).tolist())
        return "T{%s,{%s},%r}" % ("{" + ",".join(map(str, x.shape)) + "}", values, str(x.dtype)[6:])
    if x is None:
        return "none"
    if isinstance(x, str):
        return '"%s"' % x
    if isinstance(x, (list, tuple)):
        return "{" + ",".join(lua(v) for v in x) + "}"
    return num(x)


def R(*shape, low=-2, high=2):
    return torch.round((torch.rand(shape, dtype=f64) * (high - low) + low) * 1000) / 1000


def P(*shape):
    return R(*shape, low=0.2, high=3)


def I(n, *shape):  # positions from 0
    return torch.randint(0, n, shape)


class One:  # an index tensor that Lua sees counted from 1
    def __init__(self, t):
        self.t = t


def to_lua(arg):
    if isinstance(arg, One):
        return lua(arg.t + 1)
    if isinstance(arg, (list, tuple)):
        return "{" + ",".join(to_lua(a) for a in arg) + "}"
    return lua(arg)


def to_torch(arg, leaves):
    if isinstance(arg, One):
        return arg.t
    if isinstance(arg, (list, tuple)):
        return type(arg)(to_torch(a, leaves) for a in arg)
    if isinstance(arg, torch.Tensor) and arg.is_floating_point():
        leaf = arg.clone().requires_grad_()
        leaves.append(leaf)
        return leaf
    return arg


lines = []


def case(name, args, fn, grad=True, positions=()):
    """positions: results that Lua counts from 1."""
    leaves = []
    given = [to_torch(a, leaves) for a in args]
    outs = fn(*given)
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    grads = []
    y = next((o for o in outs if o.is_floating_point() and o.requires_grad), None)
    if grad and y is not None:
        dy = torch.linspace(0.5, 1.5, y.numel(), dtype=f64).reshape(y.shape).to(y.dtype)
        grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    text = ",".join(lua(o + 1 if i in positions else o) for i, o in enumerate(outs))
    gtext = ",".join("none" if g is None else lua(g) for g in grads)
    lines.append('{"%s",{%s},{%s},{%s}},' % (name, ",".join(to_lua(a) for a in args), text, gtext))


special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 100.0, -100.0], dtype=f64)

# creation
case("arange", [1, 10, 3], lambda a, b, c: torch.arange(a, b, c))
case("arange", [0, 1, 0.25], lambda a, b, c: torch.arange(a, b, c))
case("arange", [5, -5, -2.5], lambda a, b, c: torch.arange(a, b, c))
case("linspace", [-1, 2, 7], lambda a, b, n: torch.linspace(a, b, n))
case("linspace", [3, 9, 1], lambda a, b, n: torch.linspace(a, b, n))
case("eye", [2, 3], torch.eye)
case("full", [[2, 2], 7.5], lambda s, v: torch.full(s, v))

# element-wise
unary = {"neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "tanh": torch.tanh,
         "sigmoid": torch.sigmoid, "relu": torch.relu, "isnan": torch.isnan, "isfinite": torch.isfinite,
         "logical_not": torch.logical_not, "log": torch.log, "sqrt": torch.sqrt, "erf": torch.erf, "expm1": torch.expm1,
         "log1p": torch.log1p, "silu": F.silu, "gelu": F.gelu}
for name, fn in unary.items():
    case(name, [P(2, 5) if name in ("log", "sqrt", "log1p") else R(2, 5, low=-4, high=4)], fn)
    case(name, [special], fn, grad=False)
    if name not in ("neg", "abs", "sign", "relu", "silu", "gelu"):
        case(name, [torch.tensor([0, 1, 5])], fn)
case("relu", [torch.tensor([-1.0, 0.0, 2.0], dtype=f64)], torch.relu)
case("abs", [torch.tensor([-1.0, 0.0, 2.0], dtype=f64)], torch.abs)
case("abs", [torch.tensor([-3, 4], dtype=torch.int8)], torch.abs)
case("neg", [torch.tensor([3, 200], dtype=torch.uint8)], torch.neg)
case("gelu", [R(2, 5), "tanh"], lambda x, a: F.gelu(x, approximate=a))
case("expm1", [torch.tensor([1e-10, -1e-10, 1e-300], dtype=f64)], torch.expm1)
case("log1p", [torch.tensor([1e-10, -1e-10, 1e-300], dtype=f64)], torch.log1p)
case("clamp", [R(6), -1, 0.5], lambda x, a, b: torch.clamp(x, a, b))
case("clamp", [R(6), None, 0.5], lambda x, a, b: torch.clamp(x, max=b))
case("clamp", [R(6), 0.25], lambda x, a: torch.clamp(x, min=a))
case("clamp", [R(6), 1, -1], lambda x, a, b: torch.clamp(x, a, b), grad=False)

binary = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
          "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
          "ge": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
          "logical_xor": torch.logical_xor}
for name, fn in binary.items():
    case(name, [R(2, 3), R(2, 3)], fn)
    case(name, [R(2, 1, 3), R(4, 1)], fn)
    case(name, [special.repeat_interleave(9), special.repeat(9)], fn, grad=False)
    case(name, [torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1], dtype=torch.int32)], fn)
    ties = torch.tensor([1.0, 2.0, 3.0], dtype=f64)
    case(name, [ties, torch.tensor([1.0, 3.0, 2.0], dtype=f64)], fn)
case("add", [R(3), R(3), 2.5], lambda a, b, k: torch.add(a, b, alpha=k))
case("sub", [R(3), 2, 3], lambda a, b, k: torch.sub(a, b, alpha=k))
case("sub", [5, R(3)], lambda a, b: a - b)
case("div", [1, R(3)], lambda a, b: a / b)
case("div", [torch.tensor([7, -7, 0]), torch.tensor([2, 2, 0])], torch.div)
case("pow", [P(2, 3), R(2, 3)], torch.pow)
case("pow", [R(5), 2], torch.pow)
case("pow", [R(5), 3], torch.pow)
case("pow", [R(5), -1], torch.pow)
case("pow", [P(5), 0.5], torch.pow)
case("pow", [R(5), 0], torch.pow)
case("pow", [torch.tensor([0.0, 2.0], dtype=f64), 2], torch.pow)
case("pow", [torch.tensor([0.0, 2.0], dtype=f64), torch.tensor([0.0, 0.0], dtype=f64)], torch.pow)
case("pow", [2, R(5)], torch.pow)
case("pow", [0, P(3)], torch.pow)
case("pow", [torch.tensor([2, -3, 5]), torch.tensor([3, 3, 0])], torch.pow)
case("pow", [special.repeat_interleave(9), special.repeat(9)], torch.pow, grad=False)
mask = torch.tensor([[True, False, True], [False, False, True]])
case("where", [mask, R(2, 3), R(2, 3)], torch.where)
case("where", [mask, R(3), 2.5], torch.where)
case("where", [mask[0], 0, R(2, 1)], torch.where)
case("masked_fill", [R(2, 3), mask, 9], lambda x, m, v: x.masked_fill(m, v))
case("masked_fill", [R(2, 3), mask[0], -INF], lambda x, m, v: x.masked_fill(m, v))
case("clone", [R(2, 3)], torch.clone)
case("cast", [R(2, 3), "float32"], lambda x, d: x.to(getattr(torch, d)))
case("cast", [torch.tensor([-1.7, 1.7, 300.0, 0.0]), "int32"], lambda x, d: x.to(getattr(torch, d)))
case("cast", [torch.tensor([-1, 300, 255, 0]), "uint8"], lambda x, d: x.to(getattr(torch, d)))
case("cast", [torch.tensor([-1.5, 0.0, NAN]), "bool"], lambda x, d: x.to(getattr(torch, d)))
case("cast", [torch.tensor([1 / 3, 65519.0, 65520.0, 1e-8, 6e-8, NAN]), "float16"], lambda x, d: x.to(getattr(torch, d)))
case("cast", [torch.tensor([1 / 3, 3.4e38, 1e-40, NAN]), "bfloat16"], lambda x, d: x.to(getattr(torch, d)))

# reductions; dims in Lua count from 1
x = R(2, 3, 4)
dims = [(None, None), (1, 0), (2, 1), (-1, -1), ([1, 3], [0, 2]), ([1, 2, 3], [0, 1, 2])]
for name, fn in {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin,
                 "any": torch.any, "all": torch.all}.items():
    for d, t in dims:
        for keep in (False, True):
            if d is None and keep:
                continue
            if name in ("any", "all"):
                b = (x > 1.2) if name == "any" else (x > -1.2)
                case(name, [b, d, keep], lambda v, d_, k, t=t: fn(v) if t is None else fn(v, t, k))
            else:
                case(name, [x, d, keep], lambda v, d_, k, t=t: fn(v, () if t is None else t, k) if name != "sum" and name != "mean"
                     else fn(v) if t is None else fn(v, t, k))
ties = torch.tensor([[1.0, 5.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0]], dtype=f64)
for name, fn in {"amax": torch.amax, "amin": torch.amin}.items():
    case(name, [ties, 2], lambda v, d: fn(v, 1))
    case(name, [torch.tensor([1.0, NAN, 3.0], dtype=f64), 1], lambda v, d: fn(v, 0), grad=False)
for name, fn in {"max": torch.max, "min": torch.min}.items():
    for d, t in ((1, 0), (2, 1), (-1, -1)):
        case(name, [x, d], lambda v, d_, t=t: fn(v, t), positions=(1,))
    case(name, [ties, 2, True], lambda v, d, k: fn(v, 1, True), positions=(1,))
    case(name, [torch.tensor([[1.0, NAN, 3.0, NAN]], dtype=f64), 2], lambda v, d: fn(v, 1), positions=(1,), grad=False)
for name, fn in {"argmax": torch.argmax, "argmin": torch.argmin}.items():
    case(name, [x], lambda v: fn(v), positions=(0,))
    for d, t in ((1, 0), (3, 2)):
        case(name, [x, d, True], lambda v, d_, k, t=t: fn(v, t, True), positions=(0,))
    case(name, [ties, 2], lambda v, d: fn(v, 1), positions=(0,))
    case(name, [torch.tensor([1.0, NAN, 3.0], dtype=f64)], lambda v: fn(v), positions=(0,))
case("prod", [R(2, 3)], lambda v: torch.prod(v))
case("prod", [R(2, 3, 2), 2], lambda v, d: torch.prod(v, 1))
case("prod", [R(2, 3), -1, True], lambda v, d, k: torch.prod(v, -1, True))
case("prod", [torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 2.0], [1.0, 2.0, 3.0]], dtype=f64), 2], lambda v, d: torch.prod(v, 1))
case("prod", [torch.tensor([1.0, 0.0, 3.0], dtype=f64)], lambda v: torch.prod(v))
case("sum", [torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), 1], lambda v, d: torch.sum(v, 0))
case("sum", [torch.tensor([True, True, False])], torch.sum)
case("prod", [torch.tensor([100, 100, 100], dtype=torch.uint8)], torch.prod)
case("sum", [torch.zeros(0, 3), 1], lambda v, d: torch.sum(v, 0))
case("sum", [torch.zeros(0, 3)], torch.sum)
case("mean", [torch.zeros(0, 3)], torch.mean)
case("mean", [torch.zeros(0, 3), 1], lambda v, d: torch.mean(v, 0))
case("prod", [torch.zeros(0, 3), 1], lambda v, d: torch.prod(v, 0))
case("any", [torch.zeros(0, 3), 1], lambda v, d: torch.any(v, 0))
case("all", [torch.zeros(0, 3), 1], lambda v, d: torch.all(v, 0))

# products
for a, b in (((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 2, 3), (5, 3, 4)), ((5, 2, 3), (3, 4)),
             ((2, 3), (5, 3, 4)), ((2, 1, 2, 3), (4, 3, 2)), ((5, 2, 3), (3,)), ((3,), (5, 3, 2)), ((2, 0), (0, 3)), ((0, 2), (2, 3))):
    case("matmul", [R(*a), R(*b)], torch.matmul)
case("matmul", [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])], torch.matmul)
case("addmm", [R(2, 4), R(2, 3), R(3, 4)], torch.addmm)
case("addmm", [R(4), R(2, 3), R(3, 4), 0.5, 2], lambda c, a, b, k, l: torch.addmm(c, a, b, beta=k, alpha=l))
case("addmm", [torch.full((2, 4), NAN, dtype=f64), R(2, 3), R(3, 4), 0, 1], lambda c, a, b, k, l: torch.addmm(c, a, b, beta=0), grad=False)
case("linear", [R(2, 3), R(4, 3), R(4)], F.linear)
case("linear", [R(5, 2, 3), R(4, 3)], F.linear)
case("linear", [R(3), R(4, 3), R(4)], F.linear)

# softmax and losses
for d, t in ((1, 0), (2, 1), (-1, -1)):
    case("softmax", [R(2, 3, 4, low=-5, high=5), d], lambda v, d_, t=t: F.softmax(v, t))
    case("log_softmax", [R(2, 3, 4, low=-5, high=5), d], lambda v, d_, t=t: F.log_softmax(v, t))
case("softmax", [torch.tensor([1000.0, 0.0, -INF], dtype=f64)], lambda v: F.softmax(v, -1), grad=False)
case("log_softmax", [torch.tensor([1000.0, 0.0, -INF], dtype=f64)], lambda v: F.log_softmax(v, -1), grad=False)
case("softmax", [torch.tensor([NAN, 0.0, 1.0], dtype=f64)], lambda v: F.softmax(v, -1), grad=False)
logp = F.log_softmax(R(5, 4), 1)
target = I(4, 5)
for reduction in ("mean", "sum", "none"):
    case("F.nll_loss", [logp, One(target), None, -100, reduction], lambda v, t, w, i, r: F.nll_loss(v, t, reduction=r))
    case("F.nll_loss", [logp, One(target), P(4).requires_grad_(False), int(target[0]) + 1, reduction],
         lambda v, t, w, i, r: F.nll_loss(v, t, w.detach(), ignore_index=i - 1, reduction=r))
    case("F.nll_loss", [R(2, 4, 3, 2), One(I(4, 2, 3, 2)), None, -100, reduction], lambda v, t, w, i, r: F.nll_loss(v, t, reduction=r))
    case("F.cross_entropy", [R(5, 4), One(target), None, -100, reduction, 0], lambda v, t, w, i, r, s: F.cross_entropy(v, t, reduction=r))
    case("F.cross_entropy", [R(5, 4), One(target), P(4), int(target[0]) + 1, reduction, 0.1],
         lambda v, t, w, i, r, s: F.cross_entropy(v, t, w.detach(), ignore_index=i - 1, reduction=r, label_smoothing=s))
    case("F.cross_entropy", [R(2, 4, 3), One(I(4, 2, 3)), None, -100, reduction, 0.2],
         lambda v, t, w, i, r, s: F.cross_entropy(v, t, reduction=r, label_smoothing=s))
    case("F.cross_entropy", [R(5, 4), F.softmax(R(5, 4), 1).detach(), None, None, reduction, 0.1],
         lambda v, t, w, i, r, s: F.cross_entropy(v, t, reduction=r, label_smoothing=s))
    case("F.cross_entropy", [R(2, 4, 3), F.softmax(R(2, 4, 3), 1).detach(), P(4), None, reduction, 0],
         lambda v, t, w, i, r, s: F.cross_entropy(v, t, w.detach(), reduction=r))
    case("mse_loss", [R(2, 3), R(2, 3), reduction], lambda a, b, r: F.mse_loss(a, b, reduction=r))
case("F.cross_entropy", [R(4), One(torch.tensor(2)), None, -100, "mean", 0], lambda v, t, w, i, r, s: F.cross_entropy(v, t))
case("F.nll_loss", [logp, One(torch.full((5,), 1)), None, 2, "mean"], lambda v, t, w, i, r: F.nll_loss(v, t, ignore_index=1), grad=False)

# normalisation: layer_norm's second result, means and variances, is its own
case("F.layer_norm", [R(4, 6), P(6), R(6), 1], lambda x, w, b, n: F.layer_norm(x, (6,), w, b))
case("F.layer_norm", [R(4, 2, 3), P(2, 3), R(2, 3), 2], lambda x, w, b, n: F.layer_norm(x, (2, 3), w, b))
case("F.layer_norm", [R(4, 6), None, None, 1], lambda x, w, b, n: F.layer_norm(x, (6,)))

# views and joining
case("view", [R(2, 6), [3, -1]], lambda v, s: v.view(s))
case("reshape", [R(2, 6), [4, 3]], lambda v, s: v.reshape(s))
case("transpose", [R(2, 3, 4), 1, 3], lambda v, a, b: v.transpose(0, 2))
case("permute", [R(2, 3, 4), [3, 1, 2]], lambda v, d: v.permute(2, 0, 1))
case("squeeze", [R(1, 2, 1, 3)], torch.squeeze)
case("squeeze", [R(1, 2, 1, 3), 3], lambda v, d: v.squeeze(2))
case("unsqueeze", [R(2, 3), -1], torch.unsqueeze)
case("unsqueeze", [R(2, 3), 2], lambda v, d: v.unsqueeze(1))
case("expand", [R(3, 1), [2, -1, 4]], lambda v, s: v.expand(s))
case("select", [R(2, 3), 2, 3], lambda v, d, i: v.select(1, 2))
case("select", [R(2, 3), -1, -1], lambda v, d, i: v.select(-1, -1))
case("narrow", [R(4, 3), 1, 2, 2], lambda v, d, s, n: v.narrow(0, 1, 2))
case("slice", [R(5, 3), 1, 2, 5, 2], lambda v, d, a, b, s: v[1:5:2])
case("as_strided", [R(10), [3, 2], [3, 1], 1], lambda v, s, t, o: v.as_strided(s, t, o))
case("as_strided", [R(6), [4, 3], [1, 1], 0], lambda v, s, t, o: v.as_strided(s, t, o))
case("cat", [[R(2, 3), R(2, 1)], 2], lambda l, d: torch.cat(l, 1))
case("cat", [[R(2, 3), torch.zeros(0, dtype=f64), R(1, 3)], 1], lambda l, d: torch.cat(l, 0))
case("cat", [[torch.zeros(0, dtype=f64), R(2, 3), R(2, 1)], -1], lambda l, d: torch.cat(l, -1))
case("cat", [[R(2), torch.tensor([1, 2])], 1], lambda l, d: torch.cat(l, 0))
case("stack", [[R(2, 3), R(2, 3)], 3], lambda l, d: torch.stack(l, 2))
case("index_select", [R(3, 4), 2, One(torch.tensor([3, 0, 3]))], lambda v, d, i: v.index_select(1, i))
case("index_add", [R(3, 4), 2, One(torch.tensor([3, 0, 3])), R(3, 3)], lambda v, d, i, s: v.index_add(1, i, s))
case("gather", [R(3, 4), 2, One(I(4, 3, 2))], lambda v, d, i: v.gather(1, i))
case("gather", [R(3, 4), 1, One(I(3, 2, 4))], lambda v, d, i: v.gather(0, i))
case("scatter", [R(3, 4), 2, One(torch.tensor([[0, 2], [1, 3], [3, 0]])), R(3, 2)], lambda v, d, i, s: v.scatter(1, i, s))
case("scatter", [R(3, 4), 1, One(torch.tensor([[0, 2, 1, 1]])), 7], lambda v, d, i, s: v.scatter(0, i, s))
case("scatter_add", [R(3, 4), 2, One(I(4, 3, 5)), R(3, 5)], lambda v, d, i, s: v.scatter_add(1, i, s))
case("nonzero", [torch.tensor([[0.0, 1.0], [2.0, 0.0], [NAN, 3.0]])], lambda v: torch.nonzero(v), positions=(0,))
m = R(3, 4, 5)
i2, i3 = I(3, 2, 1), I(5, 3)
case("index", [m, [One(i2)]], lambda v, l: v[l[0]])
case("index", [m, [None, One(I(4, 2, 3))]], lambda v, l: v[:, l[1]])
case("index", [m, [One(i2), None, One(i3)]], lambda v, l: v[l[0], :, l[2]])
case("index", [m, [None, One(I(4, 2, 1)), One(i3)]], lambda v, l: v[:, l[1], l[2]])
bm = torch.tensor([[True, False, True, False], [False, False, True, True], [True, False, False, False]])
case("index", [m, [bm]], lambda v, l: v[l[0]])
case("index", [m, [None, bm[0]]], lambda v, l: v[:, l[1]])
case("index", [R(3, 4), [bm]], lambda v, l: v[l[0]])
case("index", [m, [One(torch.tensor([0, 2])), bm[0]]], lambda v, l: v[l[0], l[1]])
case("index_put", [R(3, 4), R(4), [One(torch.tensor([2, 0]))]], lambda v, s, l: v.index_put((l[0],), s))
case("index_put", [R(3, 4), R(3, 4), [One(torch.tensor([1, 1, 2]))], True], lambda v, s, l, a: v.index_put((l[0],), s, accumulate=True))
case("index_put", [R(3, 4), R(5), [bm]], lambda v, s, l: v.index_put((l[0],), s))
case("index_put", [R(3, 4), R(2), [One(torch.tensor([0, 1])), One(torch.tensor([3, 2]))]], lambda v, s, l: v.index_put((l[0], l[1]), s))

# updates of parameters: three steps with the same gradient
def steps(make, n=3):
    p = R(4)
    g = R(4)
    q = torch.nn.Parameter(p.clone())
    opt = make([q])
    for _ in range(n):
        q.grad = g.clone()
        opt.step()
    return p, g, q.detach()


updates = []
O = torch.optim
for args, make in (
    ([0.1, 0, 0, 0, False, False], lambda p: O.SGD(p, lr=0.1)),
    ([0.1, 0, 0, 0.2, False, True], lambda p: O.SGD(p, lr=0.1, weight_decay=0.2, maximize=True)),
    ([0.1, 0.9, 0, 0.01, False, False], lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    ([0.1, 0.9, 0.5, 0, False, False], lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)),
    ([0.1, 0.9, 0, 0.01, True, False], lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
):
    updates.append('{"sgd_step",%s,%s,%s,%s},' % ((lua(args),) + tuple(map(lua, steps(make)))))
for args, make in (
    ([0.1, 0.9, 0.999, 1e-8, 0, False, False, False], lambda p: O.Adam(p, lr=0.1)),
    ([0.1, 0.8, 0.99, 1e-3, 0.2, False, True, True], lambda p: O.Adam(p, lr=0.1, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.2, amsgrad=True, maximize=True)),
    ([0.1, 0.9, 0.999, 1e-8, 0.2, True, False, False], lambda p: O.AdamW(p, lr=0.1, weight_decay=0.2)),
    ([0.1, 0.9, 0.999, 1e-8, 0.2, True, True, False], lambda p: O.AdamW(p, lr=0.1, weight_decay=0.2, amsgrad=True)),
):
    updates.append('{"adam_step",%s,%s,%s,%s},' % ((lua(args),) + tuple(map(lua, steps(make)))))

# result dtypes of mul: with dims with dims, with dims with 0-dim, with dims with a number
names = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]
promotion = []
for a, b in itertools.product(names, names):
    ta, tb = torch.ones(2, dtype=getattr(torch, a)), torch.ones(2, dtype=getattr(torch, b))
    promotion.append('{"%s","%s","%s","%s"},' % (a, b, str((ta * tb).dtype)[6:], str((ta * tb[0]).dtype)[6:]))
numbers = ['%s={"%s","%s"},' % (a, str((torch.ones(2, dtype=getattr(torch, a)) * 2).dtype)[6:],
                                str((torch.ones(2, dtype=getattr(torch, a)) * 2.5).dtype)[6:]) for a in names]

print("-- made by make_ops.py with PyTorch %s" % torch.__version__.split("+")[0])
print("-- luacheck: ignore")
print("return function(T, none)")
print("return {")
print("cases={\n%s\n}," % "\n".join(lines))
print("updates={\n%s\n}," % "\n".join(updates))
print("promotion={\n%s\n}," % "\n".join(promotion))
print("numbers={\n%s\n}," % "\n".join(numbers))
print("}")
print("end")
