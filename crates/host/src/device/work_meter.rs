//! Meters a model's work on a device; controllers read it at intervals.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::device::spatial::Worked;
use downbeat_core::{Duration, Time};
use parking_lot::Mutex;

/// The work of a model on a device, up to now.
#[derive(Default)]
pub struct WorkMeter {
    /// Items that came, also rejected ones.
    arrivals: AtomicU64,
    work: Mutex<Work>,
}

#[derive(Clone, Copy, Default)]
struct Work {
    /// Launches that run, and since when any does.
    running: u32,
    since: Time,
    /// The time in which any launch ran.
    busy: Duration,
    /// Finished batches, with their items.
    batches: u64,
    items: u64,
    /// The sum of the launches' times.
    took: Duration,
}

impl WorkMeter {
    /// Counts a request of `items` items.
    pub fn came(&self, items: u32) {
        self.arrivals.fetch_add(items.into(), Ordering::Relaxed);
    }

    /// A launch begins.
    pub fn begin(&self, now: Time) {
        let mut work = self.work.lock();
        if work.running == 0 {
            work.since = now;
        }
        work.running += 1;
    }

    /// Ends a launch that took `took`; `items`: the items of its batch, if that is over now.
    pub fn end(&self, now: Time, took: Duration, items: Option<u32>) {
        let mut work = self.work.lock();
        work.running = work.running.saturating_sub(1);
        if work.running == 0 {
            let since = work.since;
            work.busy += now.since(since);
        }
        work.took += took;
        if let Some(items) = items {
            work.items += u64::from(items);
            work.batches += 1;
        }
    }

    /// Reads the work up to now.
    pub fn read(&self, now: Time) -> Worked {
        let mut work = *self.work.lock();
        if work.running > 0 {
            work.busy += now.since(work.since);
        }
        let Work { busy, batches, items, took, .. } = work;
        Worked { at: now, arrivals: self.arrivals.load(Ordering::Relaxed), batches, items, busy, took }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::device::spatial::MeasuredWindow;

    use super::*;

    #[test]
    fn a_window_has_the_time_in_which_anything_ran_and_what_a_batch_took() {
        let (meter, at) = (WorkMeter::default(), |ms: u64| Time::from_nanos(ms * 1_000_000));
        let ms = Duration::from_millis;
        let before = meter.read(at(0));
        meter.came(3);
        meter.came(5);
        meter.begin(at(10));
        meter.begin(at(20));
        meter.end(at(30), ms(20), Some(3));
        meter.end(at(40), ms(20), None);
        meter.begin(at(50));
        meter.end(at(60), ms(10), Some(4));
        meter.begin(at(90));
        let window = meter.read(at(100)).since(&before);
        let expected = MeasuredWindow { span: ms(100), busy: ms(50), items: 7, arrivals: Some(8), latency: ms(25) };
        assert_eq!(window, expected);
    }
}
