//! The figures of a backend, for reports on the whole cluster.

use downbeat_models::registry::Registry;
use downbeat_service::service::Service;

use crate::view::question::{Answer, Question};

/// The backend's answer to a question about the whole cluster.
pub fn answer(registry: &Registry, question: &Question) -> Answer {
    match question {
        Question::Live { history: _ } => registry.live(false).map_or(Answer::Nothing, Answer::Live),
        Question::Statistics => match registry.statistics("", "") {
            Ok(models) => Answer::Statistics(models),
            Err(error) => Answer::Failed(error.to_string()),
        },
        Question::Timeline { last } => match registry.timeline((*last).into()) {
            Some(timeline) => Answer::Timeline { timeline, is_whole: true },
            None => Answer::Nothing,
        },
        Question::Policy { model, version } => {
            let report = registry.policy(model, version).map(Box::new);
            Answer::Policy(report.map_err(|error| (error.code(), error.to_string())))
        }
    }
}
