---convert.lua: a module's tensors in another dtype or on another device. All new contents are made first and then put
---in place, so that an error leaves the module as it was. Parameters stay the same objects with the same hooks, but
---for those that come from or go to the meta device, which are replaced.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local options = require "tmod.functional".options
local parameter = require "tmod.nn.parameter"

local None = parameter.None

local methods = {}

---Every module of the tree once, children first.
local function post_order(module, list, seen)
  if seen[module] then return list end
  seen[module] = true
  for _, child in ipairs(OrderedDict.values(module._modules)) do
    if child ~= None then post_order(child, list, seen) end
  end
  list[#list + 1] = module
  return list
end

---What each parameter (with its gradient) and buffer becomes: object -> {data, grad}; each object is converted once.
local function plan(modules, fn)
  local becomes = {}
  for _, module in ipairs(modules) do
    for _, p in ipairs(OrderedDict.values(module._parameters)) do
      if p ~= None and not becomes[p] then
        local grad = p.grad
        becomes[p] = { data = fn(p:detach()), grad = grad and fn(grad) }
      end
    end
    for _, b in ipairs(OrderedDict.values(module._buffers)) do
      if b ~= None and not becomes[b] then becomes[b] = { data = fn(b) } end
    end
  end
  return becomes
end

local function replace(p, data)
  if (p.device == "meta") == (data.device == "meta") then
    p.grad = nil
    p.data = data
    return p
  end
  return parameter.Parameter(data, p.requires_grad)
end

local function commit(modules, becomes)
  local done = {}
  for _, module in ipairs(modules) do
    for name, p in OrderedDict.pairs(module._parameters) do
      if p ~= None then
        if not done[p] then
          done[p] = replace(p, becomes[p].data)
          done[p].grad = becomes[p].grad
        end
        module._parameters[name] = done[p]
      end
    end
    for name, b in OrderedDict.pairs(module._buffers) do
      if b ~= None then module._buffers[name] = parameter.keep(becomes[b].data) end
    end
  end
end

local function convert(self, fn)
  local modules = post_order(self, {}, {})
  autograd.no_grad(commit, modules, autograd.no_grad(plan, modules, fn))
  return self
end

local function floating(what, dtype)
  if dtype ~= nil and B.C.tm_dtype_is_float(B.dtype(dtype)) == 0 then
    B.fail("TypeError", "%s: a module converts to floating dtypes only, got %s", what, tostring(dtype))
  end
  return dtype
end

local function cast(self, dtype, device)
  if dtype == nil and device == nil then return self end
  return convert(self, function(t) return t:to { dtype = t:is_floating_point() and dtype or nil, device = device } end)
end

local TO = { dtype = true, device = true }

---Floating parameters and buffers in another dtype, all on another device: to("float64"), to("cpu"), to("cpu",
---"float16"), to(tensor), to{dtype=, device=}. Returns the module.
---@return nn.Module
function methods:to(a, b)
  local dtype, device
  if B.is_tensor(a) then dtype, device = a.dtype, a.device
  elseif type(a) == "table" then
    local opts = options(a, "to", TO)
    dtype, device = opts.dtype, opts.device
  elseif b == nil and type(a) == "string" and B.C.tm_dtype_find(a) >= 0 then dtype = a
  else device, dtype = a, b end
  B.device(device)
  return cast(self, floating("to", dtype), device)
end

for name, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16" } do
  methods[name] = function(self) return cast(self, dtype) end
end

---All parameters and buffers in this dtype, whole numbers too.
function methods:type(dtype)
  B.dtype(dtype)
  return convert(self, function(t) return t:to { dtype = dtype } end)
end

-- Slot by slot, unlike the conversions above: tied parameters that come from meta come apart.
local function empty_slots(modules, device)
  local slots = {}
  local function empty(t)
    local like = ops.clone(t:detach():to "meta") -- has the strides that a copy would have
    return ops.as_strided(ops.empty({ t:numel() }, t.dtype, device), like:size(), like:stride(), 0):detach()
  end
  for _, module in ipairs(modules) do
    for _, registry in ipairs { module._parameters, module._buffers } do
      for name, t in OrderedDict.pairs(registry) do
        if t ~= None then
          local grad = registry == module._parameters and t.grad
          table.insert(slots, { registry = registry, name = name, old = t, data = empty(t), grad = grad and empty(grad) or nil,
            is_parameter = registry == module._parameters })
        end
      end
    end
  end
  for _, slot in ipairs(slots) do
    local t = slot.data
    if slot.is_parameter then
      t = replace(slot.old, slot.data)
      t.grad = slot.grad
    end
    slot.registry[slot.name] = parameter.keep(t)
  end
end

local TO_EMPTY = { device = true, recurse = true }

---Uninitialised memory of the same shapes and dtypes on a device, also for modules on meta. Values are lost.
---@param opts {device: string, recurse?: boolean} recurse = false: the module's own parameters and buffers only
---@return nn.Module
function methods:to_empty(opts)
  opts = options(opts, "to_empty", TO_EMPTY)
  if opts.device == nil then B.fail("TypeError", "to_empty: the option device is missing, as in to_empty{device = \"cpu\"}") end
  B.device(opts.device)
  autograd.no_grad(empty_slots, opts.recurse == false and { self } or post_order(self, {}, {}), opts.device)
  return self
end

function methods:cpu() return cast(self, nil, "cpu") end
function methods:cuda(index) return cast(self, nil, index and "cuda:" .. index or "cuda") end

return methods
