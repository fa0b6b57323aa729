//! The interface of a role's state machine to the loop that has the sockets.

use downbeat_core::Time;
use downbeat_roles::{Frame, NodeId, Role, RoleNode};

use crate::wire::tensors::Tensors;

/// A step that the loop takes for a state machine.
pub enum Step {
    /// Send this frame.
    Send(NodeId, Frame<Tensors>),
    /// Connect to this peer at this address.
    Connect(NodeId, String),
    /// Close the connection of this peer's link.
    Close(NodeId),
    /// End the loop: nothing is left to do.
    End,
}

/// A role in its process: the state machine, and the effects of its decisions.
pub trait Machine: 'static {
    /// The state machine.
    type Node: RoleNode<Tensors>;
    /// An event from other threads.
    type Event: Send + 'static;

    /// The state machine. The loop brings connections, frames and timeouts to it.
    fn node(&self) -> &Self::Node;

    /// The state machine, for an input.
    fn node_mut(&mut self) -> &mut Self::Node;

    /// Whether a peer of this role may connect to this process.
    fn accepts(&self, role: Role) -> bool;

    /// Handles an event from another thread.
    fn handle_event(&mut self, now: Time, event: Self::Event);

    /// The next step for the loop. The state machine does its other outputs itself.
    fn poll_step(&mut self, now: Time) -> Option<Step>;

    /// Reports the state of the role, from time to time. The loop reports the links.
    fn report(&self) {}
}
