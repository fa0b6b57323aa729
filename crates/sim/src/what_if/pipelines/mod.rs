//! The requests of pipelines in a decision log: where their time went, and what other settings would
//! have done.

mod joined;
mod logged;
mod pools;
mod shortage;
mod tables;
mod view;

pub use joined::BadPipelines;
pub use logged::{LoggedPipeline, LoggedRequest, LoggedStep, PipelineLog};
pub use shortage::Shortage;
pub use view::{PipelineView, PipelineViews, Spans, StepDevices, StepView};
