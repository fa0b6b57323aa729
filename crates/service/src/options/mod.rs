//! Options of `downbeat serve`: plain data, resolved from defaults, `downbeat.toml`, environment
//! and flags.
//!
//! This module reads neither files nor the environment: the binary does, and hands the result over.

pub mod cluster_options;
pub mod connection_options;
pub(crate) mod device_options;
pub mod model_names;
pub mod partition_options;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use downbeat_core::Duration;
use downbeat_core::device::overlap::GroupOrder;
use downbeat_repository::{Batching, ModelSource, named};

use crate::options::cluster_options::ClusterOptions;

pub use downbeat_core::cluster::AutoscaleOptions;
pub use downbeat_core::cluster::OrderPolicy;
pub use downbeat_core::device::WrittenSettings;
pub use downbeat_driver::MAX_SHARDS;
pub use downbeat_engine::ExecutorProgram;
pub use downbeat_engine_ort::{CudaOptions, Missing as CudaMissing};
pub use downbeat_preprocess::Step;
pub use downbeat_repository::config::policy::DispatchPolicy;
pub use downbeat_repository::config::policy::DropPolicy;
pub use downbeat_repository::config::policy::PolicyName;

/// The server's name, unless the options give another.
pub const SERVER_NAME: &str = "downbeat";

/// Most devices that can be asked for.
pub const MOST_DEVICES: usize = 256;

/// Most threads inside one run that can be asked for.
pub const MOST_THREADS: usize = 1024;

/// Most models that are loaded side by side.
pub const MOST_LOAD_THREADS: usize = 64;

/// A struct, and the defaults of its fields.
macro_rules! with_defaults {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$about:meta])* pub $field:ident: $type:ty = $default:expr,)+ }) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$about])* pub $field: $type,)+
        }

        #[cfg(test)]
        #[allow(dead_code, reason = "only some structs are walked")]
        impl $name {
            /// The names of the fields.
            pub const FIELDS: &'static [&'static str] = &[$(stringify!($field)),+];
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)+ }
            }
        }
    };
}

pub(crate) use with_defaults;

