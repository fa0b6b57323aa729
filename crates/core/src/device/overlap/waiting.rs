//! A request that waits for its group, or for the next one.

use super::group::GroupPart;
use crate::device::launch::SegmentRange;
use crate::device::request::DeviceRequest;

/// A model whose requests come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverlapModel {
    /// How many operators it has.
    pub operators: u16,
    /// Give up requests that can no longer be answered by their deadline. Otherwise one that is late runs in its turn, and whatever is worth it beside it.
    pub drop: bool,
}

/// A request of which operators wait.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub request: DeviceRequest,
    /// The operator that it is at, as it will be when what runs is done.
    pub next: u16,
    /// How many its model had when it came, and whether it may be given up.
    pub model: OverlapModel,
}

impl Waiting {
    /// What of it no group has.
    pub fn left(&self) -> GroupPart {
        let DeviceRequest { id, model, size, length, .. } = self.request;
        let operators = SegmentRange::new(self.next, self.model.operators);
        GroupPart { request: id, model, operators, rows: size, length }
    }
}
