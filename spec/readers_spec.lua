local h = require "spec.helper"
local tm = require "tmod"

local function csv(text, options) return tm.data.csv(h.file(text), options) end
local function idx(text) return tm.data.idx(h.file(text)) end

local function gzip(text)
  local code, out = h.shell("gzip -nc", text)
  assert.equal(0, code)
  return out
end

-- Doubles of every magnitude, the same ones each time.
local function random_doubles(n)
  local ffi = require "ffi"
  local u = ffi.new "union { uint32_t w[2]; double d; }"
  local list, state = {}, 1
  local function word()
    state = (state * 16807) % 2147483647
    return state % 65536
  end
  while #list < n do
    u.w[0], u.w[1] = word() * 65536 + word(), word() * 65536 + word()
    if u.d == u.d and u.d < 1 / 0 and u.d > -1 / 0 then list[#list + 1] = u.d end
  end
  return list
end

describe("tm.data.csv", function()
  it("reads a line per row", function()
    local x = csv "1,2,3\n4,5,6\n"
    assert.equal("float64", x.dtype)
    assert.same({{1, 2, 3}, {4, 5, 6}}, x:tolist())
  end)

  it("reads one column, one row and a last line without its end", function()
    assert.same({{1}, {2}}, csv("1\n2"):tolist())
    assert.same({{1, 2}}, csv("1,2"):tolist())
  end)

  it("passes over blanks, blank lines, carriage returns and a byte order mark", function()
    assert.same({{1, 2}, {3, 4}}, csv("\239\187\191 1 ,\t2 \r\n\r\n  \n3,4\r\n"):tolist())
  end)

  it("takes another separator", function()
    assert.same({{1, 2}}, csv("1;2\n", {separator = ";"}):tolist())
    assert.same({{1, 2}, {3, 4}}, csv("1\t2\n3 \t 4\n", {separator = "\t"}):tolist())
    assert.same({{1, 2, 3}, {4, 5, 6}}, csv("1  2\t3\n 4 5 6 \n", {separator = " "}):tolist())
  end)

  it("skips lines of heading, which count", function()
    assert.same({{1, 2}}, csv("a,b\n1,2\n", {skip = 1}):tolist())
    h.raises(function() csv("a,b\n1,2\nx,2\n", {skip = 1}) end, "RuntimeError", 'line 3, column 1: "x"')
  end)

  it("rounds every number as the C library does", function()
    local numbers = random_doubles(2000)
    for _, text in ipairs {
      "0.1", "9007199254740993", "123456789012345678901234567890", "1e22", "1e23", "4.9e-324", "2.2250738585072011e-308",
      "1.7976931348623157e308", "8.5e-17", ".5", "5.", "+7", "0.000000000000000000000000000001234", "999999999999999e22",
      "1E5", "00001.50",
    } do
      numbers[#numbers + 1] = text
    end
    local lines = {}
    for i, x in ipairs(numbers) do lines[i] = type(x) == "string" and x or ("%.17g"):format(x) end
    local got = csv(table.concat(lines, "\n")):tolist()
    for i, row in ipairs(got) do
      if row[1] ~= tonumber(lines[i]) then assert.equal(lines[i], ("%.17g"):format(row[1])) end
    end
    assert.equal(#numbers, #got)
  end)

  it("reads infinities, NaN and numbers beyond the range", function()
    local x = csv("inf,-Infinity,nan,NaN,1e400,-1e-400\n"):tolist()[1]
    assert.equal(1 / 0, x[1])
    assert.equal(-1 / 0, x[2])
    assert.is_true(x[3] ~= x[3] and x[4] ~= x[4])
    assert.equal(1 / 0, x[5])
    assert.equal(-1 / 0, 1 / x[6])
  end)

  it("reads lines longer than its buffer", function()
    local n = 100000
    local x = csv(("12.5,"):rep(n - 1) .. "1\n" .. ("7,"):rep(n - 1) .. "2\n")
    assert.same({2, n}, x:size())
    assert.same({12.5, 1, 7, 2}, {x[1][1]:item(), x[1][n]:item(), x[2][1]:item(), x[2][n]:item()})
  end)

  it("reads gzipped files", function()
    assert.same({{1, 2}, {3, 4}}, csv(gzip "1,2\n3,4\n"):tolist())
  end)

  it("tells a file that ends inside its compressed data, or is damaged", function()
    local numbers = {}
    for i = 1, 5000 do numbers[i] = (i * 7919) % 10007 end
    local z = gzip(table.concat(numbers, "\n"))
    h.raises(function() csv(z:sub(1, #z / 2)) end, "RuntimeError", "ends too early")
    h.raises(function() csv(z:sub(1, #z / 2) .. ("\255"):rep(50) .. z:sub(#z / 2 + 50)) end, "RuntimeError", "damaged")
  end)

  it("names file, line, column and text of what is no number", function()
    for text, message in pairs {
      ["1,2\n3,x4\n"] = 'line 2, column 2: "x4" is not a number',
      ["1,2x\n"] = 'line 1, column 2: "2x" is not a number',
      ["1,\n"] = 'line 1, column 2: "" is not a number',
      ["0x10\n"] = 'line 1, column 1: "0x10" is not a number',
      ["1e\n"] = '"1e" is not a number',
      [".\n"] = '"." is not a number',
      ["-\n"] = '"-" is not a number',
      ["1 2\n"] = '"1 2" is not a number',
      ["1\0,2\n"] = '"1%?" is not a number',
      ["nano\n"] = '"nano" is not a number',
    } do
      h.raises(function() csv(text) end, "RuntimeError", message)
    end
  end)

  it("names the line of a row of another length", function()
    h.raises(function() csv "1,2\n\n3\n" end, "RuntimeError", "line 3 has 1 columns, expected 2")
    h.raises(function() csv "1,2\n3,4,5\n" end, "RuntimeError", "line 2 has 3 columns, expected 2")
    h.raises(function() csv "" end, "RuntimeError", "no numbers")
    h.raises(function() csv("a\n", {skip = 1}) end, "RuntimeError", "no numbers")
  end)

  it("refuses separators that occur in numbers, and unknown options", function()
    for _, s in ipairs {".", "e", "5", "-", "\n"} do
      h.raises(function() csv("1", {separator = s}) end, "ValueError", "separator")
    end
    h.raises(function() csv("1", {separator = ", "}) end, "TypeError", "separator")
    h.raises(function() csv("1", {sep = ","}) end, "TypeError", "sep")
    h.raises(function() csv("1", {skip = -1}) end, "ValueError", "skip")
    h.raises(function() tm.data.csv(7) end, "TypeError", "path")
  end)

  it("returns nil and a message for a file that is not there", function()
    local x, message = tm.data.csv "/there/is/no.csv"
    assert.is_nil(x)
    assert.equal("/there/is/no.csv: No such file or directory", message)
    assert.is_nil((tm.data.csv "/"))
  end)

  it("leaves nothing behind after an error", function()
    assert.equal(0, h.live(function() pcall(csv, "1,2\nx") end))
  end)
end)

describe("tm.data.idx", function()
  it("reads every type, big-endian", function()
    for _, case in ipairs {
      {"\8\1\0\0\0\2\1\255", "uint8", {1, 255}},
      {"\9\1\0\0\0\2\1\255", "int8", {1, -1}},
      {"\11\1\0\0\0\2\1\0\255\255", "int16", {256, -1}},
      {"\12\1\0\0\0\2\0\1\0\0\255\255\255\254", "int32", {65536, -2}},
      {"\13\1\0\0\0\2\63\128\0\0\192\32\0\0", "float32", {1, -2.5}},
      {"\14\1\0\0\0\1\192\4\0\0\0\0\0\0", "float64", {-2.5}},
    } do
      local x = idx("\0\0" .. case[1])
      assert.equal(case[2], x.dtype)
      assert.same(case[3], x:tolist())
    end
  end)

  it("keeps the shape", function()
    assert.same({{{97, 98, 99}}, {{100, 101, 102}}}, idx("\0\0\8\3\0\0\0\2\0\0\0\1\0\0\0\3abcdef"):tolist())
    assert.equal(7, idx("\0\0\8\0\7"):item())
    assert.same({0, 65536}, idx("\0\0\8\2\0\0\0\0\0\1\0\0"):size())
  end)

  it("reads gzipped files", function()
    assert.same({97, 98}, idx(gzip "\0\0\8\1\0\0\0\2ab"):tolist())
  end)

  it("refuses what its header does not tell the truth about", function()
    for _, case in ipairs {
      {"", "only 0 bytes"},
      {"\0\0\8", "only 3 bytes"},
      {"1,2\n", "not an IDX file"},
      {"\0\0\10\1\0\0\0\1a", "not an IDX file"},
      {"\0\0\8\9", "9 dims, expected at most 8"},
      {"\0\0\8\2\0\0\0\1", "ends in its header"},
      {"\0\0\8\1\0\0\0\3ab", "promises uint8 %(3,%), but the file can hold only 2 bytes"},
      {"\0\0\8\1\0\0\0\1ab", "goes on after the 1 bytes"},
      {"\0\0\14\8" .. ("\255"):rep(32) .. "abc", "can hold only 3 bytes"},
    } do
      h.raises(function() idx(case[1]) end, "RuntimeError", case[2])
    end
    h.raises(function() idx(gzip "\0\0\8\1\0\0\0\3ab") end, "RuntimeError", "ends after 2 of 3 bytes")
    h.raises(function() idx(gzip "\0\0\8\1\0\0\0\1ab") end, "RuntimeError", "goes on after")
    h.raises(function() idx(gzip("\0\0\8\4" .. ("\255"):rep(16))) end, "RuntimeError", "promises")
  end)

  it("returns nil and a message for a file that is not there", function()
    local x, message = tm.data.idx "/there/is/no.idx"
    assert.is_nil(x)
    assert.matches("No such file", message)
  end)
end)
