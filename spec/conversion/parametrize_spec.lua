---Section 11 of docs/contracts/conversion.md: parametrized tensors.
local H = require "spec.helper"
local tm = require "tmod"
local B = require "tmod.ffi"
local K = require "spec.conversion.helper"

local nn = tm.nn
local parametrize = nn.parametrize

local Symmetric = nn.Module:extend "Symmetric"
function Symmetric:forward(x) return (x + x:t()) * 0.5 end
function Symmetric:right_inverse(x) return x * 1 end

local Twice = nn.Module:extend "Twice"
function Twice:forward(x)
  Twice.calls = (Twice.calls or 0) + 1
  return x * 2
end
function Twice:right_inverse(y) return y * 0.5 end

---A parametrization made of functions.
local Given = nn.Module:extend "Given"
function Given:init(forward, right_inverse)
  self.fn = forward
  if right_inverse then self.right_inverse = function(_, ...) return right_inverse(...) end end
end
function Given:forward(...) return self.fn(...) end

local function same(x) return x end
local function keys(m) return table.concat(m:state_dict():keys(), " ") end
local function epoch(t) return tonumber(B.C.tm_tensor_epoch(B.ptr(t))) end
local function with_swap(on, fn, ...) return tm.future.with({ swap = on }, fn, ...) end

local flags = {}

---An `it` with the swap flag off and one with it on.
function flags.it(text, fn)
  for _, on in ipairs { false, true } do
    it(text .. (on and " [swap]" or " [default]"), function() tm.future.with({ swap = on }, fn, on) end)
  end
end

---A Linear(2, 2) without bias of weight {{1, 2}, {3, 4}}.
local function linear()
  local m = nn.Linear(2, 2, { bias = false })
  tm.no_grad(function() m.weight:copy_(tm.tensor { { 1, 2 }, { 3, 4 } }) end)
  return m, m.weight
end

