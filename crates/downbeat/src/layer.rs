//! One source of server options: each is given there or not. `downbeat.toml` is one, flags with the environment another.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};
use downbeat_core::Duration;
use downbeat_repository::did_you_mean;
use downbeat_server::options::{AutoscaleOptions, DispatchPolicy, DropPolicy, EngineChoice, LogFormat, ModelOptions};
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::cuda_layer::CudaLayer;
use crate::device_layer::DeviceLayer;
use crate::units;

/// Largest `downbeat.toml` that is read, bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The options that are about models, and may come in a file that lies with them.
const OF_MODELS: [&str; 8] =
    ["slo_ms", "scheduler", "drop", "max_queue_size", "default_max_batch_size", "device", "placement", "models"];

/// The options that one source gives.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// The model repositories; in a file, relative to the file's folder.
    #[serde(default, deserialize_with = "one_or_more")]
    pub repository: Option<Vec<PathBuf>>,
    pub server_name: Option<String>,
    #[serde(default, deserialize_with = "named")]
    pub host: Option<IpAddr>,
    /// Where they are not `host`.
    #[serde(default, deserialize_with = "named")]
    pub http_address: Option<IpAddr>,
    #[serde(default, deserialize_with = "named")]
    pub grpc_address: Option<IpAddr>,
    #[serde(default, deserialize_with = "named")]
    pub metrics_address: Option<IpAddr>,
    pub http_port: Option<Port>,
    pub grpc_port: Option<Port>,
    pub metrics_port: Option<Port>,
    #[serde(default, deserialize_with = "named")]
    pub engine: Option<EngineChoice>,
    pub threads: Option<usize>,
    pub devices: Option<usize>,
    pub load_threads: Option<usize>,
    pub scheduler_shards: Option<usize>,
    #[serde(default, deserialize_with = "named")]
    pub scheduler: Option<DispatchPolicy>,
    #[serde(default, deserialize_with = "named")]
    pub drop: Option<DropPolicy>,
    #[serde(default, rename = "slo_ms", alias = "default_slo_ms", deserialize_with = "millis")]
    pub slo: Option<Duration>,
    pub max_queue_size: Option<u32>,
    #[serde(default, rename = "max_queue_wait_s", deserialize_with = "seconds")]
    pub max_queue_wait: Option<Duration>,
    pub default_max_batch_size: Option<u32>,
    #[serde(default, deserialize_with = "bytes")]
    pub max_body_bytes: Option<usize>,
    #[serde(default, deserialize_with = "bytes")]
    pub max_grpc_message_bytes: Option<usize>,
    #[serde(default, deserialize_with = "bytes")]
    pub max_in_flight_bytes: Option<usize>,
    pub shared_memory: Option<bool>,
    #[serde(default, deserialize_with = "bytes_or_zero")]
    pub run_memory_bytes: Option<usize>,
    #[serde(default, deserialize_with = "bytes_or_zero")]
    pub model_memory_bytes: Option<usize>,
    pub max_connections: Option<usize>,
    #[serde(default, rename = "idle_timeout_s", deserialize_with = "seconds")]
    pub idle_timeout: Option<Duration>,
    #[serde(default, rename = "transfer_timeout_s", deserialize_with = "seconds")]
    pub transfer_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "bytes")]
    pub min_rate: Option<usize>,
    #[serde(default, rename = "shutdown_grace_s", deserialize_with = "seconds")]
    pub shutdown_grace: Option<Duration>,
    #[serde(default, rename = "drain_timeout_s", deserialize_with = "seconds")]
    pub drain_timeout: Option<Duration>,
    #[serde(default, rename = "run_timeout_s", deserialize_with = "seconds")]
    pub run_timeout: Option<Duration>,
    pub run_timeout_factor: Option<u32>,
    #[serde(default, rename = "load_run_timeout_s", deserialize_with = "seconds")]
    pub load_run_timeout: Option<Duration>,
    /// In a file, relative to the file's folder.
    pub decision_log: Option<PathBuf>,
    pub strict_readiness: Option<bool>,
    pub allow_empty: Option<bool>,
    pub auto_complete_config: Option<bool>,
    pub exit_on_error: Option<bool>,
    pub exit_when_not_live: Option<bool>,
    #[serde(default)]
    pub model_control: ModelControlLayer,
    #[serde(default)]
    pub profiling: ProfilingLayer,
    #[serde(default)]
    pub cuda: CudaLayer,
    #[serde(default)]
    pub device: DeviceLayer,
    #[serde(default)]
    pub autoscale: AutoscaleLayer,
    #[serde(default)]
    pub log: LogLayer,
    /// The devices of each model, by their numbers.
    #[serde(default)]
    pub placement: BTreeMap<String, Vec<usize>>,
    #[serde(default)]
    pub models: BTreeMap<String, ModelLayer>,
}

