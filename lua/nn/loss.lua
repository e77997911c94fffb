---loss.lua: losses of F as modules. Each takes F's options and shows them as fields; weights are buffers, so they move and
---convert with the module.

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"

-- Buffers, and options with their defaults, beside reduction.
local LOSSES = {
  CrossEntropyLoss = { fn = "cross_entropy", buffers = { "weight" }, options = { ignore_index = -100, label_smoothing = 0 } },
  NLLLoss = { fn = "nll_loss", buffers = { "weight" }, options = { ignore_index = -100 } },
  MSELoss = { fn = "mse_loss" },
  L1Loss = { fn = "l1_loss" },
  SmoothL1Loss = { fn = "smooth_l1_loss", options = { beta = 1 } },
  HuberLoss = { fn = "huber_loss", options = { delta = 1 } },
  BCELoss = { fn = "binary_cross_entropy", buffers = { "weight" } },
  BCEWithLogitsLoss = { fn = "binary_cross_entropy_with_logits", buffers = { "weight", "pos_weight" } },
  KLDivLoss = { fn = "kl_div", options = { log_target = false }, batchmean = true },
}

local REDUCTION = { mean = true, sum = true, none = true }

local classes = {}

local function define(name, loss)
  local class = Module:extend("nn." .. name)
  local fn, buffers, defaults = F[loss.fn], loss.buffers or {}, loss.options or {}
  local known = { reduction = true }
  for _, b in ipairs(buffers) do known[b] = true end
  for k in pairs(defaults) do known[k] = true end

  function class:init(opts)
    opts = F.options(opts, class.__name, known)
    local reduction = opts.reduction or "mean"
    if not REDUCTION[reduction] and not (loss.batchmean and reduction == "batchmean") then
      B.fail("ValueError", "%s: reduction is %s, expected %smean, sum or none", class.__name, tostring(reduction), loss.batchmean
        and "batchmean, " or "")
    end
    self.reduction = reduction
    for k, default in pairs(defaults) do
      local v = opts[k]
      if v == nil then v = default end
      if type(v) ~= type(default) then B.fail("TypeError", "%s: %s must be a %s, got %s", class.__name, k, type(default),
        B.type_name(v)) end
      self[k] = v
    end
    for _, b in ipairs(buffers) do self:register_buffer(b, opts[b]) end
  end

  function class:forward(x, target)
    local opts = { reduction = self.reduction }
    for k, default in pairs(defaults) do
      if self[k] ~= default then opts[k] = self[k] end
    end
    for i = 1, #buffers do opts[buffers[i]] = self[buffers[i]] end
    return fn(x, target, opts)
  end

  return class
end

for name, loss in pairs(LOSSES) do classes[name] = define(name, loss) end

return classes
