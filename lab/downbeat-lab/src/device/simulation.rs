//! A run of a device policy under virtual time.

use std::collections::BTreeMap;

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::device::{DeviceModel, LaneId, Launch, Note, SegmentRange};
use downbeat_core::{DeviceKind, Duration, RequestId, Time};
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use super::contended::Direction;
use super::model::EmulatedModel;
use super::report::{DeviceReport, Span};
use super::workload::{DeviceFeed, DeviceLoad};
use crate::world::{self, Ask, Ending, Order, Outside, World};
use downbeat_sim::Network;
use downbeat_sim::{BadArrivals, random};

/// A model on a device, its requests, and the options of the run.
#[derive(Clone, Debug)]
pub struct DeviceSimulation {
    /// The model.
    pub model: EmulatedModel,
    /// The requests.
    pub load: DeviceLoad,
    /// The time from a request's arrival to its deadline.
    pub slo: Duration,
    /// Whether the policy knows the deadline.
    pub deadlines: bool,
    /// Requests at the start that do not count.
    pub warm_up: u64,
    /// Chooses all random numbers.
    pub seed: u64,
    /// Ends of segments after which a request's answer may be final (DVABatch §9.2): the segment,
    /// and the probability.
    pub exits: Vec<(u16, f64)>,
    /// The standard deviation of a launch's time, as a share of the time.
    pub noise: f64,
    /// The probability that a client goes away, at a random time up to the SLO.
    pub cancelled: f64,
    /// Whether to end the run once more than this share of all requests is certain to be late.
    pub give_up_above: Option<f64>,
    /// Whether to record launches and copies with their times.
    pub record: bool,
}

impl DeviceSimulation {
    /// Makes a run with the platform's noise. The policy knows no deadline, no request exits early,
    /// no client goes away, and the first tenth of the requests does not count.
    pub fn new(model: EmulatedModel, load: DeviceLoad, slo: Duration, seed: u64) -> Self {
        DeviceSimulation {
            noise: model.noise(),
            model,
            slo,
            deadlines: false,
            warm_up: load.requests / 10,
            load,
            seed,
            exits: Vec::new(),
            cancelled: 0.0,
            give_up_above: None,
            record: false,
        }
    }

    /// Runs the simulation. Panics, with the seed, if the policy breaks one of the
    /// [`LaunchChecker`](super::LaunchChecker)'s rules.
    ///
    /// # Errors
    /// If the arrival process has no positive, finite rate and shape.
    pub fn run(&self, policy: DeviceModel) -> Result<DeviceReport, BadArrivals> {
        let mut watch = Watch {
            simulation: self,
            feed: self.load.feed(self.seed)?,
            report: DeviceReport::default(),
            requests: Vec::new(),
            rng: random(self.seed, 2),
            most_late: self.give_up_above.map(|share| (share * self.load.requests as f64) as u64),
            oldest: 0,
            late: 0,
            computed: 0,
            asked: 0,
            lanes: BTreeMap::new(),
        };
        let cluster = world::cluster(1, 1, NetworkBudget::default());
        let mut world = World::new(self.seed, Network::default(), &cluster, Order::InTurn);
        let device = world.add_device(self.model.limits(), DeviceKind(0), self.noise);
        let model = world.add_model(self.model.clone());
        world.place(model, device, policy);
        let lanes = world.hosts[device].lanes(model);
        watch.lanes = lanes.iter().map(|(lane, _)| *lane).zip(0..).collect();
        watch.report.gave_up = !world.run(&mut watch);
        Ok(watch.finish(&mut world, lanes.iter().map(|(_, spec)| format!("≤{}", spec.max_rows)).collect()))
    }
}

/// Watches a model alone on a device serve its requests.
struct Watch<'a> {
    simulation: &'a DeviceSimulation,
    feed: DeviceFeed,
    report: DeviceReport,
    /// By request id.
    requests: Vec<Request>,
    rng: Pcg64,
    most_late: Option<u64>,
    /// The oldest request that may be unanswered.
    oldest: usize,
    late: u64,
    /// Items times length that were computed, and the part of them that requests asked for.
    computed: u64,
    asked: u64,
    /// The row of each lane.
    lanes: BTreeMap<LaneId, usize>,
}

struct Request {
    arrival: Time,
    size: u32,
    length: u32,
}

