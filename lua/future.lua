---future.lua: tm.future: the two flags that say how a converted tensor reaches the slot of a module. They belong to the
---process: every Lua state and thread sees them. docs/contracts/conversion.md, section 1.

local B = require "tmod.ffi"
local options = require "tmod.functional".options
local C = B.C

local future = {}

local FLAGS = { overwrite = true, swap = true }
local GET = { overwrite = C.tm_future_overwrite, swap = C.tm_future_swap }
local SET = { overwrite = C.tm_future_overwrite_set, swap = C.tm_future_swap_set }

local function check(what, on)
  if type(on) ~= "boolean" then B.fail("TypeError", "%s: expected a boolean, got %s", what, B.type_name(on)) end
end

for flag in pairs(FLAGS) do
  local name = flag .. "_module_params_on_conversion"
  future["get_" .. name] = function() return GET[flag]() ~= 0 end
  future["set_" .. name] = function(on)
    check("set_" .. name, on)
    SET[flag](on and 1 or 0)
  end
end

---Both flags, for restore.
---@return {overwrite: boolean, swap: boolean}
function future.snapshot() return { overwrite = C.tm_future_overwrite() ~= 0, swap = C.tm_future_swap() ~= 0 } end

local function set(flags, what)
  flags = options(flags, what, FLAGS)
  for flag, on in pairs(flags) do check(what .. ": " .. flag, on) end
  for flag, on in pairs(flags) do SET[flag](on and 1 or 0) end
end

---@param flags {overwrite?: boolean, swap?: boolean} from snapshot
function future.restore(flags) set(flags, "restore") end

local function finish(before, ok, ...)
  set(before, "with")
  if not ok then error((...), 0) end
  return ...
end

local function no_yield(co, ok, ...)
  if coroutine.status(co) == "suspended" then
    return false, B.Error.new("AssertionError", "with: fn yielded; whoever never resumes it would leave the flags set")
  end
  return ok, ...
end

---In a coroutine fn gets one of its own, so that a yield is seen.
local function protected(fn, ...)
  if not coroutine.running() then return pcall(fn, ...) end
  local co = coroutine.create(function(...) return fn(...) end)
  return no_yield(co, coroutine.resume(co, ...))
end

---Runs fn(...) with these flags and puts both back as they were, also after an error, which goes on unchanged. Returns
---fn's results. fn must not yield.
---@param flags {overwrite?: boolean, swap?: boolean} nil: as it is
function future.with(flags, fn, ...)
  if flags == nil or fn == nil then B.fail("TypeError", "with: expected flags and a function, got nil") end
  local before = future.snapshot()
  set(flags, "with")
  return finish(before, protected(fn, ...))
end

return future
