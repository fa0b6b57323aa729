//! The batch size control of Clipper's paper, as a baseline.

use crate::time::Duration;

/// Additive increase, multiplicative decrease (Clipper §4.3.1). The limit grows by one after each
/// full batch that kept the SLO, and shrinks by a tenth after each batch that missed it.
#[derive(Clone, Debug)]
pub struct Aimd {
    slo: Duration,
    most: u32,
    limit: u32,
}

impl Aimd {
    /// A control that begins with batches of one. A batch has at most `most` items.
    pub fn new(slo: Duration, most: u32) -> Self {
        Aimd { slo, most: most.max(1), limit: 1 }
    }

    /// The most items of a batch.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Handles the latency of a batch.
    pub fn handle_batch(&mut self, rows: u32, latency: Duration) {
        if latency > self.slo {
            self.limit = (self.limit * 9 / 10).max(1);
        } else if rows >= self.limit {
            self.limit = (self.limit + 1).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipper_section_4_3_1_batches_grow_by_one_and_shrink_by_a_tenth() {
        let mut aimd = Aimd::new(Duration::from_millis(50), 64);
        for batch in 1..=20 {
            assert_eq!(aimd.limit(), batch);
            aimd.handle_batch(batch, Duration::from_millis(u64::from(batch) * 2));
        }
        aimd.handle_batch(3, Duration::from_millis(20));
        assert_eq!(aimd.limit(), 21, "a batch that was not full says nothing of larger ones");
        aimd.handle_batch(21, Duration::from_millis(51));
        assert_eq!(aimd.limit(), 18);
        (0..100).for_each(|_| aimd.handle_batch(1, Duration::from_millis(51)));
        assert_eq!(aimd.limit(), 1);
        (0..100).for_each(|_| aimd.handle_batch(64, Duration::from_millis(1)));
        assert_eq!(aimd.limit(), 64);
    }
}
