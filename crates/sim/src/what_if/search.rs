//! The runs of a search for advice.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::advice::NoAdvice;
use super::candidate::Candidate;
use super::recorded::Recorded;
use super::setting::{BadSetting, Setting};
use crate::parallel;

/// Counts the runs.
pub(super) struct Counts<'a> {
    goes_on: &'a (dyn Fn(usize, usize) -> bool + Sync),
    done: AtomicUsize,
    /// The number of runs as far as it is known.
    planned: AtomicUsize,
}

/// Margins are searched up to this.
pub const MOST_MARGIN: f64 = 64.0;
/// The longest SLOs that are tried where no setting holds, as a multiple of the present ones.
const LONGEST_SLO: f64 = 16.0;
/// Approximate runs for a policy's margin. One run has the figures, and two find a rate that does not hold.
/// The others try rates between.
pub(super) const MARGIN_RUNS: usize = 10;
/// Approximate runs for the smallest batch and the tightest SLOs.
pub(super) const LAST_RUNS: usize = 12;

impl<'a> Counts<'a> {
    pub fn new(goes_on: &'a (dyn Fn(usize, usize) -> bool + Sync)) -> Self {
        Counts { goes_on, done: AtomicUsize::new(0), planned: AtomicUsize::new(0) }
    }

    /// Adds to the planned runs.
    pub fn plan(&self, runs: usize) {
        self.planned.fetch_add(runs, Ordering::Relaxed);
    }

    /// Reports the number of finished runs. Returns whether another one may begin.
    fn told(&self, done: usize) -> bool {
        (self.goes_on)(done, self.planned.load(Ordering::Relaxed).max(done + 1))
    }

    /// Makes a run, unless the caller has ended the search.
    pub fn run<T>(&self, run: impl FnOnce() -> Result<T, BadSetting>) -> Result<T, NoAdvice> {
        if !self.told(self.done.load(Ordering::Relaxed)) {
            return Err(NoAdvice::Interrupted);
        }
        let result = run()?;
        self.told(self.done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(result)
    }
}

/// Tries settings for a target.
pub(super) struct Trials<'a> {
    pub recorded: &'a Recorded,
    pub target: f64,
    /// The price of a device for an hour.
    pub price: Option<f64>,
    pub threads: usize,
    pub counts: Counts<'a>,
}

impl Trials<'_> {
    /// The fewest devices, at most `most`, on which one of the settings holds; `None`: no setting holds.
    pub fn fewest_devices(&self, settings: &[Setting], most: u32) -> Result<Option<u32>, NoAdvice> {
        let hold = |devices: u32| {
            self.counts.plan(settings.len());
            let settings: Vec<Setting> =
                settings.iter().map(|setting| Setting { devices, ..setting.clone() }).collect();
            let holding = parallel::map(&settings, self.threads, |setting| self.holds(setting), |_| {});
            Ok::<bool, NoAdvice>(holding.into_iter().collect::<Result<Vec<bool>, _>>()?.contains(&true))
        };
        // With fewer than `low` devices no setting holds.
        let mut low = settings.first().map_or(1, |any| self.recorded.least_devices(any, self.target)).min(most);
        let (mut high, mut step) = (low, 1u32);
        while !hold(high)? {
            if high == most {
                return Ok(None);
            }
            low = high + 1;
            (high, step) = (high.saturating_add(step).min(most), step.saturating_mul(2));
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if hold(middle)? { high = middle } else { low = middle + 1 }
        }
        Ok(Some(high))
    }

    /// Whether each model's attainment is at least the target.
    fn holds(&self, setting: &Setting) -> Result<bool, NoAdvice> {
        // Rounding of a share such as 0.99 must not cost a request.
        let tolerated = 1.0 - self.target + 1e-12;
        let mut simulation = self.recorded.simulation(setting)?;
        simulation.give_up_above = Some(tolerated);
        self.counts.run(|| Ok(simulation.run()?.holds(tolerated)))
    }

    /// The outcome of a setting, without its margin.
    pub fn outcome(&self, setting: &Setting) -> Result<Candidate, NoAdvice> {
        self.counts.run(|| Candidate::of(self.recorded, setting, (self.target, self.price)))
    }

    /// The outcomes of settings, in their order.
    pub fn outcomes(&self, settings: &[Setting]) -> Result<Vec<Candidate>, NoAdvice> {
        parallel::map(settings, self.threads, |setting| self.outcome(setting), |_| {}).into_iter().collect()
    }

    /// The outcome of a setting, with its margin.
    pub fn candidate(&self, setting: &Setting) -> Result<Candidate, NoAdvice> {
        let candidate = self.outcome(setting)?;
        let at = |factor: f64| self.holds(&Setting { rate: setting.rate * factor, ..setting.clone() });
        let margin = if at(1.0)? { Some(highest(at)?) } else { None };
        Ok(Candidate { margin, ..candidate })
    }

    /// The smallest power of two that holds as the largest batch of all models; `None`: no power
    /// below their limits holds.
    pub fn smallest_batch(&self, setting: &Setting) -> Result<Option<u32>, NoAdvice> {
        let largest = self.recorded.models.iter().map(|model| model.options.max_batch).max().unwrap_or(1);
        for size in (0..31).map(|power| 1 << power).take_while(|size| *size < largest) {
            if self.holds(&Setting { max_batch: Some(size), ..setting.clone() })? {
                return Ok(Some(size));
            }
        }
        Ok(None)
    }

    /// The tightest SLOs that hold, as a share of the setting's SLOs, to 0.02. If `is_held`, the present
    /// SLOs hold; otherwise longer ones are tried. `None`: the longest do not hold.
    pub fn tightest(&self, setting: &Setting, is_held: bool) -> Result<Option<f64>, NoAdvice> {
        let hold = |factor: f64| self.holds(&Setting { slo_factor: setting.slo_factor * factor, ..setting.clone() });
        let (mut low, mut high) = if is_held { (0.0, 1.0) } else { (1.0, 2.0) };
        while !is_held && !hold(high)? {
            (low, high) = (high, 2.0 * high);
            if high > LONGEST_SLO {
                return Ok(None);
            }
        }
        while high - low > 0.02 {
            let middle = (low + high) / 2.0;
            *(if hold(middle)? { &mut high } else { &mut low }) = middle;
        }
        Ok(Some(high))
    }
}

/// The highest factor that holds, from 1, to 1%.
fn highest(holds: impl Fn(f64) -> Result<bool, NoAdvice>) -> Result<f64, NoAdvice> {
    let (mut low, mut high) = (1.0, 2.0);
    while holds(high)? {
        low = high;
        if low >= MOST_MARGIN {
            return Ok(low);
        }
        high *= 2.0;
    }
    while high / low > 1.01 {
        let middle = (low * high).sqrt();
        *(if holds(middle)? { &mut low } else { &mut high }) = middle;
    }
    Ok(low)
}
