//! Operators that choose elements by their positions.

use super::flow::{Flow, Place};
use super::operator::{Op, Ruled};

pub(super) fn gather(op: &Op<'_>) -> Ruled {
    let rank = op.rank(0)?;
    let along = op.axis(0, rank)?;
    match (op.place(0), op.place(1)) {
        // From a table each row takes its own element.
        (None, Some(indices)) => op.all_rows(indices.on(indices.axis + along)),
        (Some(place), None) if place.axis == along => Err(op.along("chooses by constant positions", place)),
        (Some(place), None) if place.axis < along => op.all_rows(place),
        (Some(place), None) => {
            let axis = (place.axis + op.rank(1)?).checked_sub(1).ok_or_else(|| op.without_sizes())?;
            op.all_rows(place.on(axis))
        }
        (Some(place), Some(_)) if place.axis == along => Err(op.along("lets values of the requests choose", place)),
        (Some(_), Some(_)) => Err(op.mixed("it looks up the positions of every row in every row")),
        (None, None) => Ok(op.all(Flow::Free)),
    }
}

pub(super) fn gather_elements(op: &Op<'_>) -> Ruled {
    let along = op.axis(0, op.rank(0)?)?;
    match (op.place(0), op.place(1)) {
        (None, Some(indices)) if indices.axis == along => op.all_rows(indices),
        (Some(place), Some(indices)) if place == indices && place.axis != along => op.all_rows(place),
        (Some(place), Some(_)) if place.axis == along => Err(op.along("lets values of the requests choose", place)),
        _ => Err(op.unknown("its positions are not one for each row")),
    }
}

pub(super) fn gather_nd(op: &Op<'_>) -> Ruled {
    let (rank, skipped) = (op.rank(1)?, usize::try_from(op.int("batch_dims", 0)).unwrap_or(0));
    let depth = op.dims(1, super::flow::TYPICAL)?.last().copied().unwrap_or(0);
    let depth = usize::try_from(depth).unwrap_or(usize::MAX).saturating_add(skipped);
    match (op.place(0), op.place(1)) {
        (Some(place), Some(indices)) if place == indices && place.axis < skipped => op.all_rows(place),
        (None, Some(indices)) if indices.axis >= skipped && indices.axis + 1 < rank => op.all_rows(indices),
        (Some(place), None) if place.axis >= depth => op.all_rows(place.on(place.axis - depth + rank - 1)),
        (Some(place), None) if place.axis >= skipped => Err(op.along("chooses by constant positions", place)),
        _ => Err(op.unknown("its positions may be in rows of other requests")),
    }
}

pub(super) fn scatter_elements(op: &Op<'_>) -> Ruled {
    let along = op.axis(0, op.rank(0)?)?;
    match (op.place(0), op.place(1), op.place(2)) {
        (Some(data), Some(indices), Some(updates)) if data == indices && data == updates && data.axis != along => {
            op.all_rows(data)
        }
        _ => Err(op.unknown("it may write into rows of other requests")),
    }
}

pub(super) fn scatter_nd(op: &Op<'_>) -> Ruled {
    let depth = op.dims(1, super::flow::TYPICAL)?.last().copied().unwrap_or(0);
    let (rank, depth) = (op.rank(1)?, usize::try_from(depth).unwrap_or(usize::MAX));
    let in_updates = |place: Place| Some(place.on((place.axis.checked_sub(depth)? + rank).checked_sub(1)?));
    match (op.place(0), op.place(1), op.place(2)) {
        (Some(data), None, updates) if updates.is_some() && updates == in_updates(data) => op.all_rows(data),
        _ => Err(op.unknown("it may write into rows of other requests")),
    }
}

/// A value decides which elements are kept.
pub(super) fn compress(op: &Op<'_>) -> Ruled {
    let has_axis = op.step.attributes.iter().any(|attribute| attribute.name == "axis");
    match (op.place(0), op.place(1)) {
        (Some(place), None) if has_axis && op.axis(0, op.rank(0)?)? != place.axis => op.all_rows(place),
        _ => Err(op.mixed("it keeps some of the elements of all requests together")),
    }
}

/// The results of all requests are in one list.
pub(super) fn unique(op: &Op<'_>) -> Ruled {
    Err(op.mixed("it gives one list of what it finds in all requests together"))
}