with_defaults! {
    /// All options of the server.
    #[derive(Clone, PartialEq, Debug)]
    pub struct ServerOptions {
        /// The sources of the models: model files, folders, and addresses. The models of all of
        /// them are served.
        pub repositories: Vec<ModelSource> = Vec::new(),
        /// How models of other machines are brought to this one.
        pub remote: RemoteOptions = RemoteOptions::default(),
        /// The server's name in its metadata. Triton's is `triton`; some clients insist on that.
        pub server_name: String = SERVER_NAME.to_owned(),
        /// Address that all three ports are bound on. Default: this machine alone, as no port asks
        /// who a client is.
        pub host: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST),
        /// Names of this server that requests over HTTP may have in `Host`, in lower case.
        pub allow_host: Vec<String> = Vec::new(),
        /// TLS on the ports of HTTP, gRPC and metrics.
        pub tls: TlsOptions = TlsOptions::default(),
        /// Who may do what at the ports.
        pub access: AccessOptions = AccessOptions::default(),
        /// Address of the HTTP port; `None`: `host`.
        pub http_address: Option<IpAddr> = None,
        /// Address of the gRPC port; `None`: `host`.
        pub grpc_address: Option<IpAddr> = None,
        /// Address of the metrics port; `None`: `host`.
        pub metrics_address: Option<IpAddr> = None,
        /// HTTP port; 0: chosen by the operating system; `None`: no HTTP.
        pub http_port: Option<u16> = Some(8000),
        /// gRPC port; 0: chosen by the operating system; `None`: no gRPC.
        pub grpc_port: Option<u16> = Some(8001),
        /// Port of `/metrics`; 0: chosen by the operating system; `None`: no metrics port.
        pub metrics_port: Option<u16> = Some(8002),
        /// Versions of models with histograms of their own in the metrics; those of all others share
        /// histograms.
        pub metrics_detailed_models: usize = 50,
        /// Port of probes alone, with a thread of its own; 0: chosen by the operating system;
        /// `None`: no such port.
        pub health_port: Option<u16> = None,
        /// Which engine runs ONNX models.
        pub engine: EngineChoice = EngineChoice::Auto,
        /// Threads inside one run of a model; 0: one, or the cores divided by `devices` if that was
        /// measured to be faster.
        pub threads: usize = 0,
        /// Executors, each runs one batch at a time; 0: one for each GPU in use; on the CPU as many
        /// as the models want (docs/guide/engines.md, Threads and executors).
        pub devices: usize = 0,
        /// Models that are loaded side by side, at most [`MOST_LOAD_THREADS`].
        pub load_threads: usize = 3,
        /// Which GPUs the server uses, and how. `engine` chooses the provider.
        pub cuda: CudaOptions = CudaOptions::default(),
        /// How often GPUs are measured for metrics; zero: not at all.
        pub gpu_metrics_every: Duration = Duration::from_millis(2_000),
        /// Parts of the scheduler that can work at the same time: each model's queue is in one. 0:
        /// one for each core.
        pub scheduler_shards: usize = 0,
        /// The share of a core's time that rehearses adaptive models. 0: no rehearsal; their
        /// behaviour follows from the load regime.
        pub rehearsal_cpu: f64 = 0.05,
        /// When a batch leaves.
        pub dispatch: DispatchPolicy = DispatchPolicy::Adaptive { consolidate: false },
        /// The drop policy: which requests of a queue that cannot make their deadline are given up.
        /// `None`: the one that suits the dispatch policy (see [`ServerOptions::drop_policy`]).
        pub drop: Option<DropPolicy> = None,
        /// The order in which waiting batches of all models get a free device.
        pub order: OrderPolicy = OrderPolicy::default(),
        /// SLO of models without an SLO of their own; `None`: no deadline unless the request has
        /// one.
        pub default_slo: Option<Duration> = None,
        /// The device policies and the models that they serve.
        pub device: DeviceOptions = DeviceOptions::default(),
        /// The devices of models that are not on all, by their numbers from 0. Wins over
        /// `instance_group`.
        pub placement: BTreeMap<String, Vec<usize>> = BTreeMap::new(),
        /// A plan of which models share devices. Wins over `placement`.
        pub plan: Option<PlacementPlan> = None,
        /// Settings of single models in `downbeat.toml` and the flags. They win over
        /// `config.pbtxt`.
        pub models: BTreeMap<String, ModelOptions> = BTreeMap::new(),
        /// Bound of a model's queue where its configuration has none; 0: unbounded.
        pub max_queue_size: u32 = 4096,
        /// How long a request without a deadline may wait. If ten of the model's largest batches
        /// take longer, it may wait as long as they take. Zero: no limit.
        pub max_queue_wait: Duration = Duration::from_millis(3_000),
        /// Largest batch of a model without a configuration whose dimensions allow batches.
        pub default_max_batch_size: u32 = 32,
        /// Largest request body over HTTP, bytes, as sent and once decompressed. Default: 64 MiB,
        /// as Triton.
        pub max_body_bytes: usize = 64 << 20,
        /// Largest message over gRPC, bytes, as sent and once decompressed. Default: 2 GiB less one
        /// byte, as Triton.
        pub max_grpc_message_bytes: usize = i32::MAX as usize,
        /// Bytes that all requests in flight may hold, from their first byte to their answer's
        /// last; `None`: a quarter of the memory this process may have.
        pub max_in_flight_bytes: Option<usize> = None,
        /// Threads that pictures and texts are made into tensors on; 0: one less than there are cores,
        /// at least one.
        pub preprocess_threads: usize = 0,
        /// The most pixels of a picture, millions: as it is, and at each step on.
        pub max_megapixels: u32 = 64,
        /// Whether clients may register regions of this machine's shared memory.
        pub shared_memory: bool = false,
        /// Bytes that runs of models on the CPU may take together, as estimated before each run.
        /// `None`: a quarter of the memory, at most half of the free memory at the start. 0: no
        /// limit.
        pub run_memory_bytes: Option<usize> = None,
        /// Whether models run in processes of their own, unless their own options decide.
        pub isolation: Isolation = Isolation::Auto,
        /// The program of executor processes; `None`: this program, and files have no trial in a
        /// process.
        pub executor: Option<ExecutorProgram> = None,
        /// How long the trial of a new model file in a process of its own may take; zero: there is
        /// none.
        pub trial_timeout: Duration = Duration::from_millis(300_000),
        /// The Python that runs Python models without an environment of their own.
        pub python: PathBuf = PathBuf::from("python3"),
        /// Bytes that each process of a Python model may write to; `None`: no limit.
        pub python_memory_bytes: Option<usize> = None,
        /// Whether code that comes in a load request may run.
        pub allow_uploaded_python: bool = false,
        /// Bytes of memory that models on the CPU may hold together. `None`: the memory that this
        /// process may have, less `max_in_flight_bytes`, but at least half of it. 0: no limit.
        pub model_memory_bytes: Option<usize> = None,
        /// Most connections of HTTP and gRPC together; 0: as many as the limit of open files leaves
        /// room for.
        pub max_connections: usize = 0,
        /// How long a connection may be without a request; zero: for ever.
        pub idle_timeout: Duration = Duration::from_millis(600_000),
        /// How long the head of a request may take, and the time in which `min_rate` is measured;
        /// zero: for ever.
        pub transfer_timeout: Duration = Duration::from_millis(30_000),
        /// Least rate of the body of a request that the server waits for, and of a client's reading
        /// of its answer, bytes per second.
        pub min_rate: u64 = 500,
        /// How long a server that got SIGTERM goes on accepting, while it reports that it is not
        /// ready. Clients and balancers need this time to stop sending. Part of `drain_timeout`.
        pub shutdown_grace: Duration = Duration::from_millis(5_000),
        /// How long stopping may take in all. Unfinished work is then broken off.
        pub drain_timeout: Duration = Duration::from_millis(30_000),
        /// How long runs may take.
        pub run_limits: RunLimits = RunLimits::default(),
        /// Which models are loaded, and when.
        pub model_control: ModelControl = ModelControl::None,
        /// The server is ready only once every wanted model is; otherwise as soon as the ports are
        /// open.
        pub strict_readiness: bool = true,
        /// Ready also while no model is served.
        pub allow_empty: bool = false,
        /// Whether symbolic links that lead out of a model repository are followed.
        pub follow_symlinks: bool = false,
        /// The configuration of models: `configs/NAME.pbtxt` in their folders, if that exists;
        /// `None`: `config.pbtxt`.
        pub model_config_name: Option<String> = None,
        /// Whether a model's configuration is completed from its file.
        pub auto_complete_config: bool = true,
        /// Stop at start if a model does not load, instead of serving the others.
        pub exit_on_error: bool = false,
        /// End the process when only a new one helps, instead of reporting that the server is not
        /// live.
        pub exit_when_not_live: bool = false,
        /// The server repeats one in this many requests of shared batches alone, unless the graph
        /// proves that the model keeps rows apart; 0: none.
        pub row_check_every: u32 = 1024,
        /// Measuring latency profiles.
        pub profiling: ProfilingOptions = ProfilingOptions::default(),
        /// When devices are advised to be added or given back; `None`: no advice.
        pub autoscale: Option<AutoscaleOptions> = Some(AutoscaleOptions::default()),
        /// Settings of a process that is part of a cluster.
        pub cluster: ClusterOptions = ClusterOptions::default(),
        /// Folder of the decision log: the scheduler's inputs and decisions, with the reasons.
        /// `None`: no log.
        pub decision_log: Option<PathBuf> = None,
        /// The most bytes of the decision log. Its oldest files are removed beyond it.
        pub decision_log_bytes: usize = 4 << 30,
        /// How long a file of the decision log is kept.
        pub decision_log_age: Duration = Duration::from_millis(7 * 86_400_000),
        /// The server's log.
        pub log: LogOptions = LogOptions::default(),
        /// Traces of requests, and the access log.
        pub traces: TraceOptions = TraceOptions::default(),
        /// Options that were given and have no effect. The log has a line for each at the start.
        pub notices: Vec<String> = Vec::new(),
    }
}

