/* norm.c: layer_norm. x is seen as (R, n) contiguous rows, n the elements of the last dims; other layouts and the half
** types are brought into that form first. Means and variances are summed in float64 from each 512 elements on, the
** gradients of weight and bias from each 32 rows on, and all is cut by shape alone, so that results do not depend on
** the number of threads. Bound by memory bandwidth: the passes over one row stay in the cache. */
#include "internal.h"

/* -- rules ------------------------------------------------------------------------------------------------------ */

static int check_tensor(const tm_call *c, int i, const tm_tensor *x, int count) {
  const tm_tensor *t = c->in[i];
  char text[160];
  if (!t) return TM_OK;
  if (t->c.device != x->c.device)
    return tm_fail(TM_ERUNTIME, "%s: %s is %s on %s, but x is on %s; expected one device", c->op->name, c->op->tname[i], tm_say(t),
                   tm_device_name(t->c.device), tm_device_name(x->c.device));
  const int64_t *size = x->c.size + x->c.ndim - count;
  if (!tm_is_float(t->c.dtype) || t->c.ndim != count || memcmp(t->c.size, size, (size_t)count * sizeof *size))
    return tm_fail(TM_ERUNTIME, "%s: %s is %s, expected floating numbers of shape %s for x, %s", c->op->name, c->op->tname[i], tm_say(t),
                   tm_shape_text(text, sizeof text, count, size), tm_say(x));
  return TM_OK;
}

static int check_rows(const tm_call *c, const tm_tensor *x, int count) {
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ERUNTIME, "%s: x is %s, expected a floating dtype", c->op->name, tm_say(x));
  if (count < 1 || count > x->c.ndim)
    return tm_fail(TM_ERUNTIME, "%s: x is %s, expected at least %d dims, and one to normalise over", c->op->name, tm_say(x), count);
  return TM_OK;
}

static void set_like(tm_spec *o, const tm_tensor *x) {
  o->ndim = x->c.ndim, o->dtype = x->c.dtype, o->device = x->c.device, o->strided = 0;
  memcpy(o->size, x->c.size, (size_t)x->c.ndim * sizeof *o->size);
}

static void set_pair(tm_spec *o, int64_t n, int dtype, int device) {
  o->ndim = 2, o->dtype = dtype, o->device = device, o->strided = 0;
  o->size[0] = 2, o->size[1] = n;
}

static int wide(int dtype) { return dtype == TM_F64 ? TM_F64 : TM_F32; }

/* R and n of x */
static void count_rows(const tm_tensor *x, int count, int64_t *R, int64_t *n) {
  *R = *n = 1;
  for (int d = 0; d < x->c.ndim; d++) *(d < x->c.ndim - count ? R : n) *= T_SIZE(x, d);
}

int tm_infer_layer_norm(tm_call *c) {
  const tm_tensor *x = c->in[0];
  int count = (int)c->a[0];
  int64_t R, n;
  if (check_rows(c, x, count) != TM_OK || check_tensor(c, 1, x, count) != TM_OK || check_tensor(c, 2, x, count) != TM_OK)
    return tm_last_code();
  count_rows(x, count, &R, &n);
  c->nout = 2, c->compute = wide(x->c.dtype);
  set_like(&c->o[0], x);
  set_pair(&c->o[1], R, c->compute, x->c.device);
  return TM_OK;
}

int tm_infer_layer_norm_backward(tm_call *c) {
  const tm_tensor *dy = c->in[0], *x = c->in[1], *stats = c->in[2];
  int count = (int)c->a[0];
  int64_t R, n;
  if (check_rows(c, x, count) != TM_OK || check_tensor(c, 3, x, count) != TM_OK) return tm_last_code();
  count_rows(x, count, &R, &n);
  if (dy->c.ndim != x->c.ndim || memcmp(dy->c.size, x->c.size, (size_t)x->c.ndim * sizeof(int64_t)) || dy->c.device != x->c.device ||
      stats->c.device != x->c.device || stats->c.ndim != 2 || T_SIZE(stats, 0) != 2 || T_SIZE(stats, 1) != R)
    return tm_fail(TM_ERUNTIME, "%s: dy is %s on %s, stats is %s on %s; expected the results of layer_norm for x, %s on %s", c->op->name,
                   tm_say(dy), tm_device_name(dy->c.device), tm_say(stats), tm_device_name(stats->c.device), tm_say(x),
                   tm_device_name(x->c.device));
  c->nout = 2, c->compute = wide(x->c.dtype);
  set_like(&c->o[0], x);
  set_pair(&c->o[1], c->a[2] ? n : 0, x->c.dtype, x->c.device);
  return TM_OK;
}

