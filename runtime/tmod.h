/* tmod.h: the whole C API of tmod, in the order of use.
**
** The build drops the lines that begin with '#' and keeps the rest as a string (tm_header), which the
** Lua binding hands to ffi.cdef. So constants are enums, and there are no inline bodies and no macros.
**
** What makes something returns it, or NULL. What does something returns TM_OK or another code of tm_code.
** Both leave a sentence for this thread in tm_last_error(). A returned tensor belongs to the caller, who
** releases it once; an argument is borrowed. Axes, positions and indices are 0-based in C. */
#ifndef TMOD_H
#define TMOD_H
#include <stddef.h>
#include <stdint.h>
#pragma GCC visibility push(default)

/* -- Errors -------------------------------------------------------------------------------------
** A code is a class of errors; the sentence names the operator, what was seen and what was expected. */

enum tm_code {
  TM_OK = 0,
  TM_ERUNTIME = 1,   /* RuntimeError: shapes, devices, autograd rules */
  TM_ETYPE = 2,      /* TypeError: a value of the wrong kind */
  TM_EVALUE = 3,     /* ValueError: a value out of its range */
  TM_EINDEX = 4,     /* IndexError: a position that is not there */
  TM_EKEY = 5,       /* KeyError: a name that is not there */
  TM_ENOTIMPL = 6,   /* NotImplementedError: no kernel for this dtype or device */
  TM_EMEM = 7,       /* OutOfMemory: the program goes on */
  TM_EIO = 8,        /* RuntimeError about a file that is not there or cannot be read or written */
  TM_EINTERRUPT = 9, /* Interrupted: tm_interrupt was called */
  TM_EASSERT = 10,   /* AssertionError: a state that only a misused interface can reach */
  TM_COLLECT = 100,  /* success, and a request: collect garbage and sweep (see handles) */
  TM_EWRAPPER = 101  /* not done: an argument is a wrapper, whose class acts for it */
};

const char *tm_last_error(void);  /* valid until this thread's next failure; "" before the first */
int tm_last_code(void);           /* the code that belongs to tm_last_error */
const char *tm_version(void);     /* "major.minor.patch" */
const char *tm_header(void);      /* this file without its '#' lines, for ffi.cdef */

void tm_interrupt(void);       /* async-signal-safe: the next dispatch, engine step or kernel chunk fails with TM_EINTERRUPT */
int tm_interrupt_take(void);   /* 1 and clears the request, if there is one; else 0 */

/* -- Types --------------------------------------------------------------------------------------- */

enum tm_dtype {
  TM_F32, TM_F64, TM_F16, TM_BF16,
  TM_I8, TM_I16, TM_I32, TM_I64, TM_U8, TM_BOOL,
  TM_NDTYPE
};

enum tm_device_kind { TM_CPU, TM_META, TM_CUDA, TM_NDEVKIND };

enum tm_limits {
  TM_MAXDIM = 8,    /* axes of a tensor */
  TM_MAXIN = 8,     /* tensor arguments of an operator, beside a list */
  TM_MAXOUT = 4,    /* results of an operator */
  TM_MAXARG = 12,   /* arguments of an operator that are not tensors */
  TM_MAXLIST = 1024 /* numbers in f->list that every frame can hold */
};

typedef struct tm_tensor tm_tensor;       /* a stable handle; its content can be replaced */
typedef struct tm_handles tm_handles;     /* the table of slots of one Lua state */
typedef struct tm_generator tm_generator; /* Philox4x32-10 state */
typedef struct tm_engine tm_engine;       /* one backward pass */

const char *tm_dtype_name(int dtype);           /* "float32"; NULL out of range */
int tm_dtype_find(const char *name);            /* long ("bfloat16") or short ("bf16") name; -1 if unknown */
int tm_dtype_size(int dtype);                   /* bytes of an element */
int tm_dtype_is_float(int dtype);
int tm_dtype_promote(int a, int b);             /* the dtype that both fit, by PyTorch's table */

int tm_default_dtype(void);                     /* of new floating tensors; float32 unless set */
int tm_default_dtype_set(int dtype);            /* floating dtypes only */

/* A device is kind * 256 + index. */
int tm_device_find(const char *name);           /* "cpu", "meta", "cuda", "cuda:1"; -1 and an error if unknown or not there */
const char *tm_device_name(int device);         /* "cpu", "cuda:1"; static for the thread */

