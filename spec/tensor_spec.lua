---Tensors as such: creation, attributes, indexing and assignment, views and versions, conversions, foreign memory,
---life and memory, random numbers. Operators are in ops_spec.lua, printing in format_spec.lua.

local H = require "spec.helper"
local tm = require "tmod"
local binding = require "tmod.ffi"
local ffi = require "ffi"
local raises = H.raises

local DTYPES = { "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool" }
local BYTES = { float32 = 4, float64 = 8, float16 = 2, bfloat16 = 2, int8 = 1, int16 = 2, int32 = 4, int64 = 8, uint8 = 1, bool = 1 }

local function long(t) return tm.tensor(t, { dtype = "int64" }) end

describe("tm.tensor", function()
  it("takes nested tables, numbers and booleans", function()
    local t = tm.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    assert.same({ 2, 3 }, t:size())
    assert.equal("float32", t.dtype)
    assert.equal("cpu", t.device)
    assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, t:tolist())
    assert.same({}, tm.tensor(5):size())
    assert.equal(5, tm.tensor(5):item())
    assert.equal("bool", tm.tensor({ true, false }).dtype)
    assert.same({ true, false }, tm.tensor({ true, false }):tolist())
    assert.equal(true, tm.tensor(true):item())
    assert.same({ 0 }, tm.tensor({}):size())
    assert.same({ 2, 0 }, tm.tensor({ {}, {} }):size())
    assert.same({ { {}, {} } }, tm.tensor({ { {}, {} } }):tolist())
  end)

  it("makes every dtype", function()
    for _, d in ipairs(DTYPES) do
      local t = tm.tensor({ 1, 0, 1 }, { dtype = d })
      assert.equal(d, t.dtype)
      assert.equal(BYTES[d], t:element_size())
      assert.near_tensor({ 1, 0, 1 }, t, 0)
      assert.equal(d, tm.tensor({ true }, { dtype = d }).dtype)
    end
    assert.same({ -128, 127, -1 }, tm.tensor({ 128, -129, 255 }, { dtype = "int8" }):tolist()) -- integers wrap
    assert.equal("float16", tm.tensor(1, { dtype = "half" }).dtype)
    assert.equal("bfloat16", tm.tensor(1, { dtype = "bf16" }).dtype)
    assert.equal("float32", tm.float32)
  end)

  it("takes requires_grad and device", function()
    assert.is_true(tm.tensor({ 1 }, { requires_grad = true }).requires_grad)
    local m = tm.tensor({ { 1, 2 } }, { device = "meta" })
    assert.equal("meta", m.device)
    assert.same({ 1, 2 }, m:size())
    raises(function() tm.tensor({ 1 }, { dtype = "int64", requires_grad = true }) end, "RuntimeError", "floating")
  end)

  it("names the element that does not fit", function()
    raises(function() tm.tensor { { 1, 2 }, { 3 } } end, "ValueError", "element %[2%] has 1 elements, expected 2")
    raises(function() tm.tensor { { 1, 2 }, { 3, true } } end, "TypeError", "element %[2%]%[2%] is a boolean, expected a number")
    raises(function() tm.tensor { { 1, 2 }, 3 } end, "TypeError", "element %[2%] is a number, expected a table of 2")
    raises(function() tm.tensor { 1, { 2 } } end, "TypeError", "element %[2%] is a table, expected a number")
    raises(function() tm.tensor { "a" } end, "TypeError", "got a string")
    raises(function() tm.tensor { 1, nil, 3 } end, "ValueError", "3 elements, expected 1")
    raises(function() tm.tensor { tm.ones(1) } end, "TypeError", "a tensor inside a table")
    raises(function() tm.tensor(nil) end, "TypeError", "got nil")
    raises(function() tm.tensor { { { { { { { { { 1 } } } } } } } } } end, "ValueError", "more than 8 deep")
  end)
end)

describe("creation", function()
  it("takes sizes one by one, as a list, or none", function()
    assert.same({ 2, 3 }, tm.zeros(2, 3):size())
    assert.same({ 2, 3 }, tm.zeros({ 2, 3 }):size())
    assert.same({}, tm.zeros():size())
    assert.same({}, tm.zeros({}):size())
    assert.same({ 2 }, tm.zeros(2, { dtype = "int8" }):size())
    assert.equal("int8", tm.zeros({ 2 }, { dtype = "int8" }).dtype)
    assert.same({ 0, 3 }, tm.ones(0, 3):size())
    assert.equal(6, tm.ones(2, 3):sum():item())
    assert.same({ 7, 7 }, tm.full({ 2 }, 7):tolist())
    assert.same({ true, true }, tm.full({ 2 }, true):tolist())
    assert.same({ 1, 1, 1, 1, 1, 1, 1, 1 }, tm.zeros(1, 1, 1, 1, 1, 1, 1, 1):size())
  end)

  it("has _like forms that keep shape, dtype and device", function()
    local t = tm.ones(2, 3, { dtype = "float64" })
    for _, name in ipairs { "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like" } do
      local u = tm[name](t)
      assert.same({ 2, 3 }, u:size())
      assert.equal("float64", u.dtype)
      assert.equal("float32", tm[name](t, { dtype = "float32" }).dtype)
    end
    assert.same({ { 3, 3 } }, tm.full_like(tm.ones(1, 2), 3):tolist())
    assert.equal("meta", tm.zeros_like(tm.ones(2, { device = "meta" })).device)
    assert.equal("float64", t:new_zeros({ 2 }).dtype)
  end)

  it("makes ranges", function()
    assert.same({ 0, 1, 2 }, tm.arange(3):tolist())
    assert.equal("int64", tm.arange(3).dtype)
    assert.same({ 2, 4 }, tm.arange(2, 6, 2):tolist())
    assert.equal("float32", tm.arange(0, 1, 0.5).dtype)
    assert.same({ 5, 4, 3 }, tm.arange(5, 2, -1):tolist())
    assert.equal("float64", tm.arange(3, { dtype = "float64" }).dtype)
    assert.same({ 0, 0.5, 1 }, tm.linspace(0, 1, 3):tolist())
    assert.same({ { 1, 0 }, { 0, 1 } }, tm.eye(2):tolist())
    assert.same({ { 1, 0, 0 }, { 0, 1, 0 } }, tm.eye(2, 3):tolist())
    assert.equal("int64", tm.eye(2, { dtype = "int64" }).dtype)
  end)

  it("obeys the default device", function()
    tm.set_default_device "meta"
    local ok, err = pcall(function()
      assert.equal("meta", tm.zeros(2).device)
      assert.equal("meta", tm.tensor({ 1 }).device)
      assert.equal("meta", tm.arange(3).device)
      assert.equal("cpu", tm.zeros(2, { device = "cpu" }).device)
    end)
    tm.set_default_device "cpu"
    assert(ok, err)
    assert.equal("cpu", tm.get_default_device())
    raises(function() tm.set_default_device "gpu" end, "ValueError", 'device "gpu": expected cpu')
    raises(function() tm.set_default_dtype "int64" end, "TypeError", "int64 is no floating dtype")
  end)

  it("refuses sizes that cannot be", function()
    raises(function() tm.zeros(-1) end, "ValueError", "size %-1")
    raises(function() tm.zeros(1.5) end, "TypeError", "expected a whole number")
    raises(function() tm.zeros(0 / 0) end, "TypeError", "whole number")
    raises(function() tm.zeros("3") end, "TypeError", "size 1 must be a number, got string")
    raises(function() tm.zeros(2, nil) end, "TypeError", "size 2 must be a number, got nil")
    raises(function() tm.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1) end, "ValueError", "8")
    raises(function() tm.zeros(2 ^ 40, 2 ^ 40) end, "ValueError", "too many elements")
    raises(function() tm.zeros(2, { dtpye = "int8" }) end, "TypeError", "zeros: unknown option dtpye")
    raises(function() tm.zeros(2, { dtype = "float31" }) end, "TypeError", 'dtype "float31": expected float32')
    raises(function() tm.zeros(2, { device = "cuda" }) end, "RuntimeError", "cuda")
  end)
