//! Where the time of pipelines' requests went.

use std::collections::BTreeMap;
use std::path::Path;

use downbeat_core::journal::pipelines::End;
use downbeat_core::{Duration, ModelId, quantiles};
use serde::Serialize;

use super::super::figures::word;
use super::super::part::Fate;
use super::joined::{BadPipelines, Joined};
use super::logged::{LoggedRequest, LoggedStep};
use super::pools::{self, Load};
use super::shortage::{Shortage, shortage};

/// The pipelines of a log.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PipelineViews {
    /// Each pipeline with requests.
    pub pipelines: Vec<PipelineView>,
    /// Remarks.
    pub notes: Vec<String>,
}

/// A pipeline of a log: its requests, and the time in each step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PipelineView {
    /// Its name.
    pub pipeline: String,
    /// Requests that came.
    pub requests: u64,
    /// Requests that were answered in time.
    pub in_time: u64,
    /// Requests that were answered late.
    pub late: u64,
    /// Requests that were not answered, by reason.
    pub lost: BTreeMap<&'static str, u64>,
    /// Requests that had not ended at the end of the log.
    pub open: u64,
    /// The time from the arrival to the answer.
    pub total: Option<Spans>,
    /// The steps, by number.
    pub steps: Vec<StepView>,
    /// The step that is short of devices, or why none is.
    pub shortage: Shortage,
}

/// The time in one step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepView {
    /// The number of the step.
    pub step: u32,
    /// Its model.
    pub model: String,
    /// Requests that reached the step.
    pub requests: u64,
    /// Requests that ended in the step, by reason.
    pub lost: BTreeMap<&'static str, u64>,
    /// From the step's inputs to its run, of answered requests.
    pub waiting: Option<Spans>,
    /// The mean of the part of that time in which the batch was ready and waited for a device.
    pub for_device_ms: f64,
    /// From the begin of the run to the step's outputs.
    pub running: Option<Spans>,
    /// The share of the step in the time that all steps took.
    pub share: f64,
    /// The devices that run the step; `None`: the log does not tell.
    pub devices: Option<StepDevices>,
    /// The time that requests of the pipeline waited here for a device, dropped ones included, in
    /// seconds.
    #[serde(skip)]
    pub waited_seconds: f64,
}

/// The places where the batches of a step run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepDevices {
    /// How many batches may run at once.
    pub places: u32,
    /// Whether the model's own limit of batches at once sets the number, and not the devices.
    pub is_limit: bool,
    /// The mean busy share.
    pub load: f64,
    /// The busy share in the busiest second.
    pub peak: f64,
    /// Other models that use the same devices.
    pub others: Vec<String>,
}

/// Times, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spans {
    /// The mean.
    pub mean_ms: f64,
    /// The median.
    pub p50_ms: f64,
    /// The 99th percentile.
    pub p99_ms: f64,
}

impl Spans {
    fn of(spans: &[Duration]) -> Option<Spans> {
        let [p50, p99] = quantiles(spans.iter().map(|span| span.as_nanos()), [0.5, 0.99])?;
        let mean_ms = spans.iter().map(|span| span.as_millis_f64()).sum::<f64>() / spans.len() as f64;
        let ms = |ns| Duration::from_nanos(ns).as_millis_f64();
        Some(Spans { mean_ms, p50_ms: ms(p50), p99_ms: ms(p99) })
    }
}

/// The times of one step, while they are gathered.
#[derive(Default)]
struct Times {
    requests: u64,
    waiting: Vec<Duration>,
    running: Vec<Duration>,
    for_device: Duration,
    /// The waiting of requests that the queue dropped.
    dropped: Duration,
    lost: BTreeMap<&'static str, u64>,
    models: Vec<ModelId>,
    /// Steps whose batches the log's scheduler did not make.
    untold: u64,
}

