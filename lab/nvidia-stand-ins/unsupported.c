// What is not made here of libcudart.so.13: pools, graphs (whose calls are the engine's own, of the driver), libraries. The provider does not use them unasked.
#include "stand_ins.h"

// cudaErrorNotSupported; the parameters are not looked at.
#define UNSUPPORTED(name)                                                                                                                  \
  int name() { return stand_ins_call(#name, " "), 801; }
UNSUPPORTED(cudaMallocFromPoolAsync)
UNSUPPORTED(cudaFreeAsync)
UNSUPPORTED(cudaMemPoolCreate)
UNSUPPORTED(cudaMemPoolDestroy)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaStreamBeginCapture)
UNSUPPORTED(cudaStreamEndCapture)
UNSUPPORTED(cudaGraphInstantiate)
UNSUPPORTED(cudaGraphLaunch)
UNSUPPORTED(cudaGraphDestroy)
UNSUPPORTED(cudaGraphExecDestroy)
UNSUPPORTED(cudaLibraryLoadData)
UNSUPPORTED(cudaLibraryGetKernel)
UNSUPPORTED(cudaLibraryUnload)
UNSUPPORTED(cudaGetDriverEntryPointByVersion)

// The provider's one symbol of the driver itself, for kernels that are not computed here.
int cuTensorMapEncodeTiled() { return 801; }
