local H = require "spec.helper"
local tm = require "tmod"
local nn, optim = tm.nn, tm.optim

---The problem of golden/make_training.py. b takes part from step `late` on.
local function problem()
  local a = nn.Parameter(tm.tensor({ 1, -2, 0.5 }, { dtype = "float64" }))
  local b = nn.Parameter(tm.tensor({ { 0.3, -0.7 }, { 1.1, 0.2 } }, { dtype = "float64" }))
  local c = tm.tensor({ 1, 0.5, 2 }, { dtype = "float64" })
  local function backward(step, late)
    local loss = (a * a * c):sum()
    if step >= late then
      local r = b * b - 0.5
      loss = loss + (r * r):sum() + 0.1 * a:sum() * b:sum()
    end
    loss:backward()
  end
  return a, b, backward
end

local function text(options)
  local parts = {}
  for k, v in pairs(options) do parts[#parts + 1] = k .. "=" .. (type(v) == "table" and table.concat(v, "/") or tostring(v)) end
  table.sort(parts)
  return table.concat(parts, " ")
end

describe("tm.optim", function()
  for _, case in ipairs(require "spec.golden.optim") do
    local name, options, late = case[1], case[2], case.late
    it(("takes PyTorch's 20 steps: %s %s, second parameter from step %d on"):format(name, text(options), late), function()
      local a, b, backward = problem()
      local o = optim[name]({ a, b }, options)
      local at = 1
      for step = 1, 20 do
        o:zero_grad()
        backward(step, late)
        o:step()
        local want = case.after[at]
        if want and want[1] == step then
          at = at + 1
          assert.near_tensor(want[2], a, 1e-12) -- float64, 20 steps
          assert.near_tensor(want[3], b, 1e-12)
        end
      end
      assert.equal(#case.after + 1, at)
    end)
  end

  it("goes on from a state dictionary as if nothing had happened", function()
    for _, case in ipairs { { "SGD", { lr = 0.05, momentum = 0.9 } }, { "Adam", { lr = 0.05, amsgrad = true } }, { "AdamW", {} } } do
      local name, options = case[1], case[2]
      local a, b, backward = problem()
      local o = optim[name]({ a, b }, options)
      for step = 1, 5 do o:zero_grad() backward(step, 3) o:step() end
      local a2, b2, backward2 = problem()
      tm.no_grad(function() a2:copy_(a) b2:copy_(b) end)
      local o2 = optim[name]({ a2, b2 }, { lr = 7 })
      o2:load_state_dict(o:state_dict())
      for step = 6, 9 do
        o:zero_grad() backward(step, 3) o:step()
        o2:zero_grad() backward2(step, 3) o2:step()
      end
      assert.same(a:tolist(), a2:tolist())
      assert.same(b:tolist(), b2:tolist())
    end
  end)

  it("has PyTorch's structure in its state dictionary, numbers from 0 included", function()
    local a, b, backward = problem()
    local o = optim.Adam { { params = { a }, lr = 0.5 }, { params = { b }, betas = { 0.5, 0.6 } } }
    backward(1, 5)
    o:step()
    local sd = o:state_dict()
    assert.same({ 0 }, sd.param_groups[1].params)
    assert.same({ 1 }, sd.param_groups[2].params)
    assert.equal(0.5, sd.param_groups[1].lr)
    assert.same({ 0.5, 0.6 }, sd.param_groups[2].betas)
    assert.equal(1, sd.state[0].step)
    assert.same({ 3 }, sd.state[0].exp_avg:size())
    assert.is_nil(sd.state[1]) -- b had no gradient
  end)

  it("copies what it loads, and takes a step that is a tensor", function()
    local a, b, backward = problem()
    local o = optim.Adam({ a, b })
    local avg = tm.ones(3, { dtype = "float32" })
    o:load_state_dict { state = { [0] = { step = tm.tensor(4), exp_avg = avg, exp_avg_sq = avg } },
      param_groups = { { params = { 0, 1 }, lr = 0.25, betas = { 0.9, 0.99 } } } }
    assert.equal(0.25, o.param_groups[1].lr)
    assert.equal("float64", o.state[a].exp_avg.dtype)
    backward(1, 5)
    o:step()
    assert.same({ 1, 1, 1 }, avg:tolist())
    assert.equal(5, o.state[a].step)
  end)

  it("gives each group its own options and lets them be changed", function()
    local a, b, backward = problem()
    local o = optim.SGD({ { params = { a }, lr = 0 }, { params = { b } } }, { lr = 0.1 })
    local a0, b0 = a:tolist(), b:tolist()
    backward(1, 1)
    o:step()
    assert.same(a0, a:tolist())
    assert.not_same(b0, b:tolist())
    o.param_groups[2].lr = 0
    b0 = b:tolist()
    o:step()
    assert.same(b0, b:tolist())
  end)

  it("takes groups later", function()
    local a, b, backward = problem()
    local o = optim.SGD({ a }, { lr = 0.1 })
    o:add_param_group { params = { b }, lr = 0.2 }
    local b0 = b:detach():clone()
    backward(1, 1)
    o:step()
    assert.near_tensor(b0 - 0.2 * b.grad, b:detach(), 1e-15)
  end)

  it("passes over parameters without gradient", function()
    local a, b, backward = problem()
    local o = optim.AdamW({ a, b })
    local b0 = b:tolist()
    backward(1, 5)
    o:step()
    assert.same(b0, b:tolist())
    assert.is_nil(o.state[b])
  end)

  it("returns what the closure returns, and runs it with gradients on", function()
    local a, b, backward = problem()
    local o = optim.SGD({ a, b }, { lr = 0.1 })
    local before = a:tolist()
    local loss = tm.no_grad(o.step, o, function()
      backward(1, 1)
      return "loss"
    end)
    assert.equal("loss", loss)
    assert.not_same(before, a:tolist())
  end)

  it("drops gradients, or fills them with 0", function()
    local a, b, backward = problem()
    local o = optim.SGD { a, b }
    backward(1, 1)
    local g = a.grad
    o:zero_grad { set_to_none = false }
    assert.equal(g, a.grad)
    assert.same({ 0, 0, 0 }, g:tolist())
    o:zero_grad()
    assert.is_nil(a.grad)
    assert.is_nil(b.grad)
  end)

  it("keeps its state beyond the scope that made it", function()
    for _, make in ipairs { optim.Adam, function(p) return optim.SGD(p, { momentum = 0.9 }) end } do
      local a, b, backward = problem()
      local o = make { a, b }
      for step = 1, 3 do
        tm.scope(function()
          o:zero_grad()
          backward(step, 1)
          o:step()
        end)
      end
      assert.equal(3, #a:tolist())
    end
  end)

  it("holds no gradient that zero_grad has dropped", function()
    local p = nn.Parameter(tm.zeros(1000))
    local o = optim.Adam { p }
    local function step()
      o:zero_grad()
      p:sum():backward()
      o:step()
    end
    step()
    tm.collect()
    local live = tm.live().storages
    o:zero_grad()
    assert.equal(live - 1, tm.live().storages)
  end)

  it("leaves a gradient that the program holds alone", function()
    local p = nn.Parameter(tm.zeros(3))
    p:sum():backward()
    local g = p.grad
    local o = optim.SGD({ p }, { lr = 1 })
    o:step()
    o:step()
    assert.same({ 1, 1, 1 }, g:tolist())
    assert.same({ -2, -2, -2 }, p:tolist())
  end)

  it("keeps float32 states for half precision", function()
    for _, dtype in ipairs { "float16", "bfloat16" } do
      local p = nn.Parameter(tm.ones(2):to(dtype))
      p.grad = tm.full({ 2 }, 1e-3):to(dtype)
      local o = optim.Adam({ p }, { lr = 0.5 })
      o:step()
      assert.equal("float32", o.state[p].exp_avg_sq.dtype)
      assert.near_tensor({ 0.5, 0.5 }, p, 1e-2)
    end
  end)

  it("fills a fresh momentum buffer also when the first step failed", function()
    local p, q = nn.Parameter(tm.ones(2)), nn.Parameter(tm.ones(1):expand(2))
    p.grad, q.grad = tm.ones(2), tm.ones(2)
    local o = optim.SGD({ p, q }, { lr = 1, momentum = 0.5 })
    H.raises(function() o:step() end, "RuntimeError", "sgd_step")
    q.data = tm.ones(2)
    o:step()
    assert.same({ 1, 1 }, o.state[p].momentum_buffer:tolist())
  end)

  it("trains 1000 parameters in one call each step", function()
    local list = {}
    for i = 1, 1000 do
      list[i] = nn.Parameter(tm.full({ 2 }, i))
      list[i].grad = tm.ones(2)
    end
    optim.SGD(list, { lr = 1 }):step()
    for i = 1, 1000 do assert.equal(i - 1, list[i][1]:item()) end
  end)

  it("shows its groups", function()
    local p = nn.Parameter(tm.zeros(1))
    assert.equal([[optim.Adam(
  group 1: 1 parameters
    amsgrad: false
    betas: {0.9, 0.999}
    eps: 1e-08
    lr: 0.001
    maximize: false
    weight_decay: 0
)]], tostring(optim.Adam { p }))
  end)

  it("refuses what it cannot train", function()
    local p = nn.Parameter(tm.zeros(2))
    H.raises(function() optim.SGD {} end, "ValueError", "empty")
    H.raises(function() optim.SGD(p) end, "TypeError", "single tensor")
    H.raises(function() optim.SGD "p" end, "TypeError", "string")
    H.raises(function() optim.SGD { p, 3 } end, "TypeError", "parameter 2 .*number")
    H.raises(function() optim.SGD { p, p } end, "ValueError", "parameter 2 appears twice")
    H.raises(function() optim.SGD { { params = { p } }, { params = { p } } } end, "ValueError", "twice")
    H.raises(function() optim.SGD { p * 2 } end, "ValueError", "no leaf %(mul")
    local it_ = nn.Linear(1, 1):parameters()
    optim.SGD(it_)
    H.raises(function() optim.SGD(it_) end, "ValueError", "empty")
  end)

  it("checks options, naming them", function()
    local p = nn.Parameter(tm.zeros(2))
    H.raises(function() optim.SGD({ p }, { lr = -1 }) end, "ValueError", "lr is %-1")
    H.raises(function() optim.SGD({ p }, { lr = "1" }) end, "TypeError", "lr must be a number")
    H.raises(function() optim.SGD({ p }, { learning = 1 }) end, "TypeError", "learning; known: dampening, lr")
    H.raises(function() optim.SGD({ { params = { p }, learning = 1 } }) end, "TypeError", "learning in a group")
    H.raises(function() optim.SGD({ p }, { nesterov = true }) end, "ValueError", "nesterov")
    H.raises(function() optim.Adam({ p }, { betas = { 0.9, 1 } }) end, "ValueError", "betas is {0.9, 1}")
    H.raises(function() optim.Adam({ p }, { eps = 0 / 0 }) end, "ValueError", "eps")
    H.raises(function() optim.AdamW({ p }, 0.1) end, "TypeError", "table of options")
  end)

  it("refuses a state dictionary of another structure", function()
    local p = nn.Parameter(tm.zeros(2))
    local o = optim.SGD { p }
    H.raises(function() o:load_state_dict(3) end, "TypeError", "number")
    H.raises(function() o:load_state_dict { state = {}, param_groups = {} } end, "ValueError", "0 groups")
    H.raises(function() o:load_state_dict { state = {}, param_groups = { { params = { 0, 1 } } } } end, "ValueError", "2 parameters")
  end)
end)
