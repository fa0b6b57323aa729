//! Keeps a latency profile true to the latencies of batches in service.

use downbeat_core::isotonic::isotonic_fit;
use downbeat_core::{Duration, LatencyProfile, Time};

/// An average looks back on about this many observations: no size has more weight than that.
const WINDOW: u32 = 16;
/// Observations of a batch size that was measured at load before its own average counts.
const ENOUGH: u32 = 4;
/// Observations between two rebuilt profiles, unless an average has moved far.
const PERIOD: u32 = 32;
/// If an average moves by this part, the profile is rebuilt at once.
const FAR: f64 = 0.25;
/// Mean absolute deviations above the mean in a prediction: batches should meet deadlines, not meet
/// them half of the time.
const MARGIN: f64 = 2.0;
/// The margin is at most this part of the mean. Example: beside 60 busy processes, a lane's thread
/// waits 0 to 250 ms for a core, about 100 ms in the mean. With all of its margin, the estimate
/// exceeded an SLO of 250 ms, and nearly all requests were refused.
const MOST_MARGIN: f64 = 0.5;
/// A single observation counts at most this many times the present mean. Example: closing a
/// laptop's lid stops a run for a second, and the model must not look unservable after that. The
/// limit is relative to the mean, not to the estimate with its margin. Otherwise one stopped run in
/// ten would raise the estimate to the length of the stop. An observation this many times faster
/// shows that the runs before stalled.
const OUTLIER: f64 = 4.0;
/// Mean absolute deviations below the mean at which a fast run is no chance.
const CLEAR: f64 = 4.0;
/// A pause of this length may come from refusals, which the estimate causes. A run after the pause
/// that is quicker than the estimate counts as much as all runs before, and the margin begins anew.
/// Then a request is refused only if the mean or this run is too slow. If the run is [`OUTLIER`]
/// times as fast as the estimate, a busy time is over, and only that run counts.
const REST: Duration = Duration::from_millis(400);
/// A pause is no sign of refusals unless the usual gap between runs is this many times shorter.
const UNUSUAL: f64 = 2.5;

/// The latency of batches of one size.
#[derive(Clone, Copy, Default, Debug)]
struct Average {
    /// Observations that it stands for, at most [`WINDOW`].
    count: u32,
    mean_ns: f64,
    deviation_ns: f64,
    /// The estimate in the present profile; 0: the profile does not use it.
    built_ns: f64,
    /// Whether it was observed since the last period ended.
    is_fresh: bool,
    /// Whether the last run was so fast that another one shows that the runs before stalled.
    was_far_faster: bool,
}

impl Average {
    fn estimate_ns(&self) -> f64 {
        self.mean_ns + (MARGIN * self.deviation_ns).min(MOST_MARGIN * self.mean_ns)
    }

    /// Takes in a run. `is_rested`: an unusual pause came before it.
    fn observe(&mut self, ns: f64, is_rested: bool) {
        // No run is faster than the model: slow runs before a fast one were stalled, or of a busy
        // time. A model may have an early exit for some requests, so that takes two fast runs in a
        // row, unless few runs are known.
        let is_far_faster = ns * OUTLIER < self.mean_ns && ns < self.mean_ns - CLEAR * self.deviation_ns;
        let is_busy_over = is_rested && ns * OUTLIER < self.estimate_ns();
        let shows_stall = is_far_faster && (self.was_far_faster || self.count < ENOUGH) || is_busy_over;
        self.was_far_faster = is_far_faster;
        if is_far_faster && !shows_stall {
            return;
        }
        if self.count == 0 || shows_stall {
            (self.count, self.mean_ns, self.deviation_ns) = (0, ns, 0.0);
        } else if is_rested && ns < self.estimate_ns() {
            (self.mean_ns, self.deviation_ns) = (f64::midpoint(self.mean_ns, ns), 0.0);
        } else {
            let smoothing = 1.0 / f64::from(WINDOW);
            self.deviation_ns += ((ns - self.mean_ns).abs() - self.deviation_ns) * smoothing;
            self.mean_ns += (ns - self.mean_ns) * smoothing;
        }
        self.count = (self.count + 1).min(WINDOW);
        self.is_fresh = true;
    }

