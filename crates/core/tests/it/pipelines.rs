//! Pipelines: requests flow through steps under one deadline, and weights are rehearsed.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::pipeline::*;
use downbeat_core::{BatchId, DeviceId, Duration, LatencyProfile, Time};
use proptest::prelude::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn step_model(alpha: f64, beta: f64, pool: usize, dispatch: DispatchPolicy) -> StepModel {
    let profile = LatencyProfile::linear_ms(alpha, beta, 32).unwrap();
    StepModel { options: ModelOptions::new(profile, dispatch, DropPolicy::WindowDrop), behaviour: None, pool }
}

fn every(gap: Duration, count: u64, budget: Duration) -> Vec<PipelineArrival> {
    let at = |number| Time::ZERO + gap.saturating_mul(number);
    (0..count).map(|number| PipelineArrival { at: at(number), budget, pipeline: 0 }).collect()
}

fn ends(stage: &Stage, arrivals: &[PipelineArrival], shares: &[Shares]) -> Vec<End> {
    let (mut replay, mut by, mut ends) = (Replay::new(stage, 100).unwrap(), shares.to_vec(), Vec::new());
    while replay.step(arrivals, &mut by) {
        ends.extend(std::iter::from_fn(|| replay.poll_end()));
    }
    ends
}

fn done(ends: &[End]) -> usize {
    ends.iter().filter(|end| end.outcome == Outcome::Done).count()
}

/// Two steps of which the second is short of devices.
fn uneven(dispatch: &DispatchPolicy) -> Stage {
    Stage {
        pools: vec![1, 1],
        models: vec![step_model(0.1, 2.0, 0, dispatch.clone()), step_model(1.0, 10.0, 1, dispatch.clone())],
        pipelines: vec![Pipeline { shape: Shape::chain(2), models: vec![0, 1] }],
        ..Stage::default()
    }
}

fn weights(stage: &Stage, weights: &[f64]) -> Vec<Shares> {
    vec![Shares::with_weights(&stage.pipelines[0].shape, weights.to_vec(), &[Duration::ZERO; 2])]
}

/// With a weight of 9, a deferred first step waits for nine tenths of the time. Leaving early, it
/// waits no longer than for a batch that keeps up.
#[test]
fn a_deferred_step_that_keeps_up_leaves_early() {
    let served = |dispatch: DispatchPolicy| {
        let stage = uneven(&dispatch);
        // The rate of the first requests is not known yet.
        done(&ends(&stage, &every(ms(4), 1_000, ms(100)), &weights(&stage, &[9.0, 1.0])))
    };
    let (late, early) = (served(DispatchPolicy::Deferred), served(DispatchPolicy::Deferred.of_step(100)));
    assert!(late < 940, "{late} of 1000: the first of each batch has 10 ms left for a step of 11 ms");
    assert!(early > 980, "{early} of 1000");
}

#[test]
fn a_rehearsal_finds_the_weights_that_lose_less() {
    let stage = uneven(&DispatchPolicy::Deferred);
    let bad = weights(&stage, &[4.0, 1.0]);
    let arrivals = every(Duration::from_micros(2_000), 1_500, ms(60));
    let decide = |seed| {
        let options = RehearsalOptions::default();
        let mut rehearsal = WeightRehearsal::new(stage.clone(), bad.clone(), options, seed).unwrap();
        arrivals.iter().for_each(|arrival| rehearsal.arrival(*arrival));
        while rehearsal.step(100) == 100 {}
        assert_eq!(rehearsal.trials(), 1);
        rehearsal.poll_decision().expect("there are better weights")
    };
    let better = decide(7);
    let (before, after) = (done(&ends(&stage, &arrivals, &bad)), done(&ends(&stage, &arrivals, &better)));
    assert!(before < 1_000 && after > 1_300, "{before} and {after} of 1500 with {:?}", better[0].weights());
    assert_eq!(decide(7), better, "the seed decides");
}

