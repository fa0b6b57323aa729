//! Reads the requests and their outcome from a decision log.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::cluster::{ModelOptions, NetworkBudget, OrderPolicy};
use downbeat_core::journal::{LogError, MachineKind, QueueName, machine_of};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, Time};

use super::comparison::Row;
use super::figures::{Figures, ModelFigures, Samples, median, word};
use super::part::{Fate, Part, Seen};
use crate::arrivals::arrival::Arrival;
use crate::scenario::MOST_DEVICES;

/// Most execution times that are kept of a model, evenly from the shortest to the longest.
const MOST_EXECUTIONS: usize = 4_096;

/// The content of a decision log: requests to replay, and their outcome.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The models with requests, in order of their ids.
    pub models: Vec<RecordedModel>,
    /// All requests. The first one comes at zero. Their models are indices into `models`.
    pub arrivals: Arc<[Arrival]>,
    /// The largest number of devices at one time.
    pub devices: u32,
    /// The network delays to plan with.
    pub network: NetworkBudget,
    /// The order in which candidates got devices.
    pub order: OrderPolicy,
    /// How long before its last moment a batch that waits started.
    pub wake_margin: Duration,
    /// The time from the first arrival to the last; at least a millisecond.
    pub span: Duration,
    /// The outcome in the log, as a row of a comparison.
    pub happened: Row,
    /// Remarks to read before the log is compared with a simulation.
    pub notes: Vec<String>,
}

/// A model of a log.
#[derive(Clone, PartialEq, Debug)]
pub struct RecordedModel {
    /// The log's id of the model.
    pub id: ModelId,
    /// The name of the model, or of its queue for requests of one shape; `None`: the log has no name.
    pub queue: Option<QueueName>,
    /// The last options of the model, with its last profiles.
    pub options: ModelOptions,
    /// The median time from arrival to deadline; `None`: none of its requests has a deadline.
    pub slo: Option<Duration>,
    /// The times of its batches, as shares of the time of the profile in `options`; at most 4,096,
    /// in order. Empty: unknown, or the profile's times.
    pub executions: Arc<[f64]>,
}

/// The reason why a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum BadLog {
    /// A file cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// A folder without a log.
    #[error("there is no decision log in {}: no shard-0.log", .0.display())]
    Empty(PathBuf),
    /// A file is no log, or damaged.
    #[error("{}", .0.display())]
    Log(PathBuf, #[source] LogError),
    /// The log is of a device.
    #[error(
        "{} is the log of a device; the command replays the requests of the scheduler: name shard-0.log and so on, or \
         the folder", .0.display()
    )]
    OfDevice(PathBuf),
    /// The log has no requests.
    #[error("there is no request in the log{}", if *.0 { ": a matchmaker's log has only the grants of devices; add the logs of the shards" } else { "" })]
    NoRequests(bool),
    /// The log has no devices.
    #[error("there is no device in the log")]
    NoDevices,
    /// The log has more devices than can be simulated.
    #[error("there are {0} devices in the log; at most {MOST_DEVICES} can be simulated")]
    TooManyDevices(u64),
    /// The log's devices are of several kinds.
    #[error("the log's devices are of {0} kinds; only a cluster of equal devices can be simulated")]
    Kinds(usize),
    /// A model with requests was never added.
    #[error("{0} has requests in the log, but was never added")]
    UnknownModel(ModelId),
}

/// All files of a log.
#[derive(Debug)]
pub(crate) struct Parts {
    pub parts: Vec<Part>,
    completions: HashMap<(DeviceId, BatchId), Time>,
    /// Whether the log has the batches' completions.
    has_completions: bool,
    network: NetworkBudget,
}

impl RecordedModel {
    /// The name for people: of the queue, or the log's id.
    pub fn name(&self) -> String {
        self.queue.as_ref().map_or_else(|| self.id.to_string(), ToString::to_string)
    }

