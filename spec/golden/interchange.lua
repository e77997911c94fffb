---interchange.lua: the models that state dictionaries are exchanged for with PyTorch; interchange.py has the same.
---`tmodrun spec/golden/interchange.lua DIRECTORY` writes files for check_interchange.py.

local tm = require "tmod"
local nn = tm.nn

local models = {}

local Net = nn.Module:extend "Net"

function Net:init()
  self.fc1 = nn.Linear(5, 7)
  local tail = nn.Sequential { { "act", nn.ReLU() }, { "out", nn.Linear(4, 3) } }
  self.body = nn.Sequential(nn.Tanh(), nn.Linear(7, 4, { bias = false }), tail)
end

function Net:forward(x) return self.body(self.fc1(x)) end

models.mlp = Net

local Tied = nn.Module:extend "Tied"

function Tied:init()
  self.encoder = nn.Linear(4, 4)
  self.decoder = nn.Linear(4, 4)
  self.decoder.weight = self.encoder.weight
  self:register_buffer("scale", tm.ones {})
  self:register_buffer("temporary", tm.ones(2), false)
  self:double()
end

function Tied:forward(x) return self.decoder(self.encoder(x):sigmoid()) * self.scale end

models.tied = Tied

local Norms = nn.Module:extend "Norms"

function Norms:init()
  self.embed = nn.Embedding(11, 6)
  self.ln = nn.LayerNorm(6)
  self.bn = nn.BatchNorm1d(6)
  self.head = nn.Linear(6, 2)
end

---@param ids Tensor (B, T), counted from 1
function Norms:forward(ids)
  local x = self.ln(self.embed(ids)):mean(2) -- (B, 6)
  return self.head(self.bn(x))
end

models.norms = Norms

local directory = arg and arg[0] and arg[0]:find "interchange%.lua$" and arg[1]
if directory then
  tm.manual_seed(5)
  local io = {}
  local inputs = { mlp = tm.randn(8, 5), tied = tm.randn(8, 4, { dtype = "float64" }), norms = tm.randint(1, 12, { 8, 3 }) }
  for _, name in ipairs { "mlp", "tied", "norms" } do
    local m, x = models[name](), inputs[name]
    m(x) -- running statistics
    m:eval()
    io[name .. ".x"] = name == "norms" and x - 1 or x
    io[name .. ".y"] = m(x):detach()
    tm.save(m:state_dict(), directory .. "/" .. name .. ".safetensors")
  end
  tm.save(io, directory .. "/io.safetensors")
end

return models
