//! Devices, their contexts (primary and green), and which context is current to a thread.

use std::cell::RefCell;

use crate::machine::Machine;
use crate::result::{CUresult, CUresult::*, Outcome};
use crate::stream::Stream;

/// The configuration of a device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    pub name: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The size of its memory, in bytes.
    pub memory: u64,
    /// Compute capability, such as (9, 0).
    pub capability: (i32, i32),
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            name: "NVIDIA H100 80GB HBM3 (stand-in)".into(),
            multiprocessors: 132,
            memory: 80 << 30,
            capability: (9, 0),
        }
    }
}

impl DeviceConfig {
    /// Reads the default devices from the environment: `CUDA_STAND_IN_DEVICES` devices (1 if unset)
    /// with `CUDA_STAND_IN_MULTIPROCESSORS` multiprocessors and `CUDA_STAND_IN_MEMORY` bytes each.
    pub fn from_environment() -> Vec<Self> {
        let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let default = Self::default();
        let device = Self {
            multiprocessors: number("CUDA_STAND_IN_MULTIPROCESSORS")
                .and_then(|count| u32::try_from(count).ok())
                .unwrap_or(default.multiprocessors),
            memory: number("CUDA_STAND_IN_MEMORY").unwrap_or(default.memory),
            ..default
        };
        vec![device; number("CUDA_STAND_IN_DEVICES").unwrap_or(1).min(64) as usize]
    }
}

/// A device and its present state.
#[derive(Debug)]
pub struct Device {
    pub config: DeviceConfig,
    /// The handle of the primary context while it is retained.
    pub primary: Option<u64>,
    /// The error that every call on this device fails with, and whether the error outlives the
    /// contexts.
    pub failed: Option<(CUresult, bool)>,
    /// The bytes of memory handed out.
    pub used: u64,
}

impl Device {
    pub fn new(config: DeviceConfig) -> Self {
        Self { config, primary: None, failed: None, used: 0 }
    }
}

/// A context that is alive.
#[derive(Debug)]
pub struct Context {
    pub device: i32,
    /// The multiprocessors of a green context, ascending.
    pub partition: Option<Vec<u32>>,
    /// The number of times that the primary context was retained; 1 for a green context.
    pub references: u32,
    /// The handle of the stream that stands for the null stream.
    pub null_stream: u64,
}

thread_local! {
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The context current to this thread, whether or not it is alive; 0 for none.
pub fn current() -> u64 {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Replaces the current context, as `cuCtxSetCurrent` does; 0 takes it away.
pub fn set_current(context: u64) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

/// Puts a context on top of the thread's stack.
pub fn push_current(context: u64) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

/// Takes the top of the thread's stack.
pub fn pop_current() -> Option<u64> {
    CURRENT.with_borrow_mut(Vec::pop)
}

impl Machine {
    /// Makes a context with its null stream.
    pub fn add_context(&mut self, device: i32, partition: Option<Vec<u32>>) -> u64 {
        let (handle, null_stream) = (self.handle(), self.handle());
        self.streams.insert(null_stream, Stream::new(device, handle, 0, 0, true));
        self.contexts.insert(handle, Context { device, partition, references: 1, null_stream });
        handle
    }

    /// Retains the primary context of a device.
    pub fn retain_primary(&mut self, device: i32) -> Outcome<u64> {
        let state = self.device(device)?;
        if let Some((code, true)) = state.failed {
            return Err(code);
        }
        if let Some(handle) = state.primary {
            if let Some(context) = self.contexts.get_mut(&handle) {
                context.references += 1;
            }
            return Ok(handle);
        }
        let handle = self.add_context(device, None);
        self.device(device)?.primary = Some(handle);
        Ok(handle)
    }

    /// Gives one reference back. With the last one, all contexts, streams and memory of the device
    /// go.
    pub fn release_primary(&mut self, device: i32) -> Outcome {
        let Some(handle) = self.device(device)?.primary else {
            return self.wrong(CUDA_ERROR_INVALID_CONTEXT, "the primary context was released more often than retained");
        };
        let Some(context) = self.contexts.get_mut(&handle) else { return Err(CUDA_ERROR_INVALID_CONTEXT) };
        context.references -= 1;
        if context.references == 0 {
            let streams = self.streams.values().filter(|s| s.device == device && !s.own && !s.destroyed).count();
            let events = self.events.values().filter(|e| e.device == device).count();
            let blocks = self.memory.count(device);
            if streams + events + blocks > 0 && self.device(device)?.failed.is_none() {
                self.mistake(format!(
                    "the primary context of device {device} was released with {streams} streams, {events} events and {blocks} \
                     blocks of memory alive"
                ));
            }
            self.destroy_contexts(device);
        }
        Ok(())
    }

    /// Destroys everything on a device, and clears an error that is not for good.
    pub fn destroy_contexts(&mut self, device: i32) {
        self.forget_accesses(device);
        self.streams.retain(|_, stream| stream.device != device);
        self.events.retain(|_, event| event.device != device);
        self.contexts.retain(|_, context| context.device != device);
        self.memory.clear_device(device);
        if let Ok(state) = self.device(device) {
            state.primary = None;
            state.used = 0;
            if matches!(state.failed, Some((_, false))) {
                state.failed = None;
            }
        }
    }

    /// Returns the current context and its device, both alive and without error.
    pub fn current(&mut self) -> Outcome<(u64, i32)> {
        let handle = current();
        match self.contexts.get(&handle) {
            Some(context) => {
                let device = context.device;
                match self.device(device)?.failed {
                    Some((code, _)) => Err(code),
                    None => Ok((handle, device)),
                }
            }
            None if handle == 0 => {
                let name = std::thread::current().name().unwrap_or("?").to_owned();
                self.wrong(CUDA_ERROR_INVALID_CONTEXT, format!("thread {name} has no current context"))
            }
            None => {
                self.wrong(CUDA_ERROR_CONTEXT_IS_DESTROYED, format!("context {handle:#x} is current but destroyed"))
            }
        }
    }
}
