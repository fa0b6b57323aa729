//! The control of a model's largest batch, by one of several rules.

use super::aimd::Aimd;
use super::clipper::Clipper;
use super::slab::{Provision, Slab};
use crate::time::Duration;

/// The rule for the largest batch.
#[derive(Clone, Debug)]
pub enum BatchControl {
    /// The limit never changes: default MPS has 1.
    Fixed(u32),
    /// The limit follows the headroom.
    Slab(Slab),
    /// The limit follows Clipper's paper.
    Aimd(Aimd),
    /// The limit follows Clipper's code.
    Clipper(Clipper),
}

impl BatchControl {
    /// The most items of a batch.
    pub fn limit(&self) -> u32 {
        match self {
            BatchControl::Fixed(limit) => *limit,
            BatchControl::Slab(slab) => slab.limit(),
            BatchControl::Aimd(aimd) => aimd.limit(),
            BatchControl::Clipper(clipper) => clipper.limit(),
        }
    }

    /// Handles the latency of a batch. A rule that judges the share signals if it does not suit.
    pub fn handle_batch(&mut self, rows: u32, latency: Duration) -> Option<Provision> {
        match self {
            BatchControl::Fixed(_) => None,
            BatchControl::Slab(slab) => slab.handle_batch(rows, latency),
            BatchControl::Aimd(aimd) => {
                aimd.handle_batch(rows, latency);
                None
            }
            BatchControl::Clipper(clipper) => {
                clipper.handle_batch(rows, latency);
                None
            }
        }
    }

    /// Handles a change of the model's share.
    pub fn handle_share(&mut self) {
        if let BatchControl::Slab(slab) = self {
            slab.handle_share();
        }
    }
}
