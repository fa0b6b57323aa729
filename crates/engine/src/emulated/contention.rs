//! Launches on one emulated device: the speed of each beside the others.

use std::sync::Arc;

use downbeat_core::Duration;

/// The loss of a launch's speed where other models keep all of its units busy, beyond its loss of
/// units. Fitted to GSLICE's figure 1 (lab/docs/device_model.md, "interference").
const INTERFERENCE: f64 = 1.0;

/// A launch that runs.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// The model's number. Launches of one model do not interfere (E²bird figure 7).
    pub model: u64,
    /// The compute units that it may run on, by number.
    pub portion: Arc<[usize]>,
    /// The compute units that it keeps busy where it has them for itself, at least.
    pub wants: f64,
    /// Its duration alone on the whole device.
    pub alone: Duration,
}

/// A device on which launches run side by side, under the clock of its user.
///
/// A launch keeps [`wants`](Launch::wants) units busy, spread evenly over its portion. On a smaller
/// portion it takes longer in proportion. Launches that together want more than the whole of a unit
/// share it in proportion to their wants. A launch also slows down with the part of its units that
/// other models keep busy.
#[derive(Debug, Default)]
pub(super) struct Contention {
    now: Duration,
    running: Vec<Running>,
    next: u64,
}

#[derive(Debug)]
struct Running {
    id: u64,
    launch: Launch,
    /// The rest of the launch's time alone, nanoseconds.
    left: f64,
    /// Its present speed, in parts of its speed alone.
    speed: f64,
}

impl Running {
    fn ends_in(&self) -> f64 {
        self.left / self.speed.max(f64::MIN_POSITIVE)
    }

    /// The part of each of its units that it wants.
    fn density(&self) -> f64 {
        (self.launch.wants / self.launch.portion.len().max(1) as f64).min(1.0)
    }
}

impl Contention {
    /// Begins a launch, and returns its id.
    pub fn begin(&mut self, now: Duration, launch: Launch) -> u64 {
        self.advance(now);
        self.next += 1;
        let left = launch.alone.as_nanos() as f64;
        self.running.push(Running { id: self.next, launch, left, speed: 0.0 });
        self.share();
        self.next
    }

    /// The time until a launch ends, if none begins or ends before; `None`: it has ended.
    pub fn ends_in(&mut self, now: Duration, id: u64) -> Option<Duration> {
        self.advance(now);
        let running = self.running.iter().find(|running| running.id == id)?;
        Some(Duration::from_nanos(running.ends_in().ceil() as u64))
    }

    fn advance(&mut self, now: Duration) {
        let mut passes = now.saturating_sub(self.now).as_nanos() as f64;
        self.now = self.now.max(now);
        while let Some(first) = self.running.iter().map(Running::ends_in).min_by(f64::total_cmp) {
            let step = first.min(passes);
            self.running.iter_mut().for_each(|running| running.left -= step * running.speed);
            if first > passes {
                break;
            }
            passes -= step;
            // Sums of fractions may be off by half a nanosecond.
            self.running.retain(|running| running.left >= 0.5);
            self.share();
        }
    }

