//! The dependence of a value on the rows of the batch, and the axis of the rows.

use std::rc::Rc;

use super::cause::Cause;

/// The batch sizes for which the sizes of all values are computed side by side. They tell a size of
/// the batch from a constant. Size 1 is a single request. The primes show in products, and the last
/// size in limits and remainders.
pub(super) const BATCHES: [u64; 5] = [1, 2, 7, 11, 720_720];
/// The number of batch sizes.
pub(super) const RUNS: usize = BATCHES.len();
/// The run with a batch of 7 rows: the first in which a size of the batch is unlike most constants.
pub(super) const TYPICAL: usize = 2;

/// The dependence of a value on the rows of the batch. Sizes are stored separately.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Flow {
    /// The value does not depend on the batch: a weight, or a value that is made of weights and of
    /// other sizes.
    Free,
    /// The value depends on the number of rows and on no row: `Shape` of the batch. If `listed`,
    /// its elements are sizes themselves. Then an element that is the same for all batch sizes does
    /// not depend on the batch. Otherwise they are computed, and a comparison may differ for a
    /// batch size that was not tried.
    Sized { listed: bool },
    /// Inside a `Scan` over the rows: the value depends on one row.
    Row,
    /// One axis of the value has the rows. The elements of a row depend on this row only.
    Rows(Place),
    /// An operator mixed the rows.
    Mixed(Rc<Cause>),
    /// No rule decides.
    Unknown(Rc<Cause>),
}

/// The place of the rows: the size of `axis` is `before` x rows x `after`, so that index `i`
/// belongs to row `i / after % rows`.
///
/// Example: [rows, heads, S] in the shape [rows x heads, S] has `before` 1 and `after` heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub axis: usize,
    pub before: u64,
    pub after: u64,
}

impl Place {
    /// Rows on an axis of their own.
    pub fn plain(axis: usize) -> Place {
        Place { axis, before: 1, after: 1 }
    }

    /// The same rows on another axis.
    pub fn on(self, axis: usize) -> Place {
        Place { axis, ..self }
    }

    /// The size of the axis for this number of rows.
    pub fn size(self, rows: u64) -> Option<u64> {
        self.before.checked_mul(rows)?.checked_mul(self.after)
    }

    /// The place of the rows once the elements, in their order, have another shape.
    pub fn reshaped(self, from: &[u64], to: &[u64], rows: u64) -> Option<Place> {
        let of_row = product(from.get(self.axis + 1..)?)?.checked_mul(self.after)?;
        let all = of_row.checked_mul(rows)?;
        let mut below = 1u64;
        for (axis, size) in to.iter().enumerate().rev() {
            let from_here = below.checked_mul(*size)?;
            if below == 0 || of_row == 0 {
                return None;
            }
            if below <= of_row && from_here >= all {
                let fits = of_row % below == 0 && from_here % all == 0;
                return fits.then(|| Place { axis, before: from_here / all, after: of_row / below });
            }
            below = from_here;
        }
        None
    }
}

/// The product; `None` if it exceeds 64 bits.
pub(super) fn product(dims: &[u64]) -> Option<u64> {
    dims.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_again_in_another_shape() {
        let place = |axis, before, after| Place { axis, before, after };
        type Case<'a> = (Place, &'a [u64], &'a [u64], Option<Place>);
        let cases: &[Case<'_>] = &[
            (Place::plain(0), &[7, 5, 6], &[35, 6], Some(place(0, 1, 5))),
            (Place::plain(0), &[7, 5, 6], &[7, 30], Some(Place::plain(0))),
            (Place::plain(0), &[7, 5, 6], &[210], Some(place(0, 1, 30))),
            (Place::plain(1), &[5, 7, 6], &[35, 6], Some(place(0, 5, 1))),
            (Place::plain(1), &[5, 7, 12], &[5, 21, 4], Some(place(1, 1, 3))),
            (place(0, 5, 1), &[35, 6], &[5, 7, 6], Some(Place::plain(1))),
            (place(0, 1, 3), &[21, 4], &[7, 12], Some(Place::plain(0))),
            // A row of 6 elements would be cut in two, and an empty row would be lost.
            (Place::plain(0), &[7, 6], &[6, 7], None),
            (Place::plain(0), &[7, 6], &[42, 0], None),
            (Place::plain(0), &[7, 0], &[7], None),
        ];
        for (from, shape, to, expected) in cases {
            assert_eq!(from.reshaped(shape, to, 7), *expected, "{from:?} of {shape:?} as {to:?}");
        }
    }
}
