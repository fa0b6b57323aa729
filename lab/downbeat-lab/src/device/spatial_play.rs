//! Plays a run of models that share a device.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use downbeat_core::device::spatial::{
    Aimd, BatchControl, Clipper, MeasuredWindow, ShareReason, Slab, Spatial, SpatialModel, SpatialOutput,
};
use downbeat_core::device::{
    DeviceOutput, DeviceRequest, DeviceScheduler, LaneId, Launch, LaunchId, Layout, ModelSpec, PartitionId,
    SegmentProfile, SegmentRange, Span, WindowedOptions,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::simulation::node::{self, Node};
use rand::SeedableRng;
use rand_distr::Normal;
use rand_pcg::Pcg64;

use super::contended::{Completed, ContendedDevice};
use super::failure::DeviceFailure;
use super::limits::{DeviceLimits, Sharing};
use super::model::EmulatedModel;
use super::spatial_report::{Ran, SharingReport};
use super::spatial_run::{BatchedBy, SharedBy, SharingLoad, SharingModel, SpatialRun};

/// The largest batch (GSLICE §3.3.2: 64 requests are tracked).
const MOST: u32 = 64;
/// The most items that wait for a model, in all its streams.
const QUEUE: u32 = 4 * MOST;
/// The window over which the division learns throughput and latency.
const WINDOW: Duration = Duration::from_millis(500);

/// The counters of a model in the current window.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// The time in which any batch ran; streams run side by side.
    busy: Duration,
    /// The sum of the batches' times.
    took: Duration,
    items: u64,
    arrivals: u64,
    batches: u32,
}

struct Running {
    spec: SharingModel,
    model: EmulatedModel,
    report: SharingReport,
    counted: Counted,
    /// The number of the model's running batches, and the instant up to which busy time is counted.
    at_once: (u32, Time),
    /// The instant of the next request.
    next: Time,
    /// The arrivals of unanswered requests.
    open: BTreeMap<RequestId, Time>,
    /// Random numbers for the arrivals: they are the same under every way of sharing.
    rng: Pcg64,
    /// The instant at which the new lanes are ready, and their partition.
    preparing: Option<(Time, PartitionId)>,
    /// The partition of lanes that stand by.
    standby: Option<PartitionId>,
    partition: PartitionId,
    is_here: bool,
}

impl Running {
    /// Counts the time since the last call as busy, if anything ran.
    fn count_busy(&mut self, now: Time) {
        let (count, since) = self.at_once;
        if count > 0 {
            self.counted.busy += now.since(since);
        }
        self.at_once.1 = now;
    }
}

/// The controller that limits batches.
enum Control {
    Spatial(Spatial),
    Batches(BTreeMap<ModelId, BatchControl>),
}

pub(super) struct Play {
    scheduler: DeviceScheduler,
    device: ContendedDevice,
    control: Control,
    models: Vec<Running>,
    /// Launches under way, by the device's token, with their start.
    flights: BTreeMap<u64, (Launch, Time)>,
    partitions: u32,
    requests: u64,
    noise: Option<Normal<f64>>,
    rng: Pcg64,
    seed: u64,
    /// The instant of the next event, of the next window, and of the end.
    at: Time,
    window: Time,
    end: Time,
}

impl Node for Play {
    type Event = ();
    type End = DeviceFailure;

    fn seed(&self) -> u64 {
        self.seed
    }

    fn poll_event(&mut self) -> Option<(Time, ())> {
        (self.at < self.end).then_some((self.at, ()))
    }

    fn handle_event(&mut self, now: Time, (): ()) -> ControlFlow<DeviceFailure> {
        match self.step(now) {
            Ok(()) => ControlFlow::Continue(()),
            Err(failure) => ControlFlow::Break(failure),
        }
    }
}

impl Play {
    pub(super) fn new(run: &SpatialRun) -> Self {
        let limits = run.platform.limits();
        let sharing = if run.shared == SharedBy::Turns { Sharing::TimeSliced } else { limits.sharing };
        let mut device = ContendedDevice::new(DeviceLimits { sharing, ..limits }, 0);
        let shares = if let SharedBy::Shares(shares) = &run.shared { &shares[..] } else { &[limits.units] };
        for (partition, units) in shares.iter().enumerate() {
            device.set_units(Time::ZERO, partition, *units);
        }
        let control = match &run.shared {
            SharedBy::Gslice(options) => Control::Spatial(Spatial::new(*options)),
            _ => Control::Batches(BTreeMap::new()),
        };
        let running = |(index, spec): (usize, &SharingModel)| Running {
            spec: *spec,
            model: EmulatedModel::new(spec.architecture, run.platform),
            report: SharingReport::default(),
            counted: Counted::default(),
            at_once: (0, Time::ZERO),
            next: spec.from,
            open: BTreeMap::new(),
            rng: Pcg64::seed_from_u64(run.seed.wrapping_mul(1 << 16).wrapping_add(index as u64 + 1)),
            preparing: None,
            standby: None,
            partition: PartitionId(if shares.len() > 1 { index as u32 } else { 0 }),
            is_here: false,
        };
        let mut scheduler = DeviceScheduler::new();
        // Later partitions are added on request.
        let layout = Layout { shared_lanes: vec![0; shares.len()] };
        scheduler.handle_layout(Time::ZERO, &layout).unwrap_or_default();
        Play {
            scheduler,
            device,
            control,
            models: run.models.iter().enumerate().map(running).collect(),
            flights: BTreeMap::new(),
            partitions: shares.len() as u32,
            requests: 0,
            noise: Normal::new(1.0, run.platform.noise).ok(),
            rng: Pcg64::seed_from_u64(run.seed),
            seed: run.seed,
            at: Time::ZERO,
            window: Time::ZERO + WINDOW,
            end: Time::ZERO + run.span,
        }
    }

