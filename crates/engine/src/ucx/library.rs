//! UCX's library `libucp`, loaded at run time: the few functions that are called, and the structures that they take.
//!
//! Layouts and constants are those of `ucp.h` 1.13. A later library takes them as well: the version that it is asked for is 1.13, and each structure says which of its fields have a meaning.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::os::unix::{Library as Loaded, RTLD_LAZY};

use crate::onnxruntime::loader_words;

/// The library, as all that use it name it.
const NAME: &str = "libucp.so.0";
/// The version of the interface that is asked for, and so the oldest library.
const API: (c_uint, c_uint) = (1, 13);

pub(super) type Status = i8;
pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
/// `UCS_ERR_LAST`: what a function gives instead of a request is a status if it is not below this as an address.
const LAST: isize = -100;

/// `UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_REQUEST_INIT`.
pub(super) const CONTEXT_FIELDS: u64 = 1 | 1 << 2;
/// `UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP`.
pub(super) const RMA_AND_WAKEUP: u64 = 1 << 1 | 1 << 4;
/// `UCP_ATTR_FIELD_REQUEST_SIZE`.
pub(super) const REQUEST_SIZE: u64 = 1;
/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS`; the mode of one thread is 0.
pub(super) const WORKER_FIELDS: u64 = 1 | 1 << 5;
/// `UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK`: not a warning for each answer to a peer's read that was under way when the peer went. The library forgets those, and has them until their worker is destroyed.
pub(super) const FORGETS_REQUESTS: u64 = 1;
/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER`.
pub(super) const ENDPOINT_FIELDS: u64 = 1 | 1 << 1 | 1 << 2;
/// `UCP_ERR_HANDLING_MODE_PEER`: what is under way to a peer that is gone ends. Only with it can an endpoint be closed at once.
pub(super) const PEER_MAY_FAIL: c_int = 1;
/// `UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH`.
pub(super) const MEMORY_FIELDS: u64 = 1 | 1 << 1;
/// `UCP_OP_ATTR_FIELD_FLAGS`.
pub(super) const REQUEST_FLAGS: u32 = 1 << 4;
/// `UCP_EP_CLOSE_FLAG_FORCE`: without a word to the peer, and what is under way ends.
pub(super) const CLOSE_AT_ONCE: u32 = 1;

/// `ucp_params_t`.
#[repr(C)]
pub(super) struct ContextParams {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: RequestInit,
    pub unused: [u64; 6],
}

pub(super) type RequestInit = unsafe extern "C" fn(request: *mut c_void);

/// `ucp_context_attr_t`, with room for what later versions add.
#[repr(C)]
#[derive(Default)]
pub(super) struct ContextAttributes {
    pub field_mask: u64,
    pub request_size: usize,
    pub unused: [u64; 32],
}

/// `ucp_worker_params_t`.
#[repr(C)]
pub(super) struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_int,
    pub unset: [u64; 19],
    pub flags: u64,
    pub unused: [u64; 3],
}

pub(super) type ErrorHandler = unsafe extern "C" fn(argument: *mut c_void, endpoint: *mut c_void, status: Status);

/// `ucp_ep_params_t`.
#[repr(C)]
pub(super) struct EndpointParams {
    pub field_mask: u64,
    pub address: *const c_void,
    pub error_mode: c_int,
    pub error_handler: ErrorHandler,
    pub error_argument: *mut c_void,
    pub unused: [u64; 8],
}

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(super) struct MemoryParams {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub unused: [u64; 2],
}

/// `ucp_request_param_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct RequestParams {
    pub mask: u32,
    pub flags: u32,
    pub unused: [u64; 8],
}

const _: () = {
    assert!(size_of::<ContextParams>() == 80 && size_of::<WorkerParams>() == 200 && size_of::<EndpointParams>() == 104);
    assert!(size_of::<MemoryParams>() == 40 && size_of::<RequestParams>() == 72);
    assert!(
        std::mem::offset_of!(ContextParams, request_init) == 24 && std::mem::offset_of!(WorkerParams, flags) == 168
    );
    assert!(
        std::mem::offset_of!(WorkerParams, thread_mode) == 8 && std::mem::offset_of!(EndpointParams, error_mode) == 16
    );
    assert!(
        std::mem::offset_of!(EndpointParams, error_handler) == 24 && std::mem::offset_of!(RequestParams, flags) == 4
    );
};

/// Why UCX does not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// There is no such library.
    #[error(
        "UCX is not there: {0}: install it, version 1.13 or newer (on Debian: apt-get install libucx0), or leave it off"
    )]
    Missing(String),
    /// It is too old.
    #[error("UCX is of version {}.{}, and 1.13 or newer is needed: install that, or leave it off", .0.0, .0.1)]
    TooOld((u32, u32)),
    /// It is asked for what ends this process when a peer ends.
    #[error(
        "UCX_TLS has {0}, and UCX over tcp ends a process that a peer reads when that peer ends: name other transports, or none (every one but tcp is taken then)"
    )]
    Tcp(String),
    /// The system has no thread, or no wake-up, for it.
    #[error("UCX gets nothing to run on: {0}")]
    NoThread(String),
    /// A function of it has failed.
    #[error("{what} of UCX failed: {words}")]
    Failed {
        /// The function.
        what: &'static str,
        /// What it says.
        words: String,
    },
    /// A peer says what cannot be used here.
    #[error("{0}")]
    Refused(String),
    /// It was told to end meanwhile.
    #[error("UCX has ended in this process")]
    Ended,
}

