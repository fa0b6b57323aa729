//! Scenarios of one role: its peers' messages in, its actions out, readable without Rust.
//!
//! A file has a script, a line of dashes, and the timeline that is made of it (`UPDATE_SCENARIOS=1`
//! writes it anew: read the difference). The one role that is tested is real; its peers are links
//! that say what the script has them say. Wires take no time. The script (times in milliseconds):
//!
//! ```text
//! frontend [tries=2] [lost_after=10]     or: backend [fetch_within=5] [lost_after=10]
//! at 0 connect s0 f1 b1                  s: schedulers by rank, f: frontends, b: backends; s0' is s0 started anew
//! at 5 disconnect s0                     the wire ends; both sides know
//! at 5 cut s0                            the wire loses everything from now on, and nobody knows; "mend s0" ends that
//! at 1 s0 leads 1/0                      an epoch: number/rank
//! at 1 s0 models m n:once                n: a request of it must not run twice
//! at 1 s0 refuses 0=lost 1=hopeless 2=full
//! at 1 s0 claims 1/0#7 for=b1 0 1        a batch: epoch#number; its backend; then requests
//! at 1 b1 releases 1/0#7 0               at 1 b1 answers 0 1
//! at 1 s0 names 0=m                      at 1 s0 meets f1
//! at 1 s0 plans 1/0#7 slot=0 queue=0 expected=5 f1:0 f1:1 f2:4
//! at 1 f1 inputs 1/0#7 0 1 gone=2 [left=20]
//! at 1 request m [deadline=50] [size=1]  the clients' of a frontend; deadline: an instant
//! at 1 cancel 0
//! at 1 offer m [slots=2]                 a backend's own
//! at 1 loads m                           the backend has loaded it; or: unloads, failed
//! at 1 ran 1/0#7 f1:0 f1:1               members of which something came; "nothing" before them: no items ran
//! at 1 ran 1/0#7 f1:0:streamed          the run is over, and its answers come one by one
//! at 1 streamed f1:0 [last]              one of them; a peer's: at 1 b1 streams 0 [last], at 1 b1 answers 0:streamed
//! at 1 room 0 2                          the client of request 0 has taken two of them; a peer's: at 1 f1 room 0 2
//! at 1 drain
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use downbeat_core::{Duration, Time};
use downbeat_roles::*;

use crate::role_texts::*;
use crate::scenario_file::check;

enum Node {
    Frontend(FrontendNode<P>),
    Backend(BackendNode<P>),
}

struct World {
    node: Node,
    me: Hello,
    now: Time,
    peers: BTreeMap<String, (Hello, Links<P>)>,
    cut: BTreeSet<String>,
    lost_after: Duration,
    /// Requests so far.
    requests: u64,
    timeline: String,
}

fn run(script: &str) -> String {
    let mut world = None;
    let mut events = BTreeMap::new();
    for (line, text) in script.lines().enumerate() {
        let words: Vec<&str> = if text.starts_with('#') { Vec::new() } else { text.split_whitespace().collect() };
        match words.as_slice() {
            [] => {}
            ["at", at, event @ ..] => drop(events.insert((Time::ZERO + millis(at), line), event.to_vec())),
            options => world = Some(World::new(options)),
        }
    }
    let mut world = world.expect("a first line that says which role");
    while let Some(((at, _), words)) = events.pop_first() {
        world.advance(at);
        world.play(&words);
        world.exchange();
    }
    let end = world.now + Duration::from_millis(30);
    world.advance(end);
    world.timeline
}

impl World {
    fn new(options: &[&str]) -> Self {
        let option = |name| option(options, name).map(millis);
        let heartbeat = Duration::from_millis(1);
        let lost_after = option("lost_after").unwrap_or(Duration::from_millis(10));
        let id = NodeId(1);
        let (node, role) = match options[0] {
            "frontend" => {
                let tries =
                    options.iter().find_map(|word| word.strip_prefix("tries=")).map_or(2, |v| v.parse().unwrap());
                let options = FrontendOptions { heartbeat, lost_after, tries };
                (Node::Frontend(FrontendNode::new(id, options, Time::ZERO)), Role::Frontend)
            }
            "backend" => {
                let fetch_within = option("fetch_within").unwrap_or(Duration::from_millis(5));
                let options = BackendOptions { heartbeat, lost_after, fetch_within };
                (Node::Backend(BackendNode::new(id, options, Time::ZERO)), Role::Backend)
            }
            other => panic!("what is a {other}?"),
        };
        let me = Hello { protocol: PROTOCOL, node: id, role, name: "me".into(), address: "me:1".into() };
        let (peers, cut) = (BTreeMap::new(), BTreeSet::new());
        World { node, me, now: Time::ZERO, peers, cut, lost_after, requests: 0, timeline: String::new() }
    }

