---errors.lua: an error is an object that says where the user stood and still behaves as the string people expect.

local Error = {}

---Names of the codes of tm_code, PyTorch's where it has the class.
local KIND = {
  "RuntimeError", "TypeError", "ValueError", "IndexError", "KeyError", "NotImplementedError", "OutOfMemory",
  "RuntimeError", "Interrupted", "AssertionError",
}

local own = debug.getinfo(1, "S").source:match("^(.*)errors%.lua$") -- "@.../tmod/"

local function is_own(info)
  return info.what == "C" or info.source:sub(1, #own) == own or info.source:sub(1, 6) == "=[tmod"
end

---"file:line" of the innermost function that is not tmod's own; "" if there is none.
local function where()
  local level = 2
  while true do
    local info = debug.getinfo(level, "Sl")
    if not info then return "" end
    if not is_own(info) and info.currentline > 0 then return info.short_src .. ":" .. info.currentline end
    level = level + 1
  end
end

local mt = {}

function mt.__tostring(e)
  local text = e.where ~= "" and e.where .. ": " .. e.message or e.message
  if e.context then text = text .. "\n  " .. e.context end
  if e.cause then text = text .. "\n  caused by: " .. tostring(e.cause) end
  return text
end

-- Fixed parameters and no JIT: compiled __concat with varargs misreads its operands (docs/luajit.md, 3).
function mt.__concat(a, b) return tostring(a) .. tostring(b) end
if jit then jit.off(mt.__concat) end

---e:match(...) and the other string methods work on the text.
local methods = {}
function mt.__index(_, name)
  local f = methods[name]
  if f == nil and type(string[name]) == "function" then
    local of_string = string[name]
    f = function(e, ...) return of_string(tostring(e), ...) end
    methods[name] = f
  end
  return f
end

---@param kind string class of the error, such as "ValueError"
---@param message string
---@param cause? any the error that led to this one
function Error.new(kind, message, cause)
  local e = setmetatable({ kind = kind, message = message, cause = cause, where = where() }, mt)
  if Error.locate then Error.locate(e) end -- nn/hooks.lua adds `context`: the module that ran
  return e
end

function Error.is(e, kind) return type(e) == "table" and getmetatable(e) == mt and (kind == nil or e.kind == kind) end

---Raises {kind, message} at the user's line; further arguments go into message as string.format has it.
function Error.fail(kind, message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  error(Error.new(kind, message), 0)
end

Error.where = where
Error.KIND = KIND

return Error
