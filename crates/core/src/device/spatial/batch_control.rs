//! How large a model's batches may be, and who says so.

use super::aimd::Aimd;
use super::clipper::Clipper;
use super::slab::{Provision, Slab};
use crate::time::Duration;

/// How large batches may be.
#[derive(Clone, Debug)]
pub enum BatchControl {
    /// As large as this: default MPS has 1.
    Fixed(u32),
    /// By the headroom.
    Slab(Slab),
    /// By Clipper's paper.
    Aimd(Aimd),
    /// By Clipper's code.
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

    /// A batch took so long. Gives a signal that the share does not suit, of those who have one.
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

    /// The model has another share.
    pub fn handle_share(&mut self) {
        if let BatchControl::Slab(slab) = self {
            slab.handle_share();
        }
    }
}
