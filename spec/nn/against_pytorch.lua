---Cases of spec/golden/layers.lua: a layer with PyTorch's state gives its values, gradients and state afterwards.
local assert = require "luassert"
local tm = require "tmod"
local golden = require "spec.golden.layers"

local nn, FLOAT64 = tm.nn, { dtype = "float64" }

local function make(text) return setfenv(loadstring("return " .. text), { nn = nn, tm = tm, math = math })():double() end
local function seeds(y) return tm.linspace(0.5, 1.5, y:numel(), FLOAT64):view(y:size()) end

local function sorted(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys)
  return keys
end

local function check(case)
  local m, state = make(case.lua), {}
  for k, v in pairs(case.before) do state[k] = tm.tensor(v, FLOAT64):view(m:state_dict()[k]:size()) end
  m:load_state_dict(state)
  m:train(case.training)
  local x = tm.tensor(case.x, FLOAT64)
  if case.dx then x:requires_grad_() else x = x:to "int64" end
  local y = m(x)
  assert.near_tensor(case.y, y:detach(), 1e-12) -- float64, sums of up to 20 terms
  y:backward(seeds(y))
  if case.dx then assert.near_tensor(case.dx, x.grad, 1e-11) end
  local sd = m:state_dict()
  assert.same(sorted(case.after), sorted(state))
  for k, v in pairs(case.after) do assert.near_tensor(v, sd[k], 1e-12) end
  for k, v in pairs(case.grads) do assert.near_tensor(v, m:get_parameter(k).grad, 1e-11) end
end

---An it() for each case of these classes; busted gives `it` to spec files only.
return function(it, ...)
  local n = 0
  for i, case in ipairs(golden.layers) do
    for _, name in ipairs { ... } do
      if case.lua:find("nn." .. name, 1, true) then
        n = n + 1
        it(("%s gives PyTorch's values, gradients and state (%d)"):format(case.lua, i), function() check(case) end)
      end
    end
  end
  if n == 0 then error "no such case" end
end
