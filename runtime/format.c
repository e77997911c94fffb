/* format.c: tensors as text, laid out as PyTorch prints them.
**
** What must stay true: one width for all elements, taken from the elements that are shown and are finite and
** not zero; one notation for all of them. Both are found in passes over the shown elements before the first
** is written. Elements are read in place, with any strides. Numbers follow the C locale whatever the host's. */
#include <locale.h>

#include "internal.h"

typedef struct text {
  char *p;
  size_t n, capacity;
} text; /* p is NULL after a failed allocation, and then stays so */

static void put(text *b, const char *s, size_t n) {
  if (!b->p) return;
  if (b->n + n + 1 > b->capacity) {
    size_t capacity = 2 * b->capacity + n;
    char *p = tm_host_realloc(b->p, capacity);
    if (!p) {
      tm_host_free(b->p);
      b->p = NULL;
      return;
    }
    b->p = p, b->capacity = capacity;
  }
  memcpy(b->p + b->n, s, n);
  b->n += n;
  b->p[b->n] = 0;
}

static void put_text(text *b, const char *s) { put(b, s, strlen(s)); }
static void spaces(text *b, int n) {
  while (n-- > 0) put(b, " ", 1);
}

enum notation { TRUTH, INTEGER, WHOLE /* floats without a fraction: "2." */, FIXED, SCIENTIFIC };
enum { ELEMENT = 128 }; /* bytes: sign, 9 digits, point, MAXPRECISION digits */
enum { MAXPRECISION = 60 };

typedef struct printer {
  text out;
  const tm_tensor *t; /* on the CPU, at least one element */
  size_t item;        /* bytes */
  int precision, edge, linewidth, width;
  bool summarise, fraction, found;
  double min, max; /* of the magnitudes */
  enum notation notation;
} printer;

/* The text of one element without padding; its length. */
static int element(const printer *p, const char *at, char *s) {
  if (p->t->c.dtype == TM_I64) {
    int64_t i;
    memcpy(&i, at, sizeof i);
    return snprintf(s, ELEMENT, "%lld", (long long)i);
  }
  double x = tm_load(at, p->t->c.dtype);
  if (p->notation == TRUTH) return snprintf(s, ELEMENT, x != 0 ? "true" : "false");
  if (isnan(x)) return snprintf(s, ELEMENT, "nan"); /* printf shows the sign of a NaN */
  if (p->notation == SCIENTIFIC) return snprintf(s, ELEMENT, "%.*e", p->precision, x);
  if (p->notation == FIXED) return snprintf(s, ELEMENT, "%.*f", p->precision, x);
  return snprintf(s, ELEMENT, p->notation == WHOLE && isfinite(x) ? "%.0f." : "%.0f", x);
}

typedef void (*visitor)(printer *p, const char *at);

static bool cut(const printer *p, int axis) { return p->summarise && T_SIZE(p->t, axis) > 2 * (int64_t)p->edge; }

/* The position shown after i of an axis: skips the middle of one that is cut. */
static int64_t next(const printer *p, int axis, int64_t i) {
  return cut(p, axis) && i + 1 == p->edge ? T_SIZE(p->t, axis) - p->edge : i + 1;
}

static const char *step(const printer *p, int axis, const char *at, int64_t i) { return at + i * T_STRIDE(p->t, axis) * (int64_t)p->item; }

static void visit(printer *p, int axis, const char *at, visitor fn) {
  if (axis == p->t->c.ndim) fn(p, at);
  else
    for (int64_t i = 0; i < T_SIZE(p->t, axis); i = next(p, axis, i)) visit(p, axis + 1, step(p, axis, at, i), fn);
}

static void measure_range(printer *p, const char *at) {
  double x = fabs(tm_load(at, p->t->c.dtype));
  if (x == 0 || !isfinite(x)) return;
  p->min = p->found ? TM_MIN(p->min, x) : x;
  p->max = p->found ? TM_MAX(p->max, x) : x;
  p->found = true;
  if (x != ceil(x)) p->fraction = true;
}

static void measure_width(printer *p, const char *at) {
  char s[ELEMENT];
  if (tm_is_float(p->t->c.dtype)) {
    double x = tm_load(at, p->t->c.dtype);
    if (x == 0 || !isfinite(x)) return;
  }
  int n = element(p, at, s);
  p->width = TM_MAX(p->width, n);
}

static void measure(printer *p) {
  const char *at = tm_data(p->t);
  p->width = 1;
  p->notation = p->t->c.dtype == TM_BOOL ? TRUTH : INTEGER;
  if (tm_is_float(p->t->c.dtype)) {
    visit(p, 0, at, measure_range);
    bool wide = p->found && (p->max / p->min > 1000 || p->max > 1e8 || p->min < 1e-4);
    p->notation = wide ? SCIENTIFIC : p->fraction ? FIXED : WHOLE;
  }
  visit(p, 0, at, measure_width);
}

static void put_element(printer *p, const char *at) {
  char s[ELEMENT];
  int n = element(p, at, s);
  spaces(&p->out, p->width - n);
  put(&p->out, s, (size_t)n);
}

/* The last axis: as many elements to a line as fit. The dots of a cut count as one. */
static void put_row(printer *p, int axis, const char *at, int indent) {
  int per_line = TM_MAX(1, (p->linewidth - indent) / (p->width + 2)), k = 0;
  put_text(&p->out, "[");
  for (int64_t i = 0; i < T_SIZE(p->t, axis); i = next(p, axis, i)) {
    for (int dots = cut(p, axis) && i == T_SIZE(p->t, axis) - p->edge; dots >= 0; dots--, k++) {
      if (k) put_text(&p->out, k % per_line ? ", " : ",\n");
      if (k && k % per_line == 0) spaces(&p->out, indent + 1);
      if (dots) put_text(&p->out, " ...");
      else put_element(p, step(p, axis, at, i));
    }
  }
  put_text(&p->out, "]");
}

