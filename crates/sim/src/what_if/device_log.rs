//! The models on a server's devices, and their requests, from a decision log.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, PastArrival};
use downbeat_core::device::{
    Launch, ModelSpec, Overlap, OverlapPoint, PartitionId, PolicyModel, SegmentProfile, WrittenSettings,
};
use downbeat_core::journal::{LogError, MachineKind};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time, median};

use super::device_part::{DevicePart, Ran};
use super::part::{Fate, Part, Seen};
use super::recorded::{BadLog, logs_in, newest_logs, whole_log};
use crate::device_replay::ReplayedModel;

/// The most items that wait, where the log names no bound.
const UNBOUNDED: u32 = 1 << 20;
/// Two lanes count as measured together once launches ran side by side for this long.
const LEAST_TOGETHER: Duration = Duration::from_millis(100);

/// The models on a server's devices, with their requests, from the server's decision log.
#[derive(Debug)]
pub struct DeviceLog {
    /// The models with requests, by name.
    pub models: Vec<LoggedModel>,
    /// The requests since models or policies changed last. Their models are indices into `models`.
    pub arrivals: Vec<PastArrival>,
    /// The outcome of each arrival in the log.
    pub(super) ends: Vec<LoggedEnd>,
    /// The number of devices.
    pub devices: u32,
    /// The batches of the scheduler that run at once on each device.
    pub at_once: u32,
    /// How long before its last moment the scheduler started a batch that waited.
    pub wake_margin: Duration,
    /// Remarks to read before the log is compared with a replay.
    pub notes: Vec<String>,
    /// By device: its launches, the first one first. Models are indices into `models`.
    launches: Vec<Vec<Ran>>,
    /// When the first arrival came.
    begin: Time,
}

/// A model in a log.
#[derive(Debug)]
pub struct LoggedModel {
    /// The model's name.
    pub name: String,
    /// The policy in use.
    pub policy: ModelSpec,
    /// The options of the scheduler's queue; `None`: a device policy makes the model's batches.
    pub options: Option<ModelOptions>,
    /// The latencies of its segments, as its policy has it cut.
    cut: SegmentProfile,
    /// The latencies of all segments together.
    whole: LatencyProfile,
}

/// The outcome of a request in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LoggedEnd {
    /// The log does not tell.
    Unknown,
    Dropped,
    /// Answered this long after the arrival.
    Answered(Duration),
}

/// The reason why a log of devices cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum BadDeviceLog {
    /// A file cannot be read.
    #[error(transparent)]
    Log(#[from] BadLog),
    /// There is no log of a device.
    #[error(
        "there is no log of a device, such as device-0.log: give the folder that `downbeat serve --decision-log` writes"
    )]
    NoDevice,
    /// A device is divided.
    #[error("the log's devices are divided into {0} partitions; only undivided devices can be replayed")]
    Divided(usize),
    /// No request can be replayed.
    #[error("the log has no request that can be replayed{}", if .0.is_empty() { String::new() } else { format!(": {}", .0.join(" ")) })]
    NoRequests(Vec<String>),
}

/// The numbers of a replay that the log's launches show.
struct Measured {
    /// By model: latencies of launches alone on their device, as shares of the profile's.
    shares: Vec<Vec<f64>>,
    /// The work of launches side by side, as a multiple of the work of one alone; `None`: too few
    /// ran side by side.
    together: Option<f64>,
    /// The median time to hand a launch over to its lane, and its end back.
    hand_over: Duration,
}

/// A request of a log, with its outcome.
struct Request {
    at: Time,
    deadline: Time,
    size: u32,
    level: u32,
    /// Refused or given up by the cluster's scheduler.
    is_dropped: bool,
}

impl DeviceLog {
    /// Reads the logs of one run in a folder that `downbeat serve` has written.
    ///
    /// # Errors
    /// If a file cannot be read or is no log, or the files hold nothing to replay.
    pub fn read(folder: &Path) -> Result<DeviceLog, BadDeviceLog> {
        let mut files = logs_in(folder)?;
        files.extend(newest_logs(folder, |log| log.starts_with("device-"))?);
        let files = files.into_iter().map(|file| {
            let bytes = whole_log(&file)?;
            Ok((file, bytes))
        });
        DeviceLog::of(&files.collect::<Result<Vec<_>, BadLog>>()?)
    }

