//! Searches a cluster's capacity: the highest load at which few requests of each model are dropped
//! or late (1% by default).

use std::cell::Cell;

use downbeat_core::Duration;
use serde::Serialize;

use crate::arrivals::BadArrivals;
use crate::simulation::Simulation;
use crate::tables::report::Report;

/// Default for [`Search::tolerated`]: the share of each model's requests that may be dropped or
/// late.
pub const TOLERATED: f64 = 0.01;

/// The parameters of a search for a capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Search {
    /// Share of each model's requests that may be dropped or late.
    pub tolerated: f64,
    /// The search ends when the bounds are this close, as a share of the capacity.
    pub precision: f64,
    /// The upper start of the search, times the simulation's own rates: a load that probably does
    /// not hold.
    pub high: f64,
    /// The lower start of the search, times the simulation's own rates: a load that probably holds.
    pub low: f64,
    /// Runs are lengthened until the least popular model gets about this many requests. With 1%
    /// tolerated, 10,000 requests tell its bad share to within 0.1% (one standard deviation, if
    /// requests are independent). The worst of many models is always the unluckiest. 0:
    /// [`Simulation::span`] as it is.
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

/// The reason why a search found no capacity.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct NoCapacity {
    /// The lowest tried rate that lost more than is tolerated, in requests per second.
    pub not_held: Option<f64>,
    /// Runs below `not_held` had fewer requests than this, too few to tell the tolerated share.
    /// `None`: lower rates were not worth trying.
    pub too_few_below: Option<u64>,
}

/// A search gives up below this share of its lower start.
const LEAST: f64 = 1e-3;

/// The start and the end of a search for a load.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// A load that probably holds.
    pub low: f64,
    /// A load that probably does not hold.
    pub high: f64,
    /// The search gives up after trying a load below this.
    pub least: f64,
    /// `high` is multiplied by this until it does not hold.
    pub widening: f64,
    /// The search ends when the bounds are this close, as a share of the load.
    pub precision: f64,
}

impl Bounds {
    /// Returns the result of `trial` for the highest load that holds, that is for which `trial`
    /// returns `Some`. A binary search between bounds that are widened until they enclose that
    /// load. `None` if no load holds, however small.
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
    /// Checks that runs can be as long as [`Search::requests_per_model`] demands.
    ///
    /// # Errors
    /// If [`Search::requests_per_model`] is no number, below 0, or more than can be simulated.
    pub fn check(&self) -> Result<(), String> {
        let wanted = self.requests_per_model;
        let fine = (0.0..=MOST_REQUESTS).contains(&wanted);
        fine.then_some(())
            .ok_or_else(|| format!("requests_per_model is {wanted}; the value must be from 0 to {MOST_REQUESTS}"))
    }

    /// The highest rate at which no model has more bad requests than tolerated, or the reason why
    /// there is none. A binary search between bounds that are widened until they enclose the rate.
    /// In a run with very few requests, one bad request may exceed the tolerated share: such a run
    /// does not hold.
    ///
    /// All trials have the same seed. A higher rate meets the same pattern of arrivals, only
    /// faster.
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
        // The factor at which a run has twice the needed number of requests.
        let telling = 2.0 * enough as f64 / (rate * simulation.span.as_secs_f64());
        let low = if self.requests_per_model > 0.0 { self.low } else { self.low.max(telling) };
        let (high, precision) = (self.high.max(low), self.precision);
        let found = Bounds { low, high, least: low * LEAST, widening: 1.25, precision }.highest(trial)?;
        Ok(found.ok_or(NoCapacity { not_held: not_held.get(), too_few_below: too_few.get().then_some(enough) }))
    }

    /// The fewest devices that hold the simulation's own rates, from 1 to `most`; `None` if not
    /// even `most` devices do.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn fewest_devices(&self, simulation: &Simulation, most: u32) -> Result<Option<(u32, Report)>, BadArrivals> {
        let trial = |devices: u32| -> Result<Option<Report>, BadArrivals> {
            let mut sized = self.scaled(simulation, 1.0);
            sized.devices = devices;
            Ok(Some(sized.run()?).filter(|report| report.holds(self.tolerated)))
        };
        // From few to many: a run on far too many devices costs more than a run that gives up at
        // once.
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

    /// The simulation at `factor` times its rates, made long enough for
    /// [`Search::requests_per_model`]. It gives up as soon as a model loses more than is tolerated.
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

/// Runs [`Search::capacity`] from `low` and `high` times the simulation's own rates, with 1%
/// tolerated and this precision (a share, such as 0.01).
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
