//! Measures how long a model's batches take, and on how many threads.

use downbeat_core::profile::ProfileError;
use downbeat_core::{Duration, LatencyProfile, ProfilePoint, quantiles};
use downbeat_engine::{Lane, RunError};
use serde::{Deserialize, Serialize};

use crate::measure::sampler::{self, Subject, Watch};
use crate::measure::sized_cases::{self, CaseSize, SizedCases};

/// Most runs that are timed for one batch size; one run suffices if time is short.
const RUNS: [usize; 2] = [0, 200];

/// How long one batch size took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// Items in the batch.
    pub batch: u32,
    /// Timed runs.
    pub runs: u32,
    /// The fastest run, nanoseconds.
    pub min_ns: u64,
    /// Half of the runs took at most this, nanoseconds.
    pub median_ns: u64,
    /// 95 of 100 runs took at most this, nanoseconds.
    pub p95_ns: u64,
}

impl Measurement {
    /// The measurement of a batch size from the times of its runs.
    pub fn of(batch: u32, times: &[Duration]) -> Self {
        let nanos = times.iter().map(|time| time.as_nanos());
        let [min_ns, median_ns, p95_ns] = quantiles(nanos, [0.0, 0.5, 0.95]).unwrap_or_default();
        Measurement { batch, runs: times.len() as u32, min_ns, median_ns, p95_ns }
    }

    /// The median.
    pub fn median(&self) -> Duration {
        Duration::from_nanos(self.median_ns)
    }
}

/// Powers of two up to `max_batch`, and `max_batch`: enough to draw a profile through.
pub fn default_sizes(max_batch: u32) -> Vec<u32> {
    (0..32).map(|exponent| 1 << exponent).take_while(|size| *size < max_batch).chain([max_batch.max(1)]).collect()
}

/// Every second batch size, for measurements of many cases each.
pub fn few_sizes(max_batch: u32) -> Vec<u32> {
    (0..16).map(|exponent| 1 << (2 * exponent)).take_while(|size| *size < max_batch).chain([max_batch.max(1)]).collect()
}

/// Several threads are worth using if a batch is faster by this factor.
const WORTH_SPEEDUP: f64 = 1.25;
/// Rounds of a comparison: the least, the fewest that are reliable, and the most. The first number
/// is for models so slow that the second would take more than twice the given time.
const ROUNDS: [usize; 3] = [2, 5, 60];
/// A comparison uses batches that take at most this part of its time, so that there are several
/// rounds.
const ROUND_SHARE: u64 = 16;
/// Other programs may take this share of the processor time; with more, measurements of a model are
/// unreliable.
pub const NOISE: f64 = 0.15;

/// Whether a machine was quiet while something was timed. `others` is the share of the processor
/// time that other programs took; `None`: unknown. `served` is the share of a core that the
/// server's own models took.
pub fn is_quiet(others: Option<f64>, served: f64) -> bool {
    others.is_none_or(|others| others <= NOISE) && served <= NOISE
}

/// The number of threads that a model runs with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// The options set the number.
    Chosen(usize),
    /// One thread, or this many if that is faster.
    UpTo(usize),
}

impl Threads {
    /// The most that a run may use.
    pub fn most(self) -> usize {
        let (Threads::Chosen(most) | Threads::UpTo(most)) = self;
        most
    }
}

impl std::fmt::Display for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Threads::Chosen(threads) => write!(f, "{threads}"),
            Threads::UpTo(most) => write!(f, "1-{most}"),
        }
    }
}

/// Whether a model that takes `alone` on one thread gains enough from several, on which it takes
/// `together`. The fastest runs show the effect of threads; all others show the load of other
/// processes.
fn is_worth_threads(alone: &[Duration], together: &[Duration]) -> bool {
    let fastest = |times: &[Duration]| times.iter().min().map_or(0.0, |time| time.as_secs_f64());
    fastest(alone) > fastest(together) * WORTH_SPEEDUP
}

