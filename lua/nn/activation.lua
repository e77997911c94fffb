---activation.lua: functions of F as modules, so that containers can hold them.

local F = require "tmod.functional"
local Module = require "tmod.nn.module"

-- dim: takes the dim along which it works (1-based, default the last); inplace: {inplace = true} overwrites its input.
local ACTIVATIONS = {
  ReLU = { fn = "relu", inplace = true },
  Tanh = { fn = "tanh" },
  Sigmoid = { fn = "sigmoid" },
  Softmax = { fn = "softmax", dim = true },
  LogSoftmax = { fn = "log_softmax", dim = true },
}

local classes = {}

local function along_dim(class, fn)
  function class:init(dim) self.dim = dim or -1 end
  function class:forward(x) return fn(x, self.dim) end
  function class:extra_repr() return "dim=" .. self.dim end
end

local function elementwise(class, fn, known)
  function class:init(opts) self.options = opts and F.options(opts, class.__name, known) end
  function class:forward(x) return fn(x, self.options) end
  function class:extra_repr() return self.options and self.options.inplace and "inplace=true" or "" end
end

for name, a in pairs(ACTIVATIONS) do
  local class = Module:extend("nn." .. name)
  if a.dim then along_dim(class, F[a.fn]) else elementwise(class, F[a.fn], { inplace = a.inplace }) end
  classes[name] = class
end

---Returns its argument.
local Identity = Module:extend "nn.Identity"
function Identity:forward(...) return ... end
classes.Identity = Identity

return classes
