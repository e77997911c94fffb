local tm = require "tmod" -- luacheck: ignore 211 (loaded first, as everywhere)
local OrderedDict = require "tmod.ordered"

-- A multiple assignment sets its targets from right to left, so the specs set key by key.
local function abc()
  local d = OrderedDict.new()
  d.a = 1
  d.b = 2
  d.c = 3
  return d
end

local function keys_of(d) return table.concat(OrderedDict.keys(d), " ") end

describe("OrderedDict", function()
  it("M7: keeps the order of first insertion and replaces in place", function()
    local d = OrderedDict.new()
    for i, k in ipairs {"z", "a", 3, 1} do d[k] = i end
    d.z = 10
    assert.same({"z", "a", 3, 1}, d:keys())
    assert.same({10, 2, 3, 4}, d:values())
    assert.equal(4, d:len())
  end)

  it("M7: puts a key that was deleted and set again last", function()
    local d = abc()
    d.a = nil
    assert.equal("b c", keys_of(d))
    assert.is_nil(d.a)
    d.a = 4
    assert.equal("b c a", keys_of(d))
    d.unknown = nil
    assert.equal(3, d:len())
  end)

  it("stores false", function()
    local d = OrderedDict.new()
    d.a = false
    assert.equal(false, d.a)
    d.a = false
    assert.equal(1, d:len())
  end)

  it("M7: reads data before methods", function()
    local d = OrderedDict.new()
    assert.is_function(d.keys)
    assert.is_nil(OrderedDict.get(d, "keys"))
    d.keys = "data"
    d.len = 7
    assert.equal("data", d.keys)
    assert.same({"keys", "len"}, OrderedDict.keys(d))
    assert.equal(2, OrderedDict.len(d))
    d.keys = nil
    assert.is_function(d.keys)
  end)

  it("M7: iterates over a snapshot", function()
    local d, seen = abc(), {}
    for k, v in d:pairs() do
      seen[#seen + 1] = k .. v
      d[k] = nil
      d[k .. k] = v
    end
    assert.same({"a1", "b2", "c3"}, seen)
    assert.equal("aa bb cc", keys_of(d))
  end)

  it("M8: answers # and pairs where the LuaJIT asks tables for them, and len() and pairs() everywhere", function()
    local d = abc()
    local mt = getmetatable(d)
    assert.equal(3, d:len())
    assert.equal(3, mt.__len(d))
    local seen = {}
    for k, v in mt.__pairs(d) do seen[#seen + 1] = k .. v end
    assert.same({"a1", "b2", "c3"}, seen)
  end)

  it("shows the list of its keys, which follows it", function()
    local d = abc()
    local keys = OrderedDict.live_keys(d)
    d.a = nil
    d.z = 1
    assert.same({"b", "c", "z"}, keys)
    assert.equal(keys, OrderedDict.live_keys(d))
  end)

  it("carries metadata that is no key", function()
    local d = OrderedDict.new()
    d._metadata = {fc = {version = 1}}
    assert.equal(0, d:len())
    assert.equal(1, d._metadata.fc.version)
  end)

  it("clones values that can be cloned, once each, and metadata", function()
    local d = OrderedDict.new()
    local made = 0
    local value = {clone = function() made = made + 1 return {copy = made} end}
    d.a = value
    d.b = value
    d.n = 5
    d._metadata = {fc = {version = 2}}
    local e = d:clone()
    assert.equal("a b n", keys_of(e))
    assert.equal(1, e.a.copy)
    assert.equal(e.a, e.b)
    assert.equal(5, e.n)
    assert.same({fc = {version = 2}}, e._metadata)
    assert.are_not.equal(d._metadata.fc, e._metadata.fc)
    e.n = nil
    assert.equal(5, d.n)
  end)

  it("keeps apart dictionaries that use equal keys", function()
    local d, e = OrderedDict.new(), OrderedDict.new()
    d.x = 1
    assert.is_nil(e.x)
    assert.is_true(OrderedDict.is(d))
    assert.is_false(OrderedDict.is({}))
    assert.equal("OrderedDict(x)", tostring(d))
  end)
end)
