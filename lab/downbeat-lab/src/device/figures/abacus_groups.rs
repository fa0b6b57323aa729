//! Abacus' figures 3, 7 and 23: the predictable and the unpredictable part of latencies, and the
//! cost of a search.

use downbeat_core::device::overlap::{GroupPart, GroupSearch, Predictor};
use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{Duration, Time, quantiles};
use downbeat_training::sets_of;
use rand::RngExt;
use rand_distr::Normal;

use super::abacus::{FOUR, PLATFORM, trained};
use super::{DeviceFailure, Figure, FigureOptions, each, head, mean};
use crate::device::oracle::play_group;
use crate::device::overlap_samples::{abacus_models, emulated_group};
use crate::device::{ABACUS_MODELS, Architecture, Completed, ContendedDevice, EmulatedModel, OverlapInputs};
use downbeat_sim::{Arrivals, random};

/// Queries a second of the model beside ResNet152 in figure 3: half of the pairs' 100 (§7.3).
const BESIDE: f64 = 50.0;
/// Runs of a group in figure 7.
const RUNS: usize = 100;

fn noise() -> Result<Normal<f64>, DeviceFailure> {
    Normal::new(1.0, PLATFORM.noise).map_err(|bad| DeviceFailure(bad.to_string()))
}

fn shares<const N: usize>(values: &[f64], shares: [f64; N]) -> [f64; N] {
    quantiles(values.iter().copied(), shares).unwrap_or([f64::NAN; N])
}

/// Returns the milliseconds of `runs` runs of ResNet152 with 32 pictures one after another. Beside
/// them run queries of another model, one at a time, as under MPS.
fn beside(other: Option<Architecture>, runs: usize, seed: u64) -> Result<Vec<f64>, DeviceFailure> {
    let model = EmulatedModel::new(Architecture::ResNet152, PLATFORM);
    let other = other.map(|other| EmulatedModel::new(other, PLATFORM));
    let (noise, mut rng) = (noise()?, random(seed, 31));
    let mut arrivals = Arrivals::Poisson.stream(BESIDE, seed, 30)?;
    let mut device = ContendedDevice::new(PLATFORM.limits(), 2);
    let (mut waiting, mut is_busy, mut latencies) = (0, false, Vec::with_capacity(runs));
    let (mut next, mut began) = (arrivals.next_arrival(), None);
    let whole = |model: &EmulatedModel, rows, length, rng: &mut _| {
        let mut work = model.work(SegmentRange::new(0, 1), rows, length, PLATFORM.units);
        work.vary(&noise, rng);
        work
    };
    let mut now = Time::ZERO;
    while latencies.len() < runs {
        if began.is_none() {
            began = Some(now);
            device.launch(now, LaneId(0), 0, whole(&model, 32, 0, &mut rng));
        }
        if let Some(other) = other.as_ref().filter(|_| !is_busy && waiting > 0) {
            (waiting, is_busy) = (waiting - 1, true);
            let (rows, length) = OverlapInputs::Any.draw(&mut rng);
            device.launch(now, LaneId(1), 0, whole(other, rows, length, &mut rng));
        }
        now = device.next_event().map_or(next, |event| event.min(next));
        for completed in device.advance(now) {
            let Completed::Launch { lane: LaneId(lane), .. } = completed else { continue };
            if lane == 1 {
                is_busy = false;
            } else if let Some(start) = began.take() {
                latencies.push(now.since(start).as_millis_f64());
            }
        }
        if now == next {
            (waiting, next) = (waiting + 1, arrivals.next_arrival());
        }
    }
    Ok(latencies)
}

pub(super) fn figure_3(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let runs = (options.requests as usize / 6).max(20);
    let others: Vec<Option<Architecture>> = [None].into_iter().chain(ABACUS_MODELS.map(Some)).collect();
    let all = each(&others, options, |other| beside(*other, runs, options.seed))?;
    let mut table = vec![head("beside | mean ms | 5% | half | 95% | 99% | most | above 50 ms, %")];
    for (other, latencies) in others.iter().zip(&all) {
        let name = other.map_or("alone", Architecture::name).to_owned();
        let late = latencies.iter().filter(|ms| **ms > 50.0).count() as f64 / latencies.len() as f64;
        let values =
            [mean(latencies.iter().copied())].into_iter().chain(shares(latencies, [0.05, 0.5, 0.95, 0.99, 1.0]));
        table.push([name].into_iter().chain(values.chain([late * 100.0]).map(|value| format!("{value:.1}"))).collect());
    }
    let note = format!(
        "{runs} runs of ResNet152 with 32 pictures, one after another, beside {BESIDE} queries/s of another model of any size, each in a process of its own under MPS. The paper: 24 ms alone, up to 241 ms beside others, VGG16 and VGG19 the worst; its rates are not told."
    );
    Ok(Figure { note, table, ..Figure::default() })
}

/// Returns mean and standard deviation of [`RUNS`] runs of random groups of a set, in milliseconds.
fn runs_of(set: &[usize], groups: usize, seed: u64) -> Result<Vec<(f64, f64)>, DeviceFailure> {
    let (models, noise, mut rng) = (abacus_models(PLATFORM)?, noise()?, random(seed, 40));
    let one = |_| {
        let group = emulated_group(&models, set, &mut rng);
        let run = |_| play_group(&models, &group, |work| work.vary(&noise, &mut rng)).map(Duration::as_millis_f64);
        let runs: Vec<f64> = (0..RUNS).filter_map(run).collect();
        let middle = mean(runs.iter().copied());
        (middle, mean(runs.iter().map(|ms| (ms - middle).powi(2))).sqrt())
    };
    Ok((0..groups).map(one).collect())
}

