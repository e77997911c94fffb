/* safetensors.c: checkpoints, read and written.
**
** The file: length of the header (8 bytes, little-endian), the header (a JSON object, padded with spaces), the
** data. The header maps a name to {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from the
** start of the data; "__metadata__" maps strings to strings. The entries cover the data without gap or overlap.
**
** A file is hostile until every entry has been checked, which happens when it is opened. Mapped tensors have
** a storage each, so that their version counters stay apart, and share one private mapping: writing to them
** changes memory and never the file. Saving writes what the Python library would, byte for byte (it orders
** several metadata keys by chance; here they are sorted). */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors.c copies elements as they are, which needs a little-endian machine"
#endif

static const int64_t header_limit = 100 << 20; /* bytes; the format's own limit is 100 MB */
static const int64_t chunk = 64 << 20;         /* bytes between two looks at the interrupt flag */

/* In the order in which the Python library writes tensors; the names of the format. */
static const struct {
  const char *name;
  int dtype;
} types[] = {
    {"I64", TM_I64}, {"F64", TM_F64}, {"F32", TM_F32}, {"I32", TM_I32}, {"BF16", TM_BF16},
    {"F16", TM_F16}, {"I16", TM_I16}, {"I8", TM_I8},   {"U8", TM_U8},   {"BOOL", TM_BOOL},
};
enum { NTYPES = sizeof types / sizeof *types };

/* -- reading ------------------------------------------------------------------------------------------------ */

typedef struct mapping {
  int refs; /* the file's own and one per tensor */
  char *base;
  size_t bytes;
} mapping;

typedef struct entry {
  const char *name; /* in the JSON tree */
  int dtype, ndim;
  int64_t size[TM_MAXDIM];
  int64_t begin, end; /* bytes from the start of the data */
} entry;

struct tm_file {
  char *path;
  int fd; /* -1: mapped */
  mapping *map;
  int64_t data;  /* bytes before the data */
  int64_t bytes; /* of the data */
  json_t *header;
  int64_t count, nmeta;
  entry *entry;      /* [count] in the header's order */
  const char **meta; /* [nmeta][2] */
};

static void mapping_release(void *context) {
  mapping *m = context;
  if (!m || tm_count_down(&m->refs) > 0) return;
  munmap(m->base, m->bytes);
  tm_host_free(m);
}

/* Reads n bytes at `at`; the file had them when it was opened. */
static int read_at(tm_file *f, void *p, int64_t n, int64_t at) {
  for (char *to = p; n > 0;) {
    ssize_t got = pread(f->fd, to, (size_t)TM_MIN(n, chunk), at);
    if (got < 0 && errno == EINTR) got = 0;
    else if (got < 0) return tm_fail(TM_EIO, "%s: %s", f->path, strerror(errno));
    else if (got == 0)
      return tm_fail(TM_EIO, "%s: the file has become shorter: %lld bytes are missing at %lld", f->path, (long long)n, (long long)at);
    to += got, n -= got, at += got;
    if (tm_poll() != TM_OK) return TM_EINTERRUPT;
  }
  return TM_OK;
}

static const char *json_kind(const json_t *j) {
  static const char *const name[] = {"an object", "an array", "a string", "a whole number", "a fraction", "true", "false", "null"};
  return j ? name[json_typeof(j)] : "missing";
}

#define BAD(f, e, format, ...) tm_fail(TM_ERUNTIME, "%s: tensor \"%.200s\": " format, (f)->path, (e)->name, __VA_ARGS__)

static int parse_shape(tm_file *f, entry *e, const json_t *shape) {
  if (!json_is_array(shape)) return BAD(f, e, "shape is %s, expected an array", json_kind(shape));
  if (json_array_size(shape) > TM_MAXDIM) return BAD(f, e, "%zu dims, expected at most %d", json_array_size(shape), TM_MAXDIM);
  e->ndim = (int)json_array_size(shape);
  for (int i = 0; i < e->ndim; i++) {
    const json_t *n = json_array_get(shape, (size_t)i);
    if (!json_is_integer(n)) return BAD(f, e, "size %d of the shape is %s, expected a whole number", i + 1, json_kind(n));
    e->size[i] = json_integer_value(n);
    if (e->size[i] < 0) return BAD(f, e, "size %d of the shape is %lld, expected 0 or more", i + 1, (long long)e->size[i]);
  }
  return TM_OK;
}

