//! The budget of bytes in flight: the memory of the server that requests and their answers hold.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use downbeat_core::Duration;

use crate::error::ServiceError;

/// Requests up to this size may use the whole budget: a few clients with large requests do not shut
/// out all others.
const SMALL: u64 = 64 << 10;
/// The part of the budget that only small requests may use: one in this many.
const KEPT_FOR_SMALL: u64 = 8;
/// Answers below this size are not counted while they are written: a connection has at most one.
const HELD_FROM: usize = 16 << 10;
/// When to try again: bodies come and go within about that.
const RETRY_AFTER: Duration = Duration::from_millis(1_000);

/// How many bytes the requests in flight may hold, all together, from their first byte to their
/// answer's last.
#[derive(Debug)]
pub struct ByteBudget {
    limit: u64,
    in_flight: AtomicU64,
    refused: AtomicU64,
    /// The budget that this one is a part of.
    whole: Option<Arc<ByteBudget>>,
}

impl ByteBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        ByteBudget::with(limit, None)
    }

    /// A budget of `limit` bytes, which count as bytes of this budget too.
    pub fn part(self: &Arc<Self>, limit: u64) -> Arc<Self> {
        ByteBudget::with(limit, Some(Arc::clone(self)))
    }

    fn with(limit: u64, whole: Option<Arc<ByteBudget>>) -> Arc<Self> {
        Arc::new(ByteBudget { limit, in_flight: AtomicU64::new(0), refused: AtomicU64::new(0), whole })
    }

    /// No bound; bytes in flight are counted all the same.
    pub fn unbounded() -> Arc<Self> {
        ByteBudget::new(u64::MAX)
    }

    /// The bound, bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are held now.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// Requests that were refused for want of room since the start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// The reservation of a new request, which holds no bytes yet.
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0 }
    }

    /// Takes `more` bytes for a request that then holds `own`.
    fn take(&self, more: u64, own: u64) -> Result<(), ServiceError> {
        let limit = self.limit;
        let usable = if own > SMALL { limit - limit / KEPT_FOR_SMALL } else { limit };
        let taken =
            self.in_flight.fetch_update(Relaxed, Relaxed, |held| held.checked_add(more).filter(|held| *held <= usable));
        if taken.is_err() {
            self.refused.fetch_add(1, Relaxed);
            return Err(self.error(own, usable));
        }
        match &self.whole {
            None => Ok(()),
            Some(whole) => whole.take(more, own).inspect_err(|_| {
                self.in_flight.fetch_sub(more, Relaxed);
            }),
        }
    }

    #[cold]
    fn error(&self, own: u64, usable: u64) -> ServiceError {
        let limit = self.limit;
        let (whose, option) = match self.whole {
            None => ("all requests", "--max-in-flight-bytes"),
            Some(_) => ("the requests of an API key", "bytes_in_flight of the key"),
        };
        if own > usable {
            return ServiceError::TooLarge(format!(
                "the request needs at least {own} bytes of memory, more than a request may ever have: {usable} of the \
                 {limit} bytes that {whose} in flight may hold ({option})"
            ));
        }
        ServiceError::QueueFull {
            message: format!(
                "the requests in flight leave no room for this one: {whose} may hold {limit} bytes together ({option}); \
                 try again later"
            ),
            retry_after: RETRY_AFTER,
        }
    }

    /// The budget, and those that it is a part of.
    fn all(&self) -> impl Iterator<Item = &ByteBudget> {
        std::iter::successors(Some(self), |part| part.whole.as_deref())
    }

    /// Counts bytes of an answer, beyond the limit too.
    fn add(&self, more: u64) {
        for budget in self.all() {
            budget.in_flight.fetch_add(more, Relaxed);
        }
    }

    fn release(&self, less: u64) {
        for budget in self.all() {
            budget.in_flight.fetch_sub(less, Relaxed);
        }
    }
}

/// Bytes of a [`ByteBudget`] that a request holds; given back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<ByteBudget>,
    bytes: u64,
}

