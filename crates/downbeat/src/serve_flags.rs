//! The flags of `downbeat serve`, as given.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use downbeat_core::Duration;
use downbeat_server::options::{CudaMissing, DispatchPolicy, DropPolicy, EngineChoice, LogFormat, PolicyName};

use crate::cuda_layer::CudaLayer;
use crate::device_layer::DeviceLayer;
use crate::layer::{AutoscaleLayer, ControlMode, Layer, LogLayer, ModelControlLayer, ModelLayer, Port, ProfilingLayer};
use crate::triton_flags::{self, TritonFlags};
use crate::units;

/// Serve the models of a repository.
///
/// Options come from the defaults, then downbeat.toml, then the environment, then flags; the later wins.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeFlags {
    /// Model repository: NAME/VERSION/model.onnx, optionally NAME/config.pbtxt. The models of several are served together
    #[arg(value_name = "REPOSITORY", env = "DOWNBEAT_MODEL_REPOSITORY")]
    pub repository: Vec<PathBuf>,

    /// The same as REPOSITORY, by Triton's name; repeatable
    #[arg(long = "model-repository", alias = "model-store", value_name = "REPOSITORY", hide = true)]
    pub model_repository: Vec<PathBuf>,

    /// Options file; without it ./downbeat.toml, or else downbeat.toml in the repository, if there is one (that may say only how models are served)
    #[arg(long, value_name = "FILE", env = "DOWNBEAT_CONFIG")]
    pub config: Option<PathBuf>,

    /// What the server is called in its metadata; clients of Triton may want triton [default: downbeat]
    #[arg(long, alias = "id", value_name = "NAME", env = "DOWNBEAT_SERVER_NAME", help_heading = "Ports")]
    pub server_name: Option<String>,

    /// Address to listen on [default: 0.0.0.0]
    #[arg(long, value_name = "ADDRESS", env = "DOWNBEAT_HOST", help_heading = "Ports")]
    pub host: Option<IpAddr>,

    /// HTTP port, or off [default: 8000]
    #[arg(long, value_name = "PORT", env = "DOWNBEAT_HTTP_PORT", help_heading = "Ports")]
    pub http_port: Option<Port>,

    /// gRPC port, or off [default: 8001]
    #[arg(long, value_name = "PORT", env = "DOWNBEAT_GRPC_PORT", help_heading = "Ports")]
    pub grpc_port: Option<Port>,

    /// Port of /metrics, or off [default: 8002]
    #[arg(long, value_name = "PORT", env = "DOWNBEAT_METRICS_PORT", help_heading = "Ports")]
    pub metrics_port: Option<Port>,

    /// Largest request body over HTTP, such as 64M [default: 64M]
    #[arg(
        long, alias = "http-max-input-size", value_name = "BYTES", value_parser = units::bytes,
        env = "DOWNBEAT_MAX_BODY_BYTES", help_heading = "Ports"
    )]
    pub max_body_bytes: Option<usize>,

    /// Largest message over gRPC, such as 64M [default: 2147483647]
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, env = "DOWNBEAT_MAX_GRPC_MESSAGE_BYTES", help_heading = "Ports")]
    pub max_grpc_message_bytes: Option<usize>,

    /// Most bytes that all requests in flight hold, with their answers [default: a quarter of the memory]
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, env = "DOWNBEAT_MAX_IN_FLIGHT_BYTES", help_heading = "Ports")]
    pub max_in_flight_bytes: Option<usize>,

    /// Let clients register regions of this machine's shared memory
    #[arg(
        long, alias = "allow-client-shm", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(),
        env = "DOWNBEAT_SHARED_MEMORY", help_heading = "Ports"
    )]
    pub shared_memory: Option<bool>,
    /// What runs of models on the CPU may take together, such as 4G, as estimated before each; 0: no limit [default: a quarter of the memory]
    #[arg(long, value_name = "BYTES", value_parser = units::bytes_or_zero, env = "DOWNBEAT_RUN_MEMORY_BYTES", help_heading = "Engine")]
    pub run_memory_bytes: Option<usize>,
    /// What models on the CPU may hold of its memory together, such as 8G; 0: no limit [default: the memory, less --max-in-flight-bytes]
    #[arg(long, value_name = "BYTES", value_parser = units::bytes_or_zero, env = "DOWNBEAT_MODEL_MEMORY_BYTES", help_heading = "Engine")]
    pub model_memory_bytes: Option<usize>,

    /// Engine for ONNX models: auto, cuda, tensorrt, onnxruntime, rten or emulated [default: auto]
    #[arg(long, value_name = "ENGINE", env = "DOWNBEAT_ENGINE", help_heading = "Engine")]
    pub engine: Option<EngineChoice>,

    /// Threads inside one run of a model; 0: one or all cores (divided by --devices), as measured at load [default: 0]
    #[arg(long, value_name = "N", env = "DOWNBEAT_THREADS", help_heading = "Engine")]
    pub threads: Option<usize>,

    /// Executors, each runs one batch at a time; 0: one for each GPU; on the CPU as many as the models ask for, at least two for two models
    /// [default: 0]
    #[arg(long, value_name = "N", env = "DOWNBEAT_DEVICES", help_heading = "Engine")]
    pub devices: Option<usize>,

    /// Models that are loaded side by side (Triton's --model-load-thread-count) [default: 3]
    #[arg(
        long,
        alias = "model-load-thread-count",
        value_name = "N",
        env = "DOWNBEAT_LOAD_THREADS",
        help_heading = "Models"
    )]
    pub load_threads: Option<usize>,

    /// A plan that `downbeat plan --json` has printed: each of its sub-clusters gets devices of its own. Wins over [placement]
    #[arg(long, value_name = "FILE", env = "DOWNBEAT_PLAN", help_heading = "Models")]
    pub plan: Option<PathBuf>,

    /// GPUs to use, by their numbers, such as 0,1 [default: all]
    #[arg(long, value_name = "GPUS", env = "DOWNBEAT_GPUS", value_delimiter = ',', help_heading = "GPUs")]
    pub gpus: Vec<u32>,

    /// What to do if the engine is cuda or tensorrt and no GPU can be used: exit or cpu [default: exit]
    #[arg(long, value_name = "WHAT", env = "DOWNBEAT_CUDA_MISSING", help_heading = "GPUs")]
    pub cuda_missing: Option<CudaMissing>,

    /// Most memory that one session may take of a GPU for tensors, MiB [default: no limit]
    #[arg(long, value_name = "N", env = "DOWNBEAT_CUDA_MEMORY_LIMIT_MB", help_heading = "GPUs")]
    pub cuda_memory_limit_mb: Option<u64>,

    /// Do not round FP32 products to TF32
    #[arg(long, help_heading = "GPUs")]
    pub no_tf32: bool,

    /// SLO in milliseconds of all models that have none of their own; without it their requests have no deadline
    #[arg(
        long, value_name = "MS", value_parser = units::positive_millis, env = "DOWNBEAT_DEFAULT_SLO_MS", help_heading = "Scheduling"
    )]
    pub default_slo_ms: Option<Duration>,

    /// SLO in milliseconds of one model (without MODEL= as --default-slo-ms); repeatable
    #[arg(
        long = "slo-ms", value_name = "[MODEL=]MS", value_parser = model_slo, env = "DOWNBEAT_SLO_MS",
        value_delimiter = ',', help_heading = "Scheduling"
    )]
    pub slo: Vec<ModelSlo>,

    /// Parts of the scheduler that can be at work at once, each with some of the models; 0: one a core [default: 0]
    #[arg(long, value_name = "N", env = "DOWNBEAT_SCHEDULER_SHARDS", help_heading = "Scheduling")]
    pub scheduler_shards: Option<usize>,

    /// When a batch leaves: adaptive, consolidating, eager, deferred, timeout or latest; route: the device policy decides [default: adaptive]
    #[arg(long, value_name = "POLICY", env = "DOWNBEAT_SCHEDULER", help_heading = "Scheduling")]
    pub scheduler: Option<DispatchPolicy>,

    #[arg(long, value_name = "POLICY", env = "DOWNBEAT_DEVICE_POLICY", help = device_policy_help(), help_heading = "Scheduling")]
    pub device_policy: Option<PolicyName>,

    /// Which requests are dropped when not all can make their deadlines: adaptive, window, head or none [default: adaptive, or what suits another
    /// scheduler]
    #[arg(long, value_name = "POLICY", env = "DOWNBEAT_DROP", help_heading = "Scheduling")]
    pub drop: Option<DropPolicy>,

    /// Most requests that wait for a model whose configuration has no bound; 0: unbounded [default: 4096]
    #[arg(long, value_name = "N", env = "DOWNBEAT_MAX_QUEUE_SIZE", help_heading = "Scheduling")]
    pub max_queue_size: Option<u32>,

    /// How long a request without a deadline may wait, or ten full batches of its model if that is longer; 0: as long as it takes [default: 3]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_MAX_QUEUE_WAIT",
        help_heading = "Scheduling"
    )]
    pub max_queue_wait: Option<Duration>,

    /// Largest batch of models that could be batched and do not say how far; 0: none [default: 32]
    #[arg(long, value_name = "N", env = "DOWNBEAT_DEFAULT_MAX_BATCH_SIZE", help_heading = "Scheduling")]
    pub default_max_batch_size: Option<u32>,

    /// Which models are loaded: none (all at start), explicit (on request) or poll (all, following the disk)
    #[arg(long, value_name = "MODE", env = "DOWNBEAT_MODEL_CONTROL_MODE", help_heading = "Models")]
    pub model_control_mode: Option<ControlMode>,

    /// A model to load at start in mode explicit, * for all; repeatable
    #[arg(
        long = "load-model",
        value_name = "MODEL",
        env = "DOWNBEAT_LOAD_MODEL",
        value_delimiter = ',',
        help_heading = "Models"
    )]
    pub load_model: Vec<String>,

    /// How often the disk is looked at in mode poll [default: 15]
    #[arg(
        long = "repository-poll-secs", value_name = "SECONDS", value_parser = units::parse_seconds,
        env = "DOWNBEAT_REPOSITORY_POLL_SECS", help_heading = "Models"
    )]
    pub poll: Option<Duration>,

    /// Do not complete configurations from the model files
    #[arg(long, help_heading = "Models")]
    pub disable_auto_complete_config: bool,

    /// End if a model does not load at start, instead of serving the others
    #[arg(
        long, value_name = "BOOL", value_parser = clap::builder::BoolishValueParser::new(),
        env = "DOWNBEAT_EXIT_ON_ERROR", help_heading = "Models"
    )]
    pub exit_on_error: Option<bool>,

    /// Be ready only once all models are [default: true]
    #[arg(
        long, value_name = "BOOL", value_parser = clap::builder::BoolishValueParser::new(),
        env = "DOWNBEAT_STRICT_READINESS", help_heading = "Models"
    )]
    pub strict_readiness: Option<bool>,

    /// Be ready also while no model is served
    #[arg(
        long, value_name = "BOOL", value_parser = clap::builder::BoolishValueParser::new(), num_args = 0..=1, require_equals = true,
        default_missing_value = "true", env = "DOWNBEAT_ALLOW_EMPTY", help_heading = "Models"
    )]
    pub allow_empty: Option<bool>,

    /// Do not measure latency profiles at load
    #[arg(long, help_heading = "Profiles")]
    pub no_profiling: bool,

    /// Most time spent on measuring one model [default: 3]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_PROFILING_BUDGET",
        help_heading = "Profiles"
    )]
    pub profiling_budget: Option<Duration>,

    /// Folder of stored profiles [default: downbeat/profiles in the user's cache folder]
    #[arg(long, value_name = "FOLDER", env = "DOWNBEAT_PROFILE_CACHE", help_heading = "Profiles")]
    pub profile_cache: Option<PathBuf>,

    /// Most connections of HTTP and gRPC; 0: what the limit of open files allows, at most 32768 [default: 0]
    #[arg(long, value_name = "N", env = "DOWNBEAT_MAX_CONNECTIONS", help_heading = "Connections")]
    pub max_connections: Option<usize>,

    /// How long a connection may be without a request; 0: for ever [default: 600]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_IDLE_TIMEOUT",
        help_heading = "Connections"
    )]
    pub idle_timeout: Option<Duration>,

    /// How long the head of a request may take, and the time that --min-rate is measured in; 0: for ever [default: 30]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_TRANSFER_TIMEOUT",
        help_heading = "Connections"
    )]
    pub transfer_timeout: Option<Duration>,

    /// Least rate of bodies and of answers being read, bytes per second [default: 500]
    #[arg(
        long, value_name = "BYTES", value_parser = units::bytes, env = "DOWNBEAT_MIN_RATE",
        help_heading = "Connections"
    )]
    pub min_rate: Option<usize>,

    /// How long to go on accepting after SIGTERM, not ready, until nobody sends any more; part of --drain-timeout [default: 5]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_SHUTDOWN_GRACE",
        help_heading = "Operation"
    )]
    pub shutdown_grace: Option<Duration>,

    /// How long stopping may take in all after SIGTERM [default: 30]
    #[arg(
        long, alias = "exit-timeout-secs", value_name = "SECONDS", value_parser = units::parse_seconds,
        env = "DOWNBEAT_DRAIN_TIMEOUT", help_heading = "Operation"
    )]
    pub drain_timeout: Option<Duration>,

    /// Least time that a run may take before it is ended: a run that takes longer than this and than --run-timeout-factor times its profile is ended;
    /// 0: never [default: 15]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_RUN_TIMEOUT", help_heading = "Operation"
    )]
    pub run_timeout: Option<Duration>,

    /// How many times its profile a run may take before it is ended [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), env = "DOWNBEAT_RUN_TIMEOUT_FACTOR", help_heading = "Operation")]
    pub run_timeout_factor: Option<u32>,

    /// How long a run may take while its model is loaded, which fails then; 0: any time [default: 120]
    #[arg(
        long, value_name = "SECONDS", value_parser = units::parse_seconds, env = "DOWNBEAT_LOAD_RUN_TIMEOUT", help_heading = "Operation"
    )]
    pub load_run_timeout: Option<Duration>,

    /// End where only a new process helps, as when the last GPU is lost, instead of saying at /v2/health/live that the server is not live
    #[arg(
        long, value_name = "BOOL", value_parser = clap::builder::BoolishValueParser::new(), num_args = 0..=1, require_equals = true,
        default_missing_value = "true", env = "DOWNBEAT_EXIT_WHEN_NOT_LIVE", help_heading = "Operation"
    )]
    pub exit_when_not_live: Option<bool>,

    /// Folder to write down what the scheduler is told and decides, with the reasons: downbeat log show FILE, downbeat log replay FILE
    #[arg(long, value_name = "FOLDER", env = "DOWNBEAT_DECISION_LOG", help_heading = "Operation")]
    pub decision_log: Option<PathBuf>,

    /// Form of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = triton_flags::log_format, env = "DOWNBEAT_LOG_FORMAT", help_heading = "Operation")]
    pub log_format: Option<LogFormat>,

    /// error, warn, info, debug, trace, or a filter such as info,downbeat_server=debug [default: info]
    #[arg(long, value_name = "LEVEL", env = "DOWNBEAT_LOG_LEVEL", help_heading = "Operation")]
    pub log_level: Option<String>,

    #[command(flatten)]
    pub triton: TritonFlags,
}

