---The graph and its engine: leaf rules, in-place changes, hooks, custom functions, grad modes. Gradients of single
---operators are in ops_spec.lua.

local H = require "spec.helper"
local tm = require "tmod"
local binding = require "tmod.ffi"
local grad, Function = tm.autograd.grad, tm.autograd.Function
local raises = H.raises

local function leaf(values, dtype) return tm.tensor(values, { dtype = dtype or "float64", requires_grad = true }) end
local function ones(...) return tm.ones(..., { dtype = "float64" }) end

---Runs fn, and checks that it left no tensor, storage, node or kept function behind.
local function leaves_nothing(fn)
  local function kept()
    local n = 0
    for _ in pairs(binding.kept) do n = n + 1 end
    return n
  end
  fn()
  tm.collect()
  local before, kept_before = tm.live(), kept()
  fn()
  tm.collect()
  local after = tm.live()
  assert.same(before, after)
  assert.equal(kept_before, kept())
end

describe("backward", function()
  it("adds to the grad of every leaf", function()
    local w, b = leaf { 1, 2, 3 }, leaf(4)
    local y = (w * w + b):sum()
    y:backward()
    assert.near_tensor({ 2, 4, 6 }, w.grad, 0)
    assert.equal(3, b.grad:item())
    ;(w * 10):sum():backward()
    assert.near_tensor({ 12, 14, 16 }, w.grad, 0)
    assert.equal("float64", w.grad.dtype)
    assert.is_false(w.grad.requires_grad)
  end)

  it("tells leaves from results", function()
    local w, x = leaf { 1, 2 }, tm.tensor { 1, 2 }
    local y = w * 2
    assert.is_true(w.is_leaf and w.requires_grad)
    assert.is_true(x.is_leaf and not x.requires_grad)
    assert.is_true(y.requires_grad and not y.is_leaf)
    assert.equal("mul", y.grad_fn)
    assert.is_nil(w.grad_fn)
    assert.is_nil(y.grad)
    raises(function() y.requires_grad = false end, "RuntimeError", "requires_grad: only of a leaf; this tensor was made by mul")
    raises(function() tm.tensor({ 1, 2 }, { dtype = "int64" }).requires_grad = true end, "RuntimeError", "only floating dtypes")
    raises(function() w.requires_grad = 1 end, "TypeError", "expected a boolean, got number")
    assert.is_true(x:requires_grad_().requires_grad)
    assert.is_false(x:requires_grad_(false).requires_grad)
  end)

  it("runs a diamond once through each node, with the gradients of both paths summed", function()
    local x = leaf(3)
    local seen = 0
    local a = x * 2
    a:register_hook(function() seen = seen + 1 end)
    ;(a * a + a):backward()
    assert.equal(1, seen)
    assert.equal(2 * (2 * 6 + 1), x.grad:item())
  end)

  it("needs a gradient for more than one element, of the same shape", function()
    local w = leaf { 1, 2 }
    raises(function() (w * 2):backward() end, "RuntimeError", "left out only for one element, got float64 %(2,%)")
    raises(function() (w * 2):backward(tm.ones(3)) end, "RuntimeError", "gradient 1 is float32 %(3,%), expected shape %(2,%)")
    raises(function() (w * 2):backward(5) end, "TypeError", "gradient must be a tensor, got number")
    ;(w * 2):backward(tm.tensor { 1, 10 })
    assert.near_tensor({ 2, 20 }, w.grad, 0)
    raises(function() tm.ones(1):backward() end, "RuntimeError", "does not require grad")
    raises(function() (w * 2):sum():backward { retain = true } end, "TypeError", "unknown option retain")
  end)

  it("takes only gradients of the tensor's device", function()
    local w = leaf { 1, 2 }
    raises(function() (w * 2):backward(tm.ones(2, { device = "meta" })) end, "RuntimeError", "meta")
    raises(function() grad(w * 2, w, { grad_outputs = tm.ones(2, { device = "meta" }) }) end, "RuntimeError", "meta")
    assert.is_nil(w.grad)
  end)

  it("frees what it saved, unless the graph is retained", function()
    local w = leaf { 1, 2 }
    local y = (w * w):sum()
    y:backward { retain_graph = true }
    y:backward()
    assert.near_tensor({ 4, 8 }, w.grad, 0)
    raises(function() y:backward() end, "RuntimeError", "backward a second time.*retain_graph = true")
    local z = (w + w):sum() -- saved nothing
    z:backward()
    z:backward()
  end)

  it("gives gradients to the listed inputs alone", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    local y = (a * b):sum()
    y:backward { inputs = { a } }
    assert.near_tensor({ 3, 4 }, a.grad, 0)
    assert.is_nil(b.grad)
    raises(function() (a * b):sum():backward { inputs = {} } end, "RuntimeError", "inputs is empty")
    raises(function() (a * b):sum():backward { inputs = { a * 1 } } end, "RuntimeError", "is no leaf")
    raises(function() (a * b):sum():backward { inputs = { tm.ones(2) } } end, "RuntimeError", "does not require grad")
  end)

  it("differentiates gradients when it builds a graph", function()
    local x = leaf { 2, 3 }
    ;(x ^ 3):sum():backward { create_graph = true }
    assert.near_tensor({ 12, 27 }, x.grad, 1e-12)
    assert.is_true(x.grad.requires_grad)
    local g = x.grad
    x.grad = nil
    g:sum():backward()
    assert.near_tensor({ 12, 18 }, x.grad, 1e-12)
  end)

  it("starts from several tensors", function()
    local w = leaf { 1, 2 }
    local a = w * 2
    tm.autograd.backward({ a:sum(), a }, { false, tm.tensor { 10, 20 } })
    assert.near_tensor({ 22, 42 }, w.grad, 0)
    tm.autograd.backward(w:sum())
    assert.near_tensor({ 23, 43 }, w.grad, 0)
    raises(function() tm.autograd.backward({ a:sum(), 3 }) end, "TypeError", "element 2 must be a tensor, got number")
  end)

  it("works from a leaf itself", function()
    local x = leaf(5)
    x:backward()
    assert.equal(1, x.grad:item())
  end)

  it("converts the gradient to the dtype of each input", function()
    local a, b = tm.ones(2, { requires_grad = true }), leaf { 1, 2 }
    ;(a * b):sum():backward()
    assert.equal("float32", a.grad.dtype)
    assert.equal("float64", b.grad.dtype)
  end)

  it("does not share the gradient that the caller gave", function()
    local x, g = leaf { 1, 2 }, ones(2)
    x:backward(g)
    x:backward(g)
    assert.near_tensor({ 2, 2 }, x.grad, 0)
    assert.near_tensor({ 1, 1 }, g, 0)
  end)

  it("leaves everything as it was when it fails half-way", function()
    local a, b = leaf { 1, 2 }, leaf { 1, 2 }
    local bad = a * 2
    bad:register_hook(function() error "no" end)
    local y = (bad * b).sum(bad * b)
    assert.is_false(pcall(y.backward, y))
    a.grad, b.grad = nil, nil
    ;(a * b):sum():backward()
    assert.near_tensor({ 1, 2 }, a.grad, 0)
    assert.is_true(tm.is_grad_enabled())
  end)

  it("keeps nothing alive once tensors are dropped", function()
    leaves_nothing(function()
      local w, x = leaf { { 1, 2 }, { 3, 4 } }, ones(2, 2)
      local y = (x:matmul(w):exp() * w.T:sum(1)):mean()
      y:backward { retain_graph = true }
      local g = grad(y, w, { create_graph = true })
      g:sum():backward()
      assert.truthy(w.grad)
    end)
  end)

  it("runs and frees a graph a million nodes deep", function()
    local depth = H.sanitized and 1e5 or 1e6
    local x = leaf(1)
    local y = x
    for _ = 1, depth do y = y + 1 end
    local before = tm.live().nodes
    assert.is_true(before >= depth)
    y:backward()
    assert.equal(1, x.grad:item())
    y = x * 1
    tm.collect()
    assert.is_true(tm.live().nodes < before - depth + 10)
    for _ = 1, depth do y = y + 1 end -- freed without having run
    y = nil -- luacheck: ignore
    tm.collect()
    assert.is_true(tm.live().nodes < 1000)
  end)
end)

