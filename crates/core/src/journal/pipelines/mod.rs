//! The records of the requests of pipelines: ensembles, and calls of models' code to other models.
//!
//! Each step of such a request is a request of a model. The log of a shard or of a device has records
//! of that request. [`PipelineInput::Done`] has its number, so that a reader can join the logs.

mod book;
mod record;
mod steps;
mod text;

pub use book::{BadPipelineInput, PipelineBook, PipelineRecords};
pub use record::{End, PipelineInput, PipelineSpec, StepSpec};
pub use steps::{StepOf, steps_by_request};
