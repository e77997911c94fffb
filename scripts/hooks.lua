-- Looks into a network while it trains: hooks on every Linear collect its activations and gradients for one step, which
-- are printed as statistics per layer; then the hooks are removed.
local argparse = require "argparse"
local tm = require "tmod"
local nn, F = tm.nn, tm.nn.functional

local parser = argparse("hooks.lua", "Statistics of activations and gradients by hooks.")
parser:option("--seed", "of the weights and the data", "1"):convert(tonumber)
parser:option("--steps", "of training before the look", "20"):convert(tonumber)
local args = parser:parse()
tm.manual_seed(args.seed)

local Net = nn.Module:extend "Net"

function Net:init(width)
  self.embed = nn.Linear(8, width)
  self.blocks = nn.Sequential(
    nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)),
    nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)))
  self.head = nn.Linear(width, 1)
end

function Net:forward(x)
  local h = self.embed(x)
  for _, block in self.blocks:ipairs() do h = h + block(h) end
  return self.head(F.relu(h))
end

local model = Net(16)
local optimizer = tm.optim.AdamW(model:parameters(), { lr = 1e-2 })
local x = tm.randn(256, 8)                                       -- (256, 8)
local y = (x:narrow(2, 1, 1) * x:narrow(2, 2, 1)):tanh()         -- (256, 1): a product of two of the inputs

local function step()
  optimizer:zero_grad()
  local loss = F.mse_loss(model(x), y)
  loss:backward()
  optimizer:step()
  return loss:item()
end

for _ = 1, args.steps do step() end

-- The inputs of the first layer need no gradient, so the gradients are taken where results meet them: from grad_output.
local activations, gradients, handles, order = {}, {}, {}, {}
for name, module in model:named_modules() do
  if module:isinstance(nn.Linear) then
    order[#order + 1] = name
    handles[#handles + 1] = module:register_forward_hook(function(_, _, output) activations[name] = output:detach() end)
    handles[#handles + 1] = module:register_full_backward_pre_hook(function(_, grad_output) gradients[name] = grad_output[1] end)
  end
end

local loss = step()

local function statistics(t) return t:mean():item(), t:std():item(), t:abs():max():item() end

local row = "%-12s %10.4f %9.4f %9.4f   %12.3e %10.3e %10.3e"
print(("step %d, loss %.5f\n"):format(args.steps + 1, loss))
print(("%-12s %10s %9s %9s   %12s %10s %10s"):format("Linear", "out mean", "std", "max |.|", "grad mean", "std", "max |.|"))
for _, name in ipairs(order) do
  local m, s, a = statistics(activations[name])
  print(row:format(name, m, s, a, statistics(gradients[name])))
end

for _, handle in ipairs(handles) do handle:remove() end
activations, gradients = {}, {}
step()
local left = 0
for _ in pairs(activations) do left = left + 1 end
for _ in pairs(gradients) do left = left + 1 end
print("\nhooks left: " .. left)
