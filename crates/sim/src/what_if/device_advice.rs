//! Compares device policies, with their parameters, on the requests of a log.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use downbeat_core::Duration;
use downbeat_core::device::{MARGIN, ModelSpec};
use downbeat_report::{Page, Table};
use serde::Serialize;

use super::advice::NoAdvice;
use super::device_log::{DeviceLog, LoggedEnd};
use crate::device_replay::{Candidate, DeviceReplay, ReplayCount, Replayable, ReplayedModel};
use crate::parallel;

/// The part by which another policy must answer more in time for a change to be worth it.
const WORTH: f64 = 0.05;
/// Policies whose requests in time differ by less than this part answer as many.
const ALIKE: f64 = 0.005;
/// The fewest requests of a half that are compared.
const FEWEST: usize = 200;
/// A replay does not match the log if its share of requests in time differs by more than this.
const SHARE_OFF: f64 = 0.03;
/// A replay also fails to match if its mean time to the answer differs by more than this part of
/// the larger one.
const DELAY_OFF: f64 = 0.25;
/// Chooses the noise of launches.
const SEED: u64 = 1;

/// The comparison of device policies on a log.
///
/// The first half of the requests chooses a policy. The second half, which did not choose it, tells
/// whether the choice holds. What a replay must know is measured on the first half, too.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceAdvice {
    /// The requests of both halves.
    pub requests: [usize; 2],
    /// The outcome in the log, and then each model's candidates.
    pub rows: Vec<DeviceRow>,
    /// The advice for each model.
    pub models: Vec<ModelAdvice>,
    /// Whether the replay of the policies in use has the log's outcome. If not, no change is
    /// advised.
    pub is_faithful: bool,
    /// Remarks about the log.
    pub notes: Vec<String>,
}

/// The outcome of all models' requests while one model has a policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceRow {
    /// The model; none: all have what they had in the log.
    pub model: Option<String>,
    /// The policy with its settings.
    pub policy: String,
    /// The outcome of the first half.
    pub first: HalfFigures,
    /// The outcome of the second half, of the policy in use and of the best one.
    pub second: Option<HalfFigures>,
}

/// The outcome of the requests of a half.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct HalfFigures {
    /// Requests a second that were answered in time.
    pub goodput: f64,
    /// Requests that were answered in time.
    pub in_time: u64,
    /// Requests that were answered late.
    pub late: u64,
    /// Requests that were refused or given up.
    pub dropped: u64,
    /// The mean time from arrival to answer.
    pub delay_ms: f64,
    /// The requests in time as a share of those of the policy in use, less 1.
    pub change: f64,
}

/// The advice for a model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelAdvice {
    /// The model's name.
    pub model: String,
    /// The policy in use.
    pub in_use: String,
    /// The policy that is worth a change; none: the one in use stays.
    pub change: Option<Candidate>,
    /// The advice in words.
    pub words: String,
}

impl HalfFigures {
    fn of(counts: &[ReplayCount], span: Duration) -> Self {
        let sum = |of: fn(&ReplayCount) -> u64| counts.iter().map(of).sum::<u64>();
        let delay = counts.iter().fold(Duration::ZERO, |sum, count| sum + count.delay);
        let (in_time, late) = (sum(|count| count.in_time), sum(|count| count.late));
        HalfFigures {
            goodput: in_time as f64 / span.as_secs_f64().max(1e-9),
            in_time,
            late,
            dropped: sum(|count| count.dropped),
            delay_ms: delay.as_millis_f64() / (in_time + late).max(1) as f64,
            change: 0.0,
        }
    }

    fn beside(self, in_use: &HalfFigures) -> Self {
        HalfFigures { change: self.in_time as f64 / in_use.in_time.max(1) as f64 - 1.0, ..self }
    }

    /// Whether a change from `other` is worth it: clearly more is in time, or as much and clearly
    /// sooner.
    fn is_worth(&self, other: &HalfFigures) -> bool {
        let gain = self.beside(other).change;
        gain >= WORTH || gain >= -ALIKE && self.delay_ms <= other.delay_ms * (1.0 - MARGIN)
    }

    /// Whether it is better than `other`: more is in time, or as much and sooner.
    fn is_better(&self, other: &HalfFigures) -> bool {
        let gain = self.beside(other).change;
        gain > ALIKE || gain >= -ALIKE && self.delay_ms < other.delay_ms
    }

    fn share(&self) -> f64 {
        self.in_time as f64 / (self.in_time + self.late + self.dropped).max(1) as f64
    }

