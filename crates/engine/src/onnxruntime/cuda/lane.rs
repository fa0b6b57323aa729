//! A lane on a GPU: a stream, and the sessions that enqueue there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::tensor::DataType;
use ort::session::SharedSessionInner;

use super::super::session::{Source, take};
use super::super::value::{CpuMemory, Value};
use super::binding::Binding;
use super::gpu::{DeviceMemoryInfo, Gpu};
use super::host_kernels::{self, At};
use super::model::Shared;
use super::weights::Weights;
use crate::batch;
use crate::buffer::Lent;
use crate::cuda::{DeviceMemory, DeviceSlice, Event, Pinned, Stream};
use crate::state::{State, StateError};
use crate::tensor::{Buffer, Tensor};
use crate::traits::{Lane, RunError};

/// A stream, and the sessions that enqueue there.
pub(super) struct CudaLane {
    shared: Arc<Shared>,
    gpu: Arc<Gpu>,
    /// By segment; and by rows, where kernels are set up for a size.
    sessions: Vec<BTreeMap<usize, Session>>,
    weights: Arc<Weights>,
    on_device: DeviceMemoryInfo,
    on_host: CpuMemory,
    begin: Event,
    end: Event,
    has_run: bool,
    /// What the present launch reads, kept until it is over.
    held: Vec<Held>,
    /// What it copies back, likewise.
    outputs: Vec<Output>,
    stream: Arc<Stream>,
}

struct Session {
    binding: Binding,
    owner: Arc<SessionOwner>,
}

/// A session with what it needs, dropped before that: outputs in its memory may outlive the lane.
struct SessionOwner {
    session: Arc<SharedSessionInner>,
    _weights: Arc<Weights>,
    _stream: Arc<Stream>,
}

