/* elementwise.c: visits the elements of tensors of one shape, whatever their strides and dtypes, and converts
** between dtypes.
**
** A walk is what the operands have in common: axes in the order of the result's memory, merged where all of them
** allow it, so that most calls end as one run along one axis. Operators compute in float32, float64 or int64;
** operands of other dtypes pass through blocks that stay in the first-level cache. Large contiguous calls are bound
** by memory bandwidth, and small ones by what comes before the loop: hence done_short. */
#include "internal.h"

enum {
  BLOCK = 512,     /* elements converted at a time: 4 KiB per operand */
  CHUNK = 1 << 24, /* elements between two looks at the interrupt request: about 10 ms */
  TILE = 16,       /* a cache line of float32 */
  SHORT = 8,       /* an axis that is not worth a call of the loop */
  LONG = 256
};

/* -- conversion ---------------------------------------------------------------------------------------------- */

/* The dtype in which elements of a dtype are computed; every value fits. */
static const int8_t native[TM_NDTYPE] = {TM_F32, TM_F64, TM_F32, TM_F32, TM_I64, TM_I64, TM_I64, TM_I64, TM_I64, TM_I64};
static const int8_t bytes_of[TM_NDTYPE] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};

typedef void (*convert_fn)(int64_t n, void *dst, int64_t sd, const void *src, int64_t ss);

#define CONVERT(name, D, S, EXPR) \
  static TM_CLONES void name(int64_t n, void *dst, int64_t sd, const void *src, int64_t ss) { \
    D *d = dst; \
    const S *s = src; \
    if (sd == 1 && ss == 1) { \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) { \
        S x = s[i]; \
        d[i] = EXPR; \
      } \
    } else { \
      for (int64_t i = 0; i < n; i++) { \
        S x = s[i * ss]; \
        d[i * sd] = EXPR; \
      } \
    } \
  }

