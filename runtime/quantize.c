/* quantize.c: products by a matrix of bytes. What must stay true: a row of the weight is its bytes times its scale,
** worked out in the dtype of x, so that the result is that of linear on the dequantised weight.
**
** Letters: x (..., k), weight (n, k) int8, scale (n), bias (n), result (..., n). */
#include "blas.h"

int tm_infer_linear_int8(tm_call *c) {
  const tm_tensor *x = c->in[0], *w = c->in[1];
  int d = x->c.ndim;
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ETYPE, "linear_int8: x is %s, expected a floating dtype", tm_say(x));
  if (w->c.dtype != TM_I8) return tm_fail(TM_ETYPE, "linear_int8: weight is %s, expected int8", tm_say(w));
  if (!d || w->c.ndim != 2 || T_SIZE(x, d - 1) != T_SIZE(w, 1))
    return tm_fail(TM_ERUNTIME, "linear_int8: x is %s and weight is %s, expected x (..., in) and weight (out, in)", tm_say(x), tm_say(w));
  for (int i = 1; i < 4; i++) {
    const tm_tensor *t = c->in[i];
    if (t && t->c.device != x->c.device)
      return tm_fail(TM_ERUNTIME, "linear_int8: x is %s and %s is %s, expected one device", tm_say(x), c->op->tname[i], tm_say(t));
    if (t && i > 1 && (t->c.dtype != x->c.dtype || t->c.ndim != 1 || T_SIZE(t, 0) != T_SIZE(w, 0)))
      return tm_fail(TM_ERUNTIME, "linear_int8: %s is %s, expected %s (%lld,)", c->op->tname[i], tm_say(t), tm_dtype_name(x->c.dtype),
                     (long long)T_SIZE(w, 0));
  }
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = d, .dtype = x->c.dtype, .device = x->c.device};
  for (int i = 0; i < d - 1; i++) c->o[0].size[i] = T_SIZE(x, i);
  c->o[0].size[d - 1] = T_SIZE(w, 0);
  return TM_OK;
}

/* Bound by reading the bytes, a quarter of what float32 would read. */
TM_CLONES static float dot(int64_t k, const float *x, const int8_t *w) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < k; i++) sum += x[i] * (float)w[i];
  return sum;
}

/* The same for four rows of x: each byte becomes a float once. */
TM_CLONES static void dot4(int64_t k, const float *const *x, const int8_t *w, float *sum) {
  const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < k; i++) {
    float f = (float)w[i];
    s0 += x0[i] * f, s1 += x1[i] * f, s2 += x2[i] * f, s3 += x3[i] * f;
  }
  sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3;
}

enum { FEW = 4, PANEL = 256 }; /* rows of x for which dots are faster than a product; rows of weight made floats at a time */

static void few_rows(int64_t m, int64_t n, int64_t k, const float *x, const int8_t *w, const float *scale, const float *bias, float *y) {
  const float *row[FEW];
  for (int i = 0; i < FEW; i++) row[i] = x + TM_MIN(i, m - 1) * k;
#pragma omp parallel for if (n * k >= TM_PARALLEL_MIN)
  for (int64_t j = 0; j < n; j++) {
    float sum[FEW];
    if (m == 1) sum[0] = dot(k, x, w + j * k);
    else dot4(k, row, w + j * k, sum);
    for (int64_t i = 0; i < m; i++) y[i * n + j] = sum[i] * scale[j] + (bias ? bias[j] : 0);
  }
}

/* rows j .. j + rows of the weight times their scales, in the dtype of the scales */
static void dequantise(tm_tensor *to, const tm_tensor *w, const tm_tensor *scale, int64_t j, int64_t rows) {
  int64_t k = T_SIZE(w, 1);
  const int8_t *p = (const int8_t *)tm_data(w) + j * k;
  int dtype = scale->c.dtype, size = tm_dtype_size(dtype);
  char *out = tm_data(to);
#pragma omp parallel for if (rows * k >= TM_PARALLEL_MIN)
  for (int64_t r = 0; r < rows; r++) {
    const char *s = (const char *)tm_data(scale) + (j + r) * size;
    if (dtype == TM_F32) {
      float by = *(const float *)s, *o = (float *)out + r * k;
      for (int64_t i = 0; i < k; i++) o[i] = by * (float)p[r * k + i];
    } else {
      double by = tm_load(s, dtype);
      for (int64_t i = 0; i < k; i++) tm_store(out + (r * k + i) * size, dtype, by * p[r * k + i]);
    }
  }
}

int tm_linear_int8_cpu(tm_call *c) {
  tm_tensor *in[4] = {NULL}, *out = c->out[0], *panel = NULL;
  int code = TM_OK, dtype = out->c.dtype, size = tm_dtype_size(dtype);
  int64_t k = T_SIZE(c->in[1], 1), n = T_SIZE(c->in[1], 0), m = n ? out->c.numel / n : 0;
  if (!out->c.numel) return TM_OK;
  for (int i = 0; i < 4; i++)
    if (c->in[i] && !(in[i] = tm_tensor_dense(c->in[i]))) {
      code = tm_last_code();
      goto done;
    }
  if (dtype == TM_F32 && m <= FEW) {
    few_rows(m, n, k, tm_data(in[0]), tm_data(in[1]), tm_data(in[2]), in[3] ? tm_data(in[3]) : NULL, tm_data(out));
    goto done;
  }
  if (!(panel = tm_tensor_empty(2, (int64_t[]){TM_MIN(n, PANEL), k}, NULL, dtype, TM_DEV_CPU))) {
    code = tm_last_code();
    goto done;
  }
  char *y = tm_data(out);
  for (int64_t i = 0; in[3] && i < m; i++) memcpy(y + i * n * size, tm_data(in[3]), (size_t)(n * size));
  for (int64_t j = 0; j < n && code == TM_OK; j += PANEL) {
    int64_t rows = TM_MIN(n - j, PANEL);
    dequantise(panel, in[1], in[2], j, rows);
    code = tm_gemm(dtype, 0, 1, m, rows, k, 1, tm_data(in[0]), k, tm_data(panel), k, in[3] ? 1 : 0, y + j * size, n);
  }
done:
  tm_tensor_release(panel);
  for (int i = 0; i < 4; i++) tm_tensor_release(in[i]);
  return code;
}

/* y = x (q s)^T + b: dx = dy (q s), ds = (x q^T) * dy, db = dy; the engine sums over the rows. */
int tm_linear_int8_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0];
  if (v->want[0]) v_set(v, 0, v_matmul(v, dy, v_mul(v, v_cast(v, v->x[1], v->xm[0].dtype), v_unsqueeze(v, v->x[2], 1))));
  if (v->want[2]) {
    tm_tensor *in[3] = {v->x[0], v_cast(v, v->x[1], v->xm[0].dtype), NULL};
    v_set(v, 2, v_mul(v, dy, v_run(v, TM_OPC_linear, 3, in, NULL, NULL)));
  }
  if (v->want[3]) v_set(v, 3, dy);
  return TM_OK;
}
