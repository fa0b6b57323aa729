//! The arrivals of all models in order of time.

use downbeat_core::{Duration, ModelId, Time};

use crate::arrivals::arrival::Arrival;
use crate::arrivals::{ArrivalStream, BadArrivals};
use crate::simulation::{Load, Simulation};

/// The source of a simulation's requests.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// Requests are drawn at random: one item each, due after the model's SLO.
    Drawn(Feed, &'a [Load]),
    /// Requests come from a recording.
    Recorded(&'a [Arrival]),
}

impl<'a> Source<'a> {
    pub fn new(simulation: &'a Simulation) -> Result<Self, BadArrivals> {
        let Simulation { loads, seed, warm_up, span, recorded, .. } = simulation;
        Ok(match recorded {
            Some(arrivals) => Source::Recorded(arrivals),
            None => Source::Drawn(Feed::new(loads, *seed, Time::ZERO + *warm_up + *span)?, loads),
        })
    }

    /// The time of the next request; `Time::MAX` if there is none.
    pub fn peek(&self) -> Time {
        match self {
            Source::Drawn(feed, _) => feed.peek().map_or(Time::MAX, |(at, _)| at),
            Source::Recorded(arrivals) => arrivals.first().map_or(Time::MAX, |arrival| arrival.at),
        }
    }

    /// Takes the next request.
    pub fn pop(&mut self) -> Option<Arrival> {
        match self {
            Source::Drawn(feed, loads) => {
                let (at, model) = feed.pop()?;
                let deadline = at + loads[model as usize].slo;
                let model = ModelId(model);
                Some(Arrival { at, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 })
            }
            Source::Recorded(arrivals) => {
                let (first, rest) = arrivals.split_first()?;
                *arrivals = rest;
                Some(*first)
            }
        }
    }
}

/// The arrivals of all models in order of time; at one instant, in order of models.
///
/// They are drawn for a stretch of time at once, model by model, and sorted. That is cheaper than a
/// heap of each model's next arrival, and the cost of an arrival does not grow with the number of
/// models.
#[derive(Debug)]
pub struct Feed {
    streams: Vec<Stream>,
    /// Arrivals from `start` on. An entry is the nanoseconds after `start`, shifted by
    /// [`MODEL_BITS`], and the model.
    block: Vec<u64>,
    /// The number of entries that were taken.
    taken: usize,
    start: Time,
    /// Nanoseconds of a block.
    width: u64,
    end: Time,
}

#[derive(Debug)]
struct Stream {
    arrivals: ArrivalStream,
    next: Time,
}

/// Bits of a model's number in an entry.
const MODEL_BITS: u32 = 22;
/// Longest block: its nanoseconds must fit into the other bits.
const MAX_WIDTH: u64 = 1 << (64 - MODEL_BITS);
/// Approximate number of arrivals in a block, which stays in the first-level cache.
const BLOCK: usize = 2048;

impl Feed {
    /// The arrivals before `end`. Panics if there are more than 2^22 models.
    pub fn new(loads: &[Load], seed: u64, end: Time) -> Result<Self, BadArrivals> {
        assert!(loads.len() < 1 << MODEL_BITS, "at most 2^{MODEL_BITS} models can be simulated");
        let streams = loads
            .iter()
            .zip(0..)
            .map(|(load, stream)| {
                let mut arrivals = load.arrivals.stream(load.rate, seed, stream)?.paced(&load.pace);
                let next = arrivals.next_arrival();
                Ok(Stream { arrivals, next })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let rate: f64 = loads.iter().map(|load| load.rate).sum();
        let width = (BLOCK.max(4 * loads.len()) as f64 / rate * 1e9) as u64;
        let mut feed =
            Feed { streams, block: Vec::new(), taken: 0, start: Time::ZERO, width: width.clamp(1, MAX_WIDTH), end };
        feed.fill();
        Ok(feed)
    }

    /// The next arrival and its model.
    pub fn peek(&self) -> Option<(Time, u32)> {
        let entry = *self.block.get(self.taken)?;
        let after = Duration::from_nanos(entry >> MODEL_BITS);
        Some((self.start + after, (entry & ((1 << MODEL_BITS) - 1)) as u32))
    }

    /// Takes the next arrival.
    pub fn pop(&mut self) -> Option<(Time, u32)> {
        let next = self.peek()?;
        self.taken += 1;
        if self.taken == self.block.len() {
            self.start += Duration::from_nanos(self.width);
            self.fill();
        }
        Some(next)
    }

    /// Draws the block from `start` on, or the first later block with an arrival.
    fn fill(&mut self) {
        self.block.clear();
        self.taken = 0;
        let first = self.streams.iter().map(|stream| stream.next).min().unwrap_or(Time::MAX);
        if first >= self.end {
            return;
        }
        self.start = self.start.max(first);
        let until = (self.start + Duration::from_nanos(self.width)).min(self.end);
        for (stream, model) in self.streams.iter_mut().zip(0u64..) {
            while stream.next < until {
                let after = stream.next.since(self.start).as_nanos();
                self.block.push(after << MODEL_BITS | model);
                stream.next = stream.arrivals.next_arrival();
            }
        }
        self.block.sort_unstable();
    }
}
