//! The oracle: the best fixed division, found by search on the very arrivals that are judged.

use downbeat_core::pipeline::{PipelineArrival, Stage};
use downbeat_sim::pipelines::{PipelineJudge, play};
use downbeat_sim::random;
use rand_distr::{Distribution, StandardNormal, StandardUniform};
use rand_pcg::Pcg64;

use crate::division::StepSlos;
use crate::workload::{PipelineWorkload, budgets};

/// A search of the best fixed shares of the SLOs.
#[derive(Clone, Copy, Debug)]
pub struct Oracle<'a> {
    /// The workload.
    pub workload: &'a PipelineWorkload,
    /// The stage on which shares are tried.
    pub stage: &'a Stage,
    /// Arrivals that do not count.
    pub warm_up: usize,
    /// Shares that are tried beside those to begin with.
    pub tries: u32,
    /// Chooses the tries.
    pub seed: u64,
}

/// The best shares that were found.
#[derive(Clone, Debug)]
pub struct BestFixed {
    /// Requests in time, as a share of all.
    pub goodput: f64,
    /// By pipeline and step: weights in proportion to the shares.
    pub weights: Vec<Vec<f64>>,
}

impl Oracle<'_> {
    /// Searches from the best of `starts`, near the best so far, until the tries are used up or
    /// `enough` requests are in time.
    pub fn search(&self, arrivals: &[PipelineArrival], starts: &[Vec<Vec<f64>>], enough: f64) -> BestFixed {
        let mut best = BestFixed { goodput: -1.0, weights: Vec::new() };
        let mut dice = random(self.seed, u64::from(self.workload.number));
        for try_number in 0..starts.len() as u32 + self.tries {
            if best.goodput >= enough {
                break;
            }
            let weights = match starts.get(try_number as usize) {
                Some(start) => start.clone(),
                None => near(&best.weights, &mut dice),
            };
            let goodput = self.goodput(arrivals, &weights);
            if goodput > best.goodput {
                best = BestFixed { goodput, weights };
            }
        }
        best
    }

    fn goodput(&self, arrivals: &[PipelineArrival], weights: &[Vec<f64>]) -> f64 {
        let PipelineWorkload { pipelines, slos, .. } = self.workload;
        let each = pipelines.iter().zip(slos).zip(weights);
        let shares = each.map(|((pipeline, slo), weights)| budgets(&pipeline.shape, weights, *slo)).collect();
        let ends = play(self.stage, arrivals, &mut StepSlos(shares)).expect("a drawn stage is whole");
        let verdict = PipelineJudge::new(arrivals, self.warm_up).judge(&ends);
        verdict.expect("each request ends once").goodput()
    }
}

fn near(weights: &[Vec<f64>], dice: &mut Pcg64) -> Vec<Vec<f64>> {
    let even = |dice: &mut Pcg64| -> f64 { StandardUniform.sample(dice) };
    let reach = if even(dice) < 0.5 { 0.25 } else { 0.8 };
    let all = even(dice) < 0.5;
    let (pipeline, step) = (even(dice), even(dice));
    let mut near = weights.to_vec();
    let chosen = (pipeline * near.len() as f64) as usize;
    for (number, weights) in near.iter_mut().enumerate() {
        let only = (step * weights.len() as f64) as usize;
        for (index, weight) in weights.iter_mut().enumerate() {
            if all || number == chosen && index == only {
                let normal: f64 = StandardNormal.sample(dice);
                *weight *= (reach * normal).exp();
            }
        }
    }
    near
}