/// `--slo-ms`: of a model, or of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSlo {
    /// The model; `None`: the default.
    pub model: Option<String>,
    /// The SLO.
    pub slo: Duration,
}

fn device_policy_help() -> String {
    let all = PolicyName::all().chain([PolicyName::AUTO]);
    let policies = all.map(|policy| format!("{policy} ({})", policy.about())).collect::<Vec<_>>().join(", ");
    format!("What makes batches on a device: {policies} [default: {}]", PolicyName::EXCLUSIVE)
}

fn model_slo(text: &str) -> Result<ModelSlo, String> {
    match text.rsplit_once('=') {
        Some(("", _)) => Err("the name of the model is missing before '='".to_owned()),
        Some((model, slo)) => Ok(ModelSlo { model: Some(model.to_owned()), slo: units::positive_millis(slo)? }),
        None => Ok(ModelSlo { model: None, slo: units::positive_millis(text)? }),
    }
}

impl ServeFlags {
    /// What the flags give.
    pub fn layer(&self) -> Layer {
        let mut layer = Layer {
            repository: [&self.model_repository, &self.repository].into_iter().find(|given| !given.is_empty()).cloned(),
            server_name: self.server_name.clone(),
            host: self.host,
            http_address: None,
            grpc_address: None,
            metrics_address: None,
            http_port: self.http_port,
            grpc_port: self.grpc_port,
            metrics_port: self.metrics_port,
            engine: self.engine,
            threads: self.threads,
            devices: self.devices,
            load_threads: self.load_threads,
            scheduler_shards: self.scheduler_shards,
            scheduler: self.scheduler,
            drop: self.drop,
            slo: self.default_slo_ms,
            max_queue_size: self.max_queue_size,
            max_queue_wait: self.max_queue_wait,
            default_max_batch_size: self.default_max_batch_size,
            max_body_bytes: self.max_body_bytes,
            max_grpc_message_bytes: self.max_grpc_message_bytes,
            max_in_flight_bytes: self.max_in_flight_bytes,
            shared_memory: self.shared_memory,
            run_memory_bytes: self.run_memory_bytes,
            model_memory_bytes: self.model_memory_bytes,
            max_connections: self.max_connections,
            idle_timeout: self.idle_timeout,
            transfer_timeout: self.transfer_timeout,
            min_rate: self.min_rate,
            shutdown_grace: self.shutdown_grace,
            drain_timeout: self.drain_timeout,
            run_timeout: self.run_timeout,
            run_timeout_factor: self.run_timeout_factor,
            load_run_timeout: self.load_run_timeout,
            decision_log: self.decision_log.clone(),
            strict_readiness: self.strict_readiness,
            allow_empty: self.allow_empty,
            auto_complete_config: self.disable_auto_complete_config.then_some(false),
            exit_on_error: self.exit_on_error,
            exit_when_not_live: self.exit_when_not_live,
            model_control: ModelControlLayer {
                mode: self.model_control_mode,
                load: (!self.load_model.is_empty()).then(|| self.load_model.clone()),
                poll: self.poll,
            },
            profiling: ProfilingLayer {
                enabled: self.no_profiling.then_some(false),
                budget: self.profiling_budget,
                cache_dir: self.profile_cache.clone(),
            },
            cuda: CudaLayer {
                gpus: (!self.gpus.is_empty()).then(|| self.gpus.clone()),
                missing: self.cuda_missing,
                memory_limit_mb: self.cuda_memory_limit_mb,
                tf32: self.no_tf32.then_some(false),
                graphs: None,
                metrics_every: None,
                nhwc: None,
            },
            device: DeviceLayer::of_policy(self.device_policy),
            autoscale: AutoscaleLayer::default(),
            log: LogLayer { format: self.log_format, level: self.log_level.clone() },
            placement: Default::default(),
            models: Default::default(),
        };
        self.triton.apply(&mut layer);
        for ModelSlo { model, slo } in &self.slo {
            match model {
                None => layer.slo = Some(*slo),
                Some(model) => {
                    let model: &mut ModelLayer = layer.models.entry(model.clone()).or_default();
                    model.slo = Some(*slo);
                }
            }
        }
        layer
    }
}
