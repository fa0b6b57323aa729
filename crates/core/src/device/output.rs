//! What a device policy tells its driver to do.

use serde::{Deserialize, Serialize};

use super::input_ring::RingRun;
use super::launch::Launch;
use super::note::Note;
use super::request::DeviceDrop;
use crate::ids::{LaneId, LaunchId, ModelId, PartitionId, RequestId};

/// What was decided on a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DeviceOutput {
    /// Bring the request's input into these slots of its model's ring, then call [`super::DeviceScheduler::handle_input`]. Inputs are
    /// brought one after another, in the order of these outputs.
    Admit {
        /// The model.
        model: ModelId,
        /// The request.
        request: RequestId,
        /// Its slots, one an item.
        slots: RingRun,
    },
    /// Run this.
    Launch(Launch),
    /// Run these, which are to overlap: none is begun before all are at hand (Abacus §6.3). Each is completed by itself.
    Group(Vec<Launch>),
    /// Make lanes for a model in the background, then call [`super::DeviceScheduler::handle_prepared`]. What they are for is in
    /// [`super::DeviceScheduler::lane`].
    Prepare {
        /// The model.
        model: ModelId,
        /// The lanes to make.
        lanes: Vec<LaneId>,
        /// Where.
        partition: PartitionId,
    },
    /// From now on the model is launched on other lanes, which were prepared. What runs on the former ends there.
    Switch {
        /// The model.
        model: ModelId,
        /// Its former lanes; they are free when [`DeviceOutput::Free`] says so.
        from: Vec<LaneId>,
        /// Its lanes.
        to: Vec<LaneId>,
    },
    /// These lanes are in use no more: what they hold can go, before anything else that is decided is carried out, as their ids may be used again.
    Free {
        /// Whose they were; `None`: shared ones.
        model: Option<ModelId>,
        /// The lanes.
        lanes: Vec<LaneId>,
    },
    /// The request's outputs are among those of this completed launch: answer it.
    Reply {
        /// The request.
        request: RequestId,
        /// The launch.
        launch: LaunchId,
    },
    /// The request will not be answered.
    Drop {
        /// The request.
        request: RequestId,
        /// Why.
        reason: DeviceDrop,
    },
    /// What else was decided, for logs and metrics: nothing to carry out.
    Note {
        /// The model.
        model: ModelId,
        /// What.
        note: Note,
    },
}
