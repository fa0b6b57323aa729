//! Queries of several models, and the devices that serve them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use downbeat_core::{Duration, Time};
use downbeat_sim::simulation::node::{self, Node};
use downbeat_sim::{ArrivalStream, random};
use rand::RngExt;
use rand_pcg::Pcg64;

use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::overlap_play::{Play, Query};
use super::overlap_report::OverlapReport;
use super::overlap_run::OverlapRun;

/// The rule that chooses a query's device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpreadBy {
    /// Each model's queries go to the devices in turn, as services of Kubernetes send them. Each
    /// device serves its own queries.
    Turn,
    /// Clockwork, as Abacus describes it (§7.6). One queue has the most urgent query first and
    /// drops queries that cannot meet their deadline. A free device gets one query and runs nothing
    /// beside it.
    Clockwork,
}

/// The queries that come in a run.
pub(super) struct OverlapQueries<'a> {
    run: &'a OverlapRun,
    /// A stream for each model, or one for all models, each query's model drawn at random.
    streams: Vec<ArrivalStream>,
    /// By stream: its next query.
    next: Vec<Time>,
    /// By model: the time from a query's arrival to its deadline.
    targets: Vec<Duration>,
    draws: Pcg64,
    sent: u32,
    is_mixed: bool,
}

impl<'a> OverlapQueries<'a> {
    pub fn new(run: &'a OverlapRun, mut streams: Vec<ArrivalStream>, targets: Vec<Duration>, is_mixed: bool) -> Self {
        let next = streams.iter_mut().map(ArrivalStream::next_arrival).collect();
        OverlapQueries { run, streams, next, targets, draws: random(run.seed, 1), sent: 0, is_mixed }
    }

    /// Returns the time of the next query, and its stream.
    fn peek(&self) -> Option<(Time, usize)> {
        self.next.iter().copied().zip(0..).min().filter(|_| self.sent < self.run.queries)
    }

    /// Draws the query of this stream that comes now. Returns its number and the query.
    fn draw(&mut self, now: Time, stream: usize, models: &[EmulatedModel]) -> (u32, Query) {
        self.next[stream] = self.streams[stream].next_arrival();
        let model = if self.is_mixed { self.draws.random_range(0..models.len()) } else { stream };
        let query = self.run.query(&models[model], (model, self.targets[model]), now, &mut self.draws);
        self.sent += 1;
        (self.sent - 1, query)
    }
}

/// The devices of a run, and their queries.
pub(super) struct OverlapDevices<'a> {
    queries: OverlapQueries<'a>,
    models: Vec<EmulatedModel>,
    plays: Vec<Play<'a>>,
    by: SpreadBy,
    /// By model: its queries so far.
    turns: Vec<usize>,
    queue: CentralQueue,
}

impl<'a> OverlapDevices<'a> {
    pub fn new(queries: OverlapQueries<'a>, devices: usize, by: SpreadBy) -> Result<Self, DeviceFailure> {
        let (run, models) = (queries.run, queries.run.models()?);
        let play = |number: usize| Play::new(run, models.clone(), number as u64);
        let plays = (0..devices).map(play).collect::<Result<_, _>>()?;
        let turns = vec![0; models.len()];
        Ok(OverlapDevices { queries, models, plays, by, turns, queue: CentralQueue::default() })
    }

    /// Plays until all queries are answered or dropped.
    pub fn play(mut self) -> OverlapReport {
        node::run(&mut self, Time::ZERO);
        let mut report = OverlapReport::joined(self.plays.into_iter().map(|play| play.report));
        report.dropped += self.queue.dropped;
        report
    }

    /// Sends the query of this stream that comes now. Returns its device, unless it waits for one.
    fn arrive(&mut self, now: Time, stream: usize) -> Option<usize> {
        let (id, query) = self.queries.draw(now, stream, &self.models);
        let device = match self.by {
            SpreadBy::Clockwork => {
                self.queue.push(id, query);
                None
            }
            SpreadBy::Turn => {
                let device = self.turns[query.model] % self.plays.len();
                self.turns[query.model] += 1;
                self.plays[device].arrive(now, u64::from(id), query);
                Some(device)
            }
        };
        if self.queries.peek().is_none() {
            self.plays.iter_mut().for_each(|play| play.end_of_arrivals(now));
        }
        device
    }
}

impl Node for OverlapDevices<'_> {
    /// The stream of the query that comes, if one does.
    type Event = Option<usize>;
    type End = ();

    fn seed(&self) -> u64 {
        self.queries.run.seed
    }

    fn poll_event(&mut self) -> Option<(Time, Option<usize>)> {
        let query = self.queries.peek();
        let device = self.plays.iter().filter_map(Play::next_event).min();
        match (query, device) {
            (Some((at, stream)), device) if device.is_none_or(|event| at <= event) => Some((at, Some(stream))),
            (_, device) => device.map(|event| (event, None)),
        }
    }

    fn handle_event(&mut self, now: Time, stream: Option<usize>) -> ControlFlow<()> {
        let mut touched: Vec<usize> = Vec::new();
        for (number, play) in self.plays.iter_mut().enumerate() {
            if play.next_event().is_some_and(|event| event <= now) {
                play.advance(now);
                touched.push(number);
            }
        }
        touched.extend(stream.and_then(|stream| self.arrive(now, stream)));
        touched.into_iter().for_each(|number| self.plays[number].carry_out(now));
        self.queue.give(now, &mut self.plays);
        ControlFlow::Continue(())
    }
}

/// The queries that wait for a device, by deadline.
#[derive(Default)]
struct CentralQueue {
    waiting: BTreeMap<(Time, u32), Query>,
    dropped: u32,
}

impl CentralQueue {
    fn push(&mut self, id: u32, query: Query) {
        self.waiting.insert((query.deadline, id), query);
    }

    /// Gives queries to free devices, and drops queries that cannot meet their deadline.
    fn give(&mut self, now: Time, plays: &mut [Play<'_>]) {
        while let Some(free) = plays.iter_mut().find(|play| !self.waiting.is_empty() && play.is_idle()) {
            let Some(((deadline, id), query)) = self.waiting.pop_first() else { return };
            if now + query.alone > deadline {
                self.dropped += 1;
                continue;
            }
            free.arrive(now, u64::from(id), query);
            free.carry_out(now);
        }
    }
}
