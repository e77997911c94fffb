/* fake.c: tensors that stand for memory which is elsewhere: fakes report a device and have no bytes at all, so that a
** conversion can be planned for a device that is not there; the outer tensor of a wrapper reports what a Lua class
** says, and the class's inner tensors hold the bytes. The device of both is of kind TM_META with the device that they
** report as index, so that rules run on them and kernels do not, and they never mix with real tensors. */
#include "internal.h"

enum { CPU_INDEX = 1, CUDA_INDEX = 65, END_INDEX = 129 }; /* 1 + 64 * kind + index; 0 is the meta device itself */

_Thread_local int tm_fake_on;

int tm_fake_mode(void) { return tm_fake_on; }
int tm_fake_mode_set(int on) {
  int was = tm_fake_on;
  tm_fake_on = on != 0;
  return was;
}

int tm_device_fake(int device) {
  switch (TM_KIND(device)) {
  case TM_CPU: return TM_DEVICE(TM_META, CPU_INDEX);
  case TM_CUDA: return TM_DEVICE(TM_META, CUDA_INDEX + (device & 63));
  default: return device;
  }
}

int tm_device_reported(int device) {
  int index = device & 255;
  if (!TM_IS_FAKE(device)) return device;
  return index >= CUDA_INDEX ? TM_DEVICE(TM_CUDA, index - CUDA_INDEX) : TM_DEV_CPU;
}

int tm_fake_find(const char *name) {
  if (!strncmp(name, "cpu", 3)) return tm_device_fake(TM_DEV_CPU);
  char *end = (char *)name + 4;
  long index = name[4] == ':' ? strtol(name + 5, &end, 10) : 0;
  if (*end || end == name + 5 || index < 0 || index >= END_INDEX - CUDA_INDEX)
    return tm_fail(TM_EVALUE, "device \"%s\": expected cuda or cuda:N, N from 0 to %d", name, END_INDEX - CUDA_INDEX - 1), -1;
  return tm_device_fake(TM_DEVICE(TM_CUDA, (int)index));
}

/* -- bytes that fakes would take, by device -- */

static int64_t in_use[END_INDEX], peak[END_INDEX];

void tm_fake_count(int device, int64_t bytes) {
  int i = device & 255;
  int64_t now = tm_tally(&in_use[i], bytes);
  if (now > peak[i]) peak[i] = now;
}

int tm_fake_memory(int device, double *bytes) {
  if (!TM_IS_FAKE(device)) return tm_fail(TM_EVALUE, "fake_memory: %s is no fake device", tm_device_name(device));
  bytes[0] = (double)in_use[device & 255], bytes[1] = (double)peak[device & 255];
  return TM_OK;
}

void tm_fake_peak_reset(int device) {
  if (TM_IS_FAKE(device)) peak[device & 255] = in_use[device & 255];
}

/* -- wrappers -- */

tm_tensor *tm_wrapper_new(int ndim, const int64_t *size, int dtype, int device, int64_t id) {
  char text[128];
  if (ndim < 0 || ndim > TM_MAXDIM) return tm_fail_null(TM_EVALUE, "wrapper: %d dims, expected 0 to %d", ndim, TM_MAXDIM);
  int64_t numel = tm_numel_of(ndim, size);
  if (numel < 0) return tm_fail_null(TM_EVALUE, "wrapper: shape %s", tm_shape_text(text, sizeof text, ndim, size));
  tm_tensor *t = tm_tensor_alloc();
  if (!t) return NULL;
  t->c.ndim = (int8_t)ndim, t->c.dtype = (int8_t)dtype, t->c.numel = numel;
  t->c.device = (int16_t)tm_device_fake(device);
  t->c.marks = (uint8_t)(TM_MARK_WRAPPER | (TM_IS_FAKE(device) ? TM_MARK_FAKE : 0));
  for (int i = 0; i < ndim; i++) t->c.size[i] = size[i];
  tm_contiguous_strides(ndim, size, t->c.stride);
  /* The storage tells Lua when the last alias is gone, and with it the need for the inner tensors. */
  t->c.storage = tm_storage_foreign(t->c.device, NULL, 0, tm_id_bury, (void *)(intptr_t)id);
  if (t->c.storage) return t;
  tm_tensor_release(t);
  return NULL;
}

int64_t tm_wrapper_id(const tm_tensor *t) { return t->c.marks & TM_MARK_WRAPPER ? (intptr_t)t->c.storage->context : 0; }
