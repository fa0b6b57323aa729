//! What a shard's models ask of the devices, where the other shards find it.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::Demand;

/// A shard's demand, for the others. It changes ten times a second, and is read as a mixture of two if it changes at that moment, which
/// the next change puts right.
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
