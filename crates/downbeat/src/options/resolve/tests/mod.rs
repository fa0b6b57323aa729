//! Tests of the options that files and flags give together, and of the errors for wrong ones.

mod wrong_files;

use downbeat_core::Duration;
use downbeat_service::options::{
    AutoscaleOptions, CudaMissing, CudaOptions, DropPolicy, LogFormat, ModelControl, ModelOptions, PolicyName,
    RestrictedApis, RunLimits,
};
use serde_json::json;

use super::*;
use crate::options::key::Key;
use crate::options::keys::{KEYS, MODEL_KEYS};

fn flags(arguments: &[&str]) -> ServeFlags {
    use clap::{Args, FromArgMatches};
    let command = ServeFlags::augment_args(clap::Command::new("serve").no_binary_name(true));
    ServeFlags::from_arg_matches(&command.try_get_matches_from(arguments).unwrap()).unwrap()
}

fn merge(file: &str, arguments: &[&str]) -> anyhow::Result<ServerOptions> {
    let mut draft = Draft::default();
    options_file::apply_text(file, Path::new(""), &mut draft).map_err(anyhow::Error::msg)?;
    flags(arguments).keys.apply(&mut draft)?;
    finish(draft, Process::Server)
}

fn merged(file: &str, arguments: &[&str]) -> ServerOptions {
    merge(file, arguments).unwrap()
}

fn refused(file: &str, arguments: &[&str]) -> String {
    merge(file, arguments).unwrap_err().to_string()
}

/// The error of a file alone.
fn error(file: &str) -> String {
    options_file::apply_text(file, Path::new(""), &mut Draft::default()).unwrap_err()
}

#[test]
fn nothing_given_is_the_defaults() {
    assert_eq!(merged("", &["models"]), ServerOptions::new("models".into()));
}

