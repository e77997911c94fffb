-- Shows what happens to a model that is converted or loaded: in which mode parameters stay the same objects, and what
-- goes wrong where people did not expect it. docs/conversion.md tells the story; run one section by its name.
local argparse = require "argparse"
local tm = require "tmod"
local nn, optim = tm.nn, tm.optim

local parser = argparse("conversion.lua", "What a conversion or a load does to a model, section by section.")
parser:argument("section", "sections to run; none: all"):args "*"
local args = parser:parse()

local function say(format, ...) print("  " .. format:format(...)) end
local function yes(b) return b and "yes" or "no" end

---Runs show(name) with the flags of each mode.
local function in_each_mode(show)
  for _, mode in ipairs { { "default" }, { "overwrite", overwrite = true }, { "swap", swap = true } } do
    tm.future.with({ overwrite = mode.overwrite or false, swap = mode.swap or false }, show, mode[1])
  end
end

---The line that tells an error, without the place where it happened.
local function message(fn, ...)
  local ok, e = pcall(fn, ...)
  if ok then return "no error" end
  local text, cause = e.message, e.cause
  return (cause and text .. ": " .. (type(cause) == "table" and cause.message or tostring(cause)) or text):gsub("\n%s*", " ")
end

local sections = {}

-- What becomes of a parameter that others hold when its module is converted.
sections[1] = { "modes", function()
  print("  mode       same object  same content  field kept  same gradient")
  in_each_mode(function(mode)
    local model = nn.Linear(2, 3)
    local w, content = model.weight, tm.impl_id(model.weight)
    w.decay = false
    model(tm.randn(4, 2)):sum():backward()
    local grad = w.grad
    model:to "bfloat16"
    print(("  %-10s %-12s %-13s %-11s %s"):format(mode, yes(model.weight == w), yes(tm.impl_id(model.weight) == content),
      yes(model.weight.decay == false), yes(model.weight.grad == grad)))
  end)
end }

-- An optimizer holds the parameters it was given, and its own states, which no conversion touches.
sections[2] = { "optimizer", function()
  in_each_mode(function(mode)
    local model, x = nn.Linear(2, 1), tm.randn(8, 2)
    local opt = optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
    local function step()
      opt:zero_grad()
      model(x:to(model.weight.dtype)):pow(2):sum():backward()
      local before = model.weight:clone():detach()
      opt:step()
      return (model.weight:detach() - before):abs():sum():item() > 0
    end
    step()
    local _, replaced = model:to "float64"
    local trains = step()
    local state = next(opt.state) and opt.state[next(opt.state)].momentum_buffer
    say("%-10s an optimizer made before trains the model: %s", mode, yes(trains))
    if not trains then
      opt:rebind(replaced)
      say("%-10s   after opt:rebind(replaced): %s", "", yes(step()))
    end
    if state then
      local was = state.dtype
      opt:to_params { dtype = true }
      state = opt.state[model.weight].momentum_buffer
      say("%-10s   its momentum is %s, after opt:to_params{dtype = true} %s", "", was, state.dtype)
    end
  end)
end }

local Tied = nn.Module:extend "Tied"
function Tied:init(opts)
  self.encoder = nn.Linear(4, 4, opts)
  self.decoder = nn.Linear(4, 4, opts)
  self.decoder.weight = self.encoder.weight
end
local function count(model)
  local n = 0
  for _ in model:parameters() do n = n + 1 end
  return n
end

-- Two slots that hold one parameter.
sections[3] = { "ties", function()
  in_each_mode(function(mode)
    local model = Tied()
    local groups = nn.tied_groups(model)
    model:to "float64"
    local after = count(model)
    nn.retie(groups)
    say("%-10s %s are tied: 3 parameters; after to(\"float64\") %d, after retie %d", mode, table.concat(groups[1], " and "), after,
      count(model))
  end)
  in_each_mode(function(mode)
    local model = Tied { device = "meta" }
    local groups = nn.tied_groups(model)
    model:to_empty { device = "cpu" }
    local after = count(model)
    nn.retie(groups)
    say("%-10s from meta by to_empty: %d, after retie %d", mode, after, count(model))
  end)
end }