end)

describe("attributes", function()
  it("tell shape, strides and kind", function()
    local t = tm.zeros(2, 3, 4)
    assert.same({ 2, 3, 4 }, t.shape)
    assert.equal(3, t.ndim)
    assert.equal(3, t:dim())
    assert.equal(24, t:numel())
    assert.equal(3, t:size(2))
    assert.equal(4, t:size(-1))
    assert.same({ 12, 4, 1 }, t:stride())
    assert.equal(1, t:stride(-1))
    assert.equal(2, t:len())
    assert.is_true(t:is_contiguous())
    assert.is_false(t:transpose(1, 3):is_contiguous())
    assert.is_true(t:is_floating_point())
    assert.is_false(long({ 1 }):is_floating_point())
    assert.equal(5, t[{ 1, { 2, 3 }, 2 }]:storage_offset())
    assert.equal("tensor", binding.type_name(t))
    assert.is_true(tm.is_tensor(t))
    assert.is_false(tm.is_tensor {})
    raises(function() t:size(0) end, "IndexError", "size: dim 0, expected 1 to 3 or %-3 to %-1")
    raises(function() t:size(4) end, "IndexError")
    raises(function() t:size(1.5) end, "IndexError", "dim 1.5")
    raises(function() t:stride "a" end, "IndexError")
    raises(function() tm.tensor(1):len() end, "TypeError", "0%-dim tensor has no length")
  end)

  it("cannot all be assigned; other fields can", function()
    local t = tm.zeros(2)
    for _, name in ipairs { "dtype", "device", "shape", "ndim", "is_leaf", "version", "T", "grad_fn" } do
      raises(function() t[name] = 1 end, "AttributeError", name .. " of a tensor cannot be assigned")
    end
    t.label = "mine"
    assert.equal("mine", t.label)
    assert.is_nil(t.nothing)
  end)

  it("are table keys by identity", function()
    local t = tm.zeros(2)
    local map = { [t] = 1 }
    assert.equal(1, map[t])
    assert.is_nil(map[tm.zeros(2)])
    assert.is_nil(map[t:view(2)])
  end)
end)

describe("to Lua", function()
  it("gives single values", function()
    assert.equal(2.5, tm.tensor({ 2.5 }):item())
    assert.equal(3, tm.tensor({ { 3 } }, { dtype = "int8" }):item())
    assert.equal(false, tm.tensor(false):item())
    raises(function() tm.ones(2):item() end, "RuntimeError", "item: a tensor of 2 elements has no single value")
    raises(function() tm.ones(0):item() end, "RuntimeError", "0 elements")
    raises(function() tm.ones(1, { device = "meta" }):item() end, "NotImplementedError", "item: float32 %(1,%) on meta")
    raises(function() tm.ones(1, { device = "meta" }):tolist() end, "NotImplementedError", "tolist: float32 %(1,%) on meta")
  end)

  it("keeps int64 exact, or refuses", function()
    local big = tm.tensor(2 ^ 53, { dtype = "int64" })
    assert.equal(2 ^ 53, big:item())
    local bigger = big + 1
    raises(function() bigger:item() end, "ValueError", "9007199254740993 is beyond 2%^53")
    raises(function() bigger:tolist() end, "ValueError", "beyond 2%^53")
    assert.is_true(bigger:item_i64() == 9007199254740993LL)
  end)

  it("reads any strides", function()
    local t = tm.arange(6):view(2, 3).T
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, t:tolist())
    assert.same({ 7, 7 }, tm.tensor({ 7 }):expand(2):tolist())
  end)

  it("gives NaN as a number whatever its bits are", function()
    -- All ones is a NaN in the processor's eyes and nil in LuaJIT's.
    for _, dtype in ipairs { "float64", "float32", "float16", "bfloat16" } do
      local bytes = ffi.new("uint8_t[?]", 24)
      for _, fill in ipairs { 0xff, 0xfe, 0xf9, 0x7f } do
        ffi.fill(bytes, 24, fill)
        local t = tm.from_blob(bytes, { 3 }, { dtype = dtype })
        local list = t:tolist()
        assert.equal(3, #list)
        for i = 1, 3 do assert.equal("number", type(list[i])) end
        assert.equal("number", type(t[1]:item()))
      end
    end
  end)

  it("gives an address", function()
    local t = tm.tensor { 1, 2, 3 }
    assert.equal(2, ffi.cast("float *", t:data_ptr())[1])
    assert.equal(3, ffi.cast("float *", t[{ { 3, 3 } }]:data_ptr())[0])
    assert.is_true(tm.ones(0):data_ptr() == nil)
    assert.is_true(tm.ones(2, { device = "meta" }):data_ptr() == nil)
  end)
end)

