/* optim.c: the optimizers' updates. Each row updates a whole list of parameters in one call: one pass over the
** memory of parameter, gradient and states, which is what bounds it. An update is never interrupted halfway.
**
** Half-precision numbers are computed in float32, as are their states, which may be kept in float32. Formulas are
** PyTorch's, so that training continues the same from its checkpoints. */
#include <omp.h>

#include "internal.h"

enum { MAX_LISTS = 5, BLOCK = 512 }; /* tensors per parameter; elements converted at a time */

/* Lists in the order of the row: parameters, gradients, states. */
static int count_lists(const tm_call *c) {
  if (c->op == &tm_ops[TM_OPC_sgd_step]) return 2 + (c->a[1] != 0); /* momentum */
  return 4 + (c->a[6] != 0);                                        /* amsgrad */
}

int tm_infer_optim_step(tm_call *c) {
  const char *name = c->op->name;
  int lists = count_lists(c), n = c->nin / lists;
  c->nout = 0;
  if (c->nin % lists)
    return tm_fail(TM_EVALUE, "%s: got %d tensors, expected a multiple of %d: parameters, gradients and states in equal numbers", name,
                   c->nin, lists);
  for (int i = 0; i < c->nin; i++) {
    const tm_tensor *p = c->in[i % n], *t = c->in[i];
    const char *what = i < n ? "parameter" : i < 2 * n ? "gradient" : "state";
    if (!t) return tm_fail(TM_ETYPE, "%s: %s %d is nil, expected a tensor", name, what, i % n + 1);
    bool same = t->c.ndim == p->c.ndim && !memcmp(t->c.size, p->c.size, (size_t)p->c.ndim * sizeof(int64_t));
    bool fits = i < 2 * n ? t->c.dtype == p->c.dtype : tm_is_float(t->c.dtype); /* states may be older than a conversion */
    if (!same || !fits)
      return tm_fail(TM_ERUNTIME, "%s: %s %d is %s, but its parameter is %s", name, what, i % n + 1, tm_say(t), tm_say(p));
    if (!tm_is_float(p->c.dtype)) return tm_fail(TM_ETYPE, "%s: parameter %d is %s, expected a floating dtype", name, i + 1, tm_say(p));
    if (t->c.device != c->in[0]->c.device)
      return tm_fail(TM_ERUNTIME, "%s: %s %d is on %s, expected %s", name, what, i % n + 1, tm_device_name(t->c.device),
                     tm_device_name(c->in[0]->c.device));
    if ((i < n || i >= 2 * n) && tm_overlap(t))
      return tm_fail(TM_ERUNTIME, "%s: %s %d, %s, has several positions in one element (it was expanded) and cannot be changed in place",
                     name, what, i % n + 1, tm_say(t));
  }
  return TM_OK;
}

/* -- formulas --------------------------------------------------------------------------------------------- */

typedef struct rule {
  double lr, momentum, dampening, decay, beta1, beta2, eps, step_size, correction2; /* correction2: 1 / sqrt(1 - beta2^step) */
  bool nesterov, maximize, first, decoupled, amsgrad;
} rule;

/* t[0] parameter, t[1] gradient, t[2..] states, n elements each. */
typedef void (*update_fn)(const rule *r, int64_t n, void *const *t);

/* The flags are constants in each copy of the loops, or they would not vectorise. */
#define SGD(name, T) \
  static inline __attribute__((always_inline)) void name##_loop(const rule *r, int64_t n, T *restrict p, const T *restrict dp, \
                                                                T *restrict m, const bool first, const bool nesterov) { \
    const T lr = (T)r->lr, decay = (T)r->decay, momentum = (T)r->momentum, part = (T)(1 - r->dampening); \
    const T sign = r->maximize ? -1 : 1; \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) { \
      T g = decay != 0 ? sign * dp[i] + decay * p[i] : sign * dp[i]; /* an infinite parameter is left alone */ \
      if (m) { \
        T b = first ? g : momentum * m[i] + part * g; \
        m[i] = b; \
        g = nesterov ? g + momentum * b : b; \
      } \
      p[i] -= lr * g; \
    } \
  } \
  TM_CLONES static void name(const rule *r, int64_t n, void *const *t) { \
    if (r->momentum == 0) name##_loop(r, n, t[0], t[1], NULL, false, false); \
    else if (r->first && r->nesterov) name##_loop(r, n, t[0], t[1], t[2], true, true); \
    else if (r->first) name##_loop(r, n, t[0], t[1], t[2], true, false); \
    else if (r->nesterov) name##_loop(r, n, t[0], t[1], t[2], false, true); \
    else name##_loop(r, n, t[0], t[1], t[2], false, false); \
  }

