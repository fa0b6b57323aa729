//! Everything the stand-in knows: its devices and what lives on them.

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

/// How many mistakes are kept; more of them say nothing new.
const MISTAKES: usize = 100;

/// The state behind the driver's entry points.
#[derive(Debug, Default)]
pub struct Machine {
    /// Whether the devices are there: those of the environment, or those that a test has set.
    pub configured: bool,
    pub initialised: bool,
    /// What `cuDriverGetVersion` tells, such as 13000.
    pub version: i32,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<u64, Context>,
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    /// Resources that were given out.
    pub resources: Vec<Resource>,
    /// Descriptors of resources: a device and multiprocessors of it.
    pub descriptors: BTreeMap<u64, (i32, Vec<u32>)>,
    pub captures: BTreeMap<u64, Capture>,
    pub graphs: BTreeMap<u64, Graph>,
    pub executables: BTreeMap<u64, Executable>,
    pub memory: Memory,
    pub host: HostMemory,
    pub faults: Faults,
    /// How often an unfinished stream or event may be asked before its work runs.
    pub patience: u32,
    /// Whether the host may follow the addresses of device memory that is allocated from now on.
    pub readable: bool,
    /// How often each entry point was called.
    pub calls: BTreeMap<&'static str, u64>,
    pub trace: Vec<Work>,
    pub mistakes: Vec<String>,
    /// The accesses that the host has not waited for.
    pub accesses: VecDeque<Access>,
    /// Virtual time of the host, nanoseconds: it goes on where the host waits.
    pub now: u64,
    /// How long the host takes to give a kernel to a stream, nanoseconds of virtual time; those of a graph it need not give.
    pub launch_time: u64,
    /// The random order's state: none while streams are lazy. A worker goes when the number of its order is no longer this one.
    pub random: Option<u64>,
    pub order: u64,
    next: u64,
}

/// The one machine of this process.
pub static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| Mutex::new(Machine::new()));
/// Told whenever work has run or was enqueued.
pub static CHANGED: Condvar = Condvar::new();

impl Machine {
    fn new() -> Self {
        Self { version: 13_000, patience: 3, ..Self::default() }
    }

    /// Back to the state of a process that has just loaded the library, with one device as configured by default.
    pub fn reset(&mut self) {
        self.memory.clear();
        self.host.clear();
        // Handles and orders go on, so that those of before are never mistaken for new ones.
        let (next, order) = (self.next, self.order + 1);
        let devices = vec![Device::new(DeviceConfig::default())];
        *self = Self { next, order, devices, configured: true, ..Self::new() };
        CHANGED.notify_all();
    }

    /// A handle that was never given out before; it looks like a pointer, but nothing can be read there.
    pub fn handle(&mut self) -> u64 {
        self.next += 1;
        0x40 + self.next * 0x10
    }

    /// Writes down something the program should not have done.
    pub fn mistake(&mut self, what: impl Into<String>) {
        if self.mistakes.len() < MISTAKES {
            self.mistakes.push(what.into());
        }
    }

    /// Writes down a mistake and gives its error code.
    pub fn wrong<T>(&mut self, code: CUresult, what: impl Into<String>) -> Outcome<T> {
        self.mistake(what);
        Err(code)
    }

    /// What a handle that is not alive is: destroyed, or never given out.
    pub fn fate(&self, handle: u64) -> &'static str {
        if handle > 0x40 && handle <= 0x40 + self.next * 0x10 { "destroyed" } else { "unknown" }
    }

    /// The device with this ordinal.
    pub fn device(&mut self, ordinal: i32) -> Outcome<&mut Device> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|index| self.devices.get_mut(index))
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// What is alive although the program has given it back or should have.
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
