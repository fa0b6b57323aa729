//! Operators that give the same elements in another shape or order, or a part of the elements.

use super::flow::{BATCHES, Flow, Place, RUNS, TYPICAL, product};
use super::operator::{Op, Ruled};
use super::rules_along::of_first;

/// Gives the elements in their order in another shape: `Reshape`, `Flatten`, `Squeeze`,
/// `Unsqueeze`.
pub(super) fn reshape(op: &Op<'_>) -> Ruled {
    let place = of_first(op)?;
    let mut found = None;
    for (run, rows) in BATCHES.iter().enumerate() {
        let (from, to) = (op.dims(0, run)?, op.made(0, run)?);
        let (before, behind) = (product(from), product(to));
        if before != behind && run > 0 && to == op.made(0, 0)? {
            return Err(op.mixed(format!("its shape, {to:?}, is that of a single request")));
        }
        if before != behind || before.is_none_or(|count| count == 0) {
            op.misfit.set(true);
            return Err(op.unknown("the number of elements of its output is not that of its input"));
        }
        // With one row, sizes do not show the place of the rows; they are compared once the place
        // is known.
        if run < TYPICAL {
            continue;
        }
        let place = place.reshaped(from, to, *rows);
        let place = place.ok_or_else(|| op.unknown("it cuts rows into parts, or joins parts of several"))?;
        if found.is_some_and(|found| found != place) {
            return Err(op.unknown("it lays rows out in another way for another number of requests"));
        }
        found = Some(place);
    }
    op.all_rows(found.unwrap_or(place))
}

pub(super) fn transpose(op: &Op<'_>) -> Ruled {
    let (place, rank) = (of_first(op)?, op.rank(0)?);
    let perm = op.step.attributes.iter().find(|attribute| attribute.name == "perm");
    let axis = match perm {
        None => rank.checked_sub(place.axis + 1),
        Some(perm) => perm.ints.iter().position(|axis| usize::try_from(*axis) == Ok(place.axis)),
    };
    op.all_rows(place.on(axis.ok_or_else(|| op.unknown("its axes are not those of its input"))?))
}

pub(super) fn concat(op: &Op<'_>) -> Ruled {
    let all: Vec<usize> = (0..op.count()).collect();
    joined(op, &all)
}

/// A scale and a zero point, then a tensor with its own, and so on.
pub(super) fn quantised_concat(op: &Op<'_>) -> Ruled {
    let tensors: Vec<usize> = (2..op.count()).step_by(3).collect();
    super::rules_along::others_free(op, &tensors)?;
    joined(op, &tensors)
}

fn joined(op: &Op<'_>, inputs: &[usize]) -> Ruled {
    let Some(place) = inputs.iter().find_map(|index| op.place(*index)) else {
        return Err(op.unknown("its inputs have no rows"));
    };
    let along = match inputs.first() {
        Some(first) => op.axis(0, op.rank(*first)?)?,
        None => 0,
    };
    let mut before = 0u64;
    for index in inputs {
        let Some(other) = op.place(*index) else {
            let size = op.dims(*index, TYPICAL)?.get(place.axis).copied().unwrap_or(1);
            return Err(op.mixed(format!("it joins the requests with a constant of {size} rows")));
        };
        if other.axis != place.axis {
            return Err(
                op.mixed(format!("it joins rows along axis {} with rows along axis {}", place.axis, other.axis))
            );
        }
        if other.after != place.after || (along != place.axis && other.before != place.before) {
            return Err(op.mixed("it joins rows that are in another order"));
        }
        before = before.saturating_add(other.before);
    }
    op.all_rows(if along == place.axis { Place { before, ..place } } else { place })
}

/// The begin and the length of a part of the rows' axis, in whole batches; `None` if the part cuts
/// a batch.
fn whole_batches(place: Place, begin: f64, length: f64, rows: u64) -> Option<(f64, u64)> {
    let batch = (place.after.checked_mul(rows)?) as f64;
    let (begin, count) = (begin / batch, length / batch);
    (begin.fract() == 0.0 && count.fract() == 0.0 && count >= 1.0).then_some((begin, count as u64))
}

pub(super) fn split(op: &Op<'_>) -> Ruled {
    let (place, rank) = (of_first(op)?, op.rank(0)?);
    if op.axis(0, rank)? != place.axis {
        return op.all_rows(place);
    }
    let cut = || op.along("cuts the rows apart", place);
    let mut flows = op.all(Flow::Free);
    for (run, rows) in BATCHES.iter().enumerate().skip(TYPICAL) {
        let mut begin = 0.0;
        for (output, flow) in flows.iter_mut().enumerate() {
            let length = *op.made(output, run)?.get(place.axis).ok_or_else(cut)? as f64;
            let (_, before) = whole_batches(place, begin, length, *rows).ok_or_else(cut)?;
            *flow = Flow::Rows(Place { before, ..place });
            begin += length;
        }
    }
    Ok(flows)
}

