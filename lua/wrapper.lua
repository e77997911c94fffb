---wrapper.lua: classes of tensors in Lua. An instance of a wrapper class reports a shape, a dtype and a device like any
---tensor, and keeps inner tensors that hold what it stands for; modules register it, walks, conversions, state
---dictionaries, files and swaps treat it as one tensor. An operator that meets one calls the class's `dispatch`.
---
---What must stay true: class and inner tensors belong to the content. They are kept here under a number that the
---content carries, so that they go where the content goes (detach, swap_tensors, conversions), and C says when the last
---alias is gone.
---
---    local Scaled = tm.WrapperTensor:extend "Scaled"
---    function Scaled.to_plain(t) local inner = Scaled.flatten(t) return inner.data * inner.factor end
---    local t = Scaled:new { data = x, factor = f }
---
---A class may define, as methods of an instance `t`:
---  flatten(t)            -> inner tensors by name, and a table with whatever else describes it
---  to_plain(t)           -> a plain tensor of the same values: operators without a rule of their own work on that
---  convert(t, fn)        -> the instance of fn(inner) for every inner tensor; t itself if nothing changed
---  describe(t)           -> text for print
---  module_load(self, input, assign): for load_state_dict
---and as methods of the class:
---  unflatten(inner, meta) -> an instance: the way back from flatten
---  geometry(inner, meta)  -> shape, dtype and device to report
---  dispatch(op, args)     -> the operator's results, or NotImplemented. args: list of n arguments, defaults filled in
---  from_plain(x, like)    -> an instance with the values of a plain tensor, of the kind of `like`
---  encode(t), decode(text): what flatten gives beside tensors, as text for files
---Gradients reach inner tensors that require them, through the operators that dispatch calls on them; the wrapper
---itself is no part of a graph.

local B = require "tmod.ffi"
local ops = require "tmod.ops"
local Tensor = require "tmod.tensor"
local C, ffi, ptr, H = B.C, B.ffi, B.ptr, B.handles
local is_tensor, fail = B.is_tensor, B.fail

local wrapper = {}

---@class WrapperTensor
local Wrapper = { __name = "WrapperTensor" }
Wrapper.__index = Wrapper
wrapper.WrapperTensor = Wrapper

---What dispatch returns for an operator that the class has no rule for.
local NotImplemented = setmetatable({}, { __tostring = function() return "NotImplemented" end })
wrapper.NotImplemented = NotImplemented
Wrapper.NotImplemented = NotImplemented

local classes = {} -- by name, for files
local BUILT_IN = { Int8Weight = "tmod.quantize" }

-- instances and their classes ----------------------------------------------------------------------------------------

---{class, inner, meta} of a wrapper; nil for other values.
local function record_of(t)
  local h = type(t) == "table" and rawget(t, "_h")
  local p = h and C.tm_handles_at(H, h) or nil
  if p == nil or C.tm_tensor_marks(p) < C.TM_MARK_WRAPPER then return nil end
  return B.kept[tonumber(C.tm_wrapper_id(p))]
end

---The class of a wrapper; nil for other values.
local function wrapper_class(t)
  local record = record_of(t)
  return record and record.class
end
wrapper.wrapper_class = wrapper_class

---Is this tensor an instance of a wrapper class?
function wrapper.is(t) return record_of(t) ~= nil end

---The class of a tensor: that of a wrapper, or the one given by tm.tensor_class; nil for a plain tensor.
local function class_of(t)
  if type(t) ~= "table" then return nil end
  return rawget(t, "_class") or wrapper_class(t)
end
wrapper.class_of = class_of
B.class_of = class_of

local function extend(base, name)
  if type(name) ~= "string" or name == "" then fail("TypeError", "extend: a class needs a name, got %s", B.type_name(name)) end
  local class = setmetatable({ __name = name }, base)
  class.__index = class
  classes[name] = class
  return class
end

---A class that inherits from this one. Files name it, so the name should be the program's own.
function Wrapper:extend(name) return extend(self, name) end

---Does a class inherit from another, or is it the same?
function wrapper.inherits(class, base)
  while class and class ~= base do class = getmetatable(class) end
  return class ~= nil
