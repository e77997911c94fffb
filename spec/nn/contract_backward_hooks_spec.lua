---Module backward hooks, and what tensor hooks promise beside them (docs/contracts/module.md, chapters 12 and 13).

local H = require "spec.helper"
local tm = require "tmod"
local binding = require "tmod.ffi"
local nn = tm.nn
local args, kw = nn.args, nn.kw
local grad = tm.autograd.grad
local raises = H.raises

local function leaf(values) return tm.tensor(values, { dtype = "float64", requires_grad = true }) end
local function const(values) return tm.tensor(values, { dtype = "float64" }) end

local function module_of(fn, name)
  local Class = nn.Module:extend(name or "Fn")
  function Class:forward(...) return fn(...) end
  return Class()
end

local function linear() return nn.Linear(2, 2, { dtype = "float64" }) end

---A tuple of gradients as plain values.
local function values(a)
  local list = { n = a.n }
  for i = 1, a.n do list[i] = a[i] and a[i]:tolist() end
  return list
end

---Notes what full hooks of `m` see; returns the list.
local function record(m, log)
  log = log or {}
  m:register_full_backward_hook(function(module, grad_input, grad_output)
    assert.equal(m, module)
    assert.is_true(nn.is_args(grad_input) and nn.is_args(grad_output))
    log[#log + 1] = { input = values(grad_input), output = values(grad_output) }
  end)
  return log
end

local function warnings(fn)
  local old, list = nn.Module._warn, {}
  nn.Module._warn = function(text, ...) list[#list + 1] = text:format(...) end
  local ok, e = pcall(fn)
  nn.Module._warn = old
  if not ok then error(e, 0) end
  return list
end

---Runs fn, whose warnings do not matter.
local function quietly(fn) warnings(fn) end

describe("full backward hooks", function()
  it("M124 M144: pre-hooks get (module, grad_output), hooks (module, grad_input, grad_output); prepend puts first", function()
    local m, log = module_of(function(x) return x * 3 end), {}
    local function note(what) return function(module, ...)
      assert.equal(m, module)
      log[#log + 1] = what .. select("#", ...)
    end end
    m:register_full_backward_hook(note "b")
    m:register_full_backward_hook(note "a", { prepend = true })
    m:register_full_backward_pre_hook(note "pre b ")
    m:register_full_backward_pre_hook(note "pre a ", { prepend = true })
    local g = nn.register_module_full_backward_hook(note "global ")
    local gp = nn.register_module_full_backward_pre_hook(note "global pre ")
    m(leaf { 1 }):backward()
    g:remove()
    gp:remove()
    assert.same({ "global pre 1", "pre a 1", "pre b 1", "global 2", "a2", "b2" }, log)
    raises(function() m:register_full_backward_hook(print, { first = true }) end, "TypeError", "unknown option first; known: prepend")
    raises(function() nn.register_module_full_backward_hook(print, { prepend = true }) end, "TypeError", "unknown option prepend")
    raises(function() m:register_full_backward_pre_hook(1) end, "TypeError", "expected a function, got number")
  end)

  it("M125 case 64: what counts is the list when forward was called", function()
    local m = module_of(function(x) return x * 3 end)
    local late, removed = 0, 0
    local h = m:register_full_backward_hook(function() removed = removed + 1 end)
    local y = m(leaf { 1 })
    m:register_full_backward_hook(function() late = late + 1 end)
    h:remove()
    y:backward()
    assert.equal(0, late)
    assert.equal(1, removed)
    m(leaf { 1 }):backward()
    assert.equal(1, late)
    assert.equal(1, removed)
  end)

  it("M97: one added by a pre-hook acts from the next call on", function()
    local m, calls, added = module_of(function(x) return x * 3 end), 0, false
    m:register_forward_pre_hook(function()
      if not added then m:register_full_backward_hook(function() calls = calls + 1 end) end
      added = true
    end)
    m(leaf { 1 }):backward()
    assert.equal(0, calls)
    m(leaf { 1 }):backward()
    assert.equal(1, calls)
  end)

  it("M126 M129: tensors among the positional arguments become views with the same requires_grad", function()
    local seen, with_pre
    local m = module_of(function(a, b, list, k)
      seen = { a, b, list[1], k.t }
      return a * b
    end)
    m:register_full_backward_hook(function() end)
    m:register_forward_pre_hook(function(_, a) with_pre = a end)
    local hooked
    m:register_forward_hook(function(_, a, out) hooked = { a[1], out } end)
    local a, b, c, d = leaf { 1 }, const { 2 }, leaf { 3 }, leaf { 4 }
    local list = { c }
    local y = m(a, b, list, kw { t = d })
    assert.is_true(a ~= seen[1] and b ~= seen[2])
    assert.equal(a:storage_id(), seen[1]:storage_id())
    assert.is_true(seen[1].requires_grad and not seen[1].is_leaf)
    assert.is_false(seen[2].requires_grad)
    assert.equal(c, seen[3])
    assert.equal(d, seen[4])
    assert.equal(a, with_pre[1]) -- the caller's
    assert.equal(seen[1], hooked[1])
    assert.is_true(hooked[2] ~= y)
    assert.equal("mul", hooked[2].grad_fn)
    assert.equal("the backward hooks of Fn", y.grad_fn)
  end)

  it("M126 M135 case 67: tables and named arguments are no tensors to it", function()
    quietly(function()
      local m = module_of(function(x) return (nn.is_kw(x) and x.t or x[1]) * 2 end)
      local log = record(m)
      m(kw { t = leaf { 1 } }):backward()
      m({ leaf { 1 } }):backward()
      assert.equal(0, log[1].input.n)
      assert.same({ n = 1 }, log[2].input)
      assert.same({ n = 1, { 1 } }, log[2].output)
    end)
  end)

  it("M127 M146 case 66: a table is no tensor: a warning, and no hook runs", function()
    local m = module_of(function(x) return { x = x * 2 } end, "app.Tables")
    local log = record(m)
    local list = warnings(function()
      m(leaf { 1 }).x:backward()
      m(leaf { 1 }).x:backward()
    end)
    assert.same({}, log)
    assert.equal(1, #list) -- once
    assert.truthy(list[1]:find("backward hooks of Tables do not run: forward must return tensors, got a table", 1, true))
  end)

  it("M127 M146: of several results tensors are wrapped, others not", function()
    local inner
    local m = module_of(function(x)
      inner = x * 2
      return { inner }, x * 3, "text"
    end)
    local log = record(m)
    local list = warnings(function()
      local t, y, s = m(leaf { 1 })
      assert.equal(inner, t[1])
      assert.equal("text", s)
      y:backward()
    end)
    assert.same({}, list)
    assert.same({ n = 3, nil, { 1 } }, log[1].output)
    assert.same({ n = 1, { 3 } }, log[1].input)
  end)

  it("M127: an nn.args result is a tuple", function()
    local m = module_of(function(x) return args(x * 2, nil, x * 3) end)
    local log = record(m)
    local r = m(leaf { 1 })
    assert.equal(3, r.n)
    r[3]:backward()
    assert.same({ n = 3, nil, nil, { 1 } }, log[1].output)
  end)

  it("M128: nothing to record leaves the objects as they are, and no hook runs", function()
    local inside
    local m = module_of(function(x) inside = x return x end)
    local log = {}
    record(m, log)
    local x = const { 1 }
    assert.equal(x, m(x))
    assert.equal(x, inside)
    local w = leaf { 1 }
    assert.equal(w, tm.no_grad(m, w))
    assert.equal(w, inside)
    local n = module_of(function(t) return tm.no_grad(function() return t * 2 end) end)
    record(n, log)
    assert.is_false(n(w).requires_grad)
    assert.same({}, log)
  end)

  it("M129: the result is not what forward returned, in a module that returns its input too", function()
    local m = module_of(function(x) return x end)
    local log = record(m)
    local x = leaf { 1 }
    local y = m(x)
    assert.is_true(y ~= x)
    y:backward()
    assert.equal(1, #log)
    assert.same({ 1 }, x.grad:tolist())
  end)

  it("M130 M132 case 61: an entry for each value; a result without gradient has nil, an input without influence zeros", function()
    local m = module_of(function(a, b) return a * 2, b * 3 end)
    local log = record(m)
    local a, b = leaf { 1, 1 }, leaf { 1, 1 }
    local first = m(a, b)
    first:sum():backward()
    assert.same({ n = 2, { 1, 1 } }, log[1].output)
    assert.same({ n = 2, { 2, 2 }, { 0, 0 } }, log[1].input)
    assert.same({ 0, 0 }, b.grad:tolist())
    assert.same({ 2, 2 }, a.grad:tolist())
  end)

  it("M132: an input without requires_grad has zeros, other values nil", function()
    local m = module_of(function(a, _, b) return a * b end)
    local log = record(m)
    m(leaf { 2 }, "text", const { 3 }):backward()
    assert.same({ n = 3, { 3 }, nil, { 0 } }, log[1].input)
  end)

  it("M131 case 69: pre-hooks replace what flows on", function()
    local m = module_of(function(x) return x * 3 end)
    local log = record(m)
    local seen
    m:register_full_backward_pre_hook(function(_, go) return args(go[1] * 0) end)
    m:register_full_backward_pre_hook(function(_, go) seen = values(go) end)
    local a = leaf { 1 }
    m(a):backward()
    assert.same({ n = 1, { 0 } }, seen)
    assert.same({ n = 1, { 0 } }, log[1].output)
    assert.same({ 0 }, a.grad:tolist())
  end)

  it("M131: another length or shape is an error; they run when only parameter gradients are asked", function()
    local l, calls = linear(), 0
    local result
    l:register_full_backward_pre_hook(function()
      calls = calls + 1
      return result
    end)
    local function run() return grad(l(leaf { { 1, 2 } }):sum(), l.weight) end
    run()
    assert.equal(1, calls)
    result = args(const { 1 }, const { 1 })
    raises(run, "RuntimeError", "backward hook of Linear: returned 2 gradients for grad_output, expected 1")
    result = args(const { 1 })
    raises(run, "RuntimeError", "returned float64 %(1,%) on cpu for grad_output 1, expected float64 %(1, 2%) on cpu")
  end)

  it("M133 M145 case 62: what they return is the next one's grad_input and what flows on", function()
    local l = linear()
    l:register_full_backward_hook(function(_, gi) return args(gi[1] * 2) end)
    local log = record(l)
    local x, plain = leaf { { 1, 2 } }, leaf { { 1, 2 } }
    l(x):sum():backward()
    local weight = l.weight.grad:clone()
    local reference = nn.functional.linear(plain, l.weight:detach(), l.bias:detach())
    reference:sum():backward()
    assert.near_tensor(plain.grad * 2, x.grad, 1e-12)
    assert.near_tensor(plain.grad:tolist(), const(log[1].input[1]) / 2, 1e-12)
    assert.near_tensor({ { 1, 2 }, { 1, 2 } }, weight, 0) -- M134: the parameters' gradients are the same
  end)

  it("M134: a replaced grad_input does not change parameters' gradients", function()
    local l = linear()
    l:register_full_backward_hook(function(_, gi) return gi[1] * 0 end)
    l(leaf { { 1, 2 } }):sum():backward()
    assert.near_tensor({ { 1, 2 }, { 1, 2 } }, l.weight.grad, 0)
    assert.near_tensor({ 1, 1 }, l.bias.grad, 0)
  end)

  it("M133 M145 case 63: every form of a sequence, and its length", function()
    local result
    local one = module_of(function(x) return x * 3 end)
    local two = module_of(function(a, b) return a * b end)
    for _, m in ipairs { one, two } do m:register_full_backward_hook(function() return result:unpack() end) end
    local x, a, b
    local function run_one() x = leaf { 1 } one(x):backward() return x.grad and x.grad:item() end
    local function run_two()
      a, b = leaf { 2 }, leaf { 5 }
      two(a, b):backward()
      return { a.grad and a.grad:item() or false, b.grad and b.grad:item() or false }
    end
    local g, g2 = const { 7 }, const { 8 }
    for _, r in ipairs { args(g), args(args(g)), args { g }, args { g, n = 1 } } do
      result = r
      assert.equal(7, run_one())
    end
    for _, r in ipairs { args(), args(nil) } do
      result = r
      assert.equal(3, run_one())
    end
    for _, r in ipairs { args(args(nil)), args { n = 1 } } do -- a gradient that stops here
      result = r
      assert.is_nil(run_one())
    end
    for _, r in ipairs { args(g, g2), args(args(g, g2)), args { g, g2 } } do
      result = r
      assert.same({ 7, 8 }, run_two())
    end
    result = args(nil, g2)
    assert.same({ false, 8 }, run_two())
    result = args { [2] = g2, n = 2 }
    assert.same({ false, 8 }, run_two())
    result = args(args(g, g2))
    raises(run_one, "RuntimeError", "returned 2 gradients for grad_input, expected 1")
    assert.is_nil(x.grad)
    result = args(g)
    raises(run_two, "RuntimeError", "returned 1 gradients for grad_input, expected 2")
    result = args {}
    raises(run_one, "RuntimeError", "returned 0 gradients for grad_input, expected 1")
    result = args(false)
    raises(run_one, "TypeError", "grad_input 1 must be a tensor or nil, got boolean")
    result = args(args(const { { 7 } }))
    raises(run_one, "RuntimeError", "returned float64 %(1, 1%) on cpu for grad_input 1, expected float64 %(1,%)")
    result = args(tm.ones(1))
    raises(run_one, "RuntimeError", "returned float32 %(1,%) on cpu for grad_input 1, expected float64")
  end)

  it("M135 case 58 case 59: without an input that requires grad they run at the output, before the module's own backward", function()
    local l, seen, result = linear(), nil, args()
    l:register_full_backward_hook(function(_, gi, go)
      seen = { gi = values(gi), go = values(go), grad = l.weight.grad }
      return result:unpack()
    end)
    local function run()
      l.weight.grad, seen = nil, nil
      l(const { { 1, 2 } }):sum():backward()
    end
    local list = warnings(function() run() run() end)
    assert.equal(1, #list)
    assert.truthy(list[1]:find "backward hook of Linear: no input requires grad")
    assert.same({ n = 1 }, seen.gi)
    assert.same({ n = 1, { { 1, 1 } } }, seen.go)
    assert.is_nil(seen.grad)
    assert.is_true(l.weight.grad ~= nil)
    for _, r in ipairs { args(nil), args(args(nil)), args { n = 1 }, args(args()) } do
      result = r
      run()
    end
    for _, r in ipairs { args(tm.ones(1)), args(args(tm.ones(1))), args { tm.ones(1) }, args(false) } do
      result = r
      raises(run, "RuntimeError", "no input requires grad, so it must return nothing or only nil")
    end
  end)

  it("M135: pre-hooks alone give no warning", function()
    local l, calls = linear(), 0
    l:register_full_backward_pre_hook(function(_, go)
      calls = calls + 1
      return go[1] * 2
    end)
    assert.same({}, warnings(function() l(const { { 1, 2 } }):sum():backward() end))
    assert.equal(1, calls)
    assert.near_tensor({ 2, 2 }, l.bias.grad, 0)
  end)

  it("M136 case 70: run for gradients of inputs, not for those of parameters alone", function()
    local l = linear()
    local log = record(l)
    local x = leaf { { 1, 2 } }
    grad(l(x):sum(), l.weight)
    assert.equal(0, #log)
    grad(l(x):sum(), x)
    assert.equal(1, #log)
    assert.is_nil(l.weight.grad)
  end)

  it("M137 case 71: a gradient that goes around the results passes unchanged", function()
    local inner
    local m = module_of(function(x)
      inner = x * 5
      return inner * 2
    end)
    local log = record(m)
    m:register_full_backward_hook(function(_, gi) return gi[1] * 100 end)
    local x = leaf { 1 }
    m(x)
    inner:backward()
    assert.same({ 5 }, x.grad:tolist())
    assert.equal(0, #log)
    m(x):backward { retain_graph = true }
    assert.equal(1, #log)
    x.grad = nil
    inner:backward()
    assert.same({ 5 }, x.grad:tolist())
    assert.equal(1, #log)
  end)

  it("M138 case 65: once for each call, and again in each pass", function()
    local m = module_of(function(x) return x * 3 end)
    local log = record(m)
    local x = leaf { 1 }
    m(m(x)):backward()
    assert.equal(2, #log)
    assert.same({ { 3 } }, { log[1].input[1] })
    assert.same({ { 9 } }, { log[2].input[1] })
    local y = m(x)
    y:backward { retain_graph = true }
    y:backward()
    assert.equal(4, #log)
  end)

  it("M138: fire again when a gradient's own graph passes the module", function()
    local m = module_of(function(x) return x:tanh() end)
    local log = record(m)
    local x = leaf { 0.5 }
    local y = m(x)
    local g = grad(y, x, { create_graph = true })
    assert.equal(1, #log)
    g:backward { retain_graph = true } -- does not pass the output
    local first = x.grad:item()
    local t = math.tanh(0.5)
    assert.near(-2 * t * (1 - t * t), first, 1e-12)
    x.grad = nil
    (g * y):backward()
    assert.is_true(#log >= 2)
    assert.near((1 - t * t) ^ 2 - 2 * t * t * (1 - t * t), x.grad:item(), 1e-12)
  end)

  it("M139 case 60: inner before outer when inputs require grad, outer before inner when not", function()
    quietly(function()
      local inner = linear()
      local outer = nn.Sequential(inner)
      local order = {}
      inner:register_full_backward_hook(function() order[#order + 1] = "inner" end)
      outer:register_full_backward_hook(function() order[#order + 1] = "outer" end)
      outer(leaf { { 1, 2 } }):sum():backward()
      outer(const { { 1, 2 } }):sum():backward()
      assert.same({ "inner", "outer", "outer", "inner" }, order)
    end)
  end)

  it("M139: global, then own, in order, each on what the one before left", function()
    local m, log = module_of(function(x) return x * 1 end), {}
    local function times(k) return function(_, gi)
      log[#log + 1] = gi[1]:item()
      return gi[1] * k
    end end
    m:register_full_backward_hook(times(3))
    m:register_full_backward_hook(times(5))
    local h = nn.register_module_full_backward_hook(times(2))
    local x = leaf { 1 }
    m(x):backward()
    h:remove()
    assert.same({ 1, 2, 6 }, log)
    assert.same({ 30 }, x.grad:tolist())
  end)

  it("M140: the parameters' gradients of this pass are there when inputs require grad", function()
    local l, seen = linear(), nil
    l:register_full_backward_hook(function(m) seen = m.weight.grad end)
    l(leaf { { 1, 2 } }):sum():backward()
    assert.near_tensor({ { 1, 2 }, { 1, 2 } }, seen, 0)
  end)

  it("M141: an error aborts the pass, reaches its caller, and leaves what was accumulated", function()
    local thrown = {}
    local m = module_of(function(x) return x * 2 end)
    m:register_full_backward_hook(function() error(thrown) end)
    local x, w = leaf { 1 }, leaf { 1 }
    local ok, e = pcall(function() (m(x) * w):sum():backward() end)
    assert.is_false(ok)
    assert.equal(thrown, e)
    assert.is_nil(x.grad)
    assert.same({ 2 }, w.grad:tolist())
    assert.is_true(tm.is_grad_enabled())
  end)

  it("M142 case 68: in-place changes of wrapped inputs and of results are refused", function()
    local relu = module_of(function(x) return x:relu_() end)
    relu:register_full_backward_hook(function() end)
    raises(function() relu(leaf { 1 } * 1) end, "RuntimeError",
      "relu_: .*shares memory with what went into the backward hooks of Fn.*clone it")
    local l = linear()
    l:register_full_backward_hook(function() end)
    raises(function() nn.functional.relu(l(leaf { { 1, 2 } }), { inplace = true }) end, "RuntimeError", "clone it")
    quietly(function()
      local y = l(const { { 1, 2 } })
      raises(function() y:add_(1) end, "RuntimeError", "add_: .*the backward hooks of Linear")
      raises(function() y:view(2):add_(1) end, "RuntimeError", "add_")
      tm.no_grad(y.add_, y, 1)
    end)
    local fill = module_of(function(a, b)
      b:add_(1) -- needs no gradient
      return a * b
    end)
    fill:register_full_backward_hook(function() end)
    fill(leaf { 1 }, const { 1 }):backward()
  end)

  it("M142: a changed original makes the module's saved input refuse", function()
    local m = module_of(function(x) return x * x end)
    m:register_full_backward_hook(function() end)
    local x = leaf { 1 } * 1
    local y = m(x)
    x:add_(1)
    raises(function() y:backward() end, "RuntimeError", "changed in place")
  end)

  it("M143 M144: there is no other kind", function()
    raises(function() linear():register_backward_hook(print) end, "NotImplementedError", "use register_full_backward_hook")
    raises(function() nn.register_module_backward_hook(print) end, "NotImplementedError", "use register_full_backward_hook")
  end)

  it("M145: tuples are made for each hook", function()
    local m = module_of(function(x) return x * 3 end)
    m:register_full_backward_pre_hook(function(_, go) go[1], go.n = nil, 5 end)
    m:register_full_backward_hook(function(_, gi, go) gi[1], gi.n, go[1], go.n = nil, 9, nil, 9 end)
    local log = record(m)
    local x = leaf { 1 }
    m(x):backward()
    assert.same({ { input = { n = 1, { 3 } }, output = { n = 1, { 1 } } } }, log)
    assert.same({ 3 }, x.grad:tolist())
  end)

  it("M147: hooks may yield", function()
    local m = module_of(function(x) return x * 3 end)
    m:register_full_backward_hook(function(_, gi) return coroutine.yield(gi[1]) * 10 end)
    local x = leaf { 1 }
    local co = coroutine.wrap(function()
      m(x):backward()
      return "done"
    end)
    local g = co()
    assert.same({ 3 }, g:tolist())
    assert.is_nil(x.grad)
    assert.equal("done", co(const { 2 }))
    assert.same({ 20 }, x.grad:tolist())
  end)

  it("M147: hooks may start another pass, through the same module too", function()
    local m, inner = module_of(function(x) return x * x end), nil
    m:register_full_backward_hook(function()
      if inner then return end
      inner = true
      tm.enable_grad(function()
        local w = leaf { 5 }
        m(w):backward()
        inner = w.grad:item()
      end)
    end)
    local x = leaf { 3 }
    m(x):backward()
    assert.equal(10, inner)
    assert.same({ 6 }, x.grad:tolist())
  end)

  it("M147: a graph that is freed lets go of its hooks", function()
    local function kept()
      local n = 0
      for _ in pairs(binding.kept) do n = n + 1 end
      return n
    end
    local function make()
      local l = linear()
      record(l)
      return l(leaf { { 1, 2 } })
    end
    tm.collect()
    local before, nodes = kept(), tm.live().nodes
    local function run()
      local y = make()
      tm.collect()
      assert.is_true(kept() > before)
      y:sum():backward()
    end
    run()
    tm.collect()
    assert.equal(before, kept())
    assert.equal(nodes, tm.live().nodes)
  end)

  it("work on meta tensors", function()
    local l = nn.Linear(2, 2, { device = "meta" })
    local seen
    l:register_full_backward_hook(function(_, gi) seen = gi[1] end)
    l(tm.ones({ 1, 2 }, { device = "meta", requires_grad = true })):sum():backward()
    assert.same({ 1, 2 }, seen:size())
    assert.equal("meta", seen.device)
  end)
end)

describe("tensor hooks", function()
  it("M148 M150 case 72: one call for the sum over all paths, each on the last one's result", function()
    local t, log = leaf(1), {}
    t:register_hook(function(g) log[#log + 1] = g:item() return g * 2 end)
    t:register_hook(function(g) log[#log + 1] = g:item() end)
    local y = t * 2 + t * 3
    y:backward { retain_graph = true }
    y:backward()
    assert.same({ 5, 10, 5, 10 }, log)
    assert.equal(20, t.grad:item())
  end)

  it("M151 case 73: a retained gradient is the hooked one", function()
    local t = leaf(1)
    local y = t * 2
    y:retain_grad()
    y:register_hook(function(g) return g * 10 end)
    y:backward()
    assert.equal(10, y.grad:item())
  end)

  it("M154 case 74: after accumulation: the tensor, with its new gradient; no result; leaves only", function()
    local t, seen = leaf(1), nil
    local h = t:register_post_accumulate_grad_hook(function(x) seen = { x, x.grad:item() } end)
    ;(t * 3):backward()
    assert.equal(t, seen[1])
    assert.equal(3, seen[2])
    h:remove()
    t:register_post_accumulate_grad_hook(function() return t end)
    raises(function() (t * 3):backward() end, "RuntimeError")
    raises(function() (t * 3):register_post_accumulate_grad_hook(print) end, "RuntimeError")
  end)

  it("M157: of a module's parameters stay through a conversion", function()
    local l, calls = nn.Linear(2, 2), 0
    l.weight:register_hook(function(g)
      calls = calls + 1
      assert.equal("float64", g.dtype)
    end)
    l:double()
    l(const { { 1, 2 } }):sum():backward()
    assert.equal(1, calls)
  end)
end)
