//! The devices of each model. Example: two equal devices with different models are two kinds to the
//! scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{bail, ensure};
use downbeat_core::device::PartitionId;
use downbeat_core::{DeviceKind, DeviceProfiles, LatencyProfile};
use downbeat_engine_ort::GpuInfo;
use downbeat_repository::{ModelDefinition, ModelFormat};
use downbeat_service::options::{MOST_DEVICES, PlacementPlan, PlannedSubCluster, ServerOptions};

/// The devices of each model: by the options (`[placement]`, `--plan`), or else by its
/// `instance_group`. All other models are on all devices.
pub struct DeviceMap {
    chosen: BTreeMap<String, Vec<usize>>,
    /// By device; none: no device is a GPU.
    gpus: Vec<u32>,
    /// By device: the number of its hardware, from 0. Devices of the same number are alike.
    hardware: Arc<[usize]>,
    /// By device, then by partition. Partitions of a kind have the same models and are alike. There
    /// is one kind if all devices are alike and no model is placed, no device divided.
    pub kinds: Vec<Vec<DeviceKind>>,
}

/// The devices of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelDevices {
    /// The devices that the server had when the model was loaded, ascending.
    pub devices: Arc<[usize]>,
    /// The partitions of these devices, at least one, first the one that it was loaded for. If
    /// devices are not divided, the first partition.
    pub partitions: Arc<[PartitionId]>,
    /// The kinds of these partitions, each with its site; `None`: all kinds, also later ones, which
    /// are alike.
    kinds: Option<Arc<[(DeviceKind, usize)]>>,
    /// By device: the number of its hardware.
    hardware: Arc<[usize]>,
}

impl DeviceMap {
    /// Places models on `devices` devices with as many `partitions` each, as the options have
    /// [`chosen`]. `gpus` describes the devices, if they are GPUs. The places of the `known` models
    /// decide which devices the scheduler tells apart. Each partition has models of its own.
    ///
    /// # Errors
    /// If there are more kinds than are supported.
    pub fn new(
        chosen: BTreeMap<String, Vec<usize>>,
        devices: usize,
        gpus: &[GpuInfo],
        known: &[ModelDefinition],
        partitions: usize,
    ) -> anyhow::Result<Self> {
        let hardware = alike(devices, gpus);
        let ordinals = gpus.iter().map(|gpu| gpu.ordinal).collect();
        let mut placement = DeviceMap { chosen, gpus: ordinals, hardware: hardware.clone().into(), kinds: Vec::new() };
        let sets: Vec<Vec<usize>> = known.iter().filter_map(|model| placement.devices(model)).collect();
        let others = placement.chosen.values().cloned();
        placement.kinds = kinds(&hardware, partitions, &sets.into_iter().chain(others).collect::<Vec<_>>())?;
        Ok(placement)
    }

    /// The devices that a model is kept to; `None`: it is on all.
    fn devices(&self, model: &ModelDefinition) -> Option<Vec<usize>> {
        let by_gpu = |gpus: &Vec<u32>| {
            let devices = self.gpus.iter().enumerate().filter(|(_, gpu)| gpus.contains(gpu));
            devices.map(|(device, _)| device).collect()
        };
        let chosen = self.chosen.get(&model.name).cloned();
        let asked = model.gpus.as_ref().filter(|_| model.format == ModelFormat::Onnx && !self.gpus.is_empty());
        let mut devices: Vec<usize> = chosen.or_else(|| asked.map(by_gpu))?;
        devices.sort_unstable();
        devices.dedup();
        Some(devices)
    }

