---Section 9 of docs/contracts/conversion.md: the methods that convert, their arguments, memory formats, to_empty.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local nn = tm.nn

local Holder = nn.Module:extend "Holder"
function Holder:init(tensors)
  for name, t in pairs(tensors) do
    if nn.is_parameter(t) then self[name] = t else self:register_buffer(name, t) end
  end
end

local function holder(tensors) return Holder(tensors) end
local function param(...) return nn.Parameter(tm.randn(...)) end

---A parameter of each kind of dtype, a gradient, and buffers as BatchNorm and attention masks have them.
local function mixed()
  local m = holder { w = param(2, 3), frozen = nn.Parameter(tm.tensor({ 1, 2 }, { dtype = "int32" }), false),
    mean = tm.randn(3), count = tm.tensor(7, { dtype = "int64" }), mask = tm.tensor({ true, false }) }
  m.w.grad = tm.ones(2, 3)
  return m
end

local function dtypes(m)
  return { w = m.w.dtype, grad = m.w.grad.dtype, frozen = m.frozen.dtype, mean = m.mean.dtype, count = m.count.dtype, mask = m.mask.dtype }
end

local refused = K.unchanged

K.guard()

describe("module:float, double, half, bfloat16", function()
  for method, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16" } do
    K.each_mode("C112 T26: " .. method .. " converts floating tensors and leaves the others alone", function()
      local m = mixed()
      assert.equal(m, (m[method](m)))
      assert.same({ w = dtype, grad = dtype, frozen = "int32", mean = dtype, count = "int64", mask = "bool" }, dtypes(m))
      assert.equal(7, m.count:item())
      assert.same({ true, false }, m.mask:tolist())
      assert.is_true(m.w.requires_grad)
      assert.is_false(m.frozen.requires_grad)
    end)
  end

  pending("C112 C113 T27: complex parameters stay complex in half() and turn real in to(\"f32\"): needs complex dtypes")
end)

describe("module:to, dtypes", function()
  K.each_mode("C113 C119 T26: casts floating parameters, gradients and buffers, whole numbers and booleans only move", function()
    local m = mixed()
    m:to "f64"
    assert.same({ w = "float64", grad = "float64", frozen = "int32", mean = "float64", count = "int64", mask = "bool" }, dtypes(m))
    m:to("meta", "f16")
    assert.same({ w = "float16", grad = "float16", frozen = "int32", mean = "float16", count = "int64", mask = "bool" }, dtypes(m))
    for _, t in ipairs { m.w, m.w.grad, m.frozen, m.mean, m.count, m.mask } do assert.equal("meta", t.device) end
  end)

  K.each_mode("C113 C72 T29: a dtype that is no floating one is a type error before the walk", function()
    local m = mixed()
    refused(m, function() m:to "i64" end, "TypeError", "floating dtypes only, got int64")
    refused(m, function() m:to(tm.tensor({ 1 }, { dtype = "int32" })) end, "TypeError", "got int32")
    refused(m, function() m:to { dtype = "bool" } end, "TypeError", "got bool")
    refused(m, function() m:to("cpu", "u8", true) end, "TypeError", "got uint8")
    refused(m, function() m:to { dtype = "float31" } end, "TypeError", "float31")
  end)

  pending("C113 C114 T28: to(\"c64\") makes float parameters complex, with one warning: needs complex dtypes")

  it("C119: buffers get their slot assigned, whatever the flags say", function()
    for _, mode in ipairs(K.MODES) do
      K.with_flags(mode)(function()
        local m = mixed()
        local mean, count = m.mean, m.count
        m:double()
        assert.is_true(m.mean ~= mean)
        assert.equal("float32", mean.dtype)
        assert.equal("int64", count.dtype)
      end)
    end
  end)
end)

describe("module:type", function()
  K.each_mode("C115: casts everything, whole numbers and booleans too", function()
    local m = mixed()
    assert.equal(m, (m:type "f64"))
    for _, dtype in pairs(dtypes(m)) do assert.equal("float64", dtype) end
    assert.same({ 1, 0 }, m.mask:tolist())
    assert.equal("cpu", m.w.device)
  end)

  K.each_mode("C115 T39 T40: a parameter that requires grad has no whole-number dtype, and nothing changes (section 2.1, V1)", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    m[2].weight.requires_grad = false
    m[1]:requires_grad_(false)
    refused(m, function() m:type "i64" end, "RuntimeError", "requires grad")
    m[2].bias.requires_grad = false
    m:type "i64"
    assert.equal("int64", m[1].weight.dtype)
    assert.equal("int64", m[2].bias.dtype)
  end)

  it("C115: an unknown dtype is a type error before the walk", function()
    local m = mixed()
    refused(m, function() m:type "float31" end, "TypeError", "float31")
    refused(m, function() m:type() end, "TypeError", "expected a dtype")
    refused(m, function() m:type(4) end, "TypeError")
  end)
end)

