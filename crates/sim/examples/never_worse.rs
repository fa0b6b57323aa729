//! The adaptive policy beside all others: on the cases that Symphony's evaluation names, and on a sample of its table 1.
//!
//! ```text
//! cargo run --release -p downbeat-sim --example never_worse -- cases
//! cargo run --release -p downbeat-sim --example never_worse -- table1 SAMPLES SEED [LARGEST_NUMBER_OF_MODELS]
//! ```
//!
//! For each workload the capacity of every policy (the highest rate with at most 1% of each model's requests late or dropped, Poisson or Gamma
//! arrivals, the same arrivals for all), the ratio of the adaptive policy's to the best of the others, and the busy share of the devices at
//! 20%, 50% and 80% of that best capacity, of the adaptive policy and of deferral with window drop.

use std::error::Error;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, Gather, Load, Pace, Search, Simulation, System};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// `alpha`, `beta` and SLO in milliseconds.
type Model = (f64, f64, f64);

const A100: &str = include_str!("../../../experiments/profiles/profiles_a100.csv");
const GTX_1080TI: &str = include_str!("../../../experiments/profiles/profiles_1080ti.csv");

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

#[derive(Clone)]
struct Policy {
    name: &'static str,
    system: System,
    dispatch: DispatchPolicy,
    drop: DropPolicy,
}

struct Workload {
    name: String,
    models: Vec<Model>,
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

/// Capacities of all policies: printed; the ratio of the adaptive one's to the best of the others.
fn compare(workload: &Workload, seed: u64) -> Result<f64, Box<dyn Error>> {
    let consolidating = Policy {
        name: "consolidating",
        system: System::Downbeat,
        dispatch: DispatchPolicy::Adaptive { consolidate: true },
        drop: DropPolicy::Adaptive,
    };
    let adaptive =
        Policy { name: "adaptive", dispatch: DispatchPolicy::Adaptive { consolidate: false }, ..consolidating.clone() };
    let ours = capacity(workload, seed, &consolidating)?;
    let answers = capacity(workload, seed, &adaptive)?;
    let mut best: f64 = 0.0;
    print!("{} seed {seed}: consolidating {ours:.0}, adaptive {answers:.0}", workload.name);
    for policy in others() {
        let rate = capacity(workload, seed, &policy)?;
        print!(", {} {rate:.0}", policy.name);
        best = best.max(rate);
    }
    let deferred = Policy { dispatch: DispatchPolicy::Deferred, drop: DropPolicy::WindowDrop, ..consolidating.clone() };
    let mut busy = Vec::new();
    for share in [0.2, 0.5, 0.8] {
        let run = |policy: &Policy| -> Result<f64, Box<dyn Error>> {
            Ok(simulation(workload, seed, policy, best * share).run()?.mean_busy())
        };
        busy.push(format!("{:.2} ({:.2})", run(&consolidating)?, run(&deferred)?));
    }
    println!("; ratio {:.3} {:.3}; busy {}", ours / best, answers / best, busy.join(" "));
    Ok(ours / best)
}

fn others() -> Vec<Policy> {
    let own = |name, dispatch, drop| Policy { name, system: System::Downbeat, dispatch, drop };
    let baseline = |name, system| Policy { name, system, dispatch: DispatchPolicy::Eager, drop: DropPolicy::HeadDrop };
    vec![
        own("deferred+window", DispatchPolicy::Deferred, DropPolicy::WindowDrop),
        own("deferred+head", DispatchPolicy::Deferred, DropPolicy::HeadDrop),
        own("eager+window", DispatchPolicy::Eager, DropPolicy::WindowDrop),
        own("eager+head", DispatchPolicy::Eager, DropPolicy::HeadDrop),
        baseline("shepherd", System::Shepherd(Gather::default())),
        baseline("clockwork", System::Clockwork),
        baseline("nexus", System::Nexus(downbeat_sim::NexusOptions::default())),
    ]
}

fn capacity(workload: &Workload, seed: u64, policy: &Policy) -> Result<f64, Box<dyn Error>> {
    // Devices that always run the largest batch that the SLO allows.
    let cost = |&(alpha, beta, slo): &Model| {
        let batch = ((slo - beta) / alpha).floor().max(1.0);
        (alpha * batch + beta) / batch / 1000.0
    };
    let per_model = f64::from(workload.devices) / workload.models.iter().map(cost).sum::<f64>();
    let simulation = simulation(workload, seed, policy, per_model * workload.models.len() as f64);
    let search = Search { low: 0.4, high: 1.0, precision: 0.005, ..Search::default() };
    Ok(search.capacity(&simulation)?.map_or(0.0, |capacity| capacity.rate))
}

fn simulation(workload: &Workload, seed: u64, policy: &Policy, rate: f64) -> Simulation {
    let rate = rate / workload.models.len() as f64;
    let load = |&(alpha, beta, slo): &Model| Load {
        options: ModelOptions {
            profiles: profile(alpha, beta, slo).into(),
            max_batch: 4096,
            drop: policy.drop,
            dispatch: policy.dispatch.clone(),
            max_in_flight: u32::MAX,
            levels: Vec::new(),
        },
        slo: Duration::from_millis_f64(slo),
        arrivals: workload.arrivals,
        rate,
        pace: Pace::steady(),
    };
    Simulation {
        system: policy.system.clone(),
        loads: workload.models.iter().map(load).collect(),
        devices: workload.devices,
        warm_up: Duration::from_millis(1_500),
        span: Duration::from_secs_f64((workload.requests / rate).clamp(4.0, 40.0)),
        seed,
        ..Simulation::default()
    }
}

fn profile(alpha: f64, beta: f64, slo: f64) -> LatencyProfile {
    let largest = ((slo / alpha) as u32).max(1);
    LatencyProfile::linear(Duration::from_millis_f64(alpha), Duration::from_millis_f64(beta), largest)
        .unwrap_or_else(|error| panic!("alpha {alpha} ms, beta {beta} ms: {error}"))
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
        case("ResNet50 x 8", vec![(1.053, 5.072, 25.0)], 8, 200_000.0),
        case("InceptionResNetV2 x 8", vec![(5.090, 18.368, 70.0)], 8, 40_000.0),
        case("37 models x 64 A100", read(A100)?, 64, 8_000.0),
        case("35 models x 64 1080Ti", read(GTX_1080TI)?, 64, 8_000.0),
    ])
}

