//! Stream capture: calls on a stream are recorded instead of run.
//!
//! A capture of several streams is recorded as one sequence, in the order of the calls. A GPU may
//! overlap operations that a launch here runs one after another.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::thread::{self, ThreadId};

use crate::graph::Graph;
use crate::machine::Machine;
use crate::ordering::Clock;
use crate::result::{CUresult, CUresult::*, Outcome};
use crate::stream::{NON_BLOCKING, What};

/// The calls that a capture forbids, `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The mode forbids the calls that may disturb a capture, in every thread.
    Global = 0,
    /// The mode forbids these calls in the capturing thread only.
    ThreadLocal = 1,
    /// The mode forbids only calls on the capturing stream.
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

/// The calls that may disturb a capture. The documentation names allocations, and calls that wait
/// for more than one stream. Of the other calls, event queries are known to fail.
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
    /// The stream in which the capture began, and must end.
    origin: u64,
    device: i32,
    mode: Mode,
    thread: ThreadId,
    /// The participating streams, each with the clock at the begin of its next operation.
    streams: BTreeMap<u64, Clock>,
    recorded: Vec<What>,
    pub is_invalidated: bool,
}

impl Machine {
    /// Returns the capture that a stream takes part in.
    pub fn capture_of(&self, stream: u64) -> Option<u64> {
        self.captures.iter().find(|(_, capture)| capture.streams.contains_key(&stream)).map(|(id, _)| *id)
    }

    /// Invalidates a capture.
    pub fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.is_invalidated = true;
        }
    }

    /// Invalidates the captures that the predicate selects. Fails with a code if there are any.
    fn invalidate_where(&mut self, code: CUresult, is_hit: impl Fn(&Capture) -> bool) -> Outcome {
        let hit: Vec<u64> = self.captures.iter().filter(|(_, capture)| is_hit(capture)).map(|(id, _)| *id).collect();
        hit.iter().for_each(|id| self.invalidate(*id));
        if hit.is_empty() { Ok(()) } else { Err(code) }
    }

    /// Invalidates the captures of this thread, after one of its calls has failed.
    pub fn invalidate_own(&mut self) {
        let thread = thread::current().id();
        self.captures
            .values_mut()
            .filter(|capture| capture.thread == thread)
            .for_each(|capture| capture.is_invalidated = true);
    }

    /// Rejects an operation that cannot be recorded: fails with a code, and invalidates the
    /// stream's capture, if any.
    pub fn refuse_in_capture(&mut self, stream: u64, code: CUresult) -> Outcome {
        self.invalidate_where(code, |capture| capture.streams.contains_key(&stream))
    }

    /// Rejects a call that concerns a whole device while a stream of the device captures.
    pub fn refuse_on_device(&mut self, device: i32) -> Outcome {
        self.invalidate_where(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, |capture| capture.device == device)
    }

    /// Checks that no capture forbids this call to this thread.
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

    /// Rejects a use of the null stream: it would wait for the blocking streams of its context, of
    /// which none may capture.
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

    /// Ends a capture and returns the recorded graph.
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

    /// Returns the capture if it can still record operations.
    fn valid_capture(&mut self, capture: u64) -> Outcome<&mut Capture> {
        match self.captures.get_mut(&capture) {
            Some(capture) if !capture.is_invalidated => Ok(capture),
            Some(_) => Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            None => Err(CUDA_ERROR_CAPTURED_EVENT),
        }
    }

    /// Records an operation of a stream.
    pub fn capture(&mut self, capture: u64, stream: u64, what: What) -> Outcome {
        let capture = self.valid_capture(capture)?;
        capture.recorded.push(what);
        let number = capture.recorded.len() as u64;
        capture.streams.entry(stream).or_default().reach(stream, number);
        Ok(())
    }

    /// Records an allocation; the graph owns the memory.
    pub fn capture_allocation(&mut self, capture: u64, stream: u64, device: i32, len: u64) -> Outcome<u64> {
        self.valid_capture(capture)?;
        let start = self.allocate_for_graph(device, len).inspect_err(|_| self.invalidate(capture))?;
        self.capture(capture, stream, What::Allocate { start }).map(|()| start)
    }

    /// Records a free. As documented, the graph must own the memory, and frees it once.
    pub fn capture_free(&mut self, capture: u64, stream: u64, start: u64) -> Outcome {
        let recorded = &self.valid_capture(capture)?.recorded;
        let is_freed = recorded.iter().any(|what| matches!(what, What::Free { start: at } if *at == start));
        if is_freed || !allocations(recorded).any(|at| at == start) {
            return self.refuse_in_capture(stream, CUDA_ERROR_INVALID_VALUE);
        }
        self.capture(capture, stream, What::Free { start })
    }

    /// Records an event in a capture.
    pub fn capture_event(&mut self, capture: u64, stream: u64, event: u64) -> Outcome {
        let order = self.valid_capture(capture)?.streams.get(&stream).cloned().unwrap_or_default();
        let event = self.event(event)?;
        (event.record, event.time, event.captured) = (None, None, Some((capture, order)));
        Ok(())
    }

    /// Makes a stream wait for an event. Returns true if both are in one capture, which records the
    /// wait.
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

    /// Rejects the host's questions about an event that was last recorded in a capture: there is no
    /// answer.
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

/// Returns the memory that recorded operations allocate.
pub fn allocations(recorded: &[What]) -> impl Iterator<Item = u64> {
    recorded.iter().filter_map(|what| match what {
        What::Allocate { start } => Some(*start),
        _ => None,
    })
}
