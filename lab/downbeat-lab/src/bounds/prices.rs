//! A lower bound on the requests that any schedule loses on one trace of arrivals. The proof gives
//! each instant of device time a price.

use std::collections::VecDeque;

use downbeat_core::{Duration, LatencyProfile, Time};

use downbeat_sim::BadArrivals;
use downbeat_sim::Feed;
use downbeat_sim::Search;
use downbeat_sim::Simulation;

/// Arrivals that are known in advance, and the devices that serve them.
///
/// # The bound
///
/// Let every instant have a price `p(t) >= 0`. A batch of `b` that starts at `s` costs `P(s, b)`,
/// the integral of `p` from `s` to `s + l(b)`. Let every request `r` have a worth `w(r) >= 0`. Its
/// bid `u(r)` is the cheapest *share of a batch* that it could be part of. The bid is the minimum
/// of `w(r)` and of all `P(s, b) / b` such that a batch of `b` can start at `s` with `r` in it. For
/// that, `r` has arrived at `s` and is due no earlier than `s + l(b)`. The same holds for at least
/// `b` requests of its model, `r` included. Then for **every** schedule
///
/// > worth of the requests not served in time  >=  sum of all bids  -  devices * integral of `p`.
///
/// *Proof.* Take any schedule. Consider a batch of `b` at `s` whose members all meet their
/// deadlines. It is one of the batches in the minimum of each member's bid. So each member bids at
/// most `P(s, b) / b`, and all together at most `P(s, b)`. (Members that are late or do not count
/// are left out first: the smaller batch takes no longer, and serves the same requests.) At no
/// instant do more batches run than there are devices. So all batches together cost at most
/// `devices * integral of p`. Hence the served requests bid no more than this. The rest of the bids
/// come from requests that are not served, none above its worth. ∎
///
/// The bound holds for any prices; better prices make it tighter. They are found by ascent: the
/// right side is a concave function of prices and worths. In words: where arrivals crowd, time is
/// dear, and bids exceed the earnings of the devices.
///
/// Let all requests of a model have the same worth. A schedule that loses at most the share `t` of
/// each model's requests then loses at most `t` of the total worth. If the bound exceeds that,
/// there is no such schedule: [`Trace::impossible`].
///
/// The bound is the one of a linear relaxation with full knowledge of the future. Fractions of
/// batches run on fractions of devices, and every member of a batch pays the same. The relaxation
/// ignores that batches are whole, that a device runs one at a time, and that the future is
/// unknown. So it allows more than is possible. It ignores nothing of deadlines, gathering, bursts
/// and lulls.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The models.
    pub models: Vec<ModelTrace>,
    /// The number of devices, all free at first.
    pub devices: u32,
}

/// One model's part of a [`Trace`].
#[derive(Clone, Debug)]
pub struct ModelTrace {
    /// The latencies of its batches.
    pub profile: LatencyProfile,
    /// Its largest batch.
    pub max_batch: u32,
    /// Time from a request's arrival to its deadline.
    pub slo: Duration,
    /// The arrivals of the counted requests, in order.
    pub arrivals: Vec<Time>,
}

/// The most steps of the ascent.
const STEPS: usize = 400;
/// The number of price cells in the shortest SLO.
const CELLS_PER_SLO: u64 = 64;
/// The largest rounding error, as a share of all worth.
const ROUNDING: f64 = 1e-7;

/// Returns the lowest rate, to within `search.precision`, at which [`Trace::impossible`] shows that
/// no schedule holds the simulation's own arrivals, times given and devices. The unit is requests
/// per second, all models together. Trials have the same seed and span as [`Search::capacity`]'s.
/// `None` if no rate is found up to 16 times the simulation's.
///
/// # Errors
/// If an arrival process has no positive, finite rate and shape.
pub fn clairvoyant(simulation: &Simulation, search: &Search) -> Result<Option<f64>, BadArrivals> {
    let trial = |factor: f64| -> Result<bool, BadArrivals> {
        let scaled = search.scaled(simulation, factor);
        Ok(Trace::of(&scaled)?.impossible(search.tolerated))
    };
    let (mut low, mut high) = (search.low, search.high);
    while !trial(high)? {
        (low, high) = (high, high * 1.1);
        if high > 16.0 {
            return Ok(None);
        }
    }
    while (high - low) / low > search.precision {
        let middle = (low + high) / 2.0;
        if trial(middle)? { high = middle } else { low = middle }
    }
    Ok(Some(high * simulation.loads.iter().map(|load| load.rate).sum::<f64>()))
}

