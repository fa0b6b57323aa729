//! The nodes of a graph describe the recorded operations.

use std::mem::MaybeUninit;
use std::ptr;

use cuda_stand_in::StandIn;
use cudarc::driver::sys::{CUgraph, CUgraphNode, CUgraphNodeType, CUmemorytype, CUresult};

use crate::graphs::{THREAD_LOCAL, allocate_in, begin, destroy, end, enqueue_double};
use crate::program::{Program, allocate, cuda, download, free_pinned, pinned, stream, upload};

/// Returns the nodes of a graph, given room for this many.
fn nodes(graph: CUgraph, room: usize) -> Vec<CUgraphNode> {
    let (mut nodes, mut count) = (vec![ptr::dangling_mut(); room], room);
    cuda!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count)).unwrap();
    assert!(nodes.split_off(count).iter().all(|node| node.is_null()), "the rest is null");
    nodes
}

#[test]
fn a_graph_tells_its_nodes() {
    use CUgraphNodeType::*;
    use CUmemorytype::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
    let program = Program::start();
    let lane = stream();
    let (input, output) = (pinned(&[3; 8]), pinned(&[0; 8]));
    let memory = allocate(32).unwrap();
    begin(lane, THREAD_LOCAL);
    upload(memory, input, lane).unwrap();
    cuda!(cuMemcpyDtoDAsync_v2(memory + 16, memory, 4, lane)).unwrap();
    cuda!(cuMemsetD8Async(memory + 20, 1, 4, lane)).unwrap();
    StandIn::touch(lane as u64, memory + 16, 1, true).unwrap();
    enqueue_double(lane, memory + 16).unwrap();
    download(output, memory + 16, lane).unwrap();
    let graph = end(lane).unwrap();
    let mut count = 0;
    cuda!(cuGraphGetNodes(graph, ptr::null_mut(), &mut count)).unwrap();
    let all = nodes(graph, 7);
    assert_eq!((count, all.len()), (5, 5), "what a kernel touches is no node");
    assert_eq!(nodes(graph, 2), all[..2]);
    let kinds = [
        CU_GRAPH_NODE_TYPE_MEMCPY,
        CU_GRAPH_NODE_TYPE_MEMCPY,
        CU_GRAPH_NODE_TYPE_MEMSET,
        CU_GRAPH_NODE_TYPE_HOST,
        CU_GRAPH_NODE_TYPE_MEMCPY,
    ];
    for (node, expected) in all.iter().zip(kinds) {
        let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
        cuda!(cuGraphNodeGetType(*node, &mut kind)).unwrap();
        assert_eq!(kind, expected);
    }
    // The ends of a copy, each with the kind of memory, the host address and the device address;
    // and the length of the copy.
    let (from, to) = (input.as_ptr().addr(), output.as_ptr().addr());
    let copies = [
        (0, (HOST, from, 0), (DEVICE, 0, memory), 8),
        (1, (DEVICE, 0, memory), (DEVICE, 0, memory + 16), 4),
        (4, (DEVICE, 0, memory + 16), (HOST, to, 0), 8),
    ];
    for (index, from, to, len) in copies {
        let mut copy = MaybeUninit::uninit();
        cuda!(cuGraphMemcpyNodeGetParams(all[index], copy.as_mut_ptr())).unwrap();
        // SAFETY: the call has succeeded.
        let copy = unsafe { copy.assume_init() };
        assert_eq!((copy.srcMemoryType, copy.srcHost.addr(), copy.srcDevice), from);
        assert_eq!((copy.dstMemoryType, copy.dstHost.addr(), copy.dstDevice), to);
        assert_eq!((copy.WidthInBytes, copy.Height, copy.Depth), (len, 1, 1));
    }
    let mut copy = MaybeUninit::uninit();
    assert_eq!(cuda!(cuGraphMemcpyNodeGetParams(all[3], copy.as_mut_ptr())), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(program.stand_in.mistakes(), Vec::<String>::new());
    // A node dies with its graph.
    cuda!(cuGraphDestroy(graph)).unwrap();
    let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
    assert_eq!(cuda!(cuGraphNodeGetType(all[0], &mut kind)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(cuda!(cuGraphGetNodes(graph, ptr::null_mut(), &mut count)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.len() == 2 && mistakes.iter().all(|mistake| mistake.contains("destroyed")), "{mistakes:?}");
    program.stand_in.forget();
    cuda!(cuMemFree_v2(memory)).unwrap();
    free_pinned(input);
    free_pinned(output);
    destroy(&[lane]);
    program.finish();
}

#[test]
fn a_graph_tells_what_memory_it_takes_and_frees() {
    use CUgraphNodeType::*;
    let program = Program::start();
    let lane = stream();
    begin(lane, THREAD_LOCAL);
    let memory = allocate_in(lane, 640).unwrap();
    cuda!(cuMemFreeAsync(memory, lane)).unwrap();
    let graph = end(lane).unwrap();
    let all = nodes(graph, 2);
    for (node, expected) in all.iter().zip([CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE]) {
        let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
        cuda!(cuGraphNodeGetType(*node, &mut kind)).unwrap();
        assert_eq!(kind, expected);
    }
    let (mut taken, mut freed) = (MaybeUninit::zeroed(), 0);
    cuda!(cuGraphMemAllocNodeGetParams(all[0], taken.as_mut_ptr())).unwrap();
    cuda!(cuGraphMemFreeNodeGetParams(all[1], &mut freed)).unwrap();
    // SAFETY: the call has succeeded.
    let taken = unsafe { taken.assume_init() };
    assert_eq!((taken.dptr, taken.bytesize, freed), (memory, 640, memory));
    assert!(cuda!(cuGraphMemFreeNodeGetParams(all[0], &mut freed)).is_err());
    cuda!(cuGraphDestroy(graph)).unwrap();
    destroy(&[lane]);
    program.finish();
}
