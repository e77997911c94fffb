/* matmul.c: products of tensors: matmul, addmm, linear. Each becomes calls of tm_gemm on the operands as they lie:
** an operand whose last two axes are dense one way or the other (a row-major matrix or its transpose) is never
** copied, and a batched left operand that lies as one tall matrix is multiplied in one go.
**
** Letters: a (..., m, k), b (..., k, n), result (..., m, n), contiguous. */
#include <omp.h>

#include "blas.h"

/* -- rules ------------------------------------------------------------------------------------------------ */

static int same_kind(tm_call *c, int first, const char *const *name) {
  const tm_tensor *a = c->in[first];
  for (int i = 0; i < c->nin; i++) {
    const tm_tensor *b = c->in[i];
    if (!b || b == a) continue;
    if (b->c.device != a->c.device)
      return tm_fail(TM_ERUNTIME, "%s: %s is on %s and %s on %s, expected one device", c->op->name, name[first],
                     tm_device_name(a->c.device), name[i], tm_device_name(b->c.device));
    if (b->c.dtype != a->c.dtype)
      return tm_fail(TM_ERUNTIME, "%s: %s is %s and %s is %s, expected equal dtypes", c->op->name, name[first], tm_say(a), name[i],
                     tm_say(b));
  }
  if (a->c.dtype == TM_BOOL) return tm_fail(TM_ENOTIMPL, "%s: not defined for bool", c->op->name);
  c->nout = 1;
  c->o[0].dtype = c->compute = a->c.dtype;
  c->o[0].device = a->c.device;
  c->o[0].strided = 0;
  return TM_OK;
}

int tm_infer_matmul(tm_call *c) {
  static const char *const name[] = {"a", "b"};
  const tm_tensor *a = c->in[0], *b = c->in[1];
  int na = a->c.ndim, nb = b->c.ndim, code = same_kind(c, 0, name);
  if (code) return code;
  if (!na || !nb) return tm_fail(TM_ERUNTIME, "matmul: a is %s and b is %s, expected at least one dim of both", tm_say(a), tm_say(b));
  int64_t k = T_SIZE(a, na - 1), kb = T_SIZE(b, nb == 1 ? 0 : nb - 2);
  if (k != kb)
    return tm_fail(TM_ERUNTIME, "matmul: a is %s and b is %s: the last size of a is %lld, the %s of b is %lld, expected equal sizes",
                   tm_say(a), tm_say(b), (long long)k, nb == 1 ? "size" : "last but one", (long long)kb);
  tm_spec *o = &c->o[0];
  int batch = TM_MAX(TM_MAX(na, nb) - 2, 0);
  for (int d = 0; d < batch; d++) {
    int ia = d + na - 2 - batch, ib = d + nb - 2 - batch;
    int64_t sa = ia < 0 ? 1 : T_SIZE(a, ia), sb = ib < 0 ? 1 : T_SIZE(b, ib);
    if (sa != sb && sa != 1 && sb != 1)
      return tm_fail(TM_ERUNTIME, "matmul: a is %s and b is %s: sizes %lld and %lld of their dims %d and %d do not broadcast", tm_say(a),
                     tm_say(b), (long long)sa, (long long)sb, ia + 1, ib + 1);
    o->size[d] = sa == 1 ? sb : sa;
  }
  o->ndim = batch;
  if (na > 1) o->size[o->ndim++] = T_SIZE(a, na - 2);
  if (nb > 1) o->size[o->ndim++] = T_SIZE(b, nb - 1);
  return TM_OK;
}

