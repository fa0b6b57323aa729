//! A lane on a GPU: a stream, and the sessions that enqueue in the stream.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_engine::tensor::Lent;
use downbeat_engine::tensor::batch;
use downbeat_engine::tensor::state::{State, StateError};
use downbeat_engine::tensor::{Buffer, Tensor};
use downbeat_engine::{Lane, Pending, RunError, Span};

use super::super::session::{Source, take};
use super::super::value::MemoryInfo;
use super::gpu::Gpu;
use super::graph_log::GraphLog;
use super::model::CudaShared;
use super::pending::{Enqueued, Held, Left};
use super::segment_session::{Ground, SegmentSession};
use super::weights::Weights;
use crate::cuda::{CudaBuffer, CudaError, DeviceAllocation, Expected, Marks, Stream};

/// The most sessions of a segment.
const MOST_SESSIONS: usize = 32;

/// The most launches under way. With two the device always has a next launch, and the host does not
/// get far ahead.
const MOST_UNDER_WAY: usize = 2;

/// A lane: a stream, and the sessions that enqueue in the stream.
pub(super) struct CudaLane {
    shared: Arc<CudaShared>,
    /// The sessions of each segment, by their [`CudaShared::session_key`].
    sessions: Vec<BTreeMap<usize, SegmentSession>>,
    weights: Arc<Weights>,
    /// Marks of launches that may be under way, in their order.
    under_way: VecDeque<Arc<Marks>>,
    /// Marks of the launch that was enqueued last.
    last: Option<Arc<Marks>>,
    /// All marks. A launch may reuse marks that nothing else refers to.
    marks: Vec<Arc<Marks>>,
    /// The times of past launches.
    expected: Arc<Expected>,
    /// Memory of the launch that is being enqueued, and of earlier joins: kept until the launch is
    /// over.
    held: Vec<Held>,
    /// Tensors that the launch leaves, kept until it is over.
    left: Vec<Left>,
    ground: Ground,
}

/// A tensor between the segments of a launch.
struct Between {
    tensor: Tensor,
    /// Whether the tensor stays as it is when the lane runs again.
    lasts: bool,
}

impl CudaLane {
    pub(super) fn new(
        shared: Arc<CudaShared>,
        gpu: Arc<Gpu>,
        stream: Arc<Stream>,
        weights: Arc<Weights>,
        graphs: Arc<GraphLog>,
    ) -> Result<CudaLane, String> {
        let mut lane = CudaLane {
            sessions: shared.blueprints.iter().map(|_| BTreeMap::new()).collect(),
            under_way: VecDeque::new(),
            last: None,
            marks: Vec::new(),
            expected: Arc::default(),
            held: Vec::new(),
            left: Vec::new(),
            ground: Ground { on_device: gpu.memory_info()?, on_host: MemoryInfo::cpu()?, graphs, gpu, stream },
            shared,
            weights,
        };
        // The other sessions are made for the sizes with which the lane is warmed.
        for segment in 0..lane.sessions.len() {
            if lane.shared.blueprints.get(segment).is_some_and(|blueprint| !blueprint.has_plans) {
                lane.prepare(segment, 0)?;
            }
        }
        Ok(lane)
    }

    /// Makes the session of a segment for batches of `rows`, unless it exists.
    fn prepare(&mut self, segment: usize, rows: usize) -> Result<(), String> {
        let (Some(blueprint), Some(sessions)) = (self.shared.blueprints.get(segment), self.sessions.get_mut(segment))
        else {
            return Err(format!("there is no segment {segment}"));
        };
        if sessions.contains_key(&rows) {
            return Ok(());
        }
        // If the first axis is a length, the number of sizes is unbounded.
        if sessions.len() >= MOST_SESSIONS {
            // The previous launch may still run in the session.
            self.ground.stream.finish()?;
            sessions.pop_last();
        }
        let Ground { gpu, stream, .. } = &self.ground;
        let session = self.shared.maker.session(gpu, blueprint, Some(&self.weights), Some(stream))?;
        let refusal = self.shared.no_graphs;
        let session = SegmentSession::new(&session, (segment, blueprint), &self.weights, &self.ground, refusal)?;
        sessions.insert(rows, session);
        Ok(())
    }

