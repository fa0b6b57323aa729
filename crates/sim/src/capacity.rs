//! The highest load that a cluster holds.

use crate::arrivals::BadArrivals;
use crate::simulation::{Report, Simulation};

/// Share of each model's requests that may be dropped or late.
const TOLERATED: f64 = 0.01;

/// The outcome of a search.
#[derive(Clone, Debug)]
pub struct Capacity {
    /// Requests per second, all models together.
    pub rate: f64,
    /// The run at that rate.
    pub report: Report,
}

/// The highest rate at which at most 1% of each model's requests are dropped or late: binary search between
/// `low` and `high` times the simulation's own rates, to within `precision` (a share, such as 0.01). `None` if not even
/// `low` is held.
///
/// # Errors
/// If an arrival process has no positive, finite rate and shape.
pub fn capacity(simulation: &Simulation, low: f64, high: f64, precision: f64) -> Result<Option<Capacity>, BadArrivals> {
    let run = |factor: f64| {
        let mut scaled = simulation.clone();
        for load in &mut scaled.loads {
            load.rate *= factor;
        }
        let report = scaled.run()?;
        let rate = scaled.loads.iter().map(|load| load.rate).sum();
        Ok(Some(Capacity { rate, report }).filter(|c| c.report.worst_bad_share() <= TOLERATED))
    };
    let (mut good, mut bad) = (low, high);
    let Some(mut best) = run(low)? else { return Ok(None) };
    while (bad - good) / good > precision {
        let middle = (good + bad) / 2.0;
        match run(middle)? {
            Some(capacity) => (good, best) = (middle, capacity),
            None => bad = middle,
        }
    }
    Ok(Some(best))
}
