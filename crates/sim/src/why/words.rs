//! Times and counts in the words of stories.

use downbeat_core::Duration;

/// A time in milliseconds, for numbers of stories.
pub(super) fn ms(span: Duration) -> f64 {
    span.as_millis_f64()
}

/// A time in milliseconds with three digits.
pub(super) fn told(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 10.0 => format!("{ms:.1} ms"),
        ms if ms >= 0.1 => format!("{ms:.2} ms"),
        ms => format!("{:.0} us", ms * 1e3),
    }
}

/// `1 request`, `2 requests`, `2 batches`.
pub(super) fn many(count: usize, noun: &str) -> String {
    match (count, noun.ends_with("ch")) {
        (1, _) => format!("1 {noun}"),
        (count, true) => format!("{count} {noun}es"),
        (count, false) => format!("{count} {noun}s"),
    }
}
