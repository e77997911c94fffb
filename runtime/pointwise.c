/* pointwise.c: operators whose result at a place depends on their operands at that place alone, with the rules for
** dtypes and shapes that they share. The loops see plain numbers of one kind; tm_elementwise brings them there. */
#include <tgmath.h>

#include "internal.h"
#include "vecmath.h"

/* -- dtypes ---------------------------------------------------------------------------------------------------- */

int tm_default_float = TM_F32;

int tm_default_dtype(void) { return tm_default_float; }

int tm_default_dtype_set(int dtype) {
  if (!tm_dtype_name(dtype) || !tm_is_float(dtype))
    return tm_fail(TM_ETYPE, "default dtype: expected a floating one, got %s", tm_dtype_name(dtype) ? tm_dtype_name(dtype) : "none");
  tm_default_float = dtype;
  return TM_OK;
}

/* The stronger of two ranks of operands decides, unless the weaker is of a higher category (bool < integer < float). */
static int combine(int strong, int weak) {
  if (strong < 0) return weak;
  if (weak < 0 || tm_is_float(strong)) return strong;
  return strong == TM_BOOL || tm_is_float(weak) ? tm_dtype_promote(strong, weak) : strong;
}

/* PyTorch's rule: tensors with dims beat 0-dim ones, and these beat numbers. */
int tm_result_dtype(int nin, tm_tensor *const *in) {
  int rank[3] = {-1, -1, -1};
  for (int i = 0; i < nin; i++) {
    const tm_content *x = &in[i]->c;
    int dtype = x->dtype, r = x->ndim > 0 ? 0 : x->flags & TM_FLAG_WRAPPED ? 2 : 1;
    if (r == 2 && tm_is_float(dtype)) dtype = tm_default_float;
    rank[r] = rank[r] < 0 ? dtype : tm_dtype_promote(rank[r], dtype);
  }
  return combine(rank[0], combine(rank[1], rank[2]));
}

/* -- shapes ------------------------------------------------------------------------------------------------------ */

/* 0-dim operands on the CPU go along with any device. */
static int common_device(tm_call *c) {
  const tm_tensor *seen = NULL;
  for (int i = 0; i < c->nin; i++) {
    const tm_tensor *t = c->in[i];
    if (t->c.ndim == 0 && t->c.device == TM_DEV_CPU && !(i == 0 && c->inplace)) continue;
    if (seen && seen->c.device != t->c.device)
      return tm_fail(TM_ERUNTIME, "%s: operands are on different devices: %s%s, %s%s", c->op->name, tm_say(seen),
                     seen->c.device == TM_DEV_CPU ? " on cpu" : "", tm_say(t), t->c.device == TM_DEV_CPU ? " on cpu" : "");
    if (!seen) seen = t;
  }
  c->o[0].device = seen ? seen->c.device : TM_DEV_CPU;
  return TM_OK;
}

static int broadcast_with(tm_call *c, int i) {
  const tm_content *x = &c->in[i]->c;
  tm_spec *o = &c->o[0];
  char text[160];
  int more = x->ndim - o->ndim;
  if (more > 0) {
    memmove(o->size + more, o->size, (size_t)o->ndim * sizeof *o->size);
    for (int d = 0; d < more; d++) o->size[d] = 1;
    o->ndim = x->ndim;
  }
  for (int d = o->ndim - 1, e = x->ndim - 1; e >= 0; d--, e--) {
    if (o->size[d] == 1) o->size[d] = x->size[e];
    else if (x->size[e] != 1 && x->size[e] != o->size[d])
      return tm_fail(TM_ERUNTIME, "%s: %s is %s, which does not broadcast with shape %s: %lld against %lld at dim %d", c->op->name,
                     c->op->tname[i], tm_say(c->in[i]), tm_shape_text(text, sizeof text, o->ndim, o->size), (long long)x->size[e],
                     (long long)o->size[d], e - x->ndim);
  }
  return TM_OK;
}

/* Device and shape of the result of all operands together. */
static int common_shape(tm_call *c) {
  tm_spec *o = &c->o[0];
  const tm_content *x = &c->in[0]->c;
  if (common_device(c) != TM_OK) return TM_ERUNTIME;
  o->ndim = x->ndim;
  for (int d = 0; d < x->ndim; d++) o->size[d] = x->size[d];
  for (int i = 1; i < c->nin; i++)
    if (c->in[i]->c.ndim > 0 && broadcast_with(c, i) != TM_OK) return TM_ERUNTIME;
  return TM_OK;
}

