local h = require "spec.helper"
local lfs = require "lfs"
local tm = require "tmod"
local OrderedDict = require "tmod.ordered"

local function read(path)
  local f = assert(io.open(path, "rb"))
  local s = f:read "*a"
  f:close()
  return s
end

local directory -- of the running spec, for what must be alone in its directory

local function path(name) return directory .. "/" .. name end

local function files()
  local list = {}
  for name in lfs.dir(directory) do
    if name ~= "." and name ~= ".." then list[#list + 1] = name end
  end
  table.sort(list)
  return list
end

local function golden(name) return h.root .. "/spec/golden/" .. name .. ".safetensors" end

---A file from its header and its data. padding: to a multiple of 8, as writers do.
local function file(header, data, n)
  local bytes, length = "", n or #header
  for _ = 1, 8 do
    bytes = bytes .. string.char(length % 256)
    length = math.floor(length / 256)
  end
  return h.file(bytes .. header .. (data or ""))
end

local function entry(dtype, shape, first, last)
  return ('{"dtype":"%s","shape":[%s],"data_offsets":[%s,%s]}'):format(dtype, shape, first, last)
end

local function both_ways(fn)
  fn {mmap = true}
  fn {mmap = false}
end

before_each(function()
  directory = os.tmpname()
  os.remove(directory)
  assert(lfs.mkdir(directory))
end)

after_each(function() h.shell("chmod -R u+w '" .. directory .. "'; rm -rf '" .. directory .. "'") end)

describe("tm.load", function()
  it("reads every dtype that the Python library wrote", function()
    both_ways(function(options)
      local t, metadata = tm.load(golden "dtypes", options)
      assert.same({format = "pt"}, metadata)
      local inf, nan = 1 / 0, 0 / 0
      for name, want in pairs {
        ["w.bool"] = {true, false, true},
        ["w.uint8"] = {{0, 1}, {254, 255}},
        ["w.int8"] = {-128, -1, 127},
        ["w.int16"] = {-32768, 32767},
        ["w.int32"] = {{{-2147483648}, {2147483647}}},
        ["w.int64"] = {-2 ^ 53, 2 ^ 53},
        ["w.float16"] = {-1.5, 65504, 2 ^ -24, inf},
        ["w.bfloat16"] = {-1.5, 2 ^ 120, nan},
        ["w.float32"] = {{0.5, -inf, nan}, {3, 2 ^ -149, 0}},
        ["w.float64"] = 0.1,
        ["a.float32"] = {1},
      } do
        assert.equal(name:match "%.(.*)", t[name].dtype)
        assert.near_tensor(want, t[name], 0)
      end
      assert.same({0, 3}, t["w.empty"]:size())
      assert.equal(12, t:len())
    end)
  end)

  it("keeps the order of the file", function()
    local a, b = entry("U8", 1, 1, 2), entry("U8", 1, 0, 1)
    local t = tm.load(file('{"z":' .. a .. ',"a":' .. b .. "}", "xy"))
    assert.same({"z", "a"}, OrderedDict.keys(t))
    assert.equal(("y"):byte(), t.z[1]:item())
  end)

  it("returns nil and a message for a file that is not there", function()
    local t, message = tm.load "/there/is/no.safetensors"
    assert.is_nil(t)
    assert.equal("/there/is/no.safetensors: No such file or directory", message)
    assert.is_nil((tm.load(directory)))
    assert.matches("not a regular file", select(2, tm.load "/dev/null"))
  end)

  it("maps: writing changes memory and neither the file nor another load", function()
    local name = path "w.safetensors"
    tm.save({w = tm.tensor {1, 2, 3}, v = tm.tensor {4}}, name)
    local before = read(name)
    local t, u = tm.load(name), tm.load(name)
    t.w:fill_(9)
    assert.same({9, 9, 9}, t.w:tolist())
    assert.same({1, 2, 3}, u.w:tolist())
    assert.equal(before, read(name))
  end)

  it("gives each tensor a version of its own", function()
    local t = tm.load(golden "names")
    local x = t.z:to "float32":requires_grad_()
    local y = x * x
    t.a:fill_(5)
    y:backward()
    assert.same({0}, x.grad:tolist())
    local B = require "tmod.ffi"
    assert.are_not.equal(B.C.tm_tensor_storage_id(B.ptr(t.z)), B.C.tm_tensor_storage_id(B.ptr(t.a)))
    assert.equal(0, tonumber(B.C.tm_tensor_version(B.ptr(t.z))))
  end)

  it("keeps the mapping as long as one tensor lives", function()
    local w
    do
      local t = tm.load(golden "dtypes")
      w = t["a.float32"]
    end
    collectgarbage()
    collectgarbage()
    assert.same({1}, w:tolist())
    assert.equal(0, h.live(function() tm.load(golden "dtypes") end))
  end)

  it("outlives the replacement of its file", function()
    local name = path "w.safetensors"
    tm.save({w = tm.ones(3)}, name)
    local t = tm.load(name)
    tm.save({w = t.w * 2}, name)
    assert.same({1, 1, 1}, t.w:tolist())
    assert.same({2, 2, 2}, tm.load(name).w:tolist())
  end)

  it("copies what lies at an odd address", function()
    local header = '{"a":' .. entry("U8", 1, 0, 1) .. ',"w":' .. entry("I32", 2, 1, 9) .. "}"
    for padding = 0, 7 do
      both_ways(function(options)
        local t = tm.load(file(header .. (" "):rep(padding), "\7\1\0\0\0\255\255\255\255"), options)
        assert.same({1, -1}, t.w:tolist())
      end)
    end
  end)

  it("reads truth values other than 1 as true", function()
    both_ways(function(options)
      local t = tm.load(file('{"m":' .. entry("BOOL", 3, 0, 3) .. "}", "\0\2\255"), options)
      assert.same({false, true, true}, t.m:tolist())
      assert.equal(2, t.m:sum():item())
    end)
  end)

  it("loads on meta without data", function()
    local t = tm.load(golden "dtypes", {device = "meta"})
    assert.equal("meta", t["w.uint8"].device)
    assert.same({2, 2}, t["w.uint8"]:size())
    assert.equal("uint8", t["w.uint8"].dtype)
  end)

  it("refuses wrong arguments", function()
    h.raises(function() tm.load(5) end, "TypeError", "path")
    h.raises(function() tm.load("a\0b") end, "ValueError", "zero byte")
    h.raises(function() tm.load(golden "dtypes", {map = true}) end, "TypeError", "map, expected device, mmap")
    assert.is_false((pcall(tm.load, golden "dtypes", {device = "abacus"})))
  end)

  it("reads the longest name and shape that fit", function()
    local name = ("n"):rep(70000)
    local t = tm.load(file('{"' .. name .. '":' .. entry("U8", "1,1,1,1,1,1,1,2", 0, 2) .. "}", "ab"))
    assert.same({1, 1, 1, 1, 1, 1, 1, 2}, t[name]:size())
  end)
end)

describe("tm.load of a hostile file", function()
  local good = entry("U8", 2, 0, 2)

  -- header, data, the length that the file claims; a pattern for the error
  local cases = {
    {"too short for its length", nil, nil, nil, "too short", raw = "\1\2\3"},
    {"empty", nil, nil, nil, "0 bytes, too short", raw = ""},
    {"a header longer than the file", "{}", "", 3, "should have 3 bytes, but the file has 2"},
    {"a header over the limit", "{}", "", 2 ^ 40, "limit is 104857600"},
    {"a length with its highest bit set", nil, nil, nil, "18446744073709551615", raw = ("\255"):rep(16)},
    {"an empty header", "", "", nil, "does not begin with {"},
    {"white space before the header", " {}", "", nil, "does not begin with {"},
    {"an array as header", "[]", "", nil, "does not begin with {"},
    {"JSON that ends too early", '{"w":', "", nil, "not valid JSON"},
    {"text after the JSON", "{} x", "", nil, "not valid JSON"},
    {"invalid UTF-8", '{"\255":' .. good .. "}", "ab", nil, "not valid JSON"},
    {"an encoded zero in a name", '{"a\\u0000b":' .. good .. "}", "ab", nil, "not valid JSON"},
    {"a number beyond 64 bits", '{"w":' .. entry("U8", "99999999999999999999", 0, 2) .. "}", "ab", nil, "not valid JSON"},
    {"very deep nesting", '{"w":' .. ("["):rep(100000), "", nil, "not valid JSON"},
    {"a name twice", '{"w":' .. good .. ',"w":' .. good .. "}", "ab", nil, "duplicate"},
    {"a key twice in an entry", '{"w":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "ab", nil, "duplicate"},
    {"an entry that is no object", '{"w":[1]}', "", nil, 'tensor "w": its entry is an array, expected an object'},
    {"an entry without dtype", '{"w":{"shape":[2],"data_offsets":[0,2]}}', "ab", nil, 'tensor "w": dtype is missing'},
    {"an entry without shape", '{"w":{"dtype":"U8","data_offsets":[0,2]}}', "ab", nil, 'tensor "w": shape is missing'},
    {"an entry without offsets", '{"w":{"dtype":"U8","shape":[2]}}', "ab", nil, 'tensor "w": data_offsets is missing'},
    {"a dtype that is no string", '{"w":{"dtype":8,"shape":[2],"data_offsets":[0,2]}}', "ab", nil, "dtype is a whole number"},
    {"an unknown dtype", '{"w":' .. entry("F8_E4M3", 2, 0, 2) .. "}", "ab", nil, 'tensor "w": dtype F8_E4M3 is not supported'},
    {"a shape that is no array", '{"w":{"dtype":"U8","shape":2,"data_offsets":[0,2]}}', "ab", nil, "shape is a whole number"},
    {"a fraction as size", '{"w":' .. entry("U8", "2.0", 0, 2) .. "}", "ab", nil, "size 1 of the shape is a fraction"},
    {"a null as size", '{"w":' .. entry("U8", "1,null", 0, 2) .. "}", "ab", nil, "size 2 of the shape is null"},
    {"a negative size", '{"w":' .. entry("U8", "-2,-1", 0, 2) .. "}", "ab", nil, "size 1 of the shape is %-2"},
    {"more than 8 dims", '{"w":' .. entry("U8", "1,1,1,1,1,1,1,1,2", 0, 2) .. "}", "ab", nil, "9 dims, expected at most 8"},
    {"a shape that overflows", '{"w":' .. entry("F64", "4611686018427387904,4", 0, 2) .. "}", "ab", nil, "too many elements"},
    {"bytes that overflow", '{"w":' .. entry("F64", "2305843009213693952", 0, 0) .. "}", "", nil, "too many elements"},
    {"strides that overflow", '{"w":' .. entry("F64", "0,4611686018427387904,4", 0, 0) .. "}", "", nil, "too many elements"},
    {"three offsets", '{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,1,2]}}', "ab", nil, "array of two whole numbers"},
    {"offsets as text", '{"w":{"dtype":"U8","shape":[2],"data_offsets":["0","2"]}}', "ab", nil, "array of two whole numbers"},
    {"offsets that are an object", '{"w":{"dtype":"U8","shape":[2],"data_offsets":{}}}', "ab", nil, "data_offsets is an object"},
    {"a negative offset", '{"w":' .. entry("U8", 2, -2, 0) .. "}", "ab", nil, "data_offsets are %[%-2, 0%]"},
    {"an end before the begin", '{"w":' .. entry("U8", 2, 2, 0) .. "}", "ab", nil, "data_offsets are %[2, 0%]"},
    {"an end beyond the data", '{"w":' .. entry("U8", 3, 0, 3) .. "}", "ab", nil, "%[0, 3%], expected 0 <= begin <= end <= 2"},
    {"an offset near the largest", '{"w":' .. entry("U8", 2, "9223372036854775805", "9223372036854775807") .. "}", "ab", nil,
      "data_offsets are"},
    {"a size unlike its shape", '{"w":' .. entry("F32", 1, 0, 2) .. "}", "ab", nil, "%[0, 2%] hold 2 bytes, expected 4 for F32 %(1,%)"},
    {"an overlap", '{"w":' .. good .. ',"v":' .. entry("U8", 2, 1, 3) .. "}", "abc", nil,
      'tensor "v": data_offsets %[1, 3%] overlap, expected to begin at 2, the end of "w"'},
    {"a hole", '{"w":' .. entry("U8", 1, 0, 1) .. ',"v":' .. entry("U8", 1, 2, 3) .. "}", "abc", nil,
      'tensor "v": data_offsets %[2, 3%] leave a hole, expected to begin at 1'},
    {"a hole at the begin", '{"w":' .. entry("U8", 1, 1, 2) .. "}", "ab", nil, "leave a hole, expected to begin at 0"},
    {"data behind the last tensor", '{"w":' .. good .. "}", "abc", nil, "3 bytes of data, expected 2"},
    {"data without a tensor", "{}", "abc", nil, "3 bytes of data, expected 0"},
    {"truncated data", '{"w":' .. good .. "}", "a", nil, "<= 1 %(bytes of data%)"},
    {"metadata that is no object", '{"__metadata__":"x"}', "", nil, "__metadata__ is a string"},
    {"metadata that is no text", '{"__metadata__":{"k":1}}', "", nil, '__metadata__ "k" is a whole number'},
  }
  for _, case in ipairs(cases) do
    it("tells " .. case[1], function()
      local name = case.raw and h.file(case.raw) or file(case[2], case[3], case[4])
      both_ways(function(options)
        local err = h.raises(function() tm.load(name, options) end, "RuntimeError", case[5])
        assert.is_truthy(tostring(err):find(name, 1, true))
      end)
    end)
  end

  it("survives truncations and changed bytes anywhere in a header", function()
    local whole = read(golden "dtypes")
    local step = h.sanitized and 23 or 7
    local loaded = 0
    local function try(text)
      local name = path "x"
      local f = io.open(name, "wb")
      f:write(text)
      f:close()
      local ok, t = pcall(tm.load, name)
      if ok then
        loaded = loaded + 1
        for _, x in t:pairs() do tostring(x) end
      else
        assert.equal("RuntimeError", t.kind)
      end
    end
    for n = 0, #whole - 1, step do try(whole:sub(1, n)) end
    assert.equal(0, loaded)
    for i = 1, #whole - 100, step do
      for _, c in ipairs {"9", '"', "\0"} do try(whole:sub(1, i - 1) .. c .. whole:sub(i + 1)) end
    end
    assert.is_true(loaded > 0) -- a changed name is another name
  end)

  it("leaves nothing behind", function()
    local name = file('{"w":' .. good .. "}", "abc")
    assert.equal(0, h.live(function() pcall(tm.load, name) end))
  end)
end)

describe("tm.save", function()
  it("writes what the Python library writes, byte for byte", function()
    for _, name in ipairs {"dtypes", "names", "nothing"} do
      both_ways(function(options)
        local t, metadata = tm.load(golden(name), options)
        tm.save(t, path "copy", {metadata = metadata})
        assert.equal(read(golden(name)), read(path "copy"))
      end)
    end
  end)

  it("takes plain tables, in any order, and ordered dictionaries", function()
    local d = OrderedDict.new()
    d.b = tm.tensor {2}
    d.a = tm.tensor {1}
    tm.save(d, path "d")
    tm.save({a = d.a, b = d.b}, path "t")
    assert.equal(read(path "d"), read(path "t"))
    tm.save({}, path "e")
    assert.equal("\8\0\0\0\0\0\0\0{}      ", read(path "e"))
  end)

  it("makes views dense and writes shared memory once for each name", function()
    local x = tm.arange(0, 6, 1, {dtype = "float32"}):reshape(2, 3)
    tm.save({x = x, t = x:transpose(1, 2), e = x:narrow(1, 1, 1):expand(2, 3)}, path "v")
    local y = tm.load(path "v")
    assert.same({{0, 1, 2}, {3, 4, 5}}, y.x:tolist())
    assert.same({{0, 3}, {1, 4}, {2, 5}}, y.t:tolist())
    assert.same({{0, 1, 2}, {0, 1, 2}}, y.e:tolist())
  end)

  it("writes the values of tensors that require grad", function()
    tm.save({w = tm.ones(2):requires_grad_(), y = tm.ones(1):requires_grad_() * 3}, path "g")
    local t = tm.load(path "g")
    assert.same({1, 1}, t.w:tolist())
    assert.same({3}, t.y:tolist())
    assert.is_false(t.w.requires_grad)
  end)

  it("sorts metadata and keeps every character", function()
    local metadata = {b = "1", a = "quote \" back \\ slash / \1\31\127 é 漢 😀\n", [""] = ""}
    tm.save({}, path "m", {metadata = metadata})
    assert.same(metadata, select(2, tm.load(path "m")))
    local text = read(path "m")
    assert.is_true(text:find('"a":', 1, true) < text:find('"b":', 1, true))
  end)

  it("refuses modules, tensors and other values", function()
    h.raises(function() tm.save(tm.nn.Linear(2, 2), path "x") end, "TypeError", "state_dict%(%)")
    h.raises(function() tm.save(tm.ones(2), path "x") end, "TypeError", "got a tensor")
    h.raises(function() tm.save(nil, path "x") end, "TypeError", "got a nil")
    h.raises(function() tm.save({w = 5}, path "x") end, "TypeError", '"w"')
    h.raises(function() tm.save({w = {1, 2}}, path "x") end, "TypeError", '"w"')
    h.raises(function() tm.save({tm.ones(1)}, path "x") end, "TypeError", "key 1 is a number")
    h.raises(function() tm.save({w = tm.ones(1)}) end, "TypeError", "path")
    assert.same({}, files())
  end)

  it("refuses a released tensor, a tensor without data and names that cannot be read back", function()
    local w = tm.ones(1)
    local m = tm.empty({2}, {device = "meta"})
    h.raises(function() tm.save({m = m}, path "x") end, "RuntimeError", 'tensor "m" is float32 %(2,%) on meta')
    for name, message in pairs {[""] = 'the name ""', __metadata__ = "__metadata__", ["a\0b"] = "zero byte", ["\255"] = "UTF%-8"} do
      h.raises(function() tm.save({[name] = w}, path "x") end, "ValueError", message)
    end
    h.raises(function() tm.save({w = w}, path "x", {metadata = {k = 1}}) end, "TypeError", "metadata of k is a number")
    h.raises(function() tm.save({w = w}, path "x", {metadata = {k = "\255"}}) end, "ValueError", "UTF%-8")
    h.raises(function() tm.save({w = w}, path "x", {meta = {}}) end, "TypeError", "no option meta")
    if w.release then
      w:release()
      h.raises(function() tm.save({gone = w}, path "x") end, "TypeError", '"gone".*released')
    end
    assert.same({}, files())
  end)

  it("names path and reason when it cannot write", function()
    local w = tm.ones(1)
    h.raises(function() tm.save({w = w}, directory .. "/no/x") end, "RuntimeError", "/no/x: .*No such file or directory")
    h.raises(function() tm.save({w = w}, directory) end, "RuntimeError", "not a regular file")
    h.raises(function() tm.save({w = w}, "/dev/null") end, "RuntimeError", "/dev/null: cannot write: not a regular file")
    h.raises(function() tm.save({w = w}, "") end, "RuntimeError")
  end)

  it("keeps the mode of the file it replaces, and gives a new one that of the umask", function()
    tm.save({w = tm.ones(1)}, path "new")
    local _, plain = h.shell(("(umask; : > '%s/plain'); stat -c %%a '%s/plain' '%s/new'"):format(directory, directory, directory))
    local a, b = plain:match "(%d+)\n(%d+)\n$"
    assert.equal(a, b)
    h.shell(("chmod 640 '%s/new'"):format(directory))
    tm.save({w = tm.ones(2)}, path "new")
    local _, mode = h.shell(("stat -c %%a '%s/new'"):format(directory))
    assert.equal("640\n", mode)
    assert.same({"new", "plain"}, files())
  end)

  it("follows a symbolic link", function()
    tm.save({w = tm.ones(1)}, path "real")
    assert(lfs.link("real", path "link", true))
    tm.save({w = tm.zeros(1)}, path "link")
    assert.equal("link", lfs.symlinkattributes(path "link", "mode"))
    assert.same({0}, tm.load(path "real").w:tolist())
  end)

  it("leaves the old file and no other when writing fails in the middle", function()
    tm.save({w = tm.ones(1)}, path "w")
    local before = read(path "w")
    local code, _, err = h.shell(([[trap '' XFSZ; ulimit -f 64; %s -e '
      local tm = require "tmod"
      local ok, e = pcall(tm.save, {w = tm.zeros(1000, 1000)}, "%s/w")
      io.stderr:write(tostring(e))
      os.exit(ok and 1 or 7)']]):format(h.tmodrun, directory))
    assert.matches("/w: cannot write: File too large", err)
    assert.equal(7, code)
    assert.equal(before, read(path "w"))
    assert.same({"w"}, files())
  end)

  it("leaves the old file when memory runs out at any point", function()
    local C = require "tmod.ffi".C
    local x = {w = tm.ones(4, 4):transpose(1, 2), v = tm.ones(3)}
    tm.save({w = tm.ones(1)}, path "w")
    local before, failures = read(path "w"), 0
    for k = 1, 100 do
      C.tm_memory_fail_at(k)
      local ok, e = pcall(tm.save, x, path "w")
      C.tm_memory_fail_at(0)
      if ok then break end
      failures = failures + 1
      assert.equal("OutOfMemory", e.kind)
      assert.equal(before, read(path "w"))
      assert.same({"w"}, files())
    end
    assert.is_true(failures > 0)
    assert.same({1, 1, 1}, tm.load(path "w").v:tolist())
  end)

  it("stops at an interrupt and leaves the old file", function()
    local C = require "tmod.ffi".C
    tm.save({w = tm.ones(1)}, path "w")
    local before, x = read(path "w"), {w = tm.ones(2)}
    C.tm_interrupt()
    local ok, e = pcall(tm.save, x, path "w")
    C.tm_interrupt_take()
    assert.is_false(ok)
    assert.equal("Interrupted", e.kind)
    assert.equal(before, read(path "w"))
    assert.same({"w"}, files())
  end)
end)

describe("tm.load when memory runs out", function()
  it("fails cleanly at every point", function()
    local C = require "tmod.ffi".C
    both_ways(function(options)
      local failures = 0
      assert.equal(0, h.live(function()
        for k = 1, 200 do
          C.tm_memory_fail_at(k)
          local ok, e = pcall(tm.load, golden "dtypes", options)
          C.tm_memory_fail_at(0)
          if ok then break end
          failures = failures + 1
          assert.equal("OutOfMemory", e.kind)
        end
      end))
      assert.is_true(failures > 10)
    end)
  end)
end)
