/* handles.c: the numbers by which Lua names tensors. A number is slot + generation * 2^32; a slot holds one
** reference to its tensor and a tensor has at most one slot in its home table, so one handle is one Lua object. */
#include "internal.h"

enum { GENERATIONS = 1 << 20 }; /* 2^32 * 2^20 < 2^53: exact in a double */

struct tm_handles {
  tm_slot *slot; /* [capacity]; slot 0 stays free */
  uint8_t *used; /* [capacity] 0: free; else 1 + depth of the scope it was entered in */
  int32_t capacity, end, free, count, depth;
  int32_t since, trigger; /* tensors entered since the last sweep; sweep asked for beyond trigger */
};

/* Sweeping often is dear when many tensors live; seldom, and the garbage leaves the cache. With few alive a full
** collection takes 50 us, 12 ns a tensor here; adding two numbers costs 0.17 us at 4,000 and 0.25 us at 20,000. */
enum { SWEEP_MIN = 4000, SWEEP_PER_LIVE = 2 };

static int tables;

tm_handles *tm_handles_new(void) {
  tm_handles *h = tm_host_alloc(sizeof *h);
  if (!h) return NULL;
  *h = (tm_handles){.end = 1, .trigger = SWEEP_MIN};
  if (__atomic_add_fetch(&tables, 1, __ATOMIC_RELAXED) > 1) tm_shared = 1;
  return h;
}

static int grow(tm_handles *h) {
  if (h->capacity > INT32_MAX / 2) return tm_fail(TM_EMEM, "out of memory: %d tensors are alive", h->count);
  int32_t capacity = h->capacity ? h->capacity * 2 : 1024;
  tm_slot *slot = tm_host_realloc(h->slot, (size_t)capacity * sizeof *slot);
  if (!slot) return TM_EMEM;
  h->slot = slot;
  uint8_t *used = tm_host_realloc(h->used, (size_t)capacity);
  if (!used) return TM_EMEM;
  h->used = used;
  memset(slot + h->capacity, 0, (size_t)(capacity - h->capacity) * sizeof *slot);
  memset(used + h->capacity, 0, (size_t)(capacity - h->capacity));
  h->capacity = capacity;
  return TM_OK;
}

double tm_handles_put(tm_handles *h, tm_tensor *t) {
  int32_t i;
  if (t->slot && t->home == h) { /* already has a name here: that one keeps its reference */
    i = t->slot;
    tm_tensor_release(t);
    return i + h->slot[i].generation * 4294967296.0;
  }
  if (h->free) {
    i = h->free;
    h->free = h->slot[i].next;
  } else {
    if (h->end >= h->capacity && grow(h) != TM_OK) {
      tm_tensor_release(t);
      return 0;
    }
    i = h->end++;
  }
  h->slot[i].tensor = t;
  h->used[i] = (uint8_t)(1 + h->depth);
  h->count++;
  h->since++;
  if (!t->slot) t->slot = i, t->home = h;
  return i + h->slot[i].generation * 4294967296.0;
}

tm_tensor *tm_handles_at(tm_handles *h, double handle) {
  if (TM_LIKELY(handle >= 1 && handle < 4294967296.0 * GENERATIONS)) {
    uint64_t n = (uint64_t)handle;
    uint32_t i = (uint32_t)n;
    if (TM_LIKELY(i < (uint32_t)h->end)) {
      tm_slot *s = &h->slot[i];
      if (TM_LIKELY(s->tensor && s->generation == (uint32_t)(n >> 32))) return s->tensor;
    }
  }
  return tm_fail_null(TM_ERUNTIME, "the tensor has been released");
}

static void empty_slot(tm_handles *h, int32_t i) {
  tm_slot *s = &h->slot[i];
  tm_tensor *t = s->tensor;
  if (!t) return;
  if (t->home == h && t->slot == i) t->slot = 0, t->home = NULL;
  s->tensor = NULL;
  h->used[i] = 0;
  if (++s->generation < GENERATIONS) { /* else the slot is worn out: its oldest number must not come again */
    s->next = h->free;
    h->free = i;
  }
  h->count--;
  tm_tensor_release(t);
}

int tm_handles_release(tm_handles *h, double handle) {
  if (!tm_handles_at(h, handle)) return TM_ERUNTIME;
  empty_slot(h, (int32_t)(uint32_t)(uint64_t)handle);
  return TM_OK;
}

void tm_handles_sweep(tm_handles *h, const int32_t *dead, int32_t count) {
  for (int32_t k = 0; k < count; k++)
    if (dead[k] > 0 && dead[k] < h->end) empty_slot(h, dead[k]);
  h->since = 0;
  h->trigger = TM_MAX(SWEEP_MIN, SWEEP_PER_LIVE * TM_MIN(h->count, INT32_MAX / 4));
}

int tm_handles_want_sweep(const tm_handles *h) { return h->since > h->trigger; }

void tm_handles_free(tm_handles *h) {
  if (!h) return;
  for (int32_t i = 1; i < h->end; i++) empty_slot(h, i);
  tm_host_free(h->slot);
  tm_host_free(h->used);
  tm_host_free(h);
  __atomic_sub_fetch(&tables, 1, __ATOMIC_RELAXED);
}

int tm_handles_scope(tm_handles *h, int depth) {
  if (depth < 0 || depth > 250) return tm_fail(TM_EVALUE, "scope: nested %d deep, at most 250 are allowed", depth);
  h->depth = depth;
  return TM_OK;
}

int tm_handles_keep(tm_handles *h, double handle, int depth) {
  if (!tm_handles_at(h, handle)) return TM_ERUNTIME;
  h->used[(uint32_t)(uint64_t)handle] = (uint8_t)(1 + depth);
  return TM_OK;
}

int32_t tm_handles_end(const tm_handles *h) { return h->end; }
int32_t tm_handles_count(const tm_handles *h) { return h->count; }
const uint8_t *tm_handles_used(const tm_handles *h) { return h->used; }
