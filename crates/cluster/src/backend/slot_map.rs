//! The slots of a backend, as schedulers know them.

use downbeat_core::DeviceId;
use parking_lot::Mutex;

/// The seats of a device: so many batches its device policies hold at once. A device that runs four
/// lanes of eight requests is then full, and has the next requests at hand.
const SEATS: usize = 64;

/// A slot's place on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// A partition of a device, by its number in this process. The scheduler's batches run on it.
    Partition(DeviceId),
    /// A seat of this device: its batches go to the device policies of their models.
    Seat(usize),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Partition(number) => write!(f, "partition {}", number.0),
            Place::Seat(device) => write!(f, "a seat of device {device}"),
        }
    }
}

/// The slots of a backend. Slots are added, and never leave or change.
#[derive(Default)]
pub struct SlotMap(Mutex<Vec<Place>>);

impl SlotMap {
    /// All slots, once there are this number of partitions, and seats on these devices.
    pub fn extend(&self, partitions: usize, seated: impl IntoIterator<Item = usize>) -> Vec<Place> {
        let mut places = self.0.lock();
        let known = places.iter().filter(|place| matches!(place, Place::Partition(_))).count();
        let new =
            (known..partitions).map(|number| Place::Partition(DeviceId(u32::try_from(number).unwrap_or(u32::MAX))));
        places.extend(new);
        for device in seated {
            if !places.contains(&Place::Seat(device)) {
                places.extend(std::iter::repeat_n(Place::Seat(device), SEATS));
            }
        }
        places.clone()
    }

    /// The place of a slot; `None`: there is no such slot.
    pub fn get(&self, slot: u32) -> Option<Place> {
        self.0.lock().get(slot as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_their_numbers_when_others_come() {
        let map = SlotMap::default();
        assert_eq!(map.extend(1, []), [Place::Partition(DeviceId(0))]);
        let seated = map.extend(1, [0]);
        assert_eq!((seated.len(), seated[1], seated[SEATS]), (1 + SEATS, Place::Seat(0), Place::Seat(0)));
        let more = map.extend(2, [0]);
        assert_eq!(more[..seated.len()], seated[..]);
        assert_eq!(more[seated.len()..], [Place::Partition(DeviceId(1))]);
        assert_eq!(map.get(0), Some(Place::Partition(DeviceId(0))));
        assert_eq!(map.get(9_999), None);
    }
}
