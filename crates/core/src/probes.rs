//! When a request is tried although the profile says that it cannot meet its deadline.

use crate::time::{Duration, Time};

/// The first pause between two tries against a guess.
const AFTER_GUESS: Duration = Duration::from_millis(1_000);
/// The first pause between two tries against a measurement, at least and at most. Between, the
/// pause is [`NEEDED`] times as long as the request needs: then tries take a thousandth of the
/// device's time at most.
const AFTER_MEASURED: [Duration; 2] = [Duration::from_millis(1_000), Duration::from_millis(10_000)];
/// See [`AFTER_MEASURED`].
const NEEDED: u64 = 1_000;
/// The longest pause is this many times the first pause.
const LONGEST: u64 = 64;

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
    /// The first pause.
    first: Duration,
    /// The next pause is this many times as long as the first.
    times: u64,
}

impl Pause {
    fn new(until: Option<Time>) -> Self {
        Pause { until, first: Duration::ZERO, times: 1 }
    }

    /// How long the next pause is.
    fn next(&self) -> Duration {
        self.first.saturating_mul(self.times)
    }

    /// Whether the pause is over. If so, the next pause begins, twice as long as the one before.
    fn is_over(&mut self, now: Time, first: Duration) -> bool {
        self.first = first;
        let next = self.next();
        let until = *self.until.get_or_insert(now + next);
        if now < until {
            return false;
        }
        self.until = Some(now + next);
        self.times = (2 * self.times).min(LONGEST);
        true
    }

    /// Begins the pause anew, because the profile was learned at `now`.
    fn restart(&mut self, now: Time) {
        if self.until.is_some() {
            self.until = self.until.max(Some(now + self.next()));
        }
    }
}

/// Decides which requests are tried although a model's profile says that they cannot meet their
/// deadline. Without such tries a wrong profile would stay for ever, as a refused request is never
/// timed.
///
/// - Against a guess the first request is tried at once. The next tries are 1, 2, 4, ... seconds
///   apart, 64 at most.
/// - Against a measurement of 10 ms or more, the first try is 10 seconds after the first refusal,
///   or after the model was last measured. The next tries are 10, 20, 40, ... seconds apart, 640 at
///   most. Against a quicker measurement, all pauses are shorter, the first down to 1 s.
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
        let [least, most] = AFTER_MEASURED;
        match doubt {
            Doubt::Guess => self.guess.is_over(now, AFTER_GUESS),
            Doubt::Measured => self.measured.is_over(now, needed.saturating_mul(NEEDED).clamp(least, most)),
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
        assert_eq!(tried(&mut probes, Doubt::Measured, 5, 60), [15, 25, 45]);
        probes.has_learned(Time::from_nanos(70_000_000_000));
        assert_eq!(tried(&mut probes, Doubt::Measured, 70, 100), [150], "it was fresh");
        // A refusal by a guess is a matter of its own.
        assert_eq!(tried(&mut probes, Doubt::Guess, 170, 1), [170]);
    }

    /// A try of a brief request costs nothing: 1 s, not 10, without answers.
    #[test]
    fn a_measurement_of_a_brief_request_is_tried_sooner() {
        let tried = |us| tried_of(&mut Probes::default(), Doubt::Measured, Duration::from_micros(us), 5, 60);
        assert_eq!((tried(30), tried(2_000)), (vec![6, 7, 9, 13, 21, 37], vec![7, 9, 13, 21, 37]));
    }

    #[test]
    fn a_profile_that_was_wrong_is_tried_again_at_once() {
        let mut probes = Probes::default();
        tried(&mut probes, Doubt::Measured, 0, 500);
        probes.was_wrong();
        assert_eq!(tried(&mut probes, Doubt::Measured, 500, 15), [500, 510]);
    }
}