describe("module:cpu and cuda", function()
  K.each_mode("C116 T110: devices that this build lacks are no reason to touch the model", function()
    local m = mixed()
    refused(m, function() m:xpu() end, "NotImplementedError", "xpu: backend not built")
    refused(m, function() m:ipu(1) end, "NotImplementedError", "ipu:1")
    refused(m, function() m:mtia() end, "NotImplementedError", "mtia")
    refused(m, function() m:xpu "1" end, "TypeError", "index")
    refused(m, function() m:cuda(-1) end, "TypeError", "index")
    if not pcall(tm.zeros, 1, { device = "cuda" }) then
      refused(m, function() m:cuda() end, "NotImplementedError", "cuda: backend not built")
      refused(m, function() m:cuda(0) end, "NotImplementedError", "cuda:0")
    end
  end)

  K.each_mode("C116: cpu keeps dtypes and takes no arguments", function()
    local m = mixed()
    local before = dtypes(m)
    refused(m, function() m:cpu(1) end, "TypeError", "no arguments")
    assert.equal(m, (m:cpu()))
    assert.same(before, dtypes(m))
  end)

  pending("C116 T87: cuda() and cpu() with a pass between them keep identity, gradients follow: needs CUDA")
end)

describe("module:to, call forms", function()
  local function as(expected, ...)
    local m = nn.Linear(2, 1)
    local n = select("#", ...)
    assert.equal(m, (m:to(...)), n)
    assert.same(expected, { m.weight.device, m.bias.dtype })
  end

  it("C117 T31: device, dtype, tensor, non_blocking, in every order that is allowed", function()
    local t = tm.zeros({ 1 }, { dtype = "float64", device = "meta" })
    as { "cpu", "float32" }
    as({ "cpu", "float32" }, nil)
    as({ "cpu", "float32" }, nil, nil, nil)
    as({ "cpu", "float32" }, "cpu")
    as({ "meta", "float32" }, "meta", nil)
    as({ "cpu", "float16" }, "cpu", "f16")
    as({ "cpu", "float16" }, "cpu", "float16", true)
    as({ "cpu", "float32" }, "cpu", nil, true)
    as({ "cpu", "bfloat16" }, nil, "bf16")
    as({ "cpu", "float64" }, nil, "f64", false)
    as({ "cpu", "float16" }, "f16")
    as({ "cpu", "float16" }, "f16", true)
    as({ "cpu", "float16" }, "float16", nil)
    as({ "meta", "float64" }, t)
    as({ "meta", "float64" }, t, true)
    as({ "cpu", "float32" }, {})
    as({ "meta", "float16" }, { device = "meta", dtype = "f16" })
    as({ "meta", "float64" }, { tensor = t, non_blocking = true })
    as({ "cpu", "float64" }, { dtype = "f64", non_blocking = false, memory_format = "channels_last" })
    as({ "cpu", "float64" }, "f64", { memory_format = "channels_last" })
    as({ "cpu", "float64" }, "cpu", { dtype = "f64" })
    as({ "cpu", "float64" }, "cpu", "f64", true, { memory_format = "preserve_format" })
    as({ "meta", "float64" }, t, { non_blocking = true })
  end)

  it("C117: to() still walks: new parameters in overwrite mode, new contents in swap mode", function()
    for _, form in ipairs { function(m) m:to() end, function(m) m:to(nil) end, function(m) m:to {} end } do
      for _, mode in ipairs(K.MODES) do
        K.with_flags(mode)(function()
          local m = nn.Linear(2, 1)
          local w, impl = m.weight, tm.impl_id(m.weight)
          form(m)
          assert.equal(mode.name == "overwrite", m.weight ~= w)
          assert.equal(mode.name == "default", tm.impl_id(m.weight) == impl)
          assert.equal(w:storage_id(), m.weight:storage_id())
        end)
      end
    end
  end)

  K.each_mode("C118 C72 T30: what is not allowed is an error before anything changes", function()
    local m = mixed()
    local t = tm.zeros(1)
    local function wrong(kind, pattern, ...)
      local n, a, b, c, d, e = select("#", ...), ...
      refused(m, function() m:to(unpack({ a, b, c, d, e }, 1, n)) end, kind, pattern)
    end
    wrong("TypeError", "dtype or nil, got boolean", "cpu", true)
    wrong("TypeError", "dtype or nil, got boolean", nil, true)
    wrong("TypeError", "unknown option 1", { "cpu" })
    wrong("TypeError", "device comes before", "f16", { device = "cpu" })
    wrong("TypeError", "boolean", "f16", "cpu")
    wrong("TypeError", "boolean", t, "f16")
    wrong("TypeError", "one or the other", t, { dtype = "f16" })
    wrong("TypeError", "one or the other", { tensor = t, device = "cpu" })
    wrong("TypeError", "channels_last", "cpu", "channels_last") -- a memory format is a keyword
    wrong("TypeError", "boolean", "cpu", "f16", "channels_last")
    wrong("TypeError", "boolean", "f16", true, "channels_last")
    wrong("TypeError", "got boolean", true)
    wrong("TypeError", "tensor must be", { tensor = 1 })
    wrong("TypeError", "non_blocking must be", { non_blocking = 1 })
    wrong("TypeError", "dtyp", { dtyp = "f16" })
    wrong("TypeError", "twice", "cpu", "f16", { dtype = "f16" })
    wrong("TypeError", "options must come last", { dtype = "f16" }, true)
    wrong("TypeError", "got 5 arguments", "cpu", "f16", true, nil, 1)
    wrong("ValueError", "nowhere", "nowhere")
    wrong("ValueError", "memory_format is nhwc", { memory_format = "nhwc" })
    wrong("ValueError", "1.5 is no index", 1.5)
    wrong("TypeError", "device", { device = true })
    -- copy is never ignored in silence
    wrong("RuntimeError", "no option copy", { copy = true })
    wrong("RuntimeError", "no option copy", { copy = false })
    wrong("RuntimeError", "no option copy", "cpu", "f16", true, true)
    wrong("RuntimeError", "no option copy", "f16", true, false)
    wrong("RuntimeError", "no option copy", t, false, true)
    if not pcall(tm.zeros, 1, { device = "cuda" }) then wrong("RuntimeError", "cuda:0", 0) end -- a number is the index of a GPU
  end)

  pending("C122 C123 T88: to(\"cuda\", \"f32\", true) from pinned memory keeps the source until the copy is done: needs CUDA")

  it("C122: on the CPU non_blocking changes nothing: the result is there", function()
    local m = holder { w = param(100) }
    local want = m.w:tolist()
    m:to("cpu", "f64", true)
    assert.same(want, m.w:tolist())
  end)

  it("C123: a transaction holds old and new contents side by side; when that is too much, nothing changes", function()
    local m = nn.Sequential()
    for _ = 1, 8 do m:append(holder { w = nn.Parameter(tm.zeros(256, 1024)) }) end -- 1 MiB each
    tm.empty_cache()
    local used = tm.memory_stats().in_use
    tm.set_memory_limit(used + 8 * 2 ^ 20)
    local ok, e = pcall(refused, m, function() m:double() end, "OutOfMemory") -- needs 16 MiB more
    tm.set_memory_limit(0)
    if not ok then error(e, 0) end
    m:double()
    assert.equal("float64", m[8].w.dtype)
  end)

  it("C123: atomic = false holds one tensor twice at most", function()
    local m = nn.Sequential()
    for _ = 1, 8 do m:append(holder { w = nn.Parameter(tm.zeros(256, 1024)) }) end
    tm.collect()
    local function peak(fn)
      local used = tm.memory_stats().in_use
      tm.reset_peak_memory()
      fn()
      return (tm.memory_stats().peak - used) / 2 ^ 20
    end
    assert.near(16, peak(function() m:double() end), 0.1)
    tm.collect()
    assert.is_true(peak(function() m:to { dtype = "f32", atomic = false } end) < 4)
    assert.equal("float32", m[8].w.dtype)
  end)
end)

