//! The way of one model version into service, by one policy, step by step.

mod device_facts;
mod engine_choice;
mod file_trial;
mod judging;
mod stages;
mod starting;
mod trial;

use std::path::Path;
use std::sync::Arc;

use downbeat_core::device::{ChosenPolicy, PolicyName, SegmentProfile};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_engine::{Cut, Lane, LoadOptions, Model, Part, Place, Share, graph_report};
use downbeat_host::device as host;
use downbeat_host::device::{Padding, Placements, PolicyError};
use downbeat_host::device_map::ModelDevices;
use downbeat_host::groups::group_predictor::GroupMember;
use downbeat_host::model_memory::{HeldMemory, MemoryPart};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::request::queue::Queue;
use downbeat_host::run::row_judgement::RowJudgement;
use downbeat_repair::RepairedFile;
use downbeat_repository::{ModelDefinition, TensorBinding};
use downbeat_service::options::Isolation;
use downbeat_service::report::policy_report::{PolicyReport, StagingReport};
use parking_lot::MutexGuard;

use crate::load::device_budget::DeviceBudget;
use crate::load::engines::most_threads;
use crate::load::load_context::{LoadContext, LoadProgress, VersionFile};
use crate::load::load_turns::LONGEST_TURN;
use crate::load::model_source::{ModelSource, has_graph, is_emulated, is_python};
use crate::load::policy_choice::{AutoSubject, Chosen, FoundStages, Known, Profiled, Why};
use crate::load::python_options::python_options;
use crate::load::warm_up::{self, WarmUp};
use crate::loaded_version::LoadedVersion;
use crate::measure::measuring::Measuring;
use crate::measure::measuring_time::MeasuringTime;
use crate::measure::profiler::Threads;
use crate::measure::remeasuring::Unsettled;
use crate::measure::segment_profiler::SegmentSubject;
use crate::policy_guard::PolicyGuard;
use crate::preprocess::Preprocess;
use stages::StagePlan;

/// The outcome of loading a version.
pub enum LoadOutcome {
    /// The version can serve; its model's definition is complete.
    Ready(Arc<LoadedVersion>, Box<ModelDefinition>),
    /// Another policy suits it better.
    Better(Box<Chosen>),
    /// The search has found other stages than those of this load. The version must be loaded by them.
    Stages(Box<FoundStages>),
}

/// A version on its way into service.
pub struct Loading<'a> {
    context: &'a LoadContext,
    policy: ChosenPolicy,
    /// How its stages are found.
    plan: StagePlan,
    definition: ModelDefinition,
    version: String,
    number: u64,
    file: &'a Path,
    /// The repaired copy of its file, if there is one.
    repaired: Option<Arc<RepairedFile>>,
    /// The model's part in operator groups, if its operators run in groups with other models. Set
    /// once it is loaded.
    group: Option<GroupMember>,
    /// The steps that turn pictures or texts into its requests.
    preprocess: Option<Arc<Preprocess>>,
    progress: &'a dyn LoadProgress,
    /// Whether the version runs in a process of its own.
    isolation: Isolation,
    /// Whether its file is in a repository, and came with no load request.
    may_come_again: bool,
    /// The time for measuring.
    time: &'a MeasuringTime<'a>,
    /// The time of one item in the trial.
    first: Option<Duration>,
    /// Whether it may come into service only if it answers its trial.
    must_answer: bool,
    /// Whether it answers made-up requests, or a sample that its configuration names: then it is
    /// measured.
    is_measured: bool,
    begin: Time,
    on_gpus: bool,
    /// Whether its batches are made on the device, to which its requests are routed.
    routed: bool,
    placed: ModelDevices,
    /// The part of a device that it is on; `None`: devices are not divided.
    part: Option<&'a Part>,
    /// The number of threads that it may run with.
    threads: Threads,
    source: ModelSource<'a>,
    budget: DeviceBudget<'a>,
    /// The CPU memory that it holds, if it is on the CPU.
    held: Option<HeldMemory>,
    /// Whether its requests may share batches, if that was checked.
    judgement: Option<RowJudgement>,
    /// The sizes that a lane of it was warmed up with: see [`WarmUp`].
    warmed: (Vec<usize>, Option<Vec<usize>>),
    /// The turn to load onto GPUs: memory use can be told apart only if models load one after
    /// another.
    _gpu_turn: Option<MutexGuard<'a, ()>>,
}

