local H = require "spec.helper"

describe("README", function()
  it("shows a program that trains and saves", function()
    local file = assert(io.open(H.root .. "/README.md"))
    local text = file:read "*a"
    file:close()
    local program = assert(text:match "```lua\n(.-)```")
    local script = H.file((program:gsub("scripts/data", H.root .. "/scripts/data")))
    local code, out, err = H.shell(("cd $(mktemp -d) && %s %s && ls"):format(H.tmodrun, script))
    assert.equal("", err)
    assert.equal(0, code)
    local accuracy = tonumber(out:match "\n5%s+([%d.]+)")
    assert.is_true(accuracy > 0.9, out) -- after five epochs, on what it was trained on
    assert.matches("net%.safetensors", out)
  end)
end)
