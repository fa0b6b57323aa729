//! The outcome of a run of a network.

use std::fmt;

use downbeat_core::{Duration, Time};
use downbeat_report::Table;
use serde::Serialize;

use super::judge::Broken;

/// The outcome of a run of a network.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct NetworkOutcome {
    /// The seed of all random numbers.
    pub seed: u64,
    /// Requests that clients sent to frontends.
    pub requests: u64,
    /// Answered in time.
    pub good: u64,
    /// Answered after the deadline.
    pub late: u64,
    /// Failed by their model.
    pub failed: u64,
    /// Given up, or refused on arrival.
    pub refused: u64,
    /// Of these, refused for want of time although a scheduler that knows the truth would not have
    /// refused them.
    pub needless: u64,
    /// Not run by their deadlines.
    pub too_late: u64,
    /// Lost with a backend, and not repeated.
    pub lost: u64,
    /// Cancelled: their clients went first.
    pub cancelled: u64,
    /// Lost with their frontend.
    pub died: u64,
    /// Client requests for a model that no frontend had heard of.
    pub unserved: u64,
    /// Requests that began to run a second time.
    pub repeated: u64,
    /// Answers of decoupled models.
    pub streamed: u64,
    /// The number of times that a scheduler began to lead.
    pub leads: u64,
    /// Trials of rehearsals that changed the behaviour of models.
    pub rehearsed: u64,
    /// The number of times that models were divided.
    pub plans: u64,
    /// The largest number of sub-clusters of a plan.
    pub sub_clusters: u32,
    /// Batches that began.
    pub batches: u64,
    /// Frames that were sent.
    pub frames: u64,
    /// Faults that happened.
    pub faults: u64,
    /// For each fault: the time, and the longest gap between answers until 150 ms later. The first
    /// gap begins with the last answer before the fault.
    pub gaps: Vec<(Time, Duration)>,
    /// The first broken rule, if any.
    pub broken: Option<Broken>,
}

impl NetworkOutcome {
    /// Returns the number of requests that ended in any way, or died.
    pub fn ended(&self) -> u64 {
        let NetworkOutcome { good, late, failed, refused, too_late, lost, cancelled, died, .. } = self;
        good + late + failed + refused + too_late + lost + cancelled + died
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &NetworkOutcome) {
        let NetworkOutcome { requests, good, late, failed, refused, too_late, lost, cancelled, died, .. } = self;
        let NetworkOutcome { needless, unserved, repeated, streamed, leads, rehearsed, .. } = self;
        let NetworkOutcome { plans, batches, frames, faults, .. } = self;
        for (sum, more) in [
            (requests, other.requests),
            (good, other.good),
            (late, other.late),
            (failed, other.failed),
            (refused, other.refused),
            (too_late, other.too_late),
            (lost, other.lost),
            (cancelled, other.cancelled),
            (died, other.died),
            (needless, other.needless),
            (unserved, other.unserved),
            (repeated, other.repeated),
            (leads, other.leads),
            (streamed, other.streamed),
            (rehearsed, other.rehearsed),
            (plans, other.plans),
            (batches, other.batches),
            (frames, other.frames),
            (faults, other.faults),
        ] {
            *sum += more;
        }
    }
}

/// The outcomes of the runs of a network from a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NetworkResults {
    /// The title.
    pub title: String,
    /// A note for readers.
    pub note: String,
    /// The faults in words, in the order of [`NetworkOutcome::gaps`].
    pub faults: Vec<String>,
    /// The outcome of each seed.
    pub runs: Vec<NetworkOutcome>,
}

fn ms(duration: Duration) -> String {
    format!("{:.2}", duration.as_millis_f64())
}

