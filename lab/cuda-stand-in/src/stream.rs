//! Streams and events: the queued operations, and the progress of each stream.

use std::collections::VecDeque;
use std::ffi::c_void;

use cudarc::driver::sys::CUhostFn;

use crate::context;
use crate::machine::{CHANGED, Machine};
use crate::ordering::Clock;
use crate::result::{CUresult::*, Outcome};

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const NO_TIMING: u32 = 2;
/// The number of recent ends of operations that a stream remembers; earlier ends count as long ago.
const ENDS: usize = 1024;

/// The source of an upload.
#[derive(Clone, Debug)]
pub enum Source {
    /// Pinned memory, read when the copy runs.
    Pinned(usize),
    /// The contents of pageable memory at the call.
    Staged(Vec<u8>),
}

/// The effect of an operation.
#[derive(Clone, Debug)]
pub enum What {
    Upload {
        to: u64,
        from: Source,
        len: u64,
    },
    Download {
        to: usize,
        pinned: bool,
        from: u64,
        len: u64,
    },
    Copy {
        to: u64,
        from: u64,
        len: u64,
    },
    Set {
        to: u64,
        value: u8,
        len: u64,
    },
    /// Waits until a stream has run its operations up to a number.
    Wait {
        stream: u64,
        number: u64,
    },
    Record {
        event: u64,
    },
    Kernel {
        function: CUhostFn,
        data: *mut c_void,
    },
    /// Makes the memory of a `cuMemAllocAsync` usable from here on.
    Allocate {
        start: u64,
    },
    Free {
        start: u64,
    },
    /// Declares memory that the next kernel uses.
    Touch {
        at: u64,
        len: u64,
        writes: bool,
    },
}

// SAFETY: the only field that is not `Send` is the argument of a host function, which the driver's
// contract lets any thread pass on.
unsafe impl Send for What {}

/// An operation in a stream.
#[derive(Debug)]
pub struct Operation {
    /// Its number in the stream, from 1.
    pub number: u64,
    /// The host's virtual time when it was enqueued, nanoseconds.
    pub enqueued: u64,
    /// True if the operation came with a graph.
    pub in_graph: bool,
    pub what: What,
}

/// A stream, perhaps a destroyed one: its queued operations still run.
#[derive(Debug, Default)]
pub struct Stream {
    pub device: i32,
    pub context: u64,
    pub flags: u32,
    pub priority: i32,
    /// True if it is a context's null stream.
    pub own: bool,
    pub destroyed: bool,
    pub queue: VecDeque<Operation>,
    /// The number of the last enqueued operation.
    pub last: u64,
    /// The number of the last operation that has run.
    pub done: u64,
    /// True while a thread runs one of its operations.
    pub busy: bool,
    /// The virtual time at which its last run operation ended, in nanoseconds.
    pub clock: u64,
    /// The clock at the begin of an operation that is enqueued now.
    pub order: Clock,
    ends: VecDeque<(u64, u64)>,
}

impl Stream {
    pub fn new(device: i32, context: u64, flags: u32, priority: i32, own: bool) -> Self {
        Self { device, context, flags, priority, own, ..Self::default() }
    }

    /// Records the end of an operation.
    pub fn ended(&mut self, number: u64, end: u64) {
        // A device failure in the meantime has declared all operations done.
        (self.done, self.clock, self.busy) = (number.max(self.done), end, false);
        self.ends.push_back((number, end));
        if self.ends.len() > ENDS {
            self.ends.pop_front();
        }
    }

    /// Returns the end of an operation, in virtual nanoseconds.
    pub fn end_of(&self, number: u64) -> u64 {
        let index = self.ends.partition_point(|(at, _)| *at < number);
        self.ends.get(index).map_or(0, |(_, end)| *end)
    }
}

/// A living event.
#[derive(Debug)]
pub struct Event {
    pub device: i32,
    pub flags: u32,
    /// The stream and the number of the operation that the event was last recorded behind.
    pub record: Option<(u64, u64)>,
    /// The capture that it was last recorded in instead, and the clock behind the record.
    pub captured: Option<(u64, Clock)>,
    /// The clock behind that operation.
    pub order: Clock,
    /// The virtual time of that operation once it has run, in nanoseconds.
    pub time: Option<u64>,
    /// The number of unsuccessful queries.
    pub asked: u32,
}

