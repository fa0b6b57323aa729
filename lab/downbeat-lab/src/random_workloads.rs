//! Random workloads, on which policies are judged because no author chose them.

use std::fmt;

use downbeat_core::Duration;
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use downbeat_sim::ModelProfile;
use downbeat_sim::Network;
use downbeat_sim::Pace;
use downbeat_sim::{Arrivals, random};
use downbeat_sim::{Popularity, Scenario, Shape};

/// A random workload. Its seed and its number determine it, so that one of many can be run alone.
#[derive(Clone, PartialEq, Debug)]
pub struct RandomWorkload {
    /// The number among the seed's workloads, from 1.
    pub number: u32,
    /// The simulated scenario.
    pub scenario: Scenario,
    /// The arrivals, in words.
    pub arrivals: String,
}

const MODELS: (f64, f64) = (1.0, 35.0);
const DEVICES: (f64, f64) = (2.0, 90.0);
/// The range of `beta / alpha`.
const BATCHING_EFFECTS: (f64, f64) = (0.03, 25.0);
/// The range of SLOs, as multiples of `l(1)`.
const SLO_FACTORS: (f64, f64) = (1.4, 12.0);
/// The range of `l(1)` in milliseconds, before workloads of too high rates are stretched.
const SINGLE_MS: (f64, f64) = (2.0, 50.0);
/// The highest rate that devices can serve, in requests a second, approximately. Where they could
/// serve more, all times of a workload are stretched. That changes no decision except of policies
/// with fixed times, and keeps runs short.
const MOST_RATE: f64 = 25_000.0;
/// The exponents of the Zipf distribution; the largest leaves the last of 35 models half a percent.
const ZIPF: (f64, f64) = (0.5, 1.2);
/// The standard deviation of an execution time, in workloads with noise.
const NOISE: (f64, f64) = (0.01, 0.05);
/// The peaks of a load that comes and goes, as multiples of the mean.
const PEAKS: (f64, f64) = (1.5, 4.0);
/// The share of time that peaks take.
const PEAK_SHARES: (f64, f64) = (0.1, 0.5);
/// The period of peaks, in milliseconds.
const PERIODS_MS: (f64, f64) = (200.0, 2_000.0);
/// Half of the workloads have Poisson arrivals, their rate steady or not, or even ones; the other
/// half's are bursty.
const PROCESSES: [Option<Arrivals>; 8] = [
    Some(Arrivals::Poisson),
    Some(Arrivals::Poisson),
    Some(Arrivals::Constant),
    None,
    Some(Arrivals::Gamma(0.05)),
    Some(Arrivals::Gamma(0.1)),
    Some(Arrivals::Gamma(0.3)),
    Some(Arrivals::Gamma(0.5)),
];

/// The source of random draws.
struct Dice(Pcg64);

impl Dice {
    fn between(&mut self, (least, most): (f64, f64)) -> f64 {
        let share: f64 = StandardUniform.sample(&mut self.0);
        least + (most - least) * share
    }

    /// Draws a number between two positive numbers, uniform in the logarithm.
    fn log_between(&mut self, (least, most): (f64, f64)) -> f64 {
        self.between((least.ln(), most.ln())).exp()
    }

    fn chance(&mut self, share: f64) -> bool {
        self.between((0.0, 1.0)) < share
    }

    /// Draws a whole number: uniform if `alike`, else uniform in the logarithm.
    fn count(&mut self, (least, most): (f64, f64), alike: bool) -> u32 {
        let bounds = (least, most + 1.0);
        let drawn = if alike { self.between(bounds) } else { self.log_between(bounds) };
        drawn.min(most) as u32
    }
}

impl RandomWorkload {
    /// Draws the workload of this seed and number. Its rate is the one that the devices have time
    /// for if requests come evenly; a search begins at this rate.
    pub fn draw(seed: u64, number: u32) -> RandomWorkload {
        let mut dice = Dice(random(seed, u64::from(number)));
        // In half of the workloads, counts are uniform in the logarithm; in the others, uniform.
        let alike = dice.chance(0.5);
        let (models, devices) = (dice.count(MODELS, alike), dice.count(DEVICES, alike));
        let (arrivals, shape, words) = process(&mut dice);
        let popularity = match dice.chance(0.5) {
            true => Popularity::Equal,
            false => Popularity::Zipf(rounded(dice.between(ZIPF), 10.0)),
        };
        let noise = if dice.chance(0.5) { 0.0 } else { rounded(dice.between(NOISE), 1e3) };
        let mut scenario = Scenario {
            models: profiles(&mut dice, models),
            rate: 1.0,
            arrivals,
            popularity,
            shape,
            devices,
            max_batch: 0,
            noise,
            network: Network::default(),
            warm_up: Duration::from_millis(5_000),
            span: Duration::from_millis(10_000),
        };
        let stretch = (scenario.unreachable_rate() / MOST_RATE).max(1.0);
        for model in &mut scenario.models {
            model.alpha_ms = rounded(model.alpha_ms * stretch, 1e3);
            model.beta_ms = rounded(model.beta_ms * stretch, 1e3);
            model.slo_ms = rounded(model.slo_ms * stretch, 10.0);
        }
        scenario.rate = scenario.fluid_bound().unwrap_or_else(|| scenario.unreachable_rate());
        RandomWorkload { number, scenario, arrivals: words }
    }

    /// The least and the largest `beta / alpha` of its models.
    pub fn batching_effects(&self) -> [f64; 2] {
        self.range(ModelProfile::batching_effect)
    }

    /// The tightest and the loosest SLO of its models, as multiples of `l(1)`.
    pub fn slo_factors(&self) -> [f64; 2] {
        self.range(|model| model.slo_ms / (model.alpha_ms + model.beta_ms))
    }

