//! A scheduler with frontends and backends that say what a test has them say, over wires that take
//! no time.

use std::collections::BTreeMap;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, DropReason, Order, PriorityLevel, Reject};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_roles::*;
use proptest::prelude::*;

pub type P = ();
const NODE: NodeId = NodeId(1000);
pub const LOST_AFTER: Duration = Duration::from_millis(50);

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn hello(node: u64, role: Role) -> Hello {
    Hello { protocol: PROTOCOL, node: NodeId(node), role, name: format!("n{node}"), address: format!("h{node}:1") }
}

/// A lone scheduler, or one of several, with its peers.
pub struct World {
    pub node: SchedulerNode<P>,
    pub now: Time,
    peers: BTreeMap<NodeId, Links<P>>,
    /// The messages that each peer has received and the test has not yet looked at.
    heard: BTreeMap<NodeId, Vec<Message<P>>>,
    pub notes: Vec<String>,
    /// The epochs in which the scheduler led.
    led: Vec<Epoch>,
    /// The scheduler's questions how to divide models.
    pub wanted: Vec<PlanWanted>,
    /// Answers to the scheduler's own questions.
    pub told: Vec<(u64, Option<Told>)>,
    /// The events for a rehearsal.
    pub rehearsed: Vec<RehearsalEvent>,
}

impl World {
    fn new(rank: u32, schedulers: u32) -> Self {
        World::with(rank, schedulers, None)
    }

    pub fn with(rank: u32, schedulers: u32, sub_clusters: Option<SubClusterOptions>) -> Self {
        let options = SchedulerOptions {
            rank,
            schedulers,
            heartbeat: ms(1),
            takeover_after: ms(3),
            peer_heartbeat: ms(5),
            lost_after: LOST_AFTER,
            wake_margin: Duration::ZERO,
            order: Order::default(),
            is_rehearsed: true,
            epochs_are_allotted: false,
            sub_clusters,
        };
        let node = SchedulerNode::new(NODE, options, Time::ZERO);
        World {
            node,
            now: Time::ZERO,
            peers: BTreeMap::new(),
            heard: BTreeMap::new(),
            notes: Vec::new(),
            led: Vec::new(),
            wanted: Vec::new(),
            told: Vec::new(),
            rehearsed: Vec::new(),
        }
    }

    /// A lone scheduler that leads.
    pub fn leading() -> Self {
        let mut world = World::new(0, 1);
        world.pass(ms(4));
        assert_eq!(world.node.leads(), Some(Epoch { number: 1, rank: 0 }));
        world
    }

    fn connect(&mut self, node: u64, role: Role) -> NodeId {
        let timing = LinkTiming { heartbeat: ms(1), lost_after: LOST_AFTER };
        let mut links = Links::new(NodeId(node));
        links.handle_connected(self.now, &hello(NODE.0, Role::Scheduler { rank: 0 }), timing);
        self.peers.insert(NodeId(node), links);
        self.node.handle_connected(self.now, &hello(node, role));
        self.exchange();
        NodeId(node)
    }

    pub fn frontend(&mut self, node: u64) -> NodeId {
        let node = self.connect(node, Role::Frontend);
        for (alias, model) in [(0, "m"), (1, "n")] {
            self.say(node, Message::Queue { alias: QueueAlias(alias), key: queue(model, &[]) });
        }
        node
    }

    pub fn backend(&mut self, node: u64, running: Vec<Running>, offer: Offer) -> NodeId {
        let node = self.connect(node, Role::Backend);
        self.say(node, Message::UnderWay(running));
        self.say(node, Message::offer(offer));
        node
    }

    pub fn say(&mut self, from: NodeId, message: Message<P>) {
        self.peers.get_mut(&from).unwrap().say(self.now, NODE, message);
        self.exchange();
    }

    pub fn disconnect(&mut self, node: NodeId) {
        self.peers.remove(&node);
        self.node.handle_disconnected(self.now, node);
        self.exchange();
    }

    pub fn ask(&mut self, from: NodeId, numbers: &[u64], left: Duration) {
        self.ask_of(from, 0, numbers, left);
    }

