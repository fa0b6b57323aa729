//! What came of a run of models side by side.

use downbeat_core::device::overlap::OverlapStats;
use downbeat_core::{Duration, quantiles};

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlapReport {
    /// Queries answered within their QoS target.
    pub in_time: u32,
    /// Answered later.
    pub late: u32,
    /// Not answered.
    pub dropped: u32,
    /// Of all that were answered, the time to the answer over the QoS target.
    pub latencies: Vec<f64>,
    /// How long queries came.
    pub span: Duration,
    /// What units were in use until then, of all, 0 to 1.
    pub used: f64,
    /// Of groups by prediction.
    pub stats: OverlapStats,
    /// Actual to predicted time of groups of several.
    pub ratios: Vec<f64>,
}

impl OverlapReport {
    /// What came of several devices together, which were all sent queries for as long as the last of them.
    pub fn joined(reports: impl IntoIterator<Item = OverlapReport>) -> OverlapReport {
        let (mut all, mut count) = (OverlapReport::default(), 0);
        for OverlapReport { in_time, late, dropped, latencies, span, used, stats, ratios } in reports {
            (all.in_time, all.late, all.dropped) = (all.in_time + in_time, all.late + late, all.dropped + dropped);
            (all.span, all.used, count) = (all.span.max(span), all.used + used, count + 1);
            all.latencies.extend(latencies);
            all.ratios.extend(ratios);
            let own = &mut all.stats;
            (own.groups, own.together) = (own.groups + stats.groups, own.together + stats.together);
            (own.passes, own.waited_for) = (own.passes + stats.passes, own.waited_for + stats.waited_for);
            own.overtaken += stats.overtaken;
        }
        all.used /= f64::from(count.max(1));
        all
    }

    /// The share of queries that were late or not answered (Abacus figure 15).
    pub fn violations(&self) -> f64 {
        f64::from(self.late + self.dropped) / f64::from((self.in_time + self.late + self.dropped).max(1))
    }

    /// What 99% of the answers took, over the QoS target (figure 14); NaN if there are none.
    pub fn tail(&self) -> f64 {
        quantiles(self.latencies.iter().copied(), [0.99]).map_or(f64::NAN, |[tail]| tail)
    }

    /// Queries a second that were answered in time (figure 17).
    pub fn throughput(&self) -> f64 {
        f64::from(self.in_time) / self.span.as_secs_f64()
    }
}
