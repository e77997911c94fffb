---autograd.lua: gradients in Lua: the loop around C's resumable engine, hooks, custom functions, grad modes.

local B = require "tmod.ffi"
local Handle = require "tmod.handle"
local Tensor = require "tmod.tensor"
local C, ffi, ptr, is_tensor = B.C, B.ffi, B.ptr, B.is_tensor

local autograd = {}

local function pack(...) return { n = select("#", ...), ... } end

-- grad modes ------------------------------------------------------------------------------------------------------

local RECORDING, INFERENCE = 1, 2

---Sets grad mode and inference mode of this thread; returns what they were.
local function set_modes(modes)
  return C.tm_grad_mode_set(modes % 2) + INFERENCE * C.tm_inference_mode_set(modes >= INFERENCE and 1 or 0)
end

local resume

local function suspend(old, co, ok, ...)
  local inside = set_modes(old)
  if coroutine.status(co) == "suspended" then return resume(inside, co, coroutine.yield(...)) end
  if not ok then error((...), 0) end
  return ...
end

function resume(modes, co, ...) return suspend(set_modes(modes), co, coroutine.resume(co, ...)) end

local function finish(old, ok, ...)
  set_modes(old)
  if not ok then error((...), 0) end
  return ...
end

---Runs fn(...) in these modes; returns its results. In a coroutine, fn gets one of its own, so that it takes its
---modes along when it yields, and whoever runs meanwhile has theirs.
local function in_modes(modes, fn, ...)
  if coroutine.running() then
    return resume(modes, coroutine.create(type(fn) == "function" and fn or function(...) return fn(...) end), ...)
  end
  return finish(set_modes(modes), pcall(fn, ...))
end

local function inference() return INFERENCE * C.tm_inference_mode() end

---Runs fn(...) without recording; returns its results.
function autograd.no_grad(fn, ...)
  B.need_function("no_grad", fn)
  return in_modes(inference(), fn, ...)
end
---Runs fn(...) with recording on, inside no_grad too.
function autograd.enable_grad(fn, ...)
  B.need_function("enable_grad", fn)
  return in_modes(RECORDING + inference(), fn, ...)
end
---Switches recording for this thread; returns what it was.
function autograd.set_grad_enabled(on)
  if type(on) ~= "boolean" then B.fail("TypeError", "set_grad_enabled: expected a boolean, got %s", B.type_name(on)) end
  return C.tm_grad_mode_set(on and 1 or 0) ~= 0
end
function autograd.is_grad_enabled() return C.tm_grad_mode() ~= 0 end

---Runs fn(...) without recording, and makes tensors that no later graph may save: for pure evaluation.
function autograd.inference_mode(fn, ...)
  B.need_function("inference_mode", fn)
  return in_modes(INFERENCE, fn, ...)
end

local function finish_anomaly(old, ok, ...)
  C.tm_anomaly_mode_set(old)
  if not ok then error((...), 0) end
  return ...
end

---Errors of a backward pass then name the line of the forward call, and a NaN in a gradient is an error.
function autograd.set_detect_anomaly(on) C.tm_anomaly_mode_set(on and 1 or 0) end
function autograd.detect_anomaly(fn, ...)
  B.need_function("detect_anomaly", fn)
  local old = C.tm_anomaly_mode()
  C.tm_anomaly_mode_set(1)
  return finish_anomaly(old, pcall(fn, ...))
end

-- hooks ---------------------------------------------------------------------------------------------------------------

-- Hooks of a leaf live on its Lua table, so that leaf and hook are collected together; this finds the leaf.
local leaf_of = setmetatable({}, { __mode = "v" })

local function hook_function(id)
  local leaf = leaf_of[id]
  if leaf then return leaf._hooks and leaf._hooks[id] end
  return B.kept[id]
end

local function remove_hook(t, id)
  C.tm_hook_remove(ptr(t), id)
  if t._hooks then t._hooks[id] = nil end
  B.kept[id] = nil
end

