//! Random workloads of pipelines.

use std::fmt;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::pipeline::{Pipeline, PipelineArrival, Shape, Stage, StepCost, StepModel};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, ModelProfile, Pace, random};
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

/// A random workload of pipelines. The seed and the number determine the workload.
///
/// 1 to 3 pipelines are chains of 2 to 5 steps, or a fork of 2 or 3 branches and a join. A step runs
/// a published model (35 of a 1080 Ti, 37 of an A100). In three of ten cases the step is Python-like,
/// with little gain from batches. A quarter of the steps share their model with an earlier
/// pipeline. The published models share one pool of devices, or each has its own pool. SLOs are 2.5
/// to 10 times the longest path alone. Arrivals are Poisson, bursty (Gamma 0.05 to 0.5) or in steps.
#[derive(Clone, Debug)]
pub struct PipelineWorkload {
    /// The number among the seed's workloads, from 1.
    pub number: u32,
    /// By pool: devices.
    pub pools: Vec<u32>,
    /// By model: profile and pool.
    pub models: Vec<(LatencyProfile, usize)>,
    /// The pipelines.
    pub pipelines: Vec<Pipeline>,
    /// By pipeline: the time from an arrival to its deadline.
    pub slos: Vec<Duration>,
    /// By pipeline: requests a second at load 1. There the busiest pool has no idle time, if each
    /// step has an equal share of the SLO, half of it for waiting.
    pub rates: Vec<f64>,
    /// The arrivals at load 1.
    pub arrivals: Vec<PipelineArrival>,
    /// Two loads at which goodput is compared: one below 1 and one above.
    pub loads: [f64; 2],
    process: String,
}

const PUBLISHED: [&str; 2] = [
    include_str!("../../experiments/profiles/profiles_1080ti.csv"),
    include_str!("../../experiments/profiles/profiles_a100.csv"),
];
const MAX_BATCH: u32 = 64;
/// `alpha` and `beta` of Python-like steps, in milliseconds.
const PYTHON_MS: [(f64, f64); 2] = [(0.2, 3.0), (0.05, 1.0)];

struct Dice(Pcg64);

impl Dice {
    fn between(&mut self, (least, most): (f64, f64)) -> f64 {
        let share: f64 = StandardUniform.sample(&mut self.0);
        least + (most - least) * share
    }

    fn log_between(&mut self, (least, most): (f64, f64)) -> f64 {
        self.between((least.ln(), most.ln())).exp()
    }

    fn chance(&mut self, share: f64) -> bool {
        self.between((0.0, 1.0)) < share
    }

    fn whole(&mut self, least: usize, most: usize) -> usize {
        (self.between((least as f64, most as f64 + 1.0)) as usize).min(most)
    }
}

/// The models of a workload while it is drawn.
struct Cast {
    models: Vec<(LatencyProfile, usize)>,
    pools: usize,
    /// The pool of all published models; `None`: each has its own.
    shared: Option<usize>,
    published: Vec<ModelProfile>,
}

impl Cast {
    fn draw(dice: &mut Dice) -> Cast {
        let text = PUBLISHED[dice.whole(0, 1)];
        let published = text.lines().skip(1).filter_map(|line| line.parse().ok()).collect();
        let shared = dice.chance(0.5).then_some(0);
        Cast { models: Vec::new(), pools: usize::from(shared.is_some()), shared, published }
    }

    /// The model of a step. `known`: so many models are of earlier pipelines.
    fn step(&mut self, dice: &mut Dice, known: usize) -> usize {
        if known > 0 && dice.chance(0.25) {
            return dice.whole(0, known - 1);
        }
        let is_python = dice.chance(0.3);
        let (alpha, beta) = if is_python {
            (dice.log_between(PYTHON_MS[0]), dice.log_between(PYTHON_MS[1]))
        } else {
            let model = &self.published[dice.whole(0, self.published.len() - 1)];
            (model.alpha_ms, model.beta_ms)
        };
        let pool = self.shared.filter(|_| !is_python).unwrap_or_else(|| {
            self.pools += 1;
            self.pools - 1
        });
        let profile = LatencyProfile::linear_ms(alpha, beta, MAX_BATCH).expect("published profiles are positive");
        self.models.push((profile, pool));
        self.models.len() - 1
    }
}

