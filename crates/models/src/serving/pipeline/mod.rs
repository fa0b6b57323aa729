//! An ensemble in service: its steps, and the models that the steps run.

mod flat;
mod run;
mod step_request;
mod step_runs;
mod trail;
mod weighing;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use downbeat_core::pipeline::{self as core, MOST_STEPS, Shares, Stage, StepCost, StepModel as StageModel};
use downbeat_core::probes::Probes;
use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::scheduler::{PipelineStage, WAKE_MARGIN, WeightDecision};
use downbeat_protocol::inference as pb;
use downbeat_repository::{Ensemble, ModelDefinition, StepModel};
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::metrics::trouble::Counts;
use downbeat_service::metrics::{Metrics, ModelMetrics, StepMetrics};
use downbeat_service::report::live::LiveStep;
use downbeat_service::report::missed::MissedRequests;
use downbeat_service::unanswered::Unanswered;
use flat::FlatSteps;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;

use super::model::{Model, Occupancy, version_of};
use crate::loaded_version::LoadedVersion;
use crate::serving::Serving;

pub use run::{InPipeline, Within};
pub use step_request::adapt_inputs;
pub use step_runs::{Counted, Failure, StepCount, StepEnd, StepRuns, run_steps};
pub use trail::{Callers, Trail};
pub use weighing::Weighing;
use weighing::{Cast, as_queued, find_pools, index_in, unqueued};

/// The load of devices is taken as it was over at least this long.
const LOAD_OVER: Duration = Duration::from_millis(500);

/// An ensemble as it is served now. Another takes its place when a model of its steps changes.
pub struct Pipeline {
    /// The configuration, complete.
    pub definition: Arc<ModelDefinition>,
    /// The tensors of its requests.
    pub codec: Arc<BatchCodec>,
    /// Versions, ascending. An ensemble has no file, so only the numbers differ.
    pub versions: BTreeMap<u64, Arc<PipelineRecord>>,
    steps: Arc<[StepRecord]>,
    parts: Vec<StepPart>,
    /// The steps of this ensemble and of the ensembles within it.
    flat: Arc<FlatSteps<StepPart>>,
    /// The rehearsal of weights knows the ensemble by this number, which stays as long as the definition.
    number: u64,
    shares: RwLock<Arc<Shares>>,
    weights: Mutex<Weights>,
    /// Which requests are tried although the whole seems to take too long.
    probes: Arc<Mutex<Probes>>,
    pub(super) occupancy: Arc<Occupancy>,
    /// The name, which marks of requests share.
    name: Arc<str>,
    /// The number in the decision log, from the first request on.
    logged: OnceLock<u32>,
}

/// The counts of one version of an ensemble.
pub struct PipelineRecord {
    /// The ensemble's name.
    pub name: String,
    /// The version's number.
    pub version: String,
    metrics: ModelMetrics,
}

/// The counts and the bound of one step.
struct StepRecord {
    metrics: StepMetrics,
    /// A permit for each request that may be in the step; `None`: any number may.
    places: Option<Semaphore>,
}

/// The model that a step runs. The ensemble does not keep the model from leaving.
#[derive(Clone)]
pub enum StepPart {
    /// A model with a file.
    Model(Weak<LoadedVersion>),
    /// Another ensemble.
    Pipeline(Weak<Pipeline>),
}

/// The weights of the flat steps, and how busy the devices of each were lately.
#[derive(Default)]
struct Weights {
    /// When, and the busy seconds of each step's devices by then.
    seen: Option<(Time, Vec<f64>)>,
    /// By step, the busy share.
    loads: Vec<f64>,
    /// The division that a trial found; `None`: that of the fixed rule holds.
    found: Option<Shares>,
}

