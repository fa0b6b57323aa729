//! Models whose last backend is lost without a word.

use downbeat_core::Duration;
use downbeat_core::cluster::{DropReason, Reject};
use downbeat_roles::*;

use crate::scheduler_node::{LOST_AFTER, P, World, model, ms, numbers, offer};

/// The names in each list of models that the scheduler sent.
fn lists<'a>(said: &'a [Message<P>]) -> Vec<Vec<&'a str>> {
    let list = |said: &'a Message<P>| if let Message::Models(models) = said { Some(models) } else { None };
    let names = |models: &'a Vec<ServedModel>| models.iter().map(|model| model.model.as_str()).collect();
    said.iter().filter_map(list).map(names).collect()
}

#[test]
fn requests_of_a_lost_model_are_refused_and_frontends_learn_of_it() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    world.backend(4, vec![], offer(1, vec![model("n", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], Duration::MAX);
    world.disconnect(backend);
    assert_eq!(world.refused(frontend), [(0, Refusal::Lost)]);
    // One request without a deadline, and one whose deadline is still far.
    world.ask(frontend, &[0], Duration::MAX);
    world.ask(frontend, &[1], ms(100_000));
    world.pass(LOST_AFTER.saturating_mul(10).saturating_sub(ms(1)));
    assert_eq!(world.heard(frontend), [], "it may come back");
    world.pass(ms(2));
    let said = world.heard(frontend);
    assert_eq!(lists(&said), [["n"]]);
    let refused =
        said.iter().filter_map(|said| if let Message::Refused(refused) = said { Some(refused) } else { None });
    let mut refused: Vec<(u64, Refusal)> = refused.flatten().copied().collect();
    refused.sort_by_key(|(number, _)| *number);
    assert_eq!(refused, [0, 1].map(|number| (number, Refusal::Dropped(DropReason::ModelRemoved))));
    assert_eq!(world.node.requests(), 0);
    world.ask(frontend, &[2], Duration::MAX);
    assert_eq!(world.refused(frontend), [(2, Refusal::Rejected(Reject::UnknownModel))]);
    // A backend that comes after all is as welcome as any other.
    let late = world.backend(3, vec![], offer(1, vec![model("m", ms(5), 1)]));
    assert_eq!(lists(&world.heard(frontend)), [["m", "n"]]);
    world.ask(frontend, &[3], Duration::MAX);
    assert_eq!(world.plans(late).iter().map(numbers).collect::<Vec<_>>(), [[3]]);
}

#[test]
fn what_waits_for_a_model_runs_if_somebody_comes_back_with_it() {
    let mut world = World::leading();
    let frontend = world.frontend(2);
    for number in 0..3 {
        let backend = world.backend(10 + number, vec![], offer(1, vec![model("m", ms(5), 1)]));
        if number > 0 {
            assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[number]]);
        }
        // Each time the wait begins anew.
        world.pass(LOST_AFTER.saturating_mul(6));
        world.disconnect(backend);
        world.heard(frontend);
        world.ask(frontend, &[number + 1], Duration::MAX);
        world.pass(LOST_AFTER.saturating_mul(6));
        assert_eq!(world.heard(frontend), []);
    }
}

#[test]
fn a_model_that_another_backend_has_stays() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let other = world.backend(3, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.disconnect(backend);
    world.heard(frontend);
    world.pass(LOST_AFTER.saturating_mul(20));
    assert_eq!(world.heard(frontend), []);
    world.ask(frontend, &[0], Duration::MAX);
    assert_eq!(world.plans(other).len(), 1);
}
