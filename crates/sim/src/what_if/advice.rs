//! Searches the best setting under which the requests of a log meet a target.

use std::collections::BTreeSet;

use serde::Serialize;

use super::candidate::Candidate;
use super::configuration::{ModelPolicies, configuration};
use super::goal::Goal;
use super::interval::Interval;
use super::recorded::Recorded;
use super::search::{Counts, LAST_RUNS, MARGIN_RUNS, Trials};
use super::setting::{BadSetting, Setting};
use crate::parallel;
use crate::policy::Policy;

/// The target of an advice, and the settings that may be tried.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// The wish that orders settings.
    pub goal: Goal,
    /// The share of each model's requests that must be answered in time.
    pub target: f64,
    /// The price of a device for an hour, in any currency.
    pub price: Option<f64>,
    /// Policies to try; `None`: each model's own policy of the log.
    pub policies: Vec<Option<Policy>>,
    /// The fixed part: SLOs and the rate. The policy of this setting is ignored; its devices are
    /// the most that may be used.
    pub setting: Setting,
    /// The devices that settings have for the goals latency and headroom, unless more are needed.
    pub devices: u32,
    /// Whether to compute what only charts show.
    pub charts: bool,
    /// The most requests that each run of the search replays. The best setting is checked on
    /// four times as many.
    pub searched: usize,
}

/// The best setting under which the requests meet a target.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Advice {
    /// The wish that orders the candidates.
    pub goal: Goal,
    /// The target.
    pub target: f64,
    /// The number of devices in the log.
    pub recorded_devices: u32,
    /// The time of the log, from the first request to the last, seconds.
    pub log_s: f64,
    /// The requests of the log.
    pub log_requests: u64,
    /// The first candidate on more of the log; `None`: the search replayed the whole log.
    pub checked: Option<Checked>,
    /// The least attainment of any model in the log, and in a replay of the log's own setting.
    pub faithful: [f64; 2],
    /// The factor by which requests come faster than in the log.
    pub rate: f64,
    /// The fewest devices with which some setting holds the target; `None`: no setting holds it on
    /// the most devices.
    pub devices: Option<u32>,
    /// The fewest tried devices with which each model's whole interval is above the target, under the
    /// first candidate's policy.
    pub sure_devices: Option<u32>,
    /// Most devices that may be used.
    pub most_devices: u32,
    /// The settings, the best first.
    pub candidates: Vec<Candidate>,
    /// The first candidate's policy on other numbers of devices.
    pub by_devices: Vec<Candidate>,
    /// The first candidate and the log's own setting at other rates, if charts were wanted.
    pub by_rate: Vec<RateLine>,
    /// The first candidate also holds with batches of at most this many items. `None`: not with
    /// fewer than its models' own limits.
    pub max_batch: Option<u32>,
    /// The first candidate holds with all SLOs multiplied by this factor, and not with 0.02 less. Above
    /// 1: the present SLOs do not hold. `None`: no tried factor holds.
    pub slo_factor: Option<f64>,
    /// The lines of `downbeat.toml` for the first candidate. Empty: the log's own settings are the
    /// best. `None`: no setting holds the target.
    pub config: Option<String>,
    /// Remarks about the log.
    pub notes: Vec<String>,
}

/// The first candidate's outcome on more requests than the search replayed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Checked {
    /// The requests that each run of the search replayed, from 20 parts of the log.
    pub searched: u64,
    /// The requests of the check.
    pub requests: u64,
    /// The least attainment of any model in the check.
    pub attainment: f64,
    /// How sure this attainment is.
    pub interval: Option<Interval>,
}

/// The attainment of a setting over the rate.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RateLine {
    /// The setting, in words.
    pub name: String,
    /// The rate, as a multiple of the log's, and the least attainment of any model.
    pub points: Vec<(f64, f64)>,
    /// The highest multiple of the rate at which the target holds, if it is known.
    pub knee: Option<f64>,
}

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

/// How many times as many requests as in the search check the best setting.
const CHECKED: usize = 4;
/// Rates of the chart, as multiples of the knee.
const RATES: [f64; 10] = [0.25, 0.5, 0.75, 0.9, 1.0, 1.05, 1.15, 1.3, 1.5, 2.0];

