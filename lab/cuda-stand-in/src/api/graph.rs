//! Stream capture and graphs.

use std::ffi::{c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUdeviceptr, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType,
    CUstream,
};

use super::{get, put};
use crate::capture::Mode;
use crate::result::CUresult::*;
use crate::stream::What;

/// `CU_STREAM_CAPTURE_STATUS_NONE`, `..._ACTIVE`, `..._INVALIDATED`.
const NONE: c_uint = 0;
const ACTIVE: c_uint = 1;
const INVALIDATED: c_uint = 2;

api! {
    cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) Context |session| {
        let (stream, mode) = (session.stream(stream as u64)?, Mode::from_number(mode)?);
        session.begin_capture(stream, mode)
    }

    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) Release |session| {
        let ended = session.end_capture(stream as u64);
        // As documented, a failed call leaves no graph.
        put(graph, std::ptr::null_mut())?;
        let ended = ended?;
        let handle = session.handle();
        session.graphs.insert(handle, ended);
        put(graph, handle as CUgraph)
    }

    cuStreamIsCapturing(stream: CUstream, to: *mut c_uint) Context |session| {
        let stream = session.stream(stream as u64)?;
        // As documented: the null stream has no status while a stream that it would wait for
        // captures.
        session.refuse_null_stream(stream)?;
        let capture = session.capture_of(stream).and_then(|id| session.captures.get(&id));
        put(to, capture.map_or(NONE, |capture| if capture.is_invalidated { INVALIDATED } else { ACTIVE }))
    }

    cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) Init |session| {
        let found = session.nodes(graph as u64)?;
        if nodes.is_null() {
            return put(count, found.len());
        }
        // As documented: unused room is set to null.
        let room = get(count)?;
        for index in 0..room {
            put(nodes.wrapping_add(index), found.get(index).map_or(0, |node| *node) as CUgraphNode)?;
        }
        put(count, found.len().min(room))
    }

    cuGraphNodeGetType(node: CUgraphNode, to: *mut CUgraphNodeType) Init |session| {
        let kind = session.node(node as u64)?.node_type().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(to, kind)
    }

    cuGraphMemcpyNodeGetParams(node: CUgraphNode, to: *mut CUDA_MEMCPY3D) Init |session| {
        let parameters = session.node(node as u64)?.copy_parameters().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(to, parameters)
    }

    // The stand-in's only kernels are host functions.
    cuGraphKernelNodeGetParams_v2(_node: CUgraphNode, _to: *mut c_void) Init |_session| { Err(CUDA_ERROR_NOT_SUPPORTED) }

    cuGraphMemAllocNodeGetParams(node: CUgraphNode, to: *mut CUDA_MEM_ALLOC_NODE_PARAMS) Init |session| {
        let What::Allocate { start } = *session.node(node as u64)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        let len = session.memory.regions.get(&start).map_or(0, |region| region.len as usize);
        // SAFETY: zero is a value of each of its fields.
        let mut parameters: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
        (parameters.dptr, parameters.bytesize) = (start, len);
        put(to, parameters)
    }

    cuGraphMemFreeNodeGetParams(node: CUgraphNode, to: *mut CUdeviceptr) Init |session| {
        let What::Free { start } = *session.node(node as u64)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        put(to, start)
    }

    cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) Context |session| {
        if flags & !15 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let handle = session.instantiate(graph as u64)?;
        put(executable, handle as CUgraphExec)
    }

    cuGraphLaunch(executable: CUgraphExec, stream: CUstream) Context |session| {
        let stream = session.stream(stream as u64)?;
        session.launch_graph(executable as u64, stream)
    }

    cuGraphDestroy(graph: CUgraph) Init |session| {
        let handle = graph as u64;
        match session.graphs.remove(&handle) {
            Some(gone) => {
                session.leave_graph(&gone);
                Ok(())
            }
            None => session.wrong(
                CUDA_ERROR_INVALID_VALUE,
                format!("graph {handle:#x} is destroyed but not alive (destroyed twice?)"),
            ),
        }
    }

    cuGraphExecDestroy(executable: CUgraphExec) Init |session| {
        // A launch under way goes on, as in the programming guide's example of user objects.
        let device = session.executable(executable as u64)?.graph.device;
        if let Some(gone) = session.executables.remove(&(executable as u64)) {
            session.leave_graph(&gone.graph);
        }
        session.device(device)?.failed.map_or(Ok(()), |(code, _)| Err(code))
    }
}
