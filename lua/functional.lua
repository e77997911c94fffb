---functional.lua: nn.functional (F): what models compute, as functions. Rows of the operator table appear here by
---themselves; what other operators express is written out.

local B = require "tmod.ffi"
local ops = require "tmod.ops"
local is_tensor = B.is_tensor

local F = {}

---Options a caller may give, checked against the known ones.
local function options(opts, what, known)
  if opts == nil then return {} end
  if type(opts) ~= "table" or is_tensor(opts) then B.fail("TypeError", "%s: expected a table of options, got %s", what, B.type_name(opts)) end
  for k in pairs(opts) do
    if not known[k] then
      local names = {}
      for name in pairs(known) do names[#names + 1] = name end
      table.sort(names)
      B.fail("TypeError", "%s: unknown option %s; known: %s", what, tostring(k), table.concat(names, ", "))
    end
  end
  return opts
end
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
  local all = opts.weight and logp * opts.weight:view(dim == 1 and { -1 } or { 1, -1, unpack({ 1, 1, 1, 1, 1, 1 }, 1, logp.ndim - 2) }) or logp
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
    if opts.weight then weighted = weighted * opts.weight:view(dim == 1 and { -1 } or { 1, -1, unpack({ 1, 1, 1, 1, 1, 1 }, 1, x.ndim - 2) }) end
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

local MSE = { reduction = true }
---@param opts? {reduction?: "mean"|"sum"|"none"}
function F.mse_loss(x, target, opts)
  opts = options(opts, "mse_loss", MSE)
  return ops.mse_loss(x, target, opts.reduction)
end

local INPLACE = { inplace = true }
for _, name in ipairs { "relu", "tanh", "sigmoid" } do
  F[name] = function(x, opts)
    if opts and options(opts, name, INPLACE).inplace then return ops[name .. "_"](x) end
    return ops[name](x)
  end
end

---One row per class, 1 at the class (counted from 1), else 0; int64.
function F.one_hot(target, classes)
  classes = classes or target:max():item()
  local sizes = target:size()
  sizes[#sizes + 1] = classes
  local zeros = require "tmod.tensor".zeros(sizes, { dtype = "int64", device = target.device })
  return ops.scatter(zeros, -1, target:unsqueeze(-1), 1)
end

---Rows are reached by name when first asked for: F.softmax(x, dim).
return setmetatable(F, { __index = function(t, name)
  local f = ops.find(name)
  if f then rawset(t, name, f) end
  return f
end })
