//! The emulated engine computes nothing: a run takes the time that a latency profile says.
//! Symphony's own large experiments do the same (§5).
//!
//! A model is a file `NAME.emulated.toml` (or `.emulated.json` with the same keys):
//!
//! ```toml
//! alpha_ms = 0.5          # l(b) = alpha_ms * b + beta_ms
//! beta_ms = 5.0
//! max_batch = 32
//!
//! [[inputs]]              # the batch dimension included, -1 where a size varies
//! name = "x"
//! datatype = "FP32"
//! dims = [-1, 784]
//!
//! [[outputs]]
//! name = "y"
//! datatype = "FP32"
//! dims = [-1, 10]
//! ```
//!
//! In place of `alpha_ms`, `beta_ms` and `max_batch` there may be `latency_ms = [5.5, 6.0]`, `l(b)`
//! for `b` from 1. With `knee = 0.6` each launch keeps that part of a device busy (above 0, at most
//! 1). Launches then take longer on a smaller partition, and models of one device slow each other
//! down as on a GPU. Without `knee` nothing slows a launch down. A model may also be an ONNX file,
//! which gives the signature. Its latencies are in `FILE.emulated.toml` beside it
//! (`model.onnx.emulated.toml`, without `inputs` and `outputs`).

mod contention;
mod device;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_core::{Duration, LatencyProfile, file_content};
use serde::Deserialize;

use self::device::{Devices, Sharing, Spot};
use crate::cores::{self, Topology};
use crate::cut::probe;
use crate::cut::{Cut, SegmentInfo};
use crate::onnx;
use crate::tensor::batch;
use crate::tensor::buffer::Buffer;
use crate::tensor::state::State;
use crate::tensor::{Tensor, elements};
use crate::traits::division::{Division, DivisionError, percent};
use crate::traits::{Engine, EngineInfo, Lane, LoadError, LoadOptions, Model, Place, RunError, Share};

/// The name of the engine.
pub const NAME: &str = "emulated";
/// Largest configuration that is read, bytes.
const CONFIG_LIMIT: u64 = 1 << 20;
/// Largest profile, batch sizes.
const BATCH_LIMIT: u32 = 1 << 16;
/// Most segments.
const STAGE_LIMIT: usize = 1024;

/// The emulated engine.
#[derive(Clone, Debug, Default)]
pub struct Emulated {
    devices: Arc<Devices>,
}

impl Emulated {
    /// Compute units of a device that is divided into shares: hundredths.
    pub const UNITS: u32 = 100;

