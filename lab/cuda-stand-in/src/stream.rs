//! Streams and events: what is enqueued, and how far each stream has come.

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
/// How many ends of operations a stream remembers; those of earlier ones count as long ago.
const ENDS: usize = 1024;

/// Where an upload reads.
#[derive(Clone, Debug)]
pub enum Source {
    /// Pinned memory, read when the copy runs.
    Pinned(usize),
    /// What pageable memory held at the call.
    Staged(Vec<u8>),
}

/// What an operation does.
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
    /// From here on the memory of a `cuMemAllocAsync` may be used.
    Allocate {
        start: u64,
    },
    Free {
        start: u64,
    },
    /// Memory that the kernel behind it uses.
    Touch {
        at: u64,
        len: u64,
        writes: bool,
    },
}

// SAFETY: the only field that is not `Send` is the argument of a host function, which the driver's contract lets any thread pass on.
unsafe impl Send for What {}

/// An operation in a stream.
#[derive(Debug)]
pub struct Operation {
    /// Its number in the stream, from 1.
    pub number: u64,
    /// The host's virtual time when it was enqueued, nanoseconds.
    pub enqueued: u64,
    /// Whether it was given with a graph.
    pub in_graph: bool,
    pub what: What,
}

/// A stream, also after it was destroyed: what was enqueued before still runs.
#[derive(Debug, Default)]
pub struct Stream {
    pub device: i32,
    pub context: u64,
    pub flags: u32,
    pub priority: i32,
    /// Whether it is a context's null stream.
    pub own: bool,
    pub destroyed: bool,
    pub queue: VecDeque<Operation>,
    /// The number of the operation enqueued last.
    pub last: u64,
    /// The number of the operation that ran last.
    pub done: u64,
    /// Whether a thread runs an operation of it now.
    pub busy: bool,
    /// Virtual time at which the operation that ran last ended, nanoseconds.
    pub clock: u64,
    /// What is over when an operation enqueued now begins.
    pub order: Clock,
    ends: VecDeque<(u64, u64)>,
}

impl Stream {
    pub fn new(device: i32, context: u64, flags: u32, priority: i32, own: bool) -> Self {
        Self { device, context, flags, priority, own, ..Self::default() }
    }

    /// An operation has ended.
    pub fn ended(&mut self, number: u64, end: u64) {
        // A device that failed meanwhile has declared all of it done.
        (self.done, self.clock, self.busy) = (number.max(self.done), end, false);
        self.ends.push_back((number, end));
        if self.ends.len() > ENDS {
            self.ends.pop_front();
        }
    }

    /// When an operation ended, virtual nanoseconds.
    pub fn end_of(&self, number: u64) -> u64 {
        let index = self.ends.partition_point(|(at, _)| *at < number);
        self.ends.get(index).map_or(0, |(_, end)| *end)
    }
}

/// An event that is alive.
#[derive(Debug)]
pub struct Event {
    pub device: i32,
    pub flags: u32,
    /// The stream and the number of the operation it was recorded as last.
    pub record: Option<(u64, u64)>,
    /// The capture it was recorded in last instead, and what is over there when it is.
    pub captured: Option<(u64, Clock)>,
    /// What is over when that operation is.
    pub order: Clock,
    /// Virtual time of that operation once it has run, nanoseconds.
    pub time: Option<u64>,
    /// How often it was asked and was not ready.
    pub asked: u32,
}

impl Machine {
    /// The stream a handle means, alive: also the null stream of the current context.
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

    /// The event of a handle, alive.
    pub fn event(&mut self, handle: u64) -> Outcome<&mut Event> {
        if !self.events.contains_key(&handle) {
            let fate = self.fate(handle);
            return self.wrong(CUDA_ERROR_INVALID_HANDLE, format!("{fate} event {handle:#x} is used"));
        }
        self.events.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Whether a stream has run its operations up to a number. A stream that is gone has.
    pub fn is_done(&self, stream: u64, number: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= number)
    }

    /// Enqueues an operation and returns its number. Where the stream captures it is only written down, and the number says nothing.
    pub fn enqueue(&mut self, handle: u64, what: What) -> Outcome<u64> {
        if let Some(capture) = self.capture_of(handle) {
            return self.capture(capture, handle, what).map(|()| 0);
        }
        self.wait_for_related(handle)?;
        let number = self.append(handle, what, false)?;
        CHANGED.notify_all();
        Ok(number)
    }

    /// The null stream and those that are not `NON_BLOCKING` wait for each other.
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

    /// Makes a stream wait until another has run its operations up to a number, behind which `order` is over.
    pub fn enqueue_wait(&mut self, handle: u64, stream: u64, number: u64, order: &Clock) -> Outcome {
        self.streams.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?.order.join(order);
        self.append(handle, What::Wait { stream, number }, false).map(drop)
    }

    /// Enqueues an operation, whatever other streams do.
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