impl Pipeline {
    /// An ensemble whose steps run these models. `before`: the same definition in service until now,
    /// whose counts and weights go on; otherwise the ensemble gets this `number`.
    pub fn new(
        definition: &Arc<ModelDefinition>,
        parts: Vec<StepPart>,
        (number, before): (u64, Option<&Pipeline>),
        (metrics, now): (&Metrics, Time),
    ) -> Option<Self> {
        let ensemble = definition.ensemble.as_ref()?;
        let (inputs, mut outputs) = (definition.inputs.clone(), definition.outputs.clone());
        for (output, tensor) in outputs.iter_mut().zip(&ensemble.outputs).filter(|(output, _)| output.labels.is_empty())
        {
            output.labels = labels_of(ensemble, &parts, *tensor).unwrap_or_default();
        }
        let codec = BatchCodec::new(inputs, outputs, definition.batching.max_batch_size);
        let before = before.filter(|before| Arc::ptr_eq(&before.definition, definition));
        let record = |version: u64| {
            let (name, version) = (definition.name.clone(), version.to_string());
            let metrics = metrics.model(&name, &version);
            Arc::new(PipelineRecord { name, version, metrics })
        };
        let versions = || definition.versions.iter().map(|(version, _)| (*version, record(*version))).collect();
        let step = |(at, step): (usize, &downbeat_repository::EnsembleStep)| StepRecord {
            metrics: metrics.pipeline_step(&definition.name, at, &step.model),
            places: (ensemble.max_inflight_requests > 0)
                .then(|| Semaphore::new(ensemble.max_inflight_requests as usize)),
        };
        let steps = || ensemble.steps.iter().enumerate().map(step).collect();
        let inner = parts.iter().map(|part| part.pipeline().map(|inner| inner.flat.clone())).collect();
        let flat = Arc::new(FlatSteps::new(ensemble, &parts, inner));
        let none = StepCost { alone: Duration::ZERO, devices: 1.0, load: 0.0 };
        let found = before.and_then(|before| before.weights.lock().found.clone());
        let pipeline = Pipeline {
            codec: Arc::new(codec.named(&definition.name).passing_on()),
            versions: before.map_or_else(versions, |before| before.versions.clone()),
            steps: before.map_or_else(steps, |before| before.steps.clone()),
            number: before.map_or(number, |before| before.number),
            shares: RwLock::new(Arc::new(Shares::fixed(&flat.shape, &vec![none; flat.len()]))),
            weights: Mutex::new(Weights { found, ..Weights::default() }),
            flat,
            probes: before.map_or_else(Default::default, |before| before.probes.clone()),
            occupancy: before.map_or_else(Default::default, |before| before.occupancy.clone()),
            name: definition.name.as_str().into(),
            logged: OnceLock::new(),
            definition: definition.clone(),
            parts,
        };
        pipeline.weigh(now);
        pipeline.show_weights(metrics);
        Some(pipeline)
    }

    /// The steps. An ensemble in service has some.
    pub fn ensemble(&self) -> &Ensemble {
        self.definition.ensemble.as_ref().expect("a pipeline in service is made of steps")
    }

    /// `l(1)` of each step: the time of one request alone.
    pub fn step_times(&self) -> Vec<Duration> {
        self.parts.iter().map(StepPart::alone).collect()
    }

    /// Whether the steps run exactly these models.
    pub fn runs(&self, parts: &[StepPart]) -> bool {
        let is_same = |(own, other): (&StepPart, &StepPart)| match (own, other) {
            (StepPart::Model(own), StepPart::Model(other)) => own.ptr_eq(other),
            (StepPart::Pipeline(own), StepPart::Pipeline(other)) => own.ptr_eq(other),
            _ => false,
        };
        self.parts.len() == parts.len() && self.parts.iter().zip(parts).all(is_same)
    }

    /// The version a client named, or the newest if it named none.
    ///
    /// # Errors
    /// The errors of [`version_of`].
    pub fn version(&self, version: &str) -> Result<&Arc<PipelineRecord>, ServiceError> {
        version_of(&self.definition.name, &self.versions, version)
    }

