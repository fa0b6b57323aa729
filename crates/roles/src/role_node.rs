//! The inputs that the state machines of all roles have.

use crate::link::Frame;
use crate::links::Links;
use crate::message::{Hello, NodeId};
use downbeat_core::time::Time;

/// The inputs that a frontend, a scheduler and a backend share. A loop with sockets or an emulated
/// network drives nodes of any role through this trait.
pub trait RoleNode<P> {
    /// The links, whose delays are metrics.
    fn links(&self) -> &Links<P>;

    /// A connection to a peer is there, and replaces any other. A node sends a peer away if
    /// the roles of both have no messages for each other.
    fn handle_connected(&mut self, now: Time, peer: &Hello);

    /// The last connection to a peer has ended.
    fn handle_disconnected(&mut self, now: Time, peer: NodeId);

    /// Handles a frame from a peer.
    fn handle_frame(&mut self, now: Time, frame: Frame<P>);

    /// Does everything that is due.
    fn handle_timeout(&mut self, now: Time);

    /// When to call [`RoleNode::handle_timeout`], and why.
    fn poll_timeout(&self) -> Option<(Time, &'static str)>;
}