/* -- Life of a tensor -----------------------------------------------------------------------------
** Counts are atomic from the second handle table on (tm_handles_new), plain before. */

tm_tensor *tm_tensor_new(int ndim, const int64_t *size, int dtype, int device); /* uninitialised, contiguous */
void tm_tensor_retain(tm_tensor *t);
void tm_tensor_release(tm_tensor *t);           /* takes NULL */

/* A tensor over foreign memory, which must stay until `release(context)` is called (NULL: for ever).
** `stride` in elements, NULL: contiguous. Alignment must be that of the dtype. */
tm_tensor *tm_tensor_from_blob(void *data, int ndim, const int64_t *size, const int64_t *stride, int dtype,
                               void (*release)(void *context), void *context);

/* -- Shape and data --------------------------------------------------------------------------------
** A tensor is a shape, a stride per axis (in elements) and a storage (in bytes). Views share the storage. */

int tm_tensor_ndim(const tm_tensor *t);
int64_t tm_tensor_size(const tm_tensor *t, int axis);    /* elements; axis < 0 counts from the end; -1 if there is no such axis */
int64_t tm_tensor_stride(const tm_tensor *t, int axis);  /* elements */
int64_t tm_tensor_offset(const tm_tensor *t);            /* elements from the start of the storage */
int64_t tm_tensor_numel(const tm_tensor *t);
int tm_tensor_dtype(const tm_tensor *t);
int tm_tensor_device(const tm_tensor *t);
int tm_tensor_is_contiguous(const tm_tensor *t);
int tm_tensor_is_wrapped_number(const tm_tensor *t);
void *tm_tensor_data(const tm_tensor *t);                /* first element; NULL on meta and for no elements; device memory on cuda */
int64_t tm_tensor_storage_id(const tm_tensor *t);        /* equal for views of one storage */
int64_t tm_tensor_storage_bytes(const tm_tensor *t);
int64_t tm_tensor_version(const tm_tensor *t);           /* in-place changes of the storage so far */
int64_t tm_tensor_id(const tm_tensor *t);                /* of the handle: never changes, never used twice */
int64_t tm_tensor_impl_id(const tm_tensor *t);           /* of the content: travels with tm_swap_tensors */
int tm_tensor_refs(const tm_tensor *t);

int tm_tensor_get(const tm_tensor *t, int64_t linear, double *value); /* element in row-major order, as a number */
int tm_tensor_get_i64(const tm_tensor *t, int64_t linear, int64_t *value);
int tm_tensor_fill(tm_tensor *t, const double *values, int64_t count); /* count == numel, row-major, converted */
/* Row-major elements from `begin` on as numbers; integers beyond 2^53 are an error of kind value. */
int tm_tensor_read(const tm_tensor *t, int64_t begin, int64_t count, double *values);

/* The text of a tensor, as PyTorch prints one; to be freed with tm_string_free. NULL: out of memory. */
char *tm_tensor_format(const tm_tensor *t, int precision, int64_t threshold, int edgeitems, int linewidth);
char *tm_tensor_summary(const tm_tensor *t);  /* "float32 (2, 3)" or "int64 (4,) on meta"; for messages */
void tm_string_free(char *s);

/* Give `t` the storage, geometry, dtype and device of `source`; handle, grad, requires_grad, hooks stay. */
int tm_tensor_set_data(tm_tensor *t, const tm_tensor *source);

/* -- Handles: how Lua names tensors -----------------------------------------------------------------
** A handle is a number: slot + generation * 2^32. Each Lua state has a table of its own. A slot holds one
** reference. A released slot is used again under the next generation, so an old number is an error. The second
** table of a process must be made while no other thread is inside the library: what it guards from then on is
** bare before. */

typedef struct tm_slot {
  tm_tensor *tensor;  /* NULL: free */
  uint32_t generation;
  int32_t next;       /* free list */
} tm_slot;