    fn note(&mut self, text: &str) {
        writeln!(self.timeline, "{:>8}  {text}", self.now.since(Time::ZERO).as_millis_f64()).unwrap();
    }

    /// Lets time pass, timer by timer.
    fn advance(&mut self, to: Time) {
        loop {
            let timeout = match &self.node {
                Node::Frontend(node) => node.poll_timeout(),
                Node::Backend(node) => node.poll_timeout(),
            };
            let timeouts = self.peers.values().filter_map(|(_, links)| links.poll_timeout()).chain(timeout);
            let next = timeouts.map(|(at, _)| at).min().unwrap_or(Time::MAX);
            self.now = self.now.max(next.min(to));
            if next > to {
                return;
            }
            match &mut self.node {
                Node::Frontend(node) => node.handle_timeout(self.now),
                Node::Backend(node) => node.handle_timeout(self.now),
            }
            for (_, links) in self.peers.values_mut() {
                links.handle_timeout(self.now);
            }
            self.exchange();
        }
    }

    fn output(&mut self) -> Option<(NodeId, Frame<P>)> {
        loop {
            let now = self.now;
            let text = match &mut self.node {
                Node::Frontend(node) => match node.poll_output(now)? {
                    FrontendOutput::Send(to, frame) => return Some((to, frame)),
                    FrontendOutput::End { number, end, .. } => format!("end of {number}: {}", end_text(&end)),
                    FrontendOutput::Rollout { model, .. } => format!("another decides about the rollout of {model}"),
                    FrontendOutput::Ordered { number, result } => format!("end of order {number}: {result:?}"),
                    FrontendOutput::Asked { from: (by, number), .. } => format!("question {number} of {}", name(by)),
                    FrontendOutput::Told(number, told) => {
                        format!("answer to question {number} of {}", told.map_or("nobody else".into(), |t| t.name))
                    }
                    FrontendOutput::Models(models) => {
                        format!("models {}", list(models.iter().map(|m| m.model.clone())))
                    }
                    FrontendOutput::Leader { scheduler, epoch, handed_in } => {
                        format!("follows {} as {}, hands in {handed_in}", name(scheduler), epoch_text(epoch))
                    }
                    FrontendOutput::Streamed { number, answer, is_last } => {
                        format!("{} of {number}", streamed_text(answer.as_ref(), is_last))
                    }
                    FrontendOutput::StreamLost(number) => format!("further answers of {number} are lost"),
                    FrontendOutput::Lost(peer) => format!("gives {} up", name(peer)),
                    FrontendOutput::Note(note) => note,
                },
                Node::Backend(node) => match node.poll_output(now)? {
                    BackendOutput::Send(to, frame) => return Some((to, frame)),
                    BackendOutput::Connect { frontend, address } => {
                        format!("connects to {} at {address}", name(frontend))
                    }
                    BackendOutput::Run { batch, slot, queue, members } => {
                        assert!(members.iter().all(|member| member.payload == member.request.number));
                        let members = members.iter().map(|m| match m.deadline {
                            Time::MAX => key_text(m.request),
                            at => format!("{} by {}", key_text(m.request), at.since(Time::ZERO).as_millis_f64()),
                        });
                        format!("runs {} of {} on slot {slot}: {}", batch_text(batch), queue.model, list(members))
                    }
                    BackendOutput::Model(model, Doing::Load) => format!("loads {model}"),
                    BackendOutput::Model(model, Doing::Unload) => format!("unloads {model}"),
                    BackendOutput::Order { model, doing, .. } => format!("is to {doing:?} {model}"),
                    BackendOutput::Asked { from: (by, number), .. } => format!("question {number} of {}", name(by)),
                    BackendOutput::Told(number, told) => {
                        format!("answer to question {number} of {}", told.map_or("nobody else".into(), |t| t.name))
                    }
                    BackendOutput::Left(left) => {
                        format!("no client waits for {}", list(left.into_iter().map(key_text)))
                    }
                    BackendOutput::Room(request, answers) => {
                        format!("{} has room for {answers} answers", key_text(request))
                    }
                    // The link's end is in the timeline.
                    BackendOutput::PeerLost(_) => continue,
                    BackendOutput::Leader(who, epoch) => format!("obeys {} as {}", name(who), epoch_text(epoch)),
                    BackendOutput::Lost(peer) => format!("gives {} up", name(peer)),
                    BackendOutput::Note(note) => note,
                    BackendOutput::Drained => "has nothing left to do".to_owned(),
                },
            };
            self.note(&text);
        }
    }