/* Every dtype to the three of computation, and back. Integers wrap: floats go through int64. */
#define TO_NATIVE(N, D) \
  CONVERT(N##_of_f32, D, float, (D)x) \
  CONVERT(N##_of_f64, D, double, (D)x) \
  CONVERT(N##_of_f16, D, uint16_t, (D)tm_f16_to_f32(x)) \
  CONVERT(N##_of_bf16, D, uint16_t, (D)tm_bf16_to_f32(x)) \
  CONVERT(N##_of_i8, D, int8_t, (D)x) \
  CONVERT(N##_of_i16, D, int16_t, (D)x) \
  CONVERT(N##_of_i32, D, int32_t, (D)x) \
  CONVERT(N##_of_i64, D, int64_t, (D)x) \
  CONVERT(N##_of_u8, D, uint8_t, (D)x) \
  CONVERT(N##_of_bool, D, uint8_t, (D)(x != 0))
TO_NATIVE(f32, float)
TO_NATIVE(f64, double)
TO_NATIVE(i64, int64_t)

#define FROM_NATIVE(N, S) \
  CONVERT(f16_of_##N, uint16_t, S, tm_f32_to_f16((float)x)) \
  CONVERT(bf16_of_##N, uint16_t, S, tm_f32_to_bf16((float)x)) \
  CONVERT(i8_of_##N, int8_t, S, (int8_t)(int64_t)x) \
  CONVERT(i16_of_##N, int16_t, S, (int16_t)(int64_t)x) \
  CONVERT(i32_of_##N, int32_t, S, (int32_t)(int64_t)x) \
  CONVERT(u8_of_##N, uint8_t, S, (uint8_t)(int64_t)x) \
  CONVERT(bool_of_##N, uint8_t, S, x != 0)
FROM_NATIVE(f32, float)
FROM_NATIVE(f64, double)
FROM_NATIVE(i64, int64_t)

#if defined(__x86_64__)
/* The processor's own conversion of float16, eight at a time: ten times as fast as the portable one. */
#include <immintrin.h>
__attribute__((target("avx,f16c"))) static void f32_of_f16_fast(int64_t n, float *d, const uint16_t *s) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
  for (; i < n; i++) d[i] = _cvtsh_ss(s[i]);
}
__attribute__((target("avx,f16c"))) static void f16_of_f32_fast(int64_t n, uint16_t *d, const float *s) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), 0));
  for (; i < n; i++) d[i] = _cvtss_sh(s[i], 0);
}
static void f32_of_f16_best(int64_t n, void *dst, int64_t sd, const void *src, int64_t ss) {
  if (sd == 1 && ss == 1 && __builtin_cpu_supports("f16c")) f32_of_f16_fast(n, dst, src);
  else f32_of_f16(n, dst, sd, src, ss);
}
static void f16_of_f32_best(int64_t n, void *dst, int64_t sd, const void *src, int64_t ss) {
  if (sd == 1 && ss == 1 && __builtin_cpu_supports("f16c")) f16_of_f32_fast(n, dst, src);
  else f16_of_f32(n, dst, sd, src, ss);
}
#else
#define f32_of_f16_best f32_of_f16
#define f16_of_f32_best f16_of_f32
#endif

#define ROW_TO(N) \
  { N##_of_f32, N##_of_f64, N##_of_f16, N##_of_bf16, N##_of_i8, N##_of_i16, N##_of_i32, N##_of_i64, N##_of_u8, N##_of_bool }
#define ROW_FROM(D) \
  { [TM_F32] = D##_of_f32, [TM_F64] = D##_of_f64, [TM_I64] = D##_of_i64 }
static const convert_fn converters[TM_NDTYPE][TM_NDTYPE] = {
    /* [to][from]; NULL: by way of the native dtype */
    [TM_F32] = {f32_of_f32, f32_of_f64, f32_of_f16_best, f32_of_bf16, f32_of_i8, f32_of_i16, f32_of_i32, f32_of_i64, f32_of_u8,
                f32_of_bool},
    [TM_F64] = ROW_TO(f64),
    [TM_F16] = {[TM_F32] = f16_of_f32_best, [TM_F64] = f16_of_f64, [TM_I64] = f16_of_i64},
    [TM_BF16] = ROW_FROM(bf16),
    [TM_I8] = ROW_FROM(i8),
    [TM_I16] = ROW_FROM(i16),
    [TM_I32] = ROW_FROM(i32),
    [TM_I64] = ROW_TO(i64),
    [TM_U8] = ROW_FROM(u8),
    [TM_BOOL] = ROW_FROM(bool),
};

CONVERT(move8, uint8_t, uint8_t, x)
CONVERT(move16, uint16_t, uint16_t, x)
CONVERT(move32, uint32_t, uint32_t, x)
CONVERT(move64, uint64_t, uint64_t, x)

/* One dtype, n elements: bits are kept, also those of a NaN. A source of stride 0 fills. */
static void move(int64_t n, void *dst, int64_t sd, const void *src, int64_t ss, int bytes) {
  if (sd == 1 && ss == 1) memcpy(dst, src, (size_t)n * (size_t)bytes);
  else if (bytes == 4) move32(n, dst, sd, src, ss);
  else if (bytes == 8) move64(n, dst, sd, src, ss);
  else if (bytes == 2) move16(n, dst, sd, src, ss);
  else move8(n, dst, sd, src, ss);
}

void tm_convert(int64_t n, void *dst, int ddst, int64_t sdst, const void *src, int dsrc, int64_t ssrc) {
  if (ddst == dsrc) {
    move(n, dst, sdst, src, ssrc, bytes_of[ddst]);
    return;
  }
  if (converters[ddst][dsrc]) {
    converters[ddst][dsrc](n, dst, sdst, src, ssrc);
    return;
  }
  int via = native[dsrc];
  int64_t block[BLOCK];
  for (int64_t i = 0; i < n; i += BLOCK) {
    int64_t m = TM_MIN(n - i, BLOCK);
    converters[via][dsrc](m, block, 1, (const char *)src + i * ssrc * bytes_of[dsrc], ssrc);
    converters[ddst][via](m, (char *)dst + i * sdst * bytes_of[ddst], sdst, block, 1);
  }
}

double tm_load(const void *p, int dtype) {
  double value;
  tm_convert(1, &value, TM_F64, 1, p, dtype, 1);
  return value;
}

void tm_store(void *p, int dtype, double value) { tm_convert(1, p, dtype, 1, &value, TM_F64, 1); }

/* -- walks ------------------------------------------------------------------------------------------------------ */

typedef struct walk {
  int ndim, n; /* axes, innermost first; operands, of which 0 is the result */
  int64_t size[TM_MAXDIM];
  int64_t stride[1 + TM_MAXIN][TM_MAXDIM]; /* elements; 0 where an operand is broadcast */
} walk;

typedef struct place { /* a position of a walk */
  int64_t index[TM_MAXDIM];
  int64_t at[1 + TM_MAXIN]; /* elements from each operand's first */
} place;

static int64_t stride_at(const tm_tensor *t, int d, int ndim) { /* along axis d of a shape that t broadcasts to */
  d -= ndim - t->c.ndim;
  return d < 0 || t->c.size[d] == 1 ? 0 : t->c.stride[d];
}

static void walk_make(walk *w, int n, tm_tensor *const *t) {
  const tm_content *o = &t[0]->c;
  int order[TM_MAXDIM], nd = 0, last = -1;
  for (int d = o->ndim - 1; d >= 0; d--) {
    if (o->size[d] == 1) continue;
    int k = nd++;
    for (; k > 0 && o->stride[order[k - 1]] > o->stride[d]; k--) order[k] = order[k - 1];
    order[k] = d;
  }
  w->n = n;
  for (int k = 0; k < nd; k++) {
    bool merge = last >= 0;
    for (int i = 0; i < n; i++) {
      int64_t s = w->stride[i][last + 1] = stride_at(t[i], order[k], o->ndim);
      merge = merge && s == w->stride[i][last] * w->size[last];
    }
    if (merge) w->size[last] *= o->size[order[k]];
    else w->size[++last] = o->size[order[k]];
  }
  if (nd == 0) { /* one element */
    w->size[++last] = 1;
    for (int i = 0; i < n; i++) w->stride[i][0] = 1;
  }
  w->ndim = last + 1;
}

static void walk_seek(const walk *w, int64_t position, place *p) {
  for (int i = 0; i < w->n; i++) p->at[i] = 0;
  for (int d = 0; d < w->ndim; d++) {
    p->index[d] = position % w->size[d];
    position /= w->size[d];
    for (int i = 0; i < w->n; i++) p->at[i] += p->index[d] * w->stride[i][d];
  }
}

/* On by `steps` along axis `d`, at most to its end, from where it goes on with the next axis. */
static void walk_on(const walk *w, int d, int64_t steps, place *p) {
  for (;; d++, steps = 1) {
    for (int i = 0; i < w->n; i++) p->at[i] += steps * w->stride[i][d];
    if ((p->index[d] += steps) < w->size[d] || d + 1 == w->ndim) return;
    for (int i = 0; i < w->n; i++) p->at[i] -= w->size[d] * w->stride[i][d];
    p->index[d] = 0;
  }
}

typedef void (*part_fn)(const void *job, int64_t begin, int64_t end);

/* Does positions 0..count-1 of a job of `numel` elements: on all threads if it is large, in chunks that can be
** interrupted if it is very large. Shares begin at whole cache lines. */
static int do_parts(int64_t count, int64_t numel, part_fn part, const void *job) {
  int threads = numel >= TM_PARALLEL_MIN ? tm_num_threads() : 1;
  if (numel <= CHUNK && threads == 1) {
    part(job, 0, count);
    return TM_OK;
  }
  int64_t chunk = TM_MAX(count / (numel / CHUNK + 1), 1), line = count == numel ? 64 : 1;
  for (int64_t begin = 0; begin < count; begin += chunk) {
    int64_t end = TM_MIN(begin + chunk, count), share = ((end - begin + threads - 1) / threads + line - 1) / line * line;
    if (tm_poll() != TM_OK) return TM_EINTERRUPT;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++) {
      int64_t b = begin + k * share, e = TM_MIN(b + share, end);
      if (b < e) part(job, b, e);
    }
  }
  return TM_OK;
}

/* -- runs ------------------------------------------------------------------------------------------------------------ */

typedef struct job {
  walk w;
  tm_loop_fn loop; /* NULL: copy operand 1 to the result */
  const double *a;
  char *data[1 + TM_MAXIN];
  int dtype[1 + TM_MAXIN];
  int native, compute;
  bool direct;           /* every operand has the native dtype */
  int64_t width, height; /* of a tile: elements along axis 0 and axis 1 */
} job;

static bool job_make(job *j, int n, tm_tensor *const *t, int to) { /* false: no elements */
  j->native = to;
  j->direct = true;
  for (int k = 0; k < n; k++) {
    j->data[k] = tm_data(t[k]);
    j->dtype[k] = t[k]->c.dtype;
    j->direct = j->direct && j->dtype[k] == to;
  }
  walk_make(&j->w, n, t);
  return t[0]->c.numel > 0;
}

/* n elements of `dtype`, rounded to `compute`, to the native dtype. The rounding matters where a float32 or a number
** meets float16: 0.1 must equal float16's 0.1. */
static void load(int64_t n, void *dst, int to, int compute, const void *src, int dtype, int64_t stride) {
  if (compute == to || compute == dtype || !tm_is_float(compute)) {
    tm_convert(n, dst, to, 1, src, dtype, stride);
    return;
  }
  uint16_t rounded[BLOCK]; /* compute is float16 or bfloat16 */
  tm_convert(n, rounded, compute, 1, src, dtype, stride);
  tm_convert(n, dst, to, 1, rounded, compute, 1);
}

static void run_converted(const job *j, int64_t n, char *const *from) {
  int64_t block[1 + TM_MAXIN][BLOCK], s[1 + TM_MAXIN];
  void *p[1 + TM_MAXIN];
  for (int64_t i = 0; i < n; i += BLOCK) {
    int64_t m = TM_MIN(n - i, BLOCK);
    for (int k = 0; k < j->w.n; k++) {
      int64_t stride = j->w.stride[k][0];
      p[k] = from[k] + i * stride * bytes_of[j->dtype[k]];
      s[k] = stride;
      if (j->dtype[k] == j->native) continue;
      s[k] = k == 0 || stride != 0;
      if (k > 0 && (i == 0 || stride != 0)) load(stride ? m : 1, block[k], j->native, j->compute, p[k], j->dtype[k], stride);
      p[k] = block[k];
    }
    j->loop(m, p, s, j->a);
    if (j->dtype[0] != j->native)
      tm_convert(m, from[0] + i * j->w.stride[0][0] * bytes_of[j->dtype[0]], j->dtype[0], j->w.stride[0][0], block[0], j->native, 1);
  }
}

/* n elements along axis 0 */
static void run(const job *j, int64_t n, const int64_t *at) {
  const walk *w = &j->w;
  int64_t s[1 + TM_MAXIN];
  char *p[1 + TM_MAXIN];
  for (int k = 0; k < w->n; k++) p[k] = j->data[k] + at[k] * bytes_of[j->dtype[k]], s[k] = w->stride[k][0];
  if (!j->loop) tm_convert(n, p[0], j->dtype[0], s[0], p[1], j->dtype[1], s[1]);
  else if (j->direct) j->loop(n, (void *const *)p, s, j->a);
  else run_converted(j, n, p);
}

static void lines_part(const void *context, int64_t begin, int64_t end) { /* positions: elements */
  const job *j = context;
  place at;
  walk_seek(&j->w, begin, &at);
  while (begin < end) {
    int64_t n = TM_MIN(j->w.size[0] - at.index[0], end - begin);
    run(j, n, at.at);
    begin += n;
    walk_on(&j->w, 0, n, &at);
  }
}

static int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

static void tiles_part(const void *context, int64_t begin, int64_t end) { /* positions: tiles, beside each other first */
  const job *j = context;
  const walk *w = &j->w;
  int64_t across = parts(w->size[0], j->width), down = parts(w->size[1], j->height);
  for (; begin < end; begin++) {
    place at;
    int64_t column = begin % across * j->width, row = begin / across % down * j->height, slice = begin / across / down;
    int64_t n = TM_MIN(j->width, w->size[0] - column), rows = TM_MIN(j->height, w->size[1] - row);
    walk_seek(w, (slice * w->size[1] + row) * w->size[0] + column, &at);
    for (int64_t r = 0; r < rows; r++) {
      run(j, n, at.at);
      for (int k = 0; k < w->n; k++) at.at[k] += w->stride[k][1];
    }
  }
}

static void walk_swap(walk *w, int d, int e) {
  int64_t size = w->size[d];
  w->size[d] = w->size[e], w->size[e] = size;
  for (int k = 0; k < w->n; k++) {
    int64_t stride = w->stride[k][d];
    w->stride[k][d] = w->stride[k][e], w->stride[k][e] = stride;
  }
}

/* Tiles, if some operand is dense along another axis than the result: row after row, each of its elements would cost a
** cache line. And if axis 0 is so short that calls of the loop would cost more than elements: then axis 1 is run along. */
static bool wants_tiles(job *j) {
  walk *w = &j->w;
  j->width = LONG, j->height = SHORT;
  if (w->ndim > 1 && w->size[0] <= SHORT && w->size[1] > w->size[0]) return walk_swap(w, 0, 1), true;
  j->width = j->height = TILE;
  for (int k = 1; w->size[0] >= TILE && k < w->n; k++)
    for (int d = 1; w->stride[k][0] > 1 && d < w->ndim; d++)
      if (w->stride[k][d] == 1) return walk_swap(w, 1, d), true;
  return false;
}

static int job_do(job *j, int64_t numel) {
  const int64_t *size = j->w.size;
  if (!wants_tiles(j)) return do_parts(numel, numel, lines_part, j);
  return do_parts(parts(size[0], j->width) * parts(size[1], j->height) * (numel / size[0] / size[1]), numel, tiles_part, j);
}

/* Contiguous operands, or one element: nothing to find out about shapes. */
static bool done_short(tm_call *c, tm_loop_fn loop, int to) {
  tm_tensor *out = c->out[0];
  int64_t n = out->c.numel, block[1 + TM_MAXIN][BLOCK], s[1 + TM_MAXIN];
  void *p[1 + TM_MAXIN];
  if (n >= TM_PARALLEL_MIN || (out->c.dtype != to && n > BLOCK) || !tm_is_contiguous(out)) return false;
  p[0] = out->c.dtype == to ? tm_data(out) : block[0];
  s[0] = 1;
  for (int k = 1; k <= c->nin; k++) {
    const tm_tensor *t = c->in[k - 1];
    int64_t m = t->c.numel;
    p[k] = tm_data(t);
    s[k] = m != 1;
    if (m != 1 && (m != n || !tm_is_contiguous(t))) return false;
    if (t->c.dtype == to) continue;
    if (m > BLOCK) return false;
    load(m, block[k], to, c->compute, p[k], t->c.dtype, 1);
    p[k] = block[k];
  }
  loop(n, p, s, c->a);
  if (out->c.dtype != to) tm_convert(n, tm_data(out), out->c.dtype, 1, block[0], to, 1);
  return true;
}

int tm_elementwise(tm_call *c, const tm_loops *loops) {
  int to = native[c->compute], n = c->nin;
  tm_loop_fn loop = to == TM_F32 ? loops->f32 : to == TM_F64 ? loops->f64 : loops->i64;
  if (!loop) return tm_fail(TM_ENOTIMPL, "%s: not defined for %s", c->op->name, tm_dtype_name(c->compute));
  if (done_short(c, loop, to)) return TM_OK;
  job j;
  tm_tensor *t[1 + TM_MAXIN] = {c->out[0]};
  for (int k = 0; k < n; k++) t[k + 1] = c->in[k];
  j.loop = loop, j.a = c->a, j.compute = c->compute;
  return job_make(&j, n + 1, t, to) ? job_do(&j, t[0]->c.numel) : TM_OK;
}

/* The source may broadcast to the shape of dst. */
int tm_tensor_copy_data(tm_tensor *dst, const tm_tensor *src) {
  tm_tensor *t[2] = {dst, (tm_tensor *)src};
  job j;
  if (dst->c.numel == 0 || TM_KIND(dst->c.device) == TM_META) return TM_OK;
  if (TM_KIND(src->c.device) == TM_META) return tm_fail(TM_ENOTIMPL, "copy: %s has no elements to copy", tm_say(src));
  if (dst->c.numel == src->c.numel && dst->c.numel < TM_PARALLEL_MIN && tm_is_contiguous(dst) && tm_is_contiguous(src)) {
    tm_convert(dst->c.numel, tm_data(dst), dst->c.dtype, 1, tm_data(src), src->c.dtype, 1);
    return TM_OK;
  }
  j.loop = NULL;
  job_make(&j, 2, t, dst->c.dtype);
  return job_do(&j, dst->c.numel);
}
