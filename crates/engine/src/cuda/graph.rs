//! CUDA graphs: what a stream was given once, given to it again as one piece.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::graph_node::check_repeatable;
use super::{CudaError, Device, Stream};
use crate::graph_report::GraphNodes;

/// Work that was recorded, to be enqueued as often as wanted, with the addresses that it had then.
pub(crate) struct Graph {
    device: Arc<Device>,
    raw: sys::CUgraphExec,
    nodes: GraphNodes,
}

// SAFETY: a graph may be launched from any thread, by one at a time, which `launch` asks for.
unsafe impl Send for Graph {}

/// What was recorded, as the driver gave it.
struct Recorded {
    device: Arc<Device>,
    raw: sys::CUgraph,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: given by the driver, destroyed once.
            self.device.release(|| unsafe { result::graph::destroy(self.raw) });
        }
    }
}

impl Stream {
    /// Records what `enqueue` gives to this stream instead of running it. Only this thread may use the stream meanwhile; other streams go on.
    ///
    /// # Errors
    /// In words: `enqueue` fails, or does what cannot be recorded or repeated, such as waiting, keeping memory of the device, or copying from host memory.
    pub(crate) fn record_graph<T>(&self, enqueue: impl FnOnce() -> Result<T, String>) -> Result<(Graph, T), String> {
        let device = self.device();
        device.bind()?;
        // What other threads do is not to fail because of it.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.begin_recording();
        // SAFETY: the stream is alive.
        let begun = device.check("recording a graph", unsafe { result::stream::begin_capture(self.raw(), mode) });
        if let Err(error) = begun {
            self.end_recording();
            return Err(error.into());
        }
        let made = enqueue();
        // SAFETY: as above. Ended in any case: a stream that records runs nothing.
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
        // SAFETY: as above; what is made of it does not need it any more. Once, as has to be where it takes memory.
        let raw = unsafe { result::graph::instantiate(recorded.raw, CUgraphInstantiate_flags(0)) };
        let raw = device.check("making a graph", raw)?;
        Ok((Graph { device: device.clone(), raw, nodes }, made))
    }
}

impl Graph {
    /// What it is made of.
    pub(crate) fn nodes(&self) -> &GraphNodes {
        &self.nodes
    }

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
