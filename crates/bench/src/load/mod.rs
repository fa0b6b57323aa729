//! Load on a server: the plan, the arrivals, the runs, and the search for a capacity. A load thread
//! offers requests when they are due, and records their ends.

pub mod arrivals;
pub mod capacity;
pub mod control;
pub mod mix;
pub mod plan;
pub mod poller;
pub mod run;
pub mod seed;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use downbeat_core::{Duration, Time};

use crate::client::transport::{Done, Start, Ticket, Transport};
use crate::clock::{Clock, thread_cpu};
use crate::load::arrivals::{Arrivals, Schedule};
use crate::load::mix::{Choice, Mix};
use crate::load::poller::{Poller, Ready};
use crate::results::outcome::{Failed, Failure};
use crate::results::record::{self, Record, Window};

/// Most requests that wait for a connection on one thread. Further requests fail as
/// [`Failure::NotSent`].
const MOST_BACKLOG: usize = 1 << 20;
/// Most requests started between two looks at the sockets, so that a burst does not delay the
/// reading of answers.
const BURST: usize = 64;
/// The pause of a closed loop's client after a fault of its connection.
const RETRY: Duration = Duration::from_millis(10);
/// The interval at which an idle thread checks whether the run was stopped.
const HEARTBEAT: Duration = Duration::from_millis(50);

/// The rule for offering requests.
#[derive(Clone, PartialEq, Debug)]
pub enum Pace {
    /// Requests are offered when they arrive, whether or not earlier ones were answered.
    Open(Schedule),
    /// This many clients offer requests, and each waits for its answer.
    Closed(usize),
}

/// The orders for every thread of a run.
#[derive(Clone, Debug)]
pub struct Load {
    /// The rule for offering requests.
    pub pace: Pace,
    /// Share and number of prepared requests of each model.
    pub mix: Vec<(f64, usize)>,
    /// Seed of arrivals and mix.
    pub seed: u64,
    /// Threads of the run.
    pub threads: usize,
    /// Offset of arrival zero from the clock's epoch.
    pub begin: Time,
    /// The window of requests that count. No request is offered after its end.
    pub window: Window,
    /// Most requests offered by all threads together, warm-up included.
    pub most_requests: u64,
    /// Most time for an answer, from the scheduled time on.
    pub request_timeout: Duration,
    /// An answer that takes longer than this is over the latency target of a capacity trial.
    pub over: Option<Duration>,
}

/// The state that the threads of a run share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Set to stop the run at once.
    pub stop: AtomicBool,
    /// Failed or late requests that count.
    bad: AtomicU64,
    /// Requests that count and failed or took longer than [`Load::over`].
    over: AtomicU64,
    /// With more bad requests than this, the run cannot meet its target; 0: no such bound.
    pub hopeless_bad: u64,
    /// As `hopeless_bad`, for requests over the latency target.
    pub hopeless_over: u64,
}

impl Shared {
    /// A shared state with these bounds.
    pub fn new(hopeless_bad: u64, hopeless_over: u64) -> Self {
        Shared { hopeless_bad, hopeless_over, ..Shared::default() }
    }

    fn count(&self, bad: bool, over: bool) {
        let beyond = |counter: &AtomicU64, happened: bool, most: u64| {
            most > 0 && happened && counter.fetch_add(1, Ordering::Relaxed) >= most
        };
        if beyond(&self.bad, bad, self.hopeless_bad) | beyond(&self.over, over, self.hopeless_over) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// Arrivals and choices of one thread: every `threads`-th arrival of the run.
struct Offered {
    arrivals: Arrivals,
    mix: Mix,
    threads: usize,
    /// Arrivals of other threads before this thread's next one.
    skip: usize,
    left: u64,
    begin: Time,
    end: Time,
}

impl Iterator for Offered {
    type Item = (Time, Choice);

    fn next(&mut self) -> Option<(Time, Choice)> {
        // Every thread draws all numbers of the run, so any number of threads offers the same load.
        loop {
            self.left = self.left.checked_sub(1)?;
            let at = self.begin + self.arrivals.next()?.since(Time::ZERO);
            let choice = self.mix.draw();
            if at >= self.end {
                return None;
            }
            if self.skip == 0 {
                self.skip = self.threads - 1;
                return Some((at, choice));
            }
            self.skip -= 1;
        }
    }
}

/// A request between its scheduled time and its end.
#[derive(Clone, Copy, Debug)]
struct Pending {
    scheduled: Time,
    choice: Choice,
    /// Whether the transport has the request; otherwise it waits for a connection.
    taken: bool,
}

/// Clients of the closed loop that are not waiting for an answer.
struct Clients {
    ready: usize,
    /// Clients that pause after a fault: the times at which they continue.
    pausing: VecDeque<Time>,
    mix: Mix,
    left: u64,
}

enum Source {
    Open { offered: Offered, next: Option<(Time, Choice)> },
    Closed(Clients),
}

/// Drives one thread's part of a run.
pub struct Generator<'a, T> {
    load: &'a Load,
    shared: &'a Shared,
    clock: Clock,
    transport: T,
    poller: Poller,
    source: Source,
    entries: Vec<(u32, Option<Pending>)>,
    free: Vec<u32>,
    /// Requests by deadline. All have the same timeout, and are scheduled in order.
    deadlines: VecDeque<(Time, Ticket)>,
    /// Requests that wait for a connection. Bound: [`MOST_BACKLOG`].
    backlog: VecDeque<Ticket>,
    in_flight: usize,
    record: Record,
}

impl<'a, T: Transport> Generator<'a, T> {
    /// The generator of `thread`, one of `load.threads`.
    ///
    /// # Errors
    /// If the system gives no poller.
    pub fn new(
        load: &'a Load,
        shared: &'a Shared,
        clock: Clock,
        transport: T,
        poller: Poller,
        thread: usize,
    ) -> std::io::Result<Self> {
        let threads = load.threads.max(1);
        let source = match &load.pace {
            Pace::Open(schedule) => {
                let mut offered = Offered {
                    arrivals: schedule.arrivals(load.seed),
                    mix: Mix::new(&load.mix, load.seed),
                    threads,
                    skip: thread,
                    left: load.most_requests,
                    begin: load.begin,
                    end: load.window.end,
                };
                let next = offered.next();
                Source::Open { offered, next }
            }
            Pace::Closed(clients) => Source::Closed(Clients {
                ready: share(*clients as u64, threads, thread) as usize,
                pausing: VecDeque::new(),
                mix: Mix::new(&load.mix, load.seed.wrapping_add(thread as u64)),
                left: share(load.most_requests, threads, thread),
            }),
        };
        Ok(Generator {
            load,
            shared,
            clock,
            transport,
            poller,
            source,
            entries: Vec::new(),
            free: Vec::new(),
            deadlines: VecDeque::new(),
            backlog: VecDeque::new(),
            in_flight: 0,
            record: Record::new(load.mix.len()),
        })
    }