/// Only kept.
enum Held {
    Slice(#[expect(dead_code, reason = "only kept")] DeviceSlice),
    Pinned(#[expect(dead_code, reason = "only kept")] Pinned),
}

/// An output on its way to the host, or there already.
enum Output {
    Copied { datatype: DataType, shape: Vec<usize>, data: Pinned },
    Here(Tensor),
}

impl CudaLane {
    pub(super) fn new(
        shared: Arc<Shared>,
        gpu: Arc<Gpu>,
        stream: Arc<Stream>,
        weights: Arc<Weights>,
    ) -> Result<CudaLane, String> {
        let event = || Event::timed(&gpu.device).map_err(|e| e.to_string());
        let mut lane = CudaLane {
            sessions: shared.blueprints.iter().map(|_| BTreeMap::new()).collect(),
            on_device: DeviceMemoryInfo::new(&gpu)?,
            on_host: CpuMemory::new()?,
            begin: event()?,
            end: event()?,
            has_run: false,
            held: Vec::new(),
            outputs: Vec::new(),
            shared,
            gpu,
            weights,
            stream,
        };
        // The others are made for the sizes that the lane is warmed with.
        for segment in 0..lane.sessions.len() {
            if lane.shared.blueprints.get(segment).is_some_and(|blueprint| !blueprint.has_plans) {
                lane.prepare(segment, 0)?;
            }
        }
        Ok(lane)
    }

    /// Makes the session of a segment for batches of `rows`, if there is none.
    fn prepare(&mut self, segment: usize, rows: usize) -> Result<(), String> {
        let (Some(blueprint), Some(sessions)) = (self.shared.blueprints.get(segment), self.sessions.get_mut(segment))
        else {
            return Err(format!("there is no segment {segment}"));
        };
        if sessions.contains_key(&rows) {
            return Ok(());
        }
        let session = self.shared.maker.session(&self.gpu, blueprint, Some(&self.weights), Some(&self.stream))?;
        let binding = Binding::new(&session, &blueprint.names, blueprint.on_host.clone())?;
        let owner =
            SessionOwner { session: session.inner(), _weights: self.weights.clone(), _stream: self.stream.clone() };
        sessions.insert(rows, Session { binding, owner: Arc::new(owner) });
        Ok(())
    }

    /// Enqueues segments, and waits for their end.
    fn launch(&mut self, range: Range<usize>, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, String> {
        self.gpu.device.bind().map_err(|e| e.to_string())?;
        self.stream.record(&self.begin).map_err(|e| e.to_string())?;
        let shared = self.shared.clone();
        let Some(blueprints) = shared.blueprints.get(range.clone()) else {
            return Err(format!("there are {} segments, but {range:?} are asked for", shared.blueprints.len()));
        };
        if let Some(first) = blueprints.first() {
            batch::check(&first.wiring.before, &tensors)?;
        }
        let rows = tensors.first().and_then(|tensor| tensor.shape.first()).map_or(0, |rows| *rows);
        let has_plans = blueprints.iter().any(|blueprint| blueprint.has_plans);
        let filled = if has_plans && rows > 0 { shared.filled(rows) } else { rows };
        let brought = tensors.into_iter().map(|tensor| self.bring(tensor, rows, filled));
        let mut tensors = brought.collect::<Result<Vec<_>, _>>()?;
        let ends_here = range.end == shared.blueprints.len();
        for segment in range {
            tensors = self.enqueue(segment, tensors, filled)?;
        }
        if filled != rows {
            tensors.iter_mut().try_for_each(|tensor| cut(tensor, rows))?;
        }
        if ends_here {
            for tensor in std::mem::take(&mut tensors) {
                self.copy_back(tensor)?;
            }
        }
        self.stream.record(&self.end).map_err(|e| e.to_string())?;
        self.end.wait().map_err(|e| e.to_string())?;
        self.has_run = true;
        self.held.clear();
        if ends_here {
            let output = |output| match output {
                Output::Here(tensor) => tensor,
                Output::Copied { datatype, shape, data } => {
                    Tensor { datatype, shape, data: Buffer::from_lent(Box::new(data)) }
                }
            };
            tensors = self.outputs.drain(..).map(output).collect();
        }
        Ok(tensors)
    }

    /// The tensor on the device, with `filled` rows of which the first are its `rows`. Strings stay where they are.
    fn bring(&mut self, mut tensor: Tensor, rows: usize, filled: usize) -> Result<Tensor, String> {
        if tensor.datatype == DataType::Bytes {
            return Ok(tensor);
        }
        let words = |e: crate::cuda::CudaError| e.to_string();
        let len = tensor.data.len();
        let all = if filled == rows { len } else { len / rows.max(1) * filled };
        let taken = |stream: &Arc<Stream>| DeviceMemory::in_stream(stream, all, &format!("an input of {all} bytes"));
        if let Some(slice) = tensor.data.device() {
            if !Arc::ptr_eq(slice.device(), &self.gpu.device) {
                return Err(format!(
                    "a tensor is on {:?}, and the lane on {:?}: this is a defect",
                    slice.device(),
                    self.gpu.device
                ));
            }
            self.held.push(Held::Slice(slice.clone()));
            if all == len && slice.is_aligned() {
                slice.wait_in(&self.stream).map_err(words)?;
                return Ok(tensor);
            }
            let memory = taken(&self.stream).map_err(words)?;
            // SAFETY: the slice is held until the launch is over.
            unsafe { memory.copy(&self.stream, 0, slice) }.map_err(words)?;
            memory.zero(&self.stream, len).map_err(words)?;
            tensor.data = Buffer::from_device(memory.into_slice());
        } else {
            batch::normalise_booleans(&mut tensor);
            let mut staged = self.gpu.pinned.take(len).map_err(words)?;
            staged.bytes_mut().copy_from_slice(tensor.data.as_slice());
            let memory = taken(&self.stream).map_err(words)?;
            // SAFETY: the copy is held until the launch is over.
            let copied = unsafe { memory.upload(&self.stream, 0, staged.bytes()) };
            self.held.push(Held::Pinned(staged));
            copied.map_err(words)?;
            memory.zero(&self.stream, len).map_err(words)?;
            tensor.data = Buffer::from_device(memory.into_slice());
        }
        if let Some(first) = tensor.shape.first_mut().filter(|_| filled != rows) {
            *first = filled;
        }
        // Other segments of this launch may be over with it before it was read.
        self.held.extend(tensor.data.device().cloned().map(Held::Slice));
        Ok(tensor)
    }

    /// Enqueues a segment.
    fn enqueue(&mut self, segment: usize, mut tensors: Vec<Tensor>, rows: usize) -> Result<Vec<Tensor>, String> {
        let shared = self.shared.clone();
        let blueprint = shared.blueprints.get(segment).ok_or_else(|| format!("there is no segment {segment}"))?;
        let key = if blueprint.has_plans { rows } else { 0 };
        self.prepare(segment, key)?;
        let Some(session) = self.sessions.get_mut(segment).and_then(|sessions| sessions.get_mut(&key)) else {
            return Err(format!("segment {segment} has no session"));
        };
        let wiring = &blueprint.wiring;
        batch::check(&wiring.before, &tensors)?;
        let taken = wiring.takes.iter().map(|index| tensors.get(*index).ok_or("a tensor is missing between segments"));
        let taken = taken.collect::<Result<Vec<&Tensor>, _>>()?;
        let made: Vec<Tensor> = if self.gpu.has_host_kernels {
            let at = |tensor: &&Tensor| {
                let slice = tensor.data.device().ok_or("strings have no place on a device")?;
                let (address, len) = (slice.address(), slice.len());
                Ok(At { address, len, shape: tensor.shape.clone(), datatype: tensor.datatype })
            };
            let inputs = taken.iter().map(at).collect::<Result<_, String>>()?;
            let made = host_kernels::enqueue(&session.owner.session, &blueprint.names, &self.stream, inputs)?;
            let tensor = |(at, slice): (At, DeviceSlice)| Tensor {
                datatype: at.datatype,
                shape: at.shape,
                data: Buffer::from_device(slice),
            };
            made.into_iter().map(tensor).collect()
        } else {
            let mut dims = Vec::new();
            let value = |tensor: &&Tensor| match tensor.data.device() {
                Some(slice) => {
                    let (info, shape) = (self.on_device.as_raw(), &tensor.shape);
                    Value::of_device(info, slice.address(), slice.len(), shape, tensor.datatype)
                }
                None => Value::of_strings(tensor, &mut dims),
            };
            let inputs = taken.iter().map(value).collect::<Result<Vec<_>, _>>()?;
            let values = session.binding.run(&inputs, &self.on_device, self.on_host.as_raw())?;
            let tensor = |value: Value| output(value, &taken, &self.gpu, &session.owner);
            values.into_iter().map(tensor).collect::<Result<_, _>>()?
        };
        let mut made: Vec<Option<Tensor>> = made.into_iter().map(Some).collect();
        let mut given = Vec::with_capacity(wiring.gives.len());
        for (spec, source) in &wiring.gives {
            let tensor = match *source {
                Source::Kept(index) => take(&mut tensors, index)?,
                Source::Made(index) => made
                    .get_mut(index)
                    .and_then(Option::take)
                    .ok_or_else(|| format!("the model gave no value for output '{}'", spec.name))?,
            };
            if tensor.datatype != spec.datatype {
                let (name, expected, got) = (&spec.name, spec.datatype, tensor.datatype);
                return Err(format!("output '{name}': expected datatype {expected}, got {got}"));
            }
            given.push(tensor);
        }
        Ok(given)
    }

    /// Enqueues the copy of an output to the host.
    fn copy_back(&mut self, tensor: Tensor) -> Result<(), String> {
        let Some(slice) = tensor.data.device() else {
            self.outputs.push(Output::Here(tensor));
            return Ok(());
        };
        let mut data = self.gpu.pinned.take(slice.len()).map_err(|e| e.to_string())?;
        // SAFETY: both are kept until the launch is over, and the copy is not looked at before.
        let copied = unsafe { slice.download(&self.stream, data.bytes_mut()) };
        self.held.push(Held::Slice(slice.clone()));
        self.outputs.push(Output::Copied { datatype: tensor.datatype, shape: tensor.shape, data });
        copied.map_err(|e| e.to_string())
    }

    /// Waits until nothing that was enqueued uses what is held, whatever came of it.
    fn settle(&mut self) {
        let _ = self.stream.finish();
        self.held.clear();
        self.outputs.clear();
    }

    /// Joins tensors on the device.
    fn join_tensors<'a>(
        &mut self,
        tensors: impl Iterator<Item = &'a Tensor> + Clone,
        datatype: DataType,
        shape: Vec<usize>,
    ) -> Result<Tensor, StateError> {
        let all: usize = tensors.clone().map(|tensor| tensor.data.len()).sum();
        let memory = DeviceMemory::in_stream(&self.stream, all, &format!("a batch of {all} bytes"))?;
        let mut offset = 0;
        for tensor in tensors {
            match tensor.data.device() {
                Some(slice) => {
                    self.held.push(Held::Slice(slice.clone()));
                    // SAFETY: held until the next launch is over, which comes after the copy.
                    unsafe { memory.copy(&self.stream, offset, slice)? };
                }
                None => {
                    let mut staged = self.gpu.pinned.take(tensor.data.len())?;
                    staged.bytes_mut().copy_from_slice(tensor.data.as_slice());
                    // SAFETY: as above.
                    let copied = unsafe { memory.upload(&self.stream, offset, staged.bytes()) };
                    self.held.push(Held::Pinned(staged));
                    copied?;
                }
            }
            offset += tensor.data.len();
        }
        let slice = memory.into_slice();
        self.held.push(Held::Slice(slice.clone()));
        Ok(Tensor { datatype, shape, data: Buffer::from_device(slice) })
    }
}

impl Lane for CudaLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let tensors = std::mem::take(&mut state.tensors);
        match self.launch(range, tensors) {
            Ok(tensors) => {
                state.tensors = tensors;
                Ok(())
            }
            Err(reason) => {
                self.settle();
                Err(RunError { engine: self.shared.maker.engine(), reason: self.gpu.explain(reason) })
            }
        }
    }

