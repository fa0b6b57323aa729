//! Quantiles of measurements.

use std::cmp::Ordering;

/// The quantiles of the values for these shares (0 to 1), by nearest rank. NaN does not count.
/// `None` if no value counts.
pub fn quantiles<T: PartialOrd + Copy, const N: usize>(
    values: impl IntoIterator<Item = T>,
    shares: [f64; N],
) -> Option<[T; N]> {
    let mut sorted: Vec<T> = values.into_iter().filter(|value| value.partial_cmp(value).is_some()).collect();
    sorted.sort_unstable_by(|a, b| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    let last = sorted.len().checked_sub(1)?;
    Some(shares.map(|share| sorted[((last as f64 * share).round() as usize).min(last)]))
}

/// The median: the larger of the two middle values if the number of values is even. `None` if no
/// value counts.
pub fn median<T: PartialOrd + Copy>(values: impl IntoIterator<Item = T>) -> Option<T> {
    quantiles(values, [0.5]).map(|[median]| median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_there_are() {
        assert_eq!(quantiles((1..=101).rev(), [0.0, 0.05, 0.5, 0.95, 1.0]), Some([1, 6, 51, 96, 101]));
        assert_eq!((median([4, 1, 3, 2]), median([7]), median::<u64>([])), (Some(3), Some(7), None));
    }

    #[test]
    fn what_is_no_number_does_not_count() {
        assert_eq!(median([f64::NAN, 2.0, f64::NAN, 1.0, 3.0]), Some(2.0));
        assert_eq!(quantiles([f64::NAN], [0.5]), None);
    }
}
