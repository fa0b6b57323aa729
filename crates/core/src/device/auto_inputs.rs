//! The measurements of a model and its device, from which `auto` predicts the throughput of a policy.

use serde::{Deserialize, Serialize};

use super::segment_profile::SegmentProfile;
use super::staging::Staging;
use crate::time::Duration;

/// The most work that two lanes together can do, as a multiple of the work of one.
const MOST_OVERLAP: f64 = 2.0;

/// A batch size that was timed on one lane and on two lanes together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OverlapPoint {
    /// The items of a batch.
    pub batch: u32,
    /// The time of a batch that had the device for itself.
    #[serde(rename = "alone_ns")]
    pub alone: Duration,
    /// The time of a batch while another ran beside it throughout.
    #[serde(rename = "together_ns")]
    pub together: Duration,
}

impl OverlapPoint {
    /// The work of two lanes together, as a multiple of the work of one alone. At 2 the lanes do
    /// not disturb each other. At 1 or less they might as well take turns.
    pub fn factor(&self) -> f64 {
        let together = self.together.as_nanos().max(1) as f64;
        (MOST_OVERLAP * self.alone.as_nanos() as f64 / together).min(MOST_OVERLAP)
    }
}

/// The work of two lanes together, as a multiple of the work of one alone, by batch size.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overlap(Vec<OverlapPoint>);

impl Overlap {
    /// Takes the measured points, in any order. Without points, lanes gain nothing by running
    /// together.
    pub fn new(mut points: Vec<OverlapPoint>) -> Self {
        points.sort_unstable_by_key(|point| point.batch);
        Overlap(points)
    }

    /// The best overlap that lanes can have.
    pub(super) fn most() -> Self {
        let one = Duration::from_nanos(1);
        Overlap(vec![OverlapPoint { batch: 1, alone: one, together: one }])
    }

    /// The factor for batches of `rows`: the smaller factor of the two measured sizes on both
    /// sides.
    pub fn factor(&self, rows: u32) -> f64 {
        let after = self.0.partition_point(|point| point.batch < rows);
        let above = self.0.get(after);
        let below = after.checked_sub(1).and_then(|index| self.0.get(index));
        let below = below.filter(|_| above.is_none_or(|point| point.batch > rows));
        above.into_iter().chain(below).map(OverlapPoint::factor).reduce(f64::min).unwrap_or(1.0)
    }

    /// The share of the device that a launch of `rows` keeps busy. Two launches of this demand do
    /// [`Self::factor`] times the work of one. Between two measured sizes the share is interpolated
    /// linearly.
    pub fn demand(&self, rows: u32) -> f64 {
        let demand = |point: &OverlapPoint| 1.0 / point.factor().max(f64::MIN_POSITIVE);
        let after = self.0.partition_point(|point| point.batch < rows);
        match (after.checked_sub(1).and_then(|below| self.0.get(below)), self.0.get(after)) {
            (Some(below), Some(above)) => {
                let share = f64::from(rows - below.batch) / f64::from(above.batch - below.batch);
                demand(below) + (demand(above) - demand(below)) * share
            }
            (None, Some(point)) | (Some(point), None) => demand(point),
            (None, None) => 1.0,
        }
    }

    /// The measured points, by batch size.
    pub fn points(&self) -> &[OverlapPoint] {
        &self.0
    }
}

