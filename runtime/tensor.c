/* tensor.c: handles, their contents, and element types. What must stay true: a handle's identity outlives any
** change of its content, and views share a storage and so its version. */
#include "internal.h"

/* -- dtypes and devices -- */

static const struct {
  const char *name, *brief;
  int size;
} types[TM_NDTYPE] = {
    {"float32", "f32", 4}, {"float64", "f64", 8}, {"float16", "f16", 2}, {"bfloat16", "bf16", 2}, {"int8", "i8", 1},
    {"int16", "i16", 2},   {"int32", "i32", 4},   {"int64", "i64", 8},   {"uint8", "u8", 1},      {"bool", "bool", 1},
};

const char *tm_dtype_name(int dtype) { return dtype >= 0 && dtype < TM_NDTYPE ? types[dtype].name : NULL; }
int tm_dtype_size(int dtype) { return dtype >= 0 && dtype < TM_NDTYPE ? types[dtype].size : 0; }
int tm_dtype_is_float(int dtype) { return dtype >= 0 && tm_is_float(dtype); }

int tm_dtype_find(const char *name) {
  static const struct {
    const char *name;
    int dtype;
  } also[] = {{"float", TM_F32}, {"double", TM_F64}, {"half", TM_F16}, {"int", TM_I32}, {"long", TM_I64}, {"short", TM_I16}};
  for (int i = 0; i < TM_NDTYPE; i++)
    if (!strcmp(name, types[i].name) || !strcmp(name, types[i].brief)) return i;
  for (size_t i = 0; i < sizeof also / sizeof *also; i++)
    if (!strcmp(name, also[i].name)) return also[i].dtype;
  return -1;
}

/* PyTorch's table: the wider of two floats, but float16 with bfloat16 is float32; any float beats any integer;
** the wider of two integers, but uint8 with int8 is int16. */
int tm_dtype_promote(int a, int b) {
  if (a == b) return a;
  if (tm_is_float(a) || tm_is_float(b)) {
    if (!tm_is_float(a)) return b;
    if (!tm_is_float(b)) return a;
    return a == TM_F64 || b == TM_F64 ? TM_F64 : TM_F32;
  }
  if (a == TM_BOOL) return b;
  if (b == TM_BOOL) return a;
  if (a == TM_U8 || b == TM_U8) return TM_MAX(a == TM_U8 ? b : a, TM_I16);
  return TM_MAX(a, b);
}

int tm_device_find(const char *name) {
  if (tm_fake_on && (!strcmp(name, "cpu") || !strcmp(name, "cpu:0") || !strncmp(name, "cuda", 4))) return tm_fake_find(name);
  if (!strcmp(name, "cpu") || !strcmp(name, "cpu:0")) return TM_DEV_CPU;
  if (!strcmp(name, "meta")) return TM_DEV_META;
  if (!strncmp(name, "cuda", 4)) return tm_fail(TM_ERUNTIME, "device \"%s\": this build has no CUDA back end", name), -1;
  return tm_fail(TM_EVALUE, "device \"%s\": expected cpu, meta, cuda or cuda:N", name), -1;
}

const char *tm_device_name(int device) {
  static _Thread_local char text[16];
  device = tm_device_reported(device);
  switch (TM_KIND(device)) {
  case TM_CPU: return "cpu";
  case TM_META: return "meta";
  case TM_CUDA: snprintf(text, sizeof text, "cuda:%d", device & 255); return text;
  default: return "?";
  }
}

/* -- life -- */

static int64_t live_tensors, ids, impl_ids;

tm_tensor *tm_tensor_alloc(void) {
  tm_tensor *t = tm_pool_alloc(sizeof *t);
  if (!t) return NULL;
  t->refs = 1;
  t->slot = 0;
  t->home = NULL;
  t->id = tm_tally(&ids, 1);
  t->epoch = 0;
  t->weak = NULL;
  memset(&t->c, 0, offsetof(tm_content, size)); /* sizes and strides are written up to ndim */
  t->c.numel = 1;
  t->c.impl_id = tm_tally(&impl_ids, 1);
  tm_tally(&live_tensors, 1);
  return t;
}

