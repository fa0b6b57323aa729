// A stand-in for libcudart.so.13 on the driver that stands in (lab/cuda-stand-in): memory, streams, events and the order of work are the driver's.
#define _GNU_SOURCE
#define CUDARTAPI
#include "stand_ins.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties

// Of the driver that stands in.
unsigned stand_in_touch(void *, unsigned long, unsigned long, _Bool);
void stand_in_note(const char *);

static _Thread_local cudaError_t last;
// The device that cudaSetDevice asked for.
static _Thread_local int device;

int stand_ins_keep(int error) { return error ? (last = error) : 0; }
#define keep stand_ins_keep
#define CALL(...)                                                                                                                          \
  do {                                                                                                                                     \
    int code_ = stand_ins_call(__func__, __VA_ARGS__);                                                                                     \
    if (code_) return keep(code_);                                                                                                         \
  } while (0)
// A call of the driver, in the primary context where the thread has no other, as in the real runtime.
#define DRIVER(call) keep(ensure() ?: (int)(call))
// Makes the primary context of a device current. The real runtime keeps it for good; this one only where nobody else has it, so that leaks of others show.
static int enter(int number) {
  CUcontext context;
  unsigned flags;
  int is_kept = 0;
  int error = cuDevicePrimaryCtxGetState(number, &flags, &is_kept) ?: cuDevicePrimaryCtxRetain(&context, number) ?: cuCtxSetCurrent(context);
  return error || !is_kept ? error : cuDevicePrimaryCtxRelease(number);
}
static int ensure(void) {
  CUcontext context = NULL;
  int error = cuInit(0) ?: cuCtxGetCurrent(&context);
  return error || context ? error : enter(device);
}
#define D(pointer) ((CUdeviceptr)(pointer))

// Devices.
cudaError_t cudaGetDeviceCount(int *count) {
  CALL("");
  return keep(cuInit(0) ?: cuDeviceGetCount(count));
}
cudaError_t cudaGetDevice(int *number) {
  CALL("");
  CUcontext context = NULL;
  *number = device;
  return cuCtxGetCurrent(&context) || !context ? 0 : keep(cuCtxGetDevice(number));
}
cudaError_t cudaSetDevice(int number) {
  CALL("%d", number);
  int error = cuInit(0) ?: enter(number);
  if (!error) device = number;
  return keep(error);
}
cudaError_t cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
  CALL("%d", attribute);
  // What the driver does not know is 1: mostly whether something can be done.
  if (cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, number)) *value = 1;
  return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int number) {
  CALL("%d", number);
  memset(to, 0, sizeof *to);
  int error = cuDeviceGetName(to->name, sizeof to->name, number) ?: cuDeviceTotalMem(&to->totalGlobalMem, number);
  cudaDeviceGetAttribute(&to->major, cudaDevAttrComputeCapabilityMajor, number);
  cudaDeviceGetAttribute(&to->minor, cudaDevAttrComputeCapabilityMinor, number);
  cudaDeviceGetAttribute(&to->multiProcessorCount, cudaDevAttrMultiProcessorCount, number);
  // Those of an H100.
  to->sharedMemPerBlock = 49152, to->sharedMemPerBlockOptin = 232448, to->sharedMemPerMultiprocessor = 233472;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->warpSize = 32;
  to->memPitch = to->maxGridSize[0] = 2147483647, to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024, to->maxThreadsDim[2] = 64;
  to->totalConstMem = 65536, to->textureAlignment = 512, to->l2CacheSize = 50 << 20;
  to->maxThreadsPerMultiProcessor = 2048, to->maxBlocksPerMultiProcessor = 32;
  to->canMapHostMemory = to->concurrentKernels = to->unifiedAddressing = to->managedMemory = to->cooperativeLaunch = to->clusterLaunch = 1;
  return keep(error);
}
cudaError_t cudaDeviceSynchronize(void) {
  CALL("");
  return DRIVER(cuCtxSynchronize());
}

// Errors.
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) {
  int error = stand_ins_call(__func__, "") ?: last;
  last = 0;
  return error;
}
const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "cudaSuccess";
  case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
  case cudaErrorNoDevice: return "cudaErrorNoDevice";
  case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
  case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
  default: return "cudaErrorOfAnotherName";
  }
}
const char *cudaGetErrorString(cudaError_t error) {
  const char *text = NULL;
  return cuGetErrorString((CUresult)error, &text) || !text ? "some other error" : text;
}

