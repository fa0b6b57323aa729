//! The story of a request as a paragraph.

use std::fmt;

use super::outcome::Outcome;
use super::story::{Ahead, BatchStory, Story};
use super::words::{many, told};

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((came, bad)) = self.span {
            let which = if bad == 0 { "The first of them" } else { "The first bad one" };
            write!(
                f,
                "In the second from that time on came {}; {bad} got no answer in time. {which}: ",
                many(came, "request")
            )?;
        }
        self.arrival.fmt(f)?;
        self.ahead.iter().try_for_each(|ahead| write!(f, " {ahead}"))?;
        self.batch.iter().try_for_each(|batch| write!(f, " {batch}"))?;
        self.tell_end(f)?;
        self.tell_remedies(f)?;
        match self.others {
            0 => Ok(()),
            1 => write!(f, " One earlier request has {} too.", self.others_by),
            others => write!(f, " {others} earlier requests have {} too.", self.others_by),
        }
    }
}

impl Story {
    fn tell_end(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let took = self.took_ms.map_or_else(|| "some time".to_owned(), told);
        let because = self.because.as_deref().unwrap_or("the log has no reason");
        match self.outcome {
            Outcome::InTime => write!(f, " It was done {took} after its arrival, in time."),
            Outcome::Late => {
                let late = self.late_ms.map_or_else(String::new, told);
                write!(f, " It was done {took} after its arrival: {late} late.")
            }
            Outcome::Open => f.write_str(" The log ends before the request does."),
            Outcome::QueueFull | Outcome::DeadlineImpossible if self.batch.is_none() => {
                write!(f, " It was refused ({}): {because}.", self.outcome)
            }
            Outcome::DeadlineHopeless | Outcome::WindowDrop | Outcome::QueueTimeout | Outcome::Unloaded => {
                write!(f, " It was dropped after {took} ({}): {because}.", self.outcome)
            }
            Outcome::Cancelled => write!(f, " Its client went away after {took}."),
            Outcome::Timeout => write!(f, " The client's own timeout ended it after {took}."),
            outcome => write!(f, " It got an error ({outcome}): {because}."),
        }
    }

    fn tell_remedies(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remedies.as_slice() {
            [] if self.outcome == Outcome::Late || self.outcome.is_given_up() => {
                f.write_str(" The log does not tell what would have saved it.")
            }
            [] => Ok(()),
            remedies => {
                f.write_str(" What would have saved it:")?;
                for (place, remedy) in remedies.iter().enumerate() {
                    write!(f, "{} {remedy}", if place == 0 { "" } else { ";" })?;
                }
                f.write_str(".")
            }
        }
    }
}

impl fmt::Display for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ahead { requests, items, oldest_ms, in_other_queues, running, first_free_ms, .. } = self;
        match (requests, oldest_ms) {
            (0, _) => f.write_str("No request waited before it")?,
            (requests, oldest) => {
                write!(f, "{} with {} waited before it", many(*requests, "request"), many(*items as usize, "item"))?;
                if let Some(oldest) = oldest {
                    write!(f, ", the oldest for {}", told(*oldest))?;
                }
            }
        }
        if *in_other_queues > 0 {
            write!(f, ", and {in_other_queues} in other queues")?;
        }
        f.write_str(";")?;
        let all: usize = running.values().sum();
        if all == 0 {
            return f.write_str(" no batch ran.");
        }
        f.write_str(" there ran ")?;
        for (place, (queue, batches)) in running.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(f, "{comma}{} of {queue}", many(*batches, "batch"))?;
        }
        match first_free_ms {
            Some(first) => write!(f, ", the first of them for another {}.", told(*first)),
            None => f.write_str("."),
        }
    }
}

impl fmt::Display for BatchStory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatchStory { batch, device, requests, items, left_after_ms, why, expected_ms, took_ms, .. } = self;
        write!(f, "After {} batch {batch} took it to {device}", told(*left_after_ms))?;
        match requests {
            1 => f.write_str(", alone")?,
            requests => write!(
                f,
                ", with {} and {} in all",
                many(requests - 1, "other request"),
                many(*items as usize, "item")
            )?,
        }
        if let Some(why) = why {
            write!(f, ": {why}")?;
        }
        f.write_str(".")?;
        match (expected_ms, took_ms) {
            (Some(expected), Some(took)) => {
                write!(f, " The batch took {}; its profile says {}.", told(*took), told(*expected))
            }
            (None, Some(took)) => write!(f, " The batch took {}.", told(*took)),
            (Some(expected), None) => write!(f, " Its profile says {}.", told(*expected)),
            (None, None) => Ok(()),
        }
    }
}
