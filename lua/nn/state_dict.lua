---state_dict.lua: a module's state as a dictionary by path, and back. Keys are exactly PyTorch's.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local parameter = require "tmod.nn.parameter"
local options = require "tmod.functional".options

local None = parameter.None

local methods = {}

-- saving --------------------------------------------------------------------------------------------------------------

---Own entries of one module; a class that stores its state otherwise overrides this.
function methods:save_to_state_dict(destination, prefix, keep_vars)
  local skip = self._non_persistent_buffers_set
  for _, registry in ipairs { self._parameters, self._buffers } do
    for name, t in OrderedDict.pairs(registry) do
      if t ~= None and not (registry == self._buffers and skip[name]) then
        destination[prefix .. name] = keep_vars and t or t:detach()
      end
    end
  end
  if self.get_extra_state ~= methods.get_extra_state then
    local extra = self:get_extra_state()
    destination[prefix .. "_extra_state"] = extra == nil and None or extra
  end
end

local function save(module, destination, metadata, prefix, keep_vars)
  if metadata then metadata[prefix:sub(1, -2)] = { version = module._version } end
  module:save_to_state_dict(destination, prefix, keep_vars)
  for name, child in OrderedDict.pairs(module._modules) do
    if child ~= None then save(child, destination, metadata, prefix .. name .. ".", keep_vars) end
  end
end

local STATE_DICT = { destination = true, prefix = true, keep_vars = true }

---Parameters and persistent buffers of the tree by path. The tensors share memory with the module's.
---@param opts? {destination?: table, prefix?: string, keep_vars?: boolean} keep_vars: the objects themselves
---@return OrderedDict
function methods:state_dict(opts)
  opts = options(opts, "state_dict", STATE_DICT)
  local destination = opts.destination
  if destination == nil then
    destination = OrderedDict.new()
    destination._metadata = OrderedDict.new()
  end
  save(self, destination, OrderedDict.is(destination) and destination._metadata, opts.prefix or "", opts.keep_vars or false)
  return destination
end

---State that is no tensor: a class that has some overrides both.
function methods:get_extra_state()
  B.fail("NotImplementedError", "%s has no get_extra_state", self._short_name(self))
end
function methods:set_extra_state()
  B.fail("NotImplementedError", "%s has no set_extra_state", self._short_name(self))
end

-- loading -------------------------------------------------------------------------------------------------------------

local function shape_text(t) return "(" .. table.concat(t:size(), ", ") .. (t.ndim == 1 and ",)" or ")") end

local function same_shape(a, b)
  local x, y = a:size(), b:size()
  if #x ~= #y then return false end
  for i = 1, #x do
    if x[i] ~= y[i] then return false end
  end
  return true
end

local function cause(e) return type(e) == "table" and e.message or tostring(e) end

---A parameter or buffer slot gets the dictionary's tensor itself.
local function assign(module, name, target, value)
  if parameter.is_parameter(target) then
    if parameter.is_parameter(value) then value:requires_grad_(target.requires_grad)
    else value = parameter.Parameter(value, target.requires_grad) end
  end
  module[name] = value
end