/* No gaps and no element twice: its strides can be those of a fresh tensor. */
static bool is_dense(const tm_content *x) {
  int order[TM_MAXDIM], nd = 0;
  int64_t n = 1;
  for (int d = 0; d < x->ndim; d++) {
    if (x->size[d] == 1) continue;
    int k = nd++;
    for (; k > 0 && x->stride[order[k - 1]] > x->stride[d]; k--) order[k] = order[k - 1];
    order[k] = d;
  }
  for (int k = 0; k < nd; k++) {
    if (x->stride[order[k]] != n) return false;
    n *= x->size[order[k]];
  }
  return true;
}

/* A result is laid out in memory as its operands of the same shape are, if these agree and are dense: so that a
** chain of operators on a transposed matrix never jumps through memory. Otherwise it is contiguous. */
static int finish(tm_call *c, int dtype, int compute) {
  tm_spec *o = &c->o[0];
  const tm_content *like = NULL;
  c->nout = 1;
  c->compute = compute;
  o->dtype = dtype;
  o->strided = 0;
  for (int i = 0; i < c->nin; i++) {
    const tm_content *x = &c->in[i]->c;
    if (x->ndim != o->ndim || memcmp(x->size, o->size, (size_t)o->ndim * sizeof *o->size)) continue;
    if (tm_is_contiguous(c->in[i])) return TM_OK;
    if (like && memcmp(x->stride, like->stride, (size_t)o->ndim * sizeof *o->stride)) return TM_OK;
    like = x;
  }
  if (like && is_dense(like)) {
    o->strided = 1;
    memcpy(o->stride, like->stride, (size_t)o->ndim * sizeof *o->stride);
  }
  return TM_OK;
}

/* Arithmetic in float16 is done in float32, and what is not float16 (a number) enters unrounded. */
static int arithmetic(int dtype) { return dtype == TM_F16 || dtype == TM_BF16 ? TM_F32 : dtype; }

static int check_number(const tm_call *c, const char *what, double value, int dtype) {
  if (!tm_is_float(dtype) && dtype != TM_BOOL && !(fabs(value) < 9223372036854775808.0))
    return tm_fail(TM_EVALUE, "%s: %s is %g, which %s cannot hold", c->op->name, what, value, tm_dtype_name(dtype));
  return TM_OK;
}

/* -- rules --------------------------------------------------------------------------------------------------------- */

