//! The consolidating policy beside all others, on the cases of Symphony's evaluation and on a
//! sample of its table 1.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example never_worse -- cases
//! cargo run --release -p downbeat-lab --example never_worse -- table1 SAMPLES SEED [LARGEST_NUMBER_OF_MODELS]
//! ```
//!
//! Prints three things for each workload. First the capacity of every policy: the highest rate with
//! at most 1% of each model's requests late or dropped, with the same Poisson or Gamma arrivals for
//! all. Then the ratio of the consolidating policy's capacity to the best of the others. Last the
//! busy share of the devices at 20%, 50% and 80% of that best capacity, under the consolidating
//! policy and under deferral with window drop.

use std::error::Error;
use std::path::Path;

use downbeat_core::Duration;
use downbeat_sim::{Arrivals, ModelProfile, Network, Policy, Popularity, Scenario, Search, Shape, profiles};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

const PROFILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../experiments/profiles");
const OTHERS: [&str; 7] =
    ["deferred+window", "deferred+head", "eager+window", "eager+head", "shepherd", "clockwork", "nexus"];

/// Symphony table 1, with the profiles of its table 3.
const TABLE_1: [(&str, f64, f64); 6] = [
    ("DenseNet121", 1.061, 10.312),
    ("InceptionV3", 1.964, 8.771),
    ("ResNet50V2", 1.409, 5.947),
    ("VGG16", 2.734, 5.786),
    ("Xception", 4.751, 2.046),
    ("Bert", 7.008, 0.159),
];
const MODELS: [usize; 6] = [8, 16, 24, 32, 48, 64];
const SLOS_MS: [f64; 5] = [20.0, 25.0, 30.0, 40.0, 50.0];
const SHAPES: [f64; 6] = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0];

struct Workload {
    name: String,
    models: Vec<ModelProfile>,
    devices: u32,
    arrivals: Arrivals,
    /// Requests of each model.
    requests: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |text| text.parse());
    let mut ratios = Vec::new();
    match args.first().map(String::as_str) {
        Some("cases") => {
            for workload in cases()? {
                for seed in 1..=3 {
                    ratios.push(compare(&workload, seed)?);
                }
            }
        }
        Some("table1") => {
            let (samples, seed, most) = (number(1, 20)?, number(2, 1)?, number(3, 64)?);
            let mut rng = Pcg64::seed_from_u64(seed);
            while (ratios.len() as u64) < samples {
                let workload = sample(&mut rng)?;
                if workload.models.len() as u64 <= most {
                    ratios.push(compare(&workload, seed)?);
                }
            }
        }
        _ => return Err("say what to run: cases, or table1 SAMPLES SEED [LARGEST_NUMBER_OF_MODELS]".into()),
    }
    ratios.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| ratios[((ratios.len() - 1) as f64 * share) as usize];
    let below = ratios.iter().filter(|ratio| **ratio < 0.99).count();
    println!(
        "consolidating / best of the others, {} workloads: least {:.3}, 10% {:.3}, median {:.3}, 90% {:.3}, most {:.3}; below 0.99: {below}",
        ratios.len(),
        at(0.0),
        at(0.1),
        at(0.5),
        at(0.9),
        at(1.0)
    );
    Ok(())
}

/// Prints the capacities of all policies. Returns the ratio of the consolidating policy's capacity
/// to the best of the others.
fn compare(workload: &Workload, seed: u64) -> Result<f64, Box<dyn Error>> {
    let (ours, answers) = (workload.capacity("consolidating", seed)?, workload.capacity("adaptive", seed)?);
    let mut best: f64 = 0.0;
    print!("{} seed {seed}: consolidating {ours:.0}, adaptive {answers:.0}", workload.name);
    for policy in OTHERS {
        let rate = workload.capacity(policy, seed)?;
        print!(", {policy} {rate:.0}");
        best = best.max(rate);
    }
    let mut busy = Vec::new();
    for share in [0.2, 0.5, 0.8] {
        let run = |policy| workload.busy(policy, seed, best * share);
        busy.push(format!("{:.2} ({:.2})", run("consolidating")?, run("deferred+window")?));
    }
    println!("; ratio {:.3} {:.3}; busy {}", ours / best, answers / best, busy.join(" "));
    Ok(ours / best)
}

impl Workload {
    fn at(&self, rate: f64) -> Scenario {
        let each = rate / self.models.len() as f64;
        Scenario {
            models: self.models.clone(),
            rate,
            arrivals: self.arrivals,
            popularity: Popularity::Equal,
            shape: Shape::Steady,
            devices: self.devices,
            max_batch: 0,
            noise: 0.0,
            network: Network::default(),
            warm_up: Duration::from_millis(1_500),
            span: Duration::from_secs_f64((self.requests / each).clamp(4.0, 40.0)),
        }
    }

    fn capacity(&self, policy: &str, seed: u64) -> Result<f64, Box<dyn Error>> {
        let most = self.at(self.at(1.0).unreachable_rate());
        let search = Search { low: 0.4, high: 1.0, precision: 0.005, ..Search::default() };
        let found = search.capacity(&most.simulation(&policy.parse::<Policy>()?, seed)?)?;
        Ok(found.map_or(0.0, |capacity| capacity.rate))
    }

    fn busy(&self, policy: &str, seed: u64, rate: f64) -> Result<f64, Box<dyn Error>> {
        Ok(self.at(rate).simulation(&policy.parse::<Policy>()?, seed)?.run()?.mean_busy())
    }
}

fn model(name: &str, alpha_ms: f64, beta_ms: f64, slo_ms: f64) -> ModelProfile {
    ModelProfile { name: name.to_owned(), alpha_ms, beta_ms, slo_ms }
}

fn cases() -> Result<Vec<Workload>, Box<dyn Error>> {
    let case = |name: &str, models, devices, requests| Workload {
        name: name.to_owned(),
        models,
        devices,
        arrivals: Arrivals::Poisson,
        requests,
    };
    Ok(vec![
        case("ResNet50 x 8", vec![model("ResNet50", 1.053, 5.072, 25.0)], 8, 200_000.0),
        case("InceptionResNetV2 x 8", vec![model("InceptionResNetV2", 5.090, 18.368, 70.0)], 8, 40_000.0),
        case("37 models x 64 A100", read("profiles_a100.csv")?, 64, 8_000.0),
        case("35 models x 64 1080Ti", read("profiles_1080ti.csv")?, 64, 8_000.0),
    ])
}

/// One of the 5,880 workloads of table 1.
fn sample(rng: &mut Pcg64) -> Result<Workload, Box<dyn Error>> {
    let mut pick = |choices: usize| (rng.next_u64() % choices as u64) as usize;
    let (picked, count, step) = (pick(TABLE_1.len() + 1), MODELS[pick(6)], pick(7));
    let (slo, shape) = (SLOS_MS[pick(5)], SHAPES[pick(6)]);
    let (name, models) = match TABLE_1.get(picked) {
        Some(&(name, alpha, beta)) => {
            (format!("{name} x {count}, {slo} ms"), vec![model(name, alpha, beta, slo); count])
        }
        None => ("35 models".to_owned(), read("profiles_1080ti.csv")?),
    };
    let devices = (models.len() as f64 * (1.0 + 0.5 * step as f64)) as u32;
    let name = format!("{name}, {devices} devices, Gamma({shape})");
    Ok(Workload { name, models, devices, arrivals: Arrivals::Gamma(shape), requests: 12_000.0 })
}

fn read(file: &str) -> Result<Vec<ModelProfile>, profiles::BadProfiles> {
    profiles::read(&Path::new(PROFILES).join(file))
}
