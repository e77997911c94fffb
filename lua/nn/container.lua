---container.lua: modules made of modules.

local B = require "tmod.ffi"
local Module = require "tmod.nn.module"
local OrderedDict = require "tmod.ordered"

local None = require "tmod.nn.parameter".None
local get, child_names = OrderedDict.get, Module._child_names

---Modules one after the other: each gets all results of the one before. seq[1] is the first; the names in a state
---dictionary are "0", "1", ...
---@class nn.Sequential : nn.Module
local Sequential = Module:extend "nn.Sequential"

---Sequential(a, b), Sequential{a, b}, Sequential{{"conv", a}, {"act", b}}, or an OrderedDict of modules.
function Sequential:init(...)
  local list, n = { ... }, select("#", ...)
  local first = list[1]
  if n == 1 and OrderedDict.is(first) then
    for name, m in OrderedDict.pairs(first) do self:add_module(name, m ~= None and m or nil) end
    return
  end
  if n == 1 and type(first) == "table" and getmetatable(first) == nil then list, n = first, table.maxn(first) end
  for i = 1, n do
    local m = list[i]
    if m == nil then B.fail("TypeError", "nn.Sequential: module %d of %d is nil", i, n) end
    if type(m) == "table" and getmetatable(m) == nil then self:add_module(m[1], m[2])
    else self:add_module(tostring(i - 1), m) end
  end
end

---Name of the slot at a position, counted from 1 or, negative, from the end.
local function name_at(self, i)
  local names = child_names(self)
  local n = #names
  if type(i) ~= "number" then B.fail("TypeError", "%s: a position must be a number, got %s", self.__name, B.type_name(i)) end
  if i == 0 or i > n or i < -n or i ~= math.floor(i) then
    B.fail("IndexError", "%s: no module at %s: it has %d, counted from 1", self.__name, tostring(i), n)
  end
  return names[i > 0 and i or n + i + 1]
end

function Sequential:_at(i)
  local m = get(self._modules, name_at(self, i))
  if m ~= None then return m end
end

function Sequential:_set_at(i, m)
  local name = name_at(self, i)
  if m == nil then B.fail("TypeError", "%s: assigning nil does not remove a module; use delattr(%q)", self.__name, name) end
  self:register_module(name, m)
end

function Sequential:len() return OrderedDict.len(self._modules) end

---`for i, m in seq:ipairs() do`
function Sequential:ipairs() return ipairs(OrderedDict.values(self._modules)) end

---Adds a module at the end, under its position as name or, where that is taken, the next free number.
---@param m nn.Module
function Sequential:append(m)
  local number = self:len()
  while get(self._modules, tostring(number)) ~= nil do number = number + 1 end
  self:register_module(tostring(number), m)
  return self
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

return { Sequential = Sequential }