    /// Why it cannot answer at `now`; `None` if it can.
    pub fn not_ready(&self, now: Time) -> Option<String> {
        let reason = |part: &StepPart| match part {
            StepPart::Model(model) => {
                model.upgrade().map_or_else(|| Some(GONE.to_owned()), |model| model.not_ready(now))
            }
            StepPart::Pipeline(other) => {
                other.upgrade().map_or_else(|| Some(GONE.to_owned()), |other| other.not_ready(now))
            }
        };
        let mut steps = self.ensemble().steps.iter().zip(&self.parts).enumerate();
        steps.find_map(|(at, (step, part))| Some(format!("step {at} ('{}'): {}", step.model, reason(part)?)))
    }

    /// The protocol's statistics of its versions.
    pub fn statistics(&self) -> impl Iterator<Item = pb::ModelStatistics> + '_ {
        self.versions.values().map(|record| record.statistics())
    }

    /// The time of a request alone, on the longest path.
    fn alone(&self) -> Duration {
        let alone: Vec<Duration> = self.flat.leaves.iter().map(|leaf| leaf.part.alone()).collect();
        let rest = self.flat.shape.rest(&alone);
        rest.iter().zip(&alone).map(|(rest, alone)| *alone + *rest).max().unwrap_or_default()
    }

    /// Divides the time of requests among the steps by the present profiles, by the present loads
    /// and by the weights that a trial found. Returns the shares of the fixed rule.
    fn weigh(&self, now: Time) -> Shares {
        let parts = || self.flat.leaves.iter().map(|leaf| &leaf.part);
        let busy: Vec<f64> = parts().map(StepPart::busy_seconds).collect();
        let mut weights = self.weights.lock();
        if weights.loads.len() != busy.len() {
            weights.loads = vec![0.0; busy.len()];
        }
        let since = weights.seen.as_ref().map(|(since, _)| now.since(*since));
        match (weights.seen.take(), since) {
            (Some((at, before)), Some(passed)) if passed < LOAD_OVER => weights.seen = Some((at, before)),
            (Some((_, before)), Some(passed)) => {
                let lately = busy.iter().zip(&before).zip(parts()).map(|((now, before), part)| {
                    ((now - before) / passed.as_secs_f64() / part.devices()).clamp(0.0, 1.0)
                });
                weights.loads = lately.collect();
                weights.seen = Some((now, busy));
            }
            _ => weights.seen = Some((now, busy)),
        }
        let cost =
            |(part, load): (&StepPart, &f64)| StepCost { alone: part.alone(), devices: part.devices(), load: *load };
        let costs: Vec<StepCost> = parts().zip(&weights.loads).map(cost).collect();
        let rule = Shares::fixed(&self.flat.shape, &costs);
        // An ensemble within may have got other steps.
        weights.found.take_if(|found| found.weights().len() != costs.len());
        let found = weights.found.as_ref();
        let shares = found.map_or_else(|| rule.clone(), |found| rule.dividing_as(&self.flat.shape, found));
        *self.shares.write() = Arc::new(shares);
        rule
    }

    /// Whether a step is an ensemble whose steps are flat steps of this one.
    fn is_flattened(&self, step: usize) -> bool {
        let is_model = |leaf: &flat::Leaf<StepPart>| matches!(leaf.part, StepPart::Model(_));
        matches!(self.parts[step], StepPart::Pipeline(_))
            && self.flat.leaves[self.flat.block(step, 0)].iter().all(is_model)
    }

    /// Takes the division among its flat steps that a trial found; `None`: that of the fixed rule.
    fn set_found(&self, division: Option<Shares>) {
        self.weights.lock().found = division;
    }

    /// By flat step: its part of all weights.
    fn parts_of_weights(&self) -> Vec<f64> {
        let shares = self.shares.read().clone();
        let all: f64 = shares.weights().iter().sum();
        shares.weights().iter().map(|weight| weight / all).collect()
    }

    /// The counts of its steps, with their shares of the time.
    pub fn steps_report(&self) -> Vec<LiveStep> {
        let parts = self.parts_of_weights();
        let share = |step| parts.get(self.flat.block(step, 0)).map_or(0.0, |parts| parts.iter().sum());
        let steps = self.steps.iter().zip(&self.ensemble().steps).enumerate();
        steps.map(|(number, (record, step))| record.metrics.report(&step.model, share(number))).collect()
    }

    /// Shows the weights as metrics.
    fn show_weights(&self, metrics: &Metrics) {
        for (leaf, part) in self.flat.leaves.iter().zip(self.parts_of_weights()) {
            metrics.set_step_weight(&self.definition.name, &leaf.label, &leaf.model, part);
        }
    }

    /// Forgets the metrics of its weights.
    pub fn forget_weights(&self, metrics: &Metrics) {
        for leaf in &self.flat.leaves {
            metrics.forget_step_weight(&self.definition.name, &leaf.label, &leaf.model);
        }
    }
}