impl fmt::Display for NetworkResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# {}\n", self.title)?;
        if !self.note.is_empty() {
            writeln!(f, "{}\n", self.note)?;
        }
        let table = Table::of(&self.runs)
            .number("seed", |run| run.seed)
            .number("requests", |run| run.requests)
            .number("good", |run| run.good)
            .number("late", |run| run.late)
            .number("refused", |run| run.refused)
            .number("needlessly", |run| run.needless)
            .number("too late", |run| run.too_late)
            .number("lost", |run| run.lost)
            .number("failed", |run| run.failed)
            .number("cancelled", |run| run.cancelled)
            .number("died", |run| run.died)
            .number("run again", |run| run.repeated)
            .number("leads", |run| run.leads)
            .number("changes by trials", |run| run.rehearsed);
        writeln!(f, "{table}")?;
        if !self.faults.is_empty() {
            let gap_of = |run: &NetworkOutcome, number: usize| run.gaps.get(number).map(|(_, gap)| ms(*gap));
            let first = self.runs.first();
            let at = |number: usize| first.and_then(|run| run.gaps.get(number)).map(|(at, _)| ms(at.since(Time::ZERO)));
            let mut table = Table::of(self.faults.iter().enumerate())
                .some("at ms", |(number, _)| at(*number))
                .text("fault", |(_, fault)| (*fault).clone());
            for run in &self.runs {
                table = table.some(&format!("seed {}", run.seed), |(number, _)| gap_of(run, *number));
            }
            writeln!(f, "The longest time without any answer around each fault, in ms:\n\n{table}")?;
        }
        for run in &self.runs {
            if let Some(Broken { at, rule, what }) = &run.broken {
                writeln!(f, "seed {}: broken after {} ms: {rule}: {what}", run.seed, ms(at.since(Time::ZERO)))?;
            }
        }
        Ok(())
    }
}

/// The outcomes of networks that were drawn from consecutive seeds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SeedResults {
    /// The first seed.
    pub first: u64,
    /// The number of runs.
    pub runs: u64,
    /// The approximate number of requests of each run.
    pub requests_each: u64,
    /// The seeds with a broken rule, with that rule.
    pub broken: Vec<(u64, Broken)>,
    /// The counts of all runs.
    pub sum: NetworkOutcome,
}

impl SeedResults {
    /// Makes an empty sum of runs from this seed on.
    pub fn new(first: u64, requests_each: u64) -> Self {
        let sum = NetworkOutcome { seed: first, ..NetworkOutcome::default() };
        SeedResults { first, runs: 0, requests_each, broken: Vec::new(), sum }
    }

    /// Adds a run.
    pub fn add(&mut self, outcome: &NetworkOutcome) {
        self.runs += 1;
        self.sum.add(outcome);
        self.broken.extend(outcome.broken.iter().map(|broken| (outcome.seed, broken.clone())));
    }
}

impl fmt::Display for SeedResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SeedResults { first, runs, requests_each, broken, sum } = self;
        let end = first + runs;
        writeln!(
            f,
            "seeds {first}..{end} of {requests_each} requests: rules were broken with {} of {runs}\n",
            broken.len()
        )?;
        let counts = [
            ("requests", sum.requests),
            ("answered in time", sum.good),
            ("answered late", sum.late),
            ("failed by the model", sum.failed),
            ("refused", sum.refused),
            ("of these needlessly", sum.needless),
            ("too late", sum.too_late),
            ("lost with a backend", sum.lost),
            ("cancelled", sum.cancelled),
            ("died with their frontend", sum.died),
            ("run again", sum.repeated),
            ("faults", sum.faults),
            ("leads", sum.leads),
            ("streamed answers", sum.streamed),
            ("changes by trials", sum.rehearsed),
            ("times that models were divided", sum.plans),
            ("batches", sum.batches),
            ("frames", sum.frames),
        ];
        writeln!(f, "{}", Table::of(counts).text("what", |(what, _)| *what).number("count", |(_, count)| *count))?;
        for (seed, Broken { at, rule, what }) in broken {
            writeln!(f, "seed {seed}: after {} ms: {rule}: {what}", ms(at.since(Time::ZERO)))?;
        }
        Ok(())
    }
}