tm_handles *tm_handles_new(void);
void tm_handles_free(tm_handles *h);                      /* releases every tensor that it names */
double tm_handles_put(tm_handles *h, tm_tensor *t);       /* takes over the reference; one number per tensor; 0: out of memory */
tm_tensor *tm_handles_at(tm_handles *h, double handle);   /* borrowed; NULL and an error if released or never there */
int tm_handles_release(tm_handles *h, double handle);
int32_t tm_handles_end(const tm_handles *h);              /* one past the largest slot ever used; slot 0 is never used */
int32_t tm_handles_count(const tm_handles *h);            /* live */
int tm_handles_want_sweep(const tm_handles *h); /* 1: many tensors were entered since the last sweep */
/* [slot] 0: free, else 1 + the depth of the scope that it was entered in; moves when the table grows. */
const uint8_t *tm_handles_used(const tm_handles *h);
int tm_handles_scope(tm_handles *h, int depth);           /* tensors entered from now on belong to this depth; 0: to none */
int tm_handles_keep(tm_handles *h, double handle, int depth); /* move one to another depth */
void tm_handles_sweep(tm_handles *h, const int32_t *dead, int32_t count); /* release these slots */
int64_t tm_live_tensors(void);   /* tm_tensor handles alive in the process, the graph's included */
int64_t tm_live_storages(void);
int64_t tm_live_nodes(void);     /* nodes of the autograd graph */

/* -- Operators ---------------------------------------------------------------------------------------
** Every operator is a row of ops.h and is called by tm_dispatch. The signature tells what goes where:
** tensors to t[0..], in order; everything else to a[0..], in order. A list (shape, dims, ints) puts its
** length in a[] and its numbers in list[], lists one after the other; a list of tensors puts its length
** in nlist and its handles in list[]. An argument `operand` may be a number: it goes to t[] and its bit
** (1 << position) is set in `numbers`. Absent tensors are 0, absent numbers NaN, absent lists have length -1.
** Dims, indices and positions arrive as Lua has them, 1-based, and are shifted here and nowhere else. */

typedef struct tm_frame {
  tm_handles *handles;
  double t[8];        /* TM_MAXIN */
  double a[12];       /* TM_MAXARG */
  double out[4];      /* TM_MAXOUT: handles of the results */
  int32_t slot[4];    /* their slots */
  int32_t nout;
  uint32_t numbers;
  int32_t inplace;    /* 1: write the result into t[0] (rows that allow it) */
  int32_t nlist;
  double *list;
  tm_generator *generator; /* NULL: the default one of the process */
} tm_frame;

int tm_dispatch(int op, tm_frame *frame);  /* TM_OK, TM_COLLECT or an error */

int tm_op_count(void);
int tm_op_find(const char *name);           /* -1 if there is none */
const char *tm_op_name(int op);
const char *tm_op_signature(int op);        /* "x, dim:dim=-1" */
const char *tm_op_doc(int op);
const char *tm_op_saves(int op);            /* what backward reads: "a=b b=a"; "" if nothing */
enum tm_op_flags { TM_OP_INPLACE = 1, TM_OP_VIEW = 2, TM_OP_DIFF = 4, TM_OP_MUTATES = 8, TM_OP_RANDOM = 16, TM_OP_FIRST_ORDER = 32, TM_OP_NOMETHOD = 64 };
int tm_op_flags(int op);

/* -- Gradients ----------------------------------------------------------------------------------------- */

int tm_grad_mode(void);                 /* of this thread: 1 recording (default) */
int tm_grad_mode_set(int on);           /* returns the old mode */
int tm_inference_mode(void);
int tm_inference_mode_set(int on);
int tm_anomaly_mode(void);
void tm_anomaly_mode_set(int on);

int tm_tensor_requires_grad(const tm_tensor *t);
int tm_tensor_requires_grad_set(tm_tensor *t, int on);  /* leaves only; floating dtypes only */
int tm_tensor_is_leaf(const tm_tensor *t);
int tm_tensor_is_inference(const tm_tensor *t);
tm_tensor *tm_tensor_grad(const tm_tensor *t);          /* borrowed; NULL: none */
int tm_tensor_grad_set(tm_tensor *t, tm_tensor *grad);  /* NULL drops it; shape, dtype and device must fit */
int tm_tensor_retain_grad(tm_tensor *t);                /* non-leaf: keep the gradient of the next backward passes */
int tm_tensor_retains_grad(const tm_tensor *t);
tm_tensor *tm_tensor_detach(const tm_tensor *t);        /* alias: same storage and version, no graph */
int tm_tensor_detach_(tm_tensor *t);                    /* in place; not for views */
const char *tm_tensor_grad_fn(const tm_tensor *t);      /* name of the operator that made it; NULL for a leaf */
int64_t tm_tensor_node_id(const tm_tensor *t);          /* of grad_fn; 0 for a leaf */

