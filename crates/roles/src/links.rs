//! All links of one node.

use std::collections::{BTreeMap, VecDeque};

use crate::link::{Frame, Heard, Link, LinkTiming};
use crate::message::{ClockLead, Hello, Message, NodeId, PROTOCOL, Role};
use crate::own_pauses::{NOTICED, OwnPauses};
use downbeat_core::time::{Duration, Time};

/// The most links of a node. The node sends further peers away.
const MOST_LINKS: usize = 4096;
/// The most notes that wait for the caller.
const MOST_NOTES: usize = 64;
/// While there are messages, a node wakes up at least this often. A node that is not due to wake up
/// would not notice that it stood still.
const TICK: Duration = Duration::from_millis(5);
/// The ticks end so long after the last message.
const TICKS_FOR: Duration = Duration::from_millis(500);

/// An event on the links. Each peer has one `Up`, then messages, then one `Lost`, and so on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LinkEvent<P> {
    /// The link is up: both sides know each other. The link brings no message of an earlier link.
    Up(Hello),
    /// The next message of a peer that is up. The time of the way is already off the message's
    /// budgets.
    Message(NodeId, Message<P>),
    /// The link is lost, or never came up. Messages sent to this peer may not have come, and no
    /// more messages of the link come.
    Lost {
        /// The peer.
        peer: NodeId,
        /// Whether the caller must close the connection. Not if it has ended, or if the peer has
        /// begun a new link.
        close: bool,
    },
}

#[derive(Debug)]
struct Peer<P> {
    hello: Hello,
    link: Link<P>,
    /// Whether the peer is in `ready`.
    is_listed: bool,
}

/// All links of one node.
///
/// Call the `handle_*`, take all events, send the messages that follow from them, and take all
/// frames. At [`Links::poll_timeout`] call [`Links::handle_timeout`]. Frames are made when they are
/// taken, so messages queued in between share a frame. If frames have come and a timeout is due,
/// handle the frames first. Otherwise a live peer would count as silent.
///
/// Bounds: 4096 links; for each, [`MOST_UNACKED`](crate::MOST_UNACKED) messages. A peer that has
/// not acknowledged that many is lost.
#[derive(Debug)]
pub struct Links<P> {
    node: NodeId,
    /// The node's role. Peers may send only messages that their roles send to this one.
    role: Option<Role>,
    /// The session of the newest link.
    session: u64,
    peers: BTreeMap<NodeId, Peer<P>>,
    /// Peers that may have a frame to send.
    ready: VecDeque<NodeId>,
    events: VecDeque<LinkEvent<P>>,
    /// The earliest instant at which anything is due, and why.
    alarm: (Time, &'static str),
    /// Why peers were given up, and faults of peers, for people.
    notes: VecDeque<String>,
    /// The next tick, and the end of the ticks unless messages come.
    tick: Time,
    ticks_until: Time,
    pauses: OwnPauses,
}

impl<P: Clone> Links<P> {
    /// No links yet, of a node of this role. A peer that sends a message which its role does not
    /// send to this one is lost.
    pub(super) fn of(node: NodeId, role: Role) -> Self {
        Links { role: Some(role), ..Links::new(node) }
    }

    /// No links yet. All messages of peers are taken.
    pub fn new(node: NodeId) -> Self {
        let (peers, ready, events) = (BTreeMap::new(), VecDeque::new(), VecDeque::new());
        let (alarm, pauses) = ((Time::MAX, "nothing"), OwnPauses::default());
        let (tick, ticks_until) = (Time::MAX, Time::ZERO);
        let notes = VecDeque::new();
        Links { node, role: None, session: 0, peers, ready, events, alarm, notes, tick, ticks_until, pauses }
    }

    /// Notes that this process runs. Every input of the node must come here first. Returns how long
    /// the process stood still before; zero if it was in time.
    pub(super) fn handle_awake(&mut self, now: Time) -> Duration {
        self.pauses.handle_awake(now, self.tick.min(self.alarm.0))
    }

