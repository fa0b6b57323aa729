//! No message of a peer, of any size and at any time, makes a node panic. No node keeps a request
//! or tensor that it was not given.

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{BatchId, Duration, Time};
use downbeat_roles::*;
use proptest::prelude::*;

type P = ();

const ME: NodeId = NodeId(1);
const PEERS: [(NodeId, Role); 4] = [
    (NodeId(2), Role::Scheduler { rank: 0 }),
    (NodeId(3), Role::Scheduler { rank: u32::MAX }),
    (NodeId(4), Role::Frontend),
    (NodeId(5), Role::Backend),
];

fn hello(node: NodeId, role: Role) -> Hello {
    Hello { protocol: PROTOCOL, node, role, name: String::new(), address: String::new() }
}

/// An action on a node: its kind, its peer, and numbers.
#[derive(Clone, Debug)]
struct Step {
    what: u8,
    peer: usize,
    numbers: [u64; 3],
    wait: u64,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || prop::sample::select(vec![0, 1, 2, 3, 1_000, u64::from(u32::MAX), u64::MAX - 1, u64::MAX]);
    let wait = prop::sample::select(vec![0, 1, 100_000, 1_000_000, 30_000_000]);
    let step = (0u8..28, 0usize..4, [number(), number(), number()], wait);
    let step = step.prop_map(|(what, peer, numbers, wait)| Step { what, peer, numbers, wait });
    prop::collection::vec(step, 0..80)
}

fn message(step: &Step) -> Message<P> {
    let [a, b, c] = step.numbers;
    let epoch = Epoch { number: a.min(3), rank: b as u32 };
    let batch = BatchKey { epoch, batch: BatchId(c) };
    let members = vec![RequestKey { frontend: NodeId(4), number: c }, RequestKey { frontend: NodeId(b), number: a }];
    let alias = QueueAlias(b as u32);
    let key = QueueKey { model: "m".to_owned(), version: a, shape: vec![b as i64] };
    let (long, short) = (Duration::from_nanos(a), Duration::from_nanos(b));
    match step.what {
        0 => Message::Queue { alias, key },
        1 => {
            let (number, level, size, tried) = (a, b as u32, c as u32, b as u8);
            let (left, queue_left, ready_in) = (long, short, Duration::from_nanos(c));
            let request = HandedIn { number, queue: alias, left, queue_left, ready_in, level, size, tried };
            Message::Requests(vec![request; 2])
        }
        2 if c % 2 == 0 => Message::Ready(vec![a, b, c, a]),
        2 => Message::Cancel(vec![a, b, c, a]),
        3 => Message::Refused(vec![(a, Refusal::Lost), (b, Refusal::Rejected(Reject::UnknownModel))]),
        4 => Message::Refused(vec![(c, Refusal::Dropped(DropReason::Hopeless)); 3]),
        5 => {
            let (model, version, may_repeat) = ("m".to_owned(), a, b == 0);
            Message::Models(vec![ServedModel { model, version, definition: vec![0; 3], may_repeat }])
        }
        6 | 7 => {
            let epoch = Epoch { number: a.min(3), rank: 0 };
            Message::Leads(epoch)
        }
        8 => Message::Standing { epoch, leads: c == 0 },
        9 => Message::Meet { frontend: NodeId(b), address: "f:1".to_owned() },
        10..=12 => {
            let (queue, slot, size) = (alias, c as u32, a as u32);
            Message::Plan(Plan { batch, slot, queue, members, size, starts_in: long, expected: short })
        }
        13 => Message::offer(Offer {
            slots: vec![Slot { hardware: String::new(), device: 0, is_seat: false }],
            ..Offer::default()
        }),
        14 => Message::Delays(Delays {
            control: long,
            fetch: short,
            fetch_per_kib: c,
            fresh_control: short,
            fresh_fetches: vec![(c as u8, long), (u8::MAX, short)],
        }),
        15 => Message::UnderWay(vec![Running { batch, slot: c as u32, ends_in: long }; 2]),
        16 => Message::Completed { batch, ran: Some((a as u32, long)), missed: members },
        17 if c % 3 == 0 => Message::LetGo,
        17 if c % 3 == 1 => {
            let stamp = Stamp { epoch, number: b };
            let (planned, kept) = (vec!["m".to_owned()], vec!["m".to_owned(), "n".to_owned()]);
            Message::Assign(Assignment { stamp, plan: stamp, sub_cluster: b as u32, planned, kept })
        }
        17 => Message::Leave,
        18 => {
            let numbers = vec![a, b, c, c];
            Message::Claim { batch, backend: PEERS[a as usize % PEERS.len()].0, numbers }
        }
        19 | 20 => {
            Message::Inputs { batch, granted: vec![(a, long, ()), (c, short, ()), (c, short, ())], gone: vec![b] }
        }
        21 if c % 6 == 2 => Message::Rollout { model: "m".to_owned(), number: a, decision: vec![b as u8; 3] },
        21 if c % 3 == 0 => Message::Order { number: a, model: "m".to_owned(), doing: Doing::Unload },
        21 if c % 3 == 1 => Message::Ordered { number: b, failed: (a == 0).then(String::new) },
        21 if a % 3 == 0 => Message::Ask { number: a, question: vec![0; 3] },
        21 if a % 3 == 1 => {
            let (role, clock) = (Role::Backend, Some(ClockLead { ahead: i64::MIN, error: long }));
            let told = Told { node: NodeId(b), role, name: String::new(), clock, answer: vec![1] };
            Message::Told { number: a, told: (b > 0).then_some(told) }
        }
        21 => Message::Release { batch, numbers: vec![a, b, c] },
        22 if c % 4 == 1 => {
            let answer = [None, Some(Outcome::Outputs(())), Some(Outcome::Streamed)][a as usize % 3].clone();
            Message::Streamed { number: b, answer, is_last: a % 2 == 0 }
        }
        22 if c % 4 == 2 => Message::Room { number: b, answers: a as u32 },
        _ => Message::Answers {
            run: Some(BatchRun {
                device: c as u32,
                items: a as u32,
                compute_input: short,
                compute_infer: long,
                compute_output: short,
                ended_ago: long,
                counts: b == 0,
            }),
            answers: vec![(a, Outcome::Outputs(())), (b, Outcome::Streamed), (c, Outcome::Outputs(()))],
        },
    }
}

