//! The emulated device, and policies of one device under virtual time.
//!
//! [`ContendedDevice`] is a device that launches share; [`EmulatedModel`] says what a launch of a network has to do on a [`Platform`].
//! Neither knows a measured latency of a whole model: a network is the list of its operators, and an operator takes
//!
//! ```text
//! issue + max(multiplications / (peak * efficiency * units used / units), bytes / bandwidth) + weights / weight bandwidth
//! units used = outputs of the batch / outputs a unit needs, at least 1, at most all
//! ```
//!
//! The constants are fitted to the published latencies, a few for each device with its library and none for a single model:
//!
//! | | Titan RTX, cuDNN | Titan RTX, TensorRT | V100, TensorRT | from |
//! |---|---|---|---|---|
//! | units | 72 | 72 | 80 | data sheet |
//! | peak, 10^12 multiplications with additions a second | 8.15 | 8.15 | 7.066 | data sheet |
//! | memory, GB/s | 672 | 672 | 900 | data sheet |
//! | outputs a unit needs | 2,787 | 2,787 | 2,787 | DVABatch figure 5: both products fill the device at 200,704 outputs |
//! | efficiency | 0.752 | 0.752 | 0.664 | E²bird table 1; GSLICE table 5 |
//! | Winograd's gain | 2.25 | 2.25 | 3 | F(2x2, 3x3); between F(2x2) and F(4x4) |
//! | traffic | 1.87 | 1 | 0.5 | E²bird table 1; assumed (all fused); GSLICE table 5 |
//! | issue, us a kernel | 10.15 | 5 | 20.7 | E²bird table 1; assumed; GSLICE table 5 |
//! | weights, GB/s | 672 | 672 | **34.1** | as the memory; GSLICE table 5 |
//! | crowding, each launch more | 3.8% | 3.8% | 3.8% | E²bird figure 12: 32 batches of one take about four times the best |
//! | units when they do not suffice | in order | in order | in order | E²bird §8.4; shared in proportion, small batches would be the best mixes, against table 4 |
//! | copies, GB/s | 3 | 11 | 11 | assumed: pageable and pinned memory on PCIe 3 |
//! | joining inputs, ns a byte | 0.2 | 0 | 0 | assumed: 5 GB/s; Triton joins the next batch while one runs |
//! | a batch of the serving system | 1 ms | 0.2 ms | 0.2 ms | assumed |
//!
//! GSLICE's latencies are not explained by compute and memory: VGG-19 takes 20 ms and ResNet-50 4 ms more than a line through zero. That is in
//! proportion to their weights, so it stands in the table as a slow reading of weights; what it really is the paper does not say.
//!
//! A device at hand is described by a [`Calibration`], which `downbeat profile --save` writes: a few constants for each segment of each model that was measured
//! there ([`SegmentLaw`]), found by least squares, and three for the device, found from pairs of models.
//!
//! The column of DVABatch has no published latency of a model to be fitted to; only figure 5's shape.

mod architecture;
mod auto_measured;
mod auto_run;
mod bert;
mod calibration;
mod contended;
mod convolutional;
mod failure;
mod figures;
mod fit;
mod launch_checker;
mod measured;
mod model;
mod operator;
mod platform;
mod policy;
mod random;
mod report;
mod search;
mod simulation;
mod workload;

pub use architecture::Architecture;
pub use auto_measured::MeasuredForAuto;
pub use auto_run::{AutoOutcome, AutoRun, Played};
pub use calibration::{CalibratedDevice, CalibratedModel, CalibratedPair, Calibration, MeasuredPoint};
pub use contended::{Completed, ContendedDevice, DeviceLimits, Direction, Kernel, Sharing, Work};
pub use failure::DeviceFailure;
pub use figures::{Figure, FigureOptions};
pub use fit::{DeviceFit, PairSample, SegmentSample, fit_device, fit_segment, slowdowns};
pub use launch_checker::LaunchChecker;
pub use measured::{MeasuredModel, SegmentLaw};
pub use model::EmulatedModel;
pub use operator::Operator;
pub use platform::Platform;
pub use policy::{DevicePolicyName, Diversity, Tuning};
pub use random::{RandomDeviceWorkload, RandomModel};
pub use report::{DeviceReport, Span};
pub use search::{
    MeasuredMix, Peak, TOLERATED_LATE, TRIED_STAGES, Tried, best_mixes, measure_mix, measure_mixes, peak, tune_stages,
    tune_window,
};
pub use simulation::DeviceSimulation;
pub use workload::{DeviceLoad, Glue};
