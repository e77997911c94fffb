/* join.c: tensors one after the other. Both rows write a result that is (outer, runs): for each place before the
** joined dim, a run of neighbouring elements from every input in turn. */
#include "internal.h"

/* PyTorch lets {} stand for "nothing" whatever the other shapes are. */
static bool passed_over(int ndim, const int64_t *size) { return ndim == 1 && size[0] == 0; }

/* The dtype that fits all, and one device. */
static int common(tm_call *c) {
  if (c->nin == 0) return tm_fail(TM_EVALUE, "%s: expected at least one tensor", c->op->name);
  for (int i = 0; i < c->nin; i++) {
    if (!c->in[i]) return tm_fail(TM_ETYPE, "%s: tensor %d of the list is absent", c->op->name, i + 1);
    const tm_tensor *x = c->in[0], *t = c->in[i];
    if (t->c.device != x->c.device) {
      char first[16];
      snprintf(first, sizeof first, "%s", tm_device_name(x->c.device));
      return tm_fail(TM_ERUNTIME, "%s: tensor 1 is on %s, tensor %d on %s, expected one device", c->op->name, first, i + 1,
                     tm_device_name(t->c.device));
    }
    c->compute = i == 0 ? t->c.dtype : tm_dtype_promote(c->compute, t->c.dtype);
  }
  c->nout = 1;
  c->o[0] = (tm_spec){.dtype = c->compute, .device = c->in[0]->c.device};
  return TM_OK;
}

int tm_infer_cat(tm_call *c) {
  int dim = (int)c->a[0], code = common(c), first = 0;
  if (code) return code;
  while (first + 1 < c->nin && passed_over(c->in[first]->c.ndim, c->in[first]->c.size)) first++;
  const tm_tensor *x = c->in[first];
  tm_spec *o = &c->o[0];
  o->ndim = x->c.ndim;
  memcpy(o->size, x->c.size, (size_t)o->ndim * sizeof *o->size);
  if (o->ndim == 0)
    return tm_fail(TM_ERUNTIME, "cat: tensor %d is %s, expected at least one dim (stack joins numbers)", first + 1, tm_say(x));
  if (dim >= o->ndim) return tm_fail(TM_EINDEX, "cat: there is no dim %d in tensor %d, %s", dim + 1, first + 1, tm_say(x));
  o->size[dim] = 0;
  for (int i = first; i < c->nin; i++) {
    const tm_tensor *t = c->in[i];
    if (passed_over(t->c.ndim, t->c.size)) continue;
    bool fits = t->c.ndim == o->ndim;
    for (int d = 0; fits && d < o->ndim; d++) fits = d == dim || T_SIZE(t, d) == o->size[d];
    if (!fits)
      return tm_fail(TM_ERUNTIME, "cat: tensor %d is %s, tensor %d is %s: expected equal sizes but in dim %d", first + 1, tm_say(x), i + 1,
                     tm_say(t), dim + 1);
    if (__builtin_add_overflow(o->size[dim], T_SIZE(t, dim), &o->size[dim]))
      return tm_fail(TM_EVALUE, "cat: dim %d grows beyond 2^63", dim + 1);
  }
  return TM_OK;
}

int tm_infer_stack(tm_call *c) {
  int dim = (int)c->a[0], code = common(c);
  if (code) return code;
  const tm_tensor *x = c->in[0];
  tm_spec *o = &c->o[0];
  o->ndim = x->c.ndim + 1;
  if (o->ndim > TM_MAXDIM) return tm_fail(TM_ERUNTIME, "stack: tensor 1 is %s, a result has at most %d dims", tm_say(x), TM_MAXDIM);
  for (int d = 0; d < o->ndim; d++) o->size[d] = d == dim ? c->nin : T_SIZE(x, d - (d > dim));
  for (int i = 1; i < c->nin; i++) {
    const tm_tensor *t = c->in[i];
    bool fits = t->c.ndim == x->c.ndim && !memcmp(t->c.size, x->c.size, (size_t)x->c.ndim * sizeof *x->c.size);
    if (!fits) return tm_fail(TM_ERUNTIME, "stack: tensor 1 is %s, tensor %d is %s, expected equal shapes", tm_say(x), i + 1, tm_say(t));
  }
  return TM_OK;
}

/* -- kernel ------------------------------------------------------------------------------------------ */

typedef struct run {
  const char *from;
  int64_t bytes;
} run; /* of one input, per outer place; from NULL: copied apart */

static inline void move(char *to, const char *from, int64_t n) {
  if (n == 4) memcpy(to, from, 4); /* one number: no call */
  else if (n == 8) memcpy(to, from, 8);
  else memcpy(to, from, (size_t)n);
}