/// Finds the best setting in four steps.
///
/// 1. The fewest devices, starting from the number that the work in the log keeps busy. The number
///    is doubled and halved until it holds and one device fewer does not.
/// 2. The policies on these devices, or on as many as the goal takes, in the order of the goal.
/// 3. The first of them on other numbers of devices.
/// 4. The smallest largest batch and the tightest SLOs with which it holds.
///
/// Of a long log all runs replay a sample ([`Recorded::sample`]). The best setting also runs on a larger
/// sample.
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
    let Wanted { goal, target, price, searched, .. } = *wanted;
    let (sample, larger) = (recorded.sample(searched), recorded.sample(searched.saturating_mul(CHECKED)));
    let (replayed, checked) = (sample.as_ref().unwrap_or(recorded), larger.as_ref().unwrap_or(recorded));
    let trials = Trials { recorded: replayed, target, price, threads, counts: Counts::new(goes_on) };
    let most_devices = wanted.setting.devices;
    let settings = different(recorded, wanted)?;
    trials.counts.plan(settings.len() * MARGIN_RUNS + LAST_RUNS);
    let devices = trials.fewest_devices(&settings, most_devices)?;
    let mut ranked = ranked(&trials, wanted, &settings, devices)?;
    let (best, setting) = ranked.remove(0);
    let by_devices = by_devices(&trials, wanted, (&best, &setting), devices)?;
    let sure = by_devices.iter().filter(|other| other.is_sure && Some(other.devices) >= devices);
    let of_more = |setting: &Setting| trials.counts.run(|| Candidate::of(checked, setting, (target, price)));
    let own = of_more(&Setting { rehearse: wanted.setting.rehearse, ..Setting::of(recorded) })?;
    let check = |replayed: &Recorded| {
        let Candidate { attainment, interval, .. } = of_more(&setting)?;
        let [searched, requests] = [replayed, checked].map(|log| log.arrivals.len() as u64);
        Ok::<_, NoAdvice>(Checked { searched, requests, attainment, interval })
    };
    Ok(Advice {
        goal,
        target,
        recorded_devices: recorded.devices,
        log_s: recorded.span.as_secs_f64(),
        log_requests: recorded.arrivals.len() as u64,
        checked: sample.as_ref().map(check).transpose()?,
        faithful: [recorded.happened.worst_attainment(), own.attainment],
        rate: wanted.setting.rate,
        devices,
        sure_devices: sure.map(|other| other.devices).min(),
        most_devices,
        by_rate: if wanted.charts { by_rate(&trials, wanted, (&best, &setting))? } else { Vec::new() },
        max_batch: if devices.is_some() { trials.smallest_batch(&setting)? } else { None },
        slo_factor: trials.tightest(&setting, devices.is_some())?,
        config: devices.map(|_| configuration(recorded, &setting)).transpose()?,
        candidates: std::iter::once(best).chain(ranked.into_iter().map(|(candidate, _)| candidate)).collect(),
        by_devices,
        notes: recorded.notes.clone(),
    })
}

/// A setting for each policy. Policies that give a server the same settings count once.
fn different(recorded: &Recorded, wanted: &Wanted) -> Result<Vec<Setting>, BadSetting> {
    let mut seen: Vec<ModelPolicies> = Vec::new();
    let mut settings = Vec::new();
    for policy in &wanted.policies {
        let setting = Setting { policy: policy.clone(), ..wanted.setting.clone() };
        let served = ModelPolicies::of(recorded, &setting)?;
        if !seen.contains(&served) {
            seen.push(served);
            settings.push(setting);
        }
    }
    Ok(settings)
}

/// The settings on the devices of the goal, the best first. `devices`: the fewest that hold.
fn ranked(
    trials: &Trials<'_>,
    wanted: &Wanted,
    settings: &[Setting],
    devices: Option<u32>,
) -> Result<Vec<(Candidate, Setting)>, NoAdvice> {
    let most = wanted.setting.devices;
    let tried: BTreeSet<u32> = match (devices, wanted.goal) {
        (None, _) => [most].into(),
        (Some(fewest), goal) if goal.takes_all_devices() => [wanted.devices.clamp(fewest, most)].into(),
        // A device more may be cheaper by the request, if many more are in time.
        (Some(fewest), Goal::Price) => [fewest, (fewest + 1).min(most)].into(),
        (Some(fewest), _) => [fewest].into(),
    };
    let on = |devices: u32| settings.iter().map(move |setting| Setting { devices, ..setting.clone() });
    let settings: Vec<Setting> = tried.into_iter().flat_map(on).collect();
    let candidates = parallel::map(&settings, trials.threads, |setting| trials.candidate(setting), |_| {});
    let candidates = candidates.into_iter().collect::<Result<Vec<Candidate>, _>>()?;
    let mut ranked: Vec<(Candidate, Setting)> = candidates.into_iter().zip(settings).collect();
    wanted.goal.sort(&mut ranked);
    Ok(ranked)
}

/// The best setting on some fewer and more devices.
fn by_devices(
    trials: &Trials<'_>,
    wanted: &Wanted,
    (best, setting): (&Candidate, &Setting),
    fewest: Option<u32>,
) -> Result<Vec<Candidate>, NoAdvice> {
    let (most, around) = (wanted.setting.devices, i64::from(fewest.unwrap_or(best.devices)));
    let near = [-2, -1, 0, 1, 2, 3].map(|more| around + more);
    let all = near.into_iter().chain([i64::from(trials.recorded.devices), i64::from(best.devices)]);
    let tried: BTreeSet<u32> =
        all.filter_map(|devices| u32::try_from(devices).ok()).filter(|devices| (1..=most).contains(devices)).collect();
    let settings: Vec<Setting> = tried.into_iter().map(|devices| Setting { devices, ..setting.clone() }).collect();
    trials.counts.plan(settings.len());
    trials.outcomes(&settings)
}

/// The best setting and the log's own at other rates.
fn by_rate(
    trials: &Trials<'_>,
    wanted: &Wanted,
    (best, setting): (&Candidate, &Setting),
) -> Result<Vec<RateLine>, NoAdvice> {
    let recorded = trials.recorded;
    let own = Setting { policy: None, devices: recorded.devices, ..wanted.setting.clone() };
    let knee = best.margin.map(|margin| margin * setting.rate);
    let around = knee.unwrap_or(setting.rate);
    let line = |name: String, setting: &Setting, knee: Option<f64>| {
        let settings = RATES.map(|times| Setting { rate: around * times, ..setting.clone() });
        trials.counts.plan(settings.len());
        let outcomes = trials.outcomes(&settings)?;
        let points = settings.iter().zip(outcomes).map(|(setting, outcome)| (setting.rate, outcome.attainment));
        Ok::<_, NoAdvice>(RateLine { name, points: points.collect(), knee })
    };
    let mut lines = vec![line(best.words(), setting, knee)?];
    if own != *setting {
        lines.push(line(format!("the log's own settings, {} devices", own.devices), &own, None)?);
    }
    Ok(lines)
}