    /// Hands in requests of model `m` (0) or `n` (1).
    pub fn ask_of(&mut self, from: NodeId, queue: u32, numbers: &[u64], left: Duration) {
        let one = |number: &u64| HandedIn {
            number: *number,
            queue: QueueAlias(queue),
            left,
            queue_left: Duration::MAX,
            ready_in: Duration::ZERO,
            level: 0,
            size: 1,
            tried: 0,
        };
        self.say(from, Message::Requests(numbers.iter().map(one).collect()));
    }

    /// Delivers all messages on their way.
    pub fn exchange(&mut self) {
        loop {
            let mut moved = false;
            for (peer, links) in &mut self.peers {
                links.handle_timeout(self.now);
                while let Some((_, frame)) = links.poll_frame(self.now) {
                    self.node.handle_frame(self.now, frame);
                    moved = true;
                }
                while let Some(event) = links.poll_event() {
                    if let LinkEvent::Message(_, message) = event {
                        self.heard.entry(*peer).or_default().push(message);
                    }
                }
            }
            self.node.handle_timeout(self.now);
            while let Some(output) = self.node.poll_output(self.now) {
                match output {
                    SchedulerOutput::Send(to, frame) => {
                        moved = true;
                        if let Some(links) = self.peers.get_mut(&to) {
                            links.handle_frame(self.now, frame);
                        }
                    }
                    SchedulerOutput::Leads(epoch) => self.led.push(epoch),
                    SchedulerOutput::Note(note) => self.notes.push(note),
                    SchedulerOutput::WantPlan(wanted) => self.wanted.push(wanted),
                    SchedulerOutput::Told(number, told) => self.told.push((number, told)),
                    _ => {}
                }
            }
            self.rehearsed.extend(self.node.rehearsal_events());
            if !moved {
                return;
            }
        }
    }

    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_micros(500);
            self.exchange();
        }
    }

    pub fn heard(&mut self, node: NodeId) -> Vec<Message<P>> {
        self.heard.remove(&node).unwrap_or_default()
    }

    pub fn plans(&mut self, node: NodeId) -> Vec<Plan> {
        let plan = |message| if let Message::Plan(plan) = message { Some(plan) } else { None };
        self.heard(node).into_iter().filter_map(plan).collect()
    }

    pub fn refused(&mut self, node: NodeId) -> Vec<(u64, Refusal)> {
        let refused = |message| if let Message::Refused(refused) = message { refused } else { Vec::new() };
        self.heard(node).into_iter().flat_map(refused).collect()
    }

    /// Puts requests 0 and 1, which waited for another batch, in one batch.
    fn batch_of_two(&mut self, backend: NodeId, frontend: NodeId) -> Plan {
        self.ask(frontend, &[9], ms(100));
        self.ask(frontend, &[0, 1], ms(100));
        let first = self.plans(backend).remove(0);
        self.complete(backend, first.batch);
        self.plans(backend).remove(0)
    }

    pub fn complete(&mut self, backend: NodeId, batch: BatchKey) {
        self.say(backend, Message::Completed { batch, ran: Some((1, ms(1))), missed: Vec::new() });
    }
}

pub fn queue(model: &str, shape: &[i64]) -> QueueKey {
    QueueKey { model: model.into(), version: 1, shape: shape.to_vec() }
}

pub fn model(name: &str, latency: Duration, slots: u32) -> OfferedModel {
    let profile = LatencyProfile::linear(Duration::from_nanos(1), latency, 4).unwrap();
    OfferedModel {
        model: name.into(),
        version: 1,
        fingerprint: "f".into(),
        definition: vec![7],
        max_batch: 4,
        drop: DropPolicy::HeadDrop,
        dispatch: DispatchPolicy::Eager,
        max_wait: Duration::MAX,
        levels: vec![PriorityLevel { max_queue: u32::MAX, timeout_action: Default::default() }],
        at_once: slots,
        item_bytes: 1024,
        may_repeat: true,
        shape: Vec::new(),
        profiles: (0..slots).map(|slot| (slot, profile.clone())).collect(),
    }
}

