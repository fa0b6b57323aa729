//! Looks at answers in service, now and then: would the request have got the same answer alone?
//!
//! One thread checks the answers of all models, off the path of requests. A check at load tries few
//! inputs. For other inputs a model may still mix the rows of a batch, or heed the zeros behind a
//! padded request.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use downbeat_engine::{Lane, Model, Place, State};
use parking_lot::Mutex;
use prometheus::IntCounter;

use super::padding::Padding;
use crate::request::batch_codec::{BatchCodec, Outputs};
use crate::run::difference::difference;

/// The watch repeats one in this many padded requests unless the settings give another number.
pub const PADDED_EVERY: u32 = 256;

/// An answered request, to be run once more alone.
struct Sample {
    watched: Arc<Watched>,
    /// The request's inputs, not padded.
    state: State,
    rows: u32,
    length: u32,
    padded: u32,
    outputs: Outputs,
}

/// The thread that looks at answers. The first watch starts the thread, and the thread ends with
/// the last watch.
#[derive(Default)]
pub struct AnswerLooker {
    /// Holds one sample.
    samples: OnceLock<SyncSender<Sample>>,
    /// While the thread looks at a sample, the watches pass over others.
    is_busy: Arc<AtomicBool>,
}

/// The suspicion of a watch against its model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Suspicion {
    /// Zeros behind a request change its answer.
    Padding,
    /// The requests beside it change its answer.
    Rows,
}

/// A model version whose answers are looked at.
pub struct Watched {
    pub suspicion: Suspicion,
    pub model: String,
    pub version: String,
    pub codec: Arc<BatchCodec>,
    pub padding: Option<Arc<Padding>>,
    /// The loaded model.
    pub engine: Arc<dyn Model>,
    /// The place of the lane that repeats requests.
    pub place: Place,
    /// Counts the answers that a repeated run confirmed, and the answers that it contradicted.
    pub results: [IntCounter; 2],
    /// Whether a wrong answer ends the sharing of batches. If the user asked for batches, it is
    /// only logged.
    pub acts: bool,
    /// The lane that repeats requests. The first sample makes the lane.
    pub lane: Mutex<Option<Box<dyn Lane>>>,
    /// An answer of a shared batch was wrong once. Only a second wrong answer counts: the first may
    /// be a tie that another batch size rounds otherwise.
    pub is_suspected: AtomicBool,
    /// Whether requests are kept apart since an answer was wrong.
    pub is_off: AtomicBool,
}

/// Passes one in `every` requests of a model version to the thread. Once an answer was wrong,
/// requests of this version are padded no more, or share no batch any more.
pub struct AnswerWatch {
    watched: Arc<Watched>,
    every: u32,
    seen: AtomicU32,
    samples: SyncSender<Sample>,
    is_busy: Arc<AtomicBool>,
}

impl AnswerLooker {
    /// Starts to watch a model version: one in `every` of its requests, at least 1.
    ///
    /// # Errors
    /// If the operating system has no thread.
    pub fn watch(&self, watched: Watched, every: u32) -> std::io::Result<AnswerWatch> {
        let samples = match self.samples.get() {
            Some(samples) => samples.clone(),
            None => {
                let ((samples, taken), is_busy) = (sync_channel(1), self.is_busy.clone());
                std::thread::Builder::new().name("answer-watch".to_owned()).spawn(move || look(&taken, &is_busy))?;
                // Two loads may start two threads at once. The second thread ends, as its sender is
                // dropped in this place.
                self.samples.get_or_init(|| samples).clone()
            }
        };
        let (watched, seen, is_busy) = (Arc::new(watched), AtomicU32::new(0), self.is_busy.clone());
        Ok(AnswerWatch { watched, every, seen, samples, is_busy })
    }
}

impl AnswerWatch {
    /// Whether an answer was wrong, so that requests are kept apart.
    pub fn is_off(&self) -> bool {
        self.watched.is_off.load(Ordering::Relaxed)
    }

