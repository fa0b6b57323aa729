//! Turns of loads that go on side by side: timed work is done one load after another.
//!
//! Loads read files, optimise graphs and warm up lanes side by side. A load that times something
//! should do so alone. It waits until each other load has ended its step, and these loads wait
//! before their next step. All waits of a load together are limited by its patience, so a small
//! model waits for no large one. A load without patience left measures beside the others. Such
//! measurements are repeated later.

use std::collections::BTreeSet;
use std::time::Duration;

use downbeat_engine::Stop;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long a load onto a GPU waits at most for others.
pub const LONGEST_TURN: Duration = Duration::from_secs(60);
/// How often a waiting load checks whether it must end.
const TICK: Duration = Duration::from_millis(50);

/// The turns of all loads of a server.
pub struct LoadTurns {
    state: Mutex<State>,
    changed: Condvar,
    patience: Duration,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Loads that wait for others.
    waiting: usize,
    /// Loads in the middle of something that is not timed.
    at_work: BTreeSet<u64>,
    /// The load that times.
    timing: Option<u64>,
    /// Loads that time still, beside others that had no more patience.
    disturbed: BTreeSet<u64>,
}

/// A load among others, until this object is dropped.
pub struct LoadTurn<'a> {
    turns: &'a LoadTurns,
    id: u64,
    /// How long it may still wait for others.
    patience: Mutex<Duration>,
}

impl LoadTurns {
    /// No load yet. A load waits for others at most `patience` in all.
    pub fn new(patience: Duration) -> Self {
        LoadTurns { state: Mutex::default(), changed: Condvar::new(), patience }
    }

    /// Begins a load, once no other load times.
    pub fn begin(&self) -> LoadTurn<'_> {
        let mut state = self.state.lock();
        let mut patience = self.patience;
        self.wait_while(&mut state, &mut patience, |state| state.timing.is_some());
        // A load that still times has overrun, and is disturbed now.
        let disturbed = state.timing.take();
        state.disturbed.extend(disturbed);
        let id = state.next;
        state.next += 1;
        state.at_work.insert(id);
        LoadTurn { turns: self, id, patience: Mutex::new(patience) }
    }

    /// Waits while `condition` holds and patience is left, unless the thread must end.
    fn wait_while(
        &self,
        state: &mut MutexGuard<'_, State>,
        patience: &mut Duration,
        condition: impl Fn(&State) -> bool,
    ) {
        let stop = Stop::of_this_thread();
        state.waiting += 1;
        while condition(state) && *patience > Duration::ZERO && !stop.is_stopped() {
            let tick = TICK.min(*patience);
            if self.changed.wait_while_for(state, |state| condition(state), tick).timed_out() {
                *patience = patience.saturating_sub(tick);
            }
        }
        state.waiting -= 1;
    }
}

impl LoadTurn<'_> {
    /// Whether any other load waits for its turn.
    pub fn is_waited_for(&self) -> bool {
        self.turns.state.lock().waiting > 0
    }

    /// Does something that is timed, while no other load works. Returns the result, and whether it
    /// was undisturbed.
    pub fn timed<T>(&self, what: impl FnOnce() -> T) -> (T, bool) {
        let LoadTurn { turns, id, .. } = *self;
        let mut state = turns.state.lock();
        if state.timing == Some(id) {
            // The call is nested in timed work of the same load.
            drop(state);
            return (what(), true);
        }
        state.at_work.remove(&id);
        turns.changed.notify_all();
        let is_taken = |state: &State| state.timing.is_some() || !state.at_work.is_empty();
        turns.wait_while(&mut state, &mut self.patience.lock(), is_taken);
        let others = is_taken(&state) || !state.disturbed.is_empty();
        // Later turns do not wait for these loads again.
        state.at_work.clear();
        state.timing = Some(id);
        drop(state);
        let done = what();
        let mut state = turns.state.lock();
        state.disturbed.remove(&id);
        let was_alone = !others && state.timing == Some(id);
        if state.timing == Some(id) {
            state.timing = None;
        }
        // No other load times now: this load goes on first, so that it gets done.
        state.at_work.insert(id);
        drop(state);
        turns.changed.notify_all();
        (done, was_alone)
    }
}