---After the hooks of two tensors were exchanged.
function autograd.rehome_hooks(t)
  for id in pairs(rawget(t, "_hooks") or {}) do leaf_of[id] = t end
end

local function add_hook(t, fn, kind, what)
  B.need_function(what, fn)
  local id = tonumber(C.tm_hook_add(ptr(t), kind))
  if id == 0 then B.raise() end
  if t.is_leaf then
    if not rawget(t, "_hooks") then rawset(t, "_hooks", {}) end
    t._hooks[id] = fn
    leaf_of[id] = t
  else
    B.kept[id] = fn
  end
  return Handle.new(t, id, remove_hook)
end

---Calls fn(grad) once per backward pass with the gradient of this tensor; what it returns replaces the gradient.
function Tensor:register_hook(fn) return add_hook(self, fn, C.TM_HOOK_GRAD, "register_hook") end

---Calls fn(tensor) after a backward pass has added to this leaf's grad.
function Tensor:register_post_accumulate_grad_hook(fn)
  return add_hook(self, fn, C.TM_HOOK_POST_ACCUMULATE, "register_post_accumulate_grad_hook")
end

function Tensor:requires_grad_(on)
  self.requires_grad = on ~= false
  return self
end

---The same elements without history.
function Tensor:detach()
  local t = B.wrap(C.tm_tensor_detach(ptr(self)))
  B.tidy()
  return t
end
function Tensor:detach_()
  B.check(C.tm_tensor_detach_(ptr(self)))
  return self
end

---Keeps the gradient of a tensor that is no leaf in .grad.
function Tensor:retain_grad() B.check(C.tm_tensor_retain_grad(ptr(self))) end

-- the engine ------------------------------------------------------------------------------------------------------------

local one_result = ffi.new "tm_tensor *[1]"

local function run_hook(event)
  local grad = B.wrap_borrowed(event.grad[0])
  local fn = hook_function(tonumber(event.id))
  local result = fn and fn(grad)
  if result ~= nil and not is_tensor(result) then
    B.fail("TypeError", "hook: returned a %s, expected a tensor or nil", B.type_name(result))
  end
  return 1, result
end

local function run_post(event)
  local fn = hook_function(tonumber(event.id))
  local result = fn and fn(B.wrap_borrowed(event.grad[0]))
  if result ~= nil then B.fail("RuntimeError", "post-accumulate-grad hook: returned a %s, expected nothing", B.type_name(result)) end
  return 0
end

local function run_custom(event)
  local node = B.kept[tonumber(event.id)]
  local grads, saved = { n = event.n }, { n = event.nsaved }
  for i = 1, event.n do grads[i] = B.wrap_borrowed(event.grad[i - 1]) end
  for i = 1, event.nsaved do saved[i] = B.wrap_borrowed(event.saved[i - 1]) end
  return event.nin, node:run(grads, saved, event.nin)
end

local RUN = { [tonumber(C.TM_EVENT_HOOK)] = run_hook, [tonumber(C.TM_EVENT_POST_ACCUMULATE)] = run_post,
  [tonumber(C.TM_EVENT_CUSTOM)] = run_custom }

---Answers one event of the engine; runs under pcall.
local function answer(engine, event)
  local kind = event.kind
  local n, result = in_modes(event.create_graph + inference(), RUN[kind], event)
  if kind == C.TM_EVENT_CUSTOM then
    local array = ffi.new("tm_tensor *[?]", math.max(n, 1))
    for i = 1, n do
      if result[i] then array[i - 1] = ptr(result[i]) end
    end
    B.check(C.tm_engine_answer(engine, n, array))
  else
    one_result[0] = result and ptr(result) or nil
    B.check(C.tm_engine_answer(engine, n, one_result))
  end
end

-- Backward passes may start one another from hooks, and hooks may yield: an event for each pass under way. One whose
-- coroutine was dropped inside a hook is collected, event, mark and engine.
local spare = {}
local answering = setmetatable({}, { __mode = "k" })

