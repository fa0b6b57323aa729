//! One device of a run of several models: its requests, its server and its report.

use std::collections::BTreeMap;

use downbeat_core::device::overlap::{GroupOrder, OperatorGroup, Overlap, OverlapModel, OverlapOptions, OverlapOutput};
use downbeat_core::device::{DeviceRequest, LaneId, SegmentRange, Span};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use rand_distr::Normal;
use rand_pcg::Pcg64;

use super::contended::{Completed, ContendedDevice};
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::overlap_predictor::{PredictedBy, RunPredictor};
use super::overlap_report::OverlapReport;
use super::overlap_run::{OverlapRun, OverlapServing};
use downbeat_sim::random;

/// The time to ask a predictor for several groups at a time (§7.7).
const MULTI_WAY_PASS: Duration = Duration::from_micros(88);

/// A query that waits or runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub(super) model: usize,
    pub(super) arrived: Time,
    pub(super) deadline: Time,
    pub(super) rows: u32,
    pub(super) length: u32,
    /// The query's time alone.
    pub(super) alone: Duration,
}

enum Server {
    Groups(Box<Overlap<RunPredictor>>),
    /// One query of each model at a time, in the order of arrival.
    Free {
        waiting: Vec<(u64, Query)>,
        running: Vec<u64>,
    },
}

pub(super) struct Play<'a> {
    run: &'a OverlapRun,
    pub(super) models: Vec<EmulatedModel>,
    device: ContendedDevice,
    server: Server,
    queries: BTreeMap<u64, Query>,
    /// The running group, the instant of its start, and the number of its parts that still run.
    group: Option<(OperatorGroup, Time, usize)>,
    pub(super) report: OverlapReport,
    noise: Option<Normal<f64>>,
    rng: Pcg64,
}

/// Returns the time of a query alone on the device, in one launch.
pub(super) fn whole(model: &EmulatedModel, rows: u32, length: u32, units: u32) -> Duration {
    model.work(SegmentRange::new(0, model.segment_count()), rows, length, units).alone(&model.limits())
}

impl<'a> Play<'a> {
    /// Makes the device of this number in a run.
    pub(super) fn new(run: &'a OverlapRun, models: Vec<EmulatedModel>, device: u64) -> Result<Self, DeviceFailure> {
        let oracle = PredictedBy::Oracle { bias: 1.0 };
        let groups = match &run.serving {
            OverlapServing::Abacus { at_once, worth, by } => Some((GroupOrder::Headroom, *at_once, *worth, by)),
            OverlapServing::Fcfs => Some((GroupOrder::Fcfs, 1, 0.0, &oracle)),
            OverlapServing::Sjf { .. } => Some((GroupOrder::Sjf, 1, 0.0, &oracle)),
            OverlapServing::Edf => Some((GroupOrder::Edf, 1, 0.0, &oracle)),
            OverlapServing::Free => None,
        };
        let server = match groups {
            Some((order, at_once, worth, by)) => {
                let (predictor, error) = by.predictor(&run.models, &models, run.platform.noise)?;
                let queue_bound =
                    if order == GroupOrder::Headroom { OverlapOptions::default().queue_bound } else { u32::MAX };
                let options = OverlapOptions { order, at_once, worth, error, queue_bound, ..OverlapOptions::default() };
                let mut overlap = Overlap::new(options, predictor);
                for (model, emulated) in (0..).zip(&models) {
                    let comes = OverlapModel { operators: emulated.segment_count(), drop: true };
                    overlap.handle_model(Time::ZERO, ModelId(model), Some(comes));
                }
                Server::Groups(Box::new(overlap))
            }
            None => Server::Free { waiting: Vec::new(), running: Vec::new() },
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
            rng: random(run.seed, 2 + device),
        })
    }

    /// Returns the next instant of change if no query comes.
    pub(super) fn next_event(&self) -> Option<Time> {
        self.device.next_event()
    }

    /// Lets time pass.
    pub(super) fn advance(&mut self, now: Time) {
        for completed in self.device.advance(now) {
            if let Completed::Launch { lane, token } = completed {
                self.complete(now, lane, token);
            }
        }
    }

    /// Returns whether nothing waits or runs.
    pub(super) fn is_idle(&self) -> bool {
        self.queries.is_empty()
    }

    /// Notes that the last query has come.
    pub(super) fn end_of_arrivals(&mut self, now: Time) {
        self.report.span = now.since(Time::ZERO);
    }

    pub(super) fn arrive(&mut self, now: Time, id: u64, query: Query) {
        self.queries.insert(id, query);
        match &mut self.server {
            Server::Free { waiting, .. } => waiting.push((id, query)),
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
            Server::Free { running, .. } => {
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

    /// Starts all work that is due.
    pub(super) fn carry_out(&mut self, now: Time) {
        loop {
            let output = match &mut self.server {
                Server::Groups(overlap) => {
                    self.report.stats = overlap.stats();
                    let output = overlap.poll_output();
                    if output.is_none() && overlap.poll_timeout().is_some() {
                        overlap.handle_timeout(now);
                        continue;
                    }
                    output
                }
                Server::Free { .. } => return self.begin(now),
            };
            match output {
                Some(OverlapOutput::Run(group)) => {
                    // The device waited this long for the decision.
                    let waits = match self.run.serving {
                        OverlapServing::Sjf { decision } => decision,
                        _ => MULTI_WAY_PASS.saturating_mul(u64::from(group.waited_for)),
                    };
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

    /// Starts the first query of each model that has none running.
    fn begin(&mut self, now: Time) {
        loop {
            let Server::Free { waiting, running } = &mut self.server else { return };
            let is_running =
                |model: usize| running.iter().any(|id| self.queries.get(id).is_some_and(|q| q.model == model));
            let Some(index) = waiting.iter().position(|(_, query)| !is_running(query.model)) else { return };
            let (id, query) = waiting.remove(index);
            if now >= query.deadline {
                self.drop_query(id);
                continue;
            }
            running.push(id);
            let all = SegmentRange::new(0, self.models[query.model].segment_count());
            self.launch(now, query.model, all, (query.rows, query.length), (Duration::ZERO, id));
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
