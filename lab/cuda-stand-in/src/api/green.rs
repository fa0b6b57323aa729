//! Green contexts: shares of a device's multiprocessors.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{
    CUdevResource, CUdevResource_st__bindgen_ty_1, CUdevResourceDesc, CUdevResourceType, CUdevSmResource, CUdevice,
    CUgreenCtx, CUstream,
};

use super::{get, put};
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{NON_BLOCKING, Stream};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const MULTIPROCESSORS: c_uint = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: c_uint = 1;
/// Returns the least share of a device of this compute capability, and the step between shares
/// (cuda.h, at `cuDevSmResourceSplitByCount`).
fn grain(capability: (i32, i32)) -> (u32, u32) {
    match capability.0 {
        ..7 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        9.. => (8, 8),
    }
}

/// The multiprocessors of each GPU processing cluster in turn. Multiprocessors that are scheduled
/// together in one group must lie in one cluster. So an H100 of 132 gives 15 groups of 8 and 12
/// single ones (as observed on an H100), not 16 groups.
const CLUSTER_SIZES: [u32; 8] = [18, 18, 18, 16, 16, 16, 16, 14];

/// Marks the stand-in's resources, so that made-up ones are noticed.
const MARK: u32 = 0x5354_4e44;

/// Multiprocessors of a device, as the driver knows them; the API's resources point to this.
#[derive(Clone, Debug)]
pub struct Resource {
    device: c_int,
    /// Numbers of multiprocessors, ascending.
    multiprocessors: Vec<u32>,
    /// The call that split it off, if any.
    split: Option<u64>,
}

/// Returns a resource to the caller in the API's form.
fn give(session: &mut Session, to: *mut CUdevResource, resource: Resource) -> Outcome {
    let grain = grain(session.device(resource.device)?.config.capability);
    let count = resource.multiprocessors.len() as u32;
    let number = session.resources.len() as u32;
    session.resources.push(resource);
    let mut padding = [0; 92];
    for (at, value) in [MARK, number].into_iter().enumerate() {
        padding[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let sm = CUdevSmResource { smCount: count, minSmPartitionSize: grain.0, smCoscheduledAlignment: grain.1 };
    let mut share = CUdevResource_st__bindgen_ty_1 { _oversize: [0; 48] };
    share.sm = sm;
    let type_ = match count {
        0 => CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID,
        _ => CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM,
    };
    put(to, CUdevResource { type_, _internal_padding: padding, __bindgen_anon_1: share })
}

/// Reads the resource that the API's form points to.
fn taken(session: &mut Session, from: *const CUdevResource) -> Outcome<Resource> {
    let resource = get(from)?;
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&resource._internal_padding[at * 4..at * 4 + 4]);
        u32::from_ne_bytes(bytes)
    };
    let found = session.resources.get(word(1) as usize).filter(|_| word(0) == MARK).cloned();
    match found {
        Some(found) if resource.type_ == CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM => Ok(found),
        _ => session
            .wrong(CUDA_ERROR_INVALID_RESOURCE_TYPE, "a resource that the driver did not make, or of the wrong kind"),
    }
}

/// Returns runs of `size` multiprocessors that are scheduled together, each in one cluster.
fn runs(multiprocessors: &[u32], size: u32) -> Vec<Vec<u32>> {
    let mut clusters: Vec<Vec<u32>> = Vec::new();
    let (mut cluster, mut end) = (0, 0);
    for number in multiprocessors {
        while *number >= end {
            end += CLUSTER_SIZES[cluster % CLUSTER_SIZES.len()];
            cluster += 1;
            clusters.push(Vec::new());
        }
        clusters.last_mut().into_iter().for_each(|cluster| cluster.push(*number));
    }
    let whole = |cluster: &Vec<u32>| -> Vec<Vec<u32>> {
        cluster.chunks_exact(size.max(1) as usize).map(<[u32]>::to_vec).collect()
    };
    clusters.iter().flat_map(whole).collect()
}