    /// Whether the present profile is far from the estimate: above it, or anywhere while little is
    /// known. A slower time than before may be a single stall.
    fn is_news(&self) -> bool {
        let moved = self.estimate_ns() - self.built_ns;
        let far = FAR * self.built_ns;
        moved < -far || self.count <= ENOUGH && moved > far
    }

    /// Ends a period. A size that was not run in it counts less: a wrong belief may be the reason
    /// that it was not run.
    fn age(&mut self) {
        self.count = self.count.saturating_sub(u32::from(!std::mem::take(&mut self.is_fresh)));
    }
}

/// Running averages of the latency by batch size, and the profile they amount to.
///
/// The sizes that were observed often enough are fitted so that none falls ([`isotonic_fit`]), each
/// with the weight of its observations. The other sizes keep the profile measured at load, scaled
/// by its error at the observed sizes. They stay between the observed sizes beside them, so that no
/// guess moves an observed size.
#[derive(Debug)]
pub struct ProfileRefiner {
    base: LatencyProfile,
    current: LatencyProfile,
    /// `averages[b - 1]` is batch size `b`'s.
    averages: Vec<Average>,
    since_period: u32,
    observations: u64,
    /// When the last run ended.
    last: Time,
    /// The usual time between the ends of two runs.
    gap_ns: f64,
}

impl ProfileRefiner {
    /// Starts from a measured (or guessed) profile.
    pub fn new(base: LatencyProfile) -> Self {
        let averages = vec![Average::default(); base.max_batch() as usize];
        ProfileRefiner {
            current: base.clone(),
            base,
            averages,
            since_period: 0,
            observations: 0,
            last: Time::ZERO,
            gap_ns: 0.0,
        }
    }

    pub fn profile(&self) -> &LatencyProfile {
        &self.current
    }

    /// Takes in the latency of a batch of `size` items that ended at `end`. Returns a new profile
    /// when one is due.
    pub fn observe(&mut self, size: u32, latency: Duration, end: Time) -> Option<LatencyProfile> {
        let is_rested = self.is_rested(end);
        let index = (size as usize).checked_sub(1)?;
        let predicted = self.current.latency(size).as_nanos() as f64;
        let average = self.averages.get_mut(index)?;
        let is_first = self.observations == 0;
        // A guess bounds nothing.
        let is_guess = average.count == 0 && self.base.known().is_some_and(|known| size > known);
        let usual = if average.count >= ENOUGH { average.mean_ns } else { predicted };
        let most = if is_first || is_guess { f64::INFINITY } else { usual * OUTLIER };
        average.observe((latency.as_nanos() as f64).min(most), is_rested);
        let average = *average;
        self.observations += 1;
        self.since_period += 1;
        // The first observation of a guessed profile is worth more than the guess.
        let is_used = || average.built_ns > 0.0 || self.counts(size, &average, self.ratio());
        let is_refuted = is_rested && average.estimate_ns() < predicted;
        let is_news = self.observations <= 2 || is_refuted || average.is_news() && is_used();
        if self.since_period < PERIOD && !is_news {
            return None;
        }
        if self.since_period >= PERIOD {
            self.averages.iter_mut().for_each(Average::age);
            self.since_period = 0;
        }
        self.current = self.rebuilt()?;
        Some(self.current.clone())
    }

    /// Whether the run that ended at `end` follows an unusual pause. Such a pause counts little in
    /// the usual gap, so that only many of them in a row become usual.
    fn is_rested(&mut self, end: Time) -> bool {
        let (gap_ns, rest_ns) = (end.since(self.last).as_nanos() as f64, REST.as_nanos() as f64);
        self.last = end;
        let is_rested = gap_ns >= rest_ns.max(UNUSUAL * self.gap_ns);
        let counted_ns = if is_rested { (2.0 * self.gap_ns).max(rest_ns / UNUSUAL) } else { gap_ns };
        self.gap_ns += (counted_ns - self.gap_ns) / f64::from(WINDOW);
        is_rested
    }

    /// Observed over predicted by `base`, all sizes.
    fn ratio(&self) -> f64 {
        let (mut weights, mut sum) = (0.0, 0.0);
        for (size, average) in (1..).zip(&self.averages).filter(|(_, average)| average.count > 0) {
            weights += f64::from(average.count);
            sum += f64::from(average.count) * average.mean_ns / self.base.latency(size).as_nanos() as f64;
        }
        if weights > 0.0 { sum / weights } else { 1.0 }
    }

