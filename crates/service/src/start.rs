//! The start and the end of every process that serves: its log, its runtime, its scratch files.

use downbeat_engine::scratch;

use crate::logging;
use crate::options::ServerOptions;

/// Most threads that accept connections and do other work than inference. Requests are on the
/// frontends' threads, models run on lanes.
const MOST_SERVER_THREADS: usize = 4;

/// Starts the log, logs the notices of the options, and runs on a new runtime until `run` ends.
///
/// # Errors
/// If the log or the runtime cannot be started; the errors of `run`.
pub fn start<R: Future<Output = anyhow::Result<()>>>(
    options: ServerOptions,
    run: impl FnOnce(ServerOptions) -> R,
) -> anyhow::Result<()> {
    let _flushed = logging::start(&options.log)?;
    for notice in &options.notices {
        tracing::warn!("{notice}");
    }
    scratch::clean();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.min(MOST_SERVER_THREADS))
        .enable_all()
        .thread_name("server")
        .build()?;
    let outcome = runtime.block_on(run(options));
    scratch::close();
    outcome
}