#[test]
fn where_nothing_is_lost_nothing_changes_and_one_try_is_enough() {
    let stage = uneven(&DispatchPolicy::Eager);
    let options = RehearsalOptions { stretch: 512, ..RehearsalOptions::default() };
    let mut rehearsal = WeightRehearsal::new(stage.clone(), weights(&stage, &[1.0, 4.0]), options, 1).unwrap();
    every(ms(20), 512, ms(60)).into_iter().for_each(|arrival| rehearsal.arrival(arrival));
    let used = rehearsal.step(u64::MAX);
    assert_eq!((rehearsal.trials(), rehearsal.poll_decision()), (1, None));
    assert!(used < 2 * 4 * 512, "{used} events: the present weights at two rates");
    every(ms(20), 100, ms(60)).into_iter().for_each(|arrival| rehearsal.arrival(arrival));
    assert_eq!(rehearsal.step(1_000), 0, "too few requests are new");
}

#[test]
fn requests_without_a_deadline_need_no_rehearsal() {
    let stage = uneven(&DispatchPolicy::Eager);
    let mut rehearsal =
        WeightRehearsal::new(stage.clone(), weights(&stage, &[1.0, 1.0]), RehearsalOptions::default(), 1).unwrap();
    every(ms(1), 1_000, Duration::MAX).into_iter().for_each(|arrival| rehearsal.arrival(arrival));
    assert_eq!(rehearsal.step(1_000), 0);
}

#[test]
fn stages_that_name_nothing_are_refused() {
    let stage = uneven(&DispatchPolicy::Eager);
    let refused = |change: fn(&mut Stage)| {
        let mut stage = stage.clone();
        change(&mut stage);
        Flow::new(&stage).unwrap_err()
    };
    let no_pool = refused(|stage| stage.models[1].pool = 2);
    assert_eq!(no_pool.to_string(), "model 1 is in pool 2, but there are only 2 pools, counted from 0");
    let no_model = refused(|stage| stage.pipelines[0].models[1] = 5);
    assert_eq!(no_model, StageError::Model { pipeline: 0, step: 1 });
    let steps = refused(|stage| stage.pipelines[0].shape = Shape::chain(3));
    assert_eq!(steps, StageError::Steps { pipeline: 0, steps: 3, models: 2 });
    let many = refused(|stage| {
        stage.pipelines[0] = Pipeline { shape: Shape::chain(1_025), models: vec![0; 1_025] };
    });
    assert_eq!(many.to_string(), "pipeline 0 has more than 1024 steps");
}

#[test]
fn stray_completions_are_ignored() {
    let stage = uneven(&DispatchPolicy::Eager);
    let (mut flow, mut by) = (Flow::new(&stage).unwrap(), weights(&stage, &[1.0, 1.0]));
    flow.handle_arrival(Time::ZERO, 0, Time::ZERO + ms(100), &mut by);
    let launch = flow.poll_launch().unwrap();
    for (pool, device, batch) in
        [(9, DeviceId(0), launch.batch), (0, DeviceId(7), launch.batch), (0, DeviceId(0), BatchId(77))]
    {
        flow.handle_completion(Time::ZERO, pool, device, batch, &mut by);
    }
    let end = Time::ZERO + launch.expected;
    flow.handle_completion(end, launch.pool, launch.device, launch.batch, &mut by);
    flow.handle_completion(end, launch.pool, launch.device, launch.batch, &mut by);
    let second = flow.poll_launch().unwrap();
    assert_eq!((second.model, flow.poll_launch()), (1, None));
    flow.handle_completion(end + second.expected, second.pool, second.device, second.batch, &mut by);
    assert_eq!(flow.poll_end().unwrap().outcome, Outcome::Done);
    assert_eq!(flow.poll_end(), None);
}

