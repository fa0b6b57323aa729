//! Measuring behind the service gives way to requests: no request waits for more than the run that
//! goes on when the request comes.

use std::time::Duration;

use parking_lot::Mutex;

/// No request may have come for this long before the next run of a measurement.
const QUIET: Duration = Duration::from_millis(5);
/// A measurement waits for requests at most this many times [`QUIET`] in all: 2 s.
const MOST_LOOKS: u32 = 400;

/// The requests of a server, as a measurement sees them.
pub trait Traffic: Send + Sync {
    /// The number of requests so far. `None` while one of them is under way.
    fn quiet(&self) -> Option<u64>;
}

/// The way of one measurement to be behind the requests of a server.
pub struct GivingWay<'a> {
    traffic: &'a dyn Traffic,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The number of requests at the last look, if none was under way.
    seen: Option<u64>,
    looks: u32,
}

impl<'a> GivingWay<'a> {
    /// A measurement that has not waited yet.
    pub fn new(traffic: &'a dyn Traffic) -> Self {
        GivingWay { traffic, state: Mutex::default() }
    }

    /// Called before each run. Waits while requests are under way, and until none has come for a
    /// moment. Returns false once the measurement has waited too long in all: it must be given up.
    #[expect(clippy::disallowed_methods, reason = "the thread of a load, which decides nothing by the clock")]
    pub fn goes_on(&self) -> bool {
        // Other lanes of the same measurement wait here too.
        let mut state = self.state.lock();
        loop {
            if state.looks >= MOST_LOOKS {
                return false;
            }
            let now = self.traffic.quiet();
            let is_quiet = now.is_some() && now == state.seen;
            state.seen = now;
            if is_quiet {
                return true;
            }
            state.looks += 1;
            std::thread::sleep(QUIET);
        }
    }

    /// Whether the requests have kept the measurement waiting too long.
    pub fn is_given_up(&self) -> bool {
        self.state.lock().looks >= MOST_LOOKS
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The results of one look after another. The last one stays.
    struct Looks(Vec<Option<u64>>, AtomicUsize);

    impl Traffic for Looks {
        fn quiet(&self) -> Option<u64> {
            let look = self.1.fetch_add(1, Ordering::Relaxed);
            self.0[look.min(self.0.len() - 1)]
        }
    }

    fn looks(looks: &[Option<u64>]) -> Looks {
        Looks(looks.to_vec(), AtomicUsize::new(0))
    }

    #[test]
    fn a_run_waits_until_no_request_comes_any_more() {
        let traffic = looks(&[None, Some(1), None, Some(2), Some(3), Some(3), Some(3), Some(4)]);
        let way = GivingWay::new(&traffic);
        assert!(way.goes_on());
        assert_eq!(traffic.1.load(Ordering::Relaxed), 6, "the third request was seen twice");
        assert!(way.goes_on());
        assert_eq!(traffic.1.load(Ordering::Relaxed), 7, "no request has come since: no look is repeated");
        assert!(way.goes_on());
        assert_eq!(traffic.1.load(Ordering::Relaxed), 9, "the fourth request has come since");
        assert!(!way.is_given_up());
    }

    #[test]
    fn a_measurement_that_requests_leave_no_time_is_given_up() {
        let traffic = looks(&[None]);
        let way = GivingWay::new(&traffic);
        way.state.lock().looks = MOST_LOOKS - 2;
        assert!(!way.goes_on() && way.is_given_up());
        assert_eq!(traffic.1.load(Ordering::Relaxed), 2);
        assert!(!way.goes_on(), "for good");
    }
}
