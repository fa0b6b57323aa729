//! The demand on the models in service, and the batches that leave early because their models serve
//! steps.

use std::sync::{Arc, Weak};

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_host::request::queue::Queue;
use downbeat_host::scheduler::Driver;

use crate::loaded_version::LoadedVersion;

/// How much the rate of a second counts in the rate of a model.
const NEWEST: f64 = 0.5;

/// The state of the weighing between two calls.
#[derive(Default)]
pub struct Weighing {
    /// The models in service, with the rate of their items.
    rates: Vec<Rate>,
    /// When the rates were taken.
    at: Time,
    /// The models whose batches leave early.
    early: Vec<Weak<LoadedVersion>>,
    pub(super) is_on: bool,
}

struct Rate {
    version: Weak<LoadedVersion>,
    /// Items answered until now.
    items: u64,
    /// Items a second; `None` in the first second.
    rate: Option<f64>,
}

/// A model in service, with the time that a request may spend in it; `None`: any time.
pub(super) struct Cast {
    pub version: Arc<LoadedVersion>,
    pub budget: Option<Duration>,
    pub serves_steps: bool,
    /// The lowest device of its pool: devices that models share, if only by way of other models.
    pub pool: usize,
    /// Seconds of device time a second.
    demand: f64,
}

/// The place of `item` in a list, to which a new one is added.
pub(super) fn index_in(list: &mut Vec<usize>, item: usize) -> usize {
    list.iter().position(|known| *known == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}

/// How a queue is scheduled now. The devices of a pool are taken as alike.
pub(super) fn as_queued(queue: &Queue) -> ModelOptions {
    let profiles = queue.profiles().into_iter().next().map_or_else(|| queue.settings().profiles.clone(), Into::into);
    ModelOptions { profiles, dispatch: queue.dispatch(), shares_limit: None, ..queue.settings().clone() }
}

/// A model without a queue: a device policy makes its batches.
pub(super) fn unqueued(version: &LoadedVersion) -> ModelOptions {
    ModelOptions::new(version.hosts.first().profile.clone(), DispatchPolicy::Eager, DropPolicy::HeadDrop)
}

/// Gives each model the lowest device of its pool.
pub(super) fn find_pools(cast: &mut [Cast], devices: usize) {
    let mut lowest: Vec<usize> = (0..devices).collect();
    // Each round carries the lowest device one model further.
    for _ in 0..cast.len() {
        let before = lowest.clone();
        for model in cast.iter() {
            let least = model.devices().filter_map(|device| lowest.get(device).copied()).min().unwrap_or(0);
            model.devices().for_each(|device| {
                if let Some(of_device) = lowest.get_mut(device) {
                    *of_device = least;
                }
            });
        }
        if lowest == before {
            break;
        }
    }
    for model in cast {
        model.pool = model.devices().filter_map(|device| lowest.get(device).copied()).min().unwrap_or(0);
    }
}

impl Cast {
    pub fn new(version: Arc<LoadedVersion>, budget: Option<Duration>) -> Cast {
        Cast { version, budget, serves_steps: false, pool: 0, demand: 0.0 }
    }

    pub fn is(&self, version: &Weak<LoadedVersion>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.version), version.as_ptr())
    }

    /// The numbers of its devices.
    pub fn devices(&self) -> impl Iterator<Item = usize> {
        self.version.hosts.devices().iter().map(|(host, _)| host.device)
    }

    /// Seconds of device time for each item, in batches that take half of the time. The other half is
    /// for waiting.
    fn cost(&self) -> f64 {
        let options = self.version.last_queue().map_or_else(|| unqueued(&self.version), |queue| as_queued(&queue));
        per_item(options.profiles.first(), options.max_batch.max(1), self.budget)
    }
}

fn per_item(profile: &LatencyProfile, most: u32, budget: Option<Duration>) -> f64 {
    let half = budget.map(|budget| Duration::from_nanos(budget.as_nanos() / 2));
    let batch = half.map_or(most, |half| profile.largest_up_to(most, half).max(1));
    profile.latency(batch).as_secs_f64() / f64::from(batch)
}

impl Weighing {
    /// Sets the demand of all models.
    pub(super) fn measure(&mut self, cast: &mut [Cast], now: Time) {
        let passed = now.since(std::mem::replace(&mut self.at, now)).as_secs_f64();
        let former = std::mem::take(&mut self.rates);
        for model in cast {
            let items = model.version.counts().items;
            let before = former.iter().find(|before| model.is(&before.version));
            let rate = before.filter(|_| passed > 0.0).map(|before| {
                let newest = items.saturating_sub(before.items) as f64 / passed;
                before.rate.map_or(newest, |rate| rate + NEWEST * (newest - rate))
            });
            model.demand = rate.unwrap_or(0.0) * model.cost();
            self.rates.push(Rate { version: Arc::downgrade(&model.version), items, rate });
        }
    }

    /// Has batches of models that serve steps leave early, and batches of no others.
    pub(super) fn leave_early(&mut self, driver: &Driver, cast: &[Cast]) {
        let mut early = Vec::new();
        for (model, share) in cast.iter().zip(shares_of_pools(cast)).filter(|(model, _)| model.serves_steps) {
            model.version.queues().iter().for_each(|(_, queue)| driver.leave_early(queue, Some(share)));
            early.push(Arc::downgrade(&model.version));
        }
        std::mem::swap(&mut self.early, &mut early);
        early.retain(|before| !self.early.iter().any(|now| now.ptr_eq(before)));
        end_early(driver, &early);
    }

    /// No model serves steps any more.
    pub(super) fn stop(&mut self, driver: &Driver) {
        end_early(driver, &std::mem::take(&mut self.early));
        self.rates.clear();
    }
}

fn end_early(driver: &Driver, versions: &[Weak<LoadedVersion>]) {
    for version in versions.iter().filter_map(Weak::upgrade) {
        version.queues().iter().for_each(|(_, queue)| driver.leave_early(queue, None));
    }
}

/// By model: its part of the demand on its pool, percent. Without any demand, the models that serve
/// steps have equal parts.
fn shares_of_pools(cast: &[Cast]) -> Vec<u8> {
    let share = |model: &Cast| {
        let of_pool = || cast.iter().filter(|other| other.pool == model.pool);
        let all: f64 = of_pool().map(|other| other.demand).sum();
        let part = match all > 0.0 {
            true => model.demand / all,
            false => 1.0 / of_pool().filter(|other| other.serves_steps).count().max(1) as f64,
        };
        (100.0 * part).round().clamp(1.0, 100.0) as u8
    };
    cast.iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_costs_its_part_of_a_batch_that_leaves_time_to_wait() {
        let profile = LatencyProfile::linear_ms(1.0, 9.0, 64).unwrap();
        let ms = Duration::from_millis;
        assert_eq!(per_item(&profile, 64, Some(ms(40))), 20e-3 / 11.0, "20 ms are a batch of 11");
        assert_eq!(per_item(&profile, 8, Some(ms(40))), 17e-3 / 8.0);
        assert_eq!(per_item(&profile, 64, None), 73e-3 / 64.0);
        assert_eq!(per_item(&profile, 64, Some(ms(1))), 10e-3, "no batch fits: one item");
    }
}
