//! What runs on one device: which requests are launched together, in which lane, and when.
//!
//! A device has lanes: in-order streams of launches. A launch runs a range of a model's segments for some requests. A
//! [`DevicePolicy`] is a state machine that decides launches; a driver (the server's threads, or the simulator) carries them out:
//!
//! ```text
//!              handle_request ──▶ ┌──────────────┐ ──▶ Admit: write the input into its slots of the ring
//! handle_input (it is there) ───▶ │ DevicePolicy │ ──▶ Launch: run segments for members on a lane
//! handle_completion (of a launch)▶│              │ ──▶ Reply: this member's outputs are final
//!      handle_cancel, _timeout ─▶ └──────────────┘ ──▶ Drop, Note
//! ```
//!
//! | policy | decides | source |
//! |---|---|---|
//! | [`Windowed`] | nothing but the time: one batch after another, by a window and a largest size | TF-Serving, Triton: the papers' baselines |
//! | [`Elastic`] | how many batches of which sizes run at once, out of an input ring | E²bird |
//! | [`Staged`] | who is in a batch while it runs: new, stretch, split | DVABatch |
//!
//! A policy knows neither tensors nor times other than those that come with events; what its lanes cost is in a [`SegmentProfile`].

mod elastic;
mod input_ring;
mod launch;
mod mix;
mod note;
mod policy;
mod request;
mod request_pool;
mod segment_profile;
mod staged;
mod windowed;

pub use crate::ids::{LaneId, LaunchId};
pub use elastic::{Elastic, ElasticOptions};
pub use input_ring::{InputRing, RingFull, SlotRun};
pub use launch::{DeviceOutput, InputSource, LaneSpec, Launch, SegmentRange};
pub use mix::{BadMix, LaneMix, MixTable};
pub use note::Note;
pub use policy::{DevicePolicy, DeviceTimeout};
pub use request::{DeviceDrop, DeviceReject, DeviceRequest};
pub use request_pool::{PoolStats, RequestPool};
pub use segment_profile::{BadSegmentProfile, SegmentProfile};
pub use staged::{Staged, StagedOptions};
pub use windowed::{Windowed, WindowedOptions};
