---lua/nn/activation.lua: values and gradients against PyTorch (spec/golden/layers.lua), arguments, printing, in-place forms.
local H = require "spec.helper"
local tm = require "tmod"
local golden = require "spec.golden.layers"

local nn, F = tm.nn, tm.nn.functional

local function make(text) return setfenv(loadstring("return " .. text), { nn = nn, tm = tm, math = math })() end
local function double(t) return tm.tensor(t, { dtype = "float64" }) end
local function seeds(y) return tm.linspace(0.5, 1.5, y:numel(), { dtype = "float64" }):view(y:size()) end

describe("activations", function()
  -- float64: exp and erf are right to an ulp. PyTorch takes 1/6 in float32 for Hardsigmoid's gradient. What a gradient is at
  -- NaN does not matter, as the value is NaN, and hardswish of -inf is its limit 0 here and NaN there.
  local function comparable(case, list)
    local copy = {}
    for k, v in ipairs(list) do copy[k] = v end
    for k, v in ipairs(case.x) do
      if v ~= v and list == case.dx or case.lua == "nn.Hardswish()" and v == -1 / 0 then copy[k] = 0 end
    end
    return copy
  end
  for i, case in ipairs(golden.activations) do
    it(("%s gives PyTorch's values and gradients (%d)"):format(case.lua, i), function()
      local m, x = make(case.lua), double(case.x):requires_grad_()
      local y = m(x)
      assert.near_tensor(comparable(case, case.y), y:detach(), 1e-12)
      y:backward(seeds(y))
      local dx = x.grad:tolist()
      for k, v in ipairs(case.x) do
        if v ~= v then dx[k] = 0 end
      end
      assert.near_tensor(comparable(case, case.dx), dx, case.lua == "nn.Hardsigmoid()" and 1e-7 or 1e-11)
    end)
  end

  it("have the gradient and the second gradient of central differences", function()
    tm.manual_seed(3)
    for _, f in ipairs { F.silu, F.mish, F.elu, F.celu, F.selu, F.gelu, F.softplus, F.softsign, F.tanhshrink, F.logsigmoid,
      F.hardswish, F.leaky_relu, F.hardtanh, F.relu6, F.hardsigmoid, F.softshrink, F.hardshrink, function(x) return F.gelu(x,
        "tanh") end, F.glu } do
      local x = tm.randn(3, 4, { dtype = "float64" }):requires_grad_()
      assert.is_true(tm.autograd.gradcheck(function(v) return f(v) end, { x }))
      assert.is_true(tm.autograd.gradgradcheck(function(v) return f(v) end, { x }))
    end
  end)

  it("keep the dtype, also the half ones", function()
    for _, f in ipairs { F.silu, F.mish, F.elu, F.selu, F.gelu, F.softplus, F.softsign, F.logsigmoid, F.hardswish, F.leaky_relu,
      F.hardtanh, F.softshrink } do
      for _, dtype in ipairs { "float16", "bfloat16", "float32", "float64" } do
        assert.equal(dtype, f(tm.tensor({ -1, 0.5 }, { dtype = dtype })).dtype)
      end
    end
  end)

  it("take arguments in order or by name", function()
    assert.equal(0.2, nn.LeakyReLU(0.2).negative_slope)
    assert.equal(0.2, nn.LeakyReLU { negative_slope = 0.2 }.negative_slope)
    assert.equal(3, nn.Hardtanh(-1, { max_val = 3 }).max_val)
    assert.is_true(nn.ELU(2, true).inplace)
    assert.is_true(nn.ELU(2, { inplace = true }).inplace)
    assert.is_true(nn.ReLU(true).inplace)
    assert.is_false(nn.ReLU().inplace)
    H.raises(function() nn.ELU { beta = 2 } end, "TypeError", "nn.ELU: unknown option beta; known: alpha, inplace")
    H.raises(function() nn.ELU "x" end, "TypeError", "nn.ELU: alpha must be a number, got string")
    H.raises(function() nn.GELU { inplace = true } end, "TypeError", "unknown option inplace")
    H.raises(function() nn.Threshold(1) end, "TypeError", "nn.Threshold: value is missing")
    H.raises(function() nn.GELU("erf")(tm.ones(1)) end, "TypeError", "gelu")
    assert.near_tensor({ -2, 3 }, F.hardtanh(tm.tensor { -9, 9 }, -2, 3))
    assert.near_tensor({ -2, 3 }, F.hardtanh(tm.tensor { -9, 9 }, { min_val = -2, max_val = 3 }))
  end)

  it("read their fields at each call", function()
    local m = nn.LeakyReLU(0.5)
    m.negative_slope = 0.25
    assert.near_tensor({ -1 }, m(tm.tensor { -4 }))
  end)

  it("refuse arguments without a meaning", function()
    local x = tm.ones(2)
    H.raises(function() F.hardtanh(x, 2, 1) end, "ValueError", "min_val is 2, expected at most max_val, 1")
    H.raises(function() F.celu(x, 0) end, "RuntimeError", "alpha is 0")
    H.raises(function() F.softshrink(x, -1) end, "RuntimeError", "lambd is %-1")
    H.raises(function() F.rrelu(x, 2, 1) end, "ValueError", "lower is 2")
    H.raises(function() F.glu(tm.ones(2, 3)) end, "RuntimeError", "glu: size of dim %-1 is 3")
    H.raises(function() F.glu(tm.ones {}) end, "RuntimeError", "0%-dim")
    H.raises(function() F.prelu(tm.ones(2, 3), tm.ones(2)) end, "RuntimeError", "weight has 2 elements, expected 1 or .* 3")
    H.raises(function() nn.Softmax2d()(tm.ones(2)) end, "ValueError", "1 dims, expected 3 or 4")
  end)

  it("overwrite their input when asked, with the same values and gradients", function()
    tm.manual_seed(4)
    for name, m in pairs { relu = nn.ReLU(true), sigmoid = nn.Sigmoid(true), tanh = nn.Tanh(true), silu = nn.SiLU(true),
      elu = nn.ELU(1.5, true),
      selu = nn.SELU(true), mish = nn.Mish(true), hardswish = nn.Hardswish(true), hardtanh = nn.Hardtanh { inplace = true },
        celu = nn.CELU(1, true),
      leaky_relu = nn.LeakyReLU(0.1, true), threshold = nn.Threshold(0.1, 2, true), relu6 = nn.ReLU6(true),
        hardsigmoid = nn.Hardsigmoid(true),
      rrelu = nn.RReLU({ inplace = true }):eval() } do
      local a = tm.randn(20, { dtype = "float64" }):requires_grad_()
      local x = a * 2
      local y = m(x)
      assert.is_true(rawequal(x, y), name)
      y:sum():backward()
      local inplace = a.grad
      a.grad = nil
      m.inplace = false
      local z = m(a * 2)
      assert.near_tensor(z:detach(), y:detach(), 0)
      z:sum():backward()
      assert.near_tensor(a.grad, inplace, 0)
      m.inplace = true
      H.raises(function() m(a) end, "RuntimeError", "leaf")
    end
  end)

  it("print as PyTorch has it", function()
    for text, m in pairs { ["Threshold(threshold=0.1, value=20)"] = nn.Threshold(0.1, 20), ["ReLU()"] = nn.ReLU(),
      ["ReLU(inplace=true)"] = nn.ReLU(true),
      ["Hardtanh(min_val=-1, max_val=1)"] = nn.Hardtanh(), ["ReLU6(inplace=true)"] = nn.ReLU6(true),
        ["ELU(alpha=2, inplace=true)"] = nn.ELU(2, true),
      ["CELU(alpha=1)"] = nn.CELU(), ["SELU()"] = nn.SELU(), ["GLU(dim=-1)"] = nn.GLU(), ["GELU(approximate=tanh)"] = nn.GELU "tanh",
      ["Hardshrink(0.5)"] = nn.Hardshrink(), ["LeakyReLU(negative_slope=0.01)"] = nn.LeakyReLU(),
        ["Softplus(beta=1, threshold=20)"] = nn.Softplus(),
      ["Softshrink(0.25)"] = nn.Softshrink(0.25), ["PReLU(num_parameters=4)"] = nn.PReLU(4), ["Softmin(dim=1)"] = nn.Softmin(1),
        ["Softmax2d()"] = nn.Softmax2d(),
      ["LogSoftmax(dim=2)"] = nn.LogSoftmax { dim = 2 }, ["Identity()"] = nn.Identity(1, { x = 2 }),
        ["RReLU(lower=0.125, upper=0.5)"] = nn.RReLU { upper = 0.5 },
      ["Tanh()"] = nn.Tanh(), ["Hardswish()"] = nn.Hardswish() } do
      assert.equal(text, tostring(m))
    end
  end)
end)

describe("nn.RReLU", function()
  it("draws a slope for each element in training", function()
    tm.manual_seed(5)
    local x = tm.full({ 1000 }, -1):requires_grad_()
    local y = nn.RReLU(0.2, 0.4)(x)
    y:sum():backward()
    assert.near_tensor(y:detach(), -x.grad, 0)
    local low, high = x.grad:amin():item(), x.grad:amax():item()
    assert.is_true(low >= 0.2 and low < 0.21 and high < 0.4 and high > 0.39)
    assert.near(0.3, x.grad:mean():item(), 0.01) -- 5 standard errors
    assert.near_tensor({ 2 }, nn.RReLU()(tm.tensor { 2 }))
  end)
end)

describe("nn.PReLU", function()
  it("starts at 0.25, or at init", function()
    assert.near_tensor({ 0.25 }, nn.PReLU().weight:detach())
    assert.near_tensor({ 0.5, 0.5 }, nn.PReLU(2, { init = 0.5 }).weight:detach())
    assert.equal("weight", table.concat(nn.PReLU(3):state_dict():keys(), " "))
  end)
end)

describe("nn.Identity", function()
  it("returns all its arguments", function() assert.same({ 1, nil, 3 }, { nn.Identity()(1, nil, 3) }) end)
end)
