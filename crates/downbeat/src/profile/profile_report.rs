//! A measured latency profile as a table, plots and files.

use std::fmt::Write;

use anyhow::Context;
use downbeat_core::tensor::{Signature, TensorSpec};
use downbeat_models::measure::profiler::{self, Measurement};
use downbeat_report::{Axis, Line, Page, Scale, Table, lines};
use serde::Serialize;

use crate::options::units::{self, in_millis};

/// Width of the bars in the terminal, characters.
const BAR_WIDTH: usize = 40;

/// A model, the conditions of the measurement, and its latencies.
#[derive(Clone, Debug, Serialize)]
pub struct ProfileReport {
    pub model: String,
    pub version: u64,
    pub engine: String,
    pub engine_version: String,
    /// The device that the engine ran on.
    pub device: String,
    /// Threads inside one run.
    pub threads: usize,
    /// The length of the dimensions that vary, if there are any.
    pub length: Option<i64>,
    /// Latencies by batch size, ascending.
    pub measurements: Vec<Measurement>,
}

/// Inferences a second if batches of this size follow each other.
fn throughput(measurement: &Measurement) -> f64 {
    f64::from(measurement.batch) * 1e9 / measurement.median_ns.max(1) as f64
}

/// Alpha and beta of the line `alpha * batch + beta` through the medians, in milliseconds, by least
/// squares; `None` with fewer than two sizes.
fn fit(measurements: &[Measurement]) -> Option<(f64, f64)> {
    let n = measurements.len() as f64;
    let mean = |f: &dyn Fn(&Measurement) -> f64| measurements.iter().map(f).sum::<f64>() / n;
    let (mean_batch, mean_ms) = (mean(&|m| f64::from(m.batch)), mean(&|m| in_millis(m.median_ns)));
    let variance = mean(&|m| (f64::from(m.batch) - mean_batch).powi(2));
    let covariance = mean(&|m| (f64::from(m.batch) - mean_batch) * (in_millis(m.median_ns) - mean_ms));
    (measurements.len() > 1 && variance > 0.0).then(|| {
        let alpha = covariance / variance;
        (alpha, mean_ms - alpha * mean_batch)
    })
}

fn table(measurements: &[Measurement]) -> Table<&Measurement> {
    let ms = |ns: u64| format!("{:.4}", in_millis(ns));
    Table::of(measurements)
        .number("batch", |m| m.batch)
        .number("median ms", |m| ms(m.median_ns))
        .number("p95 ms", |m| ms(m.p95_ns))
        .number("fastest ms", |m| ms(m.min_ns))
        .number("ms an item", |m| format!("{:.4}", in_millis(m.median_ns) / f64::from(m.batch)))
        .number("items/s", |m| format!("{:.1}", throughput(m)))
        .number("runs", |m| m.runs)
        .at_least(7)
}

impl ProfileReport {
    fn subject(&self) -> String {
        let length = self.length.map_or_else(String::new, |n| format!(", varying dimensions {n}"));
        let threads = units::threads(self.threads);
        format!("{} {} on {}, {threads}{length}", self.engine, self.engine_version, self.device)
    }

    /// The lines above the rows.
    pub fn header(&self) -> String {
        format!("{} version {}: {}\n\n{}", self.model, self.version, self.subject(), table(&[]).head())
    }

    /// A row of the table.
    pub fn row(m: &Measurement) -> String {
        table(std::slice::from_ref(m)).body()
    }

    /// The plot and the fitted line below the table.
    pub fn summary(&self) -> String {
        let mut out = String::from("\nitems/s\n");
        let most = self.measurements.iter().map(throughput).fold(0.0, f64::max);
        for m in &self.measurements {
            let _ = writeln!(out, "{:>6} {:<BAR_WIDTH$} {:.1}", m.batch, bar(throughput(m) / most), throughput(m));
        }
        if let Some(line) = self.line() {
            let _ = writeln!(out, "\n{line}");
        }
        out
    }

    /// The fitted line in words.
    fn line(&self) -> Option<String> {
        let (alpha, beta) = fit(&self.measurements)?;
        Some(format!("l(b) = {alpha:.4} ms * b + {beta:.4} ms (least squares; Symphony's alpha and beta)"))
    }

    /// The table and plots as one HTML page.
    pub fn page(&self) -> String {
        let points = |value: fn(&Measurement) -> f64| -> Vec<(f64, f64)> {
            self.measurements.iter().map(|m| (f64::from(m.batch), value(m))).collect()
        };
        let batch = Axis { label: "batch size", scale: Scale::Linear };
        let latency = Axis { label: "milliseconds a batch", scale: Scale::Linear };
        let rate = Axis { label: "items a second", scale: Scale::Linear };
        let line = |name, points| Line { name, points, stepped: false };
        let latencies = lines(
            "Latency by batch size",
            "Time of a batch: the median, and the time that 95 of 100 runs did not exceed.",
            &batch,
            &latency,
            &[line("median", points(|m| in_millis(m.median_ns))), line("p95", points(|m| in_millis(m.p95_ns)))],
        );
        let throughputs = lines(
            "Throughput by batch size",
            "Items a second when batches of this size follow each other.",
            &batch,
            &rate,
            &[line("items/s", points(throughput))],
        );
        Page::new(&format!("Latency profile of {} version {}", self.model, self.version))
            .note(&self.subject())
            .note(&self.line().unwrap_or_default())
            .plots(&[latencies, throughputs])
            .table("Figures", &table(&self.measurements))
            .html()
    }

