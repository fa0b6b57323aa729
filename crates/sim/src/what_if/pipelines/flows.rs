//! The flows of a log's requests, for a replay: pipelines with all their steps, and plain models.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use downbeat_core::cluster::ModelOptions;
use downbeat_core::journal::pipelines::End;
use downbeat_core::pipeline::{Shape, ShapeError};
use downbeat_core::{Duration, ModelId, RequestId, Time};

use super::super::part::Fate;
use super::joined::{BadPipelines, Joined};
use super::logged::LoggedRequest;
use super::outcome::{FlowFigures, FlowSamples, PipelineRow, PoolFigures};
use super::pools;

/// The most items of all requests together.
const MOST_ITEMS: u64 = 20_000_000;
/// The most ensembles within each other.
const DEEPEST: usize = 16;

/// The requests of a log with pipelines, for replays under other settings.
#[derive(Clone, Debug)]
pub struct RecordedPipelines {
    /// The pipelines, and the models with requests of their own: each is a pipeline of one step.
    pub flows: Vec<RecordedFlow>,
    /// The models of all steps.
    pub models: Vec<RecordedStepModel>,
    /// The devices. Models of one pool share its devices.
    pub pools: Vec<RecordedPool>,
    /// The outcome in the log.
    pub happened: PipelineRow,
    /// The assumptions of a replay, and remarks.
    pub notes: Vec<String>,
    pub(super) arrivals: Arc<[FlowArrival]>,
}

/// Requests of one kind.
#[derive(Clone, Debug)]
pub struct RecordedFlow {
    /// The name of the ensemble or of the model.
    pub name: String,
    /// Whether it is a model with requests of its own.
    pub is_plain: bool,
    /// Which step waits for which others.
    pub shape: Shape,
    /// By step: the index of its model, and the step in words.
    pub steps: Vec<(usize, String)>,
}

/// A model that runs steps.
#[derive(Clone, Debug)]
pub struct RecordedStepModel {
    /// Its name.
    pub name: String,
    /// The last options, with the last profile.
    pub options: ModelOptions,
    /// The index of its pool.
    pub pool: usize,
    /// The busy share of the pool that is this model's own.
    pub load: f64,
    pub(super) executions: Arc<[f64]>,
}

/// Devices of a log that the same models use.
#[derive(Clone, Debug)]
pub struct RecordedPool {
    /// The number of devices.
    pub devices: u32,
    /// The names of the models.
    pub models: Vec<String>,
    /// The busy share.
    pub busy: f64,
}

/// The arrival of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowArrival {
    pub at: Time,
    /// The time to the deadline.
    pub budget: Duration,
    pub flow: usize,
    pub size: u32,
}

/// The reason why pipelines of a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum BadFlows {
    /// The log has no pipelines, or cannot be read.
    #[error(transparent)]
    Log(#[from] BadPipelines),
    /// The scheduler has no batch of a step's model.
    #[error(
        "step {step} ('{model}') of '{pipeline}' cannot be replayed: no request reached its model's queue in the log. A \
         replay needs each step, and models whose batches the scheduler makes (device policy exclusive); name shard-0.log \
         and so on instead of the folder to replay the requests of models one by one"
    )]
    UnknownStep {
        /// The pipeline.
        pipeline: String,
        /// The step.
        step: String,
        /// Its model.
        model: String,
    },
    /// Steps form no graph.
    #[error("the steps of '{0}' in the log form no graph")]
    Shape(String, #[source] ShapeError),
    /// Ensembles are nested too deep.
    #[error("the ensembles within '{0}' are nested deeper than {DEEPEST}")]
    Nested(String),
    /// A model was never added.
    #[error("{0} has requests in the log, but was never added")]
    UnknownModel(ModelId),
    /// The log has more items than a replay can hold.
    #[error("the requests of the log have {0} items; at most {MOST_ITEMS} can be replayed")]
    TooMany(u64),
    /// Only code calls models.
    #[error("the log has no request of an ensemble")]
    NoEnsemble,
}

impl BadFlows {
    /// Whether the log is sound, and has no request of an ensemble: its requests can be replayed one by
    /// one.
    pub fn is_without_ensembles(&self) -> bool {
        matches!(self, BadFlows::NoEnsemble | BadFlows::Log(BadPipelines::NoFile(_) | BadPipelines::Empty(_)))
    }
}