impl ServerOptions {
    /// The defaults, on a repository.
    pub fn new(repository: PathBuf) -> Self {
        ServerOptions { repositories: vec![repository.into()], ..Default::default() }
    }

    /// The folders of the repositories, for a message.
    pub fn shown_repositories(&self) -> String {
        self.repositories.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// The ports that are bound on every interface of the machine, by name.
    pub fn open_ports(&self) -> Vec<&'static str> {
        let ports = [
            ("HTTP", self.http_port, self.http_address),
            ("gRPC", self.grpc_port, self.grpc_address),
            ("metrics", self.metrics_port, self.metrics_address),
        ];
        let is_open = |address: Option<IpAddr>| address.unwrap_or(self.host).is_unspecified();
        let open = ports.into_iter().filter(|(_, port, address)| port.is_some() && is_open(*address));
        open.map(|(name, ..)| name).collect()
    }

    /// The engine that the user named for a model.
    pub fn engine_of(&self, model: &str) -> Option<ModelEngine> {
        self.models.get(model).and_then(|model| model.engine)
    }

    /// Whether a model runs in a process of its own.
    pub fn isolation(&self, model: &str) -> Isolation {
        self.models.get(model).and_then(|model| model.isolation).unwrap_or(self.isolation)
    }

    /// Whether requests of a model may share a batch.
    pub fn batching(&self, model: &str) -> BatchingChoice {
        self.models.get(model).and_then(|model| model.batching).unwrap_or(BatchingChoice::Check)
    }

