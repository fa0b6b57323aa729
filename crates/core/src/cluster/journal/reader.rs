//! Reading a log, and playing it again.

use std::collections::VecDeque;

use super::machine::{Machine, MachineKind};
use super::record::{Decision, Entry, Input, Record, Reply};
use super::wire::{Base, MAGIC, VERSION, Wire};
use crate::cluster::matchmaker::Matchmaker;
use crate::cluster::scheduler::Scheduler;
use crate::cluster::shard::Shard;
use crate::ids::{DeviceKind, ModelId};
use crate::time::Time;

/// Why a log cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogError {
    /// It does not begin as a log does.
    #[error("not a decision log: it does not begin with 'DBLOG'")]
    NotALog,
    /// It is of another version.
    #[error("a decision log of version {0}; this program reads version {VERSION}")]
    Version(u8),
    /// What comes after an entry is no entry.
    #[error("what comes after entry {after} is damaged: {why}")]
    Damaged {
        /// The last good entry.
        after: u64,
        /// What was wrong.
        why: String,
    },
}

/// The entries of a log, one after another; after an error, none. A log whose last entry was cut off ends before that.
///
/// # Errors
/// If it is no log, or of another version.
pub fn read(bytes: &[u8]) -> Result<(MachineKind, impl Iterator<Item = Result<Entry, LogError>> + '_), LogError> {
    let Some((header, mut rest)) =
        bytes.split_at_checked(MAGIC.len() + 3).filter(|(header, _)| header.starts_with(MAGIC))
    else {
        return Err(LogError::NotALog);
    };
    if header[MAGIC.len()] != VERSION {
        return Err(LogError::Version(header[MAGIC.len()]));
    }
    let damaged = |why: &str| LogError::Damaged { after: 0, why: why.to_owned() };
    let machine = match header[MAGIC.len() + 1] {
        0 => MachineKind::Scheduler,
        1 => {
            let ((index, shards), after) =
                postcard::take_from_bytes::<(u32, u32)>(rest).map_err(|_| damaged("the shard's number is missing"))?;
            if index >= shards {
                return Err(damaged("shards are counted from zero"));
            }
            rest = after;
            MachineKind::Shard { index, shards }
        }
        2 => MachineKind::Matchmaker,
        other => return Err(damaged(&format!("there is no machine {other}"))),
    };
    let (mut base, mut number) = (Base::default(), 0);
    let entries = std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (wire, after) = match postcard::take_from_bytes::<Wire<'_>>(rest) {
            Ok(taken) => taken,
            Err(error) => {
                rest = &[];
                let is_cut = error == postcard::Error::DeserializeUnexpectedEnd;
                return (!is_cut).then(|| Err(LogError::Damaged { after: number, why: error.to_string() }));
            }
        };
        rest = after;
        number += 1;
        Some(Ok(Entry { number, record: base.record(wire) }))
    });
    Ok((machine, entries))
}

/// What came of playing a log again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replayed {
    /// Inputs that were played.
    pub inputs: u64,
    /// Decisions in the log.
    pub decisions: u64,
    /// Where the machine decided otherwise.
    pub divergence: Option<Box<Divergence>>,
}

/// Where a machine decided otherwise than its log says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divergence {
    /// The number of the entry.
    pub entry: u64,
    /// The time of the last input before it.
    pub at: Time,
    /// What the log says; `None`: nothing more, where there is another input.
    pub logged: Option<Decision>,
    /// What the machine says now; `None`: nothing.
    pub replayed: Option<Decision>,
}

/// Kinds of devices, shards and models are dense: a number beyond any use would only take memory.
const MOST: u32 = 1 << 20;

/// Plays the inputs of a log to a fresh machine and compares its decisions with the log's. Stops at the first difference. Decisions behind the
/// last that was logged are nobody's fault: the log was cut off.
///
/// # Errors
/// If the log cannot be read, or holds what its machine does not take.
pub fn replay(bytes: &[u8]) -> Result<Replayed, LogError> {
    let (machine, entries) = read(bytes)?;
    match machine {
        MachineKind::Scheduler => play(Scheduler::new(), entries),
        MachineKind::Shard { index, shards } => play(Shard::new(index, shards), entries),
        MachineKind::Matchmaker => play(Matchmaker::new(), entries),
    }
}

fn play<M: Machine>(
    mut machine: M,
    entries: impl Iterator<Item = Result<Entry, LogError>>,
) -> Result<Replayed, LogError> {
    let mut replayed = Replayed { inputs: 0, decisions: 0, divergence: None };
    let mut decided: VecDeque<Decision> = VecDeque::new();
    let mut now = Time::ZERO;
    // A scheduler's decisions are made by its inputs and wait to be polled. What a shard's candidates are depends on when they are
    // polled: as often as the log has one. A matchmaker makes its grants when it is polled, and what comes of it depends also on polls that
    // gave nothing: all of them follow a timeout.
    let kind = machine.kind();
    let is_polled_after = |input: &Input| match kind {
        MachineKind::Scheduler => true,
        MachineKind::Shard { .. } => false,
        MachineKind::Matchmaker => *input == Input::Timeout,
    };
    for entry in entries {
        let Entry { number, record } = entry?;
        let logged = match record {
            Record::Input(at, input) => {
                if let Some(first) = decided.pop_front() {
                    let divergence = Divergence { entry: number, at: now, logged: None, replayed: Some(first) };
                    replayed.divergence = Some(Box::new(divergence));
                    return Ok(replayed);
                }
                now = at;
                let damaged = |why: &str| Err(LogError::Damaged { after: number - 1, why: why.to_owned() });
                if !is_sound(&input) {
                    return damaged("a number is beyond any use");
                }
                let is_polled_at_once = is_polled_after(&input);
                match machine.apply(at, input) {
                    Reply::Foreign => return damaged("the input is for another machine"),
                    Reply::Request(Err(reject)) => decided.push_back(Decision::Reject(reject)),
                    _ => {}
                }
                if is_polled_at_once {
                    decided.extend(std::iter::from_fn(|| machine.poll()));
                }
                replayed.inputs += 1;
                continue;
            }
            Record::Decision(decision) => decision,
        };
        replayed.decisions += 1;
        let decision = decided.pop_front().or_else(|| machine.poll());
        if decision.as_ref() != Some(&logged) {
            let divergence = Divergence { entry: number, at: now, logged: Some(logged), replayed: decision };
            replayed.divergence = Some(Box::new(divergence));
            return Ok(replayed);
        }
    }
    Ok(replayed)
}

/// Whether an input is one that a driver could have made.
fn is_sound(input: &Input) -> bool {
    match input {
        Input::AddModel(ModelId(index), _) => *index < MOST,
        Input::AddDevice(kind) | Input::SetDevices(kind, _) | Input::Candidate(_, kind, _) => {
            *kind <= DeviceKind::LARGEST
        }
        _ => true,
    }
}
