//! RTen, the embedded engine: pure Rust, nothing to install.

mod complete;
mod cut;
mod external;
mod integer_rules;
mod ml_rules;
mod padding_rules;
mod pools;
mod rules;
mod value;

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use prost::Message;
use rten::{ModelOptions, NodeId, RunOptions};

use crate::cores::CoreSet;
use crate::cut::activations::Activations;
use crate::cut::{Cut, SegmentInfo};
use crate::memory::run_memory::RunMemory;
use crate::onnx::Checked;
use crate::onnx::proto::{ModelProto, ModelValues};
use crate::onnx::rewrite::{self, Rewritten};
use crate::tensor::Tensor;
use crate::tensor::batch;
use crate::tensor::state::State;
use crate::traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, Place, RunError, Share};
use crate::{onnx, stop};
use external::Renamed;
use pools::{PoolKind, Pools};
use value::{tensor_of, value_of};

/// The name of the engine.
pub const NAME: &str = "rten";
/// Version of the crate in use; its manifest and this line change together.
const VERSION: &str = "0.27";
/// Newest version of the ONNX format and of its standard operators that was tested with RTen. RTen
/// itself does not check.
const NEWEST: (i64, i64) = (13, 27);
const REMEDY: &str = "onnxruntime may run it: `downbeat engine install` fetches it, and `--engine onnxruntime` or `[models.NAME] engine` chooses it";

/// RTen on the CPU.
#[derive(Default)]
pub struct Rten {
    pools: Arc<Pools>,
}

impl Rten {
    /// The engine; threads start when a model runs.
    pub fn new() -> Self {
        Rten::default()
    }

    /// The engine, with its threads for a run on one and on `threads` threads (0: one a core)
    /// started now.
    pub fn with_threads(threads: usize) -> Self {
        let rten = Rten::default();
        let kinds = [1, threads_of(threads, &Share::Whole)].map(|threads| PoolKind { threads, cores: None });
        let pools = kinds.map(|kind| rten.pools.take(kind));
        kinds.into_iter().zip(pools).for_each(|(kind, pool)| rten.pools.give_back(kind, pool));
        rten
    }
}

/// The number of threads of a run on `share`, for the requested number `threads` (0: all cores).
fn threads_of(threads: usize, share: &Share) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cores = share.cores().map_or_else(all, CoreSet::len);
    if threads == 0 { cores } else { threads.min(cores) }
}

impl Engine for Rten {
    fn info(&self) -> EngineInfo {
        EngineInfo { name: NAME, version: VERSION.into(), device: "cpu".into(), library: None }
    }

    fn weight_copies(&self) -> u64 {
        // Weights that `MatMul` reads are prepacked, and the original stays beside the packed copy.
        2
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let path = &options.path;
        let file = onnx::check(path)?;
        let error = |reason: String| LoadError::Model { path: path.clone(), engine: NAME, reason };
        for (what, version, newest) in
            [("the ONNX format", file.ir_version(), NEWEST.0), ("the ONNX operators", file.opset(), NEWEST.1)]
        {
            if version > newest {
                return Err(error(format!(
                    "the model is made for version {version} of {what}; the newest known version is {newest}. Export the model for an older version"
                )));
            }
        }
        // The estimate comes before RTen computes the values that depend on weights alone.
        let memory = RunMemory::of(path, options.memory.as_ref()).map_err(&error)?;
        let (model, rewritten) = load_model(path, &file).map_err(|reason| error(format!("{reason}. {REMEDY}")))?;
        let signature = file.signature(|output| infer(&model, output))?;
        for (what, specs) in [("input", &signature.inputs), ("output", &signature.outputs)] {
            if let Some(spec) = specs.iter().find(|s| !supported(s.datatype)) {
                return Err(error(format!(
                    "{what} '{}' is of datatype {}; rten has FP32, INT64, INT32, INT8, UINT8 and BOOL only. {REMEDY}",
                    spec.name, spec.datatype
                )));
            }
        }
        let (pools, threads, share) = (self.pools.clone(), options.threads, options.share);
        let is_bounded = !file.has_graphs() && share.cores().is_none();
        let rewritten = rewrite::summary(NAME, &rewritten);
        let states = Vec::new();
        let mut whole = RtenShared { model, signature, states, pools, threads, share, memory, is_bounded, rewritten };
        let (inputs, outputs) = (whole.signature.inputs.clone(), whole.signature.outputs.clone());
        whole.states = vec![whole.state(inputs).map_err(&error)?, whole.state(outputs).map_err(&error)?];
        if options.cut == Cut::Whole {
            return Ok(Arc::new(RtenModel { shared: Arc::new(whole), segments: Vec::new(), activations: None }));
        }
        let (shared, segments, activations) = cut::cut(whole, options).map_err(error)?;
        Ok(Arc::new(RtenModel { shared: Arc::new(shared), segments, activations: Some(activations) }))
    }
}

