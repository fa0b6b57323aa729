//! A model in ONNX Runtime: one session, or one for each segment.
//!
//! Batches go in and out without a copy. Inputs are used in place, and an output stays the
//! library's memory until the last reply made of it is sent. `ort`'s own `Session::run` asks for
//! exclusive access and builds maps of names. This module calls the C function itself. Any number
//! of threads may call it on one CPU session, so that lanes share the weights.

use std::ffi::{CString, c_char};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_engine::cut::SegmentInfo;
use downbeat_engine::cut::activations::Activations;
use downbeat_engine::cut::operator_profile::OperatorProfile;
use downbeat_engine::onnx;
use downbeat_engine::run_memory::RunMemory;
use downbeat_engine::stop;
use downbeat_engine::tensor::Tensor;
use downbeat_engine::tensor::batch;
use downbeat_engine::tensor::state::State;
use downbeat_engine::{Lane, LoadError, LoadOptions, Model, Place, RunError, Share};
use ort::session::{RunOptions, Session, SharedSessionInner};
use ort::sys;
use ort::value::Outlet;
use ort::{AsPointer, api};
use smallvec::SmallVec;

use super::runtime::EndableRun;
use super::value::{MemoryInfo, Value, check};
use crate::library::NAME;

/// The sessions of a model, and the names for their runs.
pub(super) struct SessionModel {
    shared: Arc<SessionShared>,
    pub segments: Vec<SegmentInfo>,
    pub activations: Option<Activations>,
    pub operators: Option<Arc<OperatorProfile>>,
    memory: Option<Arc<RunMemory>>,
    path: PathBuf,
    /// The share of lanes whose place names none.
    share: Share,
    /// Whether its sessions have threads of their own, bound to that share.
    has_threads: bool,
    is_bounded: bool,
}

struct SessionShared {
    signature: Signature,
    memory: MemoryInfo,
    /// The sessions, one for each segment.
    parts: Vec<SessionPart>,
}

/// A segment: its session, and the step from the state before it to the state behind it.
pub(super) struct SessionPart {
    session: Arc<SharedSessionInner>,
    names: Names,
    wiring: Wiring,
}

/// The step from the state before a segment to the state behind it.
#[derive(Clone, Debug, Default)]
pub(super) struct Wiring {
    /// The tensors of the state before.
    pub before: Vec<TensorSpec>,
    /// For each input of the session, the index of its tensor in the state before.
    pub takes: Vec<usize>,
    /// Each tensor behind the segment, with its source.
    pub gives: Vec<(TensorSpec, Source)>,
    /// Outputs that may use the memory of an input, with the input: a sum to which a convolution
    /// adds.
    pub in_place: Vec<(usize, usize)>,
}

impl Wiring {
    /// The wiring of a session for the whole model.
    pub(super) fn whole(signature: &Signature) -> Wiring {
        Wiring {
            before: signature.inputs.clone(),
            takes: (0..signature.inputs.len()).collect(),
            gives: signature.outputs.iter().cloned().enumerate().map(|(i, o)| (o, Source::Made(i))).collect(),
            in_place: Vec::new(),
        }
    }
}

/// The source of a tensor behind a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// An output of the session.
    Made(usize),
    /// A tensor of the state before the segment, with its index.
    Kept(usize),
}

/// The names of inputs and outputs as C strings. The pointers are into the strings.
pub(super) struct Names {
    inputs: Vec<*const c_char>,
    outputs: Vec<*const c_char>,
    _strings: Vec<CString>,
}

// SAFETY: the pointers are to strings on the heap that live as long as `self` and are never
// written.
unsafe impl Send for Names {}
// SAFETY: as above.
unsafe impl Sync for Names {}

impl Names {
    pub(super) fn new(inputs: &[String], outputs: &[String]) -> Result<Names, String> {
        let mut strings = Vec::new();
        let mut pointers = |names: &[String]| -> Result<Vec<*const c_char>, String> {
            let pointer = |name: &String| {
                let name = CString::new(name.as_str()).map_err(|e| format!("name '{name}': {e}"))?;
                let pointer = name.as_ptr();
                strings.push(name);
                Ok(pointer)
            };
            names.iter().map(pointer).collect()
        };
        let (inputs, outputs) = (pointers(inputs)?, pointers(outputs)?);
        Ok(Names { inputs, outputs, _strings: strings })
    }

