//! A backend: obeys the scheduler that leads, fetches the inputs of its batches from frontends, and answers them.

use std::marker::PhantomData;

use super::epoch::Epoch;
use super::link::Frame;
use super::message::{BatchKey, Hello, NodeId, Offer, Outcome, QueueKey, RequestKey};
use crate::time::{Duration, Time};

/// How a backend behaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackendOptions {
    /// Longest silence on a link.
    pub heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How long inputs may take before a batch runs without those that have not come.
    pub fetch_within: Duration,
}

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

/// What a backend does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackendOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// A frontend to connect to.
    Connect {
        /// Who.
        frontend: NodeId,
        /// `host:port`.
        address: String,
    },
    /// Run this batch on a slot, after what that has. To be answered with [`BackendNode::handle_ran`].
    Run {
        /// Which.
        batch: BatchKey,
        /// Where.
        slot: u32,
        /// Of which queue.
        queue: QueueKey,
        /// In their order, at least one.
        members: Vec<Member<P>>,
    },
    /// Somebody else leads.
    Leader(NodeId, Epoch),
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
    /// It was told to go, and has nothing left to do.
    Drained,
}

/// See the module.
#[derive(Debug)]
pub struct BackendNode<P>(PhantomData<P>);

impl<P: Clone> BackendNode<P> {
    /// Without peers and models.
    pub fn new(_node: NodeId, _options: BackendOptions, _now: Time) -> Self {
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

    /// What it has from now on.
    pub fn handle_offer(&mut self, _now: Time, _offer: Offer) {
        todo!()
    }

    /// A batch that it was told to run is done: how many items ran and how long they took (`None`: nothing did), and what came of each member.
    pub fn handle_ran(
        &mut self,
        _now: Time,
        _batch: BatchKey,
        _ran: Option<(u32, Duration)>,
        _outcomes: Vec<(RequestKey, Outcome<P>)>,
    ) {
        todo!()
    }

    /// It is to take no more batches, and go once it has none.
    pub fn handle_drain(&mut self, _now: Time) {
        todo!()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, _now: Time) {
        todo!()
    }

    /// What it does next.
    pub fn poll_output(&mut self, _now: Time) -> Option<BackendOutput<P>> {
        todo!()
    }

    /// When to call [`BackendNode::handle_timeout`], and why.
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        todo!()
    }
}