describe("indexing", function()
  local t = tm.arange(24):view(2, 3, 4)

  it("takes positions from 1, and negative ones from the end", function()
    assert.same({ 3, 4 }, t[1]:size())
    assert.equal(12, t[2][1][1]:item())
    assert.equal(23, t[-1][-1][-1]:item())
    assert.equal(23, t[{ 2, 3, 4 }]:item())
    raises(function() return t[0] end, "IndexError", "select: index is 0; positions count from 1")
    raises(function() return t[3] end, "IndexError", "position 3 of dim 1 of int64 %(2, 3, 4%), expected 1 to 2")
    raises(function() return t[-3] end, "IndexError", "position %-3")
    raises(function() return t[{ 1, 4 }] end, "IndexError", "position 4 of dim 1 of int64 %(3, 4%)")
    raises(function() return t[1.5] end, "TypeError", "whole number")
    raises(function() return t[0 / 0] end, "TypeError", "whole number")
    raises(function() return t[true] end, "TypeError", "got boolean")
    raises(function() return tm.tensor(1)[1] end, "IndexError", "no dim to take positions of")
    raises(function() return t[{ 1, 1, 1, 1 }] end, "IndexError")
  end)

  it("takes inclusive ranges, with steps, and {} for a whole dim", function()
    assert.same({ 2, 2, 4 }, t[{ {}, { 1, 2 } }]:size())
    assert.same({ { 4, 5 }, { 16, 17 } }, t[{ {}, 2, { 1, 2 } }]:tolist())
    assert.same({ 1, 3 }, t[{ 1, 1, { 2, 4, 2 } }]:tolist())
    assert.same({ 2, 3 }, t[{ 1, 1, { 3, -1 } }]:tolist())
    assert.same({ 2 }, t[{ 1, 1, { 3 } }]:tolist())
    assert.same({ 0, 3, 4 }, t[{ { 2, 1 } }]:size()) -- first just after last: empty
    assert.same({ 2, 3, 4 }, t[{}]:size())
    raises(function() return t[{ { 0, 1 } }] end, "IndexError", "first is 0; positions count from 1")
    raises(function() return t[{ { 1, 3 } }] end, "IndexError", "positions 1 to 3, step 1, of dim 1")
    raises(function() return t[{ { 1, 2, 0 } }] end, "IndexError", "step 0")
    raises(function() return t[{ { 1, 2, 1, 1 } }] end, "TypeError", "got 4 numbers")
    raises(function() return t[{ "a" }] end, "TypeError", "got string")
  end)

  it("takes masks and tensors of positions, alone or among others", function()
    local m = tm.arange(6):view(2, 3)
    assert.same({ 1, 3, 5 }, m[m:eq(1):logical_or(m:eq(3)):logical_or(m:eq(5))]:tolist())
    assert.same({ { 3, 4, 5 }, { 0, 1, 2 } }, m[long { 2, 1 }]:tolist())
    assert.same({ { 2, 0 }, { 5, 3 } }, m[{ {}, long { 3, 1 } }]:tolist())
    assert.same({ 0, 5 }, m[{ long { 1, 2 }, long { 1, 3 } }]:tolist())
    assert.same({ { 0, 2 }, { 3, 5 } }, m[{ {}, tm.tensor { true, false, true } }]:tolist())
    assert.same({ 3, 5 }, m[{ 2, long { 1, 3 } }]:tolist())
    assert.same({ { 12, 14 }, { 20, 22 } }, t[{ 2, { 1, 3, 2 }, long { 1, 3 } }]:tolist())
    assert.same({ 0, 3 }, m[long {}]:size())
    assert.same({ 2, 1, 3 }, m[long { { 1 }, { 2 } }]:size())
    assert.same({ 2 }, m:masked_select(m:gt(3)):size())
    raises(function() return m[long { 3 }] end, "IndexError", "3")
    raises(function() return m[long { 0 }] end, "IndexError", "0")
    raises(function() return m[tm.tensor { 1, 2 }] end, "IndexError", "index is float32 %(2,%), expected int64 or int32 positions")
    raises(function() return m[tm.tensor { true, false, true }] end, "IndexError", "mask bool %(3,%)")
    raises(function() return m[tm.tensor(true)] end, "IndexError", "mask bool %(%)")
    raises(function() return m[{ tm.tensor(true) }] end, "IndexError", "mask bool %(%)")
  end)

  it("gives views for positions and ranges, copies otherwise", function()
    local m = tm.zeros(2, 3)
    assert.equal(m:storage_id(), m[1]:storage_id())
    assert.equal(m:storage_id(), m[{ {}, { 2, 3 } }]:storage_id())
    assert.is_true(m:storage_id() ~= m[long { 1 }]:storage_id())
  end)
end)

