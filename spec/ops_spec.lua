---Every row of runtime/ops.h through every check that needs no knowledge of the row beyond its samples
---(ops_samples.lua): gradients against central differences, other strides, broadcasting, zero sizes, dtypes, the meta
---device, in-place forms, index tensors. Values against another implementation are in ops_values_spec.lua.

local H = require "spec.helper"
local tm = require "tmod"
local ops = tm.ops
local samples = require "spec.ops_samples"
local grad, is = tm.autograd.grad, samples.is

local FLOATS = { "float64", "float32", "float16", "bfloat16" }
local INTS = { "int8", "int16", "int32", "int64", "uint8" }
local DTYPES = { "float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool" }
local CLAIMS = { float = FLOATS, number = { unpack(FLOATS) }, all = DTYPES }
for _, d in ipairs(INTS) do table.insert(CLAIMS.number, d) end

-- A few units in the last place of each dtype; integers and bool must be exact.
local TOLERANCE = { float64 = 1e-13, float32 = 1e-6, float16 = 2e-3, bfloat16 = 1.6e-2 }

local REFUSALS = { TypeError = true, RuntimeError = true, NotImplementedError = true, ValueError = true }

local function is_float(dtype) return TOLERANCE[dtype] ~= nil end

-- building arguments -------------------------------------------------------------------------------------------------

---Numbers that depend on the place of the argument and of the element alone.
local function stream(seed)
  local state = seed * 7919 + 12345
  return function()
    state = (state * 16807) % 2147483647
    return state / 2147483647
  end
end

local function count(shape)
  local n = 1
  for _, s in ipairs(shape) do n = n * s end
  return n
end

local function number_of(kind, u, sign, dtype)
  local v = kind == "U" and 0.1 + 0.8 * u or 0.2 + 1.8 * u
  if kind == "X" and sign < 0.5 and dtype ~= "uint8" then v = -v end
  if dtype == "bool" then return v > 0 and 1 or 0 end
  if not is_float(dtype) then return v > 0 and math.ceil(2 * v) or math.floor(2 * v) end
  return v
end

---The same elements in a layout with gaps and reversed dims.
local function restrided(t)
  local sizes, n = t:size(), t.ndim
  if n == 0 then
    local line = tm.full({ 3 }, 99, { dtype = t.dtype, device = t.device })
    line[2] = t
    return line[2]
  end
  local base, dims = {}, {}
  for i = 1, n do
    base[i] = sizes[n + 1 - i] * (i == 1 and 2 or 1)
    dims[i] = n + 1 - i
  end
  local view = tm.full(base, t.dtype == "bool" and 1 or 99, { dtype = t.dtype, device = t.device })
  view = (base[1] > 0 and view:slice(1, 2, -1, 2) or view):permute(dims)
  return view:copy_(t)
end

local function zeroed(shape)
  local to, any = {}, false
  for i, s in ipairs(shape) do
    to[i] = s == 3 and 0 or s
    any = any or s == 3
  end
  return to, any
end

local NUMBERS, LEAVES = { X = true, P = true, U = true, W = true, K = true }, { X = true, P = true, U = true }
local function is_number_kind(d) return is(d) and NUMBERS[d.kind] ~= nil end
local function is_leaf_kind(d) return is(d) and LEAVES[d.kind] ~= nil end

---Sizes 3 and 4 made large enough for several threads and blocks, and odd.
local LARGE = { [3] = 211, [4] = 173 }
local function enlarged(shape)
  local to = {}
  for i, s in ipairs(shape) do to[i] = LARGE[s] or s end
  return to
end

