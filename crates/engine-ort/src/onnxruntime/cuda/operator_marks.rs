//! Marks between operators, which measure the operators' times on a GPU in runs of the whole model
//! in one session.
//!
//! A mark is an operator of our own. It passes its inputs through, in their memory, and records an
//! event in the session's stream as a batch passes. A mark takes all floating-point tensors that
//! are alive at its place. So no operator after the mark can run before it. Shapes and indices,
//! which may be on the host, bypass it.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

use bytes::Bytes;
use cudarc::driver::result;
use downbeat_core::tensor::DataType;
use downbeat_core::{Duration, median};
use downbeat_engine::onnx;
use downbeat_engine::onnx::graph::OperatorGraph;
use downbeat_engine::onnx::proto::{
    AttributeProto, GraphValues, ModelProto, ModelValues, NodeProto, OperatorSetProto, TypeProto, ValueInfoProto,
    value_info,
};
use ort::operator::{ComputeContext, Kernel, KernelContext, Operator, OperatorDomain, OperatorInput, OperatorOutput};
use ort::session::builder::SessionBuilder;
use ort::value::DynTensorValueType;
use prost::Message;

use super::gpu::Gpu;
use crate::cuda::{Event, Stream};

/// The most stretches of operators that are timed.
const STRETCHES: usize = 64;
/// The most tensors that one mark passes through.
const MOST_ALIVE: usize = 16;
/// The operator's domain in a model.
const DOMAIN: &str = "downbeat";
const NAME: &str = "Mark";
/// The operator's attribute: the event that it records.
const EVENT: &str = "event";

/// Times runs on a GPU, with marks.
pub(in crate::onnxruntime) struct OperatorMarks {
    gpu: Arc<Gpu>,
    recorder: Arc<Recorder>,
    domain: Arc<OperatorDomain>,
}

/// A stream with an event for each possible mark, and the events at the begin and the end of a run.
struct Recorder {
    stream: Arc<Stream>,
    events: Vec<Event>,
}

impl OperatorMarks {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<OperatorMarks, String> {
        let stream = Stream::new(&gpu.device)?;
        let events = (0..=STRETCHES).map(|_| Event::timed(&gpu.device)).collect::<Result<_, _>>()?;
        let recorder = Arc::new(Recorder { stream, events });
        let domain = OperatorDomain::new(DOMAIN).and_then(|domain| domain.add(Mark(recorder.clone())));
        #[expect(clippy::arc_with_non_send_sync, reason = "session builders take it so")]
        let domain = Arc::new(domain.map_err(|e| e.message().to_owned())?);
        Ok(OperatorMarks { gpu: gpu.clone(), recorder, domain })
    }

    /// The stream in which the session must run.
    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.recorder.stream
    }

    /// Registers the operator with a session.
    pub(super) fn register(&self, builder: SessionBuilder) -> ort::Result<SessionBuilder> {
        Ok(builder.with_operators(self.domain.clone())?)
    }

    /// The GPU's turn, for making or dropping the session.
    pub(in crate::onnxruntime) fn turn(&self) -> MutexGuard<'_, ()> {
        self.gpu.turn()
    }

    /// The time of each stretch in one run.
    pub(in crate::onnxruntime) fn time(
        &self,
        marked: &Marked,
        run: impl FnOnce() -> Result<(), String>,
    ) -> Result<Vec<Duration>, String> {
        let Recorder { stream, events } = &*self.recorder;
        let Some(events) = events.get(..marked.places.len()) else { return Err("there are too many marks".into()) };
        let [first, .., last] = events else { return Err("there is nothing to time".into()) };
        // A mark before the first operator records this event again, behind the copies of the
        // inputs.
        stream.record(first)?;
        run()?;
        if !marked.ends_inside {
            stream.record(last)?;
        }
        last.wait()?;
        let pairs = events.iter().zip(events.iter().skip(1));
        pairs.map(|(begin, end)| end.since(begin)).collect::<Result<_, _>>().map_err(String::from)
    }
}

