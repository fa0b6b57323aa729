//! A network on a platform: the times of its launches alone, and their work for a contended device.

use downbeat_core::device::{SegmentProfile, SegmentRange};
use downbeat_core::{Duration, LatencyProfile};

use super::abacus_cuts::abacus_cuts;
use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::limits::DeviceLimits;
use super::measured::MeasuredModel;
use super::platform::Platform;
use super::work::{Kernel, Work};

/// A network on a platform, or a measured model on its device, cut into stages of equal time.
#[derive(Clone, Debug)]
pub struct EmulatedModel {
    source: Source,
    /// The first operator of each segment, and one past the last.
    boundaries: Vec<usize>,
}

/// The source of a launch's kernels.
#[derive(Clone, Debug)]
enum Source {
    /// The operators of a network of the papers.
    Network(Architecture, Platform),
    /// The laws of a measured model.
    Measured(MeasuredModel),
    /// Segments of given times, on a number of units.
    Plain(SegmentProfile, u32),
}

/// The items and tokens with which stages of equal time are measured by default.
const REFERENCE: (u32, u32) = (32, 64);

impl EmulatedModel {
    /// Makes the model in one piece.
    pub fn new(architecture: Architecture, platform: Platform) -> Self {
        let operators = architecture.operators(platform.fused, 1).len();
        EmulatedModel { source: Source::Network(architecture, platform), boundaries: vec![0, operators] }
    }

    /// Makes a measured model in one piece, on its device.
    pub fn measured(model: MeasuredModel) -> Self {
        let kernels = model.kernels(1, model.limits.units).len();
        EmulatedModel { source: Source::Measured(model), boundaries: vec![0, kernels] }
    }

    /// Makes a model whose segments take exactly these times alone and keep `units` units busy. On
    /// a device with twice as many, two run side by side and a third slows both down. The model's
    /// inputs need no copy.
    pub fn plain(profile: SegmentProfile, units: u32) -> Self {
        EmulatedModel {
            boundaries: (0..=usize::from(profile.segments())).collect(),
            source: Source::Plain(profile, units),
        }
    }

    /// Makes the model cut into `stages` stages of times as equal as its operators allow, for a
    /// batch of 32.
    ///
    /// # Errors
    /// If there are fewer operators than stages, or no stage.
    pub fn staged(architecture: Architecture, platform: Platform, stages: usize) -> Result<Self, DeviceFailure> {
        EmulatedModel::new(architecture, platform).cut(stages)
    }

    /// Returns the same model cut into `stages` stages.
    ///
    /// # Errors
    /// As [`Self::staged`].
    pub fn cut(&self, stages: usize) -> Result<Self, DeviceFailure> {
        Ok(EmulatedModel { source: self.source.clone(), boundaries: self.segments(stages)? })
    }

    /// Makes the model cut into Abacus' operators, from 12 for BERT to 52 for ResNet152.
    ///
    /// # Errors
    /// If the model is none of Abacus', or the platform fuses operators.
    pub fn abacus(architecture: Architecture, platform: Platform) -> Result<Self, DeviceFailure> {
        if platform.fused {
            return Err(DeviceFailure(format!("{} fuses operators: Abacus' are between them", platform.name)));
        }
        let boundaries = abacus_cuts(architecture)?;
        Ok(EmulatedModel { source: Source::Network(architecture, platform), boundaries })
    }

    /// Returns the model's network of the papers, if it has one.
    pub fn architecture(&self) -> Option<Architecture> {
        match &self.source {
            Source::Network(architecture, _) => Some(*architecture),
            Source::Measured(_) | Source::Plain(..) => None,
        }
    }

    /// Returns the model's name in messages.
    pub fn name(&self) -> &str {
        match &self.source {
            Source::Network(architecture, _) => architecture.name(),
            Source::Measured(model) => &model.name,
            Source::Plain(..) => "plain",
        }
    }

    /// Returns whether the model's requests have a length.
    pub fn has_length(&self) -> bool {
        self.architecture().is_some_and(Architecture::has_length)
    }

    /// Returns the bytes of an item's input and output.
    pub fn item_bytes(&self, length: u32) -> (u64, u64) {
        match &self.source {
            Source::Network(architecture, _) => architecture.item_bytes(length),
            Source::Measured(model) => model.item_bytes,
            Source::Plain(..) => (0, 0),
        }
    }

    /// Returns the limits of the model's device.
    pub fn limits(&self) -> DeviceLimits {
        match &self.source {
            Source::Network(_, platform) => platform.limits(),
            Source::Measured(model) => model.limits,
            Source::Plain(_, units) => DeviceLimits::plain(*units),
        }
    }

    /// Returns the time to join a batch's inputs of `bytes` bytes and the serving system's time for
    /// the batch. The times of a measured model include both.
    pub fn gather(&self, bytes: u64) -> Duration {
        match &self.source {
            Source::Network(_, platform) => {
                platform.batch_overhead + Duration::from_secs_f64(bytes as f64 * platform.gather_nanos_per_byte * 1e-9)
            }
            Source::Measured(_) | Source::Plain(..) => Duration::ZERO,
        }
    }

    /// Returns the host's cost of a launch before its first kernel.
    pub(super) fn launch_overhead(&self) -> Duration {
        match &self.source {
            Source::Network(_, platform) => platform.launch_overhead,
            Source::Measured(model) => model.launch_overhead,
            Source::Plain(..) => Duration::ZERO,
        }
    }

