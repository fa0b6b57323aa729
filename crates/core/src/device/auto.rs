//! Chooses a model's policy from measurements of the model.

use serde::{Deserialize, Serialize};

use super::auto_inputs::{AutoInputs, Overlap};
use super::entry::PolicyName;

/// The part by which policies must differ to matter. `auto` chooses a policy only if it is
/// predicted to answer more than this part more than `exclusive`. A policy has lost if it is worse
/// by more than this part.
pub const MARGIN: f64 = 0.10;
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
                "requests vary in shape: the cost of padding depends on the lengths of requests, which are not known yet",
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
                    "{} is predicted to answer {:.2} times as many requests as exclusive: {measured}",
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
                        "no policy is predicted to answer {:.0}% more requests than exclusive ({} times as many): {measured}",
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

    fn candidates(&self, overlap: &Overlap) -> Vec<Prediction> {
        let rate = |policy: PolicyName| (policy.0.predict)(self, overlap);
        let exclusive = rate(PolicyName::EXCLUSIVE).unwrap_or(0.0);
        let gain = |rate: f64| if exclusive > 0.0 { rate / exclusive } else { 1.0 };
        let prediction = |policy| {
            let items_per_second = rate(policy)?;
            Some(Prediction { policy, items_per_second, gain: gain(items_per_second) })
        };
        PolicyName::all().filter_map(prediction).collect()
    }
}
