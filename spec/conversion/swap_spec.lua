---Section 6 of docs/contracts/conversion.md: what swap_tensors checks, exchanges and refuses.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local nn = tm.nn

K.guard()

local function param(...) return nn.Parameter(tm.ones(...)) end
local function swapping(fn, ...) return K.with_flags { swap = true }(fn, ...) end
local function refused(a, b, pattern)
  local before = { K.describe(a), K.describe(b) }
  local ok, reason = tm.can_swap(a, b)
  assert.is_false(ok)
  assert.truthy(reason:find(pattern), reason)
  local e = H.raises(function() tm.swap_tensors(a, b) end, "RuntimeError", pattern)
  assert.same(before, { K.describe(a), K.describe(b) })
  return e
end

---A tensor of a class that declares fields.
local function with_slots(t, ...)
  rawset(t, "_class", { slots = { ... } })
  return t
end

describe("tm.swap_tensors", function()
  it("C86: of two results of one node exchanges where their gradients are retained", function()
    local Two = tm.autograd.Function:extend "TwoResults"
    function Two.forward(_, x) return x * 2, x * 3 end
    function Two.backward(_, a, b) return a * 2 + b * 3 end
    local a, b = Two.apply(param(2))
    a:retain_grad()
    b:retain_grad()
    tm.swap_tensors(a, b)
    ;(a * 10 + b * 100):sum():backward()
    assert.near_tensor({ 10, 10 }, a.grad, 0)
    assert.near_tensor({ 100, 100 }, b.grad, 0)
  end)

  it("C86 T108: exchanges everything, of tensors that differ in everything; handles stay", function()
    local a, b = tm.ones(2, 3, { requires_grad = true }), tm.ones({ 5 }, { dtype = "int64", device = "meta" })
    a.grad, a.name, b.other = tm.zeros(2, 3), "a", 7
    local x, y = K.describe(a), K.describe(b)
    assert.is_nil(tm.swap_tensors(a, b))
    local p, q = K.describe(a), K.describe(b)
    assert.same({ x.id, y.id }, { p.id, q.id })
    assert.same({ x.epoch + 1, y.epoch + 1 }, { p.epoch, q.epoch })
    for _, d in ipairs { x, y, p, q } do d.id, d.epoch = nil, nil end
    assert.same(x, q)
    assert.same(y, p)
  end)

  it("C27 C86: exchanges class with content", function()
    local p, t = param(2), tm.zeros(3)
    tm.swap_tensors(p, t)
    assert.is_false(nn.is_parameter(p))
    assert.is_true(nn.is_parameter(t))
    assert.is_true(t.requires_grad)
    assert.is_false(p.requires_grad)
  end)

  it("C27: of a tensor with itself checks and changes nothing", function()
    local a = param(2)
    a.tag = 1
    local before = K.describe(a)
    tm.swap_tensors(a, a)
    assert.same(before, K.describe(a))
    tm.pin(a)
    refused(a, a, "used 2 times")
    tm.unpin(a)
  end)

  it("C87: methods in place act on the new content and return the handle", function()
    local a, b = tm.ones(2), tm.ones(3)
    tm.swap_tensors(a, b)
    assert.equal(a, a:mul_(2))
    assert.equal(b, b:add_(1))
    assert.same({ 2, 2, 2 }, a:tolist())
    assert.same({ 2, 2 }, b:tolist())
  end)

  it("C74: weak references of both, then slots, then counts, t1 before t2; the first obstacle is named", function()
    local a, b = with_slots(param(2), "x"), with_slots(param(2), "y")
    local ra, rb = tm.weakref(a), tm.weakref(b)
    tm.pin(a)
    tm.pin(b)
    refused(a, b, "t1, float32 %(2,%), has a weak reference")
    ra:release()
    refused(a, b, "t2, float32 %(2,%), has a weak reference")
    rb:release()
    refused(a, b, "t1 has slots {x}, t2 has slots {y}")
    rawset(b, "_class", { slots = { "x" } })
    refused(a, b, "content of t1, .*used 2 times")
    tm.unpin(a)
    refused(a, b, "content of t2, .*used 2 times")
    tm.unpin(b)
    tm.swap_tensors(a, b)
  end)

  it("C75 C76 T96: a weak reference blocks, an identity reference does not and still finds its tensor", function()
    swapping(function()
      local l = K.linear()
      local shadow = tm.weakref(l.weight) -- as a moving average of the weights keeps one
      assert.equal(l.weight, shadow:get())
      local e = K.unchanged(l, function() l:half() end, "RuntimeError", "_apply: cannot swap Linear.weight")
      assert.truthy(e.cause.message:find "weak reference")
      shadow:release()
      assert.is_nil(shadow:get())
      local identity = tm.weakref(l.weight, { identity = true })
      local epoch = tm.epoch(l.weight)
      l:half()
      assert.equal(l.weight, identity())
      assert.equal("float16", identity:get().dtype)
      assert.equal(epoch + 1, tm.epoch(l.weight)) -- C77: by which its holder sees that the content is another
    end)
  end)

  it("C76: a weak reference does not keep its tensor", function()
    local ref = tm.weakref(param(2), { identity = true })
    tm.collect()
    assert.is_nil(ref:get())
    H.raises(function() tm.weakref(3) end, "TypeError")
    H.raises(function() tm.weakref(param(1), { identify = true }) end, "TypeError", "identify")
  end)

  it("C77: components that hold parameters weakly convert under swap: optimizers, averages, hook handles", function()
    swapping(function()
      local l = K.linear()
      local optimizer = tm.optim.Adam(l:parameters())
      optimizer:step()
      local handle = l.weight:register_hook(function() end)
      local average = {}
      for _, p in l:named_parameters() do average[tm.weakref(p, { identity = true })] = p:detach():clone() end
      l:double()
      handle:remove()
      for ref in pairs(average) do assert.equal("float64", ref:get().dtype) end
    end)
  end)

  it("C70 C78 T60: different slots are refused before anything changes; equal ones are exchanged with their values", function()
    local a, b = with_slots(param(2), "x", "y"), with_slots(param(3), "x")
    a.x, b.x = 1, 2
    refused(a, b, "t1 has slots {x, y}, t2 has slots {x}")
    refused(b, a, "t1 has slots {x}")
    refused(a, param(1), "t2 has slots {}")
    local ref = tm.weakref(b)
    refused(a, b, "t2, .*weak reference")
    ref:release()
    local c = with_slots(param(3), "y", "x")
    c.y = 5
    tm.swap_tensors(a, c)
    assert.same({ [1] = nil, y = 5 }, { a.x, y = a.y })
    assert.same({ 1 }, { c.x, c.y })
  end)

  it("C79: a count of 2 is fine when the second reference is the leaf's own accumulator, which is poisoned", function()
    local a, b = param(2), param(2)
    local y = (a * 3):sum()
    assert.equal(2, tm.use_count(a))
    assert.is_true(tm.can_swap(a, b))
    tm.swap_tensors(a, b)
    assert.equal(1, tm.use_count(a))
    H.raises(function() y:backward() end, "RuntimeError", "was swapped between forward and backward")
    assert.is_nil(a.grad)
    assert.is_nil(b.grad)
    tm.pin(a)
    y = (a * 3):sum()
    local e = refused(a, b, "used 3 times, expected once: other references to it exist")
    assert.equal("RuntimeError", e.kind)
    tm.unpin(a)
  end)

  it("C80: the check makes no accumulator", function()
    local a = param(2)
    tm.can_swap(a, param(2))
    assert.equal(1, tm.use_count(a))
  end)

  it("C81: a tensor that requires no grad and is used twice is refused", function()
    local t = tm.ones(2)
    tm.pin(t)
    refused(t, tm.ones(2), "used 2 times")
    tm.unpin(t)
  end)

  it("C81 T61: a view does not count (section 2.1, V4)", function()
    local t = tm.zeros(2, 2)
    local view = t[1]
    tm.swap_tensors(t, tm.ones(3))
    view:fill_(4)
    assert.same({ 1, 1, 1 }, t:tolist())
    assert.same({ 4, 4 }, view:tolist())
  end)

  it("C82 T47: a C container that keeps a content blocks the conversion", function()
    swapping(function()
      local l = K.linear()
      tm.pin(l.weight) -- as a reducer's bucket would
      local e = K.unchanged(l, function() l:half() end, "RuntimeError", "_apply: cannot swap Linear.weight")
      assert.truthy(e.cause.message:find "used 2 times")
      tm.unpin(l.weight)
      l:half()
    end)
  end)

  it("C82: what a graph saved does not block (section 2.1, V4)", function()
    swapping(function()
      local l = nn.Linear(2, 3)
      local y, norm = l(tm.ones(1, 2, { requires_grad = true })), nn.LayerNorm(2)
      local z = norm(tm.ones(1, 2))
      l:half()
      norm:half()
      assert.equal("float32", y.dtype)
      assert.equal("float32", z.dtype)
    end)
  end)

  it("C83 C85 T107: Lua references, optimizers, snapshots and a held gradient do not matter", function()
    swapping(function()
      local l = K.linear()
      local held = {}
      for i = 1, 100 do held[i] = l.weight end
      local optimizer, sd, g = tm.optim.SGD(l:parameters(), { lr = 0.1 }), l:state_dict(), l.weight.grad
      l:half()
      assert.equal("float16", held[50].dtype)
      assert.equal(g, l.weight.grad)
      assert.equal("float16", g.dtype)
      assert.equal("float32", sd["weight"].dtype)
      optimizer:step()
    end)
  end)

  it("C84: no reference to a content is weak: identity references are to handles, any number of them may exist", function()
    local a, refs = param(2), {}
    for i = 1, 10 do refs[i] = tm.weakref(a, { identity = true }) end
    assert.is_true(tm.can_swap(a, param(2)))
    refs[3]:release()
    tm.swap_tensors(a, param(3))
    for i, ref in ipairs(refs) do assert.equal(i ~= 3 and a or nil, ref:get()) end
  end)

  it("C85: a gradient's handle stays attached, and its own content is checked", function()
    swapping(function()
      local l = K.linear()
      local g = l.weight.grad
      assert.equal(1, tm.use_count(g))
      tm.pin(g)
      local e = K.unchanged(l, function() l:half() end, "RuntimeError", "_apply: cannot swap Linear%.weight%.grad")
      assert.equal("weight.grad", e.parameter)
      tm.unpin(g)
      l:half()
      assert.equal(g, l.weight.grad)
    end)
  end)

  pending("C88: contexts of a tracing session are exchanged: there is no tracing")

  it("C89 T46: what is in the way and garbage is collected, and the swap tried once more", function()
    swapping(function()
      local l = K.linear()
      tm.weakref(l.weight) -- dropped, and not collected yet
      tm.weakref(l.bias)
      assert.is_false(tm.can_swap(l.weight, param(1)))
      l:half()
      assert.equal("float16", l.weight.dtype)
      local a, b = param(2), param(2)
      tm.weakref(b)
      tm.swap_tensors(a, b)
      l.weight[1]:sum() -- a slice and its graph, dropped
      l:float()
    end)
  end)

  it("C90 T109: an entry of a Lua weak table is right while the handle stays", function()
    for _, m in ipairs(K.MODES) do
      K.with_flags(m)(function()
        local l = K.linear()
        local weak = setmetatable({ l.weight, [l.weight] = "state" }, { __mode = "kv" })
        local old = l.weight
        l:double()
        assert.equal(m.swap or not m.overwrite, weak[1] == l.weight)
        assert.equal((m.swap or not m.overwrite) and "state" or nil, weak[l.weight])
        assert.equal(old, weak[1])
      end)
    end
  end)

  it("C91: is not synchronised with passes, but between them it may come as often as you like", function()
    local l = nn.Linear(2, 1)
    local x = tm.ones(1, 2)
    for i = 1, 20 do
      l:zero_grad()
      l(x):sum():backward()
      tm.swap_tensors(l.weight, nn.Parameter(tm.full({ 1, 2 }, i)))
      assert.near_tensor({ 2 * i }, (l(x) - l.bias):detach():view(1))
    end
  end)

  it("reports released tensors and values that are none", function()
    H.raises(function() tm.swap_tensors(tm.ones(1), 3) end, "TypeError", "expected a tensor")
    H.raises(function() tm.can_swap(nil, tm.ones(1)) end, "TypeError", "expected a tensor")
    local t = tm.ones(1)
    t:release()
    H.raises(function() tm.swap_tensors(tm.ones(1), t) end, "RuntimeError", "released")
  end)
end)