void tm_tensor_retain(tm_tensor *t) { tm_count_up(&t->refs); }

void tm_tensor_release(tm_tensor *t) {
  if (!t || tm_count_down(&t->refs) > 0) return;
  tm_content *c = &t->c;
  if (TM_UNLIKELY(t->weak)) tm_weakrefs_clear(t);
  if (c->fn || c->grad || c->vb || c->hooks || c->acc) tm_autograd_drop(t);
  tm_storage_release(c->storage);
  tm_tally(&live_tensors, -1);
  tm_pool_free(t, sizeof *t);
}

int64_t tm_live_tensors(void) { return live_tensors; }

int64_t tm_numel_of(int ndim, const int64_t *size) {
  int64_t n = 1;
  bool zero = false;
  for (int i = 0; i < ndim; i++) {
    if (size[i] < 0) return -1;
    if (size[i] == 0) zero = true;
    else if (__builtin_mul_overflow(n, size[i], &n)) return -1;
  }
  return zero ? 0 : n;
}

void tm_contiguous_strides(int ndim, const int64_t *size, int64_t *stride) {
  int64_t n = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    stride[i] = n;
    n *= TM_MAX(size[i], 1);
  }
}

tm_tensor *tm_tensor_empty(int ndim, const int64_t *size, const int64_t *stride, int dtype, int device) {
  int64_t numel = tm_numel_of(ndim, size), bytes;
  char text[128];
  if (numel < 0 || __builtin_mul_overflow(numel, (int64_t)types[dtype].size, &bytes))
    return tm_fail_null(TM_EVALUE, "a tensor of shape %s has negative or too many elements", tm_shape_text(text, sizeof text, ndim, size));
  tm_tensor *t = tm_tensor_alloc();
  if (!t) return NULL;
  t->c.ndim = (int8_t)ndim;
  t->c.dtype = (int8_t)dtype;
  t->c.device = (int16_t)device;
  t->c.marks = TM_IS_FAKE(device) ? TM_MARK_FAKE : 0;
  t->c.numel = numel;
  for (int i = 0; i < ndim; i++) t->c.size[i] = size[i];
  if (stride) memcpy(t->c.stride, stride, (size_t)ndim * sizeof *stride);
  else tm_contiguous_strides(ndim, size, t->c.stride);
  t->c.storage = tm_storage_new(device, (size_t)bytes);
  if (t->c.storage) return t;
  tm_tensor_release(t);
  return NULL;
}

tm_tensor *tm_tensor_new(int ndim, const int64_t *size, int dtype, int device) {
  if (ndim < 0 || ndim > TM_MAXDIM) return tm_fail_null(TM_EVALUE, "tensor: %d dims, expected 0 to %d", ndim, TM_MAXDIM);
  if (!tm_dtype_name(dtype)) return tm_fail_null(TM_EVALUE, "tensor: no dtype %d", dtype);
  if (device < 0 || TM_KIND(device) >= TM_NDEVKIND) return tm_fail_null(TM_EVALUE, "tensor: no device %d", device);
  return tm_tensor_empty(ndim, size, NULL, dtype, device);
}

tm_tensor *tm_tensor_alias(const tm_tensor *t) {
  tm_tensor *a = tm_tensor_alloc();
  if (!a) return NULL;
  int64_t impl_id = a->c.impl_id;
  a->c = t->c;
  a->c.impl_id = impl_id;
  a->c.fn = NULL, a->c.grad = NULL, a->c.acc = NULL, a->c.vb = NULL, a->c.hooks = NULL;
  a->c.out_nr = 0, a->c.view_epoch = 0;
  a->c.pins = 0;
  a->c.flags = t->c.flags & (TM_FLAG_WRAPPED | TM_FLAG_INFERENCE);
  tm_storage_retain(a->c.storage);
  return a;
}