    /// Whether the thread should look at the next request.
    pub fn wants_next(&self) -> bool {
        let is_next = !self.is_off() && self.seen.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every);
        is_next && !self.is_busy.load(Ordering::Relaxed)
    }

    /// Takes a request of `rows` items; `state` holds its inputs, not padded. The watch passes over
    /// the request while the thread looks at another.
    pub fn offer(&self, state: State, rows: u32, length: u32, padded: u32, outputs: Outputs) {
        let watched = self.watched.clone();
        // Set before the thread can be done with the sample: otherwise the flag would stay set.
        self.is_busy.store(true, Ordering::Relaxed);
        // The channel refuses the sample if another waits; the thread is free after that one.
        let _ = self.samples.try_send(Sample { watched, state, rows, length, padded, outputs });
    }
}

/// Looks at samples until the last sender is dropped.
fn look(samples: &Receiver<Sample>, is_busy: &AtomicBool) {
    // Without the right to it, at normal priority.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
    while let Ok(sample) = samples.recv() {
        let watched = sample.watched.clone();
        let looked = std::panic::catch_unwind(AssertUnwindSafe(|| watched.look_at(sample)));
        let looked = looked.unwrap_or_else(|_| Err("the engine panicked".to_owned()));
        if let Err(reason) = looked {
            tracing::debug!(model = %watched.model, %reason, "an answer cannot be looked at");
        }
        is_busy.store(false, Ordering::Relaxed);
    }
}

impl Watched {
    fn look_at(&self, Sample { mut state, rows, length, padded, outputs, .. }: Sample) -> Result<(), String> {
        let copy = state.copy().map_err(|error| error.to_string())?;
        let first = self.alone(copy, rows, length)?;
        let [same, different] = &self.results;
        let Some((output, alone, beside)) = difference(&self.codec, &first, &outputs) else {
            same.inc();
            return Ok(());
        };
        // A model that draws at random answers one request in two ways. Batches are not to blame
        // then.
        let second = self.alone(state, rows, length)?;
        if difference(&self.codec, &first, &second).is_some() {
            return Err(format!("output '{output}' differs from run to run"));
        }
        different.inc();
        let is_first = !self.is_suspected.swap(true, Ordering::Relaxed);
        if is_first && self.suspicion == Suspicion::Rows {
            return Ok(());
        }
        if !self.is_off.swap(self.acts, Ordering::Relaxed) {
            self.complain((length, padded), (&output, alone, beside));
        }
        Ok(())
    }

    /// The answer to a request that runs alone.
    fn alone(&self, mut state: State, rows: u32, length: u32) -> Result<Outputs, String> {
        let mut lane = self.lane.lock();
        let lane = match &mut *lane {
            Some(lane) => lane,
            none => none.insert(self.engine.lane_at(self.place).map_err(|error| error.to_string())?),
        };
        lane.run(0..self.engine.segments(), &mut state).map_err(|error| error.to_string())?;
        let alone = self.codec.separate(state, &[rows])?.pop().unwrap_or_default();
        match &self.padding {
            Some(padding) => padding.cut(&self.codec, alone, length, length),
            None => Ok(alone),
        }
    }

    fn complain(&self, (length, padded): (u32, u32), (output, alone, beside): (&str, f64, f64)) {
        let Watched { model, version, .. } = self;
        match self.suspicion {
            Suspicion::Padding => tracing::error!(
                %model, %version, length, padded, output, alone, padded_answer = beside,
                "an answer was wrong because its request was padded with zeros to share a batch: requests of this model are padded no more, those of \
                 different lengths run alone from now on, and answers before this one may have been wrong. Leave `pad` out for it"
            ),
            Suspicion::Rows if self.acts => tracing::error!(
                %model, %version, output, alone, batched_answer = beside,
                "an answer was wrong because its request shared a batch: requests of this model run alone from now on, and answers before this one may \
                 have been wrong"
            ),
            Suspicion::Rows => tracing::error!(
                %model, %version, output, alone, batched_answer = beside,
                "an answer was wrong because its request shared a batch, as the configuration asks. Without max_batch_size in config.pbtxt and \
                 `batching` in [models.{model}] of downbeat.toml, requests of this model run alone"
            ),
        }
    }
}
