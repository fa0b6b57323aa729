//! Links over a wire that loses, doubles, reorders and delays, with sides that begin anew. Messages
//! come in order and once, or the link is lost.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::{Duration, Time};
use downbeat_roles::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

type P = ();

const TIMING: LinkTiming = LinkTiming { heartbeat: Duration::from_millis(1), lost_after: Duration::from_millis(20) };

fn ms(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn hello(node: u64) -> Hello {
    let role = Role::Scheduler { rank: node as u32 };
    Hello { protocol: PROTOCOL, node: NodeId(node), role, name: format!("n{node}"), address: String::new() }
}

/// A message with its number.
fn tagged(link: u64, number: u64) -> Message<P> {
    Message::Cancel(vec![link, number])
}

/// One side of a link, with the messages that it sent and received.
struct Side {
    links: Links<P>,
    peer: u64,
    /// Links that came up so far.
    ups: u64,
    is_up: bool,
    /// Messages sent on the current link.
    said: u64,
    /// The peer's link that the current link receives, and how many messages have come.
    heard: Option<(u64, u64)>,
    /// The peer's earlier links.
    before: Vec<u64>,
}

impl Side {
    fn new(node: u64, peer: u64) -> Self {
        let links = Links::new(NodeId(node));
        Side { links, peer, ups: 0, is_up: false, said: 0, heard: None, before: Vec::new() }
    }

    fn say(&mut self, now: Time) {
        if self.is_up {
            self.links.say(now, NodeId(self.peer), tagged(self.ups, self.said));
            self.said += 1;
        }
    }

    /// Judges an event. Returns true if it was not a message.
    fn judge(&mut self) {
        while let Some(event) = self.links.poll_event() {
            match event {
                LinkEvent::Up(peer) => {
                    assert_eq!(peer, hello(self.peer));
                    assert!(!self.is_up, "up twice");
                    (self.is_up, self.said, self.ups) = (true, 0, self.ups + 1);
                }
                LinkEvent::Lost { peer, .. } => {
                    assert_eq!(peer, NodeId(self.peer));
                    self.is_up = false;
                    self.before.extend(self.heard.take().map(|(link, _)| link));
                }
                LinkEvent::Message(peer, message) => {
                    assert!(self.is_up, "a message of nobody");
                    assert_eq!(peer, NodeId(self.peer));
                    let Message::Cancel(tag) = message else { panic!("nobody said that") };
                    let (link, number) = (tag[0], tag[1]);
                    assert!(!self.before.contains(&link), "a message of a link that is lost");
                    let (heard, next) = self.heard.unwrap_or((link, 0));
                    assert_eq!((link, number), (heard, next), "in order, once, of one link");
                    self.heard = Some((link, next + 1));
                }
            }
        }
    }
}

struct World {
    now: Time,
    sides: [Side; 2],
    /// Frames on their way, each with the index of the receiver.
    wire: VecDeque<(usize, Frame<P>)>,
    /// Messages in frames so far.
    sent: usize,
}

impl World {
    fn new() -> Self {
        World { now: Time::ZERO, sides: [Side::new(1, 2), Side::new(2, 1)], wire: VecDeque::new(), sent: 0 }
    }

    fn connect(&mut self, side: usize) {
        let peer = self.sides[side].peer;
        self.sides[side].links.handle_connected(self.now, &hello(peer), TIMING);
        self.sides[side].judge();
    }

    fn send(&mut self) {
        for side in 0..2 {
            while let Some((to, frame)) = self.sides[side].links.poll_frame(self.now) {
                assert_eq!(to, NodeId(self.sides[side].peer));
                self.sent += frame.messages.len();
                self.wire.push_back((1 - side, frame));
            }
        }
    }

    fn deliver(&mut self, place: usize) {
        if let Some((to, frame)) = self.wire.remove(place) {
            self.sides[to].links.handle_frame(self.now, frame);
            self.sides[to].judge();
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for side in &mut self.sides {
            side.links.handle_timeout(self.now);
            side.judge();
        }
    }

    /// From now on the wire is good, and connects both sides.
    fn calm(&mut self, rounds: usize) {
        for _ in 0..rounds {
            for side in 0..2 {
                self.connect(side);
            }
            self.send();
            while !self.wire.is_empty() {
                self.deliver(0);
                self.send();
            }
            self.pass(Duration::from_micros(500));
        }
    }

    fn step(&mut self, what: u8, pick: usize) {
        let side = pick % 2;
        let place = pick / 2 % self.wire.len().max(1);
        match what {
            0..=2 => self.deliver(place),
            3 => self.deliver(0),
            4 => drop(self.wire.remove(place)),
            5 => {
                if let Some(again) = self.wire.get(place).cloned() {
                    self.wire.push_back(again);
                }
            }
            6..=8 => (0..pick % 7).for_each(|_| self.sides[side].say(self.now)),
            9..=11 => self.pass(Duration::from_micros(pick as u64 % 3_000)),
            12 | 13 => self.connect(side),
            14 if pick.is_multiple_of(5) => {
                let peer = NodeId(self.sides[side].peer);
                self.sides[side].links.handle_disconnected(peer);
                self.sides[side].judge();
            }
            _ => {}
        }
        self.send();
        // A very long wire is no harder.
        self.wire.truncate(400);
    }
}

fn seeded(cases: u32) -> ProptestConfig {
    let seed = std::env::var("LINK_SEED").ok().and_then(|seed| seed.parse().ok());
    let rng_seed = RngSeed::Fixed(seed.unwrap_or_else(|| u64::from(std::process::id())));
    println!("LINK_SEED={rng_seed:?} has these cases again");
    ProptestConfig { cases, rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(seeded(256))]

    #[test]
    fn messages_come_in_order_and_once_whatever_the_wire_does(
        steps in prop::collection::vec((0u8..16, 0usize..10_000), 0..1_500)
    ) {
        let mut world = World::new();
        for side in 0..2 {
            world.connect(side);
        }
        for (what, pick) in steps {
            world.step(what, pick);
        }
        // Frames on their way may still arrive. After that, all is well within a while.
        world.calm(800);
        for side in &world.sides {
            prop_assert!(side.is_up, "they find each other");
        }
        for (said, heard) in [(0, 1), (1, 0)] {
            for _ in 0..10 {
                let now = world.now;
                world.sides[said].say(now);
            }
            world.calm(20);
            let (said, heard) = (&world.sides[said], &world.sides[heard]);
            prop_assert_eq!(heard.heard.map(|(_, messages)| messages), Some(said.said), "all that was said has come");
            prop_assert!(said.links.is_acknowledged());
        }
    }

    #[test]
    fn no_frame_is_too_strange(
        frames in prop::collection::vec(
            (0u64..4, prop::sample::select(vec![0, 1, 2, 3, 7, u64::MAX]), prop::sample::select(vec![0, 1, 2, u64::MAX]),
             prop::sample::select(vec![0, 1, 5, u64::MAX]), 0usize..4, prop::sample::select(vec![0, 1, 3, u64::MAX]),
             prop::sample::select(vec![0, 1, 1_000_000, u64::MAX]), prop::sample::select(vec![0, 1, u64::MAX])),
            0..60,
        )
    ) {
        let mut links: Links<P> = Links::new(NodeId(1));
        links.handle_connected(ms(1), &hello(2), TIMING);
        for (n, (from, session, of, first, messages, ack, sent, held)) in (1..).zip(frames) {
            let now = ms(n);
            let echo = (held < 2).then(|| (Duration::from_nanos(held), Duration::from_nanos(sent)));
            let messages = vec![Message::Cancel(vec![1]); messages];
            let sent = Duration::from_nanos(sent);
            links.handle_frame(now, Frame { from: NodeId(from), session, of, first, messages, ack, sent, echo });
            links.say(now, NodeId(2), Message::Leave);
            while links.poll_event().is_some() {}
            while links.poll_frame(now).is_some() {}
            links.handle_timeout(now);
        }
    }
}

/// Two links that are up, at 1 ms.
fn up() -> World {
    let mut world = World::new();
    world.calm(2);
    assert!(world.sides[0].is_up && world.sides[1].is_up);
    world
}

#[test]
fn what_is_said_in_one_round_shares_a_frame() {
    let mut world = up();
    let now = world.now;
    (0..100).for_each(|_| world.sides[0].say(now));
    world.send();
    let frames: Vec<usize> = world.wire.iter().map(|(_, frame)| frame.messages.len()).collect();
    assert_eq!(frames, [100]);
}

#[test]
fn a_frame_from_before_the_link_brings_no_link_up() {
    let mut world = World::new();
    world.connect(0);
    world.send();
    world.connect(1);
    world.deliver(0);
    assert!(!world.sides[1].is_up, "it may be of an earlier link");
    world.calm(1);
    assert!(world.sides[1].is_up);
}

#[test]
fn a_lost_frame_is_sent_again_first_one_message_alone() {
    let mut world = up();
    let now = world.now;
    (0..3).for_each(|_| world.sides[0].say(now));
    world.send();
    world.wire.clear();
    for _ in 0..5 {
        world.pass(Duration::from_micros(500));
        world.send();
    }
    let again: Vec<usize> =
        world.wire.iter().filter(|(to, _)| *to == 1).map(|(_, frame)| frame.messages.len()).collect();
    assert_eq!(again.iter().sum::<usize>(), 1, "{again:?}");
    world.calm(4);
    assert_eq!(world.sides[1].heard, Some((1, 3)));
}

#[test]
fn a_peer_that_only_stood_still_gets_one_message_twice() {
    let mut world = up();
    let now = world.now;
    // Three frames.
    (0..300).for_each(|_| world.sides[0].say(now));
    for _ in 0..14 {
        world.pass(Duration::from_micros(500));
        world.send();
    }
    world.calm(20);
    assert_eq!(world.sides[1].heard, Some((1, 300)));
    assert!((301..=302).contains(&world.sent), "{}", world.sent);
}

#[test]
fn budgets_shrink_while_they_wait_and_on_their_way() {
    let mut world = up();
    let (left, queue_left) = (Duration::from_millis(100), Duration::MAX);
    let ready_in = Duration::from_millis(7);
    let request = HandedIn { number: 0, queue: QueueAlias(0), left, queue_left, ready_in, level: 0, size: 1, tried: 0 };
    world.calm(20);
    world.sides[0].links.say(world.now, NodeId(2), Message::Requests(vec![request]));
    world.send();
    // The frame is lost, and sent again after 2.5 ms; then it takes 3 ms.
    world.wire.clear();
    while !world.wire.iter().any(|(_, frame)| !frame.messages.is_empty()) {
        world.pass(Duration::from_micros(500));
        world.send();
        world.wire.retain(|(_, frame)| !frame.messages.is_empty());
    }
    world.now += Duration::from_millis(3);
    let (_, frame) = world.wire.pop_front().unwrap();
    world.sides[1].links.handle_frame(world.now, frame);
    let Some(LinkEvent::Message(_, Message::Requests(came))) = world.sides[1].links.poll_event() else {
        panic!("it has come")
    };
    assert_eq!((came[0].left, came[0].queue_left), (Duration::from_micros(94_500), Duration::MAX));
    assert_eq!(came[0].ready_in, Duration::from_micros(1_500));
}

#[test]
fn a_silent_peer_is_lost_and_its_wire_to_be_closed() {
    let mut world = up();
    let start = world.now;
    while world.sides[0].links.is_up(NodeId(2)) {
        let (at, why) = world.sides[0].links.poll_timeout().unwrap();
        assert!(at <= start + Duration::from_millis(21), "{why}");
        world.now = world.now.max(at);
        world.sides[0].links.handle_timeout(world.now);
        while world.sides[0].links.poll_frame(world.now).is_some() {}
    }
    assert!(world.now.since(start) >= Duration::from_millis(19));
    assert_eq!(world.sides[0].links.poll_event(), Some(LinkEvent::Lost { peer: NodeId(2), close: true }));
    assert_eq!(world.sides[0].links.poll_event(), None);
}

#[test]
fn a_stopped_process_listens_again_before_it_calls_peers_silent() {
    let mut world = up();
    world.pass(Duration::from_millis(1_000));
    assert!(world.sides[0].is_up, "it was itself that stood still");
    world.pass(Duration::from_millis(9));
    assert!(world.sides[0].is_up);
    world.pass(Duration::from_millis(1_000));
    assert!(!world.sides[0].is_up, "it was late again, and had heard nothing");
}

#[test]
fn a_peer_that_takes_nothing_is_lost_once() {
    let mut world = up();
    let now = world.now;
    for number in 0..MOST_UNACKED as u64 + 10 {
        world.sides[0].links.say(now, NodeId(2), tagged(1, number));
    }
    assert_eq!(world.sides[0].links.poll_event(), Some(LinkEvent::Lost { peer: NodeId(2), close: true }));
    assert_eq!(world.sides[0].links.poll_event(), None);
}

#[test]
fn other_protocols_oneself_and_double_roles_are_sent_away() {
    let mut links: Links<P> = Links::new(NodeId(1));
    let other = Hello { protocol: PROTOCOL + 1, ..hello(2) };
    for stranger in [other, hello(1)] {
        links.handle_connected(ms(0), &stranger, TIMING);
        let lost = LinkEvent::Lost { peer: stranger.node, close: true };
        assert_eq!((links.poll_event(), links.poll_frame(ms(0))), (Some(lost), None));
    }
    links.handle_connected(ms(0), &hello(2), TIMING);
    links.handle_connected(ms(0), &Hello { role: Role::Backend, ..hello(2) }, TIMING);
    assert_eq!(links.poll_event(), Some(LinkEvent::Lost { peer: NodeId(2), close: true }));
}

#[test]
fn there_are_so_many_links_and_no_more() {
    let mut links: Links<P> = Links::new(NodeId(0));
    for node in 1..=4_100 {
        links.handle_connected(ms(0), &hello(node), TIMING);
    }
    let mut away = BTreeMap::new();
    while let Some(LinkEvent::Lost { peer, close }) = links.poll_event() {
        away.insert(peer, close);
    }
    assert_eq!(away, (4_097..=4_100).map(|node| (NodeId(node), true)).collect());
}

#[test]
fn the_way_is_known_without_a_common_clock() {
    let mut world = World::new();
    let skew = Duration::from_millis(7_000);
    let skewed = |side: usize, now: Time| if side == 1 { now + skew } else { now };
    // There 100 us, back 300 us.
    let ways = [Duration::from_micros(300), Duration::from_micros(100)];
    let mut wire: BTreeMap<(Time, u64), (usize, Frame<P>)> = BTreeMap::new();
    for side in 0..2 {
        let (now, peer) = (skewed(side, world.now), world.sides[side].peer);
        world.sides[side].links.handle_connected(now, &hello(peer), TIMING);
    }
    for n in 0..2_000 {
        for side in 0..2 {
            let at = skewed(side, world.now);
            while let Some((_, frame)) = world.sides[side].links.poll_frame(at) {
                wire.insert((world.now + ways[1 - side], n), (1 - side, frame));
            }
        }
        world.now += Duration::from_micros(20);
        while let Some(entry) = wire.first_entry().filter(|entry| entry.key().0 <= world.now) {
            let (to, frame) = entry.remove();
            world.sides[to].links.handle_frame(skewed(to, world.now), frame);
            world.sides[to].judge();
        }
        for side in 0..2 {
            let at = skewed(side, world.now);
            world.sides[side].links.handle_timeout(at);
        }
    }
    let links = |side: usize| &world.sides[side].links;
    for (side, peer) in [(0, NodeId(2)), (1, NodeId(1))] {
        let round_trip = links(side).round_trip(peer).unwrap();
        assert!(round_trip >= Duration::from_micros(400) && round_trip <= Duration::from_micros(520), "{round_trip}");
        // The links cannot know which way is the longer: each counts as half.
        let one_way = links(side).one_way(peer).unwrap();
        assert!(one_way >= Duration::from_micros(200) && one_way <= Duration::from_micros(300), "{one_way}");
        let ClockLead { ahead, error } = links(side).clock(peer).unwrap();
        let truth = if side == 0 { -7_000_000_000 } else { 7_000_000_000 };
        assert!((ahead - truth).unsigned_abs() <= error.as_nanos(), "{ahead} ns, by at most {error}");
        assert!(error <= Duration::from_micros(260), "{error}");
    }
}

/// Two links that exchange messages each millisecond, over a wire without a delay. One side, or the
/// wire, stands still for 400 ms; all that came meanwhile is there at once. Returns the percentiles
/// of the ways to both sides and of their round trips afterwards, and the least fresh ways 0.3 s
/// later.
fn after_400_ms(side_stops: bool) -> [[Duration; 3]; 2] {
    const PATIENT: LinkTiming =
        LinkTiming { heartbeat: Duration::from_millis(100), lost_after: Duration::from_millis(1_000) };
    let mut links: [Links<P>; 2] = [Links::new(NodeId(1)), Links::new(NodeId(2))];
    let peers = [NodeId(2), NodeId(1)];
    let mut wire: [Vec<Frame<P>>; 2] = [Vec::new(), Vec::new()];
    let mut after = None;
    for at in 0..1_200 {
        let now = ms(at);
        let is_stopped = (600..1_000).contains(&at);
        for side in 0..2 {
            if at == 0 {
                links[side].handle_connected(now, &hello(2 - side as u64), PATIENT);
            }
            if is_stopped && side_stops && side == 1 {
                continue;
            }
            // While the wire stands still, both sides still speak.
            if !is_stopped || side_stops {
                std::mem::take(&mut wire[side]).into_iter().for_each(|frame| links[side].handle_frame(now, frame));
            }
            while links[side].poll_event().is_some() {}
            links[side].say(now, peers[side], tagged(0, at));
            links[side].handle_timeout(now);
            while let Some((_, frame)) = links[side].poll_frame(now) {
                wire[1 - side].push(frame);
            }
        }
        if at == 1_001 {
            let high = |side: usize| [links[side].one_way(peers[side]), links[side].round_trip(peers[side])];
            after = Some([high(0), high(1)]);
        }
    }
    let fresh = |side: usize| links[side].fresh_way(ms(1_200), peers[side]);
    let [first, second] = after.unwrap();
    [(first, fresh(0)), (second, fresh(1))].map(|([way, round], fresh)| [way, round, fresh].map(Option::unwrap))
}

#[test]
fn an_own_pause_is_not_the_delay_of_the_network() {
    for delays in after_400_ms(true) {
        assert!(delays.iter().all(|delay| *delay < Duration::from_millis(5)), "{delays:?}");
    }
}

#[test]
fn a_stall_of_the_network_is_its_delay_and_is_over_once_messages_are_quick() {
    for [way, round_trip, fresh] in after_400_ms(false) {
        assert!(way > Duration::from_millis(300) && round_trip > Duration::from_millis(300), "{way} {round_trip}");
        assert!(fresh < Duration::from_millis(5), "{fresh}");
    }
}
