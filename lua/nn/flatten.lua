---flatten.lua

local Module = require "tmod.nn.module"

---Joins the dims from first to last into one; as it comes, all but the first, which counts the samples.
---@class nn.Flatten : nn.Module
local Flatten = Module:extend "nn.Flatten"

---@param first? integer default 2
---@param last? integer default -1
function Flatten:init(first, last)
  self.first, self.last = first or 2, last or -1
end

function Flatten:forward(x) return x:flatten(self.first, self.last) end

function Flatten:extra_repr() return ("first=%d, last=%d"):format(self.first, self.last) end

return Flatten
