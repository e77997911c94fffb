---optim: optimizers. optim.SGD(model:parameters(), {lr = 0.1}).

local adam = require "tmod.optim.adam"

return {
  Optimizer = require "tmod.optim.optimizer",
  SGD = require "tmod.optim.sgd",
  Adagrad = require "tmod.optim.adagrad",
  Adam = adam.Adam, AdamW = adam.AdamW,
}
