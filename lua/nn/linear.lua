---linear.lua: affine maps.

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"
local Tensor = require "tmod.tensor"
local initializers = require "tmod.nn.initializers"
local Parameter = require "tmod.nn.parameter".Parameter

---Affine map of the last axis: y = x * W^T + b.
---@class nn.Linear : nn.Module
---@field weight Tensor (nout, nin)
---@field bias? Tensor (nout)
local Linear = Module:extend "nn.Linear"

local OPTIONS = { bias = true, dtype = true, device = true }

---@param nin integer
---@param nout integer
---@param opts? {bias?: boolean, dtype?: string, device?: string} bias: default true
function Linear:init(nin, nout, opts)
  opts = F.options(opts, "nn.Linear", OPTIONS)
  B.need_size("nn.Linear", "in_features", nin)
  B.need_size("nn.Linear", "out_features", nout)
  self.in_features, self.out_features = nin, nout
  local like = { dtype = opts.dtype, device = opts.device }
  self.weight = Parameter(Tensor.empty(nout, nin, like))
  if opts.bias ~= false then self.bias = Parameter(Tensor.empty(nout, like)) else self:register_parameter "bias" end
  self:reset_parameters()
end

---Uniform numbers of +-1 / sqrt(nin) for both: for the weight it is what kaiming_uniform_ gives with a = sqrt(5).
function Linear:reset_parameters()
  initializers.kaiming_uniform_(self.weight, { a = math.sqrt(5) })
  local bound = self.in_features > 0 and 1 / math.sqrt(self.in_features) or 0
  if self.bias then initializers.uniform_(self.bias, -bound, bound) end
end

local linear = F.linear

function Linear:forward(x) return linear(x, self.weight, self.bias) end

function Linear:extra_repr()
  return ("in_features=%d, out_features=%d, bias=%s"):format(self.in_features, self.out_features, tostring(self.bias ~= nil))
end

return Linear
