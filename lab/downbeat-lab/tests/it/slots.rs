//! Slots of several sizes, and models that are pinned to them.

use std::sync::Arc;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile};
use downbeat_lab::device::{Architecture, EmulatedModel, Platform};
use downbeat_lab::policy::Baseline;
use downbeat_lab::shared_devices::{SharedDevices, SharedPlace};
use downbeat_lab::slots::{Contender, MixModel, Plan, SlotMix};
use downbeat_lab::slots::{SlotLayout, SlotModel, SlotProblem};
use downbeat_sim::{Arrivals, Devices, Load, Pace, Simulation};

fn load(profiles: DeviceProfiles, largest: u32, slo_ms: u64, rate: f64) -> Load {
    let first = profiles.first().clone();
    let options = ModelOptions::new(first, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
    let options = ModelOptions { profiles, max_batch: largest, ..options };
    Load { options, slo: Duration::from_millis(slo_ms), arrivals: Arrivals::Poisson, rate, pace: Pace::steady() }
}

fn linear(alpha_ms: f64, beta_ms: f64) -> LatencyProfile {
    LatencyProfile::linear_ms(alpha_ms, beta_ms, 16).unwrap()
}

#[test]
fn a_model_runs_on_slots_of_its_kinds_only() {
    let by_kind =
        |kinds: &[u32]| DeviceProfiles::by_kind(kinds.iter().map(|kind| (DeviceKind(*kind), linear(1.0, 3.0))));
    let simulation = Simulation {
        loads: vec![load(by_kind(&[0, 2]).unwrap(), 16, 30, 100.0), load(by_kind(&[1]).unwrap(), 16, 30, 100.0)],
        devices: 4,
        kinds: [2, 1, 0, 1].map(DeviceKind).to_vec(),
        record: true,
        ..Simulation::default()
    };
    let report = simulation.run().unwrap();
    assert!(report.holds(0.01));
    for batch in &report.recording.batches {
        assert_eq!(batch.model.0, batch.device.0 % 2, "{batch:?}");
    }
}

#[test]
fn a_pinned_model_runs_on_its_devices_in_turn_and_nowhere_else() {
    let all = |rate| load(linear(0.5, 1.0).into(), 1, 50, rate);
    let places = vec![vec![(DeviceId(0), 1.0), (DeviceId(2), 3.0)], vec![(DeviceId(1), 1.0)]];
    let system = Arc::new(Baseline::Pinned(places));
    let simulation =
        Simulation { system, loads: vec![all(80.0), all(80.0)], devices: 3, record: true, ..Simulation::default() };
    let report = simulation.run().unwrap();
    assert!(report.holds(0.01));
    let count = |model: u32, device: u32| {
        let batches = report.recording.batches.iter();
        batches.filter(|batch| batch.model.0 == model && batch.device.0 == device).count() as f64
    };
    assert_eq!((count(0, 1), count(1, 0), count(1, 2)), (0.0, 0.0, 0.0));
    assert!((count(0, 2) / count(0, 0) - 3.0).abs() < 0.05, "{} {}", count(0, 0), count(0, 2));
}

/// Returns the mean busy share of a device in slots of these units, each of which serves the
/// network at this rate.
fn busy(units: &[u32], planned: bool) -> f64 {
    let platform = Platform::V100_TENSORRT;
    let model = EmulatedModel::new(Architecture::Vgg19, platform);
    let points: Vec<_> = (1..=8).map(|batch| (batch, model.time_on(batch, 64, units[0]))).collect();
    let place = |(partition, units): (u32, &u32)| SharedPlace { device: 0, partition, units: *units, lane: partition };
    let shared = SharedDevices {
        limits: platform.limits(),
        places: (0..).zip(units).map(place).collect(),
        models: vec![model],
        length: 64,
    };
    let simulation = Simulation {
        loads: vec![load(LatencyProfile::from_points(&points).unwrap().into(), 8, 500, 40.0)],
        devices: units.len() as u32,
        given: (!planned).then(|| Arc::new(shared) as Arc<dyn Devices>),
        warm_up: Duration::ZERO,
        span: Duration::from_millis(3_000),
        ..Simulation::default()
    };
    simulation.run().unwrap().mean_busy()
}

#[test]
fn a_batch_alone_takes_what_was_planned_and_one_beside_others_longer() {
    assert_eq!(busy(&[80], false), busy(&[80], true));
    assert!(busy(&[20, 20, 20, 20], false) > busy(&[20, 20, 20, 20], true));
}

fn mix(devices: u32, models: &[(Architecture, f64, f64)]) -> SlotMix {
    let models = models.iter().map(|(architecture, slo_ms, rate)| MixModel {
        architecture: *architecture,
        slo_ms: *slo_ms,
        rate: *rate,
    });
    let (platform, steps) = (Platform::V100_TENSORRT, 5);
    SlotMix { name: String::new(), platform, devices, steps, models: models.collect() }
}

#[test]
fn devices_are_cut_where_batching_does_not_pay() {
    let few = mix(2, &[(Architecture::ResNet50, 20.0, 1.0), (Architecture::LinkNet, 12.0, 1.0)]).measure().unwrap();
    let plan = few.problem.choose().unwrap();
    let whole = few.problem.evaluate(&SlotLayout::whole(&few.problem)).unwrap();
    assert!(plan.layout.0.iter().any(|slots| slots.len() > 1) && plan.factor > 1.02 * whole.factor, "{}", plan.layout);
    let batched = mix(2, &[(Architecture::Vgg19, 60.0, 1.0)]).measure().unwrap();
    assert_eq!(batched.problem.choose().unwrap().layout, SlotLayout::whole(&batched.problem));
}

/// Abacus' prediction (§5) in Symphony's schedulable window (§3.1).
#[test]
fn two_batches_at_once_hold_more_if_planned_with_their_time_together() {
    let mut mix = mix(2, &[(Architecture::ResNet50, 20.0, 1.0), (Architecture::BertBase, 20.0, 1.0)]);
    (mix.platform, mix.steps) = (Platform::A100_CUDNN, 9);
    let measured = mix.measure().unwrap();
    for (model, beside) in measured.problem.models.iter().zip(&measured.networks.as_ref().unwrap().beside) {
        let alone = model.profiles.last().unwrap();
        let longer = |beside: &LatencyProfile| (1..=alone.max_batch()).all(|b| beside.latency(b) > alone.latency(b));
        assert!(beside.iter().all(longer), "beside either of them");
    }
    let held = |contender: Contender| contender.find(&measured, 40.0, 1).unwrap().unwrap().capacity;
    let together = |plan| held(Contender::Together("deferred".parse().unwrap(), plan));
    let (one, as_if_alone, two) =
        (held(Contender::Whole("deferred".parse().unwrap())), together(Plan::Alone), together(Plan::Predicted));
    assert!(two > 1.1 * one && two > 1.1 * as_if_alone, "{one} {as_if_alone} {two}");
}

/// Two V100s: Inception-v4, LinkNet, U-Net and ResNet-152.
#[test]
fn a_model_without_room_beside_others_has_devices_of_its_own() {
    let mix = SlotMix::draw(9005, 5);
    let measured = mix.measure().unwrap();
    let problem = |paired: &[usize]| measured.side_by_side(paired, true).unwrap();
    let fits = |problem: &SlotProblem, model: usize| {
        let SlotModel { profiles, slo, .. } = &problem.models[model];
        [0, 1].map(|slot| profiles[slot].latency(1) <= *slo)
    };
    let all = problem(&[0, 1, 2, 3]);
    let without: Vec<usize> = (0..4).filter(|model| fits(&all, *model) == [false, true]).collect();
    assert!(!without.is_empty() && without.len() < 4, "{without:?} have no room beside any other, but alone");
    assert!((0..4).all(|model| fits(&problem(&[0]), model) == [model == 0, true]), "who is not paired runs alone only");
    let held = |contender: Contender| contender.find(&measured, 40.0, 1).unwrap().unwrap();
    let together = |plan| held(Contender::Together("deferred".parse().unwrap(), plan));
    let one = held(Contender::Whole("deferred".parse().unwrap())).capacity;
    let tried = together(Plan::Tried);
    assert_eq!(together(Plan::Predicted).capacity, 0.0, "they are dropped where all run two at a time");
    assert_eq!(tried.layout, SlotLayout(vec![vec![1, 1], vec![2]]));
    assert!(tried.capacity > 1.1 * one, "{} to {one}", tried.capacity);
}

#[test]
fn a_random_mix_follows_from_its_seed_and_number() {
    assert_eq!(SlotMix::draw(3, 2), SlotMix::draw(3, 2));
    assert_ne!(SlotMix::draw(3, 2), SlotMix::draw(3, 1));
    assert!((1..50).map(|number| SlotMix::draw(3, number)).all(|mix| (2..=5).contains(&mix.models.len())));
}
