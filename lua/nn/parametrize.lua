---parametrize.lua: a parameter or buffer that is computed from others, such as a symmetric or normalised weight.
---
---The tensor moves to module.parametrizations[name].original, the same object, so that its optimizer keeps working, and
---module[name] becomes a computed value: reading it runs the parametrizations, assigning to it their right_inverse. The
---module is then of a class of its own, Parametrized<Class>, which is never changed: copies of the module share it.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local Module = require "tmod.nn.module"
local autograd = require "tmod.autograd"
local container = require "tmod.nn.container"
local errors = require "tmod.errors"
local parameter = require "tmod.nn.parameter"
local options = require "tmod.functional".options
local C, ptr, fail, type_name, is_tensor = B.C, B.ptr, B.fail, B.type_name, B.is_tensor
local None, is_parameter, get = parameter.None, parameter.is_parameter, OrderedDict.get

local STATE = "\0state"

local parametrize = { __name = "nn.parametrize" }

local made = setmetatable({}, { __mode = "k" }) -- class -> {base = class below, names = set of computed names}

local function names_of(module)
  local entry = made[module:_class()]
  return entry and entry.names
end

---Is a tensor of the module computed; is this one?
---@param module nn.Module
---@param name? string
function parametrize.is_parametrized(module, name)
  local names = names_of(module)
  return names ~= nil and (name == nil or names[name] == true)
end
local is_parametrized = parametrize.is_parametrized

---Content of `source` for a tensor that stays the same object.
local function rebind(target, source)
  local wrapper = C.tm_tensor_marks(ptr(target)) / C.TM_MARK_WRAPPER % 2 >= 1
  if C.tm_future_swap() == 0 and not wrapper then return B.check(C.tm_tensor_rebind(ptr(target), ptr(source))) end
  if is_parameter(target) and not is_parameter(source) then source = parameter.Parameter(source, target.requires_grad) end
  require "tmod".swap_tensors(target, source)
end

-- lists of parametrizations -----------------------------------------------------------------------------------------------

---The parametrizations of one tensor, applied in order, with the tensor or tensors that they start from: `original`,
---or `original0`, `original1` ...
---@class nn.ParametrizationList : nn.ModuleList
---@field count? integer number of originals; nil: one, that is called `original`
local List = container.ModuleList:extend "nn.ParametrizationList"

local function put(module, name, t, persistent)
  if is_parameter(t) then module:register_parameter(name, t) else module:register_buffer(name, t, persistent) end
end

function List:init(modules, originals, opts)
  container.ModuleList.init(self, modules)
  self.count, self.persistent = opts.count, opts.persistent
  if not opts.count then return put(self, "original", originals[1], opts.persistent) end
  for i, t in ipairs(originals) do put(self, "original" .. i - 1, t, opts.persistent) end
end

local function original_names(list)
  if not list.count then return { "original" } end
  local names = {}
  for i = 1, list.count do names[i] = "original" .. i - 1 end
  return names
end

local function originals_of(list)
  local tensors = original_names(list)
  for i, name in ipairs(tensors) do tensors[i] = list[name] end
  return tensors
end

