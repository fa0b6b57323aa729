//! Emulated devices. A thread that launches waits until its launch has ended on the device.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use downbeat_core::{Duration, LatencyProfile};

use super::contention::{Contention, Launch};
use crate::cores::Topology;
use crate::traits::division::{Division, DivisionError, Part, percent};
use crate::traits::{Place, Share};

/// The units of a device whose partitions are shares of it.
const HUNDREDTHS: usize = super::Emulated::UNITS as usize;

/// The devices of an engine.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// The used devices, by number.
    devices: Mutex<BTreeMap<usize, Arc<Device>>>,
    /// The partitions of each device in hundredths, if the devices are divided into shares.
    parts: Mutex<Vec<Range<usize>>>,
    /// The number of models so far.
    models: AtomicU64,
}

impl Devices {
    /// The share of a new model, each of whose launches keeps the part `knee` of a device busy.
    pub fn sharing(self: &Arc<Self>, knee: f64) -> Sharing {
        Sharing { devices: self.clone(), model: self.models.fetch_add(1, Ordering::Relaxed), knee }
    }

    /// Divides each device into shares, one after another.
    pub fn divide(&self, asked: &[String]) -> Result<Division, DivisionError> {
        let (mut ranges, mut begin) = (Vec::new(), 0);
        for (index, text) in asked.iter().enumerate() {
            let refused = |reason: &str| DivisionError::part(index, text, reason);
            let size = percent(text)
                .ok_or_else(|| refused("all partitions of an emulated device are shares, such as \"25%\""))?;
            let end = begin + size as usize;
            if end > HUNDREDTHS {
                return Err(refused("the partitions before it leave less than that"));
            }
            ranges.push(begin..end);
            begin = end;
        }
        let part = |(index, range): (usize, &Range<usize>)| Part {
            share: Share::Part(index as u32),
            threads: 1,
            units: range.len() as u32,
            size: format!("{}% of the emulated device", range.len()),
        };
        let parts = ranges.iter().enumerate().map(part).collect();
        *lock(&self.parts) = ranges;
        Ok(Division { parts, notices: Vec::new() })
    }

    /// All units of a device, and the units of a share. A share that no emulated device has stands
    /// for the whole device.
    fn units(&self, share: Share) -> (Vec<usize>, Vec<usize>) {
        let parts = lock(&self.parts);
        let in_hundredths = !parts.is_empty() || matches!(share, Share::Units(_) | Share::AllBut(_));
        let all: Vec<usize> = match in_hundredths {
            true => (0..HUNDREDTHS).collect(),
            false => Topology::here().usable().iter().collect(),
        };
        let portion = match share {
            Share::Cores(cores) => Some(cores.iter().collect()),
            Share::Part(part) => parts.get(part as usize).map(|range| range.clone().collect()),
            Share::Units(units) => Some(all.iter().copied().take(units as usize).collect()),
            Share::AllBut(units) => Some(all.iter().copied().skip(units as usize).collect()),
            Share::Whole => None,
        };
        let portion = portion.unwrap_or_else(|| all.clone());
        (all, portion)
    }
}

/// A model's use of devices that it shares with other models.
#[derive(Debug)]
pub(super) struct Sharing {
    devices: Arc<Devices>,
    model: u64,
    knee: f64,
}

impl Sharing {
    /// Compute units that a launch keeps busy.
    pub fn knee(&self) -> u32 {
        let (all, _) = self.devices.units(Share::Whole);
        (self.knee * all.len() as f64).ceil() as u32
    }

    /// The place of a lane, for a model that was loaded for the share `loaded`.
    pub fn spot(&self, place: Place, loaded: Share) -> Spot {
        let (all, portion) = self.devices.units(place.share.or(loaded));
        let device = lock(&self.devices.devices).entry(place.device).or_default().clone();
        Spot { device, model: self.model, portion: portion.into(), wants: self.knee * all.len() as f64 }
    }
}

/// A place where launches of a model run.
#[derive(Debug)]
pub(super) struct Spot {
    device: Arc<Device>,
    model: u64,
    portion: Arc<[usize]>,
    wants: f64,
}

impl Spot {
    /// The profile of batches on this share, if no other launch runs. `profile` is theirs on the
    /// whole device.
    pub fn alone(&self, profile: &LatencyProfile) -> LatencyProfile {
        let times = self.wants / self.portion.len().max(1) as f64;
        profile.stretched((times * 1e6) as u32, 1_000_000)
    }

    /// Keeps the calling thread until a launch has run here that takes `alone` on the whole of an
    /// idle device.
    pub fn spend(&self, alone: Duration) {
        let (model, portion, wants) = (self.model, self.portion.clone(), self.wants);
        self.device.run(Launch { model, portion, wants, alone });
    }
}

#[derive(Debug)]
struct Device {
    began: std::time::Instant,
    contention: Mutex<Contention>,
    /// A launch has ended, so that the others are faster.
    ended: Condvar,
}

impl Default for Device {
    #[expect(clippy::disallowed_methods, reason = "the time that passes here is what the emulated device computes")]
    fn default() -> Self {
        Device { began: std::time::Instant::now(), contention: Mutex::default(), ended: Condvar::new() }
    }
}

impl Device {
    fn run(&self, launch: Launch) {
        let mut contention = lock(&self.contention);
        let id = contention.begin(self.now(), launch);
        while let Some(left) = contention.ends_in(self.now(), id) {
            let waited = self.ended.wait_timeout(contention, left.into());
            contention = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(contention);
        self.ended.notify_all();
    }

    fn now(&self) -> Duration {
        self.began.elapsed().into()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
