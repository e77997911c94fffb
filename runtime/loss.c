/* loss.c: nll_loss and mse_loss. Classes count from 1 in memory, except ignore_index, which is compared with the
** stored value as it is. Sums are kept in float64 and cut by shape alone, so that they do not depend on the number
** of threads.
**
** Letters: x is (C), (N, C) or (N, C, d...) log-probabilities, seen as (N, C, S); the target has P = N * S classes. */
#include "internal.h"

enum { NONE, MEAN, SUM };

/* -- nll_loss ------------------------------------------------------------------------------------------------- */

static bool joins(const tm_tensor *t) { return t && t->c.ndim == 0 && t->c.device == TM_DEV_CPU; } /* any device */

static int one_device(const tm_call *c) {
  int first = 0;
  while (first + 1 < c->nin && joins(c->in[first])) first++;
  const tm_tensor *a = c->in[first];
  for (int i = first + 1; a && i < c->nin; i++) {
    const tm_tensor *b = c->in[i];
    if (b && b->c.device != a->c.device && !joins(b))
      return tm_fail(TM_ERUNTIME, "%s: %s is %s, but %s is on %s; expected one device", c->op->name, c->op->tname[i], tm_say(b),
                     c->op->tname[first], tm_device_name(a->c.device));
  }
  return TM_OK;
}

static void set_result(tm_call *c, int k, int ndim, const int64_t *size, int dtype) {
  tm_spec *o = &c->o[k];
  o->ndim = ndim, o->dtype = dtype, o->strided = 0;
  o->device = c->in[0]->c.device;
  for (int i = 1; i < c->nin; i++) /* a 0-dim CPU tensor does not decide */
    if (c->in[i] && o->device == TM_DEV_CPU && c->in[i]->c.device != TM_DEV_CPU) o->device = c->in[i]->c.device;
  if (ndim) memcpy(o->size, size, (size_t)ndim * sizeof *size);
  c->nout = k + 1;
}

/* size without its class dim */
static int target_shape(int ndim, const int64_t *size, int64_t *to) {
  int n = 0;
  for (int d = 0; d < ndim; d++)
    if (d != (ndim > 1)) to[n++] = size[d];
  return n;
}

/* target and weight fit an x of this shape? */
static int check_classes(const tm_call *c, int ndim, const int64_t *size, const tm_tensor *target, const tm_tensor *weight) {
  int64_t want[TM_MAXDIM];
  char a[160], b[160];
  if (ndim < 1) return tm_fail(TM_ERUNTIME, "%s: x is 0-dim, expected (C), (N, C) or (N, C, ...)", c->op->name);
  int n = target_shape(ndim, size, want);
  if (target->c.dtype != TM_I64 && target->c.dtype != TM_I32 && target->c.dtype != TM_U8)
    return tm_fail(TM_ERUNTIME, "%s: target is %s, expected int64, int32 or uint8 classes", c->op->name, tm_say(target));
  if (target->c.ndim != n || memcmp(want, target->c.size, (size_t)n * sizeof *want))
    return tm_fail(TM_ERUNTIME, "%s: target is %s, expected shape %s for x of shape %s", c->op->name, tm_say(target),
                   tm_shape_text(a, sizeof a, n, want), tm_shape_text(b, sizeof b, ndim, size));
  if (weight && (!tm_is_float(weight->c.dtype) || weight->c.ndim != 1 || T_SIZE(weight, 0) != size[ndim > 1]))
    return tm_fail(TM_ERUNTIME, "%s: weight is %s, expected floating numbers of shape (%lld,), one per class", c->op->name, tm_say(weight),
                   (long long)size[ndim > 1]);
  return one_device(c);
}

int tm_infer_nll_loss(tm_call *c) {
  const tm_tensor *x = c->in[0], *target = c->in[1];
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ERUNTIME, "nll_loss: x is %s, expected a floating dtype", tm_say(x));
  int code = check_classes(c, x->c.ndim, x->c.size, target, c->in[2]);
  if (code != TM_OK) return code;
  c->compute = x->c.dtype;
  set_result(c, 0, c->a[1] == NONE ? target->c.ndim : 0, target->c.size, x->c.dtype);
  /* The sum of weights counts samples: beyond 2048 a float16 cannot. */
  set_result(c, 1, 0, NULL, x->c.dtype == TM_F64 ? TM_F64 : TM_F32);
  return TM_OK;
}

