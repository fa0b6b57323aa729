//! Calibrations of the emulated device: what was measured goes into the file, and the constants are made anew.

use std::path::Path;

use anyhow::{Context, ensure};
use downbeat_core::median;
use downbeat_report::say;
use downbeat_server::pair_profiler::PairMeasurement;
use downbeat_sim::device::{CalibratedModel, CalibratedPair, Calibration, MeasuredPoint};

use crate::options_file;
use crate::pair_report::PairReport;
use crate::profiled_model::ProfiledModel;
use crate::share_report::{DeviceUnits, ShareReport};

/// A device as it is told from others.
struct Device {
    name: String,
    units: DeviceUnits,
    /// The units of a run that is said to be on all: those that its threads use, on a CPU.
    of_a_run: u32,
}

impl Device {
    fn of(profiled: &ProfiledModel, units: Option<DeviceUnits>) -> Self {
        let name = profiled.engine.info().device;
        if let Some(units) = units {
            return Device { name, units, of_a_run: units.units };
        }
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let of_a_run = (profiled.threads as u32).clamp(1, cores);
        Device { name, units: DeviceUnits { units: cores, grain: 1, largest_part: cores - 1 }, of_a_run }
    }
}

/// What is there; `None`: nothing yet.
fn read(file: &Path) -> anyhow::Result<Option<Calibration>> {
    let named = || format!("--save {}", file.display());
    match options_file::read_text(file) {
        Ok(text) => Calibration::read(&text).map(Some).with_context(named),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(named),
    }
}

/// Changes the file, or makes it.
fn change(file: &Path, device: &Device, put: impl FnOnce(&mut Calibration)) -> anyhow::Result<()> {
    let named = || format!("--save {}", file.display());
    let new = || Calibration::new(&device.name, device.units.units, device.units.grain);
    let mut calibration = read(file)?.unwrap_or_else(new);
    calibration.check_device(&device.name, device.units.units).with_context(named)?;
    put(&mut calibration);
    calibration.fit().with_context(named)?;
    let text = format!(
        "# Written by `downbeat profile --save`; read by `downbeat simulate device --calibration`.\n{}",
        calibration.write().with_context(named)?
    );
    std::fs::write(file, text).with_context(named)?;
    for model in &calibration.models {
        let (segments, percent) = (model.segments.len(), model.worst_error * 100.0);
        say(format_args!("{}: {segments} segments, off by at most {percent:.1}% from what was measured", model.name))?;
    }
    if let Some(error) = calibration.device.pair_error {
        say(format_args!("pairs: slowdowns are off by {:.1}%", (error.exp() - 1.0) * 100.0))?;
    }
    Ok(())
}

/// Adds a model.
///
/// # Errors
/// If the file is of another device or no calibration, or cannot be written.
pub fn save_shares(file: &Path, profiled: &ProfiledModel, length: i64, report: &ShareReport) -> anyhow::Result<()> {
    let device = Device::of(profiled, report.device);
    let point = |m: &downbeat_server::share_profiler::ShareMeasurement| MeasuredPoint {
        batch: m.batch,
        units: m.units.unwrap_or(device.of_a_run),
        // On the host's clock a whole model's time is from the request to the answer.
        segments_us: match m.segments_ns.len() {
            1 => vec![in_micros(m.median_ns)],
            _ => m.segments_ns.iter().map(|ns| in_micros(*ns)).collect(),
        },
    };
    let overheads = report
        .measurements
        .iter()
        .filter(|m| m.by_device)
        .map(|m| in_micros(m.host_ns.saturating_sub(m.median_ns)) / m.segments_ns.len().max(1) as f64);
    let bytes = |specs: &[downbeat_core::tensor::TensorSpec]| -> u64 {
        let elements = |dims: &[i64]| -> u64 {
            dims.iter().skip(1).map(|d| u64::try_from(*d).unwrap_or(length.unsigned_abs())).product()
        };
        specs.iter().map(|s| elements(&s.dims) * s.datatype.size().unwrap_or(4) as u64).sum()
    };
    let signature = profiled.model.signature();
    let model = CalibratedModel {
        name: report.model.clone(),
        measured_on: report.conditions.clone(),
        input_bytes: bytes(&signature.inputs),
        output_bytes: bytes(&signature.outputs),
        launch_overhead_us: median(overheads).unwrap_or(0.0),
        worst_error: 0.0,
        segments: Vec::new(),
        measured: report.measurements.iter().map(point).collect(),
    };
    change(file, &device, |calibration| calibration.put_model(model))
}

/// Whether pairs of these models can be added, before they are measured.
///
/// # Errors
/// If a model is not in the file, or the pairs run in partitions, which the emulated device does not have.
pub fn check_pairs(file: &Path, models: [&str; 2], split: Option<u32>) -> anyhow::Result<()> {
    ensure!(split.is_none(), "--save takes pairs without --split: the emulated device shares all its units");
    let there = read(file)?.map_or(Vec::new(), |calibration| calibration.models);
    for name in models {
        ensure!(
            there.iter().any(|model| model.name == name),
            "{} has no model '{name}' yet: measure it first, with `downbeat profile {name} --save {0}`",
            file.display()
        );
    }
    Ok(())
}

/// Adds pairs.
///
/// # Errors
/// As [`save_shares`].
pub fn save_pairs(file: &Path, profiled: &ProfiledModel, report: &PairReport) -> anyhow::Result<()> {
    change(file, &Device::of(profiled, report.device), |calibration| {
        report.pairs.iter().for_each(|pair| calibration.put_pair(of_pair(&report.models, pair)));
    })
}

fn of_pair(models: &[String; 2], pair: &PairMeasurement) -> CalibratedPair {
    CalibratedPair {
        models: models.clone(),
        batches: pair.batches,
        alone_us: pair.alone.map(|latencies| in_micros(latencies.median_ns)),
        together_us: pair.together.map(|latencies| in_micros(latencies.median_ns)),
    }
}

fn in_micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}
