//! Ends a thread's call into an engine, from another thread.
//!
//! A run has no bound of its own: a model may loop for ever. A thread is in one call of an engine
//! at a time. So the watcher of a thread needs only the thread's [`Stop`], and no lanes or
//! sessions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The error of a call that was ended, or that could not begin.
pub const STOPPED: &str = "it was ended before it was done";

thread_local! {
    static HERE: Stop = Stop::default();
}

/// Ends a thread's calls into engines. Clones belong to the same thread.
#[derive(Clone, Default)]
pub struct Stop {
    state: Arc<Mutex<StopState>>,
}

#[derive(Default)]
struct StopState {
    stopped: bool,
    /// The thread's present calls, the innermost last.
    calls: Vec<RunningCall>,
    /// Runs that have begun.
    runs: u64,
}

struct RunningCall {
    interrupt: Option<Arc<dyn Interrupt>>,
    /// Number of the run, if the call is a run.
    run: Option<u64>,
}

/// A way to make an engine end a call.
pub trait Interrupt: Send + Sync {
    /// Ends the call as soon as the engine can; returns at once.
    fn interrupt(&self);

    /// Ends the call at any cost, if the engine has a way. Returns true if the call ends.
    fn kill(&self) -> bool {
        false
    }

    /// A number that changes whenever the call makes progress, if the engine knows.
    fn progress(&self) -> u64 {
        0
    }

    /// Forgets the interrupt once the call is over, so that the next call goes on.
    fn clear(&self) {}
}

impl Stop {
    /// The handle of the calling thread.
    pub fn of_this_thread() -> Stop {
        HERE.with(Stop::clone)
    }

    /// Ends the thread's present call as soon as the engine can; `rten` cannot. New calls fail
    /// until [`Stop::resume`].
    pub fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        // Under the lock, so that the interrupt cannot meet a later call.
        state.calls.iter().filter_map(|call| call.interrupt.as_ref()).for_each(|interrupt| interrupt.interrupt());
    }

    /// Kills the process in which the thread's call goes on, if the call has a process of its own.
    /// Returns true if it has.
    pub fn kill(&self) -> bool {
        self.state().calls.iter().filter_map(|call| call.interrupt.as_ref()).any(|interrupt| interrupt.kill())
    }

    /// Lets the thread go on.
    pub fn resume(&self) {
        self.state().stopped = false;
    }

    /// Whether the thread's present and future calls must end.
    pub fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    /// The number of the thread's present run.
    pub fn run_in_progress(&self) -> Option<u64> {
        self.state().calls.iter().rev().find_map(|call| call.run)
    }

    /// A number that changes whenever the thread's present call makes progress.
    pub fn progress(&self) -> u64 {
        self.state().calls.iter().filter_map(|call| call.interrupt.as_ref()).map(|interrupt| interrupt.progress()).sum()
    }

    fn state(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Begins a run on this thread, which `interrupt` can end. The run is over when the returned value
/// is dropped.
///
/// # Errors
/// [`STOPPED`] if the thread is stopped.
pub fn run(interrupt: Option<Arc<dyn Interrupt>>) -> Result<InCall, String> {
    InCall::begin(interrupt, true)
}

/// The same for any other long call, such as a load.
pub fn load(interrupt: Option<Arc<dyn Interrupt>>) -> Result<InCall, String> {
    InCall::begin(interrupt, false)
}

/// Marks the thread as in a call until it is dropped.
pub struct InCall(Stop);

impl InCall {
    fn begin(interrupt: Option<Arc<dyn Interrupt>>, is_run: bool) -> Result<InCall, String> {
        let stop = Stop::of_this_thread();
        let mut state = stop.state();
        if state.stopped {
            return Err(STOPPED.to_owned());
        }
        state.runs += u64::from(is_run);
        let run = is_run.then_some(state.runs);
        state.calls.push(RunningCall { interrupt, run });
        drop(state);
        Ok(InCall(stop))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(RunningCall { interrupt: Some(interrupt), .. }) = state.calls.pop()
            && state.stopped
        {
            interrupt.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Interrupt for Flag {
        fn interrupt(&self) {
            self.0.store(true, Ordering::SeqCst);
        }

        fn clear(&self) {
            self.0.store(false, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_stop_ends_its_call_and_holds_the_thread_back() {
        let (stop, flag) = (Stop::of_this_thread(), Arc::new(Flag::default()));
        let begin = || run(Some(flag.clone()));
        let call = begin().unwrap();
        assert_eq!(stop.run_in_progress(), Some(1));
        assert!(!flag.0.load(Ordering::SeqCst));
        stop.stop();
        assert!(flag.0.load(Ordering::SeqCst), "the engine is told");
        drop(call);
        assert!(!flag.0.load(Ordering::SeqCst), "the next call is another");
        assert_eq!(stop.run_in_progress(), None);
        assert_eq!(begin().err(), Some(STOPPED.to_owned()));
        stop.resume();
        let _call = begin().unwrap();
        assert_eq!(stop.run_in_progress(), Some(2));
    }
}
