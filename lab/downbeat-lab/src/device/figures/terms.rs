//! The effect of each term of the emulated device on the results: one term is changed at a time.

use downbeat_core::Duration;

use super::dvabatch::{self, Bench};
use super::{DeviceFailure, Figure, FigureOptions, change, e2bird, each, found_peak, head, median};
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceSimulation, EmulatedModel, Glue, Platform, Sharing, Tuning,
};

/// A term, and the device without it. No constant is fitted again, so latencies of a model alone
/// change too.
type Term = (&'static str, fn(Platform) -> Platform);

const TERMS: [Term; 12] = [
    ("as it is", |platform| platform),
    ("waves in proportion, not whole", |platform| Platform { whole_waves: false, ..platform }),
    ("no bound by memory", |platform| Platform { bandwidth: platform.bandwidth * 1e3, ..platform }),
    ("the host waits for each kernel", |platform| Platform { ahead: 0, ..platform }),
    ("no gap between kernels", |platform| Platform { gap: Duration::ZERO, ..platform }),
    ("streams cost nothing", |platform| Platform { crowding_permille: 0, ..platform }),
    ("kernels share in proportion", |platform| Platform { sharing: Sharing::Proportional, ..platform }),
    ("no deviation from run to run", |platform| Platform { noise: 0.0, ..platform }),
    ("a product of few rows computes 64", |platform| Platform { least_rows: 64, ..platform }),
    ("Winograd's rate the same for any batch", |platform| Platform { winograd_items: 0.0, ..platform }),
    ("copies cost nothing", |platform| Platform {
        copy_bandwidth: 1e18,
        copy_fixed: Duration::ZERO,
        gather_nanos_per_byte: 0.0,
        ..platform
    }),
    ("a batch costs the server nothing", |platform| Platform { batch_overhead: Duration::ZERO, ..platform }),
];

/// Makes a row for each term: a change by model, and their median.
fn figure<const N: usize>(
    models: [Architecture; N],
    options: &FigureOptions,
    note: &str,
    ratio: impl Fn(Platform, Architecture) -> Result<f64, DeviceFailure> + Sync,
    platform: Platform,
) -> Result<Figure, DeviceFailure> {
    let cases: Vec<_> =
        TERMS.into_iter().flat_map(|(_, of)| models.map(|architecture| (of(platform), architecture))).collect();
    let ratios = each(&cases, options, |(platform, architecture)| ratio(*platform, *architecture))?;
    let mut heads = head("changed");
    heads.extend(models.map(|architecture| architecture.to_string()));
    heads.push("median".to_owned());
    let mut table = vec![heads];
    for ((term, _), ratios) in TERMS.into_iter().zip(ratios.chunks(N)) {
        let changes = ratios.iter().copied().chain([median(ratios)]).map(|ratio| change(ratio, 1.0));
        table.push([term.to_owned()].into_iter().chain(changes).collect());
    }
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn e2bird(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let gain = |platform: Platform, architecture: Architecture| -> Result<f64, DeviceFailure> {
        let model = EmulatedModel::new(architecture, platform);
        let tuning = Tuning::new(&model, e2bird::MAX_BATCH)?;
        let load = DeviceLoad::steady(1.0, options.requests, None);
        let simulation = DeviceSimulation::new(model, load, e2bird::QOS, options.seed);
        let [windowed, naive] = [DevicePolicyName::OptWait, DevicePolicyName::NEbird]
            .map(|policy| found_peak(&simulation, &tuning, policy).map(|peak| peak.rate));
        Ok(naive? / windowed?)
    };
    let note = "What N-Ebird holds within 200 ms more than OPT_Wait (no batch ahead, window 32% of what a batch of 32 takes), Poisson arrivals.";
    figure(e2bird::MODELS, options, note, gain, Platform::TITAN_CUDNN)
}

pub(super) fn dvabatch(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let latency = |platform: Platform, architecture: Architecture| -> Result<f64, DeviceFailure> {
        let tuned = dvabatch::tuned_staging(platform, architecture, options)?;
        let staging = tuned.chosen.unwrap_or(dvabatch::of_the_paper(architecture));
        let bench = Bench::on(platform, architecture, staging, Glue::Rte, options)?;
        let rate = bench.peak(dvabatch::ZERO)?.rate * 0.9;
        Ok(bench.at(rate, dvabatch::DVA)?.mean_ms / bench.at(rate, dvabatch::ZERO)?.mean_ms)
    };
    let note = "DVABatch's mean latency to ZeroBatch's (no batch ahead), at 9/10 of what ZeroBatch holds within 200 ms. Tuned anew for each device.";
    figure(dvabatch::MODELS, options, note, latency, Platform::TITAN_TENSORRT)
}