/* -- kernels ------------------------------------------------------------------------------------------------------ */

typedef struct job {
  int64_t R, n, part; /* part: rows in one item */
  double eps;
  const void *x,      /* (R, n) */
      *dy,            /* (R, n) */
      *weight, *bias; /* (n), or NULL */
  void *y;            /* (R, n); dx when going backward */
  void *stats;        /* (2, R): means, variances */
  void *sums;         /* (parts, 2, n), or NULL: gradients of weight and bias, float64 */
  void *block;        /* (parts, 2, n): the same of up to 32 rows */
} job;

/* Sixteen sums side by side: rounding errors are the same whatever vectors there are, and small. */
#define SUM(T, each) \
  double total = 0; \
  int64_t i = 0; \
  while (i + 16 <= n) { \
    T s[16] = {0}; \
    for (int64_t e = TM_MIN(i + 512, n); i + 16 <= e; i += 16) _Pragma("omp simd") for (int k = 0; k < 16; k++) s[k] += each(i + k); \
    for (int k = 0; k < 16; k++) total += (double)s[k]; \
  } \
  for (; i < n; i++) total += (double)(each(i)); \
  return total;

#define X_OF(i) x[i]
#define SQUARE_OF(i) (x[i] - m) * (x[i] - m)
#define SLOPE_OF(i) (w ? dy[i] * w[i] : dy[i])
#define LEAN_OF(i) SLOPE_OF(i) * (x[i] - m)

#define KERNELS(T, S) \
  static inline double sum_##S(int64_t n, const T *x) { SUM(T, X_OF) } \
  static inline double squares_##S(int64_t n, const T *x, T m) { SUM(T, SQUARE_OF) } \
  static inline double slope_##S(int64_t n, const T *dy, const T *w) { SUM(T, SLOPE_OF) } \
  static inline double lean_##S(int64_t n, const T *dy, const T *w, const T *x, \
                                T m){SUM(T, LEAN_OF)} TM_CLONES static void forward_##S(const job *g, int64_t part) { \
    const T *w = g->weight, *b = g->bias; \
    T *stats = g->stats; \
    int64_t n = g->n; \
    for (int64_t r = part * g->part; r < TM_MIN(g->R, (part + 1) * g->part); r++) { \
      const T *x = (const T *)g->x + r * n; \
      T *y = (T *)g->y + r * n, m = (T)(sum_##S(n, x) / (double)n); \
      double variance = squares_##S(n, x, m) / (double)n; \
      T k = (T)(1 / sqrt(variance + g->eps)); \
      stats[r] = m, stats[g->R + r] = (T)variance; \
      if (w && b) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * k * w[i] + b[i]; \
      else \
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * k * (w ? w[i] : 1) + (b ? b[i] : 0); \
    } \
  } \
  static inline void flush_##S(int64_t n, double *to, T *from) { \
    for (int64_t i = 0; i < 2 * n; i++) to[i] += (double)from[i], from[i] = 0; \
  } \
  /* g = dy * weight, h = (x - mean) * k: dx = k * (g - mean(g) - h * mean(g * h)) */ \
  TM_CLONES static void backward_##S(const job *g, int64_t part) { \
    const T *w = g->weight, *stats = g->stats; \
    int64_t n = g->n, first = part * g->part; \
    double *sums = g->sums ? (double *)g->sums + part * 2 * n : NULL; \
    T *dw = g->sums ? (T *)g->block + part * 2 * n : NULL, *db = dw ? dw + n : NULL; \
    for (int64_t r = first; r < TM_MIN(g->R, first + g->part); r++) { \
      const T *x = (const T *)g->x + r * n, *dy = (const T *)g->dy + r * n; \
      T *dx = (T *)g->y + r * n, m = stats[r], k = (T)(1 / sqrt((double)stats[g->R + r] + g->eps)); \
      T mean = (T)(slope_##S(n, dy, w) / (double)n); \
      T lean = (T)(lean_##S(n, dy, w, x, m) * (double)k * (double)k / (double)n); \
      if (w) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dx[i] = k * (dy[i] * w[i] - mean - (x[i] - m) * lean); \
      else _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dx[i] = k * (dy[i] - mean - (x[i] - m) * lean); \
      if (!dw) continue; \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) { \
        dw[i] += dy[i] * (x[i] - m) * k; \
        db[i] += dy[i]; \
      } \
      if ((r - first) % 32 == 31) flush_##S(n, sums, dw); \
    } \
    if (dw) flush_##S(n, sums, dw); \
  }
