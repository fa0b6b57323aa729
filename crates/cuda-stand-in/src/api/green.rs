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
/// The least share of a device of this compute capability, and what shares are multiples of (cuda.h, at
/// `cuDevSmResourceSplitByCount`).
fn grain(capability: (i32, i32)) -> (u32, u32) {
    match capability.0 {
        ..7 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        9.. => (8, 8),
    }
}

/// Both of them where co-scheduling is ignored.
const FINE_GRAIN: (u32, u32) = (2, 2);

/// Marks resources of the stand-in, so that made-up ones are seen.
const MARK: u32 = 0x5354_4e44;

/// A range of multiprocessors as the API passes it around; which ones they are stands in the part that is the driver's own.
fn resource(grain: (u32, u32), device: c_int, first: u32, count: u32, split: bool) -> CUdevResource {
    let mut padding = [0; 92];
    for (at, value) in [MARK, device as u32, first, split as u32].into_iter().enumerate() {
        padding[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let sm = CUdevSmResource { smCount: count, minSmPartitionSize: grain.0, smCoscheduledAlignment: grain.1 };
    let mut share = CUdevResource_st__bindgen_ty_1 { _oversize: [0; 48] };
    share.sm = sm;
    CUdevResource {
        type_: CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM,
        _internal_padding: padding,
        __bindgen_anon_1: share,
    }
}

/// The device, the first multiprocessor and the count of a resource; whether it comes out of a split.
fn range(session: &mut Session, from: *const CUdevResource) -> Outcome<((c_int, u32, u32), bool)> {
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
    Ok(((word(1) as c_int, word(2), count), word(3) != 0))
}

fn whole(session: &mut Session, to: *mut CUdevResource, device: CUdevice, kind: c_uint) -> Outcome {
    let count = session.device(device)?.config.multiprocessors;
    if kind != MULTIPROCESSORS {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let grain = grain(session.device(device)?.config.capability);
    put(to, resource(grain, device, 0, count, false))
}

/// The resource of a context: its share, or the whole device.
fn of_context(session: &mut Session, handle: u64, to: *mut CUdevResource, kind: c_uint) -> Outcome {
    let found = session.contexts.get(&handle).map(|context| (context.device, context.partition));
    match found {
        Some((device, Some((first, count)))) if kind == MULTIPROCESSORS => {
            let grain = grain(session.device(device)?.config.capability);
            put(to, resource(grain, device, first, count, false))
        }
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
        let ((device, first, count), split) = range(session, input)?;
        if split {
            // As documented: only behind a green context of its own. The rest may be, though the documentation advises against it.
            return session.wrong(CUDA_ERROR_INVALID_VALUE, "a resource that comes out of a split is split again");
        }
        if flags & !(IGNORE_COSCHEDULING | CLUSTERS) != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let wanted = get(groups)?;
        let whole = grain(session.device(device)?.config.capability);
        let (smallest, multiple) = if flags & IGNORE_COSCHEDULING != 0 { FINE_GRAIN } else { whole };
        let size = least.max(smallest).checked_next_multiple_of(multiple).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if size > count {
            return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        }
        // Without room for results, only the largest number of groups is asked for.
        let made = if result.is_null() { count / size } else { wanted.min(count / size) };
        if !result.is_null() {
            for index in 0..made {
                put(result.wrapping_add(index as usize), resource(whole, device, first + index * size, size, true))?;
            }
            if !rest.is_null() {
                put(rest, resource(whole, device, first + made * size, count - made * size, false))?;
            }
        }
        put(groups, made)
    }

    cuDevResourceGenerateDesc(description: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint) Init |session| {
        let mut parts = Vec::new();
        for index in 0..count as usize {
            parts.push(range(session, resources.wrapping_add(index))?.0);
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
