//! Searches the cheapest setting under which the requests of a log meet a target.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use downbeat_report::{Page, Table};
use serde::Serialize;

use super::figures::Figures;
use super::recorded::Recorded;
use super::setting::{BadSetting, Setting};
use crate::parallel;
use crate::policy::Policy;

/// The target of an advice, and the settings that may be tried.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// The share of each model's requests that must be answered in time.
    pub target: f64,
    /// Policies to try; `None`: each model's own policy of the log.
    pub policies: Vec<Option<Policy>>,
    /// The fixed part: SLOs and the rate. The policy of this setting is ignored; its devices are
    /// the most that may be used.
    pub setting: Setting,
}

/// The cheapest setting under which the requests meet a target.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Advice {
    /// The target.
    pub target: f64,
    /// The number of devices in the log.
    pub recorded_devices: u32,
    /// The factor by which requests come faster than in the log.
    pub rate: f64,
    /// The fewest devices with which some policy holds the target; `None`: no policy holds it on
    /// the most devices.
    pub devices: Option<u32>,
    /// Most devices that may be used.
    pub most_devices: u32,
    /// The policies on this number of devices, or on the most. Those that hold the target come
    /// first, the largest margin first.
    pub candidates: Vec<Candidate>,
    /// The first candidate also holds with batches of at most this many items. `None`: not with
    /// fewer than its models' own limits.
    pub max_batch: Option<u32>,
    /// The first candidate holds with all SLOs multiplied by this factor, and not with 0.02 less.
    pub slo_factor: Option<f64>,
    /// Remarks about the log.
    pub notes: Vec<String>,
}

/// A policy on a number of devices.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Candidate {
    /// The policy.
    pub policy: String,
    /// The least attainment of any model.
    pub attainment: f64,
    /// The candidate holds at this multiple of the rate, and not at 1% more; at most 64. `None`: it
    /// does not hold the rate itself.
    pub margin: Option<f64>,
    /// Mean of the devices' busy shares.
    pub busy: f64,
    /// The figures of all models together.
    pub all: Figures,
}

/// Margins are searched up to this.
pub const MOST_MARGIN: f64 = 64.0;

/// The reason why there is no advice.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum NoAdvice {
    /// The setting is invalid.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// The log has too few requests for a comparison.
    #[error("{0} requests are too few for an advice; at least {1} are needed")]
    TooFew(usize, usize),
    /// The caller ended the search.
    #[error("the command was interrupted before it found advice")]
    Interrupted,
}

