//! Which policy a model is to have, by what was measured of it.

use serde::{Deserialize, Serialize};

use super::segment_profile::SegmentProfile;
use super::table::PolicyName;
use crate::time::Duration;

/// A policy has to be predicted to answer more than this part more than `exclusive` to be chosen, and to be worse by more than this part to have lost.
pub const MARGIN: f64 = 0.10;
/// The most that two lanes together can do of what one does.
const MOST_OVERLAP: f64 = 2.0;

/// A batch size that ran on one lane, and on two lanes together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OverlapPoint {
    /// Items of a batch.
    pub batch: u32,
    /// What a batch took with the device for itself.
    #[serde(rename = "alone_ns")]
    pub alone: Duration,
    /// What it took while another ran beside it throughout.
    #[serde(rename = "together_ns")]
    pub together: Duration,
}

impl OverlapPoint {
    /// What two lanes together do of what one does alone: 2 where they do not disturb each other, 1 or less where they might as well take turns.
    pub fn factor(&self) -> f64 {
        let together = self.together.as_nanos().max(1) as f64;
        (MOST_OVERLAP * self.alone.as_nanos() as f64 / together).min(MOST_OVERLAP)
    }
}

/// What two lanes together do of what one does alone, by the size of their batches.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overlap(Vec<OverlapPoint>);

impl Overlap {
    /// What was measured, in any order. Nothing: lanes gain nothing by running together.
    pub fn new(mut points: Vec<OverlapPoint>) -> Self {
        points.sort_unstable_by_key(|point| point.batch);
        Overlap(points)
    }

    /// The best there can be.
    fn most() -> Self {
        let one = Duration::from_nanos(1);
        Overlap(vec![OverlapPoint { batch: 1, alone: one, together: one }])
    }

    /// The factor for batches of `rows`: that of the sizes on both sides, whichever is less.
    pub fn factor(&self, rows: u32) -> f64 {
        let after = self.0.partition_point(|point| point.batch < rows);
        let above = self.0.get(after);
        let below = after.checked_sub(1).and_then(|index| self.0.get(index));
        let below = below.filter(|_| above.is_none_or(|point| point.batch > rows));
        above.into_iter().chain(below).map(OverlapPoint::factor).reduce(f64::min).unwrap_or(1.0)
    }

    /// The share of the device that a launch of `rows` keeps busy: so much that two of them do [`Self::factor`] of what one does. Between two sizes that
    /// were measured, on the line through them.
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

    /// What was measured, by batch size.
    pub fn points(&self) -> &[OverlapPoint] {
        &self.0
    }
}

/// What is known of a model and where it runs.
#[derive(Clone, Debug)]
pub struct AutoInputs {
    /// What it takes alone on the device.
    pub profile: SegmentProfile,
    /// What its segments take once it is cut for `staged`; where that is not known, cutting is taken to cost nothing but launches.
    pub cut: Option<SegmentProfile>,
    /// Whether its batches have a size.
    pub is_batched: bool,
    /// Whether requests vary in shape, so that they share batches only where they are padded.
    pub varies: bool,
    /// The largest batch.
    pub max_batch: u32,
    /// What it takes to hand something over to another thread.
    pub launch: Duration,
    /// Cores that lanes and frontends share.
    pub cores: u32,
    /// Of these, how many a run keeps busy; 0: the device has its own.
    pub threads: u32,
    /// Batches that `exclusive` runs at once on the same cores or compute units.
    pub at_once: u32,
    /// The batch sizes of the lanes of `elastic`; none: it cannot have the model.
    pub lanes: Vec<u32>,
    /// Into how many segments `staged` would cut the model; 1: it cannot be cut.
    pub stages: u16,
    /// How many of these run at once.
    pub stages_at_once: u32,
}

/// What is expected of a policy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Prediction {
    /// Which.
    pub policy: PolicyName,
    /// Items a second at most.
    pub items_per_second: f64,
    /// That, over what `exclusive` does.
    pub gain: f64,
}

/// What `auto` chose, and why.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AutoChoice {
    /// The policy.
    pub policy: PolicyName,
    /// In words.
    pub reason: String,
    /// What is expected of `exclusive` and of each policy that can have the model, the best of each; none where no other can have it.
    pub candidates: Vec<Prediction>,
}

impl AutoChoice {
    /// `exclusive`, for a reason that nothing has to be measured for.
    pub fn exclusive(reason: impl Into<String>) -> Self {
        AutoChoice { policy: PolicyName::EXCLUSIVE, reason: reason.into(), candidates: Vec::new() }
    }
}

/// What runs again and again while there is always enough to do.
#[derive(Clone, Copy, Default)]
struct Round {
    items: f64,
    launches: f64,
    /// Seconds of the device, lanes side by side.
    device: f64,
    /// Seconds of cores.
    core: f64,
}

impl AutoInputs {
    /// Chooses by what there is to answer while there is always enough to do, as nothing else is known before requests come.
    ///
    /// A policy does the same round of launches again and again. With `T(b)` for a batch of `b`, `c` for handing a launch over, and `o(b)` for what two lanes do together,
    /// it is bounded by the device, on which a launch takes `(T(b) + c) / o(b)`, and by the cores: each launch and each answer is handed over to another thread, and the
    /// run itself keeps cores busy where the device is the CPU. With `n` items of `L` launches a round,
    ///
    /// ```text
    /// rate = n / max(sum of (T(b) + c) / o(b), (n * c + L * c + sum of T(b) * threads) / cores)
    /// ```
    ///
    /// - `exclusive`: one batch, of the size that this is best for; `o` is 1 unless it runs several at once by itself.
    /// - `windowed`: one batch of the largest size, so that it never is better.
    /// - `elastic` (E²bird): a batch on each lane, of sizes 1, 1, 2, 4, ...; gains only by `o`, and loses by smaller batches and more launches.
    /// - `staged` (DVABatch): a batch of the largest size through all segments, the later ones in parts where these take no longer (policy II); gains by `o`, as two batches are
    ///   in different segments, and by parts, and loses by a launch for each segment and what cutting costs.
    ///
    /// One is preferred to those above it if it gains more than [`MARGIN`] over the best of them: so is any to `exclusive`, and to cut a model is only worth it for so much. What varies in shape is left to `exclusive`: how much padding costs depends on the lengths that will come.
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

    /// Whether anything but `exclusive` would be chosen if lanes did not disturb each other at all: else there is no reason to measure how much they do.
    pub fn could_gain(&self) -> bool {
        self.choose_at_best().policy != PolicyName::EXCLUSIVE
    }

    /// What would be chosen if lanes did not disturb each other at all.
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
        // What is larger than the largest lane would be refused, which `exclusive` answers.
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

    /// Items a second of a round of batches of these sizes, through the whole model.
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

    /// A batch through all segments, each a launch, the later ones in as many parts as is best.
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
    /// Items a second, of lanes that do `overlap` times what one does.
    fn rate(&self, inputs: &AutoInputs, overlap: f64) -> f64 {
        let handed_over = (self.items + self.launches) * inputs.launch.as_secs_f64();
        let cores = (handed_over + self.core) / f64::from(inputs.cores.max(1));
        let takes = (self.device / overlap.max(f64::MIN_POSITIVE)).max(cores);
        if takes > 0.0 { self.items / takes } else { 0.0 }
    }
}
