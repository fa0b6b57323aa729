//! Many threads at once, with a checker outside: each request is answered exactly once, and no
//! device runs two batches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, RwLock};

use downbeat_core::cluster::*;
use downbeat_core::journal::cluster::{ClusterRecords, Decision};
use downbeat_core::journal::{Journal, MachineKind, Record, read, replay};
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};
use downbeat_driver::{Cluster, Handler, LogSink, Moment, QueueHandle, Setup, TURN};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

const POSTERS: u64 = 3;
const REQUESTS: u64 = 4_000;
/// The most devices that a run has.
const DEVICES: usize = 6;

enum Event {
    Submit(Request),
    Cancel(ModelId, RequestId),
}

struct Batch {
    id: BatchId,
    members: Vec<RequestId>,
}

/// The checker, which sees every event.
struct Outside {
    seed: u64,
    longest_slo_us: u64,
    origin: std::time::Instant,
    /// By request.
    answers: Vec<AtomicU32>,
    answered: AtomicU64,
    dispatched: AtomicU64,
    /// By device: the batches sent to the device.
    sent: Vec<AtomicU32>,
    /// The most batches that a device may have: one, or with a network one more that is on its way.
    most_sent: u32,
    devices: Vec<Sender<Batch>>,
}

impl Outside {
    fn answer(&self, request: RequestId) {
        let before = self.answers[request.0 as usize].fetch_add(1, Ordering::SeqCst);
        assert_eq!(before, 0, "seed {}: {request} is answered twice", self.seed);
        self.answered.fetch_add(1, Ordering::SeqCst);
    }
}

impl Handler for Outside {
    type Event = Event;
    type RequestTable = BTreeMap<RequestId, (ModelId, Ticket)>;
    type Context = ();

    #[expect(clippy::disallowed_methods, reason = "the test's clock")]
    fn now(&self) -> Time {
        Time::ZERO + std::time::Instant::now().duration_since(self.origin).into()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, requests: &mut Self::RequestTable, event: Event) {
        match event {
            Event::Submit(request) => match shard.handle_request(moment.now, &request) {
                Ok(ticket) => drop(requests.insert(request.id, (request.model, ticket))),
                Err(_) => self.answer(request.id),
            },
            Event::Cancel(model, request) => {
                if let Some((_, ticket)) = requests.get(&request)
                    && shard.handle_cancel(moment.now, model, *ticket)
                {
                    requests.remove(&request);
                    self.answer(request);
                }
            }
        }
    }

    fn carry_out(
        &self,
        _: Moment,
        shard: &mut Journal<Shard>,
        requests: &mut Self::RequestTable,
        output: Output,
        (): &mut (),
    ) {
        match output {
            Output::Drop { request, .. } => {
                assert!(requests.remove(&request).is_some(), "seed {}: {request} does not wait", self.seed);
                self.answer(request);
            }
            Output::Dispatch { batch, device, model, members, .. } => {
                for member in &members {
                    assert_eq!(requests.remove(member).map(|(model, _)| model), Some(model), "seed {}", self.seed);
                }
                let sent = self.sent[device.0 as usize].fetch_add(1, Ordering::SeqCst);
                assert!(sent < self.most_sent, "seed {}: {device} is given {batch} beside {sent} others", self.seed);
                self.dispatched.fetch_add(1, Ordering::SeqCst);
                self.devices[device.0 as usize].send(Batch { id: batch, members: members.clone() }).unwrap();
                shard.recycle(members);
            }
        }
    }
}

/// The second kind of devices takes twice the time.
fn profiles(us: u64) -> DeviceProfiles {
    let profile = |us| LatencyProfile::linear(Duration::from_micros(2), Duration::from_micros(us), 8).unwrap();
    DeviceProfiles::by_kind([(DeviceKind(0), profile(us)), (DeviceKind(1), profile(2 * us))]).unwrap()
}

