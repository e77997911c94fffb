---Calling modules: forward hooks, always_call, handles, and where errors say they happened (docs/contracts/module.md,
---chapters 9 to 11).

local H = require "spec.helper"
local tm = require "tmod"
local binding = require "tmod.ffi"
local nn, F = tm.nn, tm.nn.functional
local args, kw = nn.args, nn.kw
local raises = H.raises

---A module whose forward is fn(...).
local function module_of(fn, name)
  local Class = nn.Module:extend(name or "Fn")
  function Class:forward(...) return fn(...) end
  return Class()
end

local function echo() return module_of(function(...) return ... end) end

---What a call returns, with the count.
local function pack(...) return { n = select("#", ...), ... } end

---Runs fn and returns the warnings that it gave.
local function warnings(fn)
  local old, list = nn.Module._warn, {}
  nn.Module._warn = function(text, ...) list[#list + 1] = text:format(...) end
  local ok, e = pcall(fn)
  nn.Module._warn = old
  if not ok then error(e, 0) end
  return list
end

describe("nn.args and nn.kw", function()
  it("M4: a tuple has a length and keeps nils", function()
    local a = args(1, nil, nil)
    assert.equal(3, a.n)
    assert.equal(1, a[1])
    assert.is_nil(a[3])
    assert.is_true(nn.is_args(a))
    assert.is_false(nn.is_args { 1, n = 1 })
    assert.equal("nn.args(1, nil, nil)", tostring(a))
    assert.same(pack(1, nil, nil), pack(a:unpack()))
    assert.equal(0, args().n)
  end)

  it("M5: named arguments are marked by nn.kw, which copies; a plain table in last place is positional", function()
    local t = { mask = 1 }
    local k = kw(t)
    assert.is_true(nn.is_kw(k))
    assert.is_nil(getmetatable(t))
    local m, seen = echo(), nil
    m:register_forward_pre_hook(function(_, a) seen = a.n end)
    m(1, t)
    assert.equal(2, seen)
    m(1, k)
    assert.equal(1, seen)
    raises(function() m(k, 1) end, "TypeError", "nn.kw must be the last argument, not number 1 of 2")
    raises(function() kw(3) end, "TypeError", "nn.kw: expected a table, got number")
  end)
end)

describe("calling a module", function()
  it("M87 M104: without hooks is forward, with as many values as there are", function()
    for _, hooked in ipairs { false, true } do
      local m = echo()
      if hooked then m:register_forward_hook(function() end) end
      assert.same(pack(), pack(m()))
      assert.same(pack(nil), pack(m(nil)))
      assert.same(pack(1, nil, 3, nil), pack(m(1, nil, 3, nil)))
    end
  end)

  it("M87 M104: without hooks makes no table and compiles", function()
    local m = echo()
    m:register_forward_hook(function() end):remove()
    for i = 1, 200 do m(i) end
    collectgarbage()
    collectgarbage "stop"
    local before = collectgarbage "count"
    for i = 1, 1000 do m(i) end
    local grown = collectgarbage "count" - before
    collectgarbage "restart"
    assert.is_true(grown < 16, grown .. " KB for 1000 calls") -- a table for each would be 40 at least
  end)

  it("M88: the steps come in order, global hooks first", function()
    local log = {}
    local function note(what) return function() log[#log + 1] = what end end
    local m = module_of(function(x) note "forward"() return x end)
    m:register_forward_hook(note "post")
    m:register_forward_pre_hook(note "pre")
    local a = nn.register_module_forward_hook(note "global post")
    local b = nn.register_module_forward_pre_hook(note "global pre")
    m(1)
    a:remove()
    b:remove()
    assert.same({ "global pre", "pre", "forward", "global post", "post" }, log)
  end)

  it("M88 case 44: forward and backward hooks of all kinds", function()
    local log, handles = {}, {}
    local function note(what) return function() log[#log + 1] = what end end
    local l = nn.Linear(2, 2)
    l:register_forward_pre_hook(note "pre")
    l:register_forward_hook(note "fwd")
    l:register_full_backward_pre_hook(note "bpre")
    l:register_full_backward_hook(note "bwd")
    handles[1] = nn.register_module_forward_pre_hook(note "gpre")
    handles[2] = nn.register_module_forward_hook(note "gfwd")
    handles[3] = nn.register_module_full_backward_pre_hook(note "gbpre")
    handles[4] = nn.register_module_full_backward_hook(note "gbwd")
    l(tm.ones(1, 2, { requires_grad = true })):sum():backward()
    for _, h in ipairs(handles) do h:remove() end
    assert.same({ "gpre", "pre", "gfwd", "fwd", "gbpre", "bpre", "gbwd", "bwd" }, log)
  end)

  it("M89 case 50: m:forward runs no hooks", function()
    local m, calls = echo(), 0
    m:register_forward_pre_hook(function() calls = calls + 1 end)
    m:register_forward_hook(function() calls = calls + 1 end)
    assert.equal(5, m:forward(5))
    assert.equal(0, calls)
    local e = raises(function() nn.Module:extend "app.Empty"()(1) end, "NotImplementedError", "app.Empty has no forward")
    assert.equal("Empty", e.module)
  end)
end)

describe("forward pre-hooks", function()
  local function with_hook(fn, ...)
    local m = echo()
    m:register_forward_pre_hook(fn)
    return pack(m(...))
  end

  it("M90 M107 case 42: what they return are the new arguments", function()
    assert.same(pack(9), with_hook(function() return 9 end, 1, 2))
    local list = { 8, 9 }
    assert.equal(list, with_hook(function() return list end, 1)[1])
    assert.same(pack(8, 9, 10), with_hook(function() return 8, 9, 10 end, 1))
    assert.same(pack(), with_hook(function() return args() end, 1))
    assert.same(pack(false), with_hook(function() return false end, 1))
    assert.same(pack(1, nil), with_hook(function() end, 1, nil))
    assert.same(pack(1, nil), with_hook(function() return nil end, 1, nil))
    assert.same(pack(nil, 2), with_hook(function() return nil, 2 end, 1))
    assert.same(pack(7, nil, 8), with_hook(function() return args(7, nil, 8) end, 1))
  end)

  it("M90 M106: get the positional arguments as a tuple of their own", function()
    local m, seen = echo(), nil
    m:register_forward_pre_hook(function(module, a)
      assert.equal(m, module)
      assert.is_true(nn.is_args(a))
      a[1], a.n = 99, 1
    end)
    m:register_forward_pre_hook(function(_, a) seen = a end)
    assert.same(pack(1, 2), pack(m(1, 2)))
    assert.equal(2, seen.n)
    assert.equal(1, seen[1])
  end)

  it("M91 M105: with_kwargs, get and return the named arguments too", function()
    local m = module_of(function(x, k) return x, k end)
    local given = kw { a = 1 }
    m:register_forward_pre_hook(function(_, a, k)
      k.a = k.a + 10 -- seen by all that follow, and not by the caller
      return args(a[1] * 2), { a = k.a, b = 2 }
    end, { with_kwargs = true })
    local x, k = m(3, given)
    assert.equal(6, x)
    assert.is_true(nn.is_kw(k))
    assert.same({ 11, 2 }, { k.a, k.b })
    assert.equal(1, given.a)
  end)

  it("M91 case 49: with_kwargs, anything but a pair is an error that tells it", function()
    for text, results in pairs {
      ["got tensor"] = args(tm.ones(1)), ["got nn.args"] = args(args(1)), ["got number, table"] = args(1, {}),
      ["got nn.args, number"] = args(args(1), 3), ["got nn.args, tensor"] = args(args(1), tm.ones(1)),
      ["got nil, table"] = args(nil, {}), ["got boolean"] = args(false), ["got nn.args, table, number"] = args(args(1), {}, 1),
    } do
      local m = echo()
      m:register_forward_pre_hook(function() return results:unpack() end, { with_kwargs = true })
      raises(function() m(1) end, "RuntimeError", "forward pre%-hook of Fn: with_kwargs it must return nn.args.*" .. text)
    end
    local m = echo()
    m:register_forward_pre_hook(function() return nil end, { with_kwargs = true })
    assert.equal(1, m(1))
  end)

  it("M105: forward gets the named arguments if the caller gave some or a hook made some", function()
    local m = echo()
    local log = {}
    local h = m:register_forward_pre_hook(function(_, _, k)
      assert.is_true(nn.is_kw(k))
      log[#log + 1] = next(k) == nil and "empty" or "some"
    end, { with_kwargs = true })
    assert.equal(1, pack(m(1)).n)
    local r = pack(m(1, kw {}))
    assert.equal(2, r.n)
    assert.is_true(nn.is_kw(r[2]))
    assert.equal(2, pack(m(1, kw { z = 1 })).n)
    assert.same({ "empty", "empty", "some" }, log)
    h:remove()
    m:register_forward_pre_hook(function(_, _, k) k.made = true end, { with_kwargs = true })
    r = pack(m())
    assert.equal(1, r.n)
    assert.is_true(r[1].made)
  end)

  it("M92: each sees what earlier ones left", function()
    local m = echo()
    m:register_forward_pre_hook(function(_, a) return a[1] + 1, 5 end)
    m:register_forward_pre_hook(function(_, a) return a[1] * 10 + a[2] end)
    assert.same(pack(25), pack(m(1)))
    raises(function() nn.register_module_forward_pre_hook(print, { with_kwargs = true }) end, "TypeError", "unknown option with_kwargs")
    raises(function() nn.register_module_forward_pre_hook(print, { prepend = true }) end, "TypeError", "unknown option prepend")
  end)

  it("M100: that throw stop everything", function()
    local log = {}
    local m = module_of(function() log[1] = "forward" end)
    m:register_forward_pre_hook(function() error("stop", 0) end)
    m:register_forward_pre_hook(function() log[1] = "second" end)
    m:register_forward_hook(function() log[1] = "post" end)
    local ok, e = pcall(m, 1)
    assert.is_false(ok)
    assert.equal("stop", e)
    assert.same({}, log)
  end)
end)

describe("forward hooks", function()
  it("M93 M108: what they return replaces the output", function()
    local function output_with(fn, ...)
      local m = echo()
      m:register_forward_hook(fn)
      return pack(m(...))
    end
    assert.same(pack(9), output_with(function() return 9 end, 1))
    assert.same(pack(false), output_with(function() return false end, 1))
    assert.same(pack("text"), output_with(function() return "text" end, 1, 2))
    assert.same(pack(1, 2), output_with(function() end, 1, 2))
    assert.same(pack(1, 2), output_with(function() return nil end, 1, 2))
    assert.same(pack(nil, 3), output_with(function() return nil, 3 end, 1))
    assert.same(pack(4, nil), output_with(function() return args(4, nil) end, 1))
    assert.same(pack(), output_with(function() return args() end, 1))
  end)

  it("M93 M108: get the arguments that forward got and the output so far, one value bare and others as a tuple", function()
    local m, seen = module_of(function(...) return ... end), nil
    m:register_forward_pre_hook(function(_, a) return a[1] + 1 end)
    m:register_forward_hook(function(_, a, out) seen = { a.n, a[1], out } return out * 10 end)
    m:register_forward_hook(function(_, _, out) assert.equal(20, out) end)
    assert.equal(20, m(1, 99))
    assert.same({ 1, 2, 2 }, seen)
    local several = module_of(function(...) return ... end)
    local out
    several:register_forward_hook(function(_, _, o) out = o o[1] = 99 end)
    assert.same(pack(1, nil), pack(several(1, nil)))
    assert.is_true(nn.is_args(out))
    assert.equal(2, out.n)
    several()
    assert.equal(0, out.n)
    local single = module_of(function() return nil end)
    local count
    single:register_forward_hook(function(_, a, o, ...) count = { a.n, o, select("#", ...) } end)
    assert.equal(1, pack(single(5)).n)
    assert.same({ 1, nil, 0 }, count)
  end)

  it("M91 M93 case 48: with named arguments", function()
    local m = module_of(function(x, k) return x + k.bias end)
    m:register_forward_pre_hook(function(_, a, k) return a, { bias = k.bias * 2 } end, { with_kwargs = true })
    m:register_forward_hook(function(_, _, k, out) return out + k.bias end, { with_kwargs = true })
    assert.equal(5, m(1, kw { bias = 1 }))
  end)

  it("M94: global ones take with_kwargs and always_call, and run before the module's own", function()
    local log = {}
    local m = module_of(function(x) return x end)
    m:register_forward_hook(function(_, _, out) log[#log + 1] = "own " .. out end)
    local h = nn.register_module_forward_hook(function(_, _, k, out)
      log[#log + 1] = "global " .. tostring(k.a)
      return out and out + 1
    end, { with_kwargs = true, always_call = true })
    m(1, kw { a = 5 })
    assert.same({ "global 5", "own 2" }, log)
    pcall(module_of(function() error "x" end), 1, kw { a = 6 })
    h:remove()
    assert.equal("global 6", log[3])
    raises(function() nn.register_module_forward_hook(print, { prepend = true }) end, "TypeError", "unknown option prepend")
  end)

  it("M95 case 43: prepend puts a hook first among its own", function()
    local m, log = echo(), {}
    local function note(i) return function() log[#log + 1] = i end end
    m:register_forward_hook(note(0))
    m:register_forward_hook(note(1), { prepend = true })
    m:register_forward_hook(note(2))
    m:register_forward_hook(note(3))
    m:register_forward_hook(note(4), { prepend = true })
    local h = nn.register_module_forward_hook(note "global")
    m(1)
    h:remove()
    assert.same({ "global", 4, 1, 0, 2, 3 }, log)
    local n = echo()
    log = {}
    n:register_forward_pre_hook(note "b")
    n:register_forward_pre_hook(note "a", { prepend = true })
    n(1)
    assert.same({ "a", "b" }, log)
  end)

  it("M96: one function registered twice runs twice", function()
    local m, calls = echo(), 0
    local function count() calls = calls + 1 end
    local a, b = m:register_forward_hook(count), m:register_forward_hook(count)
    assert.is_true(b.id > a.id)
    m(1)
    assert.equal(2, calls)
    a:remove()
    m(1)
    assert.equal(3, calls)
  end)

  it("M97 case 46: one added in its own phase runs from the next call on", function()
    for _, register in ipairs { "register_forward_pre_hook", "register_forward_hook" } do
      local m, calls, added = echo(), 0, false
      m[register](m, function()
        if added then return end
        added = true
        m[register](m, function() calls = calls + 1 end)
      end)
      m(1)
      assert.equal(0, calls)
      m(1)
      assert.equal(1, calls)
    end
  end)

  it("M97 M87 case 47: one added by forward runs in the same call if there were hooks at entry", function()
    for _, had_hook in ipairs { false, true } do
      local calls, m = 0, nil
      local added = false
      m = module_of(function()
        if not added then m:register_forward_hook(function() calls = calls + 1 end) end
        added = true
      end)
      if had_hook then m:register_forward_pre_hook(function() end) end
      m(1)
      assert.equal(had_hook and 1 or 0, calls)
    end
  end)

  it("M98 M99 case 45: one removed while its phase runs still runs this time, with its named arguments", function()
    local m, log = module_of(function(x) return x end), {}
    local b
    m:register_forward_hook(function() b:remove() end)
    b = m:register_forward_hook(function(_, _, k, out) log[#log + 1] = { k.a, out } end, { with_kwargs = true })
    m(1, kw { a = 2 })
    local self_removing
    self_removing = m:register_forward_hook(function() self_removing:remove() log[#log + 1] = "once" end)
    m(1)
    m(1)
    assert.equal(2, #log)
    assert.equal(2, log[1][1])
    assert.equal("once", log[2])
  end)

  it("M100: that throw stop the later ones", function()
    local m, ran = echo(), false
    m:register_forward_hook(function() error("stop", 0) end)
    m:register_forward_hook(function() ran = true end)
    local ok, e = pcall(m, 1)
    assert.is_false(ok)
    assert.equal("stop", e)
    assert.is_false(ran)
  end)

  it("M101: see live tensors: an in-place layer has changed its input", function()
    local Relu = nn.Module:extend "InPlace"
    function Relu:forward(x) return x:relu_() end
    local m, seen = Relu(), nil
    m:register_forward_hook(function(_, a) seen = a[1]:tolist() end)
    m(tm.tensor { -1, 2 })
    assert.same({ 0, 2 }, seen)
  end)

  it("M102: of nested modules come in order", function()
    local log = {}
    local function note(what) return function() log[#log + 1] = what end end
    local inner = echo()
    local outer = nn.Sequential(inner)
    for name, m in pairs { inner = inner, outer = outer } do
      m:register_forward_pre_hook(note(name .. " pre"))
      m:register_forward_hook(note(name .. " post"))
    end
    outer(1)
    assert.same({ "outer pre", "inner pre", "inner post", "outer post" }, log)
  end)

  it("M109: options that are not known, and what is no function, are errors", function()
    local m = echo()
    raises(function() m:register_forward_pre_hook(print, { always_call = true }) end, "TypeError",
      "unknown option always_call; known: prepend, with_kwargs")
    raises(function() m:register_forward_hook(print, { first = true }) end, "TypeError", "unknown option first")
    raises(function() m:register_forward_hook(3) end, "TypeError", "register_forward_hook: expected a function, got number")
    raises(function() m:register_forward_hook() end, "TypeError", "got nil")
    local calls = 0
    m:register_forward_hook(setmetatable({}, { __call = function() calls = calls + 1 end }))
    m(1)
    assert.equal(1, calls)
  end)
end)

describe("handles", function()
  it("M103 M110 case 57: remove once and for all", function()
    local m, calls = echo(), 0
    local h = m:register_forward_hook(function() calls = calls + 1 end, { with_kwargs = true, always_call = true })
    local other = m:register_forward_hook(function() calls = calls + 10 end)
    assert.equal("number", type(h.id))
    assert.is_true(other.id > h.id)
    h:remove()
    h:remove()
    m(1)
    assert.equal(10, calls)
    other:remove()
    local tensor_handle = tm.ones(1, { requires_grad = true }):register_hook(print)
    assert.is_true(tensor_handle.id > other.id) -- one count for all
  end)

  it("M103 M110 case 57: scope a hook to a function", function()
    local m, calls = echo(), 0
    local function count() calls = calls + 1 end
    local r = pack(m:register_forward_hook(count):with(m, 1, nil))
    assert.same(pack(1, nil), r)
    assert.equal(1, calls)
    local thrown = {}
    local h = m:register_forward_hook(count)
    local ok, e = pcall(h.with, h, function() m(1) error(thrown) end)
    assert.is_false(ok)
    assert.equal(thrown, e)
    assert.equal(2, calls)
    m(1)
    assert.equal(2, calls)
  end)

  it("M103 M111: keep no module alive, and may outlive it", function()
    local weak = setmetatable({}, { __mode = "v" })
    local h
    do
      local m = nn.Linear(2, 2)
      weak[1] = m
      h = m:register_forward_hook(function() return m end)
      m = nil -- luacheck: ignore
    end
    collectgarbage()
    collectgarbage()
    assert.is_nil(weak[1])
    h:remove()
  end)

  it("M111: a dropped handle removes nothing", function()
    local m, calls = echo(), 0
    m:register_forward_hook(function() calls = calls + 1 end)
    collectgarbage()
    m(1)
    assert.equal(1, calls)
  end)

  it("M122 M123: lists outside the call are walked as they were at the start", function()
    local m, log = nn.Linear(1, 1), {}
    local first, second
    first = m:register_state_dict_pre_hook(function()
      log[#log + 1] = "first"
      first:remove()
      second:remove()
      m:register_state_dict_pre_hook(function() log[#log + 1] = "added" end)
    end)
    second = m:register_state_dict_pre_hook(function() log[#log + 1] = "second" end)
    m:state_dict()
    assert.same({ "first", "second" }, log)
    m:state_dict()
    assert.same({ "first", "second", "added" }, log)
    assert.is_false(pcall(m.register_state_dict_pre_hook, m, 3))
  end)
end)

describe("always_call", function()
  local A, Bad = { "A" }, { "B" }

  local function failing() return module_of(function() error(A) end, "Failing") end
  local function thrown(m, ...)
    local ok, e = pcall(m, ...)
    assert.is_false(ok)
    return e
  end

  it("M112: runs once, in its place, when nothing fails", function()
    local m, log = echo(), {}
    m:register_forward_hook(function() log[#log + 1] = 1 end)
    m:register_forward_hook(function(_, _, out) log[#log + 1] = 2 return out + 1 end, { always_call = true })
    m:register_forward_hook(function(_, _, out) log[#log + 1] = out end)
    assert.equal(2, m(1))
    assert.same({ 1, 2, 2 }, log)
  end)

  it("M113 M115 M120 case 51: runs when forward throws, without output; the error is the very same", function()
    local m, log = failing(), {}
    m:register_forward_hook(function() log[#log + 1] = "ordinary" end)
    m:register_forward_hook(function(module, a, out) log[#log + 1] = { module, a[1], out } end, { always_call = true })
    assert.equal(A, thrown(m, 5))
    assert.equal(1, #log)
    assert.same({ m, 5, nil }, log[1])
    local text = module_of(function() error("A", 0) end)
    local calls = 0
    text:register_forward_hook(function() calls = calls + 1 end, { always_call = true })
    assert.equal("A", thrown(text, 1)) -- no position is added
    assert.equal(1, calls)
  end)

  it("M113: global ones run first", function()
    local m, log = failing(), {}
    m:register_forward_hook(function() log[#log + 1] = "own" end, { always_call = true })
    local h = nn.register_module_forward_hook(function() log[#log + 1] = "global" end, { always_call = true })
    thrown(m)
    h:remove()
    assert.same({ "global", "own" }, log)
  end)

  it("M113 M115 case 52: runs when a pre-hook throws, with the arguments so far", function()
    local m, seen = echo(), nil
    m:register_forward_pre_hook(function(_, a) return a[1] + 1 end)
    m:register_forward_pre_hook(function() error(A) end)
    m:register_forward_hook(function(_, a, k, out) seen = { a[1], k.z, out } end, { always_call = true, with_kwargs = true })
    assert.equal(A, thrown(m, 1, kw { z = 3 }))
    assert.same({ 2, 3, nil }, seen)
  end)

  it("M113: may be added by the call that fails", function()
    local m, calls
    m, calls = module_of(function()
      m:register_forward_hook(function() calls = calls + 1 end, { always_call = true })
      error(A)
    end), 0
    m:register_forward_pre_hook(function() end)
    assert.equal(A, thrown(m))
    assert.equal(1, calls)
  end)

  it("M116 case 53: an error in one is silenced with a warning", function()
    local m, ran = failing(), false
    m:register_forward_hook(function() error("B of the hook", 0) end, { always_call = true })
    m:register_forward_hook(function() ran = true end, { always_call = true })
    local list = warnings(function() assert.equal(A, thrown(m)) end)
    assert.is_true(ran)
    assert.equal(1, #list)
    assert.truthy(list[1]:find("B of the hook", 1, true))
  end)

  it("M115 case 54: runs when a forward hook throws, with the output as earlier hooks left it", function()
    local m, seen = echo(), {}
    m:register_forward_hook(function(_, _, out) return out * 10 end)
    m:register_forward_hook(function() error(Bad) end)
    m:register_forward_hook(function(_, _, out) seen[#seen + 1] = out return "for the next" end, { always_call = true })
    m:register_forward_hook(function(_, _, out) seen[#seen + 1] = out end, { always_call = true })
    assert.equal(Bad, thrown(m, 1))
    assert.same({ 10, "for the next" }, seen)
  end)

  it("M114 case 55: one that throws in the normal phase has run", function()
    local m, calls = echo(), 0
    m:register_forward_hook(function()
      calls = calls + 1
      error(Bad)
    end, { always_call = true })
    assert.equal(Bad, thrown(m, 1))
    assert.equal(1, calls)
  end)

  it("M117: global ones get named arguments on failure too", function()
    local m, seen = failing(), nil
    local h = nn.register_module_forward_hook(function(_, _, k, out) seen = { k.a, out } end, { always_call = true, with_kwargs = true })
    thrown(m, 1, kw { a = 7 })
    h:remove()
    assert.same({ 7 }, seen)
  end)

  it("M118 case 56: of inner modules run first", function()
    local log = {}
    local inner = failing()
    local outer = nn.Sequential(inner)
    inner:register_forward_hook(function() log[#log + 1] = "inner" end, { always_call = true })
    outer:register_forward_hook(function() log[#log + 1] = "outer" end, { always_call = true })
    assert.equal(A, thrown(outer, 1))
    assert.same({ "inner", "outer" }, log)
  end)

  it("M119: only forward hooks have it", function()
    local m = echo()
    for _, name in ipairs { "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook" } do
      raises(function() m[name](m, print, { always_call = true }) end, "TypeError", "unknown option always_call")
    end
  end)

  it("M120: forward and hooks may yield", function()
    local m = module_of(function(x) return coroutine.yield(x) end)
    m:register_forward_pre_hook(function(_, a) return coroutine.yield("pre " .. a[1]) end)
    m:register_forward_hook(function(_, _, out) return coroutine.yield("post " .. out) end)
    local co = coroutine.wrap(function() return "done " .. m "x" end)
    assert.equal("pre x", co())
    assert.equal("y", co "y")
    assert.equal("post z", co "z")
    assert.equal("done w", co "w")
  end)

  it("M120: an error object keeps the traceback that the hooks would lose", function()
    local m = module_of(function() return tm.ones(2):view(3) end)
    m:register_forward_hook(function() end)
    local e = thrown(m)
    assert.equal("RuntimeError", e.kind)
    assert.truthy(e.traceback:find "contract_hooks_spec")
  end)

  it("M121: every error counts, nil and those of the runtime included", function()
    local calls = 0
    local function overflow() return 1 + overflow() end
    for _, fn in ipairs { function() error() end, function() return nil + 1 end, overflow } do
      local m = module_of(fn)
      m:register_forward_hook(function() calls = calls + 1 end, { always_call = true })
      assert.is_false((pcall(m)))
    end
    assert.equal(3, calls)
  end)
end)

describe("errors inside a forward", function()
  local Net = nn.Module:extend "app.Net"
  function Net:init()
    local Block = nn.Module:extend "Block"
    function Block:init() self.linear1 = nn.Linear(3, 2) end
    function Block:forward(x) return self.linear1(F.relu(x)) end
    self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Block())
  end
  function Net:forward(x) return (self.encoder(x)) end

  it("name the module's path, its class and the arguments, and stay the object that they were", function()
    local net = Net()
    for _ = 1, 150 do -- compiled as well
      local e = raises(function() net(tm.ones(5, 4)) end, "RuntimeError",
        "linear: x is float32 %(5, 4%).*\n  in Net%.encoder%.2%.linear1 %(Linear%), called with float32 %(5, 4%)")
      assert.equal("Net.encoder.2.linear1", e.module)
      assert.equal("float32 (5, 4)", e.inputs)
      assert.is_nil(e.message:find "Net")
    end
  end)

  it("name it with hooks on the way, too", function()
    local net = Net()
    net.encoder:register_forward_hook(function() end)
    net.encoder[3].linear1:register_full_backward_hook(function() end)
    local e = raises(function() net(tm.ones(5, 4)) end, "RuntimeError")
    assert.equal("Net.encoder.2.linear1", e.module)
    net.encoder[1]:register_forward_pre_hook(function(_, a) return a[1]:view(3) end)
    e = raises(function() net(tm.ones(5, 4)) end, "RuntimeError", "view")
    assert.equal("Net.encoder.0", e.module)
  end)

  it("name a module without a nest by its class, and one that is called from outside the tree", function()
    local e = raises(function() nn.Linear(2, 2)(tm.ones(3)) end, "RuntimeError", "\n  in Linear, called with float32 %(3,%)")
    assert.equal("Linear", e.module)
    local stray = nn.Linear(2, 2)
    local Outer = nn.Module:extend "Outer"
    function Outer:forward(x) return stray(x) end
    e = raises(function() Outer()(tm.ones(3), nil, "s") end, "RuntimeError", "called with float32 %(3,%)")
    assert.equal("Outer > Linear", e.module)
    local Named = nn.Module:extend "Named"
    function Named:forward() return tm.ones(2):view(3) end
    raises(function() Named()(nil, "s", kw { a = 1 }) end, "RuntimeError", "in Named, called with nil, s, nn.kw")
    raises(function() Named()() end, "RuntimeError", "in Named, called with nothing")
  end)

  it("that are not tmod's pass unchanged", function()
    local thrown = {}
    local m = nn.Sequential(module_of(function() error(thrown) end))
    local ok, e = pcall(m, 1)
    assert.is_false(ok)
    assert.equal(thrown, e)
    assert.is_nil(next(thrown))
  end)

  it("outside of any module say nothing more", function()
    local e = raises(function() tm.ones(2):view(3) end, "RuntimeError")
    assert.is_nil(e.module)
    assert.is_nil(tostring(e):find "\n  in ")
  end)
end)

describe("cycles of modules, hooks and tensors", function()
  local function hooked()
    local m, stats = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {}
    m:register_forward_hook(function(module, _, out)
      stats.out, module.last = out, out -- a module that holds the graph that holds its hooks
      out:register_hook(function(g) stats.grad, stats.again = g, out end)
    end)
    m:register_full_backward_hook(function(module, grad_input) module.grads, stats.module = grad_input, m end)
    m[1].weight:register_hook(function(g) stats.weight_grad, stats.m = g, m end)
    return m, stats
  end

  it("are collected: 10,000 hooked modules leave nothing", function()
    local count = H.sanitized and 500 or 10000
    local function loop(n)
      for i = 1, n do
        local m = hooked()
        local y = m(tm.ones(1, 2, { requires_grad = i % 2 == 0 })):sum()
        if i % 3 > 0 then y:backward() end
        m.loss = y
      end
    end
    warnings(function()
      loop(1)
      local before = H.live_tensors()
      local live = tm.live()
      loop(count)
      assert.equal(before, H.live_tensors())
      assert.same(live, tm.live())
    end)
  end)

  it("do not grow without bound before somebody collects", function()
    warnings(function()
      for _ = 1, H.sanitized and 200 or 3000 do hooked()(tm.ones(1, 2)) end
    end)
    assert.is_true(tm.live().tensors < 20000)
    tm.collect()
  end)

  it("stay as long as a graph needs them", function()
    local fired = {}
    local function make()
      local m = nn.Linear(2, 2)
      m:register_full_backward_hook(function() fired[#fired + 1] = "module" end)
      local y = m(tm.ones(1, 2, { requires_grad = true }))
      y:register_hook(function() fired[#fired + 1] = "tensor" end)
      local z = (y * 2 + y:exp()):sum() -- two ways down
      return z * z
    end
    local loss = make()
    for _ = 1, 3 do tm.collect() end
    loss:backward()
    assert.same({ "tensor", "module" }, fired)
  end)

  -- What each returns leads to the hooked tensor by another way; `use` runs a pass through it.
  local holders = {
    ["a result further on"] = function(y) return (y * 2 + y:exp()):sum(), function(z) z:backward() end end,
    ["a view"] = function(y) return y:view(2, 1), function(z) z:sum():backward() end end,
    ["the base of a view that was changed"] = function(y)
      local base = tm.ones(2, 2)
      base[1]:mul_(y)
      return base, function(z) z:sum():backward() end
    end,
    ["a gradient with a graph of its own"] = function(y)
      local w = tm.ones(2, { requires_grad = true })
      w.grad = tm.autograd.grad((w * y):tanh():sum(), w, { create_graph = true })
      return w, function(leaf) leaf.grad:sum():backward() end
    end,
    ["what a custom function saved"] = function(y)
      local Hidden, cell = tm.autograd.Function:extend "Hidden", { y }
      function Hidden.forward(ctx, x)
        ctx:save_for_backward(cell[1]) -- no argument
        cell[1] = nil
        return x * 2
      end
      function Hidden.backward(ctx, dy) return dy * ctx:saved() end
      local x = tm.ones(2, { requires_grad = true })
      return { Hidden.apply(x):sum(), x }, function(kept)
        tm.autograd.grad(kept[1], kept[2], { create_graph = true }):sum():backward()
      end
    end,
  }
  for name, make in pairs(holders) do
    it("stay while they are held by " .. name, function()
      local calls = 0
      local function build()
        local x = tm.ones(2, { requires_grad = true })
        local y = x:tanh()
        y:register_hook(function() calls = calls + 1 end)
        return make(y)
      end
      collectgarbage "stop" -- the dropped tensors are still there when the search begins
      local kept, use = build()
      binding.collect_garbage(true)
      collectgarbage "restart"
      tm.collect()
      calls = 0
      use(kept)
      assert.equal(1, calls)
      if tm.is_tensor(kept) then kept.grad = nil end
    end)
  end
end)

describe("scripts/hooks.lua", function()
  it("prints statistics of every Linear and removes its hooks", function()
    local code, out, err = H.shell(("%s %s/scripts/hooks.lua --seed 3"):format(H.tmodrun, H.root))
    assert.equal(0, code, err)
    assert.equal("", err)
    for _, name in ipairs { "embed", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head" } do
      assert.truthy(out:find("\n" .. name:gsub("%.", "%%.") .. " +%-?%d"), name .. " in:\n" .. out)
    end
    assert.truthy(out:find "hooks left: 0")
    local _, again = H.shell(("%s %s/scripts/hooks.lua --seed 3"):format(H.tmodrun, H.root))
    assert.equal(out, again)
  end)
end)
