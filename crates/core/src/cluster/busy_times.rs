//! When busy devices are expected to be done.

use crate::time::Time;

/// Devices that share a minimum.
const BLOCK: usize = 32;

/// For dense device ids, each with an instant: the earliest of all.
///
/// Two instants a batch are written and few are read, so a write only notes that a block's minimum may have risen. The next read looks for it.
/// `O(1)` a write, `O(n / BLOCK)` a read and `O(BLOCK)` more for each block that was noted; nothing is allocated but when a device is added.
#[derive(Clone, Debug, Default)]
pub(super) struct BusyTimes {
    /// By device; `Time::MAX`: it has nothing.
    times: Vec<Time>,
    blocks: Vec<Block>,
}

/// The earliest instant of some devices.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// No instant is earlier. One is equal, unless the block is stale.
    least: Time,
    stale: bool,
}

impl BusyTimes {
    /// Sets the instant of a device; `Time::MAX`: it has nothing.
    pub fn set(&mut self, device: u32, at: Time) {
        let device = device as usize;
        if device >= self.times.len() {
            self.times.resize(device + 1, Time::MAX);
            self.blocks.resize(device / BLOCK + 1, Block { least: Time::MAX, stale: false });
        }
        let former = std::mem::replace(&mut self.times[device], at);
        let block = &mut self.blocks[device / BLOCK];
        if at <= block.least {
            *block = Block { least: at, stale: false };
        } else if former == block.least {
            block.stale = true;
        }
    }

    /// The earliest instant; `Time::MAX`: no device has one.
    pub fn earliest(&mut self) -> Time {
        let mut earliest = Time::MAX;
        for (block, times) in self.blocks.iter_mut().zip(self.times.chunks(BLOCK)) {
            if std::mem::take(&mut block.stale) {
                block.least = times.iter().copied().min().unwrap_or(Time::MAX);
            }
            earliest = earliest.min(block.least);
        }
        earliest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain table.
        #[test]
        fn the_earliest_is_that_of_a_table(steps in prop::collection::vec((0..100u32, 0..9u64, any::<bool>()), 0..300)) {
            let (mut busy, mut table) = (BusyTimes::default(), vec![Time::MAX; 100]);
            for (device, at, looks) in steps {
                let at = if at == 8 { Time::MAX } else { Time::from_nanos(at) };
                busy.set(device, at);
                table[device as usize] = at;
                if looks {
                    prop_assert_eq!(busy.earliest(), *table.iter().min().unwrap());
                }
            }
        }
    }
}
