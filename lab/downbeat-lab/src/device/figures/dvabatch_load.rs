//! DVABatch's stages as the server finds them when it loads a model, beside the lab's own tuning.

use downbeat_core::device::{Joining, Overlap, PolicyName, Staging, WrittenSettings};
use downbeat_sim::device_replay::StagingSearch;

use super::dvabatch::{Bench, DVA, MAX_BATCH, QOS, of_the_paper, tuned_staging};
use super::{DeviceFailure, Figure, FigureOptions, change, each, head, mean};
use crate::device::auto_measured::{together, without_launches};
use crate::device::{Architecture, EmulatedModel, Glue, Platform};

/// The models of which all requests have one shape. The server does not tune the others.
const MODELS: [Architecture; 4] =
    [Architecture::UNet, Architecture::LinkNet, Architecture::Vgg19, Architecture::ResNet152];
/// The most segments that the server cuts a model into for the search.
const FINEST: usize = 12;

const PLATFORM: Platform = Platform::TITAN_TENSORRT;

/// Finds a model's stages as the server does, in a replay of random requests. The replay knows the
/// latencies of the finest cut and of two lanes together.
fn found_at_load(architecture: Architecture, options: &FigureOptions) -> Result<Staging, DeviceFailure> {
    let model = EmulatedModel::staged(architecture, PLATFORM, FINEST)?;
    let settings =
        PolicyName::STAGED.read(&WrittenSettings::new()).map_err(|error| DeviceFailure(error.to_string()))?;
    let (segments, launch) = without_launches(&model, MAX_BATCH)?;
    let search = StagingSearch {
        settings: &*settings.settings,
        segments,
        overlap: Overlap::new([1, MAX_BATCH].map(|rows| together(&model, rows)).to_vec()),
        launch,
        max_batch: MAX_BATCH,
        slo: Some(QOS),
        seed: options.seed.wrapping_add(1),
    };
    search.run().chosen.ok_or_else(|| DeviceFailure(format!("{architecture} holds no load in any number of stages")))
}

pub(super) fn at_load(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let found = each(&MODELS, options, |architecture| {
        let lab = tuned_staging(PLATFORM, *architecture, options)?.chosen;
        let paper = of_the_paper(*architecture);
        let stagings = [paper, found_at_load(*architecture, options)?, lab.unwrap_or(paper)];
        let (_, peak) = Bench::tuned(*architecture, paper, Glue::Rte, 1, options)?;
        let run = |staging: Staging| {
            let bench = Bench::on(PLATFORM, *architecture, staging, Glue::Rte, options)?;
            Ok((bench.at(peak * 0.9, DVA)?.mean_ms, bench.peak(DVA)?.rate))
        };
        Ok((stagings, stagings.into_iter().map(run).collect::<Result<Vec<_>, DeviceFailure>>()?))
    })?;
    let mut table = vec![head(
        "model | at load | by the lab | 4 stages, 2 pairs: ms | at load: ms | by the lab: ms | at load to 4, 2 | peak of 4, 2 | at load | by the lab",
    )];
    let shown = |Staging { stages, pairs, joining }: Staging| {
        let rule = if joining == Joining::Always { ", always" } else { "" };
        format!("{stages}, {pairs}{rule}")
    };
    let mut ratios = Vec::new();
    for (architecture, ([_, load, lab], runs)) in MODELS.iter().zip(&found) {
        let mut cells = vec![architecture.to_string(), shown(*load), shown(*lab)];
        cells.extend(runs.iter().map(|(mean_ms, _)| format!("{mean_ms:.1}")));
        cells.push(change(runs[1].0, runs[0].0));
        cells.extend(runs.iter().map(|(_, peak)| format!("{peak:.0}")));
        table.push(cells);
        ratios.push(runs[1].0 / runs[0].0);
    }
    let mut last = vec!["mean".to_owned()];
    last.extend(std::iter::repeat_n(String::new(), 5));
    last.push(change(mean(ratios.into_iter()), 1.0));
    table.push(last);
    let note = "Stages and pairs of buffers. Mean latency at 9/10 of DelayBatch's peak on the paper's server. The server's search knows latencies of segments and of two lanes together; the lab's runs on the device itself.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
