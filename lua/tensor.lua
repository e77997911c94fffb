---tensor.lua: what a tensor is in Lua: a table with a handle number, methods generated from the operator table,
---and indexing as people write it. Positions count from 1, -1 is the last.

local B = require "tmod.ffi"
local ops = require "tmod.ops"
local C, ffi, ptr = B.C, B.ffi, B.ptr

---@class Tensor
local Tensor = {}

local mt = B.tensor_metatable
mt.__name = "tensor"

local is_tensor = B.is_tensor

-- attributes ------------------------------------------------------------------------------------------------------

local shape_size = ffi.new "int64_t[8]"

---Attributes that read like fields: t.dtype, t.grad ...
local getters = {}

function getters.dtype(t) return B.dtype_name[C.tm_tensor_dtype(ptr(t))] end
function getters.device(t) return B.device_name(C.tm_tensor_device(ptr(t))) end
function getters.shape(t) return t:size() end
function getters.ndim(t) return C.tm_tensor_ndim(ptr(t)) end
function getters.requires_grad(t) return C.tm_tensor_requires_grad(ptr(t)) ~= 0 end
function getters.is_leaf(t) return C.tm_tensor_is_leaf(ptr(t)) ~= 0 end
function getters.retains_grad(t) return C.tm_tensor_retains_grad(ptr(t)) ~= 0 end
function getters.grad(t) return B.wrap_borrowed(C.tm_tensor_grad(ptr(t))) end
function getters.data(t) return t:detach() end
function getters.version(t) return tonumber(C.tm_tensor_version(ptr(t))) end
function getters.T(t) return t:t() end
---Name of the operator that made the tensor, nil for a leaf.
function getters.grad_fn(t)
  local name = C.tm_tensor_grad_fn(ptr(t))
  return name ~= nil and ffi.string(name) or nil
end

local setters = {}

function setters.requires_grad(t, on)
  if type(on) ~= "boolean" then B.fail("TypeError", "requires_grad: expected a boolean, got %s", B.type_name(on)) end
  B.check(C.tm_tensor_requires_grad_set(ptr(t), on and 1 or 0))
end
function setters.grad(t, g)
  if g ~= nil and not is_tensor(g) then B.fail("TypeError", "grad: expected a tensor or nil, got %s", B.type_name(g)) end
  B.check(C.tm_tensor_grad_set(ptr(t), g and ptr(g) or nil))
end
---Replaces storage, shape, dtype and device; the tensor stays the same object, with its grad and hooks.
function setters.data(t, source)
  if not is_tensor(source) then B.fail("TypeError", "data: expected a tensor, got %s", B.type_name(source)) end
  B.check(C.tm_tensor_set_data(ptr(t), ptr(source)))
end

local read_only = { dtype = true, device = true, shape = true, ndim = true, is_leaf = true, retains_grad = true, version = true,
  T = true, grad_fn = true }

-- indexing ----------------------------------------------------------------------------------------------------------

local function bad_index(k)
  B.fail("TypeError", "index: expected a position, a list of ranges or an index tensor, got %s", B.type_name(k))
end

---The view that a list of positions and ranges describes, and the index tensors among them by dim (nil: none).
---{1, {2, 4}, {}}: position 1 of the first dim, positions 2 to 4 of the second, all of the third.
local function basic(t, list)
  local dim, tensors, count = 1, nil, table.maxn(list)
  for i = 1, count do
    local k = list[i]
    if type(k) == "number" then
      t = ops.select(t, dim, k)
    elseif is_tensor(k) then
      tensors = tensors or {}
      tensors[dim] = k
      dim = dim + (k.dtype == "bool" and math.max(k.ndim, 1) or 1)
    elseif type(k) == "table" and getmetatable(k) == nil then
      local n = table.maxn(k)
      if n > 3 then B.fail("TypeError", "index: a range has a first and a last position and a step, got %d numbers", n) end
      if n > 0 then t = ops.slice(t, dim, k[1], k[2] or k[1], k[3] or 1) end
      dim = dim + 1
    else
      bad_index(k)
    end
  end
  return t, tensors, dim - 1
end