#[test]
fn a_file_can_say_everything() {
    let file = r#"
        repository = "models"
        server_name = "triton"
        host = "127.0.0.1"
        http_address = "127.0.0.2"
        grpc_address = "127.0.0.3"
        metrics_address = "127.0.0.4"
        http_port = 9000
        grpc_port = false
        metrics_port = 0
        engine = "cuda"
        threads = 2
        devices = 3
        load_threads = 5
        scheduler_shards = 4
        scheduler = "deferred"
        drop = "head"
        slo_ms = 12.5
        max_queue_size = 7
        max_queue_wait_s = 1.5
        default_max_batch_size = 16
        max_body_bytes = "1M"
        max_grpc_message_bytes = "3M"
        max_in_flight_bytes = "1G"
        run_memory_bytes = "2G"
        model_memory_bytes = "3G"
        shared_memory = true
        max_connections = 50
        idle_timeout_s = 0
        transfer_timeout_s = 2.5
        min_rate = "1K"
        shutdown_grace_s = 1
        drain_timeout_s = 2
        run_timeout_s = 3
        run_timeout_factor = 7
        load_run_timeout_s = 0
        load_timeout_s = 60
        decision_log = "decisions"
        decision_log_bytes = "8M"
        decision_log_age_h = 2
        strict_readiness = false
        allow_empty = true
        auto_complete_config = false
        exit_on_error = true
        exit_when_not_live = true
        [cuda]
        gpus = [1, 0]
        missing = "cpu"
        memory_limit_mb = 4096
        tf32 = false
        graphs = false
        metrics_every_s = 0.5
        nhwc = true
        [model_control]
        mode = "poll"
        poll_s = 0.5
        [device]
        policy = "windowed"
        partitions = ["0-3,8", "4"]
        [[device.groups]]
        models = ["digits", "*"]
        policy = "elastic"
        pad = true
        max_length = 128
        mixes = { 4 = "4", 8 = "8" }
        max_running = 8
        ring_slots = 64
        [[device.groups]]
        models = ["encoder"]
        policy = "staged"
        window_ms = 0
        stages = 4
        buffer_pairs = 3
        comp_wait_ms = 2.5
        lengths = true
        operators = "auto"
        load = false
        [[device.groups]]
        models = ["mlp"]
        window_ms = 0
        fill = true
        [profiling]
        enabled = false
        budget_s = 1.5
        cache_dir = "cache"
        [autoscale]
        bad_threshold = 0.02
        idle_threshold = 0.5
        spare = 0.2
        grow_window_s = 5
        shrink_window_s = 120
        min_requests = 10
        min_devices = 2
        max_devices = 8
        [log]
        format = "json"
        level = "debug"
        [placement]
        digits = [0, 2]
        mlp = [1]
        [models.digits]
        slo_ms = 5
        scheduler = "route"
        drop = "none"
        max_queue_size = 1
        gpu_memory_mb = 3000
        partition = 1
        max_queue_wait_s = 0
        threads = 2
    "#;
    let options = merged(file, &[]);
    let ms = Duration::from_millis;
    assert_eq!(options.repositories, ["models".into()]);
    assert_eq!((options.server_name.as_str(), options.host.to_string().as_str()), ("triton", "127.0.0.1"));
    assert_eq!((options.http_port, options.grpc_port, options.metrics_port), (Some(9000), None, Some(0)));
    assert_eq!((options.engine, options.threads, options.devices), (EngineChoice::Cuda, 2, 3));
    let cuda = CudaOptions {
        devices: vec![1, 0],
        missing: CudaMissing::Cpu,
        memory_limit: Some(4096 << 20),
        tf32: false,
        graphs: false,
        nhwc: true,
        ..CudaOptions::default()
    };
    assert_eq!(options.cuda, cuda);
    assert_eq!(options.gpu_metrics_every, ms(500));
    let every = |flags: &[&str]| merged("", &[flags, &["models"]].concat()).gpu_metrics_every;
    assert_eq!((every(&[]), every(&["--metrics-interval-ms=100"])), (ms(2_000), ms(100)));
    assert_eq!(every(&["--metrics-interval-ms=100", "--allow-gpu-metrics=false"]), Duration::ZERO);
    assert_eq!((options.scheduler_shards, options.load_threads), (4, 5));
    assert_eq!((&options.dispatch, options.drop), (&DispatchPolicy::Deferred, Some(DropPolicy::HeadDrop)));
    assert_eq!(options.default_slo, Some(Duration::from_micros(12_500)));
    assert_eq!((options.max_queue_size, options.default_max_batch_size), (7, 16));
    assert_eq!((options.max_queue_wait("other"), options.max_queue_wait("digits")), (Some(ms(1500)), None));
    assert_eq!((options.max_grpc_message_bytes, options.max_in_flight_bytes), (3 << 20, Some(1 << 30)));
    assert_eq!((options.run_memory_bytes, options.model_memory_bytes), (Some(2 << 30), Some(3 << 30)));
    assert_eq!(merged(file, &["--model-memory-bytes=0"]).model_memory_bytes, Some(0));
    assert_eq!(merged("run_memory_bytes = 0", &["models"]).run_memory_bytes, Some(0));
    assert_eq!(merged("", &["--run-memory-bytes=0", "models"]).run_memory_bytes, Some(0));
    assert!(options.shared_memory && !merged(file, &["--allow-client-shm=false"]).shared_memory);
    assert!(merged("", &["--shared-memory", "models"]).shared_memory);
    assert_eq!(
        options.run_limits,
        RunLimits { factor: 7, least: ms(3000), load: Duration::ZERO, whole_load: ms(60_000) }
    );
    assert_eq!((options.max_body_bytes, options.max_connections, options.min_rate), (1 << 20, 50, 1 << 10));
    assert_eq!((options.idle_timeout, options.transfer_timeout), (ms(0), ms(2500)));
    assert_eq!((options.shutdown_grace, options.drain_timeout), (ms(1000), ms(2000)));
    assert_eq!(options.decision_log.as_deref(), Some(Path::new("decisions")));
    assert_eq!((options.decision_log_bytes, options.decision_log_age), (8 << 20, Duration::from_millis(7_200_000)));
    let addresses = [options.http_address, options.grpc_address, options.metrics_address];
    assert_eq!(addresses.map(|a| a.unwrap().to_string()), ["127.0.0.2", "127.0.0.3", "127.0.0.4"]);
    assert!(!options.strict_readiness && options.allow_empty && !options.auto_complete_config && options.exit_on_error);
    assert!(options.exit_when_not_live && !merged(file, &["--exit-when-not-live=false"]).exit_when_not_live);
    assert!(merged("", &["--exit-when-not-live", "models"]).exit_when_not_live);
    assert_eq!(options.model_control, ModelControl::Poll { every: ms(500) });
    assert_eq!((options.device.policy.name(), options.device.groups.len()), ("windowed", 3));
    assert_eq!(options.device.partitions, ["0-3,8", "4"]);
    let group = &options.device.groups[0];
    assert_eq!((group.models.join(" "), group.policy), ("digits *".to_owned(), "elastic".parse().ok()));
    let settings =
        json!({ "pad": true, "max_length": 128, "mixes": { "4": "4", "8": "8" }, "max_running": 8, "ring_slots": 64 });
    assert_eq!(json!(group.settings), settings);
    let settings = json!({
        "window_ms": 0, "stages": 4, "buffer_pairs": 3, "comp_wait_ms": 2.5, "lengths": true, "operators": "auto", "load": false
    });
    assert_eq!(json!(options.device.groups[1].settings), settings);
    let group = &options.device.groups[2];
    assert_eq!((group.policy, json!(group.settings)), (None, json!({ "window_ms": 0, "fill": true })));
    assert!(!options.profiling.enabled);
    assert_eq!(options.profiling.budget, ms(1500));
    assert_eq!(options.profiling.cache_dir.as_deref(), Some(Path::new("cache")));
    assert_eq!((options.log.format, options.log.level.as_str()), (LogFormat::Json, "debug"));
    let autoscale = AutoscaleOptions {
        bad_threshold: 0.02,
        idle_threshold: 0.5,
        spare: 0.2,
        grow_window: ms(5_000),
        shrink_window: ms(120_000),
        min_requests: 10,
        min_devices: 2,
        max_devices: 8,
    };
    assert_eq!(options.autoscale, Some(autoscale));
    assert_eq!(merged("[autoscale]\nenabled = false", &["m"]).autoscale, None);
    let placement = [("digits".to_owned(), vec![0, 2]), ("mlp".to_owned(), vec![1])];
    assert_eq!(options.placement, placement.into());
    let digits = &options.models["digits"];
    assert_eq!((digits.slo, digits.max_queue_size, digits.threads), (Some(ms(5)), Some(1), Some(2)));
    assert_eq!((digits.gpu_memory, digits.partitions.clone()), (Some(3000 << 20), Some(vec![1])));
    assert_eq!((digits.dispatch.clone(), digits.drop), (Some(DispatchPolicy::Route), Some(DropPolicy::None)));
}

