//! The devices that run the steps of pipelines, and how busy they were.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::cluster::ModelOptions;
use downbeat_core::{DeviceKind, ModelId, Time};

use super::super::part::Part;

/// The pools of a log's devices. Models of one pool may run on all of its devices.
#[derive(Debug)]
pub struct Pools {
    pub pools: Vec<Pool>,
    /// By model: the index of its pool.
    pub of_model: BTreeMap<ModelId, usize>,
    /// Whether devices of several kinds, or models of different devices, were put together.
    pub is_rough: bool,
}

/// Devices that the same models use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// The kinds of the devices.
    pub kinds: BTreeSet<DeviceKind>,
    /// The number of devices.
    pub devices: u32,
}

/// How busy devices were.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Load {
    /// The mean over the log.
    pub mean: f64,
    /// The busiest second; the mean, if the log is shorter.
    pub peak: f64,
}

impl Pools {
    /// The pools of models with these options, on so many devices of each kind.
    pub fn of(models: &BTreeMap<ModelId, ModelOptions>, devices: &BTreeMap<DeviceKind, u32>) -> Pools {
        let all: BTreeSet<DeviceKind> =
            devices.iter().filter(|(_, count)| **count > 0).map(|(kind, _)| *kind).collect();
        let kinds_of = |options: &ModelOptions| -> BTreeSet<DeviceKind> {
            let own: BTreeSet<DeviceKind> = options.profiles.iter().filter_map(|(kind, _)| kind).collect();
            let there: BTreeSet<DeviceKind> = own.intersection(&all).copied().collect();
            if own.is_empty() || there.is_empty() { all.clone() } else { there }
        };
        let mut pools: Vec<BTreeSet<DeviceKind>> = Vec::new();
        let mut is_rough = false;
        for options in models.values() {
            let mut kinds = kinds_of(options);
            is_rough |= pools.iter().any(|pool| *pool != kinds && !pool.is_disjoint(&kinds));
            // Pools with a common device are one.
            pools.retain(|pool| {
                let is_apart = pool.is_disjoint(&kinds);
                if !is_apart {
                    kinds.extend(pool);
                }
                is_apart
            });
            pools.push(kinds);
        }
        pools.sort();
        let index = |options: &ModelOptions| {
            let kinds = kinds_of(options);
            pools.iter().position(|pool| !pool.is_disjoint(&kinds)).unwrap_or(0)
        };
        let of_model = models.iter().map(|(id, options)| (*id, index(options))).collect();
        let count = |kinds: &BTreeSet<DeviceKind>| kinds.iter().filter_map(|kind| devices.get(kind)).sum();
        is_rough |= pools.iter().any(|kinds| kinds.len() > 1);
        let pools = pools.iter().map(|kinds| Pool { kinds: kinds.clone(), devices: count(kinds) }).collect();
        Pools { pools, of_model, is_rough }
    }
}

/// How busy `slots` places for batches were between two instants. `spans` has the batches.
pub fn load(spans: &[(Time, Time)], slots: u32, (from, to): (Time, Time)) -> Load {
    let within = |from: Time, to: Time| {
        let busy = |(start, end): &(Time, Time)| (*end).min(to).since((*start).max(from)).as_secs_f64();
        let over = f64::from(slots.max(1)) * to.since(from).as_secs_f64().max(1e-9);
        (spans.iter().map(busy).sum::<f64>() / over).min(1.0)
    };
    let mean = within(from, to);
    let seconds = to.since(from).as_secs_f64() as u64;
    let mut busy = vec![0.0f64; usize::try_from(seconds.min(1 << 20)).unwrap_or(0)];
    for (start, end) in spans {
        let first = (*start).max(from).since(from).as_secs_f64() as usize;
        let last = (*end).max(from).since(from).as_secs_f64() as usize;
        for second in first..=last.min(busy.len().saturating_sub(1)) {
            let Some(sum) = busy.get_mut(second) else { break };
            let begins = from + downbeat_core::Duration::from_millis(1_000 * second as u64);
            let ends = begins + downbeat_core::Duration::from_millis(1_000);
            *sum += (*end).min(ends).since((*start).max(begins)).as_secs_f64();
        }
    }
    let peak = busy.iter().map(|busy| (busy / f64::from(slots.max(1))).min(1.0)).fold(mean, f64::max);
    Load { mean, peak }
}

/// The batches of models that these files have, as spans. `end` tells when a batch of a part ended.
pub fn spans(
    parts: &[Part],
    end: impl Fn(&Part, usize) -> Option<Time>,
    of: impl Fn(ModelId) -> bool,
) -> Vec<(Time, Time)> {
    let mut spans = Vec::new();
    for part in parts {
        for (index, batch) in part.batches.iter().enumerate().filter(|(_, batch)| of(batch.model)) {
            spans.push((batch.start, end(part, index).unwrap_or(batch.start)));
        }
    }
    spans
}