/* With decoupled decay the gradient is left alone and the parameter shrinks (AdamW). */
#define ADAM(name, T, root) \
  static inline __attribute__((always_inline)) void name##_loop(const rule *r, int64_t n, T *restrict p, const T *restrict dp, \
                                                                T *restrict m, T *restrict v, T *restrict top, const bool amsgrad) { \
    const T sign = r->maximize ? -1 : 1, decay = (T)(r->decoupled ? 0 : r->decay); \
    const T shrink = (T)(r->decoupled ? 1 - r->lr * r->decay : 1), beta2 = (T)r->beta2; \
    const T rest1 = (T)(1 - r->beta1), rest2 = (T)(1 - r->beta2), eps = (T)r->eps; \
    const T step = (T)r->step_size, correction = (T)r->correction2; \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) { \
      T g = decay != 0 ? sign * dp[i] + decay * p[i] : sign * dp[i]; /* an infinite parameter is left alone */ \
      T mi = m[i] + rest1 * (g - m[i]), vi = beta2 * v[i] + rest2 * g * g, w = vi; \
      m[i] = mi, v[i] = vi; \
      if (amsgrad) top[i] = w = top[i] >= vi ? top[i] : vi; /* NaN passes on */ \
      p[i] = shrink * p[i] - step * mi / (root(w) * correction + eps); \
    } \
  } \
  TM_CLONES static void name(const rule *r, int64_t n, void *const *t) { \
    if (r->amsgrad) name##_loop(r, n, t[0], t[1], t[2], t[3], t[4], true); \
    else name##_loop(r, n, t[0], t[1], t[2], t[3], NULL, false); \
  }

SGD(sgd_f32, float)
SGD(sgd_f64, double)
ADAM(adam_f32, float, sqrtf)
ADAM(adam_f64, double, sqrt)

/* -- driving them over the lists -------------------------------------------------------------------------------- */

typedef struct update {
  const rule *r;
  int lists, n;
  tm_tensor **in; /* [lists * n] */
  update_fn f32, f64;
} update;

/* n elements of one parameter at elements at[q] of its tensors, `stride[q]` apart. */
static void update_run(const update *u, tm_tensor *const *t, int64_t n, const int64_t *at, const int64_t *stride) {
  int compute = t[0]->c.dtype == TM_F64 ? TM_F64 : TM_F32;
  update_fn f = compute == TM_F64 ? u->f64 : u->f32;
  double buffer[MAX_LISTS][BLOCK];
  char *from[MAX_LISTS];
  void *use[MAX_LISTS];
  bool direct[MAX_LISTS], all = true;
  for (int q = 0; q < u->lists; q++) {
    from[q] = (char *)tm_data(t[q]) + at[q] * tm_dtype_size(t[q]->c.dtype);
    direct[q] = t[q]->c.dtype == compute && stride[q] == 1;
    all &= direct[q];
    use[q] = from[q];
  }
  if (TM_LIKELY(all)) {
    f(u->r, n, use);
    return;
  }
  for (int64_t i = 0; i < n; i += BLOCK) {
    int64_t part = TM_MIN(n - i, BLOCK);
    for (int q = 0; q < u->lists; q++) {
      use[q] = from[q] + i * stride[q] * tm_dtype_size(t[q]->c.dtype);
      if (direct[q]) continue;
      tm_convert(part, buffer[q], compute, 1, use[q], t[q]->c.dtype, stride[q]);
      use[q] = buffer[q];
    }
    f(u->r, part, use);
    for (int q = 0; q < u->lists; q++)
      if (!direct[q] && q != 1)
        tm_convert(part, from[q] + i * stride[q] * tm_dtype_size(t[q]->c.dtype), t[q]->c.dtype, stride[q], use[q], compute, 1);
  }
}