/// The labels of a tensor's classes, by the model of the step that makes the tensor.
fn labels_of(ensemble: &Ensemble, parts: &[StepPart], tensor: usize) -> Option<Arc<[String]>> {
    let step = ensemble.graph.maker(tensor)?;
    let (name, _) = ensemble.steps[step].outputs.iter().find(|(_, made)| *made == tensor)?;
    let labels = |codec: &BatchCodec| {
        codec.outputs.iter().find(|output| output.client.name == *name).map(|output| output.labels.clone())
    };
    match &parts[step] {
        StepPart::Model(model) => labels(&model.upgrade()?.codec),
        StepPart::Pipeline(pipeline) => labels(&pipeline.upgrade()?.codec),
    }
}

/// Why an ensemble is not ready of which a model has just left.
const GONE: &str = "the model has left";

impl StepPart {
    /// The part of a model or of an ensemble in service.
    pub fn of(model: &FoundModel) -> Self {
        match model {
            FoundModel::Model(_, version) => StepPart::Model(Arc::downgrade(version)),
            FoundModel::Pipeline(pipeline) => StepPart::Pipeline(Arc::downgrade(pipeline)),
        }
    }

    /// The ensemble, if the part is one in service.
    fn pipeline(&self) -> Option<Arc<Pipeline>> {
        match self {
            StepPart::Model(_) => None,
            StepPart::Pipeline(pipeline) => pipeline.upgrade(),
        }
    }

    /// `l(1)`: the time of one request alone.
    fn alone(&self) -> Duration {
        match self {
            StepPart::Model(model) => model.upgrade().map_or(Duration::ZERO, |model| model.alone()),
            StepPart::Pipeline(pipeline) => pipeline.upgrade().map_or(Duration::ZERO, |pipeline| pipeline.alone()),
        }
    }

    /// The number of devices that run the part.
    fn devices(&self) -> f64 {
        match self {
            StepPart::Model(model) => model.upgrade().map_or(1.0, |model| model.hosts.devices().len() as f64),
            StepPart::Pipeline(pipeline) => {
                let of_parts = |pipeline: Arc<Pipeline>| {
                    pipeline.flat.leaves.iter().map(|leaf| leaf.part.devices()).fold(f64::MAX, f64::min)
                };
                pipeline.upgrade().map_or(1.0, of_parts)
            }
        }
    }

    /// How long its devices were busy until now, all together.
    fn busy_seconds(&self) -> f64 {
        match self {
            StepPart::Model(model) => model.upgrade().map_or(0.0, |model| model.busy_seconds()),
            StepPart::Pipeline(pipeline) => {
                let of_parts = |pipeline: Arc<Pipeline>| {
                    pipeline.flat.leaves.iter().map(|leaf| leaf.part.busy_seconds()).fold(0.0, f64::max)
                };
                pipeline.upgrade().map_or(0.0, of_parts)
            }
        }
    }
}

