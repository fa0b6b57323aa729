//! A device with the library that computes on it: the constants that operators become times by.

use std::str::FromStr;

use downbeat_core::Duration;

use super::contended::{DeviceLimits, Kernel, Sharing};
use super::failure::{DeviceFailure, named};
use super::operator::Operator;

/// A device with the library that computes on it. The table in [`super`] says where the numbers come from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Platform {
    /// What messages call it.
    pub name: &'static str,
    /// Compute units (SMs).
    pub units: u32,
    /// Peak of all units together, multiplications with additions a second, single precision.
    pub peak: f64,
    /// Bytes a second between the units and the memory.
    pub bandwidth: f64,
    /// The share of the peak that matrix operators reach.
    pub efficiency: f64,
    /// By how much Winograd's algorithm speeds 3x3 convolutions of stride 1 up.
    pub winograd_gain: f64,
    /// How often an element goes through the memory for each time that an operator reads or writes it.
    pub traffic: f64,
    /// Bytes of weights that are read in a second; they are read once a launch.
    pub weight_bandwidth: f64,
    /// Outputs of an operator that keep one unit busy: with fewer items, some units idle.
    pub outputs_per_unit: f64,
    /// What issuing a kernel adds to the launch.
    pub issue: Duration,
    /// Whether normalisations, activations and additions run inside the convolution before them.
    pub fused: bool,
    /// What a launch costs the host before its first kernel, whoever launches.
    pub launch_overhead: Duration,
    /// What joining inputs of the host into a batch costs a byte, in nanoseconds; before the copy of [`InputSource::Host`](downbeat_core::device::InputSource).
    pub gather_nanos_per_byte: f64,
    /// What the serving system spends on a batch that it brings from the host.
    pub batch_overhead: Duration,
    /// Bytes a second of a copy between host and device.
    pub copy_bandwidth: f64,
    /// What a copy costs beside its bytes.
    pub copy_fixed: Duration,
    /// Who gets units when they do not suffice.
    pub sharing: Sharing,
    /// See [`DeviceLimits::crowding_permille`].
    pub crowding_permille: u32,
}

impl FromStr for Platform {
    type Err = DeviceFailure;

    fn from_str(text: &str) -> Result<Self, DeviceFailure> {
        let all = [
            ("titan-cudnn", Platform::TITAN_CUDNN),
            ("titan-tensorrt", Platform::TITAN_TENSORRT),
            ("v100-tensorrt", Platform::V100_TENSORRT),
        ];
        named("emulated platform", all, |(name, _)| name, text).map(|(_, platform)| platform)
    }
}

impl Platform {
    /// E²bird's: Titan RTX, TF-Serving, cuDNN 7.5 (§8.1).
    pub const TITAN_CUDNN: Platform = Platform {
        name: "Titan RTX with cuDNN",
        units: 72,
        peak: 8.15e12,
        bandwidth: 672e9,
        efficiency: 0.752,
        winograd_gain: 2.25,
        traffic: 1.87,
        weight_bandwidth: 672e9,
        outputs_per_unit: 2_787.0,
        issue: Duration::from_nanos(10_150),
        fused: false,
        launch_overhead: Duration::from_micros(20),
        gather_nanos_per_byte: 0.2,
        batch_overhead: Duration::from_millis(1),
        copy_bandwidth: 3e9,
        copy_fixed: Duration::from_micros(10),
        sharing: Sharing::InOrder,
        crowding_permille: 38,
    };

    /// DVABatch's: Titan RTX, Triton, TensorRT 8 (§8.1).
    pub const TITAN_TENSORRT: Platform = Platform {
        name: "Titan RTX with TensorRT",
        traffic: 1.0,
        issue: Duration::from_micros(5),
        fused: true,
        gather_nanos_per_byte: 0.0,
        batch_overhead: Duration::from_micros(200),
        copy_bandwidth: 11e9,
        ..Platform::TITAN_CUDNN
    };

    /// GSLICE's: V100, TensorRT (§4).
    pub const V100_TENSORRT: Platform = Platform {
        name: "V100 with TensorRT",
        units: 80,
        peak: 7.066e12,
        bandwidth: 900e9,
        efficiency: 0.664,
        winograd_gain: 3.0,
        traffic: 0.5,
        weight_bandwidth: 34.1e9,
        issue: Duration::from_nanos(20_700),
        ..Platform::TITAN_TENSORRT
    };

    /// What an operator takes for `rows` items, and the units that it can use.
    pub fn kernel(&self, operator: &Operator, rows: u32) -> Kernel {
        let (rows, all) = (f64::from(rows.max(1)), f64::from(self.units));
        let units = (rows * operator.outputs as f64 / self.outputs_per_unit).clamp(1.0, all);
        let gain = if operator.winograd { self.winograd_gain } else { 1.0 };
        let speed = self.peak * self.efficiency * units / all;
        let compute = operator.multiplications as f64 * rows / gain / speed;
        // Half of the units saturate the memory.
        let bandwidth = self.bandwidth * (2.0 * units / all).min(1.0);
        let moving = (operator.inputs + operator.outputs) as f64 * rows * 4.0 * self.traffic / bandwidth;
        let weights = operator.weights as f64 * 4.0 / self.weight_bandwidth;
        let run = Duration::from_secs_f64(compute.max(moving) + weights);
        Kernel { issue: self.issue, run, units: units.ceil() as u32 }
    }

    /// What the device offers to launches together.
    pub fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            units: self.units,
            sharing: self.sharing,
            crowding_permille: self.crowding_permille,
            copy_bytes_per_second: self.copy_bandwidth,
            copy_fixed: self.copy_fixed,
        }
    }
}
