//! The thread of a writer of traces.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::Traces;
use super::writer::{Job, Writer, Writes};

/// A writer waits this long for further records before it writes.
const GATHERS: Duration = Duration::from_millis(50);
/// Records that are written together, at most.
const MOST_TOGETHER: usize = 512;

/// Starts the thread of a writer, which gets records from now on.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(traces: &Arc<Traces>, writer: Writer, writes: impl Writes) -> std::io::Result<()> {
    let (jobs, its) = (traces.attach(writer), traces.clone());
    let run = move || run(&its, writer, &jobs, writes);
    std::thread::Builder::new().name(format!("traces-{}", writer.label())).spawn(run)?;
    Ok(())
}

/// The life of the thread. It ends with the traces.
fn run(traces: &Traces, writer: Writer, jobs: &Receiver<Job>, mut writes: impl Writes) {
    let mut records = Vec::new();
    while let Ok(job) = jobs.recv() {
        let mut flush = None;
        let mut next = Ok(job);
        loop {
            match next {
                Ok(Job::Record(record)) => records.push(record),
                Ok(Job::Flush(done)) => flush = Some(done),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
            if flush.is_some() || records.len() >= MOST_TOGETHER {
                break;
            }
            next = jobs.recv_timeout(GATHERS);
        }
        let count = records.len() as u64;
        match writes.write(&records) {
            Ok(()) => traces.written(writer, count),
            Err(error) => {
                traces.lost(writer, count);
                tracing::warn!(writer = writer.label(), traces = count, "traces are lost: {error}");
            }
        }
        records.clear();
        if let Some(done) = flush {
            if let Err(error) = writes.flush() {
                tracing::warn!(writer = writer.label(), "the last traces are lost: {error}");
            }
            // The asker may have given up.
            let _ = done.try_send(());
        }
    }
}
