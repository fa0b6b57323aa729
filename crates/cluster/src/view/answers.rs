//! Answers the questions that other processes have about the whole cluster.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::asks::{FarQuestion, ViewEvent};
use super::question::{Answer, Question};

/// Answers a question for one process.
pub type Answerer = Arc<dyn Fn(&Question) -> Answer + Send + Sync>;

/// Answers questions beside the event loop, one after the other, until their sender is gone. The
/// leader has at most 64 open at a time.
pub async fn answer(
    mut questions: mpsc::UnboundedReceiver<FarQuestion>,
    answerer: Answerer,
    send: impl Fn(ViewEvent) -> bool,
) {
    while let Some((from, question)) = questions.recv().await {
        let answerer = answerer.clone();
        let work = move || match Question::unpack(&question) {
            Some(question) => answerer(&question).pack(),
            None => Answer::Failed("it does not know this question".to_owned()).pack(),
        };
        let answer = tokio::task::spawn_blocking(work).await;
        let answer = answer.unwrap_or_else(|error| Answer::Failed(error.to_string()).pack());
        if !send(ViewEvent::Tell(from, answer)) {
            return;
        }
    }
}
