---Chapters 1 and 2 of docs/contracts/module.md: classes, instances and what is registered in them.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Net = nn.Module:extend "my.Net"

local function L() return nn.Linear(2, 2) end
local function P(t) return nn.Parameter(t or tm.zeros(1)) end
local function t1() return tm.zeros(1) end
local function keys(d) return table.concat(OrderedDict.keys(d), " ") end
local function names(iterator)
  local list = {}
  for name in iterator do list[#list + 1] = name end
  return table.concat(list, " ")
end

describe("nn.Module: a class", function()
  it("M1: makes an instance with empty registries and training = true, then runs init with the arguments", function()
    local seen
    local C = nn.Module:extend "C"
    function C:init(...)
      nn.Module.init(self)
      seen = { training = self.training, parameters = keys(self._parameters), n = select("#", ...), ... }
    end
    local m = C(7, nil, "x", nil)
    assert.same({ training = true, parameters = "", n = 4, 7, nil, "x", nil }, seen)
    assert.is_true(m:isinstance(C) and m:isinstance(nn.Module))
    assert.is_false(m:isinstance(nn.Linear))
    assert.equal("class C", tostring(C))
  end)

  it("M1: inherits methods, also those that the parent gets later, and operators of instances", function()
    local A = nn.Module:extend "A"
    local B = A:extend "B"
    function A.late() return "late" end
    assert.equal("late", B().late())
    local Twice = nn.Linear:extend "Twice"
    function Twice:forward(x) return nn.Linear.forward(self, x) * 2 end
    local l = Twice(2, 3)
    assert.same({ 3 }, l(tm.zeros(2)):size())
    assert.equal("Twice(in_features=2, out_features=3, bias=true)", tostring(l))
    assert.equal("Chain(\n  (0): ReLU()\n)", tostring(nn.Sequential:extend "Chain"(nn.ReLU())))
  end)

  it("M1: does not chain constructors: without the layer's init its forward says what is missing, and in which module", function()
    local Bare = nn.Linear:extend "Bare"
    function Bare:init() self.size = 2 end
    assert.equal("", keys(Bare():state_dict()))
    local err = H.raises(function() local _ = Bare()(tm.zeros(2)) end, "TypeError", "weight.*must be a tensor, got nil.*in Bare")
    assert.truthy(err.where:find "contract_registration_spec")
    local Whole = nn.Linear:extend "Whole"
    function Whole:init() nn.Linear.init(self, 2, 1) end
    assert.equal("weight bias", keys(Whole():state_dict()))
  end)

  it("M1: has a name, and is made from a class", function()
    H.raises(function() nn.Module:extend() end, "TypeError", "needs a name.*got nil")
    H.raises(function() nn.Module:extend {} end, "TypeError", "got table")
    H.raises(function() nn.Module:extend "" end, "ValueError", '""')
    H.raises(function() nn.Module:extend "my." end, "ValueError", '"my."')
    H.raises(function() nn.Module.extend "Net" end, "TypeError", 'expected a class, as in nn.Module:extend "Net", got string')
    H.raises(function() Net():extend "Net" end, "TypeError", "expected a class.*got my.Net")
  end)

  it("M1: has an init that returns nothing", function()
    local Bad = nn.Module:extend "Bad"
    function Bad:init() return self end
    local err = H.raises(function() Bad() end, "TypeError", "Bad: init must return nothing, got Bad")
    assert.truthy(err.where:find "contract_registration_spec")
  end)

  it("M1: is no module itself, and its methods want one", function()
    local cases = {
      function() nn.Linear:parameters() end, function() nn.Linear:train() end, function() nn.Linear:register_buffer("b", t1()) end,
    }
    for _, fn in ipairs(cases) do H.raises(fn, "TypeError", "nn.Linear is no module but a class") end
    H.raises(function() nn.Sequential(nn.ReLU) end, "TypeError", "class nn.ReLU")
  end)

  it("M2: keeps everything in one raw field of the instance", function()
    local m = Net()
    m.x = 5
    m.p = P()
    m.c = L()
    m.training = false
    m:register_buffer("b", t1())
    local key = next(m)
    assert.equal("string", type(key))
    assert.is_nil(next(m, key))
    for _, name in ipairs { "x", "p", "c", "b", "training" } do assert.is_nil(rawget(m, name)) end
  end)

  it("M3: takes options in a table at the end, and names the one it does not know", function()
    local m = L()
    H.raises(function() m:named_parameters { prefx = "x" } end, "TypeError", "prefx.*prefix, recurse, remove_duplicate")
    H.raises(function() m:parameters { prefix = "x" } end, "TypeError", "prefix.*recurse")
    H.raises(function() m:register_buffer("b", t1(), { persistant = true }) end, "TypeError", "persistant.*persistent")
    H.raises(function() nn.Parameter(t1(), { grad = true }) end, "TypeError", "grad.*requires_grad")
    H.raises(function() m:named_modules(false) end, "TypeError", "table of options, got boolean")
  end)

  it("M3: takes a flag also as a bare boolean, and as nothing else", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m:register_buffer("c", t1(), { persistent = false })
    assert.equal("", keys(m:state_dict()))
    m.l = L()
    assert.equal("", names(m:parameters(false)))
    assert.is_false(nn.Parameter(t1(), false).requires_grad)
    assert.is_false(m:requires_grad_(false).l.weight.requires_grad)
    assert.is_true(m:requires_grad_ { requires_grad = true }.l.weight.requires_grad)
    m:zero_grad(false)
    assert.is_false(m:train(false).training)
    H.raises(function() m:register_buffer("d", t1(), 1) end, "TypeError", "table of options, got number")
    H.raises(function() m:register_buffer("d", t1(), { persistent = 0 }) end, "TypeError", "persistent must be a boolean, got number")
    H.raises(function() m:named_parameters { recurse = 0 } end, "TypeError", "recurse must be a boolean")
    H.raises(function() m:named_modules { remove_duplicate = "no" } end, "TypeError", "remove_duplicate must be a boolean")
    H.raises(function() m:named_buffers { prefix = 3 } end, "TypeError", "prefix must be a string")
  end)

  it("M4: has args objects with fields 1 to n, n and a metatable, which plain tables are not", function()
    local a = nn.args(1, nil, 3, nil)
    assert.equal(4, a.n)
    assert.equal(3, a[3])
    assert.is_nil(a[4])
    assert.is_true(nn.is_args(a))
    assert.is_false(nn.is_args { 1, n = 1 })
    assert.equal(4, select("#", a:unpack()))
    assert.equal(0, nn.args().n)
  end)

  it("M5: has named arguments as a table with a metatable, a copy; a plain table in last place is positional", function()
    local given = { bias = 1 }
    local kw = nn.kw(given)
    given.bias = 2
    assert.equal(1, kw.bias)
    assert.is_true(nn.is_kw(kw))
    assert.is_false(nn.is_kw(given))
    local m = Net()
    function m.forward(_, x, last) return x, last end
    local _, last = m(1, given)
    assert.equal(given, last)
    _, last = m(1, kw)
    assert.is_true(nn.is_kw(last))
    H.raises(function() nn.kw(3) end, "TypeError", "number")
    m:register_forward_pre_hook(function() end)
    H.raises(function() m(kw, 1) end, "TypeError", "nn.kw must be the last argument")
  end)

  it("M6: has nn.None where nil cannot be stored; false is a value", function()
    local m = Net()
    m:register_parameter "p"
    assert.equal(nn.None, OrderedDict.get(m._parameters, "p"))
    assert.is_nil(m.p)
    assert.equal("nn.None", tostring(nn.None))
    m.flag = false
    assert.is_true(m:hasattr "flag")
  end)

  it("M9: takes two values for the same only if they are one object: not for equal content, storage or views", function()
    local m = Net()
    local t = tm.zeros(2, 2)
    m.a = P(t)
    m.b = P(t)
    m.c = m.a
    assert.equal("a b", names(m:named_parameters()))
    m.a.grad = tm.ones(2, 2)
    assert.is_true(rawequal(m.a.grad, m.a.grad))
    assert.is_false(rawequal(m.a.data, m.a.data))
  end)
end)

describe("nn.Module: a fresh module", function()
  it("M10: trains, has three empty registries, no marked buffer and no hooks; its version is a field of the class", function()
    local m = Net()
    assert.is_true(m.training)
    for _, registry in ipairs { m._parameters, m._buffers, m._modules } do
      assert.is_true(OrderedDict.is(registry))
      assert.equal(0, OrderedDict.len(registry))
    end
    assert.is_nil(next(m._non_persistent_buffers_set))
    assert.equal(1, m._version)
    local Old = Net:extend "Old"
    Old._version = 2
    assert.equal(2, Old()._version)
    assert.equal(1, Net._version)
  end)

  it("M22: cannot be made by hand: one clear error names the class on any access", function()
    local m = setmetatable({}, getmetatable(Net()))
    H.raises(function() return m.x end, "AttributeError", "my.Net: made without its constructor")
    H.raises(function() m.x = P() end, "AttributeError", "my.Net")
    H.raises(function() m.x = 3 end, "AttributeError", "my.Net")
    H.raises(function() m:train() end, "AttributeError", "my.Net")
    H.raises(function() m(1) end, "AttributeError", "my.Net")
    H.raises(function() nn.Module.register_parameter(m, "x", P()) end, "AttributeError", "my.Net")
  end)

  it("M22: is what its methods want: with '.' for ':' the error says so, at the caller's line", function()
    local l = L()
    local calls = {
      function() l.parameters() end, function() l.named_parameters { recurse = false } end, function() l.buffers() end,
      function() l.children() end, function() l.named_children() end, function() l.modules() end, function() l.named_modules() end,
      function() l.train() end, function() l.train(false) end, function() l.eval() end, function() l.apply(print) end,
      function() l.zero_grad() end, function() l.requires_grad_(false) end, function() l.register_parameter("a", P()) end,
      function() l.register_buffer("a", t1()) end, function() l.add_module("a", L()) end, function() l.hasattr "weight" end,
      function() l.getattr "weight" end, function() l.delattr "weight" end, function() l.get_submodule "" end,
      function() l.get_parameter "weight" end, function() l.get_buffer "b" end, function() l.set_submodule("a", L()) end,
    }
    for i, fn in ipairs(calls) do
      local err = H.raises(fn, "TypeError", "expected a module, got %w+; its methods are called with ':'")
      assert.truthy(err.where:find "contract_registration_spec", i)
    end
  end)

  it("M22: is no tensor: an operator says which argument is a module, and of what class", function()
    local m = Net()
    H.raises(function() local _ = tm.relu(m) end, "TypeError", "relu: argument 1 %(x%) must be a tensor, got my.Net")
    H.raises(function() local _ = t1() + m end, "TypeError", "add: argument 2.*got my.Net")
    H.raises(function() local _ = m + t1() end, "TypeError", "add: argument 1.*got my.Net")
    H.raises(function() tm.cat { t1(), m } end, "TypeError", "cat: .*2.*got my.Net")
    H.raises(function() local _ = L()(m) end, "TypeError", "linear: argument 1 %(x%) must be a tensor, got my.Net.*in Linear")
    H.raises(function() P(m) end, "TypeError", "got my.Net")
  end)
end)

describe("nn.Module: registering", function()
  it("case 19, M11 M12 M13 M15: wants names that are strings, without a dot, and not empty", function()
    local m = Net()
    for method, value in pairs { register_parameter = P(), register_buffer = t1(), register_module = L(), add_module = L() } do
      H.raises(function() m[method](m, "a.b", value) end, "KeyError", "dot.*a%.b")
      H.raises(function() m[method](m, "", value) end, "KeyError", "empty")
      H.raises(function() m[method](m, 1, value) end, "TypeError", "string, got number")
      H.raises(function() m[method](m, nil, value) end, "TypeError", "string, got nil")
    end
    assert.equal("", keys(m:state_dict()))
  end)

  it("case 17, M11 M12: refuses a parameter whose name something else has, and quotes it", function()
    local m = Net()
    m.y = 5
    m:register_buffer("b", t1())
    m.c = L()
    for _, name in ipairs { "y", "b", "c" } do
      H.raises(function() m:register_parameter(name, P()) end, "KeyError", '"' .. name .. '" is taken')
    end
    assert.equal(5, m.y)
  end)

  it("M11 M12: checks a parameter's name before its value, the string first, the dot before the rest", function()
    local m = Net()
    m["x.y"] = 1
    H.raises(function() m:register_parameter(1, 3) end, "TypeError", "name")
    H.raises(function() m:register_parameter("x.y", 3) end, "KeyError", "dot")
    H.raises(function() m:register_parameter("", 3) end, "KeyError", "empty")
    H.raises(function() m:register_parameter("forward", 3) end, "KeyError", "forward")
    H.raises(function() m:register_parameter("a", 3) end, "TypeError", '"a" must be an nn.Parameter or nil, got number')
  end)

  it("case 21, M11 M12 M50: refuses as parameter a plain tensor, a result of an operator, and a Parameter that is no leaf", function()
    local m, p = Net(), P()
    H.raises(function() m:register_parameter("a", t1()) end, "TypeError", '"a".*got tensor')
    H.raises(function() m:register_parameter("a", P() * 2) end, "TypeError", '"a"')
    H.raises(function() m:register_parameter("a", nn.Buffer(t1())) end, "TypeError", '"a"')
    local q = p * 2
    rawset(q, "_parameter", true) -- as an operator in place would leave one
    H.raises(function() m:register_parameter("a", q) end, "ValueError", 'parameter "a".*forward')
  end)

  it("M13: checks a buffer's name, then its value", function()
    local m = Net()
    m.y = 5
    m.p = P()
    m.c = L()
    for _, name in ipairs { "y", "p", "c" } do
      H.raises(function() m:register_buffer(name, t1()) end, "KeyError", '"' .. name .. '" is taken')
    end
    H.raises(function() m:register_buffer("y", 3) end, "KeyError", "y")
    H.raises(function() m:register_buffer("a", 3) end, "TypeError", 'buffer "a" must be a tensor or nil, got number')
    H.raises(function() m:register_buffer("a", L()) end, "TypeError", "nn.Linear")
  end)

  it("case 23, M13: takes results and Parameters as buffers, listed as buffers only", function()
    local m, p = Net(), P()
    m:register_buffer("pp", p)
    m:register_buffer("result", p * 2)
    assert.equal(p, m.pp)
    assert.equal("pp result", names(m:named_buffers()))
    assert.equal("", names(m:named_parameters()))
    assert.is_false(m.result.is_leaf)
  end)

  it("case 11, M14: marks the name of a buffer that is not saved, anew each time; the mark outlives the value", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    assert.equal("", keys(m:state_dict()))
    m:register_buffer("b", t1())
    assert.equal("b", keys(m:state_dict()))
    m:register_buffer("b", t1(), false)
    m.b = nil
    m.b = t1()
    assert.equal("", keys(m:state_dict()))
    assert.equal("b", names(m:named_buffers()))
    m:register_buffer("b", nil, true)
    m.b = t1()
    assert.equal("b", keys(m:state_dict()))
    m:register_buffer("n", nn.Buffer(t1(), false)) -- the argument counts, not the object
    assert.equal("b n", keys(m:state_dict()))
  end)

  it("case 20, M15: checks a child's value before its name, and a name that is taken before its spelling", function()
    local m = Net()
    H.raises(function() m:add_module("a.b", 3) end, "TypeError", "not a Module")
    H.raises(function() m:add_module(1, t1()) end, "TypeError", "not a Module but a tensor")
    m["x.y"] = 1
    H.raises(function() m:add_module("x.y", L()) end, "KeyError", '"x.y" is taken')
    H.raises(function() m:add_module("z.y", L()) end, "KeyError", "dot")
    m.y = 5
    m.p = P()
    m:register_buffer("b", t1())
    for _, name in ipairs { "y", "p", "b" } do
      H.raises(function() m:add_module(name, L()) end, "KeyError", '"' .. name .. '" is taken')
    end
    assert.equal(nn.Module.register_module, nn.Module.add_module)
  end)

  it("case 18, M17: refuses the names of methods and fields of the class", function()
    local m = Net()
    H.raises(function() m:register_parameter("forward", P()) end, "KeyError", '"forward"')
    H.raises(function() m:register_buffer("training", t1()) end, "KeyError", '"training"')
    H.raises(function() m:add_module("type", L()) end, "KeyError", '"type"')
    for _, name in ipairs { "type", "float", "to", "train", "forward", "training" } do
      H.raises(function() m:register_parameter(name, P()) end, "KeyError", name)
      H.raises(function() m:register_buffer(name, t1()) end, "KeyError", name)
      H.raises(function() m:add_module(name, L()) end, "KeyError", name)
    end
    local Own = Net:extend "Own"
    Own.scale = 2
    H.raises(function() Own():register_buffer("scale", t1()) end, "KeyError", '"scale"')
  end)

  it("case 26, M18: makes slots without a value, which keep their place and which only the print of modules shows", function()
    local m = Net()
    m:add_module "none"
    m:register_parameter("p", nil)
    m:register_buffer("b", nil)
    assert.equal("Net(\n  (none): nil\n)", tostring(m))
    for _, name in ipairs { "none", "p", "b" } do
      assert.is_true(m:hasattr(name))
      assert.is_nil(m[name])
    end
    m.last = L()
    m.q = P()
    assert.equal("last", names(m:named_children()))
    assert.equal(" last", names(m:named_modules()))
    assert.equal("q last.weight last.bias", names(m:named_parameters()))
    assert.equal("", names(m:named_buffers()))
    assert.equal("q last.weight last.bias", keys(m:state_dict()))
    m:double():train():zero_grad()
    m:requires_grad_(false):apply(function() end)
    m.none = L()
    m.p = P()
    m.b = t1()
    assert.equal("p q b none.weight none.bias last.weight last.bias", keys(m:state_dict()))
  end)

  it("M20: sees no tensors and modules in plain tables", function()
    local m = Net()
    m.list = { x = { L(), P() } } -- one level down, where no warning looks
    m.sizes = { 1, 2 }
    assert.equal("", names(m:named_parameters()))
    assert.equal("", names(m:named_modules()))
    assert.equal("", keys(m:state_dict()))
    assert.same({ 1, 2 }, m.sizes)
  end)

  it("M21: returns nothing; a missing value makes a slot without one", function()
    local m = Net()
    assert.equal(0, select("#", m:register_parameter("a", P())))
    assert.equal(0, select("#", m:register_buffer("b", t1(), { persistent = false })))
    assert.equal(0, select("#", m:register_module("c", L())))
    assert.equal(0, select("#", m:add_module("d", L())))
    m:register_parameter "e"
    m:register_buffer "f"
    m:register_module "g"
    assert.equal("a e", keys(m._parameters))
    assert.equal("b f", keys(m._buffers))
    assert.equal("c d g", keys(m._modules))
  end)

  it("M23: takes the name of an attribute that was set to nil", function()
    local m = Net()
    m.weight = 5
    H.raises(function() m:register_parameter("weight", P()) end, "KeyError")
    m.weight = nil
    m:register_parameter("weight", P())
    assert.equal("weight", keys(m:state_dict()))
  end)

  it("M24: warns once per class and name about a plain table with a module or Parameter at its first level", function()
    local code, _, err = H.shell(("%s -e '%s'"):format(H.tmodrun, [[
      local tm = require "tmod"
      local nn = tm.nn
      local M, N = nn.Module:extend "M", nn.Module:extend "N"
      for i = 1, 3 do
        local m = M()
        m.layers = { nn.Linear(1, 1) }
        m.byname = { a = nn.Parameter(tm.zeros(1)) }
        m.sizes = { 1, 2 }
        m.deep = { { nn.Linear(1, 1) } }
        m.list = nn.ModuleList { nn.Linear(1, 1) }
        assert(#m.layers == 1)
      end
      N().layers = { nn.Linear(1, 1) }
    ]]))
    assert.equal(0, code)
    assert.equal(1, select(2, err:gsub("M%.layers", "")))
    assert.equal(1, select(2, err:gsub("N%.layers", "")))
    assert.equal(1, select(2, err:gsub("M%.byname", "")))
    assert.equal(3, select(2, err:gsub("nn%.ModuleList or nn%.ParameterList", "")))
    assert.equal(3, select(2, err:gsub("\n", "")))
  end)
end)

describe("nn.Module: order", function()
  it("case 1, M16 M19: replacing a value of the same kind keeps its place", function()
    local m, p2 = Net(), P()
    m.p = P()
    m.q = P()
    m.r = P()
    m.p = p2
    assert.equal(p2, m.p)
    m:register_parameter("q", P())
    assert.equal("p q r", names(m:named_parameters()))
    m.a = L()
    m.b = L()
    m:add_module("a", L())
    assert.equal("a b", names(m:named_children()))
    m:register_buffer("x", t1())
    m:register_buffer("y", t1())
    m:register_buffer("x", tm.ones(1))
    assert.equal("x y", names(m:named_buffers()))
    assert.equal(1, m.x:item())
  end)

  it("case 2, M19 M33 M39: setting nil keeps the place", function()
    local m = Net()
    m.p = P()
    m.q = P()
    m.r = P()
    m.p = nil
    assert.is_nil(m.p)
    assert.is_true(m:hasattr "p")
    assert.equal("q r", names(m:named_parameters()))
    assert.equal("q r", keys(m:state_dict()))
    m.p = P()
    assert.equal("p q r", names(m:named_parameters()))
    assert.equal("p q r", keys(m:state_dict()))
  end)

  it("case 3, M19 M38: deleting and registering again goes to the end", function()
    local m = Net()
    m.p = P()
    m.q = P()
    m.r = P()
    m:delattr "p"
    assert.is_false(m:hasattr "p")
    m.p = P()
    assert.equal("q r p", names(m:named_parameters()))
  end)

  it("case 12, M19 M38: a buffer deleted and registered again comes last, and its mark is gone", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m:register_buffer("c", t1())
    m:delattr "b"
    m:register_buffer("b", t1())
    assert.equal("c b", keys(m:state_dict()))
  end)

  it("case 6, M19 M25 M29: moving to another kind appends there", function()
    local m = Net()
    m.c = L()
    m.d = P()
    m.c = P()
    assert.equal("", names(m:named_children()))
    assert.equal("d c", names(m:named_parameters()))
  end)
end)