local function sparse_list(tensors, last)
  local list, n = { n = 0 }, 0
  for d = 1, last do
    if tensors[d] then list[n + 1] = tensors[d] end
    n = n + 1
  end
  -- A mask over several dims stands for as many positions as it has dims, but is one entry of the list.
  local packed, at = { n = 0 }, 1
  while at <= n do
    packed.n = packed.n + 1
    packed[packed.n] = list[at]
    at = at + (list[at] and list[at].dtype == "bool" and math.max(list[at].ndim, 1) or 1)
  end
  return packed
end

local function get(t, k)
  if type(k) == "number" then return ops.select(t, 1, k) end
  if is_tensor(k) then return ops.index(t, { k, n = 1 }) end
  if type(k) ~= "table" then bad_index(k) end
  local view, tensors, last = basic(t, k)
  if tensors then return ops.index(view, sparse_list(tensors, last)) end
  return view
end

local function as_source(v, like)
  if type(v) == "number" or is_tensor(v) then return v end
  if type(v) == "boolean" then return v and 1 or 0 end
  if type(v) == "table" then return Tensor.from_table(v, { dtype = like.dtype, device = like.device }) end
  B.fail("TypeError", "index assignment: expected a tensor, a number or a table of numbers, got %s", B.type_name(v))
end

local function put_indexed(t, list, v)
  local mask = list[1]
  if type(v) == "number" then
    if list.n == 1 and mask.dtype == "bool" and mask.ndim == t.ndim then return ops.masked_fill_(t, mask, v) end
    v = Tensor.full({}, v, { dtype = t.dtype, device = t.device })
  end
  return ops.index_put_(t, v, list)
end

local function set(t, k, v)
  v = as_source(v, t)
  if is_tensor(k) then return put_indexed(t, { k, n = 1 }, v) end
  local view, tensors, last
  if type(k) == "number" then view = ops.select(t, 1, k)
  elseif type(k) ~= "table" then bad_index(k)
  else view, tensors, last = basic(t, k) end
  if tensors then return put_indexed(view, sparse_list(tensors, last), v) end
  ops.copy_(view, v)
end

-- metatable ----------------------------------------------------------------------------------------------------------

function mt.__index(t, k)
  local method = Tensor[k]
  if method ~= nil then return method end
  if type(k) ~= "string" then return get(t, k) end
  local getter = getters[k]
  if getter then return getter(t) end
  local row = ops.rows[k] or ops.rows[k:sub(1, -2)]
  if row and not row.hidden then
    method = ops.find(k)
    Tensor[k] = method
    return method
  end
  local class = B.class_of and B.class_of(t)
  if class then return class[k] end
end

function mt.__newindex(t, k, v)
  if type(k) == "string" then
    local setter = setters[k]
    if setter then return setter(t, v) end
    if read_only[k] then B.fail("AttributeError", "%s of a tensor cannot be assigned", k) end
    rawset(t, k, v)
  else
    set(t, k, v)
  end
end

mt.__add, mt.__sub, mt.__mul, mt.__div, mt.__pow = ops.add, ops.sub, ops.mul, ops.div, ops.pow
function mt.__unm(t) return ops.neg(t) end
function mt.__tostring(t) return t:format() end
-- Fixed parameters and no JIT (docs/luajit.md, 3).
function mt.__concat(a, b) return tostring(a) .. tostring(b) end
if jit then jit.off(mt.__concat) end
---For builds whose # honours it; elsewhere use t:len().
function mt.__len(t) return t:len() end

-- shape and data --------------------------------------------------------------------------------------------------------

---A method that gives a number for each dim: all as a list, or that of one dim.
local function by_dim(what, read)
  return function(self, dim)
    local p = ptr(self)
    local n = C.tm_tensor_ndim(p)
    if dim ~= nil then
      if type(dim) ~= "number" or dim % 1 ~= 0 or dim == 0 or dim > n or dim < -n then
        B.fail("IndexError", "%s: dim %s, expected 1 to %d or -%d to -1 (dims count from 1)", what, tostring(dim), n, n)
      end
      return tonumber(read(p, dim > 0 and dim - 1 or dim))
    end
    local list = {}
    for i = 1, n do list[i] = tonumber(read(p, i - 1)) end
    return list
  end
