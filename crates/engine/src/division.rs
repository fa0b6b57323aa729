//! A device divided into partitions.

use crate::traits::Share;

/// A device divided into partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// The partitions, in the order in which they were asked for. None has cores or units of another, unless models are to move between them.
    pub parts: Vec<Part>,
    /// What keeps them from being as isolated as they could be: a line each.
    pub notices: Vec<String>,
}

/// A partition of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What lanes on it are given.
    pub share: Share,
    /// How many threads of a run are worth having there: one for each core.
    pub threads: usize,
    /// How many compute units it has, cores or multiprocessors, on the first of the devices: how large it is beside the others.
    pub units: u32,
    /// What it has, for people, and for what is measured there.
    pub size: String,
}

/// Why a device cannot be divided as was asked for: what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DivisionError(pub(crate) String);

impl DivisionError {
    /// One of the partitions cannot be, from 0, of which this was asked for.
    pub(crate) fn part(index: usize, text: &str, reason: &str) -> DivisionError {
        DivisionError(format!("partition {index}, \"{text}\": {reason}"))
    }

    /// There is nothing to divide by.
    pub(crate) fn none_named() -> DivisionError {
        DivisionError("none is named; on GPUs name those between which models are to move, such as \"25%\"".to_owned())
    }

    /// There is less to divide than there are partitions.
    pub(crate) fn too_many(asked: usize, most: usize, of: &str) -> DivisionError {
        DivisionError(format!("{asked} partitions are too many for {most} {of}"))
    }
}

/// How many hundredths of a device a text such as `25%` is; `None`: it is no share.
pub(crate) fn percent(text: &str) -> Option<u32> {
    text.trim().strip_suffix('%')?.trim().parse().ok().filter(|percent| (1..=100).contains(percent))
}