describe("parametrize.register", function()
  after_each(K.check_flags)

  flags.it("C152 T77: the tensor moves to parametrizations.weight.original, the same object; the name is computed", function()
    local m, w = linear()
    assert.equal(m, parametrize.register(m, "weight", Symmetric()))
    assert.equal(w, m.parametrizations.weight.original)
    assert.is_true(nn.is_parameter(w) and w.requires_grad and w.is_leaf)
    assert.near_tensor({ { 1, 2.5 }, { 2.5, 4 } }, m.weight)
    assert.near_tensor({ { 3.5, 6.5 } }, m(tm.ones(1, 2)))
    assert.equal("mul", m.weight.grad_fn)
    assert.is_true(m.weight ~= m.weight)
    assert.equal("ParametrizedLinear", m:_short_name())
    assert.is_true(m:isinstance(nn.Linear))
    assert.equal("Linear", (linear()):_short_name())
    assert.is_true(parametrize.is_parametrized(m) and parametrize.is_parametrized(m, "weight"))
    assert.is_false(parametrize.is_parametrized(m, "bias"))
    assert.is_false(parametrize.is_parametrized(linear()))
    assert.is_true(m:hasattr "weight")
    assert.near_tensor(m.weight, m:getattr "weight")
    H.raises(function() m:register_parameter("weight", w) end, "KeyError", "taken")
  end)

  flags.it("C152: gradients and an earlier optimizer reach the original", function()
    local m, w = linear()
    local opt = tm.optim.SGD(m:parameters(), { lr = 1 })
    parametrize.register(m, "weight", Twice())
    m(tm.ones(1, 2)):sum():backward()
    assert.near_tensor({ { 2, 2 }, { 2, 2 } }, w.grad)
    opt:step()
    assert.near_tensor({ { -1.5, -1 }, { -0.5, 0 } }, w)
    assert.near_tensor({ { -3, -2 }, { -1, 0 } }, m.weight)
    local list = {}
    for name, p in m:named_parameters() do list[name] = p end
    assert.same({ ["parametrizations.weight.original"] = w }, list)
  end)

  it("C152: the parametrization gets the module's training mode", function()
    for _, mode in ipairs { true, false } do
      local m, p = linear(), Twice()
      m:train(mode)
      p:train(not mode)
      parametrize.register(m, "weight", p)
      assert.equal(mode, p.training)
      assert.equal(mode, m.parametrizations.weight.training)
      assert.equal(mode, m.parametrizations.training)
      local second = Twice()
      second:train(not mode)
      parametrize.register(m, "weight", second)
      assert.equal(mode, second.training)
      m:eval()
      assert.is_false(p.training)
    end
  end)

  it("C152: a module whose class has own fields keeps them, and instances do not affect each other", function()
    local Net = nn.Linear:extend "my.Net"
    Net.version_of_net = 3
    local a, b = Net(2, 2), Net(2, 2)
    parametrize.register(a, "weight", Twice())
    assert.equal(3, a.version_of_net)
    assert.equal("my.ParametrizedNet", a.__name)
    assert.is_false(parametrize.is_parametrized(b))
    assert.is_true(nn.is_parameter(b.weight))
  end)

  it("C152: copies are parametrized on their own", function()
    local m = linear()
    parametrize.register(m, "weight", Twice())
    local c = nn.deepcopy(m)
    parametrize.remove(m, "weight")
    assert.is_true(parametrize.is_parametrized(c))
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, c.weight)
    c.weight = tm.zeros(2, 2)
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
  end)

  flags.it("C153: the original is the right_inverse of the value, or the value where there is none", function(swap)
    local m, w = linear()
    local impl, version = tm.impl_id(w), w.version
    parametrize.register(m, "weight", Twice())
    assert.near_tensor({ { 0.5, 1 }, { 1.5, 2 } }, w)
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
    assert.equal(swap, tm.impl_id(w) ~= impl) -- C151
    if not swap then assert.equal(version + 1, w.version) end
    local absent = Given(function(x) return x * 3 end)
    local refuses = Given(function(x) return x * 3 end, function() B.fail("NotImplementedError", "no inverse") end)
    for _, p in ipairs { absent, refuses } do
      m, w = linear()
      parametrize.register(m, "weight", p)
      assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
      assert.near_tensor({ { 3, 6 }, { 9, 12 } }, m.weight)
    end
    m, w = linear()
    H.raises(function() parametrize.register(m, "weight", Given(same, function() B.fail("RuntimeError", "broken") end)) end,
      "RuntimeError", "broken")
    assert.equal(w, m.weight)
  end)

  flags.it("C153 T113: several results of right_inverse become new parameters original0, original1", function()
    for _, as_list in ipairs { true, false } do
      local m, w = linear()
      w.requires_grad = as_list
      local p = Given(function(a, b) return a + b end, function(x)
        if as_list then return { x - 1, x * 0 + 1 } end
        return x - 1, x * 0 + 1
      end)
      parametrize.register(m, "weight", p)
      assert.equal("parametrizations.weight.original0 parametrizations.weight.original1", keys(m))
      local list = m.parametrizations.weight
      for _, t in ipairs { list.original0, list.original1 } do
        assert.is_true(nn.is_parameter(t) and t ~= w)
        assert.equal(as_list, t.requires_grad)
      end
      assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
      m.weight = tm.ones(2, 2)
      assert.near_tensor({ { 0, 0 }, { 0, 0 } }, list.original0)
    end
  end)

  it("C153 T113: one result of right_inverse keeps dtype and device, also with unsafe", function()
    for _, change in ipairs { function(x) return x:double() end, function(x) return x:to "meta" end } do
      local m, w = linear()
      H.raises(function() parametrize.register(m, "weight", Given(same, change), { unsafe = true }) end, "ValueError", "must stay")
      assert.equal(w, m.weight)
      assert.is_false(parametrize.is_parametrized(m))
    end
    for _, wrong in ipairs { function() end, function() return 3 end, function() return {} end } do
      local m, w = linear()
      H.raises(function() parametrize.register(m, "weight", Given(same, wrong)) end, "ValueError", "right_inverse must return a tensor")
      assert.equal(w, m.weight)
    end
  end)

  it("C154 T113: a parametrization that changes shape or dtype is refused, and nothing happens", function()
    local wrong = {
      ["of shape %(2,%) for one of %(2, 2%)"] = function(x) return x:sum(1) end,
      ["returned float64 for a tensor of float32"] = function(x) return x:double() end,
      ["must return a tensor, got number"] = function() return 3 end,
    }
    for text, fn in pairs(wrong) do
      local m, w = linear()
      local version = w.version
      H.raises(function() parametrize.register(m, "weight", Given(fn)) end, "ValueError", text)
      assert.equal(w, m.weight)
      assert.equal(version, w.version)
      assert.equal("Linear", m:_short_name())
      assert.equal("weight", keys(m))
      parametrize.register(m, "weight", Twice())
      H.raises(function() parametrize.register(m, "weight", Given(fn)) end, "ValueError", text)
      assert.equal(1, m.parametrizations.weight:len())
    end
  end)

  it("C154: unsafe skips the check; a later one is compared with the result", function()
    local m = linear()
    parametrize.register(m, "weight", Given(function(x) return x:sum(1) end), { unsafe = true })
    assert.near_tensor({ 4, 6 }, m.weight)
    parametrize.register(m, "weight", Given(function(x) return x * 2 end))
    assert.near_tensor({ 8, 12 }, m.weight)
  end)

  it("C154: an unknown name is a value error, an empty slot too", function()
    local m = linear()
    H.raises(function() parametrize.register(m, "wieght", Twice()) end, "ValueError", 'Linear has no parameter, buffer .* "wieght"')
    H.raises(function() parametrize.register(m, "bias", Twice()) end, "ValueError", '"bias"')
    H.raises(function() parametrize.register(m, "in_features", Twice()) end, "ValueError", '"in_features"')
    H.raises(function() parametrize.register(m, "weight", same) end, "TypeError", "expected an nn.Module, got function")
    H.raises(function() parametrize.register({}, "weight", Twice()) end, "TypeError", "expected an nn.Module, got table")
    H.raises(function() parametrize.register(m, "weight", Twice(), { safe = true }) end, "TypeError", "unknown option safe")
  end)

  it("C152 C154: a second one gets the result of the first, and is tried", function()
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    parametrize.register(m, "weight", Given(function(x) return x + 1 end, function(y) return y - 1 end))
    assert.near_tensor({ { 2, 3 }, { 4, 5 } }, m.weight)
    assert.near_tensor({ { 0.5, 1 }, { 1.5, 2 } }, w)
    m.weight = tm.ones(2, 2)
    assert.near_tensor({ { 0, 0 }, { 0, 0 } }, w)
    local bad = Given(same, function(x) return x:sum() end)
    H.raises(function() parametrize.register(m, "weight", bad) end, "ValueError", "right_inverse returned")
    parametrize.register(m, "weight", Given(same, function() B.fail("NotImplementedError", "none") end))
    assert.equal(3, m.parametrizations.weight:len())
  end)

  it("C156: works for buffers and keeps whether they are saved", function()
    local m = nn.Module:extend "Thing"()
    m:register_buffer("a", tm.ones(2))
    m:register_buffer("b", tm.ones(2), false)
    local a = m.a
    for _, name in ipairs { "a", "b" } do parametrize.register(m, name, Twice()) end
    assert.equal(a, m.parametrizations.a.original)
    assert.is_false(nn.is_parameter(a))
    assert.equal("parametrizations.a.original", keys(m))
    assert.near_tensor({ 1, 1 }, m.b)
    for _, name in ipairs { "a", "b" } do parametrize.remove(m, name) end
    assert.equal("a", keys(m))
    assert.equal(a, m.a)
    local names = {}
    for name in m:named_buffers() do names[#names + 1] = name end
    assert.same({ "a", "b" }, names)
  end)

  it("C156 T77: keys of state dictionaries; a plain one does not fit", function()
    local m = nn.Linear(2, 2)
    parametrize.register(m, "weight", nn.Sequential(Twice()))
    assert.equal("bias parametrizations.weight.original", keys(m))
    local r = m:load_state_dict(nn.Linear(2, 2):state_dict(), { strict = false })
    assert.same({ "parametrizations.weight.original" }, r.missing_keys)
    assert.same({ "weight" }, r.unexpected_keys)
    H.raises(function() m:load_state_dict(nn.Linear(2, 2):state_dict()) end, "RuntimeError", "missing keys.*unexpected keys")
    local Scale = nn.Module:extend "Scale"
    function Scale:init() self.factor = nn.Parameter(tm.ones(1)) end
    function Scale:forward(x) return x * self.factor end
    parametrize.register(m, "bias", Scale())
    assert.equal("parametrizations.weight.original parametrizations.bias.original parametrizations.bias.0.factor", keys(m))
    local sd = nn.deepcopy(m:state_dict())
    sd["parametrizations.bias.0.factor"]:fill_(3)
    sd["parametrizations.bias.original"]:fill_(2)
    for _, opts in ipairs { { assign = false }, { assign = true } } do
      for _, swap in ipairs { false, true } do
        with_swap(swap, m.load_state_dict, m, sd, opts)
        assert.near_tensor({ 6, 6 }, m.bias)
      end
    end
  end)
end)

