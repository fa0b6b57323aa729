//! Draws training groups from each set of models in turn.

use downbeat_core::device::overlap::GroupPart;
use rand::{Rng, RngExt};

use crate::random_group::random_group;

/// A model in the groups that are drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SampledModel {
    /// The number of the model's operators, at least one.
    pub operators: u16,
    /// Possible item counts of a request, all equally likely; at least one.
    pub rows: Vec<u32>,
    /// Possible sizes of the dimension that varies; empty if none varies.
    pub lengths: Vec<u32>,
}

/// Draws groups from each set of models in turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupSampler {
    /// The models, by their numbers in groups.
    pub models: Vec<SampledModel>,
    /// The sets of models to draw groups of.
    pub sets: Vec<Vec<usize>>,
}

impl GroupSampler {
    /// The `index`-th group and the number of its set; `None` where there is no set.
    pub fn group<R: Rng>(&self, index: u64, mut rng: R) -> Option<(usize, Vec<GroupPart>)> {
        let set = index.checked_rem(self.sets.len() as u64)? as usize;
        let any = |of: &[u32], rng: &mut R| match of.len() {
            0 => 0,
            count => of[rng.random_range(0..count)],
        };
        let inputs = |model: usize, rng: &mut R| {
            let model = &self.models[model];
            (any(&model.rows, rng), any(&model.lengths, rng))
        };
        Some((set, random_group(&self.sets[set], &mut rng, |model| self.models[model].operators, inputs)))
    }
}