/// Finds the cheapest setting in three steps.
///
/// 1. The fewest devices, starting from the number that the work in the log keeps busy. The number
///    is doubled and halved until it holds and one device fewer does not.
/// 2. On these devices, the policy with the largest margin.
/// 3. With this policy, the smallest largest batch and the tightest SLOs that hold.
///
/// `goes_on` gets, after each run, the number of finished runs and the approximate number of all
/// runs. It returns whether another one may begin.
///
/// # Errors
/// If the setting is invalid, or `goes_on` returns false.
pub fn advise(
    recorded: &Recorded,
    wanted: &Wanted,
    threads: usize,
    goes_on: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Result<Advice, NoAdvice> {
    let trials = Trials { recorded, target: wanted.target, threads, counts: Counts::new(goes_on) };
    let most_devices = wanted.setting.devices;
    let settings: Vec<Setting> =
        wanted.policies.iter().map(|policy| Setting { policy: policy.clone(), ..wanted.setting.clone() }).collect();
    trials.counts.plan(settings.len() * MARGIN_RUNS + LAST_RUNS);
    let devices = trials.fewest_devices(&settings, wanted)?;
    let on = |setting: &Setting| Setting { devices: devices.unwrap_or(most_devices), ..setting.clone() };
    let settings: Vec<Setting> = settings.iter().map(on).collect();
    let candidates = parallel::map(&settings, threads, |setting| trials.candidate(setting), |_| {});
    let candidates = candidates.into_iter().collect::<Result<Vec<Candidate>, _>>()?;
    let mut ranked: Vec<(Candidate, Setting)> = candidates.into_iter().zip(settings).collect();
    let worth = |candidate: &Candidate| (candidate.margin.unwrap_or(0.0), candidate.attainment);
    ranked.sort_by(|(a, _), (b, _)| {
        let (a, b) = (worth(a), worth(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    let best = ranked.first().filter(|_| devices.is_some()).map(|(_, setting)| setting.clone());
    let (max_batch, slo_factor) = match &best {
        Some(setting) => (trials.smallest_batch(setting)?, Some(trials.tightest(setting)?)),
        None => (None, None),
    };
    Ok(Advice {
        target: wanted.target,
        recorded_devices: recorded.devices,
        rate: wanted.setting.rate,
        devices,
        most_devices,
        candidates: ranked.into_iter().map(|(candidate, _)| candidate).collect(),
        max_batch,
        slo_factor,
        notes: recorded.notes.clone(),
    })
}

/// Counts the runs.
struct Counts<'a> {
    goes_on: &'a (dyn Fn(usize, usize) -> bool + Sync),
    done: AtomicUsize,
    /// The number of runs as far as it is known.
    planned: AtomicUsize,
}

/// Approximate runs for a policy's margin: one for the figures, two at rates that hold, and six
/// between the last of these and a rate that does not hold.
const MARGIN_RUNS: usize = 10;
/// Approximate runs for the smallest batch and the tightest SLOs.
const LAST_RUNS: usize = 12;

impl<'a> Counts<'a> {
    fn new(goes_on: &'a (dyn Fn(usize, usize) -> bool + Sync)) -> Self {
        Counts { goes_on, done: AtomicUsize::new(0), planned: AtomicUsize::new(0) }
    }

    /// Adds to the planned runs.
    fn plan(&self, runs: usize) {
        self.planned.fetch_add(runs, Ordering::Relaxed);
    }

    /// Reports the number of finished runs. Returns whether another one may begin.
    fn told(&self, done: usize) -> bool {
        (self.goes_on)(done, self.planned.load(Ordering::Relaxed).max(done + 1))
    }

    /// Makes a run, unless the caller has ended the search.
    fn run<T>(&self, run: impl FnOnce() -> Result<T, BadSetting>) -> Result<T, NoAdvice> {
        if !self.told(self.done.load(Ordering::Relaxed)) {
            return Err(NoAdvice::Interrupted);
        }
        let result = run()?;
        self.told(self.done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(result)
    }
}

/// Tries settings for a target.
struct Trials<'a> {
    recorded: &'a Recorded,
    target: f64,
    threads: usize,
    counts: Counts<'a>,
}

impl Trials<'_> {
    /// The fewest devices on which one of the settings holds; `None`: no setting holds on the most
    /// devices.
    fn fewest_devices(&self, settings: &[Setting], wanted: &Wanted) -> Result<Option<u32>, NoAdvice> {
        let most = wanted.setting.devices;
        let hold = |devices: u32| {
            self.counts.plan(settings.len());
            let settings: Vec<Setting> =
                settings.iter().map(|setting| Setting { devices, ..setting.clone() }).collect();
            let holding = parallel::map(&settings, self.threads, |setting| self.holds(setting), |_| {});
            Ok::<bool, NoAdvice>(holding.into_iter().collect::<Result<Vec<bool>, _>>()?.contains(&true))
        };
        // With fewer than `low` devices no setting holds.
        let mut low = self.recorded.least_devices(&wanted.setting, self.target).min(most);
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

    fn candidate(&self, setting: &Setting) -> Result<Candidate, NoAdvice> {
        let row = self.counts.run(|| self.recorded.run(setting))?;
        let at = |factor: f64| self.holds(&Setting { rate: setting.rate * factor, ..setting.clone() });
        let margin = if at(1.0)? { Some(highest(at)?) } else { None };
        let attainment = row.models.iter().map(|model| model.figures.attainment).fold(1.0, f64::min);
        Ok(Candidate { policy: row.policy, attainment, margin, busy: row.busy, all: row.all })
    }

    /// The smallest power of two that holds as the largest batch of all models; `None`: no power
    /// below their limits holds.
    fn smallest_batch(&self, setting: &Setting) -> Result<Option<u32>, NoAdvice> {
        let largest = self.recorded.models.iter().map(|model| model.options.max_batch).max().unwrap_or(1);
        for size in (0..31).map(|power| 1 << power).take_while(|size| *size < largest) {
            if self.holds(&Setting { max_batch: Some(size), ..setting.clone() })? {
                return Ok(Some(size));
            }
        }
        Ok(None)
    }

    /// The tightest SLOs that hold, as a share of the setting's SLOs, to 0.02.
    fn tightest(&self, setting: &Setting) -> Result<f64, NoAdvice> {
        let (mut low, mut high) = (0.0, 1.0);
        while high - low > 0.02 {
            let middle = (low + high) / 2.0;
            let tighter = Setting { slo_factor: setting.slo_factor * middle, ..setting.clone() };
            *(if self.holds(&tighter)? { &mut high } else { &mut low }) = middle;
        }
        Ok(high)
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

impl Advice {
    fn table(&self) -> Table<&Candidate> {
        Table::of(&self.candidates)
            .text("policy", |candidate| candidate.policy.clone())
            .number("worst model in time", |candidate| format!("{:.2}%", 100.0 * candidate.attainment))
            .some("holds up to, times the rate", |candidate| candidate.margin.map(|margin| format!("{margin:.2}")))
            .number("busy", |candidate| format!("{:.1}%", 100.0 * candidate.busy))
            .number("goodput r/s", |candidate| format!("{:.1}", candidate.all.goodput))
            .some("waits p50 ms", |candidate| candidate.all.delay_p50_ms.map(|ms| format!("{ms:.2}")))
            .some("p99 ms", |candidate| candidate.all.delay_p99_ms.map(|ms| format!("{ms:.2}")))
    }

    fn sentence(&self) -> String {
        let target = format!("{}% of each model's requests in time", 100.0 * self.target);
        let (Some(devices), Some(best)) = (self.devices, self.candidates.first()) else {
            return match self.most_devices {
                1 => format!("No policy answers {target} on one device."),
                most => format!("No policy answers {target} on {most} devices or fewer."),
            };
        };
        let margin = best.margin.unwrap_or(1.0);
        let margin = if margin >= MOST_MARGIN {
            format!("{margin:.0} times the rate and more")
        } else {
            format!("{margin:.2} times the rate")
        };
        let plural = if devices == 1 { "" } else { "s" };
        let fewer = if devices > 1 { "; with one device fewer no policy does" } else { "" };
        let batch =
            self.max_batch.map_or(String::new(), |size| format!(" Batches of at most {size} hold this target, too."));
        let slo = self
            .slo_factor
            .map_or(String::new(), |factor| format!(" SLOs could shrink to {factor:.2} times their length."));
        format!(
            "{devices} device{plural} (the log has {}) with '{}' answer {target}, up to {margin}{fewer}.{batch}{slo}",
            self.recorded_devices, best.policy
        )
    }

    /// The advice as one HTML page without external files.
    pub fn page(&self) -> String {
        let devices = self.devices.unwrap_or(self.most_devices);
        let page = Page::new("Advice").note(&self.sentence()).table(&format!("On {devices} devices"), &self.table());
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.sentence())?;
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
