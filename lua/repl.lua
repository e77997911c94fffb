---The prompt of tmodrun: reads a line, runs it, prints what it returns. Nothing that a line does ends it but
---the end of input; `tm`, `nn` and `F` are globals of the session.

---@param line string
---@return function|nil chunk
---@return boolean|nil unfinished  the text is the beginning of something longer
---@return string|nil message
local function compile(line)
  local as_value, why = loadstring("return " .. line:gsub("^=", ""), "=stdin")
  if as_value then return as_value end
  local chunk, message = loadstring(line, "=stdin")
  if chunk then return chunk end
  -- Both are asked: "1 +" is unfinished only as a value, "for i = 1, 3 do" only as a statement.
  local unfinished = message:find "'<eof>'$" or why:find "'<eof>'$"
  return nil, unfinished ~= nil, message
end

---A whole chunk, over as many lines as it takes.
---@param read fun(prompt: string): string|false|nil
---@return string|false|nil line the first line: false when cancelled, nil at the end
---@return function|nil chunk
---@return string|nil message
local function read_chunk(read)
  local text = read "> "
  if not text then return text end
  while true do
    local chunk, unfinished, message = compile(text)
    if not unfinished then return text, chunk, message end
    local more = read ">> "
    if not more then return more end
    text = text .. "\n" .. more
  end
end

---@param read fun(prompt: string): string|false|nil a line; false after Ctrl-C; nil at the end
---@param call fun(f: function, ...): boolean, ... as pcall, with the traceback in the message
return function(read, call)
  local function fail(message) io.stderr:write(tostring(message), "\n") end

  local function print_results(ok, ...)
    if not ok then return fail((...)) end
    if select("#", ...) == 0 then return end
    local printed, message = call(print, ...) -- a __tostring may fail
    if not printed then fail(message) end
  end

  local ok, why = call(function()
    local tm = require "tmod"
    _G.tm, _G.nn, _G.F = tm, tm.nn, tm.nn.functional
  end)
  if not ok then fail(why) end
  while true do
    local line, chunk, message = read_chunk(read)
    if line == nil then break end
    if chunk then print_results(call(chunk)) elseif message then fail(message) end
    io.stdout:flush()
  end
  print()
end