/// The places of a model's marks.
pub(in crate::onnxruntime) struct Marked {
    /// The number of operators before each event: before all, between stretches, behind all.
    places: Vec<usize>,
    /// Whether there is a mark behind the last operator. Without it a run has ended when its
    /// outputs are on the host.
    ends_inside: bool,
    /// The name of each value behind the last mark that passes it through.
    names: BTreeMap<String, String>,
    values: Vec<ValueInfoProto>,
}

impl Marked {
    /// Inserts marks into a model whose values have the datatypes in `values`.
    pub(in crate::onnxruntime) fn new(
        model: &mut ModelProto,
        graph: &OperatorGraph,
        values: &ModelValues,
    ) -> Result<Marked, String> {
        let types = types(values)?;
        let proto = model.graph.as_mut().ok_or("the model has no graph")?;
        let operators = graph.operators.len();
        let stretches = operators.clamp(1, STRETCHES);
        let mut marked = Marked { places: Vec::new(), ends_inside: false, names: BTreeMap::new(), values: Vec::new() };
        let mut unmarked = std::mem::take(&mut proto.node).into_iter();
        let (live, mut done) = (graph.live(), 0);
        for stretch in 0..=stretches {
            let place = operators * stretch / stretches;
            for mut node in unmarked.by_ref().take(place - done) {
                node.input.iter_mut().for_each(|input| *input = marked.name(input).to_owned());
                proto.node.push(node);
            }
            done = place;
            let alive = live.get(place).into_iter().flatten();
            let alive = alive.filter_map(|name| Some((*name, *types.get(*name)?))).take(MOST_ALIVE);
            let alive: Vec<(&str, i32)> = alive.collect();
            if alive.is_empty() && (1..stretches).contains(&stretch) {
                // Joins the stretch with the next one.
                continue;
            }
            let event = marked.places.len();
            marked.places.push(place);
            if !alive.is_empty() {
                marked.ends_inside = stretch == stretches;
                proto.node.push(marked.mark(event, &alive));
            }
        }
        for output in &mut proto.output {
            output.name = marked.name(&output.name).to_owned();
        }
        let set = OperatorSetProto { domain: DOMAIN.into(), version: 1 };
        model.opset_import.push(set.encode_to_vec().into());
        Ok(marked)
    }

    /// A mark that passes values of these datatypes through.
    fn mark(&mut self, event: usize, values: &[(&str, i32)]) -> NodeProto {
        let input = values.iter().map(|(name, _)| self.name(name).to_owned()).collect();
        let behind = |name: &str| format!("{name}/{DOMAIN}/{event}");
        let output = values.iter().map(|(name, _)| behind(name)).collect();
        for (name, datatype) in values {
            self.values.push(value_info(&behind(name), *datatype));
            self.names.insert((*name).to_owned(), behind(name));
        }
        let attribute = AttributeProto::int(EVENT, i64::try_from(event).unwrap_or(i64::MAX)).encode_to_vec();
        NodeProto {
            input,
            output,
            name: format!("{DOMAIN}/{event}"),
            op_type: NAME.into(),
            attribute: vec![Bytes::from(attribute)],
            domain: DOMAIN.into(),
            overload: String::new(),
        }
    }

    /// The name of a model's value behind all marks.
    pub(in crate::onnxruntime) fn name<'a>(&'a self, value: &'a str) -> &'a str {
        self.names.get(value).map_or(value, String::as_str)
    }

    /// The declarations of the marks' outputs, which the library cannot infer. Appended to the
    /// encoded model they are part of it.
    pub(in crate::onnxruntime) fn values(&self) -> ModelValues {
        ModelValues { graph: Some(GraphValues { value_info: self.values.clone(), ..GraphValues::default() }) }
    }