end

---Sizes of all dims as a list, or of one dim.
Tensor.size = by_dim("size", function(p, i) return C.tm_tensor_size(p, i) end)
---Strides in elements.
Tensor.stride = by_dim("stride", function(p, i) return C.tm_tensor_stride(p, i) end)

function Tensor:dim() return C.tm_tensor_ndim(ptr(self)) end
function Tensor:numel() return tonumber(C.tm_tensor_numel(ptr(self))) end
function Tensor:element_size() return C.tm_dtype_size(C.tm_tensor_dtype(ptr(self))) end
function Tensor:storage_offset() return tonumber(C.tm_tensor_offset(ptr(self))) end
function Tensor:storage_id() return tonumber(C.tm_tensor_storage_id(ptr(self))) end
function Tensor:is_contiguous() return C.tm_tensor_is_contiguous(ptr(self)) ~= 0 end
function Tensor:is_floating_point() return C.tm_dtype_is_float(C.tm_tensor_dtype(ptr(self))) ~= 0 end
function Tensor:is_inference() return C.tm_tensor_is_inference(ptr(self)) ~= 0 end

---Size of the first dim.
function Tensor:len()
  local n = C.tm_tensor_size(ptr(self), 0)
  if n < 0 then B.fail("TypeError", "len: a 0-dim tensor has no length") end
  return tonumber(n)
end

---Address of the first element as void*; NULL for no elements. Not valid after a conversion of the tensor.
function Tensor:data_ptr() return C.tm_tensor_data(ptr(self)) end

local number = ffi.new "double[1]"
local number_i64 = ffi.new "int64_t[1]"

local function one_element(t, what)
  local p = ptr(t)
  local n = tonumber(C.tm_tensor_numel(p))
  if n ~= 1 then B.fail("RuntimeError", "%s: a tensor of %d elements has no single value", what, n) end
  return p
end

---The value of a tensor with one element, as a number (a boolean for bool).
function Tensor:item()
  local p = one_element(self, "item")
  B.check(C.tm_tensor_get(p, 0, number))
  if C.tm_tensor_dtype(p) == C.TM_BOOL then return number[0] ~= 0 end
  return number[0]
end

---The value as an int64 cdata, exact beyond 2^53.
function Tensor:item_i64()
  B.check(C.tm_tensor_get_i64(one_element(self, "item_i64"), 0, number_i64))
  return number_i64[0]
end

---Nested Lua tables of numbers (booleans for bool); a number for a 0-dim tensor.
function Tensor:tolist()
  local p, sizes = ptr(self), self:size()
  local n = self:numel()
  local values = ffi.new("double[?]", math.max(n, 1))
  B.check(C.tm_tensor_read(p, 0, n, values))
  local is_bool, at = C.tm_tensor_dtype(p) == C.TM_BOOL, 0
  local function build(d)
    if d > #sizes then
      local v = values[at]
      at = at + 1
      if is_bool then return v ~= 0 end
      return v
    end
    local list = {}
    for i = 1, sizes[d] do list[i] = build(d + 1) end
    return list
  end
  return build(1)
end
Tensor.totable = Tensor.tolist

local print_options = { precision = 4, threshold = 1000, edgeitems = 3, linewidth = 80 }

---Text as print shows it.
---@param opts? {precision?: integer, threshold?: integer, edgeitems?: integer, linewidth?: integer}
function Tensor:format(opts)
  local class = B.class_of and C.tm_tensor_marks(ptr(self)) >= C.TM_MARK_WRAPPER and B.class_of(self)
  if class then return class.describe(self) end
  opts = setmetatable(opts or {}, { __index = print_options })
  local s = C.tm_tensor_format(ptr(self), opts.precision, opts.threshold, opts.edgeitems, opts.linewidth)
  if s == nil then B.raise() end
  local text = ffi.string(s)
  C.tm_string_free(s)
  if rawget(self, "_parameter") then return "Parameter containing:\n" .. text end
  return text
end

---Frees the tensor's memory now (what other tensors and the graph share stays). Any later use is an error.
function Tensor:release()
  local h = rawget(self, "_h")
  B.check(C.tm_handles_release(B.handles, h))
  B.reg[h % 4294967296] = nil
