//! What messages to and from backends take, as models are planned with it (Symphony §4.3, appendix D).

use std::collections::BTreeSet;

use super::message::Delays;
use crate::cluster::NetworkBudget;
use crate::ids::DeviceKind;
use crate::time::Duration;

/// How much worse than the median of those that may run a batch one of them may be measured: another is slow for a while, and costs itself only.
const WORST_TO_MEDIAN: u64 = 4;

/// What is planned with for a model, by the kind of device that runs its batches.
pub(super) type Budgets = Vec<(DeviceKind, NetworkBudget)>;

/// What is planned with for a model on some backends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelBudget {
    /// Name of the model.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// Names of the backends whose slots this is for.
    pub backends: Vec<String>,
    /// `data` is for an item of this model.
    pub network: NetworkBudget,
}

/// What messages to and from a backend take.
#[derive(Debug)]
pub(super) struct Measured {
    /// Of which kinds its slots are.
    pub kinds: BTreeSet<DeviceKind>,
    /// From the scheduler to it.
    pub there: Duration,
    /// As it says.
    pub delays: Delays,
}

/// For a model that these kinds of devices run, with so many bytes of inputs an item: what the worst backend of a kind has measured, unless that is far from the others of it.
/// A reply may come from any of them. Kinds of which nothing was measured are left out.
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

/// Whether it is not worth planning anew for the difference.
pub(super) fn are_near(some: &Budgets, others: &Budgets) -> bool {
    let is_near = |a: Duration, b: Duration| a.max(b).saturating_sub(a.min(b)).saturating_mul(8) <= a.max(b);
    let near = |((kind, a), (other, b)): (&(DeviceKind, NetworkBudget), &(DeviceKind, NetworkBudget))| {
        kind == other && is_near(a.control, b.control) && is_near(a.data, b.data) && is_near(a.reply, b.reply)
    };
    some.len() == others.len() && some.iter().zip(others).all(near)
}
