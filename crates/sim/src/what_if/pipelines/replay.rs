//! Replays of a log's pipelines under other settings.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use downbeat_core::cluster::ModelOptions;
use downbeat_core::pipeline::{
    BatchDone, Division, Flow, Outcome, Pipeline, PipelineArrival, Reached, RehearsalOptions, Shares, Stage,
    StageError, StepCost, StepModel, WeightRehearsal,
};
use downbeat_core::{BatchId, DeviceId, Duration, Time};
use rand::RngExt;

use super::flows::{FlowArrival, RecordedPipelines};
use super::outcome::{FlowFigures, FlowSamples, PipelineRow, PoolFigures};
use crate::arrivals::random;
use crate::policy::Policy;

/// Replayed events that a rehearsal of weights gets for each event of the run.
const LENT: u64 = 8;
/// A replay whose share of requests in time is farther from the log's says so.
const APART: f64 = 0.05;
/// Chooses the times of batches, and the weights that a rehearsal tries.
const SEED: u64 = 1;

/// The changes to a log with pipelines.
#[derive(Clone, PartialEq, Debug)]
pub struct PipelineSetting {
    /// The policy of all models; `None`: each model's own.
    pub policy: Option<Policy>,
    /// The factor by which requests come faster.
    pub rate: f64,
    /// By flow: another time to the deadline of the whole.
    pub slos: BTreeMap<usize, Duration>,
    /// By model: so many devices more than in the log. The devices are of the model's pool. If the model
    /// has a limit of its own, the limit rises as well.
    pub more: BTreeMap<usize, u32>,
    /// The number of devices, if the log has one pool.
    pub devices: Option<u32>,
    /// The largest batch, besides each model's own limit.
    pub max_batch: Option<u32>,
    /// Whether weights are rehearsed during the run.
    pub rehearse: bool,
}

/// The reason why a setting cannot be replayed.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum BadPipelineSetting {
    /// No flow has this name.
    #[error("the log has no requests of '{0}'; it has requests of {1}")]
    NoFlow(String, String),
    /// No step runs this model.
    #[error("no step of the log runs a model '{0}'; the models are {1}")]
    NoModel(String, String),
    /// The number of devices does not say which.
    #[error(
        "the models of the log run on {0} sets of devices, so a number of devices does not say which; name a model with --more"
    )]
    Pools(usize),
    /// The rate is no positive number.
    #[error("the rate is {0}; the rate must be a number above 0")]
    Rate(f64),
    /// The stage is wrong: a defect of the log.
    #[error(transparent)]
    Stage(#[from] StageError),
}

impl PipelineSetting {
    /// No change.
    pub fn unchanged() -> PipelineSetting {
        let (slos, more, devices, max_batch) = Default::default();
        PipelineSetting { policy: None, rate: 1.0, slos, more, devices, max_batch, rehearse: true }
    }

    /// Whether nothing but the rehearsal may differ from the log.
    pub fn is_unchanged(&self) -> bool {
        *self == PipelineSetting { rehearse: self.rehearse, ..PipelineSetting::unchanged() }
    }
}

