//! The counts of a run.

use downbeat_core::cluster::DropReason;
use downbeat_core::{DeviceId, Duration, ModelId, RequestId, Time};

use crate::arrivals::arrival::Arrival;
use crate::simulation::Simulation;
use crate::simulation::checker::Known;
use crate::tables::recording::{RecordedBatch, Recording};
use crate::tables::report::{DELAY_BINS, ModelReport, Report, Window};

/// The counts of a run.
#[derive(Debug)]
pub(crate) struct Tally {
    models: Vec<Counts>,
    /// Arrivals from this time on count.
    start: Time,
    span: Duration,
    /// The busy time of each device.
    busy: Vec<Duration>,
    windows: Vec<Window>,
    /// Length of a window; zero: no windows.
    window: Duration,
    recording: Option<Recording>,
    /// Whether to keep each queueing delay.
    each_wait: bool,
    /// Whether some model has more bad requests than it may have.
    gave_up: bool,
}

#[derive(Debug)]
struct Counts {
    report: ModelReport,
    /// Bad requests so far.
    bad: u64,
    /// With more bad requests, the share is certain to exceed the tolerated share.
    most_bad: u64,
    /// Parts of the SLO in a nanosecond.
    bins_per_nano: f64,
}

/// A batch on a device.
#[derive(Debug)]
pub(crate) struct Run {
    pub device: DeviceId,
    pub model: ModelId,
    pub members: Vec<RequestId>,
    pub size: u32,
    pub start: Time,
    /// The batch's index in the recording.
    recorded: Option<usize>,
}

impl Tally {
    pub fn new(simulation: &Simulation) -> Self {
        let start = Time::ZERO + simulation.warm_up;
        let models = simulation.loads.iter().zip(0..).map(|(load, index)| {
            let most_bad = simulation.give_up_above.map_or(u64::MAX, |share| {
                if let Some(arrivals) = &simulation.recorded {
                    let counts = |arrival: &&Arrival| arrival.model == ModelId(index) && arrival.at >= start;
                    return (share * arrivals.iter().filter(counts).count() as f64).floor() as u64;
                }
                // The actual arrivals exceed the mean by more than eight standard deviations
                // practically never.
                // expected.
                let mean = load.rate * load.pace.mean_until(start + simulation.span) * simulation.span.as_secs_f64();
                let deviation = (mean * load.arrivals.dispersion()).sqrt();
                (share * (mean + 8.0 * deviation + 8.0)).ceil() as u64
            });
            Counts {
                report: ModelReport { slo: load.slo, delays: vec![0; DELAY_BINS + 1], ..ModelReport::default() },
                bad: 0,
                most_bad,
                bins_per_nano: DELAY_BINS as f64 / load.slo.as_nanos().max(1) as f64,
            }
        });
        Tally {
            models: models.collect(),
            start,
            span: simulation.span,
            busy: vec![Duration::ZERO; simulation.devices as usize],
            windows: Vec::new(),
            window: simulation.window,
            recording: simulation.record.then(Recording::default),
            each_wait: simulation.recorded.is_some(),
            gave_up: false,
        }
    }

    /// Whether the outcome is certain, so that the run may end.
    pub fn gave_up(&self) -> bool {
        self.gave_up
    }

    pub fn arrival(&mut self, now: Time, model: ModelId) {
        if now >= self.start {
            self.models[model.0 as usize].report.offered += 1;
        }
        if self.window > Duration::ZERO {
            self.window_at(now).offered[model.0 as usize] += 1;
        }
        if let Some(recording) = &mut self.recording {
            recording.arrival(now, model);
        }
    }

    pub fn rejection(&mut self, now: Time, model: ModelId) {
        if now >= self.start {
            self.models[model.0 as usize].report.rejected += 1;
            self.bad(model);
        }
    }