describe("autograd.grad", function()
  it("finds the way through a view whose base was changed after another input", function()
    local Sum = Function:extend "SumOfTwo"
    function Sum.forward(_, a, b) return a + b end
    function Sum.backward(_, dy) return dy, dy end
    local function cases(u)
      return { function(v) return u * v end, function(v) return tm.cat { u, v } end, function(v) return Sum.apply(u, v) end,
        function(v) return (u * 1):mul_(v) end, function(v) return (u * 1):view(3):mul_(v) end }
    end
    for i, f in ipairs(cases(leaf { 1, 1, 1 })) do
      local w = leaf { { 1, 1, 1 }, { 1, 1, 1 } }
      local base = w * 1
      local v = base[1]
      base:mul_(3)
      assert.near_tensor({ { 3, 3, 3 }, { 0, 0, 0 } }, grad(f(v):sum(), w), 0, "case " .. i)
    end
  end)

  it("returns gradients and leaves .grad alone", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    local y = a * b
    local g = grad(y:sum(), { a, b })
    assert.near_tensor({ 3, 4 }, g[1], 0)
    assert.near_tensor({ 1, 2 }, g[2], 0)
    assert.equal(2, g.n)
    assert.is_nil(a.grad)
    assert.near_tensor({ 3, 40 }, grad(a * b, a, { grad_outputs = tm.tensor { 1, 10 } }), 0)
  end)

  it("goes to results inside the graph", function()
    local x = leaf { 1, 2 }
    local h = x * 3
    local y = (h * h):sum()
    assert.near_tensor({ 6, 12 }, grad(y, h, { retain_graph = true }), 0)
    assert.near_tensor({ 18, 36 }, grad(y, x), 0)
  end)

  it("says which input was not used, or gives nil for it", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    raises(function() grad((a * 2):sum(), { a, b }) end, "RuntimeError", "input 2 was not used.*allow_unused")
    local g = grad((a * 2):sum(), { a, b }, { allow_unused = true })
    assert.near_tensor({ 2, 2 }, g[1], 0)
    assert.is_nil(g[2])
    assert.is_nil(grad((a * 2):sum(), b, { allow_unused = true }))
    raises(function() grad((a * 2):sum(), tm.ones(2)) end, "RuntimeError", "input 1, float32 %(2,%), does not require grad")
    raises(function() grad((a * 2):sum(), {}) end, "RuntimeError", "inputs is empty")
    raises(function() grad((a * 2):sum(), a, { create = true }) end, "TypeError", "unknown option create")
    raises(function() grad(1, a) end, "TypeError", "expected a tensor or a list of tensors, got number")
  end)

  it("takes one input twice", function()
    local a = leaf { 1, 2 }
    local g = grad((a * 2):sum(), { a, a })
    assert.near_tensor({ 2, 2 }, g[1], 0)
    assert.near_tensor({ 2, 2 }, g[2], 0)
  end)

  it("gives third derivatives", function()
    local x = leaf(2)
    local y = x ^ 4
    local d1 = grad(y, x, { create_graph = true })
    local d2 = grad(d1, x, { create_graph = true })
    local d3 = grad(d2, x)
    assert.near_tensor({ 32, 48, 48 }, { d1:item(), d2:item(), d3:item() }, 1e-9)
  end)
end)

describe("grad modes", function()
  it("stop and resume recording", function()
    local w = leaf { 1, 2 }
    local y, inner = tm.no_grad(function()
      assert.is_false(tm.is_grad_enabled())
      return w * 2, tm.enable_grad(function() return w * 2 end)
    end)
    assert.is_true(tm.is_grad_enabled())
    assert.is_false(y.requires_grad)
    assert.is_true(inner.requires_grad)
    assert.equal(true, tm.set_grad_enabled(false))
    assert.is_false((w * 2).requires_grad)
    assert.equal(false, tm.set_grad_enabled(true))
    raises(function() tm.set_grad_enabled(1) end, "TypeError", "expected a boolean")
  end)

  it("come back after an error, with results and nils as they were", function()
    assert.is_false(pcall(tm.no_grad, error, "oops"))
    assert.is_true(tm.is_grad_enabled())
    assert.is_false(pcall(tm.inference_mode, error, "oops"))
    assert.is_true(tm.is_grad_enabled())
    assert.equal(3, select("#", tm.no_grad(function() return nil, 1, nil end)))
    local ok, err = pcall(tm.no_grad, function() tm.ones(2):view(3) end)
    assert.is_false(ok)
    assert.equal("RuntimeError", err.kind)
  end)

  it("let a leaf be changed in place under no_grad", function()
    local w = leaf { 1, 2 }
    tm.no_grad(function() w:add_(1) end)
    assert.near_tensor({ 2, 3 }, w:detach(), 0)
    assert.is_true(w.is_leaf and w.requires_grad)
  end)

  it("make inference tensors that no graph saves or changes", function()
    local w = leaf { 1, 2 }
    local x = tm.inference_mode(function()
      local y = w * 2
      y:add_(1)
      return y
    end)
    assert.is_true(x:is_inference())
    assert.is_false(x.requires_grad)
    raises(function() return w * x end, "RuntimeError", "mul: float64 %(2,%) was made in inference mode and cannot be saved")
    raises(function() x:add_(1) end, "RuntimeError", "add_: float64 %(2,%) was made in inference mode")
    raises(function() x.requires_grad = true end, "RuntimeError", "inference mode")
    raises(function() x:view(2):add_(1) end, "RuntimeError", "inference mode")
    assert.near_tensor({ 4, 7 }, (w + x):detach(), 0) -- saves nothing
    assert.is_true((w * x:clone()).requires_grad)
    assert.is_false(tm.ones(2):is_inference())
  end)
end)

