/* views.c: other shapes of the same elements. A rule makes the result itself, sharing the storage; nothing is
** copied but where reshape must. */
#include "internal.h"

/* The result: x's elements under another geometry. */
static int view_out(tm_call *c, int ndim, const int64_t *size, const int64_t *stride, int64_t offset) {
  int64_t numel = tm_numel_of(ndim, size);
  tm_tensor *y = tm_tensor_alias(c->in[0]);
  if (!y) return TM_EMEM;
  y->c.flags &= (uint8_t)~TM_FLAG_WRAPPED;
  y->c.ndim = (int8_t)ndim;
  y->c.numel = numel;
  y->c.offset = offset;
  memcpy(y->c.size, size, (size_t)ndim * sizeof *size);
  memcpy(y->c.stride, stride, (size_t)ndim * sizeof *stride);
  c->out[0] = y;
  c->nout = 1;
  return TM_OK;
}

typedef struct geometry {
  int ndim;
  int64_t size[TM_MAXDIM], stride[TM_MAXDIM];
} geometry;

static geometry geometry_of(const tm_tensor *x) {
  geometry g = {.ndim = x->c.ndim};
  memcpy(g.size, x->c.size, sizeof g.size);
  memcpy(g.stride, x->c.stride, sizeof g.stride);
  return g;
}

static int view_geometry(tm_call *c, const geometry *g, int64_t offset) { return view_out(c, g->ndim, g->size, g->stride, offset); }

static void drop_dim(geometry *g, int d) {
  memmove(g->size + d, g->size + d + 1, (size_t)(g->ndim - d - 1) * sizeof *g->size);
  memmove(g->stride + d, g->stride + d + 1, (size_t)(g->ndim - d - 1) * sizeof *g->stride);
  g->ndim--;
}

/* -- view and reshape -- */

/* The wanted shape with its -1 worked out. */
static int resolve_shape(const tm_call *c, int64_t *size, int *ndim) {
  const tm_tensor *x = c->in[0];
  const char *name = c->op->name;
  int hole = -1;
  int64_t known = 1;
  char text[160];
  *ndim = (int)c->a[0];
  for (int i = 0; i < *ndim; i++) {
    size[i] = c->list[0][i];
    if (size[i] == -1 && hole < 0) hole = i;
    else if (size[i] < 0) return tm_fail(TM_ERUNTIME, "%s: size %lld at dim %d; only one size may be -1", name, (long long)size[i], i + 1);
    else if (__builtin_mul_overflow(known, size[i], &known)) known = -2, i = *ndim;
  }
  if (hole >= 0 && known > 0 && x->c.numel % known == 0) size[hole] = x->c.numel / known, known = x->c.numel;
  else if (hole >= 0 && known == 0)
    return tm_fail(TM_ERUNTIME, "%s: -1 beside a size of 0 could be any size; shape %s for %s", name,
                   tm_shape_text(text, sizeof text, *ndim, c->list[0]), tm_say(x));
  if (known != x->c.numel)
    return tm_fail(TM_ERUNTIME, "%s: shape %s does not hold the %lld elements of %s", name,
                   tm_shape_text(text, sizeof text, *ndim, c->list[0]), (long long)x->c.numel, tm_say(x));
  return TM_OK;
}

/* Strides of `size` over x's elements, if there are some: each run of x's dims that lie densely one in another
** must be a product of consecutive wanted sizes. */
static bool view_strides(const tm_tensor *x, int ndim, const int64_t *size, int64_t *stride) {
  if (x->c.numel == 0) {
    tm_contiguous_strides(ndim, size, stride);
    return true;
  }
  int v = ndim - 1;
  int64_t run = 1, base = x->c.ndim ? x->c.stride[x->c.ndim - 1] : 1, filled = 1;
  for (int d = x->c.ndim - 1; d >= 0; d--) {
    run *= x->c.size[d];
    if (d == 0 || (x->c.size[d - 1] != 1 && x->c.stride[d - 1] != run * base)) {
      while (v >= 0 && (filled < run || size[v] == 1)) {
        stride[v] = filled * base;
        filled *= size[v--];
      }
      if (filled != run) return false;
      if (d > 0) run = 1, filled = 1, base = x->c.stride[d - 1];
    }
  }
  for (; v >= 0; v--) {
    if (size[v] != 1) return false;
    stride[v] = 1;
  }
  return true;
}

