//! A segment on a lane: a session that enqueues in the lane's stream, and a graph of what it enqueues where that pays.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tensor::DataType;
use ort::session::{Session, SharedSessionInner};

use super::super::session::Names;
use super::super::value::{CpuMemory, Value};
use super::binding::Binding;
use super::gpu::{DeviceMemoryInfo, Gpu};
use super::host_kernels::{self, At, Call};
use super::model::Blueprint;
use super::placement;
use super::weights::Weights;
use crate::buffer::Lent;
use crate::cuda::{DeviceMemory, DeviceSlice, Event, ForgetsLastError, Graph, Pinned, Stream};
use crate::tensor::{Buffer, Tensor};

/// How much of the time without it a graph may take to be kept: what it saves has to be more than chance.
const WORTH_GRAPH: f64 = 0.97;

/// Where sessions of a lane run.
pub(super) struct Ground {
    pub gpu: Arc<Gpu>,
    pub stream: Arc<Stream>,
    pub on_device: DeviceMemoryInfo,
    pub on_host: CpuMemory,
}

/// A session of a segment.
pub(super) struct SegmentSession {
    /// Before the session, whose memory it uses.
    graph: Option<RecordedRun>,
    binding: Binding,
    names: Arc<Names>,
    owner: Arc<SessionOwner>,
    /// Which inputs it wants on the host, strings among them, and which outputs it leaves there.
    inputs_on_host: Vec<bool>,
    outputs_on_host: Vec<bool>,
    /// Whether a graph is still to be tried.
    tries_graph: bool,
}

/// A session with what it needs, dropped before that: outputs in its memory may outlive the lane.
pub(super) struct SessionOwner {
    /// Gone only while it is dropped.
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
        // It gives back what it has on the device of the calling thread, which may be any, and may wait for that.
        let _ = self.gpu.enter();
        let _turn = self.gpu.turn();
        self.session = None;
    }
}

/// A run that was recorded: its inputs and outputs are where they were then.
struct RecordedRun {
    graph: Graph,
    inputs: Vec<DeviceMemory>,
    /// Not used by anything else, nor is what the run has used in between: after it was recorded the session runs in no other way.
    outputs: Vec<Tensor>,
    /// What the record calls, of the library's kernels for the host.
    _call: Option<Arc<Call>>,
}

/// What a run gives, once what is enqueued is over.
pub(super) struct Made {
    pub outputs: Vec<Tensor>,
    /// Whether the outputs stay as they are when the session runs again.
    pub lasts: bool,
    /// To be kept until the launch is over.
    pub held: Option<Arc<Call>>,
}

impl SegmentSession {
    /// `tries_graph`: whether all runs will have inputs of the same shapes, so that they may be recorded.
    pub(super) fn new(
        session: &Session,
        blueprint: &Blueprint,
        weights: &Arc<Weights>,
        ground: &Ground,
        tries_graph: bool,
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
        // What is copied from or to the host in a run would be, in a graph, at the addresses that it had when that was recorded.
        let all_on_device = !inputs_on_host.iter().chain(&outputs_on_host).any(|on_host| *on_host);
        Ok(SegmentSession {
            graph: None,
            binding: Binding::new(session, &blueprint.names, outputs_on_host.clone())?,
            names: blueprint.names.clone(),
            owner: Arc::new(owner),
            inputs_on_host,
            outputs_on_host,
            tries_graph: tries_graph && all_on_device,
        })
    }

    /// Which inputs have to be on the host; the others on the device.
    pub(super) fn inputs_on_host(&self) -> &[bool] {
        &self.inputs_on_host
    }

    /// Enqueues a run on inputs that are where they are wanted, and stay there until the launch is over.
    pub(super) fn enqueue(&mut self, ground: &Ground, inputs: &mut [Tensor]) -> Result<Made, String> {
        if let Some(recorded) = &mut self.graph {
            return recorded.enqueue(ground, inputs);
        }
        if self.tries_graph {
            return self.try_graph(ground, inputs);
        }
        self.run(ground, inputs)
    }