local function steps_of(list)
  local steps, children = {}, list._modules
  while get(children, tostring(#steps)) do steps[#steps + 1] = get(children, tostring(#steps)) end
  return steps
end

local function compute(steps, originals)
  local x = steps[1](unpack(originals))
  for i = 2, #steps do x = steps[i](x) end
  return x
end

function List:forward() return compute(steps_of(self), originals_of(self)) end

---All results, or the elements of the one list that was returned. The second result is the number, nil for one tensor.
local function collect(...)
  local n, first = select("#", ...), (...)
  if n == 1 and type(first) == "table" and getmetatable(first) == nil then return first, #first > 0 and #first or nil end
  return { ... }, n > 1 and n or nil
end

---The originals that give this value: the right_inverse of each step, from the last to the first. One that is absent
---is missing(step, values), or the identity if `missing` is nil.
local function invert(steps, value, missing)
  local values, count = { value }, nil
  for i = #steps, 1, -1 do
    local step = steps[i]
    if step.right_inverse then
      local results, n
      local ok, e = pcall(function() results, n = collect(step:right_inverse(unpack(values))) end)
      if ok then values, count = results, n
      elseif missing or not errors.is(e, "NotImplementedError") then error(e, 0) end
    elseif missing then
      missing(step)
    end
  end
  return values, count
end

local function check_tensors(values, count)
  for i = 1, count or 1 do
    if not is_tensor(values[i]) then
      fail("ValueError", "right_inverse must return a tensor or several, got %s", type_name(values[i]))
    end
  end
end

local function no_inverse(step)
  fail("RuntimeError", "parametrization %s has no right_inverse: assign to its original", step:_short_name())
end

---What assigning a value to the computed tensor does.
local function assign_value(list, value)
  if not is_tensor(value) then fail("ValueError", "a parametrized tensor can be assigned tensors only, got %s", type_name(value)) end
  local names = original_names(list)
  local values, count = invert(steps_of(list), value, no_inverse)
  check_tensors(values, count)
  if count ~= list.count then
    fail("ValueError", "right_inverse must return %d tensors, as it did first, got %d", list.count or 1, count or 1)
  end
  for i, name in ipairs(names) do
    local original = list[name]
    if values[i].dtype ~= original.dtype then
      fail("ValueError", "right_inverse returned %s for %s, which is %s", values[i].dtype, name, original.dtype)
    end
  end
  for i, name in ipairs(names) do
    if is_parametrized(list, name) then list[name] = values[i] else rebind(list[name], values[i]) end
  end
end

function List:right_inverse(value) return autograd.no_grad(assign_value, self, value) end

-- reading -------------------------------------------------------------------------------------------------------------------

local depth, cache = 0, {} -- of cached; list -> {value, originals, their epochs}

local function epoch(t) return tonumber(C.tm_tensor_epoch(ptr(t))) end

local function is_current(entry, originals)
  for i, t in ipairs(originals) do
    if entry.originals[i] ~= t or entry.epochs[i] ~= epoch(t) then return false end
  end
  return true
end

local function value_of(list)
  if depth == 0 then return list() end
  local originals, entry = originals_of(list), cache[list]
  if entry and is_current(entry, originals) then return entry.value end
  entry = { value = list(), originals = originals, epochs = {} }
  if is_tensor(entry.value) then parameter.keep(entry.value) end
  for i, t in ipairs(originals) do entry.epochs[i] = epoch(t) end
  cache[list] = entry
  return entry.value
end

local function finish(ok, ...)
  depth = depth - 1
  if depth == 0 then cache = {} end
  if not ok then error((...), 0) end
  return ...
end

---Runs fn(...): inside, each computed tensor is computed when first read, and again only if its original has got other
---content by assignment or conversion (an optimizer's step is not seen). The values are dropped at the end of the
---outermost call.
function parametrize.cached(fn, ...)
  depth = depth + 1
  return finish(pcall(fn, ...))
end

-- classes -------------------------------------------------------------------------------------------------------------------

local COMPUTED = setmetatable({}, { __tostring = function() return "computed by parametrizations" end })

local function list_at(module, name) return get(get(module._modules, "parametrizations")._modules, name) end

local function make_class(base, names)
  local class = base:extend((base.__name:gsub("[^.]+$", "Parametrized%0")))
  local below, mt = Module._metatable(base), Module._metatable(class)
  made[class] = { base = base, names = names }
  for name in pairs(names) do class[name] = COMPUTED end -- the names are taken
  local read, write = mt.__index, below.__newindex
  function mt.__index(self, name)
    if names[name] then return value_of(list_at(self, name)) end
    return read(self, name)
  end
  function mt.__newindex(self, name, value)
    if names[name] then return list_at(self, name):right_inverse(value) end
    return write(self, name, value)
  end
  return class
end

---The module's class becomes one that computes a name, or no longer does.
local function switch(module, name, on)
  local class, names = module:_class(), {}
  local base = made[class] and made[class].base or class
  for other in pairs(names_of(module) or {}) do names[other] = true end
  names[name] = on or nil
  class = next(names) and make_class(base, names) or base
  rawget(module, STATE).class = class
  setmetatable(module, Module._metatable(class))
end

-- registering ---------------------------------------------------------------------------------------------------------------

local function shape_text(t) return "(" .. table.concat(t:size(), ", ") .. (t.ndim == 1 and ",)" or ")") end

local function check_result(what, y, like)
  if not is_tensor(y) then fail("ValueError", "%s must return a tensor, got %s", what, type_name(y)) end
  if y.dtype ~= like.dtype then
    fail("ValueError", "%s returned %s for a tensor of %s; this needs the option unsafe = true", what, y.dtype, like.dtype)
  end
  local got, expected = shape_text(y), shape_text(like)
  if got ~= expected then
    fail("ValueError", "%s returned a tensor of shape %s for one of %s; this needs the option unsafe = true", what, got, expected)
  end
end

local function add(module, name, p, unsafe)
  local list = list_at(module, name)
  if not unsafe then
    local y = module[name]
    local x = p(y)
    check_result("a parametrization", x, y)
    if p.right_inverse then
      local ok, z = pcall(p.right_inverse, p, x)
      if ok then check_result("right_inverse", z, y)
      elseif not errors.is(z, "NotImplementedError") then error(z, 0) end
    end
  end
  list:append(p)
end

local function own_tensor(module, name)
  local t = get(module._parameters, name)
  if t == nil then t = get(module._buffers, name) end
  if t == nil or t == None then
    fail("ValueError", "%s has no parameter, buffer or parametrized tensor %q", module:_short_name(), tostring(name))
  end
  return t
end

local function check_names(module, name)
  if not is_parametrized(module) and module:hasattr "parametrizations" then
    fail("KeyError", "%s: %q is taken: it cannot hold parametrizations", module:_short_name(), "parametrizations")
  end
  if container.ModuleDict[name] ~= nil then
    fail("KeyError", "a tensor called %q cannot be parametrized: it is a method of nn.ModuleDict", name)
  end
end

-- Everything is checked before the first change.
local function first(module, name, p, unsafe)
  local t, persistent = own_tensor(module, name), not module._non_persistent_buffers_set[name]
  check_names(module, name)
  local originals, count = invert({ p }, t)
  check_tensors(originals, count)
  if not count and (originals[1].dtype ~= t.dtype or originals[1].device ~= t.device) then
    fail("ValueError", "right_inverse returned one tensor, %s on %s, for %s on %s: dtype and device must stay",
      originals[1].dtype, originals[1].device, t.dtype, t.device)
  end
  if not unsafe then check_result("a parametrization", compute({ p }, originals), t) end
  if not count then
    rebind(t, originals[1])
    originals = { t }
  elseif is_parameter(t) then
    for i = 1, count do originals[i] = parameter.Parameter(originals[i], t.requires_grad) end
  end
  local list = List({ p }, originals, { count = count, persistent = persistent })
  list:train(module.training)
  module:delattr(name)
  if not is_parametrized(module) then
    module.parametrizations = container.ModuleDict()
    module.parametrizations:train(module.training)
  end
  module.parametrizations:set(name, list)
  switch(module, name, true)
end

local function check_module(what, m)
  if not Module._is_module(m) then fail("TypeError", "parametrize.%s: expected an nn.Module, got %s", what, type_name(m)) end
end

local REGISTER = { unsafe = true }

---From now on module[name] is p(original), where p is a module from tensors to tensors of the same shape and dtype. Its
---method right_inverse, if it has one, gives an original for a value; it may return several tensors, which become new
---parameters original0, original1 ... A second parametrization gets the first one's result.
---@param module nn.Module
---@param name string a parameter or buffer
---@param p nn.Module
---@param opts? {unsafe?: boolean} unsafe: p may change shape and dtype, and is not tried
---@return nn.Module module
function parametrize.register(module, name, p, opts)
  opts = options(opts, "parametrize.register", REGISTER)
  check_module("register", module)
  check_module("register", p)
  p:train(module.training)
  autograd.no_grad(is_parametrized(module, name) and add or first, module, name, p, opts.unsafe or false)
  return module
end

local function set_to_value(original, value)
  local ok, e = pcall(rebind, original, value)
  if ok then return original end
  local class = rawget(original, "_class")
  if not class then error(e, 0) end
  error(errors.new("RuntimeError", "parametrize.remove: the value cannot be left in " .. tostring(class.__name or "the tensor")
    .. ": use leave_parametrized = false, give the class a working set_data, or set the swap flag of tm.future", e), 0)
end

---What the slot gets.
local function removed(module, name, list, leave)
  if not list.count then
    local original = list.original
    if not leave then return original end
    return autograd.no_grad(function() return set_to_value(original, module[name]) end)
  end
  if not leave then
    fail("ValueError", "parametrize.remove: %q is computed from %d tensors: there is no unparametrized one to leave", name, list.count)
  end
  local value = module[name]
  return value.requires_grad and parameter.Parameter(value) or value
end

local REMOVE = { leave_parametrized = true }

---Makes module[name] an ordinary parameter or buffer again, with the computed value or with that of the original.
---@param module nn.Module
---@param name string
---@param opts? {leave_parametrized?: boolean} default: true
---@return nn.Module module
function parametrize.remove(module, name, opts)
  opts = options(opts, "parametrize.remove", REMOVE)
  check_module("remove", module)
  if not is_parametrized(module, name) then
    fail("ValueError", "%s has no parametrization of %q", module:_short_name(), tostring(name))
  end
  local list = list_at(module, name)
  local t = removed(module, name, list, opts.leave_parametrized ~= false)
  module.parametrizations:remove(name)
  switch(module, name, false)
  put(module, name, t, list.persistent)
  if not is_parametrized(module) then module:delattr "parametrizations" end
  return module
end

return parametrize