static int parse_offsets(tm_file *f, entry *e, const json_t *offsets) {
  const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1); /* NULL if it is no array */
  if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
    return BAD(f, e, "data_offsets is %s, expected an array of two whole numbers",
               json_array_size(offsets) ? "another array" : json_kind(offsets));
  e->begin = json_integer_value(begin), e->end = json_integer_value(end);
  if (e->begin < 0 || e->begin > e->end || e->end > f->bytes)
    return BAD(f, e, "data_offsets are [%lld, %lld], expected 0 <= begin <= end <= %lld (bytes of data)", (long long)e->begin,
               (long long)e->end, (long long)f->bytes);
  return TM_OK;
}

static int parse_entry(tm_file *f, entry *e, const json_t *j) {
  if (!json_is_object(j)) return BAD(f, e, "its entry is %s, expected an object", json_kind(j));
  const json_t *dtype = json_object_get(j, "dtype");
  if (!json_is_string(dtype)) return BAD(f, e, "dtype is %s, expected a string", json_kind(dtype));
  int k = 0;
  while (k < NTYPES && strcmp(types[k].name, json_string_value(dtype)) != 0) k++;
  if (k == NTYPES)
    return BAD(f, e, "dtype %.40s is not supported, expected one of I64 F64 F32 I32 BF16 F16 I16 I8 U8 BOOL", json_string_value(dtype));
  e->dtype = types[k].dtype;
  if (parse_shape(f, e, json_object_get(j, "shape")) != TM_OK) return TM_ERUNTIME;
  if (parse_offsets(f, e, json_object_get(j, "data_offsets")) != TM_OK) return TM_ERUNTIME;
  char shape[TM_MAXDIM * 24];
  int64_t numel = tm_numel_of(e->ndim, e->size), bytes;
  tm_shape_text(shape, sizeof shape, e->ndim, e->size);
  if (numel < 0 || __builtin_mul_overflow(numel, (int64_t)tm_dtype_size(e->dtype), &bytes))
    return BAD(f, e, "shape %s has too many elements", shape);
  if (e->end - e->begin != bytes)
    return BAD(f, e, "data_offsets [%lld, %lld] hold %lld bytes, expected %lld for %s %s", (long long)e->begin, (long long)e->end,
               (long long)(e->end - e->begin), (long long)bytes, types[k].name, shape);
  return TM_OK;
}

static int by_offset(const void *a, const void *b) {
  const entry *x = *(entry *const *)a, *y = *(entry *const *)b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}

/* Every byte of the data belongs to just one tensor. */
static int check_coverage(tm_file *f) {
  entry **order = tm_host_alloc((size_t)f->count * sizeof *order);
  if (!order) return TM_EMEM;
  for (int64_t i = 0; i < f->count; i++) order[i] = &f->entry[i];
  qsort(order, (size_t)f->count, sizeof *order, by_offset);
  int code = TM_OK;
  int64_t end = 0;
  for (int64_t i = 0; i < f->count && code == TM_OK; end = order[i++]->end) {
    const entry *e = order[i];
    if (e->begin == end) continue;
    code =
        BAD(f, e, "data_offsets [%lld, %lld] %s, expected to begin at %lld, the end of %s%.200s%s", (long long)e->begin, (long long)e->end,
            e->begin < end ? "overlap" : "leave a hole", (long long)end, i ? "\"" : "nothing", i ? order[i - 1]->name : "", i ? "\"" : "");
  }
  if (code == TM_OK && end != f->bytes)
    code = tm_fail(TM_ERUNTIME, "%s: %lld bytes of data, expected %lld, the end of the last tensor", f->path, (long long)f->bytes,
                   (long long)end);
  tm_host_free(order);
  return code;
}

static int parse_metadata(tm_file *f, json_t *metadata) {
  const char *key;
  json_t *value;
  if (!metadata) return TM_OK;
  if (!json_is_object(metadata)) return tm_fail(TM_ERUNTIME, "%s: __metadata__ is %s, expected an object", f->path, json_kind(metadata));
  f->meta = tm_host_alloc(json_object_size(metadata) * 2 * sizeof *f->meta);
  if (!f->meta) return TM_EMEM;
  json_object_foreach(metadata, key, value) {
    if (!json_is_string(value))
      return tm_fail(TM_ERUNTIME, "%s: __metadata__ \"%.200s\" is %s, expected a string", f->path, key, json_kind(value));
    f->meta[2 * f->nmeta] = key;
    f->meta[2 * f->nmeta++ + 1] = json_string_value(value);
  }
  return TM_OK;
}

