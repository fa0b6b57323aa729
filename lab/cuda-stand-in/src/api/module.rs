//! The entry points for a program's own kernels. Host memory cannot run kernels, so each call
//! returns an error. The entry points exist only because a program may look them up at its start.

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
