//! The bytes of a request or response, and the length of its JSON.

use bytes::Bytes;

/// An encoded request or response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodedBody {
    /// The bytes to send.
    pub bytes: Bytes,
    /// The value of the header
    /// [`INFERENCE_HEADER_CONTENT_LENGTH`](super::INFERENCE_HEADER_CONTENT_LENGTH); `None` if the
    /// body is all JSON and the header is not sent.
    pub header_length: Option<usize>,
}
