---Samples for the generic operator spec: for each row of runtime/ops.h, argument lists that ops_spec.lua runs through
---every check. A new operator costs one line here.
---
---Tensors are described, so that the spec can make the same values in any dtype, stride, shape and device:
---  X(2, 3)  numbers of +-[0.2, 2], all different: differentiable, casts to every dtype
---  P(2, 3)  the same, positive            U(2, 3)  in (0.1, 0.9)
---  W(2, 3)  as P, but takes no gradient
---  I(n, 2, 3)  positions 1..n, int64      J(n, 2, 3)  the same, none twice along the first dim
---  B(2, 3)  bytes of -127..127, int8
---  M(2, 3)  a bool mask                   K(2)  0-dim, of this value
---  DT, DEV  the dtype and the device of a check
---A list of them is an argument `tensors`. Size 3 stands for "any": the zero-size check puts 0 in its place, also in
---shapes, and expects the same in the results.
---
---Options of a row (a sample may have those that concern it alone: strided, zero, meta, grad):
---  dtypes     dtypes of X, P, U, W and DT that the row takes: float (default), number, all, or a list; others must be refused
---  out        dtype of the results: same (default), float (whole numbers give float32), sum (they give int64), number
---             (bool gives int64, as numbers count as int64), bool, int64, any; a list for several results
---  tol        times the usual tolerance of a dtype
---  strided    false: other strides mean other values; an error kind: refused
---  zero       a sample of its own for zero sizes (false: none); an error kind: refused
---  zero_out   expected shape of the first result for it, where it does not follow from the rule of 3 and 0
---  meta       error kind on the meta device
---  broadcast  positions of arguments that broadcast, beside those of type operand; false: none does
---  random     values depend on dtype; devices = false: tensors of two devices are allowed
---  large      false: the first sample makes no sense with other sizes in place of 3 and 4
---  target     places in the list of tensors that the row changes

-- luacheck: no max line length

local D = {} -- metatable of descriptions

local function describe(kind)
  return function(...) return setmetatable({ kind = kind, shape = { ... } }, D) end
end

local X, P, U, W, M = describe "X", describe "P", describe "U", describe "W", describe "M"
local function I(n, ...) return setmetatable({ kind = "I", n = n, shape = { ... } }, D) end
local function J(n, ...) return setmetatable({ kind = "J", n = n, shape = { ... } }, D) end
local B = describe "B"
local function K(value) return setmetatable({ kind = "K", value = value, shape = {} }, D) end
local DT, DEV = setmetatable({ kind = "DT" }, D), setmetatable({ kind = "DEV" }, D)
local none = setmetatable({ kind = "nil" }, D) -- an absent argument

local S = {}

-- creation
S.empty = { { { 3, 4 }, DT, DEV }, { {}, DT, DEV }, dtypes = "all", random = true }
S.full = { { { 3, 4 }, 2, DT, DEV }, { {}, 1, DT, DEV }, dtypes = "all" }
S.arange = { { 1, 8, 2, DT, DEV }, { 5, -4, -3.5, DT, DEV, ints = false }, dtypes = "number", zero = { 2, 2, 1, DT, DEV }, zero_out = { 0 } }
S.linspace = { { 1, 10, 4, DT, DEV }, { 5, -5, 1, DT, DEV }, dtypes = "number", zero = { 1, 2, 0, DT, DEV }, zero_out = { 0 } }
S.eye = { { 3, 4, DT, DEV }, { 4, 2, DT, DEV }, dtypes = "all", zero = { 0, 4, DT, DEV }, zero_out = { 0, 4 } }
S.rand = { { { 3, 4 }, DT, DEV }, random = true }
S.randn = { { { 3, 4 }, DT, DEV }, random = true }
S.randint = { { 0, 2, { 3, 4 }, DT, DEV }, dtypes = "all" }
S.randperm = { { 6, DT, DEV }, dtypes = "number", zero = { 0, DT, DEV }, zero_out = { 0 } }
S.bernoulli = { { U(3, 4) }, random = true }
S.uniform = { { X(3, 4), -1, 2 }, random = true }
S.normal = { { X(3, 4), 1, 2 }, random = true }
S.dropout = { { X(3, 4), 0.4 }, { X(3), 0 }, { X(3), 1 }, out = { "same", "bool" }, random = true }

