local h = require "spec.helper"
local tm = require "tmod"
local B = require "tmod.ffi"

local default = {precision = 4, threshold = 1000, edgeitems = 3, linewidth = 80}

local function format(t, options)
  local function get(name) return options and options[name] or default[name] end
  local s = B.C.tm_tensor_format(B.ptr(t), get "precision", get "threshold", get "edgeitems", get "linewidth")
  local text = B.ffi.string(s)
  B.C.tm_string_free(s)
  return text
end

local function summary(t)
  local s = B.C.tm_tensor_summary(B.ptr(t))
  local text = B.ffi.string(s)
  B.C.tm_string_free(s)
  return text
end

describe("tm_tensor_format", function()
  it("prints every golden tensor as PyTorch does", function()
    local cases = dofile(h.root .. "/spec/golden/format.lua")
    assert.is_true(#cases > 100)
    for i, case in ipairs(cases) do
      local make, options, text = case[1], case[2], case[3]
      assert.equal(text, format(make(), options), "case " .. i)
    end
  end)

  it("is what tostring gives", function()
    assert.equal("tensor([1.0000, 2.5000])", tostring(tm.tensor {1, 2.5}))
    assert.equal("tensor([ true, false])", tostring(tm.tensor {true, false}))
  end)

  it("bounds precision, edgeitems and linewidth rather than failing", function()
    assert.equal("tensor([1,\n        2])", format(tm.tensor({1, 2}, {dtype = "int64"}), {linewidth = -2 ^ 31}))
    assert.equal("tensor([0])", format(tm.tensor {0.25}, {precision = -3}))
    assert.equal("tensor([0.25" .. ("0"):rep(58) .. "])", format(tm.tensor {0.25}, {precision = 1000, linewidth = 10}))
    assert.equal("tensor([ 0.,  ..., 11.])", format(tm.arange(0, 12, 1, {dtype = "float32"}), {threshold = 5, edgeitems = 0}))
  end)

  it("shows the sign of zero and never that of NaN", function()
    assert.equal("tensor([nan, nan])", format(tm.tensor {0 / 0, -(0 / 0)}))
  end)
end)

describe("tm_tensor_summary", function()
  it("tells dtype, shape and a device other than the cpu", function()
    assert.equal("float32 (2, 3)", summary(tm.zeros(2, 3)))
    assert.equal("int64 (4,) on meta", summary(tm.empty({4}, {dtype = "int64", device = "meta"})))
    assert.equal("float64 ()", summary(tm.tensor(1, {dtype = "float64"})))
  end)
end)
