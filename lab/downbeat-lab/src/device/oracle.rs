//! A perfect predictor: the emulated device itself.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use downbeat_core::device::LaneId;
use downbeat_core::device::overlap::{GroupPart, Predictor};
use downbeat_core::{Duration, Time};

use super::contended::ContendedDevice;
use super::model::EmulatedModel;
use super::work::Work;

/// Plays each group on a device of its own, without noise. Each model has a lane, as on the device
/// that is predicted.
#[derive(Debug)]
pub struct Oracle {
    models: Vec<EmulatedModel>,
    /// The factor from the true time to the prediction: 1 for an oracle.
    bias: f64,
    known: RefCell<BTreeMap<Vec<Asked>, Duration>>,
    played: Cell<u64>,
}

/// The key of a group's part: model, first operator, one past the last, items, length.
type Asked = (u32, u16, u16, u32, u32);

impl Oracle {
    /// Makes an oracle of these models, by their numbers, on the device of the first.
    pub fn new(models: Vec<EmulatedModel>, bias: f64) -> Self {
        Oracle { models, bias, known: RefCell::default(), played: Cell::new(0) }
    }

    /// Returns the number of different groups that were played.
    pub fn played(&self) -> u64 {
        self.played.get()
    }

    fn one(&self, group: &[GroupPart]) -> Option<Duration> {
        let asked = |part: &GroupPart| {
            let range = part.operators;
            (part.model.0, range.first, range.end, part.rows, part.length)
        };
        let mut key: Vec<Asked> = group.iter().map(asked).collect();
        key.sort_unstable();
        if let Some(known) = self.known.borrow().get(&key) {
            return Some(*known);
        }
        let takes = play_group(&self.models, group, |_| ())?;
        self.played.set(self.played.get() + 1);
        let takes = Duration::from_secs_f64(takes.as_secs_f64() * self.bias);
        self.known.borrow_mut().insert(key, takes);
        Some(takes)
    }
}

/// Plays a group on a device of its own, each model on its lane, and returns its time. `change` may
/// alter each launch's work first. `None` if the group has an unknown model.
pub(super) fn play_group(
    models: &[EmulatedModel],
    group: &[GroupPart],
    mut change: impl FnMut(&mut Work),
) -> Option<Duration> {
    let limits = models.first()?.limits();
    let mut device = ContendedDevice::new(limits, models.len());
    for part in group {
        let model = models.get(part.model.0 as usize)?;
        let mut work = model.work(part.operators, part.rows, part.length, limits.units);
        change(&mut work);
        device.launch(Time::ZERO, LaneId(part.model.0), 0, work);
    }
    let mut end = Time::ZERO;
    while let Some(next) = device.next_event() {
        device.advance(next);
        end = next;
    }
    Some(end.since(Time::ZERO))
}

impl Predictor for Oracle {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        groups.iter().map(|group| self.one(group)).collect()
    }
}
