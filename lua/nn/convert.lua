---convert.lua: a conversion as one transaction. A walk over the tree, children first, notes each slot with what becomes
---of it; C then decides how that reaches the slot (set_data, replacement or swap: runtime/convert.c), and commits all
---slots or none. Whatever a subclass's own _apply adds while a walk is under way is part of the same transaction.

local B = require "tmod.ffi"
local Handle = require "tmod.handle"
local OrderedDict = require "tmod.ordered"
local errors = require "tmod.errors"
local parameter = require "tmod.nn.parameter"
local options = require "tmod.functional".options
local C, ffi, ptr, is_tensor, type_name, fail = B.C, B.ffi, B.ptr, B.is_tensor, B.type_name, B.fail
local get, live_keys = OrderedDict.get, OrderedDict.live_keys
local rawget, rawset = rawget, rawset

local None = parameter.None
local STATE = "\0state"
local BUFFER, PARAMETER, PLAIN = tonumber(C.TM_SLOT_BUFFER), tonumber(C.TM_SLOT_PARAMETER), tonumber(C.TM_SLOT_TENSOR)
local REPLACE, SWAP = tonumber(C.TM_REPLACE), tonumber(C.TM_SWAP)
local FAILED_GRAD, FAILED_SWAP, FAILED_BUSY = tonumber(C.TM_FAILED_GRAD), tonumber(C.TM_FAILED_SWAP), tonumber(C.TM_FAILED_BUSY)
local FAKE, WRAPPER = tonumber(C.TM_MARK_FAKE), tonumber(C.TM_MARK_WRAPPER)

local methods = {}

-- built-in conversions ----------------------------------------------------------------------------------------------------

local spec_of = setmetatable({}, { __mode = "k" }) -- fn -> tm_convert_spec: C may do these by itself

local function marked(t, mark) return C.tm_tensor_marks(ptr(t)) / mark % 2 >= 1 end

---Only a wrapper's class can convert it; and what requires grad is recorded where recording is on.
local function beyond_c(t)
  local p = ptr(t)
  return C.tm_tensor_marks(p) >= WRAPPER or C.tm_tensor_requires_grad(p) ~= 0 and C.tm_grad_mode() ~= 0
end

---The built-in conversion as a function of a tensor, for subclasses that call it themselves.
local function function_of(spec)
  local c = ffi.new("tm_convert_spec", { B.dtype(spec.dtype), spec.only_floating and 1 or 0, B.device(spec.device),
    spec.format or 0, spec.fresh and 1 or 0 })
  local function fn(t)
    if marked(t, WRAPPER) then return require "tmod.wrapper".convert(t, fn) end
    if not beyond_c(t) or spec.fresh then return B.wrap(C.tm_tensor_convert(ptr(t), c)) end
    local dtype = not (spec.only_floating and not t:is_floating_point()) and spec.dtype or nil
    return t:to { dtype = dtype, device = spec.device, copy = spec.fresh }
  end
  spec_of[fn] = c
  return fn
end

-- noting slots ------------------------------------------------------------------------------------------------------------

local function slot_name(module, name) return module:_short_name() .. "." .. name end

local function result_of(fn, t, module, name, what)
  local r = fn(t)
  if is_tensor(r) then return r end
  fail("TypeError", "_apply: fn returned %s for the %s %s, expected a tensor", r == nil and "nil" or "a " .. type_name(r), what,
    slot_name(module, name))
end

-- A transaction is a table of arrays: module[i], name[i], kind[i] and tensor[i] say what slot i is and holds, and
-- applied[i] with applied_grad[i], or else spec[i], what that becomes.
local function note(tx, module, name, kind, t, applied, applied_grad, spec)
  local i = tx.n + 1
  tx.n = i
  tx.module[i], tx.name[i], tx.kind[i], tx.tensor[i] = module, name, kind, t
  tx.applied[i], tx.applied_grad[i], tx.spec[i] = applied, applied_grad, spec
end

local function kind_of(p) return rawget(p, "_parameter") and PARAMETER or PLAIN end

local convert_now -- (tx, module, name, p, fn, swap): where nothing waits for a commit

local function note_parameters(tx, module, dict, fn, spec)
  local keys, swap = live_keys(dict), C.tm_future_swap()
  for k = 1, #keys do
    local name = keys[k]
    local p = get(dict, name)
    if p == None then p = nil end
    if p and not tx.atomic then convert_now(tx, module, name, p, fn, swap)
    elseif p and spec and C.tm_tensor_marks(ptr(p)) < WRAPPER then note(tx, module, name, kind_of(p), p, false, false, spec)
    elseif p then
      local applied, grad = result_of(fn, p, module, name, "parameter"), p.grad
      note(tx, module, name, kind_of(p), p, applied, grad and result_of(fn, grad, module, name, "gradient of"), false)
    end
  end