    /// The places of a model, of `all` devices that there are now, on these of their partitions if
    /// they are divided. `by_scheduler`: the scheduler makes its batches.
    ///
    /// # Errors
    /// If the scheduler does not tell these devices from others.
    pub fn of(
        &self,
        model: &ModelDefinition,
        partitions: &[usize],
        by_scheduler: bool,
        all: usize,
    ) -> anyhow::Result<ModelDevices> {
        let devices = match (self.devices(model), partitions) {
            (Some(devices), _) => devices,
            (None, []) if self.hardware.iter().all(|hardware| *hardware == 0) => {
                return Ok(ModelDevices::everywhere(all));
            }
            (None, _) => (0..all).collect(),
        };
        let partitions = if partitions.is_empty() { &[0] } else { partitions };
        let mut placed = ModelDevices {
            devices: devices.into(),
            partitions: partitions.iter().map(|partition| PartitionId(*partition as u32)).collect(),
            kinds: None,
            hardware: self.hardware.clone(),
        };
        let kind = |device: usize, partition: PartitionId| self.kinds.get(device)?.get(partition.0 as usize).copied();
        let its = placed.places().filter_map(|(device, on)| Some((kind(device, on)?, placed.site(device, on))));
        let mut kinds: Vec<(DeviceKind, usize)> = its.collect();
        kinds.sort_unstable();
        kinds.dedup();
        let has = |device: usize| {
            let mut alike = placed.partitions.iter().filter_map(|on| kind(device, *on));
            alike.any(|kind| kinds.iter().any(|(its, _)| *its == kind))
        };
        let cut = (0..self.kinds.len()).find(|device| has(*device) && !placed.devices.contains(device));
        if let Some(other) = cut.filter(|_| by_scheduler) {
            bail!(
                "it is to be on {}, and not on device {other}: the server was started with the same models on all of these, and its scheduler does not tell them apart. Start it again, or \
                 give the model a device policy",
                listed(&placed.devices)
            );
        }
        placed.kinds = Some(kinds.into());
        Ok(placed)
    }
}

impl ModelDevices {
    /// A place on all of `devices` devices, which are alike.
    pub fn everywhere(devices: usize) -> Self {
        let (hardware, partitions) = (vec![0; devices].into(), [PartitionId::default()].into());
        ModelDevices { devices: (0..devices).collect(), partitions, kinds: None, hardware }
    }

    /// The partition that it was loaded for.
    pub fn home(&self) -> PartitionId {
        self.partitions.first().copied().unwrap_or_default()
    }

    /// The model's places: each of its partitions on each of its devices.
    pub fn places(&self) -> impl Iterator<Item = (usize, PartitionId)> {
        self.devices.iter().flat_map(|device| self.partitions.iter().map(|partition| (*device, *partition)))
    }

    /// The number of its site on a device and partition: it runs alike on all places of the same
    /// site.
    pub fn site(&self, device: usize, partition: PartitionId) -> usize {
        let hardware = self.hardware.get(device).copied().unwrap_or(0);
        let position = self.partitions.iter().position(|its| *its == partition).unwrap_or(0);
        hardware * self.partitions.len() + position
    }

    /// The number of sites, at least one.
    pub fn sites(&self) -> usize {
        self.hardware.iter().max().map_or(1, |last| last + 1) * self.partitions.len()
    }

    /// The profiles that the scheduler plans with, from the model's profile at each site.
    pub fn profiles(&self, at: impl Fn(usize) -> LatencyProfile) -> DeviceProfiles {
        let kinds = self.kinds.as_ref();
        let kept =
            kinds.and_then(|kinds| DeviceProfiles::by_kind(kinds.iter().map(|(kind, site)| (*kind, at(*site)))).ok());
        kept.unwrap_or_else(|| at(0).into())
    }
}

/// The number of devices that the options imply, if they do not set it; 0: they imply none.
pub fn devices_named(options: &ServerOptions) -> usize {
    let placed = options.placement.values().flatten().max().map_or(0, |last| last + 1);
    let planned = options.plan.iter().flat_map(|plan| &plan.sub_clusters).map(least_devices).sum();
    placed.max(planned).min(MOST_DEVICES)
}

