---Wrapper tensors, lua/wrapper.lua: what a class says, how operators reach it, and the rules of
---docs/contracts/conversion.md about wrappers.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local wrapper = require "tmod.wrapper"
local nn, C = tm.nn, B.C
local W = tm.WrapperTensor

---A tensor times a factor, as two inner tensors.
local Scaled = W:extend "spec.Scaled"
function Scaled.to_plain(t)
  local inner = Scaled.flatten(t)
  return inner.data * inner.factor
end
function Scaled.geometry(_, inner) return inner.data:size(), inner.data.dtype, inner.data.device end
function Scaled:from_plain(x) return self:new { data = x:clone(), factor = tm.ones(1, { dtype = x.dtype }) } end
local function scaled(t, by) return Scaled:new { data = t, factor = tm.tensor({ by or 2 }, { dtype = t.dtype }) } end

---No operators at all.
local Opaque = W:extend "spec.Opaque"
function Opaque.dispatch() return W.NotImplemented end

local function holder(p)
  local m = nn.Module()
  m.weight = p
  return m
end

local function param(t, grad) return nn.Parameter(t, grad ~= false) end

describe("a wrapper", function()
  it("reports shape, dtype and device, and has its class's methods", function()
    local t = scaled(tm.ones(2, 3), 4)
    assert.same({ 2, 3 }, t:size())
    assert.equal("float32", t.dtype)
    assert.equal("cpu", t.device)
    assert.is_true(tm.is_tensor(t))
    assert.is_true(wrapper.is(t))
    assert.is_false(wrapper.is(tm.ones(1)))
    assert.equal(Scaled, wrapper.class_of(t))
    assert.near_tensor(tm.full({ 2, 3 }, 4), t:to_plain())
    assert.is_nil(t.nothing)
    assert.matches("spec.Scaled(float32 (2, 3), device=cpu; data: float32 (2, 3), factor: float32 (1,))", tostring(t), 1, true)
  end)

  it("needs inner tensors by name", function()
    H.raises(function() Scaled:new {} end, "TypeError", "expected inner tensors by name")
    H.raises(function() W:extend() end, "TypeError", "a class needs a name")
    H.raises(function() W:extend "spec.X":new { a = 1 } end, "TypeError", "inner a must be a tensor, got number")
    H.raises(function() W.flatten(tm.ones(1)) end, "TypeError", "expected a wrapper tensor")
  end)

  it("has no bytes that could be read", function()
    local t = scaled(tm.ones(2))
    for _, read in ipairs { "tolist", "item" } do
      H.raises(function() return scaled(tm.ones(1))[read](scaled(tm.ones(1))) end, "NotImplementedError", "wrapper")
    end
    H.raises(function() tm.ones(2).data = t end, "RuntimeError", "set_data")
    H.raises(function() tm.ones(2):copy_(Opaque:new { a = tm.ones(2) }) end, "NotImplementedError", "no rule")
  end)

  it("shares class and inner tensors with its aliases, and frees them with the last", function()
    tm.collect()
    local before = tm.live().tensors
    local t = scaled(tm.ones(2))
    local alias = t:detach()
    t = nil -- luacheck: ignore
    tm.collect()
    assert.equal(Scaled, wrapper.class_of(alias))
    assert.near_tensor({ 2, 2 }, alias:to_plain())
    alias = nil -- luacheck: ignore
    tm.collect()
    tm.collect()
    assert.equal(before, tm.live().tensors)
  end)

  it("survives the scope that made it if it is returned, inner tensors included", function()
    local t = tm.scope(function() return scaled(tm.ones(3)) end)
    assert.near_tensor({ 2, 2, 2 }, t:to_plain())
  end)
end)

