//! A scheduler: leads, with the queues of all models and the slots of all backends, or stands by.

use std::marker::PhantomData;

use super::epoch::Epoch;
use super::link::Frame;
use super::message::{Hello, NodeId};
use crate::time::{Duration, Time};

/// How a scheduler behaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SchedulerOptions {
    /// Its place in the list of schedulers, from 0.
    pub rank: u32,
    /// How many are in the list.
    pub schedulers: u32,
    /// Longest silence between schedulers.
    pub heartbeat: Duration,
    /// Silence after which the next one takes over.
    pub takeover_after: Duration,
    /// Longest silence to frontends and backends.
    pub peer_heartbeat: Duration,
    /// Silence after which one of these is lost.
    pub lost_after: Duration,
    /// How much before its last moment a deferred batch starts.
    pub wake_margin: Duration,
    /// Whether epochs are allotted by a store that all schedulers ask ([`SchedulerNode::handle_epoch`]); otherwise each takes the next one by itself.
    pub epochs_are_allotted: bool,
}

/// What a scheduler does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SchedulerOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// Ask the store for an epoch above this number; to be answered by [`SchedulerNode::handle_epoch`].
    WantEpoch(u64),
    /// It leads from now on.
    Leads(Epoch),
    /// It stands by from now on; the epoch is that of whoever leads.
    StandsBy(Epoch),
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
    /// Something that people should know, said once.
    Note(String),
}

/// See the module.
#[derive(Debug)]
pub struct SchedulerNode<P>(PhantomData<P>);

impl<P: Clone> SchedulerNode<P> {
    /// Without peers.
    pub fn new(_node: NodeId, _options: SchedulerOptions, _now: Time) -> Self {
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

    /// The store's answer to [`SchedulerOutput::WantEpoch`]: the number allotted, or `None` if it has none now.
    pub fn handle_epoch(&mut self, _now: Time, _number: Option<u64>) {
        todo!()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, _now: Time) {
        todo!()
    }

    /// What it does next.
    pub fn poll_output(&mut self, _now: Time) -> Option<SchedulerOutput<P>> {
        todo!()
    }

    /// When to call [`SchedulerNode::handle_timeout`], and why.
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        todo!()
    }
}