KERNELS(float, f32)
KERNELS(double, f64)

enum { PARTS = 16 };

static int64_t cut(job *g) {
  g->part = TM_MAX(64, (g->R + PARTS - 1) / PARTS);
  return (g->R + g->part - 1) / g->part;
}

static void run(const job *g, int64_t parts, void (*item)(const job *, int64_t)) {
  if (parts > 1 && g->R * g->n >= TM_PARALLEL_MIN) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < parts; i++) item(g, i);
  } else {
    for (int64_t i = 0; i < parts; i++) item(g, i);
  }
}

/* Contiguous, in the dtype of the arithmetic; false without memory. *keep is released at the end. */
static bool bring(const tm_tensor *t, int dtype, tm_tensor **keep, const void **data) {
  *data = NULL;
  if (!t) return true;
  tm_tensor *cast = tm_tensor_cast(t, dtype);
  *keep = cast ? tm_tensor_dense(cast) : NULL;
  tm_tensor_release(cast);
  if (*keep) *data = tm_data(*keep);
  return *keep != NULL;
}

/* A place for a result in the dtype of the arithmetic: itself, or a temporary. */
static tm_tensor *place(tm_tensor *out, int dtype) {
  if (out->c.dtype != dtype) return tm_tensor_empty(out->c.ndim, out->c.size, NULL, dtype, out->c.device);
  tm_tensor_retain(out);
  return out;
}

static int land(tm_tensor *out, tm_tensor *at) { return at->c.storage == out->c.storage ? TM_OK : tm_tensor_copy_data(out, at); }

int tm_layer_norm_cpu(tm_call *c) {
  tm_tensor *keep[3] = {NULL}, *y = NULL;
  job g = {.eps = c->a[1]};
  int code = TM_OK;
  count_rows(c->in[0], (int)c->a[0], &g.R, &g.n);
  if (!bring(c->in[0], c->compute, &keep[0], &g.x) || !bring(c->in[1], c->compute, &keep[1], &g.weight) ||
      !bring(c->in[2], c->compute, &keep[2], &g.bias) || !(y = place(c->out[0], c->compute))) {
    code = tm_last_code();
  } else {
    g.y = tm_data(y), g.stats = tm_data(c->out[1]);
    run(&g, cut(&g), c->compute == TM_F64 ? forward_f64 : forward_f32);
    code = land(c->out[0], y);
  }
  tm_tensor_release(y);
  for (int i = 0; i < 3; i++) tm_tensor_release(keep[i]);
  return code;
}

static tm_tensor *zeros(int64_t n, int dtype) {
  tm_tensor *t = tm_tensor_empty(1, &n, NULL, dtype, TM_DEV_CPU);
  if (t && n) memset(tm_data(t), 0, (size_t)n * (size_t)tm_dtype_size(dtype));
  return t;
}

int tm_layer_norm_backward_cpu(tm_call *c) {
  tm_tensor *keep[6] = {NULL}, *dx = NULL;
  const void *stats;
  bool affine = c->a[2] != 0;
  int code = TM_OK;
  job g = {.eps = c->a[1]};
  count_rows(c->in[1], (int)c->a[0], &g.R, &g.n);
  int64_t parts = cut(&g), room = affine ? 2 * parts * g.n : 0;
  if (!bring(c->in[0], c->compute, &keep[0], &g.dy) || !bring(c->in[1], c->compute, &keep[1], &g.x) ||
      !bring(c->in[2], c->compute, &keep[2], &stats) || !bring(c->in[3], c->compute, &keep[3], &g.weight) ||
      !(keep[4] = zeros(room, TM_F64)) || !(keep[5] = zeros(room, c->compute)) || !(dx = place(c->out[0], c->compute))) {
    code = tm_last_code();
  } else {
    g.y = tm_data(dx), g.stats = tm_data(keep[2]);
    if (affine) g.sums = tm_data(keep[4]), g.block = tm_data(keep[5]);
    run(&g, parts, c->compute == TM_F64 ? backward_f64 : backward_f32);
    code = land(c->out[0], dx);
    for (int64_t i = 0; i < (affine ? 2 * g.n : 0); i++) {
      double total = 0;
      for (int64_t p = 0; p < parts; p++) total += ((const double *)g.sums)[p * 2 * g.n + i];
      tm_store((char *)tm_data(c->out[1]) + i * tm_dtype_size(c->out[1]->c.dtype), c->out[1]->c.dtype, total);
    }
  }
  tm_tensor_release(dx);
  for (int i = 0; i < 6; i++) tm_tensor_release(keep[i]);
  return code;
}