pub(super) fn figure_7(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (all, groups) = ((0..ABACUS_MODELS.len()).collect::<Vec<_>>(), (options.requests as usize / 600).max(2));
    let mut table = vec![head("models | groups | mean ms | 90% | deviation, mean ms | 90% | of the mean, %")];
    for (name, count) in [("pairs", 2), ("triples", 3), ("fours", 4)] {
        let sets: Vec<(u64, Vec<usize>)> = (0..).zip(sets_of(&all, count)).collect();
        let of_set = |(index, set): &(u64, Vec<usize>)| runs_of(set, groups, options.seed.wrapping_add(*index));
        let of_all = each(&sets, options, of_set)?.concat();
        let (means, deviations): (Vec<f64>, Vec<f64>) = of_all.iter().copied().unzip();
        let ([high], [far]) = (shares(&means, [0.9]), shares(&deviations, [0.9]));
        let (middle, deviation) = (mean(means.into_iter()), mean(deviations.into_iter()));
        let values = [middle, high, deviation, far, deviation / middle * 100.0].map(|value| format!("{value:.2}"));
        table.push([vec![name.to_owned(), of_all.len().to_string()], values.to_vec()].concat());
    }
    let note = format!(
        "{groups} groups of each pair, triple and four, {RUNS} runs of each. The paper, of pairs: mean 15.9 ms, 90% below 25.8 ms, deviation 0.65 ms on average and 1.58 ms at 90%, 4.53%. That a launch deviates by 4.1% is from there; what groups make of it is not."
    );
    Ok(Figure { note, table, ..Figure::default() })
}

/// A predictor that counts its predicted groups.
struct Counting<'a, P> {
    predictor: &'a P,
    groups: std::cell::Cell<usize>,
}

impl<P: Predictor> Predictor for Counting<'_, P> {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        self.groups.set(self.groups.get() + groups.len());
        self.predictor.predict(groups)
    }
}

/// Draws the rest of a query for each model of a set. The headroom lies between the time of the
/// first alone and the time of all together.
fn states(
    predictor: &impl Predictor,
    (models, set): (&[EmulatedModel], &[usize]),
    (count, seed): (usize, u64),
) -> Vec<(Vec<GroupPart>, Duration)> {
    let mut rng = random(seed, 50);
    let state = |_| {
        let mut parts = emulated_group(models, set, &mut rng);
        parts.iter_mut().for_each(|part| part.operators.end = models[part.model.0 as usize].segment_count());
        let takes = predictor.predict(&[&parts[..1], &parts]);
        let [Some(alone), Some(together)] = takes[..] else { return None };
        let share = rng.random_range(0.0..1.0);
        let more = together.as_secs_f64() - alone.as_secs_f64();
        Some((parts, Duration::from_secs_f64(alone.as_secs_f64() + share * more.max(0.0))))
    };
    (0..count).filter_map(state).collect()
}

pub(super) fn figure_23(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (by, said) = trained(PLATFORM, (&FOUR, 4), options)?;
    let models = abacus_models(PLATFORM)?;
    let (predictor, _) = by.predictor(&ABACUS_MODELS, &models, PLATFORM.noise)?;
    let numbers: Vec<usize> = FOUR.iter().filter_map(|model| ABACUS_MODELS.iter().position(|m| m == model)).collect();
    let mut table = vec![head("models | ways | passes | 95% | at most three, % | groups asked for | paper's time, ms")];
    for count in 2..=4 {
        let states = states(&predictor, (&models, &numbers[4 - count..]), (options.requests as usize, options.seed));
        for ways in [1, 2, 3, 4, 6, 8] {
            let counting = Counting { predictor: &predictor, groups: std::cell::Cell::new(0) };
            let search = GroupSearch { predictor: &counting, margins: None, ways };
            let passes: Vec<f64> =
                states.iter().map(|(parts, headroom)| f64::from(search.find(parts, *headroom).passes)).collect();
            let [most] = shares(&passes, [0.95]);
            let few = passes.iter().filter(|passes| **passes <= 3.0).count() as f64 / passes.len() as f64;
            let (average, asked) = (mean(passes.iter().copied()), counting.groups.get() as f64 / passes.len() as f64);
            let time = average * if ways == 1 { 0.066 } else { 0.088 };
            let values = [format!("{average:.2}"), format!("{most:.0}"), format!("{:.1}", few * 100.0)];
            let rest = [format!("{asked:.1}"), format!("{time:.2}")];
            table.push([vec![count.to_string(), ways.to_string()], values.to_vec(), rest.to_vec()].concat());
        }
    }
    let note = format!(
        "How often the predictor is asked for a group, by how many groups it is asked for at a time: {} times what is left of a query of each of two to four models, with a headroom between what the most urgent takes alone and what all take together. {said} \
         paper's time: with its 0.066 ms a pass for one way and 0.088 ms for more. The paper: with four ways most decisions are done with less than three passes, 0.26 ms in all. What a pass takes here: `cargo bench -p downbeat-lab --bench overlap`.",
        options.requests
    );
    Ok(Figure { note, table, ..Figure::default() })
}