fn options(rng: &mut Pcg64) -> ModelOptions {
    let dispatch = match rng.random_range(0..4) {
        0 => DispatchPolicy::Deferred,
        1 => DispatchPolicy::Eager,
        2 => DispatchPolicy::Adaptive { consolidate: rng.random() },
        _ => DispatchPolicy::Timeout { delay: Duration::from_micros(100), preferred: vec![4] },
    };
    ModelOptions {
        profiles: profiles(20),
        max_batch: 8,
        drop: if rng.random() { DropPolicy::WindowDrop } else { DropPolicy::HeadDrop },
        dispatch,
        max_in_flight: if rng.random_range(0..4) == 0 { 1 } else { u32::MAX },
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: vec![PriorityLevel { max_queue: 1_000, timeout_action: TimeoutAction::Reject }],
    }
}

fn device(cluster: &Cluster<Outside>, device: DeviceId, batches: &Receiver<Batch>) {
    for batch in batches {
        let outside = cluster.handler();
        pause(Duration::from_micros(batch.id.0 % 20));
        for member in batch.members {
            outside.answer(member);
        }
        outside.sent[device.0 as usize].fetch_sub(1, Ordering::SeqCst);
        cluster.complete(device, batch.id, &mut ());
    }
}

/// Sends requests and cancellations.
fn post(cluster: &Cluster<Outside>, queues: &RwLock<Vec<QueueHandle>>, poster: u64) {
    let outside = cluster.handler();
    let mut rng = Pcg64::seed_from_u64(outside.seed * 100 + poster);
    for n in 0..REQUESTS {
        let id = RequestId(poster * REQUESTS + n);
        let queue = {
            let queues = queues.read().unwrap();
            queues[rng.random_range(0..queues.len())]
        };
        let slo = Duration::from_micros(rng.random_range(10..outside.longest_slo_us));
        // Some requests can wait for as long as a busy machine takes.
        let deadline = if n % 8 == 0 { Time::MAX } else { outside.now() + slo };
        let queue_expiry =
            if rng.random_range(0..8) == 0 { outside.now() + Duration::from_micros(50) } else { Time::MAX };
        let size = rng.random_range(1..4);
        let request = Request { id, model: queue.model, deadline, queue_expiry, level: 0, size };
        cluster.post(queue, Event::Submit(request), &mut ());
        if rng.random_range(0..6) == 0 {
            cluster.post(queue, Event::Cancel(queue.model, id), &mut ());
        }
        // Now and then the queues run empty.
        if n % 16 == 0 {
            pause(Duration::from_micros(rng.random_range(0..200)));
        }
    }
}

/// Gives the processor to other threads for so long, or longer.
fn pause(time: Duration) {
    let (_never, nothing) = channel::<()>();
    assert_eq!(nothing.recv_timeout(time.into()), Err(RecvTimeoutError::Timeout));
}

