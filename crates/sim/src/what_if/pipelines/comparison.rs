//! Compares settings with a log that has pipelines.

use std::fmt;

use downbeat_report::{Page, Table};
use serde::Serialize;

use super::flows::RecordedPipelines;
use super::outcome::{FlowFigures, PipelineRow, PoolFigures};
use super::replay::{BadPipelineSetting, PipelineSetting};
use crate::parallel;

/// The outcome of pipelines under several settings beside the log's.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PipelineComparison {
    /// The log's outcome first, then the settings in their order.
    pub rows: Vec<PipelineRow>,
    /// The assumptions, and remarks.
    pub notes: Vec<String>,
}

impl PipelineComparison {
    /// Runs the settings on `threads` threads. After each, `goes_on` gets the number of finished runs
    /// and returns whether another one may begin.
    ///
    /// # Errors
    /// If a setting cannot be run.
    pub fn of(
        recorded: &RecordedPipelines,
        settings: &[PipelineSetting],
        threads: usize,
        goes_on: impl Fn(usize) -> bool + Sync,
    ) -> Result<PipelineComparison, BadPipelineSetting> {
        let run = |setting: &PipelineSetting| recorded.run(setting);
        let simulated = parallel::map_while(settings, threads, run, |done| done == 0 || goes_on(done));
        let missing = simulated.iter().filter(|row| row.is_none()).count();
        let rows = std::iter::once(Ok(recorded.happened.clone())).chain(simulated.into_iter().flatten());
        let rows = rows.collect::<Result<Vec<PipelineRow>, _>>()?;
        let mut notes = recorded.notes.clone();
        let unchanged = settings.iter().position(PipelineSetting::is_unchanged).and_then(|place| rows.get(place + 1));
        notes.extend(unchanged.and_then(|row| recorded.difference(row)));
        notes.extend((missing > 0).then(|| format!("The command was interrupted: {missing} settings were not run.")));
        Ok(PipelineComparison { rows, notes })
    }

    /// The comparison as one HTML page without external files.
    pub fn page(&self) -> String {
        let page = Page::new("What if").table("Requests", &flows(&self.rows)).table("Devices", &pools(&self.rows));
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }
}

/// The requests under these settings.
pub(super) fn flows(rows: &[PipelineRow]) -> Table<(&PipelineRow, &FlowFigures)> {
    let ms = |ms: Option<f64>| ms.map(|ms| format!("{ms:.1}"));
    Table::of(rows.iter().flat_map(|row| row.flows.iter().map(move |flow| (row, flow))))
        .text("requests of", |(row, _)| row.source.clone())
        .text("setting", |(row, _)| row.setting.clone())
        .text("pipeline", |(_, flow)| flow.pipeline.clone())
        .number("requests", |(_, flow)| flow.requests)
        .number("in time", |(_, flow)| format!("{:.2}%", 100.0 * flow.attainment))
        .some("95% sure", |(_, flow)| flow.interval.map(|interval| interval.percent()))
        .number("late", |(_, flow)| flow.late)
        .text("lost in", |(_, flow)| {
            let lost: Vec<String> = flow.lost.iter().map(|(step, count)| format!("{count} {step}")).collect();
            if lost.is_empty() { "0".to_owned() } else { lost.join(", ") }
        })
        .some("unknown", |(_, flow)| (flow.unknown > 0).then_some(flow.unknown))
        .some("p50 ms", |(_, flow)| ms(flow.p50_ms))
        .some("p99 ms", |(_, flow)| ms(flow.p99_ms))
}

/// The devices under these settings.
pub(super) fn pools(rows: &[PipelineRow]) -> Table<(&PipelineRow, &PoolFigures)> {
    Table::of(rows.iter().flat_map(|row| row.pools.iter().map(move |pool| (row, pool))))
        .text("devices of", |(row, _)| row.source.clone())
        .text("setting", |(row, _)| row.setting.clone())
        .text("run", |(_, pool)| pool.models.join(", "))
        .number("devices", |(_, pool)| pool.devices)
        .number("busy", |(_, pool)| format!("{:.0}%", 100.0 * pool.busy))
        .some("waits ms", |(_, pool)| pool.waits_ms.map(|ms| format!("{ms:.2}")))
}

impl fmt::Display for PipelineComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        flows(&self.rows).fmt(f)?;
        f.write_str("\n")?;
        pools(&self.rows).fmt(f)?;
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
