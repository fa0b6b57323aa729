//! A device as it was measured: a file of the emulated device's constants, with the measurements
//! behind them.
//!
//! ```toml
//! [device]
//! name = "NVIDIA H200"
//! units = 132
//! grain = 8
//! sharing = "in-order"      # or "proportional"
//! crowding_permille = 38
//! issue_share = 1.0         # part of the fixed times that issues kernels, one launch at a time
//!
//! [[model]]
//! name = "resnet50"
//! measured_on = "cuda 1.31.1 on NVIDIA H200, 1 thread a run"
//! input_bytes = 602112      # of an item
//! output_bytes = 4000
//! launch_overhead_us = 45.0
//! worst_error = 0.06        # of the constants below against what was measured, as a share of it
//!
//! [[model.segment]]
//! fixed_us = 400.0
//! work_us = 30000.0
//! units_per_item = 20.0
//! most_units = 132.0
//! ```
//!
//! `[[model.measured]]` and `[[pair]]` are the measurements; [`Calibration::fit`] computes the
//! constants from these.

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

use super::failure::DeviceFailure;
use super::fit::{PairSample, SegmentSample, fit_device, fit_segment};
use super::limits::{DeviceLimits, Sharing};
use super::measured::{MeasuredModel, SegmentLaw};
use super::model::EmulatedModel;

/// A measured device with the models that were measured on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The device.
    pub device: CalibratedDevice,
    /// Models, by name.
    #[serde(default, rename = "model", skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<CalibratedModel>,
    /// Pairs of models at the same time.
    #[serde(default, rename = "pair", skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<CalibratedPair>,
}

/// The limits that a device has for all models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibratedDevice {
    /// The device's name.
    pub name: String,
    /// Compute units.
    pub units: u32,
    /// The step in which compute units are given out.
    pub grain: u32,
    /// How launches share units that do not suffice.
    pub sharing: Sharing,
    /// See [`DeviceLimits::crowding_permille`].
    pub crowding_permille: u32,
    /// The share of the fixed times that is issuing, from 0 to 1. Launches issue one at a time.
    pub issue_share: f64,
    /// The error of the predicted slowdowns of the pairs, if pairs were measured: the root of the
    /// mean square of their logarithms.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pair_error: Option<f64>,
}

/// A model on the calibrated device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibratedModel {
    /// The model's name.
    pub name: String,
    /// Engine, device, threads.
    pub measured_on: String,
    /// Bytes of an item's inputs.
    pub input_bytes: u64,
    /// Bytes of an item's outputs.
    pub output_bytes: u64,
    /// The host's cost of a launch beyond the time on the device's clock, in microseconds; 0 where
    /// the host's clock measured.
    pub launch_overhead_us: f64,
    /// The largest error of the segments' laws together ([`SegmentLaw`]), as a share of the
    /// measured time.
    #[serde(default)]
    pub worst_error: f64,
    /// The constants of each segment.
    #[serde(default, rename = "segment")]
    pub segments: Vec<SegmentLaw>,
    /// The measurements behind the constants.
    #[serde(default)]
    pub measured: Vec<MeasuredPoint>,
}

/// The measured times of a batch's segments on a share of the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredPoint {
    /// Items.
    pub batch: u32,
    /// Compute units.
    pub units: u32,
    /// Medians, microseconds.
    pub segments_us: Vec<f64>,
}

/// The times of two models alone and at the same time, both on the whole device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibratedPair {
    /// The models' names.
    pub models: [String; 2],
    /// Items.
    pub batches: [u32; 2],
    /// Medians, microseconds.
    pub alone_us: [f64; 2],
    /// Medians, microseconds.
    pub together_us: [f64; 2],
}

fn wrong_format(what: impl std::fmt::Display) -> DeviceFailure {
    DeviceFailure(format!("not a calibration as `downbeat-lab calibrate` writes it: {what}"))
}

/// Most compute units of a device.
const MOST_UNITS: u32 = 1 << 16;

impl Calibration {
    /// Makes a calibration of a device of which nothing else is known yet.
    pub fn new(name: &str, units: u32, grain: u32) -> Self {
        // Kernels wait until units are idle (E²bird §8.4); no crowding until pairs say otherwise.
        let device = CalibratedDevice {
            name: name.to_owned(),
            units: units.clamp(1, MOST_UNITS),
            grain: grain.max(1),
            sharing: Sharing::InOrder,
            crowding_permille: 0,
            issue_share: 1.0,
            pair_error: None,
        };
        Calibration { device, models: Vec::new(), pairs: Vec::new() }
    }

    /// Reads the file's text.
    ///
    /// # Errors
    /// If the text is no calibration, or a number is out of range.
    pub fn read(text: &str) -> Result<Self, DeviceFailure> {
        let calibration: Calibration = toml::from_str(text).map_err(wrong_format)?;
        let wrong = |what: String| Err(wrong_format(what));
        if !(1..=MOST_UNITS).contains(&calibration.device.units) {
            return wrong(format!("device.units is {}; expected 1 to {MOST_UNITS}", calibration.device.units));
        }
        if !(0.0..=1.0).contains(&calibration.device.issue_share) {
            return wrong(format!("device.issue_share is {}; expected 0 to 1", calibration.device.issue_share));
        }
        for model in &calibration.models {
            if model.segments.is_empty() || !model.segments.iter().all(SegmentLaw::is_sound) {
                return wrong(format!(
                    "model '{}' needs at least one [[model.segment]], of finite numbers, none below 0, units above 0",
                    model.name
                ));
            }
            if !(0.0..=1e9).contains(&model.launch_overhead_us) {
                return wrong(format!("model '{}': launch_overhead_us is {}", model.name, model.launch_overhead_us));
            }
        }
        Ok(calibration)
    }