int tm_infer_addmm(tm_call *c) {
  static const char *const name[] = {"bias", "a", "b"};
  const tm_tensor *bias = c->in[0], *a = c->in[1], *b = c->in[2];
  int code = same_kind(c, 1, name), n = bias->c.ndim;
  if (code) return code;
  if (a->c.ndim != 2 || b->c.ndim != 2)
    return tm_fail(TM_ERUNTIME, "addmm: a is %s and b is %s, expected two dims of both", tm_say(a), tm_say(b));
  if (T_SIZE(a, 1) != T_SIZE(b, 0))
    return tm_fail(TM_ERUNTIME, "addmm: a is %s and b is %s: the last size of a is %lld, the first of b is %lld, expected equal sizes",
                   tm_say(a), tm_say(b), (long long)T_SIZE(a, 1), (long long)T_SIZE(b, 0));
  tm_spec *o = &c->o[0];
  o->ndim = 2;
  o->size[0] = T_SIZE(a, 0), o->size[1] = T_SIZE(b, 1);
  bool fits = n <= 2;
  for (int i = 1; fits && i <= n; i++) fits = T_SIZE(bias, n - i) == 1 || T_SIZE(bias, n - i) == o->size[2 - i];
  if (!fits)
    return tm_fail(TM_ERUNTIME, "addmm: bias is %s, which does not broadcast to (%lld, %lld)", tm_say(bias), (long long)o->size[0],
                   (long long)o->size[1]);
  for (int i = 0; i < 2 && !tm_is_float(c->compute); i++)
    if (c->a[i] != floor(c->a[i]))
      return tm_fail(TM_ERUNTIME, "addmm: %s is %g, expected a whole number for %s", i ? "alpha" : "beta", c->a[i],
                     tm_dtype_name(c->compute));
  return TM_OK;
}

int tm_infer_linear(tm_call *c) {
  static const char *const name[] = {"x", "weight", "bias"};
  const tm_tensor *x = c->in[0], *w = c->in[1], *bias = c->in[2];
  int code = same_kind(c, 0, name), n = x->c.ndim;
  if (code) return code;
  if (!n || w->c.ndim != 2)
    return tm_fail(TM_ERUNTIME, "linear: x is %s and weight is %s, expected x (..., in) and weight (out, in)", tm_say(x), tm_say(w));
  if (T_SIZE(x, n - 1) != T_SIZE(w, 1))
    return tm_fail(TM_ERUNTIME,
                   "linear: x is %s and weight is %s: the last size of x is %lld, that of weight is %lld, expected equal sizes", tm_say(x),
                   tm_say(w), (long long)T_SIZE(x, n - 1), (long long)T_SIZE(w, 1));
  if (bias && (bias->c.ndim != 1 || T_SIZE(bias, 0) != T_SIZE(w, 0)))
    return tm_fail(TM_ERUNTIME, "linear: bias is %s and weight is %s, expected bias (%lld,)", tm_say(bias), tm_say(w),
                   (long long)T_SIZE(w, 0));
  tm_spec *o = &c->o[0];
  o->ndim = n;
  for (int i = 0; i < n - 1; i++) o->size[i] = T_SIZE(x, i);
  o->size[n - 1] = T_SIZE(w, 0);
  return TM_OK;
}

/* -- operands ----------------------------------------------------------------------------------------------- */

typedef enum form { PLAIN, ROW, COLUMN, TRANSPOSED } form; /* how a tensor is read as matrices; a vector is a ROW or COLUMN */

typedef struct matrix {
  tm_tensor *t, *copy; /* copy: retained, when the tensor's own strides would not do */
  int64_t rows, columns, rs, cs, ld;
  int trans, batch; /* batch: axes before the matrix's */
} matrix;

static void read_strides(matrix *x, const tm_tensor *t, form f) {
  int n = t->c.ndim;
  int64_t size = n ? T_SIZE(t, n - 1) : 1, stride = n ? T_STRIDE(t, n - 1) : 1;
  x->batch = TM_MAX(n - 2, 0);
  if (f == ROW) x->rows = 1, x->columns = size, x->rs = 0, x->cs = stride;
  else if (f == COLUMN) x->rows = size, x->columns = 1, x->rs = stride, x->cs = 0;
  else if (f == PLAIN) x->rows = T_SIZE(t, n - 2), x->columns = size, x->rs = T_STRIDE(t, n - 2), x->cs = stride;
  else x->rows = size, x->columns = T_SIZE(t, n - 2), x->rs = stride, x->cs = T_STRIDE(t, n - 2);
}