#[test]
fn the_example_file_says_the_defaults_and_names_every_option() {
    let text = include_str!("../../../../../../examples/downbeat.toml");
    let mut options = merged(text, &["models"]);
    assert_eq!(options.models.remove("digits"), Some(Default::default()));
    assert_eq!(options, ServerOptions::new("models".into()));
    // Options in comments also parse, if they do not contradict the rest.
    let uncommented: String = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(option) if option.split_once(" = ").is_some_and(|(name, _)| !name.contains(' ')) => option,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let options = merged(&uncommented.replace("mode = \"none\"", "mode = \"explicit\""), &[]);
    assert_eq!(options.model_control, ModelControl::Explicit { load: vec!["digits".into()] });
    assert!(options.default_slo.is_some() && options.profiling.cache_dir.is_some() && options.decision_log.is_some());
    assert_eq!(options.models["digits"].max_queue_size, Some(100));
}

#[test]
fn flags_win_over_the_file_one_by_one() {
    let file =
        "repository = 'a'\nhttp_port = 9000\nslo_ms = 100\ndrop = 'head'\n[models.m]\nslo_ms = 50\ndrop = 'none'";
    assert_eq!(merged(file, &["b", "--default-slo-ms", "7"]).default_slo, Some(Duration::from_millis(7)));
    let options = merged(file, &["b", "--http-port", "off", "--slo-ms", "m=20", "--slo-ms", "n=30"]);
    assert_eq!(options.repositories, ["b".into()]);
    assert_eq!(options.http_port, None);
    assert_eq!(options.default_slo, Some(Duration::from_millis(100)));
    assert_eq!(options.drop, Some(DropPolicy::HeadDrop));
    assert_eq!(options.models["m"].slo, Some(Duration::from_millis(20)));
    assert_eq!(options.models["m"].drop, Some(DropPolicy::None), "what the flag does not say stays");
    assert_eq!(options.models["n"].slo, Some(Duration::from_millis(30)));
}

#[test]
fn naming_a_model_to_load_does_not_open_model_control() {
    let explicit = ["m", "--load-model", "a", "--load-model", "b", "--model-control-mode", "explicit"];
    let options = merged("", &explicit);
    assert_eq!(options.model_control, ModelControl::Explicit { load: vec!["a".into(), "b".into()] });
    let file = "[model_control]\nload = ['a']";
    for (file, flags) in
        [("", &["m", "--load-model", "a"][..]), (file, &["m"]), ("", &[&explicit[..6], &["poll"]].concat())]
    {
        let error = refused(file, flags);
        assert!(error.contains("--load-model") && error.contains("--model-control-mode explicit"), "{error}");
    }
}