/// A model that an engine has loaded, and can run.
struct Runnable {
    model: Arc<dyn Model>,
    codec: Arc<BatchCodec>,
    padding: Option<Arc<Padding>>,
    /// The device on which it is tried and measured.
    device: usize,
    /// A lane on that device, until it is handed on.
    lane: Option<Box<dyn Lane>>,
}

impl<'a> Loading<'a> {
    /// Begins to load a version, once it is its turn.
    ///
    /// # Errors
    /// If its configuration does not go with its devices, or its file cannot be read; a
    /// [`PolicyError`] if only this policy cannot have the model.
    pub fn begin(
        context: &'a LoadContext,
        policy: &'a ChosenPolicy,
        why: &Why,
        definition: ModelDefinition,
        file: &VersionFile<'a>,
    ) -> anyhow::Result<Self> {
        let begin = context.clock.now();
        file.progress.step("reading", 0.0);
        let (options, name) = (&context.options, &definition.name);
        let isolation = context.isolation(&definition, file);
        let engine = context.engines.of(name, definition.format, options, isolation)?;
        let on_gpus = context.is_on_gpus(&definition);
        // A load that does not end holds up no other for good.
        let gpu_turn = on_gpus.then(|| context.gpu_turn.try_lock_for(LONGEST_TURN)).flatten();
        let turn = context.turns.begin();
        let routed = policy.name.makes_batches();
        let (on, part) = (context.partitions.all_of(name), context.partitions.of(name).map(|(_, part)| part));
        check_partitions(policy, name, on.len())?;
        let placed = context.device_map.of(&definition, &on, !routed, context.driver.devices())?;
        let (cut, threads) = cut_and_threads(context, policy, why, &definition, part, on_gpus);
        let checked = options.check_dispatch(name, policy.name, definition.dispatch.clone());
        checked.map_err(|reason| PolicyError::new(policy.name, reason))?;
        let limit = options.models.get(name).and_then(|model| model.gpu_memory);
        let budget = DeviceBudget::before(&**engine, if on_gpus { &placed.devices } else { &[] }, limit);
        let load = LoadOptions {
            memory: context.memory.clone(),
            python: python_options(options, &definition, file),
            ..LoadOptions::new(file.path, 1).with_cut(cut)
        };
        let source = ModelSource::open(engine, turn, &context.store, part, &definition, load)?;
        let held = (!on_gpus).then(|| context.model_memory.begin(name));
        let mut loading = Loading {
            version: file.version.to_string(),
            number: file.version,
            file: file.path,
            repaired: file.repaired.clone(),
            group: None,
            preprocess: None,
            progress: file.progress,
            time: file.time,
            first: None,
            judgement: None,
            may_come_again: file.may_come_again,
            isolation,
            must_answer: file.must_answer,
            is_measured: true,
            warmed: Default::default(),
            _gpu_turn: gpu_turn,
            context,
            policy: policy.clone(),
            plan: StagePlan::AsSet,
            definition,
            begin,
            on_gpus,
            routed,
            placed,
            part,
            threads,
            source,
            budget,
            held,
        };
        loading.plan_stages(why);
        Ok(loading)
    }