/// The devices of each model that the options keep to some of `devices`. `names` are the models of
/// the repositories.
///
/// # Errors
/// If a model is put on no device or on a missing one; if the plan has more sub-clusters than there
/// are devices.
pub fn chosen(
    options: &ServerOptions,
    devices: usize,
    names: &[String],
) -> anyhow::Result<BTreeMap<String, Vec<usize>>> {
    let mut chosen = BTreeMap::new();
    for (model, on) in &options.placement {
        ensure!(
            !on.is_empty(),
            "[placement]: model '{model}' is on no device; leave its line out to place it on all devices"
        );
        if let Some(unknown) = on.iter().find(|device| **device >= devices) {
            bail!("[placement]: model '{model}' is to be on device {unknown}, and {}", there_are(devices));
        }
        chosen.insert(model.clone(), on.clone());
    }
    let Some(plan) = &options.plan else { return Ok(chosen) };
    let mut placed = BTreeSet::new();
    for (sub_cluster, on) in plan.sub_clusters.iter().zip(shares(plan, devices)?) {
        for model in &sub_cluster.models {
            ensure!(placed.insert(model), "the plan has model '{model}' in two sub-clusters, or twice in one");
            chosen.insert(model.clone(), on.clone());
        }
    }
    let rest: Vec<&str> = names.iter().filter(|name| !chosen.contains_key(*name)).map(String::as_str).collect();
    if !rest.is_empty() {
        tracing::warn!(
            "models that are not in the plan are on every device unless their configuration says otherwise: {}",
            rest.join(", ")
        );
    }
    Ok(chosen)
}

/// The devices that a sub-cluster needs at least; one without models needs none.
fn least_devices(sub_cluster: &PlannedSubCluster) -> usize {
    if sub_cluster.models.is_empty() { 0 } else { (sub_cluster.devices_needed.ceil() as usize).clamp(1, MOST_DEVICES) }
}

/// Divides all devices among the sub-clusters of a plan, in the order of the sub-clusters. Each
/// gets at least one device, and each further device goes to the sub-cluster with the most need.
///
/// # Errors
/// If there are fewer devices than sub-clusters.
fn shares(plan: &PlacementPlan, devices: usize) -> anyhow::Result<Vec<Vec<usize>>> {
    let mut counts: Vec<usize> = plan.sub_clusters.iter().map(|planned| least_devices(planned).min(1)).collect();
    let at_least: usize = counts.iter().sum();
    ensure!(
        at_least <= devices,
        "the plan has {at_least} sub-clusters with models, and {}; plan for as many sub-clusters as there are devices, or fewer",
        there_are(devices)
    );
    for _ in at_least..devices {
        // The most load on each of its devices wins; the fewest devices win a tie.
        let load = |index: usize, count: usize| plan.sub_clusters[index].devices_needed.max(0.0) / count as f64;
        let most = |(a, a_count): &(usize, &mut usize), (b, b_count): &(usize, &mut usize)| {
            load(*a, **a_count).total_cmp(&load(*b, **b_count)).then(b_count.cmp(a_count)).then(b.cmp(a))
        };
        let Some((_, count)) = counts.iter_mut().enumerate().filter(|(_, count)| **count > 0).max_by(most) else {
            break;
        };
        *count += 1;
    }
    let mut next = 0;
    let mut take = |count: usize| {
        let from = next;
        next += count;
        (from..next).collect()
    };
    Ok(counts.into_iter().map(&mut take).collect())
}

/// By device, the number of its hardware, from 0: devices that are alike have the same number.
fn alike(devices: usize, gpus: &[GpuInfo]) -> Vec<usize> {
    let what = |device: usize| gpus.get(device).map(|gpu| (&*gpu.name, gpu.multiprocessors, gpu.capability));
    // The first device of each number.
    let mut known: Vec<usize> = Vec::new();
    let number = |device: usize| {
        known.iter().position(|other| what(*other) == what(device)).unwrap_or_else(|| {
            known.push(device);
            known.len() - 1
        })
    };
    (0..devices).map(number).collect()
}

