//! The time that a scheduler plans for messages, by model and by the backends that serve it
//! (Symphony §4.3, appendix D).

use downbeat_core::Duration;
use downbeat_core::cluster::Reject;
use downbeat_roles::*;

use crate::scheduler_node::{World, model, ms, numbers, offer};

/// The measured time of a way that takes no time: the smallest value that the measurement can tell
/// apart.
const WAY: Duration = Duration::from_nanos(1024);

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// A backend with a slot, whose fetches take `fetch`, and so much more for each KiB; its replies
/// take `control`.
fn backend(world: &mut World, node: u64, models: Vec<OfferedModel>, delays: [Duration; 3]) -> NodeId {
    let mut offer = offer(1, models);
    offer.slots[0].hardware = format!("of {node}");
    let backend = world.backend(node, vec![], offer);
    let [control, fetch, kib] = delays;
    let (fresh_control, fresh_fetches) = (control, vec![(0, fetch)]);
    let fetch_per_kib = kib.as_nanos();
    world.say(backend, Message::Delays(Delays { control, fetch, fetch_per_kib, fresh_control, fresh_fetches }));
    backend
}

/// The time until the next batch of a model (`m` 0, `n` 1) is planned to start, on an idle backend.
fn starts_in(world: &mut World, frontend: NodeId, backend: NodeId, queue: u32) -> Duration {
    world.ask_of(frontend, queue, &[world.node.requests() as u64 + 1], ms(400));
    let plan = world.plans(backend).remove(0);
    world.complete(backend, plan.batch);
    plan.starts_in
}

fn with_items_of(kib: u64, name: &str) -> OfferedModel {
    OfferedModel { item_bytes: kib * 1024, ..model(name, ms(5), 1) }
}

#[test]
fn a_small_model_is_not_planned_with_what_a_large_ones_inputs_take() {
    let mut world = World::leading();
    let models = vec![with_items_of(3, "m"), with_items_of(600, "n")];
    let backend = backend(&mut world, 1, models, [us(0), us(100), us(10)]);
    let frontend = world.frontend(2);
    world.pass(ms(100));
    assert_eq!(starts_in(&mut world, frontend, backend, 0), us(130) + WAY);
    assert_eq!(starts_in(&mut world, frontend, backend, 1), us(6_100) + WAY);
}

#[test]
fn a_backend_that_does_not_have_a_model_costs_it_no_time() {
    let mut world = World::leading();
    let near = backend(&mut world, 1, vec![with_items_of(1, "m")], [us(50), us(100), us(10)]);
    let far = backend(&mut world, 3, vec![with_items_of(1, "n")], [ms(20), ms(4), us(500)]);
    let frontend = world.frontend(2);
    world.pass(ms(100));
    assert_eq!(starts_in(&mut world, frontend, near, 0), us(110) + WAY);
    assert_eq!(starts_in(&mut world, frontend, far, 1), us(4_500) + WAY);
    // The other backend's replies cost the model no time either: 5 ms of work and the messages fit
    // into 6 ms on the near backend only.
    for (queue, backend, is_planned) in [(0, near, true), (1, far, false)] {
        world.ask_of(frontend, queue, &[77], ms(6));
        assert_eq!(world.plans(backend).len(), usize::from(is_planned));
    }
    let refused = world.refused(frontend);
    let [(77, Refusal::Rejected(Reject::NetworkTooSlow { network, allowed, .. }))] = refused[..] else {
        panic!("{refused:?}");
    };
    assert_eq!((network, allowed), (ms(24), ms(6)), "the reply alone takes longer");
}

#[test]
fn a_model_on_two_kinds_of_devices_is_planned_with_the_way_to_each() {
    let mut world = World::leading();
    let near = backend(&mut world, 1, vec![with_items_of(1, "m")], [us(0), us(100), us(0)]);
    let far = backend(&mut world, 3, vec![with_items_of(1, "m")], [us(0), ms(4), us(0)]);
    let frontend = world.frontend(2);
    world.pass(ms(100));
    world.ask(frontend, &[0], ms(400));
    world.ask(frontend, &[1], ms(400));
    let plans = [near, far].map(|backend| world.plans(backend));
    let starts = plans.each_ref().map(|plans| plans.iter().map(|plan| plan.starts_in).collect::<Vec<_>>());
    assert_eq!(starts, [[us(100) + WAY], [ms(4) + WAY]]);
    assert_eq!(plans.map(|plans| numbers(&plans[0])), [[0], [1]]);
}

#[test]
fn the_slowest_backend_of_a_kind_counts_unless_it_is_an_outlier() {
    let mut world = World::leading();
    let delays = |fetch| Message::Delays(Delays { fetch, ..Delays::default() });
    let backends = [1, 3, 4].map(|node| world.backend(node, vec![], offer(1, vec![with_items_of(1, "m")])));
    let frontend = world.frontend(2);
    for (worst, expected) in [(us(300), us(300) + WAY), (ms(90), (us(200) + WAY).saturating_mul(4))] {
        for (backend, fetch) in backends.into_iter().zip([us(100), worst, us(200)]) {
            world.say(backend, delays(fetch));
        }
        world.pass(ms(100));
        assert_eq!(starts_in(&mut world, frontend, backends[0], 0), expected);
    }
}

