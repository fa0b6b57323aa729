//! Counts the cache lines that move between cores for a request, and its instructions. Needs
//! valgrind.
//!
//! ```text
//! cargo build --profile ci -p downbeat-scheduler-bench --example shared_lines
//! target/ci/examples/shared_lines --threads 2 --devices 256 --requests 20000
//! ```
//!
//! One thread plays all cores in virtual time. It works off each event whole, for one of the cores. The program runs itself under `valgrind --tool=lackey`, which lists each access to memory.
//! A store to a place known to both tells which core works from then on. The counting process plays
//! the caches: a line is in one cache that may write to it, or in several that may read. A *move* is
//! an access that needs another core's cache. Such an access reads a line that another core wrote
//! since, or writes to a line that another core holds. The stack is private, and drawing the load is
//! not counted. Each access is as in a run without contention, so a run in real time moves no fewer
//! lines.
//!
//! - Without `--matchmaker-thread` any core posts any request, drawn at random, and works it off.
//! - With `--own-models` a core posts only for the models of its own shard.
//! - With `--matchmaker-thread` each shard has a core, and the matchmaker the last one.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use downbeat_bench::load::seed::Stream;
use downbeat_core::cluster::{Output, Request, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, Time};
use downbeat_driver::{Cluster, Handler, Moment, OwnMatchmaker, OwnShard, QueueHandle, Setup, TURN};
use downbeat_scheduler_bench::{SchedulerArgs, workload};
use rand::RngExt;

#[derive(Parser, Clone)]
struct Args {
    /// `--threads` is the number of shards, and of cores that post or own a shard.
    #[command(flatten)]
    scheduler: SchedulerArgs,
    /// Requests that are counted.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    requests: u64,
    /// Requests before.
    #[arg(long, value_name = "N", default_value_t = 60_000)]
    warm_up: u64,
    /// Each core posts for the models of its own shard only.
    #[arg(long)]
    own_models: bool,
    /// Print the N instructions with the most moves, as offsets from `main`.
    #[arg(long, value_name = "N", default_value_t = 0)]
    places: usize,
    /// Only run the load, without valgrind.
    #[arg(long)]
    traced: bool,
}

/// The most cores.
const CORES: usize = 65;
/// Accesses that belong to no core.
const NONE: usize = CORES;
/// The last mark: the end.
const END: usize = CORES + 1;
/// Bytes between two marks.
const STEP: usize = 64;

static MARKS: [AtomicU8; STEP * (END + 2)] = [const { AtomicU8::new(0) }; STEP * (END + 2)];

/// From now on this core works.
fn mark(core: usize) {
    MARKS[STEP * core].store(1, Ordering::Relaxed);
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.traced { World::new(&args)?.run(&args) } else { count(&args) }
}

/// Emulated devices, in virtual time.
struct Devices {
    now_ns: AtomicU64,
}

type Running = BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>;

#[derive(Default)]
#[repr(align(128))]
struct Own(RefCell<Running>);

thread_local! {
    static CORE: Cell<usize> = const { Cell::new(0) };
    /// By core: its batches at their devices, with their ends.
    static RUNNING: Vec<Own> = (0..CORES).map(|_| Own(RefCell::new(BinaryHeap::with_capacity(1 << 16)))).collect();
}

impl Handler for Devices {
    type Event = Request;
    type RequestTable = u64;
    type Context = ();

    fn now(&self) -> Time {
        Time::from_nanos(self.now_ns.load(Ordering::Relaxed))
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, answered: &mut u64, request: Request) {
        *answered += u64::from(shard.handle_request(moment.now, &request).is_err());
    }

    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, answered: &mut u64, output: Output, (): &mut ()) {
        match output {
            Output::Dispatch { batch, device, members, expected, .. } => {
                *answered += members.len() as u64;
                shard.recycle(members);
                mark(NONE);
                let end = Reverse((moment.now + expected, device, batch));
                RUNNING.with(|running| running[CORE.get()].0.borrow_mut().push(end));
                mark(CORE.get());
            }
            Output::Drop { .. } => *answered += 1,
        }
    }
}

struct World {
    cluster: Cluster<Devices>,
    places: Vec<QueueHandle>,
}

impl World {
    fn new(args: &Args) -> Result<World> {
        let workload = workload(&args.scheduler)?;
        let shards = args.scheduler.threads;
        ensure!(shards <= workload.models, "--threads: at most one a model");
        let devices = Devices { now_ns: AtomicU64::new(0) };
        let cluster = Cluster::new(devices, vec![0; shards as usize], Setup::new(workload.devices));
        let places = (0..workload.models).map(|_| cluster.add_model(workload.options.clone())).collect();
        Ok(World { cluster, places })
    }