/* -- gradients ------------------------------------------------------------------------------------------------------ */

/* Row k of the pair t (2, R), in the shape of x with the last count dims of size 1 */
static tm_tensor *row_of(tm_vjp *v, tm_tensor *t, int k, int ndim, const int64_t *size) {
  return v_reshape(v, v_run(v, TM_OPC_select, 1, &t, (double[]){0, k}, NULL), ndim, size);
}

/* With operators: what is to be differentiated again, and gradients of the statistics. */
static int compose(tm_vjp *v, int count) {
  tm_tensor *x = v->x[0], *w = v->x[1], *dy = v->dy[0];
  int ndim = v->xm[0].ndim;
  int64_t dims[TM_MAXDIM], outer[TM_MAXDIM];
  double n = 1;
  for (int d = 0; d < ndim; d++) outer[d] = v->xm[0].size[d];
  for (int d = 0; d < count; d++) dims[d] = ndim - count + d, n *= (double)outer[ndim - count + d], outer[ndim - count + d] = 1;
  tm_tensor *centred = v_sub(v, x, v_scale(v, v_sum(v, x, count, dims, 1), 1 / n));
  tm_tensor *variance = v_scale(v, v_sum(v, v_mul(v, centred, centred), count, dims, 1), 1 / n);
  tm_tensor *k = v_pow(v, v_shift(v, variance, v->a[1]), v_num(v, -0.5)), *h = v_mul(v, centred, k), *dx = NULL;
  if (dy) {
    tm_tensor *g = w ? v_mul(v, dy, w) : dy;
    tm_tensor *mean = v_scale(v, v_sum(v, g, count, dims, 1), 1 / n);
    tm_tensor *lean = v_scale(v, v_sum(v, v_mul(v, g, h), count, dims, 1), 1 / n);
    dx = v_mul(v, k, v_sub(v, v_sub(v, g, mean), v_mul(v, h, lean)));
    if (v->want[1]) v_set(v, 1, v_mul(v, dy, h));
    if (v->want[2]) v_set(v, 2, dy);
  }
  if (v->dy[1]) {
    tm_tensor *dmean = v_scale(v, row_of(v, v->dy[1], 0, ndim, outer), 1 / n);
    tm_tensor *dvariance = v_scale(v, row_of(v, v->dy[1], 1, ndim, outer), 2 / n);
    tm_tensor *more = v_add(v, v_mul(v, dvariance, centred), dmean);
    dx = dx ? v_add(v, dx, more) : more;
  }
  v_set(v, 0, dx);
  return TM_OK;
}

int tm_layer_norm_vjp(tm_vjp *v) {
  int count = (int)v->a[0];
  if (tm_grad_mode() || v->dy[1] || !v->x[0] || !v->y[1]) return compose(v, count);
  tm_tensor *in[4] = {v->dy[0], v->x[0], v->y[1], v->x[1]};
  tm_call c = {.op = &tm_ops[TM_OPC_layer_norm_backward], .nin = 4, .in = in, .na = 3};
  c.a[0] = count, c.a[1] = v->a[1], c.a[2] = v->want[1] || v->want[2];
  int code = tm_call_run(&c);
  if (code != TM_OK) return code;
  tm_tensor *dx = v_keep(v, c.out[0]), *pair = v_keep(v, c.out[1]);
  v_set(v, 0, dx);
  for (int i = 1; i < 3; i++)
    if (v->want[i]) v_set(v, i, row_of(v, pair, i - 1, v->xm[i].ndim, v->xm[i].size));
  return TM_OK;
}
