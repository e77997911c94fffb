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
void tm_tensor_unpin(tm_tensor *t) {
  if (t->c.pins > 0) t->c.pins--;
}
int tm_tensor_use_count(const tm_tensor *t) { return 1 + (t->c.acc != NULL) + t->c.pins; }

void tm_tensor_mark_set(tm_tensor *t, int mark, int on) {
  if (on) t->c.marks |= (uint8_t)mark;
  else t->c.marks &= (uint8_t)~mark;
}
int tm_tensor_marks(const tm_tensor *t) { return t->c.marks; }
int32_t tm_tensor_slot(const tm_tensor *t, const tm_handles *h) { return t->home == h ? t->slot : 0; }

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

int tm_weakref_blocks(const tm_tensor *t) {
  for (const tm_weakref *w = t->weak; w; w = w->next)
    if (!w->identity) return 1;
  return 0;
}

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

static int check_weak(const tm_tensor *t, const char *which) {
  if (!tm_weakref_blocks(t)) return TM_OK;
  return tm_fail(TM_ERUNTIME, "swap_tensors: %s, %s, has a weak reference; an identity reference would not be in the way", which,
                 tm_say(t));
}

/* The second reference may be the tensor's own accumulator, which the swap poisons. */
static int check_count(const tm_tensor *t, const char *which) {
  int count = tm_tensor_use_count(t);
  if (count == 1 || (count == 2 && t->c.acc)) return TM_OK;
  return tm_fail(TM_ERUNTIME, "swap_tensors: the content of %s, %s, is used %d times, expected once: other references to it exist", which,
                 tm_say(t), count);
}

int tm_can_swap(const tm_tensor *a, const tm_tensor *b) {
  int code;
  if ((code = check_weak(a, "t1")) != TM_OK || (code = check_weak(b, "t2")) != TM_OK) return code;
  if ((code = check_count(a, "t1")) != TM_OK) return code;
  return check_count(b, "t2");
}

int tm_swap_tensors(tm_tensor *a, tm_tensor *b) {
  int code = tm_can_swap(a, b);
  if (code == TM_OK) tm_swap_contents(a, b);
  return code;
}

/* The version is the storage's: where others share the source's, graphs that saved it must not see a change. */
int tm_tensor_rebind(tm_tensor *t, const tm_tensor *source) {
  int code = tm_tensor_set_data(t, source);
  if (code == TM_OK && t->c.storage->refs <= 2) t->c.storage->version++;
  return code;
}

/* -- a batch of conversions -- */

