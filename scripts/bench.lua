---bench.lua: the budgets of docs/design.md, measured. tmod and PyTorch take turns within one run; a figure is the
---median of the rounds, and the ratio is what counts, since machines differ and drift.

local ffi = require "ffi"
local tm = require "tmod"
local nn, F, optim = tm.nn, tm.nn.functional, tm.optim

ffi.cdef [[
typedef struct { long sec, nsec; } bench_time;
int clock_gettime(int clock, bench_time *t);
]]
local spec = ffi.new "bench_time"
---Seconds, of the monotonic clock.
local function now()
  ffi.C.clock_gettime(1, spec)
  return tonumber(spec.sec) + tonumber(spec.nsec) * 1e-9
end

local ROUNDS = 5

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

local function least(list) return math.min(unpack(list)) end

---Seconds per call of f(n), of n calls.
local function timed(f, n)
  local t = now()
  f(n)
  return (now() - t) / n
end

---Seconds per call of f(n), which does its work n times; n is chosen so that a round takes about `target` seconds.
local function calibrate(f, target)
  local n = 1
  while true do
    local t = now()
    f(n)
    t = now() - t
    if t > target / 4 then return math.max(1, math.floor(n * target / t)) end
    n = n * 4
  end
end

-- rows ---------------------------------------------------------------------------------------------------------------