impl RecordedPipelines {
    /// The index of the flow with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn flow(&self, name: &str) -> Result<usize, BadPipelineSetting> {
        let names = || self.flows.iter().map(|flow| flow.name.clone()).collect::<Vec<_>>().join(", ");
        let found = self.flows.iter().position(|flow| flow.name == name);
        found.ok_or_else(|| BadPipelineSetting::NoFlow(name.to_owned(), names()))
    }

    /// The index of the model with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn model(&self, name: &str) -> Result<usize, BadPipelineSetting> {
        let names = || self.models.iter().map(|model| model.name.clone()).collect::<Vec<_>>().join(", ");
        let found = self.models.iter().position(|model| model.name == name);
        found.ok_or_else(|| BadPipelineSetting::NoModel(name.to_owned(), names()))
    }

    /// The setting in words.
    pub fn words(&self, setting: &PipelineSetting) -> String {
        let mut words = Vec::new();
        words.extend(setting.policy.as_ref().map(ToString::to_string));
        words.extend(setting.devices.map(|devices| format!("{devices} devices")));
        words.extend(setting.more.iter().map(|(model, more)| format!("+{more} for {}", self.models[*model].name)));
        words.extend(setting.slos.iter().map(|(flow, slo)| format!("{} in {slo}", self.flows[*flow].name)));
        words.extend(
            (setting.rate != 1.0).then(|| format!("rate {:.4}", setting.rate).trim_end_matches(['0', '.']).to_owned()),
        );
        words.extend(setting.max_batch.map(|most| format!("batches of {most}")));
        if words.is_empty() { "as recorded".to_owned() } else { words.join(", ") }
    }

    /// A remark, if a replay without changes has another outcome than the log.
    pub(super) fn difference(&self, unchanged: &PipelineRow) -> Option<String> {
        let both = self.happened.flows.iter().zip(&unchanged.flows);
        let apart = both.filter(|(log, replay)| (log.attainment - replay.attainment).abs() > APART);
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let apart: Vec<String> = apart
            .map(|(log, replay)| {
                format!("'{}' {} and {}", log.pipeline, percent(replay.attainment), percent(log.attainment))
            })
            .collect();
        (!apart.is_empty()).then(|| {
            format!(
                "The replay without changes and the log differ: in time are of {}. Something matters that the replay does \
                 not know, such as a busy machine. Compare settings with that replay, not with the log.",
                apart.join(", ")
            )
        })
    }

    /// By pool: the devices under a setting.
    pub fn devices(&self, setting: &PipelineSetting) -> Vec<u32> {
        let mut devices: Vec<u32> = self.pools.iter().map(|pool| setting.devices.unwrap_or(pool.devices)).collect();
        for (model, more) in &setting.more {
            let pool = self.models[*model].pool;
            devices[pool] = devices[pool].saturating_add(*more);
        }
        devices
    }

    pub(super) fn options(&self, setting: &PipelineSetting, model: usize, devices: u32) -> ModelOptions {
        let recorded = &self.models[model];
        let mut options = recorded.options.clone();
        if let Some(policy) = &setting.policy {
            // A step has no SLO of its own: timeouts are shares of the model's largest batch.
            let some = options.profiles.first().latency(options.max_batch).saturating_mul(4);
            (options.dispatch, options.drop) = (policy.dispatch(some), policy.drop());
        }
        if let Some(most) = setting.max_batch {
            options.max_batch = options.max_batch.min(most);
        }
        let more = setting.more.get(&model).copied().unwrap_or(0);
        let was_limited = options.max_in_flight < self.pools[recorded.pool].devices;
        options.max_in_flight = if was_limited { options.max_in_flight.saturating_add(more) } else { u32::MAX };
        options.max_in_flight = options.max_in_flight.min(devices.max(1));
        options
    }

    /// The stage of a setting, and the shares of its pipelines by the fixed rule.
    fn stage(&self, setting: &PipelineSetting) -> (Stage, Vec<Shares>) {
        let pools = self.devices(setting);
        let models: Vec<StepModel> = self
            .models
            .iter()
            .enumerate()
            .map(|(index, model)| {
                let options = self.options(setting, index, pools[model.pool]);
                StepModel { options, behaviour: None, pool: model.pool }
            })
            .collect();
        let cost = |model: usize| {
            let (its, devices) = (&self.models[model], f64::from(pools[self.models[model].pool].max(1)));
            let alone = models[model].options.profiles.first().latency(1);
            let load = its.load * setting.rate * f64::from(self.pools[its.pool].devices) / devices;
            StepCost { alone, devices, load: load.min(1.0) }
        };
        let shares = self.flows.iter().map(|flow| {
            let costs: Vec<StepCost> = flow.steps.iter().map(|(model, _)| cost(*model)).collect();
            Shares::fixed(&flow.shape, &costs)
        });
        let shares = shares.collect();
        let pipelines = self.flows.iter().map(|flow| {
            let models = flow.steps.iter().map(|(model, _)| *model).collect();
            Pipeline { shape: flow.shape.clone(), models }
        });
        let pipelines = pipelines.collect();
        (Stage { pools, models, pipelines, ..Stage::default() }, shares)
    }

    /// Replays the log's requests under a setting.
    ///
    /// # Errors
    /// If the setting is wrong.
    pub fn run(&self, setting: &PipelineSetting) -> Result<PipelineRow, BadPipelineSetting> {
        if !(setting.rate.is_finite() && setting.rate > 0.0) {
            return Err(BadPipelineSetting::Rate(setting.rate));
        }
        if setting.devices.is_some() && self.pools.len() > 1 {
            return Err(BadPipelineSetting::Pools(self.pools.len()));
        }
        let (stage, shares) = self.stage(setting);
        let arrivals = self.arrivals_of(setting);
        let mut run = Run::new(self, &stage, shares, setting.rehearse)?;
        run.play(&arrivals);
        Ok(run.row(self.words(setting), &arrivals, &stage.pools))
    }

    /// The arrivals under a setting, each item by itself, with the number of its request.
    fn arrivals_of(&self, setting: &PipelineSetting) -> Vec<(usize, PipelineArrival)> {
        let of = |(number, arrival): (usize, &FlowArrival)| {
            let at = arrival.at.since(Time::ZERO).as_secs_f64() / setting.rate;
            let at = if setting.rate == 1.0 { arrival.at } else { Time::ZERO + Duration::from_secs_f64(at) };
            let budget = setting.slos.get(&arrival.flow).copied().unwrap_or(arrival.budget);
            let one = (number, PipelineArrival { at, budget, pipeline: arrival.flow });
            std::iter::repeat_n(one, arrival.size as usize)
        };
        self.arrivals.iter().enumerate().flat_map(of).collect()
    }
}