    /// As [`DeviceLog::read`], but of the files' content.
    ///
    /// # Errors
    /// As [`DeviceLog::read`].
    pub fn of(files: &[(PathBuf, Vec<u8>)]) -> Result<DeviceLog, BadDeviceLog> {
        let (mut devices, mut shards) = (Vec::new(), Vec::new());
        for (file, bytes) in files.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let failed = |error| BadLog::Log(file.clone(), error);
            match Part::read(bytes) {
                Err(LogError::Machine(MachineKind::Device(_))) => {
                    devices.push(DevicePart::read(bytes).map_err(failed)?);
                }
                shard => shards.push(shard.map_err(failed)?),
            }
        }
        if devices.is_empty() {
            return Err(BadDeviceLog::NoDevice);
        }
        DeviceLog::join(devices, shards)
    }

    /// Joins the logs of the devices with those of the scheduler, by the requests' ids.
    fn join(mut devices: Vec<DevicePart>, shards: Vec<Part>) -> Result<DeviceLog, BadDeviceLog> {
        if let Some(divided) = devices.iter().map(|device| device.shared_lanes.len()).find(|count| *count > 1) {
            return Err(BadDeviceLog::Divided(divided));
        }
        let requests = Requests::of(&mut devices, &shards);
        let mut notes = requests.notes(&devices);
        let models = requests.models(&shards, &mut notes);
        let seen = requests.seen(&models);
        let Some(begin) = seen.first().map(|seen| seen.request.at) else {
            return Err(BadDeviceLog::NoRequests(notes));
        };
        Ok(DeviceLog {
            arrivals: seen.iter().map(|seen| seen.arrival(begin)).collect(),
            ends: seen.iter().map(|seen| requests.end(seen)).collect(),
            devices: devices.len() as u32,
            at_once: devices.iter().flat_map(|device| &device.shared_lanes).copied().max().unwrap_or(1),
            wake_margin: shards.iter().map(|shard| shard.wake_margin).max().unwrap_or(Duration::ZERO),
            notes,
            launches: launches(devices, &models, begin),
            begin,
            models: models.into_iter().map(|(_, model)| model).collect(),
        })
    }

    /// The models for a replay. `together` has the work of two lanes side by side, as a multiple of
    /// the work of one, where the log does not show it. Only launches that ended before the arrival
    /// of this index are read.
    pub(super) fn replayed(&self, before: usize, together: &BTreeMap<String, f64>) -> Vec<ReplayedModel> {
        let until = self.arrivals.get(before).map_or(Time::MAX, |arrival| self.begin + arrival.at.since(Time::ZERO));
        let Measured { shares, together: shown, hand_over } = self.measured(until);
        let models = self.models.iter().zip(shares);
        models
            .map(|(model, shares)| {
                let factor = together.get(&model.name).copied().or(shown);
                model.replayed(factor, hand_over, shares)
            })
            .collect()
    }

    fn measured(&self, until: Time) -> Measured {
        let of_model = |ran: &Ran| self.models.get(ran.launch.model.0 as usize);
        let known: Vec<Vec<&Ran>> = self
            .launches
            .iter()
            .map(|launches| launches.iter().take_while(|ran| ran.span.end < until).collect())
            .collect();
        let mut shares = vec![Vec::new(); self.models.len()];
        for (ran, model) in
            known.iter().flat_map(|launches| alone(launches)).filter_map(|ran| Some((ran, of_model(ran)?)))
        {
            let (took, expected) = (ran.span.end.since(ran.span.start), model.alone(&ran.launch));
            if expected > Duration::ZERO {
                shares[ran.launch.model.0 as usize].push(took.as_secs_f64() / expected.as_secs_f64());
            }
        }
        let means: Vec<f64> = shares.iter().map(|shares| mean(shares)).collect();
        let work =
            |ran: &Ran| Some(of_model(ran)?.alone(&ran.launch).as_secs_f64() * means[ran.launch.model.0 as usize]);
        let hand_overs = known.iter().flatten().filter_map(|ran| ran.handed_over);
        Measured { together: together(&known, work), hand_over: median(hand_overs).unwrap_or(Duration::ZERO), shares }
    }
}