int tm_infer_nll_loss_backward(tm_call *c) {
  const tm_tensor *dy = c->in[0], *target = c->in[1], *total = c->in[2];
  int ndim = (int)c->a[0];
  int code = check_classes(c, ndim, c->list[0], target, c->in[3]);
  if (code != TM_OK) return code;
  bool fits = c->a[2] != NONE ? dy->c.ndim == 0
                              : dy->c.ndim == target->c.ndim && !memcmp(dy->c.size, target->c.size, (size_t)dy->c.ndim * sizeof(int64_t));
  if (!fits || !tm_is_float(dy->c.dtype) || total->c.ndim != 0)
    return tm_fail(TM_ERUNTIME, "%s: dy is %s, total is %s; expected the results of nll_loss for target, %s", c->op->name, tm_say(dy),
                   tm_say(total), tm_say(target));
  c->compute = dy->c.dtype;
  set_result(c, 0, ndim, c->list[0], dy->c.dtype);
  return TM_OK;
}

typedef struct classes {
  const tm_tensor *target; /* contiguous */
  const void *at;
  const char *weight; /* NULL: 1 */
  int64_t wstride;    /* bytes */
  int wdtype;
  int64_t C, S, P, ignore;
  int64_t sn, sc; /* strides of x along N and C, in elements; along S it is 1 */
} classes;

static void set_classes(classes *g, int ndim, const int64_t *size, const tm_tensor *target, const tm_tensor *weight, double ignore) {
  g->target = target, g->at = tm_data(target), g->P = target->c.numel, g->ignore = (int64_t)ignore;
  g->weight = weight ? tm_data(weight) : NULL;
  if (weight) g->wdtype = weight->c.dtype, g->wstride = T_STRIDE(weight, 0) * tm_dtype_size(weight->c.dtype);
  g->C = size[ndim > 1], g->S = 1;
  for (int d = 2; d < ndim; d++) g->S *= size[d];
  g->sn = g->C * g->S, g->sc = g->S;
}

enum { IGNORED = -1, BAD = -2 };
static inline int64_t stored(const classes *g, int64_t p) {
  switch (g->target->c.dtype) {
  case TM_I64: return ((const int64_t *)g->at)[p];
  case TM_I32: return ((const int32_t *)g->at)[p];
  default: return ((const uint8_t *)g->at)[p];
  }
}
static inline int64_t class_of(const classes *g, int64_t p) { /* from 0 */
  int64_t k = stored(g, p);
  if (k == g->ignore) return IGNORED;
  return k >= 1 && k <= g->C ? k - 1 : BAD;
}
static inline double weight_of(const classes *g, int64_t k) { return g->weight ? tm_load(g->weight + k * g->wstride, g->wdtype) : 1; }
static inline int64_t place(const classes *g, int64_t p, int64_t k) { return p / g->S * g->sn + k * g->sc + p % g->S; }

static int fail_class(const tm_call *c, const classes *g, int64_t p) {
  char where[160] = "";
  int64_t index[TM_MAXDIM], q = p;
  for (int d = g->target->c.ndim - 1; d >= 0; d--) index[d] = q % T_SIZE(g->target, d) + 1, q /= T_SIZE(g->target, d);
  for (int d = 0, n = 0; d < g->target->c.ndim && n < 140; d++)
    n += snprintf(where + n, sizeof where - (size_t)n, "[%lld]", (long long)index[d]);
  return tm_fail(TM_EINDEX, "%s: target%s is %lld, expected 1 to %lld: classes count from 1", c->op->name, where, (long long)stored(g, p),
                 (long long)g->C);
}

enum { MOST = 256 }; /* parts that run side by side, each of 8192 positions at least */
static int64_t part_size(int64_t P) { return TM_MAX(8192, (P + MOST - 1) / MOST); }

/* Positions [from, to): sums losses and weights; the first wrong position, or -1. Bound by the random access to x. */
static int64_t nll_part(const classes *g, int64_t from, int64_t to, const void *x, int dtype, void *each, double sum[2]) {
  int size = tm_dtype_size(dtype);
  double loss = 0, total = 0;
  for (int64_t p = from; p < to; p++) {
    int64_t k = class_of(g, p);
    double l = 0;
    if (k == BAD) return p;
    if (k != IGNORED) {
      double w = weight_of(g, k);
      const char *at = (const char *)x + place(g, p, k) * size;
      l = -w * (dtype == TM_F32 ? *(const float *)at : tm_load(at, dtype));
      loss += l, total += w;
    }
    if (each) tm_store((char *)each + p * size, dtype, l);
  }
  sum[0] = loss, sum[1] = total;
  return -1;
}

