//! The questions of a process that wait for answers, and the questions of others, beside the
//! process's node.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_roles::{ClockLead, NodeId, Role, Told};
use tokio::sync::mpsc;

/// An event about the whole cluster, from other threads to a node.
pub enum ViewEvent {
    /// A client asks this; the sender gets the answers, and `None` at their end.
    Ask(Vec<u8>, PartSender),
    /// The answer to a question of the leader.
    Tell((NodeId, u64), Vec<u8>),
}

/// The packed question of another process, with the leader that asked and its number of the question.
pub type FarQuestion = ((NodeId, u64), Vec<u8>);

/// Takes the answers to a question.
pub type PartSender = mpsc::UnboundedSender<Option<Part>>;

/// A process's answer.
pub struct Part {
    pub node: NodeId,
    pub role: Role,
    pub name: String,
    /// This process's clock beside that process's; `None`: not known yet.
    pub clock: Option<ClockLead>,
    /// The packed answer.
    pub answer: Vec<u8>,
}

/// The questions beside a node.
pub struct Asks {
    /// Takes the questions of others.
    answers: mpsc::UnboundedSender<FarQuestion>,
    open: BTreeMap<u64, PartSender>,
    next: u64,
}

impl Asks {
    /// No questions yet. `answers` takes those of others.
    pub fn new(answers: mpsc::UnboundedSender<FarQuestion>) -> Self {
        Asks { answers, open: BTreeMap::new(), next: 0 }
    }

    /// Notes a client's question. Returns its number.
    pub fn ask(&mut self, client: PartSender) -> u64 {
        // Clients that have waited too long are gone.
        self.open.retain(|_, client| !client.is_closed());
        let number = self.next;
        self.next += 1;
        self.open.insert(number, client);
        number
    }

    /// Takes an answer, or the end of the answers. `own`: this process's clock beside the leader's.
    /// `is_led`: whether there is a leader, and the answers are thus those of the whole cluster.
    pub fn told(&mut self, number: u64, told: Option<Told>, (own, is_led): (Option<ClockLead>, bool)) {
        let Some(client) = self.open.get(&number) else { return };
        let is_end = told.is_none();
        if is_end && !is_led {
            self.open.remove(&number);
            return;
        }
        let part = |Told { node, role, name, clock, answer }| {
            let clock = clock.zip(own).map(|(clock, own)| sum(own, clock));
            Part { node, role, name, clock, answer }
        };
        // The client may have gone.
        let _ = client.send(told.map(part));
        if is_end {
            self.open.remove(&number);
        }
    }

    /// Hands on the question of another process.
    pub fn asked(&self, from: (NodeId, u64), question: Vec<u8>) {
        // A process that is about to end answers nothing.
        let _ = self.answers.send((from, question));
    }
}

/// The lead of one clock on a second, and of the second on a third.
fn sum(a: ClockLead, b: ClockLead) -> ClockLead {
    ClockLead { ahead: a.ahead.saturating_add(b.ahead), error: a.error + b.error }
}

/// A clock beside itself.
pub const SAME: ClockLead = ClockLead { ahead: 0, error: Duration::ZERO };