-- copying
S.clone = { { X(3, 4) }, { X(3, 4), true }, { X() }, dtypes = "all" }
S.cast = { { X(3, 4), "float64" }, { X(3, 4), "float32", grad = false }, { X(2), "int64", grad = false }, { X(2), none, DEV }, dtypes = "all", out = "any" }
S.copy = { { X(3, 4), X(3, 4) }, { X(3, 4), X(4) }, { X(3, 4), 2 }, { X(), X() }, dtypes = "all", broadcast = { 2 }, devices = false }
S.fill = { { X(3, 4), 2 }, { X(), 1 }, dtypes = "all" }

-- element-wise, one operand
S.neg = { { X(3, 4) }, { X() }, dtypes = "number" }
S.abs = { { X(3, 4) }, dtypes = "all" }
S.sign = { { X(3, 4) }, dtypes = "all" }
S.exp = { { X(3, 4) }, dtypes = "all", out = "float" }
S.log = { { P(3, 4) }, dtypes = "all", out = "float" }
S.sqrt = { { P(3, 4) }, dtypes = "all", out = "float" }
S.tanh = { { X(3, 4) }, dtypes = "all", out = "float" }
S.sigmoid = { { X(3, 4) }, { X() }, dtypes = "all", out = "float" }
S.erf = { { X(3, 4) }, dtypes = "all", out = "float" }
S.expm1 = { { X(3, 4) }, dtypes = "all", out = "float", tol = 2 }
S.log1p = { { P(3, 4) }, dtypes = "all", out = "float" }
S.silu = { { X(3, 4) }, dtypes = "all", out = "float" }
S.silu_backward = { { X(3, 4), X(3, 4) }, dtypes = "all", out = "float", tol = 2 }
S.gelu = { { X(3, 4) }, { X(3, 4), "tanh" }, dtypes = "all", out = "float", tol = 2 }
S.gelu_backward = { { X(3, 4), X(3, 4) }, { X(3, 4), X(3, 4), "tanh" }, dtypes = "all", out = "float", tol = 2 }
S.relu = { { X(3, 4) }, { X() }, dtypes = "all" }
S.clamp = { { X(3, 4), -1, 1 }, { X(3), none, 1 }, { X(3), -1 }, dtypes = "all", out = "number" }
S.isnan = { { X(3, 4) }, dtypes = "all", out = "bool" }
S.isfinite = { { X(3, 4) }, dtypes = "all", out = "bool" }
S.logical_not = { { X(3, 4) }, dtypes = "all", out = "bool" }

-- element-wise, two operands
S.add = { { X(3, 4), X(3, 4) }, { X(3, 4), X(4), 3 }, { X(3), 2, out = "number" }, { 2, X(3), out = "number" }, { X(), X(3) }, dtypes = "all" }
S.sub = { { X(3, 4), X(3, 4) }, { X(3, 4), X(4), 3 }, { X(3), 2 }, { 2, X(3) }, dtypes = "number" }
S.mul = { { X(3, 4), X(3, 4) }, { X(3), 2, out = "number" }, { 2, X(3), out = "number" }, { X(2, 1, 3), X(4, 1) }, dtypes = "all" }
S.div = { { X(3, 4), P(3, 4) }, { X(3), 2 }, { 2, X(3) }, dtypes = "all", out = "float" }
S.pow = { { P(3, 4), P(3, 4) }, { X(3), 2, out = "number" }, { 2, P(3), out = "number" }, { X(3), 3, out = "number" }, dtypes = "all", tol = 4 }
S.maximum = { { X(3, 4), X(3, 4) }, { X(3), 0.5, ints = false }, dtypes = "all" }
S.minimum = { { X(3, 4), X(3, 4) }, { 0.5, X(3), ints = false }, dtypes = "all" }
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor" } do
  S[name] = { { X(3, 4), X(3, 4) }, { X(3), 1 }, { 1, X(3) }, dtypes = "all", out = "bool" }