pub fn offer(slots: u32, models: Vec<OfferedModel>) -> Offer {
    Offer {
        slots: (0..slots).map(|_| Slot { hardware: "cpu".into(), device: 0, is_seat: false }).collect(),
        models,
        ..Offer::default()
    }
}

pub fn numbers(plan: &Plan) -> Vec<u64> {
    plan.members.iter().map(|member| member.number).collect()
}

#[test]
fn backends_learn_queues_and_frontends_once_before_their_plans() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    assert!(
        world.heard(frontend).iter().any(|said| matches!(said, Message::Models(models) if models[0].definition == [7]))
    );
    world.heard(backend);
    world.ask(frontend, &[0], ms(100));
    let said = world.heard(backend);
    let [Message::Meet { frontend: met, address }, Message::Queue { alias, key }, Message::Plan(plan)] = &said[..]
    else {
        panic!("{said:?}");
    };
    assert_eq!((*met, address.as_str(), key), (frontend, "h2:1", &queue("m", &[])));
    assert_eq!((plan.queue, plan.slot, numbers(plan)), (*alias, 0, vec![0]));
    world.ask(frontend, &[1, 2], ms(100));
    assert_eq!(world.heard(backend), [], "the slot is busy");
    world.complete(backend, plan.batch);
    let said = world.heard(backend);
    let [Message::Plan(plan)] = &said[..] else { panic!("{said:?}") };
    assert_eq!(numbers(plan), [1, 2], "what came meanwhile shares a batch");
    world.complete(backend, plan.batch);
    assert_eq!(world.node.requests(), 0);
}

#[test]
fn each_frontend_of_a_plan_hears_of_its_members() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let (one, other) = (world.frontend(2), world.frontend(3));
    let claims = |world: &mut World, frontend| {
        let is_claim = |said: &Message<P>| matches!(said, Message::Claim { .. });
        world.heard(frontend).into_iter().filter(is_claim).collect::<Vec<_>>()
    };
    world.ask(one, &[9], ms(100));
    let first = world.plans(backend).remove(0);
    assert_eq!(claims(&mut world, one), [Message::Claim { batch: first.batch, backend, numbers: vec![9] }]);
    world.ask(one, &[0], ms(100));
    world.ask(other, &[0], ms(100));
    world.ask(one, &[1], ms(100));
    world.complete(backend, first.batch);
    let plan = world.plans(backend).remove(0);
    assert_eq!(plan.members.len(), 3);
    assert_eq!(claims(&mut world, one), [Message::Claim { batch: plan.batch, backend, numbers: vec![0, 1] }]);
    assert_eq!(claims(&mut world, other), [Message::Claim { batch: plan.batch, backend, numbers: vec![0] }]);
}

#[test]
fn what_is_handed_in_twice_waits_once() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    let first = world.plans(backend).remove(0);
    world.ask(frontend, &[1, 1], ms(100));
    // A request in a batch that is handed in anew leaves that batch.
    world.ask(frontend, &[0, 1], ms(100));
    world.complete(backend, first.batch);
    let [plan] = &world.plans(backend)[..] else { panic!("one batch") };
    assert_eq!(numbers(plan), [1, 0]);
    world.complete(backend, plan.batch);
    assert_eq!((world.node.requests(), world.refused(frontend)), (0, vec![]));
}

#[test]
fn members_of_a_lost_backend_are_given_back_but_for_those_handed_in_anew() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    let plan = world.batch_of_two(backend, frontend);
    world.ask(frontend, &[2], ms(100));
    assert_eq!(numbers(&plan), [0, 1]);
    world.ask(frontend, &[1], ms(100));
    world.disconnect(backend);
    assert_eq!(world.refused(frontend), [(0, Refusal::Lost)], "1 waits again, and 2 waits still");
    let other = world.backend(3, vec![], offer(1, vec![model("m", ms(5), 1)]));
    assert_eq!(world.plans(other).iter().map(numbers).collect::<Vec<_>>(), [[2, 1]]);
}

