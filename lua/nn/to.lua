---to.lua: the methods that convert a module: to, float, cpu, to_empty ... They read their arguments, so that a wrong
---one is an error before anything happens; self:_convert (convert.lua) does the work.

local B = require "tmod.ffi"
local options = require "tmod.functional".options
local C, is_tensor, type_name, fail = B.C, B.is_tensor, B.type_name, B.fail

local methods = {}

---Converts. With the overwrite flag, the second result maps each old parameter to the new one in its place. (Without it
---there is no second result, which would get into calls such as nn.Sequential(l:double()).)
local function converted(self, spec)
  local _, replaced = self:_convert(spec)
  if C.tm_future_overwrite() ~= 0 and C.tm_future_swap() == 0 then return self, replaced end
  return self
end

-- to ------------------------------------------------------------------------------------------------------------------

local FORMAT = { preserve_format = C.TM_PRESERVE, channels_last = C.TM_CHANNELS_LAST, channels_last_3d = C.TM_CHANNELS_LAST_3D,
  contiguous_format = C.TM_CONTIGUOUS }
local KEYWORDS = { device = true, dtype = true, tensor = true, non_blocking = true, memory_format = true, copy = true, atomic = true }

---A device: its name, or the index of a GPU.
local function device_of(v)
  if type(v) == "number" then
    if v < 0 or v ~= math.floor(v) then fail("ValueError", "to: %s is no index of a GPU", tostring(v)) end
    v = "cuda:" .. v
  end
  B.device(v)
  return v
end

local function dtype_of(what, v)
  if v == nil then return nil end
  local code = B.dtype(v)
  if C.tm_dtype_is_float(code) == 0 then
    fail("TypeError", "%s: a module converts to floating dtypes only, got %s; type() casts whole numbers too", what, B.dtype_name[code])
  end
  return B.dtype_name[code]
end

local function boolean(name, v)
  if v ~= nil and type(v) ~= "boolean" then fail("TypeError", "to: %s must be a boolean, got %s", name, type_name(v)) end
end

local function refuse_copy(v)
  if v == nil then return end
  boolean("copy", v)
  fail("RuntimeError", "to: a module has no option copy: it is converted in place")
end

local function is_options(v) return type(v) == "table" and not is_tensor(v) end

---Checks what the words say and turns them into a spec of _convert.
local function spec_of(k)
  refuse_copy(k.copy)
  boolean("non_blocking", k.non_blocking) -- copies between host memory and itself are never asynchronous
  boolean("atomic", k.atomic)
  local dtype, device = k.dtype, k.device
  if k.tensor ~= nil then
    if not is_tensor(k.tensor) then fail("TypeError", "to: tensor must be a tensor, got %s", type_name(k.tensor)) end
    if dtype ~= nil or device ~= nil then fail("TypeError", "to: a tensor says dtype and device; give one or the other") end
    dtype, device = k.tensor.dtype, k.tensor.device
  end
  local format
  if k.memory_format ~= nil then
    format = FORMAT[k.memory_format]
    if not format then
      fail(type(k.memory_format) == "string" and "ValueError" or "TypeError",
        "to: memory_format is %s, expected channels_last, channels_last_3d, contiguous_format or preserve_format",
        tostring(k.memory_format))
    end
  end
  return { dtype = dtype_of("to", dtype), only_floating = true, device = device_of(device), format = format, atomic = k.atomic }
end

---The last argument may be a table of further options.
local function merge(words, opts, n, last)
  if n > last then fail("TypeError", "to: got %d arguments, the options must come last", n) end
  options(opts, "to", KEYWORDS)
  for name, v in pairs(opts) do
    if words[name] ~= nil then fail("TypeError", "to: %s was given twice", name) end
    words[name] = v
  end
  return words
end

---What comes last: nothing, options, or the copy that other libraries have here.
local function finish(words, n, v, last)
  if is_options(v) then return merge(words, v, n, last) end
  refuse_copy(v)
  if n > last then fail("TypeError", "to: got %d arguments, expected at most %d", n, last) end
  return words
end

---to(tensor[, non_blocking]), to(dtype[, non_blocking])
local function after_one(words, n, b, c)
  if is_options(b) then words = merge(words, b, n, 2)
  else
    boolean("non_blocking, the second argument,", b)
    words.non_blocking = b
    words = finish(words, n, c, 3)
  end
  if words.dtype and words.device ~= nil then fail("TypeError", "to: a device comes before the dtype, as in to(\"cpu\", \"float16\")") end
  return words
