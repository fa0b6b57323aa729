//! Ctrl-C ends a run early, with a report of the measurements so far.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit status of a process that SIGINT ends, as in shells.
const INTERRUPTED: i32 = 130;

/// Sets `interrupted` at the first SIGINT, and ends the process at the second.
///
/// # Errors
/// If the system gives no thread, or does not let the process catch signals.
pub fn watch(interrupted: Arc<AtomicBool>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let signal = || tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
    let mut interrupts = {
        let _inside = runtime.enter();
        signal()?
    };
    std::thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
        runtime.block_on(async {
            interrupts.recv().await;
            interrupted.store(true, Ordering::Relaxed);
            downbeat_report::note(
                "interrupted: the report on the measurements so far follows; a second Ctrl-C ends the command at once",
            );
            interrupts.recv().await;
            std::process::exit(INTERRUPTED);
        });
    })?;
    Ok(())
}
