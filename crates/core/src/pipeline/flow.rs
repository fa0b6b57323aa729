//! The flow of requests through the steps of their pipelines.

use std::collections::VecDeque;

use super::division::{BatchDone, Division, Reached};
use super::progress::Progress;
use super::stage::{Pipeline, STEP_BITS, Stage, StageError};
use crate::cluster::{Output, Request, Scheduler, Ticket};
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::{Duration, Time};

/// The requests of pipelines on their way through the schedulers of all steps.
///
/// A pure state machine, as the [`Scheduler`] is that runs each pool. The driver calls a `handle_*`
/// with the time of the event. Then it takes every [`Flow::poll_launch`] and [`Flow::poll_end`].
///
/// **A step** is queued as soon as all steps before it are done. The [`Division`] gives the step its
/// local deadline. **A loss** of one step ends the whole. The request's other steps then leave their
/// queues, and the answers of steps that run are ignored. Each request ends exactly once.
#[derive(Debug)]
pub struct Flow {
    pools: Vec<Pool>,
    pipelines: Vec<Pipeline>,
    /// By model: the pool, and the model's id in that pool.
    models: Vec<(usize, ModelId)>,
    /// The requests that have not ended, by number from `first` on.
    live: VecDeque<Option<Live>>,
    first: u64,
    /// Requests that have ended, whose memory the next ones use.
    spare: Vec<Live>,
    /// Scratch: [`Reached::unfinished`].
    unfinished: Vec<usize>,
    launches: VecDeque<Launch>,
    ends: VecDeque<End>,
}

#[derive(Debug)]
struct Pool {
    scheduler: Scheduler,
    /// By device.
    running: Vec<Option<Running>>,
    /// By the model's id in the pool: its number.
    models: Vec<usize>,
}

#[derive(Debug)]
struct Running {
    batch: BatchId,
    model: usize,
    members: Vec<RequestId>,
    start: Time,
    waited: Duration,
}

#[derive(Debug, Default)]
struct Live {
    pipeline: usize,
    arrival: Time,
    deadline: Time,
    progress: Progress,
    /// By step: its place in the queue.
    queued: Vec<Option<Queued>>,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    since: Time,
    /// The step may be queued once more, with this deadline.
    last: Option<Time>,
}

