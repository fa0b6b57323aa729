//! The weights of pipelines' steps, which the thread of the rehearsal tries.

use std::collections::BTreeMap;

use downbeat_core::cluster::Behaviour;
use downbeat_core::pipeline::{PipelineArrival, RehearsalOptions, Shares, Stage, TrialOutcome, WeightRehearsal};
use downbeat_core::{Duration, ModelId, Time};

/// The most arrivals that a request of several items counts for.
const MOST_ROWS: u32 = 64;

/// The pipelines in service, as the rehearsal plays them.
pub struct PipelineStage {
    /// By pipeline: its number, which stays while its definition does.
    pub numbers: Vec<u64>,
    /// The models, devices and pipelines. The rehearsal fills in the models' behaviours.
    pub stage: Stage,
    /// By model of the stage: the queue in the scheduler. `None`: a device policy makes the batches.
    pub queues: Vec<Option<ModelId>>,
    /// By pipeline: its shares by the fixed rule at the present load.
    pub rule: Vec<Shares>,
}

/// The decision of a trial.
pub struct WeightDecision {
    /// The requests that the trial replayed and lost.
    pub outcome: TrialOutcome,
    /// By number of the pipeline: the division of its time; `None`: that of the fixed rule.
    pub divisions: Vec<(u64, Option<Shares>)>,
}

/// The rehearsal of weights, while there are pipelines.
#[derive(Default)]
pub struct StepWeights {
    rehearsal: Option<WeightRehearsal>,
    /// By pipeline of the rehearsal: its number.
    numbers: Vec<u64>,
}

impl StepWeights {
    /// Whether there are pipelines.
    pub fn is_on(&self) -> bool {
        self.rehearsal.is_some()
    }

    /// Finished trials.
    pub fn trials(&self) -> u64 {
        self.rehearsal.as_ref().map_or(0, WeightRehearsal::trials)
    }

    /// Replaces the pipelines. `behaviours` has the behaviours of queues that a trial found.
    pub fn set_stage(&mut self, stage: Option<PipelineStage>, behaviours: &BTreeMap<ModelId, Option<Behaviour>>) {
        let Some(PipelineStage { numbers, mut stage, queues, rule }) = stage else {
            *self = StepWeights::default();
            return;
        };
        for (model, queue) in stage.models.iter_mut().zip(queues) {
            model.behaviour = queue.and_then(|queue| behaviours.get(&queue).copied().flatten());
        }
        let former = |number: &u64| self.numbers.iter().position(|known| known == number);
        let former: Vec<Option<usize>> = numbers.iter().map(former).collect();
        let set = match &mut self.rehearsal {
            Some(rehearsal) => rehearsal.set_stage(stage, rule, &former),
            None => {
                let new = WeightRehearsal::new(stage.clone(), rule.clone(), RehearsalOptions::default(), 1);
                new.and_then(|mut rehearsal| {
                    // With the shares of the rule, later trials can go back to the rule.
                    rehearsal.set_stage(stage, rule, &former)?;
                    self.rehearsal = Some(rehearsal);
                    Ok(())
                })
            }
        };
        match set {
            Ok(()) => self.numbers = numbers,
            // The weights stay as they are.
            Err(error) => tracing::error!(%error, "the pipelines cannot be rehearsed"),
        }
    }

    /// Notes that a request came. A request of several items counts as so many requests.
    pub fn asked(&mut self, at: Time, budget: Duration, pipeline: u64, rows: u32) {
        let number = self.numbers.iter().position(|known| *known == pipeline);
        if let (Some(rehearsal), Some(pipeline)) = (&mut self.rehearsal, number) {
            for _ in 0..rows.clamp(1, MOST_ROWS) {
                rehearsal.arrival(PipelineArrival { at, budget, pipeline });
            }
        }
    }

