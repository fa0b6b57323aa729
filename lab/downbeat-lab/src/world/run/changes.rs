//! Changes of a world while it runs: faults, device layouts, and loaded models.

use downbeat_core::device::{ExclusiveOptions, LaneId, Layout, PartitionId, PolicyOptions};
use downbeat_core::{ModelId, RequestId};

use super::{Fault, Open, Outside, Serving, Slot, World};

impl World<'_> {
    pub(super) fn go_wrong(&mut self, fault: Fault, outside: &mut dyn Outside) {
        let now = self.now;
        match fault {
            Fault::Lost(device) if !self.hosts[device].lost => {
                self.ledger.lost(device, true);
                self.remove_slots(device, &[]);
                for model in &mut self.models {
                    model.on.remove(&device);
                }
                self.hosts[device].lose(now, outside);
            }
            Fault::Back(device) if self.hosts[device].lost => {
                self.ledger.lost(device, false);
                self.hosts[device].lost = false;
                for model in 0..self.models.len() {
                    if let Some(serving) = self.models[model].serving.clone() {
                        self.put(model, &serving, device);
                    }
                }
                self.add_slots(device);
            }
            Fault::Lost(_) | Fault::Back(_) => {}
            Fault::Late(device, by) => self.hosts[device].late = by,
            Fault::Layout(device, layout) => self.divide(device, &layout),
            Fault::Load(model, serving) => self.load(model, &serving),
            Fault::Remove(model) => self.remove(model),
            Fault::Delay(most) => self.cluster.delay = most,
            Fault::Leave(model) => {
                let of = |open: &Open| open.request.model == ModelId(model as u32);
                let ids: Vec<RequestId> =
                    self.requests.iter().filter(|(_, open)| of(open)).map(|(id, _)| *id).collect();
                for id in ids {
                    self.leave(id, outside);
                }
            }
        }
    }

    /// Divides a device.
    pub fn divide(&mut self, device: usize, layout: &Layout) {
        if self.hosts[device].layout(self.now, layout).is_err() {
            return;
        }
        self.ledger.changed(device);
        let lanes: Vec<LaneId> = self.lanes(device);
        self.remove_slots(device, &lanes);
        if !self.hosts[device].lost {
            self.add_slots(device);
        }
    }

    /// Returns the lanes that are slots.
    fn lanes(&self, device: usize) -> Vec<LaneId> {
        let scheduler = &self.hosts[device].scheduler;
        let lanes = |partition| scheduler.shared_lanes(PartitionId(partition)).to_vec();
        (0..self.hosts[device].partitions()).flat_map(lanes).collect()
    }

    fn remove_slots(&mut self, device: usize, but: &[LaneId]) {
        for (id, slot) in &mut self.slots {
            if slot.present && slot.host == device && !but.contains(&slot.lane) {
                slot.present = false;
                self.cluster.post(|cluster| cluster.remove_device(*id));
            }
        }
    }

    fn add_slots(&mut self, device: usize) {
        for lane in self.lanes(device) {
            if !self.slots.values().any(|slot| slot.present && (slot.host, slot.lane) == (device, lane)) {
                let id = self.cluster.post(|cluster| cluster.add_device(self.kinds[device]));
                self.slots.insert(id, Slot { host: device, lane, present: true });
            }
        }
    }

    /// Loads a model. A loaded one is reloaded.
    pub fn load(&mut self, model: usize, serving: &Serving) {
        self.leave_cluster(model);
        let stays = |device: &usize| match serving {
            Serving::Cluster(_) => true,
            Serving::Devices(_, devices) => devices.contains(device),
        };
        for device in self.models[model].on.clone().iter().filter(|device| !stays(device)) {
            self.take(model, *device);
        }
        if let Serving::Cluster(options) = serving {
            let place = self.cluster.post(|cluster| cluster.add_model(options.clone()));
            self.clustered.insert(place.model, model);
            self.models[model].clustered = Some(place);
        }
        for device in 0..self.hosts.len() {
            self.put(model, serving, device);
        }
        self.models[model].serving = Some(serving.clone());
    }

    /// Puts a model on a device, if the device is present and is among those that the model names.
    fn put(&mut self, model: usize, serving: &Serving, device: usize) {
        let built = match serving {
            _ if self.hosts[device].lost => return,
            Serving::Cluster(options) => {
                let profile = self.models[model].emulated.profile(&[0], options.max_batch.max(1));
                Ok(ExclusiveOptions { profile: profile.unwrap_or_else(|bad| panic!("a model has a profile: {bad}")) }
                    .build())
            }
            Serving::Devices(spec, devices) if devices.contains(&device) => spec.build(),
            Serving::Devices(..) => return,
        };
        if let Ok(policy) = built {
            self.place(model, device, policy);
        }
    }

    fn take(&mut self, model: usize, device: usize) {
        self.models[model].on.remove(&device);
        self.ledger.changed(device);
        // A removal is never refused.
        let _ = self.hosts[device].model(self.now, ModelId(model as u32), None);
    }

    fn leave_cluster(&mut self, model: usize) {
        if let Some(place) = self.models[model].clustered.take() {
            self.cluster.post(|cluster| cluster.remove_model(place));
        }
    }

    pub(super) fn remove(&mut self, model: usize) {
        self.leave_cluster(model);
        for device in std::mem::take(&mut self.models[model].on) {
            self.take(model, device);
        }
        self.models[model].serving = None;
    }
}
