/* memory.c: blocks of bytes. Freed device blocks wait in a cache binned by size, since fresh pages cost more
** than most kernels; what the collector of Lua cannot see is counted here, so that the binding collects in time.
** Invariant: in_use counts bytes asked for, cached counts capacities of waiting blocks. */
#include <pthread.h>
#include <sys/mman.h>

#include "internal.h"

#if defined(__SANITIZE_ADDRESS__)
enum { CACHING = 0 }; /* a cached block would hide a use after free */
#else
enum { CACHING = 1 };
#endif

enum {
  NBIN = 64 * 4,         /* four sizes for each power of two */
  HUGE_FROM = 4 << 20,   /* bytes; from here blocks ask for huge pages: a page fault each 2 MB, not each 4 KB */
  BUDGET_MIN = 64 << 20, /* bytes that may be allocated between collections */
  HOST_SHARE = 512       /* bytes of handle, storage and node that a small tensor costs beside its data */
};

static struct {
  struct block *bin[NBIN];
  tm_memory_info info;
  double since; /* bytes allocated since the last collection */
  double budget;
  pthread_mutex_t mutex;
} cpu = {.budget = BUDGET_MIN, .mutex = PTHREAD_MUTEX_INITIALIZER};

int tm_shared;
static int64_t fail_at, counted, live_storages, storage_ids;

static void lock(void) {
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_lock(&cpu.mutex);
}
static void unlock(void) {
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_unlock(&cpu.mutex);
}

/* -- failures on demand, for specs -- */

void tm_memory_fail_at(int64_t k) { fail_at = k; }
int64_t tm_memory_allocations(void) { return counted; }
static bool fails(void) {
  ++counted;
  return TM_UNLIKELY(fail_at > 0) && --fail_at == 0;
}

void *tm_host_alloc(size_t bytes) {
  void *p = fails() ? NULL : malloc(bytes ? bytes : 1);
  if (!p) return tm_fail_null(TM_EMEM, "out of memory: %zu bytes of host memory for bookkeeping", bytes);
  return p;
}

void *tm_host_realloc(void *p, size_t bytes) {
  void *q = fails() ? NULL : realloc(p, bytes);
  if (!q) return tm_fail_null(TM_EMEM, "out of memory: %zu bytes of host memory for bookkeeping", bytes);
  return q;
}

void tm_host_free(void *p) { free(p); }

/* -- small objects of known size: tensors, storages, nodes --
** Made and dropped by the million, in the order of Lua's collector, which general allocators answer with
** splitting and merging. A stack of free blocks for each size keeps what was freed last warm in the cache. */

enum { POOL_STEP = 32, POOL_MAX = 1024, SLAB = 64 << 10 };

typedef struct block {
  struct block *next;
} block;

static block *pool[POOL_MAX / POOL_STEP + 1];
static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;

static block *slab(size_t bytes) {
  char *p = malloc(SLAB);
  if (!p) return NULL;
  block *first = NULL;
  for (size_t n = SLAB / bytes; n-- > 0;) {
    block *b = (block *)(p + n * bytes);
    b->next = first;
    first = b;
  }
  return first;
}

void *tm_pool_alloc(size_t bytes) {
  size_t k = (bytes + POOL_STEP - 1) / POOL_STEP;
  if (!CACHING || bytes > POOL_MAX) return tm_host_alloc(bytes);
  if (fails()) return tm_fail_null(TM_EMEM, "out of memory: %zu bytes of host memory for bookkeeping", bytes);
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_lock(&pool_mutex);
  block *b = pool[k];
  if (TM_UNLIKELY(!b)) b = slab(k * POOL_STEP);
  if (b) pool[k] = b->next;
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_unlock(&pool_mutex);
  return b ? b : tm_fail_null(TM_EMEM, "out of memory: %zu bytes of host memory for bookkeeping", bytes);
}

void tm_pool_free(void *p, size_t bytes) {
  if (!p) return;
  if (!CACHING || bytes > POOL_MAX) {
    tm_host_free(p);
    return;
  }
  size_t k = (bytes + POOL_STEP - 1) / POOL_STEP;
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_lock(&pool_mutex);
  ((block *)p)->next = pool[k];
  pool[k] = p;
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_unlock(&pool_mutex);
}

/* -- the cache -- */

/* Bins 4e..4e+3 hold blocks of 2^e * {1, 1.25, 1.5, 1.75} bytes; at most a quarter is lost, and of a large
** block only address space, since pages that nobody touches do not exist. */
static int bin_of(size_t bytes, size_t *capacity) {
  if (bytes < 64) bytes = 64;
  int e = 63 - __builtin_clzll(bytes);
  size_t base = (size_t)1 << e, step = base >> 2, k = (bytes - base + step - 1) / step;
  *capacity = base + k * step;
  return e * 4 + (int)k;
}

static void *fresh(size_t capacity) {
  if (capacity < HUGE_FROM) return aligned_alloc(64, (capacity + 63) & ~(size_t)63);
  size_t align = 2 << 20;
  void *p = aligned_alloc(align, (capacity + align - 1) & ~(align - 1));
#ifdef MADV_HUGEPAGE
  if (p) madvise(p, capacity, MADV_HUGEPAGE);
#endif
  return p;
}

static void drop_cache(void) {
  for (int i = 0; i < NBIN; i++)
    while (cpu.bin[i]) {
      block *b = cpu.bin[i];
      cpu.bin[i] = b->next;
      free(b);
    }
  cpu.info.cached = 0;
}

