---lua/nn/utils.lua: vectors of parameters, clipped gradients, summary and tree.
local H = require "spec.helper"
local tm = require "tmod"

local nn = tm.nn
local utils = nn.utils

describe("nn.utils", function()
  it("joins parameters in a vector and takes them out of one", function()
    local m = nn.Linear(2, 3)
    local v = utils.parameters_to_vector(m:parameters())
    assert.same({ 9 }, v:size())
    v:sum():backward()
    assert.near_tensor(tm.ones(3, 2), m.weight.grad)
    utils.vector_to_parameters(tm.arange(1, 10):float(), { m.weight, m.bias })
    assert.near_tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, m.weight:detach())
    assert.near_tensor({ 7, 8, 9 }, m.bias:detach())
    H.raises(function() utils.vector_to_parameters(tm.ones(3), m:parameters()) end, "ValueError", "expected a vector of 9 elements, got 3")
    H.raises(function() utils.parameters_to_vector(3) end, "TypeError", "got number")
    H.raises(function() utils.parameters_to_vector { 3 } end, "TypeError", "element 1 is no tensor")
  end)

  local function with_grads()
    local a, b, c = nn.Parameter(tm.zeros(2)), nn.Parameter(tm.zeros(1)), nn.Parameter(tm.zeros(1))
    a.grad, b.grad = tm.tensor { 3, 0 }, tm.tensor { -4 }
    return a, b, c
  end

  it("clips the norm of all gradients together", function()
    local a, b, c = with_grads()
    assert.near(5, utils.clip_grad_norm_({ a, b, c }, 1):item(), 1e-6)
    assert.near_tensor({ 0.6, 0 }, a.grad, 1e-6)
    assert.near_tensor({ -0.8 }, b.grad, 1e-6)
    assert.near(1, utils.clip_grad_norm_({ a, b }, 2):item(), 1e-6)
    assert.near_tensor({ 0.6, 0 }, a.grad, 1e-6) -- it was small enough
    a, b = with_grads()
    assert.near(7, utils.clip_grad_norm_({ a, b }, 1, { norm_type = 1 }):item(), 1e-6)
    assert.near_tensor({ 3 / 7, 0 }, a.grad, 1e-6)
    a, b = with_grads()
    assert.equal(4, utils.clip_grad_norm_({ a, b }, 1, { norm_type = math.huge }):item())
    assert.near_tensor({ 0.75, 0 }, a.grad, 1e-6)
    assert.equal(0, utils.clip_grad_norm_({}, 1):item())
    a.grad = tm.tensor { 1 / 0, 1 }
    H.raises(function() utils.clip_grad_norm_(a, 1, { error_if_nonfinite = true }) end, "RuntimeError", "not finite")
    assert.near_tensor({ 1 / 0, 1 }, a.grad)
  end)

  it("clips each element", function()
    local a, b, c = with_grads()
    utils.clip_grad_value_({ a, b, c }, 2)
    assert.near_tensor({ 2, 0 }, a.grad)
    assert.near_tensor({ -2 }, b.grad)
    assert.is_nil(c.grad)
  end)
end)

local function model()
  local shared = nn.Linear(20, 20)
  return nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.ReLU(), shared, shared), nn.BatchNorm1d(20), nn.Linear(20, 2))
end

describe("nn.utils.summary", function()
  it("tells of each call, in order: output shape, own parameters, memory", function()
    local m = model()
    m[4]:requires_grad_(false)
    local s = utils.summary(m, tm.randn(4, 10))
    assert.equal([[
layer             output   parameters  memory  output memory
------------------------------------------------------------
Sequential        (4, 2)            -       -           32 B
  0: Linear       (4, 20)         220   880 B          320 B
  1: Sequential   (4, 20)           -       -          320 B
    0: ReLU       (4, 20)           -       -          320 B
    1: Linear     (4, 20)         420  1.6 KB          320 B
    1: Linear     (4, 20)    (shared)       -          320 B
  2: BatchNorm1d  (4, 20)          40   328 B          320 B
  3: Linear       (4, 2)           42   168 B           32 B
------------------------------------------------------------
parameters: 722, trained: 680, memory: 3.0 KB, outputs: 1.6 KB]], tostring(s))
    assert.equal(722, s.parameters)
    assert.equal("1.1", s.rows[5].path)
    assert.is_true(rawequal(m[1], s.rows[2].module))
  end)

  it("leaves no hook, no gradient, no changed statistics and no changed mode behind", function()
    local m = model()
    m[1]:eval()
    local before = m[3].running_mean:clone()
    utils.summary(m, { 4, 10 })
    assert.is_true(m.training)
    assert.is_false(m[1].training)
    assert.near_tensor(before, m[3].running_mean, 0)
    local failed = pcall(utils.summary, m, tm.randn(4, 9))
    assert.is_false(failed)
    assert.is_true(m.training)
    local calls = 0
    m[2][1].forward = function(_, x)
      calls = calls + 1
      return x
    end
    m(tm.randn(2, 10))
    assert.equal(1, calls)
    assert.equal(0, H.live(function() utils.summary(m, { 4, 10 }) end))
  end)

  it("shows results of any kind, and counts what was not called", function()
    local Net = nn.Module:extend "Net"
    function Net:init() self.used, self.unused = nn.Linear(2, 3), nn.Linear(100, 100) end
    function Net:forward(x, scale) return { y = self.used(x) * scale, list = { x, 5 } }, x end
    local s = utils.summary(Net(), tm.ones(1, 2), 2)
    assert.equal("{list = {(1, 2), number}, y = (1, 3)}, (1, 2)", s.rows[1].output)
    assert.equal(10109, s.parameters)
    assert.truthy(tostring(s):find("parameters: 10,109", 1, true))
    H.raises(function() utils.summary(3) end, "TypeError", "expected a module, got number")
  end)
end)

describe("model:tree", function()
  it("draws the modules with their own parameters, shared ones once", function()
    local m = model()
    m:add_module("none")
    assert.equal([[
Sequential
├─ 0: Linear(in_features=10, out_features=20, bias=true)  220
├─ 1: Sequential
│  ├─ 0: ReLU
│  ├─ 1: Linear(in_features=20, out_features=20, bias=true)  420
│  └─ 2: Linear(in_features=20, out_features=20, bias=true)  (shared)
├─ 2: BatchNorm1d(20, eps=1e-05, momentum=0.1, affine=true, bias=true, track_running_stats=true)  40
├─ 3: Linear(in_features=20, out_features=2, bias=true)  42
└─ none: nil]], m:tree())
    assert.equal("Linear(in_features=1000, out_features=1000, bias=true)  1,001,000", nn.Linear(1000, 1000):tree())
  end)

  it("ends at a module that contains itself", function()
    local m = nn.Module()
    m.me = m
    assert.equal("Module\n└─ me: Module  (contains itself)", m:tree())
  end)
end)
