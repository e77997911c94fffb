---lua/nn/initializers.lua and what layers begin with. Distributions are tested by the largest distance between the
---empirical and the expected distribution function (Kolmogorov, Smirnov): of n = 20,000 numbers it exceeds 2.4 / sqrt(n)
---with probability 2 e^(-2 * 2.4^2) = 2e-5. With some 30 such tests and a fixed seed, an unlucky seed had a chance of 1e-3.
local H = require "spec.helper"
local tm = require "tmod"

local nn, init = tm.nn, tm.nn.init
local sqrt = math.sqrt

before_each(function() tm.manual_seed(20) end)

---Share of standard normal numbers below each of x, a float64 tensor or a number.
local function phi(x)
  if type(x) == "number" then return phi(tm.tensor(x, { dtype = "float64" })):item() end
  return (tm.ops.erf(x / sqrt(2)) + 1) / 2
end

---Largest distance between two distribution functions, times sqrt(n).
local function distance(t, cdf)
  local values = t:detach():reshape(-1):tolist()
  table.sort(values)
  local n, largest, p = #values, 0, cdf(tm.tensor(values, { dtype = "float64" })):tolist()
  for i = 1, n do largest = math.max(largest, math.abs(p[i] - (i - 1) / n), math.abs(p[i] - i / n)) end
  return largest * sqrt(n)
end

local function is_uniform(t, low, high)
  assert.is_true(t:detach():amin():item() >= low - 1e-7 and t:detach():amax():item() <= high + 1e-7)
  local d = distance(t, function(v) return (v - low) / (high - low) end)
  assert.is_true(d < 2.4, ("distance %g"):format(d))
end

local function is_normal(t, mean, std, a, b)
  local from, to = a and phi((a - mean) / std) or 0, b and phi((b - mean) / std) or 1
  local d = distance(t, function(v) return (phi((v - mean) / std) - from) / (to - from) end)
  assert.is_true(d < 2.4, ("distance %g"):format(d))
end