/// `[model_control]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelControlLayer {
    #[serde(default, deserialize_with = "named")]
    pub mode: Option<ControlMode>,
    pub load: Option<Vec<String>>,
    #[serde(default, rename = "poll_s", deserialize_with = "seconds")]
    pub poll: Option<Duration>,
}

/// `[profiling]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfilingLayer {
    pub enabled: Option<bool>,
    #[serde(default, rename = "budget_s", deserialize_with = "seconds")]
    pub budget: Option<Duration>,
    pub cache_dir: Option<PathBuf>,
}

/// `[autoscale]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoscaleLayer {
    pub enabled: Option<bool>,
    pub bad_threshold: Option<f64>,
    pub idle_threshold: Option<f64>,
    pub spare: Option<f64>,
    #[serde(default, rename = "grow_window_s", deserialize_with = "seconds")]
    pub grow_window: Option<Duration>,
    #[serde(default, rename = "shrink_window_s", deserialize_with = "seconds")]
    pub shrink_window: Option<Duration>,
    pub min_requests: Option<u64>,
    pub min_devices: Option<u32>,
    pub max_devices: Option<u32>,
}

impl AutoscaleLayer {
    /// What is given here, over what `options` already says.
    pub fn apply(&self, options: &mut AutoscaleOptions) {
        let AutoscaleLayer {
            enabled: _,
            bad_threshold,
            idle_threshold,
            spare,
            grow_window,
            shrink_window,
            min_requests,
            min_devices,
            max_devices,
        } = self;
        options.bad_threshold = bad_threshold.unwrap_or(options.bad_threshold);
        options.idle_threshold = idle_threshold.unwrap_or(options.idle_threshold);
        options.spare = spare.unwrap_or(options.spare);
        options.grow_window = grow_window.unwrap_or(options.grow_window);
        options.shrink_window = shrink_window.unwrap_or(options.shrink_window);
        options.min_requests = min_requests.unwrap_or(options.min_requests);
        options.min_devices = min_devices.unwrap_or(options.min_devices);
        options.max_devices = max_devices.unwrap_or(options.max_devices);
    }
}

/// `[log]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogLayer {
    #[serde(default, deserialize_with = "named")]
    pub format: Option<LogFormat>,
    pub level: Option<String>,
}

/// `[models.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelLayer {
    #[serde(default, rename = "slo_ms", deserialize_with = "millis")]
    pub slo: Option<Duration>,
    #[serde(default, deserialize_with = "named")]
    pub scheduler: Option<DispatchPolicy>,
    #[serde(default, deserialize_with = "named")]
    pub drop: Option<DropPolicy>,
    pub max_queue_size: Option<u32>,
    #[serde(default, rename = "max_queue_wait_s", deserialize_with = "seconds")]
    pub max_queue_wait: Option<Duration>,
    pub threads: Option<usize>,
    /// Bytes.
    #[serde(default, rename = "gpu_memory_mb", deserialize_with = "mebibytes")]
    pub gpu_memory: Option<u64>,
    pub partition: Option<u32>,
}

impl ModelLayer {
    /// What is given here, over what `options` already says.
    pub fn apply(&self, options: &mut ModelOptions) {
        let ModelLayer { slo, scheduler, drop, max_queue_size, max_queue_wait, threads, gpu_memory, partition } = self;
        options.slo = slo.or(options.slo);
        options.dispatch = scheduler.or(options.dispatch);
        options.drop = drop.or(options.drop);
        options.max_queue_size = max_queue_size.or(options.max_queue_size);
        options.max_queue_wait = max_queue_wait.or(options.max_queue_wait);
        options.threads = threads.or(options.threads);
        options.gpu_memory = gpu_memory.or(options.gpu_memory);
        options.partition = partition.or(options.partition);
    }
}

downbeat_repository::named! {
    /// Triton's model control modes.
    ControlMode as "model control mode" {
        /// All models at start, no changes.
        None = "none",
        /// Models that are asked for.
        Explicit = "explicit",
        /// All models, and changes on disk are followed.
        Poll = "poll",
    }
}

/// A port, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// This one; 0: any free one.
    On(u16),
    /// The service is switched off.
    Off,
}

impl Port {
    /// `None` if it is off.
    pub fn number(self) -> Option<u16> {
        match self {
            Port::On(port) => Some(port),
            Port::Off => None,
        }
    }
}

