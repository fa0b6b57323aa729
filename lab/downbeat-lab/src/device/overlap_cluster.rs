//! Requests of several models on several devices: Abacus on each of them, and Clockwork.

use std::collections::BTreeMap;

use downbeat_core::{Duration, Time};

use super::failure::DeviceFailure;
use super::overlap_play::{Play, Query};
use super::overlap_report::OverlapReport;
use super::overlap_run::OverlapRun;
use downbeat_sim::{ArrivalStream, Arrivals, random};
use downbeat_sim::{Popularity, Shape};

/// Minutes of the trace (Abacus §7.6: two hours).
const MINUTES: u32 = 120;

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

/// A run on several equal devices. Queries come as Azure's functions are called: each model's rate
/// changes by itself from minute to minute.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapCluster {
    /// The run on each device; its rate and its queries are for all devices together. A minute of
    /// the trace is shortened to fit the number of queries.
    pub run: OverlapRun,
    /// The number of devices.
    pub devices: usize,
    /// The QoS target of all queries.
    pub target: Duration,
    /// The models' shares of the queries.
    pub popularity: Popularity,
    /// The rule that spreads the queries.
    pub by: SpreadBy,
}

impl OverlapCluster {
    /// Returns a stream of arrivals for each model. The rates add up to the run's rate, and each
    /// changes over the trace around its mean.
    fn arrivals(&self) -> Result<Vec<ArrivalStream>, DeviceFailure> {
        let OverlapRun { models, rate, queries, seed, .. } = &self.run;
        let seconds = f64::from(*queries) / rate;
        let minute = Duration::from_secs_f64(seconds / f64::from(MINUTES));
        let of_model = |(share, stream): (f64, u64)| {
            let pace = Shape::Maf(minute).pace(*seed, stream, seconds);
            let pace = pace.map_err(|bad| DeviceFailure(bad.to_string()))?;
            Ok(Arrivals::Poisson.stream(rate * share, *seed, stream)?.paced(&pace))
        };
        self.popularity.shares(models.len()).into_iter().zip(10..).map(of_model).collect()
    }

    /// Plays the run until all queries are answered or dropped.
    ///
    /// # Errors
    /// As [`OverlapRun::play`], or if there is no device.
    pub fn play(&self) -> Result<OverlapReport, DeviceFailure> {
        let run = &self.run;
        if run.models.is_empty() || self.devices == 0 {
            return Err(DeviceFailure("queries of no model, or for no device".to_owned()));
        }
        let (models, mut streams, mut draws) = (run.models()?, self.arrivals()?, random(run.seed, 1));
        let device = |number: usize| Play::new(run, models.clone(), number as u64);
        let mut plays: Vec<Play<'_>> = (0..self.devices).map(device).collect::<Result<_, _>>()?;
        let mut next: Vec<Time> = streams.iter_mut().map(ArrivalStream::next_arrival).collect();
        let (mut turns, mut queue, mut sent) = (vec![0; models.len()], CentralQueue::default(), 0_u32);
        loop {
            let comes = next.iter().copied().zip(0..).min().filter(|_| sent < run.queries);
            let arrives = comes.map_or(Time::MAX, |(time, _)| time);
            let now = plays.iter().filter_map(Play::next_event).min().map_or(arrives, |event| event.min(arrives));
            if now == Time::MAX {
                let mut report = OverlapReport::joined(plays.into_iter().map(|play| play.report));
                report.dropped += queue.dropped;
                return Ok(report);
            }
            let mut touched: Vec<usize> = Vec::new();
            for (number, play) in plays.iter_mut().enumerate() {
                if play.next_event().is_some_and(|event| event <= now) {
                    play.advance(now);
                    touched.push(number);
                }
            }
            if let Some((_, model)) = comes.filter(|(time, _)| *time == now) {
                next[model] = streams[model].next_arrival();
                let query = run.query(&models[model], (model, self.target), now, &mut draws);
                match self.by {
                    SpreadBy::Clockwork => queue.push(sent, query),
                    SpreadBy::Turn => {
                        let number: usize = turns[model] % plays.len();
                        turns[model] += 1;
                        plays[number].arrive(now, u64::from(sent), query);
                        touched.push(number);
                    }
                }
                sent += 1;
                if sent == run.queries {
                    plays.iter_mut().for_each(|play| play.end_of_arrivals(now));
                }
            }
            touched.into_iter().for_each(|number| plays[number].carry_out(now));
            queue.give(now, &mut plays);
        }
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
