//! The queue of coming events, in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use downbeat_core::Time;

/// The queue of coming events, in the order of time. Events of one time come in the order in which
/// they were added.
#[derive(Debug)]
pub(super) struct Events<E> {
    heap: BinaryHeap<Reverse<(Time, u64, u32)>>,
    slots: Vec<Option<E>>,
    vacant: Vec<u32>,
    next: u64,
}

impl<E> Events<E> {
    pub fn new() -> Self {
        Events { heap: BinaryHeap::new(), slots: Vec::new(), vacant: Vec::new(), next: 0 }
    }

    pub fn push(&mut self, at: Time, event: E) {
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(event);
                slot
            }
            None => {
                self.slots.push(Some(event));
                self.slots.len() as u32 - 1
            }
        };
        self.heap.push(Reverse((at, self.next, slot)));
        self.next += 1;
    }

    pub fn pop(&mut self) -> Option<(Time, E)> {
        let Reverse((at, _, slot)) = self.heap.pop()?;
        self.vacant.push(slot);
        Some((at, self.slots[slot as usize].take()?))
    }
}
