//! Rings that bring arrivals and answers to the rehearsal.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use downbeat_core::cluster::PastArrival;
use downbeat_core::{Duration, ModelId, Time};

/// An event that the rehearsal hears of.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Came(PastArrival),
    /// Requests of a queue were answered, or lost: rejected or dropped.
    Answered {
        at: Time,
        model: ModelId,
        requests: u32,
        lost: bool,
    },
    /// A request came to a pipeline.
    Asked {
        at: Time,
        budget: Duration,
        pipeline: u64,
        rows: u32,
    },
}

impl Event {
    fn at(&mut self) -> &mut Time {
        match self {
            Event::Came(PastArrival { at, .. }) | Event::Answered { at, .. } | Event::Asked { at, .. } => at,
        }
    }
}

/// The number of arrivals among events.
fn arrivals(events: &[Event]) -> u64 {
    events.iter().filter(|event| matches!(event, Event::Came(_))).count() as u64
}

/// The arrivals and answers of each shard. The thread in the shard leaves them; the rehearsal takes
/// them.
///
/// Bounded. A full ring takes no more events until the rehearsal has looked again. This way a ring
/// has all events up to some moment, without gaps. The rehearsal leaves the time after a full ring
/// out.
pub struct ArrivalRings {
    rings: Box<[Ring]>,
    /// The most events in each ring.
    most: usize,
    /// Whether the rings take events.
    open: AtomicBool,
}

struct Ring {
    /// Made with the first event. A server without requests, or with fixed policies, does without
    /// the memory.
    events: OnceLock<ArrayQueue<Event>>,
    /// Whether the ring was full, so that events are missing after its last one.
    torn: AtomicBool,
    /// Arrivals that did not find room in the ring.
    lost: AtomicU64,
}

impl ArrivalRings {
    /// Closed rings for so many shards, each with room for `most` events.
    pub fn new(shards: usize, most: usize) -> Self {
        let ring = |_| Ring { events: OnceLock::new(), torn: AtomicBool::new(false), lost: AtomicU64::new(0) };
        ArrivalRings { rings: (0..shards).map(ring).collect(), most, open: AtomicBool::new(false) }
    }

    /// Whether the rehearsal wants events.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Leaves an event of a shard's requests.
    pub fn push(&self, shard: usize, event: Event) {
        let ring = &self.rings[shard];
        let events = ring.events.get_or_init(|| ArrayQueue::new(self.most));
        if ring.torn.load(Ordering::Relaxed) || events.push(event).is_err() {
            ring.lost.fetch_add(arrivals(&[event]), Ordering::Relaxed);
            ring.torn.store(true, Ordering::Release);
        }
    }
}

impl Ring {
    /// Takes all events out of the ring.
    fn taken(&self) -> impl Iterator<Item = Event> {
        std::iter::from_fn(|| self.events.get()?.pop())
    }
}

/// Takes events out of the rings: all events of some windows of time, and none of the other
/// windows. Time stands still in the windows left out, so that they do not look like a pause of the
/// load.
#[derive(Debug, Default)]
pub struct ArrivalFeed {
    /// Events after the window that was taken last.
    held: Vec<Event>,
    /// The beginning of the next window.
    begin: Time,
    /// Events up to this time belong to a window that was left out.
    from: Time,
    /// The total time of the windows left out.
    skipped: Duration,
    /// Arrivals in the windows left out.
    lost: u64,
}

impl ArrivalFeed {
    /// Arrivals in windows that were left out because a ring was full.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The total time that was left out.
    pub fn skipped(&self) -> Duration {
        self.skipped
    }

    /// The end of the last window.
    pub fn heard_until(&self) -> Time {
        self.begin
    }

    /// Opens or closes the rings.
    pub fn set_open(&mut self, rings: &ArrivalRings, open: bool, now: impl Fn() -> Time) {
        if rings.open.swap(open, Ordering::Relaxed) != open {
            // The events in the rings belong to no window.
            let lost = self.lost;
            self.leave_out(rings, now);
            self.lost = lost;
        }
    }

    /// The events since the last call, in order. Empty if a ring was full in the meantime.
    pub fn take(&mut self, rings: &ArrivalRings, now: impl Fn() -> Time) -> Vec<Event> {
        let end = now();
        for ring in &rings.rings {
            self.held.extend(ring.taken());
        }
        if rings.rings.iter().any(|ring| ring.torn.load(Ordering::Acquire)) {
            self.leave_out(rings, now);
            return Vec::new();
        }
        let (mut came, held) =
            std::mem::take(&mut self.held).into_iter().partition::<Vec<_>, _>(|came| *came.clone().at() <= end);
        (self.held, self.begin) = (held, end);
        let before = arrivals(&came);
        came.retain_mut(|event| *event.at() > self.from);
        self.lost += before - arrivals(&came);
        came.sort_by_key(|event| *event.clone().at());
        for at in came.iter_mut().map(Event::at) {
            *at = Time::ZERO + at.since(Time::ZERO + self.skipped);
        }
        came
    }

