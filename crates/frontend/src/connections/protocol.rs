//! The protocol of a port.

/// The protocol of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// HTTP/1.1 and HTTP/2.
    Http,
    /// gRPC over HTTP/2.
    Grpc,
}

impl Protocol {
    /// The protocol's name in metrics and in the log.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Http => "HTTP",
            Protocol::Grpc => "gRPC",
        }
    }
}