/// A flow while it is made: by step the model and the steps before.
type Flat = Vec<(ModelId, String, Vec<usize>)>;

/// The requests of a log by flow, while they are read.
struct SeenRequests {
    arrivals: Vec<FlowArrival>,
    figures: Vec<FlowFigures>,
    samples: Vec<FlowSamples>,
}

impl SeenRequests {
    fn of(flows: usize) -> SeenRequests {
        SeenRequests {
            arrivals: Vec::new(),
            figures: vec![FlowFigures::default(); flows],
            samples: vec![FlowSamples::default(); flows],
        }
    }

    /// Adds an arrival. Returns the time to its deadline.
    fn arrives(&mut self, joined: &Joined, at: Time, deadline: Time, (flow, size): (usize, u32)) -> Duration {
        let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(at) };
        let at = Time::ZERO + at.since(joined.span.0);
        self.arrivals.push(FlowArrival { at, budget, flow, size: size.max(1) });
        self.figures[flow].requests += 1;
        budget
    }

    /// Notes that a request of this arrival was answered after `total`.
    fn answered(&mut self, (joined, flow): (&Joined, usize), at: Time, (total, budget): (Duration, Duration)) {
        let (of, is_in_time) = (&mut self.figures[flow], total <= budget);
        *(if is_in_time { &mut of.in_time } else { &mut of.late }) += 1;
        self.samples[flow].add(joined.place_of(at), Some(total), is_in_time);
    }

    /// Notes that a request was lost in this step.
    fn lost(&mut self, (joined, flow): (&Joined, usize), at: Time, step: String) {
        *self.figures[flow].lost.entry(step).or_default() += 1;
        self.samples[flow].add(joined.place_of(at), None, false);
    }

    /// Adds a request of an ensemble.
    fn add_whole(&mut self, joined: &Joined, request: &LoggedRequest, flow: usize) {
        let budget = self.arrives(joined, request.at, request.deadline, (flow, request.size));
        match request.end {
            None | Some((_, End::Cancelled, _)) => self.figures[flow].unknown += 1,
            Some((end, End::Answered | End::Late, _)) => {
                self.answered((joined, flow), request.at, (end.since(request.at), budget))
            }
            Some((_, _, step)) => {
                let spec = &joined.log.pipelines[request.pipeline].spec;
                let step = step.and_then(|step| Some((step, spec.steps.get(step as usize)?)));
                let name =
                    step.map_or("the whole".to_owned(), |(step, spec)| format!("step {step} ('{}')", spec.model));
                self.lost((joined, flow), request.at, name);
            }
        }
    }

    /// Adds a request of a model itself.
    fn add_plain(&mut self, joined: &Joined, id: RequestId, flow: usize) {
        let Some((part, seen)) = joined.seen(Some(id)) else { return };
        let budget = self.arrives(joined, seen.at, seen.request.deadline, (flow, seen.request.size));
        let end = if let Fate::Sent(batch) = seen.fate { joined.parts.end(part, batch) } else { None };
        match (seen.fate, end) {
            (Fate::Sent(_), Some(end)) => self.answered((joined, flow), seen.at, (end.since(seen.at), budget)),
            (Fate::Unknown | Fate::Sent(_), _) => self.figures[flow].unknown += 1,
            (Fate::Rejected | Fate::Dropped(_), _) => {
                self.lost((joined, flow), seen.at, joined.name(seen.request.model));
            }
        }
    }
}

/// Makes the flows of a log.
struct Maker<'a> {
    joined: &'a Joined,
    /// By pipeline and step: the model whose queue the step's requests joined.
    asked: BTreeMap<(usize, u32), ModelId>,
}

impl RecordedPipelines {
    /// Reads the log in a folder that `downbeat serve --decision-log` has written.
    ///
    /// # Errors
    /// If the log cannot be read or replayed, or has no request of a pipeline.
    pub fn read(folder: &Path) -> Result<RecordedPipelines, BadFlows> {
        RecordedPipelines::of(&Joined::read(folder)?)
    }

