//! Models that are pinned to devices, each with a queue of its own.

use std::collections::BTreeSet;

use downbeat_core::cluster::{ModelOptions, Reject, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use downbeat_sim::{ClusterScheduler, Decision};

/// Models on devices of their own, or shared with a few others, as in the partitions of GSLICE and
/// gpu-lets. No scheduler moves requests between devices.
///
/// | rule | source |
/// |---|---|
/// | a model's requests are divided among its devices in turn, in proportion to the share that each has of it | left open by GSLICE, and smoother than by chance; gpu-lets: by rate |
/// | a device batches what waits there, by the model's dispatch and drop policy | GSLICE §3.3: when the partition is free |
#[derive(Debug)]
pub struct Pinned {
    /// By model: its devices with the model's id there, its share, and the number of its requests
    /// so far.
    models: Vec<Vec<Place>>,
    /// By model: its future devices, with shares.
    plan: Vec<Vec<(DeviceId, f64)>>,
    /// The devices, each with a scheduler of its own.
    devices: Vec<PinnedDevice>,
    /// Devices that may have decisions to report.
    asked: BTreeSet<usize>,
}

#[derive(Debug)]
struct Place {
    device: usize,
    model: ModelId,
    share: f64,
    given: f64,
}

#[derive(Debug)]
struct PinnedDevice {
    scheduler: Scheduler,
    /// By local id: the cluster's id of the model.
    models: Vec<ModelId>,
}

impl Pinned {
    /// Makes a scheduler without models and devices. `plan` lists each model's devices, with the
    /// share of its requests for each.
    pub fn new(plan: Vec<Vec<(DeviceId, f64)>>) -> Self {
        Pinned { models: Vec::new(), plan, devices: Vec::new(), asked: BTreeSet::new() }
    }
}

impl ClusterScheduler for Pinned {
    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        let id = ModelId(self.models.len() as u32);
        let plan = self.plan.get(self.models.len()).map_or(&[][..], Vec::as_slice);
        let mut places = Vec::new();
        for (device, share) in plan {
            let index = device.0 as usize;
            let pinned = &mut self.devices[index];
            let model = pinned.scheduler.add_model(now, options.clone());
            pinned.models.push(id);
            places.push(Place { device: index, model, share: *share, given: 0.0 });
        }
        self.models.push(places);
        id
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        let mut scheduler = Scheduler::new();
        scheduler.add_device(now, kind);
        self.devices.push(PinnedDevice { scheduler, models: Vec::new() });
        DeviceId(self.devices.len() as u32 - 1)
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        let places = self.models.get_mut(request.model.0 as usize).ok_or(Reject::UnknownModel)?;
        let due = |place: &Place| (place.given + 1.0) / place.share;
        let place = places.iter_mut().filter(|place| place.share > 0.0).min_by(|a, b| due(a).total_cmp(&due(b)));
        let place = place.ok_or(Reject::UnknownModel)?;
        place.given += 1.0;
        self.asked.insert(place.device);
        let request = Request { model: place.model, ..request };
        self.devices[place.device].scheduler.handle_request(now, request).map(drop)
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let Some(pinned) = self.devices.get_mut(device.0 as usize) else { return };
        pinned.scheduler.handle_completion(now, DeviceId(0), batch);
        self.asked.insert(device.0 as usize);
    }

    fn handle_timeout(&mut self, now: Time) {
        for (index, pinned) in self.devices.iter_mut().enumerate() {
            if pinned.scheduler.poll_timeout().is_some_and(|(at, _)| at <= now) {
                pinned.scheduler.handle_timeout(now);
                self.asked.insert(index);
            }
        }
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        while let Some(index) = self.asked.first().copied() {
            let PinnedDevice { scheduler, models } = &mut self.devices[index];
            let whose = |model: ModelId| models[model.0 as usize];
            match scheduler.poll_output().map(Decision::from) {
                Some(Decision::Dispatch { batch, model, members, size, start, expected, .. }) => {
                    let (device, model) = (DeviceId(index as u32), whose(model));
                    return Some(Decision::Dispatch { batch, device, model, members, size, start, expected });
                }
                Some(Decision::Drop { request, model, reason }) => {
                    return Some(Decision::Drop { request, model: whose(model), reason });
                }
                Some(Decision::Preempt { .. }) | None => self.asked.remove(&index),
            };
        }
        None
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.devices.iter().filter_map(|pinned| pinned.scheduler.poll_timeout()).map(|(at, _)| at).min()
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        if let Some(index) = self.asked.first() {
            // Recycles into a device that is about to make a decision.
            self.devices[*index].scheduler.recycle(members);
        }
    }
}
