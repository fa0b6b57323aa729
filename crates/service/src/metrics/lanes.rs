//! Metrics of device policies: launches, events of batches, and padding.

use downbeat_core::Duration;
use downbeat_core::device::{Launch, Note, PoolStats};
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::metric_table;
use crate::options::MOST_DEVICES;

metric_table! {
    /// The metrics of all versions' lanes.
    pub struct LaneMetricsFamily {
        launches: IntCounterVec["model", "version", "device"], "downbeat_launches_total", "Launches on lanes: runs of a range of segments";
        events: IntCounterVec["model", "version", "device", "event"], "downbeat_batch_events_total",
            "What happened to batches: new, stretch, split, exit; switch: other lanes came into use; prepare_failed: lanes could not be made";
        items: IntCounterVec["model", "version", "device", "kind"], "downbeat_launch_items_total",
            "Items of launches: asked for, and computed (those asked for and dummies)";
        lengths: IntCounterVec["model", "version", "device", "kind"], "downbeat_launch_length_total",
            "Lengths of all items of launches, where requests vary: asked for, and computed (padded to the longest)";
        busy_seconds: CounterVec["model", "version", "device"], "downbeat_lane_busy_seconds_total",
            "Time that a model's lanes have spent on launches, all lanes together";
        scheduling_seconds: CounterVec["model", "version", "device"], "downbeat_lane_scheduling_seconds_total",
            "Time spent on deciding about requests and launches, waiting for whoever decides included; copies and runs are not";
        lanes: IntGaugeVec["model", "version", "device"], "downbeat_lanes", "Lanes of a model on a device";
        lanes_busy: IntGaugeVec["model", "version", "device"], "downbeat_lanes_busy", "Lanes that run a launch now";
        ring_slots: IntGaugeVec["model", "version", "device"], "downbeat_ring_slots", "Slots of the input ring; 0: there is none";
        ring_occupied: IntGaugeVec["model", "version", "device"], "downbeat_ring_occupied_slots", "Slots of the input ring that are in use";
        ring_most_occupied: IntGaugeVec["model", "version", "device"], "downbeat_ring_most_occupied_slots",
            "The most slots that were in use at a time";
        ring_overflowed: IntCounterVec["model", "version", "device"], "downbeat_ring_overflowed_total",
            "Requests that found the input ring full and waited with the host";
        groups: IntCounterVec["model", "version", "device", "requests"], "downbeat_operator_groups_total",
            "Groups of operators of which the model's request was the most urgent: of one request, and of several";
        group_seconds: CounterVec["model", "version", "device", "requests", "kind"], "downbeat_operator_group_seconds_total",
            "Time of groups of operators, of those that were predicted: as predicted, and as they took";
        padding_checks: IntCounterVec["model", "version", "result"], "downbeat_padding_checks_total",
            "Padded requests that were run once more alone: whose answer was the same, and different";
        row_checks: IntCounterVec["model", "version", "result"], "downbeat_row_checks_total",
            "Requests of shared batches that were run once more alone: the same answer, or a different one";
    }
}

/// Sizes of groups of operators, requests.
const GROUP_SIZES: [&str; 2] = ["one", "several"];

impl LaneMetricsFamily {
    /// Counters of a model version for checks of padded requests: same answer, different answer.
    pub fn padding_checks(&self, model: &str, version: &str) -> [IntCounter; 2] {
        ["same", "different"].map(|result| self.padding_checks.with_label_values(&[model, version, result]))
    }

    /// Counters of a model version for repeated requests of shared batches: same answer, different
    /// answer.
    pub fn row_checks(&self, model: &str, version: &str) -> [IntCounter; 2] {
        ["same", "different"].map(|result| self.row_checks.with_label_values(&[model, version, result]))
    }

