//! Which groups of operators a predictor is trained with.

use downbeat_core::device::overlap::GroupPart;
use rand::{Rng, RngExt};

use crate::random_group::random_group;

/// A model of which groups are drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SampledModel {
    /// How many operators it has, at least one.
    pub operators: u16,
    /// Items of a request: any of these, all as often; at least one.
    pub rows: Vec<u32>,
    /// The size of the dimension that varies: any of these; none where nothing varies.
    pub lengths: Vec<u32>,
}

/// Draws groups of models, of all sets of them in turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupSampler {
    /// The models, by their numbers in groups.
    pub models: Vec<SampledModel>,
    /// The sets of models that groups are of.
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
