//! What came and was answered, on its way to the rehearsal.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use downbeat_core::cluster::PastArrival;
use downbeat_core::{Duration, ModelId, Time};

/// Something that the rehearsal hears of.
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
    /// A request of a model ended by the policy that this generation of it has: `took` so long to its answer (`None`: it had none), by its deadline (`good`) or not.
    Ended {
        at: Time,
        model: ModelId,
        generation: u32,
        took: Option<Duration>,
        good: bool,
    },
}

impl Event {
    fn at(&mut self) -> &mut Time {
        match self {
            Event::Came(PastArrival { at, .. }) | Event::Answered { at, .. } | Event::Ended { at, .. } => at,
        }
    }
}

/// How many of them came.
fn arrivals(events: &[Event]) -> u64 {
    events.iter().filter(|event| matches!(event, Event::Came(_))).count() as u64
}

/// By shard: what came, left by whoever is in the shard, and what was answered of it; taken by the rehearsal.
///
/// Bounded. Where one is full nothing more is left there, so that it has what came up to a moment and not a part of what came; the rehearsal
/// then leaves the time out until it has looked again.
pub struct ArrivalRings {
    rings: Box<[Ring]>,
    /// How many events each has room for.
    most: usize,
    /// Whether anything is to be left.
    open: AtomicBool,
}

struct Ring {
    /// Made with the first event: a server that gets no requests, or whose policies are fixed, does without the memory.
    events: OnceLock<ArrayQueue<Event>>,
    /// It was full: there is a gap behind what it has.
    torn: AtomicBool,
    /// How many arrivals did not find room in it.
    lost: AtomicU64,
}

impl ArrivalRings {
    /// For so many shards, each with room for `most`. They are closed.
    pub fn new(shards: usize, most: usize) -> Self {
        let ring = |_| Ring { events: OnceLock::new(), torn: AtomicBool::new(false), lost: AtomicU64::new(0) };
        ArrivalRings { rings: (0..shards).map(ring).collect(), most, open: AtomicBool::new(false) }
    }

    /// Whether what comes is wanted.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// The ring for what came at this time, where no shard has it.
    pub fn spread(&self, came: Time) -> usize {
        (came.as_nanos().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % self.rings.len()
    }

    /// Leaves what happened to a shard's requests.
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

/// Takes what came out of the rings: all of some windows of time, and nothing of the others. Time stands still in those, so that they do not look like
/// a load that paused.
#[derive(Debug, Default)]
pub struct ArrivalFeed {
    /// Came after the window that was taken last.
    held: Vec<Event>,
    /// Where the next window begins.
    begin: Time,
    /// What comes before is of a window that was left out.
    from: Time,
    /// Windows that were left out, all together.
    skipped: Duration,
    /// Arrivals in them.
    lost: u64,
}

impl ArrivalFeed {
    /// Arrivals of windows of time that were left out because a ring was full.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The time that was left out, all together.
    pub fn skipped(&self) -> Duration {
        self.skipped
    }

    /// Has the rings take what comes, or not.
    pub fn set_open(&mut self, rings: &ArrivalRings, open: bool, now: impl Fn() -> Time) {
        if rings.open.swap(open, Ordering::Relaxed) != open {
            // What is there is of nobody's window.
            let lost = self.lost;
            self.leave_out(rings, now);
            self.lost = lost;
        }
    }

    /// What came since the last time, in order; nothing, if more came than a ring has room for.
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

    /// Leaves the time up to now out.
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
            // Meanwhile one comes before the end of the window, and is there after it.
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
