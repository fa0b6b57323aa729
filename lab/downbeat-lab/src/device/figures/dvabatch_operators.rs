//! DVABatch's operators: the batch sizes that they prefer, and where policy II splits a batch.

use downbeat_core::Duration;
use downbeat_core::device::{SegmentProfile, SegmentRange};

use super::{DeviceFailure, Figure, FigureOptions, each, head};
use crate::device::{Architecture, EmulatedModel, Platform, Tuning};

/// The batch sizes of figure 6.
const BATCHES: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// A batch size is preferred if a larger one saves less than this part of an item's time.
const SAVED: f64 = 0.05;
/// The tokens of a request where requests have a length.
const LENGTH: u32 = 64;
/// The stages into which all models are cut alike.
const STAGES: usize = 4;
/// The batch that policy II looks at.
const LARGEST: u32 = 64;

/// Returns the smallest batch whose items are nearly as cheap as those of any larger batch.
fn preferred(times: &[Duration; BATCHES.len()]) -> u32 {
    let an_item = |index: usize| times[index].as_secs_f64() / f64::from(BATCHES[index]);
    let least = (0..BATCHES.len()).map(an_item).fold(f64::INFINITY, f64::min);
    let first = (0..BATCHES.len()).find(|index| an_item(*index) * (1.0 - SAVED) <= least);
    BATCHES[first.unwrap_or(0)]
}

pub(super) fn figure_6(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let platform = Platform::TITAN_TENSORRT;
    let operators = Architecture::UNet.operators(platform.fused, 1);
    let model = EmulatedModel::staged(Architecture::UNet, platform, operators.len())?;
    let limits = model.limits();
    let mut heads = head("operator | is");
    heads.extend(BATCHES.map(|rows| format!("{rows}: ms")));
    heads.push("prefers".to_owned());
    let mut table = vec![heads];
    for (id, operator) in (0..).zip(&operators) {
        // The kernel alone: an operator is no launch of its own.
        let alone = |rows| {
            let mut work = model.work(SegmentRange::new(id, id + 1), rows, 0, limits.units);
            (work.overhead, work.after) = (Duration::ZERO, Duration::ZERO);
            work.alone(&limits)
        };
        let times = BATCHES.map(alone);
        let mut cells = vec![id.to_string(), operator.name.to_owned()];
        cells.extend(times.iter().map(|time| format!("{:.3}", time.as_millis_f64())));
        cells.push(preferred(&times).to_string());
        table.push(cells);
    }
    let note = "Each operator alone. A batch size is preferred if larger ones save less than 5% of an item's time. The paper: most operators of the first part gain by batches above 32, those of the last part only by batches below 8.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

/// Returns the time of a batch in the stages from `stage` on, to that of its two halves in turn.
/// Policy II splits from 1 on (§7.2), ours from 0.98 on.
fn whole_to_halves(profile: &SegmentProfile, stage: u16, rows: u32) -> f64 {
    let time = |rows| profile.remaining(stage, rows, LENGTH).as_secs_f64();
    time(rows) / (2.0 * time(rows / 2)).max(f64::MIN_POSITIVE)
}

pub(super) fn splits(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let platforms = [
        ("as it is", Platform::TITAN_TENSORRT),
        ("Winograd's rate the same for any batch", Platform { winograd_items: 0.0, ..Platform::TITAN_TENSORRT }),
    ];
    let cases: Vec<_> =
        platforms.into_iter().flat_map(|of| Architecture::ALL.map(|architecture| (of, architecture))).collect();
    let rows = each(&cases, options, |((_, platform), architecture)| {
        let model = EmulatedModel::staged(*architecture, *platform, STAGES)?;
        let profile = Tuning::new(&model, LARGEST)?.profile;
        let ratio = |stage: u16, rows: u32| format!("{:.2}", whole_to_halves(&profile, stage, rows));
        Ok((1..STAGES as u16).flat_map(|stage| [64, 32, 16].map(|rows| ratio(stage, rows))).collect::<Vec<_>>())
    })?;
    let mut table = vec![head(
        "device | model | after the first of four stages: 64 | 32 | 16 | after the second: 64 | 32 | 16 | after the third: 64 | 32 | 16",
    )];
    for (((device, _), architecture), ratios) in cases.iter().zip(rows) {
        table.push([vec![(*device).to_owned(), architecture.to_string()], ratios].concat());
    }
    let note = "The time of a batch in the stages that are left, to that of its two halves in turn. The paper splits from 1 on, we from 0.98 on. Requests with lengths have 64 tokens.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
