//! Finds the smallest device id that can start a batch by a given time.

use super::id_set::IdSet;
use crate::time::Time;

/// Holds one instant for each dense id, and finds the smallest id whose instant is at or before a
/// given time.
///
/// A binary tree of minima over the ids. Two heaps, one by id and one by instant, could not answer
/// this question. Each time has its own set of devices that will be free by then. `O(log n)` an
/// operation. The tree allocates only when an id is added. Ids that are ready at once are in a set
/// beside the tree, which takes far fewer steps. If no batch is sent ahead, nearly all ready ids
/// are in this set.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadyTree {
    /// The ids whose instant is [`Time::ZERO`]. They are absent from the tree.
    at_once: IdSet,
    /// A complete tree, root at 1, the leaf of id `i` at `leaves + i`; absent: `Time::MAX`.
    minima: Vec<Time>,
    /// A power of two, or 0.
    leaves: usize,
}

impl ReadyTree {
    /// Sets the instant of `id`; `Time::MAX`: never.
    pub fn set(&mut self, id: u32, at: Time) {
        let later = if at == Time::ZERO {
            self.at_once.insert(id);
            Time::MAX
        } else {
            self.at_once.remove(id);
            at
        };
        self.set_later(id as usize, later);
    }

    fn set_later(&mut self, id: usize, at: Time) {
        if id >= self.leaves {
            self.grow(id);
        }
        let mut node = self.leaves + id;
        if std::mem::replace(&mut self.minima[node], at) == at {
            return;
        }
        let mut least = at;
        while node > 1 {
            least = least.min(self.minima[node ^ 1]);
            node /= 2;
            if std::mem::replace(&mut self.minima[node], least) == least {
                break;
            }
        }
    }

    /// The earliest instant of all; `Time::MAX`: no id has an instant.
    pub fn earliest(&self) -> Time {
        if self.at_once.is_empty() { self.later() } else { Time::ZERO }
    }

    /// The earliest instant in the tree, so without the ids that are ready at once.
    fn later(&self) -> Time {
        self.minima.get(1).copied().unwrap_or(Time::MAX)
    }

    /// The smallest id whose instant is `limit` or before.
    pub fn first_by(&self, limit: Time) -> Option<u32> {
        // Absent ids have `Time::MAX` and must not match any limit.
        let limit = limit.min(Time::from_nanos(u64::MAX - 1));
        let at_once = self.at_once.first();
        if self.later() > limit {
            return at_once;
        }
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.minima[node] > limit {
                node += 1;
            }
        }
        let later = (node - self.leaves) as u32;
        Some(at_once.map_or(later, |at_once| at_once.min(later)))
    }

    /// All ids whose instant is `limit` or before, in order. `O(n)`.
    pub fn all_by(&self, limit: Time) -> impl Iterator<Item = u32> {
        let all = (0..).zip(self.minima.get(self.leaves..).unwrap_or_default());
        let is_ready = move |id: u32, at: Time| at <= limit && at != Time::MAX || self.at_once.contains(id);
        all.filter(move |(id, at)| is_ready(*id, **at)).map(|(id, _)| id)
    }

    fn grow(&mut self, id: usize) {
        let leaves = (id + 1).next_power_of_two();
        let mut minima = vec![Time::MAX; 2 * leaves];
        minima[leaves..leaves + self.leaves].copy_from_slice(&self.minima[self.leaves..]);
        for node in (1..leaves).rev() {
            minima[node] = minima[2 * node].min(minima[2 * node + 1]);
        }
        (self.minima, self.leaves) = (minima, leaves);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a plain table.
        #[test]
        fn finds_what_a_scan_finds(steps in prop::collection::vec((0..40u32, 0..9u64, 0..9u64), 0..120)) {
            let (mut tree, mut table) = (ReadyTree::default(), vec![Time::MAX; 40]);
            prop_assert_eq!(tree.first_by(Time::MAX), None);
            for (id, at, limit) in steps {
                let at = if at == 8 { Time::MAX } else { Time::from_nanos(at) };
                let limit = if limit == 8 { Time::MAX } else { Time::from_nanos(limit) };
                tree.set(id, at);
                table[id as usize] = at;
                let found = table.iter().position(|t| *t <= limit && *t != Time::MAX).map(|id| id as u32);
                prop_assert_eq!(tree.first_by(limit), found);
                let all = (0..40).filter(|id| table[*id as usize] <= limit && table[*id as usize] != Time::MAX);
                prop_assert!(tree.all_by(limit).eq(all));
                prop_assert_eq!(tree.earliest(), *table.iter().min().unwrap());
            }
        }
    }
}