    /// The metrics of a version's lanes on a device.
    pub fn lanes(&self, model: &str, version: &str, device: usize) -> LaneMetrics {
        let device = device.to_string();
        let labels = [model, version, &device];
        let kind = |family: &IntCounterVec, kind: &str| family.with_label_values(&[model, version, &device, kind]);
        LaneMetrics {
            launches: self.launches.with_label_values(&labels),
            events: ["new", "stretch", "split", "exit", "switch", "prepare_failed"]
                .map(|name| kind(&self.events, name)),
            items: ["asked", "computed"].map(|name| kind(&self.items, name)),
            lengths: ["asked", "computed"].map(|name| kind(&self.lengths, name)),
            busy_seconds: self.busy_seconds.with_label_values(&labels),
            scheduling_seconds: self.scheduling_seconds.with_label_values(&labels),
            gauges: [&self.lanes, &self.lanes_busy, &self.ring_slots, &self.ring_occupied, &self.ring_most_occupied]
                .map(|family| family.with_label_values(&labels)),
            ring_overflowed: self.ring_overflowed.with_label_values(&labels),
            groups: GROUP_SIZES.map(|size| kind(&self.groups, size)),
            group_seconds: GROUP_SIZES.map(|size| {
                let of_kind = |kind| self.group_seconds.with_label_values(&[model, version, &device, size, kind]);
                ["predicted", "actual"].map(of_kind)
            }),
        }
    }

    /// Forgets the gauges of a version that is gone; its counters stay, as a counter must not go
    /// back.
    pub fn forget(&self, model: &str, version: &str) {
        for device in 0..MOST_DEVICES {
            let device = device.to_string();
            for family in
                [&self.lanes, &self.lanes_busy, &self.ring_slots, &self.ring_occupied, &self.ring_most_occupied]
            {
                // An error means that there was no such gauge: then nothing is left to remove.
                let _ = family.remove_label_values(&[model, version, &device]);
            }
        }
    }
}

/// The metrics of a version's lanes on one device.
pub struct LaneMetrics {
    launches: IntCounter,
    /// New, stretch, split, exit, switch, prepare_failed.
    events: [IntCounter; 6],
    /// Asked for, computed.
    items: [IntCounter; 2],
    lengths: [IntCounter; 2],
    busy_seconds: prometheus::Counter,
    scheduling_seconds: prometheus::Counter,
    /// Lanes, busy lanes; slots of the ring, occupied slots, the most occupied slots.
    gauges: [IntGauge; 5],
    ring_overflowed: IntCounter,
    /// Groups of one request, of several.
    groups: [IntCounter; 2],
    /// Seconds of the same groups, each predicted and actual.
    group_seconds: [[prometheus::Counter; 2]; 2],
}

impl LaneMetrics {
    /// Counts a launch that took `busy`; its members' lengths sum to `asked`.
    pub fn record_launch(&self, launch: &Launch, asked: u64, busy: Duration) {
        let [rows, computed, length] = [launch.rows, launch.computed_rows, launch.length].map(u64::from);
        self.launches.inc();
        self.items[0].inc_by(rows);
        self.items[1].inc_by(computed);
        if length > 0 {
            self.lengths[0].inc_by(asked);
            self.lengths[1].inc_by(computed * length);
        }
        self.busy_seconds.inc_by(busy.as_secs_f64());
    }

    /// Records the time that a decision of the device took.
    pub fn record_decision(&self, took: Duration) {
        self.scheduling_seconds.inc_by(took.as_secs_f64());
    }

    /// Counts a note of a device policy.
    pub fn record_note(&self, note: &Note) {
        let event = match note {
            Note::New { .. } => 0,
            Note::Stretch { .. } => 1,
            Note::Split { .. } => 2,
            Note::Exit { .. } => 3,
            Note::Switch { .. } => return self.record_switch(),
            Note::RingFull { .. } => return self.ring_overflowed.inc(),
            Note::PrepareFailed { .. } => 5,
            Note::Group { parts, predicted, took, .. } => return self.record_group(parts.len(), *predicted, *took),
        };
        self.events[event].inc();
    }

    fn record_group(&self, requests: usize, predicted: Option<Duration>, took: Duration) {
        let of_size = usize::from(requests > 1);
        self.groups[of_size].inc();
        // Only groups with a prediction can be compared.
        if let Some(predicted) = predicted {
            self.group_seconds[of_size][0].inc_by(predicted.as_secs_f64());
            self.group_seconds[of_size][1].inc_by(took.as_secs_f64());
        }
    }

    /// Counts that it the model runs on other lanes from now on.
    pub fn record_switch(&self) {
        self.events[4].inc();
    }

    /// Sets the gauges of the lanes and of the input ring.
    pub fn set(&self, lanes: usize, busy: u32, PoolStats { slots, occupied, most_occupied, .. }: PoolStats) {
        let ring = [slots, occupied, most_occupied].map(i64::from);
        let values = [lanes as i64, busy.into()].into_iter().chain(ring);
        self.gauges.iter().zip(values).for_each(|(gauge, value)| gauge.set(value));
    }
}
