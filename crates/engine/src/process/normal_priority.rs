//! Starts threads at the priority of the process. The priority of the calling thread does not
//! matter.
//!
//! A thread inherits the priority of the thread that starts it, and without a privilege it cannot
//! raise the priority afterwards. Models are loaded at a low priority. Example: the load of a
//! second model adds a thread that runs batches. If the loading thread started it, it would keep
//! nice 10 for ever. It would then get a tenth of a busy core.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};

type Work = Box<dyn FnOnce() + Send>;

/// The way to the starter thread; `None`: the operating system had no thread left.
static WORKER: OnceLock<Option<Mutex<Sender<Work>>>> = OnceLock::new();

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// From now on [`at_normal_priority`] works at the priority of the calling thread. The first call
/// counts.
pub fn begin_normal_priority() {
    WORKER.get_or_init(|| {
        let (sender, orders) = channel::<Work>();
        let work = move || {
            IS_WORKER.set(true);
            orders.into_iter().for_each(|work| work());
        };
        std::thread::Builder::new().name("starter".to_owned()).spawn(work).ok().map(|_| Mutex::new(sender))
    });
}

/// Does `work` on a thread of normal priority, waits for its end, and returns its result. `work`
/// should be brief. Threads that `work` starts inherit the normal priority. Before
/// [`begin_normal_priority`] the calling thread does the work.
pub fn at_normal_priority<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let Some(Some(worker)) = WORKER.get().filter(|_| !IS_WORKER.get()) else { return work() };
    let (reply, done) = channel();
    let order = Box::new(move || {
        // The calling thread waits for the reply.
        let _ = reply.send(catch_unwind(AssertUnwindSafe(work)));
    });
    let sent = worker.lock().unwrap_or_else(PoisonError::into_inner).send(order);
    match sent.ok().and_then(|()| done.recv().ok()) {
        Some(Ok(done)) => done,
        Some(Err(panic)) => resume_unwind(panic),
        None => unreachable!("the starter thread lives as long as the process, and answers each order"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::process::{getpriority_process, setpriority_process};
    use rustix::thread::gettid;

    fn nice() -> i32 {
        getpriority_process(Some(gettid())).unwrap()
    }

    #[test]
    fn threads_that_a_slow_thread_asks_for_have_the_normal_priority() {
        begin_normal_priority();
        let normal = nice();
        let ask = move || {
            setpriority_process(Some(gettid()), normal + 5).unwrap();
            let inherited = std::thread::spawn(nice).join().unwrap();
            let asked = at_normal_priority(|| std::thread::spawn(nice)).join().unwrap();
            (inherited, asked, at_normal_priority(|| at_normal_priority(nice)))
        };
        assert_eq!(std::thread::spawn(ask).join().unwrap(), (normal + 5, normal, normal));
        let panics = || at_normal_priority(|| panic!("of the work"));
        assert!(std::thread::spawn(panics).join().is_err());
        assert_eq!(at_normal_priority(|| 7), 7, "the thread is there still");
    }
}
