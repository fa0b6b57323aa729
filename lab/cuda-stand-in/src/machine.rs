//! The state of the stand-in: its devices with their contexts, streams and memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex};

use crate::api::Resource;
use crate::capture::Capture;
use crate::context::{Context, Device, DeviceConfig};
use crate::fault::Faults;
use crate::graph::{Executable, Graph};
use crate::host_memory::HostMemory;
use crate::memory::Memory;
use crate::ordering::Access;
use crate::result::{CUresult, Outcome};
use crate::stream::{Event, Stream};
use crate::trace::Work;

/// The most mistakes that are kept; further ones add no information.
const MISTAKES: usize = 100;

/// The state behind the driver's entry points.
#[derive(Debug, Default)]
pub struct Machine {
    /// True once devices exist: the environment's, or those that a test has set.
    pub configured: bool,
    pub initialised: bool,
    /// The result of `cuDriverGetVersion`, such as 13000.
    pub version: i32,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<u64, Context>,
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    /// Device resources that were handed out.
    pub resources: Vec<Resource>,
    /// Descriptors of resources: a device and some of its multiprocessors.
    pub descriptors: BTreeMap<u64, (i32, Vec<u32>)>,
    pub captures: BTreeMap<u64, Capture>,
    pub graphs: BTreeMap<u64, Graph>,
    pub executables: BTreeMap<u64, Executable>,
    pub memory: Memory,
    pub host: HostMemory,
    pub faults: Faults,
    /// The number of queries of an unfinished stream or event before its work runs.
    pub patience: u32,
    /// True if the host may follow the addresses of device memory that is allocated from now on.
    pub readable: bool,
    /// The number of calls of each entry point.
    pub calls: BTreeMap<&'static str, u64>,
    pub trace: Vec<Work>,
    pub mistakes: Vec<String>,
    /// The accesses that the host has not waited for.
    pub accesses: VecDeque<Access>,
    /// The host's virtual time, in nanoseconds: it advances where the host waits.
    pub now: u64,
    /// The host's time to give a kernel to a stream, in nanoseconds of virtual time. Kernels of a
    /// graph take no such time.
    pub launch_time: u64,
    /// The state of the random order; `None` while streams are lazy. A worker ends when `order` is
    /// no longer the number it was started with.
    pub random: Option<u64>,
    pub order: u64,
    next: u64,
}

/// The one machine of this process.
pub static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| Mutex::new(Machine::new()));
/// Notified whenever work has run or was enqueued.
pub static CHANGED: Condvar = Condvar::new();

impl Machine {
    fn new() -> Self {
        Self { version: 13_000, patience: 3, ..Self::default() }
    }

    /// Resets the machine to the state of a process that has just loaded the library, with one
    /// device as configured by default.
    pub fn reset(&mut self) {
        self.memory.clear();
        self.host.clear();
        // Handles and orders continue, so that old ones are never mistaken for new ones.
        let (next, order) = (self.next, self.order + 1);
        let devices = vec![Device::new(DeviceConfig::default())];
        *self = Self { next, order, devices, configured: true, ..Self::new() };
        CHANGED.notify_all();
    }

    /// Returns a new handle. It looks like a pointer, but the memory there cannot be read.
    pub fn handle(&mut self) -> u64 {
        self.next += 1;
        0x40 + self.next * 0x10
    }

    /// Records a mistake of the program.
    pub fn mistake(&mut self, what: impl Into<String>) {
        if self.mistakes.len() < MISTAKES {
            self.mistakes.push(what.into());
        }
    }

    /// Records a mistake and returns its error code.
    pub fn wrong<T>(&mut self, code: CUresult, what: impl Into<String>) -> Outcome<T> {
        self.mistake(what);
        Err(code)
    }

    /// Describes a handle that is not alive: destroyed, or never handed out.
    pub fn fate(&self, handle: u64) -> &'static str {
        if handle > 0x40 && handle <= 0x40 + self.next * 0x10 { "destroyed" } else { "unknown" }
    }

    /// Returns the device of this ordinal.
    pub fn device(&mut self, ordinal: i32) -> Outcome<&mut Device> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|index| self.devices.get_mut(index))
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// Returns the living resources that the program should have given back.
    pub fn leaks(&self) -> Vec<String> {
        let mut leaks: Vec<String> = self.memory.leaks().collect();
        leaks.extend(self.host.leaks());
        for (handle, stream) in &self.streams {
            if !stream.destroyed && !stream.own {
                leaks.push(format!("stream {handle:#x}, {} operations waiting", stream.queue.len()));
            }
        }
        leaks.extend(self.events.keys().map(|handle| format!("event {handle:#x}")));
        leaks.extend(self.captures.keys().map(|handle| format!("capture {handle:#x} that was not ended")));
        leaks.extend(self.graphs.keys().map(|handle| format!("graph {handle:#x}")));
        leaks.extend(self.executables.keys().map(|handle| format!("executable graph {handle:#x}")));
        for (handle, context) in &self.contexts {
            match &context.partition {
                Some(partition) => leaks.push(format!("green context {handle:#x} of {} SMs", partition.len())),
                None => leaks
                    .push(format!("primary context of device {}, {} references", context.device, context.references)),
            }
        }
        leaks
    }
}
