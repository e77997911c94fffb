/* index.c: reading and writing at positions that tensors hold. One idea serves every row: a plan walks the result (or
** the source) `o` in row-major order and tells for each element its place in x: a sum of strides along the dims that x
** and o share, and of positions read from index tensors. READ copies o from x, WRITE x from o, ADD adds o to x.
** What must stay true: every position has been checked before the first write, and elements that meet in one
** place of x are handled by one thread in row-major order, so results do not depend on threads. */
#include "internal.h"

enum mode { READ, WRITE, ADD };

typedef struct plan {
  int ndim, nindex, dtype;
  char *x, *o;             /* first elements */
  int64_t size[TM_MAXDIM]; /* of o */
  int64_t so[TM_MAXDIM], sx[TM_MAXDIM];
  const char *index[TM_MAXDIM];     /* [nindex] first position of each index tensor */
  int itype[TM_MAXDIM];             /* TM_I64 or TM_I32 */
  int64_t step[TM_MAXDIM];          /* elements of x from one position to the next */
  int64_t si[TM_MAXDIM][TM_MAXDIM]; /* [index][dim] strides */
} plan;

/* -- walking a plan ------------------------------------------------------------------------------------ */

enum { CHUNK = 256 }; /* offsets computed at a time; they stay in the first-level cache */

#define MOVE(T) \
  if (m == READ) \
    for (int k = 0; k < n; k++) ((T *)o)[k * so] = ((const T *)x)[off[k]]; \
  else \
    for (int k = 0; k < n; k++) ((T *)x)[off[k]] = ((const T *)o)[k * so]; \
  return
#define SUM(T) \
  for (int k = 0; k < n; k++) ((T *)x)[off[k]] = (T)(((T *)x)[off[k]] + ((const T *)o)[k * so]); \
  return
#define SUM16(load, store) \
  for (int k = 0; k < n; k++) ((uint16_t *)x)[off[k]] = store(load(((uint16_t *)x)[off[k]]) + load(((const uint16_t *)o)[k * so])); \
  return

/* n elements: o in steps of so, x at off[]. Bound by the cache misses of x. */
static void apply(enum mode m, int dtype, int n, char *o, int64_t so, char *x, const int64_t *off) {
  if (m != ADD) {
    switch (tm_dtype_size(dtype)) {
    case 1: MOVE(uint8_t);
    case 2: MOVE(uint16_t);
    case 4: MOVE(uint32_t);
    default: MOVE(uint64_t);
    }
  }
  switch (dtype) {
  case TM_F32: SUM(float);
  case TM_F64: SUM(double);
  case TM_F16: SUM16(tm_f16_to_f32, tm_f32_to_f16);
  case TM_BF16: SUM16(tm_bf16_to_f32, tm_f32_to_bf16);
  case TM_I8:
  case TM_U8: SUM(uint8_t); /* unsigned: wraps */
  case TM_I16: SUM(uint16_t);
  case TM_I32: SUM(uint32_t);
  case TM_I64: SUM(uint64_t);
  default:
    for (int k = 0; k < n; k++) ((uint8_t *)x)[off[k]] |= ((const uint8_t *)o)[k * so];
  }
}

/* Neighbouring elements on both sides; false if this is left to apply. */
TM_CLONES static bool apply_row(enum mode m, int dtype, int64_t n, char *o, char *x) {
  int64_t bytes = n * tm_dtype_size(dtype);
  if (m == READ) memcpy(o, x, (size_t)bytes);
  else if (m == WRITE) memcpy(x, o, (size_t)bytes);
  else if (dtype == TM_F32)
    for (int64_t k = 0; k < n; k++) ((float *)x)[k] += ((const float *)o)[k];
  else if (dtype == TM_F64)
    for (int64_t k = 0; k < n; k++) ((double *)x)[k] += ((const double *)o)[k];
  else return false;
  return true;
}

static inline int64_t position(const plan *p, int i, int64_t at) {
  return (p->itype[i] == TM_I64 ? ((const int64_t *)p->index[i])[at] : ((const int32_t *)p->index[i])[at]) - 1;
}

/* off[k] += position * step for n positions, s apart. */
TM_CLONES static void add_positions(const char *index, int itype, int64_t s, int64_t step, int n, int64_t *off) {
  const int64_t *q = (const int64_t *)index;
  const int32_t *r = (const int32_t *)index;
  if (itype == TM_I64 && s == 1 && step == 1)
    for (int k = 0; k < n; k++) off[k] += q[k] - 1; /* the only loop without products */
  else if (itype == TM_I64)
    for (int k = 0; k < n; k++) off[k] += (q[k * s] - 1) * step;
  else
    for (int k = 0; k < n; k++) off[k] += (r[k * s] - (int64_t)1) * step;
}

