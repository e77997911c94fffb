---Every allocation of a conversion and of a load fails in turn. A conversion is all or nothing; a load is, by rule C135,
---entry by entry, so there each entry is as before or loaded, and never something between. An operator that lacks memory
---collects garbage and tries again, so its failures are harmless here; a function that fails stands for those.

require "spec.helper"
local tm = require "tmod"
local C = require "tmod.ffi".C
local nn = tm.nn

local MODES = { default = {}, overwrite = { overwrite = true }, swap = { swap = true }, both = { overwrite = true, swap = true } }

-- twelve parameters, of which one is frozen and one sits in two slots; gradients; buffers of three dtypes
local Net = nn.Module:extend "Net"
function Net:init(device)
  local on = { device = device }
  self.a = nn.Linear(3, 4, on)
  self.norm = nn.LayerNorm(4, on)
  self.b = nn.Linear(4, 4, on)
  self.batch = nn.BatchNorm1d(4, on)
  self.c = nn.Linear(4, 4, on)
  self.d = nn.Linear(4, 2, on)
  self.tied = nn.Module()
  self.tied.weight = self.b.weight
  self:register_buffer("mask", tm.ones(4, on):gt(0))
  self.c.bias:requires_grad_(false)
  self.a.weight.decay = false
end
function Net:forward(x) return self.d(self.c(self.batch(self.b(self.norm(self.a(x)))))) end

local function backward(net) net(tm.linspace(-1, 1, 15):view(5, 3)):pow(2):sum():backward() end

local function new_net()
  local net = Net()
  backward(net)
  return net
end

---Each slot of a model: path, module, name, tensor.
local function each_tensor(model, visit)
  for path, module in model:named_modules() do
    for _, registry in ipairs { "_parameters", "_buffers" } do
      for name, t in module[registry]:pairs() do visit(path .. "." .. name, t) end
    end
  end
end

local function portrait(t)
  if not t then return "none" end
  return { id = tm.id(t), impl = tm.impl_id(t), dtype = t.dtype, device = t.device, size = t:size(), stride = t:stride(),
    storage = t:storage_id(), requires_grad = t.requires_grad, leaf = t.is_leaf, version = t.version, field = tostring(rawget(t, "decay")),
    parameter = nn.is_parameter(t), value = t.device ~= "meta" and t:detach():tolist() or "none" }
end

---All that a conversion could change, as plain tables.
local function state_of(model)
  local state = { training = model.training, overwrite = tm.future.get_overwrite_module_params_on_conversion(),
    swap = tm.future.get_swap_module_params_on_conversion() }
  each_tensor(model, function(path, t)
    state[path] = portrait(t)
    state[path .. ".grad"] = portrait(t.grad)
  end)
  return state
end

local function counts()
  tm.collect()
  local live = tm.live()
  live.handles = C.tm_handles_count(require "tmod.ffi".handles)
  return live
end

---Calls fn with the k-th allocation failing, for k from 1 until fn makes fewer. check(ok, error, k) after each.
local function each_failure(fn, check)
  local k, failures = 0, 0
  repeat
    k = k + 1
    local before = tonumber(C.tm_memory_allocations())
    C.tm_memory_fail_at(k)
    local ok, e = pcall(fn, k)
    C.tm_memory_fail_at(0)
    local made = tonumber(C.tm_memory_allocations()) - before
    if not ok then failures = failures + 1 end
    check(ok, e, k)
  until made < k
  return failures
end

local function out_of_memory(e)
  while type(e) == "table" and e.kind ~= "OutOfMemory" do e = e.cause end
  return type(e) == "table" and e.message:find "out of memory" ~= nil
end

local CONVERSIONS = {
  { "to a dtype", function(net) net:to "bfloat16" end, "bfloat16" },
  { "type", function(net) net:type "float64" end, "float64" },
  { "to the same device, where nothing changes", function(net) net:to "cpu" end, "float32", few = true },
  { "to meta", function(net) net:to "meta" end, "float32" },
  { "to_empty", function(net) net:to_empty { device = "cpu" } end, "float32" },
  { "to_empty of a meta model", function(net) net:to_empty { device = "cpu" } end, "float32", function() return Net "meta" end },
  { "a function of Lua's, with one failure", function(net) net:_apply(function(t) return t * 2 end) end, "float32", few = true },
}

