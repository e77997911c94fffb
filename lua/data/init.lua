---data: datasets, batches, and readers of files.

local dataset = require "tmod.data.dataset"

local data = {
  Dataset = dataset.Dataset, TensorDataset = dataset.TensorDataset, Subset = dataset.Subset, random_split = dataset.random_split,
  DataLoader = require "tmod.data.loader",
}

return setmetatable(data, { __index = function(t, name)
  local v = require "tmod.data.readers"[name]
  if v ~= nil then rawset(t, name, v) end
  return v
end })