    /// Goes on for at most `events` replayed events. Returns their number.
    pub fn step(&mut self, events: u64) -> u64 {
        self.rehearsal.as_mut().map_or(0, |rehearsal| rehearsal.step(events))
    }

    /// The decision of the last trial, if it has changed weights.
    pub fn poll_decision(&mut self) -> Option<WeightDecision> {
        let rehearsal = self.rehearsal.as_mut()?;
        let (shares, outcome) = (rehearsal.poll_decision()?, rehearsal.last_trial()?);
        let divisions = self.numbers.iter().zip(shares).zip(rehearsal.found());
        let divisions = divisions.map(|((number, shares), found)| (*number, found.then(|| shares.clone())));
        Some(WeightDecision { outcome, divisions: divisions.collect() })
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::LatencyProfile;
    use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
    use downbeat_core::pipeline::{Pipeline, Shape, StepModel};

    use super::*;

    /// Two steps of which the second is short of devices, and the first has most of the time.
    fn stage(number: u64) -> PipelineStage {
        let model = |alpha, beta, pool| {
            let profile = LatencyProfile::linear_ms(alpha, beta, 32).unwrap();
            let options = ModelOptions::new(profile, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
            StepModel { options, behaviour: None, pool }
        };
        let pipelines = vec![Pipeline { shape: Shape::chain(2), models: vec![0, 1] }];
        let models = vec![model(0.1, 2.0, 0), model(1.0, 10.0, 1)];
        let stage = Stage { pools: vec![1, 1], models, pipelines, ..Stage::default() };
        let shares = Shares::with_weights(&Shape::chain(2), vec![4.0, 1.0], &[Duration::ZERO; 2]);
        PipelineStage { numbers: vec![number], stage, queues: vec![None, None], rule: vec![shares] }
    }

    fn ask(weights: &mut StepWeights, pipeline: u64) {
        for request in 0..1_500 {
            let at = Time::ZERO + Duration::from_millis(2).saturating_mul(request);
            weights.asked(at, Duration::from_millis(60), pipeline, 1);
        }
    }

    #[test]
    fn better_weights_are_found_and_told_by_number() {
        let mut weights = StepWeights::default();
        assert_eq!((weights.is_on(), weights.step(256)), (false, 0), "no pipeline, no work");
        weights.set_stage(Some(stage(7)), &BTreeMap::new());
        ask(&mut weights, 7);
        while weights.step(256) == 256 {}
        let WeightDecision { outcome, divisions: found } = weights.poll_decision().expect("the rule's weights are bad");
        let [(7, Some(found))] = &found[..] else { panic!("{found:?}") };
        let found = found.weights();
        assert!(found[0] < 4.0 * found[1] && outcome.lost < outcome.lost_before, "{found:?}, {outcome:?}");
        assert!(weights.poll_decision().is_none());
    }

    #[test]
    fn pipelines_that_leave_during_a_trial_end_it() {
        let mut weights = StepWeights::default();
        weights.set_stage(Some(stage(7)), &BTreeMap::new());
        ask(&mut weights, 7);
        assert_eq!(weights.step(1_000), 1_000);
        weights.set_stage(Some(stage(8)), &BTreeMap::new());
        assert_eq!((weights.step(1_000), weights.trials()), (0, 0), "another pipeline, with no arrivals yet");
        ask(&mut weights, 7);
        assert_eq!(weights.step(1_000), 0, "arrivals of the pipeline that left");
        ask(&mut weights, 8);
        assert_eq!(weights.step(1_000), 1_000);
        weights.set_stage(None, &BTreeMap::new());
        assert_eq!((weights.is_on(), weights.step(1_000)), (false, 0));
    }

    #[test]
    fn a_stage_that_names_nothing_changes_nothing() {
        let mut weights = StepWeights::default();
        let mut wrong = stage(7);
        wrong.stage.pools.clear();
        weights.set_stage(Some(wrong), &BTreeMap::new());
        assert!(!weights.is_on());
    }
}
