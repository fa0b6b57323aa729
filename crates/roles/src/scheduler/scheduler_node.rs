//! A scheduler: leads, with the queues of all models and the slots of all backends, or stands by.

use std::collections::{BTreeMap, VecDeque};

use super::assigner::{AssignerOutput, SubClusterOptions};
use super::budgets::ModelBudget;
use super::election::{Election, ElectionEvent};
use super::lead::{Lead, SubCluster};
use super::rehearsed::RehearsalEvent;
use crate::asking::Asking;
use crate::assignment::{Divided, PlanWanted, SubClusterPlan};
use crate::epoch::Epoch;
use crate::link::{Frame, LinkTiming};
use crate::links::{LinkEvent, Links};
use crate::message::{Hello, Message, NodeId, Role, Told};
use crate::role_node::RoleNode;
use downbeat_core::cluster::{AutoscaleSample, Behaviour, Order, Scheduler};
use downbeat_core::ids::ModelId;
use downbeat_core::time::{Duration, Time};

/// Options of a scheduler.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SchedulerOptions {
    /// The scheduler's place in the list of schedulers, from 0.
    pub rank: u32,
    /// The number of schedulers in the list.
    pub schedulers: u32,
    /// Longest silence of this node to other schedulers.
    pub heartbeat: Duration,
    /// Silence of the leader after which the next scheduler takes over.
    pub takeover_after: Duration,
    /// Longest silence of this node to frontends and backends.
    pub peer_heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How long before its latest start a deferred batch starts.
    pub wake_margin: Duration,
    /// The order in which batches of all models get devices, until a rehearsal finds another.
    pub order: Order,
    /// Whether a rehearsal hears each lead ([`SchedulerNode::rehearsal_events`]).
    pub is_rehearsed: bool,
    /// Whether a store that all schedulers ask allots epochs ([`SchedulerNode::handle_epoch`]).
    /// Otherwise each scheduler takes the next epoch by itself.
    pub epochs_are_allotted: bool,
    /// How models are divided among sub-clusters of backends; `None`: backends choose their own
    /// models.
    pub sub_clusters: Option<SubClusterOptions>,
}

/// An action that a scheduler asks for.
#[derive(Clone, PartialEq, Debug)]
pub enum SchedulerOutput<P> {
    /// Send this frame.
    Send(NodeId, Frame<P>),
    /// Ask the store for an epoch above this number. [`SchedulerNode::handle_epoch`] takes the
    /// answer.
    WantEpoch(u64),
    /// Divide models among sub-clusters. [`SchedulerNode::handle_planned`] takes the answer.
    WantPlan(PlanWanted),
    /// This plan holds from now on. Keep it in the store, if there is one, for the next leader.
    KeepPlan(SubClusterPlan),
    /// This scheduler leads from now on.
    Leads(Epoch),
    /// This scheduler stands by from now on. The epoch is the leader's.
    StandsBy(Epoch),
    /// An answer to the [question](SchedulerNode::handle_ask) of this number; `None`: it has ended.
    Told(u64, Option<Told>),
    /// The link to this peer is given up: close what carried it.
    Lost(NodeId),
    /// Show this text to people, once.
    Note(String),
}

/// A scheduler: leads, with the queues of all models and the slots of all backends, or stands by.
#[derive(Debug)]
pub struct SchedulerNode<P> {
    options: SchedulerOptions,
    links: Links<P>,
    /// The roles of peers whose links are up.
    roles: BTreeMap<NodeId, Role>,
    election: Election,
    /// The scheduler's state while it leads.
    lead: Option<Lead>,
    /// The newest plan that the store is known to have.
    kept_plan: Option<SubClusterPlan>,
    /// The standing that the other schedulers last heard.
    standing: (Epoch, bool),
    /// Questions that the leader has, while this node stands by.
    asking: Asking,
    outputs: VecDeque<SchedulerOutput<P>>,
}

impl<P: Clone> SchedulerNode<P> {
    /// A scheduler without peers.
    pub fn new(node: NodeId, options: SchedulerOptions, now: Time) -> Self {
        let place = (options.rank, options.schedulers);
        let election =
            Election::new(place, options.takeover_after, options.epochs_are_allotted, options.lost_after, now);
        SchedulerNode {
            links: Links::of(node, Role::Scheduler { rank: options.rank }),
            roles: BTreeMap::new(),
            standing: election.standing(),
            election,
            lead: None,
            kept_plan: None,
            asking: Asking::default(),
            outputs: VecDeque::new(),
            options,
        }
    }

