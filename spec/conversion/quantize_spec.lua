---Weights of one byte (lua/quantize.lua, runtime/quantize.c) through modules, conversions, files and loading.

local H = require "spec.helper"
local tm = require "tmod"
local wrapper = require "tmod.wrapper"
local nn, ops = tm.nn, tm.ops
local Int8Weight = tm.Int8Weight

---Largest difference between a weight and its bytes: half a step, which is the row's largest number / 254.
local function half_step(w) return w:abs():amax(2) / 127 / 2 end

describe("Int8Weight", function()
  it("is within half a step of the matrix, row by row, with the largest at 127", function()
    local w = tm.randn(5, 40) * tm.tensor { { 1e-3 }, { 1 }, { 1e3 }, { 1 }, { 1 } }
    w[5]:fill_(0)
    local t = Int8Weight.quantize(w)
    local inner = Int8Weight.flatten(t)
    assert.same({ "int8", "float32" }, { inner.q.dtype, inner.scale.dtype })
    assert.near_tensor({ 127, 127, 127, 127, 0 }, inner.q:float():abs():amax(2))
    local off = (t:to_plain() - w):abs():amax(2)
    assert.is_true(off:le(half_step(w) * 1.001):all():item())
    assert.same({ { 5, 40 }, "float32", "cpu" }, { t:size(), t.dtype, t.device })
  end)

  it("takes a floating matrix and nothing else", function()
    H.raises(function() Int8Weight.quantize(tm.ones(2)) end, "TypeError", "expected a floating matrix")
    H.raises(function() Int8Weight.quantize(tm.ones(2, 2):to "int32") end, "TypeError", "expected a floating matrix")
    H.raises(function() Int8Weight:new { q = tm.ones(2, 2), scale = tm.ones(2) } end, "TypeError", "expected q, int8")
    assert.same({ 3, 0 }, Int8Weight.quantize(tm.ones(3, 0)):size())
  end)

  it("multiplies as the matrix it stands for, in every dtype and for few and many rows", function()
    for _, case in ipairs { { "float32", 1e-4 }, { "float64", 1e-12 }, { "float16", 2e-2 }, { "bfloat16", 2e-1 } } do
      for _, rows in ipairs { 1, 3, 4, 5, 40 } do
        local w = Int8Weight.quantize(tm.randn(300, 65, { dtype = "float32" }):to(case[1]))
        local x, b = tm.randn(rows, 65):to(case[1]), tm.randn(300):to(case[1])
        assert.near_tensor(ops.linear(x, w:to_plain(), b):double(), ops.linear(x, w, b):double(), case[2])
        assert.near_tensor(ops.linear(x, w:to_plain()):double(), ops.linear(x, w):double(), case[2])
      end
    end
  end)

  it("gives x the gradient of the matrix", function()
    local w = Int8Weight.quantize(tm.randn(6, 4))
    local x = tm.randn(3, 4, { requires_grad = true })
    ops.linear(x, w):pow(2):sum():backward()
    local y = x:detach():clone():requires_grad_()
    ops.linear(y, w:to_plain()):pow(2):sum():backward()
    assert.near_tensor(y.grad, x.grad, 1e-5)
  end)

  it("stands for its matrix in every other operator", function()
    local w = Int8Weight.quantize(tm.randn(3, 4))
    assert.near_tensor(w:to_plain():t(), w:t())
    assert.near_tensor(w:to_plain() * 2, w * 2)
  end)
end)