/* The innermost dim d; oo, ox, oi: where o, x and the index tensors stand (elements). */
static void walk_row(const plan *p, enum mode m, int d, int w, int64_t oo, int64_t ox, const int64_t *oi) {
  int64_t off[CHUNK], n = p->size[d];
  int moving[TM_MAXDIM], nmoving = 0;
  for (int i = 0; i < p->nindex; i++) {
    if (p->si[i][d]) moving[nmoving++] = i;
    else ox += position(p, i, oi[i]) * p->step[i];
  }
  char *o = p->o + oo * w, *x = p->x + ox * w;
  if (!nmoving && (n == 1 || (p->so[d] == 1 && p->sx[d] == 1)) && apply_row(m, p->dtype, n, o, x)) return;
  for (int64_t b = 0; b < n; b += CHUNK) {
    int c = (int)TM_MIN(CHUNK, n - b);
    for (int k = 0; k < c; k++) off[k] = (b + k) * p->sx[d];
    for (int j = 0; j < nmoving; j++) {
      int i = moving[j];
      int64_t s = p->si[i][d];
      add_positions(p->index[i] + (oi[i] + b * s) * (p->itype[i] == TM_I64 ? 8 : 4), p->itype[i], s, p->step[i], c, off);
    }
    apply(m, p->dtype, c, o + b * p->so[d] * w, p->so[d], x, off);
  }
}

static void walk(const plan *p, enum mode m) {
  int last = p->ndim - 1, w = tm_dtype_size(p->dtype), d;
  int64_t at[TM_MAXDIM] = {0}, oi[TM_MAXDIM] = {0}, oo = 0, ox = 0;
  do {
    walk_row(p, m, last, w, oo, ox, oi);
    for (d = last - 1; d >= 0; d--) {
      int64_t by = ++at[d] < p->size[d] ? 1 : 1 - p->size[d];
      oo += by * p->so[d], ox += by * p->sx[d];
      for (int i = 0; i < p->nindex; i++) oi[i] += by * p->si[i][d];
      if (by == 1) break;
      at[d] = 0;
    }
  } while (d >= 0);
}

/* Drops dims of size 1 and joins neighbours that every side walks as one. 0 if there is nothing to do. */
static int64_t simplify(plan *p) {
  int n = 0;
  int64_t numel = 1;
  for (int d = 0; d < p->ndim; d++) {
    numel *= p->size[d];
    if (p->size[d] == 1) continue;
    bool joins = n > 0 && p->so[n - 1] == p->so[d] * p->size[d] && p->sx[n - 1] == p->sx[d] * p->size[d];
    for (int i = 0; joins && i < p->nindex; i++) joins = p->si[i][n - 1] == p->si[i][d] * p->size[d];
    if (joins) p->size[--n] *= p->size[d];
    else p->size[n] = p->size[d];
    p->so[n] = p->so[d], p->sx[n] = p->sx[d];
    for (int i = 0; i < p->nindex; i++) p->si[i][n] = p->si[i][d];
    n++;
  }
  if (n == 0) { /* one element */
    p->size[n] = 1, p->so[n] = p->sx[n] = 0;
    for (int i = 0; i < p->nindex; i++) p->si[i][n] = 0;
    n = 1;
  }
  p->ndim = n;
  return numel;
}

/* Threads share a dim. When x is written it must be one that x has too (sx is not 0), for then different threads write
** different places. Neighbours in memory stay together, 16 at least. */
static int shared_dim(const plan *p, enum mode m, int threads) {
  int best = -1;
  for (int d = 0; d < p->ndim; d++) {
    if (m != READ && p->sx[d] == 0) continue;
    int64_t n = p->size[d] / (d == p->ndim - 1 ? 16 : 1);
    if (n >= threads) return d;
    if (n > 1 && (best < 0 || p->size[d] > p->size[best])) best = d;
  }
  return best;
}

static void run(plan *p, enum mode m) {
  int64_t numel = simplify(p);
  int threads = numel >= TM_PARALLEL_MIN ? tm_num_threads() : 1, d;
  if (numel == 0) return;
  if (threads == 1 || (d = shared_dim(p, m, threads)) < 0) {
    walk(p, m);
    return;
  }
  int64_t n = p->size[d], w = tm_dtype_size(p->dtype);
  int pieces = (int)TM_MIN(threads, d == p->ndim - 1 ? n / 16 : n);
#pragma omp parallel for
  for (int t = 0; t < pieces; t++) {
    int64_t from = n * t / pieces, to = n * (t + 1) / pieces;
    plan q = *p;
    q.size[d] = to - from;
    q.o += from * q.so[d] * w;
    q.x += from * q.sx[d] * w;
    for (int i = 0; i < q.nindex; i++) q.index[i] += from * q.si[i][d] * (q.itype[i] == TM_I64 ? 8 : 4);
    walk(&q, m);
  }
}

/* -- checking positions --------------------------------------------------------------------------------- */

enum { BLOCK = 16384 };

/* 1 if one of `count` positions from `at` on is outside 1..n. */
TM_CLONES static int outside(const void *data, int dtype, int64_t at, int64_t stride, int64_t count, int64_t n) {
  int wrong = 0;
  if (dtype == TM_I64)
    for (int64_t k = 0; k < count; k++) wrong |= (uint64_t)((const int64_t *)data)[at + k * stride] - 1 >= (uint64_t)n;
  else
    for (int64_t k = 0; k < count; k++) wrong |= (uint64_t)((const int32_t *)data)[at + k * stride] - 1 >= (uint64_t)n;
  return wrong;
}

static int64_t row_start(const plan *p, int64_t row) {
  int64_t at = 0;
  for (int d = p->ndim - 2; d >= 0; d--) {
    at += row % p->size[d] * p->so[d];
    row /= p->size[d];
  }
  return at;
}

