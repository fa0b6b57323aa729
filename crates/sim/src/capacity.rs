//! The highest load that a cluster holds.

use std::cell::Cell;

use downbeat_core::Duration;
use serde::Serialize;

use crate::arrivals::BadArrivals;
use crate::report::Report;
use crate::simulation::Simulation;

/// Share of each model's requests that may be dropped or late, if nothing else is said.
pub const TOLERATED: f64 = 0.01;

/// How a capacity is searched.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Search {
    /// Share of each model's requests that may be dropped or late.
    pub tolerated: f64,
    /// The search ends when the capacity is known to this share of it.
    pub precision: f64,
    /// Where it begins, times the simulation's own rates: not held, probably.
    pub high: f64,
    /// Where it begins, times the simulation's own rates: held, probably.
    pub low: f64,
    /// Runs are lengthened until the least popular model gets about so many requests: with 1% tolerated, 10,000 requests tell its bad
    /// share to within 0.1% (one standard deviation, if they are independent), and the worst of many models is always the
    /// unluckiest. 0: [`Simulation::span`] as it is.
    pub requests_per_model: f64,
}

impl Default for Search {
    fn default() -> Self {
        Search { tolerated: TOLERATED, precision: 0.005, high: 1.0, low: 0.5, requests_per_model: 0.0 }
    }
}

/// The outcome of a search.
#[derive(Clone, PartialEq, Debug)]
pub struct Capacity {
    /// Requests per second, all models together.
    pub rate: f64,
    /// The run at that rate.
    pub report: Report,
}

/// Why there is no capacity.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct NoCapacity {
    /// The least rate that was tried and lost more than is tolerated, in requests per second.
    pub not_held: Option<f64>,
    /// A run needs so many requests to tell the share that may be bad, and at less than `not_held` it had fewer. `None`: less was not worth trying.
    pub too_few_below: Option<u64>,
}

/// A search gives up below this share of where it began.
const LEAST: f64 = 1e-3;

/// Between what a load is searched.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Held, probably.
    pub low: f64,
    /// Not held, probably.
    pub high: f64,
    /// The search gives up once it has tried less than this.
    pub least: f64,
    /// By what `high` is multiplied until it is not held.
    pub widening: f64,
    /// The search ends when the load is known to this share of it.
    pub precision: f64,
}

impl Bounds {
    /// What `trial` gives for the highest load for which it gives something: a binary search, between bounds that are widened until they
    /// enclose it. `None` if no load is held, however small.
    pub fn highest<T, E>(&self, trial: impl Fn(f64) -> Result<Option<T>, E>) -> Result<Option<T>, E> {
        let (mut good, mut bad) = (self.low, self.high);
        let mut best = loop {
            match trial(good)? {
                Some(held) => break held,
                None if good < self.least => return Ok(None),
                None => (good, bad) = (good / 2.0, good),
            }
        };
        if bad == self.high {
            while let Some(held) = trial(bad)? {
                (good, best) = (bad, held);
                bad *= self.widening;
            }
        }
        while (bad - good) / good > self.precision {
            let middle = (good + bad) / 2.0;
            match trial(middle)? {
                Some(held) => (good, best) = (middle, held),
                None => bad = middle,
            }
        }
        Ok(Some(best))
    }
}

/// Most requests of a model that runs are lengthened for.
const MOST_REQUESTS: f64 = 1e9;

impl Search {
    /// Says whether runs can be so long.
    ///
    /// # Errors
    /// If [`Search::requests_per_model`] is no number, below 0, or more than can be simulated.
    pub fn check(&self) -> Result<(), String> {
        let wanted = self.requests_per_model;
        let fine = (0.0..=MOST_REQUESTS).contains(&wanted);
        fine.then_some(())
            .ok_or_else(|| format!("requests_per_model is {wanted}; it has to be from 0 to {MOST_REQUESTS}"))
    }

