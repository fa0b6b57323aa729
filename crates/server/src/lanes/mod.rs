//! Device policies at work: [`downbeat_core::device`] decides, threads here carry it out.
//!
//! A model whose policy is not `exclusive` is routed: each of its requests goes to the device with the fewest outstanding items, and
//! batches are made there. For each such model version and device there is a `Runtime` (`runtime.rs`):
//!
//! ```text
//! Serving ──▶ LaneGroup ──▶ Runtime { lock { DevicePolicy, Desk } } ──▶ Handoff ──▶ a lane's thread ──▶ Engine
//!              (route)         ▲        │ Admit: the inputs are copied into the ring, by whoever holds the decision
//!                              │        └ Reply, Drop: the client is answered, after the lock
//!                              └─ completion ◀───────────────────────────────────────┘
//! ```
//!
//! There is no scheduler thread: who has an event (a frontend with a request, a lane with a completion, the alarm with an expiry) takes the
//! lock, hears the decisions, and carries them out after it.

mod desk;
mod device_log;
mod exits;
mod group;
mod history;
mod input_rings;
mod lane;
mod metrics;
mod occupancy;
mod padding;
mod padding_check;
mod padding_watch;
mod runtime;
mod setup;
mod tensors;

pub use device_log::{DeviceEvent, DeviceLogHead, DeviceRecord};
pub use group::{LaneGroup, PastLaunches, Timeline};
pub use history::{PastLaunch, REMEMBERED};
pub use metrics::{LaneMetrics, LaneMetricsFamily};
pub use occupancy::Occupancy;
pub use padding::Padding;
pub(crate) use runtime::Runtime;
pub use setup::{Ground, PolicyError, at_once, check_padding, cut, largest_request, padding, start};