    /// The time of each operator: an equal part of its stretch, whose times are in `runs`.
    pub(in crate::onnxruntime) fn of_operators(&self, runs: &[Vec<Duration>]) -> Vec<Duration> {
        let mut each = Vec::with_capacity(self.places.last().copied().unwrap_or(0));
        for (stretch, end) in self.places.iter().skip(1).enumerate() {
            let median = median(runs.iter().filter_map(|run| run.get(stretch))).map_or(0, |time| time.as_nanos());
            let count = end.saturating_sub(each.len());
            each.extend(std::iter::repeat_n(Duration::from_nanos(median / count.max(1) as u64), count));
        }
        each
    }
}

/// The element types of values that hold numbers with a fraction, by name.
fn types(values: &ModelValues) -> Result<BTreeMap<&str, i32>, String> {
    let mut types = BTreeMap::new();
    if let Some(graph) = &values.graph {
        for info in graph.input.iter().chain(&graph.value_info).chain(&graph.output) {
            let Some(bytes) = &info.r#type else { continue };
            let kind = TypeProto::decode(bytes.clone()).map_err(|e| format!("value '{}': {e}", info.name))?;
            let Some(tensor) = kind.tensor_type else { continue };
            let datatype = onnx::datatype(tensor.elem_type.into());
            if datatype.is_some_and(DataType::is_float) {
                types.insert(info.name.as_str(), tensor.elem_type);
            }
        }
    }
    Ok(types)
}

/// The mark operator.
struct Mark(Arc<Recorder>);

impl Operator for Mark {
    type Kernel<'attr> = Pass;

    const ALIASES: &[(u32, u32)] = &{
        let (mut pairs, mut index) = ([(0, 0); MOST_ALIVE], 0);
        while index < MOST_ALIVE {
            pairs[index] = (index as u32, index as u32);
            index += 1;
        }
        pairs
    };

    fn name(&self) -> &str {
        NAME
    }

    fn execution_provider_type(&self) -> Option<&str> {
        Some("CUDAExecutionProvider")
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        [OperatorInput::variadic(1)]
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        [OperatorOutput::variadic(1)]
    }

    fn create_kernel<'attr>(&self, context: &KernelContext<'attr>) -> ort::Result<Pass> {
        let event: Option<i64> = context.get(EVENT);
        let event = event.and_then(|event| usize::try_from(event).ok()).filter(|event| *event < self.0.events.len());
        let event = event.ok_or_else(|| ort::Error::new("a mark without an event: this is a defect"))?;
        Ok(Pass { recorder: self.0.clone(), event })
    }
}

/// A mark in a session.
struct Pass {
    recorder: Arc<Recorder>,
    event: usize,
}

impl Kernel for Pass {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        let words = |error: crate::cuda::CudaError| ort::Error::new(error.to_string());
        let Recorder { stream, events } = &*self.recorder;
        if let Some(event) = events.get(self.event) {
            stream.record(event).map_err(words)?;
        }
        for index in 0..context.num_inputs()? {
            let missing = || ort::Error::new("a mark without a tensor: this is a defect");
            let input = context.input(index)?.ok_or_else(missing)?;
            let input = input.downcast::<DynTensorValueType>()?;
            let output = context.output(index, input.shape().clone())?.ok_or_else(missing)?;
            let output = output.downcast::<DynTensorValueType>()?;
            let (from, to) = (input.data_ptr().addr() as u64, output.data_ptr().addr() as u64);
            if from == to {
                continue;
            }
            // An output of the model has memory of its own.
            let bytes = input.data_type().byte_size(input.shape().num_elements()).ok_or_else(missing)?;
            // SAFETY: both are tensors of this size on the device. They belong to the session and
            // stay until the stream is past this, as the session reuses their memory in the same
            // stream.
            let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream.raw()) };
            stream.device().check("copying between operators", copied).map_err(words)?;
        }
        Ok(())
    }
}
