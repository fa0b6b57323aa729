//! GSLICE: the share of a device that each model runs on.
//!
//! [`Spatial`] is a state machine. It handles new and removed models, the latency of each batch,
//! and the arrivals in each window of time. It makes three kinds of decisions.
//! [`SpatialOutput::Prepare`] names the lanes of a model and their compute units.
//! [`SpatialOutput::Switch`] changes over to new lanes. [`SpatialOutput::Limit`] sets the largest
//! batch. [`Shares`] turns units into partitions, and keeps models where the user put them. Server and
//! simulator carry its decisions out. Inside a share, any [`DevicePolicy`](super::DevicePolicy) makes the batches.
//! [`DeviceScheduler::handle_move`](super::DeviceScheduler::handle_move) moves a policy from one
//! partition to another. The policy does not notice the move.
//!
//! | file | rule | source |
//! |---|---|---|
//! | [`knee`] | the smallest share with nearly the throughput of the whole | GSLICE §2.1.3 |
//! | [`knee_up_to`] | the knee that a model's share begins with: that of its largest batch | §2.1.3, figure 3 |
//! | [`SelfTuning`] | the share that the residuals of latency and throughput ask for | §3.2.2, algorithm 1 |
//! | [`FairShare`] | the share of each model, from the demands of all | §3.2.3 |
//! | [`Slab`] | batches in proportion to the headroom | §3.3.1 |
//! | [`Aimd`] | the same by Clipper's paper, as a baseline | |
//! | [`Clipper`] | the same by Clipper's code, as a baseline | §4.5 |

mod aimd;
mod average;
mod batch_control;
mod clipper;
mod controller;
mod decision;
mod fair_share;
mod knee;
mod parts;
mod self_tuning;
mod shared_model;
mod shares;
mod slab;
mod worked;

pub use aimd::Aimd;
pub use average::Average;
pub use batch_control::BatchControl;
pub use clipper::Clipper;
pub use controller::Spatial;
pub use decision::{BadShare, ShareReason, SpatialOptions, SpatialOutput, SpatialTimeout};
pub use fair_share::{Claim, FairShare};
pub use knee::{KNEE_TOLERANCE, UNKNOWN_KNEE, knee, knee_up_to};
pub use parts::{SharePart, ShareParts};
pub use self_tuning::{MeasuredWindow, SelfTuning, Tuned};
pub use shared_model::{ShareState, SpatialModel};
pub use shares::{MakeBatchControl, ShareOutput, ShareView, Shares, SharingModel};
pub use slab::{Provision, Slab};
pub use worked::Worked;
