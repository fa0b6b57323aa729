//! A link: messages between two nodes, in order and once, over a wire that may lose, double and
//! reorder frames.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::at_most::at_most;
use crate::delay::{DelayEstimate, Least};
use crate::message::{ClockLead, Message, NodeId};
use crate::own_pauses::OwnPauses;
use downbeat_core::time::{Duration, Time};

/// The most messages in one frame.
const FRAME: usize = 128;
/// The most messages on their way. Further ones wait for acknowledgements.
const IN_FLIGHT: usize = 4096;
/// The most messages that wait for acknowledgements. A peer that needs more is lost.
pub const MOST_UNACKED: usize = 16_384;
/// How long an acknowledgement waits for a frame to the same peer.
const ACK_WITHIN: Duration = Duration::from_millis(2);
/// The least time until a message is sent again.
const RESEND_AFTER: Duration = Duration::from_millis(2);
/// The least time for a message with tensors, whose size may make its way long.
const RESEND_TENSORS_AFTER: Duration = Duration::from_millis(25);
/// The time between repeats doubles at most this often while nothing is heard.
const MOST_DOUBLINGS: u32 = 6;
/// How long the least round trip and the clocks' difference count.
const SPAN: Duration = Duration::from_millis(2_000);
/// After this time a measured delay counts for half.
const HALF_LIFE: Duration = Duration::from_millis(500);

/// The unit that goes over a wire.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "P: Deserialize<'de>"))]
pub struct Frame<P> {
    /// The sender. The transport has checked that the frame comes from this node.
    pub from: NodeId,
    /// The sender's session: from 1, greater for each new link to this peer.
    pub session: u64,
    /// The receiver's session as the sender knows it; 0: not yet known.
    pub of: u64,
    /// The number of the first message, counted from 0.
    pub first: u64,
    /// The messages, in order: at most 128, or the frame cannot be decoded.
    #[serde(deserialize_with = "at_most::<_, _, FRAME>")]
    pub messages: Vec<Message<P>>,
    /// How many of the receiver's messages have come.
    pub ack: u64,
    /// When the frame was sent, since the sender's start.
    pub sent: Duration,
    /// The `sent` of the last frame that came, and how long ago it came.
    pub echo: Option<(Duration, Duration)>,
}

/// When a link sends a frame without messages, and when it is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkTiming {
    /// Longest silence of this side.
    pub heartbeat: Duration,
    /// Silence of the peer after which it is lost.
    pub lost_after: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    ToBeSent,
    Sent(Duration),
}

/// The meaning of a frame for the link.
#[derive(Debug)]
pub(super) enum Heard<P> {
    /// The frame is old, doubled, nonsense, or has a gap before it.
    Nothing,
    /// The peer has begun a new link with this session, and the old link is over.
    Anew(u64),
    /// These messages are next, with the budgets that are left now.
    Came {
        /// Whether this frame brought the link up.
        is_first: bool,
        /// The messages, in order; perhaps none.
        messages: Vec<Message<P>>,
    },
}

