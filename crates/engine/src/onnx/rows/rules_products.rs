//! Products of matrices, convolutions, pools, and networks with a state.

use super::flow::{Flow, Place, TYPICAL};
use super::operator::{Op, Ruled};
use super::rules_along::{of_first, others_free};
use crate::onnx::further_size_rules::{Einsum, Label};

/// `MatMul`, and its forms with both matrices first.
pub(super) fn matmul(op: &Op<'_>) -> Ruled {
    product_of(op, 0, 1)
}

pub(super) fn scaled_matmul(op: &Op<'_>) -> Ruled {
    product_of(op, 0, 1)
}

pub(super) fn quantised_matmul(op: &Op<'_>) -> Ruled {
    product_of(op, 0, 3)
}

/// The role of an axis of a factor: a batch, an axis of the result, or the axis that the product
/// sums over.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// Counted from the last batch axis.
    Batch(usize),
    Kept,
    Summed,
}

fn part(axis: usize, rank: usize, is_first: bool, is_turned: bool) -> Part {
    let (last, is_vector) = (axis + 1 == rank, rank == 1);
    if axis + 2 < rank {
        return Part::Batch(rank - 3 - axis);
    }
    // The product sums over the last axis of the first factor, and over the second-last axis of the
    // second factor.
    let summed = is_vector || (last == (is_first != is_turned));
    if summed { Part::Summed } else { Part::Kept }
}

fn product_of(op: &Op<'_>, a: usize, b: usize) -> Ruled {
    others_free(op, &[a, b])?;
    let (a_rank, b_rank, made) = (op.rank(a)?, op.rank(b)?, op.made(0, TYPICAL)?.len());
    let of = |index: usize, rank: usize, turned: &str| {
        let place = op.place(index)?;
        Some((place, part(place.axis, rank, index == a, op.int(turned, 0) != 0)))
    };
    let (first, second) = (of(a, a_rank, "transA"), of(b, b_rank, "transB"));
    for (place, part) in [first, second].into_iter().flatten() {
        if part == Part::Summed {
            return Err(op.along("adds up products", place));
        }
    }
    // Among the axes of the result, the batches come first, then the axes of the factors unless
    // they are vectors.
    let kept = usize::from(a_rank > 1) + usize::from(b_rank > 1);
    let batch = |back: usize| (made.checked_sub(kept + 1)?).checked_sub(back);
    let place = match (first, second) {
        (Some((place, Part::Batch(back))), None) | (None, Some((place, Part::Batch(back)))) => {
            let (other, rank) = if first.is_some() { (b, b_rank) } else { (a, a_rank) };
            let dims = op.dims(other, TYPICAL)?;
            let size = rank.checked_sub(3 + back).and_then(|axis| dims.get(axis)).copied().unwrap_or(1);
            if size != 1 {
                return Err(op.mixed(format!("it multiplies the requests with a constant of {size} rows")));
            }
            batch(back).map(|axis| place.on(axis))
        }
        (Some((a, Part::Batch(x))), Some((b, Part::Batch(y))))
            if x == y && (a.before, a.after) == (b.before, b.after) =>
        {
            batch(x).map(|axis| a.on(axis))
        }
        (Some((place, _)), None) => made.checked_sub(1 + usize::from(b_rank > 1)).map(|axis| place.on(axis)),
        (None, Some((place, _))) => made.checked_sub(1).map(|axis| place.on(axis)),
        (Some(_), Some(_)) => return Err(op.mixed("it multiplies rows of different requests with each other")),
        (None, None) => None,
    };
    op.all_rows(place.ok_or_else(|| op.without_sizes())?)
}

pub(super) fn gemm(op: &Op<'_>) -> Ruled {
    gemm_of(op, 1, 2)
}

pub(super) fn quantised_gemm(op: &Op<'_>) -> Ruled {
    gemm_of(op, 3, 6)
}

fn gemm_of(op: &Op<'_>, b: usize, c: usize) -> Ruled {
    others_free(op, &[0, b, c])?;
    let of = |index: usize, turned: &str, kept: usize| match op.place(index) {
        None => Ok(None),
        Some(place) if (place.axis == kept) == (op.int(turned, 0) == 0) => Ok(Some(place.on(kept))),
        Some(place) => Err(op.along("adds up products", place)),
    };
    let place = match (of(0, "transA", 0)?, of(b, "transB", 1)?) {
        (Some(_), Some(_)) => return Err(op.mixed("it multiplies rows of different requests with each other")),
        (first, second) => first.or(second),
    };
    let added = match op.place(c) {
        None => None,
        Some(place) => Some(place.on((place.axis + 2).checked_sub(op.rank(c)?).ok_or_else(|| op.without_sizes())?)),
    };
    match (place, added) {
        (Some(place), None) => {
            let there = |rank: usize| (place.axis + rank).checked_sub(2);
            let dims = if op.has(c) { op.dims(c, TYPICAL)? } else { &[] };
            let size = there(dims.len()).and_then(|axis| dims.get(axis)).copied().unwrap_or(1);
            if size != 1 {
                return Err(op.mixed(format!("it combines the requests with a constant of {size} rows")));
            }
            op.all_rows(place)
        }
        (None, Some(place)) => op.all_rows(place),
        (Some(place), Some(added)) if place == added => op.all_rows(place),
        (Some(_), Some(_)) => Err(op.mixed("it adds rows of different requests to each other")),
        (None, None) => Ok(op.all(Flow::Free)),
    }
}

