---Sections 1 and 14 of docs/contracts/conversion.md: the two flags, and the helpers that specs set them with.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local future, nn = tm.future, tm.nn

K.guard()

local OVERWRITE, SWAP = "overwrite_module_params_on_conversion", "swap_module_params_on_conversion"

local function run(text)
  local code, out, err = H.shell(H.tmodrun .. " " .. H.file(text))
  return code, out .. err
end

describe("tm.future", function()
  it("C1 T1: two flags, false at first, each with a getter and a setter", function()
    for _, flag in ipairs { OVERWRITE, SWAP } do
      local get, set = future["get_" .. flag], future["set_" .. flag]
      assert.is_false(get())
      set(true)
      assert.is_true(get())
      set(false)
      assert.is_false(get())
    end
    local code, text = run [[
      local f = require "tmod".future
      assert(f.get_overwrite_module_params_on_conversion() == false and f.get_swap_module_params_on_conversion() == false)]]
    assert.equal("", text)
    assert.equal(0, code)
  end)

  it("C1: the flags are independent of each other", function()
    future.set_overwrite_module_params_on_conversion(true)
    assert.is_false(future.get_swap_module_params_on_conversion())
    future.set_swap_module_params_on_conversion(true)
    future.set_overwrite_module_params_on_conversion(false)
    assert.is_true(future.get_swap_module_params_on_conversion())
    future.set_swap_module_params_on_conversion(false)
  end)

  it("C2: a setter touches no module, and the next conversion sees the new value", function()
    local l = K.linear()
    local before = K.describe(l.weight)
    future.set_swap_module_params_on_conversion(true)
    assert.same(before, K.describe(l.weight))
    l:double()
    future.set_swap_module_params_on_conversion(false)
    assert.not_equal(before.impl_id, tm.impl_id(l.weight))
    local now = K.ids(l.weight)
    l:float()
    assert.same(now, K.ids(l.weight))
  end)

  it("C3 T3: a setter takes booleans only, and a refused one leaves the flag", function()
    for _, flag in ipairs { OVERWRITE, SWAP } do
      for _, v in ipairs { "yes", 1, 0, {} } do
        H.raises(function() future["set_" .. flag](v) end, "TypeError", "set_" .. flag .. ": expected a boolean, got ")
        assert.is_false(future["get_" .. flag]())
      end
      H.raises(function() future["set_" .. flag](nil) end, "TypeError", "got nil")
      future["set_" .. flag](true)
      H.raises(function() future["set_" .. flag] "no" end, "TypeError", "got string")
      assert.is_true(future["get_" .. flag]())
      future["set_" .. flag](false)
    end
  end)

  it("C4 T5: another Lua state of the process sees them at once, and one made later", function()
    local code, text = run [[
      local ffi = require "ffi"
      local future = require "tmod".future
      ffi.cdef "typedef struct lua_State lua_State; lua_State *luaL_newstate(void); void luaL_openlibs(lua_State *);\
        int luaL_loadstring(lua_State *, const char *); int lua_pcall(lua_State *, int, int, int);\
        const char *lua_tolstring(lua_State *, int, size_t *); void lua_settop(lua_State *, int); void lua_close(lua_State *);"
      local C = ffi.C
      local L = C.luaL_newstate()
      C.luaL_openlibs(L)
      local function there(chunk)
        chunk = ("package.path = %q; package.cpath = %q; local f = require 'tmod'.future; %s"):format(package.path, package.cpath, chunk)
        local failed = C.luaL_loadstring(L, chunk) ~= 0 or C.lua_pcall(L, 0, 1, 0) ~= 0
        local text = ffi.string(C.lua_tolstring(L, -1, nil))
        C.lua_settop(L, 0)
        assert(not failed, text)
        return text
      end
      local get = "return tostring(f.get_swap_module_params_on_conversion())"
      future.set_swap_module_params_on_conversion(true)
      assert(there(get) == "true")
      future.set_swap_module_params_on_conversion(false)
      assert(there(get) == "false")
      there "f.set_overwrite_module_params_on_conversion(true) return ''"
      assert(future.get_overwrite_module_params_on_conversion())
      C.lua_close(L)
      assert(future.get_overwrite_module_params_on_conversion())]]
    assert.equal("", text)
    assert.equal(0, code)
  end)

  it("C5 T2: with both set, all is as with swap alone", function()
    local function outcome(flags)
      return K.with_flags(flags)(function()
        local l = K.linear()
        local w, g, b = l.weight, l.weight.grad, l.bias
        local ids, gids = K.ids(w), K.ids(g)
        local optimizer = tm.optim.SGD(l:parameters(), { lr = 0.5 })
        l:double()
        local kept = { l.weight == w, l.bias == b, l.weight.grad == g, tm.id(w) == ids[1], tm.impl_id(w) == ids[2],
          tm.impl_id(g) == gids[2], w.dtype, g.dtype }
        optimizer:zero_grad()
        l(tm.ones({ 1, 2 }, { dtype = "float64" })):sum():backward()
        local before = l.bias:tolist()
        optimizer:step()
        kept[#kept + 1] = l.bias:tolist()[1] == before[1] - 0.5
        return kept
      end)
    end
    local both = outcome { overwrite = true, swap = true }
    assert.same({ true, true, true, true, false, false, "float64", "float64", true }, both)
    assert.same(both, outcome { overwrite = false, swap = true })
  end)

  local CONVERSIONS = {
    cpu = function(m) m:cpu() end, float = function(m) m:float() end, double = function(m) m:double() end,
    half = function(m) m:half() end, bfloat16 = function(m) m:bfloat16() end, type = function(m) m:type "float64" end,
    to = function(m) m:to "float64" end, to_empty = function(m) m:to_empty { device = "cpu" } end,
    _apply = function(m) m:_apply(function(t) return t:clone() end) end,
  }

  K.each_mode("C6 C7 C8: the flags govern every conversion of parameters, and of no buffer", function(mode)
    for name, convert in pairs(CONVERSIONS) do
      local l = K.linear()
      l:register_buffer("seen", tm.ones(2))
      local w, ids, buffer = l.weight, K.ids(l.weight), l.seen
      convert(l)
      assert.equal(mode.kept, l.weight == w, name)
      assert.equal(mode.name == "default", tm.impl_id(l.weight) == ids[2], name)
      local unchanged = name == "cpu" or name == "float" -- they give a float32 tensor of the CPU back as it is
      assert.equal(unchanged, l.seen == buffer, name)
    end
  end)

  K.each_mode("C6 C7: load_state_dict minds swap and not overwrite", function(mode)
    local l = K.linear { grad = false }
    local ids = K.ids(l.weight)
    l:load_state_dict(K.linear { grad = false }:state_dict())
    assert.equal(ids[1], tm.id(l.weight))
    assert.equal(not mode.swap, ids[2] == tm.impl_id(l.weight))
  end)

  it("C9: with both unset, identity is lost all the same where contents cannot take each other's place", function()
    local l = K.linear()
    local w = l.weight
    l:to "meta"
    assert.not_equal(w, l.weight)
    assert.equal("cpu", w.device)
  end)

  it("C10 T98: a flag that fn flips takes effect at the commit, for the whole call (section 2.1, V2)", function()
    local m = nn.Sequential(nn.Linear(2, 2))
    m.w = nn.Parameter(tm.ones(2))
    local w, child = K.ids(m.w), K.ids(m[1].weight)
    m:_apply(function(t)
      future.set_swap_module_params_on_conversion(true)
      return t:clone()
    end)
    future.set_swap_module_params_on_conversion(false)
    assert.equal(w[1], tm.id(m.w))
    assert.not_equal(w[2], tm.impl_id(m.w))
    assert.not_equal(child[2], tm.impl_id(m[1].weight))
  end)

  it("C10 T98: with atomic = false it takes effect at the next module, whose children are done then", function()
    local m = nn.Sequential(nn.Linear(2, 2))
    m.w = nn.Parameter(tm.ones(2))
    local w, weight, bias = K.ids(m.w), K.ids(m[1].weight), K.ids(m[1].bias)
    m:_apply(function(t)
      future.set_swap_module_params_on_conversion(true)
      return t:clone()
    end, true, { atomic = false })
    future.set_swap_module_params_on_conversion(false)
    assert.same(weight, K.ids(m[1].weight))
    assert.same(bias, K.ids(m[1].bias))
    assert.equal(w[1], tm.id(m.w))
    assert.not_equal(w[2], tm.impl_id(m.w))
  end)

  it("C10: with atomic = false overwrite is read for every parameter and every gradient", function()
    local l = K.linear()
    local w, g, b = l.weight, l.weight.grad, l.bias
    local calls = 0
    l:_apply(function(t)
      calls = calls + 1
      future.set_overwrite_module_params_on_conversion(calls == 2) -- the gradient of weight
      return t:clone()
    end, true, { atomic = false })
    assert.equal(4, calls)
    future.set_overwrite_module_params_on_conversion(false)
    assert.equal(w, l.weight)
    assert.not_equal(g, l.weight.grad)
    assert.equal(b, l.bias)
  end)

  it("C11 C12: with sets flags, gives all results back, and restores both", function()
    local results = { future.with({ swap = true }, function(...)
      assert.is_true(future.get_swap_module_params_on_conversion())
      assert.is_false(future.get_overwrite_module_params_on_conversion())
      future.set_overwrite_module_params_on_conversion(true)
      return select("#", ...), nil, ...
    end, "a", nil) }
    assert.equal(2, results[1])
    assert.equal("a", results[3])
    assert.same(K.OFF, future.snapshot())
  end)

  it("C12 T4: nested scopes restore in reverse order, also after an error, which passes unchanged", function()
    local e, inner = {}, nil
    local ok, caught = pcall(future.with, { swap = true }, function()
      pcall(future.with, { overwrite = true, swap = false }, function()
        inner = future.snapshot()
        error(e)
      end)
      assert.same({ overwrite = false, swap = true }, future.snapshot())
      future.with({ overwrite = true }, function()
        assert.same({ overwrite = true, swap = true }, future.snapshot())
        error(e)
      end)
    end)
    assert.is_false(ok)
    assert.equal(e, caught)
    assert.same({ overwrite = true, swap = false }, inner)
    assert.same(K.OFF, future.snapshot())
  end)

  it("C12: with checks its arguments before it sets anything", function()
    H.raises(function() future.with({ swap = 1 }, print) end, "TypeError", "with: swap: expected a boolean, got number")
    H.raises(function() future.with({ swap = true, sawp = true }, print) end, "TypeError", "unknown option sawp")
    H.raises(function() future.with(nil, print) end, "TypeError", "with: expected flags")
    H.raises(function() future.with({ swap = true }) end, "TypeError", "with: expected flags and a function")
    assert.same(K.OFF, future.snapshot())
  end)

  it("C12: snapshot and restore serve fixtures", function()
    future.set_swap_module_params_on_conversion(true)
    local s = future.snapshot()
    assert.same({ overwrite = false, swap = true }, s)
    future.restore(K.OFF)
    assert.same(K.OFF, future.snapshot())
    future.restore(s)
    assert.is_true(future.get_swap_module_params_on_conversion())
    future.restore { swap = false }
    H.raises(function() future.restore { swap = "off" } end, "TypeError", "restore: swap")
  end)

  it("C12: a function that yields out of with is an error, and the flags are set back", function()
    local co = coroutine.wrap(function()
      local e = H.raises(function() future.with({ swap = true }, coroutine.yield) end, "AssertionError", "with: fn yielded")
      assert.same(K.OFF, future.snapshot())
      assert.equal(3, (future.with({ swap = true }, function(x, y) return x + y end, 1, 2)))
      H.raises(function() future.with({ swap = true }, function() B.fail("ValueError", "mine") end) end, "ValueError", "mine")
      return e
    end)
    assert.equal("AssertionError", co().kind)
  end)

  K.each_mode("C13 T118: an error in a conversion changes no flag", function()
    local flags = future.snapshot()
    local l = K.linear()
    H.raises(function() l:_apply(function() B.fail("ValueError", "no") end) end, "ValueError", "no")
    H.raises(function() l:to "int64" end, "TypeError")
    tm.pin(l.weight)
    pcall(l.double, l)
    tm.unpin(l.weight)
    assert.same(flags, future.snapshot())
  end)
end)

describe("helpers of these specs", function()
  it("C180 C181: with_flags sets what it is told, and sets both back whatever happens", function()
    for _, v in ipairs { true, false } do
      assert.equal(v, K.with_flags { swap = v }(future.get_swap_module_params_on_conversion))
    end
    K.with_flags { swap = nil }(function()
      assert.is_false(future.get_swap_module_params_on_conversion())
      future.set_swap_module_params_on_conversion(true) -- a flag that is nil may be set freely
    end)
    assert.same(K.OFF, future.snapshot())
    local e = {}
    local _, caught = pcall(K.with_flags { swap = true, overwrite = true }, error, e)
    assert.equal(e, caught)
    assert.same(K.OFF, future.snapshot())
  end)

  local modes = {}
  K.each_mode("C181: each_mode makes a test for each state", function(mode)
    modes[#modes + 1] = mode.name
    assert.same({ overwrite = mode.name == "overwrite" or mode.name == "both", swap = mode.name == "swap" or mode.name == "both" },
      future.snapshot())
    assert.equal(mode.name ~= "overwrite", mode.kept)
  end)

  it("C182 T84: the check after each test reports a flag that was left set, and sets it back", function()
    local leaks = { swap = { swap = true }, overwrite = { overwrite = true }, ["both flags"] = { swap = true, overwrite = true } }
    for name, flags in pairs(leaks) do
      future.restore(flags)
      local ok, e = pcall(K.check_flags)
      assert.is_false(ok)
      assert.equal(("the test left %s set"):format(name), e)
      assert.same(K.OFF, future.snapshot())
    end
    K.check_flags()
  end)

  for _, device in ipairs { "cpu", "meta" } do
    K.each_mode("C183: ids over gradients, passes, dtypes, on " .. device, function(mode)
      for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
        for _, case in ipairs { "fresh", "grad", "pass" } do
          local l = nn.Linear(2, 3, { device = device })
          if case == "pass" then l(tm.ones({ 1, 2 }, { device = device })):sum():backward()
          elseif case == "grad" then l.weight.grad = tm.zeros({ 3, 2 }, { device = device }) end
          local w, g = l.weight, l.weight.grad
          local ids, gids = K.ids(w), g and K.ids(g)
          l:to(dtype)
          local what = table.concat({ dtype, case, mode.name }, " ")
          assert.equal(dtype, l.weight.dtype, what)
          assert.equal(mode.kept, tm.id(l.weight) == ids[1], what)
          assert.equal(mode.name == "default", tm.impl_id(l.weight) == ids[2], what)
          if g then
            local same = dtype == "float32"
            assert.equal(dtype, l.weight.grad.dtype, what)
            assert.equal(mode.kept or same, l.weight.grad == g, what)
            assert.equal(mode.name == "default" or same, tm.impl_id(l.weight.grad) == gids[2], what)
          else
            assert.is_nil(l.weight.grad, what)
          end
        end
      end
    end)
  end

  K.each_mode("C183: from meta to memory without swap, handle and content are others", function(mode)
    local l = nn.Linear(2, 3, { device = "meta" })
    local ids = K.ids(l.weight)
    l:to_empty { device = "cpu" }
    assert.equal(mode.swap, tm.id(l.weight) == ids[1])
    assert.not_equal(ids[2], tm.impl_id(l.weight))
  end)
end)