impl Watch<'_> {
    fn chance(&mut self) -> f64 {
        StandardUniform.sample(&mut self.rng)
    }

    fn finish(mut self, world: &mut World<'_>, lanes: Vec<String>) -> DeviceReport {
        let (now, slo) = (world.now(), self.simulation.slo);
        self.report.most_slots = world.hosts[0].most_slots();
        if !self.report.gave_up {
            world.finish(&mut self);
        }
        self.report.rows = lanes.into_iter().chain(["in".to_owned(), "out".to_owned()]).collect();
        let units = f64::from(self.simulation.model.limits().units);
        let unit_nanos = world.hosts[0].used_unit_nanos() as f64;
        self.report.utilisation = unit_nanos / (units * now.as_nanos().max(1) as f64);
        self.report.padding = 1.0 - self.asked as f64 / self.computed.max(1) as f64;
        self.report.summarise(self.simulation.warm_up as usize, slo);
        self.report
    }
}

impl Outside for Watch<'_> {
    fn next_arrival(&self) -> Option<Time> {
        self.feed.peek()
    }

    fn arrive(&mut self, now: Time, _: RequestId) -> Ask {
        let length = self.feed.pop().map_or(0, |(_, length)| length);
        self.requests.push(Request { arrival: now, size: 1, length });
        self.report.latencies_ms.push(f64::NAN);
        self.report.arrivals_s.push(now.since(Time::ZERO).as_secs_f64());
        let deadline = if self.simulation.deadlines { now + self.simulation.slo } else { Time::MAX };
        Ask { model: 0, size: 1, length, level: 0, deadline }
    }

    fn arrived(&mut self, now: Time, _: RequestId, accepted: bool) -> Option<Time> {
        self.report.rejected += u64::from(!accepted);
        (self.chance() < self.simulation.cancelled)
            .then(|| now + Duration::from_secs_f64(self.simulation.slo.as_secs_f64() * self.chance()))
    }

    fn ended(&mut self, now: Time, request: RequestId, ending: Ending) {
        let index = request.0 as usize;
        match ending {
            Ending::Replied => {
                self.report.latencies_ms[index] = now.since(self.requests[index].arrival).as_millis_f64();
            }
            Ending::Dropped => self.report.dropped += 1,
            Ending::Cancelled | Ending::Failed(_) => {}
        }
    }

    fn launched(&mut self, _: usize, launch: &Launch) {
        self.report.launches += 1;
        let share = u64::from(launch.segments.end - launch.segments.first);
        self.computed += u64::from(launch.computed_rows) * u64::from(launch.length.max(1)) * share;
        for member in &launch.members {
            let Request { size, length, .. } = self.requests[member.0 as usize];
            self.asked += u64::from(size) * u64::from(length.max(1)) * share;
        }
    }

    fn completed(&mut self, now: Time, start: Time, _: usize, launch: &Launch, all: SegmentRange) -> Vec<RequestId> {
        let range = launch.segments;
        if self.simulation.record {
            let label = match range {
                range if range == all => launch.rows.to_string(),
                SegmentRange { first, end } => format!("{} s{first}..{end}", launch.rows),
            };
            let row = self.lanes.get(&launch.lane).copied().unwrap_or(0);
            self.report.spans.push(Span { row, start, end: now, rows: launch.rows, label });
        }
        let chances = self.simulation.exits.iter().filter(|(segment, _)| *segment + 1 == range.end);
        let stays: f64 = chances.map(|(_, chance)| 1.0 - chance).product();
        let mut exits = Vec::new();
        if range.end < all.end && stays < 1.0 {
            for member in &launch.members {
                if self.chance() >= stays {
                    exits.push(*member);
                }
            }
        }
        exits
    }

    fn copied(&mut self, now: Time, start: Time, direction: Direction) {
        if self.simulation.record {
            let row = self.lanes.len() + direction as usize;
            // A copy that waited behind another began at the other's end.
            let before =
                self.report.spans.iter().rev().find(|span| span.row == row).map_or(Time::ZERO, |span| span.end);
            self.report.spans.push(Span { row, start: start.max(before), end: now, rows: 1, label: String::new() });
        }
    }

    fn noted(&mut self, _: usize, note: &Note) {
        self.report.note(note);
    }

    /// Returns whether more requests are already late, answered or not, than tolerated.
    fn is_over(&mut self, now: Time) -> bool {
        let Some(most) = self.most_late else { return false };
        while let Some(request) = self.requests.get(self.oldest) {
            if now.since(request.arrival) <= self.simulation.slo {
                break;
            }
            let good = self.report.latencies_ms[self.oldest] <= self.simulation.slo.as_millis_f64();
            self.late += u64::from(!good && self.oldest as u64 >= self.simulation.warm_up);
            self.oldest += 1;
        }
        self.late > most
    }
}
