---A dictionary that keeps the order in which its keys were first set.
---
---Reading finds data before methods, so code that may meet any key calls `OrderedDict.keys(d)` and the like as
---functions, and `OrderedDict.get(d, k)` to see data only. `_metadata` is no key but an attribute, which
---`clone` keeps and copying key by key loses.

local rawget, rawset, setmetatable = rawget, rawset, setmetatable

-- The private fields are named by tables, which no user key can equal.
local KEYS, VALUES, META = {}, {}, {}

---@class OrderedDict
local OrderedDict = {}
local mt = {}

function mt.__index(d, key)
  if key == "_metadata" then return rawget(d, META) end
  local value = rawget(d, VALUES)[key]
  if value ~= nil then return value end
  return OrderedDict[key]
end

function mt.__newindex(d, key, value)
  if key == "_metadata" then return rawset(d, META, value) end
  local keys, values = rawget(d, KEYS), rawget(d, VALUES)
  if value ~= nil then
    if values[key] == nil then keys[#keys + 1] = key end
  elseif values[key] ~= nil then
    for i = 1, #keys do
      if keys[i] == key then table.remove(keys, i) break end
    end
  end
  values[key] = value
end

---@return OrderedDict
function OrderedDict.new()
  return setmetatable({[KEYS] = {}, [VALUES] = {}}, mt)
end

---@return boolean
function OrderedDict.is(x)
  return getmetatable(x) == mt
end

---The value of a key, never a method.
function OrderedDict:get(key)
  return rawget(self, VALUES)[key]
end

---@return integer
function OrderedDict:len()
  return #rawget(self, KEYS)
end

---A list of the keys, in order.
function OrderedDict:keys()
  local keys, list = rawget(self, KEYS), {}
  for i = 1, #keys do list[i] = keys[i] end
  return list
end

---The list of keys that the dictionary itself uses: it changes with the dictionary and must not be written to.
function OrderedDict:live_keys() return rawget(self, KEYS) end

---A list of the values, in the order of their keys.
function OrderedDict:values()
  local keys, values, list = rawget(self, KEYS), rawget(self, VALUES), {}
  for i = 1, #keys do list[i] = values[keys[i]] end
  return list
end

---`for key, value in d:pairs() do`: walks a snapshot, so the loop may change d.
function OrderedDict:pairs()
  local keys, values, i = OrderedDict.keys(self), OrderedDict.values(self), 0
  return function()
    i = i + 1
    return keys[i], values[i]
  end
end

-- Whatever can clone itself is cloned, once however often it is met, so that shared values stay shared.
local function copy(value, seen)
  if type(value) ~= "table" then return value end
  if seen[value] == nil then
    local clone = OrderedDict.is(value) and OrderedDict.clone or value.clone
    seen[value] = clone and clone(value) or value
  end
  return seen[value]
end

local function copy_plain(value)
  local ordered = OrderedDict.is(value)
  if type(value) ~= "table" or getmetatable(value) and not ordered then return value end
  local t = ordered and OrderedDict.new() or {}
  for k, v in (ordered and OrderedDict.pairs or pairs)(value) do t[k] = copy_plain(v) end
  return t
end

---A copy whose values are copies too, as far as they have a `clone` method; with the metadata.
---@return OrderedDict
function OrderedDict:clone()
  local d, seen = OrderedDict.new(), {}
  for key, value in OrderedDict.pairs(self) do d[key] = copy(value, seen) end
  d._metadata = copy_plain(rawget(self, META))
  return d
end

function mt.__tostring(d)
  local names = OrderedDict.keys(d)
  for i = 1, #names do names[i] = tostring(names[i]) end
  return "OrderedDict(" .. table.concat(names, ", ") .. ")"
end

-- Debian's LuaJIT ignores these two on tables; other builds honour them.
mt.__len = OrderedDict.len
mt.__pairs = OrderedDict.pairs

return OrderedDict
