//! The table of all options of `downbeat serve`. Each option has its key in `downbeat.toml`, its
//! flag, the form and place of its value, and its help. The command line, the reader of files,
//! `docs/reference/options.md` and `examples/downbeat.toml` are made from this table.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

use downbeat_core::Duration;
use downbeat_core::device::overlap::GroupOrder;
use downbeat_server::{check_level, etcd_server};
use downbeat_service::options::cluster_options::UcxUse;
use downbeat_service::options::{
    BatchesBy, BatchingChoice, CudaMissing, DispatchPolicy, DropPolicy, EngineChoice, Isolation, LogFormat, MAX_SHARDS,
    MOST_DEVICES, MOST_LOAD_THREADS, MOST_THREADS, ModelEngine, ModelOptions, OrderPolicy, PolicyName, RestrictedApis,
    SharesBy,
};

use crate::options::draft::{ControlMode, Draft};
use crate::options::forms::{
    address, bytes, bytes_or_zero, hours, list, mebibytes, micros, millis, name, number, parsed, path, port, seconds,
    seconds_from, seconds_or_zero, share, source, steps, sub_clusters, switch, traces,
};
use crate::options::key::{Arity, Key, bare, flag, key, of_model, optional, triton};
use crate::options::trace_config::{self, TraceSetting};
use crate::options::triton_flags::default_max_batch_size;
use crate::options::units;

/// The name of a configuration: the name of its file without folder and ending.
fn config_name(text: &str) -> Result<String, String> {
    let strange =
        text.is_empty() || text.starts_with('.') || text.contains(|c: char| c == '/' || c == '\\' || c.is_whitespace());
    match strange {
        true => Err(format!("'{text}' is not the name of a configuration; for configs/h100.pbtxt it is h100")),
        false => Ok(text.to_owned()),
    }
}

/// A program: a path, or a name on the path.
fn program(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("the name of the program is empty".to_owned()) } else { Ok(text.into()) }
}

/// The name of a host, in lower case, as in `Host`.
fn host_name(text: &str) -> Result<String, String> {
    let name = text.trim_end_matches('.').to_ascii_lowercase();
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    match !name.is_empty() && name.chars().all(is_name) {
        true => Ok(name),
        false => Err(format!(
            "'{text}' is not the name of a host; write it without scheme and port, such as models.example.com"
        )),
    }
}

/// A restriction as it is written, without its secret value.
fn shown(restricted: &RestrictedApis) -> String {
    let apis: Vec<&str> = restricted.apis.iter().map(|api| api.name()).collect();
    format!("{}:{}=...", apis.join(","), restricted.header)
}