    /// The epoch in which the scheduler leads; `None`: it stands by.
    pub fn leads(&self) -> Option<Epoch> {
        self.election.leads()
    }

    /// Whether this scheduler leads, or stands by for a leader that is connected.
    pub fn has_leader(&self) -> bool {
        self.election.has_leader()
    }

    /// The highest epoch that the scheduler has heard of.
    pub fn heard(&self) -> Epoch {
        self.election.standing().0
    }

    /// The scheduler that makes the decisions while this node leads.
    pub fn scheduler(&self) -> Option<&Scheduler> {
        self.lead.as_ref().map(Lead::scheduler)
    }

    /// Counts of requests and busy device time since the lead began, for advice on the number of
    /// devices. `None`: the node stands by, or does not know all backends yet.
    pub fn sample(&self) -> Option<AutoscaleSample> {
        self.lead.as_ref().and_then(Lead::sample)
    }

    /// Requests that the scheduler has, waiting and in batches: none while it stands by.
    pub fn requests(&self) -> usize {
        self.lead.as_ref().map_or(0, Lead::requests)
    }

    /// The network budget of each model, by the backends that have the model, while the scheduler
    /// leads.
    pub fn budgets(&self) -> impl Iterator<Item = ModelBudget> {
        self.lead.iter().flat_map(Lead::budgets)
    }

    /// Takes the events for the rehearsal of this lead. With [`SchedulerOptions::is_rehearsed`] the
    /// caller must take all events after each input: their number has no bound here. After
    /// [`SchedulerOutput::Leads`] they are the events of the new lead.
    pub fn rehearsal_events(&mut self) -> impl Iterator<Item = RehearsalEvent> {
        self.lead.iter_mut().flat_map(Lead::rehearsal_events)
    }

    /// Sets the behaviour of a queue, as a rehearsal has found; `None`: the rule of the load decides.
    pub fn handle_behaviour(&mut self, now: Time, model: ModelId, behaviour: Option<Behaviour>) {
        if let Some(lead) = &mut self.lead {
            lead.handle_behaviour(now, model, behaviour);
        }
    }

    /// Sets the order in which batches get devices, as a rehearsal has found.
    pub fn handle_order_of_turns(&mut self, now: Time, order: Order) {
        if let Some(lead) = &mut self.lead {
            lead.handle_order_of_turns(now, order);
        }
    }

    /// Takes the store's answer to [`SchedulerOutput::WantEpoch`]: the allotted number, or `None`
    /// if the store has none now.
    pub fn handle_epoch(&mut self, now: Time, number: Option<u64>) {
        self.election.handle_epoch(now, number);
        self.attend(now);
    }

    /// Takes the plan that the store has. A later lead of this scheduler goes on from this plan.
    pub fn handle_kept_plan(&mut self, plan: SubClusterPlan) {
        if self.kept_plan.as_ref().is_none_or(|known| known.stamp < plan.stamp) {
            self.kept_plan = Some(plan);
        }
    }

    /// Takes the answer to the [`SchedulerOutput::WantPlan`] of this number: the sub-cluster of
    /// each model, or why there is no plan.
    pub fn handle_planned(&mut self, number: u64, planned: Result<Divided, String>) {
        if let Some(assigner) = self.lead.as_mut().and_then(Lead::assigner_mut) {
            assigner.handle_planned(number, planned);
        }
    }

    /// Divides models anew, at once. Returns false if the scheduler does not lead, or does not
    /// divide models.
    pub fn handle_plan_wanted(&mut self, now: Time) -> bool {
        let assigner = self.lead.as_mut().and_then(Lead::assigner_mut);
        assigner.map(|assigner| assigner.handle_wanted(now)).is_some()
    }

    /// Asks all frontends and backends a question, by the caller's number.
    /// [`SchedulerOutput::Told`] follows.
    pub fn handle_ask(&mut self, now: Time, number: u64, question: Vec<u8>) {
        if let Some(lead) = &mut self.lead {
            return lead.ask(number, question);
        }
        let leader = self.leader();
        if !self.asking.ask((now, &mut self.links), leader, (number, question)) {
            self.outputs.push_back(SchedulerOutput::Told(number, None));
        }
    }

    /// The scheduler that leads, while this one stands by and hears it.
    pub fn leader(&self) -> Option<NodeId> {
        let of_leader = Role::Scheduler { rank: self.heard().rank };
        let leader = self.roles.iter().find(|(_, role)| **role == of_leader).map(|(node, _)| *node);
        leader.filter(|_| self.lead.is_none() && self.has_leader())
    }