    /// Enqueues a run, not recorded.
    fn run(&mut self, ground: &Ground, inputs: &mut [Tensor]) -> Result<Made, String> {
        if ground.gpu.has_host_kernels {
            let address = |tensor: &Tensor| Some(tensor.data.device()?.address());
            let addresses = inputs.iter().map(address).collect::<Option<Vec<_>>>();
            let addresses = addresses.ok_or("strings have no place on a device")?;
            let (outputs, call) = self.prepare_on_host(ground, &addresses, inputs)?;
            call.enqueue(&ground.stream)?;
            return Ok(Made { outputs, lasts: true, held: Some(call) });
        }
        let mut dims = Vec::new();
        let value = |tensor: &mut Tensor| match tensor.data.device() {
            Some(slice) => ground.value(slice.address(), slice.len(), tensor),
            None if tensor.datatype == DataType::Bytes => Value::of_strings(tensor, &mut dims),
            None => Value::of_memory(&ground.on_host, tensor, &mut dims),
        };
        let values = inputs.iter_mut().map(value).collect::<Result<Vec<_>, _>>()?;
        let outputs = self.binding.run(&values, &ground.on_device, ground.on_host.as_raw())?;
        let outputs = outputs.into_iter().zip(&self.outputs_on_host).map(|(value, on_host)| {
            if *on_host { self.output_on_host(value, inputs) } else { output(value, inputs, &ground.gpu, &self.owner) }
        });
        Ok(Made { outputs: outputs.collect::<Result<_, _>>()?, lasts: true, held: None })
    }

    /// An output that the library has left on the host.
    fn output_on_host(&self, value: Value, inputs: &[Tensor]) -> Result<Tensor, String> {
        let mut tensor = value.into_tensor(self.owner.session()?, &[], false)?;
        let range = tensor.data.as_slice().as_ptr_range();
        let is_input = |input: &Tensor| {
            input.data.device().is_none() && input.data.as_slice().as_ptr_range().contains(&range.start)
        };
        if inputs.iter().any(is_input) {
            // Handed through: its memory is the input's.
            tensor.data = Buffer::from(tensor.data.as_slice());
        }
        Ok(tensor)
    }

    /// Gets a run of the library's kernels for the host ready, on inputs at these addresses that are like `inputs`.
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

    /// The first run: some times as always, then recorded and as often from the record, which is kept if it is faster. Waits for each.
    fn try_graph(&mut self, ground: &Ground, inputs: &mut [Tensor]) -> Result<Made, String> {
        // What is taken and planned on the first one must not be in the record.
        let (_, made) = ground.time(|| self.run(ground, inputs))?;
        // Its outputs stay: where the library takes more memory for another run beside them, it is to do so now, as it cannot while a graph is recorded.
        let plain = ground.median(|| self.run(ground, inputs))?;
        // Once, and not if the batch cannot run at all.
        self.tries_graph = false;
        let recorded = self.record(ground, inputs).and_then(|mut recorded| {
            ground.time(|| recorded.enqueue(ground, inputs))?;
            let took = ground.median(|| recorded.enqueue(ground, inputs))?;
            if !recorded.gives(ground, &made.outputs)? {
                return Err("it gives other answers than what was recorded".into());
            }
            Ok((took, recorded))
        });
        match recorded {
            Ok((took, recorded)) if took.as_secs_f64() < WORTH_GRAPH * plain.as_secs_f64() => {
                tracing::debug!(%plain, %took, "a segment runs as a graph");
                self.graph = Some(recorded);
            }
            Ok((took, _)) => tracing::debug!(%plain, %took, "a segment is no faster as a graph"),
            Err(reason) => {
                tracing::debug!(%reason, "a segment cannot be a graph");
                drop(ForgetsLastError);
                // The device may have failed; else the plain outputs are as good as before.
                ground.stream.finish().map_err(|error| error.to_string())?;
            }
        }
        Ok(made)
    }