    fn run(&self, args: &Args) -> Result<()> {
        let local = 0u8;
        println!(
            "{:x} {:x} {:x}",
            MARKS.as_ptr().addr(),
            black_box(&raw const local).addr(),
            main as *const () as usize
        );
        std::io::stdout().flush()?;
        let shards = args.scheduler.threads as usize;
        let mut requests = workload(&args.scheduler)?.requests();
        let mut random = Stream::Arrivals.random(args.scheduler.seed + 1);
        let mut owners = args.scheduler.matchmaker_thread.then(|| Owners {
            shards: (0..shards).map(|index| self.cluster.own_shard(index)).collect(),
            matchmaker: self.cluster.own_matchmaker(),
        });
        for counted in [false, true] {
            let requests_now = if counted { args.requests } else { args.warm_up };
            if counted {
                mark(END);
            }
            for _ in 0..requests_now {
                let (at, request) = requests.draw();
                self.catch_up(at, shards, &mut owners);
                let place = self.places[request.model.0 as usize];
                let core = if args.own_models { place.shard() } else { random.random_range(0..shards) };
                self.post(core, at, place, request, &mut owners);
            }
        }
        mark(END);
        mark(NONE);
        Ok(())
    }

    /// Does everything that is due by `at`.
    fn catch_up(&self, at: Time, shards: usize, owners: &mut Option<Owners<'_>>) {
        loop {
            let next = RUNNING.with(|running| {
                let first = |core: usize| running[core].0.borrow().peek().map(|Reverse((end, ..))| (*end, core));
                (0..shards).filter_map(first).min()
            });
            let Some((end, core)) = next.filter(|(end, _)| *end <= at) else { break };
            let done = RUNNING.with(|running| running[core].0.borrow_mut().pop());
            self.set_time(end);
            let Some(Reverse((_, device, batch))) = done else { break };
            self.on(core, || match owners {
                Some(owners) => owners.shards[core].complete(device, batch),
                None => self.cluster.complete(device, batch, &mut ()),
            });
            self.turns(owners);
        }
        self.set_time(at);
        if owners.is_none() {
            // The thread of the alarm runs beside the others; its work is done on the first core.
            self.on(0, || self.cluster.ring_due());
        }
    }

    fn post(&self, core: usize, at: Time, place: QueueHandle, request: Request, owners: &mut Option<Owners<'_>>) {
        let request = Request { model: place.model, ..request };
        match owners {
            Some(owners) => {
                let core = place.shard();
                self.on(core, || owners.shards[core].handle(at, request));
            }
            None => self.on(core, || self.cluster.post(place, request, &mut ())),
        }
        self.turns(owners);
    }

    /// Lets the threads of the mailboxes look after them.
    fn turns(&self, owners: &mut Option<Owners<'_>>) {
        let Some(Owners { shards, matchmaker }) = owners else { return };
        loop {
            let cores = shards.len();
            self.on(cores, || while matchmaker.turn(TURN) > 0 {});
            let mut idle = true;
            for (core, shard) in shards.iter_mut().enumerate() {
                let due = shard.poll_timeout().is_some_and(|at| at <= self.cluster.handler().now());
                if due || !shard.is_done() {
                    idle = false;
                    self.on(core, || while shard.turn(TURN) > 0 {});
                }
            }
            if idle && matchmaker.is_done() {
                return;
            }
        }
    }

    fn on(&self, core: usize, work: impl FnOnce()) {
        CORE.set(core);
        mark(core);
        work();
        mark(NONE);
    }

    fn set_time(&self, now: Time) {
        self.cluster.handler().now_ns.store(now.as_nanos(), Ordering::Relaxed);
    }
}

/// The threads that have a mailbox for themselves.
struct Owners<'a> {
    shards: Vec<OwnShard<'a, Devices>>,
    matchmaker: OwnMatchmaker<'a, Devices>,
}

/// A cache line. `by` has a bit for each core that holds the line. `dirty`: its one holder wrote to it.
#[derive(Default)]
struct Held {
    by: u128,
    dirty: bool,
    /// Cores that held the line before.
    lost: u128,
}

#[derive(Default)]
struct Counted {
    /// By core.
    instructions: BTreeMap<usize, u64>,
    reads: u64,
    writes: u64,
    lines: HashMap<u64, Held>,
    moved: HashMap<u64, u64>,
    places: HashMap<u64, u64>,
}

