//! gpu-lets' elastic partitioning (Choi et al., USENIX ATC '22, §4): a greedy algorithm that puts
//! models on partitions.
//!
//! | rule | here |
//! |---|---|
//! | the model of the highest rate first | yes |
//! | the ideal partition of a model: the smaller of its most efficient one and the smallest that takes the rest of its rate | the most efficient: most requests a second for each step |
//! | the smallest free partition of at least that size; a whole device is split | yes, into two at most, in steps of the device and not of 20% |
//! | batches whose execution takes half of the SLO | yes, or one request if even that takes longer |
//! | the rest of a rate may share a partition in time | yes, by the paper's duty cycles: requests gather during one cycle, and the batches of all models run within the next; a cycle and a model's batch fit into its SLO |
//! | the slowdown between two partitions of a device | in the profiles, as for all contenders |

use super::layout::{SlotModel, SlotProblem};
use downbeat_core::LatencyProfile;

use super::mix::half;

/// A partition with its models and their rates.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct GpuLet {
    pub steps: u32,
    pub rates: Vec<(usize, f64)>,
}

/// Devices with their partitions.
type Placed = Vec<Vec<GpuLet>>;

/// Rates below this part of the whole count as nothing.
const NOTHING: f64 = 1e-6;

/// Finds the highest multiple of all rates that the greedy has room for, and its placing; `None` if
/// it has room for no load.
pub(super) fn place(problem: &SlotProblem) -> Option<(f64, Placed)> {
    // An upper bound: each model alone on all steps.
    let most = |model: &SlotModel| {
        let sizes = (1..=problem.steps).filter_map(|steps| throughput(model, steps));
        sizes.fold(0.0, f64::max) * f64::from(problem.devices * problem.steps) / model.rate
    };
    let mut high = problem.models.iter().map(most).fold(f64::INFINITY, f64::min);
    let (mut low, mut best) = (0.0, None);
    // Room for a rate does not imply room for every lower rate. The search therefore goes down from
    // above in steps, and then between the last two.
    while best.is_none() && high > NOTHING {
        best = greedy(problem, high).map(|placed| (high, placed));
        (low, high) = if best.is_some() { (high, high / 0.9) } else { (0.0, high * 0.9) };
    }
    for _ in 0..12 {
        let middle = (low + high) / 2.0;
        match greedy(problem, middle) {
            Some(placed) => (low, best) = (middle, Some((middle, placed))),
            None => high = middle,
        }
    }
    best
}

/// Returns the requests a second of a partition, with the largest batch that takes half of the SLO,
/// or with one request if none does.
fn throughput(model: &SlotModel, steps: u32) -> Option<f64> {
    let profile = profile(model, steps);
    if profile.latency(1) > model.slo {
        return None;
    }
    let batch = profile.largest_within(half(model.slo)).max(1);
    Some(f64::from(batch) / profile.latency(batch).as_secs_f64())
}

fn profile(model: &SlotModel, steps: u32) -> &LatencyProfile {
    &model.profiles[steps as usize - 1]
}

fn greedy(problem: &SlotProblem, factor: f64) -> Option<Placed> {
    let whole = || vec![GpuLet { steps: problem.steps, rates: Vec::new() }];
    let mut placed: Placed = (0..problem.devices).map(|_| whole()).collect();
    let mut order: Vec<usize> = (0..problem.models.len()).collect();
    order.sort_by(|a, b| problem.models[*b].rate.total_cmp(&problem.models[*a].rate));
    for index in order {
        let model = &problem.models[index];
        let rate = model.rate * factor;
        let mut left = rate;
        while left > rate * NOTHING {
            let each = |steps: u32| throughput(model, steps).map(|held| (steps, held));
            let sizes: Vec<(u32, f64)> = (1..=problem.steps).filter_map(each).collect();
            let by_step = |(steps, held): &(u32, f64)| held / f64::from(*steps);
            let efficient = sizes.iter().max_by(|a, b| by_step(a).total_cmp(&by_step(b)))?.0;
            let required = sizes.iter().find(|(_, held)| *held >= left).map_or(problem.steps, |(steps, _)| *steps);
            let ideal = efficient.min(required);
            if required <= efficient && share_in_time(problem, &mut placed, index, left) {
                break;
            }
            left -= take(problem, &mut placed, index, ideal, left)?;
        }
    }
    Some(placed)
}

/// Puts a model on the smallest free partition of at least `ideal` steps, or on the largest free
/// one. Returns the rate that the partition takes.
fn take(problem: &SlotProblem, placed: &mut Placed, index: usize, ideal: u32, left: f64) -> Option<f64> {
    let model = &problem.models[index];
    let free = placed.iter().enumerate().flat_map(|(device, lets)| {
        let free = lets.iter().enumerate().filter(|(_, one)| one.rates.is_empty());
        free.map(move |(at, one)| (one.steps, device, at))
    });
    let free: Vec<(u32, usize, usize)> = free.filter(|(steps, ..)| throughput(model, *steps).is_some()).collect();
    let fits = free.iter().filter(|(steps, ..)| *steps >= ideal).min();
    let (steps, device, at) = *fits.or_else(|| free.iter().max())?;
    let lets = &mut placed[device];
    if steps == problem.steps && ideal < steps {
        lets[at].steps = ideal;
        lets.push(GpuLet { steps: steps - ideal, rates: Vec::new() });
    }
    let takes = throughput(model, lets[at].steps)?.min(left);
    lets[at].rates.push((index, takes));
    Some(takes)
}

/// Puts the rest of a model's rate beside others on a partition, if there is one whose cycles have
/// room.
fn share_in_time(problem: &SlotProblem, placed: &mut Placed, index: usize, left: f64) -> bool {
    let taken = placed.iter_mut().flatten().filter(|one| !one.rates.is_empty());
    for one in taken {
        if one.rates.iter().any(|(model, _)| *model == index) {
            continue;
        }
        let rates: Vec<(usize, f64)> = one.rates.iter().copied().chain([(index, left)]).collect();
        if cycles(problem, one.steps, &rates) {
            one.rates = rates;
            return true;
        }
    }
    false
}

/// Returns whether some cycle works: the batches that gather during a cycle run within one. Each
/// SLO must have room for a cycle and a batch.
fn cycles(problem: &SlotProblem, steps: u32, rates: &[(usize, f64)]) -> bool {
    let shortest =
        rates.iter().map(|(model, _)| problem.models[*model].slo.as_secs_f64()).fold(f64::INFINITY, f64::min);
    (1..40).any(|part| {
        let cycle = shortest * f64::from(part) / 40.0;
        let mut work = 0.0;
        for (index, rate) in rates {
            let model = &problem.models[*index];
            let latency = profile(model, steps).latency((rate * cycle).ceil() as u32).as_secs_f64();
            work += latency;
            if cycle + latency > model.slo.as_secs_f64() {
                return false;
            }
        }
        work <= cycle
    })
}
