//! Brings a device policy into service for a loaded model: checks that it can, measures, starts its lanes.

use std::sync::Arc;

use anyhow::{bail, ensure};
use downbeat_core::device::{
    ElasticOptions, GrantedOptions, LaneSpec, MixTable, ModelSpec, PartitionId, SegmentProfile, StagedOptions,
    WindowedOptions,
};
use downbeat_core::{Duration, LatencyProfile, ModelId};
use downbeat_engine::{Cut, Lane, Model, Place, Share, State};

use super::device_host::DeviceHost;
use super::exits::Exit;
use super::hosted_model::{EngineLanes, HostedModel, WarmUpLanes};
use super::hosted_version::HostedVersion;
use super::input_rings::InputRings;
use super::metrics::LaneMetricsFamily;
use super::padding::Padding;
use super::padding_check;
use super::padding_watch::{self, Looker, PaddingWatch};
use super::tensors::BatchTensors;
use crate::clock::Clock;
use crate::model_health::ModelHealth;
use crate::options::{DevicePolicy, DeviceSettings};
use crate::plan::BatchPlan;

/// Slots of a ring for each item that runs at once, where nobody says: "several times" (E²bird §5.1).
const SLOTS_AN_ITEM: u32 = 4;
/// Pairs of buffers, where nobody says (DVABatch §8.6).
const BUFFER_PAIRS: u16 = 2;
/// Stages, where nobody says.
const STAGES: usize = 4;
/// About how long requests of ever greater lengths are tried padded, at load.
const PADDING_BUDGET: Duration = Duration::from_millis(5_000);
/// Largest number of lanes.
const MOST_LANES: usize = 256;

/// Why a device policy cannot have a model that can be served otherwise.
#[derive(Debug, thiserror::Error)]
#[error("the device policy '{policy}' cannot have this model: {reason}")]
pub struct PolicyError {
    /// The policy.
    pub policy: DevicePolicy,
    /// What is in the way and what to do.
    pub reason: String,
}

/// A loaded model, and what it is to run on.
pub struct LaneSetup<'a> {
    /// The devices' name for the model.
    pub id: ModelId,
    /// Model name.
    pub name: &'a str,
    /// Its version.
    pub version: &'a str,
    /// The model.
    pub model: &'a Arc<dyn Model>,
    /// How its batches are made.
    pub plan: Arc<BatchPlan>,
    /// What its batches take, of the length that it was measured with where requests vary.
    pub profile: LatencyProfile,
    /// What the policies decide by.
    pub segments: SegmentProfile,
    /// Which policy.
    pub policy: DevicePolicy,
    /// How.
    pub settings: &'a DeviceSettings,
    /// The configuration's `max_queue_delay_microseconds`.
    pub queue_delay: Duration,
    /// Whether requests that cannot make their deadline are given up.
    pub drop: bool,
    /// The most items that wait, each device.
    pub queue_bound: u32,
    /// Where to count.
    pub metrics: &'a LaneMetricsFamily,
    /// The devices that it is to be on.
    pub hosts: &'a [Arc<DeviceHost>],
    /// Which partition of each.
    pub partition: PartitionId,
    /// Runs lanes for the first time that are made later.
    pub warm_up: WarmUpLanes,
}

/// How requests of different lengths share batches, if they do.
///
/// # Errors
/// Why a model cannot have a device policy, in words with what to do.
pub fn padding(
    plan: &BatchPlan,
    policy: DevicePolicy,
    settings: &DeviceSettings,
) -> anyhow::Result<Option<Arc<Padding>>> {
    ensure!(
        plan.is_batched(),
        "the device policy '{policy}' makes batches, and the model has no batch dimension (max_batch_size is 0); use the policy exclusive"
    );
    if !settings.pad {
        ensure!(
            !plan.has_varying_shapes(),
            "requests vary in shape, and the device policy '{policy}' puts all requests into the same batches; give `pad = true` where the model's answers \
             do not change when its inputs are padded with zeros, or use the policy exclusive, which keeps shapes apart"
        );
        return Ok(None);
    }
    let padding = Padding::new(plan, settings.max_length).map_err(|reason| anyhow::anyhow!("`pad`: {reason}"))?;
    Ok(Some(Arc::new(padding)))
}

