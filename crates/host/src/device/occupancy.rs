//! How long a device has been busy, and for which models.

use downbeat_core::device::{DeviceUse, PartitionId};
use downbeat_core::{Duration, ModelId, Time};
use downbeat_engine::{CoreSet, Part};
use downbeat_service::metrics::DeviceMetrics;
use parking_lot::Mutex;

/// Counts the time in which at least one launch runs on a device. On a divided device, each busy
/// partition counts with its part of the compute units.
pub struct Occupancy {
    metrics: DeviceMetrics,
    /// By partition: its part of all their compute units.
    weights: Box<[f64]>,
    /// By partition: its CPUs, where several have some in common.
    cpus: Option<Box<[CoreSet]>>,
    /// By partition: the partitions that share compute units with it, and itself.
    beside: Box<[Box<[usize]>]>,
    running: Mutex<Running>,
}

struct Running {
    /// By partition: its launches that run.
    launches: Box<[u32]>,
    /// By partition: the time that each model has had some of its compute units.
    used: Box<[DeviceUse]>,
    /// The busy time is counted up to this instant.
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
        let meet = |a: usize, b: usize| a == b || cpus.as_ref().is_some_and(|cpus| !cpus[a].common(cpus[b]).is_empty());
        let partitions = 0..weights.len();
        let beside = partitions.clone().map(|a| partitions.clone().filter(|b| meet(a, *b)).collect()).collect();
        let used = partitions.map(|_| DeviceUse::default()).collect();
        let launches = vec![0; weights.len()].into();
        let running = Mutex::new(Running { launches, used, counted: Time::ZERO });
        Occupancy { metrics, weights, cpus, beside, running }
    }

    /// A launch of a model begins.
    pub fn begin(&self, now: Time, partition: PartitionId, model: ModelId) {
        let mut running = self.running.lock();
        self.count(&mut running, now, partition, |launches| launches + 1);
        self.reach(&mut running, partition, |used| used.begin(now, model));
    }

    /// A launch of a model ends.
    pub fn end(&self, now: Time, partition: PartitionId, model: ModelId) {
        let mut running = self.running.lock();
        self.count(&mut running, now, partition, |launches| launches.saturating_sub(1));
        self.reach(&mut running, partition, |used| used.end(now, model));
    }

    /// The time in which at least one launch ran on the device, up to the last start or end of a launch.
    pub fn busy_seconds(&self) -> f64 {
        self.metrics.busy.get()
    }

    /// How long a partition, or something of it, has been busy for other models by now.
    pub fn others(&self, now: Time, partition: PartitionId, model: ModelId) -> Duration {
        let mut running = self.running.lock();
        running.used.get_mut(partition.0 as usize).map_or(Duration::ZERO, |used| used.others(now, model))
    }

    /// A model has gone.
    pub fn forget(&self, model: ModelId) {
        self.running.lock().used.iter_mut().for_each(|used| used.forget(model));
    }

    /// The busy part of the device, with this many launches in each partition.
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

    /// Counts the busy time until now, from when on another number of launches runs in a partition.
    fn count(&self, running: &mut Running, now: Time, partition: PartitionId, change: impl FnOnce(u32) -> u32) {
        let share = self.at_work(&running.launches);
        if share > 0.0 {
            // Counted as it goes: there may always be another that runs.
            self.metrics.busy.inc_by(now.since(running.counted).as_secs_f64() * share);
        }
        running.counted = now.max(running.counted);
        if let Some(launches) = running.launches.get_mut(partition.0 as usize) {
            *launches = change(*launches);
        }
        self.metrics.running.set(running.launches.iter().map(|launches| i64::from(*launches)).sum());
    }

    /// Calls `tell` for each partition that shares compute units with `partition`, and for itself.
    fn reach(&self, running: &mut Running, partition: PartitionId, mut tell: impl FnMut(&mut DeviceUse)) {
        for index in self.beside.get(partition.0 as usize).into_iter().flatten() {
            tell(&mut running.used[*index]);
        }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_engine::Share;
    use downbeat_service::metrics::Metrics;

    use super::*;

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
    fn what_runs_in_a_partition_that_has_a_core_in_common_is_beside_it() {
        let part =
            |cpus: &str| Part { share: Share::Cores(cpus.parse().unwrap()), threads: 1, units: 1, size: String::new() };
        let metrics = Metrics::new().unwrap();
        let occupancy = Occupancy::new(metrics.device(0), &[part("0"), part("1"), part("0-1")]);
        let [first, second, both] = [0, 1, 2].map(PartitionId);
        let at = |ms: u64| Time::from_nanos(ms * 1_000_000);
        occupancy.begin(at(100), first, ModelId(0));
        occupancy.begin(at(100), second, ModelId(1));
        occupancy.end(at(200), first, ModelId(0));
        occupancy.begin(at(300), both, ModelId(2));
        occupancy.end(at(400), second, ModelId(1));
        occupancy.end(at(500), both, ModelId(2));
        assert_eq!(
            occupancy.others(at(500), both, ModelId(2)),
            Duration::from_nanos(250_000_000),
            "half of it while both ran"
        );
        assert_eq!(occupancy.others(at(500), first, ModelId(0)), Duration::from_nanos(200_000_000));
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
        occupancy.end(at(400), small, ModelId(0));
        assert_eq!(busy_ms(), 225.0, "all of it for as long as both are at work");
        occupancy.end(at(500), large, ModelId(0));
        occupancy.end(at(600), large, ModelId(0));
        assert_eq!(busy_ms(), 375.0, "two launches in a partition are no more than one");
        occupancy.begin(at(1_000), small, ModelId(0));
        assert_eq!(busy_ms(), 375.0, "nothing ran");
    }
}
