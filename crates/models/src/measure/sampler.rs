//! Runs and times the same work again and again: one case after another, within a time for all.

use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::{Duration, Time};
use downbeat_engine::{Lane, Model, Place, RunError};
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, LARGEST_TRIAL};
use downbeat_service::clock::Clock;
use parking_lot::RwLock;

/// The first runs of a size, which engines do more in than run. In the first one they allocate and
/// plan; on a GPU the second one may be tried as a graph.
const WARM_UP: usize = 2;

/// Hears how measuring goes on, and may end it early.
pub trait Watch<M>: Sync {
    /// Hears that this part (0 to 1) of the time is over, and returns whether to go on. Cases that
    /// were not measured by then are left out.
    fn goes_on(&self, _fraction: f64) -> bool {
        true
    }

    /// Whether to run a case of this `expected` time, with this time `left` for all cases. A case
    /// that is left out ends the measuring.
    fn fits(&self, _expected: Duration, _left: Duration) -> bool {
        true
    }

    /// A case is measured, and so this part (0 to 1) of all.
    fn measured(&mut self, _case: &M, _fraction: f64) {}
}

impl<M> Watch<M> for () {}

impl<M, F: FnMut(&M, f64) + Sync> Watch<M> for F {
    fn measured(&mut self, case: &M, fraction: f64) {
        self(case, fraction);
    }
}

/// Measures `cases` in their order, in about `budget` for all. Each has an equal part of the time
/// that is left. Returns the measured cases, which are all unless the watch ends it early.
///
/// # Errors
/// The error of `measure`.
pub fn each<C, M, E>(
    clock: Clock,
    budget: Duration,
    cases: impl IntoIterator<Item = C, IntoIter: ExactSizeIterator>,
    watch: &mut dyn Watch<M>,
    mut measure: impl FnMut(C, &Turn<'_>) -> Result<M, E>,
) -> Result<Vec<M>, E> {
    let cases = cases.into_iter();
    let (count, end) = (cases.len(), clock.now() + budget);
    let mut found = Vec::with_capacity(count);
    for case in cases {
        let (begin, done) = (clock.now(), found.len());
        let part = Duration::from_nanos(end.since(begin).as_nanos() / (count - done) as u64);
        let is_cut_short = AtomicBool::new(false);
        let goes_on = || {
            let of_case = clock.now().since(begin).as_secs_f64() / part.as_secs_f64().max(f64::MIN_POSITIVE);
            watch.goes_on((done as f64 + of_case.min(1.0)) / count as f64)
        };
        let fits = |expected: Duration| watch.fits(expected, end.since(clock.now()));
        let until = begin + part;
        let turn = Turn { clock, until, goes_on: &goes_on, fits: &fits, is_cut_short: &is_cut_short };
        let measured = measure(case, &turn)?;
        if is_cut_short.into_inner() {
            break;
        }
        watch.measured(&measured, (done + 1) as f64 / count as f64);
        found.push(measured);
    }
    Ok(found)
}

/// The time of one case.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    clock: Clock,
    until: Time,
    goes_on: &'a (dyn Fn() -> bool + Sync),
    fits: &'a (dyn Fn(Duration) -> bool + Sync),
    is_cut_short: &'a AtomicBool,
}

impl Turn<'_> {
    /// A turn of this share of the time, which begins now.
    #[must_use]
    pub fn part(&self, share: f64) -> Self {
        let now = self.clock.now();
        Turn { until: now + Duration::from_secs_f64(self.until.since(now).as_secs_f64() * share), ..*self }
    }

    /// Whether there is time for a case of this expected time.
    pub fn fits(&self, expected: Duration) -> bool {
        (self.fits)(expected)
    }

    /// The case is left out, and with it all after it.
    pub fn leave_out(&self) {
        self.is_cut_short.store(true, Ordering::Relaxed);
    }

    /// Whether one more run than `done` is due. At least `least` and at most `most` runs are, under
    /// any time.
    pub fn wants(&self, done: usize, [least, most]: [usize; 2]) -> bool {
        if !(self.goes_on)() {
            self.is_cut_short.fetch_or(done < least.max(WARM_UP + 1), Ordering::Relaxed);
            return false;
        }
        done < least || done < most && self.clock.now() < self.until
    }

    /// The results of `run`, at least `least` and at most `most`, after the runs to warm up. With a
    /// `least` of 0 there may be time for the first runs alone: see `settled`.
    ///
    /// # Errors
    /// The error of `run`.
    pub fn runs<T: Ord, E>(
        &self,
        [least, most]: [usize; 2],
        mut run: impl FnMut() -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let bounds = [if least == 0 { 1 } else { least + WARM_UP }, most + WARM_UP];
        let mut runs = Vec::new();
        while self.wants(runs.len(), bounds) {
            runs.push(run()?);
        }
        Ok(settled(runs))
    }

    /// Runs a warm case again, with a least and a most number of runs. Returns the results of
    /// `run`.
    ///
    /// # Errors
    /// The error of `run`.
    pub fn again<T, E>(&self, bounds: [usize; 2], mut run: impl FnMut() -> Result<T, E>) -> Result<Vec<T>, E> {
        let mut runs = Vec::new();
        while self.wants(runs.len(), bounds) {
            runs.push(run()?);
        }
        Ok(runs)
    }

    /// The results of two functions that run in turns, so that both meet the same other load of the
    /// machine. Each runs at least `least` and at most `most` times. The first `few` turns may take
    /// twice the time.
    ///
    /// # Errors
    /// The error of either.
    pub fn in_turns<T, E>(
        &self,
        [least, few, most]: [usize; 3],
        mut one: impl FnMut() -> Result<T, E>,
        mut other: impl FnMut() -> Result<T, E>,
    ) -> Result<[Vec<T>; 2], E> {
        let longer = Turn { until: self.until + self.until.since(self.clock.now()), ..*self };
        let mut runs = [Vec::new(), Vec::new()];
        while self.wants(runs[0].len(), [least, most]) || longer.wants(runs[0].len(), [least, few]) {
            runs[0].push(one()?);
            runs[1].push(other()?);
        }
        Ok(runs)
    }
}