describe("assignment to a parametrized tensor", function()
  after_each(K.check_flags)

  flags.it("C155 C151: runs right_inverse without recording and gives the original the result", function(swap)
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    local impl, version, before = tm.impl_id(w), w.version, epoch(w)
    m.weight = tm.full({ 2, 2 }, 8, { requires_grad = true })
    assert.equal(w, m.parametrizations.weight.original)
    assert.near_tensor({ { 4, 4 }, { 4, 4 } }, w)
    assert.is_true(nn.is_parameter(w) and w.is_leaf and w.requires_grad)
    assert.is_true(epoch(w) > before)
    assert.equal(swap, tm.impl_id(w) ~= impl)
    if not swap then assert.equal(version + 1, w.version) end
    w.requires_grad = false
    m.weight = tm.ones(2, 2)
    assert.is_false(w.requires_grad)
    local recording
    parametrize.register(m, "weight", Given(same, function(x)
      recording = tm.is_grad_enabled()
      return x
    end))
    recording = nil
    m.weight = tm.ones(2, 2)
    assert.is_false(recording)
  end)

  flags.it("C151: the gradient, hooks and fields stay with set_ and go with a swap", function(swap)
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    w.grad = tm.ones(2, 2)
    w.tag = 1
    m.weight = tm.ones(2, 2)
    assert.equal(swap, w.grad == nil)
    assert.equal(swap, w.tag == nil)
  end)

  it("C151: a rebind shares the source's memory and leaves its version alone while others use it", function()
    local m, w = linear()
    parametrize.register(m, "weight", Given(same, same))
    local value = tm.ones(2, 2)
    local alias = value:detach()
    m.weight = value
    assert.equal(value:storage_id(), w:storage_id())
    assert.equal(0, alias.version)
  end)

  flags.it("C155 T113: without right_inverse it is a runtime error", function()
    local m, w = linear()
    parametrize.register(m, "weight", Given(function(x) return x * 2 end))
    H.raises(function() m.weight = tm.ones(2, 2) end, "RuntimeError", "parametrization Given has no right_inverse")
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
    m, w = linear()
    parametrize.register(m, "weight", Given(same, function() B.fail("NotImplementedError", "none") end))
    H.raises(function() m.weight = tm.ones(2, 2) end, "NotImplementedError", "none")
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
  end)

  flags.it("C155: a changed dtype or number of results is a value error, and nothing changes", function()
    local m, w = linear()
    local result
    parametrize.register(m, "weight", Given(same, function(x)
      if result then return result() end
      return x * 1
    end))
    for _, wrong in ipairs { function() return tm.ones(2, 2, { dtype = "float64" }) end, function() return 3 end,
      function() return tm.ones(2, 2), tm.ones(2, 2) end, function() end } do
      result = wrong
      H.raises(function() m.weight = tm.ones(2, 2) end, "ValueError", "right_inverse")
    end
    H.raises(function() m.weight = 3 end, "ValueError", "can be assigned tensors only, got number")
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
    m = linear()
    result = nil
    parametrize.register(m, "weight", Given(function(a, b) return a + b end, function(x)
      if result then return result() end
      return x, x * 0
    end))
    for _, wrong in ipairs { function() return tm.ones(2, 2) end, function() return tm.ones(2, 2), tm.ones(2, 2), tm.ones(2, 2) end,
      function() return tm.ones(2, 2), tm.ones(2, 2, { dtype = "float64" }) end } do
      result = wrong
      H.raises(function() m.weight = tm.ones(2, 2) end, "ValueError", "right_inverse")
    end
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
  end)

  it("C151 T78: a failed swap changes nothing; the swap flag or a wrapper original makes it a swap", function()
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    B.C.tm_tensor_pin(B.ptr(w))
    local ok, e = pcall(with_swap, true, function() m.weight = tm.ones(2, 2) end)
    B.C.tm_tensor_unpin(B.ptr(w))
    assert.is_false(ok)
    assert.truthy(tostring(e):find "2 times")
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
    local impl = tm.impl_id(w)
    with_swap(true, function() m.weight = tm.ones(2, 2) end)
    assert.is_true(tm.impl_id(w) ~= impl)
    assert.near_tensor(tm.ones(2, 2), m.weight)
  end)

  it("C151 T78: a wrapper as original is swapped without the flag, and stays the same object", function()
    local Boxed = tm.WrapperTensor:extend "ParametrizeBoxed"
    function Boxed.to_plain(t) return Boxed.flatten(t).inner * 1 end
    local function boxed(x) return Boxed:new { inner = x } end
    local m = nn.Linear(2, 2, { bias = false })
    m.weight = nn.Parameter(boxed(tm.ones(2, 2)), false)
    local w = m.weight
    parametrize.register(m, "weight", Given(Boxed.to_plain, function(x)
      return boxed(require "tmod.wrapper".is(x) and Boxed.to_plain(x) or x)
    end))
    local impl = tm.impl_id(w)
    assert.equal(w, m.parametrizations.weight.original)
    m.weight = tm.full({ 2, 2 }, 5)
    assert.equal(w, m.parametrizations.weight.original)
    assert.is_true(tm.impl_id(w) ~= impl)
    assert.is_true(nn.is_parameter(w))
    assert.near_tensor(tm.full({ 2, 2 }, 5), Boxed.flatten(w).inner)
    assert.near_tensor(tm.full({ 2, 2 }, 5), m.weight)
  end)
end)