// Memory.
cudaError_t cudaMalloc(void **to, size_t len) {
  CALL("%zu", len);
  return DRIVER(cuMemAlloc((CUdeviceptr *)to, len));
}
cudaError_t cudaFree(void *at) {
  CALL("%p", at);
  return at ? DRIVER(cuMemFree(D(at))) : 0;
}
cudaError_t cudaMallocHost(void **to, size_t len) {
  CALL("%zu", len);
  return DRIVER(cuMemAllocHost(to, len));
}
cudaError_t cudaHostAlloc(void **to, size_t len, unsigned flags) {
  CALL("%zu", len);
  return DRIVER(cuMemAllocHost(to, len));
}
cudaError_t cudaFreeHost(void *at) {
  CALL("%p", at);
  return DRIVER(cuMemFreeHost(at));
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
  CALL("");
  return DRIVER(cuMemGetInfo(left, all));
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *at) {
  CALL("%p", at);
  unsigned type = 0;
  memset(to, 0, sizeof *to);
  to->devicePointer = (void *)at;
  to->type = ensure() || cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, D(at)) ? 0 : type;
  return 0;
}
cudaError_t cudaMemset(void *at, int value, size_t len) {
  CALL("%zu", len);
  return DRIVER(cuMemsetD8(D(at), value, len));
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t len, cudaStream_t stream) {
  CALL("%zu stream=%p", len, stream);
  return DRIVER(cuMemsetD8Async(D(at), value, len, stream));
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t len, enum cudaMemcpyKind kind) {
  CALL("%zu kind=%d", len, kind);
  switch (kind) {
  case cudaMemcpyHostToDevice: return DRIVER(cuMemcpyHtoD(D(to), from, len));
  case cudaMemcpyDeviceToHost: return DRIVER(cuMemcpyDtoH(to, D(from), len));
  case cudaMemcpyDeviceToDevice: return DRIVER(cuMemcpyDtoD(D(to), D(from), len));
  default: return DRIVER(cuMemcpy(D(to), D(from), len));
  }
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t len, enum cudaMemcpyKind kind, cudaStream_t stream) {
  CALL("%zu kind=%d stream=%p", len, kind, stream);
  switch (kind) {
  case cudaMemcpyHostToDevice: return DRIVER(cuMemcpyHtoDAsync(D(to), from, len, stream));
  case cudaMemcpyDeviceToHost: return DRIVER(cuMemcpyDtoHAsync(to, D(from), len, stream));
  case cudaMemcpyDeviceToDevice: return DRIVER(cuMemcpyDtoDAsync(D(to), D(from), len, stream));
  default: return DRIVER(cuMemcpyAsync(D(to), D(from), len, stream));
  }
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  int error = 0;
  for (size_t row = 0; row < height && !error; row++)
    error = cudaMemcpyAsync((char *)to + row * to_step, (const char *)from + row * from_step, width, kind, stream);
  return error;
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t len, size_t offset, enum cudaMemcpyKind kind) {
  CALL("%zu", len);
  return memset(to, 0, len), 0;
}

// Streams and events.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags) {
  CALL("flags=%u", flags);
  return DRIVER(cuStreamCreate(to, flags));
}
cudaError_t cudaStreamCreate(cudaStream_t *to) { return cudaStreamCreateWithFlags(to, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CALL("stream=%p", stream);
  return DRIVER(cuStreamDestroy(stream));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CALL("stream=%p", stream);
  return DRIVER(cuStreamSynchronize(stream));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  CALL("stream=%p event=%p", stream, event);
  return DRIVER(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *to) {
  return DRIVER(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)to));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags) {
  CALL("flags=%u", flags);
  return DRIVER(cuEventCreate(to, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t *to) { return cudaEventCreateWithFlags(to, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CALL("event=%p", event);
  return DRIVER(cuEventDestroy(event));
}
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t from, cudaEvent_t until) { return DRIVER(cuEventElapsedTime(to, from, until)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  CALL("event=%p stream=%p", event, stream);
  return DRIVER(cuEventRecord(event, stream));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CALL("event=%p", event);
  return DRIVER(cuEventSynchronize(event));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  CALL("stream=%p", stream);
  return DRIVER(cuLaunchHostFunc(stream, function, data));
}

// The real runtime refuses a launch in a stream of another device than the thread's.
static int check_device(void *stream) {
  CUcontext context;
  CUdevice of_stream, of_thread;
  int error = ensure() ?: cuStreamGetCtx(stream, &context) ?: cuCtxGetDevice(&of_thread) ?: cuCtxPushCurrent(context);
  if (error) return error;
  error = cuCtxGetDevice(&of_stream) ?: cuCtxPopCurrent(&context);
  if (!error && of_stream != of_thread) {
    stand_in_note("a launch in a stream of another device than the thread's");
    return cudaErrorInvalidResourceHandle;
  }
  return error;
}
int stand_ins_enqueue(void *stream, void (*function)(void *), void *data) {
  return keep(check_device(stream) ?: cuLaunchHostFunc(stream, function, data));
}
int stand_ins_runs_once(void *stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return ensure() || cuStreamIsCapturing(stream, &status) || status == CU_STREAM_CAPTURE_STATUS_NONE;
}
int stand_ins_take(void *stream, void **to, size_t len) { return keep(ensure() ?: cuMemAllocAsync((CUdeviceptr *)to, len, stream)); }
int stand_ins_give(void *stream, void *at) { return keep(ensure() ?: cuMemFreeAsync(D(at), stream)); }
void stand_ins_touch(void *stream, const void *at, size_t len, int writes) {
  if (at && len && !ensure()) stand_in_touch(stream, D(at), len, writes);
}
