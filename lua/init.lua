---init.lua: require "tmod".

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local ops = require "tmod.ops"
local autograd = require "tmod.autograd"
local OrderedDict = require "tmod.ordered"
local C, ffi = B.C, B.ffi

B.debug = os.getenv "TMOD_DEBUG" ~= nil -- warnings for those who look for a fault

local tm = { autograd = autograd, Tensor = Tensor, version = ffi.string(C.tm_version()), _VERSION = "tmod " .. ffi.string(C.tm_version()) }

-- creation and functions of tensors ------------------------------------------------------------------------------

---A tensor from nested tables, a number or a boolean; see Tensor.from_table.
tm.tensor = Tensor.from_table
for _, name in ipairs { "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye",
  "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "from_blob", "is_tensor",
  "set_default_dtype", "get_default_dtype", "set_default_device", "get_default_device" } do
  tm[name] = Tensor[name]
end
tm.cat, tm.stack, tm.where = ops.cat, ops.stack, ops.where

-- dtypes by name: tm.float32 is "float32"
for _, name in ipairs(Tensor.DTYPES) do tm[name] = name end

for _, name in ipairs { "no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "is_grad_enabled" } do
  tm[name] = autograd[name]
end

-- identity --------------------------------------------------------------------------------------------------------

---Number of the handle: never changes and is never used twice.
function tm.id(t) return tonumber(C.tm_tensor_id(B.ptr(t))) end
---Number of the content: travels with swap_tensors.
function tm.impl_id(t) return tonumber(C.tm_tensor_impl_id(B.ptr(t))) end

---References to the content: 1, and one for each accumulator and container that relies on it. A swap wants 1.
function tm.use_count(t) return C.tm_tensor_use_count(B.ptr(t)) end
---How often the content under this handle changed by set_data or a swap: whoever caches by tm.id must compare it.
function tm.epoch(t) return tonumber(C.tm_tensor_epoch(B.ptr(t))) end
---For containers that rely on a tensor's content, as C ones may: until unpin, swaps refuse it.
function tm.pin(t) C.tm_tensor_pin(B.ptr(t)) end
function tm.unpin(t) C.tm_tensor_unpin(B.ptr(t)) end

---@class WeakRef
local WeakRef = {}
WeakRef.__index = WeakRef
WeakRef.__name = "WeakRef"

---The tensor; nil when it is gone.
function WeakRef:get() return self._p ~= nil and B.wrap_borrowed(C.tm_weakref_at(self._p)) or nil end
WeakRef.__call = WeakRef.get
---Gives the reference up, before the collector does.
function WeakRef:release()
  if self._p == nil then return end
  C.tm_weakref_free(ffi.gc(self._p, nil))
  self._p = nil
end

local IDENTITY = { identity = true }

---A reference that does not keep the tensor. It blocks swaps, since it may mean the content, unless identity = true
---says that it means the handle.
---@param opts? {identity?: boolean}
function tm.weakref(t, opts)
  opts = require "tmod.functional".options(opts, "weakref", IDENTITY)
  local p = C.tm_weakref_new(B.ptr(t), opts.identity and 1 or 0)
  if p == nil then B.raise() end
  return setmetatable({ _p = ffi.gc(p, C.tm_weakref_free) }, WeakRef)
end

local NONE = {}

---Names of the fields that a class of tensors declares: swaps exchange only tensors with the same.
local function slots_of(t)
  local class = rawget(t, "_class")
  return class and class.slots or NONE
end

local function same_slots(a, b)
  local mine, theirs = slots_of(a), slots_of(b)
  if mine == theirs then return true end
  local set = {}
  for _, name in ipairs(mine) do set[name] = true end
  for _, name in ipairs(theirs) do
    if not set[name] then return false end
    set[name] = nil
  end
  return next(set) == nil
end

---Why two tensors cannot be exchanged: nil, or an error object.
local function obstacle(a, b)
  local p, q = B.ptr(a), B.ptr(b)
  if C.tm_weakref_blocks(p) == 0 and C.tm_weakref_blocks(q) == 0 and not same_slots(a, b) then
    return B.Error.new("RuntimeError", ("swap_tensors: t1 has slots {%s}, t2 has slots {%s}; they must be the same")
      :format(table.concat(slots_of(a), ", "), table.concat(slots_of(b), ", ")))
  end
  local code = C.tm_can_swap(p, q)
  if code ~= 0 then return B.Error.new(B.Error.KIND[code], ffi.string(C.tm_last_error())) end
end

---Can swap_tensors exchange these? Without side effects.
---@return boolean
---@return string? reason
function tm.can_swap(a, b)
  local e = obstacle(a, b)
  return e == nil, e and e.message
end

---Exchanges the contents of two tensors, their classes and hooks, and the fields that people have put on their tables.
function tm.swap_tensors(a, b)
  local e = obstacle(a, b)
  if e then -- perhaps it is garbage
    B.collect_now()
    e = obstacle(a, b)
    if e then error(e, 0) end
  end
  B.check(C.tm_swap_tensors(B.ptr(a), B.ptr(b)))
  if a == b then return end
  local mine, theirs = {}, {}
  for k, v in next, a do if k ~= "_h" then mine[k] = v end end
  for k, v in next, b do if k ~= "_h" then theirs[k] = v end end
  for k in pairs(mine) do rawset(a, k, nil) end
  for k in pairs(theirs) do rawset(b, k, nil) end
  for k, v in pairs(theirs) do rawset(a, k, v) end
  for k, v in pairs(mine) do rawset(b, k, v) end
  autograd.rehome_hooks(a)
  autograd.rehome_hooks(b)
end

-- random numbers ---------------------------------------------------------------------------------------------------

---@class Generator
local Generator = {}
Generator.__index = Generator
Generator.__name = "Generator"

local function generator_of(p) return setmetatable({ _p = p }, Generator) end
tm.default_generator = generator_of(C.tm_generator_default())

local function check_seed(seed)
  if type(seed) ~= "number" or seed < 0 or seed ~= math.floor(seed) or seed > 2 ^ 53 then
    B.fail("ValueError", "seed: expected a whole number from 0 to 2^53, got %s", tostring(seed))
  end
end

---A stream of random numbers of its own.
function tm.Generator(seed)
  if seed ~= nil then check_seed(seed) end
  local p = C.tm_generator_new(seed or 67280421310721)
  if p == nil then B.raise() end
  return generator_of(ffi.gc(p, C.tm_generator_free))
end

function Generator:manual_seed(seed)
  check_seed(seed)
  C.tm_generator_seed(self._p, seed)
  return self
end
function Generator:initial_seed() return C.tm_generator_initial_seed(self._p) end
---State as a uint8 tensor, for checkpoints.
function Generator:get_state() return B.wrap(C.tm_generator_state(self._p)) end
function Generator:set_state(state) B.check(C.tm_generator_state_set(self._p, B.ptr(state))) end
---One number of [0, 1).
function Generator:uniform() return C.tm_generator_uniform(self._p) end

---Seeds the default generator.
function tm.manual_seed(seed) return tm.default_generator:manual_seed(seed) end

-- memory and threads ------------------------------------------------------------------------------------------------

local info = ffi.new "tm_memory_info"

---Bytes in use, at the peak, waiting in the cache; the limit; allocations and how many the cache answered.
function tm.memory_stats(device)
  B.check(C.tm_memory_stats(B.device(device or "cpu"), info))
  return { in_use = info.in_use, peak = info.peak, cached = info.cached, limit = info.limit, allocations = info.allocations,
    cache_hits = info.cache_hits }
end
function tm.reset_peak_memory(device) C.tm_memory_peak_reset(B.device(device or "cpu")) end
---Bytes that tensors may use at most; 0 or nil: as many as there are.
function tm.set_memory_limit(bytes, device)
  if bytes ~= nil and type(bytes) ~= "number" then
    B.fail("TypeError", "set_memory_limit: expected a number of bytes, got %s", B.type_name(bytes))
  end
  C.tm_memory_limit(B.device(device or "cpu"), bytes or 0)
end
---Gives cached blocks back to the system.
function tm.empty_cache() C.tm_empty_cache() end
---Collects what Lua dropped, and frees its memory, now.
tm.collect = B.collect_now

---Tensors, storages and graph nodes alive in the process.
function tm.live()
  return { tensors = tonumber(C.tm_live_tensors()), storages = tonumber(C.tm_live_storages()), nodes = tonumber(C.tm_live_nodes()) }
end

function tm.get_num_threads() return C.tm_num_threads() end
function tm.set_num_threads(n)
  if type(n) ~= "number" or n < 1 or n ~= math.floor(n) then
    B.fail("ValueError", "set_num_threads: expected a positive whole number, got %s", tostring(n))
  end
  C.tm_num_threads_set(n)
end

local scope_depth = 0

---Moves a tensor out of every scope: it lives until Lua drops it.
function tm.keep(t)
  if scope_depth > 0 then B.check(C.tm_handles_keep(B.handles, t._h, 0)) end
  return t
end

local dead = ffi.new "int32_t[1]"

---Releases what was made at this depth, but for tensors among the results.
local function finish_scope(ok, ...)
  local depth, n = scope_depth, select("#", ...)
  scope_depth = depth - 1
  C.tm_handles_scope(B.handles, scope_depth)
  for i = 1, ok and n or 0 do
    local v = select(i, ...)
    if B.is_tensor(v) then
      C.tm_handles_keep(B.handles, v._h, scope_depth)
    elseif type(v) == "table" then
      for _, t in (OrderedDict.is(v) and OrderedDict.pairs or pairs)(v) do
        if B.is_tensor(t) then C.tm_handles_keep(B.handles, t._h, scope_depth) end
      end
    end
  end
  local used = C.tm_handles_used(B.handles)
  for slot = 1, C.tm_handles_end(B.handles) - 1 do
    if used[slot] == depth + 1 then
      B.reg[slot] = nil
      dead[0] = slot
      C.tm_handles_sweep(B.handles, dead, 1)
    end
  end
  if not ok then error((...), 0) end
  return ...
end

---Runs fn(...) and then frees at once every tensor that it made, but for those it returns (in a table, too), tensors
---passed to tm.keep, and gradients, which belong to their leaves. For loops that want no garbage at all.
function tm.scope(fn, ...)
  B.need_function("scope", fn)
  B.check(C.tm_handles_scope(B.handles, scope_depth + 1))
  scope_depth = scope_depth + 1
  return finish_scope(pcall(fn, ...))
end

---Counts the traces that the JIT holds.
local function traces()
  local util, n = require "jit.util", 0
  for i = 1, 65535 do
    if util.traceinfo(i) then n = n + 1 elseif i > 1000 then break end
  end
  return n
end

---Does a hot loop compile here? Where the JIT finds no memory near the interpreter it stays off without a word.
local function compiles()
  if not jit.status() then return false end
  local before = traces()
  loadstring "local x = 0 for i = 1, 10000 do x = x + i % 7 end return x" ()
  return traces() > before
end

---Does a trace that starts inside a variadic function read the right argument? Debian's own LuaJIT does not
---(docs/luajit.md, 2); tmod avoids the pattern, but programs may have it.
local function varargs_hold()
  local f = loadstring [[
    local function second(n, ...)
      for _ = 1, 3 do n = n + 1 end
      local _, b = ...
      return b
    end
    for _ = 1, 500 do
      if second(1, 10, 20, 30) ~= 20 then return false end
    end
    return true
  ]]
  return f()
end

---What a report about speed or wrong numbers should tell: {luajit, jit, compiles, varargs, gc64, capability, threads}.
---compiles: a hot loop becomes machine code; varargs: this LuaJIT reads `...` rightly in traces.
function tm.doctor()
  return { luajit = jit.version, jit = jit.status(), compiles = compiles(), varargs = varargs_hold(), gc64 = ffi.abi "gc64",
    capability = ffi.string(C.tm_cpu_capability()), threads = C.tm_num_threads() }
end

---Prints what an operator does: tm.help "softmax". Without a name: where to look.
function tm.help(name)
  if name == nil then return print "tm.help \"softmax\" explains an operator; scripts/reference.lua lists all of them" end
  print(require "tmod.reference".help(tostring(name)) or "there is no operator of this name: " .. tostring(name))
end

-- modules that load when first asked for ----------------------------------------------------------------------------

local later = { future = "tmod.future", nn = "tmod.nn", optim = "tmod.optim", data = "tmod.data", ops = "tmod.ops", fake = "tmod.fake" }
---name -> module and the name that it has there
local parts = { save = { "checkpoint", "save" }, load = { "checkpoint", "load" }, WrapperTensor = { "wrapper", "WrapperTensor" },
  tensor_class = { "wrapper", "tensor_class" }, quantize = { "quantize", "quantize" }, Int8Weight = { "quantize", "Int8Weight" },
  fake_mode = { "fake", "mode" }, is_fake = { "fake", "is" }, fake_memory = { "fake", "memory" } }

return setmetatable(tm, { __index = function(t, name)
  local v
  if later[name] then
    v = require(later[name])
  elseif parts[name] then
    v = require("tmod." .. parts[name][1])[parts[name][2]]
  else -- every visible operator is a function too: tm.exp(x)
    v = Tensor[name]
    if v == nil and ops.rows[name] and not ops.rows[name].hidden then v = ops.find(name) end
    if type(v) ~= "function" then return nil end
  end
  rawset(t, name, v)
  return v
end })
