---Chapters 18 to 20 of docs/contracts/module.md: copies, to_empty, skip_init, and what is left out.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Thing = nn.Module:extend "Thing"

local function P(...) return nn.Parameter(tm.ones(...)) end

describe("nn.deepcopy", function()
  it("M229 M234: shares nothing with the original", function()
    local m = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    m.notes = { tags = { "a" } }
    local x = tm.randn(4, 2)
    local before = m(x):detach()
    local c = m:clone()
    assert.equal("nn.Sequential", c.__name)
    assert.equal(tostring(m), tostring(c))
    assert.near_tensor(before, c(x), 0)
    local mine = {}
    for module in m:modules() do mine[module] = true end
    for module in c:modules() do assert.is_nil(mine[module]) end
    for name, p in c:named_parameters() do assert.is_true(p:storage_id() ~= m:get_parameter(name):storage_id()) end
    tm.no_grad(function()
      for p in c:parameters() do p:fill_(0) end
    end)
    c.notes.tags[1] = "b"
    c:append(nn.ReLU())
    assert.near_tensor(before, m(x), 0)
    assert.equal("a", m.notes.tags[1])
    assert.equal(3, m:len())
  end)

  it("M229: keeps training, empty slots, persistence and order", function()
    local m = Thing()
    m.z = P(1)
    m:register_parameter "none"
    m.a = P(1)
    m:register_buffer("temporary", tm.zeros(1), false)
    m:register_buffer("kept", tm.zeros(1))
    m.child = Thing()
    m:add_module "empty"
    m.child:eval()
    local c = nn.deepcopy(m)
    assert.equal("z none a", table.concat(c._parameters:keys(), " "))
    assert.equal("child empty", table.concat(c._modules:keys(), " "))
    assert.equal("z a kept", table.concat(c:state_dict():keys(), " "))
    assert.is_true(c:hasattr "none" and c.none == nil)
    assert.is_true(c.training)
    assert.is_false(c.child.training)
    c:register_buffer("temporary", tm.zeros(1))
    assert.is_true(m._non_persistent_buffers_set.temporary)
  end)

  it("case 106, M229 M230: keeps ties inside the copy and drops grad, hooks and fields of Parameters", function()
    local m = Thing()
    m.a = nn.Linear(2, 2)
    m.b = nn.Linear(2, 2)
    m.b.weight = m.a.weight
    m.again = m.a
    m.list = { here = { m.a, m.a.weight } }
    m:register_buffer("buffer", tm.ones(1))
    m.alias = m.buffer
    m.itself = m
    local w, count = m.a.weight, 0
    w.note = "mine"
    w.grad = tm.ones(2, 2)
    w:register_hook(function() count = count + 1 end)
    local c = nn.deepcopy(m)
    local cw = c.a.weight
    assert.is_true(cw ~= w and cw == c.b.weight and cw == c.list.here[2])
    assert.is_true(c.a ~= m.a and c.a == c.again and c.a == c.list.here[1])
    assert.equal(c.buffer, c.alias)
    assert.equal(c, c.itself)
    assert.is_true(nn.is_parameter(cw) and cw.requires_grad and cw.is_leaf)
    assert.is_nil(cw.grad)
    assert.is_nil(cw.note)
    c.a(tm.ones(1, 2)):sum():backward()
    assert.equal(0, count)
    assert.near_tensor({ { 1, 1 }, { 1, 1 } }, cw.grad)
    assert.near_tensor({ { 1, 1 }, { 1, 1 } }, w.grad)
  end)

  it("M230: keeps requires_grad, dtype and dense strides of Parameters, and copies each by itself", function()
    local t = tm.zeros(2, 3, { dtype = "float64" }):t()
    local list = { nn.Parameter(t, false), nn.Parameter(t) }
    local c = nn.deepcopy(list)
    assert.same({ false, true }, { c[1].requires_grad, c[2].requires_grad })
    assert.equal("float64", c[1].dtype)
    assert.same({ 1, 3 }, c[1]:stride())
    assert.is_true(c[1]:storage_id() ~= c[2]:storage_id())
  end)

  it("M230: copies tensors with content, grad and fields; views of one storage share the copied one", function()
    local base = tm.arange(0, 12):view(3, 4):float()
    local m = Thing()
    m:register_buffer("base", base)
    m:register_buffer("column", base[{ {}, 2 }])
    m.row = base[3]
    m.leaf = tm.ones(2, { requires_grad = true })
    m.leaf.grad = tm.full({ 2 }, 5)
    m.leaf.note = { "mine" }
    m.leaf:register_hook(function() error "not copied" end)
    m.special = nn.Buffer(tm.ones(1), false)
    local c = nn.deepcopy(m)
    assert.near_tensor({ 1, 5, 9 }, c.column)
    assert.same({ 4 }, c.column:stride())
    c.base:fill_(-1)
    assert.near_tensor({ -1, -1, -1 }, c.column)
    assert.near_tensor({ -1, -1, -1, -1 }, c.row)
    assert.near_tensor({ 1, 5, 9 }, m.column)
    assert.is_true(c.leaf.requires_grad)
    assert.near_tensor({ 5, 5 }, c.leaf.grad)
    assert.is_true(c.leaf.grad ~= m.leaf.grad)
    assert.same({ "mine" }, c.leaf.note)
    assert.is_true(c.leaf.note ~= m.leaf.note)
    assert.is_nil(rawget(c.leaf, "_hooks"))
    c.leaf:sum():backward()
    assert.is_true(nn.is_buffer(c.special))
    assert.is_nil(c:state_dict().special)
  end)

  it("M230: copies empty, 0-dim and meta tensors and other dtypes", function()
    local list = { tm.zeros(0, 3), tm.full({}, 2, { dtype = "int64" }), tm.empty(2, 3, { device = "meta" }), tm.tensor { true, false },
      nn.Parameter(tm.empty(2, { device = "meta" })) }
    local c = nn.deepcopy(list)
    for i, t in ipairs(list) do
      assert.is_true(c[i] ~= t)
      assert.same({ t:size(), t.dtype, t.device }, { c[i]:size(), c[i].dtype, c[i].device })
    end
    assert.equal(2, c[2]:item())
    assert.same({ true, false }, c[4]:tolist())
  end)

  it("case 107, M230: refuses a tensor of a graph, such as a cached activation", function()
    local m = Thing()
    m.l = nn.Linear(2, 2)
    m.cache = m.l(tm.ones(1, 2))
    H.raises(function() nn.deepcopy(m) end, "RuntimeError", "a result of linear belongs to a graph")
    m.cache = m.cache:detach()
    nn.deepcopy(m)
  end)

  -- Every way to register a hook that a module has, with a function that counts.
  local HOOKS = { "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
    "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook" }

  local function run(m)
    m:load_state_dict(m:state_dict())
    m(tm.ones(1, 2, { requires_grad = true })):sum():backward()
  end

  it("case 108, M231: copies hook lists; handles of the original, and copies of handles, remove from their own module", function()
    for _, name in ipairs(HOOKS) do
      local register = nn.Module["register_" .. name]
      local m, seen = nn.Linear(2, 2), {}
      local function hook(module) seen[#seen + 1] = module end
      m.handle = register(m, hook)
      local other = register(m, hook)
      local c = nn.deepcopy(m)
      assert.equal(m.handle.id, c.handle.id)
      other:remove()
      run(m)
      assert.same({ m }, seen, name)
      seen = {}
      run(c)
      assert.is_true(#seen == 2 and seen[1] == c and seen[2] == c, name)
      c.handle:remove()
      seen = {}
      run(c)
      assert.is_true(#seen == 1 and seen[1] == c, name)
      seen = {}
      run(m)
      assert.is_true(#seen == 1 and seen[1] == m, name)
    end
  end)

  it("M231: a handle to a hook of something that is not copied removes nothing", function()
    local m, outside, count = Thing(), nn.Linear(1, 1), 0
    m.handle = outside:register_state_dict_pre_hook(function() count = count + 1 end)
    nn.deepcopy(m).handle:remove()
    outside:state_dict()
    assert.equal(1, count)
  end)

  it("M231: a handle is copied before what it belongs to and still finds it", function()
    local m, count = Thing(), 0
    local child = Thing()
    m.handle = child:register_state_dict_pre_hook(function() count = count + 1 end)
    local c = nn.deepcopy { m.handle, m, child }
    c[1]:remove()
    c[3]:state_dict()
    assert.equal(0, count)
    child:state_dict()
    assert.equal(1, count)
    assert.equal(c[1], c[2].handle)
  end)

  it("M231: rebinds a callable object that is a hook, as PyTorch does a bound method", function()
    local m = Thing()
    local counter = setmetatable({ module = m, count = 0 }, { __call = function(self) self.count = self.count + 1 end })
    m:register_state_dict_pre_hook(counter)
    m.counter = counter
    local c = nn.deepcopy(m)
    c:state_dict()
    assert.equal(0, counter.count)
    assert.equal(1, c.counter.count)
    assert.equal(c, c.counter.module)
  end)

  it("M232: a shallow copy has the same slots: what is registered on one is on both; attributes are its own", function()
    local m = nn.Linear(2, 2)
    local c = nn.copy(m)
    assert.equal(m.weight, c.weight)
    m.extra = P(1)
    c:register_buffer("buffer", tm.zeros(1))
    assert.equal(m.extra, c.extra)
    assert.equal(c.buffer, m.buffer)
    c.in_features = 7
    assert.equal(2, m.in_features)
    c:eval()
    assert.is_true(m.training)
    local count = 0
    m:register_state_dict_pre_hook(function() count = count + 1 end)
    c:state_dict()
    assert.equal(1, count)
  end)

  it("M234: copies tables, ordered dictionaries, keys and metatables; shares functions, classes and None", function()
    local mt = { __index = { hello = function() return "hello" end } }
    local m = Thing()
    local function f() return m end
    local x = { list = { 1, { 2 } }, object = setmetatable({ n = 1 }, mt), set = { [m] = true }, f = f, class = nn.Linear,
      none = nn.None, module = m, library = nn, args = nn.args(1, nil, 3) }
    x.self = x
    local c = nn.deepcopy(x)
    assert.same({ 1, { 2 } }, c.list)
    assert.is_true(c.list ~= x.list and c.list[2] ~= x.list[2])
    assert.equal("hello", c.object.hello())
    assert.is_true(c.object ~= x.object and getmetatable(c.object) == mt)
    assert.is_true(c.set[c.module] and c.set[m] == nil)
    assert.is_true(c.f == f and c.class == nn.Linear and c.none == nn.None and c.library == nn)
    assert.equal(m, c.f())
    assert.equal(c, c.self)
    assert.is_true(nn.is_args(c.args) and c.args.n == 3)
    local d = OrderedDict.new()
    d.b = nn.None
    d.a = { 1 }
    local e = nn.deepcopy(d)
    assert.equal("b a", table.concat(e:keys(), " "))
    assert.is_true(e.b == nn.None and e.a ~= d.a)
    d.itself = d
    e = nn.deepcopy { d, d }
    assert.is_true(e[1] == e[2] and e[1] == e[1].itself and e[1] ~= d)
    assert.same({ 5, "x", false }, { nn.deepcopy(5), nn.deepcopy "x", nn.deepcopy(false) })
    H.raises(function() nn.deepcopy(setmetatable({}, { __metatable = "hidden" })) end, "TypeError", "hidden metatable")
  end)

  it("M234: takes a memo: what is in it is not copied again", function()
    local shared, m = nn.Linear(1, 1), Thing()
    m.a = nn.Linear(1, 1)
    m.shared = shared
    local memo = { [shared] = shared }
    local c = nn.deepcopy(m, memo)
    assert.equal(shared, c.shared)
    assert.equal(c, memo[m])
    assert.equal(c.a, nn.deepcopy(m.a, memo))
  end)

  it("outlives the scope in which it was made, is not recorded, and leaves no tensor behind", function()
    local m = nn.Sequential(nn.Linear(2, 2))
    m:register_buffer("b", tm.ones(1))
    local kept
    tm.scope(function() kept = m:clone() end)
    assert.is_true(kept[1].weight.is_leaf)
    assert.near_tensor(m[1].weight, kept[1].weight, 0)
    assert.near_tensor(m.b, kept.b, 0)
    assert.equal(0, H.live(function() return m:clone() end))
  end)

  it("M233 M235: saving a whole module is refused with a pointer to state_dict", function()
    H.raises(function() tm.save(nn.Linear(1, 1), H.file()) end, "TypeError", "state_dict%(%)")
  end)
end)

describe("module:to_empty", function()
  local function tied(opts)
    local m = Thing()
    m.a = nn.Linear(2, 3, opts)
    m.b = nn.Linear(2, 3, opts)
    m.b.weight = m.a.weight
    m:register_buffer("buffer", tm.zeros({ 2 }, opts))
    m:register_parameter "none"
    return m
  end

  it("case 109, M236: keeps Parameter objects on the same device, with new memory for all, and makes new buffers", function()
    local m = tied()
    m.a.weight.requires_grad = false
    m.a.bias.grad = tm.ones(3)
    local w, bias, buffer = m.a.weight, m.a.bias, m.buffer
    local storage = w:storage_id()
    assert.equal(m, m:to_empty { device = "cpu" })
    assert.is_true(m.a.weight == w and m.b.weight == w and m.a.bias == bias)
    assert.is_true(w:storage_id() ~= storage)
    assert.is_true(m.buffer ~= buffer)
    assert.same({ 2 }, m.buffer:size())
    assert.same({ 3, 2 }, w:size())
    assert.is_false(w.requires_grad)
    assert.is_true(bias.requires_grad)
    assert.same({ 3 }, bias.grad:size())
    m.a(tm.ones(1, 2)):sum():backward()
  end)

  it("case 109, M236: replaces Parameters that come from meta, which unties them", function()
    local m = tied { device = "meta" }
    m.a.bias.requires_grad = false
    local w = m.a.weight
    m:to_empty { device = "cpu" }
    assert.is_true(m.a.weight ~= w and m.a.weight ~= m.b.weight)
    assert.is_true(m.a.weight:storage_id() ~= m.b.weight:storage_id())
    assert.same({ "cpu", "cpu", "cpu" }, { m.a.weight.device, m.b.bias.device, m.buffer.device })
    assert.is_true(nn.is_parameter(m.a.weight) and m.a.weight.requires_grad)
    assert.is_false(m.a.bias.requires_grad)
    assert.is_true(m:hasattr "none" and m.none == nil)
    m:load_state_dict(tied():state_dict())
    m:to_empty { device = "meta" }
    assert.equal("meta", m.a.weight.device)
  end)

  it("M236: keeps dtypes and the order of strides", function()
    local m = Thing()
    m.w = nn.Parameter(tm.zeros(2, 3, { dtype = "float64" }):t())
    m:register_buffer("n", tm.zeros({}, { dtype = "int64" }))
    m:register_buffer("e", tm.zeros(0, 2))
    m:to_empty { device = "cpu" }
    assert.same({ "float64", "int64" }, { m.w.dtype, m.n.dtype })
    assert.same({ 1, 3 }, m.w:stride())
    assert.same({ 0, 2 }, m.e:size())
  end)

  it("M236 M238: needs the device; recurse = false leaves the children alone", function()
    local m = tied()
    H.raises(function() m:to_empty() end, "TypeError", "device is missing")
    H.raises(function() m:to_empty "cpu" end, "TypeError", "options")
    H.raises(function() m:to_empty { device = "nowhere" } end, "ValueError", "nowhere")
    m:to_empty { device = "meta", recurse = false }
    assert.same({ "meta", "cpu" }, { m.buffer.device, m.a.weight.device })
  end)
end)

describe("nn.skip_init", function()
  it("M237 M238: builds on meta, so that initialisation costs nothing, and then takes memory", function()
    local devices = {}
    local Net = nn.Module:extend "Net"
    function Net:init(n, opts)
      self.l = nn.Linear(n, n)
      self.w = nn.Parameter(tm.zeros(n))
      self:register_buffer("b", tm.ones(n))
      self.opts = opts
      for _, t in ipairs { self.l.weight, self.w, self.b } do devices[#devices + 1] = t.device end
    end
    local m = nn.skip_init(Net, 3)
    assert.same({ "meta", "meta", "meta" }, devices)
    assert.same({ "cpu", "cpu", "cpu" }, { m.l.weight.device, m.w.device, m.b.device })
    assert.is_true(nn.is_parameter(m.w) and m.w.requires_grad)
    assert.equal("cpu", tm.get_default_device())
    local opts = { device = "meta", hint = 1 }
    m = nn.skip_init(Net, 3, opts)
    assert.equal("meta", m.w.device)
    assert.same({ hint = 1 }, m.opts)
    assert.same({ device = "meta", hint = 1 }, opts)
    local l = nn.skip_init(nn.Linear, 2, 3, { bias = false, device = "cpu", dtype = "float64" })
    assert.same({ 3, 2 }, l.weight:size())
    assert.is_nil(l.bias)
    assert.same({ "cpu", "float64" }, { l.weight.device, l.weight.dtype })
    -- The generator is not touched.
    tm.manual_seed(1)
    local expected = tm.rand(3):tolist()
    tm.manual_seed(1)
    nn.skip_init(nn.Linear, 10, 10)
    assert.same(expected, tm.rand(3):tolist())
  end)

  it("M237: refuses what is no class of modules, and restores the default device after an error", function()
    for _, wrong in ipairs { false, {}, print, nn.Linear(1, 1), "nn.Linear" } do
      H.raises(function() nn.skip_init(wrong, 1, 1) end, "RuntimeError", "class of modules")
    end
    H.raises(function() nn.skip_init() end, "RuntimeError", "class of modules")
    H.raises(function() nn.skip_init(nn.Linear, "x", 1) end, "TypeError")
    assert.equal("cpu", tm.get_default_device())
  end)
end)

describe("nn.Module", function()
  it("M85 M239: has nothing of what is left out", function()
    local l = nn.Linear(1, 1)
    for _, name in ipairs { "compile", "dump_patches", "call_super_init", "share_memory", "_replicate_for_data_parallel", "__dir__" } do
      assert.is_false(l:hasattr(name), name)
    end
    for _, name in ipairs { "UninitializedParameter", "LazyLinear", "DataParallel" } do assert.is_nil(nn[name], name) end
  end)

  it("M240: converts by the methods that the conversion contract describes", function()
    local l = nn.Linear(1, 1)
    for _, name in ipairs { "to", "cuda", "cpu", "type", "float", "half", "double", "bfloat16" } do assert.is_function(l[name]) end
    assert.equal("float64", l:double().weight.dtype)
    assert.equal("float32", l:to("float32").weight.dtype)
  end)
end)
