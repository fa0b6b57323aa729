//! Queries of several models on one device under virtual time: Abacus, and what it is compared with.

use std::collections::BTreeMap;

use downbeat_core::device::overlap::{Overlap, OverlapOptions, OverlapOutput};
use downbeat_core::device::{DeviceRequest, LaneId, SegmentRange, Span};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use rand::RngExt;
use rand_distr::Normal;
use rand_pcg::Pcg64;

use super::architecture::Architecture;
use super::contended::{Completed, ContendedDevice};
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::overlap_predictor::{PredictedBy, RunPredictor};
use super::overlap_report::OverlapReport;
use super::platform::Platform;
use crate::arrivals::{Arrivals, random};

/// Items of a query, and tokens of one of BERT (Abacus table 1).
const ROWS: [u32; 4] = [4, 8, 16, 32];
const LENGTHS: [u32; 4] = [8, 16, 32, 64];
/// What asking a predictor takes, for one group and for several at a time (§7.7).
const PASS: Duration = Duration::from_micros(66);
const MULTI_WAY_PASS: Duration = Duration::from_micros(88);

/// Who says what runs next.
#[derive(Clone, PartialEq, Debug)]
pub enum OverlapServing {
    /// Groups by prediction, of so many models at once: of one it is one query at a time, the most urgent first, without those that cannot make it.
    Abacus {
        /// Models at once.
        at_once: usize,
        /// What running side by side has to save ([`OverlapOptions::worth`]).
        worth: f64,
        /// What says how long groups take.
        by: PredictedBy,
    },
    /// One query at a time, as they came; the queries that are late already are dropped (§7.1), as below.
    Fcfs,
    /// One at a time, the shortest first.
    Sjf,
    /// One at a time, the most urgent first.
    Edf,
    /// One of each model, as they came, all at once: MPS as it is.
    Free,
}

/// How large queries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OverlapInputs {
    /// Any of table 1's sizes and lengths.
    Any,
    /// The smallest of each (§7.2, figure 16).
    Smallest,
}

/// A run: queries come at random, each for one of some models, all as often.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapRun {
    /// The device.
    pub platform: Platform,
    /// The models, each at most once.
    pub models: Vec<Architecture>,
    /// Who says what runs.
    pub serving: OverlapServing,
    /// Queries a second, of all models.
    pub rate: f64,
    /// How many come.
    pub queries: u32,
    /// How large they are. The QoS target of a model is twice what the largest take alone (§7.1).
    pub inputs: OverlapInputs,
    /// Chooses all random numbers.
    pub seed: u64,
}

/// A query that waits or runs.
#[derive(Clone, Copy, Debug)]
struct Query {
    model: usize,
    arrived: Time,
    deadline: Time,
    rows: u32,
    length: u32,
    /// What it takes alone.
    alone: Duration,
}

enum Server {
    Groups(Box<Overlap<RunPredictor>>),
    /// One at a time, or one of each model.
    Queues {
        waiting: Vec<(u64, Query)>,
        running: Vec<u64>,
    },
}

struct Play<'a> {
    run: &'a OverlapRun,
    models: Vec<EmulatedModel>,
    device: ContendedDevice,
    server: Server,
    queries: BTreeMap<u64, Query>,
    /// The group that runs: its token, since when, what was said that it takes, and how many of its parts still run.
    group: Option<(downbeat_core::device::overlap::OperatorGroup, Time, usize)>,
    report: OverlapReport,
    noise: Option<Normal<f64>>,
    rng: Pcg64,
}

impl OverlapInputs {
    fn largest(self) -> (u32, u32) {
        if self == OverlapInputs::Any { (ROWS[3], LENGTHS[3]) } else { (ROWS[0], LENGTHS[0]) }
    }

    /// Items and length of a query.
    pub(super) fn draw(self, rng: &mut Pcg64) -> (u32, u32) {
        match self {
            OverlapInputs::Any => (ROWS[rng.random_range(0..4)], LENGTHS[rng.random_range(0..4)]),
            OverlapInputs::Smallest => self.largest(),
        }
    }
}

impl OverlapRun {
    /// The models, cut into Abacus' operators.
    ///
    /// # Errors
    /// If one is none of theirs.
    pub fn models(&self) -> Result<Vec<EmulatedModel>, DeviceFailure> {
        self.models.iter().map(|model| EmulatedModel::abacus(*model, self.platform)).collect()
    }