    /// Runs until all requests are offered, and each is answered, failed or timed out.
    ///
    /// # Errors
    /// If the system's poller fails.
    pub fn run(mut self) -> std::io::Result<Record> {
        // The default slack of 50 us would delay every send by as much.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        self.clock.sleep_until(self.load.begin);
        let (cpu, began) = (thread_cpu(), self.clock.now());
        let mut ready: Vec<Ready> = Vec::new();
        let mut done: Vec<Done> = Vec::new();
        loop {
            let stopped = self.shared.stop.load(Ordering::Relaxed);
            if stopped {
                self.abandon();
                break;
            }
            let more_due = self.offer(&mut done);
            self.serve_backlog(&mut done);
            self.time_out();
            let mut again = self.transport.flush(&self.poller, &mut done);
            // A finished request may have made room for a waiting one, or freed a client of the
            // closed loop.
            again |= !done.is_empty() && !self.backlog.is_empty();
            self.settle(&mut done);
            self.record.connections = self.record.connections.max(self.transport.connections() as u64);
            let next = self.next_start();
            if next.is_none() && self.in_flight == 0 {
                break;
            }
            let timeout = if more_due || again {
                Duration::ZERO
            } else {
                let wake = self.deadlines.front().map_or(Time::MAX, |(at, _)| *at).min(next.unwrap_or(Time::MAX));
                wake.since(self.clock.now()).min(HEARTBEAT)
            };
            self.poller.wait(timeout, &mut ready)?;
            for event in ready.drain(..) {
                self.transport.handle_ready(&self.poller, event, &mut done);
            }
            // Answers are read before new requests are written, so that both go in one round.
            self.transport.flush(&self.poller, &mut done);
            self.settle(&mut done);
        }
        self.record.cpu = thread_cpu().saturating_sub(cpu);
        self.record.elapsed = self.clock.now().since(began);
        Ok(self.record)
    }

    /// Starts requests that are due. Returns whether more are due.
    fn offer(&mut self, done: &mut Vec<Done>) -> bool {
        for _ in 0..BURST {
            let now = self.clock.now();
            let (scheduled, choice) = match &mut self.source {
                Source::Open { offered, next } => match *next {
                    Some((at, choice)) if at <= now => {
                        *next = offered.next();
                        if self.load.window.contains(at) {
                            record::record(&mut self.record.lateness, now.since(at));
                        }
                        (at, choice)
                    }
                    _ => return false,
                },
                Source::Closed(clients) => {
                    while clients.pausing.front().is_some_and(|at| *at <= now) {
                        clients.pausing.pop_front();
                        clients.ready += 1;
                    }
                    if clients.ready == 0 || clients.left == 0 || now >= self.load.window.end {
                        return false;
                    }
                    clients.ready -= 1;
                    clients.left -= 1;
                    (now, clients.mix.draw())
                }
            };
            self.begin(scheduled, choice, done);
        }
        true
    }

    /// The time of the next request; `None` if there is none, or it waits for an answer.
    fn next_start(&self) -> Option<Time> {
        match &self.source {
            Source::Open { next, .. } => next.map(|(at, _)| at),
            Source::Closed(clients) => {
                if clients.left == 0 || self.clock.now() >= self.load.window.end {
                    None
                } else if clients.ready > 0 {
                    Some(Time::ZERO)
                } else {
                    clients.pausing.front().copied()
                }
            }
        }
    }

