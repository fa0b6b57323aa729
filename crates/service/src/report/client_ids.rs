//! The ids that clients gave to their last requests, for timelines.

use std::sync::OnceLock;

use downbeat_core::RequestId;
use downbeat_core::journal::requests::{RequestInput, bounded};
use parking_lot::Mutex;

/// The requests with ids that are remembered. A later request takes the place of an earlier one.
const KEPT: usize = 16_384;

/// The ids that clients gave to their last requests, by the requests' numbers.
///
/// A request without an id costs a comparison.
///
/// **Bound.** 16,384 ids of at most 64 bytes: 2 MiB. Nothing is allocated before the first id.
#[derive(Debug, Default)]
pub struct ClientIds {
    places: OnceLock<Box<[Mutex<Named>]>>,
}

/// A request and its id.
#[derive(Debug, Default)]
struct Named {
    request: Option<RequestId>,
    id: Box<str>,
}

impl ClientIds {
    /// Remembers the id of a request, if the client gave one.
    pub fn note(&self, request: RequestId, id: &str) {
        if !id.is_empty() {
            self.keep(request, bounded(id, RequestInput::MOST_ID));
        }
    }

    fn keep(&self, request: RequestId, id: &str) {
        let places = self.places.get_or_init(|| (0..KEPT).map(|_| Mutex::default()).collect());
        if let Some(place) = places.get(place_of(request)) {
            *place.lock() = Named { request: Some(request), id: id.into() };
        }
    }

    /// The id of a request. Empty: the client gave none, or it is forgotten.
    pub fn of(&self, request: RequestId) -> String {
        let place = self.places.get().and_then(|places| places.get(place_of(request)));
        let named = place.map(|place| place.lock()).filter(|named| named.request == Some(request));
        named.map_or(String::new(), |named| named.id.clone().into())
    }
}

fn place_of(request: RequestId) -> usize {
    (request.0 % KEPT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ids_are_known_and_no_others() {
        let ids = ClientIds::default();
        assert_eq!(ids.of(RequestId(0)), "");
        ids.note(RequestId(3), "cam-3");
        ids.note(RequestId(4), "");
        ids.note(RequestId(5), &"ä".repeat(1_000));
        assert_eq!((ids.of(RequestId(3)), ids.of(RequestId(4))), ("cam-3".to_owned(), String::new()));
        assert_eq!(ids.of(RequestId(5)), "ä".repeat(RequestInput::MOST_ID / 2), "an id is bounded");
        ids.note(RequestId(3 + KEPT as u64), "later");
        assert_eq!((ids.of(RequestId(3)), ids.of(RequestId(3 + KEPT as u64))), (String::new(), "later".to_owned()));
    }
}
