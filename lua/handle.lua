---handle.lua: what registering a hook returns: a number that grows through the process, and the way to remove it.

local B = require "tmod.ffi"

local Handle = {}
Handle.__index = Handle
Handle.__name = "RemovableHandle"

---A number no other hook has, those of tensors included.
function Handle.next_id() return tonumber(B.C.tm_id_new()) end

---@param owner any what the hook is registered on; held weakly, so that a stored handle keeps nothing alive
---@param id integer
---@param remover fun(owner: any, id: integer)
function Handle.new(owner, id, remover)
  return setmetatable({ id = id, _owner = setmetatable({ owner }, { __mode = "v" }), _remover = remover }, Handle)
end

---Removes the hook; doing so twice is allowed.
function Handle:remove()
  local owner = self._owner[1]
  if owner ~= nil then self._remover(owner, self.id) end
  self._owner[1] = nil
end

local function finish(handle, ok, ...)
  handle:remove()
  if not ok then error((...), 0) end
  return ...
end

---Runs fn(...) and removes the hook whatever happens; returns fn's results or raises its error.
function Handle:with(fn, ...) return finish(self, pcall(fn, ...)) end

return Handle
