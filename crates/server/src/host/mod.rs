//! Devices at work: [`downbeat_core::device`] and the scheduler decide, threads here carry it out.
//!
//! There is a [`DeviceHost`] for each device (`device_host.rs`), and whatever runs there runs on its lanes (`lane.rs`), whoever made the batch: the scheduler, which
//! grants a batch a *slot*, a lane for batches of any model, or the policy that the model has on the device, which gets each of its requests and has lanes of its own:
//!
//! ```text
//! Driver ── batches ──────────────────┐
//!                                     ▼
//! Serving ──▶ HostedVersion ──▶ DeviceHost { lock { policies, RequestTable } } ──▶ Seat, Crew ──▶ a thread ──▶ Engine
//!              (route)            ▲        │ Admit: the inputs are copied into the ring, by whoever holds the decision
//!                                 │        └ Reply, Drop: the client is answered, after the lock
//!                                 └─ completion ◀───────────────────────────────────────────┘
//! ```
//!
//! A policy may ask for lanes in another partition while those it has serve: `preparation.rs` makes them on a thread of their own, and the policy switches to them between two launches.
//! The thread of a frontend whose request is launched at once runs the launch itself where that is brief, and the one that has run a segment of a batch runs the next
//! (`own_launch.rs`); lanes have no threads of their own, but each partition has as many as lanes (`crew.rs`).
//!
//! There is no scheduler thread: who has an event (a frontend with a request, a lane with a completion, the alarm with an expiry) takes the
//! lock, hears the decisions, and carries them out after it.

mod answering;
mod crew;
mod device_host;
mod device_state;
mod exits;
mod history;
mod hosted_model;
mod hosted_version;
mod input_rings;
mod lane;
mod lane_setup;
mod launch;
mod metrics;
mod occupancy;
mod own_launch;
mod padding;
mod padding_check;
mod padding_watch;
mod policy_guard;
mod preparation;
mod request_table;
mod tensors;
#[cfg(test)]
mod test_support;

pub use device_host::DeviceHost;
pub use history::{PastLaunch, REMEMBERED};
pub use hosted_model::{HostedModel, WarmUpLanes};
pub use hosted_version::{HostedVersion, PastLaunches, Timeline};
pub use lane_setup::{LaneSetup, LanesWanted, PolicyError, check_padding, padding, start, start_granted};
pub use metrics::{LaneMetrics, LaneMetricsFamily};
pub use own_launch::run_own;
pub use padding::Padding;
pub use policy_guard::PolicyGuard;
