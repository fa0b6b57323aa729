//! A device: the models on it and their requests, its lanes, and the lock around its scheduler and
//! tables.

use std::sync::{Arc, OnceLock, Weak};

use downbeat_core::cluster::DispatchReason;
use downbeat_core::device::{
    DeviceReject, DeviceRequest, DeviceScheduler, GrantedBatch, LaneSpec, Layout, ModelSpec, PartitionId, Span,
};
use downbeat_core::journal::Journal;
use downbeat_core::journal::device::DeviceInput;
use downbeat_core::{BatchId, DeviceId, Duration, RequestId, Time};
use downbeat_driver::{LOG_BUFFER, LogSink, hand_over};
use downbeat_engine::{Lane, Part, Share};
use downbeat_service::clock::Clock;
use downbeat_service::metrics::DeviceMetrics;
use downbeat_service::report::device_report::GroupsReport;
use downbeat_service::report::timeline::PastLaunches;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::crew::{Crew, Seat};
use super::device_state::{Actions, DeviceState, Hosted, Write};
use super::history::{History, Riders};
use super::lane_host::{LaneHost, OwnLaunch};
use super::launch::{Grant, Head, Outcome};
use super::occupancy::Occupancy;
use super::placement::Placement;
use super::queued_call::QueuedCall;
use super::request_events::Watched;
use super::request_table::Entry;
use super::slot_events::{Ran, SlotEvents};
use super::{answering, lane, preparation};
use crate::request::call::Call;
use crate::request::reply;
use crate::run::watchdog::Watchdog;

/// A device at work: everything that runs on it, for all models, both from the scheduler and from
/// device policies.
///
/// One lock guards the device's scheduler and its tables. It is held for a decision, and while
/// inputs of a few KiB are copied into a ring. It is never held while an engine runs or a client is
/// answered: decisions are gathered under the lock and carried out after it.
pub struct DeviceHost {
    me: Weak<DeviceHost>,
    /// The device's number, from 0.
    pub device: usize,
    /// By partition, at least one: the part of the device that it is.
    shares: Box<[Share]>,
    /// By partition: the threads of its lanes.
    crews: Box<[Arc<Crew>]>,
    /// The clock of all decisions.
    pub clock: Clock,
    pub(super) watchdog: Arc<Watchdog>,
    /// Counts the busy time of the device.
    pub occupancy: Arc<Occupancy>,
    pub(super) inner: Mutex<DeviceState>,
    alarm: Condvar,
    history: Mutex<History>,
    /// The log that receives the decisions of the device's scheduler.
    log: Option<Arc<dyn LogSink>>,
    /// The scheduler whose batches come to the slots.
    slot_events: OnceLock<Weak<dyn SlotEvents>>,
}

