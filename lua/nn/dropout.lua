---dropout.lua

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"

---In training mode each element is dropped with probability p and the others grow by 1 / (1 - p); in evaluation mode
---the input passes unchanged.
---@class nn.Dropout : nn.Module
---@field p number
---@field inplace boolean
local Dropout = Module:extend "nn.Dropout"

local OPTIONS = { p = true, inplace = true }
local INPLACE = { inplace = true }

---@param p? number default 0.5
---@param opts? boolean | {inplace?: boolean} default: false
function Dropout:init(p, opts)
  if type(p) == "table" then p, opts = nil, p end
  if type(opts) == "boolean" then opts = { inplace = opts } end
  opts = F.options(opts, "nn.Dropout", OPTIONS)
  p = p or opts.p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then
    B.fail("ValueError", "nn.Dropout: p is %s, expected 0 to 1", tostring(p))
  end
  self.p, self.inplace = p, opts.inplace or false
end

function Dropout:forward(x)
  if not self.training then return x end
  return F.dropout(x, self.p, self.inplace and INPLACE or nil)
end

function Dropout:extra_repr() return ("p=%s, inplace=%s"):format(self.p, tostring(self.inplace)) end

return Dropout