/// Bytes of a cache line.
const LINE: u64 = 64;
/// The stack: what lies this far below or above a local variable.
const STACK: u64 = 4 << 20;

impl Counted {
    fn access(&mut self, core: usize, line: u64, writes: bool, instruction: u64) {
        let own = 1u128 << core;
        let held = self.lines.entry(line).or_default();
        let others = held.by & !own != 0;
        let moves = if writes { others } else { held.by & own == 0 && (held.dirty || held.lost & own != 0) };
        if writes {
            held.lost |= held.by;
            (held.by, held.dirty) = (own, true);
        } else {
            held.dirty &= held.by == own;
            held.by |= own;
        }
        if moves {
            *(if writes { &mut self.writes } else { &mut self.reads }) += 1;
            *self.moved.entry(line).or_default() += 1;
            *self.places.entry(instruction).or_default() += 1;
        }
    }
}

/// Runs the load under valgrind and counts.
fn count(args: &Args) -> Result<()> {
    let mut child = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--log-fd=2"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--traced")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("valgrind")?;
    let trace = child.stderr.take().context("no trace")?;
    let mut trace = BufReader::with_capacity(1 << 20, trace);
    let mut told = BufReader::new(child.stdout.take().context("no output")?);
    // The trace must be read meanwhile, or the load would stand still.
    let told = std::thread::spawn(move || -> Result<[u64; 3]> {
        let mut line = String::new();
        told.read_line(&mut line)?;
        let numbers = line.split_whitespace().map(|word| u64::from_str_radix(word, 16));
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>()?;
        numbers.try_into().ok().context("three numbers")
    });
    let mut line = Vec::new();
    let skipped_until = |line: &mut Vec<u8>, trace: &mut BufReader<_>| -> Result<bool> {
        line.clear();
        Ok(trace.read_until(b'\n', line)? > 0)
    };
    // Nothing is counted until the load has said where its marks are.
    while !told.is_finished() && skipped_until(&mut line, &mut trace)? {}
    let [marks, local, main] = told.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
    let (mut core, mut counts, mut instruction) = (NONE, false, 0);
    let mut counted = Counted::default();
    while skipped_until(&mut line, &mut trace)? {
        let [kind @ (b'I' | b' '), access, b' ', rest @ ..] = &line[..] else { continue };
        let Ok(rest) = std::str::from_utf8(rest) else { continue };
        let Some((at, size)) = rest.trim().split_once(',') else { continue };
        let (Ok(at), Ok(size)) = (u64::from_str_radix(at, 16), size.parse::<u64>()) else { continue };
        if *kind == b'I' {
            instruction = at;
            if counts && core < NONE {
                *counted.instructions.entry(core).or_default() += 1;
            }
            continue;
        }
        let mark = at.wrapping_sub(marks) / STEP as u64;
        if mark <= END as u64 {
            match mark as usize {
                END if counts => break,
                END => counts = true,
                to => core = to,
            }
        } else if core < NONE && at.abs_diff(local) > STACK {
            // The caches are also played during the warm-up, so that all lines are known.
            let before = (counted.reads, counted.writes);
            for line in at / LINE..=(at + size.max(1) - 1) / LINE {
                if matches!(access, b'L' | b'M') {
                    counted.access(core, line, false, instruction);
                }
                if matches!(access, b'S' | b'M') {
                    counted.access(core, line, true, instruction);
                }
            }
            if !counts && before != (counted.reads, counted.writes) {
                (counted.reads, counted.writes) = (0, 0);
                counted.moved.clear();
                counted.places.clear();
            }
        }
    }
    // The rest of the trace is not needed.
    drop(trace);
    let _ = child.kill();
    child.wait()?;
    ensure!(counts, "the load has not begun to be counted");
    let per = |n: u64| n as f64 / args.requests as f64;
    let Counted { instructions, reads, writes, moved, places, .. } = counted;
    println!("instructions a request: {:.1}", per(instructions.values().sum()));
    for (core, n) in instructions {
        println!("  on core {core}: {:.1}", per(n));
    }
    println!("lines moved a request: {:.2} (read {:.2}, written {:.2})", per(reads + writes), per(reads), per(writes));
    println!("different lines that moved: {}", moved.len());
    let mut places: Vec<(u64, u64)> = places.into_iter().map(|(at, n)| (n, at)).collect();
    places.sort_unstable_by(|a, b| b.cmp(a));
    for (n, at) in places.into_iter().take(args.places) {
        println!("{:.3} {:#x}", per(n), at.wrapping_sub(main));
    }
    Ok(())
}