#[test]
fn names_of_hosts_come_from_file_and_flags_in_lower_case() {
    assert_eq!(merged("", &["m"]).host, std::net::Ipv4Addr::LOCALHOST);
    let options = merged("", &["m", "--allow-host", "Models.example.com.", "--allow-host=downbeat"]);
    assert_eq!(options.allow_host, ["models.example.com", "downbeat"]);
    assert_eq!(merged("allow_host = ['a', 'b']", &["m"]).allow_host, ["a", "b"]);
    for wrong in ["http://a", "a:8000", "a b", ""] {
        assert!(refused(&format!("allow_host = ['{wrong}']"), &["m"]).contains("is not the name of a host"), "{wrong}");
    }
}

#[test]
fn ports_on_every_interface_are_named() {
    let open = |flags: &[&str]| merged("", &[&["m"], flags].concat()).open_ports();
    assert_eq!(open(&[]), [""; 0]);
    assert_eq!(open(&["--host", "::", "--grpc-port", "off"]), ["HTTP", "metrics"]);
    assert_eq!(open(&["--host", "0.0.0.0", "--http-address", "127.0.0.1"]), ["gRPC"]);
}

#[test]
fn flags_of_triton_mean_their_counterparts() {
    let options = merged(
        "",
        &[
            "--model-repository=a",
            "--model-store=b",
            "--id=triton",
            "--http-address=localhost",
            "--grpc-address=127.0.0.2",
            "--allow-metrics=false",
            "--allow-http=1",
            "--http-port=9000",
            "--log-verbose=1",
            "--log-info=true",
            "--log-format=ISO8601",
            "--strict-model-config=true",
            "--exit-on-error=true",
            "--strict-readiness=false",
            "--exit-timeout-secs=5",
            "--model-control-mode=explicit",
            "--load-model=x",
            "--model-load-thread-count=4",
            "--backend-config=onnxruntime,default-max-batch-size=7",
        ],
    );
    assert_eq!(options.repositories, ["a".into(), "b".into()]);
    assert_eq!((options.server_name.as_str(), options.http_port, options.metrics_port), ("triton", Some(9000), None));
    let addresses = [options.http_address, options.grpc_address, options.metrics_address];
    assert_eq!(addresses.map(|a| a.unwrap().to_string()), ["127.0.0.1", "127.0.0.2", "127.0.0.1"]);
    assert_eq!((options.log.level.as_str(), options.log.format), ("debug", LogFormat::Text));
    assert!(!options.auto_complete_config && options.exit_on_error && !options.strict_readiness);
    assert_eq!((options.drain_timeout, options.default_max_batch_size), (Duration::from_millis(5_000), 7));
    assert_eq!(options.model_control, ModelControl::Explicit { load: vec!["x".into()] });
    assert_eq!(options.load_threads, 4);
    let level = |flags: &[&str]| merged("", &[&["m"], flags].concat()).log.level;
    assert_eq!(level(&["--log-info=false"]), "warn");
    assert_eq!(level(&["--log-info=0", "--log-warning=0", "--log-error=1"]), "error");
    assert_eq!(level(&["--log-verbose=0", "--log-info=1"]), "info");
    assert_eq!(level(&["--log-verbose=1", "--log-level", "warn"]), "warn");
}

#[test]
fn flags_of_triton_without_a_counterpart_are_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let given = [
        "m",
        "--http-thread-count=8",
        "--cache-config=local,size=1",
        "--backend-config=tensorrt,x=1",
        "--grpc-use-ssl=false",
    ];
    let resolved = resolve(&flags(&given), Process::Server, folder.path()).unwrap();
    assert_eq!(
        resolved.options.notices,
        [
            "ignored, because this server has no counterpart: --cache-config, --http-thread-count, --backend-config=tensorrt,x=1; --strict-flags refuses such flags (see docs/guide/triton.md#tritons-command-line)"
        ]
    );
    let refused = |more: &str| {
        resolve(&flags(&[&given[..], &[more]].concat()), Process::Server, folder.path()).unwrap_err().to_string()
    };
    assert!(
        refused("--strict-flags")
            .starts_with("flags of Triton without a counterpart here: --cache-config, --http-thread-count, ")
    );
    for closes in ["--grpc-use-ssl=true", "--grpc-use-ssl-mutual=1"] {
        assert!(refused(closes).contains("--tls-certificate FILE"), "{closes}");
        assert!(refused(closes).ends_with("(see docs/guide/triton.md#tls-and-access)"), "{closes}");
    }
    let poll = resolve(&flags(&["m", "--repository-poll-secs", "5"]), Process::Server, folder.path()).unwrap();
    assert_eq!(poll.options.notices, ["--repository-poll-secs has no effect without --model-control-mode poll"]);
}

