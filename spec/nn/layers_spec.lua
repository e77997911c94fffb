local H = require "spec.helper"
local tm = require "tmod"
local nn, F = tm.nn, tm.nn.functional

local function bounds(t) return t:min():item(), t:max():item() end

describe("nn.Linear", function()
  it("computes x * W^T + b on the last axis", function()
    local l = nn.Linear(2, 3)
    tm.no_grad(function()
      l.weight:copy_(tm.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } })
      l.bias:copy_(tm.tensor { 10, 20, 30 })
    end)
    assert.same({ 1 * 1 + 2 * -1 + 10, 3 - 4 + 20, 5 - 6 + 30 }, l(tm.tensor { 1, -1 }):tolist())
    assert.same({ 2, 5, 3 }, l(tm.zeros(2, 5, 2)):size())
    assert.same({ 0, 3 }, l(tm.zeros(0, 2)):size())
  end)

  it("has the parameters of PyTorch, uniform within 1 / sqrt(nin)", function()
    tm.manual_seed(1)
    local l = nn.Linear(100, 300)
    assert.same({ 300, 100 }, l.weight:size())
    assert.same({ 300 }, l.bias:size())
    for _, p in ipairs { l.weight, l.bias } do
      local low, high = bounds(p)
      assert.is_true(low >= -0.1 and low < -0.097 and high <= 0.1 and high > 0.097)
    end
    assert.near(0.1 / math.sqrt(3), l.weight:std():item(), 1e-3) -- 30,000 samples
  end)

  it("has the gradients of its formula", function()
    local l = nn.Linear(3, 2, { dtype = "float64" })
    local x = tm.randn(4, 3, { dtype = "float64", requires_grad = true })
    assert.is_true(tm.autograd.gradcheck(function(x_, w, b)
      return F.linear(x_, w, b)
    end, { x, l.weight, l.bias }))
    l(x):sum():backward()
    assert.near_tensor(x:sum(1):view(1, 3):expand(2, 3), l.weight.grad, 1e-12)
    assert.near_tensor({ 4, 4 }, l.bias.grad, 1e-12)
  end)

  it("does without bias", function()
    local l = nn.Linear(2, 3, { bias = false })
    assert.is_nil(l.bias)
    assert.is_true(l:hasattr "bias")
    assert.same({ 0, 0, 0 }, l(tm.zeros(2)):tolist())
    assert.equal("Linear(in_features=2, out_features=3, bias=false)", tostring(l))
  end)

  it("takes dtype and device", function()
    local l = nn.Linear(2, 3, { dtype = "float64", device = "meta" })
    assert.equal("float64", l.weight.dtype)
    assert.equal("meta", l.bias.device)
    assert.same({ 5, 3 }, l(tm.zeros(5, 2, { dtype = "float64", device = "meta" })):size())
  end)

  it("refuses bad sizes and options, and inputs that do not fit", function()
    H.raises(function() nn.Linear(2.5, 3) end, "ValueError", "in_features")
    H.raises(function() nn.Linear(2, -1) end, "ValueError", "out_features")
    H.raises(function() nn.Linear(2) end, "TypeError", "out_features")
    H.raises(function() nn.Linear(2, 3, { biases = true }) end, "TypeError", "biases")
    H.raises(function() nn.Linear(2, 3, { dtype = "int64" }) end, "RuntimeError")
    H.raises(function() nn.Linear(2, 3)(tm.zeros(4)) end, "RuntimeError", "linear")
    H.raises(function() nn.Linear(2, 3)() end, "TypeError", "linear")
  end)
end)

