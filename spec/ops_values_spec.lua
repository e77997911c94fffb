---Values, gradients and result dtypes of operators against PyTorch: figures in spec/golden/ops.lua, made by
---spec/golden/make_ops.py.

require "spec.helper"
local tm = require "tmod"
local ops, F = tm.ops, tm.nn.functional

local none = {}

local function T(d)
  local shape, values, dtype = unpack(d)
  if #values == 0 then return tm.zeros(shape, { dtype = dtype }) end
  return tm.tensor(values, { dtype = dtype }):view(shape)
end

local golden = require "spec.golden.ops"(T, none)

-- float32 results come from other orders of summation; everything else is float64 or exact.
local TOLERANCE = { float64 = 1e-12, float32 = 1e-6, float16 = 1e-3, bfloat16 = 1e-2 }

local functional = {
  ["F.layer_norm"] = function(x, weight, bias, count) return (ops.layer_norm(x, weight, bias, count)) end,
  ["F.nll_loss"] = function(x, target, weight, ignore, reduction)
    return F.nll_loss(x, target, { weight = weight, ignore_index = ignore, reduction = reduction })
  end,
  ["F.cross_entropy"] = function(x, target, weight, ignore, reduction, smoothing)
    return F.cross_entropy(x, target, { weight = weight, ignore_index = ignore, reduction = reduction, label_smoothing = smoothing })
  end,
}

---Absent arguments become nil, and tensors that have a gradient in the figures leaves.
local function prepare(args, wanted)
  local leaves = {}
  local function visit(list)
    local to = { n = #list }
    for i, a in ipairs(list) do
      if tm.is_tensor(a) then
        to[i] = a
        if a:is_floating_point() and wanted then
          to[i] = a:clone():requires_grad_()
          leaves[#leaves + 1] = to[i]
        end
      elseif a ~= none then
        to[i] = type(a) == "table" and visit(a) or a
      end
    end
    return to
  end
  return visit(args), leaves
end

local function same(expected, got, what)
  assert.equal(expected.dtype, got.dtype, what)
  assert.near_tensor(expected, got:detach(), TOLERANCE[expected.dtype] or 0)
end

local function check(case)
  local name, args, outs, grads = unpack(case)
  local given, leaves = prepare(args, #grads > 0)
  local results = { (functional[name] or ops[name])(unpack(given, 1, given.n)) }
  for i, expected in ipairs(outs) do same(expected, results[i], "result " .. i) end
  if #grads == 0 then return end
  local y = results[1]
  local dy = tm.linspace(0.5, 1.5, y:numel(), { dtype = "float64" }):view(y:size()):to(y.dtype)
  local got = tm.autograd.grad(y, leaves, { grad_outputs = dy, allow_unused = true })
  for i, expected in ipairs(grads) do
    if expected ~= none then same(expected, got[i], "gradient " .. i) end
  end
end

local function text(arg)
  if arg == none then return "nil" end
  if tm.is_tensor(arg) then return arg.dtype .. " (" .. table.concat(arg:size(), ", ") .. ")" end
  if type(arg) ~= "table" then return tostring(arg) end
  local list = {}
  for i, a in ipairs(arg) do list[i] = text(a) end
  return "{" .. table.concat(list, ", ") .. "}"
end

describe("values", function()
  local names, of = {}, {}
  for _, case in ipairs(golden.cases) do
    local name = case[1]
    if not of[name] then names[#names + 1], of[name] = name, {} end
    table.insert(of[name], case)
  end
  for _, name in ipairs(names) do
    it(("of %s are PyTorch's in %d cases"):format(name, #of[name]), function()
      for _, case in ipairs(of[name]) do
        local ok, err = pcall(check, case)
        if not ok then
          local why = type(err) == "table" and not err.where and err.message or err
          error(("%s%s: %s"):format(name, text(case[2]), tostring(why)), 0)
        end
      end
    end)
  end
end)

describe("optimizer updates", function()
  for i, case in ipairs(golden.updates) do
    local name, args, p, g, expected = unpack(case)
    it(("%s gives PyTorch's parameters after three steps (%d: %s)"):format(name, i, text(args)), function()
      local q = p:clone()
      local states = {}
      local count = name == "sgd_step" and (args[2] ~= 0 and 1 or 0) or args[7] and 3 or 2
      for k = 1, count do states[k] = tm.zeros_like(q) end
      for step = 1, 3 do
        local list = { q, g, unpack(states) }
        local rest = { unpack(args) }
        rest[#rest + 1] = name == "sgd_step" and step == 1 or name == "adam_step" and step or false
        local version = q.version
        ops[name](list, unpack(rest))
        assert.is_true(q.version > version, "the version counts the change")
      end
      assert.near_tensor(expected, q, 1e-12)
    end)
  end

  it("take many parameters of several sizes and dtypes at once", function()
    local list, expected = {}, {}
    for i = 1, 20 do list[i] = tm.full({ i * 7 }, i, { dtype = i % 2 == 0 and "float64" or "float32" }) end
    for i = 1, 20 do
      list[20 + i] = tm.ones_like(list[i])
      expected[i] = list[i] - 0.5
    end
    ops.sgd_step(list, 0.5, 0, 0, 0, false, false)
    for i = 1, 20 do assert.near_tensor(expected[i], list[i], 1e-6) end
  end)
end)

describe("result dtypes", function()
  it("of two tensors, and of a tensor and a 0-dim one, are PyTorch's", function()
    for _, case in ipairs(golden.promotion) do
      local a, b, both, zero = unpack(case)
      local x, y = tm.ones(2, { dtype = a }), tm.ones(2, { dtype = b })
      assert.equal(both, (x * y).dtype, a .. " * " .. b)
      assert.equal(zero, (x * y[1]).dtype, a .. " * 0-dim " .. b)
      assert.equal(zero, (y[1] * x).dtype, "0-dim " .. b .. " * " .. a)
    end
  end)

  it("of a tensor and a number are PyTorch's, a whole number being an integer", function()
    for dtype, expected in pairs(golden.numbers) do
      assert.equal(expected[1], (tm.ones(2, { dtype = dtype }) * 2).dtype)
      assert.equal(expected[2], (tm.ones(2, { dtype = dtype }) * 2.5).dtype)
      assert.equal(expected[1], (2 * tm.ones(2, { dtype = dtype })).dtype)
    end
  end)

  it("follow the default dtype", function()
    tm.set_default_dtype "float64"
    local ok, err = pcall(function()
      assert.equal("float64", tm.tensor({ 1 }).dtype)
      assert.equal("float64", tm.ones(2).dtype)
      assert.equal("float64", tm.ones(2, { dtype = "int64" }):exp().dtype)
      assert.equal("float64", (tm.ones(2, { dtype = "int64" }) * 2.5).dtype)
    end)
    tm.set_default_dtype "float32"
    assert(ok, err)
    assert.equal("float32", tm.tensor({ 1 }).dtype)
  end)
end)
