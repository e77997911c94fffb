---optimizer.lua: what optimizers share: groups of parameters with options, states by parameter, state dictionaries,
---and the fused call. An update is one call of an operator over all parameters of a group that have a gradient.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local options = require "tmod.functional".options
local parameter = require "tmod.nn.parameter"
local C, H, F, ptr = B.C, B.handles, B.frame, B.ptr

---@class Optimizer
---@field param_groups table[] each {params = Tensor[], lr = ..., ...}; options may be changed between steps
---@field state table<Tensor, table>
local Optimizer = { __name = "Optimizer" }
Optimizer.__index = Optimizer

-- groups --------------------------------------------------------------------------------------------------------------

local function option_names(defaults)
  local names = {}
  for name in pairs(defaults) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

---Fills in defaults and checks every value with the class's rule: rule(value, group) is a text when it is wrong.
local function check_options(self, group, what)
  for name in pairs(group) do
    if name ~= "params" and self.defaults[name] == nil then
      B.fail("TypeError", "%s: unknown option %s%s; known: %s", self.__name, tostring(name), what, option_names(self.defaults))
    end
  end
  for name, default in pairs(self.defaults) do
    if group[name] == nil then
      group[name] = type(default) == "table" and { unpack(default) } or default
    elseif type(group[name]) ~= type(default) then
      B.fail("TypeError", "%s: %s must be a %s, got %s", self.__name, name, type(default), B.type_name(group[name]))
    end
  end
  for name, default in pairs(self.defaults) do
    local wrong = type(default) == "number" and not (group[name] >= 0 and group[name] < math.huge) and "expected 0 or more"
    local rule = self.rules[name]
    wrong = wrong or rule and rule(group[name], group)
    if wrong then
      local v = group[name]
      B.fail("ValueError", "%s: %s is %s, %s", self.__name, name,
        type(v) == "table" and "{" .. table.concat(v, ", ") .. "}" or tostring(v), wrong)
    end
  end
end