static int parse_header(tm_file *f, const char *text, int64_t n) {
  json_error_t error;
  if (n == 0 || text[0] != '{') return tm_fail(TM_ERUNTIME, "%s: the header does not begin with {: not a safetensors file", f->path);
  f->header = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &error);
  if (!f->header && json_error_code(&error) == json_error_out_of_memory)
    return tm_fail(TM_EMEM, "%s: out of memory for the header", f->path);
  if (!f->header) return tm_fail(TM_ERUNTIME, "%s: the header is not valid JSON: %s (byte %d)", f->path, error.text, error.position);
  if (parse_metadata(f, json_object_get(f->header, "__metadata__")) != TM_OK) return tm_last_code();
  f->entry = tm_host_alloc(json_object_size(f->header) * sizeof *f->entry);
  if (!f->entry) return TM_EMEM;
  const char *name;
  json_t *value;
  json_object_foreach(f->header, name, value) {
    if (strcmp(name, "__metadata__") == 0) continue;
    f->entry[f->count].name = name;
    if (parse_entry(f, &f->entry[f->count], value) != TM_OK) return tm_last_code();
    f->count++;
  }
  return check_coverage(f);
}

static int read_header(tm_file *f, int64_t file_bytes) {
  uint64_t n;
  if (file_bytes < 8) return tm_fail(TM_ERUNTIME, "%s: %lld bytes, too short for a safetensors file", f->path, (long long)file_bytes);
  if (read_at(f, &n, 8, 0) != TM_OK) return tm_last_code();
  if (n > (uint64_t)header_limit || (int64_t)n > file_bytes - 8)
    return tm_fail(TM_ERUNTIME, "%s: the header should have %llu bytes, but the file has %lld after its length, and the limit is %lld",
                   f->path, (unsigned long long)n, (long long)file_bytes - 8, (long long)header_limit);
  f->data = 8 + (int64_t)n;
  f->bytes = file_bytes - f->data;
  char *text = tm_host_alloc((size_t)n);
  if (!text) return TM_EMEM;
  int code = read_at(f, text, (int64_t)n, 8);
  if (code == TM_OK) code = parse_header(f, text, (int64_t)n);
  tm_host_free(text);
  return code;
}

/* Where the file system cannot map, f keeps its descriptor and tensors are read. */
static int map_file(tm_file *f, int64_t file_bytes) {
  f->map = tm_host_alloc(sizeof *f->map);
  if (!f->map) return TM_EMEM;
  /* NORESERVE: pages that nobody writes need no memory, so a checkpoint may be larger than the machine's. */
  char *base = mmap(NULL, (size_t)file_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, f->fd, 0);
  if (base == MAP_FAILED) {
    tm_host_free(f->map);
    f->map = NULL;
    return TM_OK;
  }
  *f->map = (mapping){1, base, (size_t)file_bytes};
  close(f->fd);
  f->fd = -1;
  return TM_OK;
}

tm_file *tm_safetensors_open(const char *path, int map) {
  tm_file *f = tm_host_alloc(sizeof *f);
  if (!f) return NULL;
  *f = (tm_file){.fd = -1};
  f->path = tm_host_alloc(strlen(path) + 1);
  if (!f->path) goto fail;
  strcpy(f->path, path);
  struct stat st;
  f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a named pipe must not wait */
  if (f->fd < 0 || fstat(f->fd, &st) != 0) {
    tm_fail(TM_EIO, "%s: %s", path, strerror(errno));
    goto fail;
  }
  if (!S_ISREG(st.st_mode)) {
    tm_fail(TM_EIO, "%s: %s", path, S_ISDIR(st.st_mode) ? strerror(EISDIR) : "not a regular file");
    goto fail;
  }
  if (read_header(f, st.st_size) != TM_OK) goto fail;
  if (map && map_file(f, st.st_size) != TM_OK) goto fail;
  return f;
fail:
  tm_file_close(f);
  return NULL;
}