/* The first position outside 1..n, if there is one, is the error. Strides of 0 are read once. */
static int check(const tm_call *c, const tm_tensor *t, int64_t n, int dim) {
  plan p = {.ndim = t->c.ndim}; /* of its walk, only o is used */
  for (int d = 0; d < p.ndim; d++) {
    p.size[d] = T_STRIDE(t, d) == 0 ? TM_MIN(T_SIZE(t, d), 1) : T_SIZE(t, d);
    p.so[d] = T_STRIDE(t, d);
  }
  int64_t numel = simplify(&p), seen;
  if (numel == 0) return TM_OK;
  int64_t cols = p.size[p.ndim - 1], stride = p.so[p.ndim - 1], rows = numel / cols, blocks = (cols + BLOCK - 1) / BLOCK;
  const void *data = tm_data(t);
  int wrong = 0;
#pragma omp parallel for reduction(| : wrong) if (numel >= TM_PARALLEL_MIN)
  for (int64_t b = 0; b < rows * blocks; b++) {
    int64_t from = b % blocks * BLOCK;
    wrong |= outside(data, t->c.dtype, row_start(&p, b / blocks) + from * stride, stride, TM_MIN(BLOCK, cols - from), n);
  }
  for (int64_t i = 0; wrong && i < numel; i++)
    if (!tm_position(data, t->c.dtype, row_start(&p, i / cols) + i % cols * stride, n, &seen))
      return tm_fail(TM_EINDEX, "%s: position %lld in dim %d of size %lld, expected 1 to %lld", c->op->name, (long long)seen, dim + 1,
                     (long long)n, (long long)n);
  return TM_OK;
}

/* -- positions of what is not 0 ---------------------------------------------------------------------------- */

static inline bool truth(const char *p, int dtype, int64_t i) {
  switch (dtype) {
  case TM_F32: return ((const float *)p)[i] != 0;
  case TM_F64: return ((const double *)p)[i] != 0;
  case TM_F16:
  case TM_BF16: return (((const uint16_t *)p)[i] & 0x7fff) != 0;
  case TM_I16: return ((const int16_t *)p)[i] != 0;
  case TM_I32: return ((const int32_t *)p)[i] != 0;
  case TM_I64: return ((const int64_t *)p)[i] != 0;
  default: return p[i] != 0;
  }
}

TM_CLONES static int64_t count_range(const char *p, int dtype, int64_t from, int64_t to) {
  int64_t n = 0;
  if (dtype == TM_BOOL)
    for (int64_t i = from; i < to; i++) n += p[i] != 0;
  else
    for (int64_t i = from; i < to; i++) n += truth(p, dtype, i);
  return n;
}

static int64_t count(const tm_tensor *dense) {
  int64_t n = 0, numel = dense->c.numel;
  const char *p = tm_data(dense);
#pragma omp parallel for reduction(+ : n) if (numel >= TM_PARALLEL_MIN)
  for (int64_t b = 0; b < numel; b += BLOCK) n += count_range(p, dense->c.dtype, b, TM_MIN(numel, b + BLOCK));
  return n;
}

/* out[r * sr + d * sd] = position, from 1, along dim d of the r-th element that is not 0, at most `room` of them.
** Counted piece by piece first, so that threads know where to write. Returns how many there are. */
static int64_t list_positions(const tm_tensor *dense, int ndim, const int64_t *size, int64_t *out, int64_t sr, int64_t sd, int64_t room) {
  enum { PIECES = 64 };
  int64_t numel = dense->c.numel, start[PIECES + 1] = {0};
  int dtype = dense->c.dtype, pieces = numel >= TM_PARALLEL_MIN ? PIECES : 1;
  const char *p = tm_data(dense);
#pragma omp parallel for if (pieces > 1)
  for (int t = 0; t < pieces; t++) start[t + 1] = count_range(p, dtype, numel * t / pieces, numel * (t + 1) / pieces);
  for (int t = 0; t < pieces; t++) start[t + 1] += start[t];
#pragma omp parallel for if (pieces > 1)
  for (int t = 0; t < pieces; t++) {
    int64_t r = start[t], end = numel * (t + 1) / pieces;
    for (int64_t b = numel * t / pieces; b < end; b += CHUNK) {
      int64_t hit[CHUNK], stop = TM_MIN(end, b + CHUNK);
      int n = 0; /* counted without a branch, which random data would mislead */
      if (dtype == TM_BOOL)
        for (int64_t i = b; i < stop; i++) hit[n] = i, n += p[i] != 0;
      else
        for (int64_t i = b; i < stop; i++) hit[n] = i, n += truth(p, dtype, i);
      for (int k = 0; k < n && r < room; k++) {
        int64_t rest = hit[k], *q = out + r++ * sr;
        for (int d = ndim - 1; d > 0; d--) {
          int64_t up = rest / size[d];
          q[d * sd] = rest - up * size[d] + 1;
          rest = up;
        }
        if (ndim > 0) q[0] = rest + 1;
      }
    }
  }
  return start[pieces];
}

static int no_meta(const tm_call *c, const tm_tensor *t) {
  if (TM_KIND(t->c.device) != TM_META) return TM_OK;
  return tm_fail(TM_ENOTIMPL, "%s: the size of the result depends on data, and %s has none", c->op->name, tm_say(t));
}

