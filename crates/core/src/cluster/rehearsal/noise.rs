//! What executions take of what their profiles say.

use crate::time::Duration;

/// Draws what executions take; all follows from the seed.
#[derive(Debug)]
pub(crate) struct Noise {
    mean: f64,
    deviation: f64,
    random: u64,
}

impl Noise {
    /// Of this mean and standard deviation, as shares of what profiles say.
    pub fn new((mean, deviation): (f64, f64), seed: u64) -> Self {
        Noise { mean, deviation, random: seed }
    }

    /// What an execution takes: a sum of four even numbers is near enough to a normal one.
    pub fn took(&mut self, expected: Duration) -> Duration {
        if (self.mean, self.deviation) == (1.0, 0.0) {
            return expected;
        }
        let sum: f64 = (0..4).map(|_| self.even()).sum();
        let factor = self.mean + self.deviation * (sum - 2.0) * 3f64.sqrt();
        Duration::from_secs_f64(expected.as_secs_f64() * factor.max(0.01))
    }

    /// SplitMix64: the next of numbers that are even in 0..1, and follow from the seed.
    fn even(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
