//! Weighted max-min fairness in whole steps.

/// A demand for compute units.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Claim {
    /// The compute units that the claimant could use: its knee, or the result of its tuning.
    pub demand: f64,
    /// The claimant's weight among those whose demand is not met (GSLICE §3.2.3: its demand).
    pub weight: f64,
}

impl Claim {
    /// A claim whose weight is its demand.
    pub fn of(demand: f64) -> Self {
        Claim { demand, weight: demand }
    }
}

/// Divides the compute units of a device among claims (GSLICE §3.2.3).
///
/// 1. The smallest demand goes first. A claim for no more than an even part of the rest gets its
///    demand.
/// 2. Each other claim gets as much as the largest of the claims that were met. These claims then
///    share the rest in proportion to their weights, none above its demand. (The paper shares in
///    proportion alone. Then a claim for a little more than an even part could get less than
///    smaller claims.)
/// 3. With `spread`, units without demand go to all claims by weight: "unless the GPU is
///    underutilized".
///
/// Each claim gets whole steps of the device's grain, at least one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FairShare {
    /// The compute units to divide.
    pub units: u32,
    /// The step of shares; at least 1.
    pub grain: u32,
    /// Whether to give away the units that remain after all demands are met.
    pub spread: bool,
}

/// A claim in steps.
struct Asking {
    index: usize,
    demand: u32,
    weight: f64,
    gets: u32,
}

impl FairShare {
    /// The units of each claim, in the order of the claims; `None`: there are fewer steps than
    /// claims.
    pub fn divide(&self, claims: &[Claim]) -> Option<Vec<u32>> {
        let grain = self.grain.max(1);
        let steps = self.units / grain;
        if claims.len() > steps as usize {
            return None;
        }
        let asking = |(index, claim): (usize, &Claim)| Asking {
            index,
            demand: ((claim.demand / f64::from(grain)).ceil() as u32).clamp(1, steps),
            weight: if claim.weight.is_finite() { claim.weight.max(f64::MIN_POSITIVE) } else { 1.0 },
            gets: 0,
        };
        let mut all: Vec<Asking> = claims.iter().enumerate().map(asking).collect();
        all.sort_by_key(|one| (one.demand, one.index));
        let left = satisfy(&mut all, steps);
        let left = fill(&mut all, left, |one| one.gets < one.demand);
        if self.spread {
            fill(&mut all, left, |_| true);
        }
        all.sort_by_key(|one| one.index);
        Some(all.iter().map(|one| one.gets * grain).collect())
    }
}

/// Meets the claims for no more than an even part. Each other claim gets as much as the largest of
/// these, or one step. Returns the remaining steps.
fn satisfy(all: &mut [Asking], steps: u32) -> u32 {
    let (mut left, mut count, mut least) = (steps, all.len() as u32, 1);
    for one in all.iter_mut() {
        if one.demand > left / count {
            break;
        }
        (one.gets, least) = (one.demand, one.demand);
        (left, count) = (left - one.gets, count - 1);
    }
    for one in all.iter_mut().filter(|one| one.gets == 0) {
        one.gets = least;
        left -= least;
    }
    left
}

/// Gives step by step to the claim with the least units for its weight, among claims for which
/// `may` holds. Returns the remaining steps.
fn fill(all: &mut [Asking], mut left: u32, may: impl Fn(&Asking) -> bool) -> u32 {
    let next = |one: &Asking| f64::from(one.gets + 1) / one.weight;
    while left > 0 {
        let poorest = all.iter_mut().filter(|one| may(one)).min_by(|a, b| next(a).total_cmp(&next(b)));
        let Some(poorest) = poorest else { break };
        poorest.gets += 1;
        left -= 1;
    }
    left
}