#[test]
fn traces_are_set_by_our_flags_and_by_tritons() {
    let traces =
        merged("", &["m", "--trace-config", "rate=5", "--trace-config=triton,file=t.json", "--access-log", "-"]).traces;
    assert_eq!((traces.rate, traces.file, traces.access_log), (5, Some("t.json".into()), Some("-".into())));
    let traces = merged("", &["m", "--trace-count", "-1", "--trace-level=OFF", "--otlp-endpoint", "c:4318"]).traces;
    assert_eq!((traces.count, traces.level, traces.otlp.as_deref()), (None, Some(false), Some("c:4318")));
}

#[test]
fn restricted_apis_are_read_as_triton_reads_them() {
    let flags = ["m", "--http-restricted-api=inference, health:Admin=a=b", "--grpc-restricted-protocol=trace:x=y"];
    let access = merged("", &flags).access;
    let [RestrictedApis { apis, header, value }] = access.restricted_http.as_slice() else { panic!("{access:?}") };
    let apis: Vec<&str> = apis.iter().map(|api| api.name()).collect();
    assert_eq!((apis.join(" ").as_str(), header.as_str(), value.as_str()), ("inference health", "admin", "a=b"));
    assert_eq!(access.restricted_grpc.len(), 1);
    assert!(!format!("{access:?}").contains("a=b"), "the value is a secret");
    for (wrong, words) in [
        ("infer:a=b", "'infer' is no API"),
        ("health", "expected API"),
        ("health:a", "expected API"),
        ("health:a=", "expected API"),
        ("health: =b", "expected API"),
    ] {
        let said = wrong.parse::<RestrictedApis>().unwrap_err();
        assert!(said.contains(words), "{wrong}: {said}");
    }
}

#[test]
fn flags_of_triton_mean_what_they_mean_there() {
    let polled = merged("", &["m", "--model-control-mode=poll", "--repository-poll-secs=0"]);
    assert_eq!(polled.model_control, ModelControl::Poll { every: Duration::ZERO }, "0 stands for never");
    let refused = |flag: &str| {
        let command = <ServeFlags as clap::Args>::augment_args(clap::Command::new("serve").no_binary_name(true));
        command.try_get_matches_from(["m", flag]).unwrap_err().to_string()
    };
    let error = refused("--repository-poll-secs=0.01");
    assert!(error.contains("must be 0, or at least 100 ms"), "{error}");
    for (written, ends) in [("true", true), ("True", true), ("1", true), ("on", true), ("false", false), ("0", false)] {
        assert_eq!(merged("", &["m", "--exit-on-error", written]).exit_on_error, ends, "{written}");
        assert_eq!(merged("", &["m", &format!("--exit-on-error={written}")]).exit_on_error, ends, "{written}");
    }
    assert!(!merged("", &["m"]).exit_on_error, "unlike Triton's");
    assert_eq!(merged("", &["m"]).model_config_name, None);
    assert_eq!(merged("", &["m", "--model-config-name=h100"]).model_config_name.as_deref(), Some("h100"));
    assert_eq!(merged("model_config_name = \"h100\"", &["m"]).model_config_name.as_deref(), Some("h100"));
    for wrong in ["", "a b", "../h100", "configs/h100", ".."] {
        let error = refused(&format!("--model-config-name={wrong}"));
        assert!(error.contains("is not the name of a configuration; for configs/h100.pbtxt it is h100"), "{error}");
    }
}

#[test]
fn contradictions_are_refused() {
    assert!(refused("", &[]).starts_with("no models are given"));
    assert_eq!(
        refused("", &["m", "--http-port", "8001"]),
        "HTTP and gRPC both have port 8001; give one of them another"
    );
    assert!(
        refused("", &["m", "--http-port", "off", "--grpc-port", "off"]).contains("no client could reach the server")
    );
    let spare = refused("autoscale.spare = 0.5", &["m"]);
    assert_eq!(spare, "[autoscale]: spare (0.5) is above idle_threshold (0.25); it must be at most that");
    assert!(refused("devices = 257", &["m"]).contains("at most 256"));
    for share in ["5", "1", "-0.1"] {
        let said = refused(&format!("rehearsal_cpu = {share}"), &["m"]);
        assert!(said.contains("no share: a share is 0 to below 1, and 0.05 is 5%"), "{said}");
    }
    let named = refused("engine = 'rten'", &["m", "--gpus", "0,1"]);
    assert_eq!(
        named,
        "--gpus names GPUs, but the engine 'rten' runs on none; choose --engine cuda, or leave --gpus out"
    );
    assert!(refused("[cuda]\nmemory_limit_mb = 0", &["m"]).contains("must be at least 1"));
    let flags = ["m", "--gpus", "2,0", "--cuda-missing", "cpu", "--cuda-memory-limit-mb", "1", "--no-tf32"];
    let cuda = merged("[cuda]\ngpus = [1]\nmemory_limit_mb = 7", &flags).cuda;
    assert_eq!((cuda.devices, cuda.memory_limit, cuda.tf32), (vec![2, 0], Some(1 << 20), false));
    assert!(refused("scheduler_shards = 65", &["m"]).contains("at most 64"));
    assert!(refused("load_threads = 0", &["m"]).contains("must be 1 to 64"));
    let any = merged("", &["m", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]);
    assert_eq!(any.http_port, Some(0), "0 is any free port, so all may have it");
}

