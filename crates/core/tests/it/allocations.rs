//! The scheduler allocates nothing for a request once its tables have grown.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;

use downbeat_core::cluster::*;
use downbeat_core::journal::{Form, Journal, replay, show};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};

/// The system's allocator, counting the calls of this thread and their bytes.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator as it came; the counter allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as u64));
        // SAFETY: our caller keeps the promises that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + size as u64));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const MODELS: u32 = 3;

/// Serves `requests` requests, 0.4 ms apart, starting with number `first`.
fn serve(
    scheduler: &mut Journal<Scheduler>,
    log: &mut Vec<u8>,
    running: &mut VecDeque<(Time, DeviceId, BatchId)>,
    first: u64,
    requests: u64,
) {
    for n in first..first + requests {
        scheduler.take_log(log);
        log.clear();
        let arrival = Time::ZERO + Duration::from_micros(400 * n);
        loop {
            let completion = running.iter().map(|(at, ..)| *at).min().unwrap_or(Time::MAX);
            let timeout = scheduler.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at);
            let now = arrival.min(completion).min(timeout);
            let arrived = now == arrival;
            if completion == now {
                let at = running.iter().position(|(at, ..)| *at == now).unwrap();
                let (_, device, batch) = running.remove(at).unwrap();
                scheduler.handle_completion(now, device, batch);
            } else if arrived {
                let deadline = now + Duration::from_millis(10 + n % 7);
                let queue_expiry = if n % 5 == 0 { now + Duration::from_millis(6) } else { Time::MAX };
                let model = ModelId(n as u32 % MODELS);
                let size = 1 + (n % 11 == 0) as u32;
                let _ = scheduler
                    .handle_request(now, Request { id: RequestId(n), model, deadline, queue_expiry, level: 0, size });
            } else {
                scheduler.handle_timeout(now);
            }
            while let Some(output) = scheduler.poll_output() {
                if let Output::Dispatch { batch, device, members, expected, .. } = output {
                    running.push_back((now + expected, device, batch));
                    scheduler.recycle(members);
                }
            }
            if arrived && completion != now {
                break;
            }
        }
    }
}

#[test]
fn a_settled_scheduler_allocates_nothing() {
    allocates_nothing(Journal::off);
}

/// The decision log takes no allocation either, if the caller takes written bytes away as they
/// come.
#[test]
fn a_settled_journal_allocates_nothing() {
    allocates_nothing(Journal::on);
}

fn allocates_nothing(journal: fn(Scheduler) -> Journal<Scheduler>) {
    let mut scheduler = Scheduler::new();
    for _ in 0..2 {
        scheduler.add_device(Time::ZERO, DeviceKind(0));
    }
    let dispatches = [
        DispatchPolicy::Deferred,
        DispatchPolicy::Eager,
        DispatchPolicy::Timeout { delay: Duration::from_millis(2), preferred: vec![2, 4] },
    ];
    for dispatch in dispatches {
        let (alpha, beta) = (Duration::from_micros(200), Duration::from_micros(2_000));
        scheduler.add_model(
            Time::ZERO,
            ModelOptions {
                profiles: LatencyProfile::linear(alpha, beta, 8).unwrap().into(),
                max_batch: 8,
                drop: DropPolicy::WindowDrop,
                dispatch,
                max_in_flight: u32::MAX,
                shares_limit: None,
                max_wait: Duration::MAX,
                levels: Vec::new(),
            },
        );
    }
    let mut scheduler = journal(scheduler);
    let (mut log, mut running) = (Vec::with_capacity(1 << 16), VecDeque::new());
    serve(&mut scheduler, &mut log, &mut running, 0, 5_000);
    let (batches, before) = (scheduler.machine().stats().batches, ALLOCATIONS.with(Cell::get));
    serve(&mut scheduler, &mut log, &mut running, 5_000, 20_000);
    let allocations = ALLOCATIONS.with(Cell::get) - before;
    let batches = scheduler.machine().stats().batches - batches;
    assert!(batches > 2_000, "the load is real: {batches} batches");
    assert_eq!(allocations, 0, "allocations for 20,000 requests in {batches} batches");
}

/// Any program may write a file that looks like a log. A length that is larger than the file must
/// not make the reader allocate that much.
#[test]
fn a_length_in_a_log_that_is_not_there_takes_no_memory() {
    // 2^60, as postcard writes it.
    let huge = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10];
    let (scheduler, device) = (b"DBLOG\x05\0", b"DBLOG\x05\x03\0");
    let cases: [(&[u8], &[u8]); 6] = [
        // A dispatch with so many members (2^60, as in all cases).
        (scheduler, &[4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
        // A model added to a scheduler, the same profile for all kinds of devices, with so many
        // batch sizes.
        (scheduler, &[0x40, 0, 4, 0, 0]),
        // A layout of so many partitions.
        (device, &[0x40, 0, 0]),
        // A model that comes to a device, with a name of so many bytes.
        (device, &[0x40, 0, 1, 0, 1]),
        // A refusal of so many bytes.
        (device, &[0x41]),
        // A group of so many launches.
        (device, &[0x42, 2]),
    ];
    for (number, (header, entry)) in cases.into_iter().enumerate() {
        // The head of a block that is longer than the file.
        let block = [[0x43, 0xff, 0xff, 0xff, 0xff].as_slice(), &[0; 16]].concat();
        let log = [header, &block, entry, &huge, &[1; 40]].concat();
        let before = BYTES.get();
        assert!(replay(&log).is_ok(), "it is taken for one that was cut off: case {number}");
        assert_eq!(show(&log, Form::Text).unwrap().count(), 1, "the head: case {number}");
        let taken = BYTES.get() - before;
        assert!(taken < 4 << 20, "case {number}: {taken} bytes");
    }
}
