---functional.lua: nn.functional (F): what models compute, as functions. Rows of the operator table appear here by
---themselves; what other operators express is written out.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local is_tensor = B.is_tensor

local F = {}

local options = B.options
F.options = options

function F.linear(x, weight, bias) return ops.linear(x, weight, bias) end

local DROPOUT = { training = true, inplace = true }
---@param p? number probability that an element is dropped; default 0.5
---@param opts? {training?: boolean, inplace?: boolean} training: default true
function F.dropout(x, p, opts)
  opts = options(opts, "dropout", DROPOUT)
  p = p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then B.fail("ValueError", "dropout: p is %s, expected 0 to 1", tostring(p)) end
  if opts.training == false or p == 0 then return x end
  local y = ops.dropout(x, p)
  if opts.inplace then return x:copy_(y) end
  return y
end

local NLL = { weight = true, ignore_index = true, reduction = true }
---Negative log-likelihood of classes counted from 1.
---@param x Tensor log-probabilities, (C), (N, C) or (N, C, d1, ...)
---@param target Tensor classes, shape of x without the class dim
---@param opts? {weight?: Tensor, ignore_index?: integer, reduction?: "mean"|"sum"|"none"}
function F.nll_loss(x, target, opts)
  opts = options(opts, "nll_loss", NLL)
  local loss = ops.nll_loss(x, target, opts.weight, opts.ignore_index, opts.reduction)
  return loss
end

local CROSS = { weight = true, ignore_index = true, reduction = true, label_smoothing = true }

---Mean over the class dim of -log_probs, weighted: the smoothing part of cross entropy.
local function smooth_loss(logp, dim, target, opts)
  local all = opts.weight and logp * opts.weight:view(dim == 1 and { -1 } or { 1, -1, unpack({ 1, 1, 1, 1, 1, 1 }, 1,
    logp.ndim - 2) }) or logp
  local loss = -all:sum(dim) -- shape of target
  local kept = target:ne(opts.ignore_index or -100)
  loss = ops.where(kept, loss, 0)
  local reduction = opts.reduction or "mean"
  if reduction == "none" then return loss end
  if reduction == "sum" then return loss:sum() end
  local count
  if opts.weight then
    count = opts.weight[ops.where(kept, target, 1)]:mul(kept:to(opts.weight.dtype)):sum()
  else
    count = kept:sum():to(logp.dtype)
  end
  return loss:sum() / count
end

---Cross entropy of logits. target: classes counted from 1 (int64), or probabilities of x's shape and dtype.
---@param x Tensor logits, (C), (N, C) or (N, C, d1, ...)
---@param opts? {weight?: Tensor, ignore_index?: integer, reduction?: "mean"|"sum"|"none", label_smoothing?: number}
function F.cross_entropy(x, target, opts)
  if not is_tensor(x) then B.fail("TypeError", "cross_entropy: x must be a tensor, got %s", B.type_name(x)) end
  if not is_tensor(target) then B.fail("TypeError", "cross_entropy: target must be a tensor, got %s", B.type_name(target)) end
  opts = options(opts, "cross_entropy", CROSS)
  local dim = x.ndim == 1 and 1 or 2
  if x.ndim == 0 then B.fail("RuntimeError", "cross_entropy: x must have a class dim, got a 0-dim tensor") end
  local smoothing = opts.label_smoothing or 0
  if type(smoothing) ~= "number" or not (smoothing >= 0 and smoothing <= 1) then
    B.fail("ValueError", "cross_entropy: label_smoothing is %s, expected 0 to 1", tostring(smoothing))
  end
  local logp = ops.log_softmax(x, dim)
  local classes = x:size(dim)
  if target:is_floating_point() then
    if #target:size() ~= x.ndim then
      B.fail("RuntimeError", "cross_entropy: probabilities as target need the shape of x, got %d dims, expected %d", target.ndim, x.ndim)
    end
    if opts.ignore_index then B.fail("ValueError", "cross_entropy: ignore_index does not go with probabilities as target") end
    local p = smoothing > 0 and target * (1 - smoothing) + smoothing / classes or target
    local weighted = logp * p
    if opts.weight then weighted = weighted * opts.weight:view(dim == 1 and { -1 } or { 1, -1, unpack({ 1, 1, 1, 1, 1, 1 }, 1,
      x.ndim - 2) }) end
    local loss = -weighted:sum(dim)
    local reduction = opts.reduction or "mean"
    if reduction == "none" then return loss end
    if reduction == "sum" then return loss:sum() end
    if reduction ~= "mean" then B.fail("ValueError", "cross_entropy: reduction is %s, expected mean, sum or none", tostring(reduction)) end
    return loss:sum() / math.max(x:numel() / classes, 0)
  end
  local loss = ops.nll_loss(logp, target, opts.weight, opts.ignore_index, opts.reduction)
  if smoothing == 0 then return loss end
  return loss * (1 - smoothing) + smooth_loss(logp, dim, target, opts) * (smoothing / classes)