impl Trace {
    /// Returns the counted arrivals of a simulation.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn of(simulation: &Simulation) -> Result<Self, BadArrivals> {
        let start = Time::ZERO + simulation.warm_up;
        let mut feed = Feed::new(&simulation.loads, simulation.seed, start + simulation.span)?;
        let mut models: Vec<ModelTrace> = simulation
            .loads
            .iter()
            .map(|load| ModelTrace {
                profile: load.options.profiles.first().clone(),
                max_batch: load.options.max_batch.max(1),
                slo: load.slo,
                arrivals: Vec::new(),
            })
            .collect();
        while let Some((at, model)) = feed.pop() {
            if at >= start {
                models[model as usize].arrivals.push(at);
            }
        }
        Ok(Trace { models, devices: simulation.devices })
    }

    /// Returns the least number of requests that every schedule loses.
    pub fn least_bad(&self) -> f64 {
        let problem = Problem::new(self, 0.0);
        let prices = problem.start(|_| 1.0);
        problem.ascend(prices, false, f64::INFINITY).max(0.0)
    }

    /// Returns true if every schedule certainly loses more than the share `tolerated` of some
    /// model's requests.
    pub fn impossible(&self, tolerated: f64) -> bool {
        let problem = Problem::new(self, tolerated);
        let mean = problem.mean_cost();
        // A model that takes more of the devices starts with a higher worth.
        let prices = problem.start(|model| model.cheapest() / mean);
        let enough = ROUNDING * problem.requests();
        problem.ascend(prices, true, enough) > enough
    }
}

/// A trace on a grid of cells, each with a constant price. Times are in cells.
struct Problem {
    models: Vec<GridModel>,
    devices: f64,
    cells: usize,
    tolerated: f64,
}

struct GridModel {
    slo: f64,
    arrivals: Vec<f64>,
    sizes: Vec<Size>,
}

/// A batch size of a model.
struct Size {
    batch: f64,
    latency: f64,
    /// Runs of cells, first and last, in which a batch of this size can start.
    starts: Vec<(usize, usize)>,
}

#[derive(Clone)]
struct Prices {
    /// The price of each cell.
    prices: Vec<f64>,
    /// The worth of a request of each model.
    worths: Vec<f64>,
}

/// The bound at some prices, less the tolerated losses, with its slope.
struct BoundValue {
    value: f64,
    /// The slope by the price of each cell.
    slope: Vec<f64>,
    /// By model: the share of requests that bid their worth.
    lost: Vec<f64>,
}

/// The cheapest share of a batch that a request could be part of.
#[derive(Clone, Copy)]
struct Bid {
    share: f64,
    start: f64,
    size: usize,
}

/// Times are rounded to the side on which batches are feasible.
const SLACK: f64 = 1e-6;

impl Problem {
    fn new(trace: &Trace, tolerated: f64) -> Self {
        let shortest = trace.models.iter().map(|model| model.slo.as_nanos()).min().unwrap_or(1);
        let cell = (shortest / CELLS_PER_SLO).max(1) as f64;
        let begin = trace.models.iter().filter_map(|model| model.arrivals.first()).min().copied().unwrap_or(Time::ZERO);
        let mut end = 0.0_f64;
        let models = trace.models.iter().map(|model| {
            let slo = model.slo.as_nanos() as f64 / cell;
            let arrivals: Vec<f64> = model.arrivals.iter().map(|at| at.since(begin).as_nanos() as f64 / cell).collect();
            end = end.max(arrivals.last().map_or(0.0, |last| last + slo));
            let most = u32::try_from(arrivals.len()).unwrap_or(u32::MAX).min(model.max_batch);
            let largest = model.profile.largest_up_to(most, model.slo);
            let sizes = (1..=largest).filter_map(|batch| {
                let latency = model.profile.latency(batch).as_nanos() as f64 / cell;
                let starts = starts(&arrivals, batch as usize, slo - latency);
                (!starts.is_empty()).then_some(Size { batch: f64::from(batch), latency, starts })
            });
            GridModel { slo, sizes: sizes.collect(), arrivals }
        });
        let models = models.collect();
        // A batch that starts in a cell ends at most two cells behind the last deadline, for
        // rounding and the cell's width.
        Problem { models, devices: f64::from(trace.devices), cells: end as usize + 4, tolerated }
    }

