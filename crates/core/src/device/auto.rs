//! Chooses a model's policy from measurements of the model.

use serde::{Deserialize, Serialize};

use super::segment_profile::SegmentProfile;
use super::table::PolicyName;
use crate::time::Duration;

/// The part by which policies must differ to matter. `auto` chooses a policy only if it is
/// predicted to answer more than this part more than `exclusive`. A policy has lost if it is worse
/// by more than this part.
pub const MARGIN: f64 = 0.10;
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
    fn most() -> Self {
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
    /// The number of segments into which `staged` would cut the model; 1: the model cannot be cut.
    pub stages: u16,
    /// The number of stages that run at once.
    pub stages_at_once: u32,
}

/// The predicted throughput of a policy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Prediction {
    /// The policy.
    pub policy: PolicyName,
    /// The highest throughput, in items per second.
    pub items_per_second: f64,
    /// The throughput as a multiple of that of `exclusive`.
    pub gain: f64,
}

/// The policy that `auto` chose, and the reason.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AutoChoice {
    /// The chosen policy.
    pub policy: PolicyName,
    /// The reason, in words.
    pub reason: String,
    /// The best prediction for `exclusive` and for each policy that can serve the model. Empty if
    /// no other policy can serve the model.
    pub candidates: Vec<Prediction>,
}

impl AutoChoice {
    /// Chooses `exclusive` for a reason that needs no measurement.
    pub fn exclusive(reason: impl Into<String>) -> Self {
        AutoChoice { policy: PolicyName::EXCLUSIVE, reason: reason.into(), candidates: Vec::new() }
    }
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
    /// Chooses the policy with the highest throughput when there is always enough to do. Nothing
    /// else is known before requests come.
    ///
    /// A policy does the same round of launches again and again. `T(b)` is the time of a batch of
    /// `b`, `c` the time to hand a launch over, and `o(b)` the overlap factor of two lanes. The
    /// device bounds the rate: on it a launch takes `(T(b) + c) / o(b)`. The cores bound it, too:
    /// each launch and each answer is handed over to another thread. The run itself also keeps
    /// cores busy if the device is the CPU. For a round of `n` items in `L` launches:
    ///
    /// ```text
    /// rate = n / max(sum of (T(b) + c) / o(b), (n * c + L * c + sum of T(b) * threads) / cores)
    /// ```
    ///
    /// - `exclusive`: one batch, of the size with the highest rate. `o` is 1 unless `exclusive`
    ///   itself runs several batches at once.
    /// - `windowed`: one batch of the largest size, so that it is never better than `exclusive`.
    /// - `elastic` (E²bird): a batch on each lane, of sizes 1, 1, 2, 4, ... It gains only by `o`,
    ///   and loses by smaller batches and more launches.
    /// - `staged` (DVABatch): a batch of the largest size through all segments. The later segments
    ///   run in parts if the parts take no longer (policy II). It gains by `o`, as two batches are
    ///   in different segments, and by the parts. It loses by a launch for each segment and by the
    ///   cost of cutting.
    ///
    /// Candidates are tried in this order. A later candidate wins only if it gains more than
    /// [`MARGIN`] over the best earlier one. So every policy must beat `exclusive` by that much,
    /// and a model is cut only for a gain of that size. A model whose requests vary in shape gets
    /// `exclusive`: the cost of padding depends on the lengths that will come.
    pub fn choose(&self, overlap: &Overlap) -> AutoChoice {
        if !self.is_batched {
            return AutoChoice::exclusive(
                "the model has no batch dimension (max_batch_size is 0): no policy can put its requests together",
            );
        }
        if self.varies {
            return AutoChoice::exclusive(
                "requests vary in shape: what padding them costs depends on the lengths that come, which nobody knows yet",
            );
        }
        let candidates = self.candidates(overlap);
        let is_worth = |next: &Prediction, best: &Prediction| next.gain > best.gain * (1.0 + MARGIN);
        let best = candidates.iter().reduce(|best, next| if is_worth(next, best) { next } else { best });
        let measured = match *overlap == Overlap::most() {
            true => format!("even if lanes did not disturb each other at all; a launch costs {}", self.launch),
            false => format!(
                "two lanes together do {:.2} times what one does with batches of {}, and a launch costs {}",
                overlap.factor(self.max_batch),
                self.max_batch,
                self.launch
            ),
        };
        match best {
            Some(best) if best.policy != PolicyName::EXCLUSIVE => AutoChoice {
                policy: best.policy,
                reason: format!(
                    "{} is predicted to answer {:.2} times as much as exclusive: {measured}",
                    best.policy, best.gain
                ),
                candidates,
            },
            _ => {
                let others = candidates.iter().filter(|candidate| candidate.policy != PolicyName::EXCLUSIVE);
                let gains: Vec<String> = others.map(|other| format!("{} {:.2}", other.policy, other.gain)).collect();
                AutoChoice {
                    policy: PolicyName::EXCLUSIVE,
                    reason: format!(
                        "no policy is predicted to answer more than {:.0}% more than exclusive ({} times as much): {measured}",
                        MARGIN * 100.0,
                        gains.join(", ")
                    ),
                    candidates,
                }
            }
        }
    }

