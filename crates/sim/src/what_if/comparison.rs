//! Compares settings with the log.

use std::fmt;

use downbeat_report::Table;
use serde::Serialize;

use super::figures::Figures;
use super::interval::PARTS;
use super::recorded::Recorded;
use super::setting::{BadSetting, Setting};
use crate::parallel;

/// The outcome of the requests under one setting.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// `log` or `simulated`.
    pub source: String,
    /// The policy.
    pub policy: String,
    /// The number of devices.
    pub devices: u32,
    /// The factor by which requests come faster than in the log.
    pub rate: f64,
    /// The largest batch, if it was changed.
    pub max_batch: Option<u32>,
    /// Mean of the devices' busy shares.
    pub busy: f64,
    /// The figures of all models together.
    pub all: Figures,
    /// The figures of each model.
    pub models: Vec<super::ModelFigures>,
}

impl Row {
    /// The figures of the model with the least attainment; `None`: there are no models.
    pub fn worst(&self) -> Option<&super::ModelFigures> {
        self.models.iter().min_by(|a, b| a.figures.attainment.total_cmp(&b.figures.attainment))
    }

    /// The least attainment of any model; 1 without models.
    pub(super) fn worst_attainment(&self) -> f64 {
        self.worst().map_or(1.0, |model| model.figures.attainment)
    }
}

/// The outcome under several settings beside the log's.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Comparison {
    /// The log's outcome first, then the settings in their order.
    pub rows: Vec<Row>,
    /// Remarks to read before comparing.
    pub notes: Vec<String>,
}

impl Comparison {
    /// Runs the settings on `threads` threads. After each, `goes_on` gets the number of finished
    /// runs and returns whether another one may begin.
    ///
    /// # Errors
    /// If a setting cannot be run.
    pub fn of(
        recorded: &Recorded,
        settings: &[Setting],
        threads: usize,
        goes_on: impl Fn(usize) -> bool + Sync,
    ) -> Result<Comparison, BadSetting> {
        let run = |setting: &Setting| recorded.run(setting);
        let simulated = parallel::map_while(settings, threads, run, |done| done == 0 || goes_on(done));
        let missing = simulated.iter().filter(|row| row.is_none()).count();
        let rows = std::iter::once(Ok(recorded.happened.clone())).chain(simulated.into_iter().flatten());
        let mut notes = vec![format!(
            "95 of 100 logs like this one would have a share of requests in time within the interval. It comes from the spread \
             between {PARTS} parts of the log, which has {} requests in {:.1} s.",
            recorded.arrivals.len(),
            recorded.span.as_secs_f64()
        )];
        notes.extend(recorded.notes.iter().cloned());
        notes.extend((missing > 0).then(|| format!("The command was interrupted: {missing} settings were not run.")));
        Ok(Comparison { rows: rows.collect::<Result<_, _>>()?, notes })
    }

    pub(super) fn table(&self) -> Table<(&Row, String, &Figures)> {
        let of_row = |row: &'_ Row| -> usize { if row.models.len() > 1 { row.models.len() } else { 0 } };
        let rows = self.rows.iter().flat_map(|row| {
            let models =
                row.models.iter().take(of_row(row)).map(move |model| (row, model.model.clone(), &model.figures));
            std::iter::once((row, "all".to_owned(), &row.all)).chain(models)
        });
        let ms = |ms: Option<f64>| ms.map(|ms| format!("{ms:.2}"));
        Table::of(rows)
            .text("requests of", |(row, ..)| row.source.clone())
            .text("policy", |(row, ..)| row.policy.clone())
            .number("devices", |(row, ..)| row.devices)
            .number("rate", |(row, ..)| row.rate)
            .text("model", |(_, model, _)| model.clone())
            .number("requests", |(.., figures)| figures.requests)
            .number("in time", |(.., figures)| format!("{:.2}%", 100.0 * figures.attainment))
            .some("95% sure", |(.., figures)| figures.interval.map(|interval| interval.percent()))
            .number("goodput r/s", |(.., figures)| format!("{:.1}", figures.goodput))
            .some("busy", |(row, model, _)| (model == "all").then(|| format!("{:.1}%", 100.0 * row.busy)))
            .number("late", |(.., figures)| figures.late)
            .number("rejected", |(.., figures)| figures.rejected)
            .text("dropped", |(.., figures)| {
                let dropped = figures.dropped.iter().map(|(reason, count)| format!("{count} {reason}"));
                let words = dropped.collect::<Vec<_>>().join(", ");
                if words.is_empty() { "0".to_owned() } else { words }
            })
            .some("unknown", |(.., figures)| (figures.unknown > 0).then_some(figures.unknown))
            .some("waits p50 ms", |(.., figures)| ms(figures.delay_p50_ms))
            .some("p99 ms", |(.., figures)| ms(figures.delay_p99_ms))
            .some("answer p50 ms", |(.., figures)| ms(figures.answer_p50_ms))
            .some("p99 ms", |(.., figures)| ms(figures.answer_p99_ms))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table().fmt(f)?;
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
