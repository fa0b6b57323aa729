//! Slots on which the cluster scheduler places batches, beside whole devices, GSLICE and gpu-lets.
//! No paper has these figures.

use std::fmt::Display;

use downbeat_core::quantiles;

use super::{DeviceFailure, Figure, FigureOptions, each, head};
use crate::device::{Architecture, Platform};
use crate::slots::{Contender, Found, MixModel, Plan, SlotMix};
use downbeat_sim::policy::Policy;

/// Mixes of the random set.
const RANDOM: u32 = 12;

/// The least popular model of a run gets this many requests for each request of the figure.
const REQUESTS: f64 = 0.25;

fn failure(error: impl Display) -> DeviceFailure {
    DeviceFailure(error.to_string())
}

fn policy(name: &str) -> Result<Policy, DeviceFailure> {
    name.parse().map_err(failure)
}

fn mix(name: &str, platform: Platform, steps: u32, models: &[(Architecture, f64, f64)]) -> SlotMix {
    let model = |(architecture, slo_ms, rate): &(Architecture, f64, f64)| MixModel {
        architecture: *architecture,
        slo_ms: *slo_ms,
        rate: *rate,
    };
    let models = models.iter().map(model).collect();
    SlotMix { name: name.to_owned(), platform, devices: 4, steps, models }
}

/// Returns the capacity that each contender has for each mix, by mix.
fn found(
    mixes: &[SlotMix],
    contenders: &[Contender],
    options: &FigureOptions,
) -> Result<Vec<Vec<Option<Found>>>, DeviceFailure> {
    let measured = each(mixes, options, |mix| mix.measure().map_err(failure))?;
    let of = |measured| contenders.iter().map(move |contender| (measured, contender));
    let jobs: Vec<_> = measured.iter().flat_map(of).collect();
    let requests = options.requests as f64 * REQUESTS;
    let all = each(&jobs, options, |(measured, contender)| {
        contender.find(measured, requests, options.seed).map_err(failure)
    })?;
    Ok(all.chunks(contenders.len()).map(<[_]>::to_vec).collect())
}

fn chosen() -> [SlotMix; 3] {
    use Architecture::{BertBase, InceptionV4, LinkNet, ResNet50, ResNet152, Vgg19};
    [
        mix(
            "V100, SLOs of 3 to 6 l(1)",
            Platform::V100_TENSORRT,
            10,
            &[(ResNet50, 20.0, 1.0), (ResNet152, 40.0, 0.3), (BertBase, 25.0, 0.5), (LinkNet, 12.0, 1.0)],
        ),
        mix(
            "A100, SLOs of 5 to 20 ms",
            Platform::A100_CUDNN,
            9,
            &[(ResNet50, 8.0, 1.0), (InceptionV4, 20.0, 0.3), (BertBase, 10.0, 1.0), (LinkNet, 5.0, 1.0)],
        ),
        mix(
            "V100, SLOs of 10 to 22 l(1), batching pays",
            Platform::V100_TENSORRT,
            10,
            &[(Vgg19, 150.0, 0.5), (ResNet50, 100.0, 1.0)],
        ),
    ]
}

pub(super) fn mixes(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mixes = chosen();
    let contenders = [
        Contender::Whole(policy("deferred")?),
        Contender::Whole(policy("adaptive")?),
        Contender::ByKnees,
        Contender::Tuned,
        Contender::GpuLets,
        Contender::Slots(policy("deferred")?),
        Contender::Slots(policy("adaptive")?),
    ];
    let mut table = vec![head("mix | served by | slots of each device, in steps | held/s | to the first")];
    for (mix, found) in mixes.iter().zip(found(&mixes, &contenders, options)?) {
        let held = |found: &Option<Found>| found.as_ref().map_or(0.0, |found| found.capacity);
        for (contender, one) in contenders.iter().zip(&found) {
            let layout = one.as_ref().map_or("none".to_owned(), |found| found.layout.to_string());
            let ratio = held(one) / held(&found[0]);
            let cells = [mix.name.clone(), contender.to_string(), layout];
            table.push(cells.into_iter().chain([format!("{:.0}", held(one)), format!("{ratio:.2}")]).collect());
        }
    }
    let note = "Four emulated devices, cut in steps of a tenth (V100) or a ninth (A100) of their units; Poisson arrivals; held: at most 1% of each model's requests dropped or late.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn together(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    side_by_side(&chosen(), options)
}