/// Whether a batch is faster on the second of two subjects by a worthwhile factor. They are the
/// same model, on one thread and on several. They run in turns, so that both meet the same other
/// load of the machine.
///
/// # Errors
/// The error of the engine, if it cannot run such a batch.
pub fn compare(
    subjects: [Subject<'_>; 2],
    max_batch: u32,
    budget: Duration,
    watch: &mut dyn Watch<[Vec<Duration>; 2]>,
) -> anyhow::Result<bool> {
    let [alone, together] = subjects;
    let (mut one, mut several) = (alone.model.lane()?, together.model.lane()?);
    let item = alone.item()?;
    let most = Duration::from_nanos(budget.as_nanos() / ROUND_SHARE);
    // The largest batch that leaves time for the rounds. A size that is run for the first time
    // allocates and plans.
    let mut twice = |batch| alone.run(&mut *one, &item, batch).and_then(|_| alone.run(&mut *one, &item, batch));
    let mut batch = 1;
    let mut took = twice(batch)?;
    let largest = (max_batch as usize).min(alone.largest());
    while batch < largest && took.saturating_mul(2) <= most {
        batch = (batch * 2).min(largest);
        took = twice(batch)?;
    }
    together.run(&mut *several, &item, batch)?;
    let compared = sampler::each(alone.clock, budget, [()], watch, |(), turn| {
        let run_alone = || alone.run(&mut *one, &item, batch);
        turn.in_turns(ROUNDS, run_alone, || together.run(&mut *several, &item, batch))
    })?;
    Ok(compared.iter().any(|[alone, together]| is_worth_threads(alone, together)))
}

impl Subject<'_> {
    /// Times the batches of `sizes` on a lane, in the order given, in about `budget` for all. A
    /// time goes from joining the requests to separating the outputs, as in service. A size that
    /// takes far longer than the others allow is timed again. `watch` hears of each size when it is
    /// done.
    ///
    /// # Errors
    /// The error of the engine, if it cannot run such a batch.
    pub fn measure(
        &self,
        lane: &mut dyn Lane,
        sizes: &[u32],
        budget: Duration,
        watch: &mut dyn Watch<Measurement>,
    ) -> Result<Vec<Measurement>, RunError> {
        let (item, clock, cases) = (self.item()?, self.clock, &self.timed(sizes)[..]);
        let cases = SizedCases { clock, budget, runs: RUNS, cases, size: |batch| CaseSize::rows(*batch) };
        cases.measure(watch, |batch| self.run(lane, &item, batch as usize), |took| *took, Measurement::of)
    }
}

/// The profile fitted to the medians, each with the weight of its runs.
///
/// # Errors
/// If there is no measurement.
pub fn profile(measurements: &[Measurement]) -> Result<LatencyProfile, ProfileError> {
    let point = |m: &Measurement| ProfilePoint {
        batch: m.batch,
        latency: Duration::from_nanos(m.median_ns.max(1)),
        runs: m.runs,
    };
    let fitted = LatencyProfile::fit(measurements.iter().map(point))?;
    let known = fitted.max_batch();
    Ok(fitted.learned(known))
}

