//! How long a device has been busy, and for which models.

use downbeat_core::device::{DeviceUse, PartitionId};
use downbeat_core::{Duration, ModelId, Time};
use downbeat_engine::{CoreSet, Part};
use parking_lot::Mutex;

use crate::metrics::DeviceMetrics;

/// Counts the time in which at least one launch runs on a device; one that is divided is busy by as much as the partitions are where one runs.
pub struct Occupancy {
    metrics: DeviceMetrics,
    /// By partition: its part of all their compute units.
    weights: Box<[f64]>,
    /// By partition: its CPUs, where several have some in common.
    cpus: Option<Box<[CoreSet]>>,
    running: Mutex<Running>,
}

struct Running {
    /// By partition: launches that run.
    launches: Box<[u32]>,
    /// By partition: several ran at a time since none did.
    crowded: Box<[bool]>,
    /// By partition: what models have had of it.
    uses: Box<[DeviceUse]>,
    /// Until when the busy time is counted.
    counted: Time,
}

impl Occupancy {
    /// An idle device, divided into `parts` if there are some.
    pub fn new(metrics: DeviceMetrics, parts: &[Part]) -> Self {
        let all: f64 = parts.iter().map(|part| f64::from(part.units)).sum();
        let weights: Box<[f64]> = match parts {
            [] => [1.0].into(),
            parts => parts.iter().map(|part| f64::from(part.units) / all.max(1.0)).collect(),
        };
        let cpus: Option<Box<[CoreSet]>> = parts.iter().map(|part| part.share.cores().copied()).collect();
        let union = |cpus: &[CoreSet]| cpus.iter().fold(CoreSet::default(), |all, cpus| all.with(*cpus)).len();
        let cpus = cpus.filter(|cpus| union(cpus) < cpus.iter().map(CoreSet::len).sum());
        let (launches, crowded) = (vec![0; weights.len()].into(), vec![false; weights.len()].into());
        let uses = weights.iter().map(|_| DeviceUse::default()).collect();
        Occupancy {
            metrics,
            weights,
            cpus,
            running: Mutex::new(Running { launches, crowded, uses, counted: Time::ZERO }),
        }
    }

    /// A launch of a model begins.
    pub fn begin(&self, now: Time, partition: PartitionId, model: ModelId) {
        self.change(now, partition, |running, crowded, used| {
            *running += 1;
            *crowded = *running > 1;
            used.begin(now, model);
        });
    }

    /// It has ended; says whether it surely had the partition for itself.
    pub fn end(&self, now: Time, partition: PartitionId, model: ModelId) -> bool {
        let mut alone = false;
        self.change(now, partition, |running, crowded, used| {
            alone = *running == 1 && !*crowded;
            *running = running.saturating_sub(1);
            used.end(now, model);
        });
        alone
    }

    /// How long a partition has been busy for other models by now.
    pub fn others(&self, now: Time, partition: PartitionId, model: ModelId) -> Duration {
        let mut running = self.running.lock();
        running.uses.get_mut(partition.0 as usize).map_or(Duration::ZERO, |used| used.others(now, model))
    }

    /// A model has gone.
    pub fn forget(&self, model: ModelId) {
        self.running.lock().uses.iter_mut().for_each(|used| used.forget(model));
    }

    /// How much of the device is at work where so many launches run in each partition.
    fn at_work(&self, launches: &[u32]) -> f64 {
        let Some(cpus) = &self.cpus else {
            let at_work = self.weights.iter().zip(launches).filter(|(_, launches)| **launches > 0);
            return at_work.map(|(weight, _)| weight).sum();
        };
        let (mut all, mut at_work) = (CoreSet::default(), CoreSet::default());
        for (cpus, launches) in cpus.iter().zip(launches) {
            all = all.with(*cpus);
            if *launches > 0 {
                at_work = at_work.with(*cpus);
            }
        }
        at_work.len() as f64 / all.len().max(1) as f64
    }

    fn change(&self, now: Time, partition: PartitionId, change: impl FnOnce(&mut u32, &mut bool, &mut DeviceUse)) {
        let mut running = self.running.lock();
        let Running { launches, crowded, uses, counted } = &mut *running;
        let share = self.at_work(launches);
        if share > 0.0 {
            // Counted as it goes: there may always be another that runs.
            self.metrics.busy.inc_by(now.since(*counted).as_secs_f64() * share);
        }
        *counted = now.max(*counted);
        let index = partition.0 as usize;
        if let (Some(launches), Some(crowded), Some(used)) =
            (launches.get_mut(index), crowded.get_mut(index), uses.get_mut(index))
        {
            change(launches, crowded, used);
        }
        self.metrics.running.set(launches.iter().map(|launches| i64::from(*launches)).sum());
    }
}

#[cfg(test)]
mod tests {
    use downbeat_engine::Share;

    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn what_partitions_have_in_common_is_busy_once() {
        let part = |cpus: &str, units| Part {
            share: Share::Cores(cpus.parse().unwrap()),
            threads: 1,
            units,
            size: String::new(),
        };
        let metrics = Metrics::new().unwrap();
        let occupancy = Occupancy::new(metrics.device(0), &[part("0", 1), part("1", 1), part("0-1", 2)]);
        let at_work = |launches: [u32; 3]| occupancy.at_work(&launches);
        assert_eq!([at_work([0; 3]), at_work([2, 0, 0]), at_work([1, 1, 0]), at_work([1, 0, 1])], [0.0, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn a_device_is_busy_by_the_size_of_the_partitions_where_something_runs() {
        let part = |units| Part { share: Share::Whole, threads: 1, units, size: String::new() };
        let metrics = Metrics::new().unwrap();
        let occupancy = Occupancy::new(metrics.device(0), &[part(1), part(3)]);
        let (small, large) = (PartitionId(0), PartitionId(1));
        let at = |ms: u64| Time::from_nanos(ms * 1_000_000);
        let busy_ms = || (metrics.totals().busy.as_secs_f64() * 1e3).round();
        occupancy.begin(at(100), small, ModelId(0));
        occupancy.begin(at(200), large, ModelId(0));
        assert_eq!(busy_ms(), 25.0);
        occupancy.begin(at(300), large, ModelId(0));
        assert!(occupancy.end(at(400), small, ModelId(0)), "what runs in other partitions is not beside it");
        assert_eq!(busy_ms(), 225.0, "all of it for as long as both are at work");
        assert!(!occupancy.end(at(500), large, ModelId(0)));
        assert!(!occupancy.end(at(600), large, ModelId(0)), "one was beside it");
        assert_eq!(busy_ms(), 375.0, "two launches in a partition are no more than one");
        occupancy.begin(at(1_000), small, ModelId(0));
        assert_eq!(busy_ms(), 375.0, "nothing ran");
    }
}