    fn shown(&self) -> String {
        format!("{:.1}% in time after {:.2} ms", 100.0 * self.share(), self.delay_ms)
    }

    /// Whether a replay with these figures matches the log.
    fn matches(&self, log: &HalfFigures) -> bool {
        let delays = [self.delay_ms, log.delay_ms];
        (self.share() - log.share()).abs() <= SHARE_OFF
            && (delays[0] - delays[1]).abs() <= DELAY_OFF * delays[0].max(delays[1])
    }
}

/// Replays a log's requests under each policy that its models may have.
struct Trials<'a> {
    log: &'a DeviceLog,
    replay: DeviceReplay,
    halves: [Range<usize>; 2],
}

/// A model's candidates.
struct Candidates {
    all: Vec<Replayable>,
    in_use: usize,
}

impl Trials<'_> {
    /// The outcome of a half while the models have these policies.
    fn run(&self, policies: &[Option<ModelSpec>], half: usize) -> HalfFigures {
        let (policies, counted) = (policies.iter().map(Option::as_ref).collect::<Vec<_>>(), self.halves[half].clone());
        let counts = self.replay.run(&policies, &self.log.arrivals[..counted.end], counted);
        HalfFigures::of(&counts, self.span(half))
    }

    fn span(&self, half: usize) -> Duration {
        let of = &self.log.arrivals[self.halves[half].clone()];
        of.first().zip(of.last()).map_or(Duration::ZERO, |(first, last)| last.at.since(first.at))
    }

    /// The outcome of a half in the log.
    fn logged(&self, half: usize) -> HalfFigures {
        let mut count = ReplayCount::default();
        for index in self.halves[half].clone() {
            match self.log.ends[index] {
                LoggedEnd::Unknown => continue,
                LoggedEnd::Dropped => count.dropped += 1,
                LoggedEnd::Answered(took) => {
                    *(if took <= self.log.arrivals[index].budget { &mut count.in_time } else { &mut count.late }) += 1;
                    count.delay += took;
                }
            }
        }
        HalfFigures::of(&[count], self.span(half))
    }
}

impl Candidates {
    /// The candidates of a model of the log, the policy in use among them.
    fn of(model: &ReplayedModel, policy: &ModelSpec, is_clustered: bool) -> Self {
        let mut all = model.candidates();
        let is_in_use = |one: &Replayable| match &one.spec {
            None => is_clustered,
            Some(spec) => are_alike(spec, policy),
        };
        let in_use = all.iter().position(is_in_use).unwrap_or_else(|| {
            let candidate = Candidate { policy: policy.policy(), settings: Default::default() };
            all.push(Replayable { candidate, spec: None });
            all.len() - 1
        });
        all[in_use].spec = (!is_clustered).then(|| policy.clone());
        Candidates { all, in_use }
    }

    fn name(&self, index: usize) -> String {
        let name = self.all[index].candidate.to_string();
        if index == self.in_use { format!("{name}, in use") } else { name }
    }
}

/// Whether two policies differ in the size of the input ring alone, which the server chooses.
fn are_alike(a: &ModelSpec, b: &ModelSpec) -> bool {
    let but_ring = |spec: &ModelSpec| {
        let mut options = spec.options().clone();
        options.as_object_mut().map(|options| options.remove("ring_slots"));
        options
    };
    a.policy() == b.policy() && but_ring(a) == but_ring(b)
}