static int count_any(const tm_tensor *t, int64_t *n) {
  tm_tensor *dense = tm_tensor_dense(t);
  if (!dense) return tm_last_code();
  *n = count(dense);
  tm_tensor_release(dense);
  return TM_OK;
}

int tm_infer_nonzero(tm_call *c) {
  const tm_tensor *x = c->in[0];
  int64_t n = 0;
  int code = no_meta(c, x);
  if (!code) code = count_any(x, &n);
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = 2, .dtype = TM_I64, .device = x->c.device, .size = {n, x->c.ndim}};
  return code;
}

int tm_nonzero_cpu(tm_call *c) {
  tm_tensor *x = tm_tensor_dense(c->in[0]), *y = c->out[0]; /* y (n, dims) */
  if (!x) return tm_last_code();
  int64_t n = list_positions(x, x->c.ndim, x->c.size, tm_data(y), T_SIZE(y, 1), 1, T_SIZE(y, 0));
  tm_tensor_release(x);
  return n == T_SIZE(y, 0) ? TM_OK : tm_fail(TM_ERUNTIME, "nonzero: x changed meanwhile");
}

/* -- geometry of an indexed tensor ---------------------------------------------------------------------------- */

/* A dim of x, whole or read at the positions of a tensor that broadcasts with the others. */
typedef struct axis {
  int64_t size, stride; /* of x */
  bool indexed;
  tm_tensor *at; /* retained; NULL in a rule, which needs no data of masks */
  int ndim;
  int64_t shape[TM_MAXDIM]; /* of the positions */
} axis;

typedef struct geometry {
  int naxis, ndim, nb, place; /* place: result dim where the nb dims of the positions stand */
  axis axis[TM_MAXDIM];
  int64_t size[TM_MAXDIM], b[TM_MAXDIM]; /* of the result; of the positions, broadcast */
} geometry;

static void drop_geometry(geometry *g) {
  for (int i = 0; i < g->naxis; i++) tm_tensor_release(g->axis[i].at);
}

static axis *add_axis(geometry *g, int64_t size, int64_t stride, tm_tensor *at) {
  axis *a = &g->axis[g->naxis++];
  *a = (axis){.size = size, .stride = stride, .indexed = at != NULL, .at = at};
  if (at) a->ndim = at->c.ndim, memcpy(a->shape, at->c.size, sizeof a->shape);
  return a;
}

/* Where positions stand: in place of the dims that they index if these are neighbours, else in front. */
static int finish_geometry(const tm_call *c, geometry *g) {
  int first = -1, last = -1, indexed = 0;
  g->nb = 0;
  for (int i = 0; i < g->naxis; i++) {
    if (!g->axis[i].indexed) continue;
    if (first < 0) first = i;
    last = i;
    indexed++;
    g->nb = TM_MAX(g->nb, g->axis[i].ndim);
  }
  g->place = indexed && last - first + 1 == indexed ? first : 0;
  g->ndim = g->nb + g->naxis - indexed;
  if (g->ndim > TM_MAXDIM)
    return tm_fail(TM_ERUNTIME, "%s: the result would have %d dims, at most %d are possible", c->op->name, g->ndim, TM_MAXDIM);
  for (int d = 0; d < g->nb; d++) g->b[d] = 1;
  for (int i = 0; i < g->naxis; i++)
    for (int d = 0; d < g->axis[i].ndim; d++) {
      int64_t *b = &g->b[g->nb - g->axis[i].ndim + d], n = g->axis[i].shape[d];
      if (*b != n && *b != 1 && n != 1) {
        char text[128], first_text[128];
        int other = 0;
        while (!g->axis[other].indexed) other++;
        return tm_fail(TM_EINDEX, "%s: index tensors of shapes %s and %s do not broadcast", c->op->name,
                       tm_shape_text(first_text, sizeof first_text, g->axis[other].ndim, g->axis[other].shape),
                       tm_shape_text(text, sizeof text, g->axis[i].ndim, g->axis[i].shape));
      }
      if (*b == 1) *b = n;
    }
  int d = 0;
  for (int i = 0; i <= g->naxis; i++) {
    if (d == g->place && indexed) {
      memcpy(g->size + d, g->b, (size_t)g->nb * sizeof *g->b);
      d += g->nb;
      indexed = 0;
    }
    if (i < g->naxis && !g->axis[i].indexed) g->size[d++] = g->axis[i].size;
  }
  return TM_OK;
}

static void plan_x(plan *p, const geometry *g, tm_tensor *x) {
  memset(p, 0, sizeof *p);
  p->ndim = g->ndim;
  p->dtype = x->c.dtype;
  p->x = tm_data(x);
  memcpy(p->size, g->size, sizeof p->size);
  int d = g->place == 0 ? g->nb : 0;
  for (int i = 0; i < g->naxis; i++) {
    const axis *a = &g->axis[i];
    if (!a->indexed) {
      p->sx[d++] = a->stride;
      if (d == g->place) d += g->nb;
      continue;
    }
    int k = p->nindex++, lead = g->place + g->nb - a->ndim;
    p->index[k] = tm_data(a->at);
    p->itype[k] = a->at->c.dtype;
    p->step[k] = a->stride;
    for (int j = 0; j < a->ndim; j++) p->si[k][lead + j] = a->shape[j] == 1 ? 0 : T_STRIDE(a->at, j);
  }
}