end

-- conversions --------------------------------------------------------------------------------------------------------------

local DTYPES = { "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool" }

local function looks_like_dtype(s) return type(s) == "string" and (B.dtype_code[s] or C.tm_dtype_find(s) >= 0) end

---t:to("float64"), t:to("cuda"), t:to("cuda", "float16"), t:to(other), t:to{dtype=, device=, copy=}. The tensor itself
---when nothing changes (unless copy).
function Tensor:to(a, b)
  local dtype, device, copy
  if is_tensor(a) then
    dtype, device = a.dtype, a.device
  elseif type(a) == "table" then
    for k in pairs(a) do
      if k ~= "dtype" and k ~= "device" and k ~= "copy" then
        B.fail("TypeError", "to: unknown option %s; known: dtype, device, copy", tostring(k))
      end
    end
    dtype, device, copy = a.dtype, a.device, a.copy
  elseif looks_like_dtype(a) then
    dtype = a
    if b ~= nil then B.fail("TypeError", "to: device first, then dtype, as in to(\"cpu\", \"float32\")") end
  elseif a ~= nil or b ~= nil then
    device, dtype = a, b
  end
  local p = ptr(self)
  local want, where = B.dtype(dtype), B.device(device)
  if not copy and (want < 0 or want == C.tm_tensor_dtype(p)) and (where < 0 or where == C.tm_tensor_device(p)) then return self end
  return ops.cast(self, dtype, device)
end

for name, dtype in pairs { float = "float32", double = "float64", half = "float16", bfloat16 = "bfloat16", int = "int32",
  long = "int64", short = "int16", char = "int8", byte = "uint8", bool = "bool" } do
  Tensor[name] = function(t) return t:to(dtype) end
end

function Tensor:cpu() return self:to "cpu" end
function Tensor:cuda(index)
  if index ~= nil and type(index) ~= "number" then B.fail("TypeError", "cuda: index must be a number, got %s", B.type_name(index)) end
  return self:to(index and "cuda:" .. index or "cuda")
end
function Tensor:type_as(other)
  B.need_tensor("type_as", "other", other)
  return self:to(other.dtype)
end

---The tensor itself if its elements lie in row-major order without gaps, else a copy that does.
function Tensor:contiguous()
  if self:is_contiguous() then return self end
  return ops.clone(self, true)
end

-- shapes -----------------------------------------------------------------------------------------------------------------------

---Matrix transposed; 0-dim and 1-D tensors as they are.
function Tensor:t()
  local n = C.tm_tensor_ndim(ptr(self))
  if n > 2 then B.fail("RuntimeError", "t: expected at most 2 dims, got %d; use transpose or permute", n) end
  return ops.transpose(self, 1, n == 2 and 2 or 1)
end

for _, name in ipairs { "view", "reshape", "expand" } do
  Tensor[name .. "_as"] = function(self, other)
    B.need_tensor(name .. "_as", "other", other)
    return ops[name](self, other:size())
  end
end

---A dim that may count from the end as one from 1; `name`: what its error calls it.
local function positive_dim(t, dim, what, name)
  local n = math.max(C.tm_tensor_ndim(ptr(t)), 1)
  if type(dim) ~= "number" or dim % 1 ~= 0 or dim == 0 or dim > n or dim < -n then
    B.fail("IndexError", "%s: %s %s, expected 1 to %d or -%d to -1 (dims count from 1)", what, name or "dim", tostring(dim), n, n)
  end
  return dim > 0 and dim or dim + n + 1
end