fn shape(dice: &mut Dice) -> Shape {
    if dice.chance(0.7) {
        return Shape::chain(dice.whole(2, 5));
    }
    let branches = dice.whole(2, 3);
    let mut after = vec![vec![]];
    after.extend((0..branches).map(|_| vec![0]));
    after.push((1..=branches).collect());
    Shape::new(after).expect("a fork and a join have no circle")
}

impl PipelineWorkload {
    /// Draws the workload of this seed and number, with so many arrivals.
    pub fn draw(seed: u64, number: u32, requests: usize) -> PipelineWorkload {
        let mut dice = Dice(random(seed, u64::from(number)));
        let mut cast = Cast::draw(&mut dice);
        let (mut pipelines, mut slos, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..dice.whole(1, 3) {
            let (shape, known) = (shape(&mut dice), cast.models.len());
            let models: Vec<usize> = (0..shape.len()).map(|_| cast.step(&mut dice, known)).collect();
            let alone: Vec<Duration> = models.iter().map(|model| cast.models[*model].0.latency(1)).collect();
            let rest = shape.rest(&alone);
            let longest = shape.first().map(|step| alone[step] + rest[step]).max().unwrap_or(Duration::ZERO);
            slos.push(Duration::from_secs_f64(longest.as_secs_f64() * dice.log_between((2.5, 10.0))));
            rates.push(dice.log_between((0.3, 1.0)));
            pipelines.push(Pipeline { shape, models });
        }
        let mut workload = PipelineWorkload {
            number,
            pools: vec![1; cast.pools],
            models: cast.models,
            pipelines,
            slos,
            rates,
            arrivals: Vec::new(),
            loads: [dice.between((0.5, 1.0)), dice.between((1.0, 3.0))],
            process: String::new(),
        };
        workload.scale(&mut dice);
        workload.draw_arrivals(&mut dice, seed, requests);
        workload
    }

    /// Chooses devices for the demand, and rates at which the busiest pool has no idle time.
    fn scale(&mut self, dice: &mut Dice) {
        let wanted = dice.log_between((1.0, 12.0));
        let all: f64 = self.demands().iter().sum();
        self.rates.iter_mut().for_each(|rate| *rate *= wanted / all);
        for (pool, demand) in self.demands().into_iter().enumerate() {
            self.pools[pool] = ((demand * dice.between((1.0, 1.6))).ceil() as u32).max(1);
        }
        let busiest = self.demands().into_iter().zip(&self.pools).map(|(demand, devices)| demand / f64::from(*devices));
        let busiest = busiest.fold(0.0, f64::max);
        self.rates.iter_mut().for_each(|rate| *rate /= busiest);
    }

    /// By model: requests a second at load 1, and the seconds of device time that each takes.
    fn work(&self) -> Vec<(f64, f64)> {
        let mut work: Vec<(f64, f64)> = self.models.iter().map(|_| (0.0, f64::INFINITY)).collect();
        for ((pipeline, slo), rate) in self.pipelines.iter().zip(&self.slos).zip(&self.rates) {
            let equal = budgets(&pipeline.shape, &vec![1.0; pipeline.shape.len()], *slo);
            for (model, budget) in pipeline.models.iter().zip(equal) {
                work[*model].0 += rate;
                work[*model].1 = work[*model].1.min(budget.as_secs_f64());
            }
        }
        for ((_, cost), (profile, _)) in work.iter_mut().zip(&self.models) {
            let batch = profile.largest_up_to(MAX_BATCH, Duration::from_secs_f64(*cost / 2.0)).max(1);
            *cost = profile.latency(batch).as_secs_f64() / f64::from(batch);
        }
        work
    }

    /// By pool: devices that are busy at load 1.
    fn demands(&self) -> Vec<f64> {
        let mut demands = vec![0.0; self.pools.len()];
        for ((rate, cost), (_, pool)) in self.work().into_iter().zip(&self.models) {
            demands[*pool] += rate * cost;
        }
        demands
    }

    /// By pool: devices that are busy at load 1 if all batches have the largest size.
    fn least_demands(&self) -> Vec<f64> {
        let mut demands = vec![0.0; self.pools.len()];
        for ((rate, _), (profile, pool)) in self.work().into_iter().zip(&self.models) {
            demands[*pool] += rate * profile.latency(MAX_BATCH).as_secs_f64() / f64::from(MAX_BATCH);
        }
        demands
    }

    /// By model: requests a second that the model's part of its devices can serve in the largest
    /// batches.
    pub(crate) fn throughputs(&self) -> Vec<f64> {
        let demands = self.least_demands();
        let throughput = |((rate, _), (_, pool)): ((f64, f64), &(LatencyProfile, usize))| {
            rate * f64::from(self.pools[*pool]) / demands[*pool]
        };
        self.work().into_iter().zip(&self.models).map(throughput).collect()
    }

    fn draw_arrivals(&mut self, dice: &mut Dice, seed: u64, requests: usize) {
        let kind = dice.whole(0, 2);
        let shape = (dice.log_between((0.05, 0.5)) * 100.0).round() / 100.0;
        let arrivals = if kind == 1 { Arrivals::Gamma(shape) } else { Arrivals::Poisson };
        let span = requests as f64 / self.rates.iter().sum::<f64>();
        let factors: Vec<f64> = (0..8).map(|_| dice.log_between((0.3, 2.0))).collect();
        let pace = Pace::normalised(Duration::from_secs_f64(span / 8.0), &factors).unwrap_or_default();
        for (pipeline, (rate, slo)) in self.rates.iter().zip(&self.slos).enumerate() {
            let stream = u64::from(self.number) << 8 | pipeline as u64;
            let Ok(mut times) = arrivals.stream(*rate, seed ^ 0x9199e, stream) else { continue };
            if kind == 2 {
                times = times.paced(&pace);
            }
            for _ in 0..(requests as f64 * rate / self.rates.iter().sum::<f64>()).ceil() as usize {
                self.arrivals.push(PipelineArrival { at: times.next_arrival(), budget: *slo, pipeline });
            }
        }
        self.arrivals.sort_by_key(|arrival| arrival.at);
        self.process = match kind {
            0 => "poisson".to_owned(),
            1 => arrivals.to_string(),
            _ => "steps".to_owned(),
        };
    }

    /// The stage on which a rule plays.
    pub fn stage(&self, dispatch: &DispatchPolicy, drop: DropPolicy, early_leave: bool) -> Stage {
        let (work, demands) = (self.work(), self.demands());
        let model = |((rate, cost), (profile, pool)): ((f64, f64), &(LatencyProfile, usize))| {
            let share = (100.0 * rate * cost / demands[*pool]).round().clamp(1.0, 100.0) as u8;
            let dispatch = if early_leave { dispatch.clone().of_step(share) } else { dispatch.clone() };
            StepModel { options: ModelOptions::new(profile.clone(), dispatch, drop), behaviour: None, pool: *pool }
        };
        let models = work.into_iter().zip(&self.models).map(model).collect();
        Stage { pools: self.pools.clone(), models, pipelines: self.pipelines.clone(), ..Stage::default() }
    }

    /// By pipeline and step: the numbers that fixed weights follow from, at this load.
    pub fn costs(&self, load: f64) -> Vec<Vec<StepCost>> {
        let demands = self.demands();
        let cost = |model: &usize| {
            let (profile, pool) = &self.models[*model];
            let devices = f64::from(self.pools[*pool]);
            let load = (load * demands[*pool] / devices).min(1.0);
            StepCost { alone: profile.latency(1), devices, load }
        };
        self.pipelines.iter().map(|pipeline| pipeline.models.iter().map(cost).collect()).collect()
    }
}

/// By step: a fixed part of the SLO in proportion to the weights. On each path the parts add up to
/// the SLO at most.
pub(crate) fn budgets(shape: &Shape, weights: &[f64], slo: Duration) -> Vec<Duration> {
    let rest = shape.rest(weights);
    let mut through = vec![0.0f64; shape.len()];
    for &step in shape.order() {
        let before = shape.steps()[step].after.iter().map(|first| through[*first]).fold(0.0, f64::max);
        through[step] = before + weights[step];
    }
    let part = |step: usize| weights[step] / (through[step] + rest[step]);
    (0..shape.len()).map(|step| Duration::from_secs_f64(slo.as_secs_f64() * part(step))).collect()
}

/// Describes the workload in one line.
impl fmt::Display for PipelineWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<usize> = self.pipelines.iter().map(|pipeline| pipeline.shape.len()).collect();
        let PipelineWorkload { number, models, pools, process, loads: [below, above], .. } = self;
        write!(
            f,
            "workload {number}: pipelines of {steps:?} steps, {} models on pools of {pools:?} devices, {process}, loads {below:.2} and {above:.2}",
            models.len()
        )
    }
}
