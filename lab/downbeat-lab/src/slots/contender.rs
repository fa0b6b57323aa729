//! The ways of serving a mix: slots, or one of the baselines.

use std::fmt;
use std::sync::Arc;

use super::layout::{SlotLayout, SlotModel, SlotProblem};
use downbeat_core::cluster::{DropPolicy, ModelOptions};
use downbeat_core::{DeviceId, DeviceKind, DeviceProfiles, Duration, ProfileError};

use super::mix::{LENGTH, MeasuredMix, Networks};
use super::{gpu_lets, gslice};
use crate::policy::Baseline;
use crate::shared_devices::{SharedDevices, SharedPlace};
use downbeat_sim::Devices;
use downbeat_sim::Pace;
use downbeat_sim::Search;
use downbeat_sim::System;
use downbeat_sim::policy::{Policy, SERVED};
use downbeat_sim::{Arrivals, BadArrivals};
use downbeat_sim::{Load, Simulation};

/// A way of serving a mix.
#[derive(Clone, PartialEq, Debug)]
pub enum Contender {
    /// Whole devices under a policy of the cluster scheduler: Symphony.
    Whole(Policy),
    /// Slots under a policy of the cluster scheduler. A trial with other arrivals selects the best
    /// sizes: the plan's choice, equal slots, gpu-lets' slots, or whole devices.
    Slots(Policy),
    /// GSLICE on each device alone: every model has a share by its knee.
    ByKnees,
    /// GSLICE on each device alone, with the shares that self-tuning reaches at best.
    Tuned,
    /// The greedy of gpu-lets.
    GpuLets,
    /// Whole devices under a policy of the cluster scheduler. Each device runs two batches at a
    /// time, side by side on all units.
    Together(Policy, Plan),
}

/// The latencies with which side-by-side batches are planned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// The latencies alone, as Symphony plans.
    Alone,
    /// The latencies predicted beside another batch (Abacus §5), in the schedulable window
    /// (Symphony §3.1).
    Predicted,
    /// The best placing of a trial with other arrivals. All devices run one batch at a time, or all
    /// run two. Or only some models run two at a time, on some of the devices, and the rest one at
    /// a time on the others. The model with the least room beside the others moves to the rest
    /// first, then the next model.
    Tried,
    /// One batch at a time everywhere, with the models divided as in [`Plan::Tried`]. The
    /// difference to `Tried` is the gain of running side by side.
    Apart,
}

/// The outcome for a contender.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The slots of each device.
    pub layout: SlotLayout,
    /// The predicted requests a second of all models together, if requests came evenly; `None` for
    /// contenders without a prediction.
    pub predicted: Option<f64>,
    /// By model, by steps of a slot less one: whether the model may run on slots of that size where
    /// it meets its SLO.
    pub runs: Vec<Vec<bool>>,
    /// Requests a second at which at most 1% of each model's requests are dropped or late; 0: no
    /// load is held.
    pub capacity: f64,
    /// The placings of the trial; empty where there is no choice.
    pub tried: Vec<Tried>,
}

/// A way to place the models in a trial.
#[derive(Clone, PartialEq, Debug)]
pub struct Tried {
    /// The slots of each device.
    pub layout: SlotLayout,
    /// As [`Found::predicted`].
    pub predicted: Option<f64>,
    /// Whether models are kept from slots that cost them too much.
    pub kept_off: bool,
    /// As [`Found::capacity`], in the trial.
    pub capacity: f64,
}

/// A way to place models on the slots of a layout.
struct Placing {
    /// The models on the slots.
    problem: SlotProblem,
    layout: SlotLayout,
    predicted: Option<f64>,
    /// By model, by steps of a slot less one: whether the model runs there.
    runs: Vec<Vec<bool>>,
    system: Arc<dyn System>,
    policy: Policy,
    /// Whether each slot of a device has all of its units, rather than a part.
    is_together: bool,
}

