---Fake tensors, lua/fake.lua and runtime/fake.c: planning for a device that is not there, and the rules about fakes.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local F = require "tmod.functional"
local nn = tm.nn
local Int8Weight = tm.Int8Weight

local function cuda(fn, ...) return tm.fake_mode({ device = "cuda" }, fn, ...) end

describe("fake mode", function()
  it("makes fakes of every device, and of none outside", function()
    tm.fake_mode(function()
      assert.same({ "cpu", true }, { tm.zeros(2).device, tm.is_fake(tm.zeros(2)) })
      assert.equal("cuda:3", tm.randn(2, { device = "cuda:3" }).device)
      assert.equal("meta", tm.empty(2, { device = "meta" }).device)
      assert.is_false(tm.is_fake(tm.empty(2, { device = "meta" })))
      assert.is_true(tm.is_fake(tm.tensor { 1, 2 }))
      assert.is_true(tm.is_fake(tm.randperm(4)))
      assert.is_true(tm.is_fake(tm.arange(4)))
      H.raises(function() tm.zeros(1, { device = "cuda:64" }) end, "ValueError", "cuda%:N")
      H.raises(function() tm.zeros(1, { device = "cuda:" }) end, "ValueError", "cuda%:N")
    end)
    assert.is_false(tm.is_fake(tm.zeros(2)))
    H.raises(function() tm.zeros(2, { device = "cuda" }) end, "RuntimeError", "no CUDA")
  end)

  it("ends on errors, returns all results, and nests with other devices", function()
    local ok, e = pcall(tm.fake_mode, { device = "cuda" }, function() error({ 1 }) end)
    assert.same({ false, { 1 } }, { ok, e })
    assert.is_false(tm.is_fake(tm.zeros(1)))
    assert.equal("cpu", tm.get_default_device())
    assert.same({ 1, nil, 3 }, { tm.fake_mode(function(...) return ... end, 1, nil, 3) })
    cuda(function()
      tm.fake_mode({ device = "cuda:1" }, function() assert.equal("cuda:1", tm.zeros(1).device) end)
      assert.equal("cuda:0", tm.zeros(1).device)
      pcall(tm.fake_mode, { device = "gpu" }, function() end)
      assert.equal("cuda:0", tm.zeros(1).device)
    end)
    H.raises(function() tm.fake_mode({ device = "gpu" }, function() end) end, "ValueError", "expected cpu, meta")
    H.raises(function() tm.fake_mode() end, "TypeError", "expected a function")
    H.raises(function() tm.fake_mode({ devise = "cuda" }, function() end) end, "TypeError", "devise")
    assert.is_false(tm.is_fake(tm.zeros(1)))
  end)

  it("runs rules and no kernels: shapes, dtypes, devices, backward, an optimizer's step", function()
    cuda(function()
      local m = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
      local opt = tm.optim.AdamW(m:parameters(), { lr = 0.1 })
      local x, target = tm.randn(4, 8), tm.randint(1, 4, { 4 })
      local loss = F.cross_entropy(m(x), target)
      loss:backward()
      opt:step()
      assert.same({ "cuda:0", "float32", 0 }, { loss.device, loss.dtype, loss.ndim })
      for p in m:parameters() do
        assert.equal("cuda:0", p.device)
        assert.same(p:size(), p.grad:size())
        assert.equal("cuda:0", p.grad.device)
      end
      H.raises(function() return loss:item() end, "NotImplementedError", "fake")
      H.raises(function() return x:gt(0):nonzero() end, "NotImplementedError", "nonzero")
      H.raises(function() return m[1].weight + tm.zeros(8, { device = "cpu" }) end, "RuntimeError", "device")
      assert.matches("device=cuda:0, size=(4, 8)", tostring(x), 1, true)
    end)
  end)

  it("mixes with real tensors nowhere", function()
    local f, x = tm.fake.of(tm.ones(2)), tm.ones(2)
    H.raises(function() return f + x end, "RuntimeError", "%(fake%)")
    H.raises(function() x:copy_(f) end, "NotImplementedError", "no elements")
    H.raises(function() x.data = f end, "RuntimeError", "set_data")
    f:copy_(x) -- there is nothing to write
    assert.is_true(tm.is_fake(f:to "cpu"))
    assert.is_true(tm.is_fake(f:double()))
    H.raises(function() tm.save({ f = f }, "/tmp/never") end, "RuntimeError", "no data")
  end)

  it("loads files without reading their elements", function()
    local path = os.tmpname()
    tm.save({ w = tm.ones(3, 4) }, path)
    tm.collect()
    local before = tm.memory_stats().in_use
    local t = cuda(tm.load, path, { device = "cuda" })
    assert.same({ "cuda:0", { 3, 4 }, true }, { t.w.device, t.w:size(), tm.is_fake(t.w) })
    assert.equal(before, tm.memory_stats().in_use)
    os.remove(path)
  end)

  it("works on memory that nobody has", function()
    local m = cuda(function() return nn.Linear(2 ^ 20, 2 ^ 20):bfloat16() end)
    assert.equal((2 ^ 40 + 2 ^ 20) * 2, tm.fake_memory(m).total)
    assert.equal((2 ^ 40 + 2 ^ 20) * 2, tm.fake_memory(m)["cuda:0"])
  end)
end)

