//! The threads that pictures and texts are made into tensors on.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use downbeat_core::{Duration, Time};
use downbeat_engine::at_normal_priority;
use parking_lot::{Condvar, Mutex};

/// The threads that pictures and texts are made into tensors on, for all models, and what waits for them.
///
/// **Order.** The earliest deadline first, equal ones in the order in which they came: as requests wait in their model's queue, so that what is made
/// first is what leaves first.
///
/// **Bound.** What waits holds its items' bytes, encoded and as they will be, of the budget of all requests, and its places in its model's
/// queue; who has neither does not come here.
///
/// **Threads.** One fewer than there are cores unless somebody says, so that one is left to frontends and engines.
#[derive(Debug)]
pub struct PreprocessPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    line: Mutex<Line>,
    wake: Condvar,
    threads: u32,
}

/// What waits, by deadline and then by number.
#[derive(Default)]
struct Line {
    waiting: BTreeMap<(Time, u64), Job>,
    /// How many threads are at work, and how long on what they have.
    busy: u32,
    busy_with: Duration,
    next: u64,
    stopped: bool,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} wait, {} are at work", self.waiting.len(), self.busy)
    }
}

struct Job {
    takes: Duration,
    work: Box<dyn FnOnce() + Send>,
}

impl PreprocessPool {
    /// Starts so many threads; 0: one fewer than there are cores, at least one.
    ///
    /// # Errors
    /// If the operating system has none left.
    pub fn start(threads: usize) -> std::io::Result<Arc<Self>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { (cores - 1).max(1) } else { threads };
        let threads = u32::try_from(threads).unwrap_or(u32::MAX);
        let shared = Arc::new(Shared { line: Mutex::default(), wake: Condvar::new(), threads });
        let pool = Arc::new(PreprocessPool { shared: shared.clone() });
        for number in 0..threads {
            let its = shared.clone();
            let thread = std::thread::Builder::new().name(format!("preprocess-{number}"));
            at_normal_priority(move || thread.spawn(move || its.work()))?;
        }
        Ok(pool)
    }

    /// How long what came now with this deadline would wait: nothing where a thread is idle.
    pub fn wait(&self, deadline: Time) -> Duration {
        let line = self.shared.line.lock();
        if line.waiting.is_empty() && line.busy < self.shared.threads {
            return Duration::ZERO;
        }
        let before = line.waiting.range(..=(deadline, u64::MAX)).map(|(_, job)| job.takes);
        let all = before.fold(line.busy_with, |sum, takes| sum + takes);
        Duration::from_nanos(all.as_nanos() / u64::from(self.shared.threads))
    }

    /// Has `work` done, which will probably take so long.
    pub fn submit(&self, deadline: Time, takes: Duration, work: impl FnOnce() + Send + 'static) {
        let mut line = self.shared.line.lock();
        let number = line.next;
        line.next += 1;
        line.waiting.insert((deadline, number), Job { takes, work: Box::new(work) });
        drop(line);
        self.shared.wake.notify_one();
    }
}

impl Drop for PreprocessPool {
    fn drop(&mut self) {
        self.shared.line.lock().stopped = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    /// The life of a thread.
    fn work(&self) {
        let mut line = self.line.lock();
        loop {
            if line.stopped {
                return;
            }
            let Some((_, Job { takes, work })) = line.waiting.pop_first() else {
                self.wake.wait(&mut line);
                continue;
            };
            line.busy += 1;
            line.busy_with += takes;
            drop(line);
            // A decoder that panics fails the request, whose sender is dropped with it, and no other.
            let ended = catch_unwind(AssertUnwindSafe(work));
            if ended.is_err() {
                tracing::error!("a picture or text made its decoder panic: this is a defect");
            }
            line = self.line.lock();
            line.busy -= 1;
            line.busy_with = Duration::from_nanos(line.busy_with.as_nanos().saturating_sub(takes.as_nanos()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// A pool whose one thread is at work until what is given back is dropped.
    fn busy_pool() -> (Arc<PreprocessPool>, mpsc::Sender<()>) {
        let pool = PreprocessPool::start(1).unwrap();
        let (release, released) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        pool.submit(at(0), MS, move || {
            begun.send(()).unwrap();
            let _ = released.recv();
        });
        begins.recv().unwrap();
        (pool, release)
    }

    #[test]
    fn the_earliest_deadline_is_first_and_equal_ones_in_the_order_they_came() {
        let (pool, release) = busy_pool();
        let (done, order) = mpsc::channel();
        for (name, deadline) in [("c", at(30)), ("a", at(10)), ("b", at(20)), ("b2", at(20)), ("never", Time::MAX)] {
            let done = done.clone();
            pool.submit(deadline, MS, move || done.send(name).unwrap());
        }
        drop((release, done));
        assert_eq!(order.iter().collect::<Vec<_>>(), ["a", "b", "b2", "c", "never"]);
    }

    #[test]
    fn what_comes_waits_for_what_is_more_urgent_and_not_at_all_where_a_thread_is_idle() {
        let pool = PreprocessPool::start(1).unwrap();
        assert_eq!(pool.wait(at(10)), Duration::ZERO);
        let (pool, release) = busy_pool();
        assert_eq!(pool.wait(at(10)), MS, "what is at work");
        pool.submit(at(20), Duration::from_millis(5), || ());
        assert_eq!((pool.wait(at(10)), pool.wait(at(20))), (MS, Duration::from_millis(6)));
        drop(release);
    }

    #[test]
    fn a_panic_ends_its_work_alone() {
        let (pool, release) = busy_pool();
        let (done, ends) = mpsc::channel();
        pool.submit(at(1), MS, || panic!("on purpose"));
        pool.submit(at(2), MS, move || done.send(()).unwrap());
        drop(release);
        assert!(ends.recv().is_ok());
    }
}
