/* softmax.c: softmax and log_softmax along one dim. x and y are seen as (outer, n, inner), contiguous, n the dim;
** other layouts and the half types are brought into that form first.
**
** The maximum is subtracted first: exp of a float32 overflows above 88. A row of -inf alone gives NaN (-inf - -inf),
** as the limit is not defined. Bound by memory bandwidth; exp costs about as much when x is in the cache. */
#include "internal.h"
#include "vecmath.h"

int tm_infer_softmax(tm_call *c) {
  const tm_tensor *x = c->in[0];
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ERUNTIME, "%s: x is %s, expected a floating dtype", c->op->name, tm_say(x));
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0].ndim = x->c.ndim, c->o[0].dtype = x->c.dtype, c->o[0].device = x->c.device, c->o[0].strided = 0;
  for (int d = 0; d < x->c.ndim; d++) c->o[0].size[d] = T_SIZE(x, d);
  return TM_OK;
}

enum { BLOCK = 1024, WIDTH = 128 }; /* elements of short rows that share one call of exp; columns side by side */

/* Inlined into each clone of the functions that users of LOOPS call, so that a short row costs no calls. */
#define LOOPS(T, S) \
  static inline T max_##S(int64_t n, const T *x) { \
    T m = -(T)INFINITY; /* passes over NaN: x - m is NaN there, and then the sum is */ \
    if (n < 16)         /* gathering the lanes of a vector would cost more */ \
      for (int64_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m; \
    else _Pragma("omp simd reduction(max:m)") for (int64_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m; \
    return m; \
  } \
  static inline void minus_##S(int64_t n, T *y, const T *x, T m) { _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = x[i] - m; } \
  static inline double sum_##S(int64_t n, const T *x) { \
    double sum = 0; \
    if (n < 16) \
      for (int64_t i = 0; i < n; i++) sum += (double)x[i]; \
    else _Pragma("omp simd reduction(+:sum)") for (int64_t i = 0; i < n; i++) sum += (double)x[i]; \
    return sum; \
  } \
  /* m short rows, or one of any length, contiguous. */ \
  TM_CLONES static void softmax_rows_##S(int64_t m, int64_t n, const T *x, T *y) { \
    for (int64_t i = 0; i < m; i++) minus_##S(n, y + i * n, x + i * n, max_##S(n, x + i * n)); \
    tm_vec_exp_##S(m *n, y, y); \
    for (int64_t i = 0; i < m; i++) { \
      T *yi = y + i * n, sum = (T)sum_##S(n, yi); \
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++) yi[j] /= sum; \
    } \
  } \
  TM_CLONES static void log_softmax_rows_##S(int64_t m, int64_t n, const T *x, T *y) { \
    T e[BLOCK]; \
    for (int64_t i = 0; i < m; i++) minus_##S(n, y + i * n, x + i * n, max_##S(n, x + i * n)); \
    if (n <= BLOCK) tm_vec_exp_##S(m *n, e, y); \
    for (int64_t i = 0; i < m; i++) { \
      double sum = n <= BLOCK ? sum_##S(n, e + i * n) : 0; \
      for (int64_t j = 0; n > BLOCK && j < n; j += BLOCK) { \
        tm_vec_exp_##S(TM_MIN(BLOCK, n - j), e, y + i * n + j); \
        sum += sum_##S(TM_MIN(BLOCK, n - j), e); \
      } \
      minus_##S(n, y + i * n, y + i * n, (T)log(sum)); \
    } \
  } \
  /* (n, inner): w columns side by side. */ \
  TM_CLONES static void softmax_columns_##S(int64_t n, int64_t inner, int64_t w, const T *x, T *y, int logarithm) { \
    T top[WIDTH], e[WIDTH]; \
    double sum[WIDTH] = {0}; \
    memcpy(top, x, (size_t)w * sizeof(T)); \
    for (int64_t i = 1; i < n; i++) \
      _Pragma("omp simd") for (int64_t j = 0; j < w; j++) top[j] = x[i * inner + j] > top[j] ? x[i * inner + j] : top[j]; \
    for (int64_t i = 0; i < n; i++) { \
      T *yi = y + i * inner, *ei = logarithm ? e : yi; \
      for (int64_t j = 0; j < w; j++) yi[j] = x[i * inner + j] - top[j]; \
      tm_vec_exp_##S(w, ei, yi); \
      for (int64_t j = 0; j < w; j++) sum[j] += (double)ei[j]; \
    } \
    for (int64_t j = 0; j < w; j++) e[j] = logarithm ? (T)log(sum[j]) : (T)sum[j]; \
    for (int64_t i = 0; i < n; i++) { \
      T *yi = y + i * inner; \
      if (logarithm) \
        for (int64_t j = 0; j < w; j++) yi[j] -= e[j]; \
      else \
        for (int64_t j = 0; j < w; j++) yi[j] /= e[j]; \
    } \
  } \
  static void softmax_item_##S(const job *g, int64_t i) { \
    const T *x = g->x; \
    T *y = g->y; \
    if (g->inner == 1) { \
      int64_t m = TM_MIN(g->block, g->outer - i * g->block), at = i * g->block * g->n; \
      if (g->logarithm) log_softmax_rows_##S(m, g->n, x + at, y + at); \
      else softmax_rows_##S(m, g->n, x + at, y + at); \
    } else { \
      int64_t per = (g->inner + WIDTH - 1) / WIDTH, j = i % per * WIDTH, at = i / per * g->n * g->inner + j; \
      softmax_columns_##S(g->n, g->inner, TM_MIN(WIDTH, g->inner - j), x + at, y + at, g->logarithm); \
    } \
  }

