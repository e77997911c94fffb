---Chapter 14 of docs/contracts/module.md: state_dict, its hooks and its metadata.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Thing = nn.Module:extend "Thing"

local function P(n) return nn.Parameter(tm.ones(n)) end
local function keys(d) return table.concat(OrderedDict.keys(d), " ") end

---A parameter, a buffer and two children of the same kind, assigned in no tidy order.
local function tree()
  local m = Thing()
  m.first = Thing()
  m.first.w = P(2)
  m:register_buffer("b", tm.zeros(2))
  m.second = Thing()
  m.second.w = P(3)
  m.p = P(1)
  return m
end

describe("state_dict", function()
  it("M158: makes an ordered dictionary with the version of every module by path", function()
    local Old = Thing:extend "Old"
    Old._version = 3
    local m = tree()
    m.second.deep = Old()
    local sd = m:state_dict()
    assert.is_true(OrderedDict.is(sd))
    assert.equal("p b first.w second.w", keys(sd))
    assert.equal(" first second second.deep", keys(sd._metadata))
    assert.same({ version = 1 }, sd._metadata.first)
    assert.same({ version = 3 }, sd._metadata["second.deep"])
  end)

  it("M158: fills and returns the caller's dictionary, whose metadata it writes only where there is some", function()
    local m, d = tree(), OrderedDict.new()
    d.mine = 1
    assert.equal(d, m:state_dict { destination = d })
    assert.equal("mine p b first.w second.w", keys(d))
    assert.is_nil(d._metadata)
    d._metadata = OrderedDict.new()
    m:state_dict { destination = d, prefix = "again." }
    assert.equal("again again.first again.second", keys(d._metadata))
  end)

  it("case 32, M159 M160: puts the prefix before the keys as it is, and metadata under it without its last character", function()
    local l = nn.Linear(2, 2)
    local sd = l:state_dict { prefix = "foo" }
    assert.equal("fooweight foobias", keys(sd))
    assert.equal("fo", keys(sd._metadata))
    sd = l:state_dict { prefix = "foo." }
    assert.equal("foo.weight foo.bias", keys(sd))
    assert.equal("foo", keys(sd._metadata))
  end)

  it("case 33, M161: lists parameters, buffers and extra state of a module, then its children", function()
    local m = tree()
    assert.equal("p b first.w second.w", keys(m:state_dict()))
    local Extra = Thing:extend "Extra"
    function Extra:get_extra_state() return "extra" end
    local e = Extra()
    e.child = nn.Linear(1, 1)
    e:register_buffer("buffer", tm.zeros(1))
    e.q = P(1)
    e.p = P(1)
    assert.equal("q p buffer _extra_state child.weight child.bias", keys(e:state_dict()))
  end)

  it("M161: runs pre-hooks after the metadata and before the entries, post-hooks after the children", function()
    local m, sd, log = tree(), OrderedDict.new(), {}
    sd._metadata = OrderedDict.new()
    local function note(name)
      return function(module, a, b)
        log[#log + 1] = ("%s %s [%s] metadata {%s}"):format(name, OrderedDict.is(a) and b or a, keys(sd), keys(sd._metadata))
        if name == "pre" then assert.is_true(b) end
        assert.is_true(module == m or module == m.first)
      end
    end
    for _, module in ipairs { m, m.first } do
      module:register_state_dict_pre_hook(note "pre")
      module:register_state_dict_post_hook(note "post")
    end
    m:state_dict { destination = sd, prefix = "x.", keep_vars = true }
    assert.same({
      "pre x. [] metadata {x}",
      "pre x.first. [x.p x.b] metadata {x x.first}",
      "post x.first. [x.p x.b x.first.w] metadata {x x.first}",
      "post x. [x.p x.b x.first.w x.second.w] metadata {x x.first x.second}",
    }, log)
  end)

  it("M161: asks the children themselves, so that an override counts", function()
    local Quiet = Thing:extend "Quiet"
    function Quiet:state_dict(opts) return opts.destination end
    local m = tree()
    m.first = Quiet()
    m.first.w = P(1)
    local sd = m:state_dict()
    assert.equal("p b second.w", keys(sd))
    assert.equal(" second", keys(sd._metadata))
  end)

  it("M162: leaves out empty slots and buffers that are not persistent", function()
    local m = tree()
    m:register_parameter "none"
    m:register_buffer("gone", nil)
    m:register_buffer("temporary", tm.zeros(1), false)
    m.second = nil
    m.stateless = nn.ReLU()
    local sd = m:state_dict()
    assert.equal("p b first.w", keys(sd))
    assert.equal(" first stateless", keys(sd._metadata))
  end)

  it("case 75, M163: shares memory with the module", function()
    local l = nn.Linear(2, 2)
    local sd = l:state_dict()
    sd.weight:fill_(5)
    assert.near_tensor({ { 5, 5 }, { 5, 5 } }, l.weight)
    tm.no_grad(function() l.bias:fill_(7) end)
    assert.near_tensor({ 7, 7 }, sd.bias)
    local kept = nn.deepcopy(l:state_dict())
    sd.weight:fill_(6)
    assert.near_tensor({ { 5, 5 }, { 5, 5 } }, kept.weight)
  end)

  it("M163: holds plain tensors, new ones in each call, or with keep_vars the very objects", function()
    local m = tree()
    m.b = nn.Buffer(tm.zeros(2))
    local a, b = m:state_dict(), m:state_dict()
    assert.is_true(a.p ~= b.p and a.p ~= m.p and a.b ~= m.b)
    assert.is_false(nn.is_parameter(a.p))
    assert.is_false(nn.is_buffer(a.b))
    assert.is_false(a.p.requires_grad)
    local vars = m:state_dict { keep_vars = true }
    for key, t in vars:pairs() do
      local path, name = ("." .. key):match "^%.?(.-)%.?([^.]*)$"
      assert.equal(m:get_submodule(path)[name], t)
    end
  end)

  it("case 30, M164: lists a tied parameter under each of its names", function()
    local m = Thing()
    m.a = nn.Linear(2, 2)
    m.b = nn.Linear(2, 2)
    m.b.weight = m.a.weight
    m.again = m.a
    local sd = m:state_dict()
    assert.equal("a.weight a.bias b.weight b.bias again.weight again.bias", keys(sd))
    assert.equal(sd["a.weight"]:storage_id(), sd["b.weight"]:storage_id())
    assert.equal(sd["a.bias"]:storage_id(), sd["again.bias"]:storage_id())
    assert.equal(" a b again", keys(sd._metadata))
  end)

  it("case 77, M165: adds extra state where a class has some, nil included", function()
    local Extra = Thing:extend "Extra"
    function Extra:get_extra_state() return self.state end
    local e = Extra()
    local sd = nn.Sequential(e, Thing()):state_dict()
    assert.equal("0._extra_state", keys(sd))
    assert.equal(nn.None, sd["0._extra_state"])
    e.state = { steps = 3 }
    assert.equal(e.state, e:state_dict()._extra_state)
    H.raises(function() Thing():get_extra_state() end, "NotImplementedError", "Thing")
  end)

  it("M166: lets a post-hook change the whole dictionary", function()
    local m = tree()
    m.second:register_state_dict_post_hook(function(module, sd, prefix, metadata)
      assert.equal(m.second, module)
      sd[prefix .. "renamed"] = sd[prefix .. "w"]
      sd[prefix .. "w"] = nil
      sd["first.w"] = nil
      metadata.version = 9
    end)
    local sd = m:state_dict()
    assert.equal("p b second.renamed", keys(sd))
    assert.equal(9, sd._metadata.second.version)
    local plain = {}
    m.second:register_state_dict_post_hook(function(_, _, _, metadata) plain.version = metadata.version end)
    m:state_dict { destination = {} }
    assert.equal(9, plain.version) -- there without metadata, too
  end)

  it("case 76, M166 M167: refuses a result of a post-hook: no hook replaces the dictionary", function()
    local m = tree()
    m.first:register_state_dict_post_hook(function() return {} end)
    H.raises(function() m:state_dict() end, "RuntimeError", "post%-hook of Thing returned a table")
    assert.is_false(m:hasattr "_register_state_dict_hook")
  end)

  it("M168 M172: saves a module's own entries by save_to_state_dict, which a class may override", function()
    local Packed = Thing:extend "Packed"
    function Packed:save_to_state_dict(destination, prefix, keep_vars)
      nn.Module.save_to_state_dict(self, destination, prefix, keep_vars)
      destination[prefix .. "packed"] = self.w:detach():to "float16"
      destination[prefix .. "w"] = nil
    end
    local m = Packed()
    m.w = P(2)
    m.child = nn.Linear(1, 1)
    m.child.bias = nil
    local sd = nn.Sequential(m):state_dict()
    assert.equal("0.packed 0.child.weight", keys(sd))
    assert.equal("float16", sd["0.packed"].dtype)
  end)

  it("M169: takes a prefix from keys and metadata; renamed keys go to the end", function()
    local wrapper = Thing()
    wrapper.module = tree()
    wrapper.other = P(1)
    local sd = wrapper:state_dict()
    assert.equal("other module.p module.b module.first.w module.second.w", keys(sd))
    local p = sd["module.p"]
    nn.consume_prefix_in_state_dict_if_present(sd, "module.")
    assert.equal("other p b first.w second.w", keys(sd))
    assert.equal(p, sd.p)
    assert.equal(" first second", keys(sd._metadata))
    nn.consume_prefix_in_state_dict_if_present(sd, "module.")
    assert.equal("other p b first.w second.w", keys(sd))
    local plain = { ["m.a"] = 1, b = 2 }
    nn.consume_prefix_in_state_dict_if_present(plain, "m.")
    assert.same({ a = 1, b = 2 }, plain)
  end)

  it("M170: takes one options table", function()
    local m = tree()
    H.raises(function() m:state_dict "prefix." end, "TypeError", "options")
    H.raises(function() m:state_dict { prefx = "a" } end, "TypeError", "unknown option prefx; known: destination, keep_vars, prefix")
    H.raises(function() m:state_dict { prefix = 1 } end, "TypeError", "prefix must be a string")
    local plain = m:state_dict { destination = {} }
    assert.is_false(OrderedDict.is(plain))
    assert.is_nil(plain._metadata)
    assert.equal(1, plain.p:numel())
  end)

  it("M171: names positions from 0, as PyTorch does", function()
    local layers = {}
    for i = 1, 12 do layers[i] = nn.Linear(1, 1) end
    local m = Thing()
    m.layers = nn.Sequential(layers)
    local sd = m:state_dict()
    assert.equal("layers.0.weight", OrderedDict.keys(sd)[1])
    assert.equal(sd["layers.11.bias"]:storage_id(), m.layers[12].bias:storage_id())
    assert.is_nil(sd["layers.12.bias"])
  end)

  it("M173: keeps metadata through deepcopy and clone, not through a copy key by key", function()
    local sd = tree():state_dict()
    for _, copied in ipairs { nn.deepcopy(sd), sd:clone() } do
      assert.equal("p b first.w second.w", keys(copied))
      assert.same({ version = 1 }, copied._metadata.first)
      assert.is_true(copied._metadata ~= sd._metadata and copied._metadata.first ~= sd._metadata.first)
      assert.is_true(copied.p:storage_id() ~= sd.p:storage_id())
    end
    local by_key = OrderedDict.new()
    for k, v in sd:pairs() do by_key[k] = v end
    assert.is_nil(by_key._metadata)
  end)
end)

describe("hooks of state_dict and load_state_dict", function()
  local NAMES = { "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook" }

  local function run(m) m:load_state_dict(m:state_dict()) end

  it("M122: run in the order of registration and take no options", function()
    for _, name in ipairs(NAMES) do
      local m, log = tree(), {}
      for i = 1, 3 do m["register_" .. name](m, function() log[#log + 1] = i end) end
      run(m)
      assert.same({ 1, 2, 3 }, log)
      H.raises(function() m["register_" .. name](m, "no function") end, "TypeError", "register_" .. name)
    end
  end)

  it("M123: may add and remove hooks while they run, which counts from the next run on", function()
    for _, name in ipairs(NAMES) do
      local m, log, handles = tree(), {}, {}
      local function register(fn) return m["register_" .. name](m, fn) end
      handles[1] = register(function()
        log[#log + 1] = "a"
        handles[1]:remove()
        handles[2]:remove()
        register(function() log[#log + 1] = "c" end)
      end)
      handles[2] = register(function() log[#log + 1] = "b" end)
      run(m)
      assert.equal("a b", table.concat(log, " "))
      run(m)
      assert.equal("a b c", table.concat(log, " "))
    end
  end)

  it("M103: handles may remove twice and keep no module alive", function()
    local m, count = tree(), 0
    local kept = m:register_state_dict_pre_hook(function() count = count + 1 end)
    local h = m:register_state_dict_pre_hook(function() count = count + 10 end)
    assert.is_true(h.id > kept.id)
    h:remove()
    h:remove()
    m:state_dict()
    assert.equal(1, count)
    local weak = setmetatable({ m }, { __mode = "v" })
    m = nil -- luacheck: ignore 311
    collectgarbage()
    collectgarbage()
    assert.is_nil(weak[1])
    kept:remove()
  end)
end)