    /// The highest rate at which no model has more bad requests than tolerated: a binary search, between bounds that are widened until
    /// they enclose it; or why there is none. A run with so few requests that one bad one is more than is tolerated says nothing, and is not held.
    ///
    /// All trials have the same seed, so that a higher rate meets the same pattern of arrivals, only faster.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn capacity(&self, simulation: &Simulation) -> Result<Result<Capacity, NoCapacity>, BadArrivals> {
        let enough = (1.0 / self.tolerated).ceil() as u64;
        let (not_held, too_few) = (Cell::new(None), Cell::new(false));
        let trial = |factor: f64| -> Result<Option<Capacity>, BadArrivals> {
            let scaled = self.scaled(simulation, factor);
            let report = scaled.run()?;
            let rate = scaled.loads.iter().map(|load| load.rate).sum();
            let (holds, few) = (report.holds(self.tolerated), !report.gave_up && report.offered() < enough);
            if few {
                too_few.set(true);
            } else if !holds {
                not_held.set(Some(rate));
            }
            Ok((holds && !few).then_some(Capacity { rate, report }))
        };
        let rate: f64 = simulation.loads.iter().map(|load| load.rate).sum();
        // Where about twice as many come as are needed, a run can tell.
        let telling = 2.0 * enough as f64 / (rate * simulation.span.as_secs_f64());
        let low = if self.requests_per_model > 0.0 { self.low } else { self.low.max(telling) };
        let (high, precision) = (self.high.max(low), self.precision);
        let found = Bounds { low, high, least: low * LEAST, widening: 1.25, precision }.highest(trial)?;
        Ok(found.ok_or(NoCapacity { not_held: not_held.get(), too_few_below: too_few.get().then_some(enough) }))
    }

    /// The fewest devices that hold the simulation's own rates, from 1 to `most`; `None` if not even those do.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn fewest_devices(&self, simulation: &Simulation, most: u32) -> Result<Option<(u32, Report)>, BadArrivals> {
        let trial = |devices: u32| -> Result<Option<Report>, BadArrivals> {
            let mut sized = self.scaled(simulation, 1.0);
            sized.devices = devices;
            Ok(Some(sized.run()?).filter(|report| report.holds(self.tolerated)))
        };
        // From few to many: a run on far too many devices costs more than one that gives up at once.
        let (mut few, mut enough) = (0, 1);
        let mut best = loop {
            match trial(enough)? {
                Some(report) => break report,
                None if enough == most => return Ok(None),
                None => (few, enough) = (enough, (enough * 2).min(most)),
            }
        };
        while enough - few > 1 {
            let middle = few + (enough - few) / 2;
            match trial(middle)? {
                Some(report) => (enough, best) = (middle, report),
                None => few = middle,
            }
        }
        Ok(Some((enough, best)))
    }

    /// The simulation at `factor` times its rates, made long enough for [`Search::requests_per_model`].
    /// It gives up once more is lost than is tolerated.
    pub fn scaled(&self, simulation: &Simulation, factor: f64) -> Simulation {
        let mut scaled = simulation.clone();
        scaled.give_up_above = Some(self.tolerated);
        let mut least = f64::INFINITY;
        for load in &mut scaled.loads {
            load.rate *= factor;
            least = least.min(load.rate);
        }
        if least > 0.0 && least.is_finite() {
            scaled.span = scaled.span.max(Duration::from_secs_f64(self.requests_per_model / least));
        }
        scaled
    }
}

/// [`Search::capacity`] that begins between `low` and `high` times the simulation's own rates, tolerates 1%, and ends
/// within `precision` (a share, such as 0.01).
///
/// # Errors
/// If an arrival process has no positive, finite rate and shape.
pub fn capacity(
    simulation: &Simulation,
    low: f64,
    high: f64,
    precision: f64,
) -> Result<Result<Capacity, NoCapacity>, BadArrivals> {
    Search { low, high, precision, ..Search::default() }.capacity(simulation)
}