    /// How many parts the scheduler is in, by [`ServerOptions::scheduler_shards`] or by the cores.
    pub fn scheduler_shards(&self) -> usize {
        match self.scheduler_shards {
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_SHARDS),
            shards => shards,
        }
    }

    /// The SLO of a model: from `downbeat.toml` or a flag, else from its configuration (`slo_ms`),
    /// else the default.
    pub fn slo(&self, model: &str, configured: Option<Duration>) -> Option<Duration> {
        self.models.get(model).and_then(|m| m.slo).or(configured).or(self.default_slo)
    }

    /// Threads inside one run of a model, if the user set them: for the model, or for all.
    pub fn chosen_threads(&self, model: &str) -> Option<usize> {
        let own = self.models.get(model).and_then(|m| m.threads).filter(|threads| *threads > 0);
        own.or((self.threads > 0).then_some(self.threads))
    }

    /// How long a model's requests without a deadline may wait, by the same order as
    /// [`ServerOptions::slo`]; `None`: as long as it takes.
    pub fn max_queue_wait(&self, model: &str) -> Option<Duration> {
        let wait = self.models.get(model).and_then(|m| m.max_queue_wait).unwrap_or(self.max_queue_wait);
        (wait > Duration::ZERO).then_some(wait)
    }

    /// How long a request of a model waits for company: the `configured` time. Beyond
    /// [`Batching::LONGEST_QUEUE_DELAY`] a batch waits until it is full; a request that stays alone
    /// leaves after [`ServerOptions::max_queue_wait`].
    pub fn queue_delay(&self, model: &str, configured: Duration) -> Duration {
        match configured > Batching::LONGEST_QUEUE_DELAY {
            false => configured,
            true => self.max_queue_wait(model).unwrap_or(Batching::LONGEST_QUEUE_DELAY),
        }
    }

    /// The dispatch policy of a model, by the same order as [`ServerOptions::slo`].
    pub fn dispatch_policy(&self, model: &str, configured: Option<DispatchPolicy>) -> DispatchPolicy {
        let own = self.models.get(model).and_then(|m| m.dispatch.clone());
        own.or(configured).unwrap_or_else(|| self.dispatch.clone())
    }

    /// The drop policy of a model that is dispatched by `dispatch`, by the same order as
    /// [`ServerOptions::slo`].
    ///
    /// Without a setting, it depends on the dispatch policy. The adaptive dispatch policies get the
    /// adaptive drop policy. On nearly every measured workload, this policy holds at least as much
    /// load as the best other drop policy. Under overload it serves as much
    /// (lab/docs/symphony.md).
    ///
    /// The other dispatch policies get window drop on one device: it gives up heads that stand in
    /// the way of a large batch. On one device it has the highest capacity under any dispatch, and
    /// goodput does not collapse under overload. Head drop would serve ever smaller batches of
    /// requests that are nearly late (docs/results/serving.md). On several devices, only dispatch
    /// that waits (deferred, latest) gets window drop. Eager dispatch sends small batches there
    /// anyway, and heads given up for a large one are lost for nothing: it gets head drop.
    pub fn drop_policy(&self, model: &str, configured: Option<DropPolicy>, dispatch: DispatchPolicy) -> DropPolicy {
        let waits = matches!(dispatch, DispatchPolicy::Deferred | DispatchPolicy::Latest);
        let suits = match dispatch.suitable_drop() {
            DropPolicy::WindowDrop if self.devices > 1 && !waits => DropPolicy::HeadDrop,
            suits => suits,
        };
        self.models.get(model).and_then(|m| m.drop).or(configured).or(self.drop).unwrap_or(suits)
    }
}

