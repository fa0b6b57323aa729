//! `downbeat profile --shares`, `--segments`: measures a model's segments, by batch and by share of
//! the device.

use std::io::Write;

use anyhow::{Context, bail, ensure};
use clap::Args;
use downbeat_core::Duration;
use downbeat_engine::{Emulated, Engine, Share};
use downbeat_engine_ort::cuda::{Device, Splitter};
use downbeat_engine_ort::preflight::survey;
use downbeat_engine_ort::{CudaOptions, Search};
use downbeat_models::measure::profiler::few_sizes;
use downbeat_models::measure::share_profiler::ShareMeasurement;
use downbeat_service::clock::Clock;
use downbeat_service::options::EngineChoice;

use crate::profile::profiled_model::ProfiledModel;
use crate::profile::share_report::{DeviceUnits, ShareReport};
use crate::profile::watched::watched;

/// Flags for measuring shares and segments.
#[derive(Args, Debug)]
pub struct ShareFlags {
    /// Measure latency by the share of the device's compute units too, and find the knee: on N
    /// shares of even steps [default: on all shares that a GPU can be divided into, every twentieth
    /// of an emulated device]. The results are kept for servers. Batch sizes: every second power of
    /// two, unless --batch is given
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", conflicts_with_all = ["lane_mix", "emulated"])]
    pub shares: Option<u32>,
    /// Cut the model into N segments of about equal time, and measure each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), conflicts_with_all = ["lane_mix", "emulated"])]
    pub segments: Option<u16>,
}

/// The step between the shares of emulated devices, hundredths.
const EMULATED_STEP: u32 = 5;

/// The compute units of the first device that an engine uses.
///
/// # Errors
/// If the engine is for the CPU, or the GPU cannot be divided.
pub fn device_units(engine: &dyn Engine) -> anyhow::Result<DeviceUnits> {
    let info = engine.info();
    if info.name == EngineChoice::Emulated.name() {
        let (units, grain) = (Emulated::UNITS, EMULATED_STEP);
        return Ok(DeviceUnits { units, grain, largest_part: units - grain });
    }
    if !matches!(info.name, "cuda" | "tensorrt") {
        bail!(
            "the engine {} cannot divide its device ({}); only NVIDIA GPUs (--engine cuda) and emulated models have \
             shares of compute units",
            info.name,
            info.device
        );
    }
    let gpus = survey(&Search::from_env(), &CudaOptions::default()).driver?.gpus;
    let gpu = gpus.iter().find(|gpu| info.device.ends_with(&gpu.name)).or(gpus.first()).context("there is no GPU")?;
    let device = Device::open(gpu.ordinal)?;
    let splitter = Splitter::new(&device)?;
    let (grain, groups) = (splitter.grain(), u32::try_from(splitter.groups()).unwrap_or(u32::MAX));
    Ok(DeviceUnits {
        units: device.compute_units(),
        grain,
        largest_part: groups.saturating_sub(1).saturating_mul(grain),
    })
}

impl DeviceUnits {
    /// The shares to measure, ascending; the last one is the whole device. With `wanted` 0 all
    /// shares, otherwise that many in even steps.
    pub fn shares(self, wanted: u32) -> Vec<(Option<u32>, Share)> {
        let grain = self.grain.max(1);
        let (step, most) = match wanted {
            0 => (grain, u32::MAX),
            wanted => ((self.units / wanted / grain).max(1) * grain, wanted),
        };
        let parts = (1..most).map_while(|n| n.checked_mul(step)).take_while(|units| *units <= self.largest_part);
        let whole = (Some(self.units), Share::Whole);
        parts.map(|units| (Some(units), Share::Units(units))).chain([whole]).collect()
    }
}

/// Measures the shares, writes the text, and returns the report.
///
/// # Errors
/// If the engine has no shares, or cannot run the model.
pub fn measure(
    flags: &ShareFlags,
    profiled: &ProfiledModel,
    batch: Option<&[u32]>,
    length: i64,
    budget: Duration,
    out: &mut (dyn Write + Sync),
) -> anyhow::Result<ShareReport> {
    let sizes = profiled.sizes(batch, few_sizes)?;
    let (device, shares) = match flags.shares {
        Some(wanted) => {
            let device = device_units(&*profiled.engine)?;
            (Some(device), device.shares(wanted))
        }
        None => match device_units(&*profiled.engine) {
            Ok(device) => (Some(device), vec![(Some(device.units), Share::Whole)]),
            Err(_) => (None, vec![(None, Share::Whole)]),
        },
    };
    let mut report = ShareReport {
        model: profiled.name.clone(),
        version: profiled.version,
        on: profiled.on(),
        item_bytes: profiled.item_bytes(length),
        conditions: profiled.conditions(length),
        device,
        segments: profiled.model.segment_info().iter().map(|segment| segment.last.clone()).collect(),
        knees: Vec::new(),
        measurements: Vec::new(),
    };
    write!(out, "{}", report.header())?;
    let subject = profiled.subject(length, Clock::start());
    let row = |measurement: &ShareMeasurement| report.row(measurement);
    let measured = watched(out, row, |watch| subject.measure_shares(&shares, &sizes, budget, watch))?;
    ensure!(!measured.is_empty(), "model '{}': a batch of one is too large to be measured", profiled.name);
    report.complete(measured);
    write!(out, "{}", report.summary())?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_what_the_device_can_be_parted_into_and_the_whole() {
        let units = |device: DeviceUnits, wanted| -> Vec<u32> {
            device.shares(wanted).iter().filter_map(|(units, _)| *units).collect()
        };
        let device = DeviceUnits { units: 132, grain: 8, largest_part: 112 };
        assert_eq!(units(device, 0).len(), 15);
        assert_eq!(units(device, 0).first(), Some(&8));
        assert_eq!(units(device, 4), [32, 64, 96, 132]);
        assert_eq!(units(device, 1), [132]);
        assert_eq!(units(device, 1000), units(device, 0));
        let small = DeviceUnits { units: 12, grain: 8, largest_part: 0 };
        assert_eq!((units(small, 0), units(small, 3)), (vec![12], vec![12]));
        assert_eq!(device.shares(2)[1].1, Share::Whole, "not a partition of all units");
    }
}
