//! What-if: replays the requests of a recorded decision log under other settings.
//!
//! [`Recorded`] is the content of a decision log: models, requests, devices, and the requests'
//! outcome. [`Setting`] holds the changes, and [`Recorded::run`] runs the requests in the
//! simulator. [`advise`] searches the best setting under which the requests meet a target, and writes
//! the lines of `downbeat.toml` for it.
//!
//! [`Served`] is the same of a running server: its queues and devices, for the last requests that it
//! remembers.
//!
//! [`pipelines`] has the requests of pipelines in a log.
//!
//! [`DeviceLog`] is the same content by devices. [`DeviceLog::advise`] compares the device policies
//! that its models may have.

mod advice;
mod candidate;
mod charts;
mod comparison;
mod configuration;
mod device_advice;
mod device_log;
mod device_part;
mod figures;
mod goal;
mod interval;
mod part;
pub mod pipelines;
mod recorded;
mod sample;
mod search;
mod sentences;
mod served;
mod setting;

pub use advice::{Advice, Checked, NoAdvice, RateLine, Wanted, advise};
pub use candidate::Candidate;
pub use comparison::{Comparison, Row};
pub use device_advice::{DeviceAdvice, DeviceRow, HalfFigures, ModelAdvice};
pub use device_log::{BadDeviceLog, DeviceLog, LoggedModel};
pub use figures::{Figures, ModelFigures};
pub use goal::Goal;
pub use interval::Interval;
pub(crate) use part::Part;
pub(crate) use recorded::Parts;
pub use recorded::{BadLog, Recorded, RecordedModel, whole_log};
pub use served::{Served, ServedQueue};
pub use setting::{BadSetting, Found, Setting};
