//! UCX's library `libucp`, loaded at run time: the few functions that Downbeat calls, and their
//! structures.
//!
//! Layouts and constants are those of `ucp.h` 1.13. Later libraries accept them, too. This code
//! requests version 1.13, and each structure says which of its fields have a meaning.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::os::unix::{Library as Loaded, RTLD_LAZY};

use crate::loader::loader_words;

/// The library's file name, common to all its users.
const NAME: &str = "libucp.so.0";
/// The requested version of the interface, and so the oldest library.
const API: (c_uint, c_uint) = (1, 13);

pub(super) type Status = i8;
pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
/// `UCS_ERR_LAST`. A function returns a request or a status. Seen as an address, a status is not
/// below this one.
const LAST: isize = -100;

/// `UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_REQUEST_INIT`.
pub(super) const CONTEXT_FIELDS: u64 = 1 | 1 << 2;
/// `UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP`.
pub(super) const RMA_AND_WAKEUP: u64 = 1 << 1 | 1 << 4;
/// `UCP_ATTR_FIELD_REQUEST_SIZE`.
pub(super) const REQUEST_SIZE: u64 = 1;
/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS`; the mode of one thread is
/// 0.
pub(super) const WORKER_FIELDS: u64 = 1 | 1 << 5;
/// `UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK`. The library logs no warning for the answers to a peer's
/// reads that were under way when the peer went. It forgets these answers, and keeps them until
/// their worker is destroyed.
pub(super) const FORGETS_REQUESTS: u64 = 1;
/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
/// UCP_EP_PARAM_FIELD_ERR_HANDLER`.
pub(super) const ENDPOINT_FIELDS: u64 = 1 | 1 << 1 | 1 << 2;
/// `UCP_ERR_HANDLING_MODE_PEER`: all work under way to a peer that is gone ends. Only with it can
/// an endpoint be closed at once.
pub(super) const PEER_MAY_FAIL: c_int = 1;
/// `UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH`.
pub(super) const MEMORY_FIELDS: u64 = 1 | 1 << 1;
/// `UCP_OP_ATTR_FIELD_FLAGS`.
pub(super) const REQUEST_FLAGS: u32 = 1 << 4;
/// `UCP_EP_CLOSE_FLAG_FORCE`: the endpoint closes without a message to the peer, and its work under
/// way ends.
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

/// `ucp_context_attr_t`, with room for the fields that later versions add.
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

/// The reason why UCX refuses or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// The library is missing.
    #[error(
        "UCX is not there: {0}: install it, version 1.13 or newer (on Debian: apt-get install libucx0), or leave it off"
    )]
    Missing(String),
    /// The library is too old.
    #[error("UCX is of version {}.{}, and 1.13 or newer is needed: install that, or leave it off", .0.0, .0.1)]
    TooOld((u32, u32)),
    /// The environment asks for a transport that would end this process when a peer ends.
    #[error(
        "UCX_TLS has {0}, and UCX over tcp ends a process that a peer reads when that peer ends: name other transports, or none (every one but tcp is taken then)"
    )]
    Tcp(String),
    /// The system has no thread or no wake-up left for UCX.
    #[error("UCX finds no transport: {0}")]
    NoThread(String),
    /// A function of the library has failed.
    #[error("{what} of UCX failed: {words}")]
    Failed {
        /// The function.
        what: &'static str,
        /// The library's own words.
        words: String,
    },
    /// A peer's offer cannot be used by this process.
    #[error("{0}")]
    Refused(String),
    /// UCX ended in this process meanwhile.
    #[error("UCX has ended in this process")]
    Ended,
}

