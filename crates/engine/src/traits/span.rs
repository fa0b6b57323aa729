//! The times of a launch, by the clock of its device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use downbeat_core::Duration;

/// A launch whose device knows its times.
pub trait Timed: Any + Send + Sync {
    /// The time from the launch's begin to its end; `None` if the launch is not over, or the device
    /// is lost.
    fn took(&self) -> Option<Duration>;

    /// The launch's begin and end, in nanoseconds from the begin of `other`; see
    /// [`Span::from_begin_of`].
    fn times_after(&self, other: &dyn Timed) -> Option<(i64, i64)>;
}

/// The times of a launch, by the device's own clock.
#[derive(Clone)]
pub struct Span(Arc<dyn Timed>);

impl Span {
    /// The span of an enqueued launch.
    pub fn new(launch: Arc<dyn Timed>) -> Span {
        Span(launch)
    }

    /// The time from its begin to its end; `None` if it is not over, or the device is lost.
    pub fn took(&self) -> Option<Duration> {
        self.0.took()
    }

    /// Its begin and its end, in nanoseconds from the begin of `other` on any lane of the same
    /// device; negative if earlier. `None` if one of the launches is not over, or the device is
    /// lost.
    pub fn from_begin_of(&self, other: &Span) -> Option<(i64, i64)> {
        self.0.times_after(&*other.0)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:?})", self.took())
    }
}