    /// Brings it into service.
    ///
    /// # Errors
    /// The defect of the file or its configuration, with a remedy; a [`PolicyError`] if only this
    /// policy cannot have the model.
    pub fn run(mut self, why: Why) -> anyhow::Result<LoadOutcome> {
        let mut runnable = self.run_on_an_engine(&why)?;
        self.progress.step("measuring", 0.2);
        let profiled = self.profile(&why, &mut runnable)?;
        self.take_lanes(profiled.at_once);
        let Runnable { model, codec, device, .. } = &runnable;
        let profiles = self.measuring(codec).by_site(&**model, &self.placed, *device, &profiled.profile);
        let (mut report, mut chosen) = match why {
            Why::Asked(report) => (report, None),
            Why::Chosen(chosen) => (chosen.report.clone(), Some(*chosen)),
            Why::Staged(found) => (found.policy, found.chosen),
            Why::Look(asked) => {
                let (report, known) = self.look(asked, &runnable, &profiled);
                let looked = |known| Chosen::looked(report.clone(), known, profiled.clone());
                let mut looked = known.map(looked).transpose()?;
                if let Some(better) = looked.take_if(|looked| looked.policy != PolicyName::EXCLUSIVE) {
                    return Ok(LoadOutcome::Better(Box::new(better)));
                }
                (report, looked)
            }
        };
        let mut segments = None;
        if self.routed {
            let measured = self.segments(&mut runnable, &profiled.profile);
            if let Some(found) = self.search_stages(&runnable, &profiled, &measured, (&report, chosen.as_ref())) {
                return Ok(LoadOutcome::Stages(Box::new(found)));
            }
            let is_cut = self.policy.settings.cut().0 != Cut::Whole;
            if let Some(looked_at) = chosen.take_if(|chosen| is_cut && !chosen.is_final) {
                let looked_at = looked_at.with_cut(&measured, &*self.policy.settings);
                let looked_at = looked_at.map_err(|reason| self.refuses(reason))?;
                report = looked_at.report.clone();
                chosen = Some(looked_at);
            }
            let stages = runnable.model.segments().try_into().unwrap_or(u16::MAX);
            report.staging = self.plan.report().map(|found| StagingReport { stages, ..found.clone() });
            segments = Some(measured);
            self.budget.begin_lanes(&*runnable.model);
        }
        self.progress.step("warming up", 0.9);
        let segments = segments.unwrap_or_else(|| SegmentProfile::even(&profiled.profile, runnable.model.segments()));
        let model = runnable.model.clone();
        self.group = self.group(&*model, profiled.threads);
        let (hosts, guard) = self.start(runnable, chosen.as_ref(), &profiled, segments)?;
        if let Some(graphs) = graph_report::summary(model.segments(), &model.graphs()) {
            tracing::info!(model = %self.definition.name, version = %self.version, "{graphs}");
        }
        if let Some(rewritten) = model.rewritten() {
            tracing::info!(model = %self.definition.name, version = %self.version, "{rewritten}");
        }
        Ok(self.finish(hosts, (report, chosen, guard), profiles, profiled.threads))
    }

    fn refuses(&self, reason: impl ToString) -> PolicyError {
        PolicyError::new(self.policy.name, reason)
    }

    fn measuring<'b>(&'b self, codec: &'b BatchCodec) -> Measuring<'b> {
        let Loading { context, definition, source, threads, is_measured, progress, time, first, .. } = self;
        let of = (&*definition.name, self.number);
        let (threads, answers, progress, time, first) = (*threads, *is_measured, *progress, *time, *first);
        let chooses_lanes = context.chooses_lanes(definition);
        Measuring { context, source, of, codec, threads, answers, chooses_lanes, progress, time, first }
    }

    /// Has the engine load the file. A file that cannot be cut is loaded whole, unless the policy
    /// needs the cut.
    fn open(&mut self) -> anyhow::Result<Arc<dyn Model>> {
        let (name, engine) = (&self.definition.name, self.source.engine);
        if self.definition.tensorrt.is_some() && self.on_gpus && engine.info().name != "tensorrt" {
            tracing::warn!(
                model = %name,
                "the model's configuration asks for TensorRT (optimization.execution_accelerators), but the engine is \
                 {}; --engine tensorrt compiles models for TensorRT",
                engine.info().name
            );
        }
        if has_graph(&self.definition)
            && let Some(held) = &self.held
        {
            let bytes = downbeat_engine::file_bytes(&self.source.options.path)?;
            held.hold(MemoryPart::Weights, engine.weight_copies().saturating_mul(bytes))?;
        }
        match self.source.load(1) {
            Err(error) if self.source.options.cut != Cut::Whole => {
                // If the whole file cannot be loaded either, the engine's error says why.
                self.source.options.cut = Cut::Whole;
                let whole = self.source.load(1)?;
                if self.policy.settings.cut().1 {
                    return Err(self.refuses(error.into_reason()).into());
                }
                tracing::info!(model = %name, %error, "the model cannot be cut, so it runs as one stage");
                Ok(whole)
            }
            loaded => Ok(loaded?),
        }
    }

