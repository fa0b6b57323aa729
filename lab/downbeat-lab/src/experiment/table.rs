//! The results as a table.

use std::collections::BTreeSet;
use std::fmt;

use downbeat_report::Table;
use downbeat_sim::tables::sample_table::{percent, short, why_no_capacity, with_outcome, with_sample};

use super::run::{Case, Results};
use super::{Measure, Value};

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = if self.source.is_empty() { String::new() } else { format!(" ({})", self.source) };
        writeln!(f, "{}{source}\n", self.title)?;
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.conditions())
    }
}

impl Results {
    /// The name of the measured quantity, with its unit.
    pub(super) fn value_name(&self) -> &'static str {
        match self.measure {
            Measure::Capacity => "capacity r/s",
            Measure::Devices => "devices",
            Measure::Goodput | Measure::Timeline | Measure::Windows => "goodput r/s",
        }
    }

    /// The conditions that the table was measured under.
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

    /// A sentence that tells why a case has no value.
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
        let Some(no_capacity) = &sample.no_capacity else {
            return Some(format!("{of}: no number of devices that may be tried is enough"));
        };
        Some(format!("{of}: {}", why_no_capacity(no_capacity, self.tolerated)))
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
        table = table.text("policy", |case| &case.policy);
        table = with_outcome(table, self.value_name(), self.seeds.len(), |case| case.value)
            .some("paper", |case| case.paper.map(short))
            .some("ratio", |case| case.relative.map(|relative| format!("{relative:.3}")));
        if self.measure == Measure::Capacity {
            let share = |bound: Option<f64>, case: &Case| Some(percent(case.value?.median / bound?));
            table = table
                .some("of staggered", |case| share(case.staggered_bound, case))
                .some("of fluid", |case| share(case.fluid_bound, case));
        }
        with_sample(table, |case| case.typical())
    }
}
