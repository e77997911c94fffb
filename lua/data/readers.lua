---Files of other programs as tensors.

local B = require "tmod.ffi"
local C, ffi = B.C, B.ffi

local readers = {}

local function check_path(name, path)
  if type(path) ~= "string" then B.fail("TypeError", "%s: the path is a %s, expected a string", name, type(path)) end
  if path:find("\0", 1, true) then B.fail("ValueError", "%s: the path contains a zero byte", name) end
end

-- A file that is not there is no error but nil and a message.
local function result(p)
  if p ~= nil then return B.wrap(p) end
  if C.tm_last_code() == C.TM_EIO then return nil, ffi.string(C.tm_last_error()) end
  B.raise()
end

---Numbers separated by commas, a line per row, plain or gzipped. Blank lines and spaces around numbers are
---passed over; `nan` and `inf` are numbers.
---@param path string
---@param opts? {separator?: string, skip?: integer} separator: default ","; " " is any run of blanks; skip: lines of heading
---@return Tensor? x (rows, columns), float64
---@return string? message
function readers.csv(path, opts)
  check_path("tm.data.csv", path)
  opts = opts or {}
  for key in pairs(opts) do
    if key ~= "separator" and key ~= "skip" then
      B.fail("TypeError", "tm.data.csv: no option %s, expected separator, skip", tostring(key))
    end
  end
  local separator, skip = opts.separator or ",", opts.skip or 0
  if type(separator) ~= "string" or #separator ~= 1 then
    B.fail("TypeError", "tm.data.csv: the separator is %s, expected a string of one character", tostring(separator))
  end
  if type(skip) ~= "number" or skip < 0 or skip > 2 ^ 53 or skip % 1 ~= 0 then
    B.fail("ValueError", "tm.data.csv: skip is %s, expected a whole number of lines", tostring(skip))
  end
  return result(C.tm_csv_read(path, separator:byte(), skip))
end

---An array in the IDX format (MNIST, Fashion-MNIST), plain or gzipped, with its own shape and dtype.
---@param path string
---@return Tensor? x
---@return string? message
function readers.idx(path)
  check_path("tm.data.idx", path)
  return result(C.tm_idx_read(path))
end

return readers
