//! A batch on a backend: its members, and the state of their inputs.

use std::collections::BTreeSet;

use crate::message::{NodeId, Plan, QueueKey, RequestKey};
use downbeat_core::time::{Duration, Time};

/// A member of a batch that is ready to run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member<P> {
    /// The name of the request.
    pub request: RequestKey,
    /// When the client needs the answer, by this node's time.
    pub deadline: Time,
    /// The request's inputs.
    pub payload: P,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Place<P> {
    /// The member's inputs have not come yet.
    Expected,
    /// The member's inputs have come.
    Here(Member<P>),
    /// The member runs.
    Runs,
    /// The member is not run, and its frontend may not know that.
    Missed,
    /// The member is answered, or is not run and its frontend knows.
    Done,
}

/// A batch on a backend.
#[derive(Clone, Debug)]
pub(super) struct Batch<P> {
    pub slot: u32,
    pub queue: QueueKey,
    pub expected: Duration,
    /// When the batch runs without the missing inputs.
    pub gather_until: Time,
    /// Since when the slot runs only this batch.
    pub began: Option<Time>,
    members: Vec<(RequestKey, Place<P>)>,
    /// Members whose inputs may still come.
    expected_inputs: usize,
    /// The place after the member found last. Frontends answer in the order of the batch, so the
    /// search starts there.
    cursor: usize,
    is_running: bool,
    /// The approximate bytes of a member's inputs.
    bytes: u64,
    /// Frontends whose inputs are under way, and since when.
    fetches: Vec<(NodeId, Time)>,
}

impl<P> Batch<P> {
    /// A batch as planned, without inputs. A member that the plan names twice counts once.
    pub fn new(plan: Plan, queue: QueueKey, item_bytes: u64, gather_until: Time) -> Self {
        let Plan { slot, members, size, expected, .. } = plan;
        let mut seen = BTreeSet::new();
        let is_new = |request: &RequestKey| seen.insert(*request);
        let members: Vec<(RequestKey, Place<P>)> =
            members.into_iter().filter(is_new).map(|request| (request, Place::Expected)).collect();
        let bytes = item_bytes.saturating_mul(u64::from(size)) / (members.len() as u64).max(1);
        let (expected_inputs, cursor, is_running) = (members.len(), 0, false);
        let (began, fetches) = (None, Vec::new());
        Batch {
            slot,
            queue,
            expected,
            gather_until,
            began,
            members,
            expected_inputs,
            cursor,
            is_running,
            bytes,
            fetches,
        }
    }

    /// The frontends of the batch's members.
    pub fn frontends(&self) -> Vec<NodeId> {
        let mut frontends = Vec::new();
        for (request, _) in &self.members {
            if !frontends.contains(&request.frontend) {
                frontends.push(request.frontend);
            }
        }
        frontends
    }

    /// Whether the batch's turn has come. Such a batch runs, or waits in the slot's queue.
    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Whether no more inputs can come.
    pub fn is_complete(&self) -> bool {
        self.expected_inputs == 0
    }

    /// Measures how long the inputs of a frontend take from now on.
    pub fn fetch(&mut self, now: Time, frontend: NodeId) {
        self.fetches.push((frontend, now));
    }

    /// Records that a frontend has sent `inputs` inputs. Returns their approximate bytes, and since when
    /// they were under way.
    pub fn fetched(&mut self, frontend: NodeId, inputs: usize) -> Option<(u64, Time)> {
        let place = self.fetches.iter().position(|(of, _)| *of == frontend)?;
        let (_, since) = self.fetches.swap_remove(place);
        (inputs > 0).then(|| (self.bytes.saturating_mul(inputs as u64), since))
    }

    /// The frontends whose inputs are still under way, and since when; and the approximate bytes of
    /// one member's inputs.
    pub fn into_fetches(self) -> (Vec<(NodeId, Time)>, u64) {
        (self.fetches, self.bytes)
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

    /// Takes a member's inputs. Returns the member if the batch does not wait for them and does not
    /// already have them.
    pub fn handle_input(&mut self, member: Member<P>) -> Result<(), Member<P>> {
        match self.find(member.request) {
            Some(place @ Place::Expected) => {
                *place = Place::Here(member);
                self.expected_inputs -= 1;
                Ok(())
            }
            Some(Place::Here(_) | Place::Runs) => Ok(()),
            Some(Place::Missed | Place::Done) | None => Err(member),
        }
    }

    /// Marks a member as gone: its frontend does not grant it.
    pub fn handle_gone(&mut self, request: RequestKey) {
        if let Some(place) = self.find(request).filter(|place| matches!(place, Place::Expected)) {
            *place = Place::Done;
            self.expected_inputs -= 1;
        }
    }

    /// Gives up a frontend's members, because the frontend is lost or its address unknown.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        self.fetches.retain(|(of, _)| *of != frontend);
        for (_, place) in self.members.iter_mut().filter(|(request, _)| request.frontend == frontend) {
            match place {
                Place::Expected => {
                    *place = Place::Missed;
                    self.expected_inputs -= 1;
                }
                // The frontend knows that the batch had claimed them, and that its link to this
                // backend is lost. The frontend ignores their answers.
                Place::Here(_) | Place::Runs => *place = Place::Done,
                Place::Missed | Place::Done => {}
            }
        }
    }

    /// Begins the batch with the inputs that have come. `began`: since when, if the slot runs
    /// nothing else.
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
                Place::Expected | Place::Missed => {}
                other @ (Place::Runs | Place::Done) => *place = other,
            }
        }
        members
    }

    /// Members that the batch runs without, and that another batch may still claim.
    pub fn missed(&self) -> Vec<RequestKey> {
        let missed = self.members.iter().filter(|(_, place)| matches!(place, Place::Missed));
        missed.map(|(request, _)| *request).collect()
    }

    /// Marks a member as answered. Returns false if the member did not run, or was marked before.
    pub fn take_ran(&mut self, request: RequestKey) -> bool {
        let place = self.find(request).filter(|place| matches!(place, Place::Runs));
        place.map(|place| *place = Place::Done).is_some()
    }

    /// Members that ran but got no outcome, by frontend.
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
