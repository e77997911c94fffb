/* random.c: random numbers from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
**
** A block is four 32-bit numbers computed from the seed and the block's position. Element i of a call takes
** lane i % 4 of block offset + i / 4, or two lanes (so i / 2) where 32 bits are too few; then the generator's
** offset moves past the blocks used. So the result does not depend on threads or vector width, and a device
** kernel can give the same numbers. */
#include "internal.h"

int tm_infer_create(tm_call *c);

/* -- the generator -------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void rounds(uint32_t x[4], uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
  for (int r = 0; r < 10; r++) {
    uint64_t p = (uint64_t)x[0] * 0xD2511F53u, q = (uint64_t)x[2] * 0xCD9E8D57u;
    x[0] = (uint32_t)(q >> 32) ^ x[1] ^ k0;
    x[1] = (uint32_t)q;
    x[2] = (uint32_t)(p >> 32) ^ x[3] ^ k1;
    x[3] = (uint32_t)p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

void tm_philox(uint64_t seed, uint64_t block, uint32_t out[4]) {
  out[0] = (uint32_t)block, out[1] = (uint32_t)(block >> 32), out[2] = out[3] = 0;
  rounds(out, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* PyTorch's first seed: a program that seeds nothing repeats itself. */
#define FIRST_SEED 67280421310721
static struct tm_generator first = {FIRST_SEED, 0};

tm_generator *tm_generator_default(void) { return &first; }

tm_generator *tm_generator_new(uint64_t seed) {
  tm_generator *g = tm_host_alloc(sizeof *g);
  if (g) g->seed = seed, g->offset = 0;
  return g;
}

void tm_generator_free(tm_generator *g) {
  if (g != &first) tm_host_free(g);
}

void tm_generator_seed(tm_generator *g, double seed) {
  __atomic_store_n(&g->seed, seed > 0 && seed < 0x1p64 ? (uint64_t)seed : 0, __ATOMIC_RELAXED);
  __atomic_store_n(&g->offset, 0, __ATOMIC_RELAXED);
}

double tm_generator_initial_seed(const tm_generator *g) { return (double)g->seed; }

tm_tensor *tm_generator_state(const tm_generator *g) {
  tm_tensor *t = tm_tensor_new(1, (int64_t[]){16}, TM_U8, TM_DEV_CPU);
  if (!t) return NULL;
  memcpy(tm_data(t), &g->seed, 8);
  memcpy((char *)tm_data(t) + 8, &g->offset, 8);
  return t;
}

int tm_generator_state_set(tm_generator *g, const tm_tensor *state) {
  if (state->c.dtype != TM_U8 || state->c.ndim != 1 || T_SIZE(state, 0) != 16 || TM_KIND(state->c.device) != TM_CPU)
    return tm_fail(TM_EVALUE, "generator: state is %s, expected uint8 (16,) on cpu", tm_say(state));
  tm_tensor *t = tm_tensor_dense(state);
  if (!t) return tm_last_code();
  memcpy(&g->seed, tm_data(t), 8);
  memcpy(&g->offset, (char *)tm_data(t) + 8, 8);
  tm_tensor_release(t);
  return TM_OK;
}

/* The first of `blocks` blocks that are this call's alone: threads share the default generator. */
static uint64_t reserve(tm_generator *g, int64_t blocks) { return __atomic_fetch_add(&g->offset, (uint64_t)blocks, __ATOMIC_RELAXED); }

static inline uint64_t bits64(const uint32_t *r) { return (uint64_t)r[1] << 32 | r[0]; }
static inline double unit64(const uint32_t *r) { return (double)(bits64(r) >> 11) * 0x1p-53; } /* [0, 1) */

double tm_generator_uniform(tm_generator *g) {
  uint32_t r[4];
  tm_philox(g->seed, reserve(g, 1), r);
  return unit64(r);
}

/* -- filling --------------------------------------------------------------------------------------- */

enum { BLOCKS = 64 }; /* computed at a time; their numbers stay in the first-level cache */