    /// The engine; each model's latencies are in its file.
    pub fn new() -> Self {
        Emulated::default()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    alpha_ms: Option<f64>,
    beta_ms: Option<f64>,
    max_batch: Option<u32>,
    latency_ms: Option<Vec<f64>>,
    knee: Option<f64>,
    #[serde(default)]
    inputs: Vec<ConfigTensor>,
    #[serde(default)]
    outputs: Vec<ConfigTensor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigTensor {
    name: String,
    datatype: String,
    dims: Vec<i64>,
}

impl Config {
    fn read(path: &Path) -> Result<Config, String> {
        let metadata = std::fs::metadata(path).map_err(|e| e.to_string())?;
        if !metadata.is_file() || metadata.len() > CONFIG_LIMIT {
            return Err(format!("not a file of at most {CONFIG_LIMIT} bytes"));
        }
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        let text = file_content::text(&bytes).map_err(|e| format!("the file {e}"))?;
        if path.extension().is_some_and(|e| e == "json") {
            serde_json::from_str(text).map_err(|e| e.to_string())
        } else {
            toml::from_str(text).map_err(|e| e.to_string())
        }
    }

    fn profile(&self) -> Result<LatencyProfile, String> {
        let latency = |ms: f64| {
            if ms.is_finite() && ms >= 0.0 {
                Ok(Duration::from_millis_f64(ms))
            } else {
                Err(format!("{ms} ms is not a latency"))
            }
        };
        let profile = match (&self.latency_ms, self.alpha_ms, self.beta_ms, self.max_batch) {
            (Some(table), None, None, None) => {
                LatencyProfile::from_table(table.iter().map(|ms| latency(*ms)).collect::<Result<_, _>>()?)
            }
            (None, Some(alpha), Some(beta), Some(max_batch)) if max_batch <= BATCH_LIMIT => {
                LatencyProfile::linear(latency(alpha)?, latency(beta)?, max_batch)
            }
            (None, Some(_), Some(_), Some(_)) => return Err(format!("max_batch may be at most {BATCH_LIMIT}")),
            _ => return Err("expected either latency_ms, or alpha_ms, beta_ms and max_batch".into()),
        };
        profile.map_err(|e| e.to_string())
    }

    fn knee(&self) -> Result<Option<f64>, String> {
        match self.knee {
            Some(knee) if !(knee > 0.0 && knee <= 1.0) => Err(format!(
                "knee is {knee}; it is the part of the device that a launch keeps busy, above 0 and at most 1"
            )),
            knee => Ok(knee),
        }
    }

    fn signature(&self) -> Result<Signature, String> {
        if self.outputs.is_empty() {
            return Err("expected [[inputs]] and [[outputs]]".into());
        }
        let specs = |tensors: &[ConfigTensor]| tensors.iter().map(ConfigTensor::spec).collect::<Result<_, _>>();
        Ok(Signature { inputs: specs(&self.inputs)?, outputs: specs(&self.outputs)? })
    }
}

impl ConfigTensor {
    fn spec(&self) -> Result<TensorSpec, String> {
        let ConfigTensor { name, datatype, dims } = self;
        let datatype: DataType = datatype.parse().map_err(|e| format!("tensor '{name}': {e}"))?;
        if dims.iter().any(|d| *d < -1) {
            return Err(format!("tensor '{name}': dims {dims:?}: a size is 0 or more, or -1 if it varies"));
        }
        Ok(TensorSpec { name: name.clone(), datatype, dims: dims.clone() })
    }
}

impl Engine for Emulated {
    fn info(&self) -> EngineInfo {
        EngineInfo { name: NAME, version: env!("CARGO_PKG_VERSION").into(), device: "emulated".into(), library: None }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let path = &options.path;
        let beside = |path: &Path| {
            let mut beside = path.to_owned().into_os_string();
            beside.push(".emulated.toml");
            PathBuf::from(beside)
        };
        let (config_path, declared) = match path.extension().is_some_and(|e| e == "onnx") {
            true => (beside(&onnx::original(path)), Some(onnx::inspect(path)?)),
            false => (path.clone(), None),
        };
        let wrong = file_error(&config_path);
        if declared.is_some() && !config_path.exists() {
            let missing = "no such file; expected the latencies to emulate (alpha_ms, beta_ms, max_batch)";
            return Err(wrong(missing.to_owned()));
        }
        let config = Config::read(&config_path).map_err(&wrong)?;
        let signature = declared.map_or_else(|| config.signature(), Ok).map_err(&wrong)?;
        let (profile, knee) = (config.profile().map_err(&wrong)?, config.knee().map_err(&wrong)?);
        let segments = segments(&options.cut, &signature, &profile).map_err(|reason| LoadError::Model {
            path: path.clone(),
            engine: NAME,
            reason,
        })?;
        let parts = stages(&options.cut);
        let shared = Arc::new(EmulatedShared { signature, profile, parts });
        let sharing = knee.map(|knee| self.devices.sharing(knee));
        Ok(Arc::new(EmulatedModel { segments, shared, sharing, share: options.share }))
    }

    fn divide(&self, parts: &[String]) -> Result<Division, DivisionError> {
        match parts.iter().any(|part| percent(part).is_some()) {
            true => self.devices.divide(parts),
            false => cores::divide(parts, &Topology::here()),
        }
    }

    fn divide_freely(&self, parts: &[String]) -> Result<Division, DivisionError> {
        match parts.iter().any(|part| percent(part).is_some()) {
            true => self.devices.divide(parts),
            false => cores::divide_freely(parts, &Topology::here()),
        }
    }
}

/// The number of segments for this cut.
fn stages(cut: &Cut) -> usize {
    if let Cut::Stages(stages) | Cut::UpTo(stages) = cut { *stages } else { 1 }
}

/// Segments of equal time. The inputs remain the state until the last segment.
fn segments(cut: &Cut, signature: &Signature, profile: &LatencyProfile) -> Result<Vec<SegmentInfo>, String> {
    let stages = match cut {
        Cut::Whole => return Ok(Vec::new()),
        Cut::At(_) => {
            return Err("an emulated model has no operators to cut behind; cut the model into equal stages".into());
        }
        Cut::Stages(0) => return Err("the model cannot be cut into 0 segments; ask for 1 or more".into()),
        Cut::Stages(stages) | Cut::UpTo(stages) if *stages > STAGE_LIMIT => {
            return Err(format!("the model cannot be cut into {stages} segments. Ask for at most {STAGE_LIMIT}"));
        }
        Cut::Stages(stages) | Cut::UpTo(stages) => *stages,
    };
    if stages > 1 {
        probe::has_batch(signature)?;
    }
    let segment = |index: usize| {
        let live = if index + 1 == stages { &signature.outputs } else { &signature.inputs };
        let bytes = |spec: &TensorSpec| {
            let elements = spec.dims.iter().map(|d| u64::try_from(*d).unwrap_or(1)).product::<u64>();
            elements.saturating_mul(spec.datatype.size().unwrap_or(4) as u64)
        };
        let name = format!("part {} of {stages}", index + 1);
        SegmentInfo {
            operators: 1,
            first: name.clone(),
            last: name,
            live: live.clone(),
            live_bytes_per_item: live.iter().map(bytes).sum(),
            weight_bytes: 0,
            time: Some(share(profile.latency(1), &(index..index + 1), stages)),
        }
    };
    Ok((0..stages).map(segment).collect())
}

/// The part of `whole` that the segments of `range` take. The parts add up to `whole`, to the
/// nanosecond.
fn share(whole: Duration, range: &Range<usize>, stages: usize) -> Duration {
    let until = |index: usize| (u128::from(whole.as_nanos()) * index as u128 / stages.max(1) as u128) as u64;
    Duration::from_nanos(until(range.end) - until(range.start))
}

/// Turns a fault of a file into a load error.
fn file_error(path: &Path) -> impl Fn(String) -> LoadError {
    move |reason| LoadError::File { path: path.to_owned(), reason }
}

struct EmulatedModel {
    shared: Arc<EmulatedShared>,
    segments: Vec<SegmentInfo>,
    /// The model's use of devices, if launches slow each other down.
    sharing: Option<Sharing>,
    /// The share that the model was loaded for.
    share: Share,
}

struct EmulatedShared {
    signature: Signature,
    profile: LatencyProfile,
    /// The number of segments.
    parts: usize,
}

impl Model for EmulatedModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.segments
    }