    /// Returns the host's time after a launch until its lane is free.
    fn after(&self) -> Duration {
        match &self.source {
            Source::Network(_, platform) => platform.after,
            Source::Measured(_) | Source::Plain(..) => Duration::ZERO,
        }
    }

    /// Returns the standard deviation of launch times from run to run, as a share of the time; 0
    /// where nothing is known.
    pub fn noise(&self) -> f64 {
        match &self.source {
            Source::Network(_, platform) => platform.noise,
            Source::Measured(_) | Source::Plain(..) => 0.0,
        }
    }

    /// Returns the number of segments.
    pub fn segment_count(&self) -> u16 {
        (self.boundaries.len() - 1) as u16
    }

    /// Finds the cuts into `stages` stages of equal time (DVABatch §7.1): the first operator of
    /// each, and one past the last.
    ///
    /// # Errors
    /// If there are fewer operators than stages, or no stage.
    pub fn segments(&self, stages: usize) -> Result<Vec<usize>, DeviceFailure> {
        let ((rows, length), units) = (REFERENCE, self.limits().units);
        let times: Vec<u64> =
            self.all_kernels(rows, length, units).iter().map(|kernel| (kernel.issue + kernel.run).as_nanos()).collect();
        let operators = times.len();
        if stages == 0 || stages > operators {
            return Err(DeviceFailure(format!(
                "{} has {operators} operators: it can be cut into 1 to {operators} stages, not {stages}",
                self.name()
            )));
        }
        let total: u64 = times.iter().sum();
        let (mut boundaries, mut passed) = (vec![0], 0);
        for (index, time) in times.iter().enumerate() {
            let cut = boundaries.len();
            // The cut closest to its due time, with operators left for every stage.
            let due = total * cut as u64 / stages as u64;
            let near = passed + time / 2 >= due;
            let must = operators - index <= stages - cut;
            if cut < stages && index > boundaries[cut - 1] && (near || must) {
                boundaries.push(index);
            }
            passed += time;
        }
        boundaries.push(operators);
        Ok(boundaries)
    }

    /// Returns the time of `rows` items padded to `length` in all segments, alone on the whole
    /// device, once launched.
    pub fn time(&self, rows: u32, length: u32) -> Duration {
        self.time_on(rows, length, self.limits().units)
    }

    /// Like [`Self::time`], on a partition of `units` units.
    pub fn time_on(&self, rows: u32, length: u32, units: u32) -> Duration {
        self.work(SegmentRange::new(0, self.segment_count()), rows, length, units).alone(&self.limits())
    }

    /// Returns the work of a launch of `segments` on a partition of `units` units.
    pub fn work(&self, segments: SegmentRange, rows: u32, length: u32, units: u32) -> Work {
        let range = self.boundaries[usize::from(segments.first)]..self.boundaries[usize::from(segments.end)];
        let kernels = self.all_kernels(rows, length, units)[range].to_vec();
        Work { overhead: self.launch_overhead(), kernels, after: self.after() }
    }

    /// Returns the time of each segment alone, for up to `max_batch` items padded to each of
    /// `lengths`: the result of an offline measurement.
    ///
    /// # Errors
    /// If there is no batch size or no length, or lengths do not ascend.
    pub fn profile(&self, lengths: &[u32], max_batch: u32) -> Result<SegmentProfile, DeviceFailure> {
        let limits = self.limits();
        let mut points = vec![vec![Vec::new(); lengths.len()]; usize::from(self.segment_count())];
        for (index, length) in lengths.iter().enumerate() {
            for rows in 1..=max_batch {
                let kernels = self.all_kernels(rows, *length, limits.units);
                for (segment, range) in self.boundaries.windows(2).enumerate() {
                    let kernels = kernels[range[0]..range[1]].to_vec();
                    let work = Work { overhead: self.launch_overhead(), kernels, after: self.after() };
                    points[segment][index].push((rows, work.alone(&limits)));
                }
            }
        }
        let profiles = points.into_iter().map(|by_length| {
            by_length.into_iter().map(|points| LatencyProfile::from_points(&points)).collect::<Result<Vec<_>, _>>()
        });
        Ok(SegmentProfile::new(lengths.to_vec(), &profiles.collect::<Result<Vec<_>, _>>()?)?)
    }

    fn all_kernels(&self, rows: u32, length: u32, units: u32) -> Vec<Kernel> {
        match &self.source {
            Source::Network(architecture, platform) => {
                let operators = architecture.operators(platform.fused, length);
                operators.iter().map(|operator| platform.kernel(operator, rows, units)).collect()
            }
            Source::Measured(model) => model.kernels(rows, units),
            Source::Plain(profile, all) => {
                let kernel = |segment| {
                    let run = profile.time(segment, rows, length).as_nanos();
                    let used = units.min(*all);
                    // On fewer units the time grows in proportion.
                    let run = u128::from(run) * u128::from(*all) / u128::from(used.max(1));
                    let run = Duration::from_nanos(u64::try_from(run).unwrap_or(u64::MAX));
                    Kernel { run, units: used, ..Kernel::default() }
                };
                (0..profile.segments()).map(kernel).collect()
            }
        }
    }
}
