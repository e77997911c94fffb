---fake.lua: tensors that report a device and have no bytes. In fake mode every name of a device means its fake twin,
---so that a model can be built, loaded, converted and run for a device that this machine has not, or for more memory
---than it has; results have the right shapes, dtypes and devices, and their bytes are counted.
---
---    tm.fake_mode(function()
---      local model = build():to("cuda", "bfloat16")
---      print(tm.fake_memory(model).total)
---    end)

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local wrapper = require "tmod.wrapper"
local C, ffi, ptr = B.C, B.ffi, B.ptr

local fake = {}

---Has this tensor no bytes behind the device that it reports?
function fake.is(t) return B.is_tensor(t) and bit.band(C.tm_tensor_marks(ptr(t)), C.TM_MARK_FAKE) ~= 0 end

local function leave(was, device, ok, ...)
  B.set_fake_mode(was)
  if device then Tensor.set_default_device(device) end
  if not ok then error((...), 0) end
  return ...
end

local MODE = { device = true }

---Runs fn(...) in fake mode: fake_mode(fn, ...) or fake_mode({device = "cuda"}, fn, ...) with another device for new
---tensors. Fakes may be used and converted afterwards, too; there, devices that the machine lacks have no name.
function fake.mode(opts, fn, ...)
  if B.is_callable(opts) then return fake.mode({}, opts, fn, ...) end
  opts = require "tmod.functional".options(opts, "fake_mode", MODE)
  if not B.is_callable(fn) then B.fail("TypeError", "fake_mode: expected a function, got %s", B.type_name(fn)) end
  local was, device = B.set_fake_mode(true), nil
  if opts.device ~= nil then
    device = Tensor.get_default_device()
    local ok, e = pcall(Tensor.set_default_device, opts.device)
    if not ok then return leave(was, nil, false, e) end
  end
  return leave(was, device, pcall(fn, ...))
end

local function twin(t)
  if wrapper.is(t) then return wrapper.convert(t, twin) end
  if fake.is(t) then return t end
  return ops.cast(t:detach(), nil, t.device)
end

---The fake twin of a tensor: same shape, dtype, device and requires_grad. For a whole module: module:_apply(tm.fake.of).
function fake.of(t)
  if not B.is_tensor(t) then B.fail("TypeError", "fake.of: expected a tensor, got %s", B.type_name(t)) end
  local y = fake.mode(autograd.no_grad, twin, t)
  if t.requires_grad and y ~= t then y.requires_grad = true end
  return y
end

local bytes = ffi.new "double[2]"

local function live()
  local list = {}
  fake.mode(function()
    for i = -1, 63 do
      local name = i < 0 and "cpu" or "cuda:" .. i
      B.check(C.tm_fake_memory(C.tm_device_find(name), bytes))
      if bytes[1] > 0 then list[name] = { in_use = bytes[0], peak = bytes[1] } end
    end
  end)
  return list
end

---Bytes of a module's parameters, gradients and buffers by device, and in total; shared memory counts once. Also for
---modules that are not fake. Without a module: what all fakes take, {[device] = {in_use, peak}}; what Lua dropped
---counts until it is collected (tm.collect).
---@param module? nn.Module
function fake.memory(module)
  if module == nil then return live() end
  local result, seen = { total = 0 }, {}
  local function add(t)
    if wrapper.is(t) then
      for _, inner in pairs((wrapper.wrapper_class(t).flatten(t))) do add(inner) end
      return
    end
    local id = t:storage_id()
    if seen[id] then return end
    seen[id] = true
    local n = tonumber(C.tm_tensor_storage_bytes(ptr(t)))
    result[t.device] = (result[t.device] or 0) + n
    result.total = result.total + n
  end
  for p in module:parameters() do
    add(p)
    local grad = p.grad
    if grad then add(grad) end
  end
  for b in module:buffers() do add(b) end
  return result
end

---Forgets the peaks of fake memory.
function fake.reset_peak()
  fake.mode(function()
    for i = -1, 63 do C.tm_fake_peak_reset(C.tm_device_find(i < 0 and "cpu" or "cuda:" .. i)) end
  end)
end

return fake
