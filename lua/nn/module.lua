---module.lua: nn.Module: a tree of parameters, buffers and child modules, registered by assignment.
---
---An instance is a table with one private key, its state. Reads and writes of anything else reach __index and
---__newindex, so no assignment can go unseen. A read looks at ordinary attributes, then at the class, then at
---parameters, buffers and modules.
---
---Order of registration is order everywhere else. Lua assigns `self.a, self.b = x, y` from right to left: use a line each.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local errors = require "tmod.errors"
local hooks = require "tmod.nn.hooks"
local parameter = require "tmod.nn.parameter"
local options = require "tmod.functional".options

local None, is_parameter, keep, flag = parameter.None, parameter.is_parameter, parameter.keep, parameter.flag
local is_tensor, type_name, fail = B.is_tensor, B.type_name, B.fail
local get, registering, global = OrderedDict.get, hooks.registering, hooks.global
local type, rawget, setmetatable = type, rawget, setmetatable

local STATE = "\0state"

---@class nn.Module
---@field training boolean
---@overload fun(...): any
local Module = { __name = "nn.Module", _version = 1, training = true }

local instance_metatable = setmetatable({}, { __mode = "k" }) -- class -> metatable of its instances

local function is_module(m) return type(m) == "table" and rawget(m, STATE) ~= nil end

local function state_of(self)
  local s = type(self) == "table" and rawget(self, STATE)
  if s then return s end
  if instance_metatable[self] then fail("TypeError", "%s is no module but a class: call it to make one", self.__name) end
  local mt = getmetatable(self)
  if type(mt) == "table" and mt.class then fail("AttributeError", "%s: made without its constructor; call the class", mt.__name) end
  return fail("TypeError", "expected a module, got %s; its methods are called with ':', as in m:train()", type_name(self))
end

---Class name without the package.
local function short_name(self) return state_of(self).class.__name:match "[^.]+$" end

local function warn(message, ...)
  io.stderr:write("tmod: warning: ", errors.where(), ": ", message:format(...), "\n")
end

-- registration ------------------------------------------------------------------------------------------------------

local function has_slot(s, name)
  return get(s.parameters, name) ~= nil or get(s.buffers, name) ~= nil or get(s.modules, name) ~= nil
end

local function exists(s, name) return s.attributes[name] ~= nil or s.class[name] ~= nil or has_slot(s, name) end

local function check_string(s, what, name)
  if type(name) ~= "string" then
    fail("TypeError", "%s: the name of a %s must be a string, got %s", s.class.__name, what, type_name(name))
  end
end

local function check_spelling(s, what, name)
  if name:find(".", 1, true) then fail("KeyError", "%s: the name of a %s must have no dot, got %q", s.class.__name, what, name) end
  if name == "" then fail("KeyError", "%s: the name of a %s must not be empty", s.class.__name, what) end
end

---The name may belong to `registry` already, but to nothing else.
local function check_free(s, what, name, registry)
  if get(registry, name) == nil and exists(s, name) then
    fail("KeyError", "%s: %q is taken: it cannot name a %s", s.class.__name, name, what)
  end
end

local function check_class(s, what, name)
  if s.class[name] ~= nil then
    fail("KeyError", "%s: %q is a method or field of the class: it cannot name a %s", s.class.__name, name, what)
  end
end

local function check_leaf(s, name, p)
  if p ~= nil and not p.is_leaf then
    fail("ValueError", "%s: parameter %q is no leaf (%s made it); compute derived tensors in forward", s.class.__name, name, p.grad_fn)
  end
end

-- The only places where slots change.

local function remove(s, name)
  s.attributes[name] = nil
  s.parameters[name], s.buffers[name], s.modules[name], s.non_persistent[name] = nil, nil, nil, nil
end

local function put(s, registry, name, value)
  if value == nil then value = None elseif is_tensor(value) then keep(value) end
  if get(registry, name) == nil then remove(s, name) end
  registry[name] = value
end

local function put_parameter(self, s, name, value)
  if value ~= nil then value = registering("parameter", self, name, value, is_parameter, "an nn.Parameter") end
  put(s, s.parameters, name, value)
