---ops.lua: Lua functions for the rows of the operator table, generated from their signatures when first used.
---A generated function checks its arguments, stores them in the frame and calls C: no closure, no varargs and no
---table is made, so that it compiles.

local B = require "tmod.ffi"
local C, ffi = B.C, B.ffi

local ops = {}

local FLAG = { inplace = C.TM_OP_INPLACE, mutates = C.TM_OP_MUTATES, view = C.TM_OP_VIEW, diff = C.TM_OP_DIFF,
  random = C.TM_OP_RANDOM, first_order = C.TM_OP_FIRST_ORDER, hidden = C.TM_OP_NOMETHOD }

---@class OpRow
---@field id integer
---@field name string
---@field signature string
---@field doc string
---@field saves string
---@field args {name: string, type: string, default?: string}[]

local rows = {}
ops.rows = rows -- name -> row
ops.names = {}  -- in the table's order

local function parse(signature)
  local args = {}
  for piece in (signature .. ", "):gmatch "(.-), " do
    local name, rest = piece:match "^([%w_]+)(.*)$"
    local kind, default = rest:match "^:([^=]+)=?(.*)$"
    if not kind then kind, default = "tensor", "" end
    args[#args + 1] = { name = name, type = kind, default = default ~= "" and default or nil }
  end
  return args
end

for id = 0, C.tm_op_count() - 1 do
  local name, flags = ffi.string(C.tm_op_name(id)), C.tm_op_flags(id)
  local row = { id = id, name = name, signature = ffi.string(C.tm_op_signature(id)), doc = ffi.string(C.tm_op_doc(id)),
    saves = ffi.string(C.tm_op_saves(id)) }
  for key, bit_ in pairs(FLAG) do row[key] = bit.band(flags, bit_) ~= 0 end
  rows[name] = row
  ops.names[#ops.names + 1] = name
end

---Arguments of a row, parsed on first need.
function ops.args(row)
  row.args = row.args or parse(row.signature)
  return row.args
end

-- argument conversion off the fast path ---------------------------------------------------------------------------

local support = { C = C, F = B.frame, B = B, type = type, wrap = B.wrap_new, after = B.after, raise = B.raise, fail = B.fail,
  to_dtype = B.dtype, to_device = B.device, nan = 0 / 0 }

---A value that is no tensor stood where one belongs.
function support.bad_tensor(op, position, name, got, expected)
  B.fail("TypeError", "%s: argument %d (%s) must be a %s, got %s", op, position, name, expected or "tensor", B.type_name(got))
end

function support.bad_value(op, position, name, got, expected)
  B.fail("TypeError", "%s: argument %d (%s) must be a %s, got %s", op, position, name, expected,
    type(got) == "string" and ("%q"):format(got) or B.type_name(got))
end

---Is this table an options table, rather than a list, a tensor or an object?
function support.is_options(t) return t[1] == nil and getmetatable(t) == nil and next(t) ~= nil end

---The options named in `names` (from position `from` on), in order; others are an error.
function support.options(op, t, names, from)
  for key in pairs(t) do
    local known = false
    for i = from, #names do known = known or names[i] == key end
    if not known then
      B.fail("TypeError", "%s: unknown option %s; known here: %s", op, tostring(key), table.concat(names, ", ", from))
    end
  end
  local values = {}
  for i = from, #names do values[i - from + 1] = t[names[i]] end
  return unpack(values, 1, #names - from + 1)
end

---Writes the numbers of a list (a number, or a table of them) into the frame from `at` on; returns how many.
function support.put_list(op, position, name, v, at)
  if type(v) == "number" then
    B.room(at + 1)[at] = v
    return 1
  end
  if type(v) ~= "table" or rawget(v, "_h") then support.bad_value(op, position, name, v, "number or a list of numbers") end
  local n = table.maxn(v)
  local to = B.room(at + n)
  for i = 1, n do
    if type(v[i]) ~= "number" then
      B.fail("TypeError", "%s: %s[%d] must be a number, got %s", op, name, i, B.type_name(v[i]))
    end
    to[at + i - 1] = v[i]
  end
  return n
end

---The same for up to eight arguments in a row, as in view(2, 3); a nil between numbers is an error.
function support.put_spread(op, position, name, at, a, b, c, d, e, f, g, h)
  if type(a) == "table" then
    if b ~= nil then support.bad_value(op, position + 1, name, b, "lone list of numbers") end
    return support.put_list(op, position, name, a, at)
  end
  local to, n = B.room(at + 8), 0
  local rest = { a, b, c, d, e, f, g, h }
  for i = 1, 8 do
    local v = rest[i]
    if v ~= nil then
      if type(v) ~= "number" then support.bad_value(op, position + i - 1, name, v, "number") end
      if n ~= i - 1 then B.fail("TypeError", "%s: %s has a hole: number %d is nil", op, name, n + 1) end
      to[at + n] = v
      n = n + 1
    end
  end
  return n
end

---Handles of a list of tensors. `sparse`: absent ones count as 0.
function support.put_tensors(op, position, name, v, sparse)
  if type(v) ~= "table" or rawget(v, "_h") then support.bad_value(op, position, name, v, "list of tensors") end
  local n = v.n or table.maxn(v)
  local to = B.room(n + 64)
  for i = 1, n do
    local t = v[i]
    local h = type(t) == "table" and rawget(t, "_h")
    if not h and not (sparse and not t) then
      B.fail("TypeError", "%s: %s[%d] must be a tensor, got %s", op, name, i, B.type_name(t))
    end
    to[i - 1] = h or 0
  end
  return n
end

---After a failure: out of memory is one only if collecting garbage does not help. The arguments are passed for no
---other reason than to stay alive meanwhile. In-place forms are not run twice: they may have changed something.
function support.again(rc, id)
  if rc ~= C.TM_EMEM then B.raise() end
  B.collect_now()
  rc = C.tm_dispatch(id, B.frame)
  if rc ~= 0 and rc ~= 100 then B.raise() end
  return rc
end

---The arguments of a spread list as one list.
function support.gather(a, b, c, d, e, f, g, h)
  if type(a) == "table" then return a end
  return { a, b, c, d, e, f, g, h }
end

---C hands a call back when an argument is a wrapper: its class acts. `args` are complete: defaults are filled in.
function support.by_class(name, args) return require "tmod.wrapper".run(name, args) end

-- code generation ---------------------------------------------------------------------------------------------------

local SPREAD = "_2, _3, _4, _5, _6, _7, _8"

---Lua source that stores argument `arg` (tensor number t, other number a).
local function store(row, arg, position, slot, lists)
  local n, name, kind = arg.name, row.name, arg.type
  local fmt = function(code) return (code:gsub("%$(%w+)", { n = n, s = tostring(slot), op = ("%q"):format(name), q = ("%q"):format(n),
    p = tostring(position), at = lists })) end
  if kind == "tensor" then
    return fmt [[
  do local h = type($n) == "table" and $n._h
    if not h then bad_tensor($op, $p, $q, $n) end
    F.t[$s] = h end
]]
  elseif kind == "tensor?" then
    return fmt [[
  if $n == nil then F.t[$s] = 0 else local h = type($n) == "table" and $n._h
    if not h then bad_tensor($op, $p, $q, $n, "tensor or nil") end
    F.t[$s] = h end
]]
  elseif kind == "operand" then
    return fmt [[
  if type($n) == "number" then F.t[$s] = $n; numbers = numbers + ]] .. 2 ^ slot .. "\n" .. fmt [[
  else local h = type($n) == "table" and $n._h
    if not h then bad_tensor($op, $p, $q, $n, "tensor or number") end
    F.t[$s] = h end
]]
  elseif kind == "tensors" then
    return fmt([[
  at = put_tensors($op, $p, $q, $n, ]] .. tostring(n == "indices") .. [[)
  F.nlist = at
]])
  elseif kind == "num" or kind == "int" or kind == "dim" or kind == "newdim" or kind == "index" then
    local check = kind == "num" and "number" or "whole number"
    local default = arg.default and fmt("if $n == nil then $n = " .. arg.default .. " end\n") or ""
    return default .. fmt([[
  if type($n) ~= "number" then bad_value($op, $p, $q, $n, "]] .. check .. [[") end
  F.a[$s] = $n
]])
  elseif kind == "num?" or kind == "dim?" then
    return fmt [[
  if $n == nil then F.a[$s] = nan
  else if type($n) ~= "number" then bad_value($op, $p, $q, $n, "number or nil") end
    F.a[$s] = $n end
]]
  elseif kind == "bool" then
    return fmt([[
  if $n == nil then $n = ]] .. (arg.default or "false") .. [[ end
  if type($n) ~= "boolean" then bad_value($op, $p, $q, $n, "boolean") end
  F.a[$s] = $n and 1 or 0
]])
  elseif kind == "dims?" then
    return fmt [[
  if $n == nil then F.a[$s] = -1
  else local n = put_list($op, $p, $q, $n, at); F.a[$s] = n; at = at + n end
]]
  elseif kind == "shape" or kind == "ints" or kind == "dims" then
    if arg.spread then
      return fmt([[
  do local n = put_spread($op, $p, $q, at, $n, ]] .. SPREAD .. [[); F.a[$s] = n; at = at + n end
]])
    end
    return fmt [[
  do local n = put_list($op, $p, $q, $n, at); F.a[$s] = n; at = at + n end
]]
  elseif kind == "dtype?" then
    return fmt "  if $n == nil then F.a[$s] = -1 else F.a[$s] = to_dtype($n) end\n"
  elseif kind == "device?" then
    return fmt "  if $n == nil then F.a[$s] = -1 else F.a[$s] = to_device($n) end\n"
  end
  local words = kind:match "^enum%((.*)%)$"
  assert(words, "signature of " .. name .. ": type " .. kind)
  local code, i = "", 0
  for word in words:gmatch "[^|]+" do
    code = code .. fmt((i == 0 and "  if " or "  elseif ") .. "$n == " .. ("%q"):format(word) .. " then F.a[$s] = " .. i .. "\n")
    i = i + 1
  end
  return (arg.default and fmt("  if $n == nil then $n = " .. ("%q"):format(arg.default) .. " end\n") or "")
    .. code .. fmt("  else bad_value($op, $p, $q, $n, " .. ("%q"):format("word of " .. words:gsub("|", ", ")) .. ") end\n")
end

local TENSOR = { tensor = true, ["tensor?"] = true, operand = true, tensors = true }

local function generate(row, inplace)
  local args, params, body, optional = ops.args(row), {}, {}, {}
  local nt, na, lists = 0, 0, false
  local last = args[#args]
  if last and (last.type == "shape" or last.type == "dims" or last.type == "ints") then last.spread = true end
  for _, arg in ipairs(args) do
    params[#params + 1] = arg.name
    if not TENSOR[arg.type] and (arg.default or arg.type:sub(-1) == "?") then optional[#optional + 1] = arg.name end
    lists = lists or arg.type == "shape" or arg.type == "ints" or arg.type == "dims" or arg.type == "dims?" or arg.type == "tensors"
  end
  local header = table.concat(params, ", ") .. (last and last.spread and ", " .. SPREAD or "")
  -- An options table may stand in place of the optional arguments, from any of them on.
  for i, name in ipairs(optional) do
    body[#body + 1] = ("  if type(%s) == \"table\" and is_options(%s) then %s = options(%q, %s, names, %d) end\n"):format(
      name, name, table.concat(optional, ", ", i), row.name, name, i)
  end
  if row.signature:find "operand" then body[#body + 1] = "  local numbers = 0\n" end
  if lists then body[#body + 1] = "  local at = 0\n" end
  -- Lists of tensors come first in the frame's list, whatever their place in the signature.
  for position, arg in ipairs(args) do
    if arg.type == "tensors" then body[#body + 1] = store(row, arg, position, 0) end
  end
  for position, arg in ipairs(args) do
    if TENSOR[arg.type] and arg.type ~= "tensors" then
      body[#body + 1] = store(row, arg, position, nt)
      nt = nt + 1
    elseif arg.type ~= "tensors" then
      body[#body + 1] = store(row, arg, position, na)
      na = na + 1
    end
  end
  if row.signature:find "operand" then body[#body + 1] = "  F.numbers = numbers\n" end
  local all = table.concat(params, ", ")
  if last and last.spread then
    all = table.concat(params, ", ", 1, #params - 1) .. (#params > 1 and ", " or "") .. ("gather(%s, %s)"):format(last.name, SPREAD)
  end
  local changes = (inplace or row.mutates) and not row.name:find "_step$"
  local code = {
    "local s, id, names = ...\n",
    "local C, F, B, type, wrap, after, raise, to_dtype, to_device, nan = ",
    "s.C, s.F, s.B, s.type, s.wrap, s.after, s.raise, s.to_dtype, s.to_device, s.nan\n",
    "local bad_tensor, bad_value, is_options, options = s.bad_tensor, s.bad_value, s.is_options, s.options\n",
    "local put_list, put_spread, put_tensors, again = s.put_list, s.put_spread, s.put_tensors, s.again\n",
    "local gather, by_class = s.gather, s.by_class\n",
    "return function(", header, ")\n", table.concat(body),
    "  F.inplace = ", inplace and "1" or "0", "\n",
    row.random and "  F.generator = B.generator\n" or "",
    "  local rc = C.tm_dispatch(id, F)\n",
    "  if rc == 101 then return by_class(", ("%q"):format(row.name .. (changes and "_" or "")), ", { n = ", #params, ", ", all, " }) end\n",
    inplace and "  if rc ~= 0 and rc ~= 100 then raise() end\n"
      or "  if rc ~= 0 and rc ~= 100 then rc = again(rc, id, " .. table.concat(params, ", ") .. ") end\n",
  }
  if inplace or row.mutates then
    code[#code + 1] = "  if rc == 100 then after(" .. (args[1].type == "tensors" and "nil" or params[1]) .. ") end\n"
    code[#code + 1] = "  return " .. params[1] .. "\nend\n"
  else
    code[#code + 1] = [[
  local y = wrap(F.out[0], F.slot[0])
  if F.nout == 2 then
    local z = wrap(F.out[1], F.slot[1])
    if rc == 100 then after(y) end
    return y, z
  end
  if rc == 100 then after(y) end
  return y
end
]]
  end
  local source = table.concat(code)
  local chunk = assert(loadstring(source, "=[tmod " .. row.name .. "]"))
  return chunk(support, row.id, optional), source
end

local made = {}

---The function of a row, or of its in-place form (name_); nil if there is neither.
function ops.find(name)
  local f = made[name]
  if f ~= nil then return f or nil end
  local row, inplace = rows[name], false
  if row and row.mutates then row = nil end -- only name_ exists
  if not row and name:sub(-1) == "_" then
    row, inplace = rows[name:sub(1, -2)], true
    if row and not (row.inplace or row.mutates) then row = nil end
  end
  if not row and rows[name] and name:find "_step$" then row, inplace = rows[name], true end
  f = row and generate(row, inplace) or false
  made[name] = f
  return f or nil
end

---Lua source of the generated function, for the curious and for specs.
function ops.source(name)
  local inplace = not rows[name]
  local _, source = generate(rows[name] or rows[name:sub(1, -2)], inplace)
  return source
end

---ops.add(a, b): every row as a function, hidden ones too.
return setmetatable(ops, { __index = function(t, name)
  local f = ops.find(name)
  if f then rawset(t, name, f) end
  return f
end })
