//! Green contexts: shares of a device's multiprocessors.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{
    CUcontext, CUdevResource, CUdevResource_st__bindgen_ty_1, CUdevResourceDesc, CUdevResourceType, CUdevSmResource,
    CUdevice, CUgreenCtx, CUstream,
};

use super::{get, put};
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{NON_BLOCKING, Stream};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const MULTIPROCESSORS: c_uint = 1;
/// `CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING`, `..._MAX_POTENTIAL_CLUSTER_SIZE`.
const IGNORE_COSCHEDULING: c_uint = 1;
const CLUSTERS: c_uint = 2;
/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: c_uint = 1;
/// The multiples in which a device of compute capability 9.0 is shared out, and its least share; 2 where the grain is ignored.
const GRAIN: u32 = 8;
const FINE_GRAIN: u32 = 2;

/// Marks resources of the stand-in, so that made-up ones are seen.
const MARK: u32 = 0x5354_4e44;

/// A range of multiprocessors as the API passes it around; which ones they are stands in the part that is the driver's own.
fn resource(device: c_int, first: u32, count: u32) -> CUdevResource {
    let mut padding = [0; 92];
    for (at, value) in [MARK, device as u32, first].into_iter().enumerate() {
        padding[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let sm = CUdevSmResource { smCount: count, minSmPartitionSize: GRAIN, smCoscheduledAlignment: GRAIN };
    let mut share = CUdevResource_st__bindgen_ty_1 { _oversize: [0; 48] };
    share.sm = sm;
    CUdevResource {
        type_: CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM,
        _internal_padding: padding,
        __bindgen_anon_1: share,
    }
}

/// The device, the first multiprocessor and the count of a resource.
fn range(session: &mut Session, from: *const CUdevResource) -> Outcome<(c_int, u32, u32)> {
    let resource = get(from)?;
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&resource._internal_padding[at * 4..at * 4 + 4]);
        u32::from_ne_bytes(bytes)
    };
    if word(0) != MARK || resource.type_ != CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM {
        return session
            .wrong(CUDA_ERROR_INVALID_VALUE, "a resource that the driver did not make, or of the wrong kind");
    }
    // SAFETY: the mark says that `resource` above made it, which sets this field.
    let count = unsafe { resource.__bindgen_anon_1.sm.smCount };
    Ok((word(1) as c_int, word(2), count))
}

