//! Divides GPUs into partitions, given as numbers of compute units, or shares of them.

use std::sync::Arc;

use downbeat_engine::Share;
use downbeat_engine::division::{Division, DivisionError, Part, percent};

use super::gpu::Gpu;
use crate::cuda::Splitter;

/// The size of a partition.
#[derive(Clone, Copy)]
enum Size {
    /// A number of compute units, rounded up to a number that the GPU can give.
    Units(u32),
    /// Hundredths of the units, rounded down, so that shares of 100% in total fit on the GPU.
    Percent(u32),
}

/// Divides each of the GPUs in the same way.
pub(super) fn divide(gpus: &[Arc<Gpu>], asked: &[String]) -> Result<Division, DivisionError> {
    let sizes = asked.iter().enumerate();
    let sizes = sizes.map(|(index, text)| size(text).map_err(|reason| DivisionError::part(index, text, &reason)));
    let sizes: Vec<Size> = sizes.collect::<Result<_, _>>()?;
    let mut given: Vec<Vec<u32>> = Vec::new();
    for gpu in gpus {
        let all = gpu.device.compute_units();
        let units = gpu.divide(|splitter| units(&sizes, asked, all, splitter))?;
        let left = all.saturating_sub(units.iter().sum());
        if left > 0 {
            tracing::info!(gpu = gpu.device.ordinal(), units = left, "compute units that are in no partition");
        }
        given.push(units);
    }
    let part = |index: usize| {
        let units = given.first().and_then(|units| units.get(index)).copied().unwrap_or(0);
        let mut sizes: Vec<String> = given.iter().filter_map(|units| units.get(index)).map(u32::to_string).collect();
        sizes.dedup();
        let share = Share::Part(u32::try_from(index).unwrap_or(u32::MAX));
        Part { share, threads: 1, units, size: format!("{} compute units", sizes.join(" or ")) }
    };
    Ok(Division { parts: (0..sizes.len()).map(part).collect(), notices: Vec::new() })
}

fn size(text: &str) -> Result<Size, String> {
    let units = || text.trim().parse().ok().map(Size::Units);
    percent(text).map(Size::Percent).or_else(units).ok_or_else(|| {
        "on a GPU it is a number of compute units such as \"40\", or a share of them such as \"25%\"".to_owned()
    })
}

/// The number of units of each partition on a GPU with `all` units.
fn units(sizes: &[Size], asked: &[String], all: u32, splitter: &Splitter) -> Result<Vec<u32>, DivisionError> {
    let (grain, groups) = (splitter.grain(), splitter.groups());
    if sizes.len() > groups {
        return Err(DivisionError::too_many(sizes.len(), groups, "groups of compute units"));
    }
    let units = |(index, size): (usize, &Size)| {
        let units = match size {
            Size::Units(units) => *units,
            Size::Percent(percent) => (u64::from(all) * u64::from(*percent) / 100) as u32 / grain * grain,
        };
        let text = asked.get(index).map_or("", String::as_str);
        let reason = format!("a partition has at least {grain} compute units, in steps of {grain}; the GPU has {all}");
        if units < grain { Err(DivisionError::part(index, text, &reason)) } else { Ok(units) }
    };
    sizes.iter().enumerate().map(units).collect()
}