impl DeviceHost {
    /// Starts a device without models and slots, and its alarm. `parts` divide the device, if there
    /// are some. The device writes its inputs and decisions to `log`.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(
        device: usize,
        parts: &[Part],
        clock: Clock,
        metrics: DeviceMetrics,
        watchdog: Arc<Watchdog>,
        log: Option<Arc<dyn LogSink>>,
    ) -> std::io::Result<Arc<Self>> {
        let scheduler = DeviceScheduler::numbered(device as u32);
        let mut journal = if log.is_some() { Journal::on(scheduler) } else { Journal::off(scheduler) };
        let layout = DeviceInput::Layout(Layout { shared_lanes: vec![0; parts.len().max(1)] });
        assert!(journal.apply(clock.now(), layout).is_ok(), "a device has as many partitions as there are kinds");
        let shares: Box<[Share]> = match parts {
            [] => [Share::Whole].into(),
            parts => parts.iter().map(|part| part.share).collect(),
        };
        let host = Arc::new_cyclic(|me| DeviceHost {
            me: me.clone(),
            device,
            crews: shares.iter().map(|share| Crew::on(share.cores().copied())).collect(),
            shares,
            clock,
            watchdog,
            occupancy: Arc::new(Occupancy::new(metrics, parts)),
            inner: Mutex::new(DeviceState::new(journal)),
            alarm: Condvar::new(),
            history: Mutex::default(),
            log,
            slot_events: OnceLock::new(),
        });
        let its = host.clone();
        std::thread::Builder::new().name(format!("alarm-{device}")).spawn(move || its.ring_alarms())?;
        Ok(host)
    }

    /// From now on the slots are this scheduler's. Once.
    pub fn belongs_to(&self, scheduler: Weak<dyn SlotEvents>) {
        let was_free = self.slot_events.set(scheduler).is_ok();
        assert!(was_free, "a device has one scheduler");
    }

    /// Makes a lane for the scheduler's batches in a partition; the scheduler calls the lane
    /// `slot`. Returns its thread and its index.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn add_slot(
        self: &Arc<Self>,
        slot: DeviceId,
        partition: PartitionId,
    ) -> std::io::Result<(usize, std::thread::JoinHandle<()>)> {
        let crew = &self.crews[partition.0 as usize];
        let seat = Seat::new(crew, None);
        let thread = lane::start(self.clone(), crew.clone())?;
        let mut inner = self.inner.lock();
        let partitions = (0..self.shares.len() as u32).map(PartitionId);
        let mut shared_lanes: Vec<u32> =
            partitions.map(|partition| inner.scheduler().shared_lanes(partition).len() as u32).collect();
        shared_lanes[partition.0 as usize] += 1;
        let shared = inner.journal.apply(self.clock.now(), DeviceInput::Layout(Layout { shared_lanes }));
        assert!(shared.is_ok(), "a device stays divided as it is");
        let lanes = inner.scheduler().shared_lanes(partition);
        let (lane, index) = (lanes[lanes.len() - 1], lanes.len() - 1);
        inner.put_lane(lane, seat, index);
        inner.slots.push((slot, lane));
        Ok((inner.slots.len() - 1, thread))
    }

    /// Takes a model in, with its policy, which has passed its checks, and an engine's lane for
    /// each of the policy's lanes.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn add_model(
        self: &Arc<Self>,
        model: Arc<Placement>,
        policy: ModelSpec,
        engines: Vec<Box<dyn Lane>>,
    ) -> std::io::Result<()> {
        let started = self.start_lanes(model.partition, engines)?;
        let mut inner = self.inner.lock();
        let taken = inner.journal.apply(self.clock.now(), DeviceInput::Model(model.id, Some(policy)));
        assert!(taken.is_ok(), "a policy that was checked can be had in a partition that there is");
        let lanes = inner.scheduler().lanes(model.id).to_vec();
        inner.put_lanes(&lanes, started);
        let is_in_groups = model.group.is_some();
        inner.models.insert(model.id, Hosted { model, running: 0 });
        if is_in_groups {
            inner.tell_groups(self.clock.now());
        }
        inner.is_mixed = inner.has_both_kinds();
        Ok(())
    }

    /// Starts the threads of lanes that run on these, each for a single model.
    ///
    /// # Errors
    /// If the operating system has no thread left; then there are none.
    pub(super) fn start_lanes(
        self: &Arc<Self>,
        partition: PartitionId,
        engines: Vec<Box<dyn Lane>>,
    ) -> std::io::Result<Vec<Arc<Seat>>> {
        let mut started: Vec<Arc<Seat>> = Vec::new();
        let crew = &self.crews[partition.0 as usize];
        for engine in engines {
            let seat = Seat::new(crew, Some(engine));
            let thread = lane::start(self.clone(), crew.clone());
            // Threads that have started end at once if another cannot.
            thread.inspect_err(|_| started.iter().for_each(|seat| seat.stop()))?;
            started.push(seat);
        }
        Ok(started)
    }

    /// Which part of the device a partition is.
    pub(super) fn share(&self, partition: PartitionId) -> Share {
        self.shares.get(partition.0 as usize).copied().unwrap_or_default()
    }

    /// Tells the scheduler that the predictor of operator groups has changed.
    pub fn tell_groups(&self) {
        let mut actions = Actions::default();
        {
            let mut inner = self.inner.lock();
            let now = self.clock.now();
            actions.decided = now;
            inner.tell_groups(now);
            self.settle(&mut inner, now, &mut actions);
        }
        self.carry_out(actions, None, &mut OwnLaunch::default());
    }

    /// Lets a model go; its threads end once their present launches are over.
    pub fn remove_model(&self, model: &Placement) {
        let past = self.past_of(model, Time::MAX);
        let ((_gone, ready), actions) = self.decide(model, |inner, now| {
            let gone = inner.journal.apply(now, DeviceInput::Model(model.id, None));
            assert!(gone.is_ok(), "any model may go");
            let gone = (inner.models.remove(&model.id), inner.moves.remove(&model.id));
            if model.group.is_some() {
                inner.tell_groups(now);
            }
            inner.is_mixed = inner.has_both_kinds();
            // Once more, as it may be the last time.
            self.tell_loads(inner, now);
            gone
        });
        self.history.lock().leave(model.id, past);
        self.occupancy.forget(model.id);
        self.carry_out(actions, None, &mut OwnLaunch::default());
        if let Some(ready) = ready {
            ready(Err("the model goes".to_owned()));
        }
    }

    /// Passes on the part of the decision log that was not passed on.
    pub fn flush_log(&self) {
        if let Some(log) = &self.log {
            hand_over(&**log, &mut self.inner.lock().journal, 1);
        }
    }

    /// Ends all threads once their present launches are over.
    pub fn stop(&self) {
        let mut inner = self.inner.lock();
        inner.stopped = true;
        inner.lanes.iter().flatten().for_each(|lane| lane.seat.stop());
        drop(inner);
        self.alarm.notify_all();
    }

    /// Brings a batch of the scheduler to a slot. The batch was dispatched at `dispatched`, for this
    /// `reason`; `None`: another process decided. `own`: the calling thread's wish for a launch.
    pub fn grant(
        &self,
        slot: usize,
        batch: BatchId,
        mut jobs: Vec<(RequestId, QueuedCall)>,
        (dispatched, reason): (Time, Option<DispatchReason>),
        own: &mut OwnLaunch,
    ) {
        let its = |job: &QueuedCall| Some((job.queue.clone(), job.queue.on_device(self.device)?.clone()));
        let Some((queue, model)) = jobs.first().and_then(|(_, job)| its(job)) else {
            panic!("a batch has requests, and comes to a device that their model is on");
        };
        let requests = jobs.len() as u32;
        // Clients that left since then leave the batch too; their tickets have counted them.
        jobs.retain(|(_, job)| !job.call.reply.is_closed());
        let members = jobs.iter().map(|(request, _)| *request).collect();
        let rows = jobs.iter().map(|(_, job)| job.call.admitted.rows).sum();
        let (refused, actions) = self.decide(&model, |inner, now| {
            let (slot, lane) = inner.slots[slot];
            let grant = Grant { slot, batch, queue, dispatched, reason, requests, is_guess: false };
            let granted = GrantedBatch { id: batch, model: model.id, lane, members, rows };
            if let Err(reject) = inner.take(now, DeviceInput::Batch(granted)) {
                return Some((grant, jobs, reject, now));
            }
            for (request, job) in jobs {
                inner.table.insert(request, Entry::new(job.call, 0));
            }
            inner.lanes[lane.0 as usize].iter_mut().for_each(|lane| lane.grant = Some(grant.clone()));
            None
        });
        if let Some((grant, jobs, reject, now)) = refused {
            // Every member's client has left, or the model goes.
            for (_, job) in jobs {
                answering::reject_call(&model, job.call, reject.clone(), rows, now);
            }
            self.complete(&grant, None, own);
        }
        self.carry_out(actions, None, own);
    }

    /// Takes a request of `length` in, for the model's policy to decide about. The answer comes
    /// through the call's `reply`, always. `own`: the calling thread's wish for a launch.
    pub fn submit(&self, model: &Placement, id: RequestId, call: Call, length: u32, own: &mut OwnLaunch) {
        let size = call.admitted.rows;
        model.work.came(size);
        let padded = model.tensors.padded_length(length);
        let (rejected, actions) = self.decide(model, |inner, now| {
            let mut call = call;
            let mut request = DeviceRequest { id, model: model.id, deadline: call.deadline, size, length: padded };
            let mut result = inner.take(now, DeviceInput::Request(request));
            if let Err(DeviceReject::DeadlineImpossible { .. }) = result
                && call.may_probe(&model.profile, now)
            {
                request.deadline = Time::MAX;
                result = inner.take(now, DeviceInput::Request(request));
            }
            match result {
                Ok(()) => {
                    let watch = |listener| Watched::begin(listener, now, id, size, request.deadline);
                    let watched = model.listener.as_ref().map(watch);
                    inner.table.insert(id, Entry { watched, ..Entry::new(call, length) });
                    None
                }
                Err(reject) => Some((call, reject, now)),
            }
        });
        if let Some((call, reject, now)) = rejected {
            answering::reject_call(model, call, reject, size, now);
        }
        self.carry_out(actions, None, own);
    }

    /// Cancels a request whose client has gone. The caller has counted it.
    pub fn cancel(&self, model: &Placement, request: RequestId) {
        let (_entry, actions) = self.decide(model, |inner, now| {
            let entry = inner.table.remove(request)?;
            inner.tell(now, DeviceInput::Cancel(model.id, request));
            Some(entry)
        });
        self.carry_out(actions, None, &mut OwnLaunch::default());
    }

    /// The scheduler of the slots.
    fn slot_events(&self) -> Option<Arc<dyn SlotEvents>> {
        self.slot_events.get().and_then(Weak::upgrade)
    }

    /// Tells the scheduler the time of a batch that ran well.
    fn learn(&self, grant: &Grant, ran: Ran) {
        self.slot_events().into_iter().for_each(|scheduler| scheduler.ran(self.device, grant, ran));
    }

    /// Tells the scheduler that a slot is done with its batch. `ran`: if the batch ran well.
    fn complete(&self, grant: &Grant, ran: Option<Ran>, own: &mut OwnLaunch) {
        let Some(scheduler) = self.slot_events() else { return };
        scheduler.done(grant, ran.map_or_else(|| self.clock.now(), |ran| ran.end), ran, own);
    }

    /// Tells the scheduler that the device is lost.
    fn retire(&self) {
        let Some(scheduler) = self.slot_events() else { return };
        let slots: SmallVec<[DeviceId; 4]> = self.inner.lock().slots.iter().map(|(slot, _)| *slot).collect();
        scheduler.lost(self.device, &slots);
    }

    /// Tells the device's scheduler something about a model, and takes its decisions.
    pub(super) fn decide<R>(&self, model: &Placement, tell: impl FnOnce(&mut DeviceState, Time) -> R) -> (R, Actions) {
        let mut actions = Actions::default();
        let (mut inner, waited_from) = match self.inner.try_lock() {
            Some(inner) => (inner, None),
            None => {
                let from = self.clock.now();
                (self.inner.lock(), Some(from))
            }
        };
        // Read under the lock: for the scheduler time never goes back.
        let now = self.clock.now();
        let told = tell(&mut inner, now);
        self.settle(&mut inner, now, &mut actions);
        drop(inner);
        actions.decided = self.clock.now();
        model.metrics.record_decision(actions.decided.since(waited_from.unwrap_or(now)));
        (told, actions)
    }

    /// Takes the decisions, and sets the alarm for the next timeout.
    fn settle(&self, inner: &mut DeviceState, now: Time, actions: &mut Actions) {
        inner.take_outputs(now, self.device, actions);
        if inner.is_mixed {
            self.tell_loads(inner, now);
        }
        if let Some(log) = &self.log {
            hand_over(&**log, &mut inner.journal, LOG_BUFFER);
        }
        let at = inner.scheduler().poll_timeout().map_or(Time::MAX, |(at, _)| at);
        if at < inner.alarm_at {
            inner.alarm_at = at;
            self.alarm.notify_one();
        }
    }

    /// Tells the scheduler until when models with lanes of their own have work in the partitions of
    /// its slots.
    fn tell_loads(&self, inner: &DeviceState, now: Time) {
        let Some(slot_events) = self.slot_events() else { return };
        let scheduler = inner.scheduler();
        for (slot, lane) in &inner.slots {
            let partition = scheduler.lane(*lane).filter(|_| inner.is_mixed).map(|lane| lane.partition);
            slot_events.load(*slot, partition.map_or(Time::ZERO, |partition| scheduler.load(now, partition)));
        }
    }

    /// Carries out decisions, and the decisions that follow. `rows`: items of the launch that has
    /// ended. `own`: the calling thread's wish for a launch.
    pub(super) fn carry_out(&self, mut actions: Actions, rows: Option<u32>, own: &mut OwnLaunch) {
        loop {
            let Actions { writes, launches, prepares, ends, replies, drops, decided } = actions;
            ends.iter().for_each(|lane| lane.seat.stop());
            for seat in launches {
                own.offer(&seat, || Some(self.me.upgrade()? as Arc<dyn LaneHost>));
            }
            prepares.into_iter().for_each(|wanted| self.me.upgrade().map_or((), |me| preparation::start(me, wanted)));
            reply::together(|| {
                answering::reply(replies, rows.unwrap_or(0), decided);
                let give_up = |(entry, reason)| answering::drop_entry(entry, reason, decided);
                drops.into_iter().for_each(give_up);
            });
            let Some(Write { model, .. }) = writes.first() else { return };
            let model = model.clone();
            let copied = |write: Write| (write.copy(), write);
            let writes: SmallVec<[(bool, Write); 1]> = writes.into_iter().map(copied).collect();
            // The inputs of the writes are freed after the lock.
            (_, actions) = self.decide(&model, |inner, now| {
                let read = writes.into_iter().map(|(written, write)| inner.written(now, write, written));
                read.collect::<SmallVec<[Write; 1]>>()
            });
        }
    }

    /// The life of the alarm's thread.
    fn ring_alarms(&self) {
        let mut inner = self.inner.lock();
        while !inner.stopped {
            let now = self.clock.now();
            let at = inner.scheduler().poll_timeout().map_or(Time::MAX, |(at, _)| at);
            if at <= now {
                let mut actions = Actions { decided: now, ..Actions::default() };
                inner.tell(now, DeviceInput::Timeout);
                self.settle(&mut inner, now, &mut actions);
                drop(inner);
                self.carry_out(actions, None, &mut OwnLaunch::default());
                inner = self.inner.lock();
                continue;
            }
            inner.alarm_at = at;
            match self.clock.instant(at) {
                Some(instant) => {
                    self.alarm.wait_until(&mut inner, instant);
                }
                None => self.alarm.wait(&mut inner),
            }
        }
    }

    /// How long a new request of the model would probably wait until it begins: until the device
    /// has done all launched and waiting work, of all models.
    pub(super) fn free_in(&self, model: &Placement) -> Duration {
        let (inner, now) = (self.inner.lock(), self.clock.now());
        inner.scheduler().free_at(now, model.id).since(now)
    }

    /// The partition of one of the scheduler's slots.
    pub fn slot_partition(&self, slot: usize) -> PartitionId {
        let inner = self.inner.lock();
        let lane = inner.slots.get(slot).and_then(|(_, lane)| inner.scheduler().lane(*lane));
        lane.map_or(PartitionId::default(), |lane| lane.partition)
    }

    /// Items of a model that wait for a launch.
    pub(super) fn waiting(&self, model: &Placement) -> u32 {
        self.inner.lock().scheduler().stats(model.id).waiting
    }

    /// Reports on the operator groups of the device's models; `None`: no model runs in groups.
    pub fn groups(&self) -> Option<GroupsReport> {
        self.inner.lock().groups()
    }

    /// Brings the gauges of a model up to date.
    pub(super) fn update_metrics(&self, model: &Placement) {
        let inner = self.inner.lock();
        let running = inner.models.get(&model.id).map_or(0, |resident| resident.running);
        let (lanes, stats) = (inner.scheduler().lanes(model.id).len(), inner.scheduler().stats(model.id));
        drop(inner);
        model.metrics.set(lanes, running, stats);
    }

    /// The launches on this device that ended at `from` or later, by model. Models that have left the
    /// device are included.
    pub fn past(&self, from: Time) -> Vec<PastLaunches> {
        let models: Vec<Arc<Placement>> =
            self.inner.lock().models.values().map(|hosted| hosted.model.clone()).collect();
        // A model may leave meanwhile.
        let gone = self.history.lock().of_gone(from, |id| models.iter().any(|model| model.id == id));
        let mut all = Vec::new();
        for past in models.iter().map(|model| self.past_of(model, from)).chain(gone) {
            past.join(&mut all);
        }
        all
    }

    /// The model's launches on this device that ended at `from` or later.
    pub(super) fn past_of(&self, model: &Placement, from: Time) -> PastLaunches {
        let inner = self.inner.lock();
        let scheduler = inner.scheduler();
        let specs: Vec<LaneSpec> = scheduler.lanes(model.id).iter().filter_map(|lane| scheduler.lane(*lane)).collect();
        let partition = inner.partition(model);
        let mut lanes: Vec<u32> = specs.into_iter().map(|spec| spec.max_rows).collect();
        if lanes.is_empty() {
            lanes = vec![model.tensors.codec.max_batch; scheduler.shared_lanes(partition).len()];
        }
        drop(inner);
        let (launches, complete) = self.history.lock().since(model.id, from);
        PastLaunches {
            backend: String::new(),
            model: model.name.clone(),
            version: model.version.clone(),
            device: self.device,
            partition: partition.0,
            policy: model.policy_name.to_owned(),
            lanes,
            complete,
            launches,
        }
    }
}

