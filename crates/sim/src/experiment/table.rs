//! The results as a table.

use std::collections::BTreeSet;
use std::fmt;

use downbeat_report::Table;

use super::run::{Case, Results};
use super::{Measure, Value};
use crate::capacity::NoCapacity;

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = if self.source.is_empty() { String::new() } else { format!(" ({})", self.source) };
        writeln!(f, "{}{source}\n", self.title)?;
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.conditions())
    }
}

impl Results {
    /// The name of what is measured, with the unit.
    pub(super) fn value_name(&self) -> &'static str {
        match self.measure {
            Measure::Capacity => "capacity r/s",
            Measure::Devices => "devices",
            Measure::Goodput | Measure::Timeline | Measure::Windows => "goodput r/s",
        }
    }

    /// What the table is of.
    pub(super) fn conditions(&self) -> String {
        let seeds: Vec<String> = self.seeds.iter().map(ToString::to_string).collect();
        let seeds = seeds.join(", ");
        let left_out = match self.left_out {
            0 => String::new(),
            cases => format!("\na sample: {cases} cases were left out; --all runs them"),
        };
        let unfinished = match self.unfinished {
            0 => String::new(),
            cases => format!("\ninterrupted: {cases} cases were not measured"),
        };
        let without: Vec<String> = self.cases.iter().filter_map(|case| self.why_none(case)).collect();
        let without = if without.is_empty() { String::new() } else { format!("\n{}", without.join("\n")) };
        let percent = self.tolerated * 100.0;
        format!(
            "seeds {seeds}; at most {percent}% of each model's requests dropped or late{left_out}{unfinished}{without}"
        )
    }

    /// Why a case has no value, in a sentence.
    fn why_none(&self, case: &Case) -> Option<String> {
        let sample = case.samples.iter().find(|sample| sample.value.is_none())?;
        let mut of: Vec<String> = vec![case.workload.clone()];
        of.extend(case.point.iter().map(|(name, value)| format!("{name} {value}")));
        of.extend([
            case.policy.clone(),
            if self.seeds.len() > 1 { format!("seed {}", sample.seed) } else { String::new() },
        ]);
        of.retain(|part| !part.is_empty());
        let of = of.join(", ");
        let percent = self.tolerated * 100.0;
        let Some(NoCapacity { not_held, too_few_below }) = sample.no_capacity else {
            return Some(format!("{of}: no number of devices that may be tried is enough"));
        };
        let few = |count| {
            format!("fewer than {count} requests come in a run, which cannot tell {percent}%: make the span longer")
        };
        Some(match (not_held, too_few_below) {
            (None, count) => format!("{of}: {}", few(count.unwrap_or(0))),
            (Some(rate), None) => format!("{of}: no load is held, not even {} r/s", short(rate)),
            (Some(rate), Some(count)) => {
                format!("{of}: no load is held down to {} r/s; at less {}", short(rate), few(count))
            }
        })
    }

    pub(super) fn table(&self) -> Table<&Case> {
        let mut table = Table::of(&self.cases);
        if self.cases.iter().any(|case| !case.workload.is_empty()) {
            table = table.text("workload", |case| case.workload.clone());
        }
        let axes: BTreeSet<&String> = self.cases.iter().flat_map(|case| case.point.keys()).collect();
        for axis in axes {
            table = table.some(axis, |case| case.point.get(axis).map(Value::to_string));
        }
        table =
            table.text("policy", |case| &case.policy).some(self.value_name(), |case| Some(short(case.value?.median)));
        if self.seeds.len() > 1 {
            table = table
                .some("of seeds", |case| case.value.map(|value| format!("{}..{}", short(value.min), short(value.max))));
        }
        table = table
            .some("paper", |case| case.paper.map(short))
            .some("ratio", |case| case.relative.map(|relative| format!("{relative:.3}")));
        if self.measure == Measure::Capacity {
            let share = |bound: Option<f64>, case: &Case| Some(percent(case.value?.median / bound?));
            table = table
                .some("of staggered", |case| share(case.staggered_bound, case))
                .some("of fluid", |case| share(case.fluid_bound, case));
        }
        table
            .some("busy", |case| Some(percent(case.typical()?.busy_share)))
            .some("batch mean (p50, p99)", |case| {
                let sizes = case.typical()?.batch;
                Some(format!("{:.1} ({}, {})", sizes.mean, sizes.p50?, sizes.p99?))
            })
            .some("queueing p50, p99 of SLO", |case| {
                let delay = case.typical()?.delay;
                Some(format!("{}, {}", percent(delay.p50?), percent(delay.p99?)))
            })
            .some("bad", |case| Some(format!("{:.2}%", case.typical()?.bad_share * 100.0)))
            .some("worst model", |case| {
                let (name, share) = case.typical()?.worst_model()?;
                (case.models > 1 && share > 0.0).then(|| format!("{name} {:.2}%", share * 100.0))
            })
            .some("preempted", |case| case.typical().map(|s| s.preempted).filter(|n| *n > 0))
    }
}

/// Three digits that count, and all before the point.
pub(super) fn short(value: f64) -> String {
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

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}