/// The launches, of launches by their start, that had their device alone.
fn alone<'a>(launches: &'a [&'a Ran]) -> impl Iterator<Item = &'a Ran> {
    let mut busy_until = Time::ZERO;
    launches.iter().enumerate().filter_map(move |(index, ran)| {
        let before = busy_until;
        busy_until = before.max(ran.span.end);
        let is_last = launches.get(index + 1).is_none_or(|next| next.span.start >= ran.span.end);
        (before <= ran.span.start && is_last).then_some(*ran)
    })
}

/// The launches of each device since `begin`, with the models' indices for their numbers.
fn launches(devices: Vec<DevicePart>, models: &[(ModelId, LoggedModel)], begin: Time) -> Vec<Vec<Ran>> {
    let places: BTreeMap<ModelId, u32> = models.iter().map(|(id, _)| *id).zip(0..).collect();
    let of_device = |device: DevicePart| {
        let mut launches: Vec<Ran> = device.launches.into_iter().filter(|ran| ran.span.start >= begin).collect();
        for ran in &mut launches {
            ran.launch.model = ModelId(places.get(&ran.launch.model).copied().unwrap_or(u32::MAX));
        }
        launches.sort_by_key(|ran| ran.span.start);
        launches
    };
    devices.into_iter().map(of_device).collect()
}

/// The requests of a log, and the models that they came to.
struct Requests {
    models_of: HashMap<RequestId, ModelId>,
    /// By the devices' number of their model.
    by_model: BTreeMap<ModelId, BTreeMap<RequestId, Request>>,
    /// By the devices' number of a model: the scheduler's queues of its requests.
    queues: BTreeMap<ModelId, BTreeSet<ModelId>>,
    /// Models whose requests vary in length.
    lengths: BTreeSet<ModelId>,
    /// The models with their policies, by the devices' numbers.
    specs: BTreeMap<ModelId, ModelSpec>,
    /// When a model came last.
    changed: Time,
    /// When requests were answered; `None`: they were refused or given up.
    ends: HashMap<RequestId, Option<Time>>,
}

/// A request that is replayed.
struct SeenRequest<'a> {
    id: RequestId,
    request: &'a Request,
    /// The index of its model.
    model: u32,
}

impl SeenRequest<'_> {
    /// The arrival in a replay that starts with the first request.
    fn arrival(&self, begin: Time) -> PastArrival {
        let Request { at, deadline, size, level, .. } = *self.request;
        let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(at) };
        PastArrival { at: Time::ZERO + at.since(begin), budget, model: ModelId(self.model), size, level }
    }
}

impl Requests {
    fn of(devices: &mut [DevicePart], shards: &[Part]) -> Self {
        let (by_model, queues, lengths) = Default::default();
        let (mut models_of, mut specs, mut ends) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        let mut changed = Time::ZERO;
        for device in &mut *devices {
            models_of.extend(std::mem::take(&mut device.models_of));
            ends.extend(std::mem::take(&mut device.ends));
            for (id, (at, spec)) in std::mem::take(&mut device.models) {
                changed = changed.max(at);
                specs.insert(id, spec);
            }
        }
        let mut requests = Requests { models_of, by_model, queues, lengths, specs, changed, ends };
        devices.iter().for_each(|device| requests.add_device(device));
        shards.iter().for_each(|shard| requests.add_shard(shard));
        requests
    }

    fn notes(&self, devices: &[DevicePart]) -> Vec<String> {
        let mut notes = Vec::new();
        let all = self.by_model.values().flat_map(BTreeMap::values);
        let earlier = all.filter(|request| request.at < self.changed).count();
        if earlier > 0 {
            notes.push(format!("{earlier} requests came before the last model was loaded, and are left out."));
        }
        let passed_over: BTreeSet<&str> =
            devices.iter().flat_map(|device| device.passed_over.iter().copied()).collect();
        if !passed_over.is_empty() {
            let words = passed_over.into_iter().collect::<Vec<_>>().join(", ");
            notes.push(format!("The log has inputs that a replay leaves out: {words}."));
        }
        notes
    }

