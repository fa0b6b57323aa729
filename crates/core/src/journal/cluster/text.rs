//! The inputs and decisions of a cluster's machines, in words.

use std::fmt;

use super::record::{Decision, Input};
use crate::cluster::{
    Answer, Behaviour, Candidate, DispatchReason, DropDetail, DropReason, ModelOptions, NetworkBudget, Output, Request,
    StartBound,
};
use crate::ids::ModelId;
use crate::journal::entry::At;
use crate::journal::machine::Fact;
use crate::journal::names::Names;
use crate::time::{Duration, Time};

impl Fact for Input {
    fn tell(&self, now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Input::Request(request) => tell_request(request, now, names, f),
            Input::Cancel { model, ticket } => write!(f, "cancel {ticket:?} of {model}", model = names.of(*model)),
            Input::Completion { device, batch } => write!(f, "{batch} is done on {device}"),
            Input::Timeout => f.write_str("wake-up"),
            Input::AddModel(model, options) => tell_new_model(*model, options, names, f),
            Input::AddLimit(u32::MAX) => f.write_str("add a model"),
            Input::AddLimit(most) => write!(f, "add a model with at most {most} batches at once"),
            Input::AddSharedLimit(other) => {
                write!(f, "add a model that shares the limit of {other}", other = names.of(*other))
            }
            Input::Flush(model) => write!(f, "what waits for {model} waits for no others", model = names.of(*model)),
            Input::RemoveModel(model) => write!(f, "remove {model}", model = names.of(*model)),
            Input::SetProfile(model, profiles) => {
                write!(f, "new profile of {model}:", model = names.of(*model))?;
                for (kind, profile) in profiles.iter() {
                    let most = profile.max_batch();
                    kind.map_or(Ok(()), |kind| write!(f, " on {kind}"))?;
                    write!(f, " l(1) = {}, l({most}) = {}", profile.latency(1), profile.latency(most))?;
                }
                Ok(())
            }
            Input::SetDispatch(model, dispatch) => {
                write!(f, "dispatch of {model}: {dispatch:?}", model = names.of(*model))
            }
            Input::SetBehaviour(model, None) => {
                write!(f, "{model} does what follows from the load", model = names.of(*model))
            }
            Input::SetBehaviour(model, Some(behaviour)) => tell_behaviour(*model, behaviour, names, f),
            Input::Trial(trial) => trial.tell(names, f),
            Input::Name(model, name) => write!(f, "{model} is '{name}', version {}", name.version),
            Input::SetOrder(order) => write!(f, "whose turn it is: {order}"),
            Input::SetLent(model) => {
                write!(f, "{model} gets only time that no other queue needs", model = names.of(*model))
            }
            Input::SetWakeMargin(margin) => write!(f, "wake margin {margin}"),
            Input::SetNetwork(network) => write!(f, "network: {}", Budget(network)),
            Input::SetModelNetwork(model, networks) => {
                write!(f, "network of {model}:", model = names.of(*model))?;
                networks.iter().try_for_each(|(kind, network)| write!(f, " {} on {kind};", Budget(network)))
            }
            Input::AddDevice(kind) => write!(f, "add a device of kind {kind}"),
            Input::RemoveDevice(device) => write!(f, "remove {device}"),
            Input::SetLoad(device, Time::ZERO) => write!(f, "{device} runs nothing of others"),
            Input::SetLoad(device, until) => write!(f, "{device} runs what others sent there, until {}", At(*until)),
            Input::SetDevices(kind, devices) => write!(f, "{devices} devices of kind {kind}"),
            Input::SetOtherDemand(demand) => write!(f, "the other shards' demand: {demand:?}"),
            Input::Grant(grant) => write!(f, "{} is granted to {}", grant.device, names.of(grant.model)),
            Input::Candidate(model, kind, candidate) => {
                write!(f, "candidate of {model} for {kind}: {}", Offer(candidate), model = names.of(*model))
            }
            Input::Answer(answer) => tell_answer(answer, names, f),
        }
    }
}

/// Writes a request's terms. The text counts the deadline and the longest wait from `now`.
fn tell_request(request: &Request, now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Request { id, model, deadline, queue_expiry, level, size } = *request;
    write!(f, "request {id} of {model}", model = names.of(model))?;
    match deadline {
        Time::MAX => f.write_str(", without a deadline")?,
        deadline => write!(f, ", due in {}", deadline.since(now))?,
    }
    if queue_expiry != Time::MAX {
        write!(f, ", may wait for {}", queue_expiry.since(now))?;
    }
    if level != 0 {
        write!(f, ", level {level}")?;
    }
    if size == 1 { Ok(()) } else { write!(f, ", {size} items") }
}

