//! What `downbeat serve` was asked for: plain data, resolved from defaults, `downbeat.toml`, environment and flags.
//!
//! Nothing here reads a file or the environment; the binary does, and hands the result over.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use downbeat_core::Duration;
pub use downbeat_core::cluster::AutoscaleOptions;
pub use downbeat_core::device::WrittenSettings;
pub use downbeat_driver::MAX_SHARDS;
pub use downbeat_engine::{CudaOptions, Missing as CudaMissing};
use downbeat_repository::named;
pub use downbeat_repository::policy::{DispatchPolicy, DropPolicy, PolicyName};

pub use crate::device_options::{DeviceGroup, DeviceOptions};

/// What the server is called unless it is told otherwise.
pub const SERVER_NAME: &str = "downbeat";

/// Most devices that can be asked for.
pub const MOST_DEVICES: usize = 256;

/// Most models that are loaded side by side.
pub const MOST_LOAD_THREADS: usize = 64;

/// Everything the server can be told.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerOptions {
    /// The folders of the model repositories: models of all of them are served.
    pub repositories: Vec<PathBuf>,
    /// What the server is called in its metadata. Triton's is `triton`, which some clients insist on.
    pub server_name: String,
    /// Address that all three ports are bound on. Default: every IPv4 interface, as Triton.
    pub host: IpAddr,
    /// Address of the HTTP port; `None`: `host`.
    pub http_address: Option<IpAddr>,
    /// Address of the gRPC port; `None`: `host`.
    pub grpc_address: Option<IpAddr>,
    /// Address of the metrics port; `None`: `host`.
    pub metrics_address: Option<IpAddr>,
    /// HTTP port; 0: chosen by the operating system; `None`: no HTTP.
    pub http_port: Option<u16>,
    /// gRPC port; 0: chosen by the operating system; `None`: no gRPC.
    pub grpc_port: Option<u16>,
    /// Port of `/metrics`; 0: chosen by the operating system; `None`: no metrics port.
    pub metrics_port: Option<u16>,
    /// Which engine runs ONNX models.
    pub engine: EngineChoice,
    /// Threads inside one run of a model; 0: one, or the cores divided by `devices` where that is measured to be faster.
    pub threads: usize,
    /// Executors, each runs one batch at a time; 0: one for each GPU in use; on the CPU as many as the models want
    /// (docs/configuration.md, Threads and executors).
    pub devices: usize,
    /// Models that are loaded side by side, at most [`MOST_LOAD_THREADS`].
    pub load_threads: usize,
    /// Which GPUs are used, and how, where the engine runs on GPUs. The provider is what `engine` says.
    pub cuda: CudaOptions,
    /// How often GPUs are measured for metrics; zero: not at all.
    pub gpu_metrics_every: Duration,
    /// Parts of the scheduler that can be at work at the same time: each model's queue is in one. 0: as many as there are cores.
    pub scheduler_shards: usize,
    /// When a batch leaves.
    pub dispatch: DispatchPolicy,
    /// Which requests of a queue that cannot make their deadline are given up; `None`: what suits the dispatch policy
    /// (see [`ServerOptions::drop_policy`]).
    pub drop: Option<DropPolicy>,
    /// SLO of models without one of their own; `None`: no deadline unless the request has one.
    pub default_slo: Option<Duration>,
    /// What makes batches on a device, for which models.
    pub device: DeviceOptions,
    /// The devices of models that are not on all, by their numbers from 0. Wins over `instance_group`.
    pub placement: BTreeMap<String, Vec<usize>>,
    /// A plan of which models share devices. Wins over `placement`.
    pub plan: Option<PlacementPlan>,
    /// What `downbeat.toml` and the flags say about single models. Wins over `config.pbtxt`.
    pub models: BTreeMap<String, ModelOptions>,
    /// Bound of a model's queue where its configuration has none; 0: unbounded.
    pub max_queue_size: u32,
    /// How long a request without a deadline may wait, or as long as ten of the model's largest batches take if that is longer; zero: as
    /// long as it takes.
    pub max_queue_wait: Duration,
    /// Largest batch of a model without a configuration whose dimensions allow batches.
    pub default_max_batch_size: u32,
    /// Largest request body over HTTP, bytes, as sent and once decompressed. Default: 64 MiB, as Triton.
    pub max_body_bytes: usize,
    /// Largest message over gRPC, bytes, as sent and once decompressed. Default: 2 GiB less one byte, as Triton.
    pub max_grpc_message_bytes: usize,
    /// Bytes that all requests in flight may hold, from their first byte to their answer's last; `None`: a quarter of
    /// the memory this process may have.
    pub max_in_flight_bytes: Option<usize>,
    /// Whether clients may register regions of this machine's shared memory.
    pub shared_memory: bool,
    /// What runs of models on the CPU may take together, bytes, as estimated before each; `None`: a quarter of the memory, at most half of what is free
    /// at the start. 0: no limit.
    pub run_memory_bytes: Option<usize>,
    /// What models on the CPU may hold of its memory together, bytes; `None`: what this process may have, less what requests in flight may. 0: no limit.
    pub model_memory_bytes: Option<usize>,
    /// Most connections of HTTP and gRPC together; 0: as many as the limit of open files leaves room for.
    pub max_connections: usize,
    /// How long a connection may be without a request; zero: for ever.
    pub idle_timeout: Duration,
    /// How long the head of a request may take, and the time in which `min_rate` is measured; zero: for ever.
    pub transfer_timeout: Duration,
    /// Least rate of a request's body that is waited for, and of an answer that waits to be read, bytes per second.
    pub min_rate: u64,
    /// How long a server that got SIGTERM goes on accepting, while it says that it is not ready: as long as it takes until
    /// nobody sends to it any more. Part of `drain_timeout`.
    pub shutdown_grace: Duration,
    /// How long stopping may take in all. What is not finished then is broken off.
    pub drain_timeout: Duration,
    /// How long runs may take.
    pub run_limits: RunLimits,
    /// Which models are loaded, and when.
    pub model_control: ModelControl,
    /// Ready only once every model that was asked for is; otherwise as soon as the ports are open.
    pub strict_readiness: bool,
    /// Ready also while no model is served.
    pub allow_empty: bool,
    /// Whether a model's configuration is completed from its file.
    pub auto_complete_config: bool,
    /// Stop at start if a model does not load, instead of serving the others.
    pub exit_on_error: bool,
    /// Stop where only a new process can mend what is wrong, instead of saying that the server is not live.
    pub exit_when_not_live: bool,
    /// Measuring latency profiles.
    pub profiling: ProfilingOptions,
    /// When devices are advised to be added or given back; `None`: no advice.
    pub autoscale: Option<AutoscaleOptions>,
    /// Folder of the decision log: what the scheduler is told and decides, with the reasons; `None`: none.
    pub decision_log: Option<PathBuf>,
    /// What the server says about itself.
    pub log: LogOptions,
    /// What was given and has no effect: a line of the log each, at the start.
    pub notices: Vec<String>,
}