    fn profile(&self, share: Share) -> Option<LatencyProfile> {
        let EmulatedShared { profile, .. } = &*self.shared;
        let alone = |sharing: &Sharing| sharing.spot(Place { device: 0, share }, self.share).alone(profile);
        Some(self.sharing.as_ref().map_or_else(|| profile.clone(), alone))
    }

    fn knee(&self) -> Option<u32> {
        self.sharing.as_ref().map(Sharing::knee)
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let spot = self.sharing.as_ref().map(|sharing| sharing.spot(place, self.share));
        Ok(Box::new(EmulatedLane { shared: self.shared.clone(), spot }))
    }
}

struct EmulatedLane {
    shared: Arc<EmulatedShared>,
    /// The place on a device that other lanes may use, too.
    spot: Option<Spot>,
}

impl Lane for EmulatedLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let inputs = std::mem::take(&mut state.tensors);
        let EmulatedShared { signature, profile, parts } = &*self.shared;
        let error = |reason| RunError::new(NAME, reason);
        if range.end > *parts {
            return Err(error(format!("there are {parts} segments, but {range:?} are asked for")));
        }
        batch::check(&signature.inputs, &inputs).map_err(error)?;
        let rows = inputs.first().and_then(|t| t.shape.first()).map_or(1, |d| *d);
        let batch = u32::try_from(rows).ok().filter(|b| *b <= profile.max_batch());
        let batch = batch
            .ok_or_else(|| error(format!("a batch of {rows} is larger than the profile's {}", profile.max_batch())))?;
        let alone = share(profile.latency(batch), &range, *parts);
        match &self.spot {
            Some(spot) => spot.spend(alone),
            None => spend(alone),
        }
        if range.end < *parts {
            state.tensors = inputs;
            return Ok(());
        }
        let outputs = signature.outputs.iter().map(|spec| zeros(spec, &inputs).map_err(error));
        state.tensors = outputs.collect::<Result<_, _>>()?;
        Ok(())
    }
}

/// An output of zeros (`BYTES`: empty strings). A size that varies is the first input's at the same
/// place, or 1.
fn zeros(spec: &TensorSpec, inputs: &[Tensor]) -> Result<Tensor, String> {
    let like = inputs.first().map_or(&[][..], |t| &t.shape);
    let size = |(axis, d): (usize, &i64)| usize::try_from(*d).unwrap_or_else(|_| like.get(axis).copied().unwrap_or(1));
    let shape: Vec<usize> = spec.dims.iter().enumerate().map(size).collect();
    let bytes = elements(&shape).and_then(|n| n.checked_mul(spec.datatype.size().unwrap_or(4)));
    let bytes = bytes
        .filter(|n| *n <= 1 << 30)
        .ok_or_else(|| format!("output '{}': shape {shape:?} is too large", spec.name))?;
    let data = Buffer::zeroed(bytes).map_err(|error| format!("output '{}': {error}", spec.name))?;
    Ok(Tensor { datatype: spec.datatype, shape, data })
}

/// Keeps the calling thread for `latency`, as a device would.
#[expect(clippy::disallowed_methods, reason = "the time that passes here is what the emulated device computes")]
fn spend(latency: Duration) {
    std::thread::sleep(latency.into());
}
