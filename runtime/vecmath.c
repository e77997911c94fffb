/* vecmath.c: the functions of vecmath.h through SLEEF, at the width that the processor allows.
**
** sleef.h shows the wide functions only to files compiled for such a processor, so they are declared here.
** Elements that fill no vector go through a padded one: so a value is the same wherever it stands. */
#include "vecmath.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)

typedef float f4 __attribute__((vector_size(16))), f8 __attribute__((vector_size(32))), f16 __attribute__((vector_size(64)));
typedef double d2 __attribute__((vector_size(16))), d4 __attribute__((vector_size(32))), d8 __attribute__((vector_size(64)));

#define SLEEF(name, ...) \
  f16 Sleef_##name##f16_u10avx512f(__VA_ARGS__(f16)); \
  d8 Sleef_##name##d8_u10avx512f(__VA_ARGS__(d8)); \
  f8 Sleef_##name##f8_u10avx2(__VA_ARGS__(f8)); \
  d4 Sleef_##name##d4_u10avx2(__VA_ARGS__(d4)); \
  f4 Sleef_##name##f4_u10sse2(__VA_ARGS__(f4)); \
  d2 Sleef_##name##d2_u10sse2(__VA_ARGS__(d2));
#define ONE(V) V
#define TWO(V) V, V
SLEEF(exp, ONE)
SLEEF(log, ONE)
SLEEF(tanh, ONE)
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

FUNCTION(exp_f32, float, expf(x[i]))
FUNCTION(log_f32, float, logf(x[i]))
FUNCTION(tanh_f32, float, tanhf(x[i]))
FUNCTION(sigmoid_f32, float, 1 / (1 + expf(-x[i])))
FUNCTION2(pow_f32, float, powf(x[i], b[i]))
FUNCTION(exp_f64, double, exp(x[i]))
FUNCTION(log_f64, double, log(x[i]))
FUNCTION(tanh_f64, double, tanh(x[i]))
FUNCTION(sigmoid_f64, double, 1 / (1 + exp(-x[i])))
FUNCTION2(pow_f64, double, pow(x[i], b[i]))