impl ServerOptions {
    /// The defaults, on a repository.
    pub fn new(repository: PathBuf) -> Self {
        ServerOptions {
            repositories: vec![repository],
            server_name: SERVER_NAME.to_owned(),
            host: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            http_address: None,
            grpc_address: None,
            metrics_address: None,
            http_port: Some(8000),
            grpc_port: Some(8001),
            metrics_port: Some(8002),
            engine: EngineChoice::Auto,
            threads: 0,
            devices: 0,
            load_threads: 3,
            cuda: CudaOptions::default(),
            gpu_metrics_every: Duration::from_millis(2_000),
            scheduler_shards: 0,
            dispatch: DispatchPolicy::Adaptive,
            drop: None,
            default_slo: None,
            device: DeviceOptions::default(),
            placement: BTreeMap::new(),
            plan: None,
            models: BTreeMap::new(),
            max_queue_size: 4096,
            max_queue_wait: Duration::from_millis(3_000),
            default_max_batch_size: 32,
            max_body_bytes: 64 << 20,
            max_grpc_message_bytes: i32::MAX as usize,
            max_in_flight_bytes: None,
            shared_memory: false,
            run_memory_bytes: None,
            model_memory_bytes: None,
            max_connections: 0,
            idle_timeout: Duration::from_millis(600_000),
            transfer_timeout: Duration::from_millis(30_000),
            min_rate: 500,
            shutdown_grace: Duration::from_millis(5_000),
            drain_timeout: Duration::from_millis(30_000),
            run_limits: RunLimits::default(),
            model_control: ModelControl::None,
            strict_readiness: true,
            allow_empty: false,
            auto_complete_config: true,
            exit_on_error: false,
            exit_when_not_live: false,
            profiling: ProfilingOptions::default(),
            autoscale: Some(AutoscaleOptions::default()),
            decision_log: None,
            log: LogOptions::default(),
            notices: Vec::new(),
        }
    }

