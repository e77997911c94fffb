/* create.c: tensors from nothing. What must stay true: the rules run for every device, so only the kernels
** touch memory, and a dtype or device that is absent (-1) is settled here and nowhere else. */
#include "internal.h"

/* -- rules ---------------------------------------------------------------------------------------- */

/* dtype and device are the last two arguments of every row here. */
static int place(tm_call *c, int dtype) {
  int d = (int)c->a[c->na - 2], device = (int)c->a[c->na - 1];
  c->nout = 1;
  c->o[0].dtype = c->compute = d < 0 ? dtype : d;
  c->o[0].device = device >= 0 ? device : tm_fake_on ? tm_device_fake(TM_DEV_CPU) : TM_DEV_CPU;
  c->o[0].strided = 0;
  return TM_OK;
}

static int vector(tm_call *c, double n) {
  if (!(n < 0x1p53)) return tm_fail(TM_EVALUE, "%s: %g elements are too many", c->op->name, n);
  c->o[0].ndim = 1;
  c->o[0].size[0] = (int64_t)n;
  return TM_OK;
}

static int floating(tm_call *c) {
  if (tm_is_float(c->o[0].dtype)) return TM_OK;
  return tm_fail(TM_ENOTIMPL, "%s: dtype %s, expected a floating one", c->op->name, tm_dtype_name(c->o[0].dtype));
}

/* Rows with a shape, wherever it stands among the arguments. */
int tm_infer_create(tm_call *c) {
  int k = 0;
  while (c->op->atype[k] != TM_ARG_SHAPE) k++;
  place(c, tm_default_float);
  tm_spec *o = &c->o[0];
  if (c->a[k] > TM_MAXDIM) return tm_fail(TM_EVALUE, "%s: %g dims, at most %d are possible", c->op->name, c->a[k], TM_MAXDIM);
  o->ndim = (int)c->a[k];
  for (int i = 0; i < o->ndim; i++) {
    o->size[i] = c->list[k][i];
    if (o->size[i] < 0) return tm_fail(TM_EVALUE, "%s: size %lld in dim %d is negative", c->op->name, (long long)o->size[i], i + 1);
  }
  if (c->op->flags & TM_OP_RANDOM && c->op != &tm_ops[TM_OPC_randint]) return floating(c);
  return TM_OK;
}

/* first, first + step, ... without last: ceil((last - first) / step) numbers. int64 if all three are whole. */
int tm_infer_arange(tm_call *c) {
  double first = c->a[0], last = c->a[1], step = c->a[2], n = ceil((last - first) / step);
  if (!isfinite(first) || !isfinite(last) || !isfinite(step) || step == 0)
    return tm_fail(TM_EVALUE, "arange: first %g, last %g, step %g: expected finite numbers and a step that is not 0", first, last, step);
  if (n < 0) return tm_fail(TM_EVALUE, "arange: step %g leads away from last: first is %g, last is %g", step, first, last);
  int whole = first == floor(first) && last == floor(last) && step == floor(step);
  place(c, whole ? TM_I64 : tm_default_float);
  if (c->o[0].dtype == TM_BOOL) return tm_fail(TM_ENOTIMPL, "arange: dtype bool has no steps");
  return vector(c, n);
}

int tm_infer_linspace(tm_call *c) {
  if (!(c->a[2] >= 0)) return tm_fail(TM_EVALUE, "linspace: steps is %g, expected 0 or more", c->a[2]);
  place(c, tm_default_float);
  if (c->o[0].dtype == TM_BOOL) return tm_fail(TM_ENOTIMPL, "linspace: dtype bool has no steps");
  return vector(c, c->a[2]);
}

int tm_infer_eye(tm_call *c) {
  if (!(c->a[0] >= 0 && c->a[1] >= 0)) return tm_fail(TM_EVALUE, "eye: n is %g, m is %g, expected 0 or more", c->a[0], c->a[1]);
  place(c, tm_default_float);
  int code = vector(c, c->a[0]);
  if (code == TM_OK) code = vector(c, c->a[1]);
  c->o[0].ndim = 2;
  c->o[0].size[0] = (int64_t)c->a[0];
  c->o[0].size[1] = (int64_t)c->a[1];
  return code;
}

/* -- kernels: each writes its result once, so all are bound by memory ------------------------------ */

int tm_empty_cpu(tm_call *c) {
  (void)c;
  return TM_OK;
}

/* n copies of the w bytes at `value`. */
static void repeat(char *p, int64_t n, const void *value, int w) {
  uint64_t v = 0;
  memcpy(&v, value, (size_t)w);
  if (w == 1) memset(p, (int)v, (size_t)n);
  else if (w == 2)
    for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[i] = (uint16_t)v;
  else if (w == 4)
    for (int64_t i = 0; i < n; i++) ((uint32_t *)p)[i] = (uint32_t)v;
  else
    for (int64_t i = 0; i < n; i++) ((uint64_t *)p)[i] = v;
}

int tm_full_cpu(tm_call *c) {
  tm_tensor *y = c->out[0];
  char value[8], *p = tm_data(y);
  int w = tm_dtype_size(y->c.dtype);
  int64_t n = y->c.numel, block = 16384;
  tm_store(value, y->c.dtype, c->a[1]);
#pragma omp parallel for if (n >= TM_PARALLEL_MIN)
  for (int64_t i = 0; i < n; i += block) repeat(p + i * w, TM_MIN(block, n - i), value, w);
  return TM_OK;
}

/* y[i] = first + i * step for i < half, last - (n - 1 - i) * step beyond: exact at both ends. Computed in
** float64 (in int64 where everything is whole), so rounding does not add up. */
static void ramp(tm_tensor *y, double first, double last, double step, int64_t half) {
  int64_t n = y->c.numel;
  int dtype = y->c.dtype, w = tm_dtype_size(dtype);
  int whole = half >= n && first == floor(first) && step == floor(step) && fabs(first) < 0x1p53 && fabs(step) < 0x1p53;
  char *p = tm_data(y);
#pragma omp parallel for if (n >= TM_PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    double v = i < half ? first + (double)i * step : last - (double)(n - 1 - i) * step;
    if (dtype == TM_F32) ((float *)p)[i] = (float)v;
    else if (dtype == TM_F64) ((double *)p)[i] = v;
    else if (dtype == TM_I64 && whole) ((int64_t *)p)[i] = (int64_t)first + i * (int64_t)step;
    else tm_store(p + i * w, dtype, v);
  }
}

int tm_arange_cpu(tm_call *c) {
  ramp(c->out[0], c->a[0], 0, c->a[2], INT64_MAX);
  return TM_OK;
}

int tm_linspace_cpu(tm_call *c) {
  int64_t n = c->out[0]->c.numel;
  ramp(c->out[0], c->a[0], c->a[1], n > 1 ? (c->a[1] - c->a[0]) / (double)(n - 1) : 0, (n + 1) / 2);
  return TM_OK;
}

int tm_eye_cpu(tm_call *c) {
  tm_tensor *y = c->out[0]; /* (n, m) */
  int w = tm_dtype_size(y->c.dtype);
  int64_t m = T_SIZE(y, 1), d = TM_MIN(T_SIZE(y, 0), m);
  char *p = tm_data(y);
  if (y->c.numel) memset(p, 0, (size_t)(y->c.numel * w));
  for (int64_t i = 0; i < d; i++) tm_store(p + i * (m + 1) * w, y->c.dtype, 1);
  return TM_OK;
}
