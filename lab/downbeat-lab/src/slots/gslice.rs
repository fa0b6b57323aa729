//! GSLICE on each device by itself: every model has a share of every device.

use super::layout::{SlotLayout, SlotModel, SlotProblem};
use downbeat_core::device::spatial::{Claim, FairShare};

use super::mix::MeasuredMix;

/// Returns the steps of each model on every device, by its knee (GSLICE §3.2.3); `None` if there
/// are more models than steps.
pub(super) fn by_knees(mix: &MeasuredMix) -> Option<Vec<u32>> {
    let claims: Vec<Claim> = (0..mix.problem.models.len()).map(|model| Claim::of(f64::from(mix.knee(model)))).collect();
    FairShare { units: mix.problem.steps, grain: 1, spread: true }.divide(&claims)
}

/// Returns the steps of each model on every device, as self-tuning shares them at best (GSLICE
/// §3.2.2). Each step goes to the model with the least throughput for its rate. `None` if the steps
/// do not suffice for every model's SLO.
pub(super) fn tuned(problem: &SlotProblem) -> Option<Vec<u32>> {
    let holds = |model: &SlotModel, steps: u32| {
        let rate = model.rate / f64::from(problem.devices);
        let alone = SlotProblem { models: vec![SlotModel { rate, ..model.clone() }], devices: 1, ..problem.clone() };
        alone.evaluate(&SlotLayout(vec![vec![steps]])).map_or(0.0, |plan| plan.factor)
    };
    let mut shares: Vec<(u32, f64)> = Vec::new();
    for model in &problem.models {
        let least = (1..=problem.steps).map(|steps| (steps, holds(model, steps))).find(|(_, factor)| *factor > 0.0)?;
        shares.push(least);
    }
    let used: u32 = shares.iter().map(|(steps, _)| steps).sum();
    for _ in 0..problem.steps.checked_sub(used)? {
        let poorest = (0..shares.len()).min_by(|a, b| shares[*a].1.total_cmp(&shares[*b].1))?;
        let steps = shares[poorest].0 + 1;
        shares[poorest] = (steps, holds(&problem.models[poorest], steps));
    }
    Some(shares.into_iter().map(|(steps, _)| steps).collect())
}
