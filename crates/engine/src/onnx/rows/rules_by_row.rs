//! Operators whose inputs and outputs all have the batch on axis 0, by their definition.

use super::flow::{BATCHES, Flow, Place, TYPICAL, product};
use super::operator::{Op, Ruled};
use super::rules_along::{first_only, of_first, others_free};

/// Classical models and fused blocks make a row from each row.
pub(super) fn by_row(op: &Op<'_>) -> Ruled {
    for index in 0..op.count() {
        let Some(place) = op.place(index) else { continue };
        // The rows of a vector would count as the features of a single row.
        if place != Place::plain(0) || op.rank(index)? < 2 {
            return Err(op.along("expects features", place));
        }
    }
    op.all_rows(Place::plain(0))
}

/// Columns of rows by positions that are weights, or one of several weights for each row: the label
/// of a class.
pub(super) fn chosen_features(op: &Op<'_>) -> Ruled {
    let (None, Some(positions)) = (op.place(0), op.place(1)) else {
        of_first(op)?;
        return by_row(op);
    };
    let (from, made) = (op.dims(1, TYPICAL)?, op.made(0, TYPICAL)?);
    let count = product(from).ok_or_else(|| op.without_sizes())?;
    let place = positions.reshaped(from, &[count], BATCHES[TYPICAL]).ok_or_else(|| op.without_sizes())?;
    op.all_rows(place.on(made.len().saturating_sub(1)))
}

/// Distances of each row to weights.
pub(super) fn distances(op: &Op<'_>) -> Ruled {
    match (op.place(0), op.place(1)) {
        (Some(place), None) if place.axis == 0 => op.all_rows(place),
        (None, Some(place)) if place.axis == 0 => op.all_rows(place.on(1)),
        (Some(_), Some(_)) => Err(op.mixed("it compares rows of different requests with each other")),
        _ => Err(op.unknown("it adds up along the rows")),
    }
}

/// Embeddings of tokens and segments, whose tables are weights.
pub(super) fn embedding(op: &Op<'_>) -> Ruled {
    others_free(op, &[0, 1, 7, 8])?;
    by_row(op)
}

/// Rotation by position: the tables are weights, unless each row has its own.
pub(super) fn rotary(op: &Op<'_>) -> Ruled {
    let is_standard = op.node.domain != "com.microsoft";
    let of_rows: &[usize] = match (is_standard, op.has(3)) {
        (true, false) => &[0, 1, 2],
        (true, true) => &[0, 3],
        (false, _) => &[0, 1],
    };
    others_free(op, of_rows)?;
    by_row(op)
}

/// Attention of a batch of sequences. Masks and past states begin with the batch, too.
pub(super) fn attention(op: &Op<'_>) -> Ruled {
    let is_standard = op.node.domain != "com.microsoft";
    let of_rows: &[usize] = match (is_standard, op.node.op_type.as_str()) {
        (true, _) => &[0, 1, 2, 3, 4, 5, 6],
        (_, "MultiHeadAttention") => &[0, 1, 2, 4, 5, 6, 7],
        (_, "GroupQueryAttention") => &[0, 1, 2, 3, 4, 5, 9],
        (_, "QAttention") => &[0, 5],
        _ => &[0, 3, 4, 5],
    };
    others_free(op, of_rows)?;
    if op.place(0).is_none() {
        return Err(op.unknown("its queries are weights"));
    }
    for index in of_rows.iter().filter(|index| op.has(**index)) {
        let Some(place) = op.place(*index) else { continue };
        // Standard masks are broadcast: with fewer axes, the first is not the batch.
        let is_mask = is_standard && *index == 3;
        if place != Place::plain(0) || (is_mask && op.rank(*index)? != 4) {
            return Err(op.unknown(format!("its input {index} does not begin with the batch")));
        }
    }
    let of = |output: usize| match output {
        0 => Flow::Rows(Place::plain(0)),
        _ if is_standard => Flow::Rows(Place::plain(0)),
        _ => op.unknown("there is no rule for its further outputs"),
    };
    Ok((0..op.node.output.len()).map(of).collect())
}

/// The results of all images are in one list.
pub(super) fn mixed_list(op: &Op<'_>) -> Ruled {
    Err(op.mixed("it gives one list of boxes for all requests"))
}

/// Strings, some of which the operator may leave out.
pub(super) fn drops_elements(op: &Op<'_>) -> Ruled {
    let has_stop_words = op.step.attributes.iter().any(|a| a.name == "stopwords" && !a.strings.is_empty());
    match has_stop_words {
        true => Err(op.mixed("it leaves out elements of all requests together")),
        false => first_only(op),
    }
}

/// Texts by row, or one text.
pub(super) fn text_rows(op: &Op<'_>) -> Ruled {
    match op.place(0) {
        Some(place) if op.rank(0)? == 1 => Err(op.along("counts words", place)),
        _ => by_row(op),
    }
}
