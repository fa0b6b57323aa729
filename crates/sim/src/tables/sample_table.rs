//! Samples in tables and plots.

use downbeat_report::{Axis, Line, Scale, Table, lines};

use crate::capacity::NoCapacity;
use crate::tables::report::DELAY_BINS;
use crate::tables::sample::{Outcome, Sample};

/// A sample and its name in a plot; `None`: there is no run to show.
pub type NamedSample<'a> = (String, Option<&'a Sample>);

/// Adds the median of each row and, with several seeds, its range.
#[must_use]
pub fn with_outcome<T>(table: Table<T>, name: &str, seeds: usize, of: impl Fn(&T) -> Option<Outcome>) -> Table<T> {
    let table = table.some(name, |row| Some(short(of(row)?.median)));
    if seeds < 2 {
        return table;
    }
    table.some("of seeds", |row| of(row).map(|value| format!("{}..{}", short(value.min), short(value.max))))
}

/// Adds the columns of each row's typical sample.
#[must_use]
pub fn with_sample<'a, T>(table: Table<T>, of: impl Fn(&T) -> Option<&'a Sample>) -> Table<T> {
    table
        .some("busy", |row| Some(percent(of(row)?.busy_share)))
        .some("batch mean (p50, p99)", |row| {
            let sizes = of(row)?.batch;
            Some(format!("{:.1} ({}, {})", sizes.mean, sizes.p50?, sizes.p99?))
        })
        .some("queueing p50, p99 of SLO", |row| {
            let delay = of(row)?.delay;
            Some(format!("{}, {}", percent(delay.p50?), percent(delay.p99?)))
        })
        .some("bad", |row| Some(format!("{:.2}%", of(row)?.bad_share * 100.0)))
        .some("worst model", |row| {
            let sample = of(row)?;
            let (name, share) = sample.worst_model()?;
            (sample.bad_share_by_model.len() > 1 && share > 0.0).then(|| format!("{name} {:.2}%", share * 100.0))
        })
        .some("preempted", |row| of(row).map(|sample| sample.preempted).filter(|count| *count > 0))
}

/// Explains why the sample has no capacity: `no load is held, not even 12.5 r/s`.
pub fn why_no_capacity(why: &NoCapacity, tolerated: f64) -> String {
    let few = |count| {
        let percent = tolerated * 100.0;
        format!("a run has fewer than {count} requests, too few to measure {percent}%; make the span longer")
    };
    match (why.not_held, why.too_few_below) {
        (None, count) => few(count.unwrap_or(0)),
        (Some(rate), None) => format!("the devices hold no load, not even {} r/s", short(rate)),
        (Some(rate), Some(count)) => {
            format!("the devices hold no load down to {} r/s; below that rate {}", short(rate), few(count))
        }
    }
}

/// A plot of the batch sizes of each named sample: the cumulative distribution.
pub fn plot_batch_sizes(title: &str, samples: &[NamedSample<'_>]) -> String {
    plot_counts(title, "batch size", 1.0, samples, |sample| sample.report.batch_sizes())
}

/// A plot of the queueing delays of each named sample: the cumulative distribution.
pub fn plot_delays(title: &str, samples: &[NamedSample<'_>]) -> String {
    let unit = 100.0 / DELAY_BINS as f64;
    plot_counts(title, "time in the queue, % of the SLO", unit, samples, |sample| sample.report.delays())
}

fn plot_counts(
    title: &str,
    x: &str,
    unit: f64,
    samples: &[NamedSample<'_>],
    counts: impl Fn(&Sample) -> Vec<u64>,
) -> String {
    let line = |(name, sample): &NamedSample<'_>| {
        let counts = sample.map(&counts).unwrap_or_default();
        let total: u64 = counts.iter().sum();
        let mut seen = 0;
        let steps = counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(index, count)| {
            seen += count;
            (index as f64 * unit, 100.0 * seen as f64 / total as f64)
        });
        let begin = (total > 0).then_some((0.0, 0.0));
        (name.clone(), begin.into_iter().chain(steps).collect::<Vec<_>>())
    };
    let drawn: Vec<(String, Vec<(f64, f64)>)> = samples.iter().map(line).collect();
    let drawn: Vec<Line<'_>> =
        drawn.iter().map(|(name, points)| Line { name, points: points.clone(), stepped: true }).collect();
    let axis = |label| Axis { label, scale: Scale::Linear };
    let title = format!("{title} {x}");
    lines(title.trim(), "cumulative distribution", &axis(x), &axis("% of all"), &drawn)
}

/// A number with three significant digits, and all digits before the point.
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        large if large >= 100.0 => format!("{value:.0}"),
        large if large >= 10.0 => trim(&format!("{value:.1}")),
        _ => trim(&format!("{value:.2}")),
    }
}

fn trim(text: &str) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share as whole percent.
pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}