impl DeviceLog {
    /// Compares the policies that each model may have. `together`: for models by name, the work of
    /// two lanes side by side as a multiple of the work of one. `goes_on` gets the number of
    /// finished runs and of all runs, and returns whether another one may begin.
    ///
    /// # Errors
    /// If the log has too few requests, or `goes_on` returns false.
    pub fn advise(
        &self,
        together: &BTreeMap<String, f64>,
        threads: usize,
        goes_on: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<DeviceAdvice, NoAdvice> {
        let middle = self.arrivals.len() / 2;
        if middle < FEWEST {
            return Err(NoAdvice::TooFew(self.arrivals.len(), 2 * FEWEST));
        }
        let mut search = Search::new(self, middle, together);
        let total: usize = search.candidates.iter().map(|own| own.all.len()).sum();
        let mut done_before = 0;
        for model in 0..self.models.len() {
            search.judge(model, threads, |done| goes_on(done_before + done, total))?;
            done_before += search.candidates[model].all.len();
        }
        let is_faithful = search.in_use[0].matches(&search.logged);
        let Search { trials, rows, models, .. } = search;
        let requests = [middle, self.arrivals.len() - middle];
        Ok(DeviceAdvice { requests, rows, models, is_faithful, notes: self.notes(together, &trials.replay) })
    }

    fn notes(&self, together: &BTreeMap<String, f64>, replay: &DeviceReplay) -> Vec<String> {
        let mut notes = self.notes.clone();
        let unknown = self.models.iter().zip(&replay.models).filter(|(_, model)| model.overlap.is_none());
        let unknown: Vec<&str> = unknown.map(|(model, _)| &*model.name).collect();
        if let Some(first) = unknown.first() {
            notes.push(format!(
                "The log does not show what lanes of {} do side by side, so that elastic and staged are not tried. If you know it, add \
                 --together {first}=FACTOR: `measured.overlap` in GET /v2/models/{first}/policy has the factor, if auto was asked for.",
                unknown.join(", ")
            ));
        }
        let strange: Vec<&str> = together
            .keys()
            .filter(|name| !self.models.iter().any(|model| model.name == **name))
            .map(String::as_str)
            .collect();
        if !strange.is_empty() {
            notes.push(format!("--together names models without requests in the log: {}.", strange.join(", ")));
        }
        notes
    }
}

/// A search for each model's best policy, one model after another.
struct Search<'a> {
    trials: Trials<'a>,
    candidates: Vec<Candidates>,
    /// The policies so far, with the changes that are worth it.
    policies: Vec<Option<ModelSpec>>,
    /// The outcome of both halves under the policies in use.
    in_use: [HalfFigures; 2],
    /// The outcome of both halves under the policies so far.
    present: [HalfFigures; 2],
    /// The outcome of the first half in the log.
    logged: HalfFigures,
    rows: Vec<DeviceRow>,
    models: Vec<ModelAdvice>,
}

impl<'a> Search<'a> {
    fn new(log: &'a DeviceLog, middle: usize, together: &BTreeMap<String, f64>) -> Self {
        let models = log.replayed(middle, together);
        let candidates = models.iter().zip(&log.models);
        let candidates: Vec<Candidates> =
            candidates.map(|(model, own)| Candidates::of(model, &own.policy, own.options.is_some())).collect();
        let (devices, at_once, wake_margin) = (log.devices, log.at_once, log.wake_margin);
        let replay = DeviceReplay { models, devices, at_once, wake_margin, seed: SEED };
        let trials = Trials { log, replay, halves: [0..middle, middle..log.arrivals.len()] };
        let policies: Vec<Option<ModelSpec>> = candidates.iter().map(|own| own.all[own.in_use].spec.clone()).collect();
        let in_use = [0, 1].map(|half| trials.run(&policies, half));
        let logged = [0, 1].map(|half| trials.logged(half).beside(&in_use[half]));
        let policy = "as recorded".to_owned();
        let rows = vec![DeviceRow { model: None, policy, first: logged[0], second: Some(logged[1]) }];
        Search { trials, candidates, policies, in_use, present: in_use, logged: logged[0], rows, models: Vec::new() }
    }

    /// The policies with this candidate for a model.
    fn with(&self, model: usize, candidate: usize) -> Vec<Option<ModelSpec>> {
        let mut policies = self.policies.clone();
        policies[model] = self.candidates[model].all[candidate].spec.clone();
        policies
    }

    /// Tries a model's candidates on the first half, and the best of them on the second.
    fn judge(&mut self, model: usize, threads: usize, goes_on: impl Fn(usize) -> bool + Sync) -> Result<(), NoAdvice> {
        let own = &self.candidates[model];
        let jobs: Vec<usize> = (0..own.all.len()).collect();
        let run = |index: &usize| match *index == own.in_use {
            true => self.present[0],
            false => self.trials.run(&self.with(model, *index), 0),
        };
        let first = parallel::map_while(&jobs, threads, run, goes_on);
        let first = first.into_iter().collect::<Option<Vec<HalfFigures>>>().ok_or(NoAdvice::Interrupted)?;
        let better = |best: usize, index: usize| if first[index].is_better(&first[best]) { index } else { best };
        let best = jobs.into_iter().fold(own.in_use, better);
        let second = match best == own.in_use {
            true => self.present[1],
            false => self.trials.run(&self.with(model, best), 1),
        };
        let name = &self.trials.log.models[model].name;
        let rows = self.rows_of(model, &first, (best, second));
        let found = Found { own, best, first: [self.present[0], first[best]], second: [self.present[1], second] };
        let (is_change, words) = found.judge(&self.logged, &self.in_use[0]);
        self.models.push(ModelAdvice {
            words: format!("{name}: {words}"),
            model: name.clone(),
            in_use: own.all[own.in_use].candidate.to_string(),
            change: is_change.then(|| own.all[best].candidate.clone()),
        });
        self.rows.extend(rows);
        if is_change {
            self.policies = self.with(model, best);
            self.present = [first[best], second];
        }
        Ok(())
    }

