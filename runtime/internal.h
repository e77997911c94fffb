/* internal.h: what the C files of the library share among themselves, and nobody else sees.
** Dims and indices are 0-based everywhere in here; dispatch.c has shifted them. */
#ifndef TMOD_INTERNAL_H
#define TMOD_INTERNAL_H
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tmod.h"

#define TM_KIND(device) ((device) >> 8)
#define TM_DEVICE(kind, index) ((kind) * 256 + (index))
#define TM_DEV_CPU TM_DEVICE(TM_CPU, 0)
#define TM_DEV_META TM_DEVICE(TM_META, 0)
#define TM_IS_FAKE(device) (TM_KIND(device) == TM_META && ((device) & 255)) /* stands for another device (fake.c) */
#define TM_MIN(a, b) ((a) < (b) ? (a) : (b))
#define TM_MAX(a, b) ((a) > (b) ? (a) : (b))
#define TM_LIKELY(x) __builtin_expect(!!(x), 1)
#define TM_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Kernels are compiled for the portable baseline and for wider vectors; the loader picks. The sanitizers'
** runtime is not up yet when the loader asks, so that build is portable only. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(TM_PORTABLE)
#define TM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TM_CLONES
#endif

/* Below this many elements a kernel stays on one thread: waking the pool costs 5-10 us. */
#define TM_PARALLEL_MIN 32768

/* -- errors (error.c) ---------------------------------------------------------------------------- */