    /// Ends the questions of a lead that is over.
    fn end_questions(&mut self) {
        let ended = self.asking.end();
        self.outputs.extend(ended.into_iter().map(|number| SchedulerOutput::Told(number, None)));
    }

    /// The sub-clusters in their present state. Empty if the scheduler does not lead, or has no
    /// sub-clusters.
    pub fn sub_clusters(&self) -> Vec<SubCluster> {
        self.lead.as_ref().map(Lead::sub_clusters).unwrap_or_default()
    }

    /// Notes that this process runs, and whether it stood still before.
    fn awake(&mut self, now: Time) {
        let stood_still = self.links.handle_awake(now);
        if stood_still > Duration::ZERO {
            self.election.handle_pause(now, stood_still);
        }
    }

    /// Handles the events of links and of the election.
    fn attend(&mut self, now: Time) {
        while let Some(event) = self.links.poll_event() {
            match event {
                LinkEvent::Up(hello) => self.handle_up(now, &hello),
                LinkEvent::Message(from, message) => self.handle_message(now, from, message),
                LinkEvent::Lost { peer, close } => self.handle_lost(now, peer, close),
            }
        }
        while let Some(event) = self.election.poll_event() {
            match event {
                ElectionEvent::Leads(epoch) => self.begin(now, epoch),
                ElectionEvent::StandsBy(epoch) => {
                    if self.lead.take().is_some() {
                        self.tell_followers(now, epoch);
                    }
                    self.end_questions();
                    self.outputs.push_back(SchedulerOutput::StandsBy(epoch));
                }
                ElectionEvent::WantEpoch(above) => self.outputs.push_back(SchedulerOutput::WantEpoch(above)),
            }
        }
        let standing = self.election.standing();
        if std::mem::replace(&mut self.standing, standing) != standing {
            let schedulers: Vec<NodeId> = self.schedulers().collect();
            for node in schedulers {
                self.tell_standing(now, node);
            }
        }
    }

    fn schedulers(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.roles.iter().filter(|(_, role)| matches!(role, Role::Scheduler { .. })).map(|(node, _)| *node)
    }

    /// Tells frontends and backends that this scheduler no longer leads. They then wait for another
    /// leader, and are not ready.
    fn tell_followers(&mut self, now: Time, epoch: Epoch) {
        let followers = self.roles.iter().filter(|(_, role)| !matches!(role, Role::Scheduler { .. }));
        for node in followers.map(|(node, _)| *node).collect::<Vec<_>>() {
            self.links.say(now, node, Message::Standing { epoch, leads: false });
        }
    }

    fn tell_standing(&mut self, now: Time, node: NodeId) {
        let (epoch, leads) = self.standing;
        self.links.say(now, node, Message::Standing { epoch, leads });
    }

    fn handle_up(&mut self, now: Time, hello: &Hello) {
        self.roles.insert(hello.node, hello.role);
        match hello.role {
            Role::Scheduler { rank } => {
                self.election.handle_up(now, rank);
                self.tell_standing(now, hello.node);
            }
            Role::Frontend | Role::Backend => {
                if let Some(lead) = &mut self.lead {
                    lead.handle_up(now, &mut self.links, hello);
                }
            }
        }
    }

    fn handle_lost(&mut self, now: Time, peer: NodeId, close: bool) {
        if close {
            self.outputs.push_back(SchedulerOutput::Lost(peer));
        }
        match self.roles.remove(&peer) {
            Some(Role::Scheduler { rank }) => {
                if let Some(lead) = &mut self.lead {
                    lead.handle_asker_lost(peer);
                }
                if rank == self.heard().rank {
                    self.end_questions();
                }
                let of_rank = Role::Scheduler { rank };
                // Another process of that rank may already be connected.
                if self.roles.values().all(|role| *role != of_rank) {
                    self.election.handle_lost(now, rank);
                }
            }
            Some(Role::Frontend | Role::Backend) => {
                if let Some(lead) = &mut self.lead {
                    lead.handle_lost(now, peer);
                }
            }
            None => {}
        }
    }