impl Contender {
    /// Finds the contender's capacity for the mix to 1%, in runs in which the least popular model
    /// gets `requests` requests.
    ///
    /// # Errors
    /// If an arrival process has no positive rate, or no profile can be made.
    pub fn find(&self, measured: &MeasuredMix, requests: f64, seed: u64) -> Result<Option<Found>, BadMix> {
        let held = |placing: &Placing, requests: f64, precision: f64, seed: u64| -> Result<f64, BadMix> {
            let simulation = simulation(measured, placing, seed)?;
            let (requests_per_model, high, low) = (requests, 1.0, 0.6);
            let search = Search { precision, requests_per_model, high, low, ..Search::default() };
            Ok(search.capacity(&simulation)?.map_or(0.0, |capacity| capacity.rate))
        };
        let mut placings = self.placings(measured)?;
        let (mut best, mut tried) = ((0, 0.0), Vec::new());
        for (index, placing) in placings.iter().enumerate().filter(|_| placings.len() > 1) {
            let capacity = held(placing, requests / 2.0, 0.03, seed ^ TRIAL)?;
            let Placing { layout, predicted, runs, .. } = placing;
            let (layout, kept_off) = (layout.clone(), runs.iter().flatten().any(|runs| !runs));
            tried.push(Tried { layout, predicted: *predicted, kept_off, capacity });
            if capacity > best.1 {
                best = (index, capacity);
            }
        }
        if placings.is_empty() {
            return Ok(None);
        }
        let placing = placings.swap_remove(best.0);
        let capacity = held(&placing, requests, 0.01, seed)?;
        let Placing { layout, predicted, runs, .. } = placing;
        Ok(Some(Found { layout, predicted, runs, capacity, tried }))
    }

    /// Returns the placings that the contender chooses among; empty if there is no way.
    fn placings(&self, measured: &MeasuredMix) -> Result<Vec<Placing>, ProfileError> {
        let problem = &measured.problem;
        Ok(match self {
            Contender::Whole(policy) => vec![placed_by(problem, SlotLayout::whole(problem), None, policy)],
            Contender::Together(policy, plan) => together(measured, *plan, policy)?,
            Contender::Slots(policy) => {
                let mut layouts = vec![(SlotLayout::whole(problem), None)];
                layouts.extend((2..=4).map(|slots| (equal(problem, slots), None)));
                layouts.extend(gpu_lets::place(problem).map(|(_, placed)| (layout_of(&placed), None)));
                if let Some(plan) = problem.choose() {
                    let cheap = |dear: &Vec<f64>| dear.iter().map(|dear| *dear <= DEAREST).collect();
                    layouts.push((plan.layout.clone(), None));
                    layouts.push((plan.layout, Some(plan.dearness.iter().map(cheap).collect())));
                }
                layouts.retain(|(layout, _)| !problem.alike || layout.is_alike());
                layouts.into_iter().map(|(layout, runs)| placed_by(problem, layout, runs, policy)).collect()
            }
            Contender::ByKnees => {
                gslice::by_knees(measured).into_iter().filter_map(|of| on_each(problem, of)).collect()
            }
            Contender::Tuned => gslice::tuned(problem).into_iter().filter_map(|of| on_each(problem, of)).collect(),
            Contender::GpuLets => {
                let placed = gpu_lets::place(problem);
                placed.into_iter().filter_map(|(factor, placed)| by_gpu_lets(problem, factor, &placed)).collect()
            }
        })
    }
}

/// In one of the trials a model avoids slots on which it costs more than this many times its least
/// cost.
const DEAREST: f64 = 1.2;
/// The difference between the seed of a trial and the seed that counts.
const TRIAL: u64 = 0x5107;

fn total(problem: &SlotProblem) -> f64 {
    problem.models.iter().map(|model| model.rate).sum()
}

/// Makes a placing on slots by the cluster scheduler. `runs` says where each model runs; by default
/// anywhere.
fn placed_by(problem: &SlotProblem, layout: SlotLayout, runs: Option<Vec<Vec<bool>>>, policy: &Policy) -> Placing {
    let predicted = problem.evaluate(&layout).map(|plan| plan.factor * total(problem));
    let runs = runs.unwrap_or_else(|| anywhere(problem));
    let (problem, system, policy) = (problem.clone(), policy.system(), policy.clone());
    Placing { problem, layout, predicted, runs, system, policy, is_together: false }
}

