//! Questions about the whole cluster: the leader puts each to all frontends and backends, and hands
//! their answers on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::links::Links;
use crate::message::{Hello, Message, NodeId, Role, Told};
use downbeat_core::time::Time;

/// The most questions that are open at a time. A further one ends the oldest.
const MOST_OPEN: usize = 64;

/// The process that has asked, by its number of the question. `None`: this scheduler itself.
pub(super) type Asker = (Option<NodeId>, u64);

/// The process that has answered, and its answer.
type Answer = (NodeId, Vec<u8>);

#[derive(Debug)]
struct Question {
    asker: Asker,
    /// Processes that have not answered.
    waits: BTreeSet<NodeId>,
}

/// The questions that a scheduler has while it leads.
#[derive(Debug, Default)]
pub(super) struct Questions {
    next: u64,
    /// Questions that nobody has heard yet.
    asked: Vec<(Asker, Vec<u8>)>,
    open: BTreeMap<u64, Question>,
    /// Answers, and ends of questions.
    words: VecDeque<(Asker, Option<Answer>)>,
}

impl Questions {
    /// Takes a question.
    pub fn ask(&mut self, asker: Asker, question: Vec<u8>) {
        self.asked.push((asker, question));
    }

    /// Takes a process's answer.
    pub fn handle_tell(&mut self, from: NodeId, number: u64, answer: Vec<u8>) {
        let Some(open) = self.open.get_mut(&number) else { return };
        if open.waits.remove(&from) {
            self.words.push_back((open.asker, Some((from, answer))));
            self.end_if_done(number);
        }
    }

    fn end_if_done(&mut self, number: u64) {
        if self.open.get(&number).is_some_and(|open| open.waits.is_empty()) {
            self.end(number);
        }
    }

    fn end(&mut self, number: u64) {
        if let Some(question) = self.open.remove(&number) {
            self.words.push_back((question.asker, None));
        }
    }

    /// Handles the loss of a peer, which asks and answers nothing any more.
    pub fn handle_lost(&mut self, node: NodeId) {
        self.asked.retain(|(asker, _)| asker.0 != Some(node));
        self.open.retain(|_, question| question.asker.0 != Some(node));
        for number in self.open.keys().copied().collect::<Vec<_>>() {
            if self.open.get_mut(&number).is_some_and(|open| open.waits.remove(&node)) {
                self.end_if_done(number);
            }
        }
    }

    /// Sends questions and answers. Returns the words for this scheduler itself.
    pub fn flush<P: Clone>(&mut self, now: Time, links: &mut Links<P>) -> Vec<(u64, Option<Told>)> {
        for (asker, question) in std::mem::take(&mut self.asked) {
            let is_asked = |peer: &&Hello| !matches!(peer.role, Role::Scheduler { .. }) && Some(peer.node) != asker.0;
            let others = links.peers().filter(is_asked);
            let waits: BTreeSet<NodeId> = others.map(|peer| peer.node).collect();
            let number = self.next;
            self.next += 1;
            for node in &waits {
                links.say(now, *node, Message::Ask { number, question: question.clone() });
            }
            self.open.insert(number, Question { asker, waits });
            self.end_if_done(number);
            while self.open.len() > MOST_OPEN
                && let Some(oldest) = self.open.keys().next().copied()
            {
                self.end(oldest);
            }
        }
        let mut own = Vec::new();
        for ((asker, number), word) in std::mem::take(&mut self.words) {
            let told = match word {
                Some((node, answer)) => {
                    // Its answer came a moment ago; since then it was lost.
                    let Some(hello) = links.hello(node) else { continue };
                    let (role, name) = (hello.role, hello.name.clone());
                    Some(Told { node, role, name, clock: links.clock(node), answer })
                }
                None => None,
            };
            match asker {
                Some(asker) => links.say(now, asker, Message::Told { number, told }),
                None => own.push((number, told)),
            }
        }
        own
    }
}
