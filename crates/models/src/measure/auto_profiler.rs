//! Takes the measurements that `auto` decides by, and stores them for the next start.

use std::sync::mpsc;

use downbeat_core::device::{Overlap, OverlapPoint};
use downbeat_core::{Duration, median};
use downbeat_service::clock::Clock;
use serde::{Deserialize, Serialize};

use crate::measure::pair_profiler::{self, PairMeasurement};
use crate::measure::sampler::{Subject, Watch};

/// About how long two lanes are tried together.
const BUDGET: Duration = Duration::from_millis(200);
/// The least number of hand-overs in a measurement.
const ROUNDS: usize = 400;
/// The hand-over is repeated for at least this long. The kernel counts other programs' time in
/// steps of 10 ms.
pub const HANDS_OVER_FOR: Duration = Duration::from_millis(50);

/// The stored measurements of a model file for `auto`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredAuto {
    /// The time to hand work over to another thread.
    #[serde(rename = "launch_ns")]
    pub launch: Duration,
    /// Two lanes together.
    pub overlap: Overlap,
    /// Whether the machine did little else meanwhile. Measurements beside other work are repeated.
    #[serde(default)]
    pub settled: bool,
}

/// The overlap of two lanes of a model, with batches of one item and the largest; `None` if it
/// cannot be measured.
pub fn overlap(
    subject: &Subject<'_>,
    device: usize,
    max_batch: u32,
    watch: &mut dyn Watch<PairMeasurement>,
) -> Option<Overlap> {
    let mut sizes = subject.timed(&[1, max_batch.max(1)]);
    sizes.dedup();
    let pairs: Vec<[u32; 2]> = sizes.iter().map(|size| [*size; 2]).collect();
    let found = pair_profiler::measure([subject, subject], device, &pairs, None, BUDGET, watch).ok()?;
    let mean = |latencies: [pair_profiler::Latencies; 2]| {
        let [a, b] = latencies.map(|latencies| latencies.median_ns);
        Duration::from_nanos(a.midpoint(b))
    };
    let points = found.iter().map(|pair| OverlapPoint {
        batch: pair.batches[0],
        alone: mean(pair.alone),
        together: mean(pair.together),
    });
    Some(Overlap::new(points.collect())).filter(|overlap| !overlap.points().is_empty())
}

/// The time to hand work over to a waiting thread, on this machine as it is now; `None` if no
/// thread can be started.
pub fn hand_over_time(clock: Clock) -> Option<Duration> {
    let ((there, arrives), (back, returns)) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
    std::thread::scope(|scope| {
        let echo = move || while arrives.recv().is_ok_and(|()| back.send(()).is_ok()) {};
        std::thread::Builder::new().name("hand-over".to_owned()).spawn_scoped(scope, echo).ok()?;
        let round = || {
            let begin = clock.now();
            there.send(()).ok()?;
            returns.recv().ok()?;
            Some(clock.now().since(begin))
        };
        let end = clock.now() + HANDS_OVER_FOR;
        let mut times = Vec::with_capacity(ROUNDS);
        while times.len() < ROUNDS || clock.now() < end {
            times.push(round()?);
        }
        drop(there);
        // There and back.
        Some(Duration::from_nanos(median(times)?.as_nanos() / 2))
    })
}
