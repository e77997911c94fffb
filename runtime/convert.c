/* convert.c: how converted tensors reach the slots of a module. A slot holds a handle; the converted content gets
** there by set_data (handle and content stay, storage and geometry change), by replacement (a new handle) or by a
** swap (the handle stays, the content is another). Which one is decided here and nowhere else; and a conversion is a
** transaction: everything that can fail is done or checked before the first slot changes. */
#include "internal.h"

/* -- the two flags: of the process, read by every thread -- */

static int overwrite, swap;
int tm_future_overwrite(void) { return __atomic_load_n(&overwrite, __ATOMIC_RELAXED); }
int tm_future_swap(void) { return __atomic_load_n(&swap, __ATOMIC_RELAXED); }
void tm_future_overwrite_set(int on) { __atomic_store_n(&overwrite, on != 0, __ATOMIC_RELAXED); }
void tm_future_swap_set(int on) { __atomic_store_n(&swap, on != 0, __ATOMIC_RELAXED); }

/* -- identity and content -- */

int64_t tm_tensor_epoch(const tm_tensor *t) { return t->epoch; }
void tm_tensor_pin(tm_tensor *t) { t->c.pins++; }
void tm_tensor_unpin(tm_tensor *t) { if (t->c.pins > 0) t->c.pins--; }
int tm_tensor_use_count(const tm_tensor *t) { return 1 + (t->c.acc != NULL) + t->c.pins; }

void tm_tensor_mark_set(tm_tensor *t, int mark, int on) {
  if (on) t->c.marks |= (uint8_t)mark;
  else t->c.marks &= (uint8_t)~mark;
}
int tm_tensor_marks(const tm_tensor *t) { return t->c.marks; }

tm_weakref *tm_weakref_new(tm_tensor *t, int identity) {
  tm_weakref *w = tm_host_alloc(sizeof *w);
  if (!w) return NULL;
  *w = (tm_weakref){.t = t, .next = t->weak, .at = &t->weak, .identity = identity};
  if (w->next) w->next->at = &w->next;
  t->weak = w;
  return w;
}

void tm_weakref_free(tm_weakref *w) {
  if (!w) return;
  if (w->t) {
    *w->at = w->next;
    if (w->next) w->next->at = w->at;
  }
  tm_host_free(w);
}

tm_tensor *tm_weakref_at(const tm_weakref *w) { return w->t; }

void tm_weakrefs_clear(tm_tensor *t) {
  for (tm_weakref *w = t->weak, *next; w; w = next) {
    next = w->next;
    w->t = NULL;
  }
  t->weak = NULL;
}

/* -- deciding -- */

/* Dense tensors of real devices are of one family, whatever their dtype and shape; meta tensors of another; fake
** tensors and wrappers each of their own. */
int tm_compat_type(const tm_tensor *a, const tm_tensor *b) {
  return (TM_KIND(a->c.device) == TM_META) == (TM_KIND(b->c.device) == TM_META) && a->c.marks == b->c.marks;
}

int tm_convert_decide(int compat, int param_marks, int applied_marks, int overwrite_on, int swap_on) {
  if (swap_on || applied_marks & TM_MARK_WRAPPER || param_marks & TM_MARK_FAKE) return TM_SWAP;
  return compat && !(applied_marks & TM_MARK_FAKE) && !overwrite_on ? TM_SET_DATA : TM_REPLACE;
}

static int swappable(const tm_tensor *t, const char *which) {
  for (const tm_weakref *w = t->weak; w; w = w->next)
    if (!w->identity) return tm_fail(TM_ERUNTIME, "swap_tensors: %s, %s, has a weak reference; an identity reference would not be in the way", which, tm_say(t));
  int count = tm_tensor_use_count(t);
  if (count == 1 || (count == 2 && t->c.acc && !t->c.fn)) return TM_OK;
  return tm_fail(TM_ERUNTIME, "swap_tensors: the content of %s, %s, is used %d times, expected once: other references to it exist", which, tm_say(t), count);
}

int tm_can_swap(const tm_tensor *a, const tm_tensor *b) {
  int code = swappable(a, "t1");
  return code != TM_OK ? code : swappable(b, "t2");
}

int tm_swap_tensors(tm_tensor *a, tm_tensor *b) {
  int code = tm_can_swap(a, b);
  if (code == TM_OK) tm_swap_contents(a, b);
  return code;
}

/* -- a batch of conversions -- */

