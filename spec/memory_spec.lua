---Every allocation fails in turn: each failure is an OutOfMemory error or harmless, never a crash, and leaks nothing.

require "spec.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local C, ffi = B.C, B.ffi
local Function = tm.autograd.Function

---Runs fn once for each allocation that it makes, with that one failing. fn's own state is made anew by setup.
local function fail_each(setup, fn)
  local function run(at, state)
    C.tm_memory_fail_at(at)
    local ok, err = pcall(fn, state)
    C.tm_memory_fail_at(0)
    return ok, err
  end
  local function count()
    local before = tonumber(C.tm_memory_allocations())
    local ok, err = run(0, setup())
    assert.is_true(ok, tostring(err))
    return tonumber(C.tm_memory_allocations()) - before
  end
  count() -- what is made on first use and stays
  local n, failures = count(), 0
  assert.is_true(n > 0)
  tm.collect()
  local before = tm.live()
  local step = math.max(1, math.floor(n / 400))
  for at = 1, n + 1, step do
    local ok, err = run(at, setup())
    if not ok then
      failures = failures + 1
      assert.is_true(type(err) == "table" and err.kind == "OutOfMemory", ("allocation %d of %d: %s"):format(at, n, tostring(err)))
      assert.truthy(err.message:find "out of memory", err.message)
      assert.truthy(err.where:find "spec/memory_spec.lua:%d+", ("allocation %d: where is %q"):format(at, err.where))
    end
    assert.is_true(tm.is_grad_enabled())
  end
  tm.collect()
  assert.same(before, tm.live())
  assert.near_tensor({ 2, 2 }, tm.ones(2) + 1, 0) -- all still works
  return failures, n
end

local function leaf(...) return tm.randn(..., { requires_grad = true }) end

