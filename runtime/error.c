/* error.c: what went wrong, per thread; and the request to stop. */
#include <pthread.h>

#include "internal.h"

/* A thread's texts lie on the heap: its block of thread-local variables must stay within the few hundred bytes that a
** library opened at run time may have at a fixed place (autograd.c). */
typedef struct texts {
  char message[2048], say[TM_SAY_COUNT][TM_SAY_SIZE];
  int turn;
} texts;

static _Thread_local texts *own;
static _Thread_local int code;
static texts shared; /* when there is no memory for one's own */
static pthread_key_t key;

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&key, free); }

static texts *mine(void) {
  if (TM_LIKELY(own)) return own;
  own = calloc(1, sizeof *own);
  if (!own) return &shared;
  pthread_setspecific(key, own);
  return own;
}

char *tm_say_room(void) {
  texts *t = mine();
  return t->say[t->turn++ % TM_SAY_COUNT];
}

static void record(int c, const char *format, va_list args) {
  char *message = mine()->message, text[sizeof own->message]; /* `format` may print the old message */
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
  const char *message = mine()->message;
  size_t n = strlen(name);
  if (strncmp(message, name, n) != 0 || message[n] != ':') return tm_fail(code, "%s: %.1900s", name, message);
  return code;
}

const char *tm_last_error(void) { return mine()->message; }
int tm_last_code(void) { return code; }
const char *tm_version(void) { return TM_VERSION; }

volatile int tm_interrupted;
void tm_interrupt(void) { tm_interrupted = 1; }
int tm_interrupt_take(void) { return __atomic_exchange_n(&tm_interrupted, 0, __ATOMIC_RELAXED); }