/// Adds and removes models and devices.
fn operate(cluster: &Cluster<Outside>, queues: &RwLock<Vec<QueueHandle>>, kinds: u32) {
    let mut rng = Pcg64::seed_from_u64(cluster.handler().seed * 100 + 99);
    let mut devices: Vec<DeviceId> = (0..2).map(DeviceId).collect();
    for step in 0..60 {
        let queue = cluster.add_model(options(&mut rng));
        let mut changed = queues.write().unwrap();
        let at = rng.random_range(0..changed.len());
        let old = std::mem::replace(&mut changed[at], queue);
        drop(changed);
        if !rng.random::<bool>() || !cluster.remove_idle_model(old) {
            cluster.set_profile(old, profiles(9));
            cluster.remove_model(old);
        }
        cluster.visit();
        cluster.set_load(devices[step as usize % 2], Time::from_nanos(u64::from(step % 7)));
        if step % 15 == 14 {
            devices.push(cluster.add_device(DeviceKind(step % kinds)));
            let leaving = devices.remove(rng.random_range(0..devices.len() - 1));
            cluster.remove_device(leaving);
            cluster.remove_device(leaving);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the test's clock")]
fn run(seed: u64, shards: usize, own_threads: bool, logs: Option<Arc<Logs>>) {
    // Half of the runs with a network, which lets a batch be sent to a device that still runs
    // another.
    let us = Duration::from_micros;
    let network = match seed % 2 {
        0 => NetworkBudget::default(),
        _ => NetworkBudget { control: us(5), data: us(1), reply: us(3) },
    };
    let (devices, batches): (Vec<_>, Vec<_>) = (0..DEVICES).map(|_| channel()).unzip();
    let outside = Outside {
        seed,
        // Threads that spin have to share the cores of a small machine.
        longest_slo_us: if own_threads { 60_000 } else { 3_000 },
        origin: std::time::Instant::now(),
        answers: (0..POSTERS * REQUESTS).map(|_| AtomicU32::new(0)).collect(),
        answered: AtomicU64::new(0),
        dispatched: AtomicU64::new(0),
        sent: (0..DEVICES).map(|_| AtomicU32::new(0)).collect(),
        most_sent: if network.is_remote() { 2 } else { 1 },
        devices,
    };
    let log = logs.clone().map(|logs| logs as Arc<dyn LogSink>);
    let wake_margin = Duration::ZERO;
    // With one kind of devices, shards keep early candidates to themselves.
    let kinds = 1 + (seed as u32 / 2) % 2;
    let setup =
        Setup { devices: vec![DeviceKind(0), DeviceKind(kinds - 1)], planned: None, kinds, network, wake_margin, log };
    let cluster = Arc::new(Cluster::new(outside, vec![BTreeMap::new(); shards], setup));
    let mut rng = Pcg64::seed_from_u64(seed);
    let queues = RwLock::new((0..5).map(|_| cluster.add_model(options(&mut rng))).collect::<Vec<_>>());
    let stopped = AtomicBool::new(false);
    for (index, batches) in batches.into_iter().enumerate() {
        // Each device's thread holds the cluster, and so its own channel: it ends with the process.
        let cluster = cluster.clone();
        std::thread::spawn(move || device(&cluster, DeviceId(index as u32), &batches));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| cluster.ring_alarms());
        if own_threads {
            for index in 0..shards {
                let (cluster, stopped) = (&cluster, &stopped);
                scope.spawn(move || {
                    let mut shard = cluster.own_shard(index);
                    while !stopped.load(Ordering::SeqCst) {
                        if shard.turn(TURN) == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            scope.spawn(|| {
                let mut matchmaker = cluster.own_matchmaker();
                while !stopped.load(Ordering::SeqCst) {
                    if matchmaker.turn(TURN) == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let posters: Vec<_> = (0..POSTERS)
            .map(|poster| {
                let (cluster, queues) = (&cluster, &queues);
                scope.spawn(move || post(cluster, queues, poster))
            })
            .collect();
        // A shard's own thread never lets its shard go, and the removal of an idle model waits for
        // this.
        if !own_threads {
            operate(&cluster, &queues, kinds);
        }
        for poster in posters {
            poster.join().unwrap();
        }
        let outside = cluster.handler();
        for _ in 0..20_000 {
            if outside.answered.load(Ordering::SeqCst) == POSTERS * REQUESTS {
                break;
            }
            pause(Duration::from_millis(1));
        }
        stopped.store(true, Ordering::SeqCst);
        cluster.stop_alarm();
    });
    let outside = cluster.handler();
    let free = || cluster.own_matchmaker().free_devices();
    for _ in 0..20_000 {
        // The last completions are on their way.
        if free() == 2 {
            break;
        }
        if own_threads {
            cluster.own_matchmaker().turn(TURN);
        }
        pause(Duration::from_millis(1));
    }
    assert_eq!(free(), 2, "seed {seed}, {shards} shards: a device was lost");
    let lost = outside.answers.iter().filter(|answers| answers.load(Ordering::SeqCst) == 0).count();
    assert_eq!(lost, 0, "seed {seed}, {shards} shards: requests that were never answered");
    let dispatched = outside.dispatched.load(Ordering::SeqCst);
    assert!(dispatched > 0, "seed {seed}, {shards} shards: no batch ran");
    if let Some(logs) = logs {
        cluster.flush_log();
        logs.check(seed, shards, dispatched);
    }
}

/// Decision logs in memory.
#[derive(Debug)]
struct Logs {
    /// The bytes at which a log ends.
    most: usize,
    logs: Mutex<Vec<Log>>,
}

#[derive(Debug)]
struct Log {
    machine: MachineKind,
    bytes: Vec<u8>,
    ended: bool,
}

impl Logs {
    fn new(most: usize) -> Option<Arc<Self>> {
        Some(Arc::new(Logs { most, logs: Mutex::default() }))
    }

    /// Each machine has a log that replays alike: all decisions, or the decisions up to the log's
    /// end.
    fn check(&self, seed: u64, shards: usize, dispatched: u64) {
        let logs = self.logs.lock().unwrap();
        assert_eq!(logs.len(), shards + 1, "seed {seed}: one for each shard and the matchmaker");
        let mut logged = 0;
        for Log { machine, bytes, ended } in &*logs {
            let context = format!("seed {seed}, {machine:?} of {shards} shards");
            let replayed = replay(bytes).unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_eq!(replayed.divergence, None, "{context}: {replayed:?}");
            // A log smaller than a buffer (64 KiB) comes at the end, in one piece, and no sink has
            // refused the piece.
            assert!(*ended == (self.most < usize::MAX) || bytes.len() < 64 << 10, "{context}");
            let (_, entries) = read::<ClusterRecords>(bytes).unwrap();
            logged += entries.filter(|entry| is_dispatch(&entry.as_ref().unwrap().record)).count() as u64;
        }
        assert_eq!(logs.iter().any(|log| log.ended), self.most < usize::MAX, "seed {seed}");
        if self.most == usize::MAX {
            assert_eq!(logged, dispatched, "seed {seed}, {shards} shards: every dispatch is in a log");
        } else {
            assert!((1..dispatched).contains(&logged), "seed {seed}: {logged} of {dispatched} dispatches");
        }
    }
}

fn is_dispatch(record: &Record<ClusterRecords>) -> bool {
    matches!(record, Record::Decision(Decision::Output(Output::Dispatch { .. })))
}

impl LogSink for Logs {
    fn append(&self, machine: MachineKind, mut bytes: Vec<u8>) -> bool {
        let mut logs = self.logs.lock().unwrap();
        let Some(log) = logs.iter_mut().find(|log| log.machine == machine) else {
            logs.push(Log { machine, bytes, ended: false });
            return true;
        };
        assert!(!log.ended, "{machine:?} is written down after its log has ended");
        log.ended = log.bytes.len() + bytes.len() > self.most;
        if !log.ended {
            log.bytes.append(&mut bytes);
        }
        !log.ended
    }
}

/// The posting threads do the work, while models and devices come and go.
#[test]
fn posting_threads_answer_each_request_once() {
    for seed in 0..4 {
        run(seed, 1, false, None);
        run(seed, 3, false, None);
    }
}

/// Each shard and the matchmaker have a thread.
#[test]
fn own_threads_answer_each_request_once() {
    for seed in 10..12 {
        run(seed, 2, true, None);
    }
}

/// Under all threads, the inputs of each shard and of the matchmaker give the same decisions again.
#[test]
fn the_log_of_a_run_on_threads_plays_again() {
    run(20, 1, false, Logs::new(usize::MAX));
    for seed in 21..23 {
        run(seed, 3, false, Logs::new(usize::MAX));
    }
    for seed in 30..32 {
        run(seed, 2, true, Logs::new(usize::MAX));
    }
}

/// A sink may refuse the rest of the log: the run goes on, and the accepted part plays again.
#[test]
fn a_log_that_ends_does_not_end_the_run() {
    run(40, 2, false, Logs::new(1));
}
