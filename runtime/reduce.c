/* reduce.c: reductions over any dims (sum, mean, prod, amax, amin, any, all) and positions along one (argmax...).
**
** A call becomes two short lists of axes, kept (K elements) and reduced (R), sorted by stride and merged, so that
** nearly every layout ends as a matrix reduced along its rows or its columns. An operator gives a kernel for each
** of the two and for each working type: float32 (the half types too), float64, int64 (all whole numbers, bool).
** Accumulators are float64, or int64 for whole numbers.
**
** What must stay true: a result does not depend on the number of threads. Work is cut by shape alone, and partial
** results are combined in order. The kernels along rows use 16-byte vectors on every processor: eight accumulators
** hide the latency, wider vectors would only wait for memory, and so the processor does not change a sum either. */
#include "internal.h"

enum { WF32, WF64, WI64 };
static const int work_dtype[] = {TM_F32, TM_F64, TM_I64}, work_size[] = {4, 8, 8};
static int work_of(int dtype) { return dtype == TM_F64 ? WF64 : tm_is_float(dtype) ? WF32 : WI64; }

/* An (m, n) block at p with ld elements between its rows: acc[i] takes up row i, or acc[j] column j. */
typedef void (*block_fn)(int64_t m, int64_t n, const void *p, int64_t ld, void *acc);
typedef struct reducer {
  block_fn rows[3], cols[3];
  double f0; /* what nothing reduces to */
  int64_t i0;
} reducer;

/* -- kernels -------------------------------------------------------------------------------------------------- */

enum { CHUNK = 1024, WIDTH = 1024, PIECE = 32768 }; /* elements: in one accumulator; kept, per block; per work item */

typedef float v4f __attribute__((vector_size(16)));
typedef double v2d __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef int64_t v2i __attribute__((vector_size(16)));
typedef v4f v4f_any __attribute__((aligned(4), may_alias));
typedef v2d v2d_any __attribute__((aligned(8), may_alias));

/* n contiguous elements, with eight vectors of accumulators. VSTEP(a, v) for vectors, STEP(a, v) for numbers. */
#define FOLD(name, T, V, A, INIT, VSTEP, STEP) \
  static A name(int64_t n, const T *x) { \
    enum { L = sizeof(V) / sizeof(T) }; \
    V s0 = (V){0} + (T)(INIT), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0; \
    for (; n >= 8 * L; n -= 8 * L, x += 8 * L) { \
      const V##_any *v = (const V##_any *)x; \
      s0 = VSTEP(s0, v[0]), s1 = VSTEP(s1, v[1]), s2 = VSTEP(s2, v[2]), s3 = VSTEP(s3, v[3]); \
      s4 = VSTEP(s4, v[4]), s5 = VSTEP(s5, v[5]), s6 = VSTEP(s6, v[6]), s7 = VSTEP(s7, v[7]); \
    } \
    for (; n >= L; n -= L, x += L) s0 = VSTEP(s0, *(const V##_any *)x); \
    s0 = VSTEP(s0, s4), s1 = VSTEP(s1, s5), s2 = VSTEP(s2, s6), s3 = VSTEP(s3, s7); \
    s0 = VSTEP(s0, s2), s1 = VSTEP(s1, s3), s0 = VSTEP(s0, s1); \
    A a = s0[0]; \
    for (int k = 1; k < L; k++) a = STEP(a, (A)s0[k]); \
    for (; n > 0; n--, x++) a = STEP(a, (A)*x); \
    return a; \
  }
/* For what is rare or has no vector form. */
#define FOLD_PLAIN(name, T, A, INIT, STEP) \
  static A name(int64_t n, const T *x) { \
    A a = (A)(INIT); \
    for (int64_t i = 0; i < n; i++) a = STEP(a, (A)x[i]); \
    return a; \
  }
#define FOLD_TEST(name, T, A, OP, RESULT) \
  static A name(int64_t n, const T *x) { \
    int hit = 0; \
    for (int64_t i = 0; i < n; i++) hit |= x[i] OP 0; \
    return RESULT; \
  }
#define ROWS(name, T, A, STEP, FOLD) \
  static void name(int64_t m, int64_t n, const void *p, int64_t ld, void *acc) { \
    A *a = acc; \
    for (int64_t i = 0; i < m; i++) { \
      const T *x = (const T *)p + i * ld; \
      A s = a[i]; \
      for (int64_t j = 0; j < n; j += CHUNK) s = STEP(s, FOLD(TM_MIN(CHUNK, n - j), x + j)); \
      a[i] = s; \
    } \
  }
/* Four rows at once, in type M, to touch the accumulators less often. */
#define COLS(name, T, M, A, STEP) \
  TM_CLONES static void name(int64_t m, int64_t n, const void *p, int64_t ld, void *acc) { \
    A *restrict a = acc; \
    const T *restrict x = p; \
    for (; m >= 4; m -= 4, x += 4 * ld) { \
      const T *restrict y = x + ld, *restrict z = y + ld, *restrict u = z + ld; \
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++) { \
        M v = (M)x[j], w = (M)y[j], k = (M)z[j], l = (M)u[j]; \
        v = STEP(v, w), k = STEP(k, l), v = STEP(v, k); \
        A b = a[j], d = (A)v; \
        a[j] = STEP(b, d); \
      } \
    } \
    for (; m > 0; m--, x += ld) { \
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++) { \
        A b = a[j], d = (A)x[j]; \
        a[j] = STEP(b, d); \
      } \
    } \
  }