    /// Carries frames to and fro until no side has more.
    fn exchange(&mut self) {
        loop {
            let mut is_quiet = true;
            while let Some((to, frame)) = self.output() {
                is_quiet = false;
                let to = name(to);
                if let Some((_, links)) = self.peers.get_mut(&to).filter(|_| !self.cut.contains(&to)) {
                    links.handle_frame(self.now, frame);
                }
            }
            for peer in self.peers.keys().cloned().collect::<Vec<_>>() {
                is_quiet &= !self.hear(&peer);
            }
            if is_quiet {
                return;
            }
        }
    }

    /// Handles a peer's received messages and sends its own. Returns true if there were any.
    fn hear(&mut self, peer: &str) -> bool {
        let mut was_any = false;
        while let Some(event) = self.peers.get_mut(peer).and_then(|(_, links)| links.poll_event()) {
            was_any = true;
            match event {
                LinkEvent::Message(_, message) => {
                    let text = message_text(&message);
                    self.note(&format!("to {peer}: {text}"));
                }
                LinkEvent::Lost { .. } => self.note(&format!("{peer} has lost it")),
                LinkEvent::Up(_) => {}
            }
        }
        while let Some((_, frame)) = self.peers.get_mut(peer).and_then(|(_, links)| links.poll_frame(self.now)) {
            was_any = true;
            if !self.cut.contains(peer) {
                match &mut self.node {
                    Node::Frontend(node) => node.handle_frame(self.now, frame),
                    Node::Backend(node) => node.handle_frame(self.now, frame),
                }
            }
        }
        was_any
    }

    fn connect(&mut self, peer: &str) {
        let role = match &peer[..1] {
            "s" => Role::Scheduler { rank: peer[1..].trim_end_matches('\'').parse().unwrap() },
            "f" => Role::Frontend,
            _ => Role::Backend,
        };
        let (node, address) = (id(peer), format!("{peer}:1"));
        let hello = Hello { protocol: PROTOCOL, node, role, name: peer.into(), address };
        let timing = LinkTiming { heartbeat: Duration::from_millis(1), lost_after: self.lost_after };
        let new = || (hello.clone(), Links::new(node));
        self.peers.entry(peer.into()).or_insert_with(new).1.handle_connected(self.now, &self.me, timing);
        match &mut self.node {
            Node::Frontend(node) => node.handle_connected(self.now, &hello),
            Node::Backend(node) => node.handle_connected(self.now, &hello),
        }
    }