end

local function put_buffer(self, s, name, value, persistent)
  put(s, s.buffers, name, registering("buffer", self, name, value, is_tensor, "a tensor"))
  s.non_persistent[name] = not persistent or nil
end

local function put_module(self, s, name, value)
  put(s, s.modules, name, registering("module", self, name, value, is_module, "an nn.Module"))
end

---@param name string
---@param param? Tensor a Parameter, or nil for a slot without one
function Module:register_parameter(name, param)
  local s = state_of(self)
  check_string(s, "parameter", name)
  check_spelling(s, "parameter", name)
  check_free(s, "parameter", name, s.parameters)
  if param ~= nil and not is_parameter(param) then
    fail("TypeError", "%s: parameter %q must be an nn.Parameter or nil, got %s", s.class.__name, name, type_name(param))
  end
  check_leaf(s, name, param)
  put_parameter(self, s, name, param)
end

---@param name string
---@param tensor? Tensor
---@param opts? boolean | {persistent?: boolean} persistent (default true): saved in state_dict
function Module:register_buffer(name, tensor, opts)
  local s = state_of(self)
  local persistent = flag("register_buffer", "persistent", opts)
  check_string(s, "buffer", name)
  check_spelling(s, "buffer", name)
  check_free(s, "buffer", name, s.buffers)
  if tensor ~= nil and not is_tensor(tensor) then
    fail("TypeError", "%s: buffer %q must be a tensor or nil, got %s", s.class.__name, name, type_name(tensor))
  end
  put_buffer(self, s, name, tensor, persistent)
end

---@param name string
---@param module? nn.Module
function Module:register_module(name, module)
  local s = state_of(self)
  if module ~= nil and not is_module(module) then
    fail("TypeError", "%s: child %s is not a Module but a %s", s.class.__name, tostring(name), type_name(module))
  end
  check_string(s, "module", name)
  check_free(s, "module", name, s.modules)
  check_spelling(s, "module", name)
  put_module(self, s, name, module)
end
Module.add_module = Module.register_module

-- attributes --------------------------------------------------------------------------------------------------------

local warned = {}

---A list or map of modules is no child: nothing in it is trained, saved or converted.
local function check_plain(s, name, value)
  if getmetatable(value) ~= nil then return end
  for _, v in pairs(value) do
    if is_module(v) or is_parameter(v) then
      local key = s.class.__name .. "." .. name
      if warned[key] then return end
      warned[key] = true
      return warn("%s is a plain table with a %s in it, which is thus not registered; use nn.ModuleList or nn.ParameterList",
        key, is_module(v) and "module" or "parameter")
    end
  end
end

local function refuse(s, name, value, slot, expected)
  fail("TypeError", "%s: cannot assign a %s to %s %q (%s or nil expected)", s.class.__name,
    is_module(value) and "module" or type_name(value), slot, name, expected)
end

local function assign_parameter(self, s, name, value)
  check_spelling(s, "parameter", name)
  check_class(s, "parameter", name)
  check_leaf(s, name, value)
  put_parameter(self, s, name, value)
end

local function assign_module(self, s, name, value)
  if get(s.parameters, name) ~= nil then refuse(s, name, value, "parameter", "an nn.Parameter") end
  check_class(s, "module", name)
  check_spelling(s, "module", name)
  put_module(self, s, name, value)
end

local function assign_buffer(self, s, name, value)
  if get(s.parameters, name) ~= nil then refuse(s, name, value, "parameter", "an nn.Parameter") end
  if get(s.modules, name) ~= nil then refuse(s, name, value, "module", "an nn.Module") end
  check_spelling(s, "buffer", name)
  check_free(s, "buffer", name, s.buffers)
  put_buffer(self, s, name, value, rawget(value, "_persistent"))
end

