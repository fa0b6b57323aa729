//! Which models are on which devices, and what the scheduler has to tell apart for that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{bail, ensure};
use downbeat_core::device::PartitionId;
use downbeat_core::{DeviceKind, DeviceProfiles, LatencyProfile};
use downbeat_repository::{ModelDefinition, ModelFormat};

use crate::options::{MOST_DEVICES, PlacementPlan, PlannedSubCluster, ServerOptions};

/// Which models are on which devices: by what the options say of a model (`[placement]`, `--plan`), or else its `instance_group`. Everything else is on all devices.
pub struct Placement {
    chosen: BTreeMap<String, Vec<usize>>,
    /// By device; none: no device is a GPU.
    gpus: Vec<u32>,
    /// By device, then by partition: partitions of a kind have the same models. One kind where nothing is placed or divided.
    kinds: Vec<Vec<DeviceKind>>,
}

/// The devices of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placed {
    /// Ascending.
    devices: Arc<[usize]>,
    /// Which of theirs; the first where they are not divided.
    partition: PartitionId,
    /// The kinds of these partitions; `None`: all, those to come too.
    kinds: Option<Arc<[DeviceKind]>>,
}

impl Placement {
    /// The placement on `devices` devices of so many partitions each, which are these GPUs if they are GPUs, with what was [`chosen`]. `known` are the models that there are: where they are
    /// to be decides which devices the scheduler tells apart; each partition has models of its own.
    ///
    /// # Errors
    /// If there come to be more kinds than are supported.
    pub fn new(
        chosen: BTreeMap<String, Vec<usize>>,
        devices: usize,
        gpus: &[u32],
        known: &[ModelDefinition],
        partitions: usize,
    ) -> anyhow::Result<Self> {
        let mut placement = Placement { chosen, gpus: gpus.to_vec(), kinds: Vec::new() };
        let sets: Vec<Vec<usize>> = known.iter().filter_map(|model| placement.devices(model)).collect();
        let others = placement.chosen.values().cloned();
        placement.kinds = kinds(devices, partitions, &sets.into_iter().chain(others).collect::<Vec<_>>())?;
        Ok(placement)
    }

    /// By device: the kind of each of its partitions.
    pub fn kinds(&self) -> &[Vec<DeviceKind>] {
        &self.kinds
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

    /// Where a model is, of `all` devices that there are now, on their `partition` if they are divided. `by_scheduler`: the scheduler makes its batches.
    ///
    /// # Errors
    /// If the scheduler does not tell these devices from others.
    pub fn of(
        &self,
        model: &ModelDefinition,
        partition: Option<usize>,
        by_scheduler: bool,
        all: usize,
    ) -> anyhow::Result<Placed> {
        let devices = match (self.devices(model), partition) {
            (Some(devices), _) => devices,
            (None, Some(_)) => (0..all).collect(),
            (None, None) => return Ok(Placed::everywhere(all)),
        };
        let partition = partition.unwrap_or(0);
        let kind = |device: usize| self.kinds.get(device)?.get(partition).copied();
        let mut kinds: Vec<DeviceKind> = devices.iter().filter_map(|device| kind(*device)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut others = (0..self.kinds.len()).filter_map(|device| Some((device, kind(device)?)));
        let cut = others.find(|(device, kind)| kinds.contains(kind) && !devices.contains(device));
        if let Some((other, _)) = cut.filter(|_| by_scheduler) {
            bail!(
                "it is to be on {}, and not on device {other}: the server was started with the same models on all of these, and its scheduler does not tell them apart. Start it again, or \
                 give the model a device policy",
                listed(&devices)
            );
        }
        let partition = PartitionId(partition as u32);
        Ok(Placed { devices: devices.into(), partition, kinds: Some(kinds.into()) })
    }
}

impl Placed {
    /// On all of so many devices.
    pub fn everywhere(devices: usize) -> Self {
        Placed { devices: (0..devices).collect(), partition: PartitionId::default(), kinds: None }
    }

    /// Its devices, ascending, of those that there were when it was loaded.
    pub fn devices(&self) -> &[usize] {
        &self.devices
    }

    /// Which partition of each of them.
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// What the scheduler plans with of a model that takes so long wherever it is.
    pub fn profiles(&self, profile: LatencyProfile) -> DeviceProfiles {
        let by_kind = |kinds: &Arc<[DeviceKind]>| kinds.iter().map(|kind| (*kind, profile.clone())).collect::<Vec<_>>();
        let kept = self.kinds.as_ref().and_then(|kinds| DeviceProfiles::by_kind(by_kind(kinds)).ok());
        kept.unwrap_or_else(|| profile.into())
    }
}

/// How many devices the options name, where nobody says how many there are to be; 0: none.
pub fn devices_named(options: &ServerOptions) -> usize {
    let placed = options.placement.values().flatten().max().map_or(0, |last| last + 1);
    let planned = options.plan.iter().flat_map(|plan| &plan.sub_clusters).map(least_devices).sum();
    placed.max(planned).min(MOST_DEVICES)
}

/// The devices of each model that the options keep to some of `devices`. `names` are the models of the repositories.
///
/// # Errors
/// If a model is put on no device or one that there is not; if the plan is for other models, or has more sub-clusters than there are devices.
pub fn chosen(
    options: &ServerOptions,
    devices: usize,
    names: &[String],
) -> anyhow::Result<BTreeMap<String, Vec<usize>>> {
    let mut chosen = BTreeMap::new();
    for (model, on) in &options.placement {
        ensure!(!on.is_empty(), "[placement]: model '{model}' is on no device; leave it out to have it on all");
        if let Some(unknown) = on.iter().find(|device| **device >= devices) {
            bail!("[placement]: model '{model}' is to be on device {unknown}, and {}", there_are(devices));
        }
        chosen.insert(model.clone(), on.clone());
    }
    let Some(plan) = &options.plan else { return Ok(chosen) };
    let models = plan.sub_clusters.iter().flat_map(|sub_cluster| &sub_cluster.models);
    let unknown: Vec<&str> = models.filter(|model| !names.contains(model)).map(String::as_str).collect();
    if !unknown.is_empty() {
        bail!("the plan is for other models: the repository has no {}", unknown.join(", "));
    }
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
            "not in the plan, and so on every device unless their configuration says otherwise: {}",
            rest.join(", ")
        );
    }
    Ok(chosen)
}