static void *cpu_alloc(size_t bytes, size_t *capacity) {
  if (bytes > (size_t)1 << 46) return tm_fail_null(TM_EMEM, "out of memory: asked for %.0f bytes", (double)bytes);
  int bin = bin_of(bytes, capacity);
  void *p = NULL;
  lock();
  cpu.info.allocations++;
  cpu.since += (double)(bytes + HOST_SHARE);
  bool refused = fails() || (cpu.info.limit > 0 && cpu.info.in_use + (double)bytes > cpu.info.limit);
  if (!refused && cpu.bin[bin]) {
    p = cpu.bin[bin];
    cpu.bin[bin] = cpu.bin[bin]->next;
    cpu.info.cached -= (double)*capacity;
    cpu.info.cache_hits++;
  } else if (!refused) {
    p = fresh(*capacity);
    if (!p) {
      drop_cache();
      p = fresh(*capacity);
    }
  }
  if (p) {
    cpu.info.in_use += (double)bytes;
    if (cpu.info.in_use > cpu.info.peak) cpu.info.peak = cpu.info.in_use;
  } else {
    tm_fail(TM_EMEM, "out of memory on cpu: asked for %.0f bytes, %.0f in use, %.0f cached, limit %.0f (0: none)", (double)bytes,
            cpu.info.in_use, cpu.info.cached, cpu.info.limit);
  }
  unlock();
  return p;
}

static void cpu_free(void *p, size_t bytes, size_t capacity) {
  lock();
  cpu.info.in_use -= (double)bytes;
  /* The cache may hold half of what was once in use at a time, and 256 MB in any case. A full one is of sizes that
  ** nobody asks for now: it makes room for this one, which somebody did. */
  double most = TM_MAX(cpu.info.peak / 2, 256e6);
  if (CACHING && cpu.info.cached + (double)capacity > most) drop_cache();
  if (CACHING && (double)capacity <= most) {
    size_t c;
    int bin = bin_of(capacity, &c);
    ((block *)p)->next = cpu.bin[bin];
    cpu.bin[bin] = p;
    cpu.info.cached += (double)capacity;
  } else {
    free(p);
  }
  unlock();
}

int tm_memory_pressure(void) { return cpu.since > cpu.budget; }

/* Half of what is live may be allocated anew before the next collection: garbage stays in proportion. */
void tm_memory_collected(void) {
  lock();
  cpu.since = 0;
  cpu.budget = TM_MAX(cpu.info.in_use / 2, BUDGET_MIN);
  unlock();
}

int tm_memory_stats(int device, tm_memory_info *info) {
  if (device != TM_DEV_CPU) return tm_fail(TM_EVALUE, "memory_stats: %s keeps no memory", tm_device_name(device));
  lock();
  *info = cpu.info;
  unlock();
  return TM_OK;
}

void tm_memory_peak_reset(int device) {
  if (device == TM_DEV_CPU) cpu.info.peak = cpu.info.in_use;
}

void tm_memory_limit(int device, double bytes) {
  if (device == TM_DEV_CPU) cpu.info.limit = bytes > 0 ? bytes : 0;
}

void tm_empty_cache(void) {
  lock();
  drop_cache();
  unlock();
}

/* -- storages -- */

enum { SMALL = 64 }; /* bytes that lie in the same block as the storage's head: one allocation less */

static tm_storage *storage_new(int device, size_t bytes, size_t inside) {
  tm_storage *s = tm_pool_alloc(sizeof *s + inside);
  if (!s) return NULL;
  *s = (tm_storage){.refs = 1, .device = device, .bytes = bytes};
  s->id = tm_tally(&storage_ids, 1);
  tm_tally(&live_storages, 1);
  return s;
}

static void storage_free(tm_storage *s, size_t inside) {
  tm_tally(&live_storages, -1);
  tm_pool_free(s, sizeof *s + inside);
}

tm_storage *tm_storage_new(int device, size_t bytes) {
  if (TM_KIND(device) != TM_CPU || bytes == 0) {
    tm_storage *s = storage_new(device, bytes, 0);
    if (s && TM_IS_FAKE(device)) tm_fake_count(device, (int64_t)bytes);
    return s;
  }
  if (bytes <= SMALL && cpu.info.limit == 0) {
    tm_storage *s = storage_new(device, bytes, SMALL);
    if (!s) return NULL;
    s->data = s + 1;
    lock();
    cpu.since += HOST_SHARE;
    cpu.info.in_use += (double)bytes;
    cpu.info.allocations++;
    if (cpu.info.in_use > cpu.info.peak) cpu.info.peak = cpu.info.in_use;
    unlock();
    return s;
  }
  size_t capacity = 0;
  void *data = cpu_alloc(bytes, &capacity);
  tm_storage *s = data ? storage_new(device, bytes, 0) : NULL;
  if (!s && data) cpu_free(data, bytes, capacity);
  if (s) s->data = data, s->capacity = capacity;
  return s;
}

tm_storage *tm_storage_foreign(int device, void *data, size_t bytes, void (*release)(void *), void *context) {
  tm_storage *s = storage_new(device, bytes, 0);
  if (s) s->data = data, s->release = release, s->context = context;
  return s;
}

void tm_storage_release(tm_storage *s) {
  if (!s || tm_count_down(&s->refs) > 0) return;
  bool inside = s->data == s + 1;
  if (inside) {
    lock();
    cpu.info.in_use -= (double)s->bytes;
    unlock();
  } else if (s->release) {
    s->release(s->context);
  } else if (s->capacity) {
    cpu_free(s->data, s->bytes, s->capacity);
  } else if (TM_IS_FAKE(s->device)) {
    tm_fake_count(s->device, -(int64_t)s->bytes);
  }
  storage_free(s, inside ? SMALL : 0);
}

int64_t tm_live_storages(void) { return live_storages; }