int tm_infer_view(tm_call *c) {
  geometry g;
  if (resolve_shape(c, g.size, &g.ndim) != TM_OK) return tm_last_code();
  if (!view_strides(c->in[0], g.ndim, g.size, g.stride))
    return tm_fail(TM_ERUNTIME, "view: the strides of %s do not allow a view of this shape; use reshape", tm_say(c->in[0]));
  return view_geometry(c, &g, c->in[0]->c.offset);
}

int tm_infer_reshape(tm_call *c) {
  geometry g;
  tm_tensor *x = c->in[0];
  if (resolve_shape(c, g.size, &g.ndim) != TM_OK) return tm_last_code();
  if (view_strides(x, g.ndim, g.size, g.stride)) return view_geometry(c, &g, x->c.offset);
  tm_tensor *y = tm_tensor_dense(x);
  if (!y) return tm_last_code();
  y->c.ndim = (int8_t)g.ndim;
  memcpy(y->c.size, g.size, sizeof g.size);
  tm_contiguous_strides(g.ndim, g.size, y->c.stride);
  c->out[0] = y;
  c->nout = 1;
  return TM_OK;
}

static int reshape_back(tm_vjp *v) {
  v_set(v, 0, v_reshape(v, v->dy[0], v->xm[0].ndim, v->xm[0].size));
  return TM_OK;
}
int tm_view_vjp(tm_vjp *v) { return reshape_back(v); }
int tm_reshape_vjp(tm_vjp *v) { return reshape_back(v); }
int tm_squeeze_vjp(tm_vjp *v) { return reshape_back(v); }
int tm_unsqueeze_vjp(tm_vjp *v) { return reshape_back(v); }

/* -- dims in another order, more of them, fewer -- */

int tm_infer_transpose(tm_call *c) {
  geometry g = geometry_of(c->in[0]);
  int a = (int)c->a[0], b = (int)c->a[1];
  if (g.ndim > 0) {
    int64_t size = g.size[a], stride = g.stride[a];
    g.size[a] = g.size[b], g.stride[a] = g.stride[b];
    g.size[b] = size, g.stride[b] = stride;
  }
  return view_geometry(c, &g, c->in[0]->c.offset);
}
int tm_transpose_vjp(tm_vjp *v) {
  v_set(v, 0, v_transpose(v, v->dy[0], (int)v->a[0], (int)v->a[1]));
  return TM_OK;
}

int tm_infer_permute(tm_call *c) {
  const tm_tensor *x = c->in[0];
  geometry g = {.ndim = x->c.ndim};
  if ((int)c->a[0] != g.ndim) return tm_fail(TM_ERUNTIME, "permute: %d dims given for %s, expected each once", (int)c->a[0], tm_say(x));
  for (int i = 0; i < g.ndim; i++) g.size[i] = x->c.size[c->list[0][i]], g.stride[i] = x->c.stride[c->list[0][i]];
  return view_geometry(c, &g, x->c.offset);
}
int tm_permute_vjp(tm_vjp *v) {
  int n = (int)v->a[0];
  int64_t back[TM_MAXDIM];
  const int64_t *list[1] = {back};
  for (int i = 0; i < n; i++) back[v->list[0][i]] = i;
  v_set(v, 0, v_run(v, TM_OPC_permute, 1, &v->dy[0], &(double){n}, list));
  return TM_OK;
}

int tm_infer_squeeze(tm_call *c) {
  geometry g = geometry_of(c->in[0]);
  int n = (int)c->a[0];
  bool chosen[TM_MAXDIM] = {false};
  for (int i = 0; i < n && g.ndim > 0; i++) chosen[c->list[0][i]] = true;
  for (int d = g.ndim - 1; d >= 0; d--)
    if (g.size[d] == 1 && (n < 0 || chosen[d])) drop_dim(&g, d);
  return view_geometry(c, &g, c->in[0]->c.offset);
}

