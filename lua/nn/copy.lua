---copy.lua: copies of modules, tensors and whatever hangs on them.
---
---A deep copy shares nothing that can change with the original. Each object is copied once, so that ties, views of one
---storage and cycles are the same among the copies. Functions, coroutines and cdata are shared, and so are classes and
---loaded Lua modules.

local B = require "tmod.ffi"
local Handle = require "tmod.handle"
local Module = require "tmod.nn.module"
local OrderedDict = require "tmod.ordered"
local ops = require "tmod.ops"
local parameter = require "tmod.nn.parameter"

local None = parameter.None

local STATE = "\0state"

-- Private entries of a memo, beside its pairs of original and copy.
local STORAGES, HANDLES = {}, {}

local copy

---New memory of the same content; no gradient, hook or field comes along.
local function copy_parameter(p) return parameter.Parameter(ops.clone(p:detach()), p.requires_grad) end

---The storage of a tensor as one vector, copied: a view of one number in a large storage copies all of it, so that the
---copies of other views can share it.
local function copy_storage(t, memo)
  local id = t:storage_id()
  if not memo[STORAGES][id] then
    local n = math.floor(tonumber(B.C.tm_tensor_storage_bytes(B.ptr(t))) / t:element_size())
    memo[STORAGES][id] = ops.clone(ops.as_strided(t:detach(), { n }, { 1 }, 0))
  end
  return memo[STORAGES][id]
end

local function copy_tensor(t, memo)
  if parameter.is_parameter(t) then return copy_parameter(t) end
  if B.class_of and B.class_of(t) and not rawget(t, "_class") then return ops.clone(t) end -- a wrapper has no storage to copy
  if not t.is_leaf then
    B.fail("RuntimeError", "deepcopy: a result of %s belongs to a graph, which cannot be copied: detach it, or do not keep it", t.grad_fn)
  end
  local c = ops.as_strided(copy_storage(t, memo), t:size(), t:stride(), t:storage_offset()):detach()
  if t.requires_grad then c.requires_grad = true end
  c.grad = copy(t.grad, memo)
  for k, v in next, t do
    if k ~= "_h" and k ~= "_hooks" then rawset(c, k, copy(v, memo)) end
  end
  return c
end

local function copy_ordered(d, memo)
  local c = OrderedDict.new()
  memo[d] = c
  for k, v in OrderedDict.pairs(d) do c[copy(k, memo)] = copy(v, memo) end
  c._metadata = copy(d._metadata, memo)
  return c
end

local function copy_table(t, memo)
  local mt = getmetatable(t)
  if mt ~= nil and type(mt) ~= "table" then B.fail("TypeError", "deepcopy: a table with a hidden metatable cannot be copied") end
  local c = {}
  memo[t] = c
  for k, v in next, t do c[copy(k, memo)] = copy(v, memo) end
  return setmetatable(c, mt)
end

---Hook lists are tables of the state like all others: their records are copied, with the numbers and functions.
local function copy_module(m, memo)
  local c = setmetatable({}, getmetatable(m))
  memo[m] = c
  local s = copy_table(rawget(m, STATE), memo)
  rawset(c, STATE, s)
  for _, registry in ipairs { s.parameters, s.buffers } do
    for _, t in OrderedDict.pairs(registry) do
      if t ~= None then parameter.keep(t) end
    end
  end
  return c
end

---The copy removes the hook of the owner's copy. Whether the owner is copied is known when all is.
local function copy_handle(h, memo)
  local c = Handle.new(nil, h.id, h._remover)
  table.insert(memo[HANDLES], { handle = c, owner = h._owner[1] })
  return c
end

local function is_class(t) return Module._metatable(t) ~= nil or rawget(t, "__index") == t end

function copy(x, memo)
  if type(x) ~= "table" then return x end
  if memo[x] ~= nil then return memo[x] end
  local c
  if x == None or is_class(x) then c = x
  elseif B.is_tensor(x) then c = copy_tensor(x, memo)
  elseif rawget(x, STATE) then return copy_module(x, memo)
  elseif OrderedDict.is(x) then return copy_ordered(x, memo)
  elseif getmetatable(x) == Handle then c = copy_handle(x, memo)
  else return copy_table(x, memo) end
  memo[x] = c
  return c
end

local function share_loaded(x, memo)
  for _, loaded in pairs(package.loaded) do
    if type(loaded) == "table" and loaded ~= x and memo[loaded] == nil then memo[loaded] = loaded end
  end
end

---A copy of a module, a tensor or a table, with all that it refers to.
---@generic T
---@param x T
---@param memo? table original -> copy; what is in it already is not copied again
---@return T
local function deepcopy(x, memo)
  memo = memo or {}
  memo[STORAGES], memo[HANDLES] = memo[STORAGES] or {}, {}
  share_loaded(x, memo)
  local c = copy(x, memo)
  for _, h in ipairs(memo[HANDLES]) do
    if h.owner ~= nil then h.handle._owner[1] = memo[h.owner] end
  end
  return c
end

---@return nn.Module
function Module:clone() return deepcopy(self) end

---A second module on the same parameters, buffers, children and hooks: what is registered on one is registered on
---both. Only ordinary attributes are its own, as far as they are assigned anew.
---@param m nn.Module
local function shallow(m)
  local s, attributes = {}, {}
  for k, v in pairs(rawget(m, STATE)) do s[k] = v end
  for k, v in pairs(s.attributes) do attributes[k] = v end
  s.attributes = attributes
  return setmetatable({ [STATE] = s }, getmetatable(m))
end

return { deepcopy = deepcopy, copy = shallow }
