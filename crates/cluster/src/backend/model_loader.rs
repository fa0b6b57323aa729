//! Loads and unloads models on a scheduler's orders.

use std::sync::Arc;

use downbeat_models::registry::Registry;
use downbeat_roles::Doing;
use downbeat_service::service::LoadOverrides;
use tokio::sync::mpsc;

use super::backend_role::BackendEvent;

/// Carries out orders side by side, until their sender is gone. `done` is called after each load
/// and unload, before the node hears the result.
pub async fn follow(
    mut told: mpsc::UnboundedReceiver<(String, Doing)>,
    registry: Registry,
    answers: mpsc::UnboundedSender<BackendEvent>,
    done: impl Fn() + Clone + Send + 'static,
) {
    while let Some((model, doing)) = told.recv().await {
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
            let _ = answers.send(BackendEvent::Done(model, result));
        });
    }
}

async fn load(registry: &Registry, model: &str) -> Result<(), String> {
    registry.load_model(model, LoadOverrides::default(), Arc::new(())).await.map_err(|error| error.to_string())
}
