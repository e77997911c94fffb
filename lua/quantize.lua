---quantize.lua: weights of one byte. A row of the weight is bytes of -127..127 times a scale of its own, so that no
---row's large numbers cost another its precision; products work on the bytes (linear_int8).

local B = require "tmod.ffi"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local options = require "tmod.functional".options
local parameter = require "tmod.nn.parameter"
local Wrapper = require "tmod.wrapper".WrapperTensor

local quantize = {}

---A matrix (out, in) as bytes and a scale per row. In state dictionaries it is one tensor, in files two:
---"weight.q" int8 (out, in) and "weight.scale" (out). Its dtype is that of the scale. It is not trained.
---@class Int8Weight : WrapperTensor
local Int8Weight = Wrapper:extend "Int8Weight"
quantize.Int8Weight = Int8Weight

function Int8Weight:geometry(inner)
  local q, scale = inner.q, inner.scale
  if not (q and scale and q.dtype == "int8" and q.ndim == 2 and scale:is_floating_point() and scale.ndim == 1
    and scale:len() == q:size(1)) then
    B.fail("TypeError", "Int8Weight: expected q, int8 (out, in), and scale, floating (out)")
  end
  return q:size(), scale.dtype, q.device
end

---The nearest weight of bytes to a matrix: the largest number of a row becomes 127.
---@param w Tensor (out, in)
function Int8Weight.quantize(w)
  if not B.is_tensor(w) or w.ndim ~= 2 or not w:is_floating_point() then
    B.fail("TypeError", "Int8Weight: expected a floating matrix, got %s",
      B.is_tensor(w) and ("%s of %d dims"):format(w.dtype, w.ndim) or B.type_name(w))
  end
  return autograd.no_grad(function()
    local x = w:detach():float()
    local scale = x:size(2) > 0 and x:abs():amax(2) / 127 or x.new_zeros(x, { x:size(1) })
    scale = ops.where(scale:eq(0), 1, scale):to(w.dtype)
    local steps = x / scale:float():unsqueeze(2)
    return Int8Weight:new { q = (steps + steps:sign() * 0.5):clamp(-127.5, 127.5):to "int8", scale = scale }
  end)
end

---The floating matrix that the bytes stand for.
function Int8Weight.to_plain(t)
  local inner = Int8Weight.flatten(t)
  return inner.q:to(inner.scale.dtype) * inner.scale:unsqueeze(2)
end
Int8Weight.dequantize = Int8Weight.to_plain

function Int8Weight:from_plain(x, like) return Int8Weight.quantize(x:to { dtype = like.dtype, device = like.device }) end

---Bytes stay bytes: a conversion reaches them by its device alone.
function Int8Weight.convert(t, fn)
  return Wrapper.convert(t, function(x)
    local y = fn(x)
    return x.dtype == "int8" and B.is_tensor(y) and y:is_floating_point() and y:to "int8" or y
  end)
end

function Int8Weight:dispatch(op, args)
  local x, weight = args[1], args[2]
  if op == "linear" and B.class_of(weight) == Int8Weight and B.class_of(x) == nil then
    local inner = Int8Weight.flatten(weight)
    if inner.scale.dtype == x.dtype then return ops.linear_int8(x, inner.q, inner.scale, args[3]) end
  end
  return Wrapper.dispatch(self, op, args)
end

local OPTIONS = { filter = true }

---Replaces the weights of all nn.Linear modules by Int8Weight parameters, which take a quarter of float32's memory.
---Tied weights stay tied among Linears. For inference: the weights are no longer trained, the rest of the model is.
---@param model nn.Module
---@param opts? {filter?: fun(name: string, module: nn.Module): boolean} which Linears (default: all)
---@return nn.Module model
function quantize.quantize(model, opts)
  local nn = require "tmod.nn"
  opts = options(opts, "quantize", OPTIONS)
  if type(model) ~= "table" or type(model.named_modules) ~= "function" then
    B.fail("TypeError", "quantize: expected a module, got %s", B.type_name(model))
  end
  local done = {}
  for name, module in model:named_modules() do
    if module:isinstance(nn.Linear) and (opts.filter == nil or opts.filter(name, module)) then
      local w = module.weight
      if B.class_of(w) ~= Int8Weight then
        done[w] = done[w] or parameter.Parameter(Int8Weight.quantize(w), false)
        module.weight = done[w]
      end
    end
  end
  return model
end

return quantize
