//! Served operator groups with their times: samples for another training of the predictor.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::median;
use downbeat_training::GroupSample;

/// The most sets of models that are kept, and the most groups of each for training and for the
/// test; the newest stay.
const SETS: usize = 64;
const KEPT: usize = 256;
const HELD_OUT: usize = 64;
/// One of this many groups of a set is for the test: 20% (Abacus §5.5).
const TESTED: u64 = 5;
/// A set with fewer groups has no median.
const FEWEST: usize = 8;

/// The served groups of each set of models; models are numbers.
#[derive(Debug, Default)]
pub struct ServedGroups {
    sets: BTreeMap<Vec<usize>, ServedSet>,
    served: u64,
}

#[derive(Debug, Default)]
struct ServedSet {
    served: u64,
    /// When the last came, counted in groups.
    last: u64,
    training: VecDeque<GroupSample>,
    held_out: VecDeque<GroupSample>,
}

impl ServedGroups {
    /// Adds a served group of these models. Every fifth of a set is held out, from the first on: no
    /// training ever uses it.
    pub fn add(&mut self, models: &[usize], sample: GroupSample) {
        let mut set = models.to_vec();
        set.sort_unstable();
        self.served += 1;
        if !self.sets.contains_key(&set) && self.sets.len() == SETS {
            let oldest = self.sets.iter().min_by_key(|(_, set)| set.last).map(|(models, _)| models.clone());
            oldest.iter().for_each(|oldest| drop(self.sets.remove(oldest)));
        }
        let set = self.sets.entry(set).or_default();
        let is_held_out = set.served.is_multiple_of(TESTED);
        set.served += 1;
        set.last = self.served;
        let (kept, most) = if is_held_out { (&mut set.held_out, HELD_OUT) } else { (&mut set.training, KEPT) };
        if kept.len() == most {
            kept.pop_front();
        }
        kept.push_back(sample);
    }

    /// How many were served.
    pub fn served(&self) -> u64 {
        self.served
    }

    /// The groups to train with.
    pub fn training(&self) -> impl Iterator<Item = &GroupSample> {
        self.sets.values().flat_map(|set| &set.training)
    }

    /// The groups to judge by.
    pub fn held_out(&self) -> impl Iterator<Item = &GroupSample> {
        self.sets.values().flat_map(|set| &set.held_out)
    }

    /// For each set, the median ratio of the groups' actual time to the prediction `says`; sets
    /// with few groups are left out.
    pub fn ratios(&self, says: impl Fn(&[f32]) -> f64) -> BTreeMap<Vec<usize>, f64> {
        let ratio = |(models, set): (&Vec<usize>, &ServedSet)| {
            let ratios = set.training.iter().map(|sample| sample.takes_ms / says(&sample.features));
            Some((models.clone(), median(ratios).filter(|_| set.training.len() >= FEWEST)?))
        };
        self.sets.iter().filter_map(ratio).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(takes_ms: f64) -> GroupSample {
        GroupSample { features: vec![1.0], takes_ms, set: 0 }
    }

    #[test]
    fn the_newest_of_each_set_are_kept_and_every_fifth_is_never_trained_with() {
        let mut served = ServedGroups::default();
        (0..2_000).for_each(|index| served.add(&[1, 0], sample(f64::from(index))));
        served.add(&[0], sample(-1.0));
        let of = |samples: Vec<&GroupSample>| samples.iter().map(|s| s.takes_ms as i64).collect::<Vec<_>>();
        let (training, held_out) = (of(served.training().collect()), of(served.held_out().collect()));
        assert_eq!((training.len(), held_out.len()), (KEPT, HELD_OUT + 1), "the first of a set is held out");
        assert!(training.iter().all(|index| index % 5 != 0) && *training.last().unwrap() == 1_999);
        assert!(held_out.iter().all(|index| *index == -1 || index % 5 == 0) && held_out.contains(&1_995));
        let ratios = served.ratios(|_| 1_000.0);
        assert_eq!(ratios.keys().collect::<Vec<_>>(), [&vec![0, 1]], "of one group nothing is said");
        assert!((ratios[&vec![0, 1]] - 1.84).abs() < 0.01, "{ratios:?}");
    }

    #[test]
    fn the_set_that_was_unserved_longest_makes_room() {
        let mut served = ServedGroups::default();
        (0..SETS).for_each(|model| served.add(&[model], sample(model as f64)));
        served.add(&[0], sample(0.5));
        served.add(&[SETS], sample(0.0));
        assert_eq!(served.sets.len(), SETS);
        assert!(served.sets.contains_key(&vec![0]) && !served.sets.contains_key(&vec![1]));
    }
}