describe("module:to, memory formats", function()
  ---What a convolution over images holds, one over sequences, and a buffer of whole numbers.
  local function conv2d()
    local m = holder { weight = param(4, 3, 2, 5), bias = param(4), ids = tm.randint(1, 9, { 2, 3, 4, 5 }, { dtype = "int64" }) }
    m.weight.grad = tm.randn(4, 3, 2, 5)
    return m
  end
  local function conv1d() return holder { weight = param(4, 3, 2) } end
  local function conv3d() return holder { weight = param(4, 3, 2, 5, 6) } end
  local LAST, LAST_3D = { 30, 1, 15, 3 }, { 180, 1, 90, 18, 3 }

  K.each_mode("C120 T32: channels_last lays out tensors of 4 dims, gradients and integer buffers too, and no others", function()
    local m = nn.Sequential(conv2d(), conv1d())
    local w, g, ids = m[1].weight:tolist(), m[1].weight.grad:tolist(), m[1].ids:tolist()
    m:to { memory_format = "channels_last" }
    assert.same(LAST, m[1].weight:stride())
    assert.same(LAST, m[1].weight.grad:stride())
    assert.same({ 60, 1, 15, 3 }, m[1].ids:stride())
    assert.equal("int64", m[1].ids.dtype)
    assert.same({ 1 }, m[1].bias:stride())
    assert.same({ 6, 2, 1 }, m[2].weight:stride())
    assert.same(w, m[1].weight:tolist())
    assert.same(g, m[1].weight.grad:tolist())
    assert.same(ids, m[1].ids:tolist())
    m:to("f64", { memory_format = "contiguous_format" })
    assert.same({ 30, 10, 5, 1 }, m[1].weight:stride())
    assert.same(w, m[1].weight:tolist())
  end)

  K.each_mode("C120: channels_last_3d lays out tensors of 5 dims", function()
    local m = conv3d()
    local w = m.weight:tolist()
    m:to { memory_format = "channels_last_3d" }
    assert.same(LAST_3D, m.weight:stride())
    assert.same(w, m.weight:tolist())
  end)

  K.each_mode("C120 T33: a format for other dims is an error, and the layers before it stay as they were (section 2.1, V1)", function()
    local m = nn.Sequential(conv2d(), conv3d())
    refused(m, function() m:to { memory_format = "channels_last" } end, "RuntimeError", "channels_last does not go with float32 %(4, 3, 2")
    refused(m, function() m:to("f16", { memory_format = "channels_last_3d" }) end, "RuntimeError", "channels_last_3d does not go with")
  end)

  K.each_mode("C120 C65 T33: with atomic = false the layers before it are converted", function()
    local m = nn.Sequential(conv2d(), conv3d())
    H.raises(function() m:to { memory_format = "channels_last", atomic = false } end, "RuntimeError", "does not go with")
    assert.same(LAST, m[1].weight:stride())
    assert.same({ 180, 60, 30, 6, 1 }, m[2].weight:stride())
  end)

  K.each_mode("C121 C125 T34: a layout stays in later conversions and in to_empty", function()
    local m = conv2d():to { memory_format = "channels_last" }
    local w = m.weight:tolist()
    m:double()
    assert.same(LAST, m.weight:stride())
    assert.same(LAST, m.weight.grad:stride())
    assert.same(w, m.weight:tolist())
    m:to_empty { device = "cpu" }
    assert.same(LAST, m.weight:stride())
    assert.same(LAST, m.weight.grad:stride())
    assert.same({ 60, 1, 15, 3 }, m.ids:stride())
  end)

  K.each_mode("C121 T35: a dense tensor keeps the order of its dims, one with gaps is compacted", function()
    local m = holder { w = nn.Parameter(tm.randn(3, 5):t()), s = nn.Parameter(tm.randn(4, 6)[{ {}, { 1, 3 } }]) }
    assert.same({ 6, 1 }, m.s:stride())
    local w, s = m.w:tolist(), m.s:tolist()
    m:double()
    assert.same({ 1, 5 }, m.w:stride())
    assert.same({ 3, 1 }, m.s:stride())
    assert.same(w, m.w:tolist())
    assert.same(s, m.s:tolist())
  end)
end)

