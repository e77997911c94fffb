/* threads.c: the one pool of threads, OpenMP's, and what the processor can do. */
#include <omp.h>
#include <pthread.h>

#include "internal.h"

/* A pool does not survive fork: its threads are gone in the child, which therefore stays on one. */
static void in_child(void) { omp_set_num_threads(1); }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int tm_num_threads(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
void tm_num_threads_set(int n) { omp_set_num_threads(TM_MAX(n, 1)); }

const char *tm_cpu_capability(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return "avx512";
  if (__builtin_cpu_supports("x86-64-v3")) return "avx2";
#endif
  return "default";
}