/// Reads and optimises the model, and lists its operators that differ from the file. RTen has
/// `expect`s on the contents of a file, so that a panic counts as an ordinary error.
fn load_model(path: &Path, file: &Checked<'_>) -> Result<(rten::Model, Rewritten), String> {
    // Loading computes the constant values, which may take as long and as much as the model says.
    let _call = stop::run(None)?;
    let load = || {
        let mut options = ModelOptions::with_all_ops();
        options.prepack_weights(true);
        let in_memory = match suited(path, file)? {
            Some(suited) => Some(suited),
            None => linked(path, file)?.map(|bytes| (bytes, Rewritten::new(), Renamed::new())),
        };
        if let Some((bytes, rewritten, renamed)) = in_memory {
            for location in file.external_locations().collect::<BTreeSet<_>>() {
                let data = std::fs::read(onnx::data_folder(path).join(location));
                let data = data.map_err(|e| format!("'{location}': {e}"))?;
                options.external_data(renamed.get(location).map_or(location, String::as_str), data);
            }
            return Ok((options.load(bytes).map_err(|e| e.to_string())?, rewritten));
        }
        // If the path's extension shows the format, RTen gets the path: only then does it find
        // external data.
        if path.extension().is_some_and(|e| e == "onnx") {
            return Ok((options.load_file(path).map_err(|e| e.to_string())?, Rewritten::new()));
        }
        let bytes = onnx::model_bytes(path).map_err(|e| e.to_string())?;
        Ok((options.load(bytes.to_vec()).map_err(|e| e.to_string())?, Rewritten::new()))
    };
    catch_unwind(load).unwrap_or_else(|panic| Err(format!("its loader failed: {}", panic_message(&*panic))))
}

/// The model file for RTen. It has the optional attributes that RTen needs, and names of external
/// data that RTen opens. Other operators are in place of the ones that RTen computes wrong. `None`:
/// the file is right already.
fn suited(path: &Path, file: &Checked<'_>) -> Result<Option<(Vec<u8>, Rewritten, Renamed)>, String> {
    let bytes = onnx::model_bytes(path).map_err(|e| e.to_string())?;
    // A file that cannot be decoded is RTen's to reject.
    let (Ok(mut model), Ok(values)) = (ModelProto::decode(bytes.clone()), ModelValues::decode(bytes)) else {
        return Ok(None);
    };
    let is_completed = complete::complete(&mut model)?;
    let rewritten = rewrite::rewrite(&mut model, &values, rules::rule_of)?;
    let renamed = external::rename(&mut model, file)?;
    let is_right = !is_completed && rewritten.is_empty() && renamed.is_empty();
    Ok((!is_right).then(|| (model.encode_to_vec(), rewritten, renamed)))
}

/// The model file if it has external data and is a symbolic link, or was made from another file;
/// else `None`. RTen looks for the data beside the file that a link leads to. A cache of downloads
/// has the data there under other names.
fn linked(path: &Path, file: &Checked<'_>) -> Result<Option<Vec<u8>>, String> {
    let is_elsewhere = path.is_symlink() || onnx::original(path) != path;
    if !is_elsewhere || file.external_locations().next().is_none() {
        return Ok(None);
    }
    std::fs::read(path).map(Some).map_err(|e| e.to_string())
}

/// Datatype and sizes of output `index` as RTen inferred them.
fn infer(model: &rten::Model, index: usize) -> Option<(DataType, Vec<i64>)> {
    let node = model.node_info(*model.output_ids().get(index)?)?;
    let datatype = match node.dtype()? {
        rten::ValueType::Tensor(rten::DataType::Float) => DataType::Fp32,
        rten::ValueType::Tensor(rten::DataType::Int32) => DataType::Int32,
        rten::ValueType::Tensor(rten::DataType::Int8) => DataType::Int8,
        rten::ValueType::Tensor(rten::DataType::UInt8) => DataType::Uint8,
        _ => return None,
    };
    let size = |d: &rten::Dimension| match d {
        rten::Dimension::Fixed(n) => i64::try_from(*n).unwrap_or(-1),
        rten::Dimension::Symbolic(_) => -1,
    };
    Some((datatype, node.shape()?.iter().map(size).collect()))
}

const fn supported(datatype: DataType) -> bool {
    use DataType::{Bool, Fp32, Int8, Int32, Int64, Uint8};
    matches!(datatype, Fp32 | Int64 | Int32 | Int8 | Uint8 | Bool)
}

struct RtenModel {
    shared: Arc<RtenShared>,
    segments: Vec<SegmentInfo>,
    activations: Option<Activations>,
}

