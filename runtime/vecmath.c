/* vecmath.c: the functions of vecmath.h through SLEEF, at the width that the processor allows.
**
** sleef.h shows the wide functions only to files compiled for such a processor, so they are declared here.
** Elements that fill no vector go through a padded one: so a value is the same wherever it stands. */
#include "vecmath.h"

#include <math.h>
#include <string.h>

/* Activations of v, and their slopes times w, for vectors and for single numbers */
#define HALF_ROOT(T) (T)0.70710678118654752440 /* sqrt(1/2) */
#define DENSITY(T) (T)0.39894228040143267794   /* 1 / sqrt(2 pi) */
#define RATE(T) (T)0.79788456080286535588      /* sqrt(2 / pi) */
#define CUBIC(T) (T)0.044715
#define SILU(exp) (v / (1 + exp(-v)))
#define GELU(T, erf) (v * (T)0.5 * (1 + erf(v * HALF_ROOT(T))))
#define INNER(T, tanh) tanh(RATE(T) * (v + CUBIC(T) * v * v * v))
#define GELU_TANH(T, tanh) (v * (T)0.5 * (1 + INNER(T, tanh)))
#define SILU_SLOPE(exp) (w / (1 + exp(-v)) * (1 + v - v / (1 + exp(-v))))
#define GELU_SLOPE(T, erf, exp) (w * ((T)0.5 * (1 + erf(v * HALF_ROOT(T))) + v * DENSITY(T) * exp(v * v * (T)-0.5)))
#define GELU_TANH_SLOPE(T, tanh) (w * (T)0.5 * (1 + INNER(T, tanh)) * (1 + v * (1 - INNER(T, tanh)) * RATE(T) * (1 + 3 * CUBIC(T) * v * v)))

#if defined(__x86_64__)

typedef float f4 __attribute__((vector_size(16))), f8 __attribute__((vector_size(32))), f16 __attribute__((vector_size(64)));
typedef double d2 __attribute__((vector_size(16))), d4 __attribute__((vector_size(32))), d8 __attribute__((vector_size(64)));

#define PURE __attribute__((const)) /* a call that stands twice in a formula runs once */
#define SLEEF(name, ...) \
  PURE f16 Sleef_##name##f16_u10avx512f(__VA_ARGS__(f16)); \
  PURE d8 Sleef_##name##d8_u10avx512f(__VA_ARGS__(d8)); \
  PURE f8 Sleef_##name##f8_u10avx2(__VA_ARGS__(f8)); \
  PURE d4 Sleef_##name##d4_u10avx2(__VA_ARGS__(d4)); \
  PURE f4 Sleef_##name##f4_u10sse2(__VA_ARGS__(f4)); \
  PURE d2 Sleef_##name##d2_u10sse2(__VA_ARGS__(d2));
#define ONE(V) V
#define TWO(V) V, V
SLEEF(exp, ONE)
SLEEF(log, ONE)
SLEEF(tanh, ONE)
SLEEF(erf, ONE)
SLEEF(expm1, ONE)
SLEEF(log1p, ONE)
SLEEF(pow, TWO)

/* y[i] = CALL of v = x[i] and w = b[i], one vector V of W elements at a time */
#define MAP(name, isa, T, V, W, CALL) \
  __attribute__((target(isa))) static void name(int64_t n, T *y, const T *x, const T *b) { \
    int64_t i = 0; \
    V v, w; \
    for (; i + W <= n; i += W) { \
      memcpy(&v, x + i, sizeof v); \
      memcpy(&w, b + i, sizeof w); \
      (void)w; \
      v = CALL; \
      memcpy(y + i, &v, sizeof v); \
    } \
    if (i == n) return; \
    T s[W], t[W]; \
    for (int k = 0; k < W; k++) s[k] = t[k] = 1; \
    for (int k = 0; i + k < n; k++) s[k] = x[i + k], t[k] = b[i + k]; \
    memcpy(&v, s, sizeof v); \
    memcpy(&w, t, sizeof w); \
    v = CALL; \
    memcpy(s, &v, sizeof v); \
    for (int k = 0; i + k < n; k++) y[i + k] = s[k]; \
  }