    /// Pointers that live as long as `self`.
    pub(super) fn inputs(&self) -> &[*const c_char] {
        &self.inputs
    }

    /// Pointers that live as long as `self`.
    pub(super) fn outputs(&self) -> &[*const c_char] {
        &self.outputs
    }
}

impl SessionPart {
    /// A segment run by `session`, with the inputs and outputs of these names.
    pub(super) fn new(
        session: &Session,
        inputs: &[String],
        outputs: &[String],
        wiring: Wiring,
    ) -> Result<SessionPart, String> {
        Ok(SessionPart { session: session.inner(), names: Names::new(inputs, outputs)?, wiring })
    }

    /// The whole model, run by `session`.
    pub(super) fn whole(session: &Session, signature: &Signature) -> Result<SessionPart, String> {
        let wiring = Wiring::whole(signature);
        let names = |specs: &[TensorSpec]| specs.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        SessionPart::new(session, &names(&signature.inputs), &names(&signature.outputs), wiring)
    }
}

impl SessionModel {
    /// A model in one session.
    pub(super) fn whole(session: &Session, signature: Signature, path: &Path) -> Result<Self, LoadError> {
        let error = |reason: String| LoadError::Model { path: path.to_owned(), engine: NAME, reason };
        let same = |specs: &[TensorSpec], outlets: &[Outlet]| {
            specs.len() == outlets.len() && specs.iter().zip(outlets).all(|(s, o)| s.name == o.name())
        };
        if !same(&signature.inputs, session.inputs()) || !same(&signature.outputs, session.outputs()) {
            return Err(error("its inputs and outputs differ from those that the library reads; the file changed meanwhile. Load it again".into()));
        }
        let part = SessionPart::whole(session, &signature).map_err(error)?;
        SessionModel::new(vec![part], signature).map_err(error)
    }

    /// A model in one session for each segment.
    pub(super) fn new(parts: Vec<SessionPart>, signature: Signature) -> Result<Self, String> {
        let shared = Arc::new(SessionShared { signature, memory: MemoryInfo::cpu()?, parts });
        let (segments, activations, operators, memory, path, share, has_threads, is_bounded) = Default::default();
        Ok(SessionModel { shared, segments, activations, operators, memory, path, share, has_threads, is_bounded })
    }

    /// The same model, loaded as the options say, with a limit on the memory of its runs.
    /// `has_graphs`: the time of a run may depend on values.
    pub(super) fn loaded(self, options: &LoadOptions, memory: Option<Arc<RunMemory>>, has_graphs: bool) -> Self {
        SessionModel {
            memory,
            path: options.path.clone(),
            share: options.share,
            has_threads: options.threads != 1,
            is_bounded: !has_graphs && options.share.cores().is_none(),
            ..self
        }
    }
}

/// Datatype and sizes of output `index` as the library inferred them.
pub(super) fn output(session: &Session, index: usize) -> Option<(DataType, Vec<i64>)> {
    let ort::value::ValueType::Tensor { ty, shape, .. } = session.outputs().get(index)?.dtype() else { return None };
    let datatype = onnx::datatype(i64::from(sys::ONNXTensorElementDataType::from(*ty) as i32))?;
    Some((datatype, shape.to_vec()))
}

impl Model for SessionModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.segments
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn operators(&self) -> Option<&Arc<OperatorProfile>> {
        self.operators.as_ref()
    }

    fn run_memory(&self) -> Option<&RunMemory> {
        self.memory.as_deref()
    }

    fn is_bounded(&self) -> bool {
        self.is_bounded
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let share = place.share.or(self.share);
        if self.has_threads && share.cores() != self.share.cores() {
            let reason =
                "its threads are bound to other cores than the lane is to have; load it for those, or with one thread";
            return Err(LoadError::Model { path: self.path.clone(), engine: NAME, reason: reason.to_owned() });
        }
        Ok(Box::new(SessionLane {
            shared: self.shared.clone(),
            share,
            options: None,
            memory: self.memory.clone(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        }))
    }
}