struct RtenShared {
    model: rten::Model,
    signature: Signature,
    /// The tensors of a batch before each segment, and behind the last.
    states: Vec<Live>,
    pools: Arc<Pools>,
    /// The requested threads of a run.
    threads: usize,
    /// The share of lanes whose place names none.
    share: Share,
    memory: Option<RunMemory>,
    is_bounded: bool,
    /// The file's operators that run as others.
    rewritten: Option<String>,
}

/// The tensors of a batch at some place of the model.
#[derive(Clone)]
struct Live {
    specs: Vec<TensorSpec>,
    nodes: Vec<NodeId>,
}

impl Model for RtenModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.segments
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn run_memory(&self) -> Option<&RunMemory> {
        self.shared.memory.as_ref()
    }

    fn is_bounded(&self) -> bool {
        self.shared.is_bounded
    }

    fn rewritten(&self) -> Option<&str> {
        self.shared.rewritten.as_deref()
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(RtenLane { shared: self.shared.clone(), kind: self.shared.pool(place.share) }))
    }
}

/// Runs batches; RTen allocates activations for each run.
struct RtenLane {
    shared: Arc<RtenShared>,
    /// The threads of its runs.
    kind: PoolKind,
}

impl Lane for RtenLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let tensors = std::mem::take(&mut state.tensors);
        // The estimate starts from the model's inputs. A batch that has begun may go on.
        let memory = self.shared.memory.as_ref().filter(|_| range.start == 0);
        let _reserved = memory
            .map(|memory| memory.reserve(&tensors))
            .transpose()
            .map_err(|error| RunError::new(NAME, error.to_string()))?;
        let states = &self.shared.states;
        let result = match (states.get(range.start), states.get(range.end)) {
            // The range may have any number of segments: RTen runs from any values to any others.
            (Some(before), Some(behind)) => self.shared.run(self.kind, before, behind, tensors),
            _ => Err(format!("there are {} segments, but {range:?} are asked for", states.len() - 1)),
        };
        match result {
            Ok(outputs) => {
                state.tensors = outputs;
                Ok(())
            }
            Err(reason) => Err(RunError::new(NAME, reason)),
        }
    }
}

impl RtenShared {
    /// The pool of runs on a share of the CPU.
    fn pool(&self, share: Share) -> PoolKind {
        let share = share.or(self.share);
        PoolKind { threads: threads_of(self.threads, &share), cores: share.cores().copied() }
    }

    /// The tensors with these names.
    fn state(&self, specs: Vec<TensorSpec>) -> Result<Live, String> {
        let node = |spec: &TensorSpec| self.model.node_id(&spec.name).map_err(|e| format!("{e}. {REMEDY}"));
        let nodes = specs.iter().map(node).collect::<Result<_, _>>()?;
        Ok(Live { specs, nodes })
    }

    fn run(
        &self,
        kind: PoolKind,
        before: &Live,
        behind: &Live,
        mut tensors: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, String> {
        // This thread, not the pool, handles the tensors before and after the run.
        let _pinned = kind.pin()?;
        batch::check(&before.specs, &tensors)?;
        for tensor in &mut tensors {
            tensor.data.make_aligned(tensor.datatype.size().unwrap_or(1));
        }
        let inputs = before.nodes.iter().zip(&before.specs).zip(&tensors);
        let inputs = inputs
            .map(|((id, spec), tensor)| Ok((*id, value_of(tensor).map_err(|e| format!("input '{}': {e}", spec.name))?)))
            .collect::<Result<Vec<_>, String>>()?;
        let values = self.values(kind, inputs, &behind.nodes)?;
        let outputs = behind.specs.iter().zip(values);
        outputs
            .map(|(spec, value)| tensor_of(value, spec).map_err(|e| format!("output '{}': {e}", spec.name)))
            .collect()
    }

    fn values(
        &self,
        kind: PoolKind,
        inputs: Vec<(NodeId, rten::ValueOrView<'_>)>,
        outputs: &[NodeId],
    ) -> Result<Vec<rten::Value>, String> {
        // RTen cannot be told to end a run: the watcher leaves the thread behind.
        let _call = stop::run(None)?;
        let pool = self.pools.take(kind);
        let options = RunOptions::default().with_thread_pool(Some(pool.clone()));
        // A run does not change the model, so that a panic in an operator leaves nothing half done.
        let run = AssertUnwindSafe(|| self.model.run(inputs, outputs, Some(options)));
        let ran = catch_unwind(run);
        self.pools.give_back(kind, pool);
        match ran {
            Ok(values) => values.map_err(|e| e.to_string()),
            Err(panic) => Err(format!("an operator failed: {}", panic_message(&*panic))),
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it gave no reason".into())
}
