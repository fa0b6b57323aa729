//! Entry points that are there, so that a program that loads them goes on, and that always say that they are not supported.

macro_rules! unsupported {
    ($($name:ident)*) => {
        api! {
            $(
                // The arguments are not looked at, which the C calling convention allows.
                $name() Nothing |_session| { Err(crate::result::CUresult::CUDA_ERROR_NOT_SUPPORTED) }
            )*
        }
    };
}

unsupported! {
    cuGraphCreate
    cuGraphKernelNodeGetParams_v2
    cuCtxCreate_v4
    cuCtxSetFlags
    cuCtxGetLimit
    cuCtxSetLimit
    cuCtxGetCacheConfig
    cuCtxSetCacheConfig
    cuModuleLoad
    cuModuleLoadData
    cuModuleLoadDataEx
    cuModuleUnload
    cuModuleGetFunction
    cuModuleGetGlobal_v2
    cuFuncGetAttribute
    cuFuncSetAttribute
    cuFuncSetCacheConfig
    cuLibraryLoadData
    cuLaunchKernel
    cuLaunchKernelEx
    cuLaunchCooperativeKernel
    cuImportExternalMemory
    cuDestroyExternalMemory
    cuExternalMemoryGetMappedBuffer
    cuMemAllocManaged
    cuMemPoolCreate
    cuMemPoolDestroy
    cuMemAllocFromPoolAsync
    cuDeviceSetMemPool
    cuMemAdvise_v2
    cuMemPrefetchAsync_v2
    cuMemcpyPeerAsync
    cuStreamAttachMemAsync
    cuStreamAddCallback
    cuGreenCtxRecordEvent
    cuGreenCtxWaitEvent
}
