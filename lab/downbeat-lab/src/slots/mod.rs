//! Clusters whose devices are cut into slots of several sizes. The production scheduler places
//! batches on the slots (Symphony over GSLICE's partitions).
//!
//! A [`SlotMix`] is emulated models on equal devices. Each slot is a device to the scheduler, and
//! its size a kind of device. [`SlotProblem::choose`] finds the sizes of the slots. A [`Contender`]
//! is this choice or one of the baselines: whole devices, GSLICE on each device alone, and
//! gpu-lets' greedy. All contenders have the same arrivals. A batch's time depends on the batches
//! beside it on the device.

mod contender;
mod gpu_lets;
mod gslice;
mod layout;
mod mix;
mod share_out;

pub use contender::{BadMix, Contender, Found, Plan, Tried};
pub use layout::{SlotLayout, SlotModel, SlotPlan, SlotProblem};
pub use mix::{MOST_SLOTS, MeasuredMix, MixModel, Networks, SlotMix};