/// Runs in their order, without the ones to warm up. If there was no time for more, the shortest of
/// them: a run that takes this long gains little from a warm-up.
fn settled<T: Ord>(mut runs: Vec<T>) -> Vec<T> {
    if runs.len() > WARM_UP {
        runs.drain(..WARM_UP);
        return runs;
    }
    runs.into_iter().min().into_iter().collect()
}

/// Does all at the same time, each on a thread of its own: they begin when there is a thread for
/// each.
///
/// # Errors
/// If there is none, or one of them fails.
pub fn at_once<T: Send, F: FnOnce() -> Result<T, RunError> + Send>(
    tasks: impl Iterator<Item = F>,
) -> Result<Vec<T>, RunError> {
    let failed = |reason: String| RunError::new("profiler", reason);
    let gate = RwLock::new(false);
    std::thread::scope(|scope| {
        let mut is_open = gate.write();
        let spawned = tasks.map(|task| {
            let go = || if *gate.read() { task() } else { Err(failed("it was not begun".to_owned())) };
            std::thread::Builder::new().spawn_scoped(scope, go)
        });
        let threads = spawned.collect::<Result<Vec<_>, _>>();
        *is_open = threads.is_ok();
        drop(is_open);
        let threads = threads.map_err(|error| failed(format!("no thread for a lane: {error}")))?;
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(failed("the engine panicked".to_owned())))
        };
        let ended: Vec<_> = threads.into_iter().map(join).collect();
        ended.into_iter().collect()
    })
}

/// A model to be timed.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// How its batches are made.
    pub codec: &'a BatchCodec,
    /// The length of dimensions that vary.
    pub varying: i64,
    /// The clock that times the runs.
    pub clock: Clock,
}

/// A run of all segments. Of two runs the shorter one is less.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimedRun {
    /// From joining the requests to separating the outputs, by the host's clock.
    pub host: Duration,
    /// The part of that time in which the requests were joined.
    pub joining: Duration,
    /// The time of each segment, by the device's clock if it has one, by the host's otherwise.
    pub segments: Vec<Duration>,
    /// The time of each segment by the host's clock.
    pub segments_on_host: Vec<Duration>,
    /// Whether the segments are by the device's clock.
    pub by_device: bool,
}

impl TimedRun {
    /// The sum of all segments' times. If the device has a clock, the host's work between them is
    /// left out.
    pub fn total(&self) -> Duration {
        if !self.by_device && self.segments.len() == 1 {
            return self.host;
        }
        self.segments.iter().fold(Duration::ZERO, |sum, segment| sum + *segment)
    }
}

