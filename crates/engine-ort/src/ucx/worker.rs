//! UCX's state for one peer: a worker, through which the peer reads this process's region, and the
//! endpoint through which this process reads the peer's.
//!
//! Each peer has a worker of its own, so that the library can forget a peer's endpoints as a whole.
//! Connections end at different times at their two ends, and begin anew.

use std::ffi::c_void;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fd::{BorrowedFd, OwnedFd};

use super::library::{self, EndpointParams, Library, RequestParams, Status, UcxError, WorkerParams};
use super::thread::made;
use super::{Done, Handle, Offer};

/// Zeros behind an address or a key. The library is not told their length, and finds the end from
/// their contents.
const PADDING: usize = 4096;
/// The number of calls of the library for one peer before the next peer has its turn.
const CALLS: usize = 256;

/// The state of a worker without work.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rest {
    /// Its file becomes readable when there is work.
    Sleeps,
    /// The library has work, and must be called.
    Wakes,
}

/// The way to a peer's region.
struct Endpoint {
    endpoint: Handle,
    /// The key for reads of the region; `None`: the library could not read the key.
    key: Option<Handle>,
    /// The address of the region in the peer.
    begin: u64,
}

/// A read under way. The library writes to the buffer until the read is over.
struct Reading {
    request: Handle,
    buffer: Vec<u8>,
    len: usize,
    done: Done<Bytes>,
}

/// UCX's state for one peer. The owner must [end](Worker::end) it: a mere drop leaks it for good.
pub(super) struct Worker {
    library: Arc<Library>,
    worker: Handle,
    /// Readable when there may be something to do.
    events: OwnedFd,
    endpoint: Option<Endpoint>,
    reads: Vec<Reading>,
}

impl Worker {
    /// Makes a worker of this context, on the context's thread.
    pub fn new(library: Arc<Library>, context: Handle) -> Result<Worker, UcxError> {
        let mut worker = std::ptr::null_mut();
        let (field_mask, flags) = (library::WORKER_FIELDS, library::FORGETS_REQUESTS);
        let params = WorkerParams { field_mask, thread_mode: 0, unset: [0; 19], flags, unused: [0; 3] };
        // SAFETY: the context outlives its workers; one thread uses them all.
        let created = unsafe { (library.ucp_worker_create)(context.as_ptr(), &params, &mut worker) };
        library.answer("ucp_worker_create", created)?;
        let worker = made("ucp_worker_create", worker)?;
        let mut file = -1;
        // SAFETY: it writes the descriptor of the library's own wake-up, which lives as long as the
        // worker.
        let events = unsafe { (library.ucp_worker_get_efd)(worker.as_ptr(), &mut file) };
        library.answer("ucp_worker_get_efd", events)?;
        // SAFETY: it is open, as the library has just said.
        let events = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned();
        let events = events.map_err(|error| UcxError::NoThread(error.to_string()))?;
        Ok(Worker { library, worker, events, endpoint: None, reads: Vec::new() })
    }

