//! `downbeat profile --beside`: measures how long the batches of two models take at the same time.

use anyhow::ensure;
use clap::Args;
use downbeat_core::Duration;
use downbeat_server::clock::Clock;
use downbeat_server::pair_profiler;
use downbeat_server::profiler::few_sizes;

use crate::pair_report::PairReport;
use crate::profile_shares::device_units;
use crate::profiled_model::ProfiledModel;
use crate::watched::watched_quietly;

/// Flags for measuring pairs of models.
#[derive(Args, Debug)]
pub struct PairFlags {
    /// Measure the model while this one runs at the same time, and each alone. One thread in each
    /// run, unless --threads is given
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["lane_mix", "emulated", "shares", "segments"])]
    pub beside: Option<String>,
    /// Batch sizes of the other model [default: 1, 4 and 16, up to the model's largest batch]
    #[arg(long, value_name = "SIZES", value_parser = super::profile_command::batch_sizes, requires = "beside")]
    pub beside_batch: Option<super::profile_command::BatchSizes>,
    /// Give the model this many compute units of the GPU, and the other one the rest [default: both
    /// share all]
    #[arg(long, value_name = "UNITS", requires = "beside", value_parser = clap::value_parser!(u32).range(1..))]
    pub split: Option<u32>,
}

/// Sizes for the pairs: at most three, up to 16.
fn sizes(max_batch: u32) -> Vec<u32> {
    few_sizes(max_batch.min(16))
}

/// Measures all pairs of batch sizes.
///
/// # Errors
/// If the device cannot be split this way, or an engine cannot run its model.
pub fn measure(
    flags: &PairFlags,
    models: [&ProfiledModel; 2],
    batch: Option<&[u32]>,
    length: i64,
    budget: Duration,
) -> anyhow::Result<PairReport> {
    let [model, other] = models;
    let firsts = model.sizes(batch, sizes)?;
    let seconds = other.sizes(flags.beside_batch.as_ref().map(|sizes| &*sizes.0), sizes)?;
    let device = device_units(&*model.engine);
    let split = match flags.split {
        Some(asked) => {
            let device = device?;
            let units = asked.next_multiple_of(device.grain);
            ensure!(
                units <= device.largest_part,
                "--split {asked}: too many compute units; the GPU has {}, in steps of {}, and some must remain for \
                 model '{}'",
                device.units,
                device.grain,
                other.name
            );
            Some([units, device.units - units])
        }
        None => None,
    };
    let pairs: Vec<[u32; 2]> = firsts.iter().flat_map(|a| seconds.iter().map(|b| [*a, *b])).collect();
    let clock = Clock::start();
    let subjects = [model.subject(length, clock), other.subject(length, clock)];
    let first = split.map(|units| units[0]);
    let measured =
        watched_quietly(|watch| pair_profiler::measure(subjects.each_ref(), 0, &pairs, first, budget, watch))?;
    Ok(PairReport {
        models: models.map(|model| model.name.clone()),
        on: model.on(),
        conditions: model.conditions(length),
        device: device_units(&*model.engine).ok(),
        split,
        pairs: measured,
    })
}
