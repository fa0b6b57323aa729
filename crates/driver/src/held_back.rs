//! The candidates that a shard keeps from the matchmaker until they may be sent.

use downbeat_core::cluster::{Candidate, IndexedHeap};
use downbeat_core::{ModelId, Time};

/// The model timers of a shard (Symphony §3.2).
///
/// A candidate that may not be sent yet cannot get a device, so the matchmaker need not know it. In
/// the paper the rank thread has these timers, and hears of each change. Here the matchmaker hears of
/// a candidate once its timer fires. Until then a growing batch replaces its candidate again and
/// again. The matchmaker hears of the last candidate only.
///
/// In two cases the matchmaker needs the early candidates. It compares a model's candidates for
/// several kinds of devices. It keeps devices for candidates that lent queues must not delay.
#[derive(Default)]
pub struct HeldBack {
    /// By model: when its candidate may be sent.
    timers: IndexedHeap<Time>,
    /// By model: whether the matchmaker has a candidate of the model.
    known: Vec<bool>,
}

impl HeldBack {
    /// Takes the newest candidate of a model. Returns what the matchmaker must be told, if anything.
    pub fn pass(&mut self, now: Time, model: ModelId, newest: Option<Candidate>) -> Option<Option<Candidate>> {
        let index = model.0 as usize;
        if self.known.len() <= index {
            self.known.resize(index + 1, false);
        }
        let early = newest.map(|newest| newest.exec - newest.delay).filter(|send| *send > now);
        match early {
            Some(send) => self.timers.set(model.0, send),
            None => drop(self.timers.remove(model.0)),
        }
        let told = newest.filter(|_| early.is_none());
        let knew = std::mem::replace(&mut self.known[index], told.is_some());
        (knew || told.is_some()).then_some(told)
    }

    /// The model whose candidate may be sent by `now`, if any. Its timer is gone.
    pub fn pop_due(&mut self, now: Time) -> Option<ModelId> {
        self.next().filter(|at| *at <= now)?;
        self.timers.pop().map(|(_, model)| ModelId(model))
    }

    /// When the next candidate may be sent.
    pub fn next(&self) -> Option<Time> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// Forgets a model.
    pub fn forget(&mut self, model: ModelId) {
        self.timers.remove(model.0);
        if let Some(known) = self.known.get_mut(model.0 as usize) {
            *known = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::Duration;

    use super::*;

    fn candidate(size: u32, exec: u64) -> Option<Candidate> {
        let (exec, span) = (Time::from_nanos(exec), Duration::from_nanos(1));
        Some(Candidate { size, exec, latest: Time::MAX, since: Time::ZERO, delay: span, takes: span, pace: span })
    }

    #[test]
    fn the_matchmaker_hears_of_a_candidate_once_it_may_be_sent() {
        let (mut held, model, at) = (HeldBack::default(), ModelId(3), Time::from_nanos);
        // A batch that grows may be sent ever earlier.
        for (size, exec) in [(1, 90), (2, 80), (3, 70)] {
            assert_eq!(held.pass(at(10), model, candidate(size, exec)), None);
        }
        assert_eq!((held.next(), held.pop_due(at(68))), (Some(at(69)), None));
        assert_eq!((held.pop_due(at(69)), held.pop_due(at(69))), (Some(model), None));
        let told = held.pass(at(69), model, candidate(3, 70));
        assert_eq!(told, Some(candidate(3, 70)));
        // The candidate grows while it waits for a device. Once its batch has left, it is taken back.
        assert_eq!(held.pass(at(75), model, candidate(4, 60)), Some(candidate(4, 60)));
        assert_eq!(held.pass(at(75), model, candidate(1, 99)), Some(None));
        assert_eq!(held.pass(at(75), model, None), None);
        assert_eq!(held.next(), None);
        assert_eq!(held.pass(at(75), model, candidate(1, 99)), None);
        held.forget(model);
        assert_eq!(held.next(), None);
    }
}