end

-- other losses ----------------------------------------------------------------------------------------------------------

local function check_two(what, x, target)
  if not is_tensor(x) then B.fail("TypeError", "%s: x must be a tensor, got %s", what, B.type_name(x)) end
  if not is_tensor(target) then B.fail("TypeError", "%s: target must be a tensor, got %s", what, B.type_name(target)) end
end

local function check_same_size(what, x, target)
  check_two(what, x, target)
  local a, b = table.concat(x:size(), ", "), table.concat(target:size(), ", ")
  if a ~= b then B.fail("ValueError", "%s: target has shape (%s), expected that of x, (%s)", what, b, a) end
end

local function reduce(what, loss, reduction)
  if reduction == nil or reduction == "mean" then return ops.mean(loss) end
  if reduction == "sum" then return ops.sum(loss) end
  if reduction == "none" then return loss end
  B.fail("ValueError", "%s: reduction is %s, expected mean, sum or none", what, tostring(reduction))
end

local REDUCTION = { reduction = true }
---@param opts? {reduction?: "mean"|"sum"|"none"}
function F.mse_loss(x, target, opts)
  opts = options(opts, "mse_loss", REDUCTION)
  return ops.mse_loss(x, target, opts.reduction)
end

---Mean of |x - target|; shapes broadcast.
---@param opts? {reduction?: "mean"|"sum"|"none"}
function F.l1_loss(x, target, opts)
  opts = options(opts, "l1_loss", REDUCTION)
  check_two("l1_loss", x, target)
  return reduce("l1_loss", ops.abs(x - target), opts.reduction)
end

-- |d| = c + rest with c = min(|d|, bound): c^2 / 2 + bound * rest is the parabola inside and the straight line outside,
-- and no square of a far value enters the gradient.
local function parabola_and_line(x, target, bound)
  local d = ops.abs(x - target)
  local c = ops.minimum(d, bound) -- and not clamp, whose gradient is 0 at NaN
  return c * c * 0.5, d - c
end

local SMOOTH = { reduction = true, beta = true }
---d^2 / (2 beta) where d = |x - target| is below beta, else d - beta / 2.
---@param opts? {beta?: number, reduction?: "mean"|"sum"|"none"} beta: default 1
function F.smooth_l1_loss(x, target, opts)
  opts = options(opts, "smooth_l1_loss", SMOOTH)
  local beta = opts.beta or 1
  if not (beta >= 0) then B.fail("RuntimeError", "smooth_l1_loss: beta is %g, expected 0 or more", beta) end
  if beta == 0 then return F.l1_loss(x, target, { reduction = opts.reduction }) end
  check_two("smooth_l1_loss", x, target)
  local square, rest = parabola_and_line(x, target, beta)
  return reduce("smooth_l1_loss", square / beta + rest, opts.reduction)
end

