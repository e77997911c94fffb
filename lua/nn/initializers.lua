---initializers.lua (nn.init): fill a tensor in place, without recording, and return it. The random ones take a generator
---last. Weights are (out, in, ...), where further dims are places of a kernel.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local errors = require "tmod.errors"
local ops = require "tmod.ops"
local options = require "tmod.functional".options

local init = {}

local function check(what, t)
  if not B.is_tensor(t) then B.fail("TypeError", "%s: expected a tensor, got %s", what, B.type_name(t)) end
end

local function warn(message) io.stderr:write("tmod: warning: ", errors.where(), ": ", message, "\n") end

local function finish(ok, ...)
  B.generator = nil
  if not ok then error((...), 0) end
  return ...
end

---fn(t, ...) without recording, random numbers from the generator if one is given.
local function fill(what, generator, fn, t, a, b, c, d)
  check(what, t)
  if generator == nil then return autograd.no_grad(fn, t, a, b, c, d) end
  if type(generator) ~= "table" or not generator._p then B.fail("TypeError", "%s: expected a Generator last, got %s", what,
    B.type_name(generator)) end
  B.generator = generator._p
  return finish(pcall(autograd.no_grad, fn, t, a, b, c, d))
end

---Uniform numbers of [low, high).
---@param low? number default 0
---@param high? number default 1
function init.uniform_(t, low, high, generator) return fill("uniform_", generator, ops.uniform_, t, low or 0, high or 1) end

---@param mean? number default 0
---@param std? number default 1
function init.normal_(t, mean, std, generator) return fill("normal_", generator, ops.normal_, t, mean or 0, std or 1) end

function init.constant_(t, value) return fill("constant_", nil, ops.fill_, t, value) end
function init.zeros_(t) return fill("zeros_", nil, ops.fill_, t, 0) end
function init.ones_(t) return fill("ones_", nil, ops.fill_, t, 1) end

-- truncated normal ------------------------------------------------------------------------------------------------------------

---Share of normal numbers below x (Abramowitz, Stegun 7.1.26: right to 1e-7, enough to choose a method).
local function mass_below(x)
  local z = math.abs(x) / math.sqrt(2)
  local t = 1 / (1 + 0.3275911 * z)
  local erf = 1 - ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * math.exp(-z * z)
  return (1 + (x < 0 and -erf or erf)) / 2
end

local function outside(t, a, b) return ops.logical_or(ops.lt(t, a), ops.gt(t, b)) end

---Numbers outside of [a, b] are drawn again.
local function redraw(t, mean, std, a, b)
  ops.normal_(t, mean, std)
  local wrong = outside(t, a, b)
  while ops.any(wrong):item() do
    ops.copy_(t, ops.where(wrong, ops.normal_(Tensor.empty_like(t), mean, std), t))
    wrong = outside(t, a, b)
  end
  return t
end

---For bounds that few normal numbers meet: uniform numbers, accepted with a chance that follows the bell.
local function accept(t, mean, std, a, b)
  local peak = ((math.max(a, math.min(mean, b)) - mean) / std) ^ 2
  local reach = math.sqrt(peak + 80) * std -- beyond it the chance is nil, and wide bounds would be met by nothing else
  a, b = math.max(a, mean - reach), math.min(b, mean + reach)
  local pending = Tensor.ones(t:size(), { dtype = "bool", device = t.device })
  repeat
    local drawn = ops.uniform_(Tensor.empty_like(t), a, b)
    ops.copy_(t, ops.where(pending, drawn, t))
    local z = (drawn:double() - mean) / std -- float16 would make far means infinite
    local chance = ops.exp((z * z - peak) * -0.5)
    pending = ops.logical_and(pending, ops.ge(ops.uniform_(Tensor.empty_like(t)), chance))
  until not ops.any(pending):item()
  return t
end

