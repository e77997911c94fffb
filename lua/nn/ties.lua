---ties.lua: slots that hold one and the same parameter or buffer, before and after a conversion that takes them apart.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local parameter = require "tmod.nn.parameter"

local None = parameter.None
local ties = {}

---The tied slots of a model: a list of groups, each a list of paths such as {"encoder.weight", "decoder.weight"}, in the
---order of registration. With it, retie ties them again after a conversion.
---@param model nn.Module
---@return string[][]
function ties.tied_groups(model)
  local group_of, groups = {}, {}
  for path, module in model:named_modules() do
    for _, registry in ipairs { "_parameters", "_buffers" } do
      for name, t in OrderedDict.pairs(module[registry]) do
        if t ~= None then
          local group = group_of[t]
          if not group then
            group = { slots = {} }
            group_of[t] = group
          end
          local n = #group + 1
          group[n] = path == "" and name or path .. "." .. name
          group.slots[n] = { module = module, registry = registry, name = name }
          if n == 2 then groups[#groups + 1] = group end
        end
      end
    end
  end
  return groups
end

local function text(t) return ("%s (%s) on %s"):format(t.dtype, table.concat(t:size(), ", "), t.device) end

local function check(group)
  local slots = type(group) == "table" and group.slots
  if not slots then B.fail("TypeError", "retie: expected what tied_groups returned, got %s", B.type_name(group)) end
  local first
  for i, slot in ipairs(slots) do
    local t = OrderedDict.get(slot.module[slot.registry], slot.name)
    if t == nil or t == None then B.fail("ValueError", "retie: there is no %s any more", group[i]) end
    first = first or t
    if text(t) ~= text(first) then B.fail("ValueError", "retie: %s is %s, but %s is %s", group[1], text(first), group[i], text(t)) end
  end
end

---Puts what the first slot of each group holds, with its gradient, into the other slots. Nothing changes if one of
---them cannot be.
---@param groups string[][] from tied_groups
function ties.retie(groups)
  if type(groups) ~= "table" then B.fail("TypeError", "retie: expected what tied_groups returned, got %s", B.type_name(groups)) end
  for _, group in ipairs(groups) do check(group) end
  for _, group in ipairs(groups) do
    local slots = group.slots
    local t = OrderedDict.get(slots[1].module[slots[1].registry], slots[1].name)
    for i = 2, #slots do slots[i].module[slots[i].registry][slots[i].name] = t end
  end
end

return ties