    /// A row for each candidate of a model, the one in use first.
    fn rows_of(&self, model: usize, first: &[HalfFigures], best: (usize, HalfFigures)) -> Vec<DeviceRow> {
        let own = &self.candidates[model];
        let mut order: Vec<usize> = (0..own.all.len()).collect();
        order.sort_by_key(|index| (*index != own.in_use, std::cmp::Reverse(first[*index].in_time)));
        let row = |index: usize| DeviceRow {
            model: Some(self.trials.log.models[model].name.clone()),
            policy: own.name(index),
            first: first[index].beside(&self.in_use[0]),
            second: match index {
                _ if index == own.in_use => Some(self.present[1].beside(&self.in_use[1])),
                _ if index == best.0 => Some(best.1.beside(&self.in_use[1])),
                _ => None,
            },
        };
        order.into_iter().map(row).collect()
    }
}

/// The best candidate of a model beside the policy in use, both on the first half and on the second.
struct Found<'a> {
    own: &'a Candidates,
    best: usize,
    first: [HalfFigures; 2],
    second: [HalfFigures; 2],
}

impl Found<'_> {
    /// Whether the best candidate is worth a change, in words.
    fn judge(&self, logged: &HalfFigures, replayed: &HalfFigures) -> (bool, String) {
        let Found { own, best, first, second } = self;
        let [in_use, found] = [own.in_use, *best].map(|index| own.all[index].candidate.to_string());
        if !replayed.matches(logged) {
            let words = format!(
                "keep {in_use}. The replay of the policies in use does not match the log, so its figures tell nothing: {}, and {} in the log.",
                replayed.shown(),
                logged.shown()
            );
            return (false, words);
        }
        if *best == own.in_use || !first[1].is_worth(&first[0]) {
            return (false, format!("no policy is better than {in_use}, which is in use, by a margin worth a change."));
        }
        let gains = |half: &[HalfFigures; 2]| {
            let gain = half[1].beside(&half[0]).change;
            format!(
                "{:+.1}% in time, and {:.2} ms to the answer in place of {:.2}",
                100.0 * gain,
                half[1].delay_ms,
                half[0].delay_ms
            )
        };
        let holds = second[1].is_worth(&second[0]);
        let end = if holds { "Change to it." } else { "That is not worth a change: keep what is in use." };
        let words = format!(
            "{found} in place of {in_use} has {} on the first half. On the second half, which did not choose it: {}. {end}",
            gains(first),
            gains(second)
        );
        (holds, words)
    }
}

impl DeviceAdvice {
    fn table(&self) -> Table<&DeviceRow> {
        let percent = |change: f64| format!("{:+.1}%", 100.0 * change);
        let ms = |ms: f64| format!("{ms:.2}");
        Table::of(&self.rows)
            .text("model", |row| row.model.clone().unwrap_or_else(|| "all".to_owned()))
            .text("policy", |row| row.policy.clone())
            .number("goodput r/s", |row| format!("{:.1}", row.first.goodput))
            .number("late", |row| row.first.late)
            .number("dropped", |row| row.first.dropped)
            .number("mean ms", |row| ms(row.first.delay_ms))
            .number("in time", |row| percent(row.first.change))
            .some("2nd half r/s", |row| Some(format!("{:.1}", row.second?.goodput)))
            .some("2nd mean ms", |row| Some(ms(row.second?.delay_ms)))
            .some("2nd in time", |row| Some(percent(row.second?.change)))
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(|model| &*model.words).chain(self.notes.iter().map(String::as_str))
    }

    /// The advice as one HTML page without external files.
    pub fn page(&self) -> String {
        let page = Page::new("Device policies").table("Each policy on the log's requests", &self.table());
        self.words().fold(page, |page, words| page.note(words)).html()
    }
}

impl fmt::Display for DeviceAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table().fmt(f)?;
        writeln!(f, "\nThe first {} requests chose, the {} after them judge.", self.requests[0], self.requests[1])?;
        self.words().try_for_each(|words| write!(f, "\n{words}\n"))
    }
}
