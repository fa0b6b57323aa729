//! Moves models to another partition by request, while they serve.

use std::sync::Arc;

use downbeat_core::device::{BadMove, PartitionId};
use downbeat_host::device::{DeviceHost, Placement};
use downbeat_service::error::ServiceError;
use downbeat_service::report::device_report::{
    DeviceReport, DevicesReport, ExecutorReport, PartitionReport, PlacedModel,
};
use tokio::sync::oneshot;

use super::Registry;
use crate::serving::Model;

/// How long a request to move a model waits for that.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// A model version on a device, to be moved.
type Subject = (Arc<DeviceHost>, Arc<Placement>);

impl Registry {
    /// The report on the partitions of devices, and the models on each.
    pub(super) fn devices_report(&self) -> DevicesReport {
        let parts = self.loader.partitions().parts.iter().enumerate();
        let partition = |(index, part): (usize, &downbeat_engine::Part)| PartitionReport {
            partition: index as u32,
            size: part.size.clone(),
            units: part.units,
        };
        let groups = |device: usize| self.driver.hosts().iter().find(|host| host.device == device)?.groups();
        let device = |device| DeviceReport { device, models: Vec::new(), groups: groups(device) };
        let mut devices: Vec<DeviceReport> = (0..self.driver.devices()).map(device).collect();
        for (host, model) in self.serving.all().iter().flat_map(|served| subjects(served)) {
            let shares = self.shares.iter().find(|shares| shares.device() == host.device);
            devices[host.device].models.push(PlacedModel {
                model: model.name.clone(),
                version: model.version.clone(),
                policy: model.policy_name.to_owned(),
                partition: host.partition(&model).0,
                partitions: match model.engines.partitions().map(|partition| partition.0).collect::<Vec<_>>() {
                    none if none.is_empty() => vec![host.partition(&model).0],
                    all => all,
                },
                by_hand: match shares {
                    Some(shares) => shares.is_by_hand(&model.name),
                    None => self.loader.partitions().home(&model.name).is_some(),
                },
                share: shares.and_then(|shares| shares.report(&model)),
                executor: model.model.executor().map(ExecutorReport::of),
            });
        }
        let shares = self.options.device.shares.to_string();
        DevicesReport { shares, partitions: parts.map(partition).collect(), devices }
    }

    /// Whether devices are divided by the models' needs.
    pub fn has_shares(&self) -> bool {
        !self.shares.is_empty()
    }

    /// Has each device look at the shares of its models, if shares follow the models' needs. Must
    /// be called often.
    pub fn divide_devices(&self) {
        let served = if self.shares.is_empty() { Vec::new() } else { self.serving.all() };
        for shares in self.shares.iter() {
            let routed = served.iter().flat_map(|served| {
                let slo = self.options.slo(&served.definition.name, served.definition.slo);
                let versions = served.versions.values().filter(|version| version.hosts.is_routed);
                versions.filter_map(move |version| Some((version.hosts.on_device(shares.device())?, slo)))
            });
            shares.tick(&routed.collect::<Vec<_>>());
        }
    }

    /// Puts a model onto a partition, where it stays, or leaves it to its devices' shares again.
    async fn set_share(&self, name: &str, to: Option<usize>) -> Result<(), ServiceError> {
        let of_model = |reason: String| format!("model '{name}': {reason}");
        // A model that was just loaded gets its share now.
        self.divide_devices();
        let mut answers = Vec::new();
        for shares in self.shares.iter() {
            answers.extend(shares.set(name, to).map_err(|reason| ServiceError::InvalidArgument(of_model(reason)))?);
        }
        let answers =
            futures_util::future::try_join_all(answers.into_iter().map(async |is_there| {
                is_there.await.unwrap_or_else(|_| Err("the model is being unloaded".to_owned()))
            }));
        let late = || {
            Err(format!(
                "the model has not moved after {PATIENCE:?}; the server moves the model once other models make room"
            ))
        };
        let moved = tokio::time::timeout(PATIENCE, answers).await.unwrap_or_else(|_| late());
        moved.map(drop).map_err(|reason| ServiceError::Unavailable(of_model(reason)))
    }

    /// Moves a model to a partition of all its devices, where it stays until the next call; `None`:
    /// to its earlier partition. The model goes on serving.
    ///
    /// # Errors
    /// `NotFound`, `InvalidArgument`; `Unavailable` if its lanes cannot be made: it stays where it
    /// is.
    pub async fn move_model(&self, name: &str, partition: Option<u32>) -> Result<(), ServiceError> {
        let entry = self.entries.lock().get(name).cloned();
        let Some(entry) = entry else { return Err(self.why_not_served(name)) };
        // A load at the same time would come to the model's former partition.
        let _busy = entry.busy.lock().await;
        let invalid = |reason: String| ServiceError::InvalidArgument(format!("model '{name}': {reason}"));
        let served = self
            .serving
            .get(name)
            .ok_or_else(|| invalid("the model is not in service; load the model first".to_owned()))?;
        let partitions = self.loader.partitions();
        let asked = match (partition.map(|partition| partition as usize), partitions.parts.len()) {
            (_, 0) => return Err(invalid("the devices are not divided ([device] partitions)".to_owned())),
            (Some(to), count) if to >= count => {
                return Err(invalid(format!(
                    "there is no partition {to}; partitions are numbered from 0 to {}",
                    count - 1
                )));
            }
            (asked, _) => asked,
        };
        if !self.shares.is_empty() {
            return self.set_share(name, asked).await;
        }
        let Some(to) = asked.or_else(|| partitions.home(name)) else { return Ok(()) };
        move_all(&subjects(&served).collect::<Vec<_>>(), PartitionId(to as u32)).await?;
        match asked {
            Some(_) => partitions.set(name, to),
            None => partitions.set_free(name),
        }
        tracing::info!(model = %name, partition = to, by_hand = partition.is_some(), "moved");
        Ok(())
    }
}

/// The versions of a model on their devices.
fn subjects(served: &Model) -> impl Iterator<Item = Subject> {
    served.versions.values().flat_map(|version| version.hosts.devices().iter().cloned())
}

/// Moves all of them, or none.
async fn move_all(subjects: &[Subject], to: PartitionId) -> Result<(), ServiceError> {
    let mut prepared = Vec::new();
    let mut failed = None;
    for (host, model) in subjects {
        let (ready, is_ready) = oneshot::channel();
        // The receiver is gone if another device has failed.
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
        match is_ready.await.unwrap_or_else(|_| Err("the move was given up".to_owned())) {
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

fn why_not(model: &Placement, refused: &BadMove) -> ServiceError {
    let name = &model.name;
    match refused {
        BadMove::NoModel(_) => ServiceError::Unavailable(format!("model '{name}' is being unloaded")),
        BadMove::NoPartition(partition) => {
            ServiceError::InvalidArgument(format!("model '{name}': the device has no {partition}"))
        }
        BadMove::SharedLanes(_) => ServiceError::InvalidArgument(format!(
            "model '{name}' has the policy '{}', whose batches run on lanes of all models; only models with lanes of \
             their own can move, so give the model another device policy",
            model.policy_name
        )),
        BadMove::Busy(_) => {
            ServiceError::Unavailable(format!("lanes are being made for model '{name}' already; try again later"))
        }
    }
}
