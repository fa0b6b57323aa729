//! The registry as the [`Service`] behind the frontends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use downbeat_core::rollout::RolloutChange;
use downbeat_core::{Duration, RequestId, Time};
use downbeat_protocol::{InferRequest, InferResponse, inference as pb, pace};
use downbeat_repository::TensorBinding;
use downbeat_service::answers::Answers;
use downbeat_service::error::ServiceError;
use downbeat_service::options::ModelControl;
use downbeat_service::report::autoscale::AutoscaleStatus;
use downbeat_service::report::cluster_report::ClusterView;
use downbeat_service::report::device_report::DevicesReport;
use downbeat_service::report::live::LiveReport;
use downbeat_service::report::missed::MissedReport;
use downbeat_service::report::policy_report::PolicyReport;
use downbeat_service::report::rollout::RolloutReport;
use downbeat_service::report::scheduler_status::SchedulerStatus;
use downbeat_service::report::timeline::{PastLaunches, REMEMBERED, Timeline, rules};
use downbeat_service::report::what_if::{WhatIfQuestion, WhatIfReport};
use downbeat_service::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use downbeat_service::tenants::{NamedPart, keeps_no_parts};

use super::Registry;
use super::model_entry::VersionState;
use super::states::VersionStatus;
use crate::serving::rolled::{ServedRequests, infer_rolled_out};
use crate::serving::{Pipeline, ServedRollout, no_rollout, statistics, unknown_model};

/// Runs a change of state to its end even if the client that asked for it goes away meanwhile.
async fn finish(change: impl Future<Output = Result<(), ServiceError>> + Send + 'static) -> Result<(), ServiceError> {
    tokio::spawn(change)
        .await
        .unwrap_or_else(|error| Err(ServiceError::Internal(format!("the change ended in a panic: {error}"))))
}

impl Registry {
    /// Whether clients may load and unload, as in Triton's model control modes.
    fn check_control(&self, done: &str) -> Result<(), ServiceError> {
        let mode = match self.options.model_control {
            ModelControl::Explicit { .. } => return Ok(()),
            ModelControl::None => "none",
            ModelControl::Poll { .. } => "poll",
        };
        Err(ServiceError::Unavailable(format!(
            "models cannot be {done} by request with --model-control-mode {mode}; start the server with \
             --model-control-mode explicit"
        )))
    }

    fn served_pipeline(&self, name: &str) -> Result<Arc<Pipeline>, ServiceError> {
        self.serving.pipeline(name).ok_or_else(|| self.why_not_served(name))
    }

    fn served_rollout(&self, name: &str) -> Result<Arc<ServedRollout>, ServiceError> {
        match self.serving.get(name) {
            Some(served) => served.rollout.clone().ok_or_else(|| no_rollout(name)),
            None => self.served_pipeline(name).and_then(|_| Err(no_rollout(name))),
        }
    }

    /// Whether a model that is not in service is unknown, not ready yet, or broken.
    pub(super) fn why_not_served(&self, name: &str) -> ServiceError {
        let entry = self.entries.lock().get(name).cloned();
        let Some(entry) = entry else {
            // From memory: a request for a model that does not exist is no reason to read a folder.
            let known: Vec<String> = self.entries.lock().keys().cloned().collect();
            return ServiceError::NotFound(unknown_model(name, &known));
        };
        let states = entry.states.lock().clone();
        let (state, reason) = states
            .into_values()
            .find(|(state, _)| *state != VersionState::Ready)
            // The version became ready this very moment.
            .unwrap_or((VersionState::Loading, String::new()));
        ServiceError::Unavailable(format!(
            "Request for unknown model: '{name}' has no available versions: {}{}{reason}",
            state.name(),
            if reason.is_empty() { "" } else { ": " }
        ))
    }
}

impl Service for Registry {
    fn name(&self) -> &str {
        &self.options.server_name
    }

    fn is_live(&self) -> bool {
        self.watchdog.hopeless().is_none()
    }