int tm_nll_loss_cpu(tm_call *c) {
  tm_tensor *x = c->in[0], *target, *dense = NULL;
  int reduction = (int)c->a[1], code = TM_OK;
  if (!(target = tm_tensor_dense(c->in[1])) || (x->c.ndim > 2 && !(dense = tm_tensor_dense(x)))) {
    tm_tensor_release(target);
    return tm_last_code();
  }
  if (dense) x = dense;
  classes g;
  set_classes(&g, x->c.ndim, x->c.size, target, c->in[2], c->a[0]);
  if (x->c.ndim <= 2) g.sn = x->c.ndim == 2 ? T_STRIDE(x, 0) : 0, g.sc = T_STRIDE(x, x->c.ndim - 1);
  void *from = tm_data(x), *each = reduction == NONE ? tm_data(c->out[0]) : NULL;
  double sum[MOST][2] = {{0}}, loss = 0, total = 0;
  int64_t bad[MOST], part = part_size(g.P), parts = (g.P + part - 1) / part;
  if (parts <= 1) {
    bad[0] = nll_part(&g, 0, g.P, from, x->c.dtype, each, sum[0]);
    parts = 1;
  } else {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < parts; i++) bad[i] = nll_part(&g, i * part, TM_MIN(i * part + part, g.P), from, x->c.dtype, each, sum[i]);
  }
  for (int64_t i = 0; i < parts && code == TM_OK; i++) {
    if (bad[i] >= 0) code = fail_class(c, &g, bad[i]);
    loss += sum[i][0], total += sum[i][1];
  }
  if (!each && reduction != NONE) tm_store(tm_data(c->out[0]), c->out[0]->c.dtype, reduction == MEAN ? loss / total : loss);
  tm_store(tm_data(c->out[1]), c->out[1]->c.dtype, total);
  tm_tensor_release(dense);
  tm_tensor_release(target);
  return code;
}

/* dx = -weight[target] * dy at the target's class (/ total for a mean), 0 elsewhere. */
int tm_nll_loss_vjp(tm_vjp *v) {
  if (!v->dy[0]) return TM_OK; /* the sum of the weights does not depend on x */
  tm_tensor *in[] = {v->dy[0], v->x[1], v->y[1], v->x[2]};
  const int64_t *list[] = {v->xm[0].size, NULL, NULL};
  v_set(v, 0, v_run(v, TM_OPC_nll_loss_backward, 4, in, (double[]){v->xm[0].ndim, v->a[0], v->a[1]}, list));
  return TM_OK;
}

static int64_t nll_backward_part(const classes *g, int64_t from, int64_t to, const tm_tensor *dy, double by, tm_tensor *dx) {
  int dtype = dx->c.dtype, size = tm_dtype_size(dtype);
  char *x = tm_data(dx);
  const char *d = tm_data(dy);
  double one = dy->c.ndim == 0 ? by * tm_load(d, dtype) : 0;
  for (int64_t p = from; p < to; p++) {
    int64_t k = class_of(g, p);
    if (k == BAD) return p;
    if (k == IGNORED) continue;
    double value = weight_of(g, k) * (dy->c.ndim == 0 ? one : by * tm_load(d + p * size, dtype));
    char *at = x + place(g, p, k) * size;
    if (dtype == TM_F32) *(float *)at = (float)value;
    else tm_store(at, dtype, value);
  }
  return -1;
}

int tm_nll_loss_backward_cpu(tm_call *c) {
  tm_tensor *dx = c->out[0], *target, *dy = NULL;
  int code = TM_OK;
  if (!(target = tm_tensor_dense(c->in[1])) || !(dy = tm_tensor_dense(c->in[0]))) {
    tm_tensor_release(target);
    return tm_last_code();
  }
  classes g;
  set_classes(&g, dx->c.ndim, dx->c.size, target, c->in[3], c->a[1]);
  double by = c->a[2] == MEAN ? -1 / tm_load(tm_data(c->in[2]), c->in[2]->c.dtype) : -1;
  if (dx->c.numel > 0) memset(tm_data(dx), 0, (size_t)dx->c.numel * (size_t)tm_dtype_size(dx->c.dtype));
  int64_t bad[MOST], part = part_size(g.P), parts = (g.P + part - 1) / part;
  if (parts == 1) {
    bad[0] = nll_backward_part(&g, 0, g.P, dy, by, dx);
  } else if (parts > 1) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < parts; i++) bad[i] = nll_backward_part(&g, i * part, TM_MIN(i * part + part, g.P), dy, by, dx);
  }
  for (int64_t i = 0; i < parts && code == TM_OK; i++)
    if (bad[i] >= 0) code = fail_class(c, &g, bad[i]);
  tm_tensor_release(dy);
  tm_tensor_release(target);
  return code;
}

