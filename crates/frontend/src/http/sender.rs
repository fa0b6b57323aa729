//! The sender of a request, as handlers take it.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use downbeat_service::client::Client;

use crate::access::Caller;

/// The sender of a request. The connection has noted its client. In a router of another server
/// there is no note, and the default client stands for it.
pub(crate) struct Sender {
    pub client: Client,
    pub caller: Caller,
}

impl<S: Send + Sync> FromRequestParts<S> for Sender {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let client = parts.extensions.get().copied().unwrap_or_default();
        Ok(Sender { client, caller: parts.extensions.get().cloned().unwrap_or_default() })
    }
}