/// A heading, and the options below it.
type Group = (&'static str, fn() -> Vec<Key<Draft>>);

/// The options of the server. Within one source, a later option wins over an earlier one.
pub static KEYS: LazyLock<Vec<Key<Draft>>> = LazyLock::new(|| {
    let groups: [Group; 11] = [
        ("", repositories),
        ("Ports", ports),
        ("Engine", engine),
        ("GPUs", gpus),
        ("Scheduling", scheduling),
        ("Models", models),
        ("Profiles", profiles),
        ("Connections", connections),
        ("Operation", operation),
        ("Autoscaling", autoscaling),
        ("Cluster", cluster),
    ];
    groups.into_iter().flat_map(|(heading, keys)| keys().into_iter().map(move |key| Key { heading, ..key })).collect()
});

fn repositories() -> Vec<Key<Draft>> {
    vec![
        key("repository", list(source("SOURCE")), |d| &mut d.options.repositories)
            .flag("model-repository", "Models: a file model.onnx, a folder with one model or several, a repository in Triton's layout, hf://ORGANISATION/NAME, s3://, gs://, az:// or https://; NAME=SOURCE names the only model there. The models of several are served together (see \"Sources\")")
            .unless("none", "\"models\"")
            .arity(Arity::Repeated),
        optional("remote.cache", path("DIR"), |d| &mut d.options.remote.cache, "downbeat in the user's cache folder", "\"/var/cache/downbeat\"")
            .flag("model-cache", "Folder that keeps models of other machines (see \"The cache\")"),
        key("remote.offline", switch(), |d| &mut d.options.remote.offline)
            .flag("offline", "Take models of other machines from the cache alone")
            .arity(Arity::Optional),
        key("remote.timeout_s", seconds_from(Duration::from_millis(100)), |d| &mut d.options.remote.timeout)
            .help("A server of models that keeps silent for longer does not answer"),
        key("follow_symlinks", switch(), |d| &mut d.options.follow_symlinks)
            .flag("follow-symlinks", "Follow symbolic links that lead out of the model repository, such as those into caches of downloads; off: they are errors (see \"Symbolic links\")")
            .arity(Arity::Optional),
    ]
}

fn ports() -> Vec<Key<Draft>> {
    vec![
        key("server_name", name("NAME"), |d| &mut d.options.server_name)
            .flag("server-name", "Name of the server in its metadata; some clients of Triton expect triton")
            .alias("id"),
        key("host", address(), |d| &mut d.options.host)
            .flag("host", "Address to listen on; 0.0.0.0: every interface of the machine (see \"Hosts and web pages\")"),
        key("allow_host", list(parsed("NAME", host_name, String::clone)), |d| &mut d.options.allow_host)
            .flag("allow-host", "A host name that requests over HTTP may have in Host, beside localhost and IP addresses; repeatable (see \"Hosts and web pages\")")
            .unless("any name, or none on a loopback address", "[\"models.example.com\"]"),
        optional("http_address", address(), |d| &mut d.options.http_address, "host", "\"127.0.0.1\"")
            .help("Address of the HTTP port, if it differs from host"),
        // Triton serves metrics at the address of HTTP.
        triton("http-address", address(), |d, address| {
            d.options.http_address = Some(address);
            d.options.metrics_address = Some(address);
        }),
        optional("grpc_address", address(), |d| &mut d.options.grpc_address, "host", "\"127.0.0.1\"")
            .help("Address of the gRPC port, if it differs from host"),
        triton("grpc-address", address(), |d, address| d.options.grpc_address = Some(address)),
        optional("metrics_address", address(), |d| &mut d.options.metrics_address, "host", "\"127.0.0.1\"")
            .help("Address of the metrics port, if it differs from host"),
        triton("metrics-address", address(), |d, address| d.options.metrics_address = Some(address)),
        key("http_port", port(), |d| &mut d.options.http_port).flag("http-port", "HTTP port, or off; 0: any free one"),
        triton("allow-http", switch(), |d, allow| d.options.http_port = d.options.http_port.filter(|_| allow)),
        key("grpc_port", port(), |d| &mut d.options.grpc_port).flag("grpc-port", "gRPC port, or off"),
        triton("allow-grpc", switch(), |d, allow| d.options.grpc_port = d.options.grpc_port.filter(|_| allow)),
        key("metrics_port", port(), |d| &mut d.options.metrics_port).flag("metrics-port", "Port of /metrics, or off"),
        key("metrics_detailed_models", number(0..=u64::MAX), |d| &mut d.options.metrics_detailed_models)
            .help("Versions of models with histograms of their own in the metrics; those of all others share the histograms of the model _others"),
        key("health_port", port(), |d| &mut d.options.health_port)
            .flag("health-port", "Port of liveness and readiness probes alone, with a thread of its own, or off"),
        triton("allow-metrics", switch(), |d, allow| d.options.metrics_port = d.options.metrics_port.filter(|_| allow)),
        optional("tls.certificate", path("FILE"), |d| &mut d.options.tls.certificate, "no TLS", "\"server.pem\"")
            .flag("tls-certificate", "Speak TLS on the ports of HTTP, gRPC and metrics with this certificate, in PEM (see \"TLS\")"),
        optional("tls.key", path("FILE"), |d| &mut d.options.tls.key, "no TLS", "\"server.key\"")
            .flag("tls-key", "Private key of the certificate, in PEM"),
        optional("tls.client_ca", path("FILE"), |d| &mut d.options.tls.client_ca, "clients need no certificate", "\"clients.pem\"")
            .flag("tls-client-ca", "Take only clients with a certificate of these roots, in PEM"),
        optional("access.keys", path("FILE"), |d| &mut d.options.access.keys, "requests need no key", "\"keys.toml\"")
            .flag("api-keys", "Answer only requests with an API key of this file; downbeat key add makes keys (see \"Keys\")"),
        optional("access.management_port", number(0..=u16::MAX.into()), |d| &mut d.options.access.management_port, "all ports manage", "8003")
            .flag("management-port", "HTTP port that alone takes requests that change the server or its models (see \"The management port\")"),
        optional("access.management_address", address(), |d| &mut d.options.access.management_address, "host", "\"127.0.0.1\"")
            .help("Address of the management port, if it differs from host"),
        optional("access.requests_per_address", number(1..=u64::MAX), |d| &mut d.options.access.requests_per_address, "no limit", "100")
            .flag("requests-per-address", "Most requests a second of one address"),
        optional("access.connections_per_address", number(1..=u64::MAX), |d| &mut d.options.access.connections_per_address, "no limit", "64")
            .flag("connections-per-address", "Most connections of one address"),
        // Commas divide the APIs of one value.
        triton("http-restricted-api", list(parsed("API:KEY=VALUE", str::parse, shown)), |d, apis: Vec<RestrictedApis>| d.options.access.restricted_http.extend(apis))
            .arity(Arity::Repeated),
        // Commas divide the APIs of one value.
        triton("grpc-restricted-protocol", list(parsed("API:KEY=VALUE", str::parse, shown)), |d, apis: Vec<RestrictedApis>| d.options.access.restricted_grpc.extend(apis))
            .arity(Arity::Repeated),
        key("max_body_bytes", bytes(), |d| &mut d.options.max_body_bytes)
            .flag("max-body-bytes", "Largest request body over HTTP, such as 64M")
            .alias("http-max-input-size"),
        key("max_grpc_message_bytes", bytes(), |d| &mut d.options.max_grpc_message_bytes)
            .flag("max-grpc-message-bytes", "Largest message over gRPC, such as 64M"),
        optional(
            "max_in_flight_bytes",
            bytes(),
            |d| &mut d.options.max_in_flight_bytes,
            "a quarter of the memory",
            "\"4G\"",
        )
        .flag(
            "max-in-flight-bytes",
            "Most bytes that all requests in flight hold together, with their answers (see \"Memory of requests\")",
        ),
        key("preprocess.threads", number(0..=MOST_THREADS as u64), |d| &mut d.options.preprocess_threads)
            .help("Threads that turn pictures and texts into tensors; 0: one fewer than there are cores (see \"Preprocessing\")"),
        key("preprocess.max_megapixels", number(1..=4096), |d| &mut d.options.max_megapixels)
            .help("Most pixels of a picture, in millions, by its header; a larger picture is refused before it takes memory"),
        key("shared_memory", switch(), |d| &mut d.options.shared_memory)
            .flag(
                "shared-memory",
                "Let clients register regions of this machine's shared memory (see \"Shared memory\")",
            )
            .alias("allow-client-shm")
            .arity(Arity::Optional),
    ]
}

fn engine() -> Vec<Key<Draft>> {
    vec![
        key("engine", name("ENGINE").of(EngineChoice::names()), |d| &mut d.options.engine)
            .flag("engine", "Engine for ONNX models: auto, cuda, tensorrt, onnxruntime, rten or emulated; on the CPU a model that this engine cannot run goes to another (see \"Engines\")"),
        key("threads", number(0..=MOST_THREADS as u64), |d| &mut d.options.threads)
            .flag("threads", "Threads inside one run of a model; 0: one or all cores (divided by --devices), as measured at load (see \"Threads and executors\")"),
        key("devices", number(0..=MOST_DEVICES as u64), |d| &mut d.options.devices)
            .flag("devices", "Devices on the CPU, each of which runs one batch at a time; 0: one for each GPU, or the CPU as one device with as many executors as the models need, at least two for two models"),
        key("isolation", name("ISOLATION").of(Isolation::names()), |d| &mut d.options.isolation)
            .flag("isolation", "Isolation of models on the CPU: none, process (each model in a process of its own, whose end costs only this model), or auto (only models that may end the process; see \"Isolation\")")
            .of_models(),
        key("python", parsed("PROGRAM", program, |program: &PathBuf| program.display().to_string()), |d| &mut d.options.python)
            .flag("python", "The Python that runs Python models: a name on the path, or the bin/python of a venv; it needs numpy (see \"Python models\")"),
        optional("python_memory_bytes", bytes_or_zero(), |d| &mut d.options.python_memory_bytes, "no limit", "\"4G\"")
            .flag("python-memory-bytes", "Most memory that each process of a Python model may allocate; 0: no limit (see \"Python models\")"),
        key("allow_uploaded_python", switch(), |d| &mut d.options.allow_uploaded_python)
            .flag("allow-uploaded-python", "Run a model.py that comes in a load request; off: such requests are refused, because the sender could run any code here (see \"Python models\")")
            .arity(Arity::Optional),
        optional("run_memory_bytes", bytes_or_zero(), |d| &mut d.options.run_memory_bytes, "a quarter of the memory", "\"4G\"")
            .flag("run-memory-bytes", "Most memory that runs of models on the CPU may take together, estimated before each run; 0: no limit (see \"Memory of runs\")"),
        optional("model_memory_bytes", bytes_or_zero(), |d| &mut d.options.model_memory_bytes, "the memory, less --max-in-flight-bytes", "\"8G\"")
            .flag("model-memory-bytes", "Most memory that models on the CPU may hold together; 0: no limit (see \"Memory of models\")"),
    ]
}

fn gpus() -> Vec<Key<Draft>> {
    vec![
        key("cuda.gpus", list(number(0..=u32::MAX.into())), |d| &mut d.options.cuda.devices)
            .flag("gpus", "GPUs to use, by their numbers, such as 0,1")
            .unless("all", ""),
        key("cuda.missing", name("WHAT").of(CudaMissing::NAMES), |d| &mut d.options.cuda.missing)
            .flag("cuda-missing", "If the engine is cuda or tensorrt and no GPU is usable: exit, or serve on the cpu"),
        optional("cuda.memory_limit_mb", mebibytes(), |d| &mut d.options.cuda.memory_limit, "no limit", "8192")
            .flag("cuda-memory-limit-mb", "Most GPU memory that one session may take for tensors, MiB"),
        key("cuda.tf32", switch(), |d| &mut d.options.cuda.tf32)
            .help("Round FP32 products to TF32, as onnxruntime and PyTorch's convolutions do"),
        bare("no-tf32", "Do not round FP32 products to TF32", |d| d.options.cuda.tf32 = false),
        key("cuda.graphs", switch(), |d| &mut d.options.cuda.graphs)
            .help("Record launches as CUDA graphs where graphs are faster"),
        key("cuda.metrics_every_s", seconds(), |d| &mut d.options.gpu_metrics_every)
            .help("Time between measurements of the GPUs for the metrics nv_gpu_*; 0: no measurements"),
        triton("metrics-interval-ms", millis(), |d, every| d.options.gpu_metrics_every = every),
        triton("allow-gpu-metrics", switch(), |d, allow| {
            d.options.gpu_metrics_every = if allow { d.options.gpu_metrics_every } else { Duration::ZERO };
        }),
        key("cuda.nhwc", switch(), |d| &mut d.options.cuda.nhwc)
            .help("Run convolutions with channels last, for which cuDNN may have faster kernels"),
    ]
}

fn scheduling() -> Vec<Key<Draft>> {
    vec![
        key("scheduler", name("POLICY").of(DispatchPolicy::names()), |d| &mut d.options.dispatch)
            .flag("scheduler", "When a batch leaves: adaptive, consolidating, eager, deferred, timeout or latest; route: the device policy decides")
            .of_models(),
        optional("drop", name("POLICY").of(DropPolicy::names()), |d| &mut d.options.drop, "adaptive, or the default of another scheduler", "\"window\"")
            .flag("drop", "Policy that chooses the dropped requests when not all can make their deadlines: adaptive, window, head or none")
            .of_models(),
        key("order", name("ORDER").of(OrderPolicy::names()), |d| &mut d.options.order)
            .flag("order", "Order in which waiting batches get a device: shortest (first, where all can make their deadlines; otherwise the most urgent), urgency, fair (shares of the device time), or rehearsed (trials choose the order)"),
        Key { is_hidden: true, ..optional("default_slo_ms", millis(), |d| &mut d.options.default_slo, "", "") },
        optional("slo_ms", millis(), |d| &mut d.options.default_slo, "requests have no deadline", "100")
            .flag("default-slo-ms", "SLO in milliseconds, from arrival to answer, of all models without an SLO of their own")
            .of_models(),
        flag("slo-ms", list(parsed("[MODEL=]MS", model_slo, |_| String::new())), set_slos)
            .help("SLO in milliseconds of one model (without MODEL=: as --default-slo-ms); repeatable"),
        key("max_queue_size", number(0..=u32::MAX.into()), |d| &mut d.options.max_queue_size)
            .flag("max-queue-size", "Most requests that wait for a model whose configuration has no bound; 0: unbounded")
            .of_models(),
        key("max_queue_wait_s", seconds(), |d| &mut d.options.max_queue_wait)
            .flag("max-queue-wait", "Longest wait of a request without a deadline, or the time of ten full batches of its model if that is longer; 0: no bound (see \"Without an SLO\")"),
        triton("backend-config", list(name("SETTING")), |d, settings: Vec<String>| {
            let given = settings.iter().filter_map(|setting| default_max_batch_size(setting)).next_back();
            d.options.default_max_batch_size = given.unwrap_or(d.options.default_max_batch_size);
        })
        .arity(Arity::Repeated),
        key("default_max_batch_size", number(0..=u32::MAX.into()), |d| &mut d.options.default_max_batch_size)
            .flag("default-max-batch-size", "Largest batch of models that can be batched and have no max_batch_size; 0: no batches")
            .of_models(),
        key("row_check_every", number(0..=u32::MAX.into()), |d| &mut d.options.row_check_every)
            .help("One in this many requests of shared batches runs once more alone, if a check and not the graph showed that the model's rows are independent; 0: none"),
        key("scheduler_shards", number(0..=MAX_SHARDS as u64), |d| &mut d.options.scheduler_shards)
            .flag("scheduler-shards", "Parts of the scheduler that may work at the same time, each with some of the models; 0: one for each core"),
        key("rehearsal_cpu", share(), |d| &mut d.options.rehearsal_cpu)
            .flag("rehearsal-cpu", "Share of a core's time, at idle priority, for trials of adaptive schedulers on the last seconds, for trials of the weights of pipelines, and for training the predictor of operator groups; 0: no trials, a rule decides"),
        key("device.policy", name("POLICY").of(device_policies().map(PolicyName::name)), |d| &mut d.options.device.policy)
            .flag("device-policy", device_policy_help())
            .of_models(),
        optional("device.predictor", path("FILE"), |d| &mut d.options.device.predictor, "requests run one at a time", "\"predictor.json\"")
            .help("Predictor of operator groups for the device policy overlap: a file that downbeat profile --co-run writes (see \"The policy overlap\")"),
        key("device.order", name("ORDER").of(GroupOrder::ALL.map(GroupOrder::name)), |d| &mut d.options.device.order)
            .help("Order of requests under the device policy overlap: headroom (the least time left first, with operators of others beside it). For comparison, one request at a time: fcfs, sjf (the shortest first), edf"),
        key("device.partitions", list(name("PARTITION")), |d| &mut d.options.device.partitions)
            .help("Parts of a device: sets of cores, or on GPUs compute units (\"40\") or shares of them (\"25%\"), shares also with engine = \"emulated\"; a model runs on one part, or on the parts that its section names (see \"Partitions\")")
            .unless("one part", "[\"0-3\", \"4-7\"]")
            .of_models(),
        key("device.shares", name("WHO").of(SharesBy::names()), |d| &mut d.options.device.shares)
            .help("How models get their partitions: fixed (by the options), auto (by their measured need: models move while they serve; see \"Shares\")"),
        key("device.share_batches", name("WHO").of(BatchesBy::names()), |d| &mut d.options.device.share_batches)
            .help("How the size of batches is set where shares are auto: policy (by the device policy), slab (by the times of earlier batches and the SLO), aimd (one item more after each batch in time); see \"Shares\""),
        key("device.share_period_s", seconds_from(Duration::from_millis(100)), |d| &mut d.options.device.share_period)
            .help("Time between two decisions about shares, where shares are auto"),
        key("device.share_hold_down_s", seconds(), |d| &mut d.options.device.share_hold_down)
            .help("Time for which a share stays unchanged after a change, where shares are auto"),
    ]
}

fn device_policies() -> impl Iterator<Item = PolicyName> {
    PolicyName::all().chain([PolicyName::AUTO])
}

fn device_policy_help() -> String {
    let policies =
        device_policies().map(|policy| format!("{policy} ({})", policy.about())).collect::<Vec<_>>().join(", ");
    format!("What makes batches on a device: {policies}")
}

/// `--slo-ms`: an SLO of one model, or of all models without their own.
#[derive(Clone, Debug)]
struct ModelSlo {
    model: Option<String>,
    slo: Duration,
}

fn model_slo(text: &str) -> Result<ModelSlo, String> {
    match text.rsplit_once('=') {
        Some(("", _)) => Err("the name of the model is missing before '='".to_owned()),
        Some((model, slo)) => Ok(ModelSlo { model: Some(model.to_owned()), slo: units::positive_millis(slo)? }),
        None => Ok(ModelSlo { model: None, slo: units::positive_millis(text)? }),
    }
}

fn set_slos(draft: &mut Draft, slos: Vec<ModelSlo>) {
    for ModelSlo { model, slo } in slos {
        match model {
            None => draft.options.default_slo = Some(slo),
            Some(model) => draft.options.models.entry(model).or_default().slo = Some(slo),
        }
    }
}

fn models() -> Vec<Key<Draft>> {
    vec![
        key("load_threads", number(1..=MOST_LOAD_THREADS as u64), |d| &mut d.options.load_threads)
            .flag(
                "load-threads",
                "Number of models that are loaded side by side (Triton's --model-load-thread-count; see \"Loading\")",
            )
            .alias("model-load-thread-count"),
        optional("model_control.load", list(name("MODEL")), |d| &mut d.load, "none", "[\"digits\"]")
            .flag("load-model", "A model to load at start, * for all; repeatable. Needs mode explicit"),
        key("model_control.mode", name("MODE").of(ControlMode::names()), |d| &mut d.mode).flag(
            "model-control-mode",
            "Which models are loaded: none (all at start), explicit (on request) or poll (all, following the disk)",
        ),
        key("model_control.poll_s", seconds_or_zero(Duration::from_millis(100)), |d| &mut d.poll)
            .flag("repository-poll-secs", "Time between two looks at the disk in mode poll; 0: only at the start"),
        optional(
            "model_config_name",
            parsed("NAME", config_name, String::clone),
            |d| &mut d.options.model_config_name,
            "config.pbtxt",
            "\"h100\"",
        )
        .flag(
            "model-config-name",
            "Use configs/NAME.pbtxt in a model's folder as its configuration, if that file exists",
        ),
        triton("strict-model-config", switch(), |d, strict| d.options.auto_complete_config = !strict),
        key("auto_complete_config", switch(), |d| &mut d.options.auto_complete_config)
            .help("Complete configurations from the model files"),
        bare("disable-auto-complete-config", "Do not complete configurations from the model files", |d| {
            d.options.auto_complete_config = false;
        }),
        key("exit_on_error", switch(), |d| &mut d.options.exit_on_error)
            .flag("exit-on-error", "End the server if a model does not load at start, instead of serving the others"),
        key("strict_readiness", switch(), |d| &mut d.options.strict_readiness)
            .flag("strict-readiness", "Be ready only once all models are ready (see \"Readiness\")"),
        key("allow_empty", switch(), |d| &mut d.options.allow_empty)
            .flag("allow-empty", "Be ready also while no model is served")
            .arity(Arity::Optional),
    ]
}

fn profiles() -> Vec<Key<Draft>> {
    vec![
        key("profiling.enabled", switch(), |d| &mut d.options.profiling.enabled)
            .help("Measure latency profiles when a model is loaded"),
        bare("no-profiling", "Do not measure latency profiles at load", |d| d.options.profiling.enabled = false),
        key("profiling.budget_s", seconds(), |d| &mut d.options.profiling.budget)
            .flag("profiling-budget", "Most time for measuring one model before it serves; the rest is measured behind the service (see \"Loading\")"),
        optional(
            "profiling.cache_dir",
            path("FOLDER"),
            |d| &mut d.options.profiling.cache_dir,
            "downbeat/profiles in the user's cache folder",
            "\"profiles\"",
        )
        .flag("profile-cache", "Folder of stored profiles"),
    ]
}

fn connections() -> Vec<Key<Draft>> {
    vec![
        key("max_connections", number(0..=u64::MAX), |d| &mut d.options.max_connections)
            .flag("max-connections", "Most connections of HTTP and gRPC; 0: as many as the limit of open files allows, at most 32768 (see \"Connections\")"),
        key("idle_timeout_s", seconds(), |d| &mut d.options.idle_timeout)
            .flag("idle-timeout", "Longest time that a connection may be without a request; 0: for ever"),
        key("transfer_timeout_s", seconds(), |d| &mut d.options.transfer_timeout)
            .flag("transfer-timeout", "Longest time for the head of a request, and the time over which --min-rate is measured; 0: for ever"),
        key("min_rate", bytes(), |d| &mut d.options.min_rate)
            .flag("min-rate", "Least rate at which bodies arrive and answers are read, bytes per second"),
    ]
}

fn operation() -> Vec<Key<Draft>> {
    vec![
        key("shutdown_grace_s", seconds(), |d| &mut d.options.shutdown_grace)
            .flag("shutdown-grace", "Time after SIGTERM in which the server is not ready and still accepts requests, until clients have gone elsewhere; part of --drain-timeout (see \"Stopping\")"),
        key("drain_timeout_s", seconds(), |d| &mut d.options.drain_timeout)
            .flag("drain-timeout", "Longest time from SIGTERM to the end of the server")
            .alias("exit-timeout-secs"),
        key("run_timeout_s", seconds(), |d| &mut d.options.run_limits.least)
            .flag("run-timeout", "The server ends a run that takes longer than this and longer than --run-timeout-factor times its profile; 0: never (see \"Runs that do not end\")"),
        key("run_timeout_factor", number(1..=u32::MAX.into()), |d| &mut d.options.run_limits.factor)
            .flag("run-timeout-factor", "A run may take this many times its profile before the server ends it"),
        key("load_run_timeout_s", seconds(), |d| &mut d.options.run_limits.load)
            .flag("load-run-timeout", "Longest run while a model is loaded, after which the load fails; 0: no limit"),
        key("trial_timeout_s", seconds(), |d| &mut d.options.trial_timeout)
            .flag("trial-timeout", "Longest trial of a new model file in a process of its own; 0: no such trial (see \"The trial at load\")"),
        key("load_timeout_s", seconds(), |d| &mut d.options.run_limits.whole_load)
            .flag("load-timeout", "Longest load of a model, with its warm-up, after which the load fails; 0: no limit (see \"Loading\")"),
        key("exit_when_not_live", switch(), |d| &mut d.options.exit_when_not_live)
            .flag("exit-when-not-live", "End the server if only a new process helps, for example after the last GPU is lost, instead of reporting at /v2/health/live that the server is not live (see \"Liveness\")")
            .arity(Arity::Optional),
        optional("decision_log", path("FOLDER"), |d| &mut d.options.decision_log, "nothing is written", "\"decisions\"")
            .flag("decision-log", "Folder for the decision log: the inputs and decisions of the scheduler and of the devices, with the reasons; ask it with downbeat log why ID, and read it with downbeat log show FOLDER (see \"Decision log\")"),
        key("decision_log_bytes", bytes(), |d| &mut d.options.decision_log_bytes)
            .flag("decision-log-bytes", "Most bytes of the decision log; the server removes the oldest files beyond it"),
        key("decision_log_age_h", hours(), |d| &mut d.options.decision_log_age)
            .flag("decision-log-age", "How long the decision log keeps a file; the server removes older ones"),
        key("log.format", parsed("FORMAT", log_format, LogFormat::to_string).of(LogFormat::names()), |d| &mut d.options.log.format)
            .flag("log-format", "Form of log lines: text or json"),
        triton("log-info", switch(), |d, info| level(d, !info, "warn")),
        triton("log-warning", switch(), |d, warning| level(d, !warning && d.options.log.level == "warn", "error")),
        triton("log-error", switch(), |d, error| level(d, !error && d.options.log.level == "error", "off")),
        triton("log-verbose", number(0..=u32::MAX.into()), |d, verbose: u32| level(d, verbose > 0, "debug")),
        key("log.level", parsed("LEVEL", check_level, String::clone), |d| &mut d.options.log.level)
            .flag("log-level", "error, warn, info, debug, trace, or a filter such as info,downbeat_models=debug"),
        optional("trace.file", path("FILE"), |d| &mut d.options.traces.file, "no file", "\"trace.json\"")
            .flag("trace-file", "File for the traces of requests in Triton's form, which Triton's trace_summary.py reads (see \"Trace requests\")"),
        optional("trace.otlp_endpoint", parsed("URL", |text| Ok(text.to_owned()), String::clone), |d| &mut d.options.traces.otlp, "no collector", "\"http://localhost:4318\"")
            .flag("otlp-endpoint", "Collector of OpenTelemetry that gets the spans of traced requests, by OTLP over HTTP (see \"Trace requests\")"),
        optional("trace.level", parsed("LEVEL", trace_config::level, trace_config::level_text), |d| &mut d.options.traces.level, "TIMESTAMPS with a file or a collector, else OFF", "\"TIMESTAMPS\"")
            .flag("trace-level", "OFF: requests are traced only once a client asks for it (POST /v2/trace/setting); TIMESTAMPS: from the start"),
        key("trace.rate", number(1..=i32::MAX as u64), |d| &mut d.options.traces.rate)
            .flag("trace-rate", "One request in this many is traced"),
        key("trace.count", traces(), |d| &mut d.options.traces.count)
            .flag("trace-count", "This many requests are traced; -1: no limit"),
        key("trace.log_frequency", number(0..=i32::MAX as u64), |d| &mut d.options.traces.log_frequency)
            .flag("trace-log-frequency", "Each file FILE.0, FILE.1, ... takes this many traces; 0: FILE takes all"),
        triton("trace-config", list(parsed("SETTING", TraceSetting::parse, TraceSetting::text)), |d, settings: Vec<TraceSetting>| {
            let options = &mut d.options;
            options.notices.extend(settings.into_iter().filter_map(|setting| setting.set(&mut options.traces)));
        })
        .arity(Arity::Repeated),
        optional("access_log.file", path("FILE"), |d| &mut d.options.traces.access_log, "no access log", "\"access.jsonl\"")
            .flag("access-log", "File for the access log: a line of JSON for each inference request; -: standard output (see \"The access log\")"),
        key("access_log.rate", number(1..=i32::MAX as u64), |d| &mut d.options.traces.access_log_rate)
            .flag("access-log-rate", "The access log has one request in this many"),
    ]
}

/// The form of log lines, by our names or by Triton's, whose two forms are both for people.
fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "default" | "ISO8601" => Ok(LogFormat::Text),
        _ => text.parse().map_err(|error| format!("{error}")),
    }
}

