//! A binary min-heap of dense ids that can change or remove any id.
//!
//! Written by hand because each event of a scheduler changes a key in place. The standard heap
//! cannot, and maps of keys would allocate.

/// A binary min-heap of ids in `0..`, each with a key, ordered by `(key, id)`.
///
/// A table of positions makes changing or removing any id `O(log n)`. So a timer is truly
/// cancelled: no stale entry has to be skipped later. The heap keeps its memory, so that at a
/// settled size it allocates nothing. Ties go to the smallest id: the order never depends on the
/// history.
#[derive(Clone, Debug, Default)]
pub struct IndexedHeap<K> {
    heap: Vec<(K, u32)>,
    /// By id: the position in `heap`, or `ABSENT`.
    position: Vec<u32>,
}

const ABSENT: u32 = u32::MAX;

impl<K: Ord + Copy> IndexedHeap<K> {
    /// An empty heap.
    pub const fn new() -> Self {
        IndexedHeap { heap: Vec::new(), position: Vec::new() }
    }

    /// How many ids it holds.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether the heap holds no id.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// The smallest key and its id.
    pub fn peek(&self) -> Option<(K, u32)> {
        self.heap.first().copied()
    }

    /// All ids, in arbitrary order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.heap.iter().map(|(_, id)| *id)
    }

    /// The key of `id`.
    pub fn get(&self, id: u32) -> Option<K> {
        self.find(id).map(|at| self.heap[at].0)
    }

    /// Adds `id`, or changes its key.
    pub fn set(&mut self, id: u32, key: K) {
        match self.find(id) {
            Some(at) => {
                let old = std::mem::replace(&mut self.heap[at].0, key);
                if key < old {
                    self.sift_up(at);
                } else {
                    self.sift_down(at);
                }
            }
            None => {
                if self.position.len() <= id as usize {
                    self.position.resize(id as usize + 1, ABSENT);
                }
                self.heap.push((key, id));
                self.sift_up(self.heap.len() - 1);
            }
        }
    }

    /// Removes `id`. Returns its key if the heap held it.
    pub fn remove(&mut self, id: u32) -> Option<K> {
        let at = self.find(id)?;
        let (key, _) = self.heap.swap_remove(at);
        self.position[id as usize] = ABSENT;
        if at < self.heap.len() {
            // The entry that took the place came from the end, so it may have to move up or down.
            self.position[self.heap[at].1 as usize] = at as u32;
            self.sift_up(at);
            self.sift_down(at);
        }
        Some(key)
    }

    /// Removes and returns the smallest key and its id.
    pub fn pop(&mut self) -> Option<(K, u32)> {
        let (key, id) = self.peek()?;
        self.remove(id);
        Some((key, id))
    }

    /// Visits the ids whose key is below `limit`, in arbitrary order. Returns the smallest entry of
    /// all other ids. `O(visited)`.
    pub fn visit_below(&self, limit: K, mut visit: impl FnMut(u32)) -> Option<(K, u32)> {
        let mut least: Option<(K, u32)> = None;
        // Depth first without a stack. After a visited entry comes its first child. After any other
        // entry comes the next sibling, of the entry or of its nearest ancestor that has a sibling
        // left.
        let mut at = 0;
        loop {
            match self.heap.get(at) {
                Some((key, id)) if *key < limit => {
                    visit(*id);
                    at = 2 * at + 1;
                    continue;
                }
                Some(entry) => least = Some(least.map_or(*entry, |least| least.min(*entry))),
                None => {}
            }
            // A right child has an even place.
            while at != 0 && at.is_multiple_of(2) {
                at = (at - 1) / 2;
            }
            if at == 0 {
                return least;
            }
            at += 1;
        }
    }

    fn find(&self, id: u32) -> Option<usize> {
        match self.position.get(id as usize) {
            None | Some(&ABSENT) => None,
            Some(&at) => Some(at as usize),
        }
    }

    fn sift_up(&mut self, mut at: usize) {
        let entry = self.heap[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent] <= entry {
                break;
            }
            self.heap[at] = self.heap[parent];
            self.position[self.heap[at].1 as usize] = at as u32;
            at = parent;
        }
        self.heap[at] = entry;
        self.position[entry.1 as usize] = at as u32;
    }

    fn sift_down(&mut self, mut at: usize) {
        let entry = self.heap[at];
        loop {
            let mut child = 2 * at + 1;
            if child >= self.heap.len() {
                break;
            }
            if child + 1 < self.heap.len() && self.heap[child + 1] < self.heap[child] {
                child += 1;
            }
            if entry <= self.heap[child] {
                break;
            }
            self.heap[at] = self.heap[child];
            self.position[self.heap[at].1 as usize] = at as u32;
            at = child;
        }
        self.heap[at] = entry;
        self.position[entry.1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a sorted map: the smallest entry is the same after every operation.
        #[test]
        fn behaves_as_a_sorted_map(operations in prop::collection::vec((0..24u32, prop::option::of(0..9u8)), 0..200)) {
            let mut heap = IndexedHeap::new();
            let mut map = BTreeMap::new();
            for (id, key) in operations {
                match key {
                    Some(key) => {
                        heap.set(id, key);
                        map.insert(id, key);
                    }
                    None => prop_assert_eq!(heap.remove(id), map.remove(&id)),
                }
                prop_assert_eq!(heap.peek(), map.iter().map(|(id, key)| (*key, *id)).min());
                prop_assert_eq!(heap.len(), map.len());
                prop_assert_eq!(heap.get(id), map.get(&id).copied());
                let mut below = Vec::new();
                let rest = heap.visit_below(5, |id| below.push(id));
                below.sort_unstable();
                prop_assert_eq!(below, map.iter().filter(|(_, key)| **key < 5).map(|(id, _)| *id).collect::<Vec<_>>());
                prop_assert_eq!(rest, map.iter().map(|(id, key)| (*key, *id)).filter(|(key, _)| *key >= 5).min());
            }
            let mut sorted: Vec<(u8, u32)> = map.into_iter().map(|(id, key)| (key, id)).collect();
            sorted.sort_unstable();
            let popped: Vec<(u8, u32)> = std::iter::from_fn(|| heap.pop()).collect();
            prop_assert_eq!(popped, sorted);
        }
    }
}
