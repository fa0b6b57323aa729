//! The outcome of a run of models side by side.

use downbeat_core::device::overlap::OverlapStats;
use downbeat_core::{Duration, quantiles};

/// The outcome of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlapReport {
    /// Queries answered within their QoS target.
    pub in_time: u32,
    /// Queries answered after their target.
    pub late: u32,
    /// Queries that were not answered.
    pub dropped: u32,
    /// The time to each answer over the QoS target.
    pub latencies: Vec<f64>,
    /// The time during which queries came.
    pub span: Duration,
    /// Counters of the groups by prediction.
    pub stats: OverlapStats,
    /// Actual over predicted time, for groups of several parts.
    pub ratios: Vec<f64>,
}

impl OverlapReport {
    /// Joins the reports of several devices. Every device counts as getting queries for as long as
    /// the last one.
    pub fn joined(reports: impl IntoIterator<Item = OverlapReport>) -> OverlapReport {
        let mut all = OverlapReport::default();
        for OverlapReport { in_time, late, dropped, latencies, span, stats, ratios } in reports {
            (all.in_time, all.late, all.dropped) = (all.in_time + in_time, all.late + late, all.dropped + dropped);
            all.span = all.span.max(span);
            all.latencies.extend(latencies);
            all.ratios.extend(ratios);
            let own = &mut all.stats;
            (own.groups, own.together) = (own.groups + stats.groups, own.together + stats.together);
            (own.passes, own.waited_for) = (own.passes + stats.passes, own.waited_for + stats.waited_for);
            own.overtaken += stats.overtaken;
        }
        all
    }

    /// Returns the share of queries that were late or not answered (Abacus figure 15).
    pub fn violations(&self) -> f64 {
        f64::from(self.late + self.dropped) / f64::from((self.in_time + self.late + self.dropped).max(1))
    }

    /// Returns the 99% quantile of the time to an answer over the QoS target (figure 14); NaN if
    /// there are no answers.
    pub fn tail(&self) -> f64 {
        quantiles(self.latencies.iter().copied(), [0.99]).map_or(f64::NAN, |[tail]| tail)
    }

    /// Returns the queries a second that were answered in time (figure 17).
    pub fn throughput(&self) -> f64 {
        f64::from(self.in_time) / self.span.as_secs_f64()
    }
}