---Normal numbers of [a, b]: others are drawn again.
---@param mean? number default 0
---@param std? number default 1
---@param a? number default -2
---@param b? number default 2
function init.trunc_normal_(t, mean, std, a, b, generator)
  check("trunc_normal_", t)
  mean, std, a, b = mean or 0, std or 1, a or -2, b or 2
  if not (math.abs(mean) < math.huge and std >= 0 and std < math.huge) then
    B.fail("ValueError", "trunc_normal_: mean is %g, std is %g", mean, std)
  end
  if not (a <= b) then B.fail("ValueError", "trunc_normal_: a is %g, expected at most b, %g", a, b) end
  if mean < a - 2 * std or mean > b + 2 * std then
    warn("trunc_normal_: mean is more than 2 std from [a, b]; the distribution may be far from what was meant")
  end
  if t.device == "meta" or t:numel() == 0 then return t end
  if std == 0 then return init.constant_(t, math.max(a, math.min(mean, b))) end
  local often = mass_below((b - mean) / std) - mass_below((a - mean) / std) > 0.3
  return fill("trunc_normal_", generator, often and redraw or accept, t, mean, std, a, b)
end

-- matrices --------------------------------------------------------------------------------------------------------------------

local function check_matrix(what, t)
  check(what, t)
  if t.ndim ~= 2 then B.fail("ValueError", "%s: expected 2 dims, got %d", what, t.ndim) end
end

---Ones where both positions of a matrix agree, else zeros.
function init.eye_(t)
  check_matrix("eye_", t)
  return fill("eye_", nil, ops.copy_, t, ops.eye(t:size(1), t:size(2), t.dtype, t.device))
end

local function dirac(t, groups)
  local out = t:size(1) / groups
  ops.fill_(t, 0)
  for g = 0, groups - 1 do
    for d = 1, math.min(out, t:size(2)) do
      local v = ops.select(ops.select(t, 1, g * out + d), 1, d)
      for i = 3, t.ndim do v = ops.select(v, 1, math.floor(t:size(i) / 2) + 1) end
      ops.fill_(v, 1)
    end
  end
  return t
end

---The weight (out, in, ...) of a convolution that passes as many channels as it can unchanged.
---@param groups? integer default 1
function init.dirac_(t, groups)
  check("dirac_", t)
  groups = groups or 1
  if t.ndim < 3 or t.ndim > 5 then B.fail("ValueError", "dirac_: expected 3, 4 or 5 dims, got %d", t.ndim) end
  if t:size(1) % groups ~= 0 then B.fail("ValueError", "dirac_: size of dim 1 is %d, expected a multiple of groups, %d", t:size(1),
    groups) end
  return fill("dirac_", nil, dirac, t, groups)
end

---Makes the rows of w (n, m), n <= m, orthonormal: each keeps what the ones before it do not span, taken off twice, as
---once leaves rounding errors. Blocks of rows, so that most of the work is in matrix products.
local function orthonormalise(w)
  local n, block = w:size(1), 32
  local function take_off(rows, from) ops.sub_(rows, ops.matmul(ops.matmul(rows, ops.transpose(from, 1, 2)), from)) end
  for first = 1, n, block do
    local rows = ops.narrow(w, 1, first, math.min(block, n - first + 1))
    for i = 1, rows:size(1) do
      local row = ops.narrow(rows, 1, i, 1)
      for _ = 1, 2 do
        if i == 1 and first > 1 then take_off(rows, ops.narrow(w, 1, 1, first - 1)) end
        if i > 1 then take_off(row, ops.narrow(rows, 1, 1, i - 1)) end
      end
      ops.div_(row, ops.sqrt(ops.sum(row * row)))
    end
  end
  return w
end

local function orthogonal(t, gain)
  local n = t:size(1)
  local m = t:numel() / n
  -- As the rows of Q in a QR decomposition whose R has a positive diagonal: every orthogonal matrix is equally likely.
  local w = ops.normal_(Tensor.empty({ math.min(n, m), math.max(n, m) }, { dtype = "float64", device = t.device }), 0, 1)
  orthonormalise(w)
  if n > m then w = ops.transpose(w, 1, 2) end
  return ops.copy_(t, ops.reshape(w, t:size()) * gain)
end

---Rows (out) or, if there are more of these than columns, columns that are orthonormal, times gain (Saxe et al. 2013).
---@param gain? number default 1
function init.orthogonal_(t, gain, generator)
  check("orthogonal_", t)
  if t.ndim < 2 then B.fail("ValueError", "orthogonal_: expected at least 2 dims, got %d", t.ndim) end
  if t:numel() == 0 or t.device == "meta" then return t end
  return fill("orthogonal_", generator, orthogonal, t, gain or 1)
end

local function sparse(t, count, std)
  local n = t:size(1)
  ops.normal_(t, 0, std)
  for column = 1, count > 0 and t:size(2) or 0 do
    local places = ops.narrow(ops.randperm(n, nil, t.device), 1, 1, count)
    ops.index_put_(ops.select(t, 2, column), ops.full({}, 0, t.dtype, t.device), { places, n = 1 }, false)
  end
  return t