/* Bound by its 20 multiplications a block: the loop over blocks vectorises. */
TM_CLONES static void draws(uint64_t seed, uint64_t block, int n, uint32_t *out) {
  for (int i = 0; i < n; i++) {
    uint64_t b = block + (uint64_t)i;
    uint32_t x[4] = {(uint32_t)b, (uint32_t)(b >> 32), 0, 0};
    rounds(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    out[4 * i] = x[0], out[4 * i + 1] = x[1], out[4 * i + 2] = x[2], out[4 * i + 3] = x[3];
  }
}

typedef struct job {
  char *y;       /* result, contiguous */
  const char *x; /* operand, contiguous */
  uint8_t *mask;
  int dtype; /* of y, and of x */
  int64_t n;
  double a, b, top;
  int64_t low;
  uint64_t range;
  int64_t bad; /* an element that x forbids; -1: none */
} job;

/* Writes elements e..e+n-1 from the numbers r; `n` is at most 4 * BLOCKS. */
typedef void (*finish_fn)(job *j, int64_t e, int n, const uint32_t *r);

/* lanes: how many an element takes, 1 or 2. */
static void fill(tm_call *c, job *j, int lanes, finish_fn finish) {
  tm_generator *g = c->generator ? c->generator : &first;
  int64_t per = 4 / lanes, chunk = BLOCKS * per, blocks = (j->n + per - 1) / per;
  uint64_t seed = g->seed, base = reserve(g, blocks);
#pragma omp parallel for if (j->n >= TM_PARALLEL_MIN)
  for (int64_t e = 0; e < j->n; e += chunk) {
    uint32_t r[4 * BLOCKS];
    int n = (int)TM_MIN(chunk, j->n - e);
    draws(seed, base + (uint64_t)(e / per), (int)((n + per - 1) / per), r);
    finish(j, e, n, r);
  }
}

static inline void store16(char *y, int dtype, int64_t i, float v) {
  ((uint16_t *)y)[i] = dtype == TM_F16 ? tm_f32_to_f16(v) : tm_f32_to_bf16(v);
}

/* -- uniform --------------------------------------------------------------------------------------- */

/* a + u * b, at most top: rounding would reach the excluded end. */
TM_CLONES static void uniform32(job *j, int64_t e, int n, const uint32_t *r) {
  float *y = (float *)j->y + e, a = (float)j->a, b = (float)j->b, top = (float)j->top;
  for (int i = 0; i < n; i++) {
    float v = a + (float)(int32_t)(r[i] >> 8) * 0x1p-24f * b;
    y[i] = v < top ? v : top;
  }
}

static void uniform64(job *j, int64_t e, int n, const uint32_t *r) {
  for (int i = 0; i < n; i++) {
    double v = j->a + unit64(r + 2 * i) * j->b;
    ((double *)j->y)[e + i] = v < j->top ? v : j->top;
  }
}

/* As many bits as the dtype's numbers below 1 have, so that u stays below 1. */
static void uniform16(job *j, int64_t e, int n, const uint32_t *r) {
  int bits = j->dtype == TM_F16 ? 11 : 8;
  for (int i = 0; i < n; i++) {
    double v = j->a + ldexp(r[i] >> (32 - bits), -bits) * j->b;
    store16(j->y, j->dtype, e + i, (float)(v < j->top ? v : j->top));
  }
}

/* The largest number of the dtype below `high`, or `low` if they are equal. */
static double below(double low, double high, int dtype) {
  if (!(low < high)) return low;
  if (dtype == TM_F64) return nextafter(high, low);
  if (dtype == TM_F32) return (float)high < high ? (float)high : nextafterf((float)high, -INFINITY);
  uint16_t h;
  tm_store(&h, dtype, high);
  if (tm_load(&h, dtype) >= high) h = h & 0x8000 ? h + 1 : h ? h - 1 : 0x8001;
  return tm_load(&h, dtype);
}

static void uniform(tm_call *c, tm_tensor *y, double low, double high) {
  job j = {.y = tm_data(y), .dtype = y->c.dtype, .n = y->c.numel, .a = low, .b = high - low, .top = below(low, high, y->c.dtype)};
  if (j.dtype == TM_F64) fill(c, &j, 2, uniform64);
  else fill(c, &j, 1, j.dtype == TM_F32 ? uniform32 : uniform16);
}

/* -- normal: Box-Muller, two numbers from two ------------------------------------------------------- */

/* log(u), 0 < u <= 1: u = m 2^e with m near 1, log m = 2 atanh s with s = (m - 1) / (m + 1), |s| <= 0.172; the
** first term left out of the series is below 1e-9 of the whole. */
static inline __attribute__((always_inline)) float log_unit(float u) {
  int32_t b;
  memcpy(&b, &u, 4);
  int32_t e = (b - 0x3f3504f3) >> 23; /* m from sqrt(1/2) to sqrt(2) */
  b -= e * (1 << 23);
  float m;
  memcpy(&m, &b, 4);
  float s = (m - 1) / (m + 1), t = s * s;
  float p = 1 + t * (1.f / 3 + t * (1.f / 5 + t * (1.f / 7 + t * (1.f / 9))));
  return 2 * s * p + (float)e * 0x1.62e43p-1f;
}

/* sqrt(-2 log u) cos a and the same with sin a. u in (0, 1] keeps 24 leading bits of 32, so the tails reach 6.6;
** the turn r1 / 2^32 is reduced to an eighth exactly, in integers, and Taylor's series end below 1e-8. */
static inline __attribute__((always_inline)) void normal_pair(uint32_t r0, uint32_t r1, float *z0, float *z1) {
  float u = (float)((double)r0 * 0x1p-32 + 0x1p-33), rho = sqrtf(-2 * log_unit(u));
  uint32_t q = (r1 + 0x20000000u) >> 30;
  float a = (float)(int32_t)(r1 - (q << 30)) * 0x1.921fb6p-30f, t = a * a; /* 2 pi / 2^32 */
  float sine = a * (1 + t * (-1.f / 6 + t * (1.f / 120 + t * (-1.f / 5040 + t * (1.f / 362880)))));
  float cosine = 1 + t * (-0.5f + t * (1.f / 24 + t * (-1.f / 720 + t * (1.f / 40320))));
  float x = q & 1 ? sine : cosine, y = q & 1 ? cosine : sine;
  *z0 = rho * ((q + 1) & 2 ? -x : x);
  *z1 = rho * (q & 2 ? -y : y);
}

/* Computes whole pairs: z has room for n + 1. */
TM_CLONES static void normals(int n, const uint32_t *r, float mean, float std, float *z) {
  for (int i = 0; i < (n + 1) / 2; i++) {
    float z0, z1;
    normal_pair(r[2 * i], r[2 * i + 1], &z0, &z1);
    z[2 * i] = mean + std * z0;
    z[2 * i + 1] = mean + std * z1;
  }
}

static void normal32(job *j, int64_t e, int n, const uint32_t *r) {
  float z[4 * BLOCKS];
  normals(n, r, (float)j->a, (float)j->b, z);
  if (j->dtype == TM_F32) memcpy((float *)j->y + e, z, (size_t)n * 4);
  else
    for (int i = 0; i < n; i++) store16(j->y, j->dtype, e + i, z[i]);
}

static void normal64(job *j, int64_t e, int n, const uint32_t *r) {
  double *y = (double *)j->y + e;
  for (int i = 0; i < n; i += 2) { /* one block */
    double rho = sqrt(-2 * log(1 - unit64(r + 2 * i))), a = 2 * M_PI * unit64(r + 2 * i + 2);
    y[i] = j->a + j->b * rho * cos(a);
    if (i + 1 < n) y[i + 1] = j->a + j->b * rho * sin(a);
  }
}

static void normal(tm_call *c, tm_tensor *y, double mean, double std) {
  job j = {.y = tm_data(y), .dtype = y->c.dtype, .n = y->c.numel, .a = mean, .b = std};
  if (j.dtype == TM_F64) fill(c, &j, 2, normal64);
  else fill(c, &j, 1, normal32);
}

/* -- rows that fill --------------------------------------------------------------------------------- */

int tm_rand_cpu(tm_call *c) {
  uniform(c, c->out[0], 0, 1);
  return TM_OK;
}

int tm_randn_cpu(tm_call *c) {
  normal(c, c->out[0], 0, 1);
  return TM_OK;
}

int tm_infer_random_inplace(tm_call *c) {
  const tm_tensor *x = c->in[0];
  double a = c->a[0], b = c->a[1];
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ENOTIMPL, "%s: x is %s, expected a floating dtype", c->op->name, tm_say(x));
  if (c->op == &tm_ops[TM_OPC_uniform] && !(a <= b && isfinite(b - a)))
    return tm_fail(TM_EVALUE, "uniform: low is %g, high is %g, expected low <= high, both finite", a, b);
  if (c->op == &tm_ops[TM_OPC_normal] && !(b >= 0)) return tm_fail(TM_EVALUE, "normal: std is %g, expected 0 or more", b);
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = x->c.ndim, .dtype = x->c.dtype, .device = x->c.device};
  memcpy(c->o[0].size, x->c.size, sizeof x->c.size);
  return TM_OK;
}