/// The functions by their names, with their types in `ucp.h`.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?,)+) => {
        /// The library. It stays loaded: other code may use it too, and it has threads and hooks of
        /// its own.
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
    /// Loads the library.
    ///
    /// # Errors
    /// If the library is missing or too old.
    pub fn load() -> Result<Library, UcxError> {
        // SAFETY: runs the initialisers of a library that the administrator of this machine
        // installed.
        let loaded = unsafe { Loaded::open(Some(NAME), RTLD_LAZY) };
        let loaded = loaded.map_err(|error| UcxError::Missing(loader_words(&error)))?;
        let library = Library::find(&loaded)?;
        std::mem::forget(loaded);
        let version = library.version();
        if version < API { Err(UcxError::TooOld(version)) } else { Ok(library) }
    }

    /// The library's major and minor version.
    pub fn version(&self) -> (u32, u32) {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: it writes three numbers.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut release) };
        (major, minor)
    }

    /// Turns the status that a function returned into a result.
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

    /// The status that a function returned instead of a request; `None`: `given` is a request.
    pub fn at_once(given: *mut c_void) -> Option<Status> {
        match given as isize {
            0 => Some(OK),
            #[allow(clippy::cast_possible_truncation, reason = "it is between them")]
            status @ LAST..0 => Some(status as Status),
            _ => None,
        }
    }

    /// A context in which this process and its peers read each other's memory, with the settings of
    /// the environment's `UCX_*`.
    pub fn context(&self) -> Result<*mut c_void, UcxError> {
        let transports = transports(std::env::var_os(TRANSPORTS).map(|names| names.to_string_lossy().into_owned()))?;
        let (mut config, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: no prefix and no file is the default; the call writes the address of the
        // settings.
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
        // SAFETY: the context was just made, and the call writes the requested field.
        let queried = unsafe { (self.ucp_context_query)(context, &mut attributes) };
        if let Err(error) = self.answer("ucp_context_query", queried) {
            // SAFETY: nothing was made of it, and nothing of it is used after this.
            unsafe { (self.ucp_cleanup)(context) };
            return Err(error);
        }
        // The size must be known before any worker, as workers make requests.
        REQUEST_BYTES.store(attributes.request_size, Ordering::Relaxed);
        Ok(context)
    }
}

/// UCX's own variable for the transports that it may take.
const TRANSPORTS: &str = "UCX_TLS";

/// UCX itself must not check whether peers live: the connection over which two processes have met
/// tells when one is gone.
///
/// The check of 1.13 has a defect. UCX also examines a new endpoint that was made for a peer's
/// first message and could not connect. An example is a peer that is gone again. If the endpoint is
/// not yet marked as failed, UCX follows an invalid pointer and ends this process
/// (`ucp_worker_do_ep_keepalive`, after `ucp_wireup_process_request`).
const KEEPALIVE: (&CStr, &CStr) = (c"KEEPALIVE_INTERVAL", c"inf");

/// The transports to use if the environment has these. The default is every transport but tcp,
/// which cannot read by itself. Over tcp UCX lets the process that is read send its bytes. It ends
/// that process if they cannot be sent (1.13: `ucp_request.inl`, "unexpected error", out of
/// `ucp_get_req_handler`).
fn transports(of_environment: Option<String>) -> Result<Option<&'static CStr>, UcxError> {
    let Some(names) = of_environment else { return Ok(Some(c"^tcp")) };
    let (are_left_out, list) = names.strip_prefix('^').map_or((false, names.as_str()), |list| (true, list));
    let has = |name: &str| list.split(',').any(|named| named.trim() == name);
    let has_tcp = if are_left_out { !has("tcp") } else { list.is_empty() || has("tcp") || has("all") };
    if has_tcp { Err(UcxError::Tcp(names)) } else { Ok(None) }
}

/// The size of the library's own part of a request, bytes; set once there is a context.
static REQUEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// UCX calls this for each new request, with the start of the user's part. It makes the library's
/// part before it zero.
///
/// The reason is a defect. Without remote reads (shared memory, some networks) the process that is
/// read sends its bytes, and has a request for each answer. The answer may still wait for room when
/// its endpoint ends, at either end. UCX then frees the memory of the data by a field `datatype`
/// that was never set (1.13: `ucp_get_req_handler`, then `ucp_request_send_state_ff`). Depending on
/// the memory's old contents it follows an invalid pointer. Zeros mean that there is nothing to
/// free, as in a finished read. These workers make no other requests.
pub(super) unsafe extern "C" fn clear_request(request: *mut c_void) {
    let bytes = REQUEST_BYTES.load(Ordering::Relaxed);
    // SAFETY: this many bytes before `request` are the library's part
    // (`UCP_OP_ATTR_FIELD_REQUEST`), which is not in use yet. UCX has set only its number before
    // this call, and the number's "none" is zero as well.
    unsafe { request.cast::<u8>().sub(bytes).write_bytes(0, bytes) };
}

/// UCX calls this when a peer has failed. All work under way to the peer ends with an error by
/// itself, so there is nothing to do.
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
