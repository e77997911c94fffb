---norm.lua: normalisation layers.

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"
local OrderedDict = require "tmod.ordered"
local Tensor = require "tmod.tensor"
local initializers = require "tmod.nn.initializers"
local ops = require "tmod.ops"
local Parameter = require "tmod.nn.parameter".Parameter

local function fill_affine(self)
  if self.weight then initializers.ones_(self.weight) end
  if self.bias then initializers.zeros_(self.bias) end
end

---weight and bias of a shape, or slots without them.
local function add_affine(self, shape, weight, bias, like)
  if weight then self.weight = Parameter(Tensor.empty(shape, like)) else self:register_parameter "weight" end
  if bias then self.bias = Parameter(Tensor.empty(shape, like)) else self:register_parameter "bias" end
end

-- LayerNorm ----------------------------------------------------------------------------------------------------------------

---Each row of the last dims brought to mean 0 and variance 1, then times weight plus bias.
---@class nn.LayerNorm : nn.Module
---@field weight? Tensor of the normalised shape
---@field bias? Tensor of the normalised shape
local LayerNorm = Module:extend "nn.LayerNorm"

local LAYER = { eps = true, elementwise_affine = true, bias = true, dtype = true, device = true }

---@param shape integer | integer[] sizes of the last dims
---@param opts? {eps?: number, elementwise_affine?: boolean, bias?: boolean, dtype?: string, device?: string} eps: default 1e-5
function LayerNorm:init(shape, opts)
  opts = F.options(opts, "nn.LayerNorm", LAYER)
  if type(shape) == "number" then shape = { shape } end
  if type(shape) ~= "table" or #shape == 0 then
    B.fail("TypeError", "nn.LayerNorm: the shape must be a size or a list of sizes, got %s", type(shape) == "table"
      and "an empty list" or B.type_name(shape))
  end
  self.normalized_shape, self.eps = { unpack(shape) }, opts.eps or 1e-5
  self.elementwise_affine = opts.elementwise_affine ~= false
  add_affine(self, shape, self.elementwise_affine, self.elementwise_affine and opts.bias ~= false, { dtype = opts.dtype,
    device = opts.device })
  self:reset_parameters()
end

LayerNorm.reset_parameters = fill_affine

local layer_norm = ops.layer_norm

function LayerNorm:forward(x)
  local shape = self.normalized_shape
  local n = #shape
  local ndim = B.is_tensor(x) and x.ndim or 0
  for i = 1, n do
    if ndim < n or x:size(ndim - n + i) ~= shape[i] then
      B.fail("RuntimeError", "nn.LayerNorm: x is %s, expected a tensor whose shape ends in (%s)",
        B.is_tensor(x) and "(" .. table.concat(x:size(), ", ") .. ")" or B.type_name(x), table.concat(shape, ", "))
    end
  end
  local y = layer_norm(x, self.weight, self.bias, n, self.eps)
  return y
end