int tm_infer_unary(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_unary_signed(tm_call *c) {
  if (c->in[0]->c.dtype == TM_BOOL) return tm_fail(TM_ENOTIMPL, "%s: x is %s; logical_not inverts a mask", c->op->name, tm_say(c->in[0]));
  return tm_infer_unary(c);
}

int tm_infer_unary_float(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  if (!tm_is_float(dtype)) dtype = tm_default_float;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_predicate(tm_call *c) { return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, TM_BOOL, c->in[0]->c.dtype); }

/* The bounds are numbers: they make bool int64, and integers floating if they are not whole. */
int tm_infer_clamp(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  if (isnan(c->a[0]) && isnan(c->a[1])) return tm_fail(TM_EVALUE, "clamp: neither min nor max is given");
  if (dtype == TM_BOOL) dtype = TM_I64;
  for (int k = 0; k < 2; k++)
    if (!tm_is_float(dtype) && !isnan(c->a[k]) && (c->a[k] != floor(c->a[k]) || isinf(c->a[k]))) dtype = tm_default_float;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_binary(tm_call *c) {
  int dtype = tm_result_dtype(2, c->in);
  if (c->na > 0 && !tm_is_float(dtype) && c->a[0] != floor(c->a[0]))
    return tm_fail(TM_ERUNTIME, "%s: alpha is %g, expected a whole number for %s operands", c->op->name, c->a[0], tm_dtype_name(dtype));
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_binary_signed(tm_call *c) {
  for (int i = 0; i < 2; i++)
    if (c->in[i]->c.dtype == TM_BOOL)
      return tm_fail(TM_ENOTIMPL, "%s: %s is %s; cast it first, or see logical_xor and logical_not", c->op->name, c->op->tname[i],
                     tm_say(c->in[i]));
  return tm_infer_binary(c);
}

int tm_infer_binary_float(tm_call *c) {
  int dtype = tm_result_dtype(2, c->in);
  if (!tm_is_float(dtype)) dtype = tm_default_float;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_compare(tm_call *c) { return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, TM_BOOL, tm_result_dtype(2, c->in)); }

int tm_infer_where(tm_call *c) {
  int dtype = tm_result_dtype(2, c->in + 1);
  if (c->in[0]->c.dtype != TM_BOOL) return tm_fail(TM_ERUNTIME, "where: condition is %s, expected bool", tm_say(c->in[0]));
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_masked_fill(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  if (c->in[1]->c.dtype != TM_BOOL) return tm_fail(TM_ERUNTIME, "masked_fill: mask is %s, expected bool", tm_say(c->in[1]));
  if (check_number(c, "value", c->a[0], dtype) != TM_OK) return TM_EVALUE;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, arithmetic(dtype));
}

int tm_infer_clone(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  if (common_shape(c) != TM_OK || finish(c, dtype, dtype) != TM_OK) return tm_last_code();
  if (c->a[0]) c->o[0].strided = 0;
  return TM_OK;
}

int tm_infer_cast(tm_call *c) {
  const tm_tensor *x = c->in[0];
  int dtype = c->a[0] < 0 ? x->c.dtype : (int)c->a[0];
  if (common_shape(c) != TM_OK || finish(c, dtype, dtype) != TM_OK) return tm_last_code();
  if (c->a[1] >= 0) c->o[0].device = x->c.marks & TM_MARK_FAKE ? tm_device_fake((int)c->a[1]) : (int)c->a[1];
  if (TM_KIND(x->c.device) == TM_META && TM_KIND(c->o[0].device) != TM_META)
    return tm_fail(TM_ENOTIMPL, "cast: %s has no elements that could move to %s; to_empty makes uninitialised ones", tm_say(x),
                   tm_device_name(c->o[0].device));
  return TM_OK;
}

int tm_infer_copy(tm_call *c) {
  const tm_tensor *x = c->in[0], *source = c->in[1];
  if (TM_KIND(source->c.device) == TM_META && TM_KIND(x->c.device) != TM_META)
    return tm_fail(TM_ENOTIMPL, "copy_: source is %s: it has no elements to copy into x, %s", tm_say(source), tm_say(x));
  c->o[0].ndim = x->c.ndim;
  for (int d = 0; d < x->c.ndim; d++) c->o[0].size[d] = x->c.size[d];
  if (broadcast_with(c, 1) != TM_OK) return TM_ERUNTIME;
  c->o[0].device = x->c.device;
  return finish(c, x->c.dtype, x->c.dtype);
}

int tm_infer_fill(tm_call *c) {
  int dtype = c->in[0]->c.dtype;
  if (check_number(c, "value", c->a[0], dtype) != TM_OK) return TM_EVALUE;
  return common_shape(c) != TM_OK ? TM_ERUNTIME : finish(c, dtype, dtype);
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

int tm_clone_cpu(tm_call *c) { return tm_tensor_copy_data(c->out[0], c->in[0]); }
int tm_cast_cpu(tm_call *c) { return tm_tensor_copy_data(c->out[0], c->in[0]); }
int tm_copy_cpu(tm_call *c) { return tm_tensor_copy_data(c->out[0], c->in[1]); }

int tm_fill_cpu(tm_call *c) {
  tm_tensor *value = tm_tensor_scalar(c->a[0], c->out[0]->c.dtype);
  if (!value) return tm_last_code();
  int code = tm_tensor_copy_data(c->out[0], value);
  tm_tensor_release(value);
  return code;
}

int tm_clone_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  return TM_OK;
}

int tm_cast_vjp(tm_vjp *v) {
  double back[2] = {v->xm[0].dtype, v->xm[0].device};
  v_set(v, 0, v->dy[0]->c.device == v->xm[0].device ? v->dy[0] : v_run(v, TM_OPC_cast, 1, v->dy, back, NULL));
  return TM_OK;
}

int tm_copy_vjp(tm_vjp *v) {
  if (v->want[0]) v_set(v, 0, v_zeros(v, &v->xm[0]));
  v_set(v, 1, v->dy[0]);
  return TM_OK;
}

int tm_fill_vjp(tm_vjp *v) {
  v_set(v, 0, v_zeros(v, &v->xm[0]));
  return TM_OK;
}

/* -- loops ----------------------------------------------------------------------------------------------------------- */

#define EACH(body) \
  for (int64_t i = 0; i < n; i++) { body; }
#define EACH_DENSE(body) _Pragma("omp simd") EACH(body)

/* y = E of x; BEFORE prepares what E needs of the call's arguments arg[] */
#define LOOP1(name, T, BEFORE, E) \
  static TM_CLONES void name(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    T *y = p[0]; \
    const T *px = p[1]; \
    (void)arg; \
    BEFORE \
    if (s[0] == 1 && s[1] == 1) { \
      EACH_DENSE(T x = px[i]; y[i] = (T)(E)) \
    } else { \
      EACH(T x = px[i * s[1]]; y[i * s[0]] = (T)(E)) \
    } \
  }

/* y = E of a and b */
#define LOOP2(name, T, BEFORE, E) \
  static TM_CLONES void name(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    T *y = p[0]; \
    const T *pa = p[1], *pb = p[2]; \
    (void)arg; \
    BEFORE \
    if (s[0] == 1 && s[1] == 1 && s[2] == 1) { \
      EACH_DENSE(T a = pa[i]; T b = pb[i]; y[i] = (T)(E)) \
    } else if (s[0] == 1 && s[1] == 1 && s[2] == 0) { \
      T b = *pb; \
      EACH_DENSE(T a = pa[i]; y[i] = (T)(E)) \
    } else if (s[0] == 1 && s[1] == 0 && s[2] == 1) { \
      T a = *pa; \
      EACH_DENSE(T b = pb[i]; y[i] = (T)(E)) \
    } else { \
      EACH(T a = pa[i * s[1]]; T b = pb[i * s[2]]; y[i * s[0]] = (T)(E)) \
    } \
  }

/* y = E of x, a and b */
#define LOOP3(name, T, E) \
  static TM_CLONES void name(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    T *y = p[0]; \
    const T *px = p[1], *pa = p[2], *pb = p[3]; \
    (void)arg; \
    if (s[0] == 1 && s[1] == 1 && s[2] == 1 && s[3] == 1) { \
      EACH_DENSE(T x = px[i]; T a = pa[i]; T b = pb[i]; y[i] = (T)(E)) \
    } else if (s[0] == 1 && s[1] == 1 && s[2] == 1 && s[3] == 0) { \
      T b = *pb; \
      EACH_DENSE(T x = px[i]; T a = pa[i]; y[i] = (T)(E)) \
    } else { \
      EACH(T x = px[i * s[1]]; T a = pa[i * s[2]]; T b = pb[i * s[3]]; y[i * s[0]] = (T)(E)) \
    } \
  }

/* Operators with one formula for floats and one for int64; U: unsigned, so that overflow wraps. */
typedef uint64_t U;
#define ROW1(name, F, I) \
  LOOP1(name##_f32, float, , F) \
  LOOP1(name##_f64, double, , F) \
  LOOP1(name##_i64, int64_t, , I) static const tm_loops name##_loops = {name##_f32, name##_f64, name##_i64}; \
  int tm_##name##_cpu(tm_call *c) { return tm_elementwise(c, &name##_loops); }
#define LOOPS2(name, B32, B64, BI, F, I) \
  LOOP2(name##_f32, float, B32, F) \
  LOOP2(name##_f64, double, B64, F) \
  LOOP2(name##_i64, int64_t, BI, I) static const tm_loops name##_loops = {name##_f32, name##_f64, name##_i64};
#define ROW2(name, F, I) \
  LOOPS2(name, , , , F, I) \
  int tm_##name##_cpu(tm_call *c) { return tm_elementwise(c, &name##_loops); }

/* -- one operand ----------------------------------------------------------------------------------------------------- */

ROW1(neg, -x, 0 - (U)x)
ROW1(abs, fabs(x), x < 0 ? 0 - (U)x : (U)x)
ROW1(sign, (x > 0) - (x < 0), (x > 0) - (x < 0))
ROW1(sqrt, sqrt(x), x)
ROW1(relu, x < 0 ? 0 : x, x < 0 ? 0 : x) /* a NaN stays */
ROW1(isnan, x != x, ((void)x, 0))
ROW1(isfinite, x - x == 0, ((void)x, 1))
ROW1(logical_not, x == 0, x == 0)

/* Bounds that are absent let everything pass; a NaN fails both tests and stays. */
#define BOUNDS(T, min, max) T lo = isnan(arg[0]) ? min : (T)arg[0], hi = isnan(arg[1]) ? max : (T)arg[1];
LOOP1(clamp_f32, float, BOUNDS(float, -INFINITY, INFINITY), (x < lo ? lo : x) > hi ? hi : x < lo ? lo : x)
LOOP1(clamp_f64, double, BOUNDS(double, -INFINITY, INFINITY), (x < lo ? lo : x) > hi ? hi : x < lo ? lo : x)
LOOP1(clamp_i64, int64_t, BOUNDS(int64_t, INT64_MIN, INT64_MAX), (x < lo ? lo : x) > hi ? hi : x < lo ? lo : x)
int tm_clamp_cpu(tm_call *c) {
  static const tm_loops loops = {clamp_f32, clamp_f64, clamp_i64};
  return tm_elementwise(c, &loops);
}

/* Functions of vecmath.h want contiguous elements: others are gathered into a block. Bound by arithmetic until the
** threads outrun memory. */
enum { BLOCK = 256 };
#define GATHER(N, T, dtype) \
  static void map_##N(int64_t n, void *const *p, const int64_t *s, void (*f)(int64_t, T *, const T *)) { \
    T *y = p[0], block[BLOCK]; \
    const T *x = p[1]; \
    if (s[0] == 1 && s[1] == 1) { \
      f(n, y, x); \
      return; \
    } \
    for (int64_t i = 0; i < n; i += BLOCK) { \
      int64_t m = TM_MIN(n - i, BLOCK); \
      tm_convert(m, block, dtype, 1, x + i * s[1], dtype, s[1]); \
      f(m, block, block); \
      tm_convert(m, y + i * s[0], dtype, s[0], block, dtype, 1); \
    } \
  }
GATHER(f32, float, TM_F32)
GATHER(f64, double, TM_F64)

#define MAPPED_LOOPS(name) \
  static void name##_f32(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    (void)arg; \
    map_f32(n, p, s, tm_vec_##name##_f32); \
  } \
  static void name##_f64(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    (void)arg; \
    map_f64(n, p, s, tm_vec_##name##_f64); \
  } \
  static const tm_loops name##_loops = {name##_f32, name##_f64, NULL};
#define MAPPED(name) \
  MAPPED_LOOPS(name) \
  int tm_##name##_cpu(tm_call *c) { return tm_elementwise(c, &name##_loops); }
MAPPED(exp)
MAPPED(log)
MAPPED(tanh)
MAPPED(sigmoid)
MAPPED(erf)
MAPPED(expm1)
MAPPED(log1p)
MAPPED(silu)
MAPPED_LOOPS(gelu)
MAPPED_LOOPS(gelu_tanh)
int tm_gelu_cpu(tm_call *c) { return tm_elementwise(c, c->a[0] == 0 ? &gelu_loops : &gelu_tanh_loops); }

/* The same with two operands: y = f(b, a) */
#define GATHER2(N, T, dtype) \
  static void map2_##N(int64_t n, void *const *p, const int64_t *s, void (*f)(int64_t, T *, const T *, const T *)) { \
    T *y = p[0], left[BLOCK], right[BLOCK]; \
    const T *a = p[1], *b = p[2]; \
    if (s[0] == 1 && s[1] == 1 && s[2] == 1) { \
      f(n, y, b, a); \
      return; \
    } \
    for (int64_t i = 0; i < n; i += BLOCK) { \
      int64_t m = TM_MIN(n - i, BLOCK); \
      tm_convert(m, left, dtype, 1, a + i * s[1], dtype, s[1]); \
      tm_convert(m, right, dtype, 1, b + i * s[2], dtype, s[2]); \
      f(m, left, right, left); \
      tm_convert(m, y + i * s[0], dtype, s[0], left, dtype, 1); \
    } \
  }
GATHER2(f32, float, TM_F32)
GATHER2(f64, double, TM_F64)

#define SLOPE(name) \
  static void name##_slope_f32(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    (void)arg; \
    map2_f32(n, p, s, tm_vec_##name##_slope_f32); \
  } \
  static void name##_slope_f64(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    (void)arg; \
    map2_f64(n, p, s, tm_vec_##name##_slope_f64); \
  } \
  static const tm_loops name##_slope_loops = {name##_slope_f32, name##_slope_f64, NULL};
SLOPE(silu)
SLOPE(gelu)
SLOPE(gelu_tanh)
int tm_silu_backward_cpu(tm_call *c) { return tm_elementwise(c, &silu_slope_loops); }
int tm_gelu_backward_cpu(tm_call *c) { return tm_elementwise(c, c->a[0] == 0 ? &gelu_slope_loops : &gelu_tanh_slope_loops); }

/* -- two operands -------------------------------------------------------------------------------------------------------- */

ROW2(mul, a *b, (U)a *(U)b)
ROW2(maximum, ((a > b) | (a != a)) ? a : b, a > b ? a : b)
ROW2(minimum, ((a < b) | (a != a)) ? a : b, a < b ? a : b)
ROW2(eq, a == b, a == b)
ROW2(ne, a != b, a != b)
ROW2(lt, a < b, a < b)
ROW2(le, a <= b, a <= b)
ROW2(gt, a > b, a > b)
ROW2(ge, a >= b, a >= b)
ROW2(logical_and, (a != 0) & (b != 0), (a != 0) & (b != 0))
ROW2(logical_or, (a != 0) | (b != 0), (a != 0) | (b != 0))
ROW2(logical_xor, (a != 0) ^ (b != 0), (a != 0) ^ (b != 0))

LOOPS2(plus, , , , a + b, (U)a + (U)b)
LOOPS2(minus, , , , a - b, (U)a - (U)b)
LOOPS2(plus_scaled, float alpha = (float)arg[0];, double alpha = arg[0];, U alpha = (U)(int64_t)arg[0];, a + alpha * b, (U)a + alpha * (U)b)
LOOPS2(minus_scaled, float alpha = (float)arg[0];, double alpha = arg[0];, U alpha = (U)(int64_t)arg[0];
       , a - alpha * b, (U)a - alpha * (U)b)
int tm_add_cpu(tm_call *c) { return tm_elementwise(c, c->a[0] == 1 ? &plus_loops : &plus_scaled_loops); }
int tm_sub_cpu(tm_call *c) { return tm_elementwise(c, c->a[0] == 1 ? &minus_loops : &minus_scaled_loops); }

LOOP2(div_f32, float, , a / b)
LOOP2(div_f64, double, , a / b)
int tm_div_cpu(tm_call *c) {
  static const tm_loops loops = {div_f32, div_f64, NULL};
  return tm_elementwise(c, &loops);
}

/* Common exponents need no logarithm. */
#define POWER(N, T, dtype) \
  LOOP1(square_##N, T, , x *x) \
  LOOP1(cube_##N, T, , x *x *x) \
  LOOP1(root_##N, T, , sqrt(x)) \
  LOOP1(inverse_##N, T, , 1 / x) \
  static void pow_##N(int64_t n, void *const *p, const int64_t *s, const double *arg) { \
    T *y = p[0], base[BLOCK], exponent[BLOCK]; \
    const T *a = p[1], *b = p[2]; \
    tm_loop_fn easy = s[2] != 0      ? NULL \
                      : *b == 2      ? square_##N \
                      : *b == 3      ? cube_##N \
                      : *b == (T)0.5 ? root_##N \
                      : *b == -1     ? inverse_##N \
                                     : NULL; \
    if (easy) { \
      easy(n, p, s, arg); \
      return; \
    } \
    for (int64_t i = 0; i < n; i += BLOCK) { \
      int64_t m = TM_MIN(n - i, BLOCK); \
      tm_convert(m, base, dtype, 1, a + i * s[1], dtype, s[1]); \
      tm_convert(m, exponent, dtype, 1, b + i * s[2], dtype, s[2]); \
      tm_vec_pow_##N(m, base, base, exponent); \
      tm_convert(m, y + i * s[0], dtype, s[0], base, dtype, 1); \
    } \
  }
POWER(f32, float, TM_F32)
POWER(f64, double, TM_F64)

static int64_t power(int64_t base, int64_t exponent) { /* exponent >= 0; wraps */
  U y = 1, x = (U)base;
  for (U e = (U)exponent; e; e >>= 1, x *= x)
    if (e & 1) y *= x;
  return (int64_t)y;
}
static void pow_i64(int64_t n, void *const *p, const int64_t *s, const double *arg) {
  int64_t *y = p[0];
  const int64_t *a = p[1], *b = p[2];
  (void)arg;
  for (int64_t i = 0; i < n; i++) y[i * s[0]] = power(a[i * s[1]], b[i * s[2]]);
}

static int check_exponents(const tm_tensor *b) {
  int64_t least = 0;
  tm_tensor *whole = tm_tensor_cast(b, TM_I64), *flat = whole ? tm_tensor_dense(whole) : NULL;
  if (flat)
    for (int64_t i = 0; i < flat->c.numel; i++) least = TM_MIN(least, ((const int64_t *)tm_data(flat))[i]);
  tm_tensor_release(whole);
  tm_tensor_release(flat);
  if (!flat) return tm_last_code();
  return least < 0 ? tm_fail(TM_ERUNTIME, "pow: exponent %lld is negative and both operands are integers", (long long)least) : TM_OK;
}

int tm_pow_cpu(tm_call *c) {
  static const tm_loops loops = {pow_f32, pow_f64, pow_i64};
  if (!tm_is_float(c->compute) && check_exponents(c->in[1]) != TM_OK) return tm_last_code();
  return tm_elementwise(c, &loops);
}

/* -- a choice ---------------------------------------------------------------------------------------------------------------- */

/* Bound by memory for bool and one other dtype: the condition is widened in the cache. */
LOOP3(where_f32, float, x != 0 ? a : b)
LOOP3(where_f64, double, x != 0 ? a : b)
LOOP3(where_i64, int64_t, x != 0 ? a : b)
int tm_where_cpu(tm_call *c) {
  static const tm_loops loops = {where_f32, where_f64, where_i64};
  return tm_elementwise(c, &loops);
}

LOOP2(masked_fill_f32, float, float value = (float)arg[0];, b != 0 ? value : a)
LOOP2(masked_fill_f64, double, double value = arg[0];, b != 0 ? value : a)
LOOP2(masked_fill_i64, int64_t, int64_t value = (int64_t)arg[0];, b != 0 ? value : a)
int tm_masked_fill_cpu(tm_call *c) {
  static const tm_loops loops = {masked_fill_f32, masked_fill_f64, masked_fill_i64};
  return tm_elementwise(c, &loops);
}

/* -- gradients ----------------------------------------------------------------------------------------------------------------- */

int tm_neg_vjp(tm_vjp *v) {
  v_set(v, 0, v_neg(v, v->dy[0]));
  return TM_OK;
}
int tm_abs_vjp(tm_vjp *v) {
  v_set(v, 0, v_mul(v, v->dy[0], v_sign(v, v->x[0])));
  return TM_OK;
}
int tm_sign_vjp(tm_vjp *v) {
  v_set(v, 0, v_zeros(v, &v->xm[0]));
  return TM_OK;
}
int tm_exp_vjp(tm_vjp *v) {
  v_set(v, 0, v_mul(v, v->dy[0], v->y[0]));
  return TM_OK;
}
int tm_log_vjp(tm_vjp *v) {
  v_set(v, 0, v_div(v, v->dy[0], v->x[0]));
  return TM_OK;
}
int tm_sqrt_vjp(tm_vjp *v) {
  v_set(v, 0, v_div(v, v->dy[0], v_scale(v, v->y[0], 2)));
  return TM_OK;
}

/* dx = dy * (1 - y^2), as dy - dy * y * y: an operator less */
int tm_tanh_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0], *y = v->y[0];
  v_set(v, 0, v_sub(v, dy, v_mul(v, v_mul(v, dy, y), y)));
  return TM_OK;
}

/* dx = dy * y * (1 - y) */
int tm_sigmoid_vjp(tm_vjp *v) {
  tm_tensor *y = v->y[0], *t = v_mul(v, v->dy[0], y);
  v_set(v, 0, v_sub(v, t, v_mul(v, t, y)));
  return TM_OK;
}

/* dx = dy * 2 / sqrt(pi) * exp(-x^2) */
int tm_erf_vjp(tm_vjp *v) {
  tm_tensor *x = v->x[0];
  v_set(v, 0, v_mul(v, v->dy[0], v_scale(v, v_exp(v, v_neg(v, v_mul(v, x, x))), 1.1283791670955126)));
  return TM_OK;
}
int tm_expm1_vjp(tm_vjp *v) {
  v_set(v, 0, v_mul(v, v->dy[0], v_shift(v, v->y[0], 1)));
  return TM_OK;
}
int tm_log1p_vjp(tm_vjp *v) {
  v_set(v, 0, v_div(v, v->dy[0], v_shift(v, v->x[0], 1)));
  return TM_OK;
}

/* Fused, unless it is to be differentiated again: dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x). */
int tm_silu_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0], *x = v->x[0], *in[2] = {dy, x};
  if (tm_grad_mode()) {
    tm_tensor *s = v_sigmoid(v, x), *xs = v_mul(v, x, s);
    v_set(v, 0, v_mul(v, dy, v_add(v, s, v_sub(v, xs, v_mul(v, xs, s)))));
  } else {
    v_set(v, 0, v_run(v, TM_OPC_silu_backward, 2, in, NULL, NULL));
  }
  return TM_OK;
}

static tm_tensor *v_erf(tm_vjp *v, tm_tensor *x) { return v_run(v, TM_OPC_erf, 1, &x, NULL, NULL); }

/* The slope of x * (1 + erf(x / sqrt(2))) / 2 */
static tm_tensor *gelu_slope(tm_vjp *v, tm_tensor *x) {
  tm_tensor *mass = v_scale(v, v_shift(v, v_erf(v, v_scale(v, x, 0.70710678118654752440)), 1), 0.5);
  tm_tensor *density = v_scale(v, v_exp(v, v_scale(v, v_mul(v, x, x), -0.5)), 0.39894228040143267794);
  return v_add(v, mass, v_mul(v, x, density));
}

/* The slope of x * (1 + t) / 2 with t = tanh(r * (x + c * x^3)) */
static tm_tensor *gelu_tanh_slope(tm_vjp *v, tm_tensor *x) {
  double r = 0.79788456080286535588, c = 0.044715;
  tm_tensor *square = v_mul(v, x, x);
  tm_tensor *t = v_tanh(v, v_scale(v, v_mul(v, x, v_shift(v, v_scale(v, square, c), 1)), r));
  tm_tensor *inner = v_scale(v, v_shift(v, v_scale(v, square, 3 * c), 1), r);
  tm_tensor *rest = v_mul(v, x, v_mul(v, v_sub(v, v_num(v, 1), v_mul(v, t, t)), inner));
  return v_scale(v, v_add(v, v_shift(v, t, 1), rest), 0.5);
}

int tm_gelu_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0], *x = v->x[0], *in[2] = {dy, x};
  if (tm_grad_mode()) v_set(v, 0, v_mul(v, dy, v->a[0] == 0 ? gelu_slope(v, x) : gelu_tanh_slope(v, x)));
  else v_set(v, 0, v_run(v, TM_OPC_gelu_backward, 2, in, v->a, NULL));
  return TM_OK;
}

/* A choice, not a product: the gradient may be infinite where it is not wanted. */
int tm_relu_vjp(tm_vjp *v) {
  tm_tensor *zero = v_num(v, 0);
  v_set(v, 0, v_where(v, v_gt(v, v->y[0], zero), v->dy[0], zero));
  return TM_OK;
}

/* dx = dy where min <= x <= max */
int tm_clamp_vjp(tm_vjp *v) {
  tm_tensor *dx = v->dy[0], *zero = v_num(v, 0);
  if (!isnan(v->a[0])) dx = v_where(v, v_ge(v, v->x[0], v_num(v, v->a[0])), dx, zero);
  if (!isnan(v->a[1])) dx = v_where(v, v_le(v, v->x[0], v_num(v, v->a[1])), dx, zero);
  v_set(v, 0, dx);
  return TM_OK;
}

static tm_tensor *scaled(tm_vjp *v, tm_tensor *x, double by) { return by == 1 ? x : by == -1 ? v_neg(v, x) : v_scale(v, x, by); }

int tm_add_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  if (v->want[1]) v_set(v, 1, scaled(v, v->dy[0], v->a[0]));
  return TM_OK;
}

int tm_sub_vjp(tm_vjp *v) {
  v_set(v, 0, v->dy[0]);
  if (v->want[1]) v_set(v, 1, scaled(v, v->dy[0], -v->a[0]));
  return TM_OK;
}

int tm_mul_vjp(tm_vjp *v) {
  for (int i = 0; i < 2; i++)
    if (v->want[i]) v_set(v, i, v_mul(v, v->dy[0], v->x[1 - i]));
  return TM_OK;
}

/* da = dy / b, db = -dy * (a / b) / b */
int tm_div_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0], *a = v->x[0], *b = v->x[1];
  if (v->want[0]) v_set(v, 0, v_div(v, dy, b));
  if (v->want[1]) v_set(v, 1, v_neg(v, v_mul(v, dy, v_div(v, v_div(v, a, b), b))));
  return TM_OK;
}

/* d(a^e)/da for an exponent that needs no gradient itself: e * a^(e - 1) */
static tm_tensor *power_slope(tm_vjp *v, tm_tensor *a, double e) {
  if (e == 2) return v_scale(v, a, 2);
  return v_scale(v, v_pow(v, a, v_num(v, e - 1)), e);
}

/* da = dy * b * a^(b - 1) and db = dy * y * log a; both 0 where a is 0 and the formula says 0 * infinity. These places
** get a harmless exponent or base rather than a mask behind, which would leave NaN to the second derivative. */
int tm_pow_vjp(tm_vjp *v) {
  tm_tensor *dy = v->dy[0], *a = v->x[0], *b = v->x[1], *zero = v_num(v, 0);
  if (v->want[0] && !v->want[1] && b->c.ndim == 0 && b->c.device == TM_DEV_CPU) {
    double e = tm_load(tm_data(b), b->c.dtype);
    v_set(v, 0, e == 0 ? v_zeros(v, &v->xm[0]) : e == 1 ? dy : v_mul(v, dy, power_slope(v, a, e)));
  } else if (v->want[0]) {
    tm_tensor *flat = v_mul(v, v_eq(v, a, zero), v_eq(v, b, zero));
    v_set(v, 0, v_mul(v, dy, v_mul(v, b, v_pow(v, a, v_where(v, flat, zero, v_shift(v, b, -1))))));
  }
  if (v->want[1]) {
    tm_tensor *flat = v_cast(v, v_mul(v, v_eq(v, a, zero), v_ge(v, b, zero)), v->y[0]->c.dtype); /* makes 0 a 1 below */
    v_set(v, 1, v_mul(v, dy, v_mul(v, v->y[0], v_log(v, v_add(v, a, flat)))));
  }
  return TM_OK;
}

/* The gradient goes to the operand that was taken, half to each on a tie, and to both if one is NaN. */
static int extremum_vjp(tm_vjp *v, tm_tensor *(*worse)(tm_vjp *, tm_tensor *, tm_tensor *)) {
  tm_tensor *dy = v->dy[0], *tie = v_eq(v, v->x[0], v->x[1]), *share = v_where(v, tie, v_scale(v, dy, 0.5), dy);
  for (int i = 0; i < 2; i++)
    if (v->want[i]) v_set(v, i, v_where(v, worse(v, v->x[i], v->x[1 - i]), v_num(v, 0), share));
  return TM_OK;
}
int tm_maximum_vjp(tm_vjp *v) { return extremum_vjp(v, v_lt); }
int tm_minimum_vjp(tm_vjp *v) { return extremum_vjp(v, v_gt); }

int tm_where_vjp(tm_vjp *v) {
  tm_tensor *condition = v->x[0], *dy = v->dy[0], *zero = v_num(v, 0);
  if (v->want[1]) v_set(v, 1, v_where(v, condition, dy, zero));
  if (v->want[2]) v_set(v, 2, v_where(v, condition, zero, dy));
  return TM_OK;
}

/* x[1] is the mask */
int tm_masked_fill_vjp(tm_vjp *v) {
  v_set(v, 0, v_where(v, v->x[1], v_num(v, 0), v->dy[0]));
  return TM_OK;
}
