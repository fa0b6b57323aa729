//! The search for a model's stages and buffer pairs, by trials on an emulated device with the
//! model's measured latencies (DVABatch §7.1).

use std::cell::Cell;
use std::convert::Infallible;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, PastArrival};
use downbeat_core::device::{
    ModelSpec, Overlap, PartitionId, PolicyModel, PolicySettings, SegmentProfile, Staging, Tuned, WrittenSettings, tune,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, Time};
use rand_distr::{Distribution, Exp1};

use super::candidate::ReplayedModel;
use super::run::{DeviceReplay, ReplayCount};
use crate::arrivals::random;
use crate::capacity::Bounds;

/// The least and the most requests of a trial.
const REQUESTS: [u64; 2] = [1_000, 16_000];
/// A trial has so many times the requests that can wait within the SLO. In a shorter trial even a
/// load that is far too high would be answered in time.
const FILLS: u64 = 8;
/// The part of the requests, at the start of a trial, that does not count.
const WARM_UP: f64 = 0.1;
/// The late or dropped part of a load that holds, at most.
const MOST_BAD: f64 = 0.01;
/// The relative precision of a peak: less than the difference that counts.
const PRECISION: f64 = 0.005;
/// More stages or pairs must have less than this part of the latency.
const WORTH: f64 = 0.99;
/// A choice whose peak is below this part of the best so far is not the best.
const NEAR: f64 = 0.98;
/// The lowest load that is tried, as a share of the highest throughput of one lane.
const LEAST: f64 = 1e-3;
/// No load above this multiple of the throughput of one lane holds: two lanes do twice the work at
/// most.
const MOST: f64 = 2.5;
/// The SLO of the trials where the model has none, as a multiple of the largest batch's latency.
const SLO_BATCHES: u64 = 4;
/// The longest SLO of the trials, as the same multiple. A longer SLO changes no choice.
const MOST_SLO_BATCHES: u64 = 4;
/// The most items that may wait.
const QUEUE_BOUND: u32 = 1 << 20;

/// A measured model whose stages and buffer pairs are searched.
///
/// Each trial is a replay ([`DeviceReplay`]) of requests of one item at random times (Poisson). All
/// trials have the same requests, only faster or slower.
#[derive(Debug)]
pub struct StagingSearch<'a> {
    /// The settings of the policy `staged` for the model.
    pub settings: &'a dyn PolicySettings,
    /// The latencies of the model's segments. Stages are made of neighbouring segments. If the
    /// settings leave open only buffer pairs, each segment is a stage.
    pub segments: SegmentProfile,
    /// The measured overlap of two lanes.
    pub overlap: Overlap,
    /// The time to hand a launch over to its lane.
    pub launch: Duration,
    /// The largest batch, in items.
    pub max_batch: u32,
    /// The time from a request's arrival to its deadline; `None`: four times the latency of the
    /// largest batch.
    pub slo: Option<Duration>,
    /// Chooses the times of the requests.
    pub seed: u64,
}

