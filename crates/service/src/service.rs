//! The service that a frontend needs of the server behind it.

use std::collections::BTreeMap;
use std::future::Future;

use bytes::Bytes;
use downbeat_core::rollout::RolloutChange;
use downbeat_core::tensor::Signature;
use downbeat_protocol::inference::{ModelConfig, ModelStatistics};
use downbeat_protocol::{InferRequest, InferResponse, Parameters};

use crate::answers::Answers;
use crate::error::ServiceError;
use crate::report::autoscale::AutoscaleStatus;
use crate::report::cluster_report::ClusterView;
use crate::report::device_report::DevicesReport;
use crate::report::live::LiveReport;
use crate::report::missed::MissedReport;
use crate::report::policy_report::PolicyReport;
use crate::report::rollout::RolloutReport;
use crate::report::scheduler_status::SchedulerStatus;
use crate::report::timeline::Timeline;
use crate::report::what_if::{WhatIfQuestion, WhatIfReport};
use crate::tenants::{NamedPart, keeps_no_parts};

/// The server as its frontends see it. The production implementation serves models; tests of the
/// frontends have their own.
pub trait Service: Send + Sync + 'static {
    /// The server's name in its metadata.
    fn name(&self) -> &str {
        crate::options::SERVER_NAME
    }

    /// Whether the server can go on at all; false if only a new process helps.
    fn is_live(&self) -> bool {
        true
    }

    /// Whether the server keeps the traces of requests: frontends then write a request's header
    /// `traceparent` into its parameters.
    fn keeps_traces(&self) -> bool {
        false
    }

    /// Whether every model that was asked for is ready, and the server does not drain.
    fn is_ready(&self) -> bool;

    /// Whether the model (any version if `version` is empty) can answer now. False if there is no
    /// such model.
    fn is_model_ready(&self, name: &str, version: &str) -> bool;

    /// Whether the model can answer now, also by the check of its own code, if there is one (`is_ready`
    /// of a Python model).
    fn check_model_ready(&self, name: &str, version: &str) -> impl Future<Output = bool> + Send {
        std::future::ready(self.is_model_ready(name, version))
    }

    /// Name, inputs and outputs of a model.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError>;

    /// Checks that the server would take a request for the model now, before the frontend asks for
    /// the body.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    fn check_model(&self, name: &str, version: &str) -> Result<(), ServiceError> {
        self.model_metadata(name, version).map(|_| ())
    }

    /// Checks names, datatypes, shapes and number of items of a request's inputs, before data from
    /// elsewhere is copied.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`, `InvalidArgument`.
    fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        self.check_model(&request.model_name, &request.model_version)
    }

    /// The completed configuration of a model.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    fn model_config(&self, name: &str, version: &str) -> Result<ModelConfig, ServiceError>;

    /// Which device policy a model has, and why.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError>;

    /// The last requests of a model that missed.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `Unimplemented` if the process keeps no such list.
    fn missed(&self, name: &str, _version: &str) -> Result<MissedReport, ServiceError> {
        Err(ServiceError::Unimplemented(format!(
            "this process keeps no list of the requests of model '{name}' that missed; `downbeat serve` and the \
             frontends of a cluster keep one"
        )))
    }

    /// The header by which a request for the model asks for its new version; `None`: there is none.
    fn rollout_header(&self, _name: &str) -> Option<String> {
        None
    }

    /// The rollout of a model's new version.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `InvalidArgument` if the model has no rollout; `Unimplemented` if the
    /// process has none.
    fn rollout(&self, name: &str) -> Result<RolloutReport, ServiceError> {
        Err(ServiceError::Unimplemented(format!(
            "this process rolls no version of model '{name}' out; `downbeat serve` and the frontends of a cluster do"
        )))
    }

    /// Changes the rollout of a model's new version. Returns the rollout after the change.
    ///
    /// # Errors
    /// As [`Service::rollout`]; `InvalidArgument` if a value is wrong.
    fn change_rollout(&self, name: &str, _change: &RolloutChange) -> Result<RolloutReport, ServiceError> {
        self.rollout(name)
    }

    /// Statistics of one model, or of all if `name` is empty.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    fn statistics(&self, name: &str, version: &str) -> Result<Vec<ModelStatistics>, ServiceError>;

    /// Every model in the repository, loaded or not; only the ready ones if `ready_only`.
    fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry>;

    /// Loads or reloads a model; the old version serves until the new one is warm. Answers when it
    /// is done.
    ///
    /// # Errors
    /// `NotFound`, `InvalidArgument` (the configuration or the file is wrong; versions in service
    /// go on).
    fn load(&self, name: &str, overrides: LoadOverrides) -> impl Future<Output = Result<(), ServiceError>> + Send;

    /// Unloads a model after its queued requests are answered. Unloading a model that is not loaded
    /// is no error.
    ///
    /// # Errors
    /// `NotFound`.
    fn unload(&self, name: &str) -> impl Future<Output = Result<(), ServiceError>> + Send;

    /// Unloads a model; if it is an ensemble, also the models of its steps (Triton's
    /// `unload_dependents`).
    ///
    /// # Errors
    /// As [`Service::unload`].
    fn unload_with_steps(&self, name: &str) -> impl Future<Output = Result<(), ServiceError>> + Send {
        self.unload(name)
    }

    /// The partitions of devices, and the models on each; `None` if there are no devices.
    fn devices(&self) -> Option<DevicesReport> {
        None
    }

    /// Puts a model onto a partition of its devices, where it stays; `None`: back to its earlier
    /// partition. The model goes on serving. The call returns once the move is done.
    ///
    /// # Errors
    /// `NotFound`, `InvalidArgument`; `Unavailable` (it stays where it is).
    fn set_partition(
        &self,
        name: &str,
        _partition: Option<u32>,
    ) -> impl Future<Output = Result<(), ServiceError>> + Send {
        let moved = self
            .check_model(name, "")
            .and_then(|()| Err(ServiceError::Unimplemented("models of this server have no partitions".to_owned())));
        std::future::ready(moved)
    }

    /// Runs an inference. Dropping the future cancels the request: it leaves its queue.
    /// Shared memory is resolved before, classification applied after: here tensors are bytes.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    fn infer(&self, request: InferRequest) -> impl Future<Output = Result<InferResponse, ServiceError>> + Send;

    /// Whether the model may give no answer or several answers to a request
    /// (`model_transaction_policy.decoupled`). [`Service::infer`] refuses requests for such a model
    /// with [`ServiceError::Decoupled`], and [`Service::infer_stream`] takes them.
    fn is_decoupled(&self, _name: &str, _version: &str) -> bool {
        false
    }

    /// Runs an inference with any number of answers. A model that is not decoupled gives one answer.
    /// Dropping the future or the answers cancels the request.
    ///
    /// # Errors
    /// Any [`ServiceError`], if the request ends before its work begins. Later errors are among the
    /// answers.
    fn infer_stream(&self, request: InferRequest) -> impl Future<Output = Result<Answers, ServiceError>> + Send {
        let answer = self.infer(request);
        async { answer.await.map(Answers::one) }
    }

    /// How many devices the server should have; `None` if it gives no such advice.
    fn autoscale(&self) -> Option<AutoscaleStatus> {
        None
    }

    /// Replaces the tenants' parts of the devices' time.
    ///
    /// # Errors
    /// If the service cannot keep the parts. Parts of nothing are always kept.
    fn set_tenants(&self, parts: &[NamedPart]) -> Result<(), ServiceError> {
        keeps_no_parts(parts)
    }

    /// The state of the scheduler's queues, with reasons; `None` if there is no scheduler.
    fn scheduler(&self) -> Option<SchedulerStatus> {
        None
    }

    /// The server's view of its cluster; `None`: it is in no cluster.
    fn cluster(&self) -> Option<&dyn ClusterView> {
        None
    }

    /// Has the scheduler divide the models of its cluster among sub-clusters again.
    ///
    /// # Errors
    /// If this process is not the leading scheduler.
    fn plan_cluster(&self) -> impl Future<Output = Result<(), ServiceError>> + Send {
        let reason = "models are divided by the scheduler of a cluster that leads; ask that one";
        std::future::ready(Err(ServiceError::NotFound(reason.to_owned())))
    }

    /// The launches on the lanes of devices in the time `last` until now, at most
    /// `timeline::REMEMBERED`; `None` if there are no devices.
    fn timeline(&self, _last: std::time::Duration) -> Option<Timeline> {
        None
    }

    /// The present counts of models and devices; `None` if the process has no models. `history`: with the
    /// last hour of each model.
    fn live(&self, _history: bool) -> Option<LiveReport> {
        None
    }

    /// Replays the last requests under another setting, one question at a time.
    ///
    /// # Errors
    /// `TooMany` while another question is answered, `InvalidArgument` for a wrong setting or without
    /// requests to replay, `Unimplemented` if the process has no scheduler.
    fn what_if(&self, _question: WhatIfQuestion) -> impl Future<Output = Result<WhatIfReport, ServiceError>> + Send {
        let reason =
            "only `downbeat serve` answers a what-if; for a cluster, run `downbeat what-if` on the decision log";
        std::future::ready(Err(ServiceError::Unimplemented(reason.to_owned())))
    }

    /// The labels of an output's classes (`label_filename` in the configuration), in class order;
    /// empty if there are none.
    fn labels(&self, name: &str, version: &str, output: &str) -> Vec<String>;
}

/// Name, versions, inputs and outputs of a model.
#[derive(Clone, Debug)]
pub struct ModelMetadata {
    /// Model name.
    pub name: String,
    /// Ready versions, ascending.
    pub versions: Vec<String>,
    /// `onnxruntime_onnx`, or the configuration's platform.
    pub platform: String,
    /// Inputs and outputs; the batch dimension is -1.
    pub signature: Signature,
}

/// A line of the repository index. Its JSON leaves out empty fields, as Triton's does.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct ModelIndexEntry {
    /// Model name.
    pub name: String,
    /// Version; empty if no version was ever tried.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// `READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE` or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// Why it is not ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// The parameter of an unload request that asks for [`Service::unload_with_steps`].
pub const UNLOAD_DEPENDENTS: &str = "unload_dependents";

/// The contents of a load request besides the model's name.
#[derive(Clone, Debug, Default)]
pub struct LoadOverrides {
    /// A model configuration (JSON) instead of the one in the repository.
    pub config: Option<String>,
    /// Files (`1/model.onnx`) in the place of the repository's.
    pub files: BTreeMap<String, Bytes>,
    /// Other parameters, for the warning that names them.
    pub parameters: Parameters,
}