int tm_infer_unsqueeze(tm_call *c) {
  geometry g = geometry_of(c->in[0]);
  int d = (int)c->a[0];
  if (g.ndim == TM_MAXDIM)
    return tm_fail(TM_ERUNTIME, "unsqueeze: %s has %d dims, which is the most there can be", tm_say(c->in[0]), TM_MAXDIM);
  int64_t stride = d < g.ndim ? g.size[d] * g.stride[d] : 1;
  memmove(g.size + d + 1, g.size + d, (size_t)(g.ndim - d) * sizeof *g.size);
  memmove(g.stride + d + 1, g.stride + d, (size_t)(g.ndim - d) * sizeof *g.stride);
  g.size[d] = 1, g.stride[d] = stride;
  g.ndim++;
  return view_geometry(c, &g, c->in[0]->c.offset);
}

int tm_infer_expand(tm_call *c) {
  const tm_tensor *x = c->in[0];
  geometry g = {.ndim = (int)c->a[0]};
  int lead = g.ndim - x->c.ndim;
  char text[160];
  if (lead < 0) goto bad;
  for (int i = 0; i < g.ndim; i++) {
    int64_t want = c->list[0][i], have = i < lead ? 1 : x->c.size[i - lead];
    if (want == -1 && i >= lead) want = have;
    if (want < 0 || (have != 1 && want != have)) goto bad;
    g.size[i] = want;
    g.stride[i] = i < lead || have != want ? 0 : x->c.stride[i - lead];
  }
  if (tm_numel_of(g.ndim, g.size) < 0) goto bad;
  return view_geometry(c, &g, x->c.offset);
bad:
  return tm_fail(TM_ERUNTIME, "expand: %s cannot be expanded to %s: counted from the end, a size must be equal or 1", tm_say(x),
                 tm_shape_text(text, sizeof text, g.ndim, c->list[0]));
}
int tm_expand_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]); /* the engine sums it to the shape of x */
  return TM_OK;
}

/* -- parts of a dim -- */

static int needs_dim(const tm_call *c) {
  if (c->in[0]->c.ndim == 0) return tm_fail(TM_EINDEX, "%s: %s has no dim to take positions of", c->op->name, tm_say(c->in[0]));
  return TM_OK;
}

int tm_infer_select(tm_call *c) {
  if (needs_dim(c) != TM_OK) return TM_EINDEX;
  const tm_tensor *x = c->in[0];
  geometry g = geometry_of(x);
  int d = (int)c->a[0];
  int64_t n = g.size[d], i = (int64_t)c->a[1], at = i < 0 ? i + n : i;
  if (at < 0 || at >= n)
    return tm_fail(TM_EINDEX, "select: position %lld of dim %d of %s, expected 1 to %lld or negative from the end",
                   (long long)(i < 0 ? i : i + 1), d + 1, tm_say(x), (long long)n);
  int64_t offset = x->c.offset + at * g.stride[d];
  drop_dim(&g, d);
  return view_geometry(c, &g, offset);
}

/* dx is zero but for a window of it: what select, narrow and slice have in common. */
static int window_back(tm_vjp *v, int d, int64_t first, int64_t length, int64_t step) {
  const tm_inmeta *m = &v->xm[0];
  int64_t base[TM_MAXDIM], size[TM_MAXDIM], stride[TM_MAXDIM];
  tm_contiguous_strides(m->ndim, m->size, base);
  memcpy(size, m->size, sizeof size);
  memcpy(stride, base, sizeof stride);
  size[d] = length, stride[d] = base[d] * step;
  tm_tensor *in[2] = {v_zeros(v, m), v_reshape(v, v->dy[0], m->ndim, size)};
  double a[5] = {m->ndim, m->ndim, m->ndim, (double)(first * base[d]), 0};
  const int64_t *list[5] = {base, size, stride};
  v_set(v, 0, v_run(v, TM_OPC_fill_strided, 2, in, a, list));
  return TM_OK;
}