/// One of the 5,880 workloads of table 1.
fn sample(rng: &mut Pcg64) -> Result<Workload, Box<dyn Error>> {
    let mut pick = |choices: usize| (rng.next_u64() % choices as u64) as usize;
    let (model, count, step) = (pick(TABLE_1.len() + 1), MODELS[pick(6)], pick(7));
    let (slo, shape) = (SLOS_MS[pick(5)], SHAPES[pick(6)]);
    let (name, models) = match TABLE_1.get(model) {
        Some(&(name, alpha, beta)) => (format!("{name} x {count}, {slo} ms"), vec![(alpha, beta, slo); count]),
        None => ("35 models".to_owned(), read(GTX_1080TI)?),
    };
    let devices = (models.len() as f64 * (1.0 + 0.5 * step as f64)) as u32;
    let name = format!("{name}, {devices} devices, Gamma({shape})");
    Ok(Workload { name, models, devices, arrivals: Arrivals::Gamma(shape), requests: 12_000.0 })
}

fn read(csv: &str) -> Result<Vec<Model>, Box<dyn Error>> {
    let row = |line: &str| -> Result<Model, Box<dyn Error>> {
        let mut fields = line.split(',').skip(1).map(str::parse);
        let mut field = || fields.next().ok_or_else(|| format!("a field is missing: {line}"));
        Ok((field()??, field()??, field()??))
    };
    csv.lines().skip(1).map(row).collect()
}
