//! Kernels of a program's own, which host memory cannot run. The entry points exist so that a
//! program that loads them goes on.

macro_rules! unsupported {
    ($($name:ident)*) => {
        api! {
            $(
                // The arguments are ignored, which the C calling convention allows.
                $name() Nothing |_session| { Err(crate::result::CUresult::CUDA_ERROR_NOT_SUPPORTED) }
            )*
        }
    };
}

unsupported! {
    cuModuleLoadData
    cuModuleUnload
    cuModuleGetFunction
    cuLaunchKernel
}
