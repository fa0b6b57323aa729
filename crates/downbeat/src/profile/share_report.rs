//! `downbeat profile --shares`: latency by batch, share of the device and segment, as a table and
//! plots.

use std::fmt::Write;

use downbeat_core::device::spatial::{KNEE_TOLERANCE, knee};
use downbeat_models::measure::share_profiler::ShareMeasurement;
use downbeat_report::{Axis, Line, Page, Scale, Table, lines};
use serde::{Deserialize, Serialize};

use crate::options::units::in_millis;

/// The compute units of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUnits {
    /// The number of all units.
    pub units: u32,
    /// The step in which units are given out.
    pub grain: u32,
    /// The largest share that leaves some units for others.
    pub largest_part: u32,
}

/// The place of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredOn {
    /// The engine, such as `cuda`.
    pub engine: String,
    /// The device, as the engine names it.
    pub device: String,
    /// Threads inside one run.
    pub threads: usize,
}

/// A model, the conditions of the measurement, and its latencies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShareReport {
    /// The model.
    pub model: String,
    /// The model's version.
    pub version: u64,
    /// The engine and its device.
    pub on: MeasuredOn,
    /// Bytes of an item's inputs and of its outputs.
    pub item_bytes: [u64; 2],
    /// The engine, device and threads in words.
    pub conditions: String,
    /// The device's units, if they are known.
    pub device: Option<DeviceUnits>,
    /// The last operator of each segment; empty if the model is whole.
    pub segments: Vec<String>,
    /// Pairs of a batch size and its knee in units.
    pub knees: Vec<(u32, u32)>,
    /// The measurements, by share, then by batch size, both ascending.
    pub measurements: Vec<ShareMeasurement>,
}

fn throughput(m: &ShareMeasurement) -> f64 {
    f64::from(m.batch) * 1e9 / m.median_ns.max(1) as f64
}

impl ShareReport {
    /// Adds the measurements, and finds the knees.
    pub fn complete(&mut self, measurements: Vec<ShareMeasurement>) {
        self.measurements = measurements;
        let knee_of = |batch: u32| {
            let points: Vec<(u32, f64)> =
                self.of_batch(batch).filter_map(|m| Some((m.units?, throughput(m)))).collect();
            Some((batch, knee(&points, KNEE_TOLERANCE)?))
        };
        self.knees = self.batches().into_iter().filter_map(knee_of).collect();
    }

    fn of_batch(&self, batch: u32) -> impl Iterator<Item = &ShareMeasurement> {
        self.measurements.iter().filter(move |m| m.batch == batch)
    }

    fn batches(&self) -> Vec<u32> {
        let mut batches: Vec<u32> = self.measurements.iter().map(|m| m.batch).collect();
        batches.sort_unstable();
        batches.dedup();
        batches
    }

    /// The measurements on the largest share.
    fn on_whole(&self) -> impl Iterator<Item = &ShareMeasurement> {
        let most = self.measurements.iter().map(|m| m.units).max();
        self.measurements.iter().filter(move |m| Some(m.units) == most)
    }

    /// Whether there are measurements of more than one share.
    pub fn has_shares(&self) -> bool {
        self.measurements.iter().any(|m| m.units != self.measurements[0].units)
    }

