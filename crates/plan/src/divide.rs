//! Answers the leader of a cluster when it asks which sub-cluster each model belongs to.

use downbeat_core::Duration;
use downbeat_roles::{Divided, MoveLimit, PlanWanted, PlannedModel};

use crate::evaluation::Evaluation;
use crate::infeasible::obvious;
use crate::problem::{Model, Problem};
use crate::solve::{Method, Options, PlanError, plan};

/// Models move only for a plan that is more even by this much, as a share of the average
/// sub-cluster.
const WORTH_MOVING: f64 = 0.1;

/// Fewer sub-clusters than there are must leave this part of each limit unused. A load that varies
/// around a limit would otherwise change their number with each plan.
const SPARE_FOR_FEWER: f64 = 0.1;

/// Returns the sub-cluster of each model, as even by load and by memory as the limits allow
/// (Symphony appendix A). The limits are the memory of a device, the requests of a sub-cluster and
/// the cost of moves. A model's rate here is the time that devices are busy for its requests.
///
/// The number of sub-clusters is the least that the limits and the question allow. The more devices share their models, the better they share the load (§4.4).
///
/// Models stay where they run, unless that breaks a limit or is less even by a tenth of the
/// average.
/// `elapsed` is the caller's clock: the time since the call. The search ends at `time_limit`. With
/// a clock that stands still, the answer follows from the question alone.
///
/// If no plan keeps the limit of requests, the largest number of sub-clusters is divided without it:
/// its models are served all the same.
///
/// # Errors
/// If there is no such plan, or the search finds none in time: the reason for the largest number of
/// sub-clusters.
pub fn divide(wanted: &PlanWanted, time_limit: Duration, elapsed: &dyn Fn() -> Duration) -> Result<Divided, PlanError> {
    let least = wanted.least.max(1);
    let most = wanted.most.max(least);
    // Each try may take half of the time that is left.
    let part = |problem: &Problem, share: u64| {
        let spent = elapsed();
        let left = Duration::from_nanos(time_limit.saturating_sub(spent).as_nanos() / share);
        division(problem, left, &|| elapsed().saturating_sub(spent))
    };
    for sub_clusters in least..most {
        let spare = if sub_clusters < wanted.present { SPARE_FOR_FEWER } else { 0.0 };
        let problem = problem(wanted, sub_clusters, spare);
        // A sum says at once for most numbers that they are too few.
        if obvious(&problem).is_empty()
            && let Ok(models) = part(&problem, 2)
        {
            return Ok(Divided { sub_clusters, models, too_many_requests: None });
        }
    }
    let limited = problem(wanted, most, 0.0);
    let is_limited = limited.max_rate.is_some();
    match part(&limited, if is_limited { 2 } else { 1 }) {
        Ok(models) => Ok(Divided { sub_clusters: most, models, too_many_requests: None }),
        Err(reason) if is_limited => {
            let models = part(&Problem { max_rate: None, ..limited }, 1)?;
            Ok(Divided { sub_clusters: most, models, too_many_requests: Some(reason.to_string()) })
        }
        Err(reason) => Err(reason),
    }
}

/// The problem of so many sub-clusters, which leave a part of each limit unused.
fn problem(wanted: &PlanWanted, sub_clusters: u32, spare: f64) -> Problem {
    let seconds = |model: &PlannedModel| match wanted.moves {
        MoveLimit::LoadTime(_) => model.load_time.as_secs_f64(),
        MoveLimit::Any | MoveLimit::Models(_) => 1.0,
    };
    let model = |model: &PlannedModel| Model {
        name: model.name.clone(),
        rate: model.load,
        requests: model.requests,
        static_memory: model.memory,
        dynamic_memory: model.run_memory,
        load_cost: seconds(model),
        // The number of moves counts what is loaded already, too.
        loaded_in: match wanted.moves {
            MoveLimit::LoadTime(_) => model.loaded_in.iter().map(|group| *group as usize).collect(),
            MoveLimit::Any | MoveLimit::Models(_) => Vec::new(),
        },
        running: model.running.map(|group| group as usize),
    };
    let models: Vec<Model> = wanted.models.iter().map(model).collect();
    let new: f64 = models.iter().filter(|model| model.running.is_none()).map(|model| model.load_cost).sum();
    // A move is an unload and a load. A model that runs nowhere yet only has to be loaded.
    let allowed = match wanted.moves {
        MoveLimit::Any => None,
        MoveLimit::Models(most) => Some(f64::from(most)),
        MoveLimit::LoadTime(most) => Some(most.as_secs_f64()),
    };
    let used = 1.0 - spare;
    Problem {
        models,
        sub_clusters: sub_clusters as usize,
        max_rate: wanted.most_requests.map(|most| f64::from(most) * used),
        max_memory: wanted.memory.map(|memory| (memory as f64 * used) as u64),
        runs: wanted.runs,
        memory_weight: 1.0,
        max_disruption: allowed.map(|allowed| 2.0 * allowed + new),
    }
}