local HUBER = { reduction = true, delta = true }
---d^2 / 2 where d = |x - target| is up to delta, else delta * (d - delta / 2).
---@param opts? {delta?: number, reduction?: "mean"|"sum"|"none"} delta: default 1
function F.huber_loss(x, target, opts)
  opts = options(opts, "huber_loss", HUBER)
  local delta = opts.delta or 1
  if not (delta > 0) then B.fail("RuntimeError", "huber_loss: delta is %g, expected more than 0", delta) end
  check_two("huber_loss", x, target)
  local square, rest = parabola_and_line(x, target, delta)
  return reduce("huber_loss", square + rest * delta, opts.reduction)
end

-- Logarithms are cut at -100, so that no loss is infinite; the gradient is cut differently (as in PyTorch), hence a
-- function of its own.
local BinaryCrossEntropy = autograd.Function:extend "binary_cross_entropy"
function BinaryCrossEntropy.forward(ctx, p, t)
  ctx:save_for_backward(p, t)
  return ops.neg(t * p:log():clamp(-100) + (1 - t) * (-p):log1p():clamp(-100))
end
function BinaryCrossEntropy.backward(ctx, dy)
  local p, t = ctx:saved()
  return dy * ((p - t) / ((1 - p) * p):clamp(1e-12)), t.requires_grad and dy * ((-p):log1p() - p:log()) or nil
end

local BINARY = { reduction = true, weight = true }
---Cross entropy of probabilities x of [0, 1].
---@param opts? {weight?: Tensor, reduction?: "mean"|"sum"|"none"}
function F.binary_cross_entropy(x, target, opts)
  opts = options(opts, "binary_cross_entropy", BINARY)
  check_same_size("binary_cross_entropy", x, target)
  if x.device == "cpu" and x:numel() > 0 and not ops.all(ops.logical_and(ops.ge(x, 0), ops.le(x, 1))):item() then
    B.fail("RuntimeError", "binary_cross_entropy: an element of x is outside of [0, 1]; binary_cross_entropy_with_logits takes logits")
  end
  local loss = BinaryCrossEntropy.apply(x, target)
  if opts.weight then loss = loss * opts.weight end
  return reduce("binary_cross_entropy", loss, opts.reduction)
end

local LOGITS = { reduction = true, weight = true, pos_weight = true }
---Cross entropy of logits: binary_cross_entropy of sigmoid(x), without its overflow.
---@param opts? {weight?: Tensor, pos_weight?: Tensor, reduction?: "mean"|"sum"|"none"} pos_weight: of targets that are 1
function F.binary_cross_entropy_with_logits(x, target, opts)
  opts = options(opts, "binary_cross_entropy_with_logits", LOGITS)
  check_same_size("binary_cross_entropy_with_logits", x, target)
  local log = F.logsigmoid(x)
  if opts.pos_weight then log = log * ((opts.pos_weight - 1) * target + 1) end
  local loss = (1 - target) * x - log
  if opts.weight then loss = loss * opts.weight end
  return reduce("binary_cross_entropy_with_logits", loss, opts.reduction)
end

local KL = { reduction = true, log_target = true }
---Divergence of distributions: target * (log target - x), x log-probabilities.
---@param opts? {reduction?: "mean"|"batchmean"|"sum"|"none", log_target?: boolean} log_target: target is logarithms, too
function F.kl_div(x, target, opts)
  opts = options(opts, "kl_div", KL)
  check_two("kl_div", x, target)
  local loss
  if opts.log_target then
    loss = ops.exp(target) * (target - x)
  else -- 0 log 0 is 0
    loss = target * ops.log(ops.masked_fill(target, ops.eq(target, 0), 1)) - target * x
  end
  if opts.reduction == "batchmean" then
    return x.ndim == 0 and ops.sum(loss) or ops.sum(loss) / x:size(1)
  end
  return reduce("kl_div", loss, opts.reduction)
end

-- activations -----------------------------------------------------------------------------------------------------------

-- Cases are chosen by `where`, and what the other case computes is kept finite, as 0 times infinity would put NaN into
-- the gradient. A NaN fails every comparison, so the last case is one that lets it pass.

