//! A segment on a lane: a session that enqueues in the lane's stream, and graphs of its work if
//! they are faster.
//!
//! # Many graphs on the memory of one session
//!
//! A session takes the values between its operators, and its outputs, from an arena of its own. The
//! memory goes back to the arena when the run is enqueued or the output is dropped. A recorded run
//! goes on using its old addresses, which the arena may have given to a later run, or to another
//! graph. This is safe for four reasons:
//!
//! 1. All runs of a session, recorded or not, are enqueued in the one stream of its lane. No two
//!    run at once, and the values in a run's own memory need not outlast the run.
//! 2. A graph's inputs are copied, in that stream, to memory that is no arena's (`input_memory`).
//!    Its outputs, and a run's outputs once there is a graph, are used in that stream before the
//!    session runs again. Their users are the next segments of the same launch, and copies at its
//!    end ([`Made::lasts`]). Outputs of earlier runs may live longer: the arena gives a recorded
//!    run no memory that is in use during the recording.
//! 3. The arena gives nothing back to the device before the session is dropped. The graphs and all
//!    references to their outputs are dropped before the session ([`SessionOwner`]). No run asks
//!    the library to shrink its arenas, and with `session.use_env_allocators` off no other session
//!    uses the arena.
//! 4. Weights, which runs read at addresses of their own, stay as long as the session.

use std::any::Any;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tensor::DataType;
use downbeat_engine::graph_report::GraphOutcome;
use downbeat_engine::tensor::Lent;
use downbeat_engine::tensor::{Buffer, Tensor};
use ort::session::{Session, SharedSessionInner};

use super::super::session::Names;
use super::super::value::{MemoryInfo, Value, element_type};
use super::binding::Binding;
use super::blueprint::Blueprint;
use super::gpu::Gpu;
use super::graph_log::{GraphLog, shapes};
use super::graph_table::{GraphTable, How, Shapes};
use super::host_kernels::{self, At, Call};
use super::placement;
use super::recorded_run::RecordedRun;
use super::weights::Weights;
use crate::cuda::{CudaBuffer, DeviceAllocation, DeviceSlice, Event, ForgetsLastError, PinnedBytes, Stream};

/// The GPU, stream and memory with which a lane's sessions run.
pub(super) struct Ground {
    pub gpu: Arc<Gpu>,
    pub stream: Arc<Stream>,
    pub on_device: MemoryInfo,
    pub on_host: MemoryInfo,
    /// The outcomes of the lane's segments.
    pub graphs: Arc<GraphLog>,
}

/// A session of a segment.
pub(super) struct SegmentSession {
    /// Dropped before the session, whose memory the graphs use.
    graphs: GraphTable<RecordedRun>,
    /// Memory for the graphs' inputs: for each input the largest so far.
    input_memory: Vec<Option<Arc<DeviceAllocation>>>,
    binding: Binding,
    names: Arc<Names>,
    owner: Arc<SessionOwner>,
    segment: usize,
    /// Whether the kernels are prepared anew when the shapes change ([`Blueprint::has_plans`]). A
    /// graph of other shapes then has nothing left to run.
    has_plans: bool,
    /// Whether the session needs each input on the host, as it does strings. The same for its
    /// outputs follows.
    pub inputs_on_host: Vec<bool>,
    outputs_on_host: Vec<bool>,
    /// Whether its runs may become graphs.
    may_record: bool,
}

/// A session with the parts that it needs. It may outlive the lane, as outputs may be in its
/// memory.
pub(super) struct SessionOwner {
    /// `None` only during the drop.
    session: Option<Arc<SharedSessionInner>>,
    _error: Option<ForgetsLastError>,
    _weights: Arc<Weights>,
    _stream: Arc<Stream>,
    gpu: Arc<Gpu>,
}

impl SessionOwner {
    fn session(&self) -> Result<&Arc<SharedSessionInner>, String> {
        self.session.as_ref().ok_or_else(|| "the session is gone: this is a defect".into())
    }
}

impl Drop for SessionOwner {
    fn drop(&mut self) {
        // The session gives its memory back on the device of the calling thread, which may be any,
        // and may wait for the device.
        let _ = self.gpu.enter();
        let _turn = self.gpu.turn();
        self.session = None;
    }
}

/// The outputs of a run, valid once the enqueued work is over.
pub(super) struct Made {
    pub outputs: Vec<Tensor>,
    /// Whether the outputs stay as they are when the session runs again.
    pub lasts: bool,
    /// Must be kept until the launch is over.
    pub held: Option<Arc<Call>>,
}