/// Runs batches on sessions that other lanes may share; activations are the library's own for each
/// run.
struct SessionLane {
    shared: Arc<SessionShared>,
    share: Share,
    /// The options with which a run can be ended; made with the first run.
    options: Option<Arc<EndableRun>>,
    memory: Option<Arc<RunMemory>>,
    /// Room for the values of a run; empty between runs.
    inputs: Vec<Value>,
    outputs: Vec<*mut sys::OrtValue>,
}

// SAFETY: `inputs` and `outputs` are empty between runs, and values may be moved between threads
// anyway.
unsafe impl Send for SessionLane {}

impl Lane for SessionLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        let _pinned = self.share.pin().map_err(|reason| RunError::new(NAME, reason))?;
        let mut tensors = std::mem::take(&mut state.tensors);
        let Some(parts) = shared.parts.get(range.clone()) else {
            let reason = format!("there are {} segments, but {range:?} are asked for", shared.parts.len());
            return Err(RunError::new(NAME, reason));
        };
        // The estimate starts from the model's inputs. A batch that has begun may go on.
        let memory = self.memory.as_ref().filter(|_| range.start == 0);
        let _reserved = memory
            .map(|memory| memory.reserve(&tensors))
            .transpose()
            .map_err(|error| RunError::new(NAME, error.to_string()))?;
        for (part, index) in parts.iter().zip(range) {
            let between = index + 1 < shared.parts.len();
            // The inputs must live until the run is over: the library reads them in place.
            let result = self.run_part(part, &shared.memory, &mut tensors, between);
            self.inputs.clear();
            match result {
                Ok(outputs) => tensors = outputs,
                Err(reason) => return Err(RunError::new(NAME, reason)),
            }
        }
        state.tensors = tensors;
        Ok(())
    }
}

/// An output in the memory of an input.
struct InPlace {
    output: usize,
    /// The index of the input in the state before the segment.
    tensor: usize,
    value: Value,
}

impl SessionLane {
    /// Runs one segment. Returns the tensors behind it.
    fn run_part(
        &mut self,
        part: &SessionPart,
        memory: &MemoryInfo,
        tensors: &mut [Tensor],
        between: bool,
    ) -> Result<Vec<Tensor>, String> {
        let SessionPart { session, names, wiring } = part;
        batch::check(&wiring.before, tensors)?;
        self.outputs.clear();
        self.outputs.resize(names.outputs.len(), ptr::null_mut());
        self.take_inputs(wiring, memory, tensors)?;
        let mut in_place = PlacedOutputs::new();
        self.place_outputs(wiring, memory, tensors, &mut in_place)?;
        let options = self.run_options()?;
        let call = stop::run(Some(options.clone()))?;
        // SAFETY: `Value` is a transparent pointer; there are as many names and values as stated.
        // The memory of inputs and of outputs in place is borrowed until after the call, and memory
        // written in place is exclusive. Several threads at once may run a CPU session (the C API's
        // contract of `Run`; the `&mut` of `ort` protects providers for other devices).
        let status = unsafe {
            (api().Run)(
                session.ptr().cast_mut(),
                options.0.ptr(),
                names.inputs.as_ptr(),
                self.inputs.as_ptr().cast(),
                self.inputs.len(),
                names.outputs.as_ptr(),
                names.outputs.len(),
                self.outputs.as_mut_ptr(),
            )
        };
        drop(call);
        // All values are taken first, so that none is lost when one of them is an error. Those in
        // place have an owner already.
        let owned =
            |(index, value)| if in_place.iter().any(|p| p.output == index) { None } else { Value::from_raw(value) };
        let mut made: Made = self.outputs.drain(..).enumerate().map(owned).collect();
        check(status)?;
        // The values of the inputs end before their memory becomes an output's.
        self.inputs.clear();
        Results { session, made: &mut made, in_place: &mut in_place, between }.into_tensors(&wiring.gives, tensors)
    }

