//! The options of the HTTP frontend, and the state of its handlers.

use std::sync::Arc;

use axum::http::HeaderMap;
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use downbeat_service::traces::Traces;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::traces::record::Wire;

use crate::access::Access;
use crate::shared_memory::SharedMemory;
use crate::trace;

/// The options of the HTTP frontend.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Largest request body in bytes, as sent and after decompression.
    pub max_body_bytes: usize,
    /// The budget of bytes that bodies, answers and all other requests share.
    pub budget: Arc<ByteBudget>,
    /// Names that requests may have in `Host`, in lower case. Without names a port on a loopback
    /// address takes `localhost` and IP addresses alone, and any other port takes every name.
    pub allow_host: Vec<String>,
    /// Who may do what; `None`: everybody may do everything.
    pub access: Option<Arc<Access>>,
    /// Traces of requests, and their settings.
    pub traces: Arc<Traces>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        let budget = ByteBudget::unbounded();
        let (allow_host, access, traces) = (Vec::new(), None, Traces::off());
        HttpOptions { max_body_bytes: 64 << 20, budget, allow_host, access, traces }
    }
}

/// The state that every handler of the frontend has.
pub struct HttpState<S> {
    shared: Arc<Shared<S>>,
}

struct Shared<S> {
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    options: HttpOptions,
}

impl<S> Clone for HttpState<S> {
    fn clone(&self) -> Self {
        HttpState { shared: Arc::clone(&self.shared) }
    }
}

impl<S: Service> HttpState<S> {
    /// The state of a frontend to `service`; the other frontends know the same `memory`.
    pub fn new(service: Arc<S>, memory: Arc<SharedMemory>, options: HttpOptions) -> Self {
        HttpState { shared: Arc::new(Shared { service, memory, options }) }
    }

    pub(super) fn service(&self) -> &S {
        &self.shared.service
    }

    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.shared.memory
    }

    /// The options of the frontend.
    pub fn options(&self) -> &HttpOptions {
        &self.shared.options
    }

    /// Begins the trace of a request for `model` with these headers, if a writer of traces wants the
    /// request.
    #[inline]
    pub(super) fn begin_trace(&self, client: Client, model: &str, headers: &HeaderMap) -> Option<OpenTrace> {
        let traces = &self.options().traces;
        trace::begin(traces, (Wire::Http, client), model, traces.began(), headers)
    }
}
