//! The interface of a device's arbiter, which decides for all models of the device together.

use std::fmt::Debug;

use super::launch::{Permit, Span};
use super::note::Note;
use super::overlap::{GroupSettings, GroupStats, OverlapModel};
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::segment_profile::SegmentProfile;
use super::turn::DeviceTimeout;
use crate::ids::{ModelId, RequestId};
use crate::time::Time;

/// A decision of an arbiter, which the device's scheduler carries out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ArbiterOutput {
    /// Let the policies launch these requests, whose launches begin together. Then call
    /// [`DeviceArbiter::handle_begin`].
    Permit(Vec<(ModelId, Permit)>),
    /// Give up a request.
    Drop {
        /// The request's model.
        model: ModelId,
        /// The request.
        request: RequestId,
        /// The reason.
        reason: DeviceDrop,
    },
}

/// Decides which requests of which models of a device run beside each other. A
/// [`DeviceScheduler`](super::DeviceScheduler) has at most one arbiter and asks it about each event
/// of the models that are under it ([`Arbitrated::under`](super::Arbitrated::under)). The policies
/// of these models launch only what the arbiter permits ([`Turn::permit`](super::Turn::permit)).
///
/// Time never goes back. After each `handle_*` call the scheduler takes all decisions and then asks
/// for the next timeout. The same calls give the same decisions.
pub trait DeviceArbiter: Debug + Send {
    /// Handles a model that comes under the arbiter or changes, with the latencies of its segments.
    /// `None`: the model goes, and has no more requests.
    fn handle_model(&mut self, now: Time, model: ModelId, comes: Option<(OverlapModel, SegmentProfile)>);

    /// Handles a change of the settings.
    fn handle_settings(&mut self, now: Time, settings: GroupSettings);

    /// Handles a request that its policy has accepted.
    ///
    /// # Errors
    /// If the request cannot be accepted; then nothing has changed.
    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject>;

    /// Handles a request that is answered or given up, or whose client has gone.
    fn handle_end(&mut self, now: Time, request: RequestId);

    /// Handles the begin of the permitted launches. There are fewer launches than permits if a
    /// policy no longer has a request.
    fn handle_begin(&mut self, now: Time, launches: usize);

    /// Handles the end of a permitted launch. The last of the launches that began together gives a
    /// note about a model.
    fn handle_completion(&mut self, now: Time, span: Span) -> Option<(ModelId, Note)>;

    /// Handles the time that [`poll_timeout`](Self::poll_timeout) returned. A call at another time
    /// does no harm.
    fn handle_timeout(&mut self, now: Time);

    /// Takes the next decision.
    fn poll_output(&mut self) -> Option<ArbiterOutput>;

    /// When to call [`handle_timeout`](Self::handle_timeout), and the reason.
    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)>;

    /// The counters of launches that began together.
    fn stats(&self) -> GroupStats;
}
