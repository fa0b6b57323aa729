//! Loads and unloads models on a scheduler's orders.

use std::sync::Arc;

use downbeat_models::registry::Registry;
use downbeat_roles::{Doing, NodeId};
use downbeat_service::service::LoadOverrides;
use tokio::sync::mpsc;

use super::backend_role::BackendEvent;

/// A change of a model to make.
pub struct Told {
    pub model: String,
    pub doing: Doing,
    /// The order of a client that the change is for; `None`: the scheduler assigns models.
    pub order: Option<(NodeId, u64)>,
}

/// Carries out orders side by side, until their sender is gone. `done` is called after each load
/// and unload, before the node hears the result.
pub async fn follow(
    mut told: mpsc::UnboundedReceiver<Told>,
    registry: Registry,
    answers: mpsc::UnboundedSender<BackendEvent>,
    done: impl Fn() + Clone + Send + 'static,
) {
    while let Some(Told { model, doing, order }) = told.recv().await {
        let (registry, answers, done) = (registry.clone(), answers.clone(), done.clone());
        tokio::spawn(async move {
            let result = match doing {
                Doing::Load => load(&registry, &model).await,
                Doing::Unload => registry.unload_model(&model).await.map_err(|error| error.to_string()),
            };
            match (&result, doing) {
                (Ok(()), Doing::Load) => tracing::info!(%model, "loaded by order of the scheduler"),
                (Ok(()), Doing::Unload) => tracing::info!(%model, "unloaded by order of the scheduler"),
                (Err(reason), _) => {
                    tracing::warn!(%model, %reason, ?doing, "an order of the scheduler was not carried out")
                }
            }
            done();
            // A node that has ended takes no events.
            let _ = answers.send(match order {
                Some(order) => BackendEvent::Ordered(order, result),
                None => BackendEvent::Done(model, doing, result),
            });
        });
    }
}

async fn load(registry: &Registry, model: &str) -> Result<(), String> {
    registry.load_model(model, LoadOverrides::default(), Arc::new(())).await.map_err(|error| error.to_string())
}
