//! The result of a trial of the rehearsal, in the form of the log.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cluster::{Behaviour, Ground, Order, RATES, RehearsalDecision, Tried};
use crate::ids::ModelId;
use crate::journal::names::Names;
use crate::time::Duration;

/// The result of a trial of the [`crate::cluster::Rehearsal`], in the log of a shard.
///
/// The record itself changes nothing in a replay. The inputs that carry out the result come after
/// it. They are [`Input::SetBehaviour`](super::Input::SetBehaviour), and in the log of the
/// matchmaker [`Input::SetOrder`](super::Input::SetOrder).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TrialRecord {
    /// The number of the trial, from 1.
    pub number: u64,
    /// The number of candidates that were tried.
    pub tried: u32,
    /// The index of the candidate that holds from now on. 0 is the setting that held before.
    pub taken: u32,
    /// The criterion in which it differs from the setting before; `None`: the setting stays.
    pub why: Option<Ground>,
    /// The setting that held before. If another holds from now on, all other candidates follow.
    pub candidates: Vec<CandidateRecord>,
}

/// The result of one candidate of a trial.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CandidateRecord {
    /// Runs of models with the same behaviour, from the first id on: their number and their
    /// behaviour. `None`: the load regime decides.
    pub behaviours: Vec<(u32, Option<Behaviour>)>,
    /// The order in which candidates get devices.
    pub order: Order,
    /// The number of parts of the past that the candidate was tried on.
    pub parts: u32,
    /// For each rate, the bad requests in a million: of the model that fared worst, and of all
    /// models.
    pub bad: Vec<(u32, u32)>,
    /// The mean number of busy devices, in thousandths.
    pub devices: u32,
    /// Mean time from arrival to answer, to the microsecond.
    pub delay: Duration,
}

impl TrialRecord {
    /// Makes the record of a decision. `number` is the number of the trial, from 1.
    pub fn new(number: u64, decision: &RehearsalDecision) -> Self {
        let taken = decision.tried.iter().position(|tried| decision.takes(tried)).unwrap_or(0);
        let written = if decision.changed { decision.tried.len() } else { 1 };
        TrialRecord {
            number,
            tried: decision.tried.len() as u32,
            taken: taken as u32,
            why: decision.why,
            candidates: decision.tried.iter().take(written).map(CandidateRecord::new).collect(),
        }
    }
}

impl CandidateRecord {
    fn new(tried: &Tried) -> Self {
        let mut behaviours: Vec<(u32, Option<Behaviour>)> = Vec::new();
        for behaviour in &tried.behaviours {
            match behaviours.last_mut().filter(|(_, last)| last == behaviour) {
                Some((count, _)) => *count += 1,
                None => behaviours.push((1, *behaviour)),
            }
        }
        // A float too large becomes the largest integer.
        let millionths = |share: f64| (share * 1e6).round() as u32;
        CandidateRecord {
            behaviours,
            order: tried.order,
            parts: tried.parts,
            bad: tried.bad.iter().map(|(worst, all)| (millionths(*worst), millionths(*all))).collect(),
            devices: (tried.devices * 1e3).round() as u32,
            delay: Duration::from_micros((tried.delay * 1e6).round() as u64),
        }
    }
}

impl TrialRecord {
    /// Tells the result to people: a line, and one for each candidate.
    pub(super) fn tell(&self, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrialRecord { number, tried, taken, why, candidates } = self;
        write!(f, "trial {number} of {tried} candidates: ")?;
        match why {
            None => f.write_str("what is done goes on")?,
            Some(why) => write!(f, "candidate {taken} from now on, by {why}")?,
        }
        for (index, candidate) in candidates.iter().enumerate() {
            let name = if index == 0 { "before".to_owned() } else { index.to_string() };
            let taken = if index == *taken as usize { '*' } else { ' ' };
            write!(f, "\n{:>33}{taken} ", name)?;
            candidate.tell(names, f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |rate: u8| Percent(u64::from(rate) * 10_000);
        match *self {
            Ground::WorstModel { rate } => write!(f, "what the worst model loses at {} of the rate", at(rate)),
            Ground::AllModels { rate } => write!(f, "what is lost of all at {} of the rate", at(rate)),
            Ground::Throughput => f.write_str("the good answers a second to clients that wait for them"),
            Ground::Devices => f.write_str("the devices that are busy"),
            Ground::Delay => f.write_str("the time to the answer"),
        }
    }
}

impl CandidateRecord {
    fn tell(&self, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CandidateRecord { behaviours, order, parts, bad, devices, delay } = self;
        f.write_str("bad (worst model)")?;
        for ((worst, all), rate) in bad.iter().zip(RATES) {
            let [worst, all] = [worst, all].map(|share| Percent(u64::from(*share)));
            write!(f, ", {all} ({worst}) at {}", Percent(rate * 10_000))?;
        }
        let devices = f64::from(*devices) / 1e3;
        write!(f, "; {devices:.2} devices, {delay}, {parts} parts, order {order}:")?;
        let mut first = 0u64;
        for (count, behaviour) in behaviours {
            let last = first + u64::from(count.saturating_sub(1));
            let name = |index: u64| {
                u32::try_from(index).map_or_else(|_| index.to_string(), |id| names.of(ModelId(id)).to_string())
            };
            match last - first {
                0 => write!(f, " {}", name(first))?,
                _ => write!(f, " {} to {}", name(first), name(last))?,
            }
            match behaviour {
                None => f.write_str(" as follows from the load")?,
                Some(Behaviour { wait, throughput, size, limit, margin }) => {
                    write!(f, " wait {wait}, aim {throughput}/{size}, limit {limit}, margin {margin}")?;
                }
            }
            first = last + 1;
        }
        Ok(())
    }
}

/// Millionths.
struct Percent(u64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            whole if whole % 10_000 == 0 => write!(f, "{}%", whole / 10_000),
            share => write!(f, "{:.2}%", share as f64 / 1e4),
        }
    }
}