function LayerNorm:extra_repr()
  local shape = self.normalized_shape
  return ("(%s), eps=%s, elementwise_affine=%s, bias=%s"):format(table.concat(shape, ", ") .. (#shape == 1 and "," or ""), self.eps,
    tostring(self.elementwise_affine), tostring(self.bias ~= nil))
end

-- BatchNorm ------------------------------------------------------------------------------------------------------------------

---Each channel (dim 2) of (N, C) or (N, C, L) brought to mean 0 and variance 1 over the batch, then times weight plus
---bias. In evaluation running statistics take the place of the batch's.
---@class nn.BatchNorm1d : nn.Module
---@field weight? Tensor (C)
---@field bias? Tensor (C)
---@field running_mean? Tensor (C)
---@field running_var? Tensor (C), with Bessel's correction
---@field num_batches_tracked? Tensor int64, 0-dim
local BatchNorm1d = Module:extend "nn.BatchNorm1d"
BatchNorm1d._version = 2 -- since when num_batches_tracked is saved

local BATCH = { eps = true, momentum = true, affine = true, bias = true, track_running_stats = true, dtype = true, device = true }

---@param num_features integer
---@alias BatchNormOptions {eps?: number, momentum?: number|false, affine?: boolean, bias?: boolean}
---@param opts? BatchNormOptions | {track_running_stats?: boolean, dtype?: string, device?: string}
---eps: default 1e-5; momentum: share of the newest batch in the running statistics, default 0.1; false: their mean over all
---batches so far
function BatchNorm1d:init(num_features, opts)
  opts = F.options(opts, "nn.BatchNorm1d", BATCH)
  if type(num_features) ~= "number" or num_features < 0 or num_features ~= math.floor(num_features) then
    B.fail("TypeError", "nn.BatchNorm1d: num_features must be a whole number from 0 on, got %s", tostring(num_features))
  end
  self.num_features, self.eps = num_features, opts.eps or 1e-5
  if opts.momentum == nil then self.momentum = 0.1 else self.momentum = opts.momentum or nil end
  self.affine, self.track_running_stats = opts.affine ~= false, opts.track_running_stats ~= false
  local like = { dtype = opts.dtype, device = opts.device }
  add_affine(self, { num_features }, self.affine, self.affine and opts.bias ~= false, like)
  local track = self.track_running_stats
  self:register_buffer("running_mean", track and Tensor.zeros({ num_features }, like) or nil)
  self:register_buffer("running_var", track and Tensor.ones({ num_features }, like) or nil)
  self:register_buffer("num_batches_tracked", track and Tensor.zeros({}, { dtype = "int64", device = opts.device }) or nil)
  self:reset_parameters()
end

function BatchNorm1d:reset_running_stats()
  if not self.track_running_stats then return end
  initializers.zeros_(self.running_mean)
  initializers.ones_(self.running_var)
  initializers.zeros_(self.num_batches_tracked)
end

function BatchNorm1d:reset_parameters()
  self:reset_running_stats()
  fill_affine(self)
end

function BatchNorm1d:_check(x)
  if not B.is_tensor(x) or x.ndim ~= 2 and x.ndim ~= 3 then
    B.fail("ValueError", "nn.BatchNorm1d: expected a tensor of 2 or 3 dims, got %s", B.is_tensor(x) and x.ndim .. " dims" or B.type_name(x))
  end
  if x:size(2) ~= self.num_features then
    B.fail("RuntimeError", "nn.BatchNorm1d: x has shape (%s), expected %d channels (dim 2)", table.concat(x:size(), ", "),
      self.num_features)
  end
end

function BatchNorm1d:forward(x)
  self:_check(x)
  local mean, var, momentum = self.running_mean, self.running_var, self.momentum
  local batch = self.training or not mean or not var
  if self.training and self.track_running_stats and self.num_batches_tracked then
    self.num_batches_tracked:add_(1)
    if not momentum then momentum = 1 / self.num_batches_tracked:item() end
  end
  local track = not batch or self.track_running_stats
  return F.batch_norm(x, track and mean or nil, track and var or nil,
    { weight = self.weight, bias = self.bias, training = batch, momentum = momentum or 0, eps = self.eps })
end

---State saved before version 2 lacks the count of batches: the module's own stays.
function BatchNorm1d:load_from_state_dict(dictionary, prefix, local_metadata, ...)
  local key, count = prefix .. "num_batches_tracked", self.num_batches_tracked
  if (local_metadata.version or 1) < 2 and self.track_running_stats and OrderedDict.get(dictionary, key) == nil then
    dictionary[key] = count and count.device ~= "meta" and count or Tensor.zeros({}, { dtype = "int64" })
  end
  return Module.load_from_state_dict(self, dictionary, prefix, local_metadata, ...)
end

function BatchNorm1d:extra_repr()
  return ("%d, eps=%s, momentum=%s, affine=%s, bias=%s, track_running_stats=%s"):format(self.num_features, self.eps,
    tostring(self.momentum),
    tostring(self.affine), tostring(self.bias ~= nil), tostring(self.track_running_stats))
end

return { LayerNorm = LayerNorm, BatchNorm1d = BatchNorm1d }
