---adam.lua: Adam and AdamW.

local B = require "tmod.ffi"
local Optimizer = require "tmod.optim.optimizer"

local function betas_rule(betas)
  local a, b = betas[1], betas[2]
  if #betas ~= 2 or type(a) ~= "number" or type(b) ~= "number" or not (a >= 0 and a < 1 and b >= 0 and b < 1) then
    return "expected two numbers of [0, 1)"
  end
end

local PLAIN, AMSGRAD = { "exp_avg", "exp_avg_sq" }, { "exp_avg", "exp_avg_sq", "max_exp_avg_sq" }

local function define(name, weight_decay, decoupled)
  local class = Optimizer:extend(name, { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay, amsgrad = false,
    maximize = false }, { betas = betas_rule })

  class.op = B.C.tm_op_find "adam_step"
  function class.slots(group) return group.amsgrad and AMSGRAD or PLAIN end

  ---The step, counted from 1: with it the operator corrects the bias of young averages.
  function class.key(state, group, p)
    if not state.exp_avg then
      state.step, state.exp_avg, state.exp_avg_sq = 0, Optimizer.state_like(p), Optimizer.state_like(p)
    end
    if group.amsgrad and not state.max_exp_avg_sq then state.max_exp_avg_sq = Optimizer.state_like(p) end
    return state.step + 1
  end

  function class.after(state, step) state.step = step end

  function class.arguments(a, group, step)
    local betas = group.betas
    a[0], a[1], a[2], a[3], a[4] = group.lr, betas[1], betas[2], group.eps, group.weight_decay
    a[5], a[6], a[7], a[8] = decoupled, group.amsgrad and 1 or 0, group.maximize and 1 or 0, step
  end
  return class
end

return {
  ---Averages m of the gradient and v of its square; p = p - lr * m' / (sqrt(v') + eps), with m', v' corrected for
  ---their start at 0 (Kingma and Ba 2015). weight_decay is added to the gradient.
  Adam = define("optim.Adam", 0, 0),
  ---The same, but weight_decay shrinks the parameter itself: p = p * (1 - lr * weight_decay) first.
  AdamW = define("optim.AdamW", 1e-2, 1),
}