local function assign(self, name, value)
  local s = state_of(self)
  if type(name) ~= "string" then return self:_set_at(name, value) end
  if type(value) == "table" then
    if rawget(value, "_parameter") then return assign_parameter(self, s, name, value) end
    if rawget(value, "_buffer") then return assign_buffer(self, s, name, value) end
    if rawget(value, STATE) then return assign_module(self, s, name, value) end
  end
  if get(s.parameters, name) ~= nil then
    if value ~= nil then refuse(s, name, value, "parameter", "an nn.Parameter") end
    s.parameters[name] = None
  elseif get(s.buffers, name) ~= nil then
    if value ~= nil and not is_tensor(value) then refuse(s, name, value, "buffer", "a tensor, an nn.Buffer") end
    put_buffer(self, s, name, value, not s.non_persistent[name])
  elseif get(s.modules, name) ~= nil then
    if value ~= nil then refuse(s, name, value, "module", "an nn.Module") end
    put_module(self, s, name, nil)
  else
    if type(value) == "table" then check_plain(s, name, value) end
    s.attributes[name] = value
  end
end

---Registries as ported code reads them; writing through them skips every check.
local REGISTRY = { _parameters = "parameters", _buffers = "buffers", _modules = "modules",
  _non_persistent_buffers_set = "non_persistent" }

---The __index of a class's instances. Every read of a forward method passes here, so it must compile.
local function reader(class)
  return function(self, name)
    local s = rawget(self, STATE)
    if not s then state_of(self) end
    local v = s.attributes[name]
    if v ~= nil then return v end
    v = class[name]
    if v ~= nil then return v end
    v = get(s.parameters, name)
    if v == nil then v = get(s.buffers, name) end
    if v == nil then v = get(s.modules, name) end
    if v ~= nil then
      if v == None then return nil end
      return v
    end
    if type(name) ~= "string" then return self:_at(name) end
    return s[REGISTRY[name]]
  end
end

---Positional access: containers have it.
function Module:_at(position)
  fail("TypeError", "%s: cannot be indexed with a %s: %s", state_of(self).class.__name, type_name(position), tostring(position))
end
Module._set_at = Module._at

---Does the name exist: as an attribute, in the class, or as a slot, even one without a value?
function Module:hasattr(name) return exists(state_of(self), name) end

---As self[name], but an absent name is an error.
function Module:getattr(name)
  local s = state_of(self)
  if not exists(s, name) then fail("AttributeError", "%s has no attribute %q", s.class.__name, tostring(name)) end
  return self[name]
end

---Removes a slot or an attribute. (Assigning nil keeps the slot, without a value.)
function Module:delattr(name)
  local s = state_of(self)
  if s.attributes[name] == nil and not has_slot(s, name) then
    fail("AttributeError", "%s has no attribute %q", s.class.__name, tostring(name))
  end
  remove(s, name)
end

-- classes and instances ---------------------------------------------------------------------------------------------

local function construct(class, ...)
  local s = { class = class, attributes = {}, parameters = OrderedDict.new(), buffers = OrderedDict.new(),
    modules = OrderedDict.new(), non_persistent = {}, hooks = hooks.new() }
  local self = setmetatable({ [STATE] = s }, instance_metatable[class])
  local result = self:init(...)
  if result ~= nil then fail("TypeError", "%s: init must return nothing, got %s", class.__name, type_name(result)) end
  return self
end

---All results and their number.
local function counted(...)
  local n = select("#", ...)
  if n <= 3 then return n, ... end
  return n, { ... }
end

-- Calling an instance. While forward runs, this frame tells an error in which module it is. It returns without a tail
-- call, of which a trace may have 15; and each class has a prototype of its own, of which a trace may nest two: so models
-- compile as a whole.
local CALL = [[
local STATE, state_of, hooks_call, global, counted, rawget, unpack = ...
return function(self, ...)
  local s = rawget(self, STATE) or state_of(self)
  if s.hooks.any or global.any then return hooks_call(self, ...) end
  local n, a, b, c = counted((s.attributes.forward or s.class.forward)(self, ...))
  if n == 1 then return a end
  if n == 0 then return end
  if n == 2 then return a, b end
  if n == 3 then return a, b, c end
  return unpack(a, 1, n)
end]]

