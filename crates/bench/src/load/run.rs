//! One run: load threads, and the server's statistics around them.

use std::sync::atomic::Ordering;
use std::thread::ScopedJoinHandle;

use anyhow::{Context, Result, anyhow};
use downbeat_core::{Duration, Time};

use crate::args::Protocol;
use crate::client::transport::Transport;
use crate::client::transport::grpc::Grpc;
use crate::client::transport::http::Http;
use crate::clock::Clock;
use crate::load::control::Control;
use crate::load::plan::Plan;
use crate::load::poller::Poller;
use crate::load::{Generator, Load, Pace, Shared};
use crate::results::record::{Record, Window};
use crate::results::statistics::ModelStatistics;

/// The time between the start of the threads and the first request.
const LEAD: Duration = Duration::from_millis(20);
/// Longest and shortest interval of the time series.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(10_000), Duration::from_millis(100));

/// The interval at which the main thread checks whether the run is over or must end.
const LOOK: Duration = Duration::from_millis(100);

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The requests and their ends.
    pub record: Record,
    /// The window and rules of the judgement.
    pub window: Window,
    /// The time in which requests counted: the plan's duration, or up to the last arrival if the
    /// plan has no duration.
    pub measured: Duration,
    /// The server's counters for that time, by model; `None` if it keeps no statistics.
    pub statistics: Vec<Option<ModelStatistics>>,
    /// Whether a person has ended the run early.
    pub interrupted: bool,
}

/// Bounds that end a run early.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hopeless {
    /// This many bad requests are too many; 0: never.
    pub bad: u64,
    /// This many requests over the latency target are too many; 0: never.
    pub over: u64,
    /// The latency target.
    pub target: Option<Duration>,
}

/// Offers the plan's load at `pace`.
///
/// # Errors
/// If the system gives no threads or pollers. A failing server is a result, not an error.
pub fn run(plan: &Plan, pace: &Pace, hopeless: Hopeless, progress: &mut dyn FnMut(Time)) -> Result<Outcome> {
    let clock = Clock::start();
    let load = load_of(plan, pace, clock.now() + LEAD, hopeless.target);
    let shared = Shared::new(hopeless.bad, hopeless.over);
    let control = Control::new(plan.target.clone())?;
    let statistics = |plan: &Plan| -> Vec<Option<ModelStatistics>> {
        plan.models.iter().map(|m| control.statistics(&m.envelope).ok()).collect()
    };
    raise_file_limit();

    let (before, record) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads)
            .map(|thread| {
                let work = LoadThread { plan, load: &load, shared: &shared, clock, thread };
                std::thread::Builder::new().name(format!("load-{thread}")).spawn_scoped(scope, move || work.run())
            })
            .collect();
        let nap = |until: Time| {
            clock.sleep_until(until.min(clock.now() + LOOK));
            if plan.interrupted.load(Ordering::Relaxed) {
                shared.stop.store(true, Ordering::Relaxed);
            }
        };
        let run = || threads.iter().any(|t| t.as_ref().is_ok_and(|t| !t.is_finished()));
        while clock.now() < load.window.start && run() {
            nap(load.window.start);
        }
        let before = statistics(plan);
        while run() {
            nap(Time::MAX);
            progress(clock.now());
        }
        let mut record = Record::new(plan.models.len());
        for thread in threads {
            match part_of(thread) {
                Ok(part) => record.merge(&part),
                Err(e) => {
                    shared.stop.store(true, Ordering::Relaxed);
                    return Err(e);
                }
            }
        }
        Ok((before, record))
    })?;
    // A server without statistics before the run is not asked again.
    let after = if before.iter().any(Option::is_some) { statistics(plan) } else { vec![None; before.len()] };
    let statistics = before.into_iter().zip(after).map(|(before, after)| Some(after?.since(&before?))).collect();
    let measured = measured_time(plan, &record);
    let interrupted = plan.interrupted.load(Ordering::Relaxed);
    Ok(Outcome { record, window: load.window, measured, statistics, interrupted })
}

/// Waits for the end of a load thread, and takes its measurements.
fn part_of(thread: std::io::Result<ScopedJoinHandle<'_, std::io::Result<Record>>>) -> Result<Record> {
    let thread = thread.context("a load thread did not start")?;
    Ok(thread.join().map_err(|_| anyhow!("a load thread panicked"))??)
}

/// The time in which requests counted. The length of a run without an end of its own, or of one that
/// ended early, is the time that it took.
fn measured_time(plan: &Plan, record: &Record) -> Duration {
    let took = record.elapsed.saturating_sub(plan.warmup);
    if plan.duration == Duration::MAX || record.stopped || plan.most_requests != u64::MAX {
        took.min(plan.duration)
    } else {
        plan.duration
    }
}

/// The work of one load thread.
struct LoadThread<'a> {
    plan: &'a Plan,
    load: &'a Load,
    shared: &'a Shared,
    clock: Clock,
    thread: usize,
}

impl LoadThread<'_> {
    /// Sends the thread's requests over the plan's protocol.
    fn run(&self) -> std::io::Result<Record> {
        let plan = self.plan;
        match plan.target.protocol {
            Protocol::Http => {
                let most = (plan.max_connections / plan.threads).max(1);
                // The clients of a closed loop may not divide evenly: the thread with one more has
                // room for it.
                let most = most + usize::from(self.thread < plan.max_connections % plan.threads);
                self.drive(Http::new(&plan.target, plan.requests(), most, self.clock))
            }
            Protocol::Grpc => self.drive(Grpc::new(&plan.target, plan, self.clock)),
        }
    }

    fn drive<T: Transport>(&self, transport: T) -> std::io::Result<Record> {
        let LoadThread { load, shared, clock, thread, .. } = *self;
        Generator::new(load, shared, clock, transport, Poller::new()?, thread)?.run()
    }
}

/// The orders for the threads of a run that begins at `begin`.
fn load_of(plan: &Plan, pace: &Pace, begin: Time, over: Option<Duration>) -> Load {
    let start = begin + plan.warmup;
    let interval = if plan.duration == Duration::MAX {
        Duration::from_millis(1_000)
    } else {
        Duration::from_nanos(plan.duration.as_nanos() / 100).clamp(INTERVALS.1, INTERVALS.0)
    };
    Load {
        pace: pace.clone(),
        mix: plan.models.iter().map(|m| (m.share, m.requests.len())).collect(),
        seed: plan.seed,
        threads: plan.threads,
        begin,
        window: Window { start, end: start + plan.duration, slo: plan.slo, interval },
        most_requests: plan.most_requests,
        request_timeout: plan.request_timeout,
        over,
    }
}

/// Raises the limit of open sockets of this process to the system's maximum.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        // If this fails, a run with many connections may see "too many open files" as failed
        // connections.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}