describe("when memory runs out", function()
  before_each(function() tm.empty_cache() end)

  it("a forward and backward pass with an in-place change and a save fails cleanly", function()
    local path = os.tmpname()
    local failures = fail_each(function()
      return { w = leaf { 4, 3 }, b = leaf { 4 }, x = tm.randn(5, 3), y = tm.tensor({ 1, 2, 3, 4, 1 }, { dtype = "int64" }) }
    end, function(s)
      local h = tm.ops.linear(s.x, s.w, s.b)
      h:mul_(2)
      h[{ {}, 1 }] = s.b[1]
      local loss = tm.nn.functional.cross_entropy(h:tanh(), s.y)
      loss:backward()
      tm.no_grad(function() s.w:sub_(s.w.grad, 0.1) end)
      tm.save({ w = s.w, b = s.b.grad }, path)
    end)
    os.remove(path)
    assert.is_true(failures > 10)
  end)

  it("indexing, joining and reductions fail cleanly", function()
    fail_each(function() return leaf { 3, 4 } end, function(w)
      local y = tm.cat({ w, w * 2 }, 1)
      local z = y[{ tm.tensor({ 1, 3 }, { dtype = "int64" }), { 1, 3 } }]
      local m = y[y:gt(0)]
      local t = tm.stack({ y:prod(2), y:sum(2) })
      local values = y:max(1)
      ;(z:sum() + m:sum() + t:mean() + values:sum() + y:softmax():t():contiguous():std()):backward()
    end)
  end)

  it("double backward fails cleanly", function()
    fail_each(function() return leaf { 2, 3 } end, function(w)
      local y = (w:matmul(w:t()):exp() * w[{ {}, { 1, 2 } }]):sum()
      local g = tm.autograd.grad(y, w, { create_graph = true })
      g:pow(2):sum():backward()
    end)
  end)

  it("hooks and custom functions fail cleanly", function()
    local Scale = Function:extend "Scale"
    function Scale.forward(ctx, x, by)
      ctx:save_for_backward(x)
      ctx.by = by
      return x * by, x + 1
    end
    function Scale.backward(ctx, dy, dz)
      local x = ctx:saved()
      return dy * ctx.by + dz * x:sign():abs()
    end
    fail_each(function() return leaf { 3 } end, function(w)
      local h = w:register_hook(function(g) return g * 2 end)
      w:register_post_accumulate_grad_hook(function(t) t.grad:add_(1) end)
      local y, z = Scale.apply(w, 3)
      y:retain_grad()
      y:register_hook(function(g) return g + 1 end)
      ;(y * z):sum():backward()
      h:remove()
    end)
  end)

  it("optimizer steps and conversions fail cleanly", function()
    fail_each(function()
      local list = {}
      for i = 1, 4 do list[i] = tm.ones(5, { dtype = "float16" }) end
      return list
    end, function(list)
      tm.ops.adam_step(list, 0.1, 0.9, 0.99, 1e-3, 0.01, false, false, false, 1)
      local t = list[1]:to("float64"):view(5, 1):expand(5, 3):contiguous()
      tm.swap_tensors(t, list[2])
      t.data = list[3]
      return t:tolist()
    end)
  end)

  it("creation, random numbers and printing fail cleanly", function()
    fail_each(function() end, function()
      local t = tm.tensor({ { 1, 2 }, { 3, 4 } })
      local r = tm.randperm(10):float() + tm.rand(10) + tm.randn(10):uniform_()
      local s = tostring(t) .. tostring(r)
      local g = tm.Generator(1)
      tm.rand(3, { generator = g })
      g:set_state(g:get_state())
      return s
    end)
  end)

  it("a custom function after one that saved more fails cleanly", function()
    local Many = Function:extend "SavesMany"
    function Many.forward(ctx, x)
      ctx:save_for_backward(x, x, x, x, x, x, x, x, x, x, x, x)
      return x * 2
    end
    function Many.backward(_, dy) return dy * 2 end
    local Few = Function:extend "SavesFew"
    function Few.forward(ctx, a, b)
      ctx:save_for_backward(a, b)
      return a * b
    end
    function Few.backward(ctx, dy)
      local a, b = ctx:saved()
      return dy * b, dy * a
    end
    fail_each(function()
      return Many.apply(Few.apply(leaf { 3 }, leaf { 3 })):sum()
    end, function(y) y:backward() end)
  end)

  it("an operator on a view whose base has changed is recorded with the new history or not done", function()
    for at = 1, 30 do
      local w, base = leaf { 2, 2 }, tm.ones(2, 2)
      local v = base[1]
      base:mul_(w)
      C.tm_memory_fail_at(at)
      local ok, y = pcall(function() return v * 3 end)
      C.tm_memory_fail_at(0)
      if ok then assert.near_tensor({ { 3, 3 }, { 0, 0 } }, tm.autograd.grad(y:sum(), w), 0) end
    end
  end)

  it("a fake tensor that was not made counts no bytes", function()
    local device, bytes = nil, ffi.new "double[2]"
    tm.fake_mode(function() device = C.tm_device_find "cuda:5" end)
    for at = 1, 2 do
      C.tm_memory_fail_at(at)
      assert.is_true(C.tm_tensor_new(1, ffi.new("int64_t[1]", 1000), C.TM_F32, device) == nil)
      C.tm_memory_fail_at(0)
      assert.equal(0, C.tm_fake_memory(device, bytes))
      assert.equal(0, bytes[0])
    end
  end)
end)

describe("a handle", function()
  it("of a released tensor stays an error, however often its slot is used again", function()
    local h, size = B.handles, ffi.new("int64_t[1]", 1)
    local function put() return C.tm_handles_put(h, C.tm_tensor_new(1, size, C.TM_F32, 0)) end
    local first = put()
    C.tm_handles_release(h, first)
    for _ = 1, 2 ^ 20 + 1 do
      local x = put()
      if x == first then error "the number came again" end
      C.tm_handles_release(h, x)
    end
    assert.is_true(C.tm_handles_at(h, first) == nil)
  end)
end)
