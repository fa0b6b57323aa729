//! Finds the stages and buffer pairs of a version whose policy cuts the model (DVABatch §7.1). They are
//! the user's, a stored result, or the result of a search by measured latencies.
//!
//! The search takes the model cut into many segments, so a version is loaded twice: once for the
//! search, and once as found. The result is stored, and later starts load the version once.

use downbeat_core::Duration;
use downbeat_core::device::{Cut, SegmentProfile, Staging};
use downbeat_service::report::policy_report::{PolicyReport, StagingReport, StagingTrial};
use downbeat_sim::device_replay::StagingSearch;
use serde::{Deserialize, Serialize};

use super::{Loading, Runnable};
use crate::load::engines::most_threads;
use crate::load::policy_choice::{Chosen, FoundStages, Profiled, Why};
use crate::measure::profiler::Threads;

/// The most segments that a search cuts a model into. More stages were never better
/// (lab/docs/dvabatch.md).
const FINEST: usize = 12;
/// About how long the search and its measurements take.
const SEARCH: Duration = Duration::from_millis(1_000);
/// Chooses the times of the search's requests.
const SEED: u64 = 1;

/// How the stages of a version are found.
#[derive(Debug)]
pub(super) enum StagePlan {
    /// The settings set them, or the policy has none.
    AsSet,
    /// This load searches them, and stores the result under this key.
    Search(Result<String, String>),
    /// The stages are known, or the defaults serve for the reported reason.
    Found(Box<StoredStaging>, Option<SegmentProfile>),
}

/// The stages of a model file on this machine, with the numbers behind them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredStaging {
    staging: Staging,
    report: StagingReport,
    /// The threads of the measurements; 0: the number is not known.
    threads: usize,
}

impl StagePlan {
    pub(super) fn report(&self) -> Option<&StagingReport> {
        match self {
            StagePlan::AsSet | StagePlan::Search(_) => None,
            StagePlan::Found(found, _) => Some(&found.report),
        }
    }

    /// The latencies of the stages, by the measurements of a finer cut.
    pub(super) fn guess(&self) -> Option<&SegmentProfile> {
        match self {
            StagePlan::Found(_, guess) => guess.as_ref(),
            StagePlan::AsSet | StagePlan::Search(_) => None,
        }
    }
}