describe("assignment", function()
  it("works through positions, ranges, masks and tensors of positions", function()
    local m = tm.zeros(2, 3)
    m[1] = 5
    assert.same({ { 5, 5, 5 }, { 0, 0, 0 } }, m:tolist())
    m[{ 2, 3 }] = 7
    m[{ {}, { 1, 2 } }] = tm.tensor { { 1, 2 }, { 3, 4 } }
    assert.same({ { 1, 2, 5 }, { 3, 4, 7 } }, m:tolist())
    m[m:gt(4)] = 0
    assert.same({ { 1, 2, 0 }, { 3, 4, 0 } }, m:tolist())
    m[long { 2, 1 }] = tm.tensor { { 1, 1, 1 }, { 2, 2, 2 } }
    assert.same({ { 2, 2, 2 }, { 1, 1, 1 } }, m:tolist())
    m[{ 1, long { 1, 3 } }] = { 8, 9 }
    m[{ {}, tm.tensor { false, true, false } }] = -1
    assert.same({ { 8, -1, 9 }, { 1, -1, 1 } }, m:tolist())
    m[2] = { 4, 5, 6 }
    m[{ long { 1, 2 }, long { 1, 1 } }] = tm.tensor { 10, 20 }
    assert.same({ { 10, -1, 9 }, { 20, 5, 6 } }, m:tolist())
    m[m:lt(0)] = tm.tensor { 77 }
    assert.equal(77, m[{ 1, 2 }]:item())
    m[{}] = 3
    assert.equal(18, m:sum():item())
  end)

  it("converts dtypes, booleans and single values", function()
    local m, b = tm.zeros(3, { dtype = "int32" }), tm.zeros(2):bool()
    m[1] = 2.9
    m[2] = tm.tensor(5)
    m[3] = true
    assert.same({ 2, 5, 1 }, m:tolist())
    b[1] = true
    assert.same({ true, false }, b:tolist())
    local s = tm.tensor(1)
    s[{}] = 4
    assert.equal(4, s:item())
  end)

  it("counts one change, seen by all views", function()
    local m = tm.zeros(2, 3)
    local row = m[1]
    m[{ 1, 2 }] = 5
    assert.equal(1, m.version)
    assert.equal(1, row.version)
    assert.equal(5, row[2]:item())
    m[m:gt(0)] = 1
    m[long { 1 }] = 2
    assert.equal(3, row.version)
  end)

  it("names what does not fit", function()
    local m = tm.zeros(2, 3)
    raises(function() m[3] = 1 end, "IndexError", "position 3")
    raises(function() m[0] = 1 end, "IndexError", "count from 1")
    raises(function() m[1] = tm.ones(4) end, "RuntimeError", "float32 %(4,%)")
    raises(function() m[1] = { 1, 2 } end, "RuntimeError", "float32 %(2,%)")
    raises(function() m[1] = "a" end, "TypeError", "got string")
    raises(function() m[1] = nil end, "TypeError", "got nil")
    raises(function() m[long { 3 }] = 1 end, "IndexError", "3")
    raises(function() m[tm.tensor { true }] = 1 end, "IndexError", "mask")
    raises(function() m[{ tm.tensor(false) }] = 1 end, "IndexError", "mask bool %(%)")
    raises(function() m[{ {}, tm.tensor(false) }] = 1 end, "IndexError", "mask bool %(%)")
    raises(function() m[true] = 1 end, "TypeError", "got boolean")
  end)
end)

describe("views", function()
  it("share storage and version; clones do not", function()
    local t = tm.zeros(2, 3)
    local v = t:view(3, 2)
    v:add_(1)
    assert.equal(6, t:sum():item())
    assert.equal(1, t.version)
    assert.equal(v:storage_id(), t:storage_id())
    local c = t:clone()
    c:zero_()
    assert.equal(6, t:sum():item())
    assert.equal(1, t.version)
    assert.is_true(tm.impl_id(t) ~= tm.impl_id(v))
    assert.is_true(tm.id(t) ~= tm.id(v))
  end)

  it("of other dims", function()
    local t = tm.arange(6):view(2, 3)
    assert.same({ 3, 2 }, t.T:size())
    assert.same({ 3, 2 }, t:t():size())
    assert.same({ 4 }, tm.arange(4):t():size())
    assert.same({ 6 }, t:flatten():size())
    assert.same({ 2, 12 }, tm.zeros(2, 3, 4):flatten(2):size())
    assert.same({ 6, 4 }, tm.zeros(2, 3, 4):flatten(1, -2):size())
    assert.same({ 1 }, tm.tensor(1):flatten():size())
    assert.same({ 3, 2 }, t:view_as(tm.zeros(3, 2)):size())
    assert.same({ 3, 2 }, t:reshape_as(tm.zeros(3, 2)):size())
    assert.same({ 4, 2, 3 }, t:expand_as(tm.zeros(4, 2, 3)):size())
    raises(function() tm.zeros(2, 3, 4):t() end, "RuntimeError", "at most 2 dims, got 3")
    raises(function() t:flatten(2, 1) end, "RuntimeError", "first dim 2 comes after last dim 1")
    raises(function() t:flatten "a" end, "IndexError", "flatten: first is a")
    raises(function() t.T:view(6) end, "RuntimeError", "view: the strides of int64 %(3, 2%) do not allow")
    assert.same({ 0, 3, 1, 4, 2, 5 }, t.T:reshape(6):tolist())
    raises(function() t:view(4, 2) end, "RuntimeError", "shape %(4, 2%) does not hold the 6 elements")
    raises(function() t:view(-1, -1) end, "RuntimeError", "only one size may be %-1")
    raises(function() t:view(-1, 4) end, "RuntimeError", "does not hold")
    raises(function() tm.zeros(0, 3):view(-1, 0) end, "RuntimeError", "%-1 beside a size of 0")
    raises(function() t:expand(2, 4) end, "RuntimeError", "expand: int64 %(2, 3%) cannot be expanded to %(2, 4%)")
    raises(function() t:permute(1, 1) end, "RuntimeError", "dim 1 appears twice")
    raises(function() t:permute(1) end, "RuntimeError", "1 dims given")
    raises(function() tm.zeros(1, 1, 1, 1, 1, 1, 1, 1):unsqueeze(1) end, "RuntimeError", "most there can be")
  end)

  it("in parts", function()
    local t = tm.arange(10):view(5, 2)
    local function sizes(list)
      local s = {}
      for i, p in ipairs(list) do s[i] = p:size(1) end
      return s
    end
    assert.same({ 2, 2, 1 }, sizes(t:split(2)))
    assert.same({ 1, 4 }, sizes(t:split { 1, 4 }))
    assert.same({ 2, 2, 1 }, sizes(t:chunk(3)))
    assert.same({ 1, 1, 1, 1, 1 }, sizes(t:chunk(10)))
    assert.equal(2, #t:unbind(2))
    assert.same({ 1, 3, 5, 7, 9 }, t:unbind(2)[2]:tolist())
    assert.equal(t:storage_id(), t:split(2)[3]:storage_id())
    assert.same({ 5 }, t:split(1, 2)[2][{ {}, 1 }]:size())
    raises(function() t:split(0) end, "ValueError", "split: size 0")
    raises(function() t:split { 1, 5 } end, "RuntimeError", "add up to 6, expected 5")
    raises(function() t:chunk "a" end, "ValueError", "chunk")
    raises(function() t:split(1, 3) end, "IndexError", "split: dim 3")
    assert.same({ 0, 2 }, tm.zeros(0, 2):split(2)[1]:size())
  end)

  it("in strides that leave the storage are errors, also where the reach is beyond int64", function()
    local ops, t = tm.ops, tm.zeros(2, 3)
    raises(function() t:as_strided({ 2 ^ 42, 2 ^ 42 }, { 2 ^ 42, 2 ^ 42 }) end, "IndexError", "the storage holds 6")
    raises(function() t:as_strided({ 2 }, { 1 }, 2 ^ 53) end, "IndexError", "the storage holds 6")
    raises(function() ops.restride(t, { -1, 1 }) end, "ValueError", "stride %-1 at dim 1")
    raises(function() ops.restride(t, { 2 ^ 53, 2 ^ 53 }) end, "ValueError", "do not lie densely")
    raises(function() ops.restride(tm.zeros(4097, 3), { 2 ^ 53, 1 }) end, "ValueError", "do not lie densely")
    raises(function() ops.fill_strided(t, t, { 3, -1 }, { 2, 3 }, { 3, 1 }, 0) end, "ValueError", "stride %-1 at dim 2")
  end)

  it("of one element reached by an endless step keep small strides", function()
    local t = tm.arange(8):view(2, 4)
    for _ = 1, 3 do t = t:slice(1, 1, 1, 2 ^ 53) end
    assert.same({ { 0, 1, 2, 3 } }, t:tolist())
    assert.same({ 1, 4 }, t:size())
    assert.is_true(t:stride(1) <= 8)
  end)

  it("become contiguous by copying once", function()
    local t = tm.arange(6):view(2, 3)
    assert.is_true(rawequal(t, t:contiguous()))
    local c = t.T:contiguous()
    assert.is_true(c:is_contiguous())
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, c:tolist())
    assert.same({ 1, 3 }, t.T:clone():stride())
    assert.same({ 2, 1 }, t.T:clone(true):stride())
  end)
end)

