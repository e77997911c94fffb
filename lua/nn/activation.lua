---activation.lua: functions of F as modules, so that containers can hold them. A class takes the arguments of its
---function in order, or in a table by name at the end, and shows them as fields.

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"
local Tensor = require "tmod.tensor"
local initializers = require "tmod.nn.initializers"
local parameter = require "tmod.nn.parameter"

local CLASSES = {
  Threshold = "threshold", ReLU = "relu", Hardtanh = "hardtanh", ReLU6 = "relu6", Sigmoid = "sigmoid", Hardsigmoid = "hardsigmoid",
  Tanh = "tanh", SiLU = "silu", Mish = "mish", Hardswish = "hardswish", ELU = "elu", CELU = "celu", SELU = "selu", GELU = "gelu",
  Hardshrink = "hardshrink", LeakyReLU = "leaky_relu", LogSigmoid = "logsigmoid", Softplus = "softplus", Softshrink = "softshrink",
  Softsign = "softsign", Tanhshrink = "tanhshrink",
}
local ALONG = { Softmax = "softmax", LogSoftmax = "log_softmax", Softmin = "softmin", GLU = "glu" } -- a dim

local classes = {}

---Forward methods by the number of arguments.
local function forward_of(row)
  local fn, overwrite, a, b = row.fn, row.overwrite, row[1] and row[1][1], row[2] and row[2][1]
  if not a then
    return function(self, x)
      if self.inplace then return overwrite(x) end
      return fn(x)
    end
  elseif not b then
    return function(self, x)
      if self.inplace then return overwrite(x, self[a]) end
      return fn(x, self[a])
    end
  end
  return function(self, x)
    if self.inplace then return overwrite(x, self[a], self[b]) end
    return fn(x, self[a], self[b])
  end
end

local function elementwise(class, row)
  function class:init(a, b, opts)
    local inplace
    a, b, inplace = F._arguments(class.__name, row, a, b, opts)
    if row[1] then self[row[1][1]] = a end
    if row[2] then self[row[2][1]] = b end
    self.inplace = inplace
  end

  class.forward = forward_of(row)

  function class:extra_repr()
    local words = {}
    for i, argument in ipairs(row) do
      local name = argument[1]
      words[i] = (name == "lambd" and "" or name .. "=") .. tostring(self[name])
    end
    if self.inplace then words[#words + 1] = "inplace=true" end
    return table.concat(words, ", ")
  end
end

for name, fn in pairs(CLASSES) do
  classes[name] = Module:extend("nn." .. name)
  elementwise(classes[name], F._ACTIVATIONS[fn])
end

local DIM = { dim = true }

for name, fn in pairs(ALONG) do
  local class, f = Module:extend("nn." .. name), F[fn]

  ---@param dim? integer | {dim?: integer} default: the last
  function class:init(dim)
    if type(dim) == "table" then dim = F.options(dim, class.__name, DIM).dim end
    if dim ~= nil and type(dim) ~= "number" then B.fail("TypeError", "%s: dim must be a number, got %s", class.__name, B.type_name(dim)) end
    self.dim = dim or -1
  end
  function class:forward(x) return f(x, self.dim) end
  function class:extra_repr() return "dim=" .. self.dim end
  classes[name] = class
end

---softmax over the channels of (N, C, H, W) or (C, H, W).
local Softmax2d = Module:extend "nn.Softmax2d"
function Softmax2d:forward(x)
  if x.ndim ~= 3 and x.ndim ~= 4 then B.fail("ValueError", "nn.Softmax2d: x has %d dims, expected 3 or 4", x.ndim) end
  return F.softmax(x, -3)
end
classes.Softmax2d = Softmax2d

---Leaky relu whose slope is learnt: one, or one for each channel (dim 2).
---@class nn.PReLU : nn.Module
---@field weight Tensor (num_parameters)
local PReLU = Module:extend "nn.PReLU"

local PRELU = { init = true, dtype = true, device = true }

---@param num_parameters? integer default 1
---@param opts? {init?: number, dtype?: string, device?: string} init: default 0.25; may be given as second argument
function PReLU:init(num_parameters, opts)
  if type(num_parameters) == "table" then num_parameters, opts = nil, num_parameters end
  if type(opts) == "number" then opts = { init = opts } end
  opts = F.options(opts, "nn.PReLU", PRELU)
  self.num_parameters, self._init = num_parameters or 1, opts.init or 0.25
  self.weight = parameter.Parameter(Tensor.empty(self.num_parameters, { dtype = opts.dtype, device = opts.device }))
  self:reset_parameters()
end
function PReLU:reset_parameters() initializers.constant_(self.weight, self._init) end
function PReLU:forward(x) return F.prelu(x, self.weight) end
function PReLU:extra_repr() return "num_parameters=" .. self.num_parameters end
classes.PReLU = PReLU

---Leaky relu whose slope is drawn from [lower, upper) for each element in training, else their mean.
---@class nn.RReLU : nn.Module
local RReLU = Module:extend "nn.RReLU"
local RRELU = { { "lower", 1 / 8 }, { "upper", 1 / 3 }, inplace = true }

---@param lower? number default 1/8
---@param upper? number default 1/3
---@param opts? {inplace?: boolean}
function RReLU:init(lower, upper, opts)
  self.lower, self.upper, self.inplace = F._arguments("nn.RReLU", RRELU, lower, upper, opts)
end
function RReLU:forward(x)
  return F.rrelu(x, self.lower, self.upper, { training = self.training, inplace = self.inplace })
end
function RReLU:extra_repr() return ("lower=%s, upper=%s%s"):format(self.lower, self.upper, self.inplace and ", inplace=true" or "") end
classes.RReLU = RReLU

---Returns its arguments; those of the constructor are ignored.
local Identity = Module:extend "nn.Identity"
function Identity:forward(...) return ... end
classes.Identity = Identity

return classes