describe("a conversion of twelve parameters that runs out of memory", function()
  before_each(function() tm.empty_cache() end)

  for mode_name, mode in pairs(MODES) do
    for _, conversion in ipairs(CONVERSIONS) do
      local name, convert, dtype, make = unpack(conversion)
      it(("[%s] %s: changes nothing, whichever allocation fails, and leaks nothing (C13 C65 C66 C70)"):format(mode_name, name), function()
        make = make or new_net
        tm.future.with(mode, convert, make()) -- what is made on first use and stays
        local net = make()
        local before, live = state_of(net), counts()
        local failures = each_failure(function() tm.future.with(mode, convert, net) end, function(ok, e, k)
          if ok then -- a failure that did no harm, or none: the model is converted, and a fresh one takes its place
            assert.equal(dtype, net.a.weight.dtype, ("allocation %d"):format(k))
            net = make()
            before = state_of(net)
            return
          end
          assert.is_true(out_of_memory(e), ("allocation %d: %s"):format(k, tostring(e)))
          assert.same(before, state_of(net), ("allocation %d"):format(k))
        end)
        assert.is_true(failures >= (conversion.few and 1 or 12), failures .. " failures")
        assert.same(live, counts())
      end)
    end

    it(("[%s] a function that fails at its n-th tensor changes nothing, for every n (C65 C66 C68)"):format(mode_name), function()
      local net = new_net()
      local before, live = state_of(net), counts()
      for n = 1, 100 do
        local calls = 0
        local ok, e = pcall(tm.future.with, mode, net._apply, net, function(t)
          calls = calls + 1
          if calls == n then error "enough" end
          return t:detach():clone()
        end)
        if ok then
          assert.equal(n - 1, calls)
          break
        end
        assert.truthy(tostring(e):find "enough")
        assert.same(before, state_of(net), ("tensor %d"):format(n))
      end
      net = new_net() -- the old one is converted, which may have broken its tie
      assert.same(live, counts())
      assert.equal(net.b.weight, net.tied.weight)
    end)

    it(("[%s] leaves a pending backward pass as it was"):format(mode_name), function()
      local net, expected, loss
      local function renew()
        net = new_net()
        expected = net.a.weight.grad
      end
      renew()
      local failures = each_failure(function(k)
        C.tm_memory_fail_at(0)
        if k > 60 then return end -- all kinds of allocations are among these
        net:zero_grad()
        loss = net(tm.linspace(-1, 1, 15):view(5, 3)):pow(2):sum()
        C.tm_memory_fail_at(k)
        tm.future.with(mode, net.double, net)
      end, function(ok, e)
        if ok then return renew() end
        assert.is_true(out_of_memory(e), tostring(e))
        loss:backward()
        assert.near_tensor(expected, net.a.weight.grad, 0) -- the same sums in the same order
      end)
      assert.is_true(failures >= 12)
    end)

    it(("[%s] atomic = false: a tensor is converted or as before, nothing leaks, once more completes it"):format(mode_name), function()
      local function convert(net) net:to { dtype = "float64", atomic = false } end
      tm.future.with(mode, convert, new_net())
      local net = new_net()
      local values, live = net.a.weight:tolist(), counts()
      local failures = each_failure(function() tm.future.with(mode, convert, net) end, function(ok)
        each_tensor(net, function(path, t)
          if t:is_floating_point() then assert.truthy(({ float32 = not ok, float64 = true })[t.dtype], path) end
        end)
        assert.near_tensor(values, net.a.weight, 0)
        if not ok then tm.future.with(mode, convert, net) end
        assert.equal("float64", net.d.bias.dtype)
        net = new_net()
        values = net.a.weight:tolist()
      end)
      assert.is_true(failures >= 12)
      assert.same(live, counts())
    end)
  end
end)

describe("load_state_dict that runs out of memory", function()
  before_each(function() tm.empty_cache() end)

  for _, swap in ipairs { false, true } do
    for _, assign in ipairs { false, true } do
      local name = (swap and (assign and "swap+assign" or "swap")) or (assign and "assign" or "copy")
      it(("[%s] loads an entry or leaves it, whichever allocation fails, and leaks nothing (C135 C137)"):format(name), function()
        local function load(net, sd) tm.future.with({ swap = swap }, net.load_state_dict, net, sd, { assign = assign }) end
        local source = Net()
        local sd = source:state_dict()
        load(new_net(), sd)
        local net = new_net()
        local before, live = state_of(net), counts()
        local failures = each_failure(function() load(net, sd) end, function(ok, e, k)
          local function say(path) return ("%s, allocation %d"):format(path, k) end
          if not ok then
            assert.truthy(tostring(e):find "out of memory", say(tostring(e)))
            assert.is_false(tm.future.get_swap_module_params_on_conversion())
          end
          each_tensor(net, function(path, t)
            local was, new = before[path], portrait(t)
            assert.equal(was.dtype, new.dtype, say(path))
            assert.equal(was.requires_grad, new.requires_grad, say(path))
            assert.equal(was.parameter, new.parameter, say(path))
            assert.is_true(new.leaf)
            local key = path:gsub("^%.", "")
            local loaded = pcall(assert.same, sd[key]:tolist(), new.value)
            assert.is_true(loaded or not ok and pcall(assert.same, was.value, new.value), say(path))
            if not loaded then assert.same(was, new, say(path)) end -- not even its number of versions
            if swap or not assign then assert.equal(was.id, new.id, say(path)) end
          end)
          if not ok then load(net, sd) end
          each_tensor(net, function(path, t)
            assert.near_tensor(sd[path:gsub("^%.", "")], t:detach(), 0)
          end)
          net = new_net()
          before = state_of(net)
        end)
        assert.is_true(failures > 0 or name == "copy", failures .. " failures")
        assert.same(live, counts())
      end)
    end
  end
end)