local function hardtanh(x, min, max)
  if min > max then B.fail("ValueError", "hardtanh: min_val is %g, expected at most max_val, %g", min, max) end
  return ops.where(ops.le(x, min), min, ops.where(ops.ge(x, max), max, x))
end

local function elu(x, alpha, scale)
  local below = ops.expm1(ops.clamp(x, nil, 0)) * (alpha * (scale or 1))
  return ops.where(ops.le(x, 0), below, scale and x * scale or x)
end

local function softplus(x, beta, threshold)
  local z = beta == 1 and x or x * beta
  local soft = ops.log1p(ops.exp(ops.clamp(z, nil, threshold)))
  return ops.where(ops.le(z, threshold), beta == 1 and soft or soft / beta, x)
end

---name -> {arguments = {{name, default}, ...}, fn(x, ...), inplace: the form that overwrites x exists}
local ACTIVATIONS = {
  relu = { inplace = true, fn = ops.relu },
  tanh = { inplace = true, fn = ops.tanh },
  sigmoid = { inplace = true, fn = ops.sigmoid },
  silu = { inplace = true, fn = ops.silu },
  gelu = { { "approximate", "none" }, fn = ops.gelu },
  threshold = { { "threshold" }, { "value" }, inplace = true, fn = function(x, threshold, value)
    return ops.where(ops.le(x, threshold), value, x)
  end },
  leaky_relu = { { "negative_slope", 0.01 }, inplace = true, fn = function(x, slope) return ops.where(ops.gt(x, 0), x, x * slope) end },
  hardtanh = { { "min_val", -1 }, { "max_val", 1 }, inplace = true, fn = hardtanh },
  relu6 = { inplace = true, fn = function(x) return hardtanh(x, 0, 6) end },
  hardsigmoid = { inplace = true, fn = function(x)
    return ops.where(ops.le(x, -3), 0, ops.where(ops.ge(x, 3), 1, (x + 3) / 6))
  end },
  hardswish = { inplace = true, fn = function(x)
    local c = ops.clamp(x, -3, 3)
    return ops.where(ops.le(x, -3), 0, ops.where(ops.ge(x, 3), x, c * (c + 3) / 6))
  end },
  elu = { { "alpha", 1 }, inplace = true, fn = function(x, alpha) return elu(x, alpha) end },
  celu = { { "alpha", 1 }, inplace = true, fn = function(x, alpha)
    if alpha == 0 then B.fail("RuntimeError", "celu: alpha is 0, by which x is divided") end
    return ops.where(ops.le(x, 0), ops.expm1(ops.clamp(x, nil, 0) / alpha) * alpha, x)
  end },
  -- Klambauer et al. 2017: the constants keep mean 0 and variance 1 from layer to layer.
  selu = { inplace = true, fn = function(x) return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946) end },
  mish = { inplace = true, fn = function(x) return x * ops.tanh(softplus(x, 1, 20)) end },
  softplus = { { "beta", 1 }, { "threshold", 20 }, fn = softplus },
  softsign = { fn = function(x) return x / (ops.abs(x) + 1) end },
  tanhshrink = { fn = function(x) return x - ops.tanh(x) end },
  hardshrink = { { "lambd", 0.5 }, fn = function(x, lambd)
    return ops.masked_fill(x, ops.logical_and(ops.ge(x, -lambd), ops.le(x, lambd)), 0)
  end },
  softshrink = { { "lambd", 0.5 }, fn = function(x, lambd)
    if not (lambd >= 0) then B.fail("RuntimeError", "softshrink: lambd is %g, expected 0 or more", lambd) end
    return ops.where(ops.gt(x, lambd), x - lambd, ops.where(ops.lt(x, -lambd), x + lambd, ops.where(ops.isnan(x), x, 0)))
  end },
  -- min(x, 0) - log(1 + e^-|x|): neither part overflows
  logsigmoid = { fn = function(x) return ops.minimum(x, 0) - ops.log1p(ops.exp(-ops.abs(x))) end },
}
F._ACTIVATIONS = ACTIVATIONS -- activation.lua makes a class of each

