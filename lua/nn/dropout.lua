---dropout.lua

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"

---In training mode each element is dropped with probability p and the others grow by 1 / (1 - p); in evaluation mode
---the input passes unchanged.
---@class nn.Dropout : nn.Module
---@field p number
local Dropout = Module:extend "nn.Dropout"

local OPTIONS = { inplace = true }

---@param p? number default 0.5
---@param opts? {inplace?: boolean}
function Dropout:init(p, opts)
  p = p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then
    B.fail("ValueError", "nn.Dropout: p is %s, expected 0 to 1", tostring(p))
  end
  self.p = p
  self.options = opts and F.options(opts, "nn.Dropout", OPTIONS)
end

function Dropout:forward(x)
  if not self.training then return x end
  return F.dropout(x, self.p, self.options)
end

function Dropout:extra_repr()
  return "p=" .. self.p .. (self.options and self.options.inplace and ", inplace=true" or "")
end

return Dropout
