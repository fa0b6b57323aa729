//! The form in which a log is written.

use serde::{Deserialize, Serialize};

use super::machine::MachineKind;
use super::record::{Decision, Input, Record};
use crate::cluster::output::{Output, Reject};
use crate::cluster::reason::{DispatchReason, StartBound};
use crate::cluster::request::Request;
use crate::ids::{BatchId, DeviceId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// What a log begins with.
pub(super) const MAGIC: &[u8; 5] = b"DBLOG";
/// The version of the format.
pub(super) const VERSION: u8 = 3;

/// An entry as it is written. `after` is the time since the input before, times of decisions are relative to the last input, ids to
/// the last of their kind; all wrap, so that nothing is lost whatever they are.
#[derive(Serialize, Deserialize)]
pub(super) enum Wire<'a> {
    /// A request of one item, of level 0, without a queue expiry.
    Plain { after: i64, id: i64, model: ModelId, budget: i64 },
    /// Any other request.
    Request { after: i64, id: i64, model: ModelId, deadline: Time, queue_expiry: Time, level: u32, size: u32 },
    /// [`Input::Completion`].
    Completion { after: i64, device: DeviceId, batch: i64 },
    /// [`Input::Timeout`].
    Timeout { after: i64 },
    /// Any other input.
    Input { after: i64, input: std::borrow::Cow<'a, Input> },
    /// [`Output::Dispatch`].
    Dispatch {
        batch: i64,
        device: DeviceId,
        model: ModelId,
        size: u32,
        start: i64,
        expected: Duration,
        bound: StartBound,
        exec: i64,
        latest: i64,
        deadline: i64,
        left: u32,
        members: Members,
    },
    /// Any other decision.
    Decision(std::borrow::Cow<'a, Decision>),
    /// [`Decision::Reject`].
    Reject(Reject),
}

/// Request ids, each as the difference to the one before, the first to the last request.
pub(super) enum Members {
    /// Written by [`Writer::output`] behind the rest of the entry: there are as many as requests.
    Behind,
    /// Read.
    Read(Vec<i64>),
}

impl Serialize for Members {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            // Takes no byte.
            Members::Behind => serializer.serialize_unit(),
            Members::Read(deltas) => serializer.collect_seq(deltas),
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Members::Read)
    }
}

pub(super) fn difference(new: u64, old: u64) -> i64 {
    new.wrapping_sub(old) as i64
}

/// A signed integer as postcard writes it, small where it is near zero.
fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

pub(super) fn sum(old: u64, difference: i64) -> u64 {
    old.wrapping_add(difference as u64)
}

/// What entries are written relative to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Base {
    pub now: u64,
    pub request: u64,
    pub batch: u64,
    /// The last completed batch: completions come in another order than dispatches.
    pub completed: u64,
}

/// Writes a log.
#[derive(Debug)]
pub(super) struct Writer {
    pub bytes: Vec<u8>,
    base: Base,
}

impl Writer {
    pub fn new(machine: MachineKind) -> Self {
        let mut bytes = MAGIC.to_vec();
        let (code, place) = match machine {
            MachineKind::Scheduler => (0, None),
            MachineKind::Shard { index, shards } => (1, Some((index, shards))),
            MachineKind::Matchmaker => (2, None),
        };
        bytes.extend([VERSION, code, 0]);
        let mut writer = Writer { bytes, base: Base::default() };
        if let Some(place) = place {
            writer.push(&place);
        }
        writer
    }

    pub fn input(&mut self, now: Time, input: &Input) {
        match input {
            Input::Request(request) => self.request(now, request),
            Input::Completion { device, batch } => {
                let after = self.after(now);
                let batch = difference(batch.0, std::mem::replace(&mut self.base.completed, batch.0));
                // `Wire::Completion`.
                self.numbers(2, [zigzag(after), u64::from(device.0), zigzag(batch)]);
            }
            Input::Timeout => {
                let after = self.after(now);
                // `Wire::Timeout`.
                self.numbers(3, [zigzag(after)]);
            }
            _ => {
                let after = self.after(now);
                self.push(&Wire::Input { after, input: std::borrow::Cow::Borrowed(input) });
            }
        }
    }

    pub fn request(&mut self, now: Time, request: &Request) {
        let after = self.after(now);
        let Request { id, model, deadline, queue_expiry, level, size } = *request;
        let id = difference(id.0, std::mem::replace(&mut self.base.request, id.0));
        if size == 1 && level == 0 && queue_expiry == Time::MAX {
            let budget = difference(deadline.as_nanos(), now.as_nanos());
            // `Wire::Plain`.
            self.numbers(0, [zigzag(after), zigzag(id), u64::from(model.0), zigzag(budget)]);
        } else {
            self.push(&Wire::Request { after, id, model, deadline, queue_expiry, level, size });
        }
    }

    pub fn reject(&mut self, reject: &Reject) {
        self.push(&Wire::Reject(*reject));
    }

    pub fn decision(&mut self, decision: &Decision) {
        match decision {
            Decision::Output(output @ Output::Dispatch { .. }) => self.output(output),
            _ => self.push(&Wire::Decision(std::borrow::Cow::Borrowed(decision))),
        }
    }