/// Checks, on a device, that a model's answers do not change when its inputs are padded.
///
/// # Errors
/// If they do, or the model cannot run what it is asked with.
pub fn check_padding(
    plan: &BatchPlan,
    padding: &Padding,
    model: &dyn Model,
    device: usize,
    clock: Clock,
) -> anyhow::Result<()> {
    let mut lane = model.lane_at(Place { device, share: Share::Whole })?;
    let end = clock.now() + PADDING_BUDGET;
    let mut run = |state: State| -> Result<State, String> {
        let mut state = state;
        lane.run(0..model.segments(), &mut state).map_err(|error| error.to_string())?;
        Ok(state)
    };
    padding_check::check(plan, padding, &|| clock.now() < end, &mut run)
        .map_err(|reason| anyhow::anyhow!("`pad`: {reason}"))
}

/// The lanes of the elastic policy: which under which load, and how many items at once.
///
/// # Errors
/// If they do not suit the model.
pub fn mixes(settings: &DeviceSettings, max_batch: u32) -> anyhow::Result<(MixTable, u32)> {
    let largest = 1u32 << max_batch.max(1).ilog2();
    let naive = || MixTable::naive(settings.max_running.unwrap_or(largest.saturating_mul(2)));
    let mixes = settings.mixes.clone().unwrap_or_else(naive);
    for (load, mix) in mixes.entries() {
        ensure!(
            mix.count(1) > 0,
            "mixes: the lanes for a load of {load} ({mix}) have none for one item; add a lane of 1"
        );
    }
    let all = mixes.union();
    let most = all.sizes().max().unwrap_or(1);
    ensure!(
        max_batch > 1 || settings.mixes.is_none(),
        "mixes: the model takes one item at a time (max_batch_size is 1), so that there is no mix of batch sizes to choose; leave mixes out"
    );
    ensure!(
        most <= max_batch,
        "mixes: a lane of {most} items is larger than the model's largest batch of {max_batch}; leave it out, lower max_running, or raise max_batch_size"
    );
    let lanes = all.sizes().count();
    ensure!(lanes <= MOST_LANES, "mixes: {lanes} lanes are more than the {MOST_LANES} that a device may have");
    let total = mixes.entries().iter().map(|(_, mix)| mix.total()).max().unwrap_or(1);
    let max_running = settings.max_running.unwrap_or(total);
    ensure!(
        max_running >= most,
        "max_running of {max_running} is less than the largest lane of {most} items, which could never run; raise it or leave that lane out"
    );
    Ok((mixes, max_running))
}

/// The largest request that a policy takes, of a model that could take batches of `max_batch`.
///
/// # Errors
/// If its settings do not suit the model.
pub fn largest_request(policy: DevicePolicy, settings: &DeviceSettings, max_batch: u32) -> anyhow::Result<u32> {
    if policy != DevicePolicy::Elastic {
        return Ok(max_batch);
    }
    let (mixes, max_running) = mixes(settings, max_batch)?;
    Ok(mixes.union().sizes().max().unwrap_or(1).min(max_running))
}

/// The engine's lanes of a model whose batches the scheduler makes.
pub enum LanesWanted {
    /// One on each device, of which the one on a device may be there before.
    EachDevice(Option<(usize, Box<dyn Lane>)>),
    /// So many for all devices, which are alike: no more of its batches run at once.
    AnyDevice(usize),
}

/// A version on some of its devices. If it cannot be on all, those forget it again.
struct Started<'a> {
    setup: LaneSetup<'a>,
    health: Arc<ModelHealth>,
    devices: Vec<(Arc<DeviceHost>, Arc<HostedModel>)>,
}