---Overwrites x with fn of it. Where gradients are recorded fn gets a copy, so that what it saves keeps the old value.
local function overwrite(fn, x, a, b)
  local old = x.requires_grad and autograd.is_grad_enabled() and x:clone() or x
  return x:copy_(fn(old, a, b))
end

---The arguments of an activation: given ones in order, the last may be a table of them by name.
local function arguments(what, row, a, b, opts)
  local given = { a, b, opts }
  local last = #row + 1
  for i = 1, #row do
    if type(given[i]) == "table" or type(given[i]) == "boolean" then last = i break end
  end
  opts = given[last]
  if type(opts) == "boolean" then opts = { inplace = opts } end
  local known = { inplace = row.inplace }
  for i = 1, #row do known[row[i][1]] = true end
  opts = options(opts, what, known)
  local values = {}
  for i, argument in ipairs(row) do
    local name, default = argument[1], argument[2]
    local v = i < last and given[i] or opts[name]
    if v == nil then v = default end
    if v == nil then B.fail("TypeError", "%s: %s is missing", what, name) end
    if type(v) ~= type(default or 0) then B.fail("TypeError", "%s: %s must be a %s, got %s", what, name, type(default or 0),
      B.type_name(v)) end
    values[i] = v
  end
  return values[1], values[2], opts.inplace or false
end
F._arguments = arguments

for name, row in pairs(ACTIVATIONS) do
  local fn, count = row.fn, #row
  row.overwrite = ops.find(name .. "_") or function(x, a, b) return overwrite(fn, x, a, b) end
  F[name] = function(x, a, b, opts)
    if a == nil and count == 0 then return fn(x) end
    local inplace
    a, b, inplace = arguments(name, row, a, b, opts)
    if inplace then return row.overwrite(x, a, b) end
    return fn(x, a, b)
  end
end

---max(x, 0) + weight * min(x, 0).
---@param weight Tensor one number, or one for each channel: position of dim 2 of x
function F.prelu(x, weight)
  check_two("prelu", x, weight)
  local n = weight:numel()
  if n ~= 1 then
    if x.ndim < 2 or x:size(2) ~= n then
      B.fail("RuntimeError", "prelu: weight has %d elements, expected 1 or as many as x has channels (dim 2), %d", n, x.ndim < 2
        and 1 or x:size(2))
    end
    local shape = { 1, n }
    for i = 3, x.ndim do shape[i] = 1 end
    weight = weight:view(shape)
  elseif weight.ndim > 0 then
    weight = weight:view {}
  end
  return ops.where(ops.gt(x, 0), x, weight * ops.clamp(x, nil, 0))
end

local RRELU = { training = true, inplace = true }
---Leaky relu whose slope is drawn from [lower, upper) for each element, or, if not training, is their mean.
---@param opts? {training?: boolean, inplace?: boolean} training: default false
function F.rrelu(x, lower, upper, opts)
  opts = options(opts, "rrelu", RRELU)
  lower, upper = lower or 1 / 8, upper or 1 / 3
  if not (lower <= upper) then B.fail("ValueError", "rrelu: lower is %g, expected at most upper, %g", lower, upper) end
  local slope = (lower + upper) / 2
  if opts.training then slope = Tensor.empty_like(x):uniform_(lower, upper) end
  local function fn(v) return ops.where(ops.gt(v, 0), v, v * slope) end
  if opts.inplace then return overwrite(fn, x) end
  return fn(x)
end

---Half of x times the sigmoid of the other half, the halves along dim.
---@param dim? integer default -1
function F.glu(x, dim)
  dim = dim or -1
  if x.ndim == 0 then B.fail("RuntimeError", "glu: x is 0-dim, expected a dim to halve") end
  local n = x:size(dim)
  if n % 2 == 1 then B.fail("RuntimeError", "glu: size of dim %d is %d, expected an even one", dim, n) end
  return ops.narrow(x, dim, 1, n / 2) * ops.sigmoid(ops.narrow(x, dim, n / 2 + 1, n / 2))
