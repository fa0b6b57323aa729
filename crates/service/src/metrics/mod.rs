//! Prometheus metrics: Triton's names where Triton has one, so that dashboards carry over;
//! `downbeat_*` otherwise.

pub mod code_metrics;
pub mod gpu_metrics;
pub mod metric_table;
pub mod statistics;
pub mod trouble;

mod lanes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use downbeat_core::Duration;
use downbeat_core::cluster::Advice;
use downbeat_core::tenants::TenantPart;
use downbeat_protocol::inference as pb;
use parking_lot::Mutex;
use prometheus::core::{Collector, Metric};
use prometheus::process_collector::ProcessCollector;
use prometheus::{Encoder, Histogram, HistogramVec, IntCounter, Registry, TextEncoder};

use crate::budget::ByteBudget;
use crate::clock::Clock;
use crate::metrics::code_metrics::CodeMetrics;
use crate::metrics::gpu_metrics::GpuMetrics;
use crate::metrics::statistics::{Phases, Statistics};
use crate::metrics::trouble::Counts;
use crate::report::live::{LiveStep, LiveTenant};
use crate::report::missed::MissedRequests;
use crate::unanswered::Unanswered;
use crate::{logging, metric_table};

pub use lanes::{LaneMetrics, LaneMetricsFamily};

/// Upper bounds of the latency histograms in seconds: a factor of about 2 from 50 us to 10 s.
const LATENCY: [f64; 18] =
    [50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 35e-3, 50e-3, 75e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 10.0];
/// Upper bounds of the histogram of first answers in milliseconds: Triton's.
const FIRST: [f64; 4] = [100.0, 500.0, 2000.0, 5000.0];
/// Upper bounds of the batch size histogram.
const SIZES: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// The parts of a version's CPU memory: the values of the label `part`.
const MODEL_PARTS: [&str; 3] = ["weights", "rings", "run"];
/// The machine that the program is built for, as in the names of its packages.
const TARGET: &str = if cfg!(target_arch = "x86_64") {
    "x86_64-linux"
} else if cfg!(target_arch = "aarch64") {
    "aarch64-linux"
} else {
    "other"
};

