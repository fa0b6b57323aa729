//! Answers the leader of a cluster when it asks which sub-cluster each model belongs to.

use downbeat_core::Duration;
use downbeat_roles::{PlanWanted, PlannedModel};

use crate::evaluation::Evaluation;
use crate::problem::{Model, Problem};
use crate::solve::{Method, Options, PlanError, plan};

/// Models move only for a plan that is more even by this much, as a share of the average
/// sub-cluster.
const WORTH_MOVING: f64 = 0.1;

/// Returns the sub-cluster of each model, as even by load and by memory as the limits allow. The
/// limits are the memory of a device and the number of allowed moves (Symphony appendix A). A
/// model's rate here is the time that devices are busy for its requests.
///
/// Models stay where they run, unless that breaks a limit or is less even by a tenth of the
/// average.
/// `elapsed` is the caller's clock: the time since the call. The search ends at `time_limit`. With
/// a clock that stands still, the answer follows from the question alone.
///
/// # Errors
/// If there is no such plan, or the search finds none in time.
pub fn divide(
    wanted: &PlanWanted,
    time_limit: Duration,
    elapsed: &dyn Fn() -> Duration,
) -> Result<Vec<u32>, PlanError> {
    let model = |model: &PlannedModel| Model {
        name: model.name.clone(),
        rate: model.load,
        static_memory: model.memory,
        dynamic_memory: 0,
        load_cost: 1.0,
        running: model.running.map(|group| group as usize),
    };
    let new = wanted.models.iter().filter(|model| model.running.is_none()).count();
    let problem = Problem {
        models: wanted.models.iter().map(model).collect(),
        sub_clusters: wanted.sub_clusters as usize,
        max_rate: None,
        max_memory: wanted.memory,
        memory_weight: 1.0,
        // A move is an unload and a load. A model that runs nowhere yet only has to be loaded.
        max_disruption: wanted.most_moves.map(|moves| 2.0 * f64::from(moves) + new as f64),
    };
    let running: Option<Vec<usize>> = problem.models.iter().map(|model| model.running).collect();
    let running = running.and_then(|running| Evaluation::of(&problem, running)).filter(Evaluation::is_feasible);
    let options = Options { time_limit, seed: 1, method: Method::Search };
    let best = plan(&problem, &options, elapsed)?.evaluation;
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
            memory: *memory,
            running: *running,
        };
        let models = models.iter().enumerate().map(model).collect();
        PlanWanted { number: 1, sub_clusters, models, memory: None, most_moves: None }
    }

    fn divided(wanted: &PlanWanted) -> Result<Vec<u32>, PlanError> {
        divide(wanted, Duration::from_millis(1_000), &|| Duration::ZERO)
    }

    #[test]
    fn appendix_a_load_and_memory_are_even() {
        let found = divided(&wanted(&[(4.0, 4, None), (4.0, 4, None), (1.0, 1, None), (1.0, 1, None)], 2)).unwrap();
        assert_ne!(found[0], found[1]);
        assert_ne!(found[2], found[3]);
    }

    #[test]
    fn models_stay_where_they_are_for_a_little_imbalance() {
        let mut question = wanted(&[(10.0, 1, Some(0)), (9.0, 1, Some(1)), (0.4, 1, Some(0)), (0.2, 1, Some(1))], 2);
        assert_eq!(divided(&question).unwrap(), [0, 1, 0, 1]);
        (question.models[1].load, question.models[2].load) = (0.5, 9.0);
        let found = divided(&question).unwrap();
        assert_ne!(found[0], found[2], "one sub-cluster had all of the load: {found:?}");
    }

    #[test]
    fn appendix_a_moves_are_bounded_and_new_models_are_none() {
        let mut question =
            wanted(&[(8.0, 1, Some(0)), (8.0, 1, Some(0)), (8.0, 1, Some(0)), (8.0, 1, Some(0)), (0.0, 1, None)], 2);
        question.most_moves = Some(1);
        let found = divided(&question).unwrap();
        assert_eq!(found[..4].iter().filter(|group| **group != 0).count(), 1, "{found:?}");
    }

    #[test]
    fn what_devices_do_not_hold_is_said() {
        let question = PlanWanted { memory: Some(10), ..wanted(&[(1.0, 8, None), (1.0, 8, None), (1.0, 8, None)], 2) };
        let said = divided(&question).unwrap_err().to_string();
        assert!(said.contains("more than devices of 10 B hold"), "{said}");
    }
}
