//! A run of a segment that was recorded as a graph, and the tests that it must pass before it is
//! used.

use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_core::{Duration, median};
use downbeat_engine::graph_report::{GraphNodes, GraphOutcome};
use downbeat_engine::tensor::Lent;
use downbeat_engine::tensor::{Buffer, Tensor};

use super::agreement::{agree, noise};
use super::host_kernels::Call;
use super::segment_session::{Ground, Made, SegmentSession};
use crate::cuda::{CudaBuffer, DeviceAllocation, Graph, PinnedBytes};

/// The largest ratio of times with and without a graph at which the graph is kept: more is not
/// chance. If both take the same time, the graph leaves the host more time.
const NOT_SLOWER: f64 = 1.03;

/// The number of timed runs with and without the graph, in turn.
const TIMED: usize = 5;

/// A recorded run. Its inputs and outputs stay where they were during the recording.
pub(super) struct RecordedRun {
    pub graph: Graph,
    /// The memory of its inputs, shared with other graphs of the session. It may be larger than the
    /// inputs.
    pub inputs: Vec<Arc<DeviceAllocation>>,
    /// Each launch writes them, and so do other runs of the session.
    pub outputs: Vec<Tensor>,
    /// The library's host kernels that the recording calls.
    pub call: Option<Arc<Call>>,
}

impl RecordedRun {
    /// The nodes of the graph.
    pub(super) fn nodes(&self) -> &GraphNodes {
        self.graph.nodes()
    }

    /// Enqueues a launch on inputs with the recorded shapes. The inputs must stay until the launch
    /// is over.
    pub(super) fn enqueue(&mut self, ground: &Ground, inputs: &[Tensor]) -> Result<Made, String> {
        for (memory, tensor) in self.inputs.iter().zip(inputs) {
            let slice = tensor.data.device().ok_or("strings have no place in a graph")?;
            // SAFETY: the caller keeps the input until the launch is over.
            unsafe { memory.copy(&ground.stream, 0, slice) }?;
        }
        self.graph.launch(&ground.stream)?;
        let outputs = self.outputs.iter().filter_map(share).collect();
        Ok(Made { outputs, lasts: false, held: self.call.clone() })
    }
}

impl SegmentSession {
    /// Records a run and compares it with the run before. That run has taken the needed memory,
    /// with as many outputs in use. Returns the graph if it is worth keeping. Waits for each run.
    ///
    /// # Errors
    /// In words: the reason against a graph, such as work that cannot be repeated, or different
    /// answers.
    pub(super) fn trial(
        &mut self,
        ground: &Ground,
        inputs: &[Tensor],
    ) -> Result<(Option<RecordedRun>, GraphOutcome), String> {
        let mut inputs = ground.telling(inputs)?;
        let expected = {
            let (_, made) = ground.time(|| self.run(ground, &mut inputs))?;
            made.outputs.iter().map(|output| Answer::of(ground, output)).collect::<Result<Vec<_>, _>>()?
        };
        let mut recorded = self.record(ground, &inputs)?;
        let (_, made) = ground.time(|| recorded.enqueue(ground, &inputs))?;
        let got = made.outputs.iter().map(|output| Answer::of(ground, output)).collect::<Result<Vec<_>, _>>()?;
        if got.len() != expected.len() || !expected.iter().zip(&got).all(|(expected, got)| expected.agrees(got)) {
            return Err("it gives other answers as a graph".into());
        }
        let (mut plain, mut graph) = ([Duration::ZERO; TIMED], [Duration::ZERO; TIMED]);
        for (plain, graph) in plain.iter_mut().zip(&mut graph) {
            (*plain, _) = ground.time(|| self.run(ground, &mut inputs))?;
            (*graph, _) = ground.time(|| recorded.enqueue(ground, &inputs))?;
        }
        let [plain, graph] = [plain, graph].map(|times| median(times).unwrap_or_default());
        let nodes = recorded.nodes().clone();
        if graph.as_secs_f64() > NOT_SLOWER * plain.as_secs_f64() {
            return Ok((None, GraphOutcome::Slower { nodes, plain, graph }));
        }
        Ok((Some(recorded), GraphOutcome::Recorded { nodes, plain, graph }))
    }
}

/// An output of a run.
struct Answer {
    datatype: DataType,
    shape: Vec<usize>,
    bytes: PinnedBytes,
}

impl Answer {
    /// Copies an output of a run that is over.
    fn of(ground: &Ground, output: &Tensor) -> Result<Answer, String> {
        Ok(Answer { datatype: output.datatype, shape: output.shape.clone(), bytes: ground.bytes(output)? })
    }

    fn agrees(&self, got: &Answer) -> bool {
        self.datatype == got.datatype
            && self.shape == got.shape
            && agree(self.datatype, self.bytes.bytes(), got.bytes.bytes())
    }
}

impl Ground {
    /// The same inputs, with noise instead of inputs that are all zero, as in a warm-up: zeros
    /// would show few differences.
    fn telling(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let telling = |tensor: &Tensor| {
            let same = share(tensor).ok_or("strings have no place in a graph")?;
            if self.bytes(tensor)?.bytes().iter().any(|byte| *byte != 0) {
                return Ok(same);
            }
            let len = tensor.data.len();
            let Some(noise) = noise(tensor.datatype, len).filter(|noise| !noise.is_empty()) else { return Ok(same) };
            let memory = DeviceAllocation::in_stream(&self.stream, len, "an input to try a graph with")?;
            let mut pinned = self.gpu.pinned.take(len)?;
            pinned.bytes_mut().copy_from_slice(&noise);
            // SAFETY: both live until the copy is over or has failed.
            let copied = unsafe { memory.upload(&self.stream, 0, pinned.bytes()) };
            copied.and(self.stream.finish())?;
            Ok(Tensor { data: Buffer::from_device(memory.into_slice()), ..same })
        };
        inputs.iter().map(telling).collect()
    }
}

/// The same tensor, on the same memory of the device.
fn share(tensor: &Tensor) -> Option<Tensor> {
    let slice = tensor.data.device()?.clone();
    Some(Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data: Buffer::from_device(slice) })
}