impl Machine {
    /// Returns the living stream of a handle, which may be the current context's null stream.
    pub fn stream(&mut self, handle: u64) -> Outcome<u64> {
        match handle {
            0 | 1 => {
                let context = context::current();
                self.contexts.get(&context).map(|context| context.null_stream).ok_or(CUDA_ERROR_INVALID_CONTEXT)
            }
            2 => self.wrong(CUDA_ERROR_NOT_SUPPORTED, "the stand-in has no per-thread stream"),
            _ => match self.streams.get(&handle) {
                Some(stream) if !stream.destroyed => {
                    let device = stream.device;
                    self.device(device)?.failed.map_or(Ok(handle), |(code, _)| Err(code))
                }
                Some(_) => self.wrong(CUDA_ERROR_INVALID_HANDLE, format!("stream {handle:#x} is used but destroyed")),
                None => {
                    let fate = self.fate(handle);
                    self.wrong(CUDA_ERROR_INVALID_HANDLE, format!("{fate} stream {handle:#x} is used"))
                }
            },
        }
    }

    /// Returns the living event of a handle.
    pub fn event(&mut self, handle: u64) -> Outcome<&mut Event> {
        if !self.events.contains_key(&handle) {
            let fate = self.fate(handle);
            return self.wrong(CUDA_ERROR_INVALID_HANDLE, format!("{fate} event {handle:#x} is used"));
        }
        self.events.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Returns true if a stream has run its operations up to a number. A removed stream has.
    pub fn is_done(&self, stream: u64, number: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= number)
    }

    /// Enqueues an operation and returns its number. In a capturing stream the operation is only
    /// recorded, and the number is meaningless.
    pub fn enqueue(&mut self, handle: u64, what: What) -> Outcome<u64> {
        if let Some(capture) = self.capture_of(handle) {
            return self.capture(capture, handle, what).map(|()| 0);
        }
        self.wait_for_related(handle)?;
        let number = self.append(handle, what, false)?;
        CHANGED.notify_all();
        Ok(number)
    }

    /// Makes the null stream and streams that are not `NON_BLOCKING` wait for each other.
    pub fn wait_for_related(&mut self, handle: u64) -> Outcome {
        self.refuse_null_stream(handle)?;
        let stream = self.streams.get(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let (own, context, flags) = (stream.own, stream.context, stream.flags);
        let related = |other: &Stream| other.context == context && other.flags & NON_BLOCKING == 0 && other.last > 0;
        let waits: Vec<(u64, u64, Clock)> = match flags & NON_BLOCKING {
            NON_BLOCKING => Vec::new(),
            _ => self
                .streams
                .iter()
                .filter(|(at, other)| **at != handle && (own || other.own) && related(other))
                .map(|(at, other)| (*at, other.last, other.order.clone()))
                .collect(),
        };
        for (stream, number, order) in waits {
            self.enqueue_wait(handle, stream, number, &order)?;
        }
        Ok(())
    }

    /// Makes a stream wait until another has run its operations up to a number; `order` is the
    /// clock behind that operation.
    pub fn enqueue_wait(&mut self, handle: u64, stream: u64, number: u64, order: &Clock) -> Outcome {
        self.streams.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?.order.join(order);
        self.append(handle, What::Wait { stream, number }, false).map(drop)
    }

    /// Enqueues an operation without waits for other streams.
    pub fn append(&mut self, handle: u64, what: What, in_graph: bool) -> Outcome<u64> {
        let enqueued = self.now;
        let stream = self.streams.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        stream.last += 1;
        let number = stream.last;
        stream.order.reach(handle, number);
        self.check_order(handle, number, &what);
        self.streams.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?.queue.push_back(Operation {
            number,
            enqueued,
            in_graph,
            what,
        });
        Ok(number)
    }
}
