//! Models without a backend, and how long they stay known.

use std::collections::VecDeque;

use downbeat_core::time::{Duration, Time};

/// Models stay known for this many times the silence after which a peer is lost: long enough to
/// restart a backend.
const STAYS_KNOWN: u64 = 10;
/// Models stay known for this many such times, if a connected backend could load them.
const LOADS_WITHIN: u32 = 30;

/// Name and version.
type Key = (String, u64);

/// Models whose last backend was lost without notice, or has left while other backends could load
/// them. The backend may come back, or another with the models. Requests for these models wait
/// until they are given up.
#[derive(Debug)]
pub(super) struct Orphans {
    stays_known: Duration,
    /// In order of time: the instant, the model, and how often its time was extended.
    until: VecDeque<(Time, Key, u32)>,
}

impl Orphans {
    /// No models. `lost_after`: the silence after which a peer is lost.
    pub fn new(lost_after: Duration) -> Self {
        Orphans { stays_known: lost_after.saturating_mul(STAYS_KNOWN), until: VecDeque::new() }
    }

    /// Adds a model that has lost its last backend, unless it is already here.
    pub fn insert(&mut self, now: Time, key: &Key) {
        if self.until.iter().all(|(_, known, _)| known != key) {
            self.until.push_back((now + self.stays_known, key.clone(), 0));
        }
    }

    /// Removes a model that a backend has again, or that is gone.
    pub fn remove(&mut self, key: &Key) {
        self.until.retain(|(_, known, _)| known != key);
    }

    /// When [`Orphans::pop`] next gives a model up.
    pub fn next(&self) -> Time {
        self.until.front().map_or(Time::MAX, |(at, ..)| *at)
    }

    /// The next model that is given up. `may_come`: whether a connected backend could load it.
    pub fn pop(&mut self, now: Time, may_come: impl Fn(&Key) -> bool) -> Option<Key> {
        while let Some((_, key, waited)) = self.until.pop_front_if(|(at, ..)| *at <= now) {
            if waited + 1 >= LOADS_WITHIN || !may_come(&key) {
                return Some(key);
            }
            self.until.push_back((now + self.stays_known, key, waited + 1));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_could_load_is_waited_for_longer_and_not_for_ever() {
        let ms = |ms| Time::ZERO + Duration::from_millis(ms);
        let mut orphans = Orphans::new(Duration::from_millis(1));
        let [loads, gone] = ["loads", "gone"].map(|name| (name.to_owned(), 1));
        orphans.insert(ms(0), &loads);
        orphans.insert(ms(5), &gone);
        orphans.insert(ms(7), &loads);
        let mut given_up = Vec::new();
        let mut now = ms(0);
        while orphans.next() < Time::MAX {
            assert_eq!(orphans.pop(now, |_| true), None, "not before its time");
            now = orphans.next();
            while let Some(key) = orphans.pop(now, |key| *key == loads) {
                given_up.push((now, key));
            }
        }
        assert_eq!(given_up, [(ms(15), gone), (ms(300), loads)]);
    }
}
