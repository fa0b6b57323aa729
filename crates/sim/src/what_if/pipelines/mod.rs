//! The requests of pipelines in a decision log: the time in each step, and replays under other
//! settings.
//!
//! [`PipelineViews`] show the time in each step. [`RecordedPipelines`] replay the requests through the
//! steps of their pipelines, under a [`PipelineSetting`].

mod advice;
mod comparison;
mod flows;
mod joined;
mod logged;
mod outcome;
mod pools;
mod replay;
mod shortage;
mod tables;
mod view;

pub use advice::{Added, NoPipelineAdvice, PipelineAdvice, Short};
pub use comparison::PipelineComparison;
pub use flows::{BadFlows, RecordedFlow, RecordedPipelines, RecordedPool, RecordedStepModel};
pub use joined::BadPipelines;
pub use logged::{LoggedPipeline, LoggedRequest, LoggedStep, PipelineLog};
pub use outcome::{FlowFigures, PipelineRow, PoolFigures};
pub use replay::{BadPipelineSetting, PipelineSetting};
pub use shortage::Shortage;
pub use view::{PipelineView, PipelineViews, Spans, StepDevices, StepView};