/// A model in service that a step can run.
pub enum FoundModel {
    /// A model with a file, in the version that the step runs.
    Model(Arc<Model>, Arc<LoadedVersion>),
    /// Another ensemble.
    Pipeline(Arc<Pipeline>),
}

impl FoundModel {
    /// The tensors of the model.
    pub fn tensors(&self) -> StepModel<'_> {
        let codec = match self {
            FoundModel::Model(_, version) => &version.codec,
            FoundModel::Pipeline(pipeline) => &pipeline.codec,
        };
        let max_batch_size = if codec.batched { codec.max_batch } else { 0 };
        StepModel { inputs: &codec.inputs, outputs: &codec.outputs, max_batch_size }
    }
}

impl PipelineRecord {
    /// The protocol's statistics.
    pub fn statistics(&self) -> pb::ModelStatistics {
        self.metrics.statistics(&self.name, &self.version)
    }

    /// The last requests that missed.
    pub fn missed(&self) -> &MissedRequests {
        self.metrics.missed()
    }

    /// Counts its requests by time, and by size.
    pub fn histograms(&self) -> [Vec<u64>; 2] {
        self.metrics.histograms()
    }

    /// The outcomes of its requests.
    pub fn counts(&self) -> Counts {
        self.metrics.counts()
    }

    /// Counts an answered request of `rows` items. All steps together waited for `queued` and ran for
    /// `ran`. The whole took `took`, and was `late` or not.
    fn record(&self, rows: u32, (queued, ran): (Duration, Duration), took: Duration, late: bool) {
        let phases = Phases { compute_infer: ran, ..Phases::default() };
        self.metrics.record_batch(rows, phases, std::iter::once((queued, took, late)));
    }

    /// Counts a request that got no result, `after` its arrival.
    fn record_not_answered(&self, reason: Unanswered, after: Duration) {
        self.metrics.record_not_answered(reason, after);
    }
}

impl Serving {
    /// Divides the time of ensembles' requests among their steps anew.
    pub fn weigh_steps(&self, metrics: &Metrics) {
        let (pipelines, now) = (self.pipelines(), self.now());
        let mut weighing = self.weighing.lock();
        if pipelines.is_empty() {
            if std::mem::take(&mut weighing.is_on) {
                self.driver.rehearse_pipelines(None);
                weighing.stop(&self.driver);
            }
            return;
        }
        weighing.is_on = true;
        if let Some(decision) = self.driver.take_weights() {
            take(&pipelines, &decision, now);
        }
        let weighed: Vec<(Arc<Pipeline>, Shares)> =
            pipelines.into_iter().map(|pipeline| (pipeline.clone(), pipeline.weigh(now))).collect();
        weighed.iter().for_each(|(pipeline, _)| pipeline.show_weights(metrics));
        let cast = self.cast(&weighed, &mut weighing, now);
        weighing.leave_early(&self.driver, &cast);
        self.driver.rehearse_pipelines(Some(stage(weighed, &cast)));
    }

    /// The models in service, with their demand.
    fn cast(&self, weighed: &[(Arc<Pipeline>, Shares)], weighing: &mut Weighing, now: Time) -> Vec<Cast> {
        let mut cast: Vec<Cast> = Vec::new();
        for model in self.all() {
            let slo = self.options.slo(&model.definition.name, model.definition.slo);
            cast.extend(model.versions.values().map(|version| Cast::new(version.clone(), slo)));
        }
        for (pipeline, shares) in weighed {
            let slo = self.options.slo(&pipeline.definition.name, pipeline.definition.slo);
            let weights = shares.weights();
            let rest = pipeline.flat.shape.rest(weights);
            let longest = rest.iter().zip(weights).map(|(rest, own)| rest + own).fold(f64::MIN_POSITIVE, f64::max);
            for (leaf, weight) in pipeline.flat.leaves.iter().zip(weights) {
                let StepPart::Model(version) = &leaf.part else { continue };
                let Some(version) = version.upgrade() else { continue };
                let budget = slo.map(|slo| Duration::from_secs_f64(slo.as_secs_f64() * weight / longest));
                let known = cast.iter().position(|known| Arc::ptr_eq(&known.version, &version));
                let index = known.unwrap_or_else(|| {
                    cast.push(Cast::new(version, None));
                    cast.len() - 1
                });
                let known = &mut cast[index];
                known.budget = known.budget.filter(|_| known.serves_steps).into_iter().chain(budget).min();
                known.serves_steps = true;
            }
        }
        find_pools(&mut cast, self.driver.devices());
        weighing.measure(&mut cast, now);
        cast
    }
}