---The values of a description of this shape, when there are too many for a Lua table.
local function many(d, shape, seed)
  local kind, g = d.kind, tm.Generator(seed)
  if kind == "J" then -- (row + 2 * place in the row) modulo n
    local n = LARGE[d.n] or d.n
    local rows = tm.arange(shape[1]):view(-1, 1) + tm.arange(count { unpack(shape, 2) }):mul(2)
    return (rows - (rows / n):long() * n + 1):view(shape)
  end
  local u, sign = tm.rand(shape, { dtype = "float64", generator = g }), tm.rand(shape, { dtype = "float64", generator = g })
  if kind == "I" then return (u * (LARGE[d.n] or d.n)):long() + 1 end
  if kind == "M" then return u:lt(0.6) end
  if kind == "B" then return (u * 255 - 127):to "int8" end
  if kind == "K" then return tm.full(shape, d.value, { dtype = "float64" }) end
  if kind == "U" then return u * 0.8 + 0.1 end
  u = u * 1.8 + 0.2
  return kind == "X" and tm.where(sign:lt(0.5), -u, u) or u
end

---The last steps of build: dtype, strides, device, history.
local function finish(t, d, how)
  local kind = d.kind
  local to = (kind == "I" or kind == "J") and (how.index or "int64") or kind == "M" and "bool" or kind == "B" and "int8"
    or how.dtype or "float64"
  t = t:to(to)
  if how.strided then t = restrided(t) end
  if how.device then t = t:to(how.device) end
  if how.grad and is_leaf_kind(d) and is_float(to) then t = t:detach():requires_grad_() end
  return t
end

---The tensor of a description. how: dtype, device, strided, zero, large, grad, index (dtype of index tensors), shape.
local function build(d, seed, how)
  local kind, shape = d.kind, how.shape or d.shape
  if kind == "nil" then return nil end
  if kind == "DT" then return how.dtype or "float64" end
  if kind == "DEV" then return how.device or "cpu" end
  if how.zero then shape = zeroed(shape) end
  local dtype = how.dtype or "float64"
  if how.large then return finish(many(d, enlarged(shape), seed), d, how) end
  local n, next_number, values = count(shape), stream(seed), {}
  for i = 1, n do
    local u, sign = next_number(), next_number()
    if kind == "I" then values[i] = how.position or math.floor(u * d.n) + 1
    elseif kind == "J" then
      local row = count { unpack(shape, 2) }
      values[i] = how.position or (math.floor((i - 1) / row) + 2 * ((i - 1) % row)) % d.n + 1
    elseif kind == "M" then values[i] = u < 0.6
    elseif kind == "B" then values[i] = math.floor(u * 255) - 127
    elseif kind == "K" then values[i] = d.value
    else values[i] = number_of(kind, u, sign, dtype) end
  end
  local t = n > 0 and tm.tensor(values, { dtype = "float64" }):view(shape) or tm.empty(shape, { dtype = "float64" })
  if kind == "M" then t = tm.tensor(values):view(shape) end
  return finish(t, d, how)
end

