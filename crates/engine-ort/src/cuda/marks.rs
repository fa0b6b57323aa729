//! The marks of a launch in its stream, the times between them, and the wait for the end.

use std::any::Any;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration as StdDuration, Instant};

use downbeat_core::Duration;
use downbeat_engine::Timed;

use super::{CudaError, Device, Event, Stream};

/// A waiting thread wakes this long before the expected end of its launch: a sleep ends up to some
/// 60 us late.
const AWAKE_BEFORE: StdDuration = StdDuration::from_micros(100);
/// The thread polls this long after the expected end. Then it sleeps until the device wakes it,
/// which takes about as long. The shortest launches also take about as long, and at first nothing
/// is expected of them.
const AWAKE_AFTER: StdDuration = StdDuration::from_micros(50);
/// The number of kinds of launches whose times a lane remembers.
const MOST_EXPECTED: usize = 1024;
/// Launches of a kind before its time can be expected: the first ones take much longer.
const FEWEST: u32 = 4;

/// The number of threads that wait for a launch.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The begin and the end of a launch in its stream.
pub(crate) struct Marks {
    begin: Event,
    end: Event,
    /// The launch's expected time, zero if unknown.
    expected: StdDuration,
    /// The instant when its begin was enqueued, by the host's clock.
    enqueued: Instant,
    /// The instant when its end was noticed.
    over: Arc<OnceLock<Instant>>,
    /// The same instant of the launch before it in its stream, if that one was under way.
    before: Option<Arc<OnceLock<Instant>>>,
}

