---container.lua: modules made of modules, and lists and dictionaries of parameters. Positions count from 1 and, negative,
---from the end; the names of the slots, which state dictionaries show, count from "0".
---
---A mutator checks before it changes, or puts everything back: after an error a container is as it was.

local B = require "tmod.ffi"
local Module = require "tmod.nn.module"
local OrderedDict = require "tmod.ordered"
local parameter = require "tmod.nn.parameter"

local None, Parameter, is_parameter = parameter.None, parameter.Parameter, parameter.is_parameter
local fail, is_tensor, type_name = B.fail, B.is_tensor, B.type_name
local get, child_names, is_module = OrderedDict.get, Module._child_names, Module._is_module
local class_of, extend_class = Module._class, Module.extend
local type, select = type, select

local function is_plain(t) return type(t) == "table" and getmetatable(t) == nil end

-- what is given ---------------------------------------------------------------------------------------------------------

---A list of what a plain list, a container with positions, or an iterator (as m:children() is one) holds.
local function list_of(what, values)
  local list = {}
  if type(values) == "function" then
    for v in values do list[#list + 1] = v end
  elseif is_module(values) and values._elements then
    list = values:_elements()
  elseif is_plain(values) then
    for i = 1, table.maxn(values) do
      if values[i] == nil then fail("TypeError", "%s: element %d of %d is nil", what, i, table.maxn(values)) end
      list[i] = values[i]
    end
    if next(values) ~= nil and #list == 0 then fail("TypeError", "%s: expected a list, got a table of named values", what) end
  else
    fail("TypeError", "%s: expected a list, a container or an iterator, got %s", what, type_name(values))
  end
  return list
end

---Keys and values of an ordered dictionary, a container with keys, a list of pairs {key, value}, or a plain map, whose
---keys are taken sorted.
local function pairs_of(what, values)
  local keys, list = {}, {}
  if OrderedDict.is(values) then return OrderedDict.keys(values), OrderedDict.values(values) end
  if is_module(values) and values._entries then return values:_entries() end
  if not is_plain(values) then
    fail("TypeError", "%s: expected a map, a list of pairs or a container with keys, got %s", what, type_name(values))
  end
  if values[1] ~= nil then
    for i = 1, table.maxn(values) do
      local pair = values[i]
      if not is_plain(pair) then fail("TypeError", "%s: element %d must be a pair {key, value}, got %s", what, i, type_name(pair)) end
      if table.maxn(pair) > 2 or pair[1] == nil then
        fail("ValueError", "%s: element %d has %d values, expected a pair {key, value}", what, i, table.maxn(pair))
      end
      keys[i], list[i] = pair[1], pair[2] == nil and None or pair[2]
    end
    return keys, list
  end
  for key in pairs(values) do
    if type(key) ~= "string" then fail("TypeError", "%s: keys must be strings, got a %s: %s", what, type_name(key), tostring(key)) end
    keys[#keys + 1] = key
  end
  table.sort(keys)
  for i, key in ipairs(keys) do list[i] = values[key] end
  return keys, list
end

local function unnone(v) if v ~= None then return v end end

local function refill(registry, names, values)
  for _, name in ipairs(OrderedDict.keys(registry)) do registry[name] = nil end
  for i = 1, #names do registry[names[i]] = values[i] end
end

local function finish(self, names, values, ok, ...)
  if not ok then
    refill(self._modules, names, values)
    error((...), 0)
  end
  return self
end

---Runs fn(self, ...); if it fails, the children are as they were.
local function atomic(self, fn, ...)
  return finish(self, OrderedDict.keys(self._modules), OrderedDict.values(self._modules), pcall(fn, self, ...))
end

-- positions ---------------------------------------------------------------------------------------------------------------

local function check_whole(self, what, i)
  if type(i) ~= "number" or i ~= math.floor(i) then
    fail("TypeError", "%s: %s must be a whole number, got %s", self.__name, what, type(i) == "number" and tostring(i) or type_name(i))
  end
end

---A position in 1..n from one that may count from the end.
local function place(self, i, n, what)
  check_whole(self, "a position", i)
  if i == 0 or i > n or i < -n then
    fail("IndexError", "%s: no %s at %d: it has %d, counted from 1", self.__name, what or "module", i, n)
  end
  return i > 0 and i or n + i + 1
end

---First and last position as string.sub takes them.
local function range(self, i, j, n)
  i, j = i or 1, j or -1
  check_whole(self, "a position", i)
  check_whole(self, "a position", j)
  return math.max(i < 0 and n + i + 1 or i, 1), math.min(j < 0 and n + j + 1 or j, n)
end

---Children by position: methods of Sequential and ModuleList.
local positional = {}

---The children, nn.None where a slot has none.
function positional:_elements() return OrderedDict.values(self._modules) end

function positional:_at(i)
  local names = child_names(self)
  return unnone(get(self._modules, names[place(self, i, #names)]))
end

function positional:_set_at(i, m)
  local names = child_names(self)
  local name = names[place(self, i, #names)]
  if m == nil then fail("TypeError", "%s: assigning nil does not remove a module; use remove(%d)", self.__name, i) end
  if not is_module(m) then fail("TypeError", "%s: %s is not a Module but a %s", self.__name, name, type_name(m)) end
  self:register_module(name, m)
end

function positional:len() return OrderedDict.len(self._modules) end

---`for i, m in seq:ipairs() do`
function positional:ipairs() return ipairs(self:_elements()) end

---A name for one more: the position or, where that is taken, the next free number.
local function free_name(self)
  local number = self:len()
  while self:hasattr(tostring(number)) do number = number + 1 end
  return tostring(number)
end

local function append(self, m)
  if not is_module(m) and m ~= None then fail("TypeError", "%s: element %d is not a Module but a %s", self.__name, self:len() + 1,
    type_name(m)) end
  self:register_module(free_name(self), unnone(m))
end

---Adds a module at the end.
---@param m nn.Module
function positional:append(m)
  append(self, m)
  return self
end

local function append_all(self, list)
  for i = 1, #list do append(self, list[i]) end
end

---Adds all modules of a list, a container or an iterator at the end. (Of the class: makes one that inherits from it.)
function positional:extend(modules)
  if not is_module(self) then return extend_class(self, modules) end
  return atomic(self, append_all, list_of(self.__name .. ":extend", modules))
end

---The children become those of a list, named by position.
local function renumber(self, list)
  local names = {}
  for i = 1, #list do
    names[i] = tostring(i - 1)
    if get(self._modules, names[i]) == nil and self:hasattr(names[i]) then
      fail("KeyError", "%s: %q is taken: it cannot name a module", self.__name, names[i])
    end
  end
  refill(self._modules, names, list)
end

---Puts a module before the one at a position; insert(len + 1, m) appends.
---@param i integer
---@param m nn.Module
function positional:insert(i, m)
  local list, n = self:_elements(), self:len()
  check_whole(self, "a position", i)
  if i == 0 or i > n + 1 or i < -n then
    fail("IndexError", "%s: cannot insert at %d: it has %d modules, counted from 1", self.__name, i, n)
  end
  if not is_module(m) then fail("TypeError", "%s: child %d is not a Module but a %s", self.__name, i, type_name(m)) end
  for k, name in ipairs(child_names(self)) do
    if name ~= tostring(k - 1) then
      fail("KeyError", "%s: cannot insert: module %d is named %q, expected %q", self.__name, k, name, tostring(k - 1))
    end
  end
  table.insert(list, i > 0 and i or n + i + 1, m)
  renumber(self, list)
  return self
end

---Takes the module at a position (default: the last) out and returns it; the others are numbered again.
function positional:pop(i)
  local list = self:_elements()
  local m = table.remove(list, place(self, i or -1, #list))
  renumber(self, list)
  return unnone(m)
end

---Takes out the module at a position (default: the last), or all from i to j.
function positional:remove(i, j)
  local list = self:_elements()
  local first, last
  if j then first, last = range(self, i, j, #list)
  else
    first = place(self, i or -1, #list)
    last = first
  end
  for _ = first, last do table.remove(list, first) end
  renumber(self, list)
  return self
end

local function equip(class)
  for name, method in pairs(positional) do class[name] = method end
  local mt = Module._metatable(class)
  -- Debian's LuaJIT ignores these two on tables; other builds honour them.
  mt.__len, mt.__ipairs = positional.len, positional.ipairs
  return mt
end

-- Sequential ----------------------------------------------------------------------------------------------------------------

---Modules one after the other: each gets all results of the one before.
---@class nn.Sequential : nn.Module
local Sequential = Module:extend "nn.Sequential"

---Sequential(a, b), Sequential{a, b}, Sequential{{"conv", a}, {"act", b}}, or an OrderedDict of modules.
function Sequential:init(...)
  local list, n = { ... }, select("#", ...)
  local first = list[1]
  if n == 1 and OrderedDict.is(first) then
    for name, m in OrderedDict.pairs(first) do self:add_module(name, unnone(m)) end
    return
  end
  if n == 1 and is_plain(first) then list, n = first, table.maxn(first) end
  for i = 1, n do
    local m = list[i]
    if m == nil then fail("TypeError", "nn.Sequential: module %d of %d is nil", i, n) end
    if is_plain(m) then self:add_module(m[1], unnone(m[2])) else self:add_module(tostring(i - 1), unnone(m)) end
  end
end

local sequential_mt = equip(Sequential)

---A Sequential of the modules from i to j, as string.sub takes them, under the same names.
function Sequential:slice(i, j)
  local d, names = OrderedDict.new(), child_names(self)
  local first, last = range(self, i, j, #names)
  for k = first, last do d[names[k]] = get(self._modules, names[k]) end
  return class_of(self)(d)
end

local function is_sequential(x) return is_module(x) and x:isinstance(Sequential) end

---Both one after the other, as a new Sequential with new names.
function sequential_mt.__add(a, b)
  if not is_sequential(a) or not is_sequential(b) then
    fail("ValueError", "nn.Sequential: only a Sequential can be added to it, got %s", type_name(is_sequential(a) and b or a))
  end
  return Sequential():extend(a):extend(b)
end

---seq * n: the same modules n times.
function sequential_mt.__mul(a, b)
  local seq, n = a, b
  if not is_sequential(a) then seq, n = b, a end
  check_whole(seq, "a factor", n)
  if n <= 0 then fail("ValueError", "nn.Sequential: it can be taken 1 time or more, not %d", n) end
  local y = Sequential()
  for _ = 1, n do y:extend(seq) end
  return y
end

-- A loop over modules of different classes compiles badly, and results of any number cannot be held in locals. So the
-- chain of n calls is written out, once for each n: get(d, names[i + 2])(get(d, names[i + 1])(...)).
local BLOCK = 32

local chains = setmetatable({}, { __index = function(t, n)
  local code = "..."
  for k = 1, n do code = ("get(d, names[i + %d])(%s)"):format(k, code) end
  local chunk = assert(loadstring("local get = ... return function(d, names, i, ...) return " .. code .. " end", "=[tmod Sequential]"))
  t[n] = chunk(get)
  return t[n]
end })

local function run(d, names, i, ...)
  local n = #names - i
  if n <= BLOCK then return chains[n](d, names, i, ...) end
  return run(d, names, i + BLOCK, chains[BLOCK](d, names, i, ...))
end

function Sequential:forward(...)
  local names, d = child_names(self)
  return run(d, names, 0, ...)
end

-- ModuleList ----------------------------------------------------------------------------------------------------------------

---A list of modules, which are registered as children.
---@class nn.ModuleList : nn.Module
local ModuleList = Module:extend "nn.ModuleList"

---@param modules? nn.Module[] a list, a container or an iterator
function ModuleList:init(modules)
  if modules ~= nil then append_all(self, list_of(self.__name, modules)) end
end

local list_mt = equip(ModuleList)

---A ModuleList of the modules from i to j, as string.sub takes them.
function ModuleList:slice(i, j)
  local first, last = range(self, i, j, self:len())
  local list, y = self:_elements(), class_of(self)()
  for k = first, last do append(y, list[k]) end
  return y
end

---A new ModuleList of its modules and those of a list, a container or an iterator.
function list_mt.__add(a, b)
  if not (is_module(a) and a:isinstance(ModuleList)) then
    fail("TypeError", "nn.ModuleList: it can be added to no %s; put it first", type_name(a))
  end
  return ModuleList(a):extend(b)
end

---Equal prints in a row are joined.
function ModuleList:_format()
  local texts, lines = {}, {}
  for i, m in self:ipairs() do texts[i] = m == None and "nil" or tostring(m) end
  local first = 1
  for i = 1, #texts do
    if texts[i + 1] ~= texts[i] then
      local one = i == first
      lines[#lines + 1] = (one and "(%d): %s" or "(%d-%d): %d x %s"):format(first - 1, one and texts[i] or i - 1, i - first + 1, texts[i])
      first = i + 1
    end
  end
  return self:_join("", lines)
end

-- ModuleDict ----------------------------------------------------------------------------------------------------------------

---Methods of ModuleDict and ParameterDict.
local keyed = {}

function keyed:len() return #self:keys() end

---A list of the values in the order of their keys, nn.None where a key has none.
function keyed:values() return (select(2, self:_entries())) end

---`for key, value in d:pairs() do`
function keyed:pairs()
  local keys, values = self:_entries()
  local i = 0
  return function()
    i = i + 1
    return keys[i], unnone(values[i])
  end
end
keyed.items = keyed.pairs

---Modules by name, in order, registered as children. d.name and d["name"] read and write one.
---@class nn.ModuleDict : nn.Module
local ModuleDict = Module:extend "nn.ModuleDict"
for name, method in pairs(keyed) do ModuleDict[name] = method end
Module._metatable(ModuleDict).__len, Module._metatable(ModuleDict).__pairs = ModuleDict.len, ModuleDict.pairs

---@param modules? table a map, whose keys are taken sorted, a list of pairs {key, module}, an OrderedDict or a ModuleDict
function ModuleDict:init(modules)
  if modules ~= nil then self:update(modules) end
end

function ModuleDict:_entries() return self:keys(), OrderedDict.values(self._modules) end
function ModuleDict:keys() return OrderedDict.keys(self._modules) end
function ModuleDict:contains(key) return get(self._modules, key) ~= nil end

---@param m? nn.Module
function ModuleDict:set(key, m)
  self:register_module(key, unnone(m))
  return self
end

local function check_key(self, key)
  if type(key) ~= "string" then fail("TypeError", "%s: a key must be a string, got %s", self.__name, type_name(key)) end
  if not self:contains(key) then fail("KeyError", "%s has no key %q", self.__name, key) end
end

---The module of a key; without it, the default or, where none is given, an error.
function ModuleDict:get(key, ...)
  if select("#", ...) > 0 and not self:contains(key) then return (select(1, ...)) end
  check_key(self, key)
  return unnone(get(self._modules, key))
end

---Takes a module out and returns it.
function ModuleDict:pop(key)
  check_key(self, key)
  local m = unnone(get(self._modules, key))
  self:delattr(key)
  return m
end

function ModuleDict:remove(key)
  self:pop(key)
  return self
end

function ModuleDict:clear()
  for _, key in ipairs(self:keys()) do self:delattr(key) end
  return self
end

local function set_all(self, keys, values)
  for i = 1, #keys do self:set(keys[i], values[i]) end
end

---Sets all of a map (sorted), a list of pairs {key, module}, an OrderedDict or a ModuleDict.
function ModuleDict:update(modules) return atomic(self, set_all, pairs_of(self.__name .. ":update", modules)) end

-- ParameterList --------------------------------------------------------------------------------------------------------------

---What a container of parameters stores for a value: tensors become Parameters.
local function converted(v)
  if is_tensor(v) and not is_parameter(v) then return Parameter(v) end
  return v
end

local function no_forward(self) fail("RuntimeError", "%s cannot be called", self.__name) end

---How an element prints.
local function describe(v)
  if not is_tensor(v) then return "Object of type: " .. (is_module(v) and v._short_name(v) or v == None and "nil" or type_name(v)) end
  return ("%s containing: [%s of size %s%s]"):format(is_parameter(v) and "Parameter" or "Tensor", v.dtype, table.concat(v:size(), "x"),
    v.device:match "^cpu" and "" or " (" .. v.device .. ")")
end

---A list of parameters; it holds other values too. It only grows.
---@class nn.ParameterList : nn.Module
local ParameterList = Module:extend "nn.ParameterList"

---@param values? table a list, a container or an iterator
function ParameterList:init(values)
  self._size = 0
  if values ~= nil then self:extend(values) end
end

function ParameterList:len() return self._size end
Module._metatable(ParameterList).__len = ParameterList.len

function ParameterList:_elements()
  local list = {}
  for i = 1, self._size do
    local v = self[tostring(i - 1)]
    list[i] = v == nil and None or v
  end
  return list
end

function ParameterList:ipairs() return ipairs(self:_elements()) end
Module._metatable(ParameterList).__ipairs = ParameterList.ipairs

function ParameterList:_at(i) return self[tostring(place(self, i, self._size, "element") - 1)] end

function ParameterList:_set_at(i, v)
  i = place(self, i, self._size, "element")
  if v == nil then fail("TypeError", "%s: assigning nil does not remove an element; it only grows", self.__name) end
  self[tostring(i - 1)] = converted(v)
end

local function append_value(self, v)
  local name = tostring(self._size)
  if v == nil then fail("TypeError", "%s: element %d is nil", self.__name, self._size + 1) end
  if self:hasattr(name) then fail("KeyError", "%s: %q is taken: it cannot name an element", self.__name, name) end
  self[name] = converted(v)
  self._size = self._size + 1
end

---Adds a value at the end.
function ParameterList:append(v)
  append_value(self, v)
  return self
end

local function append_values(self, list)
  for i = 1, #list do append_value(self, list[i]) end
end

local function finish_extend(self, n, ok, e)
  if not ok then
    for i = n, self._size - 1 do self:delattr(tostring(i)) end
    self._size = n
    error(e, 0)
  end
  return self
end

---Adds all values of a list, a container or an iterator at the end.
function ParameterList:extend(values)
  if not is_module(self) then return extend_class(self, values) end
  return finish_extend(self, self._size, pcall(append_values, self, list_of(self.__name .. ":extend", values)))
end

---A ParameterList of the same values from i to j, as string.sub takes them.
function ParameterList:slice(i, j)
  local first, last = range(self, i, j, self._size)
  local list, y = self:_elements(), class_of(self)()
  for k = first, last do append_value(y, list[k]) end
  return y
end

ParameterList.forward = no_forward

function ParameterList:extra_repr()
  local lines = {}
  for i, v in self:ipairs() do lines[i] = ("  (%d): %s"):format(i - 1, describe(v)) end
  return table.concat(lines, "\n")
end

-- ParameterDict --------------------------------------------------------------------------------------------------------------

---Parameters by name, in order; it holds other values too. Assigning a tensor or module to a field (d.w, d["w"]) sets a
---key; for other values it does so where the key is there, and else makes an ordinary attribute: set makes a key of any.
---@class nn.ParameterDict : nn.Module
local ParameterDict = Module:extend "nn.ParameterDict"
for name, method in pairs(keyed) do ParameterDict[name] = method end

---@param values? table a map, whose keys are taken sorted, a list of pairs {key, value}, an OrderedDict or a ParameterDict
function ParameterDict:init(values)
  self._keys = OrderedDict.new() -- key -> true
  if values ~= nil then self:update(values) end
end

local assign = Module._metatable(Module).__newindex

local function write(self, key, value)
  if type(key) == "string" and (is_tensor(value) or is_module(value) or self:contains(key)) then self:set(key, value)
  else assign(self, key, value) end
end

local function watch(class)
  Module._metatable(class).__newindex = write
  return class
end
watch(ParameterDict)
Module._metatable(ParameterDict).__len, Module._metatable(ParameterDict).__pairs = ParameterDict.len, ParameterDict.pairs

function ParameterDict:extend(name) return watch(extend_class(self, name)) end

---Keys that are still there: delattr may have removed some.
function ParameterDict:keys()
  local keys = {}
  for _, key in ipairs(OrderedDict.keys(self._keys)) do
    if get(self._keys, key) == "empty" or self:hasattr(key) then keys[#keys + 1] = key end
  end
  return keys
end

function ParameterDict:_entries()
  local keys, values = self:keys(), {}
  for i, key in ipairs(keys) do
    local v = self[key]
    values[i] = v == nil and None or v
  end
  return keys, values
end

function ParameterDict:contains(key)
  local keys = self._keys -- nil before init
  local kept = keys and get(keys, key)
  return kept == "empty" or kept ~= nil and self:hasattr(key)
end

---@param key string
function ParameterDict:set(key, value)
  if type(key) ~= "string" then fail("TypeError", "%s: a key must be a string, got %s", self.__name, type_name(key)) end
  if not self:contains(key) then
    if self:hasattr(key) then fail("KeyError", "%s: %q is taken: it cannot be a key", self.__name, key) end
    if key == "" or key:find(".", 1, true) then
      fail("KeyError", "%s: a key must not be empty and have no dot, got %q", self.__name, key)
    end
    self._keys[key] = nil -- someone may have taken it away by delattr: it goes to the end
  end
  value = unnone(value)
  assign(self, key, converted(value))
  self._keys[key] = value == nil and "empty" or "full"
  return self
end

---The value of a key, or the default.
function ParameterDict:get(key, default)
  if self:contains(key) then return self[key] end
  return default
end

---The value of a key, which is set to the default if it is not there.
function ParameterDict:setdefault(key, default)
  if not self:contains(key) then self:set(key, default) end
  return self[key]
end

---Takes a value out and returns it.
function ParameterDict:pop(key)
  if not self:contains(key) then fail("AttributeError", "%s has no key %q", self.__name, tostring(key)) end
  local v = self[key]
  self._keys[key] = nil
  if self:hasattr(key) then self:delattr(key) end
  return v
end

function ParameterDict:remove(key)
  self:pop(key)
  return self
end

---Takes the last key out and returns it with its value.
function ParameterDict:popitem()
  local keys = self:keys()
  local key = keys[#keys]
  if key == nil then fail("KeyError", "%s: popitem: it is empty", self.__name) end
  return key, self:pop(key)
end

function ParameterDict:clear()
  for _, key in ipairs(self:keys()) do self:pop(key) end
  return self
end

---Another ParameterDict of the same values. (PyTorch's a | b is a:copy():update(b).)
function ParameterDict:copy() return class_of(self)(self) end

---A new ParameterDict with these keys and one value.
---@param keys string[]
function ParameterDict:fromkeys(keys, default)
  local d = ParameterDict()
  for _, key in ipairs(keys) do d:set(key, default) end
  return d
end

local function undo(self, keys, values, ok, e)
  if ok then return self end
  self:clear()
  for i = 1, #keys do self:set(keys[i], values[i]) end
  error(e, 0)
end

---Sets all of a map (sorted), a list of pairs {key, value}, an OrderedDict or a ParameterDict.
function ParameterDict:update(values)
  local new_keys, new_values = pairs_of(self.__name .. ":update", values)
  local keys, old = self:_entries()
  return undo(self, keys, old, pcall(set_all, self, new_keys, new_values))
end

ParameterDict.forward = no_forward

function ParameterDict:extra_repr()
  local lines, keys, values = {}, self:_entries()
  for i, key in ipairs(keys) do lines[i] = ("  (%s): %s"):format(key, describe(values[i])) end
  return table.concat(lines, "\n")
end

return { Sequential = Sequential, ModuleList = ModuleList, ModuleDict = ModuleDict, ParameterList = ParameterList,
  ParameterDict = ParameterDict }
