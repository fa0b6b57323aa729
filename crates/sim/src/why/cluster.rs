//! The story of a request by the decision log of a frontend of a cluster.

use std::fmt;

use downbeat_core::journal::requests::{RequestInput, RequestRecords, Trace, Way, WayClaim, WayRun};
use downbeat_core::journal::{MachineKind, Record};
use downbeat_core::{RequestId, Time};
use serde::Serialize;

use super::arrival::Arrival;
use super::find::{Asked, LOOK, NotFound};
use super::folder::{BadFolder, LogFolder, Span};
use super::words::{many, ms, told};

/// The story of one request of a cluster, with its numbers. As text it is a paragraph.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ClusterStory {
    /// The request as it came.
    #[serde(flatten)]
    pub arrival: Arrival,
    /// How often the request came back from a batch without a run.
    pub returned: u8,
    /// How many backends were lost that had the request.
    pub lost: u8,
    /// The last batch that has claimed the request.
    pub batch: Option<ClusterBatch>,
    /// From the arrival until the batch claimed the request, or until the end without a batch.
    pub queue_ms: Option<f64>,
    /// From the claim to the begin of the run: the inputs' way, and the wait for the device.
    pub fetch_ms: Option<f64>,
    /// The run, with joining the inputs and separating the outputs.
    pub device_ms: Option<f64>,
    /// From the end of the run to the frontend.
    pub answer_ms: Option<f64>,
    /// From the arrival to the end; `None`: the log ends before the request does.
    pub took_ms: Option<f64>,
    /// The time behind the deadline, of a late request.
    pub late_ms: Option<f64>,
    /// The error that the client got.
    pub error: Option<String>,
}

/// The batch of a request of a cluster.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ClusterBatch {
    /// The name of the batch: epoch, rank of the scheduler, and number.
    pub batch: String,
    /// The number of the epoch in which the batch was planned.
    pub epoch: u64,
    /// The rank of the scheduler that planned the batch.
    pub scheduler: u32,
    /// The name of the backend.
    pub backend: String,
    /// The backend's device; `None`: the batch did not run as a whole.
    pub device: Option<u32>,
    /// Items of the batch; `None`: as above.
    pub items: Option<u32>,
}

/// The records of one request.
#[derive(Default)]
struct Found {
    names: Option<(String, Option<Trace>)>,
    model: u32,
    arrived: Option<Time>,
    deadline: Option<Time>,
    items: u32,
    ended: Option<Time>,
    way: Option<Way>,
    error: Option<String>,
}

impl Found {
    /// Takes a record of the request.
    fn take(&mut self, now: Time, input: RequestInput) {
        match input {
            RequestInput::Model(..) => {}
            RequestInput::Came { model, id, trace, .. } => {
                (self.model, self.names) = (model, Some((id, trace)));
                self.arrived.get_or_insert(now);
            }
            RequestInput::Failed { model, items, arrived, deadline, failure, error, .. } => {
                (self.model, self.arrived, self.deadline, self.ended) =
                    (model, Some(arrived), Some(deadline), Some(now));
                self.items = self.items.max(items);
                self.error = Some(if error.is_empty() { failure.to_string() } else { error });
            }
            RequestInput::Went { model, way, .. } => {
                (self.model, self.arrived, self.deadline) = (model, Some(way.arrived), Some(way.deadline));
                (self.items, self.ended, self.way) = (way.items, self.ended.or(Some(now)), Some(way));
            }
        }
    }

    fn is_bad(&self) -> bool {
        self.error.is_some() || self.ended.zip(self.deadline).is_some_and(|(ended, deadline)| ended > deadline)
    }
}

/// The request that a record is of.
fn request_of(input: &RequestInput) -> Option<RequestId> {
    match input {
        RequestInput::Model(..) => None,
        RequestInput::Came { request, .. }
        | RequestInput::Failed { request, .. }
        | RequestInput::Went { request, .. } => Some(*request),
    }
}

impl LogFolder {
    /// Whether a frontend of a cluster has written the logs: they have requests, and no scheduler.
    pub fn is_of_frontend(&self) -> bool {
        self.files.iter().all(|file| file.machine == MachineKind::Requests)
    }

    /// The story of the request that is asked for, in the log of a frontend.
    ///
    /// # Errors
    /// As [`LogFolder::why`].
    pub fn why_in_cluster(&self, asked: &Asked, model: Option<&str>) -> Result<ClusterStory, NotFound> {
        let (request, since) = match asked {
            Asked::Number(request) => (*request, Time::ZERO),
            Asked::Time(at) => (self.first_bad(*at, model)?, Time::ZERO),
            asked => self.found_by_name(asked, model)?,
        };
        let (mut found, mut is_known) = (Found::default(), false);
        let models = self.records(since, |now, input| {
            if request_of(&input) == Some(request) {
                is_known = true;
                found.take(now, input);
            }
        })?;
        match is_known {
            true => Ok(self.cluster_story(request, &found, &models)),
            false => Err(NotFound::Nothing(format!("the number {request}"))),
        }
    }

    /// The first request that failed or was late in the second from an instant on, or else the first.
    fn first_bad(&self, at: Time, model: Option<&str>) -> Result<RequestId, NotFound> {
        let mut came = std::collections::BTreeMap::<RequestId, Found>::new();
        let models = self.records(at, |now, input| {
            if let Some(request) = request_of(&input) {
                came.entry(request).or_default().take(now, input);
                came.retain(|_, found| found.arrived.is_some_and(|arrived| arrived < at + LOOK));
            }
        })?;
        let is_wanted = |found: &Found| {
            let its = models.get(found.model as usize);
            found.arrived.is_some_and(|arrived| arrived >= at)
                && model.is_none_or(|wanted| its.is_some_and(|its| its == wanted))
        };
        let wanted = || came.iter().filter(|(_, found)| is_wanted(found));
        let first = wanted().find(|(_, found)| found.is_bad()).or_else(|| wanted().next());
        let of = model.map_or(String::new(), |model| format!(" of model '{model}'"));
        first.map(|(request, _)| *request).ok_or(NotFound::Quiet(of, LOOK))
    }