describe("grad modes of coroutines", function()
  it("go with the coroutine that yields inside, and come back with it", function()
    local w = leaf { 1, 2 }
    for _, how in ipairs { { tm.no_grad, false }, { tm.enable_grad, true } } do
      local before = not how[2]
      tm.set_grad_enabled(before)
      local co = coroutine.wrap(function(a)
        return "end", how[1](function(b)
          local c = coroutine.yield((w * 1).requires_grad, b)
          coroutine.yield((w * 1).requires_grad, c)
          return (w * 1).requires_grad
        end, a)
      end)
      assert.same({ how[2], 1 }, { co(1) })
      assert.equal(before, tm.is_grad_enabled())
      assert.same({ how[2], 2 }, { co(2) })
      assert.equal(before, tm.is_grad_enabled())
      assert.same({ "end", how[2] }, { co() })
      assert.equal(before, tm.is_grad_enabled())
      tm.set_grad_enabled(true)
    end
    local co = coroutine.wrap(function()
      tm.inference_mode(function()
        coroutine.yield()
        error "stop"
      end)
    end)
    co()
    assert.is_false(tm.ones(1):is_inference())
    assert.is_false(pcall(co))
    assert.is_true(tm.is_grad_enabled())
    assert.is_false(tm.ones(1):is_inference())
  end)

  it("take objects that can be called", function()
    local twice = setmetatable({}, { __call = function(_, x) return x * 2 end })
    assert.same({ 4 }, tm.no_grad(twice, tm.tensor { 2 }):tolist())
    coroutine.wrap(function() assert.same({ 4 }, tm.no_grad(twice, tm.tensor { 2 }):tolist()) end)()
  end)
end)

describe("detach", function()
  it("in place drops a history that came through a view", function()
    local w, base = leaf { 1, 2 }, ones { 2, 2 }
    local v = base[1]
    v:mul_(w)
    base:detach_()
    assert.is_false(base.requires_grad)
    assert.near_tensor({ 1, 1 }, grad(v:sum(), w), 0)
  end)

  it("shares elements and version, without history", function()
    local w = leaf { 1, 2 }
    local y = w * 2
    local d = y:detach()
    assert.is_false(d.requires_grad)
    assert.is_true(d.is_leaf)
    assert.equal(y:storage_id(), d:storage_id())
    local version = y.version
    d:add_(1)
    assert.equal(version + 1, y.version)
    assert.near_tensor({ 3, 5 }, y:detach(), 0)
  end)

  it("lets the version check see a change through it", function()
    local w = leaf { 1, 2 }
    local y = w:exp()
    y:detach():zero_()
    raises(function() y:sum():backward() end, "RuntimeError",
      "exp: a value needed for its gradient, float64 %(2,%), was changed in place: it is at version 1, expected version 0")
  end)

  it("cuts a tensor off in place, but not a view", function()
    local w = leaf { 1, 2 }
    local y = w * 2
    assert.is_true(rawequal(y, y:detach_()))
    assert.is_true(y.is_leaf and not y.requires_grad)
    assert.is_false(w:detach_().requires_grad)
    raises(function() (leaf { 1, 2 } * 2):view(2, 1):detach_() end, "RuntimeError", "is a view")
  end)

  it("is what data gives", function()
    local w = leaf { 1, 2 }
    assert.is_false(w.data.requires_grad)
    assert.equal(w:storage_id(), w.data:storage_id())
  end)
end)

describe("retain_grad", function()
  it("keeps the gradient of a result", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    y:retain_grad()
    y:retain_grad()
    assert.is_true(y.retains_grad)
    ;(y * y):sum():backward()
    assert.near_tensor({ 4, 8 }, y.grad, 0)
    x:retain_grad() -- nothing to do for a leaf
    assert.is_false(x.retains_grad)
    raises(function() tm.ones(2):retain_grad() end, "RuntimeError", "retain_grad: float32 %(2,%) does not require grad")
  end)

  it("follows the tensor through an in-place change", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    y:retain_grad()
    y:mul_(3)
    y:sum():backward()
    assert.near_tensor({ 1, 1 }, y.grad, 0)
    assert.near_tensor({ 6, 6 }, x.grad, 0)
  end)

  it("follows a base and a view through a change of the view", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    local v = y:view(2, 1)
    y:retain_grad()
    v:retain_grad()
    local before = v * 5
    v:mul_(3)
    local loss = (y * tm.tensor { 1, 10 }):sum() + v:sum() + before:sum()
    v, before = nil, nil -- luacheck: ignore
    tm.collect()
    loss:backward()
    assert.near_tensor({ 2, 11 }, y.grad, 0)
    assert.near_tensor({ 2 * (6 + 5), 2 * (33 + 5) }, x.grad, 0)
  end)

  it("forgets a tensor that is gone", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    y:retain_grad()
    local z = (y * y):sum()
    y = nil -- luacheck: ignore
    tm.collect()
    z:backward()
    assert.near_tensor({ 8, 16 }, x.grad, 0)
  end)
end)