void tm_file_close(tm_file *f) {
  if (!f) return;
  if (f->fd >= 0) close(f->fd);
  mapping_release(f->map);
  json_decref(f->header);
  tm_host_free(f->entry);
  tm_host_free(f->meta);
  tm_host_free(f->path);
  tm_host_free(f);
}

int64_t tm_file_count(const tm_file *f) { return f->count; }
const char *tm_file_name(const tm_file *f, int64_t i) { return i >= 0 && i < f->count ? f->entry[i].name : NULL; }
int64_t tm_file_metadata_count(const tm_file *f) { return f->nmeta; }
const char *tm_file_metadata(const tm_file *f, int64_t i, int value) {
  return i >= 0 && i < f->nmeta ? f->meta[2 * i + (value != 0)] : NULL;
}

/* A tensor over the mapping. Its address must be a multiple of the element's size. */
static tm_tensor *mapped_tensor(tm_file *f, const entry *e) {
  tm_count_up(&f->map->refs);
  tm_tensor *t = tm_tensor_from_blob(f->map->base + f->data + e->begin, e->ndim, e->size, NULL, e->dtype, mapping_release, f->map);
  if (!t) mapping_release(f->map);
  return t;
}

static tm_tensor *copied_tensor(tm_file *f, const entry *e) {
  tm_tensor *t = tm_tensor_new(e->ndim, e->size, e->dtype, TM_DEV_CPU);
  int64_t n = e->end - e->begin;
  if (!t || n == 0) return t;
  if (f->map) {
    memcpy(tm_tensor_data(t), f->map->base + f->data + e->begin, (size_t)n);
  } else if (read_at(f, tm_tensor_data(t), n, f->data + e->begin) != TM_OK) {
    tm_tensor_release(t);
    return NULL;
  }
  return t;
}

/* Kernels rely on truth values being 0 or 1. */
static void make_truth_values(tm_tensor *t) {
  uint8_t *p = tm_tensor_data(t);
  for (int64_t i = 0, n = tm_tensor_numel(t); i < n; i++)
    if (p[i] > 1) p[i] = 1;
}

tm_tensor *tm_file_tensor(tm_file *f, int64_t i, int device) {
  if (i < 0 || i >= f->count)
    return tm_fail_null(TM_EINDEX, "%s: tensor %lld, expected 0 to %lld", f->path, (long long)i, (long long)f->count - 1);
  const entry *e = &f->entry[i];
  if (TM_KIND(device) == TM_META) return tm_tensor_new(e->ndim, e->size, e->dtype, device);
  int aligned = (f->data + e->begin) % tm_dtype_size(e->dtype) == 0;
  tm_tensor *t = f->map && aligned ? mapped_tensor(f, e) : copied_tensor(f, e), *there;
  if (t && e->dtype == TM_BOOL) make_truth_values(t);
  if (!t || device == TM_DEV_CPU) return t;
  there = tm_op_run(TM_OPC_cast, 1, &t, (double[]){-1, device}, NULL);
  tm_tensor_release(t);
  return there;
}

/* -- saving --------------------------------------------------------------------------------------------------- */

typedef struct item {
  const char *name;
  const char *value; /* of metadata */
  tm_tensor *tensor;
  int rank; /* in types[] */
} item;

static int by_name(const void *a, const void *b) { return strcmp(((const item *)a)->name, ((const item *)b)->name); }
static int by_rank(const void *a, const void *b) {
  const item *x = a, *y = b;
  return x->rank != y->rank ? x->rank - y->rank : by_name(a, b);
}

static int64_t bytes_of(const tm_tensor *t) { return tm_tensor_numel(t) * tm_dtype_size(tm_tensor_dtype(t)); }

static int check_text(const char *path, const char *what, const char *s) {
  json_t *j = json_string(s); /* checks the encoding */
  if (!j) return tm_fail(TM_EVALUE, "save %s: %s \"%.200s\" is not valid UTF-8", path, what, s);
  json_decref(j);
  return TM_OK;
}

