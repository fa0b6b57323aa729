//! What is measured of a model while it is loaded, or was stored of it before: its latency, by site and by segments, and what two lanes do together.

use std::sync::Arc;

use downbeat_core::device::{PartitionId, SegmentProfile};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_engine::{Lane, Model, Place, Share};

use crate::auto_profiler::{self, StoredAuto};
use crate::batch_codec::{BatchCodec, PROFILED_LENGTH};
use crate::engines::MOST_EXECUTORS;
use crate::lane_profiler::lanes_worth_having;
use crate::load_context::{LoadContext, LoadProgress};
use crate::machine_load::LoadWatch;
use crate::model_source::ModelSource;
use crate::placement::Placed;
use crate::policy_choice::{AutoSubject, Known, Profiled};
use crate::policy_report::PolicyReport;
use crate::profile_store::StoredProfile;
use crate::profiler::{self, Measurement, Threads, is_quiet};
use crate::sampler::Subject;
use crate::segment_profiler::SegmentSubject;

/// A model whose largest batch takes less than this on one thread is left on one: waking others costs more.
const WORTH_THREADS: Duration = Duration::from_micros(500);
/// Lanes are tried side by side with batches that take no longer than this.
const LANES_TRIED_WITH: Duration = Duration::from_millis(50);
/// The profile of a model that is not to be measured, until it has been observed.
const UNKNOWN: Duration = Duration::from_millis(1);

/// A model that is measured.
pub struct Measuring<'a> {
    pub context: &'a LoadContext,
    pub source: &'a ModelSource<'a>,
    /// Its name, and the number of its version.
    pub of: (&'a str, u64),
    pub codec: &'a BatchCodec,
    /// On how many threads it may run.
    pub threads: Threads,
    /// Whether it answers requests of our own making.
    pub answers: bool,
    /// Whether the number of batches that run at the same time is measured: the options and the configuration give none.
    pub chooses_lanes: bool,
    pub progress: &'a dyn LoadProgress,
}