impl PipelineViews {
    /// Reads the log in a folder that `downbeat serve --decision-log` has written.
    ///
    /// # Errors
    /// If a file cannot be read or is no log, or the log has no request of a pipeline.
    pub fn read(folder: &Path) -> Result<PipelineViews, BadPipelines> {
        Ok(PipelineViews::of(&Joined::read(folder)?))
    }

    pub(super) fn of(joined: &Joined) -> PipelineViews {
        let all = 0..joined.log.pipelines.len();
        let requests = |pipeline: usize| joined.log.requests.iter().filter(move |its| its.pipeline == pipeline);
        let with_requests = all.filter(|pipeline| requests(*pipeline).next().is_some());
        let (mut untold, mut open) = (0, 0);
        let view = |pipeline: usize| {
            let (view, unknown) = joined.view(pipeline, &requests(pipeline).collect::<Vec<_>>());
            untold += unknown;
            open += view.open;
            view
        };
        let pipelines: Vec<PipelineView> = with_requests.map(view).collect();
        let mut notes = Vec::new();
        if joined.parts.parts.is_empty() {
            notes.push(
                "There are no shard-0.log and matchmaker.log beside pipelines.log: loads are unknown.".to_owned(),
            );
        } else if untold > 0 {
            notes.push(format!(
                "The scheduler has no record of {untold} steps, as the models' device policies made their batches: all of \
                 their waiting counts as waiting for a device."
            ));
        }
        if open > 0 {
            notes.push(format!("{open} requests had not ended at the end of the log."));
        }
        PipelineViews { pipelines, notes }
    }
}

impl Joined {
    /// The view of a pipeline with these requests, and the number of steps that the scheduler did not
    /// see.
    fn view(&self, pipeline: usize, requests: &[&LoggedRequest]) -> (PipelineView, u64) {
        let logged = &self.log.pipelines[pipeline];
        let mut times: Vec<Times> = Vec::new();
        times.resize_with(logged.spec.steps.len(), Times::default);
        let (mut totals, mut in_time, mut late, mut open) = (Vec::new(), 0, 0, 0);
        let mut lost: BTreeMap<&'static str, u64> = BTreeMap::new();
        for request in requests {
            let by_step = request.steps.iter().find(|its| its.end.is_some_and(|(_, end)| !is_quiet(end)));
            match request.end {
                None => open += 1,
                Some((at, End::Answered | End::Late, _)) => totals.push(at.since(request.at)),
                Some((_, end, _)) => {
                    let why = by_step.map_or_else(|| of_end(end), |step| self.why(step));
                    *lost.entry(if end == End::Cancelled { of_end(end) } else { why }).or_default() += 1;
                }
            }
            in_time += u64::from(matches!(request.end, Some((_, End::Answered, _))));
            late += u64::from(matches!(request.end, Some((_, End::Late, _))));
            for step in &request.steps {
                if let Some(times) = times.get_mut(step.step as usize) {
                    self.add(times, step);
                }
            }
        }
        let all: f64 = times.iter().map(Times::seconds).sum();
        let untold = if self.parts.parts.is_empty() { 0 } else { times.iter().map(|times| times.untold).sum() };
        let steps = times.into_iter().zip(&logged.spec.steps).zip(0..);
        let steps: Vec<StepView> =
            steps.map(|((times, spec), step)| self.step_view(step, &spec.model, times, all)).collect();
        let shortage = shortage(&steps, requests.len() as u64);
        let (requests, total) = (requests.len() as u64, Spans::of(&totals));
        let pipeline = logged.label.clone();
        (PipelineView { pipeline, requests, in_time, late, lost, open, total, steps, shortage }, untold)
    }

