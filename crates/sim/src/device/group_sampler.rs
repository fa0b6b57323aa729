//! Which groups of operators a predictor is trained with.

use downbeat_core::device::overlap::GroupPart;
use downbeat_training::random_group;
use rand::RngExt;
use rand_pcg::Pcg64;

use crate::arrivals::random;

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
    /// Chooses all random numbers.
    pub seed: u64,
}

impl GroupSampler {
    /// The `index`-th group, by that alone, and the number of its set; `None` where there is no set.
    pub fn group(&self, index: u64) -> Option<(usize, Vec<GroupPart>)> {
        let set = index.checked_rem(self.sets.len() as u64)? as usize;
        let mut rng = random(self.seed, index);
        let any = |of: &[u32], rng: &mut Pcg64| match of.len() {
            0 => 0,
            count => of[rng.random_range(0..count)],
        };
        let inputs = |model: usize, rng: &mut Pcg64| {
            let model = &self.models[model];
            (any(&model.rows, rng), any(&model.lengths, rng))
        };
        Some((set, random_group(&self.sets[set], &mut rng, |model| self.models[model].operators, inputs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Abacus §5.4, figure 9.
    #[test]
    fn groups_follow_from_seed_and_index_and_one_of_their_models_is_done() {
        let model = |operators| SampledModel { operators, rows: vec![1, 8], lengths: Vec::new() };
        let with_length = SampledModel { lengths: vec![16, 64], ..model(1) };
        let sets = vec![vec![0], vec![1], vec![0, 1], vec![0, 1, 2]];
        let sampler = GroupSampler { models: vec![model(5), with_length, model(3)], sets, seed: 7 };
        let (mut firsts, mut ends, mut done) = ([0; 5], [0; 6], [0; 4]);
        for index in 0..2_000 {
            let (set, group) = sampler.group(index).unwrap();
            assert_eq!(sampler.group(index), Some((set, group.clone())));
            assert_eq!(group.iter().map(|part| part.model.0 as usize).collect::<Vec<_>>(), sampler.sets[set]);
            let of = |part: &GroupPart| &sampler.models[part.model.0 as usize];
            let is_done = |part: &&GroupPart| part.operators.end == of(part).operators;
            assert!(group.iter().any(|part| is_done(&part)), "{group:?}");
            done[group.iter().filter(is_done).count()] += 1;
            for part in &group {
                assert!(part.operators.first < part.operators.end && part.operators.end <= of(part).operators);
                if part.model.0 == 0 {
                    firsts[usize::from(part.operators.first)] += 1;
                    ends[usize::from(part.operators.end)] += 1;
                }
                assert!(of(part).rows.contains(&part.rows));
                assert!(of(part).lengths.contains(&part.length) || part.length == 0 && of(part).lengths.is_empty());
            }
        }
        assert!(firsts[1..].iter().all(|count| *count > 50), "others go on anywhere: {firsts:?}");
        assert!(firsts[0] > firsts[1..].iter().sum(), "newcomers begin with their first operator: {firsts:?}");
        assert!(ends[1..].iter().all(|count| *count > 20) && ends[5] > ends[1..5].iter().sum(), "{ends:?}");
        assert!(done[1] > 100 && done[2] > 100 && done[3] > 50, "one of them is done, or several: {done:?}");
        assert_eq!(GroupSampler { sets: Vec::new(), ..sampler }.group(3), None);
    }
}