/// Gives the ensembles the weights that a trial has found.
fn take(pipelines: &[Arc<Pipeline>], decision: &WeightDecision, now: Time) {
    for (number, division) in &decision.divisions {
        let Some(pipeline) = pipelines.iter().find(|pipeline| pipeline.number == *number) else { continue };
        let before = pipeline.parts_of_weights();
        pipeline.set_found(division.clone());
        pipeline.weigh(now);
        let after = pipeline.parts_of_weights();
        if before.iter().zip(&after).all(|(before, after)| (before - after).abs() < 0.005) {
            continue;
        }
        let steps = pipeline.flat.leaves.iter().zip(before.iter().zip(&after));
        let changes: Vec<String> = steps
            .map(|(leaf, (before, after))| format!("{} ('{}') {before:.2} -> {after:.2}", leaf.label, leaf.model))
            .collect();
        let outcome = decision.outcome;
        tracing::info!(
            model = %pipeline.definition.name, weights = %changes.join(", "), replayed = outcome.asked,
            lost_before = outcome.lost_before, lost_now = outcome.lost,
            "the rehearsal found better weights for the steps"
        );
    }
}

/// The ensembles as the rehearsal plays them. An ensemble that lacks a model is left out, and so is an
/// ensemble with too many steps.
fn stage(weighed: Vec<(Arc<Pipeline>, Shares)>, cast: &[Cast]) -> PipelineStage {
    let mut stage = Stage { wake_margin: WAKE_MARGIN, ..Stage::default() };
    let (mut numbers, mut queues, mut rule) = (Vec::new(), Vec::new(), Vec::new());
    let (mut models, mut pools): (Vec<usize>, Vec<usize>) = Default::default();
    for (pipeline, shares) in weighed {
        let place = |part: &StepPart| match part {
            StepPart::Model(version) => cast.iter().position(|known| known.is(version)),
            StepPart::Pipeline(_) => None,
        };
        let found: Option<Vec<usize>> = pipeline.flat.leaves.iter().map(|leaf| place(&leaf.part)).collect();
        let Some(found) = found.filter(|found| found.len() <= MOST_STEPS) else { continue };
        let of_step = found.into_iter().map(|model| index_in(&mut models, model));
        let of_step = of_step.collect();
        stage.pipelines.push(core::Pipeline { shape: pipeline.flat.shape.clone(), models: of_step });
        numbers.push(pipeline.number);
        rule.push(shares);
    }
    for model in &models {
        let Cast { version, pool, .. } = &cast[*model];
        let queue = version.last_queue();
        let options = queue.as_ref().map_or_else(|| unqueued(version), |queue| as_queued(queue));
        queues.push(queue.map(|queue| queue.place.model));
        stage.models.push(StageModel { options, behaviour: None, pool: index_in(&mut pools, *pool) });
    }
    let devices = |pool: &usize| {
        let of_pool = cast.iter().filter(|cast| cast.pool == *pool);
        let mut devices: Vec<usize> = of_pool.flat_map(|cast| cast.devices()).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.len() as u32
    };
    stage.pools = pools.iter().map(devices).collect();
    PipelineStage { numbers, stage, queues, rule }
}
