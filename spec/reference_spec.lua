local tm = require "tmod"
local reference = require "tmod.reference"

describe("reference", function()
  it("has a line for every row of the operator table", function()
    local text = reference.markdown()
    for _, name in ipairs(tm.ops.names) do
      assert.truthy(text:find("| `" .. name .. "_?%("), name)
    end
  end)

  it("tells arguments with defaults, meaning and in-place form", function()
    local help = reference.help "softmax"
    assert.truthy(help:find("softmax(x, dim=-1)", 1, true))
    assert.truthy(help:find("dim: integer", 1, true))
    assert.truthy(reference.help "relu_":find("in place: relu_", 1, true))
    assert.is_nil(reference.help "no_such_operator")
  end)

  it("writes annotations that are Lua and name every visible method", function()
    local text = reference.annotations()
    assert.truthy(loadstring(text))
    for _, name in ipairs(tm.ops.names) do
      local row = tm.ops.rows[name]
      if not row.hidden and not row.mutates and row.args[1].type ~= "tensors" then
        assert.truthy(text:find("function Tensor:" .. name .. "(", 1, true), name)
      end
    end
  end)
end)
