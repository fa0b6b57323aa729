//! Update elision: which requests may join a queue without an update of its candidate.

use super::batcher::{Batcher, Formed, Prefix};
use super::dispatch_policy::DispatchPolicy;
use super::messages::Candidate;
use super::rate_meter::RateMeter;
use crate::time::Time;

/// The smallest candidate whose growth is foreseen before the rate of the arrivals is known. A
/// request that came alone may stay alone. Foreseen growth would then cost a wake-up for nothing.
const LEAST_FORESEEN: u32 = 2;
/// Before the rate is known, a candidate is foreseen to double, or to grow to this size: small
/// candidates have time.
const SMALL: u32 = 8;

/// Decides which events need no update of the candidate, or only a cheap update.
///
/// If the candidate was the whole queue, and requests have joined at its end, the candidate has
/// only grown ([`Batcher::grow`]).
///
/// A candidate that cannot grow is not changed by later requests. A deferred candidate that grows
/// may start earlier with every request that joins. This does not matter as long as the start is
/// not before an update that is due anyway. Therefore some growth is foreseen, and
/// [`super::ModelQueue::wake`] is set to when a candidate of that size would start. Then most
/// requests cost no update. A wake-up comes too early only if the growth does not come. The
/// foreseen growth is the largest for which enough requests come by that time, at the rate of the
/// last second.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct UpdateElision {
    /// Items that may still join at the end of the queue.
    items: u32,
    /// The candidate is full: no request that joins after it changes it, also in a later tier.
    full: bool,
    /// The time of `until` came before the foreseen growth. No further growth is foreseen until the
    /// batch has left.
    exhausted: bool,
    /// The last request needs no update.
    pub elided: bool,
    /// The tier that the candidate ends in.
    tier: usize,
    /// When the last request that was not elided joined the candidate at its end.
    joined: Option<Time>,
    /// The prefix in the candidate of the only plan. `None`: the candidate is not the whole queue,
    /// or may not grow.
    whole: Option<Prefix>,
    /// When the foreseen growth could let the candidate start.
    pub until: Option<Time>,
}

impl UpdateElision {
    /// Notes that `size` items join a tier. `at_end`: they join at its end, and have no other
    /// effect.
    pub fn join(&mut self, now: Time, tier: usize, size: u32, at_end: impl FnOnce() -> bool) {
        let UpdateElision { items, tier: last, full, whole, .. } = *self;
        let at_end = (items > 0 || whole.is_some()) && (tier == last || full && tier > last) && at_end();
        self.elided = size <= items && at_end;
        if !full && self.elided {
            self.items -= size;
        }
        self.whole = whole.filter(|_| at_end);
        self.joined = (!self.elided && self.whole.is_some()).then_some(now);
    }

    /// Whether one item needs no update if it joins the end of the first tier and has no other
    /// effect. Then call [`UpdateElision::join_one`].
    #[inline(always)]
    pub fn takes_one(&self) -> bool {
        self.items > 0 && self.tier == 0
    }

    /// [`UpdateElision::join`] of an item for which [`UpdateElision::takes_one`] was true.
    #[inline(always)]
    pub fn join_one(&mut self) {
        self.items -= u32::from(!self.full);
        (self.elided, self.joined) = (true, None);
    }

    /// The prefix of the only plan's candidate, if at `now` requests have only joined at its end.
    pub fn grows(&self, now: Time) -> Option<Prefix> {
        self.whole.filter(|_| self.joined == Some(now))
    }

    /// The prefix of the only plan's candidate, if since its update requests have only joined at
    /// its end.
    pub fn whole(&self) -> Option<Prefix> {
        self.whole
    }

    /// Computes how much the only plan's candidate may grow without an update, by the rate of the
    /// arrivals if there is a meter.
    pub fn foresee(&mut self, now: Time, batcher: &mut Batcher, formed: &Formed, meter: Option<&RateMeter>) {
        let Formed { prefix, candidate, .. } = *formed;
        let Prefix { size, full, last_tier, .. } = prefix;
        // If the foreseen growth had come by `until`, a request would have caused this update
        // before.
        let exhausted = self.exhausted || self.until.is_some_and(|until| until <= now);
        *self = UpdateElision { tier: last_tier, ..UpdateElision::default() };
        if matches!(&batcher.dispatch, DispatchPolicy::Timeout { preferred, .. } if !preferred.is_empty()) {
            // Every request may change which preferred size is filled.
            return;
        }
        if full {
            (self.items, self.full) = (u32::MAX, full);
            return;
        }
        self.exhausted = exhausted;
        self.whole = (u64::from(size) == batcher.queue.weight()).then_some(prefix);
        // A candidate that may start already does not start later when it grows.
        let starts = candidate.exec - candidate.delay;
        if exhausted || self.whole.is_none() || starts <= now {
            return;
        }
        let rate = meter.and_then(RateMeter::rate);
        if rate.is_none() && size < LEAST_FORESEEN {
            return;
        }
        // Items that come by a time.
        let come = |by: Time| rate.map_or(u32::MAX, |rate| (rate * by.since(now).as_secs_f64()) as u32);
        let most = batcher.kinds.plans[0].limit - size - 1;
        let mut items = match rate {
            Some(_) => most.min(come(starts)),
            None => most.min(size.max(SMALL.saturating_sub(size))),
        };
        while items > 0 {
            let grown = Prefix { size: size + items, ..prefix };
            let Candidate { exec, delay, .. } = batcher.window(now, Time::ZERO, 0, grown).candidate;
            let starts = exec - delay;
            if starts > now && come(starts) >= items {
                (self.items, self.until) = (items, Some(starts));
                return;
            }
            items = if rate.is_some() { items * 3 / 4 } else { items / 2 };
        }
    }
}