describe("fake memory", function()
  it("counts a module's tensors, gradients and shared memory once", function()
    cuda(function()
      local m = nn.Linear(10, 10)
      assert.same({ total = 440, ["cuda:0"] = 440 }, tm.fake_memory(m))
      m(tm.randn(2, 10)):sum():backward()
      assert.same({ total = 880, ["cuda:0"] = 880 }, tm.fake_memory(m))
      local twice = nn.Sequential(m, m)
      assert.equal(880, tm.fake_memory(twice).total)
      m.bias = nn.Parameter(tm.zeros(10, { device = "cpu" }))
      assert.same({ total = 840, ["cuda:0"] = 800, cpu = 40 }, tm.fake_memory(m))
    end)
    assert.equal(440, tm.fake_memory(nn.Linear(10, 10)).total) -- real ones as well
  end)

  it("follows what is in use and the peak by device", function()
    tm.collect()
    tm.fake.reset_peak()
    local function now() return tm.fake_memory()["cuda:5"] or { in_use = 0, peak = 0 } end
    local base = now().in_use
    local t = tm.fake_mode(tm.zeros, 1000, { device = "cuda:5" })
    assert.equal(base + 4000, now().in_use)
    t:release()
    assert.same({ base, base + 4000 }, { now().in_use, now().peak })
    tm.fake.reset_peak()
    assert.equal(base, now().peak)
  end)
end)