typedef struct job {
  const void *x;
  void *y;
  int64_t outer, n, inner, block; /* block: rows in one item */
  int logarithm;
} job;
LOOPS(float, f32)
LOOPS(double, f64)

static void run(const job *g, int dtype) {
  int64_t items = g->inner == 1 ? (g->outer + g->block - 1) / g->block : g->outer * ((g->inner + WIDTH - 1) / WIDTH);
  void (*item)(const job *, int64_t) = dtype == TM_F64 ? softmax_item_f64 : softmax_item_f32;
  if (items > 1 && g->outer * g->n * g->inner >= TM_PARALLEL_MIN / 2) { /* an exp costs as much as several additions */
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < items; i++) item(g, i);
  } else {
    for (int64_t i = 0; i < items; i++) item(g, i);
  }
}

static int softmax(tm_call *c, int logarithm) {
  tm_tensor *x = c->in[0], *y = c->out[0], *cast = NULL, *dense = NULL, *wide = NULL;
  int dim = x->c.ndim ? (int)c->a[0] : 0, dtype = x->c.dtype == TM_F64 ? TM_F64 : TM_F32, code = TM_OK;
  job g = {.outer = 1, .n = x->c.ndim ? T_SIZE(x, dim) : 1, .inner = 1, .logarithm = logarithm};
  if (x->c.numel == 0) return TM_OK;
  for (int d = 0; d < x->c.ndim; d++) {
    if (d < dim) g.outer *= T_SIZE(x, d);
    if (d > dim) g.inner *= T_SIZE(x, d);
  }
  g.block = TM_MAX(BLOCK / g.n, 1);
  if (!(cast = tm_tensor_cast(x, dtype)) || !(dense = tm_tensor_dense(cast)) ||
      (y->c.dtype != dtype && !(wide = tm_tensor_empty(y->c.ndim, y->c.size, NULL, dtype, y->c.device)))) {
    code = tm_last_code();
  } else {
    g.x = tm_data(dense), g.y = tm_data(wide ? wide : y);
    run(&g, dtype);
    if (wide) code = tm_tensor_copy_data(y, wide);
  }
  tm_tensor_release(wide);
  tm_tensor_release(dense);
  tm_tensor_release(cast);
  return code;
}

int tm_softmax_cpu(tm_call *c) { return softmax(c, 0); }
int tm_log_softmax_cpu(tm_call *c) { return softmax(c, 1); }

/* y = softmax(x): dx = y * (dy - sum(y * dy)), along dim. */
int tm_softmax_vjp(tm_vjp *v) {
  tm_tensor *y = v->y[0], *dy = v->dy[0];
  v_set(v, 0, v_mul(v, y, v_sub(v, dy, v_sum1(v, v_mul(v, y, dy), (int)v->a[0], 1))));
  return TM_OK;
}

/* y = log_softmax(x): dx = dy - exp(y) * sum(dy), along dim. */
int tm_log_softmax_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0];
  v_set(v, 0, v_sub(v, dy, v_mul(v, v_exp(v, v->y[0]), v_sum1(v, dy, (int)v->a[0], 1))));
  return TM_OK;
}
