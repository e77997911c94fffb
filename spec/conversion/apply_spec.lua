---Sections 3 and 5 of docs/contracts/conversion.md: _apply: the walk, the decision for each slot, what errors leave.
---Section 2.1 rules: fn runs for all slots before the first commit, and an error leaves the module as it was; with
---atomic = false all is as upstream does it, tensor by tensor.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local nn, C, future = tm.nn, B.C, tm.future

K.guard()

local NOT_ATOMIC = { atomic = false }

local function param(...) return nn.Parameter(tm.ones(...)) end
local function double(t) return t * 2 end
local function to(dtype) return function(t) return t:to(dtype) end end
local function to_meta(t) return t:to "meta" end

---A module with these slots.
local function holder(slots)
  local m = nn.Module()
  for name, v in pairs(slots) do
    if nn.is_parameter(v) or rawget(v, "_h") == nil then m[name] = v else m:register_buffer(name, v) end
  end
  return m
end

local function with_grad(p)
  p.grad = tm.ones(p:size())
  return p
end

---A gradient that is the result of an operator.
local function with_graph(l)
  l:zero_grad()
  local y = l(tm.ones(1, 2))
  y:mul(y):sum():backward { create_graph = true }
  return l
end

-- the decision ------------------------------------------------------------------------------------------------------------

describe("tm_convert_decide", function()
  it("C31 C32 C33 C34: swap if flag, wrapper result or fake parameter say so; else set_data if it can; else replacement", function()
    local FAKE, WRAPPER = tonumber(C.TM_MARK_FAKE), tonumber(C.TM_MARK_WRAPPER)
    for _, compatible in ipairs { 0, 1 } do
      for p = 0, 3 do
        for a = 0, 3 do
          for overwrite = 0, 1 do
            for swap = 0, 1 do
              local expected
              if swap == 1 or a >= WRAPPER or p % 2 == FAKE then expected = C.TM_SWAP
              elseif compatible == 1 and a % 2 ~= FAKE and overwrite == 0 then expected = C.TM_SET_DATA
              else expected = C.TM_REPLACE end
              assert.equal(tonumber(expected), C.tm_convert_decide(compatible, p, a, overwrite, swap))
            end
          end
        end
      end
    end
  end)
end)

---What became of the handle, by the names of the table in C34.
local function outcome(before, ids, now, old_untouched)
  if now ~= before then
    assert.is_true(old_untouched())
    return "new"
  end
  return tm.impl_id(now) == ids[2] and "set_data" or "swap"
end