/* The other side, whose shape is that of the plan or broadcasts to it. */
static void plan_o(plan *p, const tm_tensor *o) {
  p->o = tm_data(o);
  for (int d = 0; d < o->c.ndim && d < p->ndim; d++) {
    int from = o->c.ndim - 1 - d, to = p->ndim - 1 - d;
    p->so[to] = T_SIZE(o, from) == 1 ? 0 : T_STRIDE(o, from);
  }
}

static int index_dtype(const tm_call *c, const tm_tensor *t) {
  if (t->c.dtype == TM_I64 || t->c.dtype == TM_I32) return TM_OK;
  return tm_fail(TM_EINDEX, "%s: index is %s, expected int64 or int32%s", c->op->name, tm_say(t),
                 c->op->listarg ? " positions or a bool mask" : "");
}

static int same_device(const tm_call *c, const tm_tensor *t, const char *what) {
  const tm_tensor *x = c->in[0];
  if (t->c.device == x->c.device || (t->c.ndim == 0 && t->c.device == TM_DEV_CPU)) return TM_OK;
  char first[16];
  snprintf(first, sizeof first, "%s", tm_device_name(x->c.device));
  return tm_fail(TM_ERUNTIME, "%s: x is on %s, %s on %s, expected one device", c->op->name, first, what, tm_device_name(t->c.device));
}

static void result_like(tm_call *c, int ndim, const int64_t *size) {
  const tm_tensor *x = c->in[0];
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = ndim, .dtype = x->c.dtype, .device = x->c.device};
  memcpy(c->o[0].size, size, (size_t)ndim * sizeof *size);
}

/* An input that no write to `out` can change: of an in-place call it may be x itself. Retained. */
static tm_tensor *apart(const tm_call *c, tm_tensor *t) {
  if (!c->inplace || t->c.storage != c->out[0]->c.storage) {
    tm_tensor_retain(t);
    return t;
  }
  tm_tensor *copy = tm_tensor_empty(t->c.ndim, t->c.size, NULL, t->c.dtype, t->c.device);
  if (copy && tm_tensor_copy_data(copy, t) != TM_OK) tm_tensor_release(copy), copy = NULL;
  return copy;
}

/* The same, in x's dtype. */
static tm_tensor *source_of(const tm_call *c, tm_tensor *t) {
  return t->c.dtype == c->out[0]->c.dtype ? apart(c, t) : tm_tensor_cast(t, c->out[0]->c.dtype);
}

static int start_from_x(tm_call *c) { return c->inplace ? TM_OK : tm_tensor_copy_data(c->out[0], c->in[0]); }

/* -- index, index_put ------------------------------------------------------------------------------------------ */

static bool one_walk(const tm_tensor *x, int d, int n) {
  for (int i = d; i + 1 < d + n; i++)
    if (T_STRIDE(x, i) != T_STRIDE(x, i + 1) * T_SIZE(x, i + 1)) return false;
  return true;
}

/* A mask is the positions of its true elements: one tensor if x's dims can be walked as one, else one a dim. */
static int add_mask(const tm_call *c, geometry *g, const tm_tensor *x, int d, const tm_tensor *mask, bool data) {
  int m = mask->c.ndim;
  bool fits = m > 0 && d + m <= x->c.ndim;
  for (int i = 0; fits && i < m; i++) fits = T_SIZE(mask, i) == T_SIZE(x, d + i);
  if (!fits)
    return tm_fail(TM_EINDEX, "%s: mask %s does not fit the dims of x, %s, from dim %d on", c->op->name, tm_say(mask), tm_say(x), d + 1);
  int code = no_meta(c, mask);
  int64_t n = 0;
  if (!code) code = count_any(mask, &n);
  if (code) return code;
  if (!data) { /* a rule wants the shape alone */
    axis *a = add_axis(g, 0, 0, NULL);
    a->indexed = true, a->ndim = 1, a->shape[0] = n;
    return TM_OK;
  }
  tm_tensor *dense = tm_tensor_dense(mask);
  bool one = one_walk(x, d, m);
  int64_t rows = one ? 1 : m;
  tm_tensor *at = dense ? tm_tensor_new(2, (int64_t[]){rows, n}, TM_I64, TM_DEV_CPU) : NULL;
  if (at && list_positions(dense, one ? 1 : m, one ? &dense->c.numel : mask->c.size, tm_data(at), 1, n, n) != n)
    code = tm_fail(TM_ERUNTIME, "%s: the mask changed meanwhile", c->op->name);
  if (!at) code = tm_last_code();
  for (int64_t r = 0; r < rows && !code; r++) {
    tm_tensor *row = tm_tensor_alias(at); /* (n) */
    if (!row) {
      code = tm_last_code();
      break;
    }
    row->c.ndim = 1, row->c.numel = n, row->c.offset += r * n, row->c.size[0] = n, row->c.stride[0] = 1;
    if (one) add_axis(g, dense->c.numel, T_STRIDE(x, d + m - 1), row);
    else add_axis(g, T_SIZE(x, d + r), T_STRIDE(x, d + r), row);
  }
  tm_tensor_release(at);
  tm_tensor_release(dense);
  return code;
}

