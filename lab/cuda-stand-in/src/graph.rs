//! Graphs: recorded operations that are enqueued again with each launch.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{CUDA_MEMCPY3D, CUgraphNodeType, CUmemorytype};

use crate::capture::allocations;
use crate::machine::{CHANGED, Machine};
use crate::ordering::Clock;
use crate::result::{CUresult::*, Outcome};
use crate::stream::{Source, What};

/// The operations that a capture has recorded.
#[derive(Clone, Debug)]
pub struct Graph {
    pub device: i32,
    pub operations: Vec<What>,
    /// The index in `operations` of each node's handle. Nodes are listed in the order of their
    /// handles.
    pub nodes: BTreeMap<u64, usize>,
}

/// An executable graph.
#[derive(Debug)]
pub struct Executable {
    pub graph: Graph,
    /// The handle of the recorded graph that it was made of, which may be destroyed.
    pub source: u64,
    /// The last launch: its stream, the number of its last operation, and the clock behind that
    /// operation.
    launched: Option<(u64, u64, Clock)>,
}

impl What {
    /// Returns the kind of node that a graph shows for the operation; `None` if only the stand-in
    /// has such an operation.
    pub fn node_type(&self) -> Option<CUgraphNodeType> {
        match self {
            Self::Upload { .. } | Self::Download { .. } | Self::Copy { .. } => {
                Some(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY)
            }
            Self::Set { .. } => Some(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET),
            Self::Kernel { .. } => Some(CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST),
            Self::Allocate { .. } => Some(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC),
            Self::Free { .. } => Some(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE),
            Self::Wait { .. } | Self::Record { .. } | Self::Touch { .. } => None,
        }
    }

    /// Returns the parameters of a copy node; `None` for other operations.
    pub fn copy_parameters(&self) -> Option<CUDA_MEMCPY3D> {
        /// One end of a copy.
        enum End {
            Host(usize),
            Device(u64),
        }
        let (from, to, len) = match self {
            Self::Upload { to, from: Source::Pinned(from), len } => (End::Host(*from), End::Device(*to), *len),
            Self::Upload { to, from: Source::Staged(bytes), len } => {
                (End::Host(bytes.as_ptr().addr()), End::Device(*to), *len)
            }
            Self::Download { to, from, len, .. } => (End::Device(*from), End::Host(*to), *len),
            Self::Copy { to, from, len } => (End::Device(*from), End::Device(*to), *len),
            _ => return None,
        };
        let parts = |end: &End| match end {
            End::Host(at) => (CUmemorytype::CU_MEMORYTYPE_HOST, *at, 0),
            End::Device(at) => (CUmemorytype::CU_MEMORYTYPE_DEVICE, 0, *at),
        };
        let ((from_type, from_host, from_device), (to_type, to_host, to_device)) = (parts(&from), parts(&to));
        let mut copy = MaybeUninit::<CUDA_MEMCPY3D>::zeroed();
        let to = copy.as_mut_ptr();
        // SAFETY: zero is a value of each field but the two kinds of memory, which are written.
        Some(unsafe {
            ((*to).srcMemoryType, (*to).srcHost, (*to).srcDevice) = (from_type, from_host as *const _, from_device);
            ((*to).dstMemoryType, (*to).dstHost, (*to).dstDevice) = (to_type, to_host as *mut _, to_device);
            ((*to).WidthInBytes, (*to).Height, (*to).Depth) = (len as usize, 1, 1);
            copy.assume_init()
        })
    }
}

impl Graph {
    /// Returns true if the graph allocates or frees memory.
    fn has_memory(&self) -> bool {
        self.operations.iter().any(|what| matches!(what, What::Allocate { .. } | What::Free { .. }))
    }
}

impl Machine {
    /// Makes a graph of these operations. An operation gets a node if the driver shows one.
    pub fn graph_of(&mut self, device: i32, operations: Vec<What>) -> Graph {
        let places = (0..operations.len()).filter(|place| operations[*place].node_type().is_some());
        let nodes = places.map(|place| (self.handle(), place)).collect();
        Graph { device, operations, nodes }
    }

