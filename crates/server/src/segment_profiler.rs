//! Measures what each segment of a model takes, by items and by what requests are padded to, and remembers it for the next start.

use downbeat_core::device::SegmentProfile;
use downbeat_core::{Duration, LatencyProfile};
use downbeat_engine::{Lane, Model};
use serde::{Deserialize, Serialize};

use crate::batch_codec::{BatchCodec, LARGEST_TRIAL};
use crate::clock::Clock;
use crate::host::Padding;
use crate::profiler::{ProfileStore, WARM_UP, settled};

/// What requests are padded to while a model is measured, as far as it takes them.
const LENGTHS: [u32; 6] = [8, 32, 64, 128, 256, 512];
/// Most runs that are timed for one batch size.
const MOST_RUNS: usize = 50;

/// A model whose segments are to be timed.
pub struct SegmentSubject<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// How its batches are made.
    pub plan: &'a BatchCodec,
    /// How requests are padded, if they vary.
    pub padding: Option<&'a Padding>,
    /// What times it.
    pub clock: Clock,
    /// About how long it may take in all.
    pub budget: Duration,
}

/// What was found out about a model's segments on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct StoredSegments {
    lengths: Vec<u32>,
    /// Medians, nanoseconds: by segment, length, and the batch sizes that were timed.
    segments: Vec<Vec<Vec<(u32, u64)>>>,
}

impl SegmentSubject<'_> {
    /// The profile, as it was stored under `key`.
    pub fn stored(&self, store: &ProfileStore, key: &str) -> Option<SegmentProfile> {
        self.checked(&store.get(&self.own_key(key))?)
    }

    /// The profile, measured, and stored under `key`; `None` if the model cannot run it, or there is no time to measure it.
    pub fn measured(&self, lane: &mut dyn Lane, store: &ProfileStore, key: Option<&str>) -> Option<SegmentProfile> {
        let measured = self.measure(lane)?;
        let profile = self.checked(&measured)?;
        if let Some(Err(error)) = key.map(|key| store.put(&self.own_key(key), &measured)) {
            tracing::warn!(%error, "the profile of segments cannot be stored; it will be measured again at the next start");
        }
        Some(profile)
    }

    fn own_key(&self, key: &str) -> String {
        let most = self.padding.and_then(Padding::max_length).map_or("any".to_owned(), |most| most.to_string());
        format!("{key}-s{}-{:08x}-l{most}", self.model.segments(), self.cuts())
    }

    /// What tells one cut of a model from another into as many segments.
    fn cuts(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        for segment in self.model.segment_info() {
            hasher.update(segment.last.as_bytes());
            hasher.update(&[0]);
        }
        hasher.finalize()
    }

    fn checked(&self, stored: &StoredSegments) -> Option<SegmentProfile> {
        let latency = |points: &Vec<(u32, u64)>| {
            let points: Vec<_> = points.iter().map(|(rows, ns)| (*rows, Duration::from_nanos((*ns).max(1)))).collect();
            LatencyProfile::from_points(&points).ok()
        };
        let segments = stored.segments.iter().map(|lengths| lengths.iter().map(latency).collect());
        let segments: Vec<Vec<LatencyProfile>> = segments.collect::<Option<_>>()?;
        let profile = SegmentProfile::new(stored.lengths.clone(), &segments).ok()?;
        (usize::from(profile.segments()) == self.model.segments()).then_some(profile)
    }

    fn measure(&self, lane: &mut dyn Lane) -> Option<StoredSegments> {
        let most = self.padding.and_then(Padding::max_length).unwrap_or(u32::MAX);
        let lengths: Vec<u32> = match self.padding {
            None => vec![0],
            Some(_) => {
                let below = LENGTHS.iter().copied().filter(|length| *length < most);
                below.chain((most < LENGTHS[LENGTHS.len() - 1]).then_some(most)).collect()
            }
        };
        let mut stored = StoredSegments { lengths: Vec::new(), segments: vec![Vec::new(); self.model.segments()] };
        let share = Duration::from_nanos(self.budget.as_nanos() / lengths.len().max(1) as u64);
        for length in lengths {
            // Longer than the model takes: what it would take is drawn from the others.
            let Some(by_segment) = self.measure_length(lane, length, share) else { break };
            stored.lengths.push(length);
            for (all, points) in stored.segments.iter_mut().zip(by_segment) {
                all.push(points);
            }
        }
        (!stored.lengths.is_empty()).then_some(stored)
    }

    /// Medians by segment and batch size.
    fn measure_length(&self, lane: &mut dyn Lane, length: u32, budget: Duration) -> Option<Vec<Vec<(u32, u64)>>> {
        let varying = i64::from(length.max(1));
        let item_bytes = self.plan.item_bytes(varying).filter(|bytes| *bytes <= LARGEST_TRIAL)?;
        let most_rows = u32::try_from(LARGEST_TRIAL / item_bytes.max(1)).unwrap_or(u32::MAX);
        // Every second power of two, and the largest: enough to draw a profile through.
        let mut sizes: Vec<u32> =
            (0..16).map(|n| 1 << (2 * n)).take_while(|size| *size < self.plan.max_batch()).collect();
        sizes.push(self.plan.max_batch());
        sizes.retain(|size| *size <= most_rows);
        let item = self.plan.trial(varying).ok()?;
        let mut found = vec![Vec::new(); self.model.segments()];
        let end = self.clock.now() + budget;
        for (done, rows) in sizes.iter().enumerate() {
            let members = std::iter::repeat_n(&item, *rows as usize);
            let mut times: Vec<Vec<u64>> = vec![Vec::new(); self.model.segments()];
            let left = end.since(self.clock.now()).as_nanos();
            let until = self.clock.now() + Duration::from_nanos(left / (sizes.len() - done) as u64);
            for _ in 0..MOST_RUNS + WARM_UP {
                let mut begin = self.clock.now();
                let mut state = self.plan.assemble(members.clone()).ok()?;
                for (segment, times) in times.iter_mut().enumerate() {
                    lane.run(segment..segment + 1, &mut state).ok()?;
                    let now = self.clock.now();
                    times.push(now.since(begin).as_nanos());
                    begin = now;
                }
                if self.clock.now() >= until {
                    break;
                }
            }
            for (found, times) in found.iter_mut().zip(times) {
                let mut times = settled(times);
                times.sort_unstable();
                found.push((*rows, times[times.len() / 2]));
            }
        }
        (!sizes.is_empty()).then_some(found)
    }
}