---name, unit, scale (of seconds), budget (a function of tmod's and PyTorch's seconds: met or not, and its text), make:
---returns f(n). `torch`: name of the function in bench_torch.py. `beside`: makes another f(n) that takes turns with the
---row's own, whose seconds are the budget's third argument. `least`: figures are the least of more rounds and not their
---median, since what disturbs a machine only slows down what memory bounds.
local rows = {}
local function row(r) rows[#rows + 1] = r end

local function under(seconds, text) return function(t) return t < seconds, "under " .. text end end

local program = arg[-1] or "tmodrun"
row { name = "start to first tensor", unit = "ms", scale = 1e3, budget = under(15e-3, "15 ms"), torch = "start", make = function()
  local command = program .. " -e 'local t = require(\"tmod\").zeros(2)'"
  return function(n) for _ = 1, n do assert(os.execute(command) == 0) end end
end }

local function add_loop()
  local a, b = tm.randn(4):requires_grad_(), tm.randn(4):requires_grad_()
  return function(n)
    local c
    for _ = 1, n do c = a + b end
    return c
  end
end
row { name = "add, 4 elements, graph, compiled", unit = "us", scale = 1e6, budget = under(0.6e-6, "0.6 us"), torch = "add",
  make = add_loop }
row { name = "add, 4 elements, graph, interpreted", unit = "us", scale = 1e6, budget = under(3e-6, "3 us"), torch = "add", make = function()
  local f = add_loop()
  return function(n)
    jit.off()
    jit.flush()
    f(n)
    jit.on()
  end
end }
row { name = "add_ in place, 4 elements (call of C)", unit = "us", scale = 1e6, budget = under(0.15e-6, "0.15 us"), torch = "add_",
  make = function()
  local a, b = tm.randn(4), tm.zeros(4)
  return function(n) for _ = 1, n do a:add_(b) end end
end }
row { name = "mul, sum, backward, 4 elements", unit = "us", scale = 1e6, budget = under(6e-6, "6 us"), torch = "backward", make = function()
  local a, b = tm.randn(4):requires_grad_(), tm.randn(4):requires_grad_()
  return function(n) for _ = 1, n do (a * b):sum():backward() end end
end }
row { name = "Linear(8, 8) through Module", unit = "us", scale = 1e6, budget = under(2e-6, "2 us"), torch = "linear", make = function()
  local m, x = nn.Linear(8, 8), tm.randn(1, 8)
  return function(n) for _ = 1, n do local _ = m(x) end end
end }

-- Modules whose forward does nothing: what the module system adds. Eight take turns, lest a loop does its work once.
local Trivial = nn.Module:extend "Trivial"
function Trivial:forward(x) return x end

local Nested = nn.Module:extend "Nested"
function Nested:init(depth) if depth > 1 then self.inner = Nested(depth - 1) end end
function Nested:forward(x)
  if self.inner then return (self.inner(x)) end
  return x
end

local function list_of(make, n)
  local list = {}
  for i = 1, n do list[i] = make(i) end
  return list
end

---f(n) that does use(object, x) with eight objects by turns.
local function turns(make, use)
  return function()
    local list, x = list_of(make, 8), tm.zeros(1)
    return function(n)
      local y
      for i = 1, n do y = use(list[i % 8 + 1], x) end
      return y
    end
  end
end

row { name = "read a parameter of a module", unit = "us", scale = 1e6, budget = under(0.1e-6, "0.1 us"), torch = "parameter",
  make = turns(function() return nn.Linear(2, 2) end, function(m) return m.weight end) }
row { name = "call a trivial module", unit = "us", scale = 1e6, budget = under(0.1e-6, "0.1 us"), torch = "trivial",
  make = turns(Trivial, function(m, x) return m(x) end) }
-- One trace holds 64 KB of machine code, about 50 of these; in a deeper stack what calls them is interpreted.
row { name = "Sequential of 40 trivial modules, each", unit = "us", scale = 1e6 / 40, budget = under(4e-6, "0.1 us each"), torch = "stack",
  make = turns(function() return nn.Sequential(list_of(Trivial, 40)) end, function(m, x) return m(x) end) }
-- Of one class: a trace nests no more than two calls of a function with varargs, so these are interpreted.
row { name = "100 trivial modules nested, each", unit = "us", scale = 1e4, budget = under(30e-6, "0.3 us each"), torch = "nest",
  make = turns(function() return Nested(100) end, function(m, x) return m(x) end) }

---f(n) that trains n steps.
local function trainer(model, opt, loss_of)
  return function(n)
    for _ = 1, n do
      opt:zero_grad()
      loss_of(model):backward()
      opt:step()
    end
  end
end

local function mlp(...)
  local sizes, layers = { ... }, {}
  for i = 1, #sizes - 1 do
    layers[#layers + 1] = nn.Linear(sizes[i], sizes[i + 1])
    if i < #sizes - 1 then layers[#layers + 1] = nn.ReLU() end
  end
  return nn.Sequential(layers)
end

local function classes(n, k) return tm.randint(1, k + 1, { n }) end

row { name = "MLP 784-64-10, batch 64, SGD, 1 thread", unit = "k samples/s", rate = 64e-3, threads = 1,
  budget = function(t) return 64 / t > 100e3, "over 100 k" end, torch = "mlp_small", make = function()
  local m, x, y = mlp(784, 64, 10), tm.randn(64, 784), classes(64, 10)
  return trainer(m, optim.SGD(m:parameters(), { lr = 0.01 }), function(net) return F.cross_entropy(net(x), y) end)
end }
row { name = "MLP 8-32-32-1, batch 16, Adam", unit = "us", scale = 1e6, budget = under(100e-6, "100 us"), torch = "mlp_tiny",
  make = function()
  local m, x, y = mlp(8, 32, 32, 1), tm.randn(16, 8), tm.randn(16, 1)
  return trainer(m, optim.Adam(m:parameters(), { lr = 1e-3 }), function(net) return F.mse_loss(net(x), y) end)
end }

---The matrix products of a training step of 784-256-128-10 at batch 128, alone.
local function products()
  local sizes, b = { 784, 256, 128, 10 }, 128
  local list = {}
  for i = 1, 3 do
    local nin, nout = sizes[i], sizes[i + 1]
    local x, w, dy = tm.randn(b, nin), tm.randn(nout, nin), tm.randn(b, nout)
    list[#list + 1] = { x, w:t() }
    list[#list + 1] = { dy:t(), x }
    if i > 1 then list[#list + 1] = { dy, w } end
  end
  return function(n)
    for _ = 1, n do for i = 1, #list do local _ = list[i][1]:matmul(list[i][2]) end end
  end
end
local products_time
row { name = "  its matrix products alone", unit = "us", scale = 1e6, torch = "products", make = products,
  after = function(t) products_time = t end }
row { name = "MLP 784-256-128-10, batch 128, SGD", unit = "us", scale = 1e6, torch = "mlp_large",
  budget = function(t)
    return products_time and t < 1.25 * products_time, ("%.2f of the products, budget 1.25"):format(t / (products_time or t))
  end,
  make = function()
  local m, x, y = mlp(784, 256, 128, 10), tm.randn(128, 784), classes(128, 10)
  return trainer(m, optim.SGD(m:parameters(), { lr = 0.01 }), function(net) return F.cross_entropy(net(x), y) end)
end }

local N = 16 * 1024 * 1024
local stream_time
---Three streams of 64 MB, two read and one written, as an addition has them: what memory allows.
row { name = "  copying 192 MB / 2 (memory bandwidth)", unit = "ms", scale = 1e3, make = function()
  local from, to = tm.ones(N + N / 2), tm.ones(N + N / 2)
  return function(n) for _ = 1, n do to:copy_(from) end end
end, after = function(t) stream_time = t end }
local function elementwise(name, torch, f, factor)
  row { name = name, unit = "ms", scale = 1e3, torch = torch, make = function() return f end,
    budget = function(t)
      local memory = stream_time and stream_time * factor or t
      return t < 1.3 * memory, ("%.2f of memory bandwidth, budget 1.3"):format(t / memory)
    end }
end
local big
local function operands()
  big = big or { tm.randn(N), tm.randn(N), tm.empty(N) }
  return unpack(big)
end
elementwise("add, 16 M float32", "add_big", function(n)
  local a, b = operands()
  for _ = 1, n do local c = a + b; c:release() end
end, 1)
elementwise("relu, 16 M float32", "relu_big", function(n)
  local a = operands()
  for _ = 1, n do local c = a:relu(); c:release() end
end, 2 / 3)
row { name = "sum, 16 M float32", unit = "ms", scale = 1e3, torch = "sum_big", make = function()
  local a = operands()
  return function(n) for _ = 1, n do local _ = a:sum() end end
end }
row { name = "exp, 16 M float32", unit = "ms", scale = 1e3, torch = "exp_big", make = function()
  local a = operands()
  return function(n) for _ = 1, n do local c = a:exp(); c:release() end end
end }

-- conversions and loads: a copy of as many bytes, on all threads, takes turns with each ---------------------------------

local function big_model()
  return nn.Sequential(list_of(function() return nn.Linear(1024, 1024) end, 16)) -- 64 MB
end

---f(n) that copies `bytes` bytes in `times` calls: as many as what stands beside it has, since threads wait for each
---other in each, which takes time where others use the machine.
local function copying(bytes, times)
  return function()
    local from = list_of(function() return tm.ones(math.floor(bytes / times / 4)) end, times)
    local to = list_of(function() return tm.ones(math.floor(bytes / times / 4)) end, times)
    return function(n)
      for _ = 1, n do for i = 1, times do to[i]:copy_(from[i]) end end
    end
  end
end

local function of_copy(t, _, copy) return t < 1.3 * copy, ("%.2f of a copy, budget 1.3"):format(t / copy) end

local MODEL_BYTES = 16 * 4 * 1024 * 1025
for _, mode in ipairs { "default", "swap" } do
  row { name = "convert: 64 MB to bfloat16, back, " .. mode, unit = "ms", scale = 1e3,
    torch = mode == "default" and "convert" or "convert_swap", least = true,
    beside = copying(MODEL_BYTES * 1.5, 2), budget = of_copy, make = function()
    local model = big_model()
    return function(n)
      tm.future.with({ swap = mode == "swap" }, function()
        for _ = 1, n do model:to "bfloat16":to "float32" end
      end)
    end
  end }
end

local function checkpoint(model)
  local path = os.tmpname()
  tm.save(model:state_dict(), path)
  return path
end

row { name = "convert: load_state_dict, 64 MB, mapped", unit = "ms", scale = 1e3, torch = "load", least = true,
  beside = copying(MODEL_BYTES, 16),
  budget = of_copy, make = function()
  local model = big_model()
  local path = checkpoint(model)
  local sd = tm.load(path)
  os.remove(path)
  return function(n) for _ = 1, n do model:load_state_dict(sd) end end
end }

-- With the file's pages not yet mapped: the faults are the system's.
row { name = "convert:   and tm.load of the file", unit = "ms", scale = 1e3, torch = "load_file", make = function()
  local model = big_model()
  local path = checkpoint(model)
  return function(n)
    for _ = 1, n do
      local sd = tm.load(path)
      model:load_state_dict(sd)
      for _, t in sd:pairs() do t:release() end
    end
  end
end }

local allocated
row { name = "convert: load_state_dict, assign, 64 MB", unit = "ms", scale = 1e3, torch = "assign", make = function()
  local model = big_model()
  local path = checkpoint(model)
  local sd = tm.load(path)
  os.remove(path)
  return function(n)
    local before = tm.memory_stats()
    for _ = 1, n do model:load_state_dict(sd, { assign = true }) end
    allocated = tm.memory_stats().allocations - before.allocations
  end
end, budget = function() return allocated == 0, ("%d blocks allocated, budget 0"):format(allocated) end }

-- 10,000 parameters of four elements: what a conversion costs beside the bytes.
local Tiny = nn.Module:extend "Tiny"
function Tiny:init() for i = 1, 100 do self["p" .. i] = nn.Parameter(tm.randn(4)) end end
local function tiny_model() return nn.ModuleList(list_of(Tiny, 100)) end

for _, mode in ipairs { "default", "overwrite", "swap" } do
  row { name = "convert: 10,000 parameters, each, " .. mode, unit = "us", scale = 1e6 / 2e4, torch = "tiny_" .. mode, least = true,
    budget = under(2e4 * 1e-6, "1 us each"), make = function()
    local model = tiny_model()
    return function(n)
      tm.future.with({ swap = mode == "swap", overwrite = mode == "overwrite" }, function()
        for _ = 1, n do model:to "bfloat16":to "float32" end
      end)
    end
  end }
end
row { name = "convert: 10,000 parameters, load, each", unit = "us", scale = 1e6 / 1e4, torch = "tiny_load", least = true, make = function()
  local model = tiny_model()
  local sd = tiny_model():state_dict()
  return function(n) for _ = 1, n do model:load_state_dict(sd) end end
end }

-- PyTorch, in a process of its own that takes turns with us -----------------------------------------------------------------

local here = arg[0]:match "^(.*/)" or ""

local function start_torch()
  local python
  for _, name in ipairs { os.getenv "PYTHON" or "python3", "/usr/bin/python3" } do
    if os.execute(name .. " -c 'import torch' 2>/dev/null") == 0 then python = name break end
  end
  if not python then return nil end
  local pipe = os.tmpname()
  os.remove(pipe)
  assert(os.execute("mkfifo " .. pipe) == 0)
  local out = io.popen(python .. " -u " .. here .. "bench_torch.py <" .. pipe, "r")
  local into = assert(io.open(pipe, "w"))
  os.remove(pipe)
  local peer = { version = out:read "*l", python = python }
  ---Sends one line and reads one.
  function peer.ask(...)
    into:write(table.concat({ ... }, " "), "\n")
    into:flush()
    return out:read "*l"
  end
  function peer.stop()
    into:close()
    out:close()
  end
  return peer
end

-- running -----------------------------------------------------------------------------------------------------------------------

local function chosen(name)
  if #arg == 0 then return true end
  for _, word in ipairs(arg) do
    if name:lower():find(word:lower(), 1, true) then return true end
  end
  return false
end

local function measure(r, torch)
  local threads = tm.get_num_threads()
  if r.threads then tm.set_num_threads(r.threads) end
  local f = r.make()
  f(1)
  local other = r.beside and r.beside()
  local rounds, target, typical = ROUNDS, r.torch == "start" and 0.1 or 0.3, median
  if r.least then rounds, target, typical = 15, 0.06, least end
  local n, m = calibrate(f, target), other and calibrate(other, target)
  local mine, theirs, others = {}, {}, {}
  local beside = torch and r.torch
  if beside then beside = torch.ask("prepare", r.torch, r.threads or threads) == "ready" end
  for i = 1, rounds do
    collectgarbage()
    mine[i] = timed(f, n)
    if other then others[i] = timed(other, m) end
    if beside then theirs[i] = tonumber(torch.ask "run") end
  end
  tm.set_num_threads(threads)
  return typical(mine), beside and typical(theirs) or nil, other and typical(others)
end

local function figure(r, t)
  if r.rate then return ("%9.1f"):format(r.rate / t) end
  return ("%9.3f"):format(t * r.scale)
end

local torch = start_torch()
print(("tmod %s, %s, %d threads, %s"):format(tm.version, jit.version, tm.get_num_threads(), tm.doctor().capability))
print(torch and "beside PyTorch " .. torch.version .. " (" .. torch.python .. ")" or "no python3 with torch: tmod's figures alone")
print(("%-42s %-12s %9s %9s %8s  %s"):format("", "", "tmod", "PyTorch", "ratio", "budget"))
local missed = 0
for _, r in ipairs(rows) do
  if chosen(r.name) or r.after and #arg > 0 then
    local t, theirs, other = measure(r, torch)
    if r.after then r.after(t) end
    local text = ""
    if r.budget then
      local met
      met, text = r.budget(t, theirs, other)
      text = text .. (met and ": met" or ": MISSED")
      if not met then missed = missed + 1 end
    end
    print(("%-42s %-12s %s %s %s  %s"):format(r.name, r.unit, figure(r, t), theirs and figure(r, theirs) or "        -",
      theirs and ("%7.1fx"):format(theirs / t) or "       -", text))
    io.stdout:flush()
  end
end
if torch then torch.stop() end
print(missed == 0 and "every budget is met" or missed .. " budgets are missed")
