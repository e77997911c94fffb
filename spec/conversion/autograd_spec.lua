---Section 7 of docs/contracts/conversion.md, with V3 to V5 of section 2.1: graphs that are older than a conversion.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local nn = tm.nn

local function x(dtype, ...) return tm.ones({ 1, 2 }, { dtype = dtype or "float32", ... }) end

---The accumulator is the second user of a content, while a graph holds it.
local function has_accumulator(t) return tm.use_count(t) == 2 end

K.guard()

describe("the node that accumulates into a leaf", function()
  it("C92: is made by the first forward, shared by all graphs, and goes with the last", function()
    local l = nn.Linear(2, 3)
    assert.equal(1, tm.use_count(l.weight))
    local graphs = { l(x()) }
    assert.is_true(has_accumulator(l.weight))
    local before = tm.live().nodes
    table.insert(graphs, l(x())) -- one operator more, and no other node
    assert.equal(before + 1, tm.live().nodes)
    for i = #graphs, 1, -1 do
      assert.is_true(has_accumulator(l.weight))
      graphs[i] = nil
      tm.collect()
    end
    assert.equal(1, tm.use_count(l.weight))
  end)

  it("C92 T93: stays in a conversion that changes nothing; a new dtype asks for a new one", function()
    local l = nn.Linear(2, 3)
    local graphs = { l(x()) }
    l:to()
    l:to "cpu"
    assert.is_true(has_accumulator(l.weight))
    l:double()
    assert.equal(1, tm.use_count(l.weight))
    local before = tm.live().nodes
    table.insert(graphs, l(x "float64")) -- the operator's node and new accumulators of weight and bias
    assert.equal(before + 3, tm.live().nodes)
  end)
end)