impl Subject<'_> {
    /// Times a batch of copies of `item`, of one row each, from joining the requests to separating
    /// the outputs. All segments run at once. Single rows are the most there can be to join and to
    /// separate.
    pub fn run(&self, lane: &mut dyn Lane, item: &Admitted, batch: usize) -> Result<Duration, RunError> {
        Ok(self.run_in_steps(self.model.segments(), lane, item, batch)?.host)
    }

    /// Runs such a batch segment by segment.
    pub fn run_cut(&self, lane: &mut dyn Lane, item: &Admitted, batch: usize) -> Result<TimedRun, RunError> {
        self.run_in_steps(1, lane, item, batch)
    }

    fn run_in_steps(
        &self,
        step: usize,
        lane: &mut dyn Lane,
        item: &Admitted,
        batch: usize,
    ) -> Result<TimedRun, RunError> {
        let refused = |reason| RunError::new("batch codec", reason);
        let count = self.model.segments();
        let (rows, mut segments, mut segments_on_host) = (vec![1; batch], Vec::with_capacity(count), Vec::new());
        let mut by_device = true;
        let begin = self.clock.now();
        let mut state = self.codec.assemble(std::iter::repeat_n(item, batch)).map_err(refused)?;
        let mut start = self.clock.now();
        let joining = start.since(begin);
        for first in (0..count).step_by(step.max(1)) {
            lane.run(first..first + step, &mut state)?;
            let end = self.clock.now();
            let (on_host, on_device) = (end.since(start), lane.last_run().and_then(|span| span.took()));
            by_device &= on_device.is_some();
            segments.push(on_device.unwrap_or(on_host));
            segments_on_host.push(on_host);
            start = end;
        }
        self.codec.separate(state, &rows).map_err(refused)?;
        Ok(TimedRun { host: self.clock.now().since(begin), joining, segments, segments_on_host, by_device })
    }

    /// The largest batch that is timed. Larger ones are extrapolated from the measured ones.
    pub fn largest(&self) -> usize {
        LARGEST_TRIAL / self.codec.item_bytes(self.varying).unwrap_or(usize::MAX).max(1)
    }

    /// The batch sizes among these that are timed.
    pub fn timed(&self, sizes: &[u32]) -> Vec<u32> {
        let largest = self.largest();
        sizes.iter().copied().filter(|size| *size as usize <= largest).collect()
    }

    /// A lane on which the model is timed.
    pub fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, RunError> {
        self.model.lane_at(place).map_err(|error| RunError::new("profiler", error.to_string()))
    }

    /// The item that batches consist of.
    pub fn item(&self) -> Result<Admitted, RunError> {
        self.codec.trial(self.varying).map_err(|reason| RunError::new("batch codec", reason))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Ends the measuring after this many looks.
    struct Ends(AtomicUsize);

    impl Watch<u32> for Ends {
        fn goes_on(&self, fraction: f64) -> bool {
            assert!((0.0..=1.0).contains(&fraction), "{fraction}");
            self.0.fetch_sub(1, Ordering::Relaxed) > 1
        }
    }

    /// The runs of each of three cases, without time for more than the least number. The measuring
    /// ends after `looks` looks.
    fn runs_of_cases(looks: usize) -> Vec<u32> {
        let mut watch = Ends(AtomicUsize::new(looks));
        let measured = each(Clock::start(), Duration::ZERO, [0, 1, 2], &mut watch, |_, turn| {
            let runs = turn.runs([2, 9], || Ok::<_, ()>(0))?;
            Ok::<_, ()>(runs.len() as u32)
        });
        measured.unwrap()
    }

    #[test]
    fn what_was_measured_before_it_was_ended_is_kept() {
        assert_eq!(runs_of_cases(usize::MAX), [2, 2, 2]);
        // A case is looked at before each of its four runs, and behind the last.
        assert_eq!(runs_of_cases(5), [2], "ended as the first has enough");
        assert_eq!(runs_of_cases(9), [2], "ended before the second had enough");
        assert_eq!(runs_of_cases(1), [0; 0]);
    }

    #[test]
    fn where_there_is_no_time_there_are_as_few_runs_as_may_be() {
        let nothing = || Ok::<_, ()>(7);
        let measured = each(Clock::start(), Duration::ZERO, [()], &mut (), |(), turn| {
            Ok::<_, ()>((turn.runs([0, 9], nothing)?, turn.in_turns([3, 5, 9], nothing, nothing)?))
        });
        assert_eq!(measured, Ok(vec![(vec![7], [vec![7; 3], vec![7; 3]])]));
    }

    #[test]
    fn all_begin_at_once_and_one_that_fails_or_panics_fails_them() {
        let both = std::sync::Barrier::new(2);
        let waits = |n| {
            (0..n).map(|n| {
                let both = &both;
                move || {
                    both.wait();
                    Ok(n)
                }
            })
        };
        assert_eq!(at_once(waits(2)).unwrap(), [0, 1]);
        let fails = (0..2).map(|n| move || if n == 0 { Ok(()) } else { Err(RunError::new("x", "no")) });
        assert_eq!(at_once(fails).unwrap_err().reason, "no");
        let panics = (0..2).map(|n| move || if n == 0 { Ok(()) } else { panic!("as it should") });
        assert_eq!(at_once(panics).unwrap_err().reason, "the engine panicked");
    }

    #[test]
    fn runs_in_which_engines_do_more_do_not_count() {
        assert_eq!(settled(vec![90, 400, 30, 31, 29]), [30, 31, 29]);
        assert_eq!(settled(vec![90, 400, 30]), [30]);
        assert_eq!((settled(vec![90, 400]), settled(vec![90])), (vec![90], vec![90]));
    }
}