describe("parametrize.cached", function()
  after_each(K.check_flags)

  it("C157: computes on the first read and keeps the value to the end of the outermost scope", function()
    local m = linear()
    parametrize.register(m, "weight", Twice())
    Twice.calls = 0
    local first
    local a, b = parametrize.cached(function(...)
      first = m.weight
      assert.equal(first, m.weight)
      parametrize.cached(function() assert.equal(first, m.weight) end)
      assert.equal(first, m.weight)
      return ...
    end, 1, nil)
    assert.equal(1, a)
    assert.is_nil(b)
    assert.equal(1, Twice.calls)
    assert.is_true(m.weight ~= first)
    assert.equal(2, Twice.calls)
    parametrize.cached(function() assert.is_true(m.weight ~= first) end)
  end)

  it("C157: the store is emptied after an error, which stays as it was", function()
    local m = linear()
    parametrize.register(m, "weight", Twice())
    local first, thrown = nil, { "error" }
    local ok, e = pcall(parametrize.cached, function()
      first = m.weight
      error(thrown, 0)
    end)
    assert.is_false(ok)
    assert.equal(thrown, e)
    parametrize.cached(function() assert.is_true(m.weight ~= first) end)
    assert.is_true(m.weight ~= m.weight)
  end)

  flags.it("C157 T79: a conversion inside the scope drops the value, and so does an assignment", function()
    local m = linear()
    parametrize.register(m, "weight", Twice())
    parametrize.cached(function()
      assert.equal("float32", m.weight.dtype)
      m:double()
      assert.equal("float64", m.weight.dtype)
      m:float()
      local now = m.weight
      assert.equal("float32", now.dtype)
      assert.equal(now, m.weight)
      m.weight = tm.ones(2, 2)
      assert.near_tensor(tm.ones(2, 2), m.weight)
    end)
    tm.future.with({ overwrite = true }, parametrize.cached, function()
      assert.equal("float32", m.weight.dtype)
      m:double()
      assert.equal("float64", m.weight.dtype)
      m:float() -- each time another object, of epoch 0
      assert.equal("float32", m.weight.dtype)
    end)
  end)

  it("C157: a cached value outlives a tm.scope inside", function()
    local m = linear()
    parametrize.register(m, "weight", Twice())
    parametrize.cached(function()
      tm.scope(function() return m(tm.ones(1, 2)):sum():item() end)
      assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
    end)
  end)
end)

