//! Loads that change, and the attainment and devices that follow.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::cluster::{BadAutoscaleOptions, ModelOptions};
use downbeat_sim::{Arrivals, BadArrivals, Load, ModelProfile, Pace, Policy, Simulation, random};
use rand::RngExt;
use rand_distr::StandardNormal;

use super::cluster::{LoopOptions, ScaledCluster, Second};

/// A cluster, its load over time, and the loop that scales it.
#[derive(Clone, Debug)]
pub struct AutoscalingScenario {
    /// The models, of equal popularity.
    pub models: Vec<ModelProfile>,
    /// How the scheduler dispatches and drops.
    pub policy: Policy,
    /// Pods at the start.
    pub pods: u32,
    /// Requests a second, all models together, where the pace has the factor 1.
    pub rate: f64,
    /// The change of the rate.
    pub pace: Pace,
    /// The length of the run.
    pub span: Duration,
    /// Standard deviation of an execution time, as a share of it.
    pub noise: f64,
    /// The loop.
    pub options: LoopOptions,
    /// Chooses all random numbers.
    pub seed: u64,
}

/// Why a scenario cannot run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BadScaling {
    /// Of the advisor.
    #[error(transparent)]
    Advisor(#[from] BadAutoscaleOptions),
    /// Of the load.
    #[error(transparent)]
    Arrivals(#[from] BadArrivals),
}

impl AutoscalingScenario {
    /// Plays the scenario. Panics, with the seed, if the scheduler breaks one of the simulator's rules.
    ///
    /// # Errors
    /// If an option or the rate is impossible.
    pub fn run(&self) -> Result<Scaled, BadScaling> {
        // As the server plans: two standard deviations above the mean.
        let planned = 1.0 + 2.0 * self.noise;
        let options = |model: &ModelProfile| {
            let (alpha_ms, beta_ms) = (model.alpha_ms * planned, model.beta_ms * planned);
            let profile = ModelProfile { alpha_ms, beta_ms, ..model.clone() }.latency(0);
            ModelOptions::new(profile, self.policy.dispatch(model.slo()), self.policy.drop())
        };
        let mut rng = random(self.seed, u64::MAX - 3);
        let mut draw = || ((1.0 + self.noise * rng.sample::<f64, _>(StandardNormal)) / planned).max(0.01);
        let executions: Arc<[f64]> = (0..DRAWS).map(|_| draw()).collect();
        let load = |model: &ModelProfile| Load {
            options: options(model),
            slo: model.slo(),
            arrivals: Arrivals::Poisson,
            rate: self.rate / self.models.len() as f64,
            pace: self.pace.clone(),
        };
        let simulation = Simulation {
            loads: self.models.iter().map(load).collect(),
            devices: self.options.hpa.max_pods,
            warm_up: Duration::ZERO,
            span: self.span,
            executions: vec![executions; self.models.len()],
            seed: self.seed,
            rehearsal: 0,
            order: self.policy.order(),
            ..Simulation::default()
        };
        let mut cluster = ScaledCluster::new(self.options.clone(), self.pods, self.span, self.seed)?;
        simulation.run_on(&mut cluster)?;
        Ok(Scaled { seconds: cluster.seconds().to_vec() })
    }
}

/// A run, second by second.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scaled {
    /// The seconds.
    pub seconds: Vec<Second>,
}

impl Scaled {
    fn between(&self, from: usize, until: usize) -> &[Second] {
        let until = until.min(self.seconds.len());
        &self.seconds[from.min(until)..until]
    }

    /// Share of the requests that ended in these seconds and were in time; 1 without requests.
    pub fn attainment(&self, from: usize, until: usize) -> f64 {
        let its = self.between(from, until);
        let (good, bad): (u64, u64) = its.iter().fold((0, 0), |(good, bad), one| (good + one.good, bad + one.bad));
        if good + bad == 0 { 1.0 } else { good as f64 / (good + bad) as f64 }
    }

    /// Devices that serve at the end of this second.
    pub fn devices(&self, second: usize) -> u32 {
        self.between(second, second + 1).first().map_or(0, |its| its.devices)
    }

    /// The seconds in which the number of pods changed, with the number from then on.
    pub fn changes(&self, from: usize) -> Vec<(usize, u32)> {
        let its = self.seconds.windows(2).zip(1..);
        its.filter(|(pair, at)| *at >= from && pair[0].pods != pair[1].pods && pair[1].pods > 0)
            .map(|(pair, at)| (at, pair[1].pods))
            .collect()
    }

    /// How often pods were given back and then taken again, or the other way round, from this second
    /// on.
    pub fn turns(&self, from: usize) -> usize {
        let pods: Vec<u32> =
            self.between(from, self.seconds.len()).iter().map(|its| its.pods).filter(|its| *its > 0).collect();
        let steps: Vec<bool> =
            pods.windows(2).filter(|pair| pair[0] != pair[1]).map(|pair| pair[1] > pair[0]).collect();
        steps.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

/// Different execution times of a batch of one size.
const DRAWS: usize = 1_000;

/// How a load changes in the scenarios that autoscaling is judged by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The load doubles once and stays.
    Doubles,
    /// The load halves once and stays.
    Halves,
    /// The load has the same mean for an hour. Every 10 s it has another rate: a normal factor with a
    /// standard deviation of 10%.
    Noise,
}

impl Change {
    /// All changes.
    pub const ALL: [Change; 3] = [Change::Doubles, Change::Halves, Change::Noise];
    /// The second in which a load doubles or halves.
    pub const AT_S: usize = 300;
    /// The seconds in which a noisy load may find its number of devices.
    pub const SETTLES_S: usize = 900;

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Change::Doubles => "doubles",
            Change::Halves => "halves",
            Change::Noise => "noise",
        }
    }

    /// A scenario. Eight devices serve four ResNet-50 of ten times the usual time (Symphony table 2; SLO 1
    /// s), at first with three quarters of their capacity. Pods start as `options` says.
    pub fn scenario(self, policy: &Policy, options: LoopOptions, seed: u64) -> AutoscalingScenario {
        const DEVICES: u32 = 8;
        let model = |n: u32| ModelProfile { name: format!("m{n}"), alpha_ms: 10.53, beta_ms: 50.72, slo_ms: 1000.0 };
        let models: Vec<ModelProfile> = (0..4).map(model).collect();
        // With a batch of 40: 472 ms, which leaves half of the SLO for waiting.
        let batch = 40.0;
        let capacity = f64::from(DEVICES) * 1000.0 * batch / (models[0].alpha_ms * batch + models[0].beta_ms);
        let second = |n: usize| Duration::from_millis(1000 * n as u64);
        let (factors, span) = match self {
            Change::Doubles => (vec![(second(Self::AT_S), 1.0), (second(3600), 2.0)], second(Self::AT_S + 600)),
            Change::Halves => (vec![(second(Self::AT_S), 1.0), (second(3600), 0.5)], second(Self::AT_S + 600)),
            Change::Noise => {
                let mut rng = random(seed, u64::MAX - 2);
                let mut factor = || -> f64 { 1.0 + 0.1 * rng.sample::<f64, _>(StandardNormal) };
                ((0..360).map(|_| (second(10), factor().clamp(0.5, 1.5))).collect(), second(3600))
            }
        };
        AutoscalingScenario {
            models,
            policy: policy.clone(),
            pods: DEVICES,
            rate: 0.75 * capacity,
            // The factors are positive and the lengths are not zero.
            pace: Pace::new(factors).unwrap_or_default(),
            span,
            noise: 0.05,
            options,
            seed,
        }
    }
}
