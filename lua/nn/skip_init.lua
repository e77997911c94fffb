---skip_init.lua: modules whose parameters are never initialised, for those who load or fill them anyway.

local B = require "tmod.ffi"
local Module = require "tmod.nn.module"
local Tensor = require "tmod.tensor"

---Makes Class(...) on the meta device, where filling a tensor costs nothing, and then gives it uninitialised memory on
---the device that the options table at the end names (default: the default device). Tied parameters come apart.
---@param class table a class of modules
---@return nn.Module
local function skip_init(class, ...)
  if type(class) ~= "table" or not Module._metatable(class) then
    B.fail("RuntimeError", "skip_init: expected a class of modules, got %s", B.type_name(class))
  end
  local args, n, device = { ... }, select("#", ...), Tensor.get_default_device()
  local opts, default = args[n], device
  if type(opts) == "table" and not getmetatable(opts) and opts.device then
    device, args[n] = opts.device, {}
    for k, v in pairs(opts) do
      if k ~= "device" then args[n][k] = v end
    end
  end
  Tensor.set_default_device "meta"
  local ok, m = pcall(class, unpack(args, 1, n))
  Tensor.set_default_device(default)
  if not ok then error(m, 0) end
  return m:to_empty { device = device }
end

return { skip_init = skip_init }
