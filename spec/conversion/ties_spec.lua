---Section 4 of docs/contracts/conversion.md: slots that hold the same tensor, in each mode.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local nn = tm.nn

---Two layers with one weight, and a third of its own.
local function tied(opts)
  local m = nn.Sequential(nn.Linear(2, 2, opts), nn.Linear(2, 2, opts), nn.Linear(2, 2, opts))
  m[2].weight = m[1].weight
  return m
end

local function count(m)
  local n = 0
  for _ in m:parameters() do n = n + 1 end
  return n
end

K.guard()

describe("tied parameters", function()
  K.each_mode("C58 C63 T22: stay tied where the object stays; overwrite unties them", function(mode)
    local m = tied()
    local keys = m:state_dict():keys()
    local w = m[1].weight
    w.grad = tm.ones(2, 2)
    m:double()
    if not mode.kept then
      assert.is_true(m[1].weight ~= m[2].weight and m[1].weight ~= w)
      assert.is_true(m[1].weight:storage_id() ~= m[2].weight:storage_id())
      assert.same(m[1].weight:tolist(), m[2].weight:tolist())
      assert.equal(6, count(m))
    else
      assert.is_true(m[1].weight == w and m[2].weight == w)
      assert.equal(5, count(m))
    end
    assert.same(keys, m:state_dict():keys())
    assert.equal("float64", m[2].weight.dtype)
    assert.equal("float64", m[2].weight.grad.dtype)
  end)

  it("C58 T90: a conversion that changes nothing gives, with overwrite, two objects over one storage", function()
    local m = tied()
    local w = m[1].weight
    K.with_flags { overwrite = true }(m.to, m, "cpu")
    assert.is_true(m[1].weight ~= m[2].weight and m[1].weight ~= w)
    assert.equal(w:storage_id(), m[1].weight:storage_id())
    assert.equal(w:storage_id(), m[2].weight:storage_id())
  end)

  it("C63: an optimizer made after the tie broke steps the two copies separately", function()
    local m = tied()
    K.with_flags { overwrite = true }(m.double, m)
    local o = tm.optim.SGD(m:parameters(), { lr = 1 })
    local old = m[2].weight:detach():clone()
    m[1](tm.ones(1, 2, { dtype = "float64" })):sum():backward()
    o:step()
    assert.near_tensor(old - 1, m[1].weight:detach())
    assert.near_tensor(old, m[2].weight:detach())
  end)

  K.each_mode("C59 C60 T23: from meta to memory and back they come apart, but for swap mode", function(mode)
    local m = tied { device = "meta" }
    local w = m[1].weight
    m:to_empty { device = "cpu" }
    assert.equal(mode.swap, m[1].weight == m[2].weight)
    assert.equal(mode.swap, m[1].weight == w)
    assert.equal(mode.swap, m[1].weight:storage_id() == m[2].weight:storage_id())
    assert.equal("cpu", m[2].weight.device)
    m[2].weight = m[1].weight
    m:to "meta"
    assert.equal(mode.swap, m[1].weight == m[2].weight)
    assert.equal("meta", m[2].weight.device)
  end)

  K.each_mode("C61 T24: two parameters over one storage get a storage each", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[2].weight = nn.Parameter(m[1].weight)
    assert.equal(m[1].weight:storage_id(), m[2].weight:storage_id())
    m:double()
    assert.is_true(m[1].weight:storage_id() ~= m[2].weight:storage_id())
    assert.same(m[1].weight:tolist(), m[2].weight:tolist())
  end)

  K.each_mode("C62 T25: a buffer in two slots becomes two", function()
    local m = nn.Sequential(nn.Identity(), nn.Identity())
    local b = tm.randn(3)
    m[1]:register_buffer("b", b)
    m[2]:register_buffer("b", b)
    m:double()
    assert.is_true(m[1].b ~= m[2].b and m[1].b ~= b and m[2].b ~= b)
    assert.is_true(m[1].b:storage_id() ~= m[2].b:storage_id())
    assert.same(m[1].b:tolist(), m[2].b:tolist())
  end)
end)

describe("nn.tied_groups and nn.retie", function()
  it("C64: lists the paths of each tie, buffers too, in the order of registration", function()
    local m = tied()
    m:append(nn.Identity())
    m[4]:register_buffer("a", tm.zeros(1))
    m[4]:register_buffer("b", m[4].a)
    m[3].bias = m[1].bias
    m:register_parameter("shared", m[1].weight)
    local groups = nn.tied_groups(m)
    assert.equal(3, #groups)
    local function paths(g) return table.concat(g, " ") end
    local seen = {}
    for _, g in ipairs(groups) do seen[paths(g)] = true end
    assert.is_true(seen["shared 0.weight 1.weight"] or seen["shared 1.weight 2.weight"])
    assert.same({}, nn.tied_groups(nn.Linear(2, 2)))
    m:double() -- nothing but the tied buffers came apart
    nn.retie(groups)
    assert.equal(m[4].a, m[4].b)
    assert.equal(m.shared, m[2].weight)
  end)

  it("C64: a module in two places is no tie", function()
    local l = nn.Linear(2, 2)
    assert.same({}, nn.tied_groups(nn.Sequential(l, nn.ReLU(), l)))
  end)

  K.each_mode("C64 C58 T115: restore what a conversion took apart", function()
    local m = tied()
    m(tm.ones(1, 2)):sum():backward()
    local groups = nn.tied_groups(m)
    m:double()
    nn.retie(groups)
    assert.equal(m[1].weight, m[2].weight)
    assert.equal(5, count(m))
    assert.equal("float64", m[1].weight.grad.dtype)
    m(tm.ones(1, 2, { dtype = "float64" })):sum():backward()
  end)

  K.each_mode("C64 C59: restore them after meta", function()
    local m = tied { device = "meta" }
    local groups = nn.tied_groups(m)
    m:to_empty { device = "cpu" }
    nn.retie(groups)
    assert.equal(m[1].weight, m[2].weight)
    assert.is_true(nn.is_parameter(m[2].weight))
    assert.same({}, nn.tied_groups(nn.Linear(1, 1)))
    assert.same(groups[1], nn.tied_groups(m)[1])
  end)

  it("C64: refuse slots that no longer go together, and change nothing then", function()
    local m = tied()
    m[3].bias = m[1].bias
    local groups = nn.tied_groups(m)
    K.with_flags { overwrite = true }(m.double, m)
    m[2].weight = nn.Parameter(tm.zeros(3, 3))
    local b1, b3 = m[1].bias, m[3].bias
    H.raises(function() nn.retie(groups) end, "ValueError", "weight is float64 %(2, 2%) on cpu, but .*weight is float32 %(3, 3%)")
    assert.is_true(m[1].bias == b1 and m[3].bias == b3 and b1 ~= b3)
    m[2].weight = nil
    H.raises(function() nn.retie(groups) end, "ValueError", "no .*weight any more")
    H.raises(function() nn.retie { { "a" } } end, "TypeError", "tied_groups")
    H.raises(function() nn.retie() end, "TypeError", "tied_groups")
  end)
end)