describe("tm.quantize", function()
  local function model() return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) end

  it("replaces the weights of Linears, in a quarter of the memory, with nearly the same results", function()
    local m, x = model(), tm.randn(8, 16)
    local y, before = m(x), tm.fake_memory(m).total
    assert.equal(m, tm.quantize(m))
    assert.equal(Int8Weight, wrapper.class_of(m[1].weight))
    assert.is_true(nn.is_parameter(m[1].weight))
    assert.is_false(m[1].weight.requires_grad)
    assert.near_tensor(y, m(x), 0.05)
    local after = tm.fake_memory(m).total
    assert.equal((16 * 32 + 32 * 4) * 1 + (32 + 4) * 4 + (32 + 4) * 4, after)
    assert.is_true(after < before / 2)
    local w = m[1].weight
    tm.quantize(m)
    assert.equal(w, m[1].weight) -- done already
  end)

  it("takes a filter, and keeps ties among Linears", function()
    local m = model()
    tm.quantize(m, { filter = function(name) return name ~= "2" end })
    assert.same({ Int8Weight, nil }, { wrapper.class_of(m[1].weight), wrapper.class_of(m[3].weight) })
    local a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    tm.quantize(nn.Sequential(a, b))
    assert.equal(a.weight, b.weight)
    H.raises(function() tm.quantize(tm.ones(1)) end, "TypeError", "expected a module")
  end)

  it("trains the rest of the model", function()
    local m = tm.quantize(model(), { filter = function(name) return name == "0" end })
    local opt = tm.optim.SGD(m:parameters(), { lr = 0.1 })
    local x, before = tm.randn(8, 16), m[3].weight:detach():clone()
    m(x):pow(2):mean():backward()
    opt:step()
    assert.is_false(before:equal(m[3].weight:detach()))
    assert.is_nil(m[1].weight.grad)
  end)

  it("C34 K11: converts scales by dtype and bytes by device alone; the parameter stays the same object", function()
    local m = tm.quantize(nn.Linear(8, 4))
    local w, q = m.weight, Int8Weight.flatten(m.weight).q:clone()
    for _, to in ipairs { "half", "double", "bfloat16", "float" } do
      m[to](m)
      assert.equal(w, m.weight)
      assert.equal("int8", Int8Weight.flatten(w).q.dtype)
      assert.equal(m.bias.dtype, w.dtype)
      assert.equal(w.dtype, m(tm.ones(2, 8):to(w.dtype)).dtype)
    end
    m:type "float64"
    assert.same({ "float64", "int8" }, { w.dtype, Int8Weight.flatten(w).q.dtype })
    assert.near_tensor(q:float(), Int8Weight.flatten(w).q:float())
    local before = Int8Weight.flatten(w)
    H.raises(function() m:type "int32" end, "TypeError", "expected q, int8")
    assert.same(before, Int8Weight.flatten(m.weight)) -- a failed conversion changes nothing
    m:to "meta"
    assert.same({ w, "meta" }, { m.weight, w.device })
    m:to_empty { device = "cpu" }
    assert.same({ "cpu", Int8Weight }, { w.device, wrapper.class_of(w) })
  end)

  it("is saved as weight.q and weight.scale, and loads from a file, a plain dictionary, and by assignment", function()
    local path, x = os.tmpname(), tm.randn(2, 16)
    local m = tm.quantize(model())
    tm.save(m:state_dict(), path)
    local sd = tm.load(path)
    os.remove(path)
    assert.equal(Int8Weight, wrapper.class_of(sd["0.weight"]))
    local n = tm.quantize(model())
    local w = n[1].weight
    n:load_state_dict(sd)
    assert.equal(w, n[1].weight)
    assert.near_tensor(m(x), n(x))
    local plain = model()
    n:load_state_dict(plain:state_dict()) -- quantised on the way
    assert.near_tensor(plain(x), n(x), 0.05)
    plain:load_state_dict(m:state_dict()) -- dequantised on the way
    assert.near_tensor(m(x), plain(x), 1e-5)
    local fresh = model()
    fresh:load_state_dict(sd, { assign = true })
    assert.equal(Int8Weight, wrapper.class_of(fresh[1].weight))
    assert.near_tensor(m(x), fresh(x))
    tm.future.with({ swap = true }, function()
      local o = tm.quantize(model())
      local p = o[1].weight
      o:load_state_dict(sd)
      assert.equal(p, o[1].weight)
      assert.near_tensor(m(x), o(x))
    end)
  end)

  it("is copied and swapped", function()
    local m = tm.quantize(model())
    local c, x = m:clone(), tm.randn(2, 16)
    assert.not_equal(m[1].weight, c[1].weight)
    assert.near_tensor(m(x), c(x))
    local a, b = tm.quantize(nn.Linear(4, 3)), tm.quantize(nn.Linear(4, 3))
    local p, q = a.weight:to_plain(), b.weight:to_plain()
    tm.swap_tensors(a.weight, b.weight)
    assert.near_tensor(q, a.weight:to_plain())
    assert.near_tensor(p, b.weight:to_plain())
  end)
end)
