//! The interface of every device policy.

use std::fmt::Debug;

use super::launch::{GrantedBatch, LaneSpec, Span};
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::{PoolStats, RequestPool};
use super::resident::Arbitrated;
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// Decides which requests of a model run on its lanes of a device, and when. A
/// [`DeviceScheduler`](super::DeviceScheduler) drives the policy; its contract explains the events.
///
/// An accepted request gets exactly one of a [`DeviceOutput::Reply`](super::DeviceOutput::Reply), a
/// [`DeviceOutput::Drop`](super::DeviceOutput::Drop), or a `true` from
/// [`handle_cancel`](Self::handle_cancel). The same calls give the same decisions. A policy may be
/// made of other policies, to which it hands the turn.
pub trait DevicePolicy: Debug + Send {
    /// The lanes that the policy wants in a partition. [`Turn::lanes`] has the lanes in this order.
    /// A policy that wants none launches on shared lanes.
    fn lanes(&self, _partition: PartitionId) -> Vec<LaneSpec> {
        Vec::new()
    }

    /// The pool of accepted requests, if the policy has one. With a pool, the default methods below
    /// handle the usual events and then call [`advance`](Self::advance).
    fn pool(&self) -> Option<&RequestPool> {
        None
    }

    /// The pool, mutable, as for [`pool`](Self::pool).
    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        None
    }

    /// The decisions that the policy leaves to others; they never change.
    fn arbitrated(&self) -> Arbitrated {
        Arbitrated::default()
    }

    /// Begins every launch that can begin. The model may have other lanes ([`Turn::lanes`]). The
    /// arbiter of the device may have changed the limit of batches ([`Turn::limit`]) or permit a
    /// launch ([`Turn::permit`]).
    fn advance(&mut self, _: &mut Turn<'_>) {}

    /// Handles the arrival of a request.
    ///
    /// # Errors
    /// If the request cannot be accepted; then nothing has changed.
    fn handle_request(&mut self, turn: &mut Turn<'_>, _: &DeviceRequest) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// Handles a batch that the cluster's scheduler made.
    ///
    /// # Errors
    /// If the batch cannot be run; then nothing has changed.
    fn handle_batch(&mut self, turn: &mut Turn<'_>, _: GrantedBatch) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// Handles the input of an admitted request, which is now on the device. Unknown requests are
    /// ignored, as a request may have been cancelled meanwhile.
    fn handle_input(&mut self, turn: &mut Turn<'_>, request: RequestId) {
        if self.pool_mut().is_some_and(|pool| pool.mark_ready(request, turn)) {
            self.advance(turn);
        }
    }

    /// Handles the end of one of the policy's launches. `exits` are members whose answer is final
    /// before the last segment (DVABatch §9.2). Before a failed launch ends, the driver calls
    /// [`handle_cancel`](Self::handle_cancel) for its members and answers them itself.
    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, span: Span, exits: &[RequestId]);

    /// Handles a request whose client has gone. Returns true if the policy had the request, which
    /// then gets neither a reply nor a drop.
    fn handle_cancel(&mut self, turn: &mut Turn<'_>, request: RequestId) -> bool {
        let was_there = self.pool_mut().is_some_and(|pool| pool.cancel(request, turn));
        self.advance(turn);
        was_there
    }

    /// Handles the time that [`poll_timeout`](Self::poll_timeout) returned. A call at another time
    /// does no harm.
    fn handle_timeout(&mut self, turn: &mut Turn<'_>) {
        self.advance(turn);
    }

    /// Gives up every request that waits for its first launch. Launched requests go on to their
    /// end.
    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        if let Some(pool) = self.pool_mut() {
            pool.drop_all(turn, reason);
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and the reason.
    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        None
    }

    /// The device time of all accepted requests without a launch, alone and in the largest batches.
    /// It is used for forecasts.
    fn backlog(&self) -> Duration {
        Duration::ZERO
    }

    /// The items that wait or run, by place.
    fn stats(&self) -> PoolStats {
        self.pool().map(RequestPool::stats).unwrap_or_default()
    }
}
