//! A network on a platform: what launches of it take, alone and as work for a contended device.

use downbeat_core::device::{SegmentProfile, SegmentRange};
use downbeat_core::{Duration, LatencyProfile};

use super::abacus_cuts::abacus_cuts;
use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::limits::DeviceLimits;
use super::measured::MeasuredModel;
use super::platform::Platform;
use super::work::{Kernel, Work};

/// A network on a platform, or a measured model on its device, in stages of equal time.
#[derive(Clone, Debug)]
pub struct EmulatedModel {
    source: Source,
    /// First operator of each segment, and one past the last.
    boundaries: Vec<usize>,
}

/// Where the kernels of a launch come from.
#[derive(Clone, Debug)]
enum Source {
    /// The operators of a network of the papers.
    Network(Architecture, Platform),
    /// What was measured.
    Measured(MeasuredModel),
    /// Segments that take their times, of so many units.
    Plain(SegmentProfile, u32),
}

/// What stages of equal time are measured with, where nothing else is said: items, and tokens.
const REFERENCE: (u32, u32) = (32, 64);

impl EmulatedModel {
    /// The model in one piece.
    pub fn new(architecture: Architecture, platform: Platform) -> Self {
        let operators = architecture.operators(platform.fused, 1).len();
        EmulatedModel { source: Source::Network(architecture, platform), boundaries: vec![0, operators] }
    }

    /// A measured model in one piece, on its device.
    pub fn measured(model: MeasuredModel) -> Self {
        let kernels = model.kernels(1, model.limits.units).len();
        EmulatedModel { source: Source::Measured(model), boundaries: vec![0, kernels] }
    }

    /// A model whose segments take exactly these times alone, and keep so many units of the device: on one with twice as many, two run side by side
    /// and a third slows both down. Its inputs are where they are needed.
    pub fn plain(profile: SegmentProfile, units: u32) -> Self {
        EmulatedModel {
            boundaries: (0..=usize::from(profile.segments())).collect(),
            source: Source::Plain(profile, units),
        }
    }

    /// The model cut into `stages` stages that take as equal times as its operators allow, for a batch of 32.
    ///
    /// # Errors
    /// If there are fewer operators than stages, or no stage.
    pub fn staged(architecture: Architecture, platform: Platform, stages: usize) -> Result<Self, DeviceFailure> {
        EmulatedModel::new(architecture, platform).cut(stages)
    }

    /// The same model cut into `stages` stages.
    ///
    /// # Errors
    /// As [`Self::staged`].
    pub fn cut(&self, stages: usize) -> Result<Self, DeviceFailure> {
        Ok(EmulatedModel { source: self.source.clone(), boundaries: self.segments(stages)? })
    }

    /// The model cut into Abacus' operators, 52 of ResNet152 to 12 of BERT.
    ///
    /// # Errors
    /// If it is none of Abacus' models, or on another platform than theirs.
    pub fn abacus(architecture: Architecture, platform: Platform) -> Result<Self, DeviceFailure> {
        if platform.fused {
            return Err(DeviceFailure(format!("{} fuses operators: Abacus' are between them", platform.name)));
        }
        let boundaries = abacus_cuts(architecture)?;
        Ok(EmulatedModel { source: Source::Network(architecture, platform), boundaries })
    }

    /// The network of the papers that it is, if it is one.
    pub fn architecture(&self) -> Option<Architecture> {
        match &self.source {
            Source::Network(architecture, _) => Some(*architecture),
            Source::Measured(_) | Source::Plain(..) => None,
        }
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        match &self.source {
            Source::Network(architecture, _) => architecture.name(),
            Source::Measured(model) => &model.name,
            Source::Plain(..) => "plain",
        }
    }

    /// Whether its requests have a length.
    pub fn has_length(&self) -> bool {
        self.architecture().is_some_and(Architecture::has_length)
    }

    /// Bytes of an item's input and output.
    pub fn item_bytes(&self, length: u32) -> (u64, u64) {
        match &self.source {
            Source::Network(architecture, _) => architecture.item_bytes(length),
            Source::Measured(model) => model.item_bytes,
            Source::Plain(..) => (0, 0),
        }
    }

    /// What its device offers to launches together.
    pub fn limits(&self) -> DeviceLimits {
        match &self.source {
            Source::Network(_, platform) => platform.limits(),
            Source::Measured(model) => model.limits,
            Source::Plain(_, units) => DeviceLimits::plain(*units),
        }
    }

    /// What the host spends on joining a batch's inputs of so many bytes, and the serving system on the batch. Both are in the times of a measured model.
    pub fn gather(&self, bytes: u64) -> Duration {
        match &self.source {
            Source::Network(_, platform) => {
                platform.batch_overhead + Duration::from_secs_f64(bytes as f64 * platform.gather_nanos_per_byte * 1e-9)
            }
            Source::Measured(_) | Source::Plain(..) => Duration::ZERO,
        }
    }

    /// What a launch costs the host before its first kernel.
    fn launch_overhead(&self) -> Duration {
        match &self.source {
            Source::Network(_, platform) => platform.launch_overhead,
            Source::Measured(model) => model.launch_overhead,
            Source::Plain(..) => Duration::ZERO,
        }
    }

    /// What the host does after a launch before its lane is free.
    fn after(&self) -> Duration {
        match &self.source {
            Source::Network(_, platform) => platform.after,
            Source::Measured(_) | Source::Plain(..) => Duration::ZERO,
        }
    }

    /// The standard deviation of what a launch takes from run to run, as a share of it; 0 where nothing is known.
    pub fn noise(&self) -> f64 {
        match &self.source {
            Source::Network(_, platform) => platform.noise,
            Source::Measured(_) | Source::Plain(..) => 0.0,
        }
    }

    /// How many segments it is cut into.
    pub fn segment_count(&self) -> u16 {
        (self.boundaries.len() - 1) as u16
    }

    /// Where to cut it into `stages` stages of equal time (DVABatch §7.1): the first operator of each, and one past the last.
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
            // Closest to its place, with operators left for every stage.
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

    /// What `rows` items padded to `length` take in all segments, alone on the whole device, once launched.
    pub fn time(&self, rows: u32, length: u32) -> Duration {
        self.time_on(rows, length, self.limits().units)
    }

    /// As that, on a partition of so many units.
    pub fn time_on(&self, rows: u32, length: u32, units: u32) -> Duration {
        self.work(SegmentRange::new(0, self.segment_count()), rows, length, units).alone(&self.limits())
    }

    /// What a launch of `segments` has to do on a partition of so many units.
    pub fn work(&self, segments: SegmentRange, rows: u32, length: u32, units: u32) -> Work {
        let range = self.boundaries[usize::from(segments.first)]..self.boundaries[usize::from(segments.end)];
        let kernels = self.all_kernels(rows, length, units)[range].to_vec();
        Work { overhead: self.launch_overhead(), kernels, after: self.after() }
    }

    /// What each segment takes alone, for up to `max_batch` items padded to each of `lengths`; an offline measurement's result.
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
                    // On fewer units it takes longer in proportion.
                    let run = u128::from(run) * u128::from(*all) / u128::from(used.max(1));
                    let run = Duration::from_nanos(u64::try_from(run).unwrap_or(u64::MAX));
                    Kernel { run, units: used, ..Kernel::default() }
                };
                (0..profile.segments()).map(kernel).collect()
            }
        }
    }
}