/* Sorts by name and refuses what could not be read back. */
static int check_items(const char *path, const char *what, item *x, int64_t n) {
  qsort(x, (size_t)n, sizeof *x, by_name);
  for (int64_t i = 0; i < n; i++) {
    if (check_text(path, what, x[i].name) != TM_OK) return TM_EVALUE;
    if (i && strcmp(x[i].name, x[i - 1].name) == 0) return tm_fail(TM_EVALUE, "save %s: %s \"%.200s\" twice", path, what, x[i].name);
    if (x[i].value && check_text(path, "the metadata of", x[i].value) != TM_OK) return TM_EVALUE;
    if (!x[i].tensor) continue;
    if (!*x[i].name || strcmp(x[i].name, "__metadata__") == 0)
      return tm_fail(TM_EVALUE, "save %s: a tensor cannot have the name \"%s\"", path, x[i].name);
    if (TM_KIND(tm_tensor_device(x[i].tensor)) == TM_META)
      return tm_fail(TM_ERUNTIME, "save %s: tensor \"%.200s\" is %s, which has no data", path, x[i].name, tm_say(x[i].tensor));
    while (types[x[i].rank].dtype != tm_tensor_dtype(x[i].tensor)) x[i].rank++;
  }
  return TM_OK;
}

/* A JSON string with just the escapes of the Python library. */
static void put_string(FILE *out, const char *s) {
  static const char plain[] = "\"\\\b\f\n\r\t", escape[] = "\"\\bfnrt";
  putc('"', out);
  for (; *s; s++) {
    const char *p = strchr(plain, *s);
    if (p) fprintf(out, "\\%c", escape[p - plain]);
    else if ((unsigned char)*s < 32) fprintf(out, "\\u%04x", *s);
    else putc(*s, out);
  }
  putc('"', out);
}

