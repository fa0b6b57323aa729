//! Makes the plans that a scheduler's state machine asks for, beside the node's thread.

use downbeat_core::Duration;
use downbeat_roles::PlanWanted;
use downbeat_service::clock::Clock;
use tokio::sync::mpsc;

use super::scheduler_role::SchedulerEvent;

/// The most time for a plan.
const WITHIN: Duration = Duration::from_millis(2_000);

/// Answers questions for plans, one after the other, until their sender is gone.
pub async fn plan(
    mut wanted: mpsc::UnboundedReceiver<PlanWanted>,
    clock: Clock,
    answers: mpsc::UnboundedSender<SchedulerEvent>,
) {
    while let Some(question) = wanted.recv().await {
        let number = question.number;
        let divide = move || {
            let since = clock.now();
            downbeat_plan::divide(&question, WITHIN, &|| clock.now().since(since)).map_err(|error| error.to_string())
        };
        let found = tokio::task::spawn_blocking(divide).await;
        let found = found.unwrap_or_else(|_| Err("the search ended in a panic: this is a defect".to_owned()));
        if answers.send(SchedulerEvent::Planned(number, found)).is_err() {
            return;
        }
    }
}
