//! GSLICE: on how much of a device each model runs.
//!
//! [`Spatial`] is a state machine as the others. It is told what models come and go, what each batch took and what came in each window of time; it says which
//! model is to have lanes on how many units ([`SpatialOutput::Prepare`]), when it changes over to them ([`SpatialOutput::Switch`]), and how large batches may be
//! ([`SpatialOutput::Limit`]). What makes the batches inside a share is another's: any [`DevicePolicy`](super::DevicePolicy), which
//! [`DeviceScheduler::handle_move`](super::DeviceScheduler::handle_move) brings from one partition to another without its knowledge.
//!
//! | file | rule | source |
//! |---|---|---|
//! | [`knee`] | the smallest share with nearly the throughput of the whole | GSLICE §2.1.3 |
//! | [`SelfTuning`] | the share that the residuals of latency and throughput ask for | §3.2.2, algorithm 1 |
//! | [`FairShare`] | what each gets of what all ask for | §3.2.3 |
//! | [`Slab`] | batches in proportion to the headroom | §3.3.1 |
//! | [`Aimd`] | the same by Clipper's paper, to compare with | |
//! | [`Clipper`] | the same by Clipper's code, to compare with | §4.5 |

mod aimd;
mod average;
mod batch_control;
mod clipper;
mod controller;
mod decision;
mod fair_share;
mod knee;
mod self_tuning;
mod shared_model;
mod slab;

pub use aimd::Aimd;
pub use average::Average;
pub use batch_control::BatchControl;
pub use clipper::Clipper;
pub use controller::Spatial;
pub use decision::{BadShare, ShareReason, SpatialOptions, SpatialOutput, SpatialTimeout};
pub use fair_share::{Claim, FairShare};
pub use knee::{KNEE_TOLERANCE, UNKNOWN_KNEE, knee};
pub use self_tuning::{MeasuredWindow, SelfTuning, Tuned};
pub use shared_model::{ShareState, SpatialModel};
pub use slab::{Provision, Slab};
