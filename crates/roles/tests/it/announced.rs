//! Requests that a scheduler hears of before their inputs are ready (Symphony §4.3).

use downbeat_core::Duration;
use downbeat_roles::*;

use crate::scheduler_node::{World, model, ms, numbers, offer};

/// A scheduler with an idle backend and a frontend. Inputs come 4 ms after a plan is sent.
fn world() -> (World, NodeId, NodeId) {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let fetch = ms(4);
    world.say(backend, Message::Delays(Delays { fetch, fresh_fetches: vec![(0, fetch)], ..Delays::default() }));
    world.pass(ms(100));
    let frontend = world.frontend(2);
    // The queue knows the time of a plan's way from its first request on.
    world.ask(frontend, &[99], ms(100));
    let first = world.plans(backend).remove(0);
    world.complete(backend, first.batch);
    (world, backend, frontend)
}

/// Announces a request whose inputs are ready after `ready_in`.
fn announce(world: &mut World, frontend: NodeId, number: u64, ready_in: Duration) {
    let (left, queue_left) = (ms(200), Duration::MAX);
    let queue = QueueAlias(0);
    let request = HandedIn { number, queue, left, queue_left, ready_in, level: 0, size: 1, tried: 0 };
    world.say(frontend, Message::Requests(vec![request]));
}

#[test]
fn section_4_3_a_batch_begins_when_the_inputs_are_ready() {
    let (mut world, backend, frontend) = world();
    announce(&mut world, frontend, 0, ms(20));
    world.pass(ms(15));
    assert_eq!(world.plans(backend), [], "the inputs are ready in 5 ms, and a plan needs 4");
    world.pass(ms(2));
    let [plan] = &world.plans(backend)[..] else { panic!("the plan is on its way meanwhile") };
    assert_eq!(numbers(plan), [0]);
    assert!((ms(3)..=ms(5)).contains(&plan.starts_in), "{}", plan.starts_in);
    world.say(frontend, Message::Ready(vec![0]));
    world.complete(backend, plan.batch);
    assert_eq!((world.plans(backend), world.node.requests()), (vec![], 0), "a batch keeps its requests");
}

#[test]
fn section_4_3_inputs_that_are_ready_early_are_planned_at_once() {
    let (mut world, backend, frontend) = world();
    announce(&mut world, frontend, 0, ms(20));
    world.pass(ms(5));
    world.say(frontend, Message::Ready(vec![0, 7]));
    assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[0]]);
}

#[test]
fn section_4_3_a_ready_request_does_not_wait_for_one_that_is_not() {
    let (mut world, backend, frontend) = world();
    announce(&mut world, frontend, 0, ms(50));
    world.ask(frontend, &[1], ms(100));
    let plan = world.plans(backend).remove(0);
    assert_eq!(numbers(&plan), [1]);
    world.complete(backend, plan.batch);
    world.pass(ms(50));
    assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[0]]);
}

#[test]
fn inputs_that_cannot_be_made_and_frontends_that_are_lost_leave_nothing() {
    let (mut world, backend, frontend) = world();
    announce(&mut world, frontend, 0, ms(20));
    announce(&mut world, frontend, 1, ms(20));
    assert_eq!(world.node.requests(), 2);
    world.say(frontend, Message::Cancel(vec![0]));
    assert_eq!(world.node.requests(), 1);
    world.disconnect(frontend);
    assert_eq!(world.node.requests(), 0);
    world.pass(ms(50));
    assert_eq!(world.plans(backend), []);
}
