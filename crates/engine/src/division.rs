//! A device divided into partitions.

use crate::traits::Share;

/// A device divided into partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// The partitions, in the order in which they were asked for. None has cores or units of another.
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

/// Why a device cannot be divided as was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DivisionError {
    /// One of the partitions cannot be.
    #[error("partition {index}, \"{text}\": {reason}")]
    Part {
        /// Which one, from 0.
        index: usize,
        /// What was asked for.
        text: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// There is less to divide than there are partitions.
    #[error("{asked} partitions are too many for {most} {of}")]
    TooMany {
        /// How many were asked for.
        asked: usize,
        /// How many there could be at most.
        most: usize,
        /// Of what.
        of: &'static str,
    },
    /// The device is not divided, whatever was asked for.
    #[error("{0}")]
    Refused(String),
}