    /// Plays until the end and returns the report of each model, by number.
    pub(super) fn run(mut self) -> Result<Vec<SharingReport>, DeviceFailure> {
        match node::run(&mut self, Time::ZERO) {
            (_, Some(failure)) => Err(failure),
            (_, None) => Ok(self.models.into_iter().map(|running| running.report).collect()),
        }
    }

    /// Carries out everything that is due.
    fn step(&mut self, now: Time) -> Result<(), DeviceFailure> {
        self.come_and_go(now)?;
        self.prepared(now);
        for completed in self.device.advance(now) {
            if let Completed::Launch { token, .. } = completed {
                self.complete(now, token);
            }
        }
        if now >= self.window {
            self.window = now + WINDOW;
            self.end_window(now);
        }
        if let Control::Spatial(spatial) = &mut self.control {
            spatial.handle_timeout(now);
        }
        self.obey(now)?;
        self.arrive(now);
        self.at = self.next(now).min(self.window).min(self.end);
        Ok(())
    }

    /// Returns the id of a model for the division, which is its first stream's id for the
    /// scheduler.
    fn id(index: usize) -> ModelId {
        ModelId(index as u32)
    }

    /// Returns the scheduler's ids of a model's streams.
    fn streams(&self, index: usize) -> impl Iterator<Item = ModelId> + use<> {
        let (count, streams) = (self.models.len(), self.models[index].spec.streams as usize);
        (0..streams).map(move |stream| Self::id(index + stream * count))
    }

    /// Returns the number of the model with this stream.
    fn index(&self, stream: ModelId) -> usize {
        stream.0 as usize % self.models.len()
    }

    fn next(&self, now: Time) -> Time {
        let models = self.models.iter().flat_map(|running| {
            let SharingModel { from, until, .. } = running.spec;
            let preparing = running.preparing.map(|(at, _)| at);
            [Some(from), Some(until), Some(running.next).filter(|_| running.is_here), preparing]
        });
        let timeout = match &self.control {
            Control::Spatial(spatial) => spatial.poll_timeout().map(|(at, _)| at),
            Control::Batches(_) => None,
        };
        let all = models.flatten().chain(timeout).filter(|at| *at > now);
        all.chain(self.device.next_event()).min().unwrap_or(Time::MAX)
    }

    fn come_and_go(&mut self, now: Time) -> Result<(), DeviceFailure> {
        for index in 0..self.models.len() {
            let (id, running) = (Self::id(index), &mut self.models[index]);
            let is_due = running.spec.from <= now && now < running.spec.until;
            if is_due == running.is_here {
                continue;
            }
            running.is_here = is_due;
            let (SharingModel { slo, knee, batch, .. }, partition) = (running.spec, running.partition);
            let batch = match batch {
                BatchedBy::Fixed(rows) => BatchControl::Fixed(rows),
                BatchedBy::Slab => BatchControl::Slab(Slab::new(slo, MOST)),
                BatchedBy::Aimd => BatchControl::Aimd(Aimd::new(slo, MOST)),
                BatchedBy::Clipper => BatchControl::Clipper(Clipper::new(slo, MOST)),
            };
            if !is_due {
                (running.preparing, running.standby) = (None, None);
                // The policy takes no more than its limit, so no partition is in the way.
                for stream in self.streams(index) {
                    self.scheduler.handle_model(now, stream, None).unwrap_or_default();
                }
            }
            match &mut self.control {
                Control::Spatial(spatial) => {
                    spatial.handle_model(now, id, is_due.then_some(SpatialModel { slo, knee, batch }));
                }
                Control::Batches(batches) if is_due => {
                    let rows = batch.limit();
                    batches.insert(id, batch);
                    self.add(now, index, partition)?;
                    self.limit(now, index, rows);
                }
                Control::Batches(batches) => drop(batches.remove(&id)),
            }
        }
        Ok(())
    }

