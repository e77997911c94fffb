---lua/nn/loss.lua and the losses of F against PyTorch (spec/golden/layers.lua).
local H = require "spec.helper"
local tm = require "tmod"
local golden = require "spec.golden.layers"

local nn, F = tm.nn, tm.nn.functional
local FLOAT64 = { dtype = "float64" }

local function make(text) return setfenv(loadstring("return " .. text), { nn = nn, tm = tm, math = math })():double() end
local function double(t) return tm.tensor(t, FLOAT64) end
local function seeds(y) return y.ndim == 0 and double(0.5) or tm.linspace(0.5, 1.5, y:numel(), FLOAT64):view(y:size()) end

describe("losses", function()
  for i, case in ipairs(golden.losses) do
    it(("%s gives PyTorch's values and gradients (%d)"):format(case.lua, i), function()
      local m, x, target = make(case.lua), double(case.x):requires_grad_(), double(case.target)
      if case.whole then target = target:to "int64" elseif case.dt then target:requires_grad_() end
      local y = m(x, target)
      assert.near_tensor(case.y, y:detach(), 1e-12) -- float64, sums of a dozen terms
      y:backward(seeds(y))
      -- PyTorch's BCELoss divides by no less than 1e-12, rounded to float32
      assert.near_tensor(case.dx, x.grad, case.lua:find "BCELoss" and 1e-8 or 1e-11)
      if case.dt then assert.near_tensor(case.dt, target.grad, 1e-11) end
    end)
  end

  it("have the second gradient of central differences", function()
    tm.manual_seed(6)
    local x = tm.randn(3, 4, FLOAT64):requires_grad_()
    local p, q = tm.rand(3, 4, FLOAT64) * 0.8 + 0.1, tm.rand(3, 4, FLOAT64)
    p:requires_grad_()
    for _, f in ipairs { F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.mse_loss, F.binary_cross_entropy_with_logits, F.kl_div } do
      assert.is_true(tm.autograd.gradgradcheck(function(v) return f(v, q) end, { x }))
    end
    assert.is_true(tm.autograd.gradgradcheck(function(v) return F.binary_cross_entropy(v, q) end, { p }))
  end)

  it("print without arguments and show their options as fields", function()
    assert.equal("CrossEntropyLoss()", tostring(nn.CrossEntropyLoss { label_smoothing = 0.1, reduction = "sum" }))
    assert.equal("HuberLoss()", tostring(nn.HuberLoss { delta = 2 }))
    local m = nn.CrossEntropyLoss { label_smoothing = 0.1 }
    assert.equal("mean", m.reduction)
    assert.equal(-100, m.ignore_index)
    m.reduction = "none"
    assert.same({ 2 }, m(tm.ones(2, 3), tm.tensor({ 1, 2 }, { dtype = "int64" })):size())
  end)

  it("keep weights as buffers that are saved and converted", function()
    local m = nn.BCEWithLogitsLoss { weight = tm.ones(2), pos_weight = tm.full({ 2 }, 3) }
    assert.same({ "weight", "pos_weight" }, m:state_dict():keys())
    assert.equal("float64", m:double().pos_weight.dtype)
    assert.same({}, nn.CrossEntropyLoss():state_dict():keys())
    assert.is_true(nn.NLLLoss():hasattr "weight")
  end)

  it("name what does not fit", function()
    local x = tm.rand(2, 3)
    H.raises(function() nn.MSELoss { reduction = "median" } end, "ValueError",
      "nn.MSELoss: reduction is median, expected mean, sum or none")
    H.raises(function() nn.MSELoss { reduction = "batchmean" } end, "ValueError", "batchmean")
    H.raises(function() nn.KLDivLoss { reduction = "median" } end, "ValueError", "expected batchmean, mean, sum or none")
    H.raises(function() nn.L1Loss { beta = 1 } end, "TypeError", "unknown option beta")
    H.raises(function() nn.SmoothL1Loss { beta = "1" } end, "TypeError", "beta must be a number, got string")
    H.raises(function() nn.SmoothL1Loss { beta = -1 }(x, x) end, "RuntimeError", "beta is %-1")
    H.raises(function() nn.HuberLoss { delta = 0 }(x, x) end, "RuntimeError", "delta is 0")
    H.raises(function() F.l1_loss(x, x, { reduction = "all" }) end, "ValueError", "l1_loss: reduction is all")
    H.raises(function() nn.BCELoss()(x, tm.rand(3)) end, "ValueError", "target has shape %(3%), expected that of x, %(2, 3%)")
    H.raises(function() nn.BCELoss()(x + 1, x) end, "RuntimeError", "outside of %[0, 1%]")
    H.raises(function() nn.BCELoss()(x * (0 / 0), x) end, "RuntimeError", "outside of %[0, 1%]")
    H.raises(function() nn.BCEWithLogitsLoss()(x, 1) end, "TypeError", "target must be a tensor, got number")
  end)

  it("take empty batches as PyTorch does: a mean of nothing is NaN, a sum 0", function()
    local x = tm.zeros(0, 3)
    assert.near_tensor(0 / 0, nn.L1Loss()(x, x):item())
    assert.equal(0, nn.HuberLoss { reduction = "sum" }(x, x):item())
    assert.same({ 0, 3 }, nn.BCELoss { reduction = "none" }(x, x):size())
  end)
end)