impl Measuring<'_> {
    /// The latency profile, stored or measured, and the number of threads it was measured with, on which `model` is
    /// loaded afterwards. `lane` is one of the model's, where there is one already.
    ///
    /// # Errors
    /// If it cannot be loaded on those threads.
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
        if let Some((profile, stored)) = self.stored(&key).filter(|(_, stored)| has_lanes(stored)) {
            self.reload(stored.threads, model, lane)?;
            return Ok(Profiled { profile, threads: stored.threads, at_once: stored.at_once });
        }
        let mut threads = 1;
        if let Threads::Chosen(chosen) = self.threads {
            threads = chosen;
            self.reload(threads, model, lane)?;
        }
        let (measured, settled) = self.timed(|| self.measure(model, lane, &mut threads));
        let path = self.source.options.path.display();
        let (measurements, at_once) = match measured {
            Ok(measured) => measured,
            // A model may refuse what is made up (an index, a length); that is no reason not to serve it.
            Err(error) => {
                tracing::warn!(%path, %error, "cannot be measured with requests of our own making; its latency is learned in service");
                return known(unknown()?, threads);
            }
        };
        let profile = profiler::profile(&measurements)?;
        if !settled {
            tracing::info!(
                %path, threads,
                "measured on a machine with other things to do; it is measured again when there are none, or at the next start"
            );
        }
        self.keep(key, (threads, at_once), settled, measurements);
        Ok(Profiled { profile, threads, at_once })
    }

    /// The most lanes that it may have side by side, of so many threads each.
    fn most_lanes(&self, threads: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.chooses_lanes { (cores / threads.max(1)).min(MOST_EXECUTORS) } else { 1 }
    }

    /// How many batches are worth running at the same time; 0: that cannot be measured, or there is no choice. `measurements` say which batches take too long to try it with.
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
        lanes_worth_having(&self.subject(model), &sizes, most).map_or(0, |lanes| lanes as u32)
    }

    /// Times something; gives it, and whether the machine had nothing else to do meanwhile. If it had, the version is measured again once there is nothing else.
    fn timed<T>(&self, what: impl FnOnce() -> T) -> (T, bool) {
        let LoadContext { metrics, clock, unsettled, .. } = self.context;
        let ((done, is_quiet), was_alone) = self.source.turn.timed(|| {
            let (watch, busy_before, begin) = (LoadWatch::start(), metrics.totals().busy, clock.now());
            let done = what();
            // Neighbours, or this server's own models: either has had the cores that were counted on.
            let took = clock.now().since(begin).as_secs_f64().max(f64::MIN_POSITIVE);
            let served = metrics.totals().busy.saturating_sub(busy_before).as_secs_f64() / took;
            (done, is_quiet(watch.others(), served))
        });
        let settled = is_quiet && was_alone;
        if !settled {
            unsettled.lock().insert((self.of.0.to_owned(), self.of.1));
        }
        (done, settled)
    }

    /// Loads the model for its profile's threads, where it is on one.
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

    /// A stored profile that need not be measured again, with the file that holds the profile.
    fn stored(&self, key: &Result<String, String>) -> Option<(LatencyProfile, StoredProfile)> {
        let is_good = |stored: &StoredProfile| stored.settled && profiler::are_trusted(&stored.measurements);
        let stored = self.source.store.get::<StoredProfile>(key.as_ref().ok()?).filter(is_good)?;
        Some((profiler::profile(&stored.measurements).ok()?, stored))
    }

    /// Keeps what was measured, on so many threads, and how many batches are worth running at the same time.
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

    /// Measures the batches of all sizes, on one thread or, where that is faster, on as many as it may have. Then measures how many are worth running at the
    /// same time, as of [`Measuring::at_once`].
    fn measure(
        &self,
        model: &mut Arc<dyn Model>,
        lane: &mut Option<Box<dyn Lane>>,
        threads: &mut usize,
    ) -> anyhow::Result<(Vec<Measurement>, u32)> {
        let largest = self.codec.max_batch;
        let budget = self.context.options.profiling.budget;
        let part = |share: f64| Duration::from_secs_f64(budget.as_secs_f64() * share);
        if let Threads::UpTo(most) = self.threads
            && most > 1
        {
            let one = self.subject(&**model).measure(&mut *model.lane()?, &[largest], part(0.05), &mut ())?;
            if one.iter().any(|m| m.min_ns > WORTH_THREADS.as_nanos()) || one.is_empty() {
                self.progress.step("choosing the threads", 0.25);
                let wide = self.source.load(most)?;
                if profiler::compare([self.subject(&**model), self.subject(&*wide)], largest, part(0.3))? {
                    (*lane, *model, *threads) = (None, wide, most);
                }
            }
        }
        let lane = match lane {
            Some(lane) => lane,
            None => lane.insert(model.lane()?),
        };
        let sizes = profiler::default_sizes(largest);
        let mut told = |m: &Measurement, done: f64| {
            let fraction = 0.2 + 0.7 * (0.35 + 0.65 * done);
            self.progress.step(&format!("measured batch {}: {}", m.batch, m.median()), fraction);
        };
        let measurements = self.subject(&**model).measure(&mut **lane, &sizes, part(0.65), &mut told)?;
        let at_once = self.at_once(&**model, *threads, &measurements);
        Ok((measurements, at_once))
    }

    /// What a model takes at each site that it is on: `profile` on the first partition of `device`, measured or stored elsewhere. Where it cannot be measured it is taken to be alike, until it has
    /// been observed.
    pub fn by_site(
        &self,
        model: &dyn Model,
        placed: &Placed,
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
            if let Some((profile, _)) = self.stored(&key) {
                return Some(profile);
            }
            let mut lane = model.lane_at(Place { device: other, share }).ok()?;
            let sizes = profiler::default_sizes(self.codec.max_batch);
            let measure = || self.subject(model).measure(&mut *lane, &sizes, options.profiling.budget, &mut ());
            let (measurements, settled) = self.timed(measure);
            let measurements = measurements.ok()?;
            let profile = profiler::profile(&measurements).ok()?;
            self.keep(key, (1, 0), settled, measurements);
            Some(profile)
        };
        (0..placed.sites()).map(|site| measured(site).unwrap_or_else(|| profile.clone())).collect()
    }

    /// The time that it takes to hand something over to another thread. It is measured anew until it was measured once on a quiet machine.
    fn launch(&self) -> Option<Duration> {
        let known = *self.context.launch.lock();
        known.or_else(|| {
            let (launch, settled) = self.timed(|| auto_profiler::hand_over_time(self.context.clock));
            *self.context.launch.lock() = launch.filter(|_| settled);
            launch
        })
    }

    pub fn subject<'a>(&'a self, model: &'a dyn Model) -> Subject<'a> {
        Subject { model, plan: self.codec, varying: PROFILED_LENGTH, clock: self.context.clock }
    }

    /// What a device policy decides by: the times of the model's segments by items and length. `profile` is that of the whole.
    pub fn segments(
        &self,
        subject: &SegmentSubject<'_>,
        profile: &LatencyProfile,
        lane: Option<Box<dyn Lane>>,
    ) -> SegmentProfile {
        let SegmentSubject { subject: Subject { model, .. }, padding, .. } = *subject;
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
        let timed = |measure: &mut dyn FnMut() -> _| self.timed(measure);
        let measured = lane.and_then(|mut lane| subject.measured(&mut *lane, store, key.as_deref(), timed));
        measured.unwrap_or_else(|| {
            tracing::warn!(path = %self.source.options.path.display(), "its segments cannot be measured with requests of our own making; they are taken to be alike");
            SegmentProfile::even(profile, model.segments())
        })
    }

    /// Looks whether another policy than `exclusive` suits a model that is loaded as that runs it: what is said of it, and what that rests on.
    pub fn look(
        &self,
        auto: &AutoSubject<'_>,
        asked: PolicyReport,
        model: &dyn Model,
        device: usize,
    ) -> (PolicyReport, Option<Known>) {
        let max_batch = self.codec.max_batch;
        let key = self.source.batch_key(self.threads, max_batch).map(|key| format!("{key}-together"));
        let stored = key.as_ref().ok().and_then(|key| self.source.store.get::<StoredAuto>(key));
        let stored = stored.filter(|stored| stored.settled);
        let known = stored.as_ref().map(|stored| stored.launch);
        let launch = || known.or_else(|| self.launch());
        let overlap = |launch| {
            if let Some(stored) = stored {
                return Some(stored.overlap);
            }
            let measure = || auto_profiler::overlap(&self.subject(model), device, max_batch);
            let (overlap, settled) = self.timed(measure);
            let stored = StoredAuto { launch, overlap: overlap?, settled };
            self.source.store.keep(key, "what two lanes do together", &stored);
            Some(stored.overlap)
        };
        let (choice, measured, known) = auto.choose(launch, overlap);
        let mut report = PolicyReport { measured, ..asked };
        report.take_choice(&choice);
        tracing::info!(model = %auto.definition.name, policy = %choice.policy, reason = %choice.reason, "the policy that suits it");
        (report, known)
    }
}
