//! The work on devices whose models' batches are made there, so that a request goes to the device
//! that will answer first.

use std::collections::BTreeMap;

use crate::message::NodeId;
use downbeat_core::ids::BatchId;
use downbeat_core::time::{Duration, Time};

/// A device of a backend.
pub(super) type Site = (NodeId, u32);

/// The work that devices with seats have from the scheduler. Empty if no backend has seats.
#[derive(Debug, Default)]
pub(super) struct SeatLoads {
    /// By device: the time that its batches will take, one after another.
    work: BTreeMap<Site, Duration>,
    /// By batch: its device and its time.
    batches: BTreeMap<BatchId, (Site, Duration)>,
}

impl SeatLoads {
    /// A batch goes to a device, where it takes this time. Returns when the device will be done.
    pub fn sent(&mut self, now: Time, batch: BatchId, site: Site, takes: Duration) -> Time {
        self.batches.insert(batch, (site, takes));
        let work = self.work.entry(site).or_default();
        *work += takes;
        now + *work
    }

    /// A batch is done, or is no longer waited for. Returns its device, and when the device will be
    /// done with the others: `Time::ZERO` if it has none.
    pub fn ended(&mut self, now: Time, batch: BatchId) -> Option<(Site, Time)> {
        let (site, took) = self.batches.remove(&batch)?;
        let work = self.work.get_mut(&site)?;
        *work = work.saturating_sub(took);
        let left = *work;
        if left == Duration::ZERO {
            self.work.remove(&site);
            return Some((site, Time::ZERO));
        }
        Some((site, now + left))
    }

    /// Forgets the devices of a lost backend.
    pub fn forget(&mut self, node: NodeId) {
        self.work.retain(|(of, _), _| *of != node);
        self.batches.retain(|_, ((of, _), _)| *of != node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_done_after_all_its_batches() {
        let (mut loads, now) = (SeatLoads::default(), Time::from_nanos(10_000_000));
        let (a, b) = ((NodeId(1), 0), (NodeId(1), 1));
        let ms = Duration::from_millis;
        assert_eq!(loads.sent(now, BatchId(1), a, ms(3)), now + ms(3));
        assert_eq!(loads.sent(now, BatchId(2), a, ms(4)), now + ms(7));
        assert_eq!(loads.sent(now, BatchId(3), b, ms(1)), now + ms(1));
        assert_eq!(loads.ended(now, BatchId(1)), Some((a, now + ms(4))));
        assert_eq!(loads.ended(now, BatchId(1)), None, "a batch ends once");
        assert_eq!(loads.ended(now, BatchId(2)), Some((a, Time::ZERO)));
        loads.forget(NodeId(1));
        assert_eq!(loads.ended(now, BatchId(3)), None);
    }
}