    pub fn dropped(&mut self, known: &Known, model: ModelId, reason: DropReason) {
        if known.arrival >= self.start {
            *self.models[model.0 as usize].report.dropped.entry(reason).or_default() += 1;
            self.bad(model);
        }
    }

    /// A batch starts at `start`: now, or when it reaches its device.
    pub fn started(
        &mut self,
        start: Time,
        device: DeviceId,
        model: ModelId,
        members: Vec<RequestId>,
        size: u32,
    ) -> Run {
        let recorded = self.recording.as_mut().and_then(|recording| {
            let batch = RecordedBatch { device, model, start, end: Time::MAX, size, preempted: false };
            recording.start(batch, &members)
        });
        Run { device, model, members, size, start, recorded }
    }

    /// A batch leaves its device, at its end or by preemption.
    pub fn stopped(&mut self, now: Time, run: &Run, preempted: bool) {
        let report = &mut self.models[run.model.0 as usize].report;
        if preempted {
            report.preempted += 1;
        } else {
            let size = run.size as usize;
            if report.batch_sizes.len() <= size {
                report.batch_sizes.resize(size + 1, 0);
            }
            report.batch_sizes[size] += 1;
        }
        self.busy[run.device.0 as usize] += now.since(run.start);
        if self.window > Duration::ZERO {
            self.busy_windows(run.device, run.start, now);
        }
        if let (Some(recording), Some(index)) = (&mut self.recording, run.recorded) {
            recording.end(index, now, preempted);
        }
    }

    /// A member of `run` is answered at `now`.
    pub fn finished(&mut self, now: Time, run: &Run, request: RequestId, known: &Known) {
        let good = now <= known.deadline;
        if known.arrival >= self.start {
            let Counts { report, bins_per_nano, .. } = &mut self.models[run.model.0 as usize];
            let wait = run.start.since(known.arrival);
            if self.each_wait {
                report.waits.push(wait);
                report.answers.push(now.since(known.arrival));
            }
            let delay = wait.as_nanos() as f64 * *bins_per_nano;
            report.delays[(delay as usize).min(DELAY_BINS)] += 1;
            if good {
                report.good += 1;
            } else {
                report.missed += 1;
                self.bad(run.model);
            }
        }
        if good && self.window > Duration::ZERO {
            self.window_at(known.arrival).good[run.model.0 as usize] += 1;
        }
        if good && let Some(recording) = &mut self.recording {
            recording.good(request);
        }
    }

    /// Returns the report at the end of the run.
    pub fn report(self, now: Time) -> Report {
        let total = now.since(Time::ZERO).as_secs_f64();
        Report {
            models: self.models.into_iter().map(|counts| counts.report).collect(),
            busy: self.busy.iter().map(|busy| if total > 0.0 { busy.as_secs_f64() / total } else { 0.0 }).collect(),
            span: self.span,
            gave_up: self.gave_up,
            windows: self.windows,
            recording: self.recording.unwrap_or_default(),
        }
    }

    fn bad(&mut self, model: ModelId) {
        let counts = &mut self.models[model.0 as usize];
        counts.bad += 1;
        self.gave_up |= counts.bad > counts.most_bad;
    }

    fn window_at(&mut self, at: Time) -> &mut Window {
        let index = (at.as_nanos() / self.window.as_nanos()) as usize;
        while self.windows.len() <= index {
            let start = Time::from_nanos(self.windows.len() as u64 * self.window.as_nanos());
            self.windows.push(Window {
                start,
                offered: vec![0; self.models.len()],
                good: vec![0; self.models.len()],
                busy: vec![0.0; self.busy.len()],
            });
        }
        &mut self.windows[index]
    }

    fn busy_windows(&mut self, device: DeviceId, start: Time, end: Time) {
        let length = self.window;
        let mut at = start;
        while at < end {
            let window = self.window_at(at);
            let until = (window.start + length).min(end);
            window.busy[device.0 as usize] += (until.since(at).as_secs_f64() / length.as_secs_f64()) as f32;
            at = until;
        }
    }
}
