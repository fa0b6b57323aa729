//! The rehearsal beside a scheduler of a network, in virtual time.

use downbeat_core::cluster::Rehearsal;
use downbeat_core::{Duration, ModelId, Time};
use downbeat_roles::{RehearsalEvent, SchedulerNode};

use super::process::Tensors;

/// How often the rehearsal goes on.
const EVERY: Duration = Duration::from_millis(50);
/// The events that it may replay each time: as many as the thread of a server has time for.
const EVENTS: u64 = 10_000;

/// The rehearsal of a scheduler's lead.
#[derive(Debug)]
pub(super) struct Rehearsing {
    rehearsal: Rehearsal,
    /// When the rehearsal goes on.
    goes_on: Time,
}

impl Rehearsing {
    /// The rehearsal of a lead that has just begun.
    pub fn new(now: Time) -> Self {
        Rehearsing { rehearsal: Rehearsal::new(false, 1), goes_on: now + EVERY }
    }

    /// Hears the events of the lead, and carries out what the rehearsal has found. Returns the number of
    /// trials that changed the behaviour of models.
    pub fn rehearse(&mut self, now: Time, node: &mut SchedulerNode<Tensors>) -> u64 {
        node.rehearsal_events().for_each(|event| self.hear(event));
        if now < self.goes_on {
            return 0;
        }
        self.goes_on = now + EVERY;
        self.rehearsal.step(EVENTS);
        let mut changes = 0;
        while let Some(decision) = self.rehearsal.poll_decision().filter(|decision| decision.changed) {
            changes += 1;
            for (model, behaviour) in (0..).map(ModelId).zip(decision.behaviours) {
                node.handle_behaviour(now, model, behaviour);
            }
        }
        changes
    }

    fn hear(&mut self, event: RehearsalEvent) {
        let rehearsal = &mut self.rehearsal;
        match event {
            RehearsalEvent::Added(model, _, options) => rehearsal.set_model(model, Some(*options)),
            RehearsalEvent::Removed(model) => rehearsal.set_model(model, None),
            RehearsalEvent::Profiles(model, profiles) => rehearsal.set_profile(model, profiles),
            RehearsalEvent::Network(model, networks) => rehearsal.set_network(model, networks),
            RehearsalEvent::Devices(kind, count) => rehearsal.set_devices(kind, count),
            RehearsalEvent::Arrived(arrival) => rehearsal.arrival(arrival),
            RehearsalEvent::Answered { at, model, requests, lost } => rehearsal.answered(at, model, requests, lost),
            RehearsalEvent::Ran(model, share) => rehearsal.execution(model, share),
        }
    }
}
