//! Stream capture: what is given to a stream is written down instead of run.
//!
//! A capture that several streams take part in is written down as one sequence, in the order of the calls: a GPU may overlap what a
//! launch here runs one after another.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::thread::{self, ThreadId};

use crate::graph::Graph;
use crate::machine::Machine;
use crate::ordering::Clock;
use crate::result::{CUresult, CUresult::*, Outcome};
use crate::stream::{NON_BLOCKING, What};

/// Which calls a capture forbids, `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Calls that may disturb a capture, of every thread.
    Global = 0,
    /// Those of the thread that captures.
    ThreadLocal = 1,
    /// None but those that have to do with the stream.
    Relaxed = 2,
}

impl Mode {
    pub fn from_number(number: c_uint) -> Outcome<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// The calls that may disturb a capture: the documentation names allocations, and what waits for more than one stream. Of those that it does not name,
/// event queries are known to fail.
const UNSAFE: [&str; 16] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemAllocHost_v2",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpy",
    "cuMemsetD8_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
];

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    /// The stream in which it began, and has to end.
    origin: u64,
    device: i32,
    mode: Mode,
    thread: ThreadId,
    /// The streams that take part, and what is over when the next operation of each begins.
    streams: BTreeMap<u64, Clock>,
    recorded: Vec<What>,
    pub is_invalidated: bool,
}

impl Machine {
    /// The capture that a stream takes part in.
    pub fn capture_of(&self, stream: u64) -> Option<u64> {
        self.captures.iter().find(|(_, capture)| capture.streams.contains_key(&stream)).map(|(id, _)| *id)
    }

