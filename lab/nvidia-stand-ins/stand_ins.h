// What the stand-ins share: every call is counted, may be made to fail, and is written to a log.
#pragma once
#include <stddef.h>

// Counts a call, writes it to the log and gives the error that it is to return, or 0.
int stand_ins_call(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Whether there is a log.
int stand_ins_logs(void);

// Keeps an error of the runtime as the thread's last one, and gives it.
int stand_ins_keep(int error);

// Enqueues a function in a stream. What is not computed is enqueued too, as nothing: it takes its place in the order of the stream.
int stand_ins_enqueue(void *stream, void (*function)(void *), void *data);
// Whether what is enqueued runs once, and not as often as a graph that is being recorded: then its data may be freed by it.
int stand_ins_runs_once(void *stream);
// Says what the function enqueued next reads or writes, so that the driver finds what nothing orders.
void stand_ins_touch(void *stream, const void *at, size_t len, int writes);

// Takes and gives back memory in the order of a stream; in one that is being recorded, of the graph.
int stand_ins_take(void *stream, void **to, size_t len);
int stand_ins_give(void *stream, void *at);

// A kernel that is computed: its function, and the bytes of each parameter, '0' where it is not used.
struct kernel {
  void (*run)(void **parameters);
  const char *sizes;
  void (*touch)(void *stream, void **parameters);
};
// The kernel of a mangled name, or null.
const struct kernel *stand_ins_kernel(const char *name);

// C = alpha A B + beta C, column-major, as BLAS has it. `half`: elements of 16 bits in A, B and C.
struct product {
  int transposed_a, transposed_b, m, n, k, lda, ldb, ldc, half, runs_once;
  float alpha, beta;
  const void *a, *b;
  void *c;
};
int stand_ins_multiply(void *stream, struct product);