    fn range(&self, of: impl Fn(&ModelProfile) -> f64) -> [f64; 2] {
        let values = self.scenario.models.iter().map(of);
        values.fold([f64::INFINITY, 0.0], |[least, most], value| [least.min(value), most.max(value)])
    }
}

/// Describes the workload in one line.
impl fmt::Display for RandomWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scenario { models, devices, popularity, noise, .. } = &self.scenario;
        let ([weak, strong], [tight, loose]) = (self.batching_effects(), self.slo_factors());
        write!(
            f,
            "workload {}: {} models on {devices} devices, {}, {popularity}, noise {:.1}%, beta/alpha {weak:.2} to {strong:.2}, SLO {tight:.1} to {loose:.1} l(1)",
            self.number,
            models.len(),
            self.arrivals,
            100.0 * noise,
        )
    }
}

fn process(dice: &mut Dice) -> (Arrivals, Shape, String) {
    let drawn = PROCESSES[dice.count((0.0, PROCESSES.len() as f64 - 1.0), true) as usize];
    if let Some(arrivals) = drawn {
        return (arrivals, Shape::Steady, arrivals.to_string());
    }
    let share = dice.between(PEAK_SHARES);
    let peak = dice.between((PEAKS.0, PEAKS.1.min(1.0 / share)));
    let rest = (1.0 - share * peak).max(0.0) / (1.0 - share);
    let period = dice.log_between(PERIODS_MS);
    let length = |share: f64| Duration::from_millis_f64(period * share);
    let pace = Pace::new(vec![(length(share), peak), (length(1.0 - share), rest)]);
    let words = format!("peaks of {peak:.1} in {:.0}% of {period:.0} ms", 100.0 * share);
    // The factors are finite and the lengths above zero, so there is nothing to refuse.
    (Arrivals::Poisson, Shape::Given(pace.unwrap_or_default()), words)
}

/// Draws the profiles. In a quarter of the workloads the models are alike.
fn profiles(dice: &mut Dice, models: u32) -> Vec<ModelProfile> {
    let of_one = dice.chance(0.25);
    let mut profile = |name: String| {
        let single = dice.log_between(SINGLE_MS);
        let alpha_ms = single / (1.0 + dice.log_between(BATCHING_EFFECTS));
        ModelProfile { name, alpha_ms, beta_ms: single - alpha_ms, slo_ms: single * dice.log_between(SLO_FACTORS) }
    };
    let first = profile("m1".to_owned());
    let others = (2..=models).map(|number| {
        let name = format!("m{number}");
        if of_one { ModelProfile { name, ..first.clone() } } else { profile(name) }
    });
    let others: Vec<ModelProfile> = others.collect();
    std::iter::once(first).chain(others).collect()
}

/// Rounds to a multiple of `1 / parts`, so that the printed value is the one used.
fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use downbeat_sim::policy::Policy;

    #[test]
    fn a_workload_follows_from_its_seed_and_number() {
        assert_eq!(RandomWorkload::draw(7, 3), RandomWorkload::draw(7, 3));
        assert_ne!(RandomWorkload::draw(7, 3), RandomWorkload::draw(7, 4));
        assert_ne!(RandomWorkload::draw(7, 3), RandomWorkload::draw(8, 3));
    }

    /// Over many seeds, every documented kind of workload occurs, and no other one.
    #[test]
    fn workloads_are_within_their_bounds_and_fill_them() {
        let drawn: Vec<RandomWorkload> =
            (0..10).flat_map(|seed| (1..=100).map(move |number| RandomWorkload::draw(seed, number))).collect();
        let eager: Policy = "eager".parse().unwrap();
        for workload in &drawn {
            let Scenario { models, devices, .. } = &workload.scenario;
            assert!((1..=35).contains(&models.len()) && (2..=90).contains(devices), "{workload}");
            let ([weak, strong], [tight, loose]) = (workload.batching_effects(), workload.slo_factors());
            assert!(weak > 0.028 && strong < 25.3 && tight > 1.37 && loose < 12.05, "{workload}");
            assert!(models.iter().all(|model| model.check().is_ok()), "{workload}");
            assert!(workload.scenario.unreachable_rate() < 1.03 * MOST_RATE, "{workload}");
            assert!(workload.scenario.simulation(&eager, 1).is_ok(), "{workload}");
        }
        type Condition = fn(&RandomWorkload) -> bool;
        let least: [(usize, Condition); 12] = [
            (30, |w| w.scenario.models.len() == 1),
            (15, |w| w.scenario.models.len() >= 34),
            (15, |w| w.scenario.devices == 2),
            (10, |w| w.scenario.devices >= 88),
            (300, |w| w.scenario.popularity == Popularity::Equal),
            (300, |w| w.scenario.noise == 0.0),
            (300, |w| w.scenario.noise > 0.0),
            (50, |w| w.scenario.shape != Shape::Steady),
            (20, |w| w.batching_effects()[0] < 0.05),
            (20, |w| w.batching_effects()[1] > 20.0),
            (20, |w| w.slo_factors()[0] < 1.5),
            (20, |w| w.slo_factors()[1] > 10.0),
        ];
        for (at, (least, what)) in least.iter().enumerate() {
            let count = drawn.iter().filter(|workload| what(workload)).count();
            assert!(count >= *least, "condition {at}: {count} of 1000");
        }
        let processes: std::collections::BTreeSet<String> =
            drawn.iter().map(|workload| workload.scenario.arrivals.to_string()).collect();
        let expected = ["constant", "gamma:0.05", "gamma:0.1", "gamma:0.3", "gamma:0.5", "poisson"];
        assert!(processes.iter().eq(expected), "{processes:?}");
    }
}
