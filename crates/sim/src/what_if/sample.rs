//! A part of a long log that is like the whole.

use std::sync::Arc;

use downbeat_core::{Duration, Time};

use super::interval::PARTS;
use super::recorded::Recorded;
use crate::arrivals::arrival::Arrival;

impl Recorded {
    /// About `most` of the requests: a window from the middle of each of 20 parts with equally many
    /// requests. The windows follow one another without a pause. `None`: the log has no more requests
    /// than that.
    pub fn sample(&self, most: usize) -> Option<Recorded> {
        let all = self.arrivals.len();
        if all <= most.max(PARTS) {
            return None;
        }
        let window = most.div_ceil(PARTS);
        let mut arrivals: Vec<Arrival> = Vec::with_capacity(window * PARTS);
        let mut begin = Time::ZERO;
        for part in 0..PARTS {
            let [from, until] = [part, part + 1].map(|part| part * all / PARTS);
            let first = from + (until - from).saturating_sub(window) / 2;
            let last = (first + window).min(until);
            let (taken, start) = (&self.arrivals[first..last], self.arrivals[first].at);
            let moved = |at: Time| if at == Time::MAX { at } else { begin + at.since(start) };
            arrivals.extend(taken.iter().map(|arrival| Arrival {
                at: moved(arrival.at),
                deadline: moved(arrival.deadline),
                queue_expiry: moved(arrival.queue_expiry),
                ..*arrival
            }));
            let end = self.arrivals.get(last).or(self.arrivals.last()).map_or(start, |next| next.at);
            begin += end.since(start);
        }
        let span = begin.since(Time::ZERO).max(Duration::from_millis(1));
        Some(Recorded { arrivals: Arc::from(arrivals), span, ..self.clone() })
    }
}