metric_table! {
    /// The server's own metrics, of models, devices and requests.
    struct Table {
        success: IntCounterVec["model", "version"], "nv_inference_request_success", "Number of successful inference requests, all batch sizes";
        failure: IntCounterVec["model", "version", "reason"], "nv_inference_request_failure", "Number of failed inference requests, all batch sizes";
        inferences: IntCounterVec["model", "version"], "nv_inference_count", "Number of inferences performed (a batch of n is n)";
        executions: IntCounterVec["model", "version"], "nv_inference_exec_count", "Number of model executions performed";
        request_us: IntCounterVec["model", "version"], "nv_inference_request_duration_us",
            "Cumulative inference request duration in microseconds (includes cached requests)";
        queue_us: IntCounterVec["model", "version"], "nv_inference_queue_duration_us", "Cumulative inference queuing duration in microseconds";
        compute_input_us: IntCounterVec["model", "version"], "nv_inference_compute_input_duration_us", "Cumulative compute input duration in microseconds";
        compute_infer_us: IntCounterVec["model", "version"], "nv_inference_compute_infer_duration_us", "Cumulative compute inference duration in microseconds";
        compute_output_us: IntCounterVec["model", "version"], "nv_inference_compute_output_duration_us",
            "Cumulative inference compute output duration in microseconds";
        pending: IntGaugeVec["model", "version"], "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution, each counted by its batch dimension";
        load_seconds: GaugeVec["model", "version"], "nv_model_load_duration_secs", "Time the model version took to load, warm up and be profiled";
        build: IntGaugeVec["version", "target"], "downbeat_build_info", "1, with the version of Downbeat and the machine that it is built for";
        model_state: IntGaugeVec["model", "version", "state"], "downbeat_model_state",
            "1 for the state of the model version that the repository index has; a model without a version has failed as a whole";
        slo: GaugeVec["model", "version"], "downbeat_model_slo_seconds", "The SLO of the model version's requests; without an SLO there is no such series";
        slo_requests: IntCounterVec["model", "version", "outcome"], "downbeat_slo_requests_total",
            "Requests by outcome: in_time, or missed (late, rejected or dropped). Requests that clients took back, and errors of models, are neither";
        rollout_requests: IntCounterVec["model", "version", "outcome"], "downbeat_rollout_requests_total",
            "Requests of the two versions of a rollout: in_time; late; failed, which the old version then answers in place of the new one; of copies also differed and skipped";
        rollout_state: IntGaugeVec["model", "state"], "downbeat_rollout_state", "1 for the state of the model's rollout: running, finished or rolled_back";
        executor_restarts: IntCounterVec["model", "version"], "downbeat_executor_restarts_total",
            "Times that the process of its own of a model version was started again, after it had ended";
        not_answered: IntCounterVec["model", "version", "reason"], "downbeat_requests_not_answered_total", "Requests that got no result, by reason";
        late: IntCounterVec["model", "version"], "downbeat_requests_late_total", "Requests answered after their deadline (misses)";
        phases: HistogramVec["model", "version", "phase"] LATENCY, "downbeat_phase_duration_seconds",
            "Time in each phase: queue a request; compute_input, compute_infer and compute_output a launch";
        request: HistogramVec["model", "version"] LATENCY, "downbeat_request_duration_seconds", "Time from arrival to result of the requests that got one";
        batch_size: HistogramVec["model", "version"] SIZES, "downbeat_batch_size", "Items in a launch";
        first_answer: HistogramVec["model", "version"] FIRST, "nv_inference_first_response_histogram_ms",
            "Duration from request to first response in milliseconds, of decoupled models";
        step_time: HistogramVec["ensemble", "step", "model", "phase"] LATENCY, "downbeat_pipeline_step_duration_seconds",
            "Time of an ensemble's requests in a step: waiting, from the step's inputs to its run, and running";
        step_failures: IntCounterVec["ensemble", "step", "model", "reason"], "downbeat_pipeline_step_failures_total",
            "Requests of an ensemble that ended in a step: dropped, as the whole could not be in time; failed; or cancelled, as another step or the client ended the request";
        step_weight: GaugeVec["ensemble", "step", "model"], "downbeat_pipeline_step_weight",
            "The part of the weights of an ensemble's steps that is the step's, from 0 to 1: how requests share their time among the steps";
        device_busy: CounterVec["device"], "downbeat_device_busy_seconds_total",
            "Time in which at least one launch ran on the device, of a partition as much as it is of the device; its rate is the device's busy share";
        device_running: IntGaugeVec["device"], "downbeat_device_running", "Launches that run on the device now";
        devices: Gauge[], "downbeat_devices", "Devices that run batches";
        autoscale_change: Gauge[], "downbeat_autoscale_change_devices", "Devices to add, or to give back if negative, as the autoscale advisor says";
        autoscale_devices: Gauge[], "downbeat_autoscale_devices",
            "Devices that there should be, in all, as the autoscale advisor says: on the scheduler that leads, those of the cluster; NaN while nothing is known";
        autoscale_bad_rate: Gauge[], "downbeat_autoscale_bad_rate",
            "Share of the latest requests that were rejected, dropped or late; NaN while nothing is known";
        autoscale_idle_fraction: Gauge[], "downbeat_autoscale_idle_fraction",
            "Share of the devices' latest time in which they were idle; NaN while nothing is known";
        rehearsal_trials: IntCounter[], "downbeat_rehearsal_trials_total", "Times that behaviours of adaptive models were tried on the last seconds";
        rehearsal_changes: IntCounter[], "downbeat_rehearsal_changes_total", "Times that another was found better";
        rehearsal_lost: IntCounter[], "downbeat_rehearsal_arrivals_lost_total",
            "Requests that the rehearsal did not see because more came than it takes: their window of time was left out";
        rehearsal_cpu: CounterVec[], "downbeat_rehearsal_cpu_seconds_total", "Time of a core that trying them took";
        weight_trials: IntCounter[], "downbeat_pipeline_weight_trials_total", "Times that weights of ensembles' steps were tried on the last requests";
        weight_changes: IntCounter[], "downbeat_pipeline_weight_changes_total", "Times that others were found better";
        predictor_trainings: IntCounter[], "downbeat_predictor_trainings_total", "Times that what predicts groups of operators was trained with those that were served";
        predictor_adoptions: IntCounter[], "downbeat_predictor_adoptions_total", "Times that what came of it was better on those that were held out, and taken";
        decision_log_bytes: IntCounterVec[], "downbeat_decision_log_bytes_total", "Bytes written to the decision log, all files together";
        decision_log_ended: IntCounterVec["file"], "downbeat_decision_log_ended_total",
            "Files of the decision log that ended before the server did, because the disk was too slow or full";
        model_memory: GaugeVec["model", "version", "part"], "downbeat_model_memory_bytes",
            "What the model version holds of the CPU's memory: weights, input rings, its largest run by estimate";
        models_memory: Gauge[], "downbeat_models_memory_bytes",
            "What all models hold of the CPU's memory together; runs count as far as they may run at once";
        models_memory_limit: Gauge[], "downbeat_models_memory_bytes_limit", "What all models may hold of the CPU's memory (--model-memory-bytes)";
        device_memory: GaugeVec["device", "part"], "downbeat_device_memory_bytes",
            "What models hold of a device's memory: weights, sessions of a GPU's engine, and on the CPU input rings and runs";
        models_to_measure: Gauge[], "downbeat_models_to_measure", "Models in service that the server has to measure behind the service, or again";
        log_lines_lost: IntCounter[], "downbeat_log_lines_lost_total", "Lines of the log that were lost because nobody read standard error fast enough";
        log_lines_left_out: IntCounter[], "downbeat_log_lines_left_out_total", "Lines of the log that were left out because there were too many of their kind";
        work_abandoned: IntCounter[], "downbeat_work_abandoned_total",
            "Large bodies, pictures and texts whose work ended early because their client had left";
        tenant_requests: IntCounterVec["tenant", "standing"], "downbeat_tenant_requests_total", "Requests of a tenant, by standing: within its share of the devices' time, or beyond";
        tenant_refused: IntCounterVec["tenant"], "downbeat_tenant_refused_total", "Requests refused because their tenant had its share or its quota of the devices' time";
        tenant_time: CounterVec["tenant"], "downbeat_tenant_device_seconds_total", "Device time that a tenant's requests were charged";
        in_flight_bytes: Gauge[], "downbeat_in_flight_bytes", "Bytes that requests in flight hold, from their first byte to their answer's last";
        in_flight_bytes_limit: Gauge[], "downbeat_in_flight_bytes_limit", "Bytes that requests in flight may hold (--max-in-flight-bytes)";
        in_flight_bytes_refused: IntCounter[], "downbeat_in_flight_bytes_refused_total",
            "Requests refused because those in flight left no room for their bytes";
    }
}

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    table: Table,
    /// Metrics of device policies.
    pub lanes: LaneMetricsFamily,
    /// Metrics of GPUs that NVML reports.
    pub gpus: GpuMetrics,
    /// Metrics that the code of models keeps.
    pub code: Arc<CodeMetrics>,
    /// The versions with histograms of their own, at most `most_detailed`. A version that
    /// is gone keeps its place, because its histograms must not go back.
    detailed: Mutex<BTreeSet<[String; 2]>>,
    most_detailed: usize,
    /// By model and version.
    records: Mutex<BTreeMap<[String; 2], Weak<Record>>>,
}

