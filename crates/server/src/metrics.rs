//! Prometheus metrics: Triton's names where Triton has one, so that dashboards carry over; `downbeat_*` otherwise.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use downbeat_core::Duration;
use downbeat_core::cluster::Advice;
use downbeat_engine::cuda::nvml::NvmlSample;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use crate::budget::ByteBudget;
use crate::engine_run::RunFailure;
use crate::host::LaneMetricsFamily;
use crate::model_memory::Part;
use crate::statistics::Phases;

/// Upper bounds of the latency histograms in seconds: a factor of about 2 from 50 us to 10 s.
const LATENCY_BUCKETS: [f64; 18] =
    [50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 35e-3, 50e-3, 75e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 10.0];
/// Upper bounds of the batch size histogram.
const BATCH_BUCKETS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// Reasons of `downbeat_requests_not_answered_total`.
pub const REASONS: [Reason; 10] = [
    Reason::QueueFull,
    Reason::Impossible,
    Reason::Hopeless,
    Reason::Sacrificed,
    Reason::QueueTimeout,
    Reason::Timeout,
    Reason::Cancelled,
    Reason::Unloaded,
    Reason::Engine,
    Reason::RunEnded,
];

/// Why a request of a model got no result.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    /// Rejected: the queue is at its bound, in items or in time.
    QueueFull,
    /// Rejected: even alone on an idle device it would end after its deadline.
    Impossible,
    /// Dropped from the queue: it cannot end by its deadline any more.
    Hopeless,
    /// Dropped from the queue's head for a larger batch behind it (window drop).
    Sacrificed,
    /// Dropped: longer in the queue than the queue policy allows, or than a request without a deadline may wait.
    QueueTimeout,
    /// The client's own `timeout` ended while it ran.
    Timeout,
    /// The client went away.
    Cancelled,
    /// Its model was unloaded.
    Unloaded,
    /// The engine failed.
    Engine,
    /// Its run took too long and was ended, or is out of service as one could not be ended.
    RunEnded,
}

impl Reason {
    /// That of a run that gave nothing.
    pub fn of(failure: &RunFailure) -> Self {
        match failure {
            RunFailure::Engine(_) => Reason::Engine,
            RunFailure::Ended(_) | RunFailure::Refused(_) => Reason::RunEnded,
        }
    }

    /// The label's value.
    pub const fn label(self) -> &'static str {
        match self {
            Reason::QueueFull => "queue_full",
            Reason::Impossible => "deadline_impossible",
            Reason::Hopeless => "deadline_hopeless",
            Reason::Sacrificed => "window_drop",
            Reason::QueueTimeout => "queue_timeout",
            Reason::Timeout => "timeout",
            Reason::Cancelled => "cancelled",
            Reason::Unloaded => "unloaded",
            Reason::Engine => "engine_error",
            Reason::RunEnded => "run_ended",
        }
    }

    /// Whether it means that the request was not served in time: what a bad rate counts. The others are the client's or the
    /// model's doing, which more devices would not mend.
    const fn is_bad(self) -> bool {
        match self {
            Reason::QueueFull
            | Reason::Impossible
            | Reason::Hopeless
            | Reason::Sacrificed
            | Reason::QueueTimeout
            | Reason::Timeout => true,
            Reason::Cancelled | Reason::Unloaded | Reason::Engine | Reason::RunEnded => false,
        }
    }

    /// Triton's `reason` of `nv_inference_request_failure`.
    const fn triton_label(self) -> &'static str {
        match self {
            Reason::QueueFull | Reason::Impossible | Reason::Hopeless | Reason::Sacrificed | Reason::QueueTimeout => {
                "REJECTED"
            }
            Reason::Cancelled => "CANCELED",
            Reason::Engine | Reason::RunEnded => "BACKEND",
            Reason::Timeout | Reason::Unloaded => "OTHER",
        }
    }
}

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    success: IntCounterVec,
    failure: IntCounterVec,
    inferences: IntCounterVec,
    executions: IntCounterVec,
    request_us: IntCounterVec,
    queue_us: IntCounterVec,
    compute_input_us: IntCounterVec,
    compute_infer_us: IntCounterVec,
    compute_output_us: IntCounterVec,
    pending: IntGaugeVec,
    load_seconds: GaugeVec,
    not_answered: IntCounterVec,
    late: IntCounterVec,
    phases: HistogramVec,
    request: HistogramVec,
    batch_size: HistogramVec,
    device_busy: prometheus::CounterVec,
    device_running: IntGaugeVec,
    devices: Gauge,
    autoscale_change: Gauge,
    autoscale_bad_rate: Gauge,
    autoscale_idle_fraction: Gauge,
    decision_log_bytes: IntCounterVec,
    decision_log_ended: IntCounterVec,
    model_memory: GaugeVec,
    models_memory: Gauge,
    models_memory_limit: Gauge,
    in_flight_bytes: Gauge,
    in_flight_bytes_limit: Gauge,
    in_flight_bytes_refused: IntCounterVec,
    lanes: LaneMetricsFamily,
    gpus: GpuMetrics,
}

