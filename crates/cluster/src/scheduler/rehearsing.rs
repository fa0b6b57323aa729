//! The rehearsal of a scheduler in its process. While the scheduler leads, a thread replays the last
//! seconds under other behaviours, as in one process (`downbeat_host::scheduler::Rehearser`).

use std::sync::Arc;

use downbeat_core::Time;
use downbeat_core::cluster::{Behaviour, Order};
use downbeat_core::journal::cluster::TrialRecord;
use downbeat_driver::QueueHandle;
use downbeat_host::run::activity::Activity;
use downbeat_host::scheduler::{Rehearsed, Rehearser};
use downbeat_roles::RehearsalEvent;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::ServerOptions;

use super::scheduler_role::{SchedulerEvent, SchedulerRole};
use crate::node::Events;

/// The way of a rehearsal's findings to the scheduler's node.
#[derive(Clone)]
pub struct Findings {
    pub clock: Clock,
    pub node: Events<SchedulerRole>,
}

impl Findings {
    /// A node that has ended needs no findings. A finding of a lead that has just ended may reach the
    /// next lead. The next trial corrects its behaviour.
    fn tell(&self, event: SchedulerEvent) {
        drop(self.node.send(event));
    }
}

impl Rehearsed for Findings {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn behaviour(&self, _queue: QueueHandle) -> Option<Behaviour> {
        None
    }

    fn set_behaviour(&self, queue: QueueHandle, behaviour: Option<Behaviour>) {
        self.tell(SchedulerEvent::Behaviour(queue.model, behaviour));
    }

    fn set_order(&self, order: Order) {
        self.tell(SchedulerEvent::OrderOfTurns(order));
    }

    /// A scheduler of a cluster has no decision log.
    fn note_trial(&self, _queue: QueueHandle, _trial: TrialRecord) {}
}

/// A rehearsal by the options; `None`: it is off.
pub fn rehearser(options: &ServerOptions) -> Option<Arc<Rehearser>> {
    let share = options.rehearsal_cpu;
    // Heartbeats keep a scheduler awake, so its rehearsal never rests.
    (share > 0.0).then(|| Rehearser::new(1, share, false, options.order, Arc::new(Activity::default())))
}

/// Starts the rehearsal's thread.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(rehearser: &Arc<Rehearser>, findings: &Findings, metrics: &Metrics) -> std::io::Result<()> {
    let (rehearser, findings, metrics) = (rehearser.clone(), findings.clone(), metrics.rehearsal());
    let work = move || rehearser.work(&findings, || false, &metrics);
    std::thread::Builder::new().name("rehearsal".to_owned()).spawn(work).map(drop)
}

/// Hands an event of the lead to the rehearsal.
pub fn hear(rehearser: &Rehearser, event: RehearsalEvent) {
    let queue = QueueHandle::alone;
    match event {
        RehearsalEvent::Added(model, name, options) => rehearser.added(queue(model), &name, &options),
        RehearsalEvent::Removed(model) => rehearser.removed(queue(model)),
        RehearsalEvent::Profiles(model, profiles) => rehearser.profiled(queue(model), profiles),
        RehearsalEvent::Network(model, networks) => rehearser.has_network(queue(model), networks),
        RehearsalEvent::Devices(kind, count) => rehearser.has_devices(kind, count),
        // The others are many, and needed only if a model is adaptive.
        _ if !rehearser.listens() => {}
        RehearsalEvent::Arrived(arrival) => rehearser.arrived(0, arrival),
        RehearsalEvent::Answered { at, model, requests, lost } => {
            rehearser.answered(queue(model), at, requests, lost);
        }
        RehearsalEvent::Ran(model, share) => rehearser.ran(queue(model), share),
    }
}