#define ADD(a, v) ((a) + (v))
#define MUL(a, v) ((a) * (v))
#define WRAP_ADD(a, v) ((int64_t)((uint64_t)(a) + (uint64_t)(v))) /* int64 overflow wraps, without undefined behaviour */
#define WRAP_MUL(a, v) ((int64_t)((uint64_t)(a) * (uint64_t)(v)))
/* v if it is better or NaN, else a. Once a is NaN it stays, as no comparison with it is true. The bits are blended
** because GCC 12 makes branches of a choice, and then vectorises nothing. */
#define PICK(name, T, I, BETTER) \
  static inline T name(T a, T v) { \
    I x, y, take = -(I)((v BETTER a) | (v != v)); \
    memcpy(&x, &v, sizeof x), memcpy(&y, &a, sizeof y); \
    x = (x & take) | (y & ~take); \
    memcpy(&v, &x, sizeof x); \
    return v; \
  }
PICK(larger_f32, float, int32_t, >)
PICK(larger_f64, double, int64_t, >)
PICK(larger_i64, int64_t, int64_t, >)
PICK(smaller_f32, float, int32_t, <)
PICK(smaller_f64, double, int64_t, <)
PICK(smaller_i64, int64_t, int64_t, <)
#define LARGER(a, v) _Generic((v), float : larger_f32, double : larger_f64, default : larger_i64)(a, v)
#define SMALLER(a, v) _Generic((v), float : smaller_f32, double : smaller_f64, default : smaller_i64)(a, v)
#define BLEND(F, I, m, v, a) ((F)(((I)(v) & (m)) | ((I)(a) & ~(m))))
#define LARGER_V4(a, v) BLEND(v4f, v4i, ((v) > (a)) | ((v) != (v)), v, a)
#define SMALLER_V4(a, v) BLEND(v4f, v4i, ((v) < (a)) | ((v) != (v)), v, a)
#define LARGER_V2(a, v) BLEND(v2d, v2i, ((v) > (a)) | ((v) != (v)), v, a)
#define SMALLER_V2(a, v) BLEND(v2d, v2i, ((v) < (a)) | ((v) != (v)), v, a)
#define EITHER(a, v) (((a) != 0) | ((v) != 0))
#define BOTH(a, v) (((a) != 0) & ((v) != 0))

FOLD(sum_f32, float, v4f, double, 0, ADD, ADD)
FOLD(sum_f64, double, v2d, double, 0, ADD, ADD)
FOLD_PLAIN(sum_i64, int64_t, int64_t, 0, WRAP_ADD)
FOLD_PLAIN(prod_f32, float, double, 1, MUL)
FOLD_PLAIN(prod_f64, double, double, 1, MUL)
FOLD_PLAIN(prod_i64, int64_t, int64_t, 1, WRAP_MUL)
FOLD(amax_f32, float, v4f, double, -INFINITY, LARGER_V4, LARGER)
FOLD(amax_f64, double, v2d, double, -INFINITY, LARGER_V2, LARGER)
FOLD_PLAIN(amax_i64, int64_t, int64_t, INT64_MIN, LARGER)
FOLD(amin_f32, float, v4f, double, INFINITY, SMALLER_V4, SMALLER)
FOLD(amin_f64, double, v2d, double, INFINITY, SMALLER_V2, SMALLER)
FOLD_PLAIN(amin_i64, int64_t, int64_t, INT64_MAX, SMALLER)
FOLD_TEST(any_f32, float, double, !=, hit)
FOLD_TEST(any_f64, double, double, !=, hit)
FOLD_TEST(any_i64, int64_t, int64_t, !=, hit)
FOLD_TEST(all_f32, float, double, ==, !hit)
FOLD_TEST(all_f64, double, double, ==, !hit)
FOLD_TEST(all_i64, int64_t, int64_t, ==, !hit)

