//! The allocations of device memory.

use std::collections::BTreeMap;

use crate::address;
use crate::machine::Machine;
use crate::result::{CUresult::*, Outcome};
use crate::stream::What;

/// Memory at a range of addresses.
#[derive(Debug)]
pub struct Region {
    pub len: u64,
    pub device: i32,
    /// True until a stream has reached the `cuMemAllocAsync` that made it.
    pub coming: bool,
    /// True once `cuMemFreeAsync` was called on it.
    pub leaving: bool,
    /// Set if a capture has recorded its allocation: the memory comes and goes with each launch, at
    /// the same address.
    pub of_graph: Option<OfGraph>,
}

/// The state of memory that a graph owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfGraph {
    /// True if an enqueued launch has allocated it, and no enqueued operation has freed it.
    pub is_taken: bool,
    /// True if the graph and all its executables are gone.
    pub is_left: bool,
}

/// All device memory.
#[derive(Debug, Default)]
pub struct Memory {
    pub regions: BTreeMap<u64, Region>,
    /// By address: how often memory was opened by its handle.
    pub opened: BTreeMap<u64, u32>,
}

impl Memory {
    /// Removes all memory.
    pub fn clear(&mut self) {
        for (start, region) in &self.regions {
            address::unmap(*start, region.len as usize);
        }
        *self = Self::default();
    }

    /// Removes the memory of one device.
    pub fn clear_device(&mut self, device: i32) {
        self.regions.retain(|start, region| {
            if region.device == device {
                address::unmap(*start, region.len as usize);
            }
            region.device != device
        });
    }

    /// Returns the number of a device's allocations that the program has not given back. A stream
    /// may not have reached a free yet.
    pub fn count(&self, device: i32) -> usize {
        self.regions.values().filter(|region| region.device == device && !region.leaving).count()
    }

    /// Returns the region that an address lies in, with its start.
    pub fn region(&self, address: u64) -> Option<(u64, &Region)> {
        let (start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.len).then_some((*start, region))
    }

    /// Returns true if these bytes are device memory that is usable now, or with `soon`, usable by
    /// an operation that is enqueued now.
    pub fn is_usable(&self, address: u64, len: u64, soon: bool) -> bool {
        self.region(address)
            .is_some_and(|(start, region)| len <= region.len - (address - start) && (soon || !region.coming))
    }

    pub fn leaks(&self) -> impl Iterator<Item = String> {
        let regions = self.regions.iter();
        let opened = self.opened.keys().map(|start| format!("memory opened by its handle at {start:#x}"));
        regions.map(|(start, region)| format!("{} bytes of device memory at {start:#x}", region.len)).chain(opened)
    }
}

impl Machine {
    /// Counts memory of a device as used. Fails if a test has asked for that, or if the device is
    /// full.
    pub fn charge(&mut self, device: i32, len: u64) -> Outcome {
        if len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.faults.allocation(len)?;
        let state = self.device(device)?;
        if state.used.saturating_add(len) > state.config.memory {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        state.used += len;
        Ok(())
    }

    /// Gives back memory that [`Self::charge`] counted.
    pub fn refund(&mut self, device: i32, len: u64) {
        if let Ok(state) = self.device(device) {
            state.used = state.used.saturating_sub(len);
        }
    }

    /// Allocates device memory.
    pub fn allocate(&mut self, device: i32, len: u64) -> Outcome<u64> {
        self.charge(device, len)?;
        let allocated = (|| {
            let start = address::take(len as usize, 512)?;
            let block = address::block(len as usize).ok()?;
            address::map(start, len as usize, &block, self.readable).ok()?;
            Some(start)
        })();
        let Some(start) = allocated else {
            self.refund(device, len);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        };
        self.memory.regions.insert(start, Region { len, device, coming: false, leaving: false, of_graph: None });
        Ok(start)
    }

    /// Checks that memory can be freed: it is the start of an allocation that was not freed yet.
    pub fn freeable(&mut self, start: u64, call: &str) -> Outcome {
        match self.memory.regions.get(&start) {
            Some(Region { of_graph: Some(OfGraph { is_taken: false, .. }), .. }) => self.wrong(
                CUDA_ERROR_INVALID_VALUE,
                format!("{call} of {start:#x}, which is a graph's, and free between its launches"),
            ),
            Some(region) if !region.leaving => Ok(()),
            Some(_) => {
                self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{call} of {start:#x}, which cuMemFreeAsync has freed"))
            }
            None => self.wrong(
                CUDA_ERROR_INVALID_VALUE,
                format!("{call} of {start:#x}, which is no allocation (freed twice?)"),
            ),
        }
    }

    /// Frees device memory. A graph's memory keeps its address, for the next launch.
    pub fn free(&mut self, start: u64) {
        if let Some(region) = self.memory.regions.get_mut(&start)
            && let Some(OfGraph { is_left, .. }) = region.of_graph
        {
            region.coming = true;
            if !is_left || self.is_awaited(start) {
                return;
            }
        }
        if let Some(region) = self.memory.regions.remove(&start) {
            address::unmap(start, region.len as usize);
            self.refund(region.device, region.len);
        }
    }

    /// Returns true if a launch under way has still to allocate or free this memory.
    fn is_awaited(&self, start: u64) -> bool {
        let concerns = |what: &What| match what {
            What::Allocate { start: at } | What::Free { start: at } => *at == start,
            _ => false,
        };
        self.streams.values().flat_map(|stream| &stream.queue).any(|operation| concerns(&operation.what))
    }

    /// Allocates memory for a graph, present from its allocation to its free in each launch.
    pub fn allocate_for_graph(&mut self, device: i32, len: u64) -> Outcome<u64> {
        let start = self.allocate(device, len)?;
        if let Some(region) = self.memory.regions.get_mut(&start) {
            (region.coming, region.of_graph) = (true, Some(OfGraph { is_taken: false, is_left: false }));
        }
        Ok(start)
    }

    /// Records that the graph that owns this memory is gone, with all its executables. As
    /// documented, memory that a launch has allocated and no operation has freed stays.
    pub fn leave_of_graph(&mut self, start: u64) {
        let Some(of_graph) = self.memory.regions.get_mut(&start).and_then(|region| region.of_graph.as_mut()) else {
            return;
        };
        of_graph.is_left = true;
        if !of_graph.is_taken && !self.is_awaited(start) {
            self.free(start);
        }
    }

    /// Enqueues an allocation or a free of a graph's memory: it is taken once, and freed before it
    /// is taken again.
    pub fn take_of_graph(&mut self, start: u64, is_taken: bool) {
        if let Some(of_graph) = self.memory.regions.get_mut(&start).and_then(|region| region.of_graph.as_mut()) {
            of_graph.is_taken = is_taken;
        }
    }
}