describe("operators on a wrapper", function()
  it("work on plain values, in any argument and in lists", function()
    local t, x = scaled(tm.ones(2, 2)), tm.tensor { { 1, 2 }, { 3, 4 } }
    assert.near_tensor(x + 2, t + x)
    assert.near_tensor(x - 2, x - t)
    assert.near_tensor(x * 2, x:mul(t))
    assert.near_tensor(x + 2 * 2, tm.add(x, t, 2))
    assert.near_tensor({ 2, 2, 2, 2 }, t:view(4))
    assert.near_tensor({ { 2, 2, 2, 2 } }, t:view(1, 4))
    assert.near_tensor({ { 2, 2, 2, 2 } }, t:view { 1, 4 })
    assert.near_tensor({ 2, 2 }, t[1])
    assert.near_tensor({ 4, 4 }, t:sum(1))
    assert.near_tensor(tm.full({ 4, 2 }, 2), tm.cat({ t, t }, 1))
    assert.near_tensor(x * 2, x:clone():mul_(t))
    local values, positions = scaled(tm.tensor { 1, 3, 2 }):max(1)
    assert.same({ 6, 2 }, { values:item(), positions:item() })
  end)

  it("refuse to write into one without a rule", function()
    local t = scaled(tm.ones(2))
    H.raises(function() t:add_(1) end, "NotImplementedError", "add_%: no rule for spec%.Scaled")
    H.raises(function() return Opaque:new { a = tm.ones(1) } + 1 end, "NotImplementedError", "add%: no rule for spec%.Opaque")
  end)

  it("get complete arguments, and give what the class gives", function()
    local seen
    local Log = W:extend "spec.Log"
    function Log:dispatch(op, args) -- luacheck: ignore self
      seen = { op, args }
      return "first", nil, "third"
    end
    local t = Log:new { a = tm.ones(2, 2) }
    assert.same({ "first", nil, "third" }, { t:sum { keepdim = true } })
    assert.same({ "sum", 4, true }, { seen[1], seen[2].n, seen[2][3] })
    local _ = t:add_(3)
    assert.same({ "add_", 3, 1 }, { seen[1], seen[2][2], seen[2][3] })
    local _ = t:copy_(tm.ones(2, 2))
    assert.equal("copy_", seen[1])
  end)

  it("ask a derived class first, then the next class", function()
    local A = W:extend "spec.A"
    function A.dispatch(_, op) return op == "neg" and W.NotImplemented or "A" end
    local D = A:extend "spec.D"
    function D.dispatch(_, op) return op == "add" and "D" or W.NotImplemented end
    local a, d = A:new { x = tm.ones(2) }, D:new { x = tm.ones(2) }
    assert.equal("D", a + d)
    assert.equal("A", a * d)
    H.raises(function() return -d end, "NotImplementedError", "no rule for spec%.D")
  end)

  it("are recorded: gradients reach inner tensors", function()
    local x = tm.ones(3, { requires_grad = true })
    local t = Scaled:new { data = x, factor = tm.tensor { 3 } }
    local y = (t * tm.tensor { 1, 2, 3 }):sum()
    y:backward()
    assert.near_tensor({ 3, 6, 9 }, x.grad)
  end)

  it("cast, clone and copy the inner tensors", function()
    local t = scaled(tm.ones(2))
    local d = t:double()
    assert.same({ "float64", Scaled }, { d.dtype, wrapper.class_of(d) })
    assert.equal(t, t:to "float32")
    local c = t:clone()
    Scaled.flatten(c).data:fill_(5)
    assert.near_tensor({ 2, 2 }, t:to_plain())
    t:copy_(c)
    assert.near_tensor({ 10, 10 }, t:to_plain())
    t:copy_(tm.tensor { 7, 8 })
    assert.near_tensor({ 7, 8 }, t:to_plain())
    assert.near_tensor({ 7, 8 }, tm.zeros(2):copy_(t))
    H.raises(function() t:copy_(scaled(tm.ones(3))) end, "NotImplementedError", "no rule")
  end)

  it("compile around it: other tensors' calls are as before in a hot loop", function()
    local t, x, sum = scaled(tm.ones(1)), tm.ones(1), 0
    for i = 1, 300 do
      local y = i % 50 == 0 and t + x or x + x
      sum = sum + y:item()
    end
    assert.equal(294 * 2 + 6 * 3, sum)
  end)
end)

