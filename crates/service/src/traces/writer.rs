//! The writers of traces: Triton's files, spans for a collector, and the access log.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::record::TraceRecord;

/// The writers of records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// Triton's files of traces.
    File,
    /// Spans for a collector of OpenTelemetry.
    Otlp,
    /// The access log.
    Access,
}

impl Writer {
    /// All writers.
    pub const ALL: [Writer; 3] = [Writer::File, Writer::Otlp, Writer::Access];

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Writer::File => "file",
            Writer::Otlp => "otlp",
            Writer::Access => "access_log",
        }
    }

    pub(super) fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A message to the thread of a writer.
pub enum Job {
    /// Write this record.
    Record(Arc<TraceRecord>),
    /// Write everything, then answer.
    Flush(SyncSender<()>),
}

/// Puts records into a form, and brings them to their destination.
pub trait Writes: Send + 'static {
    /// Writes records.
    ///
    /// # Errors
    /// A text, if they are lost.
    fn write(&mut self, records: &[Arc<TraceRecord>]) -> Result<(), String>;

    /// Writes what the writer still holds.
    ///
    /// # Errors
    /// A text, if it is lost.
    fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }
}
