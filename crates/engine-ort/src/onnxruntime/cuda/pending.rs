//! An enqueued launch, with the memory that it needs until it is over.

use std::ops::Range;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tensor::DataType;
use downbeat_engine::tensor::state::State;
use downbeat_engine::tensor::{Buffer, Tensor};
use downbeat_engine::{Pending, RunError};

use super::gpu::Gpu;
use super::host_kernels::Call;
use crate::cuda::{DeviceSlice, Expected, Marks, PinnedBytes};

/// Memory that is only kept.
pub(super) enum Held {
    Slice(#[expect(dead_code, reason = "only kept")] DeviceSlice),
    Host(#[expect(dead_code, reason = "only kept")] Buffer),
    Call(#[expect(dead_code, reason = "only kept")] Arc<Call>),
}

/// A tensor that a launch leaves.
pub(super) enum Left {
    /// The tensor is being copied to the host.
    Copied { datatype: DataType, shape: Vec<usize>, data: PinnedBytes },
    /// The tensor stays in its place.
    Here(Tensor),
}

/// An enqueued launch, with the memory that it needs until it is over.
pub(super) struct Enqueued {
    pub engine: &'static str,
    pub gpu: Arc<Gpu>,
    pub marks: Arc<Marks>,
    /// The memory that it reads and writes, and the tensors that were joined for it.
    #[expect(dead_code, reason = "only kept")]
    pub held: Vec<Held>,
    pub left: Vec<Left>,
    /// The segments and the input bytes, by which similar launches are found.
    pub range: Range<usize>,
    pub bytes: usize,
    /// The record of launch times, which learns the time of this launch.
    pub expected: Arc<Expected>,
}

impl Pending for Enqueued {
    fn is_over(&self) -> bool {
        // An error counts as over: the waiting thread then receives the error.
        self.marks.is_over().unwrap_or(true)
    }

    fn spare(&self) -> Duration {
        self.marks.spare().into()
    }

    fn wait(mut self: Box<Self>) -> Result<State, RunError> {
        if let Err(error) = self.marks.wait() {
            let (reason, of_device) = self.gpu.explain(error.to_string());
            return Err(RunError { engine: self.engine, reason, of_device, of_executor: false, code: None });
        }
        if let Ok(took) = self.marks.took() {
            self.expected.learn(&self.range, self.bytes, took);
        }
        let tensor = |left| match left {
            Left::Here(tensor) => tensor,
            Left::Copied { datatype, shape, data } => {
                Tensor { datatype, shape, data: Buffer::from_lent(Box::new(data)) }
            }
        };
        Ok(State { tensors: self.left.drain(..).map(tensor).collect() })
    }
}

impl Drop for Enqueued {
    fn drop(&mut self) {
        // The memory of the launch is dropped next. If this wait fails, the device is lost and runs
        // no work.
        let _ = self.marks.wait();
    }
}