local function make_call(class)
  local call = loadstring(CALL, "=[tmod call of " .. class.__name .. "]")(STATE, state_of, hooks.call, global, counted, rawget, unpack)
  hooks.entrance(call)
  return call
end

local function class_text(class) return "class " .. class.__name end

local function set_up(class, parent)
  local mt = {}
  for event, f in pairs(instance_metatable[parent] or {}) do mt[event] = f end
  mt.class, mt.__name = class, class.__name
  mt.__index, mt.__newindex, mt.__call = reader(class), assign, make_call(class)
  instance_metatable[class] = mt
  return setmetatable(class, { __index = parent, __call = construct, __name = class_text(class), __tostring = class_text })
end

set_up(Module)
local base = instance_metatable[Module]
function base.__tostring(self) return self:_format() end

---A class that inherits from this one; Class(...) makes an instance and runs Class.init(self, ...).
---@param name string
function Module:extend(name)
  if not instance_metatable[self] then
    fail("TypeError", "extend: expected a class, as in nn.Module:extend \"Net\", got %s", type_name(self))
  end
  if type(name) ~= "string" then
    fail("TypeError", "extend: a class needs a name, as in nn.Module:extend \"Net\", got %s", type_name(name))
  end
  if not name:find "[^.]$" then fail("ValueError", "extend: %q is no name of a class", name) end
  return set_up({ __name = name }, self)
end

---Metatable of a class's instances, to give them operators.
function Module._metatable(class) return instance_metatable[class] end

---The class that made an instance.
function Module._class(self) return state_of(self).class end

---Is it an instance of this class, or of one that inherits from it?
function Module:isinstance(class)
  local c = state_of(self).class
  while c and c ~= class do c = getmetatable(c).__index end
  return c ~= nil
end

function Module:init() end

function Module:forward()
  fail("NotImplementedError", "%s has no forward", state_of(self).class.__name)
end

-- walks -------------------------------------------------------------------------------------------------------------

-- A walk's list is made when it starts, so the loop may change the tree.
local function iterate(a, b)
  local i = 0
  if not b then
    return function()
      i = i + 1
      return a[i]
    end
  end
  return function()
    i = i + 1
    return a[i], b[i]
  end
end

local function join(prefix, name) return prefix == "" and name or prefix .. "." .. name end

---An option that is true or false.
local function flag_of(opts, what, name, default)
  local value = opts[name]
  if value == nil then return default end
  if type(value) ~= "boolean" then fail("TypeError", "%s: %s must be a boolean, got %s", what, name, type_name(value)) end
  return value
end

local function prefix_of(opts, what)
  local prefix = opts.prefix or ""
  if type(prefix) ~= "string" then fail("TypeError", "%s: prefix must be a string, got %s", what, type_name(prefix)) end
  return prefix
end

