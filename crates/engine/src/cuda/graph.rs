//! CUDA graphs: what a stream was given once, given to it again as one piece.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::{CudaError, Device, Stream};

/// Work that was recorded, to be enqueued as often as wanted, with the addresses that it had then.
pub(crate) struct Graph {
    device: Arc<Device>,
    raw: sys::CUgraphExec,
}

// SAFETY: a graph may be launched from any thread, by one at a time, which `launch` asks for.
unsafe impl Send for Graph {}

impl Stream {
    /// Records what `enqueue` gives to this stream instead of running it. Only this thread may use the stream meanwhile; other streams go on.
    ///
    /// # Errors
    /// In words: `enqueue` fails, or does what cannot be recorded, such as waiting or taking memory of the device.
    pub(crate) fn record_graph<T>(&self, enqueue: impl FnOnce() -> Result<T, String>) -> Result<(Graph, T), String> {
        let device = self.device();
        let words = |error: CudaError| error.to_string();
        device.bind().map_err(words)?;
        // What other threads do is not to fail because of it.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        device.check("recording a graph", unsafe { result::stream::begin_capture(self.raw(), mode) }).map_err(words)?;
        let made = enqueue();
        // SAFETY: as above. Ended in any case: a stream that records runs nothing.
        let graph = unsafe { result::stream::end_capture(self.raw()) };
        let graph = match (made, device.check("recording a graph", graph)) {
            (Ok(made), Ok(graph)) if !graph.is_null() => (graph, made),
            (Ok(_), Ok(_)) => return Err("nothing was recorded".into()),
            (Err(reason), recorded) => {
                if let Ok(graph) = recorded
                    && !graph.is_null()
                {
                    // SAFETY: given by the driver, destroyed once.
                    let _ = unsafe { result::graph::destroy(graph) };
                }
                return Err(reason);
            }
            (Ok(_), Err(error)) => return Err(words(error)),
        };
        let (graph, made) = graph;
        // SAFETY: given by the driver; not used after it was destroyed.
        let raw = unsafe {
            let raw = result::graph::instantiate(graph, CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            raw
        };
        let raw = device.check("making a graph", raw).map_err(words)?;
        Ok((Graph { device: device.clone(), raw }, made))
    }
}

impl Graph {
    /// Enqueues what was recorded.
    pub(crate) fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both are alive.
        self.device.check("launching a graph", unsafe { result::graph::launch(self.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record_graph`, destroyed once; the driver keeps what still runs.
        self.device.release(|| unsafe { result::graph::exec_destroy(self.raw) });
    }
}