int tm_select_vjp(tm_vjp *v) {
  int d = (int)v->a[0];
  int64_t i = (int64_t)v->a[1];
  return window_back(v, d, i < 0 ? i + v->xm[0].size[d] : i, 1, 1);
}

int tm_infer_narrow(tm_call *c) {
  if (needs_dim(c) != TM_OK) return TM_EINDEX;
  const tm_tensor *x = c->in[0];
  geometry g = geometry_of(x);
  int d = (int)c->a[0];
  int64_t n = g.size[d], i = (int64_t)c->a[1], start = i < 0 ? i + n : i, length = (int64_t)c->a[2];
  if (length < 0 || start < 0 || start > n || length > n - start)
    return tm_fail(TM_EINDEX, "narrow: %lld positions from %lld on of dim %d of %s, which has %lld", (long long)length,
                   (long long)(i < 0 ? i : i + 1), d + 1, tm_say(x), (long long)n);
  g.size[d] = length;
  return view_geometry(c, &g, x->c.offset + start * g.stride[d]);
}
int tm_narrow_vjp(tm_vjp *v) {
  int d = (int)v->a[0];
  int64_t i = (int64_t)v->a[1];
  return window_back(v, d, i < 0 ? i + v->xm[0].size[d] : i, (int64_t)v->a[2], 1);
}

/* first..last inclusive, every step-th. An empty range (last just before first) gives size 0. */
static int slice_range(int64_t n, const double *a, int64_t *first, int64_t *count, int64_t *step) {
  int64_t i = (int64_t)a[1], j = (int64_t)a[2];
  *step = (int64_t)a[3];
  *first = i < 0 ? i + n : i;
  int64_t last = j < 0 ? j + n : j;
  if (*step < 1 || *first < 0 || last >= n || *first > last + 1) return 0;
  *step = TM_MIN(*step, TM_MAX(n, 1)); /* a longer one takes the same element, and its stride might be no number */
  *count = last < *first ? 0 : (last - *first) / *step + 1;
  return 1;
}

int tm_infer_slice(tm_call *c) {
  if (needs_dim(c) != TM_OK) return TM_EINDEX;
  const tm_tensor *x = c->in[0];
  geometry g = geometry_of(x);
  int d = (int)c->a[0];
  int64_t first = 0, count = 0, step = 1, i = (int64_t)c->a[1], j = (int64_t)c->a[2];
  if (!slice_range(g.size[d], c->a, &first, &count, &step))
    return tm_fail(TM_EINDEX, "slice: positions %lld to %lld, step %lld, of dim %d of %s, which has %lld", (long long)(i < 0 ? i : i + 1),
                   (long long)(j < 0 ? j : j + 1), (long long)step, d + 1, tm_say(x), (long long)g.size[d]);
  int64_t offset = x->c.offset + (count ? first * g.stride[d] : 0);
  g.size[d] = count, g.stride[d] *= step;
  return view_geometry(c, &g, offset);
}
int tm_slice_vjp(tm_vjp *v) {
  int d = (int)v->a[0];
  int64_t first = 0, count = 0, step = 1;
  slice_range(v->xm[0].size[d], v->a, &first, &count, &step);
  return window_back(v, d, count ? first : 0, count, step);
}

/* -- any geometry -- */

/* Furthest element of a window, counted from its first; -1 for an empty one. INT64_MAX: farther than that counts. */
static int64_t extent(int ndim, const int64_t *size, const int64_t *stride) {
  int64_t last = 0, reach;
  for (int i = 0; i < ndim; i++)
    if (size[i] == 0) return -1;
  for (int i = 0; i < ndim; i++)
    if (__builtin_mul_overflow(size[i] - 1, stride[i], &reach) || __builtin_add_overflow(last, reach, &last)) return INT64_MAX;
  return last;
}