    fn join(&mut self, states: Vec<State>) -> Result<State, StateError> {
        let is_here = |tensor: &Tensor| tensor.data.device().is_none();
        if states.len() == 1 || states.iter().flat_map(|state| &state.tensors).all(is_here) {
            return State::join(states);
        }
        let joined = State::joined(&states)?;
        let tensors = joined.into_iter().enumerate().map(|(index, (datatype, shape))| {
            let all = states.iter().filter_map(|state| state.tensors.get(index));
            if datatype == DataType::Bytes {
                let mut data = Buffer::new();
                all.for_each(|tensor| data.extend_from_slice(tensor.data.as_slice()));
                return Ok(Tensor { datatype, shape, data });
            }
            self.join_tensors(all, datatype, shape)
        });
        let tensors = tensors.collect::<Result<Vec<_>, StateError>>();
        if tensors.is_err() {
            self.settle();
        }
        Ok(State { tensors: tensors? })
    }

    fn last_run(&self) -> Option<(Duration, Duration)> {
        let since = |event: &Event| event.since(&self.gpu.epoch).ok();
        if self.has_run { Some((since(&self.begin)?, since(&self.end)?)) } else { None }
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        self.settle();
        // Sessions give back what they have on the device of the calling thread.
        let _ = self.gpu.device.bind();
        self.sessions.clear();
    }
}

/// An output as it lies on the device. It keeps its session, or the input that it was handed through from.
fn output(value: Value, inputs: &[&Tensor], gpu: &Gpu, owner: &Arc<SessionOwner>) -> Result<Tensor, String> {
    let (datatype, shape) = value.describe()?;
    let Some(size) = datatype.size() else {
        return value.into_tensor(&owner.session, &[], false);
    };
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

/// Leaves the first `rows` rows.
fn cut(tensor: &mut Tensor, rows: usize) -> Result<(), String> {
    let (Some(first), Some(slice)) = (tensor.shape.first_mut(), tensor.data.device()) else {
        return Err("an output of a filled batch is not on the device: this is a defect".into());
    };
    let part = slice.part(0, slice.len() / (*first).max(1) * rows);
    *first = rows;
    tensor.data = Buffer::from_device(part);
    Ok(())
}
