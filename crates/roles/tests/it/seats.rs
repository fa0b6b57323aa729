//! Models whose batches are made on their devices: each request goes to the device that will answer
//! first (shared/design.md: "the scheduler plans with slots").

use crate::scheduler_node::{World, model, ms, numbers, offer};
use downbeat_core::Duration;
use downbeat_core::cluster::DispatchPolicy;
use downbeat_roles::*;

/// The offer of one device. Model `m` runs on its seats, and model `n` on its partition.
fn seats(seats: u32) -> Offer {
    let on = |name, slots: std::ops::Range<u32>, dispatch| {
        let all = model(name, ms(8), seats + 1);
        let profiles = all.profiles.iter().filter(|(slot, _)| slots.contains(slot)).cloned().collect();
        OfferedModel { profiles, dispatch, at_once: u32::MAX, ..all }
    };
    let m = on("m", 1..seats + 1, DispatchPolicy::Route);
    let n = on("n", 0..1, DispatchPolicy::Eager);
    let mut offer = offer(seats + 1, vec![m, n]);
    offer.slots.iter_mut().skip(1).for_each(|slot| slot.is_seat = true);
    offer
}

/// The number of plans that each backend got.
fn planned(world: &mut World, backends: &[NodeId]) -> Vec<usize> {
    backends.iter().map(|backend| world.plans(*backend).len()).collect()
}

#[test]
fn requests_of_one_turn_are_divided_among_equal_devices() {
    let mut world = World::leading();
    let backends = [world.backend(1, vec![], seats(8)), world.backend(2, vec![], seats(8))];
    let frontend = world.frontend(3);
    world.ask(frontend, &[0, 1, 2, 3, 4, 5], ms(1_000));
    assert_eq!(planned(&mut world, &backends), [3, 3], "each request alone, by turns");
}

#[test]
fn a_request_goes_to_the_device_with_the_least_work() {
    let mut world = World::leading();
    let backends = [world.backend(1, vec![], seats(8)), world.backend(2, vec![], seats(8))];
    let frontend = world.frontend(3);
    world.ask(frontend, &[0, 1, 2, 3], ms(1_000));
    let done = world.plans(backends[1]);
    assert_eq!((world.plans(backends[0]).len(), done.len()), (2, 2));
    done.iter().for_each(|plan| world.complete(backends[1], plan.batch));
    world.ask(frontend, &[4, 5], ms(1_000));
    assert_eq!(planned(&mut world, &backends), [0, 2], "the first device has two requests still");
}

#[test]
fn a_batch_of_another_model_is_work_of_its_device() {
    let mut world = World::leading();
    let backends = [world.backend(1, vec![], seats(8)), world.backend(2, vec![], seats(8))];
    let frontend = world.frontend(3);
    world.ask_of(frontend, 1, &[0], ms(1_000));
    assert_eq!(planned(&mut world, &backends), [1, 0]);
    world.ask(frontend, &[1], ms(1_000));
    assert_eq!(planned(&mut world, &backends), [0, 1]);
}

#[test]
fn requests_beyond_all_seats_wait_and_share_a_batch() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], seats(2));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0, 1], ms(1_000));
    let running = world.plans(backend);
    assert_eq!(running.len(), 2);
    world.ask(frontend, &[2, 3, 4], ms(1_000));
    assert_eq!(world.plans(backend), []);
    world.complete(backend, running[0].batch);
    assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[2, 3, 4]]);
}

#[test]
fn a_lost_backend_gives_its_requests_back_and_its_work_is_forgotten() {
    let mut world = World::leading();
    let first = world.backend(1, vec![], seats(8));
    let frontend = world.frontend(3);
    world.ask(frontend, &[0, 1, 2], ms(1_000));
    world.disconnect(first);
    assert_eq!(world.refused(frontend), [(0, Refusal::Lost), (1, Refusal::Lost), (2, Refusal::Lost)]);
    let backends = [world.backend(4, vec![], seats(8)), world.backend(5, vec![], seats(8))];
    world.ask(frontend, &[3, 4], ms(1_000));
    assert_eq!(planned(&mut world, &backends), [1, 1]);
}

#[test]
fn advice_counts_the_part_of_a_seats_batch_that_its_backend_tells() {
    let busy = |ran: Duration| {
        let mut world = World::leading();
        let backend = world.backend(1, vec![], seats(8));
        let frontend = world.frontend(2);
        world.ask(frontend, &[0], Duration::MAX);
        let plan = world.plans(backend).remove(0);
        world.say(backend, Message::Completed { batch: plan.batch, ran: Some((1, ran)), missed: Vec::new() });
        world.node.sample().unwrap()
    };
    let (short, long) = (busy(ms(2)), busy(ms(4)));
    assert_eq!((short.good, short.devices), (1, 1), "seats are no devices");
    assert_eq!(long.busy.as_nanos(), 2 * short.busy.as_nanos());
    assert!(short.busy > Duration::ZERO);
}