/* No two positions share an element: each stride, from the smallest on, steps over all before it. */
static bool disjoint(int ndim, const int64_t *size, const int64_t *stride) {
  int64_t reach = 0;
  uint32_t done = 0;
  for (int k = 0; k < ndim; k++) {
    int least = -1;
    for (int i = 0; i < ndim; i++)
      if (!(done >> i & 1) && (least < 0 || stride[i] < stride[least])) least = i;
    done |= 1u << least;
    if (size[least] > 1 && stride[least] <= reach) return false;
    reach += TM_MAX(size[least] - 1, 0) * stride[least];
  }
  return true;
}

static int check_window(const tm_call *c, int shape, int strides, int64_t offset, int64_t available) {
  const char *name = c->op->name;
  if (c->a[shape] != c->a[strides])
    return tm_fail(TM_EVALUE, "%s: %d sizes and %d strides, expected as many of both", name, (int)c->a[shape], (int)c->a[strides]);
  for (int i = 0; i < (int)c->a[shape]; i++)
    if (c->list[shape][i] < 0 || c->list[strides][i] < 0 || c->list[shape][i] > INT32_MAX * 4096ll ||
        c->list[strides][i] > INT32_MAX * 4096ll)
      return tm_fail(TM_EVALUE, "%s: size %lld, stride %lld at dim %d, expected none negative", name, (long long)c->list[shape][i],
                     (long long)c->list[strides][i], i + 1);
  int64_t last = extent((int)c->a[shape], c->list[shape], c->list[strides]);
  if (offset < 0 || (last >= 0 && last >= available - offset))
    return tm_fail(TM_EINDEX, "%s: elements up to %lld after offset %lld, but the storage holds %lld", name, (long long)last,
                   (long long)offset, (long long)available);
  return TM_OK;
}

int tm_infer_as_strided(tm_call *c) {
  const tm_tensor *x = c->in[0];
  int64_t available = (int64_t)x->c.storage->bytes / tm_dtype_size(x->c.dtype), offset = (int64_t)c->a[2];
  if (check_window(c, 0, 1, offset, available) != TM_OK) return tm_last_code();
  return view_out(c, (int)c->a[0], c->list[0], c->list[1], offset);
}

/* The storage seen through a dense base: positions of base_strides are the storage's, less the base's offset. */
int tm_as_strided_vjp(tm_vjp *v) {
  const tm_inmeta *m = &v->xm[0];
  const tm_layout *base = v->layout;
  if (m->ndim && extent(m->ndim, m->size, base->stride) != tm_numel_of(m->ndim, m->size) - 1 && tm_numel_of(m->ndim, m->size))
    return tm_fail(TM_ENOTIMPL, "as_strided: the gradient needs an input whose elements lie densely; clone it first");
  tm_tensor *in[2] = {v_zeros(v, m), v->dy[0]};
  double a[5] = {m->ndim, v->a[0], v->a[1], v->a[2] - (double)base->offset, !disjoint((int)v->a[0], v->list[0], v->list[1])};
  const int64_t *list[5] = {base->stride, v->list[0], v->list[1]};
  v_set(v, 0, v_run(v, TM_OPC_fill_strided, 2, in, a, list));
  return TM_OK;
}

static void spec_like(tm_spec *o, const tm_tensor *x) {
  o->ndim = x->c.ndim, o->dtype = x->c.dtype, o->device = x->c.device, o->strided = 0;
  memcpy(o->size, x->c.size, sizeof o->size);
}

/* A result in given strides; its storage holds numel elements, so they must be those of a dense tensor. */
static int spec_strided(tm_call *c, int k) {
  tm_spec *o = &c->o[0];
  spec_like(o, c->in[0]);
  c->nout = 1;
  if ((int)c->a[k] != o->ndim) return tm_fail(TM_EVALUE, "%s: %d strides for %s", c->op->name, (int)c->a[k], tm_say(c->in[0]));
  for (int i = 0; i < o->ndim; i++) {
    if (c->list[k][i] < 0)
      return tm_fail(TM_EVALUE, "%s: stride %lld at dim %d, expected none negative", c->op->name, (long long)c->list[k][i], i + 1);
    o->stride[i] = c->list[k][i];
  }
  if (extent(o->ndim, o->size, o->stride) >= TM_MAX(c->in[0]->c.numel, 1))
    return tm_fail(TM_EVALUE, "%s: the strides do not lie densely in %s", c->op->name, tm_say(c->in[0]));
  o->strided = 1;
  return TM_OK;
}

