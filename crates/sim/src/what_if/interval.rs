//! The interval in which a share of requests probably lies.

use downbeat_core::Duration;
use serde::Serialize;

/// The number of equal parts of the time of a log.
pub(super) const PARTS: usize = 20;
/// Student's t with 19 degrees of freedom: 95% lie between its negative and itself.
const STUDENT: f64 = 2.093;
/// The same of the normal distribution.
const NORMAL: f64 = 1.96;

/// The requests of each part of a log's time.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Spread([Part; PARTS]);

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Part {
    /// The requests with a known outcome.
    requests: u64,
    in_time: u64,
}

/// 95 of 100 logs like this one have a share of requests in time within this interval.
///
/// Requests of one moment share their luck: a burst makes many of them late at once. Therefore the
/// interval comes from the spread of the share between 20 parts of the log. It is at least as wide as
/// Wilson's interval of independent requests, which has a width even if no request was late.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Interval {
    /// The lower end, from 0 to 1.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Spread {
    /// Counts requests that come `after` the log's begin. A log has this `span`.
    pub fn add(&mut self, after: Duration, span: Duration, (requests, in_time): (u64, u64)) {
        let place = u128::from(after.as_nanos()) * PARTS as u128 / u128::from(span.as_nanos().max(1));
        let part = &mut self.0[(place as usize).min(PARTS - 1)];
        part.requests += requests;
        part.in_time += in_time;
    }

    /// The parts with the requests of both.
    pub fn with(mut self, other: &Spread) -> Spread {
        for (sum, part) in self.0.iter_mut().zip(&other.0) {
            sum.requests += part.requests;
            sum.in_time += part.in_time;
        }
        self
    }

    /// The interval of the share of requests in time; `None`: there are no requests.
    pub fn interval(&self) -> Option<Interval> {
        let sum = |of: fn(&Part) -> u64| self.0.iter().map(of).sum::<u64>() as f64;
        let (requests, in_time) = (sum(|part| part.requests), sum(|part| part.in_time));
        if requests == 0.0 {
            return None;
        }
        let share = in_time / requests;
        let off = |part: &Part| (part.in_time as f64 - share * part.requests as f64).powi(2);
        let parts = PARTS as f64;
        let half = STUDENT * (parts / (parts - 1.0) * self.0.iter().map(off).sum::<f64>()).sqrt() / requests;
        let wilson = wilson(share, requests);
        Some(Interval { low: (share - half).min(wilson.low).max(0.0), high: (share + half).max(wilson.high).min(1.0) })
    }
}

/// Wilson's interval of a share of independent requests.
fn wilson(share: f64, requests: f64) -> Interval {
    let square = NORMAL * NORMAL / requests;
    let middle = (share + square / 2.0) / (1.0 + square);
    let half = NORMAL * (share * (1.0 - share) / requests + square / (4.0 * requests)).sqrt() / (1.0 + square);
    Interval { low: middle - half, high: middle + half }
}

impl Interval {
    /// The interval in percent, such as `98.71–99.62%`.
    pub fn percent(&self) -> String {
        format!("{:.2}–{:.2}%", 100.0 * self.low, 100.0 * self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(in_time: impl Fn(u64) -> u64) -> Spread {
        let mut parts = Spread::default();
        let span = Duration::from_millis(2_000);
        (0..20).for_each(|part| parts.add(Duration::from_millis(100 * part), span, (100, in_time(part))));
        parts
    }

    #[test]
    fn even_parts_are_as_sure_as_independent_requests() {
        let even = parts(|_| 99).interval().unwrap();
        // Wilson's interval of 1,980 in 2,000.
        assert!((even.low - 0.98460).abs() < 1e-4 && (even.high - 0.99352).abs() < 1e-4, "{even:?}");
        let all = parts(|_| 100).interval().unwrap();
        assert!((all.low - 0.99808).abs() < 1e-4 && all.high == 1.0, "{all:?}");
        assert_eq!(Spread::default().interval(), None);
    }

    #[test]
    fn one_bad_moment_makes_a_log_unsure() {
        // As many requests in time as with 99 of 100 in each part.
        let bad = parts(|part| if part == 7 { 80 } else { 100 }).interval().unwrap();
        // The share is 0.99, and its standard error the square root of 20 / 19 * (19 * 1 + 19 * 19) by 2,000.
        let half = 2.093 * (20.0 / 19.0 * 380.0_f64).sqrt() / 2_000.0;
        assert!((bad.low - (0.99 - half)).abs() < 1e-9 && bad.high == 1.0, "{bad:?}");
        assert_eq!(bad.percent(), "96.91–100.00%");
    }

    #[test]
    fn requests_after_the_last_part_belong_to_it() {
        let mut late = Spread::default();
        late.add(Duration::from_millis(9_000), Duration::from_millis(1), (3, 2));
        assert_eq!(late.0[PARTS - 1], Part { requests: 3, in_time: 2 });
    }
}