    /// Brings a model onto the device.
    fn add(&mut self, now: Time, index: usize, partition: PartitionId) -> Result<(), DeviceFailure> {
        let units = self.device.units(partition.0 as usize);
        let running = &mut self.models[index];
        let times = (1..=MOST).map(|rows| running.model.time_on(rows, 64, units)).collect();
        let profile = SegmentProfile::new(vec![0], &[vec![LatencyProfile::from_table(times)?]])?;
        let options = WindowedOptions {
            profile,
            max_batch: MOST,
            window: Duration::ZERO,
            fill: false,
            drop: false,
            queue_bound: QUEUE / running.spec.streams,
            ahead: 0,
        };
        running.partition = partition;
        running.report.shares.push((now, units));
        for stream in self.streams(index) {
            let model = ModelSpec::new(&options, partition).build().map_err(failed)?;
            self.scheduler.handle_model(now, stream, Some(model)).map_err(failed)?;
        }
        Ok(())
    }

    fn limit(&mut self, now: Time, index: usize, rows: u32) {
        self.models[index].report.limits.push((now, rows));
        for stream in self.streams(index) {
            self.scheduler.handle_limit(now, stream, rows);
        }
    }

    /// Reports lanes that have become ready.
    fn prepared(&mut self, now: Time) {
        for index in 0..self.models.len() {
            let Some((_, partition)) = self.models[index].preparing.take_if(|(at, _)| *at <= now) else { continue };
            self.models[index].standby = Some(partition);
            self.streams(index).for_each(|stream| self.scheduler.handle_prepared(now, stream, Ok(())));
            if let Control::Spatial(spatial) = &mut self.control {
                spatial.handle_prepared(now, Self::id(index), true);
            }
        }
    }

    /// Carries out the outputs of the division.
    fn obey(&mut self, now: Time) -> Result<(), DeviceFailure> {
        while let Control::Spatial(spatial) = &mut self.control
            && let Some(output) = spatial.poll_output()
        {
            match output {
                SpatialOutput::Prepare { model, units, reason } => {
                    self.prepare(now, model.0 as usize, units, reason)?
                }
                SpatialOutput::Switch { model, .. } => {
                    let index = model.0 as usize;
                    let Some(partition) = self.models[index].standby.take() else { continue };
                    if self.scheduler.lanes(model).is_empty() {
                        self.add(now, index, partition)?;
                        let rows = self.models[index].report.limits.last().map_or(1, |(_, rows)| *rows);
                        for stream in self.streams(index) {
                            self.scheduler.handle_limit(now, stream, rows);
                        }
                    } else {
                        for stream in self.streams(index) {
                            self.scheduler.handle_switch(now, stream);
                        }
                        let units = self.device.units(partition.0 as usize);
                        let running = &mut self.models[index];
                        running.report.shares.push((now, units));
                        running.partition = partition;
                    }
                }
                SpatialOutput::Limit { model, rows } => self.limit(now, model.0 as usize, rows),
                SpatialOutput::Discard { model } => {
                    let index = model.0 as usize;
                    self.models[index].standby = None;
                    for stream in self.streams(index) {
                        self.scheduler.handle_move(now, stream, self.models[index].partition).unwrap_or_default();
                    }
                }
                SpatialOutput::NoRoom { model } => {
                    return Err(DeviceFailure(format!("the device has no share for {model}")));
                }
            }
        }
        Ok(())
    }

    fn prepare(&mut self, now: Time, index: usize, units: u32, reason: ShareReason) -> Result<(), DeviceFailure> {
        let (id, partition) = (Self::id(index), PartitionId(self.partitions));
        self.partitions += 1;
        self.device.set_units(now, partition.0 as usize, units);
        let layout = Layout { shared_lanes: vec![0; self.partitions as usize] };
        self.scheduler.handle_layout(now, &layout).map_err(failed)?;
        self.models[index].report.asked.push((now, units, reason));
        self.models[index].standby = None;
        if self.scheduler.lanes(id).is_empty() {
            // The model comes once it is loaded.
            self.models[index].standby = Some(partition);
            if let Control::Spatial(spatial) = &mut self.control {
                spatial.handle_prepared(now, id, true);
            }
            return Ok(());
        }
        self.models[index].preparing = Some((now + self.models[index].spec.prepares, partition));
        for stream in self.streams(index) {
            match self.models[index].spec.restarts {
                true => self.scheduler.handle_model(now, stream, None).map_err(failed)?,
                false => self.scheduler.handle_move(now, stream, partition).map_err(failed)?,
            }
        }
        Ok(())
    }

