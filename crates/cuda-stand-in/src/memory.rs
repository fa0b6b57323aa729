//! Device memory: blocks, reserved addresses, and what is mapped where.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use crate::address;
use crate::machine::Machine;
use crate::result::{CUresult::*, Outcome};
use crate::stream::What;

/// Memory at a range of addresses.
#[derive(Debug)]
pub struct Region {
    pub len: u64,
    pub device: i32,
    /// The block it shows, of memory that `cuMemMap` put there; none for an allocation of its own.
    pub block: Option<u64>,
    /// Whether it may be used: a mapping only after `cuMemSetAccess`.
    pub accessible: bool,
    /// Whether a stream has still to come to the `cuMemAllocAsync` that made it.
    pub coming: bool,
    /// Whether `cuMemFreeAsync` was called on it.
    pub leaving: bool,
    /// Whose it is, where a capture has recorded its allocation: it comes and goes with each launch, at the same address.
    pub of_graph: Option<OfGraph>,
}

/// What is known of memory that a graph owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfGraph {
    /// Whether a launch that was enqueued has allocated it, and nothing that was enqueued has freed it.
    pub is_taken: bool,
    /// Whether the graph is gone, and all that was made of it.
    pub is_left: bool,
}

/// Memory made by `cuMemCreate`.
#[derive(Debug)]
pub struct Block {
    pub file: OwnedFd,
    pub len: u64,
    pub device: i32,
    pub released: bool,
    pub mappings: u32,
}

/// All device memory.
#[derive(Debug)]
pub struct Memory {
    pub regions: BTreeMap<u64, Region>,
    pub blocks: BTreeMap<u64, Block>,
    /// Reserved addresses: start and length.
    pub reserved: BTreeMap<u64, u64>,
    /// Memory opened by its handle, by address: how often.
    pub opened: BTreeMap<u64, u32>,
}

impl Memory {
    pub const fn new() -> Self {
        Self { regions: BTreeMap::new(), blocks: BTreeMap::new(), reserved: BTreeMap::new(), opened: BTreeMap::new() }
    }

    /// Takes everything away.
    pub fn clear(&mut self) {
        for (start, region) in &self.regions {
            address::unmap(*start, region.len as usize);
        }
        *self = Self::new();
    }

    /// Takes the memory of one device away.
    pub fn clear_device(&mut self, device: i32) {
        self.regions.retain(|start, region| {
            if region.device == device {
                address::unmap(*start, region.len as usize);
            }
            region.device != device
        });
        self.blocks.retain(|_, block| block.device != device);
    }

    /// How many allocations and blocks of a device the program has not given back; a stream may still have to come to where it did.
    pub fn count(&self, device: i32) -> usize {
        let is_kept = |region: &&Region| region.device == device && region.block.is_none() && !region.leaving;
        self.regions.values().filter(is_kept).count()
            + self.blocks.values().filter(|block| block.device == device).count()
    }

    /// The region an address lies in: its start and itself.
    pub fn region(&self, address: u64) -> Option<(u64, &Region)> {
        let (start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.len).then_some((*start, region))
    }

    /// Whether these bytes are device memory that may be used now, or, if `soon`, by something that is enqueued now; `None` if not,
    /// else the device.
    ///
    /// A range may go on from one mapping into the next, as the mirrored half of a ring does.
    pub fn device_of(&self, address: u64, len: u64, soon: bool) -> Option<i32> {
        let end = address.checked_add(len)?;
        let mut at = address;
        loop {
            let (start, region) = self.region(at)?;
            if !region.accessible || (region.coming && !soon) {
                return None;
            }
            at = start + region.len;
            if at >= end {
                return Some(region.device);
            }
        }
    }

    pub fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        for (start, region) in &self.regions {
            match region.block {
                None => leaks.push(format!("{} bytes of device memory at {start:#x}", region.len)),
                Some(block) => leaks.push(format!("a mapping of block {block:#x} at {start:#x}")),
            }
        }
        leaks.extend(self.blocks.iter().map(|(handle, block)| format!("block {handle:#x} of {} bytes", block.len)));
        leaks.extend(self.opened.keys().map(|start| format!("memory opened by its handle at {start:#x}")));
        leaks.extend(self.reserved.iter().map(|(start, len)| format!("{len} bytes of addresses at {start:#x}")));
        leaks
    }
}

impl Machine {
    /// Counts memory of a device as used; fails where a fault says so or the device is full.
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

    /// Gives memory back that [`Self::charge`] counted.
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
        let region =
            Region { len, device, block: None, accessible: true, coming: false, leaving: false, of_graph: None };
        self.memory.regions.insert(start, region);
        Ok(start)
    }

    /// Whether memory can be freed: it is the start of an allocation, and nobody has freed it.
    pub fn freeable(&mut self, start: u64, call: &str) -> Outcome {
        match self.memory.regions.get(&start) {
            Some(Region { of_graph: Some(OfGraph { is_taken: false, .. }), .. }) => self.wrong(
                CUDA_ERROR_INVALID_VALUE,
                format!("{call} of {start:#x}, which is a graph's, and free between its launches"),
            ),
            Some(region) if region.block.is_none() && !region.leaving => Ok(()),
            Some(region) if region.leaving => {
                self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{call} of {start:#x}, which cuMemFreeAsync has freed"))
            }
            _ => self.wrong(
                CUDA_ERROR_INVALID_VALUE,
                format!("{call} of {start:#x}, which is no allocation (freed twice?)"),
            ),
        }
    }

    /// Frees device memory: what a graph owns stays at its address, for its next launch.
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

    /// Whether a launch that is under way has still to allocate or free this memory.
    fn is_awaited(&self, start: u64) -> bool {
        let concerns = |what: &What| match what {
            What::Allocate { start: at } | What::Free { start: at } => *at == start,
            _ => false,
        };
        self.streams.values().flat_map(|stream| &stream.queue).any(|operation| concerns(&operation.what))
    }

    /// Allocates memory that a graph is to own: there from its allocation to its free in each launch.
    pub fn allocate_for_graph(&mut self, device: i32, len: u64) -> Outcome<u64> {
        let start = self.allocate(device, len)?;
        if let Some(region) = self.memory.regions.get_mut(&start) {
            (region.coming, region.of_graph) = (true, Some(OfGraph { is_taken: false, is_left: false }));
        }
        Ok(start)
    }

    /// The graph that owns this memory is gone, and all that was made of it. As documented, what a launch has allocated and nobody has freed stays.
    pub fn leave_of_graph(&mut self, start: u64) {
        let Some(of_graph) = self.memory.regions.get_mut(&start).and_then(|region| region.of_graph.as_mut()) else {
            return;
        };
        of_graph.is_left = true;
        if !of_graph.is_taken && !self.is_awaited(start) {
            self.free(start);
        }
    }

    /// An allocation or a free of memory that a graph owns is enqueued: it is taken once, and freed before it is taken again.
    pub fn take_of_graph(&mut self, start: u64, is_taken: bool) {
        if let Some(of_graph) = self.memory.regions.get_mut(&start).and_then(|region| region.of_graph.as_mut()) {
            of_graph.is_taken = is_taken;
        }
    }

    /// Drops a block that nobody holds or sees any more.
    pub fn settle_block(&mut self, handle: u64) {
        if let Some(block) = self.memory.blocks.get(&handle)
            && block.released
            && block.mappings == 0
        {
            let (device, len) = (block.device, block.len);
            self.memory.blocks.remove(&handle);
            self.refund(device, len);
        }
    }
}