/// The sub-cluster of each model.
fn division(problem: &Problem, time_limit: Duration, elapsed: &dyn Fn() -> Duration) -> Result<Vec<u32>, PlanError> {
    let running: Option<Vec<usize>> = problem.models.iter().map(|model| model.running).collect();
    let running = running.and_then(|running| Evaluation::of(problem, running)).filter(Evaluation::is_feasible);
    let options = Options { time_limit, seed: 1, method: Method::Search };
    let best = plan(problem, &options, elapsed)?.evaluation;
    let stays = running.filter(|running| running.objective <= best.objective + WORTH_MOVING);
    Ok(stays.unwrap_or(best).assignment.into_iter().map(|group| group as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(models: &[(f64, u64, Option<u32>)], sub_clusters: u32) -> PlanWanted {
        let model = |(number, (load, memory, running)): (usize, &(f64, u64, Option<u32>))| PlannedModel {
            name: format!("m{number}"),
            load: *load,
            requests: *load,
            memory: *memory,
            run_memory: 0,
            load_time: Duration::from_millis(1_000),
            loaded_in: running.iter().copied().collect(),
            running: *running,
        };
        let models = models.iter().enumerate().map(model).collect();
        let (least, most, present) = (sub_clusters, sub_clusters, sub_clusters);
        let (memory, runs, most_requests) = (None, None, None);
        PlanWanted { number: 1, least, most, present, models, memory, runs, most_requests, moves: MoveLimit::Any }
    }

    fn divided(wanted: &PlanWanted) -> Result<Divided, PlanError> {
        divide(wanted, Duration::from_millis(1_000), &|| Duration::ZERO)
    }

    fn models(wanted: &PlanWanted) -> Vec<u32> {
        divided(wanted).unwrap().models
    }

    #[test]
    fn appendix_a_load_and_memory_are_even() {
        let found = models(&wanted(&[(4.0, 4, None), (4.0, 4, None), (1.0, 1, None), (1.0, 1, None)], 2));
        assert_ne!(found[0], found[1]);
        assert_ne!(found[2], found[3]);
    }

    #[test]
    fn models_stay_where_they_are_for_a_little_imbalance() {
        let mut question = wanted(&[(10.0, 1, Some(0)), (9.0, 1, Some(1)), (0.4, 1, Some(0)), (0.2, 1, Some(1))], 2);
        assert_eq!(models(&question), [0, 1, 0, 1]);
        (question.models[1].load, question.models[2].load) = (0.5, 9.0);
        let found = models(&question);
        assert_ne!(found[0], found[2], "one sub-cluster had all of the load: {found:?}");
    }

    #[test]
    fn appendix_a_moves_are_bounded_and_new_models_are_none() {
        let mut question =
            wanted(&[(8.0, 1, Some(0)), (8.0, 1, Some(0)), (8.0, 1, Some(0)), (8.0, 1, Some(0)), (0.0, 1, None)], 2);
        question.moves = MoveLimit::Models(1);
        let found = models(&question);
        assert_eq!(found[..4].iter().filter(|group| **group != 0).count(), 1, "{found:?}");
    }

    #[test]
    fn appendix_a_moves_cost_the_time_of_their_loads() {
        // The first two are heavy, and the last two are quick to load. Ten seconds are enough for these.
        let mut question = wanted(&[(8.0, 1, Some(0)), (8.0, 1, Some(0)), (4.0, 1, Some(0)), (4.0, 1, Some(0))], 2);
        for (model, seconds) in question.models.iter_mut().zip([60, 60, 5, 5]) {
            model.load_time = Duration::from_millis(seconds * 1_000);
        }
        question.moves = MoveLimit::LoadTime(Duration::from_millis(10_000));
        assert_eq!(models(&question), [0, 0, 1, 1]);
        // Sub-cluster 1 has all that the first model needs already. Only its unload counts.
        question.models[0].loaded_in = vec![0, 1];
        question.moves = MoveLimit::LoadTime(Duration::from_millis(35_000));
        let found = models(&question);
        assert_eq!((found[0], found[1]), (1, 0), "{found:?}");
    }

    #[test]
    fn appendix_a_the_requests_of_a_sub_cluster_are_bounded() {
        // By load the first model is as much as the others together, and by requests it is nothing.
        let mut question = wanted(&[(6.0, 3, None), (2.0, 1, None), (2.0, 1, None), (2.0, 1, None)], 2);
        for (model, requests) in question.models.iter_mut().zip([1.0, 100.0, 100.0, 100.0]) {
            model.requests = requests;
        }
        assert_eq!(models(&question).iter().filter(|group| **group == models(&question)[0]).count(), 1);
        question.most_requests = Some(201);
        let found = models(&question);
        assert_eq!(found.iter().filter(|group| **group == found[0]).count(), 2, "{found:?}");
        question.most_requests = Some(120);
        let found = divided(&question).unwrap();
        let said = found.too_many_requests.unwrap_or_default();
        assert!(said.contains("requests/s"), "{said}");
        assert_eq!(found.models.iter().filter(|group| **group == found.models[0]).count(), 1, "even by load alone");
    }

    #[test]
    fn appendix_a_the_largest_run_of_a_sub_cluster_needs_memory() {
        let mut question = wanted(&[(1.0, 4, None), (1.0, 4, None), (1.0, 4, None)], 1);
        question.memory = Some(18);
        question.models.iter_mut().zip([6, 3, 0]).for_each(|(model, run)| model.run_memory = run);
        assert_eq!(models(&question), [0, 0, 0], "12 for the models and 6 for the largest run");
        question.runs = Some(100);
        assert!(divided(&question).is_err(), "the runs take 9 beside each other");
    }

    #[test]
    fn there_are_as_few_sub_clusters_as_limits_allow() {
        let mut question = wanted(&[(1.0, 4, None), (1.0, 4, None), (1.0, 4, None), (1.0, 4, None)], 4);
        (question.least, question.present) = (1, 0);
        for (memory, sub_clusters) in [(None, 1), (Some(16), 1), (Some(15), 2), (Some(8), 2), (Some(7), 4)] {
            question.memory = memory;
            assert_eq!(divided(&question).unwrap().sub_clusters, sub_clusters, "{memory:?}");
        }
        question.memory = Some(3);
        let said = divided(&question).unwrap_err().to_string();
        assert!(said.contains("fits on no device"), "{said}");
    }

    #[test]
    fn fewer_sub_clusters_come_only_with_room_to_spare() {
        let mut question = wanted(&[(1.0, 4, Some(0)), (1.0, 4, Some(1)), (1.0, 4, Some(0)), (1.0, 4, Some(1))], 2);
        question.least = 1;
        for (memory, sub_clusters) in [(16, 2), (17, 2), (18, 1)] {
            question.memory = Some(memory);
            assert_eq!(divided(&question).unwrap().sub_clusters, sub_clusters, "{memory}");
        }
    }

    #[test]
    fn what_devices_do_not_hold_is_said() {
        let question = PlanWanted { memory: Some(10), ..wanted(&[(1.0, 8, None), (1.0, 8, None), (1.0, 8, None)], 2) };
        let said = divided(&question).unwrap_err().to_string();
        assert!(said.contains("more than devices of 10 B hold"), "{said}");
    }
}