prop_compose! {
    fn stages()(
        pools in prop::collection::vec(1..3u32, 1..4),
        models in prop::collection::vec((0..4usize, 0.1..3.0f64, 0.1..10.0f64, 0..3u8), 1..5),
        graphs in prop::collection::vec(
            prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(any::<prop::sample::Index>(), 0..3)), 1..6),
            1..4,
        ),
    ) -> Stage {
        let models: Vec<StepModel> = models.into_iter().map(|(pool, alpha, beta, dispatch)| {
            let dispatch = match dispatch {
                0 => DispatchPolicy::Deferred,
                1 => DispatchPolicy::Deferred.of_step(60),
                _ => DispatchPolicy::Eager,
            };
            step_model(alpha, beta, pool % pools.len(), dispatch)
        }).collect();
        let pipelines = graphs.into_iter().map(|steps| {
            let after = steps.iter().enumerate().map(|(step, (_, after))| {
                after.iter().filter(|_| step > 0).map(|after| after.index(step)).collect()
            });
            let shape = Shape::new(after.collect()).unwrap();
            Pipeline { shape, models: steps.iter().map(|(model, _)| model.index(models.len())).collect() }
        }).collect();
        Stage { pools, models, pipelines, ..Stage::default() }
    }
}

proptest! {
    /// For all graphs, loads and batches, each request ends exactly once and none is late. The same
    /// arrivals give the same ends.
    #[test]
    fn each_request_ends_once_and_none_is_late(
        stage in stages(),
        requests in prop::collection::vec((0..4_000u64, 1..120u64, any::<prop::sample::Index>()), 1..120),
        weight in 0.1..5.0f64,
    ) {
        let mut at = Time::ZERO;
        let arrivals: Vec<PipelineArrival> = requests.iter().map(|(gap, budget, pipeline)| {
            at += Duration::from_micros(*gap);
            PipelineArrival { at, budget: ms(*budget), pipeline: pipeline.index(stage.pipelines.len()) }
        }).collect();
        let shares: Vec<Shares> = stage.pipelines.iter().map(|pipeline| {
            let alone: Vec<Duration> = pipeline.models.iter().map(|model| stage.models[*model].options.profiles.first().latency(1)).collect();
            let weights = (0..pipeline.shape.len()).map(|step| weight.powi(step as i32)).collect();
            Shares::with_weights(&pipeline.shape, weights, &alone)
        }).collect();
        let first = ends(&stage, &arrivals, &shares);
        let mut numbers: Vec<u64> = first.iter().map(|end| end.request).collect();
        numbers.sort_unstable();
        prop_assert!(numbers.into_iter().eq(0..arrivals.len() as u64));
        for end in first.iter().filter(|end| end.outcome == Outcome::Done) {
            let arrival = arrivals[end.request as usize];
            let came = Time::ZERO + arrival.at.since(arrivals[0].at);
            prop_assert!(end.at <= came + arrival.budget, "{:?} is late", end);
        }
        prop_assert_eq!(ends(&stage, &arrivals, &shares), first);
    }
}

/// A rehearsal whose first trial has found weights for the stage of [`uneven`]. `bad`: the rule's shares.
fn rehearsed(stage: &Stage, bad: &[Shares], arrivals: &[PipelineArrival]) -> (WeightRehearsal, Vec<Shares>) {
    let mut rehearsal = WeightRehearsal::new(stage.clone(), bad.to_vec(), RehearsalOptions::default(), 7).unwrap();
    rehearsal.set_stage(stage.clone(), bad.to_vec(), &[Some(0)]).unwrap();
    arrivals.iter().for_each(|arrival| rehearsal.arrival(*arrival));
    while rehearsal.step(100) == 100 {}
    let better = rehearsal.poll_decision().expect("there are better weights");
    (rehearsal, better)
}

