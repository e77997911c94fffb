---Tensors in safetensors files.

local B = require "tmod.ffi"
local OrderedDict = require "tmod.ordered"
local C, ffi = B.C, B.ffi

local checkpoint = {}

local function check_options(name, opts, known)
  if opts == nil then return {} end
  if type(opts) ~= "table" then B.fail("TypeError", "%s: options are a %s, expected a table", name, type(opts)) end
  for key in pairs(opts) do
    if not known[key] then
      local names = {}
      for k in pairs(known) do names[#names + 1] = k end
      table.sort(names)
      B.fail("TypeError", "%s: no option %s, expected %s", name, tostring(key), table.concat(names, ", "))
    end
  end
  return opts
end

local function check_path(name, path)
  if type(path) ~= "string" then B.fail("TypeError", "%s: the path is a %s, expected a string", name, type(path)) end
  if path:find("\0", 1, true) then B.fail("ValueError", "%s: the path contains a zero byte", name) end
end

-- C strings end at a zero byte.
local function check_string(what, s)
  if type(s) ~= "string" then B.fail("TypeError", "tm.save: %s is a %s, expected a string", what, type(s)) end
  if s:find("\0", 1, true) then B.fail("ValueError", "tm.save: %s contains a zero byte: %q", what, s) end
end

-- Iterates over an ordered dictionary or a plain table. C sorts, so the order does not matter.
local function each(t)
  if OrderedDict.is(t) then return OrderedDict.pairs(t) end
  if getmetatable(t) and type(t.pairs) == "function" then return t:pairs() end
  return pairs(t)
end

local function check_tensors(tensors)
  if type(tensors) ~= "table" then
    B.fail("TypeError", "tm.save: got a %s, expected a table of tensors by name", type(tensors))
  end
  if OrderedDict.is(tensors) then return end
  if B.is_tensor(tensors) then B.fail("TypeError", "tm.save: got a tensor, expected a table of tensors by name") end
  if type(tensors.state_dict) == "function" then
    B.fail("TypeError", "tm.save: got an object with its own state; save its tensors: tm.save(model:state_dict(), path)")
  end
end

---Writes a safetensors file, the same bytes as the Python library. Tensors that share memory are written once
---each, views as dense tensors. The file is written beside its place, synced and renamed, so that the old one
---stays whole until the new one is; a symbolic link stays, and the file it points to is replaced. A process that
---is killed while it saves leaves a file `.tmod-*.tmp` there.
---@param tensors table<string, Tensor> | OrderedDict
---@param path string
---@param opts? {metadata?: table<string, string>}
function checkpoint.save(tensors, path, opts)
  check_tensors(tensors)
  check_path("tm.save", path)
  local metadata = check_options("tm.save", opts, {metadata = true}).metadata or {}
  if type(metadata) ~= "table" then B.fail("TypeError", "tm.save: metadata is a %s, expected a table", type(metadata)) end

  if B.class_of then tensors, metadata = require "tmod.wrapper".pack(tensors, metadata, each) end
  local names, list, keys, values = {}, {}, {}, {}
  for name, tensor in each(tensors) do
    check_string("the key " .. tostring(name), name)
    local ok, p = pcall(B.ptr, tensor)
    if not ok then
      local why = type(p) == "table" and p.message or tostring(p)
      B.fail("TypeError", "tm.save: the value of %q is no tensor that can be saved: %s", name, why)
    end
    names[#names + 1], list[#list + 1] = name, p
  end
  for key, value in each(metadata) do
    check_string("the metadata key " .. tostring(key), key)
    check_string("the metadata of " .. key, value)
    keys[#keys + 1], values[#values + 1] = key, value
  end
  -- The Lua tables keep alive what the arrays point to.
  local strings = ffi.typeof "const char *[?]"
  local code = C.tm_safetensors_save(path, #names, strings(#names + 1, names), ffi.new("tm_tensor *[?]", #list + 1, list),
    #keys, strings(#keys + 1, keys), strings(#values + 1, values))
  if code ~= C.TM_OK then B.raise() end
end

---Reads a safetensors file: its tensors in the order of the file, and its metadata. A mapped file (the default)
---is read page by page when a tensor is used; writing into a tensor changes memory only.
---@param path string
---@param opts? {device?: string, mmap?: boolean} device: default "cpu"; mmap: default true
---@return OrderedDict? tensors nil if the file is not there or cannot be read
---@return table<string, string> | string metadata or the message
function checkpoint.load(path, opts)
  check_path("tm.load", path)
  opts = check_options("tm.load", opts, {device = true, mmap = true})
  local device = B.device(opts.device or "cpu")
  local file = C.tm_safetensors_open(path, opts.mmap ~= false and 1 or 0)
  if file == nil then
    if C.tm_last_code() == C.TM_EIO then return nil, ffi.string(C.tm_last_error()) end
    B.raise()
  end
  ffi.gc(file, C.tm_file_close) -- for errors below
  local tensors, metadata = OrderedDict.new(), {}
  for i = 0, tonumber(C.tm_file_count(file)) - 1 do
    local p = C.tm_file_tensor(file, i, device)
    if p == nil then B.raise() end
    tensors[ffi.string(C.tm_file_name(file, i))] = B.wrap(p)
  end
  for i = 0, tonumber(C.tm_file_metadata_count(file)) - 1 do
    metadata[ffi.string(C.tm_file_metadata(file, i, 0))] = ffi.string(C.tm_file_metadata(file, i, 1))
  end
  C.tm_file_close(ffi.gc(file, nil))
  for key in pairs(metadata) do
    if key:find("tmod.wrapper.", 1, true) == 1 then return require "tmod.wrapper".unpack(tensors, metadata) end
  end
  return tensors, metadata
end

return checkpoint