    /// How requests become batches of the model, and whether they are padded for that. Completes
    /// the definition.
    fn codec(&mut self, model: &dyn Model) -> anyhow::Result<(BatchCodec, Option<Arc<Padding>>)> {
        self.definition.complete(model.signature())?;
        if let Some(most) = model.profile(Share::Whole).map(|profile| profile.max_batch()) {
            limit_batches(&mut self.definition, most, "the model runs no larger batches");
        }
        let defaults = &self.source.defaults;
        let takes_requests = model.takes_requests();
        let is_asked_for = |i: &&TensorBinding| i.optional && !defaults.contains_key(&i.client.name) && !takes_requests;
        for input in self.definition.inputs.iter().filter(is_asked_for) {
            tracing::warn!(
                model = %self.definition.name, input = %input.client.name,
                "this input is optional in the configuration, but the model file has no value for the input; every \
                 request must have the input"
            );
        }
        let of = |definition: &ModelDefinition| {
            let (inputs, outputs) = (definition.inputs.clone(), definition.outputs.clone());
            let codec = BatchCodec::new(inputs, outputs, definition.batching.max_batch_size);
            let codec = codec.named(&definition.name).taking_requests(takes_requests);
            codec.with_defaults(defaults).map_err(anyhow::Error::msg)
        };
        let codec = of(&self.definition)?;
        if !self.routed {
            return Ok((codec, None));
        }
        let padding = host::padding(&codec, &self.policy).map_err(|error| self.refuses(error))?;
        if padding.is_some() && codec.has_varying_shapes() {
            self.check_padding_pays()?;
        }
        let largest = self.policy.settings.largest_request(codec.max_batch).map_err(|error| self.refuses(error))?;
        limit_batches(&mut self.definition, largest, "the device policy's lanes take no larger batches");
        self.warn_of_levels();
        Ok((of(&self.definition)?, padding))
    }

    /// Warns about the model's queue policies that a device policy ignores.
    fn warn_of_levels(&self) {
        let (levels, policy) = (&self.definition.batching.levels, self.policy.name);
        if levels.len() > 1 {
            tracing::warn!(
                model = %self.definition.name, %policy,
                "the device policy ignores priority levels: all requests wait in one queue"
            );
        }
        if levels.iter().any(|level| level.default_timeout > Duration::ZERO) {
            tracing::warn!(
                model = %self.definition.name, %policy,
                "the device policy ignores queue timeouts: requests have deadlines by slo_ms and their own timeout"
            );
        }
    }

    /// Has the engine load the model and run it for the first time.
    fn first(&mut self, why: &Why) -> anyhow::Result<Runnable> {
        self.try_file()?;
        let model = self.open()?;
        if let Some(configuration) = model.configuration() {
            self.definition.adopt(configuration)?;
        }
        self.judge(&*model, why)?;
        let (codec, padding) = self.codec(&*model)?;
        self.preprocess = self.context.preprocess(&self.definition, &codec)?;
        self.run_first(model, codec, padding)
    }

    /// Runs the model for the first time, to see whether it answers, also padded if the policy
    /// pads. On a GPU, this warms up its batch sizes as far as the memory lasts.
    fn run_first(
        &mut self,
        model: Arc<dyn Model>,
        mut codec: BatchCodec,
        padding: Option<Arc<Padding>>,
    ) -> anyhow::Result<Runnable> {
        model.set_shapes(codec.shape_ranges(padding.as_deref().and_then(|padding| padding.max_length)));
        let device = self.first_device(&*model);
        if let Some(padding) = &padding {
            host::check_padding(&codec, padding, &*model, device, self.context.clock)
                .map_err(|error| self.padding_refused(error, &codec, &*model, device))?;
        }
        model.set_batched(codec.batched);
        if let Some(held) = &self.held {
            held.hold(MemoryPart::Run, warm_up::largest_run(&*model, &codec))?;
        }
        self.budget.begin_lanes(&*model);
        let mut lane = None;
        // An emulated model answers any request that fits its inputs.
        if model.profile(Share::Whole).is_none() {
            let mut first = model.lane_at(Place { device, share: Share::Whole })?;
            codec = self.try_out(codec, &*model, &mut *first)?;
            lane = Some(first);
        }
        let codec = Arc::new(if self.on_gpus { codec.for_model(model.clone()) } else { codec });
        if let Some(lane) = lane.as_mut().filter(|_| self.on_gpus) {
            // The warm-up comes before the measurements, so that these set up no more sizes than
            // there is memory for.
            let mut warm_up = self.warm_up(&*model, &codec);
            warm_up.whole(&[], device, &mut **lane)?;
            self.warmed = (warm_up.wanted, warm_up.run);
        }
        Ok(Runnable { model, codec, padding, device, lane })
    }

