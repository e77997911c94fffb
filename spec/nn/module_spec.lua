local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"
local nn, F = tm.nn, tm.nn.functional

local function L() return nn.Linear(2, 2) end
local function P(t) return nn.Parameter(t or tm.zeros(1)) end
local function names(it_)
  local list = {}
  for name in it_ do list[#list + 1] = name end
  return list
end
local function keys(m) return OrderedDict.keys(m:state_dict()) end

local Net = nn.Module:extend "my.Net"
local function N() return Net() end

describe("nn.Module: classes", function()
  it("runs init with the arguments of the call, and forward when called (M1, M89)", function()
    local Add = nn.Module:extend "Add"
    function Add:init(n) self.n = n end
    function Add:forward(a, b) return a + b + self.n, "two" end
    local sum, two = Add(1)(2, 3)
    assert.equal(6, sum)
    assert.equal("two", two)
    H.raises(function() N()(1) end, "NotImplementedError", "my.Net has no forward")
  end)

  it("inherits (M1)", function()
    local Twice = nn.Linear:extend "Twice"
    function Twice:forward(x) return nn.Linear.forward(self, x) * 2 end
    local l = Twice(2, 3)
    assert.same({ 3 }, l(tm.zeros(2)):size())
    assert.equal("Twice(in_features=2, out_features=3, bias=true)", tostring(l))
  end)

  it("is in training mode at first, with nothing registered (M10)", function()
    local m = N()
    assert.is_true(m.training)
    assert.same({}, keys(m))
    assert.equal(1, m._version)
  end)

  it("says so when an instance was made without its class (M22)", function()
    local m = setmetatable({}, getmetatable(N()))
    H.raises(function() return m.x end, "AttributeError", "my.Net")
    H.raises(function() m.x = P() end, "AttributeError", "my.Net")
  end)
end)

describe("nn.Module: registration", function()
  it("keeps the order of first registration (M16, M19, M33, M38, M39; cases 1-3)", function()
    local m = N()
    local p2, p3 = P(), P()
    m.p = P()
    m.q = P()
    m.r = P()
    m.p = p2
    assert.equal(p2, m.p)
    assert.same({ "p", "q", "r" }, names(m:named_parameters()))
    m.p = nil
    assert.is_nil(m.p)
    assert.is_true(m:hasattr "p")
    assert.same({ "q", "r" }, names(m:named_parameters()))
    assert.same({ "q", "r" }, keys(m))
    m.p = p3
    assert.same({ "p", "q", "r" }, keys(m))
    m:delattr "p"
    assert.is_false(m:hasattr "p")
    m.p = P()
    assert.same({ "q", "r", "p" }, keys(m))
  end)

  it("refuses other values in a slot (M27, M29, M41; cases 4, 5, 7)", function()
    local m = N()
    m.p = P()
    m.c = L()
    local p, c = m.p, m.c
    H.raises(function() m.p = tm.zeros(1) end, "TypeError", '"p"')
    H.raises(function() m.p = L() end, "TypeError", '"p"')
    H.raises(function() m.p = nn.Buffer(tm.zeros(1)) end, "TypeError", '"p"')
    for _, v in ipairs { 3, tm.zeros(1), false, nn.Buffer(tm.zeros(1)) } do
      H.raises(function() m.c = v end, "TypeError", '"c"')
    end
    assert.equal(p, m.p)
    assert.equal(c, m.c)
  end)

  it("moves a name from kind to kind (M25, M26, M28, M30; cases 6, 13-15)", function()
    local m = N()
    m.c = L()
    m.d = P()
    m.c = P()
    assert.same({}, names(m:named_children()))
    assert.same({ "d", "c" }, names(m:named_parameters()))
    m:register_buffer("b", tm.zeros(1), false)
    m.b = P()
    assert.same({}, names(m:named_buffers()))
    assert.same({ "d", "c", "b" }, keys(m))
    m:register_buffer("e", tm.zeros(1))
    m.e = L()
    assert.same({ "e" }, names(m:named_children()))
    assert.same({}, names(m:named_buffers()))
    m.x = 5
    m.x = P()
    assert.is_true(nn.is_parameter(m.x))
  end)

  it("keeps a buffer's persistence with its name (M13, M14, M30, M33; cases 8-12)", function()
    local m = N()
    m:register_buffer("b", tm.zeros(1), { persistent = false })
    m:register_buffer("c", tm.zeros(1))
    m.b = tm.ones(1)
    assert.same({ "c" }, keys(m))
    assert.same({ "b", "c" }, names(m:named_buffers()))
    m.b = nil
    m.b = tm.ones(1)
    assert.same({ "c" }, keys(m))
    m.b = nn.Buffer(tm.zeros(1))
    assert.same({ "b", "c" }, keys(m))
    m.b = nn.Buffer(tm.zeros(1), false)
    assert.same({ "c" }, keys(m))
    m:register_buffer("b", tm.zeros(1))
    assert.same({ "b", "c" }, keys(m))
    m:register_buffer("b", tm.zeros(1), false)
    m:delattr "b"
    m:register_buffer("b", tm.zeros(1))
    assert.same({ "c", "b" }, keys(m))
    H.raises(function() m.b = 3 end, "TypeError", '"b"')
  end)

  it("registers a Buffer object, but not over an attribute (M31, M32, M52; case 16)", function()
    local m = N()
    m.b = nn.Buffer(tm.zeros(1))
    m.t = tm.zeros(1)
    assert.same({ "b" }, names(m:named_buffers()))
    m.x = 5
    H.raises(function() m.x = nn.Buffer(tm.zeros(1)) end, "KeyError", '"x"')
    assert.equal(5, m.x)
  end)

  it("refuses names that exist (M11, M12, M17, M23; cases 17, 18)", function()
    local m = N()
    m.y = 5
    m.z = 6
    H.raises(function() m:register_parameter("y", P()) end, "KeyError", '"y"')
    H.raises(function() m:register_parameter("forward", P()) end, "KeyError", '"forward"')
    H.raises(function() m:register_buffer("training", tm.zeros(1)) end, "KeyError", '"training"')
    H.raises(function() m:add_module("type", L()) end, "KeyError", '"type"')
    m.z = nil
    m:register_parameter("z", P())
  end)

  it("refuses names that are no names (M11, M13, M15; cases 19, 20)", function()
    local m = N()
    for name, value in pairs { register_parameter = P(), register_buffer = tm.zeros(1), register_module = L() } do
      H.raises(function() m[name](m, "a.b", value) end, "KeyError", "a.b")
      H.raises(function() m[name](m, "", value) end, "KeyError", "empty")
      H.raises(function() m[name](m, 1, value) end, "TypeError", "number")
      H.raises(function() m[name](m, nil, value) end, "TypeError", "nil")
    end
    H.raises(function() m:add_module("a.b", 3) end, "TypeError", "not a Module")
  end)

  it("refuses values of another kind (M11, M12, M13, M50; case 21)", function()
    local m = N()
    H.raises(function() m:register_parameter("a", tm.zeros(1)) end, "TypeError", '"a".*tensor')
    H.raises(function() m:register_parameter("a", P() * 2) end, "TypeError", '"a"')
    H.raises(function() m:register_buffer("a", 3) end, "TypeError", '"a".*number')
  end)

  it("changes nothing when an assignment fails (M37, M44; case 22)", function()
    local m = N()
    m:register_buffer("w", tm.zeros(1))
    local p = P()
    tm.no_grad(function() end)
    local q = p * 2 -- no leaf; flagged by hand as an in-place operator would leave it
    rawset(q, "_parameter", true)
    H.raises(function() m.w = q end, "ValueError", '"w".*forward')
    assert.same({ "w" }, names(m:named_buffers()))
    H.raises(function() m.forward = P() end, "KeyError", "forward")
    H.raises(function() m["a.b"] = P() end, "KeyError", "a.b")
  end)

  it("takes a Parameter as a buffer (M13; case 23)", function()
    local m, p = N(), P()
    m:register_buffer("pp", p)
    assert.same({ "pp" }, names(m:named_buffers()))
    assert.same({}, names(m:named_parameters()))
  end)

  it("refuses a Module under a name that could not be read or saved (M35, M36, M44; cases 24, 25)", function()
    local m = N()
    H.raises(function() m["a.b"] = L() end, "KeyError", "a.b")
    H.raises(function() m[""] = L() end, "KeyError", "empty")
    H.raises(function() m.forward = L() end, "KeyError", '"forward"')
  end)

  it("has slots without a value (M18, M21; case 26)", function()
    local m = N()
    m:add_module "none"
    m:register_parameter "p"
    m:register_buffer "b"
    assert.equal("Net(\n  (none): nil\n)", tostring(m))
    assert.same({}, names(m:named_children()))
    assert.same({ "" }, names(m:named_modules()))
    assert.same({}, keys(m))
    m:double():train():zero_grad()
    m.none = L()
    assert.same({ "none.weight", "none.bias" }, keys(m))
  end)

  it("warns once about a plain list of modules (M20, M24)", function()
    local code, _, err = H.shell(("%s -e '%s'"):format(H.tmodrun, [[
      local nn = require "tmod".nn
      local M = nn.Module:extend "M"
      for i = 1, 2 do local m = M() m.layers = { nn.Linear(1, 1) } m.sizes = { 1, 2 } end
    ]]))
    assert.equal(0, code)
    assert.equal(1, select(2, err:gsub("M%.layers", "")))
    assert.truthy(err:find "ModuleList")
    assert.is_nil(err:find "sizes")
  end)
end)

describe("nn.Module: attributes", function()
  it("reads attributes, then the class, then slots; what is absent is nil (M34, M42)", function()
    local m = N()
    m.x = false
    assert.is_false(m.x)
    assert.is_nil(m.absent)
    assert.is_nil(rawget(m, "x"))
    H.raises(function() m:getattr "absent" end, "AttributeError", "my.Net.*absent")
    H.raises(function() m:delattr "absent" end, "AttributeError", "absent")
    m:delattr "x"
    assert.is_nil(m.x)
  end)

  it("takes a forward of one's own for one instance (M43)", function()
    local m = N()
    m.forward = function(self, x) return self, x end
    local a, b = m(4)
    assert.equal(m, a)
    assert.equal(4, b)
  end)

  it("shows its registries to ported code (M45)", function()
    local m = N()
    m.p = P()
    m.c = L()
    m:register_buffer("b", tm.zeros(1), false)
    assert.equal(m.p, OrderedDict.get(m._parameters, "p"))
    assert.same({ "c" }, OrderedDict.keys(m._modules))
    assert.same({ "b" }, OrderedDict.keys(m._buffers))
    m._parameters.p = nil
    assert.is_nil(m.p)
  end)

  it("has no positions (M46)", function()
    H.raises(function() return N()[1] end, "TypeError", "my.Net")
    H.raises(function() N()[1] = L() end, "TypeError", "my.Net")
  end)
end)

describe("nn.Parameter and nn.Buffer", function()
  it("share memory and leave their source alone (M47, M48, M54)", function()
    local t = tm.ones(2)
    local p = nn.Parameter(t)
    assert.is_true(p.requires_grad and p.is_leaf)
    assert.is_false(t.requires_grad)
    tm.no_grad(function() p:mul_(3) end)
    assert.same({ 3, 3 }, t:tolist())
    assert.same({ 0 }, nn.Parameter():size())
    assert.is_true(tm.no_grad(nn.Parameter, t).requires_grad)
    assert.is_false(nn.Parameter(t, false).requires_grad)
    assert.is_false(nn.Parameter(t, { requires_grad = false }).requires_grad)
    assert.is_true(nn.Parameter(p * 2).is_leaf)
  end)

  it("need floating numbers to require gradients (M48)", function()
    local t = tm.zeros(2, { dtype = "int64" })
    H.raises(function() nn.Parameter(t) end, "RuntimeError", "float")
    assert.equal("int64", nn.Parameter(t, false).dtype)
    H.raises(function() nn.Parameter(3) end, "TypeError", "number")
    H.raises(function() nn.Parameter(t, { grad = true }) end, "TypeError", "grad")
  end)

  it("are new objects each time; results are plain tensors (M49, M50; case 31)", function()
    local t = tm.zeros(2)
    local m = N()
    m.a = P(t)
    m.b = P(t)
    m.c = P(m.a)
    assert.same({ "a", "b", "c" }, names(m:named_parameters()))
    for _, r in ipairs { m.a * 2, m.a:detach(), m.a:clone(), m.a.data, m.a[1] } do assert.is_false(nn.is_parameter(r)) end
    assert.is_true(nn.is_parameter(m.a))
    assert.is_true(nn.is_buffer(nn.Buffer(t)))
    assert.is_false(nn.is_buffer(nn.Buffer(t):detach()))
  end)

  it("print what they are (M51)", function()
    assert.equal("Parameter containing:\ntensor([0., 0.], requires_grad=true)", tostring(P(tm.zeros(2))))
  end)

  it("outlive the scope that made them", function()
    local m = tm.scope(function()
      local n = N()
      n.l = L()
      n:register_buffer("b", tm.ones(1))
      return n
    end)
    assert.same({ 2 }, m.l(tm.zeros(2)):size())
    assert.equal(1, m.b:item())
  end)
end)

describe("nn.Module: walks", function()
  local function tree()
    local m, l = N(), L()
    m.a = l
    m.b = l
    return m, l
  end

  it("yield a shared child once, under its first name (M60-M62; case 29)", function()
    local m = tree()
    assert.same({ "a" }, names(m:named_children()))
    assert.same({ "", "a" }, names(m:named_modules()))
    assert.same({ "", "a", "b" }, names(m:named_modules { remove_duplicate = false }))
    assert.equal(2, #names(m:modules()))
    assert.equal(1, #names(m:children()))
    assert.same({ "x", "x.a" }, names(m:named_modules { prefix = "x" }))
  end)

  it("yield a shared parameter once, but save it under all its names (M53, M64, M66, M164; case 30)", function()
    local m = N()
    m.a = L()
    m.b = L()
    m.b.weight = m.a.weight
    assert.same({ "a.weight", "a.bias", "b.bias" }, names(m:named_parameters()))
    assert.same({ "a.weight", "a.bias", "b.weight", "b.bias" }, keys(m))
    assert.same({ "a.weight", "a.bias", "b.weight", "b.bias" }, names(m:named_parameters { remove_duplicate = false }))
    assert.equal(3, #names(m:parameters()))
  end)

  it("join the prefix with a dot, always (M65, M159, M160; case 32)", function()
    local l = L()
    assert.same({ "foo..weight", "foo..bias" }, names(l:named_parameters { prefix = "foo." }))
    local sd = l:state_dict { prefix = "foo" }
    assert.same({ "fooweight", "foobias" }, OrderedDict.keys(sd))
    assert.same({ "fo" }, OrderedDict.keys(sd._metadata))
  end)

  it("put own parameters first (M68, M161; case 33)", function()
    local m = N()
    m.ch = L()
    m:register_buffer("buf", tm.zeros(1))
    m.par = P()
    assert.same({ "par", "buf", "ch.weight", "ch.bias" }, keys(m))
    assert.same({ "par", "ch.weight", "ch.bias" }, names(m:named_parameters()))
    assert.same({ "par" }, names(m:named_parameters(false)))
    assert.same({ "par" }, names(m:named_parameters { recurse = false }))
    assert.same({ "buf" }, names(m:named_buffers()))
    assert.equal(1, #names(m:parameters(false)))
    assert.equal(1, #names(m:buffers()))
  end)

  it("end when a module contains itself (M63; case 34)", function()
    local m = N()
    m.own = m
    assert.same({ "" }, names(m:named_modules()))
  end)

  it("see the tree as it was at their start (M71)", function()
    local m = N()
    m.a = L()
    m.b = L()
    local seen = {}
    for name in m:named_children() do
      m["new_" .. name] = L()
      m:delattr(name)
      seen[#seen + 1] = name
    end
    assert.same({ "a", "b" }, seen)
    assert.same({ "new_a", "new_b" }, names(m:named_children()))
  end)

  it("refuse unknown options (M3, M70)", function()
    H.raises(function() L():named_parameters { prefx = "x" } end, "TypeError", "prefx")
    H.raises(function() L():parameters { prefix = "x" } end, "TypeError", "prefix")
  end)

  it("reach a part by its path (M73-M75; cases 39, 40)", function()
    local m = N()
    m.a = N()
    m.a.l = nn.Linear(2, 2, { bias = false })
    m.a:add_module "none"
    m.a:register_buffer "nb"
    m.a:register_buffer("b", tm.zeros(1))
    assert.equal(m, m:get_submodule "")
    assert.equal(m.a.l, m:get_submodule "a.l")
    for _, path in ipairs { "a.", "a.l.weight", "zz", "a.none" } do
      H.raises(function() m:get_submodule(path) end, "AttributeError")
    end
    assert.equal(m.a.l.weight, m:get_parameter "a.l.weight")
    H.raises(function() m:get_parameter "a" end, "AttributeError", '"a"')
    H.raises(function() m:get_parameter "a.l.bias" end, "AttributeError", '"bias"')
    assert.is_nil(m:get_buffer "a.nb")
    assert.equal(m.a.b, m:get_buffer "a.b")
    H.raises(function() m:get_buffer "a.l" end, "AttributeError", '"l"')
  end)
end)

describe("nn.Module: operations on the tree", function()
  it("apply visits children first, a module of two parents twice (M79; case 35)", function()
    local m, shared = N(), L()
    m.x = N()
    m.y = N()
    m.x.s = shared
    m.y.s = shared
    m.x.again = shared
    local seen = {}
    assert.equal(m, m:apply(function(n) seen[#seen + 1] = n end))
    assert.same({ shared, m.x, shared, m.y, m }, seen)
  end)

  it("train and eval go through overrides (M80-M82, M86; cases 36, 37)", function()
    local Frozen = nn.Module:extend "Frozen"
    function Frozen:train() self.training = false return self end
    local m = N()
    m.f = Frozen()
    m.l = L()
    m:train()
    assert.is_false(m.f.training)
    assert.is_true(m.l.training)
    assert.equal(m, m:eval())
    assert.is_false(m.training or m.l.training)
    assert.is_true(m:train(nil).l.training)
    for _, mode in ipairs { 1, "x" } do H.raises(function() m:train(mode) end, "ValueError", "mode") end
    m.training = "x"
    assert.equal("x", m.training)
  end)

  it("zero_grad drops gradients, also of frozen parameters, or keeps them as zeros (M84, M86; case 38)", function()
    local l = L()
    l(tm.ones(1, 2)):sum():backward()
    l.bias.requires_grad = false
    local g = l.weight.grad
    l:zero_grad(false)
    assert.equal(g, l.weight.grad)
    assert.equal(0, g:abs():sum():item())
    assert.equal(0, l.bias.grad:sum():item())
    l:zero_grad()
    assert.is_nil(l.weight.grad)
    assert.is_nil(l.bias.grad)
    l:zero_grad { set_to_none = true }
    H.raises(function() l:zero_grad { set_none = true } end, "TypeError", "set_none")
  end)

  it("requires_grad_ reaches all parameters (M83)", function()
    local m = N()
    m.l = L()
    m:register_buffer("b", tm.zeros(1))
    assert.equal(m, m:requires_grad_(false))
    assert.is_false(m.l.weight.requires_grad)
    m:requires_grad_()
    assert.is_true(m.l.bias.requires_grad)
    assert.is_false(m.b.requires_grad)
  end)
end)

describe("nn.Module: text", function()
  it("indents children (M223-M225, M228)", function()
    local m = N()
    assert.equal("Net()", tostring(m))
    m.s = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    m.e = N()
    assert.equal([[Net(
  (s): Sequential(
    (0): Linear(in_features=1, out_features=2, bias=true)
    (1): ReLU()
  )
  (e): Net()
)]], tostring(m))
  end)

  it("shows several extra lines each on its own (M223)", function()
    local Extra = nn.Module:extend "Extra"
    function Extra:extra_repr() return "one\ntwo" end
    assert.equal("Extra(\n  one\n  two\n)", tostring(Extra()))
  end)
end)

describe("nn.Module: state dictionaries", function()
  it("share the module's memory, detached or as the very objects (M158, M163; case 75)", function()
    local l = L()
    local sd = l:state_dict()
    assert.is_false(nn.is_parameter(sd.weight))
    assert.is_false(sd.weight.requires_grad)
    sd.weight:fill_(5)
    assert.same({ { 5, 5 }, { 5, 5 } }, l.weight:tolist())
    assert.equal(l.weight, l:state_dict { keep_vars = true }.weight)
    assert.same({ "" }, OrderedDict.keys(sd._metadata))
    local plain = {}
    assert.equal(plain, l:state_dict { destination = plain })
    assert.same({ 2 }, plain.bias:size())
  end)

  it("carry versions of every module, those without state too (M158, M162)", function()
    local V = nn.Module:extend "V"
    V._version = 3
    local m = N()
    m.v = V()
    local sd = m:state_dict()
    assert.same({ "", "v" }, OrderedDict.keys(sd._metadata))
    assert.equal(3, sd._metadata.v.version)
  end)

  it("hold extra state of classes that have some (M77, M165, M185; case 77)", function()
    local X = nn.Module:extend "X"
    function X:get_extra_state() return self.extra end
    function X:set_extra_state(v) self.got = { v } end
    local s = nn.Sequential(X())
    local sd = s:state_dict()
    assert.equal(nn.None, OrderedDict.get(sd, "0._extra_state"))
    s[1].extra = "more"
    s:load_state_dict(s:state_dict())
    assert.same({ "more" }, s[1].got)
    s:load_state_dict(sd)
    assert.same({}, s[1].got)
    H.raises(function() s:load_state_dict {} end, "RuntimeError", '"0%._extra_state"')
    H.raises(function() nn.Sequential(nn.Identity()):load_state_dict(sd) end, "RuntimeError", "unexpected.*0%._extra_state")
    function X.set_extra_state() error "mine" end
    assert.is_false(pcall(s.load_state_dict, s, sd))
    H.raises(function() N():get_extra_state() end, "NotImplementedError")
  end)

  it("load into the same objects, converting dtypes (M174, M181, M196; case 80)", function()
    local l, from = L(), L()
    local w, version = l.weight, l.weight.version
    local result = l:load_state_dict(from:double():state_dict())
    assert.equal(w, l.weight)
    assert.equal("float32", w.dtype)
    assert.is_true(w.requires_grad)
    assert.is_true(w.version > version)
    assert.near_tensor(from.weight:detach(), w, 1e-7)
    assert.same({}, result.missing_keys)
    assert.equal("<all keys matched>", tostring(result))
    local m = N()
    m:register_buffer("n", tm.zeros(2, { dtype = "int64" }))
    m:load_state_dict { n = tm.tensor { 1.7, -2.7 } }
    assert.same({ 1, -2 }, m.n:tolist())
  end)

  it("fail once, with everything that is wrong, after loading what fits (M180, M190, M191, M198; case 81)", function()
    local s = nn.Sequential(L(), nn.Linear(3, 4), L())
    local sd = s:state_dict()
    local good = OrderedDict.new()
    for k, v in OrderedDict.pairs(sd) do good[k] = v + 1 end
    good["1.weight"] = tm.zeros(4, 5)
    good["2.bias"] = 3
    local before = s[3].weight:detach():clone()
    for _, strict in ipairs { true, false } do
      local e = H.raises(function() s:load_state_dict(good, { strict = strict }) end, "RuntimeError", "Sequential")
      assert.truthy(e.message:find("\n\tsize mismatch for 1.weight: the state dictionary has (4, 5), the module has (4, 3)", 1, true))
      assert.truthy(e.message:find('\n\t"2.bias" must be a tensor, got number', 1, true))
      assert.truthy(e.where:find "module_spec")
    end
    assert.near_tensor(before + 1, s[3].weight:detach(), 1e-6)
  end)

  it("list missing and unexpected keys in the order of the modules (M186, M188, M196; cases 78, 82, 83, 85)", function()
    local m = N()
    m.c1 = L()
    m.c2 = L()
    m.p = P()
    m:register_buffer("b", tm.zeros(1))
    m:register_buffer("np", tm.zeros(1), false)
    local sd = OrderedDict.new()
    for _, k in ipairs { "c2.zz", "u2", "c1.qq", "u1", "np", "c1", "p.deep", "c1.weight.bad" } do sd[k] = tm.zeros(1) end
    local r = m:load_state_dict(sd, { strict = false })
    assert.same({ "p", "b", "c1.weight", "c1.bias", "c2.weight", "c2.bias" }, r.missing_keys)
    assert.same({ "u2", "u1", "np", "c1", "p.deep", "c1.qq", "c1.weight.bad", "c2.zz" }, r.unexpected_keys)
    local e = H.raises(function() m:load_state_dict(sd) end, "RuntimeError", "Net")
    assert.truthy(e.message:find('missing.-"p", "b".-\n\tunexpected.-"u2", "u1"'))
    assert.same({ "bias" }, nn.Linear(2, 2, { bias = false }):load_state_dict(L():state_dict(), { strict = false }).unexpected_keys)
  end)

  it("ignore keys under a child without value (M187; case 84)", function()
    local m = N()
    m:add_module "empty"
    m:load_state_dict { ["empty.weight"] = tm.zeros(1) }
  end)

  it("load {} where there is nothing to load (M195)", function()
    local m = N()
    m:register_buffer("np", tm.zeros(1), false)
    m:load_state_dict {}
  end)

  it("unwrap a one-element value for a 0-dim target, not the reverse (M180; case 79)", function()
    local m = N()
    m.s = P(tm.tensor(1))
    m.v = P(tm.zeros(1))
    m:load_state_dict { s = tm.tensor { 7 }, v = tm.tensor { 8 } }
    assert.equal(7, m.s:item())
    H.raises(function() m:load_state_dict { s = tm.tensor(7), v = tm.tensor(8) } end, "RuntimeError", "mismatch for v: .-%(%).-%(1,%)")
  end)

  it("put the dictionary's tensors themselves in place with assign (M179, M182, M183; cases 87-89)", function()
    local m = N()
    m.a = L()
    m.b = L()
    m.b.weight = m.a.weight
    m.a.bias.requires_grad = false
    local old = m.a.bias
    local sd = L():state_dict()
    local both = OrderedDict.new()
    both._metadata = m:state_dict()._metadata
    for k, v in OrderedDict.pairs(sd) do
      both["a." .. k] = v
      both["b." .. k] = v:double() + 1
    end
    m:load_state_dict(both, { assign = true })
    assert.not_equal(old, m.a.bias)
    assert.is_true(nn.is_parameter(m.a.bias))
    assert.is_false(m.a.bias.requires_grad)
    assert.equal(sd.bias:storage_id(), m.a.bias:storage_id())
    assert.equal("float64", m.b.weight.dtype)
    assert.not_equal(m.a.weight, m.b.weight)
    local other = N()
    other.a = L()
    other.b = L()
    local weight = other.a.weight
    other:load_state_dict(both)
    assert.equal(weight, other.a.weight)
  end)

  it("make a pending backward pass refuse (M181; case 96)", function()
    local l = L()
    local x = tm.ones(1, 2, { requires_grad = true })
    local loss = l(x):sum()
    l:load_state_dict(L():state_dict())
    H.raises(function() loss:backward() end, "RuntimeError", "version")
  end)

  it("take nothing but dictionaries with strings as keys (M174, M194; case 97)", function()
    H.raises(function() L():load_state_dict { tm.zeros(1) } end, "TypeError", "number")
    H.raises(function() L():load_state_dict "x" end, "TypeError", "string")
    H.raises(function() L():load_state_dict(tm.zeros(1)) end, "TypeError", "tensor")
    H.raises(function() L():load_state_dict({}, { strickt = false }) end, "TypeError", "strickt")
  end)

  it("go through a file", function()
    local path = os.tmpname()
    local m = nn.Sequential(L(), nn.ReLU(), L())
    tm.save(m:state_dict(), path)
    local n = nn.Sequential(L(), nn.ReLU(), L())
    n:load_state_dict((tm.load(path)))
    os.remove(path)
    local x = tm.randn(3, 2)
    assert.same(m(x):tolist(), n(x):tolist())
  end)
end)

describe("nn.Module: conversions", function()
  it("keep parameters, their order and their gradients, and leave whole numbers alone", function()
    local m = N()
    m.l = L()
    m:register_buffer("n", tm.ones(1, { dtype = "int64" }))
    m:register_buffer("f", tm.ones(1))
    m.l(tm.ones(1, 2)):sum():backward()
    local w, grad = m.l.weight, m.l.weight.grad:tolist()
    assert.equal(m, m:to "float64")
    assert.equal(w, m.l.weight)
    assert.is_true(nn.is_parameter(w) and w.requires_grad and w.is_leaf)
    assert.equal("float64", w.dtype)
    assert.equal("float64", w.grad.dtype)
    assert.same(grad, w.grad:tolist())
    assert.equal("int64", m.n.dtype)
    assert.equal("float64", m.f.dtype)
    assert.equal("float64", m.l(tm.zeros(1, 2, { dtype = "float64" })).dtype)
    for method, dtype in pairs { float = "float32", half = "float16", bfloat16 = "bfloat16", double = "float64" } do
      assert.equal(dtype, m[method](m).l.bias.dtype)
    end
    assert.equal("float32", m:to(tm.zeros(1)).l.bias.dtype)
    assert.equal("float16", m:to { dtype = "float16", device = "cpu" }.f.dtype)
    assert.equal("float32", m:to("cpu", "float32").f.dtype)
    assert.equal("float32", m:cpu().f.dtype)
  end)

  it("keep shared parameters shared", function()
    local m = N()
    m.a = L()
    m.b = L()
    m.b.weight = m.a.weight
    m:double()
    assert.equal(m.a.weight, m.b.weight)
    m:to "meta"
    assert.equal("meta", m.b.weight.device)
    assert.is_true(nn.is_parameter(m.b.weight))
  end)

  it("refuse dtypes that no parameter can have, and change nothing", function()
    local l = L()
    H.raises(function() l:to "int64" end, "TypeError", "floating")
    H.raises(function() l:to "float31" end, "ValueError")
    H.raises(function() l:to { dtyp = "float64" } end, "TypeError", "dtyp")
    local m = N()
    m.n = P()
    H.raises(function() m:type "int64" end, "RuntimeError", "requires grad")
    assert.equal("float32", m.n.dtype)
  end)

  it("let training go on", function()
    local l = L()
    local o = tm.optim.SGD(l:parameters(), { lr = 1 })
    l:double()
    l(tm.ones(1, 2, { dtype = "float64" })):sum():backward()
    local before = l.bias:detach():clone()
    o:step()
    assert.near_tensor(before - 1, l.bias:detach(), 1e-15)
  end)
end)

describe("nn.Module: cost", function()
  it("keeps nothing alive", function()
    assert.equal(0, H.live(function()
      local m = nn.Sequential(L(), nn.ReLU(), nn.Dropout(0.5), L())
      local o = tm.optim.Adam(m:parameters())
      for _ = 1, 3 do
        o:zero_grad()
        F.mse_loss(m(tm.ones(4, 2)), tm.zeros(4, 2)):backward()
        o:step()
      end
      m:double()
    end))
  end)
end)