describe("a change in place", function()
  it("of a value that backward reads is an error with both versions", function()
    local w = leaf { 1, 2 }
    local a = w * 1
    local y = a * a
    a:add_(1)
    raises(function() y:sum():backward() end, "RuntimeError",
      "mul: a value needed for its gradient, float64 %(2,%), was changed in place: it is at version 1, expected version 0")
    local x = tm.ones(2)
    local z = w * x
    x:zero_()
    raises(function() z:sum():backward() end, "RuntimeError", "mul: .* at version 1, expected version 0")
  end)

  it("of a value that nobody reads is allowed", function()
    local w = leaf { 1, 2 }
    local a = w + 1
    local y = a * 3
    a:zero_()
    y:sum():backward()
    assert.near_tensor({ 3, 3 }, w.grad, 0)
  end)

  it("of a leaf that requires grad, or a view of one, is refused", function()
    local w = leaf { 1, 2 }
    raises(function() w:add_(1) end, "RuntimeError", "add_: a leaf that requires grad, float64 %(2,%), cannot be changed in place")
    raises(function() w[1] = 5 end, "RuntimeError", "a view of a leaf that requires grad")
    raises(function() w:view(2, 1):mul_(2) end, "RuntimeError", "mul_: a view of a leaf that requires grad")
    assert.near_tensor({ 1, 2 }, w:detach(), 0)
    assert.equal(w.version, w:detach().version)
  end)

  it("becomes part of the history", function()
    local w, b = leaf { 1, 2 }, leaf { 3, 4 }
    local y = w * 2
    assert.equal("mul", y.grad_fn)
    y:mul_(b)
    y:add_(b, 5)
    assert.equal("add", y.grad_fn)
    y:sum():backward()
    assert.near_tensor({ 6, 8 }, w.grad, 0)
    assert.near_tensor({ 7, 9 }, b.grad, 0)
  end)

  it("takes a tensor without history into the graph", function()
    local w, x = leaf { 1, 2 }, tm.zeros(2, { dtype = "float64" })
    x:add_(w)
    assert.is_true(x.requires_grad and not x.is_leaf)
    x:sum():backward()
    assert.near_tensor({ 1, 1 }, w.grad, 0)
  end)

  it("through a view is seen by the base and by other views", function()
    local w = leaf { 1, 2, 3, 4 }
    local base = w * 1
    local left, square = base[{ { 1, 2 } }], base:view(2, 2)
    left:mul_(10)
    assert.near_tensor({ 10, 20, 3, 4 }, base:detach(), 0)
    assert.near_tensor({ { 10, 20 }, { 3, 4 } }, square:detach(), 0)
    assert.is_true(square.requires_grad)
    assert.near_tensor({ 10, 20, 6, 8 }, grad((base * base / 2):sum(), w, { retain_graph = true }) / tm.tensor { 10, 10, 0.5, 0.5 }, 1e-12)
    assert.near_tensor({ 10, 10, 1, 1 }, grad(square:sum(), w, { retain_graph = true }), 0)
    assert.near_tensor({ 10, 10, 0, 0 }, grad(left:sum(), w), 0)
  end)

  it("through views has the gradient of central differences", function()
    local function fn(w, b)
      local base = w * 1
      local row, column = base[2], base:narrow(2, 1, 2)
      row:mul_(b)
      column:mul_(2)
      base:t():select(1, 3):copy_(b:sum())
      row:add_(base[1])
      return base * base:t():contiguous():view(3, 3), row
    end
    local w, b = tm.linspace(-1, 1, 9, { dtype = "float64" }):view(3, 3):requires_grad_(), leaf { 0.5, 1, 2 }
    assert.is_true(tm.autograd.gradcheck(fn, { w, b }))
    assert.is_true(tm.autograd.gradgradcheck(fn, { w, b }))
  end)

  it("through the base is seen by its views", function()
    local w = leaf { 1, 2, 3, 4 }
    local base = w * 1
    local v = base:view(2, 2)
    base:mul_(3)
    v:sum():backward()
    assert.near_tensor({ 3, 3, 3, 3 }, w.grad, 0)
  end)

  it("through a view of a tensor without history takes that into the graph", function()
    local w, buffer = leaf { 1, 2 }, tm.zeros(2, 2, { dtype = "float64" })
    buffer[1] = w
    buffer[2] = w * 3
    assert.is_true(buffer.requires_grad)
    ;(buffer * buffer):sum():backward()
    assert.near_tensor({ 2 + 18, 4 + 36 }, w.grad, 0)
  end)

  it("by assignment through ranges, masks and positions is differentiable", function()
    local function fn(x, a, b, c)
      local y = x * 1
      y[{ {}, { 2, 3 } }] = a
      y[tm.tensor { 1, 3 }:long()] = b
      y[{ 2, tm.tensor { true, false, true } }] = c
      return y
    end
    local x, a = tm.randn(3, 3, { dtype = "float64", requires_grad = true }), tm.randn(3, 2, { dtype = "float64", requires_grad = true })
    local b, c = tm.randn(2, 3, { dtype = "float64", requires_grad = true }), tm.randn(2, { dtype = "float64", requires_grad = true })
    assert.is_true(tm.autograd.gradcheck(fn, { x, a, b, c }))
  end)

  it("through a view made under no_grad is refused", function()
    local w = leaf { 1, 2 }
    local y = w * 1
    local v = tm.no_grad(y.view, y, 2, 1)
    raises(function() v:mul_(2) end, "RuntimeError", "mul_: float64 %(2, 1%) is a view made under no_grad")
  end)

  it("of a tensor by itself, or by an overlapping part, reads the old values", function()
    local x = tm.tensor { 1, 2, 3, 4 }
    x:add_(x)
    assert.near_tensor({ 2, 4, 6, 8 }, x, 0)
    x[{ { 2, 4 } }] = x[{ { 1, 3 } }]
    assert.near_tensor({ 2, 2, 4, 6 }, x, 0)
    local m = tm.tensor { { 1, 2 }, { 3, 4 } }
    m:add_(m.T)
    assert.near_tensor({ { 2, 5 }, { 5, 8 } }, m, 0)
  end)

  it("of an expanded tensor is refused", function()
    raises(function() tm.ones(1):expand(3):add_(1) end, "RuntimeError", "several positions of x, float32 %(3,%), share one element")
  end)
end)