    /// How many parts the scheduler is in, by [`ServerOptions::scheduler_shards`] or by the cores.
    pub fn scheduler_shards(&self) -> usize {
        match self.scheduler_shards {
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_SHARDS),
            shards => shards,
        }
    }

    /// The SLO of a model: what `downbeat.toml` or a flag says, else what its configuration says
    /// (`slo_ms`), else the default.
    pub fn slo(&self, model: &str, configured: Option<Duration>) -> Option<Duration> {
        self.models.get(model).and_then(|m| m.slo).or(configured).or(self.default_slo)
    }

    /// Threads inside one run of a model, if somebody said: for the model, or for all.
    pub fn chosen_threads(&self, model: &str) -> Option<usize> {
        let own = self.models.get(model).and_then(|m| m.threads).filter(|threads| *threads > 0);
        own.or((self.threads > 0).then_some(self.threads))
    }

    /// How long a model's requests without a deadline may wait, by the same order as [`ServerOptions::slo`]; `None`: as long as it takes.
    pub fn max_queue_wait(&self, model: &str) -> Option<Duration> {
        let wait = self.models.get(model).and_then(|m| m.max_queue_wait).unwrap_or(self.max_queue_wait);
        (wait > Duration::ZERO).then_some(wait)
    }

    /// The dispatch policy of a model, by the same order as [`ServerOptions::slo`].
    pub fn dispatch_policy(&self, model: &str, configured: Option<DispatchPolicy>) -> DispatchPolicy {
        self.models.get(model).and_then(|m| m.dispatch).or(configured).unwrap_or(self.dispatch)
    }

    /// The drop policy of a model that is dispatched by `dispatch`, by the same order as [`ServerOptions::slo`].
    ///
    /// Where nobody says: the adaptive one with the adaptive dispatch policies, which holds what the best of the others holds or
    /// more on nearly every workload measured, on one device and on many, and serves as much under overload (docs/results/symphony.md). Else window drop, which gives up heads that stand in the way of a large batch. On one device it has
    /// the highest capacity whatever the dispatch, and goodput does not collapse under overload, where head drop serves
    /// ever smaller batches of requests that are nearly late (docs/results/serving.md). On several devices eager
    /// dispatch sends small batches anyway, and heads given up for a large one are lost for nothing: there head drop.
    pub fn drop_policy(&self, model: &str, configured: Option<DropPolicy>, dispatch: DispatchPolicy) -> DropPolicy {
        let waits = matches!(dispatch, DispatchPolicy::Deferred | DispatchPolicy::Latest);
        let suits = match dispatch {
            DispatchPolicy::Adaptive | DispatchPolicy::Consolidating => DropPolicy::Adaptive,
            _ if self.devices <= 1 || waits => DropPolicy::Window,
            _ => DropPolicy::Head,
        };
        self.models.get(model).and_then(|m| m.drop).or(configured).or(self.drop).unwrap_or(suits)
    }
}

/// What is said about one model outside its `config.pbtxt`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelOptions {
    /// The model's SLO.
    pub slo: Option<Duration>,
    /// Its dispatch policy.
    pub dispatch: Option<DispatchPolicy>,
    /// Its drop policy.
    pub drop: Option<DropPolicy>,
    /// Bound of its queue; 0: unbounded.
    pub max_queue_size: Option<u32>,
    /// How long its requests without a deadline may wait; zero: as long as it takes.
    pub max_queue_wait: Option<Duration>,
    /// Threads inside one run of it; 0: as if nothing were said.
    pub threads: Option<usize>,
    /// What it may take of the memory of each GPU, bytes; `None`: what is free, but for a reserve.
    pub gpu_memory: Option<u64>,
    /// The number of the partition that it is on ([`DeviceOptions::partitions`]); `None`: the one with the fewest models.
    pub partition: Option<u32>,
}

/// Which models share devices, as `downbeat plan --json` prints it.
#[derive(Clone, PartialEq, Debug, Default, serde::Deserialize)]
pub struct PlacementPlan {
    /// The sub-clusters: each has devices of its own, with all of its models on each of them.
    pub sub_clusters: Vec<PlannedSubCluster>,
}

