---Bad input: each kind of it is an error object with the operator's name, what was seen and what was expected, that
---points at the user's line.

local H = require "spec.helper"
local tm = require "tmod"
local Error = require "tmod.errors"
local ops, F = tm.ops, tm.nn.functional
local samples = require "spec.ops_samples"
local raises = H.raises

local function line() return debug.getinfo(2, "l").currentline end

---Checks the error object that fn raises: kind, name, pattern, and that it points at this line of this file.
local function points(at, kind, pattern, fn)
  local err = raises(fn, kind, pattern)
  assert.equal("spec/errors_spec.lua:" .. at, err.where)
  return err
end

describe("an error object", function()
  local e = select(2, pcall(function() tm.ones(2):view(3) end))

  it("has kind, message and where, and reads as the usual string", function()
    assert.equal("RuntimeError", e.kind)
    assert.equal("view: shape (3,) does not hold the 2 elements of float32 (2,)", e.message)
    assert.truthy(e.where:find "^spec/errors_spec.lua:%d+$")
    assert.equal(e.where .. ": " .. e.message, tostring(e))
    assert.equal(tostring(e) .. "!", e .. "!")
    assert.equal("!" .. tostring(e), "!" .. e)
    assert.truthy(e:find "view")
    assert.equal("view", e:match ": (%a+):")
    assert.equal(#tostring(e), e:len())
    assert.is_true(Error.is(e))
    assert.is_true(Error.is(e, "RuntimeError"))
    assert.is_false(Error.is(e, "TypeError"))
    assert.is_false(Error.is "text")
  end)

  it("passes through error, pcall and coroutines unchanged", function()
    local ok, again = pcall(error, e)
    assert.is_false(ok)
    assert.is_true(rawequal(e, again))
    local co = coroutine.create(function() tm.ones(2):view(3) end)
    local _, from_co = coroutine.resume(co)
    assert.equal("RuntimeError", from_co.kind)
    assert.truthy(from_co.where:find "spec/errors_spec.lua")
  end)

  it("shows its cause", function()
    local with = Error.new("ValueError", "outer", e)
    assert.truthy(tostring(with):find("outer\n  caused by: " .. tostring(e), 1, true))
  end)

  it("points at the line that called, through any depth of the library", function()
    local x = tm.ones(2)
    local at
    points(line(), "RuntimeError", "add", function() local _ = x + tm.ones(3) end)
    points(line(), "RuntimeError", "cross_entropy", function() F.cross_entropy(tm.tensor(1), x) end)
    points(line(), "RuntimeError", "copy", function() x[{}] = tm.ones(3) end)
    local function user(t)
      at = line() local y = t:view(7)
      return y
    end
    local err = raises(function() user(x) end, "RuntimeError", "view")
    assert.equal("spec/errors_spec.lua:" .. at, err.where)
    err = raises(function() tm.no_grad(function() user(x) end) end, "RuntimeError", "view")
    assert.equal("spec/errors_spec.lua:" .. at, err.where)
  end)

  it("points at the right line from compiled code", function()
    local x, y, at = tm.ones(2), tm.ones(3), nil
    local function run(other)
      local sum = x
      for _ = 1, 300 do
        sum = sum + x
      end
      at = line() + 1
      sum = sum + other
      return sum
    end
    for _ = 1, 20 do run(x) end
    local err = raises(function() run(y) end, "RuntimeError", "add: b is float32 %(3,%), which does not broadcast with shape %(2,%)")
    assert.equal("spec/errors_spec.lua:" .. at, err.where)
  end)

  it("lets work go on", function()
    for _ = 1, 100 do pcall(function() return tm.ones(2) + tm.ones(3) end) end
    assert.same({ 2, 2 }, (tm.ones(2) + 1):tolist())
  end)
end)

-- every row, every argument ---------------------------------------------------------------------------------------------

---Real arguments for a row, from its first sample.
local function valid(row)
  local sample = samples.rows[row.name][1]
  local args, kinds = { n = table.maxn(sample) }, ops.args(row)
  local function real(d)
    if not samples.is(d) then return d end
    if d.kind == "nil" or d.kind == "DT" or d.kind == "DEV" then return nil end
    if d.kind == "I" or d.kind == "J" then return tm.ones(d.shape, { dtype = "int64" }) end
    if d.kind == "M" then return tm.ones(d.shape, { dtype = "bool" }) end
    return tm.full(d.shape, 0.5)
  end
  for i = 1, args.n do
    local d = sample[i]
    if kinds[i].type == "tensors" then
      local list = {}
      for k = 1, table.maxn(d) do list[k] = real(d[k]) end
      args[i] = list
    else
      args[i] = real(d)
    end
  end
  return args
end

local function function_of(row)
  if row.name:find "_step$" then return ops.find(row.name) end
  return ops.find(row.mutates and row.name .. "_" or row.name)
end

local T, V, IX = "TypeError", "ValueError", "IndexError"
local nothing = {}

---Wrong values for an argument of each type, with the kinds of error that they may give.
local WRONG = {
  tensor = { { nothing, T }, { 5, T }, { "x", T }, { true, T }, { {}, T }, { print, T }, { "released", "RuntimeError" } },
  ["tensor?"] = { { 5, T }, { "x", T }, { "released", "RuntimeError" } },
  operand = { { nothing, T }, { "x", T }, { true, T }, { {}, T }, { "released", "RuntimeError" } },
  tensors = { { nothing, T }, { 5, T }, { "x", T }, { { 5 }, T }, { { "x" }, T }, { "a tensor", T },
    { "list of released", "RuntimeError" } },
  num = { { "x", T }, { true, T }, { print, T }, { "a tensor", T } },
  ["num?"] = { { "x", T }, { true, T }, { "a tensor", T } },
  int = { { "x", T }, { true, T }, { 1.5, T }, { 0 / 0, T }, { 1 / 0, T } },
  bool = { { 1, T }, { "true", T }, { "a tensor", T } },
  dim = { { "x", T }, { true, T }, { 1.5, T }, { 0 / 0, T }, { 0, IX }, { 99, IX }, { -99, IX } },
  ["dim?"] = { { "x", T }, { true, T }, { 1.5, T }, { 0, IX }, { 99, IX } },
  newdim = { { "x", T }, { 1.5, T }, { 0, IX }, { 99, IX }, { -99, IX } },
  ["dims?"] = { { "x", T }, { true, T }, { { "x" }, T }, { { 1.5 }, T }, { 0, IX }, { { 1, 99 }, IX },
    { { 1, 1 }, "RuntimeError" }, { "a tensor", T } },
  dims = { { "x", T }, { { "x" }, T }, { { 1.5 }, T }, { { 0 }, IX }, { { 99 }, IX } },
  index = { { "x", T }, { true, T }, { 1.5, T }, { 0 / 0, T }, { 0, IX }, { 99, IX }, { -99, IX } },
  shape = { { "x", T }, { true, T }, { { "x" }, T }, { { 1.5 }, T }, { { 0 / 0 }, T },
    { { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, V }, { "a tensor", T } },
  ints = { { "x", T }, { { "x" }, T }, { { 1.5 }, T } },
  ["dtype?"] = { { "float31", T }, { 5, T }, { true, T }, { "a tensor", T } },
  ["device?"] = { { "gpu", V }, { 5, T }, { true, T } },
  enum = { { "average", T }, { 5, T }, { true, T } },
}

local function value_of(v)
  if v == nothing then return nil end
  if v == "a tensor" then return tm.ones(2) end
  if v == "released" or v == "list of released" then
    local t = tm.ones(2)
    t:release()
    return v == "released" and t or { t }
  end
  return v
end

local function shown(v)
  if v == nothing then return "nil" end
  return type(v) == "table" and "{" .. tostring(v[1]) .. ", ...}" or tostring(v)
end

describe("wrong arguments", function()
  for _, name in ipairs(ops.names) do
    local row = ops.rows[name]
    it("of " .. name .. " are errors at the line of the call", function()
      local fn = function_of(row)
      for i, arg in ipairs(ops.args(row)) do
        for _, wrong in ipairs(WRONG[arg.type:match "^enum" or arg.type]) do
          local args = valid(row)
          args[i] = value_of(wrong[1])
          local n, at = math.max(args.n, i), nil
          local ok, err = pcall(function()
            at = line() + 1
            local y = fn(unpack(args, 1, n))
            return y
          end)
          local what = ("%s: %s = %s"):format(name, arg.name, shown(wrong[1]))
          if arg.default and wrong[1] == nothing then assert.is_true(ok, what)
          else
            assert.is_false(ok, what .. " is taken")
            assert.is_true(Error.is(err), what .. ": " .. tostring(err))
            assert.equal(wrong[2], err.kind, what .. ": " .. tostring(err))
            assert.equal("spec/errors_spec.lua:" .. at, err.where, what)
            local named = err.message:find(name, 1, true) or err.message:find "^dtype" or err.message:find "^device"
            assert.truthy(named, what .. ": " .. err.message)
          end
        end
      end
    end)
  end

  it("as unknown options are named, with the known ones", function()
    local x = tm.ones(2, 2)
    points(line(), T, "sum: unknown option dims; known here: dim, keepdim, dtype", function() x:sum { dims = 1 } end)
    points(line(), T, "softmax: unknown option axis; known here: dim", function() x:softmax { axis = 1 } end)
    points(line(), T, "add: unknown option beta; known here: alpha", function() x:add(x, { beta = 2 }) end)
    points(line(), T, "mse_loss: unknown option reduce; known: reduction", function() F.mse_loss(x, x, { reduce = true }) end)
    points(line(), T, "cross_entropy: unknown option smoothing", function() F.cross_entropy(x, x, { smoothing = 1 }) end)
    points(line(), T, "dropout: unknown option train", function() F.dropout(x, 0.5, { train = true }) end)
    assert.same({ { 2 }, { 2 } }, x:sum({ dim = 2, keepdim = true }):tolist())
    assert.same({ { 2 }, { 2 } }, x:sum(2, { keepdim = true }):tolist())
    points(line(), T, "sum: unknown option dim; known here: keepdim", function() x:sum(2, { dim = 1 }) end)
  end)
end)

describe("wrong shapes", function()
  local a, b, v = tm.ones(2, 3), tm.ones(4, 5), tm.ones(3)

  it("are both named, with what was expected", function()
    points(line(), "RuntimeError", "add: b is float32 %(4, 5%), which does not broadcast with shape %(2, 3%)", function() a:add(b) end)
    points(line(), "RuntimeError", "matmul: a is float32 %(2, 3%) and b is float32 %(4, 5%).*equal sizes", function() a:matmul(b) end)
    points(line(), "RuntimeError", "matmul.*at least one dim", function() a:matmul(tm.tensor(1)) end)
    points(line(), "RuntimeError", "addmm", function() v:addmm(a, b) end)
    points(line(), "RuntimeError", "linear: x is float32 %(2, 3%) and weight is float32 %(4, 5%)", function() F.linear(a, b) end)
    points(line(), "RuntimeError", "linear: .*bias", function() F.linear(a, tm.ones(5, 3), v) end)
    points(line(), "RuntimeError", "cat: tensor 1 is float32 %(2, 3%), tensor 2 is float32 %(4, 5%)", function() tm.cat({ a, b }) end)
    points(line(), "RuntimeError", "stack: tensor 1 is float32 %(2, 3%), tensor 2 is float32 %(3,%)", function() tm.stack({ a, v }) end)
    points(line(), "RuntimeError", "nll_loss: target is int64 %(3,%), expected shape %(2,%)", function() F.nll_loss(a, v:long()) end)
    points(line(), "RuntimeError", "mse_loss: x is float32 %(2, 3%), target is float32 %(4, 5%)", function() F.mse_loss(a, b) end)
    points(line(), "RuntimeError", "add_: the result has shape %(2, 3%), which does not fit.* %(3,%)", function() v:add_(a) end)
    points(line(), "RuntimeError", "index_add", function() a:index_add(1, v:long(), v) end)
    points(line(), "RuntimeError", "gather", function() a:gather(1, v:long()) end)
    points(line(), "RuntimeError", "amax: dim 1 of x, float32 %(0, 3%), has no elements", function() tm.ones(0, 3):amax(1) end)
    points(line(), "RuntimeError", "argmax: dim 1", function() tm.ones(0):argmax() end)
    points(line(), IX, "narrow: 5 positions from 1 on of dim 1 of float32 %(2, 3%), which has 2", function() a:narrow(1, 1, 5) end)
    points(line(), IX, "cat: dim is 3, expected 1 to 2", function() tm.cat({ a, a }, 3) end)
    points(line(), V, "cat: expected at least one tensor", function() tm.cat({}) end)
    points(line(), T, "cat: tensors%[2%] must be a tensor, got nil", function() tm.cat({ a, nil, a }) end)
  end)
end)

describe("wrong dtypes", function()
  local i, f = tm.ones(2, { dtype = "int64" }), tm.ones(2)

  it("are named, with what was expected", function()
    points(line(), "RuntimeError", "mean: x is int64 %(2,%), expected a floating dtype", function() i:mean() end)
    points(line(), "RuntimeError", "softmax: x is int64 %(2,%), expected a floating dtype", function() i:softmax() end)
    points(line(), "RuntimeError", "where: condition is float32 %(2,%), expected bool", function() tm.where(f, f, f) end)
    points(line(), "RuntimeError", "masked_fill: mask is float32 %(2,%), expected bool", function() f:masked_fill(f, 1) end)
    points(line(), "RuntimeError", "matmul: a is int64 %(2,%) and b is float32 %(2,%), expected equal dtypes", function() i:matmul(f) end)
    points(line(), "NotImplementedError", "neg: x is bool %(2,%)", function() i:bool():neg() end)
    points(line(), "NotImplementedError", "sub: a is bool %(2,%)", function() local _ = i:bool() - i end)
    points(line(), T, "exp_: the result is float32 and cannot be stored in x, int64 %(2,%)", function() i:exp_() end)
    points(line(), T, "div_: the result is float32", function() i:div_(2) end)
    points(line(), T, "mul_: the result is float32 and cannot be stored in x, int64", function() i:mul_(2.5) end)
    points(line(), T, "add_: the result is int64 and cannot be stored in x, bool", function() i:bool():add_(2) end)
    points(line(), "RuntimeError", "add: alpha is 0.5, expected a whole number for int64", function() i:add(i, 0.5) end)
    points(line(), V, "fill: value is inf, which int64 cannot hold", function() i:fill_(1 / 0) end)
    points(line(), V, "clamp: neither min nor max is given", function() f:clamp() end)
    points(line(), "RuntimeError", "nll_loss: target is float32 %(2,%), expected int64", function() F.nll_loss(tm.ones(2, 2), f) end)
  end)
end)

describe("wrong positions", function()
  it("are named with their range", function()
    local x, logp = tm.ones(2, 3), tm.ones(2, 3)
    local zero, four = tm.tensor({ 0, 1 }, { dtype = "int64" }), tm.tensor({ 1, 4 }, { dtype = "int64" })
    points(line(), IX, "nll_loss: .*0.*1 to 3", function() F.nll_loss(logp, zero) end)
    points(line(), IX, "nll_loss: .*4.*1 to 3", function() F.nll_loss(logp, four) end)
    points(line(), IX, "nll_loss: ", function() F.cross_entropy(logp, four) end)
    points(line(), IX, "index_select: .*0.*1 to 3", function() x:index_select(2, zero) end)
    points(line(), IX, "index_select: .*4.*1 to 3", function() x:index_select(2, four) end)
    points(line(), IX, "gather: .*4", function() x:gather(2, four:view(2, 1)) end)
    points(line(), IX, "scatter_add: .*0", function() x:scatter_add(2, zero:view(2, 1), tm.ones(2, 1)) end)
    points(line(), IX, "index: .*4", function() local _ = x[{ {}, four }] end)
    points(line(), IX, "index_put: .*0", function() x[zero] = 1 end)
    points(line(), IX, "sum: dim is 0; dims count from 1", function() x:sum(0) end)
    points(line(), IX, "sum: dim is 3, expected 1 to 2 or %-2 to %-1 for float32 %(2, 3%)", function() x:sum(3) end)
    points(line(), IX, "transpose: dim1 is 3", function() x:transpose(1, 3) end)
    assert.same({ { 1, 1, 1 }, { 1, 1, 1 } }, x:tolist()) -- a refused change changed nothing
  end)
end)

describe("wrong devices", function()
  it("are both named", function()
    local a, m = tm.ones(2), tm.ones(2, { device = "meta" })
    points(line(), "RuntimeError", "add: operands are on different devices: float32 %(2,%) on cpu, .* on meta", function() a:add(m) end)
    points(line(), "RuntimeError", "matmul: a is on cpu and b on meta", function() a:matmul(m) end)
    points(line(), "RuntimeError", "cat: tensor 1 is on cpu, tensor 2 on meta", function() tm.cat { a, m } end)
    points(line(), "RuntimeError", "add", function() a:add_(m) end)
    points(line(), "RuntimeError", "add", function() tm.tensor(1):add_(tm.tensor(1, { device = "meta" })) end)
    points(line(), "NotImplementedError", "copy_: source is float32 %(2,%) on meta", function() a:copy_(m) end)
    points(line(), "RuntimeError", "index", function() local _ = a[tm.ones(2, { device = "meta", dtype = "int64" })] end)
    points(line(), "NotImplementedError", "nonzero", function() m:nonzero() end)
    points(line(), "RuntimeError", 'device "cuda:1"', function() a:to "cuda:1" end)
    points(line(), V, 'device "tpu": expected cpu, meta, cuda or cuda:N', function() a:to("tpu", "float32") end)
  end)
end)

describe("released tensors", function()
  it("are refused everywhere", function()
    local t = tm.ones(2)
    t:release()
    points(line(), "RuntimeError", "exp: x has been released", function() t:exp() end)
    points(line(), "RuntimeError", "released", function() t:size() end)
    points(line(), "RuntimeError", "released", function() t:backward() end)
    points(line(), "RuntimeError", "released", function() tm.ones(2).data = t end)
    points(line(), "RuntimeError", "released", function() tm.ones(2).grad = t end)
    points(line(), "RuntimeError", "released", function() t:to "float64" end)
    points(line(), "RuntimeError", "released", function() local _ = t[1] end)
    points(line(), "RuntimeError", "released", function() tm.swap_tensors(t, tm.ones(2)) end)
    points(line(), T, '"a" is no tensor.*: the tensor has been released', function() tm.save({ a = t }, "/tmp/never.safetensors") end)
  end)
end)

describe("nil and other values where a tensor belongs", function()
  it("are refused by everything that takes tensors", function()
    local x = tm.ones(2)
    points(line(), T, "add: argument 2 %(b%) must be a tensor or number, got nil", function() local _ = x + nil end)
    points(line(), T, "mul: argument 1 %(a%) must be a tensor or number, got string", function() local _ = "a" * x end)
    points(line(), T, "matmul: argument 2 %(b%) must be a tensor, got nil", function() x:matmul() end)
    points(line(), T, "cross_entropy: target must be a tensor, got nil", function() F.cross_entropy(x) end)
    points(line(), T, "cross_entropy: x must be a tensor, got number", function() F.cross_entropy(1, x) end)
    points(line(), T, "exp: argument 1 %(x%) must be a tensor, got nil", function() tm.exp() end)
    points(line(), T, "expected a tensor, got nil", function() tm.id(nil) end)
    points(line(), T, "stack: argument 1 %(tensors%) must be a list of tensors, got tensor", function() tm.stack(x) end)
    points(line(), T, "linear: argument 2", function() F.linear(x) end)
    points(line(), T, "mm: b must be a tensor, got table", function() tm.ones(1, 1):mm {} end)
  end)
end)

describe("files that cannot be read or written", function()
  it("are told by name", function()
    local t, message = tm.load "/nowhere/at/all.safetensors"
    assert.is_nil(t)
    assert.truthy(tostring(message):find("/nowhere/at/all.safetensors", 1, true))
    points(line(), T, "load", function() tm.load(5) end)
    points(line(), "RuntimeError", "/nowhere/x", function() tm.save({ a = tm.ones(1) }, "/nowhere/x") end)
  end)
end)

describe("a device number that means none", function()
  it("is refused where a tensor is made", function()
    local B = require "tmod.ffi"
    for _, device in ipairs { -1, 77777 } do
      assert.is_true(B.C.tm_tensor_new(0, nil, B.C.TM_F32, device) == nil)
      assert.equal("tensor: no device " .. device, B.ffi.string(B.C.tm_last_error()))
    end
  end)
end)

describe("functions that are no operators", function()
  ---Calls f with each of these in turn: it may work or raise an error object, but no error of Lua's own.
  local function answers(name, f, ...)
    for _, v in ipairs { 1.5, "a", {}, true, tm.ones(2) } do
      local arguments = { ... }
      arguments[#arguments + 1] = v
      local ok, e = pcall(f, unpack(arguments))
      assert.is_true(ok or type(e) == "table", ("%s(%s): %s"):format(name, tostring(v), tostring(e)))
    end
    local ok, e = pcall(f, ...)
    assert.is_true(ok or type(e) == "table", ("%s(nil): %s"):format(name, tostring(e)))
  end

  it("answer values of a wrong type with error objects", function()
    local x = tm.ones(2, 3)
    for _, name in ipairs { "view_as", "reshape_as", "expand_as", "type_as", "equal", "allclose", "where", "mm", "bmm", "masked_select",
      "split", "chunk", "unbind", "flatten", "max", "min", "var", "to", "new_zeros", "register_hook", "backward", "cuda", "item" } do
      answers("tensor:" .. name, x[name], x)
    end
    for _, name in ipairs { "tensor", "zeros", "full", "rand", "randint", "randperm", "arange", "linspace", "eye", "empty_like",
      "full_like", "cat", "stack", "where", "from_blob", "no_grad", "enable_grad", "inference_mode", "Generator", "set_num_threads",
      "scope", "save", "swap_tensors", "id", "memory_stats", "keep", "set_default_dtype", "set_default_device", "quantize" } do
      answers("tm." .. name, tm[name])
    end
    assert.equal("cpu", tm.get_default_device())
    assert.equal("float32", tm.get_default_dtype())
    for _, name in ipairs { "Linear", "Dropout", "Sequential", "Embedding", "LayerNorm", "BatchNorm1d", "CrossEntropyLoss", "MSELoss",
      "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Parameter", "Buffer", "Softmax" } do
      answers("nn." .. name, tm.nn[name])
    end
    for _, name in ipairs { "relu", "dropout", "cross_entropy", "nll_loss", "mse_loss", "linear", "softmax", "one_hot", "layer_norm" } do
      answers("F." .. name, tm.nn.functional[name])
      answers("F." .. name, tm.nn.functional[name], x)
    end
  end)
end)
