//! A device with the library that computes on it: the constants that operators become times by.

use std::str::FromStr;

use downbeat_core::Duration;

use super::failure::{DeviceFailure, named};
use super::limits::{DeviceLimits, Sharing};
use super::operator::Operator;
use super::work::{Kernel, WHOLE_BANDWIDTH};

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
    /// The side of the square of outputs that a row of a block has in 3x3 convolutions of stride 1, by Winograd's algorithm.
    pub winograd_side: u64,
    /// As if how many items more these convolutions compute: their rate grows with the batch as `batch / (batch + winograd_items)`.
    pub winograd_items: f64,
    /// Rows of the smallest block: a product of fewer rows computes as many.
    pub least_rows: u64,
    /// How often an element goes through the memory for each time that an operator reads or writes it.
    pub traffic: f64,
    /// What issuing a kernel costs the host.
    pub issue: Duration,
    /// What the device takes from one kernel of a launch to the next.
    pub gap: Duration,
    /// Kernels that the host may have issued before the device is there: the depth of a stream's queue. 0: it waits for each.
    pub ahead: u32,
    /// Whether the last wave of a kernel's blocks takes as long as a full one, as it does; without, in proportion, to see what comes of it.
    pub whole_waves: bool,
    /// Whether normalisations, activations and additions run inside the convolution before them.
    pub fused: bool,
    /// What a launch costs the host before its first kernel, whoever launches.
    pub launch_overhead: Duration,
    /// What the host does after a launch before its lane is free.
    pub after: Duration,
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
    /// See [`DeviceLimits::own_hosts`].
    pub own_hosts: bool,
    /// See [`DeviceLimits::interference_permille`].
    pub interference_permille: u32,
    /// The standard deviation of what a launch takes from run to run, as a share of it.
    pub noise: f64,
}

/// Blocks of a kernel are tiles of so many rows by so many columns, one on a unit at a time; of fewer rows where there are fewer, by powers of two.
pub const TILE: u64 = 64;

/// By how much Winograd's algorithm speeds 3x3 convolutions of stride 1 up: F(2x2, 3x3) has 16 multiplications in place of 36.
const WINOGRAD_GAIN: f64 = 2.25;

/// 0.65 ms at 15.9 ms (Abacus §5.2, figure 7).
const NOISE: f64 = 0.65 / 15.9;

/// How an operator is cut into blocks.
struct Tiles {
    blocks: u64,
    outputs_a_block: u64,
}

impl FromStr for Platform {
    type Err = DeviceFailure;