impl Reservation {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `more` bytes, before they are allocated.
    ///
    /// # Errors
    /// `QueueFull` if the requests in flight leave no room; `TooLarge` if they never could.
    pub fn grow(&mut self, more: u64) -> Result<(), ServiceError> {
        let own = self.bytes.saturating_add(more);
        self.budget.take(more, own)?;
        self.bytes = own;
        Ok(())
    }

    /// Counts the bytes of an answer in place of the request's bytes, until the last part of the
    /// answer is dropped. An answer is never refused. Short answers are not counted.
    pub fn hold(mut self, bytes: Bytes) -> Bytes {
        if bytes.len() < HELD_FROM {
            return bytes;
        }
        let length = bytes.len() as u64;
        self.shrink_to(length);
        self.budget.add(length - self.bytes);
        self.bytes = length;
        Bytes::from_owner(Held { bytes, _reservation: self })
    }

    /// Gives back the bytes beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.budget.release(less);
            self.bytes = bytes;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

struct Held {
    bytes: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_never_exceeds_the_limit_and_comes_back() {
        let budget = ByteBudget::new(8 << 20);
        let mut first = budget.reservation();
        first.grow(6 << 20).unwrap();
        let mut second = budget.reservation();
        let error = second.grow(2 << 20).unwrap_err();
        assert!(matches!(&error, ServiceError::QueueFull { .. }) && error.to_string().contains("8388608"), "{error}");
        assert_eq!((budget.in_flight(), budget.refused()), (6 << 20, 1));
        first.shrink_to(1 << 20);
        second.grow(2 << 20).unwrap();
        drop((first, second));
        assert_eq!(budget.in_flight(), 0);
    }

    #[test]
    fn small_requests_have_room_where_large_ones_have_not() {
        let budget = ByteBudget::new(8 << 20);
        let mut large = budget.reservation();
        large.grow(7 << 20).unwrap();
        assert!(large.grow(1).is_err());
        let mut small = budget.reservation();
        small.grow(SMALL).unwrap();
        assert!(small.grow(1).is_err(), "it is no longer small");
    }

    #[test]
    fn what_never_fits_is_told_from_what_does_not_fit_now() {
        let budget = ByteBudget::new(8 << 20);
        let error = budget.reservation().grow(u64::MAX).unwrap_err();
        assert!(matches!(error, ServiceError::TooLarge(_)), "{error}");
        assert_eq!(budget.in_flight(), 0);
        ByteBudget::unbounded().reservation().grow(1 << 50).unwrap();
    }

    #[test]
    fn bytes_of_a_part_count_for_the_whole_too() {
        let whole = ByteBudget::new(1_000);
        let part = whole.part(600);
        let mut first = part.reservation();
        first.grow(500).unwrap();
        let error = part.reservation().grow(200).unwrap_err().to_string();
        assert!(error.contains("API key") && error.contains("600"), "{error}");
        whole.reservation().grow(200).unwrap();
        let mut other = whole.reservation();
        other.grow(500).unwrap();
        let error = part.reservation().grow(100).unwrap_err().to_string();
        assert!(error.contains("--max-in-flight-bytes"), "{error}");
        assert_eq!((part.in_flight(), whole.in_flight()), (500, 1_000), "a refused request holds nothing");
        first.shrink_to(100);
        let answer = first.hold(Bytes::from(vec![1; 20_000]));
        assert_eq!((part.in_flight(), whole.in_flight()), (20_000, 20_500));
        drop((answer, other));
        assert_eq!((part.in_flight(), whole.in_flight()), (0, 0));
    }

    #[test]
    fn an_answer_counts_even_beyond_the_limit() {
        let budget = ByteBudget::new(100);
        let answer = budget.reservation().hold(Bytes::from(vec![1; 20_000]));
        let half = answer.slice(..10_000);
        drop(answer);
        assert_eq!((budget.in_flight(), half.len()), (20_000, 10_000));
        assert!(budget.reservation().grow(1).is_err());
        drop(half);
        assert_eq!(budget.in_flight(), 0);
    }
}