#define LEVEL(level, isa, F, FW, FT, D, DW, DT) \
  MAP(erf_f32_##level, isa, float, F, FW, Sleef_erf##FT(v)) \
  MAP(expm1_f32_##level, isa, float, F, FW, Sleef_expm1##FT(v)) \
  MAP(log1p_f32_##level, isa, float, F, FW, Sleef_log1p##FT(v)) \
  MAP(silu_f32_##level, isa, float, F, FW, SILU(Sleef_exp##FT)) \
  MAP(gelu_f32_##level, isa, float, F, FW, GELU(float, Sleef_erf##FT)) \
  MAP(gelu_tanh_f32_##level, isa, float, F, FW, GELU_TANH(float, Sleef_tanh##FT)) \
  MAP(silu_slope_f32_##level, isa, float, F, FW, SILU_SLOPE(Sleef_exp##FT)) \
  MAP(gelu_slope_f32_##level, isa, float, F, FW, GELU_SLOPE(float, Sleef_erf##FT, Sleef_exp##FT)) \
  MAP(gelu_tanh_slope_f32_##level, isa, float, F, FW, GELU_TANH_SLOPE(float, Sleef_tanh##FT)) \
  MAP(erf_f64_##level, isa, double, D, DW, Sleef_erf##DT(v)) \
  MAP(expm1_f64_##level, isa, double, D, DW, Sleef_expm1##DT(v)) \
  MAP(log1p_f64_##level, isa, double, D, DW, Sleef_log1p##DT(v)) \
  MAP(silu_f64_##level, isa, double, D, DW, SILU(Sleef_exp##DT)) \
  MAP(gelu_f64_##level, isa, double, D, DW, GELU(double, Sleef_erf##DT)) \
  MAP(gelu_tanh_f64_##level, isa, double, D, DW, GELU_TANH(double, Sleef_tanh##DT)) \
  MAP(silu_slope_f64_##level, isa, double, D, DW, SILU_SLOPE(Sleef_exp##DT)) \
  MAP(gelu_slope_f64_##level, isa, double, D, DW, GELU_SLOPE(double, Sleef_erf##DT, Sleef_exp##DT)) \
  MAP(gelu_tanh_slope_f64_##level, isa, double, D, DW, GELU_TANH_SLOPE(double, Sleef_tanh##DT)) \
  MAP(exp_f32_##level, isa, float, F, FW, Sleef_exp##FT(v)) \
  MAP(log_f32_##level, isa, float, F, FW, Sleef_log##FT(v)) \
  MAP(tanh_f32_##level, isa, float, F, FW, Sleef_tanh##FT(v)) \
  MAP(sigmoid_f32_##level, isa, float, F, FW, 1 / (1 + Sleef_exp##FT(-v))) \
  MAP(pow_f32_##level, isa, float, F, FW, Sleef_pow##FT(v, w)) \
  MAP(exp_f64_##level, isa, double, D, DW, Sleef_exp##DT(v)) \
  MAP(log_f64_##level, isa, double, D, DW, Sleef_log##DT(v)) \
  MAP(tanh_f64_##level, isa, double, D, DW, Sleef_tanh##DT(v)) \
  MAP(sigmoid_f64_##level, isa, double, D, DW, 1 / (1 + Sleef_exp##DT(-v))) \
  MAP(pow_f64_##level, isa, double, D, DW, Sleef_pow##DT(v, w))
LEVEL(wide, "avx512f", f16, 16, f16_u10avx512f, d8, 8, d8_u10avx512f)
LEVEL(middle, "avx2,fma", f8, 8, f8_u10avx2, d4, 4, d4_u10avx2)
LEVEL(narrow, "sse2", f4, 4, f4_u10sse2, d2, 2, d2_u10sse2)

#define PICK(name, n, y, x, b) \
  if (__builtin_cpu_supports("avx512f")) name##_wide(n, y, x, b); \
  else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) name##_middle(n, y, x, b); \
  else name##_narrow(n, y, x, b);
#define FUNCTION(name, T, scalar) \
  void tm_vec_##name(int64_t n, T *y, const T *x) { PICK(name, n, y, x, x) }
#define FUNCTION2(name, T, scalar) \
  void tm_vec_##name(int64_t n, T *y, const T *x, const T *b) { PICK(name, n, y, x, b) }

#else

#define FUNCTION(name, T, scalar) \
  void tm_vec_##name(int64_t n, T *y, const T *x) { \
    for (int64_t i = 0; i < n; i++) y[i] = scalar; \
  }
#define FUNCTION2(name, T, scalar) \
  void tm_vec_##name(int64_t n, T *y, const T *x, const T *b) { \
    for (int64_t i = 0; i < n; i++) y[i] = scalar; \
  }

#endif

#define ONE_OF(T, E) \
  ({ \
    T v = x[i]; \
    E; \
  })
#define TWO_OF(T, E) \
  ({ \
    T v = x[i], w = b[i]; \
    E; \
  })
FUNCTION(exp_f32, float, expf(x[i]))
FUNCTION(log_f32, float, logf(x[i]))
FUNCTION(tanh_f32, float, tanhf(x[i]))
FUNCTION(sigmoid_f32, float, 1 / (1 + expf(-x[i])))
FUNCTION(erf_f32, float, erff(x[i]))
FUNCTION(expm1_f32, float, expm1f(x[i]))
FUNCTION(log1p_f32, float, log1pf(x[i]))
FUNCTION(silu_f32, float, ONE_OF(float, SILU(expf)))
FUNCTION(gelu_f32, float, ONE_OF(float, GELU(float, erff)))
FUNCTION(gelu_tanh_f32, float, ONE_OF(float, GELU_TANH(float, tanhf)))
FUNCTION2(silu_slope_f32, float, TWO_OF(float, SILU_SLOPE(expf)))
FUNCTION2(gelu_slope_f32, float, TWO_OF(float, GELU_SLOPE(float, erff, expf)))
FUNCTION2(gelu_tanh_slope_f32, float, TWO_OF(float, GELU_TANH_SLOPE(float, tanhf)))
FUNCTION2(pow_f32, float, powf(x[i], b[i]))
FUNCTION(exp_f64, double, exp(x[i]))
FUNCTION(log_f64, double, log(x[i]))
FUNCTION(tanh_f64, double, tanh(x[i]))
FUNCTION(sigmoid_f64, double, 1 / (1 + exp(-x[i])))
FUNCTION(erf_f64, double, erf(x[i]))
FUNCTION(expm1_f64, double, expm1(x[i]))
FUNCTION(log1p_f64, double, log1p(x[i]))
FUNCTION(silu_f64, double, ONE_OF(double, SILU(exp)))
FUNCTION(gelu_f64, double, ONE_OF(double, GELU(double, erf)))
FUNCTION(gelu_tanh_f64, double, ONE_OF(double, GELU_TANH(double, tanh)))
FUNCTION2(silu_slope_f64, double, TWO_OF(double, SILU_SLOPE(exp)))
FUNCTION2(gelu_slope_f64, double, TWO_OF(double, GELU_SLOPE(double, erf, exp)))
FUNCTION2(gelu_tanh_slope_f64, double, TWO_OF(double, GELU_TANH_SLOPE(double, tanh)))
FUNCTION2(pow_f64, double, pow(x[i], b[i]))
