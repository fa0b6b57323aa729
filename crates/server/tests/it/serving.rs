//! The way of a request through registry, driver and device, on emulated models. Each request is
//! answered exactly once, on time or with an error.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use downbeat_core::cluster::Output;
use downbeat_core::journal::cluster::{ClusterRecords, Decision, Input};
use downbeat_core::journal::{Record, read, replay};
use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{AutoscaleOptions, DispatchPolicy, DropPolicy, ModelControl, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A repository of emulated models.
pub struct Models(TempDir);

impl Models {
    pub fn new() -> Self {
        Models(TempDir::new().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A model `l(b) = alpha b + beta` with input `x` [-1, dim] and output `y` [-1, 1].
    pub fn add(&self, name: &str, version: u64, latency: (f64, f64), dim: i64, config: &str) {
        let folder = self.path().join(name).join(version.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let (alpha, beta) = latency;
        let model = format!(
            "alpha_ms = {alpha:?}\nbeta_ms = {beta:?}\nmax_batch = 8\n\
             [[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, {dim}]\n\
             [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n"
        );
        std::fs::write(folder.join("model.emulated.toml"), model).unwrap();
        let config = format!("name: \"{name}\"\nbackend: \"downbeat_emulated\"\n{config}\n");
        std::fs::write(self.path().join(name).join("config.pbtxt"), config).unwrap();
    }

    pub fn options(&self) -> ServerOptions {
        let mut options = ServerOptions::new(self.path().to_owned());
        options.engine = downbeat_service::options::EngineChoice::Emulated;
        options.drop = Some(DropPolicy::HeadDrop);
        // However long requests wait on a busy machine.
        options.max_queue_wait = downbeat_core::Duration::from_millis(3_600_000);
        options.profiling.cache_dir = Some(self.path().join(".profiles"));
        // For emulated models the server measures only the overlap of two lanes.
        options.profiling.budget = downbeat_core::Duration::from_millis(60_000);
        options
    }

    pub async fn serve(&self, change: impl FnOnce(&mut ServerOptions)) -> Registry {
        let mut options = self.options();
        options.model_control = ModelControl::Explicit { load: vec!["*".to_owned()] };
        change(&mut options);
        let registry = Registry::open(Arc::new(options)).unwrap();
        for name in registry.wanted_at_start().to_vec() {
            registry.load_model(&name, LoadOverrides::default(), Arc::new(())).await.unwrap();
        }
        registry.set_started();
        registry
    }
}

pub fn request(model: &str, rows: i64, dim: i64) -> InferRequest {
    InferRequest {
        model_name: model.to_owned(),
        inputs: vec![InferTensor {
            name: "x".to_owned(),
            datatype: DataType::Fp32,
            shape: vec![rows, dim],
            parameters: Default::default(),
            data: vec![0; (rows * dim * 4) as usize].into(),
        }],
        ..Default::default()
    }
}

pub fn with_timeout(mut request: InferRequest, timeout: Duration) -> InferRequest {
    request.parameters.insert("timeout".to_owned(), Parameter::Uint64(timeout.as_micros() as u64));
    request
}

pub type Answer = tokio::task::JoinHandle<Result<InferResponse, ServiceError>>;

/// Sends a request. On return, the request is in its queue, on its device or answered, however busy
/// the machine is.
pub async fn send(registry: &Registry, request: InferRequest) -> Answer {
    let registry = registry.clone();
    let mut answer = Box::pin(async move { registry.infer(request).await });
    match std::future::poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await {
        Poll::Pending => tokio::spawn(answer),
        Poll::Ready(answer) => {
            let answer = tokio::spawn(std::future::ready(answer));
            until(|| answer.is_finished()).await;
            answer
        }
    }
}

/// Waits until `condition` holds, which it does soon if it ever does.
pub async fn until(condition: impl Fn() -> bool) {
    for _ in 0..120_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(ms(5)).await;
    }
    panic!("what was waited for did not happen within 10 minutes");
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A metric's value, summed over its labels.
pub fn metric(registry: &Registry, name: &str, label: &str) -> f64 {
    let text = registry.metrics().unwrap();
    let lines = text.lines().filter(|l| l.starts_with(name) && l.contains(label));
    lines.filter_map(|l| l.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

#[tokio::test]
async fn requests_are_answered_and_counted_by_their_batch_dimension() {
    let models = Models::new();
    models.add("m", 1, (1.0, 5.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let answer = registry.infer(request("m", 3, 4)).await.unwrap();
    assert_eq!(answer.outputs[0].shape, [3, 1]);
    assert_eq!((answer.model_name.as_str(), answer.model_version.as_str()), ("m", "1"));
    registry.infer(request("m", 1, 4)).await.unwrap();
    let statistics = &registry.statistics("m", "").unwrap()[0];
    assert_eq!((statistics.inference_count, statistics.execution_count), (4, 2));
    let sizes: Vec<u64> = statistics.batch_stats.iter().map(|b| b.batch_size).collect();
    assert_eq!(sizes, [1, 3]);
    assert_eq!(metric(&registry, "nv_inference_count", "m"), 4.0);
    assert_eq!(metric(&registry, "nv_inference_request_success", "m"), 2.0);
}

#[tokio::test]
async fn more_devices_are_advised_where_requests_are_refused_for_want_of_time() {
    let models = Models::new();
    models.add("m", 1, (1.0, 50.0), 4, "");
    let registry = models
        .serve(|options| {
            let window = downbeat_core::Duration::from_millis(50);
            options.autoscale =
                Some(AutoscaleOptions { grow_window: window, min_requests: 4, ..AutoscaleOptions::default() });
        })
        .await;
    // Each look at the advice takes a sample, and a window begins with the last sample of its age.
    let before = registry.autoscale().unwrap();
    assert_eq!((before.devices, before.change, before.reason, before.bad_rate), (1, 0, "settling", None));
    // Two requests that can be in time, and two that cannot.
    let requests = async || {
        for timeout in [60_000, 10, 60_000, 10] {
            let answer = registry.infer(with_timeout(request("m", 1, 4), ms(timeout))).await;
            assert_eq!(answer.is_ok(), timeout > 10, "{answer:?}");
        }
    };
    requests().await;
    let after = registry.autoscale().unwrap();
    assert_eq!((after.change, after.reason, after.bad_rate), (1, "overloaded", Some(0.5)), "1 * 0.5 / (1 - 0.5)");
    requests().await;
    let metrics = registry.metrics().unwrap();
    for line in ["autoscale_change_devices 1", "autoscale_devices 2", "autoscale_bad_rate 0.5", "devices 1"] {
        assert!(metrics.contains(&format!("\ndownbeat_{line}\n")), "{line}: {metrics}");
    }
    let without = models.serve(|options| options.autoscale = None).await;
    assert_eq!(without.autoscale(), None);
}

#[tokio::test]
async fn what_comes_while_the_device_works_is_one_batch() {
    let models = Models::new();
    models.add("m", 1, (1.0, 100.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let first = send(&registry, request("m", 1, 4)).await;
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(send(&registry, request("m", 1, 4)).await);
    }
    assert_eq!(metric(&registry, "nv_inference_pending_request_count", "m"), 4.0);
    first.await.unwrap().unwrap();
    for other in others {
        other.await.unwrap().unwrap();
    }
    let statistics = &registry.statistics("m", "").unwrap()[0];
    assert_eq!((statistics.inference_count, statistics.execution_count), (5, 2));
    assert_eq!(metric(&registry, "nv_inference_pending_request_count", "m"), 0.0);
}

#[tokio::test]
async fn requests_of_different_shapes_never_share_a_batch() {
    let models = Models::new();
    models.add("m", 1, (1.0, 100.0), -1, "");
    let registry = models.serve(|_| {}).await;
    let first = send(&registry, request("m", 1, 4)).await;
    let mut others = Vec::new();
    for dim in [5, 6, 5, 6, 5] {
        others.push(send(&registry, request("m", 1, dim)).await);
    }
    first.await.unwrap().unwrap();
    for other in others {
        other.await.unwrap().unwrap();
    }
    let statistics = &registry.statistics("m", "").unwrap()[0];
    assert_eq!((statistics.inference_count, statistics.execution_count), (6, 3));
}

#[tokio::test]
async fn the_bound_of_a_queue_is_exact_and_says_when_to_come_back() {
    let models = Models::new();
    models.add("m", 1, (1.0, 300.0), 4, "max_batch_size: 2");
    let registry = models.serve(|options| options.max_queue_size = 3).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let two = send(&registry, request("m", 2, 4)).await;
    // Three places hold two items. A request of two more items does not fit, a request of one does.
    let too_much = registry.infer(request("m", 2, 4)).await.unwrap_err();
    let one = send(&registry, request("m", 1, 4)).await;
    let full = registry.infer(request("m", 1, 4)).await.unwrap_err();
    for error in [too_much, full] {
        let ServiceError::QueueFull { message, retry_after } = error else { panic!("{error:?}") };
        assert_eq!(message, "Exceeds maximum queue size: the queue of model 'm' holds at most 3; try again later");
        assert!(retry_after > downbeat_core::Duration::ZERO);
    }
    for answer in [running, two, one] {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "queue_full"), 2.0);
    registry.infer(request("m", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn a_model_holds_at_most_half_of_the_byte_budget() {
    let models = Models::new();
    models.add("slow", 1, (1.0, 300.0), 256, "max_batch_size: 1");
    models.add("other", 1, (1.0, 0.0), 256, "max_batch_size: 1");
    // A request has 1,024 bytes of inputs; half of the budget holds two.
    let registry = models.serve(|options| options.max_in_flight_bytes = Some(4_096)).await;
    let (running, waiting) =
        (send(&registry, request("slow", 1, 256)).await, send(&registry, request("slow", 1, 256)).await);
    let full = registry.infer(request("slow", 1, 256)).await.unwrap_err();
    let ServiceError::QueueFull { message, retry_after } = full else { panic!("{full:?}") };
    assert_eq!(
        message,
        "Exceeds maximum queue size: the inputs of the requests of model 'slow' in flight are 2048 bytes, and it may have 2048, \
         half of --max-in-flight-bytes; try again later"
    );
    assert!(retry_after > downbeat_core::Duration::ZERO);
    registry.infer(request("other", 1, 256)).await.unwrap();
    for answer in [running, waiting] {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "queue_full"), 1.0);
    registry.infer(request("slow", 1, 256)).await.unwrap();
}

#[tokio::test]
async fn one_request_may_always_be_there_however_large_it_is() {
    let models = Models::new();
    models.add("m", 1, (1.0, 0.0), 256, "max_batch_size: 1");
    let registry = models.serve(|options| options.max_in_flight_bytes = Some(1_024)).await;
    registry.infer(request("m", 1, 256)).await.unwrap();
}

#[tokio::test]
async fn a_deadline_that_cannot_be_met_is_refused_at_once() {
    let models = Models::new();
    models.add("m", 1, (1.0, 200.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let answer = send(&registry, with_timeout(request("m", 1, 4), ms(150))).await;
    assert!(answer.is_finished(), "the answer comes before the deadline, not at it");
    let error = answer.await.unwrap().unwrap_err();
    assert!(matches!(error, ServiceError::DeadlineExceeded(_)), "{error:?}");
    assert!(error.to_string().contains("even on an idle device"), "{error}");
    registry.infer(with_timeout(request("m", 1, 4), ms(2_000))).await.unwrap();
}

#[tokio::test]
async fn a_deadline_that_the_running_batch_makes_impossible_is_refused_at_once() {
    let models = Models::new();
    models.add("m", 1, (1.0, 400.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let running = send(&registry, request("m", 1, 4)).await;
    // The request needs 401 ms, and the device is busy for nearly as long; it has 500.
    let answer = send(&registry, with_timeout(request("m", 1, 4), ms(500))).await;
    assert!(answer.is_finished(), "known at arrival, said at arrival");
    let error = answer.await.unwrap().unwrap_err();
    assert!(!running.is_finished());
    assert!(error.to_string().contains("because all devices are busy"), "{error}");
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_queued_request_is_dropped_when_it_becomes_hopeless() {
    let models = Models::new();
    models.add("m", 1, (1.0, 400.0), 4, "max_batch_size: 1");
    let registry = models.serve(|_| {}).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let next = send(&registry, with_timeout(request("m", 1, 4), ms(1_000))).await;
    // The request could be the next, but for the one before. It becomes hopeless 401 ms before its
    // deadline, when that one runs.
    let hopeless = send(&registry, with_timeout(request("m", 1, 4), ms(1_050))).await;
    let error = hopeless.await.unwrap().unwrap_err();
    assert!(!next.is_finished(), "the drop waited for the device");
    assert!(error.to_string().contains("could no longer finish by its deadline"), "{error}");
    running.await.unwrap().unwrap();
    next.await.unwrap().unwrap();
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "deadline_hopeless"), 1.0);
}

#[tokio::test]
async fn a_refused_request_does_not_cost_its_batch_their_answers() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models");
    let mut options = ServerOptions::new(models);
    options.engine = downbeat_service::options::EngineChoice::Rten;
    // The model gathers requests that come within a second.
    options.dispatch = DispatchPolicy::Deferred;
    options.default_slo = Some(downbeat_core::Duration::from_millis(1_000));
    options.drop = Some(DropPolicy::None);
    options.profiling.enabled = false;
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.load_model("encoder", LoadOverrides::default(), Arc::new(())).await.unwrap();
    let tokens = |token: i64| {
        let tensor = |name: &str, value: i64| InferTensor {
            name: name.to_owned(),
            datatype: DataType::Int64,
            shape: vec![1, 4],
            parameters: Default::default(),
            data: value.to_le_bytes().repeat(4).into(),
        };
        let inputs = vec![tensor("input_ids", token), tensor("attention_mask", 1)];
        InferRequest { model_name: "encoder".to_owned(), inputs, ..Default::default() }
    };
    let good = send(&registry, tokens(1)).await;
    let bad = send(&registry, tokens(i64::MAX)).await;
    let also_good = send(&registry, tokens(1)).await;
    let (good, also_good) = (good.await.unwrap().unwrap(), also_good.await.unwrap().unwrap());
    assert_eq!(good.outputs[0].data, also_good.outputs[0].data);
    let error = bad.await.unwrap().unwrap_err();
    assert!(matches!(error, ServiceError::Internal(_)), "{error:?}");
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "engine_error"), 1.0);
    assert_eq!(metric(&registry, "nv_inference_request_success", "encoder"), 2.0);
}

#[tokio::test]
async fn queue_timeouts_fire_while_the_device_is_busy() {
    let models = Models::new();
    let policy = "max_batch_size: 8 dynamic_batching { default_queue_policy { \
                  timeout_action: REJECT default_timeout_microseconds: 50000 } }";
    models.add("m", 1, (1.0, 400.0), 4, policy);
    let registry = models.serve(|_| {}).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let error = send(&registry, request("m", 1, 4)).await.await.unwrap().unwrap_err();
    assert!(!running.is_finished(), "the timeout waited for the device");
    assert!(error.to_string().contains("longer than its queue policy allows"), "{error}");
    running.await.unwrap().unwrap();
}

/// Triton's `timeout_action: DELAY`: a request whose time in the queue is up goes behind the
/// others, and is answered.
#[tokio::test]
async fn a_requests_timeout_delays_it_where_the_policy_says_delay() {
    for (default, own) in [("", ms(50)), ("default_timeout_microseconds: 50000", Duration::from_secs(60))] {
        let models = Models::new();
        let policy = format!(
            "max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ timeout_action: DELAY {default} \
             allow_timeout_override: true }} }}"
        );
        models.add("m", 1, (1.0, 500.0), 4, &policy);
        let registry = models.serve(|_| {}).await;
        let running = send(&registry, request("m", 1, 4)).await;
        let delayed = send(&registry, with_timeout(request("m", 1, 4), own)).await;
        let patient = default.is_empty().then(|| request("m", 1, 4));
        let patient = patient.unwrap_or_else(|| with_timeout(request("m", 1, 4), Duration::from_micros(1)));
        let next = send(&registry, patient).await;
        running.await.unwrap().unwrap();
        delayed.await.unwrap().unwrap();
        assert!(!default.is_empty() || next.is_finished(), "the request without a timeout goes first");
        next.await.unwrap().unwrap();
        assert_eq!(registry.statistics("m", "").unwrap()[0].execution_count, 3);
    }
}

#[tokio::test]
async fn a_requests_timeout_counts_for_nothing_where_delay_allows_none() {
    let models = Models::new();
    let policy = "max_batch_size: 1 dynamic_batching { default_queue_policy { timeout_action: DELAY } }";
    models.add("m", 1, (1.0, 100.0), 4, policy);
    let registry = models.serve(|_| {}).await;
    registry.infer(with_timeout(request("m", 1, 4), Duration::from_micros(1))).await.unwrap();
}

/// In Triton a request that stays alone waits for ever.
#[tokio::test]
async fn a_queue_delay_that_never_passes_answers_all_the_same() {
    let models = Models::new();
    let config = format!("max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: {} }}", u64::MAX);
    models.add("m", 1, (1.0, 1.0), 4, &config);
    let registry = models.serve(|options| options.max_queue_wait = downbeat_core::Duration::from_millis(300)).await;
    let alone = send(&registry, request("m", 1, 4)).await;
    until(|| alone.is_finished()).await;
    alone.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_the_queue() {
    let models = Models::new();
    models.add("m", 1, (1.0, 200.0), 4, "max_batch_size: 1");
    let registry = models.serve(|options| options.max_queue_size = 1).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let gone = send(&registry, request("m", 1, 4)).await;
    gone.abort();
    until(|| metric(&registry, "downbeat_requests_not_answered_total", "cancelled") == 1.0).await;
    // The cancelled request's place in the queue is free again.
    let next = send(&registry, request("m", 1, 4)).await;
    running.await.unwrap().unwrap();
    next.await.unwrap().unwrap();
    assert_eq!(registry.statistics("m", "").unwrap()[0].execution_count, 2);
}

#[tokio::test]
async fn a_request_that_overruns_its_timeout_is_told_so_and_wedges_nothing() {
    let models = Models::new();
    models.add("m", 1, (1.0, 300.0), 4, "");
    // Without drops the scheduler starts requests that cannot be in time.
    let registry = models.serve(|options| options.drop = Some(DropPolicy::None)).await;
    let error = registry.infer(with_timeout(request("m", 1, 4), ms(50))).await.unwrap_err();
    assert!(error.to_string().contains("did not finish within the request's timeout of 50 ms"), "{error}");
    registry.infer(request("m", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn deferred_dispatch_gathers_a_batch_that_eager_would_not() {
    // Symphony §3.1: a candidate does not start before its frontrun moment.
    for (policy, launches) in [(DispatchPolicy::Deferred, 1), (DispatchPolicy::Eager, 2)] {
        let models = Models::new();
        // The candidate of three may start within the 60 ms that a fourth would take.
        models.add("m", 1, (60.0, 40.0), 4, "parameters { key: \"slo_ms\" value { string_value: \"800\" } }");
        let registry = models.serve(|options| options.dispatch = policy.clone()).await;
        let answers = [
            send(&registry, request("m", 1, 4)).await,
            send(&registry, request("m", 1, 4)).await,
            send(&registry, request("m", 1, 4)).await,
        ];
        for answer in answers {
            answer.await.unwrap().unwrap();
        }
        assert_eq!(registry.statistics("m", "").unwrap()[0].execution_count, launches, "{policy:?}");
        assert_eq!(metric(&registry, "downbeat_requests_late_total", "m"), 0.0, "{policy:?}");
    }
}

#[tokio::test]
async fn batch_delay_counts_from_the_first_arrival() {
    let models = Models::new();
    let config = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 200000 }";
    models.add("m", 1, (1.0, 1.0), 4, config);
    let registry = models.serve(|_| {}).await;
    let first = send(&registry, request("m", 1, 4)).await;
    // Each request arrives within the delay of the one before. Counted from the last arrival, the
    // first request would wait until the batch is full.
    let mut others = Vec::new();
    while !first.is_finished() && others.len() < 7 {
        others.push(send(&registry, request("m", 1, 4)).await);
        tokio::time::sleep(ms(70)).await;
    }
    first.await.unwrap().unwrap();
    assert!(others.len() < 7, "the first waited for others");
    for other in others {
        other.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_model_that_cannot_meet_its_slo_says_so_at_once() {
    let models = Models::new();
    models.add("m", 1, (1.0, 100.0), 4, "parameters { key: \"slo_ms\" value { string_value: \"50\" } }");
    let registry = models.serve(|_| {}).await;
    let error = registry.infer(request("m", 1, 4)).await.unwrap_err();
    assert!(error.to_string().contains("the model's slo_ms"), "{error}");
    assert_eq!(metric(&registry, "downbeat_requests_late_total", "m"), 0.0);
}

/// Judged by its number of elements, the longer request would take a hundred thousand times as
/// long. It makes no difference which request has the deadline.
#[tokio::test]
async fn a_guess_keeps_no_shape_from_being_tried() {
    for (config, timeout) in
        [("", Some(ms(5_000))), ("parameters { key: \"slo_ms\" value { string_value: \"5000\" } }", None)]
    {
        let models = Models::new();
        models.add("m", 1, (1.0, 1.0), -1, config);
        let registry = models.serve(|_| {}).await;
        for elements in [2, 200_000, 2, 200_000, 200_000, 4] {
            let request = request("m", 1, elements);
            let request = timeout.map_or(request.clone(), |timeout| with_timeout(request, timeout));
            registry.infer(request).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_reload_loses_no_request_and_a_broken_version_changes_nothing() {
    let models = Models::new();
    models.add("m", 1, (1.0, 20.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let load = {
        let registry = registry.clone();
        tokio::spawn(async move {
            let mut versions = Vec::new();
            while versions.last().is_none_or(|version| version == "1") {
                let answer = registry.infer(request("m", 1, 4)).await.expect("no request is lost in a reload");
                versions.push(answer.model_version);
            }
            versions
        })
    };
    until(|| metric(&registry, "nv_inference_request_success", "m") >= 3.0).await;
    models.add("m", 2, (1.0, 20.0), 4, "");
    registry.load("m", LoadOverrides::default()).await.unwrap();
    let versions = load.await.unwrap();
    assert!(versions.len() > 3 && versions.last().is_some_and(|version| version == "2"), "{versions:?}");

    models.add("m", 3, (1.0, 20.0), 4, "");
    std::fs::write(models.path().join("m/3/model.emulated.toml"), "alpha_ms = nonsense").unwrap();
    let error = registry.load("m", LoadOverrides::default()).await.unwrap_err();
    assert!(error.to_string().contains("version 3"), "{error}");
    assert_eq!(registry.infer(request("m", 1, 4)).await.unwrap().model_version, "2");
    assert!(registry.is_model_ready("m", "") && registry.is_ready());
}

#[tokio::test]
async fn counts_go_on_after_a_reload_and_begin_anew_after_an_unload() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let counts = || {
        let statistics = &registry.statistics("m", "").unwrap()[0];
        let failed = statistics.inference_stats.as_ref().and_then(|stats| stats.fail.as_ref()).map(|fail| fail.count);
        (statistics.execution_count, failed, registry.missed("m", "").unwrap().requests.len())
    };
    let answer_and_miss = async || {
        registry.infer(request("m", 1, 4)).await.unwrap();
        let hopeless = with_timeout(request("m", 1, 4), Duration::from_micros(1));
        registry.infer(hopeless).await.unwrap_err();
    };
    answer_and_miss().await;
    assert_eq!(counts(), (1, Some(1), 1));
    registry.load_again("m").await;
    assert_eq!(counts(), (1, Some(1), 1), "loaded again by the server itself");
    answer_and_miss().await;
    registry.load("m", LoadOverrides::default()).await.unwrap();
    assert_eq!(counts(), (2, Some(2), 2), "loaded again by a client");
    registry.unload("m").await.unwrap();
    registry.load("m", LoadOverrides::default()).await.unwrap();
    assert_eq!(counts(), (0, Some(0), 0));
}

#[tokio::test]
async fn a_configuration_by_request_holds_until_files_change_or_unload() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let load = async |config: Option<&str>| {
        let overrides = LoadOverrides { config: config.map(str::to_owned), ..LoadOverrides::default() };
        registry.load("m", overrides).await.unwrap();
        registry.model_config("m", "").unwrap().max_batch_size
    };
    let own = load(None).await;
    let given = r#"{"backend": "downbeat_emulated", "max_batch_size": 3}"#;
    assert_eq!((load(Some(given)).await, load(None).await), (3, 3));
    registry.unload("m").await.unwrap();
    assert_eq!(load(None).await, own, "unloaded");
    assert_eq!(load(Some(given)).await, 3);
    models.add("m", 1, (1.0, 1.0), 4, "max_batch_size: 2");
    assert_eq!(load(None).await, 2, "the files are others");
}

#[tokio::test]
async fn without_completion_a_folder_without_a_configuration_is_no_model() {
    let models = Models::new();
    let config = "max_batch_size: 8 input { name: \"x\" data_type: TYPE_FP32 dims: 4 } output { name: \"y\" data_type: TYPE_FP32 dims: 1 }";
    models.add("whole", 1, (1.0, 1.0), 4, config);
    models.add("bare", 1, (1.0, 1.0), 4, "");
    std::fs::remove_file(models.path().join("bare/config.pbtxt")).unwrap();
    let registry = models.serve(|options| options.auto_complete_config = false).await;
    assert!(registry.is_ready());
    assert_eq!(registry.wanted_at_start(), ["whole"]);
    let error = registry.load("bare", LoadOverrides::default()).await.unwrap_err().to_string();
    assert!(error.starts_with("failed to load 'bare', failed to poll from model repository"), "{error}");
    let config = r#"{"backend": "downbeat_emulated", "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}], "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}"#;
    registry.load("bare", LoadOverrides { config: Some(config.to_owned()), ..Default::default() }).await.unwrap();
    registry.infer(request("bare", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn a_server_whose_models_come_by_request_is_ready_without_one() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "");
    let registry = models.serve(|options| options.model_control = ModelControl::Explicit { load: Vec::new() }).await;
    assert!(registry.is_ready(), "as Triton in mode explicit without --load-model");
    registry.load("m", LoadOverrides::default()).await.unwrap();
    assert!(registry.is_ready());
    registry.unload("m").await.unwrap();
    assert!(registry.is_ready(), "a client unloaded it");
    let registry = models.serve(|_| {}).await;
    registry.unload("m").await.unwrap();
    assert!(registry.is_ready(), "a client unloaded all that were loaded at start");
}

#[tokio::test]
async fn a_server_on_an_empty_folder_is_not_ready_unless_it_may_be_empty() {
    assert!(!Models::new().serve(|_| {}).await.is_ready(), "explicit with --load-model *");
    assert!(!Models::new().serve(|options| options.model_control = ModelControl::None).await.is_ready());
    assert!(Models::new().serve(|options| options.allow_empty = true).await.is_ready());
}

#[tokio::test]
async fn a_model_in_two_repositories_is_refused_and_the_others_are_served() {
    let (one, two) = (Models::new(), Models::new());
    one.add("a", 1, (1.0, 1.0), 4, "");
    one.add("both", 1, (1.0, 1.0), 4, "");
    two.add("b", 1, (1.0, 1.0), 4, "");
    two.add("both", 1, (1.0, 1.0), 4, "");
    let options = ServerOptions { repositories: vec![one.path().into(), two.path().into()], ..one.options() };
    let registry = Registry::open(Arc::new(options)).unwrap();
    assert_eq!(registry.wanted_at_start(), ["a", "b", "both"]);
    for name in ["a", "b"] {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
        registry.infer(request(name, 1, 4)).await.unwrap();
    }
    let error = registry.load_model("both", LoadOverrides::default(), Arc::new(())).await.unwrap_err().to_string();
    assert!(error.contains("model appears in two or more repositories"), "{error}");
    assert!(error.contains(&one.path().display().to_string()) && error.contains(&two.path().display().to_string()));
    registry.set_started();
    assert!(!registry.is_ready(), "a model that was asked for is missing");
}

#[tokio::test]
async fn loading_by_request_is_refused_unless_it_was_allowed_at_start() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "");
    let registry = models.serve(|options| options.model_control = ModelControl::None).await;
    for refused in [registry.load("m", LoadOverrides::default()).await, registry.unload("m").await] {
        let error = refused.unwrap_err();
        assert!(matches!(error, ServiceError::Unavailable(_)) && error.to_string().contains("explicit"), "{error}");
    }
    registry.infer(request("m", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn an_unloaded_model_answers_what_is_in_and_refuses_what_comes() {
    let models = Models::new();
    models.add("m", 1, (1.0, 200.0), 4, "");
    models.add("other", 1, (1.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let waiting = send(&registry, request("m", 1, 4)).await;
    registry.unload("m").await.unwrap();
    running.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
    let error = registry.infer(request("m", 1, 4)).await.unwrap_err();
    assert_eq!(error.to_string(), "Request for unknown model: 'm' has no available versions: UNAVAILABLE: unloaded");
    let states: Vec<_> = registry.repository_index(false).into_iter().map(|e| (e.name, e.state)).collect();
    assert_eq!(states, [("m".to_owned(), "UNAVAILABLE".to_owned()), ("other".to_owned(), "READY".to_owned())]);
    registry.infer(request("other", 1, 4)).await.unwrap();
    registry.load("m", LoadOverrides::default()).await.unwrap();
    registry.infer(request("m", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn a_broken_model_does_not_keep_the_others_from_being_served() {
    let models = Models::new();
    models.add("bad", 1, (1.0, 1.0), 4, "max_batch_sice: 4");
    models.add("good", 1, (1.0, 1.0), 4, "");
    let registry = Registry::open(Arc::new(models.options())).unwrap();
    let error = registry.load_model("bad", LoadOverrides::default(), Arc::new(())).await.unwrap_err();
    assert!(error.to_string().contains("config.pbtxt:3"), "file and line: {error}");
    registry.load_model("good", LoadOverrides::default(), Arc::new(())).await.unwrap();
    registry.set_started();
    registry.infer(request("good", 1, 4)).await.unwrap();
    assert!(!registry.is_ready(), "strict readiness: a model that was asked for is missing");
    let error = registry.infer(request("bad", 1, 4)).await.unwrap_err();
    assert!(
        error.to_string().starts_with(
            "Request for unknown model: 'bad' has no available versions: UNAVAILABLE: failed to load 'bad'"
        ),
        "{error}"
    );
}

#[tokio::test]
async fn unknown_names_say_what_there_is() {
    let models = Models::new();
    models.add("m", 7, (1.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let told = async |model: &str, version: &str, output: &str| {
        let mut request = request(model, 1, 4);
        request.model_version = version.to_owned();
        if !output.is_empty() {
            request.outputs =
                vec![downbeat_protocol::RequestedOutput { name: output.to_owned(), ..Default::default() }];
        }
        registry.infer(request).await.unwrap_err().to_string()
    };
    assert!(told("n", "", "").await.starts_with("Request for unknown model: 'n' is not found"));
    assert_eq!(told("m", "2", "").await, "Request for unknown model: 'm' version 2 is not found; ready: 7");
    assert_eq!(
        told("m", "two", "").await,
        "failed to get model version from specified version string 'two': versions of model 'm' are positive numbers"
    );
    assert_eq!(told("m", "", "z").await, "unexpected inference output 'z' for model 'm'; its outputs are [\"y\"]");
    registry.infer(request("m", 1, 4)).await.unwrap();
}

#[tokio::test]
async fn a_higher_priority_goes_first() {
    let models = Models::new();
    let config = "max_batch_size: 1 dynamic_batching { priority_levels: 2 default_priority_level: 2 }";
    models.add("m", 1, (1.0, 100.0), 4, config);
    let registry = models.serve(|_| {}).await;
    let running = send(&registry, request("m", 1, 4)).await;
    let ordinary = send(&registry, request("m", 1, 4)).await;
    let mut urgent = request("m", 1, 4);
    urgent.parameters.insert("priority".to_owned(), Parameter::Uint64(1));
    let urgent = send(&registry, urgent).await;
    running.await.unwrap().unwrap();
    urgent.await.unwrap().unwrap();
    assert!(!ordinary.is_finished(), "the ordinary request went before the urgent one");
    ordinary.await.unwrap().unwrap();
}

/// A client's request cannot decide which request goes first: the model's configuration does.
#[tokio::test]
async fn a_priority_means_nothing_to_a_model_without_levels_and_to_other_models() {
    let models = Models::new();
    models.add("m", 1, (1.0, 100.0), 4, "max_batch_size: 1");
    let config = "max_batch_size: 1 dynamic_batching { priority_levels: 2 default_priority_level: 2 }";
    models.add("with_levels", 1, (1.0, 100.0), 4, config);
    // The server has one executor: both models wait for their turn.
    let registry = models.serve(|options| options.devices = 1).await;
    let urgent = |model: &str, priority: u64| {
        let mut request = request(model, 1, 4);
        request.parameters.insert("priority".to_owned(), Parameter::Uint64(priority));
        request
    };
    for model in ["m", "with_levels"] {
        let running = send(&registry, request("m", 1, 4)).await;
        let first = send(&registry, request("m", 1, 4)).await;
        let second = send(&registry, urgent(model, 1)).await;
        running.await.unwrap().unwrap();
        first.await.unwrap().unwrap();
        assert!(!second.is_finished(), "a request for {model} went before one that had come earlier");
        second.await.unwrap().unwrap();
    }
    // A level that does not exist counts as the default level.
    for priority in [0, 3, u64::MAX] {
        registry.infer(urgent("with_levels", priority)).await.unwrap();
    }
}

/// The rehearsal replays the past arrivals, and the server applies and reports the best behaviour.
#[tokio::test]
async fn what_adaptive_models_do_is_rehearsed() {
    let models = Models::new();
    models.add(
        "m",
        1,
        (0.1, 2.0),
        4,
        "max_batch_size: 8 parameters { key: \"slo_ms\" value { string_value: \"80\" } }",
    );
    let status = |registry: &Registry| serde_json::to_value(registry.scheduler().unwrap()).unwrap();
    models.add("fixed", 1, (0.1, 2.0), 4, "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100 }");
    let without = models.serve(|options| options.rehearsal_cpu = 0.0).await;
    send(&without, request("m", 1, 4)).await.await.unwrap().unwrap();
    let said = status(&without);
    assert_eq!((&said["cpu"]["budget"], &said["last_trial"]), (&json!(0.0), &Value::Null));
    assert_eq!(said["order"], json!({ "order": "shortest", "by": "policy" }));
    let of = |said: &Value, model: &str| {
        let models = said["models"].as_array().unwrap();
        models.iter().find(|said| said["model"] == model).cloned().unwrap_or_default()
    };
    assert_eq!(
        (of(&said, "m")["by"].as_str(), of(&said, "fixed")["by"].as_str()),
        (Some("start_rule"), Some("policy"))
    );
    assert!(of(&said, "m")["behaviour"]["wait"].is_number() && of(&said, "fixed")["behaviour"].is_null(), "{said}");
    drop(without);

    let folder = models.path().join("decisions");
    let registry = models
        .serve(|options| {
            options.rehearsal_cpu = 0.9;
            options.scheduler_shards = 1;
            options.decision_log = Some(folder.clone());
        })
        .await;
    // The first trial is counted a moment before it is reported.
    while metric(&registry, "downbeat_rehearsal_trials_total", "") < 1.0 || status(&registry)["last_trial"].is_null() {
        // On a busy machine some requests miss their deadlines, and the rehearsal learns of these
        // misses.
        if let Err(error) = send(&registry, request("m", 1, 4)).await.await.unwrap() {
            assert!(error.to_string().contains("deadline"), "{error}");
        }
    }
    assert!(metric(&registry, "downbeat_rehearsal_cpu_seconds_total", "") > 0.0);
    assert_eq!(metric(&registry, "downbeat_rehearsal_arrivals_lost_total", ""), 0.0);
    let said = status(&registry);
    assert!(said["trials"].as_u64() >= Some(1) && said["cpu"]["used"].as_f64() > Some(0.0), "{said}");
    let queue = &of(&said, "m")["queue"];
    let candidates = said["last_trial"]["candidates"].as_array().unwrap();
    assert_eq!(candidates.iter().filter(|candidate| candidate["taken"] == true).count(), 1, "{said}");
    for candidate in candidates {
        assert!((1..=3).contains(&candidate["bad"].as_array().unwrap().len()), "{said}");
        assert_eq!(candidate["behaviours"][0]["queues"], json!([queue]), "those that are adaptive: {said}");
    }
    let source = if said["changes"] == 0 { "start_rule" } else { "trial" };
    assert_eq!(of(&said, "m")["by"], source, "{said}");

    registry.close_decision_log();
    let log = std::fs::read(folder.join("shard-0.log")).unwrap();
    let trials: Vec<_> = read::<ClusterRecords>(&log)
        .unwrap()
        .1
        .filter_map(|entry| match entry.unwrap().record {
            Record::Input(_, Input::Trial(trial)) => Some(trial),
            _ => None,
        })
        .collect();
    assert!(trials.len() as u64 >= said["trials"].as_u64().unwrap(), "{} {said}", trials.len());
    assert!(trials.iter().zip(1..).all(|(trial, number)| trial.number == number), "each once");
    assert_eq!(replay(&log).unwrap().divergence, None);
}

/// Each part of the scheduler has a log that replays alike. The run has requests that are answered,
/// rejected, dropped and cancelled, and a model that is unloaded.
#[tokio::test]
async fn the_decision_log_of_a_run_plays_again() {
    let models = Models::new();
    models.add("slow", 1, (1.0, 150.0), 4, "");
    models.add("quick", 1, (1.0, 2.0), 4, "");
    let policy = "default_queue_policy { default_timeout_microseconds: 10000 }";
    models.add("impatient", 1, (1.0, 2.0), 4, &format!("dynamic_batching {{ {policy} }}"));
    let folder = models.path().join("decisions");
    let registry = models
        .serve(|options| {
            options.decision_log = Some(folder.clone());
            options.scheduler_shards = 2;
            options.devices = 2;
        })
        .await;
    for round in 0..3 {
        let mut answers = Vec::new();
        // Both devices are busy, for longer than the others wait.
        for model in ["slow", "slow", "impatient", "quick"] {
            answers.push(send(&registry, request(model, 8 - round, 4)).await);
        }
        answers[3].abort();
        answers.push(send(&registry, request("quick", 1, 4)).await);
        for answer in answers {
            let _ = answer.await;
        }
        let impossible = with_timeout(request("quick", 1, 4), ms(1));
        registry.infer(impossible).await.unwrap_err();
        registry.infer(request("quick", 2, 4)).await.unwrap();
    }
    registry.unload_model("slow").await.unwrap();
    registry.close_decision_log();

    let (mut dispatched, mut dropped, mut rejected, mut cancelled) = (0, 0, 0, 0);
    for name in ["shard-0", "shard-1", "matchmaker"] {
        let bytes = std::fs::read(folder.join(name).with_extension("log")).unwrap();
        let replayed = replay(&bytes).unwrap();
        assert_eq!(replayed.divergence, None, "{name}: {replayed:?}");
        assert!(replayed.decisions > 0, "{name}: {replayed:?}");
        for entry in read::<ClusterRecords>(&bytes).unwrap().1 {
            match entry.unwrap().record {
                Record::Decision(Decision::Output(Output::Dispatch { .. })) => dispatched += 1,
                Record::Decision(Decision::Output(Output::Drop { .. })) => dropped += 1,
                Record::Refused(_) => rejected += 1,
                Record::Input(_, Input::Cancel { .. }) => cancelled += 1,
                _ => {}
            }
        }
    }
    assert!(
        dispatched > 5 && dropped > 0 && rejected > 0 && cancelled > 0,
        "the run is real: {dispatched} dispatches, {dropped} drops, {rejected} rejections, {cancelled} cancellations"
    );
    assert!(metric(&registry, "downbeat_decision_log_bytes_total", "") > 0.0);
    assert_eq!(metric(&registry, "downbeat_decision_log_ended_total", "file"), 0.0);
}

#[test]
fn a_decision_log_that_cannot_be_written_is_said_at_once() {
    let models = Models::new();
    std::fs::write(models.path().join("file"), "").unwrap();
    let options = ServerOptions { decision_log: Some(models.path().join("file")), ..models.options() };
    let error = format!("{:#}", Registry::open(Arc::new(options)).err().unwrap());
    assert!(error.contains("give a folder that can be written with --decision-log"), "{error}");
}
