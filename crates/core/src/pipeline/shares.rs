//! The shares of a pipeline's steps in the time that is left.

use super::shape::Shape;
use crate::time::{Duration, Time};

/// This part of all weights is equal for all steps: a short step with a wrong profile must not
/// starve.
const EQUAL: f64 = 0.3;
/// How much more a step weighs if its devices have no idle time.
const LOADED: f64 = 3.0;
/// How far a step that misses its local deadline may go into the time of the steps after it. With all
/// of that time, overloaded devices serve many requests that the later steps then lose.
const PATIENCE: f64 = 0.5;

/// The numbers of a step that its fixed weight follows from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    /// `l(1)`: the time of one request alone.
    pub alone: Duration,
    /// Devices that run the step; a share of a device that other models use too may be a fraction.
    pub devices: f64,
    /// `rho`: which share of these devices is busy, 0 to 1. The batches are as large as they
    /// usually are.
    pub load: f64,
}

/// How the steps of one pipeline share the time that is left.
///
/// A *weight* for each step says how the step shares time with the steps after it. Example: in a
/// chain with the weights 1 and 3, the first step gets a quarter of the time that is left. At a step
/// that a request reaches at `t` with deadline `D`:
///
/// ```text
/// local deadline = D - (D - t) * rest / (own + rest)
/// ```
///
/// `own` is the step's weight, `rest` the weight of the longest path after it. A step that is quick
/// leaves its time to the steps after it.
#[derive(Clone, PartialEq, Debug)]
pub struct Shares {
    weights: Vec<f64>,
    /// By step: the weight of the longest path after it.
    rest: Vec<f64>,
    /// By step: the least time that its own path takes, from the step's start to the end.
    needed: Vec<Duration>,
    /// By step: the least time that the longest path after it takes.
    after: Vec<Duration>,
    patience: f64,
}

impl Shares {
    /// Weights by the rule `l(1) (1 + 1/devices) (1 + 3 rho^2)`, of which 0.3 is equal for all
    /// steps. A device that is busy is waited for; one of few devices is waited for longer.
    ///
    /// # Panics
    /// If `costs` does not have one cost for each step.
    pub fn fixed(shape: &Shape, costs: &[StepCost]) -> Shares {
        let weight = |cost: &StepCost| {
            let load = if cost.load.is_nan() { 0.0 } else { cost.load.clamp(0.0, 1.0) };
            cost.alone.as_secs_f64() * (1.0 + 1.0 / cost.devices.max(0.1)) * (1.0 + LOADED * load * load)
        };
        let raw: Vec<f64> = costs.iter().map(weight).collect();
        let mean = raw.iter().sum::<f64>() / raw.len().max(1) as f64;
        let weights = raw.iter().map(|raw| (1.0 - EQUAL) * raw + EQUAL * mean).collect();
        let alone: Vec<Duration> = costs.iter().map(|cost| cost.alone).collect();
        Shares::with_weights(shape, weights, &alone)
    }

    /// Shares by any weights. A weight that is no positive number is taken as tiny. `alone` has
    /// `l(1)` of each step.
    ///
    /// # Panics
    /// If the lists do not have one entry for each step.
    pub fn with_weights(shape: &Shape, weights: Vec<f64>, alone: &[Duration]) -> Shares {
        let after = shape.rest(alone);
        let needed = after.iter().zip(alone).map(|(after, alone)| *alone + *after).collect();
        let (none, rest) = (Vec::new(), Vec::new());
        Shares { weights: none, rest, needed, after, patience: PATIENCE }.reweighted(shape, weights)
    }

    /// The same pipeline with other weights.
    #[must_use]
    pub fn reweighted(&self, shape: &Shape, mut weights: Vec<f64>) -> Shares {
        for weight in &mut weights {
            *weight = if weight.is_finite() { weight.max(f64::MIN_POSITIVE) } else { f64::MIN_POSITIVE };
        }
        let rest = shape.rest(&weights);
        Shares { weights, rest, needed: self.needed.clone(), after: self.after.clone(), patience: self.patience }
    }

    /// The same pipeline, divided by the weights and the patience of `other`.
    #[must_use]
    pub fn dividing_as(&self, shape: &Shape, other: &Shares) -> Shares {
        self.reweighted(shape, other.weights.clone()).with_patience(other.patience)
    }