#[test]
fn a_file_that_lies_with_the_models_says_only_how_they_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    std::fs::create_dir_all(models.join("m")).unwrap();
    let resolved = |text: &str, arguments: &[&str], started_in: &Path| {
        std::fs::write(models.join("downbeat.toml"), text).unwrap();
        resolve(&flags(arguments), Process::Server, started_in).map_err(|error| format!("{error:#}"))
    };
    let allowed =
        "slo_ms = 5\nscheduler = 'eager'\nmax_queue_size = 3\n[device]\npolicy = 'exclusive'\n[models.m]\nslo_ms = 1";
    resolved(allowed, &["models"], folder.path()).unwrap();
    let others = [
        ("model_control", "[model_control]\nmode = 'explicit'"),
        ("decision_log", "decision_log = '/var/log'"),
        ("host", "host = '0.0.0.0'"),
        ("repository", "repository = '/'"),
        ("profiling", "slo_ms = 5\n[profiling]\ncache_dir = '/tmp'"),
    ];
    for (key, text) in others {
        let error = resolved(text, &["models"], folder.path()).unwrap_err();
        assert!(error.contains("models/downbeat.toml lies in the model repository"), "{error}");
        assert!(error.contains(&format!("set '{key}' in a downbeat.toml")) && error.contains("--config"), "{error}");
    }
    // The rule holds for both ways to name the repository.
    let error = resolved("host = '0.0.0.0'", &["."], &models).unwrap_err();
    assert!(error.contains("lies in the model repository"), "{error}");
    let error = resolved("repository = '.'", &[], &models).unwrap_err();
    assert!(error.contains("lies in the model repository"), "{error}");
    // A person who names the file with --config wants it.
    resolved("host = '0.0.0.0'", &["models", "--config", "models/downbeat.toml"], folder.path()).unwrap();
}

#[test]
fn the_repository_of_other_commands_is_that_of_the_file_too() {
    let folder = tempfile::tempdir().unwrap();
    for repository in ["mine", "other/m", "given"] {
        std::fs::create_dir_all(folder.path().join(repository)).unwrap();
    }
    let given = folder.path().join("given");
    let found = |given: Option<&Path>| open_repository("m", given, folder.path()).map(|found| found.path().to_owned());
    assert_eq!(repository_of("m", None, &[]), Path::new(EXAMPLES));
    std::fs::write(folder.path().join(FILE_NAME), "repository = 'mine'").unwrap();
    assert_eq!(found(None).unwrap(), folder.path().join("mine"));
    assert_eq!(found(Some(&given)).unwrap(), given);
    std::fs::write(folder.path().join(FILE_NAME), "repository = ['mine', 'other']").unwrap();
    assert_eq!(found(None).unwrap(), folder.path().join("other"));
    std::fs::write(folder.path().join(FILE_NAME), "repo = 'mine'").unwrap();
    assert!(found(None).unwrap_err().to_string().contains("unknown option 'repo'"));
}

#[cfg(unix)]
#[test]
fn symbolic_links_out_of_a_repository_are_followed_where_it_is_said() {
    assert!(!merged("repository = 'models'", &[]).follow_symlinks);
    assert!(merged("repository = 'models'", &["--follow-symlinks"]).follow_symlinks);
    assert!(!merged("repository = 'models'\nfollow_symlinks = true", &["--follow-symlinks=false"]).follow_symlinks);
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("elsewhere/1")).unwrap();
    std::fs::create_dir(folder.path().join("models")).unwrap();
    std::fs::write(folder.path().join("elsewhere/1/model.onnx"), "").unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), folder.path().join("models/m")).unwrap();
    let definition = |file: &str| {
        std::fs::write(folder.path().join(FILE_NAME), file).unwrap();
        open_repository("m", None, folder.path()).unwrap().definition("m", None)
    };
    let refused = definition("repository = 'models'").unwrap_err().to_string();
    assert!(refused.contains("follow_symlinks = true in downbeat.toml"), "{refused}");
    definition("repository = 'models'\nfollow_symlinks = true").unwrap();
    // A file in the repository may not choose which files the server reads.
    std::fs::write(folder.path().join("models/downbeat.toml"), "follow_symlinks = true").unwrap();
    let refused = resolved_in_models(folder.path());
    assert!(refused.contains("set 'follow_symlinks' in a downbeat.toml"), "{refused}");
}

