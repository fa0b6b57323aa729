//! The complaints that were logged lately, so that each peer is complained of in each way at most
//! once a minute.

use std::collections::HashMap;
use std::hash::Hash;
use std::mem::Discriminant;

use downbeat_core::{Duration, Time};

use crate::wire::WireError;

/// The time between two complaints of a kind.
const EVERY: Duration = Duration::from_millis(60_000);
/// The most complaints that are remembered, and hence the most in that time.
const MOST: usize = 256;

/// Times of the last complaints by peer and kind of error.
pub struct Complaints<P>(HashMap<(P, Discriminant<WireError>), Time>);

impl<P: Eq + Hash> Complaints<P> {
    /// No complaint was logged yet.
    pub fn new() -> Self {
        Complaints(HashMap::new())
    }

    /// Whether an error of a peer should be logged now. The ends of connections are no reason to
    /// complain.
    pub fn should_log(&mut self, peer: P, error: &WireError, now: Time) -> bool {
        if matches!(error, WireError::Ended(_)) {
            return false;
        }
        let is_recent = |at: Time| now.since(at) < EVERY;
        let key = (peer, std::mem::discriminant(error));
        if self.0.len() >= MOST {
            self.0.retain(|_, at| is_recent(*at));
        }
        if self.0.get(&key).is_some_and(|at| is_recent(*at)) || self.0.len() >= MOST {
            return false;
        }
        self.0.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_complained_of_once_a_minute_and_all_together_seldom() {
        let mut complaints = Complaints::new();
        let at = |s: u64| Time::from_nanos(s * 1_000_000_000);
        let mut log = |peer: u32, error: &WireError, s: u64| complaints.should_log(peer, error, at(s));
        assert!(log(1, &WireError::OtherSecret, 0) && !log(1, &WireError::OtherSecret, 59));
        assert!(log(1, &WireError::NeedsSecret, 1) && log(2, &WireError::OtherSecret, 1));
        assert!(log(1, &WireError::OtherSecret, 60));
        assert!(!log(3, &WireError::Ended(std::io::ErrorKind::UnexpectedEof.into()), 60));
        let logged = (10..100_000).filter(|peer| log(*peer, &WireError::Foreign, 61)).count();
        assert!((MOST - 4..=MOST).contains(&logged), "{logged}");
        assert!(log(5, &WireError::Foreign, 200));
    }
}