/// One side of a link.
///
/// Each side has a session, and learns the other's from any frame: the greatest counts. A side
/// takes messages only from a frame that names both sessions as this side knows them. Such a frame
/// was sent after the peer had heard of this link, so no message of an earlier link is ever taken.
/// The first such frame brings the link up. A greater session of a peer that was up ends the link.
///
/// Messages are numbered. The receiver takes only the next one, and acknowledges how many it has
/// had. Without progress for a while, the sender repeats the first unacknowledged message alone. An
/// acknowledgement that answers the repeat shows that the others were lost too, and they are sent
/// again (go-back-N). An acknowledgement that answers an earlier frame shows that the receiver only
/// stood still, and that the others are on their way.
#[derive(Debug)]
pub(super) struct Link<P> {
    timing: LinkTiming,
    mine: u64,
    /// The peer's session; 0: not heard of.
    theirs: u64,
    is_up: bool,
    /// Messages without an acknowledgement, from number `base` on, each with the time it was
    /// queued.
    unacked: VecDeque<(Time, Message<P>)>,
    base: u64,
    /// How many of `unacked` were sent.
    sent: usize,
    /// The number after the greatest that was ever sent.
    sent_to: u64,
    /// The repeat of the first message, due or sent at a time. Until the peer acknowledges it, no
    /// other message is sent.
    probe: Option<Probe>,
    /// When the last acknowledgement came, or the first of `unacked` was sent.
    progress: Time,
    doublings: u32,
    /// The number of messages that have come.
    received: u64,
    /// Since when the peer waits for an acknowledgement.
    owed: Option<Time>,
    /// Whether a frame must be sent at once.
    is_urgent: bool,
    sent_at: Time,
    heard_at: Time,
    /// Whether the peer got more time, and has not been heard since.
    is_forgiven: bool,
    echo: Option<(Duration, Time)>,
    round_trip: DelayEstimate,
    least_round_trip: Least<Duration>,
    /// The least difference of this side's time and the peer's `sent`, in nanoseconds: the
    /// difference of the clocks plus the way.
    least_offset: Least<i128>,
    way: DelayEstimate,
}

fn since_start(now: Time) -> Duration {
    now.since(Time::ZERO)
}

impl<P: Clone> Link<P> {
    /// A new link. `mine`: greater than the session of every earlier link to this peer. `theirs`:
    /// the peer's session, 0 if unknown.
    pub fn new(mine: u64, theirs: u64, timing: LinkTiming, now: Time) -> Self {
        Link {
            timing,
            mine,
            theirs,
            is_up: false,
            unacked: VecDeque::new(),
            base: 0,
            sent: 0,
            sent_to: 0,
            probe: None,
            progress: now,
            doublings: 0,
            received: 0,
            owed: None,
            is_urgent: true,
            sent_at: now,
            heard_at: now,
            is_forgiven: false,
            echo: None,
            round_trip: DelayEstimate::new(100, HALF_LIFE, now),
            least_round_trip: Least::new(SPAN, now),
            least_offset: Least::new(SPAN, now),
            way: DelayEstimate::new(1_000, HALF_LIFE, now),
        }
    }

    /// When the link sends a frame without messages, and when it is lost.
    pub fn timing(&self) -> LinkTiming {
        self.timing
    }

    /// Whether both sides know each other's session.
    pub fn is_up(&self) -> bool {
        self.is_up
    }

    /// Whether the peer has acknowledged all messages.
    pub fn is_acknowledged(&self) -> bool {
        self.unacked.is_empty()
    }

    /// A high percentile of the time that a message without tensors took from the peer. `None`
    /// before the first one.
    pub fn one_way(&self) -> Option<Duration> {
        self.way.high()
    }

    /// The least time that a message without tensors took lately from the peer. `None` if there is no
    /// fresh one.
    pub fn fresh_way(&self, now: Time) -> Option<Duration> {
        self.way.fresh(now)
    }