end

---Normal numbers, but a share `sparsity` of each column, rounded up, is 0 (Martens 2010).
---@param sparsity number 0 to 1
---@param std? number default 0.01
function init.sparse_(t, sparsity, std, generator)
  check_matrix("sparse_", t)
  if type(sparsity) ~= "number" or not (sparsity >= 0 and sparsity <= 1) then
    B.fail("ValueError", "sparse_: sparsity is %s, expected 0 to 1", tostring(sparsity))
  end
  if t.device == "meta" then return t end
  return fill("sparse_", generator, sparse, t, math.ceil(sparsity * t:size(1)), std or 0.01)
end

-- variances that keep from layer to layer -----------------------------------------------------------------------------------------

---Inputs and outputs of a unit of a weight (out, in, ...), each times the places of the kernel.
local function fans(what, t)
  check(what, t)
  if t.ndim < 2 then B.fail("ValueError", "%s: fan in and fan out need at least 2 dims, got %d", what, t.ndim) end
  local sizes, places = t:size(), 1
  for i = 3, #sizes do places = places * sizes[i] end
  return sizes[2] * places, sizes[1] * places
end

---@return integer fan_in
---@return integer fan_out
function init.fans(t) return fans("fans", t) end

local GAIN = { linear = 1, conv1d = 1, conv2d = 1, conv3d = 1, conv_transpose1d = 1, conv_transpose2d = 1, conv_transpose3d = 1,
  sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4 }

---By how much a nonlinearity shrinks the standard deviation of what passes through it, inverted.
---@param slope? number of leaky_relu below 0; default 0.01
function init.calculate_gain(nonlinearity, slope)
  if nonlinearity == "leaky_relu" then
    if slope ~= nil and type(slope) ~= "number" then B.fail("ValueError", "calculate_gain: the slope must be a number, got %s",
      B.type_name(slope)) end
    return math.sqrt(2 / (1 + (slope or 0.01) ^ 2))
  end
  return GAIN[nonlinearity] or B.fail("ValueError", "calculate_gain: unknown nonlinearity %s", tostring(nonlinearity))
end

local KAIMING = { a = true, mode = true, nonlinearity = true }

---Standard deviation that keeps the variance of values (fan_in) or of gradients (fan_out) from layer to layer; nil for a
---tensor without elements.
local function kaiming_std(what, t, opts)
  opts = options(opts, what, KAIMING)
  check(what, t)
  if t:numel() == 0 then return warn(what .. ": the tensor has no elements") end
  local fan_in, fan_out = fans(what, t)
  local mode = opts.mode or "fan_in"
  if mode ~= "fan_in" and mode ~= "fan_out" then
    B.fail("ValueError", "%s: mode is %s, expected fan_in or fan_out", what, tostring(mode))
  end
  return init.calculate_gain(opts.nonlinearity or "leaky_relu", opts.a or 0) / math.sqrt(mode == "fan_in" and fan_in or fan_out)
end

---For what comes before a relu (He 2015).
---@param opts? {a?: number, mode?: "fan_in"|"fan_out", nonlinearity?: string} a: slope of leaky_relu, default 0
function init.kaiming_uniform_(t, opts, generator)
  local std = kaiming_std("kaiming_uniform_", t, opts)
  if not std then return t end
  return init.uniform_(t, -math.sqrt(3) * std, math.sqrt(3) * std, generator)
end
function init.kaiming_normal_(t, opts, generator)
  local std = kaiming_std("kaiming_normal_", t, opts)
  return std and init.normal_(t, 0, std, generator) or t
end

---Standard deviation between those for values and for gradients (Glorot 2010).
local function xavier_std(what, t, gain)
  local fan_in, fan_out = fans(what, t)
  return (gain or 1) * math.sqrt(2 / math.max(fan_in + fan_out, 1))
end

---@param gain? number default 1
function init.xavier_uniform_(t, gain, generator)
  local bound = math.sqrt(3) * xavier_std("xavier_uniform_", t, gain)
  return init.uniform_(t, -bound, bound, generator)
end
function init.xavier_normal_(t, gain, generator) return init.normal_(t, 0, xavier_std("xavier_normal_", t, gain), generator) end

return init
