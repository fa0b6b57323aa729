//! The decision log of the requests of pipelines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::Time;
use downbeat_core::journal::Journal;
use downbeat_core::journal::pipelines::{PipelineBook, PipelineInput, PipelineSpec, StepSpec};
use downbeat_driver::{LOG_BUFFER, LogSink, hand_over};
use parking_lot::Mutex;

/// Writes down the requests of pipelines. A server without a decision log has none of these.
///
/// **Bound.** Some tens of thousands of bytes wait here, and then the log's own bound holds. The book
/// has an entry for each request of a pipeline in flight.
#[derive(Debug)]
pub struct PipelineLog {
    journal: Mutex<Journal<PipelineBook>>,
    sink: Arc<dyn LogSink>,
    next: AtomicU32,
}

impl PipelineLog {
    /// Begins the log.
    pub fn new(sink: Arc<dyn LogSink>) -> PipelineLog {
        PipelineLog { journal: Mutex::new(Journal::on(PipelineBook::new())), sink, next: AtomicU32::new(0) }
    }

    /// Writes down a pipeline. Returns its number.
    pub fn pipeline(&self, now: Time, spec: PipelineSpec) -> u32 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.note(now, PipelineInput::Pipeline(number, Box::new(spec)));
        number
    }

    /// Writes down a further step of a pipeline of code.
    pub fn callee(&self, now: Time, pipeline: u32, step: StepSpec) {
        self.note(now, PipelineInput::Callee(pipeline, step));
    }

    /// Writes down what happened.
    pub fn note(&self, now: Time, input: PipelineInput) {
        let mut journal = self.journal.lock();
        // The book refuses an input only if the server has a defect. The refusal is in the log.
        let _ = journal.apply(now, input);
        hand_over(&*self.sink, &mut journal, LOG_BUFFER);
    }

    /// Passes on the unwritten part.
    pub fn flush(&self) {
        hand_over(&*self.sink, &mut self.journal.lock(), 1);
    }
}
