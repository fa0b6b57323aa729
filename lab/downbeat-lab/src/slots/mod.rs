//! Clusters whose devices are cut into slots of several sizes, on which the production scheduler places batches (Symphony over GSLICE's partitions).
//!
//! A [`SlotMix`] is emulated models on devices that are alike. Each slot is a device to the scheduler, and its size a kind of device. How large slots are to be is what
//! [`SlotProblem::choose`] says. A [`Contender`] is that or one of the baselines: whole devices, GSLICE on each device alone, and
//! gpu-lets' greedy. All have the same arrivals, and what batches take comes of what runs beside them on a device.

mod contender;
mod gpu_lets;
mod gslice;
mod layout;
mod mix;
mod share_out;

pub use contender::{BadMix, Contender, Found, Plan, Tried};
pub use layout::{SlotLayout, SlotModel, SlotPlan, SlotProblem};
pub use mix::{MOST_SLOTS, MeasuredMix, MixModel, Networks, SlotMix};