    /// Sets the present speed of each launch.
    fn share(&mut self) {
        let units =
            self.running.iter().flat_map(|running| running.launch.portion.iter()).max().map_or(0, |last| last + 1);
        let mut wanted = vec![0.0; units];
        for running in &self.running {
            running.launch.portion.iter().for_each(|unit| wanted[*unit] += running.density());
        }
        let gets = |running: &Running, unit: usize| running.density() / f64::max(wanted[unit], 1.0);
        let speed = |running: &Running| {
            let Launch { model, portion, wants, .. } = &running.launch;
            let got: f64 = portion.iter().map(|unit| gets(running, *unit)).sum();
            let rivals = self.running.iter().filter(|other| other.launch.model != *model);
            let on_mine = |other: &Running| -> f64 {
                other.launch.portion.iter().filter(|unit| portion.contains(unit)).map(|unit| gets(other, *unit)).sum()
            };
            let others: f64 = rivals.map(on_mine).sum();
            got / wants / (1.0 + INTERFERENCE * others / portion.len().max(1) as f64)
        };
        let speeds: Vec<f64> = self.running.iter().map(speed).collect();
        self.running.iter_mut().zip(speeds).for_each(|(running, speed)| running.speed = speed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A launch on a device of 100 units.
    fn launch(model: u64, units: std::ops::Range<usize>, wants: f64) -> Launch {
        Launch { model, portion: units.collect(), wants, alone: ms(10) }
    }

    /// The end of each launch, ms, if all begin together.
    fn ends(launches: &[Launch]) -> Vec<f64> {
        let mut device = Contention::default();
        let ids: Vec<u64> = launches.iter().map(|launch| device.begin(Duration::ZERO, launch.clone())).collect();
        let mut ends = vec![None; ids.len()];
        let mut now = Duration::ZERO;
        while ends.iter().any(Option::is_none) {
            let left: Vec<_> = ids.iter().map(|id| device.ends_in(now, *id)).collect();
            for (end, left) in ends.iter_mut().zip(&left) {
                if end.is_none() && left.is_none() {
                    *end = Some(now.as_nanos() as f64 / 1e6);
                }
            }
            now += left.into_iter().flatten().min().unwrap_or_default();
        }
        ends.into_iter().map(|end| (end.unwrap() * 1e4_f64).round() / 1e4).collect()
    }

    #[test]
    fn alone_it_takes_its_profile_down_to_the_knee_and_longer_below() {
        assert_eq!(ends(&[launch(1, 0..100, 60.0)]), [10.0]);
        assert_eq!(ends(&[launch(1, 0..60, 60.0)]), [10.0]);
        assert_eq!(ends(&[launch(1, 0..30, 60.0)]), [20.0]);
    }

    #[test]
    fn lanes_of_one_model_run_side_by_side_until_the_device_is_full() {
        assert_eq!(ends(&[launch(1, 0..100, 50.0), launch(1, 0..100, 50.0)]), [10.0, 10.0]);
        assert_eq!(ends(&[launch(1, 0..100, 100.0), launch(1, 0..100, 100.0)]), [20.0, 20.0]);
    }

    #[test]
    fn gslice_figure_1_sharing_costs_more_than_partitions() {
        let all = ends(&[launch(1, 0..100, 100.0), launch(2, 0..100, 100.0)]);
        assert_eq!(all, [30.0, 30.0], "half of the device, and half of that speed for the other half");
        let halves = ends(&[launch(1, 0..50, 100.0), launch(2, 50..100, 100.0)]);
        assert_eq!(halves, [20.0, 20.0]);
        let light = ends(&[launch(1, 0..30, 30.0), launch(2, 30..100, 70.0)]);
        assert_eq!(light, [10.0, 10.0], "each has what it can use");
    }

    #[test]
    fn partitions_that_overlap_share_what_they_have_in_common() {
        // The first launch has half of 20 units and all of its other 20: 30 of the 40 that it
        // wants. The other keeps a quarter of the first one's units busy.
        let overlapping = ends(&[launch(1, 0..40, 40.0), launch(2, 20..60, 40.0)]);
        assert!(overlapping.iter().all(|end| (end - 10.0 / 0.75 * 1.25).abs() < 1e-3), "{overlapping:?}");
    }

    #[test]
    fn who_is_left_goes_on_faster() {
        let short = Launch { alone: ms(1), ..launch(1, 0..100, 100.0) };
        // The short one ends after 3 ms, in which the other has done 1 ms of its 10.
        assert_eq!(ends(&[short, launch(2, 0..100, 100.0)]), [3.0, 12.0]);
    }

    #[test]
    fn one_that_nobody_asked_for_in_time_gave_its_units_back_when_it_ended() {
        let mut device = Contention::default();
        let short = Launch { alone: ms(1), ..launch(1, 0..100, 100.0) };
        let [short, long] = [short, launch(2, 0..100, 100.0)].map(|launch| device.begin(Duration::ZERO, launch));
        assert_eq!(device.ends_in(ms(11), long), Some(ms(1)));
        assert_eq!(device.ends_in(ms(11), short), None);
        assert_eq!(device.ends_in(ms(12), long), None);
    }
}