    /// The clock of the measurements, in words.
    fn clock(&self) -> &'static str {
        if !self.measurements.is_empty() && self.measurements.iter().all(|m| m.by_device) {
            "by the device's clock, with copies in and out, without the host's part"
        } else {
            "by the host's clock"
        }
    }

    /// The lines above the rows.
    pub fn header(&self) -> String {
        let device = self.device.map_or_else(String::new, |device| {
            format!("{} compute units, divisible in steps of {}\n", device.units, device.grain)
        });
        let head = self.table(&[]).head();
        format!("{} version {}: {}\n{device}\n{head}", self.model, self.version, self.conditions)
    }

    fn table<'a>(&self, measurements: &'a [ShareMeasurement]) -> Table<&'a ShareMeasurement> {
        let ms = |ns: u64| format!("{:.4}", in_millis(ns));
        Table::of(measurements)
            .number("units", |m| m.units.map_or_else(|| "-".to_owned(), |units| units.to_string()))
            .number("share", |m| self.share(m.units))
            .number("batch", |m| m.batch)
            .number("median ms", |m| ms(m.median_ns))
            .number("p95 ms", |m| ms(m.p95_ns))
            .number("host ms", |m| ms(m.host_ns))
            .number("items/s", |m| format!("{:.1}", throughput(m)))
            .number("runs", |m| m.runs)
            .at_least(7)
    }

    /// The segments of the model; `None` if it is not cut.
    fn segments(&self) -> Option<Table<(usize, &String)>> {
        let mut table = Table::of(self.segments.iter().enumerate()).number("segment", |(index, _)| index + 1);
        for m in self.on_whole() {
            let ms = |index: usize| in_millis(m.segments_ns.get(index).copied().unwrap_or(0));
            table = table.number(&format!("batch {}", m.batch), |(index, _)| format!("{:.4}", ms(*index)));
        }
        (self.segments.len() > 1).then(|| table.text("until", |(_, name)| *name))
    }

    fn share(&self, units: Option<u32>) -> String {
        match (units, self.device) {
            (Some(units), Some(device)) => format!("{:.0}%", f64::from(units) * 100.0 / f64::from(device.units)),
            _ => "all".to_owned(),
        }
    }

    /// A row of the table.
    pub fn row(&self, m: &ShareMeasurement) -> String {
        self.table(std::slice::from_ref(m)).body()
    }

    /// The lines below the table: the knees, and the segments.
    pub fn summary(&self) -> String {
        let mut out = format!("\nmedian and p95 are {}\n", self.clock());
        for (batch, units) in &self.knees {
            let _ = writeln!(out, "knee for a batch of {batch}: {units} units ({})", self.share(Some(*units)));
        }
        if !self.knees.is_empty() {
            out += &knee_rule();
            out.push('\n');
        }
        if let Some(segments) = self.segments() {
            let _ = write!(out, "\nmedian ms of each segment on the largest share\n\n{segments}");
        }
        out
    }

    /// Latency and throughput by share, if there is more than one share.
    fn plots(&self) -> Vec<String> {
        let named: Vec<(String, u32)> = self.batches().into_iter().map(|b| (format!("batch {b}"), b)).collect();
        let plot = |title, label, scale, value: fn(&ShareMeasurement) -> f64| {
            let points =
                |batch: u32| self.of_batch(batch).filter_map(|m| Some((f64::from(m.units?), value(m)))).collect();
            let of_batches: Vec<Line<'_>> =
                named.iter().map(|(name, batch)| Line { name, points: points(*batch), stepped: false }).collect();
            let units = Axis { label: "compute units", scale: Scale::Linear };
            lines(title, "A line for each batch size.", &units, &Axis { label, scale }, &of_batches)
        };
        if !self.has_shares() {
            return Vec::new();
        }
        vec![
            plot("Latency by share of the device", "milliseconds a batch", Scale::Log, |m| in_millis(m.median_ns)),
            plot("Throughput by share of the device", "items a second", Scale::Linear, throughput),
        ]
    }

    /// The table and plots as one HTML page.
    pub fn page(&self) -> String {
        let page = Page::new(&format!("Shares and segments of {} version {}", self.model, self.version))
            .note(&format!("{}; {}", self.conditions, self.clock()))
            .plots(&self.plots())
            .table("Figures", &self.table(&self.measurements));
        match self.segments() {
            Some(segments) => page.table("Segments, median ms on the largest share", &segments).html(),
            None => page.html(),
        }
    }
}

fn knee_rule() -> String {
    format!(
        "knee: the smallest share beyond which all further units together shorten the latency by less than {:.0}% \
         (GSLICE 2.1.3: \"only a marginal improvement\")",
        KNEE_TOLERANCE * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> ShareReport {
        let measurement = |units, batch, segments_ns: &[u64]| ShareMeasurement {
            units: Some(units),
            batch,
            runs: 3,
            median_ns: segments_ns.iter().sum(),
            p95_ns: segments_ns.iter().sum(),
            segments_ns: segments_ns.to_vec(),
            host_ns: 9_000_000,
            by_device: true,
        };
        let mut report = ShareReport {
            model: "m<b>".to_owned(),
            version: 1,
            on: MeasuredOn { engine: "rten".to_owned(), device: "cpu".to_owned(), threads: 1 },
            item_bytes: [4, 4],
            conditions: "cuda".to_owned(),
            device: Some(DeviceUnits { units: 16, grain: 8, largest_part: 8 }),
            segments: vec!["conv".to_owned(), "pool".to_owned()],
            knees: Vec::new(),
            measurements: Vec::new(),
        };
        report.complete(vec![
            measurement(8, 1, &[1_000_000, 1_000_000]),
            measurement(8, 4, &[8_000_000, 4_000_000]),
            measurement(16, 1, &[1_000_000, 1_000_000]),
            measurement(16, 4, &[4_000_000, 2_000_000]),
        ]);
        report
    }

    /// GSLICE §2.1.3: "with larger batch sizes, the knee shifts towards larger GPU%".
    #[test]
    fn each_batch_size_has_its_knee() {
        let report = report();
        assert_eq!(report.knees, [(1, 8), (4, 16)]);
        let summary = report.summary();
        assert!(summary.contains("knee for a batch of 1: 8 units (50%)\n"), "{summary}");
        assert!(summary.contains("knee for a batch of 4: 16 units (100%)\n"), "{summary}");
        assert!(summary.contains("by the device's clock"), "{summary}");
    }

    #[test]
    fn segments_are_listed_on_the_largest_share() {
        let summary = report().summary();
        assert!(summary.contains("|       1 |  1.0000 |  4.0000 | conv  |\n"), "{summary}");
        assert!(summary.contains("|       2 |  1.0000 |  2.0000 | pool  |\n"), "{summary}");
    }

    #[test]
    fn the_page_is_complete_and_escaped() {
        let page = report().page();
        assert!(page.contains("m&lt;b&gt;") && !page.contains("m<b>"));
        assert!(page.contains("Latency by share of the device") && page.contains("<td>8</td><td>50%</td><td>4</td>"));
        assert!(page.contains("Segments") && page.ends_with("</html>\n"));
        let mut single = report();
        single.measurements.retain(|m| m.units == Some(16));
        assert!(!single.page().contains("Latency by share"));
    }
}
