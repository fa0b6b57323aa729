//! Mixes of lanes: how many of which batch size run at once (E²bird §7).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The number of lanes of each batch size. Batch sizes are powers of two (E²bird §6.3). The paper
/// calls lanes workers.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct LaneMix {
    /// Count by batch size; no zeros.
    counts: BTreeMap<u32, u32>,
}

/// The error of an invalid mix, or of an invalid table of mixes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadMix(String);

impl BadMix {
    fn new(what: &str) -> Self {
        BadMix(what.to_owned())
    }

    pub(super) fn loads() -> Self {
        BadMix::new("the loads of a table of mixes must ascend")
    }
}

impl LaneMix {
    /// The lanes of these batch sizes, in any order.
    ///
    /// # Errors
    /// If `sizes` is empty, or a size is no power of two.
    pub fn new(sizes: &[u32]) -> Result<Self, BadMix> {
        if sizes.is_empty() {
            return Err(BadMix::new("a mix has at least one lane"));
        }
        let mut counts = BTreeMap::new();
        for size in sizes {
            if !size.is_power_of_two() {
                return Err(BadMix(format!("a lane's batch size is a power of two, not {size}")));
            }
            *counts.entry(*size).or_insert(0) += 1;
        }
        Ok(LaneMix { counts })
    }

    /// N-Ebird's lanes for at most `max` items at once: 1, 1, 2, 4, ... up to half of `max`. Each
    /// number up to `max` is a sum of some sizes (E²bird §7.2.1). `max` is first rounded down to a
    /// power of two.
    pub fn naive(max: u32) -> Self {
        let mut counts = BTreeMap::from([(1, if max >= 2 { 2 } else { 1 })]);
        let top = if max == 0 { 1 } else { 1 << max.ilog2() };
        let mut size = 2;
        while size <= top / 2 {
            counts.insert(size, 1);
            size *= 2;
        }
        LaneMix { counts }
    }

    /// Every mix whose sizes sum to `total`, of sizes up to `largest` (E²bird equation 6), largest
    /// lanes first.
    pub fn all(total: u32, largest: u32) -> Vec<LaneMix> {
        fn extend(left: u32, size: u32, counts: &mut BTreeMap<u32, u32>, found: &mut Vec<LaneMix>) {
            if left == 0 {
                found.push(LaneMix { counts: counts.clone() });
                return;
            }
            if size == 0 {
                return;
            }
            for count in (0..=left / size).rev() {
                if count > 0 {
                    counts.insert(size, count);
                } else {
                    counts.remove(&size);
                }
                extend(left - count * size, size / 2, counts, found);
            }
            counts.remove(&size);
        }
        let mut found = Vec::new();
        if total > 0 && largest > 0 {
            extend(total, 1 << largest.min(total).ilog2(), &mut BTreeMap::new(), &mut found);
        }
        found
    }

    /// The number of lanes of this batch size.
    pub fn count(&self, size: u32) -> u32 {
        self.counts.get(&size).copied().unwrap_or(0)
    }

    /// The sizes with their counts, smallest first.
    pub fn counts(&self) -> impl DoubleEndedIterator<Item = (u32, u32)> {
        self.counts.iter().map(|(size, count)| (*size, *count))
    }

    /// The batch sizes of all lanes, smallest first.
    pub fn sizes(&self) -> impl Iterator<Item = u32> {
        self.counts().flat_map(|(size, count)| std::iter::repeat_n(size, count as usize))
    }

    /// The items of all lanes together.
    pub fn total(&self) -> u32 {
        self.counts().map(|(size, count)| size * count).sum()
    }

    /// For each size, as many lanes as the mix with more of them has.
    pub fn union(&self, other: &LaneMix) -> LaneMix {
        let mut counts = self.counts.clone();
        for (size, count) in other.counts() {
            let mine = counts.entry(size).or_insert(0);
            *mine = (*mine).max(count);
        }
        LaneMix { counts }
    }
}

impl fmt::Display for LaneMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> = self.sizes().map(|size| size.to_string()).collect();
        f.write_str(&sizes.join(","))
    }
}

impl FromStr for LaneMix {
    type Err = BadMix;
    fn from_str(text: &str) -> Result<Self, BadMix> {
        let sizes = text.split(',').map(|size| size.trim().parse()).collect::<Result<Vec<u32>, _>>();
        let bad = |_| BadMix(format!("'{text}' is not a mix of lanes; expected batch sizes such as 1,1,2,4,8,16"));
        LaneMix::new(&sizes.map_err(bad)?)
    }
}

/// The lanes to use under each load. E-Ebird's offline phase finds them (E²bird §7.3.2); N-Ebird
/// has one mix for all loads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MixTable {
    /// The mixes by load in items, ascending.
    entries: Vec<(u32, LaneMix)>,
}

impl MixTable {
    /// N-Ebird: one mix for every load, with at most `max` items at once.
    pub fn naive(max: u32) -> Self {
        MixTable { entries: vec![(1, LaneMix::naive(max))] }
    }

    /// One mix for every load.
    ///
    /// # Errors
    /// If the mix has no lane of one item: a rest of one item would wait for ever.
    pub fn single(mix: LaneMix) -> Result<Self, BadMix> {
        if mix.count(1) == 0 {
            return Err(BadMix::new(
                "a mix needs a lane of batch size 1, as requests that fit no other lane would wait for ever",
            ));
        }
        Ok(MixTable { entries: vec![(1, mix)] })
    }

    /// E-Ebird: the best mix for each load. Each mix also gets a lane of one item and a lane of
    /// two. These lanes serve a low load at once, and the rest that a larger mix leaves over
    /// (E²bird §7.3.2, table 4).
    ///
    /// # Errors
    /// If `best` is empty, or its loads do not ascend.
    pub fn enhanced(best: Vec<(u32, LaneMix)>) -> Result<Self, BadMix> {
        if best.is_empty() {
            return Err(BadMix::new("a mix has at least one lane"));
        }
        if !best.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err(BadMix::loads());
        }
        let small = LaneMix { counts: BTreeMap::from([(1, 1), (2, 1)]) };
        let mut entries: Vec<_> = best.into_iter().map(|(load, mix)| (load, mix.union(&small))).collect();
        if entries[0].0 > 1 {
            entries.insert(0, (1, small));
        }
        Ok(MixTable { entries })
    }

    /// The entry for `load` waiting and running items: the largest load that is reached, and its
    /// lanes.
    pub fn at(&self, load: u32) -> (u32, &LaneMix) {
        let after = self.entries.partition_point(|(from, _)| *from <= load);
        let (load, mix) = &self.entries[after.saturating_sub(1)];
        (*load, mix)
    }

    /// The lanes that at least one load uses.
    pub fn union(&self) -> LaneMix {
        self.entries.iter().fold(LaneMix::default(), |all, (_, mix)| all.union(mix))
    }

    /// The mixes by load, ascending.
    pub fn entries(&self) -> &[(u32, LaneMix)] {
        &self.entries
    }
}