local function add_modules(module, prefix, seen, names, list)
  if seen then
    if seen[module] then return end
    seen[module] = true
  end
  names[#names + 1], list[#list + 1] = prefix, module
  for name, child in OrderedDict.pairs(state_of(module).modules) do
    if child ~= None then add_modules(child, join(prefix, name), seen, names, list) end
  end
end

local WALK = { prefix = true, recurse = true, remove_duplicate = true }
local WALK_MODULES = { prefix = true, remove_duplicate = true, memo = true }
local MODULES = { remove_duplicate = true }

---(path, module) for this module and all below it, each once: parents first.
---@param opts? {prefix?: string, remove_duplicate?: boolean, memo?: table}
function Module:named_modules(opts)
  state_of(self)
  opts = options(opts, "named_modules", WALK_MODULES)
  local names, list = {}, {}
  local unique = flag_of(opts, "named_modules", "remove_duplicate", true)
  add_modules(self, prefix_of(opts, "named_modules"), unique and (opts.memo or {}), names, list)
  return iterate(names, list)
end

---@param opts? {remove_duplicate?: boolean}
function Module:modules(opts)
  state_of(self)
  opts = options(opts, "modules", MODULES)
  local list = {}
  add_modules(self, "", flag_of(opts, "modules", "remove_duplicate", true) and {}, {}, list)
  return iterate(list)
end

local function child_lists(self)
  local names, list, seen = {}, {}, {}
  for name, child in OrderedDict.pairs(state_of(self).modules) do
    if child ~= None and not seen[child] then
      seen[child] = true
      names[#names + 1], list[#list + 1] = name, child
    end
  end
  return names, list
end

---(name, module) for the direct children, each once.
function Module:named_children() return iterate(child_lists(self)) end
function Module:children() return iterate((select(2, child_lists(self)))) end

local function members(self, registry, what, opts)
  state_of(self)
  if type(opts) == "boolean" then opts = { recurse = opts } end
  opts = options(opts, what, WALK)
  local prefix, unique = prefix_of(opts, what), flag_of(opts, what, "remove_duplicate", true)
  local names, list, seen, paths, owners = {}, {}, {}, {}, {}
  if flag_of(opts, what, "recurse", true) then add_modules(self, prefix, unique and {}, paths, owners)
  else paths[1], owners[1] = prefix, self end
  for i = 1, #owners do
    for name, t in OrderedDict.pairs(state_of(owners[i])[registry]) do
      if t ~= None and not (unique and seen[t]) then
        seen[t] = true
        names[#names + 1], list[#list + 1] = join(paths[i], name), t
      end
    end
  end
  return names, list
end

---(path, parameter) of this module and all below it, each parameter once: own ones first.
---@param opts? boolean | {prefix?: string, recurse?: boolean, remove_duplicate?: boolean} a boolean is recurse
function Module:named_parameters(opts) return iterate(members(self, "parameters", "named_parameters", opts)) end
function Module:named_buffers(opts) return iterate(members(self, "buffers", "named_buffers", opts)) end

local RECURSE = { recurse = true }

local function list_of(self, registry, opts)
  state_of(self)
  if type(opts) ~= "boolean" then options(opts, registry, RECURSE) end
  return (select(2, members(self, registry, registry, opts)))
end

---@param opts? boolean | {recurse?: boolean}
function Module:parameters(opts) return iterate(list_of(self, "parameters", opts)) end
function Module:buffers(opts) return iterate(list_of(self, "buffers", opts)) end

-- access by path ------------------------------------------------------------------------------------------------------

local function check_target(what, target)
  if type(target) ~= "string" then fail("TypeError", "%s: a path is a string such as \"encoder.0\", got %s", what, type_name(target)) end
end

local function split_last(what, target)
  check_target(what, target)
  local path, name = target:match "^(.*)%.(.*)$"
  if not path then return "", target end
  return path, name
end

---The module at a path such as "encoder.0"; "" is this one.
function Module:get_submodule(target)
  state_of(self)
  check_target("get_submodule", target)
  local m = self
  if target == "" then return m end
  for name in (target .. "."):gmatch "(.-)%." do
    local class = state_of(m).class.__name
    if not m:hasattr(name) then fail("AttributeError", "%s has no attribute %q", class, name) end
    m = m[name]
    if not is_module(m) then fail("AttributeError", "%q of %s is no module", name, class) end
  end
  return m
end

---@return Tensor
function Module:get_parameter(target)
  state_of(self)
  local path, name = split_last("get_parameter", target)
  local m = self:get_submodule(path)
  local p = m:getattr(name)
  if not is_parameter(p) then fail("AttributeError", "%q of %s is no nn.Parameter", name, state_of(m).class.__name) end
  return p
end

---@return Tensor? nothing for a slot without a value
function Module:get_buffer(target)
  state_of(self)
  local path, name = split_last("get_buffer", target)
  local m = self:get_submodule(path)
  m:getattr(name)
  local b = get(state_of(m).buffers, name)
  if b == nil then fail("AttributeError", "%q of %s is no buffer", name, state_of(m).class.__name) end
  if b ~= None then return b end
end

local STRICT = { strict = true }

---Puts a module at a path, in place of the one there or, unless strict, as a new child.
---@param target string
---@param module nn.Module
---@param opts? boolean | {strict?: boolean} default: false
function Module:set_submodule(target, module, opts)
  state_of(self)
  local strict = opts
  if type(opts) ~= "boolean" then strict = flag_of(options(opts, "set_submodule", STRICT), "set_submodule", "strict", false) end
  local path, name = split_last("set_submodule", target)
  if target == "" then fail("ValueError", "set_submodule: the path of a child is missing") end
  if not is_module(module) then fail("ValueError", "set_submodule: %q must be an nn.Module, got %s", target, type_name(module)) end
  local parent = self:get_submodule(path)
  local class, present = state_of(parent).class.__name, parent:hasattr(name)
  if strict and not present then fail("AttributeError", "%s has no attribute %q", class, name) end
  if present and not is_module(parent[name]) then fail("AttributeError", "%q of %s is no module", name, class) end
  parent[name] = module
end

-- the whole tree --------------------------------------------------------------------------------------------------------

---Runs fn on every module, children first.
---@param fn fun(m: nn.Module)
function Module:apply(fn)
  state_of(self)
  if fn == nil then fail("TypeError", "apply: expected a function, got nil") end
  for child in self:children() do child:apply(fn) end
  fn(self)
  return self
end

---Puts the tree into training mode (mode true or absent) or evaluation mode.
---@param mode? boolean
function Module:train(mode)
  state_of(self)
  if mode == nil then mode = true end
  if type(mode) ~= "boolean" then fail("ValueError", "train: mode must be a boolean, got %s", type_name(mode)) end
  self.training = mode
  for child in self:children() do child:train(mode) end
  return self
end

function Module:eval()
  state_of(self)
  return self:train(false)
end

---Sets requires_grad of all parameters.
---@param on? boolean | {requires_grad?: boolean} default: true
function Module:requires_grad_(on)
  local list = list_of(self, "parameters")
  on = flag("requires_grad_", "requires_grad", on)
  for i = 1, #list do list[i]:requires_grad_(on) end
  return self
end

---Drops the gradients of all parameters, or with set_to_none = false fills them with 0.
---@param opts? boolean | {set_to_none?: boolean}
function Module:zero_grad(opts)
  parameter.zero_grad(list_of(self, "parameters"), parameter.set_to_none(opts))
end

-- text ------------------------------------------------------------------------------------------------------------------

---What stands between the brackets of the print: options, in one line or several.
function Module:extra_repr() return "" end

---Further lines two columns in; blank ones stay empty.
local function indent(text)
  return (text:gsub("\n([^\n]*)", function(line) return line:find "%S" and "\n  " .. line or "\n" end))
end

---The print from what extra_repr says and a line for each child.
function Module:_join(extra, children)
  local lines = {}
  for line in (extra == "" and "" or extra .. "\n"):gmatch "(.-)\n" do lines[#lines + 1] = line end
  local name, nextra = short_name(self), #lines
  for i = 1, #children do lines[#lines + 1] = indent(children[i]) end
  if #lines == 0 then return name .. "()" end
  if nextra == 1 and #lines == 1 then return name .. "(" .. lines[1] .. ")" end
  return name .. "(\n  " .. table.concat(lines, "\n  ") .. "\n)"
end

function Module:_format()
  local children = {}
  for name, child in OrderedDict.pairs(state_of(self).modules) do
    children[#children + 1] = "(" .. name .. "): " .. (child == None and "nil" or tostring(child))
  end
  return self:_join(self:extra_repr(), children)
end

---The modules below as a tree of lines, with the number of each one's own parameters.
function Module:tree() return require "tmod.nn.utils".tree(self) end

---Names of the child slots in order and the dictionary itself, for containers. Both are live and not to be changed.
function Module._child_names(self)
  local d = rawget(self, STATE).modules
  return OrderedDict.live_keys(d), d
end

-- state dictionaries and conversions ------------------------------------------------------------------------------------

Module._is_module, Module._short_name, Module._warn = is_module, short_name, warn

for name, method in pairs(hooks.methods) do Module[name] = method end
for _, part in ipairs { "tmod.nn.state_dict", "tmod.nn.convert", "tmod.nn.to" } do
  for name, method in pairs(require(part)) do Module[name] = method end
end

return Module