    /// Marks for the next launch. Waits for the first launch under way if there are as many as
    /// allowed.
    fn next_marks(&mut self) -> Result<Arc<Marks>, CudaError> {
        while let Some(first) = self.under_way.front() {
            if !first.is_over()? {
                if self.under_way.len() < MOST_UNDER_WAY {
                    break;
                }
                first.wait()?;
            }
            self.under_way.pop_front();
        }
        let free = self.marks.iter_mut().position(|marks| Arc::get_mut(marks).is_some());
        match free {
            Some(index) => Ok(self.marks.swap_remove(index)),
            None => Marks::new(&self.ground.gpu.device).map(Arc::new),
        }
    }

    /// Enqueues segments.
    fn launch(&mut self, range: Range<usize>, tensors: Vec<Tensor>) -> Result<Enqueued, String> {
        self.ground.gpu.enter()?;
        let rows = tensors.first().and_then(|tensor| tensor.shape.first()).map_or(0, |rows| *rows);
        let bytes = tensors.iter().map(|tensor| tensor.data.len()).sum();
        self.last = None;
        let mut marks = self.next_marks()?;
        if let Some(marks) = Arc::get_mut(&mut marks) {
            let before = self.under_way.back().map(|before| &**before);
            marks.begin(&self.ground.stream, before, self.expected.of(&range, bytes))?;
        }
        let shared = self.shared.clone();
        let Some(blueprints) = shared.blueprints.get(range.clone()) else {
            return Err(format!("there are {} segments, but {range:?} are asked for", shared.blueprints.len()));
        };
        if let Some(first) = blueprints.first() {
            batch::check(&first.wiring.before, &tensors)?;
        }
        let has_plans = blueprints.iter().any(|blueprint| blueprint.has_plans);
        let filled = if has_plans && rows > 0 { shared.filled(rows) } else { rows };
        let brought = tensors.into_iter().map(|tensor| self.bring(tensor, rows, filled));
        let mut tensors = brought.collect::<Result<Vec<_>, _>>()?;
        let ends_here = range.end == shared.blueprints.len();
        for segment in range.clone() {
            tensors = self.enqueue_segment(segment, tensors, filled)?;
        }
        if filled != rows {
            tensors.iter_mut().try_for_each(|between| cut(&mut between.tensor, rows, filled))?;
        }
        for between in tensors {
            match between {
                Between { tensor, .. } if ends_here => self.copy_back(tensor)?,
                Between { tensor, lasts: true } => self.left.push(Left::Here(tensor)),
                Between { tensor, lasts: false } => {
                    let copy = self.copy(tensor)?;
                    self.left.push(Left::Here(copy));
                }
            }
        }
        marks.end(&self.ground.stream)?;
        self.under_way.push_back(marks.clone());
        self.marks.push(marks.clone());
        self.last = Some(marks.clone());
        Ok(Enqueued {
            engine: shared.maker.engine(),
            gpu: self.ground.gpu.clone(),
            marks,
            held: std::mem::take(&mut self.held),
            left: std::mem::take(&mut self.left),
            range,
            bytes,
            expected: self.expected.clone(),
        })
    }

    /// The tensor on the device, with `filled` rows, the first `rows` of which are its own. Strings
    /// stay on the host.
    fn bring(&mut self, mut tensor: Tensor, rows: usize, filled: usize) -> Result<Between, String> {
        if tensor.datatype == DataType::Bytes {
            return Ok(Between { tensor, lasts: true });
        }
        let len = tensor.data.len();
        let all = if filled == rows { len } else { len / rows.max(1) * filled };
        let taken =
            |stream: &Arc<Stream>| DeviceAllocation::in_stream(stream, all, &format!("an input of {all} bytes"));
        if let Some(slice) = tensor.data.device() {
            if !Arc::ptr_eq(slice.device(), &self.ground.gpu.device) {
                return Err(format!(
                    "a tensor is on {:?}, and the lane on {:?}: this is a defect",
                    slice.device(),
                    self.ground.gpu.device
                ));
            }
            self.held.push(Held::Slice(slice.clone()));
            if all == len && slice.is_aligned() {
                slice.wait_in(&self.ground.stream)?;
                return Ok(Between { tensor, lasts: true });
            }
            let memory = taken(&self.ground.stream)?;
            // SAFETY: the slice is held until the launch is over.
            unsafe { memory.copy(&self.ground.stream, 0, slice) }?;
            memory.zero(&self.ground.stream, len)?;
            tensor.data = Buffer::from_device(memory.into_slice());
        } else {
            batch::normalise_booleans(&mut tensor);
            let source = self.pinned(std::mem::take(&mut tensor.data))?;
            let memory = taken(&self.ground.stream)?;
            // SAFETY: the source is held until the launch is over.
            let copied = unsafe { memory.upload(&self.ground.stream, 0, source.as_slice()) };
            self.held.push(Held::Host(source));
            copied?;
            memory.zero(&self.ground.stream, len)?;
            tensor.data = Buffer::from_device(memory.into_slice());
        }
        if let Some(first) = tensor.shape.first_mut().filter(|_| filled != rows) {
            *first = filled;
        }
        // Other segments of this launch may drop the tensor before it was read.
        self.held.extend(tensor.data.device().cloned().map(Held::Slice));
        Ok(Between { tensor, lasts: true })
    }

