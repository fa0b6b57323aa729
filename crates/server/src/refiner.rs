//! Keeps a latency profile true to what batches take in service.

use downbeat_core::{Duration, LatencyProfile};

/// Weight of a new observation in the running averages.
const SMOOTHING: f64 = 1.0 / 16.0;
/// Observations of a batch size before its own average counts.
const ENOUGH: u32 = 4;
/// Observations between two rebuilt profiles.
const PERIOD: u32 = 32;
/// Mean absolute deviations above the mean that a prediction has: deadlines are to be met, not met half of the time.
const MARGIN: f64 = 2.0;
/// A single observation counts at most this many times the present estimate, so that one preempted run
/// (a laptop's lid, a neighbour's burst) does not make a model look unservable.
const OUTLIER: f64 = 4.0;

#[derive(Clone, Copy, Default, Debug)]
struct Average {
    count: u32,
    mean_ns: f64,
    deviation_ns: f64,
}

/// Running averages of the latency by batch size, and the profile they amount to.
///
/// Sizes that have been seen `ENOUGH` times have their own average; the others keep the profile measured at
/// load, scaled by how far off it is elsewhere.
#[derive(Debug)]
pub struct ProfileRefiner {
    base: LatencyProfile,
    current: LatencyProfile,
    /// `averages[b - 1]` is batch size `b`'s.
    averages: Vec<Average>,
    /// Observed over predicted by `base`, all sizes.
    ratio: f64,
    since_rebuild: u32,
    observations: u64,
}

impl ProfileRefiner {
    /// Starts from a measured (or guessed) profile.
    pub fn new(base: LatencyProfile) -> Self {
        let averages = vec![Average::default(); base.max_batch() as usize];
        ProfileRefiner { current: base.clone(), base, averages, ratio: 1.0, since_rebuild: 0, observations: 0 }
    }

    pub fn profile(&self) -> &LatencyProfile {
        &self.current
    }

    /// Takes in what a batch of `size` items took; gives the new profile when it is time for one.
    pub fn observe(&mut self, size: u32, latency: Duration) -> Option<LatencyProfile> {
        let predicted = self.current.latency(size).as_nanos() as f64;
        let average = self.averages.get_mut((size as usize).checked_sub(1)?)?;
        let first = self.observations == 0;
        let ns = if first { latency.as_nanos() as f64 } else { (latency.as_nanos() as f64).min(predicted * OUTLIER) };
        if average.count == 0 {
            average.mean_ns = ns;
        } else {
            average.deviation_ns += ((ns - average.mean_ns).abs() - average.deviation_ns) * SMOOTHING;
            average.mean_ns += (ns - average.mean_ns) * SMOOTHING;
        }
        average.count = average.count.saturating_add(1);
        let ratio = ns / self.base.latency(size).as_nanos() as f64;
        self.ratio += (ratio - self.ratio) * if first { 1.0 } else { SMOOTHING };
        self.observations += 1;
        self.since_rebuild += 1;
        // The first observation of a guessed profile is worth more than the guess.
        if self.since_rebuild < PERIOD && self.observations > 2 {
            return None;
        }
        self.since_rebuild = 0;
        let mut points = Vec::with_capacity(self.averages.len());
        // From the largest size down: what was not seen is not slower than a larger batch that was.
        let mut ceiling = f64::INFINITY;
        for (index, average) in self.averages.iter().enumerate().rev() {
            let size = index as u32 + 1;
            let ns = if average.count >= ENOUGH {
                ceiling = average.mean_ns + MARGIN * average.deviation_ns;
                ceiling
            } else {
                (self.base.latency(size).as_nanos() as f64 * self.ratio).min(ceiling)
            };
            points.push((size, Duration::from_nanos((ns as u64).max(1))));
        }
        self.current = LatencyProfile::from_points(&points).ok()?;
        Some(self.current.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn a_wrong_profile_becomes_true() {
        let base = LatencyProfile::linear(micros(10), micros(100), 8).unwrap();
        let mut refiner = ProfileRefiner::new(base);
        for _ in 0..200 {
            refiner.observe(4, micros(400));
            refiner.observe(8, micros(800));
        }
        let l = |b| refiner.profile().latency(b).as_nanos() as f64 / 1e3;
        assert!((l(4) - 400.0).abs() < 4.0, "{}", l(4));
        assert!((l(8) - 800.0).abs() < 8.0, "{}", l(8));
        // Never seen alone: scaled with the others, and not above the sizes that were seen.
        assert!(l(1) > 200.0 && l(1) <= 400.0, "{}", l(1));
    }

    #[test]
    fn one_preempted_run_changes_little() {
        let base = LatencyProfile::linear(micros(10), micros(100), 8).unwrap();
        let mut refiner = ProfileRefiner::new(base);
        for _ in 0..100 {
            refiner.observe(1, micros(110));
        }
        refiner.observe(1, Duration::from_millis(500));
        for _ in 0..40 {
            refiner.observe(1, micros(110));
        }
        assert!(refiner.profile().latency(1) < micros(170), "{}", refiner.profile().latency(1));
    }

    #[test]
    fn sizes_outside_the_profile_are_ignored() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(1), micros(1), 2).unwrap());
        assert_eq!(refiner.observe(0, micros(5)), None);
        assert_eq!(refiner.observe(3, micros(5)), None);
        assert_eq!(refiner.observations, 0);
    }
}
