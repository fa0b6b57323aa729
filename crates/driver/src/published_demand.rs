//! The demand of a shard's models on the devices, published for the other shards.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::Demand;

/// A shard's demand, published for the other shards. The demand changes ten times a second. A
/// reader during a change gets a mixture of two values, which the next change corrects.
#[derive(Default)]
#[repr(align(128))]
pub struct PublishedDemand([AtomicU64; 5]);

impl PublishedDemand {
    pub fn put(&self, demand: Demand) {
        for (number, value) in self.0.iter().zip(demand.to_array()) {
            number.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Demand {
        Demand::from_array(self.0.each_ref().map(|number| f64::from_bits(number.load(Ordering::Relaxed))))
    }
}
