/* blas.c: matrix products. Small ones run in our own kernel, which has no set-up; large ones in oneDNN
** (float32) and the OpenMP build of OpenBLAS (float64), opened at the first product that wants them, since
** oneDNN alone is 40 MB. Both share the process's OpenMP pool. Where a library is missing, our kernels do all.
**
** Letters: op(A) (m, k), op(B) (k, n), C (m, n), row-major; i, j, p run over m, n, k. */
#include "blas.h"

#include <dlfcn.h>
#include <limits.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>

/* -- the libraries -------------------------------------------------------------------------------------- */

/* Row-major, as ours; the status is 0 on success. */
typedef int (*sgemm_fn)(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda, const float *b,
                        int64_t ldb, float beta, float *c, int64_t ldc);
typedef void (*dgemm_fn)(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda, const double *b, int ldb,
                         double beta, double *c, int ldc);
static sgemm_fn dnnl_sgemm;
static dgemm_fn cblas_dgemm;
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

#ifndef TM_DNNL_PATH /* the build gives the paths that it found */
#define TM_DNNL_PATH "libdnnl.so"
#endif
#ifndef TM_OPENBLAS_PATH
#define TM_OPENBLAS_PATH "libopenblas.so.0"
#endif

/* The first of the names that opens and has the symbol. It stays open for the life of the process. */
static void *open_symbol(const char *const *names, const char *symbol) {
  for (; *names; names++) {
    void *library = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
    void *f = library ? dlsym(library, symbol) : NULL;
    if (f) return f;
    if (library) dlclose(library);
  }
  return NULL;
}

static void open_dnnl(void) {
  static const char *const names[] = {TM_DNNL_PATH, "libdnnl.so.2", "libdnnl.so.3", NULL};
  *(void **)&dnnl_sgemm = open_symbol(names, "dnnl_sgemm");
}

static void open_openblas(void) {
  static const char *const names[] = {TM_OPENBLAS_PATH, "libopenblas.so.0", NULL};
  *(void **)&cblas_dgemm = open_symbol(names, "cblas_dgemm");
}

/* oneDNN's generated code uses memory around the stack pointer, which a signal handler on the same stack overwrites:
** the heap was corrupted in each of several runs with even an empty handler. So no signal that has a handler is let in
** while it runs, on this thread or on those of the pool, which stay closed to them. */
static void close_to_signals(sigset_t *old) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
  static int closed; /* threads of the pool */
  sigset_t all;
  sigfillset(&all);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
  pthread_sigmask(SIG_SETMASK, &all, old);
  int threads = omp_get_max_threads();
  if (threads <= __atomic_load_n(&closed, __ATOMIC_RELAXED)) return;
#pragma omp parallel num_threads(threads)
  pthread_sigmask(SIG_SETMASK, &all, NULL);
  __atomic_store_n(&closed, threads, __ATOMIC_RELAXED);
}

/* -- float32, our own ------------------------------------------------------------------------------------- */

/* Eight lanes: one AVX register. A tile of 6 x 16 results keeps 12 of the 16 registers of AVX2 as sums, which
** is enough to hide the latency of its two multiply-adds per cycle; the kernel is bound by these. */
typedef float vec __attribute__((vector_size(32)));
typedef float vecu __attribute__((vector_size(32), aligned(4), may_alias));
typedef int veci __attribute__((vector_size(32)));
enum { LANES = 8, DOT_M = 3, TILE_M = 6, TILE_N = 16, BLOCK_K = 256 };
#define LOAD(p) ((vec) * (const vecu *)(p))
#define STORE(p, v) (*(vecu *)(p) = (v))
#define LOW ((veci){0, 8, 1, 9, 4, 12, 5, 13}) /* of pairs of lanes, half by half */
#define HIGH ((veci){2, 10, 3, 11, 6, 14, 7, 15})
#define INLINE static inline __attribute__((always_inline))

