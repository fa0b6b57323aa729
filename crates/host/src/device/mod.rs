//! Devices at work: [`downbeat_core::device`] and the scheduler decide, the threads of this module
//! carry the decisions out.
//!
//! All work of a device runs on its lanes, and has one of two sources. The scheduler grants a batch
//! a slot, and the batch runs on that slot's shared lane. A model's device policy gets each request
//! of the model and has lanes of its own. A `Seat` is a lane with its waiting launches. A `Crew` is
//! the threads that run the lanes of one partition:
//!
//! ```text
//! Driver ── batches ──────────────────┐
//!                                     ▼
//! Serving ──▶ Placements ──▶ DeviceHost { lock { policies, RequestTable } } ──▶ Seat, Crew ──▶ a thread ──▶ Engine
//!              (route)            ▲        │ Admit: the inputs are copied into the ring, by whoever holds the decision
//!                                 │        └ Reply, Drop: the client is answered, after the lock
//!                                 └─ completion ◀───────────────────────────────────────────┘
//! ```
//!
//! There is no scheduler thread. A thread with an event takes the lock, hears the decisions, and
//! carries them out after the lock. Events come from a frontend with a request, a lane with a
//! completion, or the alarm.

mod answer_watch;
mod answering;
mod crew;
mod device_host;
mod device_state;
mod exits;
mod history;
mod input_rings;
mod lane;
mod lane_host;
mod lane_setup;
mod launch;
mod moving;
mod occupancy;
mod own_launch;
mod padding;
mod padding_check;
mod placement;
mod placements;
mod preparation;
mod queued_call;
mod request_events;
mod request_table;
mod slot_events;
mod tensors;
#[cfg(test)]
pub(crate) mod test_support;
mod work_meter;

pub use answer_watch::AnswerLooker;
pub use device_host::DeviceHost;
pub use lane_host::OwnLaunch;
pub use lane_setup::{LaneSetup, LanesWanted, PolicyError, check_padding, padding, start, start_granted};
pub use launch::Grant;
pub use occupancy::Occupancy;
pub use own_launch::run_own;
pub use padding::Padding;
pub use placement::{Placement, WarmUpLanes};
pub use placements::Placements;
pub use queued_call::QueuedCall;
pub use request_events::RequestEvents;
pub use request_table::CounterHasher;
pub use slot_events::{Ran, SlotEvents};