/* data: also the positions, checked; else the shape. The index tensors are in[first..]. */
static int read_indices(tm_call *c, int first, geometry *g, bool data) {
  const tm_tensor *x = c->in[0];
  int d = 0, code;
  g->naxis = 0;
  for (int i = first; i < c->nin; i++) {
    tm_tensor *t = c->in[i];
    int takes = t && t->c.dtype == TM_BOOL ? t->c.ndim : 1;
    if (d + takes > x->c.ndim) return tm_fail(TM_EINDEX, "%s: the indices take more dims than x has, %s", c->op->name, tm_say(x));
    if (!t) {
      add_axis(g, T_SIZE(x, d), T_STRIDE(x, d), NULL);
    } else if ((code = same_device(c, t, "an index")) != TM_OK) {
      return code;
    } else if (t->c.dtype == TM_BOOL) {
      if ((code = add_mask(c, g, x, d, t, data)) != TM_OK) return code;
    } else if ((code = index_dtype(c, t)) != TM_OK) {
      return code;
    } else {
      if (data && ((code = check(c, t, T_SIZE(x, d), d)) != TM_OK)) return code;
      tm_tensor *at = data ? apart(c, t) : t;
      if (!at) return tm_last_code();
      if (!data) tm_tensor_retain(at);
      add_axis(g, T_SIZE(x, d), T_STRIDE(x, d), at);
    }
    d += takes;
  }
  for (; d < x->c.ndim; d++) add_axis(g, T_SIZE(x, d), T_STRIDE(x, d), NULL);
  return finish_geometry(c, g);
}

int tm_infer_index(tm_call *c) {
  geometry g;
  int code = read_indices(c, 1, &g, false);
  if (!code) result_like(c, g.ndim, g.size);
  drop_geometry(&g);
  return code;
}

int tm_index_cpu(tm_call *c) {
  geometry g;
  plan p;
  int code = read_indices(c, 1, &g, true);
  const tm_tensor *y = c->out[0];
  if (!code && (g.ndim != y->c.ndim || memcmp(g.size, y->c.size, (size_t)g.ndim * sizeof *g.size)))
    code = tm_fail(TM_ERUNTIME, "index: a mask changed meanwhile");
  if (!code) {
    plan_x(&p, &g, c->in[0]);
    plan_o(&p, y);
    run(&p, READ);
  }
  drop_geometry(&g);
  return code;
}

static int source_fits(const tm_call *c, const geometry *g) {
  const tm_tensor *s = c->in[1];
  char text[128];
  bool fits = s->c.ndim <= g->ndim;
  for (int d = 1; fits && d <= s->c.ndim; d++) fits = T_SIZE(s, s->c.ndim - d) == g->size[g->ndim - d] || T_SIZE(s, s->c.ndim - d) == 1;
  if (fits) return TM_OK;
  return tm_fail(TM_ERUNTIME, "%s: source is %s, which does not broadcast to the places indexed, %s", c->op->name, tm_say(s),
                 tm_shape_text(text, sizeof text, g->ndim, g->size));
}

int tm_infer_index_put(tm_call *c) {
  geometry g;
  int code = read_indices(c, 2, &g, false);
  if (!code) code = same_device(c, c->in[1], "source");
  if (!code) code = source_fits(c, &g);
  result_like(c, c->in[0]->c.ndim, c->in[0]->c.size);
  drop_geometry(&g);
  return code;
}

int tm_index_put_cpu(tm_call *c) {
  geometry g;
  plan p;
  int code = start_from_x(c);
  g.naxis = 0;
  if (code) return code;
  tm_tensor *x = c->in[0], *source = source_of(c, c->in[1]);
  if (!source) return tm_last_code();
  c->in[0] = c->out[0]; /* the strides that count are those of the result */
  code = read_indices(c, 2, &g, true);
  if (!code) code = source_fits(c, &g);
  c->in[0] = x;
  if (!code) {
    plan_x(&p, &g, c->out[0]);
    plan_o(&p, source);
    run(&p, c->a[0] != 0 ? ADD : WRITE);
  }
  drop_geometry(&g);
  tm_tensor_release(source);
  return code;
}

/* dx: dy at the places read, added up where one was read twice */
int tm_index_vjp(tm_vjp *v) {
  tm_tensor *in[TM_MAXDIM + 2] = {v_zeros(v, &v->xm[0]), v->dy[0]};
  for (int i = 1; i < v->nin; i++) in[i + 1] = v->x[i];
  v_set(v, 0, v_run(v, TM_OPC_index_put, v->nin + 1, in, (double[]){1}, NULL));
  return TM_OK;
}

/* dx: dy, but 0 at the places overwritten. dsource: dy at the places; where several elements were written to one
** place each gets its gradient, as in PyTorch. */
int tm_index_put_vjp(tm_vjp *v) {
  tm_tensor *in[TM_MAXDIM + 2] = {v->dy[0]};
  for (int i = 2; i < v->nin; i++) in[i] = v->x[i];
  if (v->want[0] && v->a[0] != 0) v_set(v, 0, v->dy[0]);
  else if (v->want[0]) {
    in[1] = v_num(v, 0);
    v_set(v, 0, v_run(v, TM_OPC_index_put, v->nin, in, (double[]){0}, NULL));
  }
  if (!v->want[1]) return TM_OK;
  in[1] = v->dy[0];
  v_set(v, 1, v_run(v, TM_OPC_index, v->nin - 1, in + 1, NULL, NULL));
  return TM_OK;
}

