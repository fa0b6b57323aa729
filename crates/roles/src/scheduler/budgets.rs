//! The network budgets that models are planned with, from measured delays (Symphony §4.3, appendix
//! D).

use std::collections::BTreeSet;

use crate::message::Delays;
use downbeat_core::cluster::NetworkBudget;
use downbeat_core::ids::DeviceKind;
use downbeat_core::time::Duration;

/// A backend's delay counts for at most this many times the median over the backends that may run
/// the batch. A backend that is slow for a while then harms only itself.
const WORST_TO_MEDIAN: u64 = 4;

/// The network budgets of a model on one kind of device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct KindBudget {
    pub kind: DeviceKind,
    /// High percentiles: what batches are planned with.
    pub high: NetworkBudget,
    /// The least that messages take by fresh measurements. Only this budget may refuse a request.
    pub least: NetworkBudget,
}

/// A model's network budgets, by the kind of device that runs its batches.
pub(super) type Budgets = Vec<KindBudget>;

/// The network budgets that a queue is planned with.
pub(super) type Planned = Vec<(DeviceKind, NetworkBudget)>;

/// The shares, in eighths, of the distance from the least to the high budgets that a queue may be
/// planned with.
const SHARES: [u64; 6] = [8, 6, 4, 2, 1, 0];

/// The network budget of a model on some backends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelBudget {
    /// Name of the model.
    pub model: String,
    /// The model's version.
    pub version: u64,
    /// Names of the backends whose slots this budget is for.
    pub backends: Vec<String>,
    /// The budget, with `data` for an item of this model.
    pub network: NetworkBudget,
}

/// The measured delays of messages to and from a backend.
#[derive(Debug)]
pub(super) struct Measured {
    /// The kinds of the backend's slots.
    pub kinds: BTreeSet<DeviceKind>,
    /// The delay from the scheduler to the backend.
    pub there: Duration,
    /// The least fresh such delay.
    pub fresh_there: Duration,
    /// The delays that the backend has measured.
    pub delays: Delays,
}

/// Computes the budgets of a model that `kinds` of devices run, with `item_bytes` of inputs an
/// item. Each high budget is the worst measurement of a backend of the kind, but at most
/// [`WORST_TO_MEDIAN`] times their median. A reply may come from a backend of any kind. The least
/// budget is that of the quickest backend. Kinds without measurements are left out.
pub(super) fn budgets(backends: &[Measured], kinds: &BTreeSet<DeviceKind>, item_bytes: u64) -> Budgets {
    let item_kib = item_bytes.div_ceil(1024);
    let runs = || backends.iter().filter(|backend| !backend.kinds.is_disjoint(kinds));
    let reply = worst(runs().map(|backend| backend.delays.control));
    let least_reply = runs().map(|backend| backend.delays.fresh_control).min().unwrap_or_default();
    let of_kind = |kind: &DeviceKind| {
        let its = || backends.iter().filter(|backend| backend.kinds.contains(kind));
        let control = its().map(|backend| backend.fresh_there + backend.delays.fresh_fetch(item_bytes)).min()?;
        let least = NetworkBudget { control, data: Duration::ZERO, reply: least_reply };
        let control = worst(its().map(|backend| backend.there + backend.delays.fetch));
        let kib = worst(its().map(|backend| Duration::from_nanos(backend.delays.fetch_per_kib)));
        let high = NetworkBudget { control, data: kib.saturating_mul(item_kib), reply };
        Some(KindBudget { kind: *kind, high, least })
    };
    kinds.iter().filter_map(of_kind).collect()
}

/// The least time of messages for a request of `size` items under these budgets.
pub(super) fn cost(planned: &Planned, size: u32) -> Duration {
    let reply = planned.iter().map(|(_, network)| network.reply).max().unwrap_or_default();
    planned.iter().map(|(_, network)| network.delay(size)).min().unwrap_or_default() + reply
}

/// The budgets that a queue is planned with, if its requests have `room` for messages. These are the
/// high budgets if they fit, and otherwise budgets between the high and the least ones.
pub(super) fn fitting(budgets: &Budgets, room: Duration) -> Planned {
    let shares = SHARES.into_iter().map(|share| between(budgets, share));
    let mut fitting = shares.skip_while(|planned| cost(planned, 1) > room);
    fitting.next().unwrap_or_else(|| least(budgets))
}