fn level(draft: &mut Draft, is_asked_for: bool, level: &str) {
    if is_asked_for {
        level.clone_into(&mut draft.options.log.level);
    }
}

fn autoscaling() -> Vec<Key<Draft>> {
    vec![
        key("autoscale.enabled", switch(), |d| &mut d.autoscale_enabled)
            .help("Advise a number of devices: GET /v2/autoscale, metrics downbeat_autoscale_*"),
        key("autoscale.bad_threshold", share(), |d| &mut d.autoscale.bad_threshold)
            .help("Share of rejected, dropped and late requests above which the server advises more devices"),
        key("autoscale.idle_threshold", share(), |d| &mut d.autoscale.idle_threshold)
            .help("Share of idle device time above which the server advises fewer devices"),
        key("autoscale.spare", share(), |d| &mut d.autoscale.spare)
            .help("Share of device time that stays idle after fewer devices were advised; at most idle_threshold"),
        key("autoscale.grow_window_s", seconds(), |d| &mut d.autoscale.grow_window)
            .help("Time over which the share of bad requests is measured"),
        key("autoscale.shrink_window_s", seconds(), |d| &mut d.autoscale.shrink_window)
            .help("Time over which the share of idle time is measured"),
        key("autoscale.min_requests", number(0..=u64::MAX), |d| &mut d.autoscale.min_requests)
            .help("Fewer requests than this in grow_window_s change no advice"),
        key("autoscale.min_devices", number(1..=u32::MAX.into()), |d| &mut d.autoscale.min_devices)
            .help("Smallest advised number of devices"),
        key("autoscale.max_devices", number(1..=u32::MAX.into()), |d| &mut d.autoscale.max_devices)
            .help("Largest advised number of devices")
            .unless("no bound", "8"),
    ]
}

