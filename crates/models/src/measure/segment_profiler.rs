//! Measures the time of each segment of a model, by items and by padded length, and stores it for
//! the next start.

use downbeat_core::device::SegmentProfile;
use downbeat_core::{Duration, LatencyProfile, ProfilePoint, median};
use downbeat_engine::Lane;
use downbeat_host::device::Padding;
use serde::{Deserialize, Serialize};

use crate::measure::profile_store::ProfileStore;
use crate::measure::profiler::few_sizes;
use crate::measure::sampler::{Subject, TimedRun, Watch};
use crate::measure::sized_cases::{CaseSize, SizedCases};

/// The padded lengths that a model is measured with, as far as it takes them.
const LENGTHS: [u32; 6] = [8, 32, 64, 128, 256, 512];
/// Most runs that are timed for one batch size; one run suffices if time is short.
const RUNS: [usize; 2] = [0, 50];

/// A model whose segments are timed.
pub struct SegmentSubject<'a> {
    pub subject: Subject<'a>,
    /// How requests are padded, if they vary.
    pub padding: Option<&'a Padding>,
    /// The time for all measurements, roughly.
    pub budget: Duration,
}

/// Measurements of a model's segments on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredSegments {
    lengths: Vec<u32>,
    /// By segment, length, and batch size.
    segments: Vec<Vec<Vec<SegmentPoint>>>,
    /// Whether the machine did little else meanwhile. Measurements beside other work are repeated.
    #[serde(default)]
    settled: bool,
}

/// The time of a segment with one batch size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentPoint {
    rows: u32,
    /// The median, nanoseconds.
    ns: u64,
    runs: u32,
}

impl SegmentSubject<'_> {
    /// The profile, as it was stored under `key`; `None` too if it was measured while the machine
    /// had other things to do.
    pub fn stored(&self, store: &ProfileStore, key: &str) -> Option<SegmentProfile> {
        let stored = store.get::<StoredSegments>(&self.own_key(key)).filter(|stored| stored.settled)?;
        self.checked(&stored)
    }

    /// The profile, measured, and stored under `key`; `None` if the model cannot run it, or there
    /// is no time. `timed` times something, and reports whether the machine was otherwise idle
    /// meanwhile.
    pub fn measured(
        &self,
        lane: &mut dyn Lane,
        store: &ProfileStore,
        key: Option<&str>,
        watch: &mut dyn Watch<Vec<Option<SegmentPoint>>>,
        timed: impl FnOnce(&mut dyn FnMut() -> Option<StoredSegments>) -> (Option<StoredSegments>, bool),
    ) -> Option<SegmentProfile> {
        let (measured, settled) = timed(&mut || self.measure(lane, watch));
        let measured = StoredSegments { settled, ..measured? };
        let profile = self.checked(&measured)?;
        if let Some(key) = key {
            store.keep(Ok(self.own_key(key)), "the profile of segments", &measured);
        }
        Some(profile)
    }

    fn own_key(&self, key: &str) -> String {
        let most =
            self.padding.and_then(|padding| padding.max_length).map_or("any".to_owned(), |most| most.to_string());
        format!("{key}-s{}-{:08x}-l{most}", self.subject.model.segments(), self.cuts())
    }

    /// A hash of the cut: other cuts into as many segments differ in it.
    fn cuts(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        for segment in self.subject.model.segment_info() {
            hasher.update(segment.last.as_bytes());
            hasher.update(&[0]);
        }
        hasher.finalize()
    }

    fn checked(&self, stored: &StoredSegments) -> Option<SegmentProfile> {
        let point = |SegmentPoint { rows, ns, runs }: &SegmentPoint| ProfilePoint {
            batch: *rows,
            latency: Duration::from_nanos((*ns).max(1)),
            runs: *runs,
        };
        let latency = |points: &Vec<SegmentPoint>| LatencyProfile::fit(points.iter().map(point)).ok();
        let segments = stored.segments.iter().map(|lengths| lengths.iter().map(latency).collect());
        let segments: Vec<Vec<LatencyProfile>> = segments.collect::<Option<_>>()?;
        let profile = SegmentProfile::new(stored.lengths.clone(), &segments).ok()?;
        (usize::from(profile.segments()) == self.subject.model.segments()).then_some(profile)
    }

    fn measure(&self, lane: &mut dyn Lane, watch: &mut dyn Watch<Vec<Option<SegmentPoint>>>) -> Option<StoredSegments> {
        let most = self.padding.and_then(|padding| padding.max_length).unwrap_or(u32::MAX);
        let lengths: Vec<u32> = match self.padding {
            None => vec![0],
            Some(_) => {
                let below = LENGTHS.iter().copied().filter(|length| *length < most);
                below.chain((most < LENGTHS[LENGTHS.len() - 1]).then_some(most)).collect()
            }
        };
        let segments = vec![Vec::new(); self.subject.model.segments()];
        let mut stored = StoredSegments { lengths: Vec::new(), segments, settled: false };
        let share = Duration::from_nanos(self.budget.as_nanos() / lengths.len().max(1) as u64);
        let end = self.subject.clock.now() + self.budget;
        for length in lengths {
            let left = end.since(self.subject.clock.now());
            if !stored.lengths.is_empty() && !watch.fits(share, left) {
                break;
            }
            // The model does not take this length: its time is extrapolated from shorter ones.
            let Some(by_segment) = self.measure_length(lane, length, share.min(left), watch) else { break };
            stored.lengths.push(length);
            for (all, points) in stored.segments.iter_mut().zip(by_segment) {
                all.push(points);
            }
        }
        (!stored.lengths.is_empty()).then_some(stored)
    }

    /// By segment and batch size.
    fn measure_length(
        &self,
        lane: &mut dyn Lane,
        length: u32,
        budget: Duration,
        watch: &mut dyn Watch<Vec<Option<SegmentPoint>>>,
    ) -> Option<Vec<Vec<SegmentPoint>>> {
        let subject = Subject { varying: i64::from(length.max(1)), ..self.subject };
        let sizes = subject.timed(&few_sizes(subject.codec.max_batch));
        let item = subject.item().ok()?;
        // The first segment's time includes joining the requests.
        let taken = |run: &TimedRun, segment: usize| {
            let joining = if segment == 0 { run.joining } else { Duration::ZERO };
            Some((*run.segments_on_host.get(segment)? + joining).as_nanos())
        };
        let point = |rows, runs: &[TimedRun], segment: usize| {
            let ns = median(runs.iter().filter_map(|run| taken(run, segment)))?;
            Some(SegmentPoint { rows, ns, runs: runs.len() as u32 })
        };
        let segments = 0..subject.model.segments();
        let points = |rows, runs: &[TimedRun]| -> Vec<_> {
            segments.clone().map(|segment| point(rows, runs, segment)).collect()
        };
        let (clock, size) = (subject.clock, |rows: &u32| CaseSize::rows(*rows));
        let cases = SizedCases { clock, budget, runs: RUNS, cases: &sizes, size };
        let run = |rows| subject.run_cut(lane, &item, rows as usize);
        let measured = cases.measure(watch, run, |run| run.host, points).ok();
        let measured = measured.filter(|measured| !measured.is_empty())?;
        Some(segments.map(|segment| measured.iter().filter_map(|points| points[segment]).collect()).collect())
    }
}
