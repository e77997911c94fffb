---ffi.lua: the border to C. It owns the library, the table of handles, and the one function that turns a handle
---into a Lua tensor. Declarations, metatables and the registry exist once per process, also when a test runner
---loads the modules again.

local ffi = require "ffi"
local registry = debug.getregistry()
if registry["tmod.ffi"] then return registry["tmod.ffi"] end

local errors = require "tmod.errors"

local B = { ffi = ffi, fail = errors.fail, Error = errors }
registry["tmod.ffi"] = B

-- Debian's LuaJIT builds have a 47-bit heap; older ones cannot hold many tensors' handles.
if not ffi.abi("gc64") and ffi.arch == "x64" then
  io.stderr:write("tmod: this LuaJIT has a heap of 2 GB (no GC64); expect to run out of memory early\n")
end

---The library beside this file: prefix/share/lua/5.1/tmod/ffi.lua and prefix/lib/libtmod.so.
local function load_library()
  local tried = {}
  local function try(path)
    local ok, lib = pcall(ffi.load, path)
    if ok then return lib end
    tried[#tried + 1] = "  " .. tostring(lib)
  end
  local explicit = os.getenv "TMOD_LIBRARY"
  if explicit then
    local lib = try(explicit)
    if lib then return lib end
  end
  local here = debug.getinfo(1, "S").source:sub(2)
  local prefix = here:match "^(.*)/share/lua/5%.1/tmod/ffi%.lua$"
  local lib = prefix and try(prefix .. "/lib/libtmod.so") or try "tmod"
  return lib or error("tmod: libtmod was not found:\n" .. table.concat(tried, "\n"), 0)
end

local C = load_library()
B.C = C

-- The header comes from the library itself, so the declarations cannot drift from the code.
if not pcall(ffi.typeof, "tm_frame") then
  pcall(ffi.cdef, "const char *tm_header(void);")
  ffi.cdef(ffi.string(C.tm_header()))
end

-- Freed, with every tensor that it still names, when the state closes.
local H = C.tm_handles_new()
assert(H ~= nil, "tmod: out of memory")
H = ffi.gc(H, C.tm_handles_free)
B.handles = H

---The one frame of this state: C copies what it needs before anything else runs.
local list = ffi.new("double[?]", C.TM_MAXLIST)
local frame = ffi.new "tm_frame"
frame.handles = H
frame.list = list
B.frame, B.list, B.list_size = frame, list, tonumber(C.TM_MAXLIST)

---Makes room for `n` numbers in the frame's list, and returns it.
function B.room(n)
  if n > B.list_size then
    B.list_size = n * 2
    B.list = ffi.new("double[?]", B.list_size)
    frame.list = B.list
  end
  return B.list
end

-- dtype and device names ------------------------------------------------------------------------------------

B.dtype_name, B.dtype_code = {}, {}
for code = 0, C.TM_NDTYPE - 1 do
  local name = ffi.string(C.tm_dtype_name(code))
  B.dtype_name[code] = name
  B.dtype_code[name] = code
end

---Code of a dtype name; -1 for nil.
function B.dtype(name)
  if name == nil then return -1 end
  local code = B.dtype_code[name]
  if code then return code end
  code = type(name) == "string" and C.tm_dtype_find(name) or -1
  if code < 0 then errors.fail("TypeError",
    "dtype %s: expected float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8 or bool",
      type(name) == "string" and ("%q"):format(name) or type(name)) end
  B.dtype_code[name] = code
  return code
end

local real_codes, fake_codes = {}, {} -- the same name means another device in fake mode
local device_code = real_codes
---Switches fake mode of this thread; returns the old mode.
function B.set_fake_mode(on)
  device_code = on and fake_codes or real_codes
  return C.tm_fake_mode_set(on and 1 or 0) ~= 0
end

---Code of a device name; -1 for nil.
function B.device(name)
  if name == nil then return -1 end
  local code = device_code[name]
  if code then return code end
  if type(name) ~= "string" then errors.fail("TypeError", "device: expected a string such as \"cpu\", got a %s", type(name)) end
  code = C.tm_device_find(name)
  if code < 0 then B.raise() end
  device_code[name] = code
  return code
end

function B.device_name(code) return ffi.string(C.tm_device_name(code)) end

-- errors ---------------------------------------------------------------------------------------------------------

---Raises this thread's last error of C at the user's line.
function B.raise()
  local code = C.tm_last_code()
  error(errors.new(errors.KIND[code] or "RuntimeError", ffi.string(C.tm_last_error())), 0)
end

---Raises if a status says failure.
function B.check(status)
  if status ~= 0 and status ~= 100 then B.raise() end
end

-- tensors as Lua tables --------------------------------------------------------------------------------------------

---slot -> Lua tensor. A tensor that Lua dropped is missing here after a collection; sweep tells C.
local reg = setmetatable({}, { __mode = "v" })
B.reg = reg
B.tensor_metatable = {} -- filled by tensor.lua
local mt = B.tensor_metatable

---The Lua tensor of a handle that C just made.
local function wrap(handle, slot)
  local t = setmetatable({ _h = handle }, mt)
  reg[slot] = t
  return t
end
B.wrap_new = wrap

---The Lua tensor of a tm_tensor*, taking over the reference; the same table for the same handle.
function B.wrap(ptr)
  if ptr == nil then B.raise() end
  local handle = C.tm_handles_put(H, ptr)
  if handle == 0 then B.raise() end
  local slot = handle % 4294967296
  return reg[slot] or wrap(handle, slot)
end

---The same for a borrowed pointer; nil for NULL.
function B.wrap_borrowed(ptr)
  if ptr == nil then return nil end
  C.tm_tensor_retain(ptr)
  return B.wrap(ptr)
end

---What a value is called in messages.
function B.type_name(v)
  if type(v) ~= "table" then return type(v) end
  if rawget(v, "_h") then return "tensor" end
  local m = getmetatable(v)
  return type(m) == "table" and type(m.__name) == "string" and m.__name or "table"
end

---Raises unless v is a tensor: "view_as: other must be a tensor, got number".
function B.need_tensor(what, name, v)
  if type(v) ~= "table" or getmetatable(v) ~= mt then
    errors.fail("TypeError", "%s: %s must be a tensor, got %s", what, name, B.type_name(v))
  end
end

function B.is_callable(v)
  local m = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or type(m) == "table" and m.__call ~= nil
end

---Raises unless v can be called.
function B.need_function(what, v)
  if not B.is_callable(v) then errors.fail("TypeError", "%s: expected a function, got %s", what, B.type_name(v)) end
end

---Raises unless n is the size of a dim.
function B.need_size(what, name, n)
  if type(n) ~= "number" or n < 0 or n ~= math.floor(n) then
    errors.fail(type(n) == "number" and "ValueError" or "TypeError", "%s: %s must be a whole number from 0 on, got %s", what, name,
      type(n) == "number" and tostring(n) or B.type_name(n))
  end
end

---Options a caller may give, checked against the known ones; an empty table for nil.
function B.options(opts, what, known)
  if opts == nil then return {} end
  if type(opts) ~= "table" or B.is_tensor(opts) then
    errors.fail("TypeError", "%s: expected a table of options, got %s", what, B.type_name(opts))
  end
  for k in pairs(opts) do
    if not known[k] then
      local names = {}
      for name in pairs(known) do names[#names + 1] = name end
      table.sort(names)
      errors.fail("TypeError", "%s: unknown option %s; known: %s", what, tostring(k), table.concat(names, ", "))
    end
  end
  return opts
end

function B.is_tensor(v) return type(v) == "table" and getmetatable(v) == mt end

---The tm_tensor* of a Lua tensor, borrowed.
function B.ptr(t)
  local h = type(t) == "table" and rawget(t, "_h")
  if not h then errors.fail("TypeError", "expected a tensor, got %s", B.type_name(t)) end
  local p = C.tm_handles_at(H, h)
  if p == nil then B.raise() end
  return p
end

local DEAD = 4096
local dead, ids = ffi.new("int32_t[?]", DEAD), ffi.new("int64_t[?]", 256)

---What Lua keeps on behalf of C, by number: hooks and custom functions of the graph, owners of foreign memory.
---An entry goes when C says that its number is dead.
B.kept = {}

---Hands the slots that Lua no longer refers to back to C. True if functions were forgotten, which may free more.
local function sweep()
  local used, n = C.tm_handles_used(H), 0
  for slot = 1, C.tm_handles_end(H) - 1 do
    if used[slot] ~= 0 and reg[slot] == nil then
      dead[n] = slot
      n = n + 1
      if n == DEAD then
        C.tm_handles_sweep(H, dead, n)
        n = 0
      end
    end
  end
  C.tm_handles_sweep(H, dead, n)
  local forgot = false
  repeat
    n = C.tm_dead_ids(ids, 256)
    for i = 0, n - 1 do B.kept[tonumber(ids[i])] = nil end
    forgot = forgot or n > 0
  until n == 0
  return forgot
end
B.sweep = sweep

local LARGE_HEAP = 48 * 1024 -- KB: from here a full collection costs tens of milliseconds
local sentinel = setmetatable({}, { __mode = "v" })

---A full collection; autograd.lua replaces it by one that sees cycles through the graph.
function B.collect_garbage() collectgarbage() end

---Answers C's request. Bytes are given back by a full collection. A mere number of small tensors justifies one only
---while the Lua heap is small; else the sweep waits for the collector's own cycle, which the sentinel shows.
function B.collect()
  if C.tm_memory_pressure() ~= 0 then
    B.collect_garbage(true)
    sweep()
    C.tm_memory_collected()
  elseif collectgarbage "count" < LARGE_HEAP then
    B.collect_garbage()
    sweep()
  elseif sentinel[1] == nil then
    sentinel[1] = {}
    sweep()
  else
    C.tm_handles_sweep(H, dead, 0)
  end
end

---After an operator that returned TM_COLLECT.
function B.after(t)
  if C.tm_anomaly_mode() ~= 0 and t then C.tm_tensor_annotate(B.ptr(t), errors.where()) end
  B.collect()
end

---For what makes tensors without dispatch, which asks by itself: collects if it is time.
function B.tidy()
  if C.tm_handles_want_sweep(H) ~= 0 or C.tm_memory_pressure() ~= 0 then B.collect() end
end

---A full collection and sweep now: what Lua dropped is freed on return.
function B.collect_now()
  collectgarbage()
  repeat B.collect_garbage(true) until not sweep()
  C.tm_memory_collected()
end

return B
