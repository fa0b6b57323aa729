// Stand-ins for libcublas.so.13 and, with -DLT, libcublasLt.so.13: products of single-precision matrices, and of half-precision ones summed in single, are
// computed, all others only enqueued.
#include "stand_ins.h"
#include <stdlib.h>
#include <string.h>

// The parameters are not looked at.
#define QUIET(name)                                                                                                                        \
  int name() { return 0; }
static void nothing(void *data) {}

#ifdef LT
#define MAKE(name)                                                                                                                         \
  int name(void **to) { return !(*to = calloc(1, 16)); }
#define DESTROY(name)                                                                                                                      \
  int name(void *made) { return free(made), 0; }
MAKE(cublasLtCreate)
MAKE(cublasLtMatmulDescCreate)
MAKE(cublasLtMatmulPreferenceCreate)
MAKE(cublasLtMatrixLayoutCreate)
MAKE(cublasLtMatrixTransformDescCreate)
DESTROY(cublasLtDestroy)
DESTROY(cublasLtMatmulDescDestroy)
DESTROY(cublasLtMatmulPreferenceDestroy)
DESTROY(cublasLtMatrixLayoutDestroy)
DESTROY(cublasLtMatrixTransformDescDestroy)
QUIET(cublasLtMatmulDescSetAttribute)
QUIET(cublasLtMatmulPreferenceSetAttribute)
QUIET(cublasLtMatrixLayoutSetAttribute)
QUIET(cublasLtMatmulAlgoConfigSetAttribute)
QUIET(cublasLtMatmulAlgoInit)
QUIET(cublasLtMatrixTransform)
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *of, void *a, void *b, void *c, void *d, void *preference, int wanted, char *to,
                                   int *count) {
  // The size of a cublasLtMatmulHeuristicResult_t.
  memset(to, 0, 104);
  return *count = 1, 0;
}
int cublasLtMatmul(void *handle, void *of, void *alpha, void *a, void *ad, void *b, void *bd, void *beta, void *c, void *cd, void *d,
                   void *dd, void *algorithm, void *workspace, size_t len, void *stream) {
  return stand_ins_call("cublasLtMatmul", "stream=%p", stream) ?: stand_ins_enqueue(stream, nothing, NULL);
}
#else
// CUBLAS_STATUS_EXECUTION_FAILED.
#define FAILED 13

// A handle is where its stream is kept.
int cublasCreate_v2(void ***to) {
  *to = calloc(1, sizeof **to);
  return stand_ins_call("cublasCreate_v2", "handle=%p", *to);
}
int cublasDestroy_v2(void **handle) {
  free(handle);
  return stand_ins_call("cublasDestroy_v2", "handle=%p", handle);
}
int cublasSetStream_v2(void **handle, void *stream) {
  *handle = stream;
  return stand_ins_call("cublasSetStream_v2", "handle=%p stream=%p", handle, stream);
}
int cublasGetMathMode(void *handle, int *to) { return *to = 0; }
QUIET(cublasSetMathMode)
const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS_EXECUTION_FAILED" : "CUBLAS_STATUS_SUCCESS"; }
const char *cublasGetStatusString(int status) { return status ? "the function failed to launch" : "success"; }

int cublasSgemm_v2(void **handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b, int ldb,
                   const float *beta, float *c, int ldc) {
  int code = stand_ins_call("cublasSgemm_v2", "%dx%dx%d stream=%p", m, n, k, *handle);
  struct product product = {ta, tb, m, n, k, lda, ldb, ldc, 0, 0, *alpha, *beta, a, b, c};
  return code ?: stand_ins_multiply(*handle, product) ? FAILED : 0;
}
int cublasGemmEx(void **handle, int ta, int tb, int m, int n, int k, const float *alpha, const void *a, int a_type, int lda, const void *b,
                 int b_type, int ldb, const float *beta, void *c, int c_type, int ldc, int compute, int algorithm) {
  enum { CUDA_R_16F = 2, CUBLAS_COMPUTE_32F = 68 };
  int code = stand_ins_call("cublasGemmEx", "%dx%dx%d types=%d,%d,%d,%d stream=%p", m, n, k, a_type, b_type, c_type, compute, *handle);
  if (code) return code;
  int computed = a_type == CUDA_R_16F && b_type == CUDA_R_16F && c_type == CUDA_R_16F && compute == CUBLAS_COMPUTE_32F;
  struct product product = {ta, tb, m, n, k, lda, ldb, ldc, 1, 0, computed ? *alpha : 0, computed ? *beta : 0, a, b, c};
  return (computed ? stand_ins_multiply(*handle, product) : stand_ins_enqueue(*handle, nothing, NULL)) ? FAILED : 0;
}
#define ENQUEUE(name)                                                                                                                      \
  int name(void **handle) {                                                                                                                \
    return stand_ins_call(#name, "stream=%p", *handle) ?: stand_ins_enqueue(*handle, nothing, NULL) ? FAILED : 0;                          \
  }
ENQUEUE(cublasDgeam)
ENQUEUE(cublasDgemmBatched)
ENQUEUE(cublasDgemmStridedBatched)
ENQUEUE(cublasDgemm_v2)
ENQUEUE(cublasDgetrfBatched)
ENQUEUE(cublasDgetriBatched)
ENQUEUE(cublasGemmBatchedEx)
ENQUEUE(cublasGemmStridedBatchedEx)
ENQUEUE(cublasScopy_v2)
ENQUEUE(cublasSgeam)
ENQUEUE(cublasSgemmBatched)
ENQUEUE(cublasSgemmStridedBatched)
ENQUEUE(cublasSgetrfBatched)
ENQUEUE(cublasSgetriBatched)
ENQUEUE(cublasSscal_v2)
#endif
