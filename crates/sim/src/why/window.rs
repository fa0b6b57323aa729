//! The requests of a span of a log, with their batches and ends.

use std::collections::{BTreeMap, HashMap};

use downbeat_core::cluster::{DispatchReason, DropDetail, DropReason, Output, Reject, Request};
use downbeat_core::device::{DeviceDrop, DeviceOutput, Launch, LaunchId};
use downbeat_core::journal::cluster::{ClusterRecords, Decision, Input};
use downbeat_core::journal::device::{DeviceInput, DeviceRecords};
use downbeat_core::journal::requests::{Failure, RequestInput, RequestRecords, Trace};
use downbeat_core::journal::{MachineKind, Names, Record, Records};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};

use super::folder::{BadFolder, LogFile, LogFolder, Span};
use super::outcome::Outcome;
use crate::what_if::Part;

/// A long span is read in pieces of this length, so that it takes little memory.
const PIECE: Duration = Duration::from_millis(30_000);
/// Behind each piece this span is read too, as requests end after they came.
const BEHIND: Duration = Duration::from_millis(10_000);

/// The requests of a span of a log.
///
/// **Bound.** The caller chooses the span: the memory follows from the number of its requests.
#[derive(Debug, Default)]
pub struct Window {
    /// The requests that came in the span, in order of their arrival.
    pub requests: Vec<LoggedRequest>,
    /// The batches that took them, and others that left in the span.
    pub batches: Vec<LoggedBatch>,
    /// The files of the scheduler, for a replay.
    pub(super) parts: Vec<Part>,
    places: HashMap<RequestId, usize>,
}

/// A request, as all files of a log have it.
#[derive(Clone, Debug)]
pub struct LoggedRequest {
    /// The number of the request.
    pub request: RequestId,
    /// The model, as its owner calls it.
    pub model: String,
    /// The queue: the model, with the shape if each shape has a queue.
    pub queue: String,
    /// When the request arrived at the part that decides about it.
    pub at: Time,
    /// When the request arrived at the server, if it has a name.
    pub came: Option<Time>,
    /// The deadline; [`Time::MAX`]: there is none.
    pub deadline: Time,
    /// The items.
    pub size: u32,
    /// The id that the client gave, if it gave one.
    pub id: Option<String>,
    /// The trace that the request is a part of.
    pub trace: Option<Trace>,
    /// Why the request was refused when it came.
    pub refused: Option<Reject>,
    /// Why the request was refused by the device policy.
    pub refused_by_device: Option<String>,
    /// When and why the scheduler dropped the request.
    pub dropped: Option<(Time, DropReason, DropDetail)>,
    /// When and why the device policy dropped the request.
    pub dropped_by_device: Option<(Time, DeviceDrop)>,
    /// The batch that took the request: its place in [`Window::batches`].
    pub batch: Option<usize>,
    /// When a device policy's launch had its result.
    pub replied: Option<Time>,
    /// When and why the client got an error.
    pub failed: Option<(Time, Failure, String)>,
}

/// A batch.
#[derive(Clone, Debug)]
pub struct LoggedBatch {
    /// The scheduler's id of the batch, or the device's.
    pub batch: BatchId,
    /// The device, as the file calls it, such as `d0`.
    pub device: String,
    /// The queue whose requests the batch has.
    pub queue: String,
    /// The scheduler's model; `None`: a device policy made the batch.
    pub model: Option<ModelId>,
    /// The requests.
    pub members: Vec<RequestId>,
    /// The items of all members.
    pub size: u32,
    /// When the batch left.
    pub left: Time,
    /// When the batch was to start on the device.
    pub start: Time,
    /// How long the batch was expected to take; `None`: the log does not tell.
    pub expected: Option<Duration>,
    /// Why the batch left then; `None`: a device policy made the batch.
    pub reason: Option<DispatchReason>,
    /// When the batch was done.
    pub end: Option<Time>,
}

