//! `downbeat-lab calibrate`: the emulated device's constants from measurements.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use downbeat::profile::share_report::{DeviceUnits, MeasuredOn, ShareReport};
use downbeat_core::median;
use downbeat_models::measure::pair_profiler::PairMeasurement;
use downbeat_models::measure::share_profiler::ShareMeasurement;
use downbeat_report::{say, write};
use serde::Deserialize;

use super::read_text;
use crate::device::{CalibratedModel, CalibratedPair, Calibration, MeasuredPoint};
use crate::pair_report::PairReport;

/// Make a calibration of the emulated device from measurements of models and pairs.
///
/// Reports of `downbeat profile` with --shares or --segments have models. Reports of
/// `downbeat-lab pairs` have pairs of these models.
///
/// Examples:
///   downbeat profile resnet50 --shares 4 --segments 4 --json resnet50.json
///   downbeat profile bert --shares 4 --segments 4 --json bert.json
///   downbeat-lab pairs resnet50 bert --json pair.json
///   downbeat-lab calibrate resnet50.json bert.json pair.json --to gpu.toml
///   downbeat-lab device --calibration gpu.toml --model resnet50 --policy e-ebird --rate 150
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct CalibrateArgs {
    /// Reports that `--json` of these commands has written, all of one device.
    #[arg(value_name = "REPORT.json", required = true)]
    reports: Vec<PathBuf>,

    /// File to write the calibration to.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,

    /// Compute units of a device that does not report their number: the cores of a CPU [default:
    /// this machine's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    units: Option<u32>,
}

/// A report of a model or of a pair.
#[derive(Deserialize)]
#[serde(untagged)]
enum Report {
    Shares(ShareReport),
    Pairs(PairReport),
}

impl Report {
    fn read(file: &Path) -> anyhow::Result<Report> {
        let expected = || {
            format!(
                "{}: no report of `downbeat profile` with --shares or --segments, or of `downbeat-lab pairs`, as --json writes it",
                file.display()
            )
        };
        serde_json::from_str(&read_text(file)?).with_context(expected)
    }

    fn on(&self) -> (&MeasuredOn, Option<DeviceUnits>) {
        match self {
            Report::Shares(report) => (&report.on, report.device),
            Report::Pairs(report) => (&report.on, report.device),
        }
    }
}

/// Makes the calibration and writes the file.
///
/// # Errors
/// If a file is no report or of another device, a pair has a model without a report, or the file
/// cannot be written.
pub fn run(args: &CalibrateArgs) -> anyhow::Result<()> {
    let reports = args.reports.iter().map(|file| Report::read(file)).collect::<anyhow::Result<Vec<_>>>()?;
    let Some(first) = reports.first() else { bail!("no report is given") };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let of_cpu = args.units.unwrap_or(cores);
    let units = |known: Option<DeviceUnits>| known.map_or((of_cpu, 1), |known| (known.units, known.grain));
    let (on, known) = first.on();
    let mut calibration = Calibration::new(&on.device, units(known).0, units(known).1);
    for (report, file) in reports.iter().zip(&args.reports) {
        let (on, known) = report.on();
        calibration.check_device(&on.device, units(known).0).with_context(|| file.display().to_string())?;
        if let Report::Shares(report) = report {
            calibration.put_model(of_model(report, of_cpu));
        }
    }
    for (report, file) in reports.iter().zip(&args.reports) {
        if let Report::Pairs(report) = report {
            put_pairs(&mut calibration, report).with_context(|| file.display().to_string())?;
        }
    }
    calibration.fit()?;
    let heading = "# Written by `downbeat-lab calibrate`; read by `downbeat-lab device --calibration`.\n";
    write(&args.to, &format!("{heading}{}", calibration.write()?))?;
    for model in &calibration.models {
        let (segments, percent) = (model.segments.len(), model.worst_error * 100.0);
        say(format_args!("{}: {segments} segments, off by at most {percent:.1}% from what was measured", model.name))?;
    }
    if let Some(error) = calibration.device.pair_error {
        say(format_args!("pairs: slowdowns are off by {:.1}%", (error.exp() - 1.0) * 100.0))?;
    }
    Ok(())
}

/// Makes a calibrated model. `of_cpu` is the units of a CPU; a run uses one unit for each of its
/// threads.
fn of_model(report: &ShareReport, of_cpu: u32) -> CalibratedModel {
    let of_a_run = report.device.map_or((report.on.threads as u32).clamp(1, of_cpu), |device| device.units);
    let point = |m: &ShareMeasurement| MeasuredPoint {
        batch: m.batch,
        units: m.units.unwrap_or(of_a_run),
        // A whole model's time on the host's clock runs from the request to the answer.
        segments_us: match m.segments_ns.len() {
            1 => vec![in_micros(m.median_ns)],
            _ => m.segments_ns.iter().map(|ns| in_micros(*ns)).collect(),
        },
    };
    let by_device = report.measurements.iter().filter(|m| m.by_device);
    let overheads =
        by_device.map(|m| in_micros(m.host_ns.saturating_sub(m.median_ns)) / m.segments_ns.len().max(1) as f64);
    CalibratedModel {
        name: report.model.clone(),
        measured_on: report.conditions.clone(),
        input_bytes: report.item_bytes[0],
        output_bytes: report.item_bytes[1],
        launch_overhead_us: median(overheads).unwrap_or(0.0),
        worst_error: 0.0,
        segments: Vec::new(),
        measured: report.measurements.iter().map(point).collect(),
    }
}

fn put_pairs(calibration: &mut Calibration, report: &PairReport) -> anyhow::Result<()> {
    ensure!(report.split.is_none(), "pairs of --split have partitions: the emulated device shares all its units");
    for name in &report.models {
        ensure!(
            calibration.models.iter().any(|model| model.name == *name),
            "it has a pair with '{name}', which no report measures: give one of `downbeat profile {name} --segments 4 --json FILE`"
        );
    }
    for PairMeasurement { batches, alone, together, .. } in &report.pairs {
        calibration.put_pair(CalibratedPair {
            models: report.models.clone(),
            batches: *batches,
            alone_us: alone.map(|latencies| in_micros(latencies.median_ns)),
            together_us: together.map(|latencies| in_micros(latencies.median_ns)),
        });
    }
    Ok(())
}

fn in_micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}
