//! Measures a model while it is loaded, or takes its measurements from the store. The measurements
//! are its latency by site and by segment, and the overlap of two lanes. Partitions on which a
//! model runs alike are one *site*.

use std::sync::Arc;

use downbeat_core::device::{Overlap, PartitionId, SegmentProfile};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_engine::{Lane, Model, Place, Share};
use downbeat_host::device_map::ModelDevices;
use downbeat_host::request::batch_codec::{BatchCodec, PROFILED_LENGTH};
use downbeat_service::report::machine_load::LoadWatch;
use downbeat_service::report::policy_report::PolicyReport;

use crate::load::engines::MOST_EXECUTORS;
use crate::load::load_context::{LoadContext, LoadProgress};
use crate::load::model_source::ModelSource;
use crate::load::policy_choice::{AutoSubject, Known, Profiled};
use crate::measure::auto_profiler::{self, StoredAuto};
use crate::measure::lane_profiler::{self, lanes_worth_having};
use crate::measure::measuring_time::{MeasuringTime, Within};
use crate::measure::profile_store::StoredProfile;
use crate::measure::profiler::{self, Measurement, Threads, is_quiet};
use crate::measure::remeasuring::Unsettled;
use crate::measure::sampler::{Subject, Watch};
use crate::measure::segment_profiler::SegmentSubject;

/// A model whose largest batch takes less than this on one thread is left on one: waking others
/// costs more.
const WORTH_THREADS: Duration = Duration::from_micros(500);
/// A model slower than this with one item on one thread is assumed to be faster on several, if
/// there is no time to try.
const SLOW: Duration = Duration::from_millis(50);
/// Runs of one item that a comparison of threads takes at least.
const COMPARED_RUNS: u64 = 7;
/// Items times runs that two lanes together take to measure, at most.
const PAIR_RUNS: u64 = 20;
/// Lanes are tried side by side with batches that take no longer than this.
const LANES_TRIED_WITH: Duration = Duration::from_millis(50);
/// A guess for a larger batch is this many times the proportional time. A few runs may have been
/// quicker than usual, and a guess that is too short makes answers late.
const GUESS_MARGIN: f64 = 1.25;
/// The latency guess of a model that is not measured, until it has been observed.
const UNKNOWN: Duration = Duration::from_millis(1);

/// A model that is measured.
pub struct Measuring<'a> {
    pub context: &'a LoadContext,
    pub source: &'a ModelSource<'a>,
    /// The model's name, and the number of its version.
    pub of: (&'a str, u64),
    pub codec: &'a BatchCodec,
    /// The number of threads that it may run with.
    pub threads: Threads,
    /// Whether it answers made-up requests.
    pub answers: bool,
    /// Whether the number of batches that run at the same time is measured: the options and the
    /// configuration give none.
    pub chooses_lanes: bool,
    pub progress: &'a dyn LoadProgress,
    /// The time for measuring.
    pub time: &'a MeasuringTime<'a>,
    /// The time of one item in the trial, on one thread.
    pub first: Option<Duration>,
}

