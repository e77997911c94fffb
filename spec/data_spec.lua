local H = require "spec.helper"
local tm = require "tmod"
local data = tm.data

local function rows(n) return tm.arange(1, n + 1, { dtype = "int64" }) end

---All values of an epoch, in order.
local function epoch(loader)
  local list = {}
  for x in loader:batches() do
    for _, v in ipairs(x:tolist()) do list[#list + 1] = v end
  end
  return list
end

local function sorted(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end

describe("tm.data.TensorDataset", function()
  local x, y = tm.arange(12):view(4, 3), rows(4)
  local ds = data.TensorDataset(x, y)

  it("gives rows by position from 1", function()
    assert.equal(4, ds:len())
    local a, b = ds:get(2)
    assert.same({ 3, 4, 5 }, a:tolist())
    assert.equal(2, b:item())
  end)

  it("gives a batch of rows at once", function()
    local a, b = ds:batch(tm.tensor({ 4, 1 }, { dtype = "int64" }))
    assert.same({ { 9, 10, 11 }, { 0, 1, 2 } }, a:tolist())
    assert.same({ 4, 1 }, b:tolist())
  end)

  it("refuses positions that are not there, and tensors that do not fit", function()
    for _, i in ipairs { 0, 5, -1, 1.5 } do H.raises(function() ds:get(i) end, "IndexError", "4") end
    H.raises(function() data.TensorDataset(x, rows(3)) end, "ValueError", "3 rows, expected 4")
    H.raises(function() data.TensorDataset(x, 3) end, "TypeError", "argument 2")
    H.raises(function() data.TensorDataset() end, "ValueError")
  end)
end)

describe("tm.data.Subset and random_split", function()
  it("splits without loss, the same way for the same seed", function()
    local ds = data.TensorDataset(rows(10))
    local a, b = data.random_split(ds, { 7, 3 }, { seed = 5 })
    assert.equal(7, a:len())
    local all = {}
    for i = 1, 7 do all[i] = a:get(i):item() end
    for i = 1, 3 do all[7 + i] = b:get(i):item() end
    assert.same(rows(10):tolist(), sorted(all))
    assert.not_same(rows(10):tolist(), all)
    local c = data.random_split(ds, { 7, 3 }, { seed = 5 })
    assert.same(a.positions:tolist(), c.positions:tolist())
    local d = data.random_split(ds, { 7, 3 }, { seed = 6 })
    assert.not_same(a.positions:tolist(), d.positions:tolist())
  end)

  it("takes fractions", function()
    local a, b, c = data.random_split(data.TensorDataset(rows(10)), { 0.5, 0.25, 0.25 }, { seed = 1 })
    assert.same({ 6, 2, 2 }, { a:len(), b:len(), c:len() })
  end)

  it("refuses sizes that do not add up", function()
    H.raises(function() data.random_split(data.TensorDataset(rows(10)), { 5, 4 }, { seed = 1 }) end, "ValueError", "9, expected 10")
  end)

  it("nests", function()
    local inner = data.Subset(data.TensorDataset(rows(10)), { 9, 5, 7 })
    local outer = data.Subset(inner, { 3, 1 })
    assert.equal(7, outer:get(1):item())
    assert.same({ 9, 7 }, outer:batch(tm.tensor({ 2, 1 }, { dtype = "int64" })):tolist())
    H.raises(function() outer:get(3) end, "IndexError")
  end)
end)

describe("tm.data.DataLoader", function()
  it("gives batches in order, the last one smaller", function()
    local loader = data.DataLoader(data.TensorDataset(rows(7), rows(7) * 10), { batch_size = 3 })
    local sizes = {}
    for x, y in loader:batches() do
      sizes[#sizes + 1] = x:len()
      assert.same((x * 10):tolist(), y:tolist())
    end
    assert.same({ 3, 3, 1 }, sizes)
    assert.equal(3, loader:len())
    assert.same(rows(7):tolist(), epoch(loader))
  end)

  it("leaves out a last batch that is not full when asked", function()
    local loader = data.DataLoader(data.TensorDataset(rows(7)), { batch_size = 3, drop_last = true })
    assert.equal(2, loader:len())
    assert.equal(6, #epoch(loader))
  end)

  it("shuffles anew each epoch, the same way for the same seed", function()
    local function loader(seed) return data.DataLoader(data.TensorDataset(rows(20)), { batch_size = 6, shuffle = true, seed = seed }) end
    local one, two = loader(3), loader(3)
    local a, b = epoch(one), epoch(one)
    assert.same(rows(20):tolist(), sorted(a))
    assert.not_same(a, b)
    assert.same(a, epoch(two))
    assert.same(b, epoch(two))
    assert.not_same(a, epoch(loader(4)))
  end)

  it("leaves the default generator alone, and without a seed follows it", function()
    tm.manual_seed(1)
    local before = tm.default_generator:get_state():tolist()
    epoch(data.DataLoader(data.TensorDataset(rows(9)), { shuffle = true, seed = 3 }))
    assert.same(before, tm.default_generator:get_state():tolist())
    local function order()
      tm.manual_seed(1)
      return epoch(data.DataLoader(data.TensorDataset(rows(9)), { shuffle = true }))
    end
    assert.same(order(), order())
  end)

  it("gives copies: a batch changed in place leaves the data alone", function()
    local x = rows(4)
    for b in data.DataLoader(data.TensorDataset(x), { batch_size = 2 }):batches() do b:mul_(0) end
    assert.same({ 1, 2, 3, 4 }, x:tolist())
  end)

  it("stacks what a dataset in Lua gives: tensors, numbers, booleans, strings", function()
    local Squares = data.Dataset:extend "Squares"
    function Squares:init(n) self.n = n end
    function Squares:len() return self.n end
    function Squares:get(i) return tm.tensor { i, i * i }, i / 2, i % 2 == 0, "s" .. i end
    local seen = {}
    for x, half, even, name in data.DataLoader(Squares(3), { batch_size = 2 }):batches() do
      seen[#seen + 1] = { x:tolist(), half:tolist(), even:tolist(), name }
    end
    assert.same({
      { { { 1, 1 }, { 2, 4 } }, { 0.5, 1 }, { false, true }, { "s1", "s2" } },
      { { { 3, 9 } }, { 1.5 }, { false }, { "s3" } },
    }, seen)
  end)

  it("hands the samples to a collate function of one's own", function()
    local loader = data.DataLoader(data.TensorDataset(rows(3), rows(3)), { batch_size = 2, collate = function(samples)
      return #samples, samples[1][2]:item()
    end })
    local seen = {}
    for n, first in loader:batches() do seen[#seen + 1] = { n, first } end
    assert.same({ { 2, 1 }, { 1, 3 } }, seen)
  end)

  it("takes an empty dataset", function()
    local loader = data.DataLoader(data.TensorDataset(tm.zeros(0, 3)), { batch_size = 2 })
    assert.equal(0, loader:len())
    for _ in loader:batches() do error "no batch expected" end
  end)

  it("goes through an epoch from inside and outside of a scope", function()
    local loader, seen = data.DataLoader(data.TensorDataset(rows(6)), { batch_size = 2, shuffle = true, seed = 1 }), {}
    local next_batch
    tm.scope(function() next_batch = loader:batches() end)
    for x in next_batch do tm.scope(function() seen[#seen + 1] = x:sum():item() end) end
    assert.equal(21, seen[1] + seen[2] + seen[3])
  end)

  it("refuses bad options and samples, naming them", function()
    local ds = data.TensorDataset(rows(3))
    H.raises(function() data.DataLoader(3) end, "TypeError", "dataset")
    H.raises(function() data.DataLoader(ds, { batch_size = 0 }) end, "ValueError", "batch_size is 0")
    H.raises(function() data.DataLoader(ds, { shuffle = 1 }) end, "TypeError", "shuffle")
    H.raises(function() data.DataLoader(ds, { batchsize = 1 }) end, "TypeError", "batchsize")
    H.raises(function() data.DataLoader(ds, { collate = 1 }) end, "TypeError", "collate")
    local Bad = data.Dataset:extend "Bad"
    H.raises(function() Bad():len() end, "NotImplementedError", "Bad has no len")
    function Bad.len() return 2 end
    function Bad.get() return {} end
    H.raises(function() data.DataLoader(Bad()):batches()() end, "TypeError", "collate")
  end)
end)