    fn record(&mut self, ground: &Ground, inputs: &[Tensor]) -> Result<RecordedRun, String> {
        let memory = |tensor: &Tensor| {
            let len = tensor.data.len();
            DeviceMemory::new(&ground.gpu.device, len, &format!("the input of a graph, of {len} bytes"))
                .map_err(|e| e.to_string())
        };
        let memory = inputs.iter().map(memory).collect::<Result<Vec<_>, _>>()?;
        if ground.gpu.has_host_kernels {
            // Memory is taken before: in a record it cannot be.
            let addresses: Vec<u64> = memory.iter().map(DeviceMemory::address).collect();
            let (outputs, call) = self.prepare_on_host(ground, &addresses, inputs)?;
            let (graph, ()) = ground.stream.record_graph(|| call.enqueue(&ground.stream))?;
            return Ok(RecordedRun { graph, inputs: memory, outputs, _call: Some(call) });
        }
        let value =
            |(memory, tensor): (&DeviceMemory, &Tensor)| ground.value(memory.address(), tensor.data.len(), tensor);
        let values = memory.iter().zip(inputs).map(value).collect::<Result<Vec<_>, _>>()?;
        let _turn = ground.gpu.turn();
        let (graph, outputs) = ground.stream.record_graph(|| {
            let made = self.binding.run(&values, &ground.on_device, ground.on_host.as_raw())?;
            made.into_iter().map(|value| output(value, &[], &ground.gpu, &self.owner)).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(RecordedRun { graph, inputs: memory, outputs, _call: None })
    }
}

impl RecordedRun {
    /// Whether its last run, which is over, gave just these outputs.
    fn gives(&self, ground: &Ground, outputs: &[Tensor]) -> Result<bool, String> {
        for (mine, other) in self.outputs.iter().zip(outputs) {
            if mine.shape != other.shape || ground.bytes(mine)?.bytes() != ground.bytes(other)?.bytes() {
                return Ok(false);
            }
        }
        Ok(self.outputs.len() == outputs.len())
    }

    fn enqueue(&mut self, ground: &Ground, inputs: &[Tensor]) -> Result<Made, String> {
        for (memory, tensor) in self.inputs.iter().zip(inputs) {
            let slice = tensor.data.device().ok_or("strings have no place in a graph")?;
            if slice.len() != memory.len() {
                return Err("a batch has another shape than its graph: this is a defect".into());
            }
            // SAFETY: the input stays until the launch is over, as the caller says.
            unsafe { memory.copy(&ground.stream, 0, slice) }.map_err(|error| error.to_string())?;
        }
        self.graph.launch(&ground.stream).map_err(|error| error.to_string())?;
        Ok(Made { outputs: self.outputs.iter().filter_map(share).collect(), lasts: false, held: None })
    }
}

impl Ground {
    /// What is on the device; waits for it.
    fn bytes(&self, tensor: &Tensor) -> Result<Pinned, String> {
        let words = |error: crate::cuda::CudaError| error.to_string();
        let slice = tensor.data.device().ok_or("an output of a graph is not on the device: this is a defect")?;
        let mut bytes = self.gpu.pinned.take(slice.len()).map_err(words)?;
        // SAFETY: neither is dropped before the copy is over, or has failed.
        let copied = unsafe { slice.download(&self.stream, bytes.bytes_mut()) };
        copied.and(self.stream.finish()).map_err(words)?;
        Ok(bytes)
    }

    fn value(&self, address: u64, len: usize, like: &Tensor) -> Result<Value, String> {
        Value::of_device(self.on_device.as_raw(), address, len, &like.shape, like.datatype)
    }

    /// What a run takes on the device: the median of three.
    fn median(&self, mut enqueue: impl FnMut() -> Result<Made, String>) -> Result<Duration, String> {
        let mut times = [Duration::ZERO; 3];
        for time in &mut times {
            (*time, _) = self.time(&mut enqueue)?;
        }
        times.sort_unstable();
        Ok(times[1])
    }

    /// What a run takes on the device; waits for it.
    fn time(&self, enqueue: impl FnOnce() -> Result<Made, String>) -> Result<(Duration, Made), String> {
        let words = |error: crate::cuda::CudaError| error.to_string();
        let (begin, end) =
            (Event::timed(&self.gpu.device).map_err(words)?, Event::timed(&self.gpu.device).map_err(words)?);
        self.stream.record(&begin).map_err(words)?;
        let made = enqueue();
        let ended = self.stream.record(&end).and_then(|()| end.wait());
        if made.is_err() || ended.is_err() {
            // What was enqueued uses what goes now.
            let _ = self.stream.finish();
        }
        ended.map_err(words)?;
        Ok((end.since(&begin).map_err(words)?, made?))
    }
}

/// The same tensor, on the same memory of the device.
fn share(tensor: &Tensor) -> Option<Tensor> {
    let slice = tensor.data.device()?.clone();
    Some(Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data: Buffer::from_device(slice) })
}

/// An output as it lies on the device. It keeps its session, or the input that it was handed through from.
fn output(value: Value, inputs: &[Tensor], gpu: &Gpu, owner: &Arc<SessionOwner>) -> Result<Tensor, String> {
    let (datatype, shape) = value.describe()?;
    let size = datatype.size().ok_or("strings have no place on a device")?;
    let len = crate::tensor::elements(&shape).and_then(|n| n.checked_mul(size)).ok_or("more bytes than memory")?;
    let address = value.address()?.addr() as u64;
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
    // SAFETY: bound to the device, so that it lies there, as long as its value, which the owner keeps; what the next run of the session gives lies elsewhere
    // as long as this one is there.
    let slice = unsafe { DeviceSlice::new(gpu.device.clone(), address, len, None, owner) };
    Ok(Tensor { datatype, shape, data: Buffer::from_device(slice) })
}