/// The error of a server in the repository `models` of a folder, whose own options file is wrong.
#[cfg(unix)]
fn resolved_in_models(folder: &Path) -> String {
    resolve(&flags(&["."]), Process::Server, &folder.join("models")).unwrap_err().to_string()
}

#[test]
fn a_byte_order_mark_before_the_options_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let read = |bytes: &[u8]| {
        std::fs::write(folder.path().join(FILE_NAME), bytes).unwrap();
        resolve(&flags(&["models"]), Process::Server, folder.path())
    };
    let resolved = read("\u{feff}slo_ms = 7".as_bytes()).unwrap();
    assert_eq!(resolved.options.default_slo, Some(Duration::from_millis(7)));
    let utf16: Vec<u8> = "\u{feff}slo_ms = 7".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let refused = format!("{:#}", read(&utf16).unwrap_err());
    assert!(refused.contains("UTF-16") && refused.contains("save it as UTF-8"), "{refused}");
}

#[test]
fn the_file_is_found_and_its_paths_are_relative_to_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("models")).unwrap();
    std::fs::write(folder.path().join("models/downbeat.toml"), "slo_ms = 7").unwrap();
    let resolved = resolve(&flags(&["models"]), Process::Server, folder.path()).unwrap();
    assert_eq!(resolved.options.default_slo, Some(Duration::from_millis(7)));
    assert_eq!(resolved.file, Some(folder.path().join("models/downbeat.toml")));

    std::fs::write(folder.path().join("downbeat.toml"), "http_port = 2\nrepository = 'models'").unwrap();
    let resolved = resolve(&flags(&[]), Process::Server, folder.path()).unwrap();
    assert_eq!(resolved.options.http_port, Some(2));
    assert_eq!(resolved.options.repositories, [folder.path().join("models").into()]);

    std::fs::write(folder.path().join("other.toml"), "http_port = 3").unwrap();
    let resolved = resolve(&flags(&["models", "--config", "other.toml"]), Process::Server, folder.path()).unwrap();
    assert_eq!(resolved.options.http_port, Some(3));
    let error = resolve(&flags(&["models", "--config", "missing.toml"]), Process::Server, folder.path()).unwrap_err();
    assert!(format!("{error:#}").contains("missing.toml: No such file"), "{error:#}");
}

/// The model name of [`ways_to_name_a_model`].
const MISNAMED: &str = "digitz";

/// Every way to name a model: flags, the text of a file, and the text of a plan.
fn ways_to_name_a_model() -> Vec<(Vec<String>, String, String)> {
    // A flag whose value contains a model's name has MODEL in its unit.
    let flags = KEYS.iter().filter(|key| !key.flag.is_empty() && key.unit.contains("MODEL"));
    let of_flag = |key: &Key<Draft>| {
        let value = key.unit.replace("[MODEL=]", "MODEL=").replace("MODEL", MISNAMED).replace("=MS", "=5");
        let mut given = vec![format!("--{}", key.flag), value];
        if key.flag == "load-model" {
            given.extend(["--model-control-mode", "explicit"].map(str::to_owned));
        }
        (given, String::new(), String::new())
    };
    let of_table = |table: &&str| {
        let text = match *table {
            "device.groups" => format!("[[device.groups]]\nmodels = ['{MISNAMED}']\npolicy = 'windowed'"),
            "placement" => format!("[placement]\n{MISNAMED} = [0]"),
            "models" => String::new(),
            other => panic!("say here how [{other}] names a model"),
        };
        (Vec::new(), text, String::new())
    };
    let of_model_key = |key: &Key<ModelOptions>| {
        let value = if key.path == "preprocess" { "[{ step = 'decode' }]" } else { key.example };
        (Vec::new(), format!("[models.{MISNAMED}]\n{} = {value}", key.path), String::new())
    };
    let plan =
        format!("{{\"sub_clusters\": [{{\"index\": 0, \"models\": [\"{MISNAMED}\"], \"devices_needed\": 0.5}}]}}");
    let mut all: Vec<_> = flags.map(of_flag).collect();
    assert_eq!(all.len(), 2, "--slo-ms and --load-model");
    all.extend(options_file::TABLES.iter().map(of_table).filter(|(_, text, _)| !text.is_empty()));
    all.extend(MODEL_KEYS.iter().map(of_model_key));
    all.push((Vec::new(), String::new(), plan));
    all
}

