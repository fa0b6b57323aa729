//! Checks the nodes of a recorded graph before it is used: some recorded work must not be repeated.

use std::collections::BTreeSet;
use std::ffi::c_uint;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUgraph, CUgraphNode, CUmemorytype,
};
use cudarc::driver::sys::{CUgraphNodeType as Kind, CUpointer_attribute};
use downbeat_engine::graph_report::GraphNodes;

use super::Device;

/// Checks that a graph, recorded from a library's calls, may be launched again and again, and
/// returns its nodes. All of its work must be on the device, in memory that stays. A library may
/// compute values on the host during a run, and copy them. The graph would repeat the copy from an
/// address that is freed after the run.
///
/// The graph may allocate memory of the device if it frees it again, as cuBLAS does for its
/// workspace. Such memory belongs to the graph, and exists in each launch between the two nodes.
/// Memory that stays allocated would have to be freed before the next launch.
///
/// Kernels are not examined: a kernel that reads host memory goes unnoticed.
///
/// # Safety
/// The graph must be alive.
///
/// # Errors
/// In words: the work that cannot be repeated, or that the graph is empty.
pub(super) unsafe fn check_repeatable(graph: CUgraph, device: &Device) -> Result<GraphNodes, String> {
    // The stand-in's kernels are functions of the host.
    let has_host_kernels = super::stands_in();
    let (mut found, mut taken, mut freed) = (GraphNodes::default(), BTreeSet::new(), BTreeSet::new());
    // SAFETY: the caller's promise.
    for node in unsafe { nodes(graph, device) }? {
        let mut kind: c_uint = 0;
        // SAFETY: the node is the graph's. The kind is written as a number, its type in C: a newer
        // driver knows kinds that the enum lacks and must not hold.
        let told = unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) };
        device.check("asking what a node of a graph is", told.result())?;
        let is = |other: Kind| kind == other as c_uint;
        if is(Kind::CU_GRAPH_NODE_TYPE_EMPTY) {
            continue;
        }
        found.count += 1;
        if is(Kind::CU_GRAPH_NODE_TYPE_MEMSET) {
            continue;
        }
        if is(Kind::CU_GRAPH_NODE_TYPE_KERNEL) {
            // SAFETY: as above, and it is a kernel.
            found.grids.extend(unsafe { blocks(node) });
        } else if is(Kind::CU_GRAPH_NODE_TYPE_MEMCPY) {
            // SAFETY: as above, and it is a copy.
            unsafe { check_copy(node, device) }?;
        } else if is(Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
            found.allocations += 1;
            // SAFETY: as above, and it is an allocation.
            taken.insert(unsafe { allocated(node, device) }?);
        } else if is(Kind::CU_GRAPH_NODE_TYPE_MEM_FREE) {
            let mut address = 0;
            // SAFETY: as above; there is room for the answer.
            let told = unsafe { sys::cuGraphMemFreeNodeGetParams(node, &raw mut address) };
            device.check("asking what a graph frees", told.result())?;
            freed.insert(address);
        } else if !(has_host_kernels && is(Kind::CU_GRAPH_NODE_TYPE_HOST)) {
            return Err(format!("the segment {} while it runs, which a graph cannot repeat", deed(kind)));
        }
    }
    if taken != freed {
        let deed = if taken.is_subset(&freed) {
            "frees memory that it has not taken"
        } else {
            "takes memory of the device that it does not free"
        };
        return Err(format!("the segment {deed} while it runs, which a graph cannot repeat"));
    }
    if found.count > 0 { Ok(found) } else { Err("nothing was recorded".into()) }
}

/// The number of blocks of a kernel, if the driver knows it.
///
/// # Safety
/// The node must be alive and a kernel.
unsafe fn blocks(node: CUgraphNode) -> Option<u64> {
    let mut parameters = MaybeUninit::<CUDA_KERNEL_NODE_PARAMS>::zeroed();
    let to = parameters.as_mut_ptr();
    // SAFETY: the caller's promise; there is room for the answer.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, to) }.result().ok()?;
    // SAFETY: written by the call, or zero.
    let sizes = unsafe { [(*to).gridDimX, (*to).gridDimY, (*to).gridDimZ] };
    Some(sizes.into_iter().map(u64::from).product())
}

/// The address of the memory that a node allocates.
///
/// # Safety
/// The node must be alive and an allocation.
unsafe fn allocated(node: CUgraphNode, device: &Device) -> Result<sys::CUdeviceptr, String> {
    // Read through a pointer: the whole struct may hold kinds of memory that the enums lack.
    let mut parameters = MaybeUninit::<CUDA_MEM_ALLOC_NODE_PARAMS>::zeroed();
    let to = parameters.as_mut_ptr();
    // SAFETY: the caller's promise; there is room for the answer.
    let told = unsafe { sys::cuGraphMemAllocNodeGetParams(node, to) };
    device.check("asking what memory a graph takes", told.result())?;
    // SAFETY: written by the call, or zero.
    Ok(unsafe { (*to).dptr })
}

