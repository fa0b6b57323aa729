//! Random graphs of pipelines: which steps of a request start, and when.

use std::collections::BTreeSet;

use downbeat_core::pipeline::graph::{Graph, GraphError, StepState, StepTensors, Walk};

/// Random numbers from a seed.
struct Numbers(u64);

impl Numbers {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }
}

/// A graph of up to 12 steps in a random order. Tensors 0 and 1 are given. Returns the number of its
/// tensors too.
fn random_steps(numbers: &mut Numbers) -> (usize, Vec<StepTensors>) {
    let (mut tensors, mut steps) = (2, Vec::new());
    for _ in 0..1 + numbers.below(12) {
        let needs: BTreeSet<usize> = (0..=numbers.below(3)).map(|_| numbers.below(tensors)).collect();
        let makes: Vec<usize> = (tensors..=tensors + numbers.below(2)).collect();
        tensors += makes.len();
        steps.push(StepTensors { needs: needs.into_iter().collect(), makes });
    }
    for last in (1..steps.len()).rev() {
        steps.swap(last, numbers.below(last + 1));
    }
    (tensors, steps)
}

fn started(walk: &mut Walk<'_>) -> Vec<usize> {
    std::iter::from_fn(|| walk.poll_start()).collect()
}

#[test]
fn each_needed_step_runs_once_and_never_before_its_tensors() {
    for seed in 0..2_000 {
        let mut numbers = Numbers(seed);
        let (tensors, steps) = random_steps(&mut numbers);
        let graph = Graph::new(tensors, &[0, 1], steps.clone()).unwrap();
        let wanted = (numbers.below(2) == 1).then(|| vec![2 + numbers.below(tensors - 2)]);
        let mut walk = Walk::new(&graph, wanted.as_deref());
        let (mut there, mut runs) = (BTreeSet::from([0, 1]), vec![0; steps.len()]);
        let mut running = Vec::new();
        loop {
            for step in started(&mut walk) {
                assert!(steps[step].needs.iter().all(|tensor| there.contains(tensor)), "seed {seed}, step {step}");
                runs[step] += 1;
                running.push(step);
            }
            if running.is_empty() {
                break;
            }
            let ends = running.swap_remove(numbers.below(running.len()));
            walk.handle_finished(ends);
            // A second report of the same end changes nothing.
            walk.handle_finished(ends);
            there.extend(&steps[ends].makes);
        }
        assert!(walk.is_over(), "seed {seed}");
        for (step, runs) in runs.iter().enumerate() {
            let skipped = walk.state(step) == StepState::Skipped;
            assert_eq!(*runs, usize::from(!skipped), "seed {seed}, step {step}");
            assert!(!skipped || wanted.is_some(), "seed {seed}, step {step}");
        }
        for tensor in wanted.iter().flatten() {
            assert!(there.contains(tensor), "seed {seed}, tensor {tensor}");
        }
    }
}

#[test]
fn a_step_starts_as_soon_as_its_tensors_are_there() {
    for seed in 0..500 {
        let mut numbers = Numbers(seed);
        let (tensors, steps) = random_steps(&mut numbers);
        let graph = Graph::new(tensors, &[0, 1], steps.clone()).unwrap();
        let mut walk = Walk::new(&graph, None);
        let mut there = BTreeSet::from([0, 1]);
        let mut running = started(&mut walk);
        loop {
            for (step, StepTensors { needs, .. }) in steps.iter().enumerate() {
                let is_due = needs.iter().all(|tensor| there.contains(tensor));
                let has_started = matches!(walk.state(step), StepState::Running | StepState::Finished);
                assert_eq!(has_started, is_due, "seed {seed}, step {step}");
            }
            let Some(ends) = running.pop() else { break };
            walk.handle_finished(ends);
            there.extend(&steps[ends].makes);
            running.extend(started(&mut walk));
        }
    }
}

fn step(needs: &[usize], makes: &[usize]) -> StepTensors {
    StepTensors { needs: needs.to_vec(), makes: makes.to_vec() }
}

#[test]
fn steps_that_form_no_pipeline_are_refused() {
    assert_eq!(Graph::new(1, &[0], Vec::new()), Err(GraphError::Empty));
    let circle = vec![step(&[0], &[1]), step(&[1, 4], &[2]), step(&[2], &[3]), step(&[3], &[4]), step(&[4], &[5])];
    assert_eq!(Graph::new(6, &[0], circle), Err(GraphError::Circle(vec![1, 2, 3])));
    assert_eq!(Graph::new(1, &[], vec![step(&[0], &[0])]), Err(GraphError::Circle(vec![0])));
    let missing = vec![step(&[0, 2], &[1])];
    assert_eq!(Graph::new(3, &[0], missing), Err(GraphError::NothingMakes { step: 0, tensor: 2 }));
    let twice = vec![step(&[0], &[1]), step(&[0], &[1])];
    assert_eq!(Graph::new(2, &[0], twice), Err(GraphError::MadeTwice { step: 1, tensor: 1, other: Some(0) }));
    let given = vec![step(&[0], &[0])];
    assert_eq!(Graph::new(1, &[0], given), Err(GraphError::MadeTwice { step: 0, tensor: 0, other: None }));
}

#[test]
fn an_output_that_nobody_wants_is_not_computed() {
    // A fork: step 0, then steps 1 and 2, then step 3 after step 2.
    let steps = vec![step(&[0], &[1]), step(&[1], &[2]), step(&[1], &[3]), step(&[3], &[4])];
    let graph = Graph::new(5, &[0], steps).unwrap();
    let mut walk = Walk::new(&graph, Some(&[2]));
    assert_eq!(started(&mut walk), [0]);
    assert_eq!(walk.remaining().collect::<Vec<_>>(), [0, 1]);
    walk.handle_finished(0);
    assert_eq!(started(&mut walk), [1]);
    walk.handle_finished(1);
    assert!(walk.is_over());
    assert_eq!((walk.state(2), walk.state(3)), (StepState::Skipped, StepState::Skipped));
    assert_eq!((graph.maker(0), graph.maker(4)), (None, Some(3)));
}