end

---softmax of -x.
function F.softmin(x, dim) return ops.softmax(-x, dim) end

-- normalisation and embedding -----------------------------------------------------------------------------------------------

local LAYER_NORM = { weight = true, bias = true, eps = true }
---(x - mean) / sqrt(variance + eps) over the last dims, which must have this shape, times weight plus bias.
---@param shape integer | integer[]
---@param opts? {weight?: Tensor, bias?: Tensor, eps?: number} eps: default 1e-5
function F.layer_norm(x, shape, opts)
  B.need_tensor("layer_norm", "x", x)
  opts = options(opts, "layer_norm", LAYER_NORM)
  if type(shape) == "number" then shape = { shape } end
  if type(shape) ~= "table" or is_tensor(shape) then
    B.fail("TypeError", "layer_norm: shape must be a size or a list of sizes, got %s", B.type_name(shape))
  end
  local n, sizes = #shape, x:size()
  for i = 1, n do
    if n > #sizes or sizes[#sizes - n + i] ~= shape[i] then
      B.fail("RuntimeError", "layer_norm: x has shape (%s), expected it to end in (%s)", table.concat(sizes, ", "),
        table.concat(shape, ", "))
    end
  end
  local y = ops.layer_norm(x, opts.weight, opts.bias, n, opts.eps or 1e-5)
  return y
end

---t as it is at dim 2 of x.
local function along_channels(t, x)
  local shape = { t:numel() }
  for i = 3, x.ndim do shape[i - 1] = 1 end
  return t:view(shape)
end

local function update_running(running, value, momentum) running:mul_(1 - momentum):add_(value, momentum) end

local BATCH_NORM = { weight = true, bias = true, training = true, momentum = true, eps = true }
---Normalises each channel (dim 2) by mean and variance over all other dims, or by running ones. In training the running
---ones move by `momentum` towards those of the batch.
---@param opts? {weight?: Tensor, bias?: Tensor, training?: boolean, momentum?: number, eps?: number}
function F.batch_norm(x, running_mean, running_var, opts)
  opts = options(opts, "batch_norm", BATCH_NORM)
  local weight, bias, eps = opts.weight, opts.bias, opts.eps or 1e-5
  if not is_tensor(x) or x.ndim < 2 then
    B.fail("RuntimeError", "batch_norm: x is %s, expected (N, C, ...)", is_tensor(x) and x.ndim .. "-dim" or B.type_name(x))
  end
  if not opts.training then
    if not running_mean or not running_var then B.fail("RuntimeError",
      "batch_norm: running_mean and running_var are needed when not training") end
    local scale = 1 / ops.sqrt(running_var + eps)
    if weight then scale = scale * weight end
    local shift = -(running_mean * scale)
    if bias then shift = shift + bias end
    local y = x * along_channels(scale, x) + along_channels(shift, x)
    return y.dtype == x.dtype and y or y:to(x.dtype)
  end
  local n = x:numel() / math.max(x:size(2), 1)
  if n == 1 then
    B.fail("ValueError", "batch_norm: x has shape (%s), expected more than one value per channel when training",
      table.concat(x:size(), ", "))
  end
  local y, stats = ops.layer_norm(ops.transpose(x, 1, 2), nil, nil, x.ndim - 1, eps)
  if running_mean then
      local momentum = opts.momentum or 0.1
    autograd.no_grad(update_running, running_mean, stats[1], momentum)
    autograd.no_grad(update_running, running_var, stats[2] * (n / (n - 1)), momentum)
  end
  y = ops.transpose(y, 1, 2):contiguous()
  if weight then y = y * along_channels(weight, x) end
  if bias then y = y + along_channels(bias, x) end
  return y.dtype == x.dtype and y or y:to(x.dtype)