impl LaneHost for DeviceHost {
    fn device(&self) -> usize {
        self.device
    }

    fn clock(&self) -> Clock {
        self.clock
    }

    fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    fn begin(&self, head: &Head) -> Time {
        let now = self.clock.now();
        self.occupancy.begin(now, head.partition, head.model.id);
        head.model.work.begin(now);
        now
    }

    fn finish(&self, head: Head, begin: Time, end: Time, outcome: Outcome, own: &mut OwnLaunch) {
        let Head { launch, lane, partition, model, grant } = head;
        self.occupancy.end(end, partition, model.id);
        let is_last = usize::from(launch.segments.end) == model.segments();
        model.work.end(end, end.since(begin), is_last.then_some(launch.rows));
        let asked = outcome.members.iter().map(|m| u64::from(m.rows) * u64::from(m.length)).sum();
        model.metrics.record_launch(&launch, asked, end.since(begin));
        let (has_failed, alone) = (!outcome.failed.is_empty(), outcome.alone);
        let span = Span { start: begin, end };
        let riders = Riders::of(&outcome.members, grant.as_ref().and_then(|grant| grant.reason));
        self.history.lock().push(&launch, (lane, partition), riders, span);
        if !has_failed {
            model.tell_batch(&launch, span);
        }
        let ran = (!alone && !has_failed).then_some(Ran { partition, rows: launch.rows, end });
        // A client that asks again at once must not meet the guess that its answer has just
        // replaced.
        let tried = grant.as_ref().filter(|grant| grant.is_guess).zip(ran);
        tried.into_iter().for_each(|(grant, ran)| self.learn(grant, ran));
        let end_launch = |inner: &mut DeviceState, now| (inner.end_launch(now, &launch, span, outcome), now);
        let ((ran_alone, now), actions) = self.decide(&model, end_launch);
        reply::together(|| answering::answer_alone(self.device, ran_alone, now));
        self.carry_out(actions, Some(launch.rows), own);
        if let Some(grant) = grant {
            if let Some(ran) = ran.filter(|_| !grant.is_guess) {
                self.learn(&grant, ran);
            }
            self.complete(&grant, ran, own);
            if has_failed && model.lost().is_some() {
                self.retire();
            }
        }
    }

    fn is_awaited(&self, mut requests: &mut dyn Iterator<Item = &RequestId>) -> bool {
        let inner = self.inner.lock();
        Iterator::any(&mut requests, |request| inner.table.is_awaited(*request))
    }
}
