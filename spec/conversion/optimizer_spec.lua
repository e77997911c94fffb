---Section 8 of docs/contracts/conversion.md: optimizers that are older than a conversion. Where another device is
---needed, meta stands in: with the swap flag parameters stay the same objects on the way there and back.

local H = require "spec.helper"
local K = require "spec.conversion.helper"
local tm = require "tmod"
local nn, optim = tm.nn, tm.optim

local function train(l, o)
  o:zero_grad()
  l(tm.ones({ 1, 2 }, { dtype = l.weight.dtype })):sum():backward()
  local before = l.weight:detach():clone()
  o:step()
  return l.weight:detach():ne(before):any():item()
end

local KINDS = { SGD = { lr = 0.1 }, Adam = {}, AdamW = {}, Adagrad = {} }

K.guard()

describe("an optimizer", function()
  for name, options in pairs(KINDS) do
    K.each_mode("C108 C110 T2: made before a conversion trains on, unless its parameters were replaced: " .. name, function(mode)
      local l = nn.Linear(2, 3)
      local o = optim[name](l:parameters(), options)
      l:double()
      assert.equal(mode.kept, train(l, o))
    end)

    K.each_mode("C109: a state made before a change of dtype keeps its dtype, and stepping goes on: " .. name, function(mode)
      if not mode.kept then return end -- as above: nothing is trained
      local l = nn.Linear(2, 3)
      local o = optim[name](l:parameters(), name == "SGD" and { lr = 0.1, momentum = 0.9 } or options)
      assert.is_true(train(l, o))
      l:double()
      assert.is_true(train(l, o))
      for _, v in pairs(o.state[l.weight]) do
        if tm.is_tensor(v) then assert.equal("float32", v.dtype) end
      end
      assert.equal(o, o:to_params { dtype = true })
      for _, v in pairs(o.state[l.weight]) do
        if tm.is_tensor(v) then assert.equal("float64", v.dtype) end
      end
      assert.is_true(train(l, o))
      l:half()
      o:to_params { dtype = true } -- states of half precision are float32
      for _, v in pairs(o.state[l.weight]) do
        if tm.is_tensor(v) then assert.equal("float32", v.dtype) end
      end
      assert.is_true(train(l, o))
    end)
  end

  it("C109: momentum in float32 beside float64 parameters computes what separate steps would", function()
    local p = nn.Parameter(tm.tensor { 1, 2 })
    local o = optim.SGD({ p }, { lr = 0.5, momentum = 0.5 })
    p.grad = tm.tensor { 2, 4 }
    o:step()
    p.grad = nil
    p.data = p.data:double()
    p.grad = tm.tensor({ 1, 1 }, { dtype = "float64" })
    o:step() -- momentum: 0.5 * {2, 4} + 1
    assert.near_tensor({ 1 - 1 - 1, 2 - 2 - 1.5 }, p:detach())
  end)

  it("C109 C111 T62: a state made by the constructor stays on the old device until to_params", function()
    local l = nn.Linear(2, 3)
    local o = optim.Adagrad(l:parameters())
    K.with_flags { swap = true }(l.to, l, "meta")
    for p in l:parameters() do p.grad = tm.zeros(p:size(), { device = "meta" }) end
    assert.equal("cpu", o.state[l.weight].sum.device)
    H.raises(function() o:step() end, "RuntimeError", "meta")
    assert.equal(o, o:to_params())
    assert.same({ "meta", "float32" }, { o.state[l.weight].sum.device, o.state[l.weight].sum.dtype })
    o:step()
  end)

  it("C109 C111: so does one made by a step", function()
    local l = nn.Linear(2, 3)
    local o = optim.SGD(l:parameters(), { lr = 0.1, momentum = 0.9 })
    train(l, o)
    K.with_flags { swap = true }(l.to, l, "meta")
    for p in l:parameters() do p.grad = tm.zeros(p:size(), { device = "meta" }) end
    H.raises(function() o:step() end, "RuntimeError", "state 1 is on cpu, expected meta")
    o:to_params()
    o:step()
  end)

  it("C108 C111: made on meta trains what swap mode puts there; states on meta are made anew", function()
    for name, options in pairs(KINDS) do
      K.with_flags { swap = true }(function()
        local l = nn.Linear(2, 3, { device = "meta" })
        local o = optim[name](l:parameters(), options)
        l:to_empty { device = "cpu" }
        for p in l:parameters() do nn.init.ones_(p) end
        o:to_params()
        assert.is_true(train(l, o))
      end)
    end
  end)

  it("C111: to_params leaves what is right alone, and refuses unknown options", function()
    local l = nn.Linear(2, 3)
    local o = optim.Adam(l:parameters())
    train(l, o)
    local state = o.state[l.weight]
    local m, impl, values = state.exp_avg, tm.impl_id(state.exp_avg), state.exp_avg:tolist()
    o:to_params()
    assert.equal(state, o.state[l.weight])
    assert.equal(m, state.exp_avg)
    assert.equal(impl, tm.impl_id(m))
    o:to_params { dtype = true }
    l:double()
    o:to_params { dtype = true }
    assert.equal(m, state.exp_avg)
    assert.near_tensor(values, m)
    assert.equal(1, state.step)
    H.raises(function() o:to_params { device = "cpu" } end, "TypeError", "device")
  end)

  pending("C109 T87: states on the CPU make the first step after cuda() fail until to_params: needs CUDA (meta stands in above)")
end)