    /// The bytes in pinned memory, from which the device copies by itself.
    fn pinned(&self, data: Buffer) -> Result<Buffer, CudaError> {
        if data.is_pinned() { Ok(data) } else { self.pinned_copy(data.as_slice()) }
    }

    fn pinned_copy(&self, bytes: &[u8]) -> Result<Buffer, CudaError> {
        let mut pinned = Buffer::pinned(self.ground.gpu.pinned.take(bytes.len())?);
        pinned.extend_from_slice(bytes);
        Ok(pinned)
    }

    /// A copy of a tensor on the device.
    fn copy(&mut self, tensor: Tensor) -> Result<Tensor, String> {
        let Some(slice) = tensor.data.device() else { return Ok(tensor) };
        let memory = DeviceAllocation::in_stream(&self.ground.stream, slice.len(), "what is between two segments");
        let memory = memory?;
        self.held.push(Held::Slice(slice.clone()));
        // SAFETY: the slice is held until the launch is over.
        unsafe { memory.copy(&self.ground.stream, 0, slice) }?;
        Ok(Tensor { datatype: tensor.datatype, shape: tensor.shape, data: Buffer::from_device(memory.into_slice()) })
    }

    /// The same tensor in the place that a session needs.
    fn placed(&mut self, tensor: &Tensor, on_host: bool) -> Result<Tensor, String> {
        let data = match (tensor.data.device(), on_host) {
            (Some(slice), false) => Buffer::from_device(slice.clone()),
            (Some(slice), true) => {
                // The work that writes it may be under way.
                self.ground.stream.finish()?;
                Buffer::from(slice.fetch()?.as_slice())
            }
            (None, true) => Buffer::from(tensor.data.as_slice()),
            (None, false) => {
                let data = Buffer::from(tensor.data.as_slice());
                let tensor = Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data };
                return Ok(self.bring(tensor, 1, 1)?.tensor);
            }
        };
        Ok(Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data })
    }

    /// Enqueues a segment.
    fn enqueue_segment(&mut self, segment: usize, tensors: Vec<Between>, rows: usize) -> Result<Vec<Between>, String> {
        let shared = self.shared.clone();
        let blueprint = shared.blueprints.get(segment).ok_or_else(|| format!("there is no segment {segment}"))?;
        let key = shared.session_key(blueprint, rows);
        self.prepare(segment, key)?;
        let (mut tensors, lasts): (Vec<Tensor>, Vec<bool>) =
            tensors.into_iter().map(|between| (between.tensor, between.lasts)).unzip();
        let wiring = &blueprint.wiring;
        batch::check(&wiring.before, &tensors)?;
        let session = self.sessions.get(segment).and_then(|sessions| sessions.get(&key));
        let on_host = session.map(|session| session.inputs_on_host.clone()).unwrap_or_default();
        let mut inputs = Vec::with_capacity(wiring.takes.len());
        for (index, on_host) in wiring.takes.iter().zip(on_host) {
            let tensor = tensors.get(*index).ok_or("a tensor is missing between segments")?;
            inputs.push(self.placed(tensor, on_host)?);
        }
        let Some(session) = self.sessions.get_mut(segment).and_then(|sessions| sessions.get_mut(&key)) else {
            return Err(format!("segment {segment} has no session"));
        };
        let made = session.enqueue(&self.ground, &mut inputs)?;
        let here = inputs.into_iter().filter(|input| input.data.device().is_none());
        self.held.extend(here.map(|input| Held::Host(input.data)));
        self.held.extend(made.held.map(Held::Call));
        let mut outputs: Vec<Option<Tensor>> = made.outputs.into_iter().map(Some).collect();
        let mut given = Vec::with_capacity(wiring.gives.len());
        for (spec, source) in &wiring.gives {
            let between = match *source {
                Source::Kept(index) => {
                    Between { tensor: take(&mut tensors, index)?, lasts: lasts.get(index).is_none_or(|lasts| *lasts) }
                }
                Source::Made(index) => {
                    let tensor = outputs.get_mut(index).and_then(Option::take);
                    let tensor = tensor.ok_or_else(|| format!("the model gave no value for output '{}'", spec.name))?;
                    Between { tensor, lasts: made.lasts }
                }
            };
            if between.tensor.datatype != spec.datatype {
                let (name, expected, got) = (&spec.name, spec.datatype, between.tensor.datatype);
                return Err(format!("output '{name}': expected datatype {expected}, got {got}"));
            }
            given.push(between);
        }
        Ok(given)
    }

    /// Enqueues the copy of an output to the host.
    fn copy_back(&mut self, tensor: Tensor) -> Result<(), String> {
        let Some(slice) = tensor.data.device() else {
            self.left.push(Left::Here(tensor));
            return Ok(());
        };
        let mut data = self.ground.gpu.pinned.take(slice.len())?;
        // SAFETY: both are kept until the launch is over, and the copy is not read before.
        let copied = unsafe { slice.download(&self.ground.stream, data.bytes_mut()) };
        self.held.push(Held::Slice(slice.clone()));
        self.left.push(Left::Copied { datatype: tensor.datatype, shape: tensor.shape, data });
        Ok(copied?)
    }

    /// Waits until no enqueued work uses the lane's memory, even after an error. Launches under way
    /// hold their own memory.
    fn settle(&mut self) {
        let _ = self.ground.stream.finish();
        self.held.clear();
        self.left.clear();
    }

    /// Joins tensors on the device.
    fn join_tensors<'a>(
        &mut self,
        tensors: impl Iterator<Item = &'a Tensor> + Clone,
        datatype: DataType,
        shape: Vec<usize>,
    ) -> Result<Tensor, StateError> {
        let all: usize = tensors.clone().map(|tensor| tensor.data.len()).sum();
        let memory = DeviceAllocation::in_stream(&self.ground.stream, all, &format!("a batch of {all} bytes"))?;
        let mut offset = 0;
        for tensor in tensors {
            match tensor.data.device() {
                Some(slice) => {
                    self.held.push(Held::Slice(slice.clone()));
                    // SAFETY: held until the next launch is over, which comes after the copy.
                    unsafe { memory.copy(&self.ground.stream, offset, slice)? };
                }
                None => {
                    let source = self.pinned_copy(tensor.data.as_slice())?;
                    // SAFETY: as above.
                    let copied = unsafe { memory.upload(&self.ground.stream, offset, source.as_slice()) };
                    self.held.push(Held::Host(source));
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
        *state = self.enqueue(range, std::mem::take(state))?.wait()?;
        Ok(())
    }

    fn enqueue(&mut self, range: Range<usize>, state: State) -> Result<Box<dyn Pending>, RunError> {
        if range.is_empty() {
            return Ok(Box::new(state));
        }
        match self.launch(range, state.tensors) {
            Ok(enqueued) => Ok(Box::new(enqueued)),
            Err(reason) => {
                self.settle();
                let (reason, of_device) = self.ground.gpu.explain(reason);
                Err(RunError { engine: self.shared.maker.engine(), reason, of_device, of_executor: false, code: None })
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

    fn last_run(&self) -> Option<Span> {
        Some(Span::new(self.last.clone()?))
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        self.settle();
        // Sessions give their memory back on the device of the calling thread.
        let _ = self.ground.gpu.device.bind();
        self.sessions.clear();
    }
}

/// Keeps the first `rows` rows of `filled`.
fn cut(tensor: &mut Tensor, rows: usize, filled: usize) -> Result<(), String> {
    let shape = tensor.shape.clone();
    let first = tensor.shape.first_mut().filter(|first| **first == filled);
    let Some(first) = first else {
        return Err(format!(
            "a batch of {filled} rows gave a tensor of {shape:?}, whose first axis is not the batch. Set max_batch_size to 0 in the model's configuration"
        ));
    };
    *first = rows;
    match tensor.data.device() {
        Some(slice) => tensor.data = Buffer::from_device(slice.part(0, slice.len() / filled * rows)),
        None => {
            let len = tensor.data.len() / filled * rows;
            tensor.data = std::mem::take(&mut tensor.data).split(&[len]).pop().unwrap_or_default();
        }
    }
    Ok(())
}
