//! The inputs of the book of clients' requests, in words.

use std::fmt;

use super::record::{Failure, RequestInput, Way};
use crate::ids::ModelId;
use crate::journal::machine::Fact;
use crate::journal::names::Names;
use crate::time::Time;

impl Fact for RequestInput {
    fn tell(&self, now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestInput::Model(number, name) => write!(f, "{} is '{name}'", ModelId(*number)),
            RequestInput::Came { request, model, id, trace } => {
                write!(f, "request {request} of {}", names.of(ModelId(*model)))?;
                if !id.is_empty() {
                    write!(f, ", id {id:?}")?;
                }
                trace.map_or(Ok(()), |trace| write!(f, ", trace {trace}"))
            }
            RequestInput::Failed { request, model, items, arrived, deadline, failure, error } => {
                write!(f, "request {request} of {} is {failure}", names.of(ModelId(*model)))?;
                write!(f, ", {} after its arrival, {items} items", now.since(*arrived))?;
                if *deadline != Time::MAX {
                    write!(f, ", due in {} then", deadline.since(*arrived))?;
                }
                if error.is_empty() { Ok(()) } else { write!(f, ": {error:?}") }
            }
            RequestInput::Went { request, model, way } => {
                let Way { items, arrived, returned, lost, claim, run, .. } = way;
                write!(f, "request {request} of {} ended", names.of(ModelId(*model)))?;
                write!(f, " {} after its arrival, {items} items", now.since(*arrived))?;
                if (*returned, *lost) != (0, 0) {
                    write!(f, ", went back {returned} times, lost with {lost} backends")?;
                }
                if let Some(claim) = claim {
                    let (epoch, rank, batch, backend) = (claim.epoch, claim.rank, claim.batch, &claim.backend);
                    write!(f, ", batch {epoch}.{rank}.{batch} of {backend:?}")?;
                }
                match run {
                    Some(run) => write!(f, " ran {} on device {}", run.ended.since(run.began), run.device),
                    None => Ok(()),
                }
            }
        }
    }
}

/// As in "the request is refused".
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Full => "refused by a full queue, quota or memory",
            Failure::Deadline => "given up because of its deadline",
            Failure::TimedOut => "ended by the client's timeout",
            Failure::Cancelled => "cancelled by its client",
            Failure::Unavailable => "refused because its model was out of service",
            Failure::Invalid => "refused as not well formed",
            Failure::Failed => "failed",
        })
    }
}
