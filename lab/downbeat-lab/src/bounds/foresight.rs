//! An achievable schedule for one model whose arrivals are all known in advance.

use downbeat_core::Time;

use super::prices::Trace;
use downbeat_sim::staggered;

/// The tried prices of device time, as shares of a device's goodput in the staggered pattern.
const PRICES: [f64; 4] = [0.7, 0.8, 0.9, 1.0];

/// Schedules that have decided on all requests before a certain one.
struct Frontier {
    devices: usize,
    /// By schedule: the number of requests it has lost.
    lost: Vec<u32>,
    /// By schedule, by device: the time when the device is free, in seconds; sorted.
    free: Vec<f64>,
}

impl Trace {
    /// Returns the number of requests that a good schedule loses if it knows all arrivals. The
    /// least possible loss is between [`Trace::least_bad`] and this number. A real scheduler does
    /// not know the arrivals, and is excused for a larger loss. `None` unless there is exactly one
    /// model, and it can be served.
    ///
    /// A beam search over the requests in order. Each request is lost, or begins a batch with the
    /// following ones, on the device that is free first. Among schedules that have decided on the
    /// same requests, the `width` best are kept. They are ranked by their losses and by the time
    /// for which their devices are taken, at some price of device time. The best outcome of a few
    /// prices counts.
    pub fn foreseen_bad(&self, width: usize) -> Option<u32> {
        let [model] = &self.models[..] else { return None };
        let profile = &model.profile;
        let rate = staggered(profile, model.max_batch, model.slo, self.devices)?.rate / f64::from(self.devices);
        let arrivals: Vec<f64> = model.arrivals.iter().map(|at| at.since(Time::ZERO).as_secs_f64()).collect();
        let latencies: Vec<f64> = (0..=profile.largest_up_to(model.max_batch, model.slo))
            .map(|batch| profile.latency(batch).as_secs_f64())
            .collect();
        PRICES
            .into_iter()
            .map(|price| {
                search(
                    &arrivals,
                    &latencies,
                    model.slo.as_secs_f64(),
                    self.devices as usize,
                    price * rate,
                    width.max(1),
                )
            })
            .min()
    }
}

fn search(arrivals: &[f64], latencies: &[f64], slo: f64, devices: usize, price: f64, width: usize) -> u32 {
    let empty = || Frontier { devices, lost: Vec::new(), free: Vec::new() };
    // There is one frontier for each number of requests ahead.
    let mut ahead: std::collections::VecDeque<Frontier> = (0..latencies.len().max(2)).map(|_| empty()).collect();
    ahead[0].add(0, &vec![0.0; devices]);
    let mut order: Vec<(f64, usize)> = Vec::new();
    let mut free = Vec::with_capacity(devices);
    for (at, arrival) in arrivals.iter().enumerate() {
        let Some(mut here) = ahead.pop_front() else { break };
        order.clear();
        order.extend((0..here.lost.len()).map(|schedule| {
            let taken: f64 = here.free(schedule).iter().map(|free| (free - arrival).max(0.0)).sum();
            (f64::from(here.lost[schedule]) + price * taken, schedule)
        }));
        if order.len() > width {
            order.select_nth_unstable_by(width, |a, b| a.0.total_cmp(&b.0));
            order.truncate(width);
        }
        for &(_, schedule) in &order {
            let (lost, taken) = (here.lost[schedule], here.free(schedule));
            ahead[0].add(lost + 1, taken);
            for (batch, latency) in latencies.iter().enumerate().skip(1) {
                let Some(last) = arrivals.get(at + batch - 1) else { break };
                let end = last.max(taken[0]) + latency;
                if end > arrival + slo {
                    break;
                }
                free.clear();
                free.extend(taken[1..].iter().take_while(|free| **free < end));
                let rest = 1 + free.len();
                free.push(end);
                free.extend(&taken[rest..]);
                ahead[batch - 1].add(lost, &free);
            }
        }
        here.lost.clear();
        here.free.clear();
        ahead.push_back(here);
    }
    ahead.front().and_then(|done| done.lost.iter().min().copied()).unwrap_or(0)
}

impl Frontier {
    fn add(&mut self, lost: u32, free: &[f64]) {
        self.lost.push(lost);
        self.free.extend_from_slice(free);
    }

    fn free(&self, schedule: usize) -> &[f64] {
        &self.free[schedule * self.devices..(schedule + 1) * self.devices]
    }
}