end
S.where = { { M(3, 4), X(3, 4), X(3, 4) }, { M(3), X(3), 2, out = "number" }, { M(3), 2, X(3), out = "number" }, { M(3, 1), X(4), X() }, dtypes = "all", broadcast = { 1 } }
S.masked_fill = { { X(3, 4), M(3, 4), 2 }, { X(3, 4), M(4), 1 }, dtypes = "all", broadcast = { 2 } }

-- reductions
S.sum = { { X(3, 4) }, { X(3, 4), 2 }, { X(2, 3, 4), { 1, -1 }, true }, { X() }, { X(3, 4), 1, false, "float64", out = "any" }, dtypes = "all", out = "sum" }
S.mean = { { X(3, 4) }, { X(3, 4), 2 }, { X(2, 3, 4), { 1, -1 }, true }, { X() } }
S.prod = { { X(3, 4), 2 }, { X(2, 3) }, { X(3, 4), -2, true }, { X() }, dtypes = "all", out = "sum" }
S.amax = { { X(3, 4), 2 }, { X(2, 3, 4), { 1, 3 }, true }, { X(2, 4), zero = false }, dtypes = "all" }
S.amin = { { X(3, 4), 2 }, { X(2, 3, 4), { 1, 3 }, true }, { X(2, 4), zero = false }, dtypes = "all" }
S.max = { { X(3, 4), 2 }, { X(2, 3, 4), -3, true }, { X(), 1 }, dtypes = "all", out = { "same", "int64" } }
S.min = { { X(3, 4), 2 }, { X(2, 3, 4), -3, true }, { X(), 1 }, dtypes = "all", out = { "same", "int64" } }
S.argmax = { { X(3, 4), 2 }, { X(2, 4) }, { X(2, 3, 4), 1, true }, dtypes = "all", out = "int64" }
S.argmin = { { X(3, 4), 2 }, { X(2, 4) }, { X(2, 3, 4), 1, true }, dtypes = "all", out = "int64" }
S.any = { { X(3, 4) }, { X(3, 4), 2 }, { X(2, 3, 4), { 1, 3 }, true }, dtypes = "all", out = "bool" }
S.all = { { X(3, 4) }, { X(3, 4), 2 }, { X(2, 3, 4), { 1, 3 }, true }, dtypes = "all", out = "bool" }

-- products
S.matmul = { { X(3, 4), X(4, 2) }, { X(4), X(4, 2) }, { X(3, 4), X(4) }, { X(4), X(4) }, { X(2, 3, 4), X(2, 4, 2) },
  { X(2, 1, 3, 4), X(2, 4, 2) }, { X(2, 3), X(3, 4) }, { X(2, 3, 4), X(4) }, dtypes = "number", tol = 4 }
S.addmm = { { X(3, 2), X(3, 4), X(4, 2) }, { X(2), X(3, 4), X(4, 2), 2, 3 }, { X(3, 1), X(3, 4), X(4, 2), 0, 1 }, dtypes = "number", tol = 4,
  broadcast = { 1 } }
S.linear = { { X(3, 4), X(2, 4), X(2) }, { X(3, 4), X(2, 4) }, { X(2, 3, 4), X(2, 4), X(2) }, { X(4), X(2, 4), X(2) }, dtypes = "number", tol = 4 }
S.linear_int8 = { { X(3, 4), B(2, 4), X(2), X(2) }, { X(3, 4), B(2, 4), X(2) }, { X(2, 3, 4), B(2, 4), X(2), X(2) }, { X(4), B(2, 4), X(2) }, tol = 100 }

