//! The first runs of lanes, before they are in service: no client waits while an engine allocates
//! and plans.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::device::LaneSpec;
use downbeat_engine::{Engine, Fill, Lane, Model, RunError, STOPPED, State, Stop};
use downbeat_host::device::WarmUpLanes;
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, LARGEST_TRIAL, PROFILED_LENGTH};
use downbeat_repository::{ModelDefinition, Warmup};
use downbeat_service::clock::Clock;

use crate::load::device_budget::DeviceBudget;

/// A request that a lane is warmed up with.
pub struct Sample {
    /// The sample's name in the configuration; `None`: the request is made up.
    pub name: Option<String>,
    /// How many times the request is run.
    pub count: u32,
    /// The request.
    pub request: Admitted,
}

/// The samples of a model's configuration, or a made-up request if there are none.
///
/// # Errors
/// If one does not suit the model.
pub fn samples(definition: &ModelDefinition, codec: &BatchCodec) -> anyhow::Result<Arc<[Sample]>> {
    let of = |sample: &Warmup| {
        let mut request = sample.request(&definition.name).map_err(anyhow::Error::msg)?;
        let request = codec.admit(&mut request);
        let request = request.map_err(|error| anyhow::anyhow!("model_warmup '{}': {error}", sample.name))?;
        anyhow::Ok(Sample { name: Some(sample.name.clone()), count: sample.count, request })
    };
    if definition.warmups.is_empty() {
        let request = codec.trial(PROFILED_LENGTH).ok();
        return Ok(request.map(|request| Sample { name: None, count: 1, request }).into_iter().collect());
    }
    definition.warmups.iter().map(of).collect()
}

/// Warms up lanes that are made beside serving ones, within the same memory limit.
pub fn later(
    engine: Arc<dyn Engine>,
    name: String,
    model: &Arc<dyn Model>,
    codec: &Arc<BatchCodec>,
    samples: &Arc<[Sample]>,
    limit: Option<u64>,
) -> WarmUpLanes {
    let (model, codec, samples) = (model.clone(), codec.clone(), samples.clone());
    Arc::new(move |device, specs, lanes| {
        let budget = DeviceBudget::before(&*engine, &[device], limit);
        // Which sizes the model runs was settled when it was loaded.
        let (wanted, run) = (Vec::new(), Some(Vec::new()));
        let mut warm_up = WarmUp { name: &name, model: &*model, codec: &codec, budget: &budget, wanted, run };
        warm_up.lanes(&samples, device, specs, lanes)
    })
}

/// Warms up the lanes of a model, within its limits of device memory.
pub struct WarmUp<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The loaded model.
    pub model: &'a dyn Model,
    /// Joins requests into batches.
    pub codec: &'a BatchCodec,
    /// The GPU memory that the load may take.
    pub budget: &'a DeviceBudget<'a>,
    /// The sizes that the engine asked for, the largest first.
    pub wanted: Vec<usize>,
    /// The sizes with enough memory; `None`: the next lane will tell.
    pub run: Option<Vec<usize>>,
}