with_defaults! {
    /// The device policies and the models that they serve.
    #[derive(Clone, PartialEq, Debug)]
    pub struct DeviceOptions {
        /// The policy of models that are in no group and do not name one.
        pub policy: PolicyName = PolicyName::EXCLUSIVE,
        /// Models with a policy and settings of their own. No model is in two.
        pub groups: Vec<DeviceGroup> = Vec::new(),
        /// The file of the predictor of operator groups, for the policy overlap.
        pub predictor: Option<PathBuf> = None,
        /// The order of requests under the policy overlap.
        pub order: GroupOrder = GroupOrder::Headroom,
        /// The parts of each device, as its engine reads them: cores of the CPU, compute units of a
        /// GPU. Empty: devices are not divided.
        pub partitions: Vec<String> = Vec::new(),
        /// How partitions are chosen for models.
        pub shares: SharesBy = SharesBy::Fixed,
        /// How the batch sizes of these models are chosen, if their shares are automatic.
        pub share_batches: BatchesBy = BatchesBy::Policy,
        /// How often shares are adjusted, if they follow the models' needs (GSLICE figure 16: 2 s).
        pub share_period: Duration = Duration::from_millis(2_000),
        /// How long the share of a model stays as it is after it was changed (GSLICE §3.2.1: 10 s).
        pub share_hold_down: Duration = Duration::from_millis(10_000),
    }
}

/// Models with a device policy and settings of their own.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceGroup {
    /// The models' names; `*`: all models that no other group names.
    pub models: Vec<String>,
    /// The models' device policy; `None`: the policy of their configuration, or
    /// [`DeviceOptions::policy`].
    pub policy: Option<PolicyName>,
    /// The policy's settings. If `policy` is not given, each policy takes the settings that it
    /// knows.
    pub settings: WrittenSettings,
}

/// The files of TLS, in PEM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsOptions {
    /// The server's certificate, and the certificates between it and its root. `None`: no TLS.
    pub certificate: Option<PathBuf>,
    /// The private key of the certificate.
    pub key: Option<PathBuf>,
    /// The roots of the certificates that clients must have; `None`: clients need none.
    pub client_ca: Option<PathBuf>,
}

/// Who may do what at the ports. The default: everybody may do everything.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AccessOptions {
    /// The file of API keys; `None`: requests need no key.
    pub keys: Option<PathBuf>,
    /// The HTTP port that alone takes requests that change the server or its models; `None`: all
    /// ports take them.
    pub management_port: Option<u16>,
    /// The address of the management port; `None`: `host`.
    pub management_address: Option<IpAddr>,
    /// Most requests a second of one address; `None`: no limit.
    pub requests_per_address: Option<u32>,
    /// Most connections of one address; `None`: no limit.
    pub connections_per_address: Option<usize>,
    /// APIs over HTTP that need a header.
    pub restricted_http: Vec<RestrictedApis>,
    /// APIs over gRPC that need a header.
    pub restricted_grpc: Vec<RestrictedApis>,
}

