//! The effect of each fault on the run, and the end of all faults.

use downbeat_core::{Duration, Time};
use rand::RngExt;
use rand_distr::{Distribution, Exp};

use super::{ENDS_WITHIN, Event, LOOKS_EVERY, NetworkRun};
use crate::network::process::{Inbound, Machine, Process};
use crate::network::scenario::{Fault, Host, Pauses};

impl NetworkRun<'_> {
    pub(super) fn fault(&mut self, fault: Fault) {
        let now = self.now;
        match &fault {
            Fault::Kill { .. } => self.troubled(Duration::ZERO),
            Fault::Pause { lasts, .. } | Fault::Slow { lasts, .. } => self.troubled(*lasts),
            Fault::Cut { lasts, .. } | Fault::Lossy { lasts, .. } | Fault::Stall { lasts } => self.troubled(*lasts),
            Fault::Drain { .. } | Fault::Join { .. } => self.refusals.troubled(now),
            Fault::StoreAway { lasts } => self.refusals.troubled(now + *lasts),
            Fault::Rate { .. } | Fault::Divide => {}
        }
        match fault {
            Fault::Kill { host, restart_after, silently } => {
                let Some(at) = self.by_host.get(&host).copied() else { return };
                self.dies(at, silently);
                if let Some(after) = restart_after {
                    self.events.push(now + after, Event::Begins(host));
                }
            }
            Fault::Pause { host, lasts } => {
                let Some(at) = self.by_host.get(&host).copied() else { return };
                if !std::mem::replace(&mut self.processes[at].is_paused, true) {
                    self.events.push(now + lasts, Event::GoesOn(at));
                }
            }
            Fault::Slow { host, lasts, by } => {
                if let Some(at) = self.by_host.get(&host).copied() {
                    self.processes[at].slow = (now + lasts, by);
                }
            }
            Fault::Cut { hosts, lasts, one_way } => self.wiring.cut(hosts, now + lasts, one_way),
            Fault::Lossy { loss, lasts } => self.wiring.lose(loss, now + lasts),
            Fault::Stall { lasts } => self.wiring.stall(now + lasts),
            Fault::Drain { backend, restart_after } => {
                let Some(at) = self.by_host.get(&Host::Backend(backend)).copied() else { return };
                if !self.processes[at].is_dead() {
                    self.drains.insert(at, restart_after);
                    self.copies.drains(self.processes[at].node());
                    self.comes(at, Inbound::Drain);
                }
            }
            Fault::Join { backend } => self.begins(Host::Backend(backend)),
            Fault::Rate { model, rate } => {
                if let Some(known) = self.rates.get_mut(model) {
                    *known = rate;
                }
            }
            Fault::Divide => {
                let leads =
                    |process: &Process| matches!(&process.machine, Machine::Scheduler(node) if node.leads().is_some());
                for at in (0..self.processes.len()).filter(|at| leads(&self.processes[*at])).collect::<Vec<_>>() {
                    self.comes(at, Inbound::Divide);
                }
            }
            Fault::StoreAway { lasts } => self.store.1 = now + lasts,
        }
    }

    pub(super) fn dies(&mut self, at: usize, silently: bool) {
        let process = &mut self.processes[at];
        if process.is_dead() {
            return;
        }
        process.machine = Machine::None;
        process.inbox.clear();
        process.is_paused = false;
        let node = process.node();
        self.outcome.died += self.judge.died(node);
        self.copies.died(self.now, node);
        let ended: Vec<(usize, usize)> =
            self.connections.iter().copied().filter(|(a, b)| *a == at || *b == at).collect();
        for (a, b) in ended {
            self.connections.remove(&(a, b));
            let other = if a == at { b } else { a };
            if !silently {
                self.tell_end(at, other);
            }
        }
    }

    /// Plans the next pause of a process, if processes pause.
    pub(super) fn next_pause(&mut self, at: usize) {
        let Some(Pauses { every, .. }) = self.scenario.pauses.filter(|_| !self.is_mended) else { return };
        let Ok(gaps) = Exp::new(1.0 / every.as_secs_f64().max(1e-6)) else { return };
        let next = self.now + Duration::from_secs_f64(gaps.sample(&mut self.rng));
        self.events.push(next, Event::Pauses(at));
    }

    /// Pauses a process for a while, unless it stands still or is dead.
    pub(super) fn pauses(&mut self, at: usize) {
        let Some(Pauses { longest, .. }) = self.scenario.pauses.filter(|_| !self.is_mended) else { return };
        if self.processes[at].is_dead() {
            return;
        }
        let lasts = Duration::from_nanos(self.rng.random_range(0..=longest.as_nanos()));
        if !std::mem::replace(&mut self.processes[at].is_paused, true) {
            self.troubled(lasts);
            self.events.push(self.now + lasts, Event::GoesOn(at));
        }
        self.next_pause(at);
    }

    pub(super) fn goes_on(&mut self, at: usize) {
        if !std::mem::replace(&mut self.processes[at].is_paused, false) {
            return;
        }
        self.processes[at].wakes_at = Time::MAX;
        for inbound in std::mem::take(&mut self.processes[at].inbox) {
            self.comes(at, inbound);
        }
        self.processes[at].handle_timeout(self.now);
        self.pump(at);
    }

    /// Mends all faults, and starts every missing process.
    pub(super) fn mend(&mut self) {
        self.is_mended = true;
        self.wiring.mend();
        self.store.1 = Time::ZERO;
        for at in 0..self.processes.len() {
            self.processes[at].slow.0 = Time::ZERO;
            self.goes_on(at);
        }
        for host in self.scenario.hosts() {
            self.begins(host);
        }
        self.ends_by = self.now + ENDS_WITHIN + self.backlog_time();
        self.events.push(self.now + LOOKS_EVERY, Event::Look);
    }
}