/// A batch that runs: its end, its number, its pool, device and id, its model and its size.
type Running = (Time, u64, usize, DeviceId, BatchId, usize, u32);

/// The division of the time, which counts what each model's batches did.
struct Counting {
    shares: Vec<Shares>,
    /// The size of the batch that ends now.
    size: u32,
    /// By model: items, and the time that they waited.
    waited: Vec<(u64, Duration)>,
}

impl Division for Counting {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        self.shares.local_deadline(reached)
    }

    fn last_deadline(&mut self, reached: &Reached<'_>, local: Time) -> Option<Time> {
        self.shares.last_deadline(reached, local)
    }

    fn batch_done(&mut self, batch: BatchDone) {
        let (items, waited) = &mut self.waited[batch.model];
        *items += u64::from(self.size);
        *waited += batch.waited.saturating_mul(u64::from(self.size));
    }
}

/// A replay.
struct Run<'a> {
    recorded: &'a RecordedPipelines,
    flow: Flow,
    by: Counting,
    rehearsal: Option<WeightRehearsal>,
    ends: BinaryHeap<Reverse<Running>>,
    launched: u64,
    /// By pool: the time of all batches.
    busy: Vec<Duration>,
    now: Time,
    /// By item: when and how it ended, and in which step.
    ended: Vec<Option<(Time, Outcome, usize)>>,
}

impl<'a> Run<'a> {
    fn new(
        recorded: &'a RecordedPipelines,
        stage: &Stage,
        shares: Vec<Shares>,
        rehearse: bool,
    ) -> Result<Self, StageError> {
        let has_steps = recorded.flows.iter().any(|flow| flow.steps.len() > 1);
        let options = RehearsalOptions::default();
        let rehearsal =
            (rehearse && has_steps).then(|| WeightRehearsal::new(stage.clone(), shares.clone(), options, SEED));
        Ok(Run {
            recorded,
            flow: Flow::new(stage)?,
            by: Counting { shares, size: 0, waited: vec![(0, Duration::ZERO); stage.models.len()] },
            rehearsal: rehearsal.transpose()?,
            ends: BinaryHeap::new(),
            launched: 0,
            busy: vec![Duration::ZERO; stage.pools.len()],
            now: Time::ZERO,
            ended: Vec::new(),
        })
    }