describe("module:to_empty", function()
  it("C125 C126 T36: on the same device, without flags, all objects stay and all values are lost", function()
    local m = nn.Linear(2, 3)
    m.weight.grad = tm.ones(3, 2)
    m.bias.requires_grad = false
    m:register_buffer("cache", tm.ones(4), { persistent = false })
    local w, g, storage, cache = m.weight, m.weight.grad, m.weight:storage_id(), m.cache
    assert.equal(m, (m:to_empty { device = "cpu" }))
    assert.is_true(m.weight == w and w.grad == g and m.cache ~= cache)
    assert.is_true(w:storage_id() ~= storage and m.cache:storage_id() ~= cache:storage_id())
    assert.same({ 3, 2 }, w:size())
    assert.same({ 3, 2 }, g:size())
    assert.is_true(w.requires_grad)
    assert.is_false(m.bias.requires_grad)
  end)

  it("C126 C125: from meta, parameters are new objects, but for swap mode", function()
    for _, mode in ipairs(K.MODES) do
      K.with_flags(mode)(function()
        local m = nn.Linear(2, 3, { device = "meta" })
        m.weight.grad = tm.zeros({ 3, 2 }, { device = "meta" })
        m.bias.requires_grad = false
        local w = m.weight
        m:to_empty { device = "cpu" }
        assert.equal(mode.swap, m.weight == w)
        assert.same({ "cpu", "cpu", "cpu" }, { m.weight.device, m.weight.grad.device, m.bias.device })
        assert.is_true(m.weight.requires_grad and nn.is_parameter(m.weight))
        assert.is_false(m.bias.requires_grad)
      end)
    end
  end)

  K.each_mode("C41 C125 T37: recurse = false leaves the children alone", function()
    local m = nn.Sequential(nn.Linear(1, 1))
    m:register_parameter("own", param(2))
    m:register_buffer("buffer", tm.zeros(1))
    m:to_empty { device = "meta", recurse = false }
    assert.same({ "meta", "meta", "cpu" }, { m.own.device, m.buffer.device, m[1].weight.device })
  end)

  it("C125 C72: the device is needed, and wrong arguments change nothing", function()
    local m = mixed()
    refused(m, function() m:to_empty() end, "TypeError", "device is missing")
    refused(m, function() m:to_empty { device = "nowhere" } end, "ValueError", "nowhere")
    refused(m, function() m:to_empty { device = "cpu", recurse = 0 } end, "TypeError", "recurse")
    refused(m, function() m:to_empty { device = "cpu", dtype = "f16" } end, "TypeError", "dtype")
  end)

  it("C128: a debug build fills the memory, so that nobody takes it for zeros", function()
    local m = holder { w = param(100), n = tm.zeros({ 3 }, { dtype = "int32" }) }
    m:to_empty { device = "cpu" }
    assert.same({ 100 }, m.w:size())
    if not H.sanitized then return end -- the release build leaves it as it is
    for _, v in ipairs(m.w:tolist()) do assert.is_true(v ~= v) end
    assert.same({ -1, -1, -1 }, m.n:tolist())
  end)
end)