/* Hooks are numbers that Lua keeps functions for. On a leaf they belong to the tensor and see this pass's
** gradient before it accumulates; on another tensor they belong to its node. */
int64_t tm_hook_add(tm_tensor *t, int kind);        /* id > 0, or 0 and an error */
int tm_hook_remove(tm_tensor *t, int64_t id);       /* 1 if it was there */
enum tm_hook_kind { TM_HOOK_GRAD, TM_HOOK_POST_ACCUMULATE };

/* A node whose backward Lua runs: `out` are made differentiable functions of `in`. Returns its id, or 0.
** `name` is copied. Outputs that share storage with an input become views that in-place changes refuse. */
int64_t tm_custom_record(const char *name, int nin, tm_tensor *const *in, int nout, tm_tensor *const *out,
                         int nsave, tm_tensor *const *save);
/* A number for what Lua keeps on behalf of C, such as the owner of a blob's memory: with tm_id_bury as release
** function and the number as context, tm_dead_ids tells when the memory is no longer used. */
int64_t tm_id_new(void);
void tm_id_bury(void *id);
/* Ids of custom nodes, node hooks and blobs that were freed since the last call; at most `max`. */
int tm_dead_ids(int64_t *ids, int max);
/* For a collector of reference cycles that pass through the graph: which ids are reached from which tensors. A
** vertex is a node of the graph that Lua keeps something for, or where ways to such nodes part. */
typedef struct tm_links {
  int64_t nvertex;        /* vertices are 1..nvertex */
  int64_t nroot, nedge, nid, room[3];
  int64_t *root;          /* [nroot][2] position in `t` from 0, vertex that it leads to */
  int64_t *edge;          /* [nedge][2] vertex, vertex that it leads to */
  int64_t *id;            /* [nid][2] vertex, id */
} tm_links;

/* Fills `l`, to be freed with tm_links_free also after an error. t[i] may be NULL. */
int tm_links_find(int64_t n, tm_tensor *const *t, tm_links *l);
void tm_links_free(tm_links *l);

enum tm_event_kind {
  TM_EVENT_DONE,            /* the pass is complete */
  TM_EVENT_ERROR,           /* tm_last_error */
  TM_EVENT_HOOK,            /* run hook `id` on grad[0]; resume with its result */
  TM_EVENT_POST_ACCUMULATE, /* run hook `id` on tensor grad[0] */
  TM_EVENT_CUSTOM           /* run custom node `id` on grad[0..n-1] (0: no gradient); resume with its nin gradients */
};

typedef struct tm_event {
  int32_t kind;
  int32_t n;              /* gradients handed over, or received */
  int32_t nin;            /* CUSTOM: gradients expected back */
  int32_t create_graph;
  int64_t id;
  tm_tensor **grad;       /* borrowed while the event is pending */
  tm_tensor **saved;      /* CUSTOM: tensors saved by tm_custom_record, borrowed */
  int32_t nsaved;
} tm_event;

/* A backward pass from `root[0..nroot-1]`. gradient[i] NULL means 1 (roots of one element only). With
** inputs (ninput > 0) only these receive gradients; accumulate = 0 keeps them apart for tm_engine_result. */
tm_engine *tm_engine_new(int nroot, tm_tensor *const *root, tm_tensor *const *gradient, int ninput,
                         tm_tensor *const *input, int retain_graph, int create_graph, int accumulate);
void tm_engine_run(tm_engine *e, tm_event *event);     /* goes on until something that Lua must do, or the end */
/* Answer the pending event: result[i] NULL keeps (HOOK) or means no gradient (CUSTOM). Borrowed. */
int tm_engine_answer(tm_engine *e, int n, tm_tensor *const *result);
tm_tensor *tm_engine_result(tm_engine *e, int i);      /* gradient of input i; new reference; NULL: not reached */
void tm_engine_free(tm_engine *e);

/* Anomaly mode: remember where in the user's program `t` was made, for errors of its backward. */
int tm_tensor_annotate(tm_tensor *t, const char *where);