/* A stride of an axis of size 1 says nothing. */
static bool find_layout(matrix *x) {
  int64_t r = x->rows, c = x->columns;
  if ((c <= 1 || x->cs == 1) && (r <= 1 || x->rs >= TM_MAX(c, 1))) {
    x->trans = 0, x->ld = r <= 1 ? TM_MAX(c, 1) : x->rs;
    return true;
  }
  if ((r <= 1 || x->rs == 1) && (c <= 1 || x->cs >= TM_MAX(r, 1))) {
    x->trans = 1, x->ld = c <= 1 ? TM_MAX(r, 1) : x->cs;
    return true;
  }
  return false;
}

static int matrix_of(matrix *x, tm_tensor *t, form f) {
  if (f == PLAIN && t->c.ndim == 1) f = ROW;
  x->t = t, x->copy = NULL;
  read_strides(x, t, f);
  if (TM_LIKELY(find_layout(x))) return TM_OK;
  if (!(x->t = x->copy = tm_tensor_dense(t))) return tm_last_code();
  read_strides(x, x->t, f);
  if (!find_layout(x)) x->trans = 0, x->ld = TM_MAX(x->columns, 1); /* no elements */
  return TM_OK;
}

/* Several matrices one below the other, at even distance: one tall matrix. */
static bool fold(matrix *x) {
  int64_t rows = x->rows, next = 0;
  if (rows > 1) next = rows * x->ld;
  if (x->trans && rows > 1) return false;
  if (rows <= 1 && x->columns > 1 && x->cs != 1) return false;
  for (int d = x->batch - 1; d >= 0; d--) {
    int64_t size = T_SIZE(x->t, d), stride = T_STRIDE(x->t, d);
    if (size == 1) continue;
    if (!next && stride < x->columns) return false; /* rows of one each: the first stride is that of the rows */
    if (!next) x->ld = TM_MAX(stride, 1);
    else if (stride != next) return false;
    next = stride * size;
    rows *= size;
  }
  x->rows = rows, x->trans = 0, x->batch = 0;
  return true;
}

/* -- the product ---------------------------------------------------------------------------------------------- */

typedef struct batches {
  int ndim;
  int64_t count, size[TM_MAXDIM], sa[TM_MAXDIM], sb[TM_MAXDIM]; /* strides in elements; 0 where broadcast */
} batches;

static void batch_strides(const batches *s, const matrix *x, int64_t *stride) {
  for (int d = 0; d < s->ndim; d++) {
    int i = d + x->batch - s->ndim;
    stride[d] = i < 0 || T_SIZE(x->t, i) == 1 ? 0 : T_STRIDE(x->t, i);
  }
}

static int batch_product(const batches *s, int64_t i, const matrix *a, const matrix *b, double alpha, double beta, tm_tensor *out) {
  int dtype = out->c.dtype;
  int64_t oa = 0, ob = 0, size = tm_dtype_size(dtype), m = a->rows, n = b->columns, at = i;
  for (int d = s->ndim - 1; d >= 0; at /= s->size[d--]) oa += at % s->size[d] * s->sa[d], ob += at % s->size[d] * s->sb[d];
  return tm_gemm(dtype, a->trans, b->trans, m, n, a->columns, alpha, (char *)tm_data(a->t) + oa * size, a->ld,
                 (char *)tm_data(b->t) + ob * size, b->ld, beta, (char *)tm_data(out) + i * m * n * size, n);
}

/* Multiply-adds between two looks at the interrupt, and what makes a product worth the threads by itself. */
#define POLL_WORK 1e9
#define LARGE_WORK 4e6

