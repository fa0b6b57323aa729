//! Whether a model version can be relied on: tracks its runs that took too long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use downbeat_core::{Duration, Time};
use parking_lot::Mutex;

/// How long a version is not ready after a run that had to be ended, unless another run succeeds
/// before. The time is limited. A balancer keeps requests away from a model that is not ready, so
/// the model could never show that it is well.
const NOT_READY_FOR: Duration = Duration::from_millis(60_000);

/// The health of a model version's runs. It is ready again after a run that succeeds, and
/// `NOT_READY_FOR` after a run that was ended. If a run could not be ended, the version is out of
/// service until that run is over, or it is loaded again.
pub struct ModelHealth {
    /// The model's name.
    pub name: String,
    /// The version's number.
    pub version: String,
    /// Whether there is trouble: requests read this.
    troubled: AtomicBool,
    trouble: Mutex<Trouble>,
    running: AtomicU32,
}

#[derive(Default)]
struct Trouble {
    /// The last run that was ended: why, and when.
    ended: Option<(String, Time)>,
    /// Runs that go on though they were told to end.
    left_behind: u32,
    /// Why the last of these runs was left behind.
    reason: String,
}

impl ModelHealth {
    /// The health of a version without runs.
    pub fn new(name: String, version: String) -> Self {
        ModelHealth {
            name,
            version,
            troubled: AtomicBool::new(false),
            trouble: Mutex::default(),
            running: AtomicU32::new(0),
        }
    }

    /// Counts a run; dropping the returned guard ends it.
    pub fn begin_run(self: &Arc<Self>) -> RunCount {
        self.running.fetch_add(1, Ordering::AcqRel);
        RunCount(self.clone())
    }

    /// Runs that go on, including runs that were left behind.
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Acquire)
    }

    /// Runs that go on though they were told to end.
    pub fn left_behind(&self) -> u32 {
        self.trouble.lock().left_behind
    }

    /// Records a run that succeeded.
    pub fn succeeded(&self) {
        if self.troubled.load(Ordering::Acquire) {
            let mut trouble = self.trouble.lock();
            trouble.ended = None;
            self.troubled.store(trouble.left_behind > 0, Ordering::Release);
        }
    }

    /// A run is being ended, at `now`, for `reason`.
    pub fn run_ended(&self, reason: String, now: Time) {
        let mut trouble = self.trouble.lock();
        trouble.ended = Some((reason, now));
        self.troubled.store(true, Ordering::Release);
    }

    /// A run that was being ended has ended with its process: the health of the next process is
    /// tracked elsewhere.
    pub fn run_killed(&self) {
        let mut trouble = self.trouble.lock();
        trouble.ended = None;
        self.troubled.store(trouble.left_behind > 0, Ordering::Release);
    }

    /// A run that was told to end goes on, and its clients have been answered.
    pub fn run_left_behind(&self, reason: String) {
        let mut trouble = self.trouble.lock();
        trouble.left_behind += 1;
        trouble.reason = reason;
        self.troubled.store(true, Ordering::Release);
    }

    /// A run that was left behind is over, and its thread and lane are free again.
    pub fn run_came_back(&self) {
        let mut trouble = self.trouble.lock();
        trouble.left_behind = trouble.left_behind.saturating_sub(1);
        self.troubled.store(trouble.left_behind > 0 || trouble.ended.is_some(), Ordering::Release);
    }

    /// Why it answers no requests; `None` if it answers them.
    pub fn refuses(&self) -> Option<String> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        let trouble = self.trouble.lock();
        (trouble.left_behind > 0).then(|| trouble.reason.clone())
    }

    /// Why it is not ready; `None` if it is ready.
    pub fn not_ready(&self, now: Time) -> Option<String> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        let trouble = self.trouble.lock();
        if trouble.left_behind > 0 {
            return Some(trouble.reason.clone());
        }
        trouble.ended.as_ref().filter(|(_, at)| now.since(*at) < NOT_READY_FOR).map(|(reason, _)| reason.clone())
    }
}

/// A guard that counts a run until it is dropped.
pub struct RunCount(Arc<ModelHealth>);

impl Drop for RunCount {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn an_ended_run_is_forgiven_by_a_success_or_a_minute() {
        let health = ModelHealth::new("m".into(), "1".into());
        assert_eq!(health.not_ready(at(0)), None);
        health.run_ended("too long".into(), at(10));
        assert_eq!((health.not_ready(at(69)).as_deref(), health.not_ready(at(70))), (Some("too long"), None));
        assert_eq!(health.refuses(), None, "requests may show that it is well");
        health.succeeded();
        assert_eq!(health.not_ready(at(11)), None);
    }

    #[test]
    fn a_run_that_was_left_behind_keeps_it_out_of_service_until_it_is_over() {
        let health = Arc::new(ModelHealth::new("m".into(), "1".into()));
        let run = health.begin_run();
        health.run_ended("too long".into(), at(10));
        health.run_left_behind("it goes on".into());
        health.succeeded();
        assert_eq!(health.refuses().as_deref(), Some("it goes on"));
        assert_eq!((health.not_ready(at(500)).as_deref(), health.running()), (Some("it goes on"), 1));
        health.run_came_back();
        drop(run);
        assert_eq!((health.refuses(), health.running()), (None, 0));
    }
}
