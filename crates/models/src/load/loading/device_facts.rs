//! Facts about a version that its devices' policies need.

use downbeat_engine::Model;
use downbeat_repository::config::policy::DropPolicy;

use super::Loading;
use crate::load::engines::most_threads;
use crate::load::model_source::has_graph;

impl Loading<'_> {
    /// Whether requests that cannot make their deadline are given up.
    pub(super) fn drops(&self) -> bool {
        let (options, definition) = (&self.context.options, &self.definition);
        let dispatch = options.dispatch_policy(&definition.name, definition.dispatch.clone());
        options.drop_policy(&definition.name, definition.drop, dispatch) != DropPolicy::None
    }

    /// Compute units beyond which a launch of it is hardly faster, if known: on the CPU its
    /// threads.
    pub(super) fn knee(&self, model: &dyn Model, threads: usize, max_batch: u32) -> Option<u32> {
        let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0);
        self.cores().and(threads).or_else(|| self.source.knee(model, max_batch))
    }

    /// Cores that run its launches, if it is on the CPU.
    pub(super) fn cores(&self) -> Option<u32> {
        let most = self.part.map_or_else(|| most_threads(&self.context.options), |part| part.threads);
        let cores = u32::try_from(most).unwrap_or(u32::MAX);
        (!self.on_gpus && has_graph(&self.definition)).then_some(cores)
    }
}
