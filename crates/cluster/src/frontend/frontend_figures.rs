//! The figures of a frontend: the counts of the models that its clients have asked for.

use std::sync::Arc;

use downbeat_protocol::inference::ModelStatistics;
use downbeat_service::clock::Clock;
use downbeat_service::report::live::{LiveHistory, LiveModel, LiveReport};
use parking_lot::Mutex;

use super::remote_models::{RemoteModel, RemoteModels, RemoteVersion};
use super::tenant_counts::TenantCounts;
use crate::view::question::{Answer, Question};

/// The counts of a frontend's models, and their last hour.
pub struct FrontendFigures {
    /// The name of the server in reports.
    pub server: String,
    pub clock: Clock,
    pub models: Arc<RemoteModels>,
    pub tenants: Arc<TenantCounts>,
    pub history: Mutex<LiveHistory>,
}

impl FrontendFigures {
    /// Notes the outcomes of all requests until now for the history.
    pub fn note_history(&self) {
        let (now, models) = (self.clock.now(), self.models.all());
        let mut history = self.history.lock();
        for version in models.values().flat_map(|model| model.versions.values()) {
            history.note(now, &version.name, &version.version, &version.sample().counts);
        }
    }

    /// The present counts. Devices, waiting items and profiles are known to the backends alone.
    pub fn live(&self, history: bool) -> LiveReport {
        if history {
            self.note_history();
        }
        let (now, models) = (self.clock.now(), self.models.all());
        let past = history.then(|| self.history.lock());
        let live = |rollout: Option<&(String, String)>, version: &Arc<RemoteVersion>| LiveModel {
            history: past.as_ref().map(|past| past.of(now, &version.name, &version.version)).unwrap_or_default(),
            rollout: rollout
                .filter(|(new, _)| *new == version.version)
                .map(|(_, told)| told.clone())
                .unwrap_or_default(),
            ..version.live()
        };
        let of_model = |model: &Arc<RemoteModel>| {
            let rollout = model.rollout.as_ref().map(|rollout| rollout.told());
            model.versions.values().map(|version| live(rollout.as_ref(), version)).collect::<Vec<_>>()
        };
        LiveReport {
            models: models.values().flat_map(of_model).collect(),
            tenants: self.tenants.report(),
            in_cluster: true,
            ..LiveReport::new(&self.server, now)
        }
    }

    /// The statistics of a model's versions.
    pub fn statistics_of(model: &RemoteModel) -> Vec<ModelStatistics> {
        model.versions.values().map(|its| its.statistics()).collect()
    }

    /// The statistics of all models.
    pub fn statistics(&self) -> Vec<ModelStatistics> {
        self.models.all().values().flat_map(|model| Self::statistics_of(model)).collect()
    }

    /// The frontend's answer to a question about the whole cluster.
    pub fn answer(&self, question: &Question) -> Answer {
        match question {
            Question::Live { history } => Answer::Live(self.live(*history)),
            Question::Statistics => Answer::Statistics(self.statistics()),
            Question::Timeline { .. } | Question::Policy { .. } => Answer::Nothing,
        }
    }
}