impl<'a> Started<'a> {
    fn new(setup: LaneSetup<'a>) -> Self {
        let health = Arc::new(ModelHealth::new(setup.name.to_owned(), setup.version.to_owned()));
        Started { setup, health, devices: Vec::new() }
    }

    /// Brings the model onto a device.
    fn add(
        &mut self,
        host: &Arc<DeviceHost>,
        tensors: BatchTensors,
        exits: Arc<[Exit]>,
        engines: Arc<EngineLanes>,
        policy: ModelSpec,
        own: Vec<Box<dyn Lane>>,
    ) -> std::io::Result<()> {
        let (setup, device) = (&self.setup, host.device());
        let model = Arc::new(HostedModel {
            id: setup.id,
            name: setup.name.to_owned(),
            version: setup.version.to_owned(),
            model: setup.model.clone(),
            device,
            partition: setup.partition,
            policy_name: setup.policy.name(),
            tensors,
            profile: setup.profile.clone(),
            exits,
            metrics: setup.metrics.lanes(setup.name, setup.version, device),
            health: self.health.clone(),
            engines,
            warm_up: setup.warm_up.clone(),
        });
        host.add_model(model.clone(), policy.named(format!("{} {}", setup.name, setup.version)), own)?;
        self.devices.push((host.clone(), model));
        Ok(())
    }

    fn finish(mut self, is_routed: bool, padding: Option<Arc<Padding>>) -> HostedVersion {
        HostedVersion::new(std::mem::take(&mut self.devices), is_routed, padding)
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        self.devices.iter().for_each(|(host, model)| host.remove_model(model));
    }
}

/// Brings a model version whose batches the scheduler makes onto all devices, once `warm_up` has run its lanes.
///
/// # Errors
/// If the engine has no memory for a lane; what `warm_up` says.
pub fn start_granted(
    setup: LaneSetup<'_>,
    lanes: LanesWanted,
    mut warm_up: impl FnMut(usize, &mut dyn Lane) -> anyhow::Result<()>,
) -> anyhow::Result<HostedVersion> {
    let mut started = Started::new(setup);
    let LaneSetup { model, hosts, .. } = started.setup;
    let (plan, profile) = (started.setup.plan.clone(), started.setup.segments.clone());
    let policy = ModelSpec::new(&GrantedOptions { profile }, started.setup.partition);
    let mut add = |host: &Arc<DeviceHost>, engines: Arc<EngineLanes>| {
        let tensors = BatchTensors { plan: plan.clone(), rings: None, padding: None, watch: None };
        started.add(host, tensors, [].into(), engines, policy.clone(), Vec::new())
    };
    match lanes {
        LanesWanted::EachDevice(mut first) => {
            for host in hosts {
                let device = host.device();
                let mut lanes = Vec::new();
                if model.lost(device).is_none() {
                    let mut lane = match first.take_if(|(on, _)| *on == device) {
                        Some((_, lane)) => lane,
                        None => model.lane_at(Place { device, share: Share::Whole })?,
                    };
                    warm_up(device, &mut *lane)?;
                    lanes.push(lane);
                }
                add(host, Arc::new(EngineLanes::new(lanes)))?;
            }
        }
        LanesWanted::AnyDevice(count) => {
            let mut lanes = (0..count).map(|_| model.lane()).collect::<Result<Vec<_>, _>>()?;
            lanes.iter_mut().try_for_each(|lane| warm_up(0, &mut **lane))?;
            let lanes = Arc::new(EngineLanes::new(lanes));
            hosts.iter().try_for_each(|host| add(host, lanes.clone()))?;
        }
    }
    Ok(started.finish(false, None))
}