/// A group of requests that Triton can restrict (`--http-restricted-api`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Api {
    /// Liveness and readiness, of models too.
    Health,
    /// Metadata of the server and of models.
    Metadata,
    /// Inferences.
    Inference,
    /// Registering shared memory.
    SharedMemory,
    /// Configurations.
    ModelConfig,
    /// The index, loading, unloading.
    ModelRepository,
    /// Statistics; here also schedulers, devices, timelines.
    Statistics,
    /// Trace settings.
    Trace,
    /// Log settings.
    Logging,
}

impl Api {
    /// All groups.
    const ALL: [Api; 9] = [
        Api::Health,
        Api::Metadata,
        Api::Inference,
        Api::SharedMemory,
        Api::ModelConfig,
        Api::ModelRepository,
        Api::Statistics,
        Api::Trace,
        Api::Logging,
    ];

    /// Triton's name of the group.
    pub fn name(self) -> &'static str {
        match self {
            Api::Health => "health",
            Api::Metadata => "metadata",
            Api::Inference => "inference",
            Api::SharedMemory => "shared-memory",
            Api::ModelConfig => "model-config",
            Api::ModelRepository => "model-repository",
            Api::Statistics => "statistics",
            Api::Trace => "trace",
            Api::Logging => "logging",
        }
    }
}

impl std::str::FromStr for Api {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Api::ALL
            .into_iter()
            .find(|api| api.name() == text)
            .ok_or_else(|| format!("'{text}' is no API; expected one of {}", Api::ALL.map(Api::name).join(", ")))
    }
}

/// Some of Triton's APIs, and the header that requests for them must have.
#[derive(Clone, PartialEq, Eq)]
pub struct RestrictedApis {
    /// The APIs.
    pub apis: Vec<Api>,
    /// The header's name.
    pub header: String,
    /// The header's value, a secret.
    pub value: String,
}

impl std::fmt::Debug for RestrictedApis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestrictedApis").field("apis", &self.apis).field("header", &self.header).finish_non_exhaustive()
    }
}

impl std::str::FromStr for RestrictedApis {
    type Err = String;

    /// Reads Triton's form: `inference,model-repository:admin-key=secret`.
    fn from_str(text: &str) -> Result<Self, String> {
        let form = || "expected API,API:HEADER=VALUE, such as model-repository:admin-key=secret".to_owned();
        let (apis, header) = text.split_once(':').ok_or_else(form)?;
        let (header, value) = header.split_once('=').ok_or_else(form)?;
        let apis = apis.split(',').map(|api| api.trim().parse()).collect::<Result<_, _>>()?;
        let header = header.trim().to_ascii_lowercase();
        if value.is_empty() || http::HeaderName::try_from(&header).is_err() {
            return Err(form());
        }
        Ok(RestrictedApis { apis, header, value: value.to_owned() })
    }
}

/// Options of one model outside its `config.pbtxt`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelOptions {
    /// The model's SLO.
    pub slo: Option<Duration>,
    /// The model's dispatch policy.
    pub dispatch: Option<DispatchPolicy>,
    /// The model's drop policy.
    pub drop: Option<DropPolicy>,
    /// Bound of its queue; 0: unbounded.
    pub max_queue_size: Option<u32>,
    /// How long its requests without a deadline may wait; zero: as long as it takes.
    pub max_queue_wait: Option<Duration>,
    /// Threads inside one run of it; 0: the option has no effect.
    pub threads: Option<usize>,
    /// Whether its requests may share a batch; `None`: as [`BatchingChoice::Check`].
    pub batching: Option<BatchingChoice>,
    /// The only engine that it may run on. `None`: the engine of all models, or another if that one
    /// cannot run it.
    pub engine: Option<ModelEngine>,
    /// Whether it runs in a process of its own; `None`: [`ServerOptions::isolation`].
    pub isolation: Option<Isolation>,
    /// Bytes that it may take of the memory of each GPU; `None`: the free memory, less a reserve.
    pub gpu_memory: Option<u64>,
    /// The steps that turn its users' pictures or texts into its inputs; `None`: it takes tensors
    /// alone.
    pub preprocess: Option<Vec<Step>>,
    /// The numbers of its partitions ([`DeviceOptions::partitions`]), at least one; several only if
    /// the scheduler makes its batches. `None`: the partition with the fewest models.
    pub partitions: Option<Vec<u32>>,
}