#[test]
fn members_that_a_backend_missed_are_given_back() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    let plan = world.batch_of_two(backend, frontend);
    let missed = vec![RequestKey { frontend, number: 1 }];
    world.say(backend, Message::Completed { batch: plan.batch, ran: Some((1, ms(1))), missed });
    assert_eq!((world.refused(frontend), world.node.requests()), (vec![(1, Refusal::Missed(plan.batch))], 0));
}

/// A request counts as bad if more devices would have helped. Two slots of a device are busy half
/// of the device's time each.
#[test]
fn requests_and_busy_time_are_counted_for_advice_on_devices() {
    let mut world = World::leading();
    assert_eq!(world.node.sample(), None, "backends may be on their way here");
    let mut offer = offer(3, vec![model("m", ms(5), 3)]);
    offer.slots[2].device = 1;
    let backend = world.backend(1, vec![], offer);
    let frontend = world.frontend(2);
    for number in 0..3 {
        world.ask(frontend, &[number], ms(100));
    }
    world.ask(frontend, &[3], ms(1));
    let plans = world.plans(backend);
    assert_eq!(plans.len(), 3);
    let sample = |world: &World| world.node.sample().map(|s| (s.good, s.bad, s.busy, s.devices));
    assert_eq!(sample(&world), Some((0, 1, Duration::ZERO, 2)), "3 could not be done in 1 ms");
    for plan in &plans[..2] {
        world.say(backend, Message::Completed { batch: plan.batch, ran: Some((1, ms(4))), missed: vec![] });
    }
    // Two slots share a device. A batch of four takes as long as a batch of one, so that a request alone
    // needs a quarter.
    let busy: u64 = plans[..2].iter().map(|plan| if plan.slot == 2 { 4 } else { 2 }).sum();
    let (good, bad, needed, devices) = sample(&world).unwrap();
    assert_eq!((good, bad, devices), (2, 1, 2));
    assert!((needed.as_secs_f64() - ms(busy).as_secs_f64() / 4.0).abs() < 1e-6, "{needed} of {busy} ms");
    world.pass(ms(101));
    world.complete(backend, plans[2].batch);
    assert_eq!(sample(&world).map(|s| (s.0, s.1)), Some((2, 2)), "the last was late");
    world.say(backend, Message::Leave);
    assert_eq!(sample(&world).map(|s| s.3), Some(0));
}

#[test]
fn a_request_waits_for_backends_that_are_still_on_their_way() {
    let mut world = World::leading();
    let frontend = world.frontend(2);
    world.ask(frontend, &[0, 1], ms(100));
    world.say(frontend, Message::Cancel(vec![1]));
    assert_eq!((world.refused(frontend), world.node.requests()), (vec![], 1));
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[0]]);
    let [Message::Claim { .. }, Message::Models(models)] = &world.heard(frontend)[..] else { panic!("models") };
    assert_eq!(models.len(), 1);
}

#[test]
fn requests_of_an_unoffered_model_are_refused_after_the_settle_time() {
    let mut world = World::leading();
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.pass(LOST_AFTER + ms(1));
    assert_eq!(world.refused(frontend), [(0, Refusal::Rejected(Reject::UnknownModel))]);
    world.ask(frontend, &[1], ms(100));
    assert_eq!(world.refused(frontend), [(1, Refusal::Rejected(Reject::UnknownModel))]);
}

/// The backend's offer may be lost on the way again and again.
#[test]
fn a_backend_that_is_here_and_has_not_said_what_it_offers_is_waited_for() {
    let mut world = World::leading();
    let frontend = world.frontend(2);
    let backend = world.connect(1, Role::Backend);
    world.ask(frontend, &[0], Duration::MAX);
    world.pass(LOST_AFTER.saturating_mul(3));
    world.ask(frontend, &[1], Duration::MAX);
    assert_eq!((world.refused(frontend), world.node.requests()), (vec![], 2));
    world.say(backend, Message::UnderWay(vec![]));
    world.say(backend, Message::offer(offer(1, vec![model("m", ms(5), 1)])));
    let plan = world.plans(backend).remove(0);
    world.complete(backend, plan.batch);
    assert_eq!((numbers(&plan), numbers(&world.plans(backend)[0])), (vec![0], vec![1]));
    world.ask_of(frontend, 1, &[2], Duration::MAX);
    let unknown = Refusal::Rejected(Reject::UnknownModel);
    assert_eq!(world.refused(frontend), [(2, unknown)], "all that are here have said what they offer");
}

