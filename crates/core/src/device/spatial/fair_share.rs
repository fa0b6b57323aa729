//! Weighted max-min fairness in whole steps.

/// What one asks for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Claim {
    /// Compute units that it could use: its knee, or what its tuning says.
    pub demand: f64,
    /// How much it counts among those who do not get what they ask for (GSLICE §3.2.3: what it asks for).
    pub weight: f64,
}

impl Claim {
    /// One that counts as much as it asks for.
    pub fn of(demand: f64) -> Self {
        Claim { demand, weight: demand }
    }
}

/// Divides the compute units of a device among those who ask for some (GSLICE §3.2.3).
///
/// 1. The smallest demand first: whoever asks for no more than an even part of what is left gets what it asks for.
/// 2. The others each get as much as the largest of these, and share what is left then in proportion to their weights, none above its demand.
///    (In proportion alone, as the paper has it, one who asks for a little more than an even part could get less than those who ask for less.)
/// 3. What nobody asks for goes to all by weight if it is to be spread: "unless the GPU is underutilized".
///
/// Everybody gets whole steps of the device's grain, one at least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FairShare {
    /// Compute units to divide.
    pub units: u32,
    /// Shares are multiples of it; at least 1.
    pub grain: u32,
    /// Whether what is left over when all have what they ask for is given away, too.
    pub spread: bool,
}

/// One who asks, in steps.
struct Asking {
    index: usize,
    demand: u32,
    weight: f64,
    gets: u32,
}

impl FairShare {
    /// What each gets, in the order of the claims; `None`: there are not as many steps as claims.
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

/// Gives those who ask for no more than an even part what they ask for, and the others as much as the largest of these, or one step. What is left.
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

/// Gives step by step to whoever has least for its weight, of those who may have more. What is left.
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
