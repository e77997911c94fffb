---lua/nn/norm.lua against PyTorch (spec/golden/layers.lua), with running statistics and state of old versions.
local H = require "spec.helper"
local tm = require "tmod"
local against_pytorch = require "spec.nn.against_pytorch"

local nn, F = tm.nn, tm.nn.functional
local FLOAT64 = { dtype = "float64" }

describe("nn.Linear, nn.PReLU", function() against_pytorch(it, "Linear", "PReLU") end)

describe("nn.LayerNorm", function()
  against_pytorch(it, "LayerNorm")

  it("is right in float32 far from 0, and in the half dtypes", function()
    tm.manual_seed(1)
    local x = tm.randn(300, 1000) + 100 -- more rows than one part
    local y = F.layer_norm(x, 1000)
    assert.near_tensor(F.layer_norm(x:double(), 1000), y:double(), 2e-4) -- x itself is right to 4e-6, and 1/std is 1
    assert.near(0, y:mean(-1):abs():amax():item(), 2e-5) -- the mean, 100, is right to 8e-6
    for dtype, tol in pairs { float16 = 2e-3, bfloat16 = 2e-2 } do
      local h = tm.randn(4, 8):to(dtype)
      local z = F.layer_norm(h, 8, { weight = tm.rand(8):to(dtype) + 1, bias = tm.zeros(8):to(dtype) })
      assert.equal(dtype, z.dtype)
      assert.near_tensor(F.layer_norm(h:double(), 8), F.layer_norm(h, 8):double(), tol)
    end
  end)

  it("sums gradients of many rows, and does so in the same way each time", function()
    tm.manual_seed(2)
    local m, x = nn.LayerNorm(7), tm.randn(5000, 7)
    local dy = tm.randn(5000, 7)
    m(x):backward(dy)
    local xhat = F.layer_norm(x:double(), 7)
    assert.near_tensor((dy:double() * xhat):sum(1), m.weight.grad:double(), 1e-4)
    assert.near_tensor(dy:double():sum(1), m.bias.grad:double(), 1e-4)
    local threads, first = tm.get_num_threads(), m.weight.grad:clone()
    tm.set_num_threads(threads == 1 and 2 or 1)
    m:zero_grad()
    m(x):backward(dy)
    tm.set_num_threads(threads)
    assert.near_tensor(first, m.weight.grad, 0)
  end)

  it("works without rows, and on meta", function()
    assert.same({ 0, 3 }, nn.LayerNorm(3)(tm.zeros(0, 3)):size())
    assert.same({ 2, 3 }, nn.LayerNorm(3, { device = "meta" })(tm.zeros(2, 3, { device = "meta" })):size())
  end)

  it("can be differentiated twice", function()
    local m = nn.LayerNorm(4):double()
    local x = tm.randn(3, 4, FLOAT64):requires_grad_()
    assert.is_true(tm.autograd.gradgradcheck(function(v, w, b) return F.layer_norm(v, 4, { weight = w, bias = b }) end, { x,
      m.weight, m.bias }))
  end)

  it("names what does not fit", function()
    local m = nn.LayerNorm { 2, 3 }
    H.raises(function() m(tm.ones(3, 2)) end, "RuntimeError", "nn.LayerNorm: x is %(3, 2%), expected a tensor whose shape ends in %(2, 3%)")
    H.raises(function() m(tm.ones(3)) end, "RuntimeError", "nn.LayerNorm")
    H.raises(function() nn.LayerNorm {} end, "TypeError", "empty list")
    H.raises(function() F.layer_norm(tm.ones(2, 3), 3, { weight = tm.ones(2) }) end, "RuntimeError", "layer_norm: weight is float32 %(2,%)")
    H.raises(function() F.layer_norm(tm.ones(2, 3), 2) end, "RuntimeError", "expected it to end in %(2%)")
    H.raises(function() F.layer_norm(tm.ones(2, 3):to "int64", 3) end, "RuntimeError", "floating")
  end)

  it("prints as PyTorch has it", function()
    assert.equal("LayerNorm((3,), eps=1e-05, elementwise_affine=true, bias=true)", tostring(nn.LayerNorm(3)))
    assert.equal("LayerNorm((3, 4), eps=0.001, elementwise_affine=false, bias=false)", tostring(nn.LayerNorm({ 3, 4 }, { eps = 1e-3,
      elementwise_affine = false })))
    assert.equal("LayerNorm((3,), eps=1e-05, elementwise_affine=true, bias=false)", tostring(nn.LayerNorm(3, { bias = false })))
    local m = nn.LayerNorm(3, { elementwise_affine = false })
    assert.is_true(m:hasattr "weight" and m.weight == nil)
  end)
end)