    /// The QoS target of each model.
    ///
    /// # Errors
    /// As [`Self::models`].
    pub fn targets(&self) -> Result<Vec<Duration>, DeviceFailure> {
        Ok(self.targets_of(&self.models()?))
    }

    fn targets_of(&self, models: &[EmulatedModel]) -> Vec<Duration> {
        let (rows, length) = self.inputs.largest();
        let target = |model| whole(model, rows, length, self.platform.units).saturating_mul(2);
        models.iter().map(target).collect()
    }

    /// Plays it until all queries are answered or dropped.
    ///
    /// # Errors
    /// If there is no model, one is none of Abacus', or the rate is none.
    pub fn play(&self) -> Result<OverlapReport, DeviceFailure> {
        if self.models.is_empty() {
            return Err(DeviceFailure("queries of no model".to_owned()));
        }
        let models = self.models()?;
        let (targets, mut play) = (self.targets_of(&models), Play::new(self, models)?);
        let mut arrivals = Arrivals::Poisson.stream(self.rate, self.seed, 0)?;
        let mut draws = random(self.seed, 1);
        let (mut sent, mut next) = (0, arrivals.next_arrival());
        loop {
            let arrives = if sent < self.queries { next } else { Time::MAX };
            let now = play.device.next_event().map_or(arrives, |event| event.min(arrives));
            if now == Time::MAX {
                return Ok(play.report);
            }
            for completed in play.device.advance(now) {
                if let Completed::Launch { lane, token } = completed {
                    play.complete(now, lane, token);
                }
            }
            if now == arrives {
                let model = draws.random_range(0..self.models.len());
                let (rows, length) = self.inputs.draw(&mut draws);
                let length = if self.models[model].has_length() { length } else { 0 };
                let alone = whole(&play.models[model], rows, length, self.platform.units);
                let query = Query { model, arrived: now, deadline: now + targets[model], rows, length, alone };
                play.arrive(now, u64::from(sent), query);
                (sent, next) = (sent + 1, arrivals.next_arrival());
                if sent == self.queries {
                    play.report.span = now.since(Time::ZERO);
                    let whole = f64::from(self.platform.units) * play.report.span.as_secs_f64() * 1e9;
                    play.report.used = play.device.used_unit_nanos() as f64 / whole;
                }
            }
            play.carry_out(now);
        }
    }
}

/// What a query takes alone on the device, in one launch.
fn whole(model: &EmulatedModel, rows: u32, length: u32, units: u32) -> Duration {
    model.work(SegmentRange::new(0, model.segment_count()), rows, length, units).alone(&model.limits())
}

impl<'a> Play<'a> {
    fn new(run: &'a OverlapRun, models: Vec<EmulatedModel>) -> Result<Self, DeviceFailure> {
        let server = match &run.serving {
            OverlapServing::Abacus { at_once, worth, by } => {
                let (predictor, error) = by.predictor(&run.models, &models, run.platform.noise)?;
                let options = OverlapOptions { at_once: *at_once, worth: *worth, error, ..OverlapOptions::default() };
                let mut overlap = Overlap::new(options, predictor);
                for (model, emulated) in (0..).zip(&models) {
                    overlap.handle_model(Time::ZERO, ModelId(model), Some(emulated.segment_count()));
                }
                Server::Groups(Box::new(overlap))
            }
            _ => Server::Queues { waiting: Vec::new(), running: Vec::new() },
        };
        Ok(Play {
            run,
            device: ContendedDevice::new(run.platform.limits(), models.len()),
            models,
            server,
            queries: BTreeMap::new(),
            group: None,
            report: OverlapReport::default(),
            noise: Normal::new(1.0, run.platform.noise).ok(),
            rng: random(run.seed, 2),
        })
    }

    fn arrive(&mut self, now: Time, id: u64, query: Query) {
        self.queries.insert(id, query);
        match &mut self.server {
            Server::Queues { waiting, .. } => waiting.push((id, query)),
            Server::Groups(overlap) => {
                let Query { deadline, rows: size, length, model, .. } = query;
                let model = ModelId(model as u32);
                let request = DeviceRequest { id: RequestId(id), model, deadline, size, length };
                if overlap.handle_request(now, &request).is_err() {
                    self.drop_query(id);
                }
            }
        }
    }