#[test]
fn a_backend_that_never_says_what_it_offers_is_not_waited_for_for_ever() {
    let mut world = World::leading();
    let frontend = world.frontend(2);
    world.connect(1, Role::Backend);
    world.ask(frontend, &[0], Duration::MAX);
    world.pass(LOST_AFTER.saturating_mul(9));
    assert_eq!(world.refused(frontend), []);
    world.pass(LOST_AFTER.saturating_mul(2));
    assert_eq!(world.refused(frontend), [(0, Refusal::Rejected(Reject::UnknownModel))]);
}

/// The frontend has not heard of the second lead: it uses an alias of the first one.
#[test]
fn a_scheduler_that_leads_again_forgets_its_old_requests() {
    let mut world = World::new(1, 2);
    let begin = |world: &mut World| {
        world.pass(LOST_AFTER + ms(40));
        assert!(world.node.leads().is_some());
    };
    begin(&mut world);
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0, 1], ms(1_000));
    assert_eq!((world.plans(backend).len(), world.node.requests()), (1, 2), "one runs, and one waits");

    let other = world.connect(9, Role::Scheduler { rank: 0 });
    world.say(other, Message::Standing { epoch: Epoch { number: 7, rank: 0 }, leads: true });
    assert_eq!((world.node.leads(), world.node.requests()), (None, 0), "another scheduler leads");
    world.disconnect(other);
    begin(&mut world);
    assert_eq!(world.node.requests(), 0, "the requests of the first lead are forgotten");

    world.say(backend, Message::UnderWay(vec![]));
    world.say(backend, Message::offer(offer(1, vec![model("m", ms(5), 1)])));
    world.ask(frontend, &[0], ms(100));
    assert_eq!((world.refused(frontend), world.node.requests()), (vec![], 0), "no such name was given in this lead");
    world.say(frontend, Message::Queue { alias: QueueAlias(0), key: queue("m", &[]) });
    world.ask(frontend, &[0], ms(100));
    assert_eq!(world.plans(backend).iter().map(numbers).collect::<Vec<_>>(), [[0]]);
    world.ask_of(frontend, u32::MAX, &[1], ms(100));
    let full = Refusal::Rejected(Reject::QueueFull { bound: 0 });
    assert_eq!(world.refused(frontend), [(1, full)], "it cannot be given");
}

