//! A model as a calibration describes it: a few constants for each segment, found by measuring.

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

use super::limits::DeviceLimits;
use super::work::Kernel;

/// The time of a segment alone on `units` compute units, in microseconds:
///
/// ```text
/// fixed_us + work_us * batch / min(units_per_item * batch, most_units, units)     with at least 1 unit
/// ```
///
/// One item keeps `units_per_item` units busy. A larger batch costs nothing until all units are in
/// use. More units are of no use to a small batch: the knee (GSLICE §2.1.3). The law leaves out
/// four effects. Operators of one segment may prefer different numbers of units; then cut the model
/// into more segments. Whole waves make steps. The memory saturates at a number of units that
/// depends on the batch. Copies overlap computing, but the measured times include them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentLaw {
    /// The time that does not depend on the batch, for issuing kernels and reading weights;
    /// microseconds.
    pub fixed_us: f64,
    /// The time of one item on one unit, microseconds.
    pub work_us: f64,
    /// The units that one item keeps busy.
    pub units_per_item: f64,
    /// The most units that a batch can use.
    pub most_units: f64,
}

/// The kernels that a segment is split into, each after a part of the fixed time. Launches change
/// hands only between kernels.
const KERNELS: u64 = 8;

impl SegmentLaw {
    /// Returns how many of `units` units a batch uses.
    pub fn units(&self, batch: u32, units: u32) -> f64 {
        (self.units_per_item * f64::from(batch)).min(self.most_units).min(f64::from(units)).max(1.0)
    }

    /// Returns the time of a batch alone on `units` units, microseconds.
    pub fn time_us(&self, batch: u32, units: u32) -> f64 {
        self.fixed_us + self.work_us * f64::from(batch) / self.units(batch, units)
    }

    /// Returns the segment's kernels for a device of `units` units. `issue_share` of the fixed time
    /// is issuing, which launches do one at a time; the rest keeps one unit busy.
    pub fn kernels(&self, batch: u32, units: u32, issue_share: f64) -> impl Iterator<Item = Kernel> {
        let used = self.units(batch, units);
        let (issue, run) = (self.fixed_us * 1e3 * issue_share, self.work_us * 1e3 * f64::from(batch) / used);
        let rest = self.fixed_us * 1e3 - issue;
        // The parts add up to the whole, to the nanosecond.
        let part = |whole: f64, index: u64| {
            let until = |index: u64| (whole.round() as u64).saturating_mul(index) / KERNELS;
            Duration::from_nanos(until(index + 1) - until(index))
        };
        let units = (used.ceil() as u32).clamp(1, units);
        (0..KERNELS).flat_map(move |index| {
            let fixed = Kernel { issue: part(issue, index), run: part(rest, index), units: 1, draw: 0 };
            [fixed, Kernel { run: part(run, index), units, ..Kernel::default() }]
        })
    }

    /// Returns whether all numbers are finite and in range.
    pub(super) fn is_sound(&self) -> bool {
        let SegmentLaw { fixed_us, work_us, units_per_item, most_units } = *self;
        let most = 86_400e6;
        (0.0..=most).contains(&fixed_us)
            && (0.0..=most).contains(&work_us)
            && units_per_item > 0.0
            && units_per_item.is_finite()
            && (1.0..=1e9).contains(&most_units)
    }
}

/// A measured model on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredModel {
    /// The model's name.
    pub name: String,
    /// The laws of the segments in order; at least one.
    pub segments: Vec<SegmentLaw>,
    /// Bytes of an item's inputs and outputs.
    pub item_bytes: (u64, u64),
    /// The host's cost of a launch.
    pub launch_overhead: Duration,
    /// The device's limits.
    pub limits: DeviceLimits,
    /// The share of the fixed times that is issuing, from 0 to 1.
    pub issue_share: f64,
}

impl MeasuredModel {
    /// Returns all kernels of a batch on a partition of `units` units.
    pub fn kernels(&self, batch: u32, units: u32) -> Vec<Kernel> {
        self.segments.iter().flat_map(|segment| segment.kernels(batch.max(1), units, self.issue_share)).collect()
    }
}
