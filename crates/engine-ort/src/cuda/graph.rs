//! CUDA graphs: work that was recorded from a stream, and is enqueued again as one piece.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use downbeat_engine::graph_report::GraphNodes;

use super::graph_node::check_repeatable;
use super::{CudaError, Device, Stream};

/// Recorded work, which can be enqueued any number of times, with the addresses of the recording.
pub(crate) struct Graph {
    device: Arc<Device>,
    raw: sys::CUgraphExec,
    nodes: GraphNodes,
}

// SAFETY: any thread may launch a graph, one at a time, which `launch` ensures by its `&mut self`.
unsafe impl Send for Graph {}

/// The recorded work, as the driver returned it.
struct Recorded {
    device: Arc<Device>,
    raw: sys::CUgraph,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by the driver, destroyed once.
            self.device.release(|| unsafe { result::graph::destroy(self.raw) });
        }
    }
}

impl Stream {
    /// Records the work that `enqueue` gives to this stream instead of running it. Only this thread
    /// may use the stream meanwhile; other streams go on.
    ///
    /// # Errors
    /// In words: `enqueue` fails, or its work cannot be recorded or repeated. Examples are a wait,
    /// memory of the device that stays allocated, or a copy from host memory.
    pub(crate) fn record_graph<T>(&self, enqueue: impl FnOnce() -> Result<T, String>) -> Result<(Graph, T), String> {
        let device = self.device();
        device.bind()?;
        // The recording must not make calls of other threads fail.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.begin_recording();
        // SAFETY: the stream is alive.
        let begun = device.check("recording a graph", unsafe { result::stream::begin_capture(self.raw(), mode) });
        if let Err(error) = begun {
            self.end_recording();
            return Err(error.into());
        }
        let made = enqueue();
        // SAFETY: as above. The recording ends in any case: a stream that records runs nothing.
        let ended = unsafe { result::stream::end_capture(self.raw()) };
        self.end_recording();
        let recorded = device.check("recording a graph", ended).map(|raw| Recorded { device: device.clone(), raw });
        let made = made?;
        let recorded = recorded?;
        if recorded.raw.is_null() {
            return Err("nothing was recorded".into());
        }
        // SAFETY: it is alive.
        let nodes = unsafe { check_repeatable(recorded.raw, device) }?;
        // SAFETY: as above. The instance does not need the recording any more. There is only one,
        // which a graph that allocates memory requires.
        let raw = unsafe { result::graph::instantiate(recorded.raw, CUgraphInstantiate_flags(0)) };
        let raw = device.check("making a graph", raw)?;
        Ok((Graph { device: device.clone(), raw, nodes }, made))
    }
}

impl Graph {
    /// The graph's nodes.
    pub(crate) fn nodes(&self) -> &GraphNodes {
        &self.nodes
    }

    /// Enqueues the recorded work.
    pub(crate) fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both are alive.
        self.device.check("launching a graph", unsafe { result::graph::launch(self.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record_graph`, destroyed once; the driver keeps running work.
        self.device.release(|| unsafe { result::graph::exec_destroy(self.raw) });
    }
}
