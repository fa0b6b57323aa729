//! Replays recorded requests under device policies with their parameters.

mod candidate;
mod emulated;
mod run;

pub use candidate::{Candidate, Replayable, ReplayedModel};
pub use run::{DeviceReplay, ReplayCount};
