//! Measured mixes of lanes as a table, a page and a file for the server.

use std::fmt::{self, Write};

use downbeat_core::device::LaneMix;
use downbeat_models::measure::mix_profiler::MeasuredMix;
use downbeat_report::{Page, Table, bars};
use serde::Serialize;

use crate::options::units::in_millis;

/// Mixes of each load that are shown: the fastest, and as a warning the slowest.
const FASTEST_SHOWN: usize = 6;
const SLOWEST_SHOWN: usize = 2;

/// A model, the conditions of the measurement, and its mixes.
#[derive(Clone, Debug, Serialize)]
pub struct MixReport {
    pub model: String,
    /// Engine, device, threads.
    pub subject: String,
    /// The mixes of each load, the fastest first.
    pub loads: Vec<(u32, Vec<MeasuredMix>)>,
}

/// The fastest mixes, then the slowest.
fn shown(mixes: &[MeasuredMix]) -> impl Iterator<Item = &MeasuredMix> {
    let fast = mixes.len().min(FASTEST_SHOWN);
    let slow = mixes.len().saturating_sub(SLOWEST_SHOWN).max(fast);
    mixes[..fast].iter().chain(&mixes[slow..])
}

impl MixReport {
    /// The best mix of each load.
    fn best(&self) -> impl Iterator<Item = (u32, &LaneMix)> {
        self.loads.iter().filter_map(|(total, mixes)| Some((*total, &mixes.first()?.mix)))
    }

    /// A table of mixes; `of` chooses the mixes of each load.
    fn table<'a, M: Iterator<Item = &'a MeasuredMix>>(
        &'a self,
        of: impl Fn(&'a [MeasuredMix]) -> M,
    ) -> Table<(u32, &'a MeasuredMix)> {
        let rows = self.loads.iter().flat_map(|(total, mixes)| of(mixes).map(|m| (*total, m)));
        Table::of(rows)
            .number("items", |(total, _)| *total)
            .number("mean ms", |(_, m)| format!("{:.3}", in_millis(m.mean_ns)))
            .number("longest ms", |(_, m)| format!("{:.3}", in_millis(m.longest_ns)))
            .number("runs", |(_, m)| m.runs)
            .text("mix", |(_, m)| &m.mix)
    }

    /// The table of mixes in the form of `downbeat.toml`.
    pub fn mixes(&self) -> String {
        let mut out = format!("# downbeat profile {} --lane-mix: {}\n[mixes]\n", self.model, self.subject);
        for (total, mix) in self.best() {
            let _ = writeln!(out, "{total} = \"{mix}\"");
        }
        out
    }

    /// A picture of the times for each load.
    fn plots(&self) -> Vec<String> {
        let names = ["mean of the items".to_owned(), "longest lane".to_owned()];
        let plot = |(total, mixes): &(u32, Vec<MeasuredMix>)| {
            let times: Vec<(String, Vec<f64>)> =
                shown(mixes).map(|m| (short(&m.mix), vec![in_millis(m.mean_ns), in_millis(m.longest_ns)])).collect();
            bars(
                &format!("{total} items: the fastest and the slowest mixes"),
                "Time from the common start of all lanes.",
                "",
                "milliseconds",
                &names,
                &times,
            )
        };
        self.loads.iter().map(plot).collect()
    }

    /// All mixes and their plots as one HTML page.
    pub fn page(&self) -> String {
        Page::new(&format!("Mixes of lanes for {}", self.model))
            .note(&self.subject)
            .plots(&self.plots())
            .table("Figures", &self.table(|mixes| mixes.iter()))
            .html()
    }
}

impl fmt::Display for MixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}\n", self.model, self.subject)?;
        self.table(shown).fmt(f)?;
        writeln!(f)?;
        self.best().try_for_each(|(total, mix)| writeln!(f, "best for {total} items: {mix}"))
    }
}

/// A mix in few characters, for a place below a bar: `2x8 16`.
fn short(mix: &LaneMix) -> String {
    let part = |(size, count): (u32, u32)| if count == 1 { size.to_string() } else { format!("{count}x{size}") };
    mix.counts().map(part).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixes_that_are_written_are_the_best_ones() {
        let mix = |text: &str, mean_ns| MeasuredMix {
            mix: text.parse().unwrap(),
            total: 4,
            runs: 3,
            mean_ns,
            longest_ns: mean_ns,
        };
        let report = MixReport {
            model: "m".to_owned(),
            subject: "emulated".to_owned(),
            loads: vec![(4, vec![mix("2,2", 5), mix("4", 6), mix("1,1,1,1", 9)]), (2, vec![mix("2", 1)])],
        };
        assert!(report.mixes().ends_with("[mixes]\n4 = \"2,2\"\n2 = \"2\"\n"), "{}", report.mixes());
        assert!(report.to_string().contains("best for 4 items: 2,2\n"), "{report}");
        assert!(report.page().contains(">1,1,1,1</td>"));
        assert_eq!(short(&"2,2,8".parse().unwrap()), "2x2 8");
    }
}