/// Whether stored measurements need not be repeated: none is a stalled run that nothing was
/// compared with.
pub fn are_trusted(measurements: &[Measurement]) -> bool {
    let cases: Vec<_> = measurements.iter().map(|m| (CaseSize::rows(m.batch), m.median(), m.runs)).collect();
    sized_cases::are_trusted(&cases)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use downbeat_core::device::SegmentRange;
    use downbeat_core::device::overlap::GroupPart;
    use downbeat_core::tensor::{DataType, Signature, TensorSpec};
    use downbeat_core::{ModelId, RequestId};
    use downbeat_engine::{Fill, LoadError, Model, Place, State};
    use downbeat_host::request::batch_codec::BatchCodec;
    use downbeat_repository::TensorBinding;
    use downbeat_service::clock::Clock;

    use super::*;
    use crate::load::device_budget::DeviceBudget;
    use crate::load::warm_up::WarmUp;
    use crate::measure::group_profiler::GroupLanes;
    use crate::measure::measuring_time::{MeasuringTime, Within};
    use crate::measure::profile_store::ProfileStore;
    use crate::measure::segment_profiler::SegmentSubject;
    use crate::measure::{lane_profiler, mix_profiler, pair_profiler};

    /// A model that records its runs.
    #[derive(Clone, Default)]
    struct Spy {
        signature: Signature,
        seen: Arc<Mutex<Vec<Vec<u8>>>>,
    }

    impl Model for Spy {
        fn signature(&self) -> &Signature {
            &self.signature
        }

        fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
            Ok(Box::new(self.clone()))
        }

        fn sizes_to_warm(&self, _most: usize) -> Vec<usize> {
            vec![2]
        }
    }

    impl Lane for Spy {
        fn run(&mut self, _range: std::ops::Range<usize>, state: &mut State) -> Result<(), RunError> {
            self.seen.lock().unwrap().extend(state.tensors.drain(..).map(|tensor| tensor.data.as_slice().to_vec()));
            Ok(())
        }
    }

    /// A GPU is faster on zeros than it will be in service.
    #[test]
    fn nothing_is_timed_or_warmed_up_with_zeros() {
        let model = Spy::default();
        let dims = vec![-1, 64];
        let client = TensorSpec { name: "x".into(), datatype: DataType::Fp32, dims: dims.clone() };
        let (labels, batched, optional) = ([].into(), true, false);
        let binding = TensorBinding { client, model_index: 0, model_dims: dims, labels, batched, optional };
        let codec = BatchCodec::new(vec![binding], vec![], 2);
        let clock = Clock::start();
        let subject = Subject { model: &model, codec: &codec, varying: 1, clock };
        let budget = Duration::from_millis(1);
        let mut lane = model.lane().unwrap();
        let engine = downbeat_engine::Emulated::new();
        let device_budget = DeviceBudget::before(&engine, &[0], None);
        let steps: [(&str, &mut dyn FnMut()); 7] = [
            ("batches", &mut || drop(subject.measure(&mut *model.lane().unwrap(), &[1, 2], budget, &mut ()).unwrap())),
            ("shares", &mut || {
                drop(subject.measure_shares(&[(None, Default::default())], &[2], budget, &mut ()).unwrap());
            }),
            ("mixes", &mut || drop(mix_profiler::measure(&subject, &[2], 2, budget, &mut ()).unwrap())),
            ("pairs", &mut || {
                drop(pair_profiler::measure([&subject, &subject], 0, &[[1, 2]], None, budget, &mut ()).unwrap());
            }),
            ("groups", &mut || {
                let part = |model, end| GroupPart {
                    request: RequestId(0),
                    model: ModelId(model),
                    operators: SegmentRange::new(0, end),
                    rows: 2,
                    length: 0,
                };
                let mut lanes = GroupLanes::open(&[subject, subject]).unwrap();
                assert!(lanes.measure(&[part(0, 1), part(1, 1)], 2).is_ok());
                let refused = |group: &[GroupPart], lanes: &mut GroupLanes<'_>| lanes.measure(group, 1).unwrap_err();
                for wrong in [&[part(0, 1), part(0, 1)][..], &[part(2, 1)]] {
                    assert!(refused(wrong, &mut lanes).reason.contains("a group has a model twice"));
                }
            }),
            ("segments", &mut || {
                let segments = SegmentSubject { subject, padding: None, budget };
                let timed = |measure: &mut dyn FnMut() -> _| (measure(), true);
                let store = ProfileStore::new(None);
                segments.measured(&mut *model.lane().unwrap(), &store, None, &mut (), timed).unwrap();
            }),
            ("warm-up", &mut || {
                let (name, model, codec, budget) = ("spy", &model as &dyn Model, &codec, &device_budget);
                let mut warm_up = WarmUp { name, model, codec, budget, wanted: Vec::new(), run: None };
                warm_up.whole(&[], 0, &mut *lane).unwrap();
            }),
        ];
        for (what, step) in steps {
            model.seen.lock().unwrap().clear();
            step();
            let seen = model.seen.lock().unwrap();
            assert!(!seen.is_empty(), "{what}");
            for batch in &*seen {
                let mut item: Vec<[u8; 4]> = batch[..256].as_chunks().0.to_vec();
                item.sort_unstable();
                item.dedup();
                assert!(item.len() > 60, "{what}: {} different numbers of 64", item.len());
            }
        }
        // The model takes zeros alone.
        let zeros = codec.with_fill(Fill::Zeros).trial(1).unwrap();
        assert_eq!(zeros.input(0), [0; 256]);
    }

    /// A model whose runs take at least a fixed time for each item. The model records the times of
    /// its runs.
    #[derive(Clone, Default)]
    struct Slow {
        signature: Signature,
        ran_us: Arc<Mutex<Vec<u64>>>,
    }

    /// The time of an item.
    const ITEM_US: u64 = 5_000;

    impl Model for Slow {
        fn signature(&self) -> &Signature {
            &self.signature
        }

        fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
            Ok(Box::new(self.clone()))
        }
    }

    impl Lane for Slow {
        #[expect(clippy::disallowed_methods, reason = "the time that a run takes is what is tested")]
        fn run(&mut self, _range: std::ops::Range<usize>, state: &mut State) -> Result<(), RunError> {
            // Four bytes an item.
            let us = state.tensors.drain(..).map(|tensor| tensor.data.as_slice().len() as u64 / 4 * ITEM_US).sum();
            std::thread::sleep(std::time::Duration::from_micros(us));
            self.ran_us.lock().unwrap().push(us);
            Ok(())
        }
    }

    fn slow_codec() -> BatchCodec {
        let client = TensorSpec { name: "x".into(), datatype: DataType::Fp32, dims: vec![-1, 1] };
        let (labels, batched, optional) = ([].into(), true, false);
        let binding = TensorBinding { client, model_index: 0, model_dims: vec![-1, 1], labels, batched, optional };
        BatchCodec::new(vec![binding], vec![], 32)
    }

    /// All sizes once would take 63 items. Runs never take less than their time, however busy the
    /// machine is.
    #[test]
    fn measuring_takes_no_longer_than_its_budget_and_one_run() {
        let (model, codec, clock) = (Slow::default(), slow_codec(), Clock::start());
        let subject = Subject { model: &model, codec: &codec, varying: 1, clock };
        let turns = crate::load::load_turns::LoadTurns::new(Default::default());
        let turn = turns.begin();
        for budget_us in [0, ITEM_US, 6 * ITEM_US] {
            model.ran_us.lock().unwrap().clear();
            let time = MeasuringTime::before_service(Duration::from_micros(budget_us));
            let mut watch = Within { time: &time, turn: &turn, told: &mut () };
            let sizes = default_sizes(32);
            let measured = subject.measure(&mut *model.lane().unwrap(), &sizes, time.left(), &mut watch).unwrap();
            let ran: Vec<u64> = std::mem::take(&mut *model.ran_us.lock().unwrap());
            let largest = *ran.iter().max().unwrap();
            assert!(ran.iter().sum::<u64>() <= budget_us + largest && largest <= budget_us.max(ITEM_US), "{ran:?}");
            assert!(!measured.is_empty() && measured.len() < sizes.len());
        }
        // Behind the service there is time for each size.
        model.ran_us.lock().unwrap().clear();
        let time = MeasuringTime::behind_service(Duration::ZERO);
        let mut watch = Within { time: &time, turn: &turn, told: &mut () };
        let measured = subject.measure(&mut *model.lane().unwrap(), &[1, 2, 4], Duration::ZERO, &mut watch).unwrap();
        assert_eq!(measured.iter().map(|m| m.batch).collect::<Vec<_>>(), [1, 2, 4]);
    }

    #[test]
    fn lanes_that_there_is_no_time_for_are_not_tried() {
        let (model, codec, clock) = (Slow::default(), slow_codec(), Clock::start());
        let subject = Subject { model: &model, codec: &codec, varying: 1, clock };
        let time = MeasuringTime::before_service(Duration::from_micros(ITEM_US));
        let first = lane_profiler::step([Duration::from_micros(ITEM_US)].into_iter());
        let lanes = lane_profiler::lanes_worth_having(&subject, &[1], 4, first, |expected| time.allows(expected));
        assert_eq!((lanes.unwrap(), model.ran_us.lock().unwrap().len()), (None, 0));
        assert!(time.is_short());
    }

    #[test]
    fn few_sizes_reach_the_largest() {
        assert_eq!(few_sizes(0), [1]);
        assert_eq!(few_sizes(1), [1]);
        assert_eq!(few_sizes(16), [1, 4, 16]);
        assert_eq!(few_sizes(33), [1, 4, 16, 33]);
    }

    #[test]
    fn a_machine_is_quiet_if_no_process_and_no_model_has_the_cores() {
        assert!(is_quiet(None, 0.0) && is_quiet(Some(0.1), 0.1));
        assert!(!is_quiet(Some(0.2), 0.0) && !is_quiet(None, 0.2));
    }

    #[test]
    fn a_profile_weighs_medians_by_runs_up_to_the_largest_size() {
        let measured = |batch, runs, median_ns| Measurement { batch, runs, min_ns: 1, median_ns, p95_ns: median_ns };
        let profile =
            profile(&[measured(1, 9, 10), measured(2, 1, 200), measured(4, 9, 20), measured(8, 9, 60)]).unwrap();
        let latency = |batch| profile.latency(batch).as_nanos();
        assert_eq!([1, 2, 4, 8].map(latency), [10, 38, 38, 60]);
        assert_eq!(profile.known(), Some(8));
    }

    fn ms(times: &[u64]) -> Vec<Duration> {
        times.iter().map(|ms| Duration::from_millis(*ms)).collect()
    }

    /// Runs in turns: though a neighbour takes a core in many runs, some runs are left without it.
    #[test]
    fn threads_are_judged_by_what_they_can_do() {
        assert!(is_worth_threads(&ms(&[10, 10, 10, 10]), &ms(&[20, 6, 25, 6])));
        assert!(!is_worth_threads(&ms(&[10, 30, 30, 30]), &ms(&[9, 9, 9, 9])));
        assert!(!is_worth_threads(&ms(&[10]), &ms(&[10])));
    }
}