end

local function names_of(inner)
  local names = {}
  for name in pairs(inner) do names[#names + 1] = name end
  table.sort(names)
  return names
end

---Shape, dtype and device to report: the shape of meta.shape, else of the first inner tensor by name; the dtype of the
---first floating one, if there is any.
function Wrapper:geometry(inner, meta)
  local names = names_of(inner)
  local first = inner[names[1]]
  local dtype
  for _, name in ipairs(names) do
    if not dtype and inner[name]:is_floating_point() then dtype = inner[name].dtype end
  end
  return meta.shape or first:size(), dtype or first.dtype, first.device
end

local sizes = ffi.new("int64_t[?]", C.TM_MAXDIM)

---An instance.
---@param inner table<string, Tensor>
---@param meta? table what describes it beside tensors
function Wrapper:new(inner, meta)
  if type(inner) ~= "table" or is_tensor(inner) or next(inner) == nil then
    fail("TypeError", "%s: expected inner tensors by name, got %s", self.__name, B.type_name(inner))
  end
  for name, t in pairs(inner) do
    if type(name) ~= "string" or not is_tensor(t) then
      fail("TypeError", "%s: inner %s must be a tensor, got %s", self.__name, tostring(name), B.type_name(t))
    end
    B.check(C.tm_handles_keep(H, t._h, 0)) -- the record keeps it beyond every tm.scope
  end
  meta = meta or {}
  local shape, dtype, device = self:geometry(inner, meta)
  if #shape > C.TM_MAXDIM then fail("ValueError", "%s: %d dims, at most %d", self.__name, #shape, tonumber(C.TM_MAXDIM)) end
  for i = 1, #shape do sizes[i - 1] = shape[i] end
  local _, any = next(inner)
  local code = any.device == device and C.tm_tensor_device(ptr(any)) or B.device(device)
  local id = tonumber(C.tm_id_new())
  local t = B.wrap(C.tm_wrapper_new(#shape, sizes, B.dtype(dtype), code, id))
  B.kept[id] = { class = self, inner = inner, meta = meta }
  return t
end

local function copy(t)
  local c = {}
  for k, v in pairs(t) do c[k] = v end
  return c
end

---Other tensors in the places of inner ones, for the instance and all its aliases; what it reports stays.
function Wrapper.set_inner(t, inner)
  local record = record_of(t)
  if not record then fail("TypeError", "set_inner: expected a wrapper tensor, got %s", B.type_name(t)) end
  for name, x in pairs(inner) do
    if not record.inner[name] or not is_tensor(x) then
      fail("TypeError", "set_inner: %s has no %s that could become %s", record.class.__name, tostring(name), B.type_name(x))
    end
    B.check(C.tm_handles_keep(H, x._h, 0))
    record.inner[name] = x
  end
end

-- what a class may say otherwise ---------------------------------------------------------------------------------------

---The inner tensors by name, and what else describes the instance.
function Wrapper.flatten(t)
  local record = record_of(t)
  if not record then fail("TypeError", "flatten: expected a wrapper tensor, got %s", B.type_name(t)) end
  return copy(record.inner), copy(record.meta)
end

function Wrapper:unflatten(inner, meta) return self:new(inner, meta) end

---The instance of fn(inner) for every inner tensor, in the order of their names.
function Wrapper.convert(t, fn)
  local class = wrapper_class(t)
  local inner, meta = class.flatten(t)
  local changed = false
  for _, name in ipairs(names_of(inner)) do
    local y = fn(inner[name])
    if not is_tensor(y) then
      fail("TypeError", "convert: the function returned %s for %s.%s, expected a tensor", B.type_name(y), class.__name, name)
    end
    changed = changed or y ~= inner[name]
    inner[name] = y
  end
  if not changed then return t end
  return class:unflatten(inner, meta)
end

function Wrapper.describe(t)
  local class = wrapper_class(t)
  local inner, parts = class.flatten(t), {}
  local function say(x) return ("%s (%s)"):format(x.dtype, table.concat(x:size(), ", ") .. (x.ndim == 1 and "," or "")) end
  for _, name in ipairs(names_of(inner)) do parts[#parts + 1] = name .. ": " .. say(inner[name]) end
  return ("%s%s(%s, device=%s; %s)"):format(rawget(t, "_parameter") and "Parameter containing:\n" or "", class.__name, say(t), t.device,
    table.concat(parts, ", "))
end

---What flatten gives beside tensors, as text; a class with more than a shape has its own.
function Wrapper.encode(t)
  local class = wrapper_class(t)
  local _, meta = class.flatten(t)
  for key in pairs(meta) do
    if key ~= "shape" then fail("NotImplementedError", "save: %s has %q beside its tensors and no encode", class.__name, tostring(key)) end
  end
  return meta.shape and table.concat(meta.shape, ",") or ""
end

function Wrapper:decode(text)
  if text == "" then return {} end
  local shape = {}
  for n in text:gmatch "%d+" do shape[#shape + 1] = tonumber(n) end
  return { shape = shape }
end

-- operators ------------------------------------------------------------------------------------------------------------

local rules = {}

function rules.cast(class, x, dtype, device)
  return class.convert(x, function(t) return t:to { dtype = t:is_floating_point() and dtype or nil, device = device } end)
end

function rules.clone(class, x) return class.convert(x, function(t) return ops.clone(t) end) end

local function same_size(a, b)
  local x, y = a:size(), b:size()
  for i = 1, math.max(#x, #y) do
    if x[i] ~= y[i] then return false end
  end
  return true
end

---Into a wrapper: from one of its class, inner tensor by inner tensor, or from plain numbers, if the class takes them.
function rules.copy_(class, x, source)
  if not wrapper_class(x) then
    if not class.to_plain then return NotImplemented end
    return ops.copy_(x, class.to_plain(source))
  end
  if is_tensor(source) and not wrapper_class(source) and class.from_plain then source = class:from_plain(source, x) end
  if wrapper_class(source) ~= class then return NotImplemented end
  local to, from = class.flatten(x), class.flatten(source)
  for name in pairs(to) do
    if not from[name] or not same_size(to[name], from[name]) then return NotImplemented end
  end
  for name, t in pairs(to) do ops.copy_(t, from[name]) end
  return x
end

---The operator itself, on any arguments.
local function call(op, args) return ops[op](unpack(args, 1, args.n)) end
wrapper.call = call

local function each_wrapper(args, fn)
  for i = 1, args.n do
    local a = args[i]
    if type(a) == "table" then
      if is_tensor(a) then
        if wrapper_class(a) then args[i] = fn(a) or a end
      elseif getmetatable(a) == nil then
        for k = 1, a.n or table.maxn(a) do
          if is_tensor(a[k]) and wrapper_class(a[k]) then
            local y = fn(a[k])
            if y then
              if args[i] == a then args[i] = copy(a) end
              args[i][k] = y
            end
          end
        end
      end
    end
  end
end

---The operator on the plain values of every wrapper among the arguments.
local function on_plain(op, args)
  if op:sub(-1) == "_" and wrapper_class(args[1]) then return NotImplemented end
  local known, to = true, copy(args)
  each_wrapper(to, function(t)
    local class = wrapper_class(t)
    if not class.to_plain then known = false return nil end
    return class.to_plain(t)
  end)
  if not known then return NotImplemented end
  return call(op, to)
end

---The operators that every class has: cast, clone and copy_; the others on plain values, if the class has to_plain. A
---class overrides it and calls this one (Wrapper.dispatch(self, op, args)) for the rest.
function Wrapper:dispatch(op, args)
  local rule = rules[op]
  local y = NotImplemented
  if rule then y = rule(self, unpack(args, 1, args.n)) end
  if y == NotImplemented and op ~= "cast" and op ~= "clone" then return on_plain(op, args) end
  return y
end

local function finish(op, names, first, ...)
  if first == NotImplemented then
    fail("NotImplementedError", "%s: no rule for %s", op, table.concat(names, ", "))
  end
  return first, ...
end

---An operator that met wrappers: their classes are asked one after the other, in the order of the arguments, but a
---class before those that it inherits from.
function wrapper.run(op, args)
  local list = {}
  each_wrapper(args, function(t)
    local class, at = wrapper_class(t), #list + 1
    for i, other in ipairs(list) do
      if other == class then return nil end
      if at > i and wrapper.inherits(class, other) then at = i end
    end
    table.insert(list, at, class)
  end)
  if #list == 0 then fail("RuntimeError", "%s: the class of a wrapper tensor is not known in this Lua state", op) end
  local names = {}
  for i, class in ipairs(list) do
    names[i] = class.__name
    if i < #list then
      local results = { class:dispatch(op, args) }
      if results[1] ~= NotImplemented then return unpack(results, 1, table.maxn(results)) end
    end
  end
  return finish(op, names, list[#list]:dispatch(op, args))
end

-- conversions of modules --------------------------------------------------------------------------------------------------

---The wrapper of fn(inner) for every inner tensor; what conversions of modules do with a wrapper.
function wrapper.convert(t, fn) return wrapper_class(t).convert(t, fn) end

-- files ---------------------------------------------------------------------------------------------------------------------

local MARK = "tmod.wrapper."

---A dictionary in which every wrapper is replaced by its inner tensors ("weight" by "weight.q" and "weight.scale"), and
---the metadata that tells: "tmod.wrapper.weight" = "Int8Weight " and what the class encodes.
---@param each fun(t: table): iterator
function wrapper.pack(tensors, metadata, each)
  local flat, found = {}, false
  for name, t in each(tensors) do
    local class = wrapper_class(t)
    if class then
      if not found then metadata = copy(metadata) end
      found = true
      metadata[MARK .. name] = (class.__name .. " " .. class.encode(t)):gsub(" $", "")
      for key, x in pairs(class.flatten(t)) do flat[name .. "." .. key] = x end
    else
      flat[name] = t
    end
  end
  if not found then return tensors, metadata end
  return flat, metadata
end

local function class_named(name)
  if not classes[name] and BUILT_IN[name] then require(BUILT_IN[name]) end
  return classes[name] or fail("RuntimeError", "tm.load: the file has a tensor of class %s, which this program has not defined", name)
end

---The way back: an ordered dictionary with the wrappers in place of their inner tensors, and the rest of the metadata.
function wrapper.unpack(tensors, metadata)
  local OrderedDict = require "tmod.ordered"
  local whole, rest, name_of = {}, {}, {}
  for key, value in pairs(metadata) do
    local name = key:match("^" .. MARK:gsub("%.", "%%.") .. "(.*)$")
    if name then
      whole[name] = { class = class_named(value:match "^%S+"), text = value:match "^%S+ (.*)$" or "", inner = {} }
    else
      rest[key] = value
    end
  end
  local result = OrderedDict.new()
  for key, t in OrderedDict.pairs(tensors) do
    local name, field = key:match "^(.*)%.([^.]+)$"
    if name and whole[name] then
      whole[name].inner[field] = t
      name_of[key] = name
    end
  end
  for key, t in OrderedDict.pairs(tensors) do
    local name = name_of[key]
    if not name then result[key] = t
    elseif whole[name].class then
      local w = whole[name]
      result[name] = w.class:unflatten(w.inner, w.class:decode(w.text))
      w.class = nil
    end
  end
  return result, rest
end

-- classes of plain tensors ------------------------------------------------------------------------------------------------------

local Subclass = { __name = "tensor" }
Subclass.__index = Subclass

---A class of tensors with memory of their own: class(t) is an alias of t that belongs to it. Its functions are methods
---of the instances; operators treat these as plain tensors, and their results are plain.
---@param name string
---@param base? table such a class, to inherit from
function wrapper.tensor_class(name, base)
  local class = extend(base or Subclass, name)
  classes[name] = nil -- files do not know it
  class.__call = Subclass.__call
  return class
end

function Subclass.__call(class, t)
  local alias = Tensor.detach(t)
  if t.requires_grad then alias.requires_grad = true end
  rawset(alias, "_class", class)
  return alias
end

return wrapper