impl WarmUp<'_> {
    /// Warms up a lane that runs whole batches of any size.
    ///
    /// # Errors
    /// If a sample that was named does not run, the device is lost or out of memory, or the model
    /// takes more than it may.
    pub fn whole(&mut self, samples: &[Sample], device: usize, lane: &mut dyn Lane) -> anyhow::Result<()> {
        let segments = self.model.segments();
        self.sizes(device, self.codec.max_batch, 0.0, |state| lane.run(0..segments, state))?;
        self.with_samples(samples, lane)
    }

    /// Warms up a lane that runs whole batches, and is warm but for the samples.
    ///
    /// # Errors
    /// If a sample that was named does not run, or the device is lost or out of memory.
    pub fn with_samples(&self, samples: &[Sample], lane: &mut dyn Lane) -> anyhow::Result<()> {
        let segments = self.model.segments();
        self.samples(samples, |state| lane.run(0..segments, state))
    }

    /// Warms up the lanes of a device, each with the segments and the sizes that it will run.
    ///
    /// # Errors
    /// The errors of [`WarmUp::whole`].
    pub fn lanes(
        &mut self,
        samples: &[Sample],
        device: usize,
        specs: &[LaneSpec],
        lanes: &mut [Box<dyn Lane>],
    ) -> anyhow::Result<()> {
        let segments = self.model.segments();
        let runs = |spec: &LaneSpec| usize::from(spec.segments.first)..usize::from(spec.segments.end);
        if let Some(chain) = chain(specs, segments) {
            // Each lane has a stage: a batch goes through all stages.
            let mut through =
                |state: &mut State| chain.iter().try_for_each(|lane| lanes[*lane].run(runs(&specs[*lane]), state));
            let most = specs.iter().map(|spec| spec.max_rows).min().unwrap_or(1);
            self.sizes(device, most, 0.0, &mut through)?;
            return self.samples(samples, through);
        }
        let mut order: Vec<(&LaneSpec, &mut Box<dyn Lane>)> = specs.iter().zip(lanes).collect();
        // The largest lane first: sizes with enough memory for it leave enough for the other lanes,
        // too.
        order.sort_by_key(|(spec, _)| std::cmp::Reverse(spec.max_rows));
        let all: f64 = specs.iter().map(|spec| f64::from(spec.max_rows)).sum();
        for (spec, lane) in order {
            let others = all / f64::from(spec.max_rows.max(1)) - 1.0;
            self.sizes(device, spec.max_rows, others, |state| lane.run(0..segments, state))?;
            self.samples(samples, |state| lane.run(0..segments, state))?;
        }
        Ok(())
    }

    /// Runs batches of the sizes up to `most` that are slow the first time, each twice: an engine
    /// may take more memory on the second run. `others`: the number of later lanes of this size.
    fn sizes(
        &mut self,
        device: usize,
        most: u32,
        others: f64,
        mut run: impl FnMut(&mut State) -> Result<(), RunError>,
    ) -> anyhow::Result<()> {
        let all = self.model.sizes_to_warm(most as usize);
        let Some(bytes) = self.codec.item_bytes(PROFILED_LENGTH).filter(|_| !all.is_empty()) else {
            return self.budget.check(self.model, device);
        };
        let Ok(item) = self.codec.trial(PROFILED_LENGTH) else { return Ok(()) };
        let mut twice = |size: usize| {
            for _ in 0..2 {
                let mut state = self.codec.assemble(std::iter::repeat_n(&item, size)).map_err(anyhow::Error::msg)?;
                let Err(error) = run(&mut state) else { continue };
                anyhow::ensure!(
                    !error.of_device,
                    "a batch of {size} does not run: {error}. A smaller max_batch_size takes less memory"
                );
                // A model may refuse made-up values.
                tracing::debug!(model = self.name, size, %error, "a made-up batch does not run");
                return Ok(false);
            }
            Ok(true)
        };
        // Larger sizes are slow the first time.
        let (sizes, larger): (Vec<usize>, Vec<usize>) =
            all.iter().partition(|size| bytes.saturating_mul(**size) <= LARGEST_TRIAL);
        if self.run.is_some() {
            for size in sizes {
                if !twice(size)? {
                    break;
                }
            }
        } else {
            let run = self.budget.warm_up(self.model, device, &sizes, others, twice)?;
            if run.len() < sizes.len() {
                self.model.set_sizes(&[larger, run.clone()].concat());
            }
            if self.wanted.is_empty() {
                self.wanted = sizes;
            }
            self.run = Some(run);
        }
        self.budget.check(self.model, device)
    }

    /// Logs the memory of the model, with `lanes` lanes on each device.
    pub fn say(&self, lanes: usize) {
        let run = self.run.as_deref().unwrap_or_default();
        self.budget.say(self.name, self.model, lanes, [&self.wanted, run]);
    }

    fn samples(
        &self,
        samples: &[Sample],
        mut run: impl FnMut(&mut State) -> Result<(), RunError>,
    ) -> anyhow::Result<()> {
        for Sample { name, count, request } in samples {
            for _ in 0..*count {
                // Not every engine ends a run when told.
                anyhow::ensure!(!Stop::of_this_thread().is_stopped(), STOPPED);
                let mut state = self.codec.assemble(std::iter::once(request)).map_err(anyhow::Error::msg)?;
                match (run(&mut state), name) {
                    (Err(error), Some(name)) => anyhow::bail!("model_warmup '{name}': {error}"),
                    (Err(error), None) if error.of_device => anyhow::bail!("{error}"),
                    // A model may refuse made-up values.
                    (Err(_), None) | (Ok(()), _) => {}
                }
            }
        }
        Ok(())
    }
}

