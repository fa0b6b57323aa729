//! The pauses of this process: the times in which it stood still although something was due.

use std::collections::VecDeque;

use downbeat_core::time::{Duration, Time};

/// A wake-up that comes later than this shows a pause.
pub(super) const NOTICED: Duration = Duration::from_millis(3);
/// The most pauses that are remembered. The oldest ones go first.
const REMEMBERED: usize = 256;

/// The pauses of this process.
///
/// A process asks to be woken at an instant. If it first runs well after this instant, it stood
/// still: it was stopped, or other processes had the processors. Nobody knows when the pause began.
/// It is taken to begin when the process last did something. All that waited for the process
/// meanwhile waited for the process and not for the network. Therefore silence of peers, the way of
/// a frame, a round trip and a fetch count without the pauses.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnPauses {
    /// When this process last did something.
    awake: Time,
    /// Begin and end of each pause, in order.
    pauses: VecDeque<(Time, Time)>,
}

impl OwnPauses {
    /// Notes that this process runs, and should have run at `due` at the latest. Returns how long
    /// it stood still; zero if it was in time.
    pub fn handle_awake(&mut self, now: Time, due: Time) -> Duration {
        let since = self.awake;
        self.awake = since.max(now);
        if now.since(due) <= NOTICED || now <= since {
            return Duration::ZERO;
        }
        match self.pauses.back_mut().filter(|(_, end)| *end >= since) {
            Some((_, end)) => *end = now,
            None => self.pauses.push_back((since, now)),
        }
        if self.pauses.len() > REMEMBERED {
            self.pauses.pop_front();
        }
        now.since(since)
    }

    /// How long this process stood still between two instants.
    pub fn within(&self, from: Time, to: Time) -> Duration {
        let later = self.pauses.iter().rev().take_while(|(_, end)| *end > from);
        later.fold(Duration::ZERO, |sum, (begin, end)| sum + (*end).min(to).since((*begin).max(from)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_process_that_wakes_late_stood_still_since_it_last_ran() {
        let mut pauses = OwnPauses::default();
        assert_eq!(pauses.handle_awake(ms(10), Time::MAX), Duration::ZERO, "nothing was due");
        assert_eq!(pauses.handle_awake(ms(17), ms(15)), Duration::ZERO, "timers are a little late");
        assert_eq!(pauses.handle_awake(ms(420), ms(20)), Duration::from_millis(403));
        assert_eq!(pauses.within(ms(0), ms(1000)), Duration::from_millis(403));
        assert_eq!(pauses.within(ms(400), ms(1000)), Duration::from_millis(20));
        assert_eq!(pauses.within(ms(420), ms(1000)), Duration::ZERO);
        assert_eq!(pauses.within(ms(0), ms(100)), Duration::from_millis(83));
    }

    /// A process that has just gone on is late for everything until it has done all that was due.
    #[test]
    fn a_backlog_prolongs_the_pause() {
        let mut pauses = OwnPauses::default();
        pauses.handle_awake(ms(10), Time::MAX);
        pauses.handle_awake(ms(420), ms(20));
        pauses.handle_awake(ms(425), ms(20));
        assert_eq!(pauses.pauses.len(), 1);
        assert_eq!(pauses.within(ms(0), ms(1000)), Duration::from_millis(415));
    }

    #[test]
    fn the_oldest_pauses_are_forgotten() {
        let mut pauses = OwnPauses::default();
        for n in 0..1_000 {
            pauses.handle_awake(ms(20 * n), Time::MAX);
            pauses.handle_awake(ms(20 * n + 10), ms(20 * n));
        }
        assert_eq!(pauses.within(Time::ZERO, Time::MAX), Duration::from_millis(10 * REMEMBERED as u64));
    }
}