    fn play(&mut self, arrivals: &[(usize, PipelineArrival)]) {
        let mut random = random(SEED, 0);
        self.ended = vec![None; arrivals.len()];
        let mut next = 0;
        loop {
            let arrival = arrivals.get(next).map_or(Time::MAX, |(_, arrival)| arrival.at);
            let end = self.ends.peek().map_or(Time::MAX, |Reverse((at, ..))| *at);
            let timeout = self.flow.poll_timeout().unwrap_or(Time::MAX);
            let first = end.min(arrival).min(timeout);
            if first == Time::MAX {
                return;
            }
            self.now = self.now.max(first);
            if end == first {
                self.complete();
            } else if arrival == first {
                let PipelineArrival { budget, pipeline, .. } = arrivals[next].1;
                let deadline = if budget == Duration::MAX { Time::MAX } else { self.now + budget };
                self.flow.handle_arrival(self.now, pipeline, deadline, &mut self.by);
                if let Some(rehearsal) = &mut self.rehearsal {
                    rehearsal.arrival(arrivals[next].1);
                }
                next += 1;
            } else {
                self.flow.handle_timeout(self.now);
            }
            while let Some(launch) = self.flow.poll_launch() {
                self.launched += 1;
                let executions = &self.recorded.models[launch.model].executions;
                let share = match executions.len() {
                    0 => 1.0,
                    count => executions[random.random_range(0..count)],
                };
                let took = Duration::from_secs_f64(launch.expected.as_secs_f64() * share);
                self.busy[launch.pool] += took;
                let place = (launch.pool, launch.device, launch.batch);
                let end = (self.now + took, self.launched, place.0, place.1, place.2, launch.model, launch.size);
                self.ends.push(Reverse(end));
            }
            while let Some(end) = self.flow.poll_end() {
                if let Some(slot) = usize::try_from(end.request).ok().and_then(|place| self.ended.get_mut(place)) {
                    *slot = Some((end.at, end.outcome, end.step));
                }
            }
            if let Some(rehearsal) = &mut self.rehearsal {
                rehearsal.step(LENT);
                if let Some(better) = rehearsal.poll_decision() {
                    self.by.shares = better;
                }
            }
        }
    }

    /// The batch that ends first is done.
    fn complete(&mut self) {
        if let Some(Reverse((_, _, pool, device, batch, _, size))) = self.ends.pop() {
            self.by.size = size;
            self.flow.handle_completion(self.now, pool, device, batch, &mut self.by);
        }
    }

    fn row(&self, setting: String, arrivals: &[(usize, PipelineArrival)], devices: &[u32]) -> PipelineRow {
        let recorded = self.recorded;
        let mut figures = vec![FlowFigures::default(); recorded.flows.len()];
        let mut samples = vec![FlowSamples::default(); recorded.flows.len()];
        let span = arrivals.last().map_or(Duration::ZERO, |(_, last)| last.at.since(Time::ZERO));
        let mut place = 0;
        while let Some((number, arrival)) = arrivals.get(place) {
            let items = arrivals[place..].iter().take_while(|(other, _)| other == number).count();
            let (of, its) = (&mut figures[arrival.pipeline], &self.ended[place..place + items]);
            place += items;
            let (its_samples, moment) = (&mut samples[arrival.pipeline], (arrival.at.since(Time::ZERO), span));
            of.requests += 1;
            let lost = its.iter().flatten().find(|(_, outcome, _)| *outcome != Outcome::Done);
            if let Some((_, _, step)) = lost {
                let name = recorded.flows[arrival.pipeline].steps.get(*step).map(|(_, name)| name.clone());
                *of.lost.entry(name.unwrap_or_default()).or_default() += 1;
                its_samples.add(moment, None, false);
            } else if let Some(at) = its.iter().flatten().map(|(at, ..)| *at).max() {
                let total = at.since(arrival.at);
                let is_in_time = total <= arrival.budget;
                *(if is_in_time { &mut of.in_time } else { &mut of.late }) += 1;
                its_samples.add(moment, Some(total), is_in_time);
            } else {
                of.unknown += 1;
            }
        }
        let flows = figures.into_iter().zip(&samples).zip(&recorded.flows);
        let over = self.now.since(Time::ZERO).as_secs_f64().max(1e-9);
        let pools = recorded.pools.iter().enumerate().map(|(pool, its)| {
            let models = recorded.models.iter().zip(&self.by.waited).filter(|(model, _)| model.pool == pool);
            let (items, waited) =
                models.fold((0, Duration::ZERO), |(items, sum), (_, (more, waited))| (items + more, sum + *waited));
            let busy = self.busy[pool].as_secs_f64() / (f64::from(devices[pool].max(1)) * over);
            let waits_ms = (items > 0).then(|| waited.as_millis_f64() / items as f64);
            PoolFigures { waits_ms, ..PoolFigures::new(&its.models, devices[pool], busy) }
        });
        let flows = flows.map(|((of, samples), flow)| of.finished(&flow.name, samples)).collect();
        PipelineRow::new(("simulated", setting), flows, pools.collect(), span)
    }
}
