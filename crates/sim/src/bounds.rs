//! Bounds that no scheduler can surpass. Capacities are given as shares of them.
//!
//! | bound | of | says |
//! |---|---|---|
//! | [`staggered`] | one model | the goodput of the staggered pattern (Symphony §3.3), with which the paper compares; other patterns may reach more |
//! | [`fluid`] | any models | no schedule serves more of *evenly spaced* arrivals without a loss |
//!
//! The bounds are for devices of one kind: they use the first profile of each model. A profile that
//! ends before the largest batch is extended, as in the scheduler.

use downbeat_core::{Duration, LatencyProfile};

use crate::simulation::Load;

/// The best staggered pattern of one model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Staggered {
    /// The size of the batches.
    pub batch: u32,
    /// Requests per second.
    pub rate: f64,
}

/// The best staggered pattern (Symphony §3.3, equations 1 and 2). A request waits for at most
/// `l(b) / N`, so batches of `b` meet the SLO if `(1 + 1/N) * l(b) <= SLO`. Of these sizes, the
/// function takes the one with the highest goodput `N * b / l(b)`. Returns `None` if not even
/// `b = 1` meets the SLO, or without devices.
pub fn staggered(profile: &LatencyProfile, max_batch: u32, slo: Duration, devices: u32) -> Option<Staggered> {
    let slo = slo.as_secs_f64();
    let devices = f64::from(devices);
    (1..=max_batch.max(1))
        .map(|batch| (batch, profile.latency(batch).as_secs_f64()))
        .take_while(|(_, latency)| (1.0 + 1.0 / devices) * latency <= slo)
        .map(|(batch, latency)| Staggered { batch, rate: devices * f64::from(batch) / latency })
        .max_by(|a, b| a.rate.total_cmp(&b.rate))
}

/// The highest total rate, in the proportions of `loads`, at which the devices have enough time for
/// evenly spaced arrivals. In requests per second; `None` if a model's SLO is below `l(1)`.
///
/// At rate `r`, requests come `1/r` apart. The last request of a batch of `b` comes `(b - 1) / r`
/// after the first. The batch starts no earlier, and ends by the first's deadline:
/// `(b - 1) / r + l(b) <= SLO`. So no request costs less device time than `min l(b) / b` over these
/// `b`. The sum over all models of `r * min l(b) / b` is at most the number of devices.
///
/// The bound holds for evenly spaced arrivals without a loss. Nothing shows that the batches can be
/// placed on the devices. It is no bound for random arrivals: they sometimes gather faster, and 1%
/// may be lost. Yet they have never reached it (the lab's `clairvoyant` is a bound for them). A
/// model alone may also have to wait for a device: see [`staggered`].
pub fn fluid(loads: &[Load], devices: u32) -> Option<f64> {
    /// From `factor` times the rates on, `model` can have batches that cost `cost` seconds of a
    /// device each second.
    struct BatchChoice {
        factor: f64,
        model: usize,
        cost: f64,
    }
    let mut choices = Vec::new();
    for (model, load) in loads.iter().enumerate() {
        let (profile, slo) = (load.options.profiles.first(), load.slo.as_secs_f64());
        for batch in 1..=load.options.max_batch.max(1) {
            let latency = profile.latency(batch).as_secs_f64();
            let gathering = f64::from(batch - 1) / load.rate;
            if latency > slo || (batch > 1 && latency == slo) {
                break;
            }
            let factor = if batch == 1 { 0.0 } else { gathering / (slo - latency) };
            choices.push(BatchChoice { factor, model, cost: load.rate * latency / f64::from(batch) });
        }
    }
    choices.sort_by(|a, b| a.factor.total_cmp(&b.factor));
    let mut costs = vec![f64::INFINITY; loads.len()];
    let mut best = None;
    // Between two factors with a new choice, the work grows in proportion to the factor.
    for (at, choice) in choices.iter().enumerate() {
        costs[choice.model] = costs[choice.model].min(choice.cost);
        let work: f64 = costs.iter().sum();
        let until = choices.get(at + 1).map_or(f64::INFINITY, |next| next.factor);
        let most = (f64::from(devices) / work).min(until);
        if work.is_finite() && most >= choice.factor {
            best = Some(most);
        }
    }
    best.map(|factor| factor * loads.iter().map(|load| load.rate).sum::<f64>())
}