#[test]
fn a_network_that_becomes_slower_or_faster_is_followed() {
    let mut world = World::leading();
    let backend = backend(&mut world, 1, vec![with_items_of(1, "m")], [us(0), us(100), us(0)]);
    let frontend = world.frontend(2);
    assert_eq!(starts_in(&mut world, frontend, backend, 0), us(0), "nothing was measured yet");
    for fetch in [100, 900, 2_000, 150] {
        world.say(backend, Message::Delays(Delays { fetch: us(fetch), ..Delays::default() }));
        world.pass(ms(100));
        assert_eq!(starts_in(&mut world, frontend, backend, 0), us(fetch) + WAY);
    }
}

#[test]
fn it_is_said_what_each_model_is_planned_with_and_for_whom() {
    let mut world = World::leading();
    let near = backend(&mut world, 1, vec![with_items_of(2, "m")], [us(50), us(100), us(10)]);
    let far = backend(&mut world, 3, vec![with_items_of(2, "m"), with_items_of(1, "n")], [us(20), us(200), us(10)]);
    world.pass(ms(100));
    let said = world.node.budgets().map(|budget| {
        let network = budget.network;
        (budget.model, budget.backends.join(" "), [network.control, network.data, network.reply])
    });
    let mut said: Vec<_> = said.collect();
    said.sort();
    let m = |who: &str, control| ("m".to_owned(), who.to_owned(), [control + WAY, us(20), us(50)]);
    let n = ("n".to_owned(), "n3".to_owned(), [us(200) + WAY, us(10), us(20)]);
    assert_eq!(said, [m("n1", us(100)), m("n3", us(200)), n]);
    world.disconnect(near);
    world.disconnect(far);
    assert_eq!(world.node.budgets().count(), 0, "nobody has them");
}

/// The high percentiles remember a stall for seconds. Fresh samples know that it is over.
#[test]
fn a_budget_refuses_only_what_fresh_samples_would_refuse_too() {
    let delays = |fresh| Delays {
        control: ms(400),
        fetch: ms(400),
        fresh_control: fresh,
        fresh_fetches: vec![(0, fresh)],
        ..Delays::default()
    };
    for (fresh, is_planned) in [(ms(1), true), (ms(120), true), (ms(130), false), (Duration::ZERO, true)] {
        let mut world = World::leading();
        let backend = world.backend(1, vec![], offer(1, vec![with_items_of(1, "m")]));
        let frontend = world.frontend(2);
        world.say(backend, Message::Delays(delays(fresh)));
        world.pass(ms(100));
        world.ask(frontend, &[0], ms(250));
        assert_eq!(world.plans(backend).len(), usize::from(is_planned), "{fresh}");
        let refused = world.refused(frontend);
        let names_the_network =
            |(_, refusal): &(u64, Refusal)| matches!(refusal, Refusal::Rejected(Reject::NetworkTooSlow { .. }));
        assert!(refused.iter().all(names_the_network), "{refused:?}");
        assert_eq!(refused.len(), usize::from(!is_planned));
    }
}

/// A model that needs longer than the deadline is to blame, with a slow network too.
#[test]
fn a_slow_model_is_not_the_networks_fault() {
    let mut world = World::leading();
    backend(&mut world, 1, vec![with_items_of(1, "m")], [ms(400), ms(400), us(0)]);
    let frontend = world.frontend(2);
    world.pass(ms(100));
    world.ask(frontend, &[0], ms(4));
    let refused = world.refused(frontend);
    let [(0, Refusal::Rejected(Reject::DeadlineImpossible { needed, allowed }))] = refused[..] else {
        panic!("{refused:?}");
    };
    assert!(needed >= ms(5) && needed < ms(6) && allowed == ms(4), "{needed} {allowed}");
}

/// A stall raises the budget while a request waits for the only slot.
#[test]
fn a_budget_that_rises_drops_no_waiting_request_that_fresh_samples_would_allow() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![with_items_of(1, "m")]));
    let frontend = world.frontend(2);
    world.say(backend, Message::Delays(Delays { fetch: us(10), ..Delays::default() }));
    world.pass(ms(100));
    world.ask(frontend, &[0], ms(900));
    let first = world.plans(backend).remove(0);
    world.ask(frontend, &[1], ms(350));
    world.say(backend, Message::Delays(Delays { control: ms(200), fetch: ms(200), ..Delays::default() }));
    world.pass(ms(100));
    assert_eq!(world.refused(frontend), []);
    world.complete(backend, first.batch);
    assert_eq!(numbers(&world.plans(backend)[0]), [1]);
}
