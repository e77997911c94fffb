---docs/conversion.md shows what scripts/conversion.lua prints.

local H = require "spec.helper"

local function read(path)
  local file = assert(io.open(H.root .. "/" .. path))
  local text = file:read "*a"
  file:close()
  return text
end

describe("docs/conversion.md", function()
  local guide = read "docs/conversion.md"
  local code, out, err = H.shell(("cd %s && %s scripts/conversion.lua"):format(H.root, H.tmodrun))

  it("has scripts that run", function() assert.equal(0, code, err) end)

  local sections = {} -- a line of its own names a section
  for line in out:gmatch "[^\n]+" do
    if line:sub(1, 1) ~= " " then sections[#sections + 1] = { line } else table.insert(sections[#sections], line) end
  end

  it("shows every section", function() assert.equal(9, #sections) end)

  for _, section in ipairs(sections) do
    it("shows what the section " .. section[1] .. " prints", function()
      local text = ("```\n$ tmodrun scripts/conversion.lua %s\n%s\n```"):format(section[1], table.concat(section, "\n"))
      assert.truthy(guide:find(text, 1, true), text)
    end)
  end
end)