describe("forward, then a conversion, then backward", function()
  it("C93 C94 T52: without flags the gradient is cast to what the leaf is now", function()
    local l = nn.Linear(2, 3)
    local y = l(x())
    l:half()
    y:sum():backward()
    assert.equal("float16", l.weight.grad.dtype)
    assert.near_tensor({ { 1, 1 }, { 1, 1 }, { 1, 1 } }, l.weight.grad)
    assert.near_tensor({ 1, 1, 1 }, l.bias.grad)
  end)

  it("C94: and added to a gradient that was converted", function()
    local l = nn.Linear(2, 3)
    l(x()):sum():backward()
    local y = l(x())
    local g = l.bias.grad
    l:double()
    y:sum():backward()
    assert.equal(g, l.bias.grad)
    assert.equal("float64", g.dtype)
    assert.near_tensor({ 2, 2, 2 }, g)
  end)

  pending("C94: a leaf that moved to another device meanwhile makes backward raise: needs CUDA")

  it("C95 T54: graphs from before and after accumulate into one gradient", function()
    local l = nn.Linear(2, 1)
    local y = l(x())
    l:double()
    local z = l(3 * x "float64")
    y:sum():backward()
    z:sum():backward()
    assert.near_tensor({ { 4, 4 } }, l.weight.grad)
    assert.near_tensor({ 2 }, l.bias.grad)
    assert.equal("float64", l.bias.grad.dtype)
  end)

  for _, mode in ipairs { K.MODES[1], K.MODES[2] } do
    it("C96 T53: an operator that saved the leaf reads its old values (section 2.1, V3) [" .. mode.name .. "]", function()
      local m = nn.Module()
      m.w = nn.Parameter(tm.tensor { 1, 2, 3 })
      local w = m.w
      local y = w * w
      K.with_flags(mode)(m._apply, m, function(t) return t * 2 end)
      assert.near_tensor({ 2, 4, 6 }, m.w:detach())
      y:sum():backward()
      assert.near_tensor({ 2, 4, 6 }, w.grad) -- 2 * old w, and not 2 * new w
      assert.equal(mode.name == "default", m.w == w)
    end)
  end

  it("C97: one that saved a view of the leaf, too", function()
    local m = nn.Module()
    m.w = nn.Parameter(tm.tensor { { 1, 2 }, { 3, 4 } })
    local input = tm.ones(1, 2):requires_grad_()
    local y = input:matmul(m.w:t())
    m:_apply(function(t) return t * 10 end)
    y:backward(tm.tensor { { 1, 0 } })
    assert.near_tensor({ { 1, 2 } }, input.grad)
    assert.near_tensor({ { 1, 1 }, { 0, 0 } }, m.w.grad)
  end)

  it("C100 T55: with overwrite the gradient goes to the old parameter, and nobody says so", function()
    local l = nn.Linear(2, 3)
    local old = l.weight
    local y = l(x())
    K.with_flags { overwrite = true }(l.double, l)
    y:sum():backward()
    assert.equal("float32", old.grad.dtype)
    assert.is_nil(l.weight.grad)
  end)

  for _, mode in ipairs { K.MODES[3], K.MODES[4] } do
    it("C101 C103 T49: with swap backward refuses, and says what to do [" .. mode.name .. "]", function()
      local l = nn.Linear(2, 3)
      local y = l(x())
      K.with_flags(mode)(l.half, l)
      assert.equal("float16", l.weight.dtype)
      local e = H.raises(function() y:sum():backward() end, "RuntimeError", "swapped between forward and backward")
      assert.truthy(e:find "convert before forward or after backward")
      assert.is_nil(l.weight.grad)
      l(x "float16"):sum():backward() -- the next forward makes a new node
      assert.equal("float16", l.weight.grad.dtype)
    end)

    it("C101 T50: whatever the graph saved: the conversion passes, and backward refuses (section 2.1, V4) [" .. mode.name .. "]", function()
      local m = nn.Module()
      m.w = nn.Parameter(tm.tensor { 1, 2, 3 })
      local y = m.w * m.w
      K.with_flags(mode)(m.half, m)
      H.raises(function() y:sum():backward() end, "RuntimeError", "swapped")
      assert.is_nil(m.w.grad)
      local z = (m.w * m.w):sum()
      z:backward()
      assert.near_tensor({ 2, 4, 6 }, m.w.grad)
    end)
  end

  it("C101 C103: every accumulator older than the swap refuses, also one that set_data has parted from its leaf (V5)", function()
    local l = nn.Linear(2, 3)
    local first = l(x())
    l:double()
    local second = l(x "float64")
    K.with_flags { swap = true }(l.float, l)
    local third = l(x())
    H.raises(function() first:sum():backward() end, "RuntimeError", "swapped")
    H.raises(function() second:sum():backward() end, "RuntimeError", "swapped")
    third:sum():backward()
    assert.near_tensor({ 1, 1, 1 }, l.bias.grad)
  end)

  it("C103: the refusal comes before the leaf's hooks; other leaves keep what they received", function()
    local l = nn.Linear(2, 3)
    local other = nn.Parameter(tm.ones(3))
    local y = l(x()) * other
    local ran = 0
    K.with_flags { swap = true }(l.half, l)
    l.weight:register_hook(function() ran = ran + 1 end)
    l.bias:register_hook(function() ran = ran + 1 end)
    H.raises(function() y:sum():backward() end, "RuntimeError", "swapped")
    assert.equal(0, ran)
    assert.same({ 3 }, other.grad:size())
  end)

  it("C103: gradients of other tensors alone can still be asked for", function()
    local l = nn.Linear(2, 1)
    local input = x():requires_grad_()
    local y = l(input)
    local w = l.weight:tolist()
    K.with_flags { swap = true }(l.half, l)
    assert.near_tensor(w, tm.autograd.grad(y:sum(), input))
  end)

  K.each_mode("C102 T51: after backward a conversion is always fine, also while the output lives", function()
    local l = nn.Linear(2, 3)
    local old = l.bias
    local y = l(x())
    y:sum():backward()
    l:half()
    local z = l(x "float16")
    z:sum():backward()
    l:float()
    assert.equal("float32", l.weight.dtype)
    assert.near_tensor({ 2, 2, 2 }, l.bias.grad)
    assert.is_true(old.grad ~= nil)
    assert.same({ 1, 3 }, y:size())
  end)
end)

