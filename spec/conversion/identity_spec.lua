---Section 2 of docs/contracts/conversion.md: handle and content, and the three ways by which a converted tensor reaches
---a slot: set_data, replacement, swap. What a test says about set_data, it does by `t.data = source`.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local nn, C, ptr = tm.nn, B.C, B.ptr

K.guard()

local function compat(a, b) return C.tm_compat_type(ptr(a), ptr(b)) ~= 0 end
local function param(...) return nn.Parameter(tm.ones(...)) end

---A tensor with a mark, as fakes and wrappers have one.
local function marked(t, mark)
  C.tm_tensor_mark_set(ptr(t), mark, 1)
  return t
end

describe("tm_compat_type", function()
  it("C14 T99: dense tensors with memory are of one family, whatever dtype, shape and class", function()
    local f32 = tm.ones(2)
    for _, other in ipairs { tm.ones({ 2 }, { dtype = "float64" }), tm.ones({ 2 }, { dtype = "int64" }), tm.ones({ 3, 4 }), tm.ones({}),
      param(2), tm.ones(2, 3):t(), tm.ones({ 2 }, { dtype = "bool" }), nn.Buffer(tm.ones(2)) } do
      assert.is_true(compat(f32, other))
      assert.is_true(compat(other, f32))
    end
  end)

  it("C15 T99: meta tensors are of another family, and of one among themselves", function()
    local meta = tm.ones({ 2 }, { device = "meta" })
    assert.is_false(compat(meta, tm.ones(2)))
    assert.is_false(compat(tm.ones(2), meta))
    assert.is_true(compat(meta, tm.ones({ 3 }, { device = "meta", dtype = "int64" })))
  end)

  it("C16 T99: fakes and wrappers are compatible with their like only", function()
    local real, fake, wrapper = tm.ones(2), marked(tm.ones(2), C.TM_MARK_FAKE), marked(tm.ones(2), C.TM_MARK_WRAPPER)
    for i, a in ipairs { real, fake, wrapper } do
      for j, b in ipairs { real, fake, wrapper } do assert.equal(i == j, compat(a, b)) end
    end
    for _, t in ipairs { fake, wrapper } do
      local e = H.raises(function() real.data = t end, "RuntimeError", "set_data: ")
      assert.truthy(e)
    end
    C.tm_tensor_mark_set(ptr(wrapper), C.TM_MARK_WRAPPER, 0) -- this one has no class
  end)

  pending("C14 T99: complex, sparse and quantised layouts: no such tensors exist here")
end)

describe("handle and content", function()
  it("C17 C18: a content is used by its handle, its accumulator, and what pins it; Lua references do not count", function()
    local w = param(2)
    local held = {}
    for i = 1, 100 do held[i] = w end
    local optimizer = tm.optim.SGD({ w }, { lr = 0.1 })
    local m = nn.Module()
    m.w = w
    assert.equal(1, tm.use_count(w))
    local y = w * w
    assert.equal(2, tm.use_count(w))
    tm.pin(w)
    assert.equal(3, tm.use_count(w))
    tm.unpin(w)
    y:sum():backward()
    y = nil -- luacheck: ignore
    tm.collect()
    assert.equal(1, tm.use_count(w))
    assert.equal(w, optimizer.param_groups[1].params[1])
    assert.equal(w, held[100])
  end)

  it("C18 C19: neither a detached alias nor a view holds the content (section 2.1, V4)", function()
    local w = param(2, 3)
    local alias, view = w:detach(), w:detach()[1]
    assert.equal(1, tm.use_count(w))
    local slice = w[1] -- its graph has an accumulator for w, which a swap would poison
    assert.equal(2, tm.use_count(w))
    assert.not_equal(tm.impl_id(w), tm.impl_id(alias))
    assert.equal(w:storage_id(), alias:storage_id())
    assert.equal(w:storage_id(), view:storage_id())
    alias:fill_(5)
    assert.equal(w.version, alias.version)
    assert.equal(5, slice:detach():tolist()[1])
    assert.is_true(tm.can_swap(w, param(1)))
  end)

  it("C20 T59: after a swap whatever returns its tensor returns the handle", function()
    local a, b = tm.ones(2), tm.zeros(3)
    tm.swap_tensors(a, b)
    assert.equal(a, a:fill_(0.5))
    assert.same({ 0.5, 0.5, 0.5 }, a:tolist())
    assert.equal(a, a:to "cpu")
    assert.equal(b, b:float())
    assert.same({ 1, 1 }, b:tolist())
  end)

  it("C20: a hook gets the parameter that backward reached", function()
    local l = nn.Linear(2, 1)
    K.with_flags { swap = true }(l.double, l)
    local seen
    l.weight:register_post_accumulate_grad_hook(function(p) seen = p end)
    l(tm.ones({ 1, 2 }, { dtype = "float64" })):sum():backward()
    assert.equal(l.weight, seen)
  end)
end)

