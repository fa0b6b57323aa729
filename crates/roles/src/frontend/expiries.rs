//! The instants at which numbered things expire.

use std::collections::BTreeMap;

use downbeat_core::time::{Duration, Time};

/// Things that expire within one of these expire together, at its end.
const STEP: Duration = Duration::from_millis(1);

/// The instants at which numbered things expire, rounded up to a millisecond: none expires early.
/// The caller must recognise numbers of things that are gone.
#[derive(Clone, Debug)]
pub(super) struct Expiries {
    /// Numbers, by the step at whose start they are due.
    steps: BTreeMap<u64, Vec<u64>>,
    count: usize,
}

impl Expiries {
    /// No expiries.
    pub fn new() -> Self {
        Expiries { steps: BTreeMap::new(), count: 0 }
    }

    /// The number of expiries, including things that are gone.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Lets a thing expire at `at`; never at `Time::MAX`.
    pub fn insert(&mut self, at: Time, number: u64) {
        if at < Time::MAX {
            self.steps.entry(at.as_nanos().div_ceil(STEP.as_nanos())).or_default().push(number);
            self.count += 1;
        }
    }

    /// The instant of the next expiries.
    pub fn next(&self) -> Option<Time> {
        self.steps.first_key_value().map(|(step, _)| Time::ZERO + STEP.saturating_mul(*step))
    }

    /// The next group of expired numbers; `None` when no more have expired by `now`.
    pub fn pop(&mut self, now: Time) -> Option<Vec<u64>> {
        if self.next()? > now {
            return None;
        }
        let (_, numbers) = self.steps.pop_first()?;
        self.count -= numbers.len();
        Some(numbers)
    }

    /// Forgets the numbers of things that are gone.
    pub fn retain(&mut self, is_there: impl Fn(u64) -> bool) {
        self.steps.retain(|_, numbers| {
            numbers.retain(|number| is_there(*number));
            numbers.shrink_to_fit();
            !numbers.is_empty()
        });
        self.count = self.steps.values().map(Vec::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_expires_early_and_all_within_a_millisecond() {
        let mut expiries = Expiries::new();
        let at = |us| Time::ZERO + Duration::from_micros(us);
        for (number, us) in [(1, 1_500), (2, 1_000), (3, 9_000), (4, 2_000)] {
            expiries.insert(at(us), number);
        }
        expiries.insert(Time::MAX, 5);
        assert_eq!((expiries.len(), expiries.next()), (4, Some(at(1_000))));
        assert_eq!(expiries.pop(at(999)), None);
        assert_eq!(expiries.pop(at(2_000)), Some(vec![2]));
        assert_eq!(expiries.pop(at(2_000)), Some(vec![1, 4]));
        assert_eq!(expiries.pop(at(2_000)), None);
        expiries.retain(|number| number != 3);
        assert_eq!((expiries.len(), expiries.next()), (0, None));
    }
}
