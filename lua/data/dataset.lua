---dataset.lua: samples by position, from 1.

local B = require "tmod.ffi"
local Tensor = require "tmod.tensor"
local ops = require "tmod.ops"

---A dataset answers len() and get(i), which returns the values of sample i. One that can make a whole batch at once
---also answers batch(index), index an int64 tensor of positions.
---@class Dataset
local Dataset = { __name = "data.Dataset" }
Dataset.__index = Dataset

local function construct(class, ...)
  local self = setmetatable({}, class)
  self:init(...)
  return self
end

---A class of datasets: Class(...) runs Class.init(self, ...).
function Dataset:extend(name)
  local class = { __name = name }
  class.__index = class
  return setmetatable(class, { __index = self, __call = construct, __name = "class" })
end

function Dataset:init() end
function Dataset:len() B.fail("NotImplementedError", "%s has no len", self.__name) end
function Dataset:get() B.fail("NotImplementedError", "%s has no get", self.__name) end

local function check_position(self, i)
  if type(i) ~= "number" or i < 1 or i > self:len() or i ~= math.floor(i) then
    B.fail("IndexError", "%s: no sample %s: it has %d, counted from 1", self.__name, tostring(i), self:len())
  end
end

-- tensors ----------------------------------------------------------------------------------------------------------------

---Rows of tensors: sample i is (x[i], y[i], ...).
---@class TensorDataset : Dataset
local TensorDataset = Dataset:extend "data.TensorDataset"

---@param ... Tensor of the same first size
function TensorDataset:init(...)
  local tensors, n = { ... }, select("#", ...)
  if n == 0 then B.fail("ValueError", "data.TensorDataset: expected at least one tensor") end
  for i = 1, n do
    local t = tensors[i]
    if not B.is_tensor(t) then B.fail("TypeError", "data.TensorDataset: argument %d must be a tensor, got %s", i, B.type_name(t)) end
    if t:len() ~= tensors[1]:len() then
      B.fail("ValueError", "data.TensorDataset: tensor %d has %d rows, expected %d as in the first", i, t:len(), tensors[1]:len())
    end
  end
  self.tensors = tensors
end

function TensorDataset:len() return self.tensors[1]:len() end

function TensorDataset:get(i)
  check_position(self, i)
  local values = {}
  for k, t in ipairs(self.tensors) do values[k] = ops.select(t, 1, i) end
  return unpack(values)
end

function TensorDataset:batch(index)
  local values = {}
  for k, t in ipairs(self.tensors) do values[k] = ops.index_select(t, 1, index) end
  return unpack(values)
end

-- parts --------------------------------------------------------------------------------------------------------------------

---Some samples of a dataset.
---@class Subset : Dataset
local Subset = Dataset:extend "data.Subset"

---@param dataset Dataset
---@param positions integer[] | Tensor
function Subset:init(dataset, positions)
  if not B.is_tensor(positions) then positions = Tensor.from_table(positions, { dtype = "int64" }) end
  self.dataset, self.positions = dataset, positions
  if dataset.batch then
    function self:batch(index) return self.dataset:batch(ops.index_select(self.positions, 1, index)) end
  end
end

function Subset:len() return self.positions:len() end

function Subset:get(i)
  check_position(self, i)
  return self.dataset:get(self.positions[i]:item())
end

---Splits a dataset by chance into parts of these sizes; the same seed gives the same parts.
---@param dataset Dataset
---@param sizes number[] adding up to the dataset's length, or fractions adding up to 1
---@param opts {seed: integer}
---@return Subset ...
local function random_split(dataset, sizes, opts)
  opts = require "tmod.functional".options(opts, "random_split", { seed = true })
  local n, sum, counts = dataset:len(), 0, {}
  for i, size in ipairs(sizes) do
    if type(size) ~= "number" or size < 0 then
      B.fail("ValueError", "random_split: size %d is %s, expected a number from 0 on", i, tostring(size))
    end
    sum, counts[i] = sum + size, size
  end
  if math.abs(sum - 1) < 1e-6 and n > 1 then -- what is left by rounding down goes to the first parts, one each
    local left = n
    for i, size in ipairs(sizes) do
      counts[i] = math.floor(size * n + 1e-9)
      left = left - counts[i]
    end
    for i = 1, left do counts[(i - 1) % #counts + 1] = counts[(i - 1) % #counts + 1] + 1 end
  elseif sum ~= n then
    B.fail("ValueError", "random_split: sizes add up to %g, expected %d, the length of the dataset", sum, n)
  end
  local tm = require "tmod"
  local generator = opts.seed and tm.Generator(0):manual_seed(opts.seed)
  local order, parts, first = Tensor.randperm(n, { generator = generator }), {}, 1
  for i, count in ipairs(counts) do
    parts[i] = Subset(dataset, order:narrow(1, first, count):clone())
    first = first + count
  end
  return unpack(parts)
end

return { Dataset = Dataset, TensorDataset = TensorDataset, Subset = Subset, random_split = random_split }