/* nll_loss is linear in x and this is its transpose, so the gradient of dy is nll_loss of the incoming gradient. */
int tm_nll_loss_backward_vjp(tm_vjp *v) {
  tm_tensor *in[] = {v->dy[0], v->x[1], v->x[3]};
  v_set(v, 0, v_run(v, TM_OPC_nll_loss, 3, in, (double[]){v->a[1], v->a[2]}, NULL));
  return TM_OK;
}

/* -- mse_loss -------------------------------------------------------------------------------------------------- */

int tm_infer_mse_loss(tm_call *c) {
  const tm_tensor *x = c->in[0], *target = c->in[1];
  int n = TM_MAX(x->c.ndim, target->c.ndim), code;
  int64_t size[TM_MAXDIM];
  if (!tm_is_float(x->c.dtype) || !tm_is_float(target->c.dtype))
    return tm_fail(TM_ERUNTIME, "mse_loss: x is %s, target is %s; expected floating dtypes", tm_say(x), tm_say(target));
  if ((code = one_device(c)) != TM_OK) return code;
  for (int d = 0; d < n; d++) {
    int i = x->c.ndim - n + d, j = target->c.ndim - n + d;
    int64_t a = i < 0 ? 1 : T_SIZE(x, i), b = j < 0 ? 1 : T_SIZE(target, j);
    if (a != b && a != 1 && b != 1)
      return tm_fail(TM_ERUNTIME, "mse_loss: x is %s, target is %s; sizes of dim %d from the end must be equal or 1", tm_say(x),
                     tm_say(target), n - d);
    size[d] = a == 1 ? b : a;
  }
  c->compute = tm_dtype_promote(x->c.dtype, target->c.dtype); /* as in PyTorch, a 0-dim tensor counts like any other */
  set_result(c, 0, c->a[0] == NONE ? n : 0, size, c->compute);
  return TM_OK;
}

#define SQUARES(T, S) \
  TM_CLONES static void squares_##S(int64_t n, void *const *p, const int64_t *s, const double *a) { \
    T *y = p[0]; \
    const T *x = p[1], *t = p[2]; \
    (void)a; \
    if (s[0] == 1 && s[1] == 1 && s[2] == 1) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = (x[i] - t[i]) * (x[i] - t[i]); \
    else \
      for (int64_t i = 0; i < n; i++) { \
        T d = x[i * s[1]] - t[i * s[2]]; \
        y[i * s[0]] = d * d; \
      } \
  } \
  /* n contiguous elements; float64 takes up 64 at a time */ \
  TM_CLONES static double sum_squares_##S(int64_t n, const T *x, const T *t) { \
    double total = 0; \
    T s[16] = {0}; \
    int64_t i = 0; \
    for (; i + 64 <= n; i += 64) { \
      T q[16]; \
      for (int k = 0; k < 16; k++) { \
        T d0 = x[i + k] - t[i + k], d1 = x[i + k + 16] - t[i + k + 16]; \
        T d2 = x[i + k + 32] - t[i + k + 32], d3 = x[i + k + 48] - t[i + k + 48]; \
        q[k] = (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3); \
      } \
      for (int k = 0; k < 16; k++) s[k] += q[k]; \
      if (i % 4096 == 4032) \
        for (int k = 0; k < 16; k++) total += (double)s[k], s[k] = 0; \
    } \
    for (int k = 0; k < 16; k++) total += (double)s[k]; \
    for (; i < n; i++) { \
      double d = (double)x[i] - (double)t[i]; \
      total += d * d; \
    } \
    return total; \
  }
SQUARES(float, f32)
SQUARES(double, f64)