describe("set_data", function()
  it("C21 T6: keeps handle, content, class, fields, grad, hooks and version, and takes memory and geometry", function()
    local l = K.linear()
    local w, g = l.weight, l.weight.grad
    w.decay = false
    local fired = 0
    w:register_hook(function() fired = fired + 1 end)
    local before, gbefore = K.describe(w), K.describe(g)
    l:double()
    local after, gafter = K.describe(l.weight), K.describe(l.weight.grad)
    assert.equal(w, l.weight)
    assert.equal(g, l.weight.grad)
    for _, name in ipairs { "id", "impl_id", "version", "size", "requires_grad", "is_leaf", "values", "fields" } do
      assert.same(before[name], after[name], name)
      assert.same(gbefore[name], gafter[name], name)
    end
    assert.equal("float64", after.dtype)
    assert.equal("float64", gafter.dtype)
    assert.not_equal(before.storage, after.storage)
    assert.equal(before.epoch + 1, after.epoch)
    l(tm.ones({ 1, 2 }, { dtype = "float64" })):sum():backward()
    assert.equal(1, fired)
  end)

  it("C22 C30 T100: refuses other families and, for what requires grad, whole numbers; nothing changes", function()
    local p = param(2)
    local before = K.describe(p)
    H.raises(function() p.data = tm.ones({ 2 }, { device = "meta" }) end, "RuntimeError", "meta and real tensors do not mix")
    H.raises(function() p.data = tm.ones({ 2 }, { dtype = "int64" }) end, "RuntimeError", "requires grad and cannot become int64")
    H.raises(function() p.data = "no tensor" end, "TypeError", "data: expected a tensor, got string")
    assert.same(before, K.describe(p))
    assert.equal(0, p.version)
    local frozen = nn.Parameter(tm.ones(2), false)
    frozen.data = tm.ones({ 2 }, { dtype = "int64" })
    assert.equal("int64", frozen.dtype)
  end)

  it("C22: does not look at shape or gradient", function()
    local p = param(2)
    p.grad = tm.ones(2)
    p.data = tm.zeros(3, 4)
    assert.same({ 3, 4 }, p:size())
    assert.same({ 2 }, p.grad:size())
  end)

  it("C23 T93: an accumulator is forgotten when the dtype changes, and kept when nothing does", function()
    local l = nn.Linear(2, 3)
    local y = l.bias * l.bias
    assert.equal(2, tm.use_count(l.bias))
    l:to()
    assert.equal(2, tm.use_count(l.bias))
    l:to "float32"
    assert.equal(2, tm.use_count(l.bias))
    l.bias.data = tm.zeros(3)
    assert.equal(2, tm.use_count(l.bias))
    l:double()
    assert.equal(1, tm.use_count(l.bias)) -- the old graph has its node, and reaches the same parameter
    y:sum():backward()
    assert.equal("float64", l.bias.grad.dtype)
  end)

  it("C24: views, saved views and snapshots stay on the old memory", function()
    local l = nn.Linear(2, 3)
    local view, sd = l.weight[1], l:state_dict()
    local kept = l:state_dict { keep_vars = true }
    local values = l.weight:tolist()
    l:double()
    l.weight:detach():fill_(7)
    assert.same(values[1], view:tolist())
    assert.equal("float32", sd["weight"].dtype)
    assert.same(values, sd["weight"]:tolist())
    assert.equal(l.weight, kept["weight"])
  end)
end)