/* C (M, 8 * V), or its first n columns, from A with any strides and b (k, 8 * V) with row stride ldb. */
INLINE void tile(const int M, const int V, int64_t n, int64_t k, float alpha, const float *a, int64_t rsa, int64_t csa, const float *b,
                 int64_t ldb, float beta, float *c, int64_t ldc) {
  vec sum[TILE_M][2];
  for (int i = 0; i < M; i++)
    for (int v = 0; v < V; v++) sum[i][v] = (vec){0};
  for (int64_t p = 0; p < k; p++, a += csa, b += ldb) {
    vec b0 = LOAD(b), b1 = V > 1 ? LOAD(b + LANES) : b0;
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
      vec x = a[i * rsa] - (vec){0};
      sum[i][0] += x * b0;
      if (V > 1) sum[i][1] += x * b1;
    }
  }
  if (n == V * LANES) {
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
      for (int v = 0; v < V; v++) {
        float *to = c + i * ldc + v * LANES;
        vec y = alpha * sum[i][v];
        if (beta != 0) y += beta * LOAD(to);
        STORE(to, y);
      }
    return;
  }
  float rest[TILE_N];
#pragma GCC unroll 6
  for (int i = 0; i < M; i++) {
    STORE(rest, alpha * sum[i][0]);
    if (V > 1) STORE(rest + LANES, alpha * sum[i][1]);
    for (int64_t j = 0; j < n; j++) c[i * ldc + j] = beta != 0 ? rest[j] + beta * c[i * ldc + j] : rest[j];
  }
}

/* (8, 8) from rows `ld` apart to columns, rows 16 apart; rows from `have` on count as 0. */
INLINE void transpose8(const float *b, int64_t ld, int64_t have, float *to) {
  vec r[8], t[8];
  for (int j = 0; j < 8; j++) r[j] = j < have ? LOAD(b + j * ld) : (vec){0};
  for (int j = 0; j < 4; j++) { /* pairs 4 apart, then 2, then 1 */
    t[2 * j] = __builtin_shuffle(r[j], r[j + 4], LOW);
    t[2 * j + 1] = __builtin_shuffle(r[j], r[j + 4], HIGH);
  }
  /* t[2j]: columns 0 1 | 4 5 of rows j, j + 4; t[2j + 1]: columns 2 3 | 6 7 */
  for (int h = 0; h < 2; h++) {
    vec x0 = __builtin_shuffle(t[h], t[4 + h], LOW);     /* rows 0 2 4 6 of column 0+2h | 4+2h */
    vec x1 = __builtin_shuffle(t[h], t[4 + h], HIGH);    /* of column 1+2h | 5+2h */
    vec y0 = __builtin_shuffle(t[2 + h], t[6 + h], LOW); /* rows 1 3 5 7 */
    vec y1 = __builtin_shuffle(t[2 + h], t[6 + h], HIGH);
    vec z0 = __builtin_shuffle(x0, y0, LOW), z1 = __builtin_shuffle(x0, y0, HIGH);
    vec w0 = __builtin_shuffle(x1, y1, LOW), w1 = __builtin_shuffle(x1, y1, HIGH);
    STORE(to + (2 * h) * TILE_N, __builtin_shuffle(z0, z1, (veci){0, 1, 2, 3, 8, 9, 10, 11}));
    STORE(to + (2 * h + 4) * TILE_N, __builtin_shuffle(z0, z1, (veci){4, 5, 6, 7, 12, 13, 14, 15}));
    STORE(to + (2 * h + 1) * TILE_N, __builtin_shuffle(w0, w1, (veci){0, 1, 2, 3, 8, 9, 10, 11}));
    STORE(to + (2 * h + 5) * TILE_N, __builtin_shuffle(w0, w1, (veci){4, 5, 6, 7, 12, 13, 14, 15}));
  }
}

/* Panel (k, 16) of op(B), zeros beyond its n columns. */
INLINE void pack(int tb, int64_t n, int64_t k, const float *b, int64_t ldb, float *panel) {
  if (!tb) {
    for (int64_t p = 0; p < k; p++)
      for (int64_t j = 0; j < TILE_N; j++) panel[p * TILE_N + j] = j < n ? b[p * ldb + j] : 0;
    return;
  }
  int64_t whole = k & ~7;
  for (int64_t j = 0; j < n; j += LANES)
    for (int64_t p = 0; p < whole; p += LANES) transpose8(b + j * ldb + p, ldb, n - j, panel + p * TILE_N + j);
  for (int64_t p = whole; p < k; p++)
    for (int64_t j = 0; j < TILE_N; j++) panel[p * TILE_N + j] = j < n ? b[j * ldb + p] : 0;
}