local function run_answer(engine, event)
  local guarded = coroutine.running() ~= nil
  if guarded then ffi.gc(engine, C.tm_engine_free) end
  answering[event] = true
  local ok, err = pcall(answer, engine, event)
  answering[event] = nil
  if guarded then ffi.gc(engine, nil) end
  return ok, err
end

local function run(engine)
  local event = table.remove(spare) or ffi.new "tm_event"
  local ok, err = true, nil
  local kind
  repeat
    C.tm_engine_run(engine, event)
    kind = event.kind
    if kind ~= C.TM_EVENT_DONE and kind ~= C.TM_EVENT_ERROR then ok, err = run_answer(engine, event) end
  until kind == C.TM_EVENT_DONE or kind == C.TM_EVENT_ERROR or not ok
  spare[#spare + 1] = event
  if kind == C.TM_EVENT_DONE then return end
  C.tm_engine_free(engine)
  if not ok then error(err, 0) end
  B.raise()
end

-- cycles ----------------------------------------------------------------------------------------------------------------
-- A hook that refers to a tensor whose graph the hook belongs to is a cycle that no collector sees: the graph keeps the
-- hook by its number, through B.kept. So for one full collection the functions of the graph are kept by the tensors
-- from which backward can reach them, and by nothing else.

local LINKS = {} -- field of a tensor: what it leads to

---Hangs what the graph's nodes keep on the tensors that lead there; returns it by number, held weakly.
local function hang()
  local tensors, n = {}, 0
  for _, t in pairs(B.reg) do
    n = n + 1
    tensors[n] = t
  end
  local array, links = ffi.new("tm_tensor *[?]", math.max(n, 1)), ffi.new "tm_links"
  for i = 1, n do array[i - 1] = C.tm_handles_at(B.handles, tensors[i]._h) end -- NULL: released
  local found = C.tm_links_find(n, array, links) == 0
  local weak, vertex = setmetatable({}, { __mode = "v" }), {}
  if found then
    for v = 1, tonumber(links.nvertex) do vertex[v] = {} end
    for i = 0, tonumber(links.nedge) - 1 do
      table.insert(vertex[tonumber(links.edge[2 * i])], vertex[tonumber(links.edge[2 * i + 1])])
    end
    for i = 0, tonumber(links.nid) - 1 do
      local v, id = tonumber(links.id[2 * i]), tonumber(links.id[2 * i + 1])
      table.insert(vertex[v], B.kept[id])
      weak[id], B.kept[id] = B.kept[id], nil
    end
    for i = 0, tonumber(links.nroot) - 1 do
      local t = tensors[tonumber(links.root[2 * i]) + 1]
      rawset(t, LINKS, { rawget(t, LINKS), vertex[tonumber(links.root[2 * i + 1])] })
    end
  end
  C.tm_links_free(links)
  return weak
end

local settled = 0 -- what the graph kept after the last search

---A full collection, which looks for cycles through the graph when more than before is kept there, or `always`.
function B.collect_garbage(always)
  local n = 0
  for _ in pairs(B.kept) do n = n + 1 end
  if n == 0 or next(answering) ~= nil or not (always or n > 2 * settled + 1000) then return collectgarbage() end
  local weak = hang()
  local ok, e = pcall(collectgarbage)
  for id, value in pairs(weak) do B.kept[id] = value end
  for _, t in pairs(B.reg) do rawset(t, LINKS, nil) end
  settled = 0
  for _ in pairs(B.kept) do settled = settled + 1 end
  if not ok then error(e, 0) end -- somebody's finalizer
end

local function list_of(v, what)
  if v == nil then return {} end
  if is_tensor(v) then return { v } end
  if type(v) ~= "table" then B.fail("TypeError", "%s: expected a tensor or a list of tensors, got %s", what, B.type_name(v)) end
  return v
end

local function pointers(list, n, what)
  local array = ffi.new("tm_tensor *[?]", math.max(n, 1))
  for i = 1, n do
    local t = list[i]
    if t ~= nil and t ~= false then
      if not is_tensor(t) then B.fail("TypeError", "%s: element %d must be a tensor, got %s", what, i, B.type_name(t)) end
      array[i - 1] = ptr(t)
    end
  end
  return array
end

local OPTIONS = { retain_graph = true, create_graph = true, inputs = true }

local root1, grad1 = ffi.new "tm_tensor *[1]", ffi.new "tm_tensor *[1]"

---Adds to the .grad of every leaf the gradient of this tensor with respect to it.
---@param gradient? Tensor gradient of something with respect to this tensor; may be left out for one element
---@param opts? {retain_graph?: boolean, create_graph?: boolean, inputs?: Tensor[]}
function Tensor:backward(gradient, opts)
  if opts == nil and type(gradient) == "table" and not is_tensor(gradient) then gradient, opts = nil, gradient end
  if gradient ~= nil and not is_tensor(gradient) then B.fail("TypeError", "backward: gradient must be a tensor, got %s",
    B.type_name(gradient)) end
  root1[0] = ptr(self)
  grad1[0] = gradient and ptr(gradient) or nil
  local engine
  if opts == nil then
    engine = C.tm_engine_new(1, root1, grad1, 0, nil, 0, 0, 1)
  else
    B.options(opts, "backward", OPTIONS)
    local inputs = list_of(opts.inputs, "backward: inputs")
    if opts.inputs and #inputs == 0 then B.fail("RuntimeError", "backward: inputs is empty") end
    local create = opts.create_graph and 1 or 0
    local retain = opts.retain_graph == nil and create or opts.retain_graph and 1 or 0
    engine = C.tm_engine_new(1, root1, grad1, #inputs, pointers(inputs, #inputs, "backward: inputs"), retain, create, 1)
  end
  if engine == nil then B.raise() end
  run(engine)
  C.tm_engine_free(engine)
end

---Backward from several tensors at once.
---@param roots Tensor[]
---@param gradients? (Tensor|false)[] false or nil where a root has one element
function autograd.backward(roots, gradients, opts)
  roots, gradients, opts = list_of(roots, "backward"), list_of(gradients, "backward: gradients"), opts or {}
  B.options(opts, "backward", OPTIONS)
  local inputs = list_of(opts.inputs, "backward: inputs")
  local create = opts.create_graph and 1 or 0
  local retain = opts.retain_graph == nil and create or opts.retain_graph and 1 or 0
  local engine = C.tm_engine_new(#roots, pointers(roots, #roots, "backward"), pointers(gradients, #roots, "backward: gradients"),
    #inputs, pointers(inputs, #inputs, "backward: inputs"), retain, create, 1)
  if engine == nil then B.raise() end
  run(engine)
  C.tm_engine_free(engine)
end

local GRAD = { grad_outputs = true, retain_graph = true, create_graph = true, allow_unused = true }

---Gradients of the sum of outputs with respect to inputs, as a list (one tensor for one input given alone); .grad
---is left alone.
---@param outputs Tensor|Tensor[]
---@param inputs Tensor|Tensor[]
---@param opts? {grad_outputs?: Tensor|Tensor[], retain_graph?: boolean, create_graph?: boolean, allow_unused?: boolean}
function autograd.grad(outputs, inputs, opts)
  opts = opts or {}
  B.options(opts, "grad", GRAD)
  local single = is_tensor(inputs)
  outputs, inputs = list_of(outputs, "grad: outputs"), list_of(inputs, "grad: inputs")
  local n = #inputs
  if n == 0 then B.fail("RuntimeError", "grad: inputs is empty") end
  local given = list_of(opts.grad_outputs, "grad: grad_outputs")
  local create = opts.create_graph and 1 or 0
  local retain = opts.retain_graph == nil and create or opts.retain_graph and 1 or 0
  local engine = C.tm_engine_new(#outputs, pointers(outputs, #outputs, "grad: outputs"), pointers(given, #outputs, "grad: grad_outputs"),
    n, pointers(inputs, n, "grad: inputs"), retain, create, 0)
  if engine == nil then B.raise() end
  run(engine)
  local grads = { n = n }
  local unused
  for i = 1, n do
    local p = C.tm_engine_result(engine, i - 1)
    if p ~= nil then grads[i] = B.wrap(p) else unused = unused or i end
  end
  C.tm_engine_free(engine)
  if unused and not opts.allow_unused then
    B.fail("RuntimeError", "grad: input %d was not used to compute the outputs; allow_unused = true gives nil for it", unused)
  end
  if single then return grads[1] end
  return grads
end

-- custom functions ---------------------------------------------------------------------------------------------------------

---A differentiable function written in Lua:
---  local Square = tm.autograd.Function:extend "Square"
---  function Square.forward(ctx, x) ctx:save_for_backward(x) return x * x end
---  function Square.backward(ctx, dy) local x = ctx:saved() return 2 * x * dy end
---  local y = Square.apply(x)
---backward returns one gradient (or nil) for each argument of forward after ctx.
---@class Function
local Function = {}
Function.__index = Function
Function.__name = "Function"
autograd.Function = Function

local Context = {}
Context.__index = Context

---Keeps tensors for backward, with a check that nobody changes them meanwhile. Inputs and results belong here.
function Context:save_for_backward(...)
  self._save = { n = select("#", ...), ... }
  for i = 1, self._save.n do
    local t = self._save[i]
    if t ~= nil and not is_tensor(t) then B.fail("TypeError", "save_for_backward: argument %d must be a tensor or nil, got %s", i,
      B.type_name(t)) end
  end
end

---What save_for_backward kept; in backward only.
function Context:saved()
  if not self._saved then B.fail("RuntimeError", "saved: only inside backward") end
  return unpack(self._saved, 1, self._saved.n)
end

---These results never require grad.
function Context:mark_non_differentiable(...)
  self._nondiff = self._nondiff or {}
  for i = 1, select("#", ...) do self._nondiff[(select(i, ...))] = true end
end

---These inputs are changed in place by forward and returned.
function Context:mark_dirty(...)
  self._dirty = self._dirty or {}
  for i = 1, select("#", ...) do self._dirty[(select(i, ...))] = true end
end

---Whether backward gets zeros (the default) or nil for a result that brought no gradient.
function Context:set_materialize_grads(on) self._materialize = on end

local Node = {}
Node.__index = Node

---Runs the user's backward: gradients of the results -> a list of gradients of forward's tensor arguments.
function Node:run(grads, saved, nin)
  local ctx = self.ctx
  for i = 1, grads.n do
    if grads[i] == nil and ctx._materialize ~= false and self.shapes[i] then
      local s = self.shapes[i]
      grads[i] = Tensor.zeros(s.size, { dtype = s.dtype, device = s.device })
    end
  end
  ctx._saved = saved
  local all = pack(self.class.backward(ctx, unpack(grads, 1, grads.n)))
  ctx._saved = nil
  if all.n > self.narg then
    B.fail("RuntimeError", "%s: backward returned %d gradients, expected at most %d, one for each argument of forward",
      self.class.__name, all.n, self.narg)
  end
  local out = {}
  for i = 1, nin do
    local g = all[self.position[i]]
    if g ~= nil and g ~= false then
      if not is_tensor(g) then
        B.fail("TypeError", "%s: backward returned a %s for argument %d, expected a tensor or nil", self.class.__name,
          B.type_name(g), self.position[i])
      end
      out[i] = g
    end
  end
  return out
end

---Makes the results of forward part of the graph.
local function record(class, ctx, args, results)
  local inputs, position = {}, {}
  for i = 1, args.n do
    if is_tensor(args[i]) then
      inputs[#inputs + 1] = args[i]
      position[#position + 1] = i
    end
  end
  local outs, shapes, nout = {}, {}, 0
  for i = 1, results.n do
    local y = results[i]
    if is_tensor(y) then
      nout = nout + 1
      if not (ctx._nondiff and ctx._nondiff[y]) then
        outs[nout] = y
        shapes[nout] = { size = y:size(), dtype = y.dtype, device = y.device }
      end
    end
  end
  local save = ctx._save or { n = 0 }
  local node = setmetatable({ class = class, ctx = ctx, position = position, narg = args.n, shapes = shapes }, Node)
  local id = tonumber(C.tm_custom_record(class.__name, #inputs, pointers(inputs, #inputs, class.__name), nout,
    pointers(outs, nout, class.__name), save.n, pointers(save, save.n, class.__name)))
  if id == 0 then B.raise() end
  B.kept[id] = node
  ctx._save = nil -- the graph keeps them now
end

---Passes tensors through one node: the same elements in new tensors, which in-place changes refuse. In backward
---node:run(grads) gets the gradients of these and returns, in a list, those of the old ones.
---@param tensors Tensor[]
function autograd.identity(name, tensors, node)
  local n, outs, recorded = #tensors, {}, {}
  for i = 1, n do
    outs[i] = tensors[i]:detach()
    recorded[i] = tensors[i].requires_grad and outs[i]
  end
  local id = tonumber(C.tm_custom_record(name, n, pointers(tensors, n, name), n, pointers(recorded, n, name), 0, nil))
  if id == 0 then B.raise() end
  B.kept[id] = node
  return outs
end

local function apply(class, ...)
  if not rawget(class, "forward") or not rawget(class, "backward") then
    B.fail("NotImplementedError", "%s: a Function needs forward and backward", class.__name)
  end
  local args = pack(...)
  local ctx = setmetatable({ needs_input_grad = {} }, Context)
  local wanted = false
  for i = 1, args.n do
    local needs = is_tensor(args[i]) and args[i].requires_grad
    ctx.needs_input_grad[i] = needs
    wanted = wanted or needs
  end
  wanted = wanted and C.tm_grad_mode() ~= 0
  local results = pack(autograd.no_grad(class.forward, ctx, ...))
  for i = 1, results.n do -- an input returned as it is becomes a result of its own
    for j = 1, args.n do
      if results[i] ~= nil and results[i] == args[j] and is_tensor(args[j]) then
        local dirty = ctx._dirty and ctx._dirty[args[j]]
        if dirty and wanted and args[j].is_leaf and args[j].requires_grad then
          B.fail("RuntimeError", "%s: a leaf that requires grad cannot be changed in place", class.__name)
        end
        if not dirty then results[i] = args[j]:detach() end
      end
    end
  end
  if wanted then record(class, ctx, args, results) end
  return unpack(results, 1, results.n)
end

function Function:extend(name)
  if type(name) ~= "string" then B.fail("TypeError", "Function:extend: expected a name, got %s", B.type_name(name)) end
  local class = setmetatable({ __name = name }, { __index = self, __call = apply, __name = "Function" })
  class.__index = class
  class.apply = function(...) return apply(class, ...) end
  return class
end

-- checking gradients ----------------------------------------------------------------------------------------------------------

local function differentiable(list)
  local found = {}
  for _, t in ipairs(list) do
    if is_tensor(t) and t.requires_grad then found[#found + 1] = t end
  end
  return found
end

local function outputs_of(fn, inputs)
  local outs = {}
  for _, y in ipairs(pack(fn(unpack(inputs, 1, inputs.n or #inputs)))) do
    if is_tensor(y) and y:is_floating_point() then outs[#outs + 1] = y end
  end
  return outs
end

---Compares gradients of fn(unpack(inputs)) with central differences. Inputs that require grad should be float64.
---Returns true, or raises with the place and both numbers (returns false and the text with raise = false).
---@param fn fun(...): Tensor
---@param inputs Tensor[]
---@param opts? {eps?: number, atol?: number, rtol?: number, raise?: boolean}
function autograd.gradcheck(fn, inputs, opts)
  opts = opts or {}
  local eps, atol, rtol = opts.eps or 1e-6, opts.atol or 1e-5, opts.rtol or 1e-3
  local function report(text, ...)
    text = "gradcheck: " .. text:format(...)
    if opts.raise == false then return false, text end
    B.fail("RuntimeError", "%s", text)
  end
  if is_tensor(inputs) then inputs = { inputs } end
  local wanted = differentiable(inputs)
  if #wanted == 0 then return report "no input requires grad" end
  for i, t in ipairs(wanted) do
    if t.dtype ~= "float64" then return report("input %d is %s; central differences need float64", i, t.dtype) end
  end
  local outs = outputs_of(fn, inputs)
  -- All gradients first: nudging an input is an in-place change, which the graph would refuse.
  local gradients = {} -- [o][k][i]: of element k of output o for input i
  for o, y in ipairs(outs) do
    local n = y:numel()
    gradients[o] = {}
    for k = 1, n do
      local seed = Tensor.zeros({ n }, { dtype = y.dtype })
      seed[k] = 1
      gradients[o][k] = y.requires_grad and autograd.grad(y, wanted, { grad_outputs = seed:view(y:size()), retain_graph = true,
        allow_unused = true }) or {}
    end
  end
  for o, y in ipairs(outs) do
    local n, analytic = y:numel(), gradients[o]
    for i, x in ipairs(wanted) do
      -- Nudged through its own strides, so views are checked too.
      local flat, count = x:detach(), x:numel()
      local sizes = x:size()
      for e = 1, count do
        local index, rest = {}, e - 1
        for d = #sizes, 1, -1 do
          index[d] = rest % sizes[d] + 1
          rest = math.floor(rest / sizes[d])
        end
        local place = #sizes == 0 and flat or flat[index]
        local old = place:item()
        autograd.no_grad(place.fill_, place, old + eps)
        local up = autograd.no_grad(outputs_of, fn, inputs)[o]:detach():clone()
        autograd.no_grad(place.fill_, place, old - eps)
        local down = autograd.no_grad(outputs_of, fn, inputs)[o]:detach():clone()
        autograd.no_grad(place.fill_, place, old)
        local slope = ((up - down) / (2 * eps)):reshape(-1)
        for k = 1, n do
          local numeric = slope[k]:item()
          local g = analytic[k][i]
          local a = g and g:reshape(-1)[e]:item() or 0
          if not (math.abs(a - numeric) <= atol + rtol * math.abs(numeric)) then
            return report("output %d, element %d, input %d, element %d: backward gives %.9g, central differences %.9g", o, k, i, e,
              a, numeric)
          end
        end
      end
    end
  end
  return true
end

---gradcheck of the gradients themselves: backward of backward against central differences of backward.
function autograd.gradgradcheck(fn, inputs, opts)
  if is_tensor(inputs) then inputs = { inputs } end
  local n = inputs.n or #inputs
  local outs = outputs_of(fn, inputs)
  local all = {}
  for i = 1, n do all[i] = inputs[i] end
  for o, y in ipairs(outs) do
    local seed = Tensor.linspace(0.5, 1.5, math.max(y:numel(), 1), { dtype = "float64" })
    all[n + o] = (y:numel() == 0 and Tensor.zeros(y:size(), { dtype = "float64" }) or seed:view(y:size())):requires_grad_()
  end
  local total = n + #outs
  local function first_order(...)
    local given = { ... }
    local own = { n = n }
    for i = 1, n do own[i] = given[i] end
    local seeds = {}
    for o = 1, #outs do seeds[o] = given[n + o] end
    local was = autograd.set_grad_enabled(true)
    local ys = outputs_of(fn, own)
    local used, used_seeds = {}, {}
    for o, y in ipairs(ys) do
      if y.requires_grad then
        used[#used + 1] = y
        used_seeds[#used_seeds + 1] = seeds[o]
      end
    end
    local wanted = differentiable(own)
    local grads = autograd.grad(used, wanted, { grad_outputs = used_seeds, create_graph = true, allow_unused = true })
    autograd.set_grad_enabled(was)
    local results = {}
    for i = 1, #wanted do results[i] = grads[i] or Tensor.zeros(wanted[i]:size(), { dtype = "float64" }) end
    return unpack(results)
  end
  all.n = total
  return autograd.gradcheck(first_order, all, opts)
end

return autograd