/// Writes a new model's profiles and policies.
fn tell_new_model(model: ModelId, options: &ModelOptions, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "add {model}: ", model = names.of(model))?;
    for (kind, profile) in options.profiles.iter() {
        let most = options.max_batch.max(1);
        let (one, all) = (profile.latency(1), profile.latency(most));
        match kind {
            Some(kind) => write!(f, "on {kind} l(1) = {one}, l({most}) = {all}, ")?,
            None => write!(f, "l(1) = {one}, l({most}) = {all}, ")?,
        }
    }
    write!(f, "drop {:?}, dispatch {:?}", options.drop, options.dispatch)?;
    match options.max_in_flight {
        u32::MAX => Ok(()),
        most => write!(f, ", at most {most} batches at once"),
    }
}

/// Writes the rules that a model's candidates and drops follow.
fn tell_behaviour(model: ModelId, behaviour: &Behaviour, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Behaviour { wait, throughput, size, limit, margin } = *behaviour;
    write!(
        f,
        "{model} waits {wait}% of the way to its window; drops aim at {throughput}% of the staggered batch's throughput, {size}% of its size at most",
        model = names.of(model)
    )?;
    if limit > 0 {
        write!(f, "; batches are for {limit}% of it at most")?;
    }
    if margin > 0 { write!(f, "; with a margin of {margin}%") } else { Ok(()) }
}

struct Budget<'a>(&'a NetworkBudget);

impl fmt::Display for Budget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NetworkBudget { control, data, reply } = self.0;
        write!(f, "{control} a batch, {data} an item, {reply} a reply")
    }
}

impl Fact for Decision {
    fn tell(&self, now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Output(Output::Dispatch { batch, device, model, members, size, start, expected, reason }) => {
                write!(f, "send {batch} of {model} to {device}: {size} items", model = names.of(*model))?;
                if *start > now {
                    write!(f, " to start in {}", start.since(now))?;
                }
                write!(f, " for {expected}, because {}; {} items stay; members", Why(reason), reason.left)?;
                members.iter().try_for_each(|member| write!(f, " {member}"))
            }
            Decision::Output(Output::Drop { request, model, reason, detail }) => {
                let DropDetail { size, deadline, needed, target } = *detail;
                write!(f, "drop {request} of {model}: ", model = names.of(*model))?;
                let left = deadline.since(now);
                match reason {
                    DropReason::Hopeless => write!(f, "hopeless, it needs {needed} alone and has {left}")?,
                    DropReason::Sacrificed => {
                        write!(f, "sacrificed for a batch nearer to the target of {target}, it has {left}")?
                    }
                    DropReason::QueueTimeout => f.write_str("it has waited for longer than it may")?,
                    DropReason::ModelRemoved => f.write_str("its model was removed")?,
                    DropReason::WaitTooLong => {
                        f.write_str("it has waited for as long as a request without a deadline may")?
                    }
                }
                if size == 1 { Ok(()) } else { write!(f, " ({size} items)") }
            }
            Decision::Candidate(model, kind, candidate) => {
                write!(f, "candidate of {model} for {kind}: {}", Offer(candidate), model = names.of(*model))
            }
            Decision::Answer(answer) => tell_answer(answer, names, f),
            Decision::Grant(grant) => {
                write!(f, "grant {} to {}", grant.device, names.of(grant.model))?;
                if grant.free_at > now { write!(f, ", free in {}", grant.free_at.since(now)) } else { Ok(()) }
            }
        }
    }
}

struct Why<'a>(&'a DispatchReason);

impl fmt::Display for Why<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DispatchReason { bound, exec, latest, deadline, .. } = *self.0;
        match bound {
            StartBound::Full => f.write_str("nothing may join it")?,
            StartBound::Frontrun => write!(f, "one more item would be late from {} on", At(exec))?,
            StartBound::Latest => write!(f, "its last moment is {}", At(exec))?,
            StartBound::Timeout => write!(f, "its first request has waited as configured, until {}", At(exec))?,
            StartBound::WakeMargin => write!(f, "the wake margin before its last moment began at {}", At(exec))?,
            StartBound::Eager => f.write_str("it waits for nothing")?,
            StartBound::KeepsUp => f.write_str("batches of its size keep up with the arrivals")?,
            StartBound::Device if exec == Time::ZERO => f.write_str("it waited for nothing but the device")?,
            StartBound::Device => write!(f, "its window opened at {} and it waited for the device", At(exec))?,
        }
        match deadline {
            Time::MAX => Ok(()),
            deadline => write!(f, " (latest start {}, earliest deadline {})", At(latest), At(deadline)),
        }
    }
}

struct Offer<'a>(&'a Option<Candidate>);

impl fmt::Display for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Candidate { size, exec, latest, delay, .. }) = *self.0 else { return f.write_str("none") };
        write!(f, "{size} items from {} to {}", At(exec), At(latest))?;
        if delay == Duration::ZERO { Ok(()) } else { write!(f, ", {delay} on the way") }
    }
}

fn tell_answer(answer: &Answer, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match answer {
        Answer::Started { grant, batch, arrives, expected } => {
            let (model, device) = (names.of(grant.model), grant.device);
            write!(f, "{batch} of {model} is on {device} from {} for {expected}", At(*arrives))
        }
        Answer::Declined { grant } => write!(f, "{} has nothing for {}", names.of(grant.model), grant.device),
    }
}
