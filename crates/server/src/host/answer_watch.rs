//! Whether answers are those that their requests would have got alone: looked at in service, now and then, off the path of requests.
//!
//! One thread looks for all models. A model that was taken to keep its rows apart may mix them for inputs that no
//! check has tried, and a model that ignores padding may heed it from some length on.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use downbeat_engine::{Lane, Model, Place, State};
use parking_lot::Mutex;
use prometheus::IntCounter;

use super::padding::Padding;
use crate::batch_codec::{BatchCodec, Outputs};
use crate::difference::difference;

/// One in so many padded requests is looked at, where the settings do not say.
pub const PADDED_EVERY: u32 = 256;

/// An answered request, to be run once more alone.
struct Sample {
    watched: Arc<Watched>,
    /// Its inputs, not padded.
    state: State,
    rows: u32,
    length: u32,
    padded: u32,
    outputs: Outputs,
}

/// The thread that looks at answers. It starts with the first watch and ends with the last.
#[derive(Default)]
pub struct AnswerLooker {
    /// Of one sample: while that is looked at, others are not taken.
    samples: OnceLock<SyncSender<Sample>>,
}

/// What a watch suspects of a model.
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
    pub plan: Arc<BatchCodec>,
    pub padding: Option<Arc<Padding>>,
    /// What runs it, and where.
    pub engine: Arc<dyn Model>,
    pub place: Place,
    /// Answers that were as they would have been alone, and others.
    pub results: [IntCounter; 2],
    /// Whether requests are kept apart once an answer was wrong. A user who decided otherwise only reads of it.
    pub acts: bool,
    /// The lane that requests run on once more, from the first of them on.
    pub lane: Mutex<Option<Box<dyn Lane>>>,
    /// An answer was wrong.
    pub is_off: AtomicBool,
}

/// Looks at one in some requests of a model version. Once an answer was wrong, requests of this version are padded
/// no more, or share no batch any more.
pub struct AnswerWatch {
    watched: Arc<Watched>,
    every: u32,
    seen: AtomicU32,
    samples: SyncSender<Sample>,
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
                let (samples, taken) = sync_channel(1);
                std::thread::Builder::new().name("answer-watch".to_owned()).spawn(move || look(&taken))?;
                // A second thread, of a load at the same moment, ends as nobody can send to it.
                self.samples.get_or_init(|| samples).clone()
            }
        };
        Ok(AnswerWatch { watched: Arc::new(watched), every, seen: AtomicU32::new(0), samples })
    }
}

impl AnswerWatch {
    /// Whether an answer was wrong, so that requests are kept apart.
    pub fn is_off(&self) -> bool {
        self.watched.is_off.load(Ordering::Relaxed)
    }

    /// Whether the next request is to be looked at.
    pub fn wants_next(&self) -> bool {
        !self.is_off() && self.seen.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every)
    }

    /// Takes a request of `rows` items, with `state` for its inputs, not padded. Passed over while another is looked at.
    pub fn offer(&self, state: State, rows: u32, length: u32, padded: u32, outputs: Outputs) {
        let watched = self.watched.clone();
        let _ = self.samples.try_send(Sample { watched, state, rows, length, padded, outputs });
    }
}

/// Looks at samples until nobody can send one.
fn look(samples: &Receiver<Sample>) {
    // Without the right to it, at normal priority.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
    while let Ok(sample) = samples.recv() {
        let watched = sample.watched.clone();
        let looked = std::panic::catch_unwind(AssertUnwindSafe(|| watched.look_at(sample)));
        let looked = looked.unwrap_or_else(|_| Err("the engine panicked".to_owned()));
        if let Err(reason) = looked {
            tracing::debug!(model = %watched.model, %reason, "an answer cannot be looked at");
        }
    }
}

impl Watched {
    fn look_at(&self, Sample { mut state, rows, length, padded, outputs, .. }: Sample) -> Result<(), String> {
        let copy = state.copy().map_err(|error| error.to_string())?;
        let first = self.alone(copy, rows, length)?;
        let [same, different] = &self.results;
        let Some((output, alone, beside)) = difference(&self.plan, &first, &outputs) else {
            same.inc();
            return Ok(());
        };
        // A model that answers one request in two ways draws at random: that says nothing about batches.
        let second = self.alone(state, rows, length)?;
        if difference(&self.plan, &first, &second).is_some() {
            return Err(format!("output '{output}' differs from run to run"));
        }
        different.inc();
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
        let alone = self.plan.separate(state, &[rows])?.pop().unwrap_or_default();
        match &self.padding {
            Some(padding) => padding.cut(&self.plan, alone, length, length),
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
                "an answer was wrong because its request shared a batch, as the configuration of this model asks. Remove max_batch_size from its \
                 config.pbtxt and `batching` from [models.{model}] of downbeat.toml, and its requests run alone"
            ),
        }
    }
}