tm_tensor *tm_tensor_scalar(double value, int dtype) {
  tm_tensor *t = tm_tensor_empty(0, NULL, NULL, dtype, TM_DEV_CPU);
  if (t) tm_store(t->c.storage->data, dtype, value);
  return t;
}

/* Lua has one kind of number: an integral one acts as an integer, so that int tensors stay int. */
tm_tensor *tm_tensor_wrapped(double value) {
  bool integral = value == floor(value) && fabs(value) <= 9007199254740992.0;
  tm_tensor *t = tm_tensor_scalar(value, integral ? TM_I64 : TM_F64);
  if (t) t->c.flags |= TM_FLAG_WRAPPED;
  return t;
}

tm_tensor *tm_tensor_from_blob(void *data, int ndim, const int64_t *size, const int64_t *stride, int dtype, void (*release)(void *),
                               void *context) {
  if (ndim < 0 || ndim > TM_MAXDIM) return tm_fail_null(TM_EVALUE, "from_blob: %d dims, expected 0 to %d", ndim, TM_MAXDIM);
  if (!tm_dtype_name(dtype)) return tm_fail_null(TM_EVALUE, "from_blob: no dtype %d", dtype);
  int64_t numel = tm_numel_of(ndim, size), end = 1, reach, bytes; /* end: one past the furthest element */
  char text[128];
  if (numel < 0) return tm_fail_null(TM_EVALUE, "from_blob: shape %s", tm_shape_text(text, sizeof text, ndim, size));
  if (!data && numel > 0) return tm_fail_null(TM_EVALUE, "from_blob: no data for shape %s", tm_shape_text(text, sizeof text, ndim, size));
  if ((uintptr_t)data % (uintptr_t)types[dtype].size)
    return tm_fail_null(TM_EVALUE, "from_blob: address %p is not aligned for %s", data, types[dtype].name);
  bool far = false;
  for (int i = 0; stride && i < ndim; i++) {
    if (stride[i] < 0) return tm_fail_null(TM_EVALUE, "from_blob: stride %lld of dim %d is negative", (long long)stride[i], i + 1);
    if (numel) far |= __builtin_mul_overflow(size[i] - 1, stride[i], &reach) || __builtin_add_overflow(end, reach, &end);
  }
  far = far || __builtin_mul_overflow(stride && numel ? end : numel, (int64_t)types[dtype].size, &bytes);
  if (far) return tm_fail_null(TM_EVALUE, "from_blob: shape %s reaches too far", tm_shape_text(text, sizeof text, ndim, size));
  tm_tensor *t = tm_tensor_alloc();
  if (!t) return NULL;
  t->c.ndim = (int8_t)ndim, t->c.dtype = (int8_t)dtype, t->c.numel = numel;
  for (int i = 0; i < ndim; i++) t->c.size[i] = size[i];
  if (stride) memcpy(t->c.stride, stride, (size_t)ndim * sizeof *stride);
  else tm_contiguous_strides(ndim, size, t->c.stride);
  t->c.storage = tm_storage_foreign(TM_DEV_CPU, data, (size_t)bytes, release, context);
  if (t->c.storage) return t;
  tm_tensor_release(t);
  return NULL;
}

/* -- geometry -- */