enum Node {
    Frontend(FrontendNode<P>),
    Backend(BackendNode<P>),
}

/// A node among peers that send any messages.
struct World {
    node: Node,
    now: Time,
    peers: Vec<Links<P>>,
    ran: Vec<(BatchKey, Vec<RequestKey>)>,
}

impl World {
    fn connect(&mut self, place: usize) {
        let (peer, role) = PEERS[place];
        let mine = if matches!(self.node, Node::Frontend(_)) { Role::Frontend } else { Role::Backend };
        let timing = LinkTiming { heartbeat: Duration::from_millis(1), lost_after: Duration::from_millis(20) };
        self.peers[place].handle_connected(self.now, &hello(ME, mine), timing);
        match &mut self.node {
            Node::Frontend(node) => node.handle_connected(self.now, &hello(peer, role)),
            Node::Backend(node) => node.handle_connected(self.now, &hello(peer, role)),
        }
        self.exchange();
    }

    fn exchange(&mut self) {
        for _ in 0..6 {
            loop {
                let sent = match &mut self.node {
                    Node::Frontend(node) => match node.poll_output(self.now) {
                        None => break,
                        Some(FrontendOutput::Send(to, frame)) => Some((to, frame)),
                        Some(_) => None,
                    },
                    Node::Backend(node) => match node.poll_output(self.now) {
                        None => break,
                        Some(BackendOutput::Send(to, frame)) => Some((to, frame)),
                        Some(BackendOutput::Run { batch, members, .. }) => {
                            self.ran.push((batch, members.into_iter().map(|member| member.request).collect()));
                            None
                        }
                        Some(_) => None,
                    },
                };
                let place = |to| PEERS.iter().position(|(peer, _)| *peer == to);
                if let Some((place, frame)) = sent.and_then(|(to, frame)| Some((place(to)?, frame))) {
                    self.peers[place].handle_frame(self.now, frame);
                }
            }
            for links in &mut self.peers {
                while links.poll_event().is_some() {}
                while let Some((_, frame)) = links.poll_frame(self.now) {
                    match &mut self.node {
                        Node::Frontend(node) => node.handle_frame(self.now, frame),
                        Node::Backend(node) => node.handle_frame(self.now, frame),
                    }
                }
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let [a, b, c] = step.numbers;
        let now = self.now;
        match (step.what, &mut self.node) {
            (23, _) => self.connect(step.peer),
            (24, Node::Frontend(node)) => node.handle_disconnected(now, PEERS[step.peer].0),
            (24, Node::Backend(node)) => node.handle_disconnected(now, PEERS[step.peer].0),
            (25, Node::Frontend(node)) => {
                let queue = QueueKey { model: "m".to_owned(), version: a, shape: vec![b as i64] };
                let (deadline, queue_expiry) = (Time::from_nanos(c), Time::from_nanos(a));
                let (level, size, payload) = (b as u32, c as u32, ());
                let new = NewRequest { queue, payload, deadline, queue_expiry, level, size };
                match a % 2 {
                    0 => node.handle_request(now, new),
                    _ => node.handle_announced(now, new, now + Duration::from_nanos(b)),
                };
            }
            (25, Node::Backend(node)) => {
                let slots =
                    (0..=a.min(3)).map(|_| Slot { hardware: String::new(), device: 0, is_seat: false }).collect();
                node.handle_offer(now, Offer { slots, ..Offer::default() });
            }
            (26, Node::Frontend(node)) if c % 2 == 0 => node.handle_ready(now, a.min(b), ()),
            (26, Node::Frontend(node)) => node.handle_cancel(now, a.min(b)),
            (26, Node::Backend(node)) => {
                let (batch, members) = self.ran.pop().unwrap_or_else(|| {
                    (BatchKey { epoch: Epoch::NONE, batch: BatchId(a) }, vec![RequestKey { frontend: ME, number: b }])
                });
                let outcome = if c % 2 == 0 { Outcome::Outputs(()) } else { Outcome::Streamed };
                let outcomes = members.iter().map(|member| (*member, outcome.clone())).collect();
                node.handle_ran(now, batch, Some((u32::MAX, Duration::MAX)), None, outcomes);
            }
            (27, Node::Backend(node)) if a == 0 => node.handle_drain(now),
            (27, Node::Backend(node)) if a % 2 == 0 => {
                let request = RequestKey { frontend: PEERS[step.peer].0, number: b };
                node.handle_streamed(now, request, Some(Outcome::Outputs(())), c % 2 == 0);
            }
            _ => self.peers[step.peer].say(now, ME, message(step)),
        }
        self.now += Duration::from_nanos(step.wait);
        self.exchange();
        for links in &mut self.peers {
            links.handle_timeout(self.now);
        }
        match &mut self.node {
            Node::Frontend(node) => node.handle_timeout(self.now),
            Node::Backend(node) => node.handle_timeout(self.now),
        }
        self.exchange();
    }
}

fn play(node: Node, start: Time, steps: &[Step]) -> World {
    let peers = PEERS.map(|(peer, _)| Links::new(peer)).into();
    let mut world = World { node, now: start, peers, ran: Vec::new() };
    for place in 0..PEERS.len() {
        world.connect(place);
    }
    for step in steps {
        world.step(step);
    }
    world
}

/// Instants at which time may begin. At the last one, the counter of time is about to end.
fn starts() -> impl Strategy<Value = Time> {
    prop::sample::select(vec![0, 1_000_000_000, u64::MAX - 100_000_000]).prop_map(Time::from_nanos)
}

const HEARTBEAT: Duration = Duration::from_millis(1);
const LOST_AFTER: Duration = Duration::from_millis(20);

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_too_strange_for_a_frontend(start in starts(), steps in steps()) {
        let options = FrontendOptions { heartbeat: HEARTBEAT, lost_after: LOST_AFTER, tries: 1 };
        let world = play(Node::Frontend(FrontendNode::new(ME, options, start)), start, &steps);
        let requests = steps.iter().filter(|step| step.what == 25).count();
        let Node::Frontend(node) = &world.node else { panic!("it is one") };
        prop_assert!(node.open() + node.streams() <= requests);
    }

    #[test]
    fn nothing_is_too_strange_for_a_backend(start in starts(), steps in steps()) {
        let options = BackendOptions { heartbeat: HEARTBEAT, lost_after: LOST_AFTER, fetch_within: HEARTBEAT };
        let world = play(Node::Backend(BackendNode::new(ME, options, start)), start, &steps);
        let plans = steps.iter().filter(|step| (10..=12).contains(&step.what)).count();
        let Node::Backend(node) = &world.node else { panic!("it is one") };
        prop_assert!(node.batches() <= plans);
    }
}