impl Drop for LoadTurn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        state.at_work.remove(&self.id);
        state.disturbed.remove(&self.id);
        if state.timing == Some(self.id) {
            // The timed work ended in a panic.
            state.timing = None;
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, mpsc};

    use super::*;

    #[test]
    fn what_is_timed_is_timed_alone() {
        let turns = LoadTurns::new(LONGEST_TURN);
        let together = Barrier::new(3);
        let (at_work, timing) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let step = || {
            at_work.fetch_add(1, Ordering::SeqCst);
            assert_eq!(timing.load(Ordering::SeqCst), 0, "somebody times");
            at_work.fetch_sub(1, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let turn = turns.begin();
                    // Side by side: each waits for the others.
                    together.wait();
                    for _ in 0..50 {
                        step();
                        let ((), was_alone) = turn.timed(|| {
                            assert_eq!(timing.fetch_add(1, Ordering::SeqCst), 0);
                            assert_eq!(at_work.load(Ordering::SeqCst), 0);
                            assert_eq!(turn.timed(|| 7), (7, true), "in the middle of it");
                            timing.fetch_sub(1, Ordering::SeqCst);
                        });
                        assert!(was_alone);
                    }
                    step();
                });
            }
        });
        assert!(turns.state.lock().at_work.is_empty());
    }

    #[test]
    fn an_endless_load_is_passed_over_and_its_neighbours_are_named() {
        let turns = LoadTurns::new(Duration::from_millis(1));
        let hangs = turns.begin();
        let other = turns.begin();
        assert_eq!(other.timed(|| 1), (1, false));
        assert_eq!(other.timed(|| 2), (2, true), "it is not waited for again");
        // A load begins while another one times without end.
        let ((), was_alone) = hangs.timed(|| drop(turns.begin()));
        assert!(!was_alone);
        drop(hangs);
        assert_eq!(other.timed(|| 3), (3, true));
    }

    #[test]
    fn a_load_that_fails_or_panics_lets_the_others_go_on() {
        let turns = LoadTurns::new(LONGEST_TURN);
        let other = turns.begin();
        let ((), was_alone) = std::thread::scope(|scope| {
            let (begun, wait) = mpsc::channel();
            let turns = &turns;
            let panics = scope.spawn(move || {
                let _turn = turns.begin();
                begun.send(()).unwrap();
                // Quietly: no hook prints it.
                std::panic::resume_unwind(Box::new("it"));
            });
            wait.recv().unwrap();
            let timed = other.timed(|| ());
            assert!(panics.join().is_err());
            timed
        });
        assert!(was_alone);
        drop(other);
        let panics = turns.begin();
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let panics = panics;
            panics.timed(|| std::panic::resume_unwind(Box::new("it")))
        }));
        assert_eq!(turns.state.lock().timing, None);
        drop(turns.begin());
    }

    #[test]
    fn a_load_has_one_patience_for_all_its_turns_and_is_seen_to_wait() {
        let turns = LoadTurns::new(Duration::from_secs(3_600));
        let hangs = turns.begin();
        let patient = turns.begin();
        *patient.patience.lock() = Duration::from_millis(1);
        assert!(!hangs.is_waited_for());
        assert_eq!(patient.timed(|| 1), (1, false));
        assert_eq!(*patient.patience.lock(), Duration::ZERO);
        // With fresh patience, the second turn would wait for an hour.
        turns.state.lock().at_work.insert(hangs.id);
        assert_eq!(patient.timed(|| 2), (2, false));
        drop(patient);
        std::thread::scope(|scope| {
            hangs.timed(|| {
                scope.spawn(|| drop(turns.begin()));
                while !hangs.is_waited_for() {
                    std::thread::yield_now();
                }
            });
        });
        assert!(!hangs.is_waited_for());
    }

    #[test]
    fn a_load_that_is_to_end_does_not_wait() {
        let turns = LoadTurns::new(LONGEST_TURN);
        let _at_work = turns.begin();
        std::thread::scope(|scope| {
            let timed = scope.spawn(|| {
                let turn = turns.begin();
                Stop::of_this_thread().stop();
                turn.timed(|| ()).1
            });
            assert!(!timed.join().unwrap());
        });
    }
}