    /// A capture comes to nothing.
    pub fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.is_invalidated = true;
        }
    }

    /// Invalidates the captures of which this is true; fails with a code if there are any.
    fn invalidate_where(&mut self, code: CUresult, is_hit: impl Fn(&Capture) -> bool) -> Outcome {
        let hit: Vec<u64> = self.captures.iter().filter(|(_, capture)| is_hit(capture)).map(|(id, _)| *id).collect();
        hit.iter().for_each(|id| self.invalidate(*id));
        if hit.is_empty() { Ok(()) } else { Err(code) }
    }

    /// A call of this thread has failed, and with it what the thread captures.
    pub fn invalidate_own(&mut self) {
        let thread = thread::current().id();
        self.captures
            .values_mut()
            .filter(|capture| capture.thread == thread)
            .for_each(|capture| capture.is_invalidated = true);
    }

    /// For what cannot be recorded: fails with a code, and so does the capture, if the stream takes part in one.
    pub fn refuse_in_capture(&mut self, stream: u64, code: CUresult) -> Outcome {
        self.invalidate_where(code, |capture| capture.streams.contains_key(&stream))
    }

    /// For calls that concern a whole device.
    pub fn refuse_on_device(&mut self, device: i32) -> Outcome {
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |capture| capture.device == device)
    }

    /// For calls of any kind: whether a capture forbids them to this thread.
    pub fn refuse_unsafe(&mut self, call: &str) -> Outcome {
        if self.captures.is_empty() || !UNSAFE.contains(&call) {
            return Ok(());
        }
        let thread = thread::current().id();
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |capture| match capture.mode {
            Mode::Global => true,
            Mode::ThreadLocal => capture.thread == thread,
            Mode::Relaxed => false,
        })
    }

    /// For use of the null stream: it would wait for the blocking streams of its context, of which none may capture.
    pub fn refuse_null_stream(&mut self, stream: u64) -> Outcome {
        if self.captures.is_empty() {
            return Ok(());
        }
        let Some(context) = self.streams.get(&stream).filter(|stream| stream.own).map(|stream| stream.context) else {
            return Ok(());
        };
        let is_blocking =
            |stream: &crate::stream::Stream| stream.context == context && stream.flags & NON_BLOCKING == 0;
        let blocking: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| is_blocking(stream)).map(|(handle, _)| *handle).collect();
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, |capture| {
            blocking.iter().any(|stream| capture.streams.contains_key(stream))
        })
    }

    pub fn begin_capture(&mut self, stream: u64, mode: Mode) -> Outcome {
        let Some((device, own)) = self.streams.get(&stream).map(|stream| (stream.device, stream.own)) else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        if own {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        self.refuse_in_capture(stream, CUDA_ERROR_ILLEGAL_STATE)?;
        let streams = BTreeMap::from([(stream, Clock::default())]);
        let (thread, recorded) = (thread::current().id(), Vec::new());
        let id = self.handle();
        let capture = Capture { origin: stream, device, mode, thread, streams, recorded, is_invalidated: false };
        self.captures.insert(id, capture);
        Ok(())
    }

    /// Ends a capture and gives what was recorded.
    pub fn end_capture(&mut self, stream: u64) -> Outcome<Graph> {
        let id = self.capture_of(stream).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let thread = thread::current().id();
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, |capture| {
            capture.streams.contains_key(&stream) && capture.origin != stream
        })?;
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, |capture| {
            capture.origin == stream && capture.mode != Mode::Relaxed && capture.thread != thread
        })?;
        let capture = self.captures.remove(&id).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let is_joined = |(other, clock): (&u64, &Clock)| {
            capture.streams.get(&stream).is_some_and(|known| clock.at(*other) <= known.at(*other))
        };
        let code = match capture.is_invalidated {
            true => CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            false if !capture.streams.iter().all(is_joined) => CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            false => return Ok(self.graph_of(capture.device, capture.recorded)),
        };
        allocations(&capture.recorded).for_each(|start| self.leave_of_graph(start));
        Err(code)
    }

    /// The capture, if something may still be recorded in it.
    fn valid_capture(&mut self, capture: u64) -> Outcome<&mut Capture> {
        match self.captures.get_mut(&capture) {
            Some(capture) if !capture.is_invalidated => Ok(capture),
            Some(_) => Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            None => Err(CUDA_ERROR_CAPTURED_EVENT),
        }
    }

    /// Writes an operation of a stream down.
    pub fn capture(&mut self, capture: u64, stream: u64, what: What) -> Outcome {
        let capture = self.valid_capture(capture)?;
        capture.recorded.push(what);
        let number = capture.recorded.len() as u64;
        capture.streams.entry(stream).or_default().reach(stream, number);
        Ok(())
    }

    /// Writes an allocation down; the memory is the graph's.
    pub fn capture_allocation(&mut self, capture: u64, stream: u64, device: i32, len: u64) -> Outcome<u64> {
        self.valid_capture(capture)?;
        let start = self.allocate_for_graph(device, len).inspect_err(|_| self.invalidate(capture))?;
        self.capture(capture, stream, What::Allocate { start }).map(|()| start)
    }

    /// Writes down that memory is freed. As documented, it has to be the graph's, and is freed there once.
    pub fn capture_free(&mut self, capture: u64, stream: u64, start: u64) -> Outcome {
        let recorded = &self.valid_capture(capture)?.recorded;
        let is_freed = recorded.iter().any(|what| matches!(what, What::Free { start: at } if *at == start));
        if is_freed || !allocations(recorded).any(|at| at == start) {
            return self.refuse_in_capture(stream, CUDA_ERROR_INVALID_VALUE);
        }
        self.capture(capture, stream, What::Free { start })
    }

    /// An event is recorded in a capture.
    pub fn capture_event(&mut self, capture: u64, stream: u64, event: u64) -> Outcome {
        let order = self.valid_capture(capture)?.streams.get(&stream).cloned().unwrap_or_default();
        let event = self.event(event)?;
        (event.record, event.time, event.captured) = (None, None, Some((capture, order)));
        Ok(())
    }

    /// A stream is told to wait for an event: whether that is within a capture, and so done.
    pub fn capture_wait(&mut self, stream: u64, event: u64) -> Outcome<bool> {
        let captured = self.event(event)?.captured.clone();
        match (self.capture_of(stream), captured) {
            (None, None) => Ok(false),
            (Some(here), None) => {
                self.invalidate(here);
                Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
            }
            (Some(here), Some((there, _))) if here != there => {
                self.invalidate(here);
                self.invalidate(there);
                Err(CUDA_ERROR_STREAM_CAPTURE_MERGE)
            }
            (_, Some((capture, order))) => {
                if self.streams.get(&stream).is_some_and(|stream| stream.own) {
                    self.invalidate(capture);
                    return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
                }
                self.valid_capture(capture)?.streams.entry(stream).or_default().join(&order);
                Ok(true)
            }
        }
    }

    /// For what the host asks of an event: it has no answer where it was recorded in a capture last.
    pub fn refuse_captured(&mut self, event: u64) -> Outcome {
        match self.event(event)?.captured {
            Some((capture, _)) => {
                self.invalidate(capture);
                Err(CUDA_ERROR_CAPTURED_EVENT)
            }
            None => Ok(()),
        }
    }
}

/// The memory that recorded operations allocate.
pub fn allocations(recorded: &[What]) -> impl Iterator<Item = u64> {
    recorded.iter().filter_map(|what| match what {
        What::Allocate { start } => Some(*start),
        _ => None,
    })
}
