//! A model that its engine cannot run goes to another.

use std::sync::Arc;

use downbeat_engine::{Engine, LoadError, RunError};
use downbeat_engine_ort::may_load_elsewhere;

use super::{Loading, Runnable};
use crate::load::load_context::LoadContext;
use crate::load::policy_choice::Why;

/// This engine finds out only in a run that it lacks an operator.
const LACKS_AT_RUNS: &str = "rten";

/// Whether another engine may succeed after this error.
fn may_go_elsewhere(error: &anyhow::Error) -> bool {
    match (error.downcast_ref::<LoadError>(), error.downcast_ref::<RunError>()) {
        (Some(error), _) => may_load_elsewhere(error),
        (None, Some(error)) => error.engine == LACKS_AT_RUNS && !error.of_device && !error.of_executor,
        (None, None) => false,
    }
}

impl<'a> Loading<'a> {
    /// Loads the model and runs it for the first time. Where its engine cannot do that, another
    /// engine does, unless the model's options name its engine.
    pub(super) fn run_on_an_engine(&mut self, why: &Why) -> anyhow::Result<Runnable> {
        let refused = match self.first(why) {
            Err(error) if may_go_elsewhere(&error) => error,
            outcome => return outcome,
        };
        let Some(other) = self.other_engine() else { return Err(refused) };
        let name = self.definition.name.clone();
        let engine = std::mem::replace(&mut self.source.engine, other).info().name;
        let instead = other.info().name;
        if let Some(held) = &self.held {
            held.begin_anew();
        }
        match self.first(why) {
            Ok(runnable) => {
                // The trial's requests are made up, and a model may refuse them for a reason of its
                // own.
                let what = if refused.is::<RunError>() {
                    "answers none of the model's trial requests"
                } else {
                    "cannot run the model"
                };
                tracing::warn!(
                    model = %name, version = %self.version, reason = %refused,
                    "{engine} {what}, so the model runs on {instead}; [models.{name}] engine = \"{instead}\" chooses \
                     this engine at once"
                );
                Ok(runnable)
            }
            Err(error) => Err(refused.context(format!("{instead} cannot run the model either: {error:#}"))),
        }
    }

    fn other_engine(&self) -> Option<&'a Arc<dyn Engine>> {
        let context: &'a LoadContext = self.context;
        context.engines.instead(&self.definition.name, &context.options, &**self.source.engine, self.isolation)
    }

    /// The error that sends the model to another engine, after its own engine answered no made-up
    /// request. `None`: there is no other engine to try.
    pub(super) fn elsewhere(&self, reason: impl ToString) -> Option<anyhow::Error> {
        let engine = self.source.engine.info().name;
        let may_go = engine == LACKS_AT_RUNS && self.other_engine().is_some();
        may_go.then(|| RunError::new(engine, reason.to_string()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_lacks_another_may_have() {
        let load = |engine, reason: &str| LoadError::Model { path: "m".into(), engine, reason: reason.into() }.into();
        assert!(may_go_elsewhere(&load("rten", "operator error: Celu operator not supported")));
        assert!(may_go_elsewhere(&load("onnxruntime", "Could not find an implementation for Expand(13) node")));
        assert!(!may_go_elsewhere(&load("onnxruntime", "This is an invalid model. Type Error: ...")));
        assert!(!may_go_elsewhere(&LoadError::File { path: "m".into(), reason: "truncated".into() }.into()));
        assert!(may_go_elsewhere(&RunError::new("rten", "operator failed: unsupported input").into()));
        assert!(!may_go_elsewhere(&RunError::new("onnxruntime", "Non-zero status code").into()));
        assert!(!may_go_elsewhere(&anyhow::anyhow!("no room")));
    }
}