    /// Adds a request's step to the times.
    fn add(&self, times: &mut Times, step: &LoggedStep) {
        times.requests += 1;
        let Some((at, end)) = step.end else { return };
        let seen = self.seen(step.asked);
        if let Some((_, seen)) = seen
            && !times.models.contains(&seen.request.model)
        {
            times.models.push(seen.request.model);
        }
        if end != End::Answered {
            *times.lost.entry(self.why(step)).or_default() += 1;
            if end == End::Dropped {
                times.dropped += at.since(step.reached);
            }
            return;
        }
        let began = match (step.began, step.asked) {
            (Some(began), _) => began.max(step.reached).min(at),
            // A pipeline as a step: its own steps have the waiting.
            (None, _) => step.reached,
        };
        let waited = began.since(step.reached);
        times.waiting.push(waited);
        times.running.push(at.since(began));
        let batch = seen.and_then(|(part, seen)| match seen.fate {
            Fate::Sent(batch) => part.batches.get(batch).map(|batch| (batch, seen.at)),
            _ => None,
        });
        times.for_device += match batch {
            Some((batch, asked)) => {
                let since = batch.waited_since.map(|ready| ready.max(asked));
                since.map_or(Duration::ZERO, |since| batch.start.since(since)).min(waited)
            }
            None => {
                times.untold += u64::from(step.asked.is_some());
                waited
            }
        };
    }

    /// Why a step lost its request.
    fn why(&self, step: &LoggedStep) -> &'static str {
        match (step.end.map(|(_, end)| end), self.seen(step.asked).map(|(_, seen)| seen.fate)) {
            (Some(End::Dropped), Some(Fate::Dropped(reason))) => word(reason),
            (Some(End::Dropped), Some(Fate::Rejected)) => "refused",
            (Some(end), _) => of_end(end),
            (None, _) => "open",
        }
    }

    fn step_view(&self, step: u32, model: &str, times: Times, all: f64) -> StepView {
        let answered = times.waiting.len().max(1) as f64;
        StepView {
            step,
            model: model.to_owned(),
            requests: times.requests,
            waiting: Spans::of(&times.waiting),
            for_device_ms: times.for_device.as_millis_f64() / answered,
            running: Spans::of(&times.running),
            share: if all > 0.0 { times.seconds() / all } else { 0.0 },
            devices: self.devices(&times.models),
            waited_seconds: (times.for_device + times.dropped).as_secs_f64(),
            lost: times.lost,
        }
    }

    /// The devices that run these models; `None`: the scheduler knows none of them.
    fn devices(&self, models: &[ModelId]) -> Option<StepDevices> {
        let model = models.first()?;
        let pool = *self.pools.of_model.get(model)?;
        let devices = self.pools.pools.get(pool)?.devices;
        let limit = self.models.get(model).map_or(u32::MAX, |options| options.max_in_flight);
        let is_limit = limit < devices;
        let of = |id: ModelId| {
            if is_limit { models.contains(&id) } else { self.pools.of_model.get(&id) == Some(&pool) }
        };
        let spans = pools::spans(&self.parts.parts, |part, batch| self.parts.end(part, batch), of);
        let places = limit.min(devices).max(1);
        let Load { mean: load, peak } = pools::load(&spans, places, self.span);
        let others = self.pools.of_model.iter().filter(|(id, its)| !is_limit && **its == pool && !models.contains(id));
        let mut others: Vec<String> = others.map(|(id, _)| self.name(*id)).collect();
        others.sort();
        others.dedup();
        Some(StepDevices { places, is_limit, load, peak, others })
    }
}

impl Times {
    fn seconds(&self) -> f64 {
        let sum = |spans: &[Duration]| spans.iter().map(|span| span.as_secs_f64()).sum::<f64>();
        sum(&self.waiting) + sum(&self.running)
    }
}

/// Whether a step with this end lost no request by itself.
fn is_quiet(end: End) -> bool {
    matches!(end, End::Answered | End::Late | End::Cancelled)
}

/// The word for an end.
fn of_end(end: End) -> &'static str {
    match end {
        End::Answered => "answered",
        End::Late => "late",
        End::Hopeless => "given up",
        End::Dropped => "dropped",
        End::Full => "queue full",
        End::TimedOut => "timed out",
        End::Failed => "failed",
        End::Cancelled => "cancelled",
    }
}