describe("tensor hooks", function()
  it("may replace the gradient of a leaf that set_data has reshaped, also while an old graph is alive", function()
    local w = leaf { 1, 1, 1 }
    local old = w * 2
    w.data = ones(5)
    w:register_hook(function(g) return g * 2 end)
    ;(w * 3):sum():backward()
    assert.near_tensor({ 6, 6, 6, 6, 6 }, w.grad, 0)
    raises(function() old:sum():backward() end, "RuntimeError", "its leaf is now")
  end)

  it("M148 run once per pass, with the sum over all paths, in order of registration, each on what the last returned", function()
    local x, log = leaf(2), {}
    x:register_hook(function(g) log[#log + 1] = "a" .. g:item() return g * 2 end)
    x:register_hook(function(g) log[#log + 1] = "b" .. g:item() end)
    x:register_hook(function(g) log[#log + 1] = "c" .. g:item() return g + 1 end)
    local y = x * 2 + x * 3
    y:backward { retain_graph = true }
    assert.same({ "a5", "b10", "c10" }, log)
    assert.equal(11, x.grad:item())
    y:backward()
    assert.same({ "a5", "b10", "c10", "a5", "b10", "c10" }, log)
    assert.equal(22, x.grad:item())
    raises(function() tm.ones(1):register_hook(print) end, "RuntimeError", "register_hook: float32 %(1,%) does not require grad")
    raises(function() x:register_hook(3) end, "TypeError", "expected a function, got number")
  end)

  it("M148 change what goes further down", function()
    local x = leaf(2)
    local y = x * 3
    y:register_hook(function(g) return g * 10 end)
    y:backward()
    assert.equal(30, x.grad:item())
  end)

  it("M148 may be callable tables", function()
    local x, seen = leaf(2), nil
    x:register_hook(setmetatable({}, { __call = function(_, g) seen = g:item() end }))
    ;(x * 3):backward()
    assert.equal(3, seen)
  end)

  it("M148a are not called where the pass brings no gradient", function()
    local x, calls = leaf { 3, 1, 2 }, 0
    local values, positions = x:max(1)
    local unused = x * 2
    unused:register_hook(function() calls = calls + 1 end)
    values:backward()
    assert.equal(0, calls)
    assert.is_false(positions.requires_grad)
  end)

  it("M149 must return a tensor of the gradient's shape, or nothing", function()
    local function with(result)
      local x = leaf { 1, 2 }
      x:register_hook(function() return result end)
      return function() x:sum():backward() end
    end
    raises(with(3), "TypeError", "hook: returned a number, expected a tensor")
    raises(with(false), "TypeError", "hook: returned a boolean")
    raises(with(ones(3)), "RuntimeError", "hook: returned float64 %(3,%), expected shape %(2,%)")
    raises(with(tm.ones(2)), "RuntimeError", "hook: returned float32 %(2,%), expected dtype float64")
    raises(with(tm.ones(2, { dtype = "float64", device = "meta" })), "RuntimeError", "meta")
  end)

  it("M150 see this pass's gradient on a leaf, and what they return is added to grad", function()
    local x, seen = leaf(1), {}
    x.grad = tm.tensor(100, { dtype = "float64" })
    x:register_hook(function(g) seen[#seen + 1] = g:item() return g * 2 end)
    for _ = 1, 2 do (x * 3):backward() end
    assert.same({ 3, 3 }, seen)
    assert.equal(112, x.grad:item())
  end)

  it("M151 have run when retain_grad stores, whatever was asked for first", function()
    for _, first in ipairs { true, false } do
      local x = leaf(2)
      local y = x * 3
      if first then y:retain_grad() end
      y:register_hook(function(g) return g * 10 end)
      if not first then y:retain_grad() end
      y:backward()
      assert.equal(10, y.grad:item())
      assert.equal(30, x.grad:item())
    end
  end)

  it("M152 run for inputs of grad, which returns the hooked gradient", function()
    local x = leaf(2)
    local y = x * 3
    x:register_hook(function(g) return g + 1 end)
    y:register_hook(function(g) return g * 10 end)
    local gx, gy = unpack(grad(y * 1, { x, y }))
    assert.equal(31, gx:item())
    assert.equal(10, gy:item())
  end)

  it("M153 registered before an in-place change belong to the old value", function()
    local x, log = leaf(2), {}
    local y = x * 3
    y:register_hook(function(g) log[#log + 1] = "old " .. g:item() end)
    y:mul_(5)
    y:register_hook(function(g) log[#log + 1] = "new " .. g:item() end)
    y:backward()
    assert.same({ "new 1", "old 5" }, log)
  end)

  it("M154 after accumulation get the tensor with its grad, and may change both", function()
    local w, seen = leaf { 1, 2 }, nil
    w:register_post_accumulate_grad_hook(function(t)
      assert.is_true(rawequal(w, t))
      assert.is_false(tm.is_grad_enabled())
      seen = t.grad:tolist()
      t:sub_(t.grad, 0.5) -- a step inside backward
      t.grad = nil
    end)
    ;(w * 4):sum():backward()
    assert.same({ 4, 4 }, seen)
    assert.near_tensor({ -1, 0 }, w:detach(), 0)
    assert.is_nil(w.grad)
    local calls = 0
    w:register_post_accumulate_grad_hook(function() calls = calls + 1 end)
    grad((w * 4):sum(), w)
    assert.equal(0, calls)
  end)

  it("M154 after accumulation are for leaves, and return nothing", function()
    local w = leaf { 1, 2 }
    raises(function() (w * 2):register_post_accumulate_grad_hook(print) end, "RuntimeError", "only for leaves; this tensor was made by mul")
    raises(function() tm.ones(2):register_post_accumulate_grad_hook(print) end, "RuntimeError", "does not require grad")
    w:register_post_accumulate_grad_hook(function() return 1 end)
    raises(function() w:sum():backward() end, "RuntimeError", "post%-accumulate%-grad hook: returned a number")
  end)

  it("M155 come in order: tensor hooks, retained grad, the node, accumulation, post-accumulate hooks", function()
    local x, log = leaf(2), {}
    local y = x * 3
    y:retain_grad()
    y:register_hook(function() log[#log + 1] = "y hook, y.grad " .. tostring(y.grad) end)
    x:register_hook(function() log[#log + 1] = ("x hook, y.grad %g, x.grad %s"):format(y.grad:item(), tostring(x.grad)) end)
    x:register_post_accumulate_grad_hook(function() log[#log + 1] = ("x post, x.grad %g"):format(x.grad:item()) end)
    y:backward()
    assert.same({ "y hook, y.grad nil", "x hook, y.grad 1, x.grad nil", "x post, x.grad 3" }, log)
  end)

  it("M156 are not copied by clone", function()
    local x, calls = leaf { 1, 2 }, 0
    x:register_hook(function() calls = calls + 1 end)
    local copy = x:detach():clone():requires_grad_()
    copy:sum():backward()
    assert.equal(0, calls)
  end)

  it("M157 give a handle that removes them, also twice and inside a hook", function()
    local x, log = leaf(1), {}
    local a = x:register_hook(function() log[#log + 1] = "a" end)
    local b
    b = x:register_hook(function() log[#log + 1] = "b" b:remove() end)
    local late
    x:register_hook(function()
      log[#log + 1] = "c"
      late:remove()
    end)
    late = x:register_hook(function() log[#log + 1] = "late" end)
    local post = x:register_post_accumulate_grad_hook(function() log[#log + 1] = "post" end)
    ;(x * 1):backward()
    assert.same({ "a", "b", "c", "post" }, log)
    a:remove()
    a:remove()
    post:remove()
    ;(x * 1):backward()
    assert.same({ "a", "b", "c", "post", "c" }, log)
    local y, on_result = x * 1, 0
    local h = y:register_hook(function() on_result = on_result + 1 end)
    h:remove()
    y:backward()
    assert.equal(0, on_result)
  end)

  it("M157 stay with a leaf whose data is replaced", function()
    local x, calls = tm.ones(2, { requires_grad = true }), 0
    x:register_hook(function() calls = calls + 1 end)
    x.data = tm.zeros(2, { dtype = "float64" })
    assert.equal("float64", x.dtype)
    x:sum():backward()
    assert.equal(1, calls)
    assert.equal("float64", x.grad.dtype)
  end)

  it("M157 move with the content when tensors are swapped", function()
    local a, b, log = leaf(1), leaf(2), {}
    a:register_hook(function() log[#log + 1] = "a" end)
    tm.swap_tensors(a, b)
    ;(b * 1):backward()
    ;(a * 1):backward()
    assert.same({ "a" }, log)
  end)

  it("may raise: backward stops with the error, and works afterwards", function()
    local x = leaf(1)
    local h = x:register_hook(function() error({ code = 7 }) end)
    local ok, err = pcall(function() (x * 2):backward() end)
    assert.is_false(ok)
    assert.equal(7, err.code)
    h:remove()
    assert.is_true(tm.is_grad_enabled())
    ;(x * 2):backward()
    assert.equal(2, x.grad:item())
  end)

  it("may yield: the pass goes on when the coroutine does, and others run meanwhile", function()
    local x = leaf(1)
    local y = x * 2
    y:register_hook(function(g) return coroutine.yield(g:item()) end)
    local co = coroutine.create(function() (y * 3):backward() return "done" end)
    local ok, seen = coroutine.resume(co)
    assert.is_true(ok)
    assert.equal(3, seen)
    assert.is_nil(x.grad)
    local other = leaf(5)
    ;(other * other):backward()
    assert.equal(10, other.grad:item())
    local _, result = coroutine.resume(co, tm.tensor(100, { dtype = "float64" }))
    assert.equal("done", result)
    assert.equal(200, x.grad:item())
  end)

  it("leave recording on for others while they are suspended", function()
    local x = leaf(1)
    x:register_hook(function() coroutine.yield() end)
    local co = coroutine.wrap(function() (x * 2):backward() end)
    co()
    assert.is_true((x * 2).requires_grad)
    co()
    assert.is_true(tm.is_grad_enabled())
  end)

  it("may start another backward pass, of other graphs and of their own", function()
    local x, w = leaf(2), leaf(3)
    local y = x * x
    local inner
    y:register_hook(function()
      if inner then return end
      inner = true
      tm.enable_grad(function() (w * w):backward() end)
      inner = grad(y, x, { retain_graph = true }):item()
    end)
    y:backward()
    assert.equal(6, w.grad:item())
    assert.equal(4, inner)
    assert.equal(4, x.grad:item())
  end)

  it("record in the graph that create_graph builds", function()
    local x = leaf(3)
    local y = x * x
    y:register_hook(function(g) return g * x end)
    local g = grad(y, x, { create_graph = true }) -- 2x^2
    assert.equal(18, g:item())
    assert.equal(12, grad(g, x):item())
  end)

  it("keep nothing alive", function()
    leaves_nothing(function()
      local x = leaf { 1, 2 }
      local y = x * 2
      x:register_hook(function(g) return g * x:detach() end) -- refers to its own tensor
      y:register_hook(function(g) return g + 0 end)
      x:register_post_accumulate_grad_hook(function() end)
      y:retain_grad()
      y:sum():backward()
    end)
  end)
end)

describe("autograd.Function", function()
  it("has results that can be changed in place once set_data has given them memory of their own", function()
    local Alias = Function:extend "Alias"
    function Alias.forward(_, x) return x:view(2) end
    function Alias.backward(_, dy) return dy end
    local x = leaf { 1, 2 }
    local y = Alias.apply(x)
    raises(function() y:add_(1) end, "RuntimeError", "add_")
    y.data = ones(2)
    y:add_(1)
    y:sum():backward()
    assert.near_tensor({ 1, 1 }, x.grad, 0)
  end)

  it("has a name", function()
    raises(function() Function:extend() end, "TypeError", "expected a name, got nil")
    raises(function() Function:extend {} end, "TypeError", "expected a name, got table")
  end)

  local Cube = Function:extend "Cube"
  function Cube.forward(ctx, x)
    ctx:save_for_backward(x)
    return x * x * x
  end
  function Cube.backward(ctx, dy)
    local x = ctx:saved()
    return 3 * x * x * dy
  end

  it("differentiates what forward hides", function()
    local x = leaf { 1, 2 }
    local y = Cube.apply(x)
    assert.equal("Cube", y.grad_fn)
    y:sum():backward()
    assert.near_tensor({ 3, 12 }, x.grad, 0)
    assert.is_true(Cube(x).requires_grad)
    assert.is_false(Cube.apply(tm.ones(2)).requires_grad)
    assert.is_false(tm.no_grad(Cube.apply, x).requires_grad)
  end)

  it("is differentiable again when its backward is", function()
    local x = leaf { 0.5, 2 }
    assert.is_true(tm.autograd.gradcheck(Cube.apply, { x }))
    assert.is_true(tm.autograd.gradgradcheck(Cube.apply, { x }))
  end)

  it("takes and returns several tensors and other values", function()
    local Mixed = Function:extend "Mixed"
    local seen
    function Mixed.forward(ctx, a, factor, b, name)
      ctx:save_for_backward(a, nil, b)
      ctx.factor = factor
      seen = { name = name, needs = ctx.needs_input_grad }
      return a * factor, name, a * b
    end
    function Mixed.backward(ctx, da, dab)
      local a, hole, b = ctx:saved()
      assert.is_nil(hole)
      return da * ctx.factor + dab * b, nil, dab * a
    end
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    local x, name, y = Mixed.apply(a, 10, b, "n")
    assert.equal("n", name)
    assert.same({ true, false, true, false }, seen.needs)
    ;(x * 1 + y * 2):sum():backward()
    assert.near_tensor({ 16, 18 }, a.grad, 0)
    assert.near_tensor({ 2, 4 }, b.grad, 0)
    assert.is_true(tm.autograd.gradcheck(function(p, q) local u, _, v = Mixed.apply(p, 10, q, "n") return u, v end, { a, b }))
  end)

  it("gives zeros for a result that brought no gradient, or nil if asked to", function()
    local seen
    local Two = Function:extend "Two"
    function Two.forward(ctx, x, plain)
      if plain then ctx:set_materialize_grads(false) end
      return x * 2, x * 3
    end
    function Two.backward(_, a, b)
      seen = { a, b }
      return a and a * 2
    end
    local x = leaf { 1, 2 }
    local y = Two.apply(x, false)
    y:sum():backward()
    assert.near_tensor({ 0, 0 }, seen[2], 0)
    assert.near_tensor({ 2, 2 }, x.grad, 0)
    local _, z = Two.apply(x, true)
    z:sum():backward()
    assert.is_nil(seen[1])
    assert.near_tensor({ 1, 1 }, seen[2], 0)
    assert.near_tensor({ 2, 2 }, x.grad, 0)
  end)

  it("checks the versions of what it saved", function()
    local x = leaf { 1, 2 }
    local a = x * 1
    local y = Cube.apply(a)
    a:add_(1)
    raises(function() y:sum():backward() end, "RuntimeError", "Cube: a value needed for its gradient.* at version 1, expected version 0")
  end)

  it("saves results as well", function()
    local Exp = Function:extend "Exp"
    function Exp.forward(ctx, x)
      local y = x:exp()
      ctx:save_for_backward(y)
      return y
    end
    function Exp.backward(ctx, dy) return ctx:saved() * dy end
    local x = leaf { 0.5, 1 }
    assert.is_true(tm.autograd.gradcheck(Exp.apply, { x }))
    assert.is_true(tm.autograd.gradgradcheck(Exp.apply, { x }))
    leaves_nothing(function() Exp.apply(leaf { 1, 2 }) end)
  end)

  it("frees what it saved after backward", function()
    local y = Cube.apply(leaf { 1, 2 }):sum()
    y:backward { retain_graph = true }
    y:backward()
    raises(function() y:backward() end, "RuntimeError", "Cube: backward a second time")
    local ctx_of
    local Keep = Function:extend "Keep"
    function Keep.forward(ctx, x) ctx_of = ctx return x * 1 end
    function Keep.backward(_, dy) return dy end
    Keep.apply(leaf { 1 }):backward()
    raises(function() ctx_of:saved() end, "RuntimeError", "saved: only inside backward")
  end)

  it("marks inputs that forward changes in place", function()
    local Double = Function:extend "Double"
    function Double.forward(ctx, x)
      ctx:mark_dirty(x)
      return x:mul_(2)
    end
    function Double.backward(_, dy) return dy * 2 end
    local w = leaf { 1, 2 }
    local x = w * 3
    local y = Double.apply(x)
    assert.is_true(rawequal(x, y))
    assert.equal("Double", x.grad_fn)
    y:sum():backward()
    assert.near_tensor({ 6, 6 }, w.grad, 0)
    raises(function() Double.apply(leaf { 1, 2 }) end, "RuntimeError", "Double: a leaf that requires grad cannot be changed in place")
  end)

  it("marks results that have no gradient", function()
    local Arg = Function:extend "Arg"
    function Arg.forward(ctx, x)
      local floor = x * 0
      ctx:mark_non_differentiable(floor)
      return x * 2, floor, x:argmax()
    end
    function Arg.backward(_, dy, none)
      assert.is_nil(none)
      return dy * 2
    end
    local x = leaf { 1, 2 }
    local y, floor, at = Arg.apply(x)
    assert.is_true(y.requires_grad)
    assert.is_false(floor.requires_grad)
    assert.is_false(at.requires_grad)
    y:sum():backward()
    assert.near_tensor({ 2, 2 }, x.grad, 0)
  end)

  it("returns an input as a result of its own", function()
    local Same = Function:extend "Same"
    function Same.forward(_, x) return x end
    function Same.backward(_, dy) return dy * 7 end
    local x = leaf { 1, 2 }
    local y = Same.apply(x)
    assert.is_false(rawequal(x, y))
    y:sum():backward()
    assert.near_tensor({ 7, 7 }, x.grad, 0)
  end)

  it("reports a wrong backward by its name", function()
    local function wrong(result)
      local Wrong = Function:extend "Wrong"
      function Wrong.forward(_, x) return x * 2 end
      function Wrong.backward() return unpack(result, 1, result.n or #result) end
      return function() Wrong.apply(leaf { 1, 2 }):sum():backward() end
    end
    raises(wrong { 3 }, "TypeError", "Wrong: backward returned a number for argument 1")
    raises(wrong { ones(2), ones(2) }, "RuntimeError", "Wrong: backward returned 2 gradients, expected at most 1")
    raises(wrong { ones(3) }, "RuntimeError", "Wrong: backward gave a gradient float64 %(3,%) for input 1 of shape %(2,%)")
    raises(wrong { tm.ones(2, { dtype = "float64", device = "meta" }) }, "RuntimeError", "meta")
    wrong {}() -- no gradient
    local Half = Function:extend "Half"
    function Half.forward(_, x) return x end
    raises(function() Half.apply(leaf { 1 }) end, "NotImplementedError", "Half: a Function needs forward and backward")
  end)

  it("lets errors of forward and backward through", function()
    local Bad = Function:extend "Bad"
    function Bad.forward(_, x, when)
      if when == "forward" then error "forward failed" end
      return x * 2
    end
    function Bad.backward() error "backward failed" end
    assert.truthy(select(2, pcall(Bad.apply, leaf { 1 }, "forward")):find "forward failed")
    assert.is_true(tm.is_grad_enabled())
    local y = Bad.apply(leaf { 1 })
    assert.truthy(select(2, pcall(y.backward, y)):find "backward failed")
  end)

  it("yields from backward", function()
    local Wait = Function:extend "Wait"
    function Wait.forward(_, x) return x * 2 end
    function Wait.backward(_, dy) return coroutine.yield(dy) * 2 end
    local x = leaf(1)
    local co = coroutine.create(function() Wait.apply(x):backward() end)
    local _, dy = coroutine.resume(co)
    assert.equal(1, dy:item())
    assert.is_true(coroutine.resume(co, dy * 5))
    assert.equal(10, x.grad:item())
  end)

  it("keeps nothing alive", function()
    leaves_nothing(function()
      local x = leaf { 1, 2 }
      Cube.apply(x):sum():backward()
      Cube.apply(x)
      local None = Function:extend "None"
      function None.forward(ctx, t)
        local y = t * 2
        ctx:mark_non_differentiable(y)
        return y
      end
      function None.backward() end
      None.apply(x)
    end)
  end)

  it("serves more results than an operator may have", function()
    local Many = Function:extend "Many"
    function Many.forward(_, x)
      local out = {}
      for i = 1, 7 do out[i] = x * i end
      return unpack(out)
    end
    function Many.backward(_, ...)
      local sum = 0
      for i = 1, 7 do sum = sum + select(i, ...) * i end
      return sum
    end
    local x = leaf(1)
    local outs = { Many.apply(x) }
    ;(outs[2] * 10 + outs[7]):backward()
    assert.equal(27, x.grad:item())
  end)
end)

describe("anomaly mode", function()
  local function line() return debug.getinfo(2, "l").currentline end

  it("names the operator and the line of the forward call whose gradient has a NaN", function()
    local x = leaf { -1, 4 }
    local y, at
    tm.autograd.detect_anomaly(function()
      y = x:sqrt() at = line()
      local err = raises(function() y:sum():backward() end, "RuntimeError", "sqrt: its gradient for input 1 has a NaN")
      assert.truthy(tostring(err):find("spec/autograd_spec.lua:" .. at, 1, true), tostring(err))
    end)
    x.grad = nil
    x:sqrt():sum():backward() -- off again
    assert.is_true(x.grad[1]:item() ~= x.grad[1]:item())
  end)

  it("names the line for other errors of backward", function()
    local x, at = leaf { 1, 2 }, nil
    tm.autograd.detect_anomaly(function()
      local a = x * 1
      local y = a * a at = line()
      a:add_(1)
      local err = raises(function() y:sum():backward() end, "RuntimeError", "mul: a value needed")
      assert.truthy(tostring(err):find("spec/autograd_spec.lua:" .. at, 1, true), tostring(err))
    end)
  end)

  it("is switched on and off, and off again after an error", function()
    tm.autograd.set_detect_anomaly(true)
    tm.autograd.set_detect_anomaly(false)
    pcall(tm.autograd.detect_anomaly, error, "no")
    local x = leaf { 0 }
    ;(x / x):backward()
  end)
end)

describe("gradcheck", function()
  local Wrong = Function:extend "WrongTanh"
  function Wrong.forward(ctx, x)
    local y = x:tanh()
    ctx:save_for_backward(y)
    return y
  end
  function Wrong.backward(ctx, dy) local y = ctx:saved() return (1 - y) * dy end

  it("fails on a wrong gradient and says where", function()
    local x = leaf { 0.5, -1 }
    raises(function() tm.autograd.gradcheck(Wrong.apply, { x }) end, "RuntimeError",
      "gradcheck: output 1, element 1, input 1, element 1: backward gives")
    local ok, text = tm.autograd.gradcheck(Wrong.apply, { x }, { raise = false })
    assert.is_false(ok)
    assert.truthy(text:find "central differences")
    assert.is_true(tm.autograd.gradcheck(tm.tanh, x))
  end)

  it("fails on a gradient that is not there", function()
    local x = leaf { 0.5, -1 }
    assert.is_false(tm.autograd.gradcheck(function(t) return t:detach() * 2 end, { x }, { raise = false }))
  end)

  it("fails on a second gradient that is wrong, though the first is right", function()
    local Flat = Function:extend "Flat" -- its gradient is right but a constant of the graph
    function Flat.forward(ctx, x)
      ctx:save_for_backward(x)
      return x * x
    end
    function Flat.backward(ctx, dy) return ctx:saved():detach() * 2 * dy end
    local x = leaf { 0.5, -1 }
    assert.is_true(tm.autograd.gradcheck(Flat.apply, { x }))
    assert.is_false(tm.autograd.gradgradcheck(Flat.apply, { x }, { raise = false }))
  end)

  it("leaves its inputs as they were", function()
    local x = leaf { 0.5, -1 }
    tm.autograd.gradcheck(function(t) return t:exp(), t * 2 end, { x })
    assert.near_tensor({ 0.5, -1 }, x:detach(), 0)
    assert.is_nil(x.grad)
  end)

  it("wants float64 and an input that requires grad", function()
    raises(function() tm.autograd.gradcheck(tm.exp, { tm.ones(2, { requires_grad = true }) }) end, "RuntimeError", "input 1 is float32")
    raises(function() tm.autograd.gradcheck(tm.exp, { tm.ones(2) }) end, "RuntimeError", "no input requires grad")
  end)
end)

describe("grad of a tensor", function()
  it("is set and dropped, but only to what fits", function()
    local x = leaf { 1, 2 }
    local g = ones(2)
    x.grad = g
    assert.is_true(rawequal(g, x.grad))
    x.grad = nil
    assert.is_nil(x.grad)
    raises(function() x.grad = tm.ones(2) end, "RuntimeError", "grad: float32 %(2,%) does not fit a tensor float64 %(2,%)")
    raises(function() x.grad = ones(3) end, "RuntimeError", "does not fit")
    raises(function() x.grad = x end, "RuntimeError", "cannot be its own gradient")
    raises(function() x.grad = 3 end, "TypeError", "expected a tensor or nil, got number")
  end)

  it("of a swapped leaf is refused with a reason", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    local y = (a * 2):sum()
    tm.swap_tensors(a, b)
    raises(function() y:backward() end, "RuntimeError", "was swapped between forward and backward")
  end)
end)