/// Numbers the kinds of partitions. Two partitions are of one kind if their devices are alike and
/// in the same of `sets`, and they have the same number on their devices.
///
/// # Errors
/// If there are more than are supported.
fn kinds(hardware: &[usize], partitions: usize, sets: &[Vec<usize>]) -> anyhow::Result<Vec<Vec<DeviceKind>>> {
    let mut known: Vec<(usize, usize, Vec<bool>)> = Vec::new();
    let mut kind = |device: usize, partition: usize| {
        let has = (hardware[device], partition, sets.iter().map(|set| set.contains(&device)).collect());
        let kind = known.iter().position(|other| *other == has).unwrap_or_else(|| {
            known.push(has);
            known.len() - 1
        });
        DeviceKind(kind as u32)
    };
    let kinds =
        (0..hardware.len()).map(|device| (0..partitions).map(|partition| kind(device, partition)).collect()).collect();
    let most = DeviceKind::LARGEST.0 as usize + 1;
    let (each, remedy) = match partitions {
        1 => ("devices are", "give more of the models the same devices"),
        _ => (
            "devices' partitions are",
            "give more of the models the same devices, or divide these into fewer partitions",
        ),
    };
    ensure!(
        known.len() <= most,
        "the placement makes the {each} of {} kinds, each with other models; at most {most} kinds are supported: {remedy}",
        known.len()
    );
    Ok(kinds)
}

/// The number of devices, in words.
fn there_are(devices: usize) -> String {
    match devices {
        1 => "there is only device 0; `devices` says how many there are on the CPU".to_owned(),
        _ => format!("there are only devices 0 to {}", devices - 1),
    }
}

