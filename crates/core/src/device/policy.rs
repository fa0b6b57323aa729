//! What every device policy is.

use std::fmt::Debug;

use super::groups::GroupDecision;
use super::launch::{GrantedBatch, LaneSpec, Span};
use super::overlap::OverlapModel;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::{PoolStats, RequestPool};
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// Decides what of a model runs on its lanes of a device, and when. A [`DeviceScheduler`](super::DeviceScheduler) drives it, and says what is what in its own contract.
///
/// A request that was accepted gets exactly one of a [`DeviceOutput::Reply`](super::DeviceOutput::Reply), a [`DeviceOutput::Drop`](super::DeviceOutput::Drop), or a `true` from
/// [`handle_cancel`](Self::handle_cancel). Same calls, same decisions. A policy may be made of others: it hands them the turn.
pub trait DevicePolicy: Debug + Send {
    /// The lanes that it wants in a partition. It gets as many, in this order, as [`Turn::lanes`]. One that wants none launches on shared ones.
    fn lanes(&self, _partition: PartitionId) -> Vec<LaneSpec> {
        Vec::new()
    }

    /// The requests that it has taken in, of one that keeps them in a pool: then what follows does what is usual with it, and
    /// [`advance`](Self::advance).
    fn pool(&self) -> Option<&RequestPool> {
        None
    }

    /// As [`pool`](Self::pool).
    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        None
    }

    /// What its requests are to the device where they run in groups with those of other models, by [`Turn::join_groups`].
    fn in_groups(&self) -> Option<OverlapModel> {
        None
    }

    /// What was decided about a request that has joined the groups.
    fn handle_group(&mut self, _: &mut Turn<'_>, _: GroupDecision) {}

    /// Everything that can begin, does.
    fn advance(&mut self, _: &mut Turn<'_>) {}

    /// A request came.
    ///
    /// # Errors
    /// If it cannot be accepted; nothing is changed then.
    fn handle_request(&mut self, turn: &mut Turn<'_>, _: &DeviceRequest) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// A batch came that somebody else made.
    ///
    /// # Errors
    /// If it cannot be run; nothing is changed then.
    fn handle_batch(&mut self, turn: &mut Turn<'_>, _: GrantedBatch) -> Result<(), DeviceReject> {
        Err(DeviceReject::WrongWay(turn.model()))
    }

    /// The input of a request that was to be admitted is on the device. Unknown requests are ignored: it may have been cancelled meanwhile.
    fn handle_input(&mut self, turn: &mut Turn<'_>, request: RequestId) {
        if self.pool_mut().is_some_and(|pool| pool.mark_ready(request, turn)) {
            self.advance(turn);
        }
    }

    /// A launch of its own is done. `exits`: members whose answer is final already, before the last segment (DVABatch §9.2). A launch that failed
    /// is completed too: the driver answers its members itself, and then says so by [`handle_cancel`](Self::handle_cancel).
    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, span: Span, exits: &[RequestId]);

    /// The client of a request has gone. Says whether it was there: if so it gets neither a reply nor a drop.
    fn handle_cancel(&mut self, turn: &mut Turn<'_>, request: RequestId) -> bool {
        let was_there = self.pool_mut().is_some_and(|pool| pool.cancel(request, turn));
        self.advance(turn);
        was_there
    }

    /// The time that [`poll_timeout`](Self::poll_timeout) asked for has come. At another time it does no harm.
    fn handle_timeout(&mut self, turn: &mut Turn<'_>) {
        self.advance(turn);
    }

    /// The lanes that [`Turn::prepare`] asked for are there, and [`Turn::switch`] may be called; or they could not be made, which changes nothing.
    fn handle_prepared(&mut self, _: &mut Turn<'_>, _made: bool) {}

    /// Batches have at most so many items from now on, for whoever controls them from outside ([`Spatial`](super::spatial::Spatial)). Says whether the policy is one whose batches can be
    /// limited.
    fn handle_limit(&mut self, _: &mut Turn<'_>, _rows: u32) -> bool {
        false
    }

    /// Gives up everything that waits for its first launch; what has been launched goes on to its end.
    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        if let Some(pool) = self.pool_mut() {
            pool.drop_all(turn, reason);
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and why.
    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        None
    }

    /// What all that it has taken in and not launched would take of the device, alone and in the largest batches: for forecasts.
    fn backlog(&self) -> Duration {
        Duration::ZERO
    }

    /// What waits where.
    fn stats(&self) -> PoolStats {
        self.pool().map(RequestPool::stats).unwrap_or_default()
    }
}