impl SegmentSession {
    /// Makes the session of the segment with this number. `refusal`: the reason why its runs must
    /// not become graphs.
    pub(super) fn new(
        session: &Session,
        (segment, blueprint): (usize, &Blueprint),
        weights: &Arc<Weights>,
        ground: &Ground,
        refusal: Option<&str>,
    ) -> Result<SegmentSession, String> {
        let owner = SessionOwner {
            session: Some(session.inner()),
            _error: (!ground.gpu.has_host_kernels).then_some(ForgetsLastError),
            _weights: weights.clone(),
            _stream: ground.stream.clone(),
            gpu: ground.gpu.clone(),
        };
        let (inputs_on_host, outputs_on_host) = if ground.gpu.has_host_kernels {
            (vec![false; blueprint.names.inputs().len()], vec![false; blueprint.names.outputs().len()])
        } else {
            placement::of(session, blueprint)?
        };
        // A graph would repeat copies from or to the host at the addresses of the recording.
        let on_host = |on_host: &[bool]| on_host.iter().filter(|on_host| **on_host).count();
        let refusal = match (refusal, on_host(&inputs_on_host), on_host(&outputs_on_host)) {
            (Some(refusal), ..) => Some(refusal.to_owned()),
            (None, 0, 0) => None,
            (None, inputs, outputs) => Some(format!(
                "the library wants {inputs} of the segment's inputs on the host, and leaves {outputs} of its outputs there"
            )),
        };
        let may_record = refusal.is_none();
        if let Some(reason) = refusal {
            ground.graphs.note(segment, &[], GraphOutcome::Refused { reason });
        }
        Ok(SegmentSession {
            graphs: GraphTable::new(if blueprint.has_plans { 1 } else { usize::MAX }),
            input_memory: blueprint.names.inputs().iter().map(|_| None).collect(),
            binding: Binding::new(session, &blueprint.names, outputs_on_host.clone())?,
            names: blueprint.names.clone(),
            owner: Arc::new(owner),
            segment,
            has_plans: blueprint.has_plans,
            inputs_on_host,
            outputs_on_host,
            may_record,
        })
    }

    /// Enqueues a run on inputs that are in their right places, and stay there until the launch is
    /// over.
    pub(super) fn enqueue(&mut self, ground: &Ground, inputs: &mut [Tensor]) -> Result<Made, String> {
        if !self.may_record {
            return self.run(ground, inputs);
        }
        let shapes = shapes(inputs);
        if self.has_plans {
            let gone = self.graphs.take_others(&shapes);
            self.drop_graphs(ground, gone)?;
        }
        let (how, forgotten) = self.graphs.next(&shapes);
        if let Some(forgotten) = forgotten {
            ground.graphs.forget(self.segment, &forgotten);
        }
        match how {
            How::Graph(graph) => graph.enqueue(ground, inputs),
            How::Plain => self.run(ground, inputs),
            // Requests do not wait while a model loads: the graph is tried when the shapes come
            // again.
            How::Try if ground.gpu.turn_is_taken() => self.run(ground, inputs),
            How::Try => self.try_graph(ground, inputs, &shapes),
        }
    }

    /// Drops graphs, which may still run.
    fn drop_graphs(&mut self, ground: &Ground, graphs: Vec<(Vec<usize>, RecordedRun)>) -> Result<(), String> {
        if graphs.is_empty() {
            return Ok(());
        }
        ground.stream.finish()?;
        graphs.iter().for_each(|(shapes, _)| ground.graphs.forget(self.segment, shapes));
        Ok(())
    }

    /// Makes a run with frequent shapes as always, then tries it as a graph. Blocks the caller
    /// until the trial is over.
    fn try_graph(&mut self, ground: &Ground, inputs: &mut [Tensor], shapes: &Shapes) -> Result<Made, String> {
        // No second trial if the batch cannot run at all.
        self.graphs.give_up(shapes);
        // The outputs stay as they are: they are in use during the recording.
        let (_, made) = ground.time(|| self.run(ground, inputs))?;
        let outcome = match self.trial(ground, inputs) {
            Ok((graph, outcome)) => {
                if let Some(graph) = graph {
                    let nodes = graph.nodes().count;
                    let gone = self.graphs.keep(shapes, graph, nodes);
                    self.drop_graphs(ground, gone)?;
                }
                outcome
            }
            Err(reason) => {
                drop(ForgetsLastError);
                // The device may have failed; otherwise the outputs are as good as before.
                ground.stream.finish()?;
                GraphOutcome::Refused { reason }
            }
        };
        if !self.graphs.has_graphs() {
            self.input_memory.fill(None);
        }
        ground.graphs.note(self.segment, shapes, outcome);
        Ok(made)
    }