    /// The address by which the peer reaches this worker.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut address, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: the call returns this many bytes, which are given back once they are copied.
        unsafe {
            let given = (self.library.ucp_worker_get_address)(self.worker.as_ptr(), &mut address, &mut len);
            self.library.answer("ucp_worker_get_address", given)?;
            let copy = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            (self.library.ucp_worker_release_address)(self.worker.as_ptr(), address);
            Ok(copy)
        }
    }

    /// Readable when there may be work, once the worker [rests](Worker::rest).
    pub fn events(&self) -> &OwnedFd {
        &self.events
    }

    /// Makes the way to the peer's region.
    pub fn connect(&mut self, offer: &Offer) -> Result<(), UcxError> {
        let padded = |bytes: &[u8]| [bytes, &[0; PADDING]].concat();
        let (address, key) = (padded(&offer.address), padded(&offer.key));
        let params = EndpointParams {
            field_mask: library::ENDPOINT_FIELDS,
            address: address.as_ptr().cast(),
            error_mode: library::PEER_MAY_FAIL,
            error_handler: library::peer_failed,
            error_argument: std::ptr::null_mut(),
            unused: [0; 8],
        };
        let mut endpoint = std::ptr::null_mut();
        // SAFETY: by its checksum the address is as a worker of this version has made it. The
        // library copies it.
        let created = unsafe { (self.library.ucp_ep_create)(self.worker.as_ptr(), &params, &mut endpoint) };
        self.library.answer("ucp_ep_create", created)?;
        let endpoint = made("ucp_ep_create", endpoint)?;
        let mut unpacked = std::ptr::null_mut();
        // SAFETY: the same holds for the key.
        let is_key =
            unsafe { (self.library.ucp_ep_rkey_unpack)(endpoint.as_ptr(), key.as_ptr().cast(), &mut unpacked) };
        let key = self.library.answer("ucp_ep_rkey_unpack", is_key).and_then(|()| made("ucp_ep_rkey_unpack", unpacked));
        // The endpoint is kept without a key as well, so that it is closed at the end.
        self.endpoint = Some(Endpoint { endpoint, key: key.as_ref().ok().copied(), begin: offer.begin });
        key.map(drop)
    }

    /// Reads bytes of the peer's region. The peer's offer says that they are within it.
    pub fn read(&mut self, begin: u64, len: usize, done: Done<Bytes>) {
        let Some(Endpoint { endpoint, key: Some(key), begin: start }) = &self.endpoint else {
            return done(Err(UcxError::Ended));
        };
        let mut buffer: Vec<u8> = Vec::with_capacity(len);
        let (to, from) = (buffer.as_mut_ptr().cast::<c_void>(), start.wrapping_add(begin));
        let params = RequestParams::default();
        // SAFETY: the buffer has room for the bytes, and stays in place until the request is over.
        let request = unsafe { (self.library.ucp_get_nbx)(endpoint.as_ptr(), to, len, from, key.as_ptr(), &params) };
        match (Library::at_once(request), Handle::new(request)) {
            (None, Some(request)) => self.reads.push(Reading { request, buffer, len, done }),
            (status, _) => done(self.over(status.unwrap_or(library::OK), buffer, len)),
        }
    }

    /// The result of a read with this status.
    fn over(&self, status: Status, mut buffer: Vec<u8>, len: usize) -> Result<Bytes, UcxError> {
        self.library.answer("ucp_get_nbx", status)?;
        // SAFETY: the library has written all bytes.
        unsafe { buffer.set_len(len) };
        Ok(buffer.into())
    }

    /// Does the present work. Returns true if there was any.
    pub fn turn(&mut self) -> bool {
        // SAFETY: on the worker's own thread.
        let call = |_: &usize| unsafe { (self.library.ucp_worker_progress)(self.worker.as_ptr()) } > 0;
        let is_busy = (0..CALLS).take_while(call).count() > 0;
        self.end_reads();
        is_busy
    }

    /// Answers the reads that are over.
    fn end_reads(&mut self) {
        let mut place = 0;
        while let Some(reading) = self.reads.get(place) {
            // SAFETY: the request is not given back yet.
            let status = unsafe { (self.library.ucp_request_check_status)(reading.request.as_ptr()) };
            if status == library::IN_PROGRESS {
                place += 1;
                continue;
            }
            let Reading { request, buffer, len, done } = self.reads.swap_remove(place);
            // SAFETY: it is over, and given back once.
            unsafe { (self.library.ucp_request_free)(request.as_ptr()) };
            done(self.over(status, buffer, len));
        }
    }

    /// Prepares the worker to sleep until there is work.
    pub fn rest(&self) -> Rest {
        // SAFETY: on the worker's own thread.
        match unsafe { (self.library.ucp_worker_arm)(self.worker.as_ptr()) } {
            library::OK => Rest::Sleeps,
            _ => Rest::Wakes,
        }
    }

    /// Destroys the worker, once its peer is not needed any more. Work under way ends.
    ///
    /// The end comes at once, without a call in which the library looks for messages. Such a call
    /// could find an early message of the peer, and make a second endpoint in place of the closed
    /// one. The answer of that endpoint would end the *peer's* process, as it is of another
    /// endpoint than the peer knows (1.13: `ucp_ep_update_remote_id`).
    pub fn end(mut self) {
        let reads = std::mem::take(&mut self.reads);
        if let Some(Endpoint { endpoint, key, .. }) = self.endpoint.take() {
            let flags = library::CLOSE_AT_ONCE;
            let params = RequestParams { mask: library::REQUEST_FLAGS, flags, ..RequestParams::default() };
            // SAFETY: neither is used after this, and no read is begun with the key.
            let closing = unsafe {
                let closing = (self.library.ucp_ep_close_nbx)(endpoint.as_ptr(), &params);
                key.inspect(|key| (self.library.ucp_rkey_destroy)(key.as_ptr()));
                closing
            };
            let closing = Handle::new(closing).filter(|_| Library::at_once(closing).is_none());
            for request in closing.into_iter().chain(reads.iter().map(|reading| reading.request)) {
                // SAFETY: each request is given back once, maybe before it is over, and not used
                // after this.
                unsafe { (self.library.ucp_request_free)(request.as_ptr()) };
            }
        }
        // SAFETY: the worker is not used after this. Work under way ends here: either calls of the
        // worker copy the bytes to the buffers, or the bytes come over its network connections.
        unsafe { (self.library.ucp_worker_destroy)(self.worker.as_ptr()) };
        for Reading { buffer, done, .. } in reads {
            drop(buffer);
            done(Err(UcxError::Ended));
        }
    }
}
