//! The questions about the whole cluster that a process has put to the leading scheduler.

use std::collections::BTreeSet;

use crate::links::Links;
use crate::message::{Message, NodeId, Told};
use downbeat_core::time::Time;

/// The numbers of the questions that the leader has not answered in full.
#[derive(Debug, Default)]
pub(super) struct Asking {
    open: BTreeSet<u64>,
}

impl Asking {
    /// Asks the leader. Returns false if there is none: the question has ended.
    pub fn ask<P: Clone>(
        &mut self,
        (now, links): (Time, &mut Links<P>),
        leader: Option<NodeId>,
        (number, question): (u64, Vec<u8>),
    ) -> bool {
        let Some(leader) = leader else { return false };
        self.open.insert(number);
        links.say(now, leader, Message::Ask { number, question });
        true
    }

    /// Takes the leader's word. Returns whether this process has asked.
    pub fn handle_told(&mut self, number: u64, told: Option<&Told>) -> bool {
        match told {
            Some(_) => self.open.contains(&number),
            None => self.open.remove(&number),
        }
    }

    /// Ends all questions, whose leader is gone. Returns their numbers.
    pub fn end(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.open)
    }
}