/* out := alpha * a b + beta * out, where the first `ndim` axes of out count the products. Releases the copies. */
static int multiply(matrix *a, matrix *b, double alpha, double beta, tm_tensor *out, int ndim) {
  batches s = {.ndim = ndim, .count = 1};
  int code = TM_OK, one = 1;
  if (out->c.numel == 0) goto done;
  for (int d = 0; d < b->batch; d++) one &= T_SIZE(b->t, d) == 1;
  if (ndim && one && fold(a)) s.ndim = 0;
  for (int d = 0; d < s.ndim; d++) s.count *= s.size[d] = T_SIZE(out, d);
  batch_strides(&s, a, s.sa);
  batch_strides(&s, b, s.sb);
  double work = (double)a->rows * (double)a->columns * (double)b->columns + 1;
  int64_t step = TM_MAX((int64_t)(POLL_WORK / work), 1);
  /* Small products run side by side; a thread's failure would leave its message there, so not the halves, which allocate. */
  bool parallel = s.count > 1 && work < LARGE_WORK && work * (double)s.count > 2e5 && tm_dtype_size(out->c.dtype) != 2;
  for (int64_t i = 0; i < s.count && !code; i += step) {
    int64_t end = TM_MIN(i + step, s.count);
    if (i && (code = tm_poll())) break;
    if (parallel) {
#pragma omp parallel for
      for (int64_t j = i; j < end; j++) batch_product(&s, j, a, b, alpha, beta, out);
    } else {
      for (int64_t j = i; j < end && !code; j++) code = batch_product(&s, j, a, b, alpha, beta, out);
    }
  }
done:
  tm_tensor_release(a->copy);
  tm_tensor_release(b->copy);
  return code;
}

static int multiply_tensors(tm_tensor *a, tm_tensor *b, form fb, double alpha, double beta, tm_tensor *out, int ndim) {
  matrix ma, mb;
  int code = matrix_of(&ma, a, PLAIN);
  if (code) return code;
  if ((code = matrix_of(&mb, b, fb))) {
    tm_tensor_release(ma.copy);
    return code;
  }
  return multiply(&ma, &mb, alpha, beta, out, ndim);
}

int tm_matmul_cpu(tm_call *c) {
  tm_tensor *a = c->in[0], *b = c->in[1];
  int ndim = TM_MAX(TM_MAX(a->c.ndim, b->c.ndim) - 2, 0);
  return multiply_tensors(a, b, b->c.ndim == 1 ? COLUMN : PLAIN, 1, 0, c->out[0], ndim);
}

int tm_addmm_cpu(tm_call *c) {
  tm_tensor *bias = c->in[0], *out = c->out[0];
  if (c->a[0] != 0) { /* 0 * NaN stays out of the result */
    tm_tensor *wide = tm_tensor_alias(bias);
    if (!wide) return tm_last_code();
    for (int i = 1; i <= 2; i++) {
      int d = bias->c.ndim - i;
      wide->c.size[2 - i] = T_SIZE(out, 2 - i);
      wide->c.stride[2 - i] = d < 0 || T_SIZE(bias, d) == 1 ? 0 : T_STRIDE(bias, d);
    }
    wide->c.ndim = 2;
    wide->c.numel = out->c.numel;
    int code = tm_tensor_copy_data(out, wide);
    tm_tensor_release(wide);
    if (code) return code;
  }
  return multiply_tensors(c->in[1], c->in[2], PLAIN, c->a[1], c->a[0], out, 0);
}

/* rows times the same n bytes, in blocks of some kilobytes: a call of memcpy per short row would cost more. */
static void repeat_row(char *to, const char *row, size_t n, size_t rows) {
  size_t total = n * rows, block = n;
  memcpy(to, row, n);
  for (; block < 4096 && 2 * block <= total; block *= 2) memcpy(to + block, to, block);
  for (size_t done = block; done < total; done += block) memcpy(to + done, to, TM_MIN(block, total - done));
}

int tm_linear_cpu(tm_call *c) {
  tm_tensor *x = c->in[0], *bias = c->in[2], *out = c->out[0];
  if (bias && out->c.numel) { /* first, so that the product adds to it: no second pass over the result */
    tm_tensor *dense = tm_tensor_dense(bias);
    if (!dense) return tm_last_code();
    size_t n = (size_t)bias->c.numel;
    repeat_row(tm_data(out), tm_data(dense), n * (size_t)tm_dtype_size(out->c.dtype), (size_t)out->c.numel / n);
    tm_tensor_release(dense);
  }
  return multiply_tensors(x, c->in[1], TRANSPOSED, 1, bias ? 1 : 0, out, TM_MAX(x->c.ndim - 2, 0));
}

