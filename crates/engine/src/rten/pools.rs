//! Thread pools for runs: one for each run under way.
//!
//! Runs that share a pool wait for each other's operators. Behind an endless run all others would
//! wait for ever.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rten::ThreadPool;

use crate::cores::{CoreSet, Pinned};
use crate::process::normal_priority::at_normal_priority;

/// The requirements of a run on its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolKind {
    /// The number of threads.
    pub threads: usize,
    /// The cores that the threads are bound to; `None`: unbound.
    pub cores: Option<CoreSet>,
}

impl PoolKind {
    /// Binds the calling thread, and the threads that it starts, to the cores of such a pool.
    pub(super) fn pin(&self) -> Result<Option<Pinned>, String> {
        self.cores.as_ref().map(Pinned::to).transpose()
    }
}

/// The idle pools: as many as have run at once.
#[derive(Default)]
pub(super) struct Pools {
    idle: Mutex<Vec<(PoolKind, Arc<ThreadPool>)>>,
}

impl Pools {
    /// An unused pool of this kind. The pool that was used last comes first, as its memory is in
    /// the caches. If none is idle, a new pool is made.
    pub(super) fn take(&self, kind: PoolKind) -> Arc<ThreadPool> {
        let mut idle = self.idle();
        if let Some(index) = idle.iter().rposition(|(other, _)| *other == kind) {
            return idle.remove(index).1;
        }
        drop(idle);
        at_normal_priority(move || {
            // The calling thread was bound to these cores before, and has reported a failure.
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