/* Numbers go to the elements in row-major order whatever the strides are. */
static int fill_any(tm_call *c, void (*fn)(tm_call *, tm_tensor *, double, double)) {
  tm_tensor *y = c->out[0], *t = y;
  if (!tm_is_contiguous(y) && !(t = tm_tensor_empty(y->c.ndim, y->c.size, NULL, y->c.dtype, y->c.device))) return tm_last_code();
  fn(c, t, c->a[0], c->a[1]);
  int code = TM_OK;
  if (t != y) {
    code = tm_tensor_copy_data(y, t);
    tm_tensor_release(t);
  }
  return code;
}

int tm_uniform_cpu(tm_call *c) { return fill_any(c, uniform); }
int tm_normal_cpu(tm_call *c) { return fill_any(c, normal); }

/* -- whole numbers ----------------------------------------------------------------------------------- */

/* Whole numbers from .. to are exact in the dtype. */
static const struct {
  double from, to;
} exact[TM_NDTYPE] = {
    [TM_F32] = {-0x1p24, 0x1p24}, [TM_F64] = {-0x1p53, 0x1p53}, [TM_F16] = {-2048, 2048},         [TM_BF16] = {-256, 256},
    [TM_I8] = {-128, 127},        [TM_I16] = {-32768, 32767},   [TM_I32] = {-0x1p31, 0x1p31 - 1}, [TM_I64] = {-0x1p53, 0x1p53},
    [TM_U8] = {0, 255},           [TM_BOOL] = {0, 1},
};

