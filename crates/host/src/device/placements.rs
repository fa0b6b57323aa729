//! The devices that a model version is on.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_service::error::ServiceError;

use super::device_host::DeviceHost;
use super::padding::Padding;
use super::placement::Placement;
use crate::request::batch_codec::{Admitted, BatchCodec};
use crate::run::activity::Activity;

/// The devices that a model version is on. Dropping it lets them forget the version.
pub struct Placements {
    /// The devices in their order, at least one.
    devices: Vec<(Arc<DeviceHost>, Arc<Placement>)>,
    /// Whether device policies make its batches; otherwise the scheduler does.
    pub is_routed: bool,
    padding: Option<Arc<Padding>>,
}

impl Placements {
    /// Makes a version that is on these devices, at least one.
    pub(super) fn new(
        devices: Vec<(Arc<DeviceHost>, Arc<Placement>)>,
        is_routed: bool,
        padding: Option<Arc<Padding>>,
    ) -> Self {
        assert!(!devices.is_empty(), "a model is on at least one device");
        Placements { devices, is_routed, padding }
    }

    /// The version on its first device.
    pub fn first(&self) -> &Placement {
        &self.devices[0].1
    }

    /// The length of a request, 0 if the model's shapes are fixed.
    ///
    /// # Errors
    /// `InvalidArgument` if it cannot be padded.
    pub fn length(&self, codec: &BatchCodec, request: &Admitted) -> Result<u32, ServiceError> {
        let Some(padding) = &self.padding else { return Ok(0) };
        padding.length(codec, request).map_err(ServiceError::InvalidArgument)
    }

    /// The working device that will probably be done first with its work of all models. The first
    /// one wins a tie.
    pub fn soonest(&self) -> &(Arc<DeviceHost>, Arc<Placement>) {
        let working = self.devices.iter().filter(|(_, model)| model.lost().is_none());
        let soonest = || working.min_by_key(|(host, model)| host.free_in(model));
        match &self.devices[..] {
            [only] => only,
            _ => soonest().unwrap_or(&self.devices[0]),
        }
    }

    /// How long it will probably be until one of them is done with all that it has.
    pub fn free_in(&self) -> Duration {
        self.devices.iter().map(|(host, model)| host.free_in(model)).min().unwrap_or(Duration::ZERO)
    }

    /// The devices, with the version on each.
    pub fn devices(&self) -> &[(Arc<DeviceHost>, Arc<Placement>)] {
        &self.devices
    }

    /// The version on this device; `None`: the version is not there.
    pub fn on_device(&self, device: usize) -> Option<Arc<Placement>> {
        let (_, model) = self.devices.iter().find(|(host, _)| host.device == device)?;
        Some(model.clone())
    }

    /// Why the version can run on no device any more; `None` if one works.
    pub fn lost(&self) -> Option<String> {
        let first = self.devices[0].1.lost()?;
        self.devices.iter().all(|(_, model)| model.lost().is_some()).then_some(first)
    }

    /// Items that wait for a launch, all devices.
    pub fn waiting(&self) -> u32 {
        self.devices.iter().map(|(host, model)| host.waiting(model)).sum()
    }

    /// Whether models of the server run or load.
    pub fn activity(&self) -> &Arc<Activity> {
        self.devices[0].0.watchdog.activity()
    }

    /// The version on each device.
    pub fn models(&self) -> Box<[Arc<Placement>]> {
        self.devices.iter().map(|(_, model)| model.clone()).collect()
    }

    /// Sets the gauges of the version's lanes on all its devices.
    pub fn update_metrics(&self) {
        self.devices.iter().for_each(|(host, model)| host.update_metrics(model));
    }
}

impl Drop for Placements {
    fn drop(&mut self) {
        // The threads of its lanes end by themselves: the last owner of the version may be one of
        // them.
        self.devices.iter().for_each(|(host, model)| host.remove_model(model));
    }
}