describe("conversions", function()
  it("go to a dtype, a device, another tensor's, or nowhere", function()
    local t = tm.tensor { 1.5, -2.5 }
    assert.is_true(rawequal(t, t:to "float32"))
    assert.is_true(rawequal(t, t:to "cpu"))
    assert.is_true(rawequal(t, t:to()))
    assert.is_false(rawequal(t, t:to { copy = true }))
    assert.equal("float64", t:to("float64").dtype)
    assert.equal("float64", t:to("cpu", "float64").dtype)
    assert.equal("int64", t:to(long { 1 }).dtype)
    assert.equal("int8", t:to({ dtype = "int8" }).dtype)
    assert.equal("meta", t:to("meta").device)
    assert.same({ 1, -2 }, t:long():tolist())
    assert.same({ true, true }, t:bool():tolist())
    for name, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16", int = "int32",
      long = "int64", short = "int16", char = "int8", byte = "uint8", bool = "bool" } do
      assert.equal(dtype, t[name](t).dtype)
    end
    assert.equal("int32", t:type_as(tm.zeros(1, { dtype = "int32" })).dtype)
    raises(function() t:to "flaot" end, "ValueError", 'device "flaot"')
    raises(function() t:to { dtyp = "int8" } end, "TypeError", "to: unknown option dtyp")
    raises(function() t:to("float64", "cpu") end, "TypeError", "device first")
    raises(function() t:to "cuda" end, "RuntimeError", "cuda")
    raises(function() t:to("meta"):to "cpu" end, "NotImplementedError", "no elements that could move to cpu")
  end)

  it("keep values that fit, through every pair of dtypes", function()
    for _, a in ipairs(DTYPES) do
      for _, b in ipairs(DTYPES) do
        assert.near_tensor({ 1, 0, 1 }, tm.tensor({ 1, 0, 1 }, { dtype = a }):to(b), 0)
      end
    end
  end)

  it("compare", function()
    local t = tm.tensor { 1, 2, 0 / 0 }
    assert.is_true(tm.ones(2):equal(tm.ones(2)))
    assert.is_false(tm.ones(2):equal(tm.ones(3)))
    assert.is_true(tm.ones(2):allclose(tm.ones(2) + 1e-9))
    assert.is_false(tm.ones(2):allclose(tm.ones(2) + 1e-3))
    assert.is_true(tm.ones(2):allclose(tm.ones(2) + 1e-3, { atol = 1e-2 }))
    assert.is_false(t:allclose(t))
    assert.is_true(t:allclose(t, { equal_nan = true }))
    assert.is_true(tm.tensor({ 1 / 0 }):allclose(tm.tensor { 1 / 0 }))
    raises(function() t:equal(3) end, "TypeError", "equal: other must be a tensor, got number")
    raises(function() t:allclose(3) end, "TypeError", "allclose: other must be a tensor")
  end)
end)

