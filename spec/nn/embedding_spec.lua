---lua/nn/embedding.lua against PyTorch (spec/golden/layers.lua); ids count from 1.
local H = require "spec.helper"
local tm = require "tmod"
local against_pytorch = require "spec.nn.against_pytorch"

local nn, F = tm.nn, tm.nn.functional

local function ids(t) return tm.tensor(t, { dtype = "int64" }) end

describe("nn.Embedding", function()
  against_pytorch(it, "Embedding")

  it("takes ids from 1 in any shape, int64 or int32", function()
    local m = nn.Embedding(4, 2)
    local w = m.weight:detach()
    assert.near_tensor(w[3], m(ids(3)):detach(), 0)
    assert.near_tensor(w[4], m(ids { { 1, 2 }, { 4, 4 } }):detach()[{ 2, 1 }], 0)
    assert.same({ 2, 2, 2 }, m(ids { { 1, 2 }, { 4, 4 } }):size())
    assert.same({ 0, 2 }, m(tm.empty({ 0 }, { dtype = "int64" })):size())
    assert.near_tensor(w[2], m(ids { 2 }:to "int32"):detach()[1], 0)
    for _, bad in ipairs { 0, -1, 5 } do
      H.raises(function() m(ids { bad }) end, "IndexError", tostring(bad))
      H.raises(function() nn.Embedding(4, 2, { padding_idx = 1 })(ids { bad }) end, "IndexError", tostring(bad))
    end
    H.raises(function() m(tm.ones(2)) end, "IndexError", "float32")
    H.raises(function() F.embedding(ids { 1 }, tm.ones(2)) end, "RuntimeError", "weight has 1 dims, expected 2")
  end)

  it("adds up the gradient of an id that comes often", function()
    local m = nn.Embedding(3, 2)
    m(ids { 2, 2, 1, 2 }):sum():backward()
    assert.near_tensor({ { 1, 1 }, { 3, 3 }, { 0, 0 } }, m.weight.grad)
  end)

  it("keeps the padding row as it is, even if its incoming gradient is infinite", function()
    local m = nn.Embedding(3, 2, { padding_idx = -1 })
    assert.equal(3, m.padding_idx)
    assert.near_tensor({ 0, 0 }, m.weight:detach()[3], 0)
    assert.is_true(m.weight:detach():abs():amin(2)[1]:item() > 0)
    m(ids { 3, 1 }):backward(tm.tensor { { 1 / 0, 1 }, { 1, 1 } })
    assert.near_tensor({ { 1, 1 }, { 0, 0 }, { 0, 0 } }, m.weight.grad)
    m:reset_parameters()
    assert.near_tensor({ 0, 0 }, m.weight:detach()[3], 0)
    for _, bad in ipairs { 0, 4, -4, 1.5 } do
      H.raises(function() nn.Embedding(3, 2, { padding_idx = bad }) end, "ValueError", "padding_idx is .* expected 1 to 3")
    end
  end)

  it("scales rows down to max_norm in place, only those in use and above it", function()
    local m = nn.Embedding(3, 2, { max_norm = 5 })
    tm.no_grad(function() m.weight:copy_(tm.tensor { { 6, 8 }, { 30, 40 }, { 3, 4 } }) end)
    local y = m(ids { 1, 3, 1 })
    assert.near_tensor({ { 3, 4 }, { 3, 4 }, { 3, 4 } }, y:detach(), 1e-6)
    assert.near_tensor({ { 3, 4 }, { 30, 40 }, { 3, 4 } }, m.weight:detach(), 1e-6)
    y:sum():backward()
    assert.near_tensor({ { 2, 2 }, { 0, 0 }, { 1, 1 } }, m.weight.grad)
  end)

  it("differentiates twice", function()
    local w = tm.randn(3, 2, { dtype = "float64" }):requires_grad_()
    for _, opts in ipairs { {}, { padding_idx = 1 }, { scale_grad_by_freq = true } } do
      local dw = tm.autograd.grad((F.embedding(ids { 2, 1, 2 }, w, opts) ^ 2):sum(), w, { create_graph = true })
      local ddw = tm.autograd.grad(dw:sum(), w)
      assert.same(w:size(), ddw:size())
    end
  end)

  it("is made of a table that is there, frozen or not", function()
    local w = tm.randn(4, 3)
    local m = nn.Embedding:from_pretrained(w)
    assert.is_false(m.weight.requires_grad)
    assert.equal(w:storage_id(), m.weight:storage_id())
    assert.equal("Embedding(4, 3)", tostring(m))
    local free = nn.Embedding:from_pretrained(w, { freeze = false, padding_idx = 2 })
    assert.is_true(free.weight.requires_grad)
    assert.equal(2, free.padding_idx)
    assert.near_tensor(w, free.weight:detach(), 0) -- also the padding row
    H.raises(function() nn.Embedding:from_pretrained(tm.ones(3)) end, "ValueError", "2 dims")
  end)

  it("checks its arguments and prints as PyTorch has it", function()
    H.raises(function() nn.Embedding(-1, 2) end, "ValueError", "num_embeddings")
    H.raises(function() nn.Embedding(1, "2") end, "TypeError", "embedding_dim")
    H.raises(function() nn.Embedding(1, 2, { sparse = true }) end, "TypeError", "unknown option sparse")
    assert.equal("Embedding(3, 4)", tostring(nn.Embedding(3, 4)))
    assert.equal("Embedding(3, 4, padding_idx=2, max_norm=1.5, norm_type=1, scale_grad_by_freq=true)",
      tostring(nn.Embedding(3, 4, { padding_idx = 2, max_norm = 1.5, norm_type = 1, scale_grad_by_freq = true })))
  end)
end)
