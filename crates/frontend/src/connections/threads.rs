//! The threads that connections are on.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use downbeat_host::request::reply;
use downbeat_service::work::turn_end;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Answers that are delivered before connections get their turn.
const MOST_AT_ONCE: usize = 256;

/// How long a thread that works for connections beside their loop waits for more work.
const HELPERS_LIVE: Duration = Duration::from_secs(1);

thread_local! {
    /// The runtime to which a thread of connections hands slow work.
    static OTHERS: RefCell<Option<Handle>> = const { RefCell::new(None) };
}

/// Threads with an event loop each. A connection stays on one thread, so that a request is read,
/// answered and (if it is brief) run without a change of threads. No thread wakes to look for the
/// work of another.
#[derive(Debug)]
pub struct FrontendThreads {
    loops: Vec<(Handle, oneshot::Sender<()>)>,
    next: AtomicUsize,
}

impl FrontendThreads {
    /// Starts `threads` threads, at least one. The calling runtime does their slow work. When this
    /// object is dropped, the threads end with their connections.
    ///
    /// # Errors
    /// If the operating system has no thread or no file descriptor left.
    pub fn start(threads: usize) -> io::Result<Self> {
        let start = |_| {
            let runtime = Builder::new_current_thread()
                .on_thread_park(turn_end::end)
                // A thread keeps the memory that its work left behind for as long as it lives.
                .thread_keep_alive(HELPERS_LIVE)
                .enable_all()
                .build()?;
            let (end, ended) = oneshot::channel();
            let (handle, others) = (runtime.handle().clone(), Handle::current());
            let life = move || {
                OTHERS.set(Some(others));
                turn_end::follow(turn_end::LONGEST);
                runtime.block_on(deliver(ended));
            };
            std::thread::Builder::new().name("frontend".to_owned()).spawn(life)?;
            Ok((handle, end))
        };
        Ok(FrontendThreads {
            loops: (0..threads.max(1)).map(start).collect::<io::Result<_>>()?,
            next: AtomicUsize::new(0),
        })
    }

    /// Has each thread do `work`.
    pub(super) fn each(&self, work: fn()) {
        for (handle, _) in &self.loops {
            handle.spawn(async move { work() });
        }
    }

    /// The event loop of each thread.
    pub(super) fn event_loops(&self) -> impl Iterator<Item = Handle> {
        self.loops.iter().map(|(handle, _)| handle.clone())
    }

    /// The event loop of the next connection: each in turn.
    pub(super) fn next(&self) -> Option<&Handle> {
        let next = self.next.fetch_add(1, Relaxed);
        self.loops.get(next % self.loops.len().max(1)).map(|(handle, _)| handle)
    }
}

/// Delivers the answers that come to the requests of this thread, until the threads' owner has
/// gone.
async fn deliver(mut ended: oneshot::Receiver<()>) {
    let mut answers = reply::of_this_thread();
    let mut some = Vec::with_capacity(MOST_AT_ONCE);
    loop {
        tokio::select! {
            _ = &mut ended => return,
            _ = answers.recv_many(&mut some, MOST_AT_ONCE) => {
                some.drain(..).flatten().for_each(reply::Delivery::deliver);
                // While answers come one after another the thread never waits for events, which
                // ends a turn otherwise.
                turn_end::end();
            }
        }
    }
}

/// Does `work` on a runtime where it holds up no connection: work that looks at files, or waits for
/// a lock that is held for that. Dropping the future ends the work.
pub async fn beside<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let Some(others) = OTHERS.with_borrow(Clone::clone) else { return work.await };
    let mut task = JoinSet::new();
    task.spawn_on(work, &others);
    match task.join_next().await {
        Some(Ok(done)) => done,
        Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime ends, and this future with it.
        Some(Err(_)) | None => std::future::pending().await,
    }
}
