---adagrad.lua: Adagrad, written with operators.

local autograd = require "tmod.autograd"
local Optimizer = require "tmod.optim.optimizer"
local Tensor = require "tmod.tensor"

---Sums up the squares of each gradient (Duchi, Hazan and Singer 2011):
---  g = grad + weight_decay * p;  sum = sum + g^2
---  p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)
---The sums exist from the start, at initial_accumulator_value.
---@class optim.Adagrad : Optimizer
---@overload fun(params: Tensor[]|function, opts?: {lr?: number, lr_decay?: number, weight_decay?: number}): Optimizer
local Adagrad = Optimizer:extend("optim.Adagrad", {
  lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10, maximize = false,
})

local function start(self, group, p)
  local function initial(size, opts) return Tensor.full(size, group.initial_accumulator_value, opts) end
  self.state[p] = { step = 0, sum = Optimizer.state_like(p, initial) }
end

function Adagrad:add_param_group(group)
  Optimizer.add_param_group(self, group)
  group = self.param_groups[#self.param_groups]
  for _, p in ipairs(group.params) do start(self, group, p) end
end

local function update(self, group)
  for _, p in ipairs(group.params) do
    local g = p.grad
    if g then
      if not self.state[p] then start(self, group, p) end
      local state = self.state[p]
      g = g:to(state.sum.dtype)
      if group.maximize then g = -g end
      if group.weight_decay ~= 0 then g = g + p * group.weight_decay end
      state.sum:add_(g * g)
      state.step = state.step + 1
      p:sub_(g / (state.sum:sqrt() + group.eps) * (group.lr / (1 + (state.step - 1) * group.lr_decay)))
    end
  end
end

function Adagrad:step_group(group) autograd.no_grad(update, self, group) end

return Adagrad
