// A stand-in for libcudnn.so.9: enough of the backend API for a plan to be made, and launches that take their place in the stream and compute nothing.
#include "stand_ins.h"
#include <cudnn_backend.h>
#include <stdlib.h>
#include <string.h>

// A handle is where its stream is kept.
struct cudnnContext {
  void *stream;
};
cudnnStatus_t cudnnCreate(cudnnHandle_t *to) {
  *to = calloc(1, sizeof **to);
  return stand_ins_call("cudnnCreate", "handle=%p", *to);
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  free(handle);
  return stand_ins_call("cudnnDestroy", "handle=%p", handle);
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return stand_ins_call("cudnnSetStream", "handle=%p stream=%p", handle, stream);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *to) { return *to = handle->stream, 0; }
size_t cudnnGetVersion(void) { return 91300; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return status ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *to, size_t len) { strncpy(to, "no more is known", len); }

static void nothing(void *data) {}
static cudnnStatus_t enqueue(const char *name, cudnnHandle_t handle) {
  int code = stand_ins_call(name, "stream=%p", handle->stream);
  return code ?: stand_ins_enqueue(handle->stream, nothing, NULL) ? CUDNN_STATUS_EXECUTION_FAILED : 0;
}

// A descriptor is its type.
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *to) {
  int *made = malloc(sizeof *made);
  *made = type, *to = made;
  return 0;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) { return free(made), 0; }
cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t made) { return 0; }
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t count, const void *from) {
  return 0;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) {
  int type = *(int *)made;
  return stand_ins_call(type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ? "cudnn plan" : "cudnnBackendFinalize", "type=%d", type);
}
// One engine, which needs some workspace.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t count, int64_t *had, void *to) {
  int64_t number = 0, there = 1;
  switch (name) {
  case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: number = 65536; break;
  case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: number = 1; break;
  case CUDNN_ATTR_ENGINEHEUR_RESULTS:
  case CUDNN_ATTR_ENGINECFG_ENGINE:
  case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
  case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
  case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: break;
  default: there = 0;
  }
  if (had) *had = there;
  if (to && count > 0 && there && type == CUDNN_TYPE_INT64) *(int64_t *)to = number;
  if (to && count > 0 && there && type == CUDNN_TYPE_INT32) *(int *)to = number;
  return 0;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t values) {
  return enqueue("cudnnBackendExecute", handle);
}
#define ENQUEUE(name)                                                                                                                      \
  cudnnStatus_t name(cudnnHandle_t handle) { return enqueue(#name, handle); }
ENQUEUE(cudnnActivationForward)
ENQUEUE(cudnnAddTensor)
ENQUEUE(cudnnBatchNormalizationForwardInference)
ENQUEUE(cudnnBatchNormalizationForwardTraining)
ENQUEUE(cudnnConvolutionBiasActivationForward)
ENQUEUE(cudnnConvolutionForward)
ENQUEUE(cudnnLRNCrossChannelForward)
ENQUEUE(cudnnPoolingForward)
ENQUEUE(cudnnReduceTensor)
ENQUEUE(cudnnSoftmaxForward)
ENQUEUE(cudnnRNNForward)

#define DESCRIPTOR(name)                                                                                                                   \
  cudnnStatus_t cudnnCreate##name##Descriptor(void **to) { return *to = calloc(1, 16), 0; }                                                \
  cudnnStatus_t cudnnDestroy##name##Descriptor(void *made) { return free(made), 0; }
DESCRIPTOR(Activation)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(LRN)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNNData)
DESCRIPTOR(RNN)
DESCRIPTOR(ReduceTensor)
DESCRIPTOR(Tensor)
#define QUIET(name)                                                                                                                        \
  cudnnStatus_t name() { return 0; }
QUIET(cudnnSetActivationDescriptor)
QUIET(cudnnSetConvolutionGroupCount)
QUIET(cudnnSetConvolutionMathType)
QUIET(cudnnSetConvolutionNdDescriptor)
QUIET(cudnnSetFilterNdDescriptor)
QUIET(cudnnSetLRNDescriptor)
QUIET(cudnnSetPoolingNdDescriptor)
QUIET(cudnnSetReduceTensorDescriptor)
QUIET(cudnnSetTensorNdDescriptor)
QUIET(cudnnDeriveBNTensorDescriptor)
cudnnStatus_t cudnnGetReductionIndicesSize(void *handle, void *of, void *a, void *b, size_t *to) { return *to = 0, 0; }
cudnnStatus_t cudnnGetReductionWorkspaceSize(void *handle, void *of, void *a, void *b, size_t *to) { return *to = 256, 0; }
cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(void *handle, void *x, void *w, void *of, void *y, int algorithm, size_t *to) {
  return *to = 65536, 0;
}
// A cudnnConvolutionFwdAlgoPerf_t.
struct found {
  int algorithm, status;
  float time;
  size_t memory;
  int others[5];
};
cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(void *handle, void *x, void *w, void *of, void *y, int wanted, int *count,
                                                     struct found *to) {
  *to = (struct found){.memory = 65536};
  return *count = 1, stand_ins_call("cudnnGetConvolutionForwardAlgorithm_v7", " ");
}
cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(void *handle, void *x, void *xd, void *w, void *wd, void *of, void *y, void *yd,
                                                     int wanted, int *count, struct found *to, void *workspace, size_t len) {
  *to = (struct found){.memory = 65536};
  return *count = 1, stand_ins_call("cudnnFindConvolutionForwardAlgorithmEx", "workspace=%zu", len);
}
