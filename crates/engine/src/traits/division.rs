//! A device divided into partitions.

use super::share::Share;

/// A device divided into partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// The partitions, in the order of the request. They share no cores or units, unless models are
    /// to move between them.
    pub parts: Vec<Part>,
    /// Reasons why the partitions are less isolated than they could be: a line each.
    pub notices: Vec<String>,
}

/// A partition of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The share that lanes on the partition get.
    pub share: Share,
    /// The number of threads of a run that are worth having there: one for each core.
    pub threads: usize,
    /// Its compute units, cores or multiprocessors, on the first of the devices: its size in
    /// relation to the others.
    pub units: u32,
    /// The partition's size, in words: for people, and as the key of measurements there.
    pub size: String,
}

/// The reason why a device cannot be divided as requested: the fault and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DivisionError(String);

impl DivisionError {
    /// The error with this text.
    pub fn new(text: impl Into<String>) -> DivisionError {
        DivisionError(text.into())
    }

    /// The partition `index`, from 0, with the requested `text`, is impossible.
    pub fn part(index: usize, text: &str, reason: &str) -> DivisionError {
        DivisionError(format!("partition {index}, \"{text}\": {reason}"))
    }

    /// The request names no partition.
    pub fn none_named() -> DivisionError {
        DivisionError("none is named; on GPUs name those between which models are to move, such as \"25%\"".to_owned())
    }

    /// The request has more partitions than the device has units.
    pub fn too_many(asked: usize, most: usize, of: &str) -> DivisionError {
        DivisionError(format!("{asked} partitions are too many for {most} {of}"))
    }
}

/// The hundredths of a device in a text such as `25%`; `None`: the text is no share.
pub fn percent(text: &str) -> Option<u32> {
    text.trim().strip_suffix('%')?.trim().parse().ok().filter(|percent| (1..=100).contains(percent))
}
