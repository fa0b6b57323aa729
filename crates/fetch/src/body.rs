//! The bytes of a file, as they come from its server.

use std::pin::Pin;

use bytes::Bytes;
use futures_util::Stream;

/// The bytes of a file, from some place on.
pub(crate) struct Body {
    /// The place of the first byte. It is 0 if the server could not go on where it was asked to.
    pub(crate) from: u64,
    /// Bytes of the whole file, if the server says.
    pub(crate) size: Option<u64>,
    /// The bytes. An error is in words; a later request may go on.
    pub(crate) bytes: Pin<Box<dyn Stream<Item = Result<Bytes, String>> + Send>>,
}
