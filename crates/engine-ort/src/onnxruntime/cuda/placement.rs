//! The places of a session's inputs and outputs. Many operators need shapes and indices on the
//! host, even on a GPU.

use std::ffi::{CStr, c_char};
use std::ptr;

use downbeat_core::tensor::DataType;
use ort::session::Session;
use ort::value::Outlet;
use ort::{AsPointer, api, sys};

use super::super::value::check;
use super::blueprint::Blueprint;

/// For each input and output of a segment, in the order of its names: whether it is on the host.
///
/// The library copies values that are bound to another place. It copies an input at the binding and
/// not at the run.
pub(super) fn of(session: &Session, blueprint: &Blueprint) -> Result<(Vec<bool>, Vec<bool>), String> {
    type Ask =
        unsafe extern "system" fn(*const sys::OrtSession, *mut *const sys::OrtMemoryInfo, usize) -> sys::OrtStatusPtr;
    let inner = session.inner();
    let ask = |ask: Ask, outlets: &[Outlet], names: &[*const c_char]| -> Result<Vec<bool>, String> {
        let mut places = vec![ptr::null::<sys::OrtMemoryInfo>(); outlets.len()];
        // SAFETY: the session is alive and has as many outlets; the written pointers live as long
        // as the session.
        check(unsafe { ask(inner.ptr(), places.as_mut_ptr(), places.len()) })?;
        let on_host = |name: &*const c_char| {
            // SAFETY: names are C strings that the blueprint keeps.
            let name = unsafe { CStr::from_ptr(*name) };
            let index = outlets.iter().position(|outlet| outlet.name().as_bytes() == name.to_bytes());
            let place = index.and_then(|index| places.get(index)).copied().filter(|place| !place.is_null());
            let place = place.ok_or_else(|| format!("the segment has no '{}'", name.to_string_lossy()))?;
            let mut kind = ptr::null();
            // SAFETY: the description is the session's; `kind` is written if the call succeeds, and
            // is a constant.
            unsafe {
                check((api().MemoryInfoGetName)(place, &raw mut kind))?;
                Ok(kind.is_null() || CStr::from_ptr(kind) != c"Cuda")
            }
        };
        names.iter().map(on_host).collect()
    };
    let mut inputs = ask(api().SessionGetMemoryInfoForInputs, session.inputs(), blueprint.names.inputs())?;
    let outputs = ask(api().SessionGetMemoryInfoForOutputs, session.outputs(), blueprint.names.outputs())?;
    let is_text = |index: &usize| blueprint.wiring.before.get(*index).is_some_and(|s| s.datatype == DataType::Bytes);
    for (on_host, taken) in inputs.iter_mut().zip(&blueprint.wiring.takes) {
        *on_host |= is_text(taken);
    }
    let outputs = outputs.into_iter().zip(&blueprint.on_host).map(|(on_host, is_text)| on_host || *is_text).collect();
    Ok((inputs, outputs))
}