/* C (M, 4), or its first n columns, by scalar products of rows of A and of rows of B as it lies (transposed). */
INLINE void dot_tile(const int M, int64_t n, int64_t k, float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                     float *c, int64_t ldc) {
  const float *b1 = b + (n > 1 ? ldb : 0), *b2 = b + (n > 2 ? 2 * ldb : 0), *b3 = b + (n > 3 ? 3 * ldb : 0);
  vec s[DOT_M][4];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < 4; j++) s[i][j] = (vec){0};
  int64_t p = 0;
  for (; p + LANES <= k; p += LANES) {
    vec x[DOT_M], y;
#pragma GCC unroll 3
    for (int i = 0; i < M; i++) x[i] = LOAD(a + i * lda + p);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      y = LOAD((j == 0 ? b : j == 1 ? b1 : j == 2 ? b2 : b3) + p);
#pragma GCC unroll 3
      for (int i = 0; i < M; i++) s[i][j] += x[i] * y;
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < M; i++) {
    vec t = __builtin_shuffle(s[i][0], s[i][1], LOW) + __builtin_shuffle(s[i][0], s[i][1], HIGH);
    vec u = __builtin_shuffle(s[i][2], s[i][3], LOW) + __builtin_shuffle(s[i][2], s[i][3], HIGH);
    t = __builtin_shuffle(t, u, (veci){0, 1, 8, 9, 4, 5, 12, 13}) + __builtin_shuffle(t, u, (veci){2, 3, 10, 11, 6, 7, 14, 15});
    float r[4] = {t[0] + t[4], t[1] + t[5], t[2] + t[6], t[3] + t[7]};
    for (int64_t q = p; q < k; q++) {
      float x = a[i * lda + q];
      r[0] += x * b[q], r[1] += x * b1[q], r[2] += x * b2[q], r[3] += x * b3[q];
    }
    float *to = c + i * ldc;
    for (int j = 0; j < 4 && j < n; j++) to[j] = beta != 0 ? alpha * r[j] + beta * to[j] : alpha * r[j];
  }
}