impl FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Port::Off),
            _ => text.parse().map(Port::On).map_err(|_| format!("'{text}' is not a port: 0 to 65535, or off")),
        }
    }
}

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged, expecting = "a port is a number from 0 to 65535, or false")]
        enum Written {
            Number(u16),
            Off(bool),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(port) => Ok(Port::On(port)),
            Written::Off(false) => Ok(Port::Off),
            Written::Off(true) => Err(D::Error::custom("true is not a port; write its number")),
        }
    }
}

pub(crate) fn named<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<PathBuf>>, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "a repository is the path of a folder, or a list of such paths")]
    enum Written {
        One(PathBuf),
        More(Vec<PathBuf>),
    }
    Ok(Some(match Written::deserialize(deserializer)? {
        Written::One(path) => vec![path],
        Written::More(paths) => paths,
    }))
}

pub(crate) fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    units::millis(f64::deserialize(deserializer)?).map(Some).map_err(D::Error::custom)
}

pub(crate) fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    units::seconds(f64::deserialize(deserializer)?).map(Some).map_err(D::Error::custom)
}

fn mebibytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let mebibytes = u64::deserialize(deserializer)?;
    let bytes = mebibytes.checked_mul(1 << 20).filter(|bytes| *bytes > 0);
    bytes.map(Some).ok_or_else(|| D::Error::custom(format!("{mebibytes} MiB: must be at least 1")))
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    size(deserializer, units::bytes)
}

fn bytes_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    size(deserializer, units::bytes_or_zero)
}

fn size<'de, D: Deserializer<'de>>(
    deserializer: D,
    read: impl Fn(&str) -> Result<usize, String>,
) -> Result<Option<usize>, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "a size is a number of bytes, or a text such as \"64M\"")]
    enum Written {
        Number(u64),
        Text(String),
    }
    let text = match Written::deserialize(deserializer)? {
        Written::Number(number) => number.to_string(),
        Written::Text(text) => text,
    };
    read(&text).map(Some).map_err(D::Error::custom)
}

impl Layer {
    /// Reads `path`.
    ///
    /// # Errors
    /// If it cannot be read or is not as it should be, with the place.
    pub fn read(path: &Path) -> anyhow::Result<Layer> {
        let shown = path.display();
        let text = Layer::text(path)?;
        let mut layer = Layer::parse(&text).map_err(|e| anyhow!("{shown}:{e}"))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let others = [&mut layer.profiling.cache_dir, &mut layer.decision_log].into_iter().flatten();
        for inner in layer.repository.iter_mut().flatten().chain(others) {
            *inner = folder.join(&*inner);
        }
        layer.device.relative_to(folder);
        Ok(layer)
    }

    /// Makes sure that the file at `path`, which lies in the model repository, says nothing but how models are served: who may put models
    /// there does not decide what else the server does.
    ///
    /// # Errors
    /// If it does, with the first such option.
    pub fn check_of_models(path: &Path) -> anyhow::Result<()> {
        let shown = path.display();
        let table: toml::Table = toml::from_str(&Layer::text(path)?).with_context(|| shown.to_string())?;
        let Some(other) = table.keys().find(|key| !OF_MODELS.contains(&key.as_str())) else { return Ok(()) };
        bail!(
            "{shown} lies in the model repository, where an options file may say only how models are served ({}); '{other}' has to come from a \
             downbeat.toml in the folder that the server is started in, from a file named with --config, or from a flag",
            OF_MODELS.join(", ")
        );
    }

    fn text(path: &Path) -> anyhow::Result<String> {
        let shown = path.display();
        let metadata = std::fs::metadata(path).with_context(|| format!("cannot read {shown}"))?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            bail!("{shown} is not a file of at most {MAX_BYTES} bytes");
        }
        std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))
    }

    /// Parses the text of a `downbeat.toml`. An error is `LINE:COLUMN: MESSAGE`.
    pub fn parse(text: &str) -> Result<Layer, String> {
        let read = toml::from_str::<Layer>(text);
        let read = read.map_err(|e| (e.span().map_or(0, |span| span.start), with_hint(e.message().trim())));
        read.and_then(|layer| layer.device.check().map(|()| layer)).map_err(|(offset, message)| {
            let before = text.get(..offset).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            format!("{line}:{column}: {message}")
        })
    }
}

/// Replaces the list of what would have been allowed by what was probably meant.
fn with_hint(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    if let (Some((unknown, known)), true) = (quoted.split_first(), message.starts_with("unknown field")) {
        let hint = did_you_mean(unknown, known.iter().copied());
        return if hint.is_empty() {
            format!("unknown option '{unknown}'; here are allowed: {}", known.join(", "))
        } else {
            format!("unknown option '{unknown}'{hint}")
        };
    }
    message.replace('\n', " ")
}
