/* dispatch.c: the one door to every operator. The table of ops.h becomes tm_ops; a frame from Lua becomes a
** tm_call, with positions shifted to 0-based here and nowhere else; then rule, kernel and graph. */
#include "internal.h"

/* -- the table ------------------------------------------------------------------------------------------- */

#define VJP_diff(name) tm_##name##_vjp
#define VJP_none(name) NULL
#define DECLARE_VJP_diff(name) int tm_##name##_vjp(tm_vjp *v);
#define DECLARE_VJP_none(name)

#define DECLARE_VIEW(name, signature, rule, gradient, saves, flags, doc) \
  int tm_infer_##rule(tm_call *c); \
  DECLARE_VJP_##gradient(name)
#define DECLARE_OP(name, signature, rule, gradient, saves, flags, doc) \
  DECLARE_VIEW(name, signature, rule, gradient, saves, flags, doc) \
  int tm_##name##_cpu(tm_call *c);
TM_OPS(DECLARE_OP, DECLARE_VIEW)

enum { I = TM_OP_INPLACE, O = TM_OP_INPLACE | TM_OP_MUTATES, R = TM_OP_RANDOM, F = TM_OP_FIRST_ORDER, H = TM_OP_NOMETHOD };

#define ROW_OP(name, signature, rule, gradient, saves, flags, doc) \
  {#name, signature, saves, doc, tm_infer_##rule, {tm_##name##_cpu}, VJP_##gradient(name), flags, 0, 0, 0, {0}, {0}, {{0}}, {{0}}, {0}},
#define ROW_VIEW(name, signature, rule, gradient, saves, flags, doc) \
  {#name, signature, saves, doc, tm_infer_##rule, {NULL}, VJP_##gradient(name), flags | TM_OP_VIEW, 0, 0, 0, {0}, {0}, {{0}}, {{0}}, {0}},

tm_op tm_ops[] = {TM_OPS(ROW_OP, ROW_VIEW)};

static const struct {
  const char *name;
  uint8_t type;
} argtypes[] = {{"tensor", TM_ARG_TENSOR}, {"tensor?", TM_ARG_OPTIONAL}, {"operand", TM_ARG_OPERAND}, {"tensors", TM_ARG_TENSORS},
                {"num", TM_ARG_NUM},       {"num?", TM_ARG_NUM},         {"int", TM_ARG_INT},         {"bool", TM_ARG_BOOL},
                {"dim", TM_ARG_DIM},       {"dim?", TM_ARG_NODIM},       {"newdim", TM_ARG_NEWDIM},   {"dims", TM_ARG_DIMS},
                {"dims?", TM_ARG_DIMS},    {"index", TM_ARG_INDEX},      {"shape", TM_ARG_SHAPE},     {"ints", TM_ARG_INTS},
                {"dtype?", TM_ARG_DTYPE},  {"device?", TM_ARG_DEVICE}};

static int argtype(const char *type, size_t n) {
  if (n == 0) return TM_ARG_TENSOR;
  if (!strncmp(type, "enum(", 5)) return TM_ARG_ENUM;
  for (size_t i = 0; i < sizeof argtypes / sizeof *argtypes; i++)
    if (strlen(argtypes[i].name) == n && !strncmp(argtypes[i].name, type, n)) return argtypes[i].type;
  return -1;
}

static void read_signature(tm_op *op) {
  for (const char *s = op->signature; *s;) {
    size_t end = strcspn(s, ","), name = strcspn(s, ":=,"), type = 0;
    if (s[name] == ':') type = strcspn(s + name + 1, "=,");
    int kind = argtype(s + name + 1, type);
    assert(kind >= 0);
    bool tensor = kind == TM_ARG_TENSOR || kind == TM_ARG_OPTIONAL || kind == TM_ARG_OPERAND || kind == TM_ARG_TENSORS;
    char *to = tensor ? op->tname[op->nt] : op->aname[op->na];
    memcpy(to, s, TM_MIN(name, sizeof op->tname[0] - 1));
    if (kind == TM_ARG_TENSORS) op->listarg = 1;
    else if (tensor) op->ttype[op->nt++] = (uint8_t)kind;
    else op->atype[op->na++] = (uint8_t)kind;
    s += end + (s[end] == ',');
    while (*s == ' ') s++;
  }
}

static int saved_bit(const tm_op *op, const char *name, size_t n) {
  if (n == 2 && name[0] == 'y' && name[1] >= '0' && name[1] <= '3') return 8 + name[1] - '0';
  for (int i = 0; i < op->nt + op->listarg; i++)
    if (strlen(op->tname[i]) == n && !strncmp(op->tname[i], name, n)) return i;
  assert(!"a row saves an argument that it does not have");
  return 0;
}

static void read_saves(tm_op *op) { /* "a=b b=a,y0" */
  for (const char *s = op->saves; *s;) {
    size_t eq = strcspn(s, "=");
    int who = saved_bit(op, s, eq);
    for (s += eq + 1; *s && *s != ' ';) {
      size_t n = strcspn(s, ", ");
      op->need[who] |= (uint16_t)(1u << saved_bit(op, s, n));
      s += n + (s[n] == ',');
    }
    s += *s == ' ';
  }
}

__attribute__((constructor)) static void read_table(void) {
  for (int i = 0; i < TM_NOPS; i++) {
    read_signature(&tm_ops[i]);
    read_saves(&tm_ops[i]);
    if (tm_ops[i].vjp) tm_ops[i].flags |= TM_OP_DIFF;
  }
}

int tm_op_count(void) { return TM_NOPS; }
int tm_op_find(const char *name) {
  for (int i = 0; i < TM_NOPS; i++)
    if (!strcmp(tm_ops[i].name, name)) return i;
  return -1;
}
static const tm_op *op_at(int op) { return op >= 0 && op < TM_NOPS ? &tm_ops[op] : NULL; }
const char *tm_op_name(int op) { return op_at(op) ? tm_ops[op].name : NULL; }
const char *tm_op_signature(int op) { return op_at(op) ? tm_ops[op].signature : NULL; }
const char *tm_op_doc(int op) { return op_at(op) ? tm_ops[op].doc : NULL; }
const char *tm_op_saves(int op) { return op_at(op) ? tm_ops[op].saves : NULL; }
int tm_op_flags(int op) { return op_at(op) ? tm_ops[op].flags : 0; }

/* -- running a call ------------------------------------------------------------------------------------------ */

/* Two ranges of one storage meet, without being the same elements in the same order. */
static bool partial_overlap(const tm_tensor *a, const tm_tensor *b) {
  if (a->c.storage != b->c.storage || !a->c.numel || !b->c.numel) return false;
  bool same = a->c.ndim == b->c.ndim && a->c.offset == b->c.offset && a->c.dtype == b->c.dtype;
  for (int i = 0; same && i < a->c.ndim; i++)
    same = a->c.size[i] == b->c.size[i] && (a->c.stride[i] == b->c.stride[i] || a->c.size[i] == 1);
  if (same) return false;
  int64_t la = a->c.offset, lb = b->c.offset, ha = la, hb = lb; /* one dtype per storage in practice: elements compare */
  for (int i = 0; i < a->c.ndim; i++) ha += (a->c.size[i] - 1) * a->c.stride[i];
  for (int i = 0; i < b->c.ndim; i++) hb += (b->c.size[i] - 1) * b->c.stride[i];
  return la <= hb && lb <= ha;
}

static int prepare_inplace(tm_call *c, tm_tensor **moved) {
  tm_tensor *x = c->in[0];
  char a[160];
  if (tm_overlap(x))
    return tm_fail(TM_ERUNTIME, "%s_: several positions of x, %s, share one element (it was expanded); clone it first", c->op->name,
                   tm_say(x));
  if (c->o[0].ndim != x->c.ndim || memcmp(c->o[0].size, x->c.size, (size_t)x->c.ndim * sizeof(int64_t)))
    return tm_fail(TM_ERUNTIME, "%s_: the result has shape %s, which does not fit into x, %s", c->op->name,
                   tm_shape_text(a, sizeof a, c->o[0].ndim, c->o[0].size), tm_say(x));
  if (tm_is_float(c->o[0].dtype) && !tm_is_float(x->c.dtype))
    return tm_fail(TM_ETYPE, "%s_: the result is %s and cannot be stored in x, %s", c->op->name, tm_dtype_name(c->o[0].dtype), tm_say(x));
  if (x->c.dtype == TM_BOOL && c->o[0].dtype != TM_BOOL)
    return tm_fail(TM_ETYPE, "%s_: the result is %s and cannot be stored in x, %s", c->op->name, tm_dtype_name(c->o[0].dtype), tm_say(x));
  /* Index kernels, which alone take more tensors, copy for themselves. */
  for (int i = 1; i < TM_MIN(c->nin, TM_MAXIN); i++)
    if (c->in[i] && partial_overlap(x, c->in[i])) {
      tm_tensor *copy = tm_tensor_empty(c->in[i]->c.ndim, c->in[i]->c.size, NULL, c->in[i]->c.dtype, c->in[i]->c.device);
      if (!copy || tm_tensor_copy_data(copy, c->in[i]) != TM_OK) {
        tm_tensor_release(copy);
        return tm_last_code();
      }
      moved[i] = copy;
    }
  tm_tensor_retain(x);
  c->out[0] = x;
  return TM_OK;
}

static int make_results(tm_call *c) {
  for (int k = 0; k < c->nout; k++) {
    tm_spec *o = &c->o[k];
    c->out[k] = tm_tensor_empty(o->ndim, o->size, o->strided ? o->stride : NULL, o->dtype, o->device);
    if (!c->out[k]) {
      c->nout = k;
      return tm_fail_prefix(c->op->name);
    }
  }
  return TM_OK;
}

static int run_kernel(tm_call *c) {
  int device = c->nout > 0 ? c->out[0]->c.device : c->nin > 0 && c->in[0] ? c->in[0]->c.device : TM_DEV_CPU, kind = TM_KIND(device);
  if (kind == TM_META) return TM_OK;
  if (!c->op->kernel[kind]) return tm_fail(TM_ENOTIMPL, "%s: no kernel for device %s", c->op->name, tm_device_name(device));
  return c->op->kernel[kind](c);
}

int tm_call_run(tm_call *c) {
  const tm_op *op = c->op;
  tm_tensor *moved[TM_MAXIN] = {NULL}, *kept[TM_MAXIN];
  int code, record = 0;
  if (TM_UNLIKELY(tm_interrupted) && tm_interrupt_take()) return tm_fail(TM_EINTERRUPT, "%s: interrupted", op->name);
  if ((op->flags & TM_OP_VIEW) == 0) c->out[0] = NULL;
  c->before = NULL;
  c->nout = 0;
  if ((code = op->infer(c)) != TM_OK) return code;
  if (op->flags & TM_OP_VIEW) {
    if ((code = tm_record_view(c)) != TM_OK) tm_tensor_release(c->out[0]), c->nout = 0;
    return code;
  }
  if (c->inplace && c->nout > 0) {
    if ((code = tm_check_inplace(c, &record)) != TM_OK) return c->nout = 0, code;
    if ((code = prepare_inplace(c, moved)) != TM_OK) {
      c->nout = 0;
      goto done;
    }
    if (record && (code = tm_keep_before(c)) != TM_OK) goto fail;
  } else {
    record = op->vjp && tm_wants_record(c);
    if ((code = make_results(c)) != TM_OK) goto fail;
  }
  bool swapped = false;
  for (int i = 0; i < TM_MIN(c->nin, TM_MAXIN); i++)
    if (moved[i]) kept[i] = c->in[i], c->in[i] = moved[i], swapped = true;
  code = run_kernel(c);
  if (swapped)
    for (int i = 0; i < TM_MIN(c->nin, TM_MAXIN); i++)
      if (moved[i]) c->in[i] = kept[i];
  if (c->inplace && c->nout > 0) c->out[0]->c.storage->version++; /* also after a failure: bytes may have changed */
  if (code != TM_OK) goto fail;
  if (record && (code = tm_record(c)) != TM_OK) goto fail;
  if (TM_UNLIKELY(tm_inference_mode()))
    for (int k = 0; k < c->nout && !c->inplace; k++) c->out[k]->c.flags |= TM_FLAG_INFERENCE;
  goto done;
fail:
  for (int k = 0; k < c->nout; k++) tm_tensor_release(c->out[k]);
  c->nout = 0;
done:
  tm_tensor_release(c->before);
  for (int i = 0; i < TM_MAXIN; i++) tm_tensor_release(moved[i]);
  return code;
}

tm_tensor *tm_op_run(int op, int nin, tm_tensor **in, const double *a, const int64_t *const *list) {
  tm_call c;
  c.op = &tm_ops[op];
  c.nin = nin, c.in = in, c.na = c.op->na, c.inplace = 0, c.generator = NULL;
  for (int k = 0; k < c.na; k++) c.a[k] = a ? a[k] : 0, c.list[k] = list ? list[k] : NULL;
  if (tm_call_run(&c) != TM_OK) return NULL;
  for (int k = 1; k < c.nout; k++) tm_tensor_release(c.out[k]);
  return c.out[0];
}

/* -- from a frame ------------------------------------------------------------------------------------------------ */

typedef struct decoded {
  int64_t number[4 * TM_MAXDIM];
  int used;
} decoded;

static int whole(const tm_op *op, int k, double v, int64_t *out) {
  if (v != floor(v) || fabs(v) > 9007199254740992.0)
    return tm_fail(TM_ETYPE, "%s: %s is %.17g, expected a whole number", op->name, op->aname[k], v);
  *out = (int64_t)v;
  return TM_OK;
}

/* A dim from Lua, 1..n or -n..-1, to 0-based; a 0-dim tensor has one dim for this purpose. */
static int shift_dim(const tm_call *c, int k, double v, int extra, int *out) {
  const tm_tensor *x = c->nin > 0 ? c->in[0] : NULL;
  for (int i = 1; i < c->nin && c->op->nt == 0 && x && x->c.ndim == 1 && x->c.numel == 0; i++) x = c->in[i]; /* cat passes over these */
  int n = TM_MAX((x ? x->c.ndim : 0) + extra, 1);
  int64_t d = 0;
  if (whole(c->op, k, v, &d) != TM_OK) return TM_ETYPE;
  if (d == 0) return tm_fail(TM_EINDEX, "%s: %s is 0; dims count from 1, and -1 is the last", c->op->name, c->op->aname[k]);
  if (d < -n || d > n)
    return tm_fail(TM_EINDEX, "%s: %s is %lld, expected 1 to %d or -%d to -1 for %s", c->op->name, c->op->aname[k], (long long)d, n, n,
                   x ? tm_say(x) : "a number");
  *out = (int)(d > 0 ? d - 1 : d + n);
  return TM_OK;
}

static int decode_list(tm_call *c, int k, const double **from, decoded *to) {
  const tm_op *op = c->op;
  int type = op->atype[k], n = (int)c->a[k];
  if (n < 0) return TM_OK;
  if (n > TM_MAXDIM || to->used + n > 4 * TM_MAXDIM)
    return tm_fail(TM_EVALUE, "%s: %s has %d numbers, at most %d are allowed", op->name, op->aname[k], n, TM_MAXDIM);
  int64_t *list = to->number + to->used;
  uint32_t seen = 0;
  for (int i = 0; i < n; i++) {
    double v = (*from)[i];
    if (type == TM_ARG_DIMS) {
      int d = 0;
      if (shift_dim(c, k, v, 0, &d) != TM_OK) return tm_last_code();
      if (seen >> d & 1) return tm_fail(TM_ERUNTIME, "%s: dim %d appears twice in %s", op->name, d + 1, op->aname[k]);
      seen |= 1u << d;
      list[i] = d;
    } else if (whole(op, k, v, &list[i]) != TM_OK) {
      return TM_ETYPE;
    }
  }
  c->list[k] = list;
  to->used += n;
  *from += n;
  return TM_OK;
}

static int decode_args(tm_call *c, const double **list, decoded *d) {
  const tm_op *op = c->op;
  for (int k = 0; k < op->na; k++) {
    double v = c->a[k];
    int64_t n = 0;
    int dim = 0;
    switch (op->atype[k]) {
    case TM_ARG_NODIM:
      if (isnan(v)) break; /* absent */
      /* fall through */
    case TM_ARG_DIM:
    case TM_ARG_NEWDIM:
      if (shift_dim(c, k, v, op->atype[k] == TM_ARG_NEWDIM, &dim) != TM_OK) return tm_last_code();
      c->a[k] = dim;
      break;
    case TM_ARG_INDEX:
      if (whole(op, k, v, &n) != TM_OK) return TM_ETYPE;
      if (n == 0) return tm_fail(TM_EINDEX, "%s: %s is 0; positions count from 1, and -1 is the last", op->name, op->aname[k]);
      c->a[k] = (double)(n > 0 ? n - 1 : n);
      break;
    case TM_ARG_INT:
      if (whole(op, k, v, &n) != TM_OK) return TM_ETYPE;
      break;
    case TM_ARG_DIMS:
    case TM_ARG_SHAPE:
    case TM_ARG_INTS:
      c->list[k] = NULL;
      if (decode_list(c, k, list, d) != TM_OK) return tm_last_code();
      break;
    default: break;
    }
  }
  return TM_OK;
}

static int decode_tensors(tm_call *c, const tm_frame *f, uint32_t *made) {
  const tm_op *op = c->op;
  int marks = 0;
  for (int i = 0; i < op->nt; i++) {
    double h = f->t[i];
    if (f->numbers >> i & 1 && op->ttype[i] == TM_ARG_OPERAND) {
      if (!(c->in[i] = tm_tensor_wrapped(h))) return TM_EMEM;
      *made |= 1u << i;
    } else if (h == 0) {
      c->in[i] = NULL;
      if (op->ttype[i] != TM_ARG_OPTIONAL) return tm_fail(TM_ETYPE, "%s: %s must be a tensor, got nil", op->name, op->tname[i]);
    } else if (!(c->in[i] = tm_handles_at(f->handles, h))) {
      return tm_fail(TM_ERUNTIME, "%s: %s has been released", op->name, op->tname[i]);
    } else {
      marks |= c->in[i]->c.marks;
    }
  }
  for (int i = 0; i < f->nlist && op->listarg; i++) {
    double h = f->list[i];
    if (h == 0) c->in[op->nt + i] = NULL;
    else if (!(c->in[op->nt + i] = tm_handles_at(f->handles, h)))
      return tm_fail(TM_ERUNTIME, "%s: tensor %d of the list has been released", op->name, i + 1);
    else marks |= c->in[op->nt + i]->c.marks;
  }
  if (TM_UNLIKELY(marks & TM_MARK_WRAPPER))
    return tm_fail(TM_EWRAPPER, "%s: an argument is a wrapper tensor, which only its class can work on", op->name);
  return TM_OK;
}

int tm_dispatch(int opcode, tm_frame *f) {
  tm_tensor *inline_in[TM_MAXIN];
  decoded d;
  tm_call c;
  uint32_t made = 0;
  if (opcode < 0 || opcode >= TM_NOPS) return tm_fail(TM_EVALUE, "there is no operator %d", opcode);
  const tm_op *op = c.op = &tm_ops[opcode];
  int nlist = op->listarg ? TM_MAX(f->nlist, 0) : 0, code;
  c.in = inline_in;
  c.nin = op->nt + nlist;
  c.na = op->na;
  c.inplace = f->inplace;
  c.generator = f->generator;
  d.used = 0;
  if (c.inplace && !(op->flags & TM_OP_INPLACE)) return tm_fail(TM_ENOTIMPL, "%s has no in-place form", op->name);
  if (!c.inplace && (op->flags & TM_OP_MUTATES)) c.inplace = 1;
  if (c.nin > TM_MAXIN && !(c.in = tm_host_alloc((size_t)c.nin * sizeof *c.in))) return TM_EMEM;
  for (int k = 0; k < c.na; k++) c.a[k] = f->a[k];
  const double *list = f->list ? f->list + nlist : NULL;
  if ((code = decode_tensors(&c, f, &made)) == TM_OK && (code = decode_args(&c, &list, &d)) == TM_OK) code = tm_call_run(&c);
  if (code == TM_OK) {
    f->nout = c.inplace ? 0 : c.nout;
    for (int k = 0; k < c.nout; k++) {
      if (c.inplace) {
        tm_tensor_release(c.out[k]);
        continue;
      }
      if (code != TM_OK) tm_tensor_release(c.out[k]);
      else if ((f->out[k] = tm_handles_put(f->handles, c.out[k])) == 0) code = TM_EMEM;
      else f->slot[k] = (int32_t)(uint32_t)(uint64_t)f->out[k];
    }
  }
  for (int i = 0; made; i++, made >>= 1)
    if (made & 1) tm_tensor_release(c.in[i]);
  if (c.in != inline_in) tm_host_free(c.in);
  if (code == TM_OK && (tm_handles_want_sweep(f->handles) || tm_memory_pressure() || tm_anomaly_mode())) return TM_COLLECT;
  return code;
}
