-- Trains a 64-128-10 network on the 1797 handwritten digits beside this file and prints its accuracy on digits that it
-- has not seen. The same options give the same figure at every run.
local argparse = require "argparse"
local tm = require "tmod"
local nn, data = tm.nn, tm.data

local here = arg[0]:match "^(.*)/[^/]*$" or "."
local parser = argparse("train_digits.lua", "Train a small network on handwritten digits.")
parser:option("--epochs", "passes over the training set", "30"):convert(tonumber)
parser:option("--seed", "of the weights and the order of the batches", "1"):convert(tonumber)
parser:option("--split-seed", "of the split into training and test set", "1"):convert(tonumber)
parser:option("--lr", "learning rate at the start", "0.01"):convert(tonumber)
parser:option("--batch", "samples in a batch", "32"):convert(tonumber)
parser:option("--out", "file for the trained weights", "digits.safetensors")
parser:flag("--quiet", "print the result only")
local args = parser:parse()

-- 64 pixels of 0 to 16 and a digit per line; classes count from 1, so the digit 0 is class 1.
local lines = assert(data.csv(here .. "/data/digits.csv.gz"))
local pixels = (lines:narrow(2, 1, 64) / 16):float()            -- (1797, 64)
local labels = (lines:select(2, 65) + 1):long()                 -- (1797)
-- Neighbouring lines are by one writer, so only a shuffled split is fair.
local train, test = data.random_split(data.TensorDataset(pixels, labels), { 1437, 360 }, { seed = args.split_seed })
local loader = data.DataLoader(train, { batch_size = args.batch, shuffle = true, seed = args.seed })

tm.manual_seed(args.seed)
local model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
local criterion = nn.CrossEntropyLoss { label_smoothing = 0.1 }
local optimizer = tm.optim.AdamW(model:parameters(), { lr = args.lr })

local function accuracy(set)
  model:eval()
  local x, y = set:batch(tm.arange(1, set:len() + 1, { dtype = "int64" }))
  local right = tm.no_grad(model, x):argmax(-1):eq(y):sum():item()
  model:train()
  return right / set:len()
end

local start = os.clock()
for epoch = 1, args.epochs do
  -- The rate falls along half a cosine, so that the last epochs only refine.
  optimizer.param_groups[1].lr = args.lr * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / args.epochs))
  local sum = 0
  for x, y in loader:batches() do
    optimizer:zero_grad()
    local loss = criterion(model(x), y)
    loss:backward()
    optimizer:step()
    sum = sum + loss:item()
  end
  if not args.quiet then
    print(("epoch %2d  loss %.4f  training accuracy %.2f %%"):format(epoch, sum / loader:len(), 100 * accuracy(train)))
  end
end
if not args.quiet then print(("trained for %.1f s of processor time"):format(os.clock() - start)) end

model:eval()
tm.save(model:state_dict(), args.out)
if not args.quiet then print("weights saved to " .. args.out) end
print(("test accuracy %.2f %%"):format(100 * accuracy(test)))