int tm_infer_restride(tm_call *c) { return spec_strided(c, 0); }
int tm_restride_cpu(tm_call *c) { return tm_tensor_copy_data(c->out[0], c->in[0]); }
int tm_restride_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  return TM_OK;
}

int tm_infer_fill_strided(tm_call *c) {
  const tm_tensor *base = c->in[0], *part = c->in[1];
  if (base->c.dtype != part->c.dtype) return tm_fail(TM_ETYPE, "fill_strided: base is %s, part is %s", tm_say(base), tm_say(part));
  if (base->c.device != part->c.device)
    return tm_fail(TM_ERUNTIME, "fill_strided: base is %s, part is %s; expected one device", tm_say(base), tm_say(part));
  bool fits = part->c.ndim == (int)c->a[1];
  for (int i = 0; fits && i < part->c.ndim; i++) fits = part->c.size[i] == c->list[1][i];
  if (!fits) return tm_fail(TM_ERUNTIME, "fill_strided: part is %s and does not have the shape of the window", tm_say(part));
  if (spec_strided(c, 0) != TM_OK) return tm_last_code();
  return check_window(c, 1, 2, (int64_t)c->a[3], base->c.numel);
}

/* Sequential, since windows may overlap. */
static int add_window(tm_tensor *window, const tm_tensor *part) {
  int64_t index[TM_MAXDIM] = {0}, at = 0;
  tm_tensor *dense = tm_tensor_dense(part);
  if (!dense) return tm_last_code();
  char *to = tm_data(window);
  const char *from = tm_data(dense);
  int dtype = window->c.dtype, bytes = tm_dtype_size(dtype);
  for (int64_t k = 0; k < window->c.numel; k++) {
    tm_store(to + at * bytes, dtype, tm_load(to + at * bytes, dtype) + tm_load(from + k * bytes, dtype));
    for (int i = window->c.ndim - 1; i >= 0; i--) {
      at += window->c.stride[i];
      if (++index[i] < window->c.size[i]) break;
      at -= index[i] * window->c.stride[i];
      index[i] = 0;
    }
  }
  tm_tensor_release(dense);
  return TM_OK;
}

int tm_fill_strided_cpu(tm_call *c) {
  tm_tensor *y = c->out[0], *part = c->in[1];
  int code = tm_tensor_copy_data(y, c->in[0]);
  if (code != TM_OK || part->c.numel == 0) return code;
  tm_tensor *window = tm_tensor_alias(y);
  if (!window) return TM_EMEM;
  window->c.ndim = (int8_t)c->a[1];
  window->c.numel = part->c.numel;
  window->c.offset = (int64_t)c->a[3];
  for (int i = 0; i < window->c.ndim; i++) window->c.size[i] = c->list[1][i], window->c.stride[i] = c->list[2][i];
  code = c->a[4] != 0 ? add_window(window, part) : tm_tensor_copy_data(window, part);
  tm_tensor_release(window);
  return code;
}

int tm_fill_strided_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0];
  if (v->want[0] && v->a[4] != 0) {
    v_set(v, 0, dy);
  } else if (v->want[0]) {
    tm_tensor *in[2] = {dy, v_zeros(v, &v->xm[1])};
    v_set(v, 0, v_run(v, TM_OPC_fill_strided, 2, in, v->a, v->list));
  }
  if (v->want[1]) {
    double n = v->a[0];
    tm_tensor *laid = v_run(v, TM_OPC_restride, 1, &dy, &n, v->list);
    if (!laid) return tm_last_code();
    v_set(v, 1, v_run(v, TM_OPC_as_strided, 1, &laid, v->a + 1, v->list + 1));
  }
  return TM_OK;
}