    /// The weights, by step.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Whether both have the same weights and patience.
    pub(super) fn divides_as(&self, other: &Shares) -> bool {
        self.weights == other.weights && self.patience == other.patience
    }

    /// When `step` must be done, if a request reaches it at `now` and the whole must be done by
    /// `deadline`. A deadline of [`Time::MAX`] leaves all steps without a deadline.
    pub fn local_deadline(&self, step: usize, now: Time, deadline: Time) -> Time {
        self.local_deadline_beside(step, &[], now, deadline)
    }

    /// [`Shares::local_deadline`] in a fork. `unfinished` has the steps of other branches that have
    /// begun, or can begin, and are not done. The longest unfinished branch counts: a short branch
    /// may take the time that its join waits for the long one anyway.
    pub fn local_deadline_beside(&self, step: usize, unfinished: &[usize], now: Time, deadline: Time) -> Time {
        let path = |step: usize| self.weights[step] + self.rest[step];
        let longest = unfinished.iter().map(|other| path(*other)).fold(path(step), f64::max);
        if deadline == Time::MAX {
            return Time::MAX;
        }
        let left = deadline.since(now).as_nanos() as f64;
        deadline - Duration::from_nanos((left * (self.rest[step] / longest)).round() as u64)
    }

    /// Whether a request can still make its deadline. `remaining` has the steps that have not
    /// begun; the steps that wait for them need not be named. Even alone on idle devices, the
    /// longest path takes [`Shares::needed`].
    pub fn can_make(&self, remaining: &[usize], now: Time, deadline: Time) -> bool {
        now + self.needed(remaining) <= deadline
    }

    /// The last deadline of a step that misses its local deadline, though the whole can still be in
    /// time: [`Shares::patience`] of the way from `local` to the latest instant at which the steps after
    /// it still fit, alone on idle devices. `None`: `local` is the last deadline.
    pub fn last_deadline(&self, step: usize, local: Time, deadline: Time) -> Option<Time> {
        let latest = deadline - self.after[step];
        if latest <= local || self.patience <= 0.0 || deadline == Time::MAX {
            return None;
        }
        let more = (latest.since(local).as_nanos() as f64 * self.patience).round() as u64;
        Some(local + Duration::from_nanos(more))
    }

    /// How much of the time after a missed local deadline a step may use, from 0 to 1.
    pub fn patience(&self) -> f64 {
        self.patience
    }

    /// The same shares with another [`Shares::patience`], which is taken as at least 0 and at most 1.
    #[must_use]
    pub fn with_patience(self, patience: f64) -> Shares {
        Shares { patience: if patience.is_nan() { 0.0 } else { patience.clamp(0.0, 1.0) }, ..self }
    }

