//! The rehearsal of a lead hears everything that a replay needs, and its findings hold.

use crate::scheduler_node::{World, model, ms, numbers, offer};
use downbeat_core::cluster::{Behaviour, DispatchPolicy};
use downbeat_core::{DeviceKind, Duration, ModelId};
use downbeat_roles::*;

const M: ModelId = ModelId(0);

/// The offer of one slot. Model `m` is adaptive, and a batch of it takes 5 ms.
fn adaptive() -> Offer {
    let dispatch = DispatchPolicy::Adaptive { consolidate: false };
    offer(1, vec![OfferedModel { dispatch, ..model("m", ms(5), 1) }])
}

/// The events for the rehearsal since the last call.
fn heard(world: &mut World) -> Vec<RehearsalEvent> {
    std::mem::take(&mut world.rehearsed)
}

/// By event: the number of requests that came, that were answered, and that were lost.
fn counts(events: &[RehearsalEvent]) -> (usize, u32, u32) {
    let came = events.iter().filter(|event| matches!(event, RehearsalEvent::Arrived(_))).count();
    let ended = |of: bool| {
        let requests = |event: &RehearsalEvent| match event {
            RehearsalEvent::Answered { requests, lost, .. } if *lost == of => *requests,
            _ => 0,
        };
        events.iter().map(requests).sum()
    };
    (came, ended(false), ended(true))
}

#[test]
fn the_rehearsal_hears_of_models_devices_and_requests() {
    let mut world = World::leading();
    let (backend, frontend) = (world.backend(1, vec![], adaptive()), world.frontend(2));
    assert_eq!(heard(&mut world), [RehearsalEvent::Devices(DeviceKind(0), 1)], "no request has a queue yet");
    world.ask(frontend, &[0], ms(100));
    let events = heard(&mut world);
    let added = |event: &RehearsalEvent| match event {
        RehearsalEvent::Added(M, name, options) => name == "m" && options.is_adaptive(),
        _ => false,
    };
    assert!(events.iter().any(added), "{events:?}");
    let came = |event: &RehearsalEvent| match event {
        RehearsalEvent::Arrived(came) => (came.model, came.size, came.budget) == (M, 1, ms(100)),
        _ => false,
    };
    assert!(events.iter().any(came), "{events:?}");
    let plan = world.plans(backend).remove(0);
    world.complete(backend, plan.batch);
    let events = heard(&mut world);
    let ran =
        events.iter().find_map(|event| if let RehearsalEvent::Ran(M, share) = event { Some(*share) } else { None });
    assert!(ran.is_some_and(|share| (0.19..0.21).contains(&share)), "1 ms in place of 5: {events:?}");
    assert_eq!(counts(&events), (0, 1, 0));
}

/// A request that ran counts as answered, as does a cancelled one. A refused request counts as lost, as
/// does one of a lost backend.
#[test]
fn the_rehearsal_hears_the_end_of_each_request_once() {
    let mut world = World::leading();
    let (backend, frontend) = (world.backend(1, vec![], adaptive()), world.frontend(2));
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1, 2], ms(100));
    world.ask(frontend, &[3], ms(2));
    world.say(frontend, Message::Cancel(vec![1]));
    assert_eq!(counts(&heard(&mut world)), (4, 1, 1), "request 3 has less time than a run takes");
    let plan = world.plans(backend).remove(0);
    world.complete(backend, plan.batch);
    assert_eq!(counts(&heard(&mut world)), (0, 1, 0));
    assert_eq!(numbers(&world.plans(backend).remove(0)), [2]);
    world.disconnect(backend);
    let events = heard(&mut world);
    assert_eq!(counts(&events), (0, 0, 1));
    assert!(events.contains(&RehearsalEvent::Devices(DeviceKind(0), 0)), "{events:?}");
}

/// A device policy makes the batches of such a model.
#[test]
fn the_rehearsal_leaves_out_seats_and_their_models() {
    let mut world = World::leading();
    let on_seat = OfferedModel { dispatch: DispatchPolicy::Route, ..model("m", ms(5), 1) };
    let mut offer = offer(1, vec![on_seat]);
    offer.slots[0].is_seat = true;
    let (backend, frontend) = (world.backend(1, vec![], offer), world.frontend(2));
    world.ask(frontend, &[0], ms(100));
    assert_eq!(world.plans(backend).len(), 1);
    world.disconnect(backend);
    let names_any = |event: &RehearsalEvent| matches!(event, RehearsalEvent::Added(..) | RehearsalEvent::Devices(..));
    let events = heard(&mut world);
    assert!(!events.iter().any(names_any), "{events:?}");
}

#[test]
fn a_queue_behaves_as_the_rehearsal_has_found() {
    let mut world = World::leading();
    let (backend, frontend) = (world.backend(1, vec![], adaptive()), world.frontend(2));
    world.ask(frontend, &[0], ms(100));
    let first = world.plans(backend).remove(0);
    world.complete(backend, first.batch);
    let waits = Behaviour { wait: 100, throughput: 100, size: 100, ..Behaviour::default() };
    world.node.handle_behaviour(world.now, M, Some(waits));
    world.ask(frontend, &[1], ms(100));
    world.pass(ms(50));
    assert_eq!(world.plans(backend).len(), 0, "the request waits for company");
    world.node.handle_behaviour(world.now, M, None);
    world.pass(Duration::from_micros(500));
    assert_eq!(world.plans(backend).len(), 1, "the rule of the load lets it go");
}