describe("statistics", function()
  it("are those of PyTorch", function()
    local t = tm.tensor({ { 1, 2, 4 }, { 3, 3, 9 } }, { dtype = "float64" })
    assert.near_tensor({ 7 / 3, 12 }, t:var(2), 1e-12)
    assert.near_tensor(math.sqrt(7 / 3), t[1]:std(), 1e-12)
    assert.near_tensor(t:var():item(), t:view(-1):var(1), 1e-12)
    assert.near_tensor({ { 1, 4, 16 }, { 9, 9, 81 } }, t:square(), 0)
    assert.near_tensor(4, t[1]:max(), 0)
    assert.near_tensor(1, t:min(), 0)
    local values, positions = t:max(2)
    assert.same({ 4, 9 }, values:tolist())
    assert.same({ 3, 3 }, positions:tolist())
    assert.same({ { 2, 2, 4 }, { 3, 3, 9 } }, t:max(tm.tensor(2, { dtype = "float64" })):tolist())
  end)

  it("have Lua's operators", function()
    local t = tm.tensor { 1, 2 }
    assert.same({ 3, 4 }, (t + 2):tolist())
    assert.same({ 1, 0 }, (2 - t):tolist())
    assert.same({ 2, 4 }, (t * 2):tolist())
    assert.same({ 2, 1 }, (2 / t):tolist())
    assert.same({ 1, 4 }, (t ^ 2):tolist())
    assert.same({ -1, -2 }, (-t):tolist())
    assert.same({ 4, 3 }, t:rsub(5):tolist())
    assert.truthy(("x" .. t):find "^xtensor")
    assert.truthy((t .. "x"):find "x$")
    assert.same({ { 5 } }, tm.ones(1, 5):mm(tm.ones(5, 1)):tolist())
    assert.same({ 2, 1, 1 }, tm.ones(2, 1, 5):bmm(tm.ones(2, 5, 1)):size())
    assert.same({ 1, -1 }, t:eq(1):where(t, -1):tolist())
    assert.same({ 1, -1 }, t:where(t:eq(1), -1):tolist())
    raises(function() tm.ones(2):mm(tm.ones(2)) end, "RuntimeError", "mm: a has 1 dims, expected 2")
  end)
end)

describe("from_blob", function()
  it("sees foreign memory without copying it", function()
    local data = ffi.new("float[6]", 1, 2, 3, 4, 5, 6)
    local t = tm.from_blob(data, { 2, 3 })
    assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, t:tolist())
    data[0] = 9
    assert.equal(9, t[{ 1, 1 }]:item())
    t[{ 2, 3 }] = 7
    assert.equal(7, data[5])
    assert.same({ { 9, 4 }, { 2, 5 } }, tm.from_blob(data, { 2, 2 }, { strides = { 1, 3 } }):tolist())
    assert.same({ 1, 2 }, tm.from_blob(ffi.new("int64_t[2]", 1, 2), { 2 }, { dtype = "int64" }):tolist())
    assert.same({ 0, 3 }, tm.from_blob(data, { 0, 3 }):size())
  end)

  it("keeps the owner alive as long as a view does, and not longer", function()
    local weak = setmetatable({}, { __mode = "v" })
    local function make()
      local data = ffi.new("double[4]", 1, 2, 3, 4)
      weak.owner = { data }
      return tm.from_blob(data, { 4 }, { dtype = "float64", owner = weak.owner })[{ { 2, 3 } }]
    end
    local view = make()
    tm.collect()
    assert.truthy(weak.owner)
    assert.same({ 2, 3 }, view:tolist())
    view = nil -- luacheck: ignore
    tm.collect()
    assert.is_nil(weak.owner)
  end)

  it("refuses what cannot be", function()
    local data = ffi.new "float[4]"
    raises(function() tm.from_blob(1, { 2 }) end, "TypeError", "from_blob: expected an ffi array or pointer, got number")
    raises(function() tm.from_blob(data, { 5 }) end, "ValueError", "the array holds 16 bytes, expected 20")
    raises(function() tm.from_blob(data, { -1 }) end, "ValueError", "from_blob")
    raises(function() tm.from_blob(data, { 2, 2 }, { strides = { 1 } }) end, "ValueError", "1 strides for 2 dims")
    raises(function() tm.from_blob(data, { 2 }, { strides = { -1 } }) end, "ValueError", "stride %-1 of dim 1 is negative")
    raises(function() tm.from_blob(ffi.cast("float *", nil), { 2 }) end, "ValueError", "no data")
    raises(function() tm.from_blob(ffi.cast("char *", data) + 1, { 1 }) end, "ValueError", "not aligned")
    raises(function() tm.from_blob(data, { 3, 2 }, { strides = { 2, 1 } }) end, "ValueError", "from_blob")
    raises(function() tm.from_blob(data, "a") end, "TypeError", "from_blob")
    local pointer = ffi.cast("float *", data)
    raises(function() tm.from_blob(pointer, { 3 }, { strides = { 2 ^ 62 } }) end, "ValueError", "from_blob: shape %(3,%) reaches too far")
    raises(function() tm.from_blob(pointer, { 2 }, { strides = { 2 ^ 61 } }) end, "ValueError", "reaches too far")
    raises(function() tm.from_blob(pointer, { 2 ^ 62 }) end, "ValueError", "reaches too far")
    assert.same({ 3, 0 }, tm.from_blob(pointer, { 3, 0 }, { strides = { 2 ^ 62, 1 } }):size())
  end)
end)

