//! Replays recorded requests under device policies with their parameters.

mod candidate;
mod emulated;
mod run;
mod staging_search;

pub use candidate::{Candidate, Replayable, ReplayedModel};
pub use run::{DeviceReplay, ReplayCount};
pub use staging_search::StagingSearch;
