---Chapter 4 of docs/contracts/module.md: Parameter and Buffer.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Net = nn.Module:extend "my.Net"

local function keys(d) return table.concat(OrderedDict.keys(d), " ") end
local function names(iterator)
  local list = {}
  for name in iterator do list[#list + 1] = name end
  return table.concat(list, " ")
end

describe("nn.Parameter", function()
  it("M47: shares the memory of its data, which it leaves unchanged", function()
    local t = tm.ones(2)
    local p = nn.Parameter(t)
    assert.is_true(p.requires_grad and p.is_leaf)
    assert.is_false(t.requires_grad)
    assert.is_false(nn.is_parameter(t))
    tm.no_grad(function() p:mul_(3) end)
    assert.same({ 3, 3 }, t:tolist())
  end)

  it("M47: is an empty vector without data", function()
    assert.same({ 0 }, nn.Parameter():size())
    assert.is_true(nn.Parameter().requires_grad)
    assert.is_false(nn.Parameter(nil, false).requires_grad)
    H.raises(function() nn.Parameter(3) end, "TypeError", "data must be a tensor, got number")
    H.raises(function() nn.Parameter { 1, 2 } end, "TypeError", "got table")
  end)

  it("M47: is a leaf also when its data is not", function()
    local x = tm.ones(2, { requires_grad = true })
    local y = x * 2
    local p = nn.Parameter(y)
    assert.is_true(p.is_leaf)
    assert.is_nil(p.grad_fn)
    assert.is_false(y.is_leaf)
    p:sum():backward()
    assert.is_nil(x.grad)
    assert.same({ 1, 1 }, p.grad:tolist())
  end)

  it("M48: requires gradients unless told otherwise, also inside no_grad", function()
    local t = tm.ones(2)
    assert.is_true(tm.no_grad(nn.Parameter, t).requires_grad)
    assert.is_false(nn.Parameter(t, false).requires_grad)
    local ints = tm.zeros(2, { dtype = "int64" })
    for _, data in ipairs { ints, tm.zeros(2, { dtype = "bool" }) } do
      H.raises(function() nn.Parameter(data) end, "RuntimeError", "float")
      assert.equal(data.dtype, nn.Parameter(data, false).dtype)
    end
    assert.is_true(nn.Parameter(t:to "float16").requires_grad)
  end)

  it("case 31, M49: is a new object each time, also of a Parameter; an optimizer steps shared values once for each", function()
    local t, m = tm.zeros(2), Net()
    m.a = nn.Parameter(t)
    m.b = nn.Parameter(t)
    m.c = nn.Parameter(m.a)
    assert.equal("a b c", names(m:named_parameters()))
    assert.equal("a b c", keys(m:state_dict()))
    assert.equal(t:storage_id(), m.c:storage_id())
    for p in m:parameters() do p.grad = tm.ones(2) end
    tm.optim.SGD(m:parameters(), { lr = 1 }):step()
    assert.same({ -3, -3 }, t:tolist())
  end)

  it("M50: is what no operator, view, detach, clone or data gives", function()
    local p = nn.Parameter(tm.zeros(2))
    for _, r in ipairs { p * 2, p:detach(), p:clone(), p.data, p[1], p:view(2, 1), p:to "float64" } do
      assert.is_false(nn.is_parameter(r))
    end
    assert.is_true(nn.is_parameter(p))
    assert.is_true(nn.is_parameter(p:requires_grad_(false)))
    assert.is_true(nn.is_parameter(tm.no_grad(p.mul_, p, 2)))
    for _, v in ipairs { 3, "p", {}, Net() } do assert.is_false(nn.is_parameter(v)) end
    assert.is_false(nn.is_parameter(nil))
  end)

  it("M51: says in its print that it is one", function()
    assert.equal("Parameter containing:\ntensor([0., 0.], requires_grad=true)", tostring(nn.Parameter(tm.zeros(2))))
    assert.equal("Parameter containing:\ntensor([0.])", tostring(nn.Parameter(tm.zeros(1), false)))
  end)

  it("M53: is one parameter under as many names as it was given", function()
    local m, p = Net(), nn.Parameter(tm.ones(1))
    m.a = p
    m.b = p
    m.sub = Net()
    m.sub.c = p
    assert.equal("a", names(m:named_parameters()))
    assert.equal("a b sub.c", keys(m:state_dict()))
    local product = m.a * m.b * m.sub.c
    product:sum():backward()
    assert.equal(3, p.grad:item())
    local o = tm.optim.SGD(m:parameters(), { lr = 1 })
    o:step()
    assert.equal(-2, m.sub.c:item())
  end)

  it("M54: keeps its flag through conversions, which keep the object", function()
    local m = Net()
    m.w = nn.Parameter(tm.zeros(1), { requires_grad = false })
    local w = m.w
    m:double()
    assert.equal(w, m.w)
    assert.is_true(nn.is_parameter(w))
    assert.is_false(w.requires_grad)
    assert.equal("float64", w.dtype)
    H.raises(function() nn.Parameter(w, { requires_grad = 1 }) end, "TypeError", "requires_grad must be a boolean")
  end)

  it("M54: outlives the scope that made it, as a buffer does", function()
    local m = tm.scope(function()
      local n = Net()
      n.l = nn.Linear(2, 2)
      n:register_buffer("b", tm.ones(1))
      n.c = nn.Buffer(tm.ones(1))
      return n
    end)
    assert.same({ 2 }, m.l(tm.zeros(2)):size())
    assert.equal(1, m.b:item())
    assert.equal(1, m.c:item())
  end)
end)

describe("nn.Buffer", function()
  it("M52: shares the memory of its data and requires gradients as that does, detached", function()
    local t = tm.ones(2)
    local b = nn.Buffer(t)
    assert.is_true(nn.is_buffer(b))
    assert.is_false(nn.is_buffer(t))
    assert.is_false(b.requires_grad)
    b:mul_(3)
    assert.same({ 3, 3 }, t:tolist())
    local x = tm.ones(2, { requires_grad = true }) * 2
    local g = nn.Buffer(x)
    assert.is_true(g.requires_grad and g.is_leaf)
    assert.same({ 0 }, nn.Buffer():size())
    H.raises(function() nn.Buffer(3) end, "TypeError", "nn.Buffer: data must be a tensor, got number")
    local p = nn.Buffer(nn.Parameter(t))
    assert.is_true(p.requires_grad)
    assert.is_false(nn.is_parameter(p))
    assert.is_false(nn.is_buffer(nn.Parameter(b)))
  end)

  it("M52: carries the flag and its persistence to another module; a plain tensor that was registered carries none", function()
    local m, other = Net(), Net()
    m.b = nn.Buffer(tm.zeros(1), false)
    m:register_buffer("plain", tm.zeros(1))
    other.x = m.b
    other.y = m.plain
    assert.equal("x", names(other:named_buffers()))
    assert.equal("", keys(other:state_dict()))
    assert.equal(m.b, other.x)
    assert.equal(m.plain, other.y)
  end)

  it("M52: is what no operator and no detach gives", function()
    local b = nn.Buffer(tm.zeros(2))
    for _, r in ipairs { b * 2, b:detach(), b:clone(), b.data, b[1] } do assert.is_false(nn.is_buffer(r)) end
    assert.is_true(nn.is_buffer(b:add_(1)))
    assert.is_false(nn.is_buffer(nil))
  end)

  it("M54: takes persistence as an option or a bare boolean", function()
    local m = Net()
    m.a = nn.Buffer(tm.zeros(1), { persistent = false })
    m.b = nn.Buffer(tm.zeros(1), false)
    m.c = nn.Buffer(tm.zeros(1), true)
    assert.equal("c", keys(m:state_dict()))
    assert.equal("a b c", names(m:named_buffers()))
    H.raises(function() nn.Buffer(tm.zeros(1), { persist = true }) end, "TypeError", "persist.*persistent")
  end)
end)