int tm_tensor_ndim(const tm_tensor *t) { return t->c.ndim; }
static int axis_of(const tm_tensor *t, int axis) { return axis < 0 ? axis + t->c.ndim : axis; }
int64_t tm_tensor_size(const tm_tensor *t, int axis) {
  axis = axis_of(t, axis);
  return axis >= 0 && axis < t->c.ndim ? t->c.size[axis] : -1;
}
int64_t tm_tensor_stride(const tm_tensor *t, int axis) {
  axis = axis_of(t, axis);
  return axis >= 0 && axis < t->c.ndim ? t->c.stride[axis] : -1;
}
int64_t tm_tensor_offset(const tm_tensor *t) { return t->c.offset; }
int64_t tm_tensor_numel(const tm_tensor *t) { return t->c.numel; }
int tm_tensor_dtype(const tm_tensor *t) { return t->c.dtype; }
int tm_tensor_device(const tm_tensor *t) { return t->c.device; }
int tm_tensor_is_contiguous(const tm_tensor *t) { return tm_is_contiguous(t); }
int tm_tensor_is_wrapped_number(const tm_tensor *t) { return (t->c.flags & TM_FLAG_WRAPPED) != 0; }
void *tm_tensor_data(const tm_tensor *t) { return t->c.numel ? tm_data(t) : NULL; }
int64_t tm_tensor_storage_id(const tm_tensor *t) { return t->c.storage->id; }
int64_t tm_tensor_storage_bytes(const tm_tensor *t) { return (int64_t)t->c.storage->bytes; }
int64_t tm_tensor_version(const tm_tensor *t) { return t->c.storage->version; }
int64_t tm_tensor_id(const tm_tensor *t) { return t->id; }
int64_t tm_tensor_impl_id(const tm_tensor *t) { return t->c.impl_id; }
int tm_tensor_refs(const tm_tensor *t) { return t->refs; }

int tm_is_contiguous(const tm_tensor *t) {
  int64_t n = 1;
  if (t->c.numel == 0) return 1;
  for (int i = t->c.ndim - 1; i >= 0; i--) {
    if (t->c.size[i] == 1) continue;
    if (t->c.stride[i] != n) return 0;
    n *= t->c.size[i];
  }
  return 1;
}

int tm_overlap(const tm_tensor *t) {
  for (int i = 0; i < t->c.ndim; i++)
    if (t->c.size[i] > 1 && t->c.stride[i] == 0) return 1;
  return 0;
}

tm_tensor *tm_tensor_cast(const tm_tensor *t, int dtype) {
  if (t->c.dtype == dtype) {
    tm_tensor_retain((tm_tensor *)t);
    return (tm_tensor *)t;
  }
  tm_tensor *r = tm_tensor_empty(t->c.ndim, t->c.size, NULL, dtype, t->c.device);
  if (r && tm_tensor_copy_data(r, t) != TM_OK) tm_tensor_release(r), r = NULL;
  return r;
}

tm_tensor *tm_tensor_dense(const tm_tensor *t) {
  if (tm_is_contiguous(t)) {
    tm_tensor_retain((tm_tensor *)t);
    return (tm_tensor *)t;
  }
  tm_tensor *r = tm_tensor_empty(t->c.ndim, t->c.size, NULL, t->c.dtype, t->c.device);
  if (r && tm_tensor_copy_data(r, t) != TM_OK) tm_tensor_release(r), r = NULL;
  return r;
}

/* -- elements -- */

static const char *element_at(const tm_tensor *t, int64_t linear) {
  int64_t at = 0;
  for (int i = t->c.ndim - 1; i >= 0; i--) {
    at += linear % t->c.size[i] * t->c.stride[i];
    linear /= t->c.size[i];
  }
  return (const char *)tm_data(t) + at * types[t->c.dtype].size;
}

static int readable(const tm_tensor *t, const char *what, int64_t begin, int64_t count) {
  if (TM_KIND(t->c.device) != TM_CPU) return tm_fail(TM_ENOTIMPL, "%s: %s has no elements that can be read", what, tm_say(t));
  if (begin < 0 || count < 0 || begin + count > t->c.numel)
    return tm_fail(TM_EINDEX, "%s: elements %lld to %lld of %s", what, (long long)begin, (long long)(begin + count), tm_say(t));
  return TM_OK;
}

int tm_tensor_get_i64(const tm_tensor *t, int64_t linear, int64_t *value) {
  if (readable(t, "item_i64", linear, 1) != TM_OK) return tm_last_code();
  const char *p = element_at(t, linear);
  if (t->c.dtype == TM_I64) memcpy(value, p, 8);
  else *value = (int64_t)tm_load(p, t->c.dtype);
  return TM_OK;
}