    pub fn output(&mut self, output: &Output) {
        match output {
            Output::Dispatch { batch, device, model, members, size, start, expected, reason } => {
                let DispatchReason { bound, exec, latest, deadline, left } = *reason;
                let now = self.base.now;
                let relative = |at: Time| difference(at.as_nanos(), now);
                let batch = difference(batch.0, std::mem::replace(&mut self.base.batch, batch.0));
                self.push(&Wire::Dispatch {
                    batch,
                    device: *device,
                    model: *model,
                    size: *size,
                    start: relative(*start),
                    expected: *expected,
                    bound,
                    exec: relative(exec),
                    latest: relative(latest),
                    deadline: relative(deadline),
                    left,
                    members: Members::Behind,
                });
                self.members(members);
            }
            Output::Drop { .. } => {
                self.push(&Wire::Decision(std::borrow::Cow::Owned(Decision::Output(output.clone()))))
            }
        }
    }

    /// An entry of numbers only, by hand: of these there is one for every request.
    fn numbers<const N: usize>(&mut self, tag: u8, numbers: [u64; N]) {
        const { assert!(N <= 4, "an entry has room for four numbers of up to 10 bytes") };
        let mut entry = [0; 48];
        entry[0] = tag;
        let mut end = 1;
        for mut number in numbers {
            while number >= 0x80 {
                entry[end] = number as u8 | 0x80;
                number >>= 7;
                end += 1;
            }
            entry[end] = number as u8;
            end += 1;
        }
        // A copy of fixed length takes no call.
        let length = self.bytes.len() + end;
        self.bytes.extend_from_slice(&entry);
        self.bytes.truncate(length);
    }

    /// A dispatch's members, by hand, as a sequence of `i64`.
    fn members(&mut self, members: &[RequestId]) {
        let mut last = self.base.request;
        let differences = members.iter().map(|id| zigzag(difference(id.0, std::mem::replace(&mut last, id.0))));
        for mut number in std::iter::once(members.len() as u64).chain(differences) {
            while number >= 0x80 {
                self.bytes.push(number as u8 | 0x80);
                number >>= 7;
            }
            self.bytes.push(number as u8);
        }
    }

    fn after(&mut self, now: Time) -> i64 {
        difference(now.as_nanos(), std::mem::replace(&mut self.base.now, now.as_nanos()))
    }

    fn push(&mut self, value: &impl Serialize) {
        let appender = Appender { bytes: &mut self.bytes, entry: [0; BLOCK], filled: 0 };
        let written = postcard::serialize_with_flavor(value, appender);
        written.unwrap_or_else(|error| panic!("memory takes every entry, and its form has no error: {error}"));
    }
}

/// Most entries are shorter.
const BLOCK: usize = 64;

/// Writes to the end of a buffer. Entries are made of pieces of a few bytes, for each of which appending to a vector
/// would check its capacity and call a copy function.
struct Appender<'a> {
    bytes: &'a mut Vec<u8>,
    entry: [u8; BLOCK],
    filled: usize,
}

impl postcard::ser_flavors::Flavor for Appender<'_> {
    type Output = ();

    #[inline]
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        if self.filled == BLOCK {
            self.bytes.extend_from_slice(&self.entry);
            self.filled = 0;
        }
        self.entry[self.filled] = byte;
        self.filled += 1;
        Ok(())
    }

    #[inline]
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        bytes.iter().try_for_each(|byte| self.try_push(*byte))
    }

    fn finalize(self) -> postcard::Result<()> {
        self.bytes.extend_from_slice(&self.entry[..self.filled]);
        Ok(())
    }
}

impl Base {
    fn time(&self, relative: i64) -> Time {
        Time::from_nanos(sum(self.now, relative))
    }

    /// Undoes [`Writer`]'s work.
    pub fn record(&mut self, wire: Wire<'_>) -> Record {
        let at = |base: &mut Base, after: i64| {
            base.now = sum(base.now, after);
            Time::from_nanos(base.now)
        };
        match wire {
            Wire::Plain { after, id, model, budget } => {
                let now = at(self, after);
                self.request = sum(self.request, id);
                let request = Request {
                    id: RequestId(self.request),
                    model,
                    deadline: self.time(budget),
                    queue_expiry: Time::MAX,
                    level: 0,
                    size: 1,
                };
                Record::Input(now, Input::Request(request))
            }
            Wire::Request { after, id, model, deadline, queue_expiry, level, size } => {
                let now = at(self, after);
                self.request = sum(self.request, id);
                let id = RequestId(self.request);
                Record::Input(now, Input::Request(Request { id, model, deadline, queue_expiry, level, size }))
            }
            Wire::Completion { after, device, batch } => {
                let now = at(self, after);
                self.completed = sum(self.completed, batch);
                Record::Input(now, Input::Completion { device, batch: BatchId(self.completed) })
            }
            Wire::Timeout { after } => Record::Input(at(self, after), Input::Timeout),
            Wire::Input { after, input } => Record::Input(at(self, after), input.into_owned()),
            Wire::Dispatch {
                batch,
                device,
                model,
                size,
                start,
                expected,
                bound,
                exec,
                latest,
                deadline,
                left,
                members,
            } => {
                self.batch = sum(self.batch, batch);
                let mut last = self.request;
                let members = match members {
                    Members::Behind => Vec::new(),
                    Members::Read(deltas) => deltas
                        .into_iter()
                        .map(|delta| {
                            last = sum(last, delta);
                            RequestId(last)
                        })
                        .collect(),
                };
                let [start, exec, latest, deadline] =
                    [start, exec, latest, deadline].map(|relative| self.time(relative));
                let reason = DispatchReason { bound, exec, latest, deadline, left };
                let batch = BatchId(self.batch);
                let output = Output::Dispatch { batch, device, model, members, size, start, expected, reason };
                Record::Decision(Decision::Output(output))
            }
            Wire::Decision(decision) => Record::Decision(decision.into_owned()),
            Wire::Reject(reject) => Record::Decision(Decision::Reject(reject)),
        }
    }
}
