//! Work on large bodies, done beside the event loop in turns that `work_pool.rs` shares out.

use std::future::{Future, ready};
use std::sync::LazyLock;

use downbeat_core::{Duration, Time};
use futures_util::future::Either;

use crate::client::Client;
use crate::error::ServiceError;
use crate::work::work_line::path_by_size;
use crate::work::work_pool::{Place, WorkPool};

/// Bytes that are parsed or written in about a millisecond: from here on that is done beside the
/// event loop. Handing over costs some tens of microseconds, which small requests do not pay.
pub const PARSE_FROM: usize = 128 << 10;
/// The same bound for bytes that are only copied or scanned.
pub const COPY_FROM: usize = 2 << 20;

/// Half of the cores: the event loop and the engines keep the others.
static POOL: LazyLock<WorkPool> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    WorkPool::new("large", cores / 2)
});

tokio::task_local! {
    /// The sender of the request that the task answers, if the service may have large work for it.
    static SENDER: Client;
}

/// Runs `answer` with its sender known to [`sender`].
pub async fn with_sender<T>(sender: Client, answer: impl Future<Output = T>) -> T {
    SENDER.scope(sender, answer).await
}

/// The sender of the request that this task answers.
pub fn sender() -> Client {
    SENDER.try_with(|sender| *sender).unwrap_or_default()
}

/// Runs work of `client` on about `bytes` bytes beside the event loop. Dropping the future ends the
/// work at its next step.
///
/// # Errors
/// `TooLarge` if the work used more time than work may; `Internal` if the work panicked, or the
/// system has no thread left.
pub async fn run<T: Send + 'static>(
    client: Client,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    let path = path_by_size(client, bytes as u64);
    POOL.run(Place { path, deadline: Time::MAX, takes: Duration::ZERO }, work).await
}

/// Runs `work` at once, or as [`run`] does if it is `heavy`.
///
/// # Errors
/// The errors of [`run`].
pub fn run_if<T: Send + 'static>(
    heavy: bool,
    client: Client,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, ServiceError>> + Send {
    // The request's future contains neither the work nor the boxed future: small requests would
    // move their bytes for nothing.
    if heavy { Either::Left(Box::pin(run(client, bytes, work))) } else { Either::Right(ready(Ok(work()))) }
}