/// The model in the histograms of all versions beyond the detailed ones.
const OTHERS_IN_HISTOGRAMS: [&str; 2] = ["_others", ""];

/// The work of all models and devices since the start.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Totals {
    /// Requests that were answered by their deadline.
    pub good: u64,
    /// Requests that were rejected, dropped or answered late.
    pub bad: u64,
    /// Time that devices have spent on launches, all together.
    pub busy: Duration,
}

/// Counters of tenants. The tenants of the file of keys are few, so are the labels.
#[derive(Clone)]
pub struct TenantMetrics {
    requests: prometheus::IntCounterVec,
    refused: prometheus::IntCounterVec,
    time: prometheus::CounterVec,
}

impl TenantMetrics {
    /// A request has come.
    pub fn arrived(&self, tenant: &str, is_within: bool) {
        let standing = if is_within { "within" } else { "beyond" };
        self.requests.with_label_values(&[tenant, standing]).inc();
    }

    /// A request was refused.
    pub fn refused(&self, tenant: &str) {
        self.refused.with_label_values(&[tenant]).inc();
    }

    /// The counts of a tenant with this part of the devices' time.
    pub fn report(&self, tenant: &str, part: &TenantPart) -> LiveTenant {
        let standing = |standing| self.requests.with_label_values(&[tenant, standing]).get();
        LiveTenant {
            tenant: tenant.to_owned(),
            share: part.share,
            quota: part.quota,
            within: standing("within"),
            beyond: standing("beyond"),
            refused: self.refused.with_label_values(&[tenant]).get(),
            device_s: self.time.with_label_values(&[tenant]).get(),
        }
    }

    /// A request has run, and was charged this time.
    pub fn ran(&self, tenant: &str, cost: Duration) {
        self.time.with_label_values(&[tenant]).inc_by(cost.as_secs_f64());
    }
}

/// Counters of the scheduler's rehearsal.
pub struct RehearsalMetrics {
    /// Trials that were finished.
    pub trials: IntCounter,
    /// Trials that changed the models' behaviour.
    pub changes: IntCounter,
    /// Requests in windows of time that were left out, because more requests came than a shard has
    /// room for.
    pub arrivals_lost: IntCounter,
    /// Trials of the weights of pipelines' steps that were finished.
    pub weight_trials: IntCounter,
    /// Trials that changed the weights.
    pub weight_changes: IntCounter,
    /// Trainings of the predictor of operator groups that were finished.
    pub trainings: IntCounter,
    /// Trainings whose outcome was better, and was adopted.
    pub adoptions: IntCounter,
    /// Seconds of a core that the rehearsal took.
    pub cpu_seconds: prometheus::Counter,
}