/// Returns a living green context.
fn green(session: &mut Session, handle: CUgreenCtx) -> Outcome<(u64, c_int)> {
    let handle = handle as u64;
    match session.contexts.get(&handle) {
        Some(context) if context.partition.is_some() => Ok((handle, context.device)),
        _ => session.wrong(CUDA_ERROR_INVALID_CONTEXT, format!("green context {handle:#x} is used but not alive")),
    }
}

api! {
    cuDeviceGetDevResource(device: CUdevice, to: *mut CUdevResource, kind: c_uint) Init |session| {
        let count = session.device(device)?.config.multiprocessors;
        if kind != MULTIPROCESSORS {
            return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
        }
        give(session, to, Resource { device, multiprocessors: (0..count).collect(), split: None })
    }

    cuDevSmResourceSplitByCount(
        result: *mut CUdevResource,
        groups: *mut c_uint,
        input: *const CUdevResource,
        remaining: *mut CUdevResource,
        flags: c_uint,
        least: c_uint,
    ) Init |session| {
        let Resource { device, multiprocessors, split } = taken(session, input)?;
        if split.is_some() {
            // As documented, only a green context's resource can be split again. The error code is
            // not documented.
            return session
                .wrong(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "a resource that comes out of a split is split again");
        }
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let wanted = get(groups)?;
        let (smallest, multiple) = grain(session.device(device)?.config.capability);
        let size = least.max(smallest).checked_next_multiple_of(multiple).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let runs = runs(&multiprocessors, multiple);
        let possible: Vec<Vec<u32>> =
            runs.chunks_exact((size / multiple) as usize).map(|runs| runs.concat()).collect();
        if possible.is_empty() {
            return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        }
        let split = Some(session.handle());
        let made = &possible[..possible.len().min(wanted as usize)];
        let rest = {
            let is_left = |number: &u32| !made.iter().any(|group| group.contains(number));
            (!remaining.is_null()).then(|| multiprocessors.iter().copied().filter(is_left).collect())
        };
        for (index, multiprocessors) in made.iter().cloned().enumerate() {
            give(session, result.wrapping_add(index), Resource { device, multiprocessors, split })?;
        }
        if let Some(multiprocessors) = rest {
            give(session, remaining, Resource { device, multiprocessors, split })?;
        }
        put(groups, made.len() as u32)
    }

    cuDevResourceGenerateDesc(description: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint) Init |session| {
        let mut parts = Vec::new();
        for index in 0..count as usize {
            parts.push(taken(session, resources.wrapping_add(index))?);
        }
        let Some(Resource { device, split, .. }) = parts.first().cloned() else { return Err(CUDA_ERROR_INVALID_VALUE) };
        // As documented, for several resources.
        if parts.len() > 1 && (split.is_none() || parts.iter().any(|part| part.device != device || part.split != split)) {
            return session.wrong(
                CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
                "resources that are not all of one device, or do not come out of one split",
            );
        }
        let mut all: Vec<u32> = parts.into_iter().flat_map(|part| part.multiprocessors).collect();
        all.sort_unstable();
        if all.windows(2).any(|pair| pair[0] == pair[1]) {
            return session.wrong(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "a resource is given twice");
        }
        let handle = session.handle();
        session.descriptors.insert(handle, (device, all));
        put(description, handle as CUdevResourceDesc)
    }

    cuGreenCtxCreate(context: *mut CUgreenCtx, description: CUdevResourceDesc, device: CUdevice, flags: c_uint) Init |session| {
        let Some((owner, multiprocessors)) = session.descriptors.get(&(description as u64)).cloned() else {
            return session.wrong(CUDA_ERROR_INVALID_VALUE, "a resource descriptor that the driver did not make");
        };
        if owner != device || flags != DEFAULT_STREAM {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        session.faults.allocation(0)?;
        // As documented, a green context retains the primary context.
        session.retain_primary(device)?;
        let handle = session.add_context(device, Some(multiprocessors));
        put(context, handle as CUgreenCtx)
    }

    cuGreenCtxDestroy(context: CUgreenCtx) Init |session| {
        let (handle, device) = green(session, context)?;
        // As documented, its streams stay: the program must destroy them.
        session.contexts.remove(&handle);
        session.release_primary(device)
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
