//! Clients of frontends load and unload models of all backends.

use crate::scheduler_node::{World, model, ms, offer};
use downbeat_core::Duration;
use downbeat_roles::*;

/// A backend with model `m` loaded, which loads `m` and `n` on orders.
fn explicit() -> Offer {
    let loadable =
        |name: &str| Loadable { model: name.into(), memory: 1, run_memory: 0, load_time: None, failed: None };
    Offer { repository: vec![loadable("m"), loadable("n")], ..offer(1, vec![model("m", ms(5), 1)]) }
}

/// The orders that a backend got.
fn orders(world: &mut World, backend: NodeId) -> Vec<(u64, String, Doing)> {
    let order = |message| match message {
        Message::Order { number, model, doing } => Some((number, model, doing)),
        _ => None,
    };
    world.heard(backend).into_iter().filter_map(order).collect()
}

/// The results that a frontend heard.
fn results(world: &mut World, frontend: NodeId) -> Vec<(u64, Option<String>)> {
    let result = |message| match message {
        Message::Ordered { number, failed } => Some((number, failed)),
        _ => None,
    };
    world.heard(frontend).into_iter().filter_map(result).collect()
}

fn ask(world: &mut World, frontend: NodeId, number: u64, model: &str, doing: Doing) {
    world.say(frontend, Message::Order { number, model: model.into(), doing });
}

#[test]
fn a_model_is_loaded_on_all_backends_before_the_client_hears() {
    let mut world = World::leading();
    let backends = [world.backend(1, vec![], explicit()), world.backend(2, vec![], explicit())];
    let fixed = world.backend(3, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(4);
    ask(&mut world, frontend, 7, "n", Doing::Load);
    let told: Vec<_> = backends.iter().map(|backend| orders(&mut world, *backend)).collect();
    assert_eq!(told, [[(0, "n".to_owned(), Doing::Load)], [(0, "n".to_owned(), Doing::Load)]]);
    assert_eq!(orders(&mut world, fixed), [], "its models are fixed");
    world.say(backends[0], Message::Ordered { number: 0, failed: None });
    world.say(backends[0], Message::Ordered { number: 0, failed: None });
    assert_eq!(results(&mut world, frontend), []);
    world.say(backends[1], Message::Ordered { number: 0, failed: None });
    assert_eq!(results(&mut world, frontend), [(7, None)]);
}

#[test]
fn failures_name_their_backends() {
    let mut world = World::leading();
    let backends = [world.backend(1, vec![], explicit()), world.backend(2, vec![], explicit())];
    let frontend = world.frontend(4);
    ask(&mut world, frontend, 0, "n", Doing::Load);
    world.say(backends[0], Message::Ordered { number: 0, failed: Some("no memory".into()) });
    world.disconnect(backends[1]);
    let told = "n1: no memory; n2: it was lost meanwhile";
    assert_eq!(results(&mut world, frontend), [(0, Some(told.to_owned()))]);
}

#[test]
fn only_backends_that_have_a_model_unload_it() {
    let mut world = World::leading();
    let without = Offer { models: Vec::new(), ..explicit() };
    let (with, without) = (world.backend(1, vec![], explicit()), world.backend(2, vec![], without));
    let frontend = world.frontend(4);
    ask(&mut world, frontend, 0, "m", Doing::Unload);
    assert_eq!(orders(&mut world, with), [(0, "m".to_owned(), Doing::Unload)]);
    assert_eq!(orders(&mut world, without), []);
    ask(&mut world, frontend, 1, "n", Doing::Unload);
    let [(1, Some(reason))] = &results(&mut world, frontend)[..] else { panic!("no backend has n") };
    assert!(reason.contains("none has it"), "{reason}");
}

#[test]
fn an_unlisted_model_is_asked_of_all_backends_that_load_models() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], explicit());
    let frontend = world.frontend(4);
    ask(&mut world, frontend, 0, "an_ensemble", Doing::Load);
    assert_eq!(orders(&mut world, backend), [(0, "an_ensemble".to_owned(), Doing::Load)]);
}

#[test]
fn orders_are_bounded_and_forgotten_with_their_frontend() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], explicit());
    let (frontend, other) = (world.frontend(4), world.frontend(5));
    (0..257).for_each(|number| ask(&mut world, frontend, number, "n", Doing::Load));
    let [(256, Some(reason))] = &results(&mut world, frontend)[..] else { panic!("one order is too many") };
    assert!(reason.contains("256 models"), "{reason}");
    world.disconnect(frontend);
    ask(&mut world, other, 0, "n", Doing::Load);
    assert_eq!(results(&mut world, other), [], "there is room again");
    world.say(backend, Message::Ordered { number: 256, failed: None });
    assert_eq!(results(&mut world, other), [(0, None)]);
    assert!(world.node.sample().is_some_and(|sample| sample.busy == Duration::ZERO));
}