int tm_infer_randint(tm_call *c) {
  double low = c->a[0], high = c->a[1];
  int code = tm_infer_create(c);
  if (code) return code;
  if (c->a[c->na - 2] < 0) c->o[0].dtype = c->compute = TM_I64;
  if (low != floor(low) || high != floor(high) || !(low < high))
    return tm_fail(TM_EVALUE, "randint: low is %.17g, high is %.17g, expected whole numbers, low < high", low, high);
  if (low < exact[c->compute].from || high - 1 > exact[c->compute].to)
    return tm_fail(TM_EVALUE, "randint: %.17g to %.17g do not fit in %s", low, high - 1, tm_dtype_name(c->compute));
  return TM_OK;
}

/* 64 random bits times the range, shifted down: no value is favoured by more than range / 2^64. */
static inline int64_t scaled(const uint32_t *r, uint64_t range) { return (int64_t)((unsigned __int128)bits64(r) * range >> 64); }

static void integers(job *j, int64_t e, int n, const uint32_t *r) {
  int w = tm_dtype_size(j->dtype);
  for (int i = 0; i < n; i++) {
    int64_t v = j->low + scaled(r + 2 * i, j->range);
    if (j->dtype == TM_I64) ((int64_t *)j->y)[e + i] = v;
    else tm_store(j->y + (e + i) * w, j->dtype, (double)v);
  }
}