impl Metrics {
    /// A fresh set.
    ///
    /// # Errors
    /// If two metrics had the same name: a defect.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let (table, lanes) = (Table::register(&registry)?, LaneMetricsFamily::register(&registry)?);
        registry.register(Box::new(ProcessCollector::for_self()))?;
        table.build.with_label_values(&[env!("CARGO_PKG_VERSION"), TARGET]).set(1);
        let gpus = GpuMetrics::register(&registry)?;
        let (detailed, records, code) = Default::default();
        Ok(Metrics { table, lanes, gpus, code, registry, detailed, most_detailed: usize::MAX, records })
    }

    /// Bounds the histograms: at most so many versions of models have their own.
    #[must_use]
    pub fn detailed_for(mut self, versions: usize) -> Self {
        self.most_detailed = versions;
        self
    }

    /// The labels of a version in histograms.
    fn labels_of_histograms<'a>(&self, name: &'a str, version: &'a str) -> [&'a str; 2] {
        let mut detailed = self.detailed.lock();
        let labels = [name, version].map(str::to_owned);
        let is_detailed =
            detailed.contains(&labels) || (detailed.len() < self.most_detailed && detailed.insert(labels));
        if is_detailed { [name, version] } else { OTHERS_IN_HISTOGRAMS }
    }

    /// The record of a version. Example: the server measures a model in service, and loads it again.
    /// The new version takes the place of the old one and goes on with its record, so that no count
    /// goes back. The record ends with the last version of the name, or with [`Metrics::forget`].
    fn record(&self, name: &str, version: &str) -> Arc<Record> {
        let mut records = self.records.lock();
        records.retain(|_, record| record.strong_count() > 0);
        let weak = records.entry([name, version].map(str::to_owned)).or_default();
        weak.upgrade().unwrap_or_else(|| {
            let record = Arc::default();
            *weak = Arc::downgrade(&record);
            record
        })
    }

    /// The registry for the metrics of other parts.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The counters of tenants.
    pub fn tenants(&self) -> TenantMetrics {
        TenantMetrics {
            requests: self.table.tenant_requests.clone(),
            refused: self.table.tenant_refused.clone(),
            time: self.table.tenant_time.clone(),
        }
    }

    /// The counters of the rehearsal.
    pub fn rehearsal(&self) -> RehearsalMetrics {
        RehearsalMetrics {
            trials: self.table.rehearsal_trials.clone(),
            changes: self.table.rehearsal_changes.clone(),
            arrivals_lost: self.table.rehearsal_lost.clone(),
            weight_trials: self.table.weight_trials.clone(),
            weight_changes: self.table.weight_changes.clone(),
            trainings: self.table.predictor_trainings.clone(),
            adoptions: self.table.predictor_adoptions.clone(),
            cpu_seconds: self.table.rehearsal_cpu.with_label_values::<&str>(&[]),
        }
    }

    /// The counts of a model version. Metrics continue those of an earlier version of the same name,
    /// even after an unload. Statistics and missed requests do so only while that version lives.
    pub fn model(&self, name: &str, version: &str) -> ModelMetrics {
        let (table, labels) = (&self.table, [name, version]);
        let shown = self.labels_of_histograms(name, version);
        // From zero, so that the first restart is an increase.
        table.executor_restarts.with_label_values(&labels).inc_by(0);
        let timed = |total: &prometheus::IntCounterVec, each: Histogram| Timed {
            each,
            total: total.with_label_values(&labels),
            total_ns: AtomicU64::new(0),
        };
        let phase = |phase: &str| table.phases.with_label_values(&[shown[0], shown[1], phase]);
        ModelMetrics {
            success: table.success.with_label_values(&labels),
            inferences: table.inferences.with_label_values(&labels),
            executions: table.executions.with_label_values(&labels),
            late: table.late.with_label_values(&labels),
            failures: Unanswered::triton_labels().map(|why| table.failure.with_label_values(&[name, version, why])),
            not_answered: Unanswered::labels().map(|why| table.not_answered.with_label_values(&[name, version, why])),
            request: timed(&table.request_us, table.request.with_label_values(&shown)),
            queue: timed(&table.queue_us, phase("queue")),
            compute_input: timed(&table.compute_input_us, phase("compute_input")),
            compute_infer: timed(&table.compute_infer_us, phase("compute_infer")),
            compute_output: timed(&table.compute_output_us, phase("compute_output")),
            batch_size: table.batch_size.with_label_values(&shown),
            is_detailed: shown == labels,
            first_answer: (table.first_answer.clone(), shown.map(str::to_owned)),
            record: self.record(name, version),
        }
    }

    /// The metrics of a step of an ensemble, by its number from 0.
    pub fn pipeline_step(&self, ensemble: &str, step: usize, model: &str) -> StepMetrics {
        let step = step.to_string();
        let time = |phase| self.table.step_time.with_label_values(&[ensemble, &step, model, phase]);
        let failures = |reason| self.table.step_failures.with_label_values(&[ensemble, &step, model, reason]);
        StepMetrics {
            waiting: time("waiting"),
            running: time("running"),
            dropped: failures("dropped"),
            failed: failures("failed"),
            cancelled: failures("cancelled"),
        }
    }

    /// Sets which part of all weights is a step's, from 0 to 1.
    pub fn set_step_weight(&self, ensemble: &str, step: &str, model: &str, part: f64) {
        self.table.step_weight.with_label_values(&[ensemble, step, model]).set(part);
    }

    /// Forgets the weight of a step that is gone.
    pub fn forget_step_weight(&self, ensemble: &str, step: &str, model: &str) {
        // An error means that there was no such gauge.
        let _ = self.table.step_weight.remove_label_values(&[ensemble, step, model]);
    }

    /// Forgets the gauges and the record of a version that is gone. The server keeps the counters of the
    /// version, since a counter must not go back.
    pub fn forget(&self, name: &str, version: &str) {
        // The thread that gave the last answer may still hold the version.
        self.records.lock().remove(&[name, version].map(str::to_owned));
        // An error means that there was no such gauge: then nothing is left to remove.
        let _ = self.table.pending.remove_label_values(&[name, version]);
        let _ = self.table.load_seconds.remove_label_values(&[name, version]);
        let _ = self.table.slo.remove_label_values(&[name, version]);
        for part in MODEL_PARTS {
            let _ = self.table.model_memory.remove_label_values(&[name, version, part]);
        }
        self.lanes.forget(name, version);
    }

    /// Sets how many items of a version's requests wait for their batch now.
    pub fn set_pending(&self, name: &str, version: &str, items: u64) {
        self.table.pending.with_label_values(&[name, version]).set(i64::try_from(items).unwrap_or(i64::MAX));
    }

    /// Sets the SLO of a version's requests, and counts which of them were in time.
    pub fn set_outcomes(&self, name: &str, version: &str, slo: Option<Duration>, counts: &Counts) {
        if let Some(slo) = slo {
            self.table.slo.with_label_values(&[name, version]).set(slo.as_secs_f64());
        }
        for (outcome, requests) in [("in_time", counts.in_time()), ("missed", counts.missed())] {
            let counter = self.table.slo_requests.with_label_values(&[name, version, outcome]);
            counter.inc_by(requests.saturating_sub(counter.get()));
        }
    }

    /// Sets the states of all model versions: model, version and state. Versions that are not among
    /// them have no state any more.
    pub fn set_model_states<'a>(&self, states: impl Iterator<Item = [&'a str; 3]>) {
        self.table.model_state.reset();
        for labels in states {
            self.table.model_state.with_label_values(&labels).set(1);
        }
    }

    /// Counts a request of one of the versions of a rollout.
    pub fn count_rollout(&self, name: &str, version: &str, outcome: &str) {
        self.table.rollout_requests.with_label_values(&[name, version, outcome]).inc();
    }

    /// Sets the states of all rollouts: model and state.
    pub fn set_rollout_states<'a>(&self, states: impl Iterator<Item = [&'a str; 2]>) {
        self.table.rollout_state.reset();
        for labels in states {
            self.table.rollout_state.with_label_values(&labels).set(1);
        }
    }

    /// Counts how often the process of a version was started again lately.
    pub fn add_executor_restarts(&self, name: &str, version: &str, restarts: u64) {
        self.table.executor_restarts.with_label_values(&[name, version]).inc_by(restarts);
    }

    /// Sets how long a version took to load, warm up and be profiled.
    pub fn set_load_duration(&self, name: &str, version: &str, duration: Duration) {
        self.table.load_seconds.with_label_values(&[name, version]).set(duration.as_secs_f64());
    }

    /// Sets the CPU memory of a version for each of `MODEL_PARTS`, bytes.
    pub fn set_model_memory(&self, name: &str, version: &str, parts: [u64; 3]) {
        for (part, bytes) in MODEL_PARTS.into_iter().zip(parts) {
            self.table.model_memory.with_label_values(&[name, version, part]).set(bytes as f64);
        }
    }

    /// Sets the CPU memory of all models and its limit, bytes; `None`: no limit.
    pub fn set_models_memory(&self, held: u64, limit: Option<u64>) {
        self.table.models_memory.set(held as f64);
        self.table.models_memory_limit.set(limit.map_or(f64::INFINITY, |limit| limit as f64));
    }

    /// Sets the memory that models hold of a device, bytes by part: a GPU by its number from 0, or
    /// `cpu`.
    pub fn set_device_memory<const PARTS: usize>(&self, device: &str, parts: [(&str, u64); PARTS]) {
        for (part, bytes) in parts {
            self.table.device_memory.with_label_values(&[device, part]).set(bytes as f64);
        }
    }

    /// The metrics of a device, by its number from 0.
    pub fn device(&self, device: usize) -> DeviceMetrics {
        let label = device.to_string();
        DeviceMetrics {
            busy: self.table.device_busy.with_label_values(&[&label]),
            running: self.table.device_running.with_label_values(&[&label]),
        }
    }

    /// Counts bytes that were written of the decision log, all files together.
    pub fn decision_log_bytes(&self) -> IntCounter {
        self.table.decision_log_bytes.with_label_values::<&str>(&[])
    }

    /// Counts the ends of a file of the decision log before the server's own, 0 or 1 in a run;
    /// `file`: its name without the extension.
    pub fn decision_log_ended(&self, file: &str) -> IntCounter {
        self.table.decision_log_ended.with_label_values(&[file])
    }

    /// The work of all models and devices since the start.
    pub fn totals(&self) -> Totals {
        let sum = |metric: &dyn Collector, counts: &dyn Fn(&str) -> bool| -> f64 {
            let families = metric.collect();
            let metrics = families.iter().flat_map(|family| family.get_metric());
            metrics
                .filter(|m| m.get_label().iter().all(|l| l.name() != "reason" || counts(l.value())))
                .map(|m| m.get_counter().get_value())
                .sum()
        };
        let all = |_: &str| true;
        let late = sum(&self.table.late, &all);
        Totals {
            good: (sum(&self.table.success, &all) - late).max(0.0) as u64,
            bad: (late + sum(&self.table.not_answered, &Unanswered::is_bad)) as u64,
            busy: Duration::from_secs_f64(sum(&self.table.device_busy, &all)),
        }
    }

    /// Sets the autoscale advisor's advice for a number of devices.
    pub fn set_autoscale(&self, devices: u32, wanted: Option<u32>, advice: &Advice) {
        self.table.devices.set(f64::from(devices));
        self.table.autoscale_devices.set(wanted.map_or(f64::NAN, f64::from));
        self.table.autoscale_change.set(advice.change as f64);
        self.table.autoscale_bad_rate.set(advice.bad_rate.unwrap_or(f64::NAN));
        self.table.autoscale_idle_fraction.set(advice.idle_fraction.unwrap_or(f64::NAN));
    }

    /// Sets the bytes that requests in flight hold and may hold, and how many requests were refused
    /// for lack of memory.
    pub fn set_budget(&self, budget: &ByteBudget) {
        self.table.in_flight_bytes.set(budget.in_flight() as f64);
        self.table.in_flight_bytes_limit.set(budget.limit() as f64);
        let refused = &self.table.in_flight_bytes_refused;
        refused.inc_by(budget.refused().saturating_sub(refused.get()));
    }

    /// Sets how many models in service have to be measured.
    pub fn set_to_measure(&self, models: usize) {
        self.table.models_to_measure.set(models as f64);
    }

    /// Sets how often work ended early because its client had left.
    pub fn set_abandoned(&self, abandoned: u64) {
        self.table.work_abandoned.inc_by(abandoned.saturating_sub(self.table.work_abandoned.get()));
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// If a metric cannot be written as text: a defect.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        for (counter, lines) in
            [(&self.table.log_lines_lost, logging::lost()), (&self.table.log_lines_left_out, logging::left_out())]
        {
            counter.inc_by(lines.saturating_sub(counter.get()));
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        let mut text = String::from_utf8_lossy(&text).into_owned();
        self.code.render(&mut text);
        Ok(text)
    }
}