describe("activations", function()
  local x = tm.tensor { { -1, 0, 2 }, { 3, -4, 0.5 } }

  it("are the functions of F", function()
    for class, fn in pairs { ReLU = F.relu, Tanh = F.tanh, Sigmoid = F.sigmoid } do
      assert.same(fn(x):tolist(), nn[class]()(x):tolist())
      assert.equal(class .. "()", tostring(nn[class]()))
    end
    assert.same({ { 0, 0, 2 }, { 3, 0, 0.5 } }, nn.ReLU()(x):tolist())
    assert.same(x:softmax(-1):tolist(), nn.Softmax()(x):tolist())
    assert.same(x:softmax(1):tolist(), nn.Softmax(1)(x):tolist())
    assert.same(x:log_softmax(2):tolist(), nn.LogSoftmax(2)(x):tolist())
    assert.equal("Softmax(dim=1)", tostring(nn.Softmax(1)))
  end)

  it("overwrite their input when asked", function()
    local y = x:clone()
    assert.equal(y, nn.ReLU { inplace = true }(y))
    assert.same({ { 0, 0, 2 }, { 3, 0, 0.5 } }, y:tolist())
    assert.equal("ReLU(inplace=true)", tostring(nn.ReLU { inplace = true }))
    H.raises(function() nn.ReLU { in_place = true } end, "TypeError", "in_place")
  end)

  it("nn.Identity returns its arguments", function()
    local a, b = nn.Identity()(x, 5)
    assert.equal(x, a)
    assert.equal(5, b)
  end)
end)

describe("nn.Dropout", function()
  it("drops a share p in training and keeps the mean", function()
    tm.manual_seed(3)
    local y = nn.Dropout(0.25)(tm.ones(40000))
    local zeros = y:eq(0):sum():item() / 40000
    assert.near(0.25, zeros, 0.01) -- 5 standard deviations are 0.011
    assert.near_tensor(4 / 3, y:max(), 1e-6)
    assert.equal(40000, zeros * 40000 + y:eq(y:max()):sum():item())
  end)

  it("passes its input in evaluation, and for p = 0", function()
    local x = tm.ones(3)
    assert.equal(x, nn.Dropout(0.5):eval()(x))
    assert.equal(x, nn.Dropout(0)(x))
    assert.same({ 0, 0, 0 }, nn.Dropout(1)(x):tolist())
  end)

  it("passes gradients where it passed values", function()
    local x = tm.ones(100, { requires_grad = true })
    local y = nn.Dropout(0.5)(x)
    y:sum():backward()
    assert.same(y:tolist(), x.grad:tolist())
  end)

  it("refuses a p that is no probability", function()
    for _, p in ipairs { -0.1, 1.1, 0 / 0, "half" } do H.raises(function() nn.Dropout(p) end, "ValueError", "nn.Dropout: p is") end
    assert.equal("Dropout(p=0.5, inplace=false)", tostring(nn.Dropout()))
  end)
end)

describe("nn.Flatten", function()
  it("joins all dims but the first, or those between two", function()
    local x = tm.arange(24):view(2, 3, 4)
    assert.same({ 2, 12 }, nn.Flatten()(x):size())
    assert.same({ 6, 4 }, nn.Flatten(1, 2)(x):size())
    assert.same({ 24 }, nn.Flatten(1)(x):size())
    assert.same(x:view(2, 12):tolist(), nn.Flatten()(x):tolist())
    assert.same({ 0, 12 }, nn.Flatten()(tm.zeros(0, 3, 4)):size())
    H.raises(function() nn.Flatten(0)(x) end, "IndexError")
  end)
end)

