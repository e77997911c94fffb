---What no chapter of docs/contracts/module.md has to itself: calls, files, conversions, memory.
local H = require "spec.helper"
local tm = require "tmod"
local nn, F = tm.nn, tm.nn.functional

local function L() return nn.Linear(2, 2) end
local function P(t) return nn.Parameter(t or tm.zeros(1)) end

local Net = nn.Module:extend "my.Net"
local function N() return Net() end

describe("nn.Module: a call", function()
  it("returns as many results as forward does, nil among them", function()
    local m = N()
    for n = 0, 6 do
      m.forward = function() return unpack({ 1, nil, 3, nil, 5 }, 1, n) end
      local results = nn.args(m())
      assert.equal(n, results.n)
      for i = 1, n do assert.equal(({ 1, nil, 3, nil, 5 })[i], results[i]) end
    end
    m.forward = function(_, ...) return ... end
    assert.equal(4, nn.args(m(nil, 2, nil, nil)).n)
    assert.equal(0, nn.args(m()).n)
  end)
end)

describe("nn.Module: state dictionaries", function()
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

describe("nn.Module: conversions (M240)", function()
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