#define REDUCER(op, M, STEP, ISTEP, F0, I0) \
  ROWS(op##_rows_f32, float, double, STEP, op##_f32) \
  ROWS(op##_rows_f64, double, double, STEP, op##_f64) \
  ROWS(op##_rows_i64, int64_t, int64_t, ISTEP, op##_i64) \
  COLS(op##_cols_f32, float, M, double, STEP) \
  COLS(op##_cols_f64, double, double, double, STEP) \
  COLS(op##_cols_i64, int64_t, int64_t, int64_t, ISTEP) \
  static const reducer op##_reducer = { \
      {op##_rows_f32, op##_rows_f64, op##_rows_i64}, {op##_cols_f32, op##_cols_f64, op##_cols_i64}, F0, I0};
REDUCER(sum, float, ADD, WRAP_ADD, 0, 0)
REDUCER(prod, double, MUL, WRAP_MUL, 1, 1)
REDUCER(amax, float, LARGER, LARGER, -INFINITY, INT64_MIN)
REDUCER(amin, float, SMALLER, SMALLER, INFINITY, INT64_MAX)
REDUCER(any, float, EITHER, EITHER, 0, 0)
REDUCER(all, float, BOTH, BOTH, 1, 1)

/* -- the driver ------------------------------------------------------------------------------------------------- */

typedef struct axis {
  int64_t n, xs, ys;
} axis; /* elements; strides in x and in y */
typedef struct job {
  const reducer *f;
  const char *x;
  char *y;
  int xdtype, xsize, ydtype, ysize, work;
  int nk, nr; /* axes kept and reduced, at least one each; the last is the innermost */
  axis k[TM_MAXDIM], r[TM_MAXDIM];
  int64_t kept, reduced;
  bool columns;          /* the kept inner axis is contiguous: accumulate whole rows */
  bool direct;           /* x can be read as it is, without staging */
  int64_t width, blocks; /* kept elements per block; blocks of the inner kept axis */
  int64_t piece, pieces; /* positions of r[0] per piece */
  double scale;          /* divides a mean; 1 else */
} job;

/* Into a sorted list: long strides outside, repeated (stride 0) axes outermost, so that the inner loops run over
** memory in order. */
static void add_axis(axis *list, int *n, int64_t size, int64_t xs, int64_t ys) {
  if (size == 1) return;
  int i = (*n)++;
  for (; i > 0 && xs && (list[i - 1].xs < xs && list[i - 1].xs); i--) list[i] = list[i - 1];
  for (; i > 0 && !xs; i--) list[i] = list[i - 1];
  list[i] = (axis){size, xs, ys};
}

static void merge_axes(axis *list, int *n) {
  int w = 0;
  for (int i = 1; i < *n; i++) {
    if (list[w].xs == list[i].n * list[i].xs && list[w].ys == list[i].n * list[i].ys)
      list[w] = (axis){list[w].n * list[i].n, list[i].xs, list[i].ys};
    else list[++w] = list[i];
  }
  if (*n == 0) list[0] = (axis){1, 1, 1};
  *n = w + 1;
}

static void plan(job *g, const tm_tensor *x, const tm_tensor *y, uint32_t mask, bool keepdim) {
  g->nk = g->nr = 0;
  g->reduced = 1;
  for (int d = 0, j = 0; d < x->c.ndim; d++) {
    bool gone = mask >> d & 1;
    if (gone) add_axis(g->r, &g->nr, T_SIZE(x, d), T_STRIDE(x, d), 0), g->reduced *= T_SIZE(x, d);
    else add_axis(g->k, &g->nk, T_SIZE(x, d), T_STRIDE(x, d), T_STRIDE(y, j));
    if (!gone || keepdim) j++;
  }
  merge_axes(g->k, &g->nk);
  merge_axes(g->r, &g->nr);
  g->kept = y->c.numel;
  axis *k = &g->k[g->nk - 1], *r = &g->r[g->nr - 1];
  g->columns = k->xs == 1 && (r->xs != 1 || r->n == 1);
  g->direct = g->xdtype == work_dtype[g->work] && (g->columns || r->xs == 1);
  g->width = g->columns ? WIDTH : TM_MIN(TM_MAX(PIECE / TM_MAX(g->reduced, 1), 1), WIDTH);
  g->blocks = (k->n + g->width - 1) / g->width;
  /* Few kept elements: cut the reduced axes too, into at most 256 pieces. */
  g->piece = TM_MAX(g->r[0].n, 1), g->pieces = 1;
  if (g->kept > 0 && g->kept / k->n * g->blocks < 16 && g->kept * g->reduced >= 2 * PIECE) {
    int64_t unit = g->reduced / g->r[0].n * TM_MIN(g->width, k->n);
    g->piece = TM_MAX(TM_MAX(PIECE / unit, 1), (g->r[0].n + 255) / 256);
    g->pieces = (g->r[0].n + g->piece - 1) / g->piece;
  }
}

/* acc[m] takes up m kept and n reduced elements (the inner axes) at x. */
static void reduce_block(const job *g, int64_t m, int64_t n, const char *x, void *acc) {
  const axis *k = &g->k[g->nk - 1], *r = &g->r[g->nr - 1];
  int w = g->work;
  double buffer[CHUNK];
  if (!g->direct && g->columns) {
    for (int64_t i = 0; i < n; i++) {
      tm_convert(m, buffer, work_dtype[w], 1, x + i * r->xs * g->xsize, g->xdtype, 1);
      g->f->cols[w](1, m, buffer, 0, acc);
    }
  } else if (!g->direct) {
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j += CHUNK) {
        int64_t part = TM_MIN(CHUNK, n - j);
        tm_convert(part, buffer, work_dtype[w], 1, x + (i * k->xs + j * r->xs) * g->xsize, g->xdtype, r->xs);
        g->f->rows[w](1, part, buffer, 0, (char *)acc + 8 * i);
      }
  } else if (!g->columns) {
    g->f->rows[w](m, n, x, k->xs, acc);
  } else if (r->xs == m && m <= 32 && n >= 8) { /* narrow and without gaps: several rows count as one wide row */
    int64_t fold = 64 / m, wide = n / fold;
    for (int64_t j = 0; j < fold * m; j++) memcpy(&buffer[j], g->work == WI64 ? (const void *)&g->f->i0 : &g->f->f0, 8);
    g->f->cols[w](wide, fold * m, x, fold * m, buffer);
    g->f->cols[w](n - wide * fold, m, x + wide * fold * m * g->xsize, m, acc);
    g->f->cols[w == WF32 ? WF64 : w](fold, m, buffer, m, acc);
  } else {
    g->f->cols[w](n, m, x, r->xs, acc);
  }
}

static void reset(const job *g, int64_t m, void *acc) {
  for (int64_t i = 0; i < m; i++) {
    if (g->work == WI64) ((int64_t *)acc)[i] = g->f->i0;
    else ((double *)acc)[i] = g->f->f0;
  }
}

/* Kept block b: its first element in x and y (in elements), and its size. */
static int64_t locate(const job *g, int64_t b, int64_t *xat, int64_t *yat) {
  const axis *k = &g->k[g->nk - 1];
  int64_t first = b % g->blocks * g->width, m = TM_MIN(g->width, k->n - first);
  *xat = first * k->xs, *yat = first * k->ys;
  b /= g->blocks;
  for (int i = g->nk - 2; i >= 0; i--) {
    *xat += b % g->k[i].n * g->k[i].xs, *yat += b % g->k[i].n * g->k[i].ys;
    b /= g->k[i].n;
  }
  return m;
}

/* acc[m] takes up piece p of the reduced axes, for the kept block at x. */
static void reduce_piece(const job *g, int64_t m, const char *x, int64_t p, void *acc) {
  int64_t first = p * g->piece, last = TM_MIN(first + g->piece, g->r[0].n), at[TM_MAXDIM] = {0};
  int inner = g->nr - 1;
  x += first * g->r[0].xs * g->xsize;
  if (inner == 0) {
    reduce_block(g, m, last - first, x, acc);
    return;
  }
  for (at[0] = first; at[0] < last;) {
    reduce_block(g, m, g->r[inner].n, x, acc);
    for (int i = inner - 1; i >= 0; i--) {
      at[i]++, x += g->r[i].xs * g->xsize;
      if (i == 0 || at[i] < g->r[i].n) break;
      x -= g->r[i].n * g->r[i].xs * g->xsize;
      at[i] = 0;
    }
  }
}

static void write_block(const job *g, int64_t m, void *acc, int64_t yat) {
  if (g->scale != 1)
    for (int64_t i = 0; i < m; i++) ((double *)acc)[i] /= g->scale;
  tm_convert(m, g->y + yat * g->ysize, g->ydtype, g->k[g->nk - 1].ys, acc, g->work == WI64 ? TM_I64 : TM_F64, 1);
}

static void reduce_kept(const job *g, int64_t b) {
  double acc[WIDTH];
  int64_t xat, yat, m = locate(g, b, &xat, &yat);
  reset(g, m, acc);
  if (g->reduced > 0) reduce_piece(g, m, g->x + xat * g->xsize, 0, acc);
  write_block(g, m, acc, yat);
}

static int reduce_in_pieces(const job *g, int64_t nblock) {
  int64_t width = TM_MIN(g->width, g->k[g->nk - 1].n), n = nblock * g->pieces;
  char *partial = tm_host_alloc((size_t)(n * width) * 8);
  if (!partial) return TM_EMEM;
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < n; i++) {
    int64_t xat, yat, m = locate(g, i / g->pieces, &xat, &yat);
    double acc[WIDTH];
    reset(g, m, acc);
    reduce_piece(g, m, g->x + xat * g->xsize, i % g->pieces, acc);
    memcpy(partial + i * width * 8, acc, (size_t)m * 8);
  }
  for (int64_t b = 0; b < nblock; b++) {
    int64_t xat, yat, m = locate(g, b, &xat, &yat);
    double acc[WIDTH];
    reset(g, m, acc);
    g->f->cols[g->work == WI64 ? WI64 : WF64](g->pieces, m, partial + b * g->pieces * width * 8, width, acc);
    write_block(g, m, acc, yat);
  }
  tm_host_free(partial);
  return TM_OK;
}

/* Bound by memory bandwidth for large x. */
static int reduce(tm_call *c, const reducer *f, uint32_t mask, bool keepdim, bool mean) {
  tm_tensor *x = c->in[0], *y = c->out[0], *cast = NULL;
  int w = work_of(c->compute);
  job g;
  if (x->c.dtype == work_dtype[w] && y->c.numel == 1 && x->c.numel < PIECE && tm_is_contiguous(x)) {
    double acc = f->f0;
    if (w == WI64) memcpy(&acc, &f->i0, 8);
    f->rows[w](1, x->c.numel, tm_data(x), 0, &acc);
    if (mean) acc /= (double)x->c.numel;
    tm_convert(1, tm_data(y), y->c.dtype, 1, &acc, w == WI64 ? TM_I64 : TM_F64, 1);
    return TM_OK;
  }
  /* A conversion that loses something happens first; others while the elements are read. */
  if (x->c.dtype != c->compute && c->compute != work_dtype[w] && !(cast = tm_tensor_cast(x, c->compute))) return tm_last_code();
  if (cast) x = cast;
  g.f = f, g.x = tm_data(x), g.y = tm_data(y), g.work = w;
  g.xdtype = x->c.dtype, g.xsize = tm_dtype_size(x->c.dtype), g.ydtype = y->c.dtype, g.ysize = tm_dtype_size(y->c.dtype);
  plan(&g, x, y, mask, keepdim);
  g.scale = mean ? (double)g.reduced : 1;
  int64_t n = g.kept ? g.kept / g.k[g.nk - 1].n * g.blocks : 0;
  int code = TM_OK;
  if (g.pieces > 1) {
    code = reduce_in_pieces(&g, n);
  } else if (n > 1 && x->c.numel >= TM_PARALLEL_MIN) {
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < n; b++) reduce_kept(&g, b);
  } else {
    for (int64_t b = 0; b < n; b++) reduce_kept(&g, b);
  }
  tm_tensor_release(cast);
  return code;
}

/* -- rules ---------------------------------------------------------------------------------------------------- */

static uint32_t mask_of_list(double n, const int64_t *dims) { /* no list, or an empty one: all */
  uint32_t mask = 0;
  for (int i = 0; i < (int)n; i++) mask |= 1u << dims[i];
  return mask ? mask : ~0u;
}
static uint32_t mask_of_dim(double dim) { return isnan(dim) ? ~0u : 1u << (int)dim; }

static void result(tm_call *c, int k, uint32_t mask, bool keepdim, int dtype) {
  tm_spec *o = &c->o[k];
  const tm_tensor *x = c->in[0];
  o->ndim = 0, o->dtype = dtype, o->device = x->c.device, o->strided = 0;
  for (int d = 0; d < x->c.ndim; d++) {
    if (!(mask >> d & 1)) o->size[o->ndim++] = T_SIZE(x, d);
    else if (keepdim) o->size[o->ndim++] = 1;
  }
  c->nout = k + 1;
}

/* The largest of nothing does not exist. */
static int some_elements(const tm_call *c, uint32_t mask) {
  for (int d = 0; d < c->in[0]->c.ndim; d++)
    if (mask >> d & 1 && T_SIZE(c->in[0], d) == 0)
      return tm_fail(TM_ERUNTIME, "%s: dim %d of x, %s, has no elements; expected at least one", c->op->name, d + 1, tm_say(c->in[0]));
  return TM_OK;
}

static int accumulate_dtype(const tm_call *c, double dtype) { /* of sum and prod */
  return dtype >= 0 ? (int)dtype : tm_is_float(c->in[0]->c.dtype) ? c->in[0]->c.dtype : TM_I64;
}

int tm_infer_sum(tm_call *c) {
  c->compute = accumulate_dtype(c, c->a[2]);
  result(c, 0, mask_of_list(c->a[0], c->list[0]), c->a[1] != 0, c->compute);
  return TM_OK;
}

int tm_infer_mean(tm_call *c) {
  c->compute = c->a[2] >= 0 ? (int)c->a[2] : c->in[0]->c.dtype;
  if (!tm_is_float(c->compute))
    return tm_fail(TM_ERUNTIME, "mean: %s is %s, expected a floating dtype", c->a[2] >= 0 ? "dtype" : "x",
                   c->a[2] >= 0 ? tm_dtype_name(c->compute) : tm_say(c->in[0]));
  result(c, 0, mask_of_list(c->a[0], c->list[0]), c->a[1] != 0, c->compute);
  return TM_OK;
}

int tm_infer_prod(tm_call *c) {
  c->compute = accumulate_dtype(c, c->a[2]);
  result(c, 0, mask_of_dim(c->a[0]), c->a[1] != 0, c->compute);
  return TM_OK;
}

int tm_infer_extremum(tm_call *c) {
  uint32_t mask = mask_of_list(c->a[0], c->list[0]);
  c->compute = c->in[0]->c.dtype;
  result(c, 0, mask, c->a[1] != 0, c->compute);
  return some_elements(c, mask);
}

int tm_infer_extremum_dim(tm_call *c) {
  uint32_t mask = mask_of_dim(c->a[0]);
  c->compute = c->in[0]->c.dtype;
  result(c, 0, mask, c->a[1] != 0, c->compute);
  result(c, 1, mask, c->a[1] != 0, TM_I64);
  return some_elements(c, mask);
}

int tm_infer_arg(tm_call *c) {
  uint32_t mask = mask_of_dim(c->a[0]);
  c->compute = c->in[0]->c.dtype;
  result(c, 0, mask, c->a[1] != 0, TM_I64);
  return some_elements(c, mask);
}

int tm_infer_bool_reduce(tm_call *c) {
  c->compute = c->in[0]->c.dtype;
  result(c, 0, mask_of_list(c->a[0], c->list[0]), c->a[1] != 0, TM_BOOL);
  return TM_OK;
}

/* -- reductions by the driver ---------------------------------------------------------------------------------- */

#define OVER_DIMS(op, mean) \
  int tm_##op##_cpu(tm_call *c) { return reduce(c, &REDUCER_OF_##op, mask_of_list(c->a[0], c->list[0]), c->a[1] != 0, mean); }
#define REDUCER_OF_sum sum_reducer
#define REDUCER_OF_mean sum_reducer
#define REDUCER_OF_amax amax_reducer
#define REDUCER_OF_amin amin_reducer
#define REDUCER_OF_any any_reducer
#define REDUCER_OF_all all_reducer
OVER_DIMS(sum, false)
OVER_DIMS(mean, true)
OVER_DIMS(amax, false)
OVER_DIMS(amin, false)
OVER_DIMS(any, false)
OVER_DIMS(all, false)
int tm_prod_cpu(tm_call *c) { return reduce(c, &prod_reducer, mask_of_dim(c->a[0]), c->a[1] != 0, false); }

/* -- positions ------------------------------------------------------------------------------------------------- */

/* First position of the best of n elements; of the first NaN if there is one. x is of the working type. */
#define FIND(name, T, FOLD) \
  TM_CLONES static int64_t name(int64_t n, const void *p) { \
    const T *x = p, v = (T)FOLD(n, x); \
    int64_t i = 0; \
    for (int hit = 0; i + 64 <= n; i += 64) { /* 64 at once, to vectorise */ \
      _Pragma("omp simd reduction(|:hit)") for (int k = 0; k < 64; k++) hit |= SAME(x[i + k], v); \
      if (hit) break; \
    } \
    while (!SAME(x[i], v)) i++; \
    return i; \
  }
#define SAME(x, v) (((x) == (v)) | (((x) != (x)) & ((v) != (v))))
FIND(find_max_f32, float, amax_f32)
FIND(find_max_f64, double, amax_f64)
FIND(find_max_i64, int64_t, amax_i64)
FIND(find_min_f32, float, amin_f32)
FIND(find_min_f64, double, amin_f64)
FIND(find_min_i64, int64_t, amin_i64)

/* best[j] and at[j] take up row `row` of n elements. */
#define BEST(name, T, STEP) \
  TM_CLONES static void name(int64_t n, const void *p, void *best, int64_t *restrict at, int64_t row) { \
    const T *restrict x = p; \
    T *restrict b = best; \
    _Pragma("omp simd") for (int64_t j = 0; j < n; j++) { \
      bool take = (x[j] STEP b[j]) | ((x[j] != x[j]) & (b[j] == b[j])); \
      b[j] = take ? x[j] : b[j]; \
      at[j] = take ? row : at[j]; \
    } \
  }
BEST(best_max_f32, float, >)
BEST(best_max_f64, double, >)
BEST(best_max_i64, int64_t, >)
BEST(best_min_f32, float, <)
BEST(best_min_f64, double, <)
BEST(best_min_i64, int64_t, <)

typedef struct finder {
  int64_t (*find[3])(int64_t n, const void *p);
  void (*best[3])(int64_t n, const void *p, void *best, int64_t *at, int64_t row);
} finder;
static const finder largest = {{find_max_f32, find_max_f64, find_max_i64}, {best_max_f32, best_max_f64, best_max_i64}};
static const finder smallest = {{find_min_f32, find_min_f64, find_min_i64}, {best_min_f32, best_min_f64, best_min_i64}};

typedef struct hunt {
  const finder *f;
  const char *x;
  int dtype, size, work;
  int64_t n, stride; /* of the axis that is searched; stride in elements */
} hunt;

static int64_t find_in(const hunt *h, int64_t n, const char *x) {
  double buffer[CHUNK];
  if (h->dtype == work_dtype[h->work] && h->stride == 1 && n <= PIECE) return h->f->find[h->work](n, x);
  /* Chunk by chunk; the best so far waits before each chunk, so that the first of equals wins. */
  int64_t at = 0;
  for (int64_t j = 0; j < n; j += CHUNK - 1) {
    int64_t part = TM_MIN(CHUNK - 1, n - j);
    char *to = (char *)buffer;
    tm_convert(1, to, work_dtype[h->work], 1, x + at * h->stride * h->size, h->dtype, 1);
    tm_convert(part, to + work_size[h->work], work_dtype[h->work], 1, x + j * h->stride * h->size, h->dtype, h->stride);
    int64_t found = h->f->find[h->work](part + 1, buffer);
    if (found > 0) at = j + found - 1;
  }
  return at;
}

/* One long row: pieces in parallel, then the best of their bests. */
static int64_t find_in_pieces(const hunt *h, const char *x) {
  enum { MOST = 256 };
  int64_t at[MOST], piece = TM_MAX(PIECE, (h->n + MOST - 1) / MOST), pieces = (h->n + piece - 1) / piece;
  double value[MOST];
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < pieces; i++) at[i] = i * piece + find_in(h, TM_MIN(piece, h->n - i * piece), x + i * piece * h->stride * h->size);
  for (int64_t i = 0; i < pieces; i++)
    tm_convert(1, (char *)value + i * work_size[h->work], work_dtype[h->work], 1, x + at[i] * h->stride * h->size, h->dtype, 1);
  return at[h->f->find[h->work](pieces, value)];
}

/* m kept elements, contiguous in x: row by row. */
static void find_columns(const hunt *h, int64_t m, const char *x, int64_t *at) {
  double best[WIDTH], buffer[WIDTH];
  for (int64_t i = 0; i < h->n; i++, x += h->stride * h->size) {
    const void *row = x;
    if (h->dtype != work_dtype[h->work]) tm_convert(m, buffer, work_dtype[h->work], 1, x, h->dtype, 1), row = buffer;
    if (i == 0) memcpy(best, row, (size_t)(m * work_size[h->work])), memset(at, 0, (size_t)m * 8);
    else h->f->best[h->work](m, row, best, at, i);
  }
}

static void find_block(const hunt *h, const job *g, int64_t b, char *value, int64_t *position) {
  int64_t at[WIDTH], xat, yat, m = locate(g, b, &xat, &yat);
  const axis *k = &g->k[g->nk - 1];
  const char *x = h->x + xat * h->size;
  if (g->columns) find_columns(h, m, x, at);
  else
    for (int64_t j = 0; j < m; j++) {
      const char *row = x + j * k->xs * h->size;
      at[j] = h->n >= 2 * PIECE && g->kept < 16 ? find_in_pieces(h, row) : find_in(h, h->n, row);
    }
  for (int64_t j = 0; j < m; j++) {
    int64_t to = yat + j * k->ys;
    position[to] = at[j] + 1;
    if (value) memcpy(value + to * h->size, x + (j * k->xs + at[j] * h->stride) * h->size, (size_t)h->size);
  }
}

/* Positions along dim (NaN: in x flattened), and the values there unless value is NULL. Bound by memory bandwidth. */
static int find(const tm_tensor *x, double dim, bool keepdim, const finder *f, tm_tensor *value, tm_tensor *position) {
  tm_tensor *flat = NULL;
  hunt h = {f, NULL, x->c.dtype, tm_dtype_size(x->c.dtype), work_of(x->c.dtype), x->c.numel, 1};
  job g = {.xdtype = h.dtype, .work = h.work};
  if (isnan(dim) && !(flat = tm_tensor_dense(x))) return tm_last_code();
  if (flat) x = flat;
  else if (x->c.ndim > 0) h.n = T_SIZE(x, (int)dim), h.stride = T_STRIDE(x, (int)dim);
  plan(&g, x, position, mask_of_dim(dim), keepdim);
  h.x = tm_data(x);
  int64_t n = g.kept ? g.kept / g.k[g.nk - 1].n * g.blocks : 0, *at = tm_data(position);
  char *to = value ? tm_data(value) : NULL;
  if (n > 1 && x->c.numel >= TM_PARALLEL_MIN && !(h.n >= 2 * PIECE && g.kept < 16)) {
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < n; b++) find_block(&h, &g, b, to, at);
  } else {
    for (int64_t b = 0; b < n; b++) find_block(&h, &g, b, to, at);
  }
  tm_tensor_release(flat);
  return TM_OK;
}

int tm_max_cpu(tm_call *c) { return find(c->in[0], c->a[0], c->a[1] != 0, &largest, c->out[0], c->out[1]); }
int tm_min_cpu(tm_call *c) { return find(c->in[0], c->a[0], c->a[1] != 0, &smallest, c->out[0], c->out[1]); }
int tm_argmax_cpu(tm_call *c) { return find(c->in[0], c->a[0], c->a[1] != 0, &largest, NULL, c->out[0]); }
int tm_argmin_cpu(tm_call *c) { return find(c->in[0], c->a[0], c->a[1] != 0, &smallest, NULL, c->out[0]); }

/* -- gradients ------------------------------------------------------------------------------------------------- */

/* t, of the result's shape, made to broadcast against x again: the reduced dims come back with size 1. */
static tm_tensor *with_dims(tm_vjp *v, tm_tensor *t, uint32_t mask, bool keepdim) {
  const tm_inmeta *x = &v->xm[0];
  int64_t size[TM_MAXDIM];
  int outer = 0;
  while (outer < x->ndim && mask >> outer & 1) outer++;
  if (keepdim || (mask & ((1u << x->ndim) - 1)) >> outer == 0) return t; /* leading dims broadcast by themselves */
  for (int d = 0; d < x->ndim; d++) size[d] = mask >> d & 1 ? 1 : x->size[d];
  return v_reshape(v, t, x->ndim, size);
}

/* y = sum(x): dx = dy, repeated over the dims. */
int tm_sum_vjp(tm_vjp *v) {
  tm_tensor *dy = with_dims(v, v->dy[0], mask_of_list(v->a[0], v->list[0]), v->a[1] != 0);
  v_set(v, 0, v_expand(v, dy, v->xm[0].ndim, v->xm[0].size));
  return TM_OK;
}

int tm_mean_vjp(tm_vjp *v) {
  uint32_t mask = mask_of_list(v->a[0], v->list[0]);
  double n = 1;
  for (int d = 0; d < v->xm[0].ndim; d++)
    if (mask >> d & 1) n *= (double)v->xm[0].size[d];
  tm_tensor *dy = with_dims(v, v_scale(v, v->dy[0], 1 / TM_MAX(n, 1)), mask, v->a[1] != 0);
  v_set(v, 0, v_expand(v, dy, v->xm[0].ndim, v->xm[0].size));
  return TM_OK;
}

/* y = max(x): dx = dy / (number of ties) where x == y. */
int tm_amax_vjp(tm_vjp *v) {
  uint32_t mask = mask_of_list(v->a[0], v->list[0]);
  int64_t dims[TM_MAXDIM];
  int n = 0;
  for (int d = 0; d < v->xm[0].ndim; d++)
    if (mask >> d & 1) dims[n++] = d;
  tm_tensor *tie = v_eq(v, v->x[0], with_dims(v, v->y[0], mask, v->a[1] != 0));
  tm_tensor *dy = v_div(v, with_dims(v, v->dy[0], mask, v->a[1] != 0), v_sum(v, tie, n ? n : -1, dims, 1));
  v_set(v, 0, v_mul(v, dy, tie));
  return TM_OK;
}
int tm_amin_vjp(tm_vjp *v) { return tm_amax_vjp(v); }

/* y, at = max(x, dim): dx = dy at the positions, 0 elsewhere. */
int tm_max_vjp(tm_vjp *v) {
  int dim = (int)v->a[0];
  tm_tensor *dy = v->dy[0], *at = v->y[1];
  if (!dy || v->xm[0].ndim == 0) {
    v_set(v, 0, dy ? dy : v_zeros(v, &v->xm[0]));
    return TM_OK;
  }
  if (v->a[1] == 0) dy = v_unsqueeze(v, dy, dim), at = v_unsqueeze(v, at, dim);
  tm_tensor *in[] = {v_zeros(v, &v->xm[0]), at, dy};
  v_set(v, 0, v_run(v, TM_OPC_scatter_add, 3, in, (double[]){dim}, NULL));
  return TM_OK;
}
int tm_min_vjp(tm_vjp *v) { return tm_max_vjp(v); }

/* -- the gradient of prod -------------------------------------------------------------------------------------- */

int tm_prod_vjp(tm_vjp *v) {
  tm_tensor *in[] = {v->x[0], v->dy[0]};
  v_set(v, 0, v_run(v, TM_OPC_prod_backward, 2, in, v->a, NULL));
  return TM_OK;
}

int tm_infer_prod_backward(tm_call *c) {
  tm_tensor *x = c->in[0], *dy = c->in[1];
  char text[128];
  result(c, 0, mask_of_dim(c->a[0]), c->a[1] != 0, x->c.dtype);
  if (!tm_is_float(x->c.dtype) || !tm_is_float(dy->c.dtype) || dy->c.device != x->c.device)
    return tm_fail(TM_ERUNTIME, "prod_backward: x is %s, dy is %s; expected floating dtypes on one device", tm_say(x), tm_say(dy));
  if (dy->c.ndim != c->o[0].ndim || memcmp(dy->c.size, c->o[0].size, (size_t)dy->c.ndim * sizeof(int64_t)))
    return tm_fail(TM_ERUNTIME, "prod_backward: dy is %s, expected shape %s for x, %s", tm_say(dy),
                   tm_shape_text(text, sizeof text, c->o[0].ndim, c->o[0].size), tm_say(x));
  c->compute = x->c.dtype;
  result(c, 0, 0, false, x->c.dtype);
  return TM_OK;
}

/* dx[i] = dy * product of the others: the whole product / x[i] without zeros; with one zero only its place gets
** anything, with two nothing does. */
static void prod_backward_row(int64_t n, int64_t s, const double *x, double dy, double *dx) {
  double product = dy;
  int64_t zeros = 0;
  for (int64_t i = 0; i < n; i++) {
    if (x[i * s] == 0) zeros++;
    else product *= x[i * s];
  }
  for (int64_t i = 0; i < n; i++) dx[i * s] = zeros == 0 ? product / x[i * s] : zeros == 1 && x[i * s] == 0 ? product : 0;
}

/* Rarely on a hot path: everything in contiguous float64. */
int tm_prod_backward_cpu(tm_call *c) {
  tm_tensor *x = c->in[0], *t[5] = {NULL}, *dx;
  int code = TM_EMEM, dim = isnan(c->a[0]) || x->c.ndim == 0 ? -1 : (int)c->a[0];
  int64_t n = dim < 0 ? x->c.numel : T_SIZE(x, dim), inner = 1;
  for (int d = dim + 1; dim >= 0 && d < x->c.ndim; d++) inner *= T_SIZE(x, d);
  if (x->c.numel == 0) return TM_OK;
  if (!(t[0] = tm_tensor_cast(x, TM_F64)) || !(t[1] = tm_tensor_dense(t[0])) || !(t[2] = tm_tensor_cast(c->in[1], TM_F64)) ||
      !(t[3] = tm_tensor_dense(t[2])) || !(dx = t[4] = tm_tensor_empty(x->c.ndim, x->c.size, NULL, TM_F64, x->c.device)))
    goto done;
  const double *from = tm_data(t[1]), *dy = tm_data(t[3]);
  double *to = tm_data(dx);
  for (int64_t k = 0; k < x->c.numel / n; k++) {
    int64_t at = k / inner * inner * n + k % inner;
    prod_backward_row(n, inner, from + at, dy[k], to + at);
  }
  code = tm_tensor_copy_data(c->out[0], dx);
done:
  for (int i = 0; i < 5; i++) tm_tensor_release(t[i]);
  return code == TM_OK ? TM_OK : tm_last_code();
}

/* g[i] = dy * E[i], E[i] = product of x[j], j != i. With u the gradient of g: dy gets sum(u * E); x[j] gets the sum
** over i != j of u[i] * dy * (product of the rest). The latter is prod_backward once more, of the (n, n) matrix
** with x in every row and 1 on its diagonal: n times the memory, but right with any zeros and to any order. */
int tm_prod_backward_vjp(tm_vjp *v) {
  const tm_inmeta *m = &v->xm[0];
  bool flat = isnan(v->a[0]) || m->ndim == 0, keepdim = v->a[1] != 0;
  int dim = flat ? 0 : (int)v->a[0];
  int64_t n = 1, one[TM_MAXDIM + 2];
  for (int d = 0; d < m->ndim; d++)
    if (flat || d == dim) n *= m->size[d];
  if (v->want[1]) {
    tm_tensor *in[] = {v->x[0], v_full(v, &v->xm[1], 1)};
    tm_tensor *e = v_mul(v, v->dy[0], v_run(v, TM_OPC_prod_backward, 2, in, v->a, NULL));
    if (flat) v_set(v, 1, v_reshape(v, v_sum(v, e, -1, NULL, 0), v->xm[1].ndim, v->xm[1].size));
    else v_set(v, 1, v_sum1(v, e, dim, keepdim));
  }
  if (v->want[0]) {
    tm_tensor *x = v->x[0], *dy = v->x[1], *u = v->dy[0];
    int rest = flat ? 0 : m->ndim - dim - 1;
    if (flat) x = v_reshape(v, x, 1, &n), u = v_reshape(v, u, 1, &n), dy = v_reshape(v, dy, 1, (int64_t[]){1});
    else if (!keepdim) dy = v_unsqueeze(v, dy, dim);
    one[0] = one[1] = n;
    for (int i = 0; i < rest; i++) one[2 + i] = 1;
    tm_tensor *eye = v_run(v, TM_OPC_eye, 0, NULL, (double[]){(double)n, (double)n, TM_BOOL, m->device}, NULL);
    eye = v_reshape(v, eye, 2 + rest, one);
    tm_tensor *others = v_where(v, eye, v_num(v, 1), v_unsqueeze(v, x, dim)); /* (..., i, j, ...) */
    tm_tensor *in[] = {others, v_unsqueeze(v, v_mul(v, u, dy), dim + 1)};
    tm_tensor *d = v_run(v, TM_OPC_prod_backward, 2, in, (double[]){dim + 1, 1}, NULL);
    d = v_sum1(v, v_where(v, eye, v_num(v, 0), d), dim, 0);
    v_set(v, 0, flat ? v_reshape(v, d, m->ndim, m->size) : d);
  }
  return TM_OK;
}