int tm_randint_cpu(tm_call *c) {
  tm_tensor *y = c->out[0];
  job j = {.y = tm_data(y), .dtype = y->c.dtype, .n = y->c.numel, .low = (int64_t)c->a[0], .range = (uint64_t)(c->a[1] - c->a[0])};
  fill(c, &j, 2, integers);
  return TM_OK;
}

int tm_infer_randperm(tm_call *c) {
  double n = c->a[0];
  int dtype = c->a[1] < 0 ? TM_I64 : (int)c->a[1];
  if (!(n >= 0)) return tm_fail(TM_EVALUE, "randperm: n is %g, expected 0 or more", n);
  if (n > exact[dtype].to) return tm_fail(TM_EVALUE, "randperm: positions to %.17g do not fit in %s", n, tm_dtype_name(dtype));
  c->nout = 1;
  c->compute = dtype;
  c->o[0] = (tm_spec){.ndim = 1,
                      .dtype = dtype,
                      .device = c->a[2] >= 0 ? (int)c->a[2]
                                : tm_fake_on ? tm_device_fake(TM_DEV_CPU)
                                             : TM_DEV_CPU,
                      .size = {(int64_t)n}};
  return TM_OK;
}

/* Fisher-Yates from the inside out, element i with the i-th pair of lanes; each step needs the last, so one thread. */
static int shuffle(tm_generator *g, int64_t *p, int64_t n) {
  uint64_t seed = g->seed, base = reserve(g, (n + 1) / 2);
  uint32_t r[4 * BLOCKS];
  for (int64_t e = 0; e < n; e += 2 * BLOCKS) {
    int m = (int)TM_MIN(2 * BLOCKS, n - e);
    draws(seed, base + (uint64_t)e / 2, (m + 1) / 2, r);
    for (int i = 0; i < m; i++) {
      int64_t k = e + i, other = scaled(r + 2 * i, (uint64_t)k + 1);
      p[k] = p[other];
      p[other] = k + 1;
    }
    if (TM_UNLIKELY(tm_poll())) return TM_EINTERRUPT;
  }
  return TM_OK;
}

int tm_randperm_cpu(tm_call *c) {
  tm_tensor *y = c->out[0], *t = y;
  if (y->c.dtype != TM_I64 && !(t = tm_tensor_new(1, y->c.size, TM_I64, TM_DEV_CPU))) return tm_last_code();
  int code = shuffle(c->generator ? c->generator : &first, tm_data(t), y->c.numel);
  if (t != y) {
    if (!code) code = tm_tensor_copy_data(y, t);
    tm_tensor_release(t);
  }
  return code;
}

/* -- choices ------------------------------------------------------------------------------------------ */

int tm_infer_bernoulli(tm_call *c) {
  const tm_tensor *x = c->in[0];
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ENOTIMPL, "bernoulli: x is %s, expected probabilities of a floating dtype", tm_say(x));
  c->nout = 1;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = x->c.ndim, .dtype = x->c.dtype, .device = x->c.device};
  memcpy(c->o[0].size, x->c.size, sizeof x->c.size);
  return TM_OK;
}

/* Compared with all 32 bits, not with 24: small probabilities stay right. */
TM_CLONES static void choose32(job *j, int64_t e, int n, const uint32_t *r) {
  const float *x = (const float *)j->x + e;
  float *y = (float *)j->y + e;
  int bad = 0;
  for (int i = 0; i < n; i++) {
    bad |= !(x[i] >= 0 && x[i] <= 1);
    y[i] = (double)r[i] * 0x1p-32 < x[i];
  }
  for (int i = 0; bad && i < n; i++)
    if (!(x[i] >= 0 && x[i] <= 1)) __atomic_store_n(&j->bad, e + i, __ATOMIC_RELAXED);
}