describe("nn.Sequential", function()
  local function three() return nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1) end

  it("chains its modules (M200)", function()
    local a, b, c = three()
    local x = tm.randn(4, 2)
    assert.same(c(b(a(x))):tolist(), nn.Sequential(a, b, c)(x):tolist())
    assert.equal(x, nn.Sequential()(x))
  end)

  it("takes modules, a list, named pairs or an ordered dictionary (M219)", function()
    local OrderedDict = require "tmod.ordered"
    local a, b, c = three()
    local d = OrderedDict.new()
    d.first = a
    d.act = b
    local function names(s)
      local list = {}
      for name in s:named_children() do list[#list + 1] = name end
      return list
    end
    assert.same({ "0", "1", "2" }, names(nn.Sequential(a, b, c)))
    assert.same({ "0", "1", "2" }, names(nn.Sequential { a, b, c }))
    assert.same({ "lin", "act" }, names(nn.Sequential { { "lin", a }, { "act", b } }))
    assert.same({ "first", "act" }, names(nn.Sequential(d)))
    H.raises(function() nn.Sequential(a, nil, c) end, "TypeError", "module 2")
    H.raises(function() nn.Sequential(a, 3) end, "TypeError", "not a Module")
  end)

  it("is indexed by position, from 1 or from the end (M217)", function()
    local a, b, c = three()
    local s = nn.Sequential(a, b, c)
    assert.equal(3, s:len())
    assert.equal(a, s[1])
    assert.equal(c, s[-1])
    assert.equal(b, s["1"])
    assert.equal(a, s:get_submodule "0")
    for _, i in ipairs { 0, 4, -4 } do H.raises(function() return s[i] end, "IndexError", "3") end
    local d = nn.Tanh()
    s[2] = d
    assert.equal(d, s[2])
    H.raises(function() s[2] = nil end, "TypeError", "remove")
    H.raises(function() s[2] = 5 end, "TypeError", "not a Module")
    local seen = {}
    for i, m in s:ipairs() do seen[i] = m end
    assert.same({ a, d, c }, seen)
  end)

  it("appends under a free number (M204)", function()
    local a, b, c = three()
    local s = nn.Sequential { { "1", a }, { "x", b } }
    assert.equal(s, s:append(c))
    assert.equal(c, s["2"])
  end)

  it("sees replaced, removed and added modules in its next call", function()
    local s = nn.Sequential(nn.Identity(), nn.Identity())
    local x = tm.tensor { -1 }
    assert.equal(-1, s(x):item())
    s[1] = nn.ReLU()
    assert.equal(0, s(x):item())
    s:delattr "0"
    assert.equal(-1, s(x):item())
    s:append(nn.ReLU())
    assert.equal(0, s(x):item())
  end)

  it("hands several results on (M220)", function()
    local Two = nn.Module:extend "Two"
    function Two:forward(x) return x, x * 2 end
    local Sum = nn.Module:extend "Sum"
    function Sum:forward(a, b) return a + b end
    assert.equal(9, nn.Sequential(Two(), nn.Identity(), Sum())(tm.tensor(3)):item())
  end)

  it("is as long as one likes", function()
    local s = nn.Sequential()
    local One = nn.Module:extend "One"
    function One:forward(x) return x + 1 end
    for _ = 1, 100 do s:append(One()) end
    assert.equal(100, s(tm.zeros(1)):item())
    assert.equal(100, s(0))
  end)
end)

describe("losses", function()
  local dtype = { dtype = "float64" }

  for n, case in ipairs(require "spec.golden.losses") do
    local name, x, target, kind, options = unpack(case)
    it(("%d: %s has PyTorch's value and gradient, %s"):format(n, name, options.reduction), function()
      local x_ = tm.tensor(x, { dtype = "float64", requires_grad = true })
      local opts = {}
      for k, v in pairs(options) do opts[k] = type(v) == "table" and tm.tensor(v, dtype) or v end
      local y = F[name](x_, tm.tensor(target, { dtype = kind }), opts)
      assert.near_tensor(case.y, y, 1e-12)
      local scale = tm.arange(1, y:numel() + 1, dtype):view(y:size())
      ;(y * scale):sum():backward()
      assert.near_tensor(case.dx, x_.grad, 1e-12)
    end)
  end

  it("are modules too, with the class weights as buffer", function()
    local x, y = tm.randn(4, 3), tm.tensor({ 1, 3, 2, 2 }, { dtype = "int64" })
    local weight = tm.tensor { 1, 2, 3 }
    assert.equal(F.cross_entropy(x, y):item(), nn.CrossEntropyLoss()(x, y):item())
    local loss = nn.CrossEntropyLoss { weight = weight, label_smoothing = 0.1, reduction = "sum" }
    assert.equal(F.cross_entropy(x, y, { weight = weight, label_smoothing = 0.1, reduction = "sum" }):item(), loss(x, y):item())
    assert.equal(weight, loss.weight)
    assert.equal("float64", loss:double().weight.dtype)
    assert.equal("float64", loss(x:double(), y).dtype)
    local logp = x:log_softmax(-1)
    assert.equal(F.nll_loss(logp, y, { ignore_index = 2 }):item(), nn.NLLLoss { ignore_index = 2 }(logp, y):item())
    assert.equal(F.mse_loss(x, x * 2, { reduction = "sum" }):item(), nn.MSELoss { reduction = "sum" }(x, x * 2):item())
    assert.equal("MSELoss()", tostring(nn.MSELoss { reduction = "sum" }))
  end)

  it("refuse bad options, targets and shapes, naming them", function()
    local x = tm.randn(4, 3)
    H.raises(function() nn.CrossEntropyLoss { reduction = "avg" } end, "ValueError", "avg")
    H.raises(function() nn.MSELoss { weight = x } end, "TypeError", "weight")
    H.raises(function() nn.CrossEntropyLoss()(x, tm.tensor({ 1, 2, 3, 4 }, { dtype = "int64" })) end, "IndexError", "4")
    H.raises(function() nn.CrossEntropyLoss()(x, tm.tensor({ 0, 1, 2, 3 }, { dtype = "int64" })) end, "IndexError", "0")
    H.raises(function() nn.CrossEntropyLoss()(x) end, "TypeError", "target")
    H.raises(function() nn.MSELoss()(x, 3) end, "TypeError", "target")
    H.raises(function() nn.MSELoss()(x, tm.zeros(5)) end, "RuntimeError", "mse_loss")
  end)
end)