/* Elements lie close together in memory, in the same order in all tensors: the order need not be the logical one. */
static bool is_flat(const update *u, tm_tensor *const *t) {
  const tm_content *p = &t[0]->c;
  int64_t span = 1;
  bool contiguous = true;
  for (int q = 0; q < u->lists; q++) contiguous &= tm_is_contiguous(t[q]);
  if (contiguous) return true;
  for (int i = 0; i < p->ndim; i++) {
    for (int q = 1; q < u->lists; q++)
      if (p->size[i] > 1 && T_STRIDE(t[q], i) != p->stride[i]) return false;
    span += (p->size[i] - 1) * p->stride[i];
  }
  return span == p->numel;
}

static void update_strided(const update *u, tm_tensor *const *t) {
  static const int64_t zero[MAX_LISTS];
  const tm_content *p = &t[0]->c;
  int last = p->ndim - 1;
  int64_t at[MAX_LISTS], stride[MAX_LISTS], rows = p->numel / TM_MAX(p->size[last], 1);
  for (int q = 0; q < u->lists; q++) stride[q] = T_STRIDE(t[q], last);
  for (int64_t row = 0; row < rows; row++) {
    int64_t rest = row;
    memcpy(at, zero, sizeof at);
    for (int d = last - 1; d >= 0; rest /= p->size[d--])
      for (int q = 0; q < u->lists; q++) at[q] += rest % p->size[d] * T_STRIDE(t[q], d);
    update_run(u, t, p->size[last], at, stride);
  }
}

/* Elements begin..end of all flat parameters, counted one after the other: so threads share them evenly, be they
** one large or a hundred small. */
static void update_range(const update *u, int64_t begin, int64_t end) {
  static const int64_t one[MAX_LISTS] = {1, 1, 1, 1, 1};
  int64_t start = 0;
  for (int i = 0; i < u->n && start < end; i++) {
    tm_tensor *t[MAX_LISTS];
    int64_t at[MAX_LISTS], numel = u->in[i]->c.numel, first = TM_MAX(begin - start, 0), stop = TM_MIN(end - start, numel);
    for (int q = 0; q < u->lists; q++) t[q] = u->in[q * u->n + i], at[q] = first;
    if (!is_flat(u, t)) continue;
    if (first < stop) update_run(u, t, stop - first, at, one);
    start += numel;
  }
}

static int update_all(tm_call *c, const rule *r, update_fn f32, update_fn f64) {
  int lists = count_lists(c);
  update u = {r, lists, c->nin / lists, c->in, f32, f64};
  int64_t total = 0;
  for (int i = 0; i < u.n; i++) {
    tm_tensor *t[MAX_LISTS];
    for (int q = 0; q < lists; q++) {
      t[q] = c->in[q * u.n + i];
      if (q != 1) t[q]->c.storage->version++;
    }
    if (is_flat(&u, t)) total += t[0]->c.numel;
    else update_strided(&u, t);
  }
  if (total < TM_PARALLEL_MIN) {
    update_range(&u, 0, total);
    return TM_OK;
  }
#pragma omp parallel
  {
    int64_t threads = omp_get_num_threads(), k = omp_get_thread_num();
    update_range(&u, total / threads * k, k == threads - 1 ? total : total / threads * (k + 1));
  }
  return TM_OK;
}

int tm_sgd_step_cpu(tm_call *c) {
  const double *a = c->a; /* lr, momentum, dampening, weight_decay, nesterov, maximize, first */
  rule r = {
      .lr = a[0], .momentum = a[1], .dampening = a[2], .decay = a[3], .nesterov = a[4] != 0, .maximize = a[5] != 0, .first = a[6] != 0};
  return update_all(c, &r, sgd_f32, sgd_f64);
}

int tm_adam_step_cpu(tm_call *c) {
  const double *a = c->a; /* lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, step */
  rule r = {.lr = a[0],
            .beta1 = a[1],
            .beta2 = a[2],
            .eps = a[3],
            .decay = a[4],
            .decoupled = a[5] != 0,
            .amsgrad = a[6] != 0,
            .maximize = a[7] != 0};
  r.step_size = r.lr / (1 - pow(r.beta1, a[8]));
  r.correction2 = 1 / sqrt(1 - pow(r.beta2, a[8]));
  return update_all(c, &r, adam_f32, adam_f64);
}
