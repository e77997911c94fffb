---initializers.lua (nn.init): fill a tensor in place, without recording, and return it.

local B = require "tmod.ffi"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local options = require "tmod.functional".options

local init = {}

local function check(what, t)
  if not B.is_tensor(t) then B.fail("TypeError", "%s: expected a tensor, got %s", what, B.type_name(t)) end
end

local function fill(what, op, t, a, b)
  check(what, t)
  return autograd.no_grad(op, t, a, b)
end

---Uniform numbers of [low, high).
function init.uniform_(t, low, high) return fill("uniform_", ops.uniform_, t, low or 0, high or 1) end
function init.normal_(t, mean, std) return fill("normal_", ops.normal_, t, mean or 0, std or 1) end
function init.constant_(t, value) return fill("constant_", ops.fill_, t, value) end
function init.zeros_(t) return fill("zeros_", ops.fill_, t, 0) end
function init.ones_(t) return fill("ones_", ops.fill_, t, 1) end

---Ones where both positions of a matrix agree, else zeros.
function init.eye_(t)
  check("eye_", t)
  if t.ndim ~= 2 then B.fail("ValueError", "eye_: expected 2 dims, got %d", t.ndim) end
  return autograd.no_grad(ops.copy_, t, ops.eye(t:size(1), t:size(2), t.dtype, t.device))
end

---Inputs and outputs of a unit: weights are (out, in, ...), and further dims are places of a kernel.
local function fans(what, t)
  check(what, t)
  if t.ndim < 2 then B.fail("ValueError", "%s: fan in and fan out need at least 2 dims, got %d", what, t.ndim) end
  local sizes, places = t:size(), 1
  for i = 3, #sizes do places = places * sizes[i] end
  return sizes[2] * places, sizes[1] * places
end

local GAIN = { linear = 1, identity = 1, sigmoid = 1, conv1d = 1, conv2d = 1, conv3d = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4 }

---By how much a nonlinearity shrinks the standard deviation of what passes through it, inverted.
---@param a? number slope of leaky_relu below 0; default 0.01
function init.calculate_gain(nonlinearity, a)
  if nonlinearity == "leaky_relu" then return math.sqrt(2 / (1 + (a or 0.01) ^ 2)) end
  return GAIN[nonlinearity] or B.fail("ValueError", "calculate_gain: unknown nonlinearity %s", tostring(nonlinearity))
end

local KAIMING = { a = true, mode = true, nonlinearity = true }

---Standard deviation that keeps the variance of values (fan_in) or of gradients (fan_out) from layer to layer (He 2015).
local function kaiming_std(what, t, opts)
  opts = options(opts, what, KAIMING)
  local fan_in, fan_out = fans(what, t)
  local mode = opts.mode or "fan_in"
  if mode ~= "fan_in" and mode ~= "fan_out" then
    B.fail("ValueError", "%s: mode is %s, expected fan_in or fan_out", what, tostring(mode))
  end
  return init.calculate_gain(opts.nonlinearity or "leaky_relu", opts.a or 0) / math.sqrt(mode == "fan_in" and fan_in or fan_out)
end

---@param opts? {a?: number, mode?: "fan_in"|"fan_out", nonlinearity?: string} a: slope of leaky_relu, default 0
function init.kaiming_uniform_(t, opts)
  local bound = math.sqrt(3) * kaiming_std("kaiming_uniform_", t, opts)
  return init.uniform_(t, -bound, bound)
end
function init.kaiming_normal_(t, opts) return init.normal_(t, 0, kaiming_std("kaiming_normal_", t, opts)) end

---Standard deviation between those for values and for gradients (Glorot 2010).
local function xavier_std(what, t, gain)
  local fan_in, fan_out = fans(what, t)
  return (gain or 1) * math.sqrt(2 / (fan_in + fan_out))
end

function init.xavier_uniform_(t, gain)
  local bound = math.sqrt(3) * xavier_std("xavier_uniform_", t, gain)
  return init.uniform_(t, -bound, bound)
end
function init.xavier_normal_(t, gain) return init.normal_(t, 0, xavier_std("xavier_normal_", t, gain)) end

return init