---All arguments of a sample; with the numbers that can be differentiated, in order, and where each stands.
local function arguments(row, sample, how)
  how = how or {}
  local args, leaves, places, kinds = { n = table.maxn(sample) }, {}, {}, ops.args(row)
  local seed = 0
  for i = 1, args.n do
    local d = sample[i]
    if is(d) then
      seed = seed + 1
      how.shape = how.shapes and how.shapes[i]
      args[i] = build(d, seed, how)
      how.shape = nil
      if is_leaf_kind(d) then leaves[#leaves + 1], places[#places + 1] = args[i], { i } end
    elseif type(d) == "table" and kinds[i].type == "tensors" then
      local list = { n = table.maxn(d) }
      for k = 1, list.n do
        seed = seed + 1
        list[k] = build(d[k], seed, how)
        if is_leaf_kind(d[k]) then leaves[#leaves + 1], places[#places + 1] = list[k], { i, k } end
      end
      args[i] = list
    elseif type(d) == "table" and kinds[i].type == "shape" and how.zero then
      args[i] = zeroed(d)
    elseif type(d) == "table" and kinds[i].type == "shape" and how.large then
      args[i] = enlarged(d)
    else
      args[i] = d
    end
  end
  return args, leaves, places
end

local function changes_with_zero(row, sample)
  local kinds = ops.args(row)
  for i = 1, table.maxn(sample) do
    local d = sample[i]
    if is(d) and d.shape and select(2, zeroed(d.shape)) then return true end
    if type(d) == "table" and not is(d) then
      if kinds[i].type == "shape" and select(2, zeroed(d)) then return true end
      for k = 1, kinds[i].type == "tensors" and table.maxn(d) or 0 do
        if d[k].shape and select(2, zeroed(d[k].shape)) then return true end
      end
    end
  end
  return false
end

-- calling ------------------------------------------------------------------------------------------------------------------

local function function_of(row, inplace)
  if row.name:find "_step$" then return ops.find(row.name) end
  return ops.find((inplace or row.mutates) and row.name .. "_" or row.name)
end

---Results as a list: for rows that only change their arguments, those.
local function call(row, sample, args, inplace)
  tm.manual_seed(7)
  local results = { function_of(row, inplace)(unpack(args, 1, args.n)) }
  if row.name:find "_step$" then
    results = {}
    for k, at in ipairs(sample.target or samples.rows[row.name].target) do results[k] = args[1][at] end
  end
  return results
end

---The row as a function of its differentiable inputs; rows that change their first argument change a copy.
local function as_function(row, sample, args, places, inplace)
  return function(...)
    local own = { n = args.n }
    for i = 1, args.n do
      own[i] = args[i]
      if type(own[i]) == "table" and not tm.is_tensor(own[i]) and ops.args(row)[i].type == "tensors" then
        own[i] = { n = args[i].n, unpack(args[i], 1, args[i].n) }
      end
    end
    for k, at in ipairs(places) do
      if at[2] then own[at[1]][at[2]] = select(k, ...) else own[at[1]] = select(k, ...) end
    end
    if row.mutates or inplace then own[1] = own[1]:clone() end
    return unpack(call(row, sample, own, inplace))
  end
end

local function floats(list)
  local found = {}
  for _, t in ipairs(list) do
    if t:is_floating_point() then found[#found + 1] = t end
  end
  return found
end

---Gradients of the row's results, each weighted by other numbers, for its inputs.
local function gradients(row, sample, how, inplace)
  how.grad = true -- float64
  local args, leaves, places = arguments(row, sample, how)
  local outs, seeds, used = floats { as_function(row, sample, args, places, inplace)(unpack(leaves)) }, {}, {}
  for _, y in ipairs(outs) do
    if y.requires_grad then
      local s = tm.linspace(0.5, 1.5, y:numel(), { dtype = "float64" }):view(y:size()):to(y.device, y.dtype)
      used[#used + 1], seeds[#seeds + 1] = y, how.strided and restrided(s) or s
    end
  end
  if #used == 0 then return {} end
  return grad(used, leaves, { grad_outputs = seeds, allow_unused = true })
end

---Within tol * max(1, |expected|); many elements are compared without making tables of them.
local function near(expected, got, tol)
  if expected:numel() > 1000 and tm.is_tensor(got) and got:numel() == expected:numel() then
    if got:allclose(expected, { rtol = tol, atol = tol, equal_nan = true }) then return end
  end
  assert.near_tensor(expected, got, tol)
end

local function same_lists(expected, got, tol, what)
  assert.equal(#expected, #got, what)
  for i = 1, #expected do near(expected[i], got[i], tol) end
end

local function same_gradients(expected, got, n, tol)
  for i = 1, n do
    if expected[i] or got[i] then
      near(expected[i] or tm.zeros_like(got[i]), got[i] or tm.zeros_like(expected[i]), tol or 1e-12)
    end
  end
end

-- checks: fn(row, rules, sample), each run for every sample ------------------------------------------------------------------

local function option(sample, rules, name)
  if sample[name] ~= nil then return sample[name] end -- false counts
  return rules[name]
end

local function differentiable(row, sample)
  if not row.diff or sample.grad == false then return false end
  local _, leaves = arguments(row, sample)
  return #leaves > 0
end

local function check_gradient(row, _, sample)
  local args, leaves, places = arguments(row, sample, { grad = not row.mutates or row.diff })
  if not row.diff then
    for _, y in ipairs(call(row, sample, args)) do assert.is_true(y.is_leaf) end
    return
  end
  if not differentiable(row, sample) then return end
  local fn = as_function(row, sample, args, places)
  local some = false -- a result has a history
  for _, y in ipairs { fn(unpack(leaves)) } do some = some or y.requires_grad end
  if not row.mutates then assert.is_true(some, "no result requires grad") end
  if some then assert.is_true(tm.autograd.gradcheck(fn, leaves)) end
end

local function check_double(row, _, sample)
  if not differentiable(row, sample) then return end
  local args, leaves, places = arguments(row, sample, { grad = true })
  local fn = as_function(row, sample, args, places)
  local some = false
  for _, y in ipairs { fn(unpack(leaves)) } do some = some or y.requires_grad end
  if not some then return end
  if row.first_order then
    local y = floats { fn(unpack(leaves)) }
    H.raises(function() grad(y[1]:sum(), leaves, { create_graph = true, allow_unused = true }) end, "NotImplementedError", row.name)
  else
    assert.is_true(tm.autograd.gradgradcheck(fn, leaves))
  end
end

local function check_strides(row, rules, sample)
  local expect = option(sample, rules, "strided")
  if expect == false then return end
  local args, leaves = arguments(row, sample, { strided = true })
  if expect and #leaves > 0 and leaves[1].ndim > 1 then
    H.raises(function() call(row, sample, args) end, expect, row.name)
    return
  elseif expect then
    return
  end
  local values = call(row, sample, (arguments(row, sample)))
  if row.name ~= "empty" then same_lists(values, call(row, sample, args), 1e-13, "results") end
  if differentiable(row, sample) then
    same_gradients(gradients(row, sample, {}), gradients(row, sample, { strided = true }), #leaves)
  end
end

local function check_meta(row, rules, sample)
  local expect = option(sample, rules, "meta")
  local args = arguments(row, sample, { device = "meta" })
  if expect then
    H.raises(function() call(row, sample, args) end, expect, row.name)
    return
  end
  local real, meta = call(row, sample, (arguments(row, sample))), call(row, sample, args)
  assert.equal(#real, #meta)
  for i, y in ipairs(real) do
    assert.same(y:size(), meta[i]:size())
    assert.equal(y.dtype, meta[i].dtype)
    assert.equal("meta", meta[i].device)
    assert.equal("cpu", y.device)
  end
  if differentiable(row, sample) and #real > 0 then
    for i, g in pairs(gradients(row, sample, { device = "meta" })) do
      if i ~= "n" then assert.equal("meta", g.device) end
    end
  end
end

local function check_zero(row, rules, sample)
  local expect = option(sample, rules, "zero")
  if expect == false then return end
  local own = type(expect) == "table" and expect
  local zero = own or sample
  if not own and not changes_with_zero(row, sample) then return end
  local args = arguments(row, zero, { zero = true })
  if type(expect) == "string" then
    H.raises(function() call(row, zero, args) end, expect, row.name)
    return
  end
  local results = call(row, zero, args)
  local normal = call(row, sample, (arguments(row, sample)))
  for i, y in ipairs(results) do
    assert.same(i == 1 and option(sample, rules, "zero_out") or (zeroed(normal[i]:size())), y:size())
    assert.equal(normal[i].dtype, y.dtype)
  end
  if differentiable(row, zero) then
    local _, leaves = arguments(row, zero, { zero = true })
    local grads = gradients(row, zero, { zero = true })
    for i, x in ipairs(leaves) do
      if grads[i] then assert.same(x:size(), grads[i]:size()) end
    end
  end
end

---The same arguments in float64.
local function widen(row, sample, args)
  local function widened(d, v)
    if is_number_kind(d) then return v:to "float64" end
    return is(d) and d.kind == "DT" and "float64" or v
  end
  for i = 1, args.n do
    if is(sample[i]) then args[i] = widened(sample[i], args[i])
    elseif type(args[i]) == "table" and ops.args(row)[i].type == "tensors" then
      for k = 1, args[i].n do args[i][k] = widened(sample[i][k], args[i][k]) end
    end
  end
  return args
end

local function uses_dtype(sample)
  for i = 1, table.maxn(sample) do
    local d = sample[i]
    if is(d) then
      if is_number_kind(d) or d.kind == "DT" then return true end
    elseif type(d) == "table" then
      for k = 1, table.maxn(d) do
        if is_number_kind(d[k]) then return true end
      end
    end
  end
  return false
end

---On tens of thousands of elements: several threads, other strides and other dtypes take other paths to the same result.
local function check_large(row, rules, sample)
  if sample ~= rules[1] or rules.large == false then return end
  local strides = option(sample, rules, "strided") == nil
  local function run(how)
    how.large = true
    return call(row, sample, (arguments(row, sample, how)))
  end
  local parallel = run {}
  local threads = tm.get_num_threads()
  tm.set_num_threads(1)
  local ok, err = pcall(function()
    local expected, tol = run {}, 1e-11
    if row.name ~= "empty" then
      same_lists(expected, parallel, tol, "results of several threads")
      if strides then same_lists(expected, run { strided = true }, tol, "results for other strides") end
    end
    for _, dtype in ipairs(not rules.random and uses_dtype(sample) and { "float32", "float16" } or {}) do
      local reference = call(row, sample, widen(row, sample, arguments(row, sample, { dtype = dtype, large = true })))
      for i, y in ipairs(run { dtype = dtype }) do
        near(reference[i]:to(y.dtype):double(), y:double(), 20 * TOLERANCE[dtype] * (rules.tol or 1))
      end
    end
    if strides and differentiable(row, sample) then
      local _, leaves = arguments(row, sample)
      same_gradients(gradients(row, sample, { large = true }), gradients(row, sample, { large = true, strided = true }), #leaves, tol)
    end
  end)
  tm.set_num_threads(threads)
  if not ok then error(err, 0) end
end

local function out_dtype(rule, dtype)
  if rule == "same" then return dtype end
  if rule == "float" then return is_float(dtype) and dtype or "float32" end
  if rule == "sum" then return is_float(dtype) and dtype or "int64" end
  if rule == "number" then return dtype == "bool" and "int64" or dtype end
  return rule
end

local function check_dtype(row, rules, sample, dtype)
  local args = arguments(row, sample, { dtype = dtype })
  local ref_args = widen(row, sample, arguments(row, sample, { dtype = dtype })) -- the numbers as this dtype rounded them
  local results, reference = call(row, sample, args), call(row, sample, ref_args)
  local rule = option(sample, rules, "out") or "same"
  for i, y in ipairs(results) do
    local expected = out_dtype(type(rule) == "table" and rule[i] or rule, dtype)
    if expected ~= "any" then assert.equal(expected, y.dtype) end
    if not rules.random then
      local tol = (TOLERANCE[y.dtype] or 0) * (rules.tol or 1)
      if is_float(dtype) then tol = math.max(tol, TOLERANCE[dtype] * (is_float(y.dtype) and rules.tol or 0)) end
      assert.near_tensor(reference[i]:to(y.dtype):double(), y:double(), tol)
    end
  end
end

local function check_dtypes(row, rules, sample)
  if not uses_dtype(sample) then return end
  local claimed = {}
  local list = rules.dtypes or "float"
  for _, d in ipairs(type(list) == "table" and list or CLAIMS[list]) do claimed[d] = true end
  for _, dtype in ipairs(DTYPES) do
    if claimed[dtype] then
      if is_float(dtype) or sample.ints ~= false then
        local ok, err = pcall(check_dtype, row, rules, sample, dtype)
        if not ok then error(("%s: %s"):format(dtype, tostring(type(err) == "table" and err.message or err)), 0) end
      end
    else
      local ok, err = pcall(call, row, sample, (arguments(row, sample, { dtype = dtype })))
      assert.is_false(ok, dtype .. " is taken, though the samples do not say so")
      assert.is_true(type(err) == "table" and REFUSALS[err.kind] == true, dtype .. ": " .. tostring(err))
      assert.truthy(tostring(err):find(row.name, 1, true), tostring(err))
    end
  end
end

-- Checks that need a certain kind of row tell whether they applied; each must apply to one sample of such a row.

local function check_broadcast(row, rules, sample)
  local at, applied = {}, false
  for i, a in ipairs(ops.args(row)) do at[i] = a.type == "operand" end
  for _, i in ipairs(rules.broadcast or {}) do at[i] = true end
  for i in pairs(at) do
    local d = sample[i]
    if at[i] and is(d) and d.shape and #d.shape > 1 then
      local function try(shape)
        local args, leaves, places = arguments(row, sample, { shapes = { [i] = shape }, grad = true })
        local y = as_function(row, sample, args, places)(unpack(leaves))
        if #y:size() ~= #call(row, sample, (arguments(row, sample)))[1]:size() then return end
        for k, s in ipairs(call(row, sample, (arguments(row, sample)))[1]:size()) do
          if y:size(k) ~= s then return end
        end
        applied = true
        local whole = arguments(row, sample, { shapes = { [i] = shape } })
        whole[i] = whole[i]:expand(d.shape):contiguous()
        assert.near_tensor(call(row, sample, whole)[1], y:detach(), 1e-14)
        if y.requires_grad then assert.is_true(tm.autograd.gradcheck(as_function(row, sample, args, places), leaves)) end
      end
      if not (row.mutates and i == 1) then
        try { unpack(d.shape, 2) }
        for k = 1, #d.shape do
          local shape = { unpack(d.shape) }
          shape[k] = 1
          try(shape)
        end
      end
    end
  end
  return applied
end

local function check_inplace(row, _, sample)
  if not is_leaf_kind(sample[1]) then return false end
  local expected = call(row, sample, (arguments(row, sample)))[1]
  local args = arguments(row, sample)
  local x = args[1]
  if #expected:size() ~= x.ndim or not pcall(assert.same, expected:size(), x:size()) or expected.dtype ~= x.dtype then return false end
  if row.mutates then args[1] = x:clone() x = args[1] end
  local version = x.version
  local y = call(row, sample, args, true)[1]
  assert.is_true(rawequal(x, y), "an in-place form returns its target")
  assert.equal(version + 1, x.version)
  assert.near_tensor(expected, x, 1e-13)
  -- a target with gaps between its elements, and the elements around it left alone
  local strided = arguments(row, sample)
  strided[1] = restrided(strided[1])
  assert.near_tensor(expected, call(row, sample, strided, true)[1], 1e-13)
  if row.diff and not row.mutates then
    local _, leaves = arguments(row, sample)
    same_gradients(gradients(row, sample, {}), gradients(row, sample, {}, true), #leaves)
  end
  local leaf = arguments(row, sample, { grad = true })
  local before, unchanged = leaf[1]:detach():clone(), leaf[1].version
  H.raises(function() call(row, sample, leaf, true) end, "RuntimeError", row.name .. "_: a leaf that requires grad")
  assert.near_tensor(before, leaf[1]:detach(), 0)
  assert.equal(unchanged, leaf[1].version)
  tm.no_grad(function() call(row, sample, leaf, true) end)
  return true
end

local function has_index(sample)
  for i = 1, table.maxn(sample) do
    local d = sample[i]
    if is(d) and d.n then return true end
    if type(d) == "table" and not is(d) then
      for k = 1, table.maxn(d) do
        if is(d[k]) and d[k].n then return true end
      end
    end
  end
  return false
end

local function check_index(row, _, sample)
  if not has_index(sample) then return false end
  local expected = call(row, sample, (arguments(row, sample)))
  same_lists(expected, call(row, sample, (arguments(row, sample, { index = "int32" }))), 0, "int32 positions")
  for _, position in ipairs { 0, -1, 99 } do
    local bad = arguments(row, sample, { position = position })
    H.raises(function() call(row, sample, bad) end, "IndexError", row.name .. ":.*" .. position)
  end
  local wrong = arguments(row, sample, { index = "float32" })
  local ok, err = pcall(call, row, sample, wrong)
  assert.is_true(not ok and type(err) == "table" and tostring(err):find(row.name, 1, true) ~= nil, tostring(err))
  return true
end

---The last tensor argument on another device than the others.
local function check_devices(row, rules, sample)
  if rules.devices == false then return false end
  local args, last, tensors = arguments(row, sample), nil, 0
  for i = 1, args.n do
    if tm.is_tensor(args[i]) and args[i].ndim > 0 then
      last = { args, i }
      tensors = tensors + 1
    elseif type(args[i]) == "table" and ops.args(row)[i].type == "tensors" then
      for k = 1, args[i].n do
        if args[i][k] and args[i][k].ndim > 0 then
          last = { args[i], k }
          tensors = tensors + 1
        end
      end
    end
  end
  if tensors < 2 then return false end
  last[1][last[2]] = last[1][last[2]]:to "meta"
  local err = H.raises(function() call(row, sample, args) end, "RuntimeError", row.name)
  assert.truthy(tostring(err):find "meta", tostring(err))
  return true
end

local function check_view(row, _, sample)
  local args = arguments(row, sample)
  local x = args[1]
  local y = call(row, sample, args)[1]
  assert.equal(x:storage_id(), y:storage_id())
  local version = x.version
  if y:numel() > 0 and pcall(y.fill_, y, 1) then assert.equal(version + 1, x.version) end
  return true
end

-- the walk -------------------------------------------------------------------------------------------------------------------

local function is_broadcasting(row)
  local own = samples.rows[row.name].broadcast
  return own or own == nil and row.signature:find "operand"
end

local function has_positions(row)
  for _, a in ipairs(ops.args(row)) do
    if a.name == "indices" or a.type == "tensor" and (a.name == "index" or a.name == "target" and row.name:find "nll") then return true end
  end
end

local ALWAYS = {
  { "has the gradient of central differences", check_gradient },
  { "has the second gradient of central differences", check_double },
  { "gives the same for other strides", check_strides },
  { "knows shapes and dtypes on the meta device", check_meta },
  { "takes zero sizes", check_zero },
  { "takes many elements", check_large },
  { "works in every dtype that it claims and refuses the others", check_dtypes },
}
local IF = {
  { "broadcasts", check_broadcast, is_broadcasting },
  { "has an in-place form", check_inplace, function(row) return row.inplace and not row.name:find "_step$" end },
  { "counts positions from 1, int64 or int32", check_index, has_positions },
  { "names two devices that do not go together", check_devices, function(row)
    local n = 0
    for _, a in ipairs(ops.args(row)) do n = n + ((a.type == "tensor" or a.type == "operand") and 1 or a.type == "tensors" and 2 or 0) end
    return n > 1 and samples.rows[row.name].devices ~= false
  end },
  { "shares the storage of its input", check_view, function(row) return row.view end },
}

local function each(row, rules, fn)
  local applied = false
  for k, sample in ipairs(rules) do
    local ok, result = pcall(fn, row, rules, sample)
    if not ok then
      local why = type(result) == "table" and not result.where and result.message or result -- luassert's errors are tables too
      error(("sample %d: %s"):format(k, tostring(why)), 0)
    end
    applied = applied or result
  end
  return applied
end

describe("ops", function()
  for _, name in ipairs(ops.names) do
    local row, rules = ops.rows[name], samples.rows[name]
    if not rules then
      it(name .. " has samples in spec/ops_samples.lua", function() error(name .. " has none", 0) end)
    else
      for _, check in ipairs(ALWAYS) do
        it(name .. " " .. check[1], function() each(row, rules, check[2]) end)
      end
      for _, check in ipairs(IF) do
        if check[3](row) then
          it(name .. " " .. check[1], function() assert.truthy(each(row, rules, check[2]), "no sample shows it") end)
        end
      end
    end
  end

  it("has samples for no row that is not there", function()
    for name in pairs(samples.rows) do assert.truthy(ops.rows[name], name) end
  end)
end)
