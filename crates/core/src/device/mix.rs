//! Mixes of lanes: how many of which batch size run at once (E²bird §7).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How many lanes there are of each batch size, which are powers of two (E²bird §6.3; the papers say workers).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct LaneMix {
    /// Count by batch size; no zeros.
    counts: BTreeMap<u32, u32>,
}

/// Why something is no mix, or no table of mixes.
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
    /// If there is none, or one is no power of two.
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

    /// N-Ebird's lanes for at most `max` items at once: 1, 1, 2, 4, ... up to half of it, so that each number up to `max` is a sum of
    /// some of them (E²bird §7.2.1). `max` is taken down to a power of two.
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

    /// Every mix whose sizes sum to `total`, of sizes up to `largest` (E²bird equation 6), largest lanes first.
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

    /// How many lanes of this batch size there are.
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

    /// Items of all lanes together.
    pub fn total(&self) -> u32 {
        self.counts().map(|(size, count)| size * count).sum()
    }

    /// As many lanes of each size as the larger of both has.
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
        let bad = |_| BadMix(format!("'{text}' is no mix of lanes; expected batch sizes such as 1,1,2,4,8,16"));
        LaneMix::new(&sizes.map_err(bad)?)
    }
}

/// Which lanes are used under which load: what E-Ebird's offline phase finds (E²bird §7.3.2), or one mix for all (N-Ebird).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MixTable {
    /// By load, items, ascending.
    entries: Vec<(u32, LaneMix)>,
}

impl MixTable {
    /// N-Ebird: one mix, whatever the load, for at most `max` items at once.
    pub fn naive(max: u32) -> Self {
        MixTable { entries: vec![(1, LaneMix::naive(max))] }
    }

    /// One mix, whatever the load.
    ///
    /// # Errors
    /// If it has no lane of one item: what is left over would wait for ever.
    pub fn single(mix: LaneMix) -> Result<Self, BadMix> {
        if mix.count(1) == 0 {
            return Err(BadMix::new(
                "a mix has a lane of batch size 1, or what its other lanes leave over waits for ever",
            ));
        }
        Ok(MixTable { entries: vec![(1, mix)] })
    }

    /// E-Ebird: the best mix for each load. A lane of one and one of two items are added to each, so that a low load, and what a larger
    /// mix leaves over, is served at once (E²bird §7.3.2, table 4).
    ///
    /// # Errors
    /// If there is none, or loads do not ascend.
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

    /// The load that the lanes for `load` waiting and running items were chosen for, and these lanes: of the largest load that is reached.
    pub fn at(&self, load: u32) -> (u32, &LaneMix) {
        let after = self.entries.partition_point(|(from, _)| *from <= load);
        let (load, mix) = &self.entries[after.saturating_sub(1)];
        (*load, mix)
    }

    /// All lanes that are ever used.
    pub fn union(&self) -> LaneMix {
        self.entries.iter().fold(LaneMix::default(), |all, (_, mix)| all.union(mix))
    }

    /// The mixes by load, ascending.
    pub fn entries(&self) -> &[(u32, LaneMix)] {
        &self.entries
    }
}
