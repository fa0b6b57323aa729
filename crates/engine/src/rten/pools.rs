//! Thread pools for runs: one for each run that is going on.
//!
//! Runs that share a pool wait for each other's operators, and behind a run that does not end everything would wait for ever.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rten::ThreadPool;

/// Pools that no run uses at the moment, as many as have run at once.
pub(super) struct Pools {
    idle: Mutex<Vec<(usize, Arc<ThreadPool>)>>,
    /// To the thread that makes pools; `None`: there is none.
    maker: Option<Mutex<Sender<Order>>>,
}

/// So many threads are wanted.
type Order = (usize, Sender<Arc<ThreadPool>>);

impl Default for Pools {
    /// No pools yet. Their threads will have the priority of the calling thread: those of a load are low.
    fn default() -> Self {
        let (orders, taken) = channel::<Order>();
        let make = move || {
            while let Ok((threads, reply)) = taken.recv() {
                // Who ordered it waits.
                let _ = reply.send(Arc::new(ThreadPool::with_num_threads(threads)));
            }
        };
        let maker = std::thread::Builder::new().name("rten-pools".to_owned()).spawn(make).ok();
        Pools { idle: Mutex::default(), maker: maker.map(|_| Mutex::new(orders)) }
    }
}

impl Pools {
    /// A pool of `threads` threads that nobody else uses: the one that was used last, whose memory is in the caches, or a new one.
    pub(super) fn take(&self, threads: usize) -> Arc<ThreadPool> {
        let mut idle = self.idle();
        if let Some(index) = idle.iter().rposition(|(n, _)| *n == threads) {
            return idle.remove(index).1;
        }
        drop(idle);
        self.order(threads).unwrap_or_else(|| Arc::new(ThreadPool::with_num_threads(threads)))
    }

    /// Leaves a pool to the next run.
    pub(super) fn give_back(&self, threads: usize, pool: Arc<ThreadPool>) {
        self.idle().push((threads, pool));
    }

    fn order(&self, threads: usize) -> Option<Arc<ThreadPool>> {
        let (reply, made) = channel();
        let maker = self.maker.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        maker.send((threads, reply)).ok()?;
        drop(maker);
        made.recv().ok()
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(usize, Arc<ThreadPool>)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
