//! Between launches: the time that a thread loses by waiting for one launch before it enqueues the
//! next, and the time of inputs on their way to the device.

use std::time::Instant;

use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use cudarc::driver::{DriverError, result};
use downbeat_core::device::RingRun;
use downbeat_engine::{Cut, Engine, Share, ring_memory};
use downbeat_engine_ort::cuda::{Device, Stream};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::kernels::{Kernel, Places};
use crate::row::{Row, quantile};
use crate::subject::{From, Subject, span};

const STEP: &str = "launches";
const LAUNCHES: usize = 200;
/// The number of slots to copy.
const SLOTS: u32 = 32;

pub fn measure(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let device = Device::open(0)?;
    match Kernel::load(&device) {
        // Some 20 us, 0.2 and 2 ms.
        Ok(kernel) => [40_000, 400_000, 4_000_000].iter().try_for_each(|ticks| gaps(&device, &kernel, *ticks))?,
        Err(error) => Row::new(STEP, "", "gap between launches").note(error.to_string()).print(),
    }
    for name in &arguments.models {
        let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, 1)?;
        for check in [ahead, ring] {
            if let Err(error) = check(&subject, name) {
                Row::new(STEP, name, "not measured").note(error.to_string()).print();
            }
        }
    }
    Ok(())
}

/// The manner in which a thread waits for a launch.
#[derive(Clone, Copy, PartialEq)]
enum Waits {
    Awake,
    Asleep,
    /// The thread waits awake, for the launch before the one that it has just enqueued.
    Ahead,
}

/// A mark in a stream.
struct Mark(sys::CUevent);

impl Mark {
    fn new(waits: Waits) -> Result<Mark, DriverError> {
        let asleep = if waits == Waits::Asleep {
            CUevent_flags::CU_EVENT_BLOCKING_SYNC
        } else {
            CUevent_flags::CU_EVENT_DEFAULT
        };
        Ok(Mark(result::event::create(asleep)?))
    }

    fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.0, stream.raw()) }
    }

    fn wait(&self, waits: Waits) -> Result<(), DriverError> {
        if waits == Waits::Asleep {
            // SAFETY: it is alive.
            return unsafe { result::event::synchronize(self.0) };
        }
        loop {
            // SAFETY: it is alive.
            match unsafe { result::event::query(self.0) } {
                Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => std::hint::spin_loop(),
                answer => return answer,
            }
        }
    }

    /// Milliseconds from an earlier event, after both are over.
    fn since(&self, other: &Mark) -> Result<f64, DriverError> {
        // SAFETY: both are alive.
        unsafe { result::event::elapsed(other.0, self.0) }.map(f64::from)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Measures the time between the end of a kernel and the begin of the next kernel.
fn gaps(device: &std::sync::Arc<Device>, kernel: &Kernel, ticks: u64) -> Outcome<()> {
    let (stream, place) = (Stream::new(device)?, Places::new(1)?);
    for (how, waits) in
        [("waiting awake", Waits::Awake), ("waiting asleep", Waits::Asleep), ("enqueued one ahead", Waits::Ahead)]
    {
        let marks = |_| Ok((Mark::new(waits)?, Mark::new(waits)?));
        let marks = (0..LAUNCHES).map(marks).collect::<Result<Vec<_>, DriverError>>()?;
        for (index, (begin, end)) in marks.iter().enumerate() {
            begin.record(&stream)?;
            kernel.stay(&stream, &place, ticks)?;
            end.record(&stream)?;
            match waits {
                Waits::Ahead => marks.get(index.wrapping_sub(1)).map_or(Ok(()), |(_, last)| last.wait(waits))?,
                _ => end.wait(waits)?,
            }
        }
        stream.finish()?;
        let took = marks.iter().map(|(begin, end)| end.since(begin)).collect::<Result<Vec<_>, _>>();
        let gaps = marks.windows(2).map(|pair| pair[1].0.since(&pair[0].1)).collect::<Result<Vec<_>, _>>();
        let (mut took, mut gaps) = (took?, gaps?);
        let note =
            format!("gap on the device between kernels of {:.3} ms", quantile(&mut took, 0.5).unwrap_or(f64::NAN));
        let (ms, p99_ms) = (quantile(&mut gaps, 0.5), quantile(&mut gaps, 0.99));
        Row { ms, p99_ms, ..Row::new(STEP, "", how) }.note(note).print();
    }
    Ok(())
}

/// Launches of a model one at a time, and two under way.
fn ahead(subject: &Subject, name: &str) -> Outcome<()> {
    let mut lane = subject.lane(Share::Whole)?;
    let segments = subject.model.segments();
    let mut spans = Vec::new();
    for run in 0..20 {
        subject.run(&mut *lane, 1, From::Ring)?;
        spans.extend((run > 4).then(|| span(&*lane)));
    }
    let on_device = quantile(&mut spans, 0.5).unwrap_or(f64::NAN);
    let begin = Instant::now();
    for _ in 0..LAUNCHES {
        subject.run(&mut *lane, 1, From::Ring)?;
    }
    let apart = begin.elapsed().as_secs_f64() * 1e3 / LAUNCHES as f64;
    let begin = Instant::now();
    let mut last = lane.enqueue(0..segments, subject.batch(1, From::Ring)?)?;
    for _ in 1..LAUNCHES {
        let next = lane.enqueue(0..segments, subject.batch(1, From::Ring)?)?;
        std::mem::replace(&mut last, next).wait()?;
    }
    last.wait()?;
    let ahead = begin.elapsed().as_secs_f64() * 1e3 / LAUNCHES as f64;
    for (how, ms) in [("one at a time", apart), ("two under way", ahead)] {
        let note =
            format!("a launch; {on_device:.3} ms of it on the device, {:.1} us beside it", (ms - on_device) * 1e3);
        Row { ms: Some(ms), batch: Some(1), per_s: Some(1e3 / ms), ..Row::new(STEP, name, how) }.note(note).print();
    }
    Ok(())
}

/// Measures the copy of one slot of an input ring, and one copy of all slots.
fn ring(subject: &Subject, name: &str) -> Outcome<()> {
    let bytes = subject.largest_item();
    let slots = ring_memory::slots(SLOTS, &[bytes])?;
    let ring = subject.model.ring_memory(0, slots, bytes, SLOTS)?;
    let mut enqueued = Vec::new();
    for slot in (0..SLOTS).cycle().take(10 * SLOTS as usize) {
        let mut writer = ring.write(RingRun { first: slot, count: 1 }).ok_or("a slot is in use")?;
        writer.fill(1);
        let begin = Instant::now();
        writer.finish()?;
        enqueued.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    let kib = bytes as f64 / 1024.0;
    let row = Row {
        ms: quantile(&mut enqueued, 0.5),
        p99_ms: quantile(&mut enqueued, 0.99),
        ..Row::new(STEP, name, "ring, a slot")
    };
    row.note(format!("{kib:.1} KiB: the caller's time to enqueue its copy, which it does not wait for")).print();
    let (device, stream) = (Device::open(0)?, Stream::new(&Device::open(0)?)?);
    device.free_memory()?;
    let all = bytes * SLOTS as usize;
    // SAFETY: freed below; copies stay within the allocated size, and have ended before the memory
    // is freed.
    unsafe {
        let (to, from) = (result::malloc_sync(all)?, result::malloc_host(all, 0)?.cast::<u8>());
        from.write_bytes(1, all);
        let host = std::slice::from_raw_parts(from, all);
        let marks = (0..SLOTS).map(|_| Mark::new(Waits::Awake)).collect::<Result<Vec<_>, _>>()?;
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..20 {
            let begin = Instant::now();
            for ((slot, mark), at) in host.chunks_exact(bytes).zip(&marks).zip((to..).step_by(bytes)) {
                result::memcpy_htod_async(at, slot, stream.raw())?;
                mark.record(&stream)?;
            }
            stream.finish()?;
            times[0].push(begin.elapsed().as_secs_f64() * 1e3 / f64::from(SLOTS));
            let begin = Instant::now();
            result::memcpy_htod_async(to, host, stream.raw())?;
            stream.finish()?;
            times[1].push(begin.elapsed().as_secs_f64() * 1e3 / f64::from(SLOTS));
        }
        result::free_sync(to)?;
        result::free_host(from.cast())?;
        for (what, times) in ["a copy and a mark for each", "one copy of all"].iter().zip(&mut times) {
            let row = Row { ms: quantile(times, 0.5), p99_ms: quantile(times, 0.99), ..Row::new(STEP, name, *what) };
            row.note(format!("{SLOTS} slots of {kib:.1} KiB until all are there, a slot")).print();
        }
    }
    Ok(())
}