impl StagingSearch<'_> {
    /// The SLO of the trials: the model's, at most four times the latency of the largest batch.
    pub fn slo(&self) -> Duration {
        let longest = self.longest();
        let slo = self.slo.unwrap_or_else(|| longest.saturating_mul(SLO_BATCHES));
        slo.min(longest.saturating_mul(MOST_SLO_BATCHES))
    }

    /// The latency of the largest batch.
    fn longest(&self) -> Duration {
        self.segments.total(self.max_batch, 0).max(Duration::from_nanos(1))
    }

    /// The stages and buffer pairs that suit the settings and that the model's segments can make.
    pub fn choices(&self) -> Vec<Staging> {
        let open = self.settings.open_stagings();
        open.into_iter().filter(|staging| staging.stages <= self.segments.segments()).collect()
    }

    /// Tries all choices, and finds the best. The peak of a choice is 0 if it is less than 98% of an
    /// earlier one's.
    pub fn run(&self) -> Tuned<Staging> {
        let (gaps, best) = (self.gaps(), Cell::new(0.0));
        let replay = |staging, rate, most_bad| self.replay(&self.policy(staging)?, rate, &gaps, most_bad);
        let most_bad = (gaps.len() as f64 * (1.0 - WARM_UP) * MOST_BAD) as u64;
        let peak = |staging| {
            let peak = self.peak(best.get(), |rate| replay(staging, rate, most_bad).is_some());
            best.set(peak.max(best.get()));
            Ok(peak)
        };
        let mean_ms = |staging, rate| {
            let count = replay(staging, rate, u64::MAX);
            Ok(count.map_or(f64::INFINITY, |count| {
                count.delay.as_millis_f64() / (count.in_time + count.late).max(1) as f64
            }))
        };
        let tuned: Result<_, Infallible> = tune(&self.choices(), WORTH, peak, mean_ms);
        match tuned {
            Ok(tuned) => tuned,
            Err(never) => match never {},
        }
    }

    /// The highest rate that holds. A peak well below `best` is not searched: it is 0.
    fn peak(&self, best: f64, holds: impl Fn(f64) -> bool) -> f64 {
        let limit = f64::from(self.max_batch) / self.longest().as_secs_f64();
        let near = best * NEAR;
        if best > 0.0 && !holds(near) {
            return 0.0;
        }
        let (low, high) = if best > 0.0 { (near, best / NEAR) } else { (limit / 2.0, limit) };
        let trial = |rate| Ok::<_, Infallible>((rate <= limit * MOST && holds(rate)).then_some(rate));
        let bounds = Bounds { low, high, least: limit * LEAST, widening: 1.25, precision: PRECISION };
        bounds.highest(trial).ok().flatten().unwrap_or(0.0)
    }

    /// The times between requests, as multiples of their mean.
    fn gaps(&self) -> Vec<f64> {
        let batches = self.slo().as_secs_f64() / self.longest().as_secs_f64();
        let requests = (batches * f64::from(self.max_batch)) as u64 * FILLS;
        let mut random = random(self.seed, 0);
        (0..requests.clamp(REQUESTS[0], REQUESTS[1])).map(|_| Exp1.sample(&mut random)).collect()
    }

    /// The policy with these stages; `None`: the model cannot have it.
    fn policy(&self, staging: Staging) -> Option<(ModelSpec, ReplayedModel)> {
        let settings = self.settings.with_staging(staging)?;
        let profile = self.segments.merged(staging.stages)?;
        let ring = settings.ring(self.max_batch, false).ok()?;
        let model = PolicyModel {
            partition: PartitionId::default(),
            profile: profile.clone(),
            max_batch: self.max_batch,
            padded: false,
            queue_delay: Duration::ZERO,
            drop: false,
            queue_bound: QUEUE_BOUND,
            ring_slots: ring.map_or(0, |ring| ring.least),
            cores: None,
        };
        let total: Vec<Duration> = (1..=self.max_batch.max(1)).map(|rows| profile.total(rows, 0)).collect();
        let latency = LatencyProfile::from_table(total).ok()?;
        let spec = settings.spec(model.clone()).ok()?;
        let dispatch = DispatchPolicy::Adaptive { consolidate: false };
        let replayed = ReplayedModel {
            options: ModelOptions::new(latency, dispatch, DropPolicy::Adaptive),
            model,
            overlap: Some(self.overlap.clone()),
            cuts: Vec::new(),
            launch: self.launch,
            written: WrittenSettings::new(),
            shares: Vec::new(),
        };
        spec.build().is_ok().then_some((spec, replayed))
    }

    /// The outcome of the requests at this rate; `None`: more than `most_bad` are late or dropped.
    fn replay(
        &self,
        (spec, model): &(ModelSpec, ReplayedModel),
        rate: f64,
        gaps: &[f64],
        most_bad: u64,
    ) -> Option<ReplayCount> {
        let budget = self.slo();
        let mut at = 0.0;
        let arrival = |gap: &f64| {
            at += gap / rate;
            let at = Time::ZERO + Duration::from_secs_f64(at);
            PastArrival { at, budget, model: ModelId(0), size: 1, level: 0 }
        };
        let arrivals: Vec<PastArrival> = gaps.iter().map(arrival).collect();
        let models = vec![model.clone()];
        let replay = DeviceReplay { models, devices: 1, at_once: 1, wake_margin: Duration::ZERO, seed: self.seed };
        let counted = (gaps.len() as f64 * WARM_UP) as usize..arrivals.len();
        let counts = replay.run_within(&[Some(spec)], &arrivals, counted, most_bad)?;
        counts.first().copied()
    }
}
