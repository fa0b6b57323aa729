//! Models that somebody puts onto another partition while they serve.

use std::sync::Arc;

use downbeat_core::device::{BadMove, PartitionId};
use tokio::sync::oneshot;

use super::Registry;
use crate::device_report::{DeviceReport, DevicesReport, PartitionReport, PlacedModel};
use crate::error::ServiceError;
use crate::host::{DeviceHost, HostedModel};
use crate::serving::ServedModel;

/// A model version on a device, to be moved.
type Subject = (Arc<DeviceHost>, Arc<HostedModel>);

impl Registry {
    /// What devices are divided into, and which model is where.
    pub(super) fn devices_report(&self) -> DevicesReport {
        let parts = self.loader.partitions().parts.iter().enumerate();
        let partition = |(index, part): (usize, &downbeat_engine::Part)| PartitionReport {
            partition: index as u32,
            size: part.size.clone(),
            units: part.units,
        };
        let device = |device| DeviceReport { device, models: Vec::new() };
        let mut devices: Vec<DeviceReport> = (0..self.driver.devices()).map(device).collect();
        for (host, model) in self.serving.all().iter().flat_map(|served| subjects(served)) {
            devices[host.device].models.push(PlacedModel {
                model: model.name.clone(),
                version: model.version.clone(),
                policy: model.policy_name.to_owned(),
                partition: host.partition(&model).0,
                by_hand: self.loader.partitions().home(&model.name).is_some(),
            });
        }
        DevicesReport { partitions: parts.map(partition).collect(), devices }
    }

    /// Moves a model to a partition, of all its devices, where it stays until somebody moves it again; `None`: to where it was before somebody moved it. It goes on serving.
    ///
    /// # Errors
    /// `NotFound`, `InvalidArgument`; `Unavailable` if it cannot be made ready there: it stays where it is.
    pub async fn move_model(&self, name: &str, partition: Option<u32>) -> Result<(), ServiceError> {
        let entry = self.entries.lock().get(name).cloned();
        let Some(entry) = entry else { return Err(self.why_not_served(name)) };
        // What is loaded meanwhile would come to where the model was.
        let _busy = entry.busy.lock().await;
        let (served, partitions) = (self.served(name)?, self.loader.partitions());
        let invalid = |reason: String| ServiceError::InvalidArgument(format!("model '{name}': {reason}"));
        let to = match (partition.map(|partition| partition as usize), partitions.parts.len()) {
            (_, 0) => return Err(invalid("the devices are not divided ([device] partitions)".to_owned())),
            (Some(to), count) if to >= count => {
                return Err(invalid(format!("there is no partition {to}; they are numbered from 0 to {}", count - 1)));
            }
            (Some(to), _) => to,
            (None, _) => match partitions.home(name) {
                Some(home) => home,
                None => return Ok(()),
            },
        };
        move_all(&subjects(&served).collect::<Vec<_>>(), PartitionId(to as u32)).await?;
        match partition {
            Some(_) => partitions.set(name, to),
            None => partitions.set_free(name),
        }
        tracing::info!(model = %name, partition = to, by_hand = partition.is_some(), "moved");
        Ok(())
    }
}

/// The versions of a model on their devices.
fn subjects(served: &ServedModel) -> impl Iterator<Item = Subject> {
    served.versions.values().flat_map(|version| version.hosts.devices().iter().cloned())
}

/// Moves all of them, or none.
async fn move_all(subjects: &[Subject], to: PartitionId) -> Result<(), ServiceError> {
    let mut prepared = Vec::new();
    let mut failed = None;
    for (host, model) in subjects {
        let (ready, is_ready) = oneshot::channel();
        // Nobody waits any more where another has failed.
        let ready = Box::new(move |made| drop(ready.send(made)));
        match host.prepare_move(model, to, ready) {
            Ok(true) => prepared.push(((host, model), is_ready)),
            Ok(false) => {}
            Err(refused) => {
                failed = Some(why_not(model, &refused));
                break;
            }
        }
    }
    let mut ready = Vec::new();
    for (subject, is_ready) in prepared {
        match is_ready.await.unwrap_or_else(|_| Err("it was given up".to_owned())) {
            Ok(()) => ready.push(subject),
            Err(reason) => {
                let message =
                    format!("model '{}' stays where it is: {to} cannot be made ready: {reason}", subject.1.name);
                failed = Some(ServiceError::Unavailable(message));
            }
        }
    }
    for (host, model) in ready {
        match failed {
            None => drop(host.change_over(model)),
            // Lanes that are ready go.
            Some(_) => drop(host.prepare_move(model, host.partition(model), Box::new(|_| ()))),
        }
    }
    failed.map_or(Ok(()), Err)
}

fn why_not(model: &HostedModel, refused: &BadMove) -> ServiceError {
    let name = &model.name;
    match refused {
        BadMove::NoModel(_) => ServiceError::Unavailable(format!("model '{name}' is going")),
        BadMove::NoPartition(partition) => {
            ServiceError::InvalidArgument(format!("model '{name}': the device has no {partition}"))
        }
        BadMove::SharedLanes(_) => ServiceError::InvalidArgument(format!(
            "model '{name}' has the policy '{}', whose batches run on lanes of all models; only models with lanes of their own move: give it another device policy",
            model.policy_name
        )),
        BadMove::Busy(_) => {
            ServiceError::Unavailable(format!("lanes are being made for model '{name}' already; try again later"))
        }
    }
}