/// Times of something: each one in a histogram, and their sum. The sum is reported in microseconds
/// and kept in nanoseconds, so that nothing is lost.
struct Timed {
    each: Histogram,
    total: IntCounter,
    total_ns: AtomicU64,
}

impl Timed {
    fn add(&self, duration: Duration) {
        let before = self.total_ns.fetch_add(duration.as_nanos(), Relaxed);
        let after = before.wrapping_add(duration.as_nanos());
        self.total.inc_by((after / 1_000).saturating_sub(before / 1_000));
    }
}

/// The counts of a model version that are no Prometheus metrics.
#[derive(Default)]
struct Record {
    /// The protocol's statistics; one lock a batch.
    statistics: Mutex<Statistics>,
    missed: MissedRequests,
}

/// The counts of one model version, looked up once: its metrics, its statistics of the protocol, and
/// its last requests that missed.
pub struct ModelMetrics {
    success: IntCounter,
    inferences: IntCounter,
    executions: IntCounter,
    late: IntCounter,
    failures: [IntCounter; Unanswered::COUNT],
    not_answered: [IntCounter; Unanswered::COUNT],
    request: Timed,
    queue: Timed,
    compute_input: Timed,
    compute_infer: Timed,
    compute_output: Timed,
    batch_size: Histogram,
    /// Whether the histograms are the version's own.
    is_detailed: bool,
    /// Models with one answer have no such histogram, so that it is made at the first answer.
    first_answer: (HistogramVec, [String; 2]),
    record: Arc<Record>,
}