    /// Whether `auto` would choose another policy than `exclusive` if lanes did not disturb each
    /// other at all. If not, the overlap need not be measured.
    pub fn could_gain(&self) -> bool {
        self.choose_at_best().policy != PolicyName::EXCLUSIVE
    }

    /// Chooses the policy as if lanes did not disturb each other at all.
    pub fn choose_at_best(&self) -> AutoChoice {
        self.choose(&Overlap::most())
    }

    fn stages(&self) -> u16 {
        self.cut.as_ref().map_or(self.stages, SegmentProfile::segments)
    }

    fn candidates(&self, overlap: &Overlap) -> Vec<Prediction> {
        let max_batch = self.max_batch.max(1);
        let own = |rows| if self.at_once > 1 { overlap.factor(rows) } else { 1.0 };
        let exclusive = (1..=max_batch).map(|rows| self.rate(&[rows], own)).fold(0.0, f64::max);
        let windowed = self.rate(&[max_batch], |_| 1.0);
        let beside = |rows| overlap.factor(rows);
        // `elastic` refuses a request larger than its largest lane, while `exclusive` answers it.
        let fits = self.lanes.iter().any(|rows| *rows >= max_batch);
        let elastic = fits.then(|| (PolicyName::ELASTIC, self.rate(&self.lanes, beside)));
        let staged = (self.stages() > 1).then(|| {
            let together = if self.stages_at_once > 1 { overlap.factor(max_batch) } else { 1.0 };
            (PolicyName::STAGED, self.staged(max_batch).rate(self, together))
        });
        let all = [(PolicyName::EXCLUSIVE, exclusive), (PolicyName::WINDOWED, windowed)];
        let all = all.into_iter().chain(elastic).chain(staged);
        let gain = |rate: f64| if exclusive > 0.0 { rate / exclusive } else { 1.0 };
        all.map(|(policy, rate)| Prediction { policy, items_per_second: rate, gain: gain(rate) }).collect()
    }

    /// The throughput, in items per second, of a round of batches of these sizes through the whole
    /// model.
    fn rate(&self, sizes: &[u32], overlap: impl Fn(u32) -> f64) -> f64 {
        let mut round = Round { items: 0.0, launches: sizes.len() as f64, device: 0.0, core: 0.0 };
        for rows in sizes {
            let time = self.profile.total(*rows, 0).as_secs_f64();
            round.items += f64::from(*rows);
            round.device += (time + self.launch.as_secs_f64()) / overlap(*rows).max(f64::MIN_POSITIVE);
            round.core += time * f64::from(self.threads);
        }
        round.rate(self, 1.0)
    }

    /// The round of a batch through all segments, each segment a launch. The later segments run in
    /// the best number of parts.
    fn staged(&self, rows: u32) -> Round {
        let (stages, launch) = (f64::from(self.stages()), self.launch.as_secs_f64());
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