static int one_format(const tm_tensor *t, int format, int64_t *stride) {
  static const int order[2][5] = {{0, 2, 3, 1, 0}, {0, 2, 3, 4, 1}}; /* N, then space, channels innermost */
  int n = t->c.ndim;
  if (n != 4 && n != 5) return 0;
  if ((format == TM_CHANNELS_LAST) != (n == 4))
    return tm_fail(TM_ERUNTIME, "to: %s does not go with %s", format == TM_CHANNELS_LAST ? "channels_last" : "channels_last_3d", tm_say(t)), -1;
  int64_t step = 1;
  for (int i = n - 1; i >= 0; i--) {
    int d = order[n - 4][i];
    stride[d] = step;
    step *= TM_MAX(t->c.size[d], 1);
  }
  return 1;
}

/* Strides of a converted copy: those of a dense tensor in whatever order its dims lie, else row-major. */
static bool dense_strides(const tm_tensor *t, int64_t *stride) {
  uint32_t done = 0;
  int64_t step = 1;
  for (int k = 0; k < t->c.ndim; k++) {
    int least = -1;
    for (int i = t->c.ndim - 1; i >= 0; i--)
      if (!(done >> i & 1) && (least < 0 || t->c.stride[i] < t->c.stride[least])) least = i;
    done |= 1u << least;
    if (t->c.size[least] > 1 && t->c.stride[least] != step) return false;
    stride[least] = step;
    step *= TM_MAX(t->c.size[least], 1);
  }
  return true;
}

static tm_tensor *converted(tm_tensor *t, int dtype, int device, int format, int fresh) {
  int64_t stride[TM_MAXDIM];
  int to = dtype < 0 ? t->c.dtype : dtype, where = device < 0 ? t->c.device : device, formatted = 0;
  if (format && (formatted = one_format(t, format, stride)) < 0) return NULL;
  bool same = to == t->c.dtype && where == t->c.device && !fresh;
  for (int i = 0; same && formatted && i < t->c.ndim; i++) same = t->c.size[i] == 1 || stride[i] == t->c.stride[i];
  if (same) {
    tm_tensor_retain(t);
    return t;
  }
  if (!fresh && TM_KIND(t->c.device) == TM_META && TM_KIND(where) != TM_META)
    return tm_fail_null(TM_ENOTIMPL, "to: %s has no elements to copy; use to_empty and then load or initialise", tm_say(t));
  if (!formatted && !dense_strides(t, stride)) tm_contiguous_strides(t->c.ndim, t->c.size, stride);
  return tm_tensor_empty(t->c.ndim, t->c.size, stride, to, where);
}

/* Copies are bound by memory: large ones share the threads within themselves, small ones among them. */
int tm_convert_batch(int n, tm_tensor *const *from, const int *dtype, int device, int format, int fresh, tm_tensor **to) {
  int made = 0, code = TM_OK;
  int64_t small = 0;
  for (; made < n; made++)
    if (!(to[made] = converted(from[made], dtype ? dtype[made] : -1, device, format, fresh))) {
      code = tm_last_code();
      goto fail;
    }
  if (fresh) return TM_OK;
  for (int i = 0; i < n; i++) {
    if (to[i] == from[i] || TM_KIND(to[i]->c.device) == TM_META) continue;
    if (to[i]->c.numel < TM_PARALLEL_MIN) small += to[i]->c.numel;
    else if ((code = tm_poll()) != TM_OK || (code = tm_tensor_copy_data(to[i], from[i])) != TM_OK) goto fail;
  }
#pragma omp parallel for schedule(dynamic, 16) if (small >= 4 * TM_PARALLEL_MIN)
  for (int i = 0; i < n; i++)
    if (to[i] != from[i] && to[i]->c.numel < TM_PARALLEL_MIN && TM_KIND(to[i]->c.device) != TM_META) tm_tensor_copy_data(to[i], from[i]);
  return TM_OK;
fail:
  for (int i = 0; i < made; i++) tm_tensor_release(to[i]), to[i] = NULL;
  return code;
}

/* -- committing -- */

/* The new content of a slot: an alias, so that whoever holds `applied` does not share its autograd data. */
static tm_tensor *content_of(const tm_tensor *applied, int requires_grad) {
  tm_tensor *t = tm_tensor_alias(applied);
  if (t && requires_grad) t->c.flags |= TM_FLAG_REQUIRES_GRAD;
  return t;
}

static int check_grad(const tm_tensor *g, const tm_tensor *p) {
  if (g->c.dtype == p->c.dtype && g->c.device == p->c.device && g->c.ndim == p->c.ndim &&
      !memcmp(g->c.size, p->c.size, (size_t)p->c.ndim * sizeof(int64_t)))
    return TM_OK;
  return tm_fail(TM_ERUNTIME, "grad: %s does not fit a tensor %s", tm_say(g), tm_say(p));
}

