---Hooks that run when a parameter, buffer or module is registered (docs/contracts/module.md, chapter 5).

local H = require "spec.helper"
local tm = require "tmod"
local nn = tm.nn
local raises = H.raises

local function P(...) return nn.Parameter(tm.ones(...)) end
local function L() return nn.Linear(2, 2) end

---Runs fn with these hooks, by kind, and removes them whatever happens.
local function with(hooks, fn)
  local handles = {}
  for kind, hook in pairs(hooks) do handles[#handles + 1] = nn["register_" .. kind .. "_registration_hook"](hook) end
  local ok, e = pcall(fn)
  for _, h in ipairs(handles) do h:remove() end
  if not ok then error(e, 0) end
end

---A hook of each kind that notes "kind name value".
local function log_all(log)
  local hooks = {}
  for _, kind in ipairs { "parameter", "buffer", "module" } do
    hooks[kind] = function(m, name, value)
      log[#log + 1] = ("%s %s %s"):format(kind, name, value == nil and "nil" or "set")
      assert.is_true(nn.Module._is_module(m))
    end
  end
  return hooks
end

describe("registration hooks", function()
  it("M55 M59 case 27: a result replaces the value for the next hook and the slot", function()
    local m, p, p2 = nn.Module(), P(1), P(2)
    local seen = {}
    local a = nn.register_parameter_registration_hook(function(module, name, value)
      assert.equal(m, module)
      assert.is_nil(module.w) -- not stored yet
      seen[#seen + 1] = { name, value }
      return p2
    end)
    local b = nn.register_parameter_registration_hook(function(_, name, value) seen[#seen + 1] = { name, value } end)
    m.w = p
    a:remove()
    b:remove()
    assert.same({ "w", p }, seen[1])
    assert.equal(p2, seen[2][2])
    assert.equal(p2, m.w)
    m.w = p
    assert.equal(p, m.w)
    assert.equal(2, #seen)
  end)

  it("M55: of buffers and modules replace as well", function()
    local m, t, l = nn.Module(), tm.zeros(3), L()
    with({ buffer = function() return t end, module = function() return l end }, function()
      m:register_buffer("b", tm.ones(1), false)
      m.child = nn.ReLU()
    end)
    assert.equal(t, m.b)
    assert.equal(l, m.child)
    assert.is_nil(m:state_dict().b) -- persistence is the caller's
  end)

  it("M56 case 28: a slot without a value calls the hooks of buffers and modules, not of parameters", function()
    local log = {}
    local m = nn.Module()
    with(log_all(log), function()
      m:register_parameter "p"
      m:register_buffer "b"
      m:add_module "c"
      m.p, m.b, m.c = nil, nil, nil
    end)
    table.sort(log)
    assert.same({ "buffer b nil", "buffer b nil", "module c nil", "module c nil" }, log)
  end)

  it("M57: run for assignment and for all that is built on registration", function()
    local log = {}
    with(log_all(log), function()
      local m = nn.Module()
      m.w = P(1)
      m.w = P(1)
      m.x = nn.Buffer(tm.ones(1))
      m.x = tm.ones(1)
      m.c = nn.ReLU()
      m.plain, m.t = 5, tm.ones(1)
      assert.same({ "parameter w set", "parameter w set", "buffer x set", "buffer x set", "module c set" }, log)
      log[1], log[2], log[3], log[4], log[5] = nil, nil, nil, nil, nil
      local seq = nn.Sequential(nn.ReLU(), nn.Tanh())
      seq:append(nn.ReLU())
      seq[1] = nn.Tanh()
      assert.same({ "module 0 set", "module 1 set", "module 2 set", "module 0 set" }, log)
    end)
  end)

  it("M57: run for loading with assign, not for conversions", function()
    local l, log = L(), {}
    local sd = L():state_dict()
    with(log_all(log), function()
      l:to "float64"
      l:double()
      assert.same({}, log)
      l:load_state_dict(sd, { assign = true })
      assert.same({ "parameter weight set", "parameter bias set" }, log)
    end)
  end)

  it("M58: come after the checks", function()
    local log = {}
    local m, l = nn.Module(), L()
    m.w = P(1)
    with(log_all(log), function()
      raises(function() m:register_parameter("a.b", P(1)) end, "KeyError")
      raises(function() m:register_buffer("forward", tm.ones(1)) end, "KeyError")
      raises(function() m:add_module("x", 3) end, "TypeError")
      raises(function() m.w = l end, "TypeError")
      raises(function() m.w = 3 end, "TypeError")
    end)
    assert.same({}, log)
  end)

  it("M58: that throw leave the module unchanged", function()
    local m, old, l = nn.Module(), P(1), L()
    m.w = old
    m.b = nn.Buffer(tm.ones(1))
    m.plain = 7
    local function throw() error({ "no" }, 0) end
    with({ parameter = throw, buffer = throw, module = throw }, function()
      for _, assign in ipairs {
        function() m.w = P(2) end,
        function() m.b = P(2) end, -- would move to another kind
        function() m.b = l end,
        function() m.plain = P(2) end,
        function() m:register_buffer("new", tm.ones(1)) end,
      } do
        local ok, e = pcall(assign)
        assert.is_false(ok)
        assert.same({ "no" }, e)
      end
    end)
    assert.equal(old, m.w)
    assert.is_true(nn.is_buffer(m.b))
    assert.equal(7, m.plain)
    assert.is_false(m:hasattr "new")
  end)

  it("M59: the kind of a replacement is checked", function()
    local m, l = nn.Module(), L()
    local wrong = { parameter = function() return tm.ones(1) end, buffer = function() return 3 end, module = function() return false end }
    with(wrong, function()
      raises(function() m.w = P(1) end, "TypeError",
        'parameter registration hook: returned a tensor for "w" of Module, expected an nn.Parameter')
      raises(function() m:register_buffer("b", tm.ones(1)) end, "TypeError", "returned a number.*expected a tensor")
      raises(function() m.c = l end, "TypeError", "expected an nn.Module")
    end)
    assert.is_false(m:hasattr "w" or m:hasattr "b" or m:hasattr "c")
    raises(function() nn.register_module_registration_hook(3) end, "TypeError", "expected a function, got number")
    raises(function() nn.register_module_registration_hook(print, { prepend = true }) end, "TypeError", "unknown option prepend")
  end)

  it("M122 M123: may remove themselves and add others while they run", function()
    local m, log = nn.Module(), {}
    local first, second, added
    first = nn.register_module_registration_hook(function()
      log[#log + 1] = "first"
      first:remove()
      second:remove()
      added = nn.register_module_registration_hook(function() log[#log + 1] = "added" end)
    end)
    second = nn.register_module_registration_hook(function() log[#log + 1] = "second" end)
    m.a = nn.ReLU()
    assert.same({ "first", "second" }, log)
    m.b = nn.ReLU()
    assert.same({ "first", "second", "added" }, log)
    added:remove()
  end)
end)