describe("a wrapper in a module", function()
  it("is walked, saved in the state dictionary, copied and printed as one parameter", function()
    local m = holder(param(scaled(tm.ones(2)), false))
    local sd = m:state_dict()
    assert.same({ "weight" }, OrderedDict.keys(sd))
    assert.equal(m.weight, m:parameters()())
    assert.equal(Scaled, wrapper.class_of(sd.weight))
    assert.is_true(nn.is_parameter(m.weight))
    local c = m:clone()
    assert.equal(Scaled, wrapper.class_of(c.weight))
    Scaled.flatten(c.weight).data:fill_(9)
    assert.near_tensor({ 2, 2 }, m.weight:to_plain())
    local b = nn.Module()
    b:register_buffer("b", scaled(tm.ones(2)))
    assert.equal(Scaled, wrapper.class_of(b:clone().b))
  end)

  it("is saved as its inner tensors and loaded as one", function()
    local path = os.tmpname()
    local Shaped = W:extend "spec.Shaped"
    local shaped = Shaped:new({ flat = tm.arange(6) }, { shape = { 2, 3 } })
    tm.save({ a = scaled(tm.ones(2), 3), ["b.c"] = shaped, d = tm.ones(1) }, path, { metadata = { mine = "yes" } })
    local t, meta = tm.load(path)
    assert.same({ mine = "yes" }, meta)
    assert.same({ "a", "b.c", "d" }, (function(k) table.sort(k) return k end)(OrderedDict.keys(t)))
    assert.near_tensor({ 3, 3 }, t.a:to_plain())
    assert.same({ 2, 3 }, t["b.c"]:size())
    -- as any other program sees the file
    local file = C.tm_safetensors_open(path, 0)
    local names = {}
    for i = 0, tonumber(C.tm_file_count(file)) - 1 do names[#names + 1] = B.ffi.string(C.tm_file_name(file, i)) end
    C.tm_file_close(file)
    table.sort(names)
    assert.same({ "a.data", "a.factor", "b.c.flat", "d" }, names)
    local Odd = W:extend "spec.Odd"
    H.raises(function() tm.save({ a = Odd:new({ x = tm.ones(1) }, { secret = 1 }) }, path) end, "NotImplementedError", "and no encode")
    os.remove(path)
  end)

  it("C16 T99: is compatible with plain tensors in neither direction, with wrappers it is", function()
    local function compat(a, b) return C.tm_compat_type(B.ptr(a), B.ptr(b)) == 1 end
    local w, x, f = scaled(tm.ones(2)), tm.ones(2), tm.fake.of(tm.ones(2))
    assert.same({ false, false, true }, { compat(w, x), compat(x, w), compat(w, scaled(tm.ones(3))) })
    assert.same({ false, false, true, false }, { compat(f, x), compat(x, f), compat(f, tm.fake.of(x)), compat(f, w) })
    assert.same({ false, false }, { compat(f, tm.ones(2, { device = "meta" })), compat(w, tm.ones(2, { device = "meta" })) })
  end)

  it("C31 C33: the decision looks at marks as the rules say", function()
    local function decide(...) return tonumber(C.tm_convert_decide(...)) end
    local F, WR = C.TM_MARK_FAKE, C.TM_MARK_WRAPPER
    local SET, NEW, SWAP = tonumber(C.TM_SET_DATA), tonumber(C.TM_REPLACE), tonumber(C.TM_SWAP)
    for compat = 0, 1 do
      for overwrite = 0, 1 do
        assert.equal(SWAP, decide(compat, 0, WR, overwrite, 0)) -- the result is a wrapper
        assert.equal(SWAP, decide(compat, F, 0, overwrite, 0)) -- the parameter is a fake
        assert.equal(NEW, decide(compat, 0, F, overwrite, 0)) -- the result is a fake, the parameter not
        assert.equal(compat == 1 and overwrite == 0 and SET or NEW, decide(compat, WR, 0, overwrite, 0))
        assert.equal(SWAP, decide(compat, 0, 0, overwrite, 1))
      end
    end
  end)

  K.each_mode("C31 C32 C34 K10 T17: a plain parameter becomes a wrapper by a swap", function()
    local m = holder(param(tm.ones(2)))
    local p, id, impl = m.weight, tm.id(m.weight), tm.impl_id(m.weight)
    m:_apply(function(t) return scaled(t:detach()) end)
    assert.equal(p, m.weight)
    assert.equal(id, tm.id(p))
    assert.not_equal(impl, tm.impl_id(p))
    assert.equal(Scaled, wrapper.class_of(p))
    assert.is_true(nn.is_parameter(p))
    assert.is_true(p.requires_grad)
    assert.near_tensor({ 2, 2 }, p:to_plain())
  end)

  K.each_mode("C31 C32 C34 K11 C165 T17: a wrapper parameter is converted by a swap, no-op or not", function()
    local m = holder(param(scaled(tm.ones(2))))
    local p, impl = m.weight, tm.impl_id(m.weight)
    m:double()
    assert.equal(p, m.weight)
    assert.same({ "float64", Scaled }, { p.dtype, wrapper.class_of(p) })
    assert.not_equal(impl, tm.impl_id(p))
    assert.is_true(p.requires_grad)
    impl = tm.impl_id(p)
    m:to "cpu"
    assert.equal(p, m.weight)
    assert.not_equal(impl, tm.impl_id(p))
    m:to_empty { device = "meta" }
    assert.same({ p, "meta" }, { m.weight, p.device })
    m:to_empty { device = "cpu" }
    assert.same({ "cpu", "float64", Scaled }, { p.device, p.dtype, wrapper.class_of(p) })
  end)

  K.each_mode("C34 C16 K12: a wrapper that becomes plain is replaced, or swapped if the flag says so", function(mode)
    local m = holder(param(scaled(tm.ones(2))))
    local p = m.weight
    m:_apply(function(t) return t:to_plain() end)
    assert.equal(mode.swap, p == m.weight)
    assert.is_nil(wrapper.class_of(m.weight))
    assert.near_tensor({ 2, 2 }, m.weight:detach())
    if p ~= m.weight then assert.equal(Scaled, wrapper.class_of(p)) end
  end)

  K.each_mode("C35 K10 K11: the gradient of a swapped parameter is swapped, too", function()
    local m = holder(param(scaled(tm.ones(2))))
    m.weight.grad = scaled(tm.ones(2), 3)
    local g = m.weight.grad
    local id, impl = tm.id(g), tm.impl_id(g)
    m:double()
    assert.equal(id, tm.id(m.weight.grad))
    assert.not_equal(impl, tm.impl_id(m.weight.grad))
    assert.near_tensor({ 3, 3 }, m.weight.grad:to_plain())
    assert.equal("float64", m.weight.grad.dtype)
    g = nil -- luacheck: ignore
    tm.collect() -- the class outlasts the Lua table
    assert.equal(Scaled, wrapper.class_of(m.weight.grad))
  end)

  K.each_mode("C32 C76 T18: a blocking weak reference stops the forced swap, an identity reference does not", function()
    local m = holder(param(scaled(tm.ones(2))))
    local ref = tm.weakref(m.weight)
    local e = H.raises(function() m:double() end, "RuntimeError", "cannot swap Module%.weight")
    assert.matches("weak reference", tostring(e.cause), 1, true)
    assert.equal("float32", m.weight.dtype)
    ref:release()
    local identity = tm.weakref(m.weight, { identity = true })
    m:double()
    assert.equal("float64", m.weight.dtype)
    assert.equal(m.weight, identity:get())
  end)

  it("converts buffers through the class, which are assigned", function()
    local m = nn.Module()
    m:register_buffer("b", scaled(tm.ones(2)))
    local b = m.b
    m:double()
    assert.not_equal(b, m.b)
    assert.same({ "float64", Scaled }, { m.b.dtype, wrapper.class_of(m.b) })
  end)

  it("is exchanged by swap_tensors with class and inner tensors, either way", function()
    local a, b = scaled(tm.ones(2)), tm.zeros(3)
    tm.swap_tensors(a, b)
    assert.is_nil(wrapper.class_of(a))
    assert.near_tensor({ 0, 0, 0 }, a)
    assert.near_tensor({ 2, 2 }, b:to_plain())
    assert.is_true(C.tm_can_swap(B.ptr(a), B.ptr(b)) == 0)
  end)

  it("C147 T112: copy-mode loading copies into a wrapper and swaps nothing while the flag is off", function()
    local m = holder(param(scaled(tm.ones(2))))
    local p, impl = m.weight, tm.impl_id(m.weight)
    m:load_state_dict { weight = tm.tensor { 5, 6 } }
    assert.equal(p, m.weight)
    assert.equal(impl, tm.impl_id(p))
    assert.near_tensor({ 5, 6 }, p:to_plain())
    m:load_state_dict({ weight = scaled(tm.ones(2)) }, { assign = true })
    assert.not_equal(p, m.weight) -- assigned, not swapped
  end)

  it("C137 T111: a wrapper that cannot be copied is one message with the verb of the mode; other keys load", function()
    for _, case in ipairs { { {}, "copying" }, { { swap = true }, "swapping" } } do
      local m = nn.Linear(2, 1)
      local ok, e = tm.future.with(case[1], pcall, m.load_state_dict, m,
        { weight = Opaque:new { a = tm.ones(1, 2) }, bias = tm.tensor { 7 } })
      assert.is_false(ok)
      assert.matches(case[2], tostring(e), 1, true)
      assert.matches("copy_: no rule for spec.Opaque", tostring(e), 1, true)
      assert.near_tensor({ 7 }, m.bias)
    end
  end)

  it("C143 T71: with wrappers, swapping keeps the module's class, swap and assign takes the checkpoint's", function()
    local kinds = {
      plain = function() return tm.ones(2) end,
      scaled = function() return scaled(tm.ones(2)) end,
    }
    for mine, make in pairs(kinds) do
      for theirs, other in pairs(kinds) do
        for _, assign in ipairs { false, true } do
          local m = nn.Module()
          m.weight = param(make())
          m:register_buffer("b", make())
          local w, b = m.weight, m.b
          tm.future.with({ swap = true }, m.load_state_dict, m, { weight = other(), b = other() }, { assign = assign })
          local class = (assign and theirs or mine) == "scaled" and Scaled or nil
          assert.same({ w, b }, { m.weight, m.b })
          assert.equal(class, wrapper.class_of(m.weight))
          assert.equal(class, wrapper.class_of(m.b))
          assert.same({ true, false }, { nn.is_parameter(m.weight), nn.is_parameter(m.b) })
        end
      end
    end
  end)
end)

describe("tm.tensor_class", function()
  local SubA = tm.tensor_class "SubA"
  function SubA.twice(t) return t * 2 end
  local SubB = tm.tensor_class("SubB", SubA)

  it("marks plain tensors: methods, inheritance; operators give plain results", function()
    local x = tm.tensor { 1, 2 }
    local a, b = SubA(x), SubB(x)
    assert.same({ SubA, SubB }, { wrapper.class_of(a), wrapper.class_of(b) })
    assert.near_tensor({ 2, 4 }, a:twice())
    assert.near_tensor({ 2, 4 }, b:twice())
    assert.is_nil(wrapper.class_of(a + a))
    assert.equal(a:storage_id(), x:storage_id())
    assert.equal(SubA, wrapper.class_of(nn.Parameter(a)))
  end)

  it("C27: the class goes with the content in a swap", function()
    local a, b = SubA(tm.ones(2)), tm.zeros(3)
    tm.swap_tensors(a, b)
    assert.is_nil(wrapper.class_of(a))
    assert.equal(SubA, wrapper.class_of(b))
  end)
end)