static double sum_squares(int64_t from, int64_t n, int dtype, const void *x, const void *t) {
  return dtype == TM_F64 ? sum_squares_f64(n, (const double *)x + from, (const double *)t + from)
                         : sum_squares_f32(n, (const float *)x + from, (const float *)t + from);
}

/* Bound by memory bandwidth. */
static double sum_squares_all(int64_t n, int dtype, const void *x, const void *t) {
  double total = 0, sum[MOST];
  int64_t part = TM_MAX(TM_PARALLEL_MIN, (n + MOST - 1) / MOST), parts = (n + part - 1) / part;
  if (parts <= 1) return sum_squares(0, n, dtype, x, t);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < parts; i++) sum[i] = sum_squares(i * part, TM_MIN(part, n - i * part), dtype, x, t);
  for (int64_t i = 0; i < parts; i++) total += sum[i];
  return total;
}

/* Shapes that broadcast, strides and mixed dtypes: both sides become contiguous, of the broadcast shape. */
static tm_tensor *spread(const tm_tensor *t, int ndim, const int64_t *size, int dtype) {
  tm_tensor *view = tm_tensor_alias(t), *cast = NULL, *dense = NULL;
  if (view) {
    int lead = ndim - t->c.ndim;
    view->c.ndim = (int8_t)ndim, view->c.numel = tm_numel_of(ndim, size);
    for (int d = 0; d < ndim; d++) {
      view->c.stride[d] = d < lead || T_SIZE(t, d - lead) != size[d] ? 0 : T_STRIDE(t, d - lead);
      view->c.size[d] = size[d];
    }
    if ((cast = tm_tensor_cast(view, dtype))) dense = tm_tensor_dense(cast);
  }
  tm_tensor_release(cast);
  tm_tensor_release(view);
  return dense;
}

int tm_mse_loss_cpu(tm_call *c) {
  static const tm_loops loops = {squares_f32, squares_f64, NULL};
  tm_tensor *x = c->in[0], *t = c->in[1], *y = c->out[0], *a = NULL, *b = NULL;
  int ndim = TM_MAX(x->c.ndim, t->c.ndim), dtype = c->compute == TM_F64 ? TM_F64 : TM_F32, code = TM_OK;
  int64_t size[TM_MAXDIM], n = x->c.numel;
  if (c->a[0] == NONE) return tm_elementwise(c, &loops);
  bool same = x->c.ndim == t->c.ndim && !memcmp(x->c.size, t->c.size, (size_t)ndim * sizeof *size) && x->c.dtype == dtype &&
              t->c.dtype == dtype && tm_is_contiguous(x) && tm_is_contiguous(t);
  if (!same) {
    for (int d = 0; d < ndim; d++) {
      int i = x->c.ndim - ndim + d, j = t->c.ndim - ndim + d;
      size[d] = i < 0 || T_SIZE(x, i) == 1 ? (j < 0 ? 1 : T_SIZE(t, j)) : T_SIZE(x, i);
    }
    n = tm_numel_of(ndim, size);
    if (!(a = spread(x, ndim, size, dtype)) || !(b = spread(t, ndim, size, dtype))) code = tm_last_code();
  }
  if (code == TM_OK) {
    double sum = n > 0 ? sum_squares_all(n, dtype, tm_data(a ? a : x), tm_data(b ? b : t)) : 0;
    tm_store(tm_data(y), y->c.dtype, c->a[0] == MEAN ? sum / (double)n : sum);
  }
  tm_tensor_release(a);
  tm_tensor_release(b);
  return code;
}

/* y = (x - target)^2: dx = 2 * (x - target) * dy, / n for a mean; the target gets the opposite. */
int tm_mse_loss_vjp(tm_vjp *v) {
  const tm_inmeta *x = &v->xm[0], *t = &v->xm[1];
  int ndim = TM_MAX(x->ndim, t->ndim);
  double n = 1;
  for (int d = 0; d < ndim && v->a[0] == MEAN; d++) {
    int i = x->ndim - ndim + d, j = t->ndim - ndim + d;
    n *= (double)(i < 0 || x->size[i] == 1 ? (j < 0 ? 1 : t->size[j]) : x->size[i]);
  }
  tm_tensor *dx = v_mul(v, v_sub(v, v->x[0], v->x[1]), v_scale(v, v->dy[0], 2 / TM_MAX(n, 1)));
  v_set(v, 0, dx);
  if (v->want[1]) v_set(v, 1, v_neg(v, dx));
  return TM_OK;
}