describe("parametrize.remove", function()
  after_each(K.check_flags)

  flags.it("C158 T77: puts the same object back with the computed value, and restores the class", function(swap)
    local m, w = linear()
    local opt = tm.optim.SGD(m:parameters(), { lr = 1 })
    parametrize.register(m, "weight", Symmetric())
    with_swap(swap, m.double, m)
    assert.equal(m, parametrize.remove(m, "weight"))
    assert.equal(w, m.weight)
    assert.is_true(nn.is_parameter(w) and w.requires_grad and w.is_leaf)
    assert.near_tensor({ { 1, 2.5 }, { 2.5, 4 } }, w)
    assert.equal("float64", w.dtype)
    assert.equal("weight", keys(m))
    assert.equal(nn.Linear, m:_class())
    assert.is_false(m:hasattr "parametrizations")
    assert.equal("Linear(in_features=2, out_features=2, bias=false)", tostring(m))
    m(tm.ones(1, 2, { dtype = "float64" })):sum():backward()
    opt:step()
    assert.near_tensor({ { 0, 1.5 }, { 1.5, 3 } }, m.weight)
    parametrize.register(m, "weight", Twice())
    assert.near_tensor({ { 0, 1.5 }, { 1.5, 3 } }, m.weight)
  end)

  flags.it("C158: leave_parametrized = false puts the unparametrized tensor back", function()
    local m, w = linear()
    parametrize.register(m, "weight", Symmetric())
    parametrize.remove(m, "weight", { leave_parametrized = false })
    assert.equal(w, m.weight)
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
  end)

  flags.it("C158: of several originals a new parameter remains; without leave_parametrized it is an error", function()
    for _, trained in ipairs { true, false } do
      local m, w = linear()
      w.requires_grad = trained
      parametrize.register(m, "weight", Given(function(a, b) return a + b end, function(x) return x, x * 0 end))
      H.raises(function() parametrize.remove(m, "weight", { leave_parametrized = false }) end, "ValueError", "computed from 2 tensors")
      assert.is_true(parametrize.is_parametrized(m, "weight"))
      parametrize.remove(m, "weight")
      assert.is_true(m.weight ~= w and m.weight.is_leaf)
      assert.equal(trained, nn.is_parameter(m.weight))
      assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
      assert.equal("weight", keys(m))
    end
  end)

  it("C158: others stay parametrized; what is not parametrized is a value error", function()
    local m = nn.Linear(2, 2)
    H.raises(function() parametrize.remove(m, "weight") end, "ValueError", 'Linear has no parametrization of "weight"')
    parametrize.register(m, "weight", Twice())
    parametrize.register(m, "bias", Twice())
    parametrize.remove(m, "weight")
    assert.is_true(parametrize.is_parametrized(m, "bias"))
    assert.is_false(parametrize.is_parametrized(m, "weight"))
    assert.equal("ParametrizedLinear", m:_short_name())
    H.raises(function() parametrize.remove(m, "weight") end, "ValueError", "no parametrization")
    parametrize.remove(m, "bias")
    assert.equal("weight bias", keys(m))
    assert.equal(nn.Linear, m:_class())
  end)

  it("C158: for a tensor of a class whose value cannot be left, the message tells the ways out", function()
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    rawset(w, "_class", { __name = "Odd" })
    B.C.tm_tensor_pin(B.ptr(w)) -- makes the swap fail
    local ok, e = pcall(with_swap, true, parametrize.remove, m, "weight")
    B.C.tm_tensor_unpin(B.ptr(w))
    assert.is_false(ok)
    assert.equal("RuntimeError", e.kind)
    assert.truthy(e.message:find "Odd: use leave_parametrized = false.*set_data.*swap flag")
    assert.truthy(tostring(e.cause):find "2 times")
    assert.is_true(parametrize.is_parametrized(m, "weight"))
    parametrize.remove(m, "weight", { leave_parametrized = false })
    assert.equal(w, m.weight)
  end)
end)

