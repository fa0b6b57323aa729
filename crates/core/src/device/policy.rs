//! What every device policy is.

use serde::{Deserialize, Serialize};

use super::launch::{DeviceOutput, LaneSpec};
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::PoolStats;
use crate::ids::{LaunchId, RequestId};
use crate::time::Time;

/// Decides what runs on a device's lanes.
///
/// Contract. Time never goes back from one call to the next. After each `handle_*` call [`poll_output`](Self::poll_output) until it gives
/// nothing, carry the outputs out in their order, then ask [`poll_timeout`](Self::poll_timeout) when to call
/// [`handle_timeout`](Self::handle_timeout). Same calls, same outputs.
///
/// A request that was accepted gets exactly one of a [`DeviceOutput::Reply`], a [`DeviceOutput::Drop`], or a `true` from
/// [`handle_cancel`](Self::handle_cancel).
/// A lane is given a launch only after its last one is completed.
pub trait DevicePolicy: Send {
    /// The lanes that it launches on, by [`LaneId`](super::LaneId); does not change.
    fn lanes(&self) -> &[LaneSpec];

    /// A request came.
    ///
    /// # Errors
    /// If it cannot be accepted; nothing is changed then.
    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject>;

    /// The input of a request that was to be admitted is on the device. Unknown requests are ignored: it may have been cancelled meanwhile.
    fn handle_input(&mut self, now: Time, request: RequestId);

    /// A launch is done. `exits`: members whose answer is final already, before the last segment (DVABatch §9.2). A launch that failed
    /// is completed too: the driver answers its members itself, and then says so by [`handle_cancel`](Self::handle_cancel).
    /// Unknown launches are ignored.
    fn handle_completion(&mut self, now: Time, launch: LaunchId, exits: &[RequestId]);

    /// The client of a request has gone. Says whether it was there: if so it gets neither a reply nor a drop.
    fn handle_cancel(&mut self, now: Time, request: RequestId) -> bool;

    /// The time that [`poll_timeout`](Self::poll_timeout) asked for has come. At another time it does no harm.
    fn handle_timeout(&mut self, now: Time);

    /// The next decision.
    fn poll_output(&mut self) -> Option<DeviceOutput>;

    /// When to call [`handle_timeout`](Self::handle_timeout), and why.
    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)>;

    /// What waits where.
    fn stats(&self) -> PoolStats;
}

/// Why a device policy wants to be called at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum DeviceTimeout {
    /// The oldest request has waited for the batch window.
    Window,
    /// A request can no longer be answered in time from then on.
    Hopeless,
}
