---nn: modules, their parameters, and functions on tensors. A layer's file is loaded when the layer is first asked for.

local copy = require "tmod.nn.copy"
local parameter = require "tmod.nn.parameter"
local ties = require "tmod.nn.ties"
local tuple = require "tmod.nn.args"

local FILE = {
  Linear = "linear", Dropout = "dropout", Flatten = "flatten", Embedding = "embedding", utils = "utils", parametrize = "parametrize",
  skip_init = "skip_init", consume_prefix_in_state_dict_if_present = "consume_prefix",
}
for file, names in pairs {
  container = "Sequential ModuleList ModuleDict ParameterList ParameterDict",
  activation = "Threshold ReLU RReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU GLU GELU Hardshrink "
    .. "LeakyReLU LogSigmoid Softplus Softshrink PReLU Softsign Tanhshrink Softmin Softmax Softmax2d LogSoftmax Identity",
  norm = "LayerNorm BatchNorm1d",
  loss = "CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss BCEWithLogitsLoss KLDivLoss",
} do
  for name in names:gmatch "%S+" do FILE[name] = file end
end

local nn = {
  Module = require "tmod.nn.module",
  Parameter = parameter.Parameter, Buffer = parameter.Buffer,
  is_parameter = parameter.is_parameter, is_buffer = parameter.is_buffer,
  None = parameter.None,
  tied_groups = ties.tied_groups, retie = ties.retie,
  args = tuple.args, kw = tuple.kw, is_args = tuple.is_args, is_kw = tuple.is_kw,
  deepcopy = copy.deepcopy, copy = copy.copy,
  functional = require "tmod.functional",
  init = require "tmod.nn.initializers",
}

-- nn.register_module_forward_hook and the like: hooks for every module
for name, fn in pairs(require "tmod.nn.hooks".functions) do nn[name] = fn end

return setmetatable(nn, { __index = function(t, name)
  local file = FILE[name]
  if not file then return nil end
  local class = require("tmod.nn." .. file)
  if class.__name ~= "nn." .. name then class = class[name] end -- a file of several classes
  rawset(t, name, class)
  return class
end })
