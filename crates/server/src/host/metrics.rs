//! Metrics of device policies: what was launched, what became of batches, what is padding.

use downbeat_core::Duration;
use downbeat_core::device::{Launch, Note, PoolStats};
use prometheus::{CounterVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Devices that a server may have.
const MOST_DEVICES: usize = 256;
const LABELS: [&str; 3] = ["model", "version", "device"];

/// The metrics of all devices' lanes.
pub struct LaneMetricsFamily {
    launches: IntCounterVec,
    events: IntCounterVec,
    items: IntCounterVec,
    elements: IntCounterVec,
    busy_seconds: CounterVec,
    scheduling_seconds: CounterVec,
    lanes: IntGaugeVec,
    lanes_busy: IntGaugeVec,
    ring_slots: IntGaugeVec,
    ring_occupied: IntGaugeVec,
    ring_most_occupied: IntGaugeVec,
    ring_overflowed: IntCounterVec,
    padding_checks: IntCounterVec,
}

impl LaneMetricsFamily {
    /// Adds the metrics to a registry.
    ///
    /// # Errors
    /// If one has the name of another: a defect.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let gauge = |name: &str, help: &str| -> Result<IntGaugeVec, prometheus::Error> {
            let metric = IntGaugeVec::new(Opts::new(name, help), &LABELS)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let busy_seconds = CounterVec::new(
            Opts::new(
                "downbeat_lane_busy_seconds_total",
                "Time that a model's lanes have spent on launches, all lanes together",
            ),
            &LABELS,
        )?;
        registry.register(Box::new(busy_seconds.clone()))?;
        let scheduling_seconds = CounterVec::new(
            Opts::new(
                "downbeat_lane_scheduling_seconds_total",
                "Time spent on deciding about requests and launches, waiting for whoever decides included; copies and runs are not",
            ),
            &LABELS,
        )?;
        registry.register(Box::new(scheduling_seconds.clone()))?;
        Ok(LaneMetricsFamily {
            launches: counter("downbeat_launches_total", "Launches on lanes: runs of a range of segments", &LABELS)?,
            events: counter(
                "downbeat_batch_events_total",
                "What happened to batches: new, stretch, split, exit; switch: other lanes came into use; prepare_failed: lanes could not be made",
                &["model", "version", "device", "event"],
            )?,
            items: counter(
                "downbeat_launch_items_total",
                "Items of launches: asked for, and computed (those asked for and dummies)",
                &["model", "version", "device", "kind"],
            )?,
            elements: counter(
                "downbeat_launch_length_total",
                "Lengths of all items of launches, where requests vary: asked for, and computed (padded to the longest)",
                &["model", "version", "device", "kind"],
            )?,
            lanes: gauge("downbeat_lanes", "Lanes of a model on a device")?,
            lanes_busy: gauge("downbeat_lanes_busy", "Lanes that run a launch now")?,
            ring_slots: gauge("downbeat_ring_slots", "Slots of the input ring; 0: there is none")?,
            ring_occupied: gauge("downbeat_ring_occupied_slots", "Slots of the input ring that are in use")?,
            ring_most_occupied: gauge(
                "downbeat_ring_most_occupied_slots",
                "The most slots that were in use at a time",
            )?,
            ring_overflowed: counter(
                "downbeat_ring_overflowed_total",
                "Requests that found the input ring full and waited with the host",
                &LABELS,
            )?,
            padding_checks: counter(
                "downbeat_padding_checks_total",
                "Padded requests that were run once more alone: whose answer was the same, and different",
                &["model", "version", "result"],
            )?,
            busy_seconds,
            scheduling_seconds,
        })
    }

    /// What became of looks at padded requests of a model version: same, different.
    pub fn padding_checks(&self, model: &str, version: &str) -> [IntCounter; 2] {
        ["same", "different"].map(|result| self.padding_checks.with_label_values(&[model, version, result]))
    }

    /// The metrics of one model version on one device.
    pub fn lanes(&self, model: &str, version: &str, device: usize) -> LaneMetrics {
        let device = device.to_string();
        let labels = [model, version, &device];
        let kind = |family: &IntCounterVec, kind: &str| family.with_label_values(&[model, version, &device, kind]);
        LaneMetrics {
            launches: self.launches.with_label_values(&labels),
            events: ["new", "stretch", "split", "exit", "switch", "prepare_failed"]
                .map(|event| kind(&self.events, event)),
            items_asked: kind(&self.items, "asked"),
            items_computed: kind(&self.items, "computed"),
            length_asked: kind(&self.elements, "asked"),
            length_computed: kind(&self.elements, "computed"),
            busy_seconds: self.busy_seconds.with_label_values(&labels),
            scheduling_seconds: self.scheduling_seconds.with_label_values(&labels),
            lanes: self.lanes.with_label_values(&labels),
            lanes_busy: self.lanes_busy.with_label_values(&labels),
            ring_slots: self.ring_slots.with_label_values(&labels),
            ring_occupied: self.ring_occupied.with_label_values(&labels),
            ring_most_occupied: self.ring_most_occupied.with_label_values(&labels),
            ring_overflowed: self.ring_overflowed.with_label_values(&labels),
        }
    }

    /// Forgets the gauges of a version that is gone; its counters stay, as a counter must not go back.
    pub fn forget(&self, model: &str, version: &str) {
        for device in 0..MOST_DEVICES {
            let device = device.to_string();
            for family in
                [&self.lanes, &self.lanes_busy, &self.ring_slots, &self.ring_occupied, &self.ring_most_occupied]
            {
                // An error means that there was no such gauge, which is what is wanted.
                let _ = family.remove_label_values(&[model, version, &device]);
            }
        }
    }
}