pub(super) fn slice(op: &Op<'_>) -> Ruled {
    let (place, rank) = (of_first(op)?, op.rank(0)?);
    let cut = || op.along("takes a part", place);
    let mut found = None;
    let mut elsewhere = None;
    for (run, rows) in BATCHES.iter().enumerate() {
        let Bounds { of_rows, others } = bounds(op, place, rank, run)?;
        if elsewhere.get_or_insert_with(|| others.clone()) != &others {
            return Err(op.unknown("it takes another part for another number of requests"));
        }
        let Some([start, _, step]) = of_rows else {
            found = Some(place);
            continue;
        };
        let whole = *op.dims(0, run)?.get(place.axis).ok_or_else(cut)?;
        let begin = (if start < 0.0 { start + whole as f64 } else { start }).clamp(0.0, whole as f64);
        let length = *op.made(0, run)?.get(place.axis).ok_or_else(cut)?;
        if step != 1.0 {
            return Err(cut());
        }
        let (_, before) = whole_batches(place, begin, length as f64, *rows).ok_or_else(cut)?;
        let part = Place { before, ..place };
        if run > TYPICAL && found != Some(part) {
            return Err(op.unknown("it takes another part for another number of requests"));
        }
        found = Some(part);
    }
    op.all_rows(found.unwrap_or(place))
}

/// Start, end and step of a slice in a run.
struct Bounds {
    of_rows: Option<[f64; 3]>,
    /// The bounds of other axes, with the axis.
    others: Vec<(usize, [f64; 3])>,
}

fn bounds(op: &Op<'_>, place: Place, rank: usize, run: usize) -> Result<Bounds, Flow> {
    let numbers = |index, name| op.numbers_in(index, name, run);
    let (starts, ends) = (numbers(1, "starts")?.unwrap_or_default(), numbers(2, "ends")?.unwrap_or_default());
    let axes = numbers(3, "axes")?.unwrap_or_else(|| (0..starts.len()).map(|axis| axis as f64).collect());
    let steps = numbers(4, "steps")?.unwrap_or_else(|| vec![1.0; axes.len()]);
    let mut bounds = Bounds { of_rows: None, others: Vec::new() };
    for (at, axis) in axes.iter().enumerate() {
        let number =
            |of: &[f64]| of.get(at).copied().ok_or_else(|| op.unknown("it has not the same number of bounds as axes"));
        let three = [number(&starts)?, number(&ends)?, number(&steps)?];
        match op.axis_of(*axis, rank)? {
            axis if axis == place.axis => bounds.of_rows = Some(three),
            axis => bounds.others.push((axis, three)),
        }
    }
    Ok(bounds)
}

/// Broadcasts up to a shape: the rows' axis is counted from the last.
pub(super) fn expand(op: &Op<'_>) -> Ruled {
    let (place, from, to) = (of_first(op)?, op.rank(0)?, op.made(0, TYPICAL)?.len());
    let axis = (place.axis + to).checked_sub(from).ok_or_else(|| op.without_sizes())?;
    op.all_rows(place.on(axis))
}

pub(super) fn tile(op: &Op<'_>) -> Ruled {
    let place = of_first(op)?;
    let mut found = None;
    for run in TYPICAL..RUNS {
        let repeats = op.numbers_in(1, "repeats", run)?.unwrap_or_default();
        let times = repeats.get(place.axis).copied().unwrap_or(0.0);
        let before = place.before.saturating_mul(times as u64);
        if found.is_some_and(|found| found != before) || times < 1.0 {
            return Err(op.unknown("it repeats the rows as often as there are requests"));
        }
        found = Some(before);
    }
    op.all_rows(Place { before: found.unwrap_or(place.before), ..place })
}

/// The rows' axis must have no padding.
pub(super) fn pad(op: &Op<'_>) -> Ruled {
    let (place, rank) = (of_first(op)?, op.rank(0)?);
    let pads = op.numbers(1, "pads")?.unwrap_or_default();
    let axes = if op.has(3) {
        op.numbers(3, "axes")?.unwrap_or_default()
    } else {
        (0..rank).map(|axis| axis as f64).collect()
    };
    for (at, axis) in axes.iter().enumerate() {
        let is_padded = [at, at + axes.len()].iter().any(|at| pads.get(*at).is_none_or(|n| *n != 0.0));
        if is_padded && op.axis_of(*axis, rank)? == place.axis {
            return Err(op.along("pads", place));
        }
    }
    op.all_rows(place)
}

/// The rows' axis must keep its size, which the sizes of the output show.
pub(super) fn resize(op: &Op<'_>) -> Ruled {
    let place = of_first(op)?;
    if op.made(0, TYPICAL).is_err() {
        return Err(op.without_sizes());
    }
    if op.string("coordinate_transformation_mode") == "tf_crop_and_resize" {
        return Err(op.unknown("it cuts out a region that its values say"));
    }
    op.all_rows(place)
}

/// Moves blocks of an image to channels, or back.
pub(super) fn space(op: &Op<'_>) -> Ruled {
    match of_first(op)? {
        place if place.axis == 0 => op.all_rows(place),
        place => Err(op.along("moves blocks", place)),
    }
}
