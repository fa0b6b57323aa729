//! A request that waits for its group, or for the next one.

use super::group::GroupPart;
use crate::device::launch::SegmentRange;
use crate::device::request::DeviceRequest;

/// A model whose requests share groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverlapModel {
    /// The number of the model's operators.
    pub operators: u16,
    /// Whether to give up requests that can no longer be answered by their deadline. Otherwise a
    /// late request runs in its turn, with others beside it if that saves time.
    pub drop: bool,
}

/// A request with operators that wait.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub request: DeviceRequest,
    /// The next operator to run, after the running group.
    pub next: u16,
    /// The model as it was when the request came.
    pub model: OverlapModel,
}

impl Waiting {
    /// The operators that no group has taken.
    pub fn left(&self) -> GroupPart {
        let DeviceRequest { id, model, size, length, .. } = self.request;
        let operators = SegmentRange::new(self.next, self.model.operators);
        GroupPart { request: id, model, operators, rows: size, length }
    }
}