describe("nn.init", function()
  local init = nn.init

  it("fills in place, without recording, and returns the tensor", function()
    local p = nn.Parameter(tm.empty(3, 3))
    assert.equal(p, init.constant_(p, 2.5))
    assert.is_true(p.is_leaf and p.requires_grad)
    assert.same({ 2.5, 2.5, 2.5 }, p:tolist()[1])
    assert.equal(0, init.zeros_(p):sum():item())
    assert.equal(9, init.ones_(p):sum():item())
    assert.same({ { 1, 0, 0 }, { 0, 1, 0 } }, init.eye_(tm.empty(2, 3)):tolist())
  end)

  it("draws from the named distribution", function()
    tm.manual_seed(7)
    local t = tm.empty(200, 100)
    local low, high = bounds(init.uniform_(t, -2, 3))
    assert.is_true(low >= -2 and low < -1.99 and high < 3 and high > 2.99)
    init.normal_(t, 1, 0.5)
    assert.near(1, t:mean():item(), 0.02) -- 20,000 samples: 5 standard deviations are 0.018
    assert.near(0.5, t:std():item(), 0.015)
  end)

  it("has the scales of Glorot and He", function()
    tm.manual_seed(8)
    local t = tm.empty(200, 50, 2) -- fan in 100, fan out 400
    local function check_uniform(bound)
      local low, high = bounds(t)
      assert.is_true(low >= -bound and low < -0.99 * bound and high <= bound and high > 0.99 * bound)
    end
    init.kaiming_uniform_(t, { nonlinearity = "relu" })
    check_uniform(math.sqrt(6 / 100))
    init.kaiming_uniform_(t, { a = math.sqrt(5) })
    check_uniform(math.sqrt(1 / 100))
    init.kaiming_uniform_(t, { mode = "fan_out", nonlinearity = "linear" })
    check_uniform(math.sqrt(3 / 400))
    init.xavier_uniform_(t, 2)
    check_uniform(2 * math.sqrt(6 / 500))
    assert.near(math.sqrt(2 / 100), init.kaiming_normal_(t):std():item(), 0.003)
    assert.near(math.sqrt(2 / 500), init.xavier_normal_(t):std():item(), 0.002)
    assert.near(5 / 3, init.calculate_gain "tanh", 1e-15)
    assert.near(math.sqrt(2 / 1.04), init.calculate_gain("leaky_relu", 0.2), 1e-15)
  end)

  it("refuses what it cannot fill", function()
    H.raises(function() init.kaiming_uniform_(tm.zeros(3)) end, "ValueError", "at least 2 dims")
    H.raises(function() init.kaiming_uniform_(tm.zeros(3, 3), { mode = "fan" }) end, "ValueError", "fan")
    H.raises(function() init.calculate_gain "step" end, "ValueError", "step")
    H.raises(function() init.zeros_(3) end, "TypeError", "number")
    H.raises(function() init.eye_(tm.zeros(3)) end, "ValueError", "2 dims")
  end)
end)
