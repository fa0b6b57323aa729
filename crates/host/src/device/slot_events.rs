//! The events of a device's slots, to which the scheduler listens that makes their batches.

use downbeat_core::device::PartitionId;
use downbeat_core::{DeviceId, Time};

use super::lane_host::OwnLaunch;
use super::launch::Grant;

/// A batch that ran well.
#[derive(Clone, Copy)]
pub struct Ran {
    /// The partition of the slot.
    pub partition: PartitionId,
    /// Its items.
    pub rows: u32,
    /// When the batch ended.
    pub end: Time,
}

/// The scheduler whose batches come to the slots of a device.
pub trait SlotEvents: Send + Sync {
    /// A batch ran well on a device: its time is known now.
    fn ran(&self, device: usize, grant: &Grant, ran: Ran);

    /// A slot was done with its batch at the given time. `own`: the calling thread's wish for a
    /// launch.
    fn done(&self, grant: &Grant, at: Time, ran: Option<Ran>, own: &mut OwnLaunch);

    /// A device with these slots is lost.
    fn lost(&self, device: usize, slots: &[DeviceId]);

    /// Models with lanes of their own have work until then in the partition of a slot.
    fn load(&self, slot: DeviceId, until: Time);
}