describe("a model on meta", function()
  K.each_mode("C124 T38: has no data to convert; the error says what to do, and nothing changes", function()
    local m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, { device = "meta" }))
    refused(m, function() m:to "cpu" end, "NotImplementedError", "to_empty")
    refused(m, function() m:to("cpu", "f16") end, "NotImplementedError", "to_empty")
    refused(m, function() m:cpu() end, "NotImplementedError", "to_empty")
    m:double() -- dtypes need no data
    assert.equal("float64", m[2].weight.dtype)
  end)

  K.each_mode("C127: is materialised by to_empty, ties, and initialisation of all that it holds", function()
    local m = nn.Sequential(nn.Linear(2, 2, { device = "meta" }), nn.Linear(2, 2, { device = "meta" }))
    m[2].weight = m[1].weight
    m:register_buffer("scale", tm.zeros({ 2 }, { device = "meta" }), { persistent = false })
    local groups = nn.tied_groups(m)
    m:to_empty { device = "cpu" }
    nn.retie(groups)
    for p in m:parameters() do nn.init.constant_(p, 0.5) end
    m.scale:fill_(2)
    assert.equal(m[1].weight, m[2].weight)
    assert.near_tensor({ { 3, 3 } }, m[1](tm.ones(1, 2)) * m.scale)
    m(tm.ones(1, 2)):sum():backward()
    assert.same({ 2, 2 }, m[1].weight.grad:size())
  end)

  it("C127 T117: or by a load with assign, without to_empty; what has no key stays on meta", function()
    local m = nn.Linear(2, 2, { device = "meta" })
    m:register_buffer("scale", tm.zeros({ 2 }, { device = "meta" }), { persistent = false })
    local real = nn.Linear(2, 2)
    m:load_state_dict({ weight = real.weight }, { strict = false, assign = true })
    assert.same({ "cpu", "meta", "meta" }, { m.weight.device, m.bias.device, m.scale.device })
  end)
end)
