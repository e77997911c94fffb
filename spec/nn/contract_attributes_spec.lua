---Chapter 3 of docs/contracts/module.md: assigning, reading and deleting attributes.
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
---What is registered: names of parameters | buffers | children.
local function slots(m) return keys(m._parameters) .. "|" .. keys(m._buffers) .. "|" .. keys(m._modules) end

describe("nn.Module: assigning a Parameter", function()
  it("case 13, M25: takes the name from a buffer, and its mark with it", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m.b = P()
    assert.equal("b||", slots(m))
    assert.is_nil(next(m._non_persistent_buffers_set))
    m:delattr "b"
    m:register_buffer("b", t1())
    assert.equal("b", keys(m:state_dict()))
  end)

  it("M25: takes the name from a child, and keeps the place of a parameter", function()
    local m = Net()
    m.p = P()
    m.c = L()
    m.c = P()
    m.p = P()
    assert.equal("p c||", slots(m))
  end)

  it("M25: runs the checks of register_parameter", function()
    local m = Net()
    H.raises(function() m["a.b"] = P() end, "KeyError", "a.b")
    H.raises(function() m[""] = P() end, "KeyError", "empty")
    H.raises(function() m.forward = P() end, "KeyError", "forward")
    assert.equal("||", slots(m))
  end)

  it("case 15, M26: replaces an ordinary attribute", function()
    local m = Net()
    for name, value in pairs { x = 5, y = t1(), z = false } do
      m[name] = value
      m[name] = P()
      assert.is_true(nn.is_parameter(m[name]))
      assert.equal(m[name], m:get_parameter(name))
      m:delattr(name)
      assert.is_false(m:hasattr(name)) -- not there under the parameter
    end
  end)
end)

describe("nn.Module: assigning to a parameter", function()
  it("case 4, M27: refuses a plain tensor", function()
    local m, p = Net(), P()
    m.p = p
    H.raises(function() m.p = t1() end, "TypeError", 'cannot assign a tensor to parameter "p" %(an nn.Parameter or nil expected%)')
    assert.equal(p, m.p)
  end)

  it("case 5, M27: refuses a Module", function()
    local m, p = Net(), P()
    m.p = p
    H.raises(function() m.p = L() end, "TypeError", 'cannot assign a module to parameter "p"')
    assert.equal(p, m.p)
    assert.equal("p||", slots(m))
  end)

  it("M27: refuses a Buffer, a number, and false, also when the slot has no value", function()
    local m = Net()
    m.p = P()
    m:register_parameter "q"
    for _, value in ipairs { nn.Buffer(t1()), 3, "x", false, {} } do
      H.raises(function() m.p = value end, "TypeError", '"p"')
      H.raises(function() m.q = value end, "TypeError", '"q"')
    end
    H.raises(function() m.q = L() end, "TypeError", '"q"')
  end)
end)

describe("nn.Module: assigning a Module", function()
  it("case 14, M28: takes the name from a buffer with its mark, and from an attribute", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m.b = L()
    m.x = 5
    m.x = L()
    assert.equal("||b x", slots(m))
    assert.is_nil(next(m._non_persistent_buffers_set))
    m:delattr "x"
    assert.is_nil(m.x)
  end)

  it("case 24, M28 M36 M44: is refused under a name with a dot or none", function()
    local m = Net()
    H.raises(function() m["a.b"] = L() end, "KeyError", "dot.*a.b")
    H.raises(function() m[""] = L() end, "KeyError", "empty")
    assert.equal("||", slots(m))
  end)

  it("case 25, M35 M44: is refused under the name of a method or field of the class", function()
    local m = Net()
    H.raises(function() m.forward = L() end, "KeyError", '"forward"')
    H.raises(function() m.training = L() end, "KeyError", '"training"')
    H.raises(function() m.forward = P() end, "KeyError", '"forward"')
    H.raises(function() m(1) end, "NotImplementedError", "my.Net has no forward")
    assert.is_true(m.training)
  end)
end)