fn whole(session: &mut Session, to: *mut CUdevResource, device: CUdevice, kind: c_uint) -> Outcome {
    let count = session.device(device)?.config.multiprocessors;
    if kind != MULTIPROCESSORS {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(to, resource(device, 0, count))
}

/// The resource of a context: its share, or the whole device.
fn of_context(session: &mut Session, handle: u64, to: *mut CUdevResource, kind: c_uint) -> Outcome {
    let found = session.contexts.get(&handle).map(|context| (context.device, context.partition));
    match found {
        Some((device, Some((first, count)))) if kind == MULTIPROCESSORS => put(to, resource(device, first, count)),
        Some((device, _)) => whole(session, to, device, kind),
        None => session.wrong(CUDA_ERROR_INVALID_CONTEXT, format!("context {handle:#x} is used but not alive")),
    }
}

/// A green context that is alive.
fn green(session: &mut Session, handle: CUgreenCtx) -> Outcome<(u64, c_int)> {
    let handle = handle as u64;
    match session.contexts.get(&handle) {
        Some(context) if context.partition.is_some() => Ok((handle, context.device)),
        _ => session.wrong(CUDA_ERROR_INVALID_CONTEXT, format!("green context {handle:#x} is used but not alive")),
    }
}

api! {
    cuDeviceGetDevResource(device: CUdevice, to: *mut CUdevResource, kind: c_uint) Init |session| {
        whole(session, to, device, kind)
    }

    cuCtxGetDevResource(context: CUcontext, to: *mut CUdevResource, kind: c_uint) Init |session| {
        of_context(session, context as u64, to, kind)
    }

    cuGreenCtxGetDevResource(context: CUgreenCtx, to: *mut CUdevResource, kind: c_uint) Init |session| {
        let (handle, _) = green(session, context)?;
        of_context(session, handle, to, kind)
    }

    cuDevSmResourceSplitByCount(
        result: *mut CUdevResource,
        groups: *mut c_uint,
        input: *const CUdevResource,
        rest: *mut CUdevResource,
        flags: c_uint,
        least: c_uint,
    ) Init |session| {
        let (device, first, count) = range(session, input)?;
        if flags & !(IGNORE_COSCHEDULING | CLUSTERS) != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let wanted = get(groups)?;
        let grain = if flags & IGNORE_COSCHEDULING != 0 { FINE_GRAIN } else { GRAIN };
        let size = least.max(1).checked_next_multiple_of(grain).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if size > count {
            return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        }
        // Without room for results, only the largest number of groups is asked for.
        let made = if result.is_null() { count / size } else { wanted.min(count / size) };
        if !result.is_null() {
            for index in 0..made {
                put(result.wrapping_add(index as usize), resource(device, first + index * size, size))?;
            }
            if !rest.is_null() {
                put(rest, resource(device, first + made * size, count - made * size))?;
            }
        }
        put(groups, made)
    }

    cuDevResourceGenerateDesc(description: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint) Init |session| {
        let mut parts = Vec::new();
        for index in 0..count as usize {
            parts.push(range(session, resources.wrapping_add(index))?);
        }
        parts.sort_unstable();
        let Some((device, first, _)) = parts.first().copied() else { return Err(CUDA_ERROR_INVALID_VALUE) };
        let together = parts.windows(2).all(|pair| pair[0].0 == pair[1].0 && pair[0].1 + pair[0].2 == pair[1].1);
        let sum: u32 = parts.iter().map(|(_, _, count)| count).sum();
        if !together || sum == 0 {
            return session.wrong(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "resources that do not lie side by side");
        }
        let handle = session.handle();
        session.descriptors.insert(handle, (device, first, sum));
        put(description, handle as CUdevResourceDesc)
    }

    cuGreenCtxCreate(context: *mut CUgreenCtx, description: CUdevResourceDesc, device: CUdevice, flags: c_uint) Init |session| {
        let Some((owner, first, count)) = session.descriptors.get(&(description as u64)).copied() else {
            return session.wrong(CUDA_ERROR_INVALID_VALUE, "a resource descriptor that the driver did not make");
        };
        if owner != device || flags != DEFAULT_STREAM {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        session.faults.allocation(0)?;
        // As documented, a green context holds the primary one.
        session.retain_primary(device)?;
        let handle = session.add_context(device, Some((first, count)));
        put(context, handle as CUgreenCtx)
    }

    cuGreenCtxDestroy(context: CUgreenCtx) Init |session| {
        let (handle, device) = green(session, context)?;
        // Its streams stay, as documented: the program has to destroy them.
        session.contexts.remove(&handle);
        session.release_primary(device)
    }

    cuCtxFromGreenCtx(context: *mut CUcontext, from: CUgreenCtx) Init |session| {
        let (handle, _) = green(session, from)?;
        put(context, handle as CUcontext)
    }

    cuGreenCtxStreamCreate(stream: *mut CUstream, context: CUgreenCtx, flags: c_uint, priority: c_int) Init |session| {
        let (owner, device) = green(session, context)?;
        if flags != NON_BLOCKING {
            return session.wrong(CUDA_ERROR_INVALID_VALUE, "a stream of a green context must be CU_STREAM_NON_BLOCKING");
        }
        session.device(device)?.failed.map_or(Ok(()), |(code, _)| Err(code))?;
        let handle = session.handle();
        session.streams.insert(handle, Stream::new(device, owner, flags, priority.clamp(-5, 0), false));
        put(stream, handle as CUstream)
    }
}
