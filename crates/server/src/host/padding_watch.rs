//! Whether answers of padded requests are those that they would have got alone: looked at in service, now and then, off the path of requests.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use downbeat_engine::{Lane, State};
use prometheus::IntCounter;

use super::padding::Padding;
use super::padding_check;
use crate::batch_codec::{BatchCodec, Outputs};

/// One in so many padded requests is looked at, where nobody says.
pub const EVERY: u32 = 256;

/// A padded request, and what it was answered.
struct Sample {
    /// Its inputs, not padded.
    state: State,
    rows: u32,
    length: u32,
    padded: u32,
    outputs: Outputs,
}

/// Looks at one in some padded requests of a model version, on a thread of its own that ends with it. Once an answer was wrong, requests of this version are padded
/// no more.
pub struct PaddingWatch {
    every: u32,
    seen: AtomicU32,
    off: Arc<AtomicBool>,
    /// Of one sample: while that is looked at, others are not taken.
    samples: SyncSender<Sample>,
}

/// What the thread looks at samples with.
pub struct Looker {
    pub model: String,
    pub version: String,
    pub plan: Arc<BatchCodec>,
    pub padding: Arc<Padding>,
    /// Answers that were as they would have been alone, and others.
    pub results: [IntCounter; 2],
}

impl PaddingWatch {
    /// Starts to watch, on a lane of the model of so many segments: one in `every` padded requests.
    ///
    /// # Errors
    /// If the operating system has no thread.
    pub fn start(looker: Looker, lane: Box<dyn Lane>, segments: usize, every: u32) -> anyhow::Result<Self> {
        let (samples, taken) = sync_channel(1);
        let off = Arc::new(AtomicBool::new(false));
        let told = off.clone();
        std::thread::Builder::new()
            .name("padding-watch".to_owned())
            .spawn(move || looker.work(lane, segments, &taken, &told))?;
        Ok(PaddingWatch { every, seen: AtomicU32::new(0), off, samples })
    }

    /// Whether an answer was wrong, so that nothing is padded any more.
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Relaxed)
    }

    /// Whether the next padded request is to be looked at.
    pub fn wants_next(&self) -> bool {
        !self.is_off() && self.seen.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every)
    }

    /// Takes a padded request of `rows` items, with `state` for its inputs, not padded. Passed over while another is looked at.
    pub fn offer(&self, state: State, rows: u32, length: u32, padded: u32, outputs: Outputs) {
        let _ = self.samples.try_send(Sample { state, rows, length, padded, outputs });
    }
}

impl Looker {
    fn work(self, mut lane: Box<dyn Lane>, segments: usize, samples: &Receiver<Sample>, off: &AtomicBool) {
        // Without the right to it, at normal priority.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
        while let Ok(sample) = samples.recv() {
            let Sample { state, rows, length, padded, outputs } = sample;
            let alone = std::panic::catch_unwind(AssertUnwindSafe(|| {
                let mut state = state;
                lane.run(0..segments, &mut state).map_err(|error| error.to_string())?;
                let alone = self.plan.separate(state, &[rows])?.pop().unwrap_or_default();
                self.padding.cut(&self.plan, alone, length, length)
            }));
            let alone = match alone.unwrap_or_else(|_| Err("the engine panicked".to_owned())) {
                Ok(alone) => alone,
                Err(reason) => {
                    tracing::debug!(model = %self.model, %reason, "a padded request cannot be looked at");
                    continue;
                }
            };
            let [same, different] = &self.results;
            let Some((output, alone, beside)) = padding_check::difference(&self.plan, &alone, &outputs) else {
                same.inc();
                continue;
            };
            different.inc();
            if !off.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    model = %self.model, version = %self.version, length, padded, output, alone, padded_answer = beside,
                    "an answer was wrong because its request was padded with zeros to share a batch: requests of this model are padded no more, those of \
                     different lengths run alone from now on, and answers before this one may have been wrong. Leave `pad` out for it"
                );
            }
        }
    }
}