    /// Enqueues a run without a graph.
    pub(super) fn run(&mut self, ground: &Ground, inputs: &mut [Tensor]) -> Result<Made, String> {
        if ground.gpu.has_host_kernels {
            let address = |tensor: &Tensor| Some(tensor.data.device()?.address());
            let addresses = inputs.iter().map(address).collect::<Option<Vec<_>>>();
            let addresses = addresses.ok_or("strings have no place on a device")?;
            let (outputs, call) = self.prepare_on_host(ground, &addresses, inputs)?;
            call.enqueue(&ground.stream)?;
            return Ok(Made { outputs, lasts: true, held: Some(call) });
        }
        let value = |tensor: &mut Tensor| match tensor.data.device() {
            Some(slice) => ground.value(slice.address(), slice.len(), tensor),
            None if tensor.datatype == DataType::Bytes => Value::of_strings(tensor),
            None => Value::of_memory(&ground.on_host, tensor),
        };
        let values = inputs.iter_mut().map(value).collect::<Result<Vec<_>, _>>()?;
        let outputs = self.binding.run(&values, &ground.on_device, &ground.on_host)?;
        let outputs = outputs.into_iter().zip(&self.outputs_on_host).map(|(value, on_host)| {
            if *on_host { self.output_on_host(value, inputs) } else { output(value, inputs, &ground.gpu, &self.owner) }
        });
        // Graphs that were made later may write to the same memory.
        let lasts = !self.graphs.has_graphs();
        Ok(Made { outputs: outputs.collect::<Result<_, _>>()?, lasts, held: None })
    }

    /// An output that the library has left on the host.
    fn output_on_host(&self, value: Value, inputs: &[Tensor]) -> Result<Tensor, String> {
        let mut tensor = value.into_tensor(self.owner.session()?, &[], false)?;
        let range = tensor.data.as_slice().as_ptr_range();
        let is_input = |input: &Tensor| {
            input.data.device().is_none() && input.data.as_slice().as_ptr_range().contains(&range.start)
        };
        if inputs.iter().any(is_input) {
            // Passed through: its memory is the input's.
            tensor.data = Buffer::from(tensor.data.as_slice());
        }
        Ok(tensor)
    }

    /// Prepares a run of the library's kernels for the host, on inputs at these addresses that are
    /// like `inputs`.
    fn prepare_on_host(
        &self,
        ground: &Ground,
        addresses: &[u64],
        inputs: &[Tensor],
    ) -> Result<(Vec<Tensor>, Arc<Call>), String> {
        let at = |(address, tensor): (&u64, &Tensor)| {
            let (len, shape) = (tensor.data.len(), tensor.shape.clone());
            At { address: *address, len, shape, datatype: tensor.datatype }
        };
        let ats = addresses.iter().zip(inputs).map(at).collect();
        let (made, call) = host_kernels::prepare(self.owner.session()?, &self.names, &ground.stream, ats)?;
        let tensor = |(At { shape, datatype, .. }, slice): host_kernels::Output| Tensor {
            datatype,
            shape,
            data: Buffer::from_device(slice),
        };
        Ok((made.into_iter().map(tensor).collect(), call))
    }

    /// Records a run on inputs like these. The input memory is allocated before, as a recording
    /// cannot allocate it.
    pub(super) fn record(&mut self, ground: &Ground, inputs: &[Tensor]) -> Result<RecordedRun, String> {
        let memory = self.input_memory(ground, inputs)?;
        if ground.gpu.has_host_kernels {
            let addresses: Vec<u64> = memory.iter().map(|memory| memory.address()).collect();
            let (outputs, call) = self.prepare_on_host(ground, &addresses, inputs)?;
            let (graph, ()) = ground.stream.record_graph(|| call.enqueue(&ground.stream))?;
            return Ok(RecordedRun { graph, inputs: memory, outputs, call: Some(call) });
        }
        let value = |(memory, tensor): (&Arc<DeviceAllocation>, &Tensor)| {
            ground.value(memory.address(), tensor.data.len(), tensor)
        };
        let values = memory.iter().zip(inputs).map(value).collect::<Result<Vec<_>, _>>()?;
        let _turn = ground.gpu.turn();
        let (graph, made) =
            ground.stream.record_graph(|| self.binding.run(&values, &ground.on_device, &ground.on_host))?;
        // The arena gets the outputs' memory back, see the head of this file.
        let owner: Arc<dyn Any + Send + Sync> = Arc::new((self.owner.clone(), memory.clone()));
        let outputs = made.iter().map(|value| output_of_graph(value, &ground.gpu, owner.clone()));
        let outputs = outputs.collect::<Result<_, _>>()?;
        Ok(RecordedRun { graph, inputs: memory, outputs, call: None })
    }