describe("conversions of parametrized modules", function()
  after_each(K.check_flags)

  it("C159 T77 T114: reach the original, which stays the same object unless it is overwritten", function()
    for _, set in ipairs { {}, { overwrite = true }, { swap = true }, { overwrite = true, swap = true } } do
      local m, w = linear()
      parametrize.register(m, "weight", Twice())
      tm.future.with(set, m.double, m)
      assert.equal("float64", m.parametrizations.weight.original.dtype)
      assert.equal(not set.overwrite or set.swap or false, m.parametrizations.weight.original == w)
      assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
      assert.equal("float64", m.weight.dtype)
    end
  end)

  it("C159 T114: errors name ParametrizationList.original", function()
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    B.C.tm_tensor_pin(B.ptr(w))
    local ok, e = pcall(with_swap, true, m.double, m)
    B.C.tm_tensor_unpin(B.ptr(w))
    assert.is_false(ok)
    assert.truthy(tostring(e):find("cannot swap ParametrizationList.original", 1, true))
    assert.equal("float32", w.dtype)
  end)

  it("C160: with the swap flag registering can fail on a use of the original, and then nothing has changed", function()
    local m, w = linear()
    B.C.tm_tensor_pin(B.ptr(w))
    local ok, e = pcall(with_swap, true, parametrize.register, m, "weight", Twice())
    B.C.tm_tensor_unpin(B.ptr(w))
    assert.is_false(ok)
    assert.truthy(tostring(e):find "2 times")
    assert.equal(w, m.weight)
    assert.equal(nn.Linear, m:_class())
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, w)
    -- A view holds the storage and not the content here (2.1, V4), so it is not in the way.
    with_swap(true, parametrize.register, m, "weight", Given(function(x) return x:t() end, function(y) return y:t() end))
    assert.equal(w, m.parametrizations.weight.original)
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
    assert.near_tensor({ { 1, 3 }, { 2, 4 } }, w)
  end)

  it("C160: an original can be parametrized in its turn", function()
    local m, w = linear()
    parametrize.register(m, "weight", Twice())
    local list = m.parametrizations.weight
    parametrize.register(list, "original", Given(function(x) return x + 1 end, function(y) return y - 1 end))
    assert.near_tensor({ { 1, 2 }, { 3, 4 } }, m.weight)
    assert.near_tensor({ { -0.5, 0 }, { 0.5, 1 } }, w)
    m.weight = tm.ones(2, 2)
    assert.near_tensor({ { -0.5, -0.5 }, { -0.5, -0.5 } }, w)
    assert.near_tensor(tm.ones(2, 2), m.weight)
    assert.equal("parametrizations.weight.parametrizations.original.original", keys(m))
  end)
end)