/// The bytes that the largest batch of a model takes while it runs, by estimate; 0 if that depends
/// on the requests.
pub fn largest_run(model: &dyn Model, codec: &BatchCodec) -> u64 {
    let Some(memory) = model.run_memory().filter(|_| !codec.has_varying_shapes()) else { return 0 };
    let Ok(trial) = codec.trial(PROFILED_LENGTH) else { return 0 };
    let shapes: Vec<Vec<usize>> = codec.engine_shapes(&trial, codec.max_batch as usize).collect();
    memory.estimate(shapes.iter().map(|shape| &shape[..]))
}

/// The lanes in the order in which a batch passes them, if it passes each lane once.
fn chain(specs: &[LaneSpec], segments: usize) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|lane| specs[*lane].segments.first);
    let mut at = 0;
    for lane in &order {
        let range = specs[*lane].segments;
        if usize::from(range.first) != at {
            return None;
        }
        at = usize::from(range.end);
    }
    (at == segments).then_some(order)
}

/// Lengths of varying dimensions that a model is tried with until it answers: the length of
/// measurements, the shortest one, and usual lengths of pictures and texts.
pub const LENGTHS: [i64; 7] = [PROFILED_LENGTH, 1, 16, 64, 128, 224, 256];

/// The outcome of a model's trial with made-up requests.
#[derive(Debug)]
pub enum Trial {
    /// The model answers requests that hold this.
    Answers {
        /// The values of their elements.
        fill: Fill,
        /// The request that was answered, if its varying dimensions are not [`PROFILED_LENGTH`]
        /// long.
        sample: Option<Admitted>,
        /// How long that took, the first time.
        took: Duration,
    },
    /// The model answers none of them; this is its error for the first one.
    Refuses(String),
}

/// Whether the process of a model that has ended is soon there again.
pub fn comes_back(model: &dyn Model) -> bool {
    model.executor().is_some_and(|executor| executor.comes_back())
}

/// Looks for a made-up request that the model answers. Some models answer none, as no model takes
/// random numbers as a shape. Such a model is still worth serving.
///
/// # Errors
/// If the device is lost or out of memory, the model's process does not come back, one item takes
/// more than [`LARGEST_TRIAL`], or an answer of a batch cannot be separated.
pub fn find_answer(codec: &BatchCodec, model: &dyn Model, lane: &mut dyn Lane, clock: Clock) -> anyhow::Result<Trial> {
    let (mut refused, mut not_made, mut not_parted) = (None, None, None);
    let lengths = if codec.has_varying_shapes() { &LENGTHS[..] } else { &LENGTHS[..1] };
    for length in lengths {
        for fill in Fill::ALL {
            let made = codec.sample(fill, *length);
            let made = made.and_then(|item| Ok((codec.assemble(std::iter::once(&item))?, item)));
            let (mut state, item) = match made {
                Ok(made) => made,
                Err(reason) => {
                    not_made.get_or_insert(reason);
                    continue;
                }
            };
            let begin = clock.now();
            if let Err(error) = lane.run(0..model.segments(), &mut state) {
                if error.of_device || (error.of_executor && !comes_back(model)) {
                    return Err(error.into());
                }
                tracing::debug!(?fill, length, %error, "the model does not answer");
                refused.get_or_insert(error.to_string());
                continue;
            }
            match codec.separate(state, &[1]) {
                Ok(_) => {
                    let (sample, took) = ((*length != PROFILED_LENGTH).then_some(item), clock.now().since(begin));
                    return Ok(Trial::Answers { fill, sample, took });
                }
                Err(reason) => drop(not_parted.get_or_insert(reason)),
            }
        }
    }
    match (not_parted, refused, not_made) {
        (Some(reason), ..) if codec.batched => anyhow::bail!(reason),
        (None, None, Some(reason)) => anyhow::bail!(reason),
        (not_parted, refused, _) => Ok(Trial::Refuses(refused.or(not_parted).unwrap_or_default())),
    }
}