/// Makes the placings of a plan for two batches at a time on a device.
fn together(measured: &MeasuredMix, plan: Plan, policy: &Policy) -> Result<Vec<Placing>, ProfileError> {
    let placed = |problem: &SlotProblem, layout, runs| {
        let is_together = true;
        Placing { is_together, ..placed_by(problem, layout, runs, policy) }
    };
    let devices = measured.problem.devices as usize;
    let mut paired: Vec<usize> = (0..measured.problem.models.len()).collect();
    let all = measured.side_by_side(&paired, plan != Plan::Alone)?;
    let two = placed(&all, equal(&all, 2), None);
    if matches!(plan, Plan::Alone | Plan::Predicted) {
        return Ok(vec![two]);
    }
    let mut placings = vec![placed(&all, SlotLayout::whole(&all), None)];
    let slots = if plan == Plan::Apart { vec![1] } else { vec![1, 1] };
    placings.extend((plan == Plan::Tried).then_some(two));
    let mut problem = all;
    while paired.len() > 1 {
        let room = |model: &usize| {
            let SlotModel { slo, profiles, .. } = &problem.models[*model];
            slo.as_secs_f64() / profiles[0].latency(1).as_secs_f64()
        };
        let least = paired.iter().copied().min_by(|a, b| room(a).total_cmp(&room(b)));
        paired.retain(|model| Some(*model) != least);
        problem = measured.side_by_side(&paired, true)?;
        let planned = if plan == Plan::Apart { measured.side_by_side(&paired, false)? } else { problem.clone() };
        let has_room = |model: &usize| planned.models[*model].profiles[0].latency(1) <= planned.models[*model].slo;
        for two in (1..devices).filter(|_| paired.iter().all(has_room)) {
            let slots = |device| if device < two { slots.clone() } else { vec![2] };
            let mut runs = anywhere(&planned);
            paired.iter().for_each(|model| runs[*model][1] = false);
            placings.push(placed(&planned, SlotLayout((0..devices).map(slots).collect()), Some(runs)));
        }
    }
    Ok(placings)
}

fn anywhere(problem: &SlotProblem) -> Vec<Vec<bool>> {
    vec![vec![true; problem.steps as usize]; problem.models.len()]
}

/// Cuts every device into `slots` slots that are as equal as its steps allow.
fn equal(problem: &SlotProblem, slots: u32) -> SlotLayout {
    let (each, more) = (problem.steps / slots, problem.steps % slots);
    let device: Vec<u32> = (0..slots).map(|slot| each + u32::from(slot < more)).filter(|steps| *steps > 0).collect();
    SlotLayout(vec![device; problem.devices as usize])
}

fn layout_of(placed: &[Vec<gpu_lets::GpuLet>]) -> SlotLayout {
    SlotLayout(placed.iter().map(|lets| lets.iter().map(|one| one.steps).collect()).collect())
}

/// Makes a placing that pins models to slots, with batches as soon as a slot is free.
fn pinned(
    problem: &SlotProblem,
    layout: SlotLayout,
    predicted: Option<f64>,
    places: Vec<Vec<(DeviceId, f64)>>,
) -> Option<Placing> {
    let policy = SERVED.with_drop("eager", DropPolicy::WindowDrop).ok()?;
    let (runs, system, problem) = (anywhere(problem), Arc::new(Baseline::Pinned(places)), problem.clone());
    Some(Placing { problem, layout, predicted, runs, system, policy, is_together: false })
}

/// Gives slot i of every device to model i.
fn on_each(problem: &SlotProblem, shares: Vec<u32>) -> Option<Placing> {
    let devices = problem.devices as usize;
    let place = |model: usize| move |device: usize| (DeviceId((model * devices + device) as u32), 1.0);
    let places = (0..shares.len()).map(|model| (0..devices).map(place(model)).collect()).collect();
    pinned(problem, SlotLayout(vec![shares; devices]), None, places)
}

fn by_gpu_lets(problem: &SlotProblem, factor: f64, placed: &[Vec<gpu_lets::GpuLet>]) -> Option<Placing> {
    let layout = layout_of(placed);
    let mut places = vec![Vec::new(); problem.models.len()];
    for (slot, (device, at)) in slots(&layout.0).into_iter().enumerate() {
        for (model, rate) in &placed[device][at].rates {
            places[*model].push((DeviceId(slot as u32), *rate));
        }
    }
    pinned(problem, layout, Some(factor * total(problem)), places)
}