static int check_exact(int64_t v, const char *what) {
  if (v > 9007199254740992 || v < -9007199254740992)
    return tm_fail(TM_EVALUE, "%s: %lld is beyond 2^53 and no exact Lua number; item_i64 gives it as int64", what, (long long)v);
  return TM_OK;
}

static int read_numbers(const tm_tensor *t, const char *what, int64_t begin, int64_t count, double *values) {
  if (readable(t, what, begin, count) != TM_OK) return tm_last_code();
  int64_t index[TM_MAXDIM], at = 0, rest = begin;
  if (count == 0) return TM_OK;
  for (int i = t->c.ndim - 1; i >= 0; i--) {
    index[i] = rest % t->c.size[i];
    at += index[i] * t->c.stride[i];
    rest /= t->c.size[i];
  }
  const char *p = tm_data(t);
  int dtype = t->c.dtype, bytes = types[dtype].size;
  for (int64_t k = 0; k < count; k++) {
    const char *e = p + at * bytes;
    if (dtype == TM_I64) {
      int64_t v;
      memcpy(&v, e, 8);
      if (check_exact(v, what) != TM_OK) return TM_EVALUE;
      values[k] = (double)v;
    } else {
      double v = tm_load(e, dtype);
      values[k] = v == v ? v : NAN; /* other NaNs look like pointers to LuaJIT: SLEEF makes some, and empty has any */
    }
    for (int i = t->c.ndim - 1; i >= 0; i--) { /* next position, row-major */
      at += t->c.stride[i];
      if (++index[i] < t->c.size[i]) break;
      at -= index[i] * t->c.stride[i];
      index[i] = 0;
    }
  }
  return TM_OK;
}

int tm_tensor_read(const tm_tensor *t, int64_t begin, int64_t count, double *values) {
  return read_numbers(t, "tolist", begin, count, values);
}
int tm_tensor_get(const tm_tensor *t, int64_t linear, double *value) { return read_numbers(t, "item", linear, 1, value); }

int tm_tensor_fill(tm_tensor *t, const double *values, int64_t count) {
  if (count != t->c.numel) return tm_fail(TM_EVALUE, "fill: %lld values for %s", (long long)count, tm_say(t));
  if (t->c.marks & TM_MARK_FAKE) return TM_OK;
  if (!tm_is_contiguous(t) || TM_KIND(t->c.device) != TM_CPU)
    return tm_fail(TM_EVALUE, "fill: %s must be contiguous and on the cpu", tm_say(t));
  if (count > 0) tm_convert(count, tm_data(t), t->c.dtype, 1, values, TM_F64, 1);
  t->c.storage->version++;
  return TM_OK;
}

/* -- text for messages -- */

char *tm_shape_text(char *buffer, size_t n, int ndim, const int64_t *size) {
  size_t at = 0;
  buffer[0] = 0;
  for (int i = 0; i < ndim && at < n; i++) at += (size_t)snprintf(buffer + at, n - at, "%s%lld", i ? ", " : "(", (long long)size[i]);
  if (at < n) snprintf(buffer + at, n - at, ndim == 0 ? "()" : ndim == 1 ? ",)" : ")");
  return buffer;
}

const char *tm_say(const tm_tensor *t) {
  char *b = tm_say_room(), shape[160];
  int cpu = TM_KIND(t->c.device) == TM_CPU, marks = t->c.marks;
  snprintf(b, TM_SAY_SIZE, "%s %s%s%s%s", types[t->c.dtype].name, tm_shape_text(shape, sizeof shape, t->c.ndim, t->c.size),
           cpu ? "" : " on ", cpu ? "" : tm_device_name(t->c.device),
           marks & TM_MARK_WRAPPER ? " (wrapper)"
           : marks                 ? " (fake)"
                                   : "");
  return b;
}
