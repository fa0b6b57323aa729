//! The only clock of the server.

use downbeat_core::Time;

/// Reads the time since it was made, so that `downbeat-core` sees small integers and never an
/// epoch.
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
        let elapsed = std::time::Instant::now().duration_since(self.origin);
        Time::ZERO + elapsed.into()
    }

    /// The instant of the operating system at which this clock reads `time`; `None` for "never".
    pub fn instant(&self, time: Time) -> Option<std::time::Instant> {
        if time == Time::MAX {
            return None;
        }
        self.origin.checked_add(time.since(Time::ZERO).into())
    }

    /// The zero of this clock, as the wall clock says now: nanoseconds since the Unix epoch. For people,
    /// never for computing. 0: the wall clock is before the epoch.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn zero_unix_ns(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let unix = since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0));
        unix.saturating_sub(self.now().as_nanos())
    }

    /// Milliseconds since the Unix epoch: for display to people, never for computing.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn unix_millis() -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}