describe("module:_apply decides for a parameter", function()
  local meta = { device = "meta" }
  local CASES = { -- name, what the parameter is, fn, with no flag
    { "K1 the very tensor", {}, function(t) return t end, "set_data" },
    { "K2 a new one alike", {}, function(t) return t:clone() end, "set_data" },
    { "K3 another dtype", {}, to "float64", "set_data" },
    { "K5 T13 to meta", {}, to_meta, "new" },
    { "K6 T11 from meta", meta, function(t) return tm.zeros(t:size()) end, "new" },
    { "K7 T14 on meta", meta, to "float64", "set_data" },
    { "K15 T94 another shape", {}, function(t) return t:reshape(3, 2) end, "set_data" },
    { "K13 T15 another layout, for which meta stands in", {}, to_meta, "new" },
  }
  for _, case in ipairs(CASES) do
    local name, opts, fn, default = unpack(case)
    K.each_mode("C34 C36: " .. name, function(mode)
      local m = holder { w = nn.Parameter(tm.zeros({ 2, 3 }, opts)) }
      m.w.grad = tm.ones({ 2, 3 }, opts)
      local w, g = m.w, m.w.grad
      local before, ids, gids = K.describe(w), K.ids(w), K.ids(g)
      m:_apply(fn)
      local function untouched() return pcall(K.same, before, K.describe(w)) end
      local expected = mode.swap and "swap" or mode.overwrite and "new" or default
      assert.equal(expected, outcome(w, ids, m.w, untouched))
      local same = name:find "K1 " ~= nil -- C37: the gradient is the same object whatever happens
      local of_grad = same and "set_data" or expected
      assert.equal(of_grad, outcome(g, gids, m.w.grad, function() return tm.impl_id(g) == gids[2] end))
      if expected == "new" then assert.equal(g, w.grad) end -- C36: the old parameter keeps its own
      assert.same(m.w:size(), m.w.grad:size())
      assert.equal(m.w.dtype, m.w.grad.dtype)
      assert.equal(m.w.device, m.w.grad.device)
      assert.is_true(m.w.requires_grad and m.w.is_leaf and nn.is_parameter(m.w))
    end)
  end

  pending("C34 K4 T87: from the CPU to CUDA, and between GPUs: needs CUDA")
  pending("C34 K14 T15: sparse to sparse sets data, dense to sparse replaces: no sparse tensors exist here")

  K.each_mode("C34 K12: a wrapper that becomes plain is replaced", function(mode)
    local Class = tm.WrapperTensor:extend "spec.apply.Wrapped"
    local m = holder { w = nn.Parameter(Class:new { data = tm.ones(2) }, false) }
    local w = m.w
    m:_apply(function() return tm.ones(2) end)
    assert.equal(mode.swap, m.w == w)
    assert.same({ 1, 1 }, m.w:tolist())
    assert.is_true(nn.is_parameter(m.w))
  end)

  it("C34 C37 T9: in swap mode to('cpu') changes the content of the parameter, and of the gradient not even that", function()
    K.with_flags { swap = true }(function()
      local l = K.linear()
      local ids, gids, storage = K.ids(l.weight), K.ids(l.weight.grad), l.weight:storage_id()
      local version = l.weight.version
      l:to "cpu"
      assert.equal(ids[1], tm.id(l.weight))
      assert.not_equal(ids[2], tm.impl_id(l.weight))
      assert.same({ storage, version }, { l.weight:storage_id(), l.weight.version })
      assert.same(gids, K.ids(l.weight.grad))
    end)
  end)

  it("C34 C37 T10: in overwrite mode to('cpu') makes a new parameter over the same memory, with the same gradient object", function()
    K.with_flags { overwrite = true }(function()
      local l = K.linear()
      local w, g = l.weight, l.weight.grad
      l:to "cpu"
      assert.not_equal(w, l.weight)
      assert.equal(w:storage_id(), l.weight:storage_id())
      assert.equal(g, w.grad)
      assert.equal(g, l.weight.grad)
    end)
  end)

  it("C34 T12: in swap mode an optimizer made on meta trains what to_empty made", function()
    K.with_flags { swap = true }(function()
      local l = nn.Linear(2, 3, { device = "meta" })
      local w = l.weight
      local optimizer = tm.optim.SGD(l:parameters(), { lr = 1 })
      l:to_empty { device = "cpu" }
      assert.equal(w, l.weight)
      nn.init.ones_(l.weight)
      nn.init.zeros_(l.bias)
      l(tm.ones(1, 2)):sum():backward()
      optimizer:step()
      assert.same({ -1, -1, -1 }, l.bias:tolist())
    end)
  end)

  it("C35 C36: whether the parameter is swapped decides for the gradient", function()
    K.with_flags { swap = true }(function()
      local m = holder { w = with_grad(param(2)) }
      local g, gids = m.w.grad, K.ids(m.w.grad)
      m:_apply(to_meta) -- no set_data could do this
      assert.equal(g, m.w.grad)
      assert.not_equal(gids[2], tm.impl_id(g))
      assert.equal("meta", g.device)
    end)
  end)

  it("C35 G2 G3: a parameter that takes data, a gradient that cannot: the gradient is checked as an assigned one", function()
    local m = holder { w = with_grad(param(2)) }
    local calls = 0
    local function fn(t)
      calls = calls + 1
      return calls == 1 and t or to_meta(t)
    end
    K.unchanged(m, function() m:_apply(fn) end, "RuntimeError", "grad: float32 %(2,%) on meta does not fit a tensor float32 %(2,%)")
  end)

  it("C35 G5: a gradient that is not there is no argument of fn", function()
    local calls = 0
    holder { w = param(2), v = param(2) }:_apply(function(t)
      calls = calls + 1
      return t
    end)
    assert.equal(2, calls)
  end)

  K.each_mode("C38 T103: requires_grad of a gradient stays", function()
    for _, on in ipairs { true, false } do
      local l = K.linear()
      l.weight.grad.requires_grad = on
      l:double()
      assert.equal(on, l.weight.grad.requires_grad)
      assert.is_true(l.weight.grad.is_leaf)
      l:_apply(function(t) return t:clone():requires_grad_() end)
      assert.equal(on, l.weight.grad.requires_grad)
      l:_apply(function(t) return t:clone() end, true, NOT_ATOMIC)
      assert.equal(on, l.weight.grad.requires_grad)
    end
  end)

  it("C39 T16: a parameter to be replaced whose gradient is not is an AssertionError, and nothing changes", function()
    local m = holder { w = with_grad(param(2)) }
    local function fn(t) return t.requires_grad and to_meta(t) or t:clone() end
    local e = K.unchanged(m, function() m:_apply(fn) end, "AssertionError", "convert both")
    assert.equal("w.grad", e.parameter)
    local w = m.w
    H.raises(function() m:_apply(fn, true, NOT_ATOMIC) end, "AssertionError", "convert both")
    assert.equal("meta", m.w.device) -- as upstream leaves it: the new parameter without a gradient
    assert.is_nil(m.w.grad)
    assert.truthy(w.grad)
  end)
end)