    /// Leaves out the time up to now.
    fn leave_out(&mut self, rings: &ArrivalRings, now: impl Fn() -> Time) {
        for ring in &rings.rings {
            self.held.extend(ring.taken());
            self.lost += ring.lost.swap(0, Ordering::Relaxed);
            ring.torn.store(false, Ordering::Release);
        }
        let end = now();
        let before = arrivals(&self.held);
        self.held.retain_mut(|event| *event.at() > end);
        self.lost += before - arrivals(&self.held);
        self.skipped += end.since(self.begin);
        (self.begin, self.from) = (end, end);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn push(rings: &ArrivalRings, shard: usize, times: impl IntoIterator<Item = u64>) {
        for at in times {
            let arrival = PastArrival { at: ms(at), budget: Duration::MAX, model: ModelId(0), size: 1, level: 0 };
            rings.push(shard, Event::Came(arrival));
        }
    }

    fn take(feed: &mut ArrivalFeed, rings: &ArrivalRings, now: u64) -> Vec<u64> {
        let millis = |mut event: Event| event.at().since(Time::ZERO).as_nanos() / 1_000_000;
        feed.take(rings, || ms(now)).into_iter().map(millis).collect()
    }

    #[test]
    fn what_came_to_all_shards_comes_in_order_and_once() {
        let (rings, mut feed) = (ArrivalRings::new(2, 4), ArrivalFeed::default());
        push(&rings, 0, [1, 4, 12]);
        push(&rings, 1, [2, 3]);
        assert_eq!(take(&mut feed, &rings, 10), [1, 2, 3, 4], "the rest is of the next window");
        push(&rings, 1, [11]);
        assert_eq!(take(&mut feed, &rings, 20), [11, 12]);
        assert_eq!((take(&mut feed, &rings, 30), feed.lost()), (vec![], 0));
    }

    #[test]
    fn a_full_ring_costs_the_window_of_all_shards_and_no_time() {
        let (rings, mut feed) = (ArrivalRings::new(2, 4), ArrivalFeed::default());
        push(&rings, 0, 1..=2);
        assert_eq!(take(&mut feed, &rings, 10), [1, 2]);
        push(&rings, 0, 11..=16);
        push(&rings, 1, [12, 15]);
        assert_eq!(take(&mut feed, &rings, 20), [0u64; 0]);
        assert_eq!(feed.lost(), 8, "four in the ring, two beyond, two of the other shard");
        push(&rings, 0, [21]);
        push(&rings, 1, [22]);
        assert_eq!(feed.skipped(), Duration::from_millis(10));
        assert_eq!(take(&mut feed, &rings, 30), [11, 12], "the window of 10 ms that was left out took no time");
        assert_eq!(feed.lost(), 8);
    }

    #[test]
    fn what_comes_while_a_window_is_left_out_is_of_it() {
        let (rings, mut feed) = (ArrivalRings::new(2, 4), ArrivalFeed::default());
        push(&rings, 0, 1..=5);
        let calls = Cell::new(0);
        let came = feed.take(&rings, || {
            calls.set(calls.get() + 1);
            // Meanwhile an event comes before the end of the window, and is found only afterwards.
            if calls.get() == 2 {
                push(&rings, 1, [7]);
            }
            ms(if calls.get() == 1 { 6 } else { 8 })
        });
        assert_eq!((came.len(), calls.get()), (0, 2));
        push(&rings, 1, [9]);
        assert_eq!(take(&mut feed, &rings, 20), [1], "9, of which 8 were left out");
        assert_eq!(feed.lost(), 6);
    }

    #[test]
    fn opening_them_begins_a_window() {
        let (rings, mut feed) = (ArrivalRings::new(1, 4), ArrivalFeed::default());
        assert!(!rings.is_open());
        feed.set_open(&rings, true, || ms(100));
        assert!(rings.is_open());
        push(&rings, 0, [103]);
        assert_eq!(take(&mut feed, &rings, 110), [3]);
        feed.set_open(&rings, false, || ms(120));
        feed.set_open(&rings, true, || ms(5_000));
        push(&rings, 0, [5_001]);
        assert_eq!(take(&mut feed, &rings, 5_010), [11], "10 ms of the first window, and 1 of the second");
        assert_eq!(feed.lost(), 0);
    }
}
