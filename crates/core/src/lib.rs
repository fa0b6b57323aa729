//! Downbeat's decisions, and the vocabulary they are made in.
//!
//! This crate never reads a clock, never spawns, locks or waits, never opens a file or a
//! socket. Time comes in with each event, decisions go out. Rehearsals draw pseudo-random numbers
//! from a seed that the caller gives.
//! The same code runs in the server and in the simulator.

pub mod cluster;
pub mod device;
pub mod device_profiles;
pub mod file_content;
pub mod ids;
pub mod isotonic;
pub mod journal;
mod names;
pub mod probes;
pub mod profile;
pub mod quantile;
pub mod roles;
pub mod shape_guess;
pub mod tensor;
pub mod time;

pub use device_profiles::DeviceProfiles;
pub use ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
pub use names::UnknownName;
pub use profile::{LatencyProfile, ProfileError, ProfilePoint};
pub use quantile::{median, quantiles};
pub use time::{Duration, Time};
