---State dictionaries that PyTorch wrote (spec/golden/make_interchange.py). check_interchange.py, beside it, checks the
---opposite direction.
local H = require "spec.helper"
local tm = require "tmod"

local models = require "spec.golden.interchange"

local function golden(name) return assert(tm.load(H.root .. "/spec/golden/interchange_" .. name .. ".safetensors")) end

local io = golden "io"

describe("a state dictionary of PyTorch", function()
  it("gives the same outputs in the same architecture", function()
    local m = models.mlp()
    m:load_state_dict(golden "mlp")
    -- float32; sums of at most seven terms, twice or thrice
    assert.near_tensor(io["mlp.y"], m(io["mlp.x"]), 1e-6)
    local assigned = models.mlp()
    assigned:load_state_dict(golden "mlp", { assign = true })
    assert.near_tensor(io["mlp.y"], assigned(io["mlp.x"]), 1e-6)
  end)

  it("has the keys of the model here", function()
    local sd = golden "mlp"
    local here = models.mlp():state_dict():keys()
    table.sort(here) -- a file is sorted by dtype and name
    local there = sd:keys()
    table.sort(there)
    assert.same(here, there)
    assert.equal("body.2.out.weight", here[3])
  end)

  it("M183: may list a tied weight once, which is then missing under its other name and yet loaded", function()
    local m, sd = models.tied(), golden "tied"
    local r = m:load_state_dict(sd, { strict = false })
    assert.equal(1, #r.missing_keys)
    assert.truthy(r.missing_keys[1]:find "coder.weight$")
    assert.same({}, r.unexpected_keys)
    assert.equal(2.5, m.scale:item())
    assert.equal(m.encoder.weight, m.decoder.weight)
    assert.near_tensor(io["tied.y"], m(io["tied.x"]), 1e-14) -- float64
  end)

  it("carries embeddings, normalisation and running statistics", function()
    local m = models.norms()
    m:load_state_dict(golden "norms")
    local ids = io["norms.x"] + 1
    m:eval()
    assert.near_tensor(io["norms.y"], m(ids), 1e-6) -- float32; means over six elements
    assert.equal(3, m.bn.num_batches_tracked:item())
    m:train()
    -- One feature hardly varies within the batch, so dividing by its deviation magnifies rounding: both float32 results
    -- are 9e-6 away from that in float64.
    assert.near_tensor(io["norms.y_train"], m(ids), 1e-4)
    for _, name in ipairs { "running_mean", "running_var", "num_batches_tracked" } do
      assert.near_tensor(io["norms.bn." .. name], m.bn[name], 1e-5)
    end
  end)
end)
