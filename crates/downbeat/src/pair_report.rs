//! Two models at the same time, as table and plots.

use std::fmt::Write;

use downbeat_plot::{escape, groups};
use downbeat_server::pair_profiler::{Latencies, PairMeasurement};
use serde::Serialize;

use crate::share_report::DeviceUnits;
use crate::units::in_millis;

/// What was measured, and on what.
#[derive(Clone, Debug, Serialize)]
pub struct PairReport {
    /// The models.
    pub models: [String; 2],
    /// Engine, device, threads.
    pub conditions: String,
    /// The device's units, if it says.
    pub device: Option<DeviceUnits>,
    /// The compute units of each, where they have partitions.
    pub split: Option<[u32; 2]>,
    /// By the batch size of the first model, then of the second.
    pub pairs: Vec<PairMeasurement>,
}

/// How many times as long as alone.
fn slowdown(alone: &Latencies, together: &Latencies) -> f64 {
    together.median_ns as f64 / alone.median_ns.max(1) as f64
}

impl PairReport {
    fn placed(&self) -> String {
        match self.split {
            None => "both on the whole device".to_owned(),
            Some([first, second]) => format!("on {first} and {second} compute units of their own"),
        }
    }

    fn clock(&self) -> &'static str {
        if self.pairs.iter().all(|pair| pair.by_device) { "device's" } else { "host's" }
    }

    /// A table for the terminal.
    pub fn table(&self) -> String {
        let [first, second] = &self.models;
        let mut out = format!(
            "{first} (A) beside {second} (B), {}: {}\nmedian ms by the {} clock\n\n{:>7} {:>7} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>10}\n",
            self.placed(),
            self.conditions,
            self.clock(),
            "batch A",
            "batch B",
            "A alone",
            "B alone",
            "A beside",
            "B beside",
            "A times",
            "B times",
            "of in turn"
        );
        for pair in &self.pairs {
            let ms = |latencies: &Latencies| in_millis(latencies.median_ns);
            let _ = writeln!(
                out,
                "{:>7} {:>7} {:>10.4} {:>10.4} {:>10.4} {:>10.4} {:>8.2} {:>8.2} {:>10.3}",
                pair.batches[0],
                pair.batches[1],
                ms(&pair.alone[0]),
                ms(&pair.alone[1]),
                ms(&pair.together[0]),
                ms(&pair.together[1]),
                slowdown(&pair.alone[0], &pair.together[0]),
                slowdown(&pair.alone[1], &pair.together[1]),
                pair.share_of_sequential
            );
        }
        out += "\nof in turn: what both take at the same time, as a share of what they take one after the other; 1 is nothing gained, 0.5 the most\n";
        out
    }

    /// The table and plots as one HTML page that needs nothing else.
    pub fn page(&self) -> String {
        let mut out = format!(
            "<p class=\"sub\">{}; {}, by the {} clock</p><div class=\"plots\">",
            escape(&self.conditions),
            self.placed(),
            self.clock()
        );
        let label = |pair: &PairMeasurement| format!("{} + {}", pair.batches[0], pair.batches[1]);
        for (index, name) in self.models.iter().enumerate() {
            let names = ["alone", "beside: p5", "beside: median", "beside: p95"].map(str::to_owned);
            let bars = self.pairs.iter().map(|pair| {
                let (alone, together) = (&pair.alone[index], &pair.together[index]);
                let values = [alone.median_ns, together.p5_ns, together.median_ns, together.p95_ns];
                (label(pair), values.map(in_millis).to_vec())
            });
            let bars: Vec<(String, Vec<f64>)> = bars.collect();
            let about = "How long its batches take while the other model runs one batch after another (Abacus figure 3), by the batch sizes of both.";
            out += &groups(&format!("Latency of {name}"), about, "milliseconds a batch", &names, &bars);
        }
        let bars: Vec<(String, Vec<f64>)> =
            self.pairs.iter().map(|pair| (label(pair), vec![pair.share_of_sequential])).collect();
        let about = "What both take at the same time, as a share of what they take one after the other. 1: nothing gained; 0.5: neither slows the other down.";
        out += &groups("Together against in turn", about, "share", &["together / in turn".to_owned()], &bars);
        out += "</div><h2>Figures</h2>";
        let mut rows = String::new();
        for pair in &self.pairs {
            let _ = write!(rows, "<tr><td>{}</td><td>{}</td>", pair.batches[0], pair.batches[1]);
            for (alone, together) in pair.alone.iter().zip(&pair.together) {
                let _ = write!(
                    rows,
                    "<td>{:.4}</td><td>{:.4}</td><td>{:.4}</td><td>{:.4}</td><td>{:.2}</td>",
                    in_millis(alone.median_ns),
                    in_millis(together.p5_ns),
                    in_millis(together.median_ns),
                    in_millis(together.p95_ns),
                    slowdown(alone, together)
                );
            }
            let _ = write!(rows, "<td>{:.3}</td></tr>", pair.share_of_sequential);
        }
        let heads = [
            "batch A",
            "batch B",
            "A alone ms",
            "A beside p5",
            "median",
            "p95",
            "times",
            "B alone ms",
            "B beside p5",
            "median",
            "p95",
            "times",
            "of in turn",
        ];
        out += &downbeat_plot::table(&heads, &rows);
        let [first, second] = &self.models;
        downbeat_plot::page(&format!("{first} (A) beside {second} (B)"), &out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowdowns_and_the_gain_are_shown() {
        let latencies =
            |ms: u64| Latencies { runs: 3, p5_ns: ms * 1_000_000, median_ns: ms * 1_000_000, p95_ns: ms * 1_000_000 };
        let report = PairReport {
            models: ["a<".to_owned(), "b".to_owned()],
            conditions: "rten".to_owned(),
            device: None,
            split: None,
            pairs: vec![PairMeasurement {
                batches: [1, 8],
                alone: [latencies(2), latencies(10)],
                alone_in_partition: None,
                together: [latencies(3), latencies(12)],
                share_of_sequential: 0.667,
                by_device: false,
            }],
        };
        let table = report.table();
        assert!(table.contains("a< (A) beside b (B), both on the whole device: rten\nmedian ms by the host's clock"));
        let row = "      1       8     2.0000    10.0000     3.0000    12.0000     1.50     1.20      0.667\n";
        assert!(table.contains(row), "{table}");
        let page = report.page();
        assert!(page.contains("Latency of a&lt;") && page.contains("1 + 8") && page.ends_with("</html>\n"));
    }
}