    /// How long this process stood still between two instants.
    pub(super) fn paused_within(&self, from: Time, to: Time) -> Duration {
        self.pauses.within(from, to)
    }

    /// Ticks for a while, because there are messages.
    fn is_busy(&mut self, now: Time) {
        self.ticks_until = now + TICKS_FOR;
        if self.tick == Time::MAX {
            self.tick = now + TICK;
        }
    }

    /// A connection to a peer is there. An existing link goes on over the new connection.
    pub fn handle_connected(&mut self, now: Time, hello: &Hello, timing: LinkTiming) {
        self.handle_awake(now);
        let peer = hello.node;
        if let Some(known) = self.peers.get_mut(&peer)
            && known.hello.role == hello.role
        {
            known.hello = hello.clone();
            known.link.hurry();
            self.attend(peer);
            return;
        }
        let is_welcome = hello.protocol == PROTOCOL && peer != self.node && self.peers.len() < MOST_LINKS;
        if !is_welcome || self.peers.contains_key(&peer) {
            self.events.push_back(LinkEvent::Lost { peer, close: true });
            self.peers.remove(&peer);
            return;
        }
        self.session += 1;
        let link = Link::new(self.session, 0, timing, now);
        self.peers.insert(peer, Peer { hello: hello.clone(), link, is_listed: false });
        self.attend(peer);
    }

    /// The last connection to a peer has ended.
    pub fn handle_disconnected(&mut self, peer: NodeId) {
        self.remove(peer, false);
    }

    /// Ends the link to a peer.
    pub fn lose(&mut self, peer: NodeId) {
        self.remove(peer, true);
    }

    /// Ends the link to a peer that has sent something impossible, with a note for people.
    pub(super) fn give_up(&mut self, peer: NodeId, why: String) {
        let Some(known) = self.peers.get(&peer) else { return };
        if self.notes.len() < MOST_NOTES {
            self.notes.push_back(format!("the link to {} is given up: {why}", known.hello.name));
        }
        self.remove(peer, true);
    }

    /// The next reason for which a peer was given up.
    pub(super) fn poll_note(&mut self) -> Option<String> {
        self.notes.pop_front()
    }

    fn remove(&mut self, peer: NodeId, close: bool) {
        if self.peers.remove(&peer).is_some() {
            self.events.push_back(LinkEvent::Lost { peer, close });
        }
    }

    /// Handles a frame. A frame from a peer without a [`Hello`] is ignored.
    pub fn handle_frame(&mut self, now: Time, frame: Frame<P>) {
        let from = frame.from;
        self.handle_awake(now);
        if !frame.messages.is_empty() {
            self.is_busy(now);
        }
        let Some(peer) = self.peers.get_mut(&from) else { return };
        match peer.link.handle_frame(now, frame, &self.pauses) {
            Heard::Nothing => {}
            Heard::Anew(theirs) => {
                self.session += 1;
                peer.link = Link::new(self.session, theirs, peer.link.timing(), now);
                self.events.push_back(LinkEvent::Lost { peer: from, close: false });
            }
            Heard::Came { is_first, messages } => {
                let from_role = peer.hello.role;
                let is_strange = |role| messages.iter().any(|message| !message.may_go(from_role, role));
                if let Some(role) = self.role.filter(|role| is_strange(*role)) {
                    let why = format!("a {from_role:?} has sent a message that it never sends to a {role:?}");
                    return self.give_up(from, why);
                }
                if is_first {
                    self.events.push_back(LinkEvent::Up(peer.hello.clone()));
                }
                self.events.extend(messages.into_iter().map(|message| LinkEvent::Message(from, message)));
            }
        }
        self.attend(from);
    }

    /// Sends a message to a peer, or nothing if the peer is not up.
    pub fn say(&mut self, now: Time, peer: NodeId, message: Message<P>) {
        let Some(known) = self.peers.get_mut(&peer).filter(|known| known.link.is_up()) else { return };
        if known.link.say(now, message) {
            self.is_busy(now);
            self.attend(peer);
        } else {
            self.remove(peer, true);
        }
    }

