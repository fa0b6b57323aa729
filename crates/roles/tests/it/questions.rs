//! Questions about the whole cluster go to all frontends and backends, and their answers come back.

use crate::scheduler_node::{World, model, ms, offer};
use downbeat_roles::*;

/// The numbers of the questions that a process got.
fn questions(world: &mut World, node: NodeId) -> Vec<(u64, Vec<u8>)> {
    let question = |message| match message {
        Message::Ask { number, question } => Some((number, question)),
        _ => None,
    };
    world.heard(node).into_iter().filter_map(question).collect()
}

/// The number of a question, and the name and answer of a process; `None`: the end of the answers.
type Heard = (u64, Option<(String, Vec<u8>)>);

/// The answers that a process heard: the number, and who answered with which bytes.
fn answers(world: &mut World, node: NodeId) -> Vec<Heard> {
    let answer = |message| match message {
        Message::Told { number, told } => Some((number, told.map(|told| (told.name, told.answer)))),
        _ => None,
    };
    world.heard(node).into_iter().filter_map(answer).collect()
}

fn ask(world: &mut World, from: NodeId, number: u64) {
    world.say(from, Message::Ask { number, question: vec![9] });
}

fn tell(world: &mut World, from: NodeId, number: u64) {
    world.say(from, Message::Tell { number, answer: vec![from.0 as u8] });
}

/// A leader with a backend and two frontends.
fn world() -> (World, NodeId, [NodeId; 2]) {
    let mut world = World::leading();
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    let frontends = [world.frontend(4), world.frontend(5)];
    (world, backend, frontends)
}

#[test]
fn all_other_frontends_and_backends_answer_a_question() {
    let (mut world, backend, [asker, other]) = world();
    ask(&mut world, asker, 7);
    assert_eq!(questions(&mut world, asker), []);
    for node in [backend, other] {
        assert_eq!(questions(&mut world, node), [(0, vec![9])]);
        tell(&mut world, node, 0);
        tell(&mut world, node, 0);
    }
    let told = |node: u64| (7, Some((format!("n{node}"), vec![node as u8])));
    assert_eq!(answers(&mut world, asker), [told(1), told(5), (7, None)]);
    assert_eq!(answers(&mut world, other), []);
}

#[test]
fn a_lost_process_is_not_waited_for() {
    let (mut world, backend, [asker, other]) = world();
    ask(&mut world, asker, 0);
    tell(&mut world, backend, 0);
    world.disconnect(other);
    let heard = answers(&mut world, asker);
    assert_eq!((heard.len(), heard.last()), (2, Some(&(0, None))));
}

#[test]
fn a_lost_asker_is_forgotten_and_late_answers_are_ignored() {
    let (mut world, backend, [asker, other]) = world();
    ask(&mut world, asker, 0);
    world.disconnect(asker);
    tell(&mut world, backend, 0);
    tell(&mut world, backend, 99);
    ask(&mut world, other, 3);
    tell(&mut world, backend, 1);
    assert_eq!(answers(&mut world, other).last(), Some(&(3, None)));
}

/// A process that never answers holds no memory for long.
#[test]
fn a_question_too_many_ends_the_oldest() {
    let (mut world, _, [asker, _]) = world();
    (0..65).for_each(|number| ask(&mut world, asker, number));
    assert_eq!(answers(&mut world, asker), [(0, None)]);
}

#[test]
fn a_scheduler_that_leads_asks_for_itself() {
    let (mut world, backend, frontends) = world();
    world.node.handle_ask(world.now, 5, vec![1]);
    world.exchange();
    for node in [backend, frontends[0], frontends[1]] {
        tell(&mut world, node, 0);
    }
    let told: Vec<_> = std::mem::take(&mut world.told);
    let names: Vec<_> = told.iter().map(|(number, told)| (*number, told.as_ref().map(|t| &*t.name))).collect();
    assert_eq!(names, [(5, Some("n1")), (5, Some("n4")), (5, Some("n5")), (5, None)]);
}

#[test]
fn a_question_without_a_leader_ends_at_once() {
    let mut world = World::with(1, 2, None);
    world.node.handle_ask(world.now, 5, vec![1]);
    world.exchange();
    assert_eq!(world.told, [(5, None)]);
}