/* -- index_select, index_add: one list of positions along one dim ------------------------------------------------ */

/* A 0-dim tensor counts as one with a single dim of size 1. */
static int rank(const tm_tensor *t) { return TM_MAX(t->c.ndim, 1); }
static int64_t size_at(const tm_tensor *t, int d) { return d < t->c.ndim ? T_SIZE(t, d) : 1; }
static int64_t stride_at(const tm_tensor *t, int d) { return d < t->c.ndim ? T_STRIDE(t, d) : 0; }

static int list_rule(tm_call *c, const tm_tensor *index) {
  int code = index_dtype(c, index);
  if (!code) code = same_device(c, index, "index");
  if (code) return code;
  if (index->c.ndim > 1) return tm_fail(TM_EINDEX, "%s: index is %s, expected one dim", c->op->name, tm_say(index));
  if (c->in[0]->c.ndim == 0 && index->c.numel != 1)
    return tm_fail(TM_EINDEX, "%s: index is %s, expected a single position for x, %s", c->op->name, tm_say(index), tm_say(c->in[0]));
  return TM_OK;
}

/* o is like x, but as long as index in dim. */
static void plan_list(plan *p, tm_tensor *x, int dim, tm_tensor *index, const tm_tensor *o) {
  memset(p, 0, sizeof *p);
  p->ndim = rank(x), p->dtype = x->c.dtype, p->x = tm_data(x), p->o = tm_data(o);
  p->nindex = 1, p->index[0] = tm_data(index), p->itype[0] = index->c.dtype, p->step[0] = stride_at(x, dim);
  for (int d = 0; d < p->ndim; d++) {
    p->size[d] = d == dim ? index->c.numel : size_at(x, d);
    p->so[d] = stride_at(o, d);
    p->sx[d] = d == dim ? 0 : stride_at(x, d);
  }
  p->si[0][dim] = stride_at(index, 0);
}

int tm_infer_index_select(tm_call *c) {
  int code = list_rule(c, c->in[1]);
  result_like(c, c->in[0]->c.ndim, c->in[0]->c.size);
  if (c->in[0]->c.ndim > 0) c->o[0].size[(int)c->a[0]] = c->in[1]->c.numel;
  return code;
}

int tm_index_select_cpu(tm_call *c) {
  plan p;
  int dim = (int)c->a[0], code = check(c, c->in[1], size_at(c->in[0], dim), dim);
  if (code) return code;
  plan_list(&p, c->in[0], dim, c->in[1], c->out[0]);
  run(&p, READ);
  return TM_OK;
}

static int same_dtype(const tm_call *c, const tm_tensor *source) {
  if (source->c.dtype == c->in[0]->c.dtype) return TM_OK;
  return tm_fail(TM_ETYPE, "%s: x is %s, source is %s, expected one dtype", c->op->name, tm_say(c->in[0]), tm_say(source));
}

int tm_infer_index_add(tm_call *c) {
  const tm_tensor *x = c->in[0], *index = c->in[1], *s = c->in[2];
  int dim = (int)c->a[0], code = list_rule(c, index);
  if (!code) code = same_device(c, s, "source");
  if (!code) code = same_dtype(c, s);
  result_like(c, x->c.ndim, x->c.size);
  if (code) return code;
  bool fits = rank(s) == rank(x);
  for (int d = 0; fits && d < rank(x); d++) fits = size_at(s, d) == (d == dim ? index->c.numel : size_at(x, d));
  return fits ? TM_OK
              : tm_fail(TM_ERUNTIME,
                        "index_add: source is %s, index is %s, x is %s: expected the shape of x, but as long as index in dim %d", tm_say(s),
                        tm_say(index), tm_say(x), dim + 1);
}

int tm_index_add_cpu(tm_call *c) {
  plan p;
  int dim = (int)c->a[0], code = check(c, c->in[1], size_at(c->in[0], dim), dim);
  if (!code) code = start_from_x(c);
  if (code) return code;
  tm_tensor *index = apart(c, c->in[1]), *source = source_of(c, c->in[2]);
  if (index && source) {
    plan_list(&p, c->out[0], dim, index, source);
    run(&p, ADD);
  } else code = tm_last_code();
  tm_tensor_release(index);
  tm_tensor_release(source);
  return code;
}

/* A gradient with the elements of an input, in the input's own shape: 0-dim and one element are taken for each other,
** and of a longer source only the first positions were read. */
static tm_tensor *shaped(tm_vjp *v, tm_tensor *g, const tm_inmeta *like) {
  if (!g || (g->c.ndim == like->ndim && !memcmp(g->c.size, like->size, (size_t)like->ndim * sizeof *like->size))) return g;
  if (like->ndim == 0) return g; /* one number for all: the engine adds up */
  if (g->c.ndim == 0) return v_reshape(v, g, 1, (int64_t[]){1});
  int64_t stride[TM_MAXDIM];
  tm_contiguous_strides(like->ndim, like->size, stride);
  return v_run(v, TM_OPC_fill_strided, 2, (tm_tensor *[]){v_zeros(v, like), g}, (double[]){like->ndim, g->c.ndim, like->ndim, 0, 0},
               (const int64_t *[]){stride, g->c.size, stride, NULL, NULL});
}