fn cluster() -> Vec<Key<Draft>> {
    vec![
        key("cluster.schedulers", list(parsed("HOST:PORT", host_and_port, String::clone)), |d| &mut d.options.cluster.schedulers)
            .flag("schedulers", "The schedulers of the cluster, in the order in which they lead; the same list for every process")
            .unless("the schedulers in --etcd; without --etcd a scheduler is the only one", "[\"a:8003\", \"b:8003\"]"),
        optional("cluster.rank", number(0..=63), |d| &mut d.options.cluster.rank,
            "0; without --schedulers the lowest that no other scheduler has in --etcd", "1")
            .flag("rank", "The scheduler's own place in the list of schedulers, from 0"),
        key("cluster.etcd", list(parsed("URL", etcd_server, String::clone)), |d| &mut d.options.cluster.etcd)
            .flag("etcd", "The servers of an etcd that allots epochs to schedulers, so that no two lead in one epoch, and that has their addresses")
            .unless("each scheduler that takes the lead takes the next epoch", "[\"http://etcd-1:2379\"]"),
        optional("cluster.etcd_ca", path("FILE"), |d| &mut d.options.cluster.etcd_ca, "the authorities of this machine", "\"etcd-ca.pem\"")
            .flag("etcd-ca", "Certificates of authorities, PEM, for etcd over https://; they replace those of this machine"),
        optional("cluster.etcd_certificate", path("FILE"), |d| &mut d.options.cluster.etcd_certificate, "no certificate", "\"etcd-client.pem\"")
            .flag("etcd-certificate", "Certificate of this process for an etcd that asks for one, PEM; needs --etcd-key"),
        optional("cluster.etcd_key", path("FILE"), |d| &mut d.options.cluster.etcd_key, "no certificate", "\"etcd-client.key\"")
            .flag("etcd-key", "Key of --etcd-certificate, PEM"),
        optional("cluster.etcd_user", parsed("NAME", |text| Ok(text.to_owned()), String::clone), |d| &mut d.options.cluster.etcd_user, "no login", "\"downbeat\"")
            .flag("etcd-user", "User as whom the process logs in at etcd; needs --etcd-password"),
        optional("cluster.etcd_password", path("FILE"), |d| &mut d.options.cluster.etcd_password, "no login", "\"etcd.password\"")
            .flag("etcd-password", "File with the password of --etcd-user"),
        key("cluster.etcd_prefix", parsed("TEXT", |text| Ok(text.to_owned()), String::clone), |d| &mut d.options.cluster.etcd_prefix)
            .flag("etcd-prefix", "Beginning of this cluster's keys in etcd"),
        optional("cluster.secret", path("FILE"), |d| &mut d.options.cluster.secret,
            "the processes prove nothing, and listen for each other on loopback addresses only", "\"cluster.secret\"")
            .flag("cluster-secret", "File of secrets, one a line, that the processes of the cluster prove to each other: each proves the first and accepts all. `downbeat key secret FILE` makes it. The file is read again when it changes"),
        key("cluster.insecure", switch(), |d| &mut d.options.cluster.is_insecure)
            .flag("insecure-cluster", "Listen for the rest of the cluster on any address without --cluster-secret. All who reach the port can then read, answer and stop requests")
            .arity(Arity::Optional),
        optional("cluster.listen", parsed("ADDRESS:PORT", socket_address, SocketAddr::to_string), |d| &mut d.options.cluster.listen,
            "scheduler: port 8003 of --host, or the port of its place in --schedulers; frontend: port 8004", "\"0.0.0.0:8004\"")
            .flag("listen", "Address at which a scheduler or a frontend accepts connections of the rest of the cluster"),
        optional("cluster.advertise", parsed("HOST:PORT", host_and_port, String::clone), |d| &mut d.options.cluster.advertise,
            "the address from which the process connects to schedulers, or a scheduler to etcd", "\"frontend-1:8004\"")
            .flag("advertise", "Address by which backends reach this frontend, or by which all processes reach this scheduler if --etcd has it, if schedulers or etcd see another address"),
        optional("cluster.name", name("NAME"), |d| &mut d.options.cluster.name, "its role and a number", "\"frontend-1\"")
            .flag("node-name", "Name of the process in the logs of other processes and in GET /v2/cluster"),
        key("cluster.heartbeat_ms", millis(), |d| &mut d.options.cluster.heartbeat)
            .flag("heartbeat-ms", "Longest silence between schedulers"),
        key("cluster.takeover_after_ms", millis(), |d| &mut d.options.cluster.takeover_after)
            .flag("takeover-after-ms", "Shortest silence of the leading scheduler after which the next one leads; longer where heartbeats are usually late"),
        key("cluster.lost_after_ms", millis(), |d| &mut d.options.cluster.lost_after)
            .flag("lost-after-ms", "Silence after which any other process is lost; the end of its connection counts as this silence"),
        key("cluster.fetch_within_ms", millis(), |d| &mut d.options.cluster.fetch_within)
            .flag("fetch-within-ms", "Time for the inputs of a batch to reach its backend; the batch then runs without missing requests. A batch waits longer where inputs lately took longer, up to lost_after_ms"),
        key("cluster.busy_poll_us", micros(Duration::from_millis(10)), |d| &mut d.options.cluster.busy_poll)
            .flag("busy-poll-us", "Time in microseconds for which a process of the cluster polls for the next message before it sleeps. Answers come sooner by the time that a core takes to wake, at the cost of up to one core under load. The process sleeps at once if another program wants the core. 0: no polling"),
        key("cluster.tries", number(0..=255), |d| &mut d.options.cluster.tries)
            .flag("tries", "Times that a request is tried again after its backend was lost; requests of a model with the parameter run_once = true are not tried again"),
        key("cluster.sub_clusters", sub_clusters(), |d| &mut d.options.cluster.sub_clusters)
            .flag("sub-clusters", "Number of sub-clusters into which the backends with --model-control-mode explicit are divided; schedulers choose the models of each. auto: the least number whose devices hold their models, and that keeps --plan-rate. 0: each backend has its own models"),
        key("cluster.plan_every_s", seconds(), |d| &mut d.options.cluster.plan_every)
            .flag("plan-every-s", "Time after which a scheduler divides models among sub-clusters anew, by the load of the last minute. 0: only when backends or models come and go, or after POST /v2/cluster/plan"),
        optional("cluster.plan_moves", number(0..=u32::MAX.into()), |d| &mut d.options.cluster.plan_moves,
            "any number", "2")
            .flag("plan-moves", "Most models that may change their sub-cluster at a time"),
        optional("cluster.plan_load_s", seconds(), |d| &mut d.options.cluster.plan_load,
            "any time", "60")
            .flag("plan-load-s", "Longest time that the models that one plan moves may take to load on a backend, all together; in place of --plan-moves"),
        optional("cluster.plan_rate", number(1..=u32::MAX.into()), |d| &mut d.options.cluster.plan_rate,
            "any number", "50000")
            .flag("plan-rate", "Most requests a second of the models of a sub-cluster, by the last minute"),
        key("cluster.ucx", name("WHEN").of(UcxUse::names()), |d| &mut d.options.cluster.ucx)
            .flag("ucx", "Reading of large tensors between frontends and backends by UCX, over RDMA: off, auto (between machines) or always (on one machine as well). Needs a build with `--features ucx`"),
    ]
}