impl ModelMetrics {
    /// Notes that the first answer of a decoupled model came `after` the arrival of its request.
    pub fn record_first_answer(&self, after: Duration) {
        let (family, labels) = &self.first_answer;
        family.with_label_values(labels).observe(after.as_secs_f64() * 1_000.0);
    }

    /// Counts a launch of `rows` items with the time of each phase. `requests` has for each request
    /// its time in the queue, its time from arrival to result, and whether it was late.
    pub fn record_batch(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)> + Clone,
    ) {
        self.count_launch(rows, phases);
        self.count_requests(rows, phases, requests.clone());
        let taken = requests.map(|(queued, took, _)| (queued, took));
        self.record.statistics.lock().record_batch(Clock::unix_millis(), rows, phases, taken);
    }

    /// Counts a launch of `rows` items, without its requests.
    pub fn record_launch(&self, rows: u32, phases: Phases) {
        self.count_launch(rows, phases);
        self.record.statistics.lock().record_launch(rows, phases);
    }

    fn count_launch(&self, rows: u32, phases: Phases) {
        self.executions.inc();
        self.compute_input.each.observe(phases.compute_input.as_secs_f64());
        self.compute_infer.each.observe(phases.compute_infer.as_secs_f64());
        self.compute_output.each.observe(phases.compute_output.as_secs_f64());
        self.batch_size.observe(f64::from(rows));
    }

    /// Counts requests of `rows` items together, without their launch. `requests` is as for
    /// [`ModelMetrics::record_batch`].
    pub fn record_requests(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)> + Clone,
    ) {
        self.count_requests(rows, phases, requests.clone());
        let taken = requests.map(|(queued, took, _)| (queued, took));
        self.record.statistics.lock().record_requests(Clock::unix_millis(), rows, phases, taken);
    }

    fn count_requests(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)>,
    ) {
        let count = requests.len() as u64;
        let (mut queued_in_all, mut took_in_all, mut late_in_all) = (Duration::ZERO, Duration::ZERO, 0);
        for (queued, took, late) in requests {
            self.queue.each.observe(queued.as_secs_f64());
            self.request.each.observe(took.as_secs_f64());
            queued_in_all += queued;
            took_in_all += took;
            late_in_all += u64::from(late);
        }
        self.success.inc_by(count);
        self.inferences.inc_by(u64::from(rows));
        self.late.inc_by(late_in_all);
        self.queue.add(queued_in_all);
        self.request.add(took_in_all);
        self.compute_input.add(phases.compute_input.saturating_mul(count));
        self.compute_infer.add(phases.compute_infer.saturating_mul(count));
        self.compute_output.add(phases.compute_output.saturating_mul(count));
    }

    /// The outcomes of the version's requests.
    pub fn counts(&self) -> Counts {
        Counts {
            answered: self.success.get(),
            late: self.late.get(),
            items: self.inferences.get(),
            launches: self.executions.get(),
            unanswered: self.not_answered.each_ref().map(IntCounter::get),
        }
    }

    /// Counts requests by the time from arrival to result ([`latency_bounds_ms`]), and launches by size
    /// ([`batch_bounds`]). Empty if the version shares its histograms.
    pub fn histograms(&self) -> [Vec<u64>; 2] {
        if !self.is_detailed {
            return Default::default();
        }
        [&self.request.each, &self.batch_size].map(|histogram| {
            let all = histogram.get_sample_count();
            let metric = Metric::metric(histogram);
            let buckets = metric.get_histogram().get_bucket().iter().map(|bucket| bucket.cumulative_count());
            let mut before = 0;
            buckets.chain([all]).map(|until| until.saturating_sub(std::mem::replace(&mut before, until))).collect()
        })
    }

    /// Counts a request that got no result, `after` its arrival.
    pub fn record_not_answered(&self, why: Unanswered, after: Duration) {
        self.failures[why as usize].inc();
        self.not_answered[why as usize].inc();
        self.record.statistics.lock().record_failure(after);
    }

    /// The protocol's statistics of the version.
    pub fn statistics(&self, name: &str, version: &str) -> pb::ModelStatistics {
        self.record.statistics.lock().to_proto(name, version)
    }

    /// The version's last requests that missed.
    pub fn missed(&self) -> &MissedRequests {
        &self.record.missed
    }
}