int tm_index_select_vjp(tm_vjp *v) {
  tm_tensor *in[3] = {v_zeros(v, &v->xm[0]), v->x[1], v->dy[0]};
  v_set(v, 0, v_run(v, TM_OPC_index_add, 3, in, v->a, NULL));
  return TM_OK;
}

int tm_index_add_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  if (v->want[2]) v_set(v, 2, shaped(v, v_run(v, TM_OPC_index_select, 2, (tm_tensor *[]){v->dy[0], v->x[1]}, v->a, NULL), &v->xm[2]));
  return TM_OK;
}

/* -- gather, scatter, scatter_add: a position for each element ------------------------------------------------------ */

/* index may be shorter than the others in every dim, but than x in `dim`, where it holds positions. */
static int grid_rule(tm_call *c, const tm_tensor *source) {
  const tm_tensor *x = c->in[0], *index = c->in[1];
  int dim = (int)c->a[0], code = index_dtype(c, index);
  if (!code) code = same_device(c, index, "index");
  if (!code && source) code = same_device(c, source, "source");
  if (code || index->c.numel == 0) return code;
  bool one = !source || (source->c.ndim == 0 && c->op->ttype[2] == TM_ARG_OPERAND),
       fits = rank(index) == rank(x) && (one || rank(source) == rank(x));
  for (int d = 0; fits && d < rank(x); d++)
    fits = (d == dim || size_at(index, d) <= size_at(x, d)) && (one || size_at(index, d) <= size_at(source, d));
  if (fits) return TM_OK;
  if (one)
    return tm_fail(TM_ERUNTIME, "%s: index is %s, x is %s: expected as many dims, and no size larger than x's but in dim %d", c->op->name,
                   tm_say(index), tm_say(x), dim + 1);
  return tm_fail(
      TM_ERUNTIME,
      "%s: index is %s, x is %s, source is %s: expected as many dims, and no size of index larger than x's (but in dim %d) or source's",
      c->op->name, tm_say(index), tm_say(x), tm_say(source), dim + 1);
}

static void plan_grid(plan *p, tm_tensor *x, int dim, tm_tensor *index, const tm_tensor *o) {
  memset(p, 0, sizeof *p);
  p->ndim = rank(index), p->dtype = x->c.dtype, p->x = tm_data(x), p->o = tm_data(o);
  p->nindex = 1, p->index[0] = tm_data(index), p->itype[0] = index->c.dtype, p->step[0] = stride_at(x, dim);
  for (int d = 0; d < p->ndim; d++) {
    p->size[d] = size_at(index, d);
    p->so[d] = stride_at(o, d);
    p->sx[d] = d == dim ? 0 : stride_at(x, d);
    p->si[0][d] = stride_at(index, d);
  }
}

int tm_infer_gather(tm_call *c) {
  result_like(c, c->in[1]->c.ndim, c->in[1]->c.size);
  return grid_rule(c, NULL);
}

int tm_infer_scatter(tm_call *c) {
  const tm_tensor *s = c->in[2];
  result_like(c, c->in[0]->c.ndim, c->in[0]->c.size);
  if (s->c.ndim > 0 && same_dtype(c, s) != TM_OK) return tm_last_code();
  return grid_rule(c, s);
}

int tm_infer_scatter_add(tm_call *c) { return tm_infer_scatter(c); }

int tm_gather_cpu(tm_call *c) {
  plan p;
  int dim = (int)c->a[0], code = check(c, c->in[1], size_at(c->in[0], dim), dim);
  if (code) return code;
  plan_grid(&p, c->in[0], dim, c->in[1], c->out[0]);
  run(&p, READ);
  return TM_OK;
}

static int put_grid(tm_call *c, enum mode m) {
  plan p;
  int dim = (int)c->a[0], code = check(c, c->in[1], size_at(c->in[0], dim), dim);
  if (!code) code = start_from_x(c);
  if (code) return code;
  tm_tensor *index = apart(c, c->in[1]), *source = source_of(c, c->in[2]);
  if (index && source) {
    plan_grid(&p, c->out[0], dim, index, source);
    run(&p, m);
  } else code = tm_last_code();
  tm_tensor_release(index);
  tm_tensor_release(source);
  return code;
}

int tm_scatter_cpu(tm_call *c) { return put_grid(c, WRITE); }
int tm_scatter_add_cpu(tm_call *c) { return put_grid(c, ADD); }

int tm_gather_vjp(tm_vjp *v) {
  tm_tensor *in[3] = {v_zeros(v, &v->xm[0]), v->x[1], v->dy[0]};
  v_set(v, 0, v_run(v, TM_OPC_scatter_add, 3, in, v->a, NULL));
  return TM_OK;
}

static void source_vjp(tm_vjp *v) {
  if (v->want[2]) v_set(v, 2, shaped(v, v_run(v, TM_OPC_gather, 2, (tm_tensor *[]){v->dy[0], v->x[1]}, v->a, NULL), &v->xm[2]));
}

int tm_scatter_add_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  source_vjp(v);
  return TM_OK;
}

/* As index_put. */
int tm_scatter_vjp(tm_vjp *v) {
  if (v->want[0]) v_set(v, 0, v_run(v, TM_OPC_scatter, 3, (tm_tensor *[]){v->dy[0], v->x[1], v_num(v, 0)}, v->a, NULL));
  source_vjp(v);
  return TM_OK;
}