local function load_entry(module, name, target, key, value, assigning, errors)
  if not B.is_tensor(value) then
    errors[#errors + 1] = ("%q must be a tensor, got %s"):format(key, B.type_name(value))
    return
  end
  if target.ndim == 0 and value.ndim == 1 and value:numel() == 1 then value = value[1] end
  if not same_shape(target, value) then
    errors[#errors + 1] = ("size mismatch for %s: the state dictionary has %s, the module has %s"):format(key, shape_text(value), shape_text(target))
    return
  end
  if not assigning and target.device == "meta" and value.device ~= "meta" then
    module._warn("%s is on meta: copying into it does nothing; load with assign = true", key)
  end
  local ok, e
  if assigning then ok, e = pcall(assign, module, name, target, value)
  else ok, e = pcall(autograd.no_grad, ops.copy_, target, value) end
  if not ok then
    errors[#errors + 1] = ("cannot load %s, %s into %s: %s"):format(key, shape_text(value), shape_text(target), cause(e))
  end
end

local function load_extra_state(self, dictionary, key, missing, unexpected)
  local value = OrderedDict.get(dictionary, key)
  if self.set_extra_state ~= methods.set_extra_state then
    if value == nil then missing[#missing + 1] = key
    else
      if value == None then value = nil end
      self:set_extra_state(value)
    end
  elseif value ~= nil then
    unexpected[#unexpected + 1] = key
  end
end

---Own entries of one module; a class that reads its state otherwise, or migrates old versions, overrides this. Tables
---are live: keys may be changed, and messages added to missing, unexpected and errors.
function methods:load_from_state_dict(dictionary, prefix, local_metadata, strict, missing, unexpected, errors)
  local skip, known = self._non_persistent_buffers_set, {}
  for _, registry in ipairs { self._parameters, self._buffers } do
    for name, target in OrderedDict.pairs(registry) do
      if target ~= None and not (registry == self._buffers and skip[name]) then
        local key = prefix .. name
        local value = OrderedDict.get(dictionary, key)
        known[name] = true
        if value == nil then missing[#missing + 1] = key
        else load_entry(self, name, target, key, value, local_metadata.assign_to_params_buffers, errors) end
      end
    end
  end
  load_extra_state(self, dictionary, prefix .. "_extra_state", missing, unexpected)
  if not strict then return end
  for _, key in ipairs(OrderedDict.keys(dictionary)) do
    local rest = key:sub(#prefix + 1)
    if key:sub(1, #prefix) == prefix and rest ~= "_extra_state" then
      local child = rest:match "^(.-)%."
      if child and OrderedDict.get(self._modules, child) == nil or not child and not known[rest] then
        unexpected[#unexpected + 1] = key
      end
    end
  end
end

---Parts of a dictionary by the child that their keys name: one pass for all children.
local function by_child(dictionary, prefix)
  local parts = {}
  for key, value in OrderedDict.pairs(dictionary) do
    local child = key:sub(1, #prefix) == prefix and key:match("^(.-)%.", #prefix + 1)
    if child then
      parts[child] = parts[child] or OrderedDict.new()
      parts[child][key] = value
    end
  end
  return parts
end

local function entry(metadata, path)
  if type(metadata) ~= "table" then return nil end
  if OrderedDict.is(metadata) then return OrderedDict.get(metadata, path) end
  return metadata[path]
end

local function load(module, dictionary, prefix, state)
  local local_metadata = {}
  for k, v in pairs(entry(state.metadata, prefix:sub(1, -2)) or {}) do local_metadata[k] = v end
  if state.assign then local_metadata.assign_to_params_buffers = true end
  module:load_from_state_dict(dictionary, prefix, local_metadata, true, state.missing, state.unexpected, state.errors)
  local parts = by_child(dictionary, prefix)
  for name, child in OrderedDict.pairs(module._modules) do
    if child ~= None then load(child, parts[name] or OrderedDict.new(), prefix .. name .. ".", state) end
  end
end

local function shallow_copy(sd)
  if type(sd) ~= "table" or B.is_tensor(sd) then
    B.fail("TypeError", "load_state_dict: expected a dictionary of tensors by name, got %s", B.type_name(sd))
  end
  local copy = OrderedDict.new()
  local keys = {}
  if OrderedDict.is(sd) then keys = OrderedDict.keys(sd) else
    for key in pairs(sd) do keys[#keys + 1] = key end
  end
  for _, key in ipairs(keys) do
    if type(key) ~= "string" then B.fail("TypeError", "load_state_dict: keys must be strings, got a %s: %s", B.type_name(key), tostring(key)) end
  end
  if OrderedDict.is(sd) then
    for _, key in ipairs(keys) do copy[key] = OrderedDict.get(sd, key) end
    return copy, sd._metadata
  end
  table.sort(keys)
  for _, key in ipairs(keys) do copy[key] = sd[key] end
  return copy, nil
end

local function quoted(keys)
  local list = {}
  for i, key in ipairs(keys) do list[i] = ("%q"):format(key) end
  return table.concat(list, ", ")
end

local result = { __name = "IncompatibleKeys" }
result.__index = result
function result.__tostring(r)
  if #r.missing_keys == 0 and #r.unexpected_keys == 0 then return "<all keys matched>" end
  return ("missing keys: %s; unexpected keys: %s"):format(quoted(r.missing_keys), quoted(r.unexpected_keys))
end

local LOAD = { strict = true, assign = true }

---Copies a state dictionary into the tree (or, with assign, puts its tensors there). Everything that fits is loaded;
---then one error tells all that did not. Without strict, missing and unexpected keys are no error.
---@param sd OrderedDict | table<string, Tensor>
---@param opts? {strict?: boolean, assign?: boolean}
---@return {missing_keys: string[], unexpected_keys: string[]}
function methods:load_state_dict(sd, opts)
  opts = options(opts, "load_state_dict", LOAD)
  local dictionary, metadata = shallow_copy(sd)
  local state = { metadata = metadata, assign = opts.assign, missing = {}, unexpected = {}, errors = {} }
  load(self, dictionary, "", state)
  local errors = state.errors
  if opts.strict ~= false then
    if #state.unexpected > 0 then table.insert(errors, 1, "unexpected keys in the state dictionary: " .. quoted(state.unexpected)) end
    if #state.missing > 0 then table.insert(errors, 1, "missing keys in the state dictionary: " .. quoted(state.missing)) end
  end
  if #errors > 0 then
    B.fail("RuntimeError", "load_state_dict of " .. self._short_name(self) .. ":\n\t" .. table.concat(errors, "\n\t"))
  end
  return setmetatable({ missing_keys = state.missing, unexpected_keys = state.unexpected }, result)
end

return methods
