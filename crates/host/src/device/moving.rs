//! Models that go to another partition while they serve: new lanes first, then the change between
//! two launches (GSLICE §3.2.4).

use std::sync::Arc;

use downbeat_core::device::{BadMove, LaneId, PartitionId};
use downbeat_core::journal::device::{DeviceInput, DeviceRefusal};

use super::crew::Seat;
use super::device_host::DeviceHost;
use super::device_state::{DeviceState, MoveReady};
use super::lane_host::OwnLaunch;
use super::placement::Placement;

impl DeviceHost {
    /// Makes lanes for a model in another partition, in the background, while it goes on with its
    /// present ones. `ready` hears when the lanes are ready, or why they failed;
    /// [`change_over`](Self::change_over) is next. `false`: the model is on that partition already.
    /// Then lanes that were ready elsewhere go, and `ready` is not called.
    ///
    /// # Errors
    /// If it cannot move, or not now; `ready` hears nothing then.
    pub fn prepare_move(&self, model: &Placement, to: PartitionId, ready: MoveReady) -> Result<bool, BadMove> {
        let (told, actions) =
            self.decide(model, |inner, now| match inner.journal.apply(now, DeviceInput::Move(model.id, to)) {
                Ok(_) if inner.partition(model) == to => Ok(false),
                Ok(_) => {
                    inner.moves.insert(model.id, ready);
                    Ok(true)
                }
                Err(DeviceRefusal::Move(refused)) => Err(refused),
                Err(other) => panic!("a move is not refused as {other}"),
            });
        self.carry_out(actions, None, &mut OwnLaunch::default());
        told
    }

    /// Moves a model's next launches to the lanes that are ready in another partition. Returns
    /// whether there were any.
    pub fn change_over(&self, model: &Placement) -> bool {
        let switch =
            |inner: &mut DeviceState, now| matches!(inner.journal.apply(now, DeviceInput::Switch(model.id)), Ok(true));
        let (switched, actions) = self.decide(model, switch);
        self.carry_out(actions, None, &mut OwnLaunch::default());
        switched
    }

    /// Limits the model's next batches to `rows` items. Returns whether its policy has batches that
    /// can be limited.
    pub fn limit(&self, model: &Placement, rows: u32) -> bool {
        let limit = |inner: &mut DeviceState, now| {
            matches!(inner.journal.apply(now, DeviceInput::Limit(model.id, rows)), Ok(true))
        };
        let (limited, actions) = self.decide(model, limit);
        self.carry_out(actions, None, &mut OwnLaunch::default());
        limited
    }

    /// The partition where a model's launches go.
    pub fn partition(&self, model: &Placement) -> PartitionId {
        self.inner.lock().partition(model)
    }

    /// The lanes that were asked for are made; or why they could not be.
    pub(super) fn prepared(&self, model: &Placement, lanes: &[LaneId], made: Result<Vec<Arc<Seat>>, String>) {
        let ((ready, outcome), actions) = self.decide(model, |inner, now| {
            let made = made.and_then(|started| {
                if inner.stopped {
                    started.iter().for_each(|seat| seat.stop());
                    return Err("the device is stopped".to_owned());
                }
                // The host lists the lanes before the policy hears of them: a lane that the policy
                // no longer wants is freed at once.
                inner.put_lanes(lanes, started);
                Ok(())
            });
            inner.tell(now, DeviceInput::Prepared(model.id, made.clone()));
            // Lanes are made for a policy or for a move, never for both at a time.
            (inner.moves.remove(&model.id), made)
        });
        self.carry_out(actions, None, &mut OwnLaunch::default());
        if let Some(ready) = ready {
            ready(outcome);
        }
    }
}
