-- Trains a small network on Fashion-MNIST: 60,000 pictures of clothes for training, 10,000 for test, 10 classes.
local argparse = require "argparse"
local tm = require "tmod"
local nn, data = tm.nn, tm.data

local parser = argparse("train_fashion.lua", "Train a small network on Fashion-MNIST.")
parser:option("--data", "folder of the four IDX files", "/usr/share/datasets/fashion-mnist")
parser:option("--epochs", "passes over the training set", "10"):convert(tonumber)
parser:option("--seed", "of the weights and the order of the batches", "1"):convert(tonumber)
parser:option("--lr", "learning rate at the start", "0.002"):convert(tonumber)
parser:option("--batch", "samples in a batch", "128"):convert(tonumber)
parser:option("--out", "file for the trained weights", "fashion.safetensors")
parser:flag("--quiet", "print the result only")
local args = parser:parse()

local function read(name)
  local path = args.data .. "/" .. name
  local x, message = data.idx(path .. ".gz")
  if not x then x = data.idx(path) end
  if x then return x end
  io.stderr:write(message, "\n",
    "Fashion-MNIST is not there. Debian and Ubuntu: apt-get install dataset-fashion-mnist\n",
    "Elsewhere: the four files of https://github.com/zalandoresearch/fashion-mnist in a folder, and --data FOLDER\n")
  os.exit(1)
end

local function dataset(part)
  local pictures = read(part .. "-images-idx3-ubyte"):flatten(2)      -- (n, 784) uint8
  local labels = read(part .. "-labels-idx1-ubyte"):long() + 1        -- (n): classes count from 1
  return data.TensorDataset(pictures, labels)
end

local train, test = dataset "train", dataset "t10k"
local loader = data.DataLoader(train, { batch_size = args.batch, shuffle = true, seed = args.seed, drop_last = true })
local test_loader = data.DataLoader(test, { batch_size = 1000 })

-- Bytes become numbers batch by batch: the data stays four times as small.
local function scaled(x) return (x:float() - 73) / 90 end -- mean and standard deviation of the pixels

tm.manual_seed(args.seed)
local model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
local criterion = nn.CrossEntropyLoss()
local optimizer = tm.optim.AdamW(model:parameters(), { lr = args.lr })

local function evaluate()
  local right = 0
  for x, y in test_loader:batches() do right = right + model(scaled(x)):argmax(-1):eq(y):sum():item() end
  return right / test:len()
end

local function accuracy()
  model:eval()
  local share = tm.no_grad(evaluate)
  model:train()
  return share
end

local steps, step = args.epochs * loader:len(), 0
for epoch = 1, args.epochs do
  local sum, right, seen, shown = 0, 0, 0, os.time()
  for x, y in loader:batches() do
    -- The rate falls along half a cosine, so that the last epochs only refine.
    optimizer.param_groups[1].lr = args.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
    step = step + 1
    optimizer:zero_grad()
    local logits = model(scaled(x))
    local loss = criterion(logits, y)
    loss:backward()
    optimizer:step()
    sum, right, seen = sum + loss:item(), right + logits:argmax(-1):eq(y):sum():item(), seen + y:len()
    if not args.quiet and os.time() > shown then
      shown = os.time()
      io.write(("\repoch %2d  %3d %%  loss %.4f "):format(epoch, 100 * seen / train:len(), sum * args.batch / seen))
      io.flush()
    end
  end
  if not args.quiet then
    print(("\repoch %2d  loss %.4f  training accuracy %.2f %%  test accuracy %.2f %%"):format(epoch, sum / loader:len(),
      100 * right / seen, 100 * accuracy()))
  end
end

model:eval()
tm.save(model:state_dict(), args.out)
if not args.quiet then print("weights saved to " .. args.out) end
print(("test accuracy %.2f %%"):format(100 * accuracy()))
