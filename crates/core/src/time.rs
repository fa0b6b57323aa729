//! Instants and durations in integer nanoseconds.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// An instant: nanoseconds since an epoch that the driver chooses (its start) or the simulator (zero).
///
/// Instants of two processes are not comparable: send the remaining budget, a [`Duration`], instead.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(u64);

/// A span of time in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Duration(u64);

impl Time {
    /// The epoch.
    pub const ZERO: Time = Time(0);
    /// Later than every event: "never".
    pub const MAX: Time = Time(u64::MAX);

    /// The instant `ns` nanoseconds after the epoch.
    pub const fn from_nanos(ns: u64) -> Self {
        Time(ns)
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn since(self, earlier: Time) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }
}

impl Duration {
    /// No time.
    pub const ZERO: Duration = Duration(0);
    /// Longer than every span: "unbounded".
    pub const MAX: Duration = Duration(u64::MAX);

    /// A span of `ns` nanoseconds.
    pub const fn from_nanos(ns: u64) -> Self {
        Duration(ns)
    }

    /// A span of `us` microseconds.
    pub const fn from_micros(us: u64) -> Self {
        Duration(us.saturating_mul(1_000))
    }

    /// A span of `ms` milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Duration(ms.saturating_mul(1_000_000))
    }

    /// A span of `ms` milliseconds, rounded to nanoseconds. Negative and NaN give zero.
    pub fn from_millis_f64(ms: f64) -> Self {
        Duration((ms * 1e6).round() as u64)
    }

    /// A span of `s` seconds, rounded to nanoseconds. Negative and NaN give zero.
    pub fn from_secs_f64(s: f64) -> Self {
        Duration((s * 1e9).round() as u64)
    }

    /// Whole nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Milliseconds, for people.
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Seconds, for metrics.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// `self - other`, or zero.
    pub const fn saturating_sub(self, other: Duration) -> Duration {
        Duration(self.0.saturating_sub(other.0))
    }

    /// `self * n`, saturating.
    pub const fn saturating_mul(self, n: u64) -> Duration {
        Duration(self.0.saturating_mul(n))
    }
}

// Arithmetic saturates: `Time::MAX` means "never" and stays so, and an instant before the epoch
// (a deadline shorter than the execution) is the epoch.
impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, d: Duration) -> Time {
        Time(self.0.saturating_add(d.0))
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, d: Duration) {
        *self = *self + d;
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, d: Duration) -> Time {
        if self == Time::MAX { self } else { Time(self.0.saturating_sub(d.0)) }
    }
}

impl Add for Duration {
    type Output = Duration;
    fn add(self, d: Duration) -> Duration {
        Duration(self.0.saturating_add(d.0))
    }
}

impl AddAssign for Duration {
    fn add_assign(&mut self, d: Duration) {
        *self = *self + d;
    }
}

impl From<std::time::Duration> for Duration {
    fn from(d: std::time::Duration) -> Self {
        Duration(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Duration> for std::time::Duration {
    fn from(d: Duration) -> Self {
        std::time::Duration::from_nanos(d.0)
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0;
        match ns {
            0..1_000 => write!(f, "{ns} ns"),
            1_000..1_000_000 => write!(f, "{} us", ns as f64 / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{} ms", ns as f64 / 1e6),
            _ => write!(f, "{} s", ns as f64 / 1e9),
        }
    }
}

impl fmt::Debug for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Time::MAX { f.write_str("never") } else { write!(f, "t={}", Duration(self.0)) }
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn never_stays_never() {
        let day = Duration::from_secs_f64(86_400.0);
        assert_eq!(Time::MAX + day, Time::MAX);
        assert_eq!(Time::MAX - day, Time::MAX, "without a deadline there is no latest start either");
        assert_eq!(Time::ZERO + Duration::MAX, Time::MAX);
        assert_eq!(Duration::MAX + day, Duration::MAX);
        assert_eq!(Duration::MAX.saturating_mul(2), Duration::MAX);
    }

    #[test]
    fn before_the_epoch_is_the_epoch() {
        assert_eq!(Time::from_nanos(5) - Duration::from_nanos(6), Time::ZERO);
        assert_eq!(Time::from_nanos(5).since(Time::from_nanos(6)), Duration::ZERO);
        assert_eq!(Duration::from_nanos(5).saturating_sub(Duration::from_nanos(6)), Duration::ZERO);
    }

    #[test]
    fn floats_that_are_no_durations_give_zero_or_the_longest() {
        for bad in [f64::NAN, -1.0, f64::NEG_INFINITY] {
            assert_eq!(Duration::from_millis_f64(bad), Duration::ZERO);
            assert_eq!(Duration::from_secs_f64(bad), Duration::ZERO);
        }
        assert_eq!(Duration::from_secs_f64(f64::INFINITY), Duration::MAX);
    }

    #[test]
    fn units_agree_and_print_for_people() {
        assert_eq!(Duration::from_millis(2), Duration::from_micros(2_000));
        assert_eq!(Duration::from_millis_f64(0.75), Duration::from_nanos(750_000));
        assert_eq!(Duration::from_millis(u64::MAX), Duration::MAX);
        let printed = [999, 1_500, 2_250_000, 3_000_000_000].map(|ns| Duration::from_nanos(ns).to_string());
        assert_eq!(printed, ["999 ns", "1.5 us", "2.25 ms", "3 s"]);
        assert_eq!((Time::ZERO + Duration::from_millis(1)).to_string(), "t=1 ms");
        assert_eq!(Time::MAX.to_string(), "never");
    }

    #[test]
    fn the_standard_library_s_durations_convert_and_saturate() {
        assert_eq!(Duration::from(std::time::Duration::MAX), Duration::MAX);
        assert_eq!(std::time::Duration::from(Duration::from_millis(3)), std::time::Duration::from_millis(3));
    }

    proptest! {
        #[test]
        fn what_is_added_can_be_taken_away(at in 0..u64::MAX / 2, span in 0..u64::MAX / 2) {
            let (at, span) = (Time::from_nanos(at), Duration::from_nanos(span));
            prop_assert_eq!((at + span) - span, at);
            prop_assert_eq!((at + span).since(at), span);
            prop_assert!(at + span >= at);
        }
    }
}
