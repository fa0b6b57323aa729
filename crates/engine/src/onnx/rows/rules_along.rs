//! Operators that compute element by element, and operators that work along axes: sums, norms,
//! sorting.

use super::flow::{Flow, Place, TYPICAL};
use super::operator::{Op, Ruled};

/// Works element by element: the rows keep their axis, and all inputs with rows have them on the
/// same axis.
pub(super) fn keeps(op: &Op<'_>) -> Ruled {
    let present: Vec<usize> = (0..op.count()).filter(|index| op.has(*index)).collect();
    op.all_rows(broadcast(op, &present)?)
}

/// The same for some of the inputs; the others are scales and zero points.
pub(super) fn broadcast_rule(op: &Op<'_>, indices: &[usize]) -> Ruled {
    others_free(op, indices)?;
    op.all_rows(broadcast(op, indices)?)
}

/// The place of the rows in the result of these inputs, element by element.
pub(super) fn broadcast(op: &Op<'_>, indices: &[usize]) -> Result<Place, Flow> {
    let without = || op.unknown("its inputs have no rows");
    if let [index] = indices {
        return op.place(*index).ok_or_else(without);
    }
    let ranks = indices.iter().map(|index| op.rank(*index)).collect::<Result<Vec<_>, _>>()?;
    let most = ranks.iter().copied().max().unwrap_or(0);
    let places = indices.iter().zip(&ranks).filter_map(|(index, rank)| {
        let place = op.place(*index)?;
        Some(place.on(place.axis + most - rank))
    });
    let places: Vec<Place> = places.collect();
    let first = *places.first().ok_or_else(without)?;
    if let Some(other) = places.iter().find(|place| **place != first) {
        return Err(if other.axis == first.axis {
            op.mixed(format!(
                "it pairs rows of different requests: they are in another order along axis {}",
                first.axis
            ))
        } else {
            op.mixed(format!("it pairs rows along axis {} with rows along axis {}", first.axis, other.axis))
        });
    }
    let size = |index: usize, rank: usize, axis: usize| -> Result<u64, Flow> {
        let dims = op.dims(index, TYPICAL)?;
        Ok((axis + rank).checked_sub(most).and_then(|axis| dims.get(axis)).copied().unwrap_or(1))
    };
    for axis in 0..most {
        let mut common = 1;
        for (index, rank) in indices.iter().zip(&ranks) {
            let size = size(*index, *rank, axis)?;
            if axis == first.axis && op.place(*index).is_none() && size != 1 {
                return Err(op.mixed(format!("it combines the requests with a constant of {size} rows")));
            }
            if size != 1 && common != 1 && size != common {
                op.misfit.set(true);
            }
            common = common.max(size);
        }
    }
    Ok(first)
}

/// Checks that no other input has rows.
pub(super) fn others_free(op: &Op<'_>, indices: &[usize]) -> Result<(), Flow> {
    match (0..op.count()).find(|index| !indices.contains(index) && op.place(*index).is_some()) {
        Some(index) => Err(op.unknown(format!("its input {index} depends on the requests"))),
        None => Ok(()),
    }
}

/// The rows of the first input. No other input may have rows.
pub(super) fn of_first(op: &Op<'_>) -> Result<Place, Flow> {
    others_free(op, &[0])?;
    op.place(0).ok_or_else(|| op.unknown("its first input has no rows"))
}

/// Works on each element of the first input, with bounds or scales that are weights.
pub(super) fn first_only(op: &Op<'_>) -> Ruled {
    let place = of_first(op)?;
    op.all_rows(place)
}

pub(super) fn mixes_all(op: &Op<'_>, does: &str) -> Ruled {
    Err(op.mixed(format!("it {does}")))
}

/// The rows of the first input, unless `mixes` holds for their axis.
fn unless(op: &Op<'_>, does: &str, mixes: impl Fn(usize) -> bool) -> Ruled {
    let place = of_first(op)?;
    if mixes(place.axis) { Err(op.along(does, place)) } else { op.all_rows(place) }
}

/// Before version 13 a softmax covers every axis from `axis` on, and since then that axis alone.
pub(super) fn softmax(op: &Op<'_>) -> Ruled {
    let rank = op.rank(0)?;
    let axis = op.axis(if op.opset < 13 { 1 } else { -1 }, rank)?;
    unless(op, "normalises", |rows| if op.opset < 13 { rows >= axis } else { rows == axis })
}

pub(super) fn layer_norm(op: &Op<'_>) -> Ruled {
    let axis = op.axis(-1, op.rank(0)?)?;
    unless(op, "normalises", |rows| rows >= axis)
}

/// The sum of two inputs, normalised along the last axis.
pub(super) fn skip_norm(op: &Op<'_>) -> Ruled {
    others_free(op, &[0, 1])?;
    let (place, rank) = (broadcast(op, &[0, 1])?, op.rank(0)?);
    if place.axis + 1 == rank { Err(op.along("normalises", place)) } else { op.all_rows(place) }
}

