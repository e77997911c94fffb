---hooks.lua: what runs around a module's forward and backward, and when something is registered.
---
---An owner of hooks (a module's state.hooks, or `global`) has a list of records {id, fn, options} for each kind. A list
---is never changed but replaced, so whoever holds one has a snapshot: hooks may change the lists while they run.

local B = require "tmod.ffi"
local Handle = require "tmod.handle"
local Tensor = require "tmod.tensor"
local autograd = require "tmod.autograd"
local options = require "tmod.functional".options
local tuple = require "tmod.nn.args"

local args, kw, is_args, is_kw, copy = tuple.args, tuple.kw, tuple.is_args, tuple.is_kw, tuple.copy
local is_tensor, type_name, fail = B.is_tensor, B.type_name, B.fail

local STATE = "\0state"

local hooks = {}

-- lists -------------------------------------------------------------------------------------------------------------

local NONE = {}

---Hooks of nobody yet. `any`: is there one that a call must look for?
function hooks.new()
  return { any = false, forward_pre = NONE, forward = NONE, backward_pre = NONE, backward = NONE }
end

local global = hooks.new()
global.parameter_registration, global.buffer_registration, global.module_registration = NONE, NONE, NONE
hooks.global = global

local function replace_list(owner, kind, list)
  owner[kind] = list
  owner.any = #owner.forward_pre + #owner.forward + #owner.backward_pre + #owner.backward > 0
end

local removers = setmetatable({}, { __index = function(t, kind)
  local function remove(owner, id)
    local list = {}
    for _, record in ipairs(owner[kind]) do
      if record.id ~= id then list[#list + 1] = record end
    end
    replace_list(owner, kind, list)
  end
  t[kind] = remove
  return remove
end })

local function add(owner, kind, what, fn, opts, known)
  B.need_function(what, fn)
  opts = options(opts, what, known)
  local record = { id = Handle.next_id(), fn = fn, with_kwargs = opts.with_kwargs, always_call = opts.always_call }
  local list = {}
  for i, old in ipairs(owner[kind]) do list[i] = old end
  table.insert(list, opts.prepend and 1 or #list + 1, record)
  replace_list(owner, kind, list)
  return Handle.new(owner, record.id, removers[kind])
end

---Two lists as one, which may be one of them.
local function joined(first, second)
  if #first == 0 then return second end
  if #second == 0 then return first end
  local list = {}
  for i, record in ipairs(first) do list[i] = record end
  for _, record in ipairs(second) do list[#list + 1] = record end
  return list
end

-- what hooks return ---------------------------------------------------------------------------------------------------

---Results as a tuple; nil for none, which means that nothing changes.
local function replacement(results)
  if results.n == 0 or results.n == 1 and results[1] == nil then return nil end
  if results.n == 1 and is_args(results[1]) then return copy(results[1]) end
  return results
end

---Forward's results as hooks see them.
local function output_value(output)
  if output == nil then return nil end
  if output.n == 1 then return output[1] end
  return copy(output)
end

local function texts(results)
  local list = {}
  for i = 1, results.n do list[i] = type_name(results[i]) end
  return #list > 0 and table.concat(list, ", ") or "nothing"
end

local function short_name(module) return module._short_name(module) end

-- backward hooks ------------------------------------------------------------------------------------------------------
-- A module's inputs pass through one node of the graph and its results through another. When gradients reach the
-- results' node, grad_output is known and the pre-hooks run; at the inputs' node grad_input is known and the hooks run.

local function like(t) return { size = t:size(), dtype = t.dtype, device = t.device } end

local function say(t) return t.dtype .. " (" .. table.concat(t.size, ", ") .. (#t.size == 1 and ",)" or ")") end

local function fits(t, expected)
  if #t.size ~= #expected.size or t.dtype ~= expected.dtype or t.device ~= expected.device then return false end
  for i = 1, #t.size do
    if t.size[i] ~= expected.size[i] then return false end
  end
  return true
end

---Gradients that a hook returned for `old`, as a tuple. `places`: like what each must be, by position.
local function gradients(pass, what, results, old, places)
  local list, n = results, results.n
  if n == 0 or n == 1 and results[1] == nil then return old end
  if n == 1 and type(results[1]) == "table" and not is_tensor(results[1]) then
    list = results[1]
    n = list.n or #list
  end
  local name = short_name(pass.module)
  if n ~= old.n then
    fail("RuntimeError", "backward hook of %s: returned %d gradients for %s, expected %d", name, n, what, old.n)
  end
  local new = args()
  new.n = n
  for i = 1, n do
    local g = list[i]
    if g ~= nil then
      if not is_tensor(g) then
        fail("TypeError", "backward hook of %s: %s %d must be a tensor or nil, got %s", name, what, i, type_name(g))
      end
      local place, seen = places[i], like(g)
      if place and not fits(seen, place) then
        fail("RuntimeError", "backward hook of %s: returned %s on %s for %s %d, expected %s on %s", name, say(seen), seen.device, what, i,
          say(place), place.device)
      end
      new[i] = g
    end
  end
  return new
end

---Those of a tuple that the node knows, in its order.
local function pick(tuple_, index)
  local list = {}
  for k, i in ipairs(index) do list[k] = tuple_[i] end
  return list
end

local Output = {}
Output.__index = Output

local warned = setmetatable({}, { __mode = "k" })

local function warn_once(module, message, ...)
  local seen = warned[module] or {}
  warned[module] = seen
  if seen[message] then return end
  seen[message] = true
  module._warn(message, ...)
end

---No input leads to an inputs' node: the hooks run here, before the module's own backward.
local function run_without_inputs(pass, grad_output)
  if #pass.after == 0 then return end
  warn_once(pass.module, "backward hook of %s: no input requires grad, so it gets no grad_input and runs before the module's own backward",
    short_name(pass.module))
  for _, hook in ipairs(pass.after) do
    local grad_input = args()
    grad_input.n = pass.ninputs
    local results = args(hook.fn(pass.module, grad_input, copy(grad_output)))
    local list = results.n == 1 and type(results[1]) == "table" and not is_tensor(results[1]) and results[1] or results
    for i = 1, list.n or table.maxn(list) do
      if list[i] ~= nil then
        fail("RuntimeError", "backward hook of %s: no input requires grad, so it must return nothing or only nil, got %s",
          short_name(pass.module), texts(results))
      end
    end
  end
end

function Output:run(grads)
  local pass = self.pass
  local grad_output = args()
  grad_output.n = pass.noutputs
  for k, i in ipairs(self.index) do grad_output[i] = grads[k] end
  for _, hook in ipairs(pass.before) do
    local results = args(hook.fn(pass.module, copy(grad_output)))
    grad_output = gradients(pass, "grad_output", results, grad_output, self.places)
  end
  if pass.has_input then pass.grad_output = grad_output else run_without_inputs(pass, grad_output) end
  return pick(grad_output, self.index)
end

local Input = {}
Input.__index = Input

---An input without a gradient gets zeros. Without grad_output the gradient came around the module's results, from
---something else that forward made, and is no business of the hooks.
function Input:run(grads)
  local pass = self.pass
  local grad_input = args()
  grad_input.n = pass.ninputs
  for k, i in ipairs(self.index) do
    local place = self.places[i]
    grad_input[i] = grads[k] or Tensor.zeros(place.size, { dtype = place.dtype, device = place.device })
  end
  local grad_output = pass.grad_output
  if grad_output then
    pass.grad_output = nil
    for _, hook in ipairs(pass.after) do
      local results = args(hook.fn(pass.module, copy(grad_input), copy(grad_output)))
      grad_input = gradients(pass, "grad_input", results, grad_input, self.places)
    end
  end
  return pick(grad_input, self.index)
end

---Passes the tensors among these values through one node, if there is a gradient to record: the values with new
---tensors, or the same tuple.
local function through_node(pass, values, class)
  local tensors, node, wanted = {}, setmetatable({ pass = pass, index = {}, places = {} }, class), false
  for i = 1, values.n do
    local t = values[i]
    if is_tensor(t) then
      tensors[#tensors + 1] = t
      node.index[#tensors], node.places[i] = i, like(t)
      wanted = wanted or t.requires_grad
    end
  end
  if not (wanted and autograd.is_grad_enabled()) then return values, false end
  local new = copy(values)
  local views = autograd.identity("the backward hooks of " .. short_name(pass.module), tensors, node)
  for k, i in ipairs(node.index) do new[i] = views[k] end
  return new, true
end

local function wrap_inputs(pass, values)
  pass.ninputs = values.n
  values, pass.has_input = through_node(pass, values, Input)
  return values
end

local function wrap_output(pass, output)
  local only = output.n == 1 and output[1]
  if is_args(only) then return args(wrap_output(pass, only)) end
  if output.n == 1 and not is_tensor(only) then
    warn_once(pass.module, "backward hooks of %s do not run: forward must return tensors, got a %s", short_name(pass.module),
      type_name(output[1]))
    return output
  end
  pass.noutputs = output.n
  return (through_node(pass, output, Output))
end

-- the call ------------------------------------------------------------------------------------------------------------

local function run_pre_hooks(call)
  for _, hook in ipairs(joined(global.forward_pre, call.hooks.forward_pre)) do
    if hook.with_kwargs then
      local results = args(hook.fn(call.module, copy(call.args), call.kw))
      local new, named = results[1], results[2]
      if results.n > 1 or new ~= nil then
        if results.n ~= 2 or not is_args(new) or type(named) ~= "table" or is_tensor(named) or is_args(named) then
          fail("RuntimeError",
            "forward pre-hook of %s: with_kwargs it must return nn.args(...) and a table of named arguments, or nothing; got %s",
            short_name(call.module), texts(results))
        end
        call.args, call.kw = copy(new), kw(named)
      end
    else
      call.args = replacement(args(hook.fn(call.module, copy(call.args)))) or call.args
    end
  end
end

local function forward(call)
  local values = call.args
  if call.has_kw or next(call.kw) ~= nil then
    values = copy(values)
    values.n = values.n + 1
    values[values.n] = call.kw
  end
  return args(call.module:forward(unpack(values, 1, values.n)))
end

local function run_forward_hook(call, hook)
  call.started[hook] = true
  local results
  if hook.with_kwargs then results = args(hook.fn(call.module, copy(call.args), call.kw, output_value(call.output)))
  else results = args(hook.fn(call.module, copy(call.args), output_value(call.output))) end
  call.output = replacement(results) or call.output
end

local function run(call)
  local before, after = joined(global.backward_pre, call.hooks.backward_pre), joined(global.backward, call.hooks.backward)
  run_pre_hooks(call)
  local pass = #before + #after > 0 and { module = call.module, before = before, after = after }
  if pass then call.args = wrap_inputs(pass, call.args) end
  call.output = forward(call)
  for _, hook in ipairs(joined(global.forward, call.hooks.forward)) do run_forward_hook(call, hook) end
  if pass then call.output = wrap_output(pass, call.output) end
end

---An error object remembers where it came from: after the hooks the stack is gone.
local function keep_traceback(e)
  if B.Error.is(e) and rawget(e, "traceback") == nil then e.traceback = debug.traceback("", 2) end
  return e
end

local function finish(call, ok, e)
  if ok then return unpack(call.output, 1, call.output.n) end
  for _, hook in ipairs(joined(global.forward, call.hooks.forward)) do
    if hook.always_call and not call.started[hook] then
      local fine, why = pcall(run_forward_hook, call, hook)
      if not fine then
        call.module._warn("forward hook of %s with always_call: an error was silenced because another one is raised: %s",
          short_name(call.module), tostring(why))
      end
    end
  end
  error(e, 0)
end

---Calls a module that has hooks, or where there are global ones.
function hooks.call(self, ...)
  local values = args(...)
  local call = { module = self, hooks = rawget(self, STATE).hooks, args = values, started = {} }
  for i = 1, values.n - 1 do
    if is_kw(values[i]) then
      fail("TypeError", "%s: nn.kw must be the last argument, not number %d of %d", short_name(self), i, values.n)
    end
  end
  call.has_kw = values.n > 0 and is_kw(values[values.n])
  call.kw = kw(call.has_kw and values[values.n] or {})
  if call.has_kw then values[values.n], values.n = nil, values.n - 1 end
  return finish(call, xpcall(run, keep_traceback, call))
end

-- where in the tree an error happened -----------------------------------------------------------------------------------

-- Functions whose first local is a module and whose variable arguments are those of its call. A call leaves its frame on
-- the stack while forward runs, so the nest of calls is read there, and only when an error is made.
local entrances = setmetatable({ [hooks.call] = true }, { __mode = "k" })
function hooks.entrance(fn) entrances[fn] = true end

local DEEPEST = 1000 -- frames: looking one up takes as long as it is deep

---Path from a module to one below it; nil if it is not there.
local function path_to(from, to)
  for name, m in from:named_modules() do
    if m == to and name ~= "" then return name end
  end
end

local function say_argument(v)
  if not is_tensor(v) then return type(v) == "table" and type_name(v) or tostring(v) end
  local text = B.C.tm_tensor_summary(B.ptr(v))
  if text == nil then return "tensor" end
  local s = B.ffi.string(text)
  B.C.tm_string_free(text)
  return s
end

---The nest of calls that this code runs in: its path, the innermost module's class, its arguments as text.
local function position()
  local nest, arguments = {}, {}
  for level = 2, DEEPEST do
    local info = debug.getinfo(level, "f")
    if not info then break end
    if entrances[info.func] then
      local _, module = debug.getlocal(level, 1)
      if #nest == 0 then
        for i = 1, 32 do
          local name, v = debug.getlocal(level, -i)
          if not name then break end
          arguments[i] = say_argument(v)
        end
      end
      nest[#nest + 1] = module
    end
  end
  local root = nest[#nest]
  if not root then return nil end
  local path = short_name(root)
  for i = #nest - 1, 1, -1 do
    if nest[i] ~= nest[i + 1] then
      local below = path_to(nest[i + 1], nest[i])
      path = below and path .. "." .. below or path .. " > " .. short_name(nest[i])
    end
  end
  return path, short_name(nest[1]), table.concat(arguments, ", ")
end

local busy = false

---Tells a new error object where in a tree of modules it was made.
function B.Error.locate(e)
  if busy then return end
  busy = true
  local ok, path, class, arguments = pcall(position)
  busy = false
  if not ok or not path then return end
  e.module, e.inputs = path, arguments
  e.context = ("in %s%s, called with %s"):format(path, path == class and "" or " (" .. class .. ")",
    arguments == "" and "nothing" or arguments)
end

-- registration ----------------------------------------------------------------------------------------------------------

---What is stored instead of `value` under `name`: asked before the module changes. `is` tells whether a replacement is
---of the right kind, `expected` what that is.
---@param kind "parameter" | "buffer" | "module"
function hooks.registering(kind, module, name, value, is, expected)
  for _, hook in ipairs(global[kind .. "_registration"]) do
    local new = hook.fn(module, name, value)
    if new ~= nil then
      if not is(new) then
        fail("TypeError", "%s registration hook: returned a %s for %q of %s, expected %s", kind, type_name(new), name, short_name(module),
          expected)
      end
      value = new
    end
  end
  return value
end

-- methods and functions ---------------------------------------------------------------------------------------------------

local PREPEND = { prepend = true }
local FORWARD_PRE = { prepend = true, with_kwargs = true }
local FORWARD = { prepend = true, with_kwargs = true, always_call = true }

local methods = {}
hooks.methods = methods

local function own(module) return rawget(module, STATE).hooks end

---fn(module, args), before forward: what it returns are the new arguments; nothing keeps them. with_kwargs:
---fn(module, args, kw) returns nn.args(...) and a table, or nothing.
---@param opts? {prepend?: boolean, with_kwargs?: boolean}
function methods:register_forward_pre_hook(fn, opts)
  return add(own(self), "forward_pre", "register_forward_pre_hook", fn, opts, FORWARD_PRE)
end

---fn(module, args, output), after forward: what it returns replaces the output; nothing keeps it. with_kwargs:
---fn(module, args, kw, output). always_call: also when the call fails, with as much output as there is.
---@param opts? {prepend?: boolean, with_kwargs?: boolean, always_call?: boolean}
function methods:register_forward_hook(fn, opts)
  return add(own(self), "forward", "register_forward_hook", fn, opts, FORWARD)
end

---fn(module, grad_input, grad_output) when the gradients of the module's inputs are known: tuples with n; what it
---returns replaces grad_input.
---@param opts? {prepend?: boolean}
function methods:register_full_backward_hook(fn, opts)
  return add(own(self), "backward", "register_full_backward_hook", fn, opts, PREPEND)
end

---fn(module, grad_output) when the gradients of the module's results are known; what it returns replaces them.
---@param opts? {prepend?: boolean}
function methods:register_full_backward_pre_hook(fn, opts)
  return add(own(self), "backward_pre", "register_full_backward_pre_hook", fn, opts, PREPEND)
end

function methods.register_backward_hook()
  fail("NotImplementedError",
    "register_backward_hook: its gradients are wrong for modules of several operators; use register_full_backward_hook")
end

local functions = {}
hooks.functions = functions

---The same for every module of the process. Global hooks run before a module's own.
function functions.register_module_forward_pre_hook(fn, opts)
  return add(global, "forward_pre", "register_module_forward_pre_hook", fn, opts, {})
end
---@param opts? {with_kwargs?: boolean, always_call?: boolean}
function functions.register_module_forward_hook(fn, opts)
  return add(global, "forward", "register_module_forward_hook", fn, opts, { with_kwargs = true, always_call = true })
end
function functions.register_module_full_backward_hook(fn, opts)
  return add(global, "backward", "register_module_full_backward_hook", fn, opts, {})
end
function functions.register_module_full_backward_pre_hook(fn, opts)
  return add(global, "backward_pre", "register_module_full_backward_pre_hook", fn, opts, {})
end
functions.register_module_backward_hook = methods.register_backward_hook

---fn(module, name, value) before a value is stored in a slot: what it returns is stored instead. Parameters only when
---there is one, buffers and modules also when the slot gets none.
function functions.register_parameter_registration_hook(fn, opts)
  return add(global, "parameter_registration", "register_parameter_registration_hook", fn, opts, {})
end
function functions.register_buffer_registration_hook(fn, opts)
  return add(global, "buffer_registration", "register_buffer_registration_hook", fn, opts, {})
end
function functions.register_module_registration_hook(fn, opts)
  return add(global, "module_registration", "register_module_registration_hook", fn, opts, {})
end

return hooks
