//! A set of dense ids that finds its smallest id.

/// A set of dense ids: a bit for each id, and levels of bits above that mark the words in use. An
/// operation takes one more step for 64 times as many ids. The set allocates only when the largest
/// id grows.
#[derive(Clone, Debug, Default)]
pub(super) struct IdSet {
    /// The ids. Each further level has a bit for each 64-bit word of the level below: whether that
    /// word has any bit. The last level is one word.
    levels: Vec<Vec<u64>>,
    /// Whether the set holds any id.
    any: bool,
}

impl IdSet {
    /// Adds `id`, which may already be in the set.
    pub fn insert(&mut self, id: u32) {
        let mut at = id as usize;
        if self.levels.first().is_none_or(|ids| ids.len() <= at / 64) {
            self.grow(at / 64 + 1);
        }
        self.any = true;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let had = *word;
            *word |= 1 << (at % 64);
            if had != 0 {
                break;
            }
            at /= 64;
        }
    }

    /// Removes `id`, which may be absent.
    pub fn remove(&mut self, id: u32) {
        if !self.any {
            return;
        }
        let mut at = id as usize;
        for level in &mut self.levels {
            let Some(word) = level.get_mut(at / 64) else { return };
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
        // The last level has no bit left.
        self.any = false;
    }

    /// Whether the set holds `id`.
    pub fn contains(&self, id: u32) -> bool {
        let words = self.levels.first().and_then(|ids| ids.get(id as usize / 64));
        words.is_some_and(|word| word & 1 << (id % 64) != 0)
    }

    /// The smallest id.
    pub fn first(&self) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let first = |at: usize, level: &Vec<u64>| at * 64 + level[at].trailing_zeros() as usize;
        Some(self.levels.iter().rev().fold(0, first) as u32)
    }

    /// Whether the set holds no id.
    pub fn is_empty(&self) -> bool {
        !self.any
    }

    #[cold]
    fn grow(&mut self, words: usize) {
        let mut ids = std::mem::take(&mut self.levels).into_iter().next().unwrap_or_default();
        ids.resize(words.next_power_of_two(), 0);
        self.levels.push(ids);
        while let Some(below) = self.levels.last().filter(|below| below.len() > 1) {
            let any = |words: &[u64]| (0..).zip(words).fold(0, |bits, (at, word)| bits | u64::from(*word != 0) << at);
            let above = below.chunks(64).map(any).collect();
            self.levels.push(above);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a sorted set, over three levels.
        #[test]
        fn behaves_as_a_sorted_set(steps in prop::collection::vec((any::<bool>(), prop_oneof![0..9u32, 60..70u32, 4090..4100u32]), 0..80)) {
            let (mut set, mut sorted) = (IdSet::default(), BTreeSet::new());
            for (insert, id) in steps {
                if insert {
                    set.insert(id);
                    sorted.insert(id);
                } else {
                    set.remove(id);
                    sorted.remove(&id);
                }
                prop_assert_eq!(set.first(), sorted.first().copied());
                prop_assert_eq!(set.is_empty(), sorted.is_empty());
                prop_assert_eq!(set.contains(id), insert);
            }
        }
    }
}