-- the walk ------------------------------------------------------------------------------------------------------------------

describe("module:_apply walks", function()
  it("C40 C45 C46 T19: children first, parameters in order, each with its gradient, then buffers; those with gradients on", function()
    local m = nn.Sequential(nn.Linear(2, 3))
    m.w = with_grad(param(4))
    m:register_buffer("b", tm.ones(5))
    m[1].weight.grad = tm.zeros(3, 2)
    local order, modes = {}, {}
    local names = { [m[1].weight] = "child w", [m[1].weight.grad] = "child grad", [m[1].bias] = "child bias", [m.w] = "w",
      [m.w.grad] = "grad",
      [m.b] = "b" }
    m:_apply(function(t)
      order[#order + 1], modes[#modes + 1] = names[t], tm.is_grad_enabled()
      return t
    end)
    assert.same({ "child w", "child grad", "child bias", "w", "grad", "b" }, order)
    assert.same({ false, false, false, false, false, true }, modes)
    assert.is_true(tm.is_grad_enabled())
    tm.no_grad(function()
      m:_apply(function(t)
        assert.is_false(tm.is_grad_enabled())
        return t
      end)
    end)
  end)

  it("C40: modules, parameters and buffers come in the order of their registration", function()
    local m = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    local expected, seen = {}, {}
    for _, name in ipairs { "0.", "1.0.", "1.1.", "2." } do
      for _, p in ipairs { "weight", "bias" } do expected[#expected + 1] = m:get_parameter(name .. p) end
    end
    m:_apply(function(t)
      seen[#seen + 1] = t
      return t
    end)
    assert.same(#expected, #seen)
    for i = 1, #expected do assert.equal(expected[i], seen[i]) end
  end)

  it("C41: recurse = false leaves the children out, and is not passed down", function()
    local m = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    m.w = param(1)
    m:_apply(to "float64", false)
    assert.equal("float64", m.w.dtype)
    assert.equal("float32", m[1][1].weight.dtype)
    m:_apply(to "float64", true)
    assert.equal("float64", m[1][1].weight.dtype)
  end)

  K.each_mode("C42 T20: a child twice under one parent is visited once, under two twice; fn sees the old content (section 2.1, V2)",
    function()
    local child = nn.Module()
    child.w = param(2)
    local once = nn.Sequential(child, child)
    local calls = 0
    once:_apply(function(t)
      calls = calls + 1
      return t * 2
    end)
    assert.equal(1, calls)
    assert.same({ 2, 2 }, child.w:tolist())
    local twice = nn.Sequential(nn.Sequential(child), nn.Sequential(child))
    twice:_apply(function(t)
      calls = calls + 1
      return t * 2
    end)
    assert.equal(3, calls)
    assert.same({ 4, 4 }, child.w:tolist())
    twice:_apply(double, true, NOT_ATOMIC)
    assert.same({ 16, 16 }, child.w:tolist()) -- one after the other: as upstream
  end)

  it("C43 T21: fn gets a tied parameter once per slot, and its gradient (section 2.1, V2)", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[2].weight = m[1].weight
    m[1].weight:detach():fill_(1)
    m[1].weight.grad = tm.ones(2, 2)
    local seen = 0
    m:_apply(function(t)
      if t == m[1].weight then seen = seen + 1 end
      return t * 2
    end)
    assert.equal(2, seen)
    assert.equal(m[1].weight, m[2].weight)
    assert.same({ 2, 2 }, m[1].weight[1]:tolist())
    assert.same({ 2, 2 }, m[1].weight.grad[1]:tolist())
    m:_apply(double, true, NOT_ATOMIC)
    assert.same({ 8, 8 }, m[1].weight[1]:tolist())
    assert.same({ 8, 8 }, m[1].weight.grad[1]:tolist())
  end)

  K.each_mode("C44 C49 T101: slots without a value are passed over; the module is returned; its mode and attributes stay", function()
    local m = nn.Module()
    m:register_parameter("p", nil)
    m:register_buffer("b", nil)
    m.q = param(2)
    m.name = "x"
    local fired = 0
    m:register_forward_hook(function() fired = fired + 1 end)
    m.forward = function(_, x) return x end
    m:eval()
    assert.equal(m, m:half())
    assert.equal(m, m:_apply(to "float32"))
    assert.is_false(m.training)
    assert.equal("x", m.name)
    assert.is_true(m:hasattr "p" and m:hasattr "b")
    assert.is_nil(m.p)
    assert.is_nil(m.b)
    assert.is_nil(m.q.grad)
    m(1)
    assert.equal(1, fired)
  end)

  K.each_mode("C45: a conversion enters no graph", function()
    local l = nn.Linear(2, 3)
    l:_apply(function(t) return t * 2 end)
    assert.is_nil(l.weight.grad_fn)
    assert.is_true(l.weight.is_leaf)
  end)

  K.each_mode("C46 T43: a buffer that requires grad becomes a result of its conversion", function()
    local m = holder { b = tm.ones(2, { requires_grad = true }) }
    local b = m.b
    m:double()
    assert.equal("float64", m.b.dtype)
    assert.truthy(m.b.grad_fn)
    m.b:sum():backward()
    assert.same({ 1, 1 }, b.grad:tolist())
    tm.no_grad(m.float, m)
    assert.is_nil(m.b.grad_fn)
  end)

  it("C46: which TMOD_DEBUG reports", function()
    local code, _, err = H.shell(("TMOD_DEBUG=1 %s %s"):format(H.tmodrun, H.file [[
      local tm = require "tmod"
      local m = tm.nn.Module()
      m:register_buffer("b", tm.ones(2, { requires_grad = true }))
      m:double()]]))
    assert.equal(0, code)
    assert.truthy(err:find "the conversion of the buffer Module.b, which requires grad, is recorded", err)
  end)

  K.each_mode("C47 T102: requires_grad of a parameter stays, whatever fn returns", function()
    local m = holder { frozen = nn.Parameter(tm.ones(2), false), free = param(2) }
    m:_apply(function(t) return t:detach():clone():requires_grad_() end)
    assert.is_false(m.frozen.requires_grad)
    assert.is_true(m.free.requires_grad)
    m:_apply(function(t) return t:detach():double() end)
    assert.is_false(m.frozen.requires_grad)
    assert.is_true(m.free.requires_grad and m.free.is_leaf)
    assert.is_true(nn.is_parameter(m.frozen) and nn.is_parameter(m.free))
  end)

  K.each_mode("C48 T104: fn must return tensors", function()
    local p, b = holder { p = param(2) }, holder { b = tm.ones(2) }
    for _, v in ipairs { 3, "x", false } do
      K.unchanged(p, function() p:_apply(function() return v end) end, "TypeError",
        "_apply: fn returned a %l+ for the parameter Module.p, expected a tensor")
    end
    K.unchanged(p, function() p:_apply(function() end) end, "TypeError", "returned nil for the parameter Module.p")
    K.unchanged(b, function() b:_apply(function() end) end, "TypeError", "returned nil for the buffer Module.b")
    p.p.grad = tm.ones(2)
    K.unchanged(p, function() p:_apply(function(t) return t.requires_grad and t end) end, "TypeError", "for the gradient of Module.p")
    H.raises(function() p:_apply() end, "TypeError", "expected a function")
    H.raises(function() nn.Module._apply(3, double) end, "TypeError", "expected a module")
    H.raises(function() p:_apply(double, true, { atom = false }) end, "TypeError", "unknown option atom")
  end)

  K.each_mode("C50 C8 T97: a buffer's slot gets what fn returned, in every mode", function()
    local m = holder { b = tm.ones(2) }
    m:register_buffer("own", tm.zeros(1), false)
    local b, ids = m.b, K.ids(m.b)
    m:_apply(function(t) return t end)
    assert.equal(b, m.b)
    assert.same(ids, K.ids(m.b))
    local made
    m:_apply(function(t)
      made = t:double()
      return made
    end)
    assert.equal(made, m.own)
    assert.not_equal(b, m.b)
    assert.equal("float32", b.dtype)
    assert.same(ids, K.ids(b))
    m:float()
    assert.not_equal(made, m.own)
    assert.is_nil(m:state_dict()["own"]) -- still not saved
  end)

  K.each_mode("C50 C25: what a conversion makes outlives the scope that it ran in", function()
    local m = holder { w = with_grad(param(2)), b = tm.ones(2) }
    tm.scope(function() m:double() end)
    tm.scope(function() m:_apply(function(t) return t + 1 end) end)
    assert.same({ 2, 2 }, m.w:tolist())
    assert.same({ 2, 2 }, m.w.grad:tolist())
    assert.same({ 2, 2 }, m.b:tolist())
  end)

  K.each_mode("C51 T86: only what is registered moves", function()
    local m = nn.Linear(2, 2)
    m.plain = tm.ones(2)
    m.cache = { inner = { param(2) } }
    m.cached = m.weight:t()
    m:double()
    assert.equal("float64", m.weight.dtype)
    assert.equal("float32", m.plain.dtype)
    assert.equal("float32", m.cache.inner[1].dtype)
    assert.equal("float32", m.cached.dtype)
  end)

  it("C53: apply is another method, of modules", function()
    local m, seen = nn.Sequential(nn.Linear(1, 1), nn.ReLU()), {}
    m:apply(function(x) seen[#seen + 1] = x end)
    assert.same({ m[1], m[2], m }, seen)
  end)
end)

-- overriding ------------------------------------------------------------------------------------------------------------------

describe("a class's own _apply", function()
  ---A module of a class that does `own(self, base, fn, recurse)`.
  local function overriding(own)
    local Class = nn.Module:extend "Own"
    function Class:init() self.w = with_grad(param(2)) end
    function Class:_apply(fn, recurse)
      own(self, nn.Module._apply, fn, recurse)
      return self
    end
    return Class()
  end

  K.each_mode("C52 T116: is called by every conversion, wherever it is in the tree", function()
    local calls = {}
    local m = overriding(function(self, base, fn, recurse)
      calls[#calls + 1] = recurse == nil and "child" or recurse
      base(self, fn, recurse)
    end)
    local root = nn.Sequential(nn.Linear(2, 2), m)
    for i, convert in ipairs { root.double, root.half, root.bfloat16, root.float, root.cpu } do
      convert(root)
      assert.equal(i, #calls)
    end
    root:to "float64"
    root:type "float32"
    root:to_empty { device = "cpu" }
    root:_apply(double)
    assert.equal(9, #calls)
    m:to_empty { device = "cpu", recurse = false }
    assert.is_false(calls[10])
    assert.equal("float32", m.w.dtype)
  end)

  K.each_mode("C52: may wrap fn, for built-in conversions too", function()
    local m = overriding(function(self, base, fn) base(self, function(t) return fn(t) + 1 end) end)
    nn.Sequential(m):double()
    assert.equal("float64", m.w.dtype)
    assert.same({ 2, 2 }, m.w:tolist())
    assert.same({ 2, 2 }, m.w.grad:tolist())
  end)

  K.each_mode("C52: what it adds is part of the same transaction, and the last word on a slot counts", function(mode)
    local m = overriding(function(self, base, fn)
      base(self, fn)
      self.norm:float() -- norms stay in float32
    end)
    m.norm = nn.LayerNorm(2)
    m.norm.weight.grad = tm.ones(2)
    local root = nn.Sequential(m, nn.Linear(2, 2))
    local weight, values = m.norm.weight, m.norm.weight:tolist()
    root:half()
    assert.equal("float16", m.w.dtype)
    assert.equal("float16", root[2].weight.dtype)
    assert.equal("float32", m.norm.weight.dtype)
    assert.equal("float32", m.norm.weight.grad.dtype)
    assert.same(values, m.norm.weight:tolist())
    assert.equal(mode.kept, m.norm.weight == weight)
    tm.pin(root[2].weight)
    if mode.swap then K.unchanged(root, function() root:double() end, "RuntimeError", "cannot swap Linear.weight") end
    tm.unpin(root[2].weight)
  end)

  it("C52: may send the same slot there and back", function()
    local m = overriding(function(self, base, fn)
      base(self, fn)
      base(self, function(t) return t end)
    end)
    local w = m.w
    nn.Sequential(m):to "meta"
    assert.equal(w, m.w)
    assert.equal("cpu", m.w.device)
    assert.same({ 1, 1 }, m.w:tolist())
    assert.truthy(m.w.grad)
  end)

  it("C52: may catch an error, which leaves no trace in the transaction", function()
    local m = overriding(function(self, base, fn)
      local ok = pcall(base, self, function(t)
        if t == self.v then error "not this one" end
        return t:clone()
      end)
      assert.is_false(ok)
      assert.is_true(tm.is_grad_enabled())
      base(self, fn)
    end)
    m.v = param(3)
    nn.Sequential(m):double()
    assert.same({ "float64", "float64" }, { m.w.dtype, m.v.dtype })
  end)

  it("C52: so a class that gives up stays as it was, while the rest converts", function()
    local m = overriding(function(self, base, fn)
      assert.is_false((pcall(base, self, function(t)
        if t == self.v then error "not this one" end
        return fn(t)
      end)))
    end)
    m.v = param(3)
    local root = nn.Sequential(m, nn.Linear(2, 2))
    local before = K.describe(m.w)
    root:double()
    K.same(before, K.describe(m.w))
    assert.equal("float64", root[2].weight.dtype)
  end)

  it("C52: called by itself it is the root, and what comes after its base call sees the result", function()
    local seen
    local m = overriding(function(self, base, fn)
      base(self, fn)
      seen = self.w.dtype
    end)
    m:_apply(to "float64")
    assert.equal("float64", seen)
  end)

  it("C52: of an instance works as well", function()
    local l, called = nn.Linear(2, 2), false
    function l._apply(self, fn)
      called = true
      return nn.Module._apply(self, fn)
    end
    nn.Sequential(l):half()
    assert.is_true(called)
    assert.equal("float16", l.weight.dtype)
  end)

  it("a manager is told before the walk reaches its module and after all is converted", function()
    local root = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    local log = {}
    local function note(event) return function(m) log[#log + 1] = { event, m, m.weight.dtype, root[2].weight.dtype } end end
    local handle = root[1]:register_manager { on_pre_apply = note "pre", on_post_apply = note "post", on_post_load = note "load" }
    root:double()
    assert.same({ { "pre", root[1], "float32", "float32" }, { "post", root[1], "float64", "float64" } }, log)
    log = {}
    pcall(root._apply, root, error)
    assert.equal(1, #log) -- nothing was converted: no post
    log = {}
    root:load_state_dict(root:state_dict())
    assert.equal("load", log[1][1])
    handle:remove()
    log = {}
    root:float()
    root:load_state_dict(root:state_dict())
    assert.same({}, log)
    H.raises(function() root:register_manager { on_apply = print } end, "TypeError", "unknown option on_apply")
  end)

  it("a conversion that a coroutine has left unfinished hinders no other", function()
    local l, other = nn.Linear(2, 2), nn.Linear(2, 2)
    local co = coroutine.wrap(function() l:_apply(function(t) return coroutine.yield(t) or t end) end)
    co()
    tm.autograd.set_grad_enabled(true)
    other:double()
    assert.equal("float64", other.weight.dtype)
  end)
end)

-- checks ------------------------------------------------------------------------------------------------------------------

describe("a broken module", function()
  it("C54 T42: a plain or non-leaf tensor in a slot converts where data is set, and cannot be replaced", function()
    for _, case in ipairs { "plain", "non-leaf" } do
      local m = holder { w = param(2) }
      m._parameters.w = case == "plain" and tm.ones(2) or param(2) * 2
      m:double()
      assert.equal("float64", m.w.dtype)
      K.unchanged(m, function() m:to "meta" end, "AssertionError", "only leaf Parameters can be replaced")
      K.with_flags { overwrite = true }(function()
        K.unchanged(m, function() m:double() end, "AssertionError", "only leaf Parameters can be replaced")
      end)
    end
    local m = holder { w = nn.Parameter(tm.ones({ 2 }, { device = "meta" })) }
    m._parameters.w = tm.ones({ 2 }, { device = "meta" })
    K.unchanged(m, function() m:to_empty { device = "cpu" } end, "AssertionError", "which is no Parameter")
  end)

  it("C55 T41: a gradient made with create_graph is converted where data is set, and cannot be replaced", function()
    local l = with_graph(nn.Linear(2, 3))
    assert.is_false(l.weight.grad.is_leaf)
    l:double()
    assert.equal("float64", l.weight.grad.dtype)
    assert.is_false(l.weight.grad.is_leaf)
    K.with_flags { overwrite = true }(function()
      local o = with_graph(nn.Linear(2, 3))
      local e = K.unchanged(o, function() o:double() end, "AssertionError", "no leaf %(made with create_graph%)")
      assert.equal("weight.grad", e.parameter)
      local w = o.weight
      H.raises(function() o:to { dtype = "float64", atomic = false } end, "AssertionError", "no leaf")
      assert.equal("float64", o.weight.dtype) -- upstream's state: the new one is in its slot, without a gradient
      assert.is_nil(o.weight.grad)
      assert.truthy(w.grad)
    end)
  end)

  it("C56 T105: p.grad = x refuses what does not fit", function()
    local p = param(2, 3)
    H.raises(function() p.grad = tm.ones(3, 2) end, "RuntimeError", "grad: float32 %(3, 2%) does not fit a tensor float32 %(2, 3%)")
    H.raises(function() p.grad = tm.ones({ 2, 3 }, { dtype = "float64" }) end, "RuntimeError", "grad: float64")
    H.raises(function() p.grad = tm.ones({ 2, 3 }, { device = "meta" }) end, "RuntimeError", "on meta does not fit")
    H.raises(function() p.grad = p end, "RuntimeError", "its own gradient")
    H.raises(function() p.grad = "g" end, "TypeError", "grad: expected a tensor or nil, got string")
    assert.is_nil(p.grad)
    p.grad = tm.ones(2, 3)
    p.grad = nil
    assert.is_nil(p.grad)
  end)

  it("C57 T106: registering and assigning parameters refuses plain tensors and non-leaves", function()
    local m = nn.Module()
    H.raises(function() m:register_parameter("w", tm.ones(2)) end, "TypeError", "must be an nn.Parameter or nil, got tensor")
    local p = param(2)
    m.w = p
    H.raises(function() m.w = tm.ones(2) end, "TypeError", "cannot assign a tensor to parameter")
    local q = p * 2
    rawset(q, "_parameter", true)
    H.raises(function() m:register_parameter("v", q) end, "ValueError", "no leaf")
    assert.equal(p, m.w)
  end)
end)

-- failures ------------------------------------------------------------------------------------------------------------------

describe("a conversion that fails", function()
  ---Two Linears; fn that raises at the n-th tensor and else doubles the precision.
  local function failing_at(n)
    local calls = 0
    return function(t)
      calls = calls + 1
      if calls == n then error("at " .. n, 0) end
      return t:double()
    end
  end

  K.each_mode("C65 C66 T44: leaves the module as it was, whatever the tensor, and passes fn's error on (section 2.1, V1)", function()
    local m = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    m(tm.randn(4, 2)):sum():backward()
    for n = 1, 11 do
      tm.collect()
      local before = K.state(m)
      local ok, e = pcall(m._apply, m, failing_at(n))
      assert.is_false(ok)
      assert.equal("at " .. n, e)
      K.same(before, K.state(m))
    end
    assert.is_true(pcall(m._apply, m, failing_at(12)))
    assert.equal("float64", m[2].running_mean.dtype)
    local own = {}
    local _, e = pcall(m._apply, m, function() error(own) end)
    assert.equal(own, e)
  end)

  K.each_mode("C65 C71 T44: with atomic = false leaves what came before converted, and once more completes it", function()
    local m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    m:register_buffer("b", tm.ones(1))
    local _, e = pcall(m._apply, m, failing_at(4), true, NOT_ATOMIC)
    assert.equal("at 4", e)
    assert.same({ "float64", "float64", "float64", "float32", "float32" },
      { m[1].weight.dtype, m[1].bias.dtype, m[2].weight.dtype, m[2].bias.dtype, m.b.dtype })
    m:to { dtype = "float64", atomic = false }
    assert.same({ "float64", "float64" }, { m[2].bias.dtype, m.b.dtype })
  end)

  it("C67 T45: a swap that cannot be is a RuntimeError with class and slot, cause, and the whole path", function()
    K.with_flags { swap = true }(function()
      local m = nn.Sequential(nn.ReLU(), nn.Sequential(K.linear()))
      local w = m[2][1].weight
      local slice = w[1] -- a live slice of it does not matter (section 2.1, V4), nor does an accumulator
      tm.pin(w)
      local e = K.unchanged(m, function() m:half() end, "RuntimeError", "_apply: cannot swap Linear.weight")
      assert.equal("_apply: cannot swap Linear.weight", e.message)
      assert.equal("1.0.weight", e.parameter)
      assert.truthy(tostring(e):find("converting 1.0.weight", 1, true))
      assert.equal("RuntimeError", e.cause.kind)
      assert.truthy(e.cause.message:find "used 3 times, expected once: other references to it exist")
      assert.truthy(w.grad)
      tm.unpin(w)
      m:half()
      assert.equal("float16", w.dtype)
      assert.equal("float32", slice.dtype)
      assert.equal(w:size(2), slice:numel())
    end)
  end)

  it("C67: so is a wrapper Parameter that cannot be made", function()
    K.with_flags { swap = true }(function()
      local m = holder { w = param(2) }
      local e = K.unchanged(m, function() m:type "int64" end, "RuntimeError", "_apply: cannot swap Module.w")
      assert.truthy(e.cause.message:find "requires grad and cannot become int64")
    end)
  end)

  local function grads_fail(t)
    if t.requires_grad then return t:double() end
    error("no gradients", 0)
  end

  K.each_mode("C68 T91: fn that raises for gradients only leaves all as it was", function()
    local m = holder { w = with_grad(param(2)) }
    local before = K.state(m)
    local _, e = pcall(m._apply, m, grads_fail)
    assert.equal("no gradients", e)
    K.same(before, K.state(m))
  end)

  K.each_mode("C68 T91: with atomic = false the parameter is converted, and its gradient old or gone", function(mode)
    local m = holder { w = with_grad(param(2)) }
    local w, g = m.w, m.w.grad
    local _, e = pcall(m._apply, m, grads_fail, true, NOT_ATOMIC)
    assert.equal("no gradients", e)
    assert.equal("float64", m.w.dtype)
    assert.equal(mode.kept, m.w == w)
    if mode.name == "default" then
      assert.equal(g, m.w.grad)
      assert.equal("float32", g.dtype)
    else
      assert.is_nil(m.w.grad)
    end
    if mode.name == "overwrite" then assert.equal(g, w.grad) end
  end)

  it("C69 T48: a gradient that cannot be swapped is named, and nothing changes", function()
    K.with_flags { swap = true }(function()
      local l = K.linear()
      local view = l.weight.grad[1] -- does not count (section 2.1, V4)
      tm.pin(l.weight.grad)
      local e = K.unchanged(l, function() l:half() end, "RuntimeError", "_apply: cannot swap Linear.weight.grad")
      assert.truthy(e.cause.message:find "used 2 times")
      assert.is_nil(e.orphan_grad)
      local g, w = l.weight.grad, l.weight
      e = H.raises(function() l:to { dtype = "float16", atomic = false } end, "RuntimeError", "_apply: cannot swap Linear.weight.grad")
      assert.equal("float16", w.dtype) -- upstream's state
      assert.is_nil(w.grad)
      assert.equal(g, e.orphan_grad)
      assert.truthy(e.cause)
      tm.unpin(g)
      assert.equal(2, view:numel())
    end)
  end)

  it("C70: a refused swap changes neither class nor fields nor contents", function()
    K.with_flags { swap = true }(function()
      local l = K.linear()
      l.bias.tag = 1
      tm.pin(l.bias)
      K.unchanged(l, function() l:double() end, "RuntimeError", "cannot swap Linear.bias")
      assert.equal(1, l.bias.tag)
      assert.equal("float32", l.weight.dtype) -- though it could have been
      tm.unpin(l.bias)
    end)
  end)

  K.each_mode("C71: once the cause is gone, the same conversion completes", function()
    local l = K.linear()
    pcall(l._apply, l, failing_at(3))
    l:double()
    assert.same({ "float64", "float64", "float64" }, { l.weight.dtype, l.weight.grad.dtype, l.bias.dtype })
    local now = K.describe(l.weight)
    l:double()
    assert.same(now.values, K.describe(l.weight).values)
  end)

  K.each_mode("C72: wrong arguments are errors before the walk", function()
    local l = K.linear()
    for _, convert in ipairs {
      function() l:to "int64" end, function() l:to "float33" end, function() l:to { dtyp = "float64" } end, function() l:type "x" end,
      function() l:to_empty {} end, function() l:to("cpu", true) end,
    } do
      tm.collect()
      local before = K.state(l)
      assert.is_false((pcall(convert)))
      K.same(before, K.state(l))
    end
  end)

  it("C73: kinds of errors are PyTorch's names", function()
    local kinds = {}
    for _, kind in pairs(B.Error.KIND) do kinds[kind] = true end
    for _, kind in ipairs { "RuntimeError", "TypeError", "ValueError", "NotImplementedError", "AssertionError" } do
      assert.is_true(kinds[kind])
    end
  end)

  it("C13: reads flags at the commit and leaves them", function()
    K.with_flags { swap = true, overwrite = true }(function()
      local l = K.linear()
      pcall(l._apply, l, failing_at(2))
      assert.same({ swap = true, overwrite = true }, future.snapshot())
    end)
  end)
end)

-- the C side by itself --------------------------------------------------------------------------------------------------------

describe("module:_convert", function()
  K.each_mode("gives the map of replaced parameters", function(mode)
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[2].weight = m[1].weight
    local old = m[1].weight
    local self, replaced = m:_convert { dtype = "float64", only_floating = true }
    assert.equal(m, self)
    if mode.kept then
      assert.same({}, replaced)
    else
      assert.equal(m[1].weight, replaced[old])
      assert.not_equal(m[1].weight, m[2].weight)
    end
  end)

  K.each_mode("converts a tied parameter once where it stays one", function(mode)
    local m = nn.Sequential(nn.Linear(64, 64, { bias = false }), nn.Linear(64, 64, { bias = false }))
    m[2].weight = m[1].weight
    tm.collect()
    local before = tm.memory_stats().in_use
    m:double()
    tm.collect()
    assert.equal(mode.kept and 4 or 12, (tm.memory_stats().in_use - before) / 64 / 64)
  end)

  K.each_mode("copies small and large tensors alike, of any strides", function()
    tm.manual_seed(1)
    local m = nn.Module()
    m.large, m.small = nn.Parameter(tm.randn(300, 400)), nn.Parameter(tm.randn(3, 4))
    m.turned, m.cut = nn.Parameter(tm.randn(300, 200):t()), nn.Parameter(tm.randn(50, 60):narrow(2, 3, 40))
    m.empty, m.scalar = nn.Parameter(tm.randn(0, 3)), nn.Parameter(tm.randn({}))
    for i = 1, 500 do m["p" .. i] = nn.Parameter(tm.randn(31, 17)) end
    local expected = {}
    for name, p in m:named_parameters() do expected[name] = p:detach():to "bfloat16" end
    m:to "bfloat16"
    for name, p in m:named_parameters() do
      assert.equal("bfloat16", p.dtype)
      assert.same(expected[name]:size(), p:size())
      if p:numel() > 0 then assert.is_true(expected[name]:eq(p:detach()):all():item(), name) end
    end
    assert.same({ 1, 200 }, m.turned:stride())
    assert.same({ 40, 1 }, m.cut:stride())
  end)
end)