end

local function note_buffers(tx, module, dict, fn, spec)
  local keys = live_keys(dict)
  for k = 1, #keys do
    local name = keys[k]
    local b = get(dict, name)
    if b ~= None and b ~= nil then
      if spec and tx.atomic and not beyond_c(b) then
        note(tx, module, name, BUFFER, b, false, false, spec)
      else
        if B.debug and b.requires_grad then
          module._warn("_apply: the conversion of the buffer %s, which requires grad, is recorded", slot_name(module, name))
        end
        local applied = result_of(fn, b, module, name, "buffer")
        if tx.atomic then note(tx, module, name, BUFFER, b, applied, false, false)
        else dict[name] = parameter.keep(applied) end
      end
    end
  end
end

local apply

local function walk_children(tx, dict, fn)
  local keys, seen = OrderedDict.keys(dict), nil
  if #keys > 1 then seen = {} end
  for k = 1, #keys do
    local child = get(dict, keys[k])
    if child ~= None and child ~= nil and not (seen and seen[child]) then
      if seen then seen[child] = true end
      if child._apply == apply then tx.walk(tx, child, fn) else child:_apply(fn) end
    end
  end
end

---Children, then own parameters, each with its gradient and unrecorded, then own buffers.
local function walk(tx, module, fn, recurse)
  local s = rawget(module, STATE)
  local managers = s.managers
  if managers then
    for _, m in ipairs(managers) do
      if m.manager.on_pre_apply then m.manager.on_pre_apply(module) end
    end
    tx.managed[#tx.managed + 1] = module
  end
  if recurse ~= false and #live_keys(s.modules) > 0 then walk_children(tx, s.modules, fn) end
  local spec = spec_of[fn] or false
  if #live_keys(s.parameters) > 0 then
    local mode = C.tm_grad_mode_set(0)
    note_parameters(tx, module, s.parameters, fn, spec)
    C.tm_grad_mode_set(mode)
  end
  if #live_keys(s.buffers) > 0 then note_buffers(tx, module, s.buffers, fn, spec) end
end

-- committing --------------------------------------------------------------------------------------------------------------

local slots, room = nil, 0 -- tm_conversion[room], reused
local failed = ffi.new "int[1]"

local function fill(tx)
  local n = tx.n
  if n > room then
    room = math.max(2 * room, n)
    slots = ffi.new("tm_conversion[?]", room)
  end
  local handles, at = B.handles, C.tm_handles_at
  for i = 1, n do
    local s = slots[i - 1]
    local p = at(handles, rawget(tx.tensor[i], "_h"))
    if p == nil then B.raise() end
    s.param, s.kind = p, tx.kind[i]
    local spec = tx.spec[i]
    if spec then
      s.applied, s.applied_grad, s.spec = nil, nil, spec
    else
      local g = tx.applied_grad[i]
      s.applied, s.spec = ptr(tx.applied[i]), nil
      s.applied_grad = g and ptr(g) or nil
    end
  end
end

---Path of a module below the root.
local function path_of(root, module, name)
  for path, m in root:named_modules() do
    if m == module then return path == "" and name or path .. "." .. name end
  end
  return name
end

local function last_error(code) return errors.new(errors.KIND[code] or "RuntimeError", ffi.string(C.tm_last_error())) end

---The error of slot i with its place: one of a swap becomes the cause of an error that names class and slot.
local function raise(tx, code, i)
  local e = last_error(code)
  if i < 0 then error(e, 0) end
  local s, module, name = slots[i], tx.module[i + 1], tx.name[i + 1]
  local of_grad, of_swap = s.failure % (2 * FAILED_GRAD) >= FAILED_GRAD, s.failure / FAILED_SWAP % 2 >= 1
  if of_swap and code ~= C.TM_EMEM then
    e = errors.new("RuntimeError", ("_apply: cannot swap %s%s"):format(slot_name(module, name), of_grad and ".grad" or ""), e)
  end
  e.parameter = path_of(tx.root, module, name) .. (of_grad and ".grad" or "")
  e.context = (e.context and e.context .. "\n  " or "") .. "converting " .. e.parameter
  error(e, 0)
end

---What a table keeps when its tensor gets another content: its kind, and the class of that content.
local function settle_fields(t, class)
  for k in next, t do
    if k ~= "_h" and k ~= "_parameter" then rawset(t, k, nil) end
  end
  rawset(t, "_class", class)
end

---The same for a gradient, if Lua knows it.
local function settle_grad(p, s, applied)
  local g = C.tm_tensor_grad(p)
  if g == nil or s.grad_action ~= SWAP then return end
  local slot = C.tm_tensor_slot(g, B.handles)
  local t = slot ~= 0 and B.reg[slot]
  if t and t ~= applied then settle_fields(t, applied and rawget(applied, "_class") or rawget(t, "_class")) end
end

local function settle(tx)
  for i = 1, tx.n do
    local s, old = slots[i - 1], tx.tensor[i]
    local kind, action, result = tx.kind[i], s.action, s.result
    if result ~= nil or action == SWAP or s.twin >= 0 then
      local state, name, new = rawget(tx.module[i], STATE), tx.name[i], old
      local applied = tx.applied[i]
      local class = rawget(applied or old, "_class")
      if result ~= nil then new = parameter.keep(B.wrap(result)) end
      if kind == BUFFER then
        if class ~= nil and rawget(new, "_class") == nil then rawset(new, "_class", class) end
        state.buffers[name] = new
      else
        if action == REPLACE then
          rawset(new, "_parameter", true)
          rawset(new, "_class", class)
          if not tx.replaced[old] then tx.replaced[old] = new end
        elseif action == SWAP then
          settle_fields(old, class)
          settle_grad(s.param, s, tx.applied_grad[i])
        end
        if action ~= SWAP or s.twin >= 0 then state.parameters[name] = new end
      end
    end
  end
end

---The flags are read once, here; swap may have been before.
local function commit(tx, swap)
  if tx.n == 0 then return end
  fill(tx)
  local overwrite = C.tm_future_overwrite()
  swap = swap or C.tm_future_swap()
  local code = C.tm_apply(tx.n, slots, overwrite, swap, failed)
  if code ~= 0 and failed[0] >= 0 and slots[failed[0]].failure >= FAILED_BUSY then
    B.collect_now() -- what is in the way may be garbage
    code = C.tm_apply(tx.n, slots, overwrite, swap, failed)
  end
  if code ~= 0 then raise(tx, code, failed[0]) end
  settle(tx)
end

-- one tensor after the other ------------------------------------------------------------------------------------------------

local function new_transaction(root, atomic)
  return { root = root, atomic = atomic, walk = walk, n = 0, module = {}, name = {}, kind = {}, tensor = {}, applied = {},
    applied_grad = {}, spec = {}, managed = {}, replaced = {} }
end

local function swap_gradient(p, g, applied, module, name)
  p.grad = nil
  if applied ~= g then
    local fresh = applied:detach()
    fresh.requires_grad = g.requires_grad
    local ok, e = pcall(require "tmod".swap_tensors, g, fresh)
    if not ok then
      e = errors.new("RuntimeError", ("_apply: cannot swap %s.grad"):format(slot_name(module, name)), e)
      e.orphan_grad = g
      error(e, 0)
    end
  end
  p.grad = g
end

local function put_gradient(p, g, applied, replaced)
  local overwrite = C.tm_future_overwrite() ~= 0
  if C.tm_compat_type(ptr(g), ptr(applied)) ~= 0 and not marked(applied, FAKE) and not overwrite then
    if replaced then fail("AssertionError", "_apply: the parameter was replaced and its gradient cannot be: convert both") end
    if applied ~= g then B.check(C.tm_tensor_set_data(ptr(g), ptr(applied))) end
    return
  end
  if not g.is_leaf then fail("AssertionError", "_apply: the gradient is no leaf (made with create_graph)") end
  if applied.is_leaf then applied.requires_grad = g.requires_grad end
  p.grad = applied
end

---A transaction of its own for each parameter, then its gradient, in upstream's order: an error leaves what is done.
function convert_now(tx, module, name, p, fn, swap)
  local dict, g = rawget(module, STATE).parameters, p.grad
  local one = new_transaction(tx.root, true)
  note(one, module, name, kind_of(p), p, result_of(fn, p, module, name, "parameter"), false, false)
  commit(one, swap)
  for old, new in pairs(one.replaced) do tx.replaced[old] = tx.replaced[old] or new end
  if not g then return end
  local swapped, now = slots[0].action == SWAP, get(dict, name)
  if swapped then now.grad = nil end
  local applied = result_of(fn, g, module, name, "gradient of")
  if swapped then swap_gradient(now, g, applied, module, name) else put_gradient(now, g, applied, now ~= p) end
end

-- transactions --------------------------------------------------------------------------------------------------------------

local current -- the transaction that is open

---The open one, unless a coroutine that has yielded left it behind.
local function open()
  if current and (current.co == nil or current.co == coroutine.running() or coroutine.status(current.co) == "normal") then
    return current
  end
end

---Runs walk_in(tx, ...) as a transaction. Returns a map of replaced parameters.
local function transact(root, atomic, walk_in, ...)
  local tx, outer, mode = new_transaction(root, atomic), current, C.tm_grad_mode()
  tx.co = coroutine.running()
  current = tx
  local ok, e = pcall(walk_in, tx, ...)
  if ok and atomic then ok, e = pcall(commit, tx) end
  current = outer
  C.tm_grad_mode_set(mode)
  B.tidy() -- what was replaced is garbage, of which the collector sees nothing
  if not ok then error(e, 0) end
  for i = 1, #tx.managed do
    for _, m in ipairs(rawget(tx.managed[i], STATE).managers or {}) do
      if m.manager.on_post_apply then m.manager.on_post_apply(tx.managed[i]) end
    end
  end
  return tx.replaced
end

---What a subclass calls from its own _apply: part of the open transaction, without a trace if it fails.
local function join(tx, module, fn, recurse)
  local n, managed, mode = tx.n, #tx.managed, C.tm_grad_mode()
  local ok, e = pcall(walk, tx, module, fn, recurse)
  if ok then return end
  C.tm_grad_mode_set(mode)
  tx.n = n
  for i = #tx.managed, managed + 1, -1 do tx.managed[i] = nil end
  error(e, 0)
end

local APPLY = { atomic = true }

---Puts fn(t) in the place of every parameter and buffer of the tree, and of the gradients. fn runs for all of them,
---children first, before the first slot changes; an error leaves the module as it was. A subclass may override this to
---convert differently, and is called by every conversion; it sees the result only after the root has committed, in
---on_post_apply (register_manager).
---@param fn fun(t: Tensor): Tensor unrecorded for parameters and gradients
---@param recurse? boolean default: true; false: the module's own tensors only
---@param opts? {atomic?: boolean} false: one tensor after the other, so that old and new need not exist side by side
---@return nn.Module
function methods:_apply(fn, recurse, opts)
  if type(self) ~= "table" or not rawget(self, STATE) then fail("TypeError", "_apply: expected a module, got %s", type_name(self)) end
  if fn == nil then fail("TypeError", "_apply: expected a function, got nil") end
  local tx = open()
  if tx then join(tx, self, fn, recurse)
  else transact(self, options(opts, "_apply", APPLY).atomic ~= false, walk, self, fn, recurse) end
  return self
end
apply = methods._apply

local function run_method(_, module, fn, recurse) module:_apply(fn, recurse) end

---A conversion that is built in; C does most of it.
---@param spec {dtype?: string, only_floating?: boolean, device?: string, format?: integer, fresh?: boolean, recurse?: boolean,
---  atomic?: boolean}
---@return nn.Module
---@return table<Tensor, Tensor> replaced old parameter -> the new one, the first if its tie broke
function methods:_convert(spec)
  local fn = function_of(spec)
  if open() then
    self:_apply(fn, spec.recurse)
    return self, {}
  end
  return self, transact(self, spec.atomic ~= false, run_method, self, fn, spec.recurse)
end

-- managers ------------------------------------------------------------------------------------------------------------------

local MANAGER = { on_pre_apply = true, on_post_apply = true, on_post_load = true }

local function remove_manager(module, id)
  local s, list = rawget(module, STATE), {}
  for _, m in ipairs(s.managers or {}) do
    if m.id ~= id then list[#list + 1] = m
    elseif m.load then m.load:remove() end
  end
  s.managers = #list > 0 and list or nil
end

---For what looks after a module's parameters from outside, such as their shards: on_pre_apply(module) before a
---conversion reaches the module, on_post_apply(module) after all is converted, on_post_load(module) after the module
---and all below it were loaded.
---@param manager {on_pre_apply?: function, on_post_apply?: function, on_post_load?: function}
---@return RemovableHandle
function methods:register_manager(manager)
  options(manager, "register_manager", MANAGER)
  local s, id, load = rawget(self, STATE), Handle.next_id(), nil
  if manager.on_post_load then
    load = self:register_load_state_dict_post_hook(function(module) manager.on_post_load(module) end)
  end
  local list = {}
  for _, m in ipairs(s.managers or {}) do list[#list + 1] = m end
  list[#list + 1] = { id = id, manager = manager, load = load }
  s.managers = list
  return Handle.new(self, id, remove_manager)
end

return methods