    /// The requests of these models since a model came last, in their order.
    fn seen(&self, models: &[(ModelId, LoggedModel)]) -> Vec<SeenRequest<'_>> {
        let of = |(model, (id, _)): (u32, &(ModelId, LoggedModel))| {
            let own = self.by_model.get(id).into_iter().flatten();
            let own = own.map(move |(id, request)| SeenRequest { id: *id, request, model });
            own.filter(|seen| seen.request.at >= self.changed).collect::<Vec<_>>()
        };
        let mut seen: Vec<SeenRequest<'_>> = (0..).zip(models).flat_map(of).collect();
        seen.sort_by_key(|seen| (seen.request.at, seen.id));
        seen
    }

    fn end(&self, seen: &SeenRequest<'_>) -> LoggedEnd {
        match self.ends.get(&seen.id) {
            Some(Some(at)) => LoggedEnd::Answered(at.since(seen.request.at)),
            Some(None) => LoggedEnd::Dropped,
            None if seen.request.is_dropped => LoggedEnd::Dropped,
            None => LoggedEnd::Unknown,
        }
    }

    fn add_device(&mut self, device: &DevicePart) {
        for (at, request) in &device.requests {
            if request.length > 0 {
                self.lengths.insert(request.model);
            }
            let (at, deadline, size) = (*at, request.deadline, request.size);
            let its = Request { at, deadline, size, level: 0, is_dropped: false };
            self.by_model.entry(request.model).or_default().insert(request.id, its);
        }
    }

    /// Adds the requests of a shard. The devices' number of a queue's model shows in the queue's
    /// batches.
    fn add_shard(&mut self, shard: &Part) {
        let of = |seen: &Seen| Some((seen.request.model, *self.models_of.get(&seen.request.id)?));
        let models: BTreeMap<ModelId, ModelId> = shard.requests.iter().filter_map(of).collect();
        for Seen { at, request, fate } in &shard.requests {
            let Some(model) = models.get(&request.model) else { continue };
            let is_dropped = matches!(fate, Fate::Rejected | Fate::Dropped(_));
            let (at, deadline, size, level) = (*at, request.deadline, request.size, request.level);
            let its = Request { at, deadline, size, level, is_dropped };
            self.by_model.entry(*model).or_default().insert(request.id, its);
            self.queues.entry(*model).or_default().insert(request.model);
        }
    }

    /// The models that can be replayed, with the devices' numbers, by name.
    fn models(&self, shards: &[Part], notes: &mut Vec<String>) -> Vec<(ModelId, LoggedModel)> {
        let mut models: Vec<(ModelId, LoggedModel)> = Vec::new();
        for (id, spec) in &self.specs {
            let is_new = |request: &Request| request.at >= self.changed;
            let has_requests = |its: &BTreeMap<RequestId, Request>| its.values().any(is_new);
            if !self.by_model.get(id).is_some_and(has_requests) {
                continue;
            }
            let name = spec.name.rsplit_once(' ').map_or(&*spec.name, |(name, _)| name).to_owned();
            let queues = self.queues.get(id).into_iter().flatten();
            let options: Vec<&ModelOptions> =
                queues.filter_map(|queue| shards.iter().find_map(|shard| shard.models.get(queue))).collect();
            if self.lengths.contains(id) || options.len() > 1 {
                notes.push(format!("The requests of {name} vary in shape, so {name} is left out."));
            } else if spec.policy().forms_groups() {
                notes.push(format!("The groups of the policy overlap are not replayed, so {name} is left out."));
            } else if models.iter().any(|(_, other)| other.name == name) {
                notes.push(format!("{name} has several versions in the log; only the first one is advised on."));
            } else if let Some(model) = LoggedModel::new(name, spec, options.first().copied()) {
                models.push((*id, model));
            }
        }
        models.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        models
    }
}