/* Everything that can go wrong with one slot, before anything changes. */
static int plan_slot(tm_conversion *s, int overwrite_on, int swap_on) {
  tm_tensor *p = s->param, *a = s->applied, *g = p->c.grad;
  int rg = p->c.flags & TM_FLAG_REQUIRES_GRAD;
  s->failed_grad = 0;
  s->fresh = s->fresh_grad = NULL;
  s->action = tm_convert_decide(tm_compat_type(p, a), p->c.marks, a->c.marks, overwrite_on, swap_on);
  s->grad_action = TM_SET_DATA;
  if (s->action == TM_REPLACE && (p->c.fn || !s->is_parameter))
    return tm_fail(TM_EASSERT, "the slot holds %s, which is no %s; only leaf Parameters can be replaced", tm_say(p), p->c.fn ? "leaf" : "Parameter");
  if (rg && !tm_is_float(a->c.dtype))
    return tm_fail(TM_ERUNTIME, "%s requires grad and cannot become %s: only floating dtypes can require grad", tm_say(p), tm_say(a));
  if (s->action != TM_SET_DATA && !(s->fresh = content_of(a, rg))) return TM_EMEM;
  if (s->action == TM_SWAP && tm_can_swap(p, s->fresh) != TM_OK) return tm_last_code();
  if (!g || !s->applied_grad) return TM_OK;
  s->failed_grad = 1;
  if (s->action == TM_SWAP) {
    s->grad_action = TM_SWAP;
    if (s->applied_grad == g) return TM_OK; /* its content stays */
    if (!(s->fresh_grad = content_of(s->applied_grad, g->c.flags & TM_FLAG_REQUIRES_GRAD))) return TM_EMEM;
    if (tm_can_swap(g, s->fresh_grad) != TM_OK) return tm_last_code();
  } else {
    bool ok = tm_compat_type(g, s->applied_grad) && !(s->applied_grad->c.marks & TM_MARK_FAKE) && !overwrite_on;
    s->grad_action = ok ? TM_SET_DATA : TM_REPLACE;
    if (s->action == TM_REPLACE && ok)
      return tm_fail(TM_EASSERT, "the parameter would be replaced and its gradient, %s, not: convert both", tm_say(g));
    if (s->action == TM_REPLACE && g->c.fn) return tm_fail(TM_EASSERT, "the gradient, %s, is no leaf (made with create_graph)", tm_say(g));
    if (!ok && check_grad(s->applied_grad, a) != TM_OK) return tm_last_code();
  }
  s->failed_grad = 0;
  return TM_OK;
}

static void commit_grad(tm_conversion *s, tm_tensor *p) {
  tm_tensor *g = s->param->c.grad, *a = s->applied_grad;
  if (!g || !a) return;
  if (s->grad_action == TM_SET_DATA) {
    tm_tensor_set_data(g, a);
  } else {
    if (g->c.flags & TM_FLAG_REQUIRES_GRAD) a->c.flags |= TM_FLAG_REQUIRES_GRAD;
    tm_tensor_retain(a);
    tm_tensor *old = p->c.grad;
    p->c.grad = a;
    tm_tensor_release(old);
  }
}

static void commit_slot(tm_conversion *s) {
  tm_tensor *p = s->param;
  switch (s->action) {
    case TM_SET_DATA:
      tm_tensor_set_data(p, s->applied);
      commit_grad(s, p);
      return;
    case TM_REPLACE:
      commit_grad(s, s->fresh);
      s->result = s->fresh;
      s->fresh = NULL;
      return;
    default: { /* the gradient is part of the content: it stays with the handle by hand */
      tm_tensor *g = p->c.grad;
      p->c.grad = NULL;
      tm_swap_contents(p, s->fresh);
      if (g && s->fresh_grad) tm_swap_contents(g, s->fresh_grad);
      p->c.grad = g;
    }
  }
}

static void forget(tm_conversion *s) {
  tm_tensor_release(s->fresh);
  tm_tensor_release(s->fresh_grad);
  s->fresh = s->fresh_grad = NULL;
}

int tm_apply(int n, tm_conversion *slot, int *failed) {
  int overwrite_on = tm_future_overwrite(), swap_on = tm_future_swap();
  for (int i = 0; i < n; i++) slot[i].result = NULL;
  for (int i = 0; i < n; i++) {
    int code = plan_slot(&slot[i], overwrite_on, swap_on);
    if (code == TM_OK) continue;
    *failed = i;
    for (int k = 0; k <= i; k++) forget(&slot[k]);
    return code;
  }
  for (int i = 0; i < n; i++) {
    commit_slot(&slot[i]);
    forget(&slot[i]);
  }
  return TM_OK;
}