---Dims first..last joined into one.
function Tensor:flatten(first, last)
  local sizes, n = self:size(), C.tm_tensor_ndim(ptr(self))
  if n == 0 then return ops.reshape(self, 1) end
  first, last = positive_dim(self, first or 1, "flatten", "first is"), positive_dim(self, last or -1, "flatten", "last is")
  if first > last then B.fail("RuntimeError", "flatten: first dim %d comes after last dim %d", first, last) end
  local to, joined = {}, 1
  for d = 1, n do
    if d < first or d > last then to[#to + 1] = sizes[d] else
      joined = joined * sizes[d]
      if d == last then to[#to + 1] = joined end
    end
  end
  return ops.reshape(self, to)
end

---Views of `size` positions of dim each (the last may be smaller), or of the sizes in a list.
function Tensor:split(size, dim)
  dim = positive_dim(self, dim or 1, "split")
  local n, parts, start = self:size(dim), {}, 1
  if type(size) == "table" then
    local sum = 0
    for _, s in ipairs(size) do sum = sum + s end
    if sum ~= n then B.fail("RuntimeError", "split: sizes add up to %d, expected %d, the size of dim %d", sum, n, dim) end
    for i, s in ipairs(size) do
      parts[i] = ops.narrow(self, dim, start, s)
      start = start + s
    end
    return parts
  end
  if type(size) ~= "number" or size < 1 and not (n == 0 and size == 0) then
    B.fail("ValueError", "split: size %s, expected a positive number or a list of sizes", tostring(size))
  end
  repeat
    parts[#parts + 1] = ops.narrow(self, dim, start, math.min(size, n - start + 1))
    start = start + size
  until start > n
  return parts
end

---At most `chunks` views of equal size along dim (the last may be smaller).
function Tensor:chunk(chunks, dim)
  if type(chunks) ~= "number" or chunks < 1 then B.fail("ValueError", "chunk: expected a positive number, got %s", tostring(chunks)) end
  dim = positive_dim(self, dim or 1, "chunk")
  return self:split(math.max(math.ceil(self:size(dim) / chunks), 1), dim)
end

---Views of the positions of dim, without it.
function Tensor:unbind(dim)
  dim = positive_dim(self, dim or 1, "unbind")
  local parts = {}
  for i = 1, self:size(dim) do parts[i] = ops.select(self, dim, i) end
  return parts
end

-- maths with more than one form ----------------------------------------------------------------------------------------------

---Largest element; with a dim: the largest along it, and its positions. max(other) is maximum.
function Tensor:max(dim, keepdim)
  if dim == nil then return ops.amax(self) end
  if is_tensor(dim) then return ops.maximum(self, dim) end
  return ops.max(self, dim, keepdim)
end

---Smallest element; with a dim: the smallest along it, and its positions. min(other) is minimum.
function Tensor:min(dim, keepdim)
  if dim == nil then return ops.amin(self) end
  if is_tensor(dim) then return ops.minimum(self, dim) end
  return ops.min(self, dim, keepdim)
end

local function of_ndim(t, n, what, which)
  if not is_tensor(t) then B.fail("TypeError", "%s: %s must be a tensor, got %s", what, which, B.type_name(t)) end
  local have = C.tm_tensor_ndim(ptr(t))
  if have ~= n then B.fail("RuntimeError", "%s: %s has %d dims, expected %d", what, which, have, n) end
end

---(n, k) by (k, m).
function Tensor:mm(b)
  of_ndim(self, 2, "mm", "a")
  of_ndim(b, 2, "mm", "b")
  return ops.matmul(self, b)
end

---(batch, n, k) by (batch, k, m).
function Tensor:bmm(b)
  of_ndim(self, 3, "bmm", "a")
  of_ndim(b, 3, "bmm", "b")
  return ops.matmul(self, b)
end

---condition:where(a, b) and a:where(condition, b).
function Tensor:where(a, b)
  if is_tensor(a) and a.dtype == "bool" and self.dtype ~= "bool" then return ops.where(a, self, b) end
  return ops.where(self, a, b)
end

function Tensor:masked_select(mask) return ops.index(self, { mask, n = 1 }) end
function Tensor:zero_() return ops.fill_(self, 0) end
Tensor.clip, Tensor.negative, Tensor.true_divide = ops.clamp, ops.neg, ops.div
function Tensor:rsub(other) return ops.sub(other, self) end
function Tensor:square() return ops.mul(self, self) end
function Tensor:std(dim, keepdim) return ops.sqrt(self:var(dim, keepdim)) end
---Variance with Bessel's correction, n - 1.
function Tensor:var(dim, keepdim)
  local centred = ops.sub(self, ops.mean(self, dim, true))
  local sum = ops.sum(ops.mul(centred, centred), dim, keepdim or false)
  return ops.div(sum, self:numel() / sum:numel() - 1)
end

---Fills with 1 with probability p, else 0.
function Tensor:bernoulli_(p)
  if is_tensor(p) then return ops.copy_(self, ops.bernoulli(p:expand_as(self))) end
  return ops.copy_(self, ops.bernoulli(Tensor.full(self:size(), p or 0.5, { dtype = "float32", device = self.device })))
end

---Same shape and all elements equal.
function Tensor:equal(other)
  B.need_tensor("equal", "other", other)
  local a, b = self:size(), other:size()
  if #a ~= #b then return false end
  for i = 1, #a do if a[i] ~= b[i] then return false end end
  return ops.all(ops.eq(self, other)):item()
end

---All |a - b| <= atol + rtol * |b|; equal infinities agree, NaN agrees with NaN only if asked.
---@param opts? {rtol?: number, atol?: number, equal_nan?: boolean}
function Tensor:allclose(other, opts)
  B.need_tensor("allclose", "other", other)
  opts = opts or {}
  local a, b = self:double(), other:double()
  local near = ops.le(ops.abs(a - b), ops.abs(b) * (opts.rtol or 1e-5) + (opts.atol or 1e-8))
  near = ops.logical_or(ops.logical_and(near, ops.isfinite(b)), ops.eq(a, b))
  if opts.equal_nan then near = ops.logical_or(near, ops.logical_and(ops.isnan(a), ops.isnan(b))) end
  return ops.all(near):item()
end

-- creation -------------------------------------------------------------------------------------------------------------------------

local default_device, default_dtype = "cpu", "float32"

---Device of new tensors for which none is given.
function Tensor.set_default_device(name)
  if name == nil then B.fail("TypeError", "set_default_device: expected a device such as \"cpu\", got nil") end
  B.device(name)
  default_device = name
end
function Tensor.get_default_device() return default_device end

---Floating dtype of new tensors for which none is given.
function Tensor.set_default_dtype(name)
  local code = B.dtype(name)
  if C.tm_dtype_is_float(code) == 0 then B.fail("TypeError", "set_default_dtype: %s is no floating dtype", name) end
  C.tm_default_dtype_set(code)
  default_dtype = B.dtype_name[code]
end
function Tensor.get_default_dtype() return default_dtype end

local CREATE = { dtype = true, device = true, requires_grad = true, generator = true }

local function create_options(opts, what)
  if opts == nil then return nil, default_device end
  if type(opts) ~= "table" then B.fail("TypeError", "%s: expected a table of options last, got %s", what, B.type_name(opts)) end
  for k in pairs(opts) do
    if not CREATE[k] then B.fail("TypeError", "%s: unknown option %s; known: dtype, device, requires_grad, generator", what,
      tostring(k)) end
  end
  return opts.dtype, opts.device or default_device
end

local function finish(t, opts)
  if opts and opts.requires_grad then t.requires_grad = true end
  return t
end

---Sizes and options of zeros(2, 3), zeros({2, 3}), zeros(2, 3, {dtype = ...}), zeros(): a list, and the options.
local function shape_and_options(what, ...)
  local n = select("#", ...)
  local first, last = ..., (select(n > 0 and n or 1, ...))
  if type(first) == "table" and not is_tensor(first) and (first[1] ~= nil or next(first) == nil) then
    local _, second = ...
    return first, second
  end
  local opts
  if type(last) == "table" then
    opts = last
    n = n - 1
  end
  local sizes = { ... }
  sizes[n + 1] = nil
  for i = 1, n do
    if type(sizes[i]) ~= "number" then B.fail("TypeError", "%s: size %d must be a number, got %s", what, i, B.type_name(sizes[i])) end
  end
  return sizes, opts
end

local function with_generator(opts, f, ...)
  if not (opts and opts.generator) then return f(...) end
  local g = opts.generator
  if type(g) ~= "table" or not rawget(g, "_p") then B.fail("TypeError", "generator: expected a Generator, got %s", B.type_name(g)) end
  B.generator = g._p
  local ok, t = pcall(f, ...)
  B.generator = nil
  if not ok then error(t, 0) end
  return t
end

local function creator(name, make)
  Tensor[name] = function(...)
    local sizes, opts = shape_and_options(name, ...)
    local dtype, device = create_options(opts, name)
    return finish(make(sizes, dtype, device, opts), opts)
  end
end

creator("empty", function(sizes, dtype, device) return ops.empty(sizes, dtype, device) end)
creator("zeros", function(sizes, dtype, device) return ops.full(sizes, 0, dtype, device) end)
creator("ones", function(sizes, dtype, device) return ops.full(sizes, 1, dtype, device) end)
creator("rand", function(sizes, dtype, device, opts) return with_generator(opts, ops.rand, sizes, dtype, device) end)
creator("randn", function(sizes, dtype, device, opts) return with_generator(opts, ops.randn, sizes, dtype, device) end)

---full({2, 3}, 7, opts)
function Tensor.full(sizes, value, opts)
  local dtype, device = create_options(opts, "full")
  if type(value) == "boolean" then value, dtype = value and 1 or 0, dtype or "bool" end
  return finish(ops.full(sizes, value, dtype, device), opts)
end

---arange(last), arange(first, last[, step]): up to but without last, as in PyTorch; these are values, not positions.
function Tensor.arange(a, b, c, d)
  local first, last, step, opts = a, b, c, d
  if type(b) ~= "number" then first, last, step, opts = 0, a, 1, b
  elseif type(c) ~= "number" then step, opts = 1, c end
  local dtype, device = create_options(opts, "arange")
  return finish(ops.arange(first, last, step, dtype, device), opts)
end

function Tensor.linspace(first, last, steps, opts)
  local dtype, device = create_options(opts, "linspace")
  return finish(ops.linspace(first, last, steps, dtype, device), opts)
end

---eye(n), eye(n, m)
function Tensor.eye(n, m, opts)
  if type(m) ~= "number" then m, opts = n, m end
  local dtype, device = create_options(opts, "eye")
  return finish(ops.eye(n, m, dtype, device), opts)
end

---Whole numbers of [low, high): randint(high, sizes), randint(low, high, sizes).
function Tensor.randint(low, high, sizes, opts)
  if type(high) == "table" then low, high, sizes, opts = 0, low, high, sizes end
  local dtype, device = create_options(opts, "randint")
  return with_generator(opts, ops.randint, low, high, sizes, dtype, device)
end

---The positions 1..n in random order.
function Tensor.randperm(n, opts)
  local dtype, device = create_options(opts, "randperm")
  return with_generator(opts, ops.randperm, n, dtype, device)
end

for _, name in ipairs { "empty", "zeros", "ones", "rand", "randn" } do
  Tensor[name .. "_like"] = function(t, opts)
    B.need_tensor(name .. "_like", "t", t)
    opts = opts or {}
    return Tensor[name](t:size(), { dtype = opts.dtype or t.dtype, device = opts.device or t.device,
      requires_grad = opts.requires_grad, generator = opts.generator })
  end
end
function Tensor.full_like(t, value, opts)
  B.need_tensor("full_like", "t", t)
  opts = opts or {}
  return Tensor.full(t:size(), value, { dtype = opts.dtype or t.dtype, device = opts.device or t.device,
    requires_grad = opts.requires_grad })
end
function Tensor:new_zeros(sizes) return Tensor.zeros(sizes, { dtype = self.dtype, device = self.device }) end

local function path_text(path) return path == "" and "the table" or "element " .. path end

---A tensor from nested tables of numbers or booleans, a number or a boolean. Whole numbers give the default float
---dtype too, as all Lua numbers do; booleans give bool.
---@param values number|boolean|table
---@param opts? {dtype?: string, device?: string, requires_grad?: boolean}
function Tensor.from_table(values, opts)
  local dtype, device = create_options(opts, "tensor")
  local sizes, v = {}, values
  while type(v) == "table" do
    if is_tensor(v) then B.fail("TypeError", "tensor: a tensor inside a table; use stack or cat") end
    sizes[#sizes + 1] = #v
    if #sizes > 8 then B.fail("ValueError", "tensor: tables nested more than 8 deep") end
    v = v[1]
  end
  local kind = type(v)
  if v ~= nil and kind ~= "number" and kind ~= "boolean" then
    B.fail("TypeError", "tensor: expected numbers or booleans, got a %s", kind)
  end
  if v == nil and #sizes == 0 then B.fail("TypeError", "tensor: expected a number, a boolean or a table, got nil") end
  local n = 1
  for i = 1, #sizes do n = n * sizes[i] end
  local data, at = ffi.new("double[?]", math.max(n, 1)), 0
  local function fill(t, d, path)
    if d > #sizes then
      if type(t) ~= kind then
        B.fail("TypeError", "tensor: %s is a %s, expected a %s", path_text(path), B.type_name(t), kind)
      end
      if kind == "boolean" then data[at] = t and 1 or 0 else data[at] = t end
      at = at + 1
      return
    end
    if type(t) ~= "table" or is_tensor(t) then
      B.fail("TypeError", "tensor: %s is a %s, expected a table of %d elements", path_text(path), B.type_name(t), sizes[d])
    end
    if #t ~= sizes[d] or table.maxn(t) ~= sizes[d] then
      B.fail("ValueError", "tensor: %s has %d elements, expected %d as in the first", path_text(path), table.maxn(t), sizes[d])
    end
    for i = 1, sizes[d] do fill(t[i], d + 1, path .. "[" .. i .. "]") end
  end
  fill(values, 1, "")
  if dtype == nil then dtype = kind == "boolean" and "bool" or default_dtype end
  local real = ops.empty(sizes, dtype, "cpu")
  B.check(C.tm_tensor_fill(ptr(real), data, n))
  if device ~= "cpu" then real = ops.cast(real, nil, device) end
  return finish(real, opts)
end

---A tensor over foreign memory (an ffi array or pointer), not copied. `owner` (default: the array itself) is kept
---alive as long as a tensor uses it through this one; strides in elements.
---@param data ffi.cdata*
---@param sizes integer[]
---@param opts? {dtype?: string, strides?: integer[], owner?: any}
function Tensor.from_blob(data, sizes, opts)
  opts = opts or {}
  if type(data) ~= "cdata" then B.fail("TypeError", "from_blob: expected an ffi array or pointer, got %s", B.type_name(data)) end
  if type(sizes) ~= "table" then B.fail("TypeError", "from_blob: expected a list of sizes, got %s", B.type_name(sizes)) end
  local n = #sizes
  if n > 8 then B.fail("ValueError", "from_blob: %d dims, at most 8", n) end
  for i = 1, n do
    if type(sizes[i]) ~= "number" then B.fail("TypeError", "from_blob: size %d must be a number, got %s", i, B.type_name(sizes[i])) end
  end
  local strides
  for i = 1, n do shape_size[i - 1] = sizes[i] end
  if opts.strides then
    if #opts.strides ~= n then B.fail("ValueError", "from_blob: %d strides for %d dims", #opts.strides, n) end
    strides = ffi.new "int64_t[8]"
    for i = 1, n do strides[i - 1] = opts.strides[i] end
  end
  local dtype = B.dtype(opts.dtype or default_dtype)
  local have, elements, last = ffi.sizeof(data), 1, 1 -- last: one past the furthest element
  for i = 1, n do
    elements = elements * sizes[i]
    if strides then last = last + (sizes[i] - 1) * opts.strides[i] end
  end
  local need = (elements == 0 and 0 or strides and last or elements) * C.tm_dtype_size(dtype)
  local is_array = tostring(ffi.typeof(data)):find "%["
  if is_array and have and need > have then
    B.fail("ValueError", "from_blob: the array holds %d bytes, expected %d for the shape", have, need)
  end
  -- Views share the storage and may outlive this table, so the owner is kept until C buries its number.
  local id = tonumber(C.tm_id_new())
  local p = C.tm_tensor_from_blob(ffi.cast("void *", data), n, shape_size, strides, dtype, C.tm_id_bury, ffi.cast("void *", id))
  if p == nil then B.raise() end
  B.kept[id] = opts.owner or data
  return B.wrap(p)
end

Tensor.is_tensor = is_tensor
Tensor.DTYPES = DTYPES
return Tensor
