//! The wires of a network: they delay, lose, double and reorder frames.

use std::collections::BTreeMap;

use downbeat_core::{Duration, Time};
use downbeat_roles::NodeId;
use rand::RngExt;
use rand_distr::{Distribution, LogNormal};
use rand_pcg::Pcg64;

use super::scenario::{Host, Wires};

/// The 99.99th percentile of the standard normal distribution.
const Z_9999: f64 = 3.719;
/// The longest delay of an overtaken frame, in medians.
const OVERTAKEN: f64 = 20.0;

/// The wires between all hosts.
#[derive(Debug)]
pub(super) struct Wiring {
    wires: Wires,
    delay: LogNormal<f64>,
    rng: Pcg64,
    /// Each cut: the hosts of its one side, its end, and whether only their messages are lost.
    cuts: Vec<(Vec<Host>, Time, bool)>,
    /// An additional share of lost frames, until this time.
    lossy: (f64, Time),
    /// Until then frames wait.
    stalled_until: Time,
    /// By direction: the arrival of the last frame.
    last: BTreeMap<(NodeId, NodeId), Time>,
}

impl Wiring {
    pub fn new(wires: Wires, rng: Pcg64) -> Self {
        let median = (wires.delay.as_secs_f64()).max(1e-9).ln();
        let sigma = wires.spread.max(1.0).ln() / Z_9999;
        let delay = LogNormal::new(median, sigma).unwrap_or_else(|error| panic!("a delay of {wires:?}: {error}"));
        Wiring {
            wires,
            delay,
            rng,
            cuts: Vec::new(),
            lossy: (0.0, Time::ZERO),
            stalled_until: Time::ZERO,
            last: BTreeMap::new(),
        }
    }

    pub fn cut(&mut self, hosts: Vec<Host>, until: Time, one_way: bool) {
        self.cuts.push((hosts, until, one_way));
    }

    pub fn lose(&mut self, share: f64, until: Time) {
        self.lossy = (share, until);
    }

    pub fn stall(&mut self, until: Time) {
        self.stalled_until = self.stalled_until.max(until);
    }

    /// Returns the worst delay of nearly all frames without a fault.
    pub fn worst(&self) -> Duration {
        let overtaken = if self.wires.in_order { 0.0 } else { OVERTAKEN };
        let medians = self.wires.spread.max(1.0) + overtaken;
        Duration::from_secs_f64(self.wires.delay.as_secs_f64() * medians) + self.wires.jitter
    }

    /// Ends all faults of the wires; their usual losses and delays go on.
    pub fn mend(&mut self) {
        self.cuts.clear();
        self.lossy.0 = 0.0;
        self.stalled_until = Time::ZERO;
    }

    /// Returns true if no frame from one host reaches the other.
    pub fn is_cut(&mut self, now: Time, from: Host, to: Host) -> bool {
        self.cuts.retain(|(_, until, _)| *until > now);
        self.cuts.iter().any(|(hosts, _, one_way)| {
            let (sends, hears) = (hosts.contains(&from), hosts.contains(&to));
            sends != hears && (sends || !one_way)
        })
    }

    /// Draws the delay of a frame that is neither lost nor doubled.
    pub fn delay(&mut self) -> Duration {
        Duration::from_secs_f64(self.delay.sample(&mut self.rng))
    }

    /// Returns the arrivals of a frame: none, one, or two.
    pub fn send(&mut self, now: Time, from: (NodeId, Host), to: (NodeId, Host)) -> [Option<Time>; 2] {
        if self.is_cut(now, from.1, to.1) {
            return [None, None];
        }
        let lossy = if now < self.lossy.1 { self.lossy.0 } else { 0.0 };
        let is_lost = self.rng.random::<f64>() < self.wires.loss.max(lossy);
        let is_doubled = self.wires.doubled > 0.0 && self.rng.random::<f64>() < self.wires.doubled;
        let first = (!is_lost).then(|| self.arrival(now, from.0, to.0));
        [first, is_doubled.then(|| self.arrival(now, from.0, to.0))]
    }

    fn arrival(&mut self, now: Time, from: NodeId, to: NodeId) -> Time {
        let jitter = self.wires.jitter.as_nanos();
        let late = if jitter == 0 { 0 } else { self.rng.random_range(0..=jitter) };
        let mut at = now.max(self.stalled_until) + self.delay() + Duration::from_nanos(late);
        if self.wires.in_order {
            let last = self.last.entry((from, to)).or_default();
            at = at.max(*last);
            *last = at;
        } else if self.rng.random::<f64>() < 0.05 {
            let more = self.rng.random::<f64>() * OVERTAKEN;
            at += Duration::from_secs_f64(self.wires.delay.as_secs_f64() * more);
        }
        at
    }
}
