---loss.lua: losses of F as modules. Each takes F's options; the class weights are a buffer, so they move and convert
---with the module.

local F = require "tmod.functional"
local Module = require "tmod.nn.module"

-- Options beside weight and reduction.
local LOSSES = {
  CrossEntropyLoss = { fn = "cross_entropy", weight = true, ignore_index = true, label_smoothing = true },
  NLLLoss = { fn = "nll_loss", weight = true, ignore_index = true },
  MSELoss = { fn = "mse_loss" },
}

local REDUCTION = { mean = true, sum = true, none = true }

local classes = {}

local function define(name, loss)
  local class = Module:extend("nn." .. name)
  local fn, known = F[loss.fn], { reduction = true, weight = loss.weight, ignore_index = loss.ignore_index,
    label_smoothing = loss.label_smoothing }

  function class:init(opts)
    opts = F.options(opts, class.__name, known)
    if opts.reduction ~= nil and not REDUCTION[opts.reduction] then
      require "tmod.ffi".fail("ValueError", "%s: reduction is %s, expected mean, sum or none", class.__name, tostring(opts.reduction))
    end
    if loss.weight then self:register_buffer("weight", opts.weight) end
    local own = {}
    for k, v in pairs(opts) do own[k] = v end
    self.options = next(own) and own
  end

  if loss.weight then
    function class:forward(x, target)
      local opts = self.options
      if opts then opts.weight = self.weight end
      return fn(x, target, opts)
    end
  else
    function class:forward(x, target) return fn(x, target, self.options) end
  end

  function class:extra_repr() return self.options and self.options.reduction and "reduction=" .. self.options.reduction or "" end
  return class
end

for name, loss in pairs(LOSSES) do classes[name] = define(name, loss) end

return classes