impl LoggedModel {
    /// A model with its policy; `None`: its policy cannot be made, so that the log is of another
    /// program.
    fn new(name: String, policy: &ModelSpec, options: Option<&ModelOptions>) -> Option<Self> {
        let options = options.map(|options| ModelOptions { shares_limit: None, ..options.clone() });
        let cut = match &options {
            Some(options) => SegmentProfile::whole(options.profiles.first()),
            None => policy.build().ok()?.profile,
        };
        let points: Vec<(u32, Duration)> = (1..=cut.max_rows()).map(|rows| (rows, cut.total(rows, 0))).collect();
        let whole = LatencyProfile::from_points(&points).ok()?;
        Some(LoggedModel { name, policy: policy.clone().named(String::new()), options, cut, whole })
    }

    /// What a launch takes alone, by the profile.
    fn alone(&self, launch: &Launch) -> Duration {
        let from = |segment| self.cut.remaining(segment, launch.computed_rows, 0);
        from(launch.segments.first).saturating_sub(from(launch.segments.end.min(self.cut.segments())))
    }

    fn replayed(&self, together: Option<f64>, hand_over: Duration, shares: Vec<f64>) -> ReplayedModel {
        let number = |key: &str| self.policy.options().get(key).and_then(serde_json::Value::as_u64);
        let drop = self.policy.options().get("drop").and_then(serde_json::Value::as_bool);
        let options = self.options.clone().unwrap_or_else(|| {
            let drops = if drop == Some(false) { DropPolicy::None } else { DropPolicy::Adaptive };
            ModelOptions::new(self.whole.clone(), DispatchPolicy::Adaptive { consolidate: false }, drops)
        });
        let bound = options.levels.first().map(|level| level.max_queue);
        let queue_bound = number("queue_bound").and_then(|bound| u32::try_from(bound).ok()).or(bound);
        let one = Duration::from_micros(1_000);
        let overlap = together.map(|factor| {
            let together = Duration::from_secs_f64(2.0 * one.as_secs_f64() / factor);
            Overlap::new(vec![OverlapPoint { batch: 1, alone: one, together }])
        });
        ReplayedModel {
            model: PolicyModel {
                partition: PartitionId::default(),
                profile: SegmentProfile::whole(&self.whole),
                max_batch: options.max_batch.min(self.cut.max_rows()),
                padded: false,
                queue_delay: Duration::ZERO,
                drop: drop.unwrap_or(options.drop != DropPolicy::None),
                queue_bound: queue_bound.unwrap_or(UNBOUNDED),
                ring_slots: 0,
                cores: self.policy.options().get("cores").and_then(|cores| serde_json::from_value(cores.clone()).ok()),
            },
            options,
            overlap,
            cuts: if self.cut.segments() > 1 { vec![self.cut.clone()] } else { Vec::new() },
            launch: hand_over,
            written: WrittenSettings::new(),
            shares,
        }
    }
}

fn mean(shares: &[f64]) -> f64 {
    if shares.is_empty() { 1.0 } else { shares.iter().sum::<f64>() / shares.len() as f64 }
}

/// The work of launches side by side, as a multiple of the work of one alone: the work in the time
/// in which several ran, over that time. `work` has the seconds of a launch alone.
fn together(devices: &[Vec<&Ran>], work: impl Fn(&Ran) -> Option<f64>) -> Option<f64> {
    let (mut all, mut alone, mut crowded) = (0.0, 0.0, 0.0);
    for launches in devices {
        let mut edges: Vec<(Time, i32)> = Vec::new();
        for ran in launches {
            all += work(ran)?;
            edges.extend([(ran.span.start, 1), (ran.span.end, -1)]);
        }
        edges.sort_unstable();
        let (mut count, mut last) = (0, Time::ZERO);
        for (at, change) in edges {
            let passed = at.since(last).as_secs_f64();
            match count {
                0 => {}
                1 => alone += passed,
                _ => crowded += passed,
            }
            (count, last) = (count + change, at);
        }
    }
    (crowded >= LEAST_TOGETHER.as_secs_f64()).then(|| ((all - alone) / crowded).clamp(0.1, 2.0))
}
