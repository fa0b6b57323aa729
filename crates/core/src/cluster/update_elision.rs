//! Which requests may join a queue without its candidate being worked out anew.

use super::batcher::{Batcher, Formed, Prefix};
use super::dispatch_policy::DispatchPolicy;
use super::messages::Candidate;
use super::rate_meter::RateMeter;
use crate::time::Time;

/// The smallest candidate whose growth is foreseen before the rate of the arrivals is known. A request that came alone may stay alone. Foreseen growth would
/// then cost a wake-up for nothing.
const LEAST_FORESEEN: u32 = 2;
/// Before the rate is known a candidate is foreseen to grow by as much again, or to this size: small ones have time.
const SMALL: u32 = 8;

/// What may happen without an update, or with less than a whole one.
///
/// Where the candidate was the whole queue, and others have joined at its end, it has only grown ([`Batcher::grow`]).
///
/// A candidate that cannot grow is not changed by who comes after it. One that grows and is deferred may start earlier with every request that joins;
/// but as long as that is not before an update that is due anyway, nobody needs to know. So some growth is foreseen and [`super::ModelQueue::wake`]
/// set to when a candidate of that size would start: most requests then cost no update, and a wake-up that comes too early is paid only where
/// the growth does not come. The growth foreseen is the largest for which enough requests come by that time, at the rate of the last second.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct UpdateElision {
    /// Items that may still join at the end of the queue.
    items: u32,
    /// The candidate is full: it is not changed by whatever joins after it, also in a later tier.
    full: bool,
    /// The time of `until` came before the growth did: none is foreseen until the batch has left.
    exhausted: bool,
    /// The last request needs no update.
    pub elided: bool,
    /// The tier that the candidate ends in.
    tier: usize,
    /// When somebody joined it last, at its end, and was not elided.
    joined: Option<Time>,
    /// The prefix in the candidate of the only plan. `None`: the candidate has not the whole queue, or may not grow.
    whole: Option<Prefix>,
    /// When the growth foreseen could let the candidate start.
    pub until: Option<Time>,
}

impl UpdateElision {
    /// So many items come to a tier; `at_end`: to its end, and nothing else follows from them.
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

    /// Whether one item that joins the end of the first tier, and from which nothing else follows, needs no update: then [`UpdateElision::join_one`].
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

    /// What the candidate of the only plan was made of, if nothing has happened at `now` but that others joined at its end.
    pub fn grows(&self, now: Time) -> Option<Prefix> {
        self.whole.filter(|_| self.joined == Some(now))
    }

    /// What the candidate of the only plan was made of, if nothing has happened since but that others joined at its end.
    pub fn whole(&self) -> Option<Prefix> {
        self.whole
    }

    /// How much the candidate of the only plan may grow without an update; by the rate of the arrivals, if there is a meter.
    pub fn foresee(&mut self, now: Time, batcher: &mut Batcher, formed: &Formed, meter: Option<&RateMeter>) {
        let Formed { prefix, candidate, .. } = *formed;
        let Prefix { size, full, last_tier, .. } = prefix;
        // Had the update been due for the growth, it would have come with a request.
        let exhausted = self.exhausted || self.until.is_some_and(|until| until <= now);
        *self = UpdateElision { tier: last_tier, ..UpdateElision::default() };
        if matches!(&batcher.dispatch, DispatchPolicy::Timeout { preferred, .. } if !preferred.is_empty()) {
            // Which preferred size is filled changes with every request.
            return;
        }
        if full {
            (self.items, self.full) = (u32::MAX, full);
            return;
        }
        self.exhausted = exhausted;
        self.whole = (u64::from(size) == batcher.queue.weight()).then_some(prefix);
        // What may start already does not start later when it grows.
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
