//! How many lines of a kind the log takes: a client must not be able to fill it.

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Write};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use downbeat_core::{Duration, Time};
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use crate::clock::Clock;

/// The table has at most this many kinds of lines. A line of a further kind counts for its wider
/// kinds alone.
const MOST_KINDS: usize = 4096;
/// The fields that name the model or peer of a line.
const SUBJECTS: [&str; 2] = ["model", "peer"];

/// An allowance is `burst` lines at once, and then one line in each time `every`.
#[derive(Clone, Copy)]
struct Allowance {
    burst: u64,
    every: Duration,
}

/// The allowances: of one place in the code, of one model or peer at that place, and of one text
/// of theirs.
const ALLOWANCES: [Allowance; 3] = [
    Allowance { burst: 10_000, every: Duration::from_millis(100) },
    Allowance { burst: 100, every: Duration::from_millis(1_000) },
    Allowance { burst: 10, every: Duration::from_millis(30_000) },
];

/// The state of one kind of line.
#[derive(Default)]
struct Kind {
    /// When its whole burst is available again.
    full_at: Time,
    /// Lines left out since the last one that was written.
    left_out: u64,
}

impl Kind {
    /// When its burst would be there again after one more line, if that is allowed now.
    fn after_one(&self, now: Time, allowance: Allowance) -> Option<Time> {
        let after = self.full_at.max(now) + allowance.every;
        (after.since(now) <= allowance.every.saturating_mul(allowance.burst)).then_some(after)
    }
}

/// The rate limits of the log. Each line counts for three kinds: its place in the code, its model
/// or peer, and its text without digits. The next line of a kind reports how many were left out
/// before it.
pub struct LineLimits {
    clock: Clock,
    /// Drawn at start, so that no client can make two kinds look the same.
    hashes: RandomState,
    kinds: Mutex<BTreeMap<u64, Kind>>,
    /// Lines left out since the start.
    left_out: &'static AtomicU64,
}

impl LineLimits {
    pub fn new(left_out: &'static AtomicU64) -> Self {
        LineLimits { clock: Clock::start(), hashes: RandomState::new(), kinds: Mutex::default(), left_out }
    }

    /// Counts a line. Returns how many lines of its kinds were left out before it; `None`: leave
    /// this one out too.
    ///
    /// Lines of DEBUG and TRACE have no limits: the operator asks for these levels to see
    /// everything.
    pub fn admit(&self, event: &Event<'_>) -> Option<u64> {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return Some(0);
        }
        let place = self.hashes.hash_one(metadata.callsite());
        let mut hashes = Hashes { subject: self.hashes.build_hasher(), text: self.hashes.build_hasher() };
        for hasher in [&mut hashes.subject, &mut hashes.text] {
            hasher.write_u64(place);
        }
        event.record(&mut hashes);
        // The text comes after the subject, so that the two differ if a line has neither.
        hashes.text.write_u8(1);
        let admitted = self.take([place, hashes.subject.finish(), hashes.text.finish()], self.clock.now());
        self.left_out.fetch_add(u64::from(admitted.is_none()), Relaxed);
        admitted
    }

    fn take(&self, keys: [u64; 3], now: Time) -> Option<u64> {
        let mut kinds = self.kinds.lock();
        let mut after = Vec::with_capacity(keys.len());
        for (key, allowance) in keys.into_iter().zip(ALLOWANCES) {
            if kinds.len() >= MOST_KINDS && !kinds.contains_key(&key) {
                kinds.retain(|_, kind| kind.full_at > now);
                if kinds.len() >= MOST_KINDS {
                    continue;
                }
            }
            let kind = kinds.entry(key).or_default();
            let Some(full_at) = kind.after_one(now, allowance) else {
                kind.left_out += 1;
                return None;
            };
            after.push((key, full_at));
        }
        let mut left_out = 0;
        for (key, full_at) in after {
            let kind = kinds.entry(key).or_default();
            kind.full_at = full_at;
            left_out += std::mem::take(&mut kind.left_out);
        }
        Some(left_out)
    }
}

/// Hashes of a line's fields, which tell its kinds apart.
struct Hashes<H> {
    subject: H,
    text: H,
}

impl<H: Hasher> Visit for Hashes<H> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let is_subject = SUBJECTS.contains(&field.name());
        let hasher = if is_subject { &mut self.subject } else { &mut self.text };
        // A hasher takes everything.
        let _ = write!(WithoutDigits(hasher), "{}={value:?}", field.name());
        if is_subject {
            let _ = write!(WithoutDigits(&mut self.text), "{value:?}");
        }
    }
}

/// Numbers differ from one time to the next.
struct WithoutDigits<'a, H>(&'a mut H);

impl<H: Hasher> Write for WithoutDigits<'_, H> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().filter(|byte| !byte.is_ascii_digit()).for_each(|byte| self.0.write_u8(byte));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> LineLimits {
        static LEFT_OUT: AtomicU64 = AtomicU64::new(0);
        LineLimits::new(&LEFT_OUT)
    }

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn the_next_line_of_a_text_says_how_many_were_left_out() {
        let limits = limits();
        let taken: Vec<_> = (0..15).map(|_| limits.take([1, 2, 3], at(0))).collect();
        assert_eq!(taken, [vec![Some(0); 10], vec![None; 5]].concat());
        assert_eq!(limits.take([1, 2, 4], at(0)), Some(0), "another text");
        assert_eq!(limits.take([1, 2, 3], at(29)), None);
        assert_eq!(limits.take([1, 2, 3], at(30)), Some(6));
        assert_eq!(limits.take([1, 2, 3], at(30)), None);
    }

    #[test]
    fn ever_new_texts_and_models_are_limited_too() {
        let limits = limits();
        let passed =
            |keys: &mut dyn Iterator<Item = [u64; 3]>| keys.filter(|keys| limits.take(*keys, at(0)).is_some()).count();
        assert_eq!(passed(&mut (10..50_000).map(|text| [1, 2, text])), 100);
        assert_eq!(passed(&mut (10..50_000).map(|model| [1, model, model + 1_000_000])), 9_900);
        assert!(limits.kinds.lock().len() <= MOST_KINDS + 3);
        assert_eq!(limits.take([4, 5, 6], at(0)), Some(0), "another place is not held up");
        assert!(limits.take([1, 7, 8], at(10)).is_some_and(|left_out| left_out > 40_000));
    }
}
