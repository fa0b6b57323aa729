//! The input ring: device memory that requests enter on arrival, one slot an item (E²bird §5.1).

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Neighbouring slots of a ring: `first`, `first + 1`, ... The run may wrap to slot 0 after the
/// last slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RingRun {
    /// The first slot.
    pub first: u32,
    /// The number of slots, at least 1.
    pub count: u32,
}

/// Tracks which slots of the ring are in use. Slots are given out in the order of the ring. A slot
/// that is released before an older one becomes free only with the older one.
#[derive(Clone, Debug)]
pub struct InputRing {
    slots: u32,
    /// The next slot to give out.
    head: u32,
    /// For each slot from the oldest in use to `head`: whether it is still used.
    used: VecDeque<bool>,
    most_used: u32,
}

impl InputRing {
    /// A ring of `slots` slots, all free. Asserts that `slots` is above 0.
    pub fn new(slots: u32) -> Self {
        assert!(slots > 0, "an input ring has at least one slot");
        InputRing { slots, head: 0, used: VecDeque::new(), most_used: 0 }
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The slots that are not free.
    pub fn occupied(&self) -> u32 {
        self.used.len() as u32
    }

    /// The most slots that were in use at once.
    pub fn most_occupied(&self) -> u32 {
        self.most_used
    }

    /// Takes the next `count` slots. Returns `None` if fewer are free.
    pub fn allocate(&mut self, count: u32) -> Option<RingRun> {
        if count > self.slots - self.occupied() {
            return None;
        }
        let run = RingRun { first: self.head, count };
        self.used.extend(std::iter::repeat_n(true, count as usize));
        self.head = (self.head + count) % self.slots;
        self.most_used = self.most_used.max(self.occupied());
        Some(run)
    }

    /// Gives slots back. Asserts that they are in use.
    pub fn release(&mut self, run: RingRun) {
        let oldest = (self.head + self.slots - self.occupied() % self.slots) % self.slots;
        let offset = (run.first + self.slots - oldest) % self.slots;
        for slot in offset..offset + run.count {
            let used = self.used.get_mut(slot as usize);
            assert!(
                used.as_deref() == Some(&true),
                "a slot of the input ring is released once, after it was given out"
            );
            if let Some(used) = used {
                *used = false;
            }
        }
        while self.used.front() == Some(&false) {
            self.used.pop_front();
        }
    }

    /// Whether `next` begins where `run` ends.
    pub fn are_neighbours(&self, run: RingRun, next: RingRun) -> bool {
        (run.first + run.count) % self.slots == next.first && run.count + next.count <= self.slots
    }
}