static void put_block(printer *p, int axis, const char *at, int indent) {
  if (axis == p->t->c.ndim) {
    put_element(p, at);
    return;
  }
  if (axis == p->t->c.ndim - 1) {
    put_row(p, axis, at, indent);
    return;
  }
  put_text(&p->out, "[");
  for (int64_t i = 0; i < T_SIZE(p->t, axis); i = next(p, axis, i)) {
    for (int dots = cut(p, axis) && i == T_SIZE(p->t, axis) - p->edge; dots >= 0; dots--) {
      if (i) {
        put_text(&p->out, ",");
        for (int k = p->t->c.ndim - axis; k > 1; k--) put_text(&p->out, "\n");
        spaces(&p->out, indent + 1);
      }
      if (dots) put_text(&p->out, "...");
      else put_block(p, axis + 1, step(p, axis, at, i), indent + 1);
    }
  }
  put_text(&p->out, "]");
}

/* ", name=value" after the elements, on a new line where the last one is full. */
static void put_suffix(printer *p, int *column, const char *name, const char *value) {
  int n = (int)(strlen(name) + strlen(value));
  if (*column + n + 2 > p->linewidth) {
    put_text(&p->out, ",\n       ");
    *column = 7 + n;
  } else {
    put_text(&p->out, ", ");
    *column += n + 2;
  }
  put_text(&p->out, name);
  put_text(&p->out, value);
}

static void put_suffixes(printer *p, const tm_tensor *t) {
  const char *newline = p->out.p ? strrchr(p->out.p, '\n') : NULL;
  int column = newline ? (int)(p->out.p + p->out.n - newline) + 1 : (int)p->out.n + 2; /* one too many, as PyTorch counts */
  char shape[TM_MAXDIM * 24];
  int meta = TM_KIND(t->c.device) == TM_META, empty = t->c.numel == 0, dtype = t->c.dtype;
  if (t->c.device != TM_DEV_CPU) put_suffix(p, &column, "device=", tm_device_name(t->c.device));
  if (meta || (empty && t->c.ndim != 1)) put_suffix(p, &column, "size=", tm_shape_text(shape, sizeof shape, t->c.ndim, t->c.size));
  /* Elements show that they are whole numbers or truth values; without elements the dtype has to be said. */
  if (dtype != TM_F32 && (meta || empty || (dtype != TM_I64 && dtype != TM_BOOL))) put_suffix(p, &column, "dtype=", tm_dtype_name(dtype));
  const char *fn = tm_tensor_grad_fn(t);
  if (fn) {
    char name[128];
    snprintf(name, sizeof name, "<%s>", fn);
    put_suffix(p, &column, "grad_fn=", name);
  } else if (tm_tensor_requires_grad(t)) {
    put_suffix(p, &column, "requires_grad=", "true");
  }
  put_text(&p->out, ")");
}

tm_tensor *tm_tensor_to_cpu(const tm_tensor *t) {
  if (t->c.device == TM_DEV_CPU) return tm_tensor_alias(t);
  int mode = tm_grad_mode_set(0);
  tm_tensor *in = (tm_tensor *)t, *r = tm_op_run(TM_OPC_cast, 1, &in, (double[]){-1, TM_DEV_CPU}, NULL);
  tm_grad_mode_set(mode);
  return r;
}

char *tm_tensor_format(const tm_tensor *t, int precision, int64_t threshold, int edgeitems, int linewidth) {
  printer p = {.precision = TM_MIN(TM_MAX(precision, 0), MAXPRECISION), .edge = TM_MAX(edgeitems, 1), .linewidth = TM_MAX(linewidth, 0)};
  p.out.capacity = 256;
  p.out.p = tm_host_alloc(p.out.capacity);
  if (!p.out.p) return NULL;
  put_text(&p.out, "tensor(");
  if (TM_KIND(t->c.device) == TM_META) {
    put_text(&p.out, "...");
  } else if (t->c.numel == 0) {
    put_text(&p.out, "[]");
  } else {
    tm_tensor *here = tm_tensor_to_cpu(t);
    if (!here) {
      tm_host_free(p.out.p);
      return NULL;
    }
    p.t = here, p.item = (size_t)tm_dtype_size(here->c.dtype), p.summarise = here->c.numel > threshold;
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), old = uselocale(c);
    measure(&p);
    put_block(&p, 0, tm_data(here), 7);
    uselocale(old);
    freelocale(c);
    tm_tensor_release(here);
  }
  put_suffixes(&p, t);
  return p.out.p;
}

char *tm_tensor_summary(const tm_tensor *t) {
  char shape[TM_MAXDIM * 24];
  text b = {tm_host_alloc(256), 0, 256};
  put_text(&b, tm_dtype_name(t->c.dtype));
  put_text(&b, " ");
  put_text(&b, tm_shape_text(shape, sizeof shape, t->c.ndim, t->c.size));
  if (t->c.device != TM_DEV_CPU) {
    put_text(&b, " on ");
    put_text(&b, tm_device_name(t->c.device));
  }
  return b.p;
}

void tm_string_free(char *s) { tm_host_free(s); }
