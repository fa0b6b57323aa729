//! Decides which requests run together on one device, in which lane, and when.
//!
//! A device is divided into partitions, which have lanes: in-order streams of launches. A launch
//! runs a range of a model's segments for some requests. [`DeviceScheduler`] is the state machine
//! that decides launches for all models on the device. A driver (the server's threads, or the
//! simulator) carries them out. Each model has a [`DevicePolicy`], which is lent the device for its
//! [`Turn`]:
//!
//! ```text
//!  handle_model, handle_layout ──▶ ┌─────────────────┐ ──▶ Admit: write the input into its slots of the ring
//! handle_request, handle_batch ──▶ │ DeviceScheduler │ ──▶ Launch, Group: run segments for members on a lane
//!  handle_input (it is there) ───▶ │   DevicePolicy  │ ──▶ Prepare, Switch, Free: lanes come and go
//! handle_completion (of a launch)▶ │   DevicePolicy  │ ──▶ Reply: this member's outputs are final
//!       handle_cancel, _timeout ─▶ └─────────────────┘ ──▶ Drop, Note
//! ```
//!
//! | policy | decides | source |
//! |---|---|---|
//! | [`Exclusive`] | nothing: it runs the batches that the cluster's scheduler made | Symphony |
//! | [`Windowed`] | nothing but the time: one batch after another; a window collects requests and a largest size | TF-Serving, Triton: the papers' baselines |
//! | [`Elastic`] | how many batches of which sizes run at once, out of an input ring | E²bird |
//! | [`Staged`] | which requests are in a batch while it runs: new, stretch, split | DVABatch |
//! | [`Overlapped`] | nothing: it launches the operators that the arbiter permits | Abacus |
//!
//! [`AutoInputs`] chooses a model's policy by measurements. An [`AutoGuard`] watches the chosen
//! policy. The simulator replays policies on recorded requests.
//!
//! [`spatial`] decides the share of the device that each model runs on (GSLICE), for every policy.
//! [`spatial::Shares`] is the state machine; its driver has models move.
//!
//! A [`DeviceArbiter`] decides for all models of the device together. A scheduler has at most one.
//! [`OverlapArbiter`] decides which operators of which models run side by side ([`overlap`],
//! Abacus). The policies under an arbiter launch only what it permits ([`Turn::permit`]).
//!
//! A policy knows no tensors, and only the times that come with events. The latencies of its lanes
//! are in a [`SegmentProfile`].

mod arbiter;
mod auto;
mod auto_guard;
mod auto_inputs;
mod device_use;
mod elastic;
mod entry;
mod exclusive;
mod input_ring;
mod lanes;
mod launch;
mod mix;
mod note;
mod output;
pub mod overlap;
mod overlap_arbiter;
mod overlapped;
mod policy;
mod request;
mod request_pool;
mod resident;
mod scheduler;
mod segment_profile;
mod settings;
pub mod spatial;
mod staged;
mod staging;
mod table;
mod tuning;
mod turn;
mod windowed;

pub use crate::ids::{LaneId, LaunchId, PartitionId};
pub use arbiter::{ArbiterOutput, DeviceArbiter};
pub use auto::{AutoChoice, MARGIN, Prediction};
pub use auto_guard::{AutoGuard, GuardEnd, GuardOptions, GuardReport, GuardState, GuardWindow};
pub use auto_inputs::{AutoInputs, Overlap, OverlapPoint};
pub use device_use::DeviceUse;
pub use elastic::{Elastic, ElasticOptions};
pub use entry::{ModelSpec, PolicyEntry, PolicyName, PolicyOptions, PolicySettings, Predict};
pub use exclusive::{Exclusive, ExclusiveOptions};
pub use input_ring::{InputRing, RingRun};
pub use launch::{GrantedBatch, InputSource, LaneSpec, Launch, Permit, SegmentRange, Span};
pub use mix::{BadMix, LaneMix, MixTable};
pub use note::Note;
pub use output::DeviceOutput;
pub use overlap::{GroupSettings, GroupStats};
pub use overlap_arbiter::OverlapArbiter;
pub use overlapped::{Overlapped, OverlappedOptions};
pub use policy::DevicePolicy;
pub use request::{DeviceDrop, DeviceReject, DeviceRequest};
pub use request_pool::{PoolStats, RequestPool};
pub use resident::Arbitrated;
pub use scheduler::{BadLayout, BadMove, BadPolicy, DeviceModel, DeviceScheduler, Layout};
pub use segment_profile::{BadSegmentProfile, SegmentProfile};
pub use settings::{
    Cores, Cut, ExitRule, MOST_LANES, PaddedTo, PaddingSettings, PolicyModel, RingNeed, WrittenSettings,
};
pub use staged::{Staged, StagedOptions};
pub use staging::{Joining, Staging, TRIED_PAIRS, TRIED_STAGES};
pub use table::{BadSettings, ChosenPolicy, UnknownPolicy, read_one_of_any};
pub use tuning::{Tried, Tuned, tune};
pub use turn::{DeviceTimeout, Turn};
pub use windowed::{MOST_AHEAD, Windowed, WindowedOptions};