    /// Whether a word names this model: the owner's name, which all queues of the model share, the name
    /// of the queue, or the log's id.
    pub(super) fn is_called(&self, word: &str) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.is_called(word)) || self.id.to_string() == word
    }
}

impl Recorded {
    /// Reads logs of one run: files, or the folder that `downbeat serve` writes them to.
    ///
    /// # Errors
    /// If a file cannot be read or is no log, or the files hold nothing to replay.
    pub fn read(paths: &[PathBuf]) -> Result<Recorded, BadLog> {
        Recorded::of(&files_of(paths)?)
    }

    /// As [`Recorded::read`], but of the files' content.
    ///
    /// # Errors
    /// As [`Recorded::read`].
    pub fn of(files: &[(PathBuf, Vec<u8>)]) -> Result<Recorded, BadLog> {
        Recorded::of_parts(Parts::of(files)?)
    }

    /// As [`Recorded::read`], but of these parts.
    pub(crate) fn of_parts(all: Parts) -> Result<Recorded, BadLog> {
        let (kind, devices) = all.devices()?;
        let mut seen: Vec<(&Part, &Seen)> =
            all.parts.iter().flat_map(|part| part.requests.iter().map(move |seen| (part, seen))).collect();
        seen.sort_by_key(|(_, seen)| seen.at);
        let (Some((_, first)), Some((_, last))) = (seen.first(), seen.last()) else {
            return Err(BadLog::NoRequests(all.parts.iter().all(|part| part.machine == MachineKind::Matchmaker)));
        };
        let (begin, span) = (first.at, last.at.since(first.at).as_nanos());
        let span = Duration::from_nanos(span.max(1_000_000));
        let models = all.models(&seen, kind)?;
        let places: BTreeMap<ModelId, u32> = models.iter().map(|model| model.id).zip(0..).collect();
        let arrival = |(_, seen): &(&Part, &Seen)| {
            let after = |at: Time| if at == Time::MAX { at } else { Time::ZERO + at.since(begin) };
            let model = ModelId(places.get(&seen.request.model).copied().unwrap_or_default());
            Arrival {
                at: after(seen.at),
                model,
                deadline: after(seen.request.deadline),
                queue_expiry: after(seen.request.queue_expiry),
                level: seen.request.level,
                size: seen.request.size,
            }
        };
        let arrivals: Arc<[Arrival]> = seen.iter().map(arrival).collect();
        let happened = all.happened(&models, &seen, devices, span, begin);
        let notes = all.notes(&models, &arrivals, devices);
        let order = all.parts.iter().find_map(|part| part.order).unwrap_or_default();
        let wake_margin = all.parts.iter().map(|part| part.wake_margin).max().unwrap_or_default();
        Ok(Recorded { models, arrivals, devices, network: all.network, order, wake_margin, span, happened, notes })
    }
}

/// The content of a log: a file, with the earlier files that it continues.
///
/// # Errors
/// If a file cannot be read, or an earlier one is no log.
pub fn whole_log(file: &Path) -> Result<Vec<u8>, BadLog> {
    let failed = |path: &Path, error| BadLog::Read(path.to_owned(), error);
    let read = |path: &Path| std::fs::read(path).map_err(|error| failed(path, error));
    let mut whole = Vec::new();
    for earlier in earlier_files(file).map_err(|error| failed(file, error))? {
        let bytes = read(&earlier)?;
        let (_, first) = machine_of(&bytes).map_err(|error| BadLog::Log(earlier.clone(), error))?;
        whole.extend_from_slice(if whole.is_empty() { &bytes } else { &bytes[first..] });
    }
    let mut newest = read(file)?;
    if whole.is_empty() {
        return Ok(newest);
    }
    // A file that has just begun may be empty.
    let first =
        if newest.is_empty() { 0 } else { machine_of(&newest).map_err(|error| BadLog::Log(file.to_owned(), error))?.1 };
    whole.extend(newest.drain(first..));
    Ok(whole)
}

