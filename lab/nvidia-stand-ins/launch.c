// Kernels: as they register when their library is loaded, and as they are launched.
#define CUDARTAPI
#include "stand_ins.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct registered {
  const void *handle;
  const char *name;
  const struct kernel *kernel;
} *kernels;
static int count, room, is_sorted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void **__cudaRegisterFatBinary(void *code) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) { free(binary); }
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **binary, const char *handle, char *device, const char *name, int threads, uint3 *a, uint3 *b, dim3 *c,
                            dim3 *d, int *e) {
  if (count == room) kernels = realloc(kernels, (room = room * 2 + 1024) * sizeof *kernels);
  kernels[count++] = (struct registered){handle, name, stand_ins_kernel(name)};
  is_sorted = 0;
}
static int by_handle(const void *a, const void *b) {
  const char *x = ((struct registered *)a)->handle, *y = ((struct registered *)b)->handle;
  return x < y ? -1 : x > y;
}
static const struct registered *find(const void *handle) {
  static const struct registered unknown = {NULL, "?", NULL};
  pthread_mutex_lock(&lock);
  if (!is_sorted) qsort(kernels, count, sizeof *kernels, by_handle), is_sorted = 1;
  struct registered key = {handle};
  const struct registered *found = bsearch(&key, kernels, count, sizeof key, by_handle);
  pthread_mutex_unlock(&lock);
  return found ?: &unknown;
}

// Where `kernel<<<...>>>` keeps its configuration between its two halves.
static _Thread_local struct {
  dim3 grid, block;
  size_t memory;
  void *stream;
} configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, struct CUstream_st *stream) {
  configured.grid = grid, configured.block = block, configured.memory = memory, configured.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
  *grid = configured.grid, *block = configured.block, *memory = configured.memory, *(void **)stream = configured.stream;
  return 0;
}

// A launch: its parameters are the caller's only until the launch returns.
struct launched {
  void (*run)(void **);
  long values[8];
  void *parameters[8];
  int runs_once;
};
static void run(void *data) {
  struct launched *launched = data;
  launched->run(launched->parameters);
  if (launched->runs_once) free(launched);
}
static void nothing(void *data) {}
static cudaError_t launch(const void *handle, dim3 grid, void **parameters, void *stream) {
  const struct registered *found = find(handle);
  int code = stand_ins_call("kernel", "%.160s grid=%u,%u,%u stream=%p", found->name, grid.x, grid.y, grid.z, stream);
  if (code) return stand_ins_keep(code);
  const struct kernel *kernel = found->kernel;
  if (!kernel) return stand_ins_enqueue(stream, nothing, NULL);
  struct launched *launched = calloc(1, sizeof *launched);
  launched->run = kernel->run;
  launched->runs_once = stand_ins_runs_once(stream);
  for (int i = 0; kernel->sizes[i]; i++) {
    memcpy(&launched->values[i], parameters[i], kernel->sizes[i] - '0');
    launched->parameters[i] = &launched->values[i];
  }
  kernel->touch(stream, launched->parameters);
  code = stand_ins_enqueue(stream, run, launched);
  if (code) free(launched);
  return code;
}
cudaError_t __cudaGetKernel(cudaKernel_t *to, const void *handle) { return *to = (void *)handle, 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **parameters, size_t memory, cudaStream_t stream) {
  return launch(kernel, grid, parameters, stream);
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **parameters, size_t memory, cudaStream_t stream) {
  return launch(kernel, grid, parameters, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **parameters, size_t memory, cudaStream_t stream) {
  return launch(kernel, grid, parameters, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **parameters) {
  return launch(kernel, config->gridDim, parameters, config->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *kernel) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = 1024, to->numRegs = 64, to->ptxVersion = to->binaryVersion = 90, to->maxDynamicSharedSizeBytes = 232448;
  return 0;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { return 0; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *to, const void *kernel, int block, size_t memory, unsigned flags) {
  return *to = 2, 0;
}