/// # Safety
/// The graph must be alive.
unsafe fn nodes(graph: CUgraph, device: &Device) -> Result<Vec<CUgraphNode>, String> {
    let check = |answer: sys::CUresult| device.check("listing the nodes of a graph", answer.result());
    let mut count = 0;
    // SAFETY: the caller's promise; without a list the call writes only the number.
    check(unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) })?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // The driver refuses an empty list.
    if count > 0 {
        // SAFETY: as above; the list has room for `count`.
        check(unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) })?;
        nodes.truncate(count);
    }
    Ok(nodes)
}

/// Refuses a copy from or to host memory.
///
/// # Safety
/// The node must be alive and a copy.
unsafe fn check_copy(node: CUgraphNode, device: &Device) -> Result<(), String> {
    // Read through pointers: the whole struct may hold kinds of memory that the enum lacks.
    let mut copy = MaybeUninit::<CUDA_MEMCPY3D>::zeroed();
    let to = copy.as_mut_ptr();
    // SAFETY: the caller's promise; there is room for the answer.
    let told = unsafe { sys::cuGraphMemcpyNodeGetParams(node, to) };
    device.check("asking what a graph copies", told.result())?;
    // SAFETY: written by the call, or zero; numbers may have any value, and the kinds are read as
    // numbers.
    let (source, target) = unsafe {
        let (from_kind, to_kind) = (&raw const (*to).srcMemoryType, &raw const (*to).dstMemoryType);
        ((from_kind.cast::<c_uint>().read(), (*to).srcDevice), (to_kind.cast::<c_uint>().read(), (*to).dstDevice))
    };
    for ((kind, address), word) in [(source, "from"), (target, "to")] {
        if !is_on_device(kind, address) {
            return Err(format!("the segment copies {word} host memory while it runs, which a graph cannot repeat"));
        }
    }
    Ok(())
}

/// Whether an end of a copy is in a device's memory. The driver may leave the answer to the
/// address.
fn is_on_device(kind: c_uint, address: sys::CUdeviceptr) -> bool {
    const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
    if kind != CUmemorytype::CU_MEMORYTYPE_UNIFIED as c_uint {
        return kind == DEVICE || kind == CUmemorytype::CU_MEMORYTYPE_ARRAY as c_uint;
    }
    let mut found: c_uint = 0;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: any address is allowed; there is room for the answer, a number.
    let told = unsafe { sys::cuPointerGetAttribute((&raw mut found).cast(), attribute, address) };
    // For host memory that the driver does not know, the call fails.
    told == sys::CUresult::CUDA_SUCCESS && found == DEVICE
}

