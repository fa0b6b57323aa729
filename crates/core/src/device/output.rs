//! The outputs of a device's scheduler, which its driver carries out.

use serde::{Deserialize, Serialize};

use super::input_ring::RingRun;
use super::launch::Launch;
use super::note::Note;
use super::request::DeviceDrop;
use crate::ids::{LaneId, LaunchId, ModelId, PartitionId, RequestId};

/// A decision on a device, for the driver to carry out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DeviceOutput {
    /// Copy the request's input into these slots of its model's ring, then call
    /// [`super::DeviceScheduler::handle_input`]. Inputs are copied one after another, in the order
    /// of these outputs.
    Admit {
        /// The model.
        model: ModelId,
        /// The request.
        request: RequestId,
        /// The request's slots, one an item.
        slots: RingRun,
    },
    /// Run this launch.
    Launch(Launch),
    /// Run these launches side by side. None begins before all can begin (Abacus §6.3). Each has
    /// its own completion.
    Group(Vec<Launch>),
    /// Make lanes for a model in the background, then call
    /// [`super::DeviceScheduler::handle_prepared`]. [`super::DeviceScheduler::lane`] gives each
    /// lane's purpose.
    Prepare {
        /// The model.
        model: ModelId,
        /// The lanes to make.
        lanes: Vec<LaneId>,
        /// The lanes' partition.
        partition: PartitionId,
    },
    /// From now on the model's launches use other lanes, which were prepared. Launches that run on
    /// the former lanes end there.
    Switch {
        /// The model.
        model: ModelId,
        /// The model's former lanes. They become free with a later [`DeviceOutput::Free`].
        from: Vec<LaneId>,
        /// The model's new lanes.
        to: Vec<LaneId>,
    },
    /// These lanes are no longer in use. Release their resources before any later output is carried
    /// out, as their ids may be reused.
    Free {
        /// The model that had the lanes; `None`: they were shared.
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
    /// The request will get no answer.
    Drop {
        /// The request.
        request: RequestId,
        /// The reason.
        reason: DeviceDrop,
    },
    /// A note for logs and metrics, with nothing to carry out.
    Note {
        /// The model.
        model: ModelId,
        /// The note.
        note: Note,
    },
}