    /// Calls `each` with the records from an instant on. Returns the models by number.
    fn records(&self, since: Time, mut each: impl FnMut(Time, RequestInput)) -> Result<Vec<String>, BadFolder> {
        let mut models = Vec::new();
        for file in self.files.iter().filter(|file| file.machine == MachineKind::Requests) {
            file.read::<RequestRecords>(Span { from: since, until: Time::MAX }, |is_setup, entry| {
                let Record::Input(now, input) = entry.record else { return };
                match input {
                    RequestInput::Model(number, name) if number as usize == models.len() => models.push(name),
                    input if !is_setup => each(now, input),
                    _ => {}
                }
            })?;
        }
        Ok(models)
    }

    fn cluster_story(&self, request: RequestId, found: &Found, models: &[String]) -> ClusterStory {
        let arrived = found.arrived.unwrap_or(Time::ZERO);
        let since = |from: Time, to: Time| ms(to.since(from));
        let deadline = found.deadline.filter(|deadline| *deadline != Time::MAX);
        let claim = found.way.as_ref().and_then(|way| way.claim.as_ref());
        let run = found.way.as_ref().and_then(|way| way.run);
        let (id, trace) = found.names.clone().unwrap_or_default();
        let batch = claim.map(|WayClaim { backend, epoch, rank, batch, .. }| ClusterBatch {
            batch: format!("{epoch}.{rank}.{batch}"),
            epoch: *epoch,
            scheduler: *rank,
            backend: backend.clone(),
            device: run.map(|run| run.device),
            items: run.map(|run| run.items),
        });
        let left_queue = claim.map(|claim| claim.at).or(found.ended);
        ClusterStory {
            arrival: Arrival {
                request: request.to_string(),
                id: Some(id).filter(|id| !id.is_empty()),
                trace: trace.map(|trace| trace.to_string()),
                model: models.get(found.model as usize).cloned().unwrap_or_default(),
                items: found.items,
                came_unix_ns: self.unix_ns(arrived),
                came_ms: ms(arrived.since(Time::ZERO)),
                budget_ms: deadline.map(|deadline| since(arrived, deadline)),
            },
            returned: found.way.as_ref().map_or(0, |way| way.returned),
            lost: found.way.as_ref().map_or(0, |way| way.lost),
            batch,
            queue_ms: left_queue.map(|at| since(arrived, at)),
            fetch_ms: claim.zip(run).map(|(claim, run)| since(claim.at, run.began)),
            device_ms: run.map(|WayRun { began, ended, .. }| since(began, ended)),
            answer_ms: run.zip(found.ended).map(|(run, ended)| since(run.ended, ended)),
            took_ms: found.ended.map(|ended| since(arrived, ended)),
            late_ms: found.ended.zip(deadline).filter(|(ended, deadline)| ended > deadline).map(|(e, d)| since(d, e)),
            error: found.error.clone(),
        }
    }
}

impl fmt::Display for ClusterStory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arrival.fmt(f)?;
        self.tell_way(f)?;
        let took = self.took_ms.map_or_else(|| "some time".to_owned(), told);
        match (&self.error, self.late_ms, self.took_ms) {
            (Some(error), ..) => write!(f, " After {took} it got an error: {error}."),
            (None, Some(late), _) => write!(f, " It was done {took} after its arrival: {} late.", told(late)),
            (None, None, Some(_)) => write!(f, " It was done {took} after its arrival, in time."),
            (None, None, None) => f.write_str(
                " The log has no end of it: the frontend writes the log up to a second later, and no way of the steps \
                 of an ensemble.",
            ),
        }
    }
}

impl ClusterStory {
    fn tell_way(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.returned, self.lost) {
            (0, 0) => {}
            (returned, 0) => write!(f, " It came back {} without a run.", many(returned.into(), "time"))?,
            (0, lost) => write!(f, " {} that had it {} lost.", many(lost.into(), "backend"), was(lost))?,
            (returned, lost) => write!(
                f,
                " It came back {} without a run, and {} that had it {} lost.",
                many(returned.into(), "time"),
                many(lost.into(), "backend"),
                was(lost)
            )?,
        }
        let Some(batch) = &self.batch else {
            return match self.queue_ms {
                Some(_) => f.write_str(" No batch has claimed it."),
                None => Ok(()),
            };
        };
        let ClusterBatch { epoch, scheduler, backend, .. } = batch;
        let waited = self.queue_ms.map_or_else(String::new, told);
        write!(
            f,
            " It waited {waited} until batch {} of backend {backend:?} claimed it, which scheduler {scheduler} had \
             planned in epoch {epoch}.",
            batch.batch
        )?;
        match (batch.device, batch.items, self.fetch_ms, self.device_ms, self.answer_ms) {
            (Some(device), Some(items), Some(fetch), Some(ran), Some(answer)) => write!(
                f,
                " The run began {} later, as the inputs were there and the device was free. {} ran for {} on device \
                 {device}, and the answer came {} after that.",
                told(fetch),
                many(items as usize, "item"),
                told(ran),
                told(answer)
            ),
            _ => f.write_str(" No run of this batch is known."),
        }
    }
}

fn was(count: u8) -> &'static str {
    if count == 1 { "was" } else { "were" }
}
