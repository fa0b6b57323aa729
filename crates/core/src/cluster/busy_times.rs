//! When busy devices are expected to be done.

use crate::time::Time;

/// Devices of a block, and blocks of a group.
const BLOCK: usize = 32;

/// Holds one instant for each dense device id, and finds the earliest of all.
///
/// A batch writes two instants, and reads are few. So a write only notes that a minimum may have
/// risen, and the next read finds that minimum. A write is `O(1)`. A read is `O(n / BLOCK^2)`, and
/// `O(BLOCK)` more for each noted minimum. Only a new device allocates.
#[derive(Clone, Debug, Default)]
pub(super) struct BusyTimes {
    /// By device; `Time::MAX`: the device has no instant.
    times: Vec<Time>,
    blocks: Vec<Least>,
    groups: Vec<Least>,
}

/// The earliest instant of some devices.
#[derive(Clone, Copy, Debug)]
struct Least {
    /// No instant is earlier. At least one is equal, unless `stale` is set.
    at: Time,
    stale: bool,
}

impl BusyTimes {
    /// Sets the instant of a device; `Time::MAX`: the device has no instant.
    pub fn set(&mut self, device: u32, at: Time) {
        let device = device as usize;
        if device >= self.times.len() {
            let never = Least { at: Time::MAX, stale: false };
            self.times.resize(device + 1, Time::MAX);
            self.blocks.resize(device / BLOCK + 1, never);
            self.groups.resize(device / BLOCK / BLOCK + 1, never);
        }
        let former = std::mem::replace(&mut self.times[device], at);
        let (block, group) = (&mut self.blocks[device / BLOCK], &mut self.groups[device / BLOCK / BLOCK]);
        if at <= block.at {
            *block = Least { at, stale: false };
            if at <= group.at {
                *group = *block;
            }
        } else if former == block.at {
            block.stale = true;
            group.stale |= group.at == former;
        }
    }

    /// The earliest instant; `Time::MAX`: no device has one.
    pub fn earliest(&mut self) -> Time {
        let blocks = self.blocks.chunks_mut(BLOCK).zip(self.times.chunks(BLOCK * BLOCK));
        for (group, (blocks, times)) in self.groups.iter_mut().zip(blocks) {
            if !std::mem::take(&mut group.stale) {
                continue;
            }
            for (block, times) in blocks.iter_mut().zip(times.chunks(BLOCK)) {
                if std::mem::take(&mut block.stale) {
                    block.at = least(times.iter().copied());
                }
            }
            group.at = least(blocks.iter().map(|block| block.at));
        }
        least(self.groups.iter().map(|group| group.at))
    }
}

fn least(instants: impl Iterator<Item = Time>) -> Time {
    instants.min().unwrap_or(Time::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn devices() -> impl Strategy<Value = u32> {
        prop_oneof![0..100u32, 1000..1100u32, 4000..4100u32]
    }

    proptest! {
        /// Compares with a plain table.
        #[test]
        fn the_earliest_is_that_of_a_table(steps in prop::collection::vec((devices(), 0..9u64, any::<bool>()), 0..300)) {
            let (mut busy, mut table) = (BusyTimes::default(), vec![Time::MAX; 4100]);
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
