//! The rules that are compared.

use downbeat_core::Duration;
use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
use downbeat_core::pipeline::{Division, RehearsalOptions, Shares, Stage};
use downbeat_sim::pipelines::{Rehearsing, Verdict, play_rehearsed, play_while};

use crate::division::{Instants, NoDeadline, StepSlos, WholeDeadline};
use crate::nexus::nexus_budgets;
use crate::pard::{Pard, PardOptions};
use crate::run::Run;
use crate::workload::{PipelineWorkload, budgets};

/// When batches of steps leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Batches {
    /// As late as the local deadline allows (Symphony).
    Deferred,
    /// As soon as a device is free.
    Eager,
}

/// How the time of a request is divided among its steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// An SLO for each step: equal shares.
    Equal,
    /// No deadline for steps, and no drops (Triton).
    NoDeadline,
    /// The end-to-end deadline at each step.
    Whole,
    /// An SLO for each step: shares by `l(1)`.
    ByAlone,
    /// An SLO for each step: Nexus' division.
    Nexus,
    /// PARD, with early leave.
    Pard,
    /// Equal shares as instants from the arrival on.
    EqualInstants,
    /// The fixed rule of `core::pipeline::Shares`, with admission, early leave and a second try.
    Fixed,
    /// Rehearsed weights, same rule.
    Rehearsed,
}

/// The best of a grid on seed 1001: patience of 0 to 2.5, and margins of 0.05, 0.3 and infinity. With
/// the second order, PARD served less in each case.
const PARD: PardOptions = PardOptions { patience: 1.5, newest: 0.1, margin: f64::INFINITY };

impl Rule {
    /// All rules, the reference first.
    pub const ALL: [Rule; 9] = [
        Rule::Equal,
        Rule::NoDeadline,
        Rule::Whole,
        Rule::ByAlone,
        Rule::Nexus,
        Rule::Pard,
        Rule::EqualInstants,
        Rule::Fixed,
        Rule::Rehearsed,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Equal => "an SLO for each step, equal shares",
            Rule::NoDeadline => "no deadline for steps (Triton)",
            Rule::Whole => "only the end-to-end deadline",
            Rule::ByAlone => "an SLO for each step, shares by l(1)",
            Rule::Nexus => "Nexus' division",
            Rule::Pard => "PARD, tuned, early leave",
            Rule::EqualInstants => "equal shares, as instants from the arrival on",
            Rule::Fixed => "fixed weights, admission, early leave, second try",
            Rule::Rehearsed => "rehearsed weights, same rule",
        }
    }

    /// The stage that the rule plays on.
    pub fn stage(self, workload: &PipelineWorkload, batches: Batches) -> Stage {
        let dispatch = match (self, batches) {
            (Rule::NoDeadline, _) | (_, Batches::Eager) => DispatchPolicy::Eager,
            (_, Batches::Deferred) => DispatchPolicy::Deferred,
        };
        let drop = match self {
            Rule::NoDeadline => DropPolicy::None,
            Rule::Fixed | Rule::Rehearsed => DropPolicy::Adaptive,
            _ => dispatch.suitable_drop(),
        };
        // On seed 1001, PARD's capacity with deferred batches rose from 1.06 to 1.71 by early leave.
        workload.stage(&dispatch, drop, matches!(self, Rule::Pard | Rule::Fixed | Rule::Rehearsed))
    }

    /// Plays the run, and has it judged. `None`: more than [`Run::most_lost`] requests were lost.
    pub fn judge(self, run: &Run<'_>) -> Option<Verdict> {
        let Run { workload, batches, load, ref arrivals, .. } = *run;
        let stage = self.stage(workload, batches);
        if self != Rule::Rehearsed {
            return run.judge(|goes_on| play_while(&stage, arrivals, &mut *self.division(workload, load), goes_on));
        }
        let options = RehearsalOptions::default();
        let rehearsing = Rehearsing { options, lent: 400, seed: u64::from(workload.number) };
        run.judge(|goes_on| play_rehearsed(&stage, arrivals, fixed(workload, load), rehearsing, goes_on))
    }

    fn division(self, workload: &PipelineWorkload, load: f64) -> Box<dyn Division> {
        match self {
            Rule::NoDeadline => Box::new(NoDeadline),
            Rule::Whole => Box::new(WholeDeadline),
            Rule::Equal => Box::new(StepSlos(shares(workload, |_, _| 1.0))),
            Rule::ByAlone => Box::new(StepSlos(shares(workload, |pipeline, step| alone(workload, pipeline, step)))),
            Rule::Nexus => Box::new(StepSlos(nexus(workload, load))),
            Rule::Pard => {
                let models = workload.models.iter().map(|(profile, _)| profile.latency(1)).zip(workload.throughputs());
                Box::new(Pard::new(workload.pipelines.clone(), models, PARD))
            }
            Rule::EqualInstants => Box::new(equal_instants(workload)),
            Rule::Fixed | Rule::Rehearsed => Box::new(fixed(workload, load)),
        }
    }
}

fn fixed(workload: &PipelineWorkload, load: f64) -> Vec<Shares> {
    let costs = workload.costs(load);
    workload.pipelines.iter().zip(costs).map(|(pipeline, costs)| Shares::fixed(&pipeline.shape, &costs)).collect()
}

pub(crate) fn alone(workload: &PipelineWorkload, pipeline: usize, step: usize) -> f64 {
    workload.models[workload.pipelines[pipeline].models[step]].0.latency(1).as_secs_f64()
}

fn shares(workload: &PipelineWorkload, weight: impl Fn(usize, usize) -> f64) -> Vec<Vec<Duration>> {
    let each = workload.pipelines.iter().zip(&workload.slos).enumerate();
    each.map(|(number, (pipeline, slo))| {
        let weights: Vec<f64> = (0..pipeline.shape.len()).map(|step| weight(number, step)).collect();
        budgets(&pipeline.shape, &weights, *slo)
    })
    .collect()
}

pub(crate) fn nexus(workload: &PipelineWorkload, load: f64) -> Vec<Vec<Duration>> {
    let each = workload.pipelines.iter().zip(&workload.slos).zip(&workload.rates);
    each.map(|((pipeline, slo), rate)| {
        let profiles: Vec<_> = pipeline.models.iter().map(|model| &workload.models[*model].0).collect();
        nexus_budgets(&pipeline.shape, &profiles, rate * load, *slo)
    })
    .collect()
}

/// The latest instant at which each step may end, if the steps after it have equal shares.
fn equal_instants(workload: &PipelineWorkload) -> Instants {
    let each = workload.pipelines.iter().zip(shares(workload, |_, _| 1.0)).zip(&workload.slos);
    Instants(
        each.map(|((pipeline, budgets), slo)| {
            pipeline.shape.rest(&budgets).into_iter().map(|rest| slo.saturating_sub(rest)).collect()
        })
        .collect(),
    )
}
