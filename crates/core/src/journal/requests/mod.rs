//! The requests by the names that their clients gave them, and the answers that no other log has.
//!
//! [`RequestInput::Came`] joins a client's id or trace to the number that the request has in the
//! logs of shards and devices. [`RequestInput::Failed`] has the error that the client got. A request
//! without a name that is answered has no record here.

mod book;
mod record;
mod text;

pub use book::{BadRequestInput, RequestBook, RequestRecords};
pub use record::{Failure, RequestInput, Trace, Way, WayClaim, WayRun, bounded};
