//! The partitions of a device between which models move.

use std::collections::BTreeSet;

/// A partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharePart {
    /// The compute units of the partition.
    pub units: u32,
    /// The processors of the partition, if it is a set of them. Sets may have processors in common.
    pub cores: Option<BTreeSet<usize>>,
}

/// All partitions of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShareParts(Vec<SharePart>);

impl ShareParts {
    /// The partitions, in the order of their numbers.
    pub fn new(parts: Vec<SharePart>) -> Self {
        ShareParts(parts)
    }

    /// The number of partitions.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The step of shares: the units of the smallest partition.
    pub fn grain(&self) -> u32 {
        self.0.iter().map(|part| part.units).min().unwrap_or(1).max(1)
    }

    /// The units that a partition counts as.
    pub(super) fn units(&self, partition: usize) -> u32 {
        let grain = self.grain();
        let units = self.0.get(partition).map_or(grain, |part| part.units);
        (units / grain * grain).max(grain)
    }

    /// The units of all partitions together. Units that several partitions share count once: a set
    /// has a unit for each of its cores, and larger sets come first.
    pub fn all_units(&self) -> u32 {
        let sets: Option<Vec<_>> = self.0.iter().map(|part| Some((part.cores.as_ref()?, part.units))).collect();
        let Some(mut sets) = sets else { return self.0.iter().map(|part| part.units).sum() };
        sets.sort_by_key(|(_, units)| std::cmp::Reverse(*units));
        let (mut seen, mut all) = (BTreeSet::new(), 0);
        for (set, units) in sets {
            let new = set.difference(&seen).count();
            all += (units as usize * new / set.len().max(1)) as u32;
            seen.extend(set);
        }
        all
    }

    /// The cores or units that two partitions have in common.
    pub(super) fn common(&self, one: usize, other: usize) -> u32 {
        let cores = |index: usize| self.0.get(index)?.cores.as_ref();
        match (cores(one), cores(other)) {
            (Some(one), Some(other)) => one.intersection(other).count() as u32,
            _ if one == other => self.0.get(one).map_or(0, |part| part.units),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_that_partitions_have_in_common_count_once() {
        let part = |(cores, units): (&[usize], u32)| SharePart { units, cores: Some(cores.iter().copied().collect()) };
        let parts = |parts: &[(&[usize], u32)]| ShareParts::new(parts.iter().copied().map(part).collect());
        assert_eq!(parts(&[(&[0], 1), (&[1], 1), (&[0, 1], 2)]).all_units(), 2);
        let hyperthreads = parts(&[(&[0, 4], 1), (&[0, 1, 4, 5], 2), (&[2, 3, 6, 7], 2)]);
        assert_eq!(hyperthreads.all_units(), 4);
        assert_eq!(parts(&[(&[0, 1], 2), (&[1, 2], 2)]).common(0, 1), 1);
    }
}