int tm_zero_grad(int n, tm_tensor *const *t, int set_to_none);

/* -- Conversion of a module's tensors --------------------------------------------------------------------
** A converted tensor reaches its slot by set_data (handle and content stay), by replacement (a new handle) or by
** a swap (the handle stays, its content is new). Two flags of the process choose; see docs/contracts/conversion.md. */

int tm_future_overwrite(void);
void tm_future_overwrite_set(int on);
int tm_future_swap(void);
void tm_future_swap_set(int on);

enum tm_marks { TM_MARK_FAKE = 1, TM_MARK_WRAPPER = 2 }; /* no bytes behind it; a Lua class acts for it */
void tm_tensor_mark_set(tm_tensor *t, int mark, int on);
int tm_tensor_marks(const tm_tensor *t);

int64_t tm_tensor_epoch(const tm_tensor *t);  /* of the handle: changes of its content so far (set_data, swap) */
int tm_tensor_use_count(const tm_tensor *t);  /* of the content: the handle, a live accumulator, pins */
void tm_tensor_pin(tm_tensor *t);             /* a C container relies on this content: swaps refuse */
void tm_tensor_unpin(tm_tensor *t);

typedef struct tm_weakref tm_weakref;
tm_weakref *tm_weakref_new(tm_tensor *t, int identity); /* identity 0: blocks swaps of t */
tm_tensor *tm_weakref_at(const tm_weakref *w);          /* borrowed; NULL once the tensor is gone */
void tm_weakref_free(tm_weakref *w);
int tm_weakref_blocks(const tm_tensor *t);              /* 1: has one that blocks swaps */

int tm_compat_type(const tm_tensor *a, const tm_tensor *b); /* may set_data put b's content into a? */
int tm_can_swap(const tm_tensor *a, const tm_tensor *b);    /* TM_OK or the reason */
int tm_swap_tensors(tm_tensor *a, tm_tensor *b);            /* exchange the contents of two handles, O(1) */
int tm_tensor_rebind(tm_tensor *t, const tm_tensor *source); /* set_data that counts as an in-place change */

enum tm_action { TM_SET_DATA, TM_REPLACE, TM_SWAP };
int tm_convert_decide(int compat, int param_marks, int applied_marks, int overwrite, int swap);

/* A conversion that is built in: dtype (-1: its own; only_floating: for floating tensors), device (-1), memory format
** (tensors of 4 and 5 dims); fresh: new memory without the elements, in any case. */
enum tm_memory_format { TM_PRESERVE, TM_CHANNELS_LAST, TM_CHANNELS_LAST_3D, TM_CONTIGUOUS };
typedef struct tm_convert_spec {
  int32_t dtype, only_floating, device, format, fresh;
} tm_convert_spec;
/* New reference; t itself where nothing changes. Not recorded by autograd. */
tm_tensor *tm_tensor_convert(tm_tensor *t, const tm_convert_spec *spec);

enum tm_slot_kind { TM_SLOT_BUFFER, TM_SLOT_PARAMETER, TM_SLOT_TENSOR }; /* the last: no Parameter in the slot of one */
enum tm_slot_failure { TM_FAILED_GRAD = 1, TM_FAILED_SWAP = 2, TM_FAILED_BUSY = 4 }; /* BUSY: garbage may be in the way */

typedef struct tm_conversion {      /* one slot of a module */
  tm_tensor *param;              /* borrowed: what it holds */
  tm_tensor *applied;            /* borrowed: what that becomes; NULL: as spec says, and its gradient too */
  tm_tensor *applied_grad;       /* borrowed; NULL: the gradient stays as it is */
  const tm_convert_spec *spec;
  int32_t kind;                  /* tm_slot_kind */
  int32_t action, grad_action;   /* out: tm_action */
  int32_t failure;               /* out: tm_slot_failure */
  tm_tensor *result;             /* out: the new handle that belongs in the slot, owned by the caller; NULL: param does */
  int32_t twin;                  /* out: an earlier slot with the same tensor; -1: none */
  int32_t skip;                  /* internal, as what follows */
  tm_tensor *made, *made_grad, *fresh, *fresh_grad;
} tm_conversion;
/* All slots or none, by these flags: *failed is the slot that could not be converted; -1: no slot's fault. */
int tm_apply(int n, tm_conversion *slot, int overwrite, int swap, int *failed);

