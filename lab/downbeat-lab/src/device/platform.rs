//! A device with its computing library: the constants that turn operators into times.

use std::str::FromStr;

use downbeat_core::Duration;

use super::failure::{DeviceFailure, named};
use super::limits::{DeviceLimits, Sharing};
use super::operator::Operator;
use super::work::{Kernel, WHOLE_BANDWIDTH};

/// A device with its computing library. The table in [`super`] gives the sources of the numbers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Platform {
    /// The platform's name in messages.
    pub name: &'static str,
    /// Compute units (SMs).
    pub units: u32,
    /// Peak rate of all units together: single-precision multiplications with additions, per
    /// second.
    pub peak: f64,
    /// Bytes a second between the units and the memory.
    pub bandwidth: f64,
    /// The share of the peak that convolutions reach.
    pub efficiency: f64,
    /// The share of the peak that other products of matrices reach: fully connected layers and
    /// attention.
    pub product_efficiency: f64,
    /// The speedup of 3x3 convolutions of stride 1 by Winograd's algorithm; 1 where no such kernel
    /// exists.
    pub winograd_gain: f64,
    /// The side of the square of outputs in a row of a block, for 3x3 convolutions of stride 1 by
    /// Winograd's algorithm.
    pub winograd_side: u64,
    /// The extra items that these convolutions compute. Their rate grows with the batch:
    /// `batch / (batch + winograd_items)`.
    pub winograd_items: f64,
    /// Rows of the smallest block: a product of fewer rows computes this many.
    pub least_rows: u64,
    /// How many times an element goes through the memory for each read or write of an operator.
    pub traffic: f64,
    /// The host's cost to issue a kernel.
    pub issue: Duration,
    /// The device's time from one kernel of a launch to the next.
    pub gap: Duration,
    /// Kernels that the host may issue before the device reaches them: the depth of a stream's
    /// queue. With 0 the host waits for each kernel.
    pub ahead: u32,
    /// Whether the last wave of a kernel's blocks takes as long as a full one, as on real devices.
    /// Otherwise it takes time in proportion, to show the effect.
    pub whole_waves: bool,
    /// Whether normalisations, activations and additions run inside the convolution before them.
    pub fused: bool,
    /// The host's cost of a launch before its first kernel.
    pub launch_overhead: Duration,
    /// The host's time after a launch until its lane is free.
    pub after: Duration,
    /// Nanoseconds per byte to join inputs of the host into a batch, before the copy of
    /// [`InputSource::Host`](downbeat_core::device::InputSource).
    pub gather_nanos_per_byte: f64,
    /// The serving system's time for a batch that it brings from the host.
    pub batch_overhead: Duration,
    /// Bytes a second of a copy between host and device.
    pub copy_bandwidth: f64,
    /// The cost of a copy apart from its bytes.
    pub copy_fixed: Duration,
    /// How kernels share units that do not suffice.
    pub sharing: Sharing,
    /// See [`DeviceLimits::crowding_permille`].
    pub crowding_permille: u32,
    /// See [`DeviceLimits::own_hosts`].
    pub own_hosts: bool,
    /// See [`DeviceLimits::interference_permille`].
    pub interference_permille: u32,
    /// The standard deviation of a launch's time from run to run, as a share of the time.
    pub noise: f64,
}

/// The rows and columns of a tile, which is a block of a kernel. A unit runs one block at a time.
/// Products of fewer rows have tiles of fewer rows, a power of two.
pub const TILE: u64 = 64;

/// The speedup of 3x3 convolutions of stride 1 by Winograd's algorithm: F(2x2, 3x3) has 16
/// multiplications in place of 36.
const WINOGRAD_GAIN: f64 = 2.25;

/// The deviation from run to run: 0.65 ms at 15.9 ms (Abacus §5.2, figure 7).
const NOISE: f64 = 0.65 / 15.9;

/// The blocks of an operator.
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
    /// E²bird's platform: Titan RTX, TF-Serving, cuDNN 7.5 (§8.1).
    pub const TITAN_CUDNN: Platform = Platform {
        name: "Titan RTX with cuDNN",
        units: 72,
        peak: 8.15e12,
        bandwidth: 672e9,
        efficiency: 0.449,
        product_efficiency: 0.449,
        winograd_gain: WINOGRAD_GAIN,
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

    /// DVABatch's platform: Titan RTX, Triton, TensorRT 8 (§8.1).
    pub const TITAN_TENSORRT: Platform = Platform {
        name: "Titan RTX with TensorRT",
        gather_nanos_per_byte: 0.0,
        batch_overhead: Duration::from_micros(200),
        copy_bandwidth: 11e9,
        ..Platform::TITAN_CUDNN.with_library_of(Platform::V100_TENSORRT)
    };

    /// GSLICE's platform: V100, TensorRT (§4).
    pub const V100_TENSORRT: Platform = Platform {
        name: "V100 with TensorRT",
        units: 80,
        peak: 7.066e12,
        bandwidth: 900e9,
        efficiency: 0.704,
        product_efficiency: 0.704,
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

    /// Abacus' platform: A100, PyTorch, products in TF32 (§7.1). Both efficiencies and the cost of
    /// issuing a kernel are fitted to published latencies of TensorFlow on this GPU, none of them
    /// from Abacus' paper. Tensor cores have no kernels by Winograd's algorithm for TF32. Each
    /// service is a process (§6.1), which issues its own kernels.
    pub const A100_CUDNN: Platform = Platform {
        name: "A100 with cuDNN",
        units: 108,
        peak: 78e12,
        bandwidth: 1_555e9,
        efficiency: 0.1453,
        product_efficiency: 0.4018,
        winograd_gain: 1.0,
        issue: Duration::from_nanos(18_650),
        ahead: 0,
        own_hosts: true,
        copy_bandwidth: 11e9,
        interference_permille: 250,
        ..Platform::TITAN_CUDNN
    };

    /// Makes an instance of Abacus' A100 (MIG; Abacus table 3): `units` of its 7 parts of 14 units
    /// and `memory` of the 8 parts of its memory.
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

    /// Returns this device with the kernels of another platform's library.
    const fn with_library_of(self, other: Platform) -> Platform {
        let Platform { efficiency, product_efficiency, winograd_gain, winograd_side, winograd_items, .. } = other;
        let Platform { traffic, fused, .. } = other;
        let library = Platform { efficiency, product_efficiency, winograd_gain, winograd_side, ..self };
        Platform { winograd_items, traffic, fused, ..library }
    }

    /// Returns an operator's kernel for `items` items on a partition of `units`. The kernel takes
    /// the longer of two times: the waves of its blocks, and its memory traffic.
    pub fn kernel(&self, operator: &Operator, items: u32, units: u32) -> Kernel {
        let (units, all) = (u64::from(units.max(1)), f64::from(self.units));
        let Tiles { blocks, outputs_a_block } = self.tiles(operator, items.max(1));
        let items = f64::from(items.max(1));
        let waves = blocks.div_ceil(units);
        // The kernel uses only as many units as its waves need.
        let used = blocks.div_ceil(waves);
        let rounds = if self.whole_waves { waves as f64 } else { blocks as f64 / used as f64 };
        let inner = operator.multiplications as f64 / operator.outputs.max(1) as f64;
        let gain = if operator.winograd { self.winograd_gain } else { 1.0 };
        let efficiency = if operator.convolution { self.efficiency } else { self.product_efficiency };
        let block = outputs_a_block as f64 * inner / gain / (self.peak * efficiency / all);
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

    /// Cuts an operator for `items` items into blocks.
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

    /// Returns the device's limits for launches together.
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