#[test]
fn a_slot_that_is_busy_for_another_epoch_is_free_when_its_backend_says_so() {
    let mut world = World::leading();
    let old = BatchKey { epoch: Epoch { number: 0, rank: 7 }, batch: downbeat_core::BatchId(5) };
    let running = vec![Running { batch: old, slot: 0, ends_in: ms(1) }];
    let backend = world.backend(1, running, offer(2, vec![model("m", ms(5), 2)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    let plans = world.plans(backend);
    assert_eq!(plans.iter().map(|plan| plan.slot).collect::<Vec<_>>(), [1]);
    world.pass(ms(10));
    world.complete(backend, old);
    assert_eq!(world.plans(backend).iter().map(|plan| plan.slot).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_backend_that_leaves_gets_no_plan_and_finishes_what_it_has() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    let plan = world.plans(backend).remove(0);
    world.say(backend, Message::Leave);
    world.ask(frontend, &[1], ms(100));
    world.complete(backend, plan.batch);
    assert_eq!((world.plans(backend), world.refused(frontend), world.node.requests()), (vec![], vec![], 1));
    world.disconnect(backend);
    assert_eq!(world.refused(frontend), [(1, Refusal::Dropped(DropReason::ModelRemoved))], "nobody else has it");
}

#[test]
fn of_two_different_offers_of_a_model_the_first_counts() {
    let mut world = World::leading();
    let first = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let different = OfferedModel { fingerprint: "g".into(), max_batch: 1, ..model("m", ms(5), 1) };
    let second = world.backend(3, vec![], offer(1, vec![different, model("n", ms(5), 1)]));
    let [note] = &world.notes[..] else { panic!("{:?}", world.notes) };
    assert!(note.contains("model 'm' version 1 of 'n3'"), "{note}");
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1, 2], ms(100));
    assert_eq!((world.plans(first).len(), world.plans(second).len()), (1, 0));
    world.disconnect(first);
    let mut refused = world.refused(frontend);
    refused.sort_by_key(|(number, _)| *number);
    assert_eq!(
        refused,
        [0, 1, 2].map(|number| (number, Refusal::Lost)),
        "handed in again, to queues with other settings"
    );
    world.ask(frontend, &[0, 1, 2], ms(100));
    assert_eq!(world.plans(second).iter().map(numbers).collect::<Vec<_>>(), [[0]]);
}

#[test]
fn a_model_that_is_offered_no_more_is_gone() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1), model("n", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    world.heard(frontend);
    world.say(backend, Message::offer(offer(1, vec![model("n", ms(5), 1)])));
    let said = world.heard(frontend);
    let gone = Message::Refused(vec![(1, Refusal::Dropped(DropReason::ModelRemoved))]);
    assert!(said.contains(&gone), "{said:?}");
    let names = |said: &Message<P>| match said {
        Message::Models(models) => Some(models.iter().map(|model| model.model.clone()).collect::<Vec<_>>()),
        _ => None,
    };
    assert_eq!(said.iter().find_map(names), Some(vec!["n".to_owned()]));
}

/// A slot is of one kind as long as it runs the same models. A slot that becomes another kind never
/// gets a model that it does not run.
#[test]
fn a_model_runs_only_on_slots_that_have_it() {
    let mut world = World::leading();
    let on_second = OfferedModel { profiles: model("m", ms(5), 2).profiles[1..].to_vec(), ..model("m", ms(5), 2) };
    let backend = world.backend(1, vec![], offer(2, vec![on_second, model("n", ms(5), 2)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    assert_eq!(world.plans(backend).iter().map(|plan| plan.slot).collect::<Vec<_>>(), [1]);
}

/// `at_once` of a model is a promise: it runs on so many slots, and models are spread over them.
#[test]
fn models_that_may_not_run_everywhere_are_spread_over_the_slots() {
    let mut world = World::leading();
    let models = ["m", "n"].map(|name| OfferedModel { at_once: 1, ..model(name, ms(5), 2) }).to_vec();
    let backend = world.backend(1, vec![], offer(2, models));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    world.ask_of(frontend, 1, &[2], ms(100));
    let plans = world.plans(backend);
    assert_eq!(plans.iter().map(|plan| (plan.slot, numbers(plan))).collect::<Vec<_>>(), [(0, vec![0]), (1, vec![2])]);
}

#[test]
fn another_shape_is_guessed_from_the_nearest() {
    let mut world = World::leading();
    let offered = OfferedModel { shape: vec![10], ..model("m", ms(5), 1) };
    let backend = world.backend(1, vec![], offer(1, vec![offered]));
    let frontend = world.frontend(2);
    world.say(frontend, Message::Queue { alias: QueueAlias(0), key: queue("m", &[20]) });
    world.ask(frontend, &[0], ms(100));
    let expected = world.plans(backend)[0].expected;
    assert!(expected >= ms(10) && expected < ms(11), "{expected}");
}

#[test]
fn what_waits_of_a_lost_frontend_is_cancelled() {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let (frontend, other) = (world.frontend(2), world.frontend(3));
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    world.ask(other, &[0], ms(100));
    let plan = world.plans(backend).remove(0);
    world.disconnect(frontend);
    assert_eq!(world.node.requests(), 2, "one runs, one waits");
    world.complete(backend, plan.batch);
    let plans = world.plans(backend);
    assert_eq!(plans[0].members, [RequestKey { frontend: other, number: 0 }]);
    world.complete(backend, plans[0].batch);
    assert_eq!(world.node.requests(), 0);
}

#[test]
fn a_leader_that_hears_of_a_higher_epoch_stands_by_and_forgets() {
    let mut world = World::new(1, 2);
    world.pass(LOST_AFTER + ms(40));
    assert_eq!(world.led, [Epoch { number: 1, rank: 1 }], "nobody else is there");
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(2);
    world.ask(frontend, &[0], ms(100));
    let other = world.connect(5, Role::Scheduler { rank: 0 });
    world.say(other, Message::Standing { epoch: Epoch { number: 1, rank: 0 }, leads: true });
    assert_eq!((world.node.leads(), world.node.requests()), (None, 0), "of two of one number the lower rank leads");
    world.heard(backend);
    world.ask(frontend, &[1], ms(100));
    assert_eq!(world.plans(backend), []);
    // The node takes over from the other scheduler when the connection ends, at once and with the
    // next number.
    world.disconnect(other);
    assert_eq!(world.led[1..], [Epoch { number: 2, rank: 1 }]);
    assert!(world.heard(frontend).contains(&Message::Leads(Epoch { number: 2, rank: 1 })));
}

#[test]
fn a_follower_of_a_higher_epoch_has_a_scheduler_take_one_above_it() {
    let mut world = World::leading();
    let backend = world.connect(1, Role::Backend);
    world.say(backend, Message::Standing { epoch: Epoch { number: 9, rank: u32::MAX }, leads: false });
    world.pass(ms(10));
    assert_eq!(world.led[1..], [Epoch { number: 10, rank: 0 }]);
}

#[test]
fn no_report_ends_service_for_good() {
    let mut world = World::leading();
    let backend = world.backend(2, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontend = world.frontend(3);
    let other = world.connect(4, Role::Backend);
    world.say(other, Message::Standing { epoch: Epoch { number: 1 << 62, rank: 0 }, leads: false });
    assert_eq!((world.node.heard().number, world.notes.len()), (1, 1), "possible, and not plausible");
    world.notes.clear();
    let liar = world.connect(1, Role::Backend);
    world.say(liar, Message::Standing { epoch: Epoch { number: u64::MAX, rank: 0 }, leads: false });
    assert_eq!(world.node.leads(), Some(Epoch { number: 1, rank: 0 }), "the leader goes on");
    assert!(world.notes[0].contains("epoch 18446744073709551615") && world.notes[0].contains("restart it"));
    world.ask(frontend, &[0], ms(100));
    assert_eq!(world.plans(backend).len(), 1);
    // A liar with plausible numbers costs a lead each time, and there is always a next one.
    for n in 1..20 {
        let liar = world.connect(10 + n, Role::Frontend);
        let number = world.node.heard().number + (1 << 32);
        world.say(liar, Message::Standing { epoch: Epoch { number, rank: 0 }, leads: false });
        assert_eq!(world.node.leads(), None);
        world.pass(LOST_AFTER + ms(1_100));
        assert_eq!(world.node.leads(), Some(Epoch { number: number + 1, rank: 0 }), "{n}");
    }
}

#[test]
fn a_leader_that_stands_by_tells_its_followers() {
    let mut world = World::leading();
    let (backend, frontend) = (world.connect(1, Role::Backend), world.frontend(2));
    assert!(world.node.has_leader());
    world.say(backend, Message::Taken(Epoch { number: 1, rank: 0 }));
    assert!(!world.node.has_leader() && world.node.leads().is_none());
    let stands_by = Message::Standing { epoch: Epoch { number: 1, rank: 0 }, leads: false };
    assert!(world.heard(frontend).contains(&stands_by));
    assert!(world.heard(backend).contains(&stands_by));
    world.pass(LOST_AFTER + ms(40));
    assert_eq!(world.led, [1, 2].map(|number| Epoch { number, rank: 0 }), "it invents the next number itself");
    assert!(world.node.has_leader());
    assert!(world.heard(frontend).contains(&Message::Leads(Epoch { number: 2, rank: 0 })));
}

#[test]
fn a_peer_that_speaks_as_another_role_is_given_up() {
    let mut world = World::leading();
    let (liar, frontend) = (world.connect(1, Role::Frontend), world.frontend(2));
    world.say(liar, Message::offer(offer(1, vec![model("m", ms(5), 1)])));
    assert!(world.notes[0].contains("never sends"), "{:?}", world.notes);
    world.say(frontend, Message::Standing { epoch: Epoch { number: 1, rank: 0 }, leads: true });
    assert_eq!(world.notes.len(), 2, "a frontend leads nobody");
    assert!(world.node.leads().is_some());
}

fn anything() -> impl Strategy<Value = Message<P>> {
    let small = 0u64..4;
    let batch = (0u64..3, 0u64..4).prop_map(|(number, batch)| BatchKey {
        epoch: Epoch { number, rank: 0 },
        batch: downbeat_core::BatchId(batch),
    });
    let handed = (small.clone(), 0u32..3, prop_oneof![Just(0u64), Just(5), Just(u64::MAX)], 0u32..6, 0u32..2).prop_map(
        |(number, queue, left, size, level)| HandedIn {
            number,
            queue: QueueAlias(queue),
            left: Duration::from_nanos(left.saturating_mul(1_000_000)),
            queue_left: Duration::MAX,
            ready_in: Duration::ZERO,
            level,
            size,
            tried: 0,
        },
    );
    let offered = (0u32..3, prop::collection::vec((0usize..3, 0u32..3, 0u32..4, 0u32..3, "[fg]"), 0..4)).prop_map(
        |(slots, models)| {
            let one = |(name, on, at_once, max_batch, fingerprint): (usize, u32, u32, u32, String)| OfferedModel {
                at_once,
                max_batch,
                fingerprint,
                ..model(["m", "n", "o"][name], ms(2), on)
            };
            Message::offer(offer(slots, models.into_iter().map(one).collect()))
        },
    );
    prop_oneof![
        prop::collection::vec(handed, 0..4).prop_map(Message::Requests),
        prop::collection::vec(small.clone(), 0..3).prop_map(Message::Cancel),
        (0u32..3, 0usize..4).prop_map(|(alias, name)| Message::Queue {
            alias: QueueAlias(alias * alias * 40_000),
            key: queue(["m", "n", "o", "p"][name], &[]),
        }),
        (0u32..3, 0usize..4).prop_map(|(alias, name)| Message::Queue {
            alias: QueueAlias(alias),
            key: queue(["m", "n", "o", "p"][name], &[]),
        }),
        offered.clone(),
        offered,
        prop::collection::vec((batch.clone(), 0u32..5000), 0..3).prop_map(|running| {
            let one = |(batch, slot)| Running { batch, slot, ends_in: ms(1) };
            Message::UnderWay(running.into_iter().map(one).collect())
        }),
        (batch, prop::collection::vec((1u64..7, small), 0..3)).prop_map(|(batch, missed)| {
            let one = |(frontend, number)| RequestKey { frontend: NodeId(frontend), number };
            Message::Completed { batch, ran: None, missed: missed.into_iter().map(one).collect() }
        }),
        Just(Message::Leave),
        (0u64..3).prop_map(|ns| Message::Delays(Delays {
            control: ms(ns),
            fetch: ms(ns),
            fetch_per_kib: ns,
            ..Delays::default()
        })),
        (0u64..3, any::<bool>())
            .prop_map(|(number, leads)| Message::Standing { epoch: Epoch { number, rank: 0 }, leads }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Nothing panics for any messages of peers in any order. Once all frontends are gone and all
    /// backends lost, the node keeps nothing.
    #[test]
    fn nonsense_harms_nobody(steps in prop::collection::vec((0u8..12, 1u64..7, anything()), 1..60)) {
        let mut world = World::leading();
        for (what, peer, message) in steps {
            let node = NodeId(peer);
            let role = if peer < 4 { Role::Frontend } else { Role::Backend };
            match (what, world.peers.contains_key(&node)) {
                (_, false) => drop(world.connect(peer, role)),
                (0, true) => world.disconnect(node),
                (1, true) => world.pass(ms(2)),
                _ => world.say(node, message),
            }
        }
        for peer in 1..7 {
            world.disconnect(NodeId(peer));
        }
        prop_assert_eq!(world.node.requests(), 0);
    }
}