static void put_header(FILE *out, const item *x, int64_t n, const item *meta, int64_t nmeta) {
  int64_t at = 0;
  const char *comma = "";
  putc('{', out);
  if (nmeta) {
    fputs("\"__metadata__\":{", out);
    for (int64_t i = 0; i < nmeta; i++) {
      if (i) putc(',', out);
      put_string(out, meta[i].name);
      putc(':', out);
      put_string(out, meta[i].value);
    }
    putc('}', out);
    comma = ",";
  }
  for (int64_t i = 0; i < n; i++, comma = ",") {
    fputs(comma, out);
    put_string(out, x[i].name);
    fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", types[x[i].rank].name);
    for (int k = 0; k < tm_tensor_ndim(x[i].tensor); k++) fprintf(out, k ? ",%lld" : "%lld", (long long)tm_tensor_size(x[i].tensor, k));
    fprintf(out, "],\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)(at + bytes_of(x[i].tensor)));
    at += bytes_of(x[i].tensor);
  }
  putc('}', out);
  while (ftell(out) % 8) putc(' ', out);
}

/* Everything about one save. */
typedef struct target {
  const char *path; /* as the user gave it, for messages */
  char *name;       /* links followed */
  char *directory, *temporary;
  int fd;
} target;

static int system_error(const target *t, const char *doing) {
  return tm_fail(TM_EIO, "%s: cannot %s: %s", t->path, doing, strerror(errno));
}

static int write_all(target *t, const char *p, int64_t n) {
  while (n > 0) {
    ssize_t done = write(t->fd, p, (size_t)TM_MIN(n, chunk));
    if (done < 0 && errno != EINTR) return system_error(t, "write");
    if (done > 0) p += done, n -= done;
    if (tm_poll() != TM_OK) return TM_EINTERRUPT;
  }
  return TM_OK;
}

static int write_tensor(target *t, const tm_tensor *x) {
  tm_tensor *here = tm_tensor_to_cpu(x), *dense = here ? tm_tensor_dense(here) : NULL;
  int code = dense ? write_all(t, tm_tensor_data(dense), bytes_of(dense)) : tm_last_code();
  tm_tensor_release(dense);
  tm_tensor_release(here);
  return code;
}

/* A link is followed, so that the file it points to is replaced and the link stays. */
static int find_target(target *t, struct stat *old, bool *exists) {
  t->name = realpath(t->path, NULL);
  if (!t->name && errno != ENOENT) return system_error(t, "write");
  *exists = t->name != NULL;
  if (!t->name) t->name = strdup(t->path);
  if (*exists && stat(t->name, old) != 0) return system_error(t, "write");
  if (*exists && !S_ISREG(old->st_mode)) return tm_fail(TM_EIO, "%s: cannot write: not a regular file", t->path);
  if (*exists && access(t->name, W_OK) != 0) return system_error(t, "replace"); /* renaming would not ask */
  const char *slash = t->name ? strrchr(t->name, '/') : NULL;
  t->directory = !slash ? strdup(".") : strndup(t->name, slash == t->name ? 1 : (size_t)(slash - t->name));
  return t->name && t->directory ? TM_OK : tm_fail(TM_EMEM, "%s: out of memory for the name", t->path);
}

/* Opened with O_EXCL rather than by mkstemp, which would hide the umask. */
static int open_temporary(target *t) {
  static int counter;
  size_t n = strlen(t->directory) + 64;
  t->temporary = malloc(n);
  if (!t->temporary) return tm_fail(TM_EMEM, "%s: out of memory for the name", t->path);
  for (int tries = 0; t->fd < 0 && tries < 1000; tries++) {
    snprintf(t->temporary, n, "%s/.tmod-%ld-%d.tmp", t->directory, (long)getpid(), __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED));
    t->fd = open(t->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (t->fd < 0 && errno != EEXIST) break;
  }
  if (t->fd >= 0) return TM_OK;
  int code = system_error(t, "create a temporary file beside it");
  free(t->temporary);
  t->temporary = NULL; /* nothing to remove */
  return code;
}

/* The rename is on disk once the directory is. Some file systems cannot sync one. */
static int sync_directory(const target *t) {
  int fd = open(t->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), code = TM_OK;
  if (fd < 0) return errno == EACCES ? TM_OK : system_error(t, "open its directory after renaming");
  if (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) code = system_error(t, "sync its directory after renaming");
  close(fd);
  return code;
}

static int replace_file(target *t, const char *header, int64_t header_bytes, const item *x, int64_t n) {
  struct stat old;
  bool exists = false;
  int code = find_target(t, &old, &exists);
  if (code == TM_OK) code = open_temporary(t);
  if (code != TM_OK) return code;
  if (exists) { /* the owner first, as that clears mode bits; only root can give files away, some file systems know no modes */
    if (fchown(t->fd, old.st_uid, old.st_gid) != 0) {}
    if (fchmod(t->fd, old.st_mode & 07777) != 0 && errno != EPERM) return system_error(t, "keep its mode");
  }
  code = write_all(t, (const char *)&header_bytes, 8);
  if (code == TM_OK) code = write_all(t, header, header_bytes);
  for (int64_t i = 0; i < n && code == TM_OK; i++) code = write_tensor(t, x[i].tensor);
  if (code != TM_OK) return code;
  if (fsync(t->fd) != 0) return system_error(t, "sync");
  int closed = close(t->fd);
  t->fd = -1;
  if (closed != 0) return system_error(t, "close");
  if (rename(t->temporary, t->name) != 0) return system_error(t, "rename the temporary file");
  free(t->temporary);
  t->temporary = NULL;
  return sync_directory(t);
}

int tm_safetensors_save(const char *path, int64_t n, const char *const *name, tm_tensor *const *tensor, int64_t nmeta,
                        const char *const *key, const char *const *value) {
  char *header = NULL;
  size_t bytes = 0;
  FILE *out;
  target t = {.path = path, .fd = -1};
  item *x = tm_host_alloc((size_t)(n + nmeta) * sizeof *x), *meta = x ? x + n : NULL;
  if (!x) return TM_EMEM;
  for (int64_t i = 0; i < n; i++) x[i] = (item){.name = name[i], .tensor = tensor[i]};
  for (int64_t i = 0; i < nmeta; i++) meta[i] = (item){.name = key[i], .value = value[i]};
  int code = check_items(path, "name", x, n);
  if (code == TM_OK) code = check_items(path, "metadata", meta, nmeta);
  if (code != TM_OK) goto done;
  qsort(x, (size_t)n, sizeof *x, by_rank);
  out = open_memstream(&header, &bytes);
  if (out) put_header(out, x, n, meta, nmeta);
  if (!out || fclose(out) != 0) code = tm_fail(TM_EMEM, "save %s: out of memory for the header", path);
  else if ((int64_t)bytes > header_limit)
    code = tm_fail(TM_EVALUE, "save %s: a header of %zu bytes, expected at most %lld", path, bytes, (long long)header_limit);
  if (code == TM_OK) code = replace_file(&t, header, (int64_t)bytes, x, n);
done:
  if (t.fd >= 0) close(t.fd);
  if (t.temporary) unlink(t.temporary);
  free(t.temporary);
  free(t.directory);
  free(t.name);
  free(header);
  tm_host_free(x);
  return code;
}