impl Marks {
    /// Marks for a launch that is not yet enqueued.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Marks, CudaError> {
        let (begin, end) = (Event::timed(device)?, Event::timed(device)?);
        Ok(Marks { begin, end, expected: StdDuration::ZERO, enqueued: now(), over: Arc::default(), before: None })
    }

    /// Marks the begin of a launch, which comes after `before` and should take `expected`.
    pub(crate) fn begin(
        &mut self,
        stream: &Stream,
        before: Option<&Marks>,
        expected: StdDuration,
    ) -> Result<(), CudaError> {
        (self.enqueued, self.over, self.expected) = (now(), Arc::default(), expected);
        self.before = before.map(|before| before.over.clone());
        stream.record(&self.begin)
    }

    /// Marks the end of the launch, behind all work enqueued so far.
    pub(crate) fn end(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.record(&self.end)
    }

    /// Whether the launch is over.
    pub(crate) fn is_over(&self) -> Result<bool, CudaError> {
        let is_over = self.over.get().is_some() || self.end.is_over()?;
        if is_over {
            self.over.get_or_init(now);
        }
        Ok(is_over)
    }

    /// The time that a waiting thread may sleep and still be awake at the expected end. Zero while
    /// the launch before it is under way.
    pub(crate) fn spare(&self) -> StdDuration {
        let end = self.begun().map(|begun| begun + self.expected);
        end.map_or(StdDuration::ZERO, |end| end.saturating_duration_since(now() + AWAKE_BEFORE))
    }

    /// The begin of the launch, by the host's clock, if it is known: the launch is enqueued, and
    /// the one before it is over.
    fn begun(&self) -> Option<Instant> {
        match &self.before {
            None => Some(self.enqueued),
            Some(before) => before.get().map(|over| self.enqueued.max(*over)),
        }
    }

    /// Blocks the caller until the launch is over. It sleeps for most of the expected time, and
    /// polls around the end, because a wake-up by the device takes some tens of microseconds. If
    /// the launch takes longer, it sleeps again. If there is no core to spare, it sleeps all the
    /// time.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        if self.is_over()? {
            return Ok(());
        }
        let waiting = Waiting::begin();
        if let Some(begun) = self.begun().filter(|_| waiting.may_be_awake()) {
            sleep(self.spare());
            let until = begun + self.expected + AWAKE_AFTER;
            while now() < until {
                if self.is_over()? {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        self.end.sleep()?;
        self.over.get_or_init(now);
        Ok(())
    }

    /// The launch's time on the device. The launch must be over.
    pub(crate) fn took(&self) -> Result<Duration, CudaError> {
        self.end.since(&self.begin)
    }
}

#[expect(clippy::disallowed_methods, reason = "decides only how long to sleep, and no deadline")]
fn now() -> Instant {
    Instant::now()
}

#[expect(clippy::disallowed_methods, reason = "what is waited for says nothing before it is over")]
fn sleep(time: StdDuration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

/// Counts its thread as one that waits for a launch, until it is dropped.
struct Waiting {
    /// The number of waiting threads, this one included.
    all: usize,
}

impl Waiting {
    fn begin() -> Waiting {
        Waiting { all: WAITING.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// Whether the thread may use a core for polling: there must be a core for each waiting thread,
    /// and one for other threads.
    fn may_be_awake(&self) -> bool {
        static CORES: OnceLock<usize> = OnceLock::new();
        let cores = CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get));
        self.all < *cores
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The device's clock counts in steps of half a microsecond. The driver returns the time between
/// two events as a float. The error is at most 60 ns if both ran within a second.
impl Timed for Marks {
    fn took(&self) -> Option<Duration> {
        self.took().ok()
    }

    fn times_after(&self, other: &dyn Timed) -> Option<(i64, i64)> {
        let zero = &(other as &dyn Any).downcast_ref::<Marks>()?.begin;
        Some((self.begin.nanos_since(zero).ok()?, self.end.nanos_since(zero).ok()?))
    }
}

/// The past times of a lane's launches.
#[derive(Default)]
pub(crate) struct Expected(Mutex<BTreeMap<Kind, Took>>);

struct Took {
    launches: u32,
    shortest: StdDuration,
}

/// The key of launches that take about the same time: the segments, and the bytes of their inputs.
type Kind = (usize, usize, usize);

fn kind(range: &Range<usize>, bytes: usize) -> Kind {
    (range.start, range.end, bytes)
}

impl Expected {
    /// A time that a launch of these segments on this many bytes will hardly undercut; zero if
    /// there were too few launches.
    pub(crate) fn of(&self, range: &Range<usize>, bytes: usize) -> StdDuration {
        let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        times
            .get(&kind(range, bytes))
            .filter(|took| took.launches >= FEWEST)
            .map_or(StdDuration::ZERO, |took| took.shortest)
    }

    /// Learns the time of a launch. The shortest time counts, as a thread that sleeps too long
    /// measures the end late. The shortest time is forgotten gradually: each longer launch raises
    /// it by at most a 64th.
    pub(crate) fn learn(&self, range: &Range<usize>, bytes: usize, took: Duration) {
        let (kind, took) = (kind(range, bytes), StdDuration::from(took));
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() >= MOST_EXPECTED && !times.contains_key(&kind) {
            times.clear();
        }
        let Took { launches, shortest } = times.entry(kind).or_insert(Took { launches: 0, shortest: took });
        *launches = launches.saturating_add(1);
        *shortest = took.min(*shortest + *shortest / 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_launch_of_a_kind_is_expected_until_it_is_old() {
        let expected = Expected::default();
        let micros = Duration::from_micros;
        for took in [5_000_000, 900, 640, 800] {
            assert_eq!(expected.of(&(0..2), 4), StdDuration::ZERO);
            expected.learn(&(0..2), 4, micros(took));
        }
        assert_eq!(expected.of(&(0..2), 4), StdDuration::from_micros(650));
        assert_eq!((expected.of(&(0..1), 4), expected.of(&(0..2), 3)), (StdDuration::ZERO, StdDuration::ZERO));
        (0..100).for_each(|_| expected.learn(&(0..2), 4, micros(800)));
        assert_eq!(expected.of(&(0..2), 4), StdDuration::from_micros(800));
        (0..2 * MOST_EXPECTED).for_each(|bytes| expected.learn(&(0..1), bytes, micros(1)));
        assert!(expected.0.into_inner().unwrap().len() <= MOST_EXPECTED);
    }
}