/// Devices, in words.
fn listed(devices: &[usize]) -> String {
    let numbers: Vec<String> = devices.iter().map(usize::to_string).collect();
    format!("device{} {}", if devices.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sub_cluster(models: &[&str], devices_needed: f64) -> PlannedSubCluster {
        let models = models.iter().map(|name| (*name).to_owned()).collect();
        PlannedSubCluster { index: 0, models, devices_needed }
    }

    fn planned(sub_clusters: Vec<PlannedSubCluster>, devices: usize) -> Result<BTreeMap<String, Vec<usize>>, String> {
        let mut options = ServerOptions::new("models".into());
        options.plan = Some(PlacementPlan { sub_clusters });
        options.placement = [("a".to_owned(), vec![1]), ("z".to_owned(), vec![0])].into();
        chosen(&options, devices, &["a", "b", "c", "z"].map(str::to_owned)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plan_gives_sub_clusters_their_devices_and_beats_the_file() {
        let on = |clusters, devices| planned(clusters, devices).unwrap();
        let clusters = || vec![sub_cluster(&["b", "a"], 0.4), sub_cluster(&[], 0.0), sub_cluster(&["c"], 2.5)];
        let two = on(clusters(), 2);
        assert_eq!((&two["a"], &two["b"], &two["c"], &two["z"]), (&vec![0], &vec![0], &vec![1], &vec![0]));
        let five = on(clusters(), 5);
        assert_eq!((&five["a"], &five["c"]), (&vec![0], &vec![1, 2, 3, 4]), "by what they need");
        let mut options = ServerOptions::new("models".into());
        options.plan = Some(PlacementPlan { sub_clusters: clusters() });
        assert_eq!(devices_named(&options), 4);
    }

    #[test]
    fn a_plan_that_cannot_be_followed_is_refused() {
        let error = planned(vec![sub_cluster(&["a"], 1.0), sub_cluster(&["a"], 1.0)], 2).unwrap_err();
        assert!(error.contains("'a' in two sub-clusters"), "{error}");
        let clusters = vec![sub_cluster(&["a"], 0.1), sub_cluster(&["b"], 0.1), sub_cluster(&["c"], 0.1)];
        let error = planned(clusters, 2).unwrap_err();
        assert!(error.contains("3 sub-clusters with models, and there are only devices 0 to 1"), "{error}");
        let error = planned(Vec::new(), 1).unwrap_err();
        assert!(error.contains("'a' is to be on device 1, and there is only device 0"), "{error}");
    }

    #[test]
    fn devices_are_of_as_few_kinds_as_tell_the_models_apart() {
        let of = |devices, sets: &[&[usize]]| {
            let sets: Vec<Vec<usize>> = sets.iter().map(|set| set.to_vec()).collect();
            kinds(&vec![0; devices], 1, &sets).unwrap().into_iter().flatten().map(|kind| kind.0).collect::<Vec<_>>()
        };
        assert_eq!(of(3, &[]), [0, 0, 0]);
        assert_eq!(of(2, &[&[0, 1], &[1, 0]]), [0, 0], "on all");
        assert_eq!(of(4, &[&[0, 1], &[2, 3], &[0, 1, 2, 3]]), [0, 0, 1, 1]);
        assert_eq!(of(4, &[&[0, 1], &[1, 2]]), [0, 1, 2, 3]);
        let alone: Vec<Vec<usize>> = (0..65).map(|device| vec![device]).collect();
        let error = kinds(&[0; 65], 1, &alone).unwrap_err().to_string();
        assert!(error.contains("65 kinds") && error.contains("at most 64"), "{error}");
    }

    #[test]
    fn the_scheduler_plans_with_the_profile_of_each_hardware() {
        let gpu = |name: &str, multiprocessors| GpuInfo {
            ordinal: 0,
            name: name.to_owned(),
            capability: (9, 0),
            memory: 1 << 30,
            multiprocessors,
            uuid: String::new(),
        };
        let gpus = [gpu("large", 132), gpu("small", 20), gpu("large", 132), gpu("large", 60)];
        assert_eq!(alike(4, &gpus), [0, 1, 0, 2]);
        assert_eq!(alike(3, &[]), [0, 0, 0], "the CPU");
        let placement = DeviceMap::new(BTreeMap::new(), 4, &gpus, &[], 2).unwrap();
        let kinds: Vec<Vec<u32>> =
            placement.kinds.iter().map(|device| device.iter().map(|kind| kind.0).collect()).collect();
        assert_eq!(kinds, [[0, 1], [2, 3], [0, 1], [4, 5]]);
        let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models");
        let model = downbeat_repository::ModelRepository::open(examples).unwrap().definition("mlp", None).unwrap();
        let placed = placement.of(&model, &[1], true, 4).unwrap();
        assert_eq!((placed.sites(), placed.site(3, PartitionId(1))), (3, 2));
        let takes = |site: usize| {
            let ms = downbeat_core::Duration::from_millis(1 + site as u64);
            LatencyProfile::linear(ms, downbeat_core::Duration::ZERO, 4).unwrap()
        };
        let profiles = placed.profiles(takes);
        let of = |kind| profiles.get(DeviceKind(kind));
        assert_eq!((of(1), of(3), of(5)), (Some(&takes(0)), Some(&takes(1)), Some(&takes(2))));
        assert_eq!(of(0), None, "it is on the other partition");
        let placed = placement.of(&model, &[1, 0], true, 4).unwrap();
        assert_eq!((placed.sites(), placed.home()), (6, PartitionId(1)));
        let profiles = placed.profiles(takes);
        let of = |kind| profiles.get(DeviceKind(kind));
        assert_eq!((of(1), of(0), of(3), of(2)), (Some(&takes(0)), Some(&takes(1)), Some(&takes(2)), Some(&takes(3))));
    }

    #[test]
    fn each_partition_is_of_a_kind_of_its_own_on_whichever_devices() {
        let of = |devices, partitions, sets: &[Vec<usize>]| {
            let by_device = kinds(&vec![0; devices], partitions, sets).unwrap().into_iter();
            by_device.map(|device| device.into_iter().map(|kind| kind.0).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(of(1, 3, &[]), [[0, 1, 2]]);
        assert_eq!(of(2, 2, &[]), [[0, 1], [0, 1]], "devices are divided alike");
        assert_eq!(of(3, 2, &[vec![1]]), [[0, 1], [2, 3], [0, 1]]);
        let alone: Vec<Vec<usize>> = (0..33).map(|device| vec![device]).collect();
        let error = kinds(&[0; 33], 2, &alone).unwrap_err().to_string();
        assert!(error.contains("partitions are of 66 kinds") && error.contains("fewer partitions"), "{error}");
    }
}
