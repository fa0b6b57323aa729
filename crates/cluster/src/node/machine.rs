//! The interface of a role's state machine to the loop that has the sockets.

use downbeat_core::Time;
use downbeat_roles::{Frame, Hello, NodeId, Role};

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

/// A role's state machine, with the effects of its decisions on the process.
pub trait Machine: 'static {
    /// An event from other threads.
    type Event: Send + 'static;

    /// Whether a peer of this role may connect to this process.
    fn accepts(&self, role: Role) -> bool;

    /// A connection to a peer is there.
    fn handle_connected(&mut self, now: Time, peer: &Hello);

    /// The connection to a peer has ended.
    fn handle_disconnected(&mut self, now: Time, peer: NodeId);

    /// Handles a frame from a peer.
    fn handle_frame(&mut self, now: Time, frame: Frame<Tensors>);

    /// Handles an event from another thread.
    fn handle_event(&mut self, now: Time, event: Self::Event);

    /// Does everything that is due.
    fn handle_timeout(&mut self, now: Time);

    /// The next step for the loop. The state machine does its other outputs itself.
    fn poll_step(&mut self, now: Time) -> Option<Step>;

    /// Reports the state of its links, from time to time.
    fn report(&self);

    /// When to call [`Machine::handle_timeout`].
    fn poll_timeout(&self) -> Option<Time>;
}
