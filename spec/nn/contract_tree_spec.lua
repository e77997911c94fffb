---Chapter 8 of docs/contracts/module.md: operations on the whole tree.
local H = require "spec.helper"
local tm = require "tmod"

local nn = tm.nn
local Net = nn.Module:extend "my.Net"

local function L() return nn.Linear(2, 2) end

---A child of both children.
local function diamond(shared)
  local m = Net()
  m.x = Net()
  m.y = Net()
  m.x.s = shared
  m.y.s = shared
  return m
end

describe("nn.Module:apply", function()
  it("case 35, M79: visits children first, a module of two parents twice, and among one's children each once", function()
    local shared = L()
    local m = diamond(shared)
    m.x.again = shared
    m.x:add_module "none"
    local seen = {}
    assert.equal(m, m:apply(function(n)
      seen[#seen + 1] = n
      return "ignored"
    end))
    local expected = { shared, m.x, shared, m.y, m }
    assert.equal(#expected, #seen)
    for i, n in ipairs(expected) do assert.equal(n, seen[i]) end
  end)

  it("M79: calls each child's own apply, and wants a function", function()
    local Mine = nn.Module:extend "Mine"
    function Mine:apply(fn)
      self.seen = true
      return nn.Module.apply(self, fn)
    end
    local m = Net()
    m.c = Mine()
    m:apply(function() end)
    assert.is_true(m.c.seen)
    H.raises(function() m:apply() end, "TypeError", "apply: expected a function, got nil")
  end)
end)

describe("nn.Module:train and eval", function()
  local Frozen = nn.Module:extend "Frozen"
  function Frozen:train()
    self.calls = (self.calls or 0) + 1
    self.training = false
    return self
  end

  it("case 36, M80: want a boolean", function()
    local m = Net()
    for _, mode in ipairs { 1, "x", {} } do
      H.raises(function() m:train(mode) end, "ValueError", "train: mode must be a boolean, got " .. type(mode))
    end
    assert.is_true(m.training)
  end)

  it("case 36, M82: the field itself may be set to anything, for one module", function()
    local m = Net()
    m.l = L()
    m.training = "x"
    assert.equal("x", m.training)
    m.training = false
    assert.is_true(m.l.training)
  end)

  it("case 37, M80 M81: go through an override of train, once per parent, and return the module", function()
    local frozen = Frozen()
    local m = diamond(frozen)
    m.l = L()
    assert.equal(m, m:train())
    assert.is_false(frozen.training)
    assert.equal(2, frozen.calls)
    assert.is_true(m.x.training and m.l.training)
    assert.equal(frozen, frozen:eval())
    assert.equal(3, frozen.calls)
  end)

  it("case 35, M80: visit a shared child once for each parent", function()
    local count = 0
    local Counted = nn.Module:extend "Counted"
    function Counted:train(mode)
      count = count + 1
      return nn.Module.train(self, mode)
    end
    local m = diamond(Counted())
    m.x.again = m.x.s -- the same parent
    m:train()
    assert.equal(2, count)
    m:eval()
    assert.equal(4, count)
  end)

  it("M81: eval is train(false), also where train was overridden", function()
    local given
    local Spy = nn.Module:extend "Spy"
    function Spy:train(mode)
      given = mode
      return nn.Module.train(self, mode)
    end
    local m = Spy()
    m.l = L()
    assert.equal(m, m:eval())
    assert.is_false(given)
    assert.is_false(m.training or m.l.training)
  end)

  it("M86: train() and train(nil) both mean true", function()
    local m = Net()
    m.l = L()
    assert.is_true(m:eval():train().l.training)
    assert.is_true(m:eval():train(nil).l.training)
    assert.is_false(m:train(false).l.training)
  end)
end)

describe("nn.Module:requires_grad_", function()
  it("M83: sets it for every parameter of the tree, not for buffers, and returns the module", function()
    local m = Net()
    m.l = L()
    m.w = nn.Parameter(tm.zeros(1))
    m:register_buffer("b", tm.zeros(1))
    assert.equal(m, m:requires_grad_(false))
    for p in m:parameters() do assert.is_false(p.requires_grad) end
    m:requires_grad_()
    for p in m:parameters() do assert.is_true(p.requires_grad) end
    assert.is_false(m.b.requires_grad)
    H.raises(function() m:requires_grad_ "no" end, "TypeError", "got string")
  end)
end)

describe("nn.Module:zero_grad", function()
  ---A Linear with gradients, its bias frozen.
  local function trained()
    local l = L()
    l(tm.ones(1, 2)):sum():backward()
    l.bias.requires_grad = false
    return l
  end

  it("case 38, M84 M86: drops the gradients, also of frozen parameters", function()
    for _, opts in ipairs { {}, { set_to_none = true }, true, "nothing" } do
      local l = trained()
      if opts == "nothing" then l:zero_grad() else l:zero_grad(opts) end
      assert.is_nil(l.weight.grad)
      assert.is_nil(l.bias.grad)
    end
    L():zero_grad() -- without gradients
  end)

  it("case 38, M84 M86: or keeps the tensors, filled with zeros", function()
    for _, opts in ipairs { false, { set_to_none = false } } do
      local l = trained()
      local w, b = l.weight.grad, l.bias.grad
      l:zero_grad(opts)
      assert.equal(w, l.weight.grad)
      assert.equal(b, l.bias.grad)
      assert.same({ { 0, 0 }, { 0, 0 } }, w:tolist())
      assert.same({ 0, 0 }, b:tolist())
    end
    local l = L()
    l:zero_grad(false)
    assert.is_nil(l.weight.grad)
  end)

  it("case 38, M84: detaches a kept gradient that has a graph of its own", function()
    local l = L()
    l(tm.ones(1, 2)):sum():pow(2):backward { create_graph = true }
    local g = l.weight.grad
    assert.truthy(g.grad_fn)
    l:zero_grad(false)
    assert.equal(g, l.weight.grad)
    assert.is_nil(g.grad_fn)
    assert.is_false(g.requires_grad)
    assert.equal(0, g:abs():sum():item())
    local m = L()
    m.weight.grad = tm.ones(2, 2, { requires_grad = true })
    g = m.weight.grad
    m:zero_grad(false)
    assert.is_false(g.requires_grad)
    assert.equal(g, m.weight.grad)
    assert.equal(0, g:sum():item())
  end)

  it("M86: knows one option", function()
    H.raises(function() L():zero_grad { set_none = true } end, "TypeError", "set_none.*set_to_none")
    H.raises(function() L():zero_grad(0) end, "TypeError", "got number")
  end)
end)

describe("nn.Module:share_memory", function()
  it("M85: is not provided", function() assert.is_nil(Net().share_memory) end)
end)