/// The functions by their names, with their types in `ucp.h`.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?,)+) => {
        /// The library. It stays loaded: others may use it too, and it has threads and hooks of its own.
        pub(super) struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+
        }

        impl Library {
            fn find(loaded: &Loaded) -> Result<Library, UcxError> {
                Ok(Library {
                    // SAFETY: it has this type in every version since 1.13.
                    $($name: *unsafe { loaded.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|error| UcxError::Missing(format!("{NAME}: {}", loader_words(&error))))?,)+
                })
            }
        }
    };
}

functions! {
    ucp_get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint),
    ucp_config_read: fn(*const c_char, *const c_char, *mut *mut c_void) -> Status,
    ucp_config_modify: fn(*mut c_void, *const c_char, *const c_char) -> Status,
    ucp_config_release: fn(*mut c_void),
    ucp_init_version: fn(c_uint, c_uint, *const ContextParams, *const c_void, *mut *mut c_void) -> Status,
    ucp_context_query: fn(*mut c_void, *mut ContextAttributes) -> Status,
    ucp_cleanup: fn(*mut c_void),
    ucp_worker_create: fn(*mut c_void, *const WorkerParams, *mut *mut c_void) -> Status,
    ucp_worker_destroy: fn(*mut c_void),
    ucp_worker_get_address: fn(*mut c_void, *mut *mut c_void, *mut usize) -> Status,
    ucp_worker_release_address: fn(*mut c_void, *mut c_void),
    ucp_worker_get_efd: fn(*mut c_void, *mut c_int) -> Status,
    ucp_worker_arm: fn(*mut c_void) -> Status,
    ucp_worker_progress: fn(*mut c_void) -> c_uint,
    ucp_mem_map: fn(*mut c_void, *const MemoryParams, *mut *mut c_void) -> Status,
    ucp_mem_unmap: fn(*mut c_void, *mut c_void) -> Status,
    ucp_rkey_pack: fn(*mut c_void, *mut c_void, *mut *mut c_void, *mut usize) -> Status,
    ucp_rkey_buffer_release: fn(*mut c_void),
    ucp_ep_create: fn(*mut c_void, *const EndpointParams, *mut *mut c_void) -> Status,
    ucp_ep_close_nbx: fn(*mut c_void, *const RequestParams) -> *mut c_void,
    ucp_ep_rkey_unpack: fn(*mut c_void, *const c_void, *mut *mut c_void) -> Status,
    ucp_rkey_destroy: fn(*mut c_void),
    ucp_get_nbx: fn(*mut c_void, *mut c_void, usize, u64, *mut c_void, *const RequestParams) -> *mut c_void,
    ucp_request_check_status: fn(*mut c_void) -> Status,
    ucp_request_free: fn(*mut c_void),
    ucs_status_string: fn(Status) -> *const c_char,
}

impl Library {
    /// Loads it.
    ///
    /// # Errors
    /// If there is none, or it is too old.
    pub fn load() -> Result<Library, UcxError> {
        // SAFETY: runs the initialisers of a library that whoever runs this machine put there.
        let loaded = unsafe { Loaded::open(Some(NAME), RTLD_LAZY) };
        let loaded = loaded.map_err(|error| UcxError::Missing(loader_words(&error)))?;
        let library = Library::find(&loaded)?;
        std::mem::forget(loaded);
        let version = library.version();
        if version < API { Err(UcxError::TooOld(version)) } else { Ok(library) }
    }