---A list of what params holds: a list, or an iterator such as model:parameters().
local function to_list(self, params)
  if B.is_tensor(params) then
    B.fail("TypeError", "%s: expected a list of tensors or model:parameters(), got a single tensor", self.__name)
  end
  local list = {}
  if type(params) == "function" then
    for p in params do list[#list + 1] = p end
  elseif type(params) == "table" and getmetatable(params) == nil then
    for i = 1, table.maxn(params) do list[i] = params[i] end
  else
    B.fail("TypeError", "%s: expected a list of tensors or model:parameters(), got %s", self.__name, B.type_name(params))
  end
  return list
end

---Adds {params = list or iterator, options...}; options that are missing are those of the optimizer.
---@param group table
function Optimizer:add_param_group(group)
  if type(group) ~= "table" or B.is_tensor(group) then
    B.fail("TypeError", "%s: a group must be a table, got %s", self.__name, B.type_name(group))
  end
  local own = {}
  for k, v in pairs(group) do own[k] = v end
  own.params = to_list(self, group.params)
  local seen = {}
  for _, g in ipairs(self.param_groups) do
    for _, p in ipairs(g.params) do seen[p] = true end
  end
  for i = 1, table.maxn(own.params) do
    local p = own.params[i]
    if not B.is_tensor(p) then B.fail("TypeError", "%s: parameter %d must be a tensor, got %s", self.__name, i, B.type_name(p)) end
    if not p.is_leaf then
      B.fail("ValueError", "%s: parameter %d is no leaf (%s made it) and cannot be optimized", self.__name, i, p.grad_fn)
    end
    if seen[p] then B.fail("ValueError", "%s: parameter %d appears twice", self.__name, i) end
    seen[p] = true
  end
  check_options(self, own, " in a group")
  self.param_groups[#self.param_groups + 1] = own
end

local function construct(class, params, opts)
  if opts ~= nil and type(opts) ~= "table" then
    B.fail("TypeError", "%s: expected a table of options, got %s", class.__name, B.type_name(opts))
  end
  local self = setmetatable({ param_groups = {}, state = {} }, class)
  local defaults = {}
  for k, v in pairs(opts or {}) do defaults[k] = v end
  check_options(self, defaults, "")
  self.defaults = defaults
  local list = to_list(self, params)
  if #list == 0 then B.fail("ValueError", "%s: got an empty list of parameters", class.__name) end
  local first = list[1]
  if type(first) == "table" and not B.is_tensor(first) then
    for _, group in ipairs(list) do self:add_param_group(group) end
  else
    self:add_param_group { params = list }
  end
  return self
end

---A class of optimizers; defaults: options with their default values; rules: option -> function(value, group) that
---returns what is wrong with the value, or nothing.
function Optimizer:extend(name, defaults, rules)
  local class = { __name = name, defaults = defaults, rules = rules or {}, __tostring = self.__tostring }
  class.__index = class
  return setmetatable(class, { __index = self, __call = construct, __name = "class" })
end

function Optimizer:__tostring()
  local lines = {}
  for i, group in ipairs(self.param_groups) do
    local names = {}
    for name in pairs(group) do if name ~= "params" then names[#names + 1] = name end end
    table.sort(names)
    lines[#lines + 1] = ("  group %d: %d parameters"):format(i, #group.params)
    for _, name in ipairs(names) do
      local v = group[name]
      lines[#lines + 1] = ("    %s: %s"):format(name, type(v) == "table" and "{" .. table.concat(v, ", ") .. "}" or tostring(v))
    end
  end
  return self.__name .. "(\n" .. table.concat(lines, "\n") .. "\n)"
end

-- the step ------------------------------------------------------------------------------------------------------------

local function state_dtype(p)
  local dtype = p.dtype
  return (dtype == "float16" or dtype == "bfloat16") and "float32" or dtype
end

---A tensor for a parameter's state: its shape and device, float32 if it is half precision; lives as long as the state.
function Optimizer.state_like(p, make)
  return parameter.keep((make or Tensor.zeros)(p:size(), { dtype = state_dtype(p), device = p.device }))
end

---A class says: op, the number of its operator; slots(group), the names of the states that the operator's list holds;
---key(state, group, p), which makes missing states and returns a number: parameters with one key go into one call;
---arguments(a, group, key), which stores the operator's numbers; after(state, key), when the call has succeeded.
function Optimizer.after() end

local ready, states, keys = {}, {}, {} -- [1..count] parameters of the group in hand that have a gradient; reused
local count = 0

local function gather(self, group)
  local params, all = group.params, self.state
  count = 0
  for i = 1, #params do
    local p = params[i]
    if C.tm_tensor_grad(ptr(p)) ~= nil then
      local state = all[p]
      if not state then
        state = {}
        all[p] = state
      end
      count = count + 1
      ready[count], states[count], keys[count] = p, state, self.key(state, group, p)
    end
  end
end

---Handle of a parameter's gradient. It is given back after the call: a Lua tensor would hold the memory of a gradient
---that zero_grad drops until the next sweep.
local function grad_handle(p)
  local g = C.tm_tensor_grad(ptr(p))
  C.tm_tensor_retain(g)
  local h = C.tm_handles_put(H, g)
  if h == 0 then B.raise() end
  return h
end

---One call for the n gathered parameters with this key. From the first handle of a gradient on, nothing may sweep.
local function update(self, group, key, n)
  local slots = self.slots(group)
  local list, at = B.room(n * (2 + #slots)), 0
  for i = 1, count do
    if keys[i] == key then
      list[at], list[n + at] = ready[i]._h, grad_handle(ready[i])
      at = at + 1
    end
  end
  for k = 1, #slots do
    local name = slots[k]
    at = n * (k + 1)
    for i = 1, count do
      if keys[i] == key then
        list[at] = states[i][name]._h
        at = at + 1
      end
    end
  end
  F.nlist, F.inplace = n * (2 + #slots), 1
  self.arguments(F.a, group, key)
  local rc, reg = C.tm_dispatch(self.op, F), B.reg
  for i = n, 2 * n - 1 do -- but for gradients that the program holds
    if reg[list[i] % 4294967296] == nil then C.tm_handles_release(H, list[i]) end
  end
  if rc ~= 0 and rc ~= 100 then B.raise() end
  return rc
end

---Smallest key above `last` among the gathered, and how many parameters have it.
local function next_key(last)
  local key, n = math.huge, 0
  for i = 1, count do
    local k = keys[i]
    if k == key then n = n + 1
    elseif k > last and k < key then key, n = k, 1 end
  end
  return key, n
end

---The calls for one group: one, unless parameters are at different steps. A class without an operator overrides it.
function Optimizer:step_group(group)
  gather(self, group)
  local rc = 0
  local key, n = next_key(-1)
  while n > 0 do
    rc = rc + update(self, group, key, n)
    for i = 1, count do
      if keys[i] == key then self.after(states[i], key) end
    end
    key, n = next_key(key)
  end
  for i = 1, count do ready[i], states[i] = nil, nil end
  if rc ~= 0 then B.collect() end
end

---Updates every parameter that has a gradient.
---@param closure? fun(): Tensor computes the loss and its gradients anew
---@return Tensor? loss what closure returned
function Optimizer:step(closure)
  local loss
  if closure then loss = autograd.enable_grad(closure) end
  local groups = self.param_groups
  for i = 1, #groups do self:step_group(groups[i]) end
  return loss
end

---Drops the gradients of all parameters, or with set_to_none = false fills them with 0.
---@param opts? boolean | {set_to_none?: boolean}
function Optimizer:zero_grad(opts)
  local none = parameter.set_to_none(opts)
  local groups = self.param_groups
  for i = 1, #groups do parameter.zero_grad(groups[i].params, none) end
end

-- conversions of the model ----------------------------------------------------------------------------------------------
-- Parameters that stay the same objects (docs/conversion.md) go on being trained. Their states stay where they were.

local TO_PARAMS = { dtype = true }

---Moves every state to the device of its parameter. It keeps its dtype, but for {dtype = true}, which makes it what a
---new state of the parameter would have. A state on meta holds nothing and is dropped; the next step makes it anew.
---@param opts? {dtype?: boolean}
function Optimizer:to_params(opts)
  opts = options(opts, "to_params", TO_PARAMS)
  local moves, lost = {}, {}
  for p, state in pairs(self.state) do
    for name, v in pairs(state) do
      if B.is_tensor(v) and v.device == "meta" and p.device ~= "meta" then lost[p] = true
      elseif B.is_tensor(v) then
        local new = autograd.no_grad(v.to, v, { dtype = opts.dtype and state_dtype(p) or nil, device = p.device })
        moves[#moves + 1] = { state = state, name = name, old = v, new = new }
      end
    end
  end
  for _, move in ipairs(moves) do
    local old, new = move.old, move.new
    if (old.device == "meta") == (new.device == "meta") then old.data = new -- the same object, as far as can be
    else move.state[move.name] = parameter.keep(new) end
  end
  for p in pairs(lost) do self.state[p] = nil end
  return self
end

---Trains other parameters in the place of some, which a conversion with the overwrite flag or a load with assign has
---replaced; the states go over to them.
---@param replacement table<Tensor, Tensor> old parameter -> new one, the second result of model:to(...)
function Optimizer:rebind(replacement)
  local what = self.__name .. ": rebind"
  if type(replacement) ~= "table" or getmetatable(replacement) ~= nil then
    B.fail("TypeError", "%s: expected a table from old parameters to new ones, got %s", what, B.type_name(replacement))
  end
  local seen = {}
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do
      local new = replacement[p]
      if new == nil then new = p end
      if not B.is_tensor(new) then B.fail("TypeError", "%s: expected a tensor for a parameter, got %s", what, B.type_name(new)) end
      if not new.is_leaf then B.fail("ValueError", "%s: a new parameter is no leaf (%s made it)", what, new.grad_fn) end
      if seen[new] then B.fail("ValueError", "%s: a parameter would appear twice", what) end
      seen[new] = true
    end
  end
  local moved = {}
  for p, state in pairs(self.state) do moved[replacement[p] or p] = state end
  self.state = moved
  for _, group in ipairs(self.param_groups) do
    for i, p in ipairs(group.params) do group.params[i] = replacement[p] or p end
  end
  return self
end

-- state dictionaries --------------------------------------------------------------------------------------------------

local function copy_options(group)
  local copy = {}
  for k, v in pairs(group) do
    if k ~= "params" then copy[k] = type(v) == "table" and not B.is_tensor(v) and { unpack(v) } or v end
  end
  return copy
end

---{state = {[id] = {...}}, param_groups = {{params = {id, ...}, lr = ...}}}: PyTorch's structure, with its numbers: the
---first parameter is 0. The tensors are the optimizer's own.
function Optimizer:state_dict()
  local ids, id, groups, all = {}, 0, {}, {}
  for i, group in ipairs(self.param_groups) do
    groups[i] = copy_options(group)
    groups[i].params = {}
    for k, p in ipairs(group.params) do
      ids[p] = id
      groups[i].params[k] = id
      id = id + 1
    end
  end
  for p, state in pairs(self.state) do
    local copy = {}
    for k, v in pairs(state) do copy[k] = v end
    if ids[p] and next(copy) then all[ids[p]] = copy end
  end
  return { state = all, param_groups = groups }
end

local function check_structure(self, sd)
  local what = self.__name .. ": load_state_dict"
  if type(sd) ~= "table" or type(sd.state) ~= "table" or type(sd.param_groups) ~= "table" then
    B.fail("TypeError", "%s: expected {state = ..., param_groups = ...}, got %s", what, B.type_name(sd))
  end
  if #sd.param_groups ~= #self.param_groups then
    B.fail("ValueError", "%s: %d groups, the optimizer has %d", what, #sd.param_groups, #self.param_groups)
  end
  for i, group in ipairs(sd.param_groups) do
    local have, want = type(group.params) == "table" and #group.params or 0, #self.param_groups[i].params
    if have ~= want then B.fail("ValueError", "%s: group %d has %d parameters, the optimizer's has %d", what, i, have, want) end
  end
end

---One value of a parameter's state: tensors are copied, in the dtype and on the device of states; the step is a number,
---which PyTorch keeps as a tensor.
local function load_value(name, p, v)
  if not B.is_tensor(v) then return v end
  if name == "step" then return v:item() end
  local state = Optimizer.state_like(p, Tensor.empty)
  return autograd.no_grad(ops.copy_, state, v)
end

---Takes over the options and states of a state dictionary; the tensors are copied.
function Optimizer:load_state_dict(sd)
  check_structure(self, sd)
  local loaded = {}
  for i, group in ipairs(sd.param_groups) do
    for k, id in ipairs(group.params) do
      local p, state = self.param_groups[i].params[k], sd.state[id]
      if state then
        local own = {}
        for name, v in pairs(state) do own[name] = load_value(name, p, v) end
        loaded[p] = own
      end
    end
  end
  for i, group in ipairs(sd.param_groups) do
    local own = self.param_groups[i]
    for k, v in pairs(copy_options(group)) do own[k] = v end
  end
  self.state = loaded
end

return Optimizer
