//! The providers of a session on a GPU, with their options.

use std::collections::BTreeMap;

use ort::ep::{self, ArbitrarilyConfigurableExecutionProvider as _};

use super::gpu::Gpu;
use crate::cuda::{CudaOptions, Stream};

/// The providers of a session's operators; the first that can run an operator does. `is_optimised`:
/// the providers have already optimised the graph. `tensorrt`: the options of TensorRT, if the
/// session uses it.
pub(super) fn providers(
    options: &CudaOptions,
    gpu: &Gpu,
    stream: Option<&Stream>,
    is_optimised: bool,
    tensorrt: Option<&BTreeMap<String, String>>,
) -> Vec<ep::ExecutionProviderDispatch> {
    let device = i32::try_from(gpu.device.ordinal()).unwrap_or(i32::MAX);
    let raw = stream.map(|stream| stream.raw().cast::<()>());
    let mut cuda = ep::CUDA::default()
        .with_device_id(device)
        .with_tf32(options.tf32)
        .with_arena_extend_strategy(ep::ArenaExtendStrategy::SameAsRequested)
        // Trying every algorithm takes seconds for each size of batch.
        .with_conv_algorithm_search(ep::cuda::ConvAlgorithmSearch::Heuristic)
        // Once: a graph with turned layouts would be turned to and fro again, and its values have
        // other shapes.
        .with_prefer_nhwc(options.nhwc && !is_optimised)
        // With channels first cuDNN also adds a tensor. The library clears that tensor in the
        // process's default stream, which has no order with ours.
        .with_fuse_conv_bias(options.nhwc);
    if let Some(limit) = options.memory_limit {
        cuda = cuda.with_memory_limit(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    if let Some(raw) = raw {
        // SAFETY: the stream outlives the session: lanes drop their sessions first.
        cuda = unsafe { cuda.with_compute_stream(raw) };
    }
    let mut providers = Vec::new();
    if let Some(options) = tensorrt {
        let mut tensorrt = ep::TensorRT::default().with_device_id(device);
        for (key, value) in options {
            tensorrt = tensorrt.with_arbitrary_config(key, value);
        }
        if let Some(raw) = raw {
            // SAFETY: as above.
            tensorrt = unsafe { tensorrt.with_compute_stream(raw) };
        }
        providers.push(tensorrt.build().error_on_failure());
    }
    providers.push(cuda.build().error_on_failure());
    providers
}