/// Which models share devices, as `downbeat plan --json` prints it.
#[derive(Clone, PartialEq, Debug, Default, serde::Deserialize)]
pub struct PlacementPlan {
    /// The sub-clusters. Each has devices of its own, and all of its models are on each of these
    /// devices.
    pub sub_clusters: Vec<PlannedSubCluster>,
}

/// A sub-cluster of a [`PlacementPlan`].
#[derive(Clone, PartialEq, Debug, Default, serde::Deserialize)]
pub struct PlannedSubCluster {
    /// The sub-cluster's number, from 0.
    pub index: usize,
    /// The sub-cluster's models.
    pub models: Vec<String>,
    /// How many devices it needs at least, not rounded.
    #[serde(default)]
    pub devices_needed: f64,
}

with_defaults! {
    /// How long a run may take before it is ended.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct RunLimits {
        /// In service: this many times the profile's latency.
        pub factor: u32 = 50,
        /// In service: at least this long; zero: no limit.
        pub least: Duration = Duration::from_millis(15_000),
        /// A run while the model is loaded, when there is no profile yet; zero: no limit.
        pub load: Duration = Duration::from_millis(120_000),
        /// The load of a model with all that it runs; zero: no limit.
        pub whole_load: Duration = Duration::from_millis(1_800_000),
    }
}

with_defaults! {
    /// Latency profiles: whether and for how long they are measured, and their store.
    #[derive(Clone, PartialEq, Debug)]
    pub struct ProfilingOptions {
        /// Measure a model at load if there is no stored profile.
        pub enabled: bool = true,
        /// Most time spent on measuring one model before it serves.
        pub budget: Duration = Duration::from_millis(20),
        /// Folder of stored profiles; `None`: `downbeat/profiles` in the user's cache folder.
        pub cache_dir: Option<PathBuf> = None,
    }
}

with_defaults! {
    /// How models of other machines are brought to this one.
    #[derive(Clone, PartialEq, Debug)]
    pub struct RemoteOptions {
        /// The folder of the models; `None`: `downbeat` in the user's cache folder.
        pub cache: Option<PathBuf> = None,
        /// Whether models come from the cache alone.
        pub offline: bool = false,
        /// A server that keeps silent for longer does not answer.
        pub timeout: Duration = Duration::from_millis(30_000),
    }
}

with_defaults! {
    /// Log lines.
    #[derive(Clone, PartialEq, Debug)]
    pub struct LogOptions {
        /// The form of log lines.
        pub format: LogFormat = LogFormat::Text,
        /// `error`, `warn`, `info`, `debug`, `trace`, or a filter in the syntax of
        /// `tracing_subscriber::EnvFilter`. A bare level is for lines of the server; of libraries
        /// that the filter does not name, only errors are written.
        pub level: String = "info".to_owned(),
    }
}

with_defaults! {
    /// Traces of requests, and the access log.
    #[derive(Clone, PartialEq, Debug)]
    pub struct TraceOptions {
        /// The file of traces in Triton's form; `None`: no file.
        pub file: Option<PathBuf> = None,
        /// The address of a collector that takes spans by OTLP over HTTP; `None`: no collector.
        pub otlp: Option<String> = None,
        /// Whether requests are traced at the start; `None`: if there is a file or a collector.
        pub level: Option<bool> = None,
        /// One request in this many is traced.
        pub rate: u32 = 1000,
        /// This many requests are traced; `None`: no limit.
        pub count: Option<u32> = None,
        /// Each file takes this many traces; 0: one file takes all.
        pub log_frequency: u32 = 0,
        /// The file of the access log, `-` for standard output; `None`: no access log.
        pub access_log: Option<PathBuf> = None,
        /// The access log has one request in this many.
        pub access_log_rate: u32 = 1,
    }
}

/// Which models are loaded, and when (Triton's model control modes).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModelControl {
    /// All models of the repository, at start; load and unload requests are refused.
    None,
    /// These at start (`*`: all), others when a client asks.
    Explicit {
        /// Model names.
        load: Vec<String>,
    },
    /// All models of the repository; the server follows changes on disk.
    Poll {
        /// How often the folder is looked at; zero: never.
        every: Duration,
    },
}