pub(super) fn lp_norm(op: &Op<'_>) -> Ruled {
    let axis = op.axis(-1, op.rank(0)?)?;
    unless(op, "normalises", |rows| rows == axis)
}

pub(super) fn mean_norm(op: &Op<'_>) -> Ruled {
    let axes = axes_of(op, 1, &[0.0, 2.0, 3.0])?;
    unless(op, "normalises", |rows| axes.contains(&rows))
}

/// Normalises across channels at each place.
pub(super) fn local_norm(op: &Op<'_>) -> Ruled {
    unless(op, "normalises", |rows| rows == 1)
}

/// Normalises each channel of each image.
pub(super) fn instance_norm(op: &Op<'_>) -> Ruled {
    unless(op, "normalises", |rows| rows > 1)
}

/// Normalises groups of channels of each image.
pub(super) fn group_norm(op: &Op<'_>) -> Ruled {
    unless(op, "normalises", |rows| rows > 0)
}

pub(super) fn batch_norm(op: &Op<'_>) -> Ruled {
    let outputs = op.node.output.iter().filter(|name| !name.is_empty()).count();
    let place = of_first(op)?;
    let trains = match op.opset {
        ..7 => op.int("is_test", 0) == 0,
        7..14 => outputs > 1,
        _ => op.int("training_mode", 0) != 0,
    };
    match place.axis {
        _ if trains => Err(op.mixed("it normalises with the mean of all requests, as in training")),
        1 => Err(op.along("has weights by position", place)),
        _ => op.all_rows(place),
    }
}

/// The axes of an input or attribute, or the default if both are left out.
fn axes_of(op: &Op<'_>, index: usize, default: &[f64]) -> Result<Vec<usize>, Flow> {
    let (rank, axes) = (op.rank(0)?, op.numbers(index, "axes")?);
    axes.unwrap_or_else(|| default.to_vec()).into_iter().map(|axis| op.axis_of(axis, rank)).collect()
}

pub(super) fn reduce(op: &Op<'_>) -> Ruled {
    let (place, mut axes) = (of_first(op)?, axes_of(op, 1, &[])?);
    if axes.is_empty() {
        if op.int("noop_with_empty_axes", 0) != 0 {
            return op.all_rows(place);
        }
        axes = (0..op.rank(0)?).collect();
    }
    without_axes(op, place, &axes, "computes one value")
}

pub(super) fn arg(op: &Op<'_>) -> Ruled {
    let axis = op.axis(0, op.rank(0)?)?;
    without_axes(op, of_first(op)?, &[axis], "looks for the largest or smallest value")
}

/// The rows once these axes are removed, or have the size 1.
fn without_axes(op: &Op<'_>, place: Place, axes: &[usize], does: &str) -> Ruled {
    if axes.contains(&place.axis) {
        return Err(op.along(does, place));
    }
    let gone = if op.int("keepdims", 1) != 0 { 0 } else { axes.iter().filter(|axis| **axis < place.axis).count() };
    op.all_rows(place.on(place.axis - gone))
}

pub(super) fn cum_sum(op: &Op<'_>) -> Ruled {
    let axis = op.numbers(1, "axis")?.and_then(|axis| axis.first().copied()).unwrap_or(0.0);
    let axis = op.axis_of(axis, op.rank(0)?)?;
    unless(op, "adds up", |rows| rows == axis)
}

pub(super) fn top_k(op: &Op<'_>) -> Ruled {
    let axis = op.axis(-1, op.rank(0)?)?;
    unless(op, "sorts", |rows| rows == axis)
}

/// Adds a new axis, before or behind the rows.
pub(super) fn one_hot(op: &Op<'_>) -> Ruled {
    let (place, rank) = (of_first(op)?, op.rank(0)?);
    let axis = op.axis(-1, rank + 1)?;
    op.all_rows(place.on(place.axis + usize::from(axis <= place.axis)))
}

/// Keeps part of each matrix of the last two axes.
pub(super) fn trilu(op: &Op<'_>) -> Ruled {
    let rank = op.rank(0)?;
    // The number of rows must not decide the triangle.
    op.numbers(1, "k")?;
    unless(op, "keeps a triangle", |rows| rows + 2 >= rank)
}

/// Reverses the sequence of each row, up to a length that the row gives.
pub(super) fn reverse(op: &Op<'_>) -> Ruled {
    let rank = op.rank(0)?;
    let axis = |name: &str, default: i64| op.axis_of(op.int(name, default) as f64, rank);
    let (batch, time) = (axis("batch_axis", 1)?, axis("time_axis", 0)?);
    let place = op.place(0).ok_or_else(|| op.unknown("its first input has no rows"))?;
    match op.place(1) {
        _ if place.axis == time => Err(op.along("reverses", place)),
        None if place.axis != batch => op.all_rows(place),
        Some(lengths) if place.axis == batch && lengths == place.on(0) => op.all_rows(place),
        _ => Err(op.unknown("its lengths are not one for each row")),
    }
}
