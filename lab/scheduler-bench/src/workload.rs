//! The workload of the scheduler: models, devices, and a stream of requests.

use downbeat_bench::load::seed::Stream;
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Request};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use rand::RngExt;
use rand_distr::Exp1;
use rand_pcg::Pcg64;

/// Fixed and growing part of `l(b)`: ResNet50 as in Symphony's table 2.
const PROFILE: (Duration, Duration) = (Duration::from_nanos(1_053_000), Duration::from_nanos(5_072_000));
/// As in Symphony's figure 13.
pub(super) const SLO: Duration = Duration::from_millis(100);

/// Equally popular models of one profile, and the devices that serve them.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Models.
    pub models: u32,
    /// Devices.
    pub devices: u32,
    /// Requests a second, all models together.
    pub rate: f64,
    /// `l(b)` of every model.
    pub profile: LatencyProfile,
    /// How each model is scheduled.
    pub options: ModelOptions,
    /// Chooses the arrivals.
    pub seed: u64,
}

impl Workload {
    /// ResNet-like models (Symphony figure 13: 20 of them, SLO 100 ms) at no load yet.
    pub fn new(
        models: u32,
        devices: u32,
        max_batch: u32,
        dispatch: DispatchPolicy,
        drop: DropPolicy,
        seed: u64,
    ) -> Self {
        let table = (1..=u64::from(max_batch)).map(|b| PROFILE.0.saturating_mul(b) + PROFILE.1).collect();
        let profile = LatencyProfile::from_table(table);
        let profile = profile.unwrap_or_else(|e| panic!("the benchmark's own latency profile: {e}"));
        let options = ModelOptions::new(profile.clone(), dispatch, drop);
        Workload { models, devices, rate: 0.0, profile, options, seed }
    }

    /// Returns the requests a second that the devices serve in staggered batches (Symphony §3.3). A
    /// model has `n = devices / models` devices, and `(1 + 1/n) * l(b)` must fit into the SLO. With
    /// few devices a model the batches hold one request.
    pub fn capacity(&self) -> f64 {
        let profile = &self.profile;
        let per_model = f64::from(self.devices) / f64::from(self.models);
        let seconds = |batch| profile.latency(batch).as_secs_f64();
        let fits = |batch: &u32| (1.0 + 1.0 / per_model) * seconds(*batch) <= SLO.as_secs_f64();
        let batch = (1..=self.options.max_batch).rev().find(fits).unwrap_or(1);
        f64::from(self.devices) * f64::from(batch) / seconds(batch)
    }

    /// The requests, in order of arrival.
    pub fn requests(&self) -> Requests {
        Requests {
            random: Stream::Arrivals.random(self.seed),
            mean_gap_ns: 1e9 / self.rate,
            at_ns: 0.0,
            models: self.models,
        }
    }
}

/// An endless stream of requests. Poisson arrivals with a model drawn for each are the same as
/// independent Poisson arrivals for every model.
#[derive(Clone, Debug)]
pub struct Requests {
    random: Pcg64,
    mean_gap_ns: f64,
    at_ns: f64,
    models: u32,
}

impl Requests {
    /// Returns the models of the requests.
    pub fn models(&self) -> impl Iterator<Item = ModelId> {
        (0..self.models).map(ModelId)
    }

    /// Draws the next request, with its arrival. Its id is its deadline in nanoseconds: nothing
    /// else has to be known when the request comes back.
    pub fn draw(&mut self) -> (Time, Request) {
        let gap: f64 = self.random.sample(Exp1);
        self.at_ns += gap * self.mean_gap_ns;
        let at = Time::from_nanos(self.at_ns as u64);
        let model = ModelId(self.random.random_range(0..self.models));
        let deadline = at + SLO;
        let id = RequestId(deadline.as_nanos());
        (at, Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 })
    }
}
