//! Draws one random group of operators for training, of the form that the controller makes.

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::GroupPart;
use downbeat_core::{ModelId, RequestId};
use rand::{Rng, RngExt};

/// Draws a group of the models in `set`, as the controller makes groups (Abacus §5.4, figure 9). At
/// least one request ends in the group. Any number of requests, or none, begin in it with their
/// first operator. All other ends and begins are random.
/// `operators` returns the number of a model's operators; `inputs` draws the items and the length
/// of a request.
pub fn random_group<R: Rng>(
    set: &[usize],
    rng: &mut R,
    operators: impl Fn(usize) -> u16,
    inputs: impl Fn(usize, &mut R) -> (u32, u32),
) -> Vec<GroupPart> {
    let mut chosen = |least: usize| {
        let mut order: Vec<usize> = (0..set.len()).collect();
        (1..order.len()).rev().for_each(|index| order.swap(index, rng.random_range(0..=index)));
        order.truncate(rng.random_range(least..=set.len()));
        order
    };
    let (done, new) = (chosen(1), chosen(0));
    let part = |(index, model): (usize, &usize)| {
        let count = operators(*model);
        let first = if new.contains(&index) { 0 } else { rng.random_range(0..count) };
        let end = if done.contains(&index) { count } else { rng.random_range(first + 1..=count) };
        let (rows, length) = inputs(*model, rng);
        let operators = SegmentRange::new(first, end);
        GroupPart { request: RequestId(*model as u64), model: ModelId(*model as u32), operators, rows, length }
    };
    set.iter().enumerate().map(part).collect()
}