    /// Wraps the inputs' tensors in values for the library. The values use the tensors' memory.
    #[inline]
    fn take_inputs(&mut self, wiring: &Wiring, memory: &MemoryInfo, tensors: &mut [Tensor]) -> Result<(), String> {
        for index in &wiring.takes {
            let tensor = tensors.get_mut(*index).ok_or("a tensor is missing between segments")?;
            let value = if tensor.datatype == DataType::Bytes {
                Value::of_strings(tensor)
            } else {
                batch::normalise_booleans(tensor);
                Value::of_memory(memory, tensor)
            };
            self.inputs.push(value?);
        }
        Ok(())
    }

    /// Gives outputs the memory of inputs where the wiring allows that. Adds these outputs to
    /// `in_place`.
    #[inline]
    fn place_outputs(
        &mut self,
        wiring: &Wiring,
        memory: &MemoryInfo,
        tensors: &mut [Tensor],
        in_place: &mut PlacedOutputs,
    ) -> Result<(), String> {
        for (output, index) in &wiring.in_place {
            let Some(tensor) = tensors.get_mut(*index) else { continue };
            // No other owner may see the input change, neither another part of a split batch nor a
            // client.
            if tensor.data.exclusive().is_none() {
                continue;
            }
            let value = Value::of_memory(memory, tensor)?;
            if let Some(place) = self.outputs.get_mut(*output) {
                *place = value.as_raw();
                in_place.push(InPlace { output: *output, tensor: *index, value });
            }
        }
        Ok(())
    }

    /// The options with which the run can be ended.
    #[inline]
    fn run_options(&mut self) -> Result<Arc<EndableRun>, String> {
        match &self.options {
            Some(options) => Ok(options.clone()),
            None => {
                let options = RunOptions::new().map_err(|e| e.message().to_owned())?;
                Ok(self.options.insert(Arc::new(EndableRun(options))).clone())
            }
        }
    }
}

/// The values that the library made, by output of the session.
type Made = SmallVec<[Option<Value>; 4]>;
/// The outputs of a run that use the memory of inputs.
type PlacedOutputs = SmallVec<[InPlace; 4]>;

/// The results of a segment's run.
struct Results<'a> {
    session: &'a Arc<SharedSessionInner>,
    made: &'a mut Made,
    in_place: &'a mut PlacedOutputs,
    /// Whether another segment follows.
    between: bool,
}

impl Results<'_> {
    /// The tensors behind the segment, each from its source. Tensors that the segment keeps or
    /// writes in place leave `tensors`.
    #[inline]
    fn into_tensors(self, gives: &[(TensorSpec, Source)], tensors: &mut [Tensor]) -> Result<Vec<Tensor>, String> {
        let mut outputs = Vec::with_capacity(gives.len());
        for (spec, source) in gives {
            let tensor = match *source {
                Source::Kept(index) => take(tensors, index)?,
                Source::Made(index) => match self.in_place.iter().position(|p| p.output == index) {
                    Some(place) => {
                        let InPlace { tensor, value, .. } = self.in_place.swap_remove(place);
                        drop(value);
                        take(tensors, tensor)?
                    }
                    None => {
                        let value = self.made.get_mut(index).and_then(Option::take);
                        let value =
                            value.ok_or_else(|| format!("the model gave no value for output '{}'", spec.name))?;
                        value
                            .into_tensor(self.session, tensors, self.between)
                            .map_err(|reason| format!("output '{}': {reason}", spec.name))?
                    }
                },
            };
            if tensor.datatype != spec.datatype {
                return Err(format!(
                    "output '{}': expected datatype {}, got {}",
                    spec.name, spec.datatype, tensor.datatype
                ));
            }
            outputs.push(tensor);
        }
        Ok(outputs)
    }
}

/// Takes the tensor out of the state before.
pub(super) fn take(tensors: &mut [Tensor], index: usize) -> Result<Tensor, String> {
    let tensor = tensors.get_mut(index).ok_or("a tensor is missing between segments")?;
    Ok(Tensor {
        datatype: tensor.datatype,
        shape: std::mem::take(&mut tensor.shape),
        data: std::mem::take(&mut tensor.data),
    })
}
