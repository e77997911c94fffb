---args.lua: what Lua lacks and module calls need: a tuple with its length, and named arguments.

local setmetatable, getmetatable, select, type = setmetatable, getmetatable, select, type

local Args = { __name = "nn.args" }
local Kw = { __name = "nn.kw" }

---Several values as one: fields 1 to n, and n itself, so that nil may stand anywhere.
---@return {n: integer}
local function args(...) return setmetatable({ n = select("#", ...), ... }, Args) end

---Named arguments, last in the call of a module: m(x, nn.kw{mask = k}).
---@param t table copied
local function kw(t)
  if type(t) ~= "table" then require "tmod.ffi".fail("TypeError", "nn.kw: expected a table, got %s", type(t)) end
  local copy = {}
  for k, v in pairs(t) do copy[k] = v end
  return setmetatable(copy, Kw)
end

local function is_args(v) return type(v) == "table" and getmetatable(v) == Args end
local function is_kw(v) return type(v) == "table" and getmetatable(v) == Kw end

---A copy, for somebody who may write into it.
local function copy(a)
  local c = { n = a.n }
  for i = 1, a.n do c[i] = a[i] end
  return setmetatable(c, Args)
end

function Args.__tostring(a)
  local texts = {}
  for i = 1, a.n do texts[i] = tostring(a[i]) end
  return "nn.args(" .. table.concat(texts, ", ") .. ")"
end
Args.__index = { unpack = function(a) return unpack(a, 1, a.n) end }

return { args = args, kw = kw, is_args = is_args, is_kw = is_kw, copy = copy }
