//! Runs enqueued work when a thread waits for it.

use crate::address::{self, FRESH};
use crate::machine::CHANGED;
use crate::ordering::Clock;
use crate::result::{CUresult, CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{Operation, Source, What};
use crate::trace::{Kind, Work};

/// The most operations in the trace.
const TRACE: usize = 1 << 20;
/// A download with this many consecutive fresh bytes, counted in steps of as many, reads unwritten
/// memory.
const SUSPICIOUS: usize = 16;

impl Session {
    /// Runs all operations that must run before a stream reaches an operation. Then moves the
    /// host's time to the end of that operation. `order` is the clock behind the operation.
    pub fn drive(&mut self, stream: u64, number: u64, order: &Clock) -> Outcome {
        let device = self.streams.get(&stream).map(|stream| stream.device);
        let mut targets = vec![(stream, number)];
        while let Some((at, wanted)) = targets.last().copied() {
            if self.is_done(at, wanted) {
                targets.pop();
            } else if self.random.is_some() || self.streams.get(&at).is_none_or(|stream| stream.busy) {
                self.wait();
            } else if let Some(blocker) = self.blocker(at) {
                targets.push(blocker);
            } else {
                self.step(at);
            }
        }
        let end = self.streams.get(&stream).map_or(0, |stream| stream.end_of(number));
        self.now = self.now.max(end);
        self.host_knows(order);
        match device {
            Some(device) => self.device(device)?.failed.map_or(Ok(()), |(code, _)| Err(code)),
            None => Ok(()),
        }
    }

    /// Runs all operations of a device.
    pub fn drive_device(&mut self, device: i32) -> Outcome {
        let targets: Vec<(u64, u64, Clock)> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.device == device)
            .map(|(handle, stream)| (*handle, stream.last, stream.order.clone()))
            .collect();
        targets.into_iter().try_for_each(|(stream, number, order)| self.drive(stream, number, &order))
    }

    /// Returns the operation that the next operation of a stream waits for, if it has not run.
    pub fn blocker(&self, stream: u64) -> Option<(u64, u64)> {
        match self.streams.get(&stream)?.queue.front()?.what {
            What::Wait { stream, number } if !self.is_done(stream, number) => Some((stream, number)),
            _ => None,
        }
    }

    /// Runs the next operation of a stream. The stream must not be busy, and the operation must not
    /// be blocked.
    pub fn step(&mut self, handle: u64) {
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        let Some(operation) = stream.queue.pop_front() else { return };
        stream.busy = true;
        let (device, context) = (stream.device, stream.context);
        let mut start = stream.clock.max(operation.enqueued);
        if let What::Wait { stream, number } = operation.what {
            start = start.max(self.streams.get(&stream).map_or(0, |stream| stream.end_of(number)));
        }
        let counted = !matches!(
            operation.what,
            What::Wait { .. } | What::Record { .. } | What::Allocate { .. } | What::Touch { .. }
        );
        let fault = if counted { self.faults.work(handle) } else { Ok(()) };
        let number = operation.number;
        let work = fault.and_then(|()| self.execute(handle, operation, start));
        let end = match &work {
            Ok(Some(work)) => work.end,
            _ => start,
        };
        if let Ok(Some(work)) = work
            && self.trace.len() < TRACE
        {
            let priority = self.streams.get(&handle).map_or(0, |stream| stream.priority);
            self.trace.push(Work { stream: handle, context, priority, ..work });
        }
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.ended(number, end);
        }
        if let Err(code) = work {
            self.fail(device, code, false);
        }
        CHANGED.notify_all();
    }

    /// Fails everything on a device from now on; enqueued operations never run.
    pub fn fail(&mut self, device: i32, code: CUresult, lost: bool) {
        if let Ok(state) = self.device(device) {
            state.failed = Some((code, lost));
        }
        self.forget_accesses(device);
        for stream in self.streams.values_mut().filter(|stream| stream.device == device) {
            stream.queue.clear();
            // The operation of a busy stream ends by itself, and no operation is left behind it.
            stream.done = stream.last;
        }
        CHANGED.notify_all();
    }

    fn execute(&mut self, stream: u64, operation: Operation, start: u64) -> Outcome<Option<Work>> {
        let start = match operation.what {
            What::Kernel { .. } if !operation.in_graph => start + self.launch_time,
            _ => start,
        };
        let work = |kind, to, from, len, duration| {
            Ok(Some(Work { stream: 0, context: 0, to, from, len, start, end: start + duration, kind, priority: 0 }))
        };
        let copy_time = |len: u64| 1_000 + len / 25;
        match operation.what {
            What::Wait { .. } => Ok(None),
            What::Record { event } => {
                if let Some(event) = self.events.get_mut(&event)
                    && event.record == Some((stream, operation.number))
                {
                    event.time = Some(start);
                }
                Ok(None)
            }
            What::Upload { to, from, len } => {
                let to_view = self.reach(to, len, "an upload writes")?;
                let from = match &from {
                    Source::Pinned(from) => self.reach_host(*from, len, "an upload reads")? as *const u8,
                    Source::Staged(bytes) => bytes.as_ptr(),
                };
                // SAFETY: both ranges were checked just now under the lock, and lie in different
                // mappings.
                unsafe { std::ptr::copy(from, to_view, len as usize) };
                work(Kind::Upload, to, from as u64, len, copy_time(len))
            }
            What::Download { to, pinned, from, len } => {
                let from_view = self.reach(from, len, "a download reads")?;
                let to_view = if pinned { self.reach_host(to, len, "a download writes")? } else { to as *mut u8 };
                // SAFETY: the device range was checked under the lock; kernels in other streams may
                // write it meanwhile, through raw pointers too, and then the program has a race
                // that the copied bytes show.
                let bytes = unsafe { std::slice::from_raw_parts(from_view, len as usize) };
                let fresh = bytes.chunks_exact(SUSPICIOUS).any(|part| part == [FRESH; SUSPICIOUS]);
                if fresh {
                    self.mistake(format!("a download from {from:#x} reads memory that nobody has written"));
                }
                // SAFETY: the host range is pinned memory that was checked, or pageable memory
                // whose owner waits inside the call.
                unsafe { std::ptr::copy(from_view, to_view, len as usize) };
                work(Kind::Download, to as u64, from, len, copy_time(len))
            }
            What::Copy { to, from, len } => {
                let to_view = self.reach(to, len, "a copy writes")?;
                let from_view = self.reach(from, len, "a copy reads")?;
                // SAFETY: both ranges were checked just now under the lock; they may overlap, which
                // `copy` allows.
                unsafe { std::ptr::copy(from_view, to_view, len as usize) };
                work(Kind::Copy, to, from, len, copy_time(len))
            }
            What::Set { to, value, len } => {
                let to_view = self.reach(to, len, "a fill writes")?;
                // SAFETY: the range was checked just now under the lock.
                unsafe { std::ptr::write_bytes(to_view, value, len as usize) };
                work(Kind::Set, to, 0, len, 1_000 + len / 1_000)
            }
            What::Kernel { function, data } => {
                let spent = self.play(|| {
                    if let Some(function) = function {
                        // SAFETY: the enqueuing program has promised that any thread may call the
                        // function with this argument.
                        unsafe { function(data) };
                    }
                });
                work(Kind::Kernel, data as u64, 0, 0, spent)
            }
            What::Touch { at, len, .. } => self.reach(at, len, "a kernel touches").map(|_| None),
            What::Allocate { start } => {
                if let Some(region) = self.memory.regions.get_mut(&start) {
                    region.coming = false;
                    if region.of_graph.is_some() {
                        // As documented, the contents from the last launch are not kept.
                        let len = region.len as usize;
                        // SAFETY: the region is mapped, and `reach` ensures that no operation uses
                        // it before this one.
                        unsafe { std::ptr::write_bytes(address::view(start), FRESH, len) };
                    }
                }
                Ok(None)
            }
            What::Free { start: address } => {
                self.free(address);
                work(Kind::Free, address, 0, 0, 0)
            }
        }
    }

    /// Returns the view of device memory, if all of it may be used.
    fn reach(&mut self, at: u64, len: u64, what: &str) -> Outcome<*mut u8> {
        if !self.memory.is_usable(at, len, false) {
            let early = self.memory.is_usable(at, len, true);
            let why = if early { "not ordered after its cuMemAllocAsync" } else { "no longer memory" };
            return self.wrong(CUDA_ERROR_ILLEGAL_ADDRESS, format!("{what} {len} bytes at {at:#x}, {why}"));
        }
        Ok(address::view(at))
    }

    /// Returns a pointer to pinned host memory, if it is still pinned.
    fn reach_host(&mut self, at: usize, len: u64, what: &str) -> Outcome<*mut u8> {
        if self.host.is_pinned(at, len as usize) != Ok(true) {
            let what = format!("{what} {len} bytes of host memory at {at:#x}, no longer pinned");
            return self.wrong(CUDA_ERROR_ILLEGAL_ADDRESS, what);
        }
        Ok(at as *mut u8)
    }
}
