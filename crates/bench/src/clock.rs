//! The only clock of the load generator.

use downbeat_core::{Duration, Time};
use rustix::time::{ClockId, clock_gettime};

/// Reads the time since its start. Copies share the start, so the threads of one run agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: std::time::Instant,
}

impl Clock {
    /// A clock that reads zero now.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn start() -> Self {
        Clock { origin: std::time::Instant::now() }
    }

    /// The time since the clock was started.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn now(&self) -> Time {
        Time::ZERO + std::time::Instant::now().duration_since(self.origin).into()
    }

    /// Blocks the calling thread until `time`. Only a thread that watches a run may call it, never
    /// one that drives the run.
    #[expect(clippy::disallowed_methods, reason = "nothing else happens on this thread until then")]
    pub fn sleep_until(&self, time: Time) {
        let wait = time.since(self.now());
        if wait > Duration::ZERO {
            std::thread::sleep(wait.into());
        }
    }
}

/// The CPU time, user and system, that the calling thread has used.
pub fn thread_cpu() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::from_nanos(
        u64::try_from(t.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000) + u64::try_from(t.tv_nsec).unwrap_or(0),
    )
}
