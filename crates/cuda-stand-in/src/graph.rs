//! Graphs: what was recorded, and is enqueued again as often as wanted.

use crate::machine::{CHANGED, Machine};
use crate::ordering::Clock;
use crate::result::{CUresult::*, Outcome};
use crate::stream::What;

/// What a capture has recorded.
#[derive(Clone, Debug)]
pub struct Graph {
    pub device: i32,
    pub operations: Vec<What>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    pub graph: Graph,
    /// The stream, the number of the last operation and what is over behind it, of the launch before.
    launched: Option<(u64, u64, Clock)>,
}

impl Machine {
    /// Makes a graph ready to be launched. As documented, it is a copy: the graph may be destroyed.
    pub fn instantiate(&mut self, graph: u64) -> Outcome<u64> {
        let Some(graph) = self.graphs.get(&graph).cloned() else {
            let fate = self.fate(graph);
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} graph {graph:#x} is instantiated"));
        };
        let handle = self.handle();
        self.executables.insert(handle, Executable { graph, launched: None });
        Ok(handle)
    }

    /// An executable graph that is alive.
    pub fn executable(&mut self, handle: u64) -> Outcome<&mut Executable> {
        if !self.executables.contains_key(&handle) {
            let fate = self.fate(handle);
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("{fate} executable graph {handle:#x} is used"));
        }
        self.executables.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Enqueues what a graph has recorded, behind its launch before, as documented.
    pub fn launch_graph(&mut self, handle: u64, stream: u64) -> Outcome {
        let executable = self.executable(handle)?;
        let (graph, launched) = (executable.graph.clone(), executable.launched.clone());
        if self.streams.get(&stream).is_none_or(|stream| stream.device != graph.device) {
            return self.wrong(CUDA_ERROR_INVALID_VALUE, format!("graph {handle:#x} is launched on another device"));
        }
        // The stand-in has no graphs in graphs.
        self.refuse_in_capture(stream, CUDA_ERROR_NOT_SUPPORTED)?;
        self.wait_for_related(stream)?;
        if let Some((other, number, order)) = launched
            && other != stream
        {
            self.enqueue_wait(stream, other, number, &order)?;
        }
        let mut last = None;
        for what in graph.operations {
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
