//! Ending what a thread does in an engine, from another thread.
//!
//! A run has no bound of its own: a model may loop for ever. A thread does one thing in an engine at a time, so that whoever watches a thread has
//! its [`Stop`], and needs to know neither lanes nor sessions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a call that was ended, or was not let begin, fails with.
pub const STOPPED: &str = "it was ended before it was done";

thread_local! {
    static HERE: Stop = Stop::default();
}

/// Ends what one thread does in an engine. Clones are of the same thread.
#[derive(Clone, Default)]
pub struct Stop {
    state: Arc<Mutex<StopState>>,
}

#[derive(Default)]
struct StopState {
    stopped: bool,
    /// What the thread is in the middle of, the innermost last.
    calls: Vec<RunningCall>,
    /// Runs that have begun.
    runs: u64,
}

struct RunningCall {
    interrupt: Option<Arc<dyn Interrupt>>,
    /// Number of the run, if it is one.
    run: Option<u64>,
}

/// How an engine is told to end a call.
pub(crate) trait Interrupt: Send + Sync {
    /// Ends the call as soon as the engine can; returns at once.
    fn interrupt(&self);

    /// Ends the call whatever it costs, where that can be: whether it is.
    fn kill(&self) -> bool {
        false
    }

    /// The call is over: the next one is not to be ended.
    fn clear(&self) {}
}

impl Stop {
    /// That of the calling thread.
    pub fn of_this_thread() -> Stop {
        HERE.with(Stop::clone)
    }

    /// Ends what the thread is in the middle of as soon as the engine can, if it can at all (`rten` cannot), and what it begins until [`Stop::resume`].
    pub fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        // Under the lock, so that the call that is meant is not over.
        state.calls.iter().filter_map(|call| call.interrupt.as_ref()).for_each(|interrupt| interrupt.interrupt());
    }

    /// Ends what the thread is in the middle of by ending the process that it goes on in, where it is in one of its own: whether it is.
    pub fn kill(&self) -> bool {
        self.state().calls.iter().filter_map(|call| call.interrupt.as_ref()).any(|interrupt| interrupt.kill())
    }

    /// Lets the thread go on.
    pub fn resume(&self) {
        self.state().stopped = false;
    }

    /// Whether what the thread is in the middle of is to end, and what it begins.
    pub fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    /// The number of the run that the thread is in the middle of.
    pub fn run_in_progress(&self) -> Option<u64> {
        self.state().calls.iter().rev().find_map(|call| call.run)
    }

    fn state(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run on this thread begins, which `interrupt` ends, if anything does. It is over when what this gives is dropped.
///
/// # Errors
/// [`STOPPED`] if the thread is stopped.
pub(crate) fn run(interrupt: Option<Arc<dyn Interrupt>>) -> Result<InCall, String> {
    InCall::begin(interrupt, true)
}

/// The same for anything else that takes long.
pub(crate) fn load(interrupt: Option<Arc<dyn Interrupt>>) -> Result<InCall, String> {
    InCall::begin(interrupt, false)
}

/// A thread is in the middle of something as long as this is there.
pub(crate) struct InCall(Stop);

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
    fn a_stop_ends_the_call_that_is_meant_and_lets_none_begin_until_the_thread_may_go_on() {
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
