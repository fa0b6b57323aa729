//! Work that would hold up the event loop, done beside it by few enough threads that requests of others get their turn.

use std::future::{Future, ready};
use std::sync::LazyLock;

use futures_util::future::Either;
use tokio::sync::Semaphore;

use crate::error::ServiceError;

/// Bytes that are parsed or written in about a millisecond: from here on that is done beside the event loop. Handing
/// over costs some tens of microseconds, which small requests do not pay.
pub const PARSE_FROM: usize = 128 << 10;
/// The same for bytes that are only copied or looked at once.
pub const COPY_FROM: usize = 2 << 20;

/// Half of the cores: the event loop and the engines keep the others. What waits holds its part of the budget of bytes,
/// which bounds the queue.
static TURNS: LazyLock<Semaphore> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Semaphore::new((cores / 2).max(1))
});

/// Runs `work` beside the event loop. If the caller gives up while it runs, it runs to its end.
///
/// # Errors
/// `Internal` if it panicked: a defect.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ServiceError> {
    let lost = |what: &dyn std::fmt::Display| ServiceError::Internal(format!("a worker stopped: {what}"));
    let turn = TURNS.acquire().await.map_err(|closed| lost(&closed))?;
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    done.await.map_err(|error| lost(&error))
}

/// Runs `work` at once, or beside the event loop if it is `heavy`.
///
/// # Errors
/// As [`run`].
pub fn run_if<T: Send + 'static>(
    heavy: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, ServiceError>> + Send {
    // Neither the work nor the way beside the loop is kept in the request's future, which small requests would move for nothing.
    if heavy { Either::Left(Box::pin(run(work))) } else { Either::Right(ready(Ok(work()))) }
}
