//! The report of `downbeat-lab pairs`: two models at the same time, as a table and plots.

use std::fmt;

use downbeat::options::units::in_millis;
use downbeat::profile::share_report::{DeviceUnits, MeasuredOn};
use downbeat_models::measure::pair_profiler::{Latencies, PairMeasurement};
use downbeat_report::{Page, Table, bars};
use serde::{Deserialize, Serialize};

/// Two models, the conditions of the measurement, and their latencies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PairReport {
    /// The two models.
    pub models: [String; 2],
    /// The engine and its device.
    pub on: MeasuredOn,
    /// The engine, device and threads in words.
    pub conditions: String,
    /// The device's units, if they are known.
    pub device: Option<DeviceUnits>,
    /// The compute units of each model, if they have partitions.
    pub split: Option<[u32; 2]>,
    /// The measurements, by the batch size of the first model, then of the second.
    pub pairs: Vec<PairMeasurement>,
}

/// The time beside the other model as a multiple of the time alone.
fn slowdown(alone: &Latencies, together: &Latencies) -> f64 {
    together.median_ns as f64 / alone.median_ns.max(1) as f64
}

/// The time of running both at once, as a share of the time of the same batches in turns. 1 is no
/// gain, 0.5 is the most. In a time `t` each of the two does `t / together` batches,
/// which take `alone / together * t` alone.
///
/// Abacus §8 does not place models on one GPU whose duration together "always equals that of
/// sequential execution".
fn share_of_sequential(alone_ns: [u64; 2], together_ns: [u64; 2]) -> f64 {
    let done: f64 =
        alone_ns.iter().zip(together_ns).map(|(alone, together)| *alone as f64 / together.max(1) as f64).sum();
    1.0 / done
}

/// The gain of a measured pair; see [`share_of_sequential`].
fn of_in_turn(pair: &PairMeasurement) -> f64 {
    let medians = |of: &[Latencies; 2]| of.map(|latencies| latencies.median_ns);
    share_of_sequential(medians(&pair.alone), medians(&pair.together))
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

    fn conditions(&self) -> String {
        format!("{}: {}", self.placed(), self.conditions)
    }

    fn title(&self) -> String {
        let [first, second] = &self.models;
        format!("{first} (A) beside {second} (B)")
    }

    fn table(&self) -> Table<&PairMeasurement> {
        let ms = |ns: u64| format!("{:.4}", in_millis(ns));
        let mut table =
            Table::of(&self.pairs).number("batch A", |pair| pair.batches[0]).number("batch B", |pair| pair.batches[1]);
        for (index, name) in ["A", "B"].into_iter().enumerate() {
            table = table
                .number(&format!("{name} alone"), |pair| ms(pair.alone[index].median_ns))
                .number(&format!("{name} beside"), |pair| ms(pair.together[index].median_ns))
                .number("p5", |pair| ms(pair.together[index].p5_ns))
                .number("p95", |pair| ms(pair.together[index].p95_ns))
                .number("times", |pair| format!("{:.2}", slowdown(&pair.alone[index], &pair.together[index])));
        }
        table.number("together / in turn", |pair| format!("{:.3}", of_in_turn(pair)))
    }

    fn plots(&self) -> Vec<String> {
        let label = |pair: &PairMeasurement| format!("{} + {}", pair.batches[0], pair.batches[1]);
        let latencies = |(index, name): (usize, &String)| {
            let names = ["alone", "beside: p5", "beside: median", "beside: p95"].map(str::to_owned);
            let times = self.pairs.iter().map(|pair| {
                let (alone, together) = (&pair.alone[index], &pair.together[index]);
                let values = [alone.median_ns, together.p5_ns, together.median_ns, together.p95_ns];
                (label(pair), values.map(in_millis).to_vec())
            });
            let times: Vec<(String, Vec<f64>)> = times.collect();
            let about = "Time of a batch of this model while the other model runs one batch after another (Abacus figure 3), by the batch sizes of both.";
            bars(&format!("Latency of {name}"), about, "batch sizes", "milliseconds a batch", &names, &times)
        };
        let mut plots: Vec<String> = self.models.iter().enumerate().map(latencies).collect();
        let shares: Vec<(String, Vec<f64>)> =
            self.pairs.iter().map(|pair| (label(pair), vec![of_in_turn(pair)])).collect();
        let about = "Time of both batches at once, divided by their time one after the other. 1: no gain; 0.5: neither batch slows the other down.";
        let names = ["together / in turn".to_owned()];
        plots.push(bars(
            "Both models together, compared with one after the other",
            about,
            "batch sizes",
            "share",
            &names,
            &shares,
        ));
        plots
    }

    /// The table and plots as one HTML page.
    pub fn page(&self) -> String {
        Page::new(&self.title())
            .note(&format!("{}; median ms by the {} clock", self.conditions(), self.clock()))
            .plots(&self.plots())
            .table("Figures", &self.table())
            .html()
    }
}

impl fmt::Display for PairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {}\nmedian ms by the {} clock\n", self.title(), self.conditions(), self.clock())?;
        self.table().fmt(f)?;
        writeln!(
            f,
            "\ntogether / in turn: time of both batches at once, divided by their time one after the other; 1: no \
             gain, 0.5: the most"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gains_nothing_is_1_and_what_disturbs_nobody_is_a_half() {
        assert_eq!(share_of_sequential([10, 30], [10, 30]), 0.5);
        // Each takes as long as both alone, as when they run in turns.
        assert_eq!(share_of_sequential([10, 10], [20, 20]), 1.0);
        // In 80 ns the first runs four times (40 ns alone), and the second once (40 ns alone). In
        // turns they run as often.
        assert_eq!(share_of_sequential([10, 40], [20, 80]), 1.0);
        assert!(share_of_sequential([10, 10], [25, 25]) > 1.0);
    }

    #[test]
    fn slowdowns_and_the_gain_are_shown() {
        let latencies =
            |ms: u64| Latencies { runs: 3, p5_ns: ms * 1_000_000, median_ns: ms * 1_000_000, p95_ns: ms * 1_000_000 };
        let report = PairReport {
            models: ["a<".to_owned(), "b".to_owned()],
            on: MeasuredOn { engine: "rten".to_owned(), device: "cpu".to_owned(), threads: 1 },
            conditions: "rten".to_owned(),
            device: None,
            split: None,
            pairs: vec![PairMeasurement {
                batches: [1, 8],
                alone: [latencies(2), latencies(10)],
                alone_in_partition: None,
                together: [latencies(3), latencies(12)],
                by_device: false,
            }],
        };
        let table = report.to_string();
        assert!(table.contains("a< (A) beside b (B), both on the whole device: rten\nmedian ms by the host's clock"));
        let row = "|       1 |       8 |  2.0000 |   3.0000 | 3.0000 | 3.0000 |  1.50 | 10.0000 |  12.0000 | 12.0000 | 12.0000 |  1.20 |              0.667 |\n";
        assert!(table.contains(row), "{table}");
        let page = report.page();
        assert!(page.contains("Latency of a&lt;") && page.contains("1 + 8") && page.ends_with("</html>\n"));
    }
}