    /// The device that it is tried and measured on.
    fn first_device(&self, model: &dyn Model) -> usize {
        let devices = &self.placed.devices;
        let works = |device: &usize| model.lost(*device).is_none();
        devices.iter().copied().find(works).or(devices.first().copied()).unwrap_or(0)
    }

    fn warm_up<'b>(&'b self, model: &'b dyn Model, codec: &'b BatchCodec) -> WarmUp<'b> {
        let (wanted, run) = self.warmed.clone();
        WarmUp { name: &self.definition.name, model, codec, budget: &self.budget, wanted, run }
    }

    /// Measures the model's latencies, and compares them with its SLO.
    fn profile(&self, why: &Why, Runnable { model, codec, lane, .. }: &mut Runnable) -> anyhow::Result<Profiled> {
        let profiled = match why.chosen() {
            Some(chosen) => {
                self.measuring(codec).reload(chosen.profiled.threads, model, lane)?;
                chosen.profiled.clone()
            }
            None => {
                if !why.is_second() {
                    // A measurement on a busy machine puts the version there again.
                    self.context.unsettled.lock().remove(&(self.definition.name.clone(), self.number));
                }
                self.measuring(codec).profile(model, lane)?
            }
        };
        let name = &self.definition.name;
        let needed = profiled.profile.latency(1);
        let slo = self.context.options.slo(name, self.definition.slo).filter(|_| self.is_measured);
        if let Some(slo) = slo.filter(|slo| needed > *slo) {
            tracing::warn!(
                model = %name, version = self.version, %slo, %needed,
                "a single request takes longer than the model's SLO: nearly all requests will be rejected"
            );
        }
        Ok(profiled)
    }

    /// Lets `at_once` of the model's batches run at the same time, as measured. 0: not measured.
    ///
    /// The model's configuration stays as the files have it: backends of a cluster that measured
    /// different numbers still serve the same model.
    fn take_lanes(&mut self, at_once: u32) {
        if at_once > 1 && self.context.chooses_lanes(&self.definition) {
            self.definition.instances = at_once;
        }
    }

    /// Looks whether another policy than `exclusive` suits it. Returns the report and the
    /// measurements behind it.
    fn look(
        &self,
        asked: PolicyReport,
        runnable: &Runnable,
        Profiled { profile, threads, .. }: &Profiled,
    ) -> (PolicyReport, Option<Known>) {
        let Runnable { model, codec, device, .. } = runnable;
        let all_cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let runs_elsewhere = self.on_gpus || is_emulated(&self.definition);
        let auto = AutoSubject {
            options: &self.context.options,
            definition: &self.definition,
            codec,
            profile,
            is_measured: self.is_measured,
            cores: self.part.map_or_else(all_cores, |part| part.threads),
            threads: *threads,
            runs_elsewhere,
            at_once: if runs_elsewhere { 1 } else { self.at_once() },
        };
        self.measuring(codec).look(&auto, asked, &**model, *device)
    }

    /// The most of its batches that run at once on its devices.
    fn at_once(&self) -> u32 {
        self.context.at_once(&self.definition).min(self.placed.places().count() as u32)
    }

    /// The profile of segments that its policy decides by.
    fn segments(&self, runnable: &mut Runnable, profile: &LatencyProfile) -> SegmentProfile {
        let lane = runnable.lane.take();
        let measuring = self.measuring(&runnable.codec);
        let subject = SegmentSubject {
            subject: measuring.subject(&*runnable.model),
            padding: runnable.padding.as_deref(),
            budget: self.time.part(0.7),
        };
        measuring.segments(&subject, profile, self.plan.guess(), lane)
    }

    /// Gives it a queue, if the scheduler makes its batches, and logs that it is ready.
    fn finish(
        self,
        hosts: Placements,
        (report, chosen, guard): (PolicyReport, Option<Chosen>, Option<Arc<PolicyGuard>>),
        profiles: Vec<LatencyProfile>,
        threads: usize,
    ) -> LoadOutcome {
        if self.time.is_short() {
            let version = (self.definition.name.clone(), self.number);
            self.context.unsettled.lock().insert(version, Unsettled::InPart);
        }
        // Samples that a configuration names have run by now.
        let answers = self.is_measured || !self.definition.warmups.is_empty();
        let Loading {
            context,
            definition,
            version,
            placed,
            source,
            repaired,
            held,
            begin,
            routed,
            preprocess,
            judgement,
            ..
        } = self;
        let metrics = context.metrics.model(&definition.name, &version);
        let queue_bound = context.queue_bound(&definition);
        let mut loaded = LoadedVersion::new(hosts, report, metrics, queue_bound);
        (loaded.held, loaded.folder, loaded.chosen, loaded.preprocess) = (held, source.folder, chosen, preprocess);
        (loaded.rows, loaded.answers, loaded.guard, loaded.repaired) = (judgement, answers, guard, repaired);
        loaded.codec.begin_service();
        if !routed {
            let at_once = context.at_once(&definition);
            let options = Queue::options(&context.options, &definition, &placed, &profiles, at_once);
            let key = loaded.codec.profiled_key();
            let name = loaded.queue_name(&key);
            let queue = context.driver.add_queue(name, options, &placed, profiles, loaded.hosts.models());
            // Only this load knows of the version yet, so there cannot be another queue.
            let _ = loaded.insert_queue(key, queue);
        }
        let took = context.clock.now().since(begin);
        loaded.load_time = took;
        context.metrics.set_load_duration(&definition.name, &version, took);
        if let Some(held) = &loaded.held {
            held.say(&context.metrics, &definition.name, &version);
        }
        let (engine, lanes) = (source.engine.info().name, definition.instances.max(1));
        tracing::info!(
            model = %definition.name, %version, engine, threads, lanes, load_ms = took.as_millis_f64(),
            "ready"
        );
        LoadOutcome::Ready(Arc::new(loaded), Box::new(definition))
    }
}