describe("nn.Module: assigning to a child", function()
  it("case 7, M29 M41: refuses what is neither Module, Parameter nor nil", function()
    local m, c = Net(), L()
    m.c = c
    m:add_module "none"
    for _, value in ipairs { 3, t1(), false, nn.Buffer(t1()), "x", {} } do
      H.raises(function() m.c = value end, "TypeError", 'module "c" %(an nn.Module or nil expected%)')
      H.raises(function() m.none = value end, "TypeError", '"none".*nn.Module or nil expected')
    end
    assert.equal(c, m.c)
  end)

  it("M29: gives way to a Parameter", function()
    local m = Net()
    m.c = L()
    m.c = P()
    assert.equal("c||", slots(m))
  end)
end)

describe("nn.Module: assigning to a buffer", function()
  it("case 8, M30: keeps the name out of state_dict if it was", function()
    local m = Net()
    m:register_buffer("b", t1(), { persistent = false })
    m:register_buffer("c", t1())
    m.b = tm.ones(1)
    m.c = tm.ones(1)
    assert.equal("c", keys(m:state_dict()))
    assert.equal("b c", names(m:named_buffers()))
    assert.equal(1, m.b:item())
  end)

  it("case 9, M30 M33: keeps it out also after nil", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m.b = nil
    assert.is_true(m:hasattr "b")
    assert.equal("", names(m:named_buffers()))
    m.b = t1()
    assert.equal("b", names(m:named_buffers()))
    assert.equal("", keys(m:state_dict()))
  end)

  it("case 10, M30: a Buffer object brings its own persistence", function()
    local m = Net()
    m:register_buffer("b", t1(), false)
    m.b = nn.Buffer(t1())
    assert.equal("b", keys(m:state_dict()))
    m.b = nn.Buffer(t1(), false)
    assert.equal("", keys(m:state_dict()))
  end)

  it("M30 M41: refuses anything but a tensor, a Buffer or nil", function()
    local m = Net()
    m:register_buffer("b", t1())
    for _, value in ipairs { 3, "x", false, {} } do
      H.raises(function() m.b = value end, "TypeError", 'buffer "b" %(a tensor, an nn.Buffer or nil expected%)')
    end
    m.b = P() -- another kind
    assert.equal("b||", slots(m))
  end)
end)

describe("nn.Module: assigning a Buffer object", function()
  it("M31: registers it under a free name", function()
    local m = Net()
    m.b = nn.Buffer(t1())
    m.n = nn.Buffer(t1(), { persistent = false })
    assert.equal("|b n|", slots(m))
    assert.equal("b", keys(m:state_dict()))
    H.raises(function() m["a.b"] = nn.Buffer(t1()) end, "KeyError", "a.b")
  end)

  it("case 16, M31: is refused where an attribute or a field of the class has the name", function()
    local m = Net()
    m.x = 5
    H.raises(function() m.x = nn.Buffer(t1()) end, "KeyError", '"x"')
    H.raises(function() m.training = nn.Buffer(t1()) end, "KeyError", '"training"')
    assert.equal(5, m.x)
    assert.is_true(m.training)
  end)
end)

describe("nn.Module: assigning anything else", function()
  it("M32: never registers a plain tensor under a new name", function()
    local m = Net()
    m.t = t1()
    m.p_data = P().data
    m.made = P() * 2
    assert.equal("||", slots(m))
    assert.is_true(m:hasattr "t")
  end)

  it("M33: lets the right kind back into the place that nil left", function()
    local m = Net()
    m.a = L()
    m.b = L()
    m.a = nil
    assert.equal("b", names(m:named_children()))
    m.a = L()
    assert.equal("a b", names(m:named_children()))
    m.absent = nil
    assert.is_false(m:hasattr "absent")
  end)

  it("M39: nil empties a slot, removes an attribute, and does nothing to an unknown name", function()
    local m = Net()
    m.p = P()
    m.x = 1
    m.p = nil
    m.x = nil
    m.unknown = nil
    assert.equal("p||", slots(m))
    assert.is_nil(m.p)
    assert.is_false(m:hasattr "x" or m:hasattr "unknown")
    H.raises(function() m.p = t1() end, "TypeError", '"p"') -- still a parameter
  end)

  it("M41: false is a value of attributes", function()
    local m = Net()
    m.x = false
    assert.is_false(m.x)
    assert.is_true(m:hasattr "x")
  end)

  it("case 22, M37 M44: a refused value leaves the module as it was", function()
    local m, child, b = Net(), L(), t1()
    m:register_buffer("w", b, false)
    m.c = child
    m.x = 5
    local q = P() * 2
    rawset(q, "_parameter", true) -- as an operator in place would leave it
    for _, name in ipairs { "w", "c", "x", "fresh" } do
      H.raises(function() m[name] = q end, "ValueError", '"' .. name .. '".*forward')
    end
    assert.equal("|w|c", slots(m))
    assert.equal(b, m.w)
    assert.equal(child, m.c)
    assert.equal(5, m.x)
    assert.is_true(m._non_persistent_buffers_set.w)
    assert.is_false(m:hasattr "fresh")
  end)
end)

