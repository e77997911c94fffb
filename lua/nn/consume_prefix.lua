---consume_prefix.lua: state dictionaries of a module that was wrapped when it was saved.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"

local function keys_of(d)
  if OrderedDict.is(d) then return OrderedDict.keys(d) end
  local keys = {}
  for key in pairs(d) do keys[#keys + 1] = key end
  return keys
end

---Takes the prefix from the keys that begin with it, in place; they go to the end. Among paths of modules, the wrapped
---one itself is the prefix without its dot.
local function strip(d, prefix, paths)
  for _, key in ipairs(keys_of(d)) do
    local stripped
    if key:sub(1, #prefix) == prefix then stripped = key:sub(#prefix + 1)
    elseif paths and key .. "." == prefix then stripped = "" end
    if stripped then
      local value = d[key]
      d[key] = nil
      d[stripped] = value
    end
  end
end

---Renames keys such as "module.fc.weight" to "fc.weight", in the dictionary and in its metadata.
---@param sd OrderedDict | table<string, Tensor>
---@param prefix string "module."
local function consume_prefix(sd, prefix)
  if type(prefix) ~= "string" then
    B.fail("TypeError", "consume_prefix_in_state_dict_if_present: prefix must be a string, got %s", B.type_name(prefix))
  end
  strip(sd, prefix)
  local metadata = OrderedDict.is(sd) and sd._metadata
  if metadata then strip(metadata, prefix, true) end
end

return { consume_prefix_in_state_dict_if_present = consume_prefix }