describe("optimizer:rebind", function()
  it("C108: takes the second result of a conversion that replaced the parameters; states go over", function()
    local l = nn.Linear(2, 3)
    local o = optim.Adam(l:parameters(), { lr = 0.1 })
    train(l, o)
    local state, old = o.state[l.weight], l.weight
    local m, replaced = K.with_flags { overwrite = true }(l.double, l)
    assert.equal(l, m)
    assert.equal(l.weight, replaced[old])
    assert.is_false(train(l, o))
    assert.equal(o, o:rebind(replaced))
    assert.equal(state, o.state[l.weight])
    assert.is_nil(o.state[old])
    assert.is_true(train(l, o))
    assert.equal(2, state.step)
  end)

  it("C108 C126: of to_empty, too", function()
    local l = nn.Linear(2, 3, { device = "meta" })
    local o = optim.SGD(l:parameters(), { lr = 0.1 })
    local _, replaced = K.with_flags { overwrite = true }(l.to_empty, l, { device = "cpu" })
    for p in l:parameters() do nn.init.ones_(p) end
    assert.is_false(train(l, o))
    o:rebind(replaced)
    assert.is_true(train(l, o))
    assert.equal(1, select("#", l:to_empty { device = "cpu" })) -- elsewhere there is one result
  end)

  it("C108: after a load with assign", function()
    local l = nn.Linear(2, 3)
    local o = optim.SGD(l:parameters(), { lr = 0.1 })
    local old = { l.weight, l.bias }
    l:load_state_dict(nn.Linear(2, 3):state_dict(), { assign = true })
    assert.is_false(train(l, o))
    o:rebind { [old[1]] = l.weight, [old[2]] = l.bias }
    assert.is_true(train(l, o))
  end)

  it("C108 C64: where ties broke, the first copy takes the place; retie makes it the only one", function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[2].weight = m[1].weight
    local o = optim.SGD(m:parameters(), { lr = 0.1 })
    local groups, old = nn.tied_groups(m), m[1].weight
    local _, replaced = K.with_flags { overwrite = true }(m.double, m)
    assert.equal(m[1].weight, replaced[old])
    nn.retie(groups)
    o:rebind(replaced)
    assert.equal(m[2].weight, o.param_groups[1].params[1])
  end)

  it("C108: refuses what cannot be trained, and changes nothing then", function()
    local l = nn.Linear(2, 3)
    local o = optim.SGD(l:parameters())
    local w, b = l.weight, l.bias
    H.raises(function() o:rebind(l) end, "TypeError", "rebind")
    H.raises(function() o:rebind { [b] = 1 } end, "TypeError", "number")
    H.raises(function() o:rebind { [w] = w * 2 } end, "ValueError", "no leaf")
    H.raises(function() o:rebind { [w] = b } end, "ValueError", "twice")
    assert.same({ w, b }, o.param_groups[1].params)
    o:rebind { [nn.Parameter(tm.zeros(1))] = nn.Parameter(tm.zeros(1)) } -- none of its own
    assert.same({ w, b }, o.param_groups[1].params)
  end)
end)

describe("optim.Adagrad", function()
  it("takes PyTorch's steps", function()
    local p = nn.Parameter(tm.tensor { 1, -2, 0.5 })
    local o = optim.Adagrad({ p }, { lr = 0.1, lr_decay = 0.01, weight_decay = 0.1, initial_accumulator_value = 0.2 })
    for _ = 1, 3 do
      o:zero_grad();
      (p * p * tm.tensor { 1, 0.5, 2 }):sum():backward()
      o:step()
    end
    assert.near_tensor({ 0.7854099869728088, -1.7806360721588135, 0.2956036925315857 }, p:detach())
  end)

  it("goes on from a state dictionary, and maximises", function()
    local function start()
      local p = nn.Parameter(tm.tensor { 1, 2 })
      return p, optim.Adagrad({ p }, { lr = 0.1, maximize = true })
    end
    local function step(p, o)
      o:zero_grad();
      (p * p):sum():backward()
      o:step()
    end
    local p, o = start()
    for _ = 1, 2 do step(p, o) end
    local q, o2 = start()
    tm.no_grad(q.copy_, q, p)
    o2:load_state_dict(o:state_dict())
    step(p, o)
    step(q, o2)
    assert.same(p:tolist(), q:tolist())
    assert.is_true(p:tolist()[1] > 1)
  end)
end)
