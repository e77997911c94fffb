---nn: modules, their parameters, and functions on tensors. A layer's file is loaded when the layer is first asked for.

local parameter = require "tmod.nn.parameter"

local FILE = {
  Linear = "linear", Dropout = "dropout", Flatten = "flatten", Sequential = "container",
  ReLU = "activation", Tanh = "activation", Sigmoid = "activation", Softmax = "activation", LogSoftmax = "activation",
  Identity = "activation",
  CrossEntropyLoss = "loss", NLLLoss = "loss", MSELoss = "loss",
}

local nn = {
  Module = require "tmod.nn.module",
  Parameter = parameter.Parameter, Buffer = parameter.Buffer,
  is_parameter = parameter.is_parameter, is_buffer = parameter.is_buffer,
  None = parameter.None,
  functional = require "tmod.functional",
  init = require "tmod.nn.initializers",
}

return setmetatable(nn, { __index = function(t, name)
  local file = FILE[name]
  if not file then return nil end
  local class = require("tmod.nn." .. file)
  if class.__name ~= "nn." .. name then class = class[name] end -- a file of several classes
  rawset(t, name, class)
  return class
end })
