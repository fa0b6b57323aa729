//! The emulated device, and policies of one device under virtual time.
//!
//! [`ContendedDevice`] is a device that launches share. [`EmulatedModel`] computes the work of a
//! launch of a network on a [`Platform`]. No measured latency of a whole model enters the
//! emulation. A network is the list of its operators, and an operator on a partition takes
//!
//! ```text
//! max(waves * rows * 64 * inner / gain / (peak * efficiency / units of the device), bytes / bandwidth)
//! waves = blocks / units of the partition, rounded up;   blocks = tiles of 64 rows by 64 columns of its output
//! ```
//!
//! A product of fewer rows has smaller tiles, with a power of two of rows. So a fully connected
//! layer for few items takes the time of reading its weights. A row is one output. TensorRT
//! computes some convolutions by Winograd's algorithm F(2x2, 3x3): there a row is a square of 2x2
//! outputs. Such a convolution takes time as if the batch of `b` items had `h` items more. So its
//! rate grows with the batch as `b / (b + h)`.
//!
//! A few constants for each device with its library are fitted to published latencies; none is
//! fitted to a single model:
//!
//! | | Titan RTX, cuDNN | Titan RTX, TensorRT | V100, TensorRT | A100, cuDNN | from |
//! |---|---|---|---|---|---|
//! | units | 72 | 72 | 80 | 108 | data sheet |
//! | peak, 10^12 multiplications with additions a second | 8.15 | 8.15 | 7.066 | 78 (TF32) | data sheet |
//! | memory, GB/s | 672 | 672 | 900 | 1,555 | data sheet; half of the units saturate it (assumed) |
//! | efficiency of convolutions | **0.449** | as V100 | **0.704** | **0.1453** | fitted: E²bird table 1; GSLICE table 5 and §4.5; NVIDIA's latencies |
//! | efficiency of other products | the same | the same | the same | **0.4018** | fitted: NVIDIA's latencies |
//! | traffic | **0.840** | 1 | 1 | as Titan | fitted: E²bird table 1; assumed where all is fused |
//! | Winograd's gain | 2.25 | 2.25 | 2.25 | 1 | F(2x2, 3x3); tensor cores have no such kernels for TF32 |
//! | outputs of a row of Winograd's tiles | 1 | as V100 | 2x2 | 1 | fused as in TensorRT; of the two the one that meets GSLICE table 5 better (4.5%, 7.7%), and without an efficiency above 1 E²bird table 1 |
//! | Winograd's items more, h | 0 | as V100 | **5.124** | 0 | fitted: GSLICE table 5 and §4.5 |
//! | crowding, each launch more | **10%** | 10% | 10% | 10% | fitted: E²bird figure 12, 32 batches of one take about four times the best |
//! | interference in a partition | 0 | 0 | **25%** | 25% | fitted: GSLICE figure 1; lanes of one model share its weights: none (E²bird figure 7) |
//! | tiles | 64x64 | 64x64 | 64x64 | 64x64 | of 32 to 128 the one that meets E²bird table 1 best |
//! | issue on the host / gap on the device, us a kernel | 5 / 2 | 5 / 2 | 5 / 2 | **18.65** / - | assumed; fitted: NVIDIA's latencies |
//! | kernels issued ahead | 1,024 | 1,024 | 1,024 | 0 | assumed; of the two the one that meets NVIDIA's latencies better (4.9%, 13.8%) |
//! | a host for each process | no | no | no | yes | Abacus §6.1 |
//! | host after a launch, ms | 0 | 0 | 0.7 | 0 | GSLICE figure 5b |
//! | run to run | 4.1% | 4.1% | 4.1% | 4.1% | Abacus §5.2: 0.65 ms at 15.9 ms |
//! | units when they do not suffice | in order | in order | in order | in order | E²bird §8.4 |
//! | copies, GB/s | 3 | 11 | 11 | 11 | assumed: pageable and pinned memory on PCIe 3 |
//! | joining inputs, ns a byte | 0.2 | 0 | 0 | 0.2 | assumed: 5 GB/s; Triton joins the next batch while one runs |
//! | a batch of the serving system | 1 ms | 0.2 ms | 0.2 ms | 1 ms | assumed |
//!
//! `downbeat-lab figure device-model` prints the fitted numbers beside the held-out ones.
//! `lab/docs/device_model.md` lists the measurements that the model cannot meet. DVABatch gives no
//! latency of a model, so its column has the device of E²bird and the library of GSLICE.
//!
//! A [`Calibration`] describes a device at hand. `downbeat-lab calibrate` makes it from reports of
//! `downbeat profile`. Each segment of a measured model has a few constants ([`SegmentLaw`]), found
//! by least squares. The device has three, found from pairs of models.

mod abacus_cuts;
mod architecture;
mod auto_measured;
mod auto_run;
mod bert;
mod calibration;
mod closed_loop;
mod contended;
mod convolutional;
mod failure;
mod figures;
mod fit;
mod launch_checker;
mod limits;
mod measured;
mod model;
mod operator;
mod oracle;
mod overlap_cluster;
mod overlap_compared;
mod overlap_devices;
mod overlap_linear;
mod overlap_play;
mod overlap_predictor;
mod overlap_report;
mod overlap_run;
mod overlap_samples;
mod overlap_svm;
mod platform;
mod policy;
mod random;
mod report;
mod search;
mod sharing;
mod simulation;
mod spatial_play;
mod spatial_report;
mod spatial_run;
mod work;
mod workload;

pub use abacus_cuts::ABACUS_MODELS;
pub use architecture::Architecture;
pub use auto_measured::MeasuredForAuto;
pub use auto_run::{AutoOutcome, AutoRun, Played};
pub use calibration::{CalibratedDevice, CalibratedModel, CalibratedPair, Calibration, MeasuredPoint};
pub use closed_loop::{Client, Served, closed_loop};
pub use contended::{Completed, ContendedDevice, Direction};
pub use failure::DeviceFailure;
pub use figures::{Figure, FigureOptions};
pub use fit::{DeviceFit, PairSample, SegmentSample, fit_device, fit_segment, slowdowns};
pub use launch_checker::LaunchChecker;
pub use limits::{DeviceLimits, SLICE, Sharing};
pub use measured::{MeasuredModel, SegmentLaw};
pub use model::EmulatedModel;
pub use operator::Operator;
pub use oracle::Oracle;
pub use overlap_cluster::OverlapCluster;
pub use overlap_compared::ComparedPredictors;
pub use overlap_devices::SpreadBy;
pub use overlap_linear::{predict_linear, train_linear};
pub use overlap_predictor::{PredictedBy, TrainedPredictor};
pub use overlap_report::OverlapReport;
pub use overlap_run::{OverlapInputs, OverlapRun, OverlapServing};
pub use overlap_samples::{abacus_layout, draw_samples};
pub use overlap_svm::SupportVectors;
pub use platform::{Platform, TILE};
pub use policy::{DevicePolicyName, Diversity, Tuning};
pub use random::{RandomDeviceWorkload, RandomModel};
pub use report::{DeviceReport, Span};
pub use search::{
    MeasuredMix, Peak, TOLERATED_LATE, best_mixes, measure_mix, measure_mixes, peak, tune_staging, tune_window,
    with_staging,
};
pub use simulation::DeviceSimulation;
pub use spatial_report::{Ran, SharingReport};
pub use spatial_run::{BatchedBy, SharedBy, SharingLoad, SharingModel, SpatialRun};
pub use work::{Kernel, WHOLE_BANDWIDTH, Work};
pub use workload::{DeviceLoad, Glue};
