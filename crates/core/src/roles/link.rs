//! Messages between two nodes, in order and once, over a wire that may lose, double and reorder frames.

use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use super::message::{Message, NodeId};
use crate::time::Duration;

/// What goes over a wire.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Frame<P> {
    /// Who sends it.
    pub from: NodeId,
    /// The sender's link, counted from 1 each time that it makes one to this peer.
    pub session: u64,
    /// The receiver's link as the sender knows it; 0: not yet.
    pub of: u64,
    /// The number of the first message, counted from 0.
    pub first: u64,
    /// In order.
    pub messages: Vec<Message<P>>,
    /// How many of the receiver's messages have come.
    pub ack: u64,
    /// When it was sent, since the sender's start.
    pub sent: Duration,
    /// The `sent` of the last frame that came, and how long ago that was.
    pub echo: Option<(Duration, Duration)>,
}

/// Messages between two nodes.
#[derive(Debug)]
pub struct Link<P>(PhantomData<P>);