    fn requests(&self) -> f64 {
        self.models.iter().map(|model| model.arrivals.len() as f64).sum()
    }

    /// Returns the mean device time of a request in its cheapest batch.
    fn mean_cost(&self) -> f64 {
        let work: f64 = self.models.iter().map(|model| model.arrivals.len() as f64 * model.cheapest()).sum();
        (work / self.requests()).max(f64::MIN_POSITIVE)
    }

    /// Returns uniform prices at which the cheapest batch costs nearly as much as its members are
    /// worth.
    fn start(&self, worth: impl Fn(&GridModel) -> f64) -> Prices {
        Prices { prices: vec![0.98 / self.mean_cost(); self.cells], worths: self.models.iter().map(worth).collect() }
    }

    fn value(&self, at: &Prices) -> BoundValue {
        // The integral of the prices up to each cell.
        let mut integral = Vec::with_capacity(self.cells + 1);
        let mut total = 0.0;
        integral.push(total);
        for price in &at.prices {
            total += price;
            integral.push(total);
        }
        let mut value = -self.devices * total;
        let mut demand = Demand::new(self.cells);
        let mut cheapest = vec![(f64::INFINITY, 0.0); self.cells];
        let mut lost = Vec::with_capacity(self.models.len());
        for (model, worth) in self.models.iter().zip(&at.worths) {
            let mut bids = vec![Bid { share: *worth, start: 0.0, size: usize::MAX }; model.arrivals.len()];
            for (index, size) in model.sizes.iter().enumerate() {
                size.cheapest(&integral, &mut cheapest);
                size.bid(model, index, &cheapest, &mut bids);
            }
            let mut whole = 0.0;
            for bid in bids {
                value += bid.share;
                match model.sizes.get(bid.size) {
                    Some(size) => demand.add(bid.start, bid.start + size.latency, 1.0 / size.batch),
                    None => whole += 1.0,
                }
            }
            let requests = model.arrivals.len() as f64;
            value -= self.tolerated * worth * requests;
            lost.push(if requests > 0.0 { whole / requests } else { 0.0 });
        }
        BoundValue { value, slope: demand.less(self.devices), lost }
    }

    /// Returns the highest value found. Stops early once it is above `enough`. With `weigh`, worths
    /// are adjusted too.
    ///
    /// The steps are those of Adam (Kingma and Ba 2015), which suits a function with kinks in
    /// thousands of dimensions.
    fn ascend(&self, mut at: Prices, weigh: bool, enough: f64) -> f64 {
        const MEAN: f64 = 0.9;
        const SQUARE: f64 = 0.99;
        let base = at.prices.first().copied().unwrap_or(0.0);
        let mut best = f64::NEG_INFINITY;
        let mut moments = vec![(0.0, 0.0); self.cells];
        for step in 0..STEPS {
            let BoundValue { value, slope, lost } = self.value(&at);
            best = best.max(value);
            if best > enough {
                break;
            }
            let pace = 1.0 / (1.0 + step as f64 / 20.0);
            let power = step as i32 + 1;
            for ((price, slope), (mean, square)) in at.prices.iter_mut().zip(slope).zip(&mut moments) {
                *mean = MEAN * *mean + (1.0 - MEAN) * slope;
                *square = SQUARE * *square + (1.0 - SQUARE) * slope * slope;
                let direction =
                    (*mean / (1.0 - MEAN.powi(power))) / ((*square / (1.0 - SQUARE.powi(power))).sqrt() + 1e-9);
                *price = (*price + 0.1 * base * pace * direction).max(0.0);
            }
            if weigh && self.models.len() > 1 {
                // Only proportions matter: worth moves from models that lose less than the others
                // to models that lose more.
                let requests = self.requests();
                let share = |model: &GridModel| model.arrivals.len() as f64 / requests;
                let mean: f64 = self.models.iter().zip(&lost).map(|(model, lost)| share(model) * lost).sum();
                for (worth, lost) in at.worths.iter_mut().zip(&lost) {
                    *worth *= (pace * (lost - mean)).exp();
                }
                let total: f64 = self.models.iter().zip(&at.worths).map(|(model, worth)| share(model) * worth).sum();
                at.worths.iter_mut().for_each(|worth| *worth /= total);
            }
        }
        best
    }
}