/// Brings a model version with a policy that makes its batches onto every device that works, once `warm_up` has run its lanes there.
///
/// # Errors
/// A [`PolicyError`] if the policy cannot have this model; what `warm_up` says.
pub fn start(
    setup: LaneSetup<'_>,
    padding: Option<Arc<Padding>>,
    mut warm_up: impl FnMut(usize, &[LaneSpec], &mut [Box<dyn Lane>]) -> anyhow::Result<()>,
) -> anyhow::Result<HostedVersion> {
    let mut started = Started::new(setup);
    let (policy_name, model, settings) = (started.setup.policy, started.setup.model, started.setup.settings);
    let refuses = |reason: String| PolicyError { policy: policy_name, reason };
    if !settings.exits.is_empty() && policy_name != DevicePolicy::Staged {
        let reason = "exits: a request runs through the whole model with it; use the policy staged";
        bail!(refuses(reason.to_owned()));
    }
    let exit = |rule| Exit::new(&**model, rule).map_err(refuses);
    let exits: Arc<[Exit]> = settings.exits.iter().map(exit).collect::<Result<_, _>>()?;
    let every = settings.pad_check_every.unwrap_or(padding_watch::EVERY);
    let watch = |padding: &Arc<Padding>| {
        let LaneSetup { name, version, plan, metrics, .. } = &started.setup;
        let looker = Looker {
            model: (*name).to_owned(),
            version: (*version).to_owned(),
            plan: plan.clone(),
            padding: padding.clone(),
            results: metrics.padding_checks(name, version),
        };
        let mut devices = started.setup.hosts.iter().map(|host| host.device());
        let device = devices.find(|device| model.lost(*device).is_none()).unwrap_or(0);
        let lane = model.lane_at(Place { device, share: Share::Whole })?;
        PaddingWatch::start(looker, lane, model.segments(), every).map(Arc::new)
    };
    let watch = padding.as_ref().filter(|_| every > 0).map(watch).transpose()?;
    for host in started.setup.hosts.iter().filter(|host| model.lost(host.device()).is_none()) {
        let (setup, device) = (&started.setup, host.device());
        let (policy, rings) = policy(setup, device, padding.as_deref()).map_err(|error| refuses(error.to_string()))?;
        let built = policy.build().map_err(|error| refuses(error.to_string()))?;
        let lanes = built.policy.lanes(setup.partition);
        let place = Place { device, share: Share::Whole };
        let mut engines = lanes.iter().map(|_| model.lane_at(place)).collect::<Result<Vec<_>, _>>()?;
        warm_up(device, &lanes, &mut engines)?;
        let tensors = BatchTensors { plan: setup.plan.clone(), rings, padding: padding.clone(), watch: watch.clone() };
        started.add(host, tensors, exits.clone(), Arc::default(), policy, engines)?;
    }
    let lost = started.setup.hosts.iter().find_map(|host| model.lost(host.device()));
    ensure!(!started.devices.is_empty(), "all of its devices are lost: {}", lost.unwrap_or_default());
    Ok(started.finish(true, padding))
}

/// The ring of a model that is cut into stages: none where requests vary, or where it is too large and nobody asked for one.
fn staged_rings(setup: &LaneSetup<'_>, device: usize, padding: Option<&Padding>) -> anyhow::Result<Option<InputRings>> {
    let max_batch = setup.plan.max_batch();
    let Some(least) = setup.settings.ring_slots else {
        let least = max_batch.saturating_mul(SLOTS_AN_ITEM);
        return Ok(padding
            .is_none()
            .then(|| InputRings::new(&**setup.model, device, &setup.plan, None, least).ok())
            .flatten());
    };
    ensure!(
        padding.is_none(),
        "ring_slots: requests of a padded model have no slots in a ring with the policy staged, which pads each batch to its own longest; leave it out"
    );
    ensure!(
        least >= max_batch,
        "an input ring of {least} slots is too small: the largest request has {max_batch} items; ring_slots must be at least {max_batch}"
    );
    InputRings::new(&**setup.model, device, &setup.plan, None, least).map(Some).map_err(anyhow::Error::msg)
}