/// The files that a log continues, the oldest first: `shard-0.000001.log` and so on for
/// `shard-0.log`.
fn earlier_files(file: &Path) -> std::io::Result<Vec<PathBuf>> {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = name.strip_prefix(&format!("{stem}.")).and_then(|rest| rest.strip_suffix(".log"));
        if number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The files of a log, with their content: files, or the folder that `downbeat serve` writes them to.
/// A file comes with the earlier files that it continues.
pub(super) fn files_of(paths: &[PathBuf]) -> Result<Vec<(PathBuf, Vec<u8>)>, BadLog> {
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    for path in paths {
        if path.is_dir() { files.extend(logs_in(path)?) } else { files.extend([path.clone()]) }
    }
    let read = |file: PathBuf| {
        let bytes = whole_log(&file)?;
        Ok((file, bytes))
    };
    files.into_iter().map(read).collect()
}

/// The newest files of the logs in a folder. `is_wanted` sees a log's name, such as `shard-0`.
pub(super) fn newest_logs(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, BadLog> {
    let failed = |error| BadLog::Read(folder.to_owned(), error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // An earlier file has a number, too: `shard-0.000001.log`.
        if name.strip_suffix(".log").is_some_and(|log| !log.contains('.') && is_wanted(log)) {
            files.push(file);
        }
    }
    Ok(files)
}

/// The logs of a server's scheduler in a folder.
pub(super) fn logs_in(folder: &Path) -> Result<Vec<PathBuf>, BadLog> {
    let mut files = Vec::new();
    for file in newest_logs(folder, |log| log == "matchmaker" || log.starts_with("shard-"))? {
        // A part without records has an empty file.
        if file.metadata().map_err(|error| BadLog::Read(folder.to_owned(), error))?.len() > 0 {
            files.push(file);
        }
    }
    if files.is_empty() { Err(BadLog::Empty(folder.to_owned())) } else { Ok(files) }
}

impl Parts {
    /// Reads these files.
    ///
    /// # Errors
    /// If a file is no log of a scheduler, or damaged.
    pub fn of(files: &[(PathBuf, Vec<u8>)]) -> Result<Parts, BadLog> {
        let parts = files.iter().map(|(file, bytes)| {
            Part::read(bytes).map_err(|error| match error {
                LogError::Machine(MachineKind::Device(_)) => BadLog::OfDevice(file.clone()),
                error => BadLog::Log(file.clone(), error),
            })
        });
        Ok(Parts::join(parts.collect::<Result<_, _>>()?))
    }

    /// The parts of one log.
    pub fn join(mut parts: Vec<Part>) -> Parts {
        let completions: HashMap<_, _> =
            parts.iter_mut().flat_map(|part| std::mem::take(&mut part.completions)).collect();
        let has_completions = parts.iter().any(|part| !matches!(part.machine, MachineKind::Shard { .. }));
        let network = parts.iter().map(|part| part.network).find(|network| *network != NetworkBudget::default());
        Parts { parts, completions, has_completions, network: network.unwrap_or_default() }
    }

    /// By kind: the largest number of devices at one time.
    pub fn devices_by_kind(&self) -> BTreeMap<DeviceKind, u32> {
        let mut devices: BTreeMap<DeviceKind, u32> = BTreeMap::new();
        for (kind, count) in self.parts.iter().flat_map(|part| &part.devices) {
            let most = devices.entry(*kind).or_default();
            *most = (*most).max(*count);
        }
        devices.retain(|_, count| *count > 0);
        devices
    }

    /// The kind of the devices, and their number.
    fn devices(&self) -> Result<(DeviceKind, u32), BadLog> {
        let devices = self.devices_by_kind();
        let mut known = devices.iter();
        match (known.next(), known.next()) {
            (None, _) if self.parts.iter().all(|part| part.requests.is_empty()) => Err(BadLog::NoRequests(false)),
            (None, _) => Err(BadLog::NoDevices),
            (Some(_), Some(_)) => Err(BadLog::Kinds(devices.len())),
            (Some((_, count)), None) if *count > MOST_DEVICES => Err(BadLog::TooManyDevices(u64::from(*count))),
            (Some((kind, count)), None) => Ok((*kind, *count)),
        }
    }

    fn models(&self, seen: &[(&Part, &Seen)], kind: DeviceKind) -> Result<Vec<RecordedModel>, BadLog> {
        let mut budgets: BTreeMap<ModelId, Vec<Duration>> = BTreeMap::new();
        for (_, Seen { at, request, .. }) in seen {
            let budgets = budgets.entry(request.model).or_default();
            budgets.extend((request.deadline < Time::MAX).then(|| request.deadline.since(*at)));
        }
        let places: BTreeMap<ModelId, u32> = budgets.keys().copied().zip(0..).collect();
        let models = budgets.into_iter().map(|(id, budgets)| {
            let options = self.parts.iter().find_map(|part| part.models.get(&id)).ok_or(BadLog::UnknownModel(id))?;
            let mut options = options.clone();
            options.profiles = options.profiles.get(kind).unwrap_or_else(|| options.profiles.first()).clone().into();
            options.shares_limit = options.shares_limit.and_then(|other| places.get(&other).copied()).map(ModelId);
            let executions = self.executions(id, options.profiles.first());
            let queue = self.parts.iter().find_map(|part| part.names.get(id)).cloned();
            Ok(RecordedModel { id, queue, options, slo: median(budgets), executions })
        });
        models.collect()
    }

    /// The end of a batch, as far as it is known.
    pub fn end(&self, part: &Part, batch: usize) -> Option<Time> {
        let batch = part.batches.get(batch)?;
        if self.has_completions {
            self.completions.get(&batch.key).copied()
        } else {
            Some(batch.start + batch.expected)
        }
    }

    fn happened(
        &self,
        models: &[RecordedModel],
        seen: &[(&Part, &Seen)],
        devices: u32,
        span: Duration,
        begin: Time,
    ) -> Row {
        let mut counts: BTreeMap<ModelId, (Figures, Samples)> = BTreeMap::new();
        for (part, Seen { at, request, fate }) in seen {
            let (figures, samples) = counts.entry(request.model).or_default();
            let before = (figures.unknown, figures.in_time);
            figures.requests += 1;
            match *fate {
                Fate::Unknown => figures.unknown += 1,
                Fate::Rejected => figures.rejected += 1,
                Fate::Dropped(reason) => *figures.dropped.entry(word(reason)).or_default() += 1,
                Fate::Sent(batch) => match self.end(part, batch) {
                    None => figures.unknown += 1,
                    Some(end) => {
                        let in_time = end + self.network.reply <= request.deadline;
                        *(if in_time { &mut figures.in_time } else { &mut figures.late }) += 1;
                        samples.waits.push(part.batches[batch].start.since(*at));
                        samples.answers.push((end + self.network.reply).since(*at));
                    }
                },
            }
            let known = u64::from(figures.unknown == before.0);
            samples.parts.add(at.since(begin), span, (known, figures.in_time - before.1));
        }
        let samples = counts.values().fold(Samples::default(), |sum, (_, samples)| sum.with(samples));
        let all = Figures::sum(counts.values().map(|(figures, _)| figures)).finished(span, &samples);
        let figures = models.iter().filter_map(|model| {
            let (figures, samples) = counts.remove(&model.id)?;
            Some(ModelFigures { model: model.name(), figures: figures.finished(span, &samples) })
        });
        let models = figures.collect();
        let (mut busy, mut over) = (0.0, begin + span);
        for part in &self.parts {
            for (index, batch) in part.batches.iter().enumerate() {
                let end = self.end(part, index).unwrap_or(batch.start);
                busy += end.since(batch.start).as_secs_f64();
                over = over.max(end);
            }
        }
        let busy = busy / (f64::from(devices) * over.since(begin).as_secs_f64());
        Row {
            source: "log".to_owned(),
            policy: "as recorded".to_owned(),
            devices,
            rate: 1.0,
            max_batch: None,
            busy,
            all,
            models,
        }
    }

    /// The times of a model's batches, as shares of this profile's times, in order.
    pub fn executions(&self, model: ModelId, profile: &LatencyProfile) -> Arc<[f64]> {
        let batches = self.parts.iter().flat_map(|part| &part.batches).filter(|batch| batch.model == model);
        let shares = batches.filter_map(|batch| {
            let (took, expected) = (self.completions.get(&batch.key)?.since(batch.start), profile.latency(batch.size));
            (expected > Duration::ZERO).then(|| took.as_secs_f64() / expected.as_secs_f64())
        });
        let mut shares: Vec<f64> = shares.collect();
        shares.sort_unstable_by(f64::total_cmp);
        // Differences of less than 0.1% are rounding, not noise.
        if shares.iter().all(|share| (share - 1.0).abs() < 1e-3) {
            shares.clear();
        }
        let kept = shares.len().min(MOST_EXECUTIONS);
        (0..kept).map(|index| shares[(2 * index + 1) * shares.len() / (2 * kept)]).collect()
    }

    fn notes(&self, models: &[RecordedModel], arrivals: &[Arrival], devices: u32) -> Vec<String> {
        let mut notes = Vec::new();
        let passed_over: BTreeSet<&str> = self.parts.iter().flat_map(|part| &part.passed_over).copied().collect();
        if !passed_over.is_empty() {
            let words: Vec<&str> = passed_over.into_iter().collect();
            notes.push(format!("The simulation leaves out these parts of the log: {}.", words.join(", ")));
        }
        let indices = self.parts.iter().filter_map(|part| match part.machine {
            MachineKind::Shard { index, shards } => Some((index, shards)),
            _ => None,
        });
        let indices: BTreeSet<(u32, u32)> = indices.collect();
        if let Some((_, shards)) = indices.first().filter(|(_, shards)| (indices.len() as u32) < *shards) {
            notes.push(format!(
                "There are logs of {} of the {shards} shards: the requests of the other shards, if any, are missing.",
                indices.len()
            ));
        }
        if !self.has_completions {
            notes.push(
                "Without matchmaker.log the ends of batches are unknown: the row of the log shows the planned times."
                    .to_owned(),
            );
        }
        let uneven = models.iter().filter_map(|model| {
            let (name, executions) = (model.name(), &model.executions);
            let [middle, most] = [executions.len() / 2, executions.len() * 99 / 100].map(|at| executions.get(at));
            let mean = executions.iter().sum::<f64>() / executions.len() as f64;
            Some(format!("{name} {:.2} (p99 {:.2}, mean {mean:.2})", middle?, most?))
        });
        let uneven: Vec<String> = uneven.collect();
        if !uneven.is_empty() {
            notes.push(format!(
                "Batches take times of the log, not of the last profiles; medians, as shares of the profile: {}.",
                uneven.join(", ")
            ));
        }
        let limited = models.iter().filter(|model| model.options.max_in_flight < devices);
        let limited: Vec<String> =
            limited.map(|model| format!("{} {}", model.name(), model.options.max_in_flight)).collect();
        if !limited.is_empty() {
            notes.push(format!("At most as many batches run at once as in the log: {}.", limited.join(", ")));
        }
        let adaptive = models.iter().any(|model| model.options.is_adaptive());
        // Each shard with adaptive models has all trials since its first adaptive model.
        let (trials, changes) = self.parts.iter().map(|part| part.trials).max().unwrap_or_default();
        if adaptive {
            notes.push(
                match trials {
                    0 => "The log has adaptive models, but no trial of a rehearsal".to_owned(),
                    _ => {
                        format!("The log has {trials} trials of a rehearsal; {changes} changed models' behaviour")
                    }
                } + "; the simulation rehearses anew, unless --no-rehearsal is given.",
            );
        }
        if arrivals.iter().any(|arrival| arrival.deadline == Time::MAX) {
            notes.push("Requests without a deadline count as in time once they are answered.".to_owned());
        }
        notes
    }
}
