//! The place of a request in a trace of several programs (W3C Trace Context).

use downbeat_protocol::{InferRequest, Parameter};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use downbeat_core::journal::requests::Trace as TraceId;

/// The header with the place of a request in its trace, over HTTP and gRPC.
pub const TRACEPARENT: &str = "traceparent";

/// The value of a request's header `traceparent`, if its frontend wrote it down.
pub fn traceparent(request: &InferRequest) -> Option<&str> {
    match request.parameters.get(TRACEPARENT)? {
        Parameter::String(value) => Some(value),
        _ => None,
    }
}

/// The place of a span: the trace, and its number in the trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpanPlace {
    /// The trace.
    pub trace: TraceId,
    /// The number of the span, not 0.
    pub span: u64,
}

impl SpanPlace {
    /// The value of `traceparent` for another program. `is_sampled`: the span goes to a collector.
    pub fn traceparent(&self, is_sampled: bool) -> String {
        format!("00-{}-{:016x}-{:02x}", self.trace, self.span, u8::from(is_sampled))
    }
}

/// The span of a client that a request is a part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parent {
    /// The client's span.
    pub place: SpanPlace,
    /// Whether the client traces the request.
    pub is_sampled: bool,
}

impl Parent {
    /// The parent in the value of a header `traceparent`, such as
    /// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`; `None`: the value has none.
    pub fn of_traceparent(value: &str) -> Option<Parent> {
        let trace = TraceId::of_traceparent(value)?;
        let mut parts = value.trim().split('-').skip(2);
        let (span, flags) = (hex(parts.next()?, 16)?, hex(parts.next()?, 2)?);
        (span != 0).then_some(Parent { place: SpanPlace { trace, span }, is_sampled: flags & 1 == 1 })
    }
}

fn hex(text: &str, digits: usize) -> Option<u64> {
    let is_hex = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u64::from_str_radix(text, 16).ok())?
}

/// Makes numbers of traces and spans that no other process makes.
#[derive(Debug, Default)]
pub struct Numbers {
    /// Its keys are random.
    hashes: RandomState,
    next: AtomicU64,
}

impl Numbers {
    /// A number for a span.
    pub fn span(&self) -> u64 {
        self.hashes.hash_one(self.next.fetch_add(1, Relaxed)).max(1)
    }

    /// A number for a trace.
    pub fn trace(&self) -> TraceId {
        TraceId((u128::from(self.span()) << 64 | u128::from(self.span())).to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_and_written() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = Parent::of_traceparent(text).unwrap();
        assert_eq!((parent.place.traceparent(true).as_str(), parent.is_sampled), (text, true));
        let other = Parent::of_traceparent("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-more").unwrap();
        assert_eq!((other.place, other.is_sampled), (parent.place, false));
    }

    #[test]
    fn a_value_that_is_no_traceparent_is_none() {
        for text in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902bz-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(Parent::of_traceparent(text), None, "{text}");
        }
    }

    #[test]
    fn numbers_differ() {
        let numbers = Numbers::default();
        let mut traces: Vec<TraceId> = (0..1000).map(|_| numbers.trace()).collect();
        traces.sort();
        traces.dedup();
        assert_eq!(traces.len(), 1000);
    }
}
