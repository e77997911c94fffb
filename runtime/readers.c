/* readers.c: tables of numbers and arrays from files of other programs, gzipped or not.
**
** Files are hostile: a size that a header promises is compared with what the file can hold before memory is
** taken, and every complaint says where in the file it arose. zlib reads plain files as they are. */
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "internal.h"

typedef struct source {
  const char *path;
  gzFile gz;
  int64_t bytes; /* on disk; 0 if it is no regular file */
  bool regular;
} source;

static int source_open(source *s, const char *path) {
  struct stat st;
  *s = (source){.path = path};
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return tm_fail(TM_EIO, "%s: %s", path, strerror(errno));
  if (fstat(fd, &st) != 0 || S_ISDIR(st.st_mode)) {
    int e = S_ISDIR(st.st_mode) ? EISDIR : errno;
    close(fd);
    return tm_fail(TM_EIO, "%s: %s", path, strerror(e));
  }
  s->regular = S_ISREG(st.st_mode);
  s->bytes = s->regular ? st.st_size : 0;
  s->gz = gzdopen(fd, "rb");
  if (!s->gz) {
    close(fd);
    return tm_fail(TM_EMEM, "%s: out of memory for reading", path);
  }
  gzbuffer(s->gz, 1 << 17);
  return TM_OK;
}

/* Up to n bytes (n < 2^31): the number read, fewer only at the end of the file; -1 and an error. */
static int64_t source_read(source *s, void *p, int64_t n) {
  int got = gzread(s->gz, p, (unsigned)n), e;
  if (got == n) return n;
  gzerror(s->gz, &e);
  if (e == Z_OK || e == Z_STREAM_END) return got;
  if (e == Z_MEM_ERROR) tm_fail(TM_EMEM, "%s: out of memory for reading", s->path);
  else if (e == Z_BUF_ERROR) tm_fail(TM_ERUNTIME, "%s: the compressed data ends too early", s->path);
  else if (e == Z_ERRNO) tm_fail(TM_EIO, "%s: %s", s->path, strerror(errno));
  else tm_fail(TM_ERUNTIME, "%s: the compressed data is damaged", s->path);
  return -1;
}

/* -- CSV ------------------------------------------------------------------------------------------------ */

typedef struct csv {
  source in;
  char *buffer;                /* [capacity + 1] */
  size_t capacity, begin, end; /* what is unread lies in begin..end */
  bool eof;
  int separator; /* ' ': any run of spaces and tabs */
  int64_t line, columns, rows, count, room;
  double *value; /* [room], count of them set, row after row */
  locale_t c;
} csv;

/* The next line without its end, ended by a 0; NULL at the end of the file or on an error (*code). */
static char *next_line(csv *f, size_t *length, int *code) {
  *code = TM_OK;
  for (size_t seen = 0;;) {
    char *p = f->buffer + f->begin, *newline = memchr(p + seen, '\n', f->end - f->begin - seen);
    size_t n = newline ? (size_t)(newline - p) : f->end - f->begin;
    if (newline || (f->eof && n)) {
      f->begin += n + (newline != NULL);
      f->line++;
      p[n] = 0;
      *length = n;
      return p;
    }
    if (f->eof) return NULL;
    seen = n;
    memmove(f->buffer, p, n);
    f->begin = 0, f->end = n;
    if (n == f->capacity) { /* a line longer than the buffer */
      char *larger = tm_host_realloc(f->buffer, 2 * f->capacity + 1);
      if (!larger) return *code = tm_last_code(), NULL;
      f->buffer = larger, f->capacity *= 2;
    }
    int64_t got = source_read(&f->in, f->buffer + n, (int64_t)TM_MIN(f->capacity - n, (size_t)1 << 24));
    if (got < 0 || tm_poll() != TM_OK) return *code = tm_last_code(), NULL;
    f->eof = got == 0;
    f->end += (size_t)got;
  }
}

static bool digit(char c) { return c >= '0' && c <= '9'; }

/* Whether `word` (lower case) begins at p, in any case. */
static bool starts(const char *p, const char *word) {
  for (; *word; p++, word++)
    if ((*p | 32) != *word) return false;
  return true;
}