named! {
    /// The engine that runs ONNX models. Emulated models run on the emulated engine under any
    /// choice.
    EngineChoice as "engine" {
        /// ONNX Runtime on the GPUs if they are usable, else on the CPU if its library is found,
        /// else rten.
        Auto = "auto",
        /// ONNX Runtime on NVIDIA GPUs, with its CUDA provider.
        Cuda = "cuda",
        /// ONNX Runtime on NVIDIA GPUs, with its TensorRT provider.
        Tensorrt = "tensorrt",
        /// The embedded engine, rten.
        Rten = "rten",
        /// ONNX Runtime on the CPU; an error if its library is not found.
        OnnxRuntime = "onnxruntime",
        /// Only the emulated engine: ONNX models do not load.
        Emulated = "emulated",
    }
}

named! {
    /// The engine of one ONNX model, on the CPU.
    ModelEngine as "engine of a model" {
        /// The embedded engine, rten.
        Rten = "rten",
        /// ONNX Runtime.
        OnnxRuntime = "onnxruntime",
    }
}

named! {
    /// How partitions of a device are chosen for models.
    SharesBy as "division of devices" {
        /// The options fix the partitions.
        Fixed = "fixed",
        /// The measured needs of models choose them (GSLICE): models move while they serve.
        Auto = "auto",
    }
}

named! {
    /// How a model is kept apart from the server.
    Isolation as "isolation" {
        /// From nothing: it runs in the server's own process.
        None = "none",
        /// From the server and the other models: it runs in a process of its own.
        Process = "process",
        /// A process if the model came with a load request, may end its process, or may take any
        /// memory; else none.
        Auto = "auto",
    }
}

named! {
    /// Whether requests of a model may share a batch.
    BatchingChoice as "batching" {
        /// If the rows of a batch do not depend on each other, by the model's graph or a check.
        Check = "check",
        /// Always: the user knows that the rows are independent.
        Always = "always",
        /// Never: each request runs alone.
        Never = "never",
    }
}

named! {
    /// The control of batch sizes for models that share a device.
    BatchesBy as "control of batches" {
        /// The device policy, from its knowledge of the model.
        Policy = "policy",
        /// The time of past batches, in proportion to their distance from the SLO (GSLICE §3.3.1).
        Slab = "slab",
        /// The time of past batches: one more item after a batch in time, a tenth fewer after a
        /// late one (Clipper).
        Aimd = "aimd",
    }
}

named! {
    /// The form of log lines.
    LogFormat as "log format" {
        /// Text for people.
        Text = "text",
        /// A JSON object for each line.
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
    fn a_queue_delay_without_an_end_ends_when_requests_give_up() {
        let mut options = ServerOptions::new("models".into());
        let hour = Duration::from_millis(3_600_000);
        assert_eq!(options.queue_delay("a", hour), hour);
        assert_eq!(options.queue_delay("a", Duration::from_micros(u64::MAX)), options.max_queue_wait);
        options.max_queue_wait = Duration::ZERO;
        assert_eq!(options.queue_delay("a", Duration::MAX), hour, "somebody who waits for ever is answered, too");
    }

    #[test]
    fn the_drop_policy_suits_the_devices_unless_somebody_chose_one() {
        let mut options = ServerOptions::new("models".into());
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Eager), DropPolicy::WindowDrop);
        options.devices = 4;
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Eager), DropPolicy::HeadDrop);
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Deferred), DropPolicy::WindowDrop);
        options.drop = Some(DropPolicy::None);
        assert_eq!(options.drop_policy("a", None, DispatchPolicy::Deferred), DropPolicy::None);
        assert_eq!(
            options.drop_policy("a", Some(DropPolicy::HeadDrop), DispatchPolicy::Deferred),
            DropPolicy::HeadDrop
        );
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "egaer".parse::<DispatchPolicy>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown dispatch policy 'egaer'; expected one of: deferred, eager, latest, timeout, adaptive, consolidating, route"
        );
        for policy in DispatchPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy.clone()));
        }
    }
}