/// Checks that a policy with lanes of its own has the model on one partition.
///
/// # Errors
/// A [`PolicyError`] if the model is on several.
fn check_partitions(policy: &ChosenPolicy, model: &str, partitions: usize) -> Result<(), PolicyError> {
    if !policy.name.makes_batches() || partitions <= 1 {
        return Ok(());
    }
    let reason = format!(
        "the options put the model on {partitions} partitions, but this policy has lanes on one only; name one \
         partition in [models.{model}] partition, or use the policy exclusive"
    );
    Err(PolicyError::new(policy.name, reason))
}

/// The cut of a version's file and the number of threads that the version may run with.
fn cut_and_threads(
    context: &LoadContext,
    policy: &ChosenPolicy,
    why: &Why,
    definition: &ModelDefinition,
    part: Option<&Part>,
    on_gpus: bool,
) -> (Cut, Threads) {
    let (name, is_python) = (&*definition.name, is_python(definition));
    let most = part.map_or_else(|| most_threads(&context.options), |part| part.threads);
    let group = policy.name.forms_groups().then_some(&context.predictor);
    let group = group.filter(|group| group.known(name).is_some());
    let cut = match policy.settings.cut() {
        (_, false) if let Some(known) = group.and_then(|group| group.known(name)) => known.cut(),
        (cut, _) => cut,
    };
    let threads = match context.options.chosen_threads(name) {
        // The threads of the measurements that chose the policy.
        _ if let Some(chosen) = why.chosen() => Threads::Chosen(chosen.profiled.threads),
        // The threads of the measurements that chose the stages.
        _ if let Why::Staged(found) = why => Threads::Chosen(found.threads),
        // The threads of the samples of its groups.
        None if let Some(threads) = group.and_then(|group| group.threads()) => Threads::Chosen(threads),
        // On GPUs, the work that stays on the CPU is not worth a second thread.
        _ if on_gpus || is_python => Threads::Chosen(1),
        Some(threads) => Threads::Chosen(part.map_or(threads, |part| threads.min(part.threads))),
        None => Threads::UpTo((most / policy.settings.at_once().max(1) as usize).max(1)),
    };
    (cut, threads)
}

/// Limits the batches of a model to `most` items, and logs why.
fn limit_batches(definition: &mut ModelDefinition, most: u32, why: &str) {
    if most < definition.batching.max_batch_size {
        tracing::info!(model = %definition.name, max_batch_size = most, "{why}");
        definition.batching.max_batch_size = most;
        definition.config.max_batch_size = i32::try_from(most).unwrap_or(i32::MAX);
    }
}