describe("nn.BatchNorm1d", function()
  against_pytorch(it, "BatchNorm1d")

  it("averages all batches without a momentum", function()
    local m, sum = nn.BatchNorm1d(2, { momentum = false }), tm.zeros(2)
    for i = 1, 4 do
      local x = tm.full({ 3, 2 }, i)
      x[1] = 0
      m(x)
      sum = sum + x:mean(1)
    end
    assert.near_tensor(sum / 4, m.running_mean, 1e-6)
    assert.equal(4, m.num_batches_tracked:item())
  end)

  it("uses the batch where nothing is tracked, also in evaluation", function()
    local m = nn.BatchNorm1d(2, { track_running_stats = false }):eval()
    assert.near_tensor({ { -1, -1 }, { 1, 1 } }, m(tm.tensor { { 0, 0 }, { 2, 4 } }):detach(), 1e-4)
    assert.is_nil(m.running_mean)
    assert.same({ "weight", "bias" }, m:state_dict():keys())
    H.raises(function() m(tm.ones(1, 2)) end, "ValueError", "more than one value per channel")
  end)

  it("leaves its statistics alone in evaluation, and needs no second value there", function()
    local m = nn.BatchNorm1d(2):eval()
    m(tm.full({ 1, 2 }, 7))
    assert.near_tensor({ 0, 0 }, m.running_mean)
    assert.equal(0, m.num_batches_tracked:item())
    m:train()
    H.raises(function() m(tm.ones(1, 2)) end, "ValueError", "x has shape %(1, 2%), expected more than one value per channel")
    m(tm.ones(1, 2, 3))
  end)

  it("keeps float32 statistics that follow half inputs", function()
    local m = nn.BatchNorm1d(2)
    local y = m(tm.randn(8, 2):to "float16")
    assert.equal("float16", y.dtype)
    assert.equal("float32", m.running_mean.dtype)
  end)

  it("can be differentiated twice in training", function()
    local x = tm.randn(4, 2, 3, FLOAT64):requires_grad_()
    local w = tm.randn(2, FLOAT64):requires_grad_()
    local function fn(v, k) return F.batch_norm(v, nil, nil, { weight = k, training = true }) end
    assert.is_true(tm.autograd.gradcheck(fn, { x, w }))
    assert.is_true(tm.autograd.gradgradcheck(fn, { x, w }))
  end)

  it("resets running statistics and parameters", function()
    local m = nn.BatchNorm1d(2)
    m(tm.randn(5, 2) + 3)
    tm.no_grad(function() m.weight:fill_(3) end)
    m:reset_parameters()
    assert.near_tensor({ 0, 0 }, m.running_mean)
    assert.near_tensor({ 1, 1 }, m.running_var)
    assert.equal(0, m.num_batches_tracked:item())
    assert.near_tensor({ 1, 1 }, m.weight:detach())
  end)

  it("refuses other shapes", function()
    H.raises(function() nn.BatchNorm1d(2)(tm.ones(2)) end, "ValueError", "expected a tensor of 2 or 3 dims, got 1 dims")
    H.raises(function() nn.BatchNorm1d(2)(tm.ones(2, 3)) end, "RuntimeError", "expected 2 channels %(dim 2%)")
    H.raises(function() nn.BatchNorm1d(-1) end, "TypeError", "num_features")
    H.raises(function() F.batch_norm(tm.ones(2, 3)) end, "RuntimeError", "running_mean and running_var are needed")
  end)

  it("prints as PyTorch has it", function()
    assert.equal("BatchNorm1d(4, eps=1e-05, momentum=0.1, affine=true, bias=true, track_running_stats=true)", tostring(nn.BatchNorm1d(4)))
    assert.equal("BatchNorm1d(4, eps=1e-05, momentum=nil, affine=false, bias=false, track_running_stats=false)",
      tostring(nn.BatchNorm1d(4, { momentum = false, affine = false, track_running_stats = false })))
  end)

  it("M192, case 95: keeps its count of batches when an old state lacks it", function()
    local function counted()
      local m = nn.BatchNorm1d(2)
      m.num_batches_tracked:fill_(7)
      return m
    end
    assert.equal(2, nn.BatchNorm1d._version)
    local sd = nn.BatchNorm1d(2):state_dict()
    sd.num_batches_tracked = nil
    local m = counted()
    H.raises(function() m:load_state_dict(sd) end, "RuntimeError", "num_batches_tracked")
    sd._metadata[""].version = 1
    m:load_state_dict(sd)
    assert.equal(7, m.num_batches_tracked:item())
    sd._metadata = nil
    m:load_state_dict(sd)
    assert.equal(7, m.num_batches_tracked:item())
    assert.is_nil(rawget(sd, "num_batches_tracked"))
    -- the mean is missed all the same
    sd.running_mean = nil
    H.raises(function() m:load_state_dict(sd) end, "RuntimeError", 'missing keys[^\n]*"running_mean"')
    -- one that tracks nothing does not ask
    nn.BatchNorm1d(2, { track_running_stats = false }):load_state_dict { weight = tm.ones(2), bias = tm.ones(2) }
    -- and a count on meta cannot be kept
    local on_meta = nn.Sequential(nn.BatchNorm1d(2, { device = "meta" }))
    local whole = nn.Sequential(nn.BatchNorm1d(2)):state_dict()
    whole["0.num_batches_tracked"], whole._metadata = nil, nil
    on_meta:load_state_dict(whole, { assign = true })
    assert.equal(0, on_meta[1].num_batches_tracked:item())
    assert.equal("int64", on_meta[1].num_batches_tracked.dtype)
  end)
end)
