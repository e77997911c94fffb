---embedding.lua: vectors by number.

local B = require "tmod.ffi"
local F = require "tmod.functional"
local Module = require "tmod.nn.module"
local Tensor = require "tmod.tensor"
local initializers = require "tmod.nn.initializers"
local Parameter = require "tmod.nn.parameter".Parameter

---The rows of a table at the ids of the input, which count from 1.
---@class nn.Embedding : nn.Module
---@field weight Tensor (num_embeddings, embedding_dim)
---@field padding_idx? integer from 1
local Embedding = Module:extend "nn.Embedding"

local OPTIONS = { padding_idx = true, max_norm = true, norm_type = true, scale_grad_by_freq = true, dtype = true, device = true }

---@param num_embeddings integer
---@param embedding_dim integer
---@alias EmbeddingOptions {padding_idx?: integer, max_norm?: number, norm_type?: number, scale_grad_by_freq?: boolean}
---@param opts? EmbeddingOptions | {dtype?: string, device?: string}
---padding_idx: a row of zeros that gets no gradient (negative: from the end); max_norm: rows in use are scaled down to it,
---in place; scale_grad_by_freq: the gradient of a row is divided by how often its id is in the input
function Embedding:init(num_embeddings, embedding_dim, opts)
  opts = F.options(opts, "nn.Embedding", OPTIONS)
  B.need_size("nn.Embedding", "num_embeddings", num_embeddings)
  B.need_size("nn.Embedding", "embedding_dim", embedding_dim)
  local n, padding = num_embeddings, opts.padding_idx
  if padding ~= nil then
    if type(padding) ~= "number" or padding == 0 or padding > n or padding < -n or padding ~= math.floor(padding) then
      B.fail("ValueError", "nn.Embedding: padding_idx is %s, expected 1 to %d, or negative from the end", tostring(padding), n)
    end
    if padding < 0 then padding = n + padding + 1 end
  end
  self.num_embeddings, self.embedding_dim, self.padding_idx = n, embedding_dim, padding
  self.max_norm, self.norm_type, self.scale_grad_by_freq = opts.max_norm, opts.norm_type or 2, opts.scale_grad_by_freq or false
  self.weight = Parameter(Tensor.empty(n, embedding_dim, { dtype = opts.dtype, device = opts.device }))
  self:reset_parameters()
end

---Standard normal numbers; 0 at padding_idx.
function Embedding:reset_parameters()
  initializers.normal_(self.weight)
  if self.padding_idx then initializers.zeros_(self.weight:detach()[self.padding_idx]) end
end

---A module over a table that is there already, frozen unless freeze = false.
---@param weight Tensor (n, dim)
---@param opts? {freeze?: boolean, padding_idx?: integer, max_norm?: number, norm_type?: number, scale_grad_by_freq?: boolean}
function Embedding:from_pretrained(weight, opts)
  if not B.is_tensor(weight) or weight.ndim ~= 2 then
    B.fail("ValueError", "nn.Embedding: from_pretrained expects a tensor of 2 dims, got %s", B.is_tensor(weight) and weight.ndim
      .. " dims" or B.type_name(weight))
  end
  local own, freeze = { device = "meta" }, true
  for k, v in pairs(opts or {}) do
    if k == "freeze" then freeze = v else own[k] = v end
  end
  local m = self(weight:size(1), weight:size(2), own)
  m.weight = Parameter(weight, not freeze)
  return m
end

local embedding, index_select = F.embedding, F.index_select
local ARGUMENTS = { "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq" }

function Embedding:forward(ids)
  local weight = self.weight
  if B.is_tensor(ids) and ids.ndim == 1 and not self.padding_idx and not self.max_norm and not self.scale_grad_by_freq then
    return index_select(weight, 1, ids)
  end
  local opts = {}
  for i = 1, #ARGUMENTS do opts[ARGUMENTS[i]] = self[ARGUMENTS[i]] end
  return embedding(ids, weight, opts)
end

function Embedding:extra_repr()
  local text = ("%d, %d"):format(self.num_embeddings, self.embedding_dim)
  if self.padding_idx then text = text .. ", padding_idx=" .. self.padding_idx end
  if self.max_norm then text = text .. ", max_norm=" .. self.max_norm end
  if self.norm_type ~= 2 then text = text .. ", norm_type=" .. self.norm_type end
  if self.scale_grad_by_freq then text = text .. ", scale_grad_by_freq=true" end
  return text
end

return Embedding
