---loader.lua: batches of a dataset, in order or shuffled.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local ops = require "tmod.ops"
local options = require "tmod.functional".options

---@class DataLoader
local DataLoader = { __name = "data.DataLoader" }
DataLoader.__index = DataLoader

local OPTIONS = { batch_size = true, shuffle = true, seed = true, drop_last = true, collate = true }

---Values of one place of the samples as a batch: tensors are stacked, numbers and booleans become a tensor (numbers of
---the default dtype: a dataset whose samples carry classes returns them as int64 tensors), strings stay a list.
local function join(values)
  local kind = B.is_tensor(values[1]) and "tensor" or type(values[1])
  if kind == "tensor" then return ops.stack(values, 1) end
  if kind == "number" or kind == "boolean" then return Tensor.from_table(values) end
  if kind == "string" then return values end
  B.fail("TypeError", "data.DataLoader: samples hold a %s; pass a collate function", B.type_name(values[1]))
end

---@param samples any[][] the values of each sample
local function collate_default(samples)
  local batch = {}
  for k = 1, #samples[1] do
    local values = {}
    for i, sample in ipairs(samples) do
      values[i] = sample[k]
      if values[i] == nil then B.fail("ValueError", "data.DataLoader: sample %d of a batch has no value %d", i, k) end
    end
    batch[k] = join(values)
  end
  return unpack(batch)
end

local function check_boolean(name, v)
  if v ~= nil and type(v) ~= "boolean" then B.fail("TypeError", "data.DataLoader: %s must be a boolean, got %s", name, B.type_name(v)) end
end

---@param dataset Dataset
---@param opts? {batch_size?: integer, shuffle?: boolean, seed?: integer, drop_last?: boolean, collate?: fun(samples: any[][]): any}
---  batch_size: default 1; shuffle: a new order each epoch, the same ones for the same seed (default: drawn from the
---  default generator); drop_last: leave out a last batch that is not full; collate: makes a batch of a list of samples,
---  each a list of what get(i) returned
local function construct(class, dataset, opts)
  opts = options(opts, "data.DataLoader", OPTIONS)
  if type(dataset) ~= "table" or B.is_tensor(dataset) or type(dataset.len) ~= "function" then
    B.fail("TypeError", "data.DataLoader: expected a dataset (len and get), got %s", B.type_name(dataset))
  end
  local size = opts.batch_size or 1
  if type(size) ~= "number" or size < 1 or size ~= math.floor(size) then
    B.fail("ValueError", "data.DataLoader: batch_size is %s, expected a whole number from 1 on", tostring(size))
  end
  check_boolean("shuffle", opts.shuffle)
  check_boolean("drop_last", opts.drop_last)
  if opts.collate ~= nil and type(opts.collate) ~= "function" then
    B.fail("TypeError", "data.DataLoader: collate must be a function, got %s", B.type_name(opts.collate))
  end
  local self = setmetatable({ dataset = dataset, batch_size = size, drop_last = opts.drop_last or false, collate = opts.collate }, class)
  if opts.shuffle then
    local tm = require "tmod"
    self.generator = tm.Generator(0):manual_seed(opts.seed or math.floor(tm.default_generator:uniform() * 2 ^ 53))
  end
  return self
end

---Batches of an epoch.
function DataLoader:len()
  local batches = self.dataset:len() / self.batch_size
  return self.drop_last and math.floor(batches) or math.ceil(batches)
end

local function by_sample(self, positions)
  local samples = {}
  for k, i in ipairs(positions:tolist()) do samples[k] = { self.dataset:get(i) } end
  return (self.collate or collate_default)(samples)
end

---One epoch: `for x, y in loader:batches() do`.
function DataLoader:batches()
  local n, size = self.dataset:len(), self.batch_size
  local order
  if self.generator then order = Tensor.randperm(n, { generator = self.generator })
  else order = Tensor.arange(1, n + 1, { dtype = "int64" }) end
  order = require "tmod".keep(order) -- the loop may run inside a scope of its own
  local last = self.drop_last and n - n % size or n
  local whole, first = self.dataset.batch and not self.collate, 1
  return function()
    if first > last then return nil end
    local positions = ops.narrow(order, 1, first, math.min(size, last - first + 1))
    first = first + size
    if whole then return self.dataset:batch(positions) end
    return by_sample(self, positions)
  end
end

return setmetatable(DataLoader, { __call = construct, __name = "class" })