    /// Returns the file's text.
    ///
    /// # Errors
    /// If the calibration cannot be written as TOML.
    pub fn write(&self) -> Result<String, DeviceFailure> {
        toml::to_string(self).map_err(wrong_format)
    }

    /// Checks that the calibration was made on this device.
    ///
    /// # Errors
    /// If the calibration was made on another device.
    pub fn check_device(&self, name: &str, units: u32) -> Result<(), DeviceFailure> {
        if (self.device.name.as_str(), self.device.units) == (name, units) {
            return Ok(());
        }
        Err(DeviceFailure(format!(
            "it is of {} with {} compute units, not of {name} with {units}. Write another file",
            self.device.name, self.device.units
        )))
    }

    /// Adds a model, and replaces one of the same name.
    pub fn put_model(&mut self, model: CalibratedModel) {
        self.models.retain(|other| other.name != model.name);
        self.models.push(model);
        self.models.sort_by(|a, b| a.name.cmp(&b.name));
    }

    /// Adds a pair, and replaces one of the same models and batches.
    pub fn put_pair(&mut self, pair: CalibratedPair) {
        self.pairs.retain(|other| (&other.models, other.batches) != (&pair.models, pair.batches));
        self.pairs.push(pair);
    }

    /// Computes all constants from the measurements. A pair counts only if both of its models are
    /// in the calibration.
    ///
    /// # Errors
    /// If a segment has no time.
    pub fn fit(&mut self) -> Result<(), DeviceFailure> {
        for model in self.models.iter_mut().filter(|model| !model.measured.is_empty()) {
            let count = model.measured.iter().map(|point| point.segments_us.len()).min().unwrap_or(0);
            let mut laws = Vec::with_capacity(count);
            for segment in 0..count {
                let sample = |point: &MeasuredPoint| SegmentSample {
                    batch: point.batch,
                    units: point.units,
                    time_us: point.segments_us.get(segment).copied().unwrap_or(0.0),
                };
                let samples: Vec<SegmentSample> = model.measured.iter().map(sample).collect();
                let no_time = || format!("'{}': segment {} has no measured time above zero", model.name, segment + 1);
                laws.push(fit_segment(&samples).ok_or_else(|| DeviceFailure(no_time()))?.0);
            }
            // Only the error of the whole counts: one segment's error may make up for another's.
            let off = |point: &MeasuredPoint| {
                let found: f64 = laws.iter().map(|law| law.time_us(point.batch, point.units)).sum();
                (found / point.segments_us.iter().sum::<f64>() - 1.0).abs()
            };
            model.worst_error = model.measured.iter().map(off).filter(|off| off.is_finite()).fold(0.0, f64::max);
            model.segments = laws;
        }
        let samples: Vec<PairSample> = self.pairs.iter().filter_map(|pair| self.pair_sample(pair)).collect();
        if let Some(fit) = fit_device(self.limits(), &samples) {
            let DeviceLimits { sharing, crowding_permille, .. } = fit.limits;
            (self.device.sharing, self.device.crowding_permille) = (sharing, crowding_permille);
            (self.device.issue_share, self.device.pair_error) = (fit.issue_share, Some(fit.error));
        }
        Ok(())
    }

    fn pair_sample(&self, pair: &CalibratedPair) -> Option<PairSample> {
        let segments = |index: usize| Some(self.measured(&pair.models[index]).ok()?.segments);
        let slowdown = |index: usize| pair.together_us[index] / pair.alone_us[index].max(1e-3);
        Some(PairSample {
            segments: [segments(0)?, segments(1)?],
            batches: pair.batches,
            slowdowns: [slowdown(0), slowdown(1)],
        })
    }

    /// Returns the device's limits.
    pub(crate) fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            sharing: self.device.sharing,
            crowding_permille: self.device.crowding_permille,
            own_hosts: false,
            // Copies are in the measured times.
            copy_bytes_per_second: f64::INFINITY,
            ..DeviceLimits::plain(self.device.units)
        }
    }

    fn measured(&self, name: &str) -> Result<MeasuredModel, DeviceFailure> {
        let found = self.models.iter().find(|model| model.name == name && !model.segments.is_empty());
        let model = found.ok_or_else(|| {
            let there: Vec<&str> = self.models.iter().map(|model| model.name.as_str()).collect();
            DeviceFailure(format!("it has no model '{name}'; there is: {}", there.join(", ")))
        })?;
        Ok(MeasuredModel {
            name: model.name.clone(),
            segments: model.segments.clone(),
            item_bytes: (model.input_bytes, model.output_bytes),
            launch_overhead: Duration::from_secs_f64(model.launch_overhead_us * 1e-6),
            limits: self.limits(),
            issue_share: self.device.issue_share,
        })
    }

    /// Returns the model of that name on this device, or on `units` of the device's units.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn model(&self, name: &str, units: Option<u32>) -> Result<EmulatedModel, DeviceFailure> {
        let mut model = self.measured(name)?;
        model.limits.units = units.unwrap_or(self.device.units).clamp(1, self.device.units);
        Ok(EmulatedModel::measured(model))
    }
}