describe("replacement", function()
  it("C25 T7: makes new handles; old parameter and gradient stay as they were, for whoever holds them", function()
    K.with_flags { overwrite = true }(function()
      local l = K.linear()
      local w = l.weight
      w.tag = 1
      local before = K.describe(w)
      l:double()
      assert.not_equal(w, l.weight)
      assert.not_equal(before.id, tm.id(l.weight))
      assert.not_equal(w.grad, l.weight.grad)
      assert.same({ "float64", "float64" }, { l.weight.dtype, l.weight.grad.dtype })
      assert.same(before, K.describe(w))
      assert.is_true(nn.is_parameter(l.weight))
      assert.is_true(l.weight.is_leaf and l.weight.requires_grad)
      local optimizer = tm.optim.SGD(l:parameters(), { lr = 1 })
      optimizer:step()
      assert.same(before, K.describe(w))
    end)
  end)

  it("C26: a Parameter is an alias of its data with a content of its own, without gradient, hooks and fields", function()
    local p = param(2)
    p.grad, p.tag = tm.ones(2), 1
    p:register_hook(error)
    for _, data in ipairs { tm.ones(2), p } do
      local q = nn.Parameter(data, false)
      assert.not_equal(tm.id(data), tm.id(q))
      assert.not_equal(tm.impl_id(data), tm.impl_id(q))
      assert.equal(data:storage_id(), q:storage_id())
      assert.is_nil(q.grad)
      assert.is_nil(q.tag)
      assert.is_false(q.requires_grad)
      q:fill_(3)
      assert.equal(data.version, q.version)
      nn.Parameter(data)
    end
    H.raises(function() nn.Parameter(tm.ones({ 2 }, { dtype = "int64" })) end, "RuntimeError")
    assert.equal("int64", nn.Parameter(tm.ones({ 2 }, { dtype = "int64" }), false).dtype)
  end)
end)

describe("a swap by conversion", function()
  it("C27 C36 T8: keeps handles of parameter and gradient and exchanges their contents", function()
    K.with_flags { swap = true }(function()
      local l = K.linear()
      local w, g = l.weight, l.weight.grad
      local ids, gids, values = K.ids(w), K.ids(g), g:tolist()
      l:double()
      assert.equal(w, l.weight)
      assert.equal(g, l.weight.grad)
      assert.same({ "float64", "float64" }, { w.dtype, g.dtype })
      assert.equal(ids[1], tm.id(w))
      assert.equal(gids[1], tm.id(g))
      assert.not_equal(ids[2], tm.impl_id(w))
      assert.not_equal(gids[2], tm.impl_id(g))
      assert.same(values, g:tolist())
      assert.is_true(nn.is_parameter(w))
    end)
  end)

  it("C28: a swap by itself leaves a handle with the other's gradient, hooks and version", function()
    local a, b = param(2), param(2)
    b:detach():fill_(2)
    a.grad = tm.ones(2)
    local g, fired = a.grad, {}
    a:register_hook(function() fired[#fired + 1] = "a's" end)
    local versions = { a.version, b.version }
    tm.swap_tensors(a, b)
    assert.is_nil(a.grad)
    assert.equal(g, b.grad)
    assert.same({ versions[2], versions[1] }, { a.version, b.version })
    a:sum():backward()
    assert.same({}, fired)
    b:sum():backward()
    assert.same({ "a's" }, fired)
  end)

  local TAG = { default = 1 }
  K.each_mode("C29 T58: fields stay under set_data, and are lost where the content or the handle is another", function(mode)
    local l = K.linear()
    l.weight.tag = 1
    l.weight.grad.note = 1
    l:double()
    assert.equal(TAG[mode.name], l.weight.tag)
    assert.equal(TAG[mode.name], l.weight.grad.note)
    assert.is_true(nn.is_parameter(l.weight))
    l:to()
    assert.equal(TAG[mode.name], l.weight.tag)
  end)

  K.each_mode("C30: no way of conversion bumps a version, and changes in place do, by one", function()
    local l = K.linear()
    local alias, version = l.weight:detach(), l.weight.version
    l:double()
    assert.equal(version, alias.version)
    l:to()
    assert.equal(version, alias.version)
    local w = l.weight:detach()
    version = w.version
    w:add_(1)
    assert.equal(version + 1, w.version)
    w:copy_(tm.zeros(3, 2))
    assert.equal(version + 2, w.version)
  end)

  it("C30: what was saved before a change in place raises when it is used", function()
    local w = param(2)
    local y = (w * w):sum()
    w:detach():add_(1)
    H.raises(function() y:backward() end, "RuntimeError", "changed in place")
  end)

  K.each_mode("C30 C21: the epoch of a handle tells whether its content changed", function(mode)
    local l = K.linear()
    local w, epoch = l.weight, tm.epoch(l.weight)
    l:double()
    assert.equal(mode.kept and epoch + 1 or epoch, tm.epoch(w))
    w = l.weight
    epoch = tm.epoch(w)
    l:to "float64" -- changes nothing
    assert.equal(mode.name == "default" and epoch or mode.swap and epoch + 1 or epoch, tm.epoch(w))
  end)
end)
