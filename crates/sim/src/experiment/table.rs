//! The results as a table for a terminal, which is also Markdown.

use std::collections::BTreeSet;
use std::fmt;

use super::run::{Case, Results};
use super::{Measure, Value};

/// A column, if any case has something to say in it.
pub(crate) struct Column {
    pub name: String,
    pub cells: Vec<String>,
}

/// The columns side by side. All have as many cells.
pub(crate) fn write_table(f: &mut fmt::Formatter<'_>, columns: &[Column]) -> fmt::Result {
    let width = |column: &Column| {
        let cells = column.cells.iter().map(|cell| cell.chars().count());
        cells.chain([column.name.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = columns.iter().map(width).collect();
    let row = |f: &mut fmt::Formatter<'_>, cell: &dyn Fn(&Column) -> String| {
        for (column, width) in columns.iter().zip(&widths) {
            write!(f, "| {:width$} ", cell(column))?;
        }
        writeln!(f, "|")
    };
    row(f, &|column| column.name.clone())?;
    for width in &widths {
        write!(f, "|{}", "-".repeat(width + 2))?;
    }
    writeln!(f, "|")?;
    for index in 0..columns.first().map_or(0, |column| column.cells.len()) {
        row(f, &|column| column.cells[index].clone())?;
    }
    Ok(())
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = if self.source.is_empty() { String::new() } else { format!(" ({})", self.source) };
        writeln!(f, "{}{source}\n", self.title)?;
        write_table(f, &self.columns())?;
        let seeds: Vec<String> = self.seeds.iter().map(ToString::to_string).collect();
        writeln!(
            f,
            "\nseeds {}; at most {}% of each model's requests dropped or late",
            seeds.join(", "),
            self.tolerated * 100.0
        )?;
        if self.left_out > 0 {
            writeln!(f, "a sample: {} cases were left out; --all runs them", self.left_out)?;
        }
        Ok(())
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

    fn columns(&self) -> Vec<Column> {
        let mut columns = Vec::new();
        let mut add = |name: &str, cell: &dyn Fn(&Case) -> Option<String>| {
            let cells: Vec<Option<String>> = self.cases.iter().map(cell).collect();
            if cells.iter().any(Option::is_some) {
                let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "–".to_owned())).collect();
                columns.push(Column { name: name.to_owned(), cells });
            }
        };
        add("workload", &|case| Some(case.workload.clone()).filter(|name| !name.is_empty()));
        let axes: BTreeSet<&String> = self.cases.iter().flat_map(|case| case.point.keys()).collect();
        for axis in axes {
            add(axis, &|case| case.point.get(axis).map(Value::to_string));
        }
        add("policy", &|case| Some(case.policy.clone()));
        add(self.value_name(), &|case| Some(short(case.value?.median)));
        if self.seeds.len() > 1 {
            add("of seeds", &|case| case.value.map(|value| format!("{}..{}", short(value.min), short(value.max))));
        }
        add("paper", &|case| case.paper.map(short));
        add("ratio", &|case| case.relative.map(|relative| format!("{relative:.3}")));
        if self.measure == Measure::Capacity {
            let share = |bound: Option<f64>, case: &Case| Some(percent(case.value?.median / bound?));
            add("of staggered", &|case| share(case.staggered_bound, case));
            add("of fluid", &|case| share(case.fluid_bound, case));
        }
        add("busy", &|case| Some(percent(case.typical()?.busy_share)));
        let batch = |case: &Case| {
            let sizes = case.typical()?.batch;
            Some(format!("{:.1} ({}, {})", sizes.mean, sizes.p50?, sizes.p99?))
        };
        add("batch mean (p50, p99)", &batch);
        let delay = |case: &Case| {
            let delay = case.typical()?.delay;
            Some(format!("{}, {}", percent(delay.p50?), percent(delay.p99?)))
        };
        add("queueing p50, p99 of SLO", &delay);
        add("bad", &|case| Some(format!("{:.2}%", case.typical()?.bad_share * 100.0)));
        let worst = |case: &Case| {
            let (name, share) = case.typical()?.worst_model()?;
            (case.models > 1 && share > 0.0).then(|| format!("{name} {:.2}%", share * 100.0))
        };
        add("worst model", &worst);
        add("preempted", &|case| case.typical().map(|s| s.preempted).filter(|n| *n > 0).map(|n| n.to_string()));
        columns
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