/// A description of a node that cannot be repeated.
fn deed(kind: c_uint) -> String {
    let is = |other: Kind| kind == other as c_uint;
    if is(Kind::CU_GRAPH_NODE_TYPE_HOST) {
        "calls a function of the host".into()
    } else if is(Kind::CU_GRAPH_NODE_TYPE_GRAPH) {
        "launches a graph of its own".into()
    } else {
        format!("does what the driver numbers {kind} (CUgraphNodeType)")
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::Arc;

    use cuda_stand_in::StandIn;
    use cudarc::driver::{DriverError, result};

    use super::*;
    use crate::cuda::{DeviceAllocation, DeviceSlice, PinnedPool, Stream};
    use downbeat_engine::tensor::Lent;

    fn start() -> (StandIn, Arc<Device>, Arc<Stream>) {
        let stand_in = StandIn::lock();
        result::init().expect("the stand-in is loaded");
        let device = Device::open(0).expect("it has one");
        let stream = Stream::new(&device).expect("made");
        (stand_in, device, stream)
    }

    unsafe extern "C" fn nothing(_: *mut c_void) {}

    #[test]
    fn copies_of_host_memory_are_refused() {
        let (stand_in, device, stream) = start();
        let memory = DeviceAllocation::new(&device, 32, "a test").expect("taken");
        let pool = PinnedPool::new(&device);
        let mut pinned = pool.take(16).expect("taken");
        let (from, to) = (memory.address(), memory.address() + 16);
        let record = |what: &str, enqueue: &mut dyn FnMut() -> Result<(), DriverError>| {
            let recorded = stream.record_graph(|| enqueue().map_err(|error| format!("{what}: {error}")));
            recorded.map(|(mut graph, ())| {
                graph.launch(&stream).expect("launched");
                stream.finish().expect("runs");
            })
        };
        // SAFETY: all memory outlives the recorded work, which is over when `record` returns.
        unsafe {
            let raw = stream.raw();
            assert_eq!(record("a copy", &mut || result::memcpy_dtod_async(to, from, 16, raw)), Ok(()));
            assert_eq!(record("a fill", &mut || result::memset_d8_async(from, 1, 16, raw)), Ok(()));
            let upload = record("an upload", &mut || {
                result::memset_d8_async(from, 1, 16, raw)?;
                result::memcpy_htod_async(from, pinned.bytes(), raw)
            });
            let refused =
                |word| format!("the segment copies {word} host memory while it runs, which a graph cannot repeat");
            assert_eq!(upload, Err(refused("from")));
            let download = record("a download", &mut || result::memcpy_dtoh_async(pinned.bytes_mut(), from, raw));
            assert_eq!(download, Err(refused("to")));
            // The kernels of the stand-in.
            let kernel =
                record("a kernel", &mut || result::stream::launch_host_function(raw, nothing, std::ptr::null_mut()));
            assert_eq!(kernel, Ok(()));
        }
        assert_eq!(record("nothing", &mut || Ok(())), Err("nothing was recorded".into()));
        assert_eq!(stand_in.calls("cuGraphInstantiateWithFlags"), 3, "what is refused is not made ready");
        drop((pinned, pool, memory, stream, device));
        stand_in.assert_clean();
    }

    /// The same as cuBLAS allocates its workspace during a recording.
    #[test]
    fn memory_that_a_graph_frees_again_is_its_own() {
        let (stand_in, device, stream) = start();
        let output = DeviceAllocation::new(&device, 16, "a test").expect("taken");
        let raw = stream.raw();
        let record = |frees: bool| {
            stream.record_graph(|| {
                // SAFETY: the memory is freed after its use, and `output` outlives the graph.
                let enqueued = unsafe {
                    result::malloc_async(raw, 16).and_then(|memory| {
                        result::memset_d8_async(memory, 7, 16, raw)?;
                        result::memcpy_dtod_async(output.address(), memory, 16, raw)?;
                        if frees { result::free_async(memory, raw) } else { Ok(()) }
                    })
                };
                enqueued.map_err(|error| error.to_string())
            })
        };
        let (mut graph, ()) = record(true).expect("it may be repeated");
        assert_eq!(graph.nodes(), &GraphNodes { count: 4, allocations: 1, grids: Vec::new() });
        for _ in 0..3 {
            // SAFETY: as above.
            unsafe { result::memset_d8_async(output.address(), 0, 16, raw) }.expect("enqueued");
            graph.launch(&stream).expect("what it took before is freed");
            // SAFETY: as above, and no work writes it once the stream is at its end.
            let whole = unsafe { DeviceSlice::new(device.clone(), output.address(), 16, None, Arc::new(())) };
            stream.finish().expect("runs");
            assert_eq!(whole.fetch().expect("copied"), [7; 16]);
        }
        let refused = record(false).err().expect("it cannot be repeated");
        assert_eq!(
            refused,
            "the segment takes memory of the device that it does not free while it runs, which a graph cannot repeat"
        );
        drop((graph, output, stream, device));
        stand_in.assert_clean();
    }

    #[test]
    fn a_copy_may_leave_the_kind_of_memory_to_the_address() {
        let (stand_in, device, stream) = start();
        let memory = DeviceAllocation::new(&device, 16, "a test").expect("taken");
        let pool = PinnedPool::new(&device);
        let pinned = pool.take(16).expect("taken");
        let pageable = [0_u8; 16];
        let [host, device_kind, array, unified] = [1, 2, 3, 4];
        for (kind, address, on_device) in [
            (host, 0, false),
            (device_kind, memory.address(), true),
            (array, 0, true),
            (unified, memory.address(), true),
            (unified, memory.address() + 15, true),
            (unified, pinned.bytes().as_ptr().addr() as u64, false),
            (unified, pageable.as_ptr().addr() as u64, false),
            (0, memory.address(), false),
            (5, memory.address(), false),
        ] {
            assert_eq!(is_on_device(kind, address), on_device, "{kind}, {address:#x}");
        }
        drop((pinned, pool, memory, stream, device));
        stand_in.assert_clean();
    }

    #[test]
    fn what_is_refused_is_said() {
        for (kind, words) in [(3, "function"), (4, "graph"), (13, "13"), (99, "99")] {
            assert!(deed(kind).contains(words), "{kind}");
        }
    }
}
