//! The machines that have a log, and the types of their records.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::names::{Names, QueueName};
use crate::ids::{ModelId, RequestId};
use crate::time::Time;

/// A machine that has a log, and which of its kind it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum MachineKind {
    /// A [`Scheduler`](crate::cluster::Scheduler).
    Scheduler,
    /// A [`Shard`](crate::cluster::Shard).
    Shard {
        /// Its number, from 0.
        index: u32,
        /// The number of all shards.
        shards: u32,
    },
    /// A [`Matchmaker`](crate::cluster::Matchmaker).
    Matchmaker,
    /// The [`DeviceScheduler`](crate::device::DeviceScheduler) of the device with this number, from
    /// 0.
    Device(u32),
    /// The [`PipelineBook`](super::pipelines::PipelineBook).
    Pipelines,
    /// The [`RequestBook`](super::requests::RequestBook).
    Requests,
}

impl fmt::Display for MachineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineKind::Scheduler => f.write_str("the scheduler"),
            MachineKind::Shard { index, shards } => write!(f, "shard {index} of {shards}"),
            MachineKind::Matchmaker => f.write_str("the matchmaker"),
            MachineKind::Device(number) => write!(f, "device {number}"),
            MachineKind::Pipelines => f.write_str("the pipelines"),
            MachineKind::Requests => f.write_str("the requests by their clients' names"),
        }
    }
}

/// A state machine whose inputs and decisions can be written down and replayed.
pub trait Machine {
    /// The types of its inputs and decisions.
    type Records: Records;

    /// Which of the machines it is.
    fn kind(&self) -> MachineKind;

    /// Handles an input.
    fn apply(&mut self, now: Time, input: <Self::Records as Records>::Input) -> <Self::Records as Records>::Reply;

    /// The next decision.
    fn poll(&mut self) -> Option<<Self::Records as Records>::Decision>;

    /// Whether the driver polls all decisions after this input, before the next. Otherwise a replay
    /// polls as many decisions as the log has: a device's host hands over several inputs before it
    /// polls, and a shard's candidate depends on the time of its poll.
    fn is_polled_after(&self, _input: &<Self::Records as Records>::Input) -> bool {
        false
    }
}

/// The types of the records of some machines, and the short forms in which a log has them.
pub trait Records: Clone + PartialEq + fmt::Debug + Default + 'static {
    /// Every input, as data.
    type Input: Fact;
    /// The machine's immediate answer to an input.
    type Reply;
    /// Why an input changed nothing.
    type Refusal: Clone + PartialEq + fmt::Debug + fmt::Display + Serialize + DeserializeOwned;
    /// Every decision, as data.
    type Decision: Fact;

    /// Whether the log of this machine has these records.
    fn are_of(machine: MachineKind) -> bool;

    /// The refusal in a reply.
    fn refusal(reply: &Self::Reply) -> Option<Self::Refusal>;

    /// Whether a reply says that the input is for another machine, or for one in another state. A
    /// sound log has none.
    fn is_foreign(_reply: &Self::Reply) -> bool {
        false
    }

    /// Whether a driver can have made this input. A replay hands no other input to a machine.
    fn is_sound(_input: &Self::Input) -> bool {
        true
    }

    /// The request that arrives by an input.
    fn request_in(_input: &Self::Input) -> Option<RequestId> {
        None
    }

    /// The request that a decision drops.
    fn request_ended_by(_decision: &Self::Decision) -> Option<RequestId> {
        None
    }

    /// The model that an input or a decision is about.
    fn model_of(_record: &Record<Self>) -> Option<ModelId> {
        None
    }

    /// The name that an input gives a model.
    fn name_in(_input: &Self::Input) -> Option<(ModelId, QueueName)> {
        None
    }

    /// Whether a reader of later entries needs this input: it names or adds a model or a device. Such
    /// inputs are rare.
    fn is_setup(_input: &Self::Input) -> bool {
        false
    }

    /// Adds an input to the setup of a log, with which its next file begins. An input about a model
    /// that is gone, or that a newer one replaces, leaves the setup.
    fn remember(setup: &mut Vec<(Time, Self::Input)>, now: Time, input: &Self::Input) {
        if Self::is_setup(input) {
            setup.push((now, input.clone()));
        }
    }

    /// Writes the short form of an input, `after` nanoseconds after the input before. False: it has
    /// none.
    fn write_input(&mut self, _log: &mut Vec<u8>, _now: Time, _after: i64, _input: &Self::Input) -> bool {
        false
    }

    /// Writes the short form of a decision. `now` is the time of the last input. False: it has
    /// none.
    fn write_decision(&mut self, _log: &mut Vec<u8>, _now: Time, _decision: &Self::Decision) -> bool {
        false
    }

    /// Reads an entry in a short form. `now` is the time of the last input. Returns the bytes
    /// behind it, too.
    ///
    /// # Errors
    /// If the bytes are no entry.
    fn read_short<'a>(&mut self, _now: Time, _bytes: &'a [u8]) -> postcard::Result<(Record<Self>, &'a [u8])> {
        Err(postcard::Error::DeserializeBadEnum)
    }
}

/// The content of an entry.
#[derive(Clone, PartialEq, Debug)]
pub enum Record<R: Records> {
    /// Something happened to the machine at that time.
    Input(Time, R::Input),
    /// The machine refused the input before.
    Refused(R::Refusal),
    /// The machine decided something, because of the inputs before.
    Decision(R::Decision),
}

impl<R: Records> Record<R> {
    /// Adds the name that the record gives a model.
    pub fn name_model(&self, names: &mut Names) {
        if let Record::Input(_, input) = self
            && let Some((model, name)) = R::name_in(input)
        {
            names.add(model, name);
        }
    }
}

/// An input or a decision: data that can be written, compared and told to people.
pub trait Fact: Clone + PartialEq + fmt::Debug + Serialize + DeserializeOwned {
    /// Tells it in words. `now` is the time of the last input, the told one included. Models have
    /// these `names`.
    ///
    /// # Errors
    /// If `f` takes no more.
    fn tell(&self, now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// The decision of a machine that only keeps a book: there is none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NoDecision {}

impl Fact for NoDecision {
    fn tell(&self, _now: Time, _names: &Names, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}