/// The metrics of one model version on one device.
pub struct LaneMetrics {
    launches: IntCounter,
    /// New, stretch, split, exit, switch, prepare_failed.
    events: [IntCounter; 6],
    items_asked: IntCounter,
    items_computed: IntCounter,
    length_asked: IntCounter,
    length_computed: IntCounter,
    busy_seconds: prometheus::Counter,
    scheduling_seconds: prometheus::Counter,
    lanes: IntGauge,
    lanes_busy: IntGauge,
    ring_slots: IntGauge,
    ring_occupied: IntGauge,
    ring_most_occupied: IntGauge,
    ring_overflowed: IntCounter,
}

impl LaneMetrics {
    /// Counts a launch that took `busy`; its members' lengths sum to `asked`.
    pub fn record_launch(&self, launch: &Launch, asked: u64, busy: Duration) {
        self.launches.inc();
        self.items_asked.inc_by(u64::from(launch.rows));
        self.items_computed.inc_by(u64::from(launch.computed_rows));
        if launch.length > 0 {
            self.length_asked.inc_by(asked);
            self.length_computed.inc_by(u64::from(launch.computed_rows) * u64::from(launch.length));
        }
        self.busy_seconds.inc_by(busy.as_secs_f64());
    }

    /// Counts the time that a decision took.
    pub fn record_decision(&self, took: Duration) {
        self.scheduling_seconds.inc_by(took.as_secs_f64());
    }

    /// Counts what happened to a batch.
    pub fn record_note(&self, note: &Note) {
        let event = match note {
            Note::New { .. } => 0,
            Note::Stretch { .. } => 1,
            Note::Split { .. } => 2,
            Note::Exit { .. } => 3,
            Note::Switch { .. } => 4,
            Note::RingFull { .. } => return self.ring_overflowed.inc(),
            Note::PrepareFailed { .. } => 5,
        };
        self.events[event].inc();
    }

    /// Counts that it runs on other lanes from now on.
    pub fn record_switch(&self) {
        self.events[4].inc();
    }

    /// Sets what is true now.
    pub fn set(&self, lanes: usize, busy: u32, stats: PoolStats) {
        self.lanes.set(lanes as i64);
        self.lanes_busy.set(i64::from(busy));
        self.ring_slots.set(i64::from(stats.slots));
        self.ring_occupied.set(i64::from(stats.occupied));
        self.ring_most_occupied.set(i64::from(stats.most_occupied));
    }
}
