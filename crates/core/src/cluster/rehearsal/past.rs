//! What came lately.

use std::collections::VecDeque;

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// A request that came, as far as a replay needs it. 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PastArrival {
    /// When.
    pub at: Time,
    /// From then to its deadline; [`Duration::MAX`]: it has none.
    pub budget: Duration,
    /// Of which model.
    pub model: ModelId,
    /// Items.
    pub size: u32,
    /// Its priority level.
    pub level: u32,
}

/// The arrivals of the last seconds, in order of time.
#[derive(Debug)]
pub(crate) struct Past {
    arrivals: VecDeque<PastArrival>,
    /// At most so many are kept.
    most: usize,
    /// And so many at least, but for a span of more than that.
    fewest: usize,
    span: Duration,
    /// Arrivals since the last [`Past::seen`].
    unseen: usize,
}

impl Past {
    pub fn new(fewest: usize, most: usize, span: Duration) -> Self {
        Past { arrivals: VecDeque::new(), most, fewest, span, unseen: 0 }
    }

    /// One that comes earlier than the last is taken to have come with it.
    pub fn push(&mut self, arrival: PastArrival) {
        let last = self.arrivals.back().map_or(Time::ZERO, |last| last.at);
        let arrival = PastArrival { at: arrival.at.max(last), ..arrival };
        while let Some(first) = self.arrivals.front()
            && (self.arrivals.len() >= self.most
                || self.arrivals.len() >= self.fewest && arrival.at.since(first.at) > self.span)
        {
            self.arrivals.pop_front();
        }
        self.arrivals.push_back(arrival);
        self.unseen += 1;
    }

    /// Forgets what a model was asked for: it is gone.
    pub fn forget(&mut self, model: ModelId) {
        self.arrivals.retain(|arrival| arrival.model != model);
    }

    /// All of it; from now on [`Past::unseen`] counts from zero.
    pub fn seen(&mut self) -> Vec<PastArrival> {
        self.unseen = 0;
        self.arrivals.iter().copied().collect()
    }

    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Arrivals since the last [`Past::seen`].
    pub fn unseen(&self) -> usize {
        self.unseen
    }

    /// From the first to the last.
    pub fn span(&self) -> Duration {
        match (self.arrivals.front(), self.arrivals.back()) {
            (Some(first), Some(last)) => last.at.since(first.at),
            _ => Duration::ZERO,
        }
    }
}