impl GridModel {
    /// Returns the device time of a request in the cheapest batch.
    fn cheapest(&self) -> f64 {
        let cost = self.sizes.iter().map(|size| size.latency / size.batch).fold(f64::INFINITY, f64::min);
        // Requests that fit in no batch are lost at any price.
        if cost.is_finite() { cost } else { 1.0 }
    }
}

impl Size {
    /// Finds, for each cell in which a batch can start, the cheapest share of its cost for a start
    /// in that cell, with the start. Other cells get infinity.
    fn cheapest(&self, integral: &[f64], cheapest: &mut [(f64, f64)]) {
        cheapest.fill((f64::INFINITY, 0.0));
        let (whole, part) = (self.latency as usize, self.latency.fract());
        for &(first, last) in &self.starts {
            for cell in first..=last {
                // The cost is linear in the start, except where the end enters a new cell.
                let ends = &integral[cell + whole..cell + whole + 3];
                let (left, right) = (integral[cell], integral[cell + 1]);
                let at_left = ends[0] * (1.0 - part) + ends[1] * part - left;
                let at_right = ends[1] * (1.0 - part) + ends[2] * part - right;
                let between = ends[1] - (left * part + right * (1.0 - part));
                let mut least = (at_left, cell as f64);
                if at_right < least.0 {
                    least = (at_right, cell as f64 + 1.0);
                }
                if between < least.0 {
                    least = (between, cell as f64 + 1.0 - part);
                }
                cheapest[cell] = (least.0.max(0.0) / self.batch, least.1);
            }
        }
    }

    /// Lowers the bids of requests that could join a cheaper batch of this size.
    fn bid(&self, model: &GridModel, index: usize, cheapest: &[(f64, f64)], bids: &mut [Bid]) {
        // The minimum over a window that slides with the requests: the queue's shares rise from the
        // front.
        let mut window: VecDeque<usize> = VecDeque::new();
        let mut next = 0;
        for (arrival, bid) in model.arrivals.iter().zip(bids) {
            let last = arrival + model.slo - self.latency + SLACK;
            let first = (arrival - SLACK).max(0.0) as usize;
            next = next.max(first);
            while next <= last as usize {
                if cheapest[next].0.is_finite() {
                    while window.back().is_some_and(|back| cheapest[*back].0 >= cheapest[next].0) {
                        window.pop_back();
                    }
                    window.push_back(next);
                }
                next += 1;
            }
            while window.front().is_some_and(|front| *front < first) {
                window.pop_front();
            }
            if let Some(front) = window.front()
                && cheapest[*front].0 < bid.share
            {
                let (share, start) = cheapest[*front];
                *bid = Bid { share, start, size: index };
            }
        }
    }
}

/// Returns the runs of cells in which a batch of `size` can start, if the deadlines of its members
/// allow `window` between their arrivals and the start.
fn starts(arrivals: &[f64], size: usize, window: f64) -> Vec<(usize, usize)> {
    let mut starts: Vec<(usize, usize)> = Vec::new();
    for members in arrivals.windows(size) {
        let (from, until) = (members[size - 1] - SLACK, members[0] + window + SLACK);
        if from <= until {
            let (from, until) = (from.max(0.0) as usize, until as usize);
            match starts.last_mut() {
                Some((_, last)) if from <= *last + 1 => *last = until.max(*last),
                _ => starts.push((from, until)),
            }
        }
    }
    starts
}

/// The number of devices in demand, by cell.
struct Demand {
    cells: Vec<f64>,
    /// The change of the demand at the begin of each cell.
    changes: Vec<f64>,
}

impl Demand {
    fn new(cells: usize) -> Self {
        Demand { cells: vec![0.0; cells], changes: vec![0.0; cells + 1] }
    }

    fn add(&mut self, from: f64, until: f64, devices: f64) {
        let (first, last) = (from as usize, until as usize);
        if first == last {
            self.cells[first] += devices * (until - from);
            return;
        }
        self.cells[first] += devices * (first as f64 + 1.0 - from);
        self.cells[last] += devices * (until - last as f64);
        self.changes[first + 1] += devices;
        self.changes[last] -= devices;
    }

    /// Returns the demand less `devices`, by cell.
    fn less(mut self, devices: f64) -> Vec<f64> {
        let mut running = -devices;
        for (cell, change) in self.cells.iter_mut().zip(self.changes) {
            running += change;
            *cell += running;
        }
        self.cells
    }
}