end

---Rows of weight whose norm is above max_norm are scaled down to it, in place.
local function renorm_rows(weight, ids, max_norm, p)
  local rows = ops.index_select(weight, 1, ids)
  local size = ops.abs(rows)
  local norm = p == math.huge and ops.amax(size, -1, true) or ops.pow(ops.sum(ops.pow(size, p), -1, true), 1 / p)
  local scale = ops.where(ops.gt(norm, max_norm), max_norm / (norm + 1e-7), 1)
  ops.index_put_(weight, rows * scale, { ids, n = 1 }, false)
end

---Passes rows through; their gradient is divided by n and 0 where the mask is set.
local EmbeddingGradient = autograd.Function:extend "embedding"
function EmbeddingGradient.forward(ctx, x, n, mask)
  ctx:save_for_backward(n, mask)
  return x
end
function EmbeddingGradient.backward(ctx, dy)
  local n, mask = ctx:saved()
  if n then dy = dy / n end
  if mask then dy = ops.masked_fill(dy, mask, 0) end
  return dy
end

local EMBEDDING = { padding_idx = true, max_norm = true, norm_type = true, scale_grad_by_freq = true }
---The rows of weight at the ids, which count from 1.
---@param ids Tensor whole numbers, any shape
---@param weight Tensor (n, dim)
---@param opts? {padding_idx?: integer, max_norm?: number, norm_type?: number, scale_grad_by_freq?: boolean}
---padding_idx: gets no gradient (negative: from the end); max_norm: rows above it are scaled down first, in place;
---norm_type: default 2; scale_grad_by_freq: the gradient of a row is divided by how often its id is there
function F.embedding(ids, weight, opts)
  check_two("embedding", ids, weight)
  opts = options(opts, "embedding", EMBEDDING)
  if weight.ndim ~= 2 then B.fail("RuntimeError", "embedding: weight has %d dims, expected 2", weight.ndim) end
  local shape, flat, n = ids:size(), ids.ndim == 1 and ids or ids:reshape(-1), weight:size(1)
  if opts.max_norm then autograd.no_grad(renorm_rows, weight:detach(), flat, opts.max_norm, opts.norm_type or 2) end
  local y = ops.index_select(weight, 1, flat)
  local padding = opts.padding_idx
  if padding and (padding == 0 or padding > n or padding < -n or padding ~= math.floor(padding)) then
    B.fail("ValueError", "embedding: padding_idx is %g, expected 1 to %d, or negative from the end", padding, n)
  end
  if (padding or opts.scale_grad_by_freq) and weight.requires_grad and autograd.is_grad_enabled() then
    local counts
    if opts.scale_grad_by_freq then
      local zeros = Tensor.zeros({ n }, { dtype = weight.dtype, device = weight.device })
      local ones = ops.full({ flat:numel() }, 1, weight.dtype, weight.device)
      counts = ops.index_select(ops.index_add(zeros, 1, flat, ones), 1, flat):unsqueeze(-1)
    end
    y = EmbeddingGradient.apply(y, counts, padding and ops.eq(flat, padding > 0 and padding or n + padding + 1):unsqueeze(-1))
  end
  if ids.ndim == 1 then return y end
  shape[#shape + 1] = weight:size(2)
  return y:view(shape)
end

---One row per class, 1 at the class (counted from 1), else 0; int64.
function F.one_hot(target, classes)
  B.need_tensor("one_hot", "target", target)
  classes = classes or target:max():item()
  local sizes = target:size()
  sizes[#sizes + 1] = classes
  local zeros = Tensor.zeros(sizes, { dtype = "int64", device = target.device })
  return ops.scatter(zeros, -1, target:unsqueeze(-1), 1)
end

---Rows are reached by name when first asked for: F.softmax(x, dim).
return setmetatable(F, { __index = function(t, name)
  local f = ops.find(name)
  if f then rawset(t, name, f) end
  return f
end })