/* -- gradients --------------------------------------------------------------------------------------------------- */

static tm_tensor *flipped(tm_vjp *v, tm_tensor *x) { return x ? v_transpose(v, x, x->c.ndim - 2, x->c.ndim - 1) : NULL; }

/* x as one matrix of all its rows; a vector is one row. */
static tm_tensor *rows_of(tm_vjp *v, tm_tensor *x) {
  if (!x || x->c.ndim == 2) return x;
  int64_t columns = T_SIZE(x, x->c.ndim - 1), rows = 1;
  for (int i = 0; i < x->c.ndim - 1; i++) rows *= T_SIZE(x, i);
  return v_reshape(v, x, 2, (int64_t[]){rows, columns});
}

/* y = a b: da = dy b^T, db = a^T dy. A vector's gradient is worked out with the vector as a matrix of one row
** or column. What b (k, n) gets from a batch of a is one product of all rows; other broadcasts the engine adds up. */
int tm_matmul_vjp(tm_vjp *v) {
  int na = v->xm[0].ndim, nb = v->xm[1].ndim, n;
  tm_tensor *dy = v->dy[0], *a = v->x[0], *b = v->x[1];
  if (na == 1 && nb == 1) { /* dy () */
    if (v->want[0]) v_set(v, 0, v_mul(v, dy, b));
    if (v->want[1]) v_set(v, 1, v_mul(v, dy, a));
    return TM_OK;
  }
  if (nb == 1) dy = v_unsqueeze(v, dy, dy->c.ndim);     /* (..., m, 1) */
  if (na == 1) dy = v_unsqueeze(v, dy, dy->c.ndim - 1); /* (..., 1, n) */
  if (!dy) return tm_last_code();
  n = dy->c.ndim;
  if (v->want[0] && b) {
    tm_tensor *bt = nb == 1 ? v_unsqueeze(v, b, 0) : flipped(v, b), *da = v_matmul(v, dy, bt); /* (..., m, k) */
    if (na == 1 && da) {
      int64_t size[TM_MAXDIM];
      for (int i = 0; i < n - 2; i++) size[i] = T_SIZE(da, i);
      size[n - 2] = v->xm[0].size[0];
      da = v_reshape(v, da, n - 1, size);
    }
    v_set(v, 0, da);
  }
  if (v->want[1] && a) {
    tm_tensor *db;
    if (nb <= 2) db = v_matmul(v, flipped(v, rows_of(v, a)), rows_of(v, dy)); /* a (k): one row, as dy (1, n) */
    else db = v_matmul(v, na == 1 ? v_unsqueeze(v, a, 1) : flipped(v, a), dy);
    if (nb == 1 && db) db = v_reshape(v, db, 1, v->xm[1].size);
    v_set(v, 1, db);
  }
  return TM_OK;
}

int tm_addmm_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0];
  double beta = v->a[0], alpha = v->a[1];
  if (v->want[0]) v_set(v, 0, v_scale(v, dy, beta));
  if (v->want[1]) v_set(v, 1, v_scale(v, v_matmul(v, dy, flipped(v, v->x[2])), alpha));
  if (v->want[2]) v_set(v, 2, v_scale(v, v_matmul(v, flipped(v, v->x[1]), dy), alpha));
  return TM_OK;
}

/* y = x W^T + b: dx = dy W, dW = dy^T x over all rows, db = dy summed by the engine. */
int tm_linear_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0];
  if (v->want[0]) v_set(v, 0, v_matmul(v, dy, v->x[1]));
  if (v->want[1]) v_set(v, 1, v_matmul(v, flipped(v, rows_of(v, dy)), rows_of(v, v->x[0])));
  if (v->nin > 2 && v->want[2]) v_set(v, 2, dy);
  return TM_OK;
}