    /// Returns the handles of the nodes of a living graph.
    pub fn nodes(&mut self, graph: u64) -> Outcome<Vec<u64>> {
        match self.graphs.get(&graph) {
            Some(graph) => Ok(graph.nodes.keys().copied().collect()),
            None => {
                let fate = self.fate(graph);
                self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} graph {graph:#x} is asked for its nodes"))
            }
        }
    }

    /// Returns the operation of a node. A node dies with its graph.
    pub fn node(&mut self, handle: u64) -> Outcome<&What> {
        let place = |(graph, found): (&u64, &Graph)| Some((*graph, *found.nodes.get(&handle)?));
        let Some((graph, place)) = self.graphs.iter().find_map(place) else {
            let fate = self.fate(handle);
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} graph node {handle:#x} is used"));
        };
        let graph = self.graphs.get(&graph).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        graph.operations.get(place).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Makes an executable graph. As documented, it is a copy: the recorded graph may be destroyed.
    pub fn instantiate(&mut self, graph: u64) -> Outcome<u64> {
        let source = graph;
        let Some(graph) = self.graphs.get(&source).cloned() else {
            let fate = self.fate(source);
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} graph {source:#x} is instantiated"));
        };
        // The refusal is documented, its code is not.
        if graph.has_memory() && self.executables.values().any(|executable| executable.source == source) {
            let what = format!("graph {source:#x} has memory of its own and is instantiated twice");
            return self.wrong(CUDA_ERROR_NOT_SUPPORTED, what);
        }
        let handle = self.handle();
        self.executables.insert(handle, Executable { graph, source, launched: None });
        Ok(handle)
    }

    /// Frees the memory of a destroyed graph, recorded or executable, if no other graph shares this
    /// memory.
    pub fn leave_graph(&mut self, gone: &Graph) {
        for start in allocations(&gone.operations) {
            let mut others = self.graphs.values().chain(self.executables.values().map(|executable| &executable.graph));
            if !others.any(|other| allocations(&other.operations).any(|at| at == start)) {
                self.leave_of_graph(start);
            }
        }
    }

    /// Returns a living executable graph.
    pub fn executable(&mut self, handle: u64) -> Outcome<&mut Executable> {
        if !self.executables.contains_key(&handle) {
            let fate = self.fate(handle);
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} executable graph {handle:#x} is used"));
        }
        self.executables.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Enqueues the recorded operations, after the graph's last launch, as documented.
    pub fn launch_graph(&mut self, handle: u64, stream: u64) -> Outcome {
        let executable = self.executable(handle)?;
        let (graph, launched) = (executable.graph.clone(), executable.launched.clone());
        if self.streams.get(&stream).is_none_or(|stream| stream.device != graph.device) {
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("graph {handle:#x} is launched on another device"));
        }
        // The stand-in does not support graphs in graphs.
        self.refuse_in_capture(stream, CUDA_ERROR_NOT_SUPPORTED)?;
        let is_taken = |start: u64| {
            let region = self.memory.regions.get(&start);
            region.and_then(|region| region.of_graph).is_none_or(|of_graph| of_graph.is_taken)
        };
        if allocations(&graph.operations).any(is_taken) {
            let what = format!("graph {handle:#x} is launched while memory that it allocates was not freed");
            return self.wrong(CUDA_ERROR_INVALID_VALUE, what);
        }
        self.wait_for_related(stream)?;
        if let Some((other, number, order)) = launched
            && other != stream
        {
            self.enqueue_wait(stream, other, number, &order)?;
        }
        let mut last = None;
        for what in graph.operations {
            match what {
                What::Allocate { start } => self.take_of_graph(start, true),
                What::Free { start } => self.take_of_graph(start, false),
                _ => {}
            }
            last = Some(self.append(stream, what, true)?);
        }
        let order = self.streams.get(&stream).map(|stream| stream.order.clone()).unwrap_or_default();
        if let Some(number) = last {
            self.executable(handle)?.launched = Some((stream, number, order));
        }
        CHANGED.notify_all();
        Ok(())
    }
}
