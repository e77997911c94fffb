---Loaded once, before every spec (.busted): finds tmod in the build tree, teaches luassert about tensors, counts.
---Specs take it by `require "spec.helper"`.
local busted = require "busted"
local assert = require "luassert"
local lfs = require "lfs"
local say = require "say"

local H = {}
package.loaded["spec.helper"] = H -- busted ran this file by its path

H.root = lfs.currentdir()
H.prefix = os.getenv "TMOD_PREFIX" or H.root .. "/build/release"
H.sanitized = H.prefix:match "[^/]+$" == "asan" -- ten times slower: specs may do less
H.tmodrun = H.prefix .. "/bin/tmodrun"
H.jit = os.getenv "TMOD_JIT" or "" -- LuaJIT's options of this run
package.path = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua;%s/?.lua;"):format(H.prefix, H.prefix, H.root) .. package.path

require "tmod"
local binding = require "tmod.ffi"

function H.is_tensor(x) return type(x) == "table" and rawget(x, "_h") ~= nil end

-- -- assertions -----------------------------------------------------------------------------------------------

local function as_number(x)
  if type(x) == "boolean" then return x and 1 or 0 end
  return tonumber(x)
end

---Where two nested lists differ: nil, or a sentence.
local function difference(expected, actual, tol, path)
  if type(expected) == "table" or type(actual) == "table" then
    if type(expected) ~= "table" or type(actual) ~= "table" or #expected ~= #actual then
      local function size(x) return type(x) == "table" and #x .. " elements" or "a number" end
      return ("at [%s]: expected %s, got %s"):format(path, size(expected), size(actual))
    end
    for i = 1, #expected do
      local why = difference(expected[i], actual[i], tol, path == "" and i or path .. ", " .. i)
      if why then return why end
    end
    return nil
  end
  local e, a = as_number(expected), as_number(actual)
  local same = e == a or (e ~= e and a ~= a) or math.abs(e - a) <= tol * math.max(1, math.abs(e))
  if not same then return ("at [%s]: expected %.9g, got %.9g (difference %.3g, tolerance %.3g)"):format(path, e, a, a - e, tol) end
end

local function plain(x) return H.is_tensor(x) and x:detach():tolist() or x end

---assert.near_tensor(expected, actual, tol): same shape, and elements within tol * max(1, |expected|); NaN equals
---NaN. Both may be tensors, nested lists or numbers. tol: default 1e-6.
local function near_tensor(state, arguments)
  local expected, actual, tol = arguments[1], arguments[2], arguments[3] or 1e-6
  local why
  if H.is_tensor(expected) and H.is_tensor(actual) then
    local want, got = table.concat(expected:size(), ", "), table.concat(actual:size(), ", ")
    if want ~= got then why = ("expected shape (%s), got (%s)"):format(want, got) end
  end
  why = why or difference(plain(expected), plain(actual), tol, "")
  state.failure_message = why and ("%s\nexpected:\n%s\ngot:\n%s"):format(why, tostring(expected), tostring(actual))
  return why == nil
end

say:set("assertion.near_tensor.positive", "Expected tensors to be near.\nexpected:\n%s\ngot:\n%s")
say:set("assertion.near_tensor.negative", "Expected tensors to differ.\nfirst:\n%s\nsecond:\n%s")
assert:register("assertion", "near_tensor", near_tensor, "assertion.near_tensor.positive", "assertion.near_tensor.negative")
assert:add_formatter(function(x) if H.is_tensor(x) then return tostring(x) end end)

---Calls fn, which must raise an error object of this kind whose text matches the Lua pattern. Returns the object.
function H.raises(fn, kind, pattern)
  local ok, err = pcall(fn)
  if ok then error(("expected a %s, but nothing was raised"):format(kind), 2) end
  local text = tostring(err)
  if type(err) ~= "table" or err.kind ~= kind then
    error(("expected a %s, got %s: %s"):format(kind, type(err) == "table" and tostring(err.kind) or type(err), text), 2)
  end
  if pattern and not text:find(pattern) then
    error(("expected the text of the %s to match %q, got: %s"):format(kind, pattern, text), 2)
  end
  return err
end

-- -- leaks ------------------------------------------------------------------------------------------------------

---Live C tensors after everything unreachable has gone.
function H.live_tensors()
  binding.collect_now()
  return tonumber(binding.C.tm_live_tensors())
end

---How many more C tensors are alive after fn than before; what it returns is dropped.
function H.live(fn)
  fn() -- once for what is made on first use and stays
  local before = H.live_tensors()
  fn()
  return H.live_tensors() - before
end

-- -- processes ----------------------------------------------------------------------------------------------------

local function read_file(path)
  local file = io.open(path, "rb")
  if not file then return "" end
  local text = file:read "*a"
  file:close()
  return text
end

local temporary = {}

---A file with this text, removed when the process ends.
function H.file(text)
  local path = os.tmpname()
  temporary[#temporary + 1] = path
  local file = io.open(path, "wb")
  file:write(text or "")
  file:close()
  return path
end

---Runs a shell command: its exit code and what it wrote. Where the command says %OUT, it reads the name of the
---file that standard output goes to. After two minutes it and all that it started are killed (code 124).
---@return integer code
---@return string out
---@return string err
function H.shell(command, input)
  local out, err = H.file(), H.file()
  command = command:gsub("%%OUT", out)
  local pipe = io.popen(("timeout 120 sh %s >%s 2>%s <%s; echo $?")
    :format(H.file(command), out, err, input and H.file(input) or "/dev/null"))
  local code = tonumber(pipe:read "*a")
  pipe:close()
  return code, read_file(out), read_file(err)
end

-- -- the closing line -----------------------------------------------------------------------------------------------

local passed, failed, skipped = 0, 0, 0

busted.subscribe({"test", "end"}, function(_, _, status)
  if status == "success" then passed = passed + 1
  elseif status == "pending" then skipped = skipped + 1
  elseif status == "failure" then failed = failed + 1 end
  return nil, true
end)
busted.subscribe({"error"}, function() -- in a test or outside of one
  failed = failed + 1
  return nil, true
end)
busted.subscribe({"exit"}, function()
  for _, path in ipairs(temporary) do os.remove(path) end
  print(("\n%d passed, %d failed, %d skipped"):format(passed, failed, skipped))
  io.stdout:flush()
  if failed > 0 then os.exit(1, true) end -- busted itself ends by a Lua error, whose text would come last
  return nil, true
end)

return H