-- A model that was built without memory.
sections[4] = { "meta", function()
  local model = nn.Sequential(nn.Linear(2, 3, { device = "meta" }), nn.BatchNorm1d(3, { device = "meta" }))
  say("to(\"cpu\"): %s", message(model.to, model, "cpu"))

  local w = model[1].weight
  model:to_empty { device = "cpu" }
  for _, m in model:ipairs() do m:reset_parameters() end -- values, which to_empty does not give; of buffers, too
  say("to_empty and reset_parameters: on %s, the same parameter: %s", model[1].weight.device, yes(model[1].weight == w))

  model = nn.Linear(2, 3, { device = "meta" })
  local sd = nn.Linear(2, 3):state_dict()
  model:load_state_dict(sd, { assign = true })
  say("load_state_dict with assign: on %s, in the memory of the state dictionary: %s", model.weight.device,
    yes(model.weight:storage_id() == sd.weight:storage_id()))
end }

-- A graph that was recorded before the conversion.
sections[5] = { "backward", function()
  in_each_mode(function(mode)
    local model = nn.Linear(2, 1, { bias = false })
    local w = model.weight
    local y = model(tm.ones(1, 2)):sum()
    model:to "float64"
    local error_text = message(y.backward, y)
    local function gradient(t) return t.grad and t.grad.dtype or "none" end
    say("%-10s forward, convert, backward: %s", mode, error_text)
    if w == model.weight then say("%-10s   gradient of the parameter: %s", "", gradient(w))
    else say("%-10s   gradient of the parameter: %s, of the old one: %s", "", gradient(model.weight), gradient(w)) end
  end)
end }

-- The four ways to load a state dictionary: two flags, {assign} and the swap flag.
sections[6] = { "load", function()
  print("  mode         same object  dtype     memory is        gradient kept  tie kept")
  for _, mode in ipairs { { "copy" }, { "assign", assign = true }, { "swap", swap = true },
    { "swap+assign", swap = true, assign = true } } do
    tm.future.with({ swap = mode.swap or false }, function()
      local model, sd = Tied(), Tied():bfloat16():state_dict()
      local w, storage = model.encoder.weight, model.encoder.weight:storage_id()
      w.grad = tm.ones(4, 4)
      model:load_state_dict(sd, { assign = mode.assign or false })
      local new = model.encoder.weight
      local memory = new:storage_id()
      -- Tied, the last key decides.
      local theirs = memory == sd["encoder.weight"]:storage_id() or memory == sd["decoder.weight"]:storage_id()
      print(("  %-12s %-12s %-9s %-16s %-14s %s"):format(mode[1], yes(new == w), new.dtype,
        memory == storage and "the model's" or theirs and "the dictionary's" or "new", yes(new.grad ~= nil),
        yes(new == model.decoder.weight)))
    end)
  end
end }

-- All or nothing.
sections[7] = { "failure", function()
  local model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
  tm.collect()
  tm.set_memory_limit(tm.memory_stats().in_use + 600e3) -- bytes: room for one of the two new weights
  local text = message(model.double, model)
  tm.set_memory_limit(0)
  say("double(): %s", text:match "^[^:]*out of memory[^:]*")
  say("after it: %s and %s", model[1].weight.dtype, model[2].weight.dtype)
  model:double()
  say("with memory: %s and %s", model[1].weight.dtype, model[2].weight.dtype)

  local weight = model[1].weight
  local observer = tm.weakref(weight) -- says that this very content must stay
  tm.future.with({ swap = true }, function() say("swap: %s", message(model.float, model)) end)
  say("after it: %s and %s", model[1].weight.dtype, model[2].weight.dtype)
  assert(observer)
end }

-- What shares memory with a parameter, or was computed from it, does not follow.
sections[8] = { "followers", function()
  local model = nn.Linear(2, 2)
  local sd, row, held = model:state_dict(), model.weight[1], { model.weight }
  model.cache = model.weight:detach() * 2 -- no parameter and no buffer
  model:to "float64"
  say("parameter %s, state dictionary %s, view %s, field %s, list that holds the parameter %s", model.weight.dtype, sd.weight.dtype,
    row.dtype, model.cache.dtype, held[1].dtype)
end }

-- What a conversion will take, on a device that need not be there.
sections[9] = { "plan", function()
  tm.fake_mode(function()
    local model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)):to("cuda", "bfloat16")
    say("two Linear(4096, 4096) on %s in %s: %.0f MB", model[1].weight.device, model[1].weight.dtype, tm.fake_memory(model).total / 1e6)
  end)
end }

tm.manual_seed(1)
local chosen = {}
for _, name in ipairs(args.section) do chosen[name] = true end
for _, section in ipairs(sections) do
  local name, show = unpack(section)
  if #args.section == 0 or chosen[name] then
    print(name)
    show()
    chosen[name] = nil
  end
end
if next(chosen) then error("there is no section " .. next(chosen)) end