    /// A model for the emulated engine with these latencies and this signature, in its TOML form.
    ///
    /// # Errors
    /// If the measurements give no profile.
    pub fn emulated_model(&self, signature: &Signature) -> anyhow::Result<String> {
        #[derive(Serialize)]
        struct Tensor<'a> {
            name: &'a str,
            datatype: &'static str,
            dims: &'a [i64],
        }
        #[derive(Serialize)]
        struct Emulated<'a> {
            latency_ms: Vec<f64>,
            inputs: Vec<Tensor<'a>>,
            outputs: Vec<Tensor<'a>>,
        }
        fn tensors(specs: &[TensorSpec]) -> Vec<Tensor<'_>> {
            specs.iter().map(|s| Tensor { name: &s.name, datatype: s.datatype.name(), dims: &s.dims }).collect()
        }
        let profile = profiler::profile(&self.measurements).context("the measurements give no latency profile")?;
        let largest = self.measurements.iter().map(|m| m.batch).max().unwrap_or(1);
        let model = Emulated {
            latency_ms: (1..=largest).map(|batch| profile.latency(batch).as_millis_f64()).collect(),
            inputs: tensors(&signature.inputs),
            outputs: tensors(&signature.outputs),
        };
        Ok(format!("# {} version {}: {}\n{}", self.model, self.version, self.subject(), toml::to_string(&model)?))
    }
}

/// A bar of eighths of characters, for a share from 0 to 1.
fn bar(share: f64) -> String {
    let eighths = (share.clamp(0.0, 1.0) * BAR_WIDTH as f64 * 8.0).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.extend(["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"].get(eighths % 8).copied());
    bar
}

#[cfg(test)]
mod tests {
    use downbeat_core::tensor::DataType;

    use super::*;

    fn report(points: &[(u32, u64)]) -> ProfileReport {
        let measurement = |(batch, median_ns): &(u32, u64)| Measurement {
            batch: *batch,
            runs: 3,
            min_ns: median_ns - 1,
            median_ns: *median_ns,
            p95_ns: median_ns + 1,
        };
        ProfileReport {
            model: "m<b>".into(),
            version: 1,
            engine: "rten".into(),
            engine_version: "1".into(),
            device: "cpu".into(),
            threads: 2,
            length: Some(32),
            measurements: points.iter().map(measurement).collect(),
        }
    }

    #[test]
    fn the_line_is_found_again() {
        // l(b) = 2 ms * b + 3 ms.
        let report = report(&[(1, 5_000_000), (2, 7_000_000), (8, 19_000_000)]);
        let (alpha, beta) = fit(&report.measurements).unwrap();
        assert!((alpha - 2.0).abs() < 1e-9 && (beta - 3.0).abs() < 1e-9, "{alpha} {beta}");
        assert!(report.summary().contains("l(b) = 2.0000 ms * b + 3.0000 ms"), "{}", report.summary());
        assert_eq!(fit(&report.measurements[..1]), None);
    }

    #[test]
    fn the_longest_bar_is_full() {
        assert_eq!(bar(1.0).chars().count(), BAR_WIDTH);
        assert_eq!(bar(0.5).chars().count(), BAR_WIDTH / 2);
        assert_eq!(bar(0.0), "");
        assert_eq!(bar(1.0 / (BAR_WIDTH as f64 * 8.0)), "▏");
        assert_eq!(bar(f64::NAN), "");
    }

    #[test]
    fn the_page_is_complete_and_escaped() {
        let page = report(&[(1, 5_000_000), (4, 8_000_000)]).page();
        assert!(page.contains("Latency profile of m&lt;b&gt;") && !page.contains("m<b>"));
        assert_eq!(page.matches("<svg").count() - page.matches("</svg>").count(), 0);
        assert!(page.contains("<td>4</td><td>8.0000</td>"), "{page}");
        assert!(page.ends_with("</html>\n"));
    }

    #[test]
    fn the_emulated_model_has_a_latency_for_each_size() {
        let spec = |name: &str| TensorSpec { name: name.into(), datatype: DataType::Fp32, dims: vec![-1, 3] };
        let signature = Signature { inputs: vec![spec("x")], outputs: vec![spec("y")] };
        let text = report(&[(1, 5_000_000), (4, 8_000_000)]).emulated_model(&signature).unwrap();
        let parsed: toml::Table = text.parse().unwrap();
        let latencies: Vec<f64> =
            parsed["latency_ms"].as_array().unwrap().iter().map(|v| v.as_float().unwrap()).collect();
        assert_eq!(latencies, [5.0, 6.0, 7.0, 8.0]);
        assert_eq!(parsed["inputs"][0]["dims"], toml::Value::from(vec![-1, 3]));
    }
}