/// A sub-cluster of a [`PlacementPlan`].
#[derive(Clone, PartialEq, Debug, Default, serde::Deserialize)]
pub struct PlannedSubCluster {
    /// Its number, from 0.
    pub index: usize,
    /// Its models.
    pub models: Vec<String>,
    /// How many devices it needs at least, not rounded.
    #[serde(default)]
    pub devices_needed: f64,
}

/// How long a run may take before it is ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunLimits {
    /// In service: so many times what its profile says.
    pub factor: u32,
    /// In service: at least this; zero: no limit.
    pub least: Duration,
    /// A run while the model is loaded, when there is no profile yet; zero: no limit.
    pub load: Duration,
}

impl Default for RunLimits {
    fn default() -> Self {
        RunLimits { factor: 50, least: Duration::from_millis(15_000), load: Duration::from_millis(120_000) }
    }
}

/// Latency profiles: whether and for how long they are measured, where they are kept.
#[derive(Clone, PartialEq, Debug)]
pub struct ProfilingOptions {
    /// Measure a model at load if there is no stored profile.
    pub enabled: bool,
    /// Most time spent on measuring one model at load.
    pub budget: Duration,
    /// Folder of stored profiles; `None`: `downbeat/profiles` in the user's cache folder.
    pub cache_dir: Option<PathBuf>,
}

impl Default for ProfilingOptions {
    fn default() -> Self {
        ProfilingOptions { enabled: true, budget: Duration::from_millis(3_000), cache_dir: None }
    }
}

/// Log lines.
#[derive(Clone, PartialEq, Debug)]
pub struct LogOptions {
    /// Their form.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter in the syntax of `tracing_subscriber::EnvFilter`.
    pub level: String,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// Which models are loaded, and when (Triton's model control modes).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModelControl {
    /// All of the repository at start; load and unload requests are refused.
    None,
    /// These at start (`*`: all), others when a client asks.
    Explicit {
        /// Model names.
        load: Vec<String>,
    },
    /// All of the repository; changes on disk are followed.
    Poll {
        /// How often the folder is looked at.
        every: Duration,
    },
}

named! {
    /// Which engine runs ONNX models. Emulated models run on the emulated engine whatever is chosen here.
    EngineChoice as "engine" {
        /// ONNX Runtime on the GPUs if there are some with all that they need, else on the CPU if its library is found, else rten.
        Auto = "auto",
        /// ONNX Runtime on NVIDIA GPUs, with its CUDA provider.
        Cuda = "cuda",
        /// ONNX Runtime on NVIDIA GPUs, with its TensorRT provider.
        Tensorrt = "tensorrt",
        /// The embedded one.
        Rten = "rten",
        /// ONNX Runtime on the CPU; an error if its library is not found.
        OnnxRuntime = "onnxruntime",
        /// Only the emulated engine: ONNX models do not load.
        Emulated = "emulated",
    }
}

named! {
    /// The form of log lines.
    LogFormat as "log format" {
        /// For people.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_own_slo_wins_over_its_configuration_and_that_over_the_default() {
        let mut options = ServerOptions::new("models".into());
        let ms = Duration::from_millis;
        assert_eq!(options.slo("a", None), None);
        options.default_slo = Some(ms(100));
        assert_eq!(options.slo("a", None), Some(ms(100)));
        assert_eq!(options.slo("a", Some(ms(50))), Some(ms(50)));
        options.models.insert("a".into(), ModelOptions { slo: Some(ms(10)), ..Default::default() });
        assert_eq!(options.slo("a", Some(ms(50))), Some(ms(10)));
        assert_eq!(options.slo("b", Some(ms(50))), Some(ms(50)));
    }

    #[test]
    fn the_drop_policy_suits_the_devices_unless_somebody_chose_one() {
        let mut options = ServerOptions::new("models".into());
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Eager), DropPolicy::Window);
        options.devices = 4;
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Eager), DropPolicy::Head);
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Deferred), DropPolicy::Window);
        options.drop = Some(DropPolicy::None);
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Deferred), DropPolicy::None);
        assert_eq!(options.drop_policy("a", Some(DropPolicy::Head), DispatchPolicy::Deferred), DropPolicy::Head);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "egaer".parse::<DispatchPolicy>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown dispatch policy 'egaer'; expected one of: deferred, eager, timeout, adaptive, consolidating, latest, route"
        );
        for policy in DispatchPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(*policy));
        }
    }
}