describe("nn.Module: reading", function()
  it("M34: finds ordinary attributes, then the class, then parameters, buffers and children", function()
    local C = nn.Module:extend "C"
    C.gain = 2
    local m = C()
    assert.equal(2, m.gain)
    m.gain = 3
    assert.equal(3, m.gain)
    m.gain = nil
    assert.equal(2, m.gain)
    m.p = P()
    m:register_buffer("b", t1())
    m.c = L()
    local p, b, c = m.p, m.b, m.c
    C.p, C.b, C.c = "p", "b", "c" -- of the class, later: hides what is registered
    assert.same({ "p", "b", "c" }, { m.p, m.b, m.c })
    C.p, C.b, C.c = nil, nil, nil
    assert.equal(p, m.p)
    assert.equal(b, m.b)
    assert.equal(c, m.c)
    assert.equal(c, m:getattr "c")
  end)

  it("M42: gives nil for what is absent and for a slot without a value, which hasattr tells apart", function()
    local m = Net()
    m:register_parameter "bias"
    assert.is_nil(m.absent)
    assert.is_nil(m.bias)
    assert.is_true(m:hasattr "bias")
    assert.is_false(m:hasattr "absent")
  end)

  it("M40: getattr is strict and hasattr sees attributes, the class and slots", function()
    local m = Net()
    m.x = false
    m.p = P()
    m:add_module "none"
    assert.is_false(m:getattr "x")
    assert.equal(m.p, m:getattr "p")
    assert.is_nil(m:getattr "none")
    assert.equal(m.forward, m:getattr "forward")
    for _, name in ipairs { "x", "p", "none", "forward", "training" } do assert.is_true(m:hasattr(name)) end
    H.raises(function() m:getattr "absent" end, "AttributeError", 'my.Net has no attribute "absent"')
    H.raises(function() m:getattr() end, "AttributeError", "nil")
  end)

  it("M43: takes a forward of its own for one instance, which gets the module first", function()
    local m, other = Net(), Net()
    m.forward = function(self, x) return self, x end
    local a, b = m(4)
    assert.equal(m, a)
    assert.equal(4, b)
    H.raises(function() other(4) end, "NotImplementedError")
    m.forward = nil -- does not hide the class
    H.raises(function() m(4) end, "NotImplementedError")
    m.train = false
    assert.is_false(m.train)
  end)

  it("M45: shows the live registries; writing to them skips every check", function()
    local m = Net()
    m.p = P()
    m.c = L()
    m:register_buffer("b", t1(), false)
    assert.equal(m.p, OrderedDict.get(m._parameters, "p"))
    assert.equal("p|b|c", slots(m))
    assert.equal(m._modules, m._modules)
    m._parameters.p = nil
    assert.is_nil(m.p)
    m._parameters["a.b"] = P()
    m._buffers.forward = t1()
    assert.equal("a.b", names(m:named_parameters(false)))
    assert.equal("b forward", names(m:named_buffers()))
    local seq = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    local last = L()
    seq(tm.zeros(1, 2))
    seq._modules["1"] = nil
    seq._modules["7"] = last -- as many as before, under other names
    assert.equal(last, seq[2])
    assert.same({ 1, 2 }, seq(tm.zeros(1, 2)):size())
  end)

  it("M46: knows no positions; a number as a string is a name", function()
    local m, child = Net(), L()
    m["0"] = child
    assert.equal(child, m["0"])
    H.raises(function() return m[1] end, "TypeError", "my.Net: cannot be indexed with a number: 1")
    H.raises(function() return m[0] end, "TypeError", "0")
    H.raises(function() m[1] = L() end, "TypeError", "my.Net")
    H.raises(function() m[child] = 1 end, "TypeError", "nn.Linear")
    assert.equal(child, nn.Sequential(child)[1])
  end)
end)