    pub(super) fn of(joined: &Joined) -> Result<RecordedPipelines, BadFlows> {
        let maker = Maker { joined, asked: asked(joined) };
        let numbers: HashMap<u64, usize> =
            joined.log.requests.iter().map(|request| (request.number, request.pipeline)).collect();
        let is_code = |pipeline: usize| joined.log.pipelines[pipeline].spec.is_code;
        // A request within an ensemble's is a part of that. Calls of code come as the log has them.
        let is_part = |request: &LoggedRequest| {
            let outer = request.within.and_then(|(outer, _)| numbers.get(&outer));
            outer.is_some_and(|outer| !is_code(*outer))
        };
        let of_ensembles: Vec<&LoggedRequest> =
            joined.log.requests.iter().filter(|request| !is_code(request.pipeline)).collect();
        let steps: BTreeSet<RequestId> =
            of_ensembles.iter().flat_map(|request| &request.steps).filter_map(|step| step.asked).collect();
        let whole: Vec<&LoggedRequest> = of_ensembles.into_iter().filter(|request| !is_part(request)).collect();
        if whole.is_empty() {
            return Err(BadFlows::NoEnsemble);
        }
        let mut flats: Vec<(String, bool, Flat)> = Vec::new();
        let (mut of_pipeline, mut left_out) = (BTreeMap::new(), Vec::new());
        let pipelines: BTreeSet<usize> = whole.iter().map(|request| request.pipeline).collect();
        for pipeline in pipelines {
            match maker.flat(pipeline, 0) {
                Ok(flat) => {
                    of_pipeline.insert(pipeline, flats.len());
                    flats.push((joined.log.pipelines[pipeline].label.clone(), false, flat));
                }
                Err(error) => left_out.push(error),
            }
        }
        if flats.is_empty() {
            return Err(left_out.pop().unwrap_or(BadFlows::NoEnsemble));
        }
        let whole = whole.into_iter().filter_map(|request| Some((request, *of_pipeline.get(&request.pipeline)?)));
        let whole: Vec<(&LoggedRequest, usize)> = whole.collect();
        let mut of_model = BTreeMap::new();
        let plain = maker.plain(&steps).into_iter().map(|(model, id)| {
            let flow = *of_model.entry(model).or_insert_with(|| {
                flats.push((joined.name(model), true, vec![(model, joined.name(model), Vec::new())]));
                flats.len() - 1
            });
            (id, flow)
        });
        let plain: Vec<(RequestId, usize)> = plain.collect();
        let mut recorded = maker.finish(flats, &whole, &plain)?;
        recorded.notes.extend(left_out.iter().map(|error| format!("Left out: {error}.")));
        Ok(recorded)
    }
}

/// By pipeline and step: the model that most of its requests asked.
fn asked(joined: &Joined) -> BTreeMap<(usize, u32), ModelId> {
    let mut counts: BTreeMap<(usize, u32), BTreeMap<ModelId, u64>> = BTreeMap::new();
    for request in &joined.log.requests {
        for step in &request.steps {
            if let Some((_, seen)) = joined.seen(step.asked) {
                let of_step = counts.entry((request.pipeline, step.step)).or_default();
                *of_step.entry(seen.request.model).or_default() += 1;
            }
        }
    }
    let most =
        |models: BTreeMap<ModelId, u64>| models.into_iter().max_by_key(|(id, count)| (*count, std::cmp::Reverse(*id)));
    counts.into_iter().filter_map(|(step, models)| Some((step, most(models)?.0))).collect()
}