/// What all models and devices have done since the start.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Totals {
    /// Requests that were answered by their deadline.
    pub good: u64,
    /// Requests that were rejected, dropped or answered late.
    pub bad: u64,
    /// Time that devices have spent on launches, all together.
    pub busy: Duration,
}

const MODEL: [&str; 2] = ["model", "version"];

impl Metrics {
    /// A fresh set.
    ///
    /// # Errors
    /// If two metrics had the same name: a defect.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| -> Result<IntGaugeVec, prometheus::Error> {
            let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let histogram = |name: &str, help: &str, labels: &[&str], buckets: &[f64]| {
            let metric = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let single = |name: &str, help: &str| -> Result<Gauge, prometheus::Error> {
            let metric = Gauge::new(name, help)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let device_busy = prometheus::CounterVec::new(
            Opts::new(
                "downbeat_device_busy_seconds_total",
                "Time in which at least one launch ran on the device, of a partition as much as it is of the device; its rate is the device's busy share",
            ),
            &["device"],
        )?;
        registry.register(Box::new(device_busy.clone()))?;
        let load_seconds = GaugeVec::new(
            Opts::new("nv_model_load_duration_secs", "Time the model version took to load, warm up and be profiled"),
            &MODEL,
        )?;
        registry.register(Box::new(load_seconds.clone()))?;
        let model_memory = GaugeVec::new(
            Opts::new(
                "downbeat_model_memory_bytes",
                "What the model version holds of the CPU's memory: weights, input rings, its largest run by estimate",
            ),
            &["model", "version", "part"],
        )?;
        registry.register(Box::new(model_memory.clone()))?;
        Ok(Metrics {
            success: counter(
                "nv_inference_request_success",
                "Number of successful inference requests, all batch sizes",
                &MODEL,
            )?,
            failure: counter(
                "nv_inference_request_failure",
                "Number of failed inference requests, all batch sizes",
                &["model", "version", "reason"],
            )?,
            inferences: counter("nv_inference_count", "Number of inferences performed (a batch of n is n)", &MODEL)?,
            executions: counter("nv_inference_exec_count", "Number of model executions performed", &MODEL)?,
            request_us: counter(
                "nv_inference_request_duration_us",
                "Cumulative inference request duration in microseconds (includes cached requests)",
                &MODEL,
            )?,
            queue_us: counter(
                "nv_inference_queue_duration_us",
                "Cumulative inference queuing duration in microseconds",
                &MODEL,
            )?,
            compute_input_us: counter(
                "nv_inference_compute_input_duration_us",
                "Cumulative compute input duration in microseconds",
                &MODEL,
            )?,
            compute_infer_us: counter(
                "nv_inference_compute_infer_duration_us",
                "Cumulative compute inference duration in microseconds",
                &MODEL,
            )?,
            compute_output_us: counter(
                "nv_inference_compute_output_duration_us",
                "Cumulative inference compute output duration in microseconds",
                &MODEL,
            )?,
            pending: gauge(
                "nv_inference_pending_request_count",
                "Instantaneous number of pending requests awaiting execution, each counted by its batch dimension",
                &MODEL,
            )?,
            not_answered: counter(
                "downbeat_requests_not_answered_total",
                "Requests that got no result, by reason",
                &["model", "version", "reason"],
            )?,
            late: counter("downbeat_requests_late_total", "Requests answered after their deadline (misses)", &MODEL)?,
            phases: histogram(
                "downbeat_phase_duration_seconds",
                "Time in each phase: queue a request; compute_input, compute_infer and compute_output a launch",
                &["model", "version", "phase"],
                &LATENCY_BUCKETS,
            )?,
            request: histogram(
                "downbeat_request_duration_seconds",
                "Time from arrival to result of the requests that got one",
                &MODEL,
                &LATENCY_BUCKETS,
            )?,
            batch_size: histogram("downbeat_batch_size", "Items in a launch", &MODEL, &BATCH_BUCKETS)?,
            devices: single("downbeat_devices", "Devices that run batches")?,
            autoscale_change: single(
                "downbeat_autoscale_change_devices",
                "Devices to add, or to give back if negative, as the autoscale advisor says",
            )?,
            autoscale_bad_rate: single(
                "downbeat_autoscale_bad_rate",
                "Share of the latest requests that were rejected, dropped or late; NaN while nothing is known",
            )?,
            autoscale_idle_fraction: single(
                "downbeat_autoscale_idle_fraction",
                "Share of the devices' latest time in which they were idle; NaN while nothing is known",
            )?,
            decision_log_bytes: counter(
                "downbeat_decision_log_bytes_total",
                "Bytes written to the decision log, all files together",
                &[],
            )?,
            decision_log_ended: counter(
                "downbeat_decision_log_ended_total",
                "Files of the decision log that ended before the server did, because the disk was too slow or full",
                &["file"],
            )?,
            model_memory,
            models_memory: single(
                "downbeat_models_memory_bytes",
                "What all models hold of the CPU's memory together; runs count as far as they may run at once",
            )?,
            models_memory_limit: single(
                "downbeat_models_memory_bytes_limit",
                "What all models may hold of the CPU's memory (--model-memory-bytes)",
            )?,
            in_flight_bytes: single(
                "downbeat_in_flight_bytes",
                "Bytes that requests in flight hold, from their first byte to their answer's last",
            )?,
            in_flight_bytes_limit: single(
                "downbeat_in_flight_bytes_limit",
                "Bytes that requests in flight may hold (--max-in-flight-bytes)",
            )?,
            in_flight_bytes_refused: counter(
                "downbeat_in_flight_bytes_refused_total",
                "Requests refused because those in flight left no room for their bytes",
                &[],
            )?,
            device_running: gauge("downbeat_device_running", "Launches that run on the device now", &["device"])?,
            lanes: LaneMetricsFamily::new(&registry)?,
            gpus: GpuMetrics::new(&registry)?,
            load_seconds,
            device_busy,
            registry,
        })
    }

    /// The metrics of one model version.
    pub fn model(&self, name: &str, version: &str) -> ModelMetrics {
        let labels = [name, version];
        let phase = |phase: &str| self.phases.with_label_values(&[name, version, phase]);
        ModelMetrics {
            success: self.success.with_label_values(&labels),
            inferences: self.inferences.with_label_values(&labels),
            executions: self.executions.with_label_values(&labels),
            request_us: MicrosCounter::new(self.request_us.with_label_values(&labels)),
            queue_us: MicrosCounter::new(self.queue_us.with_label_values(&labels)),
            compute_input_us: MicrosCounter::new(self.compute_input_us.with_label_values(&labels)),
            compute_infer_us: MicrosCounter::new(self.compute_infer_us.with_label_values(&labels)),
            compute_output_us: MicrosCounter::new(self.compute_output_us.with_label_values(&labels)),
            late: self.late.with_label_values(&labels),
            failures: REASONS.map(|r| self.failure.with_label_values(&[name, version, r.triton_label()])),
            not_answered: REASONS.map(|r| self.not_answered.with_label_values(&[name, version, r.label()])),
            queue: phase("queue"),
            compute_input: phase("compute_input"),
            compute_infer: phase("compute_infer"),
            compute_output: phase("compute_output"),
            request: self.request.with_label_values(&labels),
            batch_size: self.batch_size.with_label_values(&labels),
        }
    }

    /// Forgets the gauges of a version that is gone; its counters stay, as a counter must not go back.
    pub fn forget(&self, name: &str, version: &str) {
        // An error means that there was no such gauge, which is what is wanted.
        let _ = self.pending.remove_label_values(&[name, version]);
        let _ = self.load_seconds.remove_label_values(&[name, version]);
        for part in Part::ALL {
            let _ = self.model_memory.remove_label_values(&[name, version, part.label()]);
        }
        self.lanes.forget(name, version);
    }

    /// Sets how many items of a version wait now.
    pub fn set_pending(&self, name: &str, version: &str, items: u64) {
        self.pending.with_label_values(&[name, version]).set(i64::try_from(items).unwrap_or(i64::MAX));
    }

    /// Sets how long a version took to load.
    pub fn set_load_duration(&self, name: &str, version: &str, duration: Duration) {
        self.load_seconds.with_label_values(&[name, version]).set(duration.as_secs_f64());
    }

    /// Sets what a version holds of the CPU's memory for a part, bytes.
    pub fn set_model_memory(&self, name: &str, version: &str, part: Part, bytes: u64) {
        self.model_memory.with_label_values(&[name, version, part.label()]).set(bytes as f64);
    }

    /// Sets what all models hold of the CPU's memory, and may hold, bytes; `None`: there is no limit.
    pub fn set_models_memory(&self, held: u64, limit: Option<u64>) {
        self.models_memory.set(held as f64);
        self.models_memory_limit.set(limit.map_or(f64::INFINITY, |limit| limit as f64));
    }

    /// The metrics of device policies.
    pub fn lanes(&self) -> &LaneMetricsFamily {
        &self.lanes
    }

    /// What NVML says of GPUs.
    pub fn gpus(&self) -> &GpuMetrics {
        &self.gpus
    }

    /// The metrics of one device.
    pub fn device(&self, device: usize) -> DeviceMetrics {
        let label = device.to_string();
        DeviceMetrics {
            busy: self.device_busy.with_label_values(&[&label]),
            running: self.device_running.with_label_values(&[&label]),
        }
    }

    /// Bytes of the decision log, all files together.
    pub fn decision_log_bytes(&self) -> IntCounter {
        self.decision_log_bytes.with_label_values::<&str>(&[])
    }

    /// Whether a file of the decision log, by its name without the extension, ended before the server did.
    pub fn decision_log_ended(&self, file: &str) -> IntCounter {
        self.decision_log_ended.with_label_values(&[file])
    }

    /// What all models and devices have done since the start.
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
        let bad_reason = |label: &str| REASONS.iter().any(|reason| reason.is_bad() && reason.label() == label);
        let late = sum(&self.late, &all);
        Totals {
            good: (sum(&self.success, &all) - late).max(0.0) as u64,
            bad: (late + sum(&self.not_answered, &bad_reason)) as u64,
            busy: Duration::from_secs_f64(sum(&self.device_busy, &all)),
        }
    }