    fn keeps_traces(&self) -> bool {
        self.driver.request_log().is_some()
    }

    fn is_ready(&self) -> bool {
        if self.serving.is_draining() || !self.is_live() {
            return false;
        }
        if !self.options.strict_readiness {
            return true;
        }
        if self.lacks_models() {
            return false;
        }
        self.started.load(Ordering::Acquire)
            && self.wanted.iter().all(|name| {
                // A model that a client unloaded is not missing.
                let is_unloaded = |name: &String| {
                    let entry = self.entries.lock().get(name).cloned();
                    entry.is_some_and(|entry| entry.states.lock().values().all(|(_, reason)| reason == "unloaded"))
                };
                self.serving.pipeline(name).is_some()
                    || self
                        .serving
                        .get(name)
                        .is_some_and(|served| served.versions.values().all(|version| version.hosts.lost().is_none()))
                    || self.with_models_of_steps(name).iter().any(is_unloaded)
            })
    }

    fn autoscale(&self) -> Option<AutoscaleStatus> {
        self.watch_load();
        self.autoscale.as_ref().map(|watch| watch.status())
    }

    fn set_tenants(&self, parts: &[NamedPart]) -> Result<(), ServiceError> {
        if self.cluster.get().is_some() {
            return keeps_no_parts(parts);
        }
        self.serving.set_tenants(parts);
        Ok(())
    }

    fn scheduler(&self) -> Option<SchedulerStatus> {
        Some(self.driver.status())
    }

    fn is_model_ready(&self, name: &str, version: &str) -> bool {
        if self.serving.is_draining() {
            return false;
        }
        let now = self.driver.clock().now();
        match self.serving.get(name) {
            Some(served) => served.version(version).is_ok_and(|version| version.not_ready(now).is_none()),
            None => {
                let pipeline = self.serving.pipeline(name);
                pipeline.is_some_and(|pipeline| pipeline.version(version).is_ok() && pipeline.not_ready(now).is_none())
            }
        }
    }

    async fn check_model_ready(&self, name: &str, version: &str) -> bool {
        if !self.is_model_ready(name, version) {
            return false;
        }
        let loaded = self.serving.get(name).and_then(|served| served.version(version).ok().cloned());
        match loaded {
            Some(loaded) => loaded.code_is_ready().await,
            None => true,
        }
    }

    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError> {
        let Some(served) = self.serving.get(name) else {
            let pipeline = self.served_pipeline(name)?;
            pipeline.version(version)?;
            return Ok(ModelMetadata {
                name: name.to_owned(),
                versions: pipeline.versions.keys().map(u64::to_string).collect(),
                platform: pipeline.definition.config.platform.clone(),
                signature: pipeline.codec.signature(),
            });
        };
        Ok(ModelMetadata {
            name: name.to_owned(),
            versions: served.versions.keys().map(u64::to_string).collect(),
            platform: served.definition.config.platform.clone(),
            signature: served.version(version)?.codec.signature(),
        })
    }

    fn check_model(&self, name: &str, version: &str) -> Result<(), ServiceError> {
        match self.serving.get(name) {
            Some(served) => self.serving.check(&served, version).map(|_| ()),
            None => self.served_pipeline(name)?.version(version).map(drop),
        }
    }

    fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        let Some(served) = self.serving.get(&request.model_name) else {
            let pipeline = self.served_pipeline(&request.model_name)?;
            pipeline.version(&request.model_version)?;
            return pipeline.codec.check_inputs(request);
        };
        self.serving.check(&served, &request.model_version)?.check_inputs(request)
    }

    fn model_config(&self, name: &str, version: &str) -> Result<pb::ModelConfig, ServiceError> {
        let Some(served) = self.serving.get(name) else {
            let pipeline = self.served_pipeline(name)?;
            return pipeline.version(version).map(|_| pipeline.definition.config.clone());
        };
        let mut config = served.definition.config.clone();
        if let Some(preprocess) = &served.version(version)?.preprocess {
            preprocess.describe(&mut config);
        }
        Ok(config)
    }

    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        let Some(served) = self.serving.get(name) else {
            self.served_pipeline(name)?;
            return Err(ServiceError::InvalidArgument(format!(
                "model '{name}' is an ensemble, which has no policy of its own; ask for the models of its steps"
            )));
        };
        let loaded = served.version(version)?.clone();
        Ok(loaded.policy())
    }

    fn missed(&self, name: &str, version: &str) -> Result<MissedReport, ServiceError> {
        let has_log = self.serving.has_request_log();
        let Some(served) = self.serving.get(name) else {
            let pipeline = self.served_pipeline(name)?;
            let record = pipeline.version(version)?;
            return Ok(record.missed().report(&record.name, &record.version, has_log));
        };
        let loaded = served.version(version)?;
        Ok(loaded.missed().report(&loaded.name, &loaded.version, has_log))
    }

    fn rollout_header(&self, name: &str) -> Option<String> {
        self.serving.rollout_header(name)
    }

    fn rollout(&self, name: &str) -> Result<RolloutReport, ServiceError> {
        Ok(self.served_rollout(name)?.report(self.serving.now()))
    }

    fn change_rollout(&self, name: &str, change: &RolloutChange) -> Result<RolloutReport, ServiceError> {
        self.served_rollout(name)?.change(change)?;
        // The steps of ensembles have the version of requests that name none.
        self.settle_ensembles(name);
        self.rollout(name)
    }

    fn statistics(&self, name: &str, version: &str) -> Result<Vec<pb::ModelStatistics>, ServiceError> {
        if name.is_empty() {
            let models = self.serving.all().into_iter().flat_map(|served| statistics(served.versions.values()));
            let pipelines = self.serving.pipelines();
            return Ok(models.chain(pipelines.iter().flat_map(|pipeline| pipeline.statistics())).collect());
        }
        let Some(served) = self.serving.get(name) else {
            let pipeline = self.served_pipeline(name)?;
            return match version {
                "" => Ok(pipeline.statistics().collect()),
                version => Ok(vec![pipeline.version(version)?.statistics()]),
            };
        };
        if version.is_empty() {
            return Ok(statistics(served.versions.values()));
        }
        Ok(statistics(std::iter::once(served.version(version)?)))
    }

    fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry> {
        let mut index = Vec::new();
        let now = self.driver.clock().now();
        let entries = self.entries.lock().clone();
        let mut names = self.names().unwrap_or_else(|error| {
            tracing::error!(%error, "the repository cannot be read; the index has only models that were loaded");
            Vec::new()
        });
        names.extend(entries.keys().cloned());
        names.sort();
        names.dedup();
        for name in names {
            pace::step(pace::ENTRY);
            let states = entries.get(&name).map(|entry| self.states_of(&name, entry, now)).unwrap_or_default();
            if states.is_empty() && !ready_only {
                index.push(ModelIndexEntry { name: name.clone(), ..ModelIndexEntry::default() });
            }
            for VersionStatus { version, state, reason, .. } in states {
                if !ready_only || state == VersionState::Ready {
                    index.push(ModelIndexEntry { name: name.clone(), version, state: state.name().to_owned(), reason });
                }
            }
        }
        index
    }

    async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServiceError> {
        self.check_control("loaded")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move {
            // A source that never had the model may fail.
            let is_known = this.repository.has(&name);
            if overrides.files.is_empty()
                && let Some(error) = this.refresh(Some(&name)).await.filter(|_| is_known)
            {
                return Err(ServiceError::Unavailable(format!("failed to load '{name}': {error}")));
            }
            this.load_model(&name, overrides, Arc::new(())).await
        })
        .await
    }

    async fn unload(&self, name: &str) -> Result<(), ServiceError> {
        self.check_control("unloaded")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move { this.unload_model(&name).await }).await
    }

    async fn unload_with_steps(&self, name: &str) -> Result<(), ServiceError> {
        self.check_control("unloaded")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move {
            for name in this.with_models_of_steps(&name) {
                this.unload_model(&name).await?;
            }
            Ok(())
        })
        .await
    }

    fn devices(&self) -> Option<DevicesReport> {
        Some(self.devices_report())
    }

    async fn set_partition(&self, name: &str, partition: Option<u32>) -> Result<(), ServiceError> {
        self.check_control("moved")?;
        let (this, name) = (self.clone(), name.to_owned());
        finish(async move { this.move_model(&name, partition).await }).await
    }

    fn cluster(&self) -> Option<&dyn ClusterView> {
        self.cluster.get().map(|view| &**view)
    }

    async fn infer(&self, request: InferRequest) -> Result<InferResponse, ServiceError> {
        if self.cluster.get().is_some() {
            let reason = "a backend answers only requests of its cluster's frontends; send the request to a frontend";
            return Err(ServiceError::Unimplemented(reason.to_owned()));
        }
        match self.serving.enter(&request.model_name) {
            Some(served) if served.definition.config.is_decoupled() => Err(ServiceError::Decoupled(request.model_name)),
            // These futures are boxed: other requests would move their memory for nothing.
            Some(served) => match served.rollout.clone().filter(|_| request.model_version.is_empty()) {
                Some(rollout) => {
                    let model = ServedRequests::new(self.serving.clone(), served);
                    Box::pin(infer_rolled_out(model, rollout, request)).await
                }
                None => self.serving.infer(&served, request, None).await,
            },
            None => match self.serving.enter_pipeline(&request.model_name) {
                Some(pipeline) => Box::pin(self.serving.infer_pipeline(&pipeline, request, None)).await,
                None => Err(self.why_not_served(&request.model_name)),
            },
        }
    }

    async fn infer_stream(&self, request: InferRequest) -> Result<Answers, ServiceError> {
        let served = self.serving.enter(&request.model_name);
        // The count of another model ends here: `infer` counts the request.
        match served.filter(|served| served.definition.config.is_decoupled() && self.cluster.get().is_none()) {
            Some(served) => self.serving.infer_many(served, request).await,
            None => self.infer(request).await.map(Answers::one),
        }
    }

    fn is_decoupled(&self, name: &str, _version: &str) -> bool {
        self.serving.get(name).is_some_and(|served| served.definition.config.is_decoupled())
    }

    fn timeline(&self, last: std::time::Duration) -> Option<Timeline> {
        let now = self.driver.clock().now();
        let last = Duration::from(last).min(REMEMBERED);
        let from = Time::from_nanos(now.as_nanos().saturating_sub(last.as_nanos()));
        let mut devices: Vec<PastLaunches> = self.driver.hosts().iter().flat_map(|host| host.past(from)).collect();
        for launch in devices.iter_mut().flat_map(|device| &mut device.launches) {
            let ids: Vec<String> =
                launch.requests.iter().map(|number| self.serving.ids.of(RequestId(*number))).collect();
            if ids.iter().any(|id| !id.is_empty()) {
                launch.ids = ids;
            }
        }
        let (from_ns, now_ns) = (from.as_nanos(), now.as_nanos());
        Some(Timeline { from_ns, now_ns, devices, rules: rules(), backends: Vec::new() })
    }

    fn live(&self, history: bool) -> Option<LiveReport> {
        Some(self.live_report(history))
    }

    async fn what_if(&self, question: WhatIfQuestion) -> Result<WhatIfReport, ServiceError> {
        self.answer_what_if(question).await
    }

    fn labels(&self, name: &str, _version: &str, output: &str) -> Vec<String> {
        let labels = |outputs: &[TensorBinding]| {
            let found = outputs.iter().find(|binding| binding.client.name == output);
            found.map(|binding| binding.labels.to_vec()).unwrap_or_default()
        };
        match self.serving.get(name) {
            Some(served) => labels(&served.definition.outputs),
            // An ensemble may have the labels of a step's model.
            None => self.serving.pipeline(name).map(|pipeline| labels(&pipeline.codec.outputs)).unwrap_or_default(),
        }
    }
}