impl Maker<'_> {
    /// The steps of a pipeline, with the steps of ensembles in the places of these ensembles.
    fn flat(&self, pipeline: usize, depth: usize) -> Result<Flat, BadFlows> {
        let logged = &self.joined.log.pipelines[pipeline];
        if depth >= DEEPEST {
            return Err(BadFlows::Nested(logged.label.clone()));
        }
        let spec = &logged.spec;
        let mut flat: Flat = Vec::new();
        // By step: the last ones of its steps. Steps may be in any order, so the places come later.
        let mut parts: Vec<(Flat, Vec<usize>)> = Vec::new();
        for (number, step) in spec.steps.iter().enumerate() {
            let inner = self
                .joined
                .log
                .pipelines
                .iter()
                .rposition(|other| other.spec.name == step.model && !other.spec.is_code);
            let part = match (self.asked.get(&(pipeline, number as u32)), inner) {
                (Some(model), _) => vec![(*model, format!("step {number} ('{}')", step.model), Vec::new())],
                (None, Some(inner)) => self.flat(inner, depth + 1)?,
                (None, None) => {
                    let known = self.joined.names.iter().find(|(_, name)| **name == step.model).map(|(id, _)| *id);
                    let unknown = || BadFlows::UnknownStep {
                        pipeline: logged.label.clone(),
                        step: number.to_string(),
                        model: step.model.clone(),
                    };
                    vec![(known.ok_or_else(unknown)?, format!("step {number} ('{}')", step.model), Vec::new())]
                }
            };
            let is_last = |place: usize| !part.iter().any(|(_, _, after)| after.contains(&place));
            let last = (0..part.len()).filter(|place| is_last(*place)).collect();
            parts.push((part, last));
        }
        let mut begins = Vec::with_capacity(parts.len());
        let mut next = 0;
        for (part, _) in &parts {
            begins.push(next);
            next += part.len();
        }
        for (number, (part, _)) in parts.iter().enumerate() {
            let before = spec.steps.get(number).map(|step| &step.after[..]).unwrap_or_default();
            let before = before.iter().filter_map(|first| {
                let (begin, (_, last)) = (begins.get(*first as usize)?, parts.get(*first as usize)?);
                Some(last.iter().map(|place| begin + place).collect::<Vec<_>>())
            });
            let before: Vec<usize> = before.flatten().collect();
            for (model, name, after) in part {
                let own = after.iter().map(|place| begins[number] + place);
                let after = if after.is_empty() { before.clone() } else { own.collect() };
                flat.push((*model, name.clone(), after));
            }
        }
        Ok(flat)
    }

    /// The requests that are no steps of ensembles, with their models.
    fn plain(&self, steps: &BTreeSet<RequestId>) -> Vec<(ModelId, RequestId)> {
        let requests = self.joined.parts.parts.iter().flat_map(|part| &part.requests);
        let plain = requests.filter(|seen| !steps.contains(&seen.request.id));
        plain.map(|seen| (seen.request.model, seen.request.id)).collect()
    }

    fn finish(
        &self,
        flats: Vec<(String, bool, Flat)>,
        whole: &[(&LoggedRequest, usize)],
        plain: &[(RequestId, usize)],
    ) -> Result<RecordedPipelines, BadFlows> {
        let mut seen = SeenRequests::of(flats.len());
        whole.iter().for_each(|(request, flow)| seen.add_whole(self.joined, request, *flow));
        plain.iter().for_each(|(id, flow)| seen.add_plain(self.joined, *id, *flow));
        let SeenRequests { mut arrivals, figures, samples } = seen;
        arrivals.sort_by_key(|arrival| arrival.at);
        let items = arrivals.iter().map(|arrival| u64::from(arrival.size)).sum();
        if items > MOST_ITEMS {
            return Err(BadFlows::TooMany(items));
        }
        let used: BTreeSet<ModelId> = flats.iter().flat_map(|(_, _, flat)| flat).map(|(model, ..)| *model).collect();
        let (known, of_pool) = (&self.joined.models, &self.joined.pools.of_model);
        if let Some(unknown) = used.iter().find(|id| !known.contains_key(id) || !of_pool.contains_key(id)) {
            return Err(BadFlows::UnknownModel(*unknown));
        }
        let (models, pools) = self.models(&used);
        let place: BTreeMap<ModelId, usize> = used.iter().copied().zip(0..).collect();
        let flows = flats.into_iter().map(|(name, is_plain, flat)| {
            let shape = Shape::new(flat.iter().map(|(_, _, after)| after.clone()).collect());
            let shape = shape.map_err(|error| BadFlows::Shape(name.clone(), error))?;
            let step =
                |(model, step, _): (ModelId, String, Vec<usize>)| (place.get(&model).copied().unwrap_or(0), step);
            Ok(RecordedFlow { name, is_plain, shape, steps: flat.into_iter().map(step).collect() })
        });
        let flows: Vec<RecordedFlow> = flows.collect::<Result<_, BadFlows>>()?;
        let figures = figures.into_iter().zip(&samples).zip(&flows);
        let of_pool = |pool: &RecordedPool| PoolFigures::new(&pool.models, pool.devices, pool.busy);
        let figures = figures.map(|((of, samples), flow)| of.finished(&flow.name, samples)).collect();
        let span = arrivals.last().map_or(Duration::ZERO, |last| last.at.since(Time::ZERO));
        let pools_then = pools.iter().map(of_pool).collect();
        let happened = PipelineRow::new(("log", "as recorded".to_owned()), figures, pools_then, span);
        let notes = self.notes(&flows, &arrivals);
        Ok(RecordedPipelines { flows, models, pools, happened, notes, arrivals: arrivals.into() })
    }

    fn models(&self, used: &BTreeSet<ModelId>) -> (Vec<RecordedStepModel>, Vec<RecordedPool>) {
        let joined = self.joined;
        let all = &joined.pools;
        let kept: BTreeSet<usize> = used.iter().filter_map(|id| all.of_model.get(id).copied()).collect();
        let index: BTreeMap<usize, usize> = kept.iter().copied().zip(0..).collect();
        let load = |of: &dyn Fn(ModelId) -> bool, devices: u32| {
            let spans = pools::spans(&joined.parts.parts, |part, batch| joined.parts.end(part, batch), of);
            pools::load(&spans, devices, joined.span).mean
        };
        let models = used.iter().filter_map(|id| {
            let mut options = joined.models.get(id)?.clone();
            let pool = all.of_model.get(id).copied()?;
            let kinds = &all.pools.get(pool)?.kinds;
            let profile = kinds.iter().find_map(|kind| options.profiles.get(*kind));
            options.profiles = profile.unwrap_or_else(|| options.profiles.first()).clone().into();
            options.shares_limit = None;
            let executions = joined.parts.executions(*id, options.profiles.first());
            let load = load(&|other| other == *id, all.pools[pool].devices);
            let pool = index.get(&pool).copied()?;
            Some(RecordedStepModel { name: joined.name(*id), options, pool, load, executions })
        });
        let models: Vec<RecordedStepModel> = models.collect();
        let pools = kept.iter().map(|pool| {
            let names = models.iter().filter(|model| Some(&model.pool) == index.get(pool));
            let mut names: Vec<String> = names.map(|model| model.name.clone()).collect();
            names.sort();
            names.dedup();
            let devices = all.pools[*pool].devices;
            RecordedPool { devices, models: names, busy: load(&|id| all.of_model.get(&id) == Some(pool), devices) }
        });
        let pools = pools.collect();
        (models, pools)
    }

    /// The assumptions of a replay, in words.
    fn notes(&self, flows: &[RecordedFlow], arrivals: &[FlowArrival]) -> Vec<String> {
        let joined = self.joined;
        let mut notes = vec![
            "Assumed: requests come as in the log, also if clients would have waited for answers. Batches take times of the \
             log, relative to the models' last profiles. Local deadlines follow the server's rule."
                .to_owned(),
        ];
        if joined.models.values().any(ModelOptions::is_adaptive) {
            notes.push(
                "Adaptive models follow the rule for the load of the moment. The division of the deadlines is rehearsed, \
                 unless --no-rehearsal is given."
                    .to_owned(),
            );
        }
        if joined.log.pipelines.iter().any(|pipeline| pipeline.spec.is_code) {
            notes.push("Calls of models' code come when they came in the log, however early the code runs.".to_owned());
        }
        if joined.pools.is_rough {
            notes.push(
                "Models run on different sets of devices that overlap, or on devices of different kinds: a replay lets them \
                 run on all devices of these sets, with the times of the first kind."
                    .to_owned(),
            );
        }
        let items = arrivals.iter().filter(|arrival| arrival.size > 1).count();
        if items > 0 {
            notes.push(format!(
                "{items} requests have several items: their items wait and run as if each were a request, and the last one \
                 ends the request."
            ));
        }
        let all_steps = |request: &LoggedRequest| {
            request.steps.len() < joined.log.pipelines[request.pipeline].spec.steps.len()
                && matches!(request.end, Some((_, End::Answered | End::Late, _)))
        };
        let partly = joined
            .log
            .requests
            .iter()
            .filter(|request| !joined.log.pipelines[request.pipeline].spec.is_code && all_steps(request));
        match partly.count() {
            0 => {}
            count => {
                notes.push(format!("{count} requests asked for some of the outputs: a replay runs all steps for them."))
            }
        }
        if flows.iter().any(|flow| flow.is_plain) {
            notes.push("A model with requests of its own is a pipeline of one step, on the same devices.".to_owned());
        }
        notes
    }
}