    /// Sets what the autoscale advisor says of so many devices.
    pub fn set_autoscale(&self, devices: u32, advice: &Advice) {
        self.devices.set(f64::from(devices));
        self.autoscale_change.set(advice.change as f64);
        self.autoscale_bad_rate.set(advice.bad_rate.unwrap_or(f64::NAN));
        self.autoscale_idle_fraction.set(advice.idle_fraction.unwrap_or(f64::NAN));
    }

    /// Sets what requests in flight hold.
    pub fn set_budget(&self, budget: &ByteBudget) {
        self.in_flight_bytes.set(budget.in_flight() as f64);
        self.in_flight_bytes_limit.set(budget.limit() as f64);
        let refused = self.in_flight_bytes_refused.with_label_values::<&str>(&[]);
        refused.inc_by(budget.refused().saturating_sub(refused.get()));
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// If a metric cannot be written as text: a defect.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// A counter in microseconds that loses nothing of what is added in nanoseconds.
struct MicrosCounter {
    counter: IntCounter,
    total_ns: AtomicU64,
}

impl MicrosCounter {
    fn new(counter: IntCounter) -> Self {
        MicrosCounter { counter, total_ns: AtomicU64::new(0) }
    }

    fn add(&self, duration: Duration) {
        let before = self.total_ns.fetch_add(duration.as_nanos(), Relaxed);
        let after = before.wrapping_add(duration.as_nanos());
        self.counter.inc_by((after / 1_000).saturating_sub(before / 1_000));
    }
}

/// The metrics of one model version, looked up once.
pub struct ModelMetrics {
    success: IntCounter,
    inferences: IntCounter,
    executions: IntCounter,
    request_us: MicrosCounter,
    queue_us: MicrosCounter,
    compute_input_us: MicrosCounter,
    compute_infer_us: MicrosCounter,
    compute_output_us: MicrosCounter,
    late: IntCounter,
    failures: [IntCounter; REASONS.len()],
    not_answered: [IntCounter; REASONS.len()],
    queue: Histogram,
    compute_input: Histogram,
    compute_infer: Histogram,
    compute_output: Histogram,
    request: Histogram,
    batch_size: Histogram,
}

impl ModelMetrics {
    /// Counts a launch of `rows` items for requests that waited, took, and were late as given.
    pub fn record_batch(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)>,
    ) {
        let count = requests.len() as u64;
        let (mut queued_in_all, mut took_in_all, mut late_in_all) = (Duration::ZERO, Duration::ZERO, 0);
        for (queued, took, late) in requests {
            self.queue.observe(queued.as_secs_f64());
            self.request.observe(took.as_secs_f64());
            queued_in_all += queued;
            took_in_all += took;
            late_in_all += u64::from(late);
        }
        self.success.inc_by(count);
        self.inferences.inc_by(u64::from(rows));
        self.executions.inc();
        self.late.inc_by(late_in_all);
        self.queue_us.add(queued_in_all);
        self.request_us.add(took_in_all);
        self.compute_input_us.add(phases.compute_input.saturating_mul(count));
        self.compute_infer_us.add(phases.compute_infer.saturating_mul(count));
        self.compute_output_us.add(phases.compute_output.saturating_mul(count));
        self.compute_input.observe(phases.compute_input.as_secs_f64());
        self.compute_infer.observe(phases.compute_infer.as_secs_f64());
        self.compute_output.observe(phases.compute_output.as_secs_f64());
        self.batch_size.observe(f64::from(rows));
    }

    /// Counts a request that got no result.
    pub fn record_not_answered(&self, reason: Reason) {
        if let Some(index) = REASONS.iter().position(|r| *r == reason) {
            self.failures[index].inc();
            self.not_answered[index].inc();
        }
    }
}

/// The metrics of one device.
pub struct DeviceMetrics {
    busy: prometheus::Counter,
    running: prometheus::IntGauge,
}

impl DeviceMetrics {
    /// So many launches run now.
    pub fn set_running(&self, launches: u32) {
        self.running.set(i64::from(launches));
    }

