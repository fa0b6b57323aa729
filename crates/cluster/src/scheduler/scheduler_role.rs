//! A scheduler's state machine in its process. A scheduler has no models and no tensors.

use std::sync::Arc;

use downbeat_core::cluster::{Behaviour, Order};
use downbeat_core::{ModelId, Time};
use downbeat_host::scheduler::Rehearser;
use downbeat_roles::{
    Divided, Epoch, NodeId, PlanWanted, Role, RoleNode, SchedulerNode, SchedulerOptions, SchedulerOutput,
    SubClusterPlan,
};
use tokio::sync::{mpsc, oneshot};

use super::cluster_load::ClusterLoad;
use super::rehearsing;
use crate::node::machine::{Machine, Step};
use crate::node::status::StatusBoard;
use crate::view::asks::{Asks, SAME, ViewEvent};
use crate::wire::tensors::Tensors;

/// A scheduler's state machine, and the board that shows its status.
pub struct SchedulerRole {
    node: SchedulerNode<Tensors>,
    rank: u32,
    board: StatusBoard,
    load: Option<ClusterLoad>,
    store: Option<mpsc::UnboundedSender<StoreWork>>,
    planner: mpsc::UnboundedSender<PlanWanted>,
    rehearser: Option<Arc<Rehearser>>,
    asks: Asks,
}

/// An event from other threads to a scheduler's state machine.
pub enum SchedulerEvent {
    /// The store's answer to a request for an epoch, with the plan that it has; `None`: no epoch
    /// now.
    Allotted(Option<(u64, Option<SubClusterPlan>)>),
    /// The answer to a question for a plan: the sub-cluster of each model, or why there is no plan.
    Planned(u64, Result<Divided, String>),
    /// A rehearsal has found the behaviour of a queue; `None`: the rule of the load decides.
    Behaviour(ModelId, Option<Behaviour>),
    /// A rehearsal has found the order in which batches get devices.
    OrderOfTurns(Order),
    /// A client wants models to be divided anew. The sender gets whether they are.
    Plan(oneshot::Sender<bool>),
    /// A question about the whole cluster.
    View(ViewEvent),
}

/// A task for the store.
pub enum StoreWork {
    /// Allot an epoch above this number. The answer comes as an event.
    Allot(u64),
    /// Keep a plan.
    Keep(SubClusterPlan),
}

impl SchedulerRole {
    /// A scheduler without peers. `load` gets the load of requests and devices while this scheduler
    /// leads. `store`, if given, allots epochs and keeps plans. `planner` makes plans; its answers
    /// are events. `rehearser`, if given, hears each lead, and its findings are events.
    pub fn new(
        node: NodeId,
        options: SchedulerOptions,
        now: Time,
        board: StatusBoard,
        (load, rehearser): (Option<ClusterLoad>, Option<Arc<Rehearser>>),
        (store, planner): (Option<mpsc::UnboundedSender<StoreWork>>, mpsc::UnboundedSender<PlanWanted>),
        asks: Asks,
    ) -> Self {
        let rank = options.rank;
        let node = SchedulerNode::new(node, options, now);
        SchedulerRole { rank, node, board, load, store, planner, rehearser, asks }
    }

    /// Another lead begins. Either this scheduler or another scheduler leads now.
    fn follow(&self, epoch: Epoch, leads: bool) {
        self.board.follows(epoch, leads);
        self.rehearser.iter().for_each(|rehearser| rehearser.begin_anew());
    }

    /// Lets the rehearsal hear of the lead.
    fn rehearse(&mut self) {
        if let Some(rehearser) = &self.rehearser {
            self.node.rehearsal_events().for_each(|event| rehearsing::hear(rehearser, event));
        }
    }
}

impl Machine for SchedulerRole {
    type Node = SchedulerNode<Tensors>;
    type Event = SchedulerEvent;

    fn node(&self) -> &Self::Node {
        &self.node
    }

    fn node_mut(&mut self) -> &mut Self::Node {
        &mut self.node
    }

    fn accepts(&self, role: Role) -> bool {
        // Of two schedulers, the later one in the list connects.
        !matches!(role, Role::Scheduler { rank } if rank <= self.rank)
    }

    fn handle_event(&mut self, now: Time, event: SchedulerEvent) {
        match event {
            SchedulerEvent::Allotted(allotted) => {
                let (number, plan) = allotted.unzip();
                if let Some(plan) = plan.flatten() {
                    self.node.handle_kept_plan(plan);
                }
                self.node.handle_epoch(now, number);
            }
            SchedulerEvent::Planned(number, planned) => self.node.handle_planned(number, planned),
            SchedulerEvent::Behaviour(model, behaviour) => self.node.handle_behaviour(now, model, behaviour),
            SchedulerEvent::OrderOfTurns(order) => self.node.handle_order_of_turns(now, order),
            SchedulerEvent::View(ViewEvent::Ask(question, client)) => {
                let number = self.asks.ask(client);
                self.node.handle_ask(now, number, question);
            }
            // A scheduler has no figures, and the leader asks it for none.
            SchedulerEvent::View(ViewEvent::Tell(..)) => {}
            // The client may have gone.
            SchedulerEvent::Plan(answer) => drop(answer.send(self.node.handle_plan_wanted(now))),
        }
    }

    fn poll_step(&mut self, now: Time) -> Option<Step> {
        loop {
            let Some(output) = self.node.poll_output(now) else {
                self.board.led(self.node.has_leader());
                self.rehearse();
                return None;
            };
            match output {
                SchedulerOutput::Send(peer, frame) => return Some(Step::Send(peer, frame)),
                SchedulerOutput::Lost(peer) => return Some(Step::Close(peer)),
                SchedulerOutput::Leads(epoch) => self.follow(epoch, true),
                SchedulerOutput::StandsBy(epoch) => self.follow(epoch, false),
                SchedulerOutput::Told(number, told) => {
                    let leader = self.node.leader();
                    let own = match self.node.leads() {
                        Some(_) => Some(SAME),
                        None => leader.and_then(|leader| self.node.links().clock(leader)),
                    };
                    self.asks.told(number, told, (own, self.node.has_leader()));
                }
                SchedulerOutput::Note(note) => tracing::warn!("{note}"),
                SchedulerOutput::WantEpoch(above) => {
                    if self.store.as_ref().is_none_or(|store| store.send(StoreWork::Allot(above)).is_err()) {
                        self.node.handle_epoch(now, None);
                    }
                }
                SchedulerOutput::WantPlan(wanted) => {
                    let number = wanted.number;
                    if self.planner.send(wanted).is_err() {
                        self.node.handle_planned(number, Err("the process is about to end".to_owned()));
                    }
                }
                SchedulerOutput::KeepPlan(plan) => {
                    tracing::info!(sub_clusters = plan.sub_clusters, models = plan.models.len(), "models are divided");
                    if let Some(store) = &self.store {
                        // A store that has ended keeps no plan, and this process also ends soon.
                        let _ = store.send(StoreWork::Keep(plan));
                    }
                }
            }
        }
    }

    fn report(&self) {
        self.board.divided(self.node.sub_clusters());
        self.board.plans_with(self.node.budgets());
        if let Some(load) = &self.load {
            load.look(self.node.leads(), self.node.sample());
        }
    }
}