    /// Does everything that is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.handle_awake(now);
        let due = self.tick.min(self.alarm.0);
        if now < due {
            return;
        }
        if self.tick <= now {
            self.tick = if now < self.ticks_until { now + TICK } else { Time::MAX };
        }
        // A tick in time, with nothing else due: no link has anything to do.
        if now < self.alarm.0 && now.since(due) <= NOTICED {
            return;
        }
        let late = now.since(due);
        for peer in self.peers.values_mut() {
            peer.link.forgive(now, late);
        }
        let is_lost = |(_, peer): &(&NodeId, &Peer<P>)| peer.link.lost_at() <= now;
        let lost: Vec<NodeId> = self.peers.iter().filter(is_lost).map(|(peer, _)| *peer).collect();
        for peer in lost {
            self.remove(peer, true);
        }
        self.alarm = (Time::MAX, "nothing");
        for (node, peer) in &mut self.peers {
            peer.link.handle_timeout(now);
            if peer.link.has_frame() && !peer.is_listed {
                peer.is_listed = true;
                self.ready.push_back(*node);
            }
            self.alarm = self.alarm.min(peer.link.due());
        }
    }

    /// Queues a peer for [`Links::poll_frame`] if it has a frame to send, and updates the alarm.
    fn attend(&mut self, node: NodeId) {
        let Some(peer) = self.peers.get_mut(&node) else { return };
        if peer.link.has_frame() && !peer.is_listed {
            peer.is_listed = true;
            self.ready.push_back(node);
        }
        self.alarm = self.alarm.min(peer.link.due());
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<LinkEvent<P>> {
        self.events.pop_front()
    }

    /// The next frame to send, and its receiver.
    pub fn poll_frame(&mut self, now: Time) -> Option<(NodeId, Frame<P>)> {
        while let Some(node) = self.ready.front().copied() {
            if let Some(peer) = self.peers.get_mut(&node) {
                if let Some(frame) = peer.link.frame(self.node, now) {
                    self.alarm = self.alarm.min(peer.link.due());
                    return Some((node, frame));
                }
                peer.is_listed = false;
            }
            self.ready.pop_front();
        }
        None
    }

    /// When to call [`Links::handle_timeout`], and why. The instant may be too early, because a
    /// frame sent since may have done the work.
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let due = self.alarm.min((self.tick, "a look for pauses of its own"));
        (due.0 < Time::MAX).then_some(due)
    }

    /// Whether a peer is up.
    pub fn is_up(&self, peer: NodeId) -> bool {
        self.peers.get(&peer).is_some_and(|known| known.link.is_up())
    }

    /// The hello of a peer, up or not.
    pub fn hello(&self, peer: NodeId) -> Option<&Hello> {
        Some(&self.peers.get(&peer)?.hello)
    }

    /// A high percentile of the time that a message without tensors took from a peer. `None` before
    /// the first one.
    pub fn one_way(&self, peer: NodeId) -> Option<Duration> {
        self.peers.get(&peer)?.link.one_way()
    }

    /// The least time that a message without tensors took lately from a peer. `None` if there is no
    /// fresh one.
    pub fn fresh_way(&self, now: Time, peer: NodeId) -> Option<Duration> {
        self.peers.get(&peer)?.link.fresh_way(now)
    }

    /// A high percentile of the time to a peer and back. `None` before the first round trip.
    pub fn round_trip(&self, peer: NodeId) -> Option<Duration> {
        self.peers.get(&peer)?.link.round_trip()
    }

    /// This node's clock beside a peer's. `None` before the first round trip.
    pub fn clock(&self, peer: NodeId) -> Option<ClockLead> {
        self.peers.get(&peer)?.link.clock()
    }

    /// Whether peers have acknowledged all messages.
    pub fn is_acknowledged(&self) -> bool {
        self.peers.values().all(|peer| peer.link.is_acknowledged())
    }

    /// The peers that are up, in the order of their ids.
    pub fn peers(&self) -> impl Iterator<Item = &Hello> {
        self.peers.values().filter(|peer| peer.link.is_up()).map(|peer| &peer.hello)
    }
}