    /// A high percentile of the time to the peer and back. `None` before the first round trip.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip.high()
    }

    /// This side's clock beside the peer's. `None` before the first round trip, or if the clocks differ
    /// by centuries.
    pub fn clock(&self) -> Option<ClockLead> {
        let (fastest, trip) = (self.least_offset.get()?, self.least_round_trip.get()?);
        // The fastest frame took between nothing and the whole round trip.
        let error = Duration::from_nanos(trip.as_nanos() / 2);
        Some(ClockLead { ahead: i64::try_from(fastest - i128::from(error.as_nanos())).ok()?, error })
    }

    /// Queues a message, which [`Link::frame`] sends. Returns false if too many messages wait for
    /// acknowledgements.
    pub fn say(&mut self, now: Time, message: Message<P>) -> bool {
        if self.unacked.len() >= MOST_UNACKED {
            return false;
        }
        self.unacked.push_back((now, message));
        true
    }

    /// Makes [`Link::frame`] send a frame at once.
    pub fn hurry(&mut self) {
        self.is_urgent = true;
    }

    /// Handles a frame. Measured delays count without the time in which this process stood still.
    pub fn handle_frame(&mut self, now: Time, mut frame: Frame<P>, pauses: &OwnPauses) -> Heard<P> {
        if frame.session == 0 || frame.session < self.theirs {
            return Heard::Nothing;
        }
        if frame.session > self.theirs {
            if self.is_up {
                return Heard::Anew(frame.session);
            }
            self.theirs = frame.session;
            self.is_urgent = true;
        }
        if frame.of != self.mine {
            // A peer that does not know this session gets a frame that names it. An old frame gets
            // no answer: a peer that is up knows the session.
            self.is_urgent |= !self.is_up && frame.of == 0;
            return Heard::Nothing;
        }
        let is_first = !self.is_up;
        self.is_up = true;
        (self.heard_at, self.is_forgiven) = (now, false);
        self.measure(now, &frame, pauses);
        self.handle_ack(now, frame.ack, frame.echo.map(|(sent, _)| sent));
        let had = self.received.checked_sub(frame.first).and_then(|had| usize::try_from(had).ok());
        let mut messages = std::mem::take(&mut frame.messages);
        if !messages.is_empty() {
            self.owed.get_or_insert(now);
        }
        match had {
            Some(0) => {}
            Some(had) if had < messages.len() => drop(messages.drain(..had)),
            _ => messages.clear(),
        }
        self.received += messages.len() as u64;
        let way = self.way_of(now, frame.sent);
        for message in &mut messages {
            message.spend(way);
        }
        Heard::Came { is_first, messages }
    }

    fn measure(&mut self, now: Time, frame: &Frame<P>, pauses: &OwnPauses) {
        let at = since_start(now);
        self.least_offset.record(now, i128::from(at.as_nanos()) - i128::from(frame.sent.as_nanos()));
        let way = self.way_of(now, frame.sent);
        // An own pause delayed the frame; the network did not.
        let waited = pauses.within(now - way, now);
        self.echo = Some((frame.sent, now - waited));
        if let Some((sent, held)) = frame.echo
            && let Some(nanos) = at.as_nanos().checked_sub(sent.as_nanos())
            && let Some(nanos) = nanos.checked_sub(held.as_nanos())
        {
            let nanos = nanos.saturating_sub(waited.as_nanos());
            self.round_trip.record(now, Duration::from_nanos(nanos));
            if waited == Duration::ZERO {
                self.least_round_trip.record(now, Duration::from_nanos(nanos));
            }
        }
        if !frame.messages.iter().any(Message::has_tensors) {
            self.way.record(now, way.saturating_sub(waited));
        }
    }

    /// How long a frame was on its way. The fastest frame took half of the shortest round trip, and
    /// the clocks tell how much longer this one took.
    fn way_of(&self, now: Time, sent: Duration) -> Duration {
        let offset = i128::from(now.as_nanos()) - i128::from(sent.as_nanos());
        let more = self.least_offset.get().map_or(0, |least| offset - least);
        let fastest = self.least_round_trip.get().map_or(0, |least| least.as_nanos() / 2);
        Duration::from_nanos(u64::try_from(more.max(0)).unwrap_or(u64::MAX)) + Duration::from_nanos(fastest)
    }

    fn handle_ack(&mut self, now: Time, ack: u64, of: Option<Duration>) {
        if ack > self.sent_to {
            return;
        }
        let Some(acked) = ack.checked_sub(self.base).and_then(|acked| usize::try_from(acked).ok()) else { return };
        if acked > 0 {
            self.unacked.drain(..acked.min(self.unacked.len()));
            self.base = ack;
            let were_lost = matches!(self.probe, Some(Probe::Sent(at)) if of.is_some_and(|of| of >= at));
            self.sent = if were_lost { 0 } else { self.sent.saturating_sub(acked) };
            (self.progress, self.doublings, self.probe) = (now, 0, None);
        }
    }

    /// When the first unacknowledged message is sent again.
    fn resend_at(&self) -> Option<Time> {
        let round_trip = self.round_trip.high().unwrap_or_default();
        let has_tensors = self.unacked.front().is_some_and(|(_, message)| message.has_tensors());
        let least = if has_tensors { RESEND_TENSORS_AFTER } else { RESEND_AFTER };
        let after = (round_trip.saturating_mul(2) + ACK_WITHIN).max(least);
        (self.sent > 0).then(|| self.progress + after.saturating_mul(1 << self.doublings))
    }

    /// When the peer is lost unless a frame comes.
    pub fn lost_at(&self) -> Time {
        self.heard_at + self.timing.lost_after
    }

    /// When the link next has something to do, and why.
    pub fn due(&self) -> (Time, &'static str) {
        let ack = self.owed.map_or(Time::MAX, |since| since + ACK_WITHIN);
        let resend = self.resend_at().unwrap_or(Time::MAX);
        let heartbeat = self.sent_at + self.timing.heartbeat;
        let dues = [(ack, "acknowledgement"), (resend, "messages again"), (heartbeat, "heartbeat")];
        dues.into_iter().fold((self.lost_at(), "a silent peer"), |least, due| if due.0 < least.0 { due } else { least })
    }

    /// Gives the peer more time, because this side was late by `late` and may not have read the
    /// peer's frames yet. The peer gets half of `lost_after`, once.
    pub fn forgive(&mut self, now: Time, late: Duration) {
        let half = Duration::from_nanos(self.timing.lost_after.as_nanos() / 2);
        if late > half && !self.is_forgiven {
            self.is_forgiven = true;
            self.heard_at = self.heard_at.max(now - half);
        }
    }

    /// Does everything that is due, except declaring the peer lost.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.resend_at().is_some_and(|at| at <= now) {
            (self.probe, self.progress) = (Some(Probe::ToBeSent), now);
            self.doublings = (self.doublings + 1).min(MOST_DOUBLINGS);
        }
        self.is_urgent |= self.owed.is_some_and(|since| since + ACK_WITHIN <= now);
        self.is_urgent |= self.sent_at + self.timing.heartbeat <= now;
    }

    /// The messages to send next: the first place in `unacked`, and how many.
    fn next(&self) -> (usize, usize) {
        match self.probe {
            _ if !self.is_up => (0, 0),
            Some(Probe::ToBeSent) => (0, self.unacked.len().min(1)),
            Some(Probe::Sent(_)) => (self.sent, 0),
            None => (self.sent, self.unacked.len().min(IN_FLIGHT).saturating_sub(self.sent).min(FRAME)),
        }
    }

    /// Whether there is a frame to send.
    pub fn has_frame(&self) -> bool {
        self.is_urgent || self.next().1 > 0
    }

    /// The next frame, if there is one to send.
    pub fn frame(&mut self, from: NodeId, now: Time) -> Option<Frame<P>> {
        if !self.has_frame() {
            return None;
        }
        let (place, count) = self.next();
        let message = |(said, message): &(Time, Message<P>)| {
            let mut message = message.clone();
            message.spend(now.since(*said));
            message
        };
        let messages: Vec<Message<P>> = self.unacked.iter().skip(place).take(count).map(message).collect();
        if count > 0 && place == 0 {
            self.progress = now;
        }
        if self.probe == Some(Probe::ToBeSent) {
            self.probe = Some(Probe::Sent(since_start(now)));
        } else {
            self.sent += count;
            self.sent_to = self.sent_to.max(self.base + self.sent as u64);
        }
        let first = self.base + place as u64;
        (self.is_urgent, self.owed, self.sent_at) = (false, None, now);
        Some(Frame {
            from,
            session: self.mine,
            of: self.theirs,
            first,
            messages,
            ack: self.received,
            sent: since_start(now),
            echo: self.echo.map(|(sent, at)| (sent, now.since(at))),
        })
    }
}