/* Bytes begin..end-1 of the result, which is `row` bytes for each outer place. */
static void copy_runs(char *y, const run *runs, int64_t row, int64_t begin, int64_t end) {
  for (int64_t o = begin / row; o * row < end; o++) {
    int64_t at = o * row;
    for (int i = 0; at < TM_MIN(end, (o + 1) * row); at += runs[i++].bytes) {
      int64_t from = TM_MAX(begin, at), to = TM_MIN(end, at + runs[i].bytes);
      if (from < to && runs[i].from) move(y + from, runs[i].from + o * runs[i].bytes + (from - at), to - from);
    }
  }
}

/* The part of y that begins at `start` of dim and has the shape of x (with a dim of size 1 at dim if stacked) := x. */
static int copy_part(tm_tensor *y, const tm_tensor *x, int dim, int64_t start) {
  tm_tensor *part = tm_tensor_alias(y);
  if (!part) return tm_last_code();
  part->c.offset += start * T_STRIDE(y, dim);
  part->c.numel = x->c.numel;
  part->c.ndim = x->c.ndim;
  for (int d = 0; d < x->c.ndim; d++) {
    part->c.size[d] = T_SIZE(x, d);
    part->c.stride[d] = T_STRIDE(y, d + (y->c.ndim > x->c.ndim && d >= dim));
  }
  int code = tm_tensor_copy_data(part, x);
  tm_tensor_release(part);
  return code;
}

/* Bound by memory: contiguous inputs of the result's dtype are copied in runs, the threads sharing the bytes of the
** result evenly whatever the sizes of the inputs; the others are copied one by one. */
static int join(tm_call *c, int dim, bool stacked) {
  enum { HERE = 64 };
  run small[HERE], *runs = small;
  tm_tensor *y = c->out[0];
  int64_t w = tm_dtype_size(y->c.dtype), inner = w, outer = 1, start = 0;
  int code = TM_OK;
  if (y->c.numel == 0) return TM_OK;
  if (c->nin > HERE && !(runs = tm_host_alloc((size_t)c->nin * sizeof *runs))) return tm_last_code();
  for (int d = 0; d < dim; d++) outer *= T_SIZE(y, d);
  for (int d = dim + 1; d < y->c.ndim; d++) inner *= T_SIZE(y, d);
  for (int i = 0; i < c->nin && !code; i++) {
    const tm_tensor *x = c->in[i];
    int64_t size = stacked ? 1 : passed_over(x->c.ndim, x->c.size) ? 0 : T_SIZE(x, dim);
    bool plain = x->c.dtype == y->c.dtype && tm_is_contiguous(x);
    runs[i] = (run){plain ? tm_data(x) : NULL, size * inner};
    if (!plain && size) code = copy_part(y, x, dim, start);
    start += size;
    if (!code && (i & 63) == 63) code = tm_poll();
  }
  if (!code) {
    char *p = tm_data(y);
    int64_t total = y->c.numel * w, piece = TM_MAX((total + 255) / 256, TM_PARALLEL_MIN);
#pragma omp parallel for if (total >= 4 * TM_PARALLEL_MIN)
    for (int64_t b = 0; b < total; b += piece) copy_runs(p, runs, total / outer, b, TM_MIN(total, b + piece));
  }
  if (runs != small) tm_host_free(runs);
  return code;
}

int tm_cat_cpu(tm_call *c) { return join(c, (int)c->a[0], false); }
int tm_stack_cpu(tm_call *c) { return join(c, (int)c->a[0], true); }

/* -- gradients ----------------------------------------------------------------------------------------- */

int tm_cat_vjp(tm_vjp *v) {
  int dim = (int)v->a[0];
  int64_t start = 0;
  for (int i = 0; i < v->nin; i++) {
    const tm_inmeta *x = &v->xm[i];
    int64_t size = passed_over(x->ndim, x->size) ? 0 : x->size[dim];
    if (v->want[i] && passed_over(x->ndim, x->size)) v_set(v, i, v_zeros(v, x));
    else if (v->want[i]) v_set(v, i, v_run(v, TM_OPC_narrow, 1, v->dy, (double[]){dim, (double)start, (double)size}, NULL));
    start += size;
  }
  return TM_OK;
}

int tm_stack_vjp(tm_vjp *v) {
  for (int i = 0; i < v->nin; i++)
    if (v->want[i]) v_set(v, i, v_run(v, TM_OPC_select, 1, v->dy, (double[]){v->a[0], i}, NULL));
  return TM_OK;
}