    fn begin(&mut self, scheduled: Time, choice: Choice, done: &mut Vec<Done>) {
        self.record.scheduled(&self.load.window, choice.model, scheduled);
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let (generation, pending) = &mut self.entries[index as usize];
        *pending = Some(Pending { scheduled, choice, taken: false });
        let ticket = Ticket { index, generation: *generation };
        self.in_flight += 1;
        self.deadlines.push_back((scheduled + self.load.request_timeout, ticket));
        if !self.backlog.is_empty() || self.start(ticket, choice, done) == Start::Busy {
            if self.backlog.len() >= MOST_BACKLOG {
                let failed = Failed::new(Failure::NotSent, "too many requests wait for a connection");
                return self.finish(Done { ticket, at: self.clock.now(), result: Err(failed) });
            }
            self.backlog.push_back(ticket);
            self.record.backlog = self.record.backlog.max(self.backlog.len() as u64);
        }
    }

    fn start(&mut self, ticket: Ticket, choice: Choice, done: &mut Vec<Done>) -> Start {
        let start = self.transport.start(&self.poller, ticket, choice, done);
        if start == Start::Taken
            && let Some(pending) = self.pending_mut(ticket)
        {
            pending.taken = true;
        }
        start
    }

    fn pending(&self, ticket: Ticket) -> Option<&Pending> {
        let (generation, pending) = self.entries.get(ticket.index as usize)?;
        pending.as_ref().filter(|_| *generation == ticket.generation)
    }

    fn pending_mut(&mut self, ticket: Ticket) -> Option<&mut Pending> {
        let (generation, pending) = self.entries.get_mut(ticket.index as usize)?;
        pending.as_mut().filter(|_| *generation == ticket.generation)
    }

    fn serve_backlog(&mut self, done: &mut Vec<Done>) {
        while let Some(&ticket) = self.backlog.front() {
            if let Some(pending) = self.pending(ticket).copied() {
                if self.start(ticket, pending.choice, done) == Start::Busy {
                    return;
                }
                if matches!(self.source, Source::Open { .. }) && self.load.window.contains(pending.scheduled) {
                    let wait = self.clock.now().since(pending.scheduled);
                    record::record(&mut self.record.connection_wait, wait);
                }
            }
            self.backlog.pop_front();
        }
    }

    fn settle(&mut self, done: &mut Vec<Done>) {
        for end in done.drain(..) {
            self.finish(end);
        }
    }

    /// Accounts for the end of a request, unless it has ended before.
    fn finish(&mut self, end: Done) {
        let Some(pending) = self.pending(end.ticket).copied() else { return };
        let (generation, entry) = &mut self.entries[end.ticket.index as usize];
        *generation = generation.wrapping_add(1);
        *entry = None;
        self.free.push(end.ticket.index);
        self.in_flight -= 1;
        let (window, model, scheduled) = (&self.load.window, pending.choice.model, pending.scheduled);
        let counts = window.contains(scheduled);
        let connection_fault = match end.result {
            Ok(()) => {
                let late = self.record.answered(window, model, scheduled, end.at);
                let over = self.load.over.is_some_and(|over| end.at.since(scheduled) > over);
                if counts {
                    self.shared.count(late, over);
                }
                false
            }
            Err(failed) => {
                let fault = failed.failure.is_connection();
                self.record.failed(window, model, scheduled, failed);
                if counts {
                    self.shared.count(true, self.load.over.is_some());
                }
                fault
            }
        };
        if let Source::Closed(clients) = &mut self.source {
            if connection_fault {
                clients.pausing.push_back(end.at + RETRY);
            } else {
                clients.ready += 1;
            }
        }
        while self.deadlines.front().is_some_and(|(_, ticket)| self.pending(*ticket).is_none()) {
            self.deadlines.pop_front();
        }
    }

    /// Ends the requests whose time is over.
    fn time_out(&mut self) {
        let now = self.clock.now();
        while let Some(&(at, ticket)) = self.deadlines.front() {
            if at > now {
                return;
            }
            self.deadlines.pop_front();
            let Some(pending) = self.pending(ticket) else { continue };
            let message = if pending.taken {
                self.transport.cancel(ticket);
                "no answer within the request timeout"
            } else {
                "no connection was free within the request timeout"
            };
            self.finish(Done { ticket, at: now, result: Err(Failed::new(Failure::Timeout, message)) });
        }
    }

    /// Ends all requests at once.
    fn abandon(&mut self) {
        self.record.stopped = true;
        let now = self.clock.now();
        while let Some((_, ticket)) = self.deadlines.pop_front() {
            self.transport.cancel(ticket);
            self.finish(Done { ticket, at: now, result: Err(Failed::new(Failure::Abandoned, "the run was stopped")) });
        }
    }
}

/// The part of `total` for `thread`.
fn share(total: u64, threads: usize, thread: usize) -> u64 {
    if total == u64::MAX {
        return total;
    }
    let (threads, thread) = (threads as u64, thread as u64);
    total / threads + u64::from(thread < total % threads)
}
