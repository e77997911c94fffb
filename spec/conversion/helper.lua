---What the specs of conversions share: flags, the four modes, and what a model is at one moment.
local H = require "spec.helper"
local busted = require "busted"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"
local future, None = tm.future, tm.nn.None

local K = {}

---The same figures as future.snapshot() has, none set.
K.OFF = { overwrite = false, swap = false }
K.MODES = {
  { name = "default", overwrite = false, swap = false },
  { name = "overwrite", overwrite = true, swap = false },
  { name = "swap", overwrite = false, swap = true },
  { name = "both", overwrite = true, swap = true },
}

---with_flags{swap =, overwrite =}(fn, ...): fn's results under these flags, which are set back. A flag that is nil
---stays, and fn may set it freely.
function K.with_flags(flags)
  return function(fn, ...)
    local saved = future.snapshot()
    local function finish(ok, ...)
      future.restore(saved)
      if not ok then error((...), 0) end
      return ...
    end
    future.restore { overwrite = flags.overwrite, swap = flags.swap }
    return finish(pcall(fn, ...))
  end
end

---An `it` for each state of the flags: "text [default]", "text [overwrite]" ... fn(mode) runs under the flags;
---mode.name, mode.overwrite, mode.swap, and mode.kept: the handles of parameters survive.
function K.each_mode(text, fn)
  for _, m in ipairs(K.MODES) do
    busted.it(("%s [%s]"):format(text, m.name), function()
      local mode = { name = m.name, overwrite = m.overwrite, swap = m.swap, kept = m.swap or not m.overwrite }
      K.with_flags(m)(fn, mode)
    end)
  end
end

---Fails, and sets both flags back, if a test has left one set. For after_each.
function K.check_flags()
  local now = future.snapshot()
  future.restore(K.OFF)
  if now.overwrite or now.swap then
    error(("the test left %s set"):format(now.swap and now.overwrite and "both flags" or now.swap and "swap" or "overwrite"), 0)
  end
end

-- -- states of a model ----------------------------------------------------------------------------------------------

local function values(t) return t.device == "cpu" and rawget(t, "_class") == nil and t:detach():clone():tolist() or "no values" end

local function describe(t)
  if t == nil or t == None then return "none" end
  local fields = {}
  for k, v in next, t do
    if k ~= "_h" then fields[tostring(k)] = v end
  end
  return { id = tm.id(t), impl_id = tm.impl_id(t), dtype = t.dtype, device = t.device, size = t:size(), stride = t:stride(),
    storage = t:storage_id(), offset = t:storage_offset(), version = t.version, epoch = tm.epoch(t),
    use_count = tm.use_count(t), requires_grad = t.requires_grad, is_leaf = t.is_leaf, values = values(t), fields = fields,
      grad = describe(t.grad) }
end
K.describe = describe

---All that a conversion may change, as plain tables: two are the same (K.same) if nothing changed.
function K.state(model)
  local state = { flags = future.snapshot(), grad_mode = tm.is_grad_enabled() }
  for path, m in model:named_modules() do
    for _, registry in ipairs { "_parameters", "_buffers" } do
      for name, t in OrderedDict.pairs(m[registry]) do
        state[path .. "/" .. name] = describe(t)
        state[#state + 1] = path .. "/" .. name -- the order
      end
    end
    state[path .. "/training"] = m.training
  end
  return state
end
K.snapshot = K.state

---The path of the first difference; nil: none.
local function difference(a, b, path)
  if type(a) ~= "table" or type(b) ~= "table" or rawget(a, "_h") then
    if rawequal(a, b) or a ~= a and b ~= b then return nil end
    return ("%s: %s became %s"):format(path, tostring(a), tostring(b))
  end
  for k, v in pairs(a) do
    local found = difference(v, b[k], path .. " " .. tostring(k))
    if found then return found end
  end
  for k, v in pairs(b) do
    if a[k] == nil then return ("%s %s: is new, %s"):format(path, tostring(k), tostring(v)) end
  end
end

---Fails with the place of the first difference.
function K.same(before, after)
  local found = difference(before, after, "state")
  if found then error(found, 2) end
end

---fn must raise an error of this kind with this text, and leave the model as it was. Returns the error.
function K.unchanged(model, fn, kind, pattern)
  tm.collect() -- a retry would, too: dead graphs count as uses
  local before = K.state(model)
  local e = H.raises(fn, kind, pattern)
  tm.collect()
  K.same(before, K.state(model))
  return e
end

---Handle and content of a tensor.
function K.ids(t) return { tm.id(t), tm.impl_id(t) } end

---A Linear(2, 3) as the contract's table has it, with a gradient unless told otherwise.
function K.linear(opts)
  local l = tm.nn.Linear(2, 3)
  if not (opts and opts.grad == false) then
    l(tm.ones(1, 2)):sum():backward()
  end
  return l
end

---Registers check_flags after each test of the calling file.
function K.guard() busted.after_each(K.check_flags) end

return K
