//! Reads one file of a decision log: of a scheduler, a shard or the matchmaker.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use downbeat_core::cluster::{DropReason, ModelOptions, NetworkBudget, OrderPolicy, Output, Request, StartBound};
use downbeat_core::journal::cluster::{ClusterRecords, Decision, Input};
use downbeat_core::journal::{LogError, MachineKind, Names, Record, read};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

/// The content of one file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub machine: MachineKind,
    /// The names of models.
    pub names: Names,
    /// The models, with their last profiles and dispatch policies.
    pub models: BTreeMap<ModelId, ModelOptions>,
    pub requests: Vec<Seen>,
    pub batches: Vec<Batch>,
    /// The times at which batches were done.
    pub completions: HashMap<(DeviceId, BatchId), Time>,
    /// The largest number of devices of each kind at one time.
    pub devices: BTreeMap<DeviceKind, u32>,
    pub network: NetworkBudget,
    /// How long before its last moment a batch that waits starts.
    pub wake_margin: Duration,
    /// Names of inputs that a simulation does not have.
    pub passed_over: BTreeSet<&'static str>,
    /// The number of a rehearsal's trials, and of the trials that changed the models' behaviour.
    pub trials: (u64, u64),
    /// The order of turns, if the log sets one. A change after the start comes from a trial.
    pub order: Option<OrderPolicy>,
    /// The index of each waiting request.
    open: HashMap<RequestId, usize>,
    /// The kind of each device that has not left.
    present: BTreeMap<DeviceId, DeviceKind>,
    added_models: u32,
    added_devices: u32,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub at: Time,
    pub request: Request,
    pub fate: Fate,
}

/// The outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// The log does not tell: the request was cancelled, or the log ended before.
    Unknown,
    Rejected,
    Dropped(DropReason),
    /// The request was a member of this batch of the part.
    Sent(usize),
}

/// A batch that was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub key: (DeviceId, BatchId),
    pub model: ModelId,
    /// Items.
    pub size: u32,
    /// The planned start and duration.
    pub start: Time,
    pub expected: Duration,
    /// Since when the batch waited for a device; `None`: it waited for its members or its moment.
    pub waited_since: Option<Time>,
}

/// The part of an input that a simulation of the log leaves out, in words.
fn passed_over(input: &Input) -> Option<&'static str> {
    Some(match input {
        Input::SetModelNetwork(..) => "the network budget of each model",
        Input::RemoveDevice(_) => "devices that left",
        Input::Cancel { .. } => "cancelled requests (they are served)",
        Input::RemoveModel(_) => "models that were removed",
        Input::Flush(_) => "queues that were flushed",
        Input::SetLoad(..) => "the work of others on the devices",
        _ => return None,
    })
}

impl Part {
    /// Reads a log file.
    pub fn read(bytes: &[u8]) -> Result<Part, LogError> {
        let (machine, entries) = read::<ClusterRecords>(bytes)?;
        let mut part = Part::of(machine);
        for entry in entries {
            part.add(entry?.record);
        }
        Ok(part)
    }

    /// A part without entries.
    pub fn of(machine: MachineKind) -> Part {
        Part {
            machine,
            names: Names::default(),
            models: BTreeMap::new(),
            requests: Vec::new(),
            batches: Vec::new(),
            completions: HashMap::new(),
            devices: BTreeMap::new(),
            network: NetworkBudget::default(),
            wake_margin: Duration::ZERO,
            passed_over: BTreeSet::new(),
            trials: (0, 0),
            order: None,
            open: HashMap::new(),
            present: BTreeMap::new(),
            added_models: 0,
            added_devices: 0,
        }
    }

    /// Adds the next entry of the log.
    pub fn add(&mut self, record: Record<ClusterRecords>) {
        match record {
            Record::Input(now, input) => self.input(now, input),
            Record::Refused(_) => self.refused(),
            Record::Decision(decision) => self.decision(decision),
        }
    }

    /// Applies one input of the log.
    fn input(&mut self, now: Time, input: Input) {
        self.passed_over.extend(passed_over(&input));
        match input {
            Input::Request(request) => {
                self.open.insert(request.id, self.requests.len());
                self.requests.push(Seen { at: now, request, fate: Fate::Unknown });
            }
            Input::AddModel(id, options) => {
                // A scheduler gives ids out in order, and ignores the id in the record.
                let id = if self.machine == MachineKind::Scheduler { ModelId(self.added_models) } else { id };
                self.added_models += 1;
                self.models.insert(id, *options);
            }
            Input::SetProfile(id, profiles) => {
                if let Some(options) = self.models.get_mut(&id) {
                    options.profiles = *profiles;
                }
            }
            Input::SetDispatch(id, dispatch) => {
                if let Some(options) = self.models.get_mut(&id) {
                    options.dispatch = dispatch;
                }
            }
            Input::Name(model, name) => self.names.add(model, *name),
            Input::SetNetwork(network) => self.network = network,
            Input::SetWakeMargin(margin) => self.wake_margin = margin,
            Input::AddDevice(kind) => {
                self.present.insert(DeviceId(self.added_devices), kind);
                self.added_devices += 1;
                let now = self.present.values().filter(|known| **known == kind).count() as u32;
                self.at_least(kind, now);
            }
            Input::RemoveDevice(device) => {
                self.present.remove(&device);
            }
            Input::SetDevices(kind, devices) => self.at_least(kind, devices),
            Input::Completion { device, batch } => {
                self.completions.insert((device, batch), now);
            }
            Input::Trial(trial) => {
                self.trials = (self.trials.0 + 1, self.trials.1 + u64::from(trial.why.is_some()));
            }
            Input::SetOrder(order) => {
                self.order = Some(if now == Time::ZERO { OrderPolicy::Fixed(order) } else { OrderPolicy::Rehearsed });
            }
            _ => {}
        }
    }

    fn at_least(&mut self, kind: DeviceKind, devices: u32) {
        let most = self.devices.entry(kind).or_default();
        *most = devices.max(*most);
    }

    /// Marks the last request as rejected.
    fn refused(&mut self) {
        if let Some(seen) = self.requests.last_mut() {
            self.open.remove(&seen.request.id);
            seen.fate = Fate::Rejected;
        }
    }

    fn decision(&mut self, decision: Decision) {
        match decision {
            Decision::Output(Output::Drop { request, reason, .. }) => self.set(request, Fate::Dropped(reason)),
            Decision::Output(Output::Dispatch { batch, device, model, members, size, start, expected, reason }) => {
                let index = self.batches.len();
                let waited_since = (reason.bound == StartBound::Device).then_some(reason.exec);
                self.batches.push(Batch { key: (device, batch), model, size, start, expected, waited_since });
                for member in members {
                    self.set(member, Fate::Sent(index));
                }
            }
            Decision::Candidate(..) | Decision::Answer(_) | Decision::Grant(_) => {}
        }
    }

    fn set(&mut self, request: RequestId, fate: Fate) {
        if let Some(seen) = self.open.remove(&request).and_then(|at| self.requests.get_mut(at)) {
            seen.fate = fate;
        }
    }
}