static void choose(job *j, int64_t e, int n, const uint32_t *r) {
  int w = tm_dtype_size(j->dtype);
  for (int i = 0; i < n; i++) {
    double p = tm_load(j->x + (e + i) * w, j->dtype);
    double u = j->dtype == TM_F64 ? unit64(r + 2 * i) : (double)r[i] * 0x1p-32;
    if (!(p >= 0 && p <= 1)) __atomic_store_n(&j->bad, e + i, __ATOMIC_RELAXED);
    tm_store(j->y + (e + i) * w, j->dtype, u < p);
  }
}

int tm_bernoulli_cpu(tm_call *c) {
  tm_tensor *x = tm_tensor_dense(c->in[0]), *y = c->out[0];
  if (!x) return tm_last_code();
  job j = {.y = tm_data(y), .x = tm_data(x), .dtype = x->c.dtype, .n = x->c.numel, .bad = -1};
  fill(c, &j, j.dtype == TM_F64 ? 2 : 1, j.dtype == TM_F32 ? choose32 : choose);
  double p = j.bad < 0 ? 0 : tm_load(j.x + j.bad * tm_dtype_size(j.dtype), j.dtype);
  tm_tensor_release(x);
  return j.bad < 0 ? TM_OK : tm_fail(TM_EVALUE, "bernoulli: %g is no probability, expected 0 to 1", p);
}

int tm_infer_dropout(tm_call *c) {
  const tm_tensor *x = c->in[0];
  if (!tm_is_float(x->c.dtype)) return tm_fail(TM_ENOTIMPL, "dropout: x is %s, expected a floating dtype", tm_say(x));
  if (!(c->a[0] >= 0 && c->a[0] <= 1)) return tm_fail(TM_EVALUE, "dropout: p is %g, expected 0 to 1", c->a[0]);
  c->nout = 2;
  c->compute = x->c.dtype;
  c->o[0] = (tm_spec){.ndim = x->c.ndim, .dtype = x->c.dtype, .device = x->c.device};
  memcpy(c->o[0].size, x->c.size, sizeof x->c.size);
  c->o[1] = c->o[0];
  c->o[1].dtype = TM_BOOL;
  return TM_OK;
}

/* Kept where the number is at least p 2^32: a = 1 / (1 - p), range = p 2^32 (2^32 keeps none). */
TM_CLONES static void drop32(job *j, int64_t e, int n, const uint32_t *r) {
  const float *x = (const float *)j->x + e;
  float *y = (float *)j->y + e, a = (float)j->a;
  uint8_t *mask = j->mask + e;
  uint32_t p = (uint32_t)j->range;
  for (int i = 0; i < n; i++) {
    int keep = r[i] >= p;
    mask[i] = (uint8_t)keep;
    y[i] = keep ? x[i] * a : 0;
  }
}

static void drop(job *j, int64_t e, int n, const uint32_t *r) {
  int w = tm_dtype_size(j->dtype);
  for (int i = 0; i < n; i++) {
    int keep = j->mask[e + i] = r[i] >= j->range;
    tm_store(j->y + (e + i) * w, j->dtype, keep ? tm_load(j->x + (e + i) * w, j->dtype) * j->a : 0);
  }
}

int tm_dropout_cpu(tm_call *c) {
  tm_tensor *x = tm_tensor_dense(c->in[0]), *y = c->out[0];
  if (!x) return tm_last_code();
  double p = c->a[0];
  job j = {.y = tm_data(y),
           .x = tm_data(x),
           .mask = tm_data(c->out[1]),
           .dtype = x->c.dtype,
           .n = x->c.numel,
           .a = p < 1 ? 1 / (1 - p) : 0,
           .range = (uint64_t)(p * 0x1p32)};
  fill(c, &j, 1, j.dtype == TM_F32 && p < 1 ? drop32 : drop);
  tm_tensor_release(x);
  return TM_OK;
}

/* y = x mask / (1 - p): dx = dy mask / (1 - p) */
int tm_dropout_vjp(tm_vjp *v) {
  double p = v->a[0];
  if (v->dy[0]) v_set(v, 0, v_scale(v, v_mul(v, v->dy[0], v->y[1]), p < 1 ? 1 / (1 - p) : 0));
  return TM_OK;
}