    fn complete(&mut self, now: Time, lane: LaneId, token: u64) {
        match &mut self.server {
            Server::Queues { running, .. } => {
                running.retain(|id| *id != token);
                self.answer(now, token);
            }
            Server::Groups(overlap) => {
                debug_assert!((lane.0 as usize) < self.models.len(), "a lane of a model");
                let Some((_, _, parts)) = &mut self.group else { return };
                *parts -= 1;
                if let Some((group, start, _)) = self.group.take_if(|(_, _, parts)| *parts == 0) {
                    if let (2.., Some(predicted)) = (group.parts.len(), group.predicted) {
                        self.report.ratios.push(now.since(start).as_secs_f64() / predicted.as_secs_f64());
                    }
                    overlap.handle_completion(now, group.id, Span { start, end: now });
                }
            }
        }
    }

    fn answer(&mut self, now: Time, id: u64) {
        let Some(query) = self.queries.remove(&id) else { return };
        let target = query.deadline.since(query.arrived).as_secs_f64();
        self.report.latencies.push(now.since(query.arrived).as_secs_f64() / target);
        *(if now <= query.deadline { &mut self.report.in_time } else { &mut self.report.late }) += 1;
    }

    fn drop_query(&mut self, id: u64) {
        self.report.dropped += u32::from(self.queries.remove(&id).is_some());
    }

    fn carry_out(&mut self, now: Time) {
        loop {
            let output = match &mut self.server {
                Server::Groups(overlap) => {
                    self.report.stats = overlap.stats();
                    overlap.poll_output()
                }
                Server::Queues { .. } => return self.begin(now),
            };
            match output {
                Some(OverlapOutput::Run(group)) => {
                    // Where the device waited for the decision.
                    let waits = MULTI_WAY_PASS.saturating_mul(u64::from(group.waited_for));
                    for part in &group.parts {
                        let model = part.model.0 as usize;
                        self.launch(now, model, part.operators, (part.rows, part.length), (waits, part.request.0));
                    }
                    let (parts, start) = (group.parts.len(), now + waits);
                    self.group = Some((group, start, parts));
                }
                Some(OverlapOutput::Reply { request }) => self.answer(now, request.0),
                Some(OverlapOutput::Drop { request, .. }) => self.drop_query(request.0),
                None => return,
            }
        }
    }

    /// What the baselines run next: one query, or one of each model that has none running.
    fn begin(&mut self, now: Time) {
        let serving = &self.run.serving;
        let waits = if *serving == OverlapServing::Sjf { PASS } else { Duration::ZERO };
        loop {
            let Server::Queues { waiting, running } = &mut self.server else { return };
            let is_running =
                |model: usize| running.iter().any(|id| self.queries.get(id).is_some_and(|q| q.model == model));
            let may_begin = |query: &Query| match serving {
                OverlapServing::Free => !is_running(query.model),
                _ => running.is_empty(),
            };
            let order = |(id, query): &(u64, Query)| match serving {
                OverlapServing::Sjf => (query.alone.as_nanos(), *id),
                OverlapServing::Edf => (query.deadline.as_nanos(), *id),
                _ => (0, *id),
            };
            let first =
                waiting.iter().enumerate().filter(|(_, (_, query))| may_begin(query)).min_by_key(|(_, one)| order(one));
            let Some((index, _)) = first else { return };
            let (id, query) = waiting.remove(index);
            if now >= query.deadline {
                self.drop_query(id);
                continue;
            }
            running.push(id);
            let all = SegmentRange::new(0, self.models[query.model].segment_count());
            self.launch(now, query.model, all, (query.rows, query.length), (waits, id));
        }
    }

    fn launch(
        &mut self,
        now: Time,
        model: usize,
        operators: SegmentRange,
        (rows, length): (u32, u32),
        (waits, token): (Duration, u64),
    ) {
        let mut work = self.models[model].work(operators, rows, length, self.run.platform.units);
        if let Some(noise) = &self.noise {
            work.vary(noise, &mut self.rng);
        }
        work.overhead = Duration::from_nanos(work.overhead.as_nanos() + waits.as_nanos());
        self.device.launch(now, LaneId(model as u32), token, work);
    }
}