    /// Whether the average of a size replaces the guess for it. That holds after [`ENOUGH`]
    /// observations, for a size that was never measured, and for a guess that is clearly too slow.
    fn counts(&self, size: u32, average: &Average, ratio: f64) -> bool {
        let is_guess = self.base.known().is_some_and(|known| size > known);
        let guess_ns = self.base.latency(size).as_nanos() as f64 * ratio;
        average.count >= ENOUGH || average.count > 0 && (is_guess || average.mean_ns * OUTLIER < guess_ns)
    }

    fn rebuilt(&mut self) -> Option<LatencyProfile> {
        let ratio = self.ratio();
        let counts = |(size, average): &(u32, &Average)| self.counts(*size, average, ratio);
        let observed: Vec<(u32, Average)> =
            (1..).zip(&self.averages).filter(counts).map(|(size, average)| (size, *average)).collect();
        let points = observed.iter().map(|(_, average)| ((average.estimate_ns() as u64).max(1), average.count));
        let fitted = isotonic_fit(points);
        let mut table = Vec::with_capacity(self.averages.len());
        let (mut floor, mut next) = (1, observed.iter().map(|(size, _)| *size).zip(fitted).peekable());
        for size in (1..).take(self.averages.len()) {
            let ns = match next.peek() {
                Some((its, ns)) if *its == size => {
                    let ns = *ns;
                    next.next();
                    ns
                }
                beside => {
                    let ceiling = beside.map_or(u64::MAX, |(_, ns)| *ns);
                    ((self.base.latency(size).as_nanos() as f64 * ratio) as u64).clamp(floor, ceiling)
                }
            };
            floor = ns;
            table.push(Duration::from_nanos(ns));
        }
        for (size, average) in (1..).zip(&mut self.averages) {
            let is_observed = observed.binary_search_by_key(&size, |(observed, _)| *observed).is_ok();
            average.built_ns = if is_observed { average.estimate_ns() } else { 0.0 };
        }
        let seen = (1..).zip(&self.averages).filter(|(_, average)| average.count > 0).map(|(size, _)| size).last();
        let table = LatencyProfile::from_table(table).ok()?;
        // A certain profile stays certain.
        Some(match self.base.known() {
            Some(known) => table.learned(known.max(seen.unwrap_or(0))),
            None => table,
        })
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::probes::{Doubt, Probes};
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_pcg::Pcg64Mcg;

    use super::*;

    fn micros(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// Observes a run that follows the last one without a pause.
    fn observe(refiner: &mut ProfileRefiner, size: u32, latency: Duration) -> Option<LatencyProfile> {
        refiner.observe(size, latency, refiner.last)
    }

    #[test]
    fn a_wrong_profile_becomes_true() {
        let base = LatencyProfile::linear(micros(10), micros(100), 8).unwrap();
        let mut refiner = ProfileRefiner::new(base);
        for _ in 0..200 {
            observe(&mut refiner, 4, micros(400));
            observe(&mut refiner, 8, micros(800));
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
            observe(&mut refiner, 1, micros(110));
        }
        observe(&mut refiner, 1, Duration::from_millis(500));
        for _ in 0..40 {
            observe(&mut refiner, 1, micros(110));
        }
        assert!(refiner.profile().latency(1) < micros(170), "{}", refiner.profile().latency(1));
    }

    #[test]
    fn sizes_outside_the_profile_are_ignored() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(1), micros(1), 2).unwrap());
        assert_eq!(observe(&mut refiner, 0, micros(5)), None);
        assert_eq!(observe(&mut refiner, 3, micros(5)), None);
        assert_eq!(refiner.observations, 0);
    }

    /// The first run stalled for 8.4 s. The second run shows the stall, and the average forgets the
    /// first.
    #[test]
    fn a_run_that_is_far_faster_shows_that_those_before_were_stalled() {
        for base in [LatencyProfile::linear(micros(10), micros(100), 8).unwrap().learned(0), guess()] {
            let mut refiner = ProfileRefiner::new(base);
            observe(&mut refiner, 4, Duration::from_millis(8_400));
            assert_eq!(refiner.profile().latency(4), Duration::from_millis(8_400), "nothing else is known");
            assert!(observe(&mut refiner, 4, micros(10_000)).is_some(), "told at once");
            assert_eq!(refiner.profile().latency(4), micros(10_000));
            assert!([1, 8].iter().all(|b| refiner.profile().latency(*b) < micros(40_000)), "{:?}", refiner.profile());
        }
    }

    /// Fast runs also end the high estimates of a busy time.
    #[test]
    fn two_fast_runs_end_the_belief_of_a_busy_time() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(10), micros(100), 8).unwrap().learned(8));
        for run in 0..100 {
            observe(&mut refiner, 8, Duration::from_millis(7_900 + run % 3 * 100));
        }
        assert!(refiner.profile().latency(8) > Duration::from_millis(7_000));
        // A single fast run may be an early exit.
        observe(&mut refiner, 8, micros(200));
        assert!(refiner.profile().latency(8) > Duration::from_millis(7_000));
        assert!(observe(&mut refiner, 8, micros(200)).is_some());
        assert!(refiner.profile().latency(8) < micros(300), "{:?}", refiner.profile());
        // A model whose runs differ much does not count as stalled.
        let mut varies = ProfileRefiner::new(LatencyProfile::linear(micros(10), micros(100), 8).unwrap().learned(8));
        for run in 0..400 {
            observe(&mut varies, 1, micros(if run % 2 == 0 { 1_000 } else { 10_000 }));
        }
        assert!(varies.profile().latency(1) > micros(8_000), "{:?}", varies.profile());
    }

    /// A busy machine preempts one run in eight for 4 ms.
    #[test]
    fn preempted_runs_are_not_what_the_others_take() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(1), micros(16), 8).unwrap().learned(8));
        (0..2_000).for_each(|run| drop(observe(&mut refiner, 1, micros(if run % 8 == 0 { 4_000 } else { 20 }))));
        assert!(refiner.profile().latency(1) < micros(200), "{:?}", refiner.profile());
    }

    /// Beside 60 busy processes the runs of a small model take 1 to 250 ms, 112 ms in the mean. Seven of
    /// eight runs take less than the estimate.
    #[test]
    fn an_estimate_is_at_most_half_again_the_mean() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(1), micros(16), 8).unwrap().learned(8));
        let runs = [1, 40, 60, 105, 130, 150, 160, 250];
        (0..400).for_each(|run| drop(observe(&mut refiner, 1, Duration::from_millis(runs[run * 5 % 8]))));
        let estimate = refiner.profile().latency(1);
        assert!((150..=180).contains(&(estimate.as_nanos() / 1_000_000)), "{estimate}");
    }

    /// Sixty clients kept both cores busy: some runs of 17 us took 4 ms. Then each request was
    /// refused for its SLO of 1 ms. A single fast run after a pause must end that.
    #[test]
    fn a_fast_run_after_a_pause_ends_the_belief_of_a_busy_time() {
        let base = LatencyProfile::linear(micros(1), micros(16), 8).unwrap().learned(8);
        let busy = || {
            let mut refiner = ProfileRefiner::new(base.clone());
            (0..200).for_each(|run| drop(observe(&mut refiner, 1, micros(if run % 3 == 0 { 4_000 } else { 50 }))));
            refiner
        };
        let mut refiner = busy();
        assert!(refiner.profile().latency(1) > micros(1_000), "{:?}", refiner.profile());
        let soon = refiner.last + Duration::from_millis(390);
        refiner.observe(1, micros(30), soon);
        assert!(refiner.profile().latency(1) > micros(1_000), "that was no pause: {:?}", refiner.profile());
        let mut refiner = busy();
        let profile = refiner.observe(1, micros(30), refiner.last + REST).expect("it is news");
        assert_eq!(profile.latency(1), micros(30));
    }

    #[test]
    fn a_size_that_is_not_run_any_more_is_a_guess_again() {
        let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(10), micros(100), 8).unwrap().learned(8));
        for _ in 0..40 {
            observe(&mut refiner, 8, micros(500));
            observe(&mut refiner, 1, micros(110));
        }
        let believed = refiner.profile().latency(8);
        assert!(believed > micros(400), "{believed}");
        for _ in 0..PERIOD * (WINDOW + 1) {
            observe(&mut refiner, 1, micros(110));
        }
        let forgotten = refiner.profile().latency(8);
        assert!(forgotten < micros(200), "{forgotten}: as it was measured at load");
    }

    #[test]
    fn what_was_observed_of_a_guess_is_known() {
        let mut refiner = ProfileRefiner::new(guess());
        assert_eq!(refiner.profile().known(), Some(0));
        assert_eq!(observe(&mut refiner, 1, micros(300)).unwrap().known(), Some(1));
        assert_eq!(observe(&mut refiner, 4, micros(400)).unwrap().known(), Some(4));
    }

    fn guess() -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis(1), Duration::from_millis(1), 8).unwrap().learned(0)
    }

    /// A load of 60 busy processes: runs take 30 to 370 ms, 140 ms in the mean, and the SLO is 250 ms.
    /// A scheduler would admit, try or refuse each request by the estimate. The estimate exceeds the
    /// SLO now and then. A refusal of all requests ends within 2.5 s, whatever came before.
    #[test]
    fn refusals_by_an_estimate_end_soon() {
        let slo = Duration::from_millis(250);
        let mut longest = Duration::ZERO;
        for seed in 0..40 {
            let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(1), micros(16), 8).unwrap().learned(8));
            let (mut probes, mut random) = (Probes::default(), Pcg64Mcg::seed_from_u64(seed));
            let (mut now, mut free_at, mut admitted_at) = (Time::ZERO, Time::ZERO, Time::ZERO);
            let mut refused = 0;
            while now < Time::ZERO + Duration::from_millis(300_000) {
                now += Duration::from_millis(10);
                let needed = refiner.profile().latency(1);
                let is_admitted = needed <= slo || probes.tries(now, Doubt::Measured, needed);
                refused += u32::from(!is_admitted);
                if is_admitted {
                    longest = longest.max(now.since(admitted_at));
                    admitted_at = now;
                }
                if is_admitted && free_at <= now {
                    // In every tenth second of the load all runs are slow.
                    let slow = if now.as_nanos() / 1_000_000_000 % 10 == 0 { 150 } else { 0 };
                    let took = Duration::from_millis(random.random_range(30..220_u64) + slow);
                    free_at = now + took;
                    let before = refiner.profile().latency(1);
                    match refiner.observe(1, took, free_at) {
                        Some(profile) if before > slo && profile.latency(1) <= slo => probes.was_wrong(),
                        Some(_) => probes.has_learned(free_at),
                        None => {}
                    }
                }
            }
            println!("seed {seed}: {refused} requests of 30,000 refused");
        }
        assert!(longest <= Duration::from_millis(2_500), "{longest}");
    }

    proptest! {
        /// A profile never falls, and guesses for other sizes neither raise nor lower a size that
        /// was observed.
        #[test]
        fn guesses_move_no_size_that_was_observed(
            seen in prop::collection::btree_map(1..33u32, 1..1_000u64, 1..6),
            alpha in 0..100u64,
            beta in 1..1_000u64,
            rounds in 4..80u32,
        ) {
            let mut refiner = ProfileRefiner::new(LatencyProfile::linear(micros(alpha), micros(beta), 32).unwrap().learned(32));
            // The latencies are like a model's: larger batches take no less.
            let mut level = 0;
            let truth: Vec<(u32, u64)> = seen.iter().map(|(size, more)| { level += more; (*size, level) }).collect();
            // First the slowest, which nothing clips.
            for _ in 0..rounds {
                truth.iter().rev().for_each(|(size, us)| drop(observe(&mut refiner, *size, micros(*us))));
            }
            refiner.current = refiner.rebuilt().unwrap();
            let profile = refiner.profile();
            for size in 1..32 {
                prop_assert!(profile.latency(size) <= profile.latency(size + 1), "{profile:?}");
            }
            for (size, _) in &truth {
                let own = refiner.averages[*size as usize - 1].estimate_ns();
                let all: Vec<u64> = truth.iter().map(|(size, _)| refiner.averages[*size as usize - 1].estimate_ns() as u64).collect();
                if all.is_sorted() {
                    let its = profile.latency(*size).as_nanos() as f64;
                    prop_assert!((its - own).abs() <= 1.0, "size {size}: {its}, observed {own}");
                }
            }
        }
    }
}
