---reference.lua: what the operator table says, for people and for editors. Nothing here knows an operator by name.

local ops = require "tmod.ops"

local reference = {}

local TYPE = { tensor = "Tensor", ["tensor?"] = "Tensor?", operand = "Tensor|number", tensors = "Tensor[]", num = "number",
  ["num?"] = "number?", int = "integer", bool = "boolean", dim = "integer", ["dim?"] = "integer?", newdim = "integer",
  dims = "integer[]", ["dims?"] = "integer|integer[]?", index = "integer", shape = "integer[]", ints = "integer[]",
  ["dtype?"] = "string?", ["device?"] = "string?" }

local function lua_type(arg)
  local words = arg.type:match "^enum%((.*)%)$"
  if not words then return TYPE[arg.type] end
  return "\"" .. words:gsub("|", "\"|\"") .. "\""
end

---"softmax(x, dim=-1)"
local function call_text(row)
  local parts = {}
  for i, arg in ipairs(ops.args(row)) do
    parts[i] = arg.name .. (arg.default and "=" .. arg.default or arg.type:sub(-1) == "?" and "=nil" or "")
  end
  local name = row.mutates and row.name .. "_" or row.name
  return name .. "(" .. table.concat(parts, ", ") .. ")"
end

local function notes(row)
  local list = {}
  if row.view then list[#list + 1] = "view" end
  if row.inplace and not row.mutates then list[#list + 1] = "in place: " .. row.name .. "_" end
  if row.mutates then list[#list + 1] = "changes its tensor" end
  if row.random then list[#list + 1] = "random" end
  if not row.diff then list[#list + 1] = "no gradient" elseif row.first_order then list[#list + 1] = "gradient of first order" end
  return table.concat(list, "; ")
end

---Help for one operator, as text; nil if there is none of this name.
function reference.help(name)
  local row = ops.rows[name] or ops.rows[name:gsub("_$", "")]
  if not row then return nil end
  local lines = { call_text(row), "  " .. row.doc }
  for _, arg in ipairs(ops.args(row)) do lines[#lines + 1] = ("  %s: %s"):format(arg.name, lua_type(arg)) end
  if notes(row) ~= "" then lines[#lines + 1] = "  (" .. notes(row) .. ")" end
  return table.concat(lines, "\n")
end

---The table of operators in Markdown.
function reference.markdown()
  local lines = { "# Operators", "", "Dims and positions count from 1. Optional arguments may be given by name in a table, last.", "",
    "| operator | meaning | |", "|---|---|---|" }
  for _, name in ipairs(ops.names) do
    local row = ops.rows[name]
    lines[#lines + 1] = ("| `%s` | %s | %s |"):format(call_text(row), row.doc:gsub("|", "\\|"), notes(row))
  end
  return table.concat(lines, "\n") .. "\n"
end

---Type annotations (LuaCATS) of the tensor methods, for language servers.
function reference.annotations()
  local lines = { "---@meta", "", "---@class Tensor", "---@operator add(Tensor|number): Tensor", "---@operator sub(Tensor|number): Tensor",
    "---@operator mul(Tensor|number): Tensor", "---@operator div(Tensor|number): Tensor", "---@operator pow(Tensor|number): Tensor",
    "---@operator unm: Tensor", "local Tensor = {}", "" }
  for _, name in ipairs(ops.names) do
    local row = ops.rows[name]
    local args = ops.args(row)
    if not row.hidden and args[1].type ~= "tensors" then
      lines[#lines + 1] = "---" .. row.doc
      local params = {}
      for i = 2, #args do
        params[#params + 1] = args[i].name
        lines[#lines + 1] = ("---@param %s%s %s"):format(args[i].name, args[i].default and "?" or "", lua_type(args[i]))
      end
      lines[#lines + 1] = "---@return Tensor"
      for _, form in ipairs(row.mutates and { "_" } or row.inplace and { "", "_" } or { "" }) do
        lines[#lines + 1] = ("function Tensor:%s%s(%s) end"):format(name, form, table.concat(params, ", "))
      end
      lines[#lines + 1] = ""
    end
  end
  lines[#lines + 1] = "return Tensor"
  return table.concat(lines, "\n") .. "\n"
end

return reference