-- softmax and losses
S.softmax = { { X(3, 4) }, { X(2, 3, 4), 1 }, { X(2, 4, 3), 2 }, { X() } }
S.log_softmax = { { X(3, 4) }, { X(2, 3, 4), 1 }, { X(2, 4, 3), 2 }, { X() }, tol = 2 }
S.nll_loss = { { X(3, 4), I(4, 3) }, { X(3, 4), I(4, 3), W(4), -100, "sum" }, { X(3, 4), I(4, 3), W(4), 2, "none" }, { X(4), I(4) },
  { X(2, 4, 3), I(4, 2, 3), none, 1, "mean" }, out = { "same", "any" } }
S.nll_loss_backward = { { X(), I(4, 3), K(3), none, { 3, 4 } }, { X(3), I(4, 3), K(3), W(4), { 3, 4 }, 2, "none" },
  { X(), I(4, 2, 3), K(6), none, { 2, 4, 3 }, -100, "sum" } }
S.mse_loss = { { X(3, 4), X(3, 4) }, { X(3, 4), X(3, 4), "sum" }, { X(3, 4), X(3, 4), "none" }, tol = 2, broadcast = { 1, 2 } }

-- normalisation
S.layer_norm = { { X(3, 4), X(4), X(4), 1 }, { X(2, 3, 4), W(3, 4), none, 2, 1e-3, zero = false }, { X(3, 4), none, none, 1 }, { X(3, 4), none, X(3, 4), 2, zero = false },
  out = { "same", "any" }, tol = 8 }
S.layer_norm_backward = { { X(3, 4), X(3, 4), P(2, 3), X(4), 1, 1e-5, true }, { X(3, 4), X(3, 4), P(2, 3), none, 1 }, out = { "same", "any" }, tol = 8, strided = nil }

-- views
S.view = { { X(3, 4), { 4, 3 } }, { X(2, 6), { -1, 3 }, zero = false }, { X(), { 1, 1 } }, dtypes = "all", strided = "RuntimeError" }
S.reshape = { { X(3, 4), { 4, 3 } }, { X(2, 6), { -1, 3 }, zero = false }, { X(), { 1, 1 } }, dtypes = "all" }
S.transpose = { { X(3, 4), 1, 2 }, { X(2, 3, 4), -1, 1 }, { X(), 1, 1 }, dtypes = "all" }
S.permute = { { X(2, 3, 4), { 3, 1, 2 } }, { X(), {} }, dtypes = "all" }
S.squeeze = { { X(1, 3, 1, 4) }, { X(1, 3, 1), 1 }, { X(1, 3, 1), { 1, -1 } }, { X(2, 3), 2 }, dtypes = "all" }
S.unsqueeze = { { X(3, 4), 1 }, { X(3, 4), -1 }, { X(), 1 }, dtypes = "all" }
S.expand = { { X(3, 1), { 2, 3, 4 } }, { X(3, 1), { -1, 4 } }, { X(), { 3 } }, { X(3, 4), { 3, 4 } }, dtypes = "all" }
S.select = { { X(2, 3), 1, 2 }, { X(2, 3, 4), -1, -4 }, { X(2, 3), 2, 3, zero = "IndexError" }, dtypes = "all" }
S.narrow = { { X(4, 3), 1, 2, 2 }, { X(3, 4), 2, -3, 2 }, { X(4, 3), 1, 1, 0, zero_out = { 0, 0 } }, { X(3, 4), 1, 1, 3, zero = "IndexError" }, dtypes = "all" }
S.slice = { { X(4, 3), 1, 2, 3 }, { X(3, 7), 2, 1, -1, 2 }, { X(4, 3), 1 }, { X(4, 3), 1, 3, 2 }, dtypes = "all" }
S.as_strided = { { X(12), { 3, 2 }, { 4, 1 }, 1 }, { X(3, 4), { 2, 5 }, { 3, 1 }, 2, zero = "IndexError" }, dtypes = "all", strided = false, large = false }

