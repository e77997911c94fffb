---The example scripts, as people run them.
local H = require "spec.helper"
local tm = require "tmod"

local function run(script, options)
  local code, out, err = H.shell(("%s scripts/%s.lua %s"):format(H.tmodrun, script, options))
  return code, out, err, tonumber(out:match "test accuracy ([%d.]+) %%%s*$")
end

describe("scripts/train_digits.lua", function()
  local path = os.tmpname()
  teardown(function() os.remove(path) end)

  it("reaches 97 % on five splits on average, and says how it gets there", function()
    local sum = 0
    for split = 1, 5 do
      local code, out, err, accuracy = run("train_digits", ("--split-seed %d --out %s"):format(split, path))
      assert.equal(0, code, err)
      assert.equal(30, select(2, out:gsub("epoch %s?%d+  loss [%d.]+  training accuracy [%d.]+ %%\n", "")))
      if split == 1 then assert.is_true(accuracy >= 97, out) end
      sum = sum + accuracy
      if H.sanitized then return end -- ten times slower: one split
    end
    assert.is_true(sum / 5 >= 97, "mean accuracy " .. sum / 5)
  end)

  it("gives the same figure and the same weights at every run", function()
    local other = os.tmpname()
    local _, a = run("train_digits", "--quiet --epochs 3 --out " .. path)
    local _, b = run("train_digits", "--quiet --epochs 3 --out " .. other)
    assert.equal(a, b)
    local wa, wb = tm.load(path), tm.load(other)
    os.remove(other)
    assert.same({ "0.bias", "0.weight", "3.bias", "3.weight" }, (function()
      local names = require "tmod.ordered".keys(wa)
      table.sort(names)
      return names
    end)())
    for name, t in require "tmod.ordered".pairs(wa) do assert.is_true(t:equal(wb[name])) end
  end)

  it("explains its options", function()
    local code, out = run("train_digits", "--help")
    assert.equal(0, code)
    for _, option in ipairs { "--epochs", "--seed", "--split-seed", "--lr", "--batch", "--out", "--quiet" } do
      assert.truthy(out:find(option, 1, true))
    end
  end)
end)

describe("scripts/train_fashion.lua", function()
  it("says how to get the data when it is missing", function()
    local code, _, err = run("train_fashion", "--data /nowhere")
    assert.equal(1, code)
    assert.truthy(err:find "dataset%-fashion%-mnist")
    assert.truthy(err:find "/nowhere")
  end)
end)