describe("life of a tensor", function()
  it("ends by release; any later use is an error", function()
    local t = tm.ones(1000)
    local v = t:view(10, 100)
    local before = tm.live().tensors
    t:release()
    assert.equal(before - 1, tm.live().tensors)
    raises(function() t:sum() end, "RuntimeError", "sum: x has been released")
    raises(function() return v + t end, "RuntimeError", "add: b has been released")
    raises(function() return t.dtype end, "RuntimeError", "has been released")
    raises(function() t:release() end, "RuntimeError", "has been released")
    raises(function() tostring(t) end, "RuntimeError", "has been released")
    raises(function() tm.cat { v, t } end, "RuntimeError", "cat: tensor 2 of the list has been released")
    raises(function() t[1] = 5 end, "RuntimeError", "released")
    assert.equal(1000, v:sum():item())
    local fresh = tm.zeros(3) -- may stand where t stood
    raises(function() t:sum() end, "RuntimeError", "released")
    assert.equal(0, fresh:sum():item())
  end)

  it("ends after Lua dropped it, when a collection has run", function()
    tm.collect()
    local before = tm.live()
    for _ = 1, 100 do tm.ones(10):exp():view(2, 5) end
    tm.collect()
    assert.same(before, tm.live())
  end)

  it("needs no attention in a loop", function()
    tm.collect()
    local before = tm.live().tensors
    local peak = 0
    local x = tm.ones(10)
    for i = 1, 200000 do
      x = x * 1
      if i % 1000 == 0 then peak = math.max(peak, tm.live().tensors - before) end
    end
    assert.is_true(peak < 60000, peak)
  end)

  it("ends with tm.scope, but for what it returns or keeps", function()
    local kept, inner
    tm.collect()
    local before = tm.live().tensors
    local a, list, n = tm.scope(function(x)
      local junk = x * 2
      inner = junk
      kept = tm.keep(x + 5)
      return junk + 1, { junk + 2 }, 7
    end, tm.ones(2))
    assert.equal(7, n)
    assert.same({ 3, 3 }, a:tolist())
    assert.same({ 4, 4 }, list[1]:tolist())
    assert.same({ 6, 6 }, kept:tolist())
    raises(function() return inner + 1 end, "RuntimeError", "released")
    assert.equal(before + 4, tm.live().tensors) -- a, list[1], kept and the argument
    local outer = tm.scope(function()
      local first = tm.ones(1)
      local second = tm.scope(function() return first + 1 end)
      assert.equal(1, first:item())
      return second + 0
    end)
    assert.equal(2, outer:item())
  end)

  it("lets an error out of tm.scope, and frees all", function()
    tm.collect()
    local before = tm.live().tensors
    local ok, err = pcall(tm.scope, function()
      tm.ones(2)
      error "stop"
    end)
    assert.is_false(ok)
    assert.truthy(tostring(err):find "stop")
    assert.equal(before, tm.live().tensors)
    local w = tm.ones(2, { requires_grad = true })
    tm.scope(function() (w * 2):sum():backward() end)
    assert.same({ 2, 2 }, w.grad:tolist())
  end)

  it("keeps handle and content apart", function()
    local a, b = tm.ones(2), tm.zeros(3, { dtype = "float64" })
    a.name, b.label = "a", "b"
    local ia, ib, ca = tm.id(a), tm.id(b), tm.impl_id(a)
    tm.swap_tensors(a, b)
    assert.same({ 0, 0, 0 }, a:tolist())
    assert.equal("float32", b.dtype)
    assert.equal(ia, tm.id(a))
    assert.equal(ib, tm.id(b))
    assert.equal(ca, tm.impl_id(b))
    assert.same({ nil, "b", "a" }, { a.name, a.label, b.name })
    tm.swap_tensors(a, a)
    assert.equal("b", a.label)
    raises(function() tm.swap_tensors(a, 3) end, "TypeError", "expected a tensor, got number")
  end)

  it("takes other data", function()
    local a = tm.ones(2)
    local view, id = a:view(2, 1), tm.id(a)
    a.data = tm.zeros(3, { dtype = "float64" })
    assert.same({ 0, 0, 0 }, a:tolist())
    assert.equal("float64", a.dtype)
    assert.equal(id, tm.id(a))
    assert.same({ { 1 }, { 1 } }, view:tolist())
    raises(function() a.data = 3 end, "TypeError", "data: expected a tensor, got number")
    raises(function() a.data = tm.ones(2, { device = "meta" }) end, "RuntimeError", "meta and real")
    a.requires_grad = true
    raises(function() a.data = long { 1 } end, "RuntimeError", "requires grad and cannot become int64")
  end)
end)

describe("memory", function()
  it("is counted in bytes", function()
    tm.collect()
    local before = tm.memory_stats()
    local t = tm.zeros(1000)
    local now = tm.memory_stats()
    assert.equal(4000, now.in_use - before.in_use)
    assert.is_true(now.peak >= now.in_use)
    assert.is_true(now.allocations > before.allocations)
    t:release()
    assert.equal(before.in_use, tm.memory_stats().in_use)
    tm.reset_peak_memory()
    assert.equal(tm.memory_stats().in_use, tm.memory_stats().peak)
    raises(function() tm.memory_stats "meta" end, "ValueError", "meta keeps no memory")
  end)

  it("is cached and given back", function()
    if H.sanitized then return pending "no cache under the address sanitizer" end
    tm.zeros(100000):release()
    assert.is_true(tm.memory_stats().cached >= 400000)
    local hits = tm.memory_stats().cache_hits
    tm.zeros(100000):release()
    assert.is_true(tm.memory_stats().cache_hits > hits)
    tm.empty_cache()
    assert.equal(0, tm.memory_stats().cached)
  end)

  it("has a limit whose error leaves the process usable", function()
    tm.collect()
    local used = tm.memory_stats().in_use
    tm.set_memory_limit(used + 1e6)
    local ok, err = pcall(function()
      local e = raises(function() tm.zeros(300000) end, "OutOfMemory",
        "full: out of memory on cpu: asked for 1200000 bytes, " .. used .. " in use, %d+ cached, limit " .. used + 1e6)
      assert.truthy(e.where:find "spec/tensor_spec.lua:%d+")
      local x = tm.ones(1000, { requires_grad = true })
      x:exp():sum():backward()
      assert.near_tensor(math.exp(1), x.grad[1], 1e-6)
    end)
    tm.set_memory_limit()
    assert(ok, tostring(err))
    assert.equal(0, tm.memory_stats().limit)
    assert.equal(300000, tm.zeros(300000):numel())
  end)

  it("is collected before it counts as used up", function()
    tm.collect()
    tm.set_memory_limit(tm.memory_stats().in_use + 1e6)
    local ok, err = pcall(function()
      for _ = 1, 50 do tm.zeros(100000):add(1) end -- 400 kB each, dropped at once
    end)
    tm.set_memory_limit()
    assert(ok, tostring(err))
  end)

  it("stays in bounds while large tensors are dropped", function()
    tm.collect()
    tm.reset_peak_memory()
    local before = tm.memory_stats().in_use
    for _ = 1, 300 do tm.empty(262144) end -- 1 MB each
    assert.is_true(tm.memory_stats().peak - before < 150e6)
  end)
end)