describe("hooks", function()
  K.each_mode("C98 C99 T56: a hook of the tensor goes on after set_data, and is gone after replacement and swap", function(mode)
    local l = nn.Linear(2, 3)
    local ran = { grad = 0, post = 0 }
    l.weight:register_hook(function() ran.grad = ran.grad + 1 end)
    l.weight:register_post_accumulate_grad_hook(function() ran.post = ran.post + 1 end)
    l:double()
    l(x "float64"):sum():backward()
    local n = mode.name == "default" and 1 or 0
    assert.same({ grad = n, post = n }, ran)
    -- one registered now runs in every mode
    l.weight:register_hook(function() ran.grad = ran.grad + 10 end)
    l.weight:register_post_accumulate_grad_hook(function() ran.post = ran.post + 10 end)
    l(x "float64"):sum():backward()
    assert.same({ grad = 2 * n + 10, post = 2 * n + 10 }, ran)
  end)

  it("C98: they also see the gradients of a graph from before the conversion", function()
    local l = nn.Linear(2, 3)
    local seen, post = nil, 0
    l.bias:register_hook(function(g) seen = g.dtype return g * 2 end)
    l.bias:register_post_accumulate_grad_hook(function(p)
      post = post + 1
      assert.equal("float64", p.grad.dtype)
    end)
    local y = l(x())
    l:double()
    y:sum():backward()
    assert.equal("float32", seen)
    assert.equal(1, post)
    assert.near_tensor({ 2, 2, 2 }, l.bias.grad)
  end)

  pending("C98 T57: a hook on the accumulating node stops after a change of dtype: nodes take no hooks here, tensors do")
end)

describe("a function that changes its argument in place", function()
  for _, mode in ipairs { K.MODES[1], K.MODES[2] } do
    it("C104 C105 T92: bumps the version that old and new parameter share, and backward raises [" .. mode.name .. "]", function()
      local m = nn.Module()
      m.w = nn.Parameter(tm.tensor { 1, 2 })
      local old, version = m.w, m.w.version
      local y = m.w * m.w
      K.with_flags(mode)(m._apply, m, function(t) return t:add_(1) end)
      assert.equal(version + 1, old.version)
      assert.equal(old.version, m.w.version)
      assert.equal(old:storage_id(), m.w:storage_id())
      assert.equal(mode.name == "default", m.w == old)
      assert.near_tensor({ 2, 3 }, old:detach())
      H.raises(function() y:sum():backward() end, "RuntimeError", "changed in place")
    end)
  end

  K.each_mode("C104: one that does not leaves the version of the content as it was", function()
    local m = nn.Module()
    m.w = nn.Parameter(tm.tensor { 1, 2 })
    local alias = m.w:detach() -- has its storage and version, and stays with them
    local version = alias.version
    m:_apply(function(t) return t + 1 end)
    assert.equal(version, alias.version)
    assert.near_tensor({ 1, 2 }, alias)
    assert.near_tensor({ 2, 3 }, m.w:detach())
  end)
end)

describe("a view made before the conversion", function()
  K.each_mode("C106: stays on the old storage in every mode (section 2.1, V4)", function(mode)
    local l = nn.Linear(2, 3)
    local w, storage, values = l.weight, l.weight:storage_id(), l.weight:tolist()
    local view = w[1]
    l:double()
    assert.equal("float32", view.dtype)
    assert.equal(storage, view:storage_id())
    assert.same(values[1], view:tolist())
    assert.is_true(l.weight:storage_id() ~= storage)
    assert.equal(not mode.kept, w:storage_id() == storage) -- the old parameter and its view still agree
    tm.no_grad(l.weight.zero_, l.weight)
    assert.same(values[1], view:tolist())
  end)
end)

describe("load_state_dict between forward and backward", function()
  it("C107 T75: raises if the weight was saved, and passes otherwise", function()
    local l = nn.Linear(2, 3)
    local state = nn.Linear(2, 3):state_dict()
    local y = l(x():requires_grad_())
    l:load_state_dict(state)
    H.raises(function() y:sum():backward() end, "RuntimeError", "changed in place")
    y = l(x())
    l:load_state_dict(state)
    l:zero_grad()
    y:sum():backward()
    assert.near_tensor({ 1, 1, 1 }, l.bias.grad)
  end)
end)
