---Chapters 6 and 7 of docs/contracts/module.md: walks over the tree, and access by path.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Net = nn.Module:extend "my.Net"

local function L() return nn.Linear(2, 2) end
local function P() return nn.Parameter(tm.zeros(1)) end
local function keys(d) return table.concat(OrderedDict.keys(d), " ") end
---What the first values are, quoted by ' since one may be empty.
local function names(iterator)
  local list = {}
  for name in iterator do list[#list + 1] = name == "" and "''" or name end
  return table.concat(list, " ")
end
local function list(iterator)
  local values = {}
  for v in iterator do values[#values + 1] = v end
  return values
end

---Two names for one child.
local function twice()
  local m, l = Net(), L()
  m.a = l
  m.b = l
  return m, l
end

describe("nn.Module: walks over modules", function()
  it("case 29, M60: the children go by slots, without those that have none and those that came before", function()
    local m, l = twice()
    m:add_module "none"
    m.c = L()
    assert.equal("a c", names(m:named_children()))
    local children = list(m:children())
    assert.equal(2, #children)
    assert.equal(l, children[1])
    assert.equal(m.c, children[2])
    m.a.inner = L() -- not a child of m
    assert.equal("a c", names(m:named_children()))
  end)

  it("case 29, M61: named_modules starts with the module itself, parents first, each once under its first path", function()
    local m = twice()
    assert.equal("'' a", names(m:named_modules()))
    assert.equal("'' a b", names(m:named_modules { remove_duplicate = false }))
    m.c = Net()
    m.c.d = L()
    m.e = m.c
    m.f = L()
    m.c:add_module "none"
    assert.equal("'' a c c.d f", names(m:named_modules()))
    assert.equal("'' a b c c.d e e.d f", names(m:named_modules { remove_duplicate = false }))
    for name, module in m:named_modules() do assert.equal(m:get_submodule(name), module) end
  end)

  it("M61: takes a prefix, and a memo of modules that it leaves out and adds to", function()
    local m = twice()
    assert.equal("x x.a", names(m:named_modules { prefix = "x" }))
    local memo = { [m.a] = true }
    assert.equal("''", names(m:named_modules { memo = memo }))
    assert.is_true(memo[m])
    assert.equal("", names(m:named_modules { memo = memo }))
  end)

  it("M62: modules gives the modules alone", function()
    local m, l = twice()
    assert.same({ m, l }, list(m:modules()))
    assert.equal(3, #list(m:modules { remove_duplicate = false }))
  end)

  it("case 34, M63: a module may contain itself: the walk ends, what goes along every path overflows the stack", function()
    local m = Net()
    m.own = m
    assert.equal("''", names(m:named_modules()))
    assert.equal("own", names(m:named_children()))
    m.p = P()
    assert.equal("p", names(m:named_parameters()))
    local endless = {
      function() m:named_modules { remove_duplicate = false } end, function() m:apply(function() end) end,
      function() m:train() end, function() m:state_dict() end, function() return tostring(m) end,
    }
    for i, fn in ipairs(endless) do
      local ok, err = pcall(fn)
      assert.is_false(ok)
      assert.truthy(tostring(err):find "stack overflow", i)
    end
  end)
end)

describe("nn.Module: walks over parameters and buffers", function()
  it("M64: named_parameters goes by named_modules, without slots that have no value", function()
    local m = Net()
    m.p = P()
    m:register_parameter "none"
    m.a = L()
    m.b = Net()
    m.b.c = nn.Linear(1, 1, { bias = false })
    assert.equal("p a.weight a.bias b.c.weight", names(m:named_parameters()))
    assert.equal("x.p x.a.weight x.a.bias x.b.c.weight", names(m:named_parameters { prefix = "x" }))
    assert.equal("p", names(m:named_parameters { recurse = false }))
    assert.equal("x.p", names(m:named_parameters { recurse = false, prefix = "x" }))
    for name, p in m:named_parameters() do assert.equal(m:get_parameter(name), p) end
  end)

  it("case 30, M64 M66: a shared parameter comes once, under its first name, or under every name if so asked", function()
    local m = Net()
    m.a = L()
    m.b = L()
    m.b.weight = m.a.weight
    assert.equal("a.weight a.bias b.bias", names(m:named_parameters()))
    assert.equal("a.weight a.bias b.weight b.bias", keys(m:state_dict()))
    assert.equal("a.weight a.bias b.weight b.bias", names(m:named_parameters { remove_duplicate = false }))
    local ps = list(m:parameters())
    assert.equal(3, #ps)
    assert.equal(m.a.weight, ps[1])
    assert.equal(m.b.bias, ps[3])
    m.c = m.a -- a shared module
    assert.equal("a.weight a.bias b.bias", names(m:named_parameters()))
    assert.equal("a.weight a.bias b.weight b.bias c.weight c.bias", names(m:named_parameters { remove_duplicate = false }))
  end)

  it("case 32, M65: joins the prefix with a dot, always", function()
    assert.equal("foo..weight foo..bias", names(L():named_parameters { prefix = "foo." }))
    assert.equal("foo. foo..0", names(nn.Sequential(nn.ReLU()):named_modules { prefix = "foo." }))
  end)

  it("M67: named_buffers does the same, with those that are not saved", function()
    local m = Net()
    m:register_buffer("n", tm.zeros(1), false)
    m:register_buffer("none", nil)
    m.sub = Net()
    m.sub:register_buffer("b", tm.zeros(1))
    m.sub:register_buffer("same", m.sub.b)
    m.w = P()
    assert.equal("n sub.b", names(m:named_buffers()))
    assert.equal("n sub.b sub.same", names(m:named_buffers { remove_duplicate = false }))
    assert.equal("n", names(m:named_buffers(false)))
    assert.same({ m.n, m.sub.b }, list(m:buffers()))
    assert.same({ m.n }, list(m:buffers { recurse = false }))
  end)

  it("case 33, M68: a module's own come before its children's, whatever came first", function()
    local m = Net()
    m.ch = L()
    m:register_buffer("buf", tm.zeros(1))
    m.par = P()
    assert.equal("par ch.weight ch.bias", names(m:named_parameters()))
    assert.equal("par buf ch.weight ch.bias", keys(m:state_dict()))
  end)

  it("M69 M71: see the tree as it was when they started: the loop may replace, add and delete", function()
    local m = Net()
    m.a = L()
    m.b = L()
    local seen = {}
    for name, child in m:named_children() do
      assert.is_true(child:isinstance(nn.Linear))
      m[name] = nn.ReLU()
      m["new_" .. name] = L()
      seen[#seen + 1] = name
    end
    assert.same({ "a", "b" }, seen)
    for name in m:named_modules() do
      if name ~= "" then m:delattr(name) end
    end
    assert.equal("", names(m:named_children()))
    m.w = P()
    m.v = P()
    for name, p in m:named_parameters() do
      m[name] = nn.Parameter(p:detach() + 1)
      m:register_parameter("new_" .. name, P())
    end
    assert.equal("w v new_w new_v", names(m:named_parameters()))
    assert.equal(1, m.w:item())
  end)

  it("M70: take one table of options or nothing; a bare boolean is recurse", function()
    local m = Net()
    m.w = P()
    m.l = L()
    assert.equal(1, #list(m:parameters(false)))
    assert.equal(3, #list(m:parameters(true)))
    assert.equal(1, #list(m:parameters { recurse = false }))
    assert.equal("w", names(m:named_parameters(false)))
    H.raises(function() m:named_parameters "x" end, "TypeError", "named_parameters: expected a table of options, got string")
    H.raises(function() m:modules { prefix = "x" } end, "TypeError", "modules: unknown option prefix")
    H.raises(function() m:buffers { remove_duplicate = true } end, "TypeError", "buffers: unknown option remove_duplicate")
  end)

  it("M72: an optimizer takes the iterator, which ends, or a list", function()
    local m = L()
    local iterator = m:parameters()
    local o = tm.optim.SGD(iterator, { lr = 1 })
    assert.equal(2, #o.param_groups[1].params)
    assert.is_nil(iterator())
    H.raises(function() tm.optim.SGD(iterator, { lr = 1 }) end, "ValueError", "empty")
    assert.equal(2, #tm.optim.SGD(list(m:parameters()), { lr = 1 }).param_groups[1].params)
  end)
end)

describe("nn.Module: paths", function()
  local function tree()
    local m = Net()
    m.y = 5
    m.a = Net()
    m.a.l = nn.Linear(2, 2, { bias = false })
    m.a:add_module "none"
    m.a:register_buffer("nb", nil)
    m.a:register_buffer("b", tm.zeros(1))
    return m
  end

  it("case 39, M73: get_submodule reads name after name; the empty path is the module itself", function()
    local m = tree()
    assert.equal(m, m:get_submodule "")
    assert.equal(m.a, m:get_submodule "a")
    assert.equal(m.a.l, m:get_submodule "a.l")
    H.raises(function() m:get_submodule "a." end, "AttributeError", 'my.Net has no attribute ""')
    H.raises(function() m:get_submodule "a.l.weight" end, "AttributeError", '"weight" of nn.Linear is no module')
    H.raises(function() m:get_submodule "zz" end, "AttributeError", 'my.Net has no attribute "zz"')
    H.raises(function() m:get_submodule "a.none" end, "AttributeError", '"none" of my.Net is no module')
    H.raises(function() m:get_submodule "a.none.x" end, "AttributeError", '"none"')
    H.raises(function() m:get_submodule "y" end, "AttributeError", '"y"')
    H.raises(function() m:get_submodule() end, "TypeError", "a path is a string.*got nil")
  end)

  it("M73: counts any attribute that is a Module", function()
    local C = nn.Module:extend "C"
    C.shared = L()
    assert.equal(C.shared, C():get_submodule "shared")
  end)

  it("case 40, M74: get_parameter wants a Parameter at the end", function()
    local m = tree()
    assert.equal(m.a.l.weight, m:get_parameter "a.l.weight")
    assert.equal(m.a.l.weight, m.a.l:get_parameter "weight")
    H.raises(function() m:get_parameter "a" end, "AttributeError", '"a" of my.Net is no nn.Parameter')
    H.raises(function() m:get_parameter "a.l.bias" end, "AttributeError", '"bias" of nn.Linear is no nn.Parameter')
    H.raises(function() m:get_parameter "a.b" end, "AttributeError", '"b"')
    H.raises(function() m:get_parameter "" end, "AttributeError", 'no attribute ""')
    H.raises(function() m:get_parameter "a.zz" end, "AttributeError", "zz")
    H.raises(function() m:get_parameter(1) end, "TypeError", "got number")
  end)

  it("case 40, M75: get_buffer wants a name among the buffers, which may have no value", function()
    local m = tree()
    m.t = tm.zeros(1)
    assert.equal(m.a.b, m:get_buffer "a.b")
    assert.is_nil(m:get_buffer "a.nb")
    H.raises(function() m:get_buffer "a.l" end, "AttributeError", '"l" of my.Net is no buffer')
    H.raises(function() m:get_buffer "a.l.weight" end, "AttributeError", '"weight"')
    H.raises(function() m:get_buffer "t" end, "AttributeError", '"t"')
    H.raises(function() m:get_buffer "zz" end, "AttributeError", "zz")
  end)

  it("case 41, M76: set_submodule puts a module in another's place, or at a new name", function()
    local m, x, l = tree(), L(), L()
    assert.equal(0, select("#", m:set_submodule("x", x)))
    assert.equal(x, m.x)
    m:set_submodule("a.l", l)
    assert.equal(l, m.a.l)
    assert.equal("l none", keys(m.a._modules))
    m:set_submodule("a.l", x, true)
    assert.equal(x, m.a.l)
    local seq = nn.Sequential(nn.ReLU(), nn.ReLU())
    seq:set_submodule("1", x, { strict = true })
    assert.equal(x, seq[2])
  end)

  it("case 41, M76: set_submodule refuses an empty path, what is no Module, and places of something else", function()
    local m = tree()
    local before = keys(m.a._modules)
    H.raises(function() m:set_submodule("", L()) end, "ValueError", "path")
    H.raises(function() m:set_submodule("", 3) end, "ValueError", "path")
    H.raises(function() m:set_submodule("a.l", 3) end, "ValueError", '"a.l" must be an nn.Module, got number')
    H.raises(function() m:set_submodule "a.l" end, "ValueError", "got nil")
    for _, opts in ipairs { true, { strict = true } } do
      H.raises(function() m:set_submodule("x", L(), opts) end, "AttributeError", 'my.Net has no attribute "x"')
    end
    for path, name in pairs { ["a.none"] = "none", ["a.l.weight"] = "weight", ["a.forward"] = "forward", ["a.nb"] = "nb", y = "y" } do
      H.raises(function() m:set_submodule(path, L()) end, "AttributeError", '"' .. name .. '"')
    end
    H.raises(function() m:set_submodule("a.zz.q", L()) end, "AttributeError", "zz")
    H.raises(function() m:set_submodule("a.", L()) end, "KeyError", "empty")
    H.raises(function() m:set_submodule("x", L(), { strikt = true }) end, "TypeError", "strikt")
    assert.equal(before, keys(m.a._modules))
    assert.is_false(m:hasattr "x")
  end)

  it("M77: the base class has no extra state to give or take", function()
    H.raises(function() Net():get_extra_state() end, "NotImplementedError", "Net has no get_extra_state")
    H.raises(function() Net():set_extra_state(1) end, "NotImplementedError", "Net has no set_extra_state")
  end)

  it("M78: paths use the names of slots: the first layer of a Sequential is 0, and at position 1", function()
    local m = nn.Sequential(L(), nn.ReLU())
    assert.equal(m[1], m:get_submodule "0")
    assert.equal(m[1].bias, m:get_parameter "0.bias")
    H.raises(function() m:get_submodule "2" end, "AttributeError", '"2"')
  end)
end)
