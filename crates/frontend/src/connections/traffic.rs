//! Counts answers, connections and bytes of a protocol's ports.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::protocol::Protocol;

/// HTTP has codes from 100 to 599, and gRPC from 0 to 16. Each code has a count.
const CODES: usize = 500;
/// A name that is parsed here, not at each answer.
const GRPC_STATUS: http::HeaderName = http::HeaderName::from_static("grpc-status");
/// HTTP's lowest code.
const FIRST_OF_HTTP: u16 = 100;

/// Answers, connections and bytes of one protocol's ports since the start.
#[derive(Debug)]
pub(crate) struct Traffic {
    /// Answers by code, from the protocol's lowest code on.
    answers: [AtomicU64; CODES],
    /// Connections that were taken in.
    pub(super) accepted: AtomicU64,
    /// Connections that were refused.
    pub(super) refused: AtomicU64,
    /// Bytes read on connections that have ended.
    pub(super) received: AtomicU64,
    /// Bytes written on connections that have ended.
    pub(super) sent: AtomicU64,
}

impl Default for Traffic {
    fn default() -> Self {
        let [accepted, refused, received, sent] = Default::default();
        Traffic { answers: [const { AtomicU64::new(0) }; CODES], accepted, refused, received, sent }
    }
}

impl Traffic {
    /// Counts an answer over HTTP.
    pub fn count_http(&self, status: http::StatusCode) {
        self.count(status.as_u16().saturating_sub(FIRST_OF_HTTP));
    }

    /// Counts an answer over gRPC. An error without messages has its code in the headers; all other
    /// answers begin well.
    pub fn count_grpc(&self, headers: &http::HeaderMap) {
        let code = headers.get(GRPC_STATUS).and_then(|code| code.to_str().ok()?.parse().ok());
        self.count(code.unwrap_or(0));
    }

    fn count(&self, place: u16) {
        if let Some(count) = self.answers.get(usize::from(place)) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// The codes that were sent, and how often.
    pub(super) fn codes(&self, protocol: Protocol) -> impl Iterator<Item = (String, u64)> {
        let first = if protocol == Protocol::Http { usize::from(FIRST_OF_HTTP) } else { 0 };
        let counts = self.answers.iter().map(|count| count.load(Relaxed));
        (first..).zip(counts).filter(|(_, count)| *count > 0).map(|(code, count)| (code.to_string(), count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_their_protocols_codes() {
        let (http, grpc) = (Traffic::default(), Traffic::default());
        for status in [200, 200, 503, 599, 600, 999] {
            http.count_http(http::StatusCode::from_u16(status).unwrap());
        }
        let mut failed = http::HeaderMap::new();
        failed.insert("grpc-status", http::HeaderValue::from_static("14"));
        grpc.count_grpc(&failed);
        grpc.count_grpc(&http::HeaderMap::new());
        let told = |traffic: &Traffic, protocol| traffic.codes(protocol).collect::<Vec<_>>();
        let codes = |codes: &[(&str, u64)]| codes.iter().map(|(code, n)| ((*code).to_owned(), *n)).collect::<Vec<_>>();
        assert_eq!(told(&http, Protocol::Http), codes(&[("200", 2), ("503", 1), ("599", 1)]));
        assert_eq!(told(&grpc, Protocol::Grpc), codes(&[("0", 1), ("14", 1)]));
    }
}
