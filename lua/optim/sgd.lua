---sgd.lua: stochastic gradient descent.

local C = require "tmod.ffi".C
local Optimizer = require "tmod.optim.optimizer"
local Tensor = require "tmod.tensor"

---Stochastic gradient descent, with momentum if asked:
---  g = grad + weight_decay * p;  buffer = momentum * buffer + (1 - dampening) * g, at first g
---  p = p - lr * (buffer, or g + momentum * buffer with nesterov)
---@class optim.SGD : Optimizer
---@overload fun(params: Tensor[]|function, opts?: {lr?: number, momentum?: number, nesterov?: boolean}): Optimizer
local SGD = Optimizer:extend("optim.SGD", {
  lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, maximize = false,
}, {
  nesterov = function(on, group)
    if on and (group.momentum == 0 or group.dampening ~= 0) then return "which needs a momentum and no dampening" end
  end,
})

SGD.op = C.tm_op_find "sgd_step"

local NONE, MOMENTUM = {}, { "momentum_buffer" }
function SGD.slots(group) return group.momentum ~= 0 and MOMENTUM or NONE end

local fresh = setmetatable({}, { __mode = "k" }) -- momentum buffers that no update has filled yet

---1: the momentum buffer is fresh, and the update fills it.
function SGD.key(state, group, p)
  if group.momentum == 0 then return 0 end
  local buffer = state.momentum_buffer
  if not buffer then
    buffer = Optimizer.state_like(p, Tensor.empty)
    state.momentum_buffer, fresh[buffer] = buffer, true
  end
  return fresh[buffer] and 1 or 0
end

function SGD.after(state, first)
  if first == 1 then fresh[state.momentum_buffer] = nil end
end

function SGD.arguments(a, group, first)
  a[0], a[1], a[2], a[3] = group.lr, group.momentum, group.dampening, group.weight_decay
  a[4], a[5], a[6] = group.nesterov and 1 or 0, group.maximize and 1 or 0, first
end

return SGD
