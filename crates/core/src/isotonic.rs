//! The least-squares fit of values that must not fall.

/// Neighbouring values that the fit gives one value: their weighted mean.
struct Block {
    sum: u128,
    weight: u128,
    values: usize,
}

impl Block {
    fn mean(&self) -> u128 {
        self.sum / self.weight
    }
}

/// Fits never falling values to `values` by weighted least squares. Each value comes with its
/// weight; a weight of 0 is taken as 1. The result is exact to one unit, as means are rounded down.
/// `O(n)`.
///
/// `[10, 30, 20, 40]` of equal weights gives `[10, 25, 25, 40]`. The algorithm, *pool adjacent
/// violators*, pools neighbours that fall. A wild value pools with the values above it, until their
/// mean no longer lies above the next value. So a wild value moves the others no further than its
/// weight allows.
pub fn isotonic_fit(values: impl IntoIterator<Item = (u64, u32)>) -> Vec<u64> {
    let mut blocks: Vec<Block> = Vec::new();
    for (value, weight) in values {
        let weight = u128::from(weight.max(1));
        let mut block = Block { sum: u128::from(value) * weight, weight, values: 1 };
        while let Some(before) = blocks.pop_if(|before| before.mean() > block.mean()) {
            block.sum += before.sum;
            block.weight += before.weight;
            block.values += before.values;
        }
        blocks.push(block);
    }
    let fitted = |block: &Block| std::iter::repeat_n(u64::try_from(block.mean()).unwrap_or(u64::MAX), block.values);
    blocks.iter().flat_map(fitted).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The best of all ways to cut the values into blocks whose means do not fall.
    fn by_search(values: &[(u64, u32)]) -> Vec<f64> {
        let mut best: Option<(f64, Vec<f64>)> = None;
        for cuts in 0..1u32 << (values.len() - 1) {
            let (mut fitted, mut error, mut first) = (Vec::new(), 0.0, 0);
            for end in 1..=values.len() {
                if end < values.len() && cuts & (1 << (end - 1)) == 0 {
                    continue;
                }
                let block = &values[first..end];
                let weight: f64 = block.iter().map(|(_, weight)| f64::from(*weight)).sum();
                let mean = block.iter().map(|(value, weight)| *value as f64 * f64::from(*weight)).sum::<f64>() / weight;
                error += block.iter().map(|(v, w)| f64::from(*w) * (*v as f64 - mean).powi(2)).sum::<f64>();
                fitted.extend(std::iter::repeat_n(mean, block.len()));
                first = end;
            }
            if fitted.is_sorted() && best.as_ref().is_none_or(|(least, _)| error < *least) {
                best = Some((error, fitted));
            }
        }
        best.unwrap().1
    }

    #[test]
    fn neighbours_in_the_wrong_order_are_pooled_by_weight() {
        let fit = |values: &[(u64, u32)]| isotonic_fit(values.iter().copied());
        assert_eq!(fit(&[(10, 1), (30, 1), (20, 1), (40, 1)]), [10, 25, 25, 40]);
        assert_eq!(fit(&[(10, 1), (30, 1), (20, 9), (40, 1)]), [10, 21, 21, 40]);
        assert_eq!(fit(&[(5, 0), (1, 0)]), [3, 3], "no weight is a weight of one");
        assert_eq!(fit(&[(u64::MAX, u32::MAX), (u64::MAX - 2, u32::MAX)]), [u64::MAX - 1; 2]);
        assert_eq!(fit(&[]), [0; 0]);
    }

    proptest! {
        #[test]
        fn it_is_the_least_squares_fit_of_a_search(values in prop::collection::vec((1..1000u64, 1..9u32), 1..9)) {
            let fitted = isotonic_fit(values.iter().copied());
            prop_assert!(fitted.is_sorted(), "{fitted:?}");
            for (ours, theirs) in fitted.iter().zip(by_search(&values)) {
                prop_assert!((*ours as f64 - theirs).abs() <= 1.0, "{fitted:?} of {values:?}: {theirs}");
            }
        }

        /// A stalled value of weight 1 adds at most its excess over the weight behind it, however
        /// far off it is.
        #[test]
        fn a_wild_value_moves_the_larger_ones_by_its_weight(
            steps in prop::collection::vec(0..100u64, 3..12),
            at in 0..12usize,
            stall in 1..10_000_000u64,
            weight in 2..200u32,
        ) {
            let mut level = 1_000;
            let mut values: Vec<(u64, u32)> = steps.iter().map(|step| { level += step; (level, weight) }).collect();
            let at = at % (values.len() - 1);
            let without = isotonic_fit(values.iter().copied());
            values[at] = (values[at].0 + stall, 1);
            let with = isotonic_fit(values.iter().copied());
            for (index, (with, without)) in with.iter().zip(&without).enumerate().skip(at + 1) {
                // Pooled with the values from `at` to this one at least.
                let most = without + stall / u64::from(1 + weight * (index - at) as u32) + 1;
                prop_assert!(*with <= most, "size {index}: {with}, without the stall {without}, allowed {most}");
            }
            prop_assert_eq!(&with[..at], &without[..at], "smaller sizes stay as they are");
        }
    }
}