#[test]
fn weights_that_were_found_stay_when_profiles_and_pipelines_change() {
    let stage = uneven(&DispatchPolicy::Deferred);
    let bad = weights(&stage, &[4.0, 1.0]);
    let arrivals = every(Duration::from_micros(2_000), 1_500, ms(60));
    let (mut rehearsal, better) = rehearsed(&stage, &bad, &arrivals);
    assert_eq!(rehearsal.found(), [true]);
    let TrialOutcome { asked, lost, lost_before } = rehearsal.last_trial().unwrap();
    assert!(asked == 3_000 && lost < lost_before, "{lost} of {lost_before}");

    // A pipeline comes before the one that is there, whose second model becomes slower.
    let mut other = stage.clone();
    other.models[1] = step_model(1.0, 12.0, 1, DispatchPolicy::Deferred);
    other.pipelines.insert(0, Pipeline { shape: Shape::chain(1), models: vec![0] });
    let of_rule = vec![Shares::with_weights(&Shape::chain(1), vec![1.0], &[ms(2)]), bad[0].clone()];
    rehearsal.set_stage(other.clone(), of_rule.clone(), &[None, Some(0)]).unwrap();
    assert_eq!(rehearsal.found(), [false, true]);
    arrivals.iter().for_each(|arrival| rehearsal.arrival(PipelineArrival { pipeline: 1, ..*arrival }));
    while rehearsal.step(100) == 100 {}
    assert_eq!(rehearsal.trials(), 2);
    let now = rehearsal.poll_decision().map_or_else(|| better[0].weights().to_vec(), |now| now[1].weights().to_vec());
    assert!(now[0] < now[1], "{now:?}");

    // The pipeline leaves, and comes back as a new one: it has the shares of the rule, and no past.
    rehearsal.set_stage(other.clone(), of_rule.clone(), &[Some(0), None]).unwrap();
    assert_eq!(rehearsal.found(), [false, false]);
    assert_eq!(rehearsal.step(100), 0);
    let wrong = Stage { pools: Vec::new(), ..other };
    assert!(rehearsal.set_stage(wrong, of_rule, &[Some(0), Some(1)]).is_err());
}

#[test]
fn a_model_that_leaves_ends_the_trial() {
    let stage = uneven(&DispatchPolicy::Deferred);
    let bad = weights(&stage, &[4.0, 1.0]);
    let mut rehearsal = WeightRehearsal::new(stage.clone(), bad.clone(), RehearsalOptions::default(), 7).unwrap();
    every(ms(2), 1_500, ms(60)).into_iter().for_each(|arrival| rehearsal.arrival(arrival));
    assert_eq!(rehearsal.step(5_000), 5_000, "a trial is under way");
    rehearsal.set_stage(stage.clone(), bad.clone(), &[Some(0)]).unwrap();
    assert_eq!(rehearsal.step(5_000), 5_000, "the same pipelines: the trial goes on");
    rehearsal.set_stage(Stage::default(), Vec::new(), &[]).unwrap();
    assert_eq!((rehearsal.step(5_000), rehearsal.trials(), rehearsal.poll_decision()), (0, 0, None));
}

/// The weights that a trial found suit a load that is over. At the new load the rule's shares lose
/// nothing.
#[test]
fn a_pipeline_goes_back_to_the_rule_that_is_better() {
    let stage = uneven(&DispatchPolicy::Deferred);
    let arrivals = every(Duration::from_micros(2_000), 1_500, ms(60));
    let (mut rehearsal, found) = rehearsed(&stage, &weights(&stage, &[4.0, 1.0]), &arrivals);
    // The short step is now the second.
    let turned = Stage { models: vec![stage.models[1].clone(), stage.models[0].clone()], ..stage.clone() };
    let turned = Stage { pools: vec![1, 1], ..turned };
    let rule = weights(&stage, &[found[0].weights()[1], found[0].weights()[0]]);
    rehearsal.set_stage(turned, rule.clone(), &[Some(0)]).unwrap();
    arrivals.iter().for_each(|arrival| rehearsal.arrival(*arrival));
    while rehearsal.step(100) == 100 {}
    let decided = rehearsal.poll_decision().expect("the former weights lose more");
    let TrialOutcome { lost, .. } = rehearsal.last_trial().unwrap();
    assert!(decided[0].weights()[0] > decided[0].weights()[1], "{:?}", decided[0].weights());
    assert!(rehearsal.found() == [false] && decided == rule || lost > 0, "no try beats a rule that loses nothing");
}
