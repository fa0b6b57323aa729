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

/// A model's network budgets, by the kind of device that runs its batches.
pub(super) type Budgets = Vec<(DeviceKind, NetworkBudget)>;

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
    /// The delays that the backend has measured.
    pub delays: Delays,
}

/// Computes the budgets of a model that `kinds` of devices run, with `item_bytes` of inputs an
/// item. Each budget is the worst measurement of a backend of the kind, but at most
/// [`WORST_TO_MEDIAN`] times their median. A reply may come from a backend of any kind. Kinds
/// without measurements are left out.
pub(super) fn budgets(backends: &[Measured], kinds: &BTreeSet<DeviceKind>, item_bytes: u64) -> Budgets {
    let item_kib = item_bytes.div_ceil(1024);
    let runs = backends.iter().filter(|backend| !backend.kinds.is_disjoint(kinds));
    let reply = worst(runs.map(|backend| backend.delays.control));
    let of_kind = |kind: &DeviceKind| {
        let its = || backends.iter().filter(|backend| backend.kinds.contains(kind));
        its().next()?;
        let control = worst(its().map(|backend| backend.there + backend.delays.fetch));
        let kib = worst(its().map(|backend| Duration::from_nanos(backend.delays.fetch_per_kib)));
        Some((*kind, NetworkBudget { control, data: kib.saturating_mul(item_kib), reply }))
    };
    kinds.iter().filter_map(of_kind).collect()
}

fn worst(values: impl Iterator<Item = Duration>) -> Duration {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    let median = values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or_default();
    values.last().copied().unwrap_or_default().min(median.saturating_mul(WORST_TO_MEDIAN))
}

/// Whether two sets of budgets differ too little to plan anew: by at most an eighth of the larger
/// value.
pub(super) fn are_near(some: &Budgets, others: &Budgets) -> bool {
    let is_near = |a: Duration, b: Duration| a.max(b).saturating_sub(a.min(b)).saturating_mul(8) <= a.max(b);
    let near = |((kind, a), (other, b)): (&(DeviceKind, NetworkBudget), &(DeviceKind, NetworkBudget))| {
        kind == other && is_near(a.control, b.control) && is_near(a.data, b.data) && is_near(a.reply, b.reply)
    };
    some.len() == others.len() && some.iter().zip(others).all(near)
}