    fn from_str(text: &str) -> Result<Self, DeviceFailure> {
        let all = [
            ("titan-cudnn", Platform::TITAN_CUDNN),
            ("titan-tensorrt", Platform::TITAN_TENSORRT),
            ("v100-tensorrt", Platform::V100_TENSORRT),
            ("a100-cudnn", Platform::A100_CUDNN),
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
        efficiency: 0.449,
        winograd_side: 1,
        winograd_items: 0.0,
        least_rows: 1,
        traffic: 0.840,
        issue: Duration::from_micros(5),
        gap: Duration::from_micros(2),
        ahead: 1_024,
        whole_waves: true,
        fused: false,
        launch_overhead: Duration::from_micros(20),
        after: Duration::ZERO,
        gather_nanos_per_byte: 0.2,
        batch_overhead: Duration::from_millis(1),
        copy_bandwidth: 3e9,
        copy_fixed: Duration::from_micros(10),
        sharing: Sharing::InOrder,
        crowding_permille: 100,
        own_hosts: false,
        interference_permille: 0,
        noise: NOISE,
    };

    /// DVABatch's: Titan RTX, Triton, TensorRT 8 (§8.1).
    pub const TITAN_TENSORRT: Platform = Platform {
        name: "Titan RTX with TensorRT",
        gather_nanos_per_byte: 0.0,
        batch_overhead: Duration::from_micros(200),
        copy_bandwidth: 11e9,
        ..Platform::TITAN_CUDNN.with_library_of(Platform::V100_TENSORRT)
    };

    /// GSLICE's: V100, TensorRT (§4).
    pub const V100_TENSORRT: Platform = Platform {
        name: "V100 with TensorRT",
        units: 80,
        peak: 7.066e12,
        bandwidth: 900e9,
        efficiency: 0.704,
        winograd_side: 2,
        winograd_items: 5.124,
        traffic: 1.0,
        fused: true,
        after: Duration::from_micros(700),
        gather_nanos_per_byte: 0.0,
        batch_overhead: Duration::from_micros(200),
        copy_bandwidth: 11e9,
        interference_permille: 250,
        ..Platform::TITAN_CUDNN
    };

    /// Abacus': A100, PyTorch, convolutions in TF32 (§7.1): 24 ms for 32 pictures of ResNet152 are beyond its single precision.
    pub const A100_CUDNN: Platform = Platform {
        name: "A100 with cuDNN",
        units: 108,
        peak: 78e12,
        bandwidth: 1_555e9,
        efficiency: 0.266,
        copy_bandwidth: 11e9,
        interference_permille: 250,
        ..Platform::TITAN_CUDNN
    };

    /// An instance of Abacus' A100 with so many of its 7 parts of 14 units and so many of the 8 parts of its memory (MIG; Abacus table 3).
    pub fn a100_instance(units: u32, memory: u32) -> Platform {
        let (whole, units) = (Platform::A100_CUDNN, units.clamp(1, 7) * 14);
        Platform {
            name: "instance of an A100 with cuDNN",
            units,
            peak: whole.peak * f64::from(units) / f64::from(whole.units),
            bandwidth: whole.bandwidth * f64::from(memory.clamp(1, 8)) / 8.0,
            ..whole
        }
    }

    /// This device with the kernels of another's library.
    const fn with_library_of(self, other: Platform) -> Platform {
        let Platform { efficiency, winograd_side, winograd_items, traffic, fused, .. } = other;
        Platform { efficiency, winograd_side, winograd_items, traffic, fused, ..self }
    }

    /// An operator for `items` items on a partition of `units`: as many waves of its blocks as it takes, or as long as what it moves, whichever is longer.
    pub fn kernel(&self, operator: &Operator, items: u32, units: u32) -> Kernel {
        let (units, all) = (u64::from(units.max(1)), f64::from(self.units));
        let Tiles { blocks, outputs_a_block } = self.tiles(operator, items.max(1));
        let items = f64::from(items.max(1));
        let waves = blocks.div_ceil(units);
        // No more than what the waves need: the last is no fuller than the others.
        let used = blocks.div_ceil(waves);
        let rounds = if self.whole_waves { waves as f64 } else { blocks as f64 / used as f64 };
        let inner = operator.multiplications as f64 / operator.outputs.max(1) as f64;
        let gain = if operator.winograd { WINOGRAD_GAIN } else { 1.0 };
        let block = outputs_a_block as f64 * inner / gain / (self.peak * self.efficiency / all);
        let moved = (operator.inputs + operator.outputs) as f64 * items * self.traffic + operator.weights as f64;
        // Half of the units saturate the memory.
        let moving = moved * 4.0 / (self.bandwidth * (2.0 * used as f64 / all).min(1.0));
        let run = (rounds * block).max(moving);
        let draw = (moved * 4.0 / (run * self.bandwidth) * f64::from(WHOLE_BANDWIDTH)) as u32;
        Kernel {
            issue: self.issue,
            run: Duration::from_secs_f64(run),
            units: used as u32,
            draw: draw.min(WHOLE_BANDWIDTH),
        }
    }

    /// The blocks that an operator is for `items` items.
    fn tiles(&self, operator: &Operator, items: u32) -> Tiles {
        let Operator { outputs, columns, .. } = *operator;
        if operator.multiplications == 0 {
            let blocks = (outputs * u64::from(items)).div_ceil(TILE * TILE).max(1);
            return Tiles { blocks, outputs_a_block: TILE * TILE };
        }
        let rows_an_item = outputs / columns.max(1);
        let (side, rows) = if operator.winograd {
            let rows_an_item = rows_an_item.isqrt().div_ceil(self.winograd_side).pow(2);
            let rows = rows_an_item as f64 * (f64::from(items) + self.winograd_items);
            (self.winograd_side, rows.ceil() as u64)
        } else {
            (1, rows_an_item * u64::from(items))
        };
        let rows_a_block = rows.next_power_of_two().clamp(self.least_rows, TILE);
        let blocks = (rows.div_ceil(rows_a_block) * columns.div_ceil(TILE)).max(1);
        Tiles { blocks, outputs_a_block: rows_a_block * side * side * TILE }
    }

    /// What the device offers to launches together.
    pub fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            units: self.units,
            sharing: self.sharing,
            ahead: self.ahead,
            gap: self.gap,
            crowding_permille: self.crowding_permille,
            own_hosts: self.own_hosts,
            interference_permille: self.interference_permille,
            copy_bytes_per_second: self.copy_bandwidth,
            copy_fixed: self.copy_fixed,
        }
    }
}