impl Loading<'_> {
    /// Decides how the version's stages are found, before it is loaded.
    pub(super) fn plan_stages(&mut self, why: &Why) {
        if let Why::Staged(found) = why {
            let FoundStages { staging, ref report, threads, ref segments, .. } = **found;
            let found = StoredStaging { staging, report: report.clone(), threads };
            self.plan = StagePlan::Found(Box::new(found), segments.clone());
            return;
        }
        let open = self.policy.settings.open_stagings();
        if open.len() < 2 {
            return;
        }
        if self.policy.padding.pad {
            let reason = "requests may vary in length, and the lengths of later requests are not known at load";
            return self.take_default(&open, reason);
        }
        if !self.context.options.profiling.enabled {
            return self.take_default(&open, "nothing is measured here ([profiling] enabled = false)");
        }
        let key = self.staging_key();
        let stored = key.as_ref().ok().and_then(|key| self.source.store.get::<StoredStaging>(key));
        if let Some(stored) = stored.filter(|stored| open.contains(&stored.staging)) {
            if let (Threads::UpTo(_), true) = (self.threads, stored.threads > 0) {
                self.threads = Threads::Chosen(stored.threads);
            }
            return self.take_staging(stored, None);
        }
        // Behind the service a search would be repeated with each measurement there.
        if self.time.is_behind() || self.time.left() < SEARCH {
            return self.take_default(&open, NO_TIME);
        }
        self.plan = StagePlan::Search(key);
        if open.iter().any(|staging| staging.stages != open[0].stages) {
            self.source.options.cut = Cut::UpTo(FINEST);
        }
        if let Threads::UpTo(_) = self.threads {
            // As for a model that `auto` looks at: with one pair, a stage has all threads.
            let most = self.part.map_or_else(|| most_threads(&self.context.options), |part| part.threads);
            self.threads = Threads::UpTo(most.max(1));
        }
    }

    /// The version has these stages from now on. `guess` has their latencies.
    fn take_staging(&mut self, found: StoredStaging, guess: Option<SegmentProfile>) {
        if let Some(settings) = self.policy.settings.with_staging(found.staging) {
            self.policy.settings = settings;
            self.source.options.cut = self.policy.settings.cut().0;
        }
        self.plan = StagePlan::Found(Box::new(found), guess);
    }

    /// Leaves the defaults of the settings, and reports why.
    fn take_default(&mut self, open: &[Staging], reason: &str) {
        let Some(staging) = Staging::default_of(open, u16::MAX) else { return };
        let report = reported(staging, reason.to_owned(), Vec::new());
        self.plan = StagePlan::Found(Box::new(StoredStaging { staging, report, threads: 0 }), None);
    }

    /// The key of the search's result. The file, the engine, the machine, the settings, the SLO and
    /// the largest batch of the configuration decide the result.
    fn staging_key(&self) -> Result<String, String> {
        let most = self.part.map_or_else(|| most_threads(&self.context.options), |part| part.threads);
        let threads = match self.threads {
            Threads::UpTo(_) => Threads::UpTo(most.max(1)),
            chosen => chosen,
        };
        let slo = self.context.options.slo(&self.definition.name, self.definition.slo);
        let asked = format!("{:?} {slo:?}", self.policy.settings.open_stagings());
        let key = self.source.batch_key(threads, self.definition.batching.max_batch_size)?;
        Ok(format!("{key}-stages-{:08x}", crc32fast::hash(asked.as_bytes())))
    }

    /// Searches the stages, if the plan asks for a search. Returns them if the version must be loaded
    /// anew, since it is cut in another way now.
    pub(super) fn search_stages(
        &mut self,
        runnable: &Runnable,
        profiled: &Profiled,
        measured: &SegmentProfile,
        (report, chosen): (&PolicyReport, Option<&Chosen>),
    ) -> Option<FoundStages> {
        let StagePlan::Search(key) = &self.plan else { return None };
        self.progress.step("choosing the stages", 0.87);
        let found = self.found_stages(runnable, profiled, measured, key)?;
        let (staging, cut) = (found.staging, measured.merged(found.staging.stages));
        tracing::info!(
            model = %self.definition.name, version = %self.version, stages = staging.stages, pairs = staging.pairs,
            reason = %found.report.reason, "chose the stages that suit the model"
        );
        if usize::from(staging.stages) == runnable.model.segments() {
            self.take_staging(found, None);
            return None;
        }
        Some(FoundStages {
            staging,
            report: found.report,
            policy: report.clone(),
            chosen: chosen.cloned(),
            threads: profiled.threads,
            segments: cut,
        })
    }

    /// The result of the search, which is stored.
    fn found_stages(
        &self,
        Runnable { model, codec, device, .. }: &Runnable,
        profiled: &Profiled,
        measured: &SegmentProfile,
        key: &Result<String, String>,
    ) -> Option<StoredStaging> {
        let (open, segments) = (self.policy.settings.open_stagings(), measured.segments());
        let default = |reason: &str| {
            let staging = Staging::default_of(&open, segments)?;
            let report = reported(staging, reason.to_owned(), Vec::new());
            Some(StoredStaging { staging, report, threads: 0 })
        };
        if !self.is_measured {
            return default("the model answers no request of our own making, so that nothing could be measured");
        }
        if segments < 2 {
            return default("the model cannot be cut");
        }
        let Some((launch, overlap)) = self.measuring(codec).together(&**model, *device, &profiled.profile) else {
            return default(NO_TIME);
        };
        let search = StagingSearch {
            settings: &*self.policy.settings,
            segments: measured.clone(),
            overlap,
            launch,
            max_batch: codec.max_batch,
            slo: self.context.options.slo(&self.definition.name, self.definition.slo),
            seed: SEED,
        };
        let (slo, tuned) = (search.slo(), search.run());
        let tried: Vec<StagingTrial> = tuned.tried.iter().map(StagingTrial::from).collect();
        let Some(staging) = tuned.chosen else {
            let found = default(&format!("no number of stages answers 99% of the requests within {slo}"))?;
            return Some(StoredStaging { report: StagingReport { tried, ..found.report }, ..found });
        };
        let best = tuned.tried.iter().find(|tried| tried.choice == staging).map_or(0.0, |tried| tried.peak);
        let reason = format!(
            "{staging} answer 99% of {best:.0} requests/s within {slo}, the most of {} trials, or as many as the \
             best and sooner",
            tried.len()
        );
        let (report, threads) = (reported(staging, reason, tried), profiled.threads);
        let found = StoredStaging { staging, report, threads };
        self.source.store.keep(key.clone(), "the stages that suit the model", &found);
        Some(found)
    }
}

/// The reason for the defaults if a load has no time to search.
const NO_TIME: &str = "these are the defaults; a load searches better ones if profiling.budget_s is 1 or more";

fn reported(staging: Staging, reason: String, tried: Vec<StagingTrial>) -> StagingReport {
    StagingReport { stages: staging.stages, buffer_pairs: staging.pairs, reason, tried }
}
