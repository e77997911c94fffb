/* vecmath.h: functions of contiguous arrays, by the widest vectors that the processor has.
** y may be x (or b); otherwise they do not overlap. Any alignment. Errors: about 1 ulp. A value does not depend
** on its place in the array. */
#ifndef TMOD_VECMATH_H
#define TMOD_VECMATH_H
#include <stdint.h>

void tm_vec_exp_f32(int64_t n, float *y, const float *x);
void tm_vec_log_f32(int64_t n, float *y, const float *x);
void tm_vec_tanh_f32(int64_t n, float *y, const float *x);
void tm_vec_sigmoid_f32(int64_t n, float *y, const float *x);
void tm_vec_erf_f32(int64_t n, float *y, const float *x);
void tm_vec_expm1_f32(int64_t n, float *y, const float *x);
void tm_vec_log1p_f32(int64_t n, float *y, const float *x);
void tm_vec_silu_f32(int64_t n, float *y, const float *x);
void tm_vec_gelu_f32(int64_t n, float *y, const float *x);
void tm_vec_gelu_tanh_f32(int64_t n, float *y, const float *x);
void tm_vec_silu_slope_f32(int64_t n, float *y, const float *x, const float *b); /* b times the slope at x; the others alike */
void tm_vec_gelu_slope_f32(int64_t n, float *y, const float *x, const float *b);
void tm_vec_gelu_tanh_slope_f32(int64_t n, float *y, const float *x, const float *b);
void tm_vec_pow_f32(int64_t n, float *y, const float *x, const float *b);
void tm_vec_exp_f64(int64_t n, double *y, const double *x);
void tm_vec_log_f64(int64_t n, double *y, const double *x);
void tm_vec_tanh_f64(int64_t n, double *y, const double *x);
void tm_vec_sigmoid_f64(int64_t n, double *y, const double *x);
void tm_vec_erf_f64(int64_t n, double *y, const double *x);
void tm_vec_expm1_f64(int64_t n, double *y, const double *x);
void tm_vec_log1p_f64(int64_t n, double *y, const double *x);
void tm_vec_silu_f64(int64_t n, double *y, const double *x);
void tm_vec_gelu_f64(int64_t n, double *y, const double *x);
void tm_vec_gelu_tanh_f64(int64_t n, double *y, const double *x);
void tm_vec_silu_slope_f64(int64_t n, double *y, const double *x, const double *b);
void tm_vec_gelu_slope_f64(int64_t n, double *y, const double *x, const double *b);
void tm_vec_gelu_tanh_slope_f64(int64_t n, double *y, const double *x, const double *b);
void tm_vec_pow_f64(int64_t n, double *y, const double *x, const double *b);

#endif