/// Upper bounds of the parts of [`ModelMetrics::histograms`] by time, milliseconds.
pub fn latency_bounds_ms() -> Vec<f64> {
    LATENCY.map(|bound| bound * 1e3).to_vec()
}

/// Upper bounds of the parts of [`ModelMetrics::histograms`] by size, items.
pub fn batch_bounds() -> Vec<f64> {
    SIZES.to_vec()
}

/// The metrics of one step of an ensemble, looked up once.
pub struct StepMetrics {
    /// Seconds from the step's inputs to its run.
    pub waiting: Histogram,
    /// Seconds from the begin of the step's run to its outputs.
    pub running: Histogram,
    /// Requests that the step dropped, as the whole could not be in time.
    pub dropped: IntCounter,
    /// Requests that failed in the step for another reason.
    pub failed: IntCounter,
    /// Requests that were in the step when another step or the client ended them.
    pub cancelled: IntCounter,
}

impl StepMetrics {
    /// The counts of a step that runs this model and has this share of the weights.
    pub fn report(&self, model: &str, share: f64) -> LiveStep {
        LiveStep {
            model: model.to_owned(),
            share,
            done: self.running.get_sample_count(),
            waited_s: self.waiting.get_sample_sum(),
            ran_s: self.running.get_sample_sum(),
            dropped: self.dropped.get(),
            failed: self.failed.get(),
        }
    }
}