impl Window {
    /// Reads a long span of a log in pieces, in order. A window also has requests that came behind its
    /// piece.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    pub fn pieces(folder: &LogFolder, span: Span) -> impl Iterator<Item = Result<(Span, Window), BadFolder>> {
        let mut from = span.from;
        std::iter::from_fn(move || {
            let piece = Span { from, until: (from + PIECE).min(span.until) };
            from = piece.until;
            let read = || Ok((piece, Window::read(folder, Span { until: piece.until + BEHIND, ..piece })?));
            (piece.from < piece.until).then(read)
        })
    }

    /// Reads a span of a log.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    pub fn read(folder: &LogFolder, span: Span) -> Result<Window, BadFolder> {
        let mut window = Window::default();
        let mut ends = HashMap::new();
        for file in &folder.files {
            match file.machine {
                MachineKind::Device(number) => window.read_device(file, number, span)?,
                MachineKind::Pipelines | MachineKind::Requests => {}
                _ => window.read_scheduler(file, span, &mut ends)?,
            }
        }
        for batch in &mut window.batches {
            if batch.model.is_some() {
                batch.end = ends.get(&(batch.device.clone(), batch.batch)).copied();
            }
        }
        for file in folder.files.iter().filter(|file| file.machine == MachineKind::Requests) {
            window.read_requests(file, span)?;
        }
        window.requests.sort_by_key(|request| (request.at, request.request));
        window.places = window.requests.iter().enumerate().map(|(place, its)| (its.request, place)).collect();
        Ok(window)
    }

    /// The request of this number; `None`: the span has none.
    pub fn get(&self, request: RequestId) -> Option<&LoggedRequest> {
        self.requests.get(*self.places.get(&request)?)
    }

    fn get_mut(&mut self, request: RequestId) -> Option<&mut LoggedRequest> {
        self.requests.get_mut(*self.places.get(&request)?)
    }

    /// The batch that took a request.
    pub fn batch_of(&self, request: &LoggedRequest) -> Option<&LoggedBatch> {
        self.batches.get(request.batch?)
    }

    /// When a request had its result; `None`: it had none, or the log ends before.
    pub fn end_of(&self, request: &LoggedRequest) -> Option<Time> {
        match self.batch_of(request) {
            Some(batch) if batch.model.is_some() => batch.end,
            _ => request.replied,
        }
    }

    /// How a request ended.
    pub fn outcome_of(&self, request: &LoggedRequest) -> Outcome {
        if let Some(reject) = &request.refused {
            return Outcome::of_reject(reject);
        }
        if request.refused_by_device.is_some() {
            return Outcome::QueueFull;
        }
        if let Some((_, reason, _)) = request.dropped {
            return Outcome::of_drop(reason);
        }
        if let Some((_, reason)) = request.dropped_by_device {
            return Outcome::of_device_drop(reason);
        }
        if let Some((_, failure, _)) = request.failed {
            return match Outcome::of_failure(failure) {
                // The request ran: its run was ended.
                Outcome::DeadlineImpossible if request.batch.is_some() => Outcome::RunEnded,
                outcome => outcome,
            };
        }
        match self.end_of(request) {
            None => Outcome::Open,
            Some(end) if end > request.deadline => Outcome::Late,
            Some(_) => Outcome::InTime,
        }
    }

    /// When a request left its queue: to a batch, dropped, or cancelled; `None`: it did not.
    pub fn left_queue(&self, request: &LoggedRequest) -> Option<Time> {
        let batch = self.batch_of(request).map(|batch| batch.left);
        let dropped = request.dropped.map(|(at, ..)| at).or(request.dropped_by_device.map(|(at, _)| at));
        let refused = request.refused.is_some() || request.refused_by_device.is_some();
        let failed = request.failed.as_ref().map(|(at, ..)| *at);
        batch.or(dropped).or(refused.then_some(request.at)).or(failed)
    }

    fn add(&mut self, at: Time, names: &Names, request: Request) {
        let model = names.get(request.model).map_or_else(|| request.model.to_string(), |name| name.model.clone());
        let queue = names.of(request.model).to_string();
        let Request { id, deadline, size, .. } = request;
        self.insert(LoggedRequest { at, deadline, size, ..LoggedRequest::new(id, model, queue) });
    }

    fn insert(&mut self, request: LoggedRequest) {
        self.places.insert(request.request, self.requests.len());
        self.requests.push(request);
    }

    fn read_scheduler(
        &mut self,
        file: &LogFile,
        span: Span,
        ends: &mut HashMap<(String, BatchId), Time>,
    ) -> Result<(), BadFolder> {
        let (mut part, mut now, mut names) = (Part::of(file.machine), Time::ZERO, Names::default());
        file.read::<ClusterRecords>(span, |is_before, entry| {
            let record = entry.record;
            record.name_model(&mut names);
            if is_before {
                let is_kept = |input: &Input| {
                    ClusterRecords::is_setup(input) || matches!(input, Input::SetProfile(..) | Input::SetDispatch(..))
                };
                if matches!(&record, Record::Input(_, input) if is_kept(input)) {
                    part.add(record);
                }
                return;
            }
            match &record {
                Record::Input(at, input) => {
                    now = *at;
                    match input {
                        Input::Request(request) => self.add(now, &names, *request),
                        Input::Completion { device, batch } => {
                            ends.insert((device.to_string(), *batch), now);
                        }
                        _ => {}
                    }
                }
                Record::Refused(reject) => {
                    if let Some(last) = self.requests.last_mut() {
                        last.refused = Some(*reject);
                    }
                }
                Record::Decision(Decision::Output(output)) => self.output(now, &names, output),
                Record::Decision(_) => {}
            }
            part.add(record);
        })?;
        self.parts.push(part);
        Ok(())
    }

    fn output(&mut self, now: Time, names: &Names, output: &Output) {
        match output {
            Output::Dispatch { batch, device, model, members, size, start, expected, reason } => {
                let place = self.batches.len();
                self.batches.push(LoggedBatch {
                    batch: *batch,
                    device: DeviceId::to_string(device),
                    queue: names.of(*model).to_string(),
                    model: Some(*model),
                    members: members.clone(),
                    size: *size,
                    left: now,
                    start: *start,
                    expected: Some(*expected),
                    reason: Some(*reason),
                    end: None,
                });
                self.take(members, place);
            }
            Output::Drop { request, reason, detail, .. } => {
                if let Some(its) = self.get_mut(*request) {
                    its.dropped = Some((now, *reason, *detail));
                }
            }
        }
    }

    /// A batch takes these requests.
    fn take(&mut self, members: &[RequestId], batch: usize) {
        for member in members {
            if let Some(its) = self.get_mut(*member)
                && its.batch.is_none()
            {
                its.batch = Some(batch);
            }
        }
    }

    fn read_device(&mut self, file: &LogFile, number: u32, span: Span) -> Result<(), BadFolder> {
        let (mut names, mut now, mut running) = (Names::default(), Time::ZERO, BTreeMap::<LaunchId, usize>::new());
        file.read::<DeviceRecords>(span, |is_before, entry| {
            entry.record.name_model(&mut names);
            if is_before {
                return;
            }
            match &entry.record {
                Record::Input(at, input) => {
                    now = *at;
                    match input {
                        DeviceInput::Request(request) => {
                            let (id, model, deadline) = (request.id, request.model, request.deadline);
                            let (queue_expiry, level, size) = (Time::MAX, 0, request.size);
                            self.add(now, &names, Request { id, model, deadline, queue_expiry, level, size });
                        }
                        DeviceInput::Completion { launch, span, .. } => {
                            let batch = running.remove(launch).and_then(|place| self.batches.get_mut(place));
                            if let Some(batch) = batch {
                                (batch.start, batch.end) = (span.start, Some(span.end));
                            }
                        }
                        _ => {}
                    }
                }
                Record::Refused(reason) => {
                    if let Some(last) = self.requests.last_mut().filter(|last| last.at == now) {
                        last.refused_by_device = Some(reason.clone());
                    }
                }
                Record::Decision(output) => self.device_output(now, number, &names, output, &mut running),
            }
        })
    }

    fn device_output(
        &mut self,
        now: Time,
        number: u32,
        names: &Names,
        output: &DeviceOutput,
        running: &mut BTreeMap<LaunchId, usize>,
    ) {
        let mut launched = |launch: &Launch| {
            // The scheduler's file has the batches that it granted.
            if launch.granted.is_some() {
                return;
            }
            let place = self.batches.len();
            running.insert(launch.id, place);
            self.batches.push(LoggedBatch {
                batch: launch.batch,
                device: format!("device {number}"),
                queue: names.of(launch.model).to_string(),
                model: None,
                members: launch.members.clone(),
                size: launch.rows,
                left: now,
                start: now,
                expected: None,
                reason: None,
                end: None,
            });
            self.take(&launch.members, place);
        };
        match output {
            DeviceOutput::Launch(launch) => launched(launch),
            DeviceOutput::Group(launches) => launches.iter().for_each(launched),
            DeviceOutput::Reply { request, .. } => {
                if let Some(its) = self.get_mut(*request) {
                    its.replied = Some(now);
                }
            }
            DeviceOutput::Drop { request, reason } => {
                if let Some(its) = self.get_mut(*request) {
                    its.dropped_by_device = Some((now, *reason));
                }
            }
            _ => {}
        }
    }

    fn read_requests(&mut self, file: &LogFile, span: Span) -> Result<(), BadFolder> {
        let mut names = Names::default();
        file.read::<RequestRecords>(span, |is_before, entry| {
            entry.record.name_model(&mut names);
            let Record::Input(now, input) = entry.record else { return };
            if is_before {
                return;
            }
            let name = |model: u32| names.of(ModelId(model)).to_string();
            match input {
                // A frontend of a cluster has no scheduler, and its log is told otherwise.
                RequestInput::Model(..) | RequestInput::Went { .. } => {}
                RequestInput::Came { request, id, trace, .. } => {
                    if let Some(its) = self.get_mut(request) {
                        (its.id, its.trace) = (Some(id).filter(|id| !id.is_empty()), trace);
                        its.came = Some(now);
                    } else {
                        self.early(now, request, String::new(), Some(id).filter(|id| !id.is_empty()), trace);
                    }
                }
                RequestInput::Failed { request, model, items, arrived, deadline, failure, error } => {
                    if self.get_mut(request).is_none() && arrived >= span.from {
                        self.early(arrived, request, name(model), None, None);
                    }
                    if let Some(its) = self.get_mut(request) {
                        if its.model.is_empty() {
                            (its.model, its.queue) = (name(model), name(model));
                        }
                        if its.is_early() {
                            (its.size, its.deadline) = (items, deadline);
                        }
                        its.failed = Some((now, failure, error));
                    }
                }
            }
        })?;
        // Requests that the log of the scheduler does not have, and that have not ended.
        self.requests.retain(|request| !request.model.is_empty());
        Ok(())
    }

    /// A request that no machine has got, or not yet.
    fn early(&mut self, at: Time, request: RequestId, model: String, id: Option<String>, trace: Option<Trace>) {
        self.insert(LoggedRequest { at, id, trace, size: 0, ..LoggedRequest::new(request, model.clone(), model) });
    }
}

impl LoggedRequest {
    /// Whether a word names the request's model or queue.
    pub fn is_for(&self, word: &str) -> bool {
        self.model == word || self.queue == word
    }

    fn new(request: RequestId, model: String, queue: String) -> LoggedRequest {
        LoggedRequest {
            request,
            model,
            queue,
            at: Time::ZERO,
            came: None,
            deadline: Time::MAX,
            size: 1,
            id: None,
            trace: None,
            refused: None,
            refused_by_device: None,
            dropped: None,
            dropped_by_device: None,
            batch: None,
            replied: None,
            failed: None,
        }
    }

    /// When the request arrived at the server, as far as the log tells.
    pub fn arrived(&self) -> Time {
        self.came.unwrap_or(self.at)
    }

    /// Whether no machine has the request: it was refused before.
    fn is_early(&self) -> bool {
        self.batch.is_none() && self.dropped.is_none() && self.refused.is_none() && self.size == 0
    }
}
