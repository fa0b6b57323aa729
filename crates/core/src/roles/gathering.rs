//! A batch on a backend: its members, and where their inputs are.

use std::collections::BTreeSet;

use super::message::{NodeId, Plan, QueueKey, RequestKey};
use crate::time::{Duration, Time};

/// A member of a batch that is ready to run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member<P> {
    /// Which request.
    pub request: RequestKey,
    /// When it has to be answered, by this node's time.
    pub deadline: Time,
    /// Its inputs.
    pub payload: P,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Place<P> {
    /// Its frontend is not connected.
    Unasked,
    /// Its frontend was asked.
    Asked,
    /// Its inputs are there.
    Here(Member<P>),
    /// It runs.
    Runs,
    /// It is not run, and its frontend may not know that.
    Missed,
    /// It is not run, and its frontend knows, or it was answered.
    Done,
}

/// A batch on a backend.
#[derive(Clone, Debug)]
pub(super) struct Batch<P> {
    pub slot: u32,
    pub queue: QueueKey,
    pub expected: Duration,
    /// When it runs without what has not come.
    pub gather_until: Time,
    /// Since when it is its slot's.
    pub began: Option<Time>,
    members: Vec<(RequestKey, Place<P>)>,
    /// Those that are not there yet.
    expected_inputs: usize,
    /// Where the last one was found: frontends answer in the order in which they were asked.
    cursor: usize,
    is_running: bool,
    /// Bytes of a member's inputs, about.
    bytes: u64,
    /// When frontends were asked that have not answered.
    asked: Vec<(NodeId, Time)>,
}

impl<P> Batch<P> {
    /// As it was planned; nobody has been asked for anything. A member that is named twice is one.
    pub fn new(plan: Plan, queue: QueueKey, item_bytes: u64, gather_until: Time) -> Self {
        let Plan { slot, members, size, expected, .. } = plan;
        let mut seen = BTreeSet::new();
        let is_new = |request: &RequestKey| seen.insert(*request);
        let members: Vec<(RequestKey, Place<P>)> =
            members.into_iter().filter(is_new).map(|request| (request, Place::Unasked)).collect();
        let bytes = item_bytes.saturating_mul(u64::from(size)) / (members.len() as u64).max(1);
        let (expected_inputs, cursor, is_running) = (members.len(), 0, false);
        let (began, asked) = (None, Vec::new());
        Batch { slot, queue, expected, gather_until, began, members, expected_inputs, cursor, is_running, bytes, asked }
    }

    /// Whose members it has, in their order.
    pub fn frontends(&self) -> Vec<NodeId> {
        let mut frontends: Vec<NodeId> = Vec::new();
        for (request, _) in &self.members {
            if frontends.last() != Some(&request.frontend) && !frontends.contains(&request.frontend) {
                frontends.push(request.frontend);
            }
        }
        frontends
    }

    /// Its turn has come, and it was begun or waits for the slot.
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Whether all inputs are there that are to be had.
    pub fn is_complete(&self) -> bool {
        self.expected_inputs == 0
    }

    /// A frontend is asked for those of its members that it was not asked for.
    pub fn ask(&mut self, now: Time, frontend: NodeId) -> Vec<u64> {
        let mut numbers = Vec::new();
        if self.is_running {
            return numbers;
        }
        for (request, place) in &mut self.members {
            if request.frontend == frontend && matches!(place, Place::Unasked) {
                *place = Place::Asked;
                numbers.push(request.number);
            }
        }
        if !numbers.is_empty() {
            self.asked.push((frontend, now));
        }
        numbers
    }

    /// A frontend has answered with so many inputs: their bytes, about, and how long that took.
    pub fn fetched(&mut self, now: Time, frontend: NodeId, inputs: usize) -> Option<(u64, Duration)> {
        let place = self.asked.iter().position(|(asked, _)| *asked == frontend)?;
        let (_, since) = self.asked.swap_remove(place);
        (inputs > 0).then(|| (self.bytes.saturating_mul(inputs as u64), now.since(since)))
    }

    fn find(&mut self, request: RequestKey) -> Option<&mut Place<P>> {
        let (before, after) = self.members.split_at(self.cursor.min(self.members.len()));
        let is_it = |(other, _): &(RequestKey, Place<P>)| *other == request;
        let place = match after.iter().position(is_it) {
            Some(place) => before.len() + place,
            None => before.iter().position(is_it)?,
        };
        self.cursor = place + 1;
        self.members.get_mut(place).map(|(_, place)| place)
    }

    /// A member's inputs are there. False: nobody waits for them, or had them before.
    pub fn handle_input(&mut self, request: RequestKey, member: Member<P>) -> bool {
        match self.find(request) {
            Some(place @ Place::Asked) => {
                *place = Place::Here(member);
                self.expected_inputs -= 1;
                true
            }
            Some(Place::Here(_) | Place::Runs) => true,
            Some(Place::Unasked | Place::Missed | Place::Done) | None => false,
        }
    }

    /// A member is not to be had.
    pub fn handle_gone(&mut self, request: RequestKey) {
        if let Some(place) = self.find(request).filter(|place| matches!(place, Place::Asked)) {
            *place = Place::Done;
            self.expected_inputs -= 1;
        }
    }

    /// A frontend is lost, or nobody knows where it is: members of it that do not run are not run.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        self.asked.retain(|(asked, _)| *asked != frontend);
        for (_, place) in self.members.iter_mut().filter(|(request, _)| request.frontend == frontend) {
            match place {
                Place::Unasked | Place::Asked => {
                    *place = Place::Missed;
                    self.expected_inputs -= 1;
                }
                // The frontend knows that it had claimed them, and that this backend is lost to it.
                Place::Here(_) => *place = Place::Done,
                Place::Runs | Place::Missed | Place::Done => {}
            }
        }
    }

    /// It runs with what is there. `began`: since when, if the slot has nothing else.
    pub fn run(&mut self, began: Option<Time>) -> Vec<Member<P>> {
        (self.is_running, self.began) = (true, began);
        self.expected_inputs = 0;
        let mut members = Vec::new();
        for (_, place) in &mut self.members {
            match std::mem::replace(place, Place::Missed) {
                Place::Here(member) => {
                    members.push(member);
                    *place = Place::Runs;
                }
                Place::Unasked | Place::Asked | Place::Missed => {}
                other @ (Place::Runs | Place::Done) => *place = other,
            }
        }
        members
    }

    /// Members that it runs without, and that may still be to be had.
    pub fn missed(&self) -> Vec<RequestKey> {
        let missed = self.members.iter().filter(|(_, place)| matches!(place, Place::Missed));
        missed.map(|(request, _)| *request).collect()
    }

    /// Something has come of a member. False: it did not run, or that was said before.
    pub fn take_ran(&mut self, request: RequestKey) -> bool {
        let place = self.find(request).filter(|place| matches!(place, Place::Runs));
        place.map(|place| *place = Place::Done).is_some()
    }

    /// Members that were to run and of which nothing was said, by frontend.
    pub fn left_ran(&self) -> Vec<(NodeId, Vec<u64>)> {
        let mut left: Vec<(NodeId, Vec<u64>)> = Vec::new();
        for (request, _) in self.members.iter().filter(|(_, place)| matches!(place, Place::Runs)) {
            match left.iter_mut().find(|(frontend, _)| *frontend == request.frontend) {
                Some((_, numbers)) => numbers.push(request.number),
                None => left.push((request.frontend, vec![request.number])),
            }
        }
        left
    }
}
