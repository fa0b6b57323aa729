//! A scheduler's machine: it has no models and no tensors, only what decides.

use downbeat_core::Time;
use downbeat_core::roles::{Frame, Hello, NodeId, Role, SchedulerNode, SchedulerOptions, SchedulerOutput};
use tokio::sync::mpsc;

use super::cluster_load::ClusterLoad;
use super::machine::{Machine, Step};
use super::status::StatusBoard;
use super::tensors::Tensors;

/// A scheduler's machine, and where it says what people should know.
pub struct SchedulerRole {
    node: SchedulerNode<Tensors>,
    rank: u32,
    board: StatusBoard,
    load: Option<ClusterLoad>,
    store: Option<mpsc::UnboundedSender<u64>>,
}

/// The store's answer to whoever wants an epoch; `None`: it has none now.
pub struct Allotted(pub Option<u64>);

impl SchedulerRole {
    /// Without peers. `load`: whoever is told what requests and devices come to while it leads. `store`: is told above which number it wants an epoch, where epochs are
    /// allotted; the answer is an event.
    pub fn new(
        node: NodeId,
        options: SchedulerOptions,
        now: Time,
        board: StatusBoard,
        (load, store): (Option<ClusterLoad>, Option<mpsc::UnboundedSender<u64>>),
    ) -> Self {
        SchedulerRole { rank: options.rank, node: SchedulerNode::new(node, options, now), board, load, store }
    }
}

impl Machine for SchedulerRole {
    type Event = Allotted;

    fn accepts(&self, role: Role) -> bool {
        // Of two schedulers the later in the list connects.
        !matches!(role, Role::Scheduler { rank } if rank <= self.rank)
    }

    fn handle_connected(&mut self, now: Time, peer: &Hello) {
        self.board.connected(peer);
        self.node.handle_connected(now, peer);
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId) {
        self.board.disconnected(peer);
        self.node.handle_disconnected(now, peer);
    }

    fn handle_frame(&mut self, now: Time, frame: Frame<Tensors>) {
        self.node.handle_frame(now, frame);
    }

    fn handle_event(&mut self, now: Time, Allotted(epoch): Allotted) {
        self.node.handle_epoch(now, epoch);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.node.handle_timeout(now);
    }

    fn poll_step(&mut self, now: Time) -> Option<Step> {
        loop {
            match self.node.poll_output(now)? {
                SchedulerOutput::Send(peer, frame) => return Some(Step::Send(peer, frame)),
                SchedulerOutput::Lost(peer) => {
                    self.board.disconnected(peer);
                    return Some(Step::Close(peer));
                }
                SchedulerOutput::Leads(epoch) => self.board.follows(epoch, true),
                SchedulerOutput::StandsBy(epoch) => self.board.follows(epoch, false),
                SchedulerOutput::Note(note) => tracing::warn!("{note}"),
                SchedulerOutput::WantEpoch(above) => {
                    if self.store.as_ref().is_none_or(|store| store.send(above).is_err()) {
                        self.node.handle_epoch(now, None);
                    }
                }
            }
        }
    }

    fn report(&self) {
        self.board.measured(self.node.links());
        if let Some(load) = &self.load {
            load.look(self.node.leads(), self.node.sample());
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.node.poll_timeout().map(|(at, _)| at)
    }
}