end

---to(device[, dtype[, non_blocking]])
local function after_device(words, n, b, c, d)
  if is_options(b) then return merge(words, b, n, 2) end
  if b ~= nil and type(b) ~= "string" then
    fail("TypeError", "to: after a device comes a dtype or nil, got %s; as in to(\"cuda\", nil, true)", type_name(b))
  end
  words.dtype = b
  if is_options(c) then return merge(words, c, n, 3) end
  boolean("non_blocking, the third argument,", c)
  words.non_blocking = c
  return finish(words, n, d, 4)
end

local function words_of(n, a, b, c, d)
  if is_options(a) then return merge({}, a, n, 1) end
  if is_tensor(a) then return after_one({ tensor = a }, n, b, c) end
  if a == nil or type(a) == "number" then return after_device({ device = a }, n, b, c, d) end
  if type(a) ~= "string" then fail("TypeError", "to: expected a device, a dtype, a tensor or options, got %s", type_name(a)) end
  if C.tm_dtype_find(a) >= 0 then return after_one({ dtype = a }, n, b, c) end
  return after_device({ device = a }, n, b, c, d)
end

---Converts parameters, gradients and buffers: floating ones to a dtype, all to a device or, with 4 or 5 dims, to a
---memory format.
---  to(device[, dtype[, non_blocking]])   to(dtype[, non_blocking])   to(tensor[, non_blocking])
---  to{device=, dtype=, tensor=, non_blocking=, memory_format=, atomic=}
---A device is a name or the index of a GPU; options may also come after the other arguments. All is converted or
---nothing, for which old and new contents exist side by side; atomic = false converts one tensor after the other.
---@return nn.Module self
---@return table<Tensor, Tensor>? replaced with the overwrite flag: old parameter -> new one, the first if its tie broke;
---for Optimizer:rebind
function methods:to(...)
  local n, a, b, c, d = select("#", ...), ...
  return converted(self, spec_of(words_of(n, a, b, c, d)))
end

-- the others --------------------------------------------------------------------------------------------------------------

for name, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16" } do
  methods[name] = function(self) return converted(self, { dtype = dtype, only_floating = true }) end
end

---All parameters and buffers in this dtype, whole numbers and booleans too.
---@param dtype string
function methods:type(dtype)
  if dtype == nil then fail("TypeError", "type: expected a dtype, got nil") end
  return converted(self, { dtype = B.dtype_name[B.dtype(dtype)] })
end

function methods:cpu(...)
  if select("#", ...) > 0 then fail("TypeError", "cpu: expected no arguments, got %s", type_name((...))) end
  return converted(self, { device = "cpu" })
end

for _, name in ipairs { "cuda", "xpu", "ipu", "mtia" } do
  ---@param index? integer of the device; nil: the current one
  methods[name] = function(self, index)
    if index ~= nil and (type(index) ~= "number" or index < 0 or index ~= math.floor(index)) then
      fail("TypeError", "%s: expected the index of a device, got %s", name, tostring(index))
    end
    local device = index and name .. ":" .. index or name
    if C.tm_device_find(device) < 0 then fail("NotImplementedError", "%s: backend not built: this build has no device %q", name, device) end
    return converted(self, { device = device })
  end
end

local TO_EMPTY = { device = true, recurse = true }

---Uninitialised memory of the same shapes, dtypes and order of strides on a device, for parameters, gradients and
---buffers; values are lost. For modules that were built on meta.
---@param opts {device: string, recurse?: boolean} recurse = false: the module's own tensors only
---@return nn.Module self
---@return table<Tensor, Tensor>? replaced as that of to
function methods:to_empty(opts)
  opts = options(opts, "to_empty", TO_EMPTY)
  if opts.device == nil then fail("TypeError", "to_empty: the option device is missing, as in to_empty{device = \"cpu\"}") end
  if opts.recurse ~= nil and type(opts.recurse) ~= "boolean" then
    fail("TypeError", "to_empty: recurse must be a boolean, got %s", type_name(opts.recurse))
  end
  return converted(self, { device = device_of(opts.device), fresh = true, recurse = opts.recurse })
end

return methods