    fn play(&mut self, words: &[&str]) {
        let now = self.now;
        match (words, &mut self.node) {
            (["connect", peers @ ..], _) => peers.iter().for_each(|peer| self.connect(peer)),
            (["disconnect", peer], node) => {
                match node {
                    Node::Frontend(node) => node.handle_disconnected(now, id(peer)),
                    Node::Backend(node) => node.handle_disconnected(now, id(peer)),
                }
                if let Some((_, links)) = self.peers.get_mut(*peer) {
                    links.handle_disconnected(NodeId(1));
                }
            }
            (["cut", peer], _) => drop(self.cut.insert((*peer).to_owned())),
            (["mend", peer], _) => drop(self.cut.remove(*peer)),
            (["request", model, ..], Node::Frontend(node)) => {
                let deadline = option(words, "deadline").map_or(Time::MAX, |at| Time::ZERO + millis(at));
                let size = option(words, "size").map_or(1, |size| size.parse().unwrap());
                let (queue, level, queue_expiry, payload) = (queue(model), 0, Time::MAX, self.requests);
                let number = match option(words, "ready") {
                    None => {
                        node.handle_request(now, NewRequest { queue, payload, deadline, queue_expiry, level, size })
                    }
                    Some(at) => {
                        let new = NewRequest { queue, payload: (), deadline, queue_expiry, level, size };
                        node.handle_announced(now, new, Time::ZERO + millis(at))
                    }
                };
                assert_eq!(number, self.requests);
                self.requests += 1;
            }
            (["ready", number], Node::Frontend(node)) => {
                let number = number.parse().unwrap();
                node.handle_ready(now, number, number);
            }
            (["cancel", number], Node::Frontend(node)) => node.handle_cancel(now, number.parse().unwrap()),
            (["offer", models, ..], Node::Backend(node)) => {
                let slots = option(words, "slots").map_or(1, |slots| slots.parse().unwrap());
                let loadable = |model: &str| Loadable {
                    model: model.to_owned(),
                    memory: 1,
                    run_memory: 0,
                    load_time: None,
                    failed: None,
                };
                let repository = option(words, "repository").map(|names| names.split(',').map(loadable).collect());
                node.handle_offer(now, Offer { repository: repository.unwrap_or_default(), ..offer(models, slots) });
            }
            (["loads", model], Node::Backend(node)) => node.handle_done(now, model, Doing::Load, Ok(())),
            (["unloads", model], Node::Backend(node)) => node.handle_done(now, model, Doing::Unload, Ok(())),
            (["failed", model], Node::Backend(node)) => {
                node.handle_done(now, model, Doing::Load, Err("too large".to_owned()));
            }
            (["ran", batch, members @ ..], Node::Backend(node)) => {
                let (ran, members) = match members {
                    ["nothing", members @ ..] => (None, members),
                    members => (Some((members.len() as u32, Duration::from_millis(5))), members),
                };
                let outcome = |member: &&str| match member.strip_suffix(":streamed") {
                    Some(member) => (key(member), Outcome::Streamed),
                    None => (key(member), Outcome::Outputs(0)),
                };
                let outcomes = members.iter().map(outcome).collect();
                node.handle_ran(now, crate::role_texts::batch(batch), ran, ran.map(batch_run), outcomes);
            }
            (["streamed", member, last @ ..], Node::Backend(node)) => {
                node.handle_streamed(now, key(member), Some(Outcome::Outputs(0)), !last.is_empty());
            }
            (["room", number, answers], Node::Frontend(node)) => {
                node.handle_room(now, number.parse().unwrap(), answers.parse().unwrap());
            }
            (["unloaded", model], Node::Backend(node)) => node.handle_unloaded(now, model, 1),
            (["drain"], Node::Backend(node)) => node.handle_drain(now),
            ([peer, said @ ..], _) => {
                let message = message(said, id(peer));
                let (_, links) = self.peers.get_mut(*peer).unwrap_or_else(|| panic!("who is {peer}?"));
                links.say(now, NodeId(1), message);
            }
            ([], _) => {}
        }
    }
}

macro_rules! scenarios {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            check("role_scenarios", stringify!($name), run);
        }
    )* };
}

scenarios! {
    frontend_hands_in_and_grants_claims
    frontend_hands_in_again_to_whoever_leads_next
    frontend_follows_the_highest_epoch
    frontend_hands_in_again_what_a_lost_backend_had
    frontend_hands_in_again_what_nobody_ran
    frontend_hands_in_again_what_a_backend_missed
    frontend_ends_what_is_too_late
    frontend_copes_with_nonsense
    frontend_follows_the_same_leader_again
    frontend_follows_no_impossible_epoch
    frontend_waits_while_its_leader_stands_by
    frontend_ends_claimed_requests_after_a_grace
    frontend_ends_requests_that_nobody_leads
    frontend_takes_answers_from_the_holder_only
    frontend_takes_a_request_back_for_a_time
    frontend_grants_claims_of_its_leader_only
    frontend_grants_no_claim_twice
    frontend_sends_inputs_once_a_backend_is_there
    frontend_announces_requests_before_they_are_ready
    frontend_passes_on_any_number_of_answers
    frontend_runs_no_request_again_after_an_answer
    frontend_stops_answers_that_nobody_takes
    backend_keeps_inputs_until_their_plan_comes
    backend_keeps_no_inputs_without_a_plan
    backend_has_a_batch_counted_once
    backend_has_a_taken_epoch_replaced
    backend_takes_no_message_of_another_role
    backend_runs_a_batch_once_its_inputs_are_there
    backend_runs_without_what_is_late
    backend_waits_as_long_as_inputs_take
    backend_unloads_a_model
    backend_unloads_a_model_after_its_last_batch
    backend_runs_a_slot_s_batches_in_order
    backend_obeys_the_highest_epoch
    backend_drops_members_of_a_lost_frontend
    backend_copes_with_nonsense
    backend_sends_any_number_of_answers
    backend_leaves
    backend_leaves_after_its_last_answer
    backend_leaves_once_it_is_let_go
    backend_loads_and_unloads_as_it_is_told
    backend_loads_again_when_a_model_has_made_room
}
