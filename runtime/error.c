/* error.c: what went wrong, per thread; and the request to stop. */
#include "internal.h"

static _Thread_local char message[2048];
static _Thread_local int code;

static void record(int c, const char *format, va_list args) {
  char text[sizeof message]; /* `format` may print the old message */
  vsnprintf(text, sizeof text, format, args);
  memcpy(message, text, sizeof text);
  code = c;
}

int tm_fail(int c, const char *format, ...) {
  va_list args;
  va_start(args, format);
  record(c, format, args);
  va_end(args);
  return c;
}

void *tm_fail_null(int c, const char *format, ...) {
  va_list args;
  va_start(args, format);
  record(c, format, args);
  va_end(args);
  return NULL;
}

int tm_fail_prefix(const char *name) {
  size_t n = strlen(name);
  if (strncmp(message, name, n) != 0 || message[n] != ':') return tm_fail(code, "%s: %.1900s", name, message);
  return code;
}

const char *tm_last_error(void) { return message; }
int tm_last_code(void) { return code; }
const char *tm_version(void) { return TM_VERSION; }

volatile int tm_interrupted;
void tm_interrupt(void) { tm_interrupted = 1; }
int tm_interrupt_take(void) { return __atomic_exchange_n(&tm_interrupted, 0, __ATOMIC_RELAXED); }