pub(super) fn together_random(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    side_by_side(&(1..=RANDOM).map(|number| SlotMix::draw(options.seed, number)).collect::<Vec<_>>(), options)
}

fn side_by_side(mixes: &[SlotMix], options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let deferred = policy("deferred")?;
    let together = |plan| Contender::Together(deferred.clone(), plan);
    let plans = [Plan::Alone, Plan::Predicted, Plan::Tried, Plan::Apart].map(together);
    let contenders: Vec<_> = std::iter::once(Contender::Whole(deferred.clone())).chain(plans).collect();
    let mut table = vec![head(
        "mix | one at a time | two, planned as if alone | two, as predicted | one or two, as tried | to one | one, models apart as tried | tried by | apart by",
    )];
    let mut ratios = vec![Vec::new(); 4];
    for (mix, found) in mixes.iter().zip(found(mixes, &contenders, options)?) {
        let held: Vec<f64> = found.iter().map(|found| found.as_ref().map_or(0.0, |found| found.capacity)).collect();
        for (ratios, two) in ratios.iter_mut().zip(&held[1..]) {
            ratios.push(two / held[0].max(f64::MIN_POSITIVE));
        }
        let number = |held: f64| format!("{held:.0}");
        let layout = |index: usize| found[index].as_ref().map_or(String::new(), |found| found.layout.to_string());
        let first = held[..4].iter().copied().map(number);
        let rest = [format!("{:.2}", held[3] / held[0]), number(held[4]), layout(3), layout(4)];
        table.push(std::iter::once(mix.name.clone()).chain(first).chain(rest).collect());
    }
    let mut note = "Whole devices on which batches of the cluster scheduler run one at a time, or two side by side on all units; held requests a second of all models. By: a device with 2 runs one batch at a time of all models or of those left over, with 1+1 two, with 1 one of the models kept apart.".to_owned();
    for (name, ratios) in
        ["Two as if alone", "Two as predicted", "One or two as tried", "One, models apart as tried"].iter().zip(ratios)
    {
        if let Some([least, middle, most]) = quantiles(ratios, [0.0, 0.5, 1.0]) {
            note += &format!("\n{name}, to one at a time: median {middle:.2}, least {least:.2}, most {most:.2}.");
        }
    }
    Ok(Figure { note, table, ..Figure::default() })
}

pub(super) fn random(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mixes: Vec<SlotMix> = (1..=RANDOM).map(|number| SlotMix::draw(options.seed, number)).collect();
    let deferred = policy("deferred")?;
    let contenders = [
        Contender::Whole(deferred.clone()),
        Contender::ByKnees,
        Contender::Tuned,
        Contender::GpuLets,
        Contender::Slots(deferred),
    ];
    let mut table =
        vec![head("mix | whole | GSLICE, knees | tuned | gpu-lets | slots | to the best | slots of each device")];
    let mut ratios = vec![Vec::new(); 4];
    for (mix, found) in mixes.iter().zip(found(&mixes, &contenders, options)?) {
        let held: Vec<f64> = found.iter().map(|found| found.as_ref().map_or(0.0, |found| found.capacity)).collect();
        let (slots, others) = (held[4], [held[0], held[1].max(held[2]), held[3]]);
        let best = others.into_iter().fold(0.0, f64::max);
        for (ratios, other) in ratios.iter_mut().zip(others.into_iter().chain([best])) {
            if slots > 0.0 || other > 0.0 {
                ratios.push(slots / other.max(f64::MIN_POSITIVE));
            }
        }
        let layout = found[4].as_ref().map_or("none".to_owned(), |found| found.layout.to_string());
        let numbers = held.iter().map(|held| format!("{held:.0}"));
        let cells = std::iter::once(mix.name.clone()).chain(numbers).chain([format!("{:.2}", slots / best), layout]);
        table.push(cells.collect());
    }
    let mut note = "Slots under deferred batching beside the others, on mixes that nobody chose; held requests a second of all models.".to_owned();
    for (name, ratios) in ["whole devices", "GSLICE's better", "gpu-lets", "the best of them"].iter().zip(ratios) {
        if let Some([least, tenth, middle]) = quantiles(ratios, [0.0, 0.1, 0.5]) {
            note += &format!("\nTo {name}: median {middle:.2}, tenth percentile {tenth:.2}, least {least:.2}.");
        }
    }
    Ok(Figure { note, table, ..Figure::default() })
}