/// The known facts about a model and the device that it runs on.
#[derive(Clone, Debug)]
pub struct AutoInputs {
    /// The model's latencies when it runs alone on the device.
    pub profile: SegmentProfile,
    /// The latencies of the model's segments once it is cut for `staged`. `None`: cutting is taken
    /// to cost only launches.
    pub cut: Option<SegmentProfile>,
    /// Whether the model has a batch dimension.
    pub is_batched: bool,
    /// Whether requests vary in shape, so that they share batches only if they are padded.
    pub varies: bool,
    /// The largest batch, in items.
    pub max_batch: u32,
    /// The time to hand a launch or an answer over to another thread.
    pub launch: Duration,
    /// The cores that lanes and frontends share.
    pub cores: u32,
    /// The cores that a run keeps busy; 0 if the device has its own compute units.
    pub threads: u32,
    /// The batches that `exclusive` runs at once on the same cores or compute units.
    pub at_once: u32,
    /// The batch sizes of the lanes of `elastic`. Empty: `elastic` cannot serve the model.
    pub lanes: Vec<u32>,
    /// The stages and buffer pairs that `staged` may have; none: the model cannot be cut.
    pub stagings: Vec<Staging>,
}

/// A round of launches, which repeats while there is always enough to do.
#[derive(Clone, Copy, Default)]
struct Round {
    items: f64,
    launches: f64,
    /// The time on the device in seconds, lanes side by side.
    device: f64,
    /// The time on cores in seconds.
    core: f64,
}

impl AutoInputs {
    /// The throughput, in items per second, of a round of batches of these sizes through the whole
    /// model.
    pub(super) fn rate(&self, sizes: &[u32], overlap: impl Fn(u32) -> f64) -> f64 {
        let mut round = Round { items: 0.0, launches: sizes.len() as f64, device: 0.0, core: 0.0 };
        for rows in sizes {
            let time = self.profile.total(*rows, 0).as_secs_f64();
            round.items += f64::from(*rows);
            round.device += (time + self.launch.as_secs_f64()) / overlap(*rows).max(f64::MIN_POSITIVE);
            round.core += time * f64::from(self.threads);
        }
        round.rate(self, 1.0)
    }

    /// The throughput of batches of `rows` through these stages. Stages that run at once do `overlap`
    /// times the work of one. `None`: the model is not cut.
    pub(super) fn staged_rate(&self, rows: u32, staging: Staging, overlap: f64) -> Option<f64> {
        let stages = self.cut.as_ref().map_or(staging.stages, SegmentProfile::segments);
        let overlap = if staging.at_once() > 1 { overlap } else { 1.0 };
        (stages > 1).then(|| self.staged(rows, stages).rate(self, overlap))
    }

    /// The round of a batch through all segments, each segment a launch. The later segments run in
    /// the best number of parts.
    fn staged(&self, rows: u32, stages: u16) -> Round {
        let (stages, launch) = (f64::from(stages), self.launch.as_secs_f64());
        let total = |rows| self.profile.total(rows, 0).as_secs_f64();
        let (first, rest): (f64, Box<dyn Fn(u32) -> f64>) = match &self.cut {
            Some(cut) => {
                let rest = |rows| cut.remaining(1, rows, 0).as_secs_f64();
                (cut.time(0, rows, 0).as_secs_f64(), Box::new(rest))
            }
            None => (total(rows) / stages, Box::new(move |rows| total(rows) * (1.0 - 1.0 / stages))),
        };
        let in_parts = |parts: u32| {
            let time = first + f64::from(parts) * rest(rows.div_ceil(parts));
            let launches = 1.0 + f64::from(parts) * (stages - 1.0);
            let device = time + launches * launch;
            Round { items: f64::from(rows), launches, device, core: time * f64::from(self.threads) }
        };
        let all = (0..=rows.max(1).ilog2()).map(|power| in_parts(1 << power));
        all.reduce(|best, next| if next.device < best.device { next } else { best }).unwrap_or_default()
    }
}

impl Round {
    /// The throughput in items per second, where the lanes do `overlap` times the work of one.
    fn rate(&self, inputs: &AutoInputs, overlap: f64) -> f64 {
        let handed_over = (self.items + self.launches) * inputs.launch.as_secs_f64();
        let cores = (handed_over + self.core) / f64::from(inputs.cores.max(1));
        let takes = (self.device / overlap.max(f64::MIN_POSITIVE)).max(cores);
        if takes > 0.0 { self.items / takes } else { 0.0 }
    }
}
