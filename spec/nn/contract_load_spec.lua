---Chapter 15 of docs/contracts/module.md: load_state_dict, its hooks, errors and migrations.
local H = require "spec.helper"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local nn = tm.nn
local Thing = nn.Module:extend "Thing"

local function P(...) return nn.Parameter(tm.ones(...)) end

---ordered{"a", 1, "b", 2}: an ordered dictionary.
local function ordered(list)
  local d = OrderedDict.new()
  for i = 1, #list, 2 do d[list[i]] = list[i + 1] end
  return d
end

---Parameter p, buffer b, children c1 and c2 with a parameter w each.
local function tree()
  local m = Thing()
  m.p = P(1)
  m:register_buffer("b", tm.ones(1))
  for _, name in ipairs { "c1", "c2" } do
    m[name] = Thing()
    m[name].w = P(2)
  end
  return m
end

---A state dictionary of tree() filled with numbers 2, 3, 4, 5 in the order of its keys.
local function filled()
  local sd = nn.deepcopy(tree():state_dict())
  for i, key in ipairs(sd:keys()) do sd[key]:fill_(i + 1) end
  return sd
end

local function values(m)
  local list = {}
  for _, t in m:state_dict():pairs() do list[#list + 1] = t:sum():item() / t:numel() end
  return list
end

---What fn warns of.
local function warnings(fn)
  local log, warn = {}, nn.Module._warn
  nn.Module._warn = function(message, ...) log[#log + 1] = message:format(...) end
  local ok, e = pcall(fn)
  nn.Module._warn = warn
  assert(ok, e)
  return log
end

describe("load_state_dict: dictionaries", function()
  it("M174: copies values into the module and returns both lists", function()
    local m = tree()
    local r = m:load_state_dict(filled())
    assert.same({ 2, 3, 4, 5 }, values(m))
    assert.same({}, r.missing_keys)
    assert.same({}, r.unexpected_keys)
  end)

  it("case 97, M174 M194: takes a mapping from strings", function()
    local m = tree()
    for _, wrong in ipairs { "text", 1, true, tm.ones(1), tree() } do
      H.raises(function() m:load_state_dict(wrong) end, "TypeError", "expected a dictionary")
    end
    H.raises(function() m:load_state_dict() end, "TypeError", "got nil")
    H.raises(function() m:load_state_dict { tm.ones(1) } end, "TypeError", "keys must be strings, got a number: 1")
    H.raises(function() m:load_state_dict(ordered { 1, tm.ones(1) }) end, "TypeError", "keys must be strings")
    H.raises(function() m:load_state_dict(filled(), { stirct = true }) end, "TypeError", "unknown option stirct; known: assign, strict")
    assert.same({ 1, 1, 1, 1 }, values(m))
  end)

  it("M174 M196: prints the result in short, or with the keys", function()
    local m = tree()
    assert.equal("<all keys matched>", tostring(m:load_state_dict(filled(), { strict = false })))
    local r = m:load_state_dict({ x = tm.ones(1), p = tm.ones(1) }, { strict = false })
    assert.equal('missing keys: "b", "c1.w", "c2.w"; unexpected keys: "x"', tostring(r))
  end)

  it("M196: takes a plain table's keys in bytewise order", function()
    local r = Thing():load_state_dict({ b = 1, a = 1, B = 1, ["a.c"] = 1, aa = 1 }, { strict = false })
    assert.equal("B a a.c aa b", table.concat(r.unexpected_keys, " "))
    local m = tree()
    m:load_state_dict { p = tm.full({ 1 }, 2), b = tm.full({ 1 }, 3), ["c1.w"] = tm.full({ 2 }, 4), ["c2.w"] = tm.full({ 2 }, 5) }
    assert.same({ 2, 3, 4, 5 }, values(m))
  end)

  it("M175: loads parents first, each child with its part of the dictionary, post-hooks after the children", function()
    local m, log = tree(), {}
    for _, name in ipairs { "", "c1", "c2" } do
      local module = m:get_submodule(name)
      module:register_load_state_dict_pre_hook(function(self, sd, prefix)
        assert.equal(module, self)
        log[#log + 1] = "pre " .. prefix .. " [" .. table.concat(OrderedDict.keys(sd), " ") .. "]"
      end)
      module:register_load_state_dict_post_hook(function() log[#log + 1] = "post " .. name end)
    end
    m:load_state_dict(filled())
    assert.same({ "pre  [p b c1.w c2.w]", "pre c1. [c1.w]", "post c1", "pre c2. [c2.w]", "post c2", "post " }, log)
  end)

  it("case 90, M174 M175: a parent's hook renames keys for its descendants, and the caller's dictionary stays", function()
    local m, sd = tree(), filled()
    local w = sd["c1.w"]
    sd["c1.w"] = nil
    sd["c1.old"] = w
    local before = table.concat(sd:keys(), " ")
    m:register_load_state_dict_pre_hook(function(_, d)
      d["c1.w"] = d["c1.old"]
      d["c1.old"] = nil
    end)
    m:load_state_dict(sd)
    assert.same({ 2, 3, 4, 5 }, values(m))
    assert.equal(before, table.concat(sd:keys(), " "))
  end)

  it("M175: a child's hook does not rename keys for siblings or parents", function()
    local m = tree()
    m.c1:register_load_state_dict_pre_hook(function(_, d)
      d["c2.w"] = nil
      d["c2.zz"] = tm.ones(1)
      d.p = nil
    end)
    m:load_state_dict(filled())
    assert.same({ 2, 3, 4, 5 }, values(m))
  end)

  it("case 86, M175 M183: loads a shared module once for each path", function()
    local m, count = Thing(), 0
    m.a = nn.Linear(1, 1, { bias = false })
    m.b = m.a
    m.a:register_load_state_dict_post_hook(function() count = count + 1 end)
    local r = m:load_state_dict({ ["a.weight"] = tm.full({ 1, 1 }, 3) }, { strict = false })
    assert.same({ "b.weight" }, r.missing_keys)
    assert.equal(3, m.b.weight:item())
    assert.equal(2, count)
  end)

  it("M195: an empty dictionary fits a module without state", function()
    local m = Thing()
    m:load_state_dict {}
    m:register_buffer("b", tm.ones(1), false)
    m:register_parameter "none"
    m.child = nn.ReLU()
    assert.same({}, m:load_state_dict({}).missing_keys)
  end)

  it("loads ten thousand parameters in time that grows with their number", function()
    local wide, layers = Thing(), {}
    for i = 1, 10000 do wide["w" .. i] = P(1) end
    for i = 1, 5000 do layers[i] = nn.Linear(1, 1) end
    for _, m in ipairs { wide, nn.Sequential(layers) } do
      local sd, start = m:state_dict(), os.clock()
      m:load_state_dict(sd)
      m:load_state_dict(sd, { assign = true })
      -- 0.2 s here; asking each of 5000 children for its keys among 10000 would take ten times as long.
      assert.is_true(os.clock() - start < (H.sanitized and 30 or 2.5))
    end
  end)
end)

describe("load_state_dict: one module's step", function()
  it("M172 M176: is load_from_state_dict, which a class may override", function()
    local Halved = Thing:extend "Halved"
    function Halved:load_from_state_dict(d, prefix, ...)
      local key = prefix .. "w"
      if OrderedDict.get(d, key) then d[key] = d[key] / 2 end
      return nn.Module.load_from_state_dict(self, d, prefix, ...)
    end
    local m = nn.Sequential(Halved())
    m[1].w = P(1)
    m:load_state_dict { ["0.w"] = tm.full({ 1 }, 8) }
    assert.equal(4, m[1].w:item())
  end)

  it("M176 M188: runs pre-hooks, then loads parameters, buffers and extra state, then looks for unexpected keys", function()
    local m = Thing()
    function m.set_extra_state() end
    m:register_buffer("b1", tm.ones(1))
    m.child = Thing()
    m.child.w = P(1)
    m.p2 = P(1)
    m.p1 = P(1)
    m:register_load_state_dict_pre_hook(function(_, d) d.from_hook = 1 end)
    local r = m:load_state_dict(ordered { "zz", 1, "child.zz", 1, "aa", 1 }, { strict = false })
    assert.same({ "p2", "p1", "b1", "_extra_state", "child.w" }, r.missing_keys)
    assert.same({ "zz", "aa", "from_hook", "child.zz" }, r.unexpected_keys)
  end)

  it("case 78, M188: lists missing and unexpected keys by module, the root first", function()
    local m = tree()
    local sd = ordered { "c2.zz", 1, "u2", 1, "c1.qq", 1, "u1", 1 }
    local r = m:load_state_dict(sd, { strict = false })
    assert.same({ "u2", "u1", "c1.qq", "c2.zz" }, r.unexpected_keys)
    assert.same({ "p", "b", "c1.w", "c2.w" }, r.missing_keys)
  end)

  it("case 91, M177: is always strict, so both lists are complete", function()
    local m, seen = tree(), {}
    for _, module in ipairs { m, m.c1 } do
      module:register_load_state_dict_pre_hook(function(_, _, _, _, strict) seen[#seen + 1] = strict end)
    end
    m:load_state_dict({}, { strict = false })
    assert.same({ true, true }, seen)
  end)

  it("M178: a pre-hook gets live tables; a message that it adds is an error; its result is ignored", function()
    local m = tree()
    m.c1:register_load_state_dict_pre_hook(function(module, d, prefix, metadata, strict, missing, unexpected, errors)
      assert.equal(m.c1, module)
      assert.equal("c1.", prefix)
      assert.equal(1, metadata.version)
      assert.is_true(strict)
      assert.same({ "p" }, missing)
      assert.same({ "extra" }, unexpected)
      d["c1.w"] = tm.full({ 2 }, 9)
      errors[#errors + 1] = "first of all, too old"
      return false
    end)
    local sd = filled()
    sd.p = nil
    sd.extra = tm.ones(1)
    H.raises(function() m:load_state_dict(sd, { strict = false }) end, "RuntimeError", "Thing:\n\tfirst of all, too old$")
    assert.same({ 1, 3, 9, 5 }, values(m))
  end)

  it("M179: tells each module its metadata, or an empty table", function()
    local m, seen = tree(), {}
    for _, module in ipairs { m, m.c1 } do
      module:register_load_state_dict_pre_hook(function(_, _, _, metadata) seen[#seen + 1] = metadata end)
    end
    local sd = filled()
    sd._metadata.c1.version = 7
    m:load_state_dict(sd)
    assert.same({ { version = 1 }, { version = 7 } }, seen)
    m:load_state_dict(sd, { assign = true })
    assert.same({ version = 7, assign_to_params_buffers = true }, seen[4])
    sd._metadata.c1 = nil
    sd._metadata[""] = ordered { "version", 2 } -- as a reader may bring it
    m:load_state_dict(sd)
    assert.same({ version = 2 }, seen[5])
    assert.same({}, seen[6])
    sd._metadata = nil
    m:load_state_dict(sd)
    assert.same({ {}, {} }, { seen[7], seen[8] })
  end)

  it("case 88, M179: assign does not leak into the dictionary", function()
    local sd = filled()
    tree():load_state_dict(sd, { assign = true })
    assert.is_nil(sd._metadata[""].assign_to_params_buffers)
    local m = tree()
    local p = m.p
    m:load_state_dict(sd)
    assert.equal(p, m.p)
  end)
end)

describe("load_state_dict: one entry", function()
  local function load(target, value)
    local m = Thing()
    m:register_buffer("t", target)
    m:load_state_dict { t = value }
    return m.t
  end

  it("case 79, M180: takes a vector of one element for a 0-dim tensor, not the reverse, and never broadcasts", function()
    local t = load(tm.zeros {}, tm.full({ 1 }, 4))
    assert.equal(0, t.ndim)
    assert.equal(4, t:item())
    H.raises(function() load(tm.zeros(1), tm.full({}, 4)) end, "RuntimeError",
      "size mismatch for t: the state dictionary has %(%), the module has %(1,%)")
    H.raises(function() load(tm.zeros {}, tm.zeros(2)) end, "RuntimeError", "has %(2,%), the module has %(%)")
    H.raises(function() load(tm.zeros(2, 3), tm.zeros(3)) end, "RuntimeError", "has %(3,%), the module has %(2, 3%)")
    H.raises(function() load(tm.zeros(3), tm.zeros(1, 3)) end, "RuntimeError", "has %(1, 3%), the module has %(3,%)")
    local m = Thing()
    m.p = nn.Parameter(tm.zeros {})
    m:load_state_dict({ p = tm.full({ 1 }, 4) }, { assign = true })
    assert.equal(0, m.p.ndim)
    assert.equal(4, m.p:item())
  end)

  it("M180 M197: names the key and the kind of a value that is no tensor", function()
    H.raises(function() load(tm.zeros(1), nn.None) end, "RuntimeError", '"t" must be a tensor, got nn.None')
    H.raises(function() load(tm.zeros(1), "x") end, "RuntimeError", '"t" must be a tensor, got string')
    H.raises(function() load(tm.zeros(1), { 1 }) end, "RuntimeError", '"t" must be a tensor, got table')
  end)

  it("M180: tells key, sizes and cause of a copy that fails, and goes on", function()
    local m, sd = tree(), filled()
    sd["c1.w"] = tm.empty(2, { device = "meta" })
    H.raises(function() m:load_state_dict(sd) end, "RuntimeError", "\tcannot load c1.w, %(2,%) into %(2,%): .*meta")
    assert.same({ 2, 3, 1, 5 }, values(m))
  end)

  it("case 80, M181: converts to the target's dtype, truncating to whole numbers", function()
    local t = load(tm.zeros(2, { dtype = "int64" }), tm.tensor { 1.7, -2.7 })
    assert.equal("int64", t.dtype)
    assert.near_tensor({ 1, -2 }, t)
    local m = nn.Linear(1, 1):half()
    m:load_state_dict { weight = tm.full({ 1, 1 }, 1.5, { dtype = "float64" }), bias = tm.zeros(1, { dtype = "float64" }) }
    assert.equal("float16", m.weight.dtype)
    assert.equal(1.5, m.weight:item())
  end)

  it("M181: keeps object, storage, strides, requires_grad and grad of the target; nothing is recorded", function()
    local m = Thing()
    m.w = nn.Parameter(tm.zeros(2, 3):t())
    m.frozen = nn.Parameter(tm.zeros(1), false)
    local w, storage, version = m.w, m.w:storage_id(), m.w.version
    w.grad = tm.ones(3, 2)
    local grad = w.grad
    local value = tm.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }
    m:load_state_dict { w = value, frozen = nn.Parameter(tm.ones(1)) }
    assert.near_tensor(value, m.w)
    assert.equal(w, m.w)
    assert.equal(storage, w:storage_id())
    assert.same({ 1, 3 }, w:stride())
    assert.equal(grad, w.grad)
    assert.is_true(w.requires_grad and w.is_leaf)
    assert.is_false(m.frozen.requires_grad)
    assert.is_true(w.version > version)
    value:fill_(0)
    assert.equal(21, w:sum():item())
  end)

  it("case 96, M181: a backward pass that saved the old value is refused", function()
    local l = nn.Linear(2, 2)
    local x = tm.ones(1, 2, { requires_grad = true })
    local y = l(x):sum()
    l:load_state_dict(nn.Linear(2, 2):state_dict())
    H.raises(function() y:backward() end, "RuntimeError", "in place")
  end)

  it("case 89, M182: assign puts the dictionary's tensors in the slots, in new Parameters with the old requires_grad", function()
    local m = tree()
    m.p.requires_grad = false
    m.c1.w.grad = tm.ones(2)
    local p, w, sd = m.p, m.c1.w, filled()
    sd.p = sd.p:to "float64"
    sd["c1.w"] = tm.zeros(2, 2)[{ {}, 1 }] -- strided
    m:load_state_dict(sd, { assign = true })
    assert.is_true(m.p ~= p and m.c1.w ~= w)
    assert.is_true(nn.is_parameter(m.p) and not m.p.requires_grad)
    assert.is_true(nn.is_parameter(m.c1.w) and m.c1.w.requires_grad)
    assert.equal("float64", m.p.dtype)
    assert.equal(sd.p:storage_id(), m.p:storage_id())
    assert.equal(2, m.c1.w:stride(1))
    assert.is_nil(m.c1.w.grad)
    assert.equal(sd.b, m.b)
    sd["c2.w"]:fill_(7)
    assert.near_tensor({ 7, 7 }, m.c2.w)
  end)

  it("M182: assign takes a Parameter as it is, and keeps order and persistence of the slots", function()
    local m = Thing()
    m.a = P(1)
    m:register_buffer("temporary", tm.zeros(1), false)
    m:register_buffer("kept", tm.zeros(1))
    m.z = nn.Parameter(tm.zeros(1), false)
    local a, z = P(1), P(1)
    m:load_state_dict({ a = a, z = z, kept = tm.ones(1) }, { assign = true })
    assert.is_true(m.a == a and m.z == z)
    assert.is_false(z.requires_grad)
    assert.equal("a z kept", table.concat(m:state_dict():keys(), " "))
  end)

  it("M182: assign goes through attribute assignment, whose registration hooks run", function()
    local m, sd, seen = tree(), filled(), {}
    local handle = nn.register_parameter_registration_hook(function(_, name) seen[#seen + 1] = name end)
    local ok, e = pcall(function()
      m:load_state_dict(sd)
      m:load_state_dict(sd, { assign = true })
    end)
    handle:remove()
    assert(ok, e)
    assert.same({ "p", "w", "w" }, seen)
  end)

  it("case 87, M183: of different values for a tied parameter the last wins; assign unties", function()
    local m = Thing()
    m.a = nn.Linear(1, 1, { bias = false })
    m.b = nn.Linear(1, 1, { bias = false })
    m.b.weight = m.a.weight
    local sd = ordered { "b.weight", tm.full({ 1, 1 }, 2), "a.weight", tm.full({ 1, 1 }, 1) }
    m:load_state_dict(sd)
    assert.equal(m.a.weight, m.b.weight)
    assert.equal(2, m.a.weight:item()) -- last in the module's order
    m:load_state_dict(sd, { assign = true })
    assert.is_true(m.a.weight ~= m.b.weight)
    assert.equal(1, m.a.weight:item())
    assert.equal(2, m.b.weight:item())
  end)

  it("M184: warns of copies into meta, which change nothing; assign brings the tensors", function()
    local m = nn.Linear(1, 1, { device = "meta" })
    local sd = { weight = tm.full({ 1, 1 }, 3) }
    local log = warnings(function() m:load_state_dict(sd, { strict = false }) end)
    assert.equal(1, #log)
    assert.truthy(log[1]:find "weight is on meta.*assign = true")
    assert.equal("meta", m.weight.device)
    log = warnings(function() m:load_state_dict(sd, { strict = false, assign = true }) end)
    assert.same({}, log)
    assert.equal(3, m.weight:item())
    assert.equal("meta", m.bias.device)
  end)
end)

describe("load_state_dict: extra state", function()
  local Extra = Thing:extend "Extra"
  function Extra:get_extra_state() return self.state end
  function Extra:set_extra_state(state)
    self.state = state
    self.calls = (self.calls or 0) + 1
  end

  it("M77 M185: is given to set_extra_state, nil included; a key that is absent is missing", function()
    local e = Extra()
    e.state = { 1, 2 }
    local sd = e:state_dict()
    local other = Extra()
    other:load_state_dict(sd)
    assert.same({ 1, 2 }, other.state)
    other:load_state_dict(Extra():state_dict())
    assert.is_nil(other.state)
    assert.equal(2, other.calls)
    assert.same({ "_extra_state" }, other:load_state_dict({}, { strict = false }).missing_keys)
    H.raises(function() Thing():set_extra_state() end, "NotImplementedError", "Thing")
  end)

  it("M185: is unexpected where no set_extra_state waits for it", function()
    local r = Thing():load_state_dict({ _extra_state = 1 }, { strict = false })
    assert.same({ "_extra_state" }, r.unexpected_keys)
    r = tree():load_state_dict({ ["c1._extra_state"] = 1 }, { strict = false })
    assert.same({ "c1._extra_state" }, r.unexpected_keys)
  end)

  it("case 94, M185: an error of set_extra_state leaves at once, as it is", function()
    local m, mine = tree(), {}
    m.c1 = Extra()
    function m.c1.set_extra_state() error(mine) end
    local sd = filled()
    sd["c1.w"] = nil
    sd["c1._extra_state"] = 1
    sd.wrong = 1
    local ok, e = pcall(m.load_state_dict, m, sd)
    assert.is_false(ok)
    assert.equal(mine, e)
    assert.equal(2, m.p:item()) -- loaded before
    assert.equal(1, m.c2.w[1]:item())
  end)
end)

describe("load_state_dict: unexpected keys", function()
  local function unexpected(m, ...)
    local sd = OrderedDict.new()
    for _, key in ipairs { ... } do sd[key] = tm.ones(1) end
    return m:load_state_dict(sd, { strict = false }).unexpected_keys
  end

  it("case 82, M186: a key of an empty parameter slot is one", function()
    local l = nn.Linear(1, 1, { bias = false })
    assert.same({ "bias" }, unexpected(l, "bias"))
    H.raises(function() l:load_state_dict(nn.Linear(1, 1):state_dict()) end, "RuntimeError",
      'unexpected keys in the state dictionary: "bias"$')
  end)

  it("case 83, M186: so are a key below a parameter and the name of a child", function()
    local m = Thing()
    m.fc1 = nn.Linear(1, 1)
    assert.same({ "fc1", "fc1.weight.bad" }, unexpected(m, "fc1.weight.bad", "fc1"))
    assert.same({ ".x", "fc1." }, unexpected(m, "fc1.", ".x"))
  end)

  it("case 85, M186 M195: so is a buffer that is not persistent, which is never missing", function()
    local m = Thing()
    m:register_buffer("b", tm.zeros(1), false)
    assert.same({ "b" }, unexpected(m, "b"))
    m:load_state_dict {}
    assert.equal(0, m.b:item())
  end)

  it("case 84, M187: keys below an empty child slot are ignored", function()
    local m = Thing()
    m:add_module "empty"
    assert.same({}, unexpected(m, "empty.weight", "empty.a.b"))
    assert.same({ "empty" }, unexpected(m, "empty"))
    m:load_state_dict { ["empty.weight"] = tm.ones(1) }
  end)
end)

describe("load_state_dict: post-hooks and errors", function()
  local function clear(list) for i = #list, 1, -1 do list[i] = nil end end

  it("case 92, M189: a post-hook that clears the lists makes a strict load pass", function()
    local m, sd = tree(), filled()
    sd.wrong = tm.ones(1)
    sd["c1.w"] = nil
    m.c2:register_load_state_dict_post_hook(function(module, incompatible)
      assert.equal(m.c2, module)
      assert.same({ "c1.w" }, incompatible.missing_keys)
      assert.same({ "wrong" }, incompatible.unexpected_keys)
      clear(incompatible.missing_keys)
      clear(incompatible.unexpected_keys)
    end)
    local r = m:load_state_dict(sd)
    assert.equal("<all keys matched>", tostring(r))
  end)

  it("M189: one that adds makes it fail, and all run though there were errors", function()
    local m, sd, count = tree(), filled(), 0
    sd.p = tm.ones(3)
    m.c1:register_load_state_dict_post_hook(function(_, incompatible)
      count = count + 1
      table.insert(incompatible.missing_keys, "mine")
    end)
    m:register_load_state_dict_post_hook(function() count = count + 1 end)
    H.raises(function() m:load_state_dict(sd) end, "RuntimeError", 'missing keys in the state dictionary: "mine"\n\tsize mismatch for p')
    assert.equal(2, count)
  end)

  it("case 93, M189: a result is an AssertionError at once", function()
    local m, later = tree(), false
    m.c1:register_load_state_dict_post_hook(function() return 1 end)
    m:register_load_state_dict_post_hook(function() later = true end)
    H.raises(function() m:load_state_dict(filled()) end, "AssertionError", "post%-hook of Thing returned a number")
    assert.is_false(later)
    assert.same({ 2, 3, 4, 1 }, values(m))
  end)

  it("M190 M198: one error tells everything: missing, unexpected, then the rest, at the caller's line", function()
    local m, sd = tree(), filled()
    sd.p = nil
    sd["c2.w"] = nil
    sd.x = tm.ones(1)
    sd["c1.y"] = tm.ones(1)
    sd.b = tm.ones(2, 2)
    sd["c1.w"] = 3
    local e = H.raises(function() m:load_state_dict(sd) end, "RuntimeError")
    assert.equal(table.concat({
      "load_state_dict of Thing:",
      'missing keys in the state dictionary: "p", "c2.w"',
      'unexpected keys in the state dictionary: "x", "c1.y"',
      "size mismatch for b: the state dictionary has (2, 2), the module has (1,)",
      '"c1.w" must be a tensor, got number',
    }, "\n\t"), e.message)
    assert.truthy(e.where:find "contract_load_spec.lua:%d+$")
  end)

  it("case 81, M190 M191: wrong shapes are errors also when not strict, and all that fits is loaded", function()
    for _, strict in ipairs { true, false } do
      local m = nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(1, 1))
      local sd = nn.deepcopy(m:state_dict())
      for _, t in sd:pairs() do t:fill_(9) end
      sd["1.weight"] = tm.ones(3, 2)
      H.raises(function() m:load_state_dict(sd, { strict = strict }) end, "RuntimeError",
        "load_state_dict of Sequential:\n\tsize mismatch for 1.weight: the state dictionary has %(3, 2%), the module has %(2, 2%)$")
      for key, t in m:state_dict():pairs() do
        if key ~= "1.weight" then assert.near_tensor(tm.full(t:size(), 9), t) end
      end
    end
  end)
end)

describe("load_state_dict: versions", function()
  -- BatchNorm's rule, in a layer that has nothing else.
  local Norm = nn.Module:extend "Norm"
  Norm._version = 2
  function Norm:init()
    self:register_buffer("running_mean", tm.zeros(1))
    self:register_buffer("num_batches_tracked", tm.full({}, 7, { dtype = "int64" }))
  end
  function Norm:load_from_state_dict(sd, prefix, metadata, ...)
    local key = prefix .. "num_batches_tracked"
    if (metadata.version or 1) < 2 and OrderedDict.get(sd, key) == nil then
      local counter = self.num_batches_tracked
      sd[key] = counter and counter.device ~= "meta" and counter or tm.full({}, 0, { dtype = "int64" })
    end
    return nn.Module.load_from_state_dict(self, sd, prefix, metadata, ...)
  end

  it("case 95, M192: a layer takes old dictionaries without its counter, which stays, and asks new ones for it", function()
    local m = nn.Sequential(Norm())
    local mean = tm.ones(1)
    assert.same({}, m:load_state_dict({ ["0.running_mean"] = mean }).missing_keys)
    assert.equal(7, m[1].num_batches_tracked:item())
    local sd = m:state_dict()
    sd["0.num_batches_tracked"] = nil
    sd._metadata["0"].version = 1
    m:load_state_dict(sd)
    assert.equal(7, m[1].num_batches_tracked:item())
    sd._metadata["0"].version = 2
    assert.same({ "0.num_batches_tracked" }, m:load_state_dict(sd, { strict = false }).missing_keys)
    assert.equal(7, m[1].num_batches_tracked:item())
  end)

  it("M192: BatchNorm1d follows it", function()
    local m = nn.BatchNorm1d(2)
    m.num_batches_tracked:fill_(7)
    local sd = m:state_dict()
    assert.equal(2, sd._metadata[""].version)
    sd.num_batches_tracked = nil
    assert.same({ "num_batches_tracked" }, m:load_state_dict(sd, { strict = false }).missing_keys)
    local old = {}
    for key, t in sd:pairs() do old[key] = t end
    assert.same({}, m:load_state_dict(old).missing_keys)
    assert.equal(7, m.num_batches_tracked:item())
    assert.equal("int64", m.num_batches_tracked.dtype)
  end)

  it("M193: a layer may drop keys that old versions had and tell all of them in one message", function()
    local Instance = nn.Module:extend "Instance"
    function Instance:load_from_state_dict(sd, prefix, metadata, strict, missing, unexpected, errors)
      local old = {}
      for _, name in ipairs { "running_mean", "running_var" } do
        if metadata.version == nil and OrderedDict.get(sd, prefix .. name) ~= nil then
          old[#old + 1] = prefix .. name
          sd[prefix .. name] = nil
        end
      end
      if #old > 0 then errors[#errors + 1] = "statistics that are not tracked: " .. table.concat(old, ", ") end
      return nn.Module.load_from_state_dict(self, sd, prefix, metadata, strict, missing, unexpected, errors)
    end
    local m = nn.Sequential(Instance())
    local sd = { ["0.running_mean"] = tm.ones(1), ["0.running_var"] = tm.ones(1) }
    H.raises(function() m:load_state_dict(sd) end, "RuntimeError",
      "Sequential:\n\tstatistics that are not tracked: 0.running_mean, 0.running_var$")
    assert.truthy(sd["0.running_mean"])
  end)

  it("M199: a safetensors file has no metadata of modules, so versions are nil", function()
    local m = nn.Sequential(Norm())
    local sd = m:state_dict()
    sd["0.num_batches_tracked"] = nil
    local path = H.file()
    tm.save(sd, path)
    local seen
    m[1]:register_load_state_dict_pre_hook(function(_, _, _, metadata) seen = metadata end)
    assert.same({}, m:load_state_dict(tm.load(path)).missing_keys)
    assert.same({}, seen)
  end)
end)
