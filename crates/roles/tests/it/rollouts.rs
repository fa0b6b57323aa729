//! Decisions about rollouts, which the frontends of a cluster share.

use downbeat_core::{Duration, Time};
use downbeat_roles::*;

use crate::scheduler_node::World;

/// The decisions that a frontend was told: model, number and bytes.
fn told(world: &mut World, frontend: NodeId) -> Vec<(String, u64, Vec<u8>)> {
    let told = |message| match message {
        Message::Rollout { model, number, decision } => Some((model, number, decision)),
        _ => None,
    };
    world.heard(frontend).into_iter().filter_map(told).collect()
}

fn say(world: &mut World, frontend: NodeId, number: u64, decision: &[u8]) {
    world.say(frontend, Message::Rollout { model: "m".into(), number, decision: decision.to_vec() });
}

#[test]
fn other_frontends_hear_a_decision_once_and_newcomers_the_last() {
    let mut world = World::leading();
    let (first, second) = (world.frontend(1), world.frontend(2));
    say(&mut world, first, 1, b"a tenth");
    assert_eq!(told(&mut world, second), [("m".to_owned(), 1, b"a tenth".to_vec())]);
    assert_eq!(told(&mut world, first), [], "its own decision");
    say(&mut world, second, 2, b"a half");
    say(&mut world, second, 2, b"a half");
    assert_eq!(told(&mut world, first), [("m".to_owned(), 2, b"a half".to_vec())]);
    let third = world.frontend(3);
    assert_eq!(told(&mut world, third), [("m".to_owned(), 2, b"a half".to_vec())]);
}

#[test]
fn a_frontend_with_an_old_decision_hears_the_newer_one() {
    let mut world = World::leading();
    let (first, second) = (world.frontend(1), world.frontend(2));
    say(&mut world, first, 5, b"rolled back");
    told(&mut world, second);
    say(&mut world, second, 3, b"a half");
    assert_eq!(told(&mut world, second), [("m".to_owned(), 5, b"rolled back".to_vec())]);
    assert_eq!(told(&mut world, first), []);
}

const HOUR: Duration = Duration::from_millis(3_600_000);
const TIMING: LinkTiming = LinkTiming { heartbeat: HOUR, lost_after: HOUR };

fn hello(node: NodeId, role: Role) -> Hello {
    Hello { protocol: PROTOCOL, node, role, name: "n".into(), address: String::new() }
}

/// Decisions with their numbers.
type Numbered = Vec<(u64, Vec<u8>)>;
/// The decisions that a scheduler hears, and those that the frontend's owner hears.
type Heard = (Numbered, Vec<Vec<u8>>);

/// A frontend whose scheduler says what a test has it say.
struct Frontend {
    node: FrontendNode<()>,
    scheduler: Links<()>,
}

impl Frontend {
    fn new() -> Self {
        let options = FrontendOptions { heartbeat: HOUR, lost_after: HOUR, tries: 2 };
        let (node, scheduler) = (FrontendNode::new(NodeId(1), options, Time::ZERO), Links::new(NodeId(0)));
        Frontend { node, scheduler }
    }

    /// A scheduler begins to lead, and has heard of no rollout. Returns the decisions that it hears.
    fn led_by(&mut self, leader: u64) -> Numbered {
        let leader = NodeId(leader);
        self.scheduler = Links::new(leader);
        self.node.handle_connected(Time::ZERO, &hello(leader, Role::Scheduler { rank: 0 }));
        self.scheduler.handle_connected(Time::ZERO, &hello(NodeId(1), Role::Frontend), TIMING);
        // The link is up once both have heard of each other.
        self.exchange();
        let epoch = Epoch { number: leader.0, rank: 0 };
        self.said(Message::Leads(epoch)).0
    }

    fn told(&mut self, number: u64, decision: &[u8]) -> Heard {
        self.said(Message::Rollout { model: "m".into(), number, decision: decision.to_vec() })
    }

    /// The scheduler says this.
    fn said(&mut self, message: Message<()>) -> Heard {
        self.scheduler.say(Time::ZERO, NodeId(1), message);
        self.exchange()
    }

    /// Brings frames to and fro. Returns the decisions that the scheduler and the frontend's owner hear.
    fn exchange(&mut self) -> Heard {
        let (mut told, mut outputs) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            while let Some((_, frame)) = self.scheduler.poll_frame(Time::ZERO) {
                self.node.handle_frame(Time::ZERO, frame);
            }
            while let Some(output) = self.node.poll_output(Time::ZERO) {
                match output {
                    FrontendOutput::Send(_, frame) => self.scheduler.handle_frame(Time::ZERO, frame),
                    FrontendOutput::Rollout { decision, .. } => outputs.push(decision),
                    _ => {}
                }
            }
            while let Some(event) = self.scheduler.poll_event() {
                if let LinkEvent::Message(_, Message::Rollout { number, decision, .. }) = event {
                    told.push((number, decision));
                }
            }
        }
        (told, outputs)
    }

    fn decide(&mut self, decision: &[u8]) -> Numbered {
        self.node.handle_rollout(Time::ZERO, "m", decision);
        self.exchange().0
    }
}

#[test]
fn a_new_leader_hears_the_decisions_of_its_frontends() {
    let mut frontend = Frontend::new();
    assert_eq!(frontend.decide(b"a tenth"), [], "nobody leads");
    assert_eq!(frontend.led_by(5), [(1, b"a tenth".to_vec())]);
    assert_eq!(frontend.told(2, b"a half"), (vec![], vec![b"a half".to_vec()]));
    assert_eq!(frontend.decide(b"rolled back"), [(3, b"rolled back".to_vec())]);
    assert_eq!(frontend.led_by(6), [(3, b"rolled back".to_vec())]);
}

#[test]
fn an_old_decision_of_a_leader_is_answered_with_the_newer_one() {
    let mut frontend = Frontend::new();
    frontend.led_by(5);
    frontend.told(4, b"rolled back");
    assert_eq!(frontend.told(3, b"a half"), (vec![(4, b"rolled back".to_vec())], vec![]));
    assert_eq!(frontend.told(4, b"rolled back"), (vec![], vec![]), "the same is no news");
}

#[test]
fn a_decision_that_is_too_long_stays_with_its_frontend() {
    let mut frontend = Frontend::new();
    frontend.led_by(5);
    assert_eq!(frontend.decide(&[0; 5000]), []);
    assert_eq!(frontend.decide(b"a half"), [(1, b"a half".to_vec())]);
}
