//! The requests of the last minutes, for replays under other settings.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::cluster::{Behaviour, DispatchPolicy, ModelOptions, Order, OrderPolicy, PastArrival};
use downbeat_core::{DeviceKind, DeviceProfiles, Duration, ModelId, Time};

/// The most requests that are remembered: 2 MiB.
const MOST: usize = 64 << 10;
/// How long a request is remembered.
const SPAN: Duration = Duration::from_millis(300_000);
/// The most executions of a model that are remembered.
const MOST_RUNS: usize = 256;

/// The requests of the last minutes, with the queues that they joined.
///
/// The rehearsal's thread adds the requests, off their way through the server.
///
/// **Bound.** The last 64 Ki requests, of at most five minutes, and 256 executions of each queue.
#[derive(Clone, Debug, Default)]
pub struct Remembered {
    /// The requests, in the order of their arrivals. Their times lie before the server's by `skipped`.
    pub arrivals: VecDeque<PastArrival>,
    /// The queues with their present options.
    pub queues: BTreeMap<ModelId, RememberedQueue>,
    /// By kind: the devices that the scheduler plans with.
    pub devices: Vec<u32>,
    /// The order in which candidates get devices.
    pub order: OrderPolicy,
    /// The order that a trial has found.
    pub found_order: Option<Order>,
    /// The total time in which requests were not heard.
    pub skipped: Duration,
    /// The end of the last such time, by the server's clock. All later requests are here.
    pub whole_since: Time,
    /// The end of the time whose requests are here, by the server's clock.
    pub heard_until: Time,
}

/// A queue of the scheduler.
#[derive(Clone, Debug)]
pub struct RememberedQueue {
    /// The name of the queue's model.
    pub model: String,
    /// The options, with the present profiles.
    pub options: ModelOptions,
    /// Times of the last executions, as shares of the profile's times.
    pub runs: VecDeque<f64>,
    /// The behaviour that a trial has set.
    pub behaviour: Option<Behaviour>,
}

impl Remembered {
    /// Notes that all requests until then have been added. Requests of the `skipped` time are missing.
    pub(super) fn heard(&mut self, until: Time, skipped: Duration) {
        if skipped != self.skipped {
            (self.skipped, self.whole_since) = (skipped, until);
        }
        self.heard_until = until;
    }

    /// Adds a request of a queue that is known. A lent queue is not.
    pub(super) fn arrived(&mut self, arrival: PastArrival) {
        if !self.queues.contains_key(&arrival.model) {
            return;
        }
        // Shards report one after another, so the times may go back a little.
        let last = self.arrivals.back().map_or(Time::ZERO, |last| last.at);
        self.arrivals.push_back(PastArrival { at: arrival.at.max(last), ..arrival });
        while let Some(first) = self.arrivals.front()
            && (self.arrivals.len() > MOST || arrival.at.since(first.at) > SPAN)
        {
            self.arrivals.pop_front();
        }
    }

    /// Notes that an execution of a queue took `share` of its profile's time.
    pub(super) fn ran(&mut self, queue: ModelId, share: f64) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        if queue.runs.len() >= MOST_RUNS {
            queue.runs.pop_front();
        }
        queue.runs.push_back(share);
    }

    /// Adds a queue of this model, or sets its options.
    pub(super) fn set_queue(&mut self, queue: ModelId, model: String, options: ModelOptions) {
        self.queues.insert(queue, RememberedQueue { model, options, runs: VecDeque::new(), behaviour: None });
    }

    /// Forgets a queue and its requests.
    pub(super) fn forget(&mut self, queue: ModelId) {
        if self.queues.remove(&queue).is_some() {
            self.arrivals.retain(|arrival| arrival.model != queue);
        }
    }

    /// Replaces the profiles of a queue.
    pub(super) fn set_profiles(&mut self, queue: ModelId, profiles: DeviceProfiles) {
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.options.profiles = profiles;
        }
    }

    /// Sets the number of devices of a kind.
    pub(super) fn set_devices(&mut self, kind: DeviceKind, count: u32) {
        let index = kind.0 as usize;
        self.devices.resize(self.devices.len().max(index + 1), 0);
        self.devices[index] = count;
    }

    /// Replaces the dispatch policy of a queue.
    pub(super) fn set_dispatch(&mut self, queue: ModelId, dispatch: DispatchPolicy) {
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.options.dispatch = dispatch;
        }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::LatencyProfile;
    use downbeat_core::cluster::DropPolicy;

    use super::*;

    fn arrival(model: u32, second: u64) -> PastArrival {
        let at = Time::ZERO + Duration::from_millis(1_000 * second);
        PastArrival { at, budget: Duration::from_millis(50), model: ModelId(model), size: 1, level: 0 }
    }

    fn remembered() -> Remembered {
        let mut remembered = Remembered::default();
        for model in 0..2 {
            let profile = LatencyProfile::linear_ms(0.0, 10.0, 1).unwrap();
            let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::None);
            remembered.set_queue(ModelId(model), format!("m{model}"), options);
        }
        remembered
    }

    #[test]
    fn requests_are_kept_in_order_for_five_minutes() {
        let mut remembered = remembered();
        for second in [0, 1, 3, 2, 301, 302] {
            remembered.arrived(arrival(0, second));
        }
        let seconds = remembered.arrivals.iter().map(|arrival| arrival.at.as_nanos() / 1_000_000_000);
        assert_eq!(seconds.collect::<Vec<_>>(), [3, 3, 301, 302]);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut remembered = remembered();
        for _ in 0..2 * MOST {
            remembered.arrived(arrival(0, 1));
        }
        for run in 0..2 * MOST_RUNS {
            remembered.ran(ModelId(1), run as f64);
        }
        assert_eq!(remembered.arrivals.len(), MOST);
        let runs = &remembered.queues[&ModelId(1)].runs;
        assert_eq!((runs.len(), runs.front()), (MOST_RUNS, Some(&(MOST_RUNS as f64))));
    }

    #[test]
    fn a_queue_that_goes_takes_its_requests_along() {
        let mut remembered = remembered();
        for model in [0, 1, 7, 0] {
            remembered.arrived(arrival(model, 1));
        }
        assert_eq!(remembered.arrivals.len(), 3, "no queue has the number 7");
        remembered.forget(ModelId(0));
        assert_eq!(remembered.arrivals, [arrival(1, 1)]);
    }
    #[test]
    fn requests_are_whole_since_the_last_time_that_was_left_out() {
        let mut remembered = remembered();
        let second = |second: u64| Time::ZERO + Duration::from_millis(1_000 * second);
        remembered.heard(second(9), Duration::from_millis(4_000));
        remembered.heard(second(12), Duration::from_millis(4_000));
        assert_eq!((remembered.whole_since, remembered.heard_until), (second(9), second(12)));
    }
}
