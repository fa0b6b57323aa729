//! The results of the worlds of a file, as tables and as JSON.

use std::fmt;

use downbeat_core::{Duration, Time};
use downbeat_report::Table;
use serde::Serialize;

use super::file::WorldFile;
use super::scenario::{ModelOutcome, WorldReport, WorldScenario};
use downbeat_sim::BadArrivals;

/// The results of one world, with each seed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WorldResults {
    /// [`WorldFile::title`].
    pub title: String,
    /// [`WorldFile::note`].
    pub note: String,
    /// The results of each seed.
    pub runs: Vec<WorldRun>,
}

/// The results with one seed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WorldRun {
    /// The seed.
    pub seed: u64,
    /// The time of the last event, in seconds.
    pub end_s: f64,
    /// The models, in the order of the file.
    pub models: Vec<ModelRow>,
    /// The devices, in the order of the file.
    pub devices: Vec<DeviceRow>,
}

/// A model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelRow {
    /// Its name.
    pub name: String,
    /// Its policy.
    pub policy: String,
    /// The outcomes of its requests.
    #[serde(flatten)]
    pub outcome: ModelOutcome,
    /// The mean time from arrival to answer; `None` without answers.
    pub mean_ms: Option<f64>,
    /// Half of the answers took at most this.
    pub p50_ms: Option<f64>,
    /// 99% of the answers took at most this.
    pub p99_ms: Option<f64>,
}

/// A device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceRow {
    /// Its name.
    pub name: String,
    /// The time in which something ran on it.
    pub busy_s: f64,
    /// The busy time as a share of the run.
    pub busy_share: f64,
    /// Launches.
    pub launches: u64,
}

impl WorldFile {
    /// Runs the world with each of these seeds, or with the file's seed if there are none. Panics,
    /// with the seed, as [`WorldScenario::run`] does.
    ///
    /// # Errors
    /// As [`WorldScenario::run`].
    pub fn run(&self, seeds: &[u64]) -> Result<WorldResults, BadArrivals> {
        let own = [self.scenario.seed];
        let seeds = if seeds.is_empty() { &own } else { seeds };
        let run = |seed: &u64| {
            let report = WorldScenario { seed: *seed, ..self.scenario.clone() }.run()?;
            Ok(self.summary(*seed, report))
        };
        let runs = seeds.iter().map(run).collect::<Result<_, _>>()?;
        Ok(WorldResults { title: self.title.clone(), note: self.note.clone(), runs })
    }

    fn summary(&self, seed: u64, report: WorldReport) -> WorldRun {
        let WorldReport { models, busy, launches, end } = report;
        let end_s = end.since(Time::ZERO).as_secs_f64();
        let models = self.models.iter().zip(models).map(|((name, policy), mut outcome)| {
            let mut latencies = std::mem::take(&mut outcome.latencies);
            latencies.sort_unstable();
            let quantile = |share: f64| {
                let rank = (share * latencies.len() as f64).ceil() as usize;
                latencies.get(rank.max(1) - 1).map(|latency| latency.as_millis_f64())
            };
            let sum = latencies.iter().fold(0.0, |sum, latency: &Duration| sum + latency.as_millis_f64());
            ModelRow {
                name: name.clone(),
                policy: policy.clone(),
                outcome,
                mean_ms: (!latencies.is_empty()).then(|| sum / latencies.len() as f64),
                p50_ms: quantile(0.5),
                p99_ms: quantile(0.99),
            }
        });
        let devices = self.devices.iter().zip(busy).zip(launches).map(|((name, busy), launches)| {
            let busy_s = busy.as_secs_f64();
            DeviceRow { name: name.clone(), busy_s, busy_share: busy_s / end_s.max(1e-9), launches }
        });
        WorldRun { seed, end_s, models: models.collect(), devices: devices.collect() }
    }
}

impl WorldResults {
    /// The rows that `of` takes from each run. A column shows the seed if there are several runs.
    fn rows<'a, T>(&'a self, of: fn(&'a WorldRun) -> &'a Vec<T>) -> Table<(u64, &'a T)> {
        let table = Table::of(self.runs.iter().flat_map(|run| of(run).iter().map(|row| (run.seed, row))));
        if self.runs.len() > 1 { table.number("seed", |(seed, _)| *seed) } else { table }
    }
}

impl fmt::Display for WorldResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.title)?;
        if !self.note.is_empty() {
            writeln!(f, "{}\n", self.note)?;
        }
        let ms = |value: Option<f64>| value.map_or("–".to_owned(), |ms| format!("{ms:.2}"));
        self.rows(|run| &run.models)
            .text("model", |(_, row)| &row.name)
            .text("policy", |(_, row)| &row.policy)
            .number("offered", |(_, row)| row.outcome.offered)
            .number("good", |(_, row)| row.outcome.good)
            .number("late", |(_, row)| row.outcome.late)
            .number("dropped", |(_, row)| row.outcome.dropped)
            .number("rejected", |(_, row)| row.outcome.rejected)
            .number("cancelled", |(_, row)| row.outcome.cancelled)
            .number("failed", |(_, row)| row.outcome.failed)
            .number("mean ms", |(_, row)| ms(row.mean_ms))
            .number("p50 ms", |(_, row)| ms(row.p50_ms))
            .number("p99 ms", |(_, row)| ms(row.p99_ms))
            .fmt(f)?;
        writeln!(f)?;
        self.rows(|run| &run.devices)
            .text("device", |(_, row)| &row.name)
            .number("busy s", |(_, row)| format!("{:.3}", row.busy_s))
            .number("busy", |(_, row)| format!("{:.1}%", row.busy_share * 100.0))
            .number("launches", |(_, row)| row.launches)
            .fmt(f)?;
        let ends: Vec<String> =
            self.runs.iter().map(|run| format!("{} ends at {:.3} s", run.seed, run.end_s)).collect();
        writeln!(f, "\nseed {}", ends.join(", "))
    }
}