    fn handle_message(&mut self, now: Time, from: NodeId, message: Message<P>) {
        let Some(role) = self.roles.get(&from).copied() else { return };
        match message {
            Message::Standing { epoch, leads } => {
                let leader = match role {
                    Role::Scheduler { rank } => Some((rank, leads)),
                    Role::Frontend | Role::Backend => None,
                };
                if !self.election.handle_standing(now, epoch, leader) {
                    let (number, known) = (epoch.number, self.heard().number);
                    let why = format!(
                        "it reports epoch {number}, and this scheduler knows of {known} only. If the peer is a \
                         process of this cluster, restart it"
                    );
                    self.links.give_up(from, why);
                }
            }
            Message::Taken(epoch) => self.election.handle_taken(now, epoch),
            Message::Told { number, told } => {
                if self.asking.handle_told(number, told.as_ref()) {
                    self.outputs.push_back(SchedulerOutput::Told(number, told));
                }
            }
            message => match &mut self.lead {
                Some(lead) => {
                    // A scheduler that stands by asks questions, and is no follower.
                    if !matches!(role, Role::Scheduler { .. }) {
                        self.election.handle_followed();
                    }
                    lead.handle_message(now, role, from, message);
                }
                None => {
                    if let Message::Ask { number, .. } = message {
                        self.links.say(now, from, Message::Told { number, told: None });
                    }
                }
            },
        }
    }

    fn begin(&mut self, now: Time, epoch: Epoch) {
        let SchedulerOptions { wake_margin, order, is_rehearsed, lost_after, sub_clusters, .. } = self.options;
        let sub_clusters = sub_clusters.map(|options| (options, self.kept_plan.clone()));
        let mut lead = Lead::new(epoch, (wake_margin, order), is_rehearsed, lost_after, sub_clusters, now);
        let peers: Vec<Hello> = self.links.peers().cloned().collect();
        for hello in &peers {
            lead.handle_up(now, &mut self.links, hello);
        }
        self.lead = Some(lead);
        self.end_questions();
        self.outputs.push_back(SchedulerOutput::Leads(epoch));
    }

    /// The next action that the scheduler asks for.
    pub fn poll_output(&mut self, now: Time) -> Option<SchedulerOutput<P>> {
        while let Some(note) = self.links.poll_note() {
            self.outputs.push_back(SchedulerOutput::Note(note));
        }
        if let Some(lead) = &mut self.lead {
            lead.flush(now, &mut self.links);
            while let Some((number, told)) = lead.poll_told() {
                self.outputs.push_back(SchedulerOutput::Told(number, told));
            }
            while let Some(note) = lead.poll_note() {
                self.outputs.push_back(SchedulerOutput::Note(note));
            }
            while let Some(output) = lead.poll_plan() {
                self.outputs.push_back(match output {
                    AssignerOutput::Want(wanted) => SchedulerOutput::WantPlan(wanted),
                    AssignerOutput::Keep(plan) => SchedulerOutput::KeepPlan(plan),
                    AssignerOutput::Note(note) => SchedulerOutput::Note(note),
                });
            }
        }
        // A send may have lost a peer that was too slow for its messages.
        self.attend(now);
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        self.links.poll_frame(now).map(|(to, frame)| SchedulerOutput::Send(to, frame))
    }
}

impl<P: Clone> RoleNode<P> for SchedulerNode<P> {
    fn links(&self) -> &Links<P> {
        &self.links
    }

    fn handle_connected(&mut self, now: Time, peer: &Hello) {
        self.awake(now);
        let heartbeat = match peer.role {
            Role::Scheduler { .. } => self.options.heartbeat,
            Role::Frontend | Role::Backend => self.options.peer_heartbeat,
        };
        self.links.handle_connected(now, peer, LinkTiming { heartbeat, lost_after: self.options.lost_after });
        self.attend(now);
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId) {
        self.awake(now);
        self.links.handle_disconnected(peer);
        self.attend(now);
    }

    fn handle_frame(&mut self, now: Time, frame: Frame<P>) {
        self.awake(now);
        if let Some(Role::Scheduler { rank }) = self.roles.get(&frame.from) {
            self.election.handle_heard(now, *rank);
        }
        self.links.handle_frame(now, frame);
        self.attend(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.awake(now);
        self.links.handle_timeout(now);
        self.attend(now);
        self.election.handle_timeout(now);
        if let Some(lead) = &mut self.lead {
            lead.handle_timeout(now, &self.links);
        }
        self.attend(now);
    }

    fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let election = self.election.poll_timeout().map(|at| (at, "a silent leader"));
        let lead = self.lead.as_ref().map(Lead::poll_timeout).filter(|(at, _)| *at < Time::MAX);
        [self.links.poll_timeout(), election, lead].into_iter().flatten().min()
    }
}
