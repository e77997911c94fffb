---parameter.lua: the tensors that a module owns. A Parameter or Buffer is a tensor whose Lua table carries a flag, so
---that whatever keeps the object keeps the kind; results of operators are new tables and carry none.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local options = require "tmod.functional".options
local C, ffi, ptr = B.C, B.ffi, B.ptr
local type, rawget, rawset = type, rawget, rawset

local parameter = {}

---Stands for None where nil cannot be stored: in an ordered dictionary, or as extra state.
parameter.None = setmetatable({}, { __name = "nn.None", __tostring = function() return "nn.None" end,
  __call = function() B.fail("TypeError", "a slot without a module was called") end })

---Makes a tensor outlive every tm.scope.
function parameter.keep(t)
  B.check(C.tm_handles_keep(B.handles, t._h, 0))
  return t
end

local function alias(what, data, requires_grad)
  if data == nil then data = Tensor.empty(0) end
  if not B.is_tensor(data) then B.fail("TypeError", "%s: data must be a tensor, got %s", what, B.type_name(data)) end
  local t = B.wrap(C.tm_tensor_detach(ptr(data)))
  rawset(t, "_class", rawget(data, "_class")) -- of tm.tensor_class; a wrapper's is part of its content
  if requires_grad then t.requires_grad = true end
  B.tidy()
  return parameter.keep(t)
end

---An argument that is true or false, or a table {name = boolean}; default true.
local function flag(what, name, opts)
  if type(opts) == "boolean" then return opts end
  local value = options(opts, what, { [name] = true })[name]
  if value ~= nil and type(value) ~= "boolean" then
    B.fail("TypeError", "%s: %s must be a boolean, got %s", what, name, B.type_name(value))
  end
  return value ~= false
end

---A tensor that modules register when it is assigned to one of their fields, and that optimizers train. It shares
---the memory of `data`.
---@param data? Tensor default: an empty one
---@param opts? boolean | {requires_grad?: boolean} default: true
function parameter.Parameter(data, opts)
  local p = alias("nn.Parameter", data, flag("nn.Parameter", "requires_grad", opts))
  rawset(p, "_parameter", true)
  return p
end

---A tensor that modules register as state that is not trained.
---@param data? Tensor default: an empty one
---@param opts? boolean | {persistent?: boolean} persistent (default true): saved in state_dict
function parameter.Buffer(data, opts)
  local persistent = flag("nn.Buffer", "persistent", opts)
  local b = alias("nn.Buffer", data, B.is_tensor(data) and data.requires_grad)
  rawset(b, "_buffer", true)
  rawset(b, "_persistent", persistent)
  return b
end

parameter.flag = flag

function parameter.is_parameter(t) return type(t) == "table" and rawget(t, "_parameter") == true end
function parameter.is_buffer(t) return type(t) == "table" and rawget(t, "_buffer") == true end

local pointers, room = nil, 0

---Drops the gradients of a list of tensors, or fills them with 0.
function parameter.zero_grad(list, set_to_none)
  local n = #list
  if n > room then
    room = n * 2
    pointers = ffi.new("tm_tensor *[?]", room)
  end
  for i = 1, n do pointers[i - 1] = ptr(list[i]) end
  B.check(C.tm_zero_grad(n, pointers, set_to_none and 1 or 0))
end

---The argument of zero_grad: nothing, a boolean or {set_to_none = boolean}; default true.
function parameter.set_to_none(opts) return flag("zero_grad", "set_to_none", opts) end

return parameter