    /// The least time that the `remaining` steps and the steps after them take.
    pub fn needed(&self, remaining: &[usize]) -> Duration {
        remaining.iter().map(|step| self.needed[*step]).max().unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(at_ms: u64) -> Time {
        Time::ZERO + ms(at_ms)
    }

    fn chain(weights: &[f64]) -> Shares {
        Shares::with_weights(&Shape::chain(weights.len()), weights.to_vec(), &vec![ms(10); weights.len()])
    }

    #[test]
    fn a_chain_is_divided_by_weights_and_slack_passes_on() {
        let shares = chain(&[1.0, 3.0]);
        assert_eq!(shares.local_deadline(0, at(0), at(100)), at(25));
        assert_eq!(shares.local_deadline(1, at(12), at(100)), at(100), "the last step has all that is left");
        let shares = chain(&[1.0, 1.0, 2.0]);
        assert_eq!(shares.local_deadline(1, at(10), at(100)), at(40), "a third of 90");
        assert_eq!(shares.local_deadline(1, at(25), at(100)), at(50));
    }

    #[test]
    fn the_longest_unfinished_branch_counts() {
        let shape = Shape::new(vec![vec![], vec![0], vec![0], vec![1, 2]]).unwrap();
        let shares = Shares::with_weights(&shape, vec![5.0, 1.0, 3.0, 2.0], &[ms(1); 4]);
        assert_eq!(shares.local_deadline(0, at(0), at(100)), at(50));
        assert_eq!(shares.local_deadline(2, at(50), at(100)), at(80));
        assert_eq!(shares.local_deadline_beside(1, &[2], at(50), at(100)), at(80), "the join waits for 2 anyway");
        assert_eq!(shares.local_deadline_beside(1, &[], at(50), at(101)), at(67), "the other branch is done");
    }

    #[test]
    fn the_first_step_knows_that_the_whole_does_not_fit() {
        let shares = chain(&[1.0, 1.0, 1.0]);
        assert!(shares.can_make(&[0], at(5), at(35)) && !shares.can_make(&[0], at(6), at(35)));
        assert!(shares.can_make(&[2], at(25), at(35)), "done steps need no time");
        assert!(shares.can_make(&[], at(35), at(35)));
        assert!(shares.can_make(&[0], at(5), Time::MAX));
    }

    #[test]
    fn a_step_that_misses_its_local_deadline_has_half_of_the_time_that_is_not_needed() {
        let shares = chain(&[1.0, 3.0]);
        let local = shares.local_deadline(0, at(0), at(100));
        assert_eq!(
            (local, shares.last_deadline(0, local, at(100))),
            (at(25), Some(at(25) + Duration::from_micros(32_500)))
        );
        assert_eq!(
            shares.clone().with_patience(1.0).last_deadline(0, local, at(100)),
            Some(at(90)),
            "10 ms are needed"
        );
        assert_eq!(shares.last_deadline(1, at(100), at(100)), None, "the last step has all of the time already");
        assert_eq!(shares.last_deadline(0, at(95), at(100)), None, "the rest does not fit any more");
        assert_eq!(shares.last_deadline(0, Time::MAX, Time::MAX), None);
        for patience in [0.0, -1.0, f64::NAN] {
            assert_eq!(shares.clone().with_patience(patience).last_deadline(0, local, at(100)), None);
        }
    }

    #[test]
    fn fixed_weights_follow_the_rule() {
        let cost = |alone, devices, load| StepCost { alone: ms(alone), devices, load };
        let shares = Shares::fixed(&Shape::chain(2), &[cost(10, 1.0, 0.0), cost(10, 2.0, 1.0)]);
        // The rule gives 10 * 2 * 1 = 20 and 10 * 1.5 * 4 = 60. Their mean is 40, of which 0.3 is 12.
        let share = shares.weights()[0] / (shares.weights()[0] + shares.weights()[1]);
        assert!((share - 26.0 / 80.0).abs() < 1e-9, "{share}");
    }

    #[test]
    fn odd_numbers_harm_no_one() {
        let cost = StepCost { alone: Duration::ZERO, devices: 0.0, load: f64::NAN };
        for shares in
            [Shares::fixed(&Shape::chain(2), &[cost; 2]), chain(&[f64::NAN, -1.0]), chain(&[f64::INFINITY, 0.0])]
        {
            assert_eq!(shares.local_deadline(0, at(0), at(100)), at(50));
            assert_eq!(shares.local_deadline(0, at(0), Time::MAX), Time::MAX);
            assert_eq!(shares.local_deadline(0, at(101), at(100)), at(100), "a late request keeps its deadline");
        }
    }

    proptest! {
        /// In any graph, each local deadline lies between the arrival at the step and the end of
        /// the whole. Steps that use all of their time make the deadline.
        #[test]
        fn steps_that_keep_their_local_deadlines_make_the_whole(
            edges in prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..3), 1..9),
            weights in prop::collection::vec(0.001..1000.0f64, 9),
            budget in 1..10_000_000_000u64,
        ) {
            let after = edges.iter().enumerate().map(|(step, edges)| {
                edges.iter().filter(|_| step > 0).map(|edge| edge.index(step)).collect()
            });
            let shape = Shape::new(after.collect()).unwrap();
            let shares = Shares::with_weights(&shape, weights[..shape.len()].to_vec(), &vec![ms(0); shape.len()]);
            let deadline = Time::from_nanos(budget);
            let mut done = vec![Time::ZERO; shape.len()];
            for &step in shape.order() {
                let now = shape.steps()[step].after.iter().map(|first| done[*first]).max().unwrap_or(Time::ZERO);
                done[step] = shares.local_deadline(step, now, deadline);
                prop_assert!(now <= done[step] && done[step] <= deadline, "step {}: {:?}", step, shape);
                if shape.next(step).is_empty() {
                    prop_assert_eq!(done[step], deadline);
                }
            }
        }
    }
}