    /// Hands in the requests that come now.
    fn arrive(&mut self, now: Time) {
        for index in 0..self.models.len() {
            if !self.models[index].is_here {
                continue;
            }
            if self.models[index].spec.load == SharingLoad::Busy {
                self.fill(now, index);
                continue;
            }
            while self.models[index].next <= now {
                let running = &mut self.models[index];
                let at = running.next;
                running.next = at + running.spec.load.gap(&mut running.rng);
                running.counted.arrivals += 1;
                running.report.arrived.push(at);
                let waits = |stream: &ModelId| {
                    let stats = self.scheduler.stats(*stream);
                    stats.waiting + stats.running
                };
                if let Some(stream) = self.streams(index).min_by_key(waits)
                    && let Some(id) = self.request(now, stream)
                {
                    self.models[index].open.insert(id, at);
                }
            }
        }
        self.carry_out(now);
    }

    /// Keeps more items waiting than a batch takes.
    fn fill(&mut self, now: Time, index: usize) {
        self.models[index].next = Time::MAX;
        for stream in self.streams(index) {
            while self.scheduler.stats(stream).waiting < MOST && self.request(now, stream).is_some() {}
        }
    }

    /// Hands in a request. Returns `None` if it is refused: the queue is full or the model has no
    /// lanes yet.
    fn request(&mut self, now: Time, model: ModelId) -> Option<RequestId> {
        self.requests += 1;
        let id = RequestId(self.requests);
        let request = DeviceRequest { id, model, deadline: Time::MAX, size: 1, length: 0 };
        self.scheduler.handle_request(now, &request).is_ok().then_some(id)
    }

    fn carry_out(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            if let DeviceOutput::Launch(launch) = output {
                self.launch(now, launch);
            }
        }
    }

    fn launch(&mut self, now: Time, launch: Launch) {
        let index = self.index(launch.model);
        let running = &mut self.models[index];
        let partition = self.scheduler.lane(launch.lane).map_or(0, |lane| lane.partition.0 as usize);
        let segments = SegmentRange::new(0, running.model.segment_count());
        let mut work = running.model.work(segments, launch.rows, 64, self.device.units(partition));
        if let Some(noise) = &self.noise {
            work.vary(noise, &mut self.rng);
        }
        if running.spec.copied {
            let (bytes, limits) = (running.model.item_bytes(0).0 * u64::from(launch.rows), running.model.limits());
            let takes = Duration::from_secs_f64(bytes as f64 / limits.copy_bytes_per_second);
            work.overhead += limits.copy_fixed + takes;
        }
        let (LaunchId(token), LaneId(lane)) = (launch.id, launch.lane);
        running.count_busy(now);
        running.at_once.0 += 1;
        self.flights.insert(token, (launch, now));
        self.device.launch_in(now, partition, LaneId(lane), token, work);
    }

    fn complete(&mut self, now: Time, token: u64) {
        let Some((launch, start)) = self.flights.remove(&token) else { return };
        let (index, rows, took) = (self.index(launch.model), launch.rows, now.since(start));
        let (id, running) = (Self::id(index), &mut self.models[index]);
        let answered = launch.members.iter().filter_map(|member| running.open.remove(member));
        running.report.answered.extend(answered.map(|at| (at, now.since(at))));
        running.report.ran.push(Ran { end: now, rows, took });
        running.count_busy(now);
        running.at_once.0 -= 1;
        running.counted.took += took;
        running.counted.items += u64::from(rows);
        running.counted.batches += 1;
        match &mut self.control {
            Control::Spatial(spatial) => spatial.handle_batch(now, id, rows, Span { start, end: now }),
            Control::Batches(batches) => {
                if let Some(batch) = batches.get_mut(&id) {
                    let before = batch.limit();
                    let _ = batch.handle_batch(rows, took);
                    let rows = batch.limit();
                    if rows != before {
                        self.limit(now, index, rows);
                    }
                }
            }
        }
        // The outputs must be carried out before the next launch.
        self.obey(now).unwrap_or_default();
        self.scheduler.handle_completion(now, launch.id, Span { start, end: now }, &[]);
        self.carry_out(now);
    }

    /// Tells the division what a window has measured.
    fn end_window(&mut self, now: Time) {
        let Control::Spatial(spatial) = &mut self.control else { return };
        for (index, running) in self.models.iter_mut().enumerate().filter(|(_, running)| running.is_here) {
            running.count_busy(now);
            let Counted { busy, took, items, arrivals, batches } = std::mem::take(&mut running.counted);
            let arrivals = (running.spec.load != SharingLoad::Busy).then_some(arrivals);
            let latency = Duration::from_nanos(took.as_nanos() / u64::from(batches.max(1)));
            spatial.handle_window(Self::id(index), &MeasuredWindow { span: WINDOW, busy, items, arrivals, latency });
        }
    }
}

fn failed(error: impl std::fmt::Display) -> DeviceFailure {
    DeviceFailure(error.to_string())
}