impl Measuring<'_> {
    /// The latency profile, stored or measured, and its number of threads, with which `model` is
    /// loaded afterwards. `lane` is a lane of the model, if one exists already.
    ///
    /// # Errors
    /// If it cannot be loaded with that number of threads.
    pub fn profile(&self, model: &mut Arc<dyn Model>, lane: &mut Option<Box<dyn Lane>>) -> anyhow::Result<Profiled> {
        let known = |profile, threads| Ok(Profiled { profile, threads, at_once: 0 });
        if let Some(profile) = model.profile(Share::Whole) {
            return known(profile, 1);
        }
        let unknown = || LatencyProfile::linear(UNKNOWN, UNKNOWN, self.codec.max_batch).map(|guess| guess.learned(0));
        if !self.context.options.profiling.enabled || !self.answers {
            self.reload(self.threads.most(), model, lane)?;
            return known(unknown()?, self.threads.most());
        }
        let key = self.source.batch_key(self.threads, self.codec.max_batch);
        let has_lanes = |stored: &StoredProfile| stored.at_once > 0 || self.most_lanes(stored.threads) < 2;
        if let Some((profile, stored)) = self.stored(&key, &**model, has_lanes) {
            self.reload(stored.threads, model, lane)?;
            return Ok(Profiled { profile, threads: stored.threads, at_once: stored.at_once });
        }
        let mut threads = 1;
        if let Threads::Chosen(chosen) = self.threads {
            threads = chosen;
            self.reload(threads, model, lane)?;
        }
        let (measured, settled) = self.timed(|| self.measure(model, lane, &mut threads));
        if self.time.is_given_up() {
            self.context.unsettled.lock().insert((self.of.0.to_owned(), self.of.1), Unsettled::InPart);
            anyhow::bail!("requests left no time to measure the model");
        }
        let path = self.source.options.path.display();
        let (measurements, at_once) = match measured {
            Ok(measured) => measured,
            // A model may refuse made-up values (an index, a length); it is served all the same.
            Err(error) => {
                tracing::warn!(
                    %path, %error,
                    "the model cannot be measured with made-up requests; the server learns its latency in service"
                );
                return known(unknown()?, threads);
            }
        };
        let profile = self.fitted(&**model, &measurements)?;
        let is_whole = !self.time.is_short();
        if !is_whole {
            tracing::info!(
                %path, threads, known = profile.known(),
                "the model was measured in part, because --profiling-budget is used up; the server measures the rest \
                 behind the service"
            );
        } else if !settled {
            tracing::info!(
                %path, threads,
                "the model was measured on a busy machine; the server measures again when the machine is idle"
            );
        }
        self.keep(key, (threads, at_once), settled && is_whole, measurements);
        Ok(Profiled { profile, threads, at_once })
    }

    /// The most lanes that it may have side by side, of `threads` threads each.
    fn most_lanes(&self, threads: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.chooses_lanes { (cores / threads.max(1)).min(MOST_EXECUTORS) } else { 1 }
    }

    /// How many batches are worth running at the same time; 0: not measurable, or there is no
    /// choice. `measurements` show which batches take too long to try.
    fn at_once(&self, model: &dyn Model, threads: usize, measurements: &[Measurement]) -> u32 {
        let most = self.most_lanes(threads);
        if most < 2 {
            return 0;
        }
        self.progress.step("choosing the lanes", 0.85);
        let is_brief = |m: &&Measurement| m.median() <= LANES_TRIED_WITH;
        let largest = measurements.iter().filter(is_brief).map(|m| m.batch).max().unwrap_or(1);
        let mut sizes = vec![1, largest];
        sizes.dedup();
        let tried = measurements.iter().filter(|m| sizes.contains(&m.batch));
        let first = lane_profiler::step(tried.map(Measurement::median));
        let (subject, clock) = (self.subject(model), self.context.clock);
        let begin = clock.now();
        let allows = |expected| self.time.allows(clock.now().since(begin) + expected);
        let lanes = self.spend(|| lanes_worth_having(&subject, &sizes, most, first, allows));
        lanes.ok().flatten().map_or(0, |lanes| lanes as u32)
    }

    /// Times something. Returns the result, and whether the machine was otherwise idle. If it was
    /// not, the version is measured again once the machine is idle.
    fn timed<T>(&self, what: impl FnOnce() -> T) -> (T, bool) {
        let LoadContext { metrics, clock, unsettled, .. } = self.context;
        let ((done, is_quiet), was_alone) = self.source.turn.timed(|| {
            let (watch, busy_before, begin) = (LoadWatch::start(), metrics.totals().busy, clock.now());
            let done = what();
            // Neighbours, or this server's own models: either has had the cores that were counted
            // on.
            let took = clock.now().since(begin).as_secs_f64().max(f64::MIN_POSITIVE);
            let served = metrics.totals().busy.saturating_sub(busy_before).as_secs_f64() / took;
            (done, is_quiet(watch.others(), served))
        });
        let settled = is_quiet && was_alone;
        if !settled {
            unsettled.lock().entry((self.of.0.to_owned(), self.of.1)).or_insert(Unsettled::OnBusyMachine);
        }
        (done, settled)
    }

    /// Loads the model again for its profile's threads, if these are several.
    pub fn reload(
        &self,
        threads: usize,
        model: &mut Arc<dyn Model>,
        lane: &mut Option<Box<dyn Lane>>,
    ) -> anyhow::Result<()> {
        if threads > 1 {
            *lane = None;
            *model = self.source.load(threads)?;
        }
        Ok(())
    }

    /// The stored profile, with the file that holds it. Before the service, a profile serves too
    /// that was measured in part, on a busy machine, or is not `whole`. Then the version is
    /// measured again behind the service.
    fn stored(
        &self,
        key: &Result<String, String>,
        model: &dyn Model,
        whole: impl FnOnce(&StoredProfile) -> bool,
    ) -> Option<(LatencyProfile, StoredProfile)> {
        let stored = self.source.store.get::<StoredProfile>(key.as_ref().ok()?)?;
        if !(stored.settled && profiler::are_trusted(&stored.measurements) && whole(&stored)) {
            if self.time.is_behind() {
                return None;
            }
            self.time.fall_short();
        }
        Some((self.fitted(model, &stored.measurements).ok()?, stored))
    }

    /// Stores the measurements with this number of threads, and how many batches are worth running
    /// at the same time.
    fn keep(
        &self,
        key: Result<String, String>,
        (threads, at_once): (usize, u32),
        settled: bool,
        measurements: Vec<Measurement>,
    ) {
        let (model, engine) = self.source.names();
        let stored = StoredProfile { model, engine, threads, at_once, settled, measurements };
        self.source.store.keep(key, "the latency profile", &stored);
    }

    /// Measures as many batch sizes as the time allows: on one thread, or on all its threads if
    /// these are faster. Then measures how many batches are worth running at the same time, as of
    /// [`Measuring::at_once`].
    fn measure(
        &self,
        model: &mut Arc<dyn Model>,
        lane: &mut Option<Box<dyn Lane>>,
        threads: &mut usize,
    ) -> anyhow::Result<(Vec<Measurement>, u32)> {
        let lane_of = |model: &dyn Model, lane: Option<Box<dyn Lane>>| lane.map_or_else(|| model.lane(), Ok);
        let mut own = lane_of(&**model, lane.take())?;
        let one = match self.first {
            Some(first) => first,
            None => self.spend(|| self.subject(&**model).run(&mut *own, &self.subject(&**model).item()?, 1))?,
        };
        if let Threads::UpTo(most) = self.threads
            && most > 1
            && self.is_worth_trying(&**model, &mut *own, one)?
        {
            self.progress.step("choosing the threads", 0.25);
            let has_time = self.time.allows(one.saturating_mul(COMPARED_RUNS));
            // A slow model does much in a run, which threads mostly share.
            if has_time || one > SLOW {
                let wide = self.source.load(most)?;
                let subjects = [self.subject(&**model), self.subject(&*wide)];
                let mut nobody = ();
                let mut watch = self.within(&mut nobody);
                let budget = self.time.part(0.35);
                let compare = || profiler::compare(subjects, self.codec.max_batch, budget, &mut watch);
                if !has_time || self.spend(compare)? {
                    (own, *model, *threads) = (wide.lane()?, wide, most);
                }
            }
        }
        let measured = self.sizes(&**model, &mut *own, one);
        *lane = Some(own);
        let measurements = measured?;
        let at_once = self.at_once(&**model, *threads, &measurements);
        Ok((measurements, at_once))
    }

    /// Whether more threads may be worth it for a model that takes `one` for one item: its largest
    /// batch takes long.
    fn is_worth_trying(&self, model: &dyn Model, lane: &mut dyn Lane, one: Duration) -> anyhow::Result<bool> {
        let (largest, part) = (self.codec.max_batch, self.time.part(0.1));
        // For a brief model, the first run of one item is no reliable measure.
        if one.saturating_mul(3 * u64::from(largest)) > part {
            return Ok(one > SLOW || self.time.left() > Duration::ZERO);
        }
        let mut nobody = ();
        let mut watch = self.within(&mut nobody);
        let measured = self.spend(|| self.subject(model).measure(lane, &[largest], part, &mut watch))?;
        Ok(measured.is_empty() || measured.iter().any(|m| m.min_ns > WORTH_THREADS.as_nanos()))
    }

    /// Measures as many sizes as there is time for, the smallest first. `one` is the time of a
    /// single item before. Without any time left, the profile rests on this time alone.
    fn sizes(&self, model: &dyn Model, lane: &mut dyn Lane, one: Duration) -> anyhow::Result<Vec<Measurement>> {
        if !self.time.allows(one) {
            return Ok(vec![Measurement::of(1, &[one])]);
        }
        let subject = self.subject(model);
        let sizes = subject.timed(&profiler::default_sizes(self.codec.max_batch));
        let mut told = |m: &Measurement, done: f64| {
            let fraction = 0.2 + 0.7 * (0.35 + 0.65 * done);
            self.progress.step(&format!("measured batch {}: {}", m.batch, m.median()), fraction);
        };
        let mut watch = self.within(&mut told);
        let measured = self.spend(|| subject.measure(lane, &sizes, self.time.part(0.7), &mut watch))?;
        if measured.len() < sizes.len() || !profiler::are_trusted(&measured) {
            self.time.fall_short();
        }
        Ok(if measured.is_empty() { vec![Measurement::of(1, &[one])] } else { measured })
    }

    /// Fits a profile to the measurements. For larger sizes the profile guesses times in proportion
    /// to the size, with a margin.
    fn fitted(&self, model: &dyn Model, measurements: &[Measurement]) -> anyhow::Result<LatencyProfile> {
        let profile = profiler::profile(measurements)?;
        let sizes = self.subject(model).timed(&profiler::default_sizes(self.codec.max_batch));
        let (measured, largest) = (profile.max_batch(), sizes.last().copied().unwrap_or(1));
        // Before the service, a single run may be the first one of the model, which is far slower
        // than later runs. As a guess, such a time refuses no first request.
        let is_known = |m: &&Measurement| m.runs > 1 || self.time.is_behind();
        let known = measurements.iter().filter(is_known).map(|m| m.batch).max().unwrap_or(0);
        if measured >= largest {
            return Ok(profile.learned(known));
        }
        let last = profile.latency(measured).as_secs_f64();
        let guess = |batch: u32| Duration::from_secs_f64(GUESS_MARGIN * last * f64::from(batch) / f64::from(measured));
        let latency = |batch| if batch <= measured { profile.latency(batch) } else { guess(batch) };
        Ok(LatencyProfile::from_table((1..=largest).map(latency).collect())?.learned(known))
    }

    /// A watch that keeps measurements within the time left.
    fn within<'b, M>(&'b self, told: &'b mut dyn Watch<M>) -> Within<'b, M> {
        Within { time: self.time, turn: &self.source.turn, told }
    }

    fn spend<T>(&self, what: impl FnOnce() -> T) -> T {
        self.time.spend(self.context.clock, what)
    }

    /// The model's latency at each of its sites: `profile` for the first partition of `device`,
    /// measured or stored for the others. A site that cannot be measured gets the same profile,
    /// until it has been observed.
    pub fn by_site(
        &self,
        model: &dyn Model,
        placed: &ModelDevices,
        device: usize,
        profile: &LatencyProfile,
    ) -> Vec<LatencyProfile> {
        let LoadContext { engines, partitions, options, .. } = self.context;
        let measured = |site: usize| {
            let is_there = |(other, partition): &(usize, PartitionId)| {
                placed.site(*other, *partition) == site && model.lost(*other).is_none()
            };
            let (other, partition) = placed.places().find(is_there)?;
            let (home, gpu) = (placed.home(), engines.gpus.get(other));
            if site == placed.site(device, home) {
                return None;
            }
            let part = partitions.parts.get(partition.0 as usize).filter(|_| partition != home);
            let share = part.map_or(Share::Whole, |part| part.share);
            if let known @ Some(_) = model.profile(share) {
                return known;
            }
            if !options.profiling.enabled || !self.answers || (part.is_none() && gpu.is_none()) {
                return None;
            }
            let on_gpu = gpu.map(|gpu| format!("-on-{}-{}", gpu.name.replace(' ', "_"), gpu.multiprocessors));
            let on_part = part.map(|part| format!("-part-{}", part.size.replace(' ', "_")));
            let key = self.source.batch_key(self.threads, self.codec.max_batch);
            let key = key.map(|key| key + &on_gpu.unwrap_or_default() + &on_part.unwrap_or_default());
            if let Some((profile, _)) = self.stored(&key, model, |_| true) {
                return Some(profile);
            }
            let mut lane = model.lane_at(Place { device: other, share }).ok()?;
            let (measurements, settled) = self.timed(|| self.sizes(model, &mut *lane, profile.latency(1)));
            let measurements = measurements.ok()?;
            let profile = self.fitted(model, &measurements).ok()?;
            self.keep(key, (1, 0), settled && !self.time.is_short(), measurements);
            Some(profile)
        };
        (0..placed.sites()).map(|site| measured(site).unwrap_or_else(|| profile.clone())).collect()
    }

    /// The time to hand work over to another thread. The measurement is repeated until it was made
    /// on a quiet machine.
    fn launch(&self) -> Option<Duration> {
        let known = *self.context.launch.lock();
        known.or_else(|| {
            if !self.time.allows(auto_profiler::HANDS_OVER_FOR) {
                return None;
            }
            let (launch, settled) = self.timed(|| self.spend(|| auto_profiler::hand_over_time(self.context.clock)));
            *self.context.launch.lock() = launch.filter(|_| settled);
            launch
        })
    }

    pub fn subject<'a>(&'a self, model: &'a dyn Model) -> Subject<'a> {
        Subject { model, codec: self.codec, varying: PROFILED_LENGTH, clock: self.context.clock }
    }

    /// The profile that a device policy decides by: the times of the model's segments by items and
    /// length. `profile` is the whole model's. `guess` serves if there is no time to measure.
    pub fn segments(
        &self,
        subject: &SegmentSubject<'_>,
        profile: &LatencyProfile,
        guess: Option<&SegmentProfile>,
        lane: Option<Box<dyn Lane>>,
    ) -> SegmentProfile {
        let SegmentSubject { subject: Subject { model, .. }, padding, .. } = *subject;
        let guess = guess.filter(|guess| usize::from(guess.segments()) == model.segments());
        let guessed = || guess.cloned().unwrap_or_else(|| SegmentProfile::even(profile, model.segments()));
        let is_known = model.profile(Share::Whole).is_some() || (model.segments() == 1 && padding.is_none());
        if is_known || !self.context.options.profiling.enabled || !self.answers {
            return SegmentProfile::even(profile, model.segments());
        }
        let store = self.source.store;
        let key = self.source.batch_key(self.threads, self.codec.max_batch).ok();
        if let Some(stored) = key.as_ref().and_then(|key| subject.stored(store, key)) {
            return stored;
        }
        let lane = lane.map_or_else(|| model.lane(), Ok).ok();
        if !self.time.allows(profile.latency(1)) {
            return guessed();
        }
        let timed = |measure: &mut dyn FnMut() -> _| self.timed(|| self.spend(measure));
        let mut nobody = ();
        let mut watch = self.within(&mut nobody);
        let measured = lane.and_then(|mut lane| subject.measured(&mut *lane, store, key.as_deref(), &mut watch, timed));
        measured.unwrap_or_else(|| {
            tracing::warn!(
                path = %self.source.options.path.display(),
                "the model's segments cannot be measured with made-up requests; the server assumes that all take the \
                 same time"
            );
            guessed()
        })
    }

    /// The time of a launch, and the overlap of two lanes of a model with this profile, stored or
    /// measured. `None`: they cannot be measured now.
    pub fn together(&self, model: &dyn Model, device: usize, profile: &LatencyProfile) -> Option<(Duration, Overlap)> {
        let key = self.together_key(model);
        if let Some(stored) = self.stored_together(&key) {
            return Some((stored.launch, stored.overlap));
        }
        let launch = self.launch()?;
        Some((launch, self.overlap(model, device, profile, launch, key)?))
    }

    fn together_key(&self, model: &dyn Model) -> Result<String, String> {
        let cut = if model.segments() > 1 { format!("-cut{}", model.segments()) } else { String::new() };
        self.source.batch_key(self.threads, self.codec.max_batch).map(|key| format!("{key}-together{cut}"))
    }

    fn stored_together(&self, key: &Result<String, String>) -> Option<StoredAuto> {
        let stored = key.as_ref().ok().and_then(|key| self.source.store.get::<StoredAuto>(key));
        stored.filter(|stored| stored.settled)
    }

    /// Measures the overlap of two lanes, and stores it under `key`.
    fn overlap(
        &self,
        model: &dyn Model,
        device: usize,
        profile: &LatencyProfile,
        launch: Duration,
        key: Result<String, String>,
    ) -> Option<Overlap> {
        let max_batch = self.codec.max_batch;
        let (one, largest) = (profile.latency(1), profile.latency(max_batch));
        if !self.time.allows((one + largest).saturating_mul(PAIR_RUNS)) {
            return None;
        }
        let mut nobody = ();
        let mut watch = self.within(&mut nobody);
        let measure = || auto_profiler::overlap(&self.subject(model), device, max_batch, &mut watch);
        let (overlap, settled) = self.timed(|| self.spend(measure));
        let stored = StoredAuto { launch, overlap: overlap?, settled };
        self.source.store.keep(key, "the overlap of two lanes", &stored);
        Some(stored.overlap)
    }

    /// Looks whether another policy than `exclusive` suits a model that is loaded for `exclusive`.
    /// Returns the report and the measurements behind it.
    pub fn look(
        &self,
        auto: &AutoSubject<'_>,
        asked: PolicyReport,
        model: &dyn Model,
        device: usize,
    ) -> (PolicyReport, Option<Known>) {
        let key = self.together_key(model);
        let stored = self.stored_together(&key);
        let known = stored.as_ref().map(|stored| stored.launch);
        let launch = || known.or_else(|| self.launch());
        let overlap = |launch| match stored {
            Some(stored) => Some(stored.overlap),
            None => self.overlap(model, device, auto.profile, launch, key),
        };
        let (choice, measured, known) = auto.choose(launch, overlap);
        let mut report = PolicyReport { measured, ..asked };
        report.take_choice(&choice);
        tracing::info!(
            model = %auto.definition.name, policy = %choice.policy, reason = %choice.reason,
            "chose the policy that suits the model"
        );
        (report, known)
    }
}
