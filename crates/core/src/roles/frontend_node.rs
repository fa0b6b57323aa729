//! A frontend: has its clients' requests until they are answered, and says who runs them.

use std::marker::PhantomData;

use super::epoch::Epoch;
use super::link::Frame;
use super::message::{Hello, NodeId, Outcome, QueueKey, Refusal, ServedModel};
use crate::time::{Duration, Time};

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewRequest<P> {
    /// Whose queue it joins.
    pub queue: QueueKey,
    /// Its tensors.
    pub payload: P,
    /// When it has to be answered; `Time::MAX`: at any time.
    pub deadline: Time,
    /// When it has waited in a queue for too long; `Time::MAX`: never.
    pub queue_expiry: Time,
    /// Priority level, 0 the highest.
    pub level: u32,
    /// Items.
    pub size: u32,
}

/// What becomes of a request: said once of each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RequestEnd<P> {
    /// It was run.
    Ran(Outcome<P>),
    /// It was given up, or not taken in.
    Refused(Refusal),
    /// Its deadline is over, and nobody has run it: there was nobody who leads, or its backend was lost.
    TooLate,
    /// Whoever ran it is lost, and it must not be run twice, or was tried too often.
    Lost,
}

/// What a frontend does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrontendOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// Answer a request.
    End {
        /// Which.
        number: u64,
        /// With what.
        end: RequestEnd<P>,
    },
    /// These models may be asked for from now on, and no others.
    Models(Vec<ServedModel>),
    /// Somebody else leads.
    Leader {
        /// Who.
        scheduler: NodeId,
        /// As what.
        epoch: Epoch,
        /// Requests that were handed in to it.
        handed_in: u64,
    },
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
}

/// How a frontend behaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FrontendOptions {
    /// Longest silence on a link.
    pub heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How often a request is handed in again because its backend was lost.
    pub tries: u8,
}

/// See the module.
#[derive(Debug)]
pub struct FrontendNode<P>(PhantomData<P>);

impl<P: Clone> FrontendNode<P> {
    /// Without peers and requests.
    pub fn new(_node: NodeId, _options: FrontendOptions, _now: Time) -> Self {
        todo!()
    }

    /// A wire to somebody is there.
    pub fn handle_connected(&mut self, _now: Time, _peer: &Hello) {
        todo!()
    }

    /// The wire to somebody has ended.
    pub fn handle_disconnected(&mut self, _now: Time, _peer: NodeId) {
        todo!()
    }

    /// A frame has come.
    pub fn handle_frame(&mut self, _now: Time, _frame: Frame<P>) {
        todo!()
    }

    /// A client asks; gives the number that [`FrontendOutput::End`] will name.
    pub fn handle_request(&mut self, _now: Time, _request: NewRequest<P>) -> u64 {
        todo!()
    }

    /// A client has gone: nothing more is said of its request.
    pub fn handle_cancel(&mut self, _now: Time, _number: u64) {
        todo!()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, _now: Time) {
        todo!()
    }

    /// What it does next.
    pub fn poll_output(&mut self, _now: Time) -> Option<FrontendOutput<P>> {
        todo!()
    }

    /// When to call [`FrontendNode::handle_timeout`], and why.
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        todo!()
    }
}
