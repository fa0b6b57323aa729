// The log, the numbers of calls and the faults.
#define _GNU_SOURCE
#include "stand_ins.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static FILE *sink;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct count {
  char name[64];
  long calls;
  long fails_at;
  int code;
} counts[256];

// The entry of a name; the last one is for all names that found no room.
static struct count *count_of(const char *name) {
  struct count *at = counts;
  while (at < counts + 255 && *at->name && strcmp(at->name, name)) at++;
  if (!*at->name) snprintf(at->name, sizeof at->name, "%s", name);
  return at;
}

// Makes the `nth` call of a name from now (1: the next) fail with a code of its library, once. 0: none.
void stand_ins_fail(const char *name, long nth, int code) {
  pthread_mutex_lock(&lock);
  struct count *count = count_of(name);
  count->fails_at = nth ? count->calls + nth : 0;
  count->code = code;
  pthread_mutex_unlock(&lock);
}

// How often a name was called.
long stand_ins_calls(const char *name) {
  pthread_mutex_lock(&lock);
  long calls = count_of(name)->calls;
  pthread_mutex_unlock(&lock);
  return calls;
}

// A line of the log.
void stand_ins_mark(const char *text) {
  stand_ins_call("mark", "%s", text);
  if (sink) fflush(sink);
}

int stand_ins_logs(void) { return sink != NULL; }

int stand_ins_call(const char *name, const char *format, ...) {
  pthread_mutex_lock(&lock);
  struct count *count = count_of(name);
  int code = ++count->calls == count->fails_at ? count->code : 0;
  if (sink) {
    va_list values;
    va_start(values, format);
    fprintf(sink, "%ld %s ", syscall(SYS_gettid), name);
    vfprintf(sink, format, values);
    fprintf(sink, code ? " fails with %d\n" : "\n", code);
    va_end(values);
  }
  pthread_mutex_unlock(&lock);
  return code;
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CUDA_STAND_INS_LOG"), *faults = getenv("CUDA_STAND_INS_FAIL");
  if (path && (sink = fopen(path, "a"))) setvbuf(sink, NULL, _IOFBF, 1 << 20);
  for (int used = 0; faults && *faults; faults += used + (faults[used] == ',')) {
    char name[64];
    long nth;
    int code;
    if (sscanf(faults, "%63[^:]:%ld:%d%n", name, &nth, &code, &used) < 3) {
      fprintf(stderr, "CUDA_STAND_INS_FAIL: expected NAME:NTH:CODE,..., got %s\n", faults);
      exit(2);
    }
    stand_ins_fail(name, nth, code);
  }
}
__attribute__((destructor)) static void end(void) {
  if (sink) fflush(sink);
}