    /// Its major and minor version.
    pub fn version(&self) -> (u32, u32) {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: it writes three numbers.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut release) };
        (major, minor)
    }

    /// What a function said.
    pub fn answer(&self, what: &'static str, status: Status) -> Result<(), UcxError> {
        if status == OK {
            return Ok(());
        }
        // SAFETY: it takes any status, and gives a text of the library, or none.
        let text = unsafe { (self.ucs_status_string)(status) };
        let words = match text.is_null() {
            true => format!("status {status}"),
            // SAFETY: not null, so C text that stays.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(UcxError::Failed { what, words })
    }

    /// What a function gave instead of a request: `None` if it is one.
    pub fn at_once(given: *mut c_void) -> Option<Status> {
        match given as isize {
            0 => Some(OK),
            #[allow(clippy::cast_possible_truncation, reason = "it is between them")]
            status @ LAST..0 => Some(status as Status),
            _ => None,
        }
    }

    /// A context, for reading others' memory and having one's own read, by the environment's `UCX_*`.
    pub fn context(&self) -> Result<*mut c_void, UcxError> {
        let transports = transports(std::env::var_os(TRANSPORTS).map(|names| names.to_string_lossy().into_owned()))?;
        let (mut config, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: no prefix and no file is the default; it writes where the settings are.
        let read = unsafe { (self.ucp_config_read)(std::ptr::null(), std::ptr::null(), &mut config) };
        self.answer("ucp_config_read", read)?;
        let (field_mask, features, request_init) = (CONTEXT_FIELDS, RMA_AND_WAKEUP, clear_request as RequestInit);
        let params = ContextParams { field_mask, features, request_size: 0, request_init, unused: [0; 6] };
        // SAFETY: the settings were just read, and are given back once; the texts are C's.
        let made = unsafe {
            let set = |name: &CStr, value: &CStr| {
                let set = (self.ucp_config_modify)(config, name.as_ptr(), value.as_ptr());
                self.answer("ucp_config_modify", set)
            };
            let set =
                set(KEEPALIVE.0, KEEPALIVE.1).and_then(|()| transports.map_or(Ok(()), |names| set(c"TLS", names)));
            let made = set.and_then(|()| {
                let made = (self.ucp_init_version)(API.0, API.1, &params, config, &mut context);
                self.answer("ucp_init_version", made)
            });
            (self.ucp_config_release)(config);
            made
        };
        made?;
        let mut attributes = ContextAttributes { field_mask: REQUEST_SIZE, ..ContextAttributes::default() };
        // SAFETY: the context was just made, and it writes the field that is asked for.
        let queried = unsafe { (self.ucp_context_query)(context, &mut attributes) };
        if let Err(error) = self.answer("ucp_context_query", queried) {
            // SAFETY: nothing was made of it, and nothing of it is used after this.
            unsafe { (self.ucp_cleanup)(context) };
            return Err(error);
        }
        // Before any worker, by which requests are made.
        REQUEST_BYTES.store(attributes.request_size, Ordering::Relaxed);
        Ok(context)
    }
}

/// UCX's own variable for the transports that it may take.
const TRANSPORTS: &str = "UCX_TLS";

/// No looking after peers by the library itself: the connection by which two processes have met says when one is gone.
///
/// 1.13 looks also after an endpoint that it has just made for a peer's first message and could not connect, as when that peer is gone again, before it marks it as failed; it then ends this process by a
/// pointer that is none (`ucp_worker_do_ep_keepalive`, after `ucp_wireup_process_request`).
const KEEPALIVE: (&CStr, &CStr) = (c"KEEPALIVE_INTERVAL", c"inf");

/// The transports to take if the environment has these: every one but tcp, which cannot read by itself. There UCX has the process that is read send its bytes, and ends that process if they cannot be sent
/// (1.13: `ucp_request.inl`, "unexpected error", out of `ucp_get_req_handler`).
fn transports(of_environment: Option<String>) -> Result<Option<&'static CStr>, UcxError> {
    let Some(names) = of_environment else { return Ok(Some(c"^tcp")) };
    let (are_left_out, list) = names.strip_prefix('^').map_or((false, names.as_str()), |list| (true, list));
    let has = |name: &str| list.split(',').any(|named| named.trim() == name);
    let has_tcp = if are_left_out { !has("tcp") } else { list.is_empty() || has("tcp") || has("all") };
    if has_tcp { Err(UcxError::Tcp(names)) } else { Ok(None) }
}

/// Bytes of the library's own of a request, once there is a context.
static REQUEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// What UCX calls for each request that it makes room for, with where what is the user's of it begins: makes all before it zero.
///
/// Where the process that is read sends its bytes itself (shared memory, or a network without reads), it has a request for each answer. If that still waits for room as its endpoint ends, by whichever
/// end and for whichever reason, UCX gives back the memory of its data by a field `datatype` that was never set (1.13: `ucp_get_req_handler`, then `ucp_request_send_state_ff`). By what was in the
/// memory before, it then follows a pointer that is none. Zeros say that there is nothing to give back, as does what reads leave there when they are over: nothing else is asked of these workers.
pub(super) unsafe extern "C" fn clear_request(request: *mut c_void) {
    let bytes = REQUEST_BYTES.load(Ordering::Relaxed);
    // SAFETY: so many bytes before it are the request (`UCP_OP_ATTR_FIELD_REQUEST`), which is in no use yet. All that is set of it before this is its number, whose "none" is zero as well.
    unsafe { request.cast::<u8>().sub(bytes).write_bytes(0, bytes) };
}

/// What UCX calls when a peer has failed: whatever is under way to it ends with an error, and nothing is left to do here.
pub(super) unsafe extern "C" fn peer_failed(_argument: *mut c_void, _endpoint: *mut c_void, _status: Status) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_is_never_among_the_transports() {
        let of = |names: &str| transports(Some(names.to_owned()));
        assert_eq!(transports(None), Ok(Some(c"^tcp")));
        for names in ["posix,self", "rc,ud", "^tcp", "^sysv,tcp", "rc_mlx5"] {
            assert_eq!(of(names), Ok(None), "{names}");
        }
        for names in ["tcp", "cma, tcp", "all", "^posix", ""] {
            assert_eq!(of(names), Err(UcxError::Tcp(names.to_owned())), "{names}");
        }
    }
}