/* Reads one number at p, correctly rounded; the end, or NULL if there is none. */
static const char *number(const char *p, double *x, locale_t c) {
  static const double power[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
  const char *begin = p;
  bool minus = *p == '-';
  p += *p == '-' || *p == '+';
  const char *first = p;
  uint64_t mantissa = 0;
  int exponent = 0;
  int64_t digits = 0;                                                                                    /* significant ones */
  for (; digit(*p); p++) digits += digits || *p != '0', mantissa = mantissa * 10 + (uint64_t)(*p - '0'); /* wraps, unused, beyond 19 */
  int64_t whole = p - first, fraction = 0;
  if (*p == '.') {
    for (p++; digit(*p); p++, fraction++) digits += digits || *p != '0', mantissa = mantissa * 10 + (uint64_t)(*p - '0');
  }
  if (whole + fraction == 0) {
    if (p != first) return NULL;
    *x = starts(p, "nan") ? NAN : INFINITY;
    if (!isnan(*x) && !starts(p, "inf")) return NULL;
    p += !isnan(*x) && starts(p, "infinity") ? 8 : 3;
    if (minus) *x = -*x;
    return p;
  }
  if ((*p | 32) == 'e' && (digit(p[1]) || ((p[1] == '-' || p[1] == '+') && digit(p[2])))) {
    bool negative = p[1] == '-';
    for (p += digit(p[1]) ? 1 : 2; digit(*p); p++)
      if (exponent < 100000) exponent = exponent * 10 + (*p - '0');
    if (negative) exponent = -exponent;
  }
  /* Up to 15 digits and 10^22 are exact in a double, so one operation rounds once. */
  if (digits <= 15 && fraction < 1000 && exponent - fraction >= -22 && exponent - fraction <= 22) {
    int e = exponent - (int)fraction;
    double m = (double)mantissa;
    *x = e < 0 ? m / power[-e] : m * power[e];
    if (minus) *x = -*x;
  } else {
    *x = strtod_l(begin, NULL, c);
  }
  return p;
}

/* What may surround a number. A tab that separates does not. */
static const char *skip_blanks(const csv *f, const char *p) {
  while (*p == ' ' || (*p == '\t' && f->separator != '\t')) p++;
  return p;
}

static int not_a_number(const csv *f, const char *p, const char *end, int64_t column) {
  char seen[32];
  int n = 0;
  for (; p < end && *p != f->separator && n < 24; p++) seen[n++] = (unsigned char)*p < 32 || *p == 127 ? '?' : *p;
  seen[n] = 0;
  return tm_fail(TM_ERUNTIME, "%s: line %lld, column %lld: \"%s\" is not a number", f->in.path, (long long)f->line, (long long)column,
                 seen);
}

static int push(csv *f, double x) {
  if (f->count == f->room) {
    int64_t room = f->room ? 2 * f->room : 4096;
    double *value = tm_host_realloc(f->value, (size_t)room * sizeof *value);
    if (!value) return tm_last_code();
    f->value = value, f->room = room;
  }
  f->value[f->count++] = x;
  return TM_OK;
}

static int parse_line(csv *f, const char *p, const char *end) {
  int64_t column = 1;
  for (bool last = false; !last; column++) {
    double x;
    p = skip_blanks(f, p);
    const char *after = number(p, &x, f->c), *next = after ? skip_blanks(f, after) : p;
    last = after && next == end;
    if (!last && (!after || (f->separator == ' ' ? next == after : *next != f->separator))) return not_a_number(f, p, end, column);
    if ((f->rows == 0 || column <= f->columns) && push(f, x) != TM_OK) return tm_last_code();
    p = next + (f->separator != ' ');
  }
  if (f->rows == 0) f->columns = column - 1;
  if (column - 1 != f->columns)
    return tm_fail(TM_ERUNTIME, "%s: line %lld has %lld columns, expected %lld as in the first row", f->in.path, (long long)f->line,
                   (long long)column - 1, (long long)f->columns);
  f->rows++;
  return TM_OK;
}

static int parse_lines(csv *f, int64_t skip) {
  int code;
  size_t n;
  for (char *p; (p = next_line(f, &n, &code));) {
    if (f->line <= skip) continue;
    if (f->line == 1 && n >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) p += 3, n -= 3; /* byte order mark */
    if (n && p[n - 1] == '\r') n--;
    while (n && (p[n - 1] == ' ' || (p[n - 1] == '\t' && f->separator != '\t'))) n--;
    p[n] = 0;
    if (n && (code = parse_line(f, p, p + n)) != TM_OK) return code;
  }
  if (code == TM_OK && f->rows == 0) return tm_fail(TM_ERUNTIME, "%s: no numbers in %lld lines", f->in.path, (long long)f->line);
  return code;
}

tm_tensor *tm_csv_read(const char *path, int separator, int64_t skip) {
  bool word = separator <= 0 || separator > 126 || digit((char)separator) || ((separator | 32) >= 'a' && (separator | 32) <= 'z');
  if (word || strchr("+-.\"\n\r", separator))
    return tm_fail_null(TM_EVALUE, "csv: separator %d is not a character that can stand between numbers", separator);
  if (skip < 0) return tm_fail_null(TM_EVALUE, "csv: skip is %lld, expected 0 or more lines", (long long)skip);
  tm_tensor *t = NULL;
  csv f = {.capacity = 1 << 17, .separator = separator};
  if (source_open(&f.in, path) != TM_OK) return NULL;
  f.c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  f.buffer = tm_host_alloc(f.capacity + 1);
  if (f.buffer && parse_lines(&f, skip) == TM_OK) {
    t = tm_tensor_new(2, (int64_t[]){f.rows, f.columns}, TM_F64, TM_DEV_CPU);
    if (t) memcpy(tm_tensor_data(t), f.value, (size_t)f.count * sizeof *f.value);
  }
  tm_host_free(f.value);
  tm_host_free(f.buffer);
  freelocale(f.c);
  gzclose(f.in.gz);
  return t;
}

/* -- IDX ------------------------------------------------------------------------------------------------
** 0 0 type ndim, ndim sizes of 32 bits, then the elements; big-endian throughout. */

enum { DEFLATE_RATIO = 1032 }; /* the most that a byte of deflate can stand for */

static int idx_dtype(int type) {
  switch (type) {
  case 0x08: return TM_U8;
  case 0x09: return TM_I8;
  case 0x0B: return TM_I16;
  case 0x0C: return TM_I32;
  case 0x0D: return TM_F32;
  case 0x0E: return TM_F64;
  default: return -1;
  }
}

static void swap_bytes(void *data, int64_t count, int item) {
  if (item == 2)
    for (uint16_t *p = data; count--; p++) *p = __builtin_bswap16(*p);
  else if (item == 4)
    for (uint32_t *p = data; count--; p++) *p = __builtin_bswap32(*p);
  else if (item == 8)
    for (uint64_t *p = data; count--; p++) *p = __builtin_bswap64(*p);
}

static tm_tensor *idx_header(source *s) {
  unsigned char head[4 + 4 * TM_MAXDIM] = {0};
  int64_t size[TM_MAXDIM], bytes, got = source_read(s, head, 4);
  char text[TM_MAXDIM * 24];
  if (got < 0) return NULL;
  int dtype = idx_dtype(head[2]), ndim = head[3];
  if (got < 4) return tm_fail_null(TM_ERUNTIME, "%s: not an IDX file: only %lld bytes", s->path, (long long)got);
  if (head[0] || head[1] || dtype < 0)
    return tm_fail_null(TM_ERUNTIME,
                        "%s: not an IDX file: it begins with %02x %02x %02x %02x, expected 00 00, a type of 08 09 0b 0c 0d 0e, dims",
                        s->path, head[0], head[1], head[2], head[3]);
  if (ndim > TM_MAXDIM) return tm_fail_null(TM_ERUNTIME, "%s: %d dims, expected at most %d", s->path, ndim, TM_MAXDIM);
  if ((got = source_read(s, head + 4, 4 * ndim)) < 0) return NULL;
  if (got < 4 * ndim) return tm_fail_null(TM_ERUNTIME, "%s: the file ends in its header", s->path);
  for (int i = 0; i < ndim; i++) {
    uint32_t n;
    memcpy(&n, head + 4 + 4 * i, 4);
    size[i] = __builtin_bswap32(n);
  }
  tm_shape_text(text, sizeof text, ndim, size);
  int64_t numel = tm_numel_of(ndim, size), most;
  if (numel < 0 || __builtin_mul_overflow(numel, (int64_t)tm_dtype_size(dtype), &bytes)) bytes = INT64_MAX;
  if (gzdirect(s->gz)) most = s->bytes - 4 - 4 * ndim;
  else if (__builtin_mul_overflow(s->bytes, (int64_t)DEFLATE_RATIO, &most)) most = INT64_MAX - 1;
  if (bytes > most)
    return tm_fail_null(TM_ERUNTIME, "%s: the header promises %s %s, but the file can hold only %lld bytes", s->path, tm_dtype_name(dtype),
                        text, (long long)TM_MAX(most, 0));
  return tm_tensor_new(ndim, size, dtype, TM_DEV_CPU);
}

static int idx_elements(source *s, tm_tensor *t) {
  int64_t bytes = tm_tensor_numel(t) * tm_dtype_size(tm_tensor_dtype(t));
  char *data = tm_tensor_data(t), extra;
  for (int64_t at = 0, got; at < bytes; at += got) {
    int64_t want = TM_MIN(bytes - at, (int64_t)1 << 24);
    got = source_read(s, data + at, want);
    if (got < 0 || tm_poll() != TM_OK) return tm_last_code();
    if (got < want)
      return tm_fail(TM_ERUNTIME, "%s: the file ends after %lld of %lld bytes of elements", s->path, (long long)(at + got),
                     (long long)bytes);
  }
  int64_t more = source_read(s, &extra, 1);
  if (more > 0)
    return tm_fail(TM_ERUNTIME, "%s: the file goes on after the %lld bytes that its header promises", s->path, (long long)bytes);
  return more < 0 ? tm_last_code() : TM_OK;
}

tm_tensor *tm_idx_read(const char *path) {
  source s;
  if (source_open(&s, path) != TM_OK) return NULL;
  tm_tensor *t = s.regular ? idx_header(&s) : tm_fail_null(TM_EIO, "%s: not a regular file", path);
  if (t && idx_elements(&s, t) != TM_OK) {
    tm_tensor_release(t);
    t = NULL;
  }
  gzclose(s.gz);
  if (t) swap_bytes(tm_tensor_data(t), tm_tensor_numel(t), tm_dtype_size(tm_tensor_dtype(t)));
  return t;
}
