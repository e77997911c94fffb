---utils.lua (nn.utils): parameters as one vector, clipped gradients, and a look into a model.

local B = require "tmod.ffi"
local Module = require "tmod.nn.module"
local OrderedDict = require "tmod.ordered"
local args = require "tmod.nn.args"
local autograd = require "tmod.autograd"
local ops = require "tmod.ops"
local options = require "tmod.functional".options
local parameter = require "tmod.nn.parameter"
local Tensor = require "tmod.tensor"

local None = parameter.None
local utils = { __name = "nn.utils" }

---A list of the tensors of a list, an iterator, or one tensor.
local function list_of(what, tensors)
  if B.is_tensor(tensors) then return { tensors } end
  local list = {}
  if type(tensors) == "function" then
    for t in tensors do list[#list + 1] = t end
  elseif type(tensors) == "table" then
    for i, t in ipairs(tensors) do list[i] = t end
  else
    B.fail("TypeError", "%s: expected tensors in a list or an iterator, got %s", what, B.type_name(tensors))
  end
  for i, t in ipairs(list) do
    if not B.is_tensor(t) then B.fail("TypeError", "%s: element %d is no tensor but a %s", what, i, B.type_name(t)) end
  end
  return list
end

-- vectors -------------------------------------------------------------------------------------------------------------------

---All elements of the parameters in one vector; gradients flow back into them.
function utils.parameters_to_vector(parameters)
  local list = list_of("parameters_to_vector", parameters)
  for i = 1, #list do list[i] = list[i]:reshape(-1) end
  return ops.cat(list)
end

---The parameters become parts of the vector.
function utils.vector_to_parameters(vector, parameters)
  local list, at, total = list_of("vector_to_parameters", parameters), 1, 0
  for _, p in ipairs(list) do total = total + p:numel() end
  if not B.is_tensor(vector) or vector:numel() ~= total then
    B.fail("ValueError", "vector_to_parameters: expected a vector of %d elements, got %s", total, B.is_tensor(vector)
      and vector:numel() or B.type_name(vector))
  end
  for _, p in ipairs(list) do
    p.data = vector:detach():narrow(1, at, p:numel()):view(p:size())
    at = at + p:numel()
  end
end

-- gradients -------------------------------------------------------------------------------------------------------------------

local function gradients(what, parameters)
  local grads = {}
  for _, p in ipairs(list_of(what, parameters)) do grads[#grads + 1] = p.grad end
  return grads
end

local function norm(t, p)
  if p == math.huge then return ops.amax(ops.abs(t)) end
  if p == 2 then return ops.sqrt(ops.sum(t * t)) end
  return ops.pow(ops.sum(ops.pow(ops.abs(t), p)), 1 / p)
end

local function total_norm(tensors, p)
  local norms = {}
  for _, t in ipairs(tensors) do
    if t:numel() > 0 then norms[#norms + 1] = norm(t, p) end
  end
  if #norms == 0 then return Tensor.zeros {} end
  return norm(ops.stack(norms), p)
end

local NORM = { norm_type = true, error_if_nonfinite = true }

---Norm of all tensors together, as if they were one vector.
---@param opts? {norm_type?: number, error_if_nonfinite?: boolean} norm_type: default 2, math.huge for the largest
function utils.get_total_norm(tensors, opts)
  opts = options(opts, "get_total_norm", NORM)
  local total = autograd.no_grad(total_norm, list_of("get_total_norm", tensors), opts.norm_type or 2)
  if opts.error_if_nonfinite and not ops.isfinite(total):item() then
    B.fail("RuntimeError", "get_total_norm: the norm of order %g is not finite", opts.norm_type or 2)
  end
  return total
end

local function clip(grads, total, max_norm)
  local scale = ops.clamp(max_norm / (total + 1e-6), nil, 1)
  for _, g in ipairs(grads) do ops.mul_(g, scale) end
end

---Scales all gradients so that together their norm is at most max_norm. Returns the norm they had.
---@param parameters Tensor | Tensor[] | fun(): Tensor
---@param opts? {norm_type?: number, error_if_nonfinite?: boolean}
function utils.clip_grad_norm_(parameters, max_norm, opts)
  local grads = gradients("clip_grad_norm_", parameters)
  local total = utils.get_total_norm(grads, opts)
  autograd.no_grad(clip, grads, total, max_norm)
  return total
end

local function clamp_all(grads, value)
  for _, g in ipairs(grads) do ops.clamp_(g, -value, value) end
end

---Limits each element of the gradients to [-value, value].
function utils.clip_grad_value_(parameters, value)
  autograd.no_grad(clamp_all, gradients("clip_grad_value_", parameters), value)
end

-- a look into a model -----------------------------------------------------------------------------------------------------------

local function with_commas(n)
  local text, k = ("%.0f"):format(n), 1
  while k > 0 do text, k = text:gsub("^(%-?%d+)(%d%d%d)", "%1,%2") end
  return text
end

local function bytes_text(n)
  if n < 1024 then return ("%d B"):format(n) end
  for _, unit in ipairs { "KB", "MB", "GB", "TB" } do
    n = n / 1024
    if n < 1024 or unit == "TB" then return ("%.1f %s"):format(n, unit) end
  end
end

local function bytes(t) return t:numel() * B.C.tm_dtype_size(B.dtype(t.dtype)) end

---Numbers and bytes of a module's own parameters and buffers, each tensor counted once in `seen`.
local function weigh(module, seen)
  local count, trained, size = 0, 0, 0
  for _, registry in ipairs { module._parameters, module._buffers } do
    for _, t in OrderedDict.pairs(registry) do
      if t ~= None and not seen[t] then
        seen[t] = true
        size = size + bytes(t)
        if registry == module._parameters then
          count = count + t:numel()
          if t.requires_grad then trained = trained + t:numel() end
        end
      end
    end
  end
  return count, trained, size
end

local function own_text(module)
  local extra = module:extra_repr():gsub("\n%s*", "; ")
  return module._short_name(module) .. (extra ~= "" and "(" .. extra .. ")" or "")
end

local function branch(module, indent, lines, seen, on_path)
  local names, values = OrderedDict.keys(module._modules), OrderedDict.values(module._modules)
  for i, name in ipairs(names) do
    local child, last = values[i], i == #names
    local stem = indent .. (last and "└─ " or "├─ ") .. name .. ": "
    if child == None then
      lines[#lines + 1] = stem .. "nil"
    elseif on_path[child] then
      lines[#lines + 1] = stem .. own_text(child) .. "  (contains itself)"
    else
      local shared = seen.modules[child]
      seen.modules[child] = true
      local count = weigh(child, seen)
      lines[#lines + 1] = stem .. own_text(child) .. (shared and "  (shared)" or count > 0 and "  " .. with_commas(count) or "")
      on_path[child] = true
      if not shared then branch(child, indent .. (last and "   " or "│  "), lines, seen, on_path) end
      on_path[child] = nil
    end
  end
end

---The modules below one as a tree, each with the number of its own parameters; a shared one is unfolded once.
---@return string
function utils.tree(module)
  local seen = { modules = { [module] = true } }
  local count = weigh(module, seen)
  local lines = { own_text(module) .. (count > 0 and "  " .. with_commas(count) or "") }
  branch(module, "", lines, seen, { [module] = true })
  return table.concat(lines, "\n")
end

---Shapes of a module's results as text, and their bytes.
local function describe(output)
  if B.is_tensor(output) then
    return "(" .. table.concat(output:size(), ", ") .. (output.ndim == 1 and ",)" or ")"), bytes(output)
  end
  if type(output) ~= "table" then return B.type_name(output), 0 end
  local texts, total, open, close = {}, 0, "{", "}"
  if args.is_args(output) then
    open, close = "", ""
    for i = 1, output.n do
      local text, size = describe(output[i])
      texts[i], total = text, total + size
    end
  else
    local keys = {}
    for k in pairs(output) do keys[#keys + 1] = k end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    for _, k in ipairs(keys) do
      local text, size = describe(output[k])
      texts[#texts + 1], total = (type(k) == "string" and k .. " = " or "") .. text, total + size
    end
  end
  return open .. table.concat(texts, ", ") .. close, total
end

local Summary = { __name = "nn.Summary" }
Summary.__index = Summary

---Characters, not bytes, of UTF-8.
local function width(s) return select(2, s:gsub("[^\128-\191]", "")) end

function Summary.__tostring(s)
  local cells = { { "layer", "output", "parameters", "memory", "output memory" } }
  for _, row in ipairs(s.rows) do
    cells[#cells + 1] = { ("  "):rep(row.depth) .. (row.name == "" and "" or row.name .. ": ") .. row.class, row.output or "-",
      row.shared and "(shared)" or row.parameters > 0 and with_commas(row.parameters) or "-", row.bytes > 0
        and bytes_text(row.bytes) or "-",
      row.output_bytes > 0 and bytes_text(row.output_bytes) or "-" }
  end
  local widths, lines = {}, {}
  for _, row in ipairs(cells) do
    for k, text in ipairs(row) do widths[k] = math.max(widths[k] or 0, width(text)) end
  end
  for i, row in ipairs(cells) do
    local line = {}
    for k, text in ipairs(row) do
      local gap = (" "):rep(widths[k] - width(text))
      line[k] = k <= 2 and text .. gap or gap .. text
    end
    lines[#lines + 1] = (table.concat(line, "  "):gsub("%s+$", ""))
    if i == 1 then lines[2] = ("-"):rep(width(table.concat(line, "  "))) end
  end
  lines[#lines + 1] = lines[2]
  lines[#lines + 1] = ("parameters: %s, trained: %s, memory: %s, outputs: %s"):format(with_commas(s.parameters), with_commas(s.trained),
    bytes_text(s.bytes), bytes_text(s.output_bytes))
  return table.concat(lines, "\n")
end

---Hooks on every module that write a row for each call; calls made by others stand below them.
local function watch(model, summary, handles)
  local open, seen, called = {}, {}, {}
  for path, module in model:named_modules() do
    handles[#handles + 1] = module:register_forward_pre_hook(function(m)
      local count, trained, size = weigh(m, seen)
      local row = { path = path, name = path:match "[^.]*$", depth = #open, class = m._short_name(m), parameters = count, bytes = size,
        shared = called[m] and next(m._parameters:keys()) ~= nil, output_bytes = 0, module = m }
      called[m] = true
      summary.rows[#summary.rows + 1], open[#open + 1] = row, row
      summary.parameters, summary.trained, summary.bytes = summary.parameters + count, summary.trained + trained, summary.bytes + size
    end)
    handles[#handles + 1] = module:register_forward_hook(function(m, _, output)
      local row = table.remove(open)
      row.output, row.output_bytes = describe(output)
      if #m._modules:keys() == 0 then summary.output_bytes = summary.output_bytes + row.output_bytes end
    end)
  end
  return seen
end

local function run(model, modes, ...)
  for m in model:modules() do modes[m] = m.training end
  model:eval()
  return autograd.no_grad(model, ...)
end

local function is_sizes(x) return type(x) == "table" and getmetatable(x) == nil and #x > 0 and type(x[1]) == "number" end

---Runs the model once, in evaluation mode and without gradients, and tells of each call: the layer, the shape of what it
---returned, its own parameters (each counted once), and memory. tostring gives a table; fields: rows (in order of the
---calls), parameters, trained, bytes, output_bytes (of modules without children).
---@param model nn.Module
---@param ... any the model's arguments; a list of sizes stands for random numbers of that shape
function utils.summary(model, ...)
  if not Module._is_module(model) then B.fail("TypeError", "summary: expected a module, got %s", B.type_name(model)) end
  local inputs = args.args(...)
  for i = 1, inputs.n do
    if is_sizes(inputs[i]) then
      local p = model:parameters()()
      inputs[i] = Tensor.randn(inputs[i], { dtype = p and p.dtype, device = p and p.device })
    end
  end
  local summary = setmetatable({ rows = {}, parameters = 0, trained = 0, bytes = 0, output_bytes = 0 }, Summary)
  local handles, modes = {}, {}
  local seen = watch(model, summary, handles)
  local ok, e = pcall(run, model, modes, unpack(inputs, 1, inputs.n))
  for _, handle in ipairs(handles) do handle:remove() end
  for m, mode in pairs(modes) do m.training = mode end
  if not ok then error(e, 0) end
  for m in model:modules() do -- those that were not called
    local count, trained, size = weigh(m, seen)
    summary.parameters, summary.trained, summary.bytes = summary.parameters + count, summary.trained + trained, summary.bytes + size
  end
  return summary
end

return utils
