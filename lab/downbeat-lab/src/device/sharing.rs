//! The sharing of units and bandwidth among kernels that run at the same time.

use super::contended::PARTS;
use super::limits::{DeviceLimits, Sharing};
use super::work::{Kernel, WHOLE_BANDWIDTH};

/// A running kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharer {
    pub lane: usize,
    pub partition: usize,
    /// The position of its start in the order of all kernels' starts.
    pub turn: u64,
    pub kernel: Kernel,
    /// The units that the kernel has.
    pub units: u32,
    /// Parts per nanosecond; 0 where another lane has the turn.
    pub speed: u64,
}

/// Gives each partition's units to its kernels. A kernel slows down if it gets fewer units than it
/// could use, or if others disturb it.
pub(super) fn share_units(limits: &DeviceLimits, partitions: &[u32], sharers: &mut [Sharer]) {
    if limits.sharing == Sharing::InOrder {
        sharers.sort_unstable_by_key(|sharer| sharer.turn);
    }
    for (partition, units) in partitions.iter().enumerate() {
        let all = u64::from(*units);
        let here = |sharer: &&mut Sharer| sharer.partition == partition && sharer.speed > 0;
        let wanted: u64 = sharers.iter_mut().filter(here).map(|sharer| u64::from(sharer.kernel.units)).sum();
        let mut left = all;
        for sharer in sharers.iter_mut().filter(here) {
            let wants = u64::from(sharer.kernel.units);
            let (gets, speed) = match limits.sharing {
                _ if wanted <= all => (wants, PARTS),
                Sharing::Proportional => ((wants * all).div_ceil(wanted).min(left), PARTS * all / wanted),
                Sharing::InOrder | Sharing::TimeSliced => (wants.min(left), PARTS * wants.min(left) / wants),
            };
            left -= gets;
            (sharer.units, sharer.speed) = (gets as u32, speed);
        }
        let interference = u64::from(limits.interference_permille);
        if interference > 0 {
            for sharer in sharers.iter_mut().filter(here) {
                // All units in use in the partition except the kernel's own.
                let others = all - left - u64::from(sharer.units);
                sharer.speed = sharer.speed * 1000 * all / (1000 * all + interference * others);
            }
        }
    }
}

/// Slows down the kernels that draw most until all draws fit into the bandwidth.
pub(super) fn share_bandwidth(sharers: &mut [Sharer]) {
    // A draw at a speed, in parts of a part.
    let draw = |sharer: &Sharer| u128::from(sharer.kernel.draw) * u128::from(sharer.speed);
    let whole = u128::from(WHOLE_BANDWIDTH) * u128::from(PARTS);
    if sharers.iter().map(draw).sum::<u128>() <= whole {
        return;
    }
    sharers.sort_unstable_by_key(|sharer| (draw(sharer), sharer.lane));
    let (mut left, mut count) = (whole, sharers.len() as u128);
    for sharer in sharers {
        let (draws, most) = (draw(sharer), left / count);
        if draws > most {
            sharer.speed = (u128::from(sharer.speed) * most / draws) as u64;
        }
        (left, count) = (left - draws.min(most), count - 1);
    }
}