    /// Memory for inputs like these, which all graphs share: each launch copies its inputs to the
    /// memory.
    fn input_memory(&mut self, ground: &Ground, inputs: &[Tensor]) -> Result<Vec<Arc<DeviceAllocation>>, String> {
        let memory = |(memory, tensor): (&mut Option<Arc<DeviceAllocation>>, &Tensor)| {
            let (len, had) = (tensor.data.len(), memory.as_ref().map_or(0, |memory| memory.len()));
            if let Some(memory) = memory.as_ref().filter(|_| had >= len) {
                return Ok(memory.clone());
            }
            // Graphs that have the replaced memory keep it: the total at most doubles.
            let len = len.max(had * 2);
            let what = format!("the input of graphs, of {len} bytes");
            let taken = DeviceAllocation::new(&ground.gpu.device, len, &what)?;
            Ok(memory.insert(Arc::new(taken)).clone())
        };
        self.input_memory.iter_mut().zip(inputs).map(memory).collect()
    }
}

impl Ground {
    /// The bytes of a tensor on the device, copied to the host; waits for the copy.
    pub(super) fn bytes(&self, tensor: &Tensor) -> Result<PinnedBytes, String> {
        let slice = tensor.data.device().ok_or("a tensor of a graph is not on the device: this is a defect")?;
        let mut bytes = self.gpu.pinned.take(slice.len())?;
        // SAFETY: neither is dropped before the copy is over or has failed.
        let copied = unsafe { slice.download(&self.stream, bytes.bytes_mut()) };
        copied.and(self.stream.finish())?;
        Ok(bytes)
    }

    fn value(&self, address: u64, len: usize, like: &Tensor) -> Result<Value, String> {
        Value::of_device(&self.on_device, address, len, &like.shape, element_type(like.datatype))
    }

    /// The time of a run on the device; waits for its end.
    pub(super) fn time(&self, enqueue: impl FnOnce() -> Result<Made, String>) -> Result<(Duration, Made), String> {
        let (begin, end) = (Event::timed(&self.gpu.device)?, Event::timed(&self.gpu.device)?);
        self.stream.record(&begin)?;
        let made = enqueue();
        let ended = self.stream.record(&end).and_then(|()| end.wait());
        if made.is_err() || ended.is_err() {
            // The enqueued work uses the memory that is about to be dropped.
            let _ = self.stream.finish();
        }
        ended?;
        Ok((end.since(&begin)?, made?))
    }
}

/// An output in place on the device. It keeps its session, or the input that passed through.
fn output(value: Value, inputs: &[Tensor], gpu: &Gpu, owner: &Arc<SessionOwner>) -> Result<Tensor, String> {
    let (datatype, shape, address, len) = place(&value)?;
    let inputs = inputs.iter().filter_map(|tensor| tensor.data.device());
    for input in inputs {
        if let Some(start) = address.checked_sub(input.address()).and_then(|start| usize::try_from(start).ok())
            && start + len <= input.len()
            && len > 0
        {
            return Ok(Tensor { datatype, shape, data: Buffer::from_device(input.part(start, start + len)) });
        }
    }
    let owner = Arc::new((value, owner.clone()));
    // SAFETY: the output is bound to the device, and its memory stays as long as its value, which
    // the owner keeps. The session's next run writes elsewhere while this output lives, except in
    // graphs, which `Made::lasts` reports.
    let slice = unsafe { DeviceSlice::new(gpu.device.clone(), address, len, None, owner) };
    Ok(Tensor { datatype, shape, data: Buffer::from_device(slice) })
}

/// An output of a graph, which each launch writes: in the memory of the session, which lives as
/// long as `owner`.
fn output_of_graph(value: &Value, gpu: &Gpu, owner: Arc<dyn Any + Send + Sync>) -> Result<Tensor, String> {
    let (datatype, shape, address, len) = place(value)?;
    // SAFETY: the output is bound to the device; its users read it before the session runs again,
    // as `Made::lasts` demands.
    let slice = unsafe { DeviceSlice::new(gpu.device.clone(), address, len, None, owner) };
    Ok(Tensor { datatype, shape, data: Buffer::from_device(slice) })
}

/// The datatype, shape, address and length in bytes of a value.
fn place(value: &Value) -> Result<(DataType, Vec<usize>, u64, usize), String> {
    let (datatype, shape) = value.describe()?;
    let size = datatype.size().ok_or("strings have no place on a device")?;
    let len =
        downbeat_engine::tensor::elements(&shape).and_then(|n| n.checked_mul(size)).ok_or("more bytes than memory")?;
    Ok((datatype, shape, value.address()?.addr() as u64, len))
}