pub(super) fn einsum(op: &Op<'_>) -> Ruled {
    let known = op.known.get(TYPICAL);
    let equation = known.and_then(Einsum::of).ok_or_else(|| op.unknown("its equation does not fit its inputs"))?;
    let mut found: Option<(Label, Place)> = None;
    for (index, term) in equation.terms.iter().enumerate() {
        let Some(place) = op.place(index) else { continue };
        let label = *term.get(place.axis).ok_or_else(|| op.without_sizes())?;
        if term.iter().filter(|other| **other == label).count() > 1 {
            return Err(op.along("takes a diagonal", place));
        }
        match found {
            Some((other, rows)) if other != label || (rows.before, rows.after) != (place.before, place.after) => {
                return Err(op.mixed("it multiplies rows of different requests with each other"));
            }
            _ => found = Some((label, place)),
        }
    }
    let (label, place) = found.ok_or_else(|| op.unknown("its inputs have no rows"))?;
    for (index, term) in equation.terms.iter().enumerate().filter(|(index, _)| op.place(*index).is_none()) {
        let dims = op.dims(index, TYPICAL)?;
        if term.iter().zip(dims).any(|(other, size)| *other == label && *size != 1) {
            return Err(op.mixed("it multiplies the requests with a constant of several rows"));
        }
    }
    let axis = equation.made.iter().position(|other| *other == label);
    op.all_rows(place.on(axis.ok_or_else(|| op.along("adds up products", place))?))
}

/// Images by weights: the first axis has the images.
pub(super) fn convolution(op: &Op<'_>) -> Ruled {
    match of_first(op)? {
        place if place.axis == 0 => op.all_rows(place),
        place => Err(op.along("adds up products", place)),
    }
}

/// Works on each channel of each image. Positions, the second output of `MaxPool`, count from the
/// first image.
pub(super) fn pool(op: &Op<'_>) -> Ruled {
    let place = of_first(op)?;
    if place.axis != 0 && (place.axis != 1 || op.int("channels_last", 0) != 0) {
        return Err(op.along("computes one value", place));
    }
    let positions = || op.mixed("the positions that it gives count from the first element of all requests");
    let of = |output: usize| if output == 0 { Flow::Rows(place) } else { positions() };
    Ok((0..op.node.output.len()).map(of).collect())
}

/// `RNN`, `GRU`, `LSTM`: a sequence, a batch, features; with `layout` 1 the batch comes first.
pub(super) fn recurrent(op: &Op<'_>) -> Ruled {
    const LENGTHS: usize = 4;
    const STATES: [usize; 2] = [5, 6];
    others_free(op, &[0, LENGTHS, STATES[0], STATES[1]])?;
    let batch_first = op.int("layout", 0) != 0;
    let batch = if batch_first { 0 } else { 1 };
    let all = (0..op.count()).find_map(|index| op.place(index)).ok_or_else(|| op.unknown("its inputs have no rows"))?;
    match op.place(0) {
        Some(place) if place.axis == 1 - batch => {
            return Err(op.mixed(format!("axis {}, along which requests are joined, is its sequence", place.axis)));
        }
        Some(place) if place.axis != batch => return Err(op.along("adds up products", place)),
        Some(_) => {}
        None => return Err(op.unknown("its sequences are weights and its states are not")),
    }
    let state = all.on(batch);
    let fits = |index: usize, there: Place| !op.has(index) || op.place(index) == Some(there);
    if !fits(LENGTHS, all.on(0)) || !STATES.iter().all(|index| fits(*index, state)) {
        return Err(op.unknown("its states or lengths are not one for each row"));
    }
    let of = |output: usize| match (output, batch_first) {
        (0, false) => Flow::Rows(all.on(2)),
        (0, true) => Flow::Rows(all.on(0)),
        _ => Flow::Rows(state),
    };
    Ok((0..op.node.output.len()).map(of).collect())
}