describe("random numbers", function()
  it("repeat with the seed, on any number of threads", function()
    local function draw()
      tm.manual_seed(42)
      return tm.randn(100001), tm.rand(3, 3), tm.randint(0, 10, { 5 }), tm.randperm(9), tm.full({ 50 }, 0.3):bernoulli()
    end
    local first = { draw() }
    local threads = tm.get_num_threads()
    for _, n in ipairs { 1, 2, 4 } do
      tm.set_num_threads(n)
      local again = { draw() }
      for i = 1, #first do assert.is_true(first[i]:equal(again[i])) end
    end
    tm.set_num_threads(threads)
    assert.is_false(first[2]:equal(tm.rand(3, 3)))
  end)

  it("come from generators of their own", function()
    local g, h = tm.Generator(7), tm.Generator(7)
    local a = tm.randn(5, { generator = g })
    tm.rand(10)
    assert.is_true(a:equal(tm.randn(5, { generator = h })))
    assert.is_false(a:equal(tm.randn(5, { generator = h })))
    assert.equal(7, g:initial_seed())
    local state = g:get_state()
    assert.equal("uint8", state.dtype)
    local next_numbers = tm.rand(5, { generator = g })
    g:set_state(state)
    assert.is_true(next_numbers:equal(tm.rand(5, { generator = g })))
    assert.equal(g:manual_seed(3):uniform(), tm.Generator(3):uniform())
    raises(function() tm.manual_seed(-1) end, "ValueError", "seed: expected a whole number")
    raises(function() tm.Generator "x" end, "ValueError", "seed")
    raises(function() g:set_state(tm.ones(3)) end, "ValueError", "state is float32 %(3,%), expected uint8")
    raises(function() tm.rand(2, { generator = 5 }) end, "TypeError", "generator")
  end)

  it("have the moments and the range they should", function()
    tm.manual_seed(0)
    local n = 200000
    local z = tm.randn(n, { dtype = "float64" })
    assert.near(0, z:mean():item(), 5 / math.sqrt(n)) -- five standard errors
    assert.near(1, z:var():item(), 5 * math.sqrt(2 / n))
    assert.near(0, (z ^ 3):mean():item(), 5 * math.sqrt(15 / n))
    assert.near(3, (z ^ 4):mean():item(), 5 * math.sqrt(96 / n))
    for _, dtype in ipairs { "float64", "float32", "float16", "bfloat16" } do
      local u = tm.rand(n, { dtype = dtype })
      assert.is_true(u:ge(0):all():item() and u:lt(1):all():item(), dtype)
      assert.near(0.5, u:double():mean():item(), 5 / math.sqrt(12 * n) + (dtype == "bfloat16" and 2e-3 or 0))
      assert.equal(dtype, u.dtype)
    end
    local i = tm.randint(-3, 4, { n })
    assert.equal(-3, i:min():item())
    assert.equal(3, i:max():item())
    for v = -3, 3 do assert.near(n / 7, i:eq(v):sum():item(), 5 * math.sqrt(n * 6 / 49)) end
    local p = tm.randperm(1000)
    assert.same(500500, p:sum():item())
    assert.equal(1000, tm.zeros(1000):scatter(1, p, 1):sum():item())
    assert.near(n * 0.3, tm.full({ n }, 0.3):bernoulli():sum():item(), 5 * math.sqrt(n * 0.21))
    local m = tm.empty(n, { dtype = "float64" }):normal_(5, 2)
    assert.near(5, m:mean():item(), 10 / math.sqrt(n))
    assert.near(2, m:std():item(), 0.02)
    local w = tm.empty(n):uniform_(-1, 3)
    assert.is_true(w:ge(-1):all():item() and w:lt(3):all():item())
    assert.near(1, w:mean():item(), 5 * 4 / math.sqrt(12 * n))
    assert.near(0.2, tm.empty(n):bernoulli_(0.2):mean():item(), 0.01)
    local y = tm.nn.functional.dropout(tm.ones(n), 0.25)
    assert.near(1, y:mean():item(), 0.01)
    assert.near_tensor(tm.where(y:ne(0), 4 / 3, 0), y, 1e-6)
  end)

  it("refuse what is no probability or range", function()
    raises(function() tm.tensor({ 1.5 }):bernoulli() end, "ValueError", "bernoulli: 1.5 is no probability")
    raises(function() tm.tensor({ 0 / 0 }):bernoulli() end, "ValueError", "no probability")
    raises(function() tm.randint(3, 3, { 2 }) end, "ValueError", "low is 3, high is 3")
    raises(function() tm.randint(0, 300, { 2 }, { dtype = "int8" }) end, "ValueError", "do not fit in int8")
    raises(function() tm.empty(2):uniform_(2, 1) end, "ValueError", "uniform: low is 2, high is 1")
    raises(function() tm.empty(2):normal_(0, -1) end, "ValueError", "std is %-1")
    raises(function() tm.rand(2, { dtype = "int64" }) end, "NotImplementedError", "rand: dtype int64")
  end)
end)

describe("threads", function()
  it("are counted and set", function()
    local n = tm.get_num_threads()
    assert.is_true(n >= 1)
    tm.set_num_threads(1)
    assert.equal(1, tm.get_num_threads())
    tm.set_num_threads(n)
    raises(function() tm.set_num_threads(0) end, "ValueError", "positive whole number, got 0")
    raises(function() tm.set_num_threads "2" end, "ValueError")
  end)
end)