/// Every option reports a model name that does not exist, with the name that the user probably
/// meant.
#[test]
fn every_option_that_names_an_unknown_model_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["digits".to_owned(), "mlp".to_owned()];
    for (given, file, plan) in ways_to_name_a_model() {
        // The partition must exist.
        let file = format!("repository = 'models'\n[device]\npartitions = ['0', '1']\n{file}");
        std::fs::write(folder.path().join("downbeat.toml"), &file).unwrap();
        std::fs::write(folder.path().join("plan.json"), &plan).unwrap();
        let mut given: Vec<&str> = given.iter().map(String::as_str).collect();
        if !plan.is_empty() {
            given.extend(["--plan", "plan.json"]);
        }
        let options = resolve(&flags(&given), Process::Server, folder.path());
        let options = options.unwrap_or_else(|error| panic!("{given:?} {file}: {error:#}")).options;
        let unknown = options.unknown_models(&names);
        let said: Vec<&str> = unknown.iter().map(|unknown| unknown.message.as_str()).collect();
        assert_eq!(said.len(), 1, "{given:?} {file} {plan}: {said:?}");
        assert!(said[0].contains("no model 'digitz'; did you mean 'digits'?"), "{said:?}");
    }
}

#[test]
fn options_without_an_effect_are_named() {
    let said = |file: &str| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("downbeat.toml"), format!("repository = 'models'\n[device]\n{file}"))
            .unwrap();
        resolve(&flags(&[]), Process::Server, folder.path()).unwrap().options.notices.join("\n")
    };
    for key in ["share_batches = 'slab'", "share_period_s = 1", "share_hold_down_s = 1"] {
        let name = key.split(' ').next().unwrap();
        assert!(said(key).contains(&format!("{name} has no effect without shares = \"auto\"")), "{}", said(key));
        assert_eq!(said(&format!("policy = 'windowed'\nshares = 'auto'\n{key}")), "");
    }
    assert!(said("shares = 'auto'").contains("no effect on models with the policy exclusive"));
    assert_eq!(said("shares = 'auto'\n[[device.groups]]\nmodels = ['m']\npolicy = 'windowed'"), "");
    assert_eq!(said("shares = 'fixed'\nshare_batches = 'policy'"), "");
}

#[test]
fn a_word_that_is_no_log_level_is_refused() {
    let said = error("log.level = 'wran'");
    assert!(said.contains("1:13: 'wran' is no log level") && said.ends_with("did you mean 'warn'?"), "{said}");
    let said = error("log.level = 'warn,downbeat_server'");
    assert!(said.contains("'downbeat_server' is no log level"), "{said}");
    assert_eq!(merged("", &["m", "--log-level", "info,downbeat_models=debug"]).log.level, "info,downbeat_models=debug");
}

#[test]
fn a_misspelled_variable_names_the_one_that_was_meant() {
    let said = |name| misspelled(name).unwrap_or_default();
    assert_eq!(
        said("DOWNBEAT_HTTP_PROT"),
        "DOWNBEAT_HTTP_PROT in the environment sets no option; did you mean 'DOWNBEAT_HTTP_PORT'?"
    );
    assert_eq!(said("DOWNBEAT_ALLOW_METRICS"), "", "Triton's flag is hidden");
    assert_eq!(said("DOWNBEAT_NO_TF32"), "DOWNBEAT_NO_TF32 in the environment has no effect: use the flag --no-tf32");
    assert_eq!(said("DOWNBEAT_"), "");
    let silent = ["PATH", "DOWNBEAT_HTTP_PORT", "DOWNBEAT_CONFIG", "DOWNBEAT_BIN", "DOWNBEAT_TEST_SEED"];
    let of_kubernetes = [
        "DOWNBEAT_SERVICE_HOST",
        "DOWNBEAT_SERVICE_PORT",
        "DOWNBEAT_SERVICE_PORT_HTTP",
        "DOWNBEAT_SERVICE_PORT_GRPC",
        "DOWNBEAT_PORT",
        "DOWNBEAT_PORT_8000_TCP",
        "DOWNBEAT_PORT_8000_TCP_PROTO",
        "DOWNBEAT_PORT_8000_TCP_PORT",
        "DOWNBEAT_PORT_8000_TCP_ADDR",
    ];
    for name in [&silent[..], &of_kubernetes].concat() {
        assert_eq!(said(name), "");
    }
}
