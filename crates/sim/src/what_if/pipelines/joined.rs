//! Joins the requests of pipelines with the records of the scheduler.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use downbeat_core::cluster::ModelOptions;
use downbeat_core::journal::LogError;
use downbeat_core::{Duration, ModelId, RequestId, Time};

use super::super::part::{Part, Seen};
use super::super::recorded::{BadLog, Parts, files_of, whole_log};
use super::logged::PipelineLog;
use super::pools::Pools;

/// The file with the requests of pipelines.
const FILE: &str = "pipelines.log";

/// The reason why a log says nothing about pipelines.
#[derive(Debug, thiserror::Error)]
pub enum BadPipelines {
    /// A file cannot be read, or is no log.
    #[error(transparent)]
    Log(#[from] BadLog),
    /// The folder has no file of pipelines.
    #[error(
        "there is no {FILE} in {}: give the folder that `downbeat serve --decision-log` writes; servers before this \
         version wrote none", .0.display()
    )]
    NoFile(PathBuf),
    /// The file has no request.
    #[error("{} has no request: no client asked an ensemble, and no code called another model", .0.display())]
    Empty(PathBuf),
}

/// The pipelines of a log, with the scheduler's records of their steps.
#[derive(Debug)]
pub(super) struct Joined {
    pub log: PipelineLog,
    pub parts: Parts,
    /// By request: its part, and its place there.
    places: HashMap<RequestId, (usize, usize)>,
    /// The names of models that ran steps.
    pub names: BTreeMap<ModelId, String>,
    /// The models of the scheduler, with their last profiles.
    pub models: BTreeMap<ModelId, ModelOptions>,
    pub pools: Pools,
    /// The first arrival of any request, and the last end or arrival.
    pub span: (Time, Time),
}

impl Joined {
    /// The time from the log's begin to this moment, and the span of the log.
    pub fn place_of(&self, at: Time) -> (Duration, Duration) {
        let (begin, end) = self.span;
        (at.since(begin), end.since(begin))
    }

    /// Reads the logs of one run in a folder.
    ///
    /// # Errors
    /// If a file cannot be read or is no log, or the log has no request of a pipeline.
    pub fn read(folder: &Path) -> Result<Joined, BadPipelines> {
        let file = folder.join(FILE);
        if !file.is_file() {
            return Err(BadPipelines::NoFile(folder.to_owned()));
        }
        let bytes = whole_log(&file)?;
        let scheduler = match files_of(&[folder.to_owned()]) {
            // The file of the pipelines alone tells what it knows.
            Err(BadLog::Empty(_)) => Vec::new(),
            files => files?,
        };
        Joined::of((&file, &bytes), &scheduler)
    }

    /// As [`Joined::read`], but of the files' content.
    ///
    /// # Errors
    /// As [`Joined::read`].
    pub fn of((file, bytes): (&Path, &[u8]), scheduler: &[(PathBuf, Vec<u8>)]) -> Result<Joined, BadPipelines> {
        let failed = |error: LogError| BadLog::Log(file.to_owned(), error);
        let log = PipelineLog::read(bytes).map_err(failed)?;
        let parts = Parts::of(scheduler)?;
        let (Some(first), false) = (log.requests.first(), log.requests.is_empty()) else {
            return Err(BadPipelines::Empty(file.to_owned()));
        };
        let mut span = (first.at, first.at);
        let ends = log.requests.iter().filter_map(|request| request.end.map(|(at, ..)| at));
        span.1 = ends.chain(log.requests.iter().map(|request| request.at)).max().unwrap_or(first.at);
        let (mut places, mut models) = (HashMap::new(), BTreeMap::new());
        for (number, part) in parts.parts.iter().enumerate() {
            models.extend(part.models.iter().map(|(id, options)| (*id, options.clone())));
            for (place, seen) in part.requests.iter().enumerate() {
                span = (span.0.min(seen.at), span.1.max(seen.at));
                places.insert(seen.request.id, (number, place));
            }
        }
        let asked: BTreeSet<ModelId> =
            parts.parts.iter().flat_map(|part| &part.requests).map(|seen| seen.request.model).collect();
        // A shape of inputs has a queue of its own, which is a model of its own in the log.
        let of_requests =
            models.iter().filter(|(id, _)| asked.contains(id)).map(|(id, options)| (*id, options.clone()));
        let pools = Pools::of(&of_requests.collect(), &parts.devices_by_kind());
        let mut joined = Joined { log, parts, places, names: BTreeMap::new(), models, pools, span };
        joined.names = joined.names();
        Ok(joined)
    }

    /// The scheduler's record of a request; `None`: a device's policy made its batch, or the record is
    /// missing.
    pub fn seen(&self, id: Option<RequestId>) -> Option<(&Part, &Seen)> {
        let (part, place) = *self.places.get(&id?)?;
        let part = self.parts.parts.get(part)?;
        Some((part, part.requests.get(place)?))
    }

    /// The names of the models that steps asked.
    fn names(&self) -> BTreeMap<ModelId, String> {
        let mut names = BTreeMap::new();
        for request in &self.log.requests {
            for step in &request.steps {
                if let Some((_, seen)) = self.seen(step.asked)
                    && let Some(spec) = self.log.pipelines[request.pipeline].spec.steps.get(step.step as usize)
                {
                    names.entry(seen.request.model).or_insert_with(|| spec.model.clone());
                }
            }
        }
        names
    }

    /// The name of a model, as users know it, or as the log has it.
    pub fn name(&self, model: ModelId) -> String {
        let of_queue = || self.parts.parts.iter().find_map(|part| part.names.get(model)).map(ToString::to_string);
        self.names.get(&model).cloned().or_else(of_queue).unwrap_or_else(|| model.to_string())
    }
}
