//! The events of pipelines' requests, as data.

use serde::{Deserialize, Serialize};

use crate::ids::RequestId;
use crate::time::Time;

/// An event of a pipeline's request, as data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineInput {
    /// A pipeline has its first request. The number names the pipeline from here on.
    Pipeline(u32, Box<PipelineSpec>),
    /// The code of this pipeline calls a further model: the next step.
    Callee(u32, StepSpec),
    /// A request of a pipeline came.
    Request {
        /// The number of the request, among all requests of pipelines.
        request: u64,
        /// The pipeline.
        pipeline: u32,
        /// When the whole must be done; [`Time::MAX`]: at any time.
        deadline: Time,
        /// The items of the request.
        size: u32,
        /// The step of another request that this request is: its number, and the step's.
        within: Option<(u64, u32)>,
    },
    /// The inputs of a step are there.
    Reached {
        /// The request.
        request: u64,
        /// The step.
        step: u32,
        /// The local deadline: the step must be done by then.
        deadline: Time,
    },
    /// A step has ended.
    Done {
        /// The request.
        request: u64,
        /// The step.
        step: u32,
        /// The request to the step's model, as the other logs name it; `None`: the step asked no
        /// model, or the model is a pipeline.
        asked: Option<RequestId>,
        /// When the step's batch began to run; `None`: it did not run.
        began: Option<Time>,
        /// How the step ended.
        end: End,
    },
    /// The whole has ended.
    End {
        /// The request.
        request: u64,
        /// How the whole ended.
        end: End,
        /// The step that ended the whole, unless the request was answered or its client left.
        step: Option<u32>,
    },
}

/// A pipeline.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PipelineSpec {
    /// The name of the ensemble, or of the model whose code calls.
    pub name: String,
    /// The version; empty: the calls of all versions.
    pub version: String,
    /// Whether code calls the steps. Otherwise the steps form an ensemble.
    pub is_code: bool,
    /// The steps, by number.
    pub steps: Vec<StepSpec>,
}

/// A step of a pipeline.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StepSpec {
    /// The model that runs the step.
    pub model: String,
    /// The steps that must be done before.
    pub after: Vec<u32>,
}

/// How a step or a whole request ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It was answered.
    Answered,
    /// The whole was answered after its deadline.
    Late,
    /// Given up before the step: the rest no longer fitted into the time that was left.
    Hopeless,
    /// The queue of a step refused or dropped the request: it could not make its local deadline.
    Dropped,
    /// The queue of a step was full.
    Full,
    /// The client's own timeout ended.
    TimedOut,
    /// The model failed, or left service.
    Failed,
    /// Another step ended the request, or the client left.
    Cancelled,
}