describe("conversions and fakes", function()
  it("plan a real model's move to a device that is not there", function()
    local m = nn.Linear(4, 3)
    local w = m.weight
    tm.fake_mode(m.to, m, "cuda", "bfloat16")
    assert.same({ "cuda:0", "bfloat16", true }, { m.weight.device, m.weight.dtype, tm.is_fake(m.weight) })
    assert.same({ "cpu", "float32" }, { w.device, w.dtype })
    assert.is_true(m.weight.requires_grad)
  end)

  K.each_mode("C33 C34 K8: a fake in the place of a real or meta parameter is a new one, or swapped by the flag", function(mode)
    for _, device in ipairs { "cpu", "meta" } do
      local m = nn.Linear(2, 3, { device = device })
      local w, bias = m.weight, m.bias
      tm.fake_mode(m._apply, m, function(t) return tm.empty(t:size(), { device = "cuda", dtype = t.dtype }) end)
      local swapped = mode.swap
      assert.equal(swapped, w == m.weight)
      assert.equal(swapped, bias == m.bias)
      assert.equal("cuda:0", m.weight.device)
      if not swapped then assert.equal(device, w.device) end
    end
  end)

  K.each_mode("C31 C32 C34 K9 T89: a fake parameter is swapped whatever the flags", function()
    local m = cuda(nn.Linear, 2, 3)
    local w, id, impl = m.weight, tm.id(m.weight), tm.impl_id(m.weight)
    m:to "float64"
    assert.equal(w, m.weight)
    assert.equal(id, tm.id(w))
    assert.not_equal(impl, tm.impl_id(w))
    assert.same({ "float64", "cuda:0" }, { w.dtype, w.device })
    impl = tm.impl_id(w)
    m:to "float64" -- nothing to do, and still another content
    assert.equal(w, m.weight)
    assert.not_equal(impl, tm.impl_id(w))
    tm.fake_mode(m.to, m, "cuda:2")
    assert.equal(w, m.weight)
    assert.same({ "cuda:2", true }, { w.device, w.requires_grad })
    tm.fake_mode(m.to_empty, m, { device = "cpu" })
    assert.same({ "cpu", true }, { w.device, tm.is_fake(w) })
  end)

  K.each_mode("C32 C34 K9: even when it becomes a real tensor", function()
    local m = cuda(nn.Linear, 2, 3)
    local w = m.weight
    m:_apply(function(t) return tm.zeros(t:size()) end)
    assert.equal(w, m.weight)
    assert.same({ "cpu", false }, { w.device, tm.is_fake(w) })
    assert.near_tensor(tm.zeros(3, 2), w:detach())
  end)

  K.each_mode("C35 G4: a fake gradient replaces a real one; with a fake parameter it is swapped", function(mode)
    local swapped = mode.swap
    local m = nn.Linear(2, 3)
    m(tm.ones(1, 2)):sum():backward()
    local w, g = m.weight, m.weight.grad
    tm.fake_mode(m.to, m, "cuda")
    assert.equal(swapped, w == m.weight)
    assert.equal(swapped, g == m.weight.grad)
    assert.same({ "cuda:0", true }, { m.weight.grad.device, tm.is_fake(m.weight.grad) })
    if not swapped then assert.equal("cpu", w.grad.device) end

    m = cuda(nn.Linear, 2, 3)
    cuda(function() m(tm.ones(1, 2)):sum():backward() end)
    w, g = m.weight, m.weight.grad
    m:double()
    assert.same({ w, g }, { m.weight, m.weight.grad })
    assert.same({ "float64", "float64" }, { w.dtype, g.dtype })
  end)

  it("C16: nothing sets a fake's data in silence: the model is where it says", function()
    local m = cuda(nn.Linear, 2, 3)
    tm.fake_mode(m.to, m, "cpu")
    for p in m:parameters() do assert.equal("cpu", p.device) end
    H.raises(function() m.weight.data = tm.zeros(3, 2) end, "RuntimeError", "set_data")
  end)

  it("keep tied fake parameters tied", function()
    cuda(function()
      local a, b = nn.Linear(2, 2), nn.Linear(2, 2)
      b.weight = a.weight
      local m = nn.Sequential(a, b)
      m:half()
      assert.equal(a.weight, b.weight)
      assert.equal("float16", a.weight.dtype)
    end)
  end)

  it("quantise fake models: wrappers of fakes", function()
    local m = tm.quantize(cuda(nn.Linear, 8, 4))
    assert.same({ Int8Weight, true, "cuda:0" }, { require "tmod.wrapper".class_of(m.weight), tm.is_fake(m.weight), m.weight.device })
    assert.same({ total = 8 * 4 + 4 * 4 + 4 * 4, ["cuda:0"] = 64 }, tm.fake_memory(m))
    local y = cuda(function() return m(tm.randn(2, 8)) end)
    assert.same({ { 2, 4 }, "cuda:0" }, { y:size(), y.device })
    local r = tm.quantize(nn.Linear(8, 4))
    tm.fake_mode(r.to, r, "cuda")
    assert.same({ true, "cuda:0" }, { tm.is_fake(r.weight), r.weight.device })
    assert.equal("cpu", tm.fake.of(tm.quantize(nn.Linear(8, 4)).weight).device)
  end)
end)