    /// It has been busy for so many seconds.
    pub fn add_busy(&self, seconds: f64) {
        self.busy.inc_by(seconds);
    }
}

/// What NVML says of GPUs, by Triton's names. A clone is the same.
#[derive(Clone)]
pub struct GpuMetrics {
    utilization: GaugeVec,
    power: GaugeVec,
    power_limit: GaugeVec,
    energy: prometheus::CounterVec,
    memory: GaugeVec,
    memory_used: GaugeVec,
    xids: IntCounterVec,
}

const GPU: [&str; 1] = ["gpu_uuid"];

impl GpuMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| -> Result<GaugeVec, prometheus::Error> {
            let metric = GaugeVec::new(Opts::new(name, help), &GPU)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let energy = Opts::new("nv_energy_consumption", "GPU energy consumption in joules since the server started");
        let energy = prometheus::CounterVec::new(energy, &GPU)?;
        registry.register(Box::new(energy.clone()))?;
        let xids =
            Opts::new("downbeat_gpu_xids_total", "Errors of the GPU that its driver reported, by NVIDIA's number");
        let xids = IntCounterVec::new(xids, &["gpu_uuid", "xid"])?;
        registry.register(Box::new(xids.clone()))?;
        Ok(GpuMetrics {
            utilization: gauge("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0]")?,
            power: gauge("nv_gpu_power_usage", "GPU power usage in watts")?,
            power_limit: gauge("nv_gpu_power_limit", "GPU power management limit in watts")?,
            energy,
            memory: gauge("nv_gpu_memory_total_bytes", "GPU total memory, in bytes")?,
            memory_used: gauge("nv_gpu_memory_used_bytes", "GPU used memory, in bytes")?,
            xids,
        })
    }

    /// Sets what was measured of a GPU, and adds the energy that it has taken since the last time, joules.
    pub fn set(&self, gpu: &str, sample: &NvmlSample, energy: f64) {
        let Self { utilization, power, power_limit, memory, memory_used, .. } = self;
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        for (gauge, value) in [
            (utilization, sample.utilization),
            (power, sample.power),
            (power_limit, sample.power_limit),
            (memory, bytes(sample.memory)),
            (memory_used, bytes(sample.memory_used)),
        ] {
            match value {
                Some(value) => gauge.with_label_values(&[gpu]).set(value),
                // An error means that there was none.
                None => drop(gauge.remove_label_values(&[gpu])),
            }
        }
        if sample.energy.is_some() {
            self.energy.with_label_values(&[gpu]).inc_by(energy.max(0.0));
        }
    }

    /// Forgets the gauges of a GPU that cannot be measured any more.
    pub fn forget(&self, gpu: &str) {
        self.set(gpu, &NvmlSample::default(), 0.0);
    }

    /// Counts an error that the driver reported of a GPU.
    pub fn count_xid(&self, gpu: &str, xid: u64) {
        self.xids.with_label_values(&[gpu, xid.to_string().as_str()]).inc();
    }
}
