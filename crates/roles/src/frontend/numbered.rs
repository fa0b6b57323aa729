//! A map from numbers that count up to things.

use std::collections::{BTreeMap, VecDeque};

/// Empty places allowed beyond four for each recent thing, before things at the front move to the
/// ordered map.
const SLACK: usize = 1024;

/// A map from numbers that count up to things. Recent things stand in a dense queue; a thing that
/// outlives many later ones moves to an ordered map. The places are at most four times the things,
/// plus [`SLACK`].
#[derive(Clone, Debug)]
pub(super) struct Numbered<T> {
    /// The number of the first place of `recent`.
    base: u64,
    recent: VecDeque<Option<T>>,
    /// How many places of `recent` hold a thing.
    filled: usize,
    /// Things with numbers below `base`.
    old: BTreeMap<u64, T>,
}

impl<T> Numbered<T> {
    /// An empty map, whose next number is 0.
    pub fn new() -> Self {
        Numbered { base: 0, recent: VecDeque::new(), filled: 0, old: BTreeMap::new() }
    }

    /// The number of things.
    pub fn len(&self) -> usize {
        self.filled + self.old.len()
    }

    /// Adds a thing and returns its number.
    pub fn push(&mut self, thing: T) -> u64 {
        while self.recent.len() > 4 * self.filled + SLACK {
            if let Some(Some(thing)) = self.recent.pop_front() {
                self.filled -= 1;
                self.old.insert(self.base, thing);
            }
            self.base += 1;
        }
        let number = self.base + self.recent.len() as u64;
        self.recent.push_back(Some(thing));
        self.filled += 1;
        number
    }

    fn place(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.base)?).ok()
    }

    /// The thing of this number.
    pub fn get(&self, number: u64) -> Option<&T> {
        match self.place(number) {
            Some(place) => self.recent.get(place)?.as_ref(),
            None => self.old.get(&number),
        }
    }

    /// The thing of this number, mutable.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        match self.place(number) {
            Some(place) => self.recent.get_mut(place)?.as_mut(),
            None => self.old.get_mut(&number),
        }
    }

    /// Removes and returns the thing of this number.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        let Some(place) = self.place(number) else { return self.old.remove(&number) };
        let thing = self.recent.get_mut(place)?.take()?;
        self.filled -= 1;
        while let Some(None) = self.recent.front() {
            self.recent.pop_front();
            self.base += 1;
        }
        Some(thing)
    }

    /// All things, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let recent = (self.base..).zip(&self.recent).filter_map(|(number, thing)| Some((number, thing.as_ref()?)));
        self.old.iter().map(|(number, thing)| (*number, thing)).chain(recent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_that_stays_holds_no_room_for_those_that_went() {
        let mut things = Numbered::new();
        let first = things.push(0);
        for n in 1..100_000 {
            let number = things.push(n);
            assert_eq!(things.remove(number), Some(n));
        }
        assert!(things.recent.len() <= SLACK + 5, "{}", things.recent.len());
        assert_eq!((things.get(first), things.len()), (Some(&0), 1));
        assert_eq!(things.remove(first), Some(0));
        assert_eq!((things.remove(first), things.len()), (None, 0));
    }

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0u8..3, 0u64..4_000), 0..6_000)) {
            let (mut things, mut model) = (Numbered::new(), BTreeMap::new());
            for (n, (what, number)) in steps.into_iter().enumerate() {
                if what < 2 {
                    let number = things.push(n);
                    prop_assert_eq!(model.insert(number, n), None);
                } else {
                    prop_assert_eq!(things.get(number), model.get(&number));
                    prop_assert_eq!(things.get_mut(number).copied(), model.get(&number).copied());
                    prop_assert_eq!(things.remove(number), model.remove(&number));
                }
                prop_assert_eq!(things.len(), model.len());
            }
            prop_assert!(things.iter().eq(model.iter().map(|(number, thing)| (*number, thing))));
            prop_assert!(things.get(u64::MAX).is_none());
        }
    }
}