/// `HOST:PORT`, checked and unchanged.
fn host_and_port(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match parts.and_then(|(_, port)| port.parse::<u16>().ok()) {
        Some(1..) => Ok(text.to_owned()),
        _ => Err(format!("'{text}' is not HOST:PORT, such as scheduler-1:8003")),
    }
}

fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("'{text}' is not ADDRESS:PORT, such as 0.0.0.0:8003"))
}

/// The options of one model: `[models.NAME]`.
pub static MODEL_KEYS: LazyLock<Vec<Key<ModelOptions>>> = LazyLock::new(|| {
    let (of_all, chosen) = ("as for all models", "as its config.pbtxt says, or as for all models");
    vec![
        of_model("slo_ms", millis(), |m| &mut m.slo, chosen, "50").help("SLO of the model in milliseconds"),
        of_model("scheduler", name("POLICY"), |m| &mut m.dispatch, chosen, "\"deferred\"")
            .help("When a batch of the model leaves, as scheduler"),
        of_model("drop", name("POLICY"), |m| &mut m.drop, chosen, "\"head\"").help("Drop policy of the model, as drop"),
        of_model("max_queue_size", number(0..=u32::MAX.into()), |m| &mut m.max_queue_size, chosen, "100")
            .help("Most requests that wait for the model; 0: unbounded"),
        of_model("max_queue_wait_s", seconds(), |m| &mut m.max_queue_wait, of_all, "1")
            .help("Longest wait of a request without a deadline; 0: no bound"),
        of_model("threads", number(0..=MOST_THREADS as u64), |m| &mut m.threads, of_all, "2")
            .help("Threads inside one run of the model; 0: as for all models"),
        of_model("batching", name("WHEN").of(BatchingChoice::names()), |m| &mut m.batching, "check", "\"always\"")
            .help("Whether requests of the model share batches: check (if the rows of a batch do not depend on each other), always, or never (see \"Which models are batched\")"),
        of_model(
            "engine",
            name("ENGINE").of(ModelEngine::names()),
            |m| &mut m.engine,
            "that of all models, or another that can run the model",
            "\"onnxruntime\"",
        )
        .help("The only engine that may run the model on the CPU: rten or onnxruntime (see \"Engines\")"),
        of_model("isolation", name("ISOLATION").of(Isolation::names()), |m| &mut m.isolation, of_all, "\"process\"")
            .help("Whether the model runs in a process of its own: none, process or auto (see \"Isolation\")"),
        of_model(
            "preprocess",
            steps(),
            |m| &mut m.preprocess,
            "the model takes tensors alone",
            "[{ step = \"decode\" }, { step = \"resize\", size = [224, 224] }]",
        )
        .help("The steps from pictures or texts to the model's inputs (see \"Preprocessing\")"),
        of_model("gpu_memory_mb", mebibytes(), |m| &mut m.gpu_memory, "the free memory, less a reserve", "6000")
            .help("Most memory of each GPU that the model may take, MiB (see \"NVIDIA GPUs\")"),
        of_model(
            "partition",
            list(number(0..=u32::MAX.into())),
            |m| &mut m.partitions,
            "the partition with the fewest models",
            "[0, 1]",
        )
        .help("The partition of the model, from 0, or several partitions, of which each batch runs on one (see \"Partitions\")"),
    ]
});

#[cfg(test)]
mod tests;