describe("nn.Module: deleting", function()
  it("M38 M40: removes a parameter, a buffer with its mark, a child or an attribute", function()
    local m = Net()
    m.p = P()
    m:register_buffer("b", t1(), false)
    m.c = L()
    m.x = 1
    for _, name in ipairs { "p", "b", "c", "x" } do
      m:delattr(name)
      assert.is_false(m:hasattr(name))
      assert.is_nil(m[name])
      H.raises(function() m:delattr(name) end, "AttributeError", 'my.Net has no attribute "' .. name .. '"')
    end
    assert.equal("||", slots(m))
    assert.is_nil(next(m._non_persistent_buffers_set))
  end)

  it("M38: removes slots without a value, and nothing of the class", function()
    local m = Net()
    m:register_buffer("b", nil)
    m:delattr "b"
    assert.is_false(m:hasattr "b")
    H.raises(function() m:delattr "forward" end, "AttributeError", "forward")
    m.forward = print
    m:delattr "forward"
    assert.equal(nn.Module.forward, m.forward)
  end)
end)

describe("nn.Module: cost of attributes", function()
  -- A process of its own: after aborts elsewhere LuaJIT gives up on a function for good. It also draws lots, so a loop
  -- gets a few chances.
  local preamble = [[
    local util = require "jit.util"
    local nn = require "tmod".nn
    local function compiles(f)
      local root, linked
      local function watch(what, trace, fn, _, parent)
        if what == "start" then root = fn == f and parent == nil and trace or nil
        elseif what == "stop" and trace == root then linked = util.traceinfo(trace).linktype end
      end
      for _ = 1, 10 do
        jit.flush()
        jit.attach(watch, "trace")
        f(1000)
        jit.attach(watch)
        if linked == "loop" then break end
      end
      return linked
    end
    local Inner = nn.Module:extend "Inner"
    function Inner:init() self.scale = 2 end
    function Inner:forward(x) return x * self.scale end
    local m
    local function work(n)
      local y = 0
      for _ = 1, n do y = y + m(1) end
      return y
    end
  ]]
  ---What the script prints about `m`: its value at 1, and how a loop of calls compiles.
  local function report(make)
    local script = H.file(preamble .. make .. "\nprint(work(1), compiles(work))")
    local _, out, err = H.shell(H.tmodrun .. " " .. script)
    assert.equal("", err)
    return out
  end

  it("reads parameters, children and attributes in compiled code, and calls a nest of modules (M34)", function()
    if not jit.status() then return pending "the JIT compiler is off" end
    assert.equal("5\tloop\n", report [[
      local A, B, C = nn.Module:extend "A", nn.Module:extend "B", nn.Module:extend "C"
      for class, child in pairs { [A] = B, [B] = C, [C] = Inner } do
        function class:init()
          self.child = child()
          self.w = nn.Parameter()
        end
        function class:forward(x) return self.child(x) + (self.w and 1 or 0) end
      end
      m = A()]])
  end)

  it("calls a Sequential of twenty in compiled code", function()
    if not jit.status() then return pending "the JIT compiler is off" end
    assert.equal("1048576\tloop\n", report [[
      local seq, twenty = nn.Sequential(), {}
      for i = 1, 20 do twenty[i] = Inner() end
      seq:extend(twenty)
      m = function(x) return (seq(x)) end]])
  end)
end)
