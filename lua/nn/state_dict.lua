---state_dict.lua: a module's state as a dictionary by path, and back. Keys are exactly PyTorch's.

local B = require "tmod.ffi"
local Handle = require "tmod.handle"
local OrderedDict = require "tmod.ordered"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local parameter = require "tmod.nn.parameter"
local class_of = require "tmod.wrapper".class_of
local options = require "tmod.functional".options
local C, ptr = B.C, B.ptr

local None, is_parameter = parameter.None, parameter.is_parameter

local STATE = "\0state"

local methods, NONE = {}, {}

-- hooks -----------------------------------------------------------------------------------------------------------------

---Gives modules register_<name>(fn), which puts fn last in the list `name` of the module's hooks. A list is never
---changed but replaced, so that hooks may add and remove some while they run.
local function hook_list(name)
  local function replace(owner, id, record)
    local list = {}
    for _, old in ipairs(owner[name] or NONE) do
      if old.id ~= id then list[#list + 1] = old end
    end
    list[#list + 1] = record
    owner[name] = list
  end
  methods["register_" .. name] = function(self, fn)
    B.need_function("register_" .. name, fn)
    local owner, record = rawget(self, STATE).hooks, { id = Handle.next_id(), fn = fn }
    replace(owner, record.id, record)
    return Handle.new(owner, record.id, replace)
  end
end

---fn(module, prefix, keep_vars), before the module's own entries are saved.
hook_list "state_dict_pre_hook"
---fn(module, state_dict, prefix, local_metadata), after the entries of the module and all below it. It may change the
---dictionary, which other modules' entries are in too, and returns nothing.
hook_list "state_dict_post_hook"
---fn(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors), before the module's
---own entries are loaded. All tables are live, but the dictionary is not the caller's.
hook_list "load_state_dict_pre_hook"
---fn(module, incompatible), after the module and all below it: incompatible.missing_keys and .unexpected_keys, filled
---so far, may be changed. It returns nothing.
hook_list "load_state_dict_post_hook"

local function each_hook(module, name) return ipairs(rawget(module, STATE).hooks[name] or NONE) end

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

local STATE_DICT = { destination = true, prefix = true, keep_vars = true }

---Parameters and persistent buffers of the tree by path. The tensors share memory with the module's.
---@param opts? {destination?: table, prefix?: string, keep_vars?: boolean} keep_vars: the objects themselves
---@return OrderedDict
function methods:state_dict(opts)
  opts = options(opts, "state_dict", STATE_DICT)
  local destination, prefix, keep_vars = opts.destination, opts.prefix or "", opts.keep_vars or false
  if type(prefix) ~= "string" then B.fail("TypeError", "state_dict: prefix must be a string, got %s", B.type_name(prefix)) end
  if destination == nil then
    destination = OrderedDict.new()
    destination._metadata = OrderedDict.new()
  end
  local metadata = OrderedDict.is(destination) and destination._metadata
  local own = { version = self._version }
  if metadata then metadata[prefix:sub(1, -2)] = own end
  for _, hook in each_hook(self, "state_dict_pre_hook") do hook.fn(self, prefix, keep_vars) end
  self:save_to_state_dict(destination, prefix, keep_vars)
  for name, child in OrderedDict.pairs(self._modules) do
    if child ~= None then child:state_dict { destination = destination, prefix = prefix .. name .. ".", keep_vars = keep_vars } end
  end
  for _, hook in each_hook(self, "state_dict_post_hook") do
    local result = hook.fn(self, destination, prefix, own)
    if result ~= nil then
      B.fail("RuntimeError", "state_dict: a post-hook of %s returned a %s; it must change the dictionary and return nothing",
        self._short_name(self), B.type_name(result))
    end
  end
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
  local p, q = ptr(a), ptr(b)
  local n = C.tm_tensor_ndim(p)
  if n ~= C.tm_tensor_ndim(q) then return false end
  for i = 0, n - 1 do
    if C.tm_tensor_size(p, i) ~= C.tm_tensor_size(q, i) then return false end
  end
  return true
end

local function cause(e) return type(e) == "table" and e.message or tostring(e) end

-- A tensor's class is a field of its table, which an alias does not have.
local function with_class(t, of)
  local class = rawget(of, "_class")
  if class and rawget(t, "_class") == nil then rawset(t, "_class", class) end
  return t
end

local function as_parameter(t, requires_grad)
  if is_parameter(t) then return t:requires_grad_(requires_grad) end
  return parameter.Parameter(t, requires_grad)
end

---What load_state_dict swaps into this parameter or buffer while the swap flag is on. A tensor class may have a
---module_load of its own, which returns a new tensor, neither self nor input.
---@param input Tensor of the state dictionary
---@param assign boolean false: self keeps its memory, dtype and class
function Tensor:module_load(input, assign)
  if assign then return with_class(input:detach(), input) end
  self:copy_(input)
  return with_class(self:detach(), self)
end

---Frees what a handle that nobody else knows has got, without waiting for the collector.
local function release(t)
  B.reg[t._h % 4294967296] = nil
  C.tm_handles_release(B.handles, t._h)
end

---Raises if the content of a tensor cannot be swapped, before it is written to. What only garbage uses is free.
local function check_swappable(t)
  if C.tm_can_swap(ptr(t), ptr(t)) == 0 then return end
  B.collect_now()
  B.check(C.tm_can_swap(ptr(t), ptr(t)))
end

local function swap_in(target, value, assigning)
  check_swappable(target)
  local mine, theirs = class_of(target), class_of(value)
  local module_load = mine and mine.module_load or theirs and theirs.module_load or Tensor.module_load
  local result = module_load(target, value, assigning)
  if not B.is_tensor(result) then B.fail("TypeError", "module_load must return a tensor, got %s", B.type_name(result)) end
  if result == target or result == value then
    B.fail("RuntimeError", "module_load returned %s itself; it must return another tensor: detach the result",
      result == target and "self" or "its input")
  end
  local ours = module_load == Tensor.module_load
  if is_parameter(target) then
    ours = ours or not is_parameter(result)
    result = as_parameter(result, target.requires_grad)
  else -- what is registered as a buffer stays one
    rawset(result, "_buffer", rawget(target, "_buffer"))
    rawset(result, "_persistent", rawget(target, "_persistent"))
  end
  require "tmod".swap_tensors(target, result)
  if ours then release(result) end
end

---A parameter or buffer slot gets the dictionary's tensor itself.
local function assign(module, name, target, value)
  if is_parameter(target) then value = as_parameter(value, target.requires_grad) end
  module[name] = value
end

local function load_entry(module, name, target, key, value, mode, errors)
  if not B.is_tensor(value) then
    errors[#errors + 1] = ("%q must be a tensor, got %s"):format(key, B.type_name(value))
    return
  end
  if target.ndim == 0 and value.ndim == 1 and value:numel() == 1 then value = value:detach()[1] end -- of old files
  if not same_shape(target, value) then
    errors[#errors + 1] = ("size mismatch for %s: the state dictionary has %s, the module has %s")
      :format(key, shape_text(value), shape_text(target))
    return
  end
  if not mode.assign and target.device == "meta" and value.device ~= "meta" then
    module._warn("%s is on meta: copying into it does nothing; load with assign = true", key)
  end
  local ok, e
  if mode.swap then ok, e = pcall(swap_in, target, value, mode.assign)
  elseif mode.assign then ok, e = pcall(assign, module, name, target, value)
  else ok, e = pcall(target.copy_, target, value) end
  if not ok then
    errors[#errors + 1] = ("cannot load %s, %s into %s: %s failed: %s"):format(key, shape_text(value), shape_text(target),
      mode.swap and "swapping" or "copying", cause(e))
  end
end

---Names of the module's own parameters and persistent buffers.
local function load_entries(self, dictionary, prefix, mode, missing, errors)
  local skip, known = self._non_persistent_buffers_set, {}
  for _, registry in ipairs { self._parameters, self._buffers } do
    for name, target in OrderedDict.pairs(registry) do
      if target ~= None and not (registry == self._buffers and skip[name]) then
        local key = prefix .. name
        local value = OrderedDict.get(dictionary, key)
        known[name] = true
        if value == nil then missing[#missing + 1] = key
        else load_entry(self, name, target, key, value, mode, errors) end
      end
    end
  end
  return known
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
  for _, hook in each_hook(self, "load_state_dict_pre_hook") do
    hook.fn(self, dictionary, prefix, local_metadata, strict, missing, unexpected, errors)
  end
  local mode = { swap = C.tm_future_swap() ~= 0, assign = local_metadata.assign_to_params_buffers or false }
  local known = autograd.no_grad(load_entries, self, dictionary, prefix, mode, missing, errors)
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

local function each(t) return (OrderedDict.is(t) and OrderedDict.pairs or pairs)(t) end

---What is known of the module at a path, as a table that hooks and migrations may change.
local function metadata_of(state, path)
  local own, metadata = {}, state.metadata
  if OrderedDict.is(metadata) then metadata = OrderedDict.get(metadata, path)
  else metadata = type(metadata) == "table" and metadata[path] end
  for k, v in each(type(metadata) == "table" and metadata or {}) do own[k] = v end
  if state.assign then own.assign_to_params_buffers = true end
  return own
end

local function load(module, dictionary, prefix, state)
  local incompatible = state.incompatible
  -- Strict always: both lists are complete whatever the caller asked for.
  module:load_from_state_dict(dictionary, prefix, metadata_of(state, prefix:sub(1, -2)), true, incompatible.missing_keys,
    incompatible.unexpected_keys, state.errors)
  local parts = by_child(dictionary, prefix)
  for name, child in OrderedDict.pairs(module._modules) do
    if child ~= None then load(child, parts[name] or OrderedDict.new(), prefix .. name .. ".", state) end
  end
  for _, hook in each_hook(module, "load_state_dict_post_hook") do
    local result = hook.fn(module, incompatible)
    if result ~= nil then
      B.fail("AssertionError", "load_state_dict: a post-hook of %s returned a %s; it must change the lists and return nothing",
        module._short_name(module), B.type_name(result))
    end
  end
end

local function shallow_copy(sd)
  if type(sd) ~= "table" or B.is_tensor(sd) or rawget(sd, STATE) then
    B.fail("TypeError", "load_state_dict: expected a dictionary of tensors by name, got %s", B.type_name(sd))
  end
  local copy, keys = OrderedDict.new(), {}
  for key in each(sd) do
    if type(key) ~= "string" then
      B.fail("TypeError", "load_state_dict: keys must be strings, got a %s: %s", B.type_name(key), tostring(key))
    end
    keys[#keys + 1] = key
  end
  if OrderedDict.is(sd) then
    for _, key in ipairs(keys) do copy[key] = OrderedDict.get(sd, key) end
    return copy, sd._metadata
  end
  table.sort(keys) -- a plain table has no order
  for _, key in ipairs(keys) do copy[key] = sd[key] end
  return copy
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

---Copies a state dictionary into the tree (or, with assign, puts its tensors there). While tm.future's swap flag is on,
---parameters and buffers stay the same objects and get new contents, see Tensor.module_load. Everything that fits is
---loaded; then one error tells all that did not. Without strict, missing and unexpected keys are no error.
---@param sd OrderedDict | table<string, Tensor>
---@param opts? {strict?: boolean, assign?: boolean}
---@return {missing_keys: string[], unexpected_keys: string[]}
function methods:load_state_dict(sd, opts)
  opts = options(opts, "load_state_dict", LOAD)
  local dictionary, metadata = shallow_copy(sd)
  local incompatible, errors = setmetatable({ missing_keys = {}, unexpected_keys = {} }, result), {}
  load(self, dictionary, "", { metadata = metadata, assign = opts.assign, incompatible = incompatible, errors = errors })
  if opts.strict ~= false then
    local missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
    if #unexpected > 0 then table.insert(errors, 1, "unexpected keys in the state dictionary: " .. quoted(unexpected)) end
    if #missing > 0 then table.insert(errors, 1, "missing keys in the state dictionary: " .. quoted(missing)) end
  end
  if #errors > 0 then
    B.fail("RuntimeError", "load_state_dict of " .. self._short_name(self) .. ":\n\t" .. table.concat(errors, "\n\t"))
  end
  return incompatible
end

return methods