/// Where the policy cuts a model, and whether somebody asked for just that.
pub fn cut(policy: DevicePolicy, settings: &DeviceSettings) -> (Cut, bool) {
    if policy != DevicePolicy::Staged {
        return (Cut::Whole, true);
    }
    match settings.stages {
        _ if !settings.cut_at.is_empty() => (Cut::At(settings.cut_at.clone()), true),
        Some(1) => (Cut::Whole, true),
        Some(stages) => (Cut::Stages(usize::from(stages)), true),
        None => (Cut::Stages(STAGES), false),
    }
}

/// How many lanes of a device run at once when there is enough to do: they share its cores.
pub fn at_once(policy: DevicePolicy, settings: &DeviceSettings) -> usize {
    let stages = if settings.cut_at.is_empty() {
        usize::from(settings.stages.unwrap_or(STAGES as u16))
    } else {
        settings.cut_at.len() + 1
    };
    match policy {
        DevicePolicy::Exclusive | DevicePolicy::Windowed => 1,
        DevicePolicy::Staged => stages.min(usize::from(settings.buffer_pairs.unwrap_or(BUFFER_PAIRS))),
        // More than any machine has cores: each lane has one.
        DevicePolicy::Elastic => MOST_LANES,
    }
}

/// A policy, and the ring that its requests enter.
fn policy(
    setup: &LaneSetup<'_>,
    device: usize,
    padding: Option<&Padding>,
) -> anyhow::Result<(ModelSpec, Option<InputRings>)> {
    let (settings, max_batch) = (setup.settings, setup.plan.max_batch());
    let (drop, queue_bound, profile) = (setup.drop, setup.queue_bound, setup.segments.clone());
    match setup.policy {
        DevicePolicy::Exclusive => bail!("the policy exclusive has no lanes"),
        DevicePolicy::Windowed => {
            let window = settings.window.unwrap_or(setup.queue_delay);
            let fill = settings.fill;
            let options = WindowedOptions { profile, max_batch, window, fill, drop, queue_bound };
            Ok((ModelSpec::new(&options, setup.partition), None))
        }
        DevicePolicy::Elastic => {
            let (mixes, max_running) = mixes(settings, max_batch)?;
            let least = settings.ring_slots.unwrap_or(max_running.saturating_mul(SLOTS_AN_ITEM));
            ensure!(
                least >= max_running.max(max_batch),
                "an input ring of {least} slots is too small: the largest request has {max_batch} items and {max_running} run at once; ring_slots must be at \
                 least {}",
                max_running.max(max_batch)
            );
            let rings =
                InputRings::new(&**setup.model, device, &setup.plan, padding, least).map_err(anyhow::Error::msg)?;
            let ring_slots = rings.slots();
            let options = ElasticOptions { profile, mixes, max_running, ring_slots, drop, queue_bound };
            Ok((ModelSpec::new(&options, setup.partition), Some(rings)))
        }
        DevicePolicy::Staged => {
            let pairs = settings.buffer_pairs.unwrap_or(BUFFER_PAIRS);
            let varies = padding.is_some();
            let by_length = settings.lengths.unwrap_or(varies);
            let by_operator = settings.operators.unwrap_or(true);
            let by_load = settings.load.unwrap_or(!varies);
            let rings = staged_rings(setup, device, padding)?;
            let options = StagedOptions {
                profile,
                pairs,
                max_batch,
                by_length,
                by_operator,
                by_load,
                window: Some(settings.window.unwrap_or(Duration::ZERO)),
                comp_wait: settings.comp_wait,
                ring_slots: rings.as_ref().map_or(0, InputRings::slots),
                drop,
                queue_bound,
            };
            Ok((ModelSpec::new(&options, setup.partition), rings))
        }
    }
}
