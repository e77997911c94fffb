---Conversions and swaps by the hundred thousand: nothing grows. Under a sanitizer, which is slow, a tenth of the numbers
---will do: a leak of one object for each call shows after a thousand calls.

local H = require "spec.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local nn = tm.nn

local FACTOR = H.sanitized and 10 or 1
local SWAPS, CONVERSIONS = 1e6 / FACTOR, 1e5 / FACTOR

local function resident()
  local file = io.open "/proc/self/statm"
  if not file then return 0 end
  local pages = tonumber(file:read "*a":match "%d+ (%d+)")
  file:close()
  return pages * 4096
end

local function count(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

---What could grow: exact numbers, and bytes of which some slack is the allocators'.
local function measure()
  tm.collect()
  local exact = tm.live()
  exact.in_use = tm.memory_stats().in_use
  exact.handles = B.C.tm_handles_count(B.handles)
  exact.registry, exact.kept = count(B.reg), count(B.kept)
  return exact, resident(), collectgarbage "count" * 1024
end

---Runs f(n / 20), which fills caches, and then f(n): the same is alive afterwards. Memory may differ by 2 MB, which is
---2 bytes for each of a million swaps and 20 for each of 100,000 conversions: less than any object. What grows once, as
---a heap does that waits longer for its collector, is no leak: that would grow each time.
local function does_not_grow(n, f)
  f(n / 20)
  local before, pages, heap = measure()
  local grown = math.huge
  for _ = 1, 3 do
    f(n)
    local uncollected = tm.live().tensors
    assert.is_true(uncollected < 140000, uncollected .. " tensors wait for a collection")
    local after, pages_after, heap_after = measure()
    for name, n_before in pairs(before) do -- fewer where what earlier specs left behind was collected only now
      assert.is_true(after[name] <= n_before, ("%s: %d before, %d after"):format(name, n_before, after[name]))
    end
    grown = heap_after - heap
    if not H.sanitized then grown = math.max(grown, pages_after - pages) end -- a sanitizer keeps what was freed
    if grown < 2 ^ 21 then return end
    pages, heap = pages_after, heap_after
  end
  error(("memory grows by %d KB each time"):format(grown / 1024))
end

describe("nothing grows", function()
  it("in a million swaps of tensors with fields, gradients and hooks", function()
    local a, b = tm.randn(3, { requires_grad = true }), tm.randn(2, 2, { requires_grad = true })
    a.name, b.name = "a", "b"
    a.grad = tm.ones(3)
    a:register_hook(function(g) return g end)
    does_not_grow(SWAPS, function(n) for _ = 1, n do tm.swap_tensors(a, b) end end)
    assert.same({ 3 }, a:size()) -- n and n / 20 are even
    assert.equal("a", a.name)
    assert.near_tensor({ 1, 1, 1 }, a.grad)
  end)

  it("in a million swaps of plain tensors", function()
    local a, b = tm.ones(3), tm.zeros(2)
    local id, impl = tm.id(a), tm.impl_id(a)
    does_not_grow(SWAPS, function(n) for _ = 1, n do tm.swap_tensors(a, b) end end)
    assert.equal(id, tm.id(a))
    assert.equal(impl, tm.impl_id(a))
  end)

  for mode_name, mode in pairs { default = {}, overwrite = { overwrite = true }, swap = { swap = true } } do
    it(("[%s] in conversions, a hundred thousand in the three modes"):format(mode_name), function()
      local model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
      model(tm.randn(4, 2)):sum():backward()
      local weight, values = model[1].weight, model[1].weight:tolist()
      does_not_grow(CONVERSIONS / 3, function(n)
        tm.future.with(mode, function()
          for _ = 1, n / 2 do model:to "float64":to "float32" end
        end)
      end)
      assert.near_tensor(values, model[1].weight, 0) -- float32 goes through float64 unchanged
      assert.equal(mode_name ~= "overwrite", weight == model[1].weight)
    end)
  end

  it("in passes, conversions and loads by turns", function()
    local model, x = nn.Linear(2, 3), tm.randn(4, 2)
    local sd = nn.Linear(2, 3):state_dict()
    does_not_grow(CONVERSIONS / 20, function(n)
      for i = 1, n do
        local mode = i % 3
        tm.future.with({ swap = mode == 0, overwrite = mode == 1 }, function()
          model:double()
          model(x:double()):sum():backward()
          model:float()
          model:load_state_dict(sd, { assign = i % 2 == 0 })
        end)
      end
    end)
  end)
end)