/// The reason why a mix cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum BadMix {
    /// A rate that is not positive and finite.
    #[error(transparent)]
    Arrivals(#[from] BadArrivals),
    /// No profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Returns the slots in the order of the scheduler's devices, as device and slot: the first slot of
/// every device, then the second. The scheduler thus takes equal slots on different devices first.
fn slots(layout: &[Vec<u32>]) -> Vec<(usize, usize)> {
    let most = layout.iter().map(Vec::len).max().unwrap_or(0);
    let of =
        |at: usize| (0..layout.len()).filter(move |device| at < layout[*device].len()).map(move |device| (device, at));
    (0..most).flat_map(of).collect()
}

/// Makes a simulation of the placed mix at its predicted rates.
fn simulation(measured: &MeasuredMix, placing: &Placing, seed: u64) -> Result<Simulation, BadMix> {
    let Placing { problem, layout, predicted, runs, system, policy, is_together } = placing;
    let slots = slots(&layout.0);
    let steps = |(device, at): &(usize, usize)| layout.0[*device][*at];
    let kind = |steps: u32| DeviceKind(steps - 1);
    // Without a prediction the search starts at the predicted rate of whole devices.
    let whole = || Some(problem.evaluate(&SlotLayout::whole(problem))?.factor);
    let factor = predicted.map(|rate| rate / total(problem)).or_else(whole).unwrap_or(1.0);
    let mut loads = Vec::new();
    for (SlotModel { rate, slo, profiles }, runs) in problem.models.iter().zip(runs) {
        let known =
            profiles.iter().zip(1..).zip(runs).filter(|((profile, _), runs)| **runs && profile.latency(1) <= *slo);
        let known: Vec<_> = known.map(|((profile, steps), _)| (kind(steps), profile.clone())).collect();
        let largest = known.iter().map(|(_, profile)| profile.largest_within(*slo) + 1).max().unwrap_or(1);
        let whole = profiles.last().ok_or(ProfileError::Empty)?;
        let mut options = ModelOptions::new(whole.clone(), policy.dispatch(*slo), policy.drop());
        options.max_batch = largest.min(whole.max_batch());
        // If a model meets its SLO nowhere, all its requests are dropped.
        let longest = profiles.first().unwrap_or(whole);
        options.profiles = DeviceProfiles::by_kind(known).unwrap_or_else(|_| longest.clone().into());
        loads.push(Load { options, slo: *slo, arrivals: Arrivals::Poisson, rate: rate * factor, pace: Pace::steady() });
    }
    let given = measured.networks.as_ref().map(|Networks { platform, models, .. }| {
        // Batches side by side have lanes of their own on all units.
        let place = |slot: &(usize, usize)| SharedPlace {
            device: slot.0 as u32,
            partition: if *is_together { 0 } else { slot.1 as u32 },
            units: if *is_together { platform.units } else { platform.units * steps(slot) / measured.problem.steps },
            lane: slot.1 as u32,
        };
        let places = slots.iter().map(place).collect();
        let shared: Arc<dyn Devices> =
            Arc::new(SharedDevices { limits: platform.limits(), places, models: models.clone(), length: LENGTH });
        shared
    });
    Ok(Simulation {
        system: system.clone(),
        loads,
        devices: slots.len() as u32,
        kinds: slots.iter().map(|slot| kind(steps(slot))).collect(),
        given,
        warm_up: Duration::from_millis(500),
        span: Duration::from_millis(1_000),
        seed,
        ..Simulation::default()
    })
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contender::Whole(policy) => write!(f, "whole devices, {policy}"),
            Contender::Slots(policy) => write!(f, "slots, {policy}"),
            Contender::ByKnees => f.write_str("GSLICE, by knees"),
            Contender::Tuned => f.write_str("GSLICE, tuned"),
            Contender::GpuLets => f.write_str("gpu-lets"),
            Contender::Together(policy, Plan::Alone) => write!(f, "two at once, planned as if alone, {policy}"),
            Contender::Together(policy, Plan::Predicted) => write!(f, "two at once, {policy}"),
            Contender::Together(policy, Plan::Tried) => write!(f, "one or two at once, as tried, {policy}"),
            Contender::Together(policy, Plan::Apart) => write!(f, "one at once, models apart as tried, {policy}"),
        }
    }
}
