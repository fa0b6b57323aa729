//! A role's state machine, as the loop drives it that has the sockets.

use downbeat_core::Time;
use downbeat_core::roles::{Frame, Hello, NodeId, Role};

use super::tensors::Tensors;

/// What the loop does for a machine.
pub enum Step {
    /// Send this frame.
    Send(NodeId, Frame<Tensors>),
    /// Connect to somebody there.
    Connect(NodeId, String),
    /// Close what carried this peer's link.
    Close(NodeId),
    /// Nothing is left to do: the loop may end.
    End,
}

/// A role's state machine, with what the process does of its decisions.
pub trait Machine: 'static {
    /// What comes from other threads.
    type Event: Send + 'static;

    /// Whether a peer of this role may connect to it.
    fn accepts(&self, role: Role) -> bool;

    /// A wire to somebody is there.
    fn handle_connected(&mut self, now: Time, peer: &Hello);

    /// The wire to somebody has ended.
    fn handle_disconnected(&mut self, now: Time, peer: NodeId);

    /// A frame has come.
    fn handle_frame(&mut self, now: Time, frame: Frame<Tensors>);

    /// Something from another thread.
    fn handle_event(&mut self, now: Time, event: Self::Event);

    /// Does what is due.
    fn handle_timeout(&mut self, now: Time);

    /// What the loop is to do next; the rest it does itself.
    fn poll_step(&mut self, now: Time) -> Option<Step>;

    /// Says what its links are like, from time to time.
    fn report(&self);

    /// When to call [`Machine::handle_timeout`].
    fn poll_timeout(&self) -> Option<Time>;
}