/* Records code and sentence for this thread and returns the code. */
int tm_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Puts "name: " before the sentence if it does not begin so already; returns the code recorded. */
int tm_fail_prefix(const char *name);
void *tm_fail_null(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
enum { TM_SAY_COUNT = 8, TM_SAY_SIZE = 192 };
char *tm_say_room(void); /* the next of the thread's rotating buffers, for tm_say */
extern volatile int tm_interrupted;
/* Polls the interrupt request: fails with TM_EINTERRUPT, clearing it. */
static inline int tm_poll(void) { return TM_UNLIKELY(tm_interrupted) && tm_interrupt_take() ? tm_fail(TM_EINTERRUPT, "interrupted") : TM_OK; }

/* -- memory (memory.c) ---------------------------------------------------------------------------- */

extern int tm_shared; /* 1 once a second handle table exists: counts and caches are then guarded */

/* Small host objects (tensors, nodes, tables); counted by tm_memory_fail_at. NULL and TM_EMEM on failure. */
void *tm_host_alloc(size_t bytes);
void *tm_host_realloc(void *p, size_t bytes);
void tm_host_free(void *p);
void *tm_pool_alloc(size_t bytes);           /* small objects that come and go by the million */
void tm_pool_free(void *p, size_t bytes);    /* the size asked for */

static inline void tm_count_up(int *n) {
  if (TM_UNLIKELY(tm_shared)) __atomic_fetch_add(n, 1, __ATOMIC_RELAXED);
  else ++*n;
}
static inline int tm_count_down(int *n) { /* the count that is left */
  if (TM_UNLIKELY(tm_shared)) return __atomic_sub_fetch(n, 1, __ATOMIC_ACQ_REL);
  return --*n;
}

static inline int64_t tm_tally(int64_t *n, int64_t by) { /* counters for specs and ids */
  return TM_UNLIKELY(tm_shared) ? __atomic_add_fetch(n, by, __ATOMIC_RELAXED) : (*n += by);
}

typedef struct tm_storage {
  int refs;
  int device;
  void *data;
  size_t bytes;              /* asked for */
  size_t capacity;           /* of the block, for the cache */
  int64_t version;           /* in-place changes so far */
  int64_t id;
  void (*release)(void *context); /* NULL: the block belongs to the allocator */
  void *context;
} tm_storage;

tm_storage *tm_storage_new(int device, size_t bytes);
tm_storage *tm_storage_foreign(int device, void *data, size_t bytes, void (*release)(void *), void *context);
static inline tm_storage *tm_storage_retain(tm_storage *s) { tm_count_up(&s->refs); return s; }
void tm_storage_release(tm_storage *s);

/* -- tensors (tensor.c) ------------------------------------------------------------------------------ */

typedef struct tm_node tm_node;

/* What the views of one tensor share: its history and geometry, so that an in-place change through any of
** them is seen by all (autograd.c). */
typedef struct tm_viewbase {
  int refs;
  int64_t epoch;             /* in-place changes recorded in the graph */
  tm_node *fn;               /* retained; history of the base */
  int32_t out_nr;
  tm_tensor *leaf;           /* weak: the base, while it is a leaf and alive */
  int32_t ndim;
  int64_t size[TM_MAXDIM], stride[TM_MAXDIM], offset;
} tm_viewbase;

enum { TM_FLAG_REQUIRES_GRAD = 1, TM_FLAG_WRAPPED = 2, TM_FLAG_RETAINS_GRAD = 4, TM_FLAG_INFERENCE = 8, TM_FLAG_VIEW = 16, TM_FLAG_NOGRAD_VIEW = 32,
       TM_FLAG_CUSTOM_VIEW = 64 }; /* shares storage with an input of the custom node that made it */

/* Content: everything that tm_swap_tensors exchanges. */
typedef struct tm_content {
  tm_storage *storage;
  int64_t numel, offset;     /* elements */
  int64_t impl_id;
  tm_node *fn;               /* retained; the node that made it; NULL for a leaf */
  tm_tensor *grad;           /* retained */
  tm_node *acc;              /* weak; accumulates into this leaf */
  tm_viewbase *vb;           /* retained; of a view, and of a base with views */
  struct tm_hooks *hooks;    /* of a leaf */
  int64_t view_epoch;        /* vb->epoch that fn belongs to */
  int32_t out_nr;
  int16_t device;
  int8_t dtype, ndim;
  uint8_t flags, marks;
  int32_t pins;
  int64_t size[TM_MAXDIM], stride[TM_MAXDIM]; /* [ndim] valid */
} tm_content;

struct tm_tensor {
  int refs;
  int32_t slot;              /* in `home`; 0: none */
  tm_handles *home;
  int64_t id, epoch;
  tm_weakref *weak;
  tm_content c;
};

struct tm_weakref {
  tm_tensor *t;
  tm_weakref *next, **at;
  int identity;
};
extern _Thread_local int tm_fake_on;
int tm_fake_find(const char *name);                      /* fake.c: the fake device of this name */
void tm_fake_count(int device, int64_t bytes);
void tm_weakrefs_clear(tm_tensor *t);                    /* convert.c */
void tm_swap_contents(tm_tensor *a, tm_tensor *b);       /* autograd.c: without the checks of tm_swap_tensors */

/* Short names for the fields that kernels read all the time. */
#define T_SIZE(t, i) ((t)->c.size[i])
#define T_STRIDE(t, i) ((t)->c.stride[i])

static inline void *tm_data(const tm_tensor *t) { /* first element; arithmetic on NULL avoided */
  char *p = t->c.storage->data;
  static const int8_t shift[TM_NDTYPE] = {2, 3, 1, 1, 0, 1, 2, 3, 0, 0};
  return p ? p + ((size_t)t->c.offset << shift[t->c.dtype]) : NULL;
}
static inline int tm_is_float(int dtype) { return dtype <= TM_BF16; }
extern int tm_default_float; /* dtype of new floating tensors (pointwise.c) */
int tm_result_dtype(int nin, tm_tensor *const *in); /* of operands together, by PyTorch's rules (pointwise.c) */

tm_tensor *tm_tensor_alloc(void); /* empty content: no storage, ndim 0, numel 1 */
tm_tensor *tm_tensor_empty(int ndim, const int64_t *size, const int64_t *stride, int dtype, int device); /* stride NULL: contiguous */
tm_tensor *tm_tensor_alias(const tm_tensor *t); /* same storage and geometry; no autograd data */
tm_tensor *tm_tensor_scalar(double value, int dtype); /* 0-dim on the CPU */
tm_tensor *tm_tensor_wrapped(double value);     /* a Lua number: int64 if integral, else float64; weakest in promotion */
int tm_tensor_copy_data(tm_tensor *dst, const tm_tensor *src); /* converts dtype; shapes equal; no autograd, no version */
tm_tensor *tm_tensor_cast(const tm_tensor *t, int dtype);      /* new reference; t itself if it has the dtype; no autograd */
tm_tensor *tm_tensor_dense(const tm_tensor *t);                /* contiguous; t itself (retained) if it is; no autograd */
tm_tensor *tm_tensor_to_cpu(const tm_tensor *t);               /* new reference, an alias if it is there; no autograd (format.c) */
int tm_overlap(const tm_tensor *t);                            /* 1 if two positions may share an element (stride 0) */
int64_t tm_numel_of(int ndim, const int64_t *size);            /* -1: overflow */
void tm_contiguous_strides(int ndim, const int64_t *size, int64_t *stride);
int tm_is_contiguous(const tm_tensor *t);
char *tm_shape_text(char *buffer, size_t n, int ndim, const int64_t *size);  /* "(2, 3)", "(4,)", "()" */
/* "float32 (2, 3)" for messages, in one of eight rotating buffers of the thread. */
const char *tm_say(const tm_tensor *t);

/* Drops a tensor's history, gradient and hooks (autograd.c); may free a long graph, without recursion. */
void tm_autograd_drop(tm_tensor *t);
void tm_viewbase_release(tm_viewbase *vb);

/* -- operators (ops.h, dispatch.c) ---------------------------------------------------------------------- */

typedef struct tm_spec { /* of a result, written by the shape rule */
  int ndim, dtype, device;
  int64_t size[TM_MAXDIM];
  int strided;               /* 1: stride holds the wanted strides; 0: contiguous */
  int64_t stride[TM_MAXDIM];
} tm_spec;

typedef struct tm_op tm_op;

typedef struct tm_call {
  const tm_op *op;
  int nin, nout;
  tm_tensor **in;            /* [nin] borrowed; an absent tensor is NULL */
  tm_tensor *out[TM_MAXOUT]; /* [nout] made by dispatch from o[] before the kernel runs */
  tm_spec o[TM_MAXOUT];
  double a[TM_MAXARG];       /* arguments that are no tensors, in the row's order; dims 0-based */
  const int64_t *list[TM_MAXARG]; /* list arguments: a[k] numbers (a[k] = -1: absent) */
  int na;
  int compute;               /* dtype that the shape rule chose for the arithmetic */
  int inplace;               /* out[0] is in[0] */
  tm_tensor *before;         /* in place, and the gradient reads in[0]: its value before the kernel */
  tm_generator *generator;
} tm_call;

typedef int (*tm_infer_fn)(tm_call *c);   /* checks, and fills nout and o[] (a view rule makes out[] itself) */
typedef int (*tm_kernel_fn)(tm_call *c);
typedef struct tm_vjp tm_vjp;
typedef int (*tm_vjp_fn)(tm_vjp *v);

enum tm_argtype { /* see the top of ops.h */
  TM_ARG_TENSOR, TM_ARG_OPTIONAL, TM_ARG_OPERAND, TM_ARG_TENSORS, TM_ARG_NUM, TM_ARG_INT, TM_ARG_BOOL, TM_ARG_DIM,
  TM_ARG_NEWDIM, TM_ARG_DIMS, TM_ARG_INDEX, TM_ARG_SHAPE, TM_ARG_INTS, TM_ARG_DTYPE, TM_ARG_DEVICE, TM_ARG_ENUM, TM_ARG_NODIM /* dim? */
};

struct tm_op {
  const char *name, *signature, *saves, *doc;
  tm_infer_fn infer;
  tm_kernel_fn kernel[TM_NDEVKIND];
  tm_vjp_fn vjp;
  int flags;
  /* decoded from the signature when the library is loaded */
  int nt, na, listarg;       /* fixed tensor arguments, other arguments, 1 if a list of tensors follows */
  uint8_t ttype[TM_MAXIN], atype[TM_MAXARG];
  char tname[TM_MAXIN][16], aname[TM_MAXARG][16];
  uint16_t need[TM_MAXIN];   /* saved things that the gradient of input i reads: bit j input j, bit 8+k result k */
};
extern tm_op tm_ops[];

/* Runs an operator from C: in[nin], a[] as in tm_call. Records in the graph as grad mode says. Results are
** new references in out[]. */
int tm_call_run(tm_call *c);
/* One-result convenience: NULL on failure. lists: list[k] belongs to argument k. */
tm_tensor *tm_op_run(int op, int nin, tm_tensor **in, const double *a, const int64_t *const *list);

enum tm_opcode { /* TM_OP_<name>, generated from the table */
#define TM_OP_ENUM(name, ...) TM_OPC_##name,
#include "ops.h"
  TM_OPS(TM_OP_ENUM, TM_OP_ENUM)
#undef TM_OP_ENUM
  TM_NOPS
};

/* -- element-wise machinery (elementwise.c) --------------------------------------------------------------- */

/* A loop handles n elements: p[0] is the result, p[1..] the operands; s[] strides in elements of the compute
** type (0: one value for all). */
typedef void (*tm_loop_fn)(int64_t n, void *const *p, const int64_t *s, const double *a);
typedef struct tm_loops {
  tm_loop_fn f32, f64, i64;  /* NULL: not defined for that kind of number */
} tm_loops;
/* Runs out[0] = loop(in...) with broadcasting, any strides, any dtypes. Operands of another dtype than
** c->compute are converted block by block (float16/bfloat16 compute in float32, small integers in int64). */
int tm_elementwise(tm_call *c, const tm_loops *loops);
/* dst[n] (dtype) from src[n] (dtype), strides in elements. */
void tm_convert(int64_t n, void *dst, int ddst, int64_t sdst, const void *src, int dsrc, int64_t ssrc);
double tm_load(const void *p, int dtype);        /* one element */
void tm_store(void *p, int dtype, double value); /* integers wrap, as conversions do */

/* Reads position i of an int64 or int32 index tensor, which counts from 1 in memory. 1 and the 0-based position
** in *at if it lies in 1..n; else 0 and the number seen in *at, for the message. */
static inline int tm_position(const void *p, int dtype, int64_t i, int64_t n, int64_t *at) {
  int64_t k = dtype == TM_I64 ? ((const int64_t *)p)[i] : ((const int32_t *)p)[i];
  int ok = (uint64_t)k - 1 < (uint64_t)n;
  *at = k - ok;
  return ok;
}

static inline float tm_f16_to_f32(uint16_t h);
static inline uint16_t tm_f32_to_f16(float f);
static inline float tm_bf16_to_f32(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline uint16_t tm_f32_to_bf16(float f) { /* round to nearest even; NaN stays NaN */
  uint32_t u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline float tm_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, u;
  if (e == 31) u = sign | 0x7f800000 | m << 13;
  else if (e) u = sign | (e + 112) << 23 | m << 13;
  else { /* zero or subnormal: exact in float32 */
    float f = (float)m * 0x1p-24f; memcpy(&u, &f, 4); u |= sign;
  }
  float f; memcpy(&f, &u, 4); return f;
}
static inline uint16_t tm_f32_to_f16(float f) { /* round to nearest even, overflow to infinity */
  uint32_t u; memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000; u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000) { /* subnormal: the float unit rounds for us */
    float a; memcpy(&a, &u, 4); a += 0.5f; memcpy(&u, &a, 4);
    return (uint16_t)(sign | (u - 0x3f000000));
  }
  return (uint16_t)(sign | ((u + 0xfff + ((u >> 13) & 1) - 0x38000000) >> 13));
}

/* -- random (random.c) ------------------------------------------------------------------------------------ */

struct tm_generator { uint64_t seed, offset; };
/* Four 32-bit numbers of block `i` after the generator's offset. */
void tm_philox(uint64_t seed, uint64_t block, uint32_t out[4]);

/* -- gradients (autograd.c, engine.c) --------------------------------------------------------------------------------- */

typedef struct tm_edge { tm_node *node; int32_t out_nr; } tm_edge; /* node NULL: no gradient wanted */

/* Shape of an input or result as the node remembers it; ndim -1: absent. */
typedef struct tm_inmeta {
  int8_t ndim, dtype;
  int16_t device;
  int64_t size[TM_MAXDIM];
} tm_inmeta;

typedef struct tm_layout { int64_t stride[TM_MAXDIM], offset; } tm_layout;

/* An operator's gradient: reads dy[], x[] (saved inputs), y[] (saved results), sets dx[]. Only inputs with
** want[i] need one. A dx of a broadcast shape or another dtype is reduced and converted by the engine. All
** v_ functions take NULL and return NULL, so that formulas need no checks; failures surface at the end. */
struct tm_vjp {
  tm_node *node;
  int nin, nout;
  tm_tensor **dy, **x, **y, **dx;
  const tm_inmeta *xm;       /* shapes and dtypes of the inputs, saved or not */
  const tm_layout *layout;   /* of input 0, for views; else NULL */
  const uint8_t *want;
  const double *a;
  const int64_t *const *list;
  int ntemp, captemp;
  tm_tensor **temp;
  int failed;
};

/* The graph's part in running a call (autograd.c). */
int tm_wants_record(const tm_call *c);             /* grad mode is on and an input requires grad */
int tm_record(tm_call *c);                         /* makes the node of a finished call and ties the results to it */
int tm_record_view(tm_call *c);                    /* the same for a view, and enters it with its base */
int tm_check_inplace(tm_call *c, int *record);     /* may in[0] be changed, and is it recorded? */
int tm_keep_before(tm_call *c);                    /* copies in[0] into c->before if its gradient needs the old value */

/* Keeps `t` (a new reference) until the formula has been evaluated; returns it. */
tm_tensor *v_keep(tm_vjp *v, tm_tensor *t);
tm_tensor *v_run(tm_vjp *v, int op, int nin, tm_tensor **in, const double *a, const int64_t *const *list);
static inline void v_set(tm_vjp *v, int i, tm_tensor *dx) { if (v->want[i]) { v->dx[i] = dx; if (!dx) v->failed = 1; } }

#define V1(name) static inline tm_tensor *v_##name(tm_vjp *v, tm_tensor *x) { return v_run(v, TM_OPC_##name, 1, &x, NULL, NULL); }
#define V2(name) static inline tm_tensor *v_##name(tm_vjp *v, tm_tensor *x, tm_tensor *y) { tm_tensor *in[2] = {x, y}; return v_run(v, TM_OPC_##name, 2, in, NULL, NULL); }
V1(neg) V1(exp) V1(log) V1(sqrt) V1(tanh) V1(sigmoid) V1(sign)
V2(mul) V2(div) V2(matmul) V2(pow) V2(eq) V2(ge) V2(gt) V2(le) V2(lt) V2(ne)
#undef V1
#undef V2
tm_tensor *v_add(tm_vjp *v, tm_tensor *x, tm_tensor *y);
tm_tensor *v_sub(tm_vjp *v, tm_tensor *x, tm_tensor *y);
tm_tensor *v_num(tm_vjp *v, double value);                                   /* a number as an operand */
tm_tensor *v_scale(tm_vjp *v, tm_tensor *x, double by);
tm_tensor *v_shift(tm_vjp *v, tm_tensor *x, double by);                      /* x + by */
tm_tensor *v_where(tm_vjp *v, tm_tensor *c, tm_tensor *x, tm_tensor *y);
tm_tensor *v_sum(tm_vjp *v, tm_tensor *x, int ndims, const int64_t *dims, int keepdim); /* ndims -1: all */
tm_tensor *v_sum1(tm_vjp *v, tm_tensor *x, int dim, int keepdim);
tm_tensor *v_transpose(tm_vjp *v, tm_tensor *x, int d0, int d1);
tm_tensor *v_reshape(tm_vjp *v, tm_tensor *x, int ndim, const int64_t *size);
tm_tensor *v_expand(tm_vjp *v, tm_tensor *x, int ndim, const int64_t *size);
tm_tensor *v_unsqueeze(tm_vjp *v, tm_tensor *x, int dim);
tm_tensor *v_cast(tm_vjp *v, tm_tensor *x, int dtype);
tm_tensor *v_zeros(tm_vjp *v, const tm_inmeta *like);
tm_tensor *v_full(tm_vjp *v, const tm_inmeta *like, double value);

#endif