/// The least budgets.
pub(super) fn least(budgets: &Budgets) -> Planned {
    between(budgets, 0)
}

fn between(budgets: &Budgets, share: u64) -> Planned {
    let part = |least: Duration, high: Duration| {
        let distance = high.saturating_sub(least).as_nanos();
        least.min(high) + Duration::from_nanos((u128::from(distance) * u128::from(share) / 8) as u64)
    };
    let budget = |KindBudget { kind, high, least }: &KindBudget| {
        let control = part(least.control, high.control);
        let (data, reply) = (part(least.data, high.data), part(least.reply, high.reply));
        (*kind, NetworkBudget { control, data, reply })
    };
    budgets.iter().map(budget).collect()
}

fn worst(values: impl Iterator<Item = Duration>) -> Duration {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    let median = values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or_default();
    values.last().copied().unwrap_or_default().min(median.saturating_mul(WORST_TO_MEDIAN))
}

/// Whether two sets of budgets differ too little to plan anew: by at most an eighth of the larger
/// value.
pub(super) fn are_near(some: &Planned, others: &Planned) -> bool {
    let is_near = |a: Duration, b: Duration| a.max(b).saturating_sub(a.min(b)).saturating_mul(8) <= a.max(b);
    let near = |((kind, a), (other, b)): (&(DeviceKind, NetworkBudget), &(DeviceKind, NetworkBudget))| {
        kind == other && is_near(a.control, b.control) && is_near(a.data, b.data) && is_near(a.reply, b.reply)
    };
    some.len() == others.len() && some.iter().zip(others).all(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn network(control: u64, data: u64, reply: u64) -> NetworkBudget {
        NetworkBudget { control: ms(control), data: ms(data), reply: ms(reply) }
    }

    fn measured(there: u64, control: u64, fetch: u64, fresh: [u64; 3]) -> Measured {
        let [fresh_there, fresh_control, fresh_fetch] = fresh.map(ms);
        let delays = Delays {
            control: ms(control),
            fetch: ms(fetch),
            fetch_per_kib: 0,
            fresh_control,
            fresh_fetches: vec![(10, fresh_fetch)],
        };
        Measured { kinds: BTreeSet::from([DeviceKind(0)]), there: ms(there), fresh_there, delays }
    }

    #[test]
    fn the_least_budget_is_the_quickest_backends() {
        let backends = [measured(2, 3, 4, [1, 1, 2]), measured(5, 1, 9, [4, 2, 3])];
        let [budget] = budgets(&backends, &BTreeSet::from([DeviceKind(0)]), 1024)[..] else { panic!() };
        assert_eq!((budget.high, budget.least), (network(14, 0, 3), network(3, 0, 1)));
        let [small] = budgets(&backends, &BTreeSet::from([DeviceKind(0)]), 16)[..] else { panic!() };
        assert_eq!(small.least, network(1, 0, 1), "fetches of 1 KiB tell nothing of smaller ones");
    }

    /// After a stall, the high percentiles need seconds to forget, and fresh samples are quick.
    #[test]
    fn a_queue_is_planned_with_budgets_that_its_requests_have_room_for() {
        let stalled = vec![KindBudget { kind: DeviceKind(0), high: network(400, 0, 400), least: network(2, 0, 0) }];
        let planned = |room| fitting(&stalled, ms(room))[0].1;
        assert_eq!(planned(1_000), network(400, 0, 400));
        assert_eq!(planned(500), network(201, 0, 200));
        assert_eq!(
            planned(125),
            network(51, 0, 50).worse(NetworkBudget { control: Duration::from_micros(51_750), ..network(0, 0, 50) })
        );
        assert_eq!(planned(5), network(2, 0, 0));
        assert_eq!(planned(1), network(2, 0, 0), "fresh samples say that messages take so long");
    }

    #[test]
    fn fresh_samples_above_the_percentile_do_not_raise_it() {
        let odd = vec![KindBudget { kind: DeviceKind(0), high: network(1, 0, 1), least: network(3, 0, 3) }];
        assert_eq!(least(&odd)[0].1, network(1, 0, 1));
    }
}