static int one_format(const tm_tensor *t, int format, int64_t *stride) {
  static const int order[2][5] = {{0, 2, 3, 1, 0}, {0, 2, 3, 4, 1}}; /* N, then space, channels innermost */
  int n = t->c.ndim;
  if (n != 4 && n != 5) return 0;
  if (format == TM_CONTIGUOUS) return tm_contiguous_strides(n, t->c.size, stride), 1;
  if ((format == TM_CHANNELS_LAST) != (n == 4))
    return tm_fail(TM_ERUNTIME, "to: %s does not go with %s", format == TM_CHANNELS_LAST ? "channels_last" : "channels_last_3d", tm_say(t)),
           -1;
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

#ifdef NDEBUG
static void forget_values(tm_tensor *t) { (void)t; }
#else
/* Debug builds show what nobody has written: every byte 0xFF, which is NaN for floats and no boolean or likely number. */
static void forget_values(tm_tensor *t) {
  if (TM_KIND(t->c.device) == TM_CPU && t->c.storage->data)
    memset(t->c.storage->data, t->c.dtype == TM_BOOL ? 1 : 0xFF, t->c.storage->bytes);
}
#endif

/* A tensor in the dtype, device and format of the spec, its elements not written yet. */
static tm_tensor *converted(tm_tensor *t, const tm_convert_spec *spec) {
  int64_t stride[TM_MAXDIM];
  if (t->c.marks & TM_MARK_WRAPPER) return tm_fail_null(TM_ETYPE, "to: %s can be converted by its class only", tm_say(t));
  bool own_dtype = spec->dtype < 0 || (spec->only_floating && !tm_is_float(t->c.dtype));
  int dtype = own_dtype ? t->c.dtype : spec->dtype, device = spec->device < 0 ? t->c.device : spec->device, formatted = 0;
  if (t->c.marks & TM_MARK_FAKE) device = tm_device_fake(device); /* no bytes that could go to a real one */
  if (spec->format && (formatted = one_format(t, spec->format, stride)) < 0) return NULL;
  bool same = dtype == t->c.dtype && device == t->c.device && !spec->fresh;
  for (int i = 0; same && formatted && i < t->c.ndim; i++) same = t->c.size[i] == 1 || stride[i] == t->c.stride[i];
  if (same) {
    tm_tensor_retain(t);
    return t;
  }
  if (!spec->fresh && TM_KIND(t->c.device) == TM_META && TM_KIND(device) != TM_META)
    return tm_fail_null(TM_ENOTIMPL, "to: %s has no elements to copy; use to_empty and then load or initialise", tm_say(t));
  if (!formatted && !dense_strides(t, stride)) tm_contiguous_strides(t->c.ndim, t->c.size, stride);
  tm_tensor *to = tm_tensor_empty(t->c.ndim, t->c.size, stride, dtype, device);
  if (to && spec->fresh) forget_values(to);
  return to;
}

static bool needs_copy(const tm_tensor *to, const tm_tensor *from, const tm_convert_spec *spec) {
  return to != from && !spec->fresh && TM_KIND(to->c.device) != TM_META;
}

tm_tensor *tm_tensor_convert(tm_tensor *t, const tm_convert_spec *spec) {
  tm_tensor *to = converted(t, spec);
  if (to && needs_copy(to, t, spec) && tm_tensor_copy_data(to, t) != TM_OK) tm_tensor_release(to), to = NULL;
  return to;
}

/* -- what the slots become -- */

/* Finds slots that hold the same tensor by a table of 2^k places, each the number of a slot + 1. */
static int find_twins(int n, tm_conversion *slot) {
  size_t mask = 15;
  while (mask < 2 * (size_t)n) mask = mask * 2 + 1;
  int32_t *place = tm_host_alloc((mask + 1) * sizeof *place);
  if (!place) return TM_EMEM;
  memset(place, 0, (mask + 1) * sizeof *place);
  for (int i = 0; i < n; i++) {
    size_t at = (uint64_t)slot[i].param->id * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (place[at] && slot[place[at] - 1].param != slot[i].param) at = (at + 1) & mask;
    slot[i].twin = place[at] - 1;
    place[at] = i + 1;
  }
  tm_host_free(place);
  return TM_OK;
}

/* A tied parameter that keeps its handle is converted once. One that will be replaced comes apart. */
static bool done_by_twin(const tm_conversion *s, const tm_conversion *slot, int overwrite_on, int swap_on) {
  if (s->twin < 0 || s->kind == TM_SLOT_BUFFER || slot[s->twin].spec != s->spec || slot[s->twin].applied) return false;
  int from = s->param->c.device, to = s->spec->device;
  return swap_on || (!overwrite_on && (to < 0 || ((TM_KIND(from) == TM_META) == (TM_KIND(to) == TM_META) && !TM_IS_FAKE(to))));
}

enum { PIECE = 1 << 15, ROUND = 1 << 24 }; /* elements; the latter between two looks at the interrupt request: about 10 ms */

typedef struct piece {
  tm_tensor *to;
  const tm_tensor *from;
  int64_t begin, end;
} piece;

/* The same elements in the same order on both sides? `to` has no gaps. */
static bool is_flat(const tm_tensor *to, const tm_tensor *from) {
  for (int i = 0; i < to->c.ndim; i++)
    if (to->c.size[i] > 1 && to->c.stride[i] != from->c.stride[i]) return false;
  return TM_KIND(to->c.device) == TM_CPU && TM_KIND(from->c.device) == TM_CPU;
}

/* The number of pieces of what is flat, which go into `list` unless it is NULL; then the rest is copied, too. */
static int64_t cut(int n, const tm_conversion *slot, piece *list, int *code) {
  int64_t count = 0;
  for (int i = 0; i < 2 * n && *code == TM_OK; i++) {
    const tm_conversion *s = &slot[i / 2];
    tm_tensor *to = i % 2 ? s->made_grad : s->made, *from = i % 2 ? s->param->c.grad : s->param;
    if (!to || !needs_copy(to, from, s->spec)) continue;
    int64_t numel = to->c.numel;
    if (!is_flat(to, from)) {
      if (list && (*code = tm_poll()) == TM_OK) *code = tm_tensor_copy_data(to, from);
    } else if (!list) {
      count += (numel + PIECE - 1) / PIECE;
    } else {
      for (int64_t at = 0; at < numel; at += PIECE) list[count++] = (piece){to, from, at, TM_MIN(at + PIECE, numel)};
    }
  }
  return count;
}

static void copy_piece(const piece *p) {
  int to = p->to->c.dtype, from = p->from->c.dtype;
  tm_convert(p->end - p->begin, (char *)tm_data(p->to) + p->begin * tm_dtype_size(to), to, 1,
             (const char *)tm_data(p->from) + p->begin * tm_dtype_size(from), from, 1);
}

/* Bound by memory. One loop over the pieces of all tensors: the threads wait for each other once, and one of them that
** is held up holds up one piece only. */
static int copy_all(int n, const tm_conversion *slot) {
  int code = TM_OK;
  int64_t count = cut(n, slot, NULL, &code), last = 0;
  piece *list = tm_host_alloc((size_t)count * sizeof *list);
  if (!list) return TM_EMEM;
  cut(n, slot, list, &code);
  for (int64_t first = 0; first < count && code == TM_OK && (code = tm_poll()) == TM_OK; first = last) {
    int64_t work = 0;
    for (; last < count && work < ROUND; last++) work += list[last].end - list[last].begin;
#pragma omp parallel for num_threads(tm_num_threads()) schedule(dynamic, 4) if (work >= 4 * TM_PARALLEL_MIN)
    for (int64_t i = first; i < last; i++) copy_piece(&list[i]);
  }
  tm_host_free(list);
  return code;
}

static int convert_all(int n, tm_conversion *slot, int overwrite_on, int swap_on, int *failed) {
  for (int i = 0; i < n; i++) {
    tm_conversion *s = &slot[i];
    if (s->applied || (s->skip = done_by_twin(s, slot, overwrite_on, swap_on))) continue;
    *failed = i;
    if (!(s->made = converted(s->param, s->spec))) return tm_last_code();
    if (s->kind == TM_SLOT_BUFFER || !s->param->c.grad) continue;
    s->failure = TM_FAILED_GRAD;
    if (!(s->made_grad = converted(s->param->c.grad, s->spec))) return tm_last_code();
    s->failure = 0;
  }
  *failed = -1;
  return copy_all(n, slot);
}

/* -- committing -- */

/* The new content of a slot: an alias, so that whoever holds `applied` does not share its autograd data. */
static tm_tensor *content_of(const tm_tensor *applied, int requires_grad) {
  tm_tensor *t = tm_tensor_alias(applied);
  if (t && requires_grad) t->c.flags |= TM_FLAG_REQUIRES_GRAD;
  return t;
}

static tm_tensor *applied_of(const tm_conversion *s) { return s->applied ? s->applied : s->made; }
static tm_tensor *applied_grad_of(const tm_conversion *s) { return s->applied ? s->applied_grad : s->made_grad; }

static int check_grad(const tm_tensor *g, const tm_tensor *p) {
  if (g->c.dtype == p->c.dtype && g->c.device == p->c.device && g->c.ndim == p->c.ndim &&
      !memcmp(g->c.size, p->c.size, (size_t)p->c.ndim * sizeof(int64_t)))
    return TM_OK;
  return tm_fail(TM_ERUNTIME, "grad: %s does not fit a tensor %s", tm_say(g), tm_say(p));
}

/* Does an earlier slot with the same tensor change it, or its gradient? */
static bool changed_before(const tm_conversion *slot, const tm_conversion *s, bool grad) {
  for (int i = s->twin; i >= 0; i = slot[i].twin) {
    const tm_conversion *t = &slot[i];
    if (t->skip || t->kind == TM_SLOT_BUFFER) continue;
    if (grad ? applied_grad_of(t) && applied_grad_of(t) != t->param->c.grad : applied_of(t) != t->param) return true;
  }
  return false;
}

static int plan_grad(const tm_conversion *slot, tm_conversion *s, int overwrite_on) {
  tm_tensor *g = s->param->c.grad, *a = applied_grad_of(s);
  if (!g || !a) return TM_OK;
  if (s->action == TM_SWAP) {
    s->grad_action = TM_SWAP;
    if (a == g && !changed_before(slot, s, true)) return TM_OK; /* its content stays */
    s->failure |= TM_FAILED_SWAP;
    if (!(s->fresh_grad = content_of(a, tm_tensor_requires_grad(g)))) return TM_EMEM;
    s->failure |= TM_FAILED_BUSY;
    return tm_can_swap(g, s->fresh_grad);
  }
  bool ok = tm_compat_type(g, a) && !(a->c.marks & TM_MARK_FAKE) && !overwrite_on;
  s->grad_action = ok ? TM_SET_DATA : TM_REPLACE;
  if (ok && s->action == TM_REPLACE)
    return tm_fail(TM_EASSERT, "the parameter would be replaced and its gradient, %s, not: convert both", tm_say(g));
  if (ok) {
    if (tm_tensor_requires_grad(g) && !tm_is_float(a->c.dtype))
      return tm_fail(TM_ERUNTIME, "the gradient, %s, requires grad and cannot become %s", tm_say(g), tm_say(a));
    if (a == g && changed_before(slot, s, true) && !(s->fresh_grad = content_of(a, 0))) return TM_EMEM;
    return TM_OK;
  }
  if (!tm_tensor_is_leaf(g)) return tm_fail(TM_EASSERT, "the gradient, %s, is no leaf (made with create_graph)", tm_say(g));
  return check_grad(a, applied_of(s));
}

/* Everything that can go wrong with one slot, before anything changes. */
static int plan_slot(const tm_conversion *slot, tm_conversion *s, int overwrite_on, int swap_on) {
  tm_tensor *p = s->param, *a = applied_of(s);
  int rg = tm_tensor_requires_grad(p), code;
  if (s->kind == TM_SLOT_BUFFER || s->skip) return TM_OK;
  s->action = tm_convert_decide(tm_compat_type(p, a), p->c.marks, a->c.marks, overwrite_on, swap_on);
  if (s->action == TM_REPLACE && (s->kind != TM_SLOT_PARAMETER || !tm_tensor_is_leaf(p)))
    return tm_fail(TM_EASSERT, "the slot holds %s, which is no %s; only leaf Parameters can be replaced", tm_say(p),
                   s->kind != TM_SLOT_PARAMETER ? "Parameter" : "leaf");
  if (s->action == TM_SWAP) s->failure = TM_FAILED_SWAP;
  if (rg && !tm_is_float(a->c.dtype))
    return tm_fail(TM_ERUNTIME, "%s requires grad and cannot become %s: only floating dtypes can require grad", tm_say(p), tm_say(a));
  /* set_data of a tensor into itself does nothing, unless another slot changes it first */
  if ((s->action != TM_SET_DATA || (a == p && changed_before(slot, s, false))) && !(s->fresh = content_of(a, rg))) return TM_EMEM;
  if (s->action == TM_SWAP) {
    s->failure |= TM_FAILED_BUSY;
    if ((code = tm_can_swap(p, s->fresh)) != TM_OK) return code;
  }
  s->failure = TM_FAILED_GRAD;
  if ((code = plan_grad(slot, s, overwrite_on)) == TM_OK) s->failure = 0;
  return code;
}

static void commit_grad(tm_conversion *s, tm_tensor *p) {
  tm_tensor *g = s->param->c.grad, *a = applied_grad_of(s);
  if (!g || !a) return;
  if (s->grad_action == TM_SET_DATA) {
    if (a != g || s->fresh_grad) tm_tensor_set_data(g, s->fresh_grad ? s->fresh_grad : a);
    return;
  }
  if (a != g && tm_tensor_is_leaf(a)) a->c.flags = (uint8_t)((a->c.flags & ~TM_FLAG_REQUIRES_GRAD) | (g->c.flags & TM_FLAG_REQUIRES_GRAD));
  tm_tensor_retain(a);
  tm_tensor *old = p->c.grad;
  p->c.grad = a;
  tm_tensor_release(old);
}

static void commit_slot(tm_conversion *s) {
  tm_tensor *p = s->param, *a = applied_of(s), *g;
  if (s->skip) return;
  if (s->kind == TM_SLOT_BUFFER) {
    if (a != p) tm_tensor_retain(s->result = a);
    return;
  }
  switch (s->action) {
  case TM_SET_DATA:
    if (a != p || s->fresh) tm_tensor_set_data(p, s->fresh ? s->fresh : a);
    commit_grad(s, p);
    return;
  case TM_REPLACE:
    commit_grad(s, s->fresh);
    s->result = s->fresh;
    s->fresh = NULL;
    return;
  default: /* the gradient is part of the content: it stays with the handle by hand */
    g = p->c.grad;
    p->c.grad = NULL;
    tm_swap_contents(p, s->fresh);
    if (g && s->fresh_grad) tm_swap_contents(g, s->fresh_grad);
    p->c.grad = g;
  }
}

static void forget(tm_conversion *s) {
  tm_tensor **made[] = {&s->made, &s->made_grad, &s->fresh, &s->fresh_grad};
  for (int k = 0; k < 4; k++) tm_tensor_release(*made[k]), *made[k] = NULL;
}

int tm_apply(int n, tm_conversion *slot, int overwrite_on, int swap_on, int *failed) {
  int code;
  for (int i = 0; i < n; i++) {
    tm_conversion *s = &slot[i];
    s->action = s->grad_action = TM_SET_DATA;
    s->failure = s->skip = 0;
    s->result = s->made = s->made_grad = s->fresh = s->fresh_grad = NULL;
  }
  *failed = -1;
  if ((code = find_twins(n, slot)) == TM_OK) code = convert_all(n, slot, overwrite_on, swap_on, failed);
  for (int i = 0; i < n && code == TM_OK; i++)
    if ((code = plan_slot(slot, &slot[i], overwrite_on, swap_on)) != TM_OK) *failed = i;
  for (int i = 0; i < n; i++) {
    if (code == TM_OK) commit_slot(&slot[i]);
    forget(&slot[i]);
  }
  return code;
}