/* What has the number of a tensor's name in `h`, if it has one there; else 0. */
int32_t tm_tensor_slot(const tm_tensor *t, const tm_handles *h);

/* -- Tensors without memory of their own -----------------------------------------------------------------
** A fake reports a device and has no bytes; in fake mode the names cpu and cuda mean devices of fakes. The outer tensor
** of a wrapper reports what a Lua class says, and the class's inner tensors, kept by number, hold the bytes. */

int tm_fake_mode(void);                        /* of this thread */
int tm_fake_mode_set(int on);                  /* returns the old mode */
int tm_device_fake(int device);                /* the device of fakes that report this one */
int tm_device_reported(int device);            /* and back; other devices as they are */
int tm_fake_memory(int device, double *bytes); /* [2]: bytes that its fakes stand for now, and at the peak */
void tm_fake_peak_reset(int device);
tm_tensor *tm_wrapper_new(int ndim, const int64_t *size, int dtype, int device, int64_t id); /* id goes to tm_id_bury with the last alias */
int64_t tm_wrapper_id(const tm_tensor *t);     /* 0: no wrapper */

/* -- Random numbers --------------------------------------------------------------------------------------
** Philox4x32-10, counter-based: numbers depend on seed and position alone, not on threads. */

tm_generator *tm_generator_new(uint64_t seed);
void tm_generator_free(tm_generator *g);
tm_generator *tm_generator_default(void);
void tm_generator_seed(tm_generator *g, double seed);  /* 0 .. 2^53 */
double tm_generator_initial_seed(const tm_generator *g);
tm_tensor *tm_generator_state(const tm_generator *g);  /* uint8 (16): seed, offset */
int tm_generator_state_set(tm_generator *g, const tm_tensor *state);
double tm_generator_uniform(tm_generator *g);          /* [0, 1), 53 bits */

/* -- Memory, threads, devices ----------------------------------------------------------------------------- */

typedef struct tm_memory_info {
  double in_use, peak, cached, limit; /* bytes; limit 0: none */
  double allocations, cache_hits;     /* counts */
} tm_memory_info;

int tm_memory_stats(int device, tm_memory_info *info);
void tm_memory_peak_reset(int device);
void tm_memory_limit(int device, double bytes);
void tm_empty_cache(void);
/* 1 when as many bytes as the budget (half of what is live, at least 64 MB) were allocated since the last
** tm_memory_collected: time to collect, since a collector sees handles and not bytes. */
int tm_memory_pressure(void);
void tm_memory_collected(void);
void tm_memory_fail_at(int64_t k);  /* testing: the k-th allocation from now fails; 0: never */
int64_t tm_memory_allocations(void); /* allocations so far that tm_memory_fail_at counts */

int tm_num_threads(void);
void tm_num_threads_set(int n);
const char *tm_cpu_capability(void); /* "avx512", "avx2" or "default" */

/* -- Files -------------------------------------------------------------------------------------------------- */

typedef struct tm_file tm_file;  /* a safetensors file, mapped or read */
tm_file *tm_safetensors_open(const char *path, int map);   /* map 0: read into memory */
int64_t tm_file_count(const tm_file *f);
const char *tm_file_name(const tm_file *f, int64_t i);     /* in the order of the header */
tm_tensor *tm_file_tensor(tm_file *f, int64_t i, int device); /* mapped files: shares the mapping, copied on write */
int64_t tm_file_metadata_count(const tm_file *f);
const char *tm_file_metadata(const tm_file *f, int64_t i, int value); /* value 0: the key, 1: the value */
void tm_file_close(tm_file *f);
/* Writes to a temporary file in the same directory, syncs and renames: a crash leaves the old file. */
int tm_safetensors_save(const char *path, int64_t n, const char *const *name, tm_tensor *const *tensor,
                        int64_t nmeta, const char *const *key, const char *const *value);

/* Numbers separated by `separator`, a line per row, plain or gzipped; every row as long as the first.
** float64 (rows, columns). skip: header lines to pass over. */
tm_tensor *tm_csv_read(const char *path, int separator, int64_t skip);
/* An IDX file (Fashion-MNIST and the like), plain or gzipped, with its own dtype and shape. */
tm_tensor *tm_idx_read(const char *path);

#pragma GCC visibility pop
#endif
