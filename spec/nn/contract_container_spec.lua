---Chapter 16 of docs/contracts/module.md: Sequential, ModuleList, ModuleDict, ParameterList, ParameterDict.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Sequential, ModuleList, ModuleDict, ParameterList, ParameterDict =
  nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict

local function L() return nn.Linear(2, 2) end
local function P(n) return nn.Parameter(tm.ones(n or 1)) end

local function words(list) return table.concat(list, " ") end
local function names(m) return words(m._modules:keys()) end
local function keys(m) return words(m:state_dict():keys()) end

---A module that multiplies by a number, and one that says what it was given.
local Scale = nn.Module:extend "Scale"
function Scale:init(by) self.by = by end
function Scale:forward(x) return x * self.by end

---fn must fail so and leave the container as it was.
local function refused(c, fn, kind, pattern)
  local before, list = names(c), OrderedDict.values(c._modules)
  H.raises(fn, kind, pattern)
  assert.equal(before, names(c))
  assert.same(#list, c._modules:len())
  for i, m in ipairs(OrderedDict.values(c._modules)) do assert.is_true(rawequal(list[i], m)) end
end

describe("nn.Sequential", function()
  it("M200 M219: takes modules, a list, named pairs or an OrderedDict", function()
    local a, b = L(), nn.ReLU()
    for _, s in ipairs { Sequential(a, b), Sequential { a, b } } do
      assert.equal("0 1", names(s))
      assert.is_true(rawequal(a, s[1]) and rawequal(b, s[2]))
    end
    assert.equal("conv act", names(Sequential { { "conv", a }, { "act", b } }))
    local d = OrderedDict.new()
    d.z = a
    d.a = b
    assert.equal("z a", names(Sequential(d)))
    assert.equal("", names(Sequential()))
    assert.equal("", names(Sequential {}))
    assert.equal("conv.weight conv.bias", keys(Sequential { { "conv", a }, { "act", b } }))
  end)

  it("M200: chains its modules, and empty returns its input", function()
    local x = tm.tensor { 1, 2 }
    assert.near_tensor({ 6, 12 }, Sequential(Scale(2), Scale(3))(x))
    assert.is_true(rawequal(x, Sequential()(x)))
    local many = {}
    for i = 1, 100 do many[i] = Scale(i % 2 == 0 and 2 or 0.5) end
    assert.near_tensor(x, Sequential(many)(x))
  end)

  it("M200 M219: refuses what is no module, and holes", function()
    H.raises(function() Sequential(L(), 3) end, "TypeError", "not a Module but a number")
    H.raises(function() Sequential(L(), nil, L()) end, "TypeError", "module 2 of 3 is nil")
    H.raises(function() Sequential { L(), nil, L() } end, "TypeError", "module 2 of 3 is nil")
    H.raises(function() Sequential { { "a.b", L() } } end, "KeyError", "a.b")
  end)

  it("M200: takes None entries, which fail when called", function()
    local s = Sequential(Scale(2), nn.None)
    assert.equal(2, s:len())
    assert.is_nil(s[2])
    H.raises(function() s(tm.ones(1)) end, "TypeError", "without a module")
  end)

  it("M201 M217, case 110: has positions from 1 and from the end, and slots by name", function()
    local s = Sequential(L(), L(), L())
    assert.is_true(rawequal(s[1], s:get_submodule "0"))
    assert.is_true(rawequal(s[1], s["0"]))
    assert.is_true(rawequal(s[-1], s[3]))
    assert.is_true(rawequal(s[-3], s[1]))
    for _, i in ipairs { 0, 4, -4 } do H.raises(function() return s[i] end, "IndexError", "it has 3") end
    H.raises(function() return s[0] end, "IndexError", "nn.Sequential: no module at 0: it has 3, counted from 1")
    H.raises(function() return s[1.5] end, "TypeError", "whole number")
    H.raises(function() return s:remove "0" end, "TypeError", "whole number, got string")
    H.raises(function() return s[true] end, "TypeError", "boolean")
  end)

  it("M201: a slice keeps class, names and modules", function()
    local s = Sequential(L(), L(), L())
    local t = s:slice(2)
    assert.equal("1 2", names(t))
    assert.is_true(rawequal(s[2], t[1]))
    assert.equal("1.weight 1.bias 2.weight 2.bias", keys(t))
    assert.equal("0 1", names(s:slice(1, -2)))
    assert.equal("", names(s:slice(3, 2)))
    assert.equal("0 1 2", names(s:slice(-99, 99)))
    local Own = Sequential:extend "Own"
    local u = Own(L(), L()):slice(1, 1)
    assert.equal("Own", u.__name)
    assert.is_true(u:isinstance(Own) and u:isinstance(Sequential))
  end)

  it("M202 M217: assigning by position keeps the name", function()
    local s, m = Sequential { { "a", L() }, { "b", L() } }, L()
    s[2] = m
    assert.equal("a b", names(s))
    assert.is_true(rawequal(m, s.b))
    s[-2] = m
    assert.is_true(rawequal(m, s.a))
    refused(s, function() s[1] = nil end, "TypeError", "use remove%(1%)")
    refused(s, function() s[1] = 3 end, "TypeError", "not a Module")
    refused(s, function() s[3] = m end, "IndexError", "no module at 3")
  end)

  it("M203, case 98: removing numbers all names again", function()
    local a, b = L(), L()
    local s = Sequential { { "a", a }, { "b", b } }
    assert.is_true(rawequal(s, s:remove(1)))
    assert.equal("0", names(s))
    assert.is_true(rawequal(b, s[1]))
    local t = Sequential(L(), a, b, L())
    t:remove(2, 3)
    assert.equal("0 1", names(t))
    assert.near_tensor({ 4 }, Sequential(Scale(2), Scale(9), Scale(2)):remove(2)(tm.ones(1)))
  end)

  it("M203 M218: pop takes out and returns, by default the last", function()
    local a, b, c = L(), L(), L()
    local s = Sequential(a, b, c)
    assert.is_true(rawequal(c, s:pop()))
    assert.is_true(rawequal(a, s:pop(1)))
    assert.equal("0", names(s))
    assert.is_true(rawequal(b, s:pop(-1)))
    H.raises(function() s:pop() end, "IndexError", "has 0")
    H.raises(function() s:remove() end, "IndexError", "has 0")
  end)

  it("M204 M222, case 99: append names by length, or by the next free number", function()
    local s = Sequential(L(), L(), L()):slice(2, 3)
    assert.equal("1 2", names(s))
    assert.is_true(rawequal(s, s:append(L())))
    assert.equal("1 2 3", names(s))
    assert.equal("0 1", names(Sequential(L()):append(L())))
    refused(s, function() s:append(3) end, "TypeError", "not a Module but a number")
    refused(s, function() s:append(nil) end, "TypeError", "not a Module but a nil")
  end)

  it("M205 M205a M218: insert puts before a position", function()
    local a, b, c = L(), L(), L()
    local s = Sequential(a)
    assert.is_true(rawequal(s, s:insert(1, b)))
    s:insert(3, c)
    assert.equal("0 1 2", names(s))
    assert.is_true(rawequal(b, s[1]) and rawequal(a, s[2]) and rawequal(c, s[3]))
    local d, e = L(), L()
    s:insert(-1, d):insert(-4, e)
    assert.is_true(rawequal(e, s[1]) and rawequal(d, s[4]) and rawequal(c, s[5]))
    Sequential():insert(1, a)
    for _, i in ipairs { 0, 7, -6 } do refused(s, function() s:insert(i, L()) end, "IndexError", "it has 5 modules") end
    refused(s, function() s:insert(1, 3) end, "TypeError", "not a Module")
    local named = Sequential { { "a", L() } }
    refused(named, function() named:insert(1, L()) end, "KeyError", 'is named "a"')
  end)

  it("M206, M218: extend and +", function()
    local a, b, c = L(), L(), L()
    local s = Sequential(a)
    assert.is_true(rawequal(s, s:extend { b, c }))
    assert.equal("0 1 2", names(s))
    s:extend(Sequential { { "x", a } }):extend(ModuleList { b })
    assert.equal("0 1 2 3 4", names(s))
    s:extend(Sequential(a, b):children())
    assert.equal(7, s:len())
    local x, y = Sequential { { "p", a } }, Sequential { { "q", b } }
    local z = x + y
    assert.equal("0 1", names(z))
    assert.is_true(rawequal(a, z[1]) and rawequal(b, z[2]))
    assert.equal("p", names(x))
    H.raises(function() return x + ModuleList { a } end, "ValueError", "only a Sequential can be added")
    H.raises(function() return 3 + x end, "ValueError", "got number")
  end)

  it("M206: extending by itself doubles", function()
    local s = Sequential(L(), nn.ReLU())
    s:extend(s)
    assert.equal("0 1 2 3", names(s))
    assert.is_true(rawequal(s[1], s[3]))
  end)

  it("M222: a mutator that fails changes nothing", function()
    local s = Sequential(L())
    refused(s, function() s:extend { L(), L(), 3 } end, "TypeError", "element 4 is not a Module")
    refused(s, function() s:extend { L(), nil, L() } end, "TypeError", "element 2 of 3 is nil")
    refused(s, function() s:extend(3) end, "TypeError", "expected a list, a container or an iterator, got number")
    refused(s, function() s:extend { a = L() } end, "TypeError", "expected a list")
    -- a hook that throws half-way
    local count = 0
    local handle = nn.register_module_registration_hook(function()
      count = count + 1
      if count == 2 then error "no" end
    end)
    local ok = pcall(s.extend, s, { L(), L(), L() })
    handle:remove()
    assert.is_false(ok)
    assert.equal("0", names(s))
    assert.near_tensor(s[1](tm.ones(2)):detach(), s(tm.ones(2)):detach())
    -- a number that is an attribute is not taken as a name
    s["1"] = 5
    s:append(L())
    assert.equal("0 2", names(s))
  end)

  it("M207, case 100: * repeats references", function()
    local s = Sequential(L(), nn.ReLU())
    local t = s * 2
    assert.equal("0 1 2 3", names(t))
    assert.is_true(rawequal(s[1], t[3]))
    local n = {}
    for name in t:named_parameters() do n[#n + 1] = name end
    assert.equal("0.weight 0.bias", words(n))
    assert.equal("0.weight 0.bias 2.weight 2.bias", keys(t))
    assert.equal(6, (3 * s):len())
    H.raises(function() return s * 0 end, "ValueError", "1 time or more, not 0")
    H.raises(function() return s * -1 end, "ValueError")
    H.raises(function() return s * 1.5 end, "TypeError", "whole number, got 1.5")
    H.raises(function() return s * "2" end, "TypeError")
  end)

  it("M220: hands all results on", function()
    local Two = nn.Module:extend "Two"
    function Two:forward(a, b) return a + 1, b and b * 2 or nil end
    assert.same({ 3, 8 }, { Sequential(Two(), Two())(1, 2) })
    assert.same({ 2 }, { Sequential(Two())(1) })
    assert.equal(2, select("#", Sequential(Two())(1)))
  end)

  it("M57: insert and renumbering call no registration hooks; construction, append, extend and assignment do", function()
    local seen = {}
    local handle = nn.register_module_registration_hook(function(_, name) seen[#seen + 1] = name end)
    local ok, e = pcall(function()
      local s = Sequential(L(), L())
      s:append(L())
      s[1] = L()
      s:extend { L() }
      s:insert(1, L())
      s:remove(1)
      s:pop()
    end)
    handle:remove()
    assert.is_true(ok, tostring(e))
    assert.equal("0 1 2 0 3", words(seen))
  end)

  it("still makes classes by extend", function()
    local Net = Sequential:extend "Net"
    function Net:init() Sequential.init(self, L(), nn.ReLU()) end
    assert.equal("0 1", names(Net()))
    assert.near_tensor({ 2, 3 }, { Net():len(), Net():append(L()):len() })
  end)
end)

describe("nn.ModuleList", function()
  it("M208 M219: is made of a list, a container or an iterator", function()
    local a, b = L(), nn.ReLU()
    assert.equal("0 1", names(ModuleList { a, b }))
    assert.equal("0 1", names(ModuleList(Sequential { { "x", a }, { "y", b } })))
    assert.equal("0 1", names(ModuleList(Sequential(a, b):children())))
    assert.equal(0, ModuleList():len())
    H.raises(function() ModuleList { a, 3 } end, "TypeError", "element 2 is not a Module but a number")
    H.raises(function() ModuleList { a, nil, b } end, "TypeError", "element 2 of 3 is nil")
    H.raises(function() ModuleList(3) end, "TypeError", "got number")
  end)

  it("M208: indexes, slices, assigns, removes, appends, extends, pops and adds", function()
    local a, b, c, d = L(), L(), L(), L()
    local l = ModuleList { a, b, c }
    assert.is_true(rawequal(a, l[1]) and rawequal(c, l[-1]))
    local s = l:slice(2, 3)
    assert.equal("0 1", names(s))
    assert.is_true(rawequal(b, s[1]) and s:isinstance(ModuleList))
    l[1] = d
    assert.is_true(rawequal(d, l["0"]))
    l:remove(2)
    assert.equal("0 1", names(l))
    assert.is_true(rawequal(c, l[2]))
    l:append(a):extend { b }
    assert.equal("0 1 2 3", names(l))
    assert.is_true(rawequal(b, l:pop()))
    local sum = l + { b, b }
    assert.equal(5, sum:len())
    assert.equal(3, l:len())
    assert.is_true(sum:isinstance(ModuleList))
    assert.equal(6, (l + l):len())
    H.raises(function() return { a } + l end, "TypeError", "put it first")
    H.raises(function() return l + 3 end, "TypeError")
    refused(l, function() l:extend(5) end, "TypeError", "got number")
    local i = 0
    for k, m in l:ipairs() do
      i = i + 1
      assert.equal(i, k)
      assert.is_true(rawequal(l[k], m))
    end
    assert.equal(3, i)
  end)

  it("M208: cannot be called", function()
    H.raises(function() ModuleList { L() }(tm.ones(2)) end, "NotImplementedError", "nn.ModuleList has no forward")
  end)

  it("M208: its parameters are those of the module that holds it", function()
    local m = nn.Module()
    m.layers = ModuleList { L(), L() }
    assert.equal("layers.0.weight layers.0.bias layers.1.weight layers.1.bias", keys(m))
  end)

  it("M209, case 101: insert checks position and type", function()
    local l = ModuleList { L(), L() }
    refused(l, function() l:insert(-9, L()) end, "IndexError", "cannot insert at %-9: it has 2")
    refused(l, function() l:insert(99, L()) end, "IndexError", "cannot insert at 99")
    refused(l, function() l:insert(1, 3) end, "TypeError", "not a Module but a number")
    local m = L()
    l:insert(1, m):insert(4, m)
    assert.equal("0 1 2 3", names(l))
    assert.is_true(rawequal(m, l[1]) and rawequal(m, l[4]))
  end)
end)

describe("nn.ModuleDict", function()
  it("M210: sets, gets, deletes and lists in order", function()
    local a, b, c = L(), L(), L()
    local d = ModuleDict { { "b", b }, { "a", a } }
    assert.equal("b a", words(d:keys()))
    assert.equal(2, d:len())
    assert.is_true(rawequal(b, d.b) and rawequal(a, d:get "a"))
    d.b = c
    d.z = L()
    assert.equal("b a z", words(d:keys()))
    assert.is_true(rawequal(c, d:values()[1]))
    assert.is_true(d:contains "z")
    assert.is_false(d:contains "q")
    local seen = {}
    for key, m in d:pairs() do
      seen[#seen + 1] = key
      assert.is_true(rawequal(d[key], m))
    end
    assert.equal("b a z", words(seen))
    assert.is_true(rawequal(d, d:remove "b"))
    assert.is_true(rawequal(a, d:pop "a"))
    assert.equal("z", words(d:keys()))
    assert.equal("z.weight z.bias", keys(d))
    d:clear()
    assert.equal(0, d:len())
    H.raises(function() d(tm.ones(2)) end, "NotImplementedError", "nn.ModuleDict has no forward")
  end)

  it("M210 M221, case 102: refuses names and misses keys", function()
    local d = ModuleDict { a = L() }
    refused(d, function() d.type = L() end, "KeyError", '"type"')
    refused(d, function() d["a.b"] = L() end, "KeyError", "a.b")
    refused(d, function() d[""] = L() end, "KeyError", "empty")
    refused(d, function() d:pop "zz" end, "KeyError", '"zz"')
    refused(d, function() d:remove "zz" end, "KeyError")
    refused(d, function() d:get "zz" end, "KeyError", 'nn.ModuleDict has no key "zz"')
    refused(d, function() d:get(1) end, "TypeError", "must be a string")
    refused(d, function() d:set("b", 3) end, "TypeError", "not a Module")
    refused(d, function() d:set(1, L()) end, "TypeError", "must be a string")
    assert.is_nil(d.zz)
    assert.equal(5, d:get("zz", 5))
    assert.is_nil(d:get("zz", nil))
  end)

  it("M210a: names of the class are no keys", function()
    local d = ModuleDict()
    d.training = false
    assert.is_false(d.training)
    assert.equal(0, d:len())
    for _, name in ipairs { "training", "forward", "keys", "update" } do
      refused(d, function() d[name] = L() end, "KeyError", name)
      refused(d, function() d:set(name, L()) end, "KeyError", name)
    end
  end)

  it("M211 M215 M219, case 103: takes pairs in their order and maps sorted", function()
    local a, b = L(), L()
    assert.equal("b a", words(ModuleDict({ { "b", b }, { "a", a } }):keys()))
    assert.equal("a b c d e f g h", words(ModuleDict({ h = b, e = a, a = a, g = b, c = a, b = b, f = a, d = b }):keys()))
    local o = OrderedDict.new()
    o.z = a
    o.y = b
    local d = ModuleDict(o)
    assert.equal("z y", words(d:keys()))
    assert.is_true(rawequal(d, d:update { { "x", a }, { "z", b } }))
    assert.equal("z y x", words(d:keys()))
    assert.is_true(rawequal(b, d.z))
    assert.equal("z y x", words(ModuleDict(d):keys()))
  end)

  it("M211 M222: update names what is wrong and then changes nothing", function()
    local d = ModuleDict { a = L() }
    refused(d, function() d:update(3) end, "TypeError", "got number")
    refused(d, function() d:update { { "b", L() }, 3 } end, "TypeError", "element 2 must be a pair")
    refused(d, function() d:update { { "b", L() }, { "c", L(), L() } } end, "ValueError", "element 2 has 3 values")
    refused(d, function() d:update { { "b", L() }, { "type", L() } } end, "KeyError", "type")
    refused(d, function() d:update { { "a", L() }, { "c", 5 } } end, "TypeError", "not a Module")
    refused(d, function() d:update { [true] = L() } end, "TypeError", "keys must be strings")
  end)

  it("keeps an empty slot", function()
    local d = ModuleDict { { "a", nn.None }, { "b", L() } }
    assert.is_true(d:contains "a")
    assert.is_nil(d.a)
    assert.is_nil(d:get "a")
    assert.equal(2, d:len())
  end)
end)

describe("nn.ParameterList", function()
  it("M212, case 104: takes values of any type, tensors as Parameters", function()
    local l = ParameterList { tm.ones(2), "foo", L() }
    assert.equal(3, l:len())
    assert.equal("0 2.weight 2.bias", keys(l))
    assert.is_true(nn.is_parameter(l[1]))
    assert.equal("foo", l[2])
    assert.is_true(rawequal(l[3], l["2"]))
    H.raises(function() l[1] = "s" end, "TypeError", '"0"')
    l[1] = tm.zeros(3)
    assert.is_true(nn.is_parameter(l[1]))
    l[2] = P()
    assert.equal("0 1 2.weight 2.bias", keys(l))
    local p = P()
    assert.is_true(rawequal(p, ParameterList({ p })[1]))
  end)

  it("M212: appends, extends, slices and iterates, and has no insert, pop or remove", function()
    local l = ParameterList()
    assert.is_true(rawequal(l, l:append(tm.ones(1)):append(5)))
    l:extend { tm.ones(2) }:extend(ParameterList { tm.ones(3) }):extend(nn.Linear(1, 1):parameters())
    assert.equal(6, l:len())
    l:extend(l)
    assert.equal(12, l:len())
    assert.is_true(rawequal(l[1], l[7]))
    local s = l:slice(2, 3)
    assert.equal(2, s:len())
    assert.equal(5, s[1])
    assert.equal("1", keys(s))
    local n = 0
    for i, v in l:ipairs() do
      n = n + 1
      assert.is_true(rawequal(l[i], v))
    end
    assert.equal(12, n)
    assert.is_nil(l.insert)
    assert.is_nil(l.pop)
    assert.is_nil(l.remove)
  end)

  it("M212 M217: fails when called, and at other positions", function()
    local l = ParameterList { tm.ones(1) }
    H.raises(function() l() end, "RuntimeError", "nn.ParameterList cannot be called")
    H.raises(function() return l[0] end, "IndexError", "no element at 0: it has 1")
    H.raises(function() return l[2] end, "IndexError")
    H.raises(function() l[2] = tm.ones(1) end, "IndexError")
    H.raises(function() l[1] = nil end, "TypeError", "does not remove")
    assert.is_true(rawequal(l[1], l[-1]))
  end)

  it("M213 M222: a refused value leaves it as it was", function()
    local l = ParameterList { tm.ones(1) }
    H.raises(function() l:append(tm.ones(1):to "int64") end, "RuntimeError")
    H.raises(function() l:append(nil) end, "TypeError", "element 2 is nil")
    H.raises(function() l:extend { tm.ones(1), "x", tm.ones(1):to "int64" } end, "RuntimeError")
    H.raises(function() l:extend(7) end, "TypeError", "got number")
    H.raises(function() l:extend(tm.ones(2)) end, "TypeError")
    assert.equal(1, l:len())
    assert.equal("0", keys(l))
    assert.is_false(l:hasattr "1")
    assert.equal(2, l:append(tm.ones(1)):len())
  end)

  it("still makes classes by extend", function()
    local Own = ParameterList:extend "Own"
    assert.equal(1, Own({ tm.ones(1) }):len())
  end)
end)

describe("nn.ParameterDict", function()
  it("M214 M221: keeps values of any type in order, tensors as Parameters", function()
    local d = ParameterDict { { "w", tm.ones(2) }, { "note", "x" }, { "m", L() } }
    assert.equal("w note m", words(d:keys()))
    assert.equal("w m.weight m.bias", keys(d))
    assert.is_true(nn.is_parameter(d.w))
    assert.equal("x", d.note)
    d.b = tm.zeros(1)
    assert.is_true(nn.is_parameter(d.b))
    local p = P()
    d["w"] = p
    assert.equal("w note m b", words(d:keys()))
    assert.is_true(rawequal(p, d:get "w"))
    d:set("count", 3)
    d.count = 4
    assert.equal(4, d:get "count")
    assert.equal(5, d:len())
    assert.is_true(d:contains "count")
    local seen = {}
    for key, v in d:pairs() do
      seen[#seen + 1] = key
      assert.is_true(rawequal(d[key], v))
    end
    assert.equal("w note m b count", words(seen))
    assert.is_true(rawequal(p, d:values()[1]))
  end)

  it("M214: get, setdefault, pop, popitem, clear, copy and fromkeys", function()
    local d = ParameterDict { a = tm.ones(1) }
    assert.equal(7, d:get("b", 7))
    assert.is_nil(d:get "b")
    assert.equal(8, d:setdefault("b", 8))
    assert.equal(8, d:setdefault("b", 9))
    assert.is_nil(d:setdefault "none")
    assert.is_true(d:contains "none")
    assert.equal("a b none", words(d:keys()))
    local c = d:copy()
    assert.equal("a b none", words(c:keys()))
    assert.is_true(rawequal(d.a, c.a))
    assert.equal(8, d:pop "b")
    assert.is_false(d:contains "b")
    assert.is_false(d:hasattr "b")
    local key, v = d:popitem()
    assert.equal("none", key)
    assert.is_nil(v)
    assert.equal("a", (d:popitem()))
    H.raises(function() d:popitem() end, "KeyError", "empty")
    assert.equal(0, c:clear():len())
    assert.equal("", keys(c))
    assert.equal("x y", words(ParameterDict():fromkeys({ "x", "y" }, 1):keys()))
    -- PyTorch's a | b
    local e, f = ParameterDict { x = tm.ones(1) }, ParameterDict { x = tm.zeros(1), y = tm.ones(1) }
    local u = e:copy():update(f)
    assert.equal("x y", words(u:keys()))
    assert.is_true(rawequal(f.x, u.x) and not rawequal(e.x, u.x))
  end)

  it("M214: absent keys and calls fail", function()
    local d = ParameterDict()
    H.raises(function() d:pop "zz" end, "AttributeError", "zz")
    H.raises(function() d:getattr "zz" end, "AttributeError", "zz")
    H.raises(function() d:set(1, P()) end, "TypeError", "must be a string, got number")
    H.raises(function() d() end, "RuntimeError", "nn.ParameterDict cannot be called")
    assert.is_nil(d.zz)
  end)

  it("M215, case 103: a map goes in sorted, what has an order keeps it", function()
    assert.equal("a b c d e f", words(ParameterDict({ f = P(), b = P(), a = P(), d = P(), c = P(), e = P() }):keys()))
    assert.equal("b a", words(ParameterDict({ { "b", P() }, { "a", P() } }):keys()))
    local o = OrderedDict.new()
    o.z = P()
    o.y = P()
    assert.equal("z y", words(ParameterDict(o):keys()))
    assert.equal("z y", words(ParameterDict(ParameterDict(o)):keys()))
  end)

  it("M216 M222: a refused key is no key, and a refused update changes nothing", function()
    local d = ParameterDict { a = tm.ones(1) }
    local a = d.a
    for _, key in ipairs { "type", "training", "keys", "a.b", "" } do
      H.raises(function() d:set(key, P()) end, "KeyError")
      H.raises(function() d[key] = P() end, "KeyError")
      H.raises(function() d:update { { "a", P() }, { "c", 1 }, { key, P() } } end, "KeyError")
    end
    H.raises(function() d:set("n", tm.ones(1):to "int64") end, "RuntimeError")
    assert.equal("a", words(d:keys()))
    assert.equal("a", keys(d))
    assert.is_true(rawequal(a, d.a))
    assert.is_false(d:hasattr "c")
    d.training = false
    assert.is_false(d.training)
    assert.equal(1, d:len())
  end)

  it("works in classes that inherit from it", function()
    local Own = ParameterDict:extend "Own"
    function Own:init()
      self.size = 3
      ParameterDict.init(self, { a = tm.ones(1) })
      self.b = tm.zeros(1)
    end
    local d = Own()
    assert.equal("a b", words(d:keys()))
    assert.equal(3, d.size)
    d:delattr "a"
    assert.equal("b", words(d:keys()))
    d.a = tm.ones(1)
    assert.equal("b a", words(d:keys()))
  end)
end)

describe("containers", function()
  it("M8: len, ipairs and pairs are methods; metamethods are there for builds that honour them", function()
    for _, c in ipairs { Sequential(L()), ModuleList { L() }, ModuleDict { a = L() }, ParameterList { tm.ones(1) },
      ParameterDict { a = tm.ones(1) } } do
      local mt = getmetatable(c)
      assert.equal(1, c:len())
      assert.equal(1, mt.__len(c))
      local walk = mt.__ipairs or mt.__pairs
      local n = 0
      for key, v in walk(c) do
        n = n + 1
        assert.is_true(key == 1 or key == "a")
        assert.is_true(v ~= nil)
      end
      assert.equal(1, n)
    end
  end)

  it("M208 M212 M214: are copied with their ties and lengths", function()
    local shared = L()
    local m = nn.Module()
    m.list, m.dict = ModuleList { shared, shared }, ModuleDict { a = shared }
    m.params, m.named = ParameterList { tm.ones(1), "x" }, ParameterDict { p = tm.ones(1), s = "y" }
    local c = nn.deepcopy(m)
    assert.is_true(rawequal(c.list[1], c.list[2]) and rawequal(c.list[1], c.dict.a) and not rawequal(c.list[1], shared))
    c.list:append(L())
    c.params:append(tm.ones(1))
    c.named.q = tm.ones(1)
    assert.equal("2 3", words { m.list:len(), c.list:len() })
    assert.equal("2 3", words { m.params:len(), c.params:len() })
    assert.equal("p s", words(m.named:keys()))
    assert.equal("p s q", words(c.named:keys()))
  end)

  it("M222: names stay distinct after any sequence of changes", function()
    local state = 11
    local function random(n)
      state = (state * 16807) % 2147483647
      return state % n + 1
    end
    for _, class in ipairs { Sequential, ModuleList } do
      local c, model = class(), {}
      for _ = 1, 300 do
        local op, n = random(6), #model
        local m = L()
        if op <= 2 then
          c:append(m)
          model[n + 1] = m
        elseif op == 3 then
          local i = random(n + 1)
          c:insert(i, m)
          table.insert(model, i, m)
        elseif op == 4 and n > 0 then
          local i = random(n)
          c:remove(i)
          table.remove(model, i)
        elseif op == 5 and n > 0 then
          local i = random(n)
          c[i] = m
          model[i] = m
        elseif op == 6 and n > 0 then
          assert.is_true(rawequal(table.remove(model), c:pop()))
        end
        assert.equal(#model, c:len())
        for i, x in c:ipairs() do assert.is_true(rawequal(model[i], x)) end
        for i, name in ipairs(c._modules:keys()) do assert.equal(tostring(i - 1), name) end
      end
    end
  end)
end)
