//! Replaying a log.

use std::collections::VecDeque;
use std::fmt;

use super::block::{BlockHead, BlockKind};
use super::entry::{At, Entry};
use super::machine::{Machine, MachineKind, Record, Records};
use super::names::Names;
use super::pipelines::PipelineBook;
use super::reader::{LogError, header, machine_of, read};
use super::requests::RequestBook;
use crate::cluster::{Matchmaker, Scheduler, Shard};
use crate::device::DeviceScheduler;
use crate::time::Time;

/// The outcome of a replay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replayed {
    /// Inputs that the machine got.
    pub inputs: u64,
    /// Refusals and decisions in the log.
    pub decisions: u64,
    /// The first decision that differs.
    pub divergence: Option<Box<Divergence>>,
}

/// A decision of a replay that differs from the log's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divergence {
    /// The number of the entry.
    pub entry: u64,
    /// The time of the last input before it.
    pub at: Time,
    /// The log's decision, in words. `None`: the log has another input there.
    pub logged: Option<String>,
    /// The machine's decision, in words. `None`: it has none.
    pub replayed: Option<String>,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Divergence { entry, at, logged, replayed } = self;
        write!(f, "entry {entry}, at {}: the log says ", At(*at))?;
        match logged {
            Some(decision) => write!(f, "'{decision}'")?,
            None => f.write_str("no more")?,
        }
        match replayed {
            Some(decision) => write!(f, ", but now it is '{decision}'"),
            None => f.write_str(", but now it is nothing"),
        }
    }
}

/// Feeds the inputs of a log to a fresh machine and compares its decisions with the log's. Stops at
/// the first difference. A log that was cut off may lack the last decisions: these count as no
/// difference.
///
/// # Errors
/// If the log cannot be read, or its machine does not take an input.
pub fn replay(bytes: &[u8]) -> Result<Replayed, LogError> {
    match header(bytes)?.0 {
        MachineKind::Scheduler => play(Scheduler::new(), bytes),
        MachineKind::Shard { index, shards } => play(Shard::new(index, shards), bytes),
        MachineKind::Matchmaker => play(Matchmaker::new(), bytes),
        MachineKind::Device(number) => play(DeviceScheduler::numbered(number), bytes),
        MachineKind::Pipelines => play(PipelineBook::new(), bytes),
        MachineKind::Requests => play(RequestBook::default(), bytes),
    }
}

fn play<M: Machine>(mut machine: M, bytes: &[u8]) -> Result<Replayed, LogError> {
    let (_, first) = machine_of(bytes)?;
    if BlockHead::read(&bytes[first..]).is_some_and(|head| head.kind == BlockKind::Prelude) {
        return Err(LogError::BeginIsGone);
    }
    let (_, entries) = read::<M::Records>(bytes)?;
    let mut replayed = Replayed { inputs: 0, decisions: 0, divergence: None };
    let mut decided: VecDeque<Record<M::Records>> = VecDeque::new();
    let (mut now, mut names) = (Time::ZERO, Names::default());
    for entry in entries {
        let Entry { number, record, .. } = entry?;
        record.name_model(&mut names);
        let (again, logged) = match record {
            Record::Input(at, input) => {
                let again = decided.pop_front();
                if again.is_none() {
                    now = at;
                    apply(&mut machine, now, input, &mut decided)
                        .map_err(|why| LogError::Damaged { after: number - 1, why: why.to_owned() })?;
                    replayed.inputs += 1;
                }
                (again, None)
            }
            decision => {
                replayed.decisions += 1;
                (decided.pop_front().or_else(|| machine.poll().map(Record::Decision)), Some(decision))
            }
        };
        if again != logged {
            let [logged, again] =
                [logged, again].map(|record| record.map(|record| record.told(now, &names).to_string()));
            replayed.divergence = Some(Box::new(Divergence { entry: number, at: now, logged, replayed: again }));
            break;
        }
    }
    Ok(replayed)
}

/// Hands an input to the machine, and takes the decisions that must follow it in the log.
fn apply<M: Machine>(
    machine: &mut M,
    now: Time,
    input: <M::Records as Records>::Input,
    decided: &mut VecDeque<Record<M::Records>>,
) -> Result<(), &'static str> {
    if !M::Records::is_sound(&input) {
        return Err("a number is beyond any use");
    }
    let is_polled = machine.is_polled_after(&input);
    let reply = machine.apply(now, input);
    if M::Records::is_foreign(&reply) {
        return Err("the input is for another machine");
    }
    decided.extend(M::Records::refusal(&reply).map(Record::Refused));
    if is_polled {
        decided.extend(std::iter::from_fn(|| machine.poll().map(Record::Decision)));
    }
    Ok(())
}