INLINE void dots(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                 float *c, int64_t ldc) {
  for (int64_t j = 0; j < n; j += 4, b += 4 * ldb, c += 4) {
    int64_t i = 0;
    for (; i + DOT_M <= m; i += DOT_M) dot_tile(DOT_M, n - j, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
    if (m - i == 2) dot_tile(2, n - j, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
    if (m - i == 1) dot_tile(1, n - j, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
  }
}

/* One row of C from the rows of B as they lie, four at a time: bound by reading B. */
INLINE void row_axpy(int64_t n, int64_t k, float alpha, const float *a, int64_t csa, const float *restrict b, int64_t ldb, float beta,
                     float *restrict c) {
  for (int64_t j = 0; j < n; j++) c[j] = beta != 0 ? beta * c[j] : 0;
  int64_t p = 0;
  for (; p + 4 <= k; p += 4, b += 4 * ldb) {
    const float *x = a + p * csa;
    float x0 = alpha * x[0], x1 = alpha * x[csa], x2 = alpha * x[2 * csa], x3 = alpha * x[3 * csa];
#pragma omp simd
    for (int64_t j = 0; j < n; j++) c[j] += x0 * b[j] + x1 * b[ldb + j] + (x2 * b[2 * ldb + j] + x3 * b[3 * ldb + j]);
  }
  for (; p < k; p++, b += ldb) {
    float x = alpha * a[p * csa];
#pragma omp simd
    for (int64_t j = 0; j < n; j++) c[j] += x * b[j];
  }
}

INLINE void column(const int V, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t rsa, int64_t csa, const float *b,
                   int64_t ldb, float beta, float *c, int64_t ldc) {
  for (; m > 8 || m == TILE_M; m -= TILE_M, a += TILE_M * rsa, c += TILE_M * ldc)
    tile(TILE_M, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc);
  if (m > TILE_M) { /* 4 + 3 or 4 + 4: a tile of one or two rows waits for its sums */
    tile(4, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc);
    m -= 4, a += 4 * rsa, c += 4 * ldc;
  }
  switch (m) {
  case 5: tile(5, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc); break;
  case 4: tile(4, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc); break;
  case 3: tile(3, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc); break;
  case 2: tile(2, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc); break;
  case 1: tile(1, V, n, k, alpha, a, rsa, csa, b, ldb, beta, c, ldc); break;
  }
}

TM_CLONES static void sgemm_own(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda, const float *b,
                                int64_t ldb, float beta, float *c, int64_t ldc) {
  if (n == 1 && ldc == 1 && m > 1) { /* a column is a row of the transposed product */
    const float *t = a;
    int64_t ldt = lda;
    int tt = !ta;
    a = b, lda = ldb, ta = !tb, b = t, ldb = ldt, tb = tt, n = m, m = 1, ldc = n;
  }
  int64_t rsa = ta ? 1 : lda, csa = ta ? lda : 1;
  /* Scalar products need no packing, but their lanes must be added up: that pays from some length on. */
  if (tb && csa == 1 && k >= (m <= 2 ? 0 : m <= 8 || n < TILE_N ? 48 : 128)) {
    dots(m, n, k, alpha, a, rsa, b, ldb, beta, c, ldc);
    return;
  }
  if (!tb && m == 1) {
    row_axpy(n, k, alpha, a, csa, b, ldb, beta, c);
    return;
  }
  float panel[BLOCK_K * TILE_N] __attribute__((aligned(64))); /* 16 KB: half of a first-level cache */
  int64_t p = 0;
  do { /* once for k = 0 as well */
    int64_t kb = TM_MIN(k - p, BLOCK_K);
    for (int64_t j = 0; j < n; j += TILE_N) {
      int64_t nb = TM_MIN(n - j, TILE_N), ldp = TILE_N;
      const float *from = tb ? b + j * ldb + p : b + p * ldb + j, *use = panel;
      if (!tb && (nb == TILE_N || nb == LANES)) use = from, ldp = ldb;
      else pack(tb, nb, kb, from, ldb, panel);
      if (nb > LANES) column(2, m, nb, kb, alpha, a + p * csa, rsa, csa, use, ldp, beta, c + j, ldc);
      else column(1, m, nb, kb, alpha, a + p * csa, rsa, csa, use, ldp, beta, c + j, ldc);
    }
    p += BLOCK_K, beta = 1;
  } while (p < k);
}

/* -- other dtypes, our own ---------------------------------------------------------------------------------- */

/* Rows of C gather multiples of rows of B; W is wide enough that a product does not overflow as int. */
#define PLAIN(name, T, W) \
  TM_CLONES static void name(int ta, int tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b, int64_t ldb, \
                             T beta, T *c, int64_t ldc) { \
    T packed[64 * 64]; \
    for (int64_t i = 0; i < m; i++) \
      for (int64_t j = 0; j < n; j++) c[i * ldc + j] = beta != 0 ? (T)((W)beta * c[i * ldc + j]) : 0; \
    for (int64_t p0 = 0; p0 < k; p0 += 64) \
      for (int64_t j0 = 0; j0 < n; j0 += 64) { \
        int64_t kb = TM_MIN(k - p0, 64), nb = TM_MIN(n - j0, 64), ld = tb ? 64 : ldb; \
        const T *rows = tb ? packed : b + p0 * ldb + j0; \
        if (tb) \
          for (int64_t j = 0; j < nb; j++) \
            for (int64_t p = 0; p < kb; p++) packed[p * 64 + j] = b[(j0 + j) * ldb + p0 + p]; \
        for (int64_t i = 0; i < m; i++) { \
          T *restrict to = c + i * ldc + j0; \
          for (int64_t p = 0; p < kb; p++) { \
            T x = (T)((W)alpha * (ta ? a[(p0 + p) * lda + i] : a[i * lda + p0 + p])); \
            const T *from = rows + p * ld; \
            _Pragma("omp simd") for (int64_t j = 0; j < nb; j++) to[j] = (T)(to[j] + (W)x * from[j]); \
          } \
        } \
      } \
  }
PLAIN(gemm_f64, double, double)
PLAIN(gemm_8, uint8_t, uint32_t)
PLAIN(gemm_16, uint16_t, uint32_t)
PLAIN(gemm_32, uint32_t, uint32_t)
PLAIN(gemm_64, uint64_t, uint64_t)

/* -- choice --------------------------------------------------------------------------------------------------- */

typedef struct problem {
  int dtype, ta, tb;
  int64_t m, n, k, lda, ldb, ldc;
  double alpha, beta;
} problem;

/* Microseconds on one thread of a Zen 4 core (57 G multiply-adds/s at most), oneDNN 2.6 | OpenBLAS 0.3.21 | ours;
** NT: B transposed, as in x W^T; TN: as in dy^T x.
**     1 x   8 x   8 NT  0.11 | 0.05 | 0.02      64 x  64 x 784 NT   79 |  71 |  61
**    16 x   8 x   8 NT  0.33 | 0.12 | 0.05      32 x  64 x 784 NT   49 |  40 |  33
**    16 x  32 x  32 NT  0.91 | 0.57 | 0.43      64 x 128 x  64 NT   10 |  12 |  11
**    16 x  32 x  32 NN  0.54 | 0.32 | 0.36      64 x 784 x  64 TN   57 |  66 |  67
**    32 x  32 x  16 TN  0.56 | 0.34 | 0.40     128 x 256 x 784 NT  475 | 517 | 497
**    64 x  64 x  10 NN  1.15 | 0.82 | 1.01     256 x 256 x 256 NN  295 | 321 | 343
** oneDNN spends its time on small products with set-up and, where B is transposed and m or n is small, with
** packing. Two threads pay from about 2e5 multiply-adds on (32 x 128 x 64: 3.8 in place of 4.9). */
static bool is_small_f32(const problem *q) {
  double work = (double)q->m * q->n * q->k;
  if (work <= 2e5) return true;
  return work <= 16e6 && q->tb && !q->ta && TM_MIN(q->m, q->n) <= 64 && (omp_get_max_threads() == 1 || omp_in_parallel());
}

static void product_f32(const problem *q, const float *a, const float *b, float *c) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (!is_small_f32(q)) {
    pthread_once(&once, open_dnnl);
    if (dnnl_sgemm) {
      sigset_t signals;
      close_to_signals(&signals);
      int status = dnnl_sgemm(q->ta ? 'T' : 'N', q->tb ? 'T' : 'N', q->m, q->n, q->k, (float)q->alpha, a, q->lda, b, q->ldb, (float)q->beta,
                              c, q->ldc);
      pthread_sigmask(SIG_SETMASK, &signals, NULL);
      if (!status) return;
    }
  }
  sgemm_own(q->ta, q->tb, q->m, q->n, q->k, (float)q->alpha, a, q->lda, b, q->ldb, (float)q->beta, c, q->ldc);
}

/* OpenBLAS has kernels for small products too: 8 x 8 x 8 takes it 0.05 us, our plain loops 0.45. */
static void product_f64(const problem *q, const double *a, const double *b, double *c) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  bool fits = TM_MAX(TM_MAX(q->m, q->n), q->k) <= INT_MAX && TM_MAX(TM_MAX(q->lda, q->ldb), q->ldc) <= INT_MAX;
  if (fits && (double)q->m * q->n * q->k > 64) {
    pthread_once(&once, open_openblas);
    if (cblas_dgemm) {
      cblas_dgemm(ROW_MAJOR, q->ta ? TRANS : NO_TRANS, q->tb ? TRANS : NO_TRANS, (int)q->m, (int)q->n, (int)q->k, q->alpha, a, (int)q->lda,
                  b, (int)q->ldb, q->beta, c, (int)q->ldc);
      return;
    }
  }
  gemm_f64(q->ta, q->tb, q->m, q->n, q->k, q->alpha, a, q->lda, b, q->ldb, q->beta, c, q->ldc);
}

/* Rows to (rows, columns) float32, close together. */
static void widen(int dtype, int64_t rows, int64_t columns, const uint16_t *from, int64_t ld, float *to) {
#pragma omp parallel for if (rows * columns >= TM_PARALLEL_MIN)
  for (int64_t i = 0; i < rows; i++) tm_convert(columns, to + i * columns, TM_F32, 1, from + i * ld, dtype, 1);
}

/* float16 and bfloat16: float32 around the float32 product, rounded once. */
static int product_half(const problem *q, const uint16_t *a, const uint16_t *b, uint16_t *c) {
  int64_t m = q->m, n = q->n, k = q->k;
  size_t na = (size_t)m * (size_t)k, nb = (size_t)k * (size_t)n, nc = (size_t)m * (size_t)n;
  float *wa = tm_host_alloc((na + nb + nc) * sizeof(float));
  if (!wa) return tm_last_code();
  float *wb = wa + na, *wc = wb + nb;
  problem w = *q;
  w.dtype = TM_F32, w.lda = q->ta ? m : k, w.ldb = q->tb ? k : n, w.ldc = n;
  widen(q->dtype, q->ta ? k : m, w.lda, a, q->lda, wa);
  widen(q->dtype, q->tb ? n : k, w.ldb, b, q->ldb, wb);
  if (q->beta != 0) widen(q->dtype, m, n, c, q->ldc, wc);
  product_f32(&w, wa, wb, wc);
#pragma omp parallel for if (m * n >= TM_PARALLEL_MIN)
  for (int64_t i = 0; i < m; i++) tm_convert(n, c + i * q->ldc, q->dtype, 1, wc + i * n, TM_F32, 1);
  tm_host_free(wa);
  return TM_OK;
}

#define WHOLE(U) /* through int64: a negative number wraps to the U that acts like it */ \
  q->ta, q->tb, q->m, q->n, q->k, (U)(int64_t)q->alpha, (const U *)a, q->lda, (const U *)b, q->ldb, (U)(int64_t)q->beta, (U *)c, q->ldc

static int product(const problem *q, const void *a, const void *b, void *c) {
  switch (q->dtype) {
  case TM_F32: product_f32(q, a, b, c); return TM_OK;
  case TM_F64: product_f64(q, a, b, c); return TM_OK;
  case TM_F16:
  case TM_BF16: return product_half(q, a, b, c);
  case TM_I8:
  case TM_U8: gemm_8(WHOLE(uint8_t)); return TM_OK;
  case TM_I16: gemm_16(WHOLE(uint16_t)); return TM_OK;
  case TM_I32: gemm_32(WHOLE(uint32_t)); return TM_OK;
  default: gemm_64(WHOLE(uint64_t)); return TM_OK;
  }
}

/* At most this many multiply-adds between two looks at the interrupt: some tenths of a second. */
#define CHUNK_FLOAT 4e9
#define CHUNK_WHOLE 4e8

int tm_gemm(int dtype, int transa, int transb, int64_t m, int64_t n, int64_t k, double alpha, const void *a, int64_t lda, const void *b,
            int64_t ldb, double beta, void *c, int64_t ldc) {
  if (m == 0 || n == 0) return TM_OK;
  problem q = {dtype, transa, transb, m, n, k, lda, ldb, ldc, alpha, beta};
  double limit = tm_is_float(dtype) ? CHUNK_FLOAT : CHUNK_WHOLE, row = (double)n * (double)k;
  if (TM_LIKELY((double)m * row <= limit)) return product(&q, a, b, c);
  int64_t rows = TM_MAX((int64_t)(limit / row), 1), size = tm_dtype_size(dtype);
  for (int64_t i = 0; i < m; i += rows) {
    int code = tm_poll();
    q.m = TM_MIN(rows, m - i);
    if (!code) code = product(&q, (const char *)a + i * (transa ? 1 : lda) * size, b, (char *)c + i * ldc * size);
    if (code) return code;
  }
  return TM_OK;
}