---What fn writes to stderr.
local function warning(fn)
  local stderr, said = io.stderr, {}
  io.stderr = { write = function(_, ...) said[#said + 1] = table.concat { ... } end }
  local ok, e = pcall(fn)
  io.stderr = stderr
  if not ok then error(e, 0) end
  return table.concat(said)
end

local function big() return tm.empty(100, 200) end

describe("nn.init", function()
  it("uniform_ and normal_ have their distributions", function()
    is_uniform(init.uniform_(big()), 0, 1)
    is_uniform(init.uniform_(big(), -3, 5), -3, 5)
    is_normal(init.normal_(big()), 0, 1)
    is_normal(init.normal_(big(), 2, 0.5), 2, 0.5)
    assert.is_true(distance(init.normal_(big(), 0, 1.1), phi) > 2.4) -- the test has teeth
    H.raises(function() init.uniform_(big(), 2, 1) end, "ValueError", "uniform: low is 2")
    H.raises(function() init.normal_(big(), 0, -1) end, "ValueError", "std is %-1")
  end)

  it("trunc_normal_ is normal between its bounds", function()
    local t = init.trunc_normal_(big())
    assert.is_true(t:amin():item() >= -2 and t:amax():item() <= 2)
    is_normal(t, 0, 1, -2, 2)
    is_normal(init.trunc_normal_(big(), 1, 2, 0, 9), 1, 2, 0, 9)
    is_normal(init.trunc_normal_(big(), 0, 1, 1.5, 3), 0, 1, 1.5, 3) -- bounds that few numbers meet
    is_normal(init.trunc_normal_(big(), 0, 1, 0.1, 0.3), 0, 1, 0.1, 0.3)
    assert.near_tensor({ 0.5, 0.5 }, init.trunc_normal_(tm.empty(2), 0.5, 0))
    assert.equal("", warning(function() init.trunc_normal_(tm.empty(2)) end))
    assert.truthy(warning(function() init.trunc_normal_(tm.empty(2), 0, 1, 2.1, 3) end):find "mean is more than 2 std from")
    assert.truthy(warning(function() init.trunc_normal_(tm.empty(2), 9) end):find "init_spec")
    H.raises(function() init.trunc_normal_(tm.empty(2), 0, 1, 2, 1) end, "ValueError", "a is 2")
    H.raises(function() init.trunc_normal_(tm.empty(2), 0, 1 / 0) end, "ValueError", "std is inf")
    H.raises(function() init.trunc_normal_(tm.empty(2), 0 / 0) end, "ValueError", "mean is %-?nan")
    assert.near_tensor({ -2, -2 }, init.trunc_normal_(tm.empty(2, { dtype = "float16" }), -2 ^ 31), 1e-3)
    assert.is_true(init.trunc_normal_(tm.empty(20), 0, 1, 1.5, 1e9):amin():item() >= 1.5)
  end)

  it("constant_, ones_, zeros_ and eye_ fill", function()
    assert.near_tensor({ 7, 7 }, init.constant_(tm.empty(2), 7))
    assert.near_tensor({ 1, 1 }, init.ones_(tm.empty(2)))
    assert.near_tensor({ 0, 0 }, init.zeros_(tm.empty(2)))
    assert.near_tensor({ { 1, 0, 0 }, { 0, 1, 0 } }, init.eye_(tm.empty(2, 3)))
    assert.near_tensor({ { 1, 0 }, { 0, 1 }, { 0, 0 } }, init.eye_(tm.empty(3, 2)))
    H.raises(function() init.eye_(tm.empty(2)) end, "ValueError", "eye_: expected 2 dims, got 1")
  end)

  it("dirac_ passes channels unchanged", function()
    local w = init.dirac_(tm.empty(3, 2, 3))
    assert.near_tensor({ { { 0, 1, 0 }, { 0, 0, 0 } }, { { 0, 0, 0 }, { 0, 1, 0 } }, { { 0, 0, 0 }, { 0, 0, 0 } } }, w)
    local g = init.dirac_(tm.empty(4, 2, 2, 3), 2)
    assert.equal(4, g:sum():item())
    for i, c in ipairs { 1, 2, 1, 2 } do assert.equal(1, g[{ i, c, 2, 2 }]:item()) end
    assert.equal(2, init.dirac_(tm.empty(2, 5, 3, 3, 3)):sum():item())
    H.raises(function() init.dirac_(tm.empty(2, 2)) end, "ValueError", "expected 3, 4 or 5 dims, got 2")
    H.raises(function() init.dirac_(tm.empty(3, 2, 3), 2) end, "ValueError", "size of dim 1 is 3, expected a multiple of groups, 2")
  end)

  it("fans count places of a kernel, for any rank", function()
    assert.same({ 3, 2 }, { init.fans(tm.empty(2, 3)) })
    assert.same({ 12, 8 }, { init.fans(tm.empty(2, 3, 4)) })
    assert.same({ 360, 240 }, { init.fans(tm.empty(2, 3, 4, 5, 6)) })
    for _, f in ipairs { "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_" } do
      H.raises(function() init[f](tm.empty(3)) end, "ValueError", f .. ": fan in and fan out need at least 2 dims, got 1")
    end
  end)

  it("xavier_uniform_ and xavier_normal_ follow both fans", function()
    is_uniform(init.xavier_uniform_(big()), -sqrt(6 / 300), sqrt(6 / 300))
    is_uniform(init.xavier_uniform_(tm.empty(50, 20, 20), 2), -2 * sqrt(6 / 1400), 2 * sqrt(6 / 1400))
    is_normal(init.xavier_normal_(big()), 0, sqrt(2 / 300))
    is_normal(init.xavier_normal_(big(), 3), 0, 3 * sqrt(2 / 300))
  end)

  it("kaiming_uniform_ and kaiming_normal_ follow one fan", function()
    is_uniform(init.kaiming_uniform_(big()), -sqrt(6 / 200), sqrt(6 / 200))
    is_uniform(init.kaiming_uniform_(big(), { mode = "fan_out", nonlinearity = "relu" }), -sqrt(6 / 100), sqrt(6 / 100))
    is_uniform(init.kaiming_uniform_(big(), { a = sqrt(5) }), -sqrt(1 / 200), sqrt(1 / 200))
    is_normal(init.kaiming_normal_(big(), { nonlinearity = "linear" }), 0, sqrt(1 / 200))
    is_normal(init.kaiming_normal_(tm.empty(50, 20, 20), { a = 1 }), 0, sqrt(1 / 400))
    is_normal(init.kaiming_normal_(big(), { nonlinearity = "tanh", mode = "fan_out" }), 0, 5 / 3 * sqrt(1 / 100))
    H.raises(function() init.kaiming_normal_(big(), { mode = "fan" }) end, "ValueError", "mode is fan, expected fan_in or fan_out")
    H.raises(function() init.kaiming_normal_(big(), { fan = 1 }) end, "TypeError", "unknown option fan")
    for _, f in ipairs { init.kaiming_uniform_, init.kaiming_normal_ } do
      local t = tm.empty(0, 3)
      assert.truthy(warning(function() assert.is_true(rawequal(t, f(t))) end):find "has no elements")
    end
  end)

  it("calculate_gain knows PyTorch's nonlinearities", function()
    for _, name in ipairs { "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
      "sigmoid" } do
      assert.equal(1, init.calculate_gain(name))
    end
    assert.equal(5 / 3, init.calculate_gain "tanh")
    assert.equal(sqrt(2), init.calculate_gain "relu")
    assert.equal(0.75, init.calculate_gain "selu")
    assert.near(sqrt(2 / 1.0001), init.calculate_gain "leaky_relu", 1e-15)
    assert.near(sqrt(2 / 1.04), init.calculate_gain("leaky_relu", 0.2), 1e-15)
    H.raises(function() init.calculate_gain "swish" end, "ValueError", "unknown nonlinearity swish")
    H.raises(function() init.calculate_gain("leaky_relu", true) end, "ValueError", "slope must be a number, got boolean")
  end)

  it("orthogonal_ makes rows or columns orthonormal, for tall, wide and deep tensors", function()
    for _, shape in ipairs { { 5, 5 }, { 200, 200 }, { 70, 40 }, { 40, 70 }, { 1, 9 }, { 9, 1 }, { 4, 3, 2 }, { 40, 3, 5, 5 },
      { 100, 3, 5, 5 } } do
      local w = init.orthogonal_(tm.empty(shape, { dtype = "float64" }))
      assert.same(shape, w:size())
      local m = w:reshape(shape[1], -1)
      if m:size(1) > m:size(2) then m = m:transpose(1, 2) end
      assert.near_tensor(tm.eye(m:size(1), { dtype = "float64" }), m:matmul(m:transpose(1, 2)), 2e-15)
    end
    local w = init.orthogonal_(tm.empty(3, 8), 2)
    assert.near_tensor(tm.eye(3) * 4, w:matmul(w:transpose(1, 2)), 1e-5)
    H.raises(function() init.orthogonal_(tm.empty(3)) end, "ValueError", "at least 2 dims, got 1")
    init.orthogonal_(tm.empty(0, 3))
  end)

  it("orthogonal_ prefers no direction", function()
    -- The first column of a random 2 by 2 rotation or reflection has an angle that is uniform.
    local t = tm.empty(4000)
    for i = 1, 4000 do
      local w = init.orthogonal_(tm.empty(2, 2))
      t[i] = math.atan2(w[{ 2, 1 }]:item(), w[{ 1, 1 }]:item())
    end
    is_uniform(t, -math.pi, math.pi)
  end)

  it("sparse_ sets the same share of each column to 0, rounded up", function()
    local t = init.sparse_(tm.empty(11, 2000), 0.3, 0.5)
    local zeros = t:eq(0):sum(1)
    assert.equal(4, zeros:amin():item())
    assert.equal(4, zeros:amax():item())
    is_normal(t:masked_select(t:ne(0)), 0, 0.5)
    local rows = t:eq(0):sum(2):tolist() -- 2000 * 4/11 each; 5 standard deviations of 21.5
    for _, n in ipairs(rows) do assert.near(2000 * 4 / 11, n, 108) end
    assert.equal(0, init.sparse_(tm.empty(4, 3), 0):eq(0):sum():item())
    assert.equal(12, init.sparse_(tm.empty(4, 3), 1):eq(0):sum():item())
    H.raises(function() init.sparse_(tm.empty(3), 0.1) end, "ValueError", "sparse_: expected 2 dims, got 1")
    H.raises(function() init.sparse_(tm.empty(3, 3), 1.5) end, "ValueError", "sparsity is 1.5")
  end)

  it("records nothing, returns its argument, and takes leaves that require grad and meta tensors", function()
    for _, name in ipairs { "uniform_", "normal_", "trunc_normal_", "zeros_", "ones_", "eye_", "xavier_uniform_", "xavier_normal_",
      "kaiming_uniform_", "kaiming_normal_", "orthogonal_" } do
      local p = nn.Parameter(tm.empty(3, 4))
      assert.is_true(rawequal(p, init[name](p)), name)
      assert.is_true(p.is_leaf and p.requires_grad)
      local m = tm.empty(3, 4, { device = "meta" })
      assert.is_true(rawequal(m, init[name](m)), name)
      H.raises(function() init[name](3) end, "TypeError", name .. ": expected a tensor, got number")
    end
    init.constant_(nn.Parameter(tm.empty(2)), 1)
    init.sparse_(nn.Parameter(tm.empty(2, 2)), 0.5)
    init.dirac_(nn.Parameter(tm.empty(2, 2, 1)))
  end)

  it("takes a generator last", function()
    for _, fill in ipairs {
      function(t, g) return init.uniform_(t, 0, 1, g) end, function(t, g) return init.normal_(t, 0, 1, g) end,
      function(t, g) return init.trunc_normal_(t, 0, 1, -2, 2, g) end, function(t, g) return init.xavier_uniform_(t, 1, g) end,
      function(t, g) return init.kaiming_normal_(t, nil, g) end, function(t, g) return init.orthogonal_(t, 1, g) end,
      function(t, g) return init.sparse_(t, 0.5, 1, g) end } do
      local state = tm.default_generator:get_state()
      local a, b = fill(tm.empty(4, 5), tm.Generator(3)), fill(tm.empty(4, 5), tm.Generator(3))
      assert.near_tensor(a, b, 0)
      assert.is_true(state:equal(tm.default_generator:get_state()))
    end
    H.raises(function() init.uniform_(tm.empty(2), 0, 1, 5) end, "TypeError", "expected a Generator last, got number")
    -- an error leaves no generator behind
    pcall(init.normal_, tm.empty(2), 0, -1, tm.Generator(3))
    local state = tm.default_generator:get_state()
    init.uniform_(tm.empty(2))
    assert.is_false(state:equal(tm.default_generator:get_state()))
  end)

  it("works in other dtypes and layouts", function()
    assert.equal("float16", init.orthogonal_(tm.empty(3, 3, { dtype = "float16" })).dtype)
    local t = tm.zeros(200, 100):transpose(1, 2)
    is_uniform(init.kaiming_uniform_(t), -sqrt(6 / 200), sqrt(6 / 200))
    local part = tm.zeros(4, 4)
    init.ones_(part:narrow(2, 2, 2))
    assert.equal(8, part:sum():item())
  end)
end)

describe("reset_parameters gives PyTorch's distributions:", function()
  it("nn.Linear", function()
    local m = nn.Linear(50, 20000)
    is_uniform(m.weight[{ { 1, 400 } }], -sqrt(1 / 50), sqrt(1 / 50))
    is_uniform(m.bias, -sqrt(1 / 50), sqrt(1 / 50))
    local w = m.weight:detach():clone()
    m:reset_parameters()
    assert.is_false(w:equal(m.weight:detach()))
    local said = warning(function() assert.near_tensor({ 0, 0 }, nn.Linear(0, 2).bias:detach(), 0) end)
    assert.truthy(said:find "no elements")
  end)

  it("nn.Embedding", function()
    local m = nn.Embedding(200, 100, { padding_idx = 7 })
    is_normal(m.weight:detach()[{ { 8, 200 } }], 0, 1)
    assert.near_tensor(tm.zeros(100), m.weight:detach()[7], 0)
  end)

  it("nn.LayerNorm, nn.BatchNorm1d, nn.PReLU", function()
    for _, m in ipairs { nn.LayerNorm { 2, 3 }, nn.BatchNorm1d(6) } do
      assert.near_tensor(tm.ones(6), m.weight:detach():view(6), 0)
      assert.near_tensor(tm.zeros(6), m.bias:detach():view(6), 0)
    end
    assert.near_tensor(tm.full({ 3 }, 0.25), nn.PReLU(3).weight:detach(), 0)
  end)
end)