/// The metrics of one device, looked up once.
pub struct DeviceMetrics {
    /// Seconds in which at least one launch ran; a partition's seconds count with its part of the
    /// device.
    pub busy: prometheus::Counter,
    /// Launches that run on it now.
    pub running: prometheus::IntGauge,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(metrics: &Metrics, name: &str) -> Vec<String> {
        let text = metrics.render().unwrap();
        let its = text.lines().filter(|line| line.starts_with(name) && line[name.len()..].starts_with('{'));
        its.map(str::to_owned).collect()
    }

    #[test]
    fn versions_beyond_the_detailed_ones_share_histograms() {
        let metrics = Metrics::new().unwrap().detailed_for(2);
        for (name, took) in [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 5)] {
            let its = metrics.model(name, "1");
            its.record_batch(
                1,
                Phases::default(),
                std::iter::once((Duration::ZERO, Duration::from_millis(took), false)),
            );
        }
        let counts = series(&metrics, "downbeat_request_duration_seconds_count");
        let count = |labels: &str, count| format!("downbeat_request_duration_seconds_count{{{labels}}} {count}");
        let expected = [
            count("model=\"_others\",version=\"\"", 2),
            count("model=\"a\",version=\"1\"", 2),
            count("model=\"b\",version=\"1\"", 1),
        ];
        assert_eq!(counts, expected);
        let parts = |name| metrics.model(name, "1").histograms().map(|parts| parts.iter().sum::<u64>());
        assert_eq!((parts("a"), parts("c")), ([2, 2], [0, 0]), "shared histograms are nobody's");
        assert_eq!(series(&metrics, "nv_inference_request_success").len(), 4, "counters are each version's own");
    }

    #[test]
    fn counts_go_on_as_long_as_a_version_has_the_name() {
        let metrics = Metrics::new().unwrap();
        let executions = |its: &ModelMetrics| its.statistics("m", "1").execution_count;
        let first = metrics.model("m", "1");
        first.record_launch(4, Phases::default());
        let second = metrics.model("m", "1");
        second.record_launch(4, Phases::default());
        // A last request of the version that was replaced.
        first.record_not_answered(Unanswered::Hopeless, Duration::from_millis(3));
        drop(first);
        let fail = second.statistics("m", "1").inference_stats.and_then(|stats| stats.fail);
        assert_eq!((executions(&second), fail.map(|fail| fail.count)), (2, Some(1)));
        assert_eq!(executions(&metrics.model("m", "2")), 0, "each version has its own counts");
        metrics.forget("m", "1");
        let third = metrics.model("m", "1");
        assert_eq!((executions(&second), executions(&third)), (2, 0), "a model that was unloaded begins at zero");
        drop((second, third));
        assert_eq!(executions(&metrics.model("m", "1")), 0, "no version had the name");
        assert_eq!(metrics.records.lock().len(), 1, "versions that are gone take no memory");
    }

    #[test]
    fn outcomes_are_counted_once() {
        let metrics = Metrics::new().unwrap();
        let mut counts = Counts { answered: 10, late: 3, ..Counts::default() };
        counts.unanswered[Unanswered::Hopeless as usize] = 2;
        counts.unanswered[Unanswered::Cancelled as usize] = 7;
        for _ in 0..2 {
            metrics.set_outcomes("m", "1", Some(Duration::from_millis(250)), &counts);
        }
        let outcome = |outcome, count| {
            format!("downbeat_slo_requests_total{{model=\"m\",outcome=\"{outcome}\",version=\"1\"}} {count}")
        };
        assert_eq!(series(&metrics, "downbeat_slo_requests_total"), [outcome("in_time", 7), outcome("missed", 5)]);
        assert_eq!(
            series(&metrics, "downbeat_model_slo_seconds"),
            ["downbeat_model_slo_seconds{model=\"m\",version=\"1\"} 0.25"]
        );
    }

    #[test]
    fn a_state_that_is_over_has_no_series() {
        let metrics = Metrics::new().unwrap();
        metrics.set_model_states([["m", "1", "LOADING"], ["n", "", "UNAVAILABLE"]].into_iter());
        metrics.set_model_states([["m", "1", "READY"]].into_iter());
        let expected = ["downbeat_model_state{model=\"m\",state=\"READY\",version=\"1\"} 1"];
        assert_eq!(series(&metrics, "downbeat_model_state"), expected);
    }
}
