//! What a schedule can do that knows all arrivals of one model beforehand.

use downbeat_core::Time;

use super::prices::Trace;
use downbeat_sim::staggered;

/// Prices of device time that are tried, as shares of the goodput that a device has in the staggered pattern.
const PRICES: [f64; 4] = [0.7, 0.8, 0.9, 1.0];

/// Schedules that have decided on all requests before some one.
struct Frontier {
    devices: usize,
    /// By schedule: requests it has lost.
    lost: Vec<u32>,
    /// By schedule, by device: when it is free, in seconds; sorted.
    free: Vec<f64>,
}

impl Trace {
    /// How many requests a good schedule loses that knows all arrivals: no scheduler that does not know them need be ashamed of more. It is a
    /// schedule's loss, so that the least possible is between [`Trace::least_bad`] and it. `None` unless there is one model, which can be served.
    ///
    /// A beam search over the requests in order: each is lost or begins a batch with those that follow, on the device that is free first. Of
    /// the schedules that have decided on the same requests the `width` best are kept, by their losses and by the time for which
    /// their devices are taken, at some price of device time; the best outcome of a few prices counts.
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
    // By how many requests ahead.
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
