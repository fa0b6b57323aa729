//! What the simulation knows and the scheduler must guess: whether a request could run in time.

use downbeat_core::Duration;
use downbeat_roles::{Frame, NodeId};

use super::{NetworkRun, pair};
use crate::network::process::{Copy, Machine, Tensors};
use crate::network::scenario::NetworkModel;

/// Messages from the scheduler's decision to the answer: claim, inputs, answer.
const MESSAGES: u64 = 3;
/// Messages from the end of a batch to the end of the next one: end, claim, inputs, answer.
const MESSAGES_OF_A_BATCH: u64 = 4;
/// Measured delays may be above the true ones by this, beside a quarter.
const GRAIN: Duration = Duration::from_millis(1);

impl NetworkRun<'_> {
    /// How long a single slot needs for all requests that wait now without a deadline. The slot runs
    /// one batch after another, and each message of a batch takes as long as the worst one.
    ///
    /// Example: 3,000 requests wait for a model of 1.8 ms whose batches have one request each. A slot
    /// has two batches under way, and the four messages of a batch take up to 10 ms each. No process
    /// promises to end such a backlog sooner.
    pub(super) fn backlog_time(&self) -> Duration {
        let message = self.wiring.worst() + self.scenario.timing.wakes_late;
        let messages = message.saturating_mul(MESSAGES_OF_A_BATCH).as_secs_f64();
        let for_one = |model: &NetworkModel| {
            let most = model.profile.max_batch();
            let run = model.profile.latency(most).as_secs_f64() * (1.0 + self.scenario.noise);
            (run + messages) / f64::from(most)
        };
        let unhurried = self.scenario.models.iter().filter(|model| model.slo.is_none());
        let slowest = unhurried.map(for_one).fold(0.0, f64::max);
        Duration::from_secs_f64(slowest * self.judge.open_without_deadline() as f64)
    }

    /// Judges the refusals in a frame.
    pub(super) fn judge_refusals(&mut self, from: usize, to: NodeId, frame: &Frame<Tensors>) {
        if !matches!(self.processes[from].machine, Machine::Scheduler(_)) {
            return;
        }
        let mut refusals = std::mem::take(&mut self.refusals);
        for message in &frame.messages {
            let could_run = |model, left| self.could_run(from, to, model, left);
            if let Some(wrong) = refusals.sent(self.now, to, message, could_run) {
                self.judge.breaks(self.now, "no refusal is wrong", || wrong);
            }
        }
        self.refusals = refusals;
    }

    /// Whether a request of this frontend could run in time, though a scheduler refuses it now. A
    /// reachable backend has an idle slot, and the time does for the worst messages.
    fn could_run(&self, scheduler: usize, frontend: NodeId, model: usize, left: Duration) -> bool {
        let Some(frontend) = self.by_node.get(&frontend).copied() else { return false };
        let Some(asked) = self.scenario.models.get(model) else { return false };
        if self.scenario.wires.loss > 0.0 || left == Duration::ZERO {
            return false;
        }
        // The scheduler may plan with a margin for the run.
        let run = asked.profile.latency(1).as_secs_f64() * (1.5 + self.scenario.noise);
        let late = self.scenario.timing.wakes_late;
        let messages = (self.wiring.worst() + late).saturating_mul(MESSAGES).as_secs_f64() * 1.25;
        let is_enough = Duration::from_secs_f64(run + messages) + GRAIN < left;
        let waits = self.processes[scheduler].keeps();
        is_enough && self.idle_slots(scheduler, frontend, model) > waits
    }

    /// The idle slots of backends with a model that a scheduler and a frontend reach.
    fn idle_slots(&self, scheduler: usize, frontend: usize, model: usize) -> usize {
        let reaches = |at: usize| [scheduler, frontend].iter().all(|peer| self.connections.contains(&pair(*peer, at)));
        let idle = |(at, process): (usize, &super::Process)| {
            let is_there = !process.is_dead() && !process.is_paused && reaches(at) && !self.drains.contains_key(&at);
            let has_it = matches!(process.copies.get(model), Some(Copy::Loaded(_)));
            let slots = process.slots.iter().filter(|free| **free <= self.now).count();
            if is_there && has_it && process.keeps() == 0 { slots } else { 0 }
        };
        self.processes.iter().enumerate().map(idle).sum()
    }
}
