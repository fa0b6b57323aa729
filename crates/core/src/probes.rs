//! When a request is tried although the profile says that it cannot meet its deadline.

use crate::time::{Duration, Time};

/// The first and the longest pause between two tries against a guess.
const GUESS: [Duration; 2] = [Duration::from_millis(1_000), Duration::from_millis(64_000)];
/// The first pause between two tries against a measurement, at least and at most. Between, the
/// pause is twice as long as the request needs. Example: beside 60 busy processes an estimate rose
/// from 200 to 258 ms for a moment, and the SLO was 250 ms. With a first pause of 10 s, the server
/// refused every request for 10 s.
const FIRST: [Duration; 2] = [Duration::from_millis(500), Duration::from_millis(10_000)];
/// The longest pause between two tries against a measurement, at least and at most. Between, the
/// pause is [`NEEDED`] times as long as the request needs.
const LONGEST: [Duration; 2] = [Duration::from_millis(64_000), Duration::from_millis(640_000)];
/// See [`LONGEST`].
const NEEDED: u64 = 64_000;

/// Why a refusal for want of time may be wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    /// The time that the request needs is a guess: nothing of its size was measured.
    Guess,
    /// The time was measured, perhaps in a bad moment.
    Measured,
}

/// The pause until the next try.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pause {
    /// `None`: the pause begins with the first refusal.
    until: Option<Time>,
    /// How long the next pause is.
    next: Duration,
}

impl Pause {
    fn new(until: Option<Time>) -> Self {
        Pause { until, next: Duration::ZERO }
    }

    /// Whether the pause is over. If so, the next pause begins, twice as long as the one before.
    fn is_over(&mut self, now: Time, [first, longest]: [Duration; 2]) -> bool {
        self.next = self.next.clamp(first, longest);
        let until = *self.until.get_or_insert(now + self.next);
        if now < until {
            return false;
        }
        self.until = Some(now + self.next);
        self.next = self.next.saturating_mul(2).min(longest);
        true
    }

    /// Begins the pause anew, because the profile was learned at `now`.
    fn restart(&mut self, now: Time) {
        if self.until.is_some() {
            self.until = self.until.max(Some(now + self.next));
        }
    }
}

/// Decides which requests are tried although a model's profile says that they cannot meet their
/// deadline. Without such tries a wrong profile would stay for ever, as a refused request is never
/// timed.
///
/// - Against a guess the first request is tried at once. The next tries are 1, 2, 4, ... seconds
///   apart, 64 at most.
/// - Against a measurement, the first try is half a second after the first refusal, or after the
///   model was last measured. The next tries are 0.5, 1, 2, ... seconds apart. A request that needs
///   more than 250 ms makes the first pause longer, up to 10 s. The longest pause is 64 to 640 s, so
///   that tries take little of the device's time in the end.
/// - Where a try shows that the profile was wrong, the next request is tried at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Probes {
    guess: Pause,
    measured: Pause,
}

impl Default for Probes {
    fn default() -> Self {
        Probes { guess: Pause::new(Some(Time::ZERO)), measured: Pause::new(None) }
    }
}

impl Probes {
    /// Whether to try a request that would be refused at `now`, for this doubt and this needed
    /// time.
    pub fn tries(&mut self, now: Time, doubt: Doubt, needed: Duration) -> bool {
        let within = |times: u64, [least, most]: [Duration; 2]| needed.saturating_mul(times).clamp(least, most);
        match doubt {
            Doubt::Guess => self.guess.is_over(now, GUESS),
            Doubt::Measured => self.measured.is_over(now, [within(2, FIRST), within(NEEDED, LONGEST)]),
        }
    }

    /// Notes that a try has shown the profile to be wrong: the next request is tried at once.
    pub fn was_wrong(&mut self) {
        *self = Probes { measured: Pause::new(Some(Time::ZERO)), ..Probes::default() };
    }

    /// Notes that the profile was learned anew at `now`.
    pub fn has_learned(&mut self, now: Time) {
        self.measured.restart(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds at which a request is tried. Requests of 20 ms come every half second, for
    /// `seconds` seconds.
    fn tried(probes: &mut Probes, doubt: Doubt, from: u64, seconds: u64) -> Vec<u64> {
        tried_of(probes, doubt, Duration::from_millis(20), from, seconds)
    }

    fn tried_of(probes: &mut Probes, doubt: Doubt, needed: Duration, from: u64, seconds: u64) -> Vec<u64> {
        let halves = (from * 2..(from + seconds) * 2).map(|half| Time::from_nanos(half * 500_000_000));
        halves.filter(|now| probes.tries(*now, doubt, needed)).map(|now| now.as_nanos() / 1_000_000_000).collect()
    }

    #[test]
    fn a_guess_is_tried_at_once_and_then_ever_more_rarely() {
        assert_eq!(tried(&mut Probes::default(), Doubt::Guess, 5, 130), [5, 6, 8, 12, 20, 36, 68, 132]);
        let mut old = Probes::default();
        tried(&mut old, Doubt::Guess, 0, 1000);
        let late = tried(&mut old, Doubt::Guess, 1000, 640);
        assert!(late.windows(2).all(|pair| pair[1] - pair[0] == 64), "{late:?}");
    }

    #[test]
    fn what_was_measured_is_tried_once_it_is_old() {
        let mut probes = Probes::default();
        assert_eq!(tried(&mut probes, Doubt::Measured, 5, 60), [5, 6, 7, 9, 13, 21, 37]);
        probes.has_learned(Time::from_nanos(70_000_000_000));
        assert_eq!(tried(&mut probes, Doubt::Measured, 70, 100), [134], "it was fresh");
        // A refusal by a guess is a matter of its own.
        assert_eq!(tried(&mut probes, Doubt::Guess, 170, 1), [170]);
    }

    /// Tries of a long request are further apart: each takes much of the device's time.
    #[test]
    fn a_long_request_is_tried_less_often() {
        let tried = |ms| tried_of(&mut Probes::default(), Doubt::Measured, Duration::from_millis(ms), 5, 60);
        assert_eq!((tried(2_000), tried(20_000)), (vec![9, 13, 21, 37], vec![15, 25, 45]));
    }

    #[test]
    fn the_longest_pause_depends_on_the_need() {
        let longest = |us| {
            let mut old = Probes::default();
            tried_of(&mut old, Doubt::Measured, Duration::from_micros(us), 0, 5_000);
            let late = tried_of(&mut old, Doubt::Measured, Duration::from_micros(us), 5_000, 2_000);
            late[1] - late[0]
        };
        assert_eq!((longest(30), longest(2_000), longest(20_000)), (64, 128, 640));
    }

    #[test]
    fn a_profile_that_was_wrong_is_tried_again_at_once() {
        let mut probes = Probes::default();
        tried(&mut probes, Doubt::Measured, 0, 500);
        probes.was_wrong();
        assert_eq!(tried(&mut probes, Doubt::Measured, 500, 4), [500, 500, 501, 503]);
    }
}