/// The devices that a sub-cluster needs at least; one without models needs none.
fn least_devices(sub_cluster: &PlannedSubCluster) -> usize {
    if sub_cluster.models.is_empty() { 0 } else { (sub_cluster.devices_needed.ceil() as usize).clamp(1, MOST_DEVICES) }
}

/// The devices of each sub-cluster of a plan: all, in the order of the sub-clusters, each with one at least, and the rest to whoever needs it most.
///
/// # Errors
/// If there are not so many.
fn shares(plan: &PlacementPlan, devices: usize) -> anyhow::Result<Vec<Vec<usize>>> {
    let mut counts: Vec<usize> = plan.sub_clusters.iter().map(|planned| least_devices(planned).min(1)).collect();
    let at_least: usize = counts.iter().sum();
    ensure!(
        at_least <= devices,
        "the plan has {at_least} sub-clusters with models, and {}; plan for as many sub-clusters as there are devices, or fewer",
        there_are(devices)
    );
    for _ in at_least..devices {
        // What each of its devices has to do: the most, of those the one with the fewest.
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

/// Kinds of the partitions of devices, so that one partition of each of `sets` is all partitions of some kinds.
///
/// # Errors
/// If there are more than are supported.
fn kinds(devices: usize, partitions: usize, sets: &[Vec<usize>]) -> anyhow::Result<Vec<Vec<DeviceKind>>> {
    let mut known: Vec<(usize, Vec<bool>)> = Vec::new();
    let mut kind = |device: usize, partition: usize| {
        let has = (partition, sets.iter().map(|set| set.contains(&device)).collect());
        let kind = known.iter().position(|other| *other == has).unwrap_or_else(|| {
            known.push(has);
            known.len() - 1
        });
        DeviceKind(kind as u32)
    };
    let kinds = (0..devices).map(|device| (0..partitions).map(|partition| kind(device, partition)).collect()).collect();
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
        "the models are placed so that the {each} of {} kinds, each with other models; at most {most} are supported: {remedy}",
        known.len()
    );
    Ok(kinds)
}

/// How many devices there are, in words.
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
    fn a_plan_gives_each_sub_cluster_devices_of_its_own_and_wins_over_the_file() {
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
        let error = planned(vec![sub_cluster(&["a", "x"], 1.0), sub_cluster(&["y"], 1.0)], 2).unwrap_err();
        assert_eq!(error, "the plan is for other models: the repository has no x, y");
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
            kinds(devices, 1, &sets).unwrap().into_iter().flatten().map(|kind| kind.0).collect::<Vec<_>>()
        };
        assert_eq!(of(3, &[]), [0, 0, 0]);
        assert_eq!(of(2, &[&[0, 1], &[1, 0]]), [0, 0], "on all");
        assert_eq!(of(4, &[&[0, 1], &[2, 3], &[0, 1, 2, 3]]), [0, 0, 1, 1]);
        assert_eq!(of(4, &[&[0, 1], &[1, 2]]), [0, 1, 2, 3]);
        let alone: Vec<Vec<usize>> = (0..65).map(|device| vec![device]).collect();
        let error = kinds(65, 1, &alone).unwrap_err().to_string();
        assert!(error.contains("65 kinds") && error.contains("at most 64"), "{error}");
    }

    #[test]
    fn each_partition_is_of_a_kind_of_its_own_on_whichever_devices() {
        let of = |devices, partitions, sets: &[Vec<usize>]| {
            let by_device = kinds(devices, partitions, sets).unwrap().into_iter();
            by_device.map(|device| device.into_iter().map(|kind| kind.0).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(of(1, 3, &[]), [[0, 1, 2]]);
        assert_eq!(of(2, 2, &[]), [[0, 1], [0, 1]], "devices are divided alike");
        assert_eq!(of(3, 2, &[vec![1]]), [[0, 1], [2, 3], [0, 1]]);
        let alone: Vec<Vec<usize>> = (0..33).map(|device| vec![device]).collect();
        let error = kinds(33, 2, &alone).unwrap_err().to_string();
        assert!(error.contains("partitions are of 66 kinds") && error.contains("fewer partitions"), "{error}");
    }
}