/// A batch that starts on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// The pool of the device.
    pub pool: usize,
    /// The device.
    pub device: DeviceId,
    /// The batch, for [`Flow::handle_completion`].
    pub batch: BatchId,
    /// The batch's model.
    pub model: usize,
    /// Requests in the batch.
    pub size: u32,
    /// How long the batch takes by the model's profile.
    pub expected: Duration,
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct End {
    /// The request's number.
    pub request: u64,
    /// When it ended.
    pub at: Time,
    /// The step that ended the request.
    pub step: usize,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Outcome {
    /// All steps are done.
    Done,
    /// The division gave the request up: the whole could not be in time any more.
    Hopeless,
    /// A step's scheduler did not take the request, or dropped it.
    Lost,
}

impl Flow {
    /// Idle devices and no request.
    ///
    /// # Errors
    /// If a number of the stage names nothing.
    pub fn new(stage: &Stage) -> Result<Flow, StageError> {
        stage.check()?;
        let pool = |devices: &u32| {
            let mut scheduler = Scheduler::new();
            scheduler.set_wake_margin(Time::ZERO, stage.wake_margin);
            for _ in 0..*devices {
                scheduler.add_device(Time::ZERO, DeviceKind(0));
            }
            let running = (0..*devices).map(|_| None).collect();
            Pool { scheduler, running, models: Vec::new() }
        };
        let mut pools: Vec<Pool> = stage.pools.iter().map(pool).collect();
        let mut models = Vec::with_capacity(stage.models.len());
        for (number, model) in stage.models.iter().enumerate() {
            let pool = &mut pools[model.pool];
            let id = pool.scheduler.add_model(Time::ZERO, model.options.clone());
            pool.scheduler.set_behaviour(Time::ZERO, id, model.behaviour);
            models.push((model.pool, id));
            pool.models.push(number);
        }
        Ok(Flow {
            pools,
            pipelines: stage.pipelines.clone(),
            models,
            live: VecDeque::new(),
            first: 0,
            spare: Vec::new(),
            unfinished: Vec::new(),
            launches: VecDeque::new(),
            ends: VecDeque::new(),
        })
    }

    /// Takes a request. Returns its number; numbers count from 0.
    ///
    /// # Panics
    /// If there is no such pipeline.
    pub fn handle_arrival(&mut self, now: Time, pipeline: usize, deadline: Time, by: &mut dyn Division) -> u64 {
        let request = self.first + self.live.len() as u64;
        let shape = &self.pipelines[pipeline].shape;
        let mut live = self.spare.pop().unwrap_or_default();
        (live.pipeline, live.arrival, live.deadline) = (pipeline, now, deadline);
        live.progress.begin(shape, |_| true);
        live.queued.clear();
        live.queued.resize(shape.len(), None);
        self.live.push_back(Some(live));
        self.start_ready(now, request, by);
        self.settle(now);
        request
    }

    /// A batch is done. A batch that does not run on this device is ignored.
    pub fn handle_completion(
        &mut self,
        now: Time,
        pool: usize,
        device: DeviceId,
        batch: BatchId,
        by: &mut dyn Division,
    ) {
        let slot = self.pools.get_mut(pool).and_then(|pool| pool.running.get_mut(device.0 as usize));
        let Some(running) = slot.and_then(|slot| slot.take_if(|running| running.batch == batch)) else { return };
        let Running { model, members, start, waited, .. } = running;
        by.batch_done(BatchDone { model, start, took: now.since(start), waited });
        self.pools[pool].scheduler.handle_completion(now, device, batch);
        for member in &members {
            self.done(now, member.0 >> STEP_BITS, step_of(*member), by);
        }
        self.pools[pool].scheduler.recycle(members);
        self.settle(now);
    }

    /// Does all that is due by `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        for pool in &mut self.pools {
            if pool.scheduler.poll_timeout().is_some_and(|(at, _)| at <= now) {
                pool.scheduler.handle_timeout(now);
            }
        }
        self.settle(now);
    }

    /// When to call [`Flow::handle_timeout`] if no event comes before.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.pools.iter().filter_map(|pool| pool.scheduler.poll_timeout()).map(|(at, _)| at).min()
    }

    /// The next batch that starts.
    pub fn poll_launch(&mut self) -> Option<Launch> {
        self.launches.pop_front()
    }

    /// The next request that ended.
    pub fn poll_end(&mut self) -> Option<End> {
        self.ends.pop_front()
    }

    fn live(&mut self, request: u64) -> Option<&mut Live> {
        find(&mut self.live, self.first, request)?.as_mut()
    }

    /// Queues the steps of a request whose inputs are there.
    fn start_ready(&mut self, now: Time, request: u64, by: &mut dyn Division) {
        while let Some(step) = self.live(request).and_then(|live| live.progress.poll_start()) {
            self.reach(now, request, step, by);
        }
    }

    /// A request's step has its inputs.
    fn reach(&mut self, now: Time, request: u64, step: usize, by: &mut dyn Division) {
        let mut unfinished = std::mem::take(&mut self.unfinished);
        unfinished.clear();
        let Some(live) = self.live(request) else { return };
        unfinished.extend(live.progress.unfinished().filter(|other| *other != step));
        let Live { pipeline, arrival, deadline, .. } = *live;
        let reached = Reached { pipeline, step, now, arrival, deadline, unfinished: &unfinished };
        let local = by.local_deadline(&reached);
        let last = local.and_then(|local| by.last_deadline(&reached, local));
        self.unfinished = unfinished;
        let Some(local) = local else {
            return self.end(now, request, step, Outcome::Hopeless);
        };
        self.queue(now, request, step, local, last);
    }

    /// Queues a step. If its model cannot be in time for `local`, the step tries once more with `last`.
    fn queue(&mut self, now: Time, request: u64, step: usize, local: Time, last: Option<Time>) {
        let Some(pipeline) = self.live(request).map(|live| live.pipeline) else { return };
        let (pool, model) = self.models[self.pipelines[pipeline].models[step]];
        let id = RequestId(request << STEP_BITS | step as u64);
        let asked = Request { id, model, deadline: local, queue_expiry: Time::MAX, level: 0, size: 1 };
        match (self.pools[pool].scheduler.handle_request(now, asked), last) {
            (Err(_), None) => self.end(now, request, step, Outcome::Lost),
            (Err(_), Some(last)) => self.queue(now, request, step, last, None),
            (Ok(ticket), last) => {
                if let Some(live) = self.live(request) {
                    let since = live.queued[step].map_or(now, |queued| queued.since);
                    live.queued[step] = Some(Queued { ticket, since, last });
                }
            }
        }
    }

    /// A step's model has dropped it.
    fn dropped(&mut self, now: Time, request: u64, step: usize) {
        let Some(live) = self.live(request) else { return };
        match live.queued[step].and_then(|queued| queued.last) {
            Some(last) => self.queue(now, request, step, last, None),
            None => self.end(now, request, step, Outcome::Lost),
        }
    }

    fn done(&mut self, now: Time, request: u64, step: usize, by: &mut dyn Division) {
        let Some(Some(live)) = find(&mut self.live, self.first, request) else { return };
        live.progress.handle_finished(&self.pipelines[live.pipeline].shape, step);
        if live.progress.is_over() {
            return self.end(now, request, step, Outcome::Done);
        }
        self.start_ready(now, request, by);
    }

    /// Ends a request. The request's other steps leave their queues.
    fn end(&mut self, at: Time, request: u64, step: usize, outcome: Outcome) {
        let Some(live) = find(&mut self.live, self.first, request).and_then(Option::take) else { return };
        for (step, queued) in live.queued.iter().enumerate() {
            if let Some(Queued { ticket, .. }) = queued {
                let (pool, model) = self.models[self.pipelines[live.pipeline].models[step]];
                self.pools[pool].scheduler.handle_cancel(at, model, *ticket);
            }
        }
        self.spare.push(live);
        self.ends.push_back(End { request, at, step, outcome });
        while self.live.front().is_some_and(Option::is_none) {
            self.live.pop_front();
            self.first += 1;
        }
    }

    /// Takes the decisions of all schedulers, until no decision causes a further decision.
    fn settle(&mut self, now: Time) {
        let mut pool = 0;
        let mut quiet = 0;
        while quiet < self.pools.len() {
            quiet += 1;
            while let Some(output) = self.pools[pool].scheduler.poll_output() {
                quiet = 0;
                match output {
                    Output::Dispatch { batch, device, model, members, size, expected, .. } => {
                        let model = self.pools[pool].models[model.0 as usize];
                        self.launches.push_back(Launch { pool, device, batch, model, size, expected });
                        let waited = self.begin(now, &members);
                        let running = Running { batch, model, members, start: now, waited };
                        self.pools[pool].running[device.0 as usize] = Some(running);
                    }
                    Output::Drop { request, .. } => {
                        self.dropped(now, request.0 >> STEP_BITS, step_of(request));
                    }
                }
            }
            pool = (pool + 1) % self.pools.len();
        }
    }

    /// Notes that steps run. Returns the mean time that they waited.
    fn begin(&mut self, now: Time, members: &[RequestId]) -> Duration {
        let mut waited = 0;
        for member in members {
            let step = step_of(*member);
            if let Some(live) = self.live(member.0 >> STEP_BITS)
                && let Some(Queued { since, .. }) = live.queued[step].take()
            {
                waited += now.since(since).as_nanos();
            }
        }
        Duration::from_nanos(waited / members.len().max(1) as u64)
    }
}

/// A request that has not ended; `first` is the number of the first one in `live`.
fn find(live: &mut VecDeque<Option<Live>>, first: u64, request: u64) -> Option<&mut Option<Live>> {
    let index = usize::try_from(request.checked_sub(first)?).ok()?;
    live.get_mut(index)
}

fn step_of(id: RequestId) -> usize {
    (id.0 & ((1 << STEP_BITS) - 1)) as usize
}