-- joining and indexing
S.cat = { { { X(3, 4), X(3, 2) }, 2 }, { { X(2, 4), X(1, 4), X(2, 4) } }, { { X(3), X(0), X(3) }, zero_out = { 0 } }, { { X(0), X(2, 3), X(2, 4) }, -1, zero = false }, dtypes = "all" }
S.stack = { { { X(3, 4), X(3, 4) } }, { { X(3, 4), X(3, 4) }, -1 }, { { X() } }, dtypes = "all" }
S.index_select = { { X(4, 3), 1, I(4, 3) }, { X(2, 4), -1, I(4, 5) }, { X(4), 1, I(4) }, dtypes = "all" }
S.index_add = { { X(4, 3), 1, I(4, 5), X(5, 3) }, { X(3, 4), 2, I(4, 3), X(3, 3) }, dtypes = "all" }
S.gather = { { X(4, 3), 1, I(4, 2, 3) }, { X(3, 4), 2, I(4, 3, 5) }, { X(4), 1, I(4, 6) }, dtypes = "all" }
S.scatter_add = { { X(4, 3), 1, I(4, 5, 3), X(5, 3) }, { X(3, 4), -1, I(4, 3, 2), X(3, 3) }, dtypes = "all" }
S.scatter = { { X(4, 3), 1, J(4, 4, 3), X(4, 3) }, { X(4, 3), 1, J(4, 4, 3), 2 }, dtypes = "all", broadcast = false }
S.nonzero = { { X(3, 4), zero_out = { 0, 2 } }, { X() }, { M(3, 2), zero_out = { 0, 2 } }, dtypes = "all", out = "int64", meta = "NotImplementedError" }
S.index = { { X(4, 3), { I(4, 5) } }, { X(3, 4), { none, I(4, 2, 2) } }, { X(4, 2, 3), { I(4, 2, 1), I(2, 3) }, zero = false },
  { X(4, 2, 4), { I(4, 2), none, I(4, 2) }, zero = false }, { X(2, 4), { M(2, 4) }, meta = "NotImplementedError" }, dtypes = "all" }
S.index_put = { { X(4, 3), X(2, 3), { I(4, 2) }, true }, { X(4, 3), X(3), { J(4, 3) } }, { X(4, 3), X(), { I(4, 5) }, true },
  { X(2, 4), X(), { M(2, 4) }, meta = "NotImplementedError" }, dtypes = "all" }

-- updates of parameters: lists of parameters, gradients and states
S.sgd_step = { { { X(3, 4), X(2), X(3, 4), X(2) }, 0.1, 0, 0, 0.01, false, false, target = { 1, 2 } },
  { { X(3), X(3), X(3) }, 0.1, 0.9, 0.1, 0, true, true }, { { X(3), X(3), X(3) }, 0.1, 0.9, 0, 0, false, false, true }, target = { 1, 3 }, tol = 4 }
S.adam_step = { { { X(3, 4), X(3, 4), X(3, 4), P(3, 4) }, 0.1, 0.9, 0.99, 1e-3, 0.01, false, false, false, 3, target = { 1, 3, 4 } },
  { { X(3), X(3), X(3), P(3), P(3) }, 0.1, 0.9, 0.99, 1e-3, 0.01, true, true, true, 1 }, target = { 1, 3, 4, 5 }, tol = 8 }

-- used by the engine
S.restride = { { X(3, 4), { 1, 3 } }, { X(3, 4), { 4, 1 } }, { X(), {} }, dtypes = "all", zero = { X(0, 4), { 4, 1 } }, zero_out = { 0, 4 }, large = false }
S.fill_strided = { { X(3, 4), X(2, 3), { 4, 1 }, { 2, 3 }, { 4, 1 }, 5 }, { X(3, 4), X(2, 2), { 4, 1 }, { 2, 2 }, { 1, 1 }, 3, true },
  dtypes = "all", zero = { X(2, 4), X(0, 4), { 4, 1 }, { 0, 4 }, { 4, 1 }, 0 }, zero_out = { 2, 4 }, large = false }
S.prod_backward = { { X(3, 4), X(3), 2 }, { X(3, 4), X() }, { X(2, 4), X(1, 4), 1, true } }

return { rows = S, none = none, is = function(v) return getmetatable(v) == D end }
