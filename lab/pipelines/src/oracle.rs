//! The oracle: the best fixed division, found by search on the very arrivals that are judged.

use downbeat_core::pipeline::Stage;
use downbeat_sim::pipelines::{Verdict, play_while};
use downbeat_sim::random;
use rand_distr::{Distribution, StandardNormal, StandardUniform};
use rand_pcg::Pcg64;

use crate::division::StepSlos;
use crate::run::Run;
use crate::workload::{PipelineWorkload, budgets};

/// A search of the best fixed shares of the SLOs.
#[derive(Clone, Copy, Debug)]
pub struct Oracle<'a> {
    /// The stage on which shares are tried.
    pub stage: &'a Stage,
    /// Shares that are tried beside those to begin with.
    pub tries: u32,
    /// Chooses the tries.
    pub seed: u64,
}

/// The best shares that were found.
#[derive(Clone, Debug)]
pub struct BestFixed {
    /// What they serve.
    pub verdict: Verdict,
    /// By pipeline and step: weights in proportion to the shares.
    pub weights: Vec<Vec<f64>>,
}

impl Oracle<'_> {
    /// Searches from the best of `starts`, near the best so far. Ends once the tries are used up, or
    /// at most `tolerated` requests are lost.
    ///
    /// # Panics
    /// If there is no start.
    pub fn search(&self, run: &Run<'_>, starts: &[Vec<Vec<f64>>], tolerated: u64) -> BestFixed {
        let mut best: Option<BestFixed> = None;
        let mut dice = random(self.seed, u64::from(run.workload.number));
        let mut run = run.clone();
        for try_number in 0..starts.len() + self.tries as usize {
            let known = best.as_ref().filter(|_| try_number >= starts.len());
            let weights = match known {
                Some(best) => near(&best.weights, &mut dice),
                None => starts[try_number].clone(),
            };
            let Some(verdict) = self.verdict(&run, &weights) else { continue };
            let lost = verdict.asked - verdict.good;
            best = Some(BestFixed { verdict, weights });
            if lost <= tolerated {
                break;
            }
            // Only shares that lose fewer are of interest.
            run.most_lost = lost - 1;
        }
        best.expect("there is a start, and it may lose every request")
    }

    fn verdict(&self, run: &Run<'_>, weights: &[Vec<f64>]) -> Option<Verdict> {
        let PipelineWorkload { pipelines, slos, .. } = run.workload;
        let each = pipelines.iter().zip(slos).zip(weights);
        let shares = each.map(|((pipeline, slo), weights)| budgets(&pipeline.shape, weights, *slo)).collect();
        let mut slos = StepSlos(shares);
        run.judge(|goes_on| play_while(self.stage, &run.arrivals, &mut slos, goes_on))
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
