//! Thread pools for runs: one for each run that is going on.
//!
//! Runs that share a pool wait for each other's operators, and behind a run that does not end everything would wait for ever.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rten::ThreadPool;

use crate::cores::{CoreSet, Pinned};
use crate::normal_priority::at_normal_priority;

/// What a run wants of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolKind {
    /// So many threads.
    pub threads: usize,
    /// Bound to these cores; `None`: to none.
    pub cores: Option<CoreSet>,
}

impl PoolKind {
    /// Binds the calling thread, and those that it starts, as such a pool's are.
    pub(super) fn pin(&self) -> Result<Option<Pinned>, String> {
        self.cores.as_ref().map(Pinned::to).transpose()
    }
}

/// Pools that no run uses at the moment, as many as have run at once.
#[derive(Default)]
pub(super) struct Pools {
    idle: Mutex<Vec<(PoolKind, Arc<ThreadPool>)>>,
}

impl Pools {
    /// A pool of this kind that nobody else uses: the one that was used last, whose memory is in the caches, or a new one.
    pub(super) fn take(&self, kind: PoolKind) -> Arc<ThreadPool> {
        let mut idle = self.idle();
        if let Some(index) = idle.iter().rposition(|(other, _)| *other == kind) {
            return idle.remove(index).1;
        }
        drop(idle);
        at_normal_priority(move || {
            // The calling thread was bound to these cores before, and has said so if that failed.
            let _pinned = kind.pin();
            Arc::new(ThreadPool::with_num_threads(kind.threads))
        })
    }

    /// Leaves a pool to the next run.
    pub(super) fn give_back(&self, kind: PoolKind, pool: Arc<ThreadPool>) {
        self.idle().push((kind, pool));
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(PoolKind, Arc<ThreadPool>)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::Topology;

    #[test]
    fn threads_of_a_pool_are_bound_as_its_runs_want() {
        let pools = Pools::default();
        let all = Topology::here().usable();
        let last = CoreSet::from_iter(all.iter().last());
        for cores in [Some(last), None, Some(last)] {
            let kind = PoolKind { threads: 2, cores };
            let pool = pools.take(kind);
            assert_eq!(pool.run(|| Topology::here().usable()), cores.unwrap_or(all));
            pools.give_back(kind, pool);
        }
        assert_eq!(pools.idle().len(), 2, "one for each kind");
    }
}
